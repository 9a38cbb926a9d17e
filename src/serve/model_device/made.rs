//! A video that is made, on its way to its files.

use std::io;
use std::path::Path;

use serde_json::Value;

use super::super::descriptors::is_caused_by_exhaustion;
use super::super::device::Made;
use super::super::error::Failure;
use super::super::job::Produced;
use super::{Config, PipelineError, failures, one_line, thumbnails};
use crate::media::{self, WavFormat, write_atomically};
use crate::pipeline::options::GenerateOptions;
use crate::pipeline::writer::{Made as Written, Written as Finished};

/// A video with all that its files say.
pub(super) struct ModelMade {
    written: Written,
    config: Config,
    warnings: Vec<String>,
    /// The MP4 and its figures, once they are written: a later attempt writes the other files only.
    finished: Option<Finished>,
}

/// Writer of a file beside a video.
type WriteFile<'a> = &'a dyn Fn() -> Result<(), PipelineError>;

impl ModelMade {
    pub(super) fn new(mut written: Written, config: Config, mut warnings: Vec<String>) -> Self {
        let cut = written.generated.cut_tokens;
        if cut > 0 {
            warnings.push(format!("the prompt is too long: {cut} of its tokens were cut"));
        }
        if let Some(Value::Object(sidecar)) = written.sidecar.as_mut().filter(|_| !warnings.is_empty()) {
            sidecar.insert("warnings".into(), warnings.clone().into());
        }
        ModelMade { written, config, warnings, finished: None }
    }

    /// Writes the MP4 and its sidecar, then the files that only show or repeat what it has. A full disk is an error, as is a lack of
    /// open files; whatever else
    /// fails after the MP4 costs that file alone.
    fn write_all(&mut self, folder: &Path) -> Result<&Finished, PipelineError> {
        self.written.path = folder.join("video.mp4");
        let finished = match self.finished.take() {
            Some(finished) => finished,
            None => {
                let (finished, failed) = self.written.write(&self.config, &GenerateOptions::default()).parts();
                match (finished, failed) {
                    (Some(finished), None) => finished,
                    (Some(finished), Some(error)) if !is_passing(&error) => {
                        tracing::error!("{}", one_line(&error));
                        finished
                    }
                    (_, Some(error)) => return Err(error),
                    (None, None) => {
                        return Err(PipelineError::Bug("a video was neither written nor did it fail".into()));
                    }
                }
            }
        };
        let finished = self.finished.insert(finished);
        let (generated, has_audio) = (&self.written.generated, self.config.output.audio);
        let thumbnail = || Ok(write_atomically(&folder.join("thumb.jpg"), &thumbnails::thumbnail(&generated.frames)?)?);
        let sprites =
            || Ok(write_atomically(&folder.join("sprite.jpg"), &thumbnails::sprite_sheet(&generated.frames)?)?);
        let sound = || Ok(media::write_wav(&folder.join("audio.wav"), &generated.file_sound()?, WavFormat::Pcm16)?);
        let sound = || if has_audio { sound() } else { Ok(()) };
        let files: [(&str, WriteFile); 3] =
            [("thumb.jpg", &thumbnail), ("sprite.jpg", &sprites), ("audio.wav", &sound)];
        for (name, write) in files {
            match write() {
                Err(error) if is_passing(&error) => return Err(error),
                Err(error) => tracing::error!("{name}: {}", one_line(&error)),
                Ok(()) => {}
            }
        }
        Ok(finished)
    }
}

impl Made for ModelMade {
    fn keep(&mut self, folder: &Path) {
        self.written.path = folder.join("video.mp4");
        self.written.keep_beside();
    }

    fn write(&mut self, folder: &Path) -> Result<Produced, Failure> {
        let Finished { video, figures, .. } = self.write_all(folder).map_err(|error| failure(&error))?;
        let (frames_sha256, samples_sha256) = (video.frames_sha256.clone(), video.samples_sha256.clone());
        let timings = without_line(figures.clone());
        let generated = &self.written.generated;
        let frames = &generated.frames;
        let bytes = ["video.mp4", "video.json", "thumb.jpg", "sprite.jpg", "audio.wav"];
        let bytes = bytes.iter().filter_map(|name| Some(folder.join(name).metadata().ok()?.len())).sum();
        Ok(Produced {
            width: frames.width(),
            height: frames.height(),
            num_frames: frames.count(),
            fps: generated.frame_rate,
            bytes,
            frames_sha256,
            samples_sha256,
            timings,
            warnings: self.warnings.clone(),
        })
    }
}

/// Figures without what only the sidecar has.
fn without_line(mut figures: Value) -> Value {
    if let Value::Object(all) = &mut figures {
        ["timeline", "programs"].iter().for_each(|key| drop(all.remove(*key)));
    }
    figures
}

/// Whether a disk has no room, or the process no open file left: a later attempt may go through.
fn is_passing(error: &PipelineError) -> bool {
    is_full(error) || is_caused_by_exhaustion(error)
}

/// Whether a disk has no room.
fn is_full(error: &PipelineError) -> bool {
    let is_full = |kind: io::ErrorKind| matches!(kind, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    match error {
        PipelineError::Media(media::Error::Io { source, .. }) => is_full(source.kind()),
        // Its own words are all that ffmpeg leaves.
        PipelineError::Media(media::Error::Ffmpeg { tail, .. }) => tail.contains("No space left"),
        _ => false,
    }
}

fn failure(error: &PipelineError) -> Failure {
    if is_full(error) {
        return Failure::new("storage_full", "the disk is full");
    }
    if is_caused_by_exhaustion(error) {
        return Failure::out_of_files();
    }
    tracing::error!("{}", one_line(error));
    Failure::new("internal", failures::told(error))
}
