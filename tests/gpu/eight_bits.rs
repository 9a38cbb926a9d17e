//! 8-bit transformers on a GPU: as close to the reference as on the CPU, and closer to the CPU's results than those are
//! to the reference.

use ltx2::hlo::DType;
use ltx2::nn::{Build, Lowering, Quantization};
use ltx2::pipeline::output::tensors;
use ltx2::pipeline::programs::build::ProgramKind;

use crate::support::{cases, cpu, ltx2, needs, quick, relative_l2, run_case};

/// Factor by which a GPU's error may exceed the CPU's: rounding differs in place, not in amount.
const SPREAD: f64 = 1.5;

#[needs(cpu, gpu)]
fn quantized_transformer_on_one_gpu_agrees_with_the_cpu() {
    let client = cpu(1);
    let dir = tempfile::tempdir().expect("a folder");
    let (inputs, results) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let all = cases("transformer");
    // One case per generation; unrolled layers, as in CUDA programs.
    let lowering = Lowering { unroll_layers: true, ..Lowering::cpu() };
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
