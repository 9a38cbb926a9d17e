//! Tests with many jobs: their memory, open files and threads, and the device's idle time.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ltx2::config::Seconds;
use ltx2::pjrt::limit_heaps;
use ltx2::serve::id::VideoId;
use ltx2::serve::job::JobState;
use ltx2::serve::jobs::JobTiming;
use ltx2::serve::store::FileStore;

use crate::scripted::{Server, anyone, files, frames_of, quick_folder, settings};
use crate::support::{full, needs};

/// Returns the resident memory of this process in bytes.
fn memory() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = text.lines().find(|line| line.starts_with("VmRSS:")).expect("its memory");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("a number") * 1024
}

/// Returns the numbers of open files and threads of this process.
fn handles() -> [usize; 2] {
    ["fd", "task"].map(|name| std::fs::read_dir(Path::new("/proc/self").join(name)).expect("a folder").count())
}

/// Runs a test of this binary in a separate process, so that other tests do not affect its measurements. Removes
/// environment variables that limit memory use, because the server must limit it by itself.
pub fn run_in_separate_process(test: &str) {
    let mut run = Command::new(std::env::current_exe().expect("this binary"));
    run.args([test, "--exact"])
        .env("LTX2_TEST_MEMBER", "1")
        .env_remove("MALLOC_ARENA_MAX")
        .env_remove("GLIBC_TUNABLES")
        .env_remove("LTX2_TEST_LOG")
        .env_remove("LTX2_REQUIRE");
    let ran = run.output().expect("runs");
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && said.contains("1 passed"), "{said}");
    said.lines().filter(|line| line.starts_with("measured: ")).for_each(|line| eprintln!("{line}"));
}

#[needs(member)]
fn queued_jobs_use_little_memory_and_leak_nothing() {
    limit_heaps();
    files();
    let state = quick_folder();
    let mut settings = settings();
    settings.queue = 1000;
    // Finished videos expire quickly. On a real server they expire after a day.
    settings.keep = Seconds(0.2);
    let many = if full() { 10_000 } else { 600 };
    let store = Arc::new(FileStore::open(state.path()).expect("a store"));
    let server = Server::with(store, settings.clone(), JobTiming::default());
    let first = server.send("fault=hang");
    server.until("the job to run", |jobs| {
        jobs.get(&anyone(), &first).expect("the job").record.state == JobState::InProgress
    });
    let before = memory();
    let waiting: Vec<VideoId> = (0..1000).map(|n| server.send(&format!("n={n} steps=1"))).collect();
    let each = memory().saturating_sub(before) / waiting.len();
    println!("measured: {each} bytes of memory a queued job");
    assert!(each < 16 << 10, "{each} bytes a queued job");
    server.log.released.store(true, Ordering::Release);
    server.until("an empty queue", |jobs| jobs.queue(&anyone()).1.is_empty());

    // At most 64 jobs are queued at a time.
    let mut at_40 = None;
    for n in 0..many {
        server.until("a place", |jobs| jobs.queue(&anyone()).1.len() < 64);
        server.send(&format!("n={n} steps=1"));
        if n % 100 == 0 {
            server.jobs.sweep();
            // Clears the records of the scripted device, which would otherwise grow.
            server.log.orders.lock().unwrap().clear();
            server.log.idle.lock().unwrap().clear();
        }
        if n == 40 {
            at_40 = Some((memory(), handles()));
        }
    }
    server.until("an empty queue", |jobs| jobs.queue(&anyone()).1.is_empty() && jobs.queue(&anyone()).0.is_empty());
    let (before, handles_before) = at_40.expect("more than forty");
    let (after, handles_after) = (memory(), handles());
    println!("measured: {before} bytes after 40 jobs, {after} after {many}; files and threads {handles_after:?}");
    assert!(after as f64 <= before as f64 * 1.02, "{before} bytes after 40 jobs, {after} after {many}");
    assert!(handles_after.iter().zip(handles_before).all(|(after, before)| *after <= before + 1), "{handles_after:?}");
    server.stop().expect("drained");
}

#[needs(nothing)]
fn memory_files_and_threads_are_bounded() {
    run_in_separate_process("load::queued_jobs_use_little_memory_and_leak_nothing");
}

/// Creates, cancels and deletes jobs in random order while batches run. Every job ends, the device stays busy, and the
/// remaining videos are correct.
#[needs(member)]
fn random_creates_cancels_and_deletes_are_consistent() {
    files();
    let state = quick_folder();
    let mut settings = settings();
    settings.max_batch = Some(4);
    let server = Server::start(state.path(), settings);
    let many = if full() { 1000 } else { 200 };
    let first = server.send("fault=hang");
    server.until("the job to run", |jobs| {
        jobs.get(&anyone(), &first).expect("the job").record.state == JobState::InProgress
    });
    let send = |n: usize| server.send(&format!("key={} seed={n} steps=4 ms=2", n % 3));
    let ids: Vec<VideoId> = (0..many - 1).map(send).collect();
    server.log.released.store(true, Ordering::Release);
    // Every third job is kept. The order of the others is pseudo-random but the same in every run.
    let mut others: Vec<&VideoId> = ids.iter().enumerate().filter(|(n, _)| n % 3 != 0).map(|(_, id)| id).collect();
    others.sort_by_key(|id| id.as_str().bytes().rev().collect::<Vec<_>>());
    std::thread::scope(|scope| {
        for (part, chunk) in others.chunks(others.len().div_ceil(4)).enumerate() {
            let jobs = &server.jobs;
            scope.spawn(move || {
                for (n, id) in chunk.iter().enumerate() {
                    if (n + part) % 2 == 0 {
                        jobs.cancel(&anyone(), id).expect("cancelled");
                    } else {
                        jobs.delete(&anyone(), id).expect("deleted");
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
    });
    for id in &ids {
        // Deleted jobs are not waited for.
        if server.jobs.get(&anyone(), id).is_ok() {
            let job = server.wait(id);
            match &job.record.produced {
                Some(produced) => assert_eq!(produced.frames_sha256, frames_of(&job.accepted)),
                None => assert_eq!(job.record.failure.as_ref().map(|f| f.code.as_str()), Some("cancelled")),
            }
        }
    }
    for id in ids.iter().step_by(3) {
        assert_eq!(server.get(id).record.state, JobState::Completed);
    }
    let mut idle = server.log.idle.lock().unwrap().clone();
    idle.sort();
    let part = |part: f64| idle[((idle.len() - 1) as f64 * part) as usize];
    let (median, most, longest) = (part(0.5), part(0.95), part(1.0));
    println!("measured: device idle between batches: median {median:?}, at most {longest:?} ({} times)", idle.len());
    // While other tests run, a thread may have to wait for a core.
    assert!(median < Duration::from_millis(20) && most < Duration::from_millis(50), "{idle:?}");
    assert!(longest < Duration::from_millis(50) || !full(), "{idle:?}");
    let started = Instant::now();
    server.stop().expect("drained");
    assert!(started.elapsed() < Duration::from_secs(2));
}

#[needs(nothing)]
fn device_stays_busy_while_jobs_are_cancelled_and_deleted() {
    run_in_separate_process("load::random_creates_cancels_and_deletes_are_consistent");
}
