//! Tests of a full disk, simulated by a small tmpfs in a mount namespace. Nothing is lost, polls are answered, and the
//! server resumes without a restart once there is space.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

use ltx2::serve::id::VideoId;
use ltx2::serve::job::{JobPhase, JobState};
use ltx2::serve::jobs::JobTiming;
use ltx2::serve::store::FileStore;

use crate::scripted::{Server, anyone, files, listed, quick_folder, request, settings, until};
use crate::support::needs;

/// Runs a test of this binary in a child process with a tmpfs of `mebibytes` MiB.
fn on_a_disk(test: &str, mebibytes: usize) {
    let folder = tempfile::tempdir().expect("a folder");
    let script = format!("mount -t tmpfs -o size={mebibytes}m tmpfs \"$LTX2_DISK\" && exec \"$0\" \"$@\"");
    let mut run = Command::new("unshare");
    run.args(["-rm", "sh", "-c", &script]).arg(std::env::current_exe().expect("this binary"));
    run.args([test, "--exact"]).env("LTX2_TEST_MEMBER", "1").env("LTX2_DISK", folder.path());
    run.env_remove("LTX2_TEST_LOG").env_remove("LTX2_REQUIRE");
    let ran = run.output().expect("runs");
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && said.contains("1 passed"), "{said}");
}

/// Returns the path of the tmpfs if this process was started with one.
fn disk() -> Option<PathBuf> {
    std::env::var_os("LTX2_DISK").map(PathBuf::from)
}

/// Guard of a file that fills the disk except for a few bytes.
struct DiskFiller(PathBuf);

impl DiskFiller {
    fn new(disk: &Path, but: usize) -> Self {
        let path = disk.join("filler");
        let mut file = File::create(&path).expect("a file");
        while file.write_all(&[1; 4096]).is_ok() {}
        let length = file.metadata().expect("a file").len();
        file.set_len(length.saturating_sub(but as u64)).expect("shorter");
        DiskFiller(path)
    }
}

impl Drop for DiskFiller {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.0));
    }
}

fn server(disk: &Path, patience: Duration, min_free: u64) -> Server {
    let mut settings = settings();
    settings.min_free.0 = min_free;
    let pace = JobTiming { patience, young: Duration::ZERO, ..JobTiming::default() };
    let store = Arc::new(FileStore::open(disk).expect("a store"));
    Server::with(store, settings, pace)
}

#[needs(member)]
fn full_disk_rejects_requests_and_keeps_states() {
    let Some(disk) = disk() else { return };
    files();
    let server = server(&disk, Duration::from_secs(30), 0);
    let good = server.send("a");
    assert_eq!(server.wait(&good).record.state, JobState::Completed);

    // A request is rejected and leaves no files.
    let running = server.send("fault=hang every=1 steps=20");
    server.until("the job to run", |jobs| {
        jobs.get(&anyone(), &running).expect("the job").record.state == JobState::InProgress
    });
    let waiting = server.send("a");
    let filler = DiskFiller::new(&disk, 0);
    let before = listed(&disk.join("jobs"));
    let ticket = server.jobs.admit(&anyone()).expect("a place");
    let refused = server.jobs.submit(ticket, request(&server.ids, "b")).expect_err("no room");
    assert_eq!((refused.status, refused.code, refused.should_retry), (507, "insufficient_storage", Some(false)));
    until("the rest of it to go", || listed(&disk.join("jobs")) == before);
    assert_eq!(server.get(&good).record.state, JobState::Completed, "polls go on");

    // The disk reserve is freed to write a state.
    assert!(disk.join("reserve").exists());
    server.jobs.cancel(&anyone(), &waiting).expect("cancelled");
    assert!(!disk.join("reserve").exists());
    assert_eq!(server.get(&waiting).record.state, JobState::Failed);

    // A video continues although its checkpoints cannot be written. The finished video waits for space, and is then
    // written without a restart.
    drop(filler);
    let filler = DiskFiller::new(&disk, 0);
    server.log.released.store(true, Ordering::Release);
    server
        .until("encoding", |jobs| jobs.get(&anyone(), &running).expect("the job").progress.stage == JobPhase::Encoding);
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(server.get(&running).record.state, JobState::InProgress, "the job waits for disk space");
    drop(filler);
    assert_eq!(server.wait(&running).record.state, JobState::Completed);
    let next = server.send("a");
    assert_eq!(server.wait(&next).record.state, JobState::Completed);
    server.stop().expect("drained");
}

#[needs(member)]
fn video_without_disk_space_fails() {
    let Some(disk) = disk() else { return };
    files();
    let server = server(&disk, Duration::from_secs(1), 0);
    // The old video is deleted to make space for the new one, which needs more than the reserve.
    let old = server.send("bytes=9000000");
    assert_eq!(server.wait(&old).record.state, JobState::Completed);
    let filler = DiskFiller::new(&disk, 1 << 20);
    let large = server.send("bytes=40000000");
    let failed = server.wait(&large);
    assert_eq!(failed.record.failure.as_ref().map(|failure| failure.code.as_str()), Some("storage_full"));
    // The steps are removed after the state is stored.
    let left = || listed(&disk.join("jobs").join(large.as_str())).into_keys().collect::<Vec<String>>();
    let since = Instant::now();
    while left().len() > 2 && since.elapsed() < Duration::from_secs(5) {
        sleep(Duration::from_millis(20));
    }
    assert_eq!(left(), ["job.json", "request.json"]);
    drop(filler);
    let next = server.send("a");
    assert_eq!(server.wait(&next).record.state, JobState::Completed);
    server.stop().expect("drained");
}

#[needs(member)]
fn jobs_wait_for_min_free_disk_space() {
    let Some(disk) = disk() else { return };
    files();
    let server = server(&disk, Duration::from_secs(1), 8 << 20);
    let held = server.jobs.admit(&anyone()).expect("a place");
    let running = server.send("fault=hang");
    server.until("the job to run", |jobs| {
        jobs.get(&anyone(), &running).expect("the job").record.state == JobState::InProgress
    });
    let filler = DiskFiller::new(&disk, 2 << 20);
    let refused = server.jobs.admit(&anyone()).err().expect("no room");
    assert_eq!((refused.status, refused.code), (507, "insufficient_storage"));
    // A request that already has a slot in the queue is accepted, and its job waits.
    let waiting = request(&server.ids, "a");
    let id = waiting.id.clone();
    server.jobs.submit(held, waiting).expect("taken");
    server.log.released.store(true, Ordering::Release);
    assert_eq!(server.wait(&running).record.state, JobState::Completed);
    server.until("the job to wait for disk space", |jobs| {
        jobs.get(&anyone(), &id).expect("the job").progress.stage == JobPhase::WaitingForDisk
    });
    drop(filler);
    assert_eq!(server.wait(&id).record.state, JobState::Completed);
    assert!(!server.jobs.is_short_of_disk());
    server.stop().expect("drained");
}

/// The disk budget applies even if the disk has free space. The oldest finished videos are deleted; requests are
/// rejected only if no video may be deleted.
#[needs(nothing)]
fn oldest_videos_are_deleted_over_disk_budget() {
    let state = quick_folder();
    let mut settings = settings();
    settings.disk.0 = 4 << 20;
    let young = |young| JobTiming { young, ..JobTiming::default() };
    let open = || Arc::new(FileStore::open(state.path()).expect("a store"));
    let server = Server::with(open(), settings.clone(), young(Duration::ZERO));
    let made: Vec<VideoId> =
        (0..6).map(|n| server.send(&format!("n={n} bytes=1000000"))).inspect(|id| drop(server.wait(id))).collect();
    until("the first to go", || server.jobs.get(&anyone(), &made[0]).is_err());
    let gone = server.jobs.get(&anyone(), &made[0]).expect_err("gone");
    assert_eq!((gone.status, gone.code), (410, "expired"));
    assert_eq!(server.get(&made[5]).record.state, JobState::Completed);
    server.stop().expect("drained");

    // Recent videos may not be deleted, so requests are rejected.
    settings.disk.0 = 1 << 20;
    let server = Server::with(open(), settings, young(Duration::from_secs(600)));
    assert_eq!(server.jobs.admit(&anyone()).err().expect("no room").code, "insufficient_storage");
    assert_eq!(server.get(&made[5]).record.state, JobState::Completed);
    server.stop().expect("drained");
}

#[needs(mount)]
fn full_disk_loses_nothing() {
    on_a_disk("disk::full_disk_rejects_requests_and_keeps_states", 40);
    on_a_disk("disk::video_without_disk_space_fails", 60);
    on_a_disk("disk::jobs_wait_for_min_free_disk_space", 40);
}
