//! Tests of jobs, from the request to the finished video, on a scripted device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ltx2::config::{Drain, Seconds};
use ltx2::serve::device::JobBatch;
use ltx2::serve::id::{Ids, VideoId};
use ltx2::serve::job::{JobPhase, JobState, Snapshot};
use ltx2::serve::jobs::{Caller, JobTiming, Jobs, ListQuery, Submitted};
use ltx2::serve::store::{FileStore, JobStore, Variant};
use ltx2::serve::worker::Status;

use crate::scripted::{Server, anyone, frames_of, listed, quick_folder, request, settings, until};
use crate::support::needs;

fn store(state: &std::path::Path) -> Arc<dyn JobStore> {
    Arc::new(FileStore::open(state).expect("a store"))
}

fn code(snapshot: &Snapshot) -> &str {
    snapshot.record.failure.as_ref().map_or("", |failure| &failure.code)
}

fn page(jobs: &Jobs, after: Option<&VideoId>, limit: usize, descending: bool) -> (Vec<VideoId>, bool) {
    let page = jobs.list(&anyone(), &ListQuery { after: after.cloned(), limit, descending, state: None });
    (page.jobs.iter().map(|job| job.accepted.id.clone()).collect(), page.has_more)
}

/// The ids of jobs that are created after a restart sort after those of existing jobs.
#[needs(nothing)]
fn ids_continue_after_restart() {
    let first = Ids::after(None).next().expect("an id");
    let again = Ids::after(Some(&first)).next().expect("an id");
    assert!(again > first && VideoId::parse(again.as_str()) == Some(again));
}

#[needs(nothing)]
fn finished_job_has_all_its_files() {
    let state = quick_folder();
    let server = Server::start(state.path(), settings());
    let id = server.send("steps=6 ms=2");
    let mut seen = server.jobs.watch(&anyone(), &id).expect("a job");
    let mut percent = Vec::new();
    until("the last snapshot", || {
        let now = seen.borrow_and_update().clone();
        percent.push((now.record.state, now.progress.percent));
        now.record.state.is_terminal()
    });
    assert!(percent.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{percent:?}");
    let job = server.get(&id);
    assert_eq!(job.record.state, JobState::Completed);
    let record = &job.record;
    assert!(record.started_at <= record.completed_at && record.expires_at > record.completed_at);
    assert_eq!((record.attempts, record.batch), (1, 1));
    assert_eq!(record.produced.as_ref().expect("a video").frames_sha256, frames_of(&job.accepted));
    until("the run to be forgotten", || {
        !state.path().join("jobs").join(id.as_str()).join("steps.safetensors").exists()
    });
    let names: Vec<String> = listed(&state.path().join("jobs").join(id.as_str())).into_keys().collect();
    assert_eq!(names, ["audio.wav", "job.json", "request.json", "sprite.jpg", "thumb.jpg", "video.json", "video.mp4"]);
    server.stop().expect("drained");

    let again = Jobs::open(store(state.path()), settings()).expect("jobs");
    let found = again.get(&anyone(), &id).expect("the job");
    assert_eq!((&found.record, &found.accepted), (&job.record, &job.accepted));
}

#[needs(nothing)]
fn store_is_private_and_locked_by_one_server() {
    use std::os::unix::fs::PermissionsExt;
    let state = tempfile::tempdir().expect("a folder");
    let server = Server::start(state.path(), settings());
    let refused = FileStore::open(state.path()).expect_err("the folder is in use");
    assert!(refused.to_string().contains("another server"), "{refused}");
    let id = server.send("a");
    server.wait(&id);
    server.stop().expect("drained");
    let mut folders = vec![state.path().join("jobs")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
            let about = entry.metadata().expect("a file");
            let mode = about.permissions().mode() & 0o777;
            assert_eq!(mode, if about.is_dir() { 0o700 } else { 0o600 }, "{}", entry.path().display());
            if about.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    std::fs::write(state.path().join("format"), "1\n").expect("written");
    assert!(FileStore::open(state.path()).expect_err("another format").to_string().contains("another release"));
}

#[needs(nothing)]
fn damaged_or_foreign_entries_are_moved_aside() {
    let state = quick_folder();
    let server = Server::start(state.path(), settings());
    let ids: Vec<VideoId> = (0..4).map(|_| server.send("a")).collect();
    ids.iter().for_each(|id| drop(server.wait(id)));
    server.stop().expect("drained");
    let jobs = state.path().join("jobs");
    let secret = state.path().join("secret");
    std::fs::write(&secret, "secret").expect("written");
    std::fs::write(jobs.join(ids[0].as_str()).join("request.json"), "{").expect("written");
    std::fs::remove_file(jobs.join(ids[1].as_str()).join("video.mp4")).expect("removed");
    std::os::unix::fs::symlink(&secret, jobs.join(ids[1].as_str()).join("video.mp4")).expect("a link");
    std::fs::rename(jobs.join(ids[2].as_str()), state.path().join("elsewhere")).expect("moved");
    std::os::unix::fs::symlink(state.path().join("elsewhere"), jobs.join(ids[2].as_str())).expect("a link");
    std::fs::create_dir(jobs.join(".new-video_1")).expect("a folder");
    std::fs::write(jobs.join("notes.txt"), "a file").expect("written");

    let again = Jobs::open(store(state.path()), settings()).expect("jobs");
    assert_eq!(page(&again, None, 10, false).0, [ids[1].clone(), ids[3].clone()]);
    assert!(again.open_file(&ids[1], Variant::Video).is_err(), "a link is not followed");
    assert!(again.open_file(&ids[3], Variant::Video).is_ok());
    let damaged: Vec<String> = listed(&state.path().join("damaged")).into_keys().collect();
    let mut expected = vec!["notes.txt".to_string(), ids[0].to_string(), ids[2].to_string()];
    expected.sort();
    assert_eq!(damaged, expected);
    assert_eq!(std::fs::read_to_string(secret).expect("there"), "secret");
}

#[needs(nothing)]
fn lists_are_paginated_and_restricted_to_the_key() {
    let state = quick_folder();
    let server = Server::start(state.path(), settings());
    let ids: Vec<VideoId> = (0..5).map(|n| server.send(if n == 3 { "owner=bob" } else { "owner=ann" })).collect();
    assert_eq!(page(&server.jobs, None, 2, false), (ids[..2].to_vec(), true));
    assert_eq!(page(&server.jobs, Some(&ids[2]), 2, false), (ids[3..].to_vec(), false));
    assert_eq!(page(&server.jobs, Some(&ids[2]), 9, true), (vec![ids[1].clone(), ids[0].clone()], false));
    let bob = Caller { name: "bob".into(), sees_all: false };
    let all = ListQuery { after: None, limit: 9, descending: true, state: None };
    assert_eq!(server.jobs.list(&bob, &all).jobs.len(), 1);
    assert_eq!(server.jobs.get(&bob, &ids[0]).expect_err("not bob's").code, "video_not_found");
    assert!(server.jobs.delete(&bob, &ids[0]).is_err() && server.jobs.cancel(&bob, &ids[0]).is_err());
    server.until("all to end", |jobs| {
        let done = ListQuery { state: Some(JobState::Completed), ..all.clone() };
        jobs.list(&anyone(), &done).jobs.len() == 5
    });
    // A page may start after a job that was deleted.
    server.jobs.delete(&anyone(), &ids[2]).expect("deleted");
    assert_eq!(page(&server.jobs, Some(&ids[2]), 9, false).0, ids[3..]);
    assert_eq!(server.jobs.delete(&anyone(), &ids[2]).expect_err("gone").status, 404);
    server.stop().expect("drained");
}

#[needs(nothing)]
fn full_queue_rejects_and_leaves_nothing() {
    let state = quick_folder();
    let mut settings = settings();
    (settings.queue, settings.queue_per_key) = (3, 2);
    let server = Server::start(state.path(), settings);
    let running = server.send("owner=x fault=hang");
    server.until("the job to run", |jobs| {
        jobs.get(&anyone(), &running).expect("the job").record.state == JobState::InProgress
    });
    let caller = |name: &str| Caller { name: name.into(), sees_all: false };
    server.send("owner=ann");
    let held = server.jobs.admit(&caller("ann")).expect("the second place of ann");
    let refused = server.jobs.admit(&caller("ann")).err().expect("no third");
    assert_eq!((refused.status, refused.code), (429, "key_queue_full"));
    assert!(refused.retry_after.is_some_and(|seconds| (1..=120).contains(&seconds)));
    server.send("owner=bob");
    assert_eq!(server.jobs.admit(&caller("cyd")).err().expect("no fourth").code, "queue_full");
    drop(held);
    server.send("owner=cyd");
    assert_eq!(listed(&state.path().join("jobs")).len(), 4, "refused requests leave nothing");
    let (runs, waits) = server.jobs.queue(&anyone());
    assert_eq!(runs.len(), 1);
    assert_eq!(waits.iter().map(|job| job.queue_position).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)]);
    server.log.released.store(true, Ordering::Release);
    server.until("an empty queue", |jobs| jobs.queue(&anyone()).1.is_empty());
    server.stop().expect("drained");
}

#[needs(nothing)]
fn idempotency_key_creates_one_job() {
    let state = quick_folder();
    // The clock agrees with the creation times of the requests.
    let pace = JobTiming { clock: Arc::new(|| 1_800_000_100), ..JobTiming::default() };
    let server = Server::with(store(state.path()), settings(), pace.clone());
    let send = |server: &Server, prompt: &str| {
        let ticket = server.jobs.admit(&anyone()).expect("a place");
        server.jobs.submit(ticket, request(&server.ids, prompt))
    };
    let ids: Vec<VideoId> = std::thread::scope(|scope| {
        let sends: Vec<_> = (0..8).map(|_| scope.spawn(|| send(&server, "idempotency=k"))).collect();
        let ids = sends.into_iter().map(|sent| match sent.join().expect("no panic").expect("taken") {
            Submitted::New(job) | Submitted::Again(job) => job.accepted.id.clone(),
        });
        ids.collect()
    });
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    let conflict = send(&server, "idempotency=k other").expect_err("another body");
    assert_eq!((conflict.status, conflict.code, conflict.should_retry), (409, "idempotency_conflict", Some(false)));
    assert_eq!(listed(&state.path().join("jobs")).len(), 1);
    server.wait(&ids[0]);
    server.stop().expect("drained");
    // An idempotency key remains valid after a restart, until its job is removed.
    let server = Server::with(store(state.path()), settings(), pace);
    assert!(
        matches!(send(&server, "idempotency=k").expect("taken"), Submitted::Again(job) if job.accepted.id == ids[0])
    );
    server.jobs.delete(&anyone(), &ids[0]).expect("deleted");
    assert!(matches!(send(&server, "idempotency=k").expect("taken"), Submitted::New(_)));
    server.stop().expect("drained");
}

#[needs(nothing)]
fn cancelled_jobs_fail_at_once_and_leave_no_video() {
    let state = quick_folder();
    let server = Server::start(state.path(), settings());
    let (running, waiting) = (server.send("steps=100000 ms=1"), server.send("a"));
    server.until("the job to run", |jobs| jobs.get(&anyone(), &running).expect("the job").progress.step > 3);
    for id in [&waiting, &running] {
        let cancelled = server.jobs.cancel(&anyone(), id).expect("cancelled");
        assert_eq!((cancelled.record.state, code(&cancelled)), (JobState::Failed, "cancelled"));
        assert_eq!(server.jobs.cancel(&anyone(), id).expect("as it was").record, cancelled.record);
    }
    // The device continues with the next job.
    let next = server.send("a");
    assert_eq!(server.wait(&next).record.state, JobState::Completed);
    let left = |id: &VideoId| listed(&state.path().join("jobs").join(id.as_str())).into_keys().collect::<Vec<_>>();
    until("its steps to go", || left(&running) == ["job.json", "request.json"]);
    assert_eq!(left(&waiting), ["job.json", "request.json"]);
    // Cancelling a finished job has no effect.
    assert_eq!(server.jobs.cancel(&anyone(), &next).expect("as it was").record.state, JobState::Completed);
    server.stop().expect("drained");
}

#[needs(nothing)]
fn cancelled_jobs_leave_their_batch_and_the_last_one_stops_it() {
    let state = quick_folder();
    let mut settings = settings();
    settings.max_batch = Some(4);
    let server = Server::start(state.path(), settings);
    let first = server.send("fault=hang");
    server.until("the job to run", |jobs| {
        jobs.get(&anyone(), &first).expect("the job").record.state == JobState::InProgress
    });
    let send = |n: usize| server.send(&format!("key=k steps=200 ms=1 seed={n}"));
    let batch: Vec<VideoId> = (0..4).map(send).collect();
    server.log.released.store(true, Ordering::Release);
    server.until("the batch", |jobs| jobs.get(&anyone(), &batch[0]).expect("the job").progress.step > 3);
    assert_eq!(server.get(&batch[3]).record.batch, 4);
    server.jobs.cancel(&anyone(), &batch[1]).expect("cancelled");
    server.jobs.delete(&anyone(), &batch[2]).expect("deleted");
    assert_eq!(server.jobs.get(&anyone(), &batch[2]).expect_err("gone").status, 404);
    for n in [0, 3] {
        let job = server.wait(&batch[n]);
        assert_eq!(job.record.produced.as_ref().expect("a video").frames_sha256, frames_of(&job.accepted));
    }
    assert_eq!(code(&server.get(&batch[1])), "cancelled");
    until("the deleted one's folder to go", || !state.path().join("jobs").join(batch[2].as_str()).exists());

    let second: Vec<VideoId> = (0..2).map(|n| server.send(&format!("key=k steps=100000 ms=1 seed={n}"))).collect();
    server.until("the job to run", |jobs| jobs.get(&anyone(), &second[0]).expect("the job").progress.step > 3);
    second.iter().for_each(|id| drop(server.jobs.cancel(&anyone(), id).expect("cancelled")));
    let last = server.send("a");
    assert_eq!(server.wait(&last).record.state, JobState::Completed, "the batch stopped");
    server.stop().expect("drained");
}

#[needs(nothing)]
fn fault_fails_only_its_job() {
    let state = quick_folder();
    let mut settings = settings();
    settings.max_batch = Some(4);
    let server = Server::start(state.path(), settings);
    let first = server.send("fault=hang");
    server.until("the job to run", |jobs| {
        jobs.get(&anyone(), &first).expect("the job").record.state == JobState::InProgress
    });
    let batch: Vec<VideoId> =
        (0..3).map(|n| server.send(if n == 1 { "key=k fault=not_finite at=2" } else { "key=k" })).collect();
    server.log.released.store(true, Ordering::Release);
    let states: Vec<(JobState, String)> =
        batch.iter().map(|id| server.wait(id)).map(|job| (job.record.state, code(&job).to_string())).collect();
    let good = (JobState::Completed, String::new());
    assert_eq!(states, [good.clone(), (JobState::Failed, "not_finite".into()), good]);
    assert_eq!(server.status(), Status::Ready);
    server.stop().expect("drained");
}

#[needs(nothing)]
fn device_and_finisher_failures_stop_server_and_keep_job_states() {
    for (fault, code_of, reason) in [
        ("fault=device at=1", "device_error", "accelerator"),
        ("fault=panic at=1", "device_error", "panics"),
        ("write=panic", "internal", "finisher"),
    ] {
        let state = quick_folder();
        let server = Server::start(state.path(), settings());
        let good = server.send("write_ms=20");
        let bad = server.send(fault);
        server.until("the device to fail", |jobs| jobs.device_failure().is_some());
        let refused = server.jobs.admit(&anyone()).err().expect("503");
        assert_eq!((refused.status, refused.code), (503, "device_failed"));
        let error = server.join().expect_err("the server failed");
        assert!(error.contains(reason), "{error}");
        let again = Jobs::open(store(state.path()), settings()).expect("jobs");
        let found = again.get(&anyone(), &bad).expect("the job");
        assert_eq!((found.record.state, code(&found)), (JobState::Failed, code_of), "{fault}");
        assert_eq!(again.get(&anyone(), &good).expect("the job").record.state, JobState::Completed, "{fault}");
    }
}

#[needs(nothing)]
fn hang_is_detected_and_drain_completes_in_both_modes() {
    for drain in [Drain::Checkpoint, Drain::Finish] {
        let state = quick_folder();
        let mut settings = settings();
        (settings.drain, settings.max_batch) = (drain, Some(2));
        let server = Server::start(state.path(), settings.clone());
        let hangs = server.send("fault=hang");
        server.until("the job to hang", |jobs| jobs.time_since_progress() > Duration::from_millis(30));
        let batch = [server.send("key=k steps=200 ms=3"), server.send("key=k steps=200 ms=3")];
        let waits = server.send("a");
        server.log.released.store(true, Ordering::Release);
        server.wait(&hangs);
        server.until("steps", |jobs| jobs.get(&anyone(), &batch[1]).expect("the job").progress.step > 3);
        server.jobs.drain();
        assert_eq!(server.jobs.admit(&anyone()).err().expect("503").code, "draining");
        let log = Arc::clone(&server.log);
        server.join().expect("drained");
        assert_eq!(log.orders.lock().unwrap().len(), 2, "no further order");

        let server = Server::start(state.path(), settings);
        for id in batch.iter().chain([&waits]) {
            assert_eq!(server.wait(id).record.state, JobState::Completed);
        }
        let orders = server.log.orders.lock().unwrap().clone();
        assert_eq!(server.get(&batch[0]).record.attempts, 1, "a drain is no crash");
        if drain == Drain::Checkpoint {
            assert_eq!(orders[0].0, batch, "the interrupted batch runs first");
            assert!(orders[0].1 > 3, "the job resumes after the saved steps: {orders:?}");
        } else {
            assert_eq!(orders.len(), 1, "{orders:?}");
        }
        server.stop().expect("drained");
    }
}

#[needs(nothing)]
fn shapes_are_warmed_evicted_and_grouped() {
    let state = quick_folder();
    let mut settings = settings();
    settings.max_shapes = 2;
    let jobs = Jobs::open(store(state.path()), settings.clone()).expect("jobs");
    let ids = Ids::after(None);
    let warm = |prompt: &str| JobBatch { jobs: vec![Arc::new(request(&ids, prompt))], steps: None, resume: false };
    let server = Server::with_jobs(jobs, vec![warm("shape=a")]);
    let first = server.send("shape=a fault=hang");
    server.until("the job to run", |jobs| {
        jobs.get(&anyone(), &first).expect("the job").record.state == JobState::InProgress
    });
    // Jobs of the loaded shape `a` overtake those of `b` and `c`, but at most four of them do.
    let sent: Vec<VideoId> =
        ["b", "c", "a", "a", "a", "a", "a"].iter().map(|shape| server.send(&format!("shape={shape}"))).collect();
    server.log.released.store(true, Ordering::Release);
    sent.iter().for_each(|id| drop(server.wait(id)));
    let ran: Vec<VideoId> = server.log.orders.lock().unwrap().iter().skip(1).map(|(ids, _)| ids[0].clone()).collect();
    let expected: Vec<VideoId> = [2, 3, 4, 5, 0, 1, 6].iter().map(|n| sent[*n].clone()).collect();
    assert_eq!(ran, expected);
    assert_eq!(*server.log.warmed.lock().unwrap(), ["shapea"]);
    assert_eq!(*server.log.evicted.lock().unwrap(), ["shapea", "shapeb"]);
    // Jobs of a shape that does not fit evict the programs of another shape only once.
    server.log.evicted.lock().unwrap().clear();
    let ran = server.log.orders.lock().unwrap().len();
    for shape in ["d", "e", "f"] {
        let id = server.send(&format!("shape={shape} fault=large"));
        assert_eq!(server.wait(&id).record.failure.as_ref().expect("why").code, "too_large");
    }
    let gone = server.log.evicted.lock().unwrap().clone();
    assert_eq!(gone[1..], ["shaped", "shapee", "shapef"], "{gone:?}");
    assert!(["shapea", "shapeb", "shapec"].contains(&&*gone[0]), "{gone:?}");
    assert_eq!(server.log.orders.lock().unwrap().len(), ran + 3);
    server.stop().expect("drained");

    let jobs = Jobs::open(store(state.path()), settings).expect("jobs");
    let server = Server::with_jobs(jobs, vec![warm("warm=large")]);
    assert_eq!(server.join(), Err("it needs 90 GiB of 80 GiB".into()));
}

/// One job of a batch fits on the device and another one does not. The shape then counts as loaded, and it is evicted
/// before the next shape is loaded.
#[needs(nothing)]
fn shape_counts_as_loaded_if_one_job_of_a_batch_fits() {
    let state = quick_folder();
    let mut settings = settings();
    (settings.max_shapes, settings.max_batch) = (1, Some(2));
    let server = Server::start(state.path(), settings);
    let first = server.send("fault=hang");
    server.until("the job to run", |jobs| {
        jobs.get(&anyone(), &first).expect("the job").record.state == JobState::InProgress
    });
    let batch = [server.send("key=k shape=a fault=large"), server.send("key=k shape=a")];
    server.log.released.store(true, Ordering::Release);
    let ended: Vec<JobState> = batch.iter().map(|id| server.wait(id).record.state).collect();
    assert_eq!(ended, [JobState::Failed, JobState::Completed]);
    server.log.evicted.lock().unwrap().clear();
    server.wait(&server.send("shape=b"));
    assert_eq!(*server.log.evicted.lock().unwrap(), ["shapea"]);
    server.stop().expect("drained");
}

/// Changes of the wall clock affect neither the order of jobs nor their expiry.
#[needs(nothing)]
fn clock_changes_affect_neither_order_nor_expiry() {
    let state = quick_folder();
    let mut settings = settings();
    settings.keep = Seconds(1.0);
    let wall = Arc::new(AtomicU64::new(2_000_000_000));
    let clock = Arc::clone(&wall);
    let pace = JobTiming { clock: Arc::new(move || clock.load(Ordering::Relaxed)), ..JobTiming::default() };
    let server = Server::with(store(state.path()), settings.clone(), pace.clone());
    let first = server.send("a");
    server.wait(&first);
    wall.store(1_000_000_000, Ordering::Relaxed);
    let second = server.send("a");
    server.wait(&second);
    assert_eq!(page(&server.jobs, None, 9, false).0, [first.clone(), second.clone()]);
    std::thread::sleep(Duration::from_millis(1100));
    server.jobs.sweep();
    let gone = server.jobs.get(&anyone(), &first).expect_err("expired");
    assert_eq!((gone.status, gone.code), (410, "expired"));
    server.stop().expect("drained");

    // After a restart, a job whose timestamp is in the future expires no later than other jobs.
    let server = Server::with(store(state.path()), settings.clone(), pace.clone());
    wall.store(3_000_000_000, Ordering::Relaxed);
    let third = server.send("a");
    server.wait(&third);
    assert!(third > second);
    server.stop().expect("drained");
    wall.store(1_000_000_000, Ordering::Relaxed);
    let server = Server::with(store(state.path()), settings, pace);
    std::thread::sleep(Duration::from_millis(1100));
    server.jobs.sweep();
    assert_eq!(page(&server.jobs, None, 9, false).0, []);
    server.stop().expect("drained");
}

#[needs(nothing)]
fn job_found_running_at_two_starts_fails() {
    let state = quick_folder();
    let id = {
        let server = Server::start(state.path(), settings());
        let id = server.send("fault=hang");
        server.until("the job to run", |jobs| {
            jobs.get(&anyone(), &id).expect("the job").record.state == JobState::InProgress
        });
        server.log.released.store(true, Ordering::Release);
        server.wait(&id);
        server.stop().expect("drained");
        id
    };
    let record = state.path().join("jobs").join(id.as_str()).join("job.json");
    for (attempts, expected) in [(1, JobState::Queued), (2, JobState::Failed)] {
        let mut value: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&record).expect("a record")).expect("JSON");
        value["state"] = "in_progress".into();
        value["attempts"] = attempts.into();
        value["produced"] = serde_json::Value::Null;
        std::fs::write(&record, value.to_string()).expect("written");
        drop(std::fs::remove_file(record.with_file_name("video.json")));
        let jobs = Jobs::open(store(state.path()), settings()).expect("jobs");
        let found = jobs.get(&anyone(), &id).expect("the job");
        assert_eq!(found.record.state, expected);
        assert_eq!(code(&found), if attempts == 2 { "crashed" } else { "" });
        assert_eq!(found.progress.stage, JobPhase::Queued);
    }
}

/// A job whose preparation waits for a chat server does not keep the device from other jobs.
#[needs(nothing)]
fn unprepared_jobs_wait_in_the_queue_and_others_overtake_them() {
    let state = quick_folder();
    let server = Server::start(state.path(), settings());
    let slow = server.send("asks=600000 slow");
    let (quick, panics, plain) =
        (server.send("asks=1 quick"), server.send("asks=1 preparation=panics"), server.send("plain"));
    for id in [&quick, &panics, &plain] {
        assert_eq!(server.wait(id).record.state, JobState::Completed);
    }
    assert_eq!(server.get(&slow).record.state, JobState::Queued);
    // Cancelled jobs are no longer prepared: there are 4 threads, so the last job is prepared when three of the six others
    // are cancelled.
    let more: Vec<_> = (0..5).map(|n| server.send(&format!("asks=600000 slow {n}"))).collect();
    server.jobs.cancel(&anyone(), &slow).expect("cancelled");
    server.jobs.cancel(&anyone(), &more[0]).expect("cancelled");
    let last = server.send("asks=1 last");
    assert_eq!(server.get(&last).record.state, JobState::Queued);
    server.jobs.cancel(&anyone(), &more[1]).expect("cancelled");
    assert_eq!(server.wait(&last).record.state, JobState::Completed);
    // A job that waits does not delay the end of the server, which prepares it again at the next start.
    let since = Instant::now();
    server.stop().expect("stops");
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    let again = Jobs::open(store(state.path()), settings()).expect("jobs");
    assert_eq!(again.get(&anyone(), &more[3]).expect("a job").record.state, JobState::Queued);
}
