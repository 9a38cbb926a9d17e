//! Convolutions over any number of spatial dimensions.

use crate::hlo::builder::{Builder, Value};
use crate::hlo::types::{Type, list};

/// A convolution of `[batch, channels, spatial…]` with a kernel `[out, in / groups, spatial…]` (or `[in, out, …]`
/// when transposed), the orders checkpoints store.
#[derive(Clone, Debug)]
pub struct Conv {
    /// Window step for each spatial dimension.
    pub stride: Vec<usize>,
    /// Zero padding before and after for each spatial dimension.
    pub padding: Vec<(usize, usize)>,
    /// Distance between kernel taps for each spatial dimension.
    pub dilation: Vec<usize>,
    /// Channel groups.
    pub groups: usize,
}

impl Conv {
    /// Stride 1, no padding, no dilation, one group.
    pub fn new(spatial: usize) -> Self {
        Conv { stride: vec![1; spatial], padding: vec![(0, 0); spatial], dilation: vec![1; spatial], groups: 1 }
    }

    /// Zero padding, before and after each dimension.
    pub fn padding(mut self, padding: &[(usize, usize)]) -> Self {
        self.padding = padding.to_vec();
        self
    }

    /// Window steps.
    pub fn stride(mut self, stride: &[usize]) -> Self {
        self.stride = stride.to_vec();
        self
    }

    /// Distances between taps.
    pub fn dilation(mut self, dilation: &[usize]) -> Self {
        self.dilation = dilation.to_vec();
        self
    }

    /// Channel groups.
    pub fn groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }
}

/// What the printed operation needs beside the operands.
struct Window {
    stride: Vec<usize>,
    padding: Vec<(i64, i64)>,
    lhs_dilation: Vec<usize>,
    rhs_dilation: Vec<usize>,
    reverse: bool,
    kernel_order: &'static str,
    groups: usize,
}

impl Builder {
    /// Convolves `x [b, c, spatial…]` with `kernel [o, c / groups, spatial…]`.
    pub fn convolution(&self, x: &Value, kernel: &Value, conv: &Conv) -> Value {
        if let Some(bad) = self.check("convolution", x, kernel, conv) {
            return bad;
        }
        let (k, groups) = (&kernel.ty.dims, conv.groups);
        if k[1] * groups != x.ty.dims[1] || k[0] % groups != 0 {
            let message = format!("channels do not fit: {} with kernel {} in {groups} groups", x.ty, kernel.ty);
            return self.poison("convolution", message, x.ty.clone());
        }
        let mut dims = vec![x.ty.dims[0], k[0]];
        for i in 0..conv.stride.len() {
            let padded = x.ty.dims[i + 2] + conv.padding[i].0 + conv.padding[i].1;
            let reach = (k[i + 2] - 1) * conv.dilation[i] + 1;
            if padded < reach {
                let message = format!("kernel {} reaches beyond {} along spatial dimension {i}", kernel.ty, x.ty);
                return self.poison("convolution", message, x.ty.clone());
            }
            dims.push((padded - reach) / conv.stride[i] + 1);
        }
        let window = Window {
            stride: conv.stride.clone(),
            padding: conv.padding.iter().map(|&(a, b)| (a as i64, b as i64)).collect(),
            lhs_dilation: vec![1; conv.stride.len()],
            rhs_dilation: conv.dilation.clone(),
            reverse: false,
            kernel_order: "oi",
            groups,
        };
        self.emit_convolution(x, kernel, &window, Type::new(x.dtype(), dims))
    }

    /// The transposed convolution of `x [b, c, spatial…]` with `kernel [c, o, spatial…]`: `conv.stride` spreads the
    /// input, `conv.padding` crops the result as in PyTorch.
    pub fn transposed_convolution(&self, x: &Value, kernel: &Value, conv: &Conv) -> Value {
        if let Some(bad) = self.check("transposed convolution", x, kernel, conv) {
            return bad;
        }
        let k = &kernel.ty.dims;
        if k[0] != x.ty.dims[1] || conv.groups != 1 {
            let message = format!("channels do not fit: {} with kernel {} in {} groups", x.ty, kernel.ty, conv.groups);
            return self.poison("convolution", message, x.ty.clone());
        }
        let mut dims = vec![x.ty.dims[0], k[1]];
        let mut padding = Vec::new();
        for i in 0..conv.stride.len() {
            let reach = (k[i + 2] - 1) * conv.dilation[i] + 1;
            let (low, high) = conv.padding[i];
            padding.push((reach as i64 - 1 - low as i64, reach as i64 - 1 - high as i64));
            let full = (x.ty.dims[i + 2] - 1) * conv.stride[i] + reach;
            if full <= low + high {
                let message = format!("cropping {low} and {high} leaves nothing of {full}");
                return self.poison("convolution", message, x.ty.clone());
            }
            dims.push(full - low - high);
        }
        let window = Window {
            stride: vec![1; conv.stride.len()],
            padding,
            lhs_dilation: conv.stride.clone(),
            rhs_dilation: conv.dilation.clone(),
            reverse: true,
            kernel_order: "io",
            groups: 1,
        };
        self.emit_convolution(x, kernel, &window, Type::new(x.dtype(), dims))
    }

    fn check(&self, what: &str, x: &Value, kernel: &Value, conv: &Conv) -> Option<Value> {
        let n = conv.stride.len();
        let fits = x.rank() == n + 2
            && kernel.rank() == n + 2
            && x.dtype() == kernel.dtype()
            && conv.padding.len() == n
            && conv.dilation.len() == n;
        (!fits).then(|| {
            let message = format!("{what} over {n} dimensions of {} with kernel {}", x.ty, kernel.ty);
            self.poison("convolution", message, x.ty.clone())
        })
    }

    fn emit_convolution(&self, x: &Value, kernel: &Value, w: &Window, ty: Type) -> Value {
        let spatial = list(0..w.stride.len());
        let (ko, ki) = w.kernel_order.split_at(1);
        let pads = list(w.padding.iter().map(|(a, b)| format!("[{a}, {b}]")));
        let reverse = list(w.stride.iter().map(|_| w.reverse));
        let p = self.precision().name();
        let text = format!(
            "stablehlo.convolution({}, {}) dim_numbers = [b, f, {spatial}]x[{ko}, {ki}, {spatial}]->[b, f, {spatial}], \
             window = {{stride = [{}], pad = [{pads}], lhs_dilate = [{}], rhs_dilate = [{}], reverse = [{reverse}]}} \
             {{batch_group_count = 1 : i64, feature_group_count = {} : i64, \
             precision_config = [#stablehlo<precision {p}>, #stablehlo<precision {p}>]}} : ({}, {}) -> {ty}",
            x.local(),
            kernel.local(),
            list(&w.stride),
            list(&w.lhs_dilation),
            list(&w.rhs_dilation),
            w.groups,
            x.ty,
            kernel.ty,
        );
        self.op("convolution", text, ty)
    }
}
