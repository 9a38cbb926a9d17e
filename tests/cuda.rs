//! What the CUDA compiler makes of our programs, asked without a GPU, and that the forms it takes best compute what the
//! others do.

mod common;

use std::collections::BTreeMap;

use common::{cases, cpu, published_blocks, quick, relative_l2, run_case};
use half::bf16;
use ltx2::analysis::{self, Instruction, Module};
use ltx2::dtype::DType;
use ltx2::hlo::Type;
use ltx2::kernels::Kernel;
use ltx2::models::Network;
use ltx2::nn::rope::{Pairing, rotate};
use ltx2::nn::{Axis, Build, Lowering, Numerics, Params, RopeForm};
use ltx2::pipeline::run::RunComponent;
use ltx2::pjrt::discover::{self, Kind};
use ltx2::runtime::{Engine, EngineOptions, Target};
use ltx2::tensor::Tensor;
use ndarray::Array4;

/// Blocks of the published model: two show what every block does.
const BLOCKS: usize = 2;

/// Compiles for one H200 that is not here; None, with a loud line, without the plugin.
fn compiled(network: &Network) -> Option<Module> {
    if discover::find(Kind::Cuda, None).found.is_empty() {
        eprintln!("SKIPPED, NOTHING WAS TESTED: no CUDA plugin found; run `ltx2 plugin install cuda`");
        return None;
    }
    let target: Target = "cuda:h200:1x1x1".parse().expect("a target");
    let machine = target.open().expect("a topology");
    let compiled = machine.compile(&network.program, &EngineOptions::default()).expect("compiles");
    let optimized = compiled.optimized_program().expect("an optimized program");
    Some(Module::decode(&optimized.format, &optimized.bytes).expect("a module"))
}

/// The loop at 768x512x121 with a negative prompt.
#[test]
fn products_hold_their_epilogues_and_weights_are_read_in_place() {
    let [_, (_, denoise)] = published_blocks("cuda", Some(BLOCKS));
    let Some(module) = compiled(&denoise) else { return };
    let all: Vec<Instruction> = module.instructions().collect();
    let calls = |target: &str| all.iter().filter(|i| i.target == target).count();
    // Self, text and cross-modal attention of both streams.
    assert_eq!(calls("__cudnn$fmhaSoftmax"), 6 * BLOCKS);
    // A block's products: fused queries, keys and values, and the output, of both streams' self-attention; queries and
    // output of text attention; queries, keys with values and output of both cross-modal ones; two of each feed-forward.
    // Beside them the maps in and out of the streams.
    let products: Vec<&Instruction> = all.iter().filter(|i| i.target == "__cublas$lt$matmul").collect();
    assert_eq!(products.len(), BLOCKS * (2 * 2 + 2 * 2 + 2 * 3 + 2 * 2) + 4);
    assert!(all.iter().all(|i| i.opcode != "dot"), "a product outside of cuBLAS");
    let bare: Vec<&str> = products.iter().filter(|i| !i.config.contains("BIAS")).map(|i| &*i.scope).collect();
    assert!(bare.is_empty(), "biases in passes of their own: {bare:?}");
    let gelu = products.iter().filter(|i| i.config.contains("BIAS_GELU")).count();
    // The video's: the audio's 252 rows are filled up to 256.
    assert_eq!(gelu, BLOCKS);
    // A slice, a copy or a broadcast as large as a weight.
    let moves = |i: &&Instruction| {
        let opcode = matches!(i.opcode.as_str(), "copy" | "dynamic-slice" | "transpose");
        (opcode || i.name.starts_with("wrapped_")) && i.elements >= 1 << 22
    };
    assert_eq!(all.iter().filter(moves).map(|i| &*i.name).collect::<Vec<_>>(), Vec::<&str>::new());
}

/// FLOPs of two forwards by the model's sizes (2 a multiplication and addition), text keys and values made before.
#[test]
fn flops_are_those_of_the_formula() {
    let [_, (_, denoise)] = published_blocks("cuda", Some(BLOCKS));
    let Some(module) = compiled(&denoise) else { return };
    let report = analysis::report(&module, &denoise.program.mesh, BLOCKS, None);
    let (d, a, n, m, t) = (4096.0, 2048.0, 6144.0, 126.0, 1024.0);
    let stream =
        |d: f64, n: f64| 8.0 * d * d * n + 4.0 * n * n * d + 4.0 * d * d * n + 4.0 * n * t * d + 16.0 * d * d * n;
    // Queries and output on the reading side, keys and values on the other.
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

fn rope(dims: [usize; 4], numerics: Numerics, lowering: Lowering) -> Network {
    let p = Params::new("rope", "transformer", &Build { lowering, ..Build::new(DType::BF16) });
    let whole = [Axis::Whole; 4];
    let x = p.input("x", Type::new(DType::BF16, dims), &whole);
    let table = Type::new(DType::F32, [1, dims[1], dims[2], dims[3] / 2]);
    let (cos, sin) = (p.input("cos", table.clone(), &whole), p.input("sin", table, &whole));
    let y = rotate(&p, &x, &cos, &sin, Pairing::Split, numerics);
    Network::finish(&p, vec![p.output("y", &y, &whole, &dims)]).expect("builds")
}

/// Self-attention of the video at 8 frames of 12x12 and of the audio's 25 tokens, two videos in two branches.
const ROPES: [[usize; 4]; 2] = [[4, 1152, 32, 128], [4, 25, 32, 64]];

#[test]
fn rope_is_one_fusion_that_rounds_where_the_order_says() {
    // The product with the cosine and both tables; a table rounded on its way in would be read as wide as before.
    for (numerics, rounded) in [(Numerics::Default, 0), (Numerics::Official, 3)] {
        for dims in ROPES {
            let Some(module) = compiled(&rope(dims, numerics, Lowering::of("cuda", ""))) else { return };
            let all: Vec<Instruction> = module.instructions().collect();
            let count = |opcode: &str| all.iter().filter(|i| i.opcode == opcode).count();
            assert_eq!(count("fusion"), 1, "{numerics:?} {dims:?}");
            assert_eq!(count("concatenate") + count("copy") + count("transpose"), 0, "{numerics:?} {dims:?}");
            // Into f32 and back.
            assert_eq!((count("convert"), count("reduce-precision")), (2, rounded), "{numerics:?} {dims:?}");
        }
    }
}

/// The official order: tables in bf16, the product with the cosine rounded, then one multiply-add.
#[test]
fn the_official_order_of_rope_is_the_references_bit_for_bit() {
    let Some(client) = cpu(1) else { return };
    let engine = Engine::new(client, quick());
    for dims in ROPES {
        let [b, n, h, d] = dims;
        let wave = |seed: f32| {
            move |(i, j, k, l): (usize, usize, usize, usize)| {
                ((i * 977 + j * 131 + k * 17 + l) as f32 * 0.37 + seed).sin() * 3.0
            }
        };
        let x = Array4::from_shape_fn((b, n, h, d), wave(0.2)).mapv(bf16::from_f32);
        let angle = Array4::from_shape_fn((1, n, h, d / 2), wave(1.3)).mapv(|v| v * 40.0);
        let (cos, sin) = (angle.mapv(f32::cos), angle.mapv(f32::sin));
        let round = |v: f32| bf16::from_f32(v).to_f32();
        let want = Array4::from_shape_fn((b, n, h, d), |(i, j, k, l)| {
            let pair = l % (d / 2);
            let other = x[[i, j, k, (l + d / 2) % d]].to_f32() * if l < d / 2 { -1.0 } else { 1.0 };
            let (cos, sin) = (round(cos[[0, j, k, pair]]), round(sin[[0, j, k, pair]]));
            bf16::from_f32(round(x[[i, j, k, l]].to_f32() * cos) + other * sin)
        });
        for form in [RopeForm::Halves, RopeForm::Reversal, RopeForm::Product] {
            let lowering = Lowering { rope: form, ..Lowering::of("cpu", "") };
            let network = rope(dims, Numerics::Official, lowering);
            let executable = engine.compile("rope", &network.program).expect("compiles");
            let given: BTreeMap<&str, _> = [
                ("x", Tensor::BF16(x.clone().into_dyn())),
                ("cos", Tensor::from(cos.clone())),
                ("sin", Tensor::from(sin.clone())),
            ]
            .into_iter()
            .map(|(name, tensor)| (name, engine.upload(&executable, name, &tensor).expect("uploads")))
            .collect();
            let outputs = engine.run(&executable, |name| given.get(name)).expect("runs");
            let Tensor::BF16(got) = outputs.tensor("y").expect("a result") else { panic!("not bf16") };
            let differ = got.iter().zip(&want).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(differ, 0, "{dims:?}, {form:?}");
        }
    }
}

/// Every form of the CUDA and TPU programs that the CPU can run, on the reference's cases.
#[test]
fn forms_of_equal_value_agree() {
    let Some(client) = cpu(1) else { return };
    let plain = Lowering::of("cpu", "");
    let here = |forms: Lowering| Lowering { mixed_products: false, rowwise: true, attention: Kernel::Plain, ..forms };
    let (cuda, tpu) = (here(Lowering::of("cuda", "")), here(Lowering::of("tpu", "TPU v5")));
    for (component, folder) in [
        (RunComponent::Transformer, "transformer"),
        (RunComponent::TextEncoder, "text-encoder"),
        (RunComponent::Connectors, "connectors"),
        (RunComponent::VideoDecoder, "video-decoder"),
    ] {
        for case in cases(folder).into_iter().take(4) {
            let [want, of_cuda, of_tpu] = [plain, cuda, tpu].map(|lowering| {
                run_case(
                    &client,
                    component,
                    &case,
                    case.inputs.clone(),
                    quick(),
                    &Build { lowering, ..Build::new(DType::F32) },
                )
            });
            for (name, tensor) in &want {
                let distance = relative_l2(&of_cuda[name], tensor).max(relative_l2(&of_tpu[name], tensor));
                assert!(distance < case.rounding(name).max(3e-6), "{} {name}: {distance:e}", case.name);
            }
        }
    }
}
