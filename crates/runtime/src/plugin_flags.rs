//! Flags that plugins read from the environment. An unknown flag makes a plugin terminate the process.

use super::checksummed_file::sha256;
use super::platforms::spec;
use ltx2_pjrt::discover::{Kind, Platform};
use ltx2_pjrt::{Attributes, Client, CompileOptions, PjrtError, Plugin, Topology};
use ltx2_stablehlo::{Builder, DType, Type};

const XLA: &str = "XLA_FLAGS";

/// Phrases in the messages that XLA and libtpu print before they terminate the process because of a flag.
const FAULTS: [&str; 5] =
    ["Unknown flag", "Unknown command line flag", "Illegal value", "Couldn't interpret value", "to read flags for"];

/// Returns the environment variables that plugins parse and that are set to a non-empty value, with their values.
fn nonempty_variables() -> impl Iterator<Item = (&'static str, String)> {
    let value = |name| Some(std::env::var_os(name)?.to_string_lossy().trim().to_string());
    let own = Platform::ALL.into_iter().filter_map(|platform| spec(platform).flags_variable);
    [XLA]
        .into_iter()
        .chain(own)
        .chain(["TF_XLA_FLAGS"])
        .filter_map(move |name| Some((name, value(name).filter(|text| !text.is_empty())?)))
}

/// Returns whether the environment sets any flags.
pub(super) fn are_set() -> bool {
    nonempty_variables().next().is_some()
}

/// Returns text that identifies the flags set in the environment; empty if none are set. `None` if a variable refers to
/// a flag file, whose contents are not read.
pub(super) fn identity() -> Option<String> {
    let all: Vec<(&str, String)> = nonempty_variables().collect();
    if all.iter().any(|(_, text)| !text.starts_with('-')) {
        return None;
    }
    let texts: Vec<String> = all.iter().map(|(name, text)| format!("{name}={text}\n")).collect();
    Some(if texts.is_empty() { String::new() } else { format!("-{}", &sha256(texts.concat().as_bytes())[..16]) })
}

/// Makes a plugin parse its flags by creating a client or compiling a program, without needing a device. An invalid
/// flag makes the plugin terminate the process. A returned error therefore has another cause and is only printed.
pub(super) fn parse(plugin: &Plugin) {
    let parsed = match plugin.kind() {
        None => Client::new(plugin, &Attributes::new()).map(drop),
        Some(Kind::Supported(platform)) => spec(platform).probe_topology.map_or(Ok(()), |probe| {
            let (topology, options) = probe();
            compile(plugin, &topology, &options)
        }),
        Some(Kind::Unsupported(_)) => Ok(()),
    };
    if let Err(error) = parsed {
        eprintln!("{error}");
    }
}

fn compile(plugin: &Plugin, topology: &str, options: &Attributes) -> Result<(), PjrtError> {
    let builder = Builder::new("flags");
    let x = builder.argument("x", Type::new(DType::F32, vec![2]));
    let program = builder.finish(&[("x", &x)]).expect("a program of one argument is valid");
    Topology::new(plugin, topology, options)?.compile(&program.text, &CompileOptions::single()).map(drop)
}

/// Extracts the plugin's messages about its flags, with the variable's name, from the output of a terminated process;
/// `None` if the process terminated for another reason.
pub(super) fn fault(printed: &str) -> Option<String> {
    let mut found: Vec<&str> = Vec::new();
    for line in printed.lines().filter(|line| FAULTS.iter().any(|words| line.contains(words))) {
        // Examples: `F0000 00:00:1.2 34 parse_flags_from_env.cc:234] Unknown flag …` and `ERROR: Unknown command line
        // flag …`.
        let words = line.split_once("] ").map_or(line, |(_, words)| words).trim();
        let words = words.trim_start_matches("ERROR: ").trim_end_matches('.');
        if !found.contains(&words) {
            found.push(words);
        }
    }
    let first = found.first()?;
    let words = found.join(", ");
    Some(match () {
        () if first.contains(XLA) => words,
        () if first.contains("command line flag") || first.contains("Illegal value") => {
            format!("LIBTPU_INIT_ARGS or runtime.libtpu_init_args: {words}")
        }
        () => format!("{}: {words}", nonempty_variables().map(|(name, _)| name).next().unwrap_or(XLA)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fatal_flag_is_reported_with_its_variable() {
        let xla = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n\
                   F0000 00:00:1795822112.470171   16167 parse_flags_from_env.cc:234] Unknown flags in XLA_FLAGS: --a=1 --b\n";
        assert_eq!(fault(xla).as_deref(), Some("Unknown flags in XLA_FLAGS: --a=1 --b"));
        let libtpu = "ERROR: Unknown command line flag 'a'\nERROR: Unknown command line flag 'b'\n";
        let variable = "LIBTPU_INIT_ARGS or runtime.libtpu_init_args";
        let words = "Unknown command line flag 'a', Unknown command line flag 'b'";
        assert_eq!(fault(libtpu), Some(format!("{variable}: {words}")));
        let value = "ERROR: Illegal value 'x' specified for flag 'a'\n";
        assert_eq!(fault(value), Some(format!("{variable}: Illegal value 'x' specified for flag 'a'")));
        assert_eq!(fault("F0000 a.cc:1] Check failed: devices > 0\n"), None);
    }
}
