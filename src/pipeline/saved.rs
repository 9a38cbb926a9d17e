//! The steps and clips that a run has behind it, kept in files, so that an ended run goes on where it was instead of from noise.

use super::phase::Phase;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ndarray::{Array2, Array3};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::clip_ends::ClipEnds;
use super::differences::{difference, short};
use super::error::{PipelineError, Result, one_line};
use super::hashes;
use super::model::Model;
use super::recorded::numbers;
use super::tensors;
use super::tensors::fixed;
use crate::config::{Config, Job};
use crate::interrupts::{self, Guard};
use crate::media::Frames;
use crate::tensor::Tensor;
use crate::weights::Checkpoint;

/// Where and how often the steps of a batch of videos are kept.
#[derive(Clone, Debug)]
pub struct Saving {
    output: PathBuf,
    /// The file of the steps.
    steps: PathBuf,
    every: Option<Every>,
    identity: Identity,
    /// Files that the run writes, kept with the steps: whoever continues it replaces them.
    outputs: Vec<PathBuf>,
    found: Option<Saved>,
    /// Clips that an ended run has kept, of a video of several.
    clips: usize,
    /// The one that is made.
    clip: usize,
    /// How the user continues from steps that were not asked for. `None`: `--checkpoint-every` or `--resume` asks for them.
    unasked: Option<String>,
    /// Whose steps they are: how often they were kept. None of a command, whose user is told how to go on.
    server: Option<Arc<AtomicU64>>,
}

/// What a result depends on, and its hash.
#[derive(Clone, Debug)]
struct Identity {
    hash: String,
    /// The same as JSON, to say what differs.
    text: String,
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
    /// Of a video of several clips, what the next pass starts from.
    pub(crate) ends: ClipEnds,
}

/// A clip of each of several videos, with what the next one starts from.
pub(crate) struct SavedClip {
    pub(crate) frames: Vec<Frames>,
    pub(crate) sounds: Vec<Array2<f32>>,
    pub(crate) cut_tokens: Vec<usize>,
    pub(crate) ends: ClipEnds,
}

/// The file in which the steps of the video `output` are kept.
pub fn path_of(output: &Path) -> PathBuf {
    beside(output, "steps")
}

/// The file in which a clip of the video `output`, from 0, is kept.
fn path_of_clip(output: &Path, at: usize) -> PathBuf {
    beside(output, &format!("clip_{at:04}"))
}

fn beside(output: &Path, what: &str) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(format!(".{what}.safetensors"));
    name.into()
}

/// Whether anything of the video `output` is kept.
pub(crate) fn is_kept(output: &Path) -> bool {
    path_of(output).is_file() || path_of_clip(output, 0).is_file()
}

fn clips_of(output: &Path) -> usize {
    (0..).take_while(|at| path_of_clip(output, *at).exists()).count()
}

impl Saving {
    /// Keeps the steps and clips of `jobs` beside their first `output`, steps `every` so often.
    ///
    /// # Errors
    /// A model that cannot be told from others.
    pub(crate) fn new(
        config: &Config,
        model: &Model,
        jobs: &[Job],
        output: &Path,
        every: Option<Every>,
    ) -> Result<Self> {
        let identity = identity(config, model, jobs)?;
        Ok(Saving {
            output: output.into(),
            steps: path_of(output),
            every,
            identity,
            outputs: Vec::new(),
            found: None,
            clips: 0,
            clip: 0,
            unasked: None,
            server: None,
        })
    }

    /// The same of a run that keeps steps only when it is interrupted behind the last one; `how` continues from them.
    pub(crate) fn unasked(self, how: String) -> Self {
        Saving { unasked: Some(how), ..self }
    }

    /// Whether steps are kept while the run goes on.
    pub(crate) fn keeps_steps(&self) -> bool {
        self.every.is_some()
    }

    /// Whether a finished pass is kept where a signal ends the process; a server saves by itself.
    pub(crate) fn keeps_when_interrupted(&self) -> bool {
        self.server.is_none()
    }

    /// Keeps a state where a signal ends the process, for as long as the guard lives.
    pub(crate) fn keeper(self, saved: Saved) -> Guard {
        interrupts::keeper(move || self.keep_interrupted(&saved))
    }

    /// Keeps the state of an interrupted run. Returns where it is, for the error line.
    fn keep_interrupted(&self, saved: &Saved) -> Option<String> {
        let is_foreign = |_: &&String| self.steps.exists() && open(&self.steps, &self.identity).is_err();
        let other = self.unasked.as_ref().filter(is_foreign).map(|_| beside(&self.output, "interrupted"));
        let written = match &other {
            Some(other) => Saving { steps: other.clone(), ..self.clone() }.write(saved),
            None => self.write(saved),
        };
        Some(match (written, other) {
            (Ok(()), None) => self.going_on(),
            (Ok(()), Some(other)) => {
                let (other, steps) = (other.display(), self.steps.display());
                format!("the steps are kept in {other}: move them to {steps}, and --resume goes on there")
            }
            (Err(error), _) => format!("the steps are not kept: {}", one_line(&error)),
        })
    }

    /// The same of a server, with steps in this file; how often they are kept is counted.
    pub(crate) fn kept_in(self, steps: &Path, count: &Arc<AtomicU64>) -> Self {
        Saving { steps: steps.into(), server: Some(Arc::clone(count)), ..self }
    }

    /// The same of a run that writes these files.
    pub(crate) fn writing(self, outputs: Vec<PathBuf>) -> Self {
        Saving { outputs, ..self }
    }

    /// Checks the files that [`Saving::resumed`] continues from, and does not change anything.
    ///
    /// # Errors
    /// A file that is damaged, or of another request, model or release of this program.
    pub(crate) fn check(&self) -> Result<()> {
        if self.steps.exists() {
            read(&self.steps, &self.identity)?;
        }
        (0..clips_of(&self.output)).try_for_each(|at| open(&path_of_clip(&self.output, at), &self.identity).map(drop))
    }

    /// The same, going on from the files, if there are any.
    ///
    /// # Errors
    /// A file that is damaged, or of another request, model or release of this program.
    pub(crate) fn resumed(self) -> Result<Self> {
        let path = &self.steps;
        let clips = clips_of(&self.output);
        let found = if path.exists() { Some(read(path, &self.identity)?) } else { None };
        // Steps of a finished clip are of no use.
        let found = found.filter(|(clip, _)| *clip == clips).map(|(_, saved)| saved);
        if clips > 0 {
            tracing::info!("{}: goes on with clip {}", path_of_clip(&self.output, clips - 1).display(), clips + 1);
        }
        if let Some(saved) = &found {
            tracing::info!(
                "{}: goes on in phase {} after {} evaluations",
                path.display(),
                saved.phase.name(),
                saved.done
            );
        }
        Ok(Saving { found, clips, ..self })
    }

    /// The same for a clip, from 0, of videos of several.
    pub(crate) fn of_clip(&self, at: usize) -> Self {
        Saving { clip: at, found: self.found.clone().filter(|_| at == self.clips), ..self.clone() }
    }

    /// Ends of the passes before the steps of an ended run.
    pub(crate) fn found_ends(&self) -> Option<&ClipEnds> {
        self.found.as_ref().map(|saved| &saved.ends)
    }

    /// The clip, if an ended run has kept it.
    ///
    /// # Errors
    /// A file that is damaged, or of another request, model or release of this program.
    pub(crate) fn found_clip(&self) -> Result<Option<SavedClip>> {
        let path = path_of_clip(&self.output, self.clip);
        if self.clip < self.clips { read_clip(&path, &self.identity).map(Some) } else { Ok(None) }
    }

    /// Keeps a clip of each video, where steps are, and what the next one starts from; those behind it are of another run.
    ///
    /// # Errors
    /// The file that cannot be written.
    pub(crate) fn write_clip(
        &self,
        videos: &[(&Frames, &Array2<f32>)],
        cut_tokens: &[usize],
        ends: &ClipEnds,
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
        let about = self.about([("cut_tokens", json!(cut_tokens).to_string())]);
        tensors::write_with(&path_of_clip(&self.output, self.clip), &tensors, Some(about), true)
    }

    /// Metadata of a file's header.
    fn about<const N: usize>(&self, more: [(&str, String); N]) -> HashMap<String, String> {
        let Identity { hash, text } = self.identity.clone();
        let all = [("identity", hash), ("request", text), ("outputs", json!(self.outputs).to_string())];
        let all = all.into_iter().chain(more);
        all.map(|(key, value)| (key.to_string(), value)).collect()
    }

    fn remove_clip(&self, at: usize) {
        // One that cannot be removed is told of by the run that goes on.
        let _ = std::fs::remove_file(path_of_clip(&self.output, at));
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
        let tensors: Vec<_> = carried.chain(sound).chain(saved.ends.tensors()).collect();
        let about = self.about([
            ("stage", saved.phase.name().to_string()),
            ("done", saved.done.to_string()),
            ("clip", self.clip.to_string()),
        ]);
        tensors::write_with(&self.steps, &tensors, Some(about), true)?;
        if let Some(count) = &self.server {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Says where the steps of a run that ends are. A server's next start finds them by itself.
    pub(crate) fn tell(&self) {
        if self.server.is_none() {
            tracing::info!("{}", self.going_on());
        }
    }

    fn going_on(&self) -> String {
        let how = self.unasked.as_deref().unwrap_or("--resume");
        format!("the steps are kept in {}; {how} goes on there", self.steps.display())
    }

    /// The same of a run that ends at any moment, if anything of it is kept then.
    pub(crate) fn continuation(&self) -> Option<String> {
        let clip = path_of_clip(&self.output, 0);
        let is_own = |path: &Path| open(path, &self.identity).is_ok();
        match self.server {
            Some(_) => None,
            None if is_own(&self.steps) => Some(self.going_on()),
            None => {
                is_own(&clip).then(|| format!("its clips are kept from {} on; --resume goes on there", clip.display()))
            }
        }
    }

    /// Removes the files: the videos are written. A run that did not ask for any leaves another run's.
    pub(crate) fn finish(&self) {
        if self.unasked.is_some() && open(&self.steps, &self.identity).is_err() {
            return;
        }
        // There is none where no step was kept.
        let _ = std::fs::remove_file(&self.steps);
        (0..clips_of(&self.output)).rev().for_each(|at| self.remove_clip(at));
    }
}

fn wrong(path: &Path, reason: &str) -> PipelineError {
    PipelineError::File { path: path.into(), reason: reason.into() }
}

/// A file of a run, if it is of this one.
fn open(path: &Path, identity: &Identity) -> Result<Checkpoint> {
    let file = Checkpoint::open(path)?;
    match file.metadata("identity") {
        None => Err(wrong(path, "holds no steps of a run")),
        Some(own) if own != identity.hash => {
            let known = file.metadata("request").and_then(|text| what_differs(text, &identity.text));
            let known = known.map_or(String::new(), |what| format!(": {what}"));
            Err(wrong(
                path,
                &format!(
                    "holds the steps of another request, model or release{known}; give what that run was given, or remove \
                     the file"
                ),
            ))
        }
        Some(_) => Ok(file),
    }
}

/// The first key in which kept steps differ from this run, with both values.
fn what_differs(kept: &str, own: &str) -> Option<String> {
    let read = |text: &str| serde_json::from_str(text).ok();
    let (key, kept, own) = difference(&read(kept)?, &read(own)?, "")?;
    // Of a single video its keys are those of the configuration.
    let key = key.strip_prefix("requests[0].").unwrap_or(&key);
    Some(format!("{key} is {} there, {} here", short(&kept), short(&own)))
}

/// Files that the run of a video's kept steps or clips writes; none where nothing is kept.
pub(super) fn recorded_outputs(output: &Path) -> Vec<PathBuf> {
    let files = [path_of(output), path_of_clip(output, 0)].into_iter().filter(|path| path.is_file());
    let recorded = files.filter_map(|path| {
        let file = Checkpoint::open(&path).ok()?;
        serde_json::from_str::<Vec<PathBuf>>(file.metadata("outputs")?).ok()
    });
    recorded.flatten().collect()
}

fn read_clip(path: &Path, identity: &Identity) -> Result<SavedClip> {
    let file = open(path, identity)?;
    let cut_tokens = file.metadata("cut_tokens").and_then(|text| serde_json::from_str::<Vec<usize>>(text).ok());
    let cut_tokens = cut_tokens.ok_or_else(|| wrong(path, "holds no clip of a run"))?;
    let (mut frames, mut sounds) = (Vec::new(), Vec::new());
    for n in 0..cut_tokens.len() {
        match file.get(&format!("frames.{n}"))?.to_tensor()? {
            Tensor::U8(bytes) => frames.push(Frames::new(fixed(bytes)?)?),
            _ => return Err(wrong(path, "holds frames that are no bytes")),
        }
        sounds.push(fixed(file.get(&format!("audio.{n}"))?.to_tensor()?.into_f32())?);
    }
    Ok(SavedClip { frames, sounds, cut_tokens, ends: ClipEnds::read(&file)? })
}

/// The clip that the steps of a file are of, and they.
fn read(path: &Path, identity: &Identity) -> Result<(usize, Saved)> {
    let wrong = |reason: &str| wrong(path, reason);
    let file = open(path, identity)?;
    let about = |key: &str| file.metadata(key).ok_or_else(|| wrong("holds no steps of a run"));
    let number = |key: &str| about(key)?.parse().map_err(|_| wrong("does not say how many steps it holds"));
    let name = about("stage")?; // alias: the file's key for the phase
    let phase = [Phase::Denoise, Phase::Refine].into_iter().find(|phase| phase.name() == name);
    let phase = phase.ok_or_else(|| wrong("is of no phase of a run"))?;
    let tensor = |name: &str| -> Result<Tensor> { Ok(file.get(name)?.to_tensor()?) };
    let carried = (0..).map(|i| format!("carried.{i}")).take_while(|name| file.contains(name));
    let carried = carried.map(|name| tensor(&name)).collect::<Result<_>>()?;
    let sound = match file.contains("sound") {
        true => Some(fixed(tensor("sound")?.into_f32())?),
        false => None,
    };
    let saved = Saved { phase, done: number("done")?, carried, sound, ends: ClipEnds::read(&file)? };
    Ok((number("clip")?, saved))
}

/// Identity of everything that a result depends on, input files and LoRAs by their content.
fn identity(config: &Config, model: &Model, jobs: &[Job]) -> Result<Identity> {
    let all = json!({
        "release": env!("CARGO_PKG_VERSION"),
        "requests": jobs.iter().map(|job| numbers(config, job)).collect::<Vec<_>>(),
        "model": model.identity(config)?,
        "inputs": hashes::of_given(config)?,
    });
    let text = all.to_string();
    Ok(Identity { hash: hex::encode(Sha256::digest(&text)), text })
}
