//! Layers: what a network declares (parameters with logical axes) and what it computes with them.

mod attention;
mod attention_layer;
mod build;
mod context;
mod context_parallel;
mod conv;
mod fp8;
mod halo;
mod kv_stack;
mod layers;
mod layout;
mod linear;
mod norm;
mod param;
mod params;
pub mod rope;
mod sharded_video;

pub use attention::{Attention, Heads, MASK_VALUE, padding_mask};
pub use attention_layer::{AttentionLayer, Rope};
pub use build::{Build, Conv3dLowering, Lowering, Numerics, Quantization, RopeForm};
pub use context::Context;
pub use context_parallel::{ContextParallelKind, ContextParallelPolicy};
pub use conv::{Conv3d, conv_transpose1d, conv_transpose1d_at, conv1d, conv2d, depth_to_space};
pub use fp8::Weight;
pub use halo::{Padding, ShardedDim, SpatialShards};
pub use kv_stack::{KvStack, KvTensors};
pub use layers::{LayerTensor, PerLayer};
pub use layout::{Axis, Layout, LayoutError, Override, Rule};
pub use linear::{affine, gelu, gelu_tanh, gelu_tanh_of_product, linear, linear_into, linear_nd, project, silu};
pub use norm::{group_norm, layer_norm, pixel_norm, rms, rms_norm};
pub use param::{Init, Param, Placement, Role, Source};
pub use params::{Params, PartView};
pub use sharded_video::ShardedVideo;
