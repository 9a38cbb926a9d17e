//! No cyclic dependencies among files, by `use` or by path. A module and its submodules count as one and may depend on
//! each other. Unit tests are ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::support::needs;

type Name = Vec<String>;

/// A file as a module.
#[derive(Default)]
struct Module {
    file: PathBuf,
    /// Names bound by `use`, with their paths.
    bound: BTreeMap<String, Name>,
    /// Modules imported by glob.
    globs: Vec<Name>,
    /// Every path in the file.
    named: BTreeSet<Name>,
}

/// The modules of a crate, by path.
#[derive(Default)]
struct Crate(BTreeMap<Name, Module>);

impl Crate {
    fn read(root: &Path) -> Self {
        let mut all = Crate::default();
        all.read_folder(root, &mut Vec::new());
        all
    }

    fn read_folder(&mut self, folder: &Path, path: &mut Name) {
        for entry in fs::read_dir(folder).expect("readable").map(|e| e.expect("an entry").path()) {
            let stem = entry.file_stem().expect("a name").to_string_lossy().into_owned();
            if entry.is_dir() {
                path.push(stem);
                self.read_folder(&entry, path);
                path.pop();
            } else if entry.extension().is_some_and(|e| e == "rs") && stem != "main" {
                let mut name = path.clone();
                name.extend((stem != "mod" && stem != "lib").then_some(stem));
                if !name.iter().any(|part| part == "tests") {
                    self.0.insert(name, Module::read(entry));
                }
            }
        }
    }

    /// Resolves `path` in `module` to the module that defines it, following `pub use`; `None` for other crates.
    fn definer(&self, module: &[String], path: &[String], seen: &mut Vec<(Name, Name)>) -> Option<Name> {
        let key = (module.to_vec(), path.to_vec());
        if seen.contains(&key) {
            return None;
        }
        seen.push(key);
        match path.first()?.as_str() {
            "crate" => self.inside(&[], &path[1..], seen),
            "self" => self.inside(module, &path[1..], seen),
            "super" => {
                let ups = path.iter().take_while(|p| *p == "super").count();
                self.inside(&module[..module.len() - ups], &path[ups..], seen)
            }
            first if self.knows(module, first) => self.inside(module, path, seen),
            _ => None,
        }
    }

    fn child(&self, module: &[String], name: &str) -> Option<Name> {
        let child = [module, &[name.to_string()]].concat();
        self.0.contains_key(&child).then_some(child)
    }

    fn knows(&self, module: &[String], name: &str) -> bool {
        self.child(module, name).is_some() || self.0[module].bound.contains_key(name)
    }

    /// Resolves ([`Crate::definer`]) a path that starts with a name of `module`.
    fn inside(&self, module: &[String], path: &[String], seen: &mut Vec<(Name, Name)>) -> Option<Name> {
        let Some((first, rest)) = path.split_first() else { return Some(module.to_vec()) };
        if let Some(child) = self.child(module, first) {
            return self.inside(&child, rest, seen);
        }
        // A binding whose path starts with its own name refers to another crate; modules of that name were found above.
        if let Some(bound) = self.0[module].bound.get(first).filter(|bound| bound.first() != Some(first)) {
            return self.definer(module, &[bound, rest].concat(), seen);
        }
        let mut globs = self.0[module].globs.iter().filter_map(|glob| self.definer(module, glob, &mut seen.clone()));
        match globs.find(|target| target != module && self.knows(target, first)) {
            Some(target) => self.inside(&target, path, seen),
            None => Some(module.to_vec()),
        }
    }

    /// Returns the dependencies of each module, without itself, its parents and its submodules.
    fn arrows(&self) -> Arrows<'_> {
        let of = |(name, module): (&'_ Name, &Module)| {
            let needed = module.named.iter().filter_map(|path| self.definer(name, path, &mut Vec::new()));
            needed.filter(|other| !name.starts_with(other) && !other.starts_with(name)).collect()
        };
        self.0.iter().map(|entry| (entry.0, of(entry))).collect()
    }
}

impl Module {
    fn read(file: PathBuf) -> Self {
        let text = fs::read_to_string(&file).expect("text");
        let words = words(&untested(&text));
        let mut module = Module { file, ..Module::default() };
        let mut at = 0;
        while at < words.len() {
            let is_name = words[at].starts_with(|c: char| c.is_alphabetic() || c == '_');
            if words[at] == "use" {
                at = module.bring(&words, at + 1, &[]);
            } else if is_name && words.get(at + 1).is_some_and(|w| w == "::") {
                let mut path = vec![words[at].clone()];
                while words.get(at + 1).is_some_and(|w| w == "::") && words[at + 2] != "<" && words[at + 2] != "{" {
                    path.push(words[at + 2].clone());
                    at += 2;
                }
                module.named.insert(path);
                at += 1;
            } else {
                at += 1;
            }
        }
        module
    }

    /// Reads one `use` tree with the prefix `path`; returns the position after it.
    fn bring(&mut self, words: &[String], mut at: usize, path: &[String]) -> usize {
        let mut path = path.to_vec();
        loop {
            match words[at].as_str() {
                "{" => {
                    at += 1;
                    while words[at] != "}" {
                        at = self.bring(words, at, &path);
                        at += usize::from(words[at] == ",");
                    }
                    return at + 1;
                }
                "*" => {
                    self.globs.push(path);
                    return at + 1;
                }
                "::" => at += 1,
                name => {
                    path.push(name.to_string());
                    at += 1;
                    if words[at] != "::" {
                        break;
                    }
                }
            }
        }
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        let mut name = path.last().cloned().unwrap_or_default();
        if words[at] == "as" {
            name.clone_from(&words[at + 1]);
            at += 2;
        }
        self.named.insert(path.clone());
        self.bound.insert(name, path);
        at
    }
}

/// Removes the unit tests from a source: an inline test module ends the file; a `mod tests;` line may be anywhere.
fn untested(text: &str) -> String {
    let mut parts = text.split("#[cfg(test)]\n");
    let mut kept = parts.next().unwrap_or_default().to_string();
    for part in parts {
        // Other attributes may follow.
        let mut item = part;
        while item.starts_with("#[") {
            item = item.split_once('\n').map_or("", |(_, rest)| rest);
        }
        if !item.starts_with("mod ") {
            kept.push_str(part);
            continue;
        }
        let (head, rest) = item.split_once('\n').unwrap_or((item, ""));
        if !head.ends_with(';') {
            break;
        }
        kept.push_str(rest);
    }
    kept
}

/// Returns the tokens of a source without comments, strings and characters.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '"' => 2 + text_length(&rest[1..]),
            'b' if is_raw(&rest[1..]) => 1,
            'r' if is_raw(rest) => {
                let hashes = rest[1..].chars().take_while(|c| *c == '#').count();
                let end = format!("\"{}", "#".repeat(hashes));
                let start = 2 + hashes;
                start + rest[start..].find(&end).expect("a text ends") + end.len()
            }
            '\'' if rest[1..].starts_with('\\') => 4 + rest[3..].find('\'').expect("a character ends"),
            '\'' if rest.chars().nth(2) == Some('\'') => 2 + rest.chars().nth(1).map_or(0, char::len_utf8),
            ':' if rest.starts_with("::") => 2,
            c if c.is_alphanumeric() || c == '_' => {
                rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
            }
            c => c.len_utf8(),
        };
        let (word, behind) = rest.split_at(length);
        let counts = !first.is_whitespace() && !matches!(first, '"' | '\'') && !word.starts_with("//");
        if counts && !word.contains('"') {
            words.push(word.to_string());
        }
        rest = behind;
    }
    words
}

/// Returns whether a raw string starts here.
fn is_raw(rest: &str) -> bool {
    rest.strip_prefix('r').is_some_and(|rest| rest.trim_start_matches('#').starts_with('"'))
}

/// Returns the length of a string literal up to its closing quote.
fn text_length(text: &str) -> usize {
    let mut escaped = false;
    let end = text.find(|c| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    end.expect("a text ends")
}

type Arrows<'a> = BTreeMap<&'a Name, BTreeSet<Name>>;

/// Returns all modules reachable from a module over one or more dependencies.
fn reached<'a>(arrows: &'a Arrows, from: &'a Name) -> BTreeSet<&'a Name> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(at) = next.pop() {
        next.extend(arrows[at].iter().filter(|to| seen.insert(*to)));
    }
    seen
}

/// Returns the groups of modules that all depend on each other.
fn circles<'a>(arrows: &'a Arrows) -> BTreeSet<BTreeSet<&'a Name>> {
    let all: BTreeMap<&Name, BTreeSet<&Name>> = arrows.keys().map(|name| (*name, reached(arrows, name))).collect();
    let with = |name: &Name| all.keys().copied().filter(|o| all[name].contains(o) && all[o].contains(name)).collect();
    all.keys().filter(|name| all[*name].contains(*name)).map(|name| with(name)).collect()
}

#[needs(nothing)]
fn source_files_have_no_cyclic_dependencies() {
    let crates = fs::read_dir("crates").expect("readable").map(|e| e.expect("an entry").path().join("src"));
    let mut count = 0;
    for root in crates.chain([PathBuf::from("src")]) {
        let all = Crate::read(&root);
        let arrows = all.arrows();
        count += arrows.values().map(BTreeSet::len).sum::<usize>();
        let mut found = String::new();
        for circle in circles(&arrows) {
            found.push_str("\na circle:");
            for name in &circle {
                let to: Vec<_> = arrows[name].iter().filter(|to| circle.contains(to)).map(|to| to.join("::")).collect();
                found.push_str(&format!("\n  {} uses {}", all.0[*name].file.display(), to.join(", ")));
            }
        }
        assert!(found.is_empty(), "{found}");
    }
    assert!(count > 1000, "{count} arrows seen");
}

#[needs(nothing)]
fn cycles_through_reexports_and_paths_are_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).and_then(|()| fs::write(&path, text)).expect("written");
    };
    let found = || {
        let all = Crate::read(folder.path());
        let arrows = all.arrows();
        let named: Vec<String> = circles(&arrows).iter().flatten().map(|name| name.join("::")).collect();
        named.join(" ")
    };
    write("lib.rs", "mod a;\nmod b;\nmod c;\n");
    write("a/mod.rs", "mod inner;\npub use inner::{Thing as Other, more::*};\nuse crate::b;\n");
    write("a/inner.rs", "use super::*;\npub struct Thing; // crate::c::C\nconst T: &str = \"crate::c::C\";\n");
    write("b.rs", "use crate::a::Other;\n");
    let texts = "const C: &[u8] = br#\"\"\"#;\nfn f(r#in: u8) -> crate::b::B { b'\"'; '\\''; todo!() }";
    write("c.rs", &format!("use std::fmt;\n{texts}\n"));
    assert_eq!(found(), "");
    write("a/inner.rs", "pub struct Thing;\nfn f() { crate::b::g::<u8>() }\n");
    assert_eq!(found(), "a::inner b");
    write("a/inner.rs", "pub struct Thing;\n#[cfg(test)]\n#[allow(lint)]\nmod tests {\n    use crate::b::B;\n}\n");
    assert_eq!(found(), "");
    write("a/inner.rs", "#[cfg(test)]\nmod tests;\n\nuse crate::b::B;\n");
    assert_eq!(found(), "a::inner b", "behind tests in a file of their own");
    write("a/inner.rs", "use crate::{c::{self, C}};\n");
    assert_eq!(found(), "a::inner b c", "through the middle one");
}
