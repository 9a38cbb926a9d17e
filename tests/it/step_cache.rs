//! The step cache in the denoising loop, compared with a loop on the host that calls the program without a cache once
//! per step and applies the same policy.

use std::collections::BTreeMap;
use std::sync::Arc;

use ltx2::av::Av;
use ltx2::hlo::DType;
use ltx2::models::transformer::TransformerConfig;
use ltx2::nn::Build;
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pipeline::runner::Runner;
use ltx2::request::{Request, Shapes};
use ltx2::sampling::denoise::denoise;
use ltx2::sampling::step_cache::{SkipWindow, StepCache};
use ltx2::sampling::{CfgPlusPlus, EulerAncestral, StepDraws};
use ltx2::tensor::Tensor;
use ltx2::weights::{Component, ModelSource, Overrides};
use ndarray::{ArrayD, Axis, arr0};

use crate::layouts::build;
use crate::references::Patterns;
use crate::support::official::cases_of;
use crate::support::passes::{Pass, scattered};
use crate::support::{cpu, full, needs, open, plain, relative_l2};

const MODEL: &str = "tests/fixtures/models/tiny_a";
const WINDOW: SkipWindow = SkipWindow { warmup_steps: 2, last_steps: 1, max_skips: 2 };

fn source() -> Arc<ModelSource> {
    Arc::new(ModelSource::open(MODEL, &Overrides::default()).expect("a model"))
}

/// An image in the first frame. Its tokens are a third of the video tokens of `Pass`. The program converts their velocity
/// with the step's noise level, so it differs from 0 although the tokens are known.
const IMAGE: [&str; 3] = [
    "pipeline=image_to_video",
    "request.images=[{path: tests/fixtures/images/shapes.png, frame: 0, strength: 1, crf: 0}]",
    "conditioning.clean_prediction=diffusers",
];

/// Returns a request with ten steps. `set`: further configuration.
fn request(model: &OpenModel, set: &[&str], cache: Option<StepCache>) -> Request {
    let base = ["sampler.steps=10", "guidance.audio.stg=0", "guidance.video.stg=0"];
    let size = ["request.width=64", "request.height=64", "request.num_frames=9", "request.max_sequence_length=64"];
    let config =
        ltx2::Config::load("ltx2", base.into_iter().chain(size).chain(set.iter().copied())).expect("a configuration");
    let made = model.request(&config, &config.jobs().expect("a job")[0]).expect("legal");
    Request { cache, ..made }
}

/// Conditioned tokens of a stream, from the fraction of a step's noise level that each token has.
#[derive(Default)]
struct Tokens {
    /// Weights of the tokens in norms. Empty: each counts fully.
    weights: Vec<f32>,
    /// Weights `[1, n, 1]` of clean latents and predictions in blended predictions of tokens that are partly known.
    blend: Option<[ArrayD<f32>; 2]>,
}

impl Tokens {
    fn new(fractions: &[f32]) -> Self {
        let partial: Vec<bool> = fractions.iter().map(|m| *m > 0.0 && *m < 1.0).collect();
        let column = |of: fn(f32) -> f32, other: f32| {
            let each = fractions.iter().zip(&partial).map(|(m, partial)| if *partial { of(*m) } else { other });
            ArrayD::from_shape_vec(vec![1, fractions.len(), 1], each.collect()).expect("a column")
        };
        let blend = partial.contains(&true).then(|| [column(|m| 1.0 - m, 0.0), column(|m| m, 1.0)]);
        Tokens { weights: fractions.to_vec(), blend }
    }

    /// Returns the same tokens, which all count fully in norms.
    fn unweighted(&self) -> Self {
        Tokens { weights: Vec::new(), blend: self.blend.clone() }
    }

    /// Returns the weighted L1 norm of a video's tokens.
    fn norm(&self, x: &ArrayD<f32>, video: usize) -> f64 {
        let own = x.index_axis(Axis(0), video);
        let weights = self.weights.iter().copied().chain(std::iter::repeat(1.0));
        let norms = own.outer_iter().map(|token| token.iter().map(|x| f64::from(x.abs())).sum::<f64>());
        norms.zip(weights).map(|(norm, weight)| norm * f64::from(weight)).sum()
    }

    /// Returns the velocity of the unblended prediction, given the one of a step from `x`. A known token keeps the
    /// latter, which leads straight to its clean latents.
    fn unblended(&self, velocity: ArrayD<f32>, x: &ArrayD<f32>, sigma: f32) -> ArrayD<f32> {
        let Some([kept, predicted]) = &self.blend else { return velocity };
        (velocity - kept * (x - clean(x)) / sigma) / predicted
    }

    /// Returns the velocity of a step from `x`, given the one of the unblended prediction.
    fn blended(&self, velocity: &ArrayD<f32>, x: &ArrayD<f32>, sigma: f32) -> ArrayD<f32> {
        let Some([kept, predicted]) = &self.blend else { return velocity.clone() };
        kept * (x - clean(x)) / sigma + predicted * velocity
    }
}

/// Returns the clean latents of [`Pass`] for video latents `x`.
fn clean(x: &ArrayD<f32>) -> ArrayD<f32> {
    scattered("clean.video", x.shape()).to_f32()
}

/// The latents of both streams after all steps, and the skipped steps.
struct Replayed {
    latents: Av<Tensor>,
    skipped: Vec<usize>,
    /// Predicted changes of the steps that may be skipped.
    predicted: Vec<f64>,
}

/// Runs the denoising loop on the host: one call of the program without a cache for each step that is not skipped.
/// `video`: the conditioned video tokens.
fn replay(
    pass: &Pass,
    executor: &mut Executor,
    prepared: &BTreeMap<String, Tensor>,
    request: &Request,
    cache: &StepCache,
    video: &Tokens,
) -> Replayed {
    let tokens = Av { video, audio: &Tokens::default() };
    let sigmas = &request.sigmas;
    let steps = sigmas.len() - 1;
    let schedule = cache.schedule(steps);
    let mut latents: Option<Av<ArrayD<f32>>> = None;
    // Latents and velocity at the last computed step, and the ratio of their changes for each video.
    let mut computed: Option<Av<[ArrayD<f32>; 2]>> = None;
    let mut ratios: Option<Av<Vec<f64>>> = None;
    let (mut skipped, mut predicted, mut in_a_row) = (Vec::new(), Vec::new(), 0);
    for step in 0..steps {
        let (sigma, length) = (sigmas[step], sigmas[step + 1] - sigmas[step]);
        let own = match (&latents, &computed, &ratios) {
            (Some(x), Some(at), Some(ratios)) if schedule[step] => {
                let changes = x.as_ref().zip(at.as_ref()).zip(ratios.as_ref().zip(tokens)).map(
                    |((x, [before, velocity]), (ratios, tokens))| {
                        let of = |(video, ratio): (usize, &f64)| {
                            ratio * tokens.norm(&(x - before), video) / tokens.norm(velocity, video)
                        };
                        ratios.iter().enumerate().map(of).fold(0.0, f64::max)
                    },
                );
                Some(changes.video.max(changes.audio))
            }
            _ => None,
        };
        predicted.extend(own);
        let skips = match cache {
            StepCache::Adaptive { threshold, window } => {
                own.is_some_and(|change| change < f64::from(*threshold)) && in_a_row < window.max_skips
            }
            _ => schedule[step],
        };
        in_a_row = if skips { in_a_row + 1 } else { 0 };
        if let (true, Some(x), Some(at)) = (skips, &latents, &computed) {
            skipped.push(step);
            let both = x.as_ref().zip(at.as_ref()).zip(tokens);
            latents = Some(both.map(|((x, [_, velocity]), tokens)| x + tokens.blended(velocity, x, sigma) * length));
            continue;
        }
        let mut known = prepared.clone();
        known.insert("begin".into(), arr0(step as i32).into());
        known.insert("end".into(), arr0(step as i32 + 1).into());
        for (name, x) in latents.iter().flat_map(|x| Av::NAMES.zip(x.as_ref())) {
            known.insert(format!("latents.{name}"), x.clone().into());
        }
        let mut made = pass.evaluated(executor, &plain(DType::F32), known);
        let next = Av::NAMES.map(|name| made.remove(&format!("latents.{name}")).expect("latents").to_f32());
        let shapes = next.as_ref().map(ArrayD::shape);
        let x = latents.unwrap_or_else(|| {
            Av::NAMES.zip(shapes).map(|(name, shape)| scattered(&format!("latents.{name}"), shape).to_f32())
        });
        let both = x.as_ref().zip(next.as_ref()).zip(tokens);
        let velocity = both.map(|((x, next), tokens)| tokens.unblended((next - x) / length, x, sigma));
        if let Some(at) = &computed {
            let both = x.as_ref().zip(velocity.as_ref()).zip(at.as_ref().zip(tokens));
            ratios = Some(both.map(|((x, velocity), ([before, old], tokens))| {
                let ratio = |video| tokens.norm(&(velocity - old), video) / tokens.norm(&(x - before), video);
                (0..x.shape()[0]).map(ratio).collect()
            }));
        }
        computed = Some(x.zip(velocity).map(|(x, velocity)| [x, velocity]));
        latents = Some(next);
    }
    let latents = latents.expect("a step").map(Tensor::from);
    Replayed { latents, skipped, predicted }
}

/// Returns the latents and the skipped steps of a run of the loop with a cache.
fn cached(
    pass: &Pass,
    executor: &mut Executor,
    build: &Build,
    prepared: &BTreeMap<String, Tensor>,
) -> (Av<Tensor>, Vec<usize>) {
    let mut made = pass.evaluated(executor, build, prepared.clone());
    let skips = made.remove("cache_skips").map(|table| table.to_f32()).unwrap_or_else(|| ArrayD::zeros(vec![0]));
    let skipped = skips.iter().enumerate().filter(|(_, in_a_row)| **in_a_row > 0.0).map(|(step, _)| step);
    (Av::NAMES.map(|name| made.remove(&format!("latents.{name}")).expect("latents")), skipped.collect())
}

fn assert_close(what: &str, got: &Av<Tensor>, want: &Av<Tensor>, limit: f64) {
    for ((stream, got), want) in Av::NAMES.zip(got.as_ref()).zip(want.as_ref()) {
        let distance = relative_l2(got, want);
        eprintln!("{what} {stream}: {distance:.1e}");
        assert!(distance <= limit, "{what} {stream}: {distance:e}");
    }
}

/// Both policies, with a negative branch that runs only at high noise levels: the loop skips the steps, and computes the
/// latents, that the host computes. With threshold 0, the result is bitwise that of the loop without a cache.
#[needs(cpu)]
fn cached_loop_matches_replay_on_the_host() {
    let source = source();
    let mut runner = open(&cpu(8), MODEL, plain(DType::F32));
    let by_sigma = ["guidance.video.cfg=3", "guidance.video.by_sigma=[{sigma: 1, cfg: 3}, {sigma: 0.8, cfg: 1}]"];
    let one = plain(DType::F32);
    let uncached = request(&runner.model, &by_sigma, None);
    let host = Pass::new(&source, &runner.model, &uncached);
    let prepared = host.prepared(&mut runner.executor, &one);
    let whole = host.denoised(&mut runner.executor, &one, prepared.clone());

    let fixed = StepCache::Steps(vec![2, 5, 6, 8]);
    let with_fixed = Request { cache: Some(fixed.clone()), ..uncached.clone() };
    let want = replay(&host, &mut runner.executor, &prepared, &uncached, &fixed, &Tokens::default());
    let pass = Pass::new(&source, &runner.model, &with_fixed);
    let (got, _) = cached(&pass, &mut runner.executor, &one, &prepared);
    assert_close("fixed", &got, &want.latents, 1e-6);
    assert!(relative_l2(&got.video, &whole.video) > 1e-4, "skipped steps change the result");

    for threshold in [0.0, 0.8, 2.0, 10.0] {
        let adaptive = StepCache::Adaptive { threshold, window: WINDOW };
        let with_adaptive = Request { cache: Some(adaptive.clone()), ..uncached.clone() };
        let want = replay(&host, &mut runner.executor, &prepared, &uncached, &adaptive, &Tokens::default());
        let pass = Pass::new(&source, &runner.model, &with_adaptive);
        let (got, skipped) = cached(&pass, &mut runner.executor, &one, &prepared);
        eprintln!("threshold {threshold}: skipped {skipped:?}, predicted {:.3?}", want.predicted);
        assert_eq!(skipped, want.skipped, "threshold {threshold}: predicted {:?}", want.predicted);
        assert_close("adaptive", &got, &want.latents, 2e-6);
        match threshold {
            0.0 => {
                assert!(skipped.is_empty());
                for (got, want) in got.into_iter().zip(whole.as_ref()) {
                    assert_eq!(&got, want, "threshold 0");
                }
            }
            10.0 => assert_eq!(skipped, [2, 3, 5, 6, 8], "at most two in a row, not the first two and the last step"),
            _ => {}
        }
    }
}

/// Compares the skipped steps and the latents of `videos` videos with the replay, in which conditioned tokens count by
/// their fraction of noise. At a further threshold, other steps would be skipped if they counted fully.
fn conditioned_tokens_count_by_their_noise(runner: &mut Runner, uncached: &Request, videos: usize, thresholds: &[f32]) {
    let (source, one) = (source(), plain(DType::F32));
    let host = Pass::of_batch(&source, &runner.model, uncached, videos);
    let prepared = host.prepared(&mut runner.executor, &one);
    let shapes = Shapes::from_request(&runner.model.sizes, uncached).expect("legal sizes");
    let tokens = Tokens::new(&host.noise_fractions(shapes.own_tokens().video));
    let adaptive = |threshold| StepCache::Adaptive { threshold, window: WINDOW };
    let both = [tokens.unweighted(), tokens];
    let replays = |runner: &mut Runner, threshold| {
        both.each_ref().map(|own| replay(&host, &mut runner.executor, &prepared, uncached, &adaptive(threshold), own))
    };
    // Thresholds between the predicted changes of steps.
    let mut changes: Vec<f64> = replays(runner, 0.0).into_iter().flat_map(|replayed| replayed.predicted).collect();
    changes.sort_by(f64::total_cmp);
    eprintln!("predicted changes: {changes:.3?}");
    let mut between = changes.windows(2).filter(|pair| pair[1] > 1.01 * pair[0]);
    let decisive = between.find_map(|pair| {
        let threshold = (pair[0] * pair[1]).sqrt() as f32;
        let [unweighted, weighted] = replays(runner, threshold).map(|replayed| replayed.skipped);
        (unweighted != weighted).then_some(threshold)
    });
    let decisive = decisive.expect("a threshold for which the tokens' noise matters");
    for &threshold in thresholds.iter().chain([&decisive]) {
        let [unweighted, want] = replays(runner, threshold);
        let with_adaptive = Request { cache: Some(adaptive(threshold)), ..uncached.clone() };
        let pass = Pass::of_batch(&source, &runner.model, &with_adaptive, videos);
        let (got, skipped) = cached(&pass, &mut runner.executor, &one, &prepared);
        eprintln!("threshold {threshold}: skipped {skipped:?}, if all tokens count {:?}", unweighted.skipped);
        eprintln!("predicted {:.3?}, if all tokens count {:.3?}", want.predicted, unweighted.predicted);
        assert_eq!(skipped, want.skipped, "threshold {threshold}: predicted {:?}", want.predicted);
        assert!(threshold != decisive || want.skipped != unweighted.skipped, "{skipped:?}");
        assert_close("conditioned", &got, &want.latents, 2e-6);
    }
}

/// An image whose strength is 1 or less. Two of the programs are those of `layouts_skip_the_same_steps_as_one_device`; the
/// strength is an input.
#[needs(cpu)]
fn image_tokens_count_by_their_noise() {
    let mut runner = open(&cpu(8), MODEL, plain(DType::F32));
    let all = [(1.0, &[0.5, 0.7, 0.9, 1.2][..]), (0.6, &[0.7, 0.9])];
    for (strength, thresholds) in all {
        let image = IMAGE.map(|set| set.replace("strength: 1", &format!("strength: {strength}")));
        let set: Vec<&str> = image.iter().map(String::as_str).chain(["guidance.video.cfg=3"]).collect();
        let uncached = request(&runner.model, &set, None);
        conditioned_tokens_count_by_their_noise(&mut runner, &uncached, 2, thresholds);
    }
}

/// The tokens of a reference video, which follow those of the video.
#[needs(cpu, full)]
fn reference_tokens_count_by_their_noise() {
    let (all, mut runner) = cases_of(&cpu(8), "references", "tiny_a");
    let case = all.iter().find(|case| case.name.ends_with("half")).expect("a case");
    let config = Patterns::new().config(case);
    let first = runner.model.request(&config, &config.jobs().expect("a job")[0]).expect("a request").passes().0;
    let shapes = Shapes::from_request(&runner.model.sizes, &first).expect("legal sizes");
    assert!(shapes.appended.video > 0);
    for strength in [1.0, 0.8] {
        let mut uncached = first.clone();
        uncached.conditions.video.iter_mut().for_each(|condition| condition.strength = strength);
        conditioned_tokens_count_by_their_noise(&mut runner, &uncached, 1, &[]);
    }
}

/// Devices that share a batch of two videos with a conditioning image skip the same steps as one device, also where a
/// video is split over devices.
#[needs(cpu)]
fn layouts_skip_the_same_steps_as_one_device() {
    let source = source();
    let mut runner = open(&cpu(8), MODEL, plain(DType::F32));
    let cache = StepCache::Adaptive { threshold: 0.9, window: WINDOW };
    let request = request(&runner.model, &[&IMAGE[..], &["guidance.video.cfg=3"]].concat(), Some(cache));
    let one = plain(DType::F32);
    let all: &[(usize, &str, &str)] = &[
        (2, "cfg-ulysses", "data=2,cfg=2,context=2"),
        (1, "cfg-ulysses", "cfg=2,context=4"),
        (1, "ring", "context=8"),
        (2, "fsdp-ffn", "cfg=2,context=4"),
        (3, "fsdp-ulysses", "data=2,fsdp=2,context=2"),
    ];
    for (batch, layout, mesh) in &all[..if full() { all.len() } else { 1 }] {
        let pass = Pass::of_batch(&source, &runner.model, &request, *batch);
        let prepared = pass.prepared(&mut runner.executor, &one);
        let (whole, skipped) = cached(&pass, &mut runner.executor, &one, &prepared);
        assert!(!skipped.is_empty() && skipped.len() < 5, "{skipped:?}");
        let build = build(layout, mesh, 8);
        let mut sharded = open(&cpu(8), MODEL, build.clone());
        // The text context of three videos is padded to the mesh.
        let prepared = if *batch == 3 { pass.prepared(&mut sharded.executor, &build) } else { prepared };
        let (got, same) = cached(&pass, &mut sharded.executor, &build, &prepared);
        assert_eq!(same, skipped, "{layout} {mesh}, {batch} videos");
        assert_close(&format!("{layout} {mesh}, {batch} videos"), &got, &whole, 1e-5);
    }
}

/// Without a step cache, the program is the one that a request without this key has. With a step cache, a skipped step
/// has no matmul, and another threshold or schedule is the same program.
#[needs(nothing)]
fn only_the_kind_of_the_cache_changes_the_program() {
    let source = source();
    let c =
        TransformerConfig::from_json(&source.config(Component::Transformer).expect("a configuration")).expect("valid");
    let model = OpenModel::open(&source).expect("complete");
    let plain_request = request(&model, &["guidance.video.cfg=3"], None);
    let shapes = Shapes::from_request(&model.sizes, &plain_request).expect("legal sizes");
    let text = |cache: Option<StepCache>| {
        let request = Request { cache, ..plain_request.clone() };
        let shape = request.denoise_shape(&model.sizes, &shapes, 1);
        denoise(&c, &shape, &plain(DType::F32)).expect("builds").program.text
    };
    let without = text(None);
    assert!(!without.contains("stablehlo.case") && !without.contains("cache_"));
    let off = ["sampler.cache.kind=off", "guidance.video.cfg=3"];
    assert_eq!(request(&model, &off, None).cache, plain_request.cache);
    let adaptive =
        |threshold, max_skips| Some(StepCache::Adaptive { threshold, window: SkipWindow { max_skips, ..WINDOW } });
    let with = text(adaptive(0.1, 1));
    assert_eq!(with, text(adaptive(0.5, 4)));
    let fixed = text(Some(StepCache::Steps(vec![3])));
    assert_eq!(fixed, text(Some(StepCache::Ratio { ratio: 0.5, window: WINDOW })));
    let sampler = CfgPlusPlus(EulerAncestral {
        eta: 1.0,
        noise_seed: None,
        seed_offset: 0,
        draws: StepDraws::Own,
        blends_every_step: false,
    });
    let unsupported = Request { cache: adaptive(0.1, 1), sampler: sampler.into(), ..plain_request.clone() };
    let shape = unsupported.denoise_shape(&model.sizes, &shapes, 1);
    let why = denoise(&c, &shape, &plain(DType::F32)).expect_err("refused").to_string();
    assert!(why.contains("the sampler reads the negative prediction of every step"), "{why}");
    for text in [&with, &fixed] {
        let choice = text.split("\"stablehlo.case\"").nth(1).expect("a choice");
        let bodies = choice.split("}) : (tensor<i32>)").next().expect("its end");
        let products: Vec<usize> = bodies.split("}, {\n").map(|body| body.matches("dot_general").count()).collect();
        assert!(matches!(products[..], [some, 0] if some > 0), "{products:?}");
    }
}
