//! Commands to run next: the last line of `ltx2 doctor`, and the output of `ltx2` without arguments.

use std::fs;
use std::path::{Path, PathBuf};

use clap::CommandFactory;

use super::Cli;
use crate::config::{Config, open_model};
use crate::host::free_memory;
use crate::pjrt::discover::{self, Platform};
use crate::runtime::platform::hardware;
use crate::weights::published::{MODELS, PublishedFile, PublishedModel};
use crate::weights::{Component, HubCache, Overrides};

/// A command and its purpose.
struct NextCommand {
    command: String,
    purpose: String,
}

/// Returns the name by which this program was started, such as `ltx2` or `target/release/ltx2`, quoted for a shell.
pub(super) fn program() -> String {
    let name = std::env::args().next().filter(|name| !name.is_empty()).unwrap_or_else(|| "ltx2".into());
    shlex::try_quote(&name).map_or(name.clone(), Into::into)
}

/// Returns commands that work on this machine in the working directory, the most useful one first.
fn commands() -> Vec<NextCommand> {
    let mut found = Vec::new();
    let mut add = |arguments: &str, purpose: String| {
        found.push(NextCommand { command: format!("{} {arguments}", program()), purpose });
    };
    let best = Platform::ALL.into_iter().find(|platform| hardware(*platform).is_ok());
    if let Some(platform) = best.filter(|platform| discover::find(*platform, None).found.is_empty()) {
        add(
            &format!("plugin install {}", platform.name()),
            format!("the {} plugin, which is missing", platform.name()),
        );
    }
    let memory = match best {
        Some(Platform::Cpu) | None => free_memory().unwrap_or(u64::MAX),
        Some(_) => u64::MAX,
    };
    if let Some((preset, path)) = MODELS.iter().rev().find_map(|model| complete(model, memory)) {
        add(
            &format!("generate -c {preset} -p \"a lighthouse over a quiet sea at dawn\""),
            format!("a video by {path}"),
        );
    }
    add("generate -c nano -p \"a red circle bounces on blue, low beeps\"", "a video by the toy model".into());
    add("doctor", "plugins and devices, and what is missing".into());
    add("--help", "all commands".into());
    found
}

/// Returns a preset of a published model, and the model's path. `None`: a file is missing, the files exceed the `memory`
/// (bytes), or the presets need a LoRA.
fn complete(model: &PublishedModel, memory: u64) -> Option<(&'static str, String)> {
    let cache = HubCache::from_env();
    let path = |file: &PublishedFile| cache.resolve(&format!("{}/{}", file.repository, file.path)).ok();
    let paths: Vec<PathBuf> = model.files.iter().map(path).collect::<Option<_>>()?;
    let fits = paths.iter().map(|path| size(path)).sum::<u64>() < memory;
    let preset = model.presets.first().filter(|_| model.loras.is_none() && fits)?;
    let path = Config::load::<String>(preset, []).ok()?.model.path;
    let source = open_model(&path, &Overrides::default()).ok()?;
    source.require(Component::ALL.into_iter().filter(|component| !component.is_optional())).ok()?;
    Some((preset, path))
}

/// Returns the size of a file, or of all files in a folder, in bytes.
fn size(path: &Path) -> u64 {
    match fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| size(&entry.path())).sum(),
        Err(_) => path.metadata().map_or(0, |about| about.len()),
    }
}

/// Returns the command to run next. `works`: whether a platform works; if none does, a plugin has to be installed.
pub(super) fn first(works: bool) -> String {
    let first = commands().remove(0).command;
    if works || first.contains(" plugin install ") { first } else { format!("{} plugin install cpu", program()) }
}

/// Returns the output of `ltx2` without arguments: a description, and three commands that work here.
pub fn first_steps() -> String {
    let about = Cli::command().get_about().map(ToString::to_string).unwrap_or_default();
    let commands: Vec<NextCommand> = commands().into_iter().take(3).collect();
    let width = commands.iter().map(|next| next.command.len()).max().unwrap_or_default();
    let lines = commands.iter().map(|next| format!("  {:<width$}  {}\n", next.command, next.purpose));
    format!("{about}\n\nTry:\n{}", lines.collect::<String>())
}
