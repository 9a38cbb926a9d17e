//! Checkpoints of a run: files with the denoising state and the finished clips, from which an interrupted run resumes.

use crate::pipeline::phase::Phase;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ndarray::{Array2, Array3};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::differences::{difference, short};
use super::hashes;
use super::recorded::numbers;
use super::tensors;
use super::tensors::fixed;
use crate::config::Config;
use crate::interrupts::{self, InterruptGuard};
use crate::media::Frames;
use crate::pipeline::enhancement::Enhancement;
use crate::pipeline::error::{PipelineError, Result, one_line};
use crate::pipeline::model::OpenModel;
use crate::pipeline::plan::videos::Job;
use crate::pipeline::stages::clip_ends::ClipEnds;
use crate::pipeline::stages::denoising::SkippedSteps;
use crate::tensor::Tensor;
use crate::weights::Checkpoint;

/// Checkpoint settings of a batch: path, interval, and the state that the run resumes from.
#[derive(Clone, Debug)]
pub struct CheckpointSettings {
    output: PathBuf,
    /// Path of the file with the denoising state.
    steps: PathBuf,
    every: Option<Every>,
    identity: RunIdentity,
    /// Output files of the run. The checkpoint records them, because a resumed run may replace them.
    outputs: Vec<PathBuf>,
    /// Enhanced prompts. The checkpoint records them, because a resumed run must use the same ones.
    enhancement: Option<Enhancement>,
    found: Option<DenoiseState>,
    /// For chained videos: number of clips that the interrupted run saved.
    clips: usize,
    /// Index of the clip that is being generated.
    clip: usize,
    /// Flags with which the user can resume. Set if the user did not request checkpoints; a checkpoint is then written
    /// only when the run is interrupted. `None`: checkpoints were requested with `--checkpoint-every` or `--resume`.
    resume_flags: Option<String>,
    /// For a server job: number of checkpoints written. `None`: the run was started on the command line and prints how
    /// to resume.
    server: Option<Arc<AtomicU64>>,
}

/// Description and hash of everything that the result of a run depends on.
#[derive(Clone, Debug)]
struct RunIdentity {
    hash: String,
    /// The JSON text that `hash` covers. Error messages quote the keys in which two runs differ.
    text: String,
}

/// Metadata key of the enhanced prompts.
const ENHANCEMENT: &str = "enhancement";

/// Metadata key of the steps that the step cache skipped.
const SKIPPED_STEPS: &str = "skipped_steps";

/// Interval between two checkpoints.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Every {
    Steps(usize),
    /// Time spent denoising.
    Time(Duration),
}

/// Denoising state between two steps of a pass.
#[derive(Clone, Debug)]
pub(crate) struct DenoiseState {
    pub(crate) phase: Phase,
    /// Number of transformer evaluations of the pass that are finished.
    pub(crate) done: usize,
    /// Tensors that the denoising loop carries from step to step, in the order of the loop.
    pub(crate) carried: Vec<Tensor>,
    /// In the second pass: normalised audio tokens of the first pass.
    pub(crate) sound: Option<Array3<f32>>,
    /// For chained videos: tokens from which the next clip starts.
    pub(crate) ends: ClipEnds,
    /// Steps that the step cache skipped in the finished passes.
    pub(crate) skipped: Vec<SkippedSteps>,
}

/// A finished clip of each chained video of a batch, and the tokens from which the next clip starts.
pub(crate) struct SavedClip {
    pub(crate) frames: Vec<Frames>,
    pub(crate) sounds: Vec<Array2<f32>>,
    pub(crate) cut_tokens: Vec<usize>,
    pub(crate) ends: ClipEnds,
    /// Steps that the step cache skipped.
    pub(crate) skipped: Vec<SkippedSteps>,
}

/// Returns the path of the file with the denoising state of the video `output`.
pub fn path_of(output: &Path) -> PathBuf {
    next_to(output, "steps")
}

/// Returns the path of the file with clip `at` (counted from 0) of the video `output`.
fn path_of_clip(output: &Path, at: usize) -> PathBuf {
    next_to(output, &format!("clip_{at:04}"))
}

fn next_to(output: &Path, what: &str) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(format!(".{what}.safetensors"));
    name.into()
}

/// Returns whether the video `output` has a checkpoint.
pub(crate) fn is_kept(output: &Path) -> bool {
    path_of(output).is_file() || path_of_clip(output, 0).is_file()
}

fn clips_of(output: &Path) -> usize {
    (0..).take_while(|at| path_of_clip(output, *at).exists()).count()
}

impl CheckpointSettings {
    /// Configures checkpoints of the batch `jobs`, in files next to its first video, `output`. `every`: interval
    /// between checkpoints; `None`: a checkpoint is written only when the run is interrupted.
    pub(crate) fn new(
        config: &Config,
        model: &OpenModel,
        jobs: &[Job],
        output: &Path,
        every: Option<Every>,
    ) -> Result<Self> {
        let identity = identity(config, model, jobs)?;
        Ok(CheckpointSettings {
            output: output.into(),
            steps: path_of(output),
            every,
            identity,
            outputs: Vec::new(),
            enhancement: None,
            found: None,
            clips: 0,
            clip: 0,
            resume_flags: None,
            server: None,
        })
    }

    /// Configures a checkpoint that is written only if the run is interrupted after a finished pass. `how`: the flags
    /// with which the user can resume.
    pub(crate) fn only_on_interrupt(self, how: String) -> Self {
        CheckpointSettings { resume_flags: Some(how), ..self }
    }

    /// Returns whether checkpoints are written during denoising.
    pub(crate) fn keeps_steps(&self) -> bool {
        self.every.is_some()
    }

    /// Returns whether the last finished pass is saved if a signal terminates the process; false for a server job.
    pub(crate) fn saves_on_interrupt(&self) -> bool {
        self.server.is_none()
    }

    /// Returns a guard. If a signal terminates the process before the guard is dropped, `saved` is written to a file.
    pub(crate) fn keeper(self, saved: DenoiseState) -> InterruptGuard {
        interrupts::keeper(move || self.keep_interrupted(&saved))
    }

    /// Saves the state of an interrupted run. Returns the part of the error message that says where it was saved.
    fn keep_interrupted(&self, saved: &DenoiseState) -> Option<String> {
        let is_foreign = |_: &&String| self.steps.exists() && open(&self.steps, &self.identity).is_err();
        let other = self.resume_flags.as_ref().filter(is_foreign).map(|_| next_to(&self.output, "interrupted"));
        let written = match &other {
            Some(other) => CheckpointSettings { steps: other.clone(), ..self.clone() }.write(saved),
            None => self.write(saved),
        };
        Some(match (written, other) {
            (Ok(()), None) => self.going_on(),
            (Ok(()), Some(other)) => {
                let (other, steps) = (other.display(), self.steps.display());
                format!(
                    "the finished steps are saved in {other}; to resume, move this file to {steps} and pass --resume"
                )
            }
            (Err(error), _) => format!("the finished steps could not be saved: {}", one_line(&error)),
        })
    }

    /// Configures the checkpoints of a server job: written to the file `steps` and counted in `count`.
    pub(crate) fn in_server_file(self, steps: &Path, count: &Arc<AtomicU64>) -> Self {
        CheckpointSettings { steps: steps.into(), server: Some(Arc::clone(count)), ..self }
    }

    /// Sets the output files that the checkpoint records.
    pub(crate) fn writing(self, outputs: Vec<PathBuf>) -> Self {
        CheckpointSettings { outputs, ..self }
    }

    /// Sets the enhanced prompts that the checkpoint records.
    pub(crate) fn with_enhancement(self, enhancement: Option<Enhancement>) -> Self {
        CheckpointSettings { enhancement, ..self }
    }

    /// Checks the files that [`CheckpointSettings::resumed`] reads. Changes nothing.
    ///
    /// # Errors
    /// Returns an error if a file is damaged or belongs to another request, model or release.
    pub(crate) fn check(&self) -> Result<()> {
        if self.steps.exists() {
            read(&self.steps, &self.identity)?;
        }
        (0..clips_of(&self.output)).try_for_each(|at| open(&path_of_clip(&self.output, at), &self.identity).map(drop))
    }

    /// Reads the checkpoint that the run resumes from, if there is one.
    ///
    /// # Errors
    /// Returns an error if a file is damaged or belongs to another request, model or release.
    pub(crate) fn resumed(self) -> Result<Self> {
        let path = &self.steps;
        let clips = clips_of(&self.output);
        let found = if path.exists() { Some(read(path, &self.identity)?) } else { None };
        // Ignore the denoising state if its clip is finished.
        let found = found.filter(|(clip, _)| *clip == clips).map(|(_, saved)| saved);
        if clips > 0 {
            tracing::info!("{}: resuming with clip {}", path_of_clip(&self.output, clips - 1).display(), clips + 1);
        }
        if let Some(saved) = &found {
            tracing::info!(
                "{}: resuming in phase {} after {} evaluations",
                path.display(),
                saved.phase.name(),
                saved.done
            );
        }
        Ok(CheckpointSettings { found, clips, ..self })
    }

    /// Returns the settings for the checkpoints of clip `at` (counted from 0) of chained videos.
    pub(crate) fn of_clip(&self, at: usize) -> Self {
        CheckpointSettings { clip: at, found: self.found.clone().filter(|_| at == self.clips), ..self.clone() }
    }

    /// Returns the tokens from which the next clip starts: the final tokens of the passes that were finished before the
    /// checkpoint.
    pub(crate) fn saved_ends(&self) -> Option<&ClipEnds> {
        self.found.as_ref().map(|saved| &saved.ends)
    }

    /// Reads the current clip if the interrupted run saved it; otherwise returns `None`.
    ///
    /// # Errors
    /// Returns an error if the file is damaged or belongs to another request, model or release.
    pub(crate) fn saved_clip(&self) -> Result<Option<SavedClip>> {
        let path = path_of_clip(&self.output, self.clip);
        if self.clip < self.clips { read_clip(&path, &self.identity).map(Some) } else { Ok(None) }
    }

    /// Saves a finished clip of each video, and the tokens from which the next clip starts. Removes files of later
    /// clips, which belong to another run. Does nothing without `--checkpoint-every`.
    pub(crate) fn write_clip(
        &self,
        videos: &[(&Frames, &Array2<f32>)],
        cut_tokens: &[usize],
        ends: &ClipEnds,
        skipped: &[SkippedSteps],
    ) -> Result<()> {
        if self.every.is_none() {
            return Ok(());
        }
        for later in self.clip + 1..clips_of(&self.output) {
            self.remove_clip(later);
        }
        let mut tensors: Vec<_> = ends.tensors().collect();
        for (n, (frames, sound)) in videos.iter().enumerate() {
            tensors.push((format!("frames.{n}"), Tensor::U8(frames.data().clone().into_dyn())));
            tensors.push((format!("audio.{n}"), (*sound).clone().into()));
        }
        let skipped = (SKIPPED_STEPS, json!(skipped).to_string());
        let about = self.about([("cut_tokens", json!(cut_tokens).to_string()), skipped]);
        tensors::write_with(&path_of_clip(&self.output, self.clip), &tensors, Some(about), true)
    }

    /// Returns the metadata of a checkpoint file's header.
    fn about<const N: usize>(&self, more: [(&str, String); N]) -> HashMap<String, String> {
        let RunIdentity { hash, text } = self.identity.clone();
        let all = [("identity", hash), ("request", text), ("outputs", json!(self.outputs).to_string())];
        let enhancement = self.enhancement.iter().map(|own| (ENHANCEMENT, json!(own).to_string()));
        let all = all.into_iter().chain(enhancement).chain(more);
        all.map(|(key, value)| (key.to_string(), value)).collect()
    }

    fn remove_clip(&self, at: usize) {
        // A file that cannot be removed is reported when a run resumes from it.
        let _ = std::fs::remove_file(path_of_clip(&self.output, at));
    }

    /// Returns the denoising state from which the phase `phase` resumes. `None`: no state was saved, or it belongs to
    /// another phase.
    pub(crate) fn found(&self, phase: Phase) -> Option<&DenoiseState> {
        self.found.as_ref().filter(|saved| saved.phase == phase)
    }

    /// Returns the number of steps between two checkpoints. `None`: the interval is a time, or no checkpoints are
    /// written during denoising.
    pub(crate) fn every_steps(&self) -> Option<usize> {
        match self.every {
            Some(Every::Steps(steps)) => Some(steps),
            _ => None,
        }
    }

    /// Returns whether to write a checkpoint now. `steps` and `time`: steps and time since the last checkpoint.
    /// `stops`: whether the run is about to stop; a checkpoint is then written regardless of the interval.
    pub(crate) fn is_due(&self, steps: usize, time: Duration, stops: bool) -> bool {
        match self.every {
            None => false,
            Some(_) if stops => true,
            Some(Every::Steps(every)) => steps >= every,
            Some(Every::Time(every)) => time >= every,
        }
    }

    /// Writes the denoising state, replacing the previous one.
    pub(crate) fn write(&self, saved: &DenoiseState) -> Result<()> {
        let carried = saved.carried.iter().cloned().enumerate().map(|(i, t)| (format!("carried.{i}"), t));
        let sound = saved.sound.iter().map(|t| ("sound".to_string(), Tensor::from(t.clone())));
        let tensors: Vec<_> = carried.chain(sound).chain(saved.ends.tensors()).collect();
        let about = self.about([
            ("stage", saved.phase.name().to_string()),
            ("done", saved.done.to_string()),
            ("clip", self.clip.to_string()),
            (SKIPPED_STEPS, json!(saved.skipped).to_string()),
        ]);
        tensors::write_with(&self.steps, &tensors, Some(about), true)?;
        if let Some(count) = &self.server {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Logs where the checkpoint of a stopping run is. Does nothing in a server, which finds the checkpoint at its next
    /// start.
    pub(crate) fn tell(&self) {
        if self.server.is_none() {
            tracing::info!("{}", self.going_on());
        }
    }

    fn going_on(&self) -> String {
        let how = self.resume_flags.as_deref().unwrap_or("--resume");
        format!("the finished steps are saved in {}; resume with {how}", self.steps.display())
    }

    /// Describes how to resume if the process exits now. `None`: nothing has been saved, or a server runs the request.
    pub(crate) fn continuation(&self) -> Option<String> {
        let clip = path_of_clip(&self.output, 0);
        let is_own = |path: &Path| open(path, &self.identity).is_ok();
        match self.server {
            Some(_) => None,
            None if is_own(&self.steps) => Some(self.going_on()),
            None => is_own(&clip).then(|| {
                format!("the finished clips are saved, the first one in {}; resume with --resume", clip.display())
            }),
        }
    }

    /// Removes the checkpoint after all files have been written. A run that did not request checkpoints does not remove
    /// the checkpoint of another run.
    pub(crate) fn finish(&self) {
        if self.resume_flags.is_some() && open(&self.steps, &self.identity).is_err() {
            return;
        }
        // Ignore the error: the file does not exist if no step was saved.
        let _ = std::fs::remove_file(&self.steps);
        (0..clips_of(&self.output)).rev().for_each(|at| self.remove_clip(at));
    }
}

fn wrong(path: &Path, reason: &str) -> PipelineError {
    PipelineError::File { path: path.into(), reason: reason.into() }
}

/// Opens a checkpoint; returns an error if it belongs to another run.
fn open(path: &Path, identity: &RunIdentity) -> Result<Checkpoint> {
    let file = Checkpoint::open(path)?;
    match file.metadata("identity") {
        None => Err(wrong(path, "is not a checkpoint of a run")),
        Some(own) if own != identity.hash => {
            let known = file.metadata("request").and_then(|text| first_difference(text, &identity.text));
            let known = known.map_or(String::new(), |what| format!(": {what}"));
            Err(wrong(
                path,
                &format!(
                    "holds the steps of another request, model or release{known}; repeat that run's request, or remove \
                     the file"
                ),
            ))
        }
        Some(_) => Ok(file),
    }
}

/// Describes the first key in which a checkpoint differs from this run, with both values.
fn first_difference(kept: &str, own: &str) -> Option<String> {
    let read = |text: &str| serde_json::from_str(text).ok();
    let (key, kept, own) = difference(&read(kept)?, &read(own)?, "")?;
    // For a single video, quote keys as in the configuration.
    let key = key.strip_prefix("requests[0].").unwrap_or(&key);
    Some(format!("{key} was {}, is now {}", short(&kept), short(&own)))
}

/// Returns the output files recorded in a video's checkpoint; an empty list if there is no checkpoint.
pub(in crate::pipeline) fn recorded_outputs(output: &Path) -> Vec<PathBuf> {
    let files = [path_of(output), path_of_clip(output, 0)].into_iter().filter(|path| path.is_file());
    let recorded = files.filter_map(|path| {
        let file = Checkpoint::open(&path).ok()?;
        serde_json::from_str::<Vec<PathBuf>>(file.metadata("outputs")?).ok()
    });
    recorded.flatten().collect()
}

/// Returns the enhanced prompts recorded in a video's checkpoint and in its first clip.
pub(in crate::pipeline) fn recorded_enhancements(output: &Path) -> Vec<Enhancement> {
    [path_of(output), path_of_clip(output, 0)].iter().filter_map(|path| recorded_enhancement(path)).collect()
}

/// Returns the enhanced prompts recorded in a checkpoint file; `None` if it cannot be read or has none.
pub(crate) fn recorded_enhancement(path: &Path) -> Option<Enhancement> {
    let file = path.is_file().then(|| Checkpoint::open(path).ok()).flatten()?;
    serde_json::from_str(file.metadata(ENHANCEMENT)?).ok()
}

/// Returns the steps that the step cache skipped, as recorded in a checkpoint.
fn skipped_steps(file: &Checkpoint) -> Vec<SkippedSteps> {
    file.metadata(SKIPPED_STEPS).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

fn read_clip(path: &Path, identity: &RunIdentity) -> Result<SavedClip> {
    let file = open(path, identity)?;
    let cut_tokens = file.metadata("cut_tokens").and_then(|text| serde_json::from_str::<Vec<usize>>(text).ok());
    let cut_tokens = cut_tokens.ok_or_else(|| wrong(path, "is not a saved clip of a run"))?;
    let (mut frames, mut sounds) = (Vec::new(), Vec::new());
    for n in 0..cut_tokens.len() {
        match file.get(&format!("frames.{n}"))?.to_tensor()? {
            Tensor::U8(bytes) => frames.push(Frames::new(fixed(bytes)?)?),
            _ => return Err(wrong(path, "has frames that are not uint8")),
        }
        sounds.push(fixed(file.get(&format!("audio.{n}"))?.to_tensor()?.into_f32())?);
    }
    Ok(SavedClip { frames, sounds, cut_tokens, ends: ClipEnds::read(&file)?, skipped: skipped_steps(&file) })
}

/// Reads the denoising state, and the index of its clip.
fn read(path: &Path, identity: &RunIdentity) -> Result<(usize, DenoiseState)> {
    let wrong = |reason: &str| wrong(path, reason);
    let file = open(path, identity)?;
    let about = |key: &str| file.metadata(key).ok_or_else(|| wrong("is not a checkpoint of a run"));
    let number = |key: &str| about(key)?.parse().map_err(|_| wrong("has no valid step or clip number in its metadata"));
    let name = about("stage")?; // the file's key for the phase
    let phase = [Phase::Denoise, Phase::Refine].into_iter().find(|phase| phase.name() == name);
    let phase = phase.ok_or_else(|| wrong("has an unknown 'stage' in its metadata"))?;
    let tensor = |name: &str| -> Result<Tensor> { Ok(file.get(name)?.to_tensor()?) };
    let carried = (0..).map(|i| format!("carried.{i}")).take_while(|name| file.contains(name));
    let carried = carried.map(|name| tensor(&name)).collect::<Result<_>>()?;
    let sound = match file.contains("sound") {
        true => Some(fixed(tensor("sound")?.into_f32())?),
        false => None,
    };
    let saved = DenoiseState {
        phase,
        done: number("done")?,
        carried,
        sound,
        ends: ClipEnds::read(&file)?,
        skipped: skipped_steps(&file),
    };
    Ok((number("clip")?, saved))
}

/// Returns the identity of a run, including the content hashes of input files and LoRAs.
fn identity(config: &Config, model: &OpenModel, jobs: &[Job]) -> Result<RunIdentity> {
    let all = json!({
        "release": env!("CARGO_PKG_VERSION"),
        "requests": jobs.iter().map(|job| numbers(config, job)).collect::<Vec<_>>(),
        "model": model.identity(config)?,
        "inputs": hashes::of_given(config)?,
    });
    let text = all.to_string();
    Ok(RunIdentity { hash: hex::encode(Sha256::digest(&text)), text })
}
