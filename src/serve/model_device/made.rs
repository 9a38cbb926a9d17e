//! A video that is made, on its way to its files.

use std::io;
use std::path::Path;

use serde_json::Value;

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
}

impl ModelMade {
    pub(super) fn new(mut written: Written, config: Config, mut warnings: Vec<String>) -> Self {
        let cut = written.generated.cut_tokens;
        if cut > 0 {
            warnings.push(format!("the prompt is too long: {cut} of its tokens were cut"));
        }
        if let Some(Value::Object(sidecar)) = written.sidecar.as_mut().filter(|_| !warnings.is_empty()) {
            sidecar.insert("warnings".into(), warnings.clone().into());
        }
        ModelMade { written, config, warnings }
    }

    fn write_all(&mut self, folder: &Path) -> Result<Finished, PipelineError> {
        self.written.path = folder.join("video.mp4");
        let generated = &self.written.generated;
        write_atomically(&folder.join("thumb.jpg"), &thumbnails::thumbnail(&generated.frames)?)?;
        write_atomically(&folder.join("sprite.jpg"), &thumbnails::sprite_sheet(&generated.frames)?)?;
        if self.config.output.audio {
            media::write_wav(&folder.join("audio.wav"), &generated.file_sound()?, WavFormat::Pcm16)?;
        }
        self.written.write(&self.config, &GenerateOptions::default()).complete()
    }
}

impl Made for ModelMade {
    fn write(&mut self, folder: &Path) -> Result<Produced, Failure> {
        let Finished { video, figures, .. } = self.write_all(folder).map_err(|error| failure(&error))?;
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
            frames_sha256: video.frames_sha256,
            samples_sha256: video.samples_sha256,
            timings: without_line(figures),
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

fn failure(error: &PipelineError) -> Failure {
    let is_full = |kind: io::ErrorKind| matches!(kind, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    let full = match error {
        PipelineError::Media(media::Error::Io { source, .. }) => is_full(source.kind()),
        // Its own words are all that ffmpeg leaves.
        PipelineError::Media(media::Error::Ffmpeg { tail, .. }) => tail.contains("No space left"),
        _ => false,
    };
    if full {
        return Failure::new("storage_full", "the disk is full");
    }
    tracing::error!("{}", one_line(error));
    Failure::new("internal", failures::told(error))
}
