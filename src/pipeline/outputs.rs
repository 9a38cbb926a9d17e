//! Files that a run will write, checked before it does any work: none exists unless it may be replaced, no two are the same,
//! all can be created, and the disks have room.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use super::error::{PipelineError, Result};
use super::options::GenerateOptions;
use super::recorded::{self, Existing};
use super::replaceable::Replaceable;
use super::saved;
use super::writer::{dump_path, place_of};
use crate::config::{Config, Job, sidecar_path};
use crate::destination::{Destination, check_ending, folder, is_device};
use crate::media::{self, png_frame_path, png_frames_in};
use crate::request::Request;

/// Parts of a raw frame's bytes that an encoder needs for a black video, and that it likely does.
const MP4: [f64; 2] = [0.00003, 0.02];
const PNG: [f64; 2] = [0.001, 0.5];

/// A file that a run writes, or a folder of frames.
struct Output {
    /// Key or flag that asks for it.
    key: &'static str,
    path: PathBuf,
}

/// Key of the only outputs that are folders.
const FRAMES: &str = "output.save_frames";
/// Flag of the files in which steps and clips are kept.
const CHECKPOINT: &str = "--checkpoint-every";

/// Endings of files, which a folder of frames does not have.
const OF_FILES: [&str; 12] = ["apng", "avi", "gif", "jpeg", "jpg", "mkv", "mov", "mp4", "png", "tiff", "webm", "webp"];

impl Output {
    fn is_frames(&self) -> bool {
        self.key == FRAMES
    }

    /// The file that is created first.
    fn first_file(&self) -> PathBuf {
        if self.is_frames() { png_frame_path(&self.path, 0) } else { self.path.clone() }
    }
}

/// Files of the video `path`; none of a process that writes nothing, whose paths are empty.
fn of_video(config: &Config, path: &Path, several: bool) -> Vec<Output> {
    if path.file_name().is_none() {
        return Vec::new();
    }
    let place = |asked: &Option<String>, end| asked.as_ref().map(|asked| place_of(asked, path, end, several));
    let all = [
        ("output.path", Some(path.to_path_buf())),
        ("output.sidecar", config.output.sidecar.then(|| sidecar_path(path))),
        (FRAMES, place(&config.output.save_frames, "")),
        ("output.save_audio", place(&config.output.save_audio, "wav")),
    ];
    all.into_iter().filter_map(|(key, path)| Some(Output { key, path: path? })).collect()
}

/// All files of a run; none of a process that writes nothing.
fn of_run(config: &Config, options: &GenerateOptions) -> Vec<Output> {
    let several = options.has_several();
    let writes = options.outputs.iter().any(|path| path.file_name().is_some());
    let videos = options.outputs.iter().flat_map(|path| of_video(config, path, several));
    let dumps = options.dump.iter().flat_map(|dump| options.jobs.iter().map(|job| dump_path(dump, job, several)));
    let dumps = dumps.map(|path| Output { key: "--dump", path });
    let times = options.perf_json.iter().map(|path| Output { key: "--perf-json", path: path.clone() });
    let all = videos.chain(dumps.chain(times).filter(|_| writes));
    let steps = options.checkpoint_every.filter(|_| !options.resume).and(options.outputs.first());
    let steps = steps.filter(|_| writes).map(|video| Output { key: CHECKPOINT, path: saved::path_of(video) });
    all.chain(steps).collect()
}

/// The files of a run, for its kept steps: whoever continues them may replace these.
pub(super) fn files(config: &Config, options: &GenerateOptions) -> Vec<PathBuf> {
    let all = of_run(config, options).into_iter().filter(|output| output.key != CHECKPOINT);
    all.map(|output| resolved(&output.path)).collect()
}

/// What a run may replace: with `--force` whatever is there; with `--resume` what the interrupted run has left, which is looked for
/// now; else nothing.
pub(super) fn replaceable(config: &Config, options: &GenerateOptions) -> Replaceable {
    if options.force {
        return Replaceable::everything();
    }
    let all = of_run(config, options).into_iter().filter(|_| options.resume).map(|output| output.path);
    Replaceable::these(all.filter(|path| path.exists()).collect())
}

/// A path as the file system has it, whether or not there is a file: links of the folders that exist are followed.
fn resolved(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let (mut existing, mut rest) = (absolute.clone(), Vec::<OsString>::new());
    loop {
        if let Ok(found) = existing.canonicalize() {
            return rest.into_iter().rev().fold(found, |path, part| path.join(part));
        }
        match existing.components().next_back() {
            Some(Component::Normal(part)) => rest.push(part.to_owned()),
            // The folder above one that is not there.
            Some(Component::ParentDir) => {
                existing.pop();
            }
            _ => return absolute,
        }
        existing.pop();
    }
}

/// Refuses outputs of one run that are the same file, or one of which is inside of another.
fn check_distinct(outputs: &[Output]) -> Result<()> {
    let resolved: Vec<PathBuf> = outputs.iter().map(|output| resolved(&output.path)).collect();
    for (at, (one, path)) in outputs.iter().zip(&resolved).enumerate() {
        for (other, its) in outputs.iter().zip(&resolved).skip(at + 1) {
            let is_inside =
                |inner: &Path, outer: &Output, folder: &Path| !outer.is_frames() && inner.starts_with(folder);
            let is_one = path == its || is_inside(path, other, its) || is_inside(its, one, path);
            if is_one && !is_device(path) {
                let paths = if one.path == other.path {
                    one.path.display().to_string()
                } else {
                    format!("{} and {}", one.path.display(), other.path.display())
                };
                let keys =
                    if one.key == other.key { one.key.to_string() } else { format!("{} and {}", one.key, other.key) };
                return Err(PipelineError::Usage(format!(
                    "{keys} write to the same place, {paths}; name different files"
                )));
            }
        }
    }
    Ok(())
}

/// Refuses an output whose name says another format than is written there.
fn check_format(Output { key, path }: &Output) -> Result<()> {
    let fail = |why: String| Err(PipelineError::Usage(format!("{key}: {why}")));
    let check = |written: &str, ending: &str| check_ending(path, written, &[ending]).or_else(fail);
    match *key {
        "output.save_audio" => check("sound is written as WAV", "wav"),
        "--dump" => check("tensors are written as safetensors", "safetensors"),
        "--perf-json" if path.extension().is_some() => check("times are written as JSON", "json"),
        FRAMES => match path.extension().map(|own| own.to_string_lossy().to_lowercase()) {
            Some(own) if OF_FILES.contains(&own.as_str()) => {
                fail(format!("{}: frames are written as PNG files; name a folder for them", path.display()))
            }
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Refuses what a run writes beside its video where that goes to a device or a pipe.
fn check_streams(config: &Config, options: &GenerateOptions) -> Result<()> {
    let Some(video) = options.outputs.iter().find(|video| Destination::is_stream(video)) else { return Ok(()) };
    let (key, cure) = if config.output.sidecar {
        ("output.sidecar", "give --set output.sidecar=false")
    } else if options.checkpoint_every.is_some() {
        (CHECKPOINT, "leave it out")
    } else if options.resume {
        ("--resume", "leave it out")
    } else {
        return Ok(());
    };
    let why = format!("{key}: {} is a device or a pipe, and nothing is kept beside it; {cure}", video.display());
    Err(PipelineError::Usage(format!("{why}, or name a file")))
}

/// Refuses outputs of a run that would overwrite something, and two that are the same. Changes nothing.
///
/// With `resume`, files that the interrupted run was writing may be replaced: a video and a sidecar if they have the same request.
///
/// # Errors
/// The key or flag, the path, and how to go on.
pub(crate) fn check_taken(config: &Config, options: &GenerateOptions) -> Result<()> {
    let outputs = of_run(config, options);
    check_distinct(&outputs)?;
    outputs.iter().try_for_each(check_format)?;
    // The name that was given, which each of several videos changes.
    let dump = options.dump.iter().filter(|_| !outputs.is_empty());
    dump.map(|path| Output { key: "--dump", path: path.clone() }).try_for_each(|dump| check_format(&dump))?;
    check_streams(config, options)?;
    if options.force {
        return Ok(());
    }
    let resumed: Vec<PathBuf> =
        options.outputs.iter().filter(|_| options.resume).flat_map(|path| saved::recorded_outputs(path)).collect();
    let is_resumed = |path: &Path| !resumed.is_empty() && resumed.contains(&resolved(path));
    for output in &outputs {
        let Output { key, path } = output;
        let refuse = |what: &str, cure: &str| {
            Err(PipelineError::Usage(format!("{key}: {} {what}; {cure}, or name another", path.display())))
        };
        let is_own = |video: &Path| options.resume && recorded_request(config, options, video);
        match *key {
            "output.path" if saved::is_kept(path) && is_own(path) => {}
            "output.path" if Destination::is_taken(path) => return refuse("exists", "overwrite it with --force"),
            "output.sidecar" if options.outputs.iter().any(|video| sidecar_path(video) == *path && is_own(video)) => {}
            key if key != "output.sidecar" && is_resumed(path) => {}
            FRAMES if !png_frames_in(path)?.is_empty() => {
                return refuse("holds frames of another video", "remove them with --force");
            }
            FRAMES => {}
            CHECKPOINT if options.outputs.iter().any(|video| saved::is_kept(video)) => {
                let what = "or clips of an interrupted run are there";
                return refuse(what, "continue it with --resume, start over with --force");
            }
            _ if Destination::is_taken(path) => return refuse("exists", "overwrite it with --force"),
            _ => {}
        }
    }
    Ok(())
}

/// Whether the sidecar beside a video of the run has the request of its job.
fn recorded_request(config: &Config, options: &GenerateOptions, video: &Path) -> bool {
    let mut videos = options.outputs.iter().zip(&options.jobs);
    videos.any(|(path, job)| path == video && recorded::has_request(path, config, job))
}

/// The jobs that `--resume` has left, with their files: videos that are finished are left out.
///
/// # Errors
/// A video of another request, inputs or model, or one that no sidecar describes, unless `force`.
pub(crate) fn unfinished(
    config: &Config,
    jobs: Vec<Job>,
    outputs: Vec<PathBuf>,
    force: bool,
) -> Result<(Vec<Job>, Vec<PathBuf>)> {
    let mut model = None;
    let mut left = (Vec::new(), Vec::new());
    for (job, path) in jobs.into_iter().zip(outputs) {
        let is_finished = path.exists() && {
            let refuse = |why: String| {
                let cure = "overwrite it with --force, or name another file with -o";
                Err(PipelineError::Usage(format!("{}: {why}; {cure}", path.display())))
            };
            match recorded::compare(&path, config, &job, &mut model)? {
                Existing::Same => !saved::is_kept(&path),
                _ if force => false,
                Existing::Differs(why) => return refuse(format!("is the video of another request: {why}")),
                Existing::NoSidecar => {
                    let sidecar = sidecar_path(&path);
                    return refuse(format!("has no sidecar ({}) to compare with this request", sidecar.display()));
                }
            }
        };
        if is_finished {
            tracing::info!("{} is finished: nothing to resume", path.display());
        } else {
            left.0.push(job);
            left.1.push(path);
        }
    }
    Ok(left)
}

/// Finds files that would be overwritten or cannot be written before the model is opened, and leaves nothing behind. A cache that
/// can only be read is a warning: its entries are used.
///
/// # Errors
/// Those of [`check_taken`]; a folder in a file's place, or one that cannot be created or written to, with the key that asks
/// for it.
pub(super) fn check_places(config: &Config, options: &GenerateOptions) -> Result<()> {
    check_taken(config, options)?;
    if let Some(Err(error)) = config.compile_cache().map(|folder| media::check_writable(&folder.join("entry"))) {
        tracing::warn!("runtime.compile_cache: {error}: what is not there is compiled for this run alone");
    }
    // Steps that cannot be kept are a warning when they are.
    let needed = of_run(config, options).into_iter().filter(|output| output.key != CHECKPOINT);
    needed.into_iter().try_for_each(|output| {
        let fail = |source| PipelineError::Output { key: output.key, source };
        media::check_writable(&output.first_file()).map_err(fail)
    })
}

/// Bytes on one file system.
#[derive(Default)]
struct Room {
    /// A folder on it, which may have to be created.
    folder: PathBuf,
    /// That folder, or the nearest one above it that exists.
    existing: PathBuf,
    keys: Vec<&'static str>,
    least: f64,
    likely: f64,
}

/// Finds disks that the videos surely have no room on; one on which they may have none is a warning. The places were looked
/// at by [`check_places`].
///
/// # Errors
/// The keys, the folder, the bytes that are free and that are needed.
pub(super) fn check_room(
    config: &Config,
    options: &GenerateOptions,
    requests: &[Request],
    sample_rate: usize,
) -> Result<()> {
    let mut disks: BTreeMap<u64, Room> = BTreeMap::new();
    let several = options.has_several();
    for ((path, request), job) in options.outputs.iter().zip(requests).zip(&options.jobs) {
        let frames = request.output_frames();
        let raw = if config.pipeline.extension() == "mp4" { 3 * request.width * request.height * frames } else { 0 };
        let raw = raw as f64;
        // Two channels of 16 bits.
        let sound = 4.0 * sample_rate as f64 * frames as f64 / request.output_rate();
        let dump = options.dump.iter().filter(|_| path.file_name().is_some());
        let dump = dump.map(|dump| Output { key: "--dump", path: dump_path(dump, job, several) });
        for Output { key, path } in of_video(config, path, several).into_iter().chain(dump) {
            let bytes = match key {
                "output.path" => MP4.map(|part| part * raw),
                FRAMES => PNG.map(|part| part * raw),
                "output.save_audio" => [sound; 2],
                // Frames that are decoded, in f32; what else is dumped is small beside them.
                "--dump" if request.decodes_video() => [4.0 * raw; 2],
                _ => continue,
            };
            // Of frames the folder itself.
            let folder = if key == FRAMES { path.clone() } else { folder(&path) };
            let Some((disk, existing)) = device(&folder) else { continue };
            let room = disks.entry(disk).or_insert_with(|| Room { folder, existing, ..Room::default() });
            (room.least, room.likely) = (room.least + bytes[0], room.likely + bytes[1]);
            if !room.keys.contains(&key) {
                room.keys.push(key);
            }
        }
    }
    disks.into_values().try_for_each(|room| room.check())
}

impl Room {
    fn check(&self) -> Result<()> {
        // A file system that does not say is found full when it is.
        let Ok(about) = rustix::fs::statvfs(&self.existing) else { return Ok(()) };
        let free = about.f_bavail as f64 * about.f_frsize as f64;
        let (keys, mib) = (self.keys.join(", "), |bytes: f64| bytes / f64::from(1 << 20));
        let has = format!("{keys}: {} has {:.2} MiB free", self.folder.display(), mib(free));
        if free < self.least {
            let needs = format!("{has}, and what is written there needs at least {:.2}", mib(self.least));
            return Err(PipelineError::NoRoom(format!("{needs}; free some, or name a place on another disk")));
        }
        if free < self.likely {
            tracing::warn!("{has}, and what is written there may need {:.2}", mib(self.likely));
        }
        Ok(())
    }
}

/// The file system of a folder, and the folder itself or the nearest one above it that exists.
fn device(folder: &Path) -> Option<(u64, PathBuf)> {
    use std::os::unix::fs::MetadataExt;
    let folder = resolved(folder);
    folder.ancestors().find_map(|folder| Some((folder.metadata().ok()?.dev(), folder.to_path_buf())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A configuration and the options of jobs whose videos are `names` in a folder.
    fn run(folder: &Path, names: &[&str]) -> (Config, GenerateOptions) {
        let job = |index| Job { index, prompt: "a".into(), seed: 10 };
        let options = GenerateOptions {
            jobs: (0..names.len()).map(job).collect(),
            outputs: names.iter().map(|name| folder.join(name)).collect(),
            ..GenerateOptions::default()
        };
        (Config::default(), options)
    }

    fn text(path: &Path) -> String {
        path.to_str().unwrap().into()
    }

    #[test]
    fn every_existing_output_is_refused_by_key_and_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (mut config, mut options) = run(folder.path(), &["a.mp4"]);
        config.output.save_audio = Some(text(&path("s.wav")));
        config.output.save_frames = Some(text(&path("frames")));
        (options.dump, options.perf_json) = (Some(path("d.safetensors")), Some(path("p.json")));
        options.checkpoint_every = Some(1);
        check_taken(&config, &options).unwrap();
        for (key, name) in [
            ("output.path", "a.mp4"),
            ("output.sidecar", "a.json"),
            ("output.save_audio", "s.wav"),
            ("--dump", "d.safetensors"),
            ("--perf-json", "p.json"),
            ("--checkpoint-every", "a.mp4.steps.safetensors"),
            ("--checkpoint-every", "a.mp4.clip_0000.safetensors"),
            ("output.save_frames", "frames/frame_00012.png"),
        ] {
            std::fs::create_dir_all(path("frames")).unwrap();
            std::fs::write(path(name), "kept").unwrap();
            let error = check_taken(&config, &options).unwrap_err().to_string();
            let named = if name.contains("frame_") { "frames" } else { name };
            let named = if name.contains("clip_") { "a.mp4.steps.safetensors" } else { named };
            assert!(error.starts_with(&format!("{key}: {} ", path(named).display())), "{name}: {error}");
            assert!(error.contains("--force"), "{name}: {error}");
            check_taken(&config, &GenerateOptions { force: true, ..options.clone() }).unwrap();
            std::fs::remove_file(path(name)).unwrap();
        }
        // Other files of the folder are no frames.
        std::fs::write(path("frames/drawing.png"), "kept").unwrap();
        check_taken(&config, &options).unwrap();
    }

    /// Kept steps record the files of their run; a video and a sidecar among them may still be another program's.
    #[test]
    fn resume_replaces_the_files_of_its_run_and_no_foreign_video() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (mut config, mut options) = run(folder.path(), &["a.mp4"]);
        (config.output.save_audio, options.resume) = (Some(text(&path("s.wav"))), true);
        let about = serde_json::to_string(&files(&config, &options)).unwrap();
        let about = [("outputs".to_string(), about)].into();
        crate::pipeline::tensors::write_with(&path("a.mp4.steps.safetensors"), &[], Some(about), true).unwrap();
        std::fs::write(path("s.wav"), "of the run").unwrap();
        check_taken(&config, &options).unwrap();
        let replaceable = replaceable(&config, &options);
        assert!(replaceable.has(&path("s.wav")) && !replaceable.has(&path("a.mp4")), "{replaceable:?}");
        for (key, name) in [("output.path", "a.mp4"), ("output.sidecar", "a.json")] {
            std::fs::write(path(name), "another program's").unwrap();
            let error = check_taken(&config, &options).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{key}: ")) && error.contains("--force"), "{error}");
            std::fs::remove_file(path(name)).unwrap();
        }
        let sidecar = serde_json::json!({"config": config.effective("a", 10)});
        std::fs::write(path("a.json"), sidecar.to_string()).unwrap();
        std::fs::write(path("a.mp4"), "of the run").unwrap();
        check_taken(&config, &options).unwrap();
        let not_resumed = GenerateOptions { resume: false, ..options };
        assert!(!super::replaceable(&config, &not_resumed).has(&path("a.mp4")));
    }

    #[test]
    fn outputs_of_several_videos_are_checked_one_by_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (mut config, mut options) = run(folder.path(), &["0000_10.mp4", "0001_10.mp4"]);
        config.output.save_audio = Some(text(&path("sounds")));
        options.dump = Some(path("d.safetensors"));
        check_taken(&config, &options).unwrap();
        std::fs::create_dir(path("sounds")).unwrap();
        for name in ["d_0001.safetensors", "sounds/0001_10.wav", "0001_10.json"] {
            std::fs::write(path(name), "kept").unwrap();
            let error = check_taken(&config, &options).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
            std::fs::remove_file(path(name)).unwrap();
        }
        // Another process, which writes nothing, looks at none.
        std::fs::write(path("d_0001.safetensors"), "kept").unwrap();
        options.outputs = vec![PathBuf::new(); 2];
        check_taken(&config, &options).unwrap();
    }

    #[test]
    fn two_outputs_of_one_run_are_different_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let refused = |change: &dyn Fn(&mut Config, &mut GenerateOptions)| {
            let (mut config, mut options) = run(folder.path(), &["a.mp4"]);
            options.force = true;
            change(&mut config, &mut options);
            check_taken(&config, &options).unwrap_err().to_string()
        };
        let error = refused(&|_, options| options.perf_json = Some(path("a.json")));
        assert!(error.starts_with("output.sidecar and --perf-json write to the same place"), "{error}");
        let error = refused(&|config, _| config.output.save_audio = Some(text(&path("new/../a.mp4"))));
        assert!(error.starts_with("output.path and output.save_audio"), "{error}");
        let error = refused(&|config, _| config.output.save_frames = Some(text(&path("a.mp4/frames"))));
        assert!(error.starts_with("output.path and output.save_frames"), "{error}");
        let error = refused(&|_, options| {
            options.checkpoint_every = Some(1);
            options.dump = Some(path("a.mp4.steps.safetensors"));
        });
        assert!(error.starts_with("--dump and --checkpoint-every"), "{error}");
        // A video and a sound of one name share the sidecar.
        let (config, options) = run(folder.path(), &["x.mp4", "x.wav"]);
        assert!(check_taken(&config, &options).unwrap_err().to_string().starts_with("output.sidecar write"));
        std::fs::write(path("a.json"), "the sidecar of a.wav").unwrap();
        let (config, options) = run(folder.path(), &["a.mp4"]);
        assert!(check_taken(&config, &options).unwrap_err().to_string().starts_with("output.sidecar: "));
        // Frames may have the video beside them.
        let (mut config, options) = run(&path("out"), &["a.mp4"]);
        config.output.save_frames = Some(text(&path("out")));
        check_taken(&config, &options).unwrap();
    }
}
