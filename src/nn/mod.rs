//! Layers: what a network declares (parameters with logical axes) and what it computes with them.

mod attention;
mod build;
mod conv;
mod exchange;
mod fp8;
mod halo;
mod layers;
mod layout;
mod linear;
mod norm;
mod params;
mod pictures;
pub mod rope;

pub use attention::{Attention, Heads, hide_padding};
pub use build::{Build, Lowering, Quantization, RopeForm, StackOrder};
pub use conv::{Conv3d, Conv3dLowering, Padding, conv1d, conv2d, spread_conv1d, transposed_conv1d, unfold};
pub use fp8::Weight;
pub use halo::{Blocks, Side};
pub use layers::{LayerTensor, PerLayer};
pub use layout::{Axis, Exception, ExchangeKind, ExchangePolicy, Layout, LayoutError, RopeAt, Rule};
pub use linear::{affine, gelu, gelu_tanh, gelu_tanh_of_product, linear, linear_into, linear_nd, project, silu};
pub use norm::{group_norm, layer_norm, pixel_norm, rms, rms_norm};
pub use params::{Init, Numerics, Param, Params, Placement, Role, Source};
pub use pictures::Pictures;
