//! Tests specific to remote stores: a store shared by the server and its clients, and unreachable servers.
//! `tests/it/kv_stores.rs` tests the behavior that all stores share.

use std::thread;
use std::time::Duration;

use super::{RemoteStore, StoreServer, connect};
use ltx2_pjrt::{KvError, KvStore};

const ANSWER: Duration = Duration::from_secs(5);

#[test]
fn server_and_clients_share_one_store() {
    let server = StoreServer::start("127.0.0.1:0").unwrap();
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
fn stopped_server_is_an_error_with_its_address() {
    let server = StoreServer::start("127.0.0.1:0").unwrap();
    let place = server.address().to_string();
    let store = RemoteStore::new(&place, Duration::from_secs(1));
    store.put("a", b"1").unwrap();
    drop(server);
    let message = store.get("b", Duration::from_millis(500)).unwrap_err().to_string();
    assert!(message.starts_with(&format!("the key-value store at {place} is not responding: ")), "{message}");
}

#[test]
fn unreachable_etcd_is_an_error_with_its_address() {
    let message = connect("etcd://127.0.0.1:1/run", ANSWER).err().unwrap().to_string();
    assert!(message.starts_with("the key-value store at etcd://127.0.0.1:1 is not responding: "), "{message}");
    let message = connect("etcd://127.0.0.1:1", ANSWER).err().unwrap().to_string();
    assert!(message.ends_with("expected etcd://HOST:PORT/RUN, where RUN is a name unique to this run"), "{message}");
}
