//! Each crate below `ltx2` as its archive holds it: unpacked outside the repository, it builds, runs its example and shows its
//! README as the first page of its documentation.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::needs;
use ltx2::pjrt::discover::{self, Platform};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// stdout of a command that succeeds.
fn output(command: &mut Command) -> String {
    let done = command.output().expect("it runs");
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).expect("text")
}

/// Builds of the archives and of what is unpacked from them: one folder, so that dependencies are built once.
fn cargo(folder: &Path, subcommand: &str) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(folder).args([subcommand, "--offline", "--locked", "--quiet"]);
    command.env("CARGO_TARGET_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages"));
    command
}

/// A crate's folder, unpacked from its archive into `outside`.
fn unpacked(package: &str, outside: &Path) -> PathBuf {
    output(cargo(Path::new(ROOT), "package").args(["--no-verify", "--allow-dirty", "-p", package]));
    let name = format!("{package}-{}", env!("CARGO_PKG_VERSION"));
    let archives = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages/package");
    let archive = archives.join(format!("{name}.crate"));
    output(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(outside));
    outside.join(name)
}

/// Minutes: dependencies are built anew, beside those of the workspace.
#[needs(cpu, full)]
fn each_crate_works_from_its_archive() {
    let outside = tempfile::tempdir().expect("a folder");
    assert!(!outside.path().starts_with(ROOT), "outside the repository");
    let plugin = discover::find(Platform::Cpu, None).found.remove(0).path.canonicalize().expect("a plugin");
    // A seed's first byte says how the others are read.
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
        let ran = output(cargo(&folder, "run").args(["--example", example, "--"]).args(arguments));
        assert!(ran.contains(printed), "{package}: {ran}");

        let readme = fs::read_to_string(folder.join("README.md")).expect("a README");
        assert!(readme.starts_with(&format!("# {package}\n")) && readme.contains("```rust"), "{readme}");
        assert!(readme.contains(&format!("cargo run --example {example}")), "{readme}");
        output(cargo(&folder, "doc").arg("--no-deps"));
        let library = package.replace('-', "_");
        let pages = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages/doc");
        let page = fs::read_to_string(pages.join(&library).join("index.html")).expect("a landing page");
        assert!(page.contains(&format!("id=\"{package}\"")), "{package}: the README's title on the landing page");
        assert!(page.contains("class=\"rust rust-example-rendered\""), "{package}: its example too");
    }
}
