//! Chained clips: what a clip takes from the previous one, in one and in two passes.

use std::ops::ControlFlow;

use ltx2::Config;
use ltx2::pipeline::Generated;
use ltx2::pipeline::runner::Runner;
use ltx2::pipeline::stages::chain::ClipJoiner;
use ltx2::request::Request;
use ndarray::{Array5, Axis, Ix4, Ix5, Slice};

use crate::support::official::cases_of;
use crate::support::{cpu, dumped, dumping, full, generate, needs};

/// Clips of 17 frames with an overlap of 9: one latent of eight frames is carried over.
pub const CHAIN: [&str; 2] = ["request.chain={clip: 17, overlap: 9}", "request.num_frames=33"];

/// Returns the request of another pipeline's case as a chain of clips.
pub fn request(runner: &Runner, preset: &str, common: &serde_json::Value, more: &[&str]) -> Request {
    let keys = common.as_array().expect("settings").iter().map(|key| key.as_str().expect("a setting"));
    let keys = keys.filter(|key| !key.starts_with("pipeline=") && !key.starts_with("request.extend"));
    let config = Config::load(preset, keys.chain(["runtime.dtype=f32"]).chain(more.iter().copied())).expect("legal");
    runner.model.request(&config, &config.jobs().expect("a job").remove(0)).expect("legal")
}

/// Generates the clips of a request.
pub fn clips(runner: &mut Runner, request: &Request) -> Vec<Generated> {
    let mut clips = Vec::new();
    let mut each = |mut made: Vec<Generated>| {
        clips.push(made.remove(0));
        Ok(())
    };
    let requests = std::slice::from_ref(request);
    let mut go_on = |_, _, _| ControlFlow::Continue(());
    runner.generate_chain(requests, &dumping(None), &mut go_on, &mut each).expect("runs");
    clips
}

fn video(clip: &Generated, name: &str) -> Array5<f32> {
    dumped(clip, name).to_f32().into_dimensionality::<Ix5>().expect("five axes")
}

/// Checks that each clip's second latent equals the last one of the previous clip, bit for bit, and that its first one
/// is new.
fn goes_on(clips: &[Generated], names: [&str; 2]) {
    for pair in clips.windows(2) {
        let [before, own] = [&pair[0], &pair[1]].map(|clip| video(clip, names[0]));
        let latent = |all: &Array5<f32>, at: usize| all.index_axis(Axis(2), at).to_owned();
        assert_eq!(before.dim().2, 3);
        assert_eq!(latent(&own, 1), latent(&before, 2), "{}", names[0]);
        assert_ne!(latent(&own, 0), latent(&before, 1), "{}", names[0]);
        assert_ne!(latent(&own, 2), latent(&before, 2), "{}", names[0]);
        // 8 frames are 8.33 of the 18 audio latents, so the overlap starts at the eighth or ninth.
        let [before, own] = [&pair[0], &pair[1]]
            .map(|clip| dumped(clip, names[1]).to_f32().into_dimensionality::<Ix4>().expect("four axes"));
        let part = |all: &ndarray::Array4<f32>, from: usize, n: usize| {
            all.slice_axis(Axis(2), Slice::from(from..from + n)).to_owned()
        };
        let step = (8..=9).find(|step| part(&own, 1, 17 - step) == part(&before, step + 1, 17 - step));
        let step = step.unwrap_or_else(|| panic!("{}: carried", names[1]));
        assert_ne!(part(&own, 0, 1), part(&before, step, 1));
        assert_ne!(part(&own, 18 - step, 1), part(&before, 17, 1));
    }
}

#[needs(cpu)]
fn each_clip_continues_latents_of_previous_clip() {
    let (all, mut runner) = cases_of(&cpu(8), "given_video", "tiny_a");
    let common = &all.iter().find(|case| case.name.ends_with("_extend")).expect("a case").scalars["common"];
    let request = request(&runner, "ltx2", common, &CHAIN);
    let chain = request.chain.clone().expect("several clips");
    assert_eq!((chain.clips(), request.num_frames), (3, 17));
    let clips = clips(&mut runner, &request);
    assert_eq!(clips.len(), 3);
    goes_on(&clips, ["latents.video", "latents.audio"]);
    let noise: Vec<_> = clips.iter().map(|clip| video(clip, "noise.video")).collect();
    assert!(noise[0] != noise[1] && noise[1] != noise[2], "each clip has its own seed");
    assert_eq!([0, 1, 2].map(|at| request.of_clip(at).seed), [4, 1004, 2004]);

    // The first clip equals an unchained video with its seed: the inputs for known latents have no effect if nothing is
    // known.
    if full() {
        let alone = Request { chain: None, conditions: Default::default(), ..request.clone() };
        let alone = video(&generate(&mut runner, &alone, &dumping(None)), "latents.video");
        let off = (&alone - &video(&clips[0], "latents.video")).iter().fold(0.0f32, |most, v| most.max(v.abs()));
        assert!(off < 1e-5, "{off}");
    }

    let mut join = ClipJoiner::new(&chain, &runner.model, request.frame_rate);
    let rate = clips[0].sample_rate as f64;
    let pieces: Vec<_> = clips.into_iter().map(|clip| join.add(clip.frames, clip.audio)).collect();
    assert_eq!(pieces.iter().map(|piece| piece.frames.count()).collect::<Vec<_>>(), [8, 8, 17]);
    let samples: usize = pieces.iter().map(|piece| piece.sound.ncols()).sum();
    assert_eq!(samples, (33.0 / 24.0 * rate).round() as usize);
    // Generating a single clip rejects such a request.
    let why = runner.generate(&request, &Default::default(), &mut |_, _, _| ControlFlow::Continue(()));
    assert!(why.err().expect("refused").to_string().contains("request.chain: a video of several clips is written"));
}

/// The passes run at half and at full size; the output keeps the audio of the first pass.
#[needs(cpu, full)]
fn both_passes_continue_the_previous_clip() {
    let (all, mut runner) = cases_of(&cpu(8), "official", "tiny_a");
    let case = all.iter().find(|case| case.name.ends_with("two_stage")).expect("a case");
    let more = [&CHAIN[..], &["pipeline=two_stage", "sampler.steps=1", "two_stage.sigmas=[0.9, 0.5, 0.0]"]].concat();
    let request = request(&runner, case.scalars["preset"].as_str().expect("a preset"), &case.scalars["common"], &more);
    let clips = clips(&mut runner, &request);
    goes_on(&clips, ["stage_1.latents.video", "stage_1.latents.audio"]);
    goes_on(&clips, ["latents.video", "latents.audio"]);
}
