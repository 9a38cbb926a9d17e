//! The key-value store through which the processes of a run find each other, and the C callbacks that expose it to a
//! plugin.
//!
//! A multi-process CUDA client uses the store to exchange device topologies when it is created, and NCCL ids when a
//! program first runs on devices of several processes. Values are bytes. The plugin calls the store from any thread,
//! possibly from several concurrently.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::c_void;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::abi::{self, CallbackError, error_code};
use super::attributes::list;
use super::layout::pointer;

/// A key-value store shared by all processes of a run.
pub trait KvStore: Send + Sync {
    /// Returns the value of a key; waits until the key exists.
    ///
    /// # Errors
    /// Returns [`KvError::Timeout`] if no process inserts the key in time, or an error if the store cannot be reached.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError>;

    /// Returns the value of a key without waiting.
    ///
    /// # Errors
    /// Returns [`KvError::NotFound`] if there is no such key, or an error if the store cannot be reached.
    fn try_get(&self, key: &str) -> Result<Vec<u8>, KvError>;

    /// Inserts a new key.
    ///
    /// # Errors
    /// Returns [`KvError::AlreadyExists`] if the key exists, or an error if the store cannot be reached.
    fn put(&self, key: &str, value: &[u8]) -> Result<(), KvError>;

    /// Inserts a key, or replaces its value.
    ///
    /// # Errors
    /// Returns an error if the store cannot be reached.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError>;

    /// Removes a key, if it exists.
    ///
    /// # Errors
    /// Returns an error if the store cannot be reached.
    fn remove(&self, key: &str) -> Result<(), KvError>;
}

/// An error of a key-value store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// The store has no such key.
    #[error("key '{0}' does not exist")]
    NotFound(String),
    /// The store already has the key to insert.
    #[error("key '{0}' already exists")]
    AlreadyExists(String),
    /// The key was not inserted in time.
    #[error("no process inserted key '{key}' within {:.1} s", after.as_secs_f64())]
    Timeout {
        /// Name of the key.
        key: String,
        /// Duration of the wait.
        after: Duration,
    },
    /// The store cannot be reached.
    #[error("the key-value store at {place} is not responding: {reason}")]
    Unavailable {
        /// Address of the store.
        place: String,
        /// Cause, on one line.
        reason: String,
    },
}

impl KvError {
    fn code(&self) -> u32 {
        match self {
            KvError::NotFound(_) => error_code::NOT_FOUND,
            KvError::AlreadyExists(_) => error_code::ALREADY_EXISTS,
            KvError::Timeout { .. } => error_code::DEADLINE_EXCEEDED,
            KvError::Unavailable { .. } => error_code::UNAVAILABLE,
        }
    }
}

/// One of several processes: its index, the number of processes, and the store that they share.
#[derive(Clone)]
pub struct ProcessNode {
    /// Index of this process.
    pub id: usize,
    /// Number of processes.
    pub count: usize,
    /// The store that the processes share.
    pub store: Arc<dyn KvStore>,
}

impl fmt::Debug for ProcessNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Node {} of {}", self.id, self.count)
    }
}

impl PartialEq for ProcessNode {
    fn eq(&self, other: &Self) -> bool {
        (self.id, self.count) == (other.id, other.count) && Arc::ptr_eq(&self.store, &other.store)
    }
}

/// Sets the callbacks of a store in the arguments for creating a client.
///
/// Leaks the store: a plugin keeps the callbacks in structures that outlive the client, such as its table of NCCL
/// communicators, and does not report when it no longer needs them. A process creates only one multi-process client.
pub(super) fn set_store_callbacks(store: &Arc<dyn KvStore>, args: &mut abi::ClientCreateArgs) {
    let user: *mut c_void = (&raw mut *Box::leak(Box::new(store.clone()))).cast();
    args.kv_get_callback = Some(get);
    args.kv_get_user_arg = user;
    args.kv_try_get_callback = Some(try_get);
    args.kv_try_get_user_arg = user;
    args.kv_put_callback = Some(put);
    args.kv_put_user_arg = user;
}

/// Implements `PJRT_KeyValueGetCallback`.
unsafe extern "C" fn get(args: *mut abi::KeyValueGetCallbackArgs) -> *mut c_void {
    // SAFETY: during the call, the plugin's struct is alive and nothing else accesses it.
    let args = unsafe { &mut *args };
    // A negative timeout requests an unlimited wait; one day is used instead.
    let wait = u64::try_from(args.timeout_in_ms).map_or(Duration::from_secs(86_400), Duration::from_millis);
    // SAFETY: `set_store_callbacks` set `user_arg`; the key and the error function belong to the plugin and outlive the call.
    unsafe {
        let found = call_store(args.user_arg, |store| store.get(&key(args.key, args.key_size), wait));
        args.value_deleter_callback = Some(free);
        reply(found, args.callback_error, |(value, size)| (args.value, args.value_size) = (value, size))
    }
}

/// Implements `PJRT_KeyValueTryGetCallback`.
unsafe extern "C" fn try_get(args: *mut abi::KeyValueTryGetCallbackArgs) -> *mut c_void {
    // SAFETY: as for `get`.
    unsafe {
        let args = &mut *args;
        let found = call_store(args.user_arg, |store| store.try_get(&key(args.key, args.key_size)));
        args.value_deleter_callback = Some(free);
        reply(found, args.callback_error, |(value, size)| (args.value, args.value_size) = (value, size))
    }
}

/// Implements `PJRT_KeyValuePutCallback`.
unsafe extern "C" fn put(args: *mut abi::KeyValuePutCallbackArgs) -> *mut c_void {
    // SAFETY: as for `get`; the value outlives the call.
    unsafe {
        let args = &mut *args;
        let value = list(args.value.cast::<u8>(), args.value_size);
        let put = call_store(args.user_arg, |store| {
            let key = key(args.key, args.key_size);
            match store.put(&key, value) {
                // A program that is compiled a second time inserts the same values.
                Err(KvError::AlreadyExists(_)) if store.try_get(&key)? == value => Ok(()),
                other => other,
            }
        });
        reply(put.map(|()| Vec::new()), args.callback_error, |(value, _)| free(value))
    }
}

/// Calls `what` with the store. Catches panics, because a panic must not unwind into C.
///
/// # Safety
/// `user` was set by [`set_store_callbacks`].
unsafe fn call_store<T>(
    user: *mut c_void,
    what: impl FnOnce(&dyn KvStore) -> Result<T, KvError>,
) -> Result<T, KvError> {
    // SAFETY: guaranteed by the caller; the store is never freed.
    let store = unsafe { &*user.cast::<Arc<dyn KvStore>>() };
    let panicked = || KvError::Unavailable { place: "this process".into(), reason: "its code panicked".into() };
    catch_unwind(AssertUnwindSafe(|| what(&**store))).unwrap_or_else(|_| Err(panicked()))
}

/// Passes a found value to `set_value`; the plugin must free the value. If `found` is an error, returns a plugin error
/// that `make_error` creates.
///
/// # Safety
/// `make_error` is null or points to the plugin's function.
unsafe fn reply(
    found: Result<Vec<u8>, KvError>,
    make_error: *const CallbackError,
    set_value: impl FnOnce((*mut c_void, usize)),
) -> *mut c_void {
    // SAFETY: guaranteed by the caller.
    let make_error = unsafe { make_error.as_ref() }.copied().flatten();
    match (found, make_error) {
        (Err(error), Some(make)) => {
            let message = error.to_string();
            // SAFETY: the plugin copies the message.
            unsafe { make(error.code(), pointer(message.as_bytes()), message.len()) }
        }
        // If the plugin passed no function to create errors, it gets an empty value instead. The value must be
        // allocated, because the plugin will free it.
        (found, _) => {
            let value = found.unwrap_or_else(|_| Vec::new());
            set_value((allocate(&value), value.len()));
            std::ptr::null_mut()
        }
    }
}

/// Converts a key to text. Escapes bytes that are not ASCII, so that different keys stay different.
///
/// # Safety
/// `data` points to `size` readable bytes.
unsafe fn key(data: *const c_void, size: usize) -> String {
    // SAFETY: guaranteed by the caller.
    unsafe { list(data.cast::<u8>(), size) }.escape_ascii().to_string()
}

/// Size of the header that stores a value's length. The header is necessary because the deleter callback gets only the
/// address.
const HEAD: usize = align_of::<usize>();

fn layout(size: usize) -> Layout {
    // A value in memory is small enough that `HEAD + size` cannot overflow, so the fallback is never used.
    Layout::from_size_align(HEAD + size, HEAD).unwrap_or_else(|_| Layout::new::<usize>())
}

/// Copies a value to memory that the plugin frees with [`free`].
fn allocate(value: &[u8]) -> *mut c_void {
    let layout = layout(value.len());
    // SAFETY: the layout is not empty; the allocation has room for `HEAD` bytes and then the value.
    unsafe {
        let start = alloc(layout);
        if start.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        start.cast::<usize>().write(value.len());
        let data = start.add(HEAD);
        std::ptr::copy_nonoverlapping(value.as_ptr(), data, value.len());
        data.cast()
    }
}

/// Frees a value that [`allocate`] returned.
unsafe extern "C" fn free(value: *mut c_void) {
    if value.is_null() {
        return;
    }
    // SAFETY: the plugin passes the address from `allocate`, and only once; the header before it holds the length.
    unsafe {
        let start = value.cast::<u8>().sub(HEAD);
        let size = start.cast::<usize>().read();
        dealloc(start, layout(size));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Mutex;
    use std::time::Instant;

    use super::*;
    use crate::abi::Struct;

    /// A store in memory, whose `get` polls.
    #[derive(Default)]
    struct Map(Mutex<HashMap<String, Vec<u8>>>);

    impl KvStore for Map {
        fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KvError> {
            let end = Instant::now() + timeout;
            loop {
                match self.try_get(key) {
                    Err(KvError::NotFound(_)) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
                    Err(KvError::NotFound(key)) => return Err(KvError::Timeout { key, after: timeout }),
                    other => return other,
                }
            }
        }

        fn try_get(&self, key: &str) -> Result<Vec<u8>, KvError> {
            assert_ne!(key, "panic", "panics on request");
            self.0.lock().unwrap().get(key).cloned().ok_or_else(|| KvError::NotFound(key.into()))
        }

        fn put(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
            let mut values = self.0.lock().unwrap();
            if values.contains_key(key) {
                return Err(KvError::AlreadyExists(key.into()));
            }
            values.insert(key.into(), value.into());
            Ok(())
        }

        fn set(&self, key: &str, value: &[u8]) -> Result<(), KvError> {
            self.0.lock().unwrap().insert(key.into(), value.into());
            Ok(())
        }

        fn remove(&self, key: &str) -> Result<(), KvError> {
            self.0.lock().unwrap().remove(key);
            Ok(())
        }
    }

    /// Creates an error as a plugin does: on the heap, until the plugin frees it.
    unsafe extern "C" fn make_error(code: u32, message: *const c_void, size: usize) -> *mut c_void {
        // SAFETY: the callback passes its message with its size.
        let message = unsafe { crate::attributes::text(message, size) };
        Box::into_raw(Box::new((code, message))).cast()
    }

    const MAKE: CallbackError = Some(make_error);

    fn error(raw: *mut c_void) -> Option<(u32, String)> {
        // SAFETY: a callback returns null or the result of `make_error`.
        (!raw.is_null()).then(|| *unsafe { Box::from_raw(raw.cast::<(u32, String)>()) })
    }

    /// A fake plugin, which accesses a client's arguments only through their C pointers.
    struct FakePlugin(abi::ClientCreateArgs);
    // SAFETY: the pointers refer to a store that may be used from any thread.
    unsafe impl Send for FakePlugin {}
    // SAFETY: as above.
    unsafe impl Sync for FakePlugin {}

    impl FakePlugin {
        fn new() -> FakePlugin {
            let mut args = abi::ClientCreateArgs::new();
            set_store_callbacks(&(Arc::new(Map::default()) as Arc<dyn KvStore>), &mut args);
            FakePlugin(args)
        }

        fn get(&self, key: &[u8], timeout_in_ms: i32) -> Result<Vec<u8>, (u32, String)> {
            let mut args = abi::KeyValueGetCallbackArgs {
                key: pointer(key),
                key_size: key.len(),
                timeout_in_ms,
                callback_error: &MAKE,
                user_arg: self.0.kv_get_user_arg,
                ..Struct::new()
            };
            // SAFETY: the arguments are complete; the value is copied and passed back.
            unsafe {
                if let Some(failed) = error(self.0.kv_get_callback.unwrap()(&mut args)) {
                    return Err(failed);
                }
                let value = list(args.value.cast::<u8>(), args.value_size).to_vec();
                args.value_deleter_callback.unwrap()(args.value);
                Ok(value)
            }
        }

        fn try_get(&self, key: &[u8]) -> Result<Vec<u8>, (u32, String)> {
            let mut args = abi::KeyValueTryGetCallbackArgs {
                key: pointer(key),
                key_size: key.len(),
                callback_error: &MAKE,
                user_arg: self.0.kv_try_get_user_arg,
                ..Struct::new()
            };
            // SAFETY: as above.
            unsafe {
                if let Some(failed) = error(self.0.kv_try_get_callback.unwrap()(&mut args)) {
                    return Err(failed);
                }
                let value = list(args.value.cast::<u8>(), args.value_size).to_vec();
                args.value_deleter_callback.unwrap()(args.value);
                Ok(value)
            }
        }

        fn put(&self, key: &[u8], value: &[u8]) -> Result<(), (u32, String)> {
            let mut args = abi::KeyValuePutCallbackArgs {
                key: pointer(key),
                key_size: key.len(),
                value: pointer(value),
                value_size: value.len(),
                callback_error: &MAKE,
                user_arg: self.0.kv_put_user_arg,
                ..Struct::new()
            };
            // SAFETY: as above.
            error(unsafe { self.0.kv_put_callback.unwrap()(&mut args) }).map_or(Ok(()), Err)
        }
    }

    #[test]
    fn callbacks_store_and_return_bytes() {
        let plugin = FakePlugin::new();
        let binary: Vec<u8> = (0..=255).cycle().take(70_000).collect();
        assert_eq!(plugin.put(b"local_topology/cuda/0", &binary), Ok(()));
        assert_eq!(plugin.get(b"local_topology/cuda/0", 0), Ok(binary.clone()));
        assert_eq!(plugin.try_get(b"local_topology/cuda/0"), Ok(binary));
        assert_eq!(plugin.put(b"empty", b""), Ok(()));
        assert_eq!(plugin.get(b"empty", 0), Ok(Vec::new()));
        assert_eq!(plugin.put(&[0, 255, b'\n', 0xe4], b"x"), Ok(()));
        assert_eq!(plugin.get(&[0, 255, b'\n', 0xe4], 0), Ok(b"x".to_vec()));
        assert_eq!(plugin.try_get(&[0, 255, b'\n']).unwrap_err().0, error_code::NOT_FOUND);
    }

    #[test]
    fn store_errors_map_to_pjrt_codes() {
        let plugin = FakePlugin::new();
        let (code, message) = plugin.try_get(b"nobody").unwrap_err();
        assert_eq!((code, message.as_str()), (error_code::NOT_FOUND, "key 'nobody' does not exist"));
        let started = Instant::now();
        let (code, message) = plugin.get(b"nobody", 60).unwrap_err();
        assert!(started.elapsed() >= Duration::from_millis(60));
        assert_eq!(
            (code, message.as_str()),
            (error_code::DEADLINE_EXCEEDED, "no process inserted key 'nobody' within 0.1 s")
        );
        plugin.put(b"a", b"1").unwrap();
        assert_eq!(plugin.put(b"a", b"1"), Ok(()), "putting the same value twice is allowed");
        assert_eq!(plugin.put(b"a", b"2").unwrap_err().0, error_code::ALREADY_EXISTS);
        assert_eq!(plugin.try_get(b"panic").unwrap_err().0, error_code::UNAVAILABLE);
    }

    #[test]
    fn get_waits_for_put_from_another_thread() {
        let plugin = FakePlugin::new();
        std::thread::scope(|scope| {
            let waiting: Vec<_> = (0..8).map(|_| scope.spawn(|| plugin.get(b"late", -1))).collect();
            std::thread::sleep(Duration::from_millis(30));
            plugin.put(b"late", b"here").unwrap();
            assert!(waiting.into_iter().all(|w| w.join().unwrap() == Ok(b"here".to_vec())));
        });
    }
}
