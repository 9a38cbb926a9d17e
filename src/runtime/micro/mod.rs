//! Microbenchmarks: the rates that a device and its links reach.
//!
//! Each repeats one operation inside a loop whose bound is an input. The time of an operation is the difference between
//! many iterations and few, so that launching the program costs nothing, less an iteration of an empty loop. Before the
//! clock starts, the optimized program is read: an operation that the compiler changed is skipped with a warning.

mod programs;

use std::time::Instant;

use ndarray::arr0;

use super::engine::Engine;
use super::error::RuntimeError;
use super::executable::Executable;
use super::random;
use super::sharded_tensor::ShardedTensor;
use crate::analysis::{Chip, CollectiveKind, Microbenchmark, Module, Report, Sample, report};
use crate::hlo::DType;
use crate::kernels::Kernel;
use crate::nn::{Axis, Init, Lowering, Param, Source};
use crate::tensor::Tensor;
use programs::{Beside, COUNT, Expected, Micro};

/// Seconds that the many turns take together.
const LONG: f64 = 0.03;
/// Turns at most: a kernel of a microsecond is timed long enough then.
const MOST_TURNS: i32 = 4096;

/// The sizes that are timed.
struct Sizes {
    dtype: DType,
    /// Rows, from, to.
    matmuls: Vec<[usize; 3]>,
    /// Queries, keys and heads.
    attention: Vec<[usize; 3]>,
    /// Bytes of an array.
    memory: Vec<usize>,
    /// Rows and width.
    norms: Vec<[usize; 2]>,
    /// Bytes of a collective.
    collectives: Vec<usize>,
    /// Bytes of a collective, and work that runs meanwhile: longer and shorter than it.
    overlapped: Vec<(usize, Beside)>,
}

const MIB: usize = 1 << 20;

impl Sizes {
    /// Those of the published models' blocks on an accelerator; small ones on a CPU.
    fn of(platform: &str) -> Sizes {
        if platform == "cpu" {
            return Sizes {
                dtype: DType::F32,
                matmuls: vec![[128, 128, 256], [256, 256, 512]],
                attention: vec![[128, 128, 2]],
                memory: vec![MIB, 4 * MIB],
                norms: vec![[256, 1024]],
                collectives: vec![MIB / 16, MIB],
                // Its collectives have no start and end of their own.
                overlapped: Vec::new(),
            };
        }
        let rows = [128, 512, 1536, 3072, 6144, 12288];
        let mut matmuls: Vec<[usize; 3]> = rows.into_iter().map(|m| [m, 4096, 4096]).collect();
        matmuls.extend([1536, 6144, 12288].map(|m| [m, 4096, 16384]));
        matmuls.extend([3072, 6144].map(|m| [m, 4096, 2048]));
        matmuls.push([8192, 8192, 8192]);
        Sizes {
            dtype: DType::BF16,
            matmuls,
            // Of tokens to themselves; of a text or a sound to the video, and the video to them.
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
            collectives: vec![MIB / 16, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB],
            overlapped: vec![
                (32 * MIB, Beside::Matmuls { pairs: 1, rows: 6144, from: 4096, to: 4096 }),
                (64 * MIB, Beside::Matmuls { pairs: 2, rows: 3072, from: 4096, to: 16384 }),
                (512 * MIB, Beside::Matmuls { pairs: 1, rows: 1536, from: 4096, to: 4096 }),
                (512 * MIB, Beside::Matmuls { pairs: 1, rows: 6144, from: 4096, to: 4096 }),
                (64 * MIB, Beside::Copies { count: 4, size: 256 * MIB }),
                (512 * MIB, Beside::Copies { count: 2, size: 64 * MIB }),
                (512 * MIB, Beside::Copies { count: 1, size: 256 * MIB }),
            ],
        }
    }
}

/// The kinds that are measured.
pub(crate) const KINDS: [CollectiveKind; 5] = [
    CollectiveKind::AllGather,
    CollectiveKind::AllReduce,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllToAll,
    CollectiveKind::CollectivePermute,
];

/// Times everything, or collectives of `only` these kinds, `runs` times each, on devices of a chip; seconds of a turn of an empty
/// loop, and the samples.
pub(crate) fn micro(
    engine: &Engine,
    chip: Option<&Chip>,
    runs: usize,
    only: &[CollectiveKind],
) -> Result<(f64, Vec<Sample>), RuntimeError> {
    let sizes = Sizes::of(engine.platform());
    let (turn, kernels) = kernels(engine, chip, runs)?;
    let clock = Clock { engine, chip, runs, turn };
    let mut samples = Vec::from_iter(only.is_empty().then_some(kernels));
    let wanted = |micro: &Micro| only.is_empty() || micro.collective.is_some_and(|kind| only.contains(&kind));
    for micro in programs(engine, &sizes)?.into_iter().filter(wanted) {
        samples.extend(clock.time(&micro)?);
    }
    Ok((turn, samples))
}

/// Everything but kernels that do nothing.
fn programs(engine: &Engine, sizes: &Sizes) -> Result<Vec<Micro>, RuntimeError> {
    let mut all = Vec::new();
    for [rows, from, to] in &sizes.matmuls {
        all.push(programs::matmul(*rows, *from, *to, sizes.dtype)?);
    }
    let lowering = Lowering::of(engine.platform(), engine.own_device().kind());
    // In XLA's own operations attention is matmuls and passes over memory, which are timed as such.
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
            for (size, beside) in &sizes.overlapped {
                all.push(programs::overlapped(kind, devices, *size, *beside)?);
            }
        }
    }
    Ok(all)
}

/// A turn of an empty loop, and a kernel: of two programs that differ in kernels alone.
fn kernels(engine: &Engine, chip: Option<&Chip>, runs: usize) -> Result<(f64, Sample), RuntimeError> {
    const FEW: usize = 8;
    const MANY: usize = 72;
    let clock = Clock { engine, chip, runs, turn: 0.0 };
    let of = |operations: usize| -> Result<f64, RuntimeError> {
        let micro = programs::kernel(operations)?;
        let (executable, operands) = clock.ready(&micro)?;
        clock.iteration(&executable, &operands)
    };
    let (few, many) = (of(FEW)?, of(MANY)?);
    let kernel = ((many - few) / (MANY - FEW) as f64).max(0.0);
    let turn = (few - kernel * FEW as f64).max(0.0);
    tracing::info!("a kernel {:.2} us, a turn of a loop {:.2} us", kernel * 1e6, turn * 1e6);
    let sample = Sample {
        benchmark: Microbenchmark::Kernel,
        collective: None,
        name: format!("{FEW} and {MANY} a turn"),
        devices: 1,
        flops: 0.0,
        idle: 0.0,
        bytes: 0.0,
        wire_bytes: 0.0,
        kernels: 1.0,
        seconds: kernel,
    };
    Ok((turn, sample))
}

struct Clock<'a> {
    engine: &'a Engine,
    chip: Option<&'a Chip>,
    runs: usize,
    /// Seconds of a turn of an empty loop.
    turn: f64,
}

impl Clock<'_> {
    /// The program compiled, with random operands.
    fn ready(&self, micro: &Micro) -> Result<(Executable, Vec<(String, ShardedTensor)>), RuntimeError> {
        let operand = |name: &str, dims: &[usize], ty: &crate::hlo::Type| Param {
            component: "bench",
            name: name.into(),
            ty: ty.clone(),
            axes: vec![Axis::Replicated; dims.len()],
            source: Source::Stack { keys: vec![name.into()], shape: dims.to_vec() },
            // Matmuls of such matrices have results of the size of their operands.
            init: Init::normal(if dims.len() == 2 { (dims[0] as f32).powf(-0.5) } else { 1.0 }),
        };
        let arguments = micro.program.arguments.iter().filter(|a| a.name != COUNT);
        let params: Vec<Param> = arguments.map(|a| operand(&a.name, &a.ty.dims, &a.ty)).collect();
        let made = random::parameters(self.engine, &micro.program, &params.iter().collect::<Vec<_>>(), 0)?;
        let executable = self.engine.compile(&micro.name, &micro.program)?;
        Ok((executable, params.into_iter().map(|p| p.name).zip(made).collect()))
    }

    /// Seconds of a turn: of many turns less few.
    fn iteration(&self, executable: &Executable, operands: &[(String, ShardedTensor)]) -> Result<f64, RuntimeError> {
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
        // The first run warms up; the second says how many turns make up the time.
        run(1)?;
        let (one, some) = (run(1)?, run(5)?);
        let guess = ((some - one) / 4.0).max(1e-6);
        let many = ((LONG / guess) as i32).clamp(8, MOST_TURNS);
        let few = many / 4;
        let shortest = |turns: i32| -> Result<f64, RuntimeError> {
            (0..self.runs.max(1)).try_fold(f64::INFINITY, |best, _| Ok(best.min(run(turns)?)))
        };
        let (short, long) = (shortest(few)?, shortest(many)?);
        Ok((long - short) / f64::from(many - few))
    }

    /// One operation; none where the compiler made something else of it.
    fn time(&self, micro: &Micro) -> Result<Option<Sample>, RuntimeError> {
        let (executable, operands) = self.ready(micro)?;
        let name = match micro.collective {
            Some(kind) => format!("{} {} between {}", kind.name(), micro.name, micro.devices),
            None => micro.name.clone(),
        };
        let read = executable.compiled().optimized_program().ok();
        let read = read.and_then(|o| Module::decode(&o.format, &o.bytes).ok());
        let Some(read) = read.map(|m| report(&m, &executable.mesh().axes, &[], self.chip)) else {
            tracing::warn!("{name}: left out: the plugin does not show its program");
            return Ok(None);
        };
        let each = micro.operations as f64;
        if let Some(why) = changed(micro, &read) {
            tracing::warn!("{name}: left out: {why}");
            return Ok(None);
        }
        let seconds = (self.iteration(&executable, &operands)? - self.turn) / each;
        tracing::info!("{name}: {:.2} us", seconds * 1e6);
        if seconds <= 0.0 {
            tracing::warn!("{name}: left out: it takes less than the clock can tell");
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
            kernels: (read.step.kernels / each).round(),
            seconds,
        }))
    }
}

/// Difference between the optimized program and the operation to time.
fn changed(micro: &Micro, read: &Report) -> Option<String> {
    let each = micro.operations as f64;
    let near = |got: f64, want: f64, what: &str| {
        let message = format!("the compiler's program has {got:.3e} {what} an operation, not {want:.3e}");
        ((got / want - 1.0).abs() > 0.02).then_some(message)
    };
    match micro.expected {
        Expected::Any => None,
        Expected::Flops(flops) => near(read.step.flops / each, flops, "FLOPs of matmuls"),
        Expected::Bytes(bytes) => near(read.step.bytes / each, bytes, "bytes of memory"),
        Expected::One => {
            let own = read.collectives.iter().filter(|c| Some(c.kind) == micro.collective);
            let count: f64 = own.map(|c| read.trips(c)).sum();
            near(count / each, 1.0, "such collectives")
        }
        Expected::Overlapped => {
            let own: Vec<_> = read.collectives.iter().filter(|c| Some(c.kind) == micro.collective).collect();
            match own.as_slice() {
                [one] if one.overlapped => None,
                [_] => Some("the compiler's program overlaps it with nothing".into()),
                other => Some(format!("the compiler's program has {} such collectives", other.len())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapped_programs_are_written_for_every_size_and_number_of_devices() {
        for (size, beside) in Sizes::of("cuda").overlapped {
            for (kind, devices) in KINDS.into_iter().flat_map(|kind| [(kind, 2), (kind, 4)]) {
                let micro = programs::overlapped(kind, devices, size, beside).unwrap();
                assert_eq!(micro.program.devices(), devices);
                let matmuls = matches!(beside, Beside::Matmuls { .. });
                assert_eq!(micro.program.dot_flops > 0.0, matmuls, "{}", micro.name);
            }
        }
    }
}
