//! Uploads parameters from files to the devices; each device gets its shard. Several threads read the tensors in order
//! of use. Tensors that one parameter stacks are stacked in device memory, not in host memory.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use super::checkpoint_tensor::{FileTensor, ParameterSource, QuantizedTensor, ReadPiece};
use super::engine::{Engine, device_layout};
use super::error::RuntimeError;
use super::sharded_tensor::{Shard, ShardedTensor, buffer_type, cut_into, offset, shards, strides};
use super::watch::WaitDescription;
use ltx2_base::failpoint;
use ltx2_base::threads::{self, MemoryBudget};
use ltx2_nn::{Param, ROTATED_INPUTS, Source};
use ltx2_pjrt::{
    Buffer, BufferType, Device, HostBuffer, PjrtError, SharedBytes, Staging, Transfer, TransferChunk, TransferShape,
};
use ltx2_stablehlo::{DType, MemorySpace, Program};
use ltx2_weights::quantize::{GROUP, Quantized, QuantizedForm, quantize_rows};

// The host rotates weights in the same groups in which programs rotate activations.
const _: () = assert!(GROUP == ROTATED_INPUTS);

/// Bytes per read: large enough for disk and device-link throughput, small enough to keep all readers busy.
const PIECE: usize = 32 << 20;
/// A parameter that consists of a single tensor below this size is uploaded in one copy instead of piecewise.
const SMALL: usize = 1 << 20;
/// Maximum number of reader threads; more are not faster.
const READERS: usize = 16;
/// Host memory, in bytes, for the tensors that are being converted; a larger tensor is converted alone.
const CONVERSIONS: usize = 768 << 20;
/// Maximum host memory, in bytes, of the buffers of a load. A tensor whose conversion needs more than [`CONVERSIONS`]
/// adds the difference.
const BUFFERS: usize = 2_000_000_000;
// With several devices, each reader needs two pieces of staging memory.
const _: () = assert!(2 * READERS * PIECE + CONVERSIONS <= BUFFERS);

/// Limits of the host memory of loads.
#[derive(Clone, Copy, Debug)]
pub struct LoadLimits {
    /// Bytes per read.
    pub piece: usize,
    /// Bytes of host memory for the tensors that are being converted; a larger tensor is converted alone.
    pub conversions: usize,
    /// Number of reader threads.
    pub readers: usize,
}

impl Default for LoadLimits {
    fn default() -> Self {
        LoadLimits { piece: PIECE, conversions: CONVERSIONS, readers: threads::cores().clamp(2, READERS) }
    }
}

/// Uploads `params`, which are arguments of `program`, and returns them in the same order. Calls `on_progress` with the byte
/// count of each uploaded piece; cancels with [`RuntimeError::Stopped`] if it returns `false`.
///
/// An error about a tensor (missing, wrong shape, not a float, not finite) contains the file and the name of the
/// tensor.
pub(super) fn load(
    engine: &Engine,
    program: &Program,
    params: &[&Param],
    source: &dyn ParameterSource,
    on_progress: &(dyn Fn(usize) -> bool + Sync),
) -> Result<Vec<ShardedTensor>, RuntimeError> {
    let mut jobs = Vec::new();
    let uploads =
        params.iter().enumerate().map(|(i, param)| Upload::plan(engine, program, param, source, i, &mut jobs));
    let uploads = uploads.collect::<Result<Vec<_>, _>>()?;
    let source = &Conversions { source, scales: Mutex::default(), changed: Condvar::new() };
    jobs.iter().for_each(|job| source.begin(uploads[job.upload].param, job));
    // Process scales that require quantization last: loading the weights computes them.
    jobs.sort_by_cached_key(|job| source.computes_scales(uploads[job.upload].param, job.key));
    // The first half of the staging memory receives bytes from the file; the second half receives the shards that are
    // copied out of these bytes.
    let limits = engine.load_limits();
    let largest = jobs.iter().map(LoadJob::room).max().unwrap_or(0).max(limits.piece);
    let halves = if program.devices() > 1 { 2 } else { 1 };
    let budget = MemoryBudget::new(limits.conversions);
    let run = |job: &LoadJob| {
        let upload = &uploads[job.upload];
        let _converted = budget.reserve(job.converted(upload.param, source));
        let mut staging = (job.staged() > 0).then(|| engine.staging(halves * largest));
        let (into, cuts) = staging.as_deref_mut().unwrap_or_default().split_at_mut(job.staged());
        let result = job.run(engine, upload, source, into, cuts);
        staging.into_iter().for_each(|staging| engine.keep_staging(staging));
        result?;
        if !on_progress(job.bytes) {
            return Err(RuntimeError::Stopped);
        }
        if upload.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            failpoint::reach("load", &upload.param.name);
        }
        Ok(())
    };
    let run = |job: &LoadJob| {
        let guard = FailureGuard(source);
        let result = run(job);
        result.inspect(|()| std::mem::forget(guard))
    };
    threads::try_in_order(&jobs, limits.readers, run)?;
    engine.record_load_memory(budget.peak());
    uploads.into_iter().map(Upload::finish).collect()
}

/// Parameter source with a cache of scales: quantizing a weight also computes its scales, which are a separate
/// parameter.
struct Conversions<'a> {
    source: &'a dyn ParameterSource,
    scales: Mutex<ComputedScales>,
    /// Condition variable that is notified when all scales of a weight are known, and when a job fails.
    changed: Condvar,
}

/// Guard over a job. Dropping it makes threads that wait for scales return, because the job failed or panicked.
struct FailureGuard<'a>(&'a Conversions<'a>);

impl Drop for FailureGuard<'_> {
    fn drop(&mut self) {
        self.0.fail();
    }
}

/// Component and checkpoint name of a weight.
#[derive(Clone, PartialEq, Eq, Hash)]
struct WeightName {
    component: &'static str,
    key: String,
}

/// Scales that no parameter has read yet.
#[derive(Default)]
struct ComputedScales {
    /// The scales of each weight that is quantized, and the number of rows whose scales are not known yet.
    weights: HashMap<WeightName, (Vec<f32>, usize)>,
    /// Whether a job has failed, so that some scales will never be known.
    failed: bool,
}

impl Conversions<'_> {
    /// Adds the weight of a job that quantizes, so that other jobs wait for its scales.
    fn begin(&self, param: &Param, job: &LoadJob) {
        let is_scales = matches!(param.source, Source::Scales { .. });
        if is_scales || form(param).is_none() || matches!(job.part, Part::Rows(..) | Part::View(..)) {
            return;
        }
        let (key, shape) = param.source.tensors()[job.key];
        let name = WeightName { component: param.component, key: key.to_string() };
        lock(&self.scales).weights.entry(name).or_insert_with(|| (vec![0.0; shape[0]], shape[0]));
    }

    /// Adds the scales of rows of a weight, starting at row `first`.
    fn add(&self, name: &WeightName, first: usize, scales: &[f32]) {
        if let Some((all, left)) = lock(&self.scales).weights.get_mut(name) {
            all[first..][..scales.len()].copy_from_slice(scales);
            *left = left.saturating_sub(scales.len());
        }
        self.changed.notify_all();
    }

    /// Makes threads that wait for scales return.
    fn fail(&self) {
        lock(&self.scales).failed = true;
        self.changed.notify_all();
    }

    /// Removes and returns the scales of a weight after all its rows have been quantized. `None`: no job quantizes it.
    fn take(&self, name: &WeightName) -> Result<Option<Vec<f32>>, RuntimeError> {
        let is_pending =
            |all: &mut ComputedScales| !all.failed && all.weights.get(name).is_some_and(|(_, left)| *left > 0);
        let all = self.changed.wait_while(lock(&self.scales), is_pending);
        let mut all = all.unwrap_or_else(PoisonError::into_inner);
        match all.weights.remove(name) {
            // The failed job's error is reported.
            Some((_, left)) if left > 0 => Err(RuntimeError::Stopped),
            found => Ok(found.map(|(scales, _)| scales)),
        }
    }

    /// Returns whether `param` holds the scales of the weight `key`, and these scales are not stored but must be
    /// computed.
    fn computes_scales(&self, param: &Param, key: usize) -> bool {
        let Source::Scales { keys, .. } = &param.source else { return false };
        !stored(self.source, param, &keys[key]).is_ok_and(|weight| weight.is_some())
    }

    /// Returns whether `param` holds the scales of the weight `key`, and these scales are stored or computed by another
    /// job.
    fn has_scales(&self, param: &Param, key: usize) -> bool {
        let Source::Scales { keys, .. } = &param.source else { return false };
        let name = WeightName { component: param.component, key: keys[key].clone() };
        lock(&self.scales).weights.contains_key(&name) || !self.computes_scales(param, key)
    }
}

/// Returns the form to which a parameter's weights are quantized; `None` if the weights are not quantized.
fn form(param: &Param) -> Option<QuantizedForm> {
    let (dtype, rotated) = match &param.source {
        Source::Scales { of, rotated, .. } => (*of, *rotated),
        source => (param.ty.dtype, matches!(source, Source::Rotated { .. })),
    };
    QuantizedForm::ALL
        .into_iter()
        .find(|form| form.dtype() == dtype && (*form == QuantizedForm::Int8Convrot) == rotated)
}

/// Returns the stored codes and scales of the weight `key` if the source stores it in the form and with the shape that
/// `param` requires.
fn stored(source: &dyn ParameterSource, param: &Param, key: &str) -> Result<Option<QuantizedTensor>, RuntimeError> {
    let Some(form) = form(param) else { return Ok(None) };
    let found = source.quantized(param.component, key, form).map_err(RuntimeError::Parameter)?;
    Ok(found.filter(|weight| weight.codes.shape == param.source.shape()))
}

/// Returns the stored values of the weight `key` if they can be quantized row by row: matrices in one file of a float
/// type of 16 bits or more.
fn quantizable(source: &dyn ParameterSource, param: &Param, key: &str) -> Result<Option<FileTensor>, RuntimeError> {
    let is_codes = form(param).is_some() && !matches!(param.source, Source::Scales { .. });
    if !is_codes || param.source.shape().len() != 2 {
        return Ok(None);
    }
    let found = source.in_file(param.component, key, DType::F8E4M3FN).map_err(RuntimeError::Parameter)?;
    let is_wide = |weight: &FileTensor| weight.dtype.is_float() && weight.dtype != DType::F8E4M3FN;
    Ok(found.filter(|weight| is_wide(weight) && weight.shape == param.source.shape()))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Upload<'a> {
    param: &'a Param,
    shards: Vec<Shard>,
    /// Memory that receives the parameter.
    memory: MemorySpace,
    /// This process's devices, each with its index into `shards`.
    devices: Vec<(usize, &'a Device)>,
    way: UploadMode<'a>,
    /// Number of unfinished jobs.
    left: AtomicUsize,
}

enum UploadMode<'a> {
    /// One strided host-to-device copy per device.
    Whole(Mutex<Vec<Buffer>>),
    /// Piecewise transfers into one array per device. The first `outer` dimensions of the parameter count the stacked
    /// tensors; the others are the dimensions of one stored tensor.
    Pieces { outer: usize, fills: Vec<DeviceArray<'a>> },
}

struct LoadJob {
    upload: usize,
    /// Index of the stored tensor among those that the parameter stacks.
    key: usize,
    part: Part,
    /// Size in bytes, for progress reports.
    bytes: usize,
}

enum Part {
    Whole,
    /// A stored tensor that is converted on the host.
    Computed,
    /// Rows of a stored tensor, read from its file.
    Rows(Range<usize>, Arc<ReadPiece>),
    /// Rows of a stored matrix, read from its file and quantized.
    Quantized(Range<usize>, Arc<ReadPiece>, DType),
    /// Rows of a stored matrix, of which the parameter `[parts, rows, columns]` is a view with these strides, in
    /// elements.
    View(Range<usize>, [usize; 3], Arc<ReadPiece>),
}

impl<'a> Upload<'a> {
    fn plan(
        engine: &'a Engine,
        program: &Program,
        param: &'a Param,
        source: &dyn ParameterSource,
        upload: usize,
        jobs: &mut Vec<LoadJob>,
    ) -> Result<Self, RuntimeError> {
        let argument = program.argument(&param.name);
        let shards = shards(&param.ty, &program.mesh, argument.and_then(|a| a.sharding.as_ref()));
        let layout = argument.map(device_layout).transpose()?.flatten();
        let memory = argument.map(|a| a.memory).unwrap_or_default();
        let devices = engine.addressable(shards.len());
        let (first, size, piece) = (jobs.len(), param.bytes(), engine.load_limits().piece);
        let in_file = |name: &str, shape: &[usize]| {
            let found = source.in_file(param.component, name, param.ty.dtype).map_err(RuntimeError::Parameter)?;
            // Tensors of another type or shape are converted on the host, or rejected there.
            Ok::<_, RuntimeError>(found.filter(|t| t.dtype == param.ty.dtype && t.dtype.is_float() && t.shape == shape))
        };
        let is_tiled = layout.is_some() || engine.spec().tiles_memory;
        let outer = match &param.source {
            Source::View { key, shape, strides } => match by_rows(param, shape, strides).filter(|_| !is_tiled) {
                // `piece / 2`, because the shards copied out of a piece need as much memory again.
                Some(strides) => in_file(key, shape)?.map(|stored| {
                    let row = strides[1] * param.ty.dtype.size();
                    let part = |rows, read| Part::View(rows, strides, read);
                    jobs.extend(in_rows(upload, 0, stored, shape[0], row, piece / 2, part));
                    1
                }),
                None => None,
            },
            Source::Stack { keys, .. } | Source::Rotated { keys, .. } | Source::Scales { keys, .. }
                if keys.len() == 1 && (size < SMALL || is_tiled) =>
            {
                None
            }
            Source::Stack { keys, .. } | Source::Rotated { keys, .. } | Source::Scales { keys, .. } => {
                let outer = outer_dimensions(param, keys.len(), &shards)?;
                let dims = &param.ty.dims[outer..];
                let row = dims.iter().skip(1).product::<usize>() * param.ty.dtype.size();
                for (key, name) in keys.iter().enumerate() {
                    let stored = match &param.source {
                        Source::Stack { shape, .. } if !dims.is_empty() => in_file(name, shape)?,
                        Source::Rotated { .. } => stored(source, param, name)?.map(|weight| weight.codes),
                        _ => None,
                    };
                    let wide = if stored.is_none() { quantizable(source, param, name)? } else { None };
                    match (stored, wide) {
                        (Some(stored), _) => jobs.extend(in_rows(upload, key, stored, dims[0], row, piece, Part::Rows)),
                        (None, Some(wide)) => {
                            let dtype = wide.dtype;
                            // The values are read into half a piece; they take at least twice the memory of the codes.
                            let bytes = piece / 2 / dtype.size();
                            let part = |rows, read| Part::Quantized(rows, read, dtype);
                            jobs.extend(in_rows(upload, key, wide, dims[0], row, bytes, part));
                        }
                        (None, None) => {
                            jobs.push(LoadJob { upload, key, part: Part::Computed, bytes: size / keys.len() })
                        }
                    }
                }
                Some(outer)
            }
        };
        let Some(outer) = outer else {
            jobs.push(LoadJob { upload, key: 0, part: Part::Whole, bytes: size });
            let way = UploadMode::Whole(Mutex::default());
            return Ok(Upload { param, shards, memory, devices, way, left: AtomicUsize::new(1) });
        };
        let fill = |&(place, device): &(usize, &'a Device)| {
            let shard = &shards[place];
            let pieces = jobs[first..].iter().map(|job| job.pieces(shard, outer)).sum();
            let shape =
                TransferShape { ty: buffer_type(param.ty.dtype), dims: shard.size.clone(), layout: layout.clone() };
            DeviceArray::new(engine, param.component, device, memory, shape, pieces)
        };
        let fills = devices.iter().map(fill).collect::<Result<_, _>>()?;
        let left = AtomicUsize::new(jobs.len() - first);
        Ok(Upload { param, shards, memory, devices, way: UploadMode::Pieces { outer, fills }, left })
    }

    fn finish(self) -> Result<ShardedTensor, RuntimeError> {
        let buffers = match self.way {
            UploadMode::Whole(buffers) => buffers.into_inner().unwrap_or_else(PoisonError::into_inner),
            UploadMode::Pieces { fills, .. } => fills.into_iter().map(DeviceArray::finish).collect::<Result<_, _>>()?,
        };
        let places = self.devices.into_iter().map(|(place, _)| place).collect();
        let ty = self.param.ty.clone();
        Ok(ShardedTensor::new(buffers, places, self.shards, ty.clone(), ty.dims).in_memory(self.memory))
    }
}

/// Splits the rows of a stored tensor, of `row` bytes each, into jobs of at most `bytes` bytes, or of one row if a row
/// is larger.
fn in_rows(
    upload: usize,
    key: usize,
    stored: FileTensor,
    rows: usize,
    row: usize,
    bytes: usize,
    part: impl Fn(Range<usize>, Arc<ReadPiece>) -> Part,
) -> impl Iterator<Item = LoadJob> {
    let (read, step) = (Arc::new(stored.read), (bytes / row.max(1)).max(1));
    (0..rows).step_by(step).map(move |from| {
        let rows = from..(from + step).min(rows);
        LoadJob { upload, key, bytes: rows.len() * row, part: part(rows, read.clone()) }
    })
}

/// Returns the strides of a parameter `[parts, rows, columns]` that is a view of a stored matrix, if the matrix has the
/// same number of rows and elements have 1, 2 or 4 bytes. Otherwise returns `None`.
fn by_rows(param: &Param, shape: &[usize], strides: &[usize]) -> Option<[usize; 3]> {
    let [_, rows, _] = *<&[usize; 3]>::try_from(&*param.ty.dims).ok()?;
    let strides = <[usize; 3]>::try_from(strides).ok()?;
    (*shape == [rows, strides[1]] && matches!(param.ty.dtype.size(), 1 | 2 | 4)).then_some(strides)
}

/// Returns the number of leading dimensions that count stacked tensors. They must not be sharded.
fn outer_dimensions(param: &Param, keys: usize, shards: &[Shard]) -> Result<usize, RuntimeError> {
    let elements = param.ty.elements() / keys;
    let outer =
        (usize::from(keys > 1)..=param.ty.rank()).find(|&i| param.ty.dims[i..].iter().product::<usize>() == elements);
    outer.filter(|&i| shards.iter().all(|p| p.size[..i] == param.ty.dims[..i])).ok_or_else(|| {
        RuntimeError::Parameter(format!("the layout must not shard the layers of '{}' ({})", param.name, param.ty))
    })
}

impl LoadJob {
    /// Returns the number of bytes that this job puts into staging memory.
    fn staged(&self) -> usize {
        match self.part {
            Part::Rows(..) | Part::View(..) => self.bytes,
            Part::Quantized(.., dtype) => self.bytes * dtype.size(),
            Part::Whole | Part::Computed => 0,
        }
    }

    /// Returns the bytes of host memory that this job needs to convert a tensor: the stored or merged values, at most 4
    /// bytes each, plus the memory for merging LoRAs or the memory for the new form and its shards, whichever is
    /// larger.
    fn converted(&self, param: &Param, source: &Conversions) -> usize {
        match self.part {
            Part::Whole | Part::Computed if source.has_scales(param, self.key) => 0,
            Part::Whole | Part::Computed => {
                let values = param.source.shape().iter().product::<usize>();
                let merge = source.source.merge_bytes(param.component, param.source.tensors()[self.key].0);
                4 * values + merge.max(2 * values * param.ty.dtype.size())
            }
            Part::Rows(..) | Part::View(..) | Part::Quantized(..) => 0,
        }
    }

    /// Returns the number of bytes that this job needs in each half of the staging memory.
    fn room(&self) -> usize {
        let copies = if matches!(self.part, Part::View(..) | Part::Quantized(..)) { self.bytes } else { 0 };
        self.staged() + copies
    }

    /// Returns the number of pieces that this job writes to a shard's array.
    fn pieces(&self, shard: &Shard, outer: usize) -> usize {
        match &self.part {
            Part::Rows(rows, _) | Part::Quantized(rows, ..) => {
                usize::from(!rows_of_shard(rows, shard, outer).is_empty())
            }
            Part::View(rows, ..) if rows_of_shard(rows, shard, outer).is_empty() => 0,
            Part::View(..) => shard.size[0],
            Part::Whole | Part::Computed => 1,
        }
    }

    fn run(
        &self,
        engine: &Engine,
        upload: &Upload,
        source: &Conversions,
        into: &mut [u8],
        cuts: &mut [u8],
    ) -> Result<(), RuntimeError> {
        let param = upload.param;
        let (outer, fills) = match &upload.way {
            UploadMode::Pieces { outer, fills } => (*outer, fills),
            UploadMode::Whole(buffers) => {
                *lock(buffers) = strided(engine, upload, source)?;
                return Ok(());
            }
        };
        let dims = &param.ty.dims[outer..];
        match &self.part {
            Part::Rows(rows, read) => {
                let row = self.bytes / rows.len().max(1);
                read(rows.start * row, into).map_err(RuntimeError::Parameter)?;
                send(upload, fills, outer, self.key, Some(rows), into, cuts)
            }
            Part::Quantized(rows, read, dtype) => {
                let (name, shape) = param.source.tensors()[self.key];
                let name = WeightName { component: param.component, key: name.to_string() };
                let row = into.len() / rows.len().max(1);
                read(rows.start * row, into).map_err(RuntimeError::Parameter)?;
                let (codes, cuts) = cuts.split_at_mut(self.bytes);
                // A row of the parameter consists of several rows of the matrix if its outputs have several dimensions.
                let each = shape[0] / dims[0].max(1);
                let mut scales = vec![0.0; rows.len() * each];
                form(param).iter().for_each(|form| quantize_rows(*form, *dtype, into, codes, &mut scales));
                source.add(&name, rows.start * each, &scales);
                send(upload, fills, outer, self.key, Some(rows), codes, cuts)
            }
            Part::View(rows, strides, read) => {
                read(rows.start * strides[1] * param.ty.dtype.size(), into).map_err(RuntimeError::Parameter)?;
                send_view(upload, fills, rows, *strides, into, cuts)
            }
            Part::Whole | Part::Computed => {
                let names = param.source.tensors();
                let bytes = stored_bytes(param, names[self.key].0, source)?;
                let mut cuts = vec![0; dims.iter().product::<usize>() * param.ty.dtype.size()];
                send(upload, fills, outer, self.key, None, bytes.bytes(), &mut cuts)
            }
        }
    }
}

/// Returns the intersection of `rows` with the rows of a shard, as row indices of the stored tensor.
fn rows_of_shard(rows: &Range<usize>, shard: &Shard, outer: usize) -> Range<usize> {
    let (first, count) = (shard.start[outer], shard.size[outer]);
    rows.start.max(first)..rows.end.min(first + count)
}

/// Sends the given rows of a stored tensor (`None`: all rows) to the devices; each device gets its shard of these rows.
/// A shard that covers only part of `bytes` is first copied to `cuts`.
fn send(
    upload: &Upload,
    fills: &[DeviceArray],
    outer: usize,
    key: usize,
    rows: Option<&Range<usize>>,
    bytes: &[u8],
    mut cuts: &mut [u8],
) -> Result<(), RuntimeError> {
    let dtype = upload.param.ty.dtype;
    let mut dims = upload.param.ty.dims[outer..].to_vec();
    let mut known: Vec<(Shard, &[u8])> = Vec::new();
    let mut pieces = Vec::new();
    for (fill, (place, _)) in fills.iter().zip(&upload.devices) {
        let shard = &upload.shards[*place];
        let mut inner = Shard { start: shard.start[outer..].to_vec(), size: shard.size[outer..].to_vec() };
        let each = inner.size.iter().product::<usize>() * dtype.size();
        let mut at = key * each;
        if let Some(rows) = rows {
            let own = rows_of_shard(rows, shard, outer);
            if own.is_empty() {
                continue;
            }
            at += (own.start - inner.start[0]) * (each / inner.size[0]);
            (inner.start[0], inner.size[0]) = (own.start - rows.start, own.len());
            dims[0] = rows.len();
        }
        // Devices with the same shard share the copy.
        let piece = match known.iter().find(|(other, _)| *other == inner) {
            Some((_, piece)) => *piece,
            None if inner.size == dims => bytes,
            None => {
                let (cut, rest) =
                    std::mem::take(&mut cuts).split_at_mut(inner.size.iter().product::<usize>() * dtype.size());
                cuts = rest;
                cut_into(bytes, &dims, &inner, dtype, cut);
                &*cut
            }
        };
        known.push((inner, piece));
        pieces.push(fill.begin(at, piece));
    }
    write(pieces)
}

/// Sends rows of a stored matrix, of which the parameter `[parts, rows, columns]` is a view with `strides`. Each
/// distinct shard is first copied to `cuts`.
fn send_view(
    upload: &Upload,
    fills: &[DeviceArray],
    rows: &Range<usize>,
    strides: [usize; 3],
    bytes: &[u8],
    mut cuts: &mut [u8],
) -> Result<(), RuntimeError> {
    let element = upload.param.ty.dtype.size();
    let mut known: Vec<(&Shard, &[u8])> = Vec::new();
    let mut pieces = Vec::new();
    for (fill, (place, _)) in fills.iter().zip(&upload.devices) {
        let shard = &upload.shards[*place];
        let own = rows_of_shard(rows, shard, 1);
        if own.is_empty() {
            continue;
        }
        let [parts, all_rows, columns] = [0, 1, 2].map(|axis| shard.size[axis]);
        let each = own.len() * columns * element;
        let cut = match known.iter().find(|(other, _)| *other == shard) {
            Some((_, cut)) => *cut,
            None => {
                let (cut, rest) = std::mem::take(&mut cuts).split_at_mut(parts * each);
                cuts = rest;
                let start = [shard.start[0], own.start - rows.start, shard.start[2]];
                let size = [parts, own.len(), columns];
                match element {
                    1 => cut_view::<1>(bytes, start, size, strides, cut),
                    2 => cut_view::<2>(bytes, start, size, strides, cut),
                    _ => cut_view::<4>(bytes, start, size, strides, cut),
                }
                &*cut
            }
        };
        known.push((shard, cut));
        for (part, piece) in cut.chunks_exact(each).enumerate() {
            let at = (part * all_rows + own.start - shard.start[1]) * columns * element;
            pieces.push(fill.begin(at, piece));
        }
    }
    write(pieces)
}

/// Copies part of a matrix, viewed as `[parts, rows, columns]` with elements of `N` bytes, into `cut`. The row loop is
/// outermost, so that a source row is still in the CPU cache for the following parts.
fn cut_view<const N: usize>(bytes: &[u8], start: [usize; 3], size: [usize; 3], strides: [usize; 3], cut: &mut [u8]) {
    let [parts, rows, columns] = size;
    let (from, _) = bytes.as_chunks::<N>();
    let (to, _) = cut.as_chunks_mut::<N>();
    for row in 0..rows {
        for part in 0..parts {
            let first = (start[0] + part) * strides[0] + (start[1] + row) * strides[1] + start[2] * strides[2];
            let columns = to[(part * rows + row) * columns..][..columns].iter_mut();
            columns.zip(from[first..].iter().step_by(strides[2])).for_each(|(to, from)| *to = *from);
        }
    }
}

/// Writes pieces. The last piece of an array waits until the array's other pieces are written. Other pieces never wait,
/// so threads cannot deadlock.
fn write(pieces: Vec<Piece>) -> Result<(), RuntimeError> {
    let write = |pieces: Vec<Piece>, last: bool| {
        pieces.iter().for_each(|piece| piece.array.wait_for_others(last));
        let over = |piece: &Piece| Some(piece.array.watch.as_ref()?.guard_upload(0, piece.bytes.len()));
        let _guards: Vec<_> = pieces.iter().map(over).collect();
        let mut chunks = Vec::new();
        for Piece { array, offset, bytes, last } in &pieces {
            match &array.target {
                ArrayTarget::Transfer(transfer) => {
                    chunks.push(TransferChunk { transfer, index: 0, offset: *offset, bytes, last: *last });
                }
                ArrayTarget::Pinned(array) => array.write(*offset, bytes),
            }
        }
        Transfer::write_all(&chunks)
    };
    let (last, others) = pieces.into_iter().partition(|piece| piece.last);
    let first = write(others, false);
    first.and(write(last, true)).map_err(RuntimeError::from)
}

/// Guard for one chunk of an array that is being copied to a device. Dropping it marks the chunk as finished, even if
/// the copy failed, so that the thread that writes the last chunk does not wait forever after a panic in another thread.
struct Piece<'a> {
    array: &'a DeviceArray<'a>,
    /// Position in the array, in bytes.
    offset: usize,
    bytes: &'a [u8],
    /// Whether this is the last piece of the array.
    last: bool,
}

impl Drop for Piece<'_> {
    fn drop(&mut self) {
        self.array.end();
    }
}

/// An array of a device that several threads fill.
struct DeviceArray<'a> {
    target: ArrayTarget<'a>,
    pieces: usize,
    /// Number of pieces that have begun, and number of pieces that have ended.
    state: Mutex<(usize, usize)>,
    ended: Condvar,
    watch: Option<WaitDescription>,
}

/// Memory of an array.
enum ArrayTarget<'a> {
    /// Memory that the plugin allocates.
    Transfer(Transfer),
    /// Mapped host memory, which becomes the buffer.
    Pinned(PinnedArray<'a>),
}

/// An array in pinned host memory of this process.
pub(super) struct PinnedArray<'a> {
    engine: &'a Engine,
    device: &'a Device,
    ty: BufferType,
    dims: Vec<usize>,
    /// Allocated by the first thread that writes, because mapping memory takes longer than reading it.
    memory: OnceLock<Mutex<Staging>>,
}

impl<'a> PinnedArray<'a> {
    pub(super) fn new(engine: &'a Engine, device: &'a Device, ty: BufferType, dims: Vec<usize>) -> Self {
        PinnedArray { engine, device, ty, dims, memory: OnceLock::new() }
    }

    pub(super) fn memory(&self) -> MutexGuard<'_, Staging> {
        let size = self.dims.iter().product::<usize>() * self.ty.size();
        lock(self.memory.get_or_init(|| Mutex::new(self.engine.client().staging(size))))
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        self.memory()[offset..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Converts the array into a PJRT buffer.
    pub(super) fn finish(self) -> Result<Buffer, PjrtError> {
        drop(self.memory());
        let memory = self.memory.into_inner().expect("allocated above");
        let memory = memory.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (client, kind) = (self.engine.client(), MemorySpace::PinnedHost.name());
        if memory.is_mapped() {
            return client.view(self.device, kind, memory, self.ty, &self.dims);
        }
        // Mapping failed. Let the plugin allocate pinned memory instead; a larger limit may apply to it.
        let host = HostBuffer { memory: Some(kind), ..HostBuffer::dense(&memory, self.ty, &self.dims) };
        client.upload(self.device, host)
    }
}

impl<'a> DeviceArray<'a> {
    fn new(
        engine: &'a Engine,
        component: &str,
        device: &'a Device,
        memory: MemorySpace,
        shape: TransferShape,
        pieces: usize,
    ) -> Result<Self, RuntimeError> {
        let watch = WaitDescription::load(engine.watchdog(), component, &[(0, device)]);
        let target = if is_mapped(engine, memory) {
            ArrayTarget::Pinned(PinnedArray::new(engine, device, shape.ty, shape.dims))
        } else {
            let _guard = watch.as_ref().map(|watch| watch.guard_upload(0, 0));
            ArrayTarget::Transfer(engine.client().transfer(device, memory_kind(memory), &[shape])?)
        };
        Ok(DeviceArray { target, pieces, state: Mutex::default(), ended: Condvar::new(), watch })
    }

    fn begin<'b>(&'b self, offset: usize, bytes: &'b [u8]) -> Piece<'b> {
        let mut state = lock(&self.state);
        state.0 += 1;
        Piece { array: self, offset, bytes, last: state.0 == self.pieces }
    }

    fn wait_for_others(&self, last: bool) {
        let others = if last { self.pieces - 1 } else { 0 };
        let state = self.ended.wait_while(lock(&self.state), |(_, ended)| *ended < others);
        drop(state.unwrap_or_else(PoisonError::into_inner));
    }

    /// Increments the number of pieces that have ended.
    fn end(&self) {
        lock(&self.state).1 += 1;
        self.ended.notify_all();
    }

    fn finish(self) -> Result<Buffer, PjrtError> {
        match self.target {
            ArrayTarget::Transfer(transfer) => transfer.buffer(0),
            ArrayTarget::Pinned(array) => array.finish(),
        }
    }
}

/// Returns whether buffers in `memory` are backed by host memory that this process maps, instead of memory that the
/// plugin allocates.
pub(super) fn is_mapped(engine: &Engine, memory: MemorySpace) -> bool {
    memory == MemorySpace::PinnedHost && engine.spec().views_mapped_memory
}

/// Returns the PJRT memory kind of a memory space; `None`: the device's default memory.
fn memory_kind(memory: MemorySpace) -> Option<&'static str> {
    (memory != MemorySpace::Device).then(|| memory.name())
}

/// Uploads the only stored tensor of a parameter by strided copies; each device of this process gets its shard.
fn strided(engine: &Engine, upload: &Upload, source: &Conversions) -> Result<Vec<Buffer>, RuntimeError> {
    let Upload { param, shards, memory, devices, .. } = upload;
    let dtype = param.ty.dtype;
    let strides = match &param.source {
        Source::View { strides, .. } => strides.iter().map(|s| (s * dtype.size()) as i64).collect(),
        Source::Stack { .. } | Source::Rotated { .. } | Source::Scales { .. } => strides(&param.ty.dims, dtype.size()),
    };
    let bytes = stored_bytes(param, param.source.tensors()[0].0, source)?;
    let watch = WaitDescription::load(engine.watchdog(), param.component, devices);
    let each = devices.iter().enumerate().map(|(i, (place, device))| {
        let shard = &shards[*place];
        let dense =
            HostBuffer::dense(&bytes.bytes()[offset(&shard.start, &strides)..], buffer_type(dtype), &shard.size);
        let _guard = watch.as_ref().map(|watch| watch.guard_upload(i, dense.bytes.len()));
        Ok(engine
            .client()
            .upload(device, HostBuffer { byte_strides: Some(&strides), memory: memory_kind(*memory), ..dense })?)
    });
    each.collect()
}

/// Returns a stored tensor's bytes, converted to the parameter's element type. If the parameter and the stored weight
/// have the same quantized form, returns the stored codes or scales unchanged.
fn stored_bytes(param: &Param, key: &str, conversions: &Conversions) -> Result<SharedBytes, RuntimeError> {
    let source = conversions.source;
    let name = WeightName { component: param.component, key: key.to_string() };
    if let Some(weight) = stored(source, param, key)? {
        if matches!(param.source, Source::Scales { .. }) {
            let scales = (weight.scales)().map_err(RuntimeError::Parameter)?;
            return Ok(bytemuck::cast_slice(&scales).to_vec().into());
        }
        let mut codes = vec![0; weight.codes.shape.iter().product()];
        (weight.codes.read)(0, &mut codes).map_err(RuntimeError::Parameter)?;
        return Ok(codes.into());
    }
    if let Source::Scales { .. } = param.source
        && let Some(scales) = conversions.take(&name)?
    {
        return Ok(bytemuck::cast_slice(&scales).to_vec().into());
    }
    let shape = param.source.shape();
    if form(param).is_none() {
        // Values that need not be computed are converted as they are read.
        let found = source.in_file(param.component, key, param.ty.dtype).map_err(RuntimeError::Parameter)?;
        let is_converted = |t: &FileTensor| t.dtype == param.ty.dtype && t.dtype.is_float() && t.shape == shape;
        if let Some(found) = found.filter(is_converted) {
            let mut bytes = vec![0; shape.iter().product::<usize>() * found.dtype.size()];
            (found.read)(0, &mut bytes).map_err(RuntimeError::Parameter)?;
            return Ok(bytes.into());
        }
    }
    let stored = source.tensor(param.component, key).map_err(RuntimeError::Parameter)?;
    let fail =
        |what: String| RuntimeError::Parameter(format!("{}: tensor '{}': {what}", stored.file.display(), stored.key));
    if stored.shape != shape {
        return Err(fail(format!("the shape is {:?}, but the model configuration requires {shape:?}", stored.shape)));
    }
    if !stored.dtype.is_float() {
        return Err(fail(format!(
            "the element type is {}; weights must be floats (bf16, f16, f32, f8_e4m3)",
            stored.dtype
        )));
    }
    Ok(match (&param.source, form(param), stored.dtype, param.ty.dtype) {
        (Source::Scales { .. }, Some(form), ..) => bytemuck::cast_slice(&stored.quantized(form).scales).to_vec().into(),
        (_, Some(_), file, wanted) if file == wanted => {
            conversions.add(&name, 0, &stored.row_scales());
            stored.bytes
        }
        (_, None, file, wanted) if file == wanted => stored.bytes,
        (_, Some(form), ..) => {
            let Quantized { codes, scales } = stored.quantized(form);
            conversions.add(&name, 0, &scales);
            codes.into()
        }
        (_, None, _, wanted) => stored.cast(wanted)?.into(),
    })
}
