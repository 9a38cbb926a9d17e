//! Test harness of the integration tests. It checks the requirements of a test before running it: a test whose plugin,
//! tool or device is missing is reported as *ignored, because …*, or fails if `LTX2_REQUIRE` lists the requirement. It
//! never passes.
//!
//! | variable | effect |
//! |---|---|
//! | `LTX2_REQUIRE=cpu,ffmpeg` | a missing requirement of these is a failure |
//! | `LTX2_TEST_FULL=1` | runs the tests of `make test-full` too |
//! | `LTX2_TEST_CHIP=v6e` | for `cargo test --test tpu`: only the kernel and slices of this chip |
//! | `LTX2_PARITY_LOG=FILE` | appends a JSON line per comparison with a reference (`scripts/tests/parity_table.py`) |
//! | `LTX2_SERVE_FIGURES=FILE` | appends a JSON line per figure of the server (`make serve-load`) |
//! | `LTX2_TEST_LOG=FILE` | appends a JSON line per test: name, seconds, outcome, reason, and whether it ran in its short form |

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

/// Registered test.
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
    /// Only this repository.
    Nothing,
    /// The CPU plugin.
    Cpu,
    /// libtpu, used as a compiler.
    Tpu,
    /// A machine without TPU chips.
    NoTpu,
    /// CUDA plugin, used as a compiler.
    Cuda,
    /// An NVIDIA GPU.
    Gpu,
    /// Two NVIDIA GPUs.
    Gpus,
    /// Four NVIDIA GPUs.
    FourGpus,
    /// ffmpeg and ffprobe.
    Ffmpeg,
    /// The etcd server program.
    Etcd,
    /// Permission to mount a file system in a new namespace.
    Mount,
    /// Attention kernels exported from JAX.
    Jax,
    /// The repository's git history, which a shallow clone lacks.
    History,
    /// More time than `make test` has.
    Full,
    /// No other test running; such tests run at the end of `make test-full`.
    Alone,
    /// Started as a child process by another test.
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
    /// Returns the name in `#[needs(…)]` and `LTX2_REQUIRE`.
    fn name(self) -> String {
        let words = format!("{self:?}");
        let letters = words.char_indices().flat_map(|(i, c)| {
            let between = (i > 0 && c.is_uppercase()).then_some('_');
            between.into_iter().chain(c.to_lowercase())
        });
        letters.collect()
    }

    /// Returns why the requirement is not met; `None` if it is.
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
    /// Whether the test of this thread ran in its short form.
    static SHORT: Cell<bool> = const { Cell::new(false) };
    /// Whether the test of this thread does not require ffmpeg; true in threads that a test starts.
    static HIDES_FFMPEG: Cell<bool> = const { Cell::new(true) };
}

/// Returns whether commands of this test must not find ffmpeg, which it does not require: with the built-in encoders a
/// run takes four fifths of the time, and gives the same bytes on every machine.
#[allow(dead_code)] // Not every binary runs commands.
pub fn hides_ffmpeg() -> bool {
    HIDES_FFMPEG.get()
}

/// Returns whether this is a run of `make test-full`, in which tests cover all combinations. Otherwise records that the
/// test runs in its short form.
pub fn full() -> bool {
    let full = std::env::var_os("LTX2_TEST_FULL").is_some();
    SHORT.set(SHORT.get() || !full);
    full
}

/// Returns the number of NVIDIA GPUs of this machine.
pub fn gpus() -> usize {
    let listed = Command::new("nvidia-smi").arg("-L").stderr(Stdio::null()).output();
    listed.map_or(0, |out| String::from_utf8_lossy(&out.stdout).lines().filter(|l| l.starts_with("GPU ")).count())
}

fn runs(tool: &str, arguments: &[&str]) -> bool {
    let ran = Command::new(tool).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    ran.is_ok_and(|status| status.success())
}

/// Returns the requirements listed in `LTX2_REQUIRE`.
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

/// Shortens compilation to a quarter: XLA's older fusion emitters take a third of the time, and a module that is not
/// split for parallel compilation takes two thirds of the rest. XLA reads the variable once, so it must be set before
/// the process starts; child processes inherit it. `cli components` compares programs compiled with the default
/// emitters with the reference.
const XLA_FLAGS: &str =
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1";

/// Stack of a test's thread in bytes: unoptimized frames do not fit into Rust's default of 2 MiB.
const STACK: &str = "8388608";

/// Restarts this process with [`STACK`], and with [`XLA_FLAGS`] in the binaries that run programs, unless both are set.
fn restart_with_variables() {
    let compiles_quickly = ["it", "cli", "serve"].contains(&env!("CARGO_CRATE_NAME"));
    let variables = [("RUST_MIN_STACK", STACK, true), ("XLA_FLAGS", XLA_FLAGS, compiles_quickly)];
    let missing = variables.into_iter().filter(|(name, _, applies)| *applies && std::env::var_os(name).is_none());
    let missing: Vec<_> = missing.map(|(name, value, _)| (name, value)).collect();
    if !missing.is_empty() {
        let own = std::env::current_exe().expect("this file");
        let error = Command::new(own).args(std::env::args_os().skip(1)).envs(missing).exec();
        panic!("the tests' binary does not start again: {error}");
    }
}

/// Runs the tests of this binary that the command line selects.
pub fn main() -> ExitCode {
    restart_with_variables();
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
        // Required ones come first: they cause a failure whatever else is missing.
        let all = missing.iter().filter(|(need, _)| test.needs.contains(need));
        let lacks = all.map(|(need, reason)| (required.contains(need), reason.clone())).max_by_key(|(must, _)| *must);
        Trial::ignorable_test(name, move || run(name, test, lacks))
    };
    let trials = inventory::iter::<Test>.into_iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Runs a test, or returns why it is skipped.
fn run(name: &str, test: &Test, lacks: Option<(bool, String)>) -> Result<Completion, Failed> {
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
            HIDES_FFMPEG.set(!test.needs.contains(&Need::Ffmpeg));
            let outcome = catch_unwind(AssertUnwindSafe(test.run));
            log(name, started.elapsed(), if outcome.is_ok() { "passed" } else { "failed" }, None);
            outcome.map_or_else(|panic| resume_unwind(panic), |()| Ok(Completion::Completed))
        }
    }
}

/// Appends a line to `LTX2_TEST_LOG`.
fn log(name: &str, took: Duration, outcome: &str, reason: Option<&str>) {
    let binary = env!("CARGO_CRATE_NAME");
    let mut line =
        json!({"binary": binary, "test": name, "seconds": took.as_secs_f64(), "outcome": outcome, "reason": reason});
    line["short"] = SHORT.get().into();
    append("LTX2_TEST_LOG", &line);
}

/// Appends the distance of an output from the reference and its limit to `LTX2_PARITY_LOG`.
#[allow(dead_code)] // Not every binary compares.
pub fn note_distance(case: &str, output: &str, distance: f64, limit: f64) {
    append("LTX2_PARITY_LOG", &json!({"case": case, "output": output, "distance": distance, "limit": limit}));
}

/// Appends a server figure with its goal, and whether it meets the goal, to `LTX2_SERVE_FIGURES`.
#[allow(dead_code)] // As above.
pub fn note_figure(what: &str, goal: &str, figure: &str, met: bool) {
    eprintln!("{what}: {figure} (goal: {goal})");
    append("LTX2_SERVE_FIGURES", &json!({"what": what, "goal": goal, "figure": figure, "met": met}));
    // With the log file, missed goals are recorded too and judged by its reader.
    assert!(met || std::env::var_os("LTX2_SERVE_FIGURES").is_some(), "{what}: {figure} misses its goal, {goal}");
}

/// Appends a line to the file that an environment variable names, if it is set.
fn append(variable: &str, line: &serde_json::Value) {
    let Some(path) = std::env::var_os(variable) else { return };
    let file = OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|e| panic!("{variable} cannot be written: {e}"));
}
