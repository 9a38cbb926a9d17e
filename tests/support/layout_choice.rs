//! Compares `layout: auto` with the compiled modules of all shipped layouts.

use ltx2::config::{CliOverrides, Config, WeightType, load, parse_mesh};
use ltx2::pipeline::plan::layouts::{Candidate, Candidates, candidates};
use ltx2::pipeline::programs::compile::{ProgramCompileOptions, compile};
use ltx2::runtime::{ModuleStore, Target};

/// Maximum fraction by which a shipped layout may be faster than the choice of `auto`.
const LIMIT: f64 = 0.03;
/// Number of transformer blocks to compile; the result is extrapolated to all.
const LAYERS: usize = 2;
/// Number of blocks with 8-bit weights, because the first block keeps bf16.
const LAYERS_OF_8_BITS: usize = 3;

/// Returns whether `LTX2_TEST_LAYOUTS` lists a case, e.g. `ltx2_3_hq:2,ltx2:7`; if unset, all cases run.
pub fn is_chosen(case: &str) -> bool {
    std::env::var("LTX2_TEST_LAYOUTS").map_or(true, |cases| cases.split(',').any(|c| c == case))
}

/// Compares the choice of `auto` for a configuration on a target with all shipped layouts that fit there; returns what
/// is wrong.
///
/// A layout whose lower bound exceeds the compiled cost of that choice is not compiled. Modules are stored, so an
/// interrupted run resumes.
pub fn faults(name: &str, set: &[&str], target: &str) -> Vec<String> {
    let set = ["layout=auto", "mesh=null"].iter().chain(set).map(ToString::to_string).collect();
    let given = CliOverrides { files: vec![name.into()], set, ..CliOverrides::default() };
    let config = load(&given).expect("a shipped configuration").config;
    let machine = target.parse::<Target>().expect("a target").open().expect("a topology");
    let found = candidates(&config, &machine).expect("candidates");
    let chosen = &found.chosen;
    if !chosen.fits {
        assert!(found.all.iter().all(|c| !c.fits), "{name} on {target}: auto takes what does not fit");
        eprintln!("{name} on {target}: nothing fits, auto takes {} ({})", chosen.layout, chosen.mesh);
        return Vec::new();
    }
    let (mut faults, mut left_out) = (Vec::new(), 0);
    let own = cost(&config, chosen, &found, target);
    eprintln!("{name} on {target}: auto takes {}", line(chosen, own));
    let mut best = own;
    for other in found.all.iter().filter(|c| c.fits && (&c.layout, &c.mesh) != (&chosen.layout, &chosen.mesh)) {
        if other.bound > own {
            left_out += 1;
            continue;
        }
        let compiled = cost(&config, other, &found, target);
        eprintln!("    {}", line(other, compiled));
        best = best.min(compiled);
        if other.bound > compiled * 1.001 {
            faults.push(format!("{name} on {target}: the lower bound of {} is above that", line(other, compiled)));
        }
        if compiled < own * (1.0 - LIMIT) {
            let (auto, other) = (line(chosen, own), line(other, compiled));
            faults.push(format!("{name} on {target}: auto takes {auto}, faster is {other}"));
        }
    }
    eprintln!("    {left_out} are slower by their lower bounds; auto / best = {:.3}", own / best);
    faults
}

fn line(c: &Candidate, compiled: f64) -> String {
    format!("{} ({}): {compiled:.0} ms compiled, {:.0} estimated, bound {:.0}", c.layout, c.mesh, c.estimate, c.bound)
}

/// Returns the time of all steps of a request in milliseconds, predicted from compiled modules.
fn cost(config: &Config, of: &Candidate, all: &Candidates, target: &str) -> f64 {
    let mesh = Some(parse_mesh(&of.mesh).expect("a mesh"));
    let config = Config { layout: of.layout.clone(), mesh, ..config.clone() };
    let modules = ModuleStore::new(&super::modules());
    let target: Target = target.parse().expect("a target");
    let layers = Some(if config.runtime.weights == WeightType::Bf16 { LAYERS } else { LAYERS_OF_8_BITS });
    let step = |kind| {
        let (target, modules) = (target.clone(), Some(&modules));
        let options = ProgramCompileOptions { target, kind, layers, dump: None, save: None, modules };
        let done = compile(&config, &options).unwrap_or_else(|e| panic!("{} ({}): {e}", of.layout, of.mesh));
        done.predicted_all().expect("a known chip").step
    };
    all.loops.iter().map(|&(kind, steps)| steps as f64 * step(kind)).sum()
}
