//! The shipped configurations of TPU slices with the TPU compiler. `make test-tpu` compiles a loop of a few
//! layers for one slice per chip and one with integer weights, text encoder and video decoder for the chip with the
//! least memory, and LTX-2.5's text encoder. The full test compiles those of all files, and their loops with all
//! layers, for all generations and both passes.

use std::collections::BTreeSet;

use ltx2::analysis::{CollectiveKind, LoopLevel, StoredArray};
use ltx2::config::presets::CONFIGS;
use ltx2::hlo::DType;
use ltx2::pipeline::programs::build::ProgramKind;

use crate::support::tpu::{Case, Compiled, compiled, is_chosen, parameter_bytes};
use crate::support::{full, layout_choice, needs};

/// A denoising loop: of a single pass at the slice's size, or of the second of two passes at 1536x1024.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loop {
    Ltx2,
    Ltx2Refining,
    Ltx23,
    Ltx23Refining,
    Ltx25,
    Ltx25Refining,
}

/// Limits of a loop on a device, in megabytes.
struct Cost {
    of: Loop,
    /// Collective output per layer.
    layer: f64,
    temporaries: f64,
    /// Stacks of layers that may be copied before the loop.
    copies: f64,
}

impl Cost {
    const fn copying(self, copies: f64) -> Self {
        Cost { copies, ..self }
    }
}

const fn cost(of: Loop, layer: f64, temporaries: f64) -> Cost {
    Cost { of, layer, temporaries, copies: 0.0 }
}

/// A slice's file and the limits of its loops.
struct Slice {
    config: &'static str,
    target: &'static str,
    /// Width, height and frames that the file is for.
    size: [usize; 3],
    /// With two layers.
    few: Cost,
    /// With all layers.
    all: &'static [Cost],
    /// Whether its loop is compiled in the full test only.
    in_full: bool,
    /// Whether `make test-tpu` compiles its text encoder and decoder: on the chip with the least memory, and LTX-2.5's
    /// text encoder.
    compiles_others: bool,
    /// Whether a block gathers weights.
    gathers_weights: bool,
}

/// Size of the second pass if the first is 768x512.
const TWICE: [usize; 3] = [1536, 1024, 121];

impl Slice {
    const fn new(config: &'static str, target: &'static str, few: Cost, all: &'static [Cost]) -> Self {
        let (in_full, compiles_others, gathers_weights) = (false, false, false);
        Slice { config, target, size: [768, 512, 121], few, all, in_full, compiles_others, gathers_weights }
    }

    const fn large(self) -> Self {
        Slice { size: [1280, 768, 121], ..self }
    }

    const fn in_full(self) -> Self {
        Slice { in_full: true, ..self }
    }

    const fn compiles_others(self) -> Self {
        Slice { compiles_others: true, ..self }
    }

    const fn gathers_weights(self) -> Self {
        Slice { gathers_weights: true, ..self }
    }
}

use Loop::{Ltx2, Ltx2Refining, Ltx23, Ltx23Refining, Ltx25, Ltx25Refining};

#[rustfmt::skip]
const SLICES: &[Slice] = &[
    Slice::new("tpu/v5e-16-large", "tpu:v5e:4x4", cost(Ltx2, 820.0, 550.0), &[cost(Ltx2, 820.0, 550.0), cost(Ltx2Refining, 976.0, 625.0), cost(Ltx23, 1140.0, 965.0), cost(Ltx23Refining, 1002.0, 700.0)]).large().gathers_weights().in_full(),
    Slice::new("tpu/v6e-8-large", "tpu:v6e:2x4", cost(Ltx2, 544.0, 680.0), &[cost(Ltx2, 544.0, 1420.0), cost(Ltx2Refining, 699.0, 1660.0), cost(Ltx23, 810.0, 2050.0), cost(Ltx23Refining, 699.0, 1705.0)]).large().gathers_weights().in_full(),
    Slice::new("tpu/v5e-16", "tpu:v5e:4x4", cost(Ltx2, 135.0, 10.0), &[cost(Ltx2, 133.0, 10.0), cost(Ltx2Refining, 262.0, 120.0), cost(Ltx23, 265.0, 95.0), cost(Ltx23Refining, 262.0, 65.0)]).compiles_others(),
    Slice::new("tpu/v6e-8", "tpu:v6e:2x4", cost(Ltx2, 160.0, 130.0), &[cost(Ltx2, 159.0, 140.0), cost(Ltx2Refining, 418.0, 510.0), cost(Ltx23, 317.0, 365.0), cost(Ltx23Refining, 418.0, 565.0)]),
    Slice::new("tpu/v6e-8-2_3", "tpu:v6e:2x4", cost(Ltx23, 499.0, 710.0), &[cost(Ltx23, 499.0, 1340.0), cost(Ltx23Refining, 699.0, 1705.0)]).gathers_weights().in_full(),
    Slice::new("tpu/v6e-8-2_5", "tpu:v6e:2x4", cost(Ltx25, 499.0, 710.0), &[cost(Ltx25, 499.0, 1340.0), cost(Ltx25Refining, 699.0, 1705.0)]).gathers_weights().in_full(),
    Slice::new("tpu/v6e-16", "tpu:v6e:4x4", cost(Ltx2, 108.0, 75.0), &[cost(Ltx2, 107.0, 80.0), cost(Ltx2Refining, 314.0, 315.0), cost(Ltx23, 213.0, 220.0), cost(Ltx23Refining, 314.0, 330.0)]).in_full(),
    Slice::new("tpu/v6e-64", "tpu:v6e:8x8", cost(Ltx2, 36.0, 30.0), &[cost(Ltx2, 36.0, 30.0), cost(Ltx2Refining, 94.0, 80.0), cost(Ltx23, 71.0, 65.0), cost(Ltx23Refining, 94.0, 85.0)]).in_full(),
    Slice::new("tpu/v5p-8", "tpu:v5p:2x2x2", cost(Ltx2, 55.0, 130.0), &[cost(Ltx2, 53.0, 95.0), cost(Ltx2Refining, 105.0, 220.0), cost(Ltx23, 106.0, 235.0), cost(Ltx23Refining, 105.0, 205.0)]),
    Slice::new("tpu/v5p-8-2_5", "tpu:v5p:2x2x2", cost(Ltx25, 106.0, 235.0), &[cost(Ltx25, 106.0, 235.0), cost(Ltx25Refining, 105.0, 205.0)]).compiles_others().in_full(),
    Slice::new("tpu/v5p-32", "tpu:v5p:2x4x4", cost(Ltx2, 55.0, 40.0), &[cost(Ltx2, 55.0, 45.0), cost(Ltx2Refining, 132.0, 115.0), cost(Ltx23, 110.0, 90.0), cost(Ltx23Refining, 132.0, 115.0)]).in_full(),
    Slice::new("tpu/tpu7x-8", "tpu:tpu7x:2x2x1", cost(Ltx2, 105.0, 155.0), &[cost(Ltx2, 105.0, 165.0), cost(Ltx2Refining, 313.0, 430.0), cost(Ltx23, 210.0, 505.0).copying(57.0), cost(Ltx23Refining, 313.0, 505.0).copying(57.0)]),
    Slice::new("tpu/tpu7x-8-2_3-large", "tpu:tpu7x:2x2x1", cost(Ltx23, 262.0, 800.0), &[cost(Ltx23, 262.0, 870.0).copying(57.0)]).large().in_full(),
    Slice::new("tpu/tpu7x-8-2_5", "tpu:tpu7x:2x2x1", cost(Ltx25, 210.0, 505.0), &[cost(Ltx25, 210.0, 505.0).copying(57.0), cost(Ltx25Refining, 313.0, 505.0).copying(57.0)]).in_full(),
    Slice::new("tpu/v5e-8-int8", "tpu:v5e:2x4", cost(Ltx2, 260.0, 200.0), &[cost(Ltx2, 236.0, 180.0), cost(Ltx2Refining, 937.0, 1065.0), cost(Ltx23, 472.0, 375.0), cost(Ltx23Refining, 937.0, 1070.0)]).in_full(),
    Slice::new("tpu/v6e-4-int8", "tpu:v6e:2x2", cost(Ltx2, 260.0, 300.0), &[cost(Ltx2, 262.0, 300.0), cost(Ltx2Refining, 833.0, 1345.0), cost(Ltx23, 524.0, 700.0), cost(Ltx23Refining, 833.0, 1345.0)]).in_full(),
    Slice::new("tpu/v5e-16-int8", "tpu:v5e:4x4", cost(Ltx2, 95.0, 60.0), &[cost(Ltx2, 94.0, 50.0), cost(Ltx2Refining, 185.0, 110.0), cost(Ltx23, 187.0, 155.0), cost(Ltx23Refining, 185.0, 115.0)]).in_full(),
    Slice::new("tpu/v6e-8-int8", "tpu:v6e:2x4", cost(Ltx2, 55.0, 105.0), &[cost(Ltx2, 53.0, 85.0), cost(Ltx2Refining, 105.0, 240.0), cost(Ltx23, 106.0, 300.0), cost(Ltx23Refining, 105.0, 300.0)]),
];

/// Returns the selected slices: those of the chip in `LTX2_TEST_CHIP`, if set.
fn chosen() -> impl Iterator<Item = &'static Slice> {
    SLICES.iter().filter(|slice| is_chosen(slice.target))
}

/// Returns the slices' files and targets.
pub fn slices() -> impl Iterator<Item = (&'static str, &'static str)> {
    SLICES.iter().map(|slice| (slice.config, slice.target))
}

/// Compiles hundreds of programs of two blocks: `LTX2_TEST_CHIP=v6e` selects one chip's, `LTX2_TEST_LAYOUTS=tpu/v6e-8`
/// one slice's. Compiled modules are cached.
#[needs(tpu, full)]
fn auto_layout_is_nearly_as_fast_as_the_best_on_every_slice() {
    let asked = chosen().filter(|slice| layout_choice::is_chosen(slice.config));
    let all: Vec<String> = asked.flat_map(|slice| layout_choice::faults(slice.config, &[], slice.target)).collect();
    assert!(all.is_empty(), "{}", all.join("\n"));
}

/// Attention kernels of a block: of each stream to itself, to its text and to the other stream.
const KERNELS: usize = 6;

const NEWER: &[&str] = &["model.path=Lightricks/LTX-2.3"];
const NEWEST: &[&str] = &["model.path=Lightricks/LTX-2.5"];
const IN_TWO: &[&str] = &["pipeline=two_stage"];
const NEWER_IN_TWO: &[&str] = &["model.path=Lightricks/LTX-2.3", "pipeline=two_stage"];
const NEWEST_IN_TWO: &[&str] = &["model.path=Lightricks/LTX-2.5", "pipeline=two_stage"];

impl Slice {
    /// The loop with all layers.
    fn whole(&self, of: Loop) -> Case {
        let (program, size, set) = match of {
            Ltx2 => (ProgramKind::Denoise, self.size, [].as_slice()),
            Ltx23 => (ProgramKind::Denoise, self.size, NEWER),
            Ltx25 => (ProgramKind::Denoise, self.size, NEWEST),
            Ltx2Refining => (ProgramKind::Refine, TWICE, IN_TWO),
            Ltx23Refining => (ProgramKind::Refine, TWICE, NEWER_IN_TWO),
            Ltx25Refining => (ProgramKind::Refine, TWICE, NEWEST_IN_TWO),
        };
        Case { program, size, set, ..Case::shipped(self.config, self.target) }
    }

    /// The loop with the fewest layers that have the same structure.
    fn case(&self) -> Case {
        // With integer weights, loops differ from three blocks on. Later generations have two of four branches on a
        // device: a text's keys are as large as a two-layer weight stack.
        let layers = if self.is_int8() || self.few.of != Ltx2 { 3 } else { 2 };
        Case { layers: Some(layers), ..self.whole(self.few.of) }
    }

    /// Programs around the loop. LTX-2.5's decoders, of which the convolutional one is LTX-2.3's, only in the full
    /// test.
    fn others(&self) -> &'static [ProgramKind] {
        use ProgramKind::{DiffusionDecoder, TextEncoder, VideoDecoder};
        match (self.few.of, full()) {
            (Ltx25, false) => &[TextEncoder],
            (Ltx25, true) => &[TextEncoder, VideoDecoder, DiffusionDecoder],
            _ => &[TextEncoder, VideoDecoder],
        }
    }

    fn is_int8(&self) -> bool {
        self.config.ends_with("int8")
    }

    /// Returns the violated limits of a denoising loop.
    fn faults(&self, done: &Compiled, most: &Cost) -> Vec<String> {
        let mut faults = Vec::new();
        let mut check = |fine: bool, what: String| faults.extend((!fine).then_some(what));
        let kernels = done.module.instructions().filter(|i| i.target == "tpu_custom_call").count();
        check(kernels >= KERNELS, format!("{kernels} attention kernels"));
        // Another libtpu release has other figures: check only that it compiles with the kernel.
        if std::env::var_os("LTX2_PJRT_PLUGIN").is_some() {
            return faults;
        }
        let mb = done.report.per_layer().bytes / 1e6;
        check(mb <= most.layer, format!("{mb:.1} MB a layer"));
        let temporaries = done.memory.temporaries as f64 / 1e6;
        check(temporaries <= most.temporaries, format!("{temporaries:.0} MB of temporaries"));
        let (before, within): (Vec<_>, Vec<_>) =
            done.report.stack_copies.iter().partition(|copy| copy.level == LoopLevel::Outside);
        let copied = before.iter().map(|copy| copy.bytes).sum::<f64>() / 1e6;
        check(copied <= most.copies && within.is_empty(), format!("copies of stacks: {before:?} {within:?}"));
        let gathers = done.report.collectives.iter().filter(|c| c.level == LoopLevel::Block);
        // All-gathers of activations: keys and values and, if heads are sharded, the attention results that are
        // quantized to integers.
        let is_activation = |scope: &str| scope.contains("attn1") || (self.is_int8() && scope.ends_with("attn2/0"));
        let weights = gathers.filter(|c| c.kind == CollectiveKind::AllGather && !is_activation(&c.scope));
        let weights: Vec<&str> = weights.filter(|c| c.bytes > 1e6).map(|c| c.scope.as_str()).collect();
        check(weights.is_empty() || self.gathers_weights, format!("gathers in {weights:?}"));
        // Norm, RoPE and rounding are one fusion each for queries and keys. With few tokens and heads (v6e-64), and in
        // the second pass on v6e-8 with integers, the compiler rounds queries in the next fusion. On v5e the all-gather
        // of keys starts and ends in such fusions, which also write its parts.
        let norms = written_by_norms(done);
        let loops = if self.is_int8() { 3 } else { 1 };
        let are_fused = norms.iter().all(|s| s.opcode == "fusion" && s.scope.ends_with("rope/dot_general"));
        check(!norms.is_empty() && are_fused, format!("norm and RoPE are apart: {norms:?}"));
        let rounds_later = self.config.starts_with("tpu/v6e-64")
            || (self.config == "tpu/v6e-8-int8" && matches!(most.of, Ltx2Refining | Ltx23Refining));
        let gathers_within = self.target.starts_with("tpu:v5e") && self.gathers_weights;
        let are_rounded = norms.iter().all(|s| s.dtype == "bf16");
        let are_two = norms.len() <= 2 * loops || gathers_within;
        check((are_rounded && are_two) || rounds_later, format!("norms write {norms:?}"));
        faults
    }
}

fn tell(slice: &Slice, what: &str, done: &Compiled) {
    let (layer, memory) = (done.report.per_layer(), &done.memory);
    eprintln!(
        "{:22} {what:13} {:6.1} MB a layer, {:3} collectives, temporaries {:5.0} MB, arguments {:5.2} GB, {:3.0} s",
        slice.config,
        layer.bytes / 1e6,
        layer.count,
        memory.temporaries as f64 / 1e6,
        memory.arguments as f64 / 1e9,
        done.seconds
    );
}

/// Returns the arrays that the norms of video queries and keys write in a block, without the RoPE tables, which are
/// broadcast before the loop.
fn written_by_norms(done: &Compiled) -> Vec<StoredArray> {
    let is_norm = |s: &StoredArray| {
        ["norm_q/", "norm_k/"].iter().any(|norm| s.scope.starts_with(&format!("blocks/attn1/{norm}")))
    };
    let is_whole =
        |s: &StoredArray| s.dims.iter().product::<i64>() >= 384 * 16 * 128 && !s.scope.ends_with("broadcast_in_dim");
    done.module.stored_arrays().into_iter().filter(|s| is_norm(s) && is_whole(s)).collect()
}

#[needs(nothing)]
fn every_shipped_slice_has_a_budget() {
    let shipped: Vec<&str> = CONFIGS.iter().map(|(name, _)| *name).filter(|name| name.starts_with("tpu/")).collect();
    let mut lines: Vec<&str> = SLICES.iter().map(|slice| slice.config).collect();
    let mut missing = shipped.clone();
    missing.retain(|name| !lines.contains(name));
    lines.retain(|name| !shipped.contains(name));
    assert!(missing.is_empty() && lines.is_empty(), "without a line: {missing:?}, without a file: {lines:?}");
}

#[needs(tpu)]
fn shipped_denoising_loops_stay_within_budgets() {
    let mut failed = Vec::new();
    for slice in chosen().filter(|slice| !slice.in_full || full()) {
        let done = compiled(slice.case());
        tell(slice, "few layers", &done);
        failed.extend(slice.faults(&done, &slice.few).into_iter().map(|fault| format!("{}: {fault}", slice.config)));
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// Runs whose components leave the devices between programs: LTX-2.3, two passes, and integers with the layout of their
/// text encoder take 17 to 19 GB on a v5e chip; two passes of LTX-2.3 with integers exceed v6e-8 by 0.2 GB.
const IN_TURN: [(&str, &[Loop]); 3] = [
    ("tpu/v5e-16", &[Ltx2Refining, Ltx23, Ltx23Refining]),
    ("tpu/v5e-16-int8", &[Ltx2, Ltx2Refining, Ltx23, Ltx23Refining]),
    ("tpu/v6e-8-int8", &[Ltx23Refining]),
];

/// Checks that a program fits next to the parameters of all components of its run, so that nothing has to leave the
/// devices between programs; for runs in `IN_TURN`, that it fits with its own parameters.
fn fits(slice: &Slice, of: Loop, case: Case, done: &Compiled) -> Option<String> {
    let memory = &done.memory;
    let in_turn = IN_TURN.iter().any(|(config, loops)| *config == slice.config && loops.contains(&of));
    let all = if in_turn { memory.arguments } else { parameter_bytes(case) as i64 };
    let beside = memory.temporaries + memory.outputs - memory.aliased + memory.generated_code;
    let capacity = done.capacity.expect("a TPU's");
    let fits = all + beside <= capacity;
    (!fits).then(|| format!("{}: {all} bytes of parameters and {beside} of {capacity}", slice.config))
}

/// Compiles the decoder at the size of the slice's file.
#[needs(tpu)]
fn text_encoder_and_decoder_fit_on_each_chip() {
    let mut failed = Vec::new();
    for slice in chosen().filter(|slice| slice.compiles_others || full()) {
        for &program in slice.others() {
            let case = Case { program, size: slice.size, ..slice.whole(slice.few.of) };
            let done = compiled(case);
            tell(slice, program.name(), &done);
            let copies = &done.report.stack_copies;
            failed.extend((!copies.is_empty()).then(|| format!("{} {}: {copies:?}", slice.config, program.name())));
            failed.extend(fits(slice, slice.few.of, case, &done));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// Compiles all layers of the published models, which takes ten minutes per slice.
#[needs(tpu, full)]
fn shipped_denoising_loops_stay_within_budgets_at_full_depth() {
    let mut failed = Vec::new();
    for slice in chosen() {
        for most in slice.all {
            let (case, what) = (slice.whole(most.of), format!("{:?}", most.of));
            let done = compiled(case);
            tell(slice, &what, &done);
            let faults = slice.faults(&done, most).into_iter().chain(fits(slice, most.of, case, &done));
            failed.extend(faults.map(|fault| format!("{} {what}: {fault}", slice.config)));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// Returns bf16 and f32 arrays with the sizes, in any order, of integer weights; for layouts that replicate weights.
fn wide_copies(done: &Compiled) -> Vec<StoredArray> {
    let sizes = |dims: &[i64]| {
        let mut sizes: Vec<i64> = dims.iter().copied().filter(|&d| d > 1).collect();
        sizes.sort_unstable();
        sizes
    };
    let narrow = done.network.params.iter().filter(|p| p.ty.dtype == DType::I8);
    let weights: BTreeSet<Vec<i64>> =
        narrow.map(|p| sizes(&p.ty.dims[1..].iter().map(|&d| d as i64).collect::<Vec<_>>())).collect();
    assert!(weights.len() >= 8, "{weights:?}");
    let is_wide = |s: &StoredArray| ["bf16", "f32"].contains(&s.dtype) && weights.contains(&sizes(&s.dims));
    done.module.stored_arrays().into_iter().filter(is_wide).collect()
}

const INTEGERS: &str = "tpu/v6e-8-int8";

/// On v6e, integer matmuls read the stored weights directly and write no wide copy of them.
#[needs(tpu)]
fn int8_matmuls_use_integer_operations_without_wide_copies() {
    let slice = SLICES.iter().find(|slice| slice.config == INTEGERS).expect("a line");
    let done = compiled(slice.case());
    let layer = done.report.layer;
    // All operations of a block except attention (18 %) and the audio projections, which wait for their weights (2.5
    // %).
    let share = layer.int8 / layer.flops;
    assert!(share >= 0.79, "{share:.3} of the operations are on integers");
    let copies = wide_copies(&done);
    assert!(copies.is_empty(), "weights in wider numbers: {copies:?}");
}

const ROTATED: &[&str] = &["model.path=Lightricks/LTX-2.5", "runtime.weights=int8-convrot"];

/// LTX-2.5's loop: products of rotated numbers are on integers, rotation moves nothing between devices, and a step with
/// all 48 blocks takes at most 3 % longer.
#[needs(tpu, full)]
fn int8_convrot_adds_no_collectives_and_little_time() {
    let case = |set| Case { set, layers: Some(3), ..Case::shipped(INTEGERS, "tpu:v6e:2x4") };
    let [plain, rotated] = [NEWEST, ROTATED].map(|set| compiled(case(set)));
    let times = |done: &Compiled| [done.report.predicted, done.report.predicted_layer].map(|p| p.expect("a chip").step);
    let ([step, layer], [rotated_step, rotated_layer]) = (times(&plain), times(&rotated));
    // The first of the three blocks, and six of 48, keep bf16 without rotation.
    let around = rotated_step - 3.0 * rotated_layer;
    let wide = step - around - 2.0 * layer;
    let [all, rotated_all] = [around + 42.0 * layer + 6.0 * wide, around + 48.0 * rotated_layer];
    let [before, traffic] = [&plain, &rotated].map(|done| done.report.per_layer());
    let share = rotated.report.layer.int8 / rotated.report.layer.flops;
    eprintln!("int8 {all:.2} ms, int8-convrot {rotated_all:.2} ms, {share:.3} on integers, {before:?} {traffic:?}");
    assert!(rotated_all <= 1.03 * all, "{rotated_all} ms, without rotation {all} ms");
    assert!(traffic.count <= before.count && traffic.bytes <= before.bytes, "{traffic:?}, without rotation {before:?}");
    assert!(share >= 0.7, "{share:.3} of the operations are on integers");
    let copies = wide_copies(&rotated);
    assert!(copies.is_empty(), "weights in wider numbers: {copies:?}");
}

/// With bf16 activations, weights are converted inside the matmul that reads them.
#[needs(tpu)]
fn int8_weights_are_converted_inside_bf16_matmuls() {
    let slice = SLICES.iter().find(|slice| slice.config == INTEGERS).expect("a line");
    let done = compiled(Case { set: &["runtime.activations=bf16"], ..slice.case() });
    assert!(done.report.layer.int8 == 0.0, "{} operations are on integers", done.report.layer.int8);
    let copies = wide_copies(&done);
    assert!(copies.is_empty(), "weights in wider numbers: {copies:?}");
}
