//! The `ltx2` command.

use std::process::ExitCode;

use clap::Parser;
use ltx2::cli::{self, Cli};

fn main() -> ExitCode {
    ltx2::pjrt::quiet_plugins();
    ltx2::pjrt::report_file_limits();
    cli::try_plugins();
    cli::complete();
    if std::env::args_os().len() == 1 {
        cli::tell(cli::first_steps().trim_end());
        return ExitCode::from(2);
    }
    // Exits the process with code 0 after --help or --version, and with code 2 after a usage error.
    let cli = Cli::parse();
    cli::log::start(cli.verbose, cli.quiet);
    let ended = cli::run(&cli);
    cli::block_if_interrupted();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            cli::close_progress();
            cli::tell(format_args!("error: {}", cli::one_line(&error)));
            ExitCode::from(cli::exit_code(&error))
        }
    }
}
