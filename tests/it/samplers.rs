//! Samplers on complete requests with a conditioning image: fixed tokens, step noise, and table sizes.

use std::ops::ControlFlow;

use ltx2::pipeline::runner::Runner;
use ltx2::pjrt::Client;
use ltx2::request::Request;
use ltx2::sampling::sigmas;
use ltx2::sampling::{AnySampler, Euler, EulerAncestral, Evaluation, SEED_OFFSET, Sampler, StepDraws, StreamState};
use ltx2::tensor::Tensor;

use crate::support::official::{cases_of, request};
use crate::support::{cpu, dumped, dumping, full, generate, needs};

/// Returns a model and a request with an image at the first frame.
fn conditioned(client: &Client) -> (Runner, Request) {
    let (all, runner) = cases_of(client, "official", "tiny_a");
    let case = all.iter().find(|c| c.name.ends_with("_image_own")).expect("a case");
    let request = request(case, &runner.model);
    (runner, request)
}

/// Tokens of strength 1 equal the conditioning latents, bit for bit, after every step.
#[needs(cpu)]
fn full_strength_tokens_are_unchanged() {
    let (mut runner, request) = conditioned(&cpu(8));
    let whole = generate(&mut runner, &request, &dumping(None));
    let more =
        Request { sigmas: sigmas::official(5, sigmas::OFFICIAL_TOKENS).expect("a schedule"), seed: 8, ..request };
    let other = generate(&mut runner, &more, &dumping(Some(1)));
    let first = |t: &Tensor| t.to_f32().index_axis(ndarray::Axis(2), 0).to_owned();
    let [a, b] = [&whole, &other].map(|made| first(dumped(made, "latents.video")));
    assert_eq!(a, b);
    assert_ne!(dumped(&whole, "latents.video"), dumped(&other, "latents.video"));
}

/// If no noise is added, as in the last step, ancestral steps equal Euler steps, also for tokens of partial strength.
/// Otherwise they differ; the noise is seeded by the sampler or by the request.
#[needs(cpu)]
fn ancestral_steps_equal_euler_without_noise() {
    let (mut runner, mut request) = conditioned(&cpu(8));
    request.conditions.video[0].strength = 0.5;
    let mut latents = |sampler: AnySampler, sigmas: &[f32]| {
        let asked = Request { sampler, sigmas: sigmas.to_vec(), ..request.clone() };
        dumped(&generate(&mut runner, &asked, &dumping(None)), "latents.video").to_f32()
    };
    let largest = |a: &ndarray::ArrayD<f32>, b: &ndarray::ArrayD<f32>| {
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    };
    let ancestral = |eta, noise_seed| {
        let (seed_offset, draws) = (SEED_OFFSET, StepDraws::Own);
        EulerAncestral { eta, noise_seed, seed_offset, draws, blends_every_step: false }
    };
    let (all, one) = (request.sigmas.clone(), [1.0, 0.0]);
    let euler = latents(Euler.into(), &all);
    if full() {
        let without = latents(ancestral(0.0, None).into(), &all);
        assert!(largest(&euler, &without) < 1e-5, "{}", largest(&euler, &without));
    }
    let (euler_at_once, at_once) = (latents(Euler.into(), &one), latents(ancestral(1.0, None).into(), &one));
    assert!(largest(&euler_at_once, &at_once) < 1e-5, "{}", largest(&euler_at_once, &at_once));
    let with = latents(ancestral(1.0, None).into(), &all);
    assert!(largest(&euler, &with) > 1e-2);
    let seed = Some(request.seed + 10_000);
    assert_eq!(latents(ancestral(1.0, seed).into(), &all), with);
    // diffusers also blends in known tokens after the last step.
    if full() {
        let blended = EulerAncestral { blends_every_step: true, ..ancestral(1.0, None) };
        assert!(largest(&euler_at_once, &latents(blended.into(), &one)) > 1e-2);
    }
}

/// A sampler whose tables differ from their stated length or exceed that of the programs.
#[derive(Debug, PartialEq)]
struct Long {
    evaluations: usize,
}

impl Sampler for Long {
    fn evaluations(&self, _steps: usize) -> usize {
        self.evaluations
    }

    fn step(&self, at: &Evaluation, stream: &StreamState) -> Vec<ltx2::hlo::Value> {
        vec![stream.latents * at.change()]
    }
}

#[needs(cpu)]
fn sampler_tables_of_wrong_length_are_rejected() {
    let (mut runner, request) = conditioned(&cpu(8));
    let steps = request.sigmas.len() - 1;
    let cases = [
        (257, format!("{steps} steps take 257 evaluations, but at most 256 are supported; use fewer steps")),
        (
            2 * steps,
            format!(
                "{steps} steps take {n} evaluations, but the sampler returned {} noise levels and 0 rows of \
                 coefficients; expected {} noise levels and 0 rows of 0 coefficients",
                steps + 1,
                2 * steps + 1,
                n = 2 * steps
            ),
        ),
    ];
    for (evaluations, want) in cases {
        let request = Request { sampler: Long { evaluations }.into(), ..request.clone() };
        let error = runner.generate(&request, &dumping(None), &mut |_, _, _| ControlFlow::Continue(()));
        assert_eq!(error.err().expect("refused").to_string(), want);
    }
}
