//! `runtime.stream: auto` with a stand-in plugin that streams weights like a GPU: the frames do not change, and errors name
//! the memory that is too small.

use std::path::{Path, PathBuf};
use std::process::Output;

use crate::support::drawn::with_large_blocks;
use crate::support::standin::{self, Fault, Load, RESOURCE_EXHAUSTED, Standin, link_programs_except};
use crate::support::{self, needs};
use serde_json::Value;

const STREAMS: &str = "runtime.stream: auto: streaming weights from host memory";

/// A model whose weights can be streamed, and a folder for outputs.
struct Site {
    folder: tempfile::TempDir,
    model: String,
}

impl Site {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model");
        std::fs::create_dir(&model).expect("a folder");
        Site { model: with_large_blocks(&model), folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, standin: &Standin, cache: &Path, values: &[&str]) -> Output {
        let mut command = support::ltx2();
        command.args(["generate", "-v", "-c", support::tiny(), "--steps", "1", "--force", "-o"]);
        command.arg(self.path("out.mp4")).args(["-m", &self.model]);
        let values = values.iter().chain(&["attention=plain"]);
        command.args(values.flat_map(|value| ["--set".to_string(), format!("runtime.{value}")]));
        standin.give(&mut command).env("LTX2_COMPILE_CACHE", cache).output().expect("the binary runs")
    }

    /// Returns the hashes of the frames and samples, and the log.
    fn video(&self, standin: &Standin, cache: &Path, values: &[&str]) -> (Value, String) {
        let ran = self.run(standin, cache, values);
        let log = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert!(ran.status.success(), "{values:?}: {log}");
        let sidecar = std::fs::read_to_string(self.path("out.json")).expect("a sidecar");
        (serde_json::from_str::<Value>(&sidecar).expect("JSON")["sha256"].clone(), log)
    }

    /// Returns the error line.
    fn error(&self, standin: &Standin, cache: &Path, values: &[&str]) -> String {
        let ran = self.run(standin, cache, values);
        let log = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.status.code(), Some(1), "{log}");
        log.lines().find_map(|line| line.strip_prefix("error: ")).expect("an error").into()
    }
}

fn standin() -> Standin {
    Standin::new().load(Load::Cuda)
}

/// Returns the number of lines of a file; 0 if it does not exist.
fn lines(path: &Path) -> usize {
    std::fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

#[needs(cpu)]
fn auto_streams_weights_that_do_not_fit() {
    let site = Site::new();
    let (cache, calls, log_file) = (standin::programs(), site.path("calls"), site.path("log"));
    let (whole, log) = site.video(&standin(), &cache, &[]);
    assert!(!log.contains(STREAMS), "{log}");

    // The transformer takes 0.037 GiB, of which 0.016 GiB can be streamed.
    let limit = "memory_limit=0.033";
    let (streamed, log) = site.video(&standin().calls(&calls), &cache, &[limit]);
    assert_eq!(streamed, whole);
    assert_eq!(log.matches(STREAMS).count(), 1, "{log}");
    let calls = std::fs::read_to_string(&calls).expect("calls");
    let count = |name: &str| -> usize {
        let line = calls.lines().find_map(|line| line.strip_prefix(name)).expect("a count");
        line.trim().parse().expect("a number")
    };
    let views = count("PJRT_Client_CreateViewOfDeviceBuffer ");
    assert!(views > 0 && count("PJRT_Client_DmaMap ") >= views, "{calls}");
    // The stand-in aborts if the client is destroyed before all memory is unmapped.
    assert_eq!(count("PJRT_Client_DmaUnmap "), count("PJRT_Client_DmaMap "));
    assert_eq!(count("PJRT_Client_Destroy "), 1);

    let (streamed, log) = site.video(&standin(), &cache, &[limit, "resident_blocks=1"]);
    assert_eq!(streamed, whole);
    assert!(log.contains("; 1 of 8 transformer blocks stay in device memory"), "{log}");

    let error = site.error(&standin(), &cache, &[limit, "stream=off"]);
    assert!(error.ends_with("--set runtime.stream=auto needs less (estimated without compiling)"), "{error}");

    // The compiler runs out of memory, again without loaded parameters: half of the blocks are streamed, then all.
    let full = |calls: &[usize]| {
        let fault = Fault::Fail(RESOURCE_EXHAUSTED, "out of memory while trying to allocate 1 GiB");
        let standin = standin().log(&log_file);
        calls.iter().fold(standin, |standin, nth| standin.at("PJRT_Client_Compile/denoise", *nth, &fault))
    };
    let without = site.path("without");
    link_programs_except("denoise", &cache, &without);
    let (streamed, log) = site.video(&full(&[1, 1]), &without, &[]);
    assert_eq!(streamed, whole);
    assert!(log.contains("; 4 of 8 transformer blocks stay in device memory"), "{log}");
    assert_eq!(lines(&log_file), 2);
    std::fs::remove_file(&log_file).expect("removed");
    let none = site.path("none");
    link_programs_except("denoise", &cache, &none);
    let error = site.error(&full(&[0]), &none, &[]);
    assert!(error.starts_with("compiling denoise: out of device memory: "), "{error}");
    assert_eq!(lines(&log_file), 4, "twice without streaming, with 4 and with 0 resident blocks");

    // Neither this process nor the plugin can pin memory.
    let fault = |text| Fault::Fail(RESOURCE_EXHAUSTED, text);
    let pinned = standin().at("PJRT_Client_DmaMap", 0, &fault("not permitted"));
    let pinned = pinned.at("PJRT_Client_BufferFromHostBuffer", 0, &fault("Out of host memory"));
    let error = site.error(&pinned, &cache, &[limit]);
    assert!(error.contains("out of pinned host memory: streamed weights take 0.0"), "{error}");
}
