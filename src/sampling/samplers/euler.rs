//! Euler's method: first order, one evaluation per step.

use crate::hlo::Value;
use crate::sampling::sampler::{Evaluation, Sampler, StreamState};

/// Euler's method, `x + (x - clean) / σ · (σ' - σ)`, where `σ'` is the next noise level.
#[derive(Debug, PartialEq)]
pub struct Euler;

impl Sampler for Euler {
    fn step(&self, at: &Evaluation, stream: &StreamState) -> Vec<Value> {
        let (change, x) = (at.change(), stream.latents);
        vec![x + (x - stream.clean) / at.sigma * change]
    }
}
