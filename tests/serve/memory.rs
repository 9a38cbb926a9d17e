//! Memory of `ltx2 serve` as its user starts it, in a plain environment: nothing but the server limits it.

use std::path::Path;

use serde_json::json;

use crate::served::Served;
use crate::site::Client;
use crate::support::{self, needs};

/// Bytes of addresses that the C library takes for a heap of threads, aligned to as many.
const HEAP: u64 = 64 << 20;
/// Videos before memory is looked at for the first time, and in all; `LTX2_SERVE_VIDEOS` sets the latter.
const VIDEOS: [usize; 2] = [40, 240];

/// A server on a configuration, with the environment of a user who sets nothing but `variables`.
fn served(config: &str, state: &Path, more: &[&str], variables: &[(&str, &str)]) -> Served {
    Served::start_on(config, state, more, |serve| {
        serve.env_remove("MALLOC_ARENA_MAX").env_remove("GLIBC_TUNABLES").envs(variables.iter().copied())
    })
}

/// Makes a video and removes it: what is kept of finished videos is not what is looked for.
fn make(served: &Served, seed: usize) {
    let body = json!({"prompt": format!("a red circle, number {seed}"), "size": "64x64", "num_frames": 9, "seed": seed, "steps": 1});
    let id = served.create(&body);
    assert_eq!(served.wait(&id)["status"], "completed");
    let removed = Client::to(served.address).send("DELETE", &format!("/v1/videos/{id}"), None);
    assert_eq!(removed.status, 200, "{}", removed.text());
}

/// Heaps of a process beside the first: each is a writable part with the reserved rest of its addresses behind it.
fn heaps(process: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).expect("its memory");
    let regions: Vec<(u64, u64, &str)> = maps
        .lines()
        .map(|line| {
            let mut words = line.split_whitespace();
            let (start, end) = words.next().and_then(|range| range.split_once('-')).expect("a range");
            let number = |text| u64::from_str_radix(text, 16).expect("a number");
            (number(start), number(end), words.next().expect("rights"))
        })
        .collect();
    let is_heap = |pair: &&[(u64, u64, &str)]| {
        let [(start, used, rights), (rest, end, reserved)] = pair[..] else { return false };
        start % HEAP == 0 && rest == used && end == start + HEAP && (rights, reserved) == ("rw-p", "---p")
    };
    regions.windows(2).filter(is_heap).count()
}

/// Bytes of a process's memory.
fn resident(process: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a status");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
    line.trim().trim_end_matches(" kB").parse::<f64>().expect("a number") * 1024.0
}

/// Of two, one is the first, which is no such mapping; two threads that ask at the same moment may get one more. A user's own number is
/// left alone.
#[needs(cpu)]
fn a_server_s_threads_share_two_heaps_unless_the_user_sets_another_number() {
    let folder = tempfile::tempdir().expect("a folder");
    let count = |name: &str, variables: &[(&str, &str)]| {
        let served = served(support::tiny(), &folder.path().join(name), &[], variables);
        make(&served, 1);
        heaps(served.process.id())
    };
    let (own, users) = (count("own", &[]), count("users", &[("MALLOC_ARENA_MAX", "8")]));
    assert!(own <= 2 && users >= 4, "{own} heaps beside the first, {users} where the user sets eight");
}

/// The toy model, request after request. What grows in the first videos (figures, the tables of threads) is there after forty.
#[needs(cpu, full)]
fn memory_of_the_toy_model_s_server_is_flat() {
    let folder = tempfile::tempdir().expect("a folder");
    let served = served("nano", &folder.path().join("state"), &["--platform", "cpu", "--warm", "64x64x9"], &[]);
    let many = std::env::var("LTX2_SERVE_VIDEOS").map_or(VIDEOS[1], |many| many.parse().expect("a number"));
    let sizes: Vec<f64> = (0..many).map(|n| make(&served, n)).map(|()| resident(served.process.id())).collect();
    // The middle of twenty: a video's own memory is not always freed yet when its end is told.
    let middle = |end: usize| {
        let mut last = sizes[end - 20..end].to_vec();
        last.sort_by(f64::total_cmp);
        last[10]
    };
    let (before, after) = (middle(VIDEOS[0]), middle(many));
    let grown = (after / before - 1.0) * 100.0;
    eprintln!("{:.1} MB after {}, {:.1} MB after {many}: {grown:+.2} %", before / 1e6, VIDEOS[0], after / 1e6);
    assert!(grown < 2.0, "{before} bytes after {} videos, {after} after {many}", VIDEOS[0]);
}
