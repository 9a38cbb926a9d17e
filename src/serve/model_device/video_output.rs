//! A generated video, and the files that are written for it.

use std::panic::resume_unwind;
use std::path::Path;
use std::thread;

use serde_json::Value;

use super::super::descriptors::is_caused_by_exhaustion;
use super::super::device::GeneratedVideo;
use super::super::error::Failure;
use super::super::job::VideoProperties;
use super::super::store::{self, Variant};
use super::{Config, PipelineError, failures, one_line, thumbnails};
use crate::atomic_file::{FileError, write_atomically};
use crate::config::HdrVideo;
use crate::media::{self, WavFormat};
use crate::pipeline::output::writer::{UnwrittenVideo, WrittenVideo};
use crate::pipeline::plan::videos::RunVideos;
use crate::threads;

/// A generated video with everything that is needed to write its files.
pub(super) struct ModelVideo {
    written: UnwrittenVideo,
    config: Config,
    warnings: Vec<String>,
    /// `None`: the prompt was not enhanced.
    enhanced_prompt: Option<String>,
    /// The written MP4; `None` until it is written. If it is set, later attempts write only the other files.
    finished: Option<WrittenVideo>,
}

type WriteFile<'a> = &'a (dyn Fn() -> Result<(), PipelineError> + Sync);

impl ModelVideo {
    pub(super) fn new(mut written: UnwrittenVideo, config: Config, mut warnings: Vec<String>) -> Self {
        let cut = written.generated.cut_tokens;
        if cut > 0 {
            warnings.push(format!("the prompt is too long; {cut} tokens were dropped"));
        }
        if let Some(Value::Object(sidecar)) = written.sidecar.as_mut().filter(|_| !warnings.is_empty()) {
            sidecar.insert("warnings".into(), warnings.clone().into());
        }
        let is_enhanced = written.sidecar.as_ref().is_some_and(|sidecar| sidecar.get("enhancement").is_some());
        let enhanced_prompt = is_enhanced.then(|| written.job.prompt.clone());
        ModelVideo { written, config, warnings, enhanced_prompt, finished: None }
    }

    /// Writes the MP4 with its sidecar, and then the files that are derived from the video. Fails if the disk is full
    /// or the process is out of file descriptors. Once the MP4 is written, any other error is logged, and only the file
    /// that it concerns is missing.
    fn write_all(&mut self, folder: &Path) -> Result<&WrittenVideo, PipelineError> {
        self.written.path = folder.join("video.mp4");
        let frames = self.written.generated.frames.clone();
        // The images are made while the video is encoded, so that the client does not wait for them.
        let (finished, images) = thread::scope(|scope| {
            let images = scope.spawn(|| (thumbnails::thumbnail(&frames), thumbnails::sprite_sheet(&frames)));
            (self.write_video(), images.join())
        });
        let finished = self.finished.insert(finished?);
        let (thumbnail, sprites) = images.unwrap_or_else(|panic| resume_unwind(panic));
        let sound = self.config.output.audio.then(|| self.written.generated.file_sound());
        let image = |name: &str, jpeg: &Result<Vec<u8>, PipelineError>| match jpeg {
            Ok(jpeg) => Ok(write_atomically(&folder.join(name), jpeg)?),
            Err(error) => Err(PipelineError::Bug(one_line(error))),
        };
        let write_sound = || match &sound {
            Some(Ok(sound)) => Ok(media::write_wav(&folder.join("audio.wav"), sound, WavFormat::Pcm16)?),
            Some(Err(error)) => Err(PipelineError::Bug(one_line(error))),
            None => Ok(()),
        };
        let files: [(&str, WriteFile); 3] = [
            ("thumb.jpg", &|| image("thumb.jpg", &thumbnail)),
            ("sprite.jpg", &|| image("sprite.jpg", &sprites)),
            ("audio.wav", &write_sound),
        ];
        // In parallel, because each write waits for the disk twice.
        let written = threads::in_order(&files, files.len(), |(_, write)| write());
        for ((name, _), written) in files.iter().zip(written) {
            match written {
                Err(error) if is_transient(&error) => return Err(error),
                Err(error) => tracing::error!("{name}: {}", one_line(&error)),
                Ok(()) => {}
            }
        }
        Ok(finished)
    }

    /// Returns warnings about the files of HDR video that could not be written; the log has the reasons.
    fn missing_hdr_files(&self, folder: &Path) -> impl Iterator<Item = String> {
        let is_missing = |variant: Variant| !folder.join(variant.file()).exists();
        let has_video = self.config.output.hdr_video != Some(HdrVideo::None);
        let missing = [
            (has_video && is_missing(Variant::HdrVideo), "the server's ffmpeg cannot encode the 10-bit video"),
            (is_missing(Variant::Exr), "the EXR frames could not be written"),
        ];
        let is_hdr = self.written.generated.hdr.is_some();
        missing.into_iter().filter(move |(is_missing, _)| is_hdr && *is_missing).map(|(_, why)| why.into())
    }

    /// Writes the MP4 with its sidecar, unless an earlier attempt has written them.
    fn write_video(&mut self) -> Result<WrittenVideo, PipelineError> {
        match self.finished.take() {
            Some(finished) => Ok(finished),
            None => {
                let (finished, failed) = self.written.write(&self.config, &RunVideos::default()).parts();
                match (finished, failed) {
                    (Some(finished), None) => Ok(finished),
                    (Some(finished), Some(error)) if !is_transient(&error) => {
                        tracing::error!("{}", one_line(&error));
                        Ok(finished)
                    }
                    (_, Some(error)) => Err(error),
                    (None, None) => {
                        Err(PipelineError::Bug("writing a video returned neither a result nor an error".into()))
                    }
                }
            }
        }
    }
}

impl GeneratedVideo for ModelVideo {
    fn keep(&mut self, folder: &Path) {
        self.written.path = folder.join("video.mp4");
        self.written.save_next_to_video();
    }

    fn write(&mut self, folder: &Path) -> Result<VideoProperties, Failure> {
        let WrittenVideo { video, figures, .. } = self.write_all(folder).map_err(|error| failure(&error))?;
        let (frames_sha256, samples_sha256) = (video.frames_sha256.clone(), video.samples_sha256.clone());
        let timings = without_timeline(figures.clone());
        let generated = &self.written.generated;
        let frames = &generated.frames;
        let files = Variant::each().map(|variant| folder.join(variant.file()));
        let bytes = files.filter_map(|path| Some(path.metadata().ok()?.len())).sum();
        let warnings = self.warnings.iter().cloned().chain(self.missing_hdr_files(folder)).collect();
        Ok(VideoProperties {
            width: frames.width(),
            height: frames.height(),
            num_frames: frames.count(),
            fps: generated.frame_rate,
            bytes,
            frames_sha256,
            samples_sha256,
            timings,
            enhanced_prompt: self.enhanced_prompt.clone(),
            warnings,
        })
    }
}

/// Removes the timings that only the sidecar contains.
fn without_timeline(mut figures: Value) -> Value {
    if let Value::Object(all) = &mut figures {
        ["timeline", "programs"].iter().for_each(|key| drop(all.remove(*key)));
    }
    figures
}

/// Returns whether the disk is full or the process is out of file descriptors, so that a later attempt may succeed.
fn is_transient(error: &PipelineError) -> bool {
    is_full(error) || is_caused_by_exhaustion(error)
}

fn is_full(error: &PipelineError) -> bool {
    match error {
        PipelineError::Write(FileError { source, .. })
        | PipelineError::Media(media::MediaError::File(FileError { source, .. })) => store::is_full(source),
        // ffmpeg reports a full disk only in its text output.
        PipelineError::Media(media::MediaError::Ffmpeg { tail, .. }) => {
            ["No space left", "Disk quota exceeded", "File too large"].iter().any(|words| tail.contains(words))
        }
        _ => false,
    }
}

fn failure(error: &PipelineError) -> Failure {
    if is_full(error) {
        return Failure::new("storage_full", "the server's disk is full: delete videos, or try again later");
    }
    if is_caused_by_exhaustion(error) {
        return Failure::out_of_files();
    }
    tracing::error!("{}", one_line(error));
    Failure::new("internal", failures::client_message(error))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn full_disk_quota_and_file_size_limit_become_storage_full() {
        let path = || Path::new("video.mp4").to_path_buf();
        for (kind, words) in [
            (io::ErrorKind::StorageFull, "No space left on device"),
            (io::ErrorKind::QuotaExceeded, "Disk quota exceeded"),
            (io::ErrorKind::FileTooLarge, "File too large"),
        ] {
            let write = media::MediaError::io("write", &path())(kind.into());
            let ffmpeg =
                media::MediaError::Ffmpeg { path: path(), status: "exit status: 1".into(), tail: words.into() };
            for error in [write, ffmpeg] {
                let failure = failure(&error.into());
                assert_eq!((failure.code.as_str(), failure.is_transient()), ("storage_full", true), "{words}");
            }
        }
        let other = media::MediaError::io("write", &path())(io::ErrorKind::PermissionDenied.into());
        assert_eq!(failure(&other.into()).code, "internal");
    }
}
