//! Jobs on disk: a folder each.
//!
//! ```text
//! STATE/  lock  format  reserve  trash/  damaged/  tmp/  inputs/SHA256.EXT
//!   jobs/video_01k9…/  request.json  job.json  order.json  steps.safetensors  video.mp4  video.json  thumb.jpg  sprite.jpg  audio.wav
//!                      video.mp4.kept.safetensors  video.mp4.kept.latents.safetensors
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

use super::id::VideoId;
use super::job::{Accepted, Produced, Record};

pub use files::FileStore;
pub(super) use files::job_folder;

/// File of the steps behind a running batch, in the folder of its first job.
pub const STEPS: &str = "steps.safetensors";

/// Files of results whose video could not be written, in its job's folder: after a failed decoder, and after a failed writer. They go
/// with the job, or when another attempt completes it.
pub const KEPT: [&str; 2] = ["video.mp4.kept.latents.safetensors", "video.mp4.kept.safetensors"];

/// A file of a job that clients may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Variant {
    Video,
    Thumbnail,
    Spritesheet,
    Sidecar,
    Audio,
}

impl Variant {
    /// Each with the name that clients give it, its file, and its type.
    const ALL: [(Variant, &str, &str, &str); 5] = [
        (Variant::Video, "video", "video.mp4", "video/mp4"),
        (Variant::Thumbnail, "thumbnail", "thumb.jpg", "image/jpeg"),
        (Variant::Spritesheet, "spritesheet", "sprite.jpg", "image/jpeg"),
        (Variant::Sidecar, "sidecar", "video.json", "application/json"),
        (Variant::Audio, "audio", "audio.wav", "audio/wav"),
    ];

    /// The variant of that name.
    pub fn named(name: &str) -> Option<Self> {
        Variant::ALL.iter().find(|(_, own, ..)| *own == name).map(|(variant, ..)| *variant)
    }

    /// All of them.
    pub fn each() -> impl Iterator<Item = Self> {
        Variant::ALL.iter().map(|(variant, ..)| *variant)
    }

    fn row(self) -> (&'static str, &'static str, &'static str) {
        let (_, name, file, media_type) = Variant::ALL[self as usize];
        (name, file, media_type)
    }

    /// The name that clients give it.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// Its file in the job's folder.
    pub fn file(self) -> &'static str {
        self.row().1
    }

    /// Its media type.
    pub fn media_type(self) -> &'static str {
        self.row().2
    }
}

/// A job as it was found at the start.
#[derive(Clone, Debug)]
pub struct Stored {
    pub accepted: Accepted,
    pub record: Record,
    /// Ids of the batch it ran in, itself included, in order.
    pub order: Vec<VideoId>,
    /// Whether there are steps to go on from.
    pub has_steps: bool,
    /// The video, where all files of a finished one are there though nothing says that it is finished.
    pub produced: Option<Produced>,
}

/// Bytes of the store and of its disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of all jobs and inputs.
    pub bytes: u64,
    /// Free on the disk.
    pub free: u64,
}

/// Keeps jobs. What a call has returned from survives a crash.
pub trait JobStore: Send + Sync {
    /// Keeps a new job, in state queued.
    ///
    /// # Errors
    /// A full disk, or any other; then nothing of it is left.
    fn create(&self, accepted: &Accepted) -> io::Result<()>;

    /// Keeps a job's state.
    ///
    /// # Errors
    /// As [`JobStore::create`]; the state before is still there.
    fn transition(&self, id: &VideoId, record: &Record) -> io::Result<()>;

    /// Keeps the batch that a job begins with; it survives a crash once the members' transitions do.
    ///
    /// # Errors
    /// As [`JobStore::transition`].
    fn begin(&self, members: &[VideoId]) -> io::Result<()>;

    /// Removes a job with all its files; what takes long is done later.
    ///
    /// # Errors
    /// A folder that cannot be moved.
    fn remove(&self, id: &VideoId) -> io::Result<()>;

    /// All jobs, by id; those that cannot be read are moved aside, with a line in the log.
    ///
    /// # Errors
    /// A folder that cannot be read.
    fn load_all(&self) -> io::Result<Vec<Stored>>;

    /// Bytes taken and free.
    fn usage(&self) -> Usage;

    /// Frees what is kept for the case that the disk is full, so that states can be recorded; takes it again where there is room.
    fn give_reserve(&self, free: bool);

    /// Removes what only a run needs: its steps and its order; and what was written of a video that is not kept.
    fn forget_run(&self, id: &VideoId, keep_video: bool);

    /// Removes given files that are not in use and not new.
    fn sweep(&self, used: &BTreeSet<String>);

    /// A file of a job. No link is followed.
    ///
    /// # Errors
    /// One that is not there, or no plain file.
    fn open(&self, id: &VideoId, variant: Variant) -> io::Result<File>;

    /// Folder of a job's files.
    fn folder(&self, id: &VideoId) -> PathBuf;
}

/// Whether an error says that the disk is full.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
