//! Cases of Lightricks' own pipelines (scripts/oracle/cases_official.py): requests as settings of this project, and the
//! reference's latents under the names of a dump.

use std::sync::Arc;

use ltx2::Config;
use ltx2::hlo::DType;
use ltx2::nn::Build;
use ltx2::pipeline::RunOptions;
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::programs::executor::Executor;
use ltx2::pipeline::runner::Runner;
use ltx2::pjrt::Client;
use ltx2::request::Request;
use ltx2::runtime::Engine;
use ltx2::weights::{ModelSource, Overrides};
use serde_json::Value;

use super::{Case, cases, dumping, plain, quick};

/// Returns the cases of a component with this model, and the model opened on the client's devices.
pub fn cases_of(client: &Client, component: &str, model: &str) -> (Vec<Case>, Runner) {
    let all: Vec<Case> = cases(component).into_iter().filter(|case| case.model.ends_with(model)).collect();
    let runner = open(client, all.first().unwrap_or_else(|| panic!("{component}: no case of {model}")));
    (all, runner)
}

/// Opens a case's model with its second-stage upsampler.
fn open(client: &Client, case: &Case) -> Runner {
    open_with(client, case, plain(DType::F32))
}

/// Opens a case's model with other build options, such as a layout.
pub fn open_with(client: &Client, case: &Case, build: Build) -> Runner {
    let upsampler = case.scalars["upsampler"].as_str().map(|name| format!("tests/fixtures/models/{name}"));
    open_with_overrides(client, case, Overrides { upsampler, ..Overrides::default() }, build)
}

/// Opens a case's model with some components replaced.
pub fn open_with_overrides(client: &Client, case: &Case, overrides: Overrides, build: Build) -> Runner {
    let model = case.model.to_str().expect("UTF-8");
    let source = Arc::new(ModelSource::open(model, &overrides).expect("a model"));
    let executor = Executor::new(Engine::new(client.clone(), quick()), source.clone());
    Runner::new(OpenModel::open(&source).expect("complete"), executor, build)
}

/// Returns the requests of a case with the prefixes of their outputs.
pub fn requests(case: &Case, model: &OpenModel) -> Vec<(String, Request)> {
    let preset = case.scalars["preset"].as_str().expect("a preset");
    let all = case.scalars["keys"].as_object().expect("requests").iter();
    let settings = |keys: &Value| keys.as_array().expect("settings").clone();
    let each = all.map(|(prefix, keys)| {
        let keys = [settings(&case.scalars["common"]), settings(keys)].concat();
        let keys = keys.iter().map(|key| key.as_str().expect("a setting")).chain(["runtime.dtype=f32"]);
        let config = Config::load(preset, keys).unwrap_or_else(|e| panic!("{} {prefix}: {e}", case.name));
        let job = config.jobs().expect("a job").remove(0);
        (prefix.clone(), model.request(&config, &job).unwrap_or_else(|e| panic!("{} {prefix}: {e}", case.name)))
    });
    each.collect()
}

/// Returns the request of a case with a single one.
pub fn request(case: &Case, model: &OpenModel) -> Request {
    let mut all = requests(case, model);
    assert_eq!(all.len(), 1, "{}", case.name);
    all.remove(0).1
}

/// Returns the distance limit of a tensor: `latents` for latents, otherwise that of decoded frames and samples.
pub fn limit_of(name: &str, latents: f64) -> f64 {
    if name.contains("latents") { latents } else { 1e-3 }
}

/// Returns run options that keep the latents after each step.
pub fn dumping_steps() -> RunOptions {
    RunOptions { dump_steps: true, ..dumping(None) }
}
