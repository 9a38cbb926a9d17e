//! The `ltx2` command.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use ltx2::cli::{self, Cli};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    ltx2::pjrt::quiet_plugins();
    // clap ends the process itself: 0 for help, 2 for flags that it does not know.
    let cli = Cli::parse();
    log_to_stderr(cli.verbose, cli.quiet);
    match cli::run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", cli::one_line(&error));
            ExitCode::from(cli::exit_code(&error))
        }
    }
}

fn log_to_stderr(verbose: u8, quiet: u8) {
    let level = match (verbose, quiet) {
        (0, 0) => "info",
        (0, 1) => "warn",
        (0, _) => "error",
        (1, _) => "debug",
        _ => "trace",
    };
    let wanted = std::env::var("LTX2_LOG").ok().filter(|v| !v.is_empty());
    let filter = wanted.as_deref().map(EnvFilter::try_new);
    let mistake = filter.as_ref().and_then(|f| f.as_ref().err()).map(ToString::to_string);
    let filter = filter.and_then(Result::ok).unwrap_or_else(|| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(verbose > 0)
        .without_time()
        .init();
    if let Some(why) = mistake {
        tracing::warn!("LTX2_LOG is not a filter and was left out: {why}");
    }
}
