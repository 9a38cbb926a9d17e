//! Compile cache: entries written by runs, by `ltx2 compile --save` and by `ltx2 warm`, and their reuse.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use crate::support::{self, needs};
use serde_json::Value;

/// Folder with a compile cache and the videos of some runs.
struct Folder(tempfile::TempDir);

/// stderr and report of a run.
struct Run {
    /// Number of programs compiled, and number loaded from the cache.
    compiles: u64,
    hits: u64,
    /// Hashes of frames and samples.
    bits: Value,
    /// Hashes of the programs by name.
    programs: Value,
    stderr: String,
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().expect("UTF-8").to_string()
    }

    /// Runs `ltx2` in the folder, which would also contain the default cache.
    fn ltx2(&self, arguments: &[&str]) -> Output {
        let mut run = support::ltx2();
        run.env_remove("LTX2_COMPILE_CACHE").env("HOME", self.0.path()).env("XDG_CACHE_HOME", self.0.path());
        let out = run.args(arguments).output().expect("the binary runs");
        assert!(out.status.success(), "{arguments:?}: {}", text(&out.stderr));
        out
    }

    /// Returns the arguments common to `generate` and `compile`.
    fn request(&self, cache: &str, more: &[&str]) -> Vec<String> {
        let cache = format!("runtime.compile_cache={cache}");
        ["-c", support::tiny(), "--set", &cache].iter().chain(more).map(|s| (*s).to_string()).collect()
    }

    fn generate(&self, name: &str, cache: &str, more: &[&str]) -> Run {
        let request = self.request(cache, more);
        let video = self.path(&format!("{name}.mp4"));
        let mut arguments = vec!["generate", "-o", &video];
        arguments.extend(request.iter().map(String::as_str));
        let out = self.ltx2(&arguments);
        let sidecar = fs::read_to_string(Path::new(&video).with_extension("json")).expect("a sidecar");
        let sidecar: Value = serde_json::from_str(&sidecar).expect("JSON");
        let programs = sidecar["timings"]["programs"].as_object().expect("programs");
        assert_eq!(programs.len(), 7);
        for (name, p) in programs {
            let (origin, time) = if p["compiles"] == 1 { ("compiled", "compile") } else { ("cache hit", "cache") };
            assert_eq!(p["origin"], origin, "{name}: {p}");
            assert!(p[format!("{time}_seconds")].as_f64() > Some(0.0), "{name}: {p}");
        }
        let count = |key: &str| programs.values().filter_map(|p| p[key].as_u64()).sum();
        Run {
            compiles: count("compiles"),
            hits: count("cache_hits"),
            bits: sidecar["sha256"].clone(),
            programs: sidecar["programs"].clone(),
            stderr: text(&out.stderr),
        }
    }

    /// Returns the cache entries sorted by name.
    fn entries(&self, cache: &str) -> Vec<PathBuf> {
        let files = fs::read_dir(self.path(cache)).expect("a cache").map(|e| e.expect("an entry").path());
        let mut files: Vec<PathBuf> = files.collect();
        files.sort();
        files
    }
}

#[needs(cpu)]
fn second_run_compiles_nothing_and_is_bit_identical() {
    let folder = Folder::new();
    let cache = folder.path("cache");
    let known = &support::tiny_sidecar()["sha256"];
    support::copy_programs(Path::new(&cache), &["prepare"]);
    let first = folder.generate("a", &cache, &[]);
    assert_eq!((first.compiles, first.hits, &first.bits), (1, 6, known));
    assert_eq!(folder.entries("cache").len(), 7);
    let second = folder.generate("b", &cache, &[]);
    assert_eq!((second.compiles, second.hits, &second.bits), (0, 7, &first.bits));
    let said = second.stderr.lines().filter(|l| l.starts_with("  ") && l.ends_with(" s  cache hit"));
    assert_eq!(said.count(), 7, "{}", second.stderr);

    // A truncated entry and an entry of another program: both are reported, recompiled and replaced.
    let entries = folder.entries("cache");
    let whole = fs::read(&entries[0]).expect("an entry");
    fs::write(&entries[0], &whole[..whole.len() - 100]).expect("written");
    fs::copy(&entries[2], &entries[1]).expect("copied");
    let third = folder.generate("c", &cache, &[]);
    assert_eq!((third.compiles, third.hits, &third.bits), (2, 5, &first.bits));
    let warnings: Vec<&str> = third.stderr.lines().filter(|l| l.contains("recompiling ")).collect();
    assert_eq!(warnings.len(), 2, "{}", third.stderr);
    for (file, why) in [(&entries[0], "bytes"), (&entries[1], "the entry belongs to another program")] {
        let file = file.display().to_string();
        assert!(warnings.iter().any(|w| w.contains(&file) && w.contains(why)), "{file}: {warnings:?}");
    }
    assert_eq!(folder.entries("cache"), entries);
    // A loop is the CPU's form of layers, so setting it changes no program. The sidecar records it.
    let looped = folder.generate("d", &cache, &["--set", "runtime.layers=loop"]);
    assert_eq!((looped.compiles, looped.hits, &looped.bits), (0, 7, &first.bits));
    let sidecar = |name: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(folder.path(name)).expect("a sidecar")).expect("JSON")
    };
    let form = |name: &str| (sidecar(name)["config"]["runtime"]["layers"].clone(), sidecar(name)["layers"].clone());
    let loop_by = |reason: &str| serde_json::json!({"platform": "cpu", "form": "loop", "reason": reason});
    assert_eq!(form("c.json"), ("auto".into(), loop_by("default of the platform")));
    assert_eq!(form("d.json"), ("loop".into(), loop_by("set in the configuration")));

    // Compiling the same program ahead of time hits the same entry; other compiler options make a new one.
    let save = |more: &[&str]| {
        let request = folder.request("off", more);
        let mut arguments = vec!["compile", "--target", "cpu:1", "--program", "vocoder", "--save", &cache];
        arguments.extend(request.iter().map(String::as_str));
        let table = text(&folder.ltx2(&arguments).stdout);
        assert!(table.lines().any(|l| l.starts_with(&format!("saved       {cache}/"))), "{table}");
        folder.entries("cache").len()
    };
    assert_eq!(save(&[]), 7);
    assert_eq!(save(&["--set", "runtime.xla_flags.xla_cpu_enable_fast_min_max=true"]), 8);
}

#[needs(cpu)]
fn precompiled_programs_are_hits_and_cache_off_writes_nothing() {
    let folder = Folder::new();
    let cache = folder.path("ahead");
    let known = &support::tiny_sidecar()["sha256"];
    let request = folder.request("off", &[]);
    support::copy_programs(Path::new(&cache), &["prepare", "audio_decoder"]);
    assert_eq!(folder.entries("ahead").len(), 5);
    let mut programs = Vec::new();
    for program in ["prepare", "audio-decoder"] {
        let mut arguments = vec!["compile", "--target", "cpu:1", "--program", program, "--save", &cache, "--json", "-"];
        arguments.extend(request.iter().map(String::as_str));
        programs.push(serde_json::from_slice::<Value>(&folder.ltx2(&arguments).stdout).expect("JSON"));
    }
    for p in &programs {
        let file = p["saved"]["path"].as_str().expect("a file");
        let size = fs::metadata(file).expect("an entry").len();
        assert_eq!(p["saved"]["bytes"], size, "{p}");
        let entry = fs::read(file).expect("an entry");
        let header = entry.split(|b| *b == b'\n').next().expect("a line");
        let header: Value = serde_json::from_slice(header).expect("JSON");
        assert_eq!((&header["name"], &header["program"]), (&p["program"], &p["hash"]));
        assert_eq!(header["devices"], serde_json::json!(["0@0"]));
    }
    let run = folder.generate("a", &cache, &[]);
    assert_eq!((run.compiles, run.hits, &run.bits), (0, 7, known), "{}", run.stderr);
    for p in &programs {
        let name = p["program"].as_str().expect("a name");
        assert_eq!(run.programs[name], p["hash"], "the run uses the program compiled ahead of time");
    }

    // Without a cache, only the result is written.
    let own = tempfile::tempdir().expect("a folder");
    let mut run = support::run_upsampler(own.path());
    run.env("LTX2_COMPILE_CACHE", "off").env("XDG_CACHE_HOME", own.path()).env("HOME", own.path());
    let ran = run.current_dir(own.path()).output().expect("runs");
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let names = fs::read_dir(own.path()).expect("a folder").map(|e| e.expect("an entry").file_name());
    let mut names: Vec<_> = names.collect();
    names.sort();
    assert_eq!(names, ["in.safetensors", "out.safetensors"]);
}

/// Runs `ltx2 warm`; returns each program's name and whether it was compiled.
fn warm(folder: &Folder, cache: &str, more: &[&str]) -> Vec<(String, bool)> {
    let request = folder.request(cache, more);
    let mut arguments = vec!["warm", "--json"];
    arguments.extend(request.iter().map(String::as_str));
    let programs: Value = serde_json::from_slice(&folder.ltx2(&arguments).stdout).expect("JSON");
    let each = programs.as_array().expect("programs").iter().map(|p| {
        assert!(p["seconds"].as_f64() > Some(0.0) && Path::new(p["path"].as_str().expect("a file")).exists(), "{p}");
        (p["program"].as_str().expect("a name").to_owned(), p["compiled"].as_bool().expect("whether it was compiled"))
    });
    each.collect()
}

#[needs(cpu, full)]
fn run_after_warm_command_compiles_nothing() {
    let folder = Folder::new();
    let cache = folder.path("warm");
    let known = &support::tiny_sidecar()["sha256"];
    // Start without two of the seven programs.
    support::copy_programs(Path::new(&cache), &["prepare", "vocoder"]);
    let first = warm(&folder, &cache, &[]);
    let made: Vec<&str> = first.iter().filter(|(_, compiled)| *compiled).map(|(name, _)| &**name).collect();
    assert_eq!((first.len(), made), (7, vec!["prepare", "vocoder"]));
    let run = folder.generate("a", &cache, &[]);
    assert_eq!((run.compiles, run.hits, &run.bits), (0, 7, known), "{}", run.stderr);
    // The printed table; the second time nothing is compiled.
    let request = folder.request(&cache, &[]);
    let arguments: Vec<&str> = std::iter::once("warm").chain(request.iter().map(String::as_str)).collect();
    let table = text(&folder.ltx2(&arguments).stdout);
    assert_eq!(table.lines().filter(|l| l.ends_with(" s  already cached")).count(), 7, "{table}");
    assert!(table.ends_with(&format!("0 compiled, 7 already cached in {cache}\n")), "{table}");

    // The programs that generate noise and random weights are cached too; no weight files are needed.
    let drawn = ["--weights", "random", "--set", "sampler.noise=device"];
    let all = warm(&folder, &cache, &drawn);
    let of = |name: &str| all.iter().filter(|(n, compiled)| n == name && *compiled).count();
    assert!(of("noise") == 1 && of("random weights") > 1, "{all:?}");
    let entries = folder.entries("warm");
    let video = folder.path("drawn.mp4");
    let request = folder.request(&cache, &drawn);
    let mut arguments = vec!["generate", "-o", &video];
    arguments.extend(request.iter().map(String::as_str));
    folder.ltx2(&arguments);
    assert_eq!(folder.entries("warm"), entries, "a program that was not warmed");
    let sidecar = fs::read_to_string(folder.path("drawn.json")).expect("a sidecar");
    let sidecar: Value = serde_json::from_str(&sidecar).expect("JSON");
    let programs = sidecar["timings"]["programs"].as_object().expect("programs");
    for name in ["noise", "random weights", "denoise"] {
        assert_eq!(programs[name]["compiles"], 0, "{name}: {}", programs[name]);
    }
}

#[needs(cpu)]
fn warm_command_without_a_cache_is_an_error() {
    let folder = Folder::new();
    let request = folder.request("off", &[]);
    let ran = support::ltx2().arg("warm").args(request).output().expect("the binary runs");
    let said = text(&ran.stderr);
    assert_eq!(ran.status.code(), Some(2), "{said}");
    assert!(said.contains("runtime.compile_cache is off"), "{said}");
}
