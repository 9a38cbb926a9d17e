//! C interface of the profiler: its extension node and its function table.

use std::ffi::c_void;

/// `PJRT_Extension_Type` of the profiler.
pub(super) const PROFILER: u32 = 1;

/// A node of the plugin's list of extensions.
#[repr(C)]
pub(super) struct PluginExtension {
    pub struct_size: usize,
    pub kind: u32,
    pub next: *const PluginExtension,
}

/// The extension node of the profiler.
#[repr(C)]
pub(super) struct ProfilerExtension {
    pub base: PluginExtension,
    pub functions: *const Functions,
}

/// A profiler function: takes its argument struct, returns an error or null.
pub(super) type ProfilerFunction<A> = Option<unsafe extern "C" fn(*mut A) -> *mut c_void>;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Functions {
    pub struct_size: usize,
    pub private: *mut c_void,
    pub error_destroy: Option<unsafe extern "C" fn(*mut ErrorArgs)>,
    pub error_message: Option<unsafe extern "C" fn(*mut MessageArgs)>,
    pub error_code: ProfilerFunction<CodeArgs>,
    pub create: ProfilerFunction<CreateArgs>,
    pub destroy: ProfilerFunction<ProfilerArgs>,
    pub start: ProfilerFunction<ProfilerArgs>,
    pub stop: ProfilerFunction<ProfilerArgs>,
    pub collect: ProfilerFunction<CollectArgs>,
}

#[repr(C)]
pub(super) struct ErrorArgs {
    pub struct_size: usize,
    pub private: *mut c_void,
    pub error: *mut c_void,
}

#[repr(C)]
pub(super) struct MessageArgs {
    pub struct_size: usize,
    pub private: *mut c_void,
    pub error: *mut c_void,
    pub message: *const c_void,
    pub message_size: usize,
}

#[repr(C)]
pub(super) struct CodeArgs {
    pub struct_size: usize,
    pub private: *mut c_void,
    pub error: *mut c_void,
    pub code: u32,
}

#[repr(C)]
pub(super) struct CreateArgs {
    pub struct_size: usize,
    pub options: *const u8,
    pub options_size: usize,
    pub profiler: *mut c_void,
}

/// Argument struct of the profiler's start, stop and destroy functions.
#[repr(C)]
pub(super) struct ProfilerArgs {
    pub struct_size: usize,
    pub profiler: *mut c_void,
}

#[repr(C)]
pub(super) struct CollectArgs {
    pub struct_size: usize,
    pub profiler: *mut c_void,
    pub buffer: *const u8,
    pub buffer_size: usize,
}

// In the public header, `struct_size` excludes the padding after a trailing `int`.
pub(super) const CODE_ARGS_SIZE: usize = std::mem::offset_of!(CodeArgs, code) + size_of::<u32>();
const _: () = assert!(size_of::<Functions>() == 80 && size_of::<PluginExtension>() == 24 && CODE_ARGS_SIZE == 28);

/// Returns the types of a plugin's extensions.
///
/// # Safety
/// As for [`find`].
pub(super) unsafe fn extension_types(mut node: *const PluginExtension) -> Vec<u32> {
    let mut types = Vec::new();
    // SAFETY: guaranteed by the caller.
    while let Some(extension) = unsafe { node.as_ref() } {
        types.push(extension.kind);
        node = extension.next;
    }
    types
}

/// Returns the profiler's functions; `None` if the plugin does not have the extension or if it does not have a required
/// function.
///
/// # Safety
/// `node` is null or the first node of a list of extensions that is never freed.
pub(super) unsafe fn find(mut node: *const PluginExtension) -> Option<Functions> {
    // SAFETY: guaranteed by the caller; nodes are not read beyond their `struct_size`.
    unsafe {
        while let Some(extension) = node.as_ref() {
            if extension.kind == PROFILER && extension.struct_size >= size_of::<ProfilerExtension>() {
                let functions = (*node.cast::<ProfilerExtension>()).functions;
                let size = functions.cast::<usize>().as_ref()?;
                let complete =
                    |f: &Functions| f.create.is_some() && f.start.is_some() && f.stop.is_some() && f.collect.is_some();
                return if *size >= size_of::<Functions>() { Some(*functions).filter(complete) } else { None };
            }
            node = extension.next;
        }
    }
    None
}
