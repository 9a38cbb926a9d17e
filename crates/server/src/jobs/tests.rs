//! Unit tests of concurrent access to jobs, in which the steps occur in a fixed order.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, json};

use super::*;
use crate::id::Ids;
use crate::job_config::tests::job_config;
use crate::settings::Bytes;
use crate::store::FileStore;

const SEND: &str = "k";

struct TestServer {
    jobs: Arc<Jobs>,
    ids: Ids,
}

impl TestServer {
    fn open(folder: &std::path::Path) -> Self {
        let settings = Serve { min_free: Bytes(0), ..Serve::default() };
        // The clock agrees with `created_at` of the requests.
        let pace = JobTiming { clock: Arc::new(|| 100), ..JobTiming::default() };
        let store = FileStore::open(folder).expect("a store");
        let jobs = Jobs::open_at(Arc::new(store), settings, pace).expect("jobs");
        TestServer { ids: Ids::after(jobs.last_id().as_ref()), jobs }
    }

    fn caller() -> Caller {
        Caller { name: String::new(), sees_all: true }
    }

    fn accepted(&self) -> AcceptedJob {
        AcceptedJob {
            id: self.ids.next().expect("an id"),
            created_at: 100,
            owner: String::new(),
            model: "nano".into(),
            config: job_config(&json!({})),
            expected: None,
            fields: Map::new(),
            seconds: None,
            user: None,
            metadata: Map::new(),
            warnings: Vec::new(),
            remixed_from: None,
            inputs: Vec::new(),
            body_sha256: "body".into(),
            idempotency_key: Some(SEND.into()),
            traceparent: None,
            shape: "shape".into(),
            batch_key: "key".into(),
        }
    }

    /// Submits a request whose client waits for the job. All requests have the same idempotency key.
    fn wait(&self) -> (VideoId, Waiter) {
        let ticket = self.jobs.admit(&TestServer::caller()).expect("a place").waits();
        let (Submitted::New(job) | Submitted::Again(job)) = self.jobs.submit(ticket, self.accepted()).expect("taken");
        (job.accepted.id.clone(), self.jobs.waiter(&job))
    }

    /// Sends the request again; returns the earlier job, if there is one, with a guard for the client.
    fn again(&self) -> Option<(VideoId, Waiter)> {
        let job = self.jobs.replayed(&TestServer::caller(), SEND, "body", true).expect("the same request")?;
        Some((job.accepted.id.clone(), self.jobs.waiter(&job)))
    }

    fn is_cancelled(&self, id: &VideoId) -> bool {
        let job = self.jobs.get(&TestServer::caller(), id).expect("a job");
        job.record.failure.as_ref().is_some_and(|failure| failure.code == "cancelled")
    }
}

#[test]
fn job_is_cancelled_when_its_last_waiter_disconnects() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = TestServer::open(folder.path());
    let (id, first) = server.wait();
    let (same, second) = server.wait();
    let (replayed, third) = server.again().expect("the job");
    assert_eq!((&same, &replayed), (&id, &id));
    drop(first);
    drop(second);
    assert!(!server.is_cancelled(&id), "another client still waits");
    drop(third);
    assert!(server.is_cancelled(&id));
    // The retry does not find the cancelled job and creates a new one, also after a restart.
    assert!(server.again().is_none());
    drop(server);
    let server = TestServer::open(folder.path());
    assert!(server.is_cancelled(&id) && server.again().is_none());
    let (other, waiter) = server.wait();
    assert_ne!(other, id);
    // A client that was told that the job continues does not cancel the job when it disconnects.
    waiter.answered();
    let (_, later) = server.again().expect("the job");
    drop(later);
    assert!(!server.is_cancelled(&other));
    // If the job's owner cancels it, the key still belongs to the job.
    server.jobs.cancel(&TestServer::caller(), &other).expect("cancelled");
    assert_eq!(server.again().map(|(id, _)| id), Some(other));
}

/// While a request tries to cancel a job, no other thread can change the job. If cancelling fails, the device runs the
/// job.
#[test]
fn job_runs_after_a_failed_cancellation() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = TestServer::open(folder.path());
    let (id, _waiter) = server.wait();
    let (index, is_there) = server.jobs.reserve(server.jobs.lock(), &id);
    drop(index);
    assert!(is_there);
    let jobs = Arc::clone(&server.jobs);
    let (begun, told) = std::sync::mpsc::channel();
    let device = std::thread::spawn(move || begun.send(jobs.next().map(|run| run.order.jobs.len())));
    assert!(told.recv_timeout(Duration::from_millis(200)).is_err(), "its state is being written");
    server.jobs.settle(&mut server.jobs.lock(), &id, None);
    let begun = told.recv_timeout(Duration::from_secs(20));
    server.jobs.drain();
    assert_eq!(begun, Ok(Some(1)));
    assert!(device.join().expect("no panic").is_ok());
}
