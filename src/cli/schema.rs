//! `ltx2 schema`: prints the JSON Schema of YAML files and reports.

use super::print;
use crate::config::{experiment_schema, json_schema};
use crate::tune::{diagnosis_schema, report_schema};

/// Prints the JSON Schema of a kind of file, for editors and validators.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 schema > ltx2.schema.json
  ltx2 schema --of experiment > experiment.schema.json
  # yaml-language-server: $schema=ltx2.schema.json          as the first line of a YAML file")]
pub(crate) struct SchemaArgs {
    /// Kind of file
    #[arg(long, value_name = "KIND", value_enum, default_value_t)]
    of: SchemaKind,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, Default)]
enum SchemaKind {
    /// Configuration file of `ltx2 generate` and related commands
    #[default]
    Run,
    /// Experiment file of `ltx2 experiment`
    Experiment,
    /// Report of `ltx2 compile --json`
    Compile,
    /// Report of `ltx2 why --json`
    Why,
}

pub(crate) fn run(args: &SchemaArgs) -> anyhow::Result<()> {
    let schema = match args.of {
        SchemaKind::Run => json_schema().clone(),
        SchemaKind::Experiment => experiment_schema(),
        SchemaKind::Compile => report_schema().clone(),
        SchemaKind::Why => diagnosis_schema().clone(),
    };
    print(&format!("{}\n", serde_json::to_string_pretty(&schema)?))
}
