//! Parameters loaded by a background thread while programs compile.

use std::fs::{self, File};
use std::path::Path;

use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::plan::run_plan::RunPlan;
use ltx2::{Config, Session};

use crate::support::needs;

/// Returns a short run's configuration for a writable copy of a model.
fn copied(model: &Path) -> Config {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/tiny_a");
    for folder in fs::read_dir(from).expect("the fixture").map(|entry| entry.expect("an entry").path()) {
        let to = model.join(folder.file_name().expect("a name"));
        if folder.is_file() {
            fs::copy(&folder, to).expect("copied");
            continue;
        }
        fs::create_dir_all(&to).expect("made");
        for file in fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            fs::copy(&file, to.join(file.file_name().expect("a name"))).expect("copied");
        }
    }
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny.yml");
    let keys = [
        format!("model.path={}", model.display()),
        format!("runtime.compile_cache={}", crate::support::programs().display()),
    ];
    Config::load(file, keys).expect("a configuration")
}

fn weights(model: &Path, component: &str) -> std::path::PathBuf {
    let folder = fs::read_dir(model.join(component)).expect("a component").map(|entry| entry.expect("an entry").path());
    folder.into_iter().find(|file| file.extension().is_some_and(|e| e == "safetensors")).expect("weights")
}

/// The loading thread reports its error, whether the truncated tensor is needed first or last.
#[needs(cpu)]
fn file_truncated_after_the_size_check_gives_an_error() {
    for component in ["text_encoder", "vae"] {
        let folder = tempfile::tempdir().expect("a folder");
        let config = copied(folder.path());
        let model = OpenModel::from_config(&config).expect("a model");
        let mut session =
            Session::start(RunPlan::of_model(&config, &model).expect("a plan"), model, None).expect("starts");
        let file = weights(folder.path(), component);
        let size = fs::metadata(&file).expect("a file").len();
        File::options().write(true).open(&file).expect("opens").set_len(size / 2).expect("cut");
        let requests = session.requests().expect("a request");
        let ran = session.fit_memory(None).and_then(|()| session.generate(&requests[0]).map(drop));
        let said = ran.expect_err("half a file").to_string();
        let expected = format!("it had {size} bytes, now {}", size / 2);
        assert!(said.contains(&file.display().to_string()) && said.contains(&expected), "{component}: {said}");
    }
}
