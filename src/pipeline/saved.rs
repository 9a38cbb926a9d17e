//! The steps that a run has behind it, kept in a file, so that an ended run goes on where it was instead of from noise.

use super::phase::Phase;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use ndarray::Array3;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::error::{PipelineError, Result};
use super::model::Model;
use super::tensors;
use super::tensors::fixed;
use crate::config::{Config, Job};
use crate::request::{self, Condition};
use crate::tensor::Tensor;
use crate::weights::Checkpoint;

/// Settings that change no number of a result.
const INDIFFERENT: [&str; 8] = [
    "/output",
    "/sampler/progress_every",
    "/runtime/distributed",
    "/runtime/compile_cache",
    "/runtime/residency",
    "/runtime/memory_limit",
    "/runtime/visible_devices",
    "/runtime/libtpu_init_args",
];

/// Where and how often the steps of a batch of videos are kept.
#[derive(Clone, Debug)]
pub struct Saving {
    path: PathBuf,
    every: Option<Every>,
    identity: String,
    found: Option<Saved>,
}

/// Between two savings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Every {
    Steps(usize),
    /// Of denoising.
    Time(Duration),
}

/// State of a pass between two steps.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    pub(crate) phase: Phase,
    /// Its evaluations so far.
    pub(crate) done: usize,
    /// Values of the sampler, in the loop's order.
    pub(crate) carried: Vec<Tensor>,
    /// In the second pass, the first one's normalised audio tokens.
    pub(crate) sound: Option<Array3<f32>>,
}

/// The file in which the steps of the video `output` are kept.
pub fn path_of(output: &Path) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(".steps.safetensors");
    name.into()
}

impl Saving {
    /// Keeps the steps of `jobs` in the file `path`, `every` so often.
    ///
    /// # Errors
    /// A model that cannot be told from others.
    pub(crate) fn new(config: &Config, model: &Model, jobs: &[Job], path: &Path, every: Option<Every>) -> Result<Self> {
        Ok(Saving { path: path.into(), every, identity: identity(config, model, jobs)?, found: None })
    }

    /// The same, going on from the file, if there is one.
    ///
    /// # Errors
    /// A file that is damaged, or of another request, model or release of this program.
    pub(crate) fn resumed(self) -> Result<Self> {
        let path = &self.path;
        let found = if path.exists() { Some(read(path, &self.identity)?) } else { None };
        if let Some(saved) = &found {
            tracing::info!(
                "{}: goes on in phase {} after {} evaluations",
                path.display(),
                saved.phase.name(),
                saved.done
            );
        }
        Ok(Saving { found, ..self })
    }

    /// The steps of an ended run, if it ended in this phase.
    pub(crate) fn found(&self, phase: Phase) -> Option<&Saved> {
        self.found.as_ref().filter(|saved| saved.phase == phase)
    }

    /// Steps between two savings, where they count.
    pub(crate) fn every_steps(&self) -> Option<usize> {
        match self.every {
            Some(Every::Steps(steps)) => Some(steps),
            _ => None,
        }
    }

    /// Whether so many steps and so much time after the last saving, or at the run's end, there is another.
    pub(crate) fn is_due(&self, steps: usize, time: Duration, stops: bool) -> bool {
        match self.every {
            None => false,
            Some(_) if stops => true,
            Some(Every::Steps(every)) => steps >= every,
            Some(Every::Time(every)) => time >= every,
        }
    }

    /// Keeps the steps in place of those kept before.
    ///
    /// # Errors
    /// The file that cannot be written.
    pub(crate) fn write(&self, saved: &Saved) -> Result<()> {
        let carried = saved.carried.iter().cloned().enumerate().map(|(i, t)| (format!("carried.{i}"), t));
        let sound = saved.sound.iter().map(|t| ("sound".to_string(), Tensor::from(t.clone())));
        let tensors: Vec<_> = carried.chain(sound).collect();
        let about = [
            ("identity", self.identity.clone()),
            ("stage", saved.phase.name().to_string()),
            ("done", saved.done.to_string()),
        ];
        tensors::write_with(&self.path, &tensors, Some(about.map(|(key, value)| (key.to_string(), value)).into()))
    }

    /// Says where the steps of a run that ends are.
    pub(crate) fn tell(&self) {
        tracing::info!("the steps are kept in {}; --resume goes on there", self.path.display());
    }

    /// Removes the file: the videos are written.
    pub(crate) fn finish(&self) {
        // There is none where no step was kept.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn read(path: &Path, identity: &str) -> Result<Saved> {
    let wrong = |reason: &str| PipelineError::File { path: path.into(), reason: reason.into() };
    let file = Checkpoint::open(path)?;
    let about = |key: &str| file.metadata(key).ok_or_else(|| wrong("holds no steps of a run"));
    if about("identity")? != identity {
        return Err(wrong(
            "holds the steps of another request, model or release; give what that run was given, or remove the file",
        ));
    }
    let name = about("stage")?; // alias: the file's key for the phase
    let phase = [Phase::Denoise, Phase::Refine].into_iter().find(|phase| phase.name() == name);
    let phase = phase.ok_or_else(|| wrong("is of no phase of a run"))?;
    let done = about("done")?.parse().map_err(|_| wrong("does not say how many steps it holds"))?;
    let tensor = |name: &str| -> Result<Tensor> { Ok(file.get(name)?.to_tensor()?) };
    let carried = (0..).map(|i| format!("carried.{i}")).take_while(|name| file.contains(name));
    let carried = carried.map(|name| tensor(&name)).collect::<Result<_>>()?;
    let sound = match file.contains("sound") {
        true => Some(fixed(tensor("sound")?.into_f32())?),
        false => None,
    };
    Ok(Saved { phase, done, carried, sound })
}

/// Of everything that a result depends on. Of files that the request only names, size and time have to do.
fn identity(config: &Config, model: &Model, jobs: &[Job]) -> Result<String> {
    let each = jobs.iter().map(|job| {
        let mut own = config.effective(&job.prompt, job.seed);
        for key in INDIFFERENT {
            if let Some(value) = own.pointer_mut(key) {
                *value = Value::Null;
            }
        }
        own
    });
    let conditions = request::conditions(config)?;
    let given = conditions.as_ref().into_iter().flatten().filter_map(Condition::path);
    let given = given.chain(config.request.video.as_ref().map(Path::new));
    let files = given.chain(config.model.loras.iter().map(|lora| Path::new(&lora.path)));
    let about = |path: &Path| {
        let about = std::fs::metadata(path).ok()?;
        let time = about.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some((about.len(), time.as_nanos().to_string()))
    };
    let all = json!({
        "release": env!("CARGO_PKG_VERSION"),
        "requests": each.collect::<Vec<_>>(),
        "model": model.identity()?,
        "files": files.map(about).collect::<Vec<_>>(),
    });
    Ok(hex::encode(Sha256::digest(all.to_string())))
}
