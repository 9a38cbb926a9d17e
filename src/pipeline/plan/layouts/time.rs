//! Predicts the time of a program's step from the work of one device, without compiling.
//!
//! | part | what is counted | GPUs connected by a switch | TPUs in a torus |
//! |---|---|---|---|
//! | matmuls | the roofline time of each matmul's shard, including padding and repeated work | yes | yes |
//! | other operations | [`PASSES`] additional passes of a matmul's activations and result through device memory | yes | no: fused into matmuls |
//! | copies | [`COPIES`] passes of the result of an all-gather or an all-to-all through device memory | yes | no |
//! | links | each collective in the program, and those that the partitioner inserts because of the program's shardings | yes | yes |
//! | host | the arguments in host memory, each copied to the device once | yes | yes |
//! | hidden | link time that overlaps with compute | gathers of weights | [`HIDDEN`] of the gathers of weights; other gathers up to the chip's `window`, a fraction of the matmul time |
//!
//! The step time is the larger of two values: the time of the copies from host memory, and the sum of the other parts
//! minus the hidden time.

use super::bound::local_bytes;
use crate::analysis::{Chip, CollectiveKind, Links, Work};
use crate::hlo::{CollectiveTransfer, DType, Matmul, MemorySpace, Pattern, Program};

/// Estimated passes of a matmul's left operand and result through device memory, by the norms, rotations and sums
/// before and after it. Compiled modules of the published models for H100s make 2.1 passes.
const PASSES: f64 = 2.0;

/// Number of times that the result of an all-gather or an all-to-all is moved through device memory again, because its
/// parts are not in the order that the next operation reads. The permutes of ring attention need no such copies.
/// Compiled modules with and without ring attention for two and four H100s differ by 1.6 to 2.2 passes.
const COPIES: f64 = 2.0;

/// Fraction of a weight's all-gather that the TPU compiler overlaps with matmuls. The value is fitted to the 150
/// compiled modules of benchmarks/tpu-slices.md and benchmarks/search (libtpu 0.0.52): estimates deviate by 7 % (root
/// mean square) from the step times predicted from these modules. According to the predicted times, the layout with the
/// smallest estimate is at most 0.8 % slower than the fastest, except for one of 28 combinations of slice and shape
/// (4.4 %).
const HIDDEN: f64 = 0.5;

/// Predicted time of a step in milliseconds, by part.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepTime {
    pub(crate) matmuls: f64,
    /// Passes of activations through device memory by operations other than matmuls.
    pub(crate) passes: f64,
    pub(crate) copies: f64,
    /// Collectives.
    pub(crate) links: f64,
    /// Part of `links` that overlaps with compute.
    pub(crate) hidden: f64,
    /// Copies of arguments from host memory; 0 if the chip's bandwidth to host memory is unknown.
    pub(crate) host: f64,
}

impl StepTime {
    /// Returns the step time: the larger of the time of the copies from host memory and the sum of the other parts
    /// minus the hidden time.
    pub(crate) fn total(&self) -> f64 {
        (self.matmuls + self.passes + self.copies + self.links - self.hidden).max(self.host)
    }

    /// Predicts the time of a program's step. `weights`: milliseconds of link time that is spent on gathering weights.
    /// A loop whose trip count is not constant is counted as one step.
    pub(crate) fn predict(program: &Program, chip: &Chip, weights: f64) -> StepTime {
        let work = &program.work;
        let of_matmuls = |of: fn(&Matmul, &Chip) -> f64| work.matmuls.iter().map(|m| m.times * of(m, chip) * 1e3).sum();
        let of_transfers = |of: fn(&CollectiveTransfer, &Chip) -> f64| {
            work.transfers.iter().map(|t| t.times * of(t, chip) * 1e3).sum()
        };
        let (matmuls, links): (f64, f64) = (of_matmuls(matmul), of_transfers(link));
        let in_host = program.arguments.iter().filter(|a| a.memory == MemorySpace::PinnedHost);
        let bytes = in_host.map(|a| local_bytes(&a.ty, &program.mesh, a.sharding.as_ref()) as f64);
        let host = bytes.filter_map(|bytes| chip.host_seconds(bytes)).sum::<f64>() * 1e3;
        match chip.links {
            // Only the matmul of a layer waits for the layer's weights, so compilers can start to gather weights early.
            Links::Switch { .. } => {
                let (passes, copies) = (of_matmuls(passes), of_transfers(copies));
                StepTime { matmuls, passes, copies, links, hidden: weights.min(links).min(matmuls + passes), host }
            }
            Links::Torus { window, .. } => {
                let gathers: f64 = of_transfers(gather);
                let weights = weights.min(gathers);
                let hidden = HIDDEN * weights + (gathers - weights).min(window * matmuls);
                StepTime { matmuls, links, hidden: hidden.min(matmuls), host, ..StepTime::default() }
            }
        }
    }
}

fn matmul(m: &Matmul, chip: &Chip) -> f64 {
    let of = |is: bool| if is { m.flops } else { 0.0 };
    let work = Work {
        flops: m.flops,
        fp8: of(m.dtype == DType::F8E4M3FN),
        int8: of(m.dtype == DType::I8),
        f32: of(m.dtype == DType::F32),
        attention: of(m.attention.is_some()),
        idle: m.attention.map_or(0.0, |a| chip.idle_flops(a.heads as f64, a.queries as f64, m.flops)),
        bytes: m.bytes.iter().sum(),
        host: 0.0,
        kernels: 1.0,
    };
    chip.op_time(work).total()
}

fn passes(m: &Matmul, chip: &Chip) -> f64 {
    let [left, _, result] = m.bytes;
    chip.op_time(Work { bytes: PASSES * (left + result), kernels: PASSES, ..Work::default() }).total()
}

fn copies(t: &CollectiveTransfer, chip: &Chip) -> f64 {
    match t.pattern {
        Pattern::AllGather | Pattern::AllToAll => {
            chip.op_time(Work { bytes: COPIES * t.bytes, ..Work::default() }).total()
        }
        Pattern::AllReduce | Pattern::ReduceScatter | Pattern::Permute => 0.0,
    }
}

fn link(t: &CollectiveTransfer, chip: &Chip) -> f64 {
    let groups: Vec<Vec<i64>> = t.groups.0.iter().map(|g| g.iter().map(|d| *d as i64).collect()).collect();
    chip.link_seconds(kind(t), wire_bytes(t), &groups)
}

fn gather(t: &CollectiveTransfer, chip: &Chip) -> f64 {
    if t.pattern == Pattern::AllGather { link(t, chip) } else { 0.0 }
}

fn kind(t: &CollectiveTransfer) -> CollectiveKind {
    match t.pattern {
        Pattern::AllGather => CollectiveKind::AllGather,
        Pattern::AllToAll => CollectiveKind::AllToAll,
        Pattern::AllReduce => CollectiveKind::AllReduce,
        Pattern::ReduceScatter => CollectiveKind::ReduceScatter,
        Pattern::Permute => CollectiveKind::CollectivePermute,
    }
}

/// Returns the bytes that a device receives when the collective is executed once.
fn wire_bytes(t: &CollectiveTransfer) -> f64 {
    kind(t).wire_bytes(t.bytes, t.groups.size())
}

/// Returns the bytes that a device receives per step.
pub(crate) fn received(program: &Program) -> f64 {
    program.work.transfers.iter().map(|t| t.times * wire_bytes(t)).sum()
}

#[cfg(test)]
mod tests {
    use super::super::estimate::{Estimator, RankingDevices};
    use super::super::space::placed;
    use super::*;
    use crate::config::{Config, parse_mesh, read_layout_source, resolve_mesh};
    use crate::hlo::{Argument, Builder, DeviceMesh, Sharding, Type};
    use crate::runtime::Target;

    /// Estimates a step of LTX-2.0 at 768x512x121 on one H200, in milliseconds.
    fn ltx2_step(set: &[&str]) -> f64 {
        let target: Target = "cuda:h200:1x1x1".parse().expect("a target");
        let (toolchain, count, capacity) = target.described();
        let chip = target.chip();
        let size = ["request.width=768", "request.height=512", "request.num_frames=121"];
        let config = Config::load("ltx2", size.iter().chain(set).map(ToString::to_string)).expect("a configuration");
        let mesh = resolve_mesh(&parse_mesh("data=1").expect("a mesh"), count).expect("one device");
        let layout = read_layout_source("replicated").expect("a layout");
        let point = placed("replicated".into(), None, &layout, &mesh).expect("a point");
        let devices = RankingDevices { toolchain: &toolchain, count, capacity, chip: chip.as_ref() };
        let estimator = Estimator::new(&config, devices, None).expect("an estimator");
        estimator.estimate(&point).expect("an estimate").0.cost / estimator.steps() as f64
    }

    /// Compares the estimates with steps measured on an H200.
    #[test]
    fn estimates_of_streamed_steps_are_close_to_measurements() {
        let streamed = ["runtime.stream=on"];
        let half = ["runtime.stream=on", "runtime.resident_blocks=24"];
        let fp8 = ["runtime.stream=on", "runtime.weights=fp8"];
        for (set, measured) in [(&[][..], 654.8), (&streamed, 710.4), (&half, 658.4), (&fp8, 537.3)] {
            let got = ltx2_step(set);
            eprintln!("{set:?}: {got:.1} ms of {measured}");
            assert!((0.8..1.1).contains(&(got / measured)), "{set:?}: {got} of {measured} ms");
        }
    }

    /// A matmul with a weight in host memory, on one device and sharded over two.
    #[test]
    fn copies_from_host_memory_add_only_the_time_that_compute_does_not_hide() {
        let predict = |rows: usize, memory: MemorySpace, sharded: bool, chip: &Chip| {
            let mesh = if sharded { DeviceMesh::new(&[("data", 2)]) } else { DeviceMesh::default() };
            let b = Builder::new("host").with_mesh(mesh);
            let x = b.argument("x", Type::new(DType::BF16, [rows, 4096]));
            let ty = Type::new(DType::BF16, [4096, 4096]);
            let sharding = sharded.then(|| Sharding(vec![vec!["data".into()], vec![]]));
            let w = b.argument_with(Argument { memory, sharding, ..Argument::new("w", ty) });
            let y = b.einsum("ij,jk->ik", &x, &w.copy_to(MemorySpace::Device), DType::BF16);
            StepTime::predict(&b.finish(&[("y", &y)]).expect("builds"), chip, 0.0)
        };
        let (host, device) = (MemorySpace::PinnedHost, MemorySpace::Device);
        let chip = Chip::named("h200").expect("embedded");
        let copy = chip.host_seconds(2.0 * 4096.0 * 4096.0).expect("known") * 1e3;
        let [short, long] = [128, 65536].map(|rows| predict(rows, device, false, chip).total());
        assert!(short < copy && copy < long, "{short}, {copy} and {long} ms");
        let [few, many] = [128, 65536].map(|rows| predict(rows, host, false, chip));
        assert_eq!((few.host, few.total(), many.host, many.total()), (copy, copy, copy, long));
        assert_eq!(predict(128, host, true, chip).host, copy / 2.0);
        let unknown = Chip { host_bandwidth: None, ..chip.clone() };
        assert_eq!(predict(128, host, false, &unknown).total(), short);
    }
}
