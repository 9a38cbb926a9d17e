//! The trained toy model follows its prompts: clips of held-out prompts (scripts/nano/prompts.py) are scored by their
//! frames and sound.

mod conditions;
mod previews;

use ltx2::request::Request;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::support::{self, full, needs};
use ltx2::av::Av;
use ltx2::config::{CliOverrides, load};
use ltx2::media::read_png;
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::plan::run_plan::RunPlan;
use ltx2::pipeline::plan::videos::Job;
use ltx2::pipeline::session::Session;
use ltx2::pipeline::stages::text_to_video::Generated;
use ltx2::quality::toy::{PromptScores, ToyPrompt, see};
use ltx2::sampling::guidance::GuidanceScales;
use ltx2::tensor::Tensor;
use ltx2::weights::Checkpoint;
use ndarray::{Axis, Slice};

fn prompts() -> Vec<ToyPrompt> {
    let text = std::fs::read_to_string("tests/fixtures/nano/prompts.json").expect("a file");
    serde_json::from_str(&text).expect("prompts")
}

/// Session of a shipped configuration, which compiles its programs once for all clips.
struct ClipSession {
    session: Session,
    /// Lets one test run at a time: each uses all cores, and later ones reuse the compiled programs.
    _turn: MutexGuard<'static, ()>,
}

impl ClipSession {
    fn open(config: &str, set: &[&str]) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let cache = format!("runtime.compile_cache={}", support::programs().display());
        // Optimized programs pay off only for many clips.
        let level = format!("runtime.xla_flags.xla_backend_optimization_level={}", u8::from(full()));
        let set = [&["runtime.platform=cpu", &level, &cache], set].concat();
        let set = set.into_iter().map(String::from).collect();
        let given = CliOverrides { files: vec![format!("configs/{config}.yml")], set, ..CliOverrides::default() };
        let config = load(&given).expect("a configuration").config;
        let model = OpenModel::from_config(&config).expect("the model of assets/nano");
        let plan = RunPlan::of_model(&config, &model).expect("a plan");
        let session = Session::start(plan, model, None).expect("a session");
        ClipSession { session, _turn: turn }
    }

    fn request(&self, prompt: &str, seed: u64) -> Request {
        let job = Job { index: 0, prompt: prompt.into(), seed };
        self.session.runner.model.request(&self.session.plan.config, &job).expect("a request")
    }

    fn make(&mut self, request: &Request) -> Generated {
        support::generate(&mut self.session.runner, request, &support::dumping(None))
    }

    /// Generates a clip for each prompt, with the request modified by `change`, and scores it.
    fn score(&mut self, prompts: &[ToyPrompt], change: impl Fn(&mut Request)) -> Score {
        let mut score = Score::default();
        for (index, wanted) in prompts.iter().enumerate() {
            let mut request = self.request(&wanted.prompt, 100 + index as u64);
            change(&mut request);
            let made = self.make(&request);
            score.judge(wanted, &made);
        }
        score
    }
}

/// Prompt scores, printed and compared with the minimum scores.
#[derive(Default)]
struct Score(PromptScores);

impl Score {
    fn judge(&mut self, wanted: &ToyPrompt, made: &Generated) {
        if let Some(found) = self.0.judge(wanted, &made.frames, &made.audio, made.sample_rate) {
            eprintln!("not as asked: {}: {found}", wanted.prompt);
        }
    }

    fn share(&self, what: &str) -> f64 {
        self.0.share(what)
    }

    fn tell(&self, of: &str) {
        let shares = self.0.0.iter().map(|(what, (good, all))| format!("{what} {good}/{all}"));
        eprintln!("{of}: {}", shares.collect::<Vec<_>>().join(", "));
    }

    fn assert_minimum_scores(&self) {
        for (what, least) in [("colour", 0.95), ("direction", 0.90), ("pitch", 0.85), ("beep", 0.80)] {
            assert!(self.share(what) >= least, "{what}: {:?} of {least}", self.0.0[what]);
        }
    }
}

#[needs(cpu, full)]
fn all_clips_follow_their_prompts() {
    let mut studio = ClipSession::open("nano", &[]);
    let prompts = prompts();
    assert!(prompts.len() >= 60);
    let score = studio.score(&prompts, |_| ());
    score.tell("all held-out prompts");
    score.assert_minimum_scores();
}

/// Runs transformer blocks with int8 weights, without and with int8 activations, on all prompts, and compares the
/// scores with those of bf16.
#[needs(cpu, full)]
fn int8_clips_follow_their_prompts() {
    let prompts = prompts();
    let of = |what: &str, set: &[&str]| {
        let score = ClipSession::open("nano", &[&["runtime.dtype=bf16"], set].concat()).score(&prompts, |_| ());
        score.tell(what);
        score
    };
    let bf16 = of("bf16", &[]);
    for activations in ["bf16", "int8"] {
        let set = ["runtime.weights=int8".to_string(), format!("runtime.activations={activations}")];
        let int8 = of(&format!("int8, activations {activations}"), &set.each_ref().map(String::as_str));
        for what in ["colour", "direction", "pitch", "beep"] {
            let behind = bf16.share(what) - int8.share(what);
            assert!(behind <= 0.02, "{what}, activations {activations}: {:?} of {:?}", int8.0.0[what], bf16.0.0[what]);
        }
    }
}

/// Two steps need guidance, although twenty do not. Without a prompt, results are correct only by chance.
#[needs(cpu, full)]
fn clips_are_worse_without_guidance_or_prompt() {
    let mut studio = ClipSession::open("nano", &["sampler.steps=2"]);
    let prompts = prompts();
    let mut at = |what: &str, prompts: &[ToyPrompt], cfg: f32| {
        let score = studio.score(prompts, |r| r.scales = Av::both(GuidanceScales { cfg, ..GuidanceScales::NEUTRAL }));
        score.tell(what);
        score
    };
    let with = at("2 steps, guidance 3", &prompts, 3.0);
    let without = at("2 steps, no guidance", &prompts, 1.0);
    let unheard = at("2 steps, the prompt left out", &prompts[..16], 0.0);
    for what in ["colour", "direction", "all"] {
        assert!(without.share(what) < with.share(what), "{what}: {:?} of {:?}", without.0.0[what], with.0.0[what]);
    }
    let wrong = |score: &Score| score.0.0.values().map(|(good, all)| all - good).sum::<usize>() as f64;
    assert!(wrong(&without) >= 1.25 * wrong(&with), "{} wrong without, {} with", wrong(&without), wrong(&with));
    assert!(unheard.share("all") <= 0.125, "{:?} right with nothing asked for", unheard.0.0["all"]);
}

/// Returns the PSNR in dB of values in 0..1.
fn psnr(got: &Tensor, want: &Tensor) -> f64 {
    assert_eq!(got.shape(), want.shape());
    let (got, want) = (got.to_f32(), want.to_f32());
    let square = got.iter().zip(&want).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / got.len() as f64;
    -10.0 * square.max(1e-20).log10()
}

/// Compares with diffusers' frames and samples (stored as f16) of the first prompt, from the same weights and noise
/// (scripts/nano/parity.py).
#[needs(cpu)]
fn frames_and_samples_match_diffusers() {
    let dir = tempfile::tempdir().expect("a folder");
    let unpacked = dir.path().join("reference.safetensors");
    let packed = std::fs::File::open("tests/fixtures/nano/reference.safetensors.gz").expect("a fixture");
    let mut target = std::fs::File::create(&unpacked).expect("a file");
    std::io::copy(&mut flate2::read::GzDecoder::new(packed), &mut target).expect("unpacked");
    let reference = Checkpoint::open(&unpacked).expect("a checkpoint");
    let wanted = |name: &str| reference.get(name).and_then(|view| view.to_tensor()).expect("a tensor");
    let least = support::thresholds::row("nano/reference").psnr.expect("decibels");
    for (dtype, least) in ["f32", "bf16"].into_iter().zip(least).take(if full() { 2 } else { 1 }) {
        let mut studio = ClipSession::open("nano", &[&format!("runtime.dtype={dtype}")]);
        let made = studio.make(&studio.request(&prompts()[0].prompt, 10));
        let video = support::dumped(&made, "video").to_f32();
        let sixth = Tensor::F32(video.slice_axis(Axis(1), Slice::from(..).step_by(6)).to_owned());
        let pairs = [("video", &sixth), ("audio", support::dumped(&made, "audio"))];
        for (name, got) in pairs {
            let near = psnr(got, &wanted(name));
            eprintln!("{dtype} {name}: {near:.1} dB");
            assert!(near >= least, "{dtype} {name}: {near} dB of {least}");
        }
    }
}

/// The first frame is the conditioning image; its motion follows the prompt.
#[needs(cpu, full)]
fn conditioning_image_moves_as_prompted() {
    let image = "request.images=[{path: tests/fixtures/nano/first.png, frame: 0, strength: 1.0, crf: 0}]";
    let mut studio = ClipSession::open("nano", &["pipeline=image_to_video", image]);
    let given = read_png(Path::new("tests/fixtures/nano/first.png")).expect("an image").to_video();
    let asked = [("fade", "a medium cyan circle fades away on purple, silent"), ("right", &*prompts()[1].prompt)];
    for (motion, prompt) in asked {
        let made = studio.make(&studio.request(prompt, 10));
        let first = made.frames.to_video().index_axis(Axis(0), 0).to_owned();
        let kept = psnr(&Tensor::from(first), &Tensor::from(given.index_axis(Axis(0), 0).to_owned()));
        let seen = see(&made.frames);
        eprintln!("{motion}: first frame {kept:.1} dB, {seen:?}");
        assert!(kept >= 28.0, "{motion}: the first frame is {kept} dB from what was given");
        assert_eq!((seen.colour, seen.motion), ("cyan", motion));
    }
}

/// The second stage, with four times the pixels, preserves what the first one generated.
#[needs(cpu, full)]
fn two_stage_clips_follow_their_prompts() {
    let mut studio = ClipSession::open("nano_two_stage", &[]);
    let score = studio.score(&prompts()[3..5], |_| ());
    score.tell("two stages");
    assert_eq!(score.share("all"), 1.0);
}
