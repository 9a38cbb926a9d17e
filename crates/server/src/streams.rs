//! Limits the number of open event streams and shares them fairly among clients.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use super::jobs::Caller;

/// Owner of an event stream: an API key or, on a server without keys, an IP address. IPv6 addresses of one /64 network
/// count as one client, because a host can use any address of its network.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum StreamOwner {
    Key(String),
    Address(Option<IpAddr>),
}

impl StreamOwner {
    pub(super) fn from_caller(caller: &Caller, peer: Option<SocketAddr>) -> Self {
        if !caller.name.is_empty() {
            return StreamOwner::Key(caller.name.clone());
        }
        StreamOwner::Address(peer.map(|peer| match peer.ip().to_canonical() {
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                IpAddr::from([a, b, c, d, 0, 0, 0, 0])
            }
            address => address,
        }))
    }
}

/// The open event streams and their maximum number.
#[derive(Debug)]
pub(super) struct Streams {
    most: usize,
    held: Mutex<HashMap<StreamOwner, usize>>,
}

/// Reason why a client cannot open another event stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamRefusal {
    /// All event streams of the server are in use.
    Full,
    /// The client has too many streams open. The value is the number of its open streams, which is at least the number
    /// of free streams.
    Share(usize),
}

impl Streams {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Streams { most, held: Mutex::default() })
    }

    /// Reserves an event stream for a client. A client may hold at most as many streams as are free, so a single client
    /// can use half of all streams, and the next client half of the rest.
    pub(super) fn enter(self: &Arc<Self>, client: StreamOwner) -> Result<StreamPermit, StreamRefusal> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.most - held.values().sum::<usize>();
        let own = held.get(&client).copied().unwrap_or(0);
        if free == 0 {
            return Err(StreamRefusal::Full);
        }
        if own >= free {
            return Err(StreamRefusal::Share(own));
        }
        held.insert(client.clone(), own + 1);
        Ok(StreamPermit { streams: Arc::clone(self), client })
    }
}

/// Guard of a reserved event stream. Dropping it frees the stream.
#[derive(Debug)]
pub(super) struct StreamPermit {
    streams: Arc<Streams>,
    client: StreamOwner,
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut held = self.streams.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = held.get_mut(&self.client) {
            *own -= 1;
            if *own == 0 {
                held.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(address: &str) -> StreamOwner {
        let caller = Caller { name: String::new(), sees_all: true };
        StreamOwner::from_caller(&caller, address.parse().ok())
    }

    #[test]
    fn one_client_cannot_take_all_streams() {
        let streams = Streams::new(8);
        let enter = |address| streams.enter(client(address));
        let mut first: Vec<StreamPermit> = (0..4).map(|_| enter("10.0.0.1:1").expect("a place")).collect();
        assert_eq!(enter("10.0.0.1:2").expect_err("its share"), StreamRefusal::Share(4));
        let second: Vec<StreamPermit> = (0..2).map(|_| enter("10.0.0.2:1").expect("a place")).collect();
        assert_eq!(enter("10.0.0.2:1").expect_err("its share"), StreamRefusal::Share(2));
        let others: Vec<StreamPermit> = ["10.0.0.3:1", "10.0.0.4:1"].map(|own| enter(own).expect("a place")).into();
        assert_eq!(enter("10.0.0.5:1").expect_err("none"), StreamRefusal::Full);
        first.clear();
        assert!(enter("10.0.0.5:1").is_ok());
        drop((second, others));
        assert!(streams.held.lock().expect("whole").is_empty());
    }

    #[test]
    fn clients_are_identified_by_key_or_network() {
        assert_eq!(client("[2001:db8::1]:1"), client("[2001:db8::2:3]:9"));
        assert_eq!(client("[::ffff:10.0.0.1]:1"), client("10.0.0.1:2"));
        assert_ne!(client("[2001:db8::1]:1"), client("[2001:db8:0:1::1]:1"));
        assert_ne!(client("10.0.0.1:1"), client("10.0.0.2:1"));
        let of = |name: &str| StreamOwner::from_caller(&Caller { name: name.into(), sees_all: false }, None);
        assert!(of("anna") == of("anna") && of("anna") != of("bert"));
    }
}
