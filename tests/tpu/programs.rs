//! The other programs of the published model with the TPU compiler, without a TPU (`make test-tpu`).

use std::collections::BTreeMap;

use crate::support::tpu::{Case, Compiled, compiled};
use crate::support::{full, needs};
use ltx2::analysis::{CollectiveKind, XSpace};
use ltx2::hlo::{Argument, MemorySpace};
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pjrt::{Plugin, ProfileOptions, Profiler, discover};
use ltx2::runtime::Target;

/// Compiles a program for the chips of a layout and returns the count and megabytes of its collectives per run.
fn collectives(
    program: ProgramKind,
    layout: &'static str,
    target: &'static str,
) -> (Compiled, BTreeMap<CollectiveKind, Traffic>) {
    collectives_of("ltx2", 0.0, program, layout, target)
}

/// Like [`collectives`], for another configuration, whose stacks may be copied once before the loops, up to
/// `copied_once` bytes.
fn collectives_of(
    config: &'static str,
    copied_once: f64,
    program: ProgramKind,
    layout: &'static str,
    target: &'static str,
) -> (Compiled, BTreeMap<CollectiveKind, Traffic>) {
    let mesh = if layout == "tensor" { "tensor=8" } else { "context=8" };
    let done = compiled(Case { config, program, ..Case::denoise(layout, mesh, target) });
    let mut all: BTreeMap<CollectiveKind, Traffic> = BTreeMap::new();
    for c in &done.report.collectives {
        let sum = all.entry(c.kind).or_default();
        sum.runs += c.times;
        sum.megabytes += c.times * c.bytes / 1e6;
    }
    eprintln!("{config} {} {layout} {target}: {:.0} s, {:?}, {all:?}", program.name(), done.seconds, done.memory);
    let copies = &done.report.stack_copies;
    let copied: f64 = copies.iter().map(|copy| copy.bytes * copy.times).sum();
    assert!(done.memory.arguments > 0 && copied <= copied_once, "{copies:?}");
    (done, all)
}

#[derive(Clone, Copy, Debug, Default)]
struct Traffic {
    runs: f64,
    megabytes: f64,
}

/// Number of blocks of Gemma-3 and of Gemma-4.
const BLOCKS: f64 = 48.0;
/// Megabytes of two prompts of 1024 tokens, 3840 wide, in bf16.
const HIDDEN: f64 = 2.0 * 1024.0 * 3840.0 * 2.0 / 1e6;

/// Bytes that libtpu reserves on each device for each device of the slice.
const KEPT: i64 = 512;
/// Devices in the slice that the capacities of the chip files refer to.
const LARGEST: i64 = 256;

/// The description of a target from its chip file equals that of libtpu, including the number of VMs. The file's memory
/// capacity is exact for slices of 256 devices; smaller slices have a few kilobytes more.
#[needs(tpu)]
fn chip_files_describe_slices_like_libtpu() {
    for (name, hosts) in [
        ("tpu:v5e:2x4", 1),
        ("tpu:v5e:4x4", 4),
        ("tpu:v6e:2x2", 1),
        ("tpu:v6e:2x4", 1),
        ("tpu:v6e:4x4", 4),
        ("tpu:v6e:2x4:2", 2),
        ("tpu:v5p:2x2x2", 2),
        ("tpu:tpu7x:2x2x1", 1),
    ] {
        let target: Target = name.parse().expect("a target");
        let machine = target.open().expect("a topology");
        let (toolchain, count, capacity) = target.described();
        let own = machine.toolchain();
        assert_eq!(
            (count, capacity, &toolchain.to_string()),
            (machine.devices.len(), machine.capacity, &own.to_string())
        );
        assert_eq!(machine.hosts(), hosts, "{name}");
        let more = machine.stated_capacity.zip(capacity).map(|(stated, own)| stated - own);
        assert!(more.is_some_and(|more| (0..KEPT * LARGEST).contains(&more)), "{name}: {more:?} bytes more");
    }
}

/// Stacked weights stay in host memory. In each iteration of the loop over blocks, asynchronous copies move one block's
/// slices, or the device's shards of them, to the device.
#[needs(tpu, full)]
fn streamed_stacks_are_copied_slice_by_slice() {
    for (layout, mesh, target) in [
        ("replicated", "data=1", "tpu:v6e:1x1"),
        ("cfg", "cfg=2", "tpu:tpu7x:1x1x1"),
        ("fsdp-ulysses", "context=8", "tpu:v6e:2x4"),
    ] {
        let case = Case { layers: Some(3), set: &["runtime.stream=on"], ..Case::denoise(layout, mesh, target) };
        let made = compiled(case);
        let program = &made.network.program;
        let in_host: Vec<_> = program.arguments.iter().filter(|a| a.memory == MemorySpace::PinnedHost).collect();
        let local = |a: &Argument| match &a.sharding {
            Some(sharding) => sharding.local(&a.ty, &program.mesh).expect("divisible"),
            None => a.ty.clone(),
        };
        let bytes: usize = in_host.iter().map(|a| local(a).elements() * a.ty.dtype.size()).sum();
        eprintln!("{layout} {target}: {:.0} s, {:?}, {:?}", made.seconds, made.memory, made.report.predicted);
        assert_eq!(made.memory.host_arguments, bytes as i64, "{layout} {target}");
        assert_eq!(made.report.step.host, bytes as f64, "{layout} {target}: bytes of copies");
        let listing = made.module.listing();
        let is_copy = |line: &&str| line.trim_start().starts_with("dynamic-slice-start") && line.contains("S(5)");
        // The compiler may peel iterations off the loop.
        let copies = listing.lines().filter(is_copy).count();
        assert!(copies > 0 && copies.is_multiple_of(in_host.len()), "{layout} {target}: {copies} copies");
        assert!(made.memory.arguments < bytes as i64, "{layout} {target}: {:?}", made.memory);
    }
}

/// One more all-reduce is for the embedding lookup in the sharded vocabulary.
#[needs(tpu, full)]
fn tensor_layout_text_encoder_has_two_all_reduces_per_block() {
    let (_, all) = collectives(ProgramKind::TextEncoder, "tensor", "tpu:v6e:2x4");
    assert_eq!(all.keys().collect::<Vec<_>>(), [&CollectiveKind::AllReduce]);
    let sums = all[&CollectiveKind::AllReduce];
    assert_eq!(sums.runs, 2.0 * BLOCKS + 1.0);
    assert!((sums.megabytes / (sums.runs * HIDDEN) - 1.0).abs() < 1e-3, "{sums:?}");
}

/// Queries, keys, values and the result are resharded in each block; other collectives are negligible.
#[needs(tpu, full)]
fn ulysses_text_encoder_has_four_all_to_alls_per_block() {
    let (_, all) = collectives(ProgramKind::TextEncoder, "ulysses", "tpu:v5p:2x2x2");
    assert_eq!(all[&CollectiveKind::AllToAll].runs, 4.0 * BLOCKS);
    // 16 heads of queries, 8 of keys and of values, 256 wide; each device receives an eighth.
    let a_block = 2.0 * 1024.0 * 256.0 * 2.0 * (16.0 + 8.0 + 8.0 + 16.0) / 8.0 / 1e6;
    assert!(all[&CollectiveKind::AllToAll].megabytes <= 1.001 * BLOCKS * a_block, "{all:?}");
    let rest: f64 = all.iter().filter(|(k, _)| **k != CollectiveKind::AllToAll).map(|(_, e)| e.megabytes).sum();
    assert!(rest < 0.1, "{all:?}");
}

/// Each weight is all-gathered once per block, overlapped with computation; the 2 GB embedding table is not gathered.
#[needs(tpu, full)]
fn fsdp_text_encoder_gathers_each_weight_once_per_block() {
    let (done, all) = collectives(ProgramKind::TextEncoder, "fsdp-ulysses", "tpu:v6e:2x4");
    // q, k, v, o, gate, up, down, and the hidden state's part of the projection.
    let a_block = (3840.0 * 256.0 * (16.0 + 8.0 + 8.0 + 16.0) + 3.0 * 3840.0 * 15360.0 + 3840.0 * 3840.0) * 2.0 / 1e6;
    let gathers = all[&CollectiveKind::AllGather];
    // The last hidden state's part of the projection, after the loop.
    let want = BLOCKS * a_block + 3840.0 * 3840.0 * 2.0 / 1e6;
    assert!((gathers.megabytes / want - 1.0).abs() < 1e-3, "{gathers:?} of {want}");
    let hidden = |c: &&ltx2::analysis::Collective| c.kind == CollectiveKind::AllGather && c.overlapped;
    let hidden: f64 = done.report.collectives.iter().filter(hidden).map(|c| c.times * c.bytes / 1e6).sum();
    assert!(hidden >= 0.9 * gathers.megabytes, "{hidden} of {gathers:?}");
    assert!(done.memory.temporaries < 2 << 30, "{:?}", done.memory);
}

/// Covers both kinds of Gemma-4 layers. One more all-reduce is for the sharded vocabulary. The single key head of a
/// full-attention layer is replicated.
#[needs(tpu, full)]
fn tensor_layout_gemma4_has_two_all_reduces_per_block() {
    let (_, all) = collectives_of("ltx2_5", 0.0, ProgramKind::TextEncoder, "tensor", "tpu:v6e:2x4");
    assert_eq!(all.keys().collect::<Vec<_>>(), [&CollectiveKind::AllReduce]);
    let sums = all[&CollectiveKind::AllReduce];
    assert_eq!(sums.runs, 2.0 * BLOCKS + 1.0);
    assert!((sums.megabytes / (sums.runs * HIDDEN) - 1.0).abs() < 1e-3, "{sums:?}");
}

/// Each weight of Gemma-4 is gathered once per block, in 40 sliding and eight full layers. Before its nested loops the
/// compiler transposes three stacks, unlike for Gemma-3's single loop: the shards of gate and up, and of q, k and v of
/// sliding layers.
#[needs(tpu, full)]
fn fsdp_gemma4_gathers_each_weight_once_per_block() {
    let (done, all) = collectives_of("ltx2_5", 1.74e9, ProgramKind::TextEncoder, "fsdp-ulysses", "tpu:v6e:2x4");
    let megabytes = |weights: f64| weights * 2.0 / 1e6;
    // Both streams' parts of the projection for each state; gate, up and down.
    let projection = 3840.0 * (4096.0 + 2048.0);
    let shared = 3.0 * 3840.0 * 15360.0 + projection;
    // q, k, v, o of a sliding layer; q, k, o of a full one.
    let (sliding, full) = (3840.0 * 256.0 * (16.0 + 8.0 + 8.0 + 16.0), 3840.0 * 512.0 * (16.0 + 1.0 + 16.0));
    let want = megabytes(40.0 * sliding + 8.0 * full + BLOCKS * shared + projection);
    let gathers = all[&CollectiveKind::AllGather];
    assert!((gathers.megabytes / want - 1.0).abs() < 1e-3, "{gathers:?} of {want}");
    let hidden = |c: &&ltx2::analysis::Collective| c.kind == CollectiveKind::AllGather && c.overlapped;
    let hidden: f64 = done.report.collectives.iter().filter(hidden).map(|c| c.times * c.bytes / 1e6).sum();
    assert!(hidden >= 0.9 * gathers.megabytes, "{hidden} of {gathers:?}");
    // In addition to the transposed stacks.
    assert!(done.memory.temporaries < 1_740_000_000 + (1 << 30), "{:?}", done.memory);
}

/// Decodes 121 frames of 768x512 with rows sharded over eight chips. Chips only exchange the edges of their blocks and,
/// at the end, the result of the check that all values are finite.
#[needs(tpu, full)]
fn sharded_video_decoder_exchanges_only_edges() {
    let (done, all) = collectives(ProgramKind::VideoDecoder, "fsdp-ulysses", "tpu:v6e:2x4");
    assert_eq!(all.keys().collect::<Vec<_>>(), [&CollectiveKind::AllReduce, &CollectiveKind::CollectivePermute]);
    // The finiteness check: one or four bytes.
    assert!(all[&CollectiveKind::AllReduce].megabytes < 1e-3, "{all:?}");
    // One row of each neighbour for every convolution: channels times frames times columns.
    assert!(all[&CollectiveKind::CollectivePermute].megabytes < 300.0, "{all:?}");
    let mut rows = done.report.collectives.iter().filter(|c| c.kind == CollectiveKind::CollectivePermute);
    assert!(rows.all(|c| c.asynchronous), "{:?}", done.report.collectives);
}

/// Compiles the small programs of a run. The vocoder, which takes minutes to compile, is included only in the full
/// test.
#[needs(tpu)]
fn small_programs_compile_for_a_sharded_layout() {
    let programs = [ProgramKind::Prepare, ProgramKind::Connectors, ProgramKind::AudioDecoder, ProgramKind::Vocoder];
    for program in programs.into_iter().take(if full() { 4 } else { 3 }) {
        let (done, _) = collectives(program, "ulysses", "tpu:v5p:2x2x2");
        assert!(done.memory.arguments >= done.network.parameter_bytes() as i64, "{:?}", done.memory);
    }
}

/// Each slice generates its own videos: communication over the network between slices would dominate the time.
#[needs(tpu, full)]
fn denoising_has_no_communication_between_slices() {
    let done = compiled(Case { layers: Some(2), ..Case::denoise("ulysses", "dcn.data=2,context=4", "tpu:v5e:2x2:2") });
    assert_eq!(done.network.program.devices(), 8);
    let crossing: Vec<_> = done.report.collectives.iter().filter(|c| c.axes.iter().any(|a| a == "data")).collect();
    assert!(crossing.is_empty(), "{crossing:?}");
    assert!(done.report.collectives.iter().any(|c| c.axes == ["context"]), "attention communicates within a slice");
}

#[needs(tpu)]
fn libtpu_profiler_writes_a_readable_trace() {
    let found = discover::find(discover::Platform::Tpu, None);
    let plugin = Plugin::load(&found.found[0].path).expect("libtpu loads");
    assert!(plugin.has_profiler());
    // Without a chip only host events are recorded.
    let profiler = Profiler::start(&plugin, ProfileOptions { host_level: 2, programs: true }).expect("starts");
    let bytes = profiler.stop().expect("stops");
    let space = XSpace::read(&bytes).expect("a trace");
    assert!(!space.planes.is_empty(), "{space:?}");
}
