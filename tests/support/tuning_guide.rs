//! Runs the tuning guide's commands for a custom chip and layout.

use std::os::unix::fs::symlink;
use std::process::{Command, Output};

use tempfile::TempDir;

const HEADING: &str = "### Your own chip and layout";

/// Runs the commands, with some words replaced, in a folder that contains only the examples and the guide's layout.
pub fn run_custom_chip_and_layout(replaced: &[(&str, &str)]) -> (TempDir, Output) {
    let page = std::fs::read_to_string("docs/guides/tuning.md").expect("the guide");
    let (_, section) = page.split_once(HEADING).expect("the section");
    let block = |language: &str| {
        let (_, rest) = section.split_once(&format!("```{language}\n")).expect("a block");
        rest.split_once("```").expect("its end").0.to_string()
    };
    let (layout, mut commands) = (block("yaml"), block("sh"));
    for (from, to) in replaced {
        assert!(commands.contains(from), "{from}: {commands}");
        commands = commands.replace(from, to);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("mine.yml"), layout).expect("written");
    // A user has the repository's examples, installed plugins, and the program on the path.
    for name in ["examples", "plugins"] {
        symlink(std::fs::canonicalize(name).expect("a folder"), path(name)).expect("a link");
    }
    // In a subfolder, because a file named `ltx2` here would be taken for a configuration.
    std::fs::create_dir(path("bin")).expect("a folder");
    symlink(env!("CARGO_BIN_EXE_ltx2"), path("bin/ltx2")).expect("a link");
    let script = format!("set -e\nPATH='{}':$PATH\n{commands}", path("bin").display());
    let done = Command::new("bash").args(["-c", &script]).current_dir(folder.path()).output().expect("a shell");
    (folder, done)
}
