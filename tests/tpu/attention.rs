//! The attention kernel with the TPU compiler, alone and in the published model's program, without a TPU (`make
//! test-tpu`). `LTX2_PJRT_PLUGIN` selects another libtpu.

use std::collections::{BTreeMap, BTreeSet};

use crate::shipped;
use crate::support::tpu::{self, Case, Compiled, compiled, seconds};
use crate::support::{full, needs};
use ltx2::analysis::StoredArray;
use ltx2::config::{CliOverrides, load};
use ltx2::hlo::{Builder, DType, Program, Type, Value};
use ltx2::kernels::{Kernel, PartialAttention, Tpu, attention};
use ltx2::pipeline::plan::setup;
use ltx2::pipeline::programs::build::{ProgramKind, Programs};
use ltx2::runtime::{OpenTarget, Target};

/// Batch rows, queries, keys, heads, head dimension; on one device.
type Shape = [usize; 5];

/// Returns the kernel shapes in a program's text, and whether each attends to a part of the keys only.
fn shapes_in(text: &str) -> BTreeSet<(Shape, bool)> {
    let sizes = |ty: &str| -> Vec<usize> { ty.split('x').filter_map(|n| n.parse().ok()).collect() };
    let of = |types: &str| -> Vec<Vec<usize>> { types.split("tensor<").skip(1).map(sizes).collect() };
    let calls = text.lines().filter(|line| line.contains("\"tpu_custom_call\""));
    let shape = |call: &str| {
        let types = call.rsplit_once("}> : (").and_then(|(_, types)| types.split_once(") -> ("));
        let (operands, results) = types.map(|(operands, results)| (of(operands), of(results))).expect("types");
        let shape = match (operands[0].as_slice(), operands[1].as_slice()) {
            (&[rows, heads, queries, dim], &[_, _, keys, _]) => [rows, queries, keys, heads, dim],
            // Heads of 64, merged in one dimension.
            (&[rows, queries, width], &[_, keys, _]) => [rows, queries, keys, width / 64, 64],
            other => panic!("a kernel of {other:?}"),
        };
        (shape, results.len() > 1)
    };
    calls.map(shape).collect()
}

const IMAGES: &str = "request.images=[{path: tests/fixtures/images/shapes.png, frame: 0}, \
     {path: tests/fixtures/images/shapes.png, frame: 120}]";

/// Requests with different shapes: both generations, one and two passes, and frames appended to the video's tokens.
const REQUESTS: &[(&str, &[&str])] = &[
    ("ltx2", &[]),
    ("ltx2", &["request.width=1280", "request.height=768"]),
    ("ltx2_full_guidance", &[]),
    ("ltx2_3", &[]),
    ("ltx2_3", &["request.width=1280", "request.height=768"]),
    ("ltx2_two_stage", &[]),
    ("ltx2_two_stage", &["request.width=1280", "request.height=768"]),
    ("ltx2_two_stage", &["pipeline=keyframes", IMAGES]),
    ("ltx2_distilled", &[]),
    ("ltx2_hq", &[]),
    ("ltx2_3_two_stage", &[]),
    ("ltx2_3_two_stage", &["request.width=1280", "request.height=768"]),
    ("ltx2_3_two_stage", &["pipeline=keyframes", IMAGES]),
    ("ltx2_3_distilled", &[]),
    ("ltx2_3_hq", &[]),
];

/// A layout for eight devices for each attention scheme, at the presets' own sizes.
const SCHEMES: [&str; 3] = ["ulysses", "sequence", "ring"];

/// Returns the attention shapes in the loops of all requests, in a slice's layout or another layout on its devices.
fn shapes_on(machine: &OpenTarget, file: Option<&str>, layout: Option<&str>) -> BTreeSet<(Shape, bool)> {
    let mut found = BTreeSet::new();
    for (preset, set) in REQUESTS {
        let files = [Some(*preset), file].into_iter().flatten().map(String::from).collect();
        let layout = layout.map(|layout| format!("layout={layout}"));
        let set = set.iter().map(ToString::to_string).chain(layout).collect();
        let config = load(&CliOverrides { files, set, ..CliOverrides::default() }).expect("a configuration").config;
        let programs = Programs::from_config(&config, Some(2)).expect("the published model");
        let build = setup::build(&config, machine.devices.len(), "tpu", &machine.device_kind).expect("a layout");
        let loops = [ProgramKind::Denoise, ProgramKind::Refine];
        for program in programs.kinds().filter(|program| loops.contains(program)) {
            let here = shapes_in(&programs.network(program, &build).expect("builds").program.text);
            assert!(!here.is_empty(), "{preset} {set:?} has no kernel", set = config.request);
            found.extend(here);
        }
    }
    found
}

/// Builds a program with attention of one shape.
fn attention_alone(kernel: Kernel, [rows, queries, keys, heads, dim]: Shape, is_part: bool) -> Program {
    let b = Builder::new("attention");
    let argument = |name: &str, n: usize| b.argument(name, Type::new(DType::BF16, [rows, n, heads, dim]));
    let (q, k, v) = (argument("q", queries), argument("k", keys), argument("v", keys));
    let bias = b.argument("bias", Type::new(DType::F32, [1, 1, 1, keys]));
    let results: Vec<Value> = match is_part {
        true => PartialAttention::compute(kernel, &q, &k, &v, Some(&bias), 0.1).into_values().into(),
        false => vec![attention(kernel, &q, &k, &v, Some(&bias), 0.1)],
    };
    let results: Vec<(&str, &Value)> = ["a", "b", "c"].into_iter().zip(&results).collect();
    b.finish(&results).expect("builds")
}

/// Compiles the attention shapes of every pipeline on each shipped slice for the chip of the slice, and those of every
/// attention scheme over eight devices for all chips. Only one shape in 64 is compiled unless the test is full.
#[needs(tpu)]
fn attention_kernel_compiles_for_every_chip() {
    let open = |target: &str| target.parse::<Target>().expect("a target").open().expect("a topology");
    let mut all: BTreeMap<String, (OpenTarget, BTreeSet<(Shape, bool)>)> = BTreeMap::new();
    let eight = ["tpu:v5e:2x4", "tpu:v5p:2x2x2", "tpu:v6e:2x4", "tpu:tpu7x:2x2x1"];
    let schemes = eight.into_iter().flat_map(|target| SCHEMES.map(|layout| (target, None, Some(layout))));
    let slices = shipped::slices().map(|(config, target)| (target, Some(config), None));
    for (target, file, layout) in slices.chain(schemes).filter(|(target, ..)| tpu::is_chosen(target)) {
        let machine = open(target);
        let shapes = shapes_on(&machine, file, layout);
        let chip = target.split(':').nth(1).expect("a chip").to_string();
        all.entry(chip).or_insert_with(|| (machine, BTreeSet::new())).1.extend(shapes);
    }
    let different: BTreeSet<_> = all.values().flat_map(|(_, shapes)| shapes).collect();
    let every: usize = all.values().map(|(_, shapes)| shapes.len()).sum();
    eprintln!("{} shapes, {every} with their chips", different.len());
    let each = all.values().flat_map(|(machine, shapes)| shapes.iter().map(move |shape| (machine, *shape)));
    for (machine, (shape, is_part)) in each.step_by(if full() { 1 } else { 64 }) {
        let program = attention_alone(Kernel::Mosaic(Tpu::from_kind(&machine.device_kind)), shape, is_part);
        assert!(program.text.contains("tpu_custom_call"), "{shape:?}");
        if let Err(error) = tpu::try_module(machine, &program) {
            panic!("{}, {shape:?}: {error}", machine.device_kind);
        }
    }
}

/// The six attentions of a block: of each stream to itself, to its text and to the other stream.
const CALLS: usize = 6;

/// Returns the f32 arrays of a block that are as large as its queries or keys.
fn wide_queries(done: &Compiled, tokens: i64) -> Vec<StoredArray> {
    let is_wide = |s: &StoredArray| {
        let elements: i64 = s.dims.iter().product();
        // RoPE tables, one for both branches, are f32 and are broadcast over the head dimension once, before the loop.
        let is_table = s.opcode == "broadcast" && s.scope.ends_with("rope/broadcast_in_dim");
        s.dtype == "f32" && s.scope.contains("blocks/") && elements >= tokens * 2048 && !is_table
    };
    done.module.stored_arrays().into_iter().filter(is_wide).collect()
}

fn kernels(done: &Compiled) -> usize {
    done.module.instructions().filter(|i| i.target == "tpu_custom_call").count()
}

/// Compares temporaries and stored arrays with those of attention as plain XLA operations.
#[track_caller]
fn judge(layout: &'static str, target: &'static str, layers: Option<usize>, most: f64) {
    let case = Case { layers, ..Case::denoise(layout, "context=8", target) };
    let done = compiled(case);
    let plain = compiled(Case { attention: "plain", ..case });
    assert_eq!((kernels(&done), kernels(&plain)), (CALLS, 0));
    // Two branches of an eighth of the tokens.
    let wide = wide_queries(&done, 2 * 768);
    assert!(wide.is_empty(), "f32 in memory: {wide:?}");
    assert!(done.report.stack_copies.is_empty(), "{:?}", done.report.stack_copies);
    // The kernel's stated FLOPs include the padding of its blocks.
    let (own, useful) = (done.report.layer.flops, plain.report.layer.flops);
    let ratio = done.memory.temporaries as f64 / plain.memory.temporaries as f64;
    eprintln!(
        "{layout} {target}: temporaries {} of {} bytes, {ratio:.3}; {:.2} % of the plain block's operations; {:.2} GB \
         moved a block, plain {:.2}",
        done.memory.temporaries,
        plain.memory.temporaries,
        100.0 * own / useful,
        done.report.layer.bytes / 1e9,
        plain.report.layer.bytes / 1e9
    );
    assert!(own <= 1.02 * useful, "{own} operations, {useful} without the kernel");
    assert!(ratio <= most, "temporaries are {ratio:.3} of the plain path's");
    // Only one layer of each stack is read, however the compiler slices it; reading all layers would dominate both.
    let [moved, other] = [&done, &plain].map(|c| c.report.layer.bytes / 1e9);
    assert!(moved <= 0.5 * other, "{moved:.2} of {other:.2} GB are moved");
}

#[needs(tpu, full)]
fn attention_kernel_reduces_ulysses_temporaries_on_v5p() {
    judge("ulysses", "tpu:v5p:2x2x2", None, 0.35);
}

#[needs(tpu, full)]
fn attention_kernel_reduces_ulysses_temporaries_on_tpu7x() {
    judge("ulysses", "tpu:tpu7x:2x2x1", None, 0.35);
}

/// Most temporaries are the weights that a block gathers, some of them while attention runs.
#[needs(tpu, full)]
fn attention_kernel_reduces_fsdp_ulysses_temporaries_on_v6e() {
    judge("fsdp-ulysses", "tpu:v6e:2x4", None, 0.9);
}

fn takes_the_kernel(layouts: &[(&'static str, &'static str, &'static str)]) {
    for &(layout, mesh, target) in layouts {
        let done = compiled(Case { layers: Some(2), ..Case::denoise(layout, mesh, target) });
        let found = kernels(&done);
        eprintln!("{layout} {target}: {found} kernels, {:?}", done.memory);
        assert!(found >= CALLS, "{layout}: {found} kernels");
    }
}

/// Covers the manually partitioned regions that the budgets do not cover.
#[needs(tpu, full)]
fn ring_layouts_use_the_attention_kernel() {
    takes_the_kernel(&[("ring", "context=8", "tpu:v5p:2x2x2"), ("hybrid", "context=8", "tpu:v5p:2x2x2")]);
}

#[needs(tpu, full)]
fn every_layout_uses_the_attention_kernel() {
    takes_the_kernel(&[
        ("replicated", "data=1", "tpu:v5p:2x2x1"),
        ("cfg", "cfg=2", "tpu:v5p:2x2x1"),
        ("cfg-ulysses", "cfg=2,context=4", "tpu:v5p:2x2x2"),
        ("sequence", "context=8", "tpu:v5p:2x2x2"),
        ("rope-gathered", "context=8", "tpu:v5p:2x2x2"),
        ("tensor", "tensor=8", "tpu:v6e:2x4"),
        ("tensor", "cfg=2,context=2,tensor=2", "tpu:v6e:2x4"),
        ("fsdp-ulysses", "context=8", "tpu:v5e:2x4"),
    ]);
}

/// Limits in seconds on an idle machine, for loops of all blocks and the sharded decoder. Runs alone, after the other
/// tests.
#[needs(tpu, alone)]
fn compile_times_are_within_limits() {
    let loops = [("ulysses", "tpu:v5p:2x2x2"), ("ulysses", "tpu:tpu7x:2x2x1"), ("fsdp-ulysses", "tpu:v6e:2x4")];
    let decoder =
        Case { program: ProgramKind::VideoDecoder, ..Case::denoise("fsdp-ulysses", "context=8", "tpu:v6e:2x4") };
    let limits = loops.map(|(layout, target)| (Case::denoise(layout, "context=8", target), 60.0));
    for (case, limit) in limits.into_iter().chain([(decoder, 600.0)]) {
        let seconds = seconds(case);
        assert!(seconds <= limit, "{case:?}: compiled in {seconds:.0} s");
    }
}
