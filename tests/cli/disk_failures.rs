//! Outputs that cannot be written: a full or read-only file system, a file size limit, a folder that cannot be created,
//! streams that fail. Predictable failures are reported before the work starts, and computed results are not lost.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::support::{self, needs};
use ltx2::pipeline::output::{denoise_checkpoint, tensors};
use ltx2::runtime::processes::store::StoreServer;
use serde_json::Value;
use tempfile::TempDir;

/// Folder for videos, with a subfolder for temporary files.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Folder(tempfile::tempdir().expect("a folder"));
        fs::create_dir(folder.path("tmp")).expect("a folder");
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).expect("a folder");
        let mut names: Vec<String> = entries.map(|e| e.expect("one").file_name().to_string_lossy().into()).collect();
        names.sort();
        names
    }

    /// Returns a short run, started through the command `before`.
    fn generate(&self, before: &[&OsStr], out: &Path, more: &[&str]) -> Command {
        let own = support::ltx2();
        let own_words = [OsStr::new("env"), OsStr::new("PATH="), own.get_program()];
        let mut words = before.iter().copied().chain(own_words);
        let mut run = Command::new(words.next().expect("a program"));
        // The commands before it are found on the PATH.
        let variables = own.get_envs().filter(|(name, _)| *name != "PATH");
        run.args(words).envs(variables.filter_map(|(name, value)| Some((name, value?))));
        run.args(["generate", "-c", support::tiny(), "-o"]).arg(out).args(more).env("TMPDIR", self.path("tmp"));
        run
    }

    /// Runs `ltx2` in a mount namespace where the folder `disk` is a tmpfs with these mount `options`, prepared by the
    /// shell command `fill`; returns the files left in it.
    fn on_a_disk(&self, options: &str, fill: &str, out: &str, more: &[&str]) -> (Output, Vec<String>) {
        let (disk, left) = (self.path("disk"), self.path("tmp/left"));
        fs::create_dir_all(&disk).expect("a folder");
        let script = format!(
            "mount -t tmpfs -o {options} tmpfs \"$DISK\" || exit 99; {fill}; \
             \"$0\" \"$@\"; code=$?; ls -A \"$DISK\" > \"$LEFT\"; exit $code"
        );
        let before = ["unshare", "-rm", "sh", "-c", &script].map(OsStr::new);
        let mut run = self.generate(&before, &self.path(out), more);
        let ran = run.env("DISK", &disk).env("LEFT", &left).output().expect("runs");
        let names = fs::read_to_string(&left).expect("names").lines().map(str::to_string).collect();
        fs::remove_file(left).expect("removed");
        (ran, names)
    }
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// Returns the only error line of a failed run.
fn error(out: &Output) -> String {
    let said = stderr(out);
    assert_eq!(out.status.code(), Some(1), "{said}");
    let errors: Vec<&str> = said.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one line says it: {said}");
    errors[0].to_string()
}

fn sidecar(video: &Path) -> Value {
    let text = fs::read_to_string(video.with_extension("json")).expect("a sidecar");
    serde_json::from_str(&text).expect("JSON")
}

/// The disk has two free pages. A program and steps cannot be saved, which causes warnings; the video cannot be written,
/// which is an error.
#[needs(cpu, mount)]
fn full_disk_leaves_no_partial_files_and_keeps_results() {
    let folder = Folder::new();
    let disk = folder.path("disk");
    let cache = format!("runtime.compile_cache={}", disk.join("cache").display());
    let more = ["--checkpoint-every", "1", "--progress-every", "1", "--set", &cache];
    // All programs but one are cached already; short links take no page.
    support::copy_programs(&folder.path("k"), &["prepare"]);
    let fill = format!(
        "head -c 56k /dev/zero > \"$DISK/filler\"; mkdir \"$DISK/cache\"; ln -s '{}'/* \"$DISK/cache\"",
        folder.path("k").display()
    );
    let (ran, left) = folder.on_a_disk("size=64k", &fill, "disk/out.mp4", &more);
    let said = stderr(&ran);
    let full = "No space left on device";
    let warnings = |words: &str| said.lines().filter(|l| l.contains(words) && l.contains(full)).count();
    assert_eq!(warnings("not written to the compile cache"), 1, "{said}");
    assert!(warnings("cannot save the steps: ") > 0, "{said}");
    let error = error(&ran);
    assert!(error.contains(disk.join("out.mp4").to_str().expect("UTF-8")) && error.contains(full), "{error}");
    // The first checkpoint used the last pages; later checkpoints fail, and the first one is kept.
    assert_eq!(left, ["cache", "filler", "out.mp4.steps.safetensors"], "{said}");

    assert!(error.contains("; the frames, audio samples and latents are kept in "), "{error}");
    let kept = support::kept_file(&error);
    assert!(Path::new(kept).starts_with(folder.path("tmp")), "{error}");
    assert_eq!(tensors::read(Path::new(kept)).expect("tensors")["frames"].shape(), [9, 96, 64, 3]);
    assert_eq!(folder.names("tmp").len(), 2, "{:?}", folder.names("tmp"));
    assert_eq!(
        sidecar(Path::new(kept))["sha256"]["frames"].as_str().map(str::len),
        Some(64),
        "the sidecar has the hash of the frames"
    );
}

/// If saving the frames fails, the video and its sidecar are kept, and so are the frames written before.
#[needs(cpu, mount)]
fn failed_frame_output_keeps_video_and_sidecar() {
    let folder = Folder::new();
    let path = |name: &str| folder.path(name).display().to_string();
    let (frames, sound) = (path("disk"), path("sound.wav"));
    let (dump, times) = (path("dump.safetensors"), path("times.json"));
    let more = ["--save-frames", &frames, "--save-audio", &sound, "--dump", &dump, "--perf-json", &times];
    let (ran, left) = folder.on_a_disk("size=64k", ":", "out.mp4", &more);
    let error = error(&ran);
    assert!(error.contains(&frames) && error.contains("No space left on device"), "{error}");
    assert!(!left.is_empty() && left.iter().all(|name| name.starts_with("frame_0000")), "{left:?}");
    let warning = format!("output.save_frames: {frames} has 0.06 MiB free, but the files to write there may need 0.08");
    assert!(stderr(&ran).contains(&warning), "no warning about free space: {}", stderr(&ran));
    let all = ["disk", "dump.safetensors", "out.json", "out.mp4", "sound.wav", "times.json", "tmp"];
    assert_eq!(folder.names(""), all);
    let told = |line: &str| line == path("out.mp4");
    assert!(stderr(&ran).lines().any(told), "the video's path is printed: {}", stderr(&ran));
    assert!(sidecar(&folder.path("out.mp4"))["sha256"]["frames"].is_string());
    // The next run finds an empty disk and succeeds.
    let whole = folder.generate(&[], &folder.path("again.mp4"), &[]).output().expect("runs");
    assert!(whole.status.success(), "{}", stderr(&whole));
    assert_eq!(sidecar(&folder.path("again.mp4"))["sha256"], sidecar(&folder.path("out.mp4"))["sha256"]);
}

/// The size of a run's files is known in advance, so insufficient space is reported before the work starts.
#[needs(cpu, mount)]
fn insufficient_disk_space_is_reported_before_work_starts() {
    // The space for frames depends on their number and size, which are small for the toy model.
    let large = ["--width", "1920", "--height", "1088", "--num-frames", "257"];
    for (key, flag, name, size, more) in [
        ("output.save_audio", "--save-audio", "disk/sound.wav", ("size=8k", "0.01"), &large[..0]),
        ("--dump", "--dump", "disk/dump.safetensors", ("size=256k", "0.25"), &[]),
        ("output.path", "-o", "disk/out.mp4", ("size=32k", "0.03"), &large),
        ("output.save_frames", "--save-frames", "disk/frames", ("size=1m", "1.00"), &large),
    ] {
        let folder = Folder::new();
        let (path, disk) = (folder.path(name).display().to_string(), folder.path("disk").display().to_string());
        let (out, flags) = if flag == "-o" { (name, vec![]) } else { ("out.mp4", vec![flag, &path]) };
        let (ran, left) = folder.on_a_disk(size.0, ":", out, &[&flags, more].concat());
        let error = error(&ran);
        let needs = format!(" has {} MiB free, but the files to write there need at least ", size.1);
        assert!(error.starts_with(&format!("error: {key}: {disk}")) && error.contains(&needs), "{error}");
        assert!(error.ends_with("; free some space, or write to another disk"), "{error}");
        assert!(!stderr(&ran).contains("denoise"), "nothing was begun: {}", stderr(&ran));
        assert_eq!(left, [""; 0], "the folder of frames was tried, and is not left");
        assert_eq!(folder.names(""), ["disk", "tmp"], "nothing is left");
    }
}

#[needs(cpu, mount)]
fn read_only_disk_is_reported_before_opening_model() {
    let folder = Folder::new();
    let path = |name: &str| folder.path(name).display().to_string();
    let (dump, times) = (path("disk/dump.safetensors"), path("disk/times.json"));
    let (frames, sound) = (path("disk/frames"), path("disk/sound.wav"));
    let cases: [(&str, &[&str]); 5] = [
        ("disk/out.mp4", &[]),
        ("out.mp4", &["--dump", &dump]),
        ("out.mp4", &["--perf-json", &times]),
        ("out.mp4", &["--save-frames", &frames]),
        ("out.mp4", &["--save-audio", &sound]),
    ];
    for (out, more) in cases {
        let (ran, left) = folder.on_a_disk("ro", ":", out, more);
        let error = error(&ran);
        assert!(error.contains("Read-only file system") && error.contains(&path("disk")), "{more:?}: {error}");
        assert_eq!(left, [""; 0]);
    }
    assert_eq!(folder.names(""), ["disk", "tmp"], "nothing is left");
}

#[needs(cpu)]
fn only_first_process_writes_outputs() {
    let folder = Folder::new();
    let place = StoreServer::start("127.0.0.1:0").expect("listens").address().to_string();
    let (frames, sound) = (folder.path("frames").display().to_string(), folder.path("sound.wav").display().to_string());
    let runs = ["0", "1"].map(|process| {
        let own = ["--coordinator", &place, "--num-processes", "2", "--process-id", process];
        let more = [&own[..], &["--save-frames", &frames, "--save-audio", &sound]].concat();
        let mut run = folder.generate(&[], &folder.path("out.mp4"), &more);
        run.env("LTX2_REHEARSE_PROCESSES", "1").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts")
    });
    for run in runs {
        let ended = run.wait_with_output().expect("ends");
        assert!(ended.status.success(), "{}", stderr(&ended));
    }
    assert_eq!(folder.names(""), ["frames", "out.json", "out.mp4", "sound.wav", "tmp"]);
    assert_eq!(folder.names("frames").len(), 9);
}

#[needs(nothing)]
fn uncreatable_output_folder_is_reported_before_opening_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("taken"), "a file").expect("written");
    let flags = [
        ("-o", "out.mp4", "output.path"),
        ("--dump", "dump.safetensors", "--dump"),
        ("--perf-json", "times.json", "--perf-json"),
        ("--save-frames", "frames", "output.save_frames"),
        ("--save-audio", "sound.wav", "output.save_audio"),
    ];
    for (flag, name, key) in flags {
        let mut run = support::ltx2();
        run.args(["generate", "-p", "x", "--model", "no/such/model", flag, &path(&format!("taken/{name}"))]);
        if flag != "-o" {
            run.args(["-o", &path("out.mp4")]);
        }
        let error = error(&run.output().expect("runs"));
        assert!(error.starts_with(&format!("error: {key}: cannot create folder")), "{flag}: {error}");
        assert!(error.contains(&path("taken")), "{flag}: {error}");
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing is left");

    // A folder instead of a file.
    fs::create_dir(path("folder.wav")).expect("a folder");
    let mut run = support::ltx2();
    run.args(["generate", "-p", "x", "--model", "no/such/model", "-o", &path("out.mp4"), "--save-audio"]);
    let error = error(&run.arg(path("folder.wav")).output().expect("runs"));
    assert!(error.starts_with("error: output.save_audio: cannot write") && error.contains("directory"), "{error}");
}

/// Commands other than `generate` check their output files and caches before they look for a model or a plugin.
#[needs(nothing)]
fn unwritable_report_file_is_reported_before_opening_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let taken = folder.path().join("taken");
    fs::write(&taken, "a file").expect("written");
    let file = taken.join("figures").display().to_string();
    let profile = folder.path().join("profile").display().to_string();
    let cache = format!("runtime.compile_cache={file}");
    let commands: [&[&str]; 8] = [
        &["run", "transformer", "--model", "no/such", "--inputs", "no.safetensors", "-o", &file],
        &["bench", "-c", "nano_2_0", "--model", "no/such", "--json", &file],
        &["bench", "--micro", "--platform", "nowhere.so", "--json", &file],
        &["compile", "-c", "ltx2", "--target", "tpu:v6e:2x4", "--json", &file],
        &["compile", "-c", "ltx2", "--target", "tpu:v6e:2x4", "--save", &file],
        &["warm", "-c", "nano_2_0", "--model", "no/such", "--set", &cache],
        &["why", "-c", "ltx2", "--target", "tpu:v6e:2x4", "--json", &file],
        &["profile", "-c", "nano_2_0", "--model", "no/such", "-o", &profile, "--json", &file],
    ];
    // A folder instead of a file.
    let place = folder.path().display().to_string();
    let mut run = support::ltx2();
    let ran = run.args(["bench", "-c", "nano_2_0", "--model", "no/such", "--json", &place]).output().expect("runs");
    assert!(error(&ran).contains("cannot write") && error(&ran).contains("directory"), "{}", error(&ran));
    for words in commands {
        let error = error(&support::ltx2().args(words).env("LTX2_PJRT_PLUGIN", "/nowhere.so").output().expect("runs"));
        assert!(error.contains("cannot create folder") && error.contains("taken"), "{words:?}: {error}");
    }
}

#[needs(nothing)]
fn uncreatable_cache_is_reported_once_before_opening_model() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("file"), "no folder").expect("written");
    let cache = folder.path().join("file/cache");
    let mut run = support::ltx2();
    run.args(["generate", "-p", "x", "--model", "no/such/model", "-o"]).arg(folder.path().join("out.mp4"));
    let ran = run.env("LTX2_COMPILE_CACHE", &cache).output().expect("runs");
    let (said, words) = (stderr(&ran), "runtime.compile_cache: cannot");
    assert!(error(&ran).contains("no/such/model"), "{said}");
    assert!(said.find(words).is_some_and(|first| first < said.find("error: ").expect("the error")), "{said}");
    assert_eq!(said.matches(words).count(), 1, "{said}");

    // `check` reports it as the run does, if it validates a request.
    for (config, count) in [(&["-c", "nano"][..], 1), (&[], 0)] {
        let mut check = support::ltx2();
        check.args(["check", "assets/nano"]).args(config);
        let checked = check.env("LTX2_COMPILE_CACHE", &cache).output().expect("runs");
        let said = stderr(&checked);
        assert_eq!(said.matches(words).count(), count, "{config:?}: {said}");
    }
}

/// Writes exceed the file size limit. SIGXFSZ, which would terminate the process, must be ignored.
#[needs(cpu)]
fn file_size_limit_gives_one_error_and_no_partial_files() {
    let folder = Folder::new();
    let limited = |blocks: &str, more: &[&str]| {
        // Resets SIGXFSZ, because a parent process that ignores it would hide that `ltx2` does not.
        let script = format!("ulimit -f {blocks}; exec env --default-signal=XFSZ \"$0\" \"$@\"");
        let before = ["sh", "-c", &script].map(OsStr::new);
        folder.generate(&before, &folder.path("out.mp4"), more).output().expect("runs")
    };
    let ran = limited("1", &[]);
    let said = error(&ran);
    assert!(said.contains("out.mp4") && said.contains("File too large"), "{said}");
    assert_eq!(folder.names(""), ["tmp"], "nothing is left");
    assert_eq!(folder.names("tmp"), [""; 0], "nothing is left");

    // The video fits, but the checkpoint's name is a folder: the run reports it and continues.
    let steps = denoise_checkpoint::path_of(&folder.path("out.mp4"));
    fs::create_dir(&steps).expect("a folder");
    let ran = limited("200", &["--checkpoint-every", "1", "--progress-every", "1"]);
    let said = stderr(&ran);
    assert!(ran.status.success(), "{said}");
    assert!(said.contains("cannot save the steps: ") && said.contains(steps.to_str().expect("UTF-8")), "{said}");
    fs::remove_dir(&steps).expect("empty");
    assert_eq!(folder.names(""), ["out.json", "out.mp4", "tmp"], "{said}");
}

#[needs(cpu)]
fn uncreatable_cache_folder_causes_only_a_warning() {
    let folder = Folder::new();
    fs::write(folder.path("file"), "no folder").expect("written");
    let cache = folder.path("file/cache").display().to_string();
    let upsampled = |cache: &str| {
        let mut run = support::run_upsampler(folder.0.path());
        let ran = run.env("LTX2_COMPILE_CACHE", cache).output().expect("runs");
        assert!(ran.status.success(), "{}", stderr(&ran));
        (tensors::read(&folder.path("out.safetensors")).expect("results"), stderr(&ran))
    };
    let (without, said) = upsampled(&cache);
    let warnings = said.lines().filter(|l| l.contains("WARN") && l.contains(&cache) && l.contains("\"upsampler\""));
    assert_eq!(warnings.count(), 1, "{said}");
    let (with, said) = upsampled(&support::programs().display().to_string());
    assert!(!said.contains("WARN"), "{said}");
    assert_eq!(with, without);
    assert_eq!(fs::read(folder.path("file")).expect("the file still exists"), b"no folder");
}

/// Logs are often redirected to files: if their disk is full, the video is still written.
#[needs(cpu)]
fn unwritable_stdout_or_stderr_keeps_the_video() {
    let folder = Folder::new();
    let full = || File::options().write(true).open("/dev/full").expect("a device");
    let video = folder.path("out.mp4");
    let run = |out: Stdio, err: Stdio| {
        let mut run = folder.generate(&[], &video, &["--force", "--progress-every", "1"]);
        let ran = run.stdout(out).stderr(err).output().expect("runs");
        assert_eq!(sidecar(&video)["config"]["sampler"]["steps"], 3);
        fs::remove_file(&video).expect("the video");
        ran
    };
    let ran = run(Stdio::piped(), full().into());
    assert_eq!(
        (ran.status.code(), String::from_utf8_lossy(&ran.stdout).trim()),
        (Some(0), video.to_str().expect("UTF-8"))
    );
    let ran = run(full().into(), Stdio::piped());
    assert!(error(&ran).contains("cannot write to stdout: No space left on device"), "{}", stderr(&ran));

    for command in [&["schema"][..], &["check", "nowhere"], &["doctor"]] {
        let mut ltx2 = support::ltx2();
        let ran = ltx2.args(command).stdout(full()).stderr(full()).output().expect("runs");
        assert_eq!(ran.status.code(), Some(1), "{command:?}");
    }
}
