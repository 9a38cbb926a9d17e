//! Panics as errors: of libraries on damaged files, and of threads whose results are needed.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

/// A library's answer, or what it panicked with: a file is no reason to end a process.
///
/// # Errors
/// The call's own; the words of its panic.
pub(crate) fn contained<T, E: From<String>>(call: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    thread_local! {
        static IS_CONTAINED: Cell<bool> = const { Cell::new(false) };
    }
    // The hook that prints panics is the whole process's: it stays, and says nothing of this thread's while the call lasts.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_CONTAINED.get() {
                others(info);
            }
        }));
    });
    IS_CONTAINED.set(true);
    let answer = panic::catch_unwind(AssertUnwindSafe(call));
    IS_CONTAINED.set(false);
    answer.unwrap_or_else(|payload| Err(E::from(panic_message(&*payload))))
}

/// Runs `work`; a panic, which the process's hook prints, becomes the error of its message.
///
/// # Errors
/// Those of `work`; its panic.
pub(crate) fn caught<T, E>(work: impl FnOnce() -> Result<T, E>, error: impl FnOnce(String) -> E) -> Result<T, E> {
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| Err(error(panic_message(&*payload))))
}

/// The message of a panic.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_words() {
        let of = |call: fn() -> Result<u8, String>| contained(call);
        assert_eq!(of(|| panic!("attempt to multiply with overflow")), Err("attempt to multiply with overflow".into()));
        assert_eq!(of(|| panic!("of {}", "two")), Err("of two".into()));
        assert_eq!(of(|| Err("its own".into())), Err("its own".into()));
        assert_eq!(of(|| Ok(1)), Ok(1));
        let of = |call: fn() -> Result<u8, String>| caught(call, |message| format!("panicked: {message}"));
        assert_eq!(of(|| panic!("of {}", "two")), Err("panicked: of two".into()));
        assert_eq!((of(|| Err("its own".into())), of(|| Ok(1))), (Err("its own".into()), Ok(1)));
    }
}
