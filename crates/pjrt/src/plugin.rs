//! Loading a plugin and calling it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::abi::{self, Api, Args, Struct};
use super::attributes::{self, Attributes};
use super::discover::{Kind, Platform};
use super::error::{Code, Error, Result, one_line, with_sources};

/// The oldest plugin that is accepted, which is the oldest one this crate was run against.
const OLDEST: (i32, i32) = (0, 81);

/// Remedy for a file that is no plugin, or one of another time.
const INSTALL: &str = "install one that fits with `ltx2 plugin install cpu|cuda|tpu`";

/// A loaded plugin. Clones share it; it stays mapped until the process ends.
#[derive(Clone)]
pub struct Plugin(Arc<Inner>);

struct Inner {
    path: PathBuf,
    api: Api,
}

// SAFETY: the table is immutable after loading, and PJRT's functions may be called from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Plugin({}, PJRT {}.{})", self.path().display(), self.version().0, self.version().1)
    }
}

impl Plugin {
    /// Loads the plugin file, checks its version and initialises it. A file already loaded is returned again, because
    /// a plugin must be initialised once a process.
    pub fn load(path: &Path) -> Result<Plugin> {
        Plugin::load_if(path, |_| Ok(()))
    }

    /// As [`Plugin::load`], but calls `check` before it initialises a plugin, which takes libtpu minutes on a machine without
    /// TPUs.
    ///
    /// # Errors
    /// Also that of `check`.
    pub fn load_if(path: &Path, check: impl FnOnce(&Plugin) -> Result<()>) -> Result<Plugin> {
        static LOADED: Mutex<Option<HashMap<PathBuf, Plugin>>> = Mutex::new(None);
        let load_error = |reason: String| Error::Load { plugin: path.to_owned(), reason: one_line(&reason) };
        let key = path.canonicalize().map_err(|e| load_error(with_sources(&e)))?;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        if let Some(plugin) = loaded.get(&key) {
            return Ok(plugin.clone());
        }
        // SAFETY: a PJRT plugin runs its initialisers here; the user named the file, and nothing of it is unmapped.
        let library = unsafe { libloading::Library::new(&key) }.map_err(|e| load_error(with_sources(&e)))?;
        // SAFETY: `GetPjrtApi` has this signature in every PJRT plugin.
        let table = unsafe {
            library
                .get::<unsafe extern "C" fn() -> *const Api>(b"GetPjrtApi\0")
                .map_err(|_| load_error(format!("it exports no `GetPjrtApi`, so it is not a PJRT plugin; {INSTALL}")))?(
            )
        };
        // A plugin starts threads and registers exit handlers: unmapping it would pull the code from under them.
        std::mem::forget(library);
        if table.is_null() {
            return Err(load_error("`GetPjrtApi` returned nothing".into()));
        }
        // SAFETY: the plugin's table is static and at least as long as its own `struct_size` says.
        let api = unsafe { copy_table(table) };
        check_version(path, &api)?;
        let plugin = Plugin(Arc::new(Inner { path: path.to_owned(), api }));
        check(&plugin)?;
        // SAFETY: the argument struct is complete.
        unsafe { plugin.call(abi::PluginInitializeArgs::new())? };
        loaded.insert(key, plugin.clone());
        Ok(plugin)
    }

    /// A plugin without a file and without functions, for tests of what needs none.
    #[cfg(test)]
    pub(super) fn in_memory(path: &str) -> Plugin {
        Plugin(Arc::new(Inner { path: path.into(), api: Api::new() }))
    }

    /// The file, as it was named when loaded first.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The plugin's PJRT version, major and minor.
    pub fn version(&self) -> (i32, i32) {
        (self.0.api.version.major_version, self.0.api.version.minor_version)
    }

    /// Whether the plugin drives TPUs; known before it is initialised.
    pub fn is_for_tpus(&self) -> bool {
        const TPU_TOPOLOGY: u32 = 16;
        self.has_extension(TPU_TOPOLOGY)
    }

    /// What the plugin drives, by its extensions and attributes; `None`: neither a TPU nor a GPU.
    pub fn kind(&self) -> Option<Kind> {
        const GPU_CUSTOM_CALL: u32 = 0;
        if self.is_for_tpus() {
            return Some(Kind::Supported(Platform::Tpu));
        }
        if !self.has_extension(GPU_CUSTOM_CALL) {
            return None;
        }
        let is_rocm = self.attributes().is_ok_and(|stated| stated.contains_key("rocm_version"));
        Some(if is_rocm { Kind::Unsupported("rocm") } else { Kind::Supported(Platform::Cuda) })
    }

    /// The attributes the plugin states about itself, such as `stablehlo_current_version`.
    pub fn attributes(&self) -> Result<Attributes> {
        // SAFETY: the argument struct is complete; the list the plugin returns is static.
        unsafe {
            let args = self.call(abi::PluginAttributesArgs::new())?;
            Ok(attributes::read(args.attributes, args.num_attributes))
        }
    }

    /// The table, with null in the slots the plugin does not have.
    pub(super) fn api(&self) -> &Api {
        &self.0.api
    }

    /// Makes a call; returns its struct with the results.
    ///
    /// # Safety
    /// Every pointer in `args` must be null where PJRT allows null, or point to what PJRT expects there, for as long
    /// as PJRT says.
    pub(super) unsafe fn call<A: Args>(&self, mut args: A) -> Result<A> {
        let Some(function) = A::slot(self.api()) else {
            return Err(Error::Unsupported { plugin: self.0.path.clone(), call: A::NAME, has: self.version() });
        };
        // SAFETY: the slot takes this struct; its content is the caller's promise.
        let error = unsafe { function(&mut args) };
        // SAFETY: what a call returns is null or an error that now belongs to us.
        unsafe { self.check(error, A::NAME)? };
        Ok(args)
    }

    /// Frees what is not used again; an error is logged.
    ///
    /// # Safety
    /// As for [`Plugin::call`].
    pub(super) unsafe fn destroy<A: Args>(&self, args: A) {
        // SAFETY: the caller's promise.
        if let Err(error) = unsafe { self.call(args) } {
            tracing::warn!("{error}");
        }
    }

    /// Turns a returned error into ours and frees it.
    ///
    /// # Safety
    /// `error` is null or an owned `PJRT_Error` of this plugin.
    pub(super) unsafe fn check(&self, error: *mut c_void, call: &'static str) -> Result<()> {
        if error.is_null() {
            return Ok(());
        }
        let mut message = abi::ErrorMessageArgs { error, ..Struct::new() };
        let mut code = abi::ErrorGetCodeArgs { error, ..Struct::new() };
        let mut destroy = abi::ErrorDestroyArgs { error, ..Struct::new() };
        // SAFETY: `error` is a live error of this plugin until it is destroyed below; the message is copied before.
        let text = unsafe {
            if let Some(function) = self.api().error_message {
                function(&mut message);
            }
            if let Some(function) = self.api().error_get_code {
                // An error while asking for the code of an error is not followed further.
                let _ = function(&mut code);
            }
            let text = attributes::text(message.message, message.message_size);
            if let Some(function) = self.api().error_destroy {
                function(&mut destroy);
            }
            text
        };
        Err(Error::Call { plugin: self.0.path.clone(), call, code: Code(code.code), message: one_line(&text) })
    }

    /// An error about an argument that is not worth a call.
    pub(super) fn refuse<A: Args>(&self, reason: impl Into<String>) -> Error {
        Error::Argument { plugin: self.0.path.clone(), call: A::NAME, reason: reason.into() }
    }
}

/// Copies as much of a plugin's table as the plugin has; slots it lacks are null.
///
/// # Safety
/// `table` points to a `PJRT_Api` with `struct_size` readable bytes.
unsafe fn copy_table(table: *const Api) -> Api {
    let mut api = Api::new();
    // SAFETY: `struct_size` bytes are readable by the caller's promise, and no more than ours are written.
    unsafe {
        let size = (&raw const (*table).struct_size).read().min(size_of::<Api>());
        std::ptr::copy_nonoverlapping(table.cast::<u8>(), (&raw mut api).cast::<u8>(), size);
    }
    api
}

/// Refuses a plugin that is older than [`OLDEST`], of another major version, or without the calls of every use.
fn check_version(path: &Path, api: &Api) -> Result<()> {
    let has = (api.version.major_version, api.version.minor_version);
    let need = format!("{}.{} or newer (built for {}.{})", OLDEST.0, OLDEST.1, abi::VERSION.0, abi::VERSION.1);
    if has.0 > abi::VERSION.0 {
        let (theirs, ours) = (format!("{}.{}", has.0, has.1), format!("{}.{}", abi::VERSION.0, abi::VERSION.1));
        let reason = format!("it speaks PJRT {theirs}; this program speaks {ours}; {INSTALL}");
        return Err(Error::Load { plugin: path.to_owned(), reason });
    }
    let complete = api.executable_get_compiled_memory_stats.is_some() && api.loaded_executable_execute.is_some();
    if has < OLDEST || !complete {
        return Err(Error::TooOld { plugin: path.to_owned(), has, need });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(minor: i32, struct_size: usize) -> Api {
        let mut api = Api::new();
        api.struct_size = struct_size;
        api.version.minor_version = minor;
        api
    }

    #[test]
    fn old_plugin_is_refused_with_both_versions() {
        let error = check_version(Path::new("/x/old.so"), &table(54, 800)).unwrap_err().to_string();
        assert_eq!(
            error,
            "/x/old.so: the plugin is too old: it has PJRT 0.54 and 0.81 or newer (built for 0.114) is needed; \
             install a newer one with `ltx2 plugin install cpu|cuda|tpu`"
        );
    }

    #[test]
    fn other_major_version_is_refused() {
        let mut api = table(0, 1144);
        api.version.major_version = 1;
        let error = check_version(Path::new("new.so"), &api).unwrap_err().to_string();
        assert_eq!(
            error,
            "new.so: cannot load the plugin: it speaks PJRT 1.0; this program speaks 0.114; install one that fits with \
             `ltx2 plugin install cpu|cuda|tpu`"
        );
    }

    #[test]
    fn slots_past_the_plugins_size_are_empty() {
        unsafe extern "C" fn slot(_: *mut abi::ClientCreateArgs) -> *mut c_void {
            std::ptr::null_mut()
        }
        unsafe extern "C" fn late() {}
        let mut api = table(100, std::mem::offset_of!(Api, skipped_before_the_end));
        api.client_create = Some(slot);
        api.skipped_before_the_end.fill(Some(late));
        // SAFETY: the whole table is readable.
        let copy = unsafe { copy_table(&api) };
        assert!(copy.client_create.is_some());
        assert!(copy.skipped_before_the_end.iter().all(Option::is_none), "a slot beyond struct_size must not be read");
    }
}
