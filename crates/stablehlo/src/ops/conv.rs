//! Convolutions with any number of spatial dimensions.

use crate::builder::{Builder, Value};
use crate::types::{Type, list};

/// Parameters of a convolution. The input has the dimensions `[batch, channels, spatial…]` and the kernel `[out, in /
/// groups, spatial…]`, the order used in checkpoints.
#[derive(Clone, Debug)]
pub struct Conv {
    /// Stride of each spatial dimension.
    pub stride: Vec<usize>,
    /// Zero padding before and after each spatial dimension.
    pub padding: Vec<(usize, usize)>,
    /// Kernel dilation of each spatial dimension.
    pub dilation: Vec<usize>,
    /// Number of groups into which the channels are split.
    pub groups: usize,
}

impl Conv {
    /// Returns the parameters for `spatial` spatial dimensions with stride 1, no padding, no dilation and one group.
    pub fn new(spatial: usize) -> Self {
        Conv { stride: vec![1; spatial], padding: vec![(0, 0); spatial], dilation: vec![1; spatial], groups: 1 }
    }

    /// Sets the zero padding before and after each spatial dimension.
    pub fn padding(mut self, padding: &[(usize, usize)]) -> Self {
        self.padding = padding.to_vec();
        self
    }

    /// Sets the stride of each spatial dimension.
    pub fn stride(mut self, stride: &[usize]) -> Self {
        self.stride = stride.to_vec();
        self
    }

    /// Sets the kernel dilation of each spatial dimension.
    pub fn dilation(mut self, dilation: &[usize]) -> Self {
        self.dilation = dilation.to_vec();
        self
    }

    /// Sets the number of groups into which the channels are split.
    pub fn groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }
}

impl Builder {
    /// Convolves `x [b, c, spatial…]` with `kernel [o, c / groups, spatial…]`.
    pub fn convolution(&self, x: &Value, kernel: &Value, conv: &Conv) -> Value {
        let n = conv.stride.len();
        let fits = x.rank() == n + 2
            && kernel.rank() == n + 2
            && x.dtype() == kernel.dtype()
            && conv.padding.len() == n
            && conv.dilation.len() == n;
        if !fits {
            let message = format!(
                "operand {} and kernel {} do not fit a convolution with {n} spatial dimensions",
                x.ty, kernel.ty
            );
            return self.poison("convolution", message, x.ty.clone());
        }
        let (k, groups) = (&kernel.ty.dims, conv.groups);
        if k[1] * groups != x.ty.dims[1] || k[0] % groups != 0 {
            let message =
                format!("the channels of operand {} and kernel {} do not match for {groups} groups", x.ty, kernel.ty);
            return self.poison("convolution", message, x.ty.clone());
        }
        let mut dims = vec![x.ty.dims[0], k[0]];
        for i in 0..n {
            let padded = x.ty.dims[i + 2] + conv.padding[i].0 + conv.padding[i].1;
            let reach = (k[i + 2] - 1) * conv.dilation[i] + 1;
            if padded < reach {
                let message = format!("kernel {} is larger than {} along spatial dimension {i}", kernel.ty, x.ty);
                return self.poison("convolution", message, x.ty.clone());
            }
            dims.push((padded - reach) / conv.stride[i] + 1);
        }
        let ty = Type::new(x.dtype(), dims);
        let spatial = list(0..n);
        let pads = list(conv.padding.iter().map(|(a, b)| format!("[{a}, {b}]")));
        let p = self.precision().name();
        let text = format!(
            "stablehlo.convolution({}, {}) dim_numbers = [b, f, {spatial}]x[o, i, {spatial}]->[b, f, {spatial}], \
             window = {{stride = [{}], pad = [{pads}], lhs_dilate = [{}], rhs_dilate = [{}], reverse = [{}]}} \
             {{batch_group_count = 1 : i64, feature_group_count = {groups} : i64, \
             precision_config = [#stablehlo<precision {p}>, #stablehlo<precision {p}>]}} : ({}, {}) -> {ty}",
            x.local(),
            kernel.local(),
            list(&conv.stride),
            list(vec![1; n]),
            list(&conv.dilation),
            list(vec![false; n]),
            x.ty,
            kernel.ty,
        );
        self.op("convolution", text, ty)
    }
}
