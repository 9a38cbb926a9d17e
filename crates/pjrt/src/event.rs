//! Events: completion and status of asynchronous operations.

use std::any::Any;
use std::ffi::c_void;

use super::abi::{self, Struct};
use super::error::Result;
use super::plugin::Plugin;
use super::raw::Raw;

/// The completion event of an asynchronous plugin operation.
#[derive(Debug)]
pub struct Event {
    plugin: Plugin,
    raw: Raw,
}

impl Event {
    /// Takes ownership of an event. A null pointer gives an event that has already fired.
    ///
    /// # Safety
    /// `raw` is null or an owned `PJRT_Event` of `plugin`.
    pub(super) unsafe fn from_raw(plugin: &Plugin, raw: *mut c_void) -> Event {
        Event { plugin: plugin.clone(), raw: Raw(raw) }
    }

    /// Waits until the event fires and returns the error of the operation, if any.
    pub fn wait(&self) -> Result<()> {
        if self.raw.0.is_null() {
            return Ok(());
        }
        // SAFETY: the event is alive as long as `self`.
        unsafe { self.plugin.call(abi::EventAwaitArgs { event: self.raw.0, ..Struct::new() }).map(drop) }
    }

    /// Returns whether the operation has finished, successfully or not.
    pub fn is_ready(&self) -> Result<bool> {
        if self.raw.0.is_null() {
            return Ok(true);
        }
        // SAFETY: the event is alive as long as `self`.
        let args = unsafe { self.plugin.call(abi::EventIsReadyArgs { event: self.raw.0, ..Struct::new() })? };
        Ok(args.is_ready)
    }

    /// Keeps `owner` alive until the event fires, so that the memory that a background transfer reads stays valid. Does
    /// not wait, unless the plugin rejects the callback.
    pub(super) fn keep_until_ready(self, owner: Box<dyn Any + Send + Sync>) -> Result<()> {
        if self.raw.0.is_null() {
            return Ok(());
        }
        let event = self.raw.0;
        let plugin = self.plugin.clone();
        let held = Box::into_raw(Box::new(HeldOwner { owner, event: self }));
        let args = abi::EventOnReadyArgs { event, callback: Some(release), user_arg: held.cast(), ..Struct::new() };
        // SAFETY: the callback expects this argument type; the box lives until the callback takes it.
        if let Err(error) = unsafe { plugin.call(args) } {
            // SAFETY: a rejected callback never runs, so we still own the box.
            let held = unsafe { Box::from_raw(held) };
            if held.event.wait().is_err() {
                // The state of the transfer is unknown: leak the memory so that it stays valid.
                std::mem::forget(held);
            }
            return Err(error);
        }
        Ok(())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.raw.0.is_null() {
            let args = abi::EventDestroyArgs { event: self.raw.0, ..Struct::new() };
            // SAFETY: we own the event and do not use it again. If destroying it fails, the event leaks.
            let _ = unsafe { self.plugin.call(args) };
        }
    }
}

/// User data of the callback: the owner of the memory, and the event, which must stay alive until the callback has run.
struct HeldOwner {
    #[allow(dead_code, reason = "held, not read")]
    owner: Box<dyn Any + Send + Sync>,
    event: Event,
}

/// Frees the event and the owner of the memory. The plugin calls this function on one of its threads when the event has
/// fired.
unsafe extern "C" fn release(error: *mut c_void, held: *mut c_void) {
    // SAFETY: `held` is the box that was registered with this callback, which PJRT runs once.
    let held = unsafe { Box::from_raw(held.cast::<HeldOwner>()) };
    // The destination buffer reports a failed transfer; this call only frees the error.
    // SAFETY: the error is null or owned by us.
    let _ = unsafe { held.event.plugin.check(error, "PJRT_Event_OnReady") };
}
