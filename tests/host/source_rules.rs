//! Rules of the repository's sources that the compiler does not check: where MLIR is written, documented items, readable
//! signatures, and tests that run.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::support::needs;

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("src is readable").map(|e| e.expect("an entry").path()) {
        if entry.is_dir() {
            found.extend(sources(&entry));
        } else if entry.extension().is_some_and(|e| e == "rs") {
            found.push(entry);
        }
    }
    found.sort();
    found
}

/// Returns a file's code without comment lines.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("readable");
    text.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Folders that write MLIR.
const WRITE_MLIR: [&str; 3] = ["crates/stablehlo", "crates/nn/src/kernels", "crates/pjrt/examples"];

#[needs(nothing)]
fn only_builder_and_kernel_modules_write_mlir() {
    let mut wrong = Vec::new();
    for path in [sources(Path::new("src")), sources(Path::new("crates"))].concat() {
        if WRITE_MLIR.iter().any(|folder| path.starts_with(folder)) {
            continue;
        }
        // Unit tests may inspect generated text.
        let written =
            code(&path).lines().take_while(|l| !l.starts_with("#[cfg(test)]")).map(str::to_string).collect::<Vec<_>>();
        for (n, line) in written.iter().enumerate() {
            if ["stablehlo.", "func.func", "sdy.", "chlo.", "mhlo."].iter().any(|w| line.contains(w)) {
                wrong.push(format!("{}:{}: {}", path.display(), n + 1, line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "MLIR outside of {WRITE_MLIR:?}:\n{}", wrong.join("\n"));
}

/// Returns statements that substitute a default although the call cannot fail or no default makes sense.
fn made_up(code: &str) -> Vec<String> {
    let sure = [
        "serde_json::to_",
        ".as_slice",
        "_shape",
        "broadcast",
        "try_from(",
        ".lock()",
        ".join()",
        ".position(",
        "concatenate(",
        "stack(",
    ];
    let before = |default: &'static str| {
        let mut parts: Vec<&str> = code.split(default).collect();
        parts.pop();
        parts
    };
    let statement =
        |text: &'static str| before(text).into_iter().map(|t| t.rsplit([';', '{', '}']).next().unwrap_or(t));
    let defaults = [".unwrap_or_default()", ".unwrap_or_else(|_| "].into_iter().flat_map(statement);
    let made = defaults.filter(|s| sure.iter().any(|call| s.contains(call)));
    // A default number is acceptable for a conversion, but not for a lookup or a shape.
    let numbers = [".unwrap_or(0", ".unwrap_or(1"].into_iter().flat_map(statement);
    let made = made.chain(numbers.filter(|s| [".position(", "_shape("].iter().any(|call| s.contains(call))));
    let passed_over = code.split("if let Ok(").skip(1).map(|rest| rest.split('{').next().unwrap_or(rest));
    let made = made.chain(passed_over.filter(|s| s.contains("_shape(")));
    made.map(|s| s.trim().to_string()).collect()
}

#[needs(nothing)]
fn infallible_calls_use_expect_instead_of_defaults() {
    let planted =
        "let a = 1;\nlet b = x\n    .as_slice()\n    .unwrap_or_default();\nlet c = map.get(d).unwrap_or_default();";
    assert_eq!(made_up(planted), ["let b = x\n    .as_slice()"]);
    let planted = "let a = ndarray::concatenate(Axis(0), &all).unwrap_or_else(|_| Array1::zeros(0));";
    assert_eq!(made_up(planted), ["let a = ndarray::concatenate(Axis(0), &all)"]);
    let planted = "let a = all.iter().position(|b| b == c).unwrap_or(0);\nlet d = u64::try_from(e).unwrap_or(0);";
    assert_eq!(made_up(planted), ["let a = all.iter().position(|b| b == c)"]);
    assert_eq!(made_up("if let Ok(a) = View::from_shape((2, 3), &mut b) {"), ["a) = View::from_shape((2, 3), &mut b)"]);
    let mut wrong = Vec::new();
    for path in [sources(Path::new("src")), sources(Path::new("crates"))].concat() {
        wrong.extend(made_up(&code(&path)).into_iter().map(|s| format!("{}: {s}", path.display())));
    }
    assert!(wrong.is_empty(), "write expect(\"why it cannot fail\"), or an error:\n{}", wrong.join("\n"));
}

/// Fields and variants may be self-explanatory, but module items need a comment. clap generates the help of the
/// commands.
#[needs(nothing)]
fn public_items_are_documented() {
    let kinds = ["struct ", "enum ", "trait ", "type ", "fn ", "const fn ", "unsafe fn "];
    let mut bare = Vec::new();
    for path in [sources(Path::new("src")), sources(Path::new("crates"))].concat() {
        let text = fs::read_to_string(&path).expect("readable");
        let lines: Vec<&str> = text.lines().collect();
        for (n, line) in lines.iter().enumerate() {
            let public = line.strip_prefix("pub ").is_some_and(|item| kinds.iter().any(|k| item.starts_with(k)));
            let mut above = lines[..n].iter().rev().take_while(|l| !l.is_empty() && **l != "}");
            if public && !path.starts_with("src/cli") && !above.any(|l| l.starts_with("///")) {
                bare.push(format!("{}:{}: {line}", path.display(), n + 1));
            }
        }
    }
    assert!(bare.is_empty(), "public items without a doc comment:\n{}", bare.join("\n"));
}

/// The parts of a tuple argument have no names at the call site. Neither have those of an array, but sizes and
/// positions along axes are clear from their order.
#[needs(nothing)]
fn arguments_are_not_heterogeneous_tuples_or_arrays() {
    let alike = ["usize;", "f64;", "&Tile;"];
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for path in [sources(Path::new("src")), sources(Path::new("crates"))].concat() {
        for function in code(&path).split("fn ").skip(1) {
            let end = ["{\n", "{}", ";\n"].iter().filter_map(|end| function.find(end)).min();
            let signature = function[..end.unwrap_or(function.len())]
                .replace(": &mut ", ": ")
                .replace(": &", ": ")
                .replace("(dyn ", "");
            let mut arrays = signature.split("]: [").skip(1);
            seen += signature.matches("]: [").count();
            if signature.contains(": (") || arrays.any(|ty| !alike.iter().any(|one| ty.starts_with(one))) {
                wrong.push(format!("{}: fn {}", path.display(), signature.trim_end()));
            }
        }
    }
    assert!(seen > 5, "the test reads the signatures: {seen} arrays seen");
    assert!(wrong.is_empty(), "arguments without a name for each thing:\n{}", wrong.join("\n"));
}

/// A file without a `mod` item, or a test that is not registered with the harness, would never run.
#[needs(nothing)]
fn every_test_file_is_registered_with_the_harness() {
    for binary in ["host", "it", "cli", "serve", "tpu", "cuda", "gpu", "support"] {
        let folder = Path::new("tests").join(binary);
        let all = sources(&folder);
        assert!(all.len() > 1, "{}", folder.display());
        for path in all {
            let text = fs::read_to_string(&path).expect("text");
            let place = path.display();
            for plain in ["#[test]", "#[ignore"] {
                let found = text.lines().any(|l| l.trim().starts_with(plain));
                assert!(!found, "{place}: {plain} in place of #[needs(…)]");
            }
            let (parent, module) =
                (path.parent().expect("a folder"), path.file_stem().expect("a name").to_string_lossy());
            if ["main", "mod"].contains(&&*module) {
                continue;
            }
            let root = if binary == "support" { "mod.rs" } else { "main.rs" };
            let above = if parent == folder { folder.join(root) } else { parent.with_extension("rs") };
            let named = fs::read_to_string(&above).unwrap_or_else(|e| panic!("{}: {e}", above.display()));
            let named = named.lines().any(|l| l.trim_start_matches("pub ") == format!("mod {module};"));
            assert!(named, "{place}: {} has no `mod {module};`", above.display());
            let tested = parent != folder || binary == "support" || text.contains("#[needs(");
            assert!(tested, "{place}: no test");
        }
    }
}

/// Test dependencies enable no features of the program's dependencies, so that `cargo test` and `cargo run --example` do
/// not build the program again.
#[needs(nothing)]
fn tests_and_examples_use_the_build_of_the_program() {
    let packages = |edges: &str| -> BTreeSet<String> {
        let mut tree = std::process::Command::new(env!("CARGO"));
        tree.args(["tree", "--locked", "--offline", "--prefix", "none", "--format", "{p} {f}", "--edges", edges]);
        let done = tree.output().expect("cargo runs");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let text = String::from_utf8(done.stdout).expect("UTF-8");
        text.lines().map(|line| line.trim_end_matches(" (*)").to_string()).collect()
    };
    let (program, with_tests) = (packages("normal,build"), packages("normal,build,dev"));
    assert!(program.len() > 200, "{program:?}");
    let changed: Vec<_> = program.difference(&with_tests).collect();
    assert!(changed.is_empty(), "enable the features of the test build in Cargo.toml: {changed:?}");
}
