//! Loads plugins and calls their functions.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::abi::{self, Api, ArgumentStruct, Struct};
use super::attributes::{self, Attributes};
use super::discover::{Kind, Platform};
use super::error::{Code, PjrtError, Result, one_line, with_sources};

/// The oldest PJRT version that this crate accepts, which is also the oldest one tested.
const OLDEST: (i32, i32) = (0, 81);

/// A loaded plugin. Clones share the same plugin. A plugin is never unloaded.
#[derive(Clone)]
pub struct Plugin(Arc<PluginInner>);

struct PluginInner {
    path: PathBuf,
    api: Api,
}

// SAFETY: the table is immutable after loading, and PJRT's functions may be called from any thread.
unsafe impl Send for PluginInner {}
// SAFETY: as above.
unsafe impl Sync for PluginInner {}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Plugin({}, PJRT {}.{})", self.path().display(), self.version().0, self.version().1)
    }
}

impl Plugin {
    /// Loads a plugin, checks its version and initializes it. If the file was already loaded, returns the same plugin,
    /// because a plugin may be initialized only once per process.
    pub fn load(path: &Path) -> Result<Plugin> {
        Plugin::load_if(path, |_| Ok(()))
    }

    /// Loads a plugin like [`Plugin::load`], but calls `check` before initializing it: initializing libtpu takes
    /// minutes on a machine without TPUs.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Plugin::load`], or with the error of `check`.
    pub fn load_if(path: &Path, check: impl FnOnce(&Plugin) -> Result<()>) -> Result<Plugin> {
        static LOADED: Mutex<Option<HashMap<PathBuf, Plugin>>> = Mutex::new(None);
        let load_error = |reason: String| PjrtError::Load { plugin: path.to_owned(), reason: one_line(&reason) };
        let key = path.canonicalize().map_err(|e| load_error(with_sources(&e)))?;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        if let Some(plugin) = loaded.get(&key) {
            return Ok(plugin.clone());
        }
        // SAFETY: loading runs the plugin's initializers, which is what the caller requested; the library is never
        // unmapped.
        let library = unsafe { libloading::Library::new(&key) }.map_err(|e| load_error(with_sources(&e)))?;
        // SAFETY: `GetPjrtApi` has this signature in every PJRT plugin.
        let table = unsafe {
            library.get::<unsafe extern "C" fn() -> *const Api>(b"GetPjrtApi\0").map_err(|_| {
                load_error(format!(
                    "the file does not export `GetPjrtApi`, so it is not a PJRT plugin; {}",
                    compatible()
                ))
            })?()
        };
        // A plugin starts threads and registers exit handlers, so its code must stay mapped.
        std::mem::forget(library);
        if table.is_null() {
            return Err(load_error("`GetPjrtApi` returned null".into()));
        }
        // SAFETY: the plugin's table is static and has at least `struct_size` bytes.
        let api = unsafe { copy_table(table) };
        check_version(path, &api)?;
        let plugin = Plugin(Arc::new(PluginInner { path: path.to_owned(), api }));
        check(&plugin)?;
        // SAFETY: the argument struct is complete.
        unsafe { plugin.call(abi::PluginInitializeArgs::new())? };
        loaded.insert(key, plugin.clone());
        Ok(plugin)
    }

    /// Returns a plugin without a file and without functions, for tests.
    #[cfg(test)]
    pub(super) fn in_memory(path: &str) -> Plugin {
        Plugin(Arc::new(PluginInner { path: path.into(), api: Api::new() }))
    }

    /// Returns the path of the plugin file, as passed when it was first loaded.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the major and minor PJRT version of the plugin.
    pub fn version(&self) -> (i32, i32) {
        (self.0.api.version.major_version, self.0.api.version.minor_version)
    }

    /// Returns whether the plugin is for TPUs. The plugin need not be initialized.
    pub fn is_for_tpus(&self) -> bool {
        const TPU_TOPOLOGY: u32 = 16;
        self.has_extension(TPU_TOPOLOGY)
    }

    /// Returns the platform of the plugin, determined from its extensions and attributes, and for a GPU plugin without
    /// such an attribute from its path. `None`: unknown, or neither TPU nor GPU.
    pub fn kind(&self) -> Option<Kind> {
        const GPU_CUSTOM_CALL: u32 = 0;
        if self.is_for_tpus() {
            return Some(Kind::Supported(Platform::Tpu));
        }
        if !self.has_extension(GPU_CUSTOM_CALL) {
            return None;
        }
        // Without attributes, the path decides.
        let stated = self.attributes().unwrap_or_else(|_| Attributes::new());
        gpu_kind(&stated, self.path())
    }

    /// Returns the plugin's attributes, such as `stablehlo_current_version`.
    pub fn attributes(&self) -> Result<Attributes> {
        // SAFETY: the argument struct is complete; the returned list is static.
        unsafe {
            let args = self.call(abi::PluginAttributesArgs::new())?;
            Ok(attributes::read(args.attributes, args.num_attributes))
        }
    }

    /// Returns the function table. Functions that the plugin does not have are null.
    pub(super) fn api(&self) -> &Api {
        &self.0.api
    }

    /// Calls the plugin and returns the argument struct, which then contains the results.
    ///
    /// # Safety
    /// Every pointer in `args` is null where PJRT allows null, or points to what PJRT expects there and stays valid for
    /// as long as PJRT requires.
    pub(super) unsafe fn call<A: ArgumentStruct>(&self, mut args: A) -> Result<A> {
        let Some(function) = A::slot(self.api()) else {
            return Err(PjrtError::Unsupported { plugin: self.0.path.clone(), call: A::NAME, has: self.version() });
        };
        // SAFETY: the slot expects this struct; its contents are guaranteed by the caller.
        let error = unsafe { function(&mut args) };
        // SAFETY: a call returns null or an error that we now own.
        unsafe { self.check(error, A::NAME)? };
        Ok(args)
    }

    /// Calls a destroy function. Logs an error instead of returning it.
    ///
    /// # Safety
    /// As for [`Plugin::call`].
    pub(super) unsafe fn destroy<A: ArgumentStruct>(&self, args: A) {
        // SAFETY: guaranteed by the caller.
        if let Err(error) = unsafe { self.call(args) } {
            tracing::warn!("{error}");
        }
    }

    /// Converts a `PJRT_Error` to a [`PjrtError`] and frees it. Null is success.
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
        // SAFETY: `error` is alive until it is destroyed below; the message is copied before that.
        let text = unsafe {
            if let Some(function) = self.api().error_message {
                function(&mut message);
            }
            if let Some(function) = self.api().error_get_code {
                // If this fails, the error code keeps its default.
                let _ = function(&mut code);
            }
            let text = attributes::text(message.message, message.message_size);
            if let Some(function) = self.api().error_destroy {
                function(&mut destroy);
            }
            text
        };
        Err(PjrtError::Call { plugin: self.0.path.clone(), call, code: Code(code.code), message: one_line(&text) })
    }

    /// Returns the error for an argument that this crate rejects before it calls the plugin.
    pub(super) fn refuse<A: ArgumentStruct>(&self, reason: impl Into<String>) -> PjrtError {
        PjrtError::Argument { plugin: self.0.path.clone(), call: A::NAME, reason: reason.into() }
    }
}

/// Returns the platform of a GPU plugin with these attributes. jax's CUDA plugins state a version with PJRT 0.115, but
/// not with 0.81; its ROCm plugins (0.115) state none.
fn gpu_kind(stated: &Attributes, path: &Path) -> Option<Kind> {
    Kind::find(|name| stated.contains_key(&format!("{name}_version"))).or_else(|| Kind::of_file(path))
}

/// Returns the end of the error message for a file that is not a plugin or has an incompatible version.
fn compatible() -> String {
    format!("install a compatible one with `{}`", Platform::install_command())
}

/// Copies a plugin's function table. Functions that the plugin does not have become null.
///
/// # Safety
/// `table` points to a `PJRT_Api` with `struct_size` readable bytes.
unsafe fn copy_table(table: *const Api) -> Api {
    let mut api = Api::new();
    // SAFETY: `struct_size` bytes are readable (guaranteed by the caller), and at most `size_of::<Api>()` are copied.
    unsafe {
        let size = (&raw const (*table).struct_size).read().min(size_of::<Api>());
        std::ptr::copy_nonoverlapping(table.cast::<u8>(), (&raw mut api).cast::<u8>(), size);
    }
    api
}

/// Returns an error if a plugin is older than [`OLDEST`], has a newer major version, or does not have the required
/// functions.
fn check_version(path: &Path, api: &Api) -> Result<()> {
    let has = (api.version.major_version, api.version.minor_version);
    let need = format!("{}.{} or newer (built for {}.{})", OLDEST.0, OLDEST.1, abi::VERSION.0, abi::VERSION.1);
    if has.0 > abi::VERSION.0 {
        let (theirs, ours) = (format!("{}.{}", has.0, has.1), format!("{}.{}", abi::VERSION.0, abi::VERSION.1));
        let reason = format!("the plugin has PJRT {theirs}, but this program requires {ours}; {}", compatible());
        return Err(PjrtError::Load { plugin: path.to_owned(), reason });
    }
    let complete = api.executable_get_compiled_memory_stats.is_some() && api.loaded_executable_execute.is_some();
    if has < OLDEST || !complete {
        return Err(PjrtError::TooOld { plugin: path.to_owned(), has, need });
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
    fn error_for_old_plugin_contains_both_versions() {
        let error = check_version(Path::new("/x/old.so"), &table(54, 800)).unwrap_err().to_string();
        assert_eq!(
            error,
            "/x/old.so: the plugin is too old: it has PJRT 0.54, but 0.81 or newer (built for 0.114) is required; \
             install a newer one with `ltx2 plugin install cpu|cuda|tpu`"
        );
    }

    #[test]
    fn plugin_with_other_major_version_is_rejected() {
        let mut api = table(0, 1144);
        api.version.major_version = 1;
        let error = check_version(Path::new("new.so"), &api).unwrap_err().to_string();
        assert_eq!(
            error,
            "new.so: cannot load the plugin: the plugin has PJRT 1.0, but this program requires 0.114; install a compatible one with \
             `ltx2 plugin install cpu|cuda|tpu`"
        );
    }

    #[test]
    fn gpu_plugin_is_known_by_attribute_or_path() {
        let of = |stated: &str, path: &str| {
            let stated = [(stated.to_owned(), attributes::AttributeValue::Int(13000))].into();
            gpu_kind(&stated, Path::new(path)).map(Kind::name)
        };
        assert_eq!(of("cuda_version", "neutral.so"), Some("cuda"));
        assert_eq!(of("rocm_version", "neutral.so"), Some("rocm"));
        assert_eq!(of("xla_version", "/jax_plugins/xla_rocm7/xla_rocm_plugin.so"), Some("rocm"));
        assert_eq!(of("xla_version", "xla_cuda_plugin.so"), Some("cuda"));
        assert_eq!(of("xla_version", "neutral.so"), None);
    }

    #[test]
    fn slots_beyond_struct_size_are_null() {
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
