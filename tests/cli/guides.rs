//! The commands of the documentation: all can be typed, and those for the toy model run in order in one folder.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use clap::Parser;
use ltx2::cli::Cli;

use crate::support::{self, full, needs};

/// Returns the README and the pages of `docs/`, without the generated reference, in the order in which a newcomer reads
/// them.
fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<PathBuf> = vec!["README.md".into(), "docs/get-started.md".into(), "docs/models.md".into()];
    for folder in ["docs/guides", "docs/internals"] {
        let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
        let mut own: Vec<_> = entries.filter(|path| path.extension().is_some_and(|end| end == "md")).collect();
        own.sort();
        pages.extend(own);
    }
    pages
}

/// Returns the shell blocks of a page.
fn blocks(page: &Path) -> Vec<String> {
    let text = fs::read_to_string(page).expect("a page");
    let rest = text.split("```sh\n").skip(1);
    rest.filter_map(|rest| rest.split_once("\n```")).map(|(block, _)| block.to_string()).collect()
}

/// Returns the `ltx2` commands of a block, with continued lines joined as a shell does.
fn commands(block: &str) -> Vec<String> {
    let joined = block.replace("\\\n", " ");
    joined
        .lines()
        .filter(|line| line.starts_with("ltx2 "))
        .map(|line| line.trim_end_matches(" &").to_string())
        .collect()
}

/// Runs a script with a program `ltx2` on the path.
fn shell(folder: &Path, program: &str, script: &str) -> Output {
    let bin = folder.join("bin");
    fs::create_dir_all(&bin).expect("a folder");
    fs::write(bin.join("ltx2"), program).expect("written");
    fs::set_permissions(bin.join("ltx2"), fs::Permissions::from_mode(0o755)).expect("a mode");
    let mut bash = Command::new("bash");
    bash.args(["-c", &format!("PATH='{}':$PATH\n{script}", bin.display())]).current_dir(folder);
    bash.output().expect("bash runs")
}

/// Each documented command is parsed by a shell, then by the program. A backslash at the end of a line within quotes is
/// not removed by the shell, so no argument may contain one.
#[needs(nothing)]
fn documented_commands_can_be_typed() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut all = Vec::new();
    for page in pages() {
        for block in blocks(&page) {
            assert!(!has_quoted_continuation(&block), "{}: a line is continued within quotes: {block}", page.display());
            all.extend(commands(&block).into_iter().map(|command| (page.clone(), command)));
        }
    }
    assert!(all.len() > 60, "{} commands", all.len());
    // Prints the arguments, each followed by a NUL, and ends each command with a record separator.
    let program = "#!/bin/sh\nprintf '%s\\0' ltx2 \"$@\"\nprintf '\\036'\n";
    let script: String = ["PLATFORM=cpu\n".to_string()]
        .into_iter()
        .chain(all.iter().map(|(_, command)| format!("{command}\n")))
        .collect();
    let done = shell(folder.path(), program, &script.replace(" | ", " #"));
    assert_eq!((done.status.code(), &*String::from_utf8_lossy(&done.stderr)), (Some(0), ""));
    let printed = String::from_utf8(done.stdout).expect("UTF-8");
    let typed: Vec<Vec<&str>> =
        printed.split_terminator('\x1e').map(|line| line.split_terminator('\0').collect()).collect();
    assert_eq!(typed.len(), all.len());
    for (words, (page, command)) in typed.iter().zip(&all) {
        if let Err(error) = Cli::try_parse_from(words) {
            panic!("{}: {command}: {error}", page.display());
        }
    }
}

/// Returns whether a line of a script ends with a backslash within single quotes.
fn has_quoted_continuation(block: &str) -> bool {
    let (mut single, mut double) = (false, false);
    let mut characters = block.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\'' if !double => single = !single,
            '"' if !single => double = !double,
            '#' if !single && !double => while characters.next_if(|next| *next != '\n').is_some() {},
            '\\' if single && characters.peek() == Some(&'\n') => return true,
            '\\' if !single => drop(characters.next()),
            _ => {}
        }
    }
    false
}

#[needs(nothing)]
fn line_continued_within_single_quotes_is_found() {
    assert!(has_quoted_continuation("ltx2 generate --set 'a={b: \\\n c}'"));
    assert!(!has_quoted_continuation("ltx2 generate -p \"it's\" \\\n --set 'a=b' # don't \\\nltx2 x"));
}

/// Returns the blocks for the toy model, except those of the serving guide, which `serve guide` runs. Lines that install
/// `ltx2` or describe the machine are left out.
fn toy_blocks() -> Vec<String> {
    let pages = pages().into_iter().filter(|page| !page.ends_with("serving.md"));
    let blocks = pages.flat_map(|page| blocks(&page)).filter(|block| block.contains("generate -c nano"));
    let others = ["pip install", "cargo install", "ltx2 doctor"];
    let runs = |block: String| {
        let lines = block.lines().filter(|line| !others.iter().any(|other| line.starts_with(other)));
        lines.collect::<Vec<_>>().join("\n")
    };
    let all: Vec<String> = blocks.map(runs).collect();
    assert!(all.len() >= 2 && all.iter().map(|block| commands(block).len()).sum::<usize>() >= 6, "{all:?}");
    all
}

/// Creates the folder of a user: the toy model and the plugins.
fn user_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir(folder.path().join("assets")).expect("a folder");
    // There are no plugins in a checkout that runs only tests without them.
    for name in ["assets/nano", "plugins"].into_iter().filter(|name| Path::new(name).exists()) {
        symlink(fs::canonicalize(name).expect("a folder"), folder.path().join(name)).expect("a link");
    }
    folder
}

/// The commands for the toy model have valid options, overwrite no file of an earlier one, and read only files that
/// earlier ones write. Nothing is generated: in place of its outputs, each command writes its merged configuration.
#[needs(nothing)]
fn toy_commands_of_the_guides_are_valid_in_order() {
    let folder = user_folder();
    let program = format!(
        "#!/bin/bash\nset -e\nconfig=$('{}' \"$@\" --print-config)\nwhile [ $# -gt 0 ]; do\n  case $1 in\n    \
         --image) test -f \"$2\" ;;\n    --dump|-o) test ! -e \"$2\"; echo \"$config\" > \"$2\" ;;\n    \
         --save-frames) test ! -e \"$2\"; mkdir \"$2\"; touch \"$2/frame_00000.png\" ;;\n  esac\n  \
         if [ \"$1\" = -o ]; then test ! -e \"${{2%.mp4}}.json\"; echo \"$config\" > \"${{2%.mp4}}.json\"; fi\n  \
         for path in $(grep -o '{{path: [^,}}]*' <<< \"$1\" | cut -d' ' -f2); do test -f \"$path\"; done\n  shift\ndone\n",
        env!("CARGO_BIN_EXE_ltx2")
    );
    for block in toy_blocks() {
        let done = shell(folder.path(), &program, &format!("set -ex\n{block}"));
        assert!(done.status.success(), "{block}: {}", String::from_utf8_lossy(&done.stderr));
    }
    assert!(folder.path().join("square.json").exists() && folder.path().join("second.mp4").exists());
}

/// Runs the commands for the toy model.
#[needs(cpu, full)]
fn toy_commands_of_the_guides_run_in_order() {
    assert!(full());
    let folder = user_folder();
    let program = format!(
        "#!/bin/sh\nLTX2_COMPILE_CACHE='{}' exec '{}' \"$@\"\n",
        support::programs().display(),
        env!("CARGO_BIN_EXE_ltx2")
    );
    for block in toy_blocks() {
        let done = shell(folder.path(), &program, &format!("set -ex\n{block}"));
        assert!(done.status.success(), "{block}: {}", String::from_utf8_lossy(&done.stderr));
    }
    let bytes = |name: &str| fs::read(folder.path().join(name)).expect(name);
    assert_eq!(bytes("square.mp4"), bytes("again.mp4"), "the sidecar repeats the video");
    for name in ["first.mp4", "second.mp4"] {
        assert_eq!(&bytes(name)[4..8], b"ftyp", "{name}");
    }
    let videos = fs::read_dir(folder.path().join("out")).expect("videos").count();
    assert_eq!(videos, 6, "three videos with default names and their sidecars");
}
