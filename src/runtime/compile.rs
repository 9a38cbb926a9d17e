//! Options of compiles: ours, the user's, and those that a plugin takes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::error::RuntimeError;
use super::flags::{self, Toolchain};
use super::watchdog::Watchdog;
use crate::hlo::Program;
use crate::interrupts;
use crate::pjrt::{CompileOptions, Error, OptionValue};

/// Options of every compile.
#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// XLA flags for every compile, by name.
    pub xla_flags: BTreeMap<String, OptionValue>,
    /// Folder of the compile cache; `None` compiles every program.
    pub compile_cache: Option<PathBuf>,
    /// Whether programs are written to it behind their first run; `None`: but on a CPU, whose programs take no time to be serialized.
    pub write_behind: Option<bool>,
    /// Whether a profiler trace needs name scopes of every operation.
    pub traceable: bool,
    /// Watchdog over executions and transfers; the default is none.
    pub watchdog: Watchdog,
}

/// The options every compile of this project starts from. `devices` are ids in the order in which meshes count them; the
/// TPU compiler, without a client to ask, needs them.
pub fn compile_options(
    toolchain: &Toolchain,
    program: &Program,
    devices: &[i32],
    options: &EngineOptions,
) -> CompileOptions {
    let ids = devices.iter().take(program.devices()).map(|&id| i64::from(id)).collect();
    let start = CompileOptions { devices: Some(ids), ..CompileOptions::partitioned(program.devices()) };
    let traces = if options.traceable { flags::for_traces(&toolchain.platform) } else { Vec::new() };
    let own = flags::defaults(toolchain, program).into_iter().chain(traces);
    let own = own.map(|(name, value)| (name.to_string(), value));
    let given = options.xla_flags.iter().map(|(name, value)| (name.clone(), value.clone()));
    own.chain(given).fold(start, |compile, (name, value)| compile.flag(name, value))
}

/// Options of ours that a plugin does not take: an older or a newer one. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Refused(Arc<Mutex<BTreeSet<String>>>);

impl Refused {
    /// The options without them: those that programs are compiled with, and filed under.
    pub(super) fn without(&self, mut options: CompileOptions) -> CompileOptions {
        let refused = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        options.flags.retain(|name, _| !refused.contains(name));
        options
    }

    /// Compiles with all of `options`; none where the plugin refuses one by name, which is left out from here on.
    ///
    /// # Errors
    /// The plugin's message; a refused option of the user's, of a libtpu that ours were tested with, or that numbers rest on.
    pub(super) fn compile<T>(
        &self,
        toolchain: &Toolchain,
        options: &CompileOptions,
        given: &EngineOptions,
        compile: impl Fn(&CompileOptions) -> Result<T, Error>,
    ) -> Result<Option<T>, RuntimeError> {
        let options = self.without(options.clone());
        let _compiling = interrupts::compiling();
        let error = match compile(&options) {
            Ok(compiled) => return Ok(Some(compiled)),
            Err(error) => error,
        };
        let Some(option) = refused(&error, &options, given) else { return Err(of_flags(error, &given.xla_flags)) };
        if let Some(release) = toolchain.tested_libtpu() {
            return Err(RuntimeError::Option { release, option, source: error });
        }
        if !flags::is_for_speed(&option) {
            return Err(RuntimeError::Needed { option, source: error });
        }
        tracing::warn!("the plugin does not take {option}; compiling without it");
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(option);
        Ok(None)
    }
}

/// The option of ours that a plugin refuses: one that it does not know, or that newer versions take for other chips only. Other
/// errors may name options too, as advice.
fn refused(error: &Error, options: &CompileOptions, given: &EngineOptions) -> Option<String> {
    let own = |flag: &&String| !given.xla_flags.contains_key(*flag);
    named(error, options.flags.keys().filter(own), &["NOT_FOUND", "UNIMPLEMENTED", "FAILED_PRECONDITION"])
}

/// The flag that an error of `INVALID_ARGUMENT`, or of other `codes`, names.
fn named<'a>(error: &Error, mut flags: impl Iterator<Item = &'a String>, codes: &[&str]) -> Option<String> {
    let code = error.code()?.name();
    if code != "INVALID_ARGUMENT" && !codes.contains(&code) {
        return None;
    }
    let text = error.to_string();
    let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    flags.find(|flag| words.contains(&flag.as_str())).cloned()
}

/// An error of a compile; one of a flag of the configuration says so.
fn of_flags(error: Error, flags: &BTreeMap<String, OptionValue>) -> RuntimeError {
    match named(&error, flags.keys(), &["NOT_FOUND"]) {
        Some(option) => RuntimeError::Flag { option, source: error },
        None => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlo::{Builder, DType, Type};
    use crate::pjrt::Code;

    #[test]
    fn a_users_options_come_behind_ours() {
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

    fn given(names: &[&str]) -> CompileOptions {
        let on = |options: CompileOptions, name: &&str| options.flag((*name).to_string(), OptionValue::Bool(true));
        names.iter().fold(CompileOptions::default(), on)
    }

    /// Compiles, by a compiler that does not know some options, until nothing more is left out: the options that were left.
    fn compiled(
        refused: &Refused,
        toolchain: &Toolchain,
        unknown: &[&str],
        code: u32,
        users: &EngineOptions,
    ) -> Result<Vec<String>, RuntimeError> {
        let compile =
            |options: &CompileOptions| match options.flags.keys().find(|name| unknown.contains(&name.as_str())) {
                None => Ok(options.flags.keys().cloned().collect()),
                Some(name) => Err(Error::Call {
                    plugin: "p.so".into(),
                    call: "PJRT_Client_Compile",
                    code: Code(code),
                    message: format!("No such compile option: '{name}'"),
                }),
            };
        let options = given(&[SPEED[0], SPEED[1], NUMBERS]);
        loop {
            if let Some(left) = refused.compile(toolchain, &options, users, compile)? {
                return Ok(left);
            }
        }
    }

    fn libtpu(version: &str) -> Toolchain {
        Toolchain { platform: "tpu".into(), kind: "TPU v6 lite".into(), version: version.into() }
    }

    fn cpu() -> Toolchain {
        Toolchain { platform: "cpu".into(), ..Toolchain::default() }
    }

    #[test]
    fn options_for_speed_that_a_plugin_does_not_know_are_left_out_and_a_users_are_not() {
        let ours = EngineOptions::default();
        for toolchain in [&cpu(), &libtpu("cl/970057490"), &libtpu("")] {
            let refused = Refused::default();
            assert_eq!(compiled(&refused, toolchain, &SPEED, 3, &ours).expect("compiles"), [NUMBERS]);
            // What is filed is what was compiled; the next program is not tried with them.
            assert_eq!(refused.without(given(&SPEED)), given(&[]));
        }
        let flags = [(SPEED[1].to_string(), OptionValue::Bool(true))].into();
        let users = EngineOptions { xla_flags: flags, ..Default::default() };
        let error = compiled(&Refused::default(), &cpu(), &SPEED, 3, &users).expect_err("it was asked for");
        assert!(error.to_string().starts_with(&format!("runtime.xla_flags.{}: ", SPEED[1])), "{error}");
    }

    #[test]
    fn an_option_that_numbers_rest_on_is_an_error() {
        let refused = Refused::default();
        let error = compiled(&refused, &cpu(), &[NUMBERS], 3, &EngineOptions::default()).expect_err("other numbers");
        assert!(error.to_string().contains(NUMBERS) && error.to_string().contains("numbers rest on"), "{error}");
        assert_eq!(refused.without(given(&[NUMBERS])), given(&[NUMBERS]));
    }

    #[test]
    fn an_error_that_names_an_option_as_advice_is_no_refusal() {
        let refused = Refused::default();
        // RESOURCE_EXHAUSTED, INTERNAL.
        for code in [8, 13] {
            let error = compiled(&refused, &cpu(), &SPEED, code, &EngineOptions::default()).expect_err("no refusal");
            assert!(matches!(error, RuntimeError::Plugin(_)), "{error:?}");
        }
        assert_eq!(refused.without(given(&SPEED)), given(&SPEED));
    }

    #[test]
    fn a_tested_libtpu_takes_all_options_of_ours() {
        let tested = libtpu("cl/1014260217");
        let ours = EngineOptions::default();
        let error = compiled(&Refused::default(), &tested, &SPEED, 3, &ours).expect_err("a tested release");
        assert!(matches!(error, RuntimeError::Option { .. }), "{error:?}");
        let said = error.to_string();
        assert!(said.contains("libtpu 0.0.52") && said.contains(SPEED[0]) && said.contains("bug"), "{said}");
        // One that the user gave is the user's.
        let flags = SPEED.map(|name| (name.to_string(), OptionValue::Bool(true)));
        let users = EngineOptions { xla_flags: flags.into(), ..Default::default() };
        let error = compiled(&Refused::default(), &tested, &SPEED, 3, &users).expect_err("it was asked for");
        assert!(matches!(error, RuntimeError::Flag { .. }), "{error:?}");
    }
}
