//! Video generated for input audio, which stays unchanged and is written to the output. The video is compared with
//! Lightricks' pipeline in `official_steps`, and a single pass with its parts in `given_video`.

use std::path::Path;

use ltx2::config::Config;
use ltx2::hlo::DType;
use ltx2::media::read_sound;
use ltx2::pipeline::model::OpenModel;
use ltx2::request::Request;

use crate::layouts::{build, limit};
use crate::support::official::{cases_of, dumping_steps, open_with, request};
use crate::support::{Case, cpu, dumped, dumping, generate, needs, plain, relative_l2};

const SOUND: &str = "tests/fixtures/sounds/given.flac";

fn case(all: Vec<Case>) -> Case {
    all.into_iter().find(|case| case.name.ends_with("_audio")).expect("a case with a sound")
}

/// Returns the request of a single-pass configuration at the size of the case's first pass.
fn of_one_pass(model: &OpenModel) -> Request {
    let sound = format!("request.audio={{path: {SOUND}, start: 0.05}}");
    let set = [
        "pipeline=audio_to_video",
        &sound,
        "request.prompt=a red ball rolls",
        "request.negative_prompt=",
        "request.width=64",
        "request.height=32",
        "request.num_frames=9",
        "request.max_sequence_length=64",
        "sampler.steps=2",
        "runtime.dtype=f32",
    ];
    let config = Config::load("ltx2", set).expect("a configuration");
    let job = config.jobs().expect("a job").remove(0);
    model.request(&config, &job).expect("a request")
}

/// In `make test`, `cli sounds` compares the output of a single pass with the input.
#[needs(cpu, full)]
fn input_audio_is_unchanged_in_every_step_and_in_the_output() {
    let (all, mut runner) = cases_of(&cpu(8), "official", "tiny_a");
    let case = case(all);
    let request = request(&case, &runner.model);
    let made = generate(&mut runner, &request, &dumping_steps());
    let steps: Vec<_> = made.dump.iter().filter(|(name, _)| name.ends_with(".latents.audio")).collect();
    assert_eq!(steps.len(), 3 + 4 + 1, "steps of two passes, and the latents between them");
    for (name, latents) in steps {
        assert_eq!(latents, dumped(&made, "latents.audio"), "{name}");
    }
    let sound = read_sound(Path::new(SOUND), Path::new("ffmpeg"), None).expect("read").expect("a sound");
    assert_eq!((made.sample_rate, made.audio.dim()), (8000, (2, 3000)));
    assert_eq!(&made.audio, sound.span(0.05, 3000).samples());
}

#[needs(cpu)]
fn first_of_two_passes_equals_the_single_pass_request() {
    let (all, runner) = cases_of(&cpu(8), "official", "tiny_a");
    let request = request(&case(all), &runner.model);
    let one = of_one_pass(&runner.model);
    let same = Request {
        prompt: one.prompt.clone(),
        negative_prompt: one.negative_prompt.clone(),
        seed: one.seed,
        scales: one.scales,
        stg_blocks: one.stg_blocks.clone(),
        conditions: ltx2::av::Av { video: Vec::new(), ..request.conditions.clone() },
        ..request.passes().0
    };
    assert_eq!(one, same);
}

fn sharded(model: &str, layouts: &[(&str, &str)]) {
    let client = cpu(8);
    let (all, runner) = cases_of(&client, "official", model);
    let case = case(all);
    let request = request(&case, &runner.model);
    drop(runner);
    let run = |how| generate(&mut open_with(&client, &case, how), &request, &dumping(None));
    let whole = run(plain(DType::F32));
    for (layout, mesh) in layouts {
        let got = run(build(layout, mesh, 8));
        for name in ["latents.video", "latents.audio", "video"] {
            let distance = relative_l2(dumped(&got, name), dumped(&whole, name));
            eprintln!("{model} {layout} {mesh} {name}: {distance:.1e}");
            assert!(distance <= limit(layout), "{layout} {mesh} {name}: {distance:e}");
        }
        assert_eq!(got.audio, whole.audio);
    }
}

#[needs(cpu, full)]
fn ltx2_0_layouts_match_single_device_result() {
    let layouts = [
        ("cfg", "cfg=4"),
        ("fsdp-ulysses", "cfg=4,context=2"),
        ("tensor", "cfg=2,context=2,tensor=2"),
        ("ring", "context=2"),
    ];
    sharded("tiny_a", &layouts);
}

#[needs(cpu, full)]
fn ltx2_3_layouts_match_single_device_result() {
    sharded("tiny_2_3", &[("cfg-ulysses", "cfg=2,context=2"), ("tensor", "cfg=2,tensor=2"), ("ring", "context=2")]);
}
