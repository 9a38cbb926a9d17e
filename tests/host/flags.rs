//! Flags, commands and YAML keys mentioned in the program's text exist, and flags exist on the command that shows the
//! text.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use clap::CommandFactory;

use crate::support::needs;
use ltx2::cli::Cli;
use ltx2::config::json_schema;
use ltx2::weights::Component;
use serde_json::Value;

/// Flags of compilers and pip, and the common prefix of the thresholds of `compare`.
const FOREIGN: [&str; 10] = [
    "--xla_",
    "--hugepage_text",
    "--min",
    "--disable-pip-version-check",
    "--no-deps",
    "--only-binary",
    "--implementation",
    "--python-version",
    "--abi",
    "--dest",
];

/// Source files whose text is only shown by these commands, so that they may mention flags that `generate` lacks.
const OF_OTHER_COMMANDS: [(&str, &[&str]); 11] = [
    // `generate` runs this on a model.
    ("src/cli/check.rs", &["check", "generate"]),
    // Prints the command that uses the download.
    ("src/cli/pull", &["pull", "generate"]),
    ("src/serve", &["serve"]),
    ("src/tune", &["experiment", "why", "compile", "bench"]),
    ("src/perf/cache_quality.rs", &["quality"]),
    ("src/perf", &["bench", "compile", "profile"]),
    ("src/pipeline/programs/component.rs", &["run"]),
    ("src/pipeline/programs/transformer.rs", &["run"]),
    ("src/pipeline/programs/build.rs", &["compile", "bench"]),
    ("src/pipeline/programs/compile.rs", &["compile"]),
    ("crates/server/src/settings.rs", &["serve"]),
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("readable").map(|entry| entry.expect("an entry").path()) {
        let is_test = entry.file_stem().is_some_and(|stem| ["tests", "effects"].iter().any(|own| stem == *own));
        match entry.is_dir() {
            _ if is_test => {}
            true => sources(&entry, found),
            false if entry.extension().is_some_and(|e| e == "rs") => found.push(entry),
            false => {}
        }
    }
}

/// Returns the string literals of a file, without its tests and comments.
fn literals(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).expect("readable");
    let own = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code: String =
        own.lines().filter(|line| !line.trim_start().starts_with("//")).fold(String::new(), |mut all, line| {
            all.push_str(line);
            all.push('\n');
            all
        });
    let (mut found, mut current, mut escaped) = (Vec::new(), None::<String>, false);
    let mut before = ' ';
    for c in code.chars() {
        match (&mut current, c) {
            (Some(literal), c) if escaped => {
                literal.push(c);
                escaped = false;
            }
            (Some(_), '\\') => escaped = true,
            (Some(_), '"') => found.extend(current.take()),
            (Some(literal), c) => literal.push(c),
            // Skip the character literal '"'.
            (None, '"') if before != '\'' => current = Some(String::new()),
            (None, _) => {}
        }
        before = c;
    }
    found
}

/// Returns the words of a text that start with two dashes.
fn flags(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices("--") {
        let before = text[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || "-{}".contains(c)) {
            continue;
        }
        let name: String = text[at + 2..]
            .chars()
            .take_while(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(*c))
            .collect();
        let name = name.trim_end_matches('-');
        if name.starts_with(|c: char| c.is_ascii_lowercase()) {
            found.insert(format!("--{name}"));
        }
    }
    found
}

/// Returns the words after `ltx2 ` in inline code or at the start of a text.
fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("ltx2 ") {
        let before = text[..at].chars().next_back();
        let name: String = text[at + 5..].chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
        // The word may also be the name of a preset with a suffix.
        let is_command = name.starts_with(|c: char| c.is_ascii_lowercase());
        if is_command && (at == 0 || before.is_some_and(|c| "`\n ".contains(c))) {
            found.push(name);
        }
    }
    found
}

/// Returns the command lines of the program in a text, from inline code or indented example lines.
fn command_lines(text: &str) -> Vec<Vec<String>> {
    let quoted = text.split('`').skip(1).step_by(2);
    let lines = text.lines().filter(|line| line.starts_with("  ")).flat_map(|line| line.split("&&"));
    let words = |line: &str| line.split_whitespace().take_while(|word| *word != "#").map(String::from).collect();
    let all = quoted.chain(lines).map(str::trim).filter_map(|line| line.strip_prefix("ltx2 "));
    all.map(words).collect()
}

/// Returns the flags of a command line that its command lacks.
fn unknown_flags(line: &[String], cli: &clap::Command) -> Vec<String> {
    let Some(command) = line.first().and_then(|name| cli.find_subcommand(name)) else { return Vec::new() };
    let mut found = BTreeSet::from(["--help".to_string()]);
    flags_of(command, &mut found);
    found.extend(cli.get_arguments().filter_map(|arg| arg.get_long()).map(|long| format!("--{long}")));
    let is_foreign = |flag: &String| FOREIGN.iter().any(|start| flag.starts_with(start));
    line.iter().flat_map(|word| flags(word)).filter(|flag| !found.contains(flag) && !is_foreign(flag)).collect()
}

/// Dotted text that starts like a YAML section but is not a key: names of tensors and files, and keys of a video's JSON
/// file.
const NO_KEYS: [&str; 7] = [
    "model.diffusion_model",
    "model.embed_tokens",
    "model.fingerprint",
    "model.language_model",
    "model.norm",
    "request.json",
    "vocoder.conv_in.weight",
];

/// Returns dotted names in a text, such as `request.retake`, whose first part is a section.
fn keys(text: &str, sections: &BTreeSet<&str>) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "._".contains(c);
    let words = text.split(|c: char| !is_part(c) && !"/-{".contains(c));
    let named = words.map(|word| word.trim_matches('.')).filter(|word| word.chars().all(is_part));
    let is_key = |word: &&str| {
        let (section, rest) = word.split_once('.').unwrap_or_default();
        sections.contains(section) && rest.starts_with(|c: char| c.is_ascii_lowercase())
    };
    named.filter(is_key).map(String::from).collect()
}

/// Resolves a schema and returns it with its alternatives and items.
fn forms<'a>(schema: &'a Value, root: &'a Value) -> Vec<&'a Value> {
    let mut schema = schema;
    while let Some(place) = schema["$ref"].as_str() {
        schema = root.pointer(place.trim_start_matches('#')).expect("a definition");
    }
    let alternatives = ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema[key].as_array()).flatten();
    let items = schema.get("items").into_iter();
    let inner = alternatives.chain(items).flat_map(|inner| forms(inner, root));
    [schema].into_iter().chain(inner).collect()
}

/// Returns whether the schema has a key.
fn has_key(schema: &Value, key: &str) -> bool {
    let mut found = vec![schema];
    for part in key.split('.') {
        found = found
            .into_iter()
            .flat_map(|form| forms(form, schema))
            .filter_map(|form| form["properties"].get(part).or_else(|| form.get("additionalProperties")))
            .filter(|form| form.is_object())
            .collect();
    }
    !found.is_empty()
}

fn flags_of(command: &clap::Command, found: &mut BTreeSet<String>) {
    found.extend(command.get_arguments().filter_map(|arg| arg.get_long()).map(|long| format!("--{long}")));
    command.get_subcommands().for_each(|below| flags_of(below, found));
}

/// Returns the command line with all subcommands built, which takes tens of milliseconds in a debug build.
fn cli() -> clap::Command {
    let mut cli = Cli::command();
    cli.build();
    cli
}

/// Returns the flags of a command, including global flags.
fn known(cli: &clap::Command, name: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::from(["--help".to_string(), "--version".to_string()]);
    let command = cli.find_subcommand(name).unwrap_or_else(|| panic!("no command {name}"));
    flags_of(command, &mut found);
    found.extend(cli.get_arguments().filter_map(|arg| arg.get_long()).map(|long| format!("--{long}")));
    found
}

/// Returns the commands whose users see the text of a file.
fn reached_by(cli: &clap::Command, path: &Path) -> Vec<String> {
    let text = path.to_str().expect("UTF-8");
    let all = || cli.get_subcommands().map(|command| command.get_name().to_string()).collect();
    let other = OF_OTHER_COMMANDS.iter().find(|(start, _)| text.starts_with(start));
    if let Some(file) = text.strip_prefix("src/cli/").filter(|_| other.is_none()) {
        let command = file.trim_end_matches(".rs").replace('_', "-");
        return if cli.find_subcommand(&command).is_some() { vec![command] } else { all() };
    }
    if text.starts_with("crates/") {
        return all();
    }
    other.map_or_else(|| vec!["generate".into()], |(_, names)| names.iter().map(|name| (*name).to_string()).collect())
}

#[needs(nothing)]
fn flags_and_commands_in_messages_exist() {
    let mut files = Vec::new();
    sources(Path::new("src"), &mut files);
    sources(Path::new("crates"), &mut files);
    let cli = cli();
    let (generate, mut faults, mut seen) = (known(&cli, "generate"), Vec::new(), 0);
    for path in &files {
        let known: BTreeSet<String> = reached_by(&cli, path).iter().flat_map(|name| known(&cli, name)).collect();
        for text in literals(path) {
            for flag in flags(&text) {
                seen += 1;
                let of_generate = text.contains("`generate ") && generate.contains(&flag);
                // Flags of a complete command line belong to that command and are checked below.
                let of_line = command_lines(&text).iter().flatten().any(|word| *word == flag);
                if !of_line
                    && !known.contains(&flag)
                    && !of_generate
                    && !FOREIGN.iter().any(|start| flag.starts_with(start))
                {
                    faults.push(format!("{}: {flag} in {text:?}", path.display()));
                }
            }
            for line in command_lines(&text) {
                let unknown = unknown_flags(&line, &cli).into_iter();
                faults.extend(unknown.map(|flag| format!("{}: {flag} of ltx2 {}", path.display(), line.join(" "))));
            }
            for name in commands(&text) {
                if cli.find_subcommand(&name).is_none() {
                    faults.push(format!("{}: ltx2 {name} in {text:?}", path.display()));
                }
            }
        }
    }
    assert!(seen > 100, "{seen} flags seen");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Errors about a missing component mention the flag that loads it from elsewhere.
#[needs(nothing)]
fn model_commands_have_a_flag_for_each_component() {
    let cli = cli();
    for name in ["generate", "bench", "profile", "warm", "compile", "why", "serve", "check", "run"] {
        let known = known(&cli, name);
        let keys = Component::ALL.into_iter().filter_map(Component::override_key);
        for key in keys.chain(["variant"]) {
            let flag = format!("--{}", key.replace('_', "-"));
            assert!(known.contains(&flag), "{name} lacks {flag}");
        }
    }
}

#[needs(nothing)]
fn yaml_keys_in_messages_exist() {
    let schema = json_schema();
    let properties = schema["properties"].as_object().expect("properties");
    let has_keys = |schema_of: &Value| forms(schema_of, schema).iter().any(|form| form["properties"].is_object());
    let sections: BTreeSet<&str> =
        properties.iter().filter(|(_, value)| has_keys(value)).map(|(key, _)| key.as_str()).collect();
    assert!(["model", "request", "guidance", "serve"].iter().all(|section| sections.contains(section)), "{sections:?}");
    let mut files = Vec::new();
    sources(Path::new("src"), &mut files);
    sources(Path::new("crates"), &mut files);
    let (mut faults, mut seen) = (Vec::new(), 0);
    for path in &files {
        for text in literals(path) {
            for key in keys(&text, &sections) {
                seen += 1;
                if !has_key(schema, &key) && !NO_KEYS.iter().any(|start| key.starts_with(start)) {
                    faults.push(format!("{}: {key} in {text:?}", path.display()));
                }
            }
        }
    }
    assert!(seen > 300, "{seen} keys seen");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    // Check the helpers themselves.
    let found = keys("guidance.stg, `request.retake.from`, guidance.video.stg. a/model.vae {model.x}", &sections);
    let unknown: Vec<&String> = found.iter().filter(|key| !has_key(schema, key)).collect();
    assert_eq!((found.len(), unknown), (3, vec![&"guidance.stg".to_string()]));
    let lines = command_lines("run `ltx2 check M --json --vae V`\n  ltx2 doctor --seed 1 && ltx2 init x  # --no");
    let cli = cli();
    let unknown: Vec<String> = lines.iter().flat_map(|line| unknown_flags(line, &cli)).collect();
    assert_eq!((lines.len(), unknown), (3, vec!["--seed".to_string()]));
}
