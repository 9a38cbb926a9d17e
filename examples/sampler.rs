//! Implements a sampler and compares it with Euler on the same request:
//!
//! ```sh
//! cargo run --release --example sampler nano assets/nano out.mp4
//! ```
//!
//! Arguments: preset, model, output of the new sampler, then any YAML keys. Prints the distance of each sampler from Euler with
//! four times as many steps.

use std::error::Error;

use ltx2::hlo::Value;
use ltx2::media::Frames;
use ltx2::sampling::{AnySampler, Euler, Evaluation, Sampler, Schedule, StreamState};
use ltx2::{Config, Request, Session};

/// Two-step Adams-Bashforth: second order with one evaluation per step, from this velocity `v` and the previous `v'`:
/// `x + h · ((1 + r) · v - r · v')`, `r = h / 2h'`. The first and the last step are Euler's; near level 0 the step sizes differ
/// too much.
#[derive(Debug, PartialEq)]
struct AdamsBashforth;

impl Sampler for AdamsBashforth {
    fn state(&self) -> &[&'static str] {
        &["velocity"]
    }

    fn coefficients(&self) -> usize {
        2
    }

    fn schedule(&self, sigmas: &[f32]) -> Schedule {
        let changes: Vec<f32> = sigmas.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let row = |i: usize| {
            let back = if i == 0 || i + 1 == changes.len() { 0.0 } else { changes[i] / changes[i - 1] / 2.0 };
            vec![changes[i] * (1.0 + back), -changes[i] * back]
        };
        Schedule { levels: sigmas.to_vec(), coefficients: (0..changes.len()).map(row).collect() }
    }

    fn step(&self, at: &Evaluation, stream: &StreamState) -> Vec<Value> {
        let (x, factors) = (stream.latents, at.row());
        let velocity = (x - stream.clean) / at.sigma;
        let next = x + &velocity * factors.at(0, 0) + stream.state[0] * factors.at(0, 1);
        vec![next, velocity]
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    ltx2::pjrt::quiet_plugins();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [preset, model, out, keys @ ..] = &arguments[..] else {
        return Err("usage: sampler PRESET MODEL OUT.mp4 [KEY=VALUE…]".into());
    };
    let own = [format!("model.path={model}"), "request.prompt=a red circle bounces on blue, low beeps".into()];
    let mut config = Config::load(preset, own.iter().chain(keys))?;
    let mut session = Session::open(&config)?;
    let request = session.requests()?.remove(0);
    config.sampler.steps *= 4;
    let fine = session.runner.model.request(&config, &config.jobs()?[0])?;
    let fine = session.generate(&fine)?;
    for sampler in [AnySampler::from(Euler), AdamsBashforth.into()] {
        let video = session.generate(&Request { sampler: sampler.clone(), ..request.clone() })?;
        println!("{:?}: {:.3}", &*sampler, distance(&video.frames, &fine.frames));
        video.write_mp4(out)?;
    }
    Ok(())
}

/// Mean absolute difference of two videos' bytes.
fn distance(a: &Frames, b: &Frames) -> f64 {
    let bytes = a.data().iter().zip(b.data());
    bytes.map(|(a, b)| f64::from(a.abs_diff(*b))).sum::<f64>() / a.data().len() as f64
}
