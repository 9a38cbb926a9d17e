//! Two guided steps compared with Lightricks' guider and perturbations: every subset of the terms, and scales and
//! perturbed blocks that differ by stream (scripts/oracle/cases_official.py). Each set of branches and of perturbed blocks
//! is a separate program.

use crate::support::official::{cases_of, requests};
use crate::support::thresholds::row;
use crate::support::{cpu, dumped, dumping, full, generate, needs};

/// Checks every `step`-th request.
fn agrees(model: &str, step: usize) {
    let (all, mut runner) = cases_of(&cpu(8), "official_guidance", model);
    assert_eq!(all.len(), 1);
    let limit = row(&all[0].name).f32();
    let asked = requests(&all[0], &runner.model);
    assert_eq!(asked.len(), 20);
    let mut largest = (0.0, String::new());
    for (prefix, request) in asked.into_iter().step_by(step) {
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
    agrees("tiny_a", 1);
}

/// Each subset of guidance terms is a separate program: `make test` runs five of them.
#[needs(cpu)]
fn ltx2_3_guidance_terms_match_lightricks() {
    agrees("tiny_2_3", if full() { 1 } else { 4 });
}
