//! `ltx2 completions`: shell completions.

use std::ffi::OsStr;

use clap::{CommandFactory, ValueEnum};
use clap_complete::engine::{CompletionCandidate, PathCompleter, ValueCompleter};
use clap_complete::env::{CompleteEnv, Shells};

use super::{Cli, UsageError, print};
use crate::config::presets::{CONFIGS, LAYOUTS, summary};

/// Environment variable with which the completion script of a shell calls this program.
const VARIABLE: &str = "LTX2_COMPLETE";

/// Prints shell completions.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 completions bash > ~/.local/share/bash-completion/completions/ltx2
  ltx2 completions zsh > ~/.zfunc/_ltx2")]
pub(crate) struct CompletionsArgs {
    /// Shell to generate completions for
    #[arg(value_enum)]
    shell: clap_complete::Shell,
}

pub(crate) fn run(args: &CompletionsArgs) -> anyhow::Result<()> {
    let name = args.shell.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default();
    let shells = Shells::builtins();
    let shell = shells.completer(&name).ok_or_else(|| UsageError(format!("{name}: no completions for this shell")))?;
    let mut script = Vec::new();
    shell.write_registration(VARIABLE, "ltx2", "ltx2", "ltx2", &mut script)?;
    print(&String::from_utf8_lossy(&script))
}

/// Answers the completion script of a shell and exits, if the script called this program.
pub fn complete() {
    CompleteEnv::with_factory(Cli::command).var(VARIABLE).bin("ltx2").complete();
}

/// Completes the value of `-c`.
pub(super) fn complete_preset(current: &OsStr) -> Vec<CompletionCandidate> {
    names_and_files(&CONFIGS, current)
}

/// Completes the value of `--layout`.
pub(super) fn complete_layout(current: &OsStr) -> Vec<CompletionCandidate> {
    names_and_files(&LAYOUTS, current)
}

/// Returns the shipped names that start with `current`, then the files.
fn names_and_files(shipped: &[(&'static str, &'static str)], current: &OsStr) -> Vec<CompletionCandidate> {
    let written = current.to_string_lossy();
    let named = shipped.iter().filter(|(name, _)| name.starts_with(&*written));
    let named = named.map(|(name, text)| CompletionCandidate::new(name).help(Some(summary(text).into())));
    named.chain(PathCompleter::file().complete(current)).collect()
}
