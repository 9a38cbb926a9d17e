//! The packaged archive of each library crate, unpacked outside the repository: it builds, runs its example, and its
//! documentation starts with its README.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// Packages a crate and unpacks its archive into `outside`; returns its folder.
fn unpacked(package: &str, outside: &Path) -> PathBuf {
    output(cargo(Path::new(ROOT), outside, "package").args(["--no-verify", "--allow-dirty", "-p", package]));
    let name = format!("{package}-{}", env!("CARGO_PKG_VERSION"));
    let archive = outside.join("target/package").join(format!("{name}.crate"));
    output(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(outside));
    outside.join(name)
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
    for (package, example, arguments, printed) in crates {
        let folder = unpacked(package, outside.path());
        let ran = output(cargo(&folder, outside.path(), "run").args(["--example", example, "--"]).args(arguments));
        assert!(ran.contains(printed), "{package}: {ran}");

        let readme = fs::read_to_string(folder.join("README.md")).expect("a README");
        assert!(readme.starts_with(&format!("# {package}\n")) && readme.contains("```rust"), "{readme}");
        assert!(readme.contains(&format!("cargo run --example {example}")), "{readme}");
        output(cargo(&folder, outside.path(), "doc").arg("--no-deps"));
        let library = package.replace('-', "_");
        let page = outside.path().join("target/doc").join(&library).join("index.html");
        let page = fs::read_to_string(page).expect("a landing page");
        assert!(page.contains(&format!("id=\"{package}\"")), "{package}: the README's title on the landing page");
        assert!(page.contains("class=\"rust rust-example-rendered\""), "{package}: its example too");
    }
}
