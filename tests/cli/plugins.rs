//! Plugins that are not what they should be: code of others is loaded only where it is known, and a failure of it is
//! one line.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

use crate::support::{self, needs};

fn error(out: &Output) -> String {
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    let errors: Vec<&str> = stderr.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one line says it: {stderr}");
    errors[0].to_string()
}

/// `ltx2 plugin install cpu` where `python3` is a script of ours; what is left in the folder.
fn install(script: &str) -> (String, usize) {
    let dir = tempfile::tempdir().expect("a folder");
    let (python, plugins) = (dir.path().join("python3"), dir.path().join("plugins"));
    fs::write(&python, format!("#!/bin/sh\n{script}\n")).expect("written");
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).expect("a script");
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap_or_default());
    let mut command = support::ltx2();
    let out = command.args(["plugin", "install", "cpu", "--dir"]).arg(&plugins).env("PATH", path).output();
    (error(&out.expect("runs")), fs::read_dir(&plugins).expect("the folder").count())
}

#[needs(nothing)]
fn a_download_with_another_checksum_is_refused() {
    // The folder stands behind `--dest`.
    let script = "while [ \"$1\" != --dest ]; do shift; done; mkdir -p \"$2\"; echo code > \"$2/plugin.whl\"";
    let (said, left) = install(script);
    assert!(said.contains("sha256 is ") && said.contains("not the one this program trusts"), "{said}");
    assert_eq!(left, 0, "nothing is installed");
}

#[needs(nothing)]
fn a_download_that_fails_says_what_pip_said() {
    let (said, left) = install("echo 'ERROR: no route' >&2; exit 1");
    assert!(said.contains("pip download") && said.contains("ERROR: no route"), "{said}");
    assert_eq!(left, 0);
}

#[needs(nothing)]
fn a_library_that_is_no_plugin_is_named() {
    let Some(library) = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/libm.so.6", "/usr/lib/libm.so.6"]
        .into_iter()
        .find(|path| Path::new(path).is_file())
    else {
        panic!("no library to try");
    };
    let dir = tempfile::tempdir().expect("a folder");
    let no_code = dir.path().join("text.so");
    fs::write(&no_code, "no code").expect("written");
    for (path, words) in [(Path::new(library), "GetPjrtApi"), (no_code.as_path(), "cannot load the plugin")] {
        let mut command = support::ltx2();
        let out = command.args(["generate", "-c", "nano", "-p", "a", "-o"]).arg(dir.path().join("a.mp4"));
        let said = error(&out.arg("--platform").arg(path).output().expect("runs"));
        assert!(said.contains(path.to_str().expect("UTF-8")) && said.contains(words), "{said}");
    }
}
