//! Optimized programs of the CUDA compiler.

use ltx2::analysis::{self, CollectiveKind, Instruction, Module};
use ltx2::hlo::{DType, DeviceMesh, MemorySpace};
use ltx2::models::Network;
use ltx2::models::diffusion_decoder::{self, DiffusionDecoderConfig};
use ltx2::models::pixels::Pixels;
use ltx2::nn::{Axis, Build, ContextParallelPolicy, Layout, RoundingPoints, Rule};
use ltx2::runtime::Target;

use crate::support::rope::{ROPES, rope};
use crate::support::tpu::{self, Case, module};
use crate::support::{lowering_of, needs, published_blocks};

/// Blocks of the published model to compile; two are enough, as all blocks are alike.
const BLOCKS: usize = 2;

/// Compiles for one H200, without the hardware.
fn compiled(network: &Network) -> Module {
    compiled_for(network, 1)
}

/// Like [`compiled`], for several GPUs of one host.
fn compiled_for(network: &Network, cards: usize) -> Module {
    let target: Target = format!("cuda:h200:1x1x{cards}").parse().expect("a target");
    let machine = target.open().expect("a topology");
    let optimized = module(&machine, &network.program).optimized;
    Module::decode(&optimized.format, &optimized.bytes).expect("a module")
}

/// Compiles the denoising loop at 768x512x121 with a negative prompt.
#[needs(cuda)]
fn matmuls_fuse_epilogues_and_read_weights_in_place() {
    let [_, (_, denoise)] = published_blocks("cuda", Some(BLOCKS));
    let module = compiled(&denoise);
    let all: Vec<Instruction> = module.instructions().collect();
    let calls = |target: &str| all.iter().filter(|i| i.target == target).count();
    // Self, text and cross-modal attention of both streams.
    assert_eq!(calls("__cudnn$fmhaSoftmax"), 6 * BLOCKS);
    // Matmuls of a block: fused queries, keys and values, and the output, of both streams' self-attention; queries and
    // output of text attention; queries, keys with values, and output of both cross-modal attentions; two of each
    // feed-forward. And the input and output projections of the streams.
    let products: Vec<&Instruction> = all.iter().filter(|i| i.target == "__cublas$lt$matmul").collect();
    assert_eq!(products.len(), BLOCKS * (2 * 2 + 2 * 2 + 2 * 3 + 2 * 2) + 4);
    assert!(all.iter().all(|i| i.opcode != "dot"), "a product outside of cuBLAS");
    let bare: Vec<&str> = products.iter().filter(|i| !i.config.contains("BIAS")).map(|i| &*i.scope).collect();
    assert!(bare.is_empty(), "biases in passes of their own: {bare:?}");
    let gelu = products.iter().filter(|i| i.config.contains("BIAS_GELU")).count();
    // Only the video's: the audio's 252 rows are padded to 256.
    assert_eq!(gelu, BLOCKS);
    // Slices, copies or broadcasts as large as a weight.
    let moves = |i: &&Instruction| {
        let opcode = matches!(i.opcode.as_str(), "copy" | "dynamic-slice" | "transpose");
        (opcode || i.name.starts_with("wrapped_")) && i.elements >= 1 << 22
    };
    assert_eq!(all.iter().filter(moves).map(|i| &*i.name).collect::<Vec<_>>(), Vec::<&str>::new());
}

/// Compiles two of four blocks with weights in host memory. The copies run ahead by less than a block.
#[needs(cuda)]
fn streamed_weights_are_copied_while_blocks_compute() {
    let case = Case::denoise("replicated", "", "cuda:h200:1x1x1");
    let layers = Some(2 * BLOCKS);
    let resident = tpu::compiled(Case { layers, ..case });
    let streamed = tpu::compiled(Case { layers, set: &["runtime.stream=on", "runtime.resident_blocks=2"], ..case });
    let arguments = streamed.network.program.arguments.iter();
    let in_host: Vec<_> = arguments.filter(|a| a.memory == MemorySpace::PinnedHost).collect();
    let all: Vec<Instruction> = streamed.module.instructions().collect();
    let copies = all.iter().filter(|i| i.opcode == "copy-start" && i.elements >= 1 << 19).count();
    assert_eq!(copies, in_host.len());
    let bytes: usize = in_host.iter().map(|a| a.ty.elements() * a.ty.dtype.size()).sum();
    let block = (bytes / BLOCKS) as i64;
    assert!(block > 600 << 20, "{block} bytes");
    let [before, after] = [&resident, &streamed].map(|made| made.memory);
    assert_eq!(before.arguments - after.arguments, bytes as i64);
    assert!(after.temporaries - before.temporaries < block, "{after:?} instead of {before:?}, blocks of {block} bytes");
    // The first block is resident, so its first matmul waits for no copy.
    let listing = streamed.module.listing();
    let at = |what: &str| listing.find(what).unwrap_or_else(|| panic!("no {what}"));
    assert!(at("cublas-lt-matmul") < at(" copy-done("), "copies before the first matmul");
}

/// Sharded over two devices, each device copies only its shards. FSDP gathers weights after the copy.
#[needs(cuda)]
fn each_device_streams_its_shard() {
    for (layout, mesh) in [("fsdp-ulysses", "context=2"), ("tensor", "tensor=2")] {
        let case = Case::denoise(layout, mesh, "cuda:h200:1x1x2");
        let made = tpu::compiled(Case { layers: Some(BLOCKS), set: &["runtime.stream=on"], ..case });
        let in_host = made.network.program.arguments.iter().filter(|a| a.memory == MemorySpace::PinnedHost);
        let bytes: usize = in_host.map(|a| a.ty.elements() * a.ty.dtype.size()).sum();
        assert!(bytes > 600 << 20, "{bytes} bytes");
        assert_eq!(
            (2 * made.memory.host_arguments, 2.0 * made.report.step.host),
            (bytes as i64, bytes as f64),
            "{layout}"
        );
        let p = made.report.predicted.expect("a chip");
        assert!(p.exposed_host_copy < 0.5 * p.host_copy, "{layout}: {p:?}");
    }
}

/// The formula computes the FLOPs of two forward passes from the model's sizes. A multiply-add counts as two, and text
/// keys and values are computed beforehand.
#[needs(cuda)]
fn counted_flops_match_the_analytical_formula() {
    let [_, (_, denoise)] = published_blocks("cuda", Some(BLOCKS));
    let module = compiled(&denoise);
    let report = analysis::report(&module, &denoise.program.mesh.axes, &[BLOCKS], None);
    let (d, a, n, m, t) = (4096.0, 2048.0, 6144.0, 126.0, 1024.0);
    let stream =
        |d: f64, n: f64| 8.0 * d * d * n + 4.0 * n * n * d + 4.0 * d * d * n + 4.0 * n * t * d + 16.0 * d * d * n;
    // Queries and output on the attending side, keys and values on the other.
    let to_video = 4.0 * d * a * n + 4.0 * a * a * m + 4.0 * n * m * a;
    let to_audio = 4.0 * a * a * m + 4.0 * d * a * n + 4.0 * n * m * a;
    let ends = 2.0 * 2.0 * 128.0 * (d * n + a * m);
    let block = 2.0 * (stream(d, n) + stream(a, m) + to_video + to_audio);
    let want = block * BLOCKS as f64 + 2.0 * ends;
    let got = report.step.flops;
    eprintln!("{:.3} TFLOP, the formula {:.3}", got / 1e12, want / 1e12);
    assert!((got / want - 1.0).abs() < 0.01, "{got:e} of {want:e}");
    assert!((report.layer.flops / block - 1.0).abs() < 0.01, "a block: {:e} of {block:e}", report.layer.flops);
}

/// One kernel reads each input of quantized layers and writes what the matmuls read.
#[needs(cuda)]
fn int8_convrot_rotates_and_quantizes_each_input_in_one_kernel() {
    let set = &["runtime.weights=int8-convrot", "runtime.activations=int8"];
    let one = Case::denoise("replicated", "data=1", "cuda:h200:1x1x1");
    let made = tpu::compiled(Case { config: "ltx2_5_distilled", layers: Some(BLOCKS), set, ..one });
    let all: Vec<Instruction> = made.module.instructions().collect();
    let kernels: Vec<_> = all.iter().filter(|i| i.target == "__gpu$xla.gpu.triton").collect();
    // Inputs of a block: fused queries, keys and values, and the output, of both streams' self-attention; queries, keys
    // with values, and output of text attention and of both cross-modal attentions; two of each feed-forward.
    assert_eq!(kernels.len(), BLOCKS * (2 * 2 + 2 * 3 + 2 * 3 + 2 * 2));
    let is_kernel = |i: &Instruction| matches!(i.opcode.as_str(), "custom-call" | "get-tuple-element" | "bitcast");
    let others = all.iter().filter(|i| i.scope.contains("/rotation/") && !is_kernel(i)).map(|i| &*i.name);
    assert_eq!(others.collect::<Vec<_>>(), Vec::<&str>::new(), "rotation by other operations");
    let moves = |i: &&Instruction| matches!(i.opcode.as_str(), "copy" | "transpose") && i.elements >= 1 << 22;
    assert_eq!(all.iter().filter(moves).map(|i| &*i.name).collect::<Vec<_>>(), Vec::<&str>::new());
}

#[needs(cuda)]
fn rope_is_one_fusion_with_the_specified_roundings() {
    // Official numerics round three values: the product with the cosine and both tables. (Rounding a table inside the
    // fusion does not reduce the bytes read.)
    for (numerics, rounded) in [(RoundingPoints::Default, 0), (RoundingPoints::Official, 3)] {
        for dims in ROPES {
            let module = compiled(&rope(dims, numerics, lowering_of("cuda")));
            let all: Vec<Instruction> = module.instructions().collect();
            let count = |opcode: &str| all.iter().filter(|i| i.opcode == opcode).count();
            assert_eq!(count("fusion"), 1, "{numerics:?} {dims:?}");
            assert_eq!(count("concatenate") + count("copy") + count("transpose"), 0, "{numerics:?} {dims:?}");
            // To f32 and back.
            assert_eq!((count("convert"), count("reduce-precision")), (2, rounded), "{numerics:?} {dims:?}");
        }
    }
}

/// Runs on one GPU and sharded. Keys of overlapping windows are not materialized.
#[needs(cuda)]
fn windowed_attention_is_one_kernel_per_decoder_block() {
    let config = DiffusionDecoderConfig::from_json(&serde_json::json!({})).unwrap();
    let depths = 4 + 6 + 4 + 2 + 8;
    for (cards, latents) in [(1, [1, 3, 8, 12]), (2, [1, 3, 16, 12])] {
        let rule = Rule { axis: Axis::Height, mesh_axes: vec!["context".into()], place: "rows.yml:1".into() };
        let mesh = DeviceMesh::new(&[("context", cards)]);
        let layout = Layout::new(mesh, vec![rule], vec![], vec![], ContextParallelPolicy::default()).unwrap();
        let build = Build { layout, lowering: lowering_of("cuda"), ..Build::new(DType::BF16) };
        let network = diffusion_decoder::program(&config, latents, Pixels::Values, &build).unwrap();
        let module = compiled_for(&network, cards);
        let all: Vec<Instruction> = module.instructions().collect();
        assert_eq!(all.iter().filter(|i| i.target == "__gpu$xla.gpu.triton").count(), depths, "{cards}");
        // FLOPs of queries with their own windows only, not with all keys that a kernel's block loads.
        let report = analysis::report(&module, &network.program.mesh.axes, &[1], None);
        let windows = [(4, 5 * 8 * 12, 2048, 147), (6, 5 * 16 * 24, 1024, 147), (4, 9 * 16 * 24, 512, 75)];
        let windows = windows.into_iter().chain([(2, 17 * 32 * 48, 512, 75), (8, 17 * 64 * 96, 256, 1331)]);
        let want: usize = windows.map(|(blocks, cells, channels, window)| 4 * blocks * cells * channels * window).sum();
        assert_eq!(report.step.attention, want as f64, "{cards}");
    }
}

/// cuDNN attends to the local keys while the remote keys are transferred, and then to the remote keys.
#[needs(cuda)]
fn ring_attention_on_two_gpus_uses_two_cudnn_calls_and_no_loop() {
    let ring = Case::denoise("ring", "context=2", "cuda:h200:1x1x2");
    let made = tpu::compiled(Case { layers: Some(BLOCKS), size: [1024, 576, 65], attention: "cudnn", ..ring });
    let all: Vec<Instruction> = made.module.instructions().collect();
    // Six attentions per block, one of them in two parts.
    assert_eq!(all.iter().filter(|i| i.target == "__cudnn$fmhaSoftmax").count(), 7 * BLOCKS);
    // The loop over steps.
    assert_eq!(all.iter().filter(|i| i.opcode == "while").count(), 1);
    let permutes = made.report.collectives.iter().filter(|c| c.kind == CollectiveKind::CollectivePermute);
    let permutes: Vec<_> = permutes.collect();
    // Keys and values.
    assert_eq!(permutes.len(), 2 * BLOCKS);
    assert!(permutes.iter().all(|c| c.asynchronous && c.overlapped), "{permutes:?}");
    // With copy engines: the wrapped operation or its start.
    let passes = all.iter().filter(|i| i.opcode.starts_with("collective-permute") && !i.opcode.ends_with("done"));
    let engines = passes.filter(|i| i.config.contains("COLLECTIVES_PEER_MEMORY")).count();
    assert_eq!(engines, 2 * BLOCKS);
}
