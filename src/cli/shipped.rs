//! `ltx2 presets` and `ltx2 layouts`: the configurations and layouts that are embedded in the program.

use std::fmt::Write;

use serde_json::json;

use super::print;
use crate::config::presets::{CONFIGS, LAYOUTS, shipped_config, shipped_layout, summary};
use crate::config::presets::{Shipped, not_shipped};

/// Lists the presets, which `-c NAME` selects, or prints the YAML of one.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 presets
  ltx2 presets ltx2_3_hq > my.yml")]
pub(crate) struct PresetsArgs {
    #[command(flatten)]
    list: ListArgs,
}

/// Lists the shipped layouts, which `--layout NAME` selects, or prints the YAML of one.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 layouts
  ltx2 layouts ulysses > my-layout.yml")]
pub(crate) struct LayoutsArgs {
    #[command(flatten)]
    list: ListArgs,
}

#[derive(clap::Args, Clone, Debug)]
struct ListArgs {
    /// Prints the YAML of this one
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Prints the list as JSON
    #[arg(long, conflicts_with = "name")]
    json: bool,
}

pub(crate) fn presets(args: &PresetsArgs) -> anyhow::Result<()> {
    args.list.run(&CONFIGS, "presets", shipped_config)
}

pub(crate) fn layouts(args: &LayoutsArgs) -> anyhow::Result<()> {
    args.list.run(&LAYOUTS, "layouts", shipped_layout)
}

impl ListArgs {
    fn run(
        &self,
        all: Shipped,
        command: &str,
        find: impl Fn(&str) -> Option<(&'static str, &'static str)>,
    ) -> anyhow::Result<()> {
        if let Some(name) = &self.name {
            let (_, text) = find(name).ok_or_else(|| not_shipped(all, command, name))?;
            return print(text);
        }
        if self.json {
            let list: Vec<_> = all.iter().map(|(name, text)| json!({"name": name, "summary": summary(text)})).collect();
            return print(&format!("{}\n", serde_json::to_string_pretty(&list)?));
        }
        let width = all.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let mut table = String::new();
        for (name, text) in all {
            // Writing to a String cannot fail.
            let _ = writeln!(table, "{name:<width$}  {}", summary(text));
        }
        print(&table)
    }
}
