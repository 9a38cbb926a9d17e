//! LTX-2.5's text encoder: compared with the reference, sharded compared with one device, and as lowered for each
//! platform.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::layouts::{build, limit};
use crate::parity::valid;
use crate::support::{Case, cases, cpu, full, lowering_of, needs, plain, quick, relative_l2, run_case};
use ltx2::analysis::Module;
use ltx2::hlo::DType;
use ltx2::models::connectors::ConnectorsConfig;
use ltx2::models::gemma4::{self, Gemma4Config};
use ltx2::models::presets::Preset;
use ltx2::nn::{Build, Lowering};
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pjrt::Client;
use ltx2::runtime::Engine;
use ltx2::tensor::Tensor;

fn json(file: &Path) -> serde_json::Value {
    let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
}

fn config(model: &Path) -> Gemma4Config {
    Gemma4Config::from_json(&json(&model.join("text_encoder/config.json"))).expect("valid")
}

/// Returns `prompt_embeds` of a case: projected, or the stack of hidden states.
fn encode(client: &Client, case: &mut Case, projected: bool, build: &Build) -> Tensor {
    case.scalars = BTreeMap::from([("output_hidden_states".to_string(), (!projected).into())]);
    let mut outputs = run_case(client, ProgramKind::TextEncoder, case, case.inputs.clone(), quick(), build);
    outputs.remove("prompt_embeds").expect("a result")
}

/// Returns the relative L2 distance over the rows of valid tokens.
fn distance(case: &Case, got: &Tensor, want: &Tensor) -> f64 {
    let mask = &case.inputs["attention_mask"];
    relative_l2(&valid(got, mask), &valid(want, mask))
}

fn named(name: &str) -> Case {
    cases("gemma4").into_iter().find(|c| c.name.ends_with(name)).unwrap_or_else(|| panic!("no case {name}"))
}

/// Compares the text projection of three configurations, and every hidden state of the first; in the full test of all.
/// `unrolled_layers_match_reference` runs the second one.
#[needs(cpu)]
fn hidden_states_match_reference() {
    let client = cpu(8);
    let mut all = cases("gemma4");
    assert_eq!(all.len(), 3);
    for case in &mut all {
        for (output, projected) in [("prompt_embeds", false), ("projected", true)] {
            let runs = case.name.ends_with("gemma4_a") || projected && case.name.ends_with("gemma4_c");
            if !runs && !full() {
                continue;
            }
            let got = encode(&client, case, projected, &plain(DType::F32));
            let distance = distance(case, &got, &case.outputs[output]);
            eprintln!("{} {output}: {distance:.1e}", case.name);
            assert!(distance <= 1e-4, "{} {output}: {distance:e}", case.name);
        }
    }
}

#[needs(cpu)]
fn bf16_error_is_close_to_that_of_the_reference() {
    let mut case = named("gemma4_a");
    let got = encode(&cpu(8), &mut case, true, &plain(DType::BF16));
    let distance = distance(&case, &got, &case.outputs["projected"]);
    let own = case.number("bf16_spread.projected").expect("a spread");
    eprintln!("{distance:.4}, the reference {own:.4}");
    assert!(distance <= 1.5 * own, "{distance} of {own}");
}

/// The layer pattern is irregular, and the layers are unrolled as in CUDA programs.
#[needs(cpu)]
fn unrolled_layers_match_reference() {
    let mut case = named("gemma4_b");
    let lowering = Lowering { mixed_precision_dot: false, ..lowering_of("cuda") };
    let got = encode(&cpu(8), &mut case, true, &Build { lowering, ..Build::new(DType::F32) });
    let distance = distance(&case, &got, &case.outputs["projected"]);
    eprintln!("{distance:.1e}");
    assert!(distance <= 1e-4, "{distance:e}");
}

#[needs(cpu)]
fn sharded_encoder_matches_single_device() {
    let (client, mut case) = (cpu(8), named("gemma4_a"));
    let whole = encode(&client, &mut case, true, &build("replicated", "data=1", 1));
    let layouts = [
        ("tensor", "cfg=2,context=2,tensor=2"),
        ("fsdp-ulysses", "fsdp=2,context=4"),
        ("tensor", "tensor=2"),
        ("fsdp-ffn", "cfg=2,context=4"),
    ];
    for (layout, mesh) in layouts.into_iter().take(if full() { 4 } else { 1 }) {
        let got = encode(&client, &mut case, true, &build(layout, mesh, 8));
        let distance = relative_l2(&got, &whole);
        eprintln!("{layout} {mesh}: {distance:.1e}");
        assert!(distance <= limit(layout), "{layout} {mesh}: {distance:e}");
    }
}

/// At the published sizes, the program has one loop over the repeated layer pattern and an inner loop over the
/// pattern's sliding-window layers, and copies no stacked weight.
#[needs(cpu)]
fn program_at_published_size_copies_no_stacked_weights() {
    let preset = Preset::named("ltx2_3").expect("the published configuration");
    let connectors = ConnectorsConfig::from_json(preset.config("connectors").expect("a configuration")).expect("valid");
    let config = config(Path::new("tests/fixtures/models/gemma4_12b"));
    let network = gemma4::program(&config, Some(&connectors), 2, 1024, &plain(DType::BF16)).expect("builds");
    let engine = Engine::new(cpu(1), quick());
    let compiled = engine.compile("text_encoder", &network.program).expect("accepted");
    let optimized = compiled.compiled().optimized_program().expect("an optimized program");
    let module = Module::decode(&optimized.format, &optimized.bytes).expect("a module");
    let loops = module.loops();
    assert_eq!((loops.len(), loops[0].inner.len()), (1, 1), "{loops:?}");
    let stacks: Vec<i64> = network.params.iter().map(|p| p.ty.elements() as i64).filter(|n| *n > 1 << 27).collect();
    assert!(stacks.len() >= 9, "{stacks:?}");
    for i in module.instructions() {
        let moved = ["copy", "transpose", "convert"].contains(&i.opcode.as_str());
        assert!(!moved || !stacks.contains(&i.elements), "a stack is copied: {i:?}");
    }
}
