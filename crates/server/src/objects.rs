//! API objects: OpenAI's video and list objects, with additional fields.

use base64::prelude::{BASE64_STANDARD, Engine};
use serde_json::{Map, Value, json};

use super::device::PreviewImage;
use super::error::Failure;
use super::job::{AcceptedJob, JobPhase, JobState, Progress, Snapshot};

/// Returns the API object of a job's video. All of OpenAI's fields are always present.
pub(crate) fn video(snapshot: &Snapshot) -> Value {
    let Snapshot { accepted, record, progress, queue_position, preview: _ } = snapshot;
    let config = accepted.config.summary();
    let (width, height, frames, fps) = match (&record.produced, accepted.expected) {
        (Some(made), _) => (made.width, made.height, Some(made.num_frames), made.fps),
        (None, Some(video)) => (video.width, video.height, Some(video.num_frames), video.fps),
        (None, None) => (config.width, config.height, accepted.num_frames(), config.frame_rate),
    };
    let duration = frames.map(|frames| frames as f64 / fps);
    let id = accepted.id.as_str();
    let warnings: Vec<&String> =
        accepted.warnings.iter().chain(record.produced.iter().flat_map(|made| &made.warnings)).collect();
    let running = record.state == JobState::InProgress;
    json!({
        "id": id,
        "object": "video",
        "model": accepted.model,
        "status": record.state.name(),
        "progress": percent(record.state, progress),
        "created_at": accepted.created_at,
        "started_at": record.started_at,
        "completed_at": record.completed_at,
        "expires_at": record.expires_at,
        "prompt": accepted.prompt(),
        "enhanced_prompt": record.produced.as_ref().and_then(|made| made.enhanced_prompt.as_ref()),
        "size": format!("{width}x{height}"),
        "seconds": seconds(accepted, duration),
        "error": record.failure.as_ref().map(Failure::to_json),
        "remixed_from_video_id": accepted.remixed_from,
        "width": width,
        "height": height,
        "num_frames": frames,
        "fps": short(fps),
        "duration_s": duration.map(short),
        "seed": config.seed,
        "pipeline": config.pipeline,
        "steps": config.steps,
        "phase": phase(record.state, progress),
        "step": running.then_some(progress.step),
        "queue_position": queue_position,
        "eta_s": progress.eta_s.filter(|_| running).map(short),
        "batch": record.batch,
        "attempts": record.attempts,
        "user": accepted.user,
        "metadata": accepted.metadata,
        "warnings": warnings,
        "timings": record.produced.as_ref().map(|made| phases(&made.timings)),
        "links": {"content": format!("/v1/videos/{id}/content"), "events": format!("/v1/videos/{id}/events")},
    })
}

/// Returns the progress of a job in the format of `progress` events.
pub(crate) fn progress(snapshot: &Snapshot) -> Value {
    let Snapshot { accepted, record, progress, queue_position, preview: _ } = snapshot;
    json!({
        "id": accepted.id,
        "progress": percent(record.state, progress),
        "phase": phase(record.state, progress),
        "step": progress.step,
        "steps": progress.steps,
        "queue_position": queue_position,
        "eta_s": progress.eta_s.filter(|_| record.state == JobState::InProgress).map(short),
    })
}

/// Returns the data of a `preview` event; `None` if the job has no preview.
pub(crate) fn preview(snapshot: &Snapshot) -> Option<Value> {
    let PreviewImage { jpeg, frames, columns, width, height, fps, at } = &**snapshot.preview.as_ref()?;
    Some(json!({
        "id": snapshot.accepted.id,
        "phase": at.stage,
        "step": at.step,
        "steps": at.steps,
        "frames": frames,
        "columns": columns,
        "width": width,
        "height": height,
        "fps": short(*fps),
        "image": format!("data:image/jpeg;base64,{}", BASE64_STANDARD.encode(jpeg)),
    }))
}

/// Returns the list object for one page of videos.
pub(crate) fn list(videos: &[Snapshot], has_more: bool) -> Value {
    let id = |snapshot: Option<&Snapshot>| snapshot.map(|s| s.accepted.id.clone());
    json!({
        "object": "list",
        "data": videos.iter().map(video).collect::<Vec<_>>(),
        "first_id": id(videos.first()),
        "last_id": id(videos.last()),
        "has_more": has_more,
    })
}

/// Returns a copy of a sidecar for clients: paths are reduced to file names, and the keys `serve` and `distributed`,
/// which describe the server and other hosts, are removed.
pub(crate) fn without_paths(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(name_of(&text).to_string()),
        Value::Array(list) => list.into_iter().map(without_paths).collect(),
        Value::Object(map) => {
            let shown = map.into_iter().filter(|(key, _)| !["serve", "distributed"].contains(&key.as_str()));
            let cut = shown.map(|(key, value)| match key.as_str() {
                // Prompts contain the client's own text, in which slashes do not indicate paths.
                "prompt" | "negative_prompt" | "enhanced" => (key, value),
                // Keys are reduced too, because the keys of `inputs` are paths.
                _ => (name_of(&key).to_string(), without_paths(value)),
            });
            Value::Object(cut.collect())
        }
        other => other,
    }
}

/// Returns the last component of a path. Text without slashes is returned unchanged.
fn name_of(text: &str) -> &str {
    let path = text.trim_end_matches('/');
    path.rsplit_once('/').map_or(if path.is_empty() { text } else { path }, |(_, name)| name)
}

fn percent(state: JobState, progress: &Progress) -> u8 {
    match state {
        JobState::Queued => 0,
        JobState::Completed => 100,
        JobState::InProgress | JobState::Failed => progress.percent.min(99),
    }
}

/// Returns the current stage of a job, or null if the job has ended.
fn phase(state: JobState, progress: &Progress) -> Value {
    match state {
        JobState::Completed | JobState::Failed => Value::Null,
        JobState::Queued if progress.stage != JobPhase::WaitingForDisk => json!(JobPhase::Queued),
        JobState::Queued | JobState::InProgress => json!(progress.stage),
    }
}

/// Returns the duration as the client requested it. If the client requested none, returns the video's duration rounded
/// to seconds, because OpenAI's clients parse the field as an integer.
fn seconds(accepted: &AcceptedJob, duration: Option<f64>) -> String {
    accepted.seconds.clone().unwrap_or_else(|| format!("{:.0}", duration.unwrap_or_default().max(1.0)))
}

/// Rounds a number to three decimal places.
fn short(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Returns the timings of a sidecar, rounded to three decimal places, without the keys `timeline` and `programs`.
fn phases(timings: &Value) -> Value {
    let mut shown = rounded(timings);
    if let Value::Object(map) = &mut shown {
        map.retain(|key, _| !["programs", "timeline"].contains(&key.as_str()));
    }
    shown
}

fn rounded(value: &Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => number.as_f64().map_or(Value::Null, |v| json!(short(v))),
        Value::Array(list) => list.iter().map(rounded).collect(),
        Value::Object(map) => Value::Object(map.iter().map(|(k, v)| (k.clone(), rounded(v))).collect::<Map<_, _>>()),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::id::Ids;
    use crate::job::{Record, VideoProperties};
    use crate::job_config::tests::job_config;

    fn snapshot(record: Record) -> Snapshot {
        let accepted = AcceptedJob {
            id: Ids::after(None).next().expect("an id"),
            created_at: 7,
            owner: "key".into(),
            model: "ltx2".into(),
            config: job_config(&json!({"prompt": "a fox", "width": 1280, "height": 704})),
            expected: None,
            fields: Map::new(),
            seconds: None,
            user: None,
            metadata: Map::new(),
            warnings: vec!["size 1280x720 is an alias of 1280x704".into()],
            remixed_from: None,
            inputs: Vec::new(),
            body_sha256: String::new(),
            idempotency_key: None,
            traceparent: None,
            shape: String::new(),
            batch_key: String::new(),
        };
        let progress = Progress { stage: JobPhase::Denoise, step: 17, steps: 40, percent: 100, eta_s: Some(14.21987) };
        Snapshot {
            accepted: Arc::new(accepted),
            record: Arc::new(record),
            progress,
            queue_position: None,
            preview: None,
        }
    }

    fn produced() -> VideoProperties {
        VideoProperties {
            width: 1280,
            height: 704,
            num_frames: 97,
            fps: 24.0,
            bytes: 1,
            frames_sha256: String::new(),
            samples_sha256: String::new(),
            timings: json!({"denoise": 1.23456, "timeline": []}),
            enhanced_prompt: Some("a red fox / at dawn".into()),
            warnings: vec!["cut".into()],
        }
    }

    #[test]
    fn openai_fields_are_present_in_every_state() {
        for state in [JobState::Queued, JobState::InProgress, JobState::Completed, JobState::Failed] {
            let object = video(&snapshot(Record { state, ..Record::queued() }));
            for field in ["id", "created_at", "model", "object", "progress", "seconds", "size", "status"] {
                assert!(!object[field].is_null(), "{state:?} {field}");
            }
            for field in ["completed_at", "error", "expires_at", "prompt", "remixed_from_video_id"] {
                assert!(object.get(field).is_some(), "{state:?} {field}");
            }
            assert!(object["seconds"].as_str().is_some_and(|text| text.parse::<u32>().is_ok()));
        }
    }

    #[test]
    fn progress_is_below_100_until_completed() {
        let running = video(&snapshot(Record { state: JobState::InProgress, ..Record::queued() }));
        assert_eq!(
            (&running["progress"], &running["phase"], &running["step"]),
            (&json!(99), &json!("denoise"), &json!(17))
        );
        assert_eq!(running["eta_s"], json!(14.22));
        let done = Record { state: JobState::Completed, produced: Some(produced()), ..Record::queued() };
        let done = video(&snapshot(done));
        assert_eq!((&done["progress"], &done["phase"], &done["eta_s"]), (&json!(100), &Value::Null, &Value::Null));
        let failed = video(&snapshot(Record { state: JobState::Failed, ..Record::queued() }));
        assert_eq!(failed["eta_s"], Value::Null);
        assert_eq!(
            (&done["duration_s"], &done["seconds"], &done["num_frames"]),
            (&json!(4.042), &json!("4"), &json!(97))
        );
        assert_eq!(done["timings"]["denoise"], json!(1.235));
        assert_eq!(
            (&done["enhanced_prompt"], &running["enhanced_prompt"]),
            (&json!("a red fox / at dawn"), &Value::Null)
        );
        assert_eq!(done["warnings"], json!(["size 1280x720 is an alias of 1280x704", "cut"]));
    }

    #[test]
    fn failure_is_serialized_as_error_object() {
        let failure = Some(Failure::new("cancelled", "it was cancelled"));
        let object = video(&snapshot(Record { state: JobState::Failed, failure, ..Record::queued() }));
        assert_eq!(object["error"]["code"], "cancelled");
        assert_eq!(object["error"]["message"], "it was cancelled");
    }

    #[test]
    fn sidecars_show_only_file_names() {
        let sidecar = json!({
            "config": {
                "model": {"path": "/srv/my models/LTX-2/", "upsampler": "up/x2.safetensors"},
                "request": {"prompt": "/a b/c"},
                "runtime": {"distributed": {"coordinator": "10.0.0.7:99"}},
                "serve": {"state": "/state"},
            },
            "inputs": {"/state/inputs/ab.png": "ff"},
            "versions": {"plugin": "/opt/p/plugin.so"},
            "enhancement": {"prompts": [{"prompt": "a/b", "enhanced": "c/d"}], "enhancer": {"endpoint": "http://10.0.0.1/v1"}},
            "list": ["/x/y", 1],
        });
        let expected = json!({
            "config": {
                "model": {"path": "LTX-2", "upsampler": "x2.safetensors"},
                "request": {"prompt": "/a b/c"},
                "runtime": {},
            },
            "inputs": {"ab.png": "ff"},
            "versions": {"plugin": "plugin.so"},
            "enhancement": {"prompts": [{"prompt": "a/b", "enhanced": "c/d"}], "enhancer": {"endpoint": "v1"}},
            "list": ["y", 1],
        });
        assert_eq!(without_paths(sidecar), expected);
    }
}
