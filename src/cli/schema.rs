//! `ltx2 schema`: the keys of the YAML.

use super::print;
use crate::config::json_schema;

/// Prints the JSON Schema of the YAML, for editors and checks.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 schema > ltx2.schema.json
  # yaml-language-server: $schema=ltx2.schema.json          as the first line of a YAML file")]
pub struct Args {}

/// Runs the command.
///
/// # Errors
/// stdout cannot be written.
pub fn run(_: &Args) -> anyhow::Result<()> {
    print(&format!("{}\n", serde_json::to_string_pretty(json_schema())?))
}
