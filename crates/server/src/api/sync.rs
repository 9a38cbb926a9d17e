//! Synchronous generation: the video is returned in the response to the request that creates it.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::Response;
use serde_json::{Map, Value};

use super::create::{RequestKind, submit};
use super::guard::About;
use super::{App, content};
use crate::error::ApiError;
use crate::job::{JobState, Snapshot, VideoProperties};
use crate::jobs::{Caller, Waiter};
use crate::listen::ended as over;

pub(super) async fn sync(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let (snapshot, waiter) = submit(&app, caller.clone(), request, RequestKind::Sync).await?;
    let id = snapshot.accepted.id.clone();
    let ended = tokio::time::timeout(app.settings.sync_timeout.duration(), ended(&app, &caller, snapshot)).await;
    // The job has ended, or the timeout has expired and the job continues without this client. In both cases, dropping
    // the waiters must not cancel the job.
    waiter.into_iter().for_each(Waiter::answered);
    let ended = ended.map_err(|_| {
        let message = format!("the video did not finish within serve.sync_timeout; poll GET /v1/videos/{id}");
        ApiError::new(504, "sync_timeout", message).should_retry(false)
    })??;
    if let Some(failure) = &ended.record.failure {
        return Err(failure.to_error());
    }
    let mut response = content::of_video(&app, &id, &HeaderMap::new()).await?;
    response.extensions_mut().insert(About(id.to_string()));
    let headers = response.headers_mut();
    let mut say = |name: &'static str, value: String| {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(name, value);
        }
    };
    say("x-video-id", id.to_string());
    say("x-model", ended.accepted.model.clone());
    let seconds = ended.record.completed_at.zip(ended.record.started_at).map(|(end, start)| end.saturating_sub(start));
    let stages = ended.record.produced.as_ref().map(stages).unwrap_or_default();
    let total = stages.get("total").and_then(Value::as_f64).or(seconds.map(|seconds| seconds as f64));
    say("x-inference-time-s", format!("{:.3}", total.unwrap_or_default()));
    say("server-timing", server_timing(&stages));
    say("x-stage-durations", Value::Object(stages).to_string());
    Ok(response)
}

/// Waits until the job has ended and returns its final state. Fails if the server shuts down first.
async fn ended(app: &App, caller: &Caller, mut snapshot: Snapshot) -> Result<Snapshot, ApiError> {
    let mut changes = app.jobs.watch(caller, &snapshot.accepted.id)?;
    let mut ending = app.ending.clone();
    while !snapshot.record.state.is_terminal() {
        snapshot = changes.borrow_and_update().clone();
        if snapshot.record.state.is_terminal() {
            break;
        }
        tokio::select! {
            changed = changes.changed() => changed.map_err(|_| ApiError::video_not_found())?,
            () = over(&mut ending) => {
                let message = format!("the server is shutting down; poll /v1/videos/{} later", snapshot.accepted.id);
                return Err(ApiError::new(503, "draining", message).should_retry(false));
            }
        }
    }
    debug_assert!(matches!(snapshot.record.state, JobState::Completed | JobState::Failed));
    Ok(snapshot)
}

/// Returns the duration of each generation phase, in seconds.
fn stages(produced: &VideoProperties) -> Map<String, Value> {
    let Some(timings) = produced.timings.as_object() else { return Map::new() };
    let seconds = |value: &Value| value.as_f64().or_else(|| value["total"].as_f64());
    let known = [
        "load",
        "compile",
        "text_encoder",
        "connectors",
        "denoise",
        "upsampler",
        "refine",
        "round",
        "video_decoder",
        "audio_decoder",
        "encoding",
        "total",
    ];
    let found = known.iter().filter_map(|name| Some((name.to_string(), seconds(timings.get(*name)?)?)));
    found.map(|(name, seconds)| (name, Value::from((seconds * 1e4).round() / 1e4))).collect()
}

/// Formats the durations as a `Server-Timing` header, in milliseconds.
fn server_timing(stages: &Map<String, Value>) -> String {
    let one =
        |(name, value): (&String, &Value)| format!("{name};dur={:.1}", 1000.0 * value.as_f64().unwrap_or_default());
    stages.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn phase_durations_are_sent_in_both_headers() {
        let produced = VideoProperties {
            width: 1,
            height: 1,
            num_frames: 1,
            fps: 1.0,
            bytes: 0,
            frames_sha256: String::new(),
            samples_sha256: String::new(),
            timings: json!({"denoise": {"total": 0.31652, "steps": 3}, "refine": null, "total": 2.0, "timeline": []}),
            enhanced_prompt: None,
            warnings: Vec::new(),
        };
        let stages = stages(&produced);
        assert_eq!(Value::Object(stages.clone()), json!({"denoise": 0.3165, "total": 2.0}));
        assert_eq!(server_timing(&stages), "denoise;dur=316.5, total;dur=2000.0");
    }
}
