//! Pointers to the objects of a plugin.

use std::ffi::c_void;

/// A client, a topology, a device, an executable, an array, an event or a transfer of a plugin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Raw(pub *mut c_void);

// SAFETY: PJRT's objects may be used from any thread; deleting an array while it is in use is the plugin's to order.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}
