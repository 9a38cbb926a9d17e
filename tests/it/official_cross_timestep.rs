//! The noise level used by cross-modal attention (each stream's own, the other stream's, or the other's in the gate
//! only), where the three differ (scripts/oracle/cases_official.py).

use ltx2::hlo::DType;
use ltx2::pipeline::programs::build::ProgramKind;
use ltx2::tensor::Tensor;

use crate::support::{Case, cases, cpu, full, needs, plain, quick, relative_l2, run_case};

/// Returns every pair of tensors.
fn pairs<'a>(all: &[&'a Tensor]) -> Vec<(&'a Tensor, &'a Tensor)> {
    (0..all.len()).flat_map(|i| (0..i).map(move |j| (i, j))).map(|(i, j)| (all[i], all[j])).collect()
}

#[needs(cpu)]
fn cross_attention_noise_level_matches_reference() {
    let client = cpu(1);
    let all = cases("cross_timestep");
    assert_eq!(all.len(), 6);
    // LTX-2.0's only in the full test, and the other levels, with which `pipeline` and `conditions` run.
    let chosen = |case: &&Case| case.name.ends_with("tiny_2_3_cross");
    for case in all.iter().filter(|case| full() || chosen(case)) {
        let made = run_case(&client, ProgramKind::Transformer, case, case.inputs.clone(), quick(), &plain(DType::F32));
        for name in ["video", "audio"] {
            let distance = case.distance(name, &made[name]);
            eprintln!("{} {name}: {distance:.1e}", case.name);
            assert!(distance <= 1e-5, "{} {name}: {distance:e}", case.name);
        }
    }
    for model in ["tiny_a", "tiny_2_3"] {
        let of_model: Vec<&Case> = all.iter().filter(|case| case.model.ends_with(model)).collect();
        for name in ["video", "audio"] {
            let outputs: Vec<&Tensor> = of_model.iter().map(|case| &case.outputs[name]).collect();
            let nearest = pairs(&outputs).into_iter().map(|(a, b)| relative_l2(a, b)).fold(f64::INFINITY, f64::min);
            eprintln!("{model} {name}: at least {nearest:.2} apart");
            assert!(nearest > 0.01, "{model} {name}: two of the three are {nearest:e} apart");
        }
    }
}

/// Checks that the stored results of three requests with a conditioning image, which `official_steps` compares, depend
/// on the noise level used for cross-modal attention.
#[needs(nothing)]
fn cross_timestep_modes_give_different_conditioned_latents() {
    let (official, first) = (cases("official"), cases("official_1_0"));
    for model in ["tiny_a", "tiny_2_3"] {
        let of = |all: &'_ [Case], kind: &str| -> Tensor {
            let name = format!("/{model}_image_{kind}");
            all.iter().find(|case| case.name.ends_with(&name)).expect("a case").outputs["latents.video"].clone()
        };
        let three = [of(&official, "own"), of(&official, "gate_only"), of(&first, "cross")];
        for (a, b) in pairs(&three.each_ref()) {
            assert!(relative_l2(a, b) > 1e-3, "{model}: {:e}", relative_l2(a, b));
        }
    }
}
