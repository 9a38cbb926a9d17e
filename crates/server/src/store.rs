//! Persistent storage of jobs, with one folder for each job.
//!
//! ```text
//! STATE/  lock  format  reserve  trash/  damaged/  tmp/  inputs/SHA256.EXT
//!   jobs/video_01k9…/  request.json  job.json  order.json  steps.safetensors  video.mp4  video.json  thumb.jpg  sprite.jpg  audio.wav
//!       video_hdr.mp4  video_exr.zip
//!       video.mp4.kept.safetensors  video.mp4.kept.latents.safetensors
//! ```

mod files;
mod folder;
mod reading;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::PathBuf;

use super::descriptors::{busy, is_exhausted};
use super::error::ApiError;
use super::id::VideoId;
use super::job::{AcceptedJob, Record, VideoProperties};

pub use files::FileStore;
pub use files::job_folder;

/// Step checkpoint of a running batch, stored in the folder of the batch's first job.
pub const STEPS: &str = "steps.safetensors";

/// Results of a video that could not be written, saved in its job's folder: the latents if decoding failed, the frames
/// if writing failed. They are removed with the job, or when a later attempt succeeds.
pub const KEPT: [&str; 2] = ["video.mp4.kept.latents.safetensors", "video.mp4.kept.safetensors"];

/// File of a job that clients can download.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    /// The MP4 video.
    Video,
    /// A JPEG image of one frame.
    Thumbnail,
    /// A JPEG image with several frames.
    Spritesheet,
    /// The JSON sidecar.
    Sidecar,
    /// The sound as WAV.
    Audio,
    /// The 10-bit video of an HDR video.
    HdrVideo,
    /// The EXR frames of an HDR video as a ZIP file.
    Exr,
}

impl Variant {
    /// API name, file name and media type of each variant.
    const ALL: [(Variant, &str, &str, &str); 7] = [
        (Variant::Video, "video", "video.mp4", "video/mp4"),
        (Variant::Thumbnail, "thumbnail", "thumb.jpg", "image/jpeg"),
        (Variant::Spritesheet, "spritesheet", "sprite.jpg", "image/jpeg"),
        (Variant::Sidecar, "sidecar", "video.json", "application/json"),
        (Variant::Audio, "audio", "audio.wav", "audio/wav"),
        (Variant::HdrVideo, "hdr_video", "video_hdr.mp4", "video/mp4"),
        (Variant::Exr, "exr", "video_exr.zip", "application/zip"),
    ];

    /// Returns the variant with this API name.
    pub fn named(name: &str) -> Option<Self> {
        Variant::ALL.iter().find(|(_, own, ..)| *own == name).map(|(variant, ..)| *variant)
    }

    /// Returns an iterator over all variants.
    pub fn each() -> impl Iterator<Item = Self> {
        Variant::ALL.iter().map(|(variant, ..)| *variant)
    }

    fn row(self) -> (&'static str, &'static str, &'static str) {
        let (_, name, file, media_type) = Variant::ALL[self as usize];
        (name, file, media_type)
    }

    /// Returns the name of the variant in the API.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// Returns the name of the file in the job's folder.
    pub fn file(self) -> &'static str {
        self.row().1
    }

    /// Returns the media type (MIME type) of the file.
    pub fn media_type(self) -> &'static str {
        self.row().2
    }
}

/// A job as it is loaded at startup.
#[derive(Clone, Debug)]
pub struct StoredJob {
    /// The request.
    pub accepted: AcceptedJob,
    /// The state.
    pub record: Record,
    /// Ids of all jobs in the batch that this job ran in, in batch order.
    pub order: Vec<VideoId>,
    /// Whether the job's folder contains a step checkpoint.
    pub has_steps: bool,
    /// The video, if all its files are complete although the job is recorded as running.
    pub produced: Option<VideoProperties>,
}

/// Disk usage of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Size of all jobs and input files, in bytes.
    pub bytes: u64,
    /// Free space on the disk, in bytes.
    pub free: u64,
}

/// Durable store of jobs. Once a call has returned, its effect survives a crash.
pub trait JobStore: Send + Sync {
    /// Stores a new job in the state `queued`.
    ///
    /// # Errors
    /// Returns an error if the disk is full or another I/O error occurs. No files of the job remain.
    fn create(&self, accepted: &AcceptedJob) -> io::Result<()>;

    /// Stores the new state of a job.
    ///
    /// # Errors
    /// Returns an error if the disk is full or another I/O error occurs. The previous state then remains.
    fn transition(&self, id: &VideoId, record: &Record) -> io::Result<()>;

    /// Stores which jobs start together as a batch. The record becomes durable with the state transitions of the jobs.
    ///
    /// # Errors
    /// Same as [`JobStore::transition`].
    fn begin(&self, members: &[VideoId]) -> io::Result<()>;

    /// Removes a job: moves its folder to the trash, where the files are deleted in the background.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be moved.
    fn remove(&self, id: &VideoId) -> io::Result<()>;

    /// Returns all jobs, sorted by id. Logs jobs that cannot be read and moves them to `damaged`.
    ///
    /// # Errors
    /// Returns an error if a folder cannot be read.
    fn load_all(&self) -> io::Result<Vec<StoredJob>>;

    /// Returns how much disk space is used and free.
    fn usage(&self) -> Usage;

    /// Frees the disk reserve if `free` is true, so that states can be recorded on a full disk; otherwise allocates the
    /// reserve again.
    fn give_reserve(&self, free: bool);

    /// Removes the step checkpoint and the record of the batch from a job's folder and, unless `keep_video`, also the
    /// video's files.
    fn forget_run(&self, id: &VideoId, keep_video: bool);

    /// Removes input files that are not in `used` and were not stored recently.
    fn sweep(&self, used: &BTreeSet<String>);

    /// Opens a file of a job without following symbolic links.
    ///
    /// # Errors
    /// Returns an error if the file does not exist or is not a regular file.
    fn open(&self, id: &VideoId, variant: Variant) -> io::Result<File>;

    /// Returns the folder of a job's files.
    fn folder(&self, id: &VideoId) -> PathBuf;
}

/// Returns whether an error means that the disk is full or a quota or the file size limit (`ulimit -f`) is reached.
pub fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// Returns the error for a full disk.
pub fn no_room() -> ApiError {
    ApiError::new(507, "insufficient_storage", "the server's disk is full: delete videos, or try again later")
        .should_retry(false)
}

/// Converts a write error into a response. `what` names the data that the server cannot store.
pub fn unstored(error: &io::Error, what: &str) -> ApiError {
    match error {
        error if is_full(error) => no_room(),
        error if is_exhausted(error) => busy(),
        _ => ApiError::new(500, "internal", format!("the server cannot store {what}")),
    }
}
