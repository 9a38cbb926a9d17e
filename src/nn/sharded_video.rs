//! Video of a convolutional network: replicated, or a block of rows and columns on each device.

use super::halo::{SPATIAL_DIMS, ShardedDim, SpatialShards};
use super::layout::Axis;
use super::params::Params;
use crate::hlo::{DType, Sharding, Type, Value};

/// Frames are never sharded: the first of a video is not treated as the others.
const AXES: [Axis; 5] = [Axis::Batch, Axis::Replicated, Axis::Replicated, Axis::Height, Axis::Width];
const WHOLE: [Axis; 5] = [Axis::Batch, Axis::Replicated, Axis::Replicated, Axis::Replicated, Axis::Replicated];

/// The video `[b, channels, frames, height, width]` at a network's input.
pub struct ShardedVideo {
    input: &'static str,
    /// Key of the layout's rules.
    name: String,
    content: [usize; 5],
    ty: Type,
    axes: [Axis; 5],
}

/// A value that a network reads beside its video, each device its part.
pub(crate) struct Beside<'a> {
    value: &'a Value,
    axes: Vec<Axis>,
}

impl ShardedVideo {
    /// Video of the sizes `content`, f32, as the input `input`, whose rules place it. A block's height and width are
    /// multiples of `unit`, so that every block of the network's result is of whole pixels: a size that does not divide
    /// so is padded, and noted.
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

    /// The same of frames that are on each device whole, of five dimensions of which the first counts videos.
    pub(crate) fn of_whole_frames(p: &Params, input: &'static str, ty: Type) -> Self {
        let (name, content) = (p.activation(input), std::array::from_fn(|dim| ty.dims[dim]));
        let ty = p.layout().padded(&name, &ty, &WHOLE, 1);
        ShardedVideo { input, name, content, ty, axes: WHOLE }
    }

    /// A value that every device has whole.
    pub(crate) fn replicated(value: &Value) -> Beside<'_> {
        Beside { value, axes: vec![Axis::Replicated; value.rank()] }
    }

    pub fn input(&self, p: &Params) -> Value {
        p.filled_input(self.input, self.ty.clone(), &self.content, &self.axes)
    }

    /// Another video of the network, to run beside this one.
    pub(crate) fn beside<'a>(&self, value: &'a Value) -> Beside<'a> {
        Beside { value, axes: self.axes.to_vec() }
    }

    /// `body` on each device's block of `video` and its part of `rows [b, …]`, which gives video again; on all of it
    /// where nothing is sharded.
    pub fn run(
        &self,
        p: &Params,
        video: &Value,
        rows: Option<&Value>,
        body: impl FnOnce(SpatialShards, &Value, Option<&Value>) -> Value,
    ) -> Value {
        let axes = |v: &Value| [vec![Axis::Batch], vec![Axis::Replicated; v.rank().saturating_sub(1)]].concat();
        let beside: Vec<Beside> = rows.map(|value| Beside { value, axes: axes(value) }).into_iter().collect();
        self.run_with(p, video, &beside, |shards, video, beside| body(shards, video, beside.first()))
    }

    /// The same with several values beside the video.
    pub(crate) fn run_with(
        &self,
        p: &Params,
        video: &Value,
        beside: &[Beside],
        body: impl FnOnce(SpatialShards, &Value, &[Value]) -> Value,
    ) -> Value {
        let layout = p.layout();
        let axes = self.axes;
        let dims: Vec<usize> =
            SPATIAL_DIMS.into_iter().filter(|&dim| layout.parts(&self.name, axes[dim]) > 1).collect();
        if dims.is_empty() && layout.parts(&self.name, Axis::Batch) == 1 {
            let beside: Vec<Value> = beside.iter().map(|one| one.value.clone()).collect();
            return body(SpatialShards::default(), video, &beside);
        }
        // A mistake was kept when the input was declared.
        let place = |x: &Value, axes: &[Axis]| {
            let placed = layout.place(&self.name, x.ty(), axes).ok().flatten();
            placed.map_or_else(|| Sharding(vec![Vec::new(); axes.len()]), |placed| placed.sharding)
        };
        let whole = place(video, &axes);
        // Element `i` of such a vector lies on the devices of block `i`.
        let positions: Vec<Value> = dims
            .iter()
            .map(|&dim| p.builder().iota(Type::new(DType::I32, [layout.parts(&self.name, axes[dim])]), 0))
            .collect();
        let mut operands = vec![(video, whole.clone())];
        operands.extend(dims.iter().zip(&positions).map(|(&dim, v)| (v, place(v, &axes[dim..=dim]))));
        operands.extend(beside.iter().map(|one| (one.value, place(one.value, &one.axes))));
        let results = p.builder().manual(&operands, &[whole], |x| {
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

    /// The result `name` of [`ShardedVideo::run`], of which callers see the part that is no padding.
    pub fn output(&self, p: &Params, name: &str, value: &Value) -> (crate::hlo::Output, Value) {
        p.output(name, value, &self.axes, &self.content_of(value))
    }

    /// The same with the channels behind all else, `[b, frames, height, width, channels]`.
    pub(crate) fn channels_last(&self, p: &Params, name: &str, value: &Value) -> (crate::hlo::Output, Value) {
        const ORDER: [usize; 5] = [0, 2, 3, 4, 1];
        let content = self.content_of(value);
        p.output(name, &value.transpose(&ORDER), &ORDER.map(|d| self.axes[d]), &ORDER.map(|d| content[d]))
    }

    /// The part of a result that is no padding.
    fn content_of(&self, value: &Value) -> Vec<usize> {
        let mut content = value.dims().to_vec();
        content[0] = self.content[0];
        for dim in SPATIAL_DIMS {
            content[dim] = (self.content[dim] * content[dim]).div_ceil(self.ty.dims[dim]);
        }
        content
    }
}
