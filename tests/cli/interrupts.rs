//! Ctrl-C and SIGTERM: a run ends with the chunk of steps under way, or at once, and leaves nothing.

use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};

use crate::support::{self, needs};

/// A run that goes on by itself, and what it says.
struct Run {
    process: Child,
    lines: Lines<BufReader<ChildStderr>>,
}

impl Run {
    /// The video is alone in the folder `out`.
    fn start(out: &Path, more: &[&str], variable: (&str, &str)) -> Self {
        let mut run = support::ltx2();
        run.args(["generate", "-c", support::tiny()]).args(more).arg("-o").arg(out.join("out.mp4"));
        run.env(variable.0, variable.1);
        let mut process = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts");
        let lines = BufReader::new(process.stderr.take().expect("piped")).lines();
        Run { process, lines }
    }

    /// Reads on until a line holds `words`.
    fn says(&mut self, words: &str) {
        let mut said = Vec::new();
        for line in self.lines.by_ref().map_while(Result::ok) {
            if line.contains(words) {
                return;
            }
            said.push(line);
        }
        panic!("'{words}' is not in {said:#?}");
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.process.id().to_string()]).status().expect("kill runs");
        assert!(sent.success());
    }

    /// Its exit code, and all that it said after what was read.
    fn ended(mut self) -> (Option<i32>, Vec<String>) {
        let rest = self.lines.by_ref().map_while(Result::ok).collect();
        (self.process.wait().expect("it ends").code(), rest)
    }
}

#[needs(cpu)]
fn a_signal_ends_a_run_with_the_chunk_under_way() {
    for signal in ["-INT", "-TERM"] {
        let out = tempfile::tempdir().expect("a folder");
        let chunks = ["--steps", "256", "--progress-every", "2"];
        let mut run = Run::start(out.path(), &chunks, ("LTX2_LOG", "debug"));
        run.says("denoise: evaluations 5 to 6 of 256");
        run.signal(signal);
        run.says("stopping after the steps under way");
        let (code, rest) = run.ended();
        assert_eq!(code, Some(130), "{signal}: {rest:?}");
        // One may have begun in the moment of the signal.
        let later = rest.iter().filter(|line| line.contains("denoise: evaluations")).count();
        assert!(later <= 1, "{signal}: {rest:#?}");
        assert!(rest.iter().any(|line| line.starts_with("error: interrupted after")), "{signal}: {rest:?}");
        assert_eq!(std::fs::read_dir(out.path()).expect("the folder").count(), 0, "{signal}: nothing is left");
    }
}

#[needs(cpu)]
fn a_second_signal_ends_a_run_at_once_and_leaves_nothing_half_written() {
    let out = tempfile::tempdir().expect("a folder");
    let files = || std::fs::read_dir(out.path()).expect("the folder").count();
    // Half of the sidecar is written, and the run goes no further.
    let point = ("LTX2_FAILPOINT", "write out.json");
    let mut run = Run::start(out.path(), &["--steps", "1"], point);
    run.says("at write out.json");
    assert_eq!(files(), 2, "the video, and half of its sidecar");
    run.signal("-INT");
    run.says("stopping after the steps under way");
    run.signal("-INT");
    let (code, rest) = run.ended();
    assert_eq!(code, Some(130), "{rest:?}");
    assert!(out.path().join("out.mp4").exists() && files() == 1, "what was whole stays, what was half-written goes");
}
