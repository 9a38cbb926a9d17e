//! `ltx2 pull`: downloads models from the Hugging Face hub.

mod select;

use std::cell::Cell;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use ltx2_download::hub::{Hub, HubFile, HubSettings, Listing};
use ltx2_download::{CachedRepository, DownloadError};

use self::select::{Selected, Wanted, check_parts};
use super::next::program;
use super::progress::byte_progress;
use super::{UsageError, print, tell};
use crate::config::Pipeline;
use crate::config::ic_loras::{IC_LORAS, PublishedIcLora};
use crate::interrupts;
use crate::pipeline::plan::outputs::{check_file_room, free_space};
use crate::weights::HubCache;
use crate::weights::published::{self, PublishedModel};

/// Revision that is downloaded by default.
const MAIN: &str = "main";
/// Maximum number of listings, if the repository changes during the download.
const LISTINGS: usize = 3;

/// Arguments of `ltx2 pull`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  ltx2 pull ltx2_5_distilled --dry-run
  ltx2 pull ltx2_5_distilled --files int8
  ltx2 pull Lightricks/LTX-2.5 --files temporal-upscaler,duration-head
  ltx2 pull motion-track-control

Presets and -m org/name find the downloaded files. Run an interrupted command again to resume. Reads the variables of \
Hugging Face tools (HF_TOKEN, HF_TOKEN_PATH, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_HUB_OFFLINE), HTTPS_PROXY, NO_PROXY \
and SSL_CERT_FILE.")]
pub(crate) struct PullArgs {
    /// Preset, such as ltx2_5_distilled; IC-LoRA, such as motion-track-control; or repository (org/name), or a path in it
    /// (org/name/path)
    #[arg(value_name = "NAME")]
    name: String,
    /// Of a repository, downloads only files with one of these parts in their path; of a preset, selects variants of its
    /// files, such as int8
    #[arg(long, value_name = "PART,…", value_delimiter = ',')]
    files: Vec<String>,
    /// Branch, tag or commit of the model's repository
    #[arg(long, default_value = MAIN)]
    revision: String,
    /// Folder to download to, instead of the Hugging Face cache
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Lists the files and their sizes, and downloads nothing
    #[arg(long)]
    dry_run: bool,
}

/// The selected files of a repository and where they are written.
struct Pull {
    listing: Listing,
    revision: String,
    target: Target,
    files: Vec<PlannedFile>,
}

/// A selected file and its state before the download.
struct PlannedFile {
    selected: Selected,
    is_complete: bool,
    /// Number of bytes to download.
    missing: u64,
}

enum Target {
    Cache(CachedRepository),
    Folder(PathBuf),
}

pub(crate) fn run(args: &PullArgs) -> anyhow::Result<()> {
    let settings = HubSettings::from_env().map_err(|error| UsageError(error.to_string()))?;
    let wanted = Wanted::parse(&args.name)?;
    wanted.check(&args.files)?;
    if let Some(variable) = settings.offline() {
        return Err(UsageError(format!("{variable} is set, so nothing can be downloaded; unset it")).into());
    }
    interrupts::doing("before the download; nothing was written");
    let hub = Hub::new(settings)?;
    let mut listings = 1;
    loop {
        let done = pull(&hub, wanted, args);
        let is_changed = |error: &anyhow::Error| matches!(error.downcast_ref(), Some(DownloadError::Changed { .. }));
        match done {
            Err(error) if is_changed(&error) && listings < LISTINGS => tell(format_args!("{error}; starting over")),
            done => return done,
        }
        listings += 1;
    }
}

fn pull(hub: &Hub, wanted: Wanted, args: &PullArgs) -> anyhow::Result<()> {
    let cache = HubCache::from_env();
    let mut pulls = Vec::new();
    for (index, repository) in wanted.repositories().into_iter().enumerate() {
        let revision = if index == 0 { &*args.revision } else { MAIN };
        let listing = hub.list(repository, revision).map_err(|error| with_similar_repositories(error, repository))?;
        let selected = wanted.select(&listing, &args.files)?;
        let target = match &args.dir {
            None => Target::Cache(CachedRepository::new(cache.root(), repository)),
            // A second repository of a preset is the text encoder.
            Some(folder) if index > 0 => Target::Folder(folder.join("text_encoder")),
            Some(folder) => Target::Folder(folder.clone()),
        };
        let files = selected.into_iter().map(|selected| target.plan(selected)).collect::<Result<_, _>>()?;
        pulls.push(Pull { listing, revision: revision.into(), target, files });
    }
    if let Wanted::Preset(_) = wanted {
        check_parts(&args.name, &args.files, pulls.iter().flat_map(|pull| &pull.files).map(|file| &file.selected))?;
    }
    let folder = args.dir.as_deref().unwrap_or(cache.root());
    let (text, missing) = describe(hub, &pulls, folder);
    if args.dry_run {
        return print(&text);
    }
    tell_unless_quiet(text.trim_end());
    let key = if args.dir.is_some() { "--dir" } else { "HF_HUB_CACHE" };
    check_file_room(key, &folder.join("file"), missing)?;
    check_access(hub, &pulls)?;
    let progress = byte_progress("download", missing);
    for pull in &pulls {
        pull.run(hub, &progress)?;
    }
    let path = pulls.first().map(|pull| pull.folder()).unwrap_or_default();
    tell_unless_quiet(&format!("next: {}", next_command(wanted, args, &pulls)));
    print(&format!("{}\n", path.display()))
}

/// Writes a line to stderr, unless the log shows only warnings and errors.
fn tell_unless_quiet(line: &str) {
    if tracing::enabled!(tracing::Level::INFO) {
        tell(line);
    }
}

/// Reports that a file is about to be hashed, if this takes seconds.
fn tell_of_check(path: &Path, bytes: u64) {
    if bytes > 1_000_000_000 {
        tell_unless_quiet(&format!("checking {} ({})", path.display(), size_text(bytes)));
    }
}

/// Returns a size in megabytes or gigabytes.
fn size_text(bytes: u64) -> String {
    match bytes as f64 / 1e9 {
        gigabytes if gigabytes < 0.1 => format!("{:.1} MB", gigabytes * 1e3),
        gigabytes => format!("{gigabytes:.2} GB"),
    }
}

/// Returns an error with every repository that has missing files and to which the hub denies access.
fn check_access(hub: &Hub, pulls: &[Pull]) -> anyhow::Result<()> {
    let mut denied = Vec::new();
    for pull in pulls {
        // A gated repository may allow everybody to read small files, such as README.md.
        let missing = pull.files.iter().filter(|file| !file.is_complete).map(|file| &file.selected.file);
        match missing.max_by_key(|file| file.size).map_or(Ok(()), |file| hub.check_access(&pull.listing, file)) {
            Err(error @ DownloadError::Denied { .. }) => denied.push(error.to_string()),
            checked => checked?,
        }
    }
    anyhow::ensure!(denied.is_empty(), "{}", denied.join("; "));
    Ok(())
}

/// Adds the names of similar known repositories to the error of an unknown one.
fn with_similar_repositories(error: DownloadError, repository: &str) -> DownloadError {
    match error {
        DownloadError::NotFound { name, reason } if name == repository => {
            let is_similar = |own: &&str| *own != name && strsim::jaro_winkler(own, &name) > 0.85;
            let similar: Vec<&str> = published::repositories().filter(is_similar).collect();
            let reason = match similar.is_empty() {
                true => reason,
                false => format!("{reason}; similar names: {}", similar.join(", ")),
            };
            DownloadError::NotFound { name, reason }
        }
        other => other,
    }
}

/// Describes repositories, files, sizes and free space. Also returns the number of bytes to download.
fn describe(hub: &Hub, pulls: &[Pull], folder: &Path) -> (String, u64) {
    let (mut text, mut count, mut total, mut missing) = (String::new(), 0, 0, 0);
    for pull in pulls {
        let Listing { repository, commit, is_gated, licence, .. } = &pull.listing;
        let licence = published::licence(repository).map(String::from).or(licence.clone());
        let licence = licence.unwrap_or_else(|| "licence not stated".into());
        let gated = if *is_gated { ", gated" } else { "" };
        let page = hub.page(repository);
        text += &format!("{repository} at {} ({:.12}): {licence}{gated}, {page}\n", pull.revision, commit);
        for PlannedFile { selected: Selected { file, purpose }, is_complete, missing: rest } in &pull.files {
            let state = match *rest {
                _ if *is_complete => "  (complete)".into(),
                rest if rest < file.size => format!("  ({} missing)", size_text(rest)),
                _ => String::new(),
            };
            let purpose = if purpose.is_empty() { String::new() } else { format!("  {purpose}") };
            text += &format!("{:>12}  {}{purpose}{state}\n", size_text(file.size), file.path);
            (count, total, missing) = (count + 1, total + file.size, missing + rest);
        }
    }
    let free = free_space(folder).map_or(String::new(), |free| format!(", {} free", size_text(free)));
    text += &format!(
        "{count} file{}, {}; {} to download to {}{free}\n",
        if count == 1 { "" } else { "s" },
        size_text(total),
        size_text(missing),
        folder.display()
    );
    (text, missing)
}

impl Target {
    fn plan(&self, selected: Selected) -> Result<PlannedFile, DownloadError> {
        let file = &selected.file;
        let (is_complete, partial) = match self {
            Target::Cache(cached) => (cached.has(file), cached.partial(file)),
            Target::Folder(folder) => (is_complete(folder, file)?, partial_in(folder, file)),
        };
        let have = partial.metadata().map_or(0, |about| about.len());
        let missing = if is_complete { 0 } else { file.size - have.min(file.size) };
        Ok(PlannedFile { selected, is_complete, missing })
    }
}

impl Pull {
    /// Returns the folder that contains the files.
    fn folder(&self) -> PathBuf {
        match &self.target {
            Target::Cache(cached) => cached.snapshot(&self.listing.commit),
            Target::Folder(folder) => folder.clone(),
        }
    }

    /// Downloads the files that are not complete. `progress` takes the number of bytes of each received part.
    fn run(&self, hub: &Hub, progress: &dyn Fn(u64)) -> anyhow::Result<()> {
        if let Target::Cache(cached) = &self.target
            && self.revision == MAIN
        {
            for path in cached.other_partials(&self.listing.files) {
                tell(format_args!(
                    "{}: partial download of a file that {MAIN} does not contain; delete it unless you need another \
                     revision",
                    path.display()
                ));
            }
        }
        for PlannedFile { selected: Selected { file, .. }, is_complete, missing } in &self.files {
            if !is_complete {
                interrupts::doing(format!(
                    "during the download of {}; run the same command again to resume",
                    file.path
                ));
            }
            let counted = Cell::new(file.size - *missing);
            let count = |have: u64| {
                if have > counted.get() {
                    progress(have - counted.get());
                    counted.set(have);
                }
            };
            match &self.target {
                Target::Cache(cached) => self.fetch_to_cache(hub, cached, file, &count)?,
                Target::Folder(_) if *is_complete => {}
                Target::Folder(folder) => self.fetch_to_folder(hub, folder, file, &count)?,
            }
        }
        if let Target::Cache(cached) = &self.target {
            // Files of earlier pulls that did not change stay in the current snapshot.
            for file in self.listing.files.iter().filter(|file| cached.has(file)) {
                cached.link(&self.listing.commit, file)?;
            }
            cached.record(&self.revision, &self.listing.commit)?;
        }
        Ok(())
    }

    fn fetch_to_cache(
        &self,
        hub: &Hub,
        cached: &CachedRepository,
        file: &HubFile,
        progress: &dyn Fn(u64),
    ) -> Result<(), DownloadError> {
        let wait = |path: &Path| tell(format_args!("waiting for another download (lock file {})", path.display()));
        // The lock file is written only for a download, because a complete cache may be read-only.
        if !cached.has(file) {
            let _lock = cached.lock(file, wait)?;
            if !cached.has(file) {
                let partial = cached.partial(file);
                tell_of_check(&partial, partial.metadata().map_or(0, |about| about.len()));
                hub.download(&self.listing, file, &partial, progress)?;
                cached.complete(file)?;
            }
        }
        // Another process may have downloaded the file.
        progress(file.size);
        cached.link(&self.listing.commit, file)
    }

    fn fetch_to_folder(
        &self,
        hub: &Hub,
        folder: &Path,
        file: &HubFile,
        progress: &dyn Fn(u64),
    ) -> Result<(), DownloadError> {
        let (path, partial) = (folder.join(&file.path), partial_in(folder, file));
        let parent = path.parent().unwrap_or(folder);
        fs::create_dir_all(parent).map_err(DownloadError::file(parent, "create the folder"))?;
        tell_of_check(&partial, partial.metadata().map_or(0, |about| about.len()));
        hub.download(&self.listing, file, &partial, progress)?;
        fs::rename(&partial, &path).map_err(DownloadError::file(&path, "write"))
    }
}

fn partial_in(folder: &Path, file: &HubFile) -> PathBuf {
    folder.join(format!("{}.incomplete", file.path))
}

/// Returns whether a folder contains the file with the listed contents.
fn is_complete(folder: &Path, file: &HubFile) -> Result<bool, DownloadError> {
    let path = folder.join(&file.path);
    match path.metadata() {
        Ok(about) if about.len() == file.size => {
            tell_of_check(&path, file.size);
            Ok(file.checksum.of_file(&path)? == file.checksum.digits())
        }
        Ok(_) => Ok(false),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(DownloadError::file(&path, "read")(error)),
    }
}

/// Returns the command that uses what was downloaded, quoted for a shell.
fn next_command(wanted: Wanted, args: &PullArgs, pulls: &[Pull]) -> String {
    let words = next_words(wanted, args, pulls);
    // Only NUL cannot be quoted, which arguments and paths do not contain.
    let words = shlex::try_join(words.iter().map(String::as_str)).unwrap_or_else(|_| words.join(" "));
    format!("{} {words}", program())
}

fn next_words(wanted: Wanted, args: &PullArgs, pulls: &[Pull]) -> Vec<String> {
    let is_default = args.dir.is_none() && args.revision == MAIN;
    let folder = pulls.first().map(Pull::folder).unwrap_or_default();
    let model = match wanted {
        Wanted::Repository(name, path) if ic_lora(name, path).is_some() => {
            return ic_lora_words(wanted, is_default, &folder);
        }
        Wanted::Repository(name, _) => {
            let place = if is_default { name.into() } else { folder.display().to_string() };
            return vec!["check".into(), place];
        }
        Wanted::Preset(model) => model,
    };
    // The place of a file or, with the empty path, of the repository.
    let place = |path: &str| match is_default {
        true => format!("{}/{path}", published::repository_of(model.model)),
        false => folder.join(path).display().to_string(),
    };
    let place = |path: &str| place(path).trim_end_matches('/').to_string();
    let mut words = ["generate", "-c", &args.name].map(String::from).to_vec();
    if !is_default || !args.files.is_empty() {
        words.extend(["-m".into(), place(&transformer(model, pulls))]);
    }
    if !args.files.is_empty() {
        words.extend(["--variant".into(), args.files.join(",")]);
    }
    if let Some((lora, value)) = model.loras {
        let path = lora.strip_prefix(published::repository_of(lora)).unwrap_or(lora).trim_start_matches('/');
        words.extend(["--set".into(), format!("model.loras={}", value.replace("{}", &yaml_text(&place(path))))]);
    }
    words.extend(["-p".into(), "a lighthouse over a quiet sea at dawn".into()]);
    words
}

/// Returns the published IC-LoRA in a repository; `path` is the path of its file.
fn ic_lora(repository: &str, path: Option<&str>) -> Option<&'static PublishedIcLora> {
    let is_own = |row: &&PublishedIcLora| row.repository == repository && (row.file == path || path.is_none());
    IC_LORAS.iter().find(is_own)
}

/// Returns the words that generate a video with a downloaded IC-LoRA.
fn ic_lora_words(wanted: Wanted, is_default: bool, folder: &Path) -> Vec<String> {
    let Wanted::Repository(name, path) = wanted else { return Vec::new() };
    let Some(row) = ic_lora(name, path) else { return Vec::new() };
    let own = row.file.filter(|_| !is_default).map(|file| folder.join(file).display().to_string());
    let lora = own.unwrap_or_else(|| row.name.to_string());
    let pipeline = row.needed_pipeline().unwrap_or(Pipeline::IcLora);
    let model = PublishedModel::of_preset(pipeline.preset(row.base)).map(|model| model.model.to_string());
    let model = model.into_iter().flat_map(|model| ["-m".to_string(), model]);
    let video = if pipeline.takes_video() { ["--video", "speech.mp4"] } else { ["--reference-video", "reference.mp4"] };
    let selects = row.needed_pipeline().into_iter().flat_map(|pipeline| ["--pipeline", pipeline.name()]);
    let rest = ["--ic-lora", &lora].into_iter().chain(selects).chain(video);
    let rest = rest.chain(["-p", "a lighthouse over a quiet sea at dawn"]).map(String::from);
    ["generate".to_string()].into_iter().chain(model).chain(rest).collect()
}

/// Returns a text as YAML; in double quotes if it contains characters that may have a meaning in YAML.
fn yaml_text(text: &str) -> String {
    match text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c)) {
        true => text.into(),
        false => serde_json::Value::from(text).to_string(),
    }
}

/// Returns the path in the repository of the transformer's file; empty if the repository has diffusers folders.
fn transformer(model: &PublishedModel, pulls: &[Pull]) -> String {
    let first = pulls.first().and_then(|pull| pull.files.first());
    match first.filter(|_| model.model != published::repository_of(model.model)) {
        Some(planned) => planned.selected.file.path.clone(),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_command_is_quoted_for_shell_and_yaml() {
        let listing = Listing {
            repository: "Lightricks/LTX-2.5".into(),
            commit: "c0".into(),
            is_gated: false,
            licence: None,
            files: Vec::new(),
        };
        let folder = "/my models/LTX, it's {2.5}: \"x\"";
        let args = PullArgs {
            name: "ltx2_5_two_stage".into(),
            files: vec!["int8".into(), "a b".into()],
            revision: MAIN.into(),
            dir: Some(folder.into()),
            dry_run: false,
        };
        let target = Target::Folder(folder.into());
        let pulls = [Pull { listing, revision: MAIN.into(), target, files: Vec::new() }];
        let wanted = |name| Wanted::parse(name).expect("a name");
        let words = |name| shlex::split(&next_command(wanted(name), &args, &pulls)).expect("a command").split_off(1);
        assert_eq!(words("Org/Name"), ["check", folder]);
        let file = format!("{folder}/ltx-2.3-22b-ic-lora-union-control-ref0.5.safetensors");
        let model = "Lightricks/LTX-2.3/ltx-2.3-22b-distilled-1.1.safetensors";
        let name = "Lightricks/LTX-2.3-22b-IC-LoRA-Union-Control/ltx-2.3-22b-ic-lora-union-control-ref0.5.safetensors";
        assert_eq!(words(name)[..5], ["generate", "-m", model, "--ic-lora", &file]);
        for (name, rest) in [
            ("hdr", ["--pipeline", "hdr", "--reference-video", "reference.mp4"]),
            ("dubit", ["--pipeline", "dub_it", "--video", "speech.mp4"]),
            ("lipdub", ["--pipeline", "dub_it", "--video", "speech.mp4"]),
        ] {
            assert_eq!(words(name)[5..9], rest, "{name}");
        }
        let generate = words(&args.name);
        let start = ["generate", "-c", "ltx2_5_two_stage", "-m", folder, "--variant", "int8,a b", "--set"];
        assert_eq!(generate[..8], start);
        let value = generate[8].strip_prefix("model.loras=").expect("LoRAs");
        let value: serde_json::Value = serde_saphyr::from_str(value).expect("YAML");
        let lora = format!("{folder}/loras/ltx-2.5-22b-distilled-lora-450-bf16.safetensors");
        assert_eq!(value, serde_json::json!([{"path": lora, "stages": [2]}]));
        assert_eq!(generate[9..], ["-p", "a lighthouse over a quiet sea at dawn"]);
    }
}
