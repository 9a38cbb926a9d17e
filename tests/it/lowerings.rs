//! Lowerings for CUDA and TPU compute the same results as the others, tested on the CPU plugin.

use std::collections::BTreeMap;

use crate::support::rope::{ROPES, rope};
use crate::support::{cases, cpu, full, lowering_of, lowering_of_kind, needs, quick, relative_l2, run_case};
use half::bf16;
use ltx2::hlo::{CustomCall, DType, Type};
use ltx2::kernels::{Kernel, Tpu, attention};
use ltx2::models::Network;
use ltx2::nn::{Axis, Build, Lowering, Params, RopeForm, RoundingPoints};
use ltx2::pipeline::plan::origin::Weights;
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ndarray::Array4;

/// Order of operations in Lightricks' code: bf16 tables, a rounded product with the cosine, then one multiply-add.
#[needs(cpu)]
fn official_rope_matches_reference_bitwise() {
    let client = cpu(8);
    let engine = Engine::new(client, quick());
    let forms = [RopeForm::Halves, RopeForm::Reversal, RopeForm::Product];
    // The audio size only in the full test.
    for [b, n, h, d] in ROPES.into_iter().take(if full() { 2 } else { 1 }) {
        let n = if full() { n } else { n.min(48) };
        let dims = [b, n, h, d];
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
        for form in forms {
            let lowering = Lowering { rope: form, ..lowering_of("cpu") };
            let network = rope(dims, RoundingPoints::Official, lowering);
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

/// Runs every CUDA and TPU lowering that the CPU supports on the reference's cases.
#[needs(cpu)]
fn cuda_and_tpu_lowerings_match_the_cpu_lowering() {
    let client = cpu(8);
    let plain = lowering_of("cpu");
    let here = |forms: Lowering| Lowering {
        mixed_precision_dot: false,
        batch_invariant: true,
        attention: Kernel::Plain,
        ..forms
    };
    let (cuda, tpu) = (here(lowering_of("cuda")), here(lowering_of_kind("tpu", "TPU v5")));
    let forms = [("cuda", cuda), ("tpu", tpu)];
    // Both for the transformer; the full test runs the other programs and four cases too.
    for (component, folder, chosen) in [
        (ProgramKind::Transformer, "transformer", &forms[..]),
        (ProgramKind::TextEncoder, "text-encoder", &forms[1..]),
        (ProgramKind::Connectors, "connectors", &forms[..1]),
        (ProgramKind::VideoDecoder, "video-decoder", &forms[1..]),
    ]
    .into_iter()
    .take(if full() { 4 } else { 1 })
    {
        // The second transformer case, whose program for CPUs `parity` runs too.
        for case in cases(folder).into_iter().skip(usize::from(!full())).take(if full() { 4 } else { 1 }) {
            let run = |lowering: Lowering| {
                let build = Build { lowering, ..Build::new(DType::F32) };
                run_case(&client, component, &case, case.inputs.clone(), quick(), &build)
            };
            let want = run(plain);
            for (form, lowering) in if full() { &forms[..] } else { chosen } {
                let got = run(*lowering);
                for (name, tensor) in &want {
                    let distance = relative_l2(&got[name], tensor);
                    let limit = case.rounding(name).max(3e-6);
                    assert!(distance < limit, "{} {form} {name}: {distance:e}", case.name);
                }
            }
        }
    }
}

/// If the compiler rejects a program because of its kernel (here the CPU compiler rejects a TPU kernel), the program is
/// rebuilt without the kernel where that is allowed. Other programs keep their kernels.
#[needs(cpu)]
fn program_is_rebuilt_without_a_rejected_kernel() {
    let attend = |build: &Build| {
        let p = Params::new("attend", "transformer", build);
        let [q, k, v] =
            ["q", "k", "v"].map(|name| p.input(name, Type::new(DType::F32, [1, 16, 4, 32]), &[Axis::Replicated; 4]));
        let y = attention(build.lowering.attention, &q, &k, &v, None, 0.2);
        Ok(Network::finish(&p, vec![p.output("y", &y, &[Axis::Replicated; 4], y.dims())])?)
    };
    let with = |attention_may_be_rejected| {
        let attention = Kernel::Mosaic(Tpu::from_kind("TPU v5"));
        let lowering = Lowering { attention, attention_may_be_rejected, ..lowering_of("cpu") };
        Build { lowering, ..Build::new(DType::F32) }
    };
    let mut executor = Executor::new(Engine::new(cpu(1), quick()), Weights::Random(1));
    let is_kernel = |network: &Network| network.program.text.contains("tpu_custom_call");
    // A kernel that was requested, or is known to work with the plugin, has no fallback.
    let kept = executor.accepted("attend", &with(false), attend).expect("is written");
    assert!(is_kernel(&kept) && executor.prepare("attend", &kept).is_err());
    // The second time without calling the compiler.
    for _ in 0..2 {
        let plain = executor.accepted("attend", &with(true), attend).expect("compiles without");
        assert!(!is_kernel(&plain));
        executor.prepare("attend", &plain).expect("runs");
    }
    // If the program also fails without the kernel, the error has the first reason.
    let wrong = |build: &Build| {
        let p = Params::new("wrong", "transformer", build);
        let x = p.input("x", Type::new(DType::F32, [2]), &[Axis::Replicated]);
        let call = CustomCall { target: "no_such_call".into(), api_version: 1, ..CustomCall::default() };
        let y = p.builder().custom_call(&call, &[&x], &[x.ty().clone()]).remove(0);
        Ok(Network::finish(&p, vec![p.output("y", &y, &[Axis::Replicated], y.dims())])?)
    };
    let error = executor.accepted("wrong", &with(true), wrong).expect_err("nothing compiles it").to_string();
    assert!(error.contains("no_such_call"), "{error}");
}
