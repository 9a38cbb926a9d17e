//! Microbenchmarks that measure the throughput of a device and its interconnects.
//!
//! Each benchmark repeats one operation in a loop whose iteration count is an input. The time per iteration is computed
//! from the difference between runs with many and with few iterations, which excludes launch overhead; the time of an
//! empty iteration is subtracted. Before timing, the optimized program is checked: if the compiler changed the
//! operation, the benchmark is skipped with a warning.

mod programs;

use std::time::Instant;

use ndarray::arr0;

use super::engine::Engine;
use super::error::RuntimeError;
use super::executable::CompiledProgram;
use super::random;
use super::sharded_tensor::ShardedTensor;
use ltx2_nn::kernels::Kernel;
use ltx2_nn::{Axis, Init, Param, Source};
use ltx2_stablehlo::DType;
use ltx2_weights::tensor::Tensor;
use ltx2_xla_analysis::{Chip, CollectiveKind, Microbenchmark, Module, Report, Sample, report};
use programs::{COUNT, Concurrent, ExpectedFigure, Micro};

/// Target duration in seconds of the run with many iterations.
const LONG: f64 = 0.03;
/// Maximum number of iterations, which is enough to time a kernel of one microsecond.
const MAX_ITERATIONS: i32 = 4096;

/// The sizes to measure.
struct BenchmarkSizes {
    dtype: DType,
    /// Matmul sizes: rows, input features, output features.
    matmuls: Vec<[usize; 3]>,
    /// Attention sizes: queries, keys, heads.
    attention: Vec<[usize; 3]>,
    /// Array sizes in bytes.
    memory: Vec<usize>,
    /// Rows and width.
    norms: Vec<[usize; 2]>,
    /// Sizes in bytes of copies from host memory.
    host_copies: Vec<usize>,
    /// Collective sizes in bytes.
    collectives: Vec<usize>,
    /// Sizes of overlapped collectives in bytes, each with concurrent work that takes more or less time than the
    /// collective.
    overlapped: Vec<(usize, Concurrent)>,
}

const MIB: usize = 1 << 20;

impl BenchmarkSizes {
    /// Returns sizes of the published models' blocks, or small sizes for the host's processor.
    fn new(is_host: bool) -> BenchmarkSizes {
        if is_host {
            return BenchmarkSizes {
                dtype: DType::F32,
                matmuls: vec![[128, 128, 256], [256, 256, 512]],
                attention: vec![[128, 128, 2]],
                memory: vec![MIB, 4 * MIB],
                norms: vec![[256, 1024]],
                host_copies: Vec::new(),
                collectives: vec![MIB / 16, MIB],
                // CPU collectives are not asynchronous, so nothing overlaps with them.
                overlapped: Vec::new(),
            };
        }
        let rows = [128, 512, 1536, 3072, 6144, 12288];
        let mut matmuls: Vec<[usize; 3]> = rows.into_iter().map(|m| [m, 4096, 4096]).collect();
        matmuls.extend([1536, 6144, 12288].map(|m| [m, 4096, 16384]));
        matmuls.extend([3072, 6144].map(|m| [m, 4096, 2048]));
        matmuls.push([8192, 8192, 8192]);
        BenchmarkSizes {
            dtype: DType::BF16,
            matmuls,
            // Self-attention, and cross-attention between video and text or audio.
            attention: vec![
                [1536, 1536, 32],
                [6144, 6144, 8],
                [6144, 6144, 32],
                [15360, 15360, 16],
                [128, 6144, 32],
                [6144, 128, 32],
                [6144, 1024, 32],
            ],
            memory: [1, 4, 16, 64, 256, 1024].map(|m| m * MIB).into(),
            norms: vec![[3072, 4096], [12288, 4096]],
            host_copies: [1, 4, 16, 64, 256].map(|m| m * MIB).into(),
            collectives: vec![MIB / 16, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB],
            overlapped: vec![
                (32 * MIB, Concurrent::Matmuls { pairs: 1, rows: 6144, from: 4096, to: 4096 }),
                (64 * MIB, Concurrent::Matmuls { pairs: 2, rows: 3072, from: 4096, to: 16384 }),
                (512 * MIB, Concurrent::Matmuls { pairs: 1, rows: 1536, from: 4096, to: 4096 }),
                (512 * MIB, Concurrent::Matmuls { pairs: 1, rows: 6144, from: 4096, to: 4096 }),
                (64 * MIB, Concurrent::Copies { count: 4, size: 256 * MIB }),
                (512 * MIB, Concurrent::Copies { count: 2, size: 64 * MIB }),
                (512 * MIB, Concurrent::Copies { count: 1, size: 256 * MIB }),
            ],
        }
    }
}

/// The collectives that are measured.
pub const KINDS: [CollectiveKind; 5] = [
    CollectiveKind::AllGather,
    CollectiveKind::AllReduce,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllToAll,
    CollectiveKind::CollectivePermute,
];

/// Runs all benchmarks, each `runs` times; if `only` is not empty, runs only the benchmarks of the collectives in
/// `only`. Returns the seconds per iteration of an empty loop, and the samples.
pub fn micro(
    engine: &Engine,
    chip: Option<&Chip>,
    runs: usize,
    only: &[CollectiveKind],
) -> Result<(f64, Vec<Sample>), RuntimeError> {
    let sizes = BenchmarkSizes::new(engine.spec().is_host);
    let (iteration_seconds, kernels) = kernels(engine, chip, runs)?;
    let clock = BenchmarkTimer { engine, chip, runs, iteration_seconds };
    let mut samples = Vec::from_iter(only.is_empty().then_some(kernels));
    let wanted = |micro: &Micro| only.is_empty() || micro.collective.is_some_and(|kind| only.contains(&kind));
    for micro in programs(engine, &sizes)?.into_iter().filter(wanted) {
        samples.extend(clock.time(&micro)?);
    }
    Ok((iteration_seconds, samples))
}

/// Returns all programs except those that measure kernel overhead.
fn programs(engine: &Engine, sizes: &BenchmarkSizes) -> Result<Vec<Micro>, RuntimeError> {
    let mut all = Vec::new();
    for [rows, from, to] in &sizes.matmuls {
        all.push(programs::matmul(*rows, *from, *to, sizes.dtype)?);
    }
    let lowering = (engine.spec().lowering)(engine.toolchain());
    // The plain attention kernel consists of matmuls and memory passes, which are measured separately.
    if lowering.attention != Kernel::Plain {
        for size in &sizes.attention {
            all.push(programs::attention(lowering.attention, *size, sizes.dtype)?);
        }
    }
    for size in &sizes.memory {
        all.push(programs::memory(*size)?);
    }
    for [rows, width] in &sizes.norms {
        all.push(programs::norm(*rows, *width)?);
    }
    for size in sizes.host_copies.iter().filter(|_| engine.spec().streams_weights) {
        all.push(programs::host_copy(*size)?);
    }
    let devices = engine.devices().len();
    for group in (2..=devices).filter(|n| devices.is_multiple_of(*n)) {
        for kind in KINDS {
            for size in &sizes.collectives {
                all.push(programs::collective(kind, devices, group, *size)?);
            }
        }
    }
    if devices > 1 {
        for kind in [CollectiveKind::AllGather, CollectiveKind::AllReduce, CollectiveKind::AllToAll] {
            for (size, concurrent) in &sizes.overlapped {
                all.push(programs::overlapped(kind, devices, *size, *concurrent)?);
            }
        }
    }
    Ok(all)
}

/// Returns the seconds per iteration of an empty loop, and a sample with the time of a minimal kernel. Both are
/// computed from two programs that differ only in the number of kernels.
fn kernels(engine: &Engine, chip: Option<&Chip>, runs: usize) -> Result<(f64, Sample), RuntimeError> {
    const FEW: usize = 8;
    const MANY: usize = 72;
    let clock = BenchmarkTimer { engine, chip, runs, iteration_seconds: 0.0 };
    let of = |operations: usize| -> Result<f64, RuntimeError> {
        let micro = programs::kernel(operations)?;
        let (executable, operands) = clock.ready(&micro)?;
        clock.iteration(&executable, &operands)
    };
    let (few, many) = (of(FEW)?, of(MANY)?);
    let kernel = ((many - few) / (MANY - FEW) as f64).max(0.0);
    let iteration_seconds = (few - kernel * FEW as f64).max(0.0);
    tracing::info!("kernel {:.2} us, loop iteration {:.2} us", kernel * 1e6, iteration_seconds * 1e6);
    let sample = Sample {
        benchmark: Microbenchmark::Kernel,
        collective: None,
        name: format!("{FEW} and {MANY} kernels per iteration"),
        devices: 1,
        flops: 0.0,
        idle: 0.0,
        bytes: 0.0,
        wire_bytes: 0.0,
        host_bytes: 0.0,
        kernels: 1.0,
        seconds: kernel,
    };
    Ok((iteration_seconds, sample))
}

struct BenchmarkTimer<'a> {
    engine: &'a Engine,
    chip: Option<&'a Chip>,
    runs: usize,
    /// Seconds per iteration of an empty loop.
    iteration_seconds: f64,
}

impl BenchmarkTimer<'_> {
    /// Compiles the program and generates random operands.
    fn ready(&self, micro: &Micro) -> Result<(CompiledProgram, Vec<(String, ShardedTensor)>), RuntimeError> {
        let operand = |name: &str, dims: &[usize], ty: &ltx2_stablehlo::Type| Param {
            component: "bench",
            name: name.into(),
            ty: ty.clone(),
            axes: vec![Axis::Replicated; dims.len()],
            source: Source::Stack { keys: vec![name.into()], shape: dims.to_vec() },
            // Scaled so that matmul results have the magnitude of their operands.
            init: Init::normal(if dims.len() == 2 { (dims[0] as f32).powf(-0.5) } else { 1.0 }),
        };
        let arguments = micro.program.arguments.iter().filter(|a| a.name != COUNT);
        let params: Vec<Param> = arguments.map(|a| operand(&a.name, &a.ty.dims, &a.ty)).collect();
        let made = random::parameters(self.engine, &micro.program, &params.iter().collect::<Vec<_>>(), 0)?;
        let executable = self.engine.compile(&micro.name, &micro.program)?;
        Ok((executable, params.into_iter().map(|p| p.name).zip(made).collect()))
    }

    /// Returns the seconds per iteration, from the difference between many and few iterations.
    fn iteration(
        &self,
        executable: &CompiledProgram,
        operands: &[(String, ShardedTensor)],
    ) -> Result<f64, RuntimeError> {
        let run = |turns: i32| -> Result<f64, RuntimeError> {
            let count = self.engine.upload(executable, COUNT, &Tensor::I32(arr0(turns).into_dyn()))?;
            count.wait()?;
            let find = |name: &str| match name == COUNT {
                true => Some(&count),
                false => operands.iter().find(|(own, _)| own == name).map(|(_, value)| value),
            };
            let started = Instant::now();
            self.engine.run(executable, find)?.wait()?;
            Ok(started.elapsed().as_secs_f64())
        };
        // The first run warms up; the next two determine the number of iterations.
        run(1)?;
        let (one, some) = (run(1)?, run(5)?);
        let guess = ((some - one) / 4.0).max(1e-6);
        let many = ((LONG / guess) as i32).clamp(8, MAX_ITERATIONS);
        let few = many / 4;
        let shortest = |turns: i32| -> Result<f64, RuntimeError> {
            (0..self.runs.max(1)).try_fold(f64::INFINITY, |best, _| Ok(best.min(run(turns)?)))
        };
        let (short, long) = (shortest(few)?, shortest(many)?);
        Ok((long - short) / f64::from(many - few))
    }

    /// Measures the time of one operation. If the operation cannot be measured, logs a warning and returns `None`.
    fn time(&self, micro: &Micro) -> Result<Option<Sample>, RuntimeError> {
        let (executable, operands) = self.ready(micro)?;
        let name = match micro.collective {
            Some(kind) => format!("{} {} among {} devices", kind.name(), micro.name, micro.devices),
            None => micro.name.clone(),
        };
        let read = executable.compiled().optimized_program().ok();
        let read = read.and_then(|o| Module::decode(&o.format, &o.bytes).ok());
        let Some(read) = read.map(|m| report(&m, &executable.mesh().axes, &[], self.chip)) else {
            tracing::warn!("{name}: skipped: the plugin does not return the optimized program");
            return Ok(None);
        };
        let each = micro.operations as f64;
        if let Some(why) = changed(micro, &read) {
            tracing::warn!("{name}: skipped: {why}");
            return Ok(None);
        }
        let seconds = (self.iteration(&executable, &operands)? - self.iteration_seconds) / each;
        tracing::info!("{name}: {:.2} us", seconds * 1e6);
        if seconds <= 0.0 {
            tracing::warn!("{name}: skipped: too short to measure");
            return Ok(None);
        }
        Ok(Some(Sample {
            benchmark: micro.benchmark,
            collective: micro.collective,
            name: micro.name.clone(),
            devices: micro.devices,
            flops: read.step.flops / each,
            idle: read.step.idle / each,
            bytes: read.step.bytes / each,
            wire_bytes: read.per_step().wire_bytes / each,
            host_bytes: read.step.host / each,
            kernels: (read.step.kernels / each).round(),
            seconds,
        }))
    }
}

/// Returns a description of the difference between the optimized program and the operation to be timed; `None` if it
/// does not differ.
fn changed(micro: &Micro, read: &Report) -> Option<String> {
    let each = micro.operations as f64;
    let near = |got: f64, want: f64, what: &str| {
        let message = format!("the optimized program has {got:.3e} {what} per operation, expected {want:.3e}");
        ((got / want - 1.0).abs() > 0.02).then_some(message)
    };
    match micro.expected {
        ExpectedFigure::Any => None,
        ExpectedFigure::Flops(flops) => near(read.step.flops / each, flops, "matmul FLOPs"),
        ExpectedFigure::Bytes(bytes) => near(read.step.bytes / each, bytes, "bytes of memory traffic"),
        ExpectedFigure::HostBytes(bytes) => near(read.step.host / each, bytes, "bytes of copies from host memory"),
        ExpectedFigure::One => {
            let own = read.collectives.iter().filter(|c| Some(c.kind) == micro.collective);
            let count: f64 = own.map(|c| read.trips(c)).sum();
            near(count / each, 1.0, "collectives of this kind")
        }
        ExpectedFigure::Overlapped => {
            let own: Vec<_> = read.collectives.iter().filter(|c| Some(c.kind) == micro.collective).collect();
            match own.as_slice() {
                [one] if one.overlapped => None,
                [_] => Some("the optimized program does not overlap the collective with other work".into()),
                other => {
                    Some(format!("the optimized program has {} collectives of this kind, expected 1", other.len()))
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ltx2_stablehlo::MemorySpace;

    #[test]
    fn host_copies_read_one_argument_in_host_memory() {
        for size in BenchmarkSizes::new(false).host_copies {
            let program = programs::host_copy(size).unwrap().program;
            let in_host: Vec<_> = program
                .arguments
                .iter()
                .filter(|a| a.memory == MemorySpace::PinnedHost)
                .map(|a| a.ty.bytes())
                .collect();
            assert_eq!(in_host, [size]);
        }
    }

    #[test]
    fn overlapped_programs_build_for_all_sizes_and_device_counts() {
        for (size, concurrent) in BenchmarkSizes::new(false).overlapped {
            for (kind, devices) in KINDS.into_iter().flat_map(|kind| [(kind, 2), (kind, 4)]) {
                let micro = programs::overlapped(kind, devices, size, concurrent).unwrap();
                assert_eq!(micro.program.devices(), devices);
                let matmuls = matches!(concurrent, Concurrent::Matmuls { .. });
                assert_eq!(micro.program.dot_flops > 0.0, matmuls, "{}", micro.name);
            }
        }
    }
}
