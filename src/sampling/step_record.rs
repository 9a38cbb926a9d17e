//! Host copies of a denoising call, from which a sampler computes the clean prediction of the call's last evaluation.

use ndarray::{Array2, Array3, Axis as Dim, Zip};

/// Tensors of one stream before and after a call of the denoising program. All have the shape of the latents, `[b, n,
/// c]`.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// Noise level of the call's first evaluation.
    pub sigma: f32,
    /// Noise level after the call's last evaluation.
    pub next: f32,
    /// Coefficients of the call's last evaluation, a row of
    /// [`Schedule::coefficients`](super::sampler::Schedule::coefficients); empty if the sampler has none.
    pub coefficients: Vec<f32>,
    /// Latents before the call.
    pub before: Array3<f32>,
    /// Latents after the call.
    pub after: Array3<f32>,
    /// The tensors of [`Sampler::state`](super::Sampler::state) after the call, in order.
    pub state: Vec<Array3<f32>>,
    /// Noise of the call's last evaluation. `None`: the sampler uses no noise.
    pub noise: Option<Array3<f32>>,
    /// Conditioned tokens. `None`: the stream has none.
    pub condition: Option<TokenConditions>,
}

/// Tokens with known clean latents.
#[derive(Clone, Debug)]
pub struct TokenConditions {
    /// Fraction of the step's noise level that applies to each token, `[b, n]`; 0 keeps the clean latents.
    pub mask: Array2<f32>,
    /// Known clean latents, `[b, n, c]`.
    pub clean: Array3<f32>,
}

impl StepRecord {
    /// Returns the clean prediction of a call of Euler's method, `x - σ · (x' - x) / (σ' - σ)`. For a call with several
    /// evaluations, or for another sampler, this is an estimate.
    pub fn euler_prediction(&self) -> Array3<f32> {
        let factor = self.sigma / (self.next - self.sigma);
        Zip::from(&self.before).and(&self.after).map_collect(|x, next| x - factor * (next - x))
    }

    /// Returns `(x' - kₓ · x - kₙ · noise) / k`: the clean prediction of a step `x' = kₓ · x + k · clean + kₙ · noise`.
    /// `blended`: whether the conditioning latents were blended in after the step.
    pub fn solve(&self, weights: StepWeights, blended: bool) -> Array3<f32> {
        let StepWeights { latents, clean, noise } = weights;
        let condition = self.condition.as_ref().filter(|_| blended);
        let mut next = self.after.clone();
        if let Some(TokenConditions { mask, clean }) = condition {
            for ((mut token, mask), clean) in next.lanes_mut(Dim(2)).into_iter().zip(mask).zip(clean.lanes(Dim(2))) {
                // The latents of a token with mask 0 do not depend on the prediction.
                if *mask > 0.0 {
                    token.zip_mut_with(&clean, |x, c| *x = (*x - c * (1.0 - mask)) / mask);
                }
            }
        }
        next.zip_mut_with(&self.before, |x, before| *x -= latents * before);
        if let Some(drawn) = self.noise.as_ref().filter(|_| noise != 0.0) {
            next.zip_mut_with(drawn, |x, drawn| *x -= noise * drawn);
        }
        next.mapv_inplace(|x| x / clean);
        if let Some(TokenConditions { mask, clean }) = condition {
            for ((mut token, mask), clean) in next.lanes_mut(Dim(2)).into_iter().zip(mask).zip(clean.lanes(Dim(2))) {
                if *mask == 0.0 {
                    token.assign(&clean);
                }
            }
        }
        next
    }
}

/// Factors of a step `x' = latents · x + clean · prediction + noise · drawn`.
#[derive(Clone, Copy, Debug)]
pub struct StepWeights {
    /// Factor of the latents before the step.
    pub latents: f32,
    /// Factor of the clean prediction.
    pub clean: f32,
    /// Factor of the noise.
    pub noise: f32,
}

#[cfg(test)]
mod tests {
    use ndarray::{Array1, ArrayView1};

    use super::*;
    use crate::sampling::sampler::{AnySampler, Schedule};
    use crate::sampling::samplers::{CfgPlusPlus, Euler, EulerAncestral, GradientEstimation, Res2s, StepDraws};

    const SIGMAS: [f32; 6] = [1.0, 0.9, 0.62, 0.4, 0.15, 0.0];
    /// Factors of the step's noise level for each token: free tokens, a partly and a fully conditioned token.
    const MASK: [f32; 4] = [1.0, 1.0, 0.4, 0.0];

    fn values(seed: u64) -> Array3<f32> {
        let mut rng = crate::sampling::TorchRng::new(seed);
        rng.normal_array(&[1, MASK.len(), 3]).into_dimensionality().expect("three axes")
    }

    fn condition() -> TokenConditions {
        TokenConditions { mask: Array2::from_shape_fn((1, MASK.len()), |(_, n)| MASK[n]), clean: values(90) }
    }

    fn blend(x: &Array3<f64>) -> Array3<f64> {
        let TokenConditions { mask, clean } = condition();
        Array3::from_shape_fn(x.dim(), |(b, n, c)| {
            let mask = f64::from(mask[[b, n]]);
            x[[b, n, c]] * mask + f64::from(clean[[b, n, c]]) * (1.0 - mask)
        })
    }

    fn wide(x: &Array3<f32>) -> Array3<f64> {
        x.mapv(f64::from)
    }

    fn narrow(x: &Array3<f64>) -> Array3<f32> {
        x.mapv(|v| v as f32)
    }

    /// Latents and state of one evaluation in f64, computed by the formula of the sampler's step.
    type Step<'a> = &'a dyn Fn(&StepInputs) -> Vec<Array3<f64>>;

    /// Inputs of a sampler's step.
    struct StepInputs<'a> {
        levels: ArrayView1<'a, f64>,
        row: ArrayView1<'a, f64>,
        x: &'a Array3<f64>,
        state: &'a [Array3<f64>],
        clean: &'a Array3<f64>,
        negative: &'a Array3<f64>,
        noise: &'a Array3<f64>,
        conditioned: bool,
    }

    /// Runs a pass with random clean predictions. Returns the largest error of `clean_prediction` at each evaluation.
    fn errors(sampler: &AnySampler, conditioned: bool, negative_is_clean: bool, step: Step) -> Vec<f64> {
        let Schedule { mut levels, coefficients } = sampler.schedule(&SIGMAS);
        let evaluations = sampler.evaluations(SIGMAS.len() - 1);
        levels.resize(evaluations + 1, 0.0);
        let mut x = wide(&values(1));
        if conditioned {
            x = blend(&x);
        }
        let mut state = vec![Array3::zeros(x.raw_dim()); sampler.state().len()];
        let mut errors = Vec::new();
        for at in 0..evaluations {
            let mut clean = wide(&values(10 + at as u64));
            if conditioned {
                clean = blend(&clean);
            }
            let noise = values(30 + at as u64);
            let negative = if negative_is_clean { clean.clone() } else { wide(&values(60 + at as u64)) };
            let row = coefficients.get(at).cloned().unwrap_or_default();
            let before = narrow(&x);
            let pair = Array1::from(vec![f64::from(levels[at]), f64::from(levels[at + 1])]);
            let factors: Array1<f64> = row.iter().map(|k| f64::from(*k)).collect();
            let mut next = step(&StepInputs {
                levels: pair.view(),
                row: factors.view(),
                x: &wide(&before),
                state: &state,
                clean: &clean,
                negative: &negative,
                noise: &wide(&noise),
                conditioned,
            });
            x = next.remove(0);
            state = next;
            let record = StepRecord {
                sigma: levels[at],
                next: levels[at + 1],
                coefficients: row,
                before,
                after: narrow(&x),
                state: state.iter().map(narrow).collect(),
                noise: (sampler.noises() > 0).then_some(noise),
                condition: conditioned.then(condition),
            };
            let got = wide(&sampler.clean_prediction(&record));
            errors.push((got - clean).iter().fold(0.0, |most: f64, v| most.max(v.abs())));
        }
        errors
    }

    fn assert_exact(name: &str, errors: &[f64]) {
        assert!(errors.iter().all(|error| *error < 2e-5), "{name}: {errors:?}");
    }

    #[test]
    fn euler_and_gradient_estimation_predictions_are_exact() {
        for conditioned in [false, true] {
            let step = |at: &StepInputs| vec![at.x + (at.x - at.clean) / at.levels[0] * (at.levels[1] - at.levels[0])];
            assert_exact("euler", &errors(&Euler.into(), conditioned, false, &step));
            let step = |at: &StepInputs| {
                let velocity = (at.x - at.clean) / at.levels[0];
                let estimate = (&velocity - &at.state[0]) * at.row[0] + &at.state[0];
                vec![at.x + estimate * (at.levels[1] - at.levels[0]), velocity]
            };
            assert_exact("gradient", &errors(&GradientEstimation { gamma: 2.0 }.into(), conditioned, false, &step));
        }
    }

    fn ancestral(eta: f64, blends_every_step: bool) -> EulerAncestral {
        EulerAncestral { eta, noise_seed: None, seed_offset: 1, draws: StepDraws::Own, blends_every_step }
    }

    #[test]
    fn ancestral_prediction_is_exact() {
        for (eta, every, conditioned) in
            [(1.0, false, false), (0.5, false, true), (1.0, true, true), (0.0, false, true), (1.0, false, true)]
        {
            let step = |at: &StepInputs| {
                let next = at.x * at.row[0] + at.clean * at.row[1] + at.noise * at.row[2];
                let blends = at.conditioned && eta != 0.0 && (every || at.row[0] != 0.0);
                vec![if blends { blend(&next) } else { next }]
            };
            let name = format!("eta {eta}, blends every step: {every}, conditioned: {conditioned}");
            assert_exact(&name, &errors(&ancestral(eta, every).into(), conditioned, false, &step));
        }
    }

    #[test]
    fn res_2s_prediction_is_exact() {
        for conditioned in [false, true] {
            let step = |at: &StepInputs| {
                let StepInputs { row: k, x, state, clean, noise, .. } = at;
                let next = *x * k[0] + &state[0] * k[1] + &state[1] * k[2] + *clean * k[3] + *noise * k[4];
                let next = if at.conditioned && k[5] == 1.0 { blend(&next) } else { next };
                let anchor = &next * k[6] + *clean * k[7] + *x * k[8];
                vec![next, anchor, (*clean).clone()]
            };
            let errors = errors(&Res2s.into(), conditioned, false, &step);
            assert_eq!(errors.len(), 11);
            assert_exact("res_2s", &errors);
        }
    }

    /// The negative-prompt prediction affects the estimate of every step except the last.
    #[test]
    fn cfg_pp_prediction_is_exact_at_last_step_and_without_guidance() {
        let sampler: AnySampler = CfgPlusPlus(ancestral(1.0, false)).into();
        for conditioned in [false, true] {
            let step = |at: &StepInputs| {
                let k = at.row;
                let next = at.x * k[0] + at.clean * k[1] + at.negative * k[2] + at.noise * k[3];
                vec![if at.conditioned && k[4] == 1.0 { blend(&next) } else { next }]
            };
            assert_exact("negative is clean", &errors(&sampler, conditioned, true, &step));
            let errors = errors(&sampler, conditioned, false, &step);
            assert_exact("last step", &errors[errors.len() - 1..]);
            assert!(errors[2] > 0.01, "{errors:?}");
        }
    }
}
