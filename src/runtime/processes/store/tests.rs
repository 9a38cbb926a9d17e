//! Every store does the same; those of a server also when it is far or gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{MemoryStore, RemoteStore, Server, connect};
use crate::pjrt::{KvError, KvStore};

const ANSWER: Duration = Duration::from_secs(5);

/// A store here, one that is served, with its server, and one in the etcd at `LTX2_TEST_ETCD`.
fn stores() -> Vec<(Arc<dyn KvStore>, Option<Server>)> {
    let server = Server::start("127.0.0.1:0").unwrap();
    let remote = RemoteStore::new(&server.address().to_string(), ANSWER);
    let mut all: Vec<(Arc<dyn KvStore>, _)> =
        vec![(Arc::new(MemoryStore::default()), None), (Arc::new(remote), Some(server))];
    match std::env::var("LTX2_TEST_ETCD") {
        Ok(place) => {
            static RUNS: AtomicUsize = AtomicUsize::new(0);
            let run = (std::process::id(), RUNS.fetch_add(1, Ordering::SeqCst));
            all.push((connect(&format!("etcd://{place}/test-{}-{}", run.0, run.1), ANSWER).unwrap(), None));
        }
        Err(_) => eprintln!("SKIPPED: no etcd was tested; LTX2_TEST_ETCD=HOST:PORT names one"),
    }
    all
}

#[test]
fn values_are_any_bytes_under_any_key() {
    for (store, _server) in stores() {
        let large: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
        for (key, value) in [("a", &b""[..]), ("b/c d?&=%+#\u{e4}\\n", &[0, 255, 10, 13]), ("large", &large)] {
            assert_eq!(store.try_get(key), Err(KvError::NotFound(key.into())));
            assert_eq!(store.put(key, value), Ok(()));
            assert_eq!(store.try_get(key).as_deref(), Ok(value));
            assert_eq!(store.get(key, Duration::ZERO).as_deref(), Ok(value));
        }
        assert_eq!(store.put("a", b"again"), Err(KvError::AlreadyExists("a".into())));
        assert_eq!(store.try_get("a").as_deref(), Ok(&b""[..]));
        assert_eq!(store.set("a", b"again"), Ok(()));
        assert_eq!(store.try_get("a").as_deref(), Ok(&b"again"[..]));
    }
}

#[test]
fn waits_end_with_the_key_or_the_time() {
    for (store, _server) in stores() {
        let started = Instant::now();
        let (key, after) = ("never".to_string(), Duration::from_millis(150));
        assert_eq!(store.get("never", after), Err(KvError::Timeout { key, after }));
        assert!(started.elapsed() >= after && started.elapsed() < Duration::from_secs(5));
        let waiting = store.clone();
        let waiting = thread::spawn(move || waiting.get("late", Duration::from_secs(60)));
        thread::sleep(Duration::from_millis(100));
        store.put("late", b"here").unwrap();
        assert_eq!(waiting.join().unwrap().as_deref(), Ok(&b"here"[..]));
        assert!(started.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn many_threads_use_one_store() {
    for (store, _server) in stores() {
        let all: Vec<_> = (0..16)
            .map(|i| {
                let store = store.clone();
                thread::spawn(move || {
                    // Each waits for its neighbour's, which may come later.
                    store.put(&format!("of/{i}"), &[i; 1000]).unwrap();
                    let next = (i + 1) % 16;
                    assert_eq!(store.get(&format!("of/{next}"), Duration::from_secs(30)).unwrap(), [next; 1000]);
                    store.put("first", &[i]).is_ok()
                })
            })
            .collect();
        let first = all.into_iter().map(|t| t.join().unwrap()).filter(|won| *won).count();
        assert_eq!(first, 1, "one put of a key wins");
    }
}

#[test]
fn the_server_and_its_process_see_one_store() {
    let server = Server::start("127.0.0.1:0").unwrap();
    let (near, far) = (server.store(), connect(&server.address().to_string(), ANSWER).unwrap());
    near.put("near", b"1").unwrap();
    assert_eq!(far.try_get("near").as_deref(), Ok(&b"1"[..]));
    let waiting = near.clone();
    let waiting = thread::spawn(move || waiting.get("far", Duration::from_secs(60)));
    far.put("far", b"2").unwrap();
    assert_eq!(waiting.join().unwrap().as_deref(), Ok(&b"2"[..]));
    assert_eq!(near.put("far", b"3"), Err(KvError::AlreadyExists("far".into())));
}

#[test]
fn a_server_that_is_gone_is_named() {
    let server = Server::start("127.0.0.1:0").unwrap();
    let place = server.address().to_string();
    let store = RemoteStore::new(&place, Duration::from_secs(1));
    store.put("a", b"1").unwrap();
    drop(server);
    let started = Instant::now();
    let message = store.get("b", Duration::from_millis(500)).unwrap_err().to_string();
    assert!(message.starts_with(&format!("the store at {place} does not answer: ")), "{message}");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn an_etcd_that_is_not_there_is_named() {
    let message = connect("etcd://127.0.0.1:1/run", ANSWER).err().unwrap().to_string();
    assert!(message.starts_with("the store at etcd://127.0.0.1:1 does not answer: "), "{message}");
    let message = connect("etcd://127.0.0.1:1", ANSWER).err().unwrap().to_string();
    assert!(message.ends_with("give etcd://HOST:PORT/RUN, RUN a name that no other run has"), "{message}");
}
