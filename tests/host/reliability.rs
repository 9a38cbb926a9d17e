//! The rows of `docs/internals/reliability.md` name tests that are there: `lib module::function` of the library's unit tests,
//! `pjrt` and other crates of theirs, or the binary and the path of an integration test.

use std::fs;

use crate::support::needs;

/// Crates with unit tests of their own.
const CRATES: [&str; 3] = ["pjrt", "stablehlo", "xla-analysis"];
const BINARIES: [&str; 7] = ["host", "it", "cli", "serve", "tpu", "cuda", "gpu"];

/// The last cell of each row of the tables, with its line's number; heads and rules are left out.
fn rows(markdown: &str) -> Vec<(usize, &str)> {
    let lines: Vec<&str> = markdown.lines().collect();
    let is_rule = |line: &str| line.starts_with("|-");
    let is_row = |n: usize| {
        let head = lines.get(n + 1).is_some_and(|next| is_rule(next));
        lines[n].starts_with('|') && !is_rule(lines[n]) && !head
    };
    (0..lines.len())
        .filter(|n| is_row(*n))
        .map(|n| (n + 1, lines[n].trim_end_matches(['|', ' ']).rsplit('|').next().unwrap_or("").trim()))
        .collect()
}

/// Errors of a cell that names tests, each in backticks, with nothing but commas between them.
fn problems(cell: &str) -> Vec<String> {
    let parts: Vec<&str> = cell.split('`').collect();
    let mut wrong: Vec<String> = parts.iter().skip(1).step_by(2).filter_map(|name| unknown(name)).collect();
    let between = parts.iter().step_by(2).map(|text| text.trim_matches([',', ' ']));
    wrong.extend(between.filter(|text| !text.is_empty()).map(|text| format!("'{text}' names no test")));
    if parts.len() < 3 {
        wrong.push("no test is named".into());
    }
    wrong
}

/// Why a name is no test's.
fn unknown(name: &str) -> Option<String> {
    let (binary, path) = name.split_once(' ').unwrap_or(("", name));
    let mut modules: Vec<&str> = path.split("::").collect();
    let function = modules.pop()?;
    let (files, mark) = match binary {
        // A test that is named without its module is not found by its name.
        _ if (binary == "lib" || CRATES.contains(&binary)) && !modules.contains(&"tests") => {
            return Some(format!("'{name}' names no module of tests"));
        }
        "lib" => (sources("src", &modules), "#[test]"),
        _ if CRATES.contains(&binary) => (sources(&format!("crates/{binary}/src"), &modules), "#[test]"),
        _ if BINARIES.contains(&binary) => (vec![format!("tests/{binary}/{}.rs", modules.join("/"))], "#[needs("),
        _ => {
            return Some(format!("'{name}' does not begin with lib, {}", [&CRATES[..], &BINARIES].concat().join(", ")));
        }
    };
    let Some(text) = files.iter().find_map(|file| fs::read_to_string(file).ok()) else {
        return Some(format!("'{name}': no file {}", files.join(" or ")));
    };
    (!is_test(&text, function, mark)).then(|| format!("'{name}': no test of this name in its file"))
}

/// The files in which a module below `root` can be, the most specific first: `tests` is often within its parent's.
fn sources(root: &str, modules: &[&str]) -> Vec<String> {
    let parent = modules.split_last().map_or(modules, |(_, parent)| parent);
    let files = |modules: &[&str]| ["", "/mod"].map(|end| format!("{root}/{}{end}.rs", modules.join("/")));
    [files(modules), files(parent)].concat()
}

/// Whether a file has a test function of this name, written out or made by a macro's list.
fn is_test(text: &str, function: &str, mark: &str) -> bool {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let is_fn = |line: &str| line.strip_prefix("fn ").is_some_and(|rest| rest.starts_with(&format!("{function}(")));
    let is_marked = |n: usize| {
        let above = lines[..n].iter().rev().take_while(|l| l.starts_with("#[") || l.starts_with("//"));
        above.into_iter().any(|l| l.starts_with(mark))
    };
    let names = text.split("!(").skip(1).filter_map(|call| call.split(");").next());
    let is_listed = names.flat_map(|names| names.split(',')).any(|name| name.trim() == function);
    let macros = lines.iter().any(|l| l.contains(mark) && l.contains("fn $"));
    (0..lines.len()).any(|n| is_fn(lines[n]) && is_marked(n)) || macros && is_listed
}

#[needs(nothing)]
fn every_row_names_tests_that_exist() {
    let page = fs::read_to_string("docs/internals/reliability.md").expect("the page");
    let rows = rows(&page);
    assert!(rows.len() >= 110, "{} rows are read", rows.len());
    let wrong = rows.iter().flat_map(|(line, cell)| {
        problems(cell).into_iter().map(move |problem| format!("docs/internals/reliability.md:{line}: {problem}"))
    });
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[needs(nothing)]
fn a_row_whose_test_is_absent_is_found() {
    let own = "host reliability::a_row_whose_test_is_absent_is_found";
    let table = format!(
        "text\n\n| fault | what happens | test |\n|---|---|---|\n| a | b \\| c | `{own}` |\n\
         | a | b | `{own}`, `lib weights::tests::checkpoints::damaged_files_are_named`, `it fuzz_regression::config` |\n"
    );
    let cells = rows(&table);
    assert_eq!(cells.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [5, 6]);
    assert_eq!(cells[0].1, format!("`{own}`"));
    for (_, cell) in cells {
        assert_eq!(problems(cell), [""; 0], "{cell}");
    }
    for (cell, why) in [
        ("", "no test is named"),
        ("the same", "'the same' names no test"),
        (&format!("`{own}`, on GPUs"), "'on GPUs' names no test"),
        (&format!("`{own}…`"), "no test of this name"),
        ("`host reliability::a_row_whose_test_was_renamed`", "no test of this name"),
        // A function of the file that is no test.
        ("`host reliability::problems`", "no test of this name"),
        ("`lib weights::tests::fails`", "no test of this name"),
        ("`lib weights::tests::damaged_files`", "no test of this name"),
        ("`it fuzz_regression::configs`", "no test of this name"),
        ("`host nowhere::a`", "no file tests/host/nowhere.rs"),
        ("`lib weights::damaged_files_are_named`", "names no module of tests"),
        ("`lib nowhere::tests::a`", "no file src/nowhere/tests.rs or"),
        ("`tests/cli/memory.rs`", "does not begin with lib"),
        ("`damaged_files_are_named`", "does not begin with lib"),
    ] {
        assert!(problems(cell).iter().any(|problem| problem.contains(why)), "{cell}: {:?}", problems(cell));
    }
}
