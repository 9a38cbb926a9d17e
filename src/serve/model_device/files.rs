//! File paths of a job, and the configuration with which a device is started.

use std::path::{Path, PathBuf};

use super::super::job::AcceptedJob;
use super::super::store::{Variant, job_folder};
use super::{Config, NumFrames, PipelineError};
use crate::config::{Lora, Model, Output, Pipeline, Runtime, Support, served_ic_lora};

/// The folder `inputs` in the state folder, which contains the input files of jobs.
pub(super) struct InputFolder(PathBuf);

impl InputFolder {
    pub(super) fn from_config(config: &Config) -> Result<Self, PipelineError> {
        let none = || PipelineError::Usage("serve.state is not set; set it to the server's state folder".into());
        let state = config.serve.state.as_ref().ok_or_else(none)?;
        Ok(InputFolder(std::path::absolute(state).map_err(|e| PipelineError::Input(e.to_string()))?.join("inputs")))
    }

    /// Returns the path of a job's MP4.
    pub(super) fn job_video_path(&self, job: &AcceptedJob) -> PathBuf {
        let state = self.0.parent().unwrap_or(&self.0);
        job_folder(state, &job.id).join(Variant::Video.file())
    }

    /// Returns the path of an input file. Rejects names that contain a folder.
    fn place(&self, name: &str) -> Result<PathBuf, PipelineError> {
        let plain = Path::new(name).file_name().filter(|own| *own == name);
        let plain =
            plain.ok_or_else(|| PipelineError::Input("the name of an input file must not contain a folder".into()))?;
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

    /// Returns the configuration of a job with the full paths of its input files.
    pub(super) fn named(&self, job: &AcceptedJob) -> Result<Config, PipelineError> {
        let invalid = |error| PipelineError::Input(format!("invalid configuration of the job {}: {error}", job.id));
        let mut config: Config = job.config.parse().map_err(invalid)?;
        for path in config.request.files_mut() {
            if job.inputs.contains(path) {
                *path = self.0.join(&*path).to_string_lossy().into_owned();
            }
        }
        let Output { audio, preview_every, hdr_video, hdr_codec, .. } = config.output;
        config.output = Output { audio, preview_every, hdr_video, hdr_codec, ..Output::default() };
        Ok(config)
    }
}

/// Replaces the paths of the model, the runtime and the text embeddings in a job's configuration by those of this host, which may differ from those of
/// process 0.
pub(super) fn local(config: &mut Config, own: &Config) {
    let given = &config.model;
    config.model = Model {
        decoder: given.decoder,
        loras: given.loras.clone(),
        ic_lora: given.ic_lora.clone(),
        lora_merge: given.lora_merge,
        ..own.model.clone()
    };
    if config.request.text_embeddings.is_some() {
        config.request.text_embeddings.clone_from(&own.request.text_embeddings);
    }
    config.runtime = Runtime { positions: config.runtime.positions, ..own.runtime.clone() };
}

/// Returns the paths of the LoRAs of the configuration and of those that requests may name.
///
/// # Errors
/// Returns the errors of [`with_served_loras`].
pub(super) fn lora_paths(config: &Config) -> Result<Vec<String>, PipelineError> {
    let served = with_served_loras(config)?.loras;
    Ok(config.model.loras.iter().chain(&served).map(|lora| lora.path.clone()).collect())
}

/// Returns the model with the LoRAs and IC-LoRAs that requests may name, at full strength.
///
/// # Errors
/// Returns an error if the file of an IC-LoRA is not in the Hugging Face cache, or if a name is unknown.
pub(super) fn with_served_loras(config: &Config) -> Result<Model, PipelineError> {
    let loras = config.serve.loras.values().map(|served| Lora {
        path: served.path.clone(),
        stages: served.stages.clone(),
        strength: 1.0,
        apply: served.apply,
    });
    let ic_loras = config.serve.ic_loras.iter().map(|name| served_ic_lora(name, config));
    let ic_loras: Vec<Lora> = ic_loras.collect::<Result<_, _>>()?;
    Ok(Model { loras: loras.chain(ic_loras).collect(), ..config.model.clone() })
}

/// Returns the configuration with which a device is started. A predicted number of frames is replaced by a fixed one.
/// If the pipeline needs input files, which only requests have, the pipeline becomes `text_to_video`.
pub(super) fn startup_config(config: &Config) -> Config {
    let mut plain = config.clone();
    if plain.request.num_frames.count().is_none() {
        plain.request.num_frames = NumFrames::Count(1 + plain.frame_step());
    }
    let spec = plain.pipeline.spec();
    let needs_files = spec.video.is_some() || spec.images == Support::Required || spec.audio == Support::Required;
    let lacks_files = needs_files && plain.request.files().next().is_none();
    // A pipeline that generates no frames would read only a part of the model.
    if lacks_files || !spec.generates_video {
        plain.pipeline = Pipeline::TextToVideo;
    }
    plain
}

/// Rejects a configuration that does not generate exactly one video file.
pub(super) fn check(config: &Config) -> Result<(), PipelineError> {
    let refused = |why: &str| Err(PipelineError::Usage(why.into()));
    match (config.pipeline.spec().has_video(), &config.request.chain) {
        (false, _) => refused("pipeline: text_to_audio generates no video; use another pipeline"),
        (_, Some(_)) => {
            refused("request.chain: the server cannot generate chained clips; remove this key, or use `ltx2 generate`")
        }
        _ => Ok(()),
    }
}
