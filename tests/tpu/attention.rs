//! The attention kernel in the TPU compiler, alone and in the published model's program, with no TPU at hand
//! (`make test-tpu`). With `LTX2_PJRT_PLUGIN` another libtpu is asked.

use crate::support::tpu::{Case, Compiled, compiled, seconds};
use crate::support::{full, needs};
use ltx2::analysis::Stored;
use ltx2::hlo::{Builder, DType, Type, Value};
use ltx2::kernels::{Kernel, Partial, Tpu, attention};
use ltx2::pipeline::programs::ProgramKind;
use ltx2::runtime::{EngineOptions, Target};

/// Rows, queries, keys, heads, width; of one device.
type Shape = [usize; 5];

// Over eight devices, two rows of LTX-2.0 and four of 2.3, one where a second pass refines.
const WHOLE: &[Shape] = &[
    // Video with all its tokens for some heads: 768x512 and 1280x768, their first passes at half the size, the second passes
    // of 1536x1024 and of HQ's 1920x1088 and its first.
    [2, 6144, 6144, 4, 128],
    [2, 15360, 15360, 4, 128],
    [2, 1536, 1536, 4, 128],
    [2, 3840, 3840, 4, 128],
    [1, 24576, 24576, 4, 128],
    [1, 32640, 32640, 4, 128],
    [4, 8160, 8160, 4, 128],
    [4, 6144, 6144, 4, 128],
    // With some tokens for all heads, keys gathered.
    [2, 768, 6144, 32, 128],
    [2, 1920, 15360, 32, 128],
    [1, 3072, 24576, 32, 128],
    [4, 768, 6144, 32, 128],
    // To text; half the heads.
    [2, 768, 1024, 32, 128],
    [2, 1920, 1024, 32, 128],
    [1, 3072, 1024, 32, 128],
    [4, 768, 1024, 32, 128],
    [2, 3072, 1024, 16, 128],
    // Sound, to itself and to text.
    [2, 126, 126, 32, 64],
    [4, 126, 126, 32, 64],
    [2, 126, 1024, 32, 64],
    [4, 126, 1024, 32, 64],
    // Video to sound.
    [2, 768, 126, 32, 64],
    [2, 1920, 126, 32, 64],
    [1, 3072, 126, 32, 64],
    [4, 768, 126, 32, 64],
];
// Sound to the device's own video, and a ring's part of video.
const PARTS: &[Shape] = &[
    [2, 126, 768, 32, 64],
    [2, 126, 1920, 32, 64],
    [1, 126, 3072, 32, 64],
    [4, 126, 768, 32, 64],
    [2, 768, 768, 32, 128],
];

/// Each shape for one of four chips, in turn; in full for all.
#[needs(tpu)]
fn the_kernel_compiles_for_every_chip() {
    let options = EngineOptions::default();
    for (turn, target) in ["tpu:v5e:2x2", "tpu:v5p:2x2x1", "tpu:v6e:2x2", "tpu:tpu7x:2x2x1"].into_iter().enumerate() {
        let machine = target.parse::<Target>().expect("a target").open().expect("a topology");
        let kernel = Kernel::Mosaic(Tpu::of(&machine.device_kind));
        let all = WHOLE.iter().map(|s| (s, false)).chain(PARTS.iter().map(|s| (s, true)));
        for (n, (&[rows, queries, keys, heads, dim], parts)) in all.enumerate() {
            if (n + turn) % 4 != 0 && !full() {
                continue;
            }
            let b = Builder::new("attention");
            let argument = |name: &str, n: usize| b.argument(name, Type::new(DType::BF16, [rows, n, heads, dim]));
            let (q, k, v) = (argument("q", queries), argument("k", keys), argument("v", keys));
            let bias = b.argument("bias", Type::new(DType::F32, [1, 1, 1, keys]));
            let results: Vec<Value> = match parts {
                true => Partial::of(kernel, &q, &k, &v, Some(&bias), 0.1).into_values().into(),
                false => vec![attention(kernel, &q, &k, &v, Some(&bias), 0.1)],
            };
            let results: Vec<(&str, &Value)> = ["a", "b", "c"].into_iter().zip(&results).collect();
            let program = b.finish(&results).expect("builds");
            assert!(program.text.contains("tpu_custom_call"), "{queries} x {keys} x {dim}");
            if let Err(error) = machine.compile(&program, &options) {
                panic!("{target}, {rows} x {queries} x {keys} x {heads} x {dim}: {error}");
            }
        }
    }
}

/// The six attentions of a block: of each stream to itself, to its text and to the other.
const CALLS: usize = 6;

/// Arrays of a block in f32 that are as large as its queries or keys.
fn wide_queries(done: &Compiled, tokens: i64) -> Vec<Stored> {
    let is_wide = |s: &Stored| {
        let elements: i64 = s.dims.iter().product();
        // Tables of RoPE, one for both branches, are f32, and spread over a head once, before the loop.
        let is_table = s.opcode == "broadcast" && s.scope.ends_with("rope/broadcast_in_dim");
        s.dtype == "f32" && s.scope.contains("blocks/") && elements >= tokens * 2048 && !is_table
    };
    done.module.stored().into_iter().filter(is_wide).collect()
}

fn kernels(done: &Compiled) -> usize {
    done.module.instructions().filter(|i| i.target == "tpu_custom_call").count()
}

/// Temporaries beside those of attention in XLA's own operations, and what the model's program stores.
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
    // The kernel states what it computes with the padding of its blocks.
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
    // A layer of each stack, whatever the compiler does to take it out: all layers would be most of either.
    let [moved, other] = [&done, &plain].map(|c| c.report.layer.bytes / 1e9);
    assert!(moved <= 0.5 * other, "{moved:.2} of {other:.2} GB are moved");
}

#[needs(tpu, full)]
fn ulysses_on_v5p() {
    judge("ulysses", "tpu:v5p:2x2x2", None, 0.35);
}

#[needs(tpu, full)]
fn ulysses_on_tpu7x() {
    judge("ulysses", "tpu:tpu7x:2x2x1", None, 0.35);
}

/// Here most of the temporaries are the weights that a block gathers, some of them while attention runs.
#[needs(tpu, full)]
fn fsdp_ulysses_on_v6e() {
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

/// The manual regions that budgets do not look at take the kernel.
#[needs(tpu, full)]
fn rings_compile_with_the_kernel() {
    takes_the_kernel(&[("ring", "context=8", "tpu:v5p:2x2x2"), ("hybrid", "context=8", "tpu:v5p:2x2x2")]);
}

/// Every layout's do.
#[needs(tpu, full)]
fn every_layout_compiles_with_the_kernel() {
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

/// Seconds on an idle machine: loops of all blocks, and the split decoder. By itself, after the others.
#[needs(tpu, alone)]
fn the_compiler_takes_no_longer_than_it_did() {
    let loops = [("ulysses", "tpu:v5p:2x2x2"), ("ulysses", "tpu:tpu7x:2x2x1"), ("fsdp-ulysses", "tpu:v6e:2x4")];
    let decoder =
        Case { program: ProgramKind::VideoDecoder, ..Case::denoise("fsdp-ulysses", "context=8", "tpu:v6e:2x4") };
    let limits = loops.map(|(layout, target)| (Case::denoise(layout, "context=8", target), 60.0));
    for (case, limit) in limits.into_iter().chain([(decoder, 600.0)]) {
        let seconds = seconds(case);
        assert!(seconds <= limit, "{case:?}: compiled in {seconds:.0} s");
    }
}
