//! Neural network layers: they declare parameters with logical axes and build the computation.

#![warn(missing_docs)]

mod attention;
mod attention_layer;
mod build;
mod context;
mod context_parallel;
mod conv;
mod halo;
pub mod kernels;
mod kv_stack;
mod layer_kinds;
mod layers;
mod layout;
mod linear;
mod lora;
mod norm;
mod param;
mod params;
mod quantized;
pub mod rope;
mod sharded_video;

pub use attention::MASK_VALUE;
pub use attention::{Attention, Heads, padding_mask};
pub use attention_layer::AttentionLayer;
pub use attention_layer::Rope;
pub use build::RowProductForm;
pub use build::{Build, Conv3dLowering, Lowering, Quantization, ROTATED_INPUTS, RopeForm, RoundingPoints};
pub use build::{StackOrder, Streaming, WindowForm};
pub use context::Context;
pub use context_parallel::{ContextParallelKind, ContextParallelPolicy};
pub use conv::Conv3d;
pub use conv::{conv_transpose1d, conv_transpose1d_at, conv1d, conv2d, depth_to_space};
pub use halo::Padding;
pub use halo::{ShardedDim, SpatialShards};
pub use kv_stack::{KvStack, KvTensors};
pub use layer_kinds::KindLayer;
pub use layers::LayerTensor;
pub use layout::Override;
pub use layout::{Axis, Layout, LayoutError, Rule};
pub use linear::affine;
pub use linear::{gelu, gelu_tanh, gelu_tanh_of_product, linear, linear_into, linear_nd, project, silu};
pub use lora::{AddedLoras, LORA_DOWN, LORA_UP};
pub use norm::{group_norm, layer_norm, pixel_norm, rms};
pub use param::{Init, Role, Source};
pub use param::{Param, ValuePlacement};
pub use params::{Params, PartView};
pub use quantized::Weight;
pub use sharded_video::{ShardedOperand, ShardedVideo};
