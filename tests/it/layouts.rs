//! Every shipped layout on eight virtual devices gives one device's results, for every component.

use std::collections::BTreeMap;

use crate::support::{
    Case, LAYOUTS, cases, cpu, devices_of, dumped, dumping, full, generate, lowering_of, needs, open, quick,
    relative_l2, request, run_case,
};
use ltx2::config::Config;
use ltx2::hlo::DType;
use ltx2::nn::{Build, Lowering};
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::pjrt::Client;
use ltx2::tensor::Tensor;

/// Returns the maximum distance between sharded and unsharded results in f32.
pub fn limit(layout: &str) -> f64 {
    if layout.starts_with("tensor") || layout.contains("ring") || layout == "hybrid" { 1e-4 } else { 1e-5 }
}

/// Returns layouts with the meshes to run them on: the default one, and others with sizes that do not divide evenly.
pub fn layouts_on_meshes() -> Vec<(&'static str, &'static str)> {
    [("tensor", "tensor=2"), ("tensor", "tensor=4"), ("tensor", "cfg=2,context=2,tensor=2")]
        .into_iter()
        .chain(LAYOUTS)
        .collect()
}

pub fn build(layout: &str, mesh: &str, devices: usize) -> Build {
    let config = Config {
        layout: layout.into(),
        mesh: Some(ltx2::config::parse_mesh(mesh).expect("a mesh")),
        ..Config::default()
    };
    let layout = config.placement(devices).expect("a layout");
    Build { layout, lowering: lowering_of("cpu"), ..Build::new(DType::F32) }
}

fn run(client: &Client, component: ProgramKind, case: &Case, build: &Build) -> BTreeMap<String, Tensor> {
    run_case(client, component, case, case.inputs.clone(), quick(), build)
}

/// Compares each layout on one of the cases, in turn; in the full test on all.
fn agree(component: ProgramKind, folder: &str, names: &[&str], layouts: impl Fn(&str) -> bool) {
    let client = cpu(8);
    let all = cases(folder);
    let chosen: Vec<&Case> =
        names.iter().filter_map(|n| all.iter().find(|c| c.name.ends_with(&format!("/{n}")))).collect();
    assert_eq!(chosen.len(), names.len(), "{names:?}");
    for (turn, case) in chosen.iter().enumerate() {
        let whole = run(&client, component, case, &build("replicated", "data=1", 1));
        for (n, (layout, mesh)) in layouts_on_meshes().into_iter().enumerate() {
            if (n % chosen.len() != turn || !layouts(&format!("{layout} {mesh}"))) && !full() {
                continue;
            }
            let got = run(&client, component, case, &build(layout, mesh, 8));
            for (name, want) in &whole {
                let distance = relative_l2(&got[name], want);
                eprintln!("{} {layout} {mesh} {name}: {distance:.1e}", case.name);
                assert!(distance <= limit(layout), "{} {layout} {mesh} {name}: {distance:e}", case.name);
            }
        }
    }
}

#[needs(cpu)]
fn sharded_transformer_matches_single_device() {
    let names = ["tiny_a_batch_masked", "tiny_b_per_token_masked"];
    // `newer_layouts` runs a denoising loop on every layout.
    let chosen = ["cfg cfg=2", "tensor cfg=2,context=2,tensor=2", "hybrid context=8"];
    agree(ProgramKind::Transformer, "transformer", &names, |layout| chosen.contains(&layout));
}

/// Runs the CUDA lowering with its attention collectives. In f32, XLA computes attention instead of cuDNN.
#[needs(cpu)]
fn sharded_cuda_lowering_matches_single_device() {
    let client = cpu(8);
    let all = cases("transformer");
    let case = all.iter().find(|c| c.name.ends_with("/tiny_b_per_token_masked")).expect("a case");
    let whole = run(&client, ProgramKind::Transformer, case, &build("replicated", "data=1", 1));
    let layouts = [("ulysses", "context=4"), ("tensor", "tensor=2"), ("sequence", "context=2"), ("cfg", "cfg=2")];
    for (layout, mesh) in layouts.into_iter().take(if full() { 4 } else { 1 }) {
        let lowering = Lowering { mixed_precision_dot: false, ..lowering_of("cuda") };
        let how = Build { lowering, ..build(layout, mesh, 8) };
        let got = run(&client, ProgramKind::Transformer, case, &how);
        for (name, want) in &whole {
            let distance = relative_l2(&got[name], want);
            eprintln!("{layout} {mesh} {name}: {distance:.1e}");
            assert!(distance <= 1e-5, "{layout} {mesh} {name}: {distance:e}");
        }
    }
}

/// Layouts on meshes that shard text in another way than the others. Both text programs run on the first two in the full
/// test.
const FOR_TEXT: [&str; 3] =
    ["tensor cfg=2,context=2,tensor=2", "fsdp-ulysses fsdp=2,context=4", "cfg-ulysses-encoder cfg=2,context=4"];

#[needs(cpu)]
fn sharded_text_encoder_matches_single_device() {
    let names = ["tiny_a_pair", "tiny_b_short"];
    let names = &names[..if full() { 2 } else { 1 }];
    agree(ProgramKind::TextEncoder, "text-encoder", names, |layout| FOR_TEXT[..2].contains(&layout));
}

#[needs(cpu)]
fn sharded_connectors_match_single_device() {
    let names = ["tiny_a_mixed", "tiny_b_right"];
    let names = &names[..if full() { 2 } else { 1 }];
    agree(ProgramKind::Connectors, "connectors", names, |layout| FOR_TEXT[1..].contains(&layout));
}

/// Numbers of devices that divide neither the text tokens nor the connectors' registers.
const UNEVEN: [usize; 4] = [3, 5, 6, 7];

/// Compares a program on each number of devices along `context` with one device.
fn agree_on_uneven_contexts(component: ProgramKind, folder: &str, name: &str, contexts: &[usize]) {
    let client = cpu(8);
    let all = cases(folder);
    let case = all.iter().find(|c| c.name.ends_with(&format!("/{name}"))).expect("a case");
    let whole = run(&client, component, case, &build("replicated", "data=1", 1));
    for context in contexts {
        let got = run(&client, component, case, &build("ulysses", &format!("context={context}"), 8));
        for (tensor, want) in &whole {
            let distance = relative_l2(&got[tensor], want);
            eprintln!("{} context={context} {tensor}: {distance:.1e}", case.name);
            assert!(distance <= 1e-6, "{} context={context} {tensor}: {distance:e}", case.name);
        }
    }
}

#[needs(cpu, full)]
fn connectors_match_single_device_on_uneven_contexts() {
    agree_on_uneven_contexts(ProgramKind::Connectors, "connectors", "tiny_a_mixed", &UNEVEN);
}

#[needs(cpu, full)]
fn text_programs_match_single_device_on_uneven_contexts() {
    for name in ["tiny_a_mixed", "tiny_b_right"] {
        agree_on_uneven_contexts(ProgramKind::Connectors, "connectors", name, &UNEVEN);
    }
    for name in ["tiny_a_pair", "tiny_b_short"] {
        agree_on_uneven_contexts(ProgramKind::TextEncoder, "text-encoder", name, &UNEVEN);
    }
}

/// Each kind of context parallelism generates a complete video on a number of devices that does not evenly divide the
/// text tokens.
#[needs(cpu, full)]
fn videos_match_single_device_on_uneven_contexts() {
    let client = cpu(8);
    for case in cases("pipeline").iter().filter(|c| c.name.ends_with("b_plain") || c.name.ends_with("a_cfg")) {
        let run = |layout: &str, mesh: &str, devices: usize| {
            let mut runner = open(&client, case.model.to_str().expect("a path"), build(layout, mesh, devices));
            let request = request(case, &runner.model);
            generate(&mut runner, &request, &dumping(None))
        };
        let whole = run("replicated", "data=1", 1);
        for (layout, context) in [
            ("sequence", 3),
            ("ulysses", 5),
            ("ring", 6),
            ("ulysses", 7),
            ("hybrid", 6),
            ("fsdp-ulysses", 3),
            ("tensor", 3),
        ] {
            let got = run(layout, &format!("context={context}"), 8);
            for name in ["prompt_embeds", "latents.video", "latents.audio", "video", "audio"] {
                let distance = relative_l2(dumped(&got, name), dumped(&whole, name));
                eprintln!("{} {layout} context={context} {name}: {distance:.1e}", case.name);
                assert!(distance <= limit(layout), "{} {layout} context={context} {name}: {distance:e}", case.name);
            }
        }
    }
}

#[needs(cpu, full)]
fn layouts_match_single_device_end_to_end() {
    let client = cpu(8);
    let names = ["noise.video", "prompt_embeds", "latents.video", "latents.audio", "video", "audio"];
    let chosen = |c: &&Case| c.name.ends_with("b_plain") || c.name.ends_with("a_cfg");
    for case in cases("pipeline").iter().filter(chosen) {
        let run = |layout: &str, mesh: &str, devices: usize| {
            let mut runner = open(&client, case.model.to_str().expect("a path"), build(layout, mesh, devices));
            let request = request(case, &runner.model);
            generate(&mut runner, &request, &dumping(None))
        };
        let whole = run("replicated", "data=1", 1);
        // Without guidance, the devices of `cfg` shard video tokens.
        let layouts = [
            ("cfg", "cfg=2"),
            ("fsdp-ulysses", "cfg=4,context=2"),
            ("tensor", "cfg=2,context=2,tensor=2"),
            ("cfg-ulysses", "cfg=2,context=4"),
            ("tensor", "tensor=2"),
            ("tensor", "cfg=2,tensor=2"),
        ];
        for (layout, mesh) in layouts {
            let got = run(layout, mesh, 8);
            for name in names {
                let distance = relative_l2(dumped(&got, name), dumped(&whole, name));
                eprintln!("{} {layout} {mesh} {name}: {distance:.1e}", case.name);
                assert!(distance <= limit(layout), "{} {layout} {mesh} {name}: {distance:e}", case.name);
            }
        }
    }
}

/// Rules that shard heights and widths over up to eight devices, each with its mesh; the tiny frames seldom divide
/// evenly.
const SPATIAL_RULES: [(&str, &str); 4] = [
    ("width: [context]", "context=8"),
    ("height: [cfg]\n  width: [context]", "cfg=2,context=4"),
    ("height: [cfg, context]", "cfg=2,context=2"),
    ("batch: [data]\n  height: [context]\n  width: [cfg]", "data=2,cfg=2,context=2"),
];

/// Returns how much an ill-conditioned network amplifies rounding errors of its inputs on one device: the maximum of
/// six runs. Another order of summation causes such errors in every layer, and the order depends on the device's
/// instructions; two runs differ by two such errors.
fn shaken(
    client: &Client,
    component: ProgramKind,
    case: &Case,
    alone: &Build,
    whole: &BTreeMap<String, Tensor>,
) -> BTreeMap<String, f64> {
    let mut furthest = BTreeMap::new();
    for seed in 0..6u32 {
        let mut state = seed * 7919 + 1;
        let mut part = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            1.0 + ((state >> 16) as f32 / 32768.0 - 1.0) * 2.0 * f32::EPSILON
        };
        let mut shake = |t: &Tensor| Tensor::F32(t.to_f32().mapv(|v| v * part()));
        let inputs = case.inputs.iter().map(|(name, t)| (name.clone(), shake(t))).collect();
        let got = run_case(client, component, case, inputs, quick(), alone);
        for (tensor, want) in whole {
            let moved = relative_l2(&got[tensor], want);
            let most = furthest.entry(tensor.clone()).or_insert(0.0);
            *most = f64::max(*most, moved);
        }
    }
    furthest
}

/// Compares a video autoencoder under two spatial rules, each on one of `names`; in the full test under all rules and
/// shipped layouts on every case.
fn sharded_frames_agree(component: ProgramKind, folder: &str, names: [&str; 2]) {
    let client = cpu(8);
    let dir = tempfile::tempdir().expect("a folder");
    let mut builds = vec![
        ("sequence context=8".to_string(), build("sequence", "context=8", 8)),
        ("cfg-ulysses cfg=2,context=4".to_string(), build("cfg-ulysses", "cfg=2,context=4", 8)),
        ("fsdp-ulysses fsdp=2,context=4".to_string(), build("fsdp-ulysses", "fsdp=2,context=4", 8)),
    ];
    builds.truncate(if full() { 3 } else { 0 });
    for (i, (rules, mesh)) in SPATIAL_RULES.into_iter().enumerate().skip(if full() { 0 } else { 2 }) {
        let file = dir.path().join(format!("{i}.yml"));
        std::fs::write(&file, format!("mesh: {{context: 1}}\nrules:\n  {rules}\n")).expect("writes");
        let layout = file.to_str().expect("a path");
        builds.push((format!("{rules:?} {mesh}"), build(layout, mesh, devices_of(mesh))));
    }
    let mut all = cases(folder);
    all.retain(|case| full() || names.iter().any(|name| case.name.ends_with(&format!("/{name}"))));
    assert!(full() || all.len() == names.len(), "{names:?}");
    for (turn, case) in all.iter().enumerate() {
        let alone = build("replicated", "data=1", 1);
        let whole = run(&client, component, case, &alone);
        let badly = whole.keys().any(|tensor| case.rounding(tensor) > 0.0);
        let shaken = if badly { shaken(&client, component, case, &alone, &whole) } else { BTreeMap::new() };
        for (n, (name, build)) in builds.iter().enumerate() {
            if n % all.len() != turn && !full() {
                continue;
            }
            let got = run(&client, component, case, build);
            for (tensor, want) in &whole {
                let distance = relative_l2(&got[tensor], want);
                eprintln!("{} {name} {tensor}: {distance:.1e}", case.name);
                let limit = shaken.get(tensor).map_or(1e-5, |moved| (2.0 * moved).max(1e-5));
                assert!(distance <= limit, "{} {name} {tensor}: {distance:e}", case.name);
            }
        }
    }
}

#[needs(cpu)]
fn sharded_video_decoder_matches_single_device() {
    sharded_frames_agree(ProgramKind::VideoDecoder, "video-decoder", ["tiny_2_3", "tiny_b_batch"]);
}

#[needs(cpu)]
fn sharded_video_encoder_matches_single_device() {
    sharded_frames_agree(ProgramKind::VideoEncoder, "video-encoder", ["tiny_2_3_image", "tiny_b"]);
}
