//! Ctrl-C and SIGTERM stop a run within a second in every phase. Computed results are kept, and no partial files are
//! left.

use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{self, needs};

/// Running process and its stderr lines.
struct Run {
    process: Child,
    lines: Lines<BufReader<ChildStderr>>,
}

impl Run {
    /// Starts a run that writes into the empty folder `out`.
    fn start(out: &Path, more: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut run = support::ltx2();
        run.args(["generate", "-c", support::tiny()]).args(more).arg("-o").arg(out.join("out.mp4"));
        run.envs(variables.iter().copied());
        Run::spawn(run)
    }

    fn spawn(mut run: Command) -> Self {
        let mut process = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts");
        let lines = BufReader::new(process.stderr.take().expect("piped")).lines();
        Run { process, lines }
    }

    /// Reads lines until one contains `words`.
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

    /// Waits for a child process that runs `ltx2 compile`; returns its id.
    fn compiling_child(&mut self) -> u32 {
        let since = Instant::now();
        let tasks = format!("/proc/{}/task", self.process.id());
        let compiles = |id: &u32| {
            let words = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            words.split(|byte| *byte == 0).any(|word| word == b"compile")
        };
        loop {
            let tasks = std::fs::read_dir(&tasks).into_iter().flatten().flatten();
            let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
            let ids: Vec<u32> =
                lists.flat_map(|list| list.split(' ').filter_map(|id| id.parse().ok()).collect::<Vec<_>>()).collect();
            if let Some(child) = ids.into_iter().find(compiles) {
                return child;
            }
            assert!(since.elapsed() < Duration::from_secs(60) && self.process.try_wait().expect("a state").is_none());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for the end; returns the exit code and the remaining lines.
    fn ended(mut self) -> (Option<i32>, Vec<String>) {
        let rest = self.lines.by_ref().map_while(Result::ok).collect();
        (self.process.wait().expect("the process ends").code(), rest)
    }
}

/// Maximum time until a signal takes effect.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(1);

/// Sends a signal to a run, which must exit within [`SIGNAL_TIMEOUT`]; returns its only error line.
fn interrupted(run: Run, signal: &str, phase: &str) -> String {
    run.signal(signal);
    let since = Instant::now();
    let (code, rest) = run.ended();
    assert!(since.elapsed() < SIGNAL_TIMEOUT, "{phase}: {:?}", since.elapsed());
    assert_eq!(code, Some(130), "{phase}: {rest:?}");
    let errors: Vec<_> = rest.iter().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{phase}: {rest:?}");
    errors[0].clone()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("the folder");
    let mut names: Vec<_> = entries.map(|e| e.expect("one").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Fail points block each phase; before the last step there is nothing to save.
#[needs(cpu)]
fn signal_stops_run_in_every_phase_before_last_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let others = folder.path().join("programs");
    support::copy_programs(&others, &["text_encoder"]);
    let phases = [
        ("plugin trial", "-INT", "off"),
        ("plugin load", "-TERM", "off"),
        ("compile text_encoder", "-INT", others.to_str().expect("UTF-8")),
        ("load transformer.proj_in.weight", "-TERM", ""),
        ("step 0", "-INT", ""),
    ];
    for (point, signal, cache) in phases {
        let out = tempfile::tempdir().expect("a folder");
        let cache = (!cache.is_empty()).then_some(("LTX2_COMPILE_CACHE", cache));
        let variables: Vec<_> = [("LTX2_FAILPOINT", point)].into_iter().chain(cache).collect();
        let mut run = Run::start(out.path(), &["--steps", "1"], &variables);
        if point == "compile text_encoder" {
            run.says("compiling text encoder");
        }
        run.says(&format!("at {point}"));
        let error = interrupted(run, signal, point);
        assert!(error.starts_with("error: interrupted "), "{point}: {error}");
        assert!(error.ends_with("no video was written"), "{point}: {error}");
        assert!(names(out.path()).is_empty(), "{point}: {:?}", names(out.path()));
    }
}

/// The properties of an input video are read with the configuration, before libtpu's variables are set and threads start.
#[needs(cpu)]
fn signal_stops_commands_while_they_read_their_configuration() {
    let video = ["--pipeline", "video_to_audio", "--video", support::tiny()];
    for (command, signal) in [("generate", "-INT"), ("generate", "-TERM"), ("bench", "-TERM")] {
        let mut run = support::ltx2();
        run.args([command, "-c", support::tiny()]).args(video).env("LTX2_FAILPOINT", "probe video");
        let mut run = Run::spawn(run);
        run.says("at probe video");
        assert_eq!(interrupted(run, signal, command), "error: interrupted before the start; nothing was written");
    }
}

/// The temporary file of a conversion is removed.
#[needs(nothing)]
fn signal_stops_conversion_and_leaves_no_file() {
    let out = tempfile::tempdir().expect("a folder");
    let point = "convert model.diffusion_model.transformer_blocks.1.attn1.to_gate_logits.weight";
    let mut run = support::ltx2();
    run.args(["convert", "tests/fixtures/quantized/convert.safetensors"]).arg(out.path().join("out.safetensors"));
    run.args(["--weights", "int8"]).env("LTX2_FAILPOINT", point);
    let mut run = Run::spawn(run);
    run.says(&format!("at {point}"));
    assert_eq!(names(out.path()).len(), 1, "a temporary file");
    let error = interrupted(run, "-INT", "convert");
    assert_eq!(error, "error: interrupted before the file was complete; nothing was written");
    assert_eq!(names(out.path()), [""; 0]);
}

/// `compile` and `warm` compile in their own process; `why` and `experiment` compile in child processes, which exit
/// too.
#[needs(cpu)]
fn signal_stops_compiling_commands_and_their_children() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
    let set = ["request.width=64", "request.height=96", "request.num_frames=9", support::QUICK];
    let small =
        format!("set: [model.path=nano, {}]\nlayers: 1\nlayouts: [sequence]\ntargets: ['cpu:2']\n", set.join(", "));
    std::fs::write(path("x.yml"), format!("config: nano_2_0\n{small}")).expect("written");
    let model = ["--target", "cpu:2", "-c", "nano_2_0", "--model", "nano", "--layers", "1", "--layout", "sequence"];
    let model = [&model[..], &set.map(|set| ["--set", set]).concat()].concat();
    let (lab, out, yaml) = (path("lab"), path("out"), path("x.yml"));
    for (command, signal, point) in [
        ([&["compile"][..], &model].concat(), "-INT", "compile cpu:2"),
        (vec!["warm", "-c", support::tiny()], "-TERM", "compile text_encoder"),
        ([&["why"][..], &model, &["-o", &lab]].concat(), "-INT", "compile cpu:2"),
        (vec!["experiment", &yaml, "-o", &out], "-TERM", "compile cpu:2"),
    ] {
        let mut run = support::ltx2();
        run.args(&command).env("LTX2_FAILPOINT", point);
        if command[0] == "warm" {
            support::copy_programs(Path::new(&path("cache")), &["text_encoder"]);
            run.env("LTX2_COMPILE_CACHE", path("cache"));
        }
        let mut run = Run::spawn(run);
        let child = match command[0] {
            "why" | "experiment" => {
                run.says("started ");
                Some(run.compiling_child())
            }
            _ => {
                run.says("compiling ");
                run.says(&format!("at {point}"));
                None
            }
        };
        assert!(interrupted(run, signal, command[0]).starts_with("error: interrupted"), "{command:?}");
        let since = Instant::now();
        let runs = |id| std::fs::read(format!("/proc/{id}/cmdline")).is_ok_and(|words| !words.is_empty());
        while child.is_some_and(runs) {
            assert!(since.elapsed() < SIGNAL_TIMEOUT, "{command:?}: its child {child:?} still runs");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The checkpoint contains all finished steps, and `--resume` finishes the video from them.
#[needs(cpu)]
fn signal_after_last_step_saves_checkpoint() {
    let whole = tempfile::tempdir().expect("a folder");
    let made = |folder: &Path, more: &[&str]| {
        let mut run = support::ltx2();
        run.args(["generate", "-c", support::tiny(), "--steps", "2"]).args(more).arg("-o").arg(folder.join("out.mp4"));
        let ran = run.output().expect("runs");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        let sidecar = std::fs::read(folder.join("out.json")).expect("a sidecar");
        serde_json::from_slice::<serde_json::Value>(&sidecar).expect("JSON")["sha256"].clone()
    };
    let expected = made(whole.path(), &[]);
    for (signal, point) in [("-INT", "decode video"), ("-TERM", "decode audio"), ("-TERM", "encode out.mp4")] {
        let out = tempfile::tempdir().expect("a folder");
        let mut run = Run::start(out.path(), &["--steps", "2"], &[("LTX2_FAILPOINT", point)]);
        let phases = ["encoding the prompt", "decoding the video", "decoding the audio", "writing "];
        let count =
            ["decode video", "decode audio", "encode out.mp4"].iter().position(|own| *own == point).expect("one");
        phases.iter().take(count + 2).for_each(|phase| run.says(phase));
        run.says(&format!("at {point}"));
        let error = interrupted(run, signal, point);
        let steps = out.path().join("out.mp4.steps.safetensors");
        let kept = format!("the finished steps are saved in {}; resume with --resume", steps.display());
        assert!(error.starts_with("error: interrupted ") && error.ends_with(&kept), "{point}: {error}");
        assert_eq!(names(out.path()), ["out.mp4.steps.safetensors"], "{point}: no temporary file is left");
        assert_eq!(made(out.path(), &["--resume"]), expected, "{point}");
        assert_eq!(names(out.path()), ["out.json", "out.mp4"], "{point}");
    }
}

#[needs(cpu)]
fn signal_stops_checkpointed_run_after_current_chunk() {
    for signal in ["-INT", "-TERM"] {
        let out = tempfile::tempdir().expect("a folder");
        let chunks = ["--steps", "256", "--progress-every", "2", "--checkpoint-every", "256"];
        let mut run = Run::start(out.path(), &chunks, &[("LTX2_LOG", "debug")]);
        run.says("denoise: evaluations 5 to 6 of 256");
        run.signal(signal);
        let since = Instant::now();
        run.says("stopping after the current steps; interrupt again to stop immediately");
        assert!(since.elapsed() < SIGNAL_TIMEOUT, "{signal}: {:?}", since.elapsed());
        let (code, rest) = run.ended();
        assert_eq!(code, Some(130), "{signal}: {rest:?}");
        // One chunk may have started at the moment of the signal.
        let later = rest.iter().filter(|line| line.contains("denoise: evaluations")).count();
        assert!(later <= 1, "{signal}: {rest:#?}");
        assert!(rest.iter().any(|line| line.starts_with("error: interrupted after")), "{signal}: {rest:?}");
        assert!(rest.iter().any(|line| line.contains("resume with --resume")), "{signal}: {rest:?}");
        assert_eq!(names(out.path()), ["out.mp4.steps.safetensors"], "{signal}");
    }
}

/// The second step of a run with checkpoints is blocked, so that the first signal cannot stop the run.
#[needs(cpu)]
fn second_signal_stops_run_immediately() {
    let out = tempfile::tempdir().expect("a folder");
    let chunks = ["--steps", "8", "--progress-every", "1", "--checkpoint-every", "8"];
    let mut run = Run::start(out.path(), &chunks, &[("LTX2_FAILPOINT", "step 1")]);
    run.says("at step 1");
    run.signal("-INT");
    run.says("stopping after the current steps");
    let error = interrupted(run, "-INT", "step 1");
    assert!(error.starts_with("error: interrupted after 1 of 8 steps"), "{error}");
    assert!(names(out.path()).is_empty(), "{:?}", names(out.path()));
}

/// The signal arrives while the sidecar is written: the video is kept, and the partial sidecar is removed.
#[needs(cpu)]
fn signal_leaves_no_partial_files() {
    let out = tempfile::tempdir().expect("a folder");
    let mut run = Run::start(out.path(), &["--steps", "1"], &[("LTX2_FAILPOINT", "write out.json")]);
    run.says("at write out.json");
    assert_eq!(names(out.path()).len(), 2, "the video, and half of its sidecar");
    let error = interrupted(run, "-INT", "write out.json");
    assert!(error.starts_with("error: interrupted while files were written"), "{error}");
    assert_eq!(names(out.path()), ["out.mp4", "out.mp4.steps.safetensors"]);
}

/// A process reports immediately which process it waits for, where and until when, and handles signals meanwhile.
#[needs(cpu)]
fn waiting_for_processes_is_reported_and_interruptible() {
    let place =
        std::net::TcpListener::bind("127.0.0.1:0").expect("listens").local_addr().expect("an address").to_string();
    let own = ["--coordinator", &place, "--num-processes", "2", "--process-id"];
    let cases = [
        ([&own[..], &["1"]].concat(), vec![], format!("waiting for process 0 of 2 at {place}: ")),
        ([&own[..], &["0"]].concat(), vec![], format!("waiting for process 1 of 2 to register at {place}, until ")),
        (
            vec!["--coordinator", &place],
            vec![("TPU_WORKER_ID", "0"), ("TPU_WORKER_HOSTNAMES", "a,b")],
            format!("waiting for process 1 of 2 to register at {place}, until "),
        ),
        // The first pod of a JobSet may get its name later.
        (
            vec![],
            vec![
                ("JOBSET_NAME", "set.invalid"),
                ("REPLICATED_JOB_NAME", "a"),
                ("JOB_COMPLETION_INDEX", "1"),
                ("PROCESSES_IN_JOB", "2"),
            ],
            "waiting for process 0 of 2 at set.invalid-a-0-0.set.invalid:8476: ".into(),
        ),
    ];
    for (more, variables, line) in cases {
        let out = tempfile::tempdir().expect("a folder");
        let mut run = Run::start(out.path(), &more, &variables);
        run.says(&line);
        assert_eq!(interrupted(run, "-TERM", &line), "error: interrupted");
    }
}

#[needs(nothing)]
fn unresolvable_coordinator_fails_at_once() {
    let flags = ["--num-processes", "2", "--process-id", "1", "--coordinator", "no-such-host.invalid:8476"];
    let hosts = [("TPU_WORKER_ID", "0"), ("TPU_WORKER_HOSTNAMES", "no-such-host.invalid,b.invalid")];
    for (flags, variables, how) in [(&flags[..], &[][..], "flags, YAML"), (&[], &hosts, "TPU_WORKER_ID")] {
        let since = Instant::now();
        let mut run = support::ltx2();
        run.args(["generate", "-p", "x"]).args(flags).envs(variables.iter().copied());
        let ran = run.output().expect("runs");
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(1), "{said}");
        assert!(said.contains("'no-such-host.invalid' does not resolve: ") && said.contains(how), "{said}");
        assert!(since.elapsed() < Duration::from_secs(60), "the wait for processes is 600 s: {:?}", since.elapsed());
    }
}

/// Covers a reader that closes its end of stdout, and a stdout descriptor that is closed at the start.
#[needs(nothing)]
fn closed_stdout_is_not_an_error() {
    for words in ["--help", "generate --help", "schema", "completions bash"] {
        for closed in ["| head -c 1 > /dev/null", "| :", ">&-"] {
            let script = format!("\"$0\" {words} {closed}; exit ${{PIPESTATUS[0]}}");
            let own = support::ltx2();
            let ran = Command::new("bash").arg("-c").arg(&script).arg(own.get_program()).output().expect("runs");
            let said = String::from_utf8_lossy(&ran.stderr);
            assert_eq!((ran.status.code(), &*said), (Some(0), ""), "{words} {closed}");
        }
    }
}
