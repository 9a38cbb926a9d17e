//! The shipped configurations of TPU slices in the TPU compiler: one loop each at two layers and, for one slice of each
//! chip, the text encoder and the video decoder in `make test-tpu`; all of them at full depth, both generations and both
//! passes in full.

use std::collections::BTreeSet;

use ltx2::analysis::{CollectiveKind, LoopLevel, Stored};
use ltx2::config::presets::CONFIGS;
use ltx2::hlo::DType;
use ltx2::pipeline::programs::ProgramKind;

use crate::support::tpu::{Case, Compiled, compiled, parameter_bytes};
use crate::support::{full, needs};

/// A slice's file and what its loop may cost.
struct Slice {
    config: &'static str,
    target: &'static str,
    /// Megabytes of collective output a layer a device, of LTX-2.0 at 768x512x121.
    most_mb: f64,
    /// Megabytes of temporaries of two layers.
    most_temporaries: f64,
    /// Whether its loop is compiled in full only.
    in_full: bool,
    /// Whether it is the one of its chip whose text encoder and decoder `make test-tpu` compiles.
    first_of_chip: bool,
}

#[rustfmt::skip]
const SLICES: &[Slice] = &[
    Slice { config: "tpu/v5e-16-large", target: "tpu:v5e:4x4", most_mb: 760.0, most_temporaries: 500.0, in_full: true, first_of_chip: false },
    Slice { config: "tpu/v6e-8-large", target: "tpu:v6e:2x4", most_mb: 800.0, most_temporaries: 700.0, in_full: true, first_of_chip: false },
    Slice { config: "tpu/v6e-64-two-stage", target: "tpu:v6e:8x8", most_mb: 36.0, most_temporaries: 15.0, in_full: true, first_of_chip: false },
    Slice { config: "tpu/v5e-16", target: "tpu:v5e:4x4", most_mb: 135.0, most_temporaries: 10.0, in_full: false, first_of_chip: true },
    Slice { config: "tpu/v6e-8", target: "tpu:v6e:2x4", most_mb: 160.0, most_temporaries: 130.0, in_full: false, first_of_chip: true },
    Slice { config: "tpu/v6e-16", target: "tpu:v6e:4x4", most_mb: 108.0, most_temporaries: 75.0, in_full: false, first_of_chip: false },
    Slice { config: "tpu/v6e-64", target: "tpu:v6e:8x8", most_mb: 23.0, most_temporaries: 10.0, in_full: false, first_of_chip: false },
    Slice { config: "tpu/v5p-8", target: "tpu:v5p:2x2x2", most_mb: 55.0, most_temporaries: 130.0, in_full: false, first_of_chip: true },
    Slice { config: "tpu/v5p-32", target: "tpu:v5p:2x4x4", most_mb: 43.0, most_temporaries: 36.0, in_full: false, first_of_chip: false },
    Slice { config: "tpu/tpu7x-8", target: "tpu:tpu7x:2x2x1", most_mb: 105.0, most_temporaries: 155.0, in_full: false, first_of_chip: true },
    Slice { config: "tpu/v5e-8-int8", target: "tpu:v5e:2x4", most_mb: 260.0, most_temporaries: 200.0, in_full: true, first_of_chip: false },
    Slice { config: "tpu/v6e-4-int8", target: "tpu:v6e:2x2", most_mb: 260.0, most_temporaries: 300.0, in_full: true, first_of_chip: false },
    Slice { config: "tpu/v5e-16-int8", target: "tpu:v5e:4x4", most_mb: 95.0, most_temporaries: 60.0, in_full: true, first_of_chip: false },
    Slice { config: "tpu/v6e-8-int8", target: "tpu:v6e:2x4", most_mb: 55.0, most_temporaries: 105.0, in_full: false, first_of_chip: false },
];

/// Attention kernels of a block: of each stream to itself, to its text and to the other.
const KERNELS: usize = 6;

impl Slice {
    fn case(&self) -> Case {
        // Integers have loops of their own from three blocks on.
        let layers = if self.config.ends_with("int8") { 3 } else { 2 };
        Case { layers: Some(layers), ..Case::shipped(self.config, self.target) }
    }

    /// Faults of the denoising loop; `times` for a generation whose video has that many branches on a device.
    fn faults(&self, done: &Compiled, times: f64) -> Vec<String> {
        let mut faults = Vec::new();
        let mut check = |fine: bool, what: String| faults.extend((!fine).then_some(what));
        let mb = done.report.per_layer().bytes / 1e6;
        check(mb <= times * self.most_mb, format!("{mb:.1} MB a layer"));
        let kernels = done.module.instructions().filter(|i| i.target == "tpu_custom_call").count();
        check(kernels >= KERNELS, format!("{kernels} attention kernels"));
        let temporaries = done.memory.temporaries as f64 / 1e6;
        // Another release, which may be asked by `LTX2_PJRT_PLUGIN`, has temporaries of its own.
        let is_pinned = std::env::var_os("LTX2_PJRT_PLUGIN").is_none();
        let fits = temporaries <= times * self.most_temporaries;
        check(fits || !is_pinned, format!("{temporaries:.0} MB of temporaries"));
        let gathers = done.report.collectives.iter().filter(|c| c.level == LoopLevel::Block);
        let weights = gathers.filter(|c| c.kind == CollectiveKind::AllGather && !c.scope.contains("attn1"));
        let weights: Vec<&str> = weights.filter(|c| c.bytes > 1e6).map(|c| c.scope.as_str()).collect();
        check(weights.is_empty() || self.config.ends_with("large"), format!("gathers in {weights:?}"));
        // Norm, RoPE and rounding are one fusion, one each for queries and keys. Of 384 tokens and half the heads (v6e-64)
        // the compiler rounds queries in the next.
        let norms = written_by_norms(done);
        let loops = if self.config.ends_with("int8") { 3 } else { 1 };
        let are_fused = norms.iter().all(|s| s.opcode == "fusion" && s.scope.ends_with("rope/dot_general"));
        let are_rounded = norms.iter().all(|s| s.dtype == "bf16") && norms.len() <= 2 * loops;
        check(!norms.is_empty() && are_fused, format!("norm and RoPE are apart: {norms:?}"));
        check(are_rounded || self.config == "tpu/v6e-64", format!("norms write {norms:?}"));
        faults
    }
}

fn tell(slice: &Slice, what: &str, done: &Compiled) {
    let (layer, memory) = (done.report.per_layer(), &done.memory);
    eprintln!(
        "{:15} {what:28} {:6.1} MB a layer, {:3} collectives, temporaries {:5.0} MB, arguments {:5.2} GB, {:3.0} s",
        slice.config,
        layer.bytes / 1e6,
        layer.count,
        memory.temporaries as f64 / 1e6,
        memory.arguments as f64 / 1e9,
        done.seconds
    );
}

/// Arrays that norms of video's queries and keys write in a block, without the tables of RoPE that are spread before the loop.
fn written_by_norms(done: &Compiled) -> Vec<Stored> {
    let is_norm =
        |s: &Stored| ["norm_q/", "norm_k/"].iter().any(|norm| s.scope.starts_with(&format!("blocks/attn1/{norm}")));
    let is_whole =
        |s: &Stored| s.dims.iter().product::<i64>() >= 384 * 16 * 128 && !s.scope.ends_with("broadcast_in_dim");
    done.module.stored().into_iter().filter(|s| is_norm(s) && is_whole(s)).collect()
}

#[needs(nothing)]
fn every_shipped_slice_has_a_line() {
    let shipped: Vec<&str> = CONFIGS.iter().map(|(name, _)| *name).filter(|name| name.starts_with("tpu/")).collect();
    let mut lines: Vec<&str> = SLICES.iter().map(|slice| slice.config).collect();
    let mut missing = shipped.clone();
    missing.retain(|name| !lines.contains(name));
    lines.retain(|name| !shipped.contains(name));
    assert!(missing.is_empty() && lines.is_empty(), "without a line: {missing:?}, without a file: {lines:?}");
}

#[needs(tpu)]
fn every_shipped_loop_keeps_its_budget() {
    let mut failed = Vec::new();
    for slice in SLICES.iter().filter(|slice| !slice.in_full || full()) {
        let done = compiled(slice.case());
        tell(slice, "two layers", &done);
        failed.extend(slice.faults(&done, 1.0).into_iter().map(|fault| format!("{}: {fault}", slice.config)));
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// A program has room beside the parameters of all components: nothing leaves the devices between programs.
fn fits(slice: &Slice, done: &Compiled, what: &str) {
    let memory = &done.memory;
    let all = parameter_bytes(Case::shipped(slice.config, slice.target)) as i64;
    let beside = memory.temporaries + memory.outputs - memory.aliased + memory.generated_code;
    let capacity = done.capacity.expect("a TPU's");
    assert!(all + beside <= capacity, "{} {what}: {all} and {beside} of {capacity} bytes", slice.config);
}

#[needs(tpu)]
fn encoder_and_decoder_of_a_slice_of_each_chip() {
    for slice in SLICES.iter().filter(|slice| slice.first_of_chip || full()) {
        for program in [ProgramKind::TextEncoder, ProgramKind::VideoDecoder] {
            let done = compiled(Case { program, ..Case::shipped(slice.config, slice.target) });
            tell(slice, program.name(), &done);
            assert!(done.report.stack_copies.is_empty(), "{}: {:?}", slice.config, done.report.stack_copies);
            fits(slice, &done, program.name());
        }
    }
}

const NEWER: &[&str] = &["model.path=Lightricks/LTX-2.3"];
const NEWER_IN_TWO: &[&str] = &["model.path=Lightricks/LTX-2.3", "pipeline=two_stage"];

/// 48 layers, the published models of both generations, the loop of a second pass at twice the size. Ten minutes a slice.
#[needs(tpu, full)]
fn every_shipped_loop_at_full_depth() {
    let mut failed = Vec::new();
    for slice in SLICES {
        let whole = Case { layers: None, ..slice.case() };
        let second =
            Case { program: ProgramKind::Refine, size: [1536, 1024, 121], set: &["pipeline=two_stage"], ..whole };
        // LTX-2.3 has four branches where LTX-2.0 has two, and 4.6 MB more gates and text sums.
        for (what, case, times) in [
            ("2.0, 768x512", whole, 1.0),
            ("2.0, refining 1536x1024", second, 4.0),
            ("2.3, 768x512", Case { set: NEWER, ..whole }, 2.1),
            ("2.3, refining 1536x1024", Case { set: NEWER_IN_TWO, ..second }, 4.2),
        ] {
            let done = compiled(case);
            tell(slice, what, &done);
            let faults = slice.faults(&done, times);
            failed.extend(faults.into_iter().map(|fault| format!("{} {what}: {fault}", slice.config)));
            let copied: f64 = done.report.stack_copies.iter().map(|c| c.bytes).sum();
            if copied > 57e6 {
                failed.push(format!("{} {what}: copies {:?}", slice.config, done.report.stack_copies));
            }
            fits(slice, &done, what);
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// On v6e integers are multiplied as such, weights are read as they are stored, and no wide copy of one is written.
#[needs(tpu)]
fn integers_are_multiplied_as_integers() {
    let slice = SLICES.iter().find(|slice| slice.config == "tpu/v6e-8-int8").expect("a line");
    let done = compiled(slice.case());
    let layer = done.report.layer;
    // Of a block's operations all but attention's (18 %) and those of sound's maps, which wait for their weights (2.5 %).
    let share = layer.int8 / layer.flops;
    assert!(share >= 0.79, "{share:.3} of the operations are on integers");
    // Here every device has whole weights: no array of one's sizes, in whatever order, is written in wider numbers.
    let sizes = |dims: &[i64]| {
        let mut sizes: Vec<i64> = dims.iter().copied().filter(|&d| d > 1).collect();
        sizes.sort_unstable();
        sizes
    };
    let narrow = done.network.params.iter().filter(|p| p.ty.dtype == DType::I8);
    let weights: BTreeSet<Vec<i64>> =
        narrow.map(|p| sizes(&p.ty.dims[1..].iter().map(|&d| d as i64).collect::<Vec<_>>())).collect();
    assert!(weights.len() >= 8, "{weights:?}");
    let wide = |s: &Stored| ["bf16", "f32"].contains(&s.dtype) && weights.contains(&sizes(&s.dims));
    let copies: Vec<_> = done.module.stored().into_iter().filter(|s| wide(s) && !s.scope.is_empty()).collect();
    assert!(copies.is_empty(), "weights in wider numbers: {copies:?}");
}
