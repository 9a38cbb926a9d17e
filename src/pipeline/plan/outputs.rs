//! Checks the output files before a run does any work: no output may exist unless the run may replace it, all outputs
//! must be different files and writable, and the disks must have enough free space.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use super::overwrites::Replaceable;
use super::videos::{Job, RunVideos, sidecar_path};
use crate::atomic_file;
use crate::config::Config;
use crate::destination::{Destination, check_ending, folder, is_device};
use crate::media::{exr_frame_path, exr_frames_in, png_frame_path, png_frames_in};
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::output::denoise_checkpoint::{is_kept, path_of, recorded_outputs};
use crate::pipeline::output::hdr_files::{self, exr_folder, hdr_video_path};
use crate::pipeline::output::preview_files;
use crate::pipeline::output::recorded::{self, ExistingVideo};
use crate::pipeline::output::writer::{dump_path, place_of};
use crate::request::Request;

/// Encoded size as a fraction of the size of the raw frames: the minimum (a black video), and a likely upper value.
const MP4: [f64; 2] = [0.00003, 0.02];
const PNG: [f64; 2] = [0.001, 0.5];
const EXR: [f64; 2] = [0.002, 1.6];

/// A file that a run writes, or a folder for frames or previews.
struct OutputPath {
    /// Config key or flag that requests the output.
    key: &'static str,
    path: PathBuf,
}

/// Config key of the folder for frames.
const FRAMES: &str = "output.save_frames";
/// Config key of the folder for EXR frames.
const EXR_FRAMES: &str = "output.save_exr";
/// Config key that requests previews, which are written to a folder next to the video.
const PREVIEWS: &str = "output.preview_every";
/// Flag that requests checkpoints.
const CHECKPOINT: &str = "--checkpoint-every";

/// Extensions that a folder for frames must not have.
const OF_FILES: [&str; 12] = ["apng", "avi", "gif", "jpeg", "jpg", "mkv", "mov", "mp4", "png", "tiff", "webm", "webp"];

impl OutputPath {
    fn is_folder(&self) -> bool {
        [FRAMES, EXR_FRAMES, PREVIEWS].contains(&self.key)
    }

    /// Returns the path of the first file that is created when this output is written.
    fn first_file(&self) -> PathBuf {
        match self.key {
            FRAMES => png_frame_path(&self.path, 0),
            EXR_FRAMES => exr_frame_path(&self.path, 0),
            PREVIEWS => preview_files::first_file(&self.path),
            _ => self.path.clone(),
        }
    }
}

/// Returns the outputs of the video `path`; none if `path` is empty, because this process writes nothing.
fn of_video(config: &Config, path: &Path, several: bool) -> Vec<OutputPath> {
    if path.file_name().is_none() {
        return Vec::new();
    }
    let place = |asked: &Option<String>, end| asked.as_ref().map(|asked| place_of(asked, path, end, several));
    let is_hdr = config.pipeline.spec().hdr;
    let all = [
        ("output.path", Some(path.to_path_buf())),
        ("output.sidecar", config.output.sidecar.then(|| sidecar_path(path))),
        (FRAMES, place(&config.output.save_frames, "")),
        (EXR_FRAMES, is_hdr.then(|| exr_folder(config, path, several))),
        ("output.hdr_video", hdr_video_path(config, path).filter(|_| is_hdr)),
        ("output.save_audio", place(&config.output.save_audio, "wav")),
        (PREVIEWS, config.output.preview_every.map(|_| preview_files::folder_of(path))),
    ];
    all.into_iter().filter_map(|(key, path)| Some(OutputPath { key, path: path? })).collect()
}

/// Returns all outputs of a run; none for a process that writes nothing.
fn output_paths(config: &Config, videos: &RunVideos) -> Vec<OutputPath> {
    let several = videos.has_several();
    let writes = videos.outputs.iter().any(|path| path.file_name().is_some());
    let files = videos.outputs.iter().flat_map(|path| of_video(config, path, several));
    let dumps = videos.dump.iter().flat_map(|dump| videos.jobs.iter().map(|job| dump_path(dump, job, several)));
    let dumps = dumps.map(|path| OutputPath { key: "--dump", path });
    let times = videos.perf_json.iter().map(|path| OutputPath { key: "--perf-json", path: path.clone() });
    let all = files.chain(dumps.chain(times).filter(|_| writes));
    let steps = videos.checkpoint_every.filter(|_| !videos.resume).and(videos.outputs.first());
    let steps = steps.filter(|_| writes).map(|video| OutputPath { key: CHECKPOINT, path: path_of(video) });
    all.chain(steps).collect()
}

/// Returns the output files that a run's checkpoint records. A run that resumes from the checkpoint may replace these
/// files.
pub(in crate::pipeline) fn files(config: &Config, videos: &RunVideos) -> Vec<PathBuf> {
    let all = output_paths(config, videos).into_iter().filter(|output| output.key != CHECKPOINT);
    all.map(|output| resolved(&output.path)).collect()
}

/// Returns the files that a run may replace: all files with `--force`; with `--resume`, the outputs that exist now,
/// which the interrupted run wrote; otherwise none.
pub(in crate::pipeline) fn replaceable(config: &Config, videos: &RunVideos) -> Replaceable {
    if videos.force {
        return Replaceable::everything();
    }
    let all = output_paths(config, videos).into_iter().filter(|_| videos.resume).map(|output| output.path);
    Replaceable::these(all.filter(|path| path.exists()).collect())
}

/// Returns the absolute path, with symbolic links resolved in the part of the path that exists.
fn resolved(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let (mut existing, mut rest) = (absolute.clone(), Vec::<OsString>::new());
    loop {
        if let Ok(found) = existing.canonicalize() {
            return rest.into_iter().rev().fold(found, |path, part| path.join(part));
        }
        match existing.components().next_back() {
            Some(Component::Normal(part)) => rest.push(part.to_owned()),
            // Handles `..` after a folder that does not exist.
            Some(Component::ParentDir) => {
                existing.pop();
            }
            _ => return absolute,
        }
        existing.pop();
    }
}

/// Rejects a run if two of its outputs are the same file, or if one is inside another.
fn check_distinct(outputs: &[OutputPath]) -> Result<()> {
    let resolved: Vec<PathBuf> = outputs.iter().map(|output| resolved(&output.path)).collect();
    for (at, (one, path)) in outputs.iter().zip(&resolved).enumerate() {
        for (other, its) in outputs.iter().zip(&resolved).skip(at + 1) {
            let is_inside =
                |inner: &Path, outer: &OutputPath, folder: &Path| !outer.is_folder() && inner.starts_with(folder);
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
                    "{keys} write to the same place, {paths}; use different files"
                )));
            }
        }
    }
    Ok(())
}

/// Rejects an output whose extension does not match the file format.
fn check_format(OutputPath { key, path }: &OutputPath) -> Result<()> {
    let fail = |why: String| Err(PipelineError::Usage(format!("{key}: {why}")));
    let check = |written: &str, ending: &str| check_ending(path, written, &[ending]).or_else(fail);
    match *key {
        "--perf-json" if path.as_os_str() == "-" => fail("stdout is not supported; give the path of a file".into()),
        "output.save_audio" => check("sound is written as WAV", "wav"),
        "--dump" => check("tensors are written as safetensors", "safetensors"),
        "--perf-json" if path.extension().is_some() => check("times are written as JSON", "json"),
        FRAMES => match path.extension().map(|own| own.to_string_lossy().to_lowercase()) {
            Some(own) if OF_FILES.contains(&own.as_str()) => {
                fail(format!("{}: frames are written as PNG files; use the path of a folder", path.display()))
            }
            _ => Ok(()),
        },
        EXR_FRAMES if path.extension().is_some_and(|own| own.eq_ignore_ascii_case("exr")) => {
            fail(format!("{}: each frame is a file; use the path of a folder", path.display()))
        }
        _ => Ok(()),
    }
}

/// Rejects outputs that would be written next to the video (sidecar, previews, checkpoint) if the video is written to a device or
/// a pipe.
fn check_streams(config: &Config, videos: &RunVideos) -> Result<()> {
    let Some(video) = videos.outputs.iter().find(|video| Destination::is_stream(video)) else { return Ok(()) };
    let (key, cure) = if config.pipeline.spec().hdr {
        ("pipeline hdr", "write the video to a file")
    } else if config.output.sidecar {
        ("output.sidecar", "pass --set output.sidecar=false")
    } else if config.output.preview_every.is_some() {
        (PREVIEWS, "remove this key")
    } else if videos.checkpoint_every.is_some() {
        (CHECKPOINT, "remove this flag")
    } else if videos.resume {
        ("--resume", "remove this flag")
    } else {
        return Ok(());
    };
    let why = format!("{key}: {} is a device or a pipe, so no file can be written next to it; {cure}", video.display());
    Err(PipelineError::Usage(format!("{why}, or write the video to a file")))
}

/// Rejects a run whose outputs would overwrite a file, or two of whose outputs are the same file. Changes nothing on
/// disk.
///
/// With `resume`, the output files of the interrupted run may be replaced; its video and its sidecar only if the
/// sidecar records the same request.
pub(crate) fn check_outputs(config: &Config, videos: &RunVideos) -> Result<()> {
    let outputs = output_paths(config, videos);
    check_distinct(&outputs)?;
    outputs.iter().try_for_each(check_format)?;
    // Check the path that the user passed; with several videos, `output_paths` returns numbered paths.
    let dump = videos.dump.iter().filter(|_| !outputs.is_empty());
    dump.map(|path| OutputPath { key: "--dump", path: path.clone() }).try_for_each(|dump| check_format(&dump))?;
    check_streams(config, videos)?;
    if videos.force {
        return Ok(());
    }
    let resumed: Vec<PathBuf> =
        videos.outputs.iter().filter(|_| videos.resume).flat_map(|path| recorded_outputs(path)).collect();
    let is_resumed = |path: &Path| !resumed.is_empty() && resumed.contains(&resolved(path));
    for output in &outputs {
        let OutputPath { key, path } = output;
        let refuse = |what: &str, cure: &str| {
            Err(PipelineError::Usage(format!("{key}: {} {what}; {cure}, or use another path", path.display())))
        };
        let is_own = |video: &Path| videos.resume && recorded_request(config, videos, video);
        match *key {
            "output.path" if is_kept(path) && is_own(path) => {}
            "output.path" if Destination::is_taken(path) => return refuse("exists", "overwrite it with --force"),
            "output.sidecar" if videos.outputs.iter().any(|video| sidecar_path(video) == *path && is_own(video)) => {}
            key if key != "output.sidecar" && is_resumed(path) => {}
            FRAMES if !png_frames_in(path)?.is_empty() => {
                return refuse("contains frames of another video", "remove them with --force");
            }
            EXR_FRAMES if !exr_frames_in(path)?.is_empty() => {
                return refuse("contains frames of another video", "remove them with --force");
            }
            // Previews without a video are those of a run that failed; they are replaced.
            FRAMES | EXR_FRAMES | PREVIEWS => {}
            CHECKPOINT if videos.outputs.iter().any(|video| is_kept(video)) => {
                let what = "or clips of an interrupted run exist";
                return refuse(what, "resume that run with --resume, start over with --force");
            }
            _ if Destination::is_taken(path) => return refuse("exists", "overwrite it with --force"),
            _ => {}
        }
    }
    Ok(())
}

/// Returns whether `video` is a video of this run whose existing sidecar records the same request.
fn recorded_request(config: &Config, videos: &RunVideos, video: &Path) -> bool {
    let mut all = videos.outputs.iter().zip(&videos.jobs);
    all.any(|(path, job)| path == video && recorded::has_request(path, config, job))
}

/// Returns the jobs that `--resume` still has to run, with their output files. Skips videos that are finished.
///
/// # Errors
/// Returns an error if an existing video was made from another request, other inputs or another model, or if it has no
/// sidecar. With `force`, such a video is generated again instead.
pub(crate) fn unfinished(
    config: &Config,
    jobs: Vec<Job>,
    outputs: Vec<PathBuf>,
    force: bool,
) -> Result<(Vec<Job>, Vec<PathBuf>)> {
    let mut model = None;
    let mut left = (Vec::new(), Vec::new());
    let several = jobs.len() > 1;
    for (job, path) in jobs.into_iter().zip(outputs) {
        let is_finished = path.exists() && {
            let refuse = |why: String| {
                let cure = "overwrite it with --force, or write to another file with -o";
                Err(PipelineError::Usage(format!("{}: {why}; {cure}", path.display())))
            };
            match recorded::compare(&path, config, &job, &mut model)? {
                ExistingVideo::Same if hdr_files::exist(config, &path, several) => !is_kept(&path),
                _ if force => false,
                ExistingVideo::Same => return refuse("its EXR frames or its 10-bit video are incomplete".into()),
                ExistingVideo::Differs(why) => return refuse(format!("is the video of another request: {why}")),
                ExistingVideo::NoSidecar => {
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

/// Warns if the compile cache cannot be written. This is no error, because its entries can still be read. Removes the
/// files that it creates for this.
pub(in crate::pipeline) fn check_cache(config: &Config) {
    if let Some(Err(error)) = config.compile_cache().map(|folder| atomic_file::check_writable(&folder.join("entry"))) {
        tracing::warn!(
            "runtime.compile_cache: {error}; programs that are not in the cache are compiled for this run only"
        );
    }
}

/// Checks, before the model is opened, that no output file would be overwritten and that all outputs can be written.
/// Removes the files that it creates for this.
pub(in crate::pipeline) fn check_places(config: &Config, videos: &RunVideos) -> Result<()> {
    check_outputs(config, videos)?;
    // A checkpoint that cannot be written causes only a warning during the run.
    let needed = output_paths(config, videos).into_iter().filter(|output| output.key != CHECKPOINT);
    needed.into_iter().try_for_each(|output| {
        let fail = |source| PipelineError::Output { key: output.key, source };
        atomic_file::check_writable(&output.first_file()).map_err(fail)
    })
}

/// Bytes that a run needs on one file system.
#[derive(Default)]
struct RequiredSpace {
    /// A folder on the file system. It need not exist yet.
    folder: PathBuf,
    /// The folder, or its nearest ancestor that exists.
    existing: PathBuf,
    keys: Vec<&'static str>,
    least: f64,
    likely: f64,
}

/// Rejects a run whose outputs need more space than a disk has, and warns if they are likely to need more. Must run
/// after [`check_places`].
pub(in crate::pipeline) fn check_room(
    config: &Config,
    videos: &RunVideos,
    requests: &[Request],
    sample_rate: usize,
) -> Result<()> {
    let mut disks: BTreeMap<u64, RequiredSpace> = BTreeMap::new();
    let several = videos.has_several();
    for ((path, request), job) in videos.outputs.iter().zip(requests).zip(&videos.jobs) {
        let frames = request.output_frames();
        let raw = if config.pipeline.extension() == "mp4" { 3 * request.width * request.height * frames } else { 0 };
        let raw = raw as f64;
        // Two channels with 16 bits per sample.
        let sound = 4.0 * sample_rate as f64 * frames as f64 / request.output_rate();
        let dump = videos.dump.iter().filter(|_| path.file_name().is_some());
        let dump = dump.map(|dump| OutputPath { key: "--dump", path: dump_path(dump, job, several) });
        for OutputPath { key, path } in of_video(config, path, several).into_iter().chain(dump) {
            let bytes = match key {
                "output.path" => MP4.map(|part| part * raw),
                FRAMES => PNG.map(|part| part * raw),
                EXR_FRAMES => EXR.map(|part| part * raw),
                "output.save_audio" => [sound; 2],
                // The decoded frames are dumped as f32; the other dumped tensors are small in comparison.
                "--dump" if request.decodes_video() => [4.0 * raw; 2],
                _ => continue,
            };
            // This output is itself a folder.
            let folder = if [FRAMES, EXR_FRAMES].contains(&key) { path.clone() } else { folder(&path) };
            let Some((disk, existing)) = device(&folder) else { continue };
            let room =
                disks.entry(disk).or_insert_with(|| RequiredSpace { folder, existing, ..RequiredSpace::default() });
            (room.least, room.likely) = (room.least + bytes[0], room.likely + bytes[1]);
            if !room.keys.contains(&key) {
                room.keys.push(key);
            }
        }
    }
    disks.into_values().try_for_each(|room| room.check())
}

/// Rejects an output file that needs more space than its disk has. `key`: the flag or argument that names it.
pub(crate) fn check_file_room(key: &'static str, path: &Path, bytes: u64) -> Result<()> {
    let folder = folder(path);
    let Some((_, existing)) = device(&folder) else { return Ok(()) };
    let bytes = bytes as f64;
    RequiredSpace { folder, existing, keys: vec![key], least: bytes, likely: bytes }.check()
}

impl RequiredSpace {
    fn check(&self) -> Result<()> {
        // Skip the check if the file system does not report its free space.
        let Some(free) = free_bytes(&self.existing) else { return Ok(()) };
        let free = free as f64;
        let (keys, mib) = (self.keys.join(", "), |bytes: f64| bytes / f64::from(1 << 20));
        let has = format!("{keys}: {} has {:.2} MiB free", self.folder.display(), mib(free));
        if free < self.least {
            let needs = format!("{has}, but the files to write there need at least {:.2} MiB", mib(self.least));
            return Err(PipelineError::NoRoom(format!("{needs}; free some space, or write to another disk")));
        }
        if free < self.likely {
            tracing::warn!("{has}, but the files to write there may need {:.2} MiB", mib(self.likely));
        }
        Ok(())
    }
}

/// Returns the free space of the file system that will contain a folder, in bytes. `None`: it is not reported.
pub(crate) fn free_space(folder: &Path) -> Option<u64> {
    free_bytes(&device(folder)?.1)
}

fn free_bytes(existing: &Path) -> Option<u64> {
    let about = rustix::fs::statvfs(existing).ok()?;
    Some(about.f_bavail.saturating_mul(about.f_frsize))
}

/// Returns the device number of the file system that contains a folder, and the folder or its nearest ancestor that
/// exists.
fn device(folder: &Path) -> Option<(u64, PathBuf)> {
    use std::os::unix::fs::MetadataExt;
    let folder = resolved(folder);
    folder.ancestors().find_map(|folder| Some((folder.metadata().ok()?.dev(), folder.to_path_buf())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::options::GenerateOptions;
    use super::*;

    /// Returns a configuration, and one video in `folder` for each of the file names `names`.
    fn run(folder: &Path, names: &[&str]) -> (Config, RunVideos) {
        let job = |index| Job { index, prompt: "a".into(), seed: 10 };
        let outputs = names.iter().map(|name| folder.join(name)).collect();
        (Config::default(), RunVideos { outputs, ..RunVideos::unwritten((0..names.len()).map(job).collect(), None) })
    }

    fn text(path: &Path) -> String {
        path.to_str().unwrap().into()
    }

    #[test]
    fn every_existing_output_is_rejected_with_key_and_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (mut config, mut videos) = run(folder.path(), &["a.mp4"]);
        config.output.save_audio = Some(text(&path("s.wav")));
        config.output.save_frames = Some(text(&path("frames")));
        (videos.options.dump, videos.options.perf_json) = (Some(path("d.safetensors")), Some(path("p.json")));
        videos.options.checkpoint_every = Some(1);
        check_outputs(&config, &videos).unwrap();
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
            let error = check_outputs(&config, &videos).unwrap_err().to_string();
            let named = if name.contains("frame_") { "frames" } else { name };
            let named = if name.contains("clip_") { "a.mp4.steps.safetensors" } else { named };
            assert!(error.starts_with(&format!("{key}: {} ", path(named).display())), "{name}: {error}");
            assert!(error.contains("--force"), "{name}: {error}");
            let force = GenerateOptions { force: true, ..videos.options.clone() };
            check_outputs(&config, &RunVideos { options: force, ..videos.clone() }).unwrap();
            std::fs::remove_file(path(name)).unwrap();
        }
        // The folder for frames may contain files that do not have the name of a frame.
        std::fs::write(path("frames/drawing.png"), "kept").unwrap();
        check_outputs(&config, &videos).unwrap();
    }

    /// A checkpoint records the output files of its run, but another program may have replaced the video or the sidecar
    /// since.
    #[test]
    fn resume_replaces_only_files_of_its_own_run() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (mut config, mut videos) = run(folder.path(), &["a.mp4"]);
        (config.output.save_audio, videos.options.resume) = (Some(text(&path("s.wav"))), true);
        let about = serde_json::to_string(&files(&config, &videos)).unwrap();
        let about = [("outputs".to_string(), about)].into();
        crate::pipeline::output::tensors::write_with(&path("a.mp4.steps.safetensors"), &[], Some(about), true).unwrap();
        std::fs::write(path("s.wav"), "of the run").unwrap();
        check_outputs(&config, &videos).unwrap();
        let replaceable = replaceable(&config, &videos);
        assert!(replaceable.has(&path("s.wav")) && !replaceable.has(&path("a.mp4")), "{replaceable:?}");
        for (key, name) in [("output.path", "a.mp4"), ("output.sidecar", "a.json")] {
            std::fs::write(path(name), "another program's").unwrap();
            let error = check_outputs(&config, &videos).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{key}: ")) && error.contains("--force"), "{error}");
            std::fs::remove_file(path(name)).unwrap();
        }
        let sidecar = serde_json::json!({"config": config.effective("a", 10)});
        std::fs::write(path("a.json"), sidecar.to_string()).unwrap();
        std::fs::write(path("a.mp4"), "of the run").unwrap();
        check_outputs(&config, &videos).unwrap();
        videos.options.resume = false;
        assert!(!super::replaceable(&config, &videos).has(&path("a.mp4")));
    }

    #[test]
    fn outputs_of_each_video_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (mut config, mut videos) = run(folder.path(), &["0000_10.mp4", "0001_10.mp4"]);
        config.output.save_audio = Some(text(&path("sounds")));
        videos.options.dump = Some(path("d.safetensors"));
        check_outputs(&config, &videos).unwrap();
        std::fs::create_dir(path("sounds")).unwrap();
        for name in ["d_0001.safetensors", "sounds/0001_10.wav", "0001_10.json"] {
            std::fs::write(path(name), "kept").unwrap();
            let error = check_outputs(&config, &videos).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
            std::fs::remove_file(path(name)).unwrap();
        }
        // A process that writes nothing has empty paths, which are not checked.
        std::fs::write(path("d_0001.safetensors"), "kept").unwrap();
        videos.outputs = vec![PathBuf::new(); 2];
        check_outputs(&config, &videos).unwrap();
    }

    #[test]
    fn two_outputs_must_be_different_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let refused = |change: &dyn Fn(&mut Config, &mut RunVideos)| {
            let (mut config, mut videos) = run(folder.path(), &["a.mp4"]);
            videos.options.force = true;
            change(&mut config, &mut videos);
            check_outputs(&config, &videos).unwrap_err().to_string()
        };
        let error = refused(&|_, videos| videos.options.perf_json = Some(path("a.json")));
        assert!(error.starts_with("output.sidecar and --perf-json write to the same place"), "{error}");
        let error = refused(&|config, _| config.output.save_audio = Some(text(&path("new/../a.mp4"))));
        assert!(error.starts_with("output.path and output.save_audio"), "{error}");
        let error = refused(&|config, _| config.output.save_frames = Some(text(&path("a.mp4/frames"))));
        assert!(error.starts_with("output.path and output.save_frames"), "{error}");
        let error = refused(&|_, videos| {
            videos.options.checkpoint_every = Some(1);
            videos.options.dump = Some(path("a.mp4.steps.safetensors"));
        });
        assert!(error.starts_with("--dump and --checkpoint-every"), "{error}");
        // A video and a WAV file with the same stem would have the same sidecar.
        let (config, videos) = run(folder.path(), &["x.mp4", "x.wav"]);
        assert!(check_outputs(&config, &videos).unwrap_err().to_string().starts_with("output.sidecar write"));
        std::fs::write(path("a.json"), "the sidecar of a.wav").unwrap();
        let (config, videos) = run(folder.path(), &["a.mp4"]);
        assert!(check_outputs(&config, &videos).unwrap_err().to_string().starts_with("output.sidecar: "));
        // The folder for frames may be the folder of the video.
        let (mut config, videos) = run(&path("out"), &["a.mp4"]);
        config.output.save_frames = Some(text(&path("out")));
        check_outputs(&config, &videos).unwrap();
    }
}
