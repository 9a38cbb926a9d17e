//! The profiler extension of some plugins. It records device activity between start and stop and returns it as a
//! serialized `XSpace`.
//!
//! The extension (`PJRT_Profiler_Extension`, type 1) is a node of the linked list to which the function table points.
//! It has its own function table and error type (`PLUGIN_Profiler_Api`).

use std::ffi::c_void;
use std::fmt;
use std::ptr;

use self::abi::{
    CODE_ARGS_SIZE, CodeArgs, CollectArgs, CreateArgs, ErrorArgs, Functions, MessageArgs, ProfilerArgs,
    ProfilerFunction, extension_types, find,
};
use super::attributes::{list, text};
use super::error::{Code, PjrtError, Result, one_line};
use super::plugin::Plugin;

mod abi;

/// Options of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfileOptions {
    /// Host trace level: 0 traces nothing, 1 expensive events, 2 also launches, 3 everything.
    pub host_level: u32,
    /// Whether the trace includes the HLO of the programs that ran.
    pub programs: bool,
}

impl Default for ProfileOptions {
    /// Traces device events and includes programs, but no host events, which would fill most of the file.
    fn default() -> Self {
        ProfileOptions { host_level: 0, programs: true }
    }
}

impl ProfileOptions {
    /// Serializes the options as `tensorflow.ProfileOptions`. All fields used here are small integers.
    fn encode(self) -> Vec<u8> {
        const VERSION: u8 = 5;
        const HOST_LEVEL: u8 = 2;
        const DEVICE_LEVEL: u8 = 3;
        const PROGRAMS: u8 = 7;
        const FAIL_AT_START: u8 = 13;
        let fields = [
            // From version 1 on, a 0 in another field means 0 instead of the default.
            (VERSION, 1),
            (HOST_LEVEL, self.host_level.min(3) as u8),
            (DEVICE_LEVEL, 1),
            (PROGRAMS, self.programs.into()),
            (FAIL_AT_START, 1),
        ];
        fields.iter().flat_map(|(field, value)| [field << 3, *value]).collect()
    }
}

/// A running trace. Dropping it stops the trace.
pub struct Profiler {
    plugin: Plugin,
    functions: Functions,
    profiler: *mut c_void,
    running: bool,
}

// SAFETY: the plugin's profiler is not bound to a thread; methods take `self` or `&mut self`, which prevents concurrent
// calls.
unsafe impl Send for Profiler {}

impl fmt::Debug for Profiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Profiler({:?})", self.plugin)
    }
}

impl Plugin {
    /// Returns whether the plugin has an extension of this `PJRT_Extension_Type`.
    pub(super) fn has_extension(&self, kind: u32) -> bool {
        // SAFETY: a plugin's list of extensions is static.
        unsafe { extension_types(self.api().extension_start.cast()) }.contains(&kind)
    }

    /// Returns whether the plugin can trace its devices.
    pub fn has_profiler(&self) -> bool {
        // SAFETY: a plugin's list of extensions is static.
        unsafe { find(self.api().extension_start.cast()) }.is_some()
    }
}

impl Profiler {
    /// Starts a trace.
    ///
    /// # Errors
    /// Returns an error if the plugin has no profiler or cannot start it, for example because another profiler uses the
    /// device.
    pub fn start(plugin: &Plugin, options: ProfileOptions) -> Result<Profiler> {
        // SAFETY: a plugin's list of extensions is static.
        let functions = unsafe { find(plugin.api().extension_start.cast()) };
        let functions = functions.ok_or_else(|| PjrtError::NoProfiler { plugin: plugin.path().to_owned() })?;
        Profiler::with(plugin, functions, options)
    }

    fn with(plugin: &Plugin, functions: Functions, options: ProfileOptions) -> Result<Profiler> {
        let options = options.encode();
        let mut profiler = Profiler { plugin: plugin.clone(), functions, profiler: ptr::null_mut(), running: false };
        let mut create = CreateArgs {
            struct_size: size_of::<CreateArgs>(),
            options: options.as_ptr(),
            options_size: options.len(),
            profiler: ptr::null_mut(),
        };
        profiler.call("PLUGIN_Profiler_Create", functions.create, &mut create)?;
        profiler.profiler = create.profiler;
        profiler.call("PLUGIN_Profiler_Start", functions.start, &mut profiler.arguments())?;
        profiler.running = true;
        Ok(profiler)
    }

    /// Stops the trace and returns its serialized `XSpace`.
    ///
    /// # Errors
    /// Returns an error if the plugin cannot stop or collect the trace.
    pub fn stop(mut self) -> Result<Vec<u8>> {
        self.running = false;
        self.call("PLUGIN_Profiler_Stop", self.functions.stop, &mut self.arguments())?;
        let mut collect = CollectArgs {
            struct_size: size_of::<CollectArgs>(),
            profiler: self.profiler,
            buffer: ptr::null(),
            buffer_size: 0,
        };
        self.call("PLUGIN_Profiler_CollectData", self.functions.collect, &mut collect)?;
        let mut own = Vec::new();
        if collect.buffer.is_null() && collect.buffer_size > 0 {
            // The plugin has not allocated memory for the data, so it fills our buffer.
            own = vec![0; collect.buffer_size];
            // `buffer` is declared as a const pointer, but the plugin writes through it.
            collect.buffer = own.as_mut_ptr();
            self.call("PLUGIN_Profiler_CollectData", self.functions.collect, &mut collect)?;
        }
        if !own.is_empty() {
            own.truncate(collect.buffer_size);
            return Ok(own);
        }
        // SAFETY: the plugin's data is alive until the profiler is destroyed, which happens when `self` is dropped.
        let mut bytes = unsafe { list(collect.buffer, collect.buffer_size) }.to_vec();
        // XLA appends a terminating 0 that is not part of the message.
        if bytes.last() == Some(&0) && ends_in_extra_zero(&bytes) {
            bytes.pop();
        }
        Ok(bytes)
    }

    fn arguments(&self) -> ProfilerArgs {
        ProfilerArgs { struct_size: size_of::<ProfilerArgs>(), profiler: self.profiler }
    }

    /// Calls a profiler function; `args` must be complete.
    fn call<A>(&self, name: &'static str, function: ProfilerFunction<A>, args: &mut A) -> Result<()> {
        let Some(function) = function else {
            return Err(PjrtError::NoProfiler { plugin: self.plugin.path().to_owned() });
        };
        // SAFETY: the function expects this struct; callers make sure that every pointer in it is null or valid.
        let error = unsafe { function(args) };
        if error.is_null() {
            return Ok(());
        }
        let private = ptr::null_mut();
        let mut message = MessageArgs {
            struct_size: size_of::<MessageArgs>(),
            private,
            error,
            message: ptr::null(),
            message_size: 0,
        };
        let mut code = CodeArgs { struct_size: CODE_ARGS_SIZE, private, error, code: 2 };
        let mut destroy = ErrorArgs { struct_size: size_of::<ErrorArgs>(), private, error };
        // SAFETY: `error` is alive until it is destroyed below; the message is copied before that.
        let message = unsafe {
            if let Some(function) = self.functions.error_message {
                function(&mut message);
            }
            if let Some(function) = self.functions.error_code {
                // If this fails, the error code keeps its default.
                let _ = function(&mut code);
            }
            let message = text(message.message, message.message_size);
            if let Some(function) = self.functions.error_destroy {
                function(&mut destroy);
            }
            message
        };
        let (plugin, message) = (self.plugin.path().to_owned(), one_line(&message));
        Err(PjrtError::Call { plugin, call: name, code: Code(code.code), message })
    }
}

/// Returns whether `bytes` is a message of length-delimited fields, followed by one extra 0 byte.
fn ends_in_extra_zero(bytes: &[u8]) -> bool {
    let mut at = 0;
    while at < bytes.len() {
        // The fields of an `XSpace` are messages and strings with one-byte tags.
        let (mut length, mut shift, mut next) = (0usize, 0, at + 1);
        while let Some(byte) = bytes.get(next) {
            length |= usize::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            (shift, next) = (shift + 7, next + 1);
            if byte & 0x80 == 0 {
                break;
            }
        }
        if bytes[at] == 0 {
            return at + 1 == bytes.len();
        }
        at = next.saturating_add(length);
    }
    false
}

impl Drop for Profiler {
    fn drop(&mut self) {
        // Errors cannot be reported from `drop`.
        if self.running {
            let _ = self.call("PLUGIN_Profiler_Stop", self.functions.stop, &mut self.arguments());
        }
        if !self.profiler.is_null() && self.functions.destroy.is_some() {
            let _ = self.call("PLUGIN_Profiler_Destroy", self.functions.destroy, &mut self.arguments());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::abi::{PROFILER, PluginExtension, ProfilerExtension};
    use super::*;

    /// Calls that the fake plugin received, in order.
    static ASKED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    /// Lock that prevents the tests, which share `ASKED`, from running at the same time.
    static ALONE: Mutex<()> = Mutex::new(());
    /// An `XSpace` with one empty plane, a warning "a" and the terminating 0 that XLA appends.
    static TRACE: [u8; 6] = [0x0a, 0, 0x1a, 1, b'a', 0];
    static MESSAGE: &str = "CUPTI is taken\nby another";

    fn note(text: impl Into<String>) {
        ASKED.lock().unwrap().push(text.into());
    }

    fn handle() -> *mut c_void {
        ptr::without_provenance_mut(0x70)
    }

    unsafe extern "C" fn create(args: *mut CreateArgs) -> *mut c_void {
        // SAFETY: called with complete arguments.
        let args = unsafe { &mut *args };
        // SAFETY: as above.
        let options = unsafe { list(args.options, args.options_size) };
        note(format!("create {} {options:?}", args.struct_size));
        args.profiler = handle();
        ptr::null_mut()
    }

    unsafe extern "C" fn start(args: *mut ProfilerArgs) -> *mut c_void {
        // SAFETY: called with complete arguments.
        note(format!("start {}", unsafe { (*args).profiler == handle() }));
        ptr::null_mut()
    }

    unsafe extern "C" fn refuse(_: *mut ProfilerArgs) -> *mut c_void {
        ptr::without_provenance_mut(0x80)
    }

    unsafe extern "C" fn stop(_: *mut ProfilerArgs) -> *mut c_void {
        note("stop");
        ptr::null_mut()
    }

    unsafe extern "C" fn destroy(_: *mut ProfilerArgs) -> *mut c_void {
        note("destroy");
        ptr::null_mut()
    }

    unsafe extern "C" fn collect(args: *mut CollectArgs) -> *mut c_void {
        // SAFETY: called with complete arguments.
        unsafe {
            (*args).buffer = TRACE.as_ptr();
            (*args).buffer_size = TRACE.len();
        }
        ptr::null_mut()
    }

    /// Returns the size on the first call and fills the buffer on the second.
    unsafe extern "C" fn collect_into(args: *mut CollectArgs) -> *mut c_void {
        // SAFETY: called with complete arguments; the buffer has the size returned by the first call.
        unsafe {
            if !(*args).buffer.is_null() {
                ptr::copy_nonoverlapping(TRACE.as_ptr(), (*args).buffer.cast_mut(), (*args).buffer_size);
            }
            (*args).buffer_size = TRACE.len() - 1;
        }
        ptr::null_mut()
    }

    unsafe extern "C" fn error_message(args: *mut MessageArgs) {
        // SAFETY: called with complete arguments.
        unsafe {
            (*args).message = MESSAGE.as_ptr().cast();
            (*args).message_size = MESSAGE.len();
        }
    }

    unsafe extern "C" fn error_code(args: *mut CodeArgs) -> *mut c_void {
        // SAFETY: called with complete arguments.
        unsafe { (*args).code = 9 };
        ptr::null_mut()
    }

    unsafe extern "C" fn error_destroy(args: *mut ErrorArgs) {
        // SAFETY: called with complete arguments.
        note(format!("error gone {}", unsafe { (*args).error.addr() }));
    }

    fn functions() -> Functions {
        Functions {
            struct_size: size_of::<Functions>(),
            private: ptr::null_mut(),
            error_destroy: Some(error_destroy),
            error_message: Some(error_message),
            error_code: Some(error_code),
            create: Some(create),
            destroy: Some(destroy),
            start: Some(start),
            stop: Some(stop),
            collect: Some(collect),
        }
    }

    fn asked() -> Vec<String> {
        std::mem::take(&mut *ASKED.lock().unwrap())
    }

    fn plugin() -> Plugin {
        Plugin::in_memory("fake.so")
    }

    #[test]
    fn profiler_is_found_in_the_extension_list() {
        let table = functions();
        let profiler = ProfilerExtension {
            base: PluginExtension { struct_size: size_of::<ProfilerExtension>(), kind: PROFILER, next: ptr::null() },
            functions: &raw const table,
        };
        let first = PluginExtension { struct_size: 24, kind: 4, next: &raw const profiler.base };
        // SAFETY: the nodes are alive.
        unsafe {
            assert!(find(&raw const first).is_some());
            assert!(find(ptr::null()).is_none());
            let alone = PluginExtension { struct_size: 24, kind: 4, next: ptr::null() };
            assert!(find(&raw const alone).is_none());
        }
        let short = Functions { struct_size: 72, ..functions() };
        let older = ProfilerExtension { functions: &raw const short, ..profiler };
        // SAFETY: the node is alive.
        assert!(unsafe { find(&raw const older.base) }.is_none(), "a table that lacks the last function is rejected");
    }

    #[test]
    fn profiler_calls_are_in_order_and_trailing_zero_is_dropped() {
        let _alone = ALONE.lock();
        asked();
        let profiler = Profiler::with(&plugin(), functions(), ProfileOptions::default()).unwrap();
        assert_eq!(profiler.stop().unwrap(), TRACE[..5]);
        // Version 1, host level 0, device level 1, programs included, fail if tracing cannot start.
        let create = "create 32 [40, 1, 16, 0, 24, 1, 56, 1, 104, 1]";
        assert_eq!(asked(), [create, "start true", "stop", "destroy"]);
        let filling = Functions { collect: Some(collect_into), ..functions() };
        let profiler = Profiler::with(&plugin(), filling, ProfileOptions::default()).unwrap();
        assert_eq!(profiler.stop().unwrap(), TRACE[..5]);
        asked();
        drop(Profiler::with(&plugin(), functions(), ProfileOptions::default()).unwrap());
        assert_eq!(asked()[2..], ["stop", "destroy"], "dropping a running profiler stops it");
    }

    #[test]
    fn profiler_error_is_one_line_and_freed() {
        let _alone = ALONE.lock();
        asked();
        let refusing = Functions { start: Some(refuse), ..functions() };
        let error = Profiler::with(&plugin(), refusing, ProfileOptions::default()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "fake.so: PLUGIN_Profiler_Start failed (FAILED_PRECONDITION): CUPTI is taken | by another"
        );
        assert_eq!(asked()[1..], ["error gone 128", "destroy"]);
    }

    #[test]
    fn plugin_without_profiler_is_an_error() {
        assert!(!plugin().has_profiler());
        let error = Profiler::start(&plugin(), ProfileOptions::default()).unwrap_err().to_string();
        assert_eq!(
            error,
            "fake.so: this plugin has no profiler (PJRT_Profiler_Extension); use --platform cuda or \
             tpu"
        );
    }

    #[test]
    fn zero_inside_the_last_field_is_kept() {
        assert!(ends_in_extra_zero(&[0x0a, 1, 7, 0]));
        assert!(!ends_in_extra_zero(&[0x0a, 2, 7, 0]));
        assert!(!ends_in_extra_zero(&[0x0a, 0x80, 0x01, 0]), "a truncated field");
        assert!(!ends_in_extra_zero(&[]));
    }
}
