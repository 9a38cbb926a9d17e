//! Packages outside the repository. Archives of library crates build and run their examples. The wheel, the tarball and
//! the binary that cargo installs from archives generate a video with an empty home folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::support::needs;
use ltx2::pjrt::discover::{self, Platform};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Runs a command that must succeed; returns its stdout.
fn output(command: &mut Command) -> String {
    let done = command.output().expect("the process runs");
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).expect("text")
}

/// Returns a cargo command that builds below `outside` from scratch: archived files have old timestamps, so cargo would
/// reuse earlier builds.
fn cargo(folder: &Path, outside: &Path, subcommand: &str) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(folder).args([subcommand, "--offline", "--locked", "--quiet"]);
    command.env("CARGO_TARGET_DIR", outside.join("target"));
    command
}

/// Packages all crates into `outside`. Returns the names of the packages and their archives.
fn package_all(outside: &Path) -> Vec<(String, PathBuf)> {
    let mut package = cargo(Path::new(ROOT), outside, "package");
    output(package.args(["--workspace", "--exclude", "ltx2-test-macros", "--no-verify", "--allow-dirty"]));
    let folder = outside.join("target/package");
    let ending = format!("-{}.crate", env!("CARGO_PKG_VERSION"));
    let files = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let archives = files.filter_map(|path| {
        let name = path.file_name()?.to_str()?.strip_suffix(&ending)?.to_string();
        Some((name, path))
    });
    archives.collect()
}

/// Unpacks the archives into `outside`; returns the folder of each package.
fn unpack_all(outside: &Path) -> Vec<(String, PathBuf)> {
    let archives = package_all(outside).into_iter().map(|(name, archive)| {
        output(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(outside));
        let folder = outside.join(format!("{name}-{}", env!("CARGO_PKG_VERSION")));
        (name, folder)
    });
    archives.collect()
}

/// crates.io rejects archives above 10 MB.
#[needs(nothing)]
fn each_archive_is_below_the_limit_of_the_registry() {
    let outside = tempfile::tempdir().expect("a folder");
    let archives = package_all(outside.path());
    let crates = fs::read_dir("crates").expect("crates").count();
    assert_eq!(archives.len(), crates + 1, "{archives:?}");
    for (name, archive) in archives {
        let bytes = fs::metadata(&archive).expect("an archive").len();
        assert!(bytes < 10_000_000, "{name}: {bytes} bytes");
    }
}

/// Variables with which pip and `ltx2 plugin install` reach a package index.
fn network() -> impl Iterator<Item = (String, String)> {
    let names = ["http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "pip_cert", "pip_index_url"];
    std::env::vars().filter(move |(name, _)| names.contains(&&*name.to_lowercase()))
}

/// Generates a video of the toy model with an empty home folder and no other variables, so that the program installs the
/// CPU plugin. Prints the time since `started`, and the part of it that was spent on downloads.
fn first_video(program: &Path, package: &str, started: Instant) {
    let home = tempfile::tempdir().expect("a folder");
    let mut run = Command::new(program);
    run.args(["generate", "-c", "nano", "-p", "a red circle bounces on blue, low beeps", "-o", "first.mp4"]);
    let out = run.current_dir(&home).env_clear().envs(network()).env("HOME", home.path()).output().expect("runs");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{package}: {said}");
    let video = fs::read(home.path().join("first.mp4")).expect("a video");
    assert_eq!(&video[4..8], b"ftyp", "{package}");
    let (_, download) = said.split_once("downloaded 63 MB in ").unwrap_or_else(|| panic!("{package}: {said}"));
    let download = download.split_whitespace().next().expect("seconds");
    println!("{package}: {:.1} s to the first video, {download} s of them network", started.elapsed().as_secs_f64());
}

/// Returns the newest version N of the symbols GLIBC_2.N that a program refers to.
fn newest_glibc(program: &Path) -> u32 {
    let bytes = fs::read(program).expect("a program");
    let marks = bytes.windows(8).enumerate().filter(|(_, window)| window == b"GLIBC_2.");
    let numbers = marks.filter_map(|(start, _)| {
        let digits = bytes[start + 8..].iter().take_while(|byte| byte.is_ascii_digit());
        digits.map(|byte| char::from(*byte)).collect::<String>().parse().ok()
    });
    numbers.max().expect("a dynamically linked program")
}

/// Takes minutes, because `make dist` builds a release.
#[needs(full)]
fn wheel_and_tarball_generate_a_video_with_an_empty_home() {
    output(Command::new("make").args(["-s", "dist"]));
    let dist = fs::canonicalize("target/dist").expect("the packages");
    output(Command::new("sha256sum").args(["--quiet", "--check", "SHA256SUMS"]).current_dir(&dist));
    let version = env!("CARGO_PKG_VERSION");
    let wheel = dist.join(format!("ltx2-{version}-py3-none-manylinux_2_28_x86_64.whl"));
    let outside = tempfile::tempdir().expect("a folder");
    let path = |name: &str| outside.path().join(name);

    let started = Instant::now();
    output(Command::new("python3").args(["-m", "venv"]).arg(path("venv")));
    let mut pip = Command::new(path("venv/bin/pip"));
    output(pip.args(["install", "--quiet", "--no-index"]).arg(wheel).env_clear().env("HOME", outside.path()));
    first_video(&path("venv/bin/ltx2"), "pip", started);
    assert!(newest_glibc(&path("venv/bin/ltx2")) <= 28, "the wheel's tag says glibc 2.28");

    let started = Instant::now();
    let name = format!("ltx2-{version}-x86_64-linux");
    output(Command::new("tar").arg("-xzf").arg(dist.join(format!("{name}.tar.gz"))).arg("-C").arg(outside.path()));
    for file in ["LICENSE", "README.md", "completions/ltx2.bash", "completions/_ltx2", "completions/ltx2.fish"] {
        assert!(path(&name).join(file).is_file(), "{file}");
    }
    first_video(&path(&name).join("ltx2"), "tarball", started);
}

/// Takes minutes, because a release is built.
#[needs(full)]
fn binary_of_cargo_install_generates_a_video_with_an_empty_home() {
    let outside = tempfile::tempdir().expect("a folder");
    let packages = unpack_all(outside.path());
    let started = Instant::now();
    let mut install = Command::new(env!("CARGO"));
    install.args(["install", "--quiet", "--offline", "--root"]).arg(outside.path().join("installed"));
    for (name, folder) in &packages {
        match name.as_str() {
            "ltx2" => install.arg("--path").arg(folder),
            _ => install.args(["--config", &format!("patch.crates-io.{name}.path=\"{}\"", folder.display())]),
        };
    }
    output(install.current_dir(outside.path()).env("CARGO_TARGET_DIR", outside.path().join("target")));
    println!("cargo install: {:.1} s without downloads", started.elapsed().as_secs_f64());
    first_video(&outside.path().join("installed/bin/ltx2"), "cargo", started);
}

/// Takes minutes, because dependencies are built too.
#[needs(cpu, full)]
fn each_crate_builds_from_its_packaged_archive() {
    let outside = tempfile::tempdir().expect("a folder");
    assert!(!outside.path().starts_with(ROOT), "outside the repository");
    let plugin = discover::find(Platform::Cpu, None).found.remove(0).path.canonicalize().expect("a plugin");
    // The first byte of a fuzz seed selects the format of the rest.
    let seed = fs::read("fuzz/seeds/module/tpu_v6e_gathers.pb").expect("a seed");
    let module = outside.path().join("module.pb");
    fs::write(&module, &seed[1..]).expect("written");
    let (plugin, module) = (plugin.to_str().expect("UTF-8"), module.to_str().expect("UTF-8"));
    let crates: [(&str, &str, &[&str], &str); 3] = [
        ("ltx2-pjrt", "hello", &[plugin], "PJRT"),
        ("ltx2-stablehlo", "attention", &[], "sdy.mesh @mesh"),
        ("ltx2-xla-analysis", "report", &[module, "context=8", "v6e"], "AllGather over [\"context\"]"),
    ];
    let packages = unpack_all(outside.path());
    for (package, example, arguments, printed) in crates {
        let (_, folder) = packages.iter().find(|(name, _)| name == package).expect("a package");
        let ran = output(cargo(folder, outside.path(), "run").args(["--example", example, "--"]).args(arguments));
        assert!(ran.contains(printed), "{package}: {ran}");

        let readme = fs::read_to_string(folder.join("README.md")).expect("a README");
        assert!(readme.starts_with(&format!("# {package}\n")) && readme.contains("```rust"), "{readme}");
        assert!(readme.contains(&format!("cargo run --example {example}")), "{readme}");
        output(cargo(folder, outside.path(), "doc").arg("--no-deps"));
        let library = package.replace('-', "_");
        let page = outside.path().join("target/doc").join(&library).join("index.html");
        let page = fs::read_to_string(page).expect("a landing page");
        assert!(page.contains(&format!("id=\"{package}\"")), "{package}: the README's title on the landing page");
        assert!(page.contains("class=\"rust rust-example-rendered\""), "{package}: its example too");
    }
}
