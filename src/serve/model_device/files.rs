//! Where a job's files are, and what of a configuration starts a device.

use std::path::{Path, PathBuf};

use super::super::job::Accepted;
use super::super::store::{Variant, job_folder};
use super::{Config, NumFrames, PipelineError};
use crate::config::{Model, Output, Pipeline, Runtime};

/// The folder of given files, in that of the queue.
pub(super) struct Inputs(PathBuf);

impl Inputs {
    pub(super) fn of(config: &Config) -> Result<Self, PipelineError> {
        let none = || PipelineError::Usage("serve.state: give the folder of the queue".into());
        let state = config.serve.state.as_ref().ok_or_else(none)?;
        Ok(Inputs(std::path::absolute(state).map_err(|e| PipelineError::Input(e.to_string()))?.join("inputs")))
    }

    /// The file of a job's video.
    pub(super) fn video_of(&self, job: &Accepted) -> PathBuf {
        let state = self.0.parent().unwrap_or(&self.0);
        job_folder(state, &job.id).join(Variant::Video.file())
    }

    /// A file's place: a name has no folder.
    fn place(&self, name: &str) -> Result<PathBuf, PipelineError> {
        let plain = Path::new(name).file_name().filter(|own| *own == name);
        let plain = plain.ok_or_else(|| PipelineError::Input("a given file has a name without a folder".into()))?;
        Ok(self.0.join(plain))
    }

    pub(super) fn read(&self, name: &str) -> Result<Vec<u8>, PipelineError> {
        std::fs::read(self.place(name)?).map_err(|e| PipelineError::Input(format!("{name}: {e}")))
    }

    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> Result<(), PipelineError> {
        std::fs::write(self.place(name)?, bytes).map_err(|e| PipelineError::Input(format!("{name}: {e}")))
    }

    pub(super) fn remove(&self, name: &str) -> Result<(), PipelineError> {
        std::fs::remove_file(self.place(name)?).map_err(|e| PipelineError::Input(format!("{name}: {e}")))
    }

    /// The configuration of a job with the paths of its files. What is written is the server's to say.
    pub(super) fn named(&self, job: &Accepted) -> Config {
        let mut config = job.config.clone();
        let request = &mut config.request;
        let images = request.images.iter_mut().map(|image| &mut image.path);
        let latents = request.audio_latents.iter_mut().map(|latents| &mut latents.path);
        let references = request.reference_videos.iter_mut();
        let references = references.flat_map(|v| [Some(&mut v.path), v.attention_mask.as_mut()]).flatten();
        let single = request.video.as_mut().into_iter().chain(request.audio.as_mut().map(|audio| &mut audio.path));
        for path in images.chain(latents).chain(references).chain(single) {
            if job.inputs.contains(path) {
                *path = self.0.join(&*path).to_string_lossy().into_owned();
            }
        }
        config.output = Output { audio: config.output.audio, ..Output::default() };
        config
    }
}

/// A job's configuration on a host where parts lie elsewhere than on process 0's.
pub(super) fn local(config: &mut Config, own: &Config) {
    let given = &config.model;
    config.model =
        Model { decoder: given.decoder, loras: given.loras.clone(), lora_merge: given.lora_merge, ..own.model.clone() };
    config.runtime = Runtime { positions: config.runtime.positions, ..own.runtime.clone() };
}

/// The configuration that a device is started with: frames are a number, and nothing is given that requests bring.
pub(super) fn startable(config: &Config) -> Config {
    let mut plain = config.clone();
    if plain.request.num_frames.count().is_none() {
        plain.request.num_frames = NumFrames::Count(1 + plain.frame_step());
    }
    let needs_files = plain.pipeline.takes_video()
        || matches!(plain.pipeline, Pipeline::ImageToVideo | Pipeline::Keyframes | Pipeline::AudioToVideo);
    let lacks_files = needs_files && plain.request.files().next().is_none();
    // A run without frames has the model read for less than others need.
    if lacks_files || !plain.pipeline.makes_frames() {
        plain.pipeline = Pipeline::TextToVideo;
    }
    plain
}

/// Refuses what makes no video file of one piece.
pub(super) fn check(config: &Config) -> Result<(), PipelineError> {
    let refused = |why: &str| Err(PipelineError::Usage(why.into()));
    match (config.pipeline, &config.request.chain) {
        (Pipeline::TextToAudio, _) => refused("pipeline: text_to_audio makes no video; take another"),
        (_, Some(_)) => refused("request.chain: a video of several clips is made by `ltx2 generate`; leave it out"),
        _ => Ok(()),
    }
}
