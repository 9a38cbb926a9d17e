//! Events: when something the plugin does in the background is done, and whether it went well.

use std::any::Any;
use std::ffi::c_void;

use super::abi::{self, Struct};
use super::error::Result;
use super::plugin::Plugin;
use super::raw::Raw;

/// A pending operation of a plugin.
#[derive(Debug)]
pub struct Event {
    plugin: Plugin,
    raw: Raw,
}

impl Event {
    /// Takes an event the plugin returned; null is an event that has happened.
    ///
    /// # Safety
    /// `raw` is null or an owned `PJRT_Event` of `plugin`.
    pub(super) unsafe fn from_raw(plugin: &Plugin, raw: *mut c_void) -> Event {
        Event { plugin: plugin.clone(), raw: Raw(raw) }
    }

    /// Waits for it; the error is the operation's.
    pub fn wait(&self) -> Result<()> {
        if self.raw.0.is_null() {
            return Ok(());
        }
        // SAFETY: the event lives as long as `self`.
        unsafe { self.plugin.call(abi::EventAwaitArgs { event: self.raw.0, ..Struct::new() }).map(drop) }
    }

    /// True once it has happened, well or not.
    pub fn is_ready(&self) -> Result<bool> {
        if self.raw.0.is_null() {
            return Ok(true);
        }
        // SAFETY: the event lives as long as `self`.
        let args = unsafe { self.plugin.call(abi::EventIsReadyArgs { event: self.raw.0, ..Struct::new() })? };
        Ok(args.is_ready)
    }

    /// Keeps `owner` alive until the event has happened, without waiting: this is how memory that a transfer reads in
    /// the background stays valid. If the plugin refuses the callback, waits instead.
    pub(super) fn keep_until_ready(self, owner: Box<dyn Any + Send + Sync>) -> Result<()> {
        if self.raw.0.is_null() {
            return Ok(());
        }
        let event = self.raw.0;
        let plugin = self.plugin.clone();
        let held = Box::into_raw(Box::new(Held { owner, event: self }));
        let args = abi::EventOnReadyArgs { event, callback: Some(release), user_arg: held.cast(), ..Struct::new() };
        // SAFETY: the callback and its argument fit each other and the box lives until the callback takes it.
        if let Err(error) = unsafe { plugin.call(args) } {
            // SAFETY: a refused callback is never run, so the box is still ours.
            let held = unsafe { Box::from_raw(held) };
            if held.event.wait().is_err() {
                // Nothing is known about the transfer any more: its memory must stay valid.
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
            // SAFETY: the event is ours and is not used again. A failure leaks it, which is all that can be done.
            let _ = unsafe { self.plugin.call(args) };
        }
    }
}

/// Payload of an event's callback: the memory, and the event itself, which must outlive the registration.
struct Held {
    #[allow(dead_code, reason = "held, not read")]
    owner: Box<dyn Any + Send + Sync>,
    event: Event,
}

/// Runs on a thread of the plugin when the event has happened.
unsafe extern "C" fn release(error: *mut c_void, held: *mut c_void) {
    // SAFETY: `held` is the box given with this callback, which PJRT runs once.
    let held = unsafe { Box::from_raw(held.cast::<Held>()) };
    // A failed transfer is reported by the buffer it was to fill; here only the memory is released.
    // SAFETY: the error is null or ours to free.
    let _ = unsafe { held.event.plugin.check(error, "PJRT_Event_OnReady") };
}
