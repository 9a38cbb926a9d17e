//! Broken plugins and interrupted installs: untrusted code is only loaded after its checksum is verified or a trial
//! succeeds, and a failure gives a single error line.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::standin::{Fault, INTERNAL, INVALID_ARGUMENT, Load, Standin};
use crate::support::{self, needs};
use ltx2::pjrt::discover::{self, Platform};
use ltx2::runtime::platforms::alternatives;
use sha2::{Digest, Sha256};

/// Number of killed installs, at times spread over the duration of an install.
const KILLED_INSTALLS: usize = 20;

fn error(out: &Output) -> String {
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    let errors: Vec<&str> = stderr.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one line says it: {stderr}");
    errors[0].to_string()
}

/// Returns `ltx2 plugin install cpu` into the subfolder `plugins`, with wheels only from the subfolder `wheels` and an
/// empty PATH.
fn install_command(dir: &Path) -> Command {
    let mut command = support::ltx2();
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PIP_")) {
        command.env_remove(name);
    }
    fs::create_dir_all(dir.join("wheels")).expect("a folder");
    command.args(["plugin", "install", "cpu", "--dir"]).arg(dir.join("plugins"));
    command.env("PIP_CONFIG_FILE", "/dev/null").env("PIP_NO_INDEX", "1").env("PIP_FIND_LINKS", dir.join("wheels"));
    command.env("PATH", "/nonexistent");
    command
}

/// Returns the entries of the plugin folder, without the lock file.
fn left(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir.join("plugins")).expect("the folder");
    let names = entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned());
    names.filter(|name| name != ".cpu.lock").collect()
}

/// Returns the file name of the pinned wheel, taken from the error of an install that does not find it.
fn pinned_wheel_name() -> String {
    let dir = tempfile::tempdir().expect("a folder");
    let said = error(&install_command(dir.path()).output().expect("runs"));
    let (_, wanted) = said.split_once("none of the 0 listed files is ").unwrap_or_else(|| panic!("{said}"));
    let words: Vec<&str> = wanted.split([' ', ';']).collect();
    assert_eq!(words[2], "for", "{said}");
    format!("{}-{}-py3-none-{}.whl", words[0].replace('-', "_"), words[1], words[3])
}

/// Only one install at a time uses a folder: another waits, then finds the plugin or installs it. Files of a killed
/// install are removed.
#[needs(nothing)]
fn concurrent_installs_wait_for_each_other() {
    let dir = tempfile::tempdir().expect("a folder");
    let plugins = dir.path().join("plugins");
    fs::create_dir_all(plugins.join(".install-cpu-killed")).expect("a folder");
    let lock = fs::File::create(plugins.join(".cpu.lock")).expect("a file");
    lock.lock().expect("locked");
    let index = TcpListener::bind("127.0.0.1:0").expect("a port");
    index.set_nonblocking(true).expect("set");
    let mut run = install_command(dir.path());
    run.env_remove("PIP_NO_INDEX").env("PIP_INDEX_URL", format!("http://{}/simple", index.local_addr().expect("one")));
    run.env("NO_PROXY", "127.0.0.1").env_remove("PIP_FIND_LINKS");
    let mut process = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    let mut lines = BufReader::new(process.stderr.take().expect("piped")).lines().map_while(Result::ok);
    assert!(
        lines.any(|line| line.starts_with("waiting for another install")),
        "the second install reports that it waits"
    );
    std::thread::sleep(Duration::from_millis(100));
    assert!(
        process.try_wait().expect("a process").is_none() && index.accept().is_err(),
        "the second install did not wait"
    );
    assert_eq!(left(dir.path()), [".install-cpu-killed"]);
    lock.unlock().expect("unlocked");
    index.set_nonblocking(false).expect("set");
    let (mut asked, _) = index.accept().expect("the install asks the index");
    assert!(asked.read(&mut [0; 4096]).expect("a request") > 0);
    asked.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n").expect("answered");
    let said: Vec<String> = lines.collect();
    assert_eq!(process.wait().expect("ends").code(), Some(1));
    assert!(said.iter().any(|line| line.contains("404 Not Found")), "{said:?}");
    assert_eq!(left(dir.path()), [""; 0], "leftover files are removed");
}

/// An install that is killed at any time leaves a complete plugin or none; the next install succeeds.
#[needs(cpu, full)]
fn killed_install_is_never_used_as_plugin() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("plugins/cpu");
    // Download the wheel first, so that the kills hit copying, verifying and unpacking.
    let name = pinned_wheel_name();
    let [package, version, .., platform] = name.trim_end_matches(".whl").split('-').collect::<Vec<_>>()[..] else {
        panic!("{name}");
    };
    let pip = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--platform", platform, "--dest"];
    let mut download = Command::new("python3");
    download.args(pip).arg(dir.path().join("wheels")).arg(format!("{package}=={version}"));
    let downloaded = download.output().expect("python3 runs");
    assert!(downloaded.status.success(), "{}", String::from_utf8_lossy(&downloaded.stderr));
    let run = || {
        let mut run = install_command(dir.path());
        run.stdout(Stdio::null()).stderr(Stdio::piped());
        run
    };
    // Returns the checksum of the installed plugin, if its stamp file exists.
    let checked = || {
        let plugin = discover::in_folder(Platform::Cpu, &file).filter(|_| file.join("installed.txt").exists())?;
        Some(hex::encode(Sha256::digest(fs::read(plugin).expect("a plugin"))))
    };
    let install = || {
        let _ = fs::remove_dir_all(&file);
        let started = Instant::now();
        let ran = run().output().expect("runs");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        (checked().expect("a plugin"), started.elapsed())
    };
    install();
    let (whole, mut took) = install();
    let mut killed = 0;
    for n in 0..5 * KILLED_INSTALLS {
        if killed == KILLED_INSTALLS {
            break;
        }
        let _ = fs::remove_dir_all(&file);
        let started = Instant::now();
        let mut child = run().spawn().expect("starts");
        std::thread::sleep(took.mul_f64((n as f64 * 0.618_034).fract()));
        child.kill().expect("is killed");
        match child.wait().expect("gone").signal() {
            Some(9) => killed += 1,
            _ => took = took.min(started.elapsed()),
        }
        assert!(checked().is_none_or(|sum| sum == whole), "kill {n}");
    }
    assert_eq!(killed, KILLED_INSTALLS);
    assert_eq!(install().0, whole);
    assert_eq!(left(dir.path()), ["cpu"]);
}

/// The wheel has the right name but other contents, and comes from a folder without checksums.
#[needs(nothing)]
fn download_with_wrong_checksum_is_rejected() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut run = install_command(dir.path());
    fs::write(dir.path().join("wheels").join(pinned_wheel_name()), "code").expect("written");
    let said = error(&run.output().expect("runs"));
    let sum = hex::encode(Sha256::digest("code"));
    assert!(
        said.contains(&format!("sha256 is {sum}, expected ")) && said.contains("refusing to install an unknown file")
    );
    assert_eq!(left(dir.path()), [""; 0], "nothing is installed");
}

/// One location does not exist, and one contains other files.
#[needs(nothing)]
fn failed_download_lists_each_location_with_reason() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut run = install_command(dir.path());
    fs::write(dir.path().join("wheels/other-1.0-py3-none-any.whl"), "code").expect("written");
    let closed = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
    run.env("PIP_NO_INDEX", "0").env("PIP_INDEX_URL", format!("http://me:secret@{closed}/simple")).env("NO_PROXY", "*");
    let said = error(&run.output().expect("runs"));
    let words = [
        ": cannot download the wheel: ",
        "/wheels: none of the 1 listed files is ",
        "onnection refused",
        "PIP_INDEX_URL",
    ];
    assert!(words.iter().all(|words| said.contains(words)) && !said.contains("secret"), "{said}");
    assert_eq!(left(dir.path()), [""; 0]);
}

/// `--index` replaces pip's settings: here, a folder of wheels and no index.
#[needs(nothing)]
fn index_flag_replaces_configured_locations() {
    let dir = tempfile::tempdir().expect("a folder");
    let closed = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
    let mut run = install_command(dir.path());
    run.args(["--index", &format!("http://{closed}/simple")]).env("NO_PROXY", "*");
    let said = error(&run.output().expect("runs"));
    assert!(said.contains(&format!("http://{closed}/simple/lammps-jax-pjrt-cpu/: ")), "{said}");
    assert!(!said.contains("/wheels") && !said.contains("PIP_NO_INDEX disables"), "{said}");
    assert_eq!(left(dir.path()), [""; 0]);
}

/// Answers the next request for a page or file below `/`; returns the request's head. `cut`: bytes of the body to send
/// before the connection is closed.
fn serve_wheel(listener: &TcpListener, name: &str, body: &[u8], cut: usize) -> String {
    loop {
        let (mut stream, _) = listener.accept().expect("a request");
        let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
        let head: Vec<String> = lines.by_ref().take_while(|line| !line.is_empty()).collect();
        let head = head.join("\n").to_lowercase();
        let is_wheel = head.lines().next().is_some_and(|line| line.contains(".whl"));
        let page = format!("<a href=\"/{name}\">{name}</a>");
        let begin = head
            .split_once("range: bytes=")
            .map_or(0, |(_, rest)| rest.split('-').next().and_then(|first| first.parse().ok()).expect("a range"));
        let (status, kind, rest) = match is_wheel {
            true if begin > 0 => {
                let range =
                    format!("206 Partial Content\r\ncontent-range: bytes {begin}-{}/{}", body.len() - 1, body.len());
                (range, "application/zip", &body[begin..])
            }
            true => ("200 OK".to_string(), "application/zip", body),
            false => ("200 OK".to_string(), "text/html", page.as_bytes()),
        };
        let length = rest.len();
        let answer = format!(
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(answer.as_bytes()).expect("sent");
        stream.write_all(if is_wheel { &rest[..cut.min(length)] } else { rest }).expect("sent");
        if is_wheel {
            return head;
        }
    }
}

/// The wheel has other contents than the pinned one: the resumed download starts over, and is then rejected.
#[needs(nothing)]
fn interrupted_download_is_resumed_by_the_next_install() {
    let (dir, name, body) = (tempfile::tempdir().expect("a folder"), pinned_wheel_name(), b"0123456789".repeat(10));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let index = format!("http://{}/simple", listener.local_addr().expect("an address"));
    let start = || {
        let mut run = install_command(dir.path());
        run.args(["--index", &index]).env("NO_PROXY", "*").stderr(Stdio::piped()).stdout(Stdio::null());
        run.spawn().expect("starts")
    };
    let mut first = start();
    assert!(!serve_wheel(&listener, &name, &body, 40).contains("range:"));
    let kept = dir.path().join("plugins/.cpu.download").join(&name);
    let since = Instant::now();
    while kept.metadata().map_or(0, |about| about.len()) < 40 {
        assert!(since.elapsed() < Duration::from_secs(60), "{} is not written", kept.display());
        std::thread::sleep(Duration::from_millis(10));
    }
    first.kill().expect("killed");
    first.wait().expect("ends");
    let second = start();
    assert!(serve_wheel(&listener, &name, &body, 100).contains("range: bytes=40-"));
    assert!(!serve_wheel(&listener, &name, &body, 100).contains("range:"), "the checksum was wrong");
    let out = second.wait_with_output().expect("ends");
    let said = error(&out);
    let sum = hex::encode(Sha256::digest(&body));
    assert!(said.contains(&format!("sha256 is {sum}, expected ")) && !kept.exists(), "{said}");
}

#[needs(nothing)]
fn library_that_is_not_a_plugin_is_reported() {
    let Some(library) = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/libm.so.6", "/usr/lib/libm.so.6"]
        .into_iter()
        .find(|path| Path::new(path).is_file())
    else {
        panic!("no library to try");
    };
    let dir = tempfile::tempdir().expect("a folder");
    let no_code = dir.path().join("text.so");
    fs::write(&no_code, "no code").expect("written");
    let loader = format!("cannot load the plugin: dlopen failed: {}: file too short", no_code.display());
    for (path, words) in [(Path::new(library), "GetPjrtApi"), (no_code.as_path(), &loader)] {
        let mut command = support::ltx2();
        let out = command.args(["generate", "-c", "nano", "-p", "a", "-o"]).arg(dir.path().join("a.mp4"));
        let said = error(&out.arg("--platform").arg(path).output().expect("runs"));
        assert!(said.contains(path.to_str().expect("UTF-8")) && said.contains(words), "{said}");
    }
}

/// The error quotes the loader's message about the missing library.
#[needs(nothing)]
fn missing_library_of_plugin_is_reported() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    fs::write(path("empty.c"), "int nothing;\n").expect("written");
    let cc = |out: &str, more: &[&str]| {
        let made =
            Command::new("cc").current_dir(&dir).args(["-shared", "-fPIC", "empty.c", "-o", out]).args(more).status();
        assert!(made.expect("a C compiler").success());
    };
    cc("libltx2_absent.so", &["-Wl,-soname,libltx2_absent.so.7"]);
    cc("plugin.so", &["-Wl,--no-as-needed", "-L.", "-lltx2_absent"]);
    let mut command = support::ltx2();
    command
        .args(["generate", "-c", "nano", "-p", "a", "-o"])
        .arg(path("a.mp4"))
        .arg("--platform")
        .arg(path("plugin.so"));
    let said = error(&command.output().expect("runs"));
    let words = ["cannot load the plugin: ", "libltx2_absent.so.7: cannot open shared object file"];
    assert!(words.iter().all(|words| said.contains(words)), "{said}");
}

/// A file that turns out to be libtpu is not initialized without chips, because it would search for them for minutes.
#[needs(cpu, no_tpu)]
fn tpu_plugin_requires_chips_whatever_its_file_name() {
    let dir = tempfile::tempdir().expect("a folder");
    let neutral = dir.path().join("neutral.so");
    let standin = Standin::new().load(Load::Tpu);
    fs::copy(standin.file(), &neutral).expect("copied");
    let named = dir.path().join("libtpu.so");
    fs::write(&named, "never loaded").expect("written");
    let tiny = support::tiny();
    let run = |arguments: &[&str], variable: Option<&Path>, skip: bool| {
        let mut run = support::ltx2();
        run.args(["generate", "-c", tiny, "--set", "runtime.watchdog=60"]).args(arguments);
        run.arg("-o").arg(dir.path().join("a.mp4"));
        standin.give(&mut run).env_remove("LTX2_PJRT_PLUGIN").env_remove("TPU_SKIP_MDS_QUERY");
        // Some users always set this variable for ahead-of-time compilation, which needs no chips.
        run.envs(skip.then_some(("TPU_SKIP_MDS_QUERY", "1")));
        let started = Instant::now();
        let said = error(&run.envs(variable.map(|path| ("LTX2_PJRT_PLUGIN", path))).output().expect("runs"));
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}: {said}", started.elapsed());
        said
    };
    let wanted = run(&["--platform", "tpu"], None, false);
    assert!(wanted.starts_with("error: platform tpu: no TPU chip ("), "{wanted}");
    for (file, skip) in [(&neutral, false), (&neutral, true), (&named, false), (&named, true)] {
        assert_eq!(run(&["--platform", file.to_str().expect("UTF-8")], None, skip), wanted, "{file:?} {skip}");
        assert_eq!(run(&["--platform", "auto"], Some(file), skip), wanted, "{file:?} {skip}");
    }
}

/// A plugin would abort on an unknown flag. Commands report the flag instead, and `doctor` still prints its report.
#[needs(cpu)]
fn unknown_environment_flag_is_reported() {
    let dir = tempfile::tempdir().expect("a folder");
    let run = |arguments: &[&str]| {
        let mut run = support::ltx2();
        run.args(arguments).env("XLA_FLAGS", "--xla_no_such_flag=1").env("XDG_CACHE_HOME", dir.path());
        run.output().expect("runs")
    };
    let (state, video) = (dir.path().join("state"), dir.path().join("a.mp4"));
    let [state, video] = [&state, &video].map(|path| path.to_str().expect("UTF-8"));
    let tiny = support::tiny();
    let serve = ["serve", "-c", tiny, "--platform", "cpu", "--listen", "127.0.0.1:0", "--insecure", "--state", state];
    for arguments in [&["generate", "-c", tiny, "--platform", "cpu", "-o", video][..], &serve] {
        let out = run(arguments);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{stderr}");
        let last = stderr.lines().last().expect("a line");
        assert!(last.starts_with("error: Unknown flag in XLA_FLAGS: --xla_no_such_flag=1 (plugin "), "{stderr}");
        assert!(!stderr.contains("http://"), "before the address: {stderr}");
    }
    let out = run(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).expect("a report");
    let platforms = report["platforms"].as_array().expect("platforms");
    let cpu = platforms.iter().find(|platform| platform["platform"] == "cpu").expect("the CPU");
    assert_eq!(cpu["works"], false);
    assert!(cpu["missing"].to_string().contains("Unknown flag in XLA_FLAGS: --xla_no_such_flag=1"), "{cpu}");

    let mut run = support::ltx2();
    run.args([
        "generate",
        "-c",
        tiny,
        "--platform",
        "cpu",
        "--set",
        "runtime.xla_flags.xla_no_such_option=true",
        "-o",
        video,
    ]);
    let out = run.output().expect("runs");
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("error: runtime.xla_flags.xla_no_such_option: "), "{stderr}");
}

/// `doctor` lists a plugin under its platform, which it determines from the package name or, if that is neutral, from
/// the plugin itself.
#[needs(cpu)]
fn doctor_lists_plugin_under_its_platform() {
    let site = tempfile::tempdir().expect("a folder");
    let package = site.path().join("lib/python3.11/site-packages/jax_plugins/xla_rocm7");
    fs::create_dir_all(&package).expect("a folder");
    let rocm = package.join("xla_rocm_plugin.so");
    fs::write(&rocm, "no code").expect("written");
    let report = |variable: &str, value: &Path, load: Option<Load>| {
        let mut run = support::ltx2();
        let standin = load.map_or_else(Standin::new, |load| Standin::new().load(load));
        standin.give(&mut run).env_remove("LTX2_PJRT_PLUGIN").env_remove("TPU_SKIP_MDS_QUERY");
        let out = run.env(variable, value).args(["doctor", "--json"]).output().expect("runs");
        let report: serde_json::Value = serde_json::from_slice(&out.stdout).expect("a report");
        report["platforms"].as_array().expect("platforms").clone()
    };
    let listed = |platforms: &[serde_json::Value], file: &Path| -> Vec<String> {
        let here = platforms.iter().filter(|platform| platform["plugin"]["path"] == file.to_str().expect("UTF-8"));
        here.map(|platform| platform["platform"].as_str().expect("a name").to_string()).collect()
    };
    let names = Platform::ALL.into_iter().rev().map(Platform::name);
    for (variable, value) in [("VIRTUAL_ENV", site.path()), ("LTX2_PJRT_PLUGIN", &rocm)] {
        let platforms = report(variable, value, None);
        assert_eq!(listed(&platforms, &rocm), ["rocm"], "{platforms:?}");
        let missing = &platforms.last().expect("rocm")["missing"][0];
        assert_eq!(*missing, format!("rocm is not supported: use {}", alternatives(names.clone())));
    }
    let neutral = site.path().join("neutral.so");
    fs::copy(Standin::new().file(), &neutral).expect("copied");
    assert_eq!(listed(&report("LTX2_PJRT_PLUGIN", &neutral, None), &neutral), ["cpu"]);
    assert_eq!(listed(&report("LTX2_PJRT_PLUGIN", &neutral, Some(Load::Tpu)), &neutral), ["tpu"]);
    // A plugin whose platform only its client reports, and a file that does not load: each is listed once, under none
    // of the supported platforms.
    let platforms = report("LTX2_PJRT_PLUGIN", &neutral, Some(Load::Other));
    assert_eq!(listed(&platforms, &neutral), ["other"], "{platforms:?}");
    let cpu = platforms.iter().find(|platform| platform["platform"] == "cpu").expect("the CPU");
    assert_eq!((&cpu["works"], &cpu["plugin"]), (&false.into(), &serde_json::Value::Null));
    assert!(cpu["missing"][0].as_str().is_some_and(|why| why.ends_with("neutral.so is a plugin for other")), "{cpu}");
    let broken = site.path().join("broken.so");
    fs::write(&broken, "no code").expect("written");
    let platforms = report("LTX2_PJRT_PLUGIN", &broken, None);
    assert_eq!(listed(&platforms, &broken), ["unknown"], "{platforms:?}");
    let why = platforms.last().expect("the platform is listed")["missing"][0].as_str().expect("a reason").to_string();
    assert!(why.contains("broken.so: cannot load the plugin: dlopen failed: "), "{why}");
    for platform in &platforms[..3] {
        let missing = platform["missing"].to_string();
        assert!(missing.contains("broken.so cannot be used: ") && !missing.contains("dlopen"), "{platform}");
    }
}

/// A new plugin is first loaded in a separate process, so that an abort or a hang becomes an error line. A working
/// plugin is only tried once.
#[needs(cpu)]
fn aborting_or_hanging_plugin_gives_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let (cache, out) = (folder.path().join("cache"), folder.path().join("out.mp4"));
    let results = cache.join("ltx2/plugins");
    let run = |load: Option<Load>| {
        let standin = load.map_or_else(Standin::new, |load| Standin::new().load(load));
        let mut run = support::ltx2();
        run.args(["generate", "-c", support::tiny(), "--platform"]).arg(standin.file()).arg("-o").arg(&out);
        run.args(["--force", "--set", "runtime.watchdog=2"]);
        (standin.give(&mut run).env("XDG_CACHE_HOME", &cache).output().expect("runs"), standin.file())
    };
    let refused = |load: Load, words: [&str; 2]| {
        let (ran, file) = run(Some(load));
        let said = error(&ran);
        let start = format!("{}: cannot load the plugin: {}", file.display(), words[0]);
        assert!(said.starts_with(&format!("error: {start}")) && said.contains(words[1]), "{load:?}: {said}");
        assert!(said.contains(&format!("`{}`", Platform::install_command())), "{load:?}: no advice: {said}");
        assert!(!results.exists() && !out.exists(), "{load:?}: nothing is kept of a failure");
    };
    refused(Load::Abort, ["a trial process ended with signal: 6 (SIGABRT)", " while loading the plugin"]);
    refused(Load::Hang, ["a trial process hung for 2 s while loading the plugin", "LTX2_PJRT_PLUGIN=FILE.so"]);
    refused(Load::Major, ["the plugin has PJRT 1.", "this program requires 0."]);
    let (ran, file) = run(Some(Load::Old));
    let old = format!("error: {}: the plugin is too old: it has PJRT 0.80, but 0.81 or newer ", file.display());
    assert!(error(&ran).starts_with(&old) && !results.exists() && !out.exists(), "{}", error(&ran));
    refused(Load::NoEntry, ["the file does not export `GetPjrtApi`", "so it is not a PJRT plugin"]);

    let (ran, _) = run(None);
    assert!(ran.status.success() && out.exists(), "{}", String::from_utf8_lossy(&ran.stderr));
    let names = || -> Vec<String> {
        let entries = fs::read_dir(&results).expect("results");
        entries.map(|e| e.expect("one").file_name().to_string_lossy().into_owned()).collect()
    };
    assert_eq!(names().len(), 2, "the file, and its checksum: {:?}", names());
    // The plugin passed its trial before and is not tried again, so the run itself aborts.
    let (ran, _) = run(Some(Load::Abort));
    let said = error(&ran);
    assert!(said.starts_with("error: this process was aborted: see the output of the plugin"), "{said}");
    assert_eq!(names().len(), 2);
}

/// A performance option that a plugin does not know is omitted, and the cache key reflects the options used. An unknown
/// option that affects results is an error.
#[needs(cpu)]
fn unknown_plugin_options_are_omitted_or_rejected() {
    let dir = tempfile::tempdir().expect("a folder");
    let unknown = |option: &str| format!("No such compile option: '{option}'");
    let compile = "PJRT_Client_Compile";
    let run = |standin: Standin| {
        let mut run = support::run_upsampler(dir.path());
        standin.give(&mut run).env("LTX2_COMPILE_CACHE", dir.path().join("cache"));
        run.output().expect("runs")
    };
    let entries = || fs::read_dir(dir.path().join("cache")).map_or(0, Iterator::count);
    let numbers =
        Standin::new().at(compile, 1, &Fault::Fail(INVALID_ARGUMENT, unknown("xla_allow_excess_precision").leak()));
    let said = error(&run(numbers));
    assert!(said.contains("xla_allow_excess_precision, which results depend on; run `ltx2 plugin install"), "{said}");
    assert_eq!(entries(), 0);

    let speed = || {
        let refused: &str = unknown("xla_enable_hlo_sharding_v3").leak();
        Standin::new().at(compile, 1, &Fault::Fail(INVALID_ARGUMENT, refused))
    };
    let ran = run(speed());
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    let warning = "the plugin rejects the compile option xla_enable_hlo_sharding_v3; compiling without it";
    assert!(ran.status.success() && said.matches(warning).count() == 1, "{said}");
    assert_eq!(entries(), 1);
    // The next run is rejected again, and then finds the cached program.
    let ran = run(speed().at(compile, 2, &Fault::Fail(INTERNAL, "compiled again")));
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    assert_eq!(entries(), 1);
    // A plugin that accepts the option compiles another program.
    assert!(run(Standin::new()).status.success());
    assert_eq!(entries(), 2);
}
