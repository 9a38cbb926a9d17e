//! All key-value stores behave the same: in memory, served by process 0, and etcd.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::needs;
use ltx2::pjrt::{KvError, KvStore};
use ltx2::runtime::processes::store::{MemoryStore, RemoteStore, StoreServer, connect};
use tempfile::TempDir;

const ANSWER: Duration = Duration::from_secs(5);

/// Returns our two stores and the server of the second.
fn own() -> ([Arc<dyn KvStore>; 2], StoreServer) {
    let server = StoreServer::start("127.0.0.1:0").expect("listens");
    let remote = RemoteStore::new(&server.address().to_string(), ANSWER);
    ([Arc::new(MemoryStore::default()), Arc::new(remote)], server)
}

/// An etcd server for one test, stopped on drop.
struct Etcd {
    process: Child,
    place: String,
    _data: TempDir,
}

impl Etcd {
    fn start() -> Self {
        // Both ports are held open so that they differ.
        let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
        let [client, peer] = ports.map(|port| port.local_addr().expect("an address").to_string());
        let data = TempDir::new().expect("a folder");
        let urls = [
            ("--listen-client-urls", &client),
            ("--advertise-client-urls", &client),
            ("--listen-peer-urls", &peer),
            ("--initial-advertise-peer-urls", &peer),
        ];
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(data.path());
        for (flag, place) in urls {
            command.args([flag, &format!("http://{place}")]);
        }
        command.args(["--initial-cluster", &format!("default=http://{peer}")]);
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("etcd starts");
        Etcd { process, place: client, _data: data }
    }

    /// Returns a store for a run once etcd responds.
    fn store(&self, run: &str) -> Arc<dyn KvStore> {
        let started = Instant::now();
        loop {
            match connect(&format!("etcd://{}/{run}", self.place), ANSWER) {
                Ok(store) => return store,
                Err(error) if started.elapsed() > Duration::from_secs(60) => panic!("etcd does not answer: {error}"),
                Err(_) => thread::sleep(Duration::from_millis(50)),
            }
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // Ignore the error if it has already exited.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn holds_any_bytes_under_any_key(store: &dyn KvStore) {
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
    assert_eq!([store.remove("a"), store.remove("a")], [Ok(()), Ok(())]);
    assert_eq!(store.try_get("a"), Err(KvError::NotFound("a".into())));
    assert_eq!(store.put("a", b"anew"), Ok(()));
}

/// A wait ends at its timeout, or when the key is put, well before the timeout.
fn waits(store: &Arc<dyn KvStore>) {
    let (key, after) = ("never".to_string(), Duration::from_millis(150));
    let started = Instant::now();
    assert_eq!(store.get("never", after), Err(KvError::Timeout { key, after }));
    assert!(started.elapsed() >= after);
    let waiting = store.clone();
    let waiting = thread::spawn(move || waiting.get("late", Duration::from_secs(600)));
    thread::sleep(Duration::from_millis(100));
    store.put("late", b"here").expect("put");
    assert_eq!(waiting.join().expect("no panic").as_deref(), Ok(&b"here"[..]));
}

fn serves_many_threads(store: &Arc<dyn KvStore>) {
    let all: Vec<_> = (0..16)
        .map(|i| {
            let store = store.clone();
            thread::spawn(move || {
                // Each waits for its neighbour's key, which may be put later.
                store.put(&format!("of/{i}"), &[i; 1000]).expect("put");
                let next = (i + 1) % 16;
                let neighbours = store.get(&format!("of/{next}"), Duration::from_secs(60));
                assert_eq!(neighbours.expect("the neighbour's value"), [next; 1000]);
                store.put("first", &[i]).is_ok()
            })
        })
        .collect();
    let first = all.into_iter().map(|t| t.join().expect("no panic")).filter(|won| *won).count();
    assert_eq!(first, 1, "only one put of a key succeeds");
}

#[needs(nothing)]
fn stores_accept_any_value_bytes_and_special_characters_in_keys() {
    let (stores, _server) = own();
    stores.iter().for_each(|store| holds_any_bytes_under_any_key(&**store));
}

#[needs(nothing)]
fn get_waits_until_put_or_timeout() {
    let (stores, _server) = own();
    stores.iter().for_each(waits);
}

#[needs(nothing)]
fn store_supports_concurrent_threads() {
    let (stores, _server) = own();
    stores.iter().for_each(serves_many_threads);
}

#[needs(etcd)]
fn etcd_store_behaves_like_the_other_stores() {
    let etcd = Etcd::start();
    holds_any_bytes_under_any_key(&*etcd.store("values"));
    waits(&etcd.store("waits"));
    serves_many_threads(&etcd.store("threads"));
    // Runs do not see each other's keys.
    assert_eq!(etcd.store("other").try_get("a"), Err(KvError::NotFound("a".into())));
}
