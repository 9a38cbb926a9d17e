//! The harness of the integration tests. What a test needs is looked for before it runs: a test whose plugin, tool or
//! device is missing is *ignored, because …*, or fails where `LTX2_REQUIRE` names what it needs. It never passes.
//!
//! | variable | effect |
//! |---|---|
//! | `LTX2_REQUIRE=cpu,ffmpeg` | what is missing of these is a failure |
//! | `LTX2_TEST_FULL=1` | tests of `make test-full` run too |
//! | `LTX2_TEST_CHIP=v6e` | of `cargo test --test tpu`, the kernel and the slices of one chip |
//! | `LTX2_PARITY_LOG=FILE` | appends a JSON line a comparison with a reference (`scripts/tests/parity_table.py`) |
//! | `LTX2_SERVE_FIGURES=FILE` | appends a JSON line a figure of the server (`make serve-load`) |
//! | `LTX2_TEST_LOG=FILE` | appends a JSON line a test: its name, seconds, outcome, reason, and whether it took its short form |

use std::cell::Cell;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use ltx2::pjrt::discover::{self, Platform};
use serde_json::json;

/// A registered test.
pub struct Test {
    /// `binary::module::function`.
    pub name: &'static str,
    /// Requirements of the test.
    pub needs: &'static [Need],
    /// Body of the test.
    pub run: fn(),
}

inventory::collect!(Test);

/// Requirements of tests beyond this repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// No more than this repository.
    Nothing,
    /// The CPU plugin.
    Cpu,
    /// libtpu, as a compiler.
    Tpu,
    /// A machine without TPU chips.
    NoTpu,
    /// The CUDA plugin, as a compiler.
    Cuda,
    /// An NVIDIA GPU.
    Gpu,
    /// Two of them.
    Gpus,
    /// Four of them.
    FourGpus,
    /// ffmpeg and ffprobe.
    Ffmpeg,
    /// An etcd server's program.
    Etcd,
    /// Mounting a file system, in a namespace of a test's own.
    Mount,
    /// The attention kernels that JAX wrote.
    Jax,
    /// The repository's history, which a shallow clone lacks.
    History,
    /// More time than `make test` has.
    Full,
    /// To run with nothing beside it, at the end of `make test-full`.
    Alone,
    /// To be started by another test.
    Member,
}

const NEEDS: [Need; 16] = [
    Need::Nothing,
    Need::Cpu,
    Need::Tpu,
    Need::NoTpu,
    Need::Cuda,
    Need::Gpu,
    Need::Gpus,
    Need::FourGpus,
    Need::Ffmpeg,
    Need::Etcd,
    Need::Mount,
    Need::Jax,
    Need::History,
    Need::Full,
    Need::Alone,
    Need::Member,
];

impl Need {
    /// The name in `#[needs(…)]` and `LTX2_REQUIRE`.
    fn name(self) -> String {
        let words = format!("{self:?}");
        let letters = words.char_indices().flat_map(|(i, c)| {
            let between = (i > 0 && c.is_uppercase()).then_some('_');
            between.into_iter().chain(c.to_lowercase())
        });
        letters.collect()
    }

    /// Why it is not here; None where it is.
    fn missing(self) -> Option<String> {
        let plugin = |kind: Platform| match discover::find(kind, None).found.is_empty() {
            true => Some(format!("no {0} plugin: run `ltx2 plugin install {0}`", kind.name())),
            false => None,
        };
        let gpus = |wanted: usize| (gpus() < wanted).then(|| format!("{} of {wanted} NVIDIA GPUs", gpus()));
        let tool = |name: &str, flag: &str| (!runs(name, &[flag])).then(|| format!("no {name}"));
        let mount = ["-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"];
        match self {
            Need::Nothing => None,
            Need::Cpu => plugin(Platform::Cpu),
            Need::Tpu => plugin(Platform::Tpu),
            Need::NoTpu => {
                let chips = ["/dev/accel0", "/dev/vfio/0"].into_iter().find(|path| Path::new(path).exists());
                chips.map(|path| format!("TPU chips are here ({path})"))
            }
            Need::Cuda => plugin(Platform::Cuda),
            Need::Gpu => gpus(1).or_else(|| plugin(Platform::Cuda)),
            Need::Gpus => gpus(2).or_else(|| plugin(Platform::Cuda)),
            Need::FourGpus => gpus(4).or_else(|| plugin(Platform::Cuda)),
            Need::Ffmpeg => tool("ffmpeg", "-version").or_else(|| tool("ffprobe", "-version")),
            Need::Etcd => tool("etcd", "--version"),
            Need::Mount => {
                (!runs("unshare", &mount)).then(|| "no mounting: `unshare -rm mount` is not permitted".into())
            }
            Need::Jax => {
                std::env::var_os("LTX2_JAX_FLASH").is_none().then(|| "no kernels by JAX: `make test-mosaic`".into())
            }
            Need::History => {
                let shallow = Command::new("git").args(["rev-parse", "--is-shallow-repository"]).output();
                let is_whole = shallow.is_ok_and(|out| out.status.success() && out.stdout.starts_with(b"false"));
                (!is_whole).then(|| "no history of the repository: a shallow clone, or no git".into())
            }
            Need::Full => (!full()).then(|| "runs in `make test-full`".into()),
            Need::Alone => {
                std::env::var_os("LTX2_TEST_ALONE").is_none().then(|| "runs by itself in `make test-full`".into())
            }
            Need::Member => {
                std::env::var_os("LTX2_TEST_MEMBER").is_none().then(|| "it is started by other tests".into())
            }
        }
    }
}

thread_local! {
    /// Whether the test of this thread was told to take its short form.
    static SHORT: Cell<bool> = const { Cell::new(false) };
}

/// Whether `make test-full` runs: all combinations in place of pairs.
pub fn full() -> bool {
    let full = std::env::var_os("LTX2_TEST_FULL").is_some();
    SHORT.set(SHORT.get() || !full);
    full
}

/// NVIDIA GPUs of this machine.
pub fn gpus() -> usize {
    let listed = Command::new("nvidia-smi").arg("-L").stderr(Stdio::null()).output();
    listed.map_or(0, |out| String::from_utf8_lossy(&out.stdout).lines().filter(|l| l.starts_with("GPU ")).count())
}

fn runs(tool: &str, arguments: &[&str]) -> bool {
    let ran = Command::new(tool).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    ran.is_ok_and(|status| status.success())
}

/// The needs that `LTX2_REQUIRE` names.
fn required() -> Result<Vec<Need>, String> {
    let given = std::env::var("LTX2_REQUIRE").unwrap_or_default();
    let need = |word: &str| {
        let known = NEEDS.iter().find(|need| need.name() == word);
        known.copied().ok_or_else(|| {
            let all: Vec<String> = NEEDS.iter().map(|need| need.name()).collect();
            format!("LTX2_REQUIRE: '{word}' is none of {}", all.join(", "))
        })
    };
    given.split(',').filter(|word| !word.is_empty()).map(need).collect()
}

/// XLA's older emitters of fused operations, with which the CPU compiler takes a third of the time. There is no compile
/// option that says it, only the variable that XLA reads once, so it is set before this process begins; the binaries that
/// tests start inherit it. The reference is also met by programs as users compile them: `cli components`.
const XLA_FLAGS: &str = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters";

/// Begins this process again with [`XLA_FLAGS`], where nobody set others.
fn with_older_emitters() {
    if ["it", "cli", "serve"].contains(&env!("CARGO_CRATE_NAME")) && std::env::var_os("XLA_FLAGS").is_none() {
        let own = std::env::current_exe().expect("this file");
        let error = Command::new(own).args(std::env::args_os().skip(1)).env("XLA_FLAGS", XLA_FLAGS).exec();
        panic!("the tests' binary does not start again: {error}");
    }
}

/// Runs the tests of this binary that the command line selects.
pub fn main() -> ExitCode {
    with_older_emitters();
    let required = match required() {
        Ok(required) => required,
        Err(message) => {
            eprintln!("error: {message}");
            return ExitCode::from(2);
        }
    };
    let missing: Vec<(Need, String)> = NEEDS.into_iter().filter_map(|need| Some((need, need.missing()?))).collect();
    let trial = |test: &'static Test| {
        let (_, name) = test.name.split_once("::").expect("a path below the binary");
        // One that is required comes first: it is a failure whatever else is missing.
        let all = missing.iter().filter(|(need, _)| test.needs.contains(need));
        let lacks = all.map(|(need, reason)| (required.contains(need), reason.clone())).max_by_key(|(must, _)| *must);
        Trial::ignorable_test(name, move || run(name, test.run, lacks))
    };
    let trials = inventory::iter::<Test>.into_iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// A test, or why it is not run.
fn run(name: &str, test: fn(), lacks: Option<(bool, String)>) -> Result<Completion, Failed> {
    match lacks {
        Some((true, reason)) => {
            log(name, Duration::ZERO, "failed", Some(&reason));
            Err(Failed::from(format!("{reason}, and LTX2_REQUIRE demands it")))
        }
        Some((false, reason)) => {
            log(name, Duration::ZERO, "ignored", Some(&reason));
            Ok(Completion::ignored_with(reason))
        }
        None => {
            let started = Instant::now();
            SHORT.set(false);
            let outcome = catch_unwind(AssertUnwindSafe(test));
            log(name, started.elapsed(), if outcome.is_ok() { "passed" } else { "failed" }, None);
            outcome.map_or_else(|panic| resume_unwind(panic), |()| Ok(Completion::Completed))
        }
    }
}

/// Appends to `LTX2_TEST_LOG`.
fn log(name: &str, took: Duration, outcome: &str, reason: Option<&str>) {
    let binary = env!("CARGO_CRATE_NAME");
    let mut line =
        json!({"binary": binary, "test": name, "seconds": took.as_secs_f64(), "outcome": outcome, "reason": reason});
    line["short"] = SHORT.get().into();
    append("LTX2_TEST_LOG", &line);
}

/// Appends how far an output of a case is from the reference's, and how far it may be, to `LTX2_PARITY_LOG`.
#[allow(dead_code)] // Not every binary compares.
pub fn note_distance(case: &str, output: &str, distance: f64, limit: f64) {
    append("LTX2_PARITY_LOG", &json!({"case": case, "output": output, "distance": distance, "limit": limit}));
}

/// Appends a figure of the server beside its goal, and whether it meets it, to `LTX2_SERVE_FIGURES`.
#[allow(dead_code)] // As above.
pub fn note_figure(what: &str, goal: &str, figure: &str, met: bool) {
    eprintln!("{what}: {figure} (goal: {goal})");
    append("LTX2_SERVE_FIGURES", &json!({"what": what, "goal": goal, "figure": figure, "met": met}));
    // Whoever reads the file judges the goals: all figures are wanted, missed ones, too.
    assert!(met || std::env::var_os("LTX2_SERVE_FIGURES").is_some(), "{what}: {figure} misses its goal, {goal}");
}

/// Appends a line to the file that a variable names, where it does.
fn append(variable: &str, line: &serde_json::Value) {
    let Some(path) = std::env::var_os(variable) else { return };
    let file = OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|e| panic!("{variable} cannot be written: {e}"));
}
