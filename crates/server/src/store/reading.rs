//! Reads stored jobs at startup.

use std::io;
use std::path::Path;

use ltx2_media as media;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::folder::{Folder, TEMPORARY};
use super::{STEPS, StoredJob, Variant};
use crate::id::VideoId;
use crate::job::{AcceptedJob, JobState, Record, VideoProperties};

/// File that contains the accepted request.
pub(super) const REQUEST: &str = "request.json";
/// File that contains the latest state.
pub(super) const RECORD: &str = "job.json";
/// File that contains the ids of the jobs in the batch, in order.
pub(super) const ORDER: &str = "order.json";
/// Prefix of the folder of a job whose creation has not been acknowledged to the client.
pub(super) const NEW: &str = ".new-";

/// Reads a job. Returns the job with its size on disk in bytes, or the reason why it cannot be read.
pub(super) fn read_job(jobs: &Folder, path: &Path, name: &str) -> Result<(StoredJob, u64), String> {
    let id = VideoId::parse(name).ok_or("its folder name is not a video id")?;
    let folder = jobs.child(name).map_err(|error| error.to_string())?;
    drop_temporaries(&folder);
    let accepted: AcceptedJob = json(&folder, REQUEST)?.ok_or("no request.json")?;
    if accepted.id != id {
        return Err(format!("request.json contains the id {} of another job", accepted.id));
    }
    let record = json(&folder, RECORD)?.unwrap_or_else(Record::queued);
    // If the record of the batch is damaged, the job runs alone, because the job itself is complete.
    let order = json(&folder, ORDER).ok().flatten().unwrap_or_default();
    let produced = (record.state == JobState::InProgress)
        .then(|| produced(&folder, &path.join(name), accepted.config.summary().has_audio));
    let produced = produced.flatten();
    let bytes = folder.bytes();
    Ok((StoredJob { accepted, record, order, has_steps: folder.has_file(STEPS), produced }, bytes))
}

/// Removes incomplete files that an earlier process left behind.
pub(super) fn drop_temporaries(folder: &Folder) {
    let names = folder.names().into_iter().flatten().filter_map(|name| name.into_string().ok());
    for name in names.filter(|name| name.starts_with(TEMPORARY)) {
        drop(folder.unlink(&name));
    }
}

fn json<T: DeserializeOwned>(folder: &Folder, name: &str) -> Result<Option<T>, String> {
    match folder.read(name) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| format!("{name}: {error}")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

/// Returns the video if all its files exist. A file gets its final name only when it is complete.
fn produced(folder: &Folder, path: &Path, has_audio: bool) -> Option<VideoProperties> {
    let sidecar: Value = json(folder, Variant::Sidecar.file()).ok().flatten()?;
    let hash = |of: &str| sidecar["sha256"][of].as_str().map(str::to_string);
    let is_absent = |variant: Variant| match variant {
        Variant::Audio => !has_audio,
        Variant::Exr => hash("hdr").is_none(),
        // Not every ffmpeg can encode it.
        Variant::HdrVideo => true,
        Variant::Video | Variant::Thumbnail | Variant::Spritesheet | Variant::Sidecar => false,
    };
    if !Variant::each().all(|variant| folder.has_file(variant.file()) || is_absent(variant)) {
        return None;
    }
    // This program wrote the file, so the MP4 header can be read without ffmpeg.
    let clip = media::probe_clip(&path.join(Variant::Video.file()), Path::new("ffmpeg")).ok()?;
    let size =
        |variant: Variant| folder.stat(variant.file()).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
    let mut timings = sidecar["timings"].clone();
    if let Value::Object(all) = &mut timings {
        // Only the sidecar keeps these two keys.
        ["timeline", "programs"].iter().for_each(|key| drop(all.remove(*key)));
    }
    Some(VideoProperties {
        width: clip.width,
        height: clip.height,
        num_frames: clip.frames,
        fps: clip.frame_rate?,
        bytes: Variant::each().map(size).sum(),
        frames_sha256: hash("frames")?,
        samples_sha256: hash("samples")?,
        timings,
        enhanced_prompt: match &sidecar["enhancement"] {
            Value::Null => None,
            _ => sidecar["config"]["request"]["prompt"].as_str().map(String::from),
        },
        warnings: match &sidecar["warnings"] {
            Value::Null => Vec::new(),
            warnings => serde_json::from_value(warnings.clone()).ok()?,
        },
    })
}
