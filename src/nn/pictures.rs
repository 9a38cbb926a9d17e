//! Where the pictures of a convolutional network lie: whole, or a block of rows and columns on each device.

use super::halo::{Blocks, CUT, Side};
use super::layout::Axis;
use super::params::Params;
use crate::hlo::{DType, Sharding, Type, Value};

/// Frames are never cut: the first of a video is not treated as the others.
const AXES: [Axis; 5] = [Axis::Batch, Axis::Whole, Axis::Whole, Axis::Height, Axis::Width];

/// The pictures `[b, channels, frames, height, width]` that a network begins with.
pub struct Pictures {
    input: &'static str,
    /// The name that rules are looked up by.
    name: String,
    content: [usize; 5],
    ty: Type,
}

impl Pictures {
    /// Pictures of the sizes `content`, f32, as the input `input`, whose rules place them. A block's height and width are
    /// multiples of `unit`, so that every block of the network's result is of whole pixels: a size that does not divide
    /// so is filled up, and noted.
    pub fn new(p: &Params, input: &'static str, content: [usize; 5], unit: [usize; 2]) -> Self {
        let name = p.activation(input);
        let whole = Type::new(DType::F32, content);
        let layout = p.layout();
        let mut ty = layout.padded(&name, &whole, &AXES);
        for (dim, unit) in CUT.into_iter().zip(unit) {
            let parts = layout.parts(&name, AXES[dim]);
            if parts == 1 {
                continue;
            }
            ty.dims[dim] = content[dim].next_multiple_of(parts * unit);
            if let Some(uneven) = layout.unevenness(&name, &whole, dim, AXES[dim], unit) {
                let block = ty.dims[dim] / parts;
                p.note(format!("{uneven}; every device holds a block of {block}, filled up behind the last"));
            }
        }
        Pictures { input, name, content, ty }
    }

    /// Declares them as an input.
    pub fn input(&self, p: &Params) -> Value {
        p.filled_input(self.input, self.ty.clone(), &self.content, &AXES)
    }

    /// `body` on each device's block of `pictures` and its part of `rows [b, …]`, which gives pictures again; on the
    /// whole where nothing is cut.
    pub fn run(
        &self,
        p: &Params,
        pictures: &Value,
        rows: Option<&Value>,
        body: impl FnOnce(Blocks, &Value, Option<&Value>) -> Value,
    ) -> Value {
        let layout = p.layout();
        let sides: Vec<usize> = CUT.into_iter().filter(|&dim| layout.parts(&self.name, AXES[dim]) > 1).collect();
        if sides.is_empty() && layout.parts(&self.name, Axis::Batch) == 1 {
            return body(Blocks::default(), pictures, rows);
        }
        // A mistake was kept when the input was declared.
        let place = |x: &Value, axes: &[Axis]| {
            let placed = layout.place(&self.name, x.ty(), axes).ok().flatten();
            placed.map_or_else(|| Sharding(vec![Vec::new(); axes.len()]), |placed| placed.sharding)
        };
        let whole = place(pictures, &AXES);
        // Element `i` of such a vector lies on the devices of block `i`.
        let positions: Vec<Value> = sides
            .iter()
            .map(|&dim| p.builder().iota(Type::new(DType::I32, [layout.parts(&self.name, AXES[dim])]), 0))
            .collect();
        let mut operands = vec![(pictures, whole.clone())];
        operands.extend(sides.iter().zip(&positions).map(|(&dim, v)| (v, place(v, &AXES[dim..=dim]))));
        let of_rows = |v: &Value| [vec![Axis::Batch], vec![Axis::Whole; v.rank().saturating_sub(1)]].concat();
        operands.extend(rows.map(|v| (v, place(v, &of_rows(v)))));
        let results = p.builder().manual(&operands, &[whole], |x| {
            let side = |(&axis, position): (&usize, &Value)| Side {
                axis,
                groups: layout.groups(&self.name, AXES[axis]),
                position: position.reshape(vec![]),
                size: self.content[axis],
                block: x[0].dim(axis as isize),
            };
            let blocks = Blocks { sides: sides.iter().zip(&x[1..]).map(side).collect() };
            vec![body(blocks, &x[0], rows.and(x.last()))]
        });
        results.into_iter().next().unwrap_or_else(|| pictures.clone())
    }

    /// The result `name` of [`Pictures::run`], of which callers see the part that is no filling.
    pub fn output(&self, p: &Params, name: &str, value: &Value) -> (crate::hlo::Output, Value) {
        p.output(name, value, &AXES, &self.content_of(value))
    }

    /// The same with the channels behind all else, `[b, frames, height, width, channels]`.
    pub fn channels_last(&self, p: &Params, name: &str, value: &Value) -> (crate::hlo::Output, Value) {
        const ORDER: [usize; 5] = [0, 2, 3, 4, 1];
        let content = self.content_of(value);
        p.output(name, &value.transpose(&ORDER), &ORDER.map(|d| AXES[d]), &ORDER.map(|d| content[d]))
    }

    /// The part of a result that is no filling.
    fn content_of(&self, value: &Value) -> Vec<usize> {
        let mut content = value.dims().to_vec();
        content[0] = self.content[0];
        for dim in CUT {
            content[dim] = (self.content[dim] * content[dim]).div_ceil(self.ty.dims[dim]);
        }
        content
    }
}
