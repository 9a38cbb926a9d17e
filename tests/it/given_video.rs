//! Passes with an input video, and audio-only generation, compared with Lightricks' pipelines, or with their parts
//! where there is no such pipeline (scripts/oracle/cases_given_video.py): every step with the presets' guidance, fixed
//! tokens bit for bit, and for some requests frames and samples. Without cached programs a test takes half a minute on
//! one core. What is fixed is an input of the program, so that retake and extend share programs.

use ltx2::Config;
use ltx2::hlo::DType;
use ltx2::media::{Audio, Clip, Frames, write_png_frames};
use ltx2::models::audio_vae::resample;
use ltx2::pipeline::model::OpenModel;
use ltx2::request::{Request, Shared};
use ndarray::{Array2, Array4, Axis};

use crate::layouts::{build, limit};
use crate::support::official::{cases_of, dumping_steps, limit_of, open_with};
use crate::support::thresholds::row;
use crate::support::{Case, cpu, dumped, dumping, full, generate, needs, plain, relative_l2};

/// The generator's pattern: frames, and samples at 16 kHz.
pub fn clip() -> Clip {
    let frames = Array4::from_shape_fn((17, 64, 96, 3), |(f, y, x, c)| ((f * 11 + y * 5 + x * 3 + c * 40) % 256) as u8);
    let sample = |(c, n): (usize, usize)| (((n * 7919 + c * 104_729) % 2001) as f32 - 1000.0) / 4000.0;
    let sound = Audio::new(Array2::from_shape_fn((2, 11333), sample), 16000).expect("stereo");
    Clip { frames: Frames::new(frames).expect("frames"), sound: Some(sound) }
}

/// Returns the request of a case with that pattern as its video.
pub fn request(case: &Case, model: &OpenModel, clip: &Shared<Clip>, more: &[&str]) -> Request {
    let folder = tempfile::tempdir().expect("a folder");
    write_png_frames(folder.path(), &clip.frames).expect("written");
    let keys = case.scalars["common"].as_array().expect("settings").iter();
    let mut keys: Vec<String> = keys.map(|key| key.as_str().expect("a setting").to_string()).collect();
    keys.push("runtime.dtype=f32".into());
    keys.extend(more.iter().map(|key| (*key).to_string()));
    if !["text_to_audio", "audio_to_video"].iter().any(|name| case.name.ends_with(name)) {
        keys.push(format!("request.video={}", folder.path().display()));
    }
    let config = Config::load(case.scalars["preset"].as_str().expect("a preset"), keys);
    let config = config.unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let job = config.jobs().expect("a job").remove(0);
    let request = model.request(&config, &job).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    Request { clip: Some(clip.clone()), ..request }
}

fn agrees(component: &str, model: &str, names: &[&str]) {
    let (mut all, mut runner) = cases_of(&cpu(8), component, model);
    let named = |case: &Case| names.iter().any(|name| case.name.ends_with(&format!("/{model}_{name}")));
    all.retain(|case| full() || named(case));
    assert_eq!(all.len(), if full() { files(component) } else { names.len() });
    // The reference samples come from diffusers' vocoder.
    runner.model.configs = runner.model.configs.with_vocoder_clamp(false);
    let clip = Shared::from(clip());
    let mut largest = (0.0, String::new());
    for case in &all {
        let (request, limit) = (request(case, &runner.model, &clip, &[]), row(&case.name).f32());
        let made = generate(&mut runner, &request, &dumping_steps());
        for name in case.outputs.keys().filter(|name| !name.starts_with("mask.")) {
            let name = name.trim_end_matches(".strided");
            let distance = case.within(name, dumped(&made, name), limit_of(name, limit));
            if distance > largest.0 {
                largest = (distance, format!("{} {name}", case.name));
            }
        }
        for stream in ["video", "audio"] {
            let Some(mask) = case.outputs.get(&format!("mask.{stream}")) else { continue };
            // Latents `[1, c, …]` as one row per token.
            let step = |n: usize| {
                let latents = dumped(&made, &format!("step_{n}.latents.{stream}")).to_f32();
                let mut latents = latents.index_axis_move(Axis(0), 0);
                if stream == "audio" {
                    latents.swap_axes(0, 1);
                    return latents.as_standard_layout().into_owned();
                }
                let rest = latents.len() / latents.shape()[0];
                let flat = latents.to_shape([latents.shape()[0], rest]).expect("flat").reversed_axes();
                flat.as_standard_layout().into_owned().into_dyn()
            };
            let (first, last) = (step(0), step(3));
            for (n, mask) in mask.to_f32().iter().enumerate() {
                let stays = first.index_axis(Axis(0), n) == last.index_axis(Axis(0), n);
                assert_eq!(stays, *mask == 0.0, "{} {stream}: token {n}", case.name);
            }
        }
    }
    eprintln!("{component} {model}: at most {:.1e}, {}", largest.0, largest.1);
}

/// Number of cases per model.
fn files(component: &str) -> usize {
    if component == "given_video" { 12 } else { 4 }
}

/// Cases of `make test`: requests of one size that partly regenerate both streams share their programs.
const CASES: [&str; 4] = ["extend_before", "inpaint", "retake", "video_to_audio"];

#[needs(cpu, full)]
fn ltx2_0_steps_match_lightricks_package_1_2() {
    agrees("given_video", "tiny_a", &[]);
}

#[needs(cpu)]
fn ltx2_3_steps_match_lightricks_package_1_2() {
    agrees("given_video", "tiny_2_3", &CASES);
}

#[needs(cpu, full)]
fn ltx2_0_steps_match_lightricks_package_1_0() {
    agrees("given_video_1_0", "tiny_a", &[]);
}

#[needs(cpu, full)]
fn ltx2_3_steps_match_lightricks_package_1_0() {
    agrees("given_video_1_0", "tiny_2_3", &[]);
}

fn sharded(model: &str, names: &[&str], layouts: &[(&str, &str)]) {
    let client = cpu(8);
    let (all, runner) = cases_of(&client, "given_video", model);
    let clip = Shared::from(clip());
    let named = |name: &str| all.iter().find(|case| case.name.ends_with(&format!("_{name}"))).expect("a case");
    let requests: Vec<_> = names.iter().map(|name| (*name, request(named(name), &runner.model, &clip, &[]))).collect();
    drop(runner);
    let run = |how| {
        let mut runner = open_with(&client, &all[0], how);
        requests.iter().map(|(_, request)| generate(&mut runner, request, &dumping(None))).collect::<Vec<_>>()
    };
    let whole = run(plain(DType::F32));
    for (layout, mesh) in layouts {
        for (((name, _), got), want) in requests.iter().zip(run(build(layout, mesh, 8))).zip(&whole) {
            for tensor in ["latents.video", "latents.audio", "audio"] {
                // There is no generated video to compare.
                if tensor == "latents.video" && ["text_to_audio", "video_to_audio"].contains(name) {
                    continue;
                }
                let distance = relative_l2(dumped(&got, tensor), dumped(want, tensor));
                eprintln!("{model} {layout} {mesh} {name} {tensor}: {distance:.1e}");
                assert!(distance <= limit(layout), "{layout} {mesh} {name} {tensor}: {distance:e}");
            }
            assert_eq!(got.frames.count(), want.frames.count(), "{layout} {mesh} {name}");
        }
    }
}

/// Covers time spans, overlaps at either end, fixed streams and audio-only requests, with all four guidance branches.
/// Tokens are sharded evenly and unevenly, and heads and branches are sharded. Requests of one size share all programs
/// of a layout except the loop.
#[needs(cpu, full)]
fn ltx2_3_layouts_match_single_device_result() {
    let names = ["retake", "extend", "extend_before", "video_to_audio", "text_to_audio"];
    let layouts = [
        ("cfg", "cfg=4"),
        ("sequence", "context=4"),
        ("hybrid", "cfg=2,context=4"),
        ("fsdp-ulysses", "cfg=2,context=2"),
        ("tensor", "cfg=2,context=2,tensor=2"),
        ("ring", "context=4"),
    ];
    sharded("tiny_2_3", &names, &layouts);
}

#[needs(cpu, full)]
fn ltx2_0_layouts_match_single_device_result() {
    let layouts = [("cfg-ulysses", "cfg=2,context=2"), ("tensor", "cfg=2,tensor=2"), ("ring", "context=2")];
    sharded("tiny_a", &["retake", "retake_video", "extend"], &layouts);
}

/// Extends a video, generates new audio for a video, and regenerates a time span.
#[needs(cpu)]
fn output_contains_the_source_frames_and_audio() {
    let (all, mut runner) = cases_of(&cpu(8), "given_video", "tiny_2_3");
    // As in the other tests, for their vocoder program.
    runner.model.configs = runner.model.configs.with_vocoder_clamp(false);
    let clip = Shared::from(clip());
    let of = |name: &str| all.iter().find(|case| case.name.ends_with(name)).expect("a case");
    let request = |name: &str, more: &[&str]| request(of(name), &runner.model, &clip, more);
    let (extend, sound) = (request("_extend", &[]), request("_video_to_audio", &[]));
    let span = ["request.retake.from=0.1", "request.retake.to=0.3"];
    let retakes =
        [request("_retake", &span), request("_retake", &[&span[..], &["request.retake.kept=source"]].concat())];
    let made = generate(&mut runner, &extend, &dumping(None));
    assert_eq!((extend.num_frames, made.frames.count()), (17, 17 + 8));
    assert_eq!(made.frames.part(0..17), clip.frames);
    let seconds = made.audio.ncols() as f64 / made.sample_rate as f64;
    assert!((seconds - 25.0 / 24.0).abs() < 1e-3, "{seconds}");
    let made = generate(&mut runner, &sound, &dumping(None));
    assert_eq!(made.frames, clip.frames);
    assert!(made.audio.iter().any(|sample| *sample != 0.0));

    // Frames 1 to 8 and the audio from 0.09 to 0.33 s are regenerated.
    let [decoded, source] = retakes.map(|retake| generate(&mut runner, &retake, &dumping(None)));
    assert_eq!((source.frames.count(), source.audio.dim()), (17, decoded.audio.dim()));
    for (frames, anew) in [(0..1, false), (1..9, true), (9..17, false)] {
        let [from_file, from_latents] = [&clip.frames, &decoded.frames].map(|all| all.part(frames.clone()));
        assert!(from_file != from_latents, "{frames:?}: the decoder loses something");
        assert_eq!(source.frames.part(frames.clone()) == from_file, !anew, "{frames:?}");
        assert_eq!(source.frames.part(frames.clone()) == from_latents, anew, "{frames:?}");
    }
    let own = clip.sound.as_ref().expect("a sound").with_channels(2);
    let own = resample(own.samples().view(), own.rate(), source.sample_rate as u32);
    let rate = source.sample_rate as f64;
    for ((channel, n), sample) in source.audio.indexed_iter() {
        let (given, made) = (own.get((channel, n)).copied().unwrap_or_default(), decoded.audio[(channel, n)]);
        match n as f64 / rate {
            at if !(0.07..0.35).contains(&at) => assert_eq!(*sample, given, "{at} s is the source's"),
            at if (0.0901..0.3299).contains(&at) => assert_eq!(*sample, made, "{at} s is regenerated"),
            at => assert!((given.min(made)..=given.max(made)).contains(sample), "{at} s is between both"),
        }
    }
}
