//! Two guided steps against Lightricks' own guider and perturbations: every subset of the terms, scales and perturbed
//! blocks different by stream (scripts/oracle/cases_official.py). Without compiled programs a test takes 18 seconds of one
//! core: each set of branches and of perturbed blocks is a program.

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
fn of_2_0() {
    agrees("tiny_a");
}

/// Each subset is a program of its own: about a minute.
#[needs(cpu)]
fn of_2_3() {
    agrees("tiny_2_3");
}
