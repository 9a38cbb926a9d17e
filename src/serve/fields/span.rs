//! Values of an edit that clients leave out: OpenAI's own has neither a span nor a number of frames.

use std::path::{Path, PathBuf};

use super::faults::of_media;
use super::given::RequestFields;
use super::{Endpoint, Fields};
use crate::config::{Pipeline, whole_frames};
use crate::media::{ClipInfo, probe_clip};
use crate::serve::error::ApiError;

impl Fields {
    /// Gives a retake its span and its frames where the request says none: all behind the first frame, since a retake of the whole
    /// video would keep nothing of it; and as many frames as the model makes of the given ones.
    pub(super) fn fill_retake(
        &self,
        given: &mut RequestFields,
        endpoint: Endpoint,
        warnings: &mut Vec<String>,
    ) -> Result<(), ApiError> {
        let is_remix = matches!(endpoint, Endpoint::Remix(_));
        if is_remix || self.pipeline(given, endpoint)? != Pipeline::Retake {
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
            let start = behind_first_frame(info.frame_rate.unwrap_or(own.frame_rate));
            given.put("start", None, start.into());
            warnings.push(format!("no span is given: all from {start} s on, behind the first frame, is made anew"));
        }
        let whole = whole_frames(info.frames);
        if !has_frames && whole < info.frames {
            given.put("num_frames", None, whole.into());
            let why = "a number of frames is one more than a multiple of 8";
            warnings.push(format!("the first {whole} of {} frames are edited: {why}", info.frames));
        }
        Ok(())
    }

    /// The file of the video that a request starts from.
    fn given_video(&self, given: &RequestFields) -> Option<PathBuf> {
        let stored = given.get("input_video").and_then(|video| video.get("stored")?.as_str());
        let stored = stored.map(|name| self.inputs.path(name));
        stored.or_else(|| self.loaded.config.request.video.as_deref().map(PathBuf::from))
    }
}

/// Size, frames and rate of a given video.
pub(super) fn probed(video: &Path, given: &RequestFields) -> Result<ClipInfo, ApiError> {
    probe_clip(video, Path::new("ffmpeg")).map_err(|error| of_media(&error, &given.name("input_video")))
}

/// Seconds, to the millisecond, at which the first frame is over.
fn behind_first_frame(rate: f64) -> f64 {
    ((1000.0 / rate).floor() + 1.0) / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_frame_alone_is_kept() {
        for rate in [1.0, 23.976, 24.0, 25.0, 30.0, 50.0, 60.0] {
            let start = behind_first_frame(rate);
            assert!(start > 1.0 / rate && start < 2.0 / rate, "{rate}: {start}");
        }
        assert_eq!(behind_first_frame(24.0), 0.042);
    }
}
