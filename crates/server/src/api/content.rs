//! Downloads of the files of finished videos, with byte ranges and conditional requests.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::io::AsyncReadExt;
use tokio_util::io::ReaderStream;

use super::errors::internal;
use super::guard::About;
use super::videos::Id;
use super::{App, blocking};
use crate::descriptors::{Descriptors, busy, is_exhausted};
use crate::error::ApiError;
use crate::id::VideoId;
use crate::job::JobState;
use crate::jobs::{Caller, Jobs};
use crate::objects;
use crate::query::parameters;
use crate::store::Variant;

/// Number of bytes per read of a file that is being downloaded.
const CHUNK: usize = 64 << 10;
/// Maximum size of a video's JSON sidecar, in bytes.
const SIDECAR: u64 = 16 << 20;

/// Body of a download: a file with its length in bytes, or bytes in memory.
enum DownloadBody {
    File(File, u64),
    Bytes(Vec<u8>),
}

impl DownloadBody {
    fn len(&self) -> u64 {
        match self {
            DownloadBody::File(_, length) => *length,
            DownloadBody::Bytes(bytes) => bytes.len() as u64,
        }
    }

    fn body(self, range: Range<u64>) -> io::Result<Body> {
        Ok(match self {
            DownloadBody::Bytes(bytes) => {
                let part = usize::try_from(range.start).ok().zip(usize::try_from(range.end).ok());
                let part = part.and_then(|(start, end)| bytes.get(start..end)).unwrap_or_default();
                Body::from(part.to_vec())
            }
            DownloadBody::File(mut file, _) => {
                file.seek(SeekFrom::Start(range.start))?;
                let part = tokio::fs::File::from_std(file).take(range.end - range.start);
                Body::from_stream(ReaderStream::with_capacity(part, CHUNK))
            }
        })
    }
}

pub(super) async fn content(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let asked = parameters(query.as_deref(), &["variant"])?;
    let name = asked.first().map_or("video", |(_, value)| value.as_str());
    // Some clients address the outputs of a job by index; each job has a single output, with index 0.
    let name = if name == "0" { "video" } else { name };
    let variant = Variant::named(name).ok_or_else(|| {
        let names: Vec<&str> = Variant::each().map(Variant::name).collect();
        ApiError::field("invalid_value", "variant", format!("variant: must be one of {}", names.join(", ")))
    })?;
    let snapshot = app.jobs.get(&caller, &id)?;
    match snapshot.record.state {
        JobState::Completed => {}
        JobState::Failed => return Err(ApiError::new(404, "video_failed", "the video failed, so it has no files")),
        _ => return Err(ApiError::new(404, "video_not_ready", "the video is not finished yet")),
    }
    file_of(&app, &id, variant, &headers).await
}

/// Returns a response that contains the MP4 of a finished video.
pub(super) async fn of_video(app: &App, id: &VideoId, headers: &HeaderMap) -> Result<Response, ApiError> {
    file_of(app, id, Variant::Video, headers).await
}

async fn file_of(app: &App, id: &VideoId, variant: Variant, headers: &HeaderMap) -> Result<Response, ApiError> {
    let (jobs, files, wanted) = (Arc::clone(&app.jobs), app.files, id.clone());
    let source = blocking(move || open(&jobs, files, &wanted, variant)).await?;
    respond(source, id, variant, headers)
}

/// Opens a file of a job. A sidecar is read into memory and its paths are reduced to file names.
fn open(jobs: &Jobs, files: Descriptors, id: &VideoId, variant: Variant) -> Result<DownloadBody, ApiError> {
    let file = jobs.open_file(id, variant).map_err(|error| {
        if is_exhausted(&error) {
            return busy();
        }
        if error.kind() != io::ErrorKind::NotFound {
            tracing::warn!(%id, "cannot open the {} of the job: {error}", variant.name());
        }
        ApiError::new(404, "no_such_file", format!("the video has no {}", variant.name()))
    })?;
    if files.is_short(&file) {
        return Err(busy());
    }
    let length = file.metadata().map_err(internal)?.len();
    if variant != Variant::Sidecar {
        return Ok(DownloadBody::File(file, length));
    }
    let mut text = Vec::new();
    file.take(SIDECAR).read_to_end(&mut text).map_err(internal)?;
    let sidecar = serde_json::from_slice(&text).map_err(internal)?;
    let shown = serde_json::to_vec_pretty(&objects::without_paths(sidecar)).map_err(internal)?;
    Ok(DownloadBody::Bytes(shown))
}

/// Builds the response (200, 206, 304 or 416) according to the request's conditional and range headers.
fn respond(source: DownloadBody, id: &VideoId, variant: Variant, asked: &HeaderMap) -> Result<Response, ApiError> {
    let length = source.len();
    // The files of a job that are named after the video keep the rest of their names.
    let dot = variant.file().find('.').unwrap_or_default();
    let ending = variant.file().strip_prefix("video").unwrap_or(&variant.file()[dot..]);
    let tag = format!("\"{id}-{}\"", variant.name());
    let kept = [
        (header::ETAG, tag.clone()),
        (header::CACHE_CONTROL, "private, no-cache".into()),
        (header::ACCEPT_RANGES, "bytes".into()),
        (header::CONTENT_TYPE, variant.media_type().into()),
        (header::CONTENT_DISPOSITION, format!("inline; filename=\"{id}{ending}\"")),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin".into()),
    ];
    let mut response = if matches(asked, &header::IF_NONE_MATCH, &tag) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        match wanted(asked, &tag, length) {
            RequestedRange::All => part(source, 0..length, StatusCode::OK)?,
            RequestedRange::Range(range) => {
                let place = format!("bytes {}-{}/{length}", range.start, range.end - 1);
                with(part(source, range, StatusCode::PARTIAL_CONTENT)?, header::CONTENT_RANGE, &place)
            }
            RequestedRange::Beyond => {
                let error = ApiError::new(416, "range_not_satisfiable", "the range starts beyond the end of the file");
                return Ok(with(error.into_response(), header::CONTENT_RANGE, &format!("bytes */{length}")));
            }
        }
    };
    for (name, value) in kept {
        response = with(response, name, &value);
    }
    response.extensions_mut().insert(About(id.to_string()));
    Ok(response)
}

fn part(source: DownloadBody, range: Range<u64>, status: StatusCode) -> Result<Response, ApiError> {
    let length = range.end - range.start;
    let response = (status, source.body(range).map_err(internal)?).into_response();
    Ok(with(response, header::CONTENT_LENGTH, &length.to_string()))
}

fn with(mut response: Response, name: HeaderName, value: &str) -> Response {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
    response
}

/// Returns whether the header `name` contains the ETag `tag` or `*`, by weak comparison.
fn matches(asked: &HeaderMap, name: &HeaderName, tag: &str) -> bool {
    let lists = asked.get_all(name).iter().filter_map(|value| value.to_str().ok());
    lists.flat_map(|list| list.split(',')).any(|one| {
        let one = one.trim();
        one == "*" || one.strip_prefix("W/").unwrap_or(one) == tag
    })
}

/// Part of a file that a `Range` header requests.
#[derive(Debug, PartialEq, Eq)]
enum RequestedRange {
    All,
    Range(Range<u64>),
    Beyond,
}

/// Parses the `Range` header. Multiple ranges and malformed headers select the entire file.
fn wanted(asked: &HeaderMap, tag: &str, length: u64) -> RequestedRange {
    let whole = || asked.get(header::RANGE)?.to_str().ok()?.strip_prefix("bytes=");
    let Some(text) = whole() else { return RequestedRange::All };
    // The file has changed since the client received its first part, so send all of it.
    if asked.contains_key(header::IF_RANGE) && !matches(asked, &header::IF_RANGE, tag) {
        return RequestedRange::All;
    }
    let Some((first, last)) = text.trim().split_once('-') else { return RequestedRange::All };
    let number = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse::<u64>().unwrap_or(u64::MAX));
    let range = match (first.trim(), last.trim()) {
        ("", "") => return RequestedRange::All,
        ("", count) => number(count).map(|count| length.saturating_sub(count)..length),
        (first, "") => number(first).map(|first| first..length),
        (first, last) => {
            let pair = number(first).zip(number(last)).filter(|(first, last)| first <= last);
            pair.map(|(first, last)| first..last.saturating_add(1).min(length))
        }
    };
    match range {
        None => RequestedRange::All,
        Some(range) if range.start >= range.end => RequestedRange::Beyond,
        Some(range) => RequestedRange::Range(range),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asking(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).expect("a value"))).collect()
    }

    #[test]
    fn range_header_follows_rfc_9110() {
        let range = |text: &str| wanted(&asking(&[(header::RANGE, text)]), "\"t\"", 100);
        assert_eq!(range("bytes=0-0"), RequestedRange::Range(0..1));
        assert_eq!(range("bytes=10-"), RequestedRange::Range(10..100));
        assert_eq!(range("bytes=-10"), RequestedRange::Range(90..100));
        assert_eq!(range("bytes=-1000"), RequestedRange::Range(0..100));
        assert_eq!(range("bytes=90-1000"), RequestedRange::Range(90..100));
        assert_eq!(range("bytes=0-99999999999999999999999"), RequestedRange::Range(0..100));
        assert_eq!(range("bytes=100-"), RequestedRange::Beyond);
        assert_eq!(range("bytes=99999999999999999999-"), RequestedRange::Beyond);
        assert_eq!(range("bytes=-0"), RequestedRange::Beyond);
        for all in ["bytes=5-2", "bytes=0-1,5-6", "items=0-1", "bytes=-", "bytes=a-b", "bytes=", "0-1", "bytes=1--2"] {
            assert_eq!(range(all), RequestedRange::All, "{all}");
        }
        let part = |tag| wanted(&asking(&[(header::RANGE, "bytes=0-0"), (header::IF_RANGE, tag)]), "\"t\"", 100);
        assert_eq!((part("\"t\""), part("\"u\"")), (RequestedRange::Range(0..1), RequestedRange::All));
    }

    #[test]
    fn etags_are_compared_weakly() {
        let is = |list| matches(&asking(&[(header::IF_NONE_MATCH, list)]), &header::IF_NONE_MATCH, "\"a\"");
        assert!(is("\"a\"") && is("W/\"a\"") && is("\"b\", \"a\"") && is("*") && !is("\"b\"") && !is("a"));
    }
}
