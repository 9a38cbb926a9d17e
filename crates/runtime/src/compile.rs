//! Compile options: this project's defaults, the user's flags, and the handling of options that a plugin rejects.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::error::RuntimeError;
use super::flags::{self, Toolchain};
use super::watchdog::DeviceWatchdog;
use ltx2_base::interrupts;
use ltx2_pjrt::{CompileOptions, OptionValue, PjrtError};
use ltx2_stablehlo::Program;

/// Options of an [`Engine`](super::Engine), most of which apply to every compile.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// XLA flags for every compile, by name.
    pub xla_flags: BTreeMap<String, OptionValue>,
    /// Directory of the compile cache. `None`: no cache; every program is compiled.
    pub compile_cache: Option<PathBuf>,
    /// Whether to write executables to the cache in the background after the first run. `None`: yes, except on CPU,
    /// where serialization is fast.
    pub write_behind: Option<bool>,
    /// Whether to compile for profiler traces, so that each kernel is attributed to its operation.
    pub traceable: bool,
    /// Watchdog for executions and transfers; disabled by default.
    pub watchdog: DeviceWatchdog,
}

/// Returns the compile options of a program: the project's defaults, overridden by the user's flags. `devices` are
/// device ids in mesh order; the TPU compiler needs them because it can run without a client.
pub fn compile_options(
    toolchain: &Toolchain,
    program: &Program,
    devices: &[i32],
    options: &EngineOptions,
) -> CompileOptions {
    let ids = devices.iter().take(program.devices()).map(|&id| i64::from(id)).collect();
    let start = CompileOptions { devices: Some(ids), ..CompileOptions::partitioned(program.devices()) };
    let traces = if options.traceable { flags::trace_options(&toolchain.platform) } else { Vec::new() };
    let own = flags::defaults(toolchain, program).into_iter().chain(traces);
    let own = own.map(|(name, value)| (name.to_string(), value));
    let given = options.xla_flags.iter().map(|(name, value)| (name.clone(), value.clone()));
    own.chain(given).fold(start, |compile, (name, value)| compile.flag(name, value))
}

/// Default options that the plugin has rejected because it is older or newer than the tested versions. Clones share the
/// set.
#[derive(Clone, Debug, Default)]
pub(super) struct RejectedOptions(Arc<Mutex<BTreeSet<String>>>);

impl RejectedOptions {
    /// Returns `options` without the rejected ones. The result is used both to compile and as part of the cache key.
    pub(super) fn without(&self, mut options: CompileOptions) -> CompileOptions {
        let refused = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        options.flags.retain(|name, _| !refused.contains(name));
        options
    }

    /// Compiles with `options`. Returns `None` if the plugin's error names a default option that it rejects; later
    /// calls omit that option.
    ///
    /// # Errors
    /// Returns the plugin's error, or an error for a rejected option that must not be omitted: one set by the user, one
    /// that this libtpu release was tested with, or one that results depend on.
    pub(super) fn compile<T>(
        &self,
        toolchain: &Toolchain,
        options: &CompileOptions,
        given: &EngineOptions,
        compile: impl Fn(&CompileOptions) -> Result<T, PjrtError>,
    ) -> Result<Option<T>, RuntimeError> {
        let options = self.without(options.clone());
        let _compiling = interrupts::compiling();
        let error = match compile(&options) {
            Ok(compiled) => return Ok(Some(compiled)),
            Err(error) => error,
        };
        let Some(option) = refused(&error, &options, given) else { return Err(of_flags(error, &given.xla_flags)) };
        if let Some(release) = toolchain.tested_release() {
            return Err(RuntimeError::Option { release, option, source: error });
        }
        if !flags::is_speed_only(&option) {
            return Err(RuntimeError::Needed { option, source: error });
        }
        tracing::warn!("the plugin rejects the compile option {option}; compiling without it");
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(option);
        Ok(None)
    }
}

/// Returns the default option that `error` rejects: one that the plugin does not know or accepts only for other chips.
/// `None` if the error's code does not indicate a rejected option, because such an error may mention an option only as
/// advice.
fn refused(error: &PjrtError, options: &CompileOptions, given: &EngineOptions) -> Option<String> {
    let own = |flag: &&String| !given.xla_flags.contains_key(*flag);
    named(error, options.flags.keys().filter(own), &["NOT_FOUND", "UNIMPLEMENTED", "FAILED_PRECONDITION"])
}

/// Returns the flag mentioned by an error with code `INVALID_ARGUMENT` or one of `codes`.
fn named<'a>(error: &PjrtError, mut flags: impl Iterator<Item = &'a String>, codes: &[&str]) -> Option<String> {
    let code = error.code()?.name();
    if code != "INVALID_ARGUMENT" && !codes.contains(&code) {
        return None;
    }
    let text = error.to_string();
    let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    flags.find(|flag| words.contains(&flag.as_str())).cloned()
}

/// Converts a compile error; an error about a user's flag becomes [`RuntimeError::Flag`].
fn of_flags(error: PjrtError, flags: &BTreeMap<String, OptionValue>) -> RuntimeError {
    match named(&error, flags.keys(), &["NOT_FOUND"]) {
        Some(option) => RuntimeError::Flag { option, source: error },
        None => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ltx2_pjrt::Code;
    use ltx2_stablehlo::{Builder, DType, Type};

    #[test]
    fn user_flags_override_defaults() {
        const NAME: &str = "xla_allow_excess_precision";
        let b = Builder::new("f");
        let x = b.argument("x", Type::new(DType::F32, [2]));
        let program = b.finish(&[("y", &(&x + 1.0))]).expect("builds");
        let users =
            EngineOptions { xla_flags: [(NAME.to_string(), OptionValue::Bool(true))].into(), ..Default::default() };
        for (given, want) in [(EngineOptions::default(), false), (users, true)] {
            let options = compile_options(&Toolchain::default(), &program, &[0], &given);
            assert_eq!(options.flags[NAME], OptionValue::Bool(want));
        }
    }

    const SPEED: [&str; 2] = ["xla_gpu_force_conv_nhwc", "xla_tpu_dot_dot_fusion"];
    const NUMBERS: &str = "xla_allow_excess_precision";

    fn options_with(names: &[&str]) -> CompileOptions {
        let on = |options: CompileOptions, name: &&str| options.flag((*name).to_string(), OptionValue::Bool(true));
        names.iter().fold(CompileOptions::default(), on)
    }

    /// Calls a fake compiler, which rejects the options in `unknown`, until it succeeds. Returns the options of the
    /// last call.
    fn compiled(
        refused: &RejectedOptions,
        toolchain: &Toolchain,
        unknown: &[&str],
        code: u32,
        users: &EngineOptions,
    ) -> Result<Vec<String>, RuntimeError> {
        let compile =
            |options: &CompileOptions| match options.flags.keys().find(|name| unknown.contains(&name.as_str())) {
                None => Ok(options.flags.keys().cloned().collect()),
                Some(name) => Err(PjrtError::Call {
                    plugin: "p.so".into(),
                    call: "PJRT_Client_Compile",
                    code: Code(code),
                    message: format!("No such compile option: '{name}'"),
                }),
            };
        let options = options_with(&[SPEED[0], SPEED[1], NUMBERS]);
        loop {
            if let Some(left) = refused.compile(toolchain, &options, users, compile)? {
                return Ok(left);
            }
        }
    }

    fn libtpu(version: &str) -> Toolchain {
        Toolchain { version: version.into(), ..Toolchain::of_kind("tpu", "TPU v6 lite") }
    }

    fn cpu() -> Toolchain {
        Toolchain { platform: "cpu".into(), ..Toolchain::default() }
    }

    #[test]
    fn only_default_speed_options_are_dropped_when_rejected() {
        let ours = EngineOptions::default();
        for toolchain in [&cpu(), &libtpu("cl/970057490"), &libtpu("")] {
            let refused = RejectedOptions::default();
            assert_eq!(compiled(&refused, toolchain, &SPEED, 3, &ours).expect("compiles"), [NUMBERS]);
            // The cache key contains the options that were used, and the next program is compiled without the rejected
            // options at the first attempt.
            assert_eq!(refused.without(options_with(&SPEED)), options_with(&[]));
        }
        let flags = [(SPEED[1].to_string(), OptionValue::Bool(true))].into();
        let users = EngineOptions { xla_flags: flags, ..Default::default() };
        let error = compiled(&RejectedOptions::default(), &cpu(), &SPEED, 3, &users).expect_err("the user set it");
        assert!(error.to_string().starts_with(&format!("runtime.xla_flags.{}: ", SPEED[1])), "{error}");
    }

    #[test]
    fn rejecting_an_option_that_results_depend_on_is_an_error() {
        let refused = RejectedOptions::default();
        let error = compiled(&refused, &cpu(), &[NUMBERS], 3, &EngineOptions::default()).expect_err("other numbers");
        assert!(
            error.to_string().contains(NUMBERS) && error.to_string().contains("which results depend on"),
            "{error}"
        );
        assert_eq!(refused.without(options_with(&[NUMBERS])), options_with(&[NUMBERS]));
    }

    #[test]
    fn error_that_only_mentions_an_option_is_not_a_rejection() {
        let refused = RejectedOptions::default();
        // The codes of RESOURCE_EXHAUSTED and INTERNAL.
        for code in [8, 13] {
            let error = compiled(&refused, &cpu(), &SPEED, code, &EngineOptions::default()).expect_err("no refusal");
            assert!(matches!(error, RuntimeError::Plugin(_)), "{error:?}");
        }
        assert_eq!(refused.without(options_with(&SPEED)), options_with(&SPEED));
    }

    #[test]
    fn tested_libtpu_must_accept_all_default_options() {
        let tested = libtpu("cl/1014260217");
        let ours = EngineOptions::default();
        let error = compiled(&RejectedOptions::default(), &tested, &SPEED, 3, &ours).expect_err("a tested release");
        assert!(matches!(error, RuntimeError::Option { .. }), "{error:?}");
        let said = error.to_string();
        assert!(said.contains("libtpu 0.0.52") && said.contains(SPEED[0]) && said.contains("bug"), "{said}");
        // A default option that the user also sets counts as a user's flag.
        let flags = SPEED.map(|name| (name.to_string(), OptionValue::Bool(true)));
        let users = EngineOptions { xla_flags: flags.into(), ..Default::default() };
        let error = compiled(&RejectedOptions::default(), &tested, &SPEED, 3, &users).expect_err("the user set it");
        assert!(matches!(error, RuntimeError::Flag { .. }), "{error:?}");
    }
}
