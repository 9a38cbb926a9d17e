//! Tests of the memory use of `ltx2 serve` without environment variables that limit it, so that only the server does.

use std::path::Path;

use serde_json::json;

use crate::served::Served;
use crate::site::Client;
use crate::support::drawn::with_large_blocks;
use crate::support::standin::{self, Fault, Load, RESOURCE_EXHAUSTED, Standin, link_programs_except};
use crate::support::{self, needs};

/// Size and alignment, in bytes, of the address range that glibc reserves for a thread arena.
const HEAP: u64 = 64 << 20;
/// Number of videos before the first memory measurement, and in total. `LTX2_SERVE_VIDEOS` overrides the total.
const VIDEOS: [usize; 2] = [40, 240];

/// Starts a server with only `variables` among the environment variables that limit memory use.
fn served(config: &str, state: &Path, more: &[&str], variables: &[(&str, &str)]) -> Served {
    Served::start_on(config, state, more, |serve| {
        serve.env_remove("MALLOC_ARENA_MAX").env_remove("GLIBC_TUNABLES").envs(variables.iter().copied())
    })
}

/// Generates a video and deletes it, because the memory of stored videos is not measured.
fn make(served: &Served, seed: usize) {
    let body = json!({"prompt": format!("a red circle, number {seed}"), "size": "64x64", "num_frames": 9, "seed": seed, "steps": 1});
    let id = served.create(&body);
    assert_eq!(served.wait(&id)["status"], "completed");
    let removed = Client::to(served.address).send("DELETE", &format!("/v1/videos/{id}"), None);
    assert_eq!(removed.status, 200, "{}", removed.text());
}

/// Returns the number of thread arenas of malloc in a process, not counting the main arena. A thread arena is a
/// writable mapping followed by a reserved one.
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

/// Returns the resident memory of a process in bytes.
fn resident(process: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a status");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
    line.trim().trim_end_matches(" kB").parse::<f64>().expect("a number") * 1024.0
}

/// The server limits malloc to two arenas. The main arena is not counted, but two threads that allocate at the same
/// moment may create an additional one. A limit that the user sets is kept.
#[needs(cpu)]
fn server_threads_share_two_malloc_arenas() {
    let folder = tempfile::tempdir().expect("a folder");
    let count = |name: &str, variables: &[(&str, &str)]| {
        let served = served(support::tiny(), &folder.path().join(name), &[], variables);
        make(&served, 1);
        heaps(served.process.id())
    };
    let (own, users) = (count("own", &[]), count("users", &[("MALLOC_ARENA_MAX", "8")]));
    assert!(own <= 2 && users >= 4, "{own} heaps beside the first, {users} where the user sets eight");
}

/// Sends requests to the toy model one after another. Data structures that grow with the first videos (metrics, thread
/// tables) have reached their final size after forty.
#[needs(cpu, full)]
fn server_memory_stays_constant_over_many_videos() {
    let folder = tempfile::tempdir().expect("a folder");
    let served = served("nano", &folder.path().join("state"), &["--platform", "cpu", "--warm", "64x64x9"], &[]);
    let many = std::env::var("LTX2_SERVE_VIDEOS").map_or(VIDEOS[1], |many| many.parse().expect("a number"));
    let sizes: Vec<f64> = (0..many).map(|n| make(&served, n)).map(|()| resident(served.process.id())).collect();
    // Takes the median of twenty measurements, because the memory of a video may be freed after its end is reported.
    let middle = |end: usize| {
        let mut last = sizes[end - 20..end].to_vec();
        last.sort_by(f64::total_cmp);
        last[10]
    };
    let (before, after) = (middle(VIDEOS[0]), middle(many));
    let grown = (after / before - 1.0) * 100.0;
    eprintln!(
        "measured: {:.1} MB after {}, {:.1} MB after {many}: {grown:+.2} %",
        before / 1e6,
        VIDEOS[0],
        after / 1e6
    );
    assert!(grown < 2.0, "{before} bytes after {} videos, {after} after {many}", VIDEOS[0]);
}

/// The weights that one request streams stay in device memory for another. Neither an earlier plan nor an earlier failure
/// is compiled again.
#[needs(cpu)]
fn streamed_weights_are_chosen_for_each_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, compiled) = (folder.path().join("model"), folder.path().join("compiled"));
    std::fs::create_dir(&model).expect("a folder");
    let model = format!("model.path={}", with_large_blocks(&model));
    let path = |name: &str| folder.path().join(name);
    let start = |name: &str, standin: &Standin, cache: &Path, limit: &str| {
        let more = [&*model, "runtime.attention=plain", "request.max_sequence_length=1024", limit];
        let more: Vec<&str> = more.into_iter().flat_map(|value| ["--set", value]).collect();
        Served::start_on(support::tiny(), &path(name), &more, |serve| {
            standin.give(serve).env("LTX2_COMPILE_CACHE", cache)
        })
    };
    let request = |served: &Served, cfg: usize, seed: usize| {
        let guidance = json!({"video": {"cfg": cfg}, "audio": {"cfg": cfg}});
        let body = json!({"prompt": "a red circle", "size": "64x96", "num_frames": 9, "seed": seed, "steps": 1, "ltx2": {"guidance": guidance}});
        served.wait(&served.create(&body))
    };
    let count = || std::fs::read_to_string(&compiled).map_or(0, |text| text.lines().count());
    let standin = || Standin::new().load(Load::Cuda).log(&compiled);
    // Programs need 0.057 GiB without and 0.073 GiB with classifier-free guidance, of which 0.016 GiB can be streamed.
    let (known, others) = (path("known"), path("others"));
    link_programs_except("denoise", &standin::programs(), &known);
    let each = standin().at("PJRT_Client_Compile", 0, &Fault::Delay(0));
    let served = start("sizes", &each, &known, "runtime.memory_limit=0.066");
    let mut compiles = 0;
    for (seed, (cfg, choice)) in
        [(4, "streaming weights"), (1, "all weights stay"), (4, "streaming weights"), (1, "all weights stay")]
            .into_iter()
            .enumerate()
    {
        assert_eq!(request(&served, cfg, seed)["status"], "completed");
        if seed > 0 {
            served.says(&format!("runtime.stream: auto: {choice}"));
        }
        assert!(seed < 2 || count() == compiles, "request {seed} compiles");
        compiles = count();
    }
    drop(served);

    std::fs::remove_file(&compiled).expect("removed");
    let fault = Fault::Fail(RESOURCE_EXHAUSTED, "out of memory while trying to allocate 1 GiB");
    link_programs_except("denoise", &known, &others);
    // The server's first compilation, before it is ready, succeeds. Each rule counts the calls that earlier rules let pass.
    let full = (0..4).fold(standin(), |standin, _| standin.at("PJRT_Client_Compile/denoise", 2, &fault));
    let served = start("full", &full, &others, "runtime.memory_limit=1");
    let errors = [1, 2].map(|seed| request(&served, 1, seed)["error"].clone());
    assert!(errors[0].to_string().contains("denoise"), "{errors:?}");
    // The first choice is compiled again after the loaded parameters are dropped.
    assert_eq!((&errors[0], count()), (&errors[1], 4));
}
