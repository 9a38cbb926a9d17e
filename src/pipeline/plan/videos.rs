//! The videos of a run and their output files.

use std::io::IsTerminal;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use super::options::GenerateOptions;
use super::outputs::{check_outputs, unfinished};
use super::resolved::ResolvedConfig;
use crate::config::{Config, ConfigError, ProgressEvery, Sidecar};
use crate::destination::check_ending;
use crate::pipeline::enhancement::{self, Enhancement};
use crate::pipeline::error::{PipelineError, Result};
use crate::runtime::processes::Group;
use crate::text_file;

/// Maximum number of videos per run: indices have four digits.
const MAX_VIDEOS: usize = 10_000;

/// One video of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Index of the video in the run, from 0.
    pub index: usize,
    pub prompt: String,
    /// Random seed.
    pub seed: u64,
}

/// The videos of a run, with the options of `ltx2 generate`.
#[derive(Clone, Debug, Default)]
pub struct RunVideos {
    /// Prompt and seed of each video, in the order in which the videos are generated.
    pub jobs: Vec<Job>,
    /// Output file of each job. In a multi-process run, only those of the first process are used. Empty: the run writes
    /// no videos.
    pub outputs: Vec<PathBuf>,
    pub options: GenerateOptions,
    /// Number of steps between two progress reports. `None`: progress is not reported.
    pub(in crate::pipeline) progress_every: Option<usize>,
    /// With `--resume`, the prompts that the interrupted run has enhanced. Jobs have the enhanced prompts.
    pub(in crate::pipeline) enhancement: Option<Enhancement>,
    /// Whether the run was started for several videos. Frames, audio and dumps then have a name for each video, even if
    /// only one video remains to be generated after `--resume`.
    pub(super) several: bool,
    /// Number of videos for which the run was started, including those that are finished.
    pub(in crate::pipeline) total: usize,
}

impl Deref for RunVideos {
    type Target = GenerateOptions;

    fn deref(&self) -> &GenerateOptions {
        &self.options
    }
}

impl RunVideos {
    /// Returns the videos of a configuration that are not finished, and checks their output files.
    ///
    /// # Errors
    /// Returns an error if the prompts file cannot be read, if the options contradict each other, or if an output would
    /// overwrite a file.
    pub fn new(config: &Config, options: GenerateOptions, group: Option<&Group>) -> Result<Self> {
        let usage = |why: &str| Err(PipelineError::Usage(why.into()));
        let mut jobs = config.jobs()?;
        if options.checkpoint_every.is_some() || options.resume {
            if group.is_some() {
                return usage("--checkpoint-every and --resume are not supported with several processes");
            }
            if config.output.path.is_none() {
                return usage("--checkpoint-every and --resume require a fixed output path: set -o or output.path");
            }
        }
        let mut outputs = match group {
            // Only the first process writes files and checks for existing ones.
            Some(group) if group.id() > 0 => jobs.iter().map(|_| PathBuf::new()).collect(),
            _ => output_paths(config.output.path.as_deref().map(Path::new), &jobs, config.pipeline.extension())?,
        };
        let total = jobs.len();
        let (mut enhancement, mut resolved) = (None, ResolvedConfig::from(config));
        if options.resume {
            if config.request.enhance_prompt {
                enhancement = enhancement::recorded(config, &outputs);
            }
            if let Some(known) = &enhancement {
                jobs.iter_mut().for_each(|job| known.replace(&mut job.prompt, config.enhancement_seed()));
                resolved.set_enhanced_clips(known);
            }
            (jobs, outputs) = unfinished(&resolved, jobs, outputs, options.force)?;
        }
        let progress_every = match config.sampler.progress_every {
            ProgressEvery::Steps(steps) => Some(steps),
            // With a progress bar, each step is a separate device call; without one, all steps run in one call. With
            // several processes, all must make the same calls, so a terminal has no influence.
            ProgressEvery::Auto(_) => (group.is_none() && std::io::stderr().is_terminal()).then_some(1),
        };
        let videos = RunVideos { jobs, outputs, options, progress_every, enhancement, several: total > 1, total };
        check_outputs(&resolved, &videos)?;
        Ok(videos)
    }

    /// Returns the videos of a run that writes no files, such as a benchmark. They have no output paths.
    pub fn unwritten(jobs: Vec<Job>, sidecar: Option<&Sidecar>) -> Self {
        let options = GenerateOptions { sidecar: sidecar.cloned(), ..GenerateOptions::default() };
        RunVideos { jobs, options, ..RunVideos::default() }
    }

    /// Returns the configuration with the prompts of later clips that the interrupted run has enhanced.
    pub(in crate::pipeline) fn resolved(&self, config: &Config) -> ResolvedConfig {
        let mut own = ResolvedConfig::from(config);
        self.enhancement.iter().for_each(|known| own.set_enhanced_clips(known));
        own
    }

    /// Returns the record of prompts that an earlier run has enhanced: the run to resume, or that of the sidecar to
    /// repeat. `None`: there is none, or the prompts are others.
    pub(super) fn recorded_enhancement(&self) -> Option<Enhancement> {
        let repeated = || Enhancement::from_sidecar(&self.options.sidecar.as_ref()?.enhancement);
        let own = self.enhancement.clone().or_else(repeated)?;
        self.jobs.iter().any(|job| own.has_enhanced(&job.prompt)).then_some(own)
    }

    /// Returns whether frames, audio and dumps have a separate name for each video.
    pub(in crate::pipeline) fn has_several(&self) -> bool {
        self.several || self.jobs.len() > 1
    }
}

impl Config {
    /// Returns the videos of the request: `num_videos` per prompt, with consecutive seeds.
    ///
    /// # Errors
    /// Returns an error if the prompts file cannot be read or has no prompts, or if there are more than 10000 videos.
    pub fn jobs(&self) -> std::result::Result<Vec<Job>, ConfigError> {
        let prompts = match &self.request.prompts {
            None => vec![self.request.prompt.clone().unwrap_or_default()],
            Some(file) => {
                let path = PathBuf::from(file);
                let text = text_file::read(&path).map_err(|source| ConfigError::unreadable(&path, source))?;
                prompt_lines(&text)
            }
        };
        if prompts.is_empty() {
            let file = self.request.prompts.as_deref().expect("without a file there is one prompt");
            return Err(ConfigError::argument(format!("{file}: contains no prompts; write one prompt per line")));
        }
        let each = self.request.num_videos as u64;
        if prompts.len() * self.request.num_videos > MAX_VIDEOS {
            let why = format!(
                "{} prompts with {each} videos each exceed the limit of {MAX_VIDEOS} videos per run",
                prompts.len()
            );
            return Err(ConfigError::argument(why));
        }
        let all = prompts.into_iter().flat_map(|prompt| (0..each).map(move |i| (prompt.clone(), i)));
        Ok(all.enumerate().map(|(index, (prompt, i))| Job { index, prompt, seed: self.request.seed + i }).collect())
    }
}

/// Returns the non-empty lines of a prompts file, trimmed.
fn prompt_lines(text: &str) -> Vec<String> {
    text.lines().map(str::trim).filter(|l| !l.is_empty()).map(String::from).collect()
}

/// Returns the output file of each video, in order.
///
/// A single video is written to `path`, by default `out/ltx2_<seed>.mp4`, with a number appended if that file or its
/// sidecar exists. Several videos are written to the folder `path` as `{index:04}_{seed}.mp4`; by default, each is
/// named like a single video. Audio-only output has the extension `wav`.
///
/// # Errors
/// Returns an error if the extension does not match the output format, if `path` is a folder but must be a file, or if
/// it is a file but must be a folder.
pub(super) fn output_paths(
    path: Option<&Path>,
    jobs: &[Job],
    extension: &str,
) -> std::result::Result<Vec<PathBuf>, ConfigError> {
    let Some(path) = path else { return Ok(default_paths(Path::new("out"), jobs, extension)) };
    let fail = |why: &str| Err(ConfigError::argument(format!("{}: {why}", path.display())));
    Ok(match jobs {
        [_] if path.is_dir() => return fail("is a folder; pass a file name, e.g. with .mp4"),
        [_] => {
            let written =
                if extension == "wav" { "sound alone is written as WAV" } else { "videos are written as MP4" };
            check_ending(path, written, &[extension]).map_err(ConfigError::argument)?;
            vec![path.to_path_buf()]
        }
        _ if path.is_file() => return fail("is a file; several videos need a folder"),
        _ => jobs.iter().map(|j| path.join(format!("{:04}_{}.{extension}", j.index, j.seed))).collect(),
    })
}

fn default_paths(folder: &Path, jobs: &[Job], extension: &str) -> Vec<PathBuf> {
    let mut chosen: Vec<PathBuf> = Vec::new();
    for job in jobs {
        let numbered = |n: usize| match n {
            0 => folder.join(format!("ltx2_{}.{extension}", job.seed)),
            n => folder.join(format!("ltx2_{}_{n}.{extension}", job.seed)),
        };
        // A video and an audio file with the same seed would share a sidecar.
        let is_free = |path: &PathBuf| !path.exists() && !sidecar_path(path).exists() && !chosen.contains(path);
        let free = (0..).map(numbered).find(is_free);
        chosen.extend(free);
    }
    chosen
}

/// Returns the path of a video's sidecar: `out.json` for `out.mp4`.
pub(crate) fn sidecar_path(video: &Path) -> PathBuf {
    video.with_extension("json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jobs(n: usize) -> Vec<Job> {
        (0..n).map(|index| Job { index, prompt: "p".into(), seed: 10 + index as u64 }).collect()
    }

    #[test]
    fn file_names_contain_seed_and_index() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        assert_eq!(default_paths(out, &jobs(1), "mp4"), [out.join("ltx2_10.mp4")]);
        std::fs::write(out.join("ltx2_10.mp4"), "").unwrap();
        std::fs::write(out.join("ltx2_10_1.mp4"), "").unwrap();
        assert_eq!(default_paths(out, &jobs(1), "mp4"), [out.join("ltx2_10_2.mp4")]);
        // A name is also taken if its sidecar exists.
        assert_eq!(default_paths(out, &jobs(1), "wav"), [out.join("ltx2_10.wav")]);
        std::fs::write(out.join("ltx2_10.json"), "").unwrap();
        assert_eq!(default_paths(out, &jobs(1), "wav"), [out.join("ltx2_10_1.wav")]);
        let same: Vec<Job> = jobs(2).into_iter().map(|j| Job { seed: 7, ..j }).collect();
        assert_eq!(default_paths(out, &same, "mp4"), [out.join("ltx2_7.mp4"), out.join("ltx2_7_1.mp4")]);

        let path = out.join("clips");
        let several = output_paths(Some(&path), &jobs(2), "mp4").unwrap();
        assert_eq!(several, [path.join("0000_10.mp4"), path.join("0001_11.mp4")]);
        assert_eq!(sidecar_path(&several[0]), path.join("0000_10.json"));
    }

    #[test]
    fn output_path_must_be_a_file_or_folder_as_needed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.mp4");
        assert_eq!(output_paths(Some(&file), &jobs(1), "mp4").unwrap(), std::slice::from_ref(&file));
        std::fs::write(&file, "").unwrap();
        let message = |path: &Path, n| output_paths(Some(path), &jobs(n), "mp4").unwrap_err().to_string();
        assert!(message(&file, 2).ends_with("is a file; several videos need a folder"));
        assert!(message(folder.path(), 1).ends_with("is a folder; pass a file name, e.g. with .mp4"));
        let sound = output_paths(Some(&file), &jobs(1), "wav").unwrap_err().to_string();
        assert!(sound.ends_with("sound alone is written as WAV; use the extension .wav"), "{sound}");
    }

    #[test]
    fn prompts_are_the_non_empty_lines() {
        assert_eq!(prompt_lines("a cat\r\n\n  \n a dog \n"), ["a cat", "a dog"]);
    }
}
