//! The watchdog: it ends the process when a device does not answer, and says where it was when a plugin aborts it. A hung call of a
//! plugin cannot be cancelled, so nothing is waited for or destroyed then.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::kernel_log::KernelLog;
use super::processes::Group;
use crate::pjrt::{end_process, on_abort};

/// Shortest limit of `auto`.
const LEAST: Duration = Duration::from_secs(60);
/// Factor between the time that is expected and the limit of `auto`.
const FACTOR: u32 = 10;
/// Bytes a second that a transfer surely reaches.
const SLOW_TRANSFER: f64 = 100e6;
/// Time for the last words: stderr may be a pipe that nobody reads, the other processes out of reach.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest sleep while something is waited for. One that took much longer was this process's, stopped or suspended: that time
/// counts for no wait.
const NAP: Duration = Duration::from_secs(1);
/// Delay of a sleep that a busy machine may cause.
const LATE: Duration = Duration::from_secs(2);

/// How long a wait may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitLimit {
    /// A multiple of the expected time, a minute at least.
    Auto,
    Fixed(Duration),
}

/// Called with the reason before the process ends, and with how to go on where that is known.
pub type LastWords = Box<dyn Fn(&str, Option<&str>) + Send + Sync>;

/// Tells how the run can be continued, at the moment of its end.
type Continuation = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// Tells the memory that a program or a component takes, by its name.
type Needs = Box<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// The watchdog that speaks when a plugin aborts the process: the latest, also when nothing is watched any more.
static LATEST: Mutex<Option<Arc<Shared>>> = Mutex::new(None);

/// A watchdog, or none. Clones share it; its thread begins with the first wait and ends with the last clone.
#[derive(Clone, Default)]
pub struct Watchdog(Option<Arc<Owner>>);

struct Owner {
    shared: Arc<Shared>,
    thread: OnceLock<()>,
}

struct Shared {
    limit: WaitLimit,
    last_words: LastWords,
    state: Mutex<State>,
    changed: Condvar,
    group: Mutex<Weak<Group>>,
    continuation: Mutex<Option<Continuation>>,
    needs: Mutex<Option<Needs>>,
}

#[derive(Default)]
struct State {
    next: u64,
    waits: BTreeMap<u64, Wait>,
    /// When the thread looks next; none while there is nothing to look at.
    wakes: Option<Instant>,
    over: bool,
}

struct Wait {
    stage: String,
    /// The stage, its steps and the work.
    what: String,
    since: Instant,
    deadline: Instant,
}

/// Stands over a wait until it is dropped.
#[must_use]
pub(crate) struct Guard(Option<(Arc<Shared>, u64)>);

/// Steps that a thread is at.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// The first, the last and their number, from 1.
    steps: Option<[usize; 3]>,
    /// Evaluations of the next execution.
    evaluations: Option<usize>,
}

thread_local! {
    static PLACE: Cell<Place> = const { Cell::new(Place { steps: None, evaluations: None }) };
}

/// Ends a thread's being at steps when dropped.
#[must_use]
pub(crate) struct AtSteps(Place);

impl Drop for AtSteps {
    fn drop(&mut self) {
        PLACE.set(self.0);
    }
}

/// Names the steps that this thread is at, from 1, until the guard is dropped.
pub(crate) fn at_steps(first: usize, last: usize, of: usize) -> AtSteps {
    AtSteps(PLACE.replace(Place { steps: Some([first, last, of]), ..PLACE.get() }))
}

/// Says how many evaluations of a loop an execution on this thread takes, until the guard is dropped.
pub(crate) fn with_evaluations(count: usize) -> AtSteps {
    AtSteps(PLACE.replace(Place { evaluations: Some(count), ..PLACE.get() }))
}

/// Evaluations of this thread's next execution.
pub(super) fn evaluations() -> usize {
    PLACE.get().evaluations.unwrap_or(1).max(1)
}

/// `, step 2 of 8` of this thread, where it is known.
fn steps() -> String {
    match PLACE.get().steps {
        None => String::new(),
        Some([first, last, of]) if first >= last => format!(", step {first} of {of}"),
        Some([first, last, of]) => format!(", steps {first} to {last} of {of}"),
    }
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watchdog({:?})", self.0.as_ref().map(|owner| owner.shared.limit))
    }
}

impl Watchdog {
    /// A watchdog that ends the process, after `last_words`, when a wait takes longer than the limit.
    pub fn new(limit: WaitLimit, last_words: LastWords) -> Self {
        let (state, changed, group, continuation, needs) = Default::default();
        let shared = Arc::new(Shared { limit, last_words, state, changed, group, continuation, needs });
        Watchdog(Some(Arc::new(Owner { shared, thread: OnceLock::new() })))
    }

    /// From here on, a plugin that aborts this process does so behind last words of this watchdog, with exit code 1.
    pub(crate) fn tells_aborts(&self) {
        static HANDLER: Once = Once::new();
        let Some(owner) = &self.0 else { return };
        *lock(&LATEST) = Some(owner.shared.clone());
        HANDLER.call_once(|| {
            if let Err(error) = on_abort(PATIENCE, say_aborted) {
                tracing::warn!("a plugin that aborts this process does so without a last line: {error}");
            }
        });
    }

    /// Whether anything is watched.
    pub(super) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The processes that end with this one.
    pub(super) fn with_group(self, group: Option<&Arc<Group>>) -> Self {
        if let (Some(owner), Some(group)) = (&self.0, group) {
            *lock(&owner.shared.group) = Arc::downgrade(group);
        }
        self
    }

    /// From here on, `continuation` tells how the run can be continued.
    pub(crate) fn continues(&self, continuation: impl Fn() -> Option<String> + Send + Sync + 'static) {
        if let Some(owner) = &self.0 {
            *lock(&owner.shared.continuation) = Some(Box::new(continuation));
        }
    }

    /// From here on, `needs` tells the memory that a program or a component takes, by its name.
    pub(crate) fn needs(&self, needs: impl Fn(&str) -> Option<String> + Send + Sync + 'static) {
        if let Some(owner) = &self.0 {
            *lock(&owner.shared.needs) = Some(Box::new(needs));
        }
    }

    /// Stands over a wait that is expected to take so long, and moves so many bytes. `what` names the stage, what is waited for
    /// and the device: `stage: the execution on device 0`, in two parts around the steps.
    pub(super) fn guard(&self, expected: Duration, bytes: usize, what: impl FnOnce() -> (String, String)) -> Guard {
        let Some(owner) = &self.0 else { return Guard(None) };
        let (shared, since) = (&owner.shared, Instant::now());
        let transfer = Duration::from_secs_f64(bytes as f64 / SLOW_TRANSFER);
        let limit = match shared.limit {
            WaitLimit::Auto => expected.saturating_add(transfer).saturating_mul(FACTOR).max(LEAST),
            WaitLimit::Fixed(limit) => limit,
        };
        // Beyond what a clock can say there is no limit.
        let Some(deadline) = since.checked_add(limit) else { return Guard(None) };
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
                tracing::warn!("a device that hangs is not noticed: {error}");
            }
        });
        Guard(Some((shared.clone(), id)))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        lock(&self.shared.state).over = true;
        self.shared.changed.notify_one();
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some((shared, id)) = &self.0 {
            lock(&shared.state).waits.remove(id);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks at the waits until the watchdog is gone or one has taken too long.
fn watch(shared: &Arc<Shared>) {
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
            // Waits that end now change nothing any more.
            drop(state);
            end(shared, message);
        }
        let nap = (first.deadline - now).min(NAP);
        state.wakes = Some(now + nap);
        let (held, _) = shared.changed.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner);
        state = held;
        let late = now.elapsed().saturating_sub(nap);
        if late > LATE {
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
    let found = if log.is_empty() { String::new() } else { format!("; the kernel's log: {}", log.join(" | ")) };
    format!(
        "{} has not ended after {seconds} s (runtime.watchdog: {setting}): the device, its driver or another process hangs; \
         look at it with dmesg and the vendor's tool, reset it and run again, or raise runtime.watchdog where it is only \
         slow{found}",
        wait.what
    )
}

/// Says why, and tells the other processes that this one `does` so.
fn say(shared: &Shared, does: &str, message: &str) {
    let going_on = lock(&shared.continuation).as_ref().and_then(|tell| tell());
    (shared.last_words)(message, going_on.as_deref());
    if let Some(group) = lock(&shared.group).upgrade() {
        group.fail(&format!("{does}: {message}"));
    }
}

/// The last words of a process that a plugin aborts, by what was waited for last.
fn say_aborted() {
    let Some(shared) = lock(&LATEST).clone() else { return };
    let last = lock(&shared.state).waits.values().next_back().map(|wait| (wait.stage.clone(), wait.what.clone()));
    let needs = last.as_ref().and_then(|(stage, _)| lock(&shared.needs).as_ref()?(stage));
    say(&shared, "was ended", &aborted(last.as_ref().map(|(_, what)| what.as_str()), needs.as_deref()));
}

fn aborted(what: Option<&str>, needs: Option<&str>) -> String {
    let began = match what {
        Some(what) => format!("{what} ended this process by an abort"),
        None => "this process was ended by an abort".into(),
    };
    let memory = needs.map(|needs| format!("; if they tell of memory: {needs}"));
    format!("{began}: the words above are the plugin's or the driver's{}", memory.unwrap_or_default())
}

/// Says why, and ends the process, whatever of that hangs too.
fn end(shared: &Arc<Shared>, message: String) -> ! {
    let (said, done) = channel();
    let own = shared.clone();
    let words = move || {
        say(&own, "hangs", &message);
        // Nobody may wait for it any more.
        let _ = said.send(());
    };
    if thread::Builder::new().name("last words".into()).spawn(words).is_ok() {
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

    fn watchdog(limit: WaitLimit) -> Watchdog {
        Watchdog::new(limit, Box::new(|message, _| panic!("{message}")))
    }

    /// Limits of waits that are under way.
    fn limits(watchdog: &Watchdog) -> Vec<Duration> {
        let state = lock(&watchdog.0.as_ref().unwrap().shared.state);
        state.waits.values().map(|wait| wait.deadline - wait.since).collect()
    }

    #[test]
    fn the_limit_follows_the_expected_time_and_the_bytes() {
        let auto = watchdog(WaitLimit::Auto);
        let guards = [(1, 0), (9, 0), (0, 2_000_000_000), (9, 2_000_000_000)]
            .map(|(seconds, bytes)| auto.guard(Duration::from_secs(seconds), bytes, what));
        assert_eq!(limits(&auto), [60, 90, 200, 290].map(Duration::from_secs));
        drop(guards);
        assert!(limits(&auto).is_empty(), "nothing is waited for any more");
        let fixed = watchdog(WaitLimit::Fixed(Duration::from_secs(1)));
        let _guard = fixed.guard(Duration::from_secs(900), 1 << 40, what);
        assert_eq!(limits(&fixed), [Duration::from_secs(1)]);
        let endless = auto.guard(Duration::MAX, 1, what);
        assert!(endless.0.is_none(), "no clock says when that is over");
        let off = Watchdog::default().guard(Duration::ZERO, 0, what);
        assert!(off.0.is_none());
    }

    #[test]
    fn one_line_says_what_is_waited_for_and_what_to_do() {
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
                "denoise: the execution on device 0 (cpu) has not ended after 7 s (runtime.watchdog: 7): "
            ),
            "{plain}"
        );
        assert!(plain.ends_with("; the kernel's log: NVRM: Xid 79") && !plain.contains('\n'), "{plain}");
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
    fn an_abort_is_told_by_the_last_wait_and_the_memory_of_its_stage() {
        let message = aborted(Some("denoise, step 2 of 8: the execution on device 0"), Some("denoise needs 2 GiB"));
        let words = "the words above are the plugin's or the driver's; if they tell of memory: denoise needs 2 GiB";
        assert_eq!(
            message,
            format!("denoise, step 2 of 8: the execution on device 0 ended this process by an abort: {words}")
        );
        assert!(aborted(None, None).starts_with("this process was ended by an abort: the words above"));
    }

    #[test]
    fn a_wait_costs_microseconds() {
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
    fn waits_that_end_in_time_end_nothing() {
        let fixed = watchdog(WaitLimit::Fixed(Duration::from_millis(200)));
        for _ in 0..40 {
            let _guard = fixed.guard(Duration::ZERO, 0, what);
            thread::sleep(Duration::from_millis(10));
        }
        assert!(limits(&fixed).is_empty());
    }
}
