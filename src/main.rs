//! The `ltx2` command.

use std::process::ExitCode;

use clap::Parser;
use ltx2::cli::{self, Cli};

fn main() -> ExitCode {
    ltx2::pjrt::quiet_plugins();
    cli::try_plugins();
    // clap ends the process itself: 0 for help, 2 for flags that it does not know.
    let cli = Cli::parse();
    cli::log::start(cli.verbose, cli.quiet);
    match cli::run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            cli::tell(format_args!("error: {}", cli::one_line(&error)));
            ExitCode::from(cli::exit_code(&error))
        }
    }
}
