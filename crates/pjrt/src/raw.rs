//! Pointers to plugin objects.

use std::ffi::c_void;

/// Pointer to a client, topology, device, executable, buffer, event or transfer manager of a plugin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Raw(pub *mut c_void);

// SAFETY: PJRT objects may be used from any thread. If one thread deletes a buffer that another uses, the plugin
// synchronizes the two.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}
