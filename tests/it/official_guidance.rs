//! Two guided steps compared with Lightricks' guider and perturbations: every subset of the terms, and scales and
//! perturbed blocks that differ by stream (scripts/oracle/cases_official.py). Each set of branches and of perturbed blocks
//! is a separate program.

use crate::support::official::{cases_of, requests};
use crate::support::thresholds::row;
use crate::support::{cpu, dumped, dumping, full, generate, needs};

/// Checks the requests of these names; in the full test all.
fn agrees(model: &str, names: &[&str]) {
    let (all, mut runner) = cases_of(&cpu(8), "official_guidance", model);
    assert_eq!(all.len(), 1);
    let limit = row(&all[0].name).f32();
    let asked = requests(&all[0], &runner.model);
    assert_eq!(asked.len(), 20);
    let mut largest = (0.0, String::new());
    let is_named = |prefix: &str| names.contains(&prefix.trim_end_matches('.'));
    assert!(names.iter().all(|name| asked.iter().any(|(prefix, _)| prefix.trim_end_matches('.') == *name)));
    for (prefix, request) in asked.into_iter().filter(|(prefix, _)| full() || is_named(prefix)) {
        let made = generate(&mut runner, &request, &dumping(None));
        for name in ["latents.video", "latents.audio"] {
            let name_in_case = format!("{prefix}{name}");
            let distance = all[0].within(&name_in_case, dumped(&made, name), limit);
            if distance > largest.0 {
                largest = (distance, name_in_case);
            }
        }
    }
    eprintln!("{model}: at most {:.1e}, {}", largest.0, largest.1);
}

#[needs(cpu, full)]
fn ltx2_0_guidance_terms_match_lightricks() {
    agrees("tiny_a", &[]);
}

/// Each subset of guidance terms is a separate program: `make test` runs all terms.
#[needs(cpu)]
fn ltx2_3_guidance_terms_match_lightricks() {
    agrees("tiny_2_3", &["cfg_stg_modality_rescale"]);
}
