//! Failures that only a server can have: being seen from both sides, being far, being gone. `tests/it/kv_stores.rs` has
//! what every store does alike.

use std::thread;
use std::time::Duration;

use super::{RemoteStore, Server, connect};
use crate::pjrt::{KvError, KvStore};

const ANSWER: Duration = Duration::from_secs(5);

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
    let message = store.get("b", Duration::from_millis(500)).unwrap_err().to_string();
    assert!(message.starts_with(&format!("the store at {place} does not answer: ")), "{message}");
}

#[test]
fn an_etcd_that_is_not_there_is_named() {
    let message = connect("etcd://127.0.0.1:1/run", ANSWER).err().unwrap().to_string();
    assert!(message.starts_with("the store at etcd://127.0.0.1:1 does not answer: "), "{message}");
    let message = connect("etcd://127.0.0.1:1", ANSWER).err().unwrap().to_string();
    assert!(message.ends_with("give etcd://HOST:PORT/RUN, RUN a name that no other run has"), "{message}");
}
