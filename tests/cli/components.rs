//! Each component, run and compiled as a user does (with LLVM optimizations and XLA's own emitters), compared with the
//! reference.

use crate::support::{self, cases, full, needs};
use ltx2::pipeline::output::tensors;

/// Maximum relative L2 distance in f32, as in `it parity`.
const F32: f64 = 1e-4;

#[needs(cpu)]
fn perturbation_is_rejected_if_unsupported_by_the_model() {
    let dir = tempfile::tempdir().expect("a folder");
    let inputs = dir.path().join("in.safetensors");
    let case = cases("transformer").into_iter().find(|c| c.name.ends_with("/tiny_a")).expect("a case");
    let given: Vec<_> = case.inputs.iter().map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
    tensors::write(&inputs, &given).expect("written");
    let mut run = support::ltx2();
    run.args(["run", "transformer", "--platform", "cpu", "--dtype", "f32", "--set", "stg_blocks=[0]", "--model"]);
    run.arg(&case.model).arg("--inputs").arg(&inputs).arg("-o").arg(dir.path().join("out.safetensors"));
    for (name, value) in case.arguments() {
        run.arg("--set").arg(format!("{name}={value}"));
    }
    let ran = run.output().expect("runs");
    let said = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(2), "{said}");
    assert!(said.contains("stg_blocks: this model has no perturbed attention"), "{said}");
}

#[needs(cpu)]
fn components_match_reference_with_default_compile_options() {
    let dir = tempfile::tempdir().expect("a folder");
    let (inputs, results) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    // Names of the outputs, here and in the reference.
    let components: [(&str, &[(&str, &str)]); 8] = [
        ("transformer", &[("video", "video"), ("audio", "audio")]),
        ("connectors", &[("video", "video"), ("audio", "audio")]),
        ("text-encoder", &[("prompt_embeds", "projected")]),
        ("video-decoder", &[("video", "video")]),
        ("video-encoder", &[("latents", "latents")]),
        ("audio-decoder", &[("mel", "mel")]),
        ("vocoder", &[("audio", "audio")]),
        ("upsampler", &[("latents", "latents")]),
    ];
    // Three of them outside the full test. The vocoder takes longest to compile.
    for (component, outputs) in
        components.into_iter().step_by(if full() { 1 } else { 2 }).take(if full() { 8 } else { 3 })
    {
        // The text encoder's output is only defined everywhere without padding.
        let whole = |case: &support::Case| component != "text-encoder" || case.name.ends_with("_full");
        let case = cases(component).into_iter().find(whole).expect("a case");
        let given: Vec<_> = case.inputs.iter().map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
        tensors::write(&inputs, &given).expect("written");
        let mut run = support::ltx2();
        run.env_remove("XLA_FLAGS").args(["run", component, "--platform", "cpu", "--dtype", "f32", "--model"]);
        run.arg(&case.model).arg("--force").arg("--inputs").arg(&inputs).arg("-o").arg(&results);
        for (name, value) in case.arguments() {
            run.arg("--set").arg(format!("{name}={value}"));
        }
        if component == "text-encoder" {
            run.args(["--set", "output_hidden_states=false"]);
        }
        let ran = run.output().expect("runs");
        assert!(ran.status.success(), "{component}: {}", String::from_utf8_lossy(&ran.stderr));
        let got = tensors::read(&results).expect("results");
        for (name, wanted) in outputs {
            let distance = case.distance(wanted, &got[*name]);
            eprintln!("{} {name}: {distance:.1e}", case.name);
            assert!(distance <= F32, "{} {name}: {distance:e}", case.name);
        }
    }
}
