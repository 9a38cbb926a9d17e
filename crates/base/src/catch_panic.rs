//! Converts panics into errors: panics in libraries that parse damaged files, and panics in worker threads.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

/// Runs `call`, which calls a library, and returns a panic as an error without printing it, so that a damaged file
/// cannot terminate the process.
pub fn catch_silently<T, E: From<String>>(call: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    thread_local! {
        static IS_SILENT: Cell<bool> = const { Cell::new(false) };
    }
    // The panic hook applies to all threads of the process. It suppresses the message only on a thread that is running
    // `call`.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_SILENT.get() {
                others(info);
            }
        }));
    });
    IS_SILENT.set(true);
    let answer = panic::catch_unwind(AssertUnwindSafe(call));
    IS_SILENT.set(false);
    answer.unwrap_or_else(|payload| Err(E::from(panic_message(&*payload))))
}

/// Runs `work` and converts a panic into `error(message)`. The panic hook still prints the panic.
pub fn catch_panics<T, E>(work: impl FnOnce() -> Result<T, E>, error: impl FnOnce(String) -> E) -> Result<T, E> {
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| Err(error(panic_message(&*payload))))
}

/// Returns the message of a panic.
pub fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_errors_with_their_message() {
        let of = |call: fn() -> Result<u8, String>| catch_silently(call);
        assert_eq!(of(|| panic!("attempt to multiply with overflow")), Err("attempt to multiply with overflow".into()));
        assert_eq!(of(|| panic!("of {}", "two")), Err("of two".into()));
        assert_eq!(of(|| Err("its own".into())), Err("its own".into()));
        assert_eq!(of(|| Ok(1)), Ok(1));
        let of = |call: fn() -> Result<u8, String>| catch_panics(call, |message| format!("panicked: {message}"));
        assert_eq!(of(|| panic!("of {}", "two")), Err("panicked: of two".into()));
        assert_eq!((of(|| Err("its own".into())), of(|| Ok(1))), (Err("its own".into()), Ok(1)));
    }
}
