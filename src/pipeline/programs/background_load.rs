//! Loads parameters on a background thread: reads and uploads them in the order in which the programs use them, while
//! the programs compile and the first of them run.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::files::Files;
use crate::models::Network;
use crate::nn::Param;
use crate::pipeline::error::Result;
use crate::runtime::{Engine, LoadedParameters};

/// Progress callback of a load; its arguments are the bytes loaded so far and the total bytes. The first call reports 0
/// bytes.
pub type OnLoad = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// Counts the loaded bytes and reports them to a callback.
pub(in crate::pipeline) struct LoadProgress {
    done: AtomicU64,
    total: u64,
    on_load: Option<OnLoad>,
}

impl LoadProgress {
    /// Creates a counter for `total` bytes and reports 0 loaded bytes; reports nothing if `total` is 0.
    pub(in crate::pipeline) fn new(on_load: Option<OnLoad>, total: usize) -> Self {
        let progress = LoadProgress { done: AtomicU64::new(0), total: total as u64, on_load };
        if total > 0 {
            progress.add(0);
        }
        progress
    }

    pub(in crate::pipeline) fn add(&self, bytes: usize) {
        let done = self.done.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        if let Some(on_load) = &self.on_load {
            on_load(done, self.total);
        }
    }
}

/// Permission of the load thread: the parameters that it may load.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LoadPermission {
    /// Only parameters of the first program, because it is not known yet whether all parameters fit in device memory.
    Undecided,
    First,
    All,
    /// No more parameters: the thread stops immediately, even during a load.
    Stopped,
}

/// Gate at which the load thread waits for permission before it loads each program's parameters.
struct LoadGate {
    permission: Mutex<LoadPermission>,
    moved: Condvar,
}

impl LoadGate {
    fn set(&self, permission: LoadPermission) {
        *self.permission.lock().unwrap_or_else(PoisonError::into_inner) = permission;
        self.moved.notify_all();
    }

    fn settle(&self) {
        let mut permission = self.permission.lock().unwrap_or_else(PoisonError::into_inner);
        if *permission == LoadPermission::Undecided {
            *permission = LoadPermission::First;
            self.moved.notify_all();
        }
    }

    fn is_closed(&self) -> bool {
        *self.permission.lock().unwrap_or_else(PoisonError::into_inner) == LoadPermission::Stopped
    }

    /// Returns whether the next program's parameters may be loaded. Unless this is the first program, blocks while the
    /// permission is [`LoadPermission::Undecided`].
    fn may_load(&self, is_first: bool) -> bool {
        let permission = self.permission.lock().unwrap_or_else(PoisonError::into_inner);
        let known =
            self.moved.wait_while(permission, |permission| *permission == LoadPermission::Undecided && !is_first);
        match *known.unwrap_or_else(PoisonError::into_inner) {
            LoadPermission::All => true,
            LoadPermission::Undecided | LoadPermission::First => is_first,
            LoadPermission::Stopped => false,
        }
    }
}

/// Parameters that a background thread loads program by program.
pub(in crate::pipeline) struct BackgroundLoad {
    arrivals: Receiver<Result<LoadedParameters>>,
    /// Names of the parameters that have not been received from the thread yet.
    coming: HashSet<String>,
    gate: Arc<LoadGate>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundLoad {
    /// Starts a thread that loads the parameters of the programs `orders`. Without `all`, the thread pauses after the
    /// first program until [`BackgroundLoad::decide`] is called.
    pub(in crate::pipeline) fn start(
        engine: Engine,
        files: Files,
        orders: Vec<(Arc<Network>, Vec<Param>)>,
        all: bool,
        progress: LoadProgress,
    ) -> Self {
        let coming = orders.iter().flat_map(|(_, params)| params.iter().map(|p| p.name.clone())).collect();
        let permission = if all { LoadPermission::All } else { LoadPermission::Undecided };
        let gate = Arc::new(LoadGate { permission: Mutex::new(permission), moved: Condvar::new() });
        // The channel has one slot per program, so the thread never blocks when it sends.
        let (sender, arrivals) = sync_channel(orders.len().max(1));
        let passes = gate.clone();
        let work = move || load(&engine, &files, &orders, &passes, &progress, &sender);
        let thread = std::thread::Builder::new().name("load".into()).spawn(work).ok();
        BackgroundLoad { arrivals, coming, gate, thread }
    }

    /// Lets the thread load the parameters of all programs if `all` is set; otherwise stops it after the first program.
    pub(in crate::pipeline) fn decide(&self, all: bool) {
        self.gate.set(if all { LoadPermission::All } else { LoadPermission::First });
    }

    /// Moves loaded parameters into `into`. Waits for those of `wanted` that the thread is loading; the caller must
    /// load the rest of `wanted` itself.
    ///
    /// # Errors
    /// Returns the first load error, once.
    pub(in crate::pipeline) fn take(&mut self, wanted: &[Param], into: &mut LoadedParameters) -> Result<()> {
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

    /// Waits for all parameters that the thread is loading and moves them into `into`. If [`BackgroundLoad::decide`]
    /// has not been called, the thread stops after the first program's parameters.
    ///
    /// # Errors
    /// Returns the first load error.
    pub(in crate::pipeline) fn take_all(&mut self, into: &mut LoadedParameters) -> Result<()> {
        self.gate.settle();
        for parameters in &self.arrivals {
            into.put_back(parameters?);
        }
        self.coming.clear();
        Ok(())
    }
}

impl Drop for BackgroundLoad {
    /// Joins the thread, because it must not outlive the devices that it uploads to.
    fn drop(&mut self) {
        self.gate.set(LoadPermission::Stopped);
        if let Some(thread) = self.thread.take() {
            // The panic message has already been printed; the executor reports the missing parameters by name.
            let _ = thread.join();
        }
    }
}

fn load(
    engine: &Engine,
    files: &Files,
    orders: &[(Arc<Network>, Vec<Param>)],
    gate: &LoadGate,
    progress: &LoadProgress,
    arrived: &SyncSender<Result<LoadedParameters>>,
) {
    for (i, (network, params)) in orders.iter().enumerate() {
        if !gate.may_load(i == 0) {
            return;
        }
        let mut parameters = LoadedParameters::default();
        let on_load = |bytes: usize| {
            progress.add(bytes);
            !gate.is_closed()
        };
        let loaded = parameters.load(engine, &network.program, params, files, &on_load);
        let failed = loaded.is_err();
        // Sending fails if the receiver has been dropped.
        if arrived.send(loaded.map(|()| parameters).map_err(Into::into)).is_err() || failed {
            return;
        }
    }
}
