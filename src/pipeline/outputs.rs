//! Files that a run will write, tried before it does any work: places that cannot be written to, disks without the room.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::error::{PipelineError, Result};
use super::options::GenerateOptions;
use super::writer::{dump_path, place_of};
use crate::config::{Config, sidecar_path};
use crate::media::{self, png_frame_path};
use crate::request::Request;

/// Parts of a raw frame's bytes that an encoder needs for a black video, and that it likely does.
const MP4: [f64; 2] = [0.00003, 0.02];
const PNG: [f64; 2] = [0.001, 0.5];

/// A file, or the first of a folder's.
struct Output {
    /// Key or flag that asks for it.
    key: &'static str,
    path: PathBuf,
}

/// Files of the video `path`; none of a process that writes nothing, whose paths are empty.
fn of_video(config: &Config, path: &Path, several: bool) -> Vec<Output> {
    if path.file_name().is_none() {
        return Vec::new();
    }
    let place = |asked: &Option<String>, end| asked.as_ref().map(|asked| place_of(asked, path, end, several));
    let frames = place(&config.output.save_frames, "").map(|folder| png_frame_path(&folder, 0));
    let all = [
        ("output.path", Some(path.to_path_buf())),
        ("output.sidecar", config.output.sidecar.then(|| sidecar_path(path))),
        ("output.save_frames", frames),
        ("output.save_audio", place(&config.output.save_audio, "wav")),
    ];
    all.into_iter().filter_map(|(key, path)| Some(Output { key, path: path? })).collect()
}

/// Finds files that cannot be written before the model is opened. A cache that can only be read is a warning: what is there is used.
///
/// # Errors
/// A folder in a file's place, or one that cannot be made or written to, with the key that asks for it.
pub(super) fn check_places(config: &Config, options: &GenerateOptions) -> Result<()> {
    if let Some(Err(error)) = config.compile_cache().map(|folder| media::check_writable(&folder.join("entry"))) {
        tracing::warn!("runtime.compile_cache: {error}: what is not there is compiled for this run alone");
    }
    let several = options.has_several();
    let videos = options.outputs.iter().flat_map(|path| of_video(config, path, several));
    let dumps = options.dump.iter().flat_map(|dump| options.jobs.iter().map(|job| dump_path(dump, job, several)));
    let dumps = dumps.map(|path| Output { key: "--dump", path });
    let times = options.perf_json.iter().map(|path| Output { key: "--perf-json", path: path.clone() });
    videos.chain(dumps).chain(times).try_for_each(|Output { key, path }| {
        let fail = |source| PipelineError::Output { key, source };
        media::check_writable(&path).map_err(fail)
    })
}

/// Bytes on one file system.
#[derive(Default)]
struct Room {
    /// A folder on it.
    folder: PathBuf,
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
                "output.save_frames" => PNG.map(|part| part * raw),
                "output.save_audio" => [sound; 2],
                // Frames that are decoded, in f32; what else is dumped is small beside them.
                "--dump" if request.decodes_video() => [4.0 * raw; 2],
                _ => continue,
            };
            let Some(folder) = path.parent() else { continue };
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            let Some(disk) = device(folder) else { continue };
            let room = disks.entry(disk).or_insert_with(|| Room { folder: folder.into(), ..Room::default() });
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
        let Ok(about) = rustix::fs::statvfs(&self.folder) else { return Ok(()) };
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

/// The file system of a folder that is there.
fn device(folder: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    Some(folder.metadata().ok()?.dev())
}
