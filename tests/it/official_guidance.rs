//! Two guided steps compared with Lightricks' guider and perturbations: every subset of the terms, and scales and
//! perturbed blocks that differ by stream (scripts/oracle/cases_official.py). Without cached programs a test takes 18
//! seconds on one core: each set of branches and of perturbed blocks is a separate program.

use crate::support::official::{cases_of, requests};
use crate::support::thresholds::row;
use crate::support::{cpu, dumped, dumping, generate, needs};

fn agrees(model: &str) {
    let (all, mut runner) = cases_of(&cpu(8), "official_guidance", model);
    assert_eq!(all.len(), 1);
    let limit = row(&all[0].name).f32();
    let asked = requests(&all[0], &runner.model);
    assert_eq!(asked.len(), 20);
    let mut largest = (0.0, String::new());
    for (prefix, request) in asked {
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
    agrees("tiny_a");
}

/// Takes about a minute, because each subset of guidance terms is a separate program.
#[needs(cpu)]
fn ltx2_3_guidance_terms_match_lightricks() {
    agrees("tiny_2_3");
}
