//! Weights in host memory: the same results as with all weights in device memory.

use crate::support::{cases, cpu, dumped, dumping, generate, lowering_of, needs, open, plain, relative_l2, request};
use ltx2::config::Config;
use ltx2::hlo::DType;
use ltx2::nn::{Build, Lowering, Streaming};
use ltx2::pipeline::plan::setup;

/// Runs a case with all weights in device memory, and with those of some transformer blocks in host memory, in layer
/// loops and unrolled. Both forms of layers have equal results except for rounding.
#[needs(cpu)]
fn streamed_weights_give_the_same_bits() {
    let client = cpu(1);
    let all = cases("pipeline");
    let case = all.iter().find(|c| c.name.ends_with("b_plain")).expect("a case");
    let run = |lowering: Lowering, resident: Option<usize>| {
        let streaming = resident.map(|resident| Streaming { component: "transformer", resident, min_bytes: 1 << 10 });
        let build = Build { lowering, streaming, ..plain(DType::F32) };
        let mut runner = open(&client, case.model.to_str().expect("a path"), build);
        let request = request(case, &runner.model);
        let generated = generate(&mut runner, &request, &dumping(None));
        (generated, runner.executor.parameter_bytes())
    };
    let mut forms = Vec::new();
    for (unroll_layers, form) in [(false, "loop"), (true, "unrolled")] {
        let lowering = Lowering { unroll_layers, ..lowering_of("cpu") };
        let config = Config::load("nano", [format!("runtime.layers={form}")]).expect("a configuration");
        assert_eq!(setup::build(&config, 1, "cpu", "").expect("a build").lowering, lowering);
        let (whole, bytes) = run(lowering, None);
        for resident in if unroll_layers { 0..2 } else { 1..2 } {
            let (got, device_bytes) = run(lowering, Some(resident));
            assert!(device_bytes < bytes, "{device_bytes} of {bytes} bytes, {resident} blocks resident");
            for name in ["prompt_embeds", "latents.video", "latents.audio"] {
                let same = dumped(&got, name).bytes() == dumped(&whole, name).bytes();
                assert!(same, "{name} differs with {resident} resident blocks, unrolled: {unroll_layers}");
            }
        }
        forms.push(whole);
    }
    for name in ["prompt_embeds", "latents.video", "latents.audio"] {
        let distance = relative_l2(dumped(&forms[0], name), dumped(&forms[1], name));
        eprintln!("{name}: {distance:.1e} between a loop and unrolled layers");
        assert!(distance < 1e-5, "{name}: {distance} between a loop and unrolled layers");
    }
}

/// Moves the weights of unrolled layers to host memory and back, as memory plans for other requests do.
#[needs(cpu)]
fn loaded_weights_move_between_memories() {
    let client = cpu(1);
    let all = cases("pipeline");
    let case = all.iter().find(|c| c.name.ends_with("b_plain")).expect("a case");
    let build = Build { lowering: Lowering { unroll_layers: true, ..lowering_of("cpu") }, ..plain(DType::F32) };
    let mut runner = open(&client, case.model.to_str().expect("a path"), build);
    let request = request(case, &runner.model);
    let streaming = |resident| Some(Streaming { component: "transformer", resident, min_bytes: 1 << 10 });
    let mut run = |streaming| {
        runner.build.streaming = streaming;
        let generated = generate(&mut runner, &request, &dumping(None));
        let latents = dumped(&generated, "latents.video").bytes().to_vec();
        (latents, runner.executor.parameter_bytes())
    };
    let (whole, bytes) = run(None);
    let (latents, least) = run(streaming(0));
    assert_eq!(latents, whole);
    let (latents, some) = run(streaming(1));
    assert_eq!(latents, whole);
    assert!(least < some && some < bytes, "{least}, {some}, {bytes} bytes");
    let (latents, again) = run(None);
    assert_eq!((latents, again), (whole, bytes));
}
