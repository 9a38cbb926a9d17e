//! Options of compiles: ours, the user's, and those that a plugin takes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::error::RuntimeError;
use super::flags::{self, Toolchain};
use crate::hlo::Program;
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
    let own = flags::defaults(toolchain, program.devices()).into_iter().chain(traces);
    let own = own.map(|(name, value)| (name.to_string(), value));
    let given = options.xla_flags.iter().map(|(name, value)| (name.clone(), value.clone()));
    own.chain(given).fold(start, |compile, (name, value)| compile.flag(name, value))
}

/// Compiles, leaving out those of our own flags that the plugin refuses by name: an older or newer one. A libtpu that they
/// were tested with takes all of them.
///
/// # Errors
/// The plugin's message; a refused flag of ours on a tested libtpu.
pub(super) fn compile_known<T>(
    toolchain: &Toolchain,
    options: &CompileOptions,
    given: &EngineOptions,
    compile: impl Fn(&CompileOptions) -> Result<T, Error>,
) -> Result<T, RuntimeError> {
    let mut options = options.clone();
    let kept = given.compile_cache.as_deref().and_then(|folder| flags::kept_beside(&toolchain.platform, folder));
    if let Some((name, value)) = kept {
        options.flags.entry(name.into()).or_insert(value);
    }
    loop {
        let error = match compile(&options) {
            Ok(compiled) => return Ok(compiled),
            Err(error) => error,
        };
        // One that it does not know, or that newer versions take for other chips only.
        let text = error.to_string();
        let words: Vec<&str> = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
        let named = |flag: &&String| words.contains(&flag.as_str()) && !given.xla_flags.contains_key(*flag);
        let Some(option) = options.flags.keys().find(named).cloned() else { return Err(error.into()) };
        if let Some(release) = toolchain.tested_libtpu() {
            return Err(RuntimeError::Option { release, option, source: error });
        }
        tracing::warn!("the plugin does not take {option}; compiling without it");
        options.flags.remove(&option);
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

    /// A compiler that knows no option whose name begins with `new_`; it says how many it was given.
    fn knows_no_new_ones(options: &CompileOptions) -> Result<usize, Error> {
        match options.flags.keys().find(|name| name.starts_with("new_")) {
            None => Ok(options.flags.len()),
            Some(name) => Err(Error::Call {
                plugin: "p.so".into(),
                call: "PJRT_Client_Compile",
                code: Code(3),
                message: format!("No such compile option: '{name}'"),
            }),
        }
    }

    fn with_new_ones() -> CompileOptions {
        let on = |options: CompileOptions, name: &str| options.flag(name.to_string(), OptionValue::Bool(true));
        ["new_one", "old", "new_two"].into_iter().fold(CompileOptions::default(), on)
    }

    fn libtpu(version: &str) -> Toolchain {
        Toolchain { platform: "tpu".into(), kind: "TPU v6 lite".into(), version: version.into() }
    }

    #[test]
    fn options_of_ours_that_a_plugin_does_not_know_are_left_out_and_a_users_are_not() {
        let cpu = Toolchain { platform: "cpu".into(), ..Toolchain::default() };
        let ours = EngineOptions::default();
        for toolchain in [&cpu, &libtpu("cl/970057490"), &libtpu("")] {
            let compiled = compile_known(toolchain, &with_new_ones(), &ours, knows_no_new_ones);
            assert_eq!(compiled.expect("compiles"), 1);
        }
        let users = EngineOptions {
            xla_flags: [("new_two".to_string(), OptionValue::Bool(true))].into(),
            ..Default::default()
        };
        let error = compile_known(&cpu, &with_new_ones(), &users, knows_no_new_ones).expect_err("it was asked for");
        assert!(error.to_string().contains("new_two"), "{error}");
    }

    #[test]
    fn a_tested_libtpu_takes_all_options_of_ours() {
        let tested = libtpu("cl/1014260217");
        let error = compile_known(&tested, &with_new_ones(), &EngineOptions::default(), knows_no_new_ones);
        let error = error.expect_err("a tested release");
        assert!(matches!(error, RuntimeError::Option { .. }), "{error:?}");
        let said = error.to_string();
        assert!(said.contains("libtpu 0.0.52") && said.contains("new_one") && said.contains("bug"), "{said}");
        // One that the user gave is the user's: the plugin's own message.
        let flags = ["new_one", "new_two"].map(|name| (name.to_string(), OptionValue::Bool(true)));
        let users = EngineOptions { xla_flags: flags.into(), ..Default::default() };
        let error = compile_known(&tested, &with_new_ones(), &users, knows_no_new_ones).expect_err("it was asked for");
        assert!(matches!(error, RuntimeError::Plugin(_)), "{error:?}");
    }
}
