//! Samplers on whole requests with a conditioning image: what they keep, what they draw, the size of their tables.

use std::ops::ControlFlow;

use ltx2::pipeline::runner::Runner;
use ltx2::pjrt::Client;
use ltx2::request::Request;
use ltx2::sampling::sigmas;
use ltx2::sampling::{AnySampler, Euler, EulerAncestral, Evaluation, SEED_OFFSET, Sampler, StepDraws, StreamState};
use ltx2::tensor::Tensor;

use crate::support::official::{cases_of, request};
use crate::support::{cpu, dumped, dumping, generate, needs};

/// A model, and a request with an image in the first frame's place.
fn conditioned(client: &Client) -> (Runner, Request) {
    let (all, runner) = cases_of(client, "official", "tiny_a");
    let case = all.iter().find(|c| c.name.ends_with("_image_own")).expect("a case");
    let request = request(case, &runner.model);
    (runner, request)
}

/// Tokens of strength 1 keep the conditioning latents, to the bit, after every step.
#[needs(cpu)]
fn tokens_of_full_strength_stay() {
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

/// Ancestral steps are Euler's where no noise is drawn anew, as the last step is, tokens of partial strength included; they
/// go elsewhere where it is, by a seed of its own or the request's.
#[needs(cpu)]
fn ancestral_steps_differ_from_euler_s_by_their_noise() {
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
    let without = latents(ancestral(0.0, None).into(), &all);
    assert!(largest(&euler, &without) < 1e-5, "{}", largest(&euler, &without));
    let (euler_at_once, at_once) = (latents(Euler.into(), &one), latents(ancestral(1.0, None).into(), &one));
    assert!(largest(&euler_at_once, &at_once) < 1e-5, "{}", largest(&euler_at_once, &at_once));
    let with = latents(ancestral(1.0, None).into(), &all);
    assert!(largest(&euler, &with) > 1e-2);
    let seed = Some(request.seed + 10_000);
    assert_eq!(latents(ancestral(1.0, seed).into(), &all), with);
    // diffusers blends known tokens in behind the last step, too.
    let blended = EulerAncestral { blends_every_step: true, ..ancestral(1.0, None) };
    assert!(largest(&euler_at_once, &latents(blended.into(), &one)) > 1e-2);
}

/// A sampler whose tables are not as long as it says, or longer than the programs'.
#[derive(Debug)]
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
fn a_sampler_s_tables_are_as_long_as_its_evaluations() {
    let (mut runner, request) = conditioned(&cpu(8));
    let steps = request.sigmas.len() - 1;
    let cases = [
        (257, format!("{steps} steps are 257 evaluations, there may be at most 256")),
        (
            2 * steps,
            format!(
                "{steps} steps are {n} evaluations, its schedule has {} levels and 0 rows, \
                 not {} and 0 of 0",
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
