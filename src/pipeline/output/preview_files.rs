//! Files with the previews of a video: one contact sheet per preview, in a folder next to the video.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::atomic_file::{self, FileError};
use crate::config::Config;
use crate::pipeline::error::{PipelineError, Result, one_line};
use crate::pipeline::phase::Phase;
use crate::pipeline::plan::overwrites::Replaceable;
use crate::pipeline::preview::{Preview, PreviewOptions, PreviewSink, sheet};

/// Returns the folder for the previews of the video `video`.
pub(in crate::pipeline) fn folder_of(video: &Path) -> PathBuf {
    let mut name = video.as_os_str().to_owned();
    name.push(".preview");
    name.into()
}

/// Returns the name of a preview's file.
fn name(clip: Option<usize>, phase: Phase, step: usize) -> String {
    let clip = clip.map_or(String::new(), |clip| format!("clip_{clip:04}_"));
    let pass = if phase == Phase::Refine { "refine" } else { "step" };
    format!("{clip}{pass}_{step:03}.webp")
}

/// Returns the path of the first file that is written to a folder for previews.
pub(in crate::pipeline) fn first_file(folder: &Path) -> PathBuf {
    folder.join(name(None, Phase::Denoise, 1))
}

/// Lists the previews in a folder. The list is empty if the folder does not exist.
///
/// # Errors
/// Returns an error if the folder cannot be listed.
pub(in crate::pipeline) fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let is_number = |text: &str| text.len() >= 3 && text.bytes().all(|b| b.is_ascii_digit());
    let is_preview = |path: &PathBuf| {
        let stem = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".webp"));
        let parts: Vec<&str> = stem.unwrap_or_default().split('_').collect();
        match parts[..] {
            [pass, step] | ["clip", _, pass, step] => ["step", "refine"].contains(&pass) && is_number(step),
            _ => false,
        }
    };
    let entries = std::fs::read_dir(folder).map_err(FileError::at("list", folder))?;
    Ok(entries.flatten().map(|entry| entry.path()).filter(is_preview).collect())
}

/// Removes the previews of an earlier video from a folder. Other files stay.
fn remove(folder: &Path) -> Result<()> {
    let remove = |path: PathBuf| std::fs::remove_file(&path).map_err(FileError::at("remove", &path));
    Ok(files_in(folder)?.into_iter().try_for_each(remove)?)
}

/// Returns the options with which a run writes the previews of the videos `paths`. Removes the previews of earlier
/// videos and of failed runs, unless the run resumes. `None`: previews are off.
///
/// # Errors
/// Returns an error if an earlier preview cannot be removed.
pub(in crate::pipeline) fn options(
    config: &Config,
    paths: &[PathBuf],
    replaceable: &Replaceable,
    resumes: bool,
) -> Result<Option<PreviewOptions>> {
    let Some(every) = config.output.preview_every else { return Ok(None) };
    let folders: Vec<PathBuf> = paths.iter().map(|path| folder_of(path)).collect();
    let is_written = paths.iter().all(|path| path.file_name().is_some());
    if is_written && !resumes {
        // Previews without a video are those of a run that failed.
        let is_replaced = |(path, folder): &(&PathBuf, &PathBuf)| replaceable.has(folder) || !path.exists();
        paths.iter().zip(&folders).filter(is_replaced).try_for_each(|(_, folder)| remove(folder))?;
    }
    let sink: PreviewSink = if is_written { writer(folders) } else { Arc::new(|_| ()) };
    Ok(Some(PreviewOptions {
        every,
        decoder: config.output.preview_decoder.as_ref().map(PathBuf::from),
        folder: config.compile_cache(),
        fits: true,
        clip: None,
        sink,
    }))
}

/// Returns a callback that writes each preview to the folder of its video. If a file cannot be written, logs the first
/// error, and the run continues.
fn writer(folders: Vec<PathBuf>) -> PreviewSink {
    let has_failed = AtomicBool::new(false);
    Arc::new(move |preview: Preview| {
        let Some(folder) = folders.get(preview.video) else { return };
        let path = folder.join(name(preview.clip, preview.phase, preview.step));
        let written = sheet::webp(&preview.frames)
            .and_then(|bytes| atomic_file::write_file(&path, &bytes, true).map_err(PipelineError::from));
        if let Err(error) = written
            && !has_failed.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("previews: {}", one_line(&error));
        }
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::media::Frames;
    use ndarray::Array4;

    #[test]
    fn previews_are_named_by_pass_step_and_clip() {
        let folder = tempfile::tempdir().unwrap();
        let video = folder.path().join("a.mp4");
        let mut config = Config::default();
        let options = |config: &Config, replaceable: &Replaceable, resumes| {
            super::options(config, std::slice::from_ref(&video), replaceable, resumes).unwrap()
        };
        assert!(options(&config, &Replaceable::everything(), false).is_none());
        config.output.preview_every = Some(2);
        let sink = options(&config, &Replaceable::these(Vec::new()), false).unwrap().sink;
        let frames = Frames::new(Array4::from_elem((3, 4, 4, 3), 7)).unwrap();
        for (clip, phase, step) in [(None, Phase::Denoise, 2), (None, Phase::Refine, 3), (Some(1), Phase::Denoise, 20)]
        {
            sink(Preview { video: 0, clip, phase, step, steps: 20, frames: frames.clone(), frame_rate: 3.0 });
        }
        let place = folder_of(&video);
        std::fs::write(place.join("own.webp"), "kept").unwrap();
        let mut names: Vec<_> =
            files_in(&place).unwrap().iter().map(|p| p.file_name().unwrap().to_str().unwrap().to_string()).collect();
        names.sort();
        assert_eq!(names, ["clip_0001_step_020.webp", "refine_003.webp", "step_002.webp"]);
        options(&config, &Replaceable::everything(), true);
        std::fs::write(&video, "a video").unwrap();
        options(&config, &Replaceable::these(Vec::new()), false);
        assert_eq!(files_in(&place).unwrap().len(), 3);
        std::fs::remove_file(&video).unwrap();
        options(&config, &Replaceable::these(Vec::new()), false);
        assert_eq!(files_in(&place).unwrap().len(), 0);
        assert!(place.join("own.webp").exists());
    }
}
