//! Streams of events that are open, shared among clients.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use super::jobs::Caller;

/// Who holds a stream: a key or, on a server without keys, an address. Of IPv6 its network: a host may take any address of that.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Client {
    Key(String),
    Address(Option<IpAddr>),
}

impl Client {
    /// The client of a request.
    pub(super) fn of(caller: &Caller, peer: Option<SocketAddr>) -> Self {
        if !caller.name.is_empty() {
            return Client::Key(caller.name.clone());
        }
        Client::Address(peer.map(|peer| match peer.ip().to_canonical() {
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                IpAddr::from([a, b, c, d, 0, 0, 0, 0])
            }
            address => address,
        }))
    }
}

/// The places for streams.
#[derive(Debug)]
pub(super) struct Streams {
    most: usize,
    held: Mutex<HashMap<Client, usize>>,
}

/// Why a client gets no further stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// All places are taken.
    Full,
    /// The client has as many as are left for all others: so many.
    Share(usize),
}

impl Streams {
    /// So many places.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Streams { most, held: Mutex::default() })
    }

    /// A place for a client. Each may hold as many as stay free for others: alone it gets half of all, and whoever comes later half
    /// of what is left.
    ///
    /// # Errors
    /// No place is left, or none for this client.
    pub(super) fn enter(self: &Arc<Self>, client: Client) -> Result<Place, Refused> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.most - held.values().sum::<usize>();
        let own = held.get(&client).copied().unwrap_or(0);
        if free == 0 {
            return Err(Refused::Full);
        }
        if own >= free {
            return Err(Refused::Share(own));
        }
        held.insert(client.clone(), own + 1);
        Ok(Place { streams: Arc::clone(self), client })
    }
}

/// A place that is taken until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    streams: Arc<Streams>,
    client: Client,
}

impl Drop for Place {
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

    fn client(address: &str) -> Client {
        let caller = Caller { name: String::new(), sees_all: true };
        Client::of(&caller, address.parse().ok())
    }

    #[test]
    fn one_client_leaves_places_to_others() {
        let streams = Streams::new(8);
        let enter = |address| streams.enter(client(address));
        let mut first: Vec<Place> = (0..4).map(|_| enter("10.0.0.1:1").expect("a place")).collect();
        assert_eq!(enter("10.0.0.1:2").expect_err("its share"), Refused::Share(4));
        let second: Vec<Place> = (0..2).map(|_| enter("10.0.0.2:1").expect("a place")).collect();
        assert_eq!(enter("10.0.0.2:1").expect_err("its share"), Refused::Share(2));
        let others: Vec<Place> = ["10.0.0.3:1", "10.0.0.4:1"].map(|own| enter(own).expect("a place")).into();
        assert_eq!(enter("10.0.0.5:1").expect_err("none"), Refused::Full);
        first.clear();
        assert!(enter("10.0.0.5:1").is_ok());
        drop((second, others));
        assert!(streams.held.lock().expect("whole").is_empty());
    }

    #[test]
    fn clients_are_keys_or_networks() {
        assert_eq!(client("[2001:db8::1]:1"), client("[2001:db8::2:3]:9"));
        assert_eq!(client("[::ffff:10.0.0.1]:1"), client("10.0.0.1:2"));
        assert_ne!(client("[2001:db8::1]:1"), client("[2001:db8:0:1::1]:1"));
        assert_ne!(client("10.0.0.1:1"), client("10.0.0.2:1"));
        let of = |name: &str| Client::of(&Caller { name: name.into(), sees_all: false }, None);
        assert!(of("anna") == of("anna") && of("anna") != of("bert"));
    }
}
