//! Options of compiles: ours, the user's, and those that a plugin takes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

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

/// Compiles, leaving out those of our own flags that the plugin refuses by name: an older or newer one.
pub(super) fn compile_known<T>(
    platform: &str,
    options: &CompileOptions,
    given: &EngineOptions,
    compile: impl Fn(&CompileOptions) -> Result<T, Error>,
) -> Result<T, Error> {
    let mut options = options.clone();
    let kept = given.compile_cache.as_deref().and_then(|folder: &Path| flags::kept_beside(platform, folder));
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
        let Some(unknown) = options.flags.keys().find(named).cloned() else { return Err(error) };
        tracing::warn!("the plugin does not take {unknown}; compiling without it");
        options.flags.remove(&unknown);
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

    #[test]
    fn options_of_ours_that_a_plugin_does_not_know_are_left_out_and_a_users_are_not() {
        let known = |options: &CompileOptions| match options.flags.keys().find(|name| name.starts_with("new_")) {
            None => Ok(options.flags.len()),
            Some(name) => Err(Error::Call {
                plugin: "p.so".into(),
                call: "PJRT_Client_Compile",
                code: Code(3),
                message: format!("No such compile option: '{name}'"),
            }),
        };
        let flags = ["new_one", "old", "new_two"];
        let options = flags
            .iter()
            .fold(CompileOptions::default(), |o, name| o.flag((*name).to_string(), OptionValue::Bool(true)));
        let ours = EngineOptions::default();
        assert_eq!(compile_known("cpu", &options, &ours, known).expect("compiles"), 1);
        let users = EngineOptions {
            xla_flags: [("new_two".to_string(), OptionValue::Bool(true))].into(),
            ..Default::default()
        };
        let error = compile_known("cpu", &options, &users, known).expect_err("it was asked for");
        assert!(error.to_string().contains("new_two"), "{error}");
    }
}
