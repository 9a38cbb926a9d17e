//! The complete pipeline compared with the reference, and its guarantees about programs, chunks and reproducibility.

use ltx2::request::Request;
use std::ops::ControlFlow;

use crate::support::{
    cases, cpu, dumped, dumping, full, generate, lowering_of, needs, open, plain, quick, request, thresholds,
};
use ltx2::analysis::Module;
use ltx2::av::Av;
use ltx2::hlo::DType;
use ltx2::models::transformer::TransformerConfig;
use ltx2::nn::Build;
use ltx2::pipeline::Phase;
use ltx2::runtime::Engine;
use ltx2::sampling::denoise::{DenoiseShape, denoise};
use ltx2::sampling::guidance::{Branch, GuidanceScales};
use ltx2::sampling::sigmas;
use ltx2::sampling::step_cache::StepCache;
use ltx2::tensor::Tensor;

/// Runs one case per kind of guidance and model generation in `make test`.
#[needs(cpu)]
fn every_pipeline_case_matches_reference() {
    let client = cpu(8);
    let some = ["pipeline/tiny_a_cfg", "pipeline/tiny_a_diffusers", "pipeline/tiny_2_3_guided"];
    for case in cases("pipeline").into_iter().filter(|case| full() || some.contains(&&*case.name)) {
        let mut runner = open(&client, case.model.to_str().expect("a path"), plain(DType::F32));
        let request = request(&case, &runner.model);
        let sigmas = Tensor::from(ndarray::Array1::from(request.sigmas.clone()));
        assert!(case.distance("sigmas", &sigmas) <= 1e-6, "{}: sigmas", case.name);
        let generated = generate(&mut runner, &request, &dumping(None));
        let limit = thresholds::row(&case.name).f32();
        for name in ["noise.video", "noise.audio"] {
            assert_eq!(dumped(&generated, name), &case.outputs[name], "{}: {name} is torch's, bit for bit", case.name);
        }
        for name in ["latents.video", "latents.audio", "video", "audio"] {
            case.within(name, dumped(&generated, name), limit);
        }
    }
}

#[needs(cpu, full)]
fn bf16_error_is_within_the_reference_spread() {
    let client = cpu(8);
    for case in cases("pipeline") {
        let mut runner = open(&client, case.model.to_str().expect("a path"), plain(DType::BF16));
        let request = request(&case, &runner.model);
        let generated = generate(&mut runner, &request, &dumping(None));
        let limit = thresholds::row(&case.name).bf16();
        for name in ["latents.video", "latents.audio", "video", "audio"] {
            let spread = case.number(&format!("bf16_spread.{name}")).expect("a spread");
            let distance = case.distance(name, dumped(&generated, name));
            eprintln!("{} {name}: {:.3} of {spread:.4}", case.name, distance / spread);
            assert!(distance <= limit * spread, "{} {name}: {distance} of {spread}", case.name);
        }
    }
}

#[needs(cpu)]
fn chunked_loop_is_bitwise_equal_and_compiles_once() {
    let client = cpu(8);
    let mut runner = open(&client, "tests/fixtures/models/tiny_a", plain(DType::F32));
    let case = &cases("pipeline")[0];
    let mut request = request(case, &runner.model);
    request.sigmas = sigmas::official(5, sigmas::OFFICIAL_TOKENS).expect("a schedule");
    let whole = generate(&mut runner, &request, &dumping(None));
    for chunk in [1, 2, 4] {
        let parts = generate(&mut runner, &request, &dumping(Some(chunk)));
        for ((name, a), (_, b)) in whole.dump.iter().zip(&parts.dump) {
            assert_eq!(a, b, "{name} in chunks of {chunk}");
        }
    }
    // Other steps, seed, prompt, scales and rate with the same shapes use the same programs.
    request.sigmas = sigmas::official(3, sigmas::OFFICIAL_TOKENS).expect("a schedule");
    request.seed = 77;
    request.prompt = "something else entirely".into();
    request.scales = Av { video: 2.5, audio: 6.0 }.map(|cfg| GuidanceScales { cfg, ..GuidanceScales::NEUTRAL });
    let other = generate(&mut runner, &request, &dumping(None));
    assert_ne!(dumped(&whole, "latents.video"), dumped(&other, "latents.video"));

    let statistics = runner.executor.engine().statistics();
    for (name, s) in &statistics {
        assert_eq!(s.compiles + s.cache_hits, 1, "{name}: {s:?}");
    }
    // Five requests, each with a positive and a negative prompt in one execution.
    assert_eq!(statistics["text_encoder"].executions, 5);
    assert_eq!(statistics["prepare"].executions, 5);
    assert_eq!(statistics["denoise"].executions, 1 + 5 + 3 + 2 + 1);
}

#[needs(cpu)]
fn changed_model_config_rebuilds_cached_networks() {
    let (client, model) = (cpu(8), "tests/fixtures/models/tiny_2_3");
    let mut runner = open(&client, model, plain(DType::F32));
    let case = cases("pipeline").into_iter().find(|c| c.name.ends_with("tiny_2_3_guided")).expect("a case");
    let request = request(&case, &runner.model);
    let sound = |runner: &mut _| dumped(&generate(runner, &request, &dumping(None)), "audio").clone();
    let by_diffusers = sound(&mut runner);
    runner.model.configs = runner.model.configs.with_vocoder_clamp(true);
    let by_lightricks = sound(&mut runner);
    let mut alone = open(&client, model, plain(DType::F32));
    alone.model.configs = alone.model.configs.with_vocoder_clamp(true);
    assert!(by_lightricks == sound(&mut alone), "a text that was kept is another model's");
    assert!(by_lightricks != by_diffusers, "the clamp changes what is heard");
}

/// A request must not resume from the saved state of another request's denoising loop.
#[needs(cpu)]
fn request_result_is_independent_of_previous_request() {
    let client = cpu(8);
    let model = "tests/fixtures/models/tiny_a";
    let mut runner = open(&client, model, plain(DType::F32));
    let all = cases("pipeline");
    let first = request(all.iter().find(|c| c.name.ends_with("/tiny_a_cfg")).expect("a case"), &runner.model);
    let sigmas = sigmas::official(3, sigmas::OFFICIAL_TOKENS).expect("a schedule");
    let scales = Av { video: 2.5, audio: 6.0 }.map(|cfg| GuidanceScales { cfg, ..GuidanceScales::NEUTRAL });
    let second = [
        Request { scales, ..first.clone() },
        Request { sigmas, ..first.clone() },
        Request { frame_rate: first.frame_rate * 1.01, ..first.clone() },
    ];
    generate(&mut runner, &first, &dumping(None));
    for second in second {
        let behind = generate(&mut runner, &second, &dumping(None));
        let mut runner = open(&client, model, plain(DType::F32));
        let alone = generate(&mut runner, &second, &dumping(None));
        for name in ["latents.video", "latents.audio"] {
            assert_eq!(dumped(&behind, name), dumped(&alone, name), "{name}");
        }
    }
}

#[needs(cpu)]
fn interrupt_stops_the_run_between_chunks() {
    let client = cpu(8);
    let mut runner = open(&client, "tests/fixtures/models/tiny_a", plain(DType::F32));
    let request = request(&cases("pipeline")[0], &runner.model);
    let mut watch = |_, done: usize, _| if done >= 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let e = runner.generate(&request, &dumping(Some(1)), &mut watch).err();
    assert_eq!(e.map(|e| e.to_string()).as_deref(), Some("interrupted after 2 of 3 steps; no video was written"));
}

#[needs(cpu)]
fn non_finite_latents_error_has_stream_and_step() {
    let client = cpu(8);
    let mut runner = open(&client, "tests/fixtures/models/tiny_a", plain(DType::F32));
    let mut request = request(&cases("pipeline")[0], &runner.model);
    // A step from noise level zero divides by it, and the steps after it start from invalid latents.
    request.sigmas = vec![1.0, 0.7, 0.4, 0.0, 0.0, 0.0];
    for chunk in [None, Some(1), Some(2), Some(3)] {
        let mut last = 0;
        let mut watch = |_, done: usize, _| {
            last = done;
            ControlFlow::Continue(())
        };
        let e = runner.generate(&request, &dumping(chunk), &mut watch).err();
        let said = "the video latents after step 4 of 5 contain NaN or infinite values; run with --dtype f32";
        assert_eq!(e.map(|e| e.to_string()).as_deref(), Some(said), "chunks of {chunk:?}");
        assert!(last < 4, "{chunk:?}: the run ends at step 4");
    }
    // The state of the step cache before a call is gone, so the error has the steps of the call.
    request.cache = Some(StepCache::Steps(vec![1]));
    for (chunk, steps) in [(None, "one of the steps 1 to 5"), (Some(1), "step 4"), (Some(3), "one of the steps 4 to 5")]
    {
        let e = runner.generate(&request, &dumping(chunk), &mut |_, _, _| ControlFlow::Continue(())).err();
        let said = format!("the video latents after {steps} of 5 contain NaN or infinite values; run with --dtype f32");
        assert_eq!(e.map(|e| e.to_string()), Some(said), "chunks of {chunk:?}");
    }
    // Skipped steps do not count in the time of a step, from which the server derives the number of steps per call.
    request.sigmas = vec![1.0, 0.7, 0.4, 0.2, 0.1, 0.0];
    request.cache = Some(StepCache::Steps(vec![1, 2, 4]));
    let generated = generate(&mut runner, &request, &dumping(Some(2)));
    assert_eq!((generated.steps, generated.computed_steps), (5, 2));
    let denoising = generated.timings.iter().find(|took| took.phase == Phase::Denoise).expect("a time").total;
    assert_eq!(generated.step_time(), Some(denoising / 2));
}

#[needs(cpu)]
fn denoising_program_has_step_and_layer_loops() {
    let client = cpu(8);
    let config = std::fs::read_to_string("tests/fixtures/models/tiny_b/transformer/config.json").expect("a file");
    let c = TransformerConfig::from_json(&serde_json::from_str(&config).expect("JSON")).expect("valid");
    let build = Build { lowering: lowering_of("cpu"), ..Build::new(DType::F32) };
    let (tokens, channels) = (Av { video: 24, audio: 7 }, Av::both(c.caption_channels));
    let shape = DenoiseShape::plain(vec![Branch::Conditional, Branch::Negative], tokens, 12, channels);
    let network = denoise(&c, &shape, &build).expect("builds");
    let engine = Engine::new(client, quick());
    let compiled = engine.compile("denoise", &network.program).expect("compiles");
    let program = compiled.compiled().optimized_program().expect("a program");
    let module = Module::decode(&program.format, &program.bytes).expect("a module");
    let loops = module.loops();
    assert_eq!(loops.len(), 1, "{loops:?}");
    assert_eq!(loops[0].inner.len(), 1, "{loops:?}");
    assert!(loops[0].inner[0].inner.is_empty(), "{loops:?}");
    let memory = compiled.compiled().memory().expect("figures");
    let latents = (24 * c.in_channels + 7 * c.audio_in_channels) as i64 * 4;
    assert!(memory.aliased >= latents, "the latents are donated: {memory:?}");
    assert!(memory.temporaries < network.parameter_bytes() as i64, "a second copy of the weights: {memory:?}");
}
