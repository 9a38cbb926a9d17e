//! Untrusted input, valid and damaged: no reader may panic, abort, take long or allocate memory that the input does not
//! justify.
//! The readers are those of `fuzz/`, which libFuzzer runs for longer (`make fuzz`).
//!
//! `LTX2_FUZZ_CASES=2000000` sets the number of damaged inputs per kind; the default is 200.

#[path = "../../fuzz/src/lib.rs"]
mod kinds;
mod protobuf;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::support::needs;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Bytes with a meaning for readers: lengths, signs, quotes, references, and huge numbers.
const WORDS: [&[u8]; 22] = [
    b"{",
    b"}",
    b"[",
    b"]",
    b"\"",
    b":",
    b",",
    b"-",
    b"null",
    b"true",
    b"1e400",
    b"18446744073709551615",
    b"-1",
    b"0",
    b"../",
    b"&a [*a, *a]",
    b"*a",
    b"\n  ",
    b"\xff\xff\xff\xff\xff\xff\xff\x0f",
    b"\0\0\0\0",
    b"1152921504606846976",
    b"\xc3\x28",
];

/// A mutation of bytes; positions are fractions of the length.
#[derive(Clone, Debug)]
enum Damage {
    Bit(f64, u8),
    Byte(f64, u8),
    Word(f64, usize),
    Over(f64, usize),
    Remove(f64, usize),
    Repeat(f64, usize, usize),
    Move(f64, f64, usize),
    End(f64),
    Field(f64, protobuf::Change),
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = || 0.0..1.0f64;
    prop_oneof![
        (at(), 0..8u8).prop_map(|(at, bit)| Damage::Bit(at, bit)),
        (at(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        (at(), 0..WORDS.len()).prop_map(|(at, word)| Damage::Word(at, word)),
        (at(), 0..WORDS.len()).prop_map(|(at, word)| Damage::Over(at, word)),
        (at(), 1..64usize).prop_map(|(at, count)| Damage::Remove(at, count)),
        (at(), 1..32usize, 1..40usize).prop_map(|(at, length, times)| Damage::Repeat(at, length, times)),
        (at(), at(), 1..64usize).prop_map(|(from, to, length)| Damage::Move(from, to, length)),
        at().prop_map(Damage::End),
    ]
}

/// Several mutations; for messages either of bytes or of fields, because an overlong varint would make all fields
/// unreadable.
fn damages(of_messages: bool) -> impl Strategy<Value = Vec<Damage>> {
    let field = (0.0..1.0f64, protobuf::change()).prop_map(|(part, change)| Damage::Field(part, change));
    let fields = if of_messages { 3 } else { 0 };
    let several = |one: BoxedStrategy<Damage>| prop::collection::vec(one, 1..6);
    prop_oneof![1 => several(damage().boxed()), fields => several(field.boxed())]
}

/// Returns the mutated seed; a message starts after the first `ahead` bytes.
fn damaged(seed: &[u8], damages: &[Damage], ahead: usize) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for d in damages {
        let place = |part: f64| (part * bytes.len() as f64) as usize;
        let cut = |part: f64, length: usize| place(part)..(place(part) + length).min(bytes.len());
        match *d {
            Damage::Bit(at, bit) => {
                let at = place(at);
                bytes.get_mut(at).into_iter().for_each(|b| *b ^= 1 << bit);
            }
            Damage::Byte(at, byte) => {
                let at = place(at);
                bytes.get_mut(at).into_iter().for_each(|b| *b = byte);
            }
            Damage::Word(at, word) => drop(bytes.splice(cut(at, 0), WORDS[word].iter().copied())),
            Damage::Over(at, word) => drop(bytes.splice(cut(at, WORDS[word].len()), WORDS[word].iter().copied())),
            Damage::Remove(at, length) => drop(bytes.drain(cut(at, length))),
            Damage::Repeat(at, length, times) => {
                let range = cut(at, length);
                let more = bytes[range.clone()].repeat(times);
                drop(bytes.splice(range, more));
            }
            Damage::Move(from, to, length) => {
                let (piece, to) = (bytes[cut(from, length)].to_vec(), place(to));
                drop(bytes.splice(to..to, piece));
            }
            Damage::End(at) => bytes.truncate(place(at)),
            Damage::Field(part, change) => {
                let message = bytes.get(ahead..).and_then(|message| protobuf::changed(message, part, change));
                bytes = message.map_or(bytes, |new| [&seed[..ahead], &new].concat());
            }
        }
    }
    bytes
}

/// Collects the files below a folder whose names match.
fn files(folder: &Path, wanted: &dyn Fn(&str) -> bool, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> = fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry").path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            files(&path, wanted, found);
        } else if path.file_name().is_some_and(|n| wanted(&n.to_string_lossy())) {
            found.push(path);
        }
    }
}

/// Maximum time to read one input. Debug builds are slower.
const MAX_TIME: Duration = Duration::from_secs(if cfg!(debug_assertions) { 10 } else { 1 });

/// Reads an input, which must take at most [`MAX_TIME`]. A slow input is read again, because another program may have
/// delayed the first attempt.
fn timed(read: kinds::Reader, bytes: &[u8]) -> kinds::Read {
    for _ in 0..2 {
        let since = Instant::now();
        let outcome = read(bytes);
        if since.elapsed() <= MAX_TIME {
            return outcome;
        }
    }
    panic!("reading {} bytes takes more than {MAX_TIME:?}", bytes.len());
}

/// Seeds that must be rejected.
const REFUSED: [&str; 1] = ["huge.png"];

/// Returns the valid inputs of a kind: the repository's own files and `fuzz/seeds`.
fn seeds(kind: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    let mut take = |folder: &str, wanted: &dyn Fn(&str) -> bool| files(&root.join(folder), wanted, &mut found);
    match kind {
        "config" => {
            take("configs", &|n| n.ends_with(".yml"));
            take("fuzz/seeds/config", &|_| true);
        }
        "layout" => take("shardings", &|n| n.ends_with(".yml")),
        "experiment" => take("experiments", &|n| n.ends_with(".yml")),
        "tokenizer" => take("tests/fixtures/tokenizer", &|n| n == "tokenizer.json"),
        "model_config" => take("tests/fixtures/models", &|n| n == "config.json" || n == "scheduler_config.json"),
        "trace" => take("tests/fixtures/trace", &|n| n.ends_with(".pb")),
        other => take(&format!("fuzz/seeds/{other}"), &|_| true),
    }
    found.into_iter().map(|path| (path.clone(), fs::read(&path).expect("a seed"))).collect()
}

fn check(kind: &str) {
    let read = kinds::TARGETS.iter().find(|(name, _)| *name == kind).expect("a kind").1;
    let seeds = seeds(kind);
    assert!(!seeds.is_empty(), "no seed of {kind}");
    for (path, seed) in &seeds {
        let refused = REFUSED.iter().any(|name| path.ends_with(name));
        match timed(read, seed) {
            Ok(()) => assert!(!refused, "{} is accepted", path.display()),
            Err(reason) => assert!(refused, "{} is rejected: {reason}", path.display()),
        }
    }
    let cases = std::env::var("LTX2_FUZZ_CASES").map_or(200, |n| n.parse().expect("a number"));
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let all = (0..seeds.len(), damages(matches!(kind, "module" | "trace")));
    // A module starts with a byte that selects the chip.
    let ahead = usize::from(kind == "module");
    let outcome = TestRunner::new_with_rng(config, rng).run(&all, |(seed, damages)| {
        drop(timed(read, &damaged(&seeds[seed].1, &damages, ahead)));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{kind}: {error}");
    }
}

macro_rules! each {
    ($($kind:ident),*) => {
        $(#[needs(nothing)] fn $kind() { check(stringify!($kind)); })*

        #[needs(nothing)]
        fn every_fuzz_target_has_a_test() {
            assert_eq!(kinds::TARGETS.map(|(name, _)| name), [$(stringify!($kind)),*]);
        }
    };
}
each!(
    config,
    layout,
    experiment,
    safetensors,
    index,
    tokenizer,
    model_config,
    lora,
    module,
    trace,
    media,
    words,
    request,
    mp4,
    form,
    query,
    data_url
);
