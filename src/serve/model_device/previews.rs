//! Sends the previews of a run to the server.

use std::path::PathBuf;
use std::sync::Arc;

use super::super::device::{JobBatch, PreviewImage, PreviewSink, StepProgress};
use super::super::id::VideoId;
use super::{Config, job_phase, one_line};
use crate::pipeline::preview::{Preview, PreviewOptions, sheet};

/// Returns the options with which a batch shows previews. `None`: its jobs request none. `sink`: receiver of the
/// previews; `None`: they are discarded.
pub(super) fn options(config: &Config, order: &JobBatch, sink: Option<&PreviewSink>) -> Option<PreviewOptions> {
    let every = config.output.preview_every?;
    let ids: Vec<VideoId> = order.jobs.iter().map(|job| job.id.clone()).collect();
    let sink = sink.cloned();
    Some(PreviewOptions {
        every,
        decoder: config.output.preview_decoder.as_ref().map(PathBuf::from),
        folder: config.compile_cache(),
        fits: true,
        clip: None,
        sink: Arc::new(move |preview: Preview| {
            if let (Some(sink), Some(id)) = (&sink, ids.get(preview.video)) {
                match image(&preview) {
                    Ok(image) => sink(id, image),
                    Err(error) => tracing::warn!(%id, "{}", one_line(&error)),
                }
            }
        }),
    })
}

fn image(preview: &Preview) -> Result<PreviewImage, super::PipelineError> {
    let sheet::JpegSheet { jpeg, frames, columns, width, height } = sheet::jpeg(&preview.frames)?;
    // A sheet may leave out frames.
    let fps = preview.frame_rate * frames as f64 / preview.frames.count() as f64;
    let at = StepProgress { stage: job_phase(preview.phase), step: preview.step, steps: preview.steps };
    Ok(PreviewImage { jpeg, frames, columns, width, height, fps, at })
}
