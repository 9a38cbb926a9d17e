//! Watchdog: terminates the process when a device hangs, and reports the current work when a plugin aborts the
//! process. A hung plugin call cannot be cancelled, so the process exits without waiting for it or running destructors.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::kernel_log::KernelLog;
use super::processes::Group;
use ltx2_pjrt::{end_process, on_abort};

/// Minimum limit of [`WaitLimit::Auto`].
const LEAST: Duration = Duration::from_secs(60);
/// Ratio of the limit to the expected time, for [`WaitLimit::Auto`].
const FACTOR: u32 = 10;
/// Lower bound on transfer rates, in bytes per second.
const SLOW_TRANSFER: f64 = 100e6;
/// Time limit for the report before the process exits. The report may block, because stderr may be a pipe that nobody
/// reads, and other processes may be unreachable.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum sleep of the watchdog thread during a wait. If a sleep takes much longer, the process was suspended, and the
/// deadlines are extended by the excess.
const MAX_SLEEP: Duration = Duration::from_secs(1);
/// Tolerated delay at the end of a sleep, which a busy machine may cause. After a longer delay, the process counts as
/// having been suspended.
const SLEEP_TOLERANCE: Duration = Duration::from_secs(2);

/// Maximum duration of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitLimit {
    /// Ten times the expected time, but at least one minute.
    Auto,
    /// The same limit for every wait, regardless of the expected time.
    Fixed(Duration),
}

/// Callback that runs before the process exits. It receives the reason and, if known, instructions for resuming the
/// run.
pub type ExitReport = Box<dyn Fn(&str, Option<&str>) + Send + Sync>;

/// Function that returns instructions for resuming the run; `None` if it cannot be resumed.
type Continuation = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// Function that returns the memory needs of a program or component, given its name.
type MemoryNeeds = Box<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// State of the most recently created watchdog that reports aborts. This watchdog also reports an abort while it
/// watches no wait.
static LATEST: Mutex<Option<Arc<WatchdogShared>>> = Mutex::new(None);

/// A watchdog for waits on devices; the default is disabled. Clones share its thread, which starts with the first wait
/// and ends when the last clone is dropped.
#[derive(Clone, Default)]
pub struct DeviceWatchdog(Option<Arc<Owner>>);

struct Owner {
    shared: Arc<WatchdogShared>,
    thread: OnceLock<()>,
}

struct WatchdogShared {
    limit: WaitLimit,
    exit_report: ExitReport,
    state: Mutex<WatchdogState>,
    changed: Condvar,
    group: Mutex<Weak<Group>>,
    continuation: Mutex<Option<Continuation>>,
    needs: Mutex<Option<MemoryNeeds>>,
}

#[derive(Default)]
struct WatchdogState {
    next: u64,
    waits: BTreeMap<u64, Wait>,
    /// Time at which the thread wakes next; `None` while no wait is watched.
    wakes: Option<Instant>,
    over: bool,
}

struct Wait {
    stage: String,
    /// Stage, steps and work, for messages.
    what: String,
    since: Instant,
    deadline: Instant,
}

/// Guard that watches a wait; dropping it ends the watch.
#[must_use]
pub struct WaitGuard(Option<(Arc<WatchdogShared>, u64)>);

/// The denoising steps of the current thread, and the number of model evaluations in its next execution.
#[derive(Clone, Copy, Debug, Default)]
struct StepPosition {
    /// First and last step, counted from 1, and the total number of steps.
    steps: Option<[usize; 3]>,
    /// Number of model evaluations in the next execution.
    evaluations: Option<usize>,
}

thread_local! {
    static PLACE: Cell<StepPosition> = const { Cell::new(StepPosition { steps: None, evaluations: None }) };
}

/// Guard that restores the thread's previous steps and evaluations when dropped.
#[must_use]
pub struct StepsGuard(StepPosition);

impl Drop for StepsGuard {
    fn drop(&mut self) {
        PLACE.set(self.0);
    }
}

/// Sets the steps that this thread executes, counted from 1, until the guard is dropped.
pub fn at_steps(first: usize, last: usize, of: usize) -> StepsGuard {
    StepsGuard(PLACE.replace(StepPosition { steps: Some([first, last, of]), ..PLACE.get() }))
}

/// Sets the number of model evaluations per execution on this thread, until the guard is dropped.
pub fn with_evaluations(count: usize) -> StepsGuard {
    StepsGuard(PLACE.replace(StepPosition { evaluations: Some(count), ..PLACE.get() }))
}

/// Returns the number of evaluations of this thread's next execution, at least 1.
pub(super) fn evaluations() -> usize {
    PLACE.get().evaluations.unwrap_or(1).max(1)
}

/// Formats this thread's position as `, step 2 of 8`; empty if unknown.
fn steps() -> String {
    match PLACE.get().steps {
        None => String::new(),
        Some([first, last, of]) if first >= last => format!(", step {first} of {of}"),
        Some([first, last, of]) => format!(", steps {first} to {last} of {of}"),
    }
}

impl fmt::Debug for DeviceWatchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watchdog({:?})", self.0.as_ref().map(|owner| owner.shared.limit))
    }
}

impl DeviceWatchdog {
    /// Creates a watchdog that calls `exit_report` and terminates the process when a wait exceeds the limit.
    pub fn new(limit: WaitLimit, exit_report: ExitReport) -> Self {
        let (state, changed, group, continuation, needs) = Default::default();
        let shared = Arc::new(WatchdogShared { limit, exit_report, state, changed, group, continuation, needs });
        DeviceWatchdog(Some(Arc::new(Owner { shared, thread: OnceLock::new() })))
    }

    /// Installs an abort handler: if a plugin aborts the process, this watchdog reports it, and the exit code is 1.
    pub fn report_aborts(&self) {
        static HANDLER: Once = Once::new();
        let Some(owner) = &self.0 else { return };
        *lock(&LATEST) = Some(owner.shared.clone());
        HANDLER.call_once(|| {
            if let Err(error) = on_abort(PATIENCE, report_abort) {
                tracing::warn!("cannot install the abort handler, so a plugin abort will not be reported: {error}");
            }
        });
    }

    pub(super) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Sets the group of processes that are notified when the watchdog terminates this process.
    pub(super) fn with_group(self, group: Option<&Arc<Group>>) -> Self {
        if let (Some(owner), Some(group)) = (&self.0, group) {
            *lock(&owner.shared.group) = Arc::downgrade(group);
        }
        self
    }

    /// Sets the function that returns instructions for resuming the run.
    pub fn continues(&self, continuation: impl Fn() -> Option<String> + Send + Sync + 'static) {
        if let Some(owner) = &self.0 {
            *lock(&owner.shared.continuation) = Some(Box::new(continuation));
        }
    }

    /// Sets the function that returns the memory needs of a program or component by name.
    pub fn needs(&self, needs: impl Fn(&str) -> Option<String> + Send + Sync + 'static) {
        if let Some(owner) = &self.0 {
            *lock(&owner.shared.needs) = Some(Box::new(needs));
        }
    }

    /// Watches a wait that is expected to take `expected` and to transfer `bytes`. `what` returns the stage and the
    /// work with its device; the message begins with text such as `denoise, step 2 of 8: the execution on device 0`.
    pub(super) fn guard(&self, expected: Duration, bytes: usize, what: impl FnOnce() -> (String, String)) -> WaitGuard {
        let Some(owner) = &self.0 else { return WaitGuard(None) };
        let (shared, since) = (&owner.shared, Instant::now());
        let transfer = Duration::from_secs_f64(bytes as f64 / SLOW_TRANSFER);
        let limit = match shared.limit {
            WaitLimit::Auto => expected.saturating_add(transfer).saturating_mul(FACTOR).max(LEAST),
            WaitLimit::Fixed(limit) => limit,
        };
        // A deadline beyond the clock's range means no limit.
        let Some(deadline) = since.checked_add(limit) else { return WaitGuard(None) };
        let (stage, work) = what();
        let what = format!("{stage}{}: the {work}", steps());
        let mut state = lock(&shared.state);
        let id = state.next;
        state.next += 1;
        state.waits.insert(id, Wait { stage, what, since, deadline });
        if state.wakes.is_none_or(|wakes| deadline < wakes) {
            shared.changed.notify_one();
        }
        drop(state);
        owner.thread.get_or_init(|| {
            let shared = shared.clone();
            let started = thread::Builder::new().name("watchdog".into()).spawn(move || watch(&shared));
            if let Err(error) = started {
                tracing::warn!("cannot start the watchdog, so a hung device will not be detected: {error}");
            }
        });
        WaitGuard(Some((shared.clone(), id)))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        lock(&self.shared.state).over = true;
        self.shared.changed.notify_one();
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        if let Some((shared, id)) = &self.0 {
            lock(&shared.state).waits.remove(id);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the watchdog thread: checks the waits until the watchdog is dropped. Terminates the process when a wait exceeds
/// its deadline.
fn watch(shared: &Arc<WatchdogShared>) {
    let mut log = KernelLog::from_now();
    let mut state = lock(&shared.state);
    while !state.over {
        let now = Instant::now();
        let Some(first) = state.waits.values().min_by_key(|wait| wait.deadline) else {
            state.wakes = None;
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        if first.deadline <= now {
            let message = message(first, shared.limit, now, &log.read());
            // From this point on, the process exits even if the wait ends.
            drop(state);
            end(shared, message);
        }
        let sleep = (first.deadline - now).min(MAX_SLEEP);
        state.wakes = Some(now + sleep);
        let (held, _) = shared.changed.wait_timeout(state, sleep).unwrap_or_else(PoisonError::into_inner);
        state = held;
        let late = now.elapsed().saturating_sub(sleep);
        if late > SLEEP_TOLERANCE {
            state.waits.values_mut().for_each(|wait| wait.deadline += late);
        }
    }
}

fn message(wait: &Wait, limit: WaitLimit, now: Instant, log: &[String]) -> String {
    let (seconds, setting) = (
        now.duration_since(wait.since).as_secs(),
        match limit {
            WaitLimit::Auto => "auto".to_string(),
            WaitLimit::Fixed(limit) => limit.as_secs().to_string(),
        },
    );
    let found = if log.is_empty() { String::new() } else { format!("; kernel log: {}", log.join(" | ")) };
    format!(
        "{} has not finished after {seconds} s (runtime.watchdog: {setting}): the device, its driver or another \
         process hangs; check dmesg and the vendor's tool, reset the device and run again, or raise runtime.watchdog if \
         the work is only slow{found}",
        wait.what
    )
}

/// Reports `message` locally, and to the other processes of the group as `{does}: {message}`; `does` is a verb phrase
/// such as `hangs`.
fn report(shared: &WatchdogShared, does: &str, message: &str) {
    let going_on = lock(&shared.continuation).as_ref().and_then(|tell| tell());
    (shared.exit_report)(message, going_on.as_deref());
    if let Some(group) = lock(&shared.group).upgrade() {
        group.fail(&format!("{does}: {message}"));
    }
}

/// Reports the most recent unfinished wait. Called as the abort handler.
fn report_abort() {
    let Some(shared) = lock(&LATEST).clone() else { return };
    let last = lock(&shared.state).waits.values().next_back().map(|wait| (wait.stage.clone(), wait.what.clone()));
    let needs = last.as_ref().and_then(|(stage, _)| lock(&shared.needs).as_ref()?(stage));
    report(&shared, "was aborted", &abort_message(last.as_ref().map(|(_, what)| what.as_str()), needs.as_deref()));
}

fn abort_message(what: Option<&str>, needs: Option<&str>) -> String {
    let began = match what {
        Some(what) => format!("{what} aborted this process"),
        None => "this process was aborted".into(),
    };
    let memory = needs.map(|needs| format!("; if it ran out of memory: {needs}"));
    format!("{began}: see the output of the plugin or driver above{}", memory.unwrap_or_default())
}

/// Reports the reason and terminates the process, even if the report itself hangs.
fn end(shared: &Arc<WatchdogShared>, message: String) -> ! {
    let (said, done) = channel();
    let own = shared.clone();
    let words = move || {
        report(&own, "hangs", &message);
        // The receiver may have timed out.
        let _ = said.send(());
    };
    if thread::Builder::new().name("exit report".into()).spawn(words).is_ok() {
        let _ = done.recv_timeout(PATIENCE);
    }
    end_process(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn what() -> (String, String) {
        ("denoise".into(), "execution on device 0 (cpu)".into())
    }

    fn watchdog(limit: WaitLimit) -> DeviceWatchdog {
        DeviceWatchdog::new(limit, Box::new(|message, _| panic!("{message}")))
    }

    /// Returns the limits of all current waits.
    fn limits(watchdog: &DeviceWatchdog) -> Vec<Duration> {
        let state = lock(&watchdog.0.as_ref().unwrap().shared.state);
        state.waits.values().map(|wait| wait.deadline - wait.since).collect()
    }

    #[test]
    fn limit_follows_expected_time_and_bytes() {
        let auto = watchdog(WaitLimit::Auto);
        let guards = [(1, 0), (9, 0), (0, 2_000_000_000), (9, 2_000_000_000)]
            .map(|(seconds, bytes)| auto.guard(Duration::from_secs(seconds), bytes, what));
        assert_eq!(limits(&auto), [60, 90, 200, 290].map(Duration::from_secs));
        drop(guards);
        assert!(limits(&auto).is_empty(), "no wait is left");
        let fixed = watchdog(WaitLimit::Fixed(Duration::from_secs(1)));
        let _guard = fixed.guard(Duration::from_secs(900), 1 << 40, what);
        assert_eq!(limits(&fixed), [Duration::from_secs(1)]);
        let endless = auto.guard(Duration::MAX, 1, what);
        assert!(endless.0.is_none(), "the deadline is beyond the clock's range");
        let off = DeviceWatchdog::default().guard(Duration::ZERO, 0, what);
        assert!(off.0.is_none());
    }

    #[test]
    fn watchdog_message_describes_the_wait_and_gives_advice() {
        let fixed = watchdog(WaitLimit::Fixed(Duration::from_secs(7)));
        let said = || {
            let state = lock(&fixed.0.as_ref().unwrap().shared.state);
            let wait = state.waits.values().next().unwrap();
            message(wait, WaitLimit::Fixed(Duration::from_secs(7)), wait.deadline, &["NVRM: Xid 79".into()])
        };
        let guard = fixed.guard(Duration::ZERO, 0, what);
        let plain = said();
        assert!(
            plain.starts_with(
                "denoise: the execution on device 0 (cpu) has not finished after 7 s (runtime.watchdog: 7): "
            ),
            "{plain}"
        );
        assert!(plain.ends_with("; kernel log: NVRM: Xid 79") && !plain.contains('\n'), "{plain}");
        drop(guard);
        for (first, last, words) in [(2, 2, "denoise, step 2 of 8: the"), (3, 8, "denoise, steps 3 to 8 of 8: the")] {
            let _at = at_steps(first, last, 8);
            let _guard = fixed.guard(Duration::ZERO, 0, what);
            assert!(said().starts_with(words), "{}", said());
        }
        let _guard = fixed.guard(Duration::ZERO, 0, what);
        assert_eq!(said(), plain, "the steps are over");
    }

    #[test]
    fn abort_message_contains_the_last_wait_and_its_memory_needs() {
        let message =
            abort_message(Some("denoise, step 2 of 8: the execution on device 0"), Some("denoise needs 2 GiB"));
        let words = "see the output of the plugin or driver above; if it ran out of memory: denoise needs 2 GiB";
        assert_eq!(message, format!("denoise, step 2 of 8: the execution on device 0 aborted this process: {words}"));
        assert!(abort_message(None, None).starts_with("this process was aborted: see the output of the plugin"));
    }

    #[test]
    fn watching_a_wait_takes_microseconds() {
        const WAITS: u32 = 100_000;
        let auto = watchdog(WaitLimit::Auto);
        let started = Instant::now();
        for _ in 0..WAITS {
            let _guard = auto.guard(Duration::ZERO, 0, what);
        }
        let each = started.elapsed() / WAITS;
        eprintln!("{each:?} a wait");
        assert!(each < Duration::from_micros(100), "{each:?}");
    }

    #[test]
    fn waits_within_the_limit_do_not_trigger_the_watchdog() {
        let fixed = watchdog(WaitLimit::Fixed(Duration::from_millis(200)));
        for _ in 0..40 {
            let _guard = fixed.guard(Duration::ZERO, 0, what);
            thread::sleep(Duration::from_millis(10));
        }
        assert!(limits(&fixed).is_empty());
    }
}
