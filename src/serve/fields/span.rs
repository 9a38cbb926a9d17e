//! Defaults of a retake, because OpenAI's edit request has neither a time span nor a number of frames.

use std::path::{Path, PathBuf};

use super::errors::media_error;
use super::request_fields::RequestFields;
use super::{Endpoint, Fields};
use crate::config::{VideoUse, whole_frames};
use crate::media::{ClipInfo, probe_clip};
use crate::serve::error::ApiError;

impl Fields {
    /// Sets the time span and the number of frames of a retake if the request does not set them. By default the span
    /// starts after the first frame, because a retake of all frames would not use the input video at all. The number of
    /// frames is that of the video, rounded down to a number that the model supports.
    pub(super) fn fill_retake(
        &self,
        given: &mut RequestFields,
        endpoint: Endpoint,
        warnings: &mut Vec<String>,
    ) -> Result<(), ApiError> {
        let is_remix = matches!(endpoint, Endpoint::Remix(_));
        if is_remix || self.pipeline(given, endpoint)?.spec().video != Some(VideoUse::Span) {
            return Ok(());
        }
        let own = &self.loaded.config.request;
        let in_tree = |key: &str| given.get("ltx2").and_then(|tree| tree.get("request")?.get(key)).is_some();
        let has_span = ["start", "end", "retake"].iter().any(|name| given.get(name).is_some());
        let has_span = has_span || in_tree("retake") || own.retake.is_some();
        let has_frames = ["num_frames", "seconds"].iter().any(|name| given.get(name).is_some());
        let has_frames = has_frames || in_tree("num_frames");
        let Some(video) = self.given_video(given).filter(|_| !(has_span && has_frames)) else { return Ok(()) };
        let info = probed(&video, given)?;
        if !has_span {
            let start = end_of_first_frame(info.frame_rate.unwrap_or(own.frame_rate));
            given.put("start", None, start.into());
            warnings
                .push(format!("no span is given, so everything after the first frame (from {start} s) is regenerated"));
        }
        let whole = whole_frames(info.frames);
        if !has_frames && whole < info.frames {
            given.put("num_frames", None, whole.into());
            let why = "the number of frames must be one more than a multiple of 8";
            warnings.push(format!("only the first {whole} of {} frames are used: {why}", info.frames));
        }
        Ok(())
    }

    /// Returns the path of the input video of a request.
    fn given_video(&self, given: &RequestFields) -> Option<PathBuf> {
        let stored = given.get("input_video").and_then(|video| video.get("stored")?.as_str());
        let stored = stored.map(|name| self.inputs.path(name));
        stored.or_else(|| self.loaded.config.request.video.as_deref().map(PathBuf::from))
    }
}

/// Returns the size, number of frames and frame rate of an input video.
pub(super) fn probed(video: &Path, given: &RequestFields) -> Result<ClipInfo, ApiError> {
    probe_clip(video, Path::new("ffmpeg")).map_err(|error| media_error(&error, &given.name("input_video")))
}

/// Returns the end time of the first frame, in seconds, rounded up to the millisecond.
fn end_of_first_frame(rate: f64) -> f64 {
    ((1000.0 / rate).floor() + 1.0) / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_retake_keeps_only_the_first_frame() {
        for rate in [1.0, 23.976, 24.0, 25.0, 30.0, 50.0, 60.0] {
            let start = end_of_first_frame(rate);
            assert!(start > 1.0 / rate && start < 2.0 / rate, "{rate}: {start}");
        }
        assert_eq!(end_of_first_frame(24.0), 0.042);
    }
}
