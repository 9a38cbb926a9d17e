//! Video input of a convolutional network: replicated, or sharded into blocks of rows and columns.

use super::halo::{SPATIAL_DIMS, ShardedDim, SpatialShards};
use super::layout::Axis;
use super::params::Params;
use ltx2_stablehlo::{DType, Sharding, Type, Value};

/// Logical axes of a video. Frames are never sharded, because networks treat the first frame differently.
const AXES: [Axis; 5] = [Axis::Batch, Axis::Replicated, Axis::Replicated, Axis::Height, Axis::Width];
const WHOLE: [Axis; 5] = [Axis::Batch, Axis::Replicated, Axis::Replicated, Axis::Replicated, Axis::Replicated];

/// The video `[b, channels, frames, height, width]` at the input of a network.
pub struct ShardedVideo {
    input: &'static str,
    /// Tensor name that layout rules match.
    name: String,
    content: [usize; 5],
    ty: Type,
    axes: [Axis; 5],
}

/// An additional operand of the network, with its logical axes.
pub struct ShardedOperand<'a> {
    value: &'a Value,
    axes: Vec<Axis>,
}

impl ShardedVideo {
    /// Describes the program input `input`: an f32 video of shape `content`, sharded by the layout rules. Height and
    /// width of a block are multiples of `unit`, so that every block of the network's result has an integer number of
    /// pixels. Sizes that are not divisible are padded and reported in a note.
    pub fn new(p: &Params, input: &'static str, content: [usize; 5], unit: [usize; 2]) -> Self {
        let name = p.activation(input);
        let whole = Type::new(DType::F32, content);
        let layout = p.layout();
        let mut ty = layout.padded(&name, &whole, &AXES, 1);
        for (dim, unit) in SPATIAL_DIMS.into_iter().zip(unit) {
            let parts = layout.parts(&name, AXES[dim]);
            if parts == 1 {
                continue;
            }
            ty.dims[dim] = content[dim].next_multiple_of(parts * unit);
            if let Some(uneven) = layout.unevenness(&name, &whole, dim, AXES[dim], unit) {
                let block = ty.dims[dim] / parts;
                p.note(format!("{uneven}; padded to blocks of {block}"));
            }
        }
        ShardedVideo { input, name, content, ty, axes: AXES }
    }

    /// Describes a program input like [`Self::new`], but only the batch is sharded: each device has the complete height
    /// and width. `ty` must have five dimensions, the first of which is the batch.
    pub fn with_replicated_frames(p: &Params, input: &'static str, ty: Type) -> Self {
        let (name, content) = (p.activation(input), std::array::from_fn(|dim| ty.dims[dim]));
        let ty = p.layout().padded(&name, &ty, &WHOLE, 1);
        ShardedVideo { input, name, content, ty, axes: WHOLE }
    }

    /// Wraps `value`, which is replicated on all devices, as an additional operand of [`Self::run_with`].
    pub fn replicated(value: &Value) -> ShardedOperand<'_> {
        ShardedOperand { value, axes: vec![Axis::Replicated; value.rank()] }
    }

    /// Declares the program input `[b, channels, frames, height, width]`, padded with zeros to the sharded size, and
    /// returns its value.
    pub fn input(&self, p: &Params) -> Value {
        p.filled_input(self.input, self.ty.clone(), &self.content, &self.axes)
    }

    /// Wraps `value`, a video that is sharded like this one, as an additional operand of [`Self::run_with`].
    pub fn operand<'a>(&self, value: &'a Value) -> ShardedOperand<'a> {
        ShardedOperand { value, axes: self.axes.to_vec() }
    }

    /// Runs `body` on each device's block of `video` and the matching batch entries of `rows [b, …]`; `body` returns
    /// the block of the resulting video. Without sharding, `body` runs on the complete video.
    pub fn run(
        &self,
        p: &Params,
        video: &Value,
        rows: Option<&Value>,
        body: impl FnOnce(SpatialShards, &Value, Option<&Value>) -> Value,
    ) -> Value {
        let axes = |v: &Value| [vec![Axis::Batch], vec![Axis::Replicated; v.rank().saturating_sub(1)]].concat();
        let operands: Vec<ShardedOperand> =
            rows.map(|value| ShardedOperand { value, axes: axes(value) }).into_iter().collect();
        self.run_with(p, video, &operands, |shards, video, operands| body(shards, video, operands.first()))
    }

    /// Runs `body` like [`Self::run`], but with any number of additional operands.
    pub fn run_with(
        &self,
        p: &Params,
        video: &Value,
        operands: &[ShardedOperand],
        body: impl FnOnce(SpatialShards, &Value, &[Value]) -> Value,
    ) -> Value {
        let layout = p.layout();
        let axes = self.axes;
        let dims: Vec<usize> =
            SPATIAL_DIMS.into_iter().filter(|&dim| layout.parts(&self.name, axes[dim]) > 1).collect();
        if dims.is_empty() && layout.parts(&self.name, Axis::Batch) == 1 {
            let operands: Vec<Value> = operands.iter().map(|one| one.value.clone()).collect();
            return body(SpatialShards::default(), video, &operands);
        }
        // A layout error was recorded when the input was declared.
        let place = |x: &Value, axes: &[Axis]| {
            let placed = layout.place(&self.name, x.ty(), axes).ok().flatten();
            placed.map_or_else(|| Sharding(vec![Vec::new(); axes.len()]), |placed| placed.sharding)
        };
        let whole = place(video, &axes);
        // Each vector is sharded, so that the devices with block `i` hold element `i`.
        let positions: Vec<Value> = dims
            .iter()
            .map(|&dim| p.builder().iota(Type::new(DType::I32, [layout.parts(&self.name, axes[dim])]), 0))
            .collect();
        let mut inputs = vec![(video, whole.clone())];
        inputs.extend(dims.iter().zip(&positions).map(|(&dim, v)| (v, place(v, &axes[dim..=dim]))));
        inputs.extend(operands.iter().map(|one| (one.value, place(one.value, &one.axes))));
        let results = p.builder().manual(&inputs, &[whole], |x| {
            let dim = |(&axis, position): (&usize, &Value)| ShardedDim {
                axis,
                groups: layout.groups(&self.name, axes[axis]),
                position: position.reshape(vec![]),
                size: self.content[axis],
                block: x[0].dim(axis as isize),
            };
            let shards = SpatialShards { dims: dims.iter().zip(&x[1..]).map(dim).collect() };
            vec![body(shards, &x[0], &x[1 + dims.len()..])]
        });
        results.into_iter().next().unwrap_or_else(|| video.clone())
    }

    /// Creates the program output `name` for a result of [`ShardedVideo::run`], without padding.
    pub fn output(&self, p: &Params, name: &str, value: &Value) -> (ltx2_stablehlo::ProgramOutput, Value) {
        p.output(name, value, &self.axes, &self.content_dims(value))
    }

    /// Creates a program output like [`Self::output`], transposed to `[b, frames, height, width, channels]`.
    pub fn channels_last(&self, p: &Params, name: &str, value: &Value) -> (ltx2_stablehlo::ProgramOutput, Value) {
        const ORDER: [usize; 5] = [0, 2, 3, 4, 1];
        let content = self.content_dims(value);
        p.output(name, &value.transpose(&ORDER), &ORDER.map(|d| self.axes[d]), &ORDER.map(|d| content[d]))
    }

    /// Returns the dimensions of a result without padding.
    fn content_dims(&self, value: &Value) -> Vec<usize> {
        let mut content = value.dims().to_vec();
        content[0] = self.content[0];
        for dim in SPATIAL_DIMS {
            content[dim] = (self.content[dim] * content[dim]).div_ceil(self.ty.dims[dim]);
        }
        content
    }
}
