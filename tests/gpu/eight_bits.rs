//! 8-bit transformers on a GPU: as close to the reference as on the CPU, and closer to the CPU's results than those are
//! to the reference. The kernel of int8-convrot quantizes activations as the host does.

use ltx2::hlo::{DType, Type};
use ltx2::models::{Network, transformer};
use ltx2::nn::{Axis, Build, Lowering, Params, Quantization};
use ltx2::pipeline::output::tensors;
use ltx2::pipeline::plan::origin::Weights;
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pipeline::programs::executor::{Executor, Inputs};
use ltx2::pjrt::Client;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;
use ltx2::weights::quantize::{QuantizedForm, quantize};

use crate::support::passes::scattered;
use crate::support::{cases, cpu, lowering_of, ltx2, needs, quick, relative_l2, run_case};
use crate::windows::gpus;

/// Factor by which a GPU's error may exceed the CPU's: rounding differs in place, not in amount.
const SPREAD: f64 = 1.5;

#[needs(cpu, gpu)]
fn quantized_transformer_on_one_gpu_agrees_with_the_cpu() {
    let client = cpu(1);
    let dir = tempfile::tempdir().expect("a folder");
    let (inputs, results) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let all = cases("transformer");
    // One case per generation; unrolled layers, as in CUDA programs.
    let lowering = Lowering { unroll_layers: true, ..lowering_of("cpu") };
    for name in ["transformer/tiny_b", "transformer/tiny_2_3_perturbed", "transformer/tiny_v2_5"] {
        let case = all.iter().find(|case| case.name == name).expect("a case");
        let given: Vec<_> = case.inputs.iter().map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
        tensors::write(&inputs, &given).expect("written");
        for (quantization, set) in [
            (Quantization::Fp8, &["runtime.weights=fp8"][..]),
            (Quantization::Int8 { activations: false, rotated: false }, &["runtime.weights=int8"]),
            (
                Quantization::Int8 { activations: true, rotated: false },
                &["runtime.weights=int8", "runtime.activations=int8"],
            ),
        ] {
            let build = Build { lowering, quantization, ..Build::new(DType::F32) };
            let own = run_case(&client, ProgramKind::Transformer, case, case.inputs.clone(), quick(), &build);
            let mut run = ltx2();
            run.args(["run", "transformer", "--platform", "cuda", "--dtype", "f32", "--force", "--model"]);
            run.arg(&case.model).arg("--inputs").arg(&inputs).arg("-o").arg(&results);
            let arguments = case.arguments().map(|(name, value)| format!("{name}={value}"));
            arguments.chain(set.iter().map(ToString::to_string)).for_each(|set| {
                run.arg("--set").arg(set);
            });
            let ran = run.output().expect("runs");
            assert!(ran.status.success(), "{name} {set:?}: {}", String::from_utf8_lossy(&ran.stderr));
            let other = tensors::read(&results).expect("results");
            for stream in ["video", "audio"] {
                let (far, cpu) = (case.distance(stream, &other[stream]), case.distance(stream, &own[stream]));
                let apart = relative_l2(&other[stream], &own[stream]);
                eprintln!("{name} {set:?} {stream}: {far:.4} from the reference, the CPU {cpu:.4}, {apart:.4} apart");
                assert!(far <= SPREAD * cpu, "{name} {set:?} {stream}: {far} of {cpu}");
                assert!(
                    apart <= cpu,
                    "{name} {set:?} {stream}: {apart} from the CPU, which is {cpu} from the reference"
                );
            }
        }
    }
}

/// Returns the int8 codes and the scales of the activations `x [1, rows, inputs]` of an int8-convrot layer.
fn quantized_activations(client: &Client, x: &Tensor, rotates_by_kernel: bool) -> [Vec<f32>; 2] {
    let lowering = Lowering { rotates_by_kernel, ..lowering_of("cuda") };
    let quantization = Quantization::Int8 { activations: true, rotated: true };
    let build = Build { lowering, quantization, ..Build::new(DType::BF16) };
    let p = Params::new("activations", transformer::COMPONENT, &build);
    let axes = [Axis::CfgBatch, Axis::VideoSequence, Axis::Replicated];
    let input = p.input("x", Type::new(DType::F32, x.shape()), &axes);
    let results = p.each_layer_quantized(
        "transformer_blocks",
        1,
        |_| true,
        &[input],
        |p, _, x| {
            let (codes, scales) = p.quantized_rows(&x[0].to(p.dtype()), DType::I8);
            vec![codes.to(DType::F32), scales]
        },
    );
    let names = ["codes", "scales"];
    let outputs = names.iter().zip(&results).map(|(name, value)| p.output(name, value, &axes, value.dims()));
    let network = Network::finish(&p, outputs.collect()).expect("builds");
    let calls = network.program.text.matches("__gpu$xla.gpu.triton").count();
    assert_eq!(calls, usize::from(rotates_by_kernel));
    let mut executor = Executor::new(Engine::new(client.clone(), quick()), Weights::Random(7));
    let program = executor.prepare("activations", &network).expect("compiles");
    let inputs = executor.give_all(&program, Inputs::default(), [("x".into(), x.clone())]).expect("uploads");
    let results = executor.run(&program, &inputs).expect("runs");
    names.map(|name| results.tensor(name).expect("a result").to_f32().into_iter().collect())
}

#[needs(gpu)]
fn rotation_kernel_and_xla_operations_quantize_like_the_host() {
    let client = gpus();
    // Whole and partly filled programs; rows with 1, 3, 8, 15, 16, 60 and 64 groups.
    let shapes = [[1, 256], [37, 768], [126, 2048], [64, 3840], [300, 4096], [5, 15360], [33, 16384]];
    for [rows, inputs] in shapes {
        // bf16 represents these values exactly.
        let mut x = scattered("x", &[1, rows, inputs]).to_f32().mapv(|v| (v * 16.0).round() / 16.0);
        x.indexed_iter_mut().filter(|(at, _)| at[2] % 97 == 11).for_each(|(_, v)| *v *= 16.0);
        let x = Tensor::F32(x);
        let host = quantize(QuantizedForm::Int8Convrot, DType::F32, inputs, &x.bytes());
        for (rotates_by_kernel, most) in [(true, 1e-3), (false, 0.5)] {
            let [codes, scales] = quantized_activations(&client, &x, rotates_by_kernel);
            let apart = codes.iter().zip(&host.codes).map(|(got, want)| (got - f32::from(want.cast_signed())).abs());
            let apart: Vec<f32> = apart.collect();
            let largest = apart.iter().copied().fold(0.0, f32::max);
            let share = apart.iter().filter(|d| **d > 0.0).count() as f64 / apart.len() as f64;
            let scale = scales.iter().zip(&host.scales).map(|(got, want)| (got / want - 1.0).abs()).fold(0.0, f32::max);
            let name = format!("{rows} x {inputs}, kernel {rotates_by_kernel}");
            eprintln!("{name}: {share:.6} of the codes differ, by up to {largest}; scales by up to {scale:e}");
            assert_eq!((codes.len(), scales.len()), (host.codes.len(), rows), "{name}");
            assert!(largest <= 1.0 && share <= most, "{name}: {share} of the codes differ, by up to {largest}");
            // XLA's operations round rotated values to bf16.
            assert!(scale <= if rotates_by_kernel { 1e-6 } else { 4e-3 }, "{name}: scales differ by {scale}");
        }
    }
}
