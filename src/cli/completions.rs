//! `ltx2 completions`: shell completions.

use clap::CommandFactory;

use super::{Cli, print};

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
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "ltx2", &mut script);
    print(&String::from_utf8_lossy(&script))
}
