//! Parameters on their way: a thread of their own reads them and sends them to the devices in the order of use, while
//! programs compile and the first ones run.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::error::Result;
use super::files::Files;
use crate::models::Network;
use crate::nn::Param;
use crate::runtime::{Engine, Parameters};

/// Receiver of a load's progress: bytes so far, and in all; a load begins with 0 bytes.
pub type OnLoad = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Bytes that have been loaded, told to whoever shows them.
pub(super) struct Progress {
    done: AtomicU64,
    total: u64,
    told: Option<OnLoad>,
}

impl Progress {
    /// The begin of a load of `total` bytes, where there are any.
    pub(super) fn new(told: Option<OnLoad>, total: usize) -> Self {
        let progress = Progress { done: AtomicU64::new(0), total: total as u64, told };
        if total > 0 {
            progress.add(0);
        }
        progress
    }

    pub(super) fn add(&self, bytes: usize) {
        let done = self.done.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        if let Some(told) = &self.told {
            told(done, self.total);
        }
    }
}

/// How far the thread may go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// To the first program's parameters; whether there is room for more is not known yet.
    Undecided,
    First,
    All,
    /// Not even to the end of what it is at.
    Nowhere,
}

/// A gate that the thread passes before each program's parameters.
struct Gate {
    reach: Mutex<Reach>,
    moved: Condvar,
}

impl Gate {
    fn set(&self, reach: Reach) {
        *self.reach.lock().unwrap_or_else(PoisonError::into_inner) = reach;
        self.moved.notify_all();
    }

    fn settle(&self) {
        let mut reach = self.reach.lock().unwrap_or_else(PoisonError::into_inner);
        if *reach == Reach::Undecided {
            *reach = Reach::First;
            self.moved.notify_all();
        }
    }

    fn is_closed(&self) -> bool {
        *self.reach.lock().unwrap_or_else(PoisonError::into_inner) == Reach::Nowhere
    }

    /// Whether to go on; waits until it is known.
    fn lets_pass(&self, is_first: bool) -> bool {
        let reach = self.reach.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.moved.wait_while(reach, |reach| *reach == Reach::Undecided && !is_first);
        match *known.unwrap_or_else(PoisonError::into_inner) {
            Reach::All => true,
            Reach::Undecided | Reach::First => is_first,
            Reach::Nowhere => false,
        }
    }
}

/// Parameters that a thread loads, program by program.
pub(super) struct Ahead {
    arrivals: Receiver<Result<Parameters>>,
    /// Names of those that have not arrived.
    coming: HashSet<String>,
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

impl Ahead {
    /// Begins with the parameters of the first of `orders`, and goes on if `all` says so or [`Ahead::decide`] does.
    pub(super) fn start(
        engine: Engine,
        files: Files,
        orders: Vec<(Arc<Network>, Vec<Param>)>,
        all: bool,
        progress: Progress,
    ) -> Self {
        let coming = orders.iter().flat_map(|(_, params)| params.iter().map(|p| p.name.clone())).collect();
        let reach = if all { Reach::All } else { Reach::Undecided };
        let gate = Arc::new(Gate { reach: Mutex::new(reach), moved: Condvar::new() });
        // What has arrived waits in the channel; nothing is held back.
        let (sender, arrivals) = sync_channel(orders.len().max(1));
        let passes = gate.clone();
        let work = move || load(&engine, &files, &orders, &passes, &progress, &sender);
        let thread = std::thread::Builder::new().name("load".into()).spawn(work).ok();
        Ahead { arrivals, coming, gate, thread }
    }

    /// Lets it load all, or stops it behind the first program's parameters.
    pub(super) fn decide(&self, all: bool) {
        self.gate.set(if all { Reach::All } else { Reach::First });
    }

    /// Adds what has arrived, and waits for those of `wanted` that are on their way. What is not loaded here is left to the
    /// caller.
    ///
    /// # Errors
    /// The first of a parameter that cannot be loaded, once.
    pub(super) fn take(&mut self, wanted: &[Param], into: &mut Parameters) -> Result<()> {
        loop {
            let waits = wanted.iter().any(|param| self.coming.contains(&param.name));
            let arrived = if waits { self.arrivals.recv().ok() } else { self.arrivals.try_recv().ok() };
            match arrived {
                Some(Ok(parameters)) => {
                    self.coming.retain(|name| parameters.get(name).is_none());
                    into.put_back(parameters);
                }
                Some(Err(error)) => {
                    self.coming.clear();
                    return Err(error);
                }
                None if waits => self.coming.clear(),
                None => return Ok(()),
            }
        }
    }

    /// Adds all that is on its way, and no more where it is not known yet whether there is room.
    ///
    /// # Errors
    /// As [`Ahead::take`].
    pub(super) fn take_all(&mut self, into: &mut Parameters) -> Result<()> {
        self.gate.settle();
        for parameters in &self.arrivals {
            into.put_back(parameters?);
        }
        self.coming.clear();
        Ok(())
    }
}

impl Drop for Ahead {
    /// A thread that uploads would outlive the devices.
    fn drop(&mut self) {
        self.gate.set(Reach::Nowhere);
        if let Some(thread) = self.thread.take() {
            // Its panic has been printed, and what it should have loaded is missed by name.
            let _ = thread.join();
        }
    }
}

fn load(
    engine: &Engine,
    files: &Files,
    orders: &[(Arc<Network>, Vec<Param>)],
    gate: &Gate,
    progress: &Progress,
    arrived: &SyncSender<Result<Parameters>>,
) {
    for (i, (network, params)) in orders.iter().enumerate() {
        if !gate.lets_pass(i == 0) {
            return;
        }
        let mut parameters = Parameters::default();
        let told = |bytes: usize| {
            progress.add(bytes);
            !gate.is_closed()
        };
        let loaded = parameters.load(engine, &network.program, params, files, &told);
        let failed = loaded.is_err();
        // Nobody waits for it any more where this fails.
        if arrived.send(loaded.map(|()| parameters).map_err(Into::into)).is_err() || failed {
            return;
        }
    }
}
