//! Videos as they are: one, a list, the queue; cancelled and removed.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, RawQuery, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};

use super::guard::About;
use super::{App, blocking};
use crate::serve::error::ApiError;
use crate::serve::id::VideoId;
use crate::serve::job::{Snapshot, State as JobState};
use crate::serve::jobs::{Caller, ListQuery};
use crate::serve::objects;

/// Milliseconds that the reference client waits between two polls. It reads them once and keeps them.
const POLL_AFTER: &str = "1000";
/// Videos of a page.
const PAGE: usize = 20;
const LONGEST_PAGE: usize = 100;

/// The id in a path; other text is a video that is not there.
pub(super) struct Id(pub(super) VideoId);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let text = Path::<String>::from_request_parts(parts, state).await.ok();
        text.and_then(|text| VideoId::parse(&text)).map(Id).ok_or_else(ApiError::video_not_found)
    }
}

/// A video as an answer.
pub(super) fn answer(snapshot: &Snapshot) -> Response {
    let mut response = Json(objects::video(snapshot)).into_response();
    response.extensions_mut().insert(About(snapshot.accepted.id.to_string()));
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if !snapshot.record.state.is_terminal() {
        headers.insert("openai-poll-after-ms", HeaderValue::from_static(POLL_AFTER));
    }
    response
}

pub(super) async fn get(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    app.jobs.get(&caller, &id).map(|snapshot| answer(&snapshot))
}

pub(super) async fn cancel(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let jobs = Arc::clone(&app.jobs);
    blocking(move || jobs.cancel(&caller, &id)).await.map(|snapshot| answer(&snapshot))
}

pub(super) async fn delete(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let (jobs, gone) = (Arc::clone(&app.jobs), id.clone());
    blocking(move || jobs.delete(&caller, &gone)).await?;
    let mut response = Json(json!({"id": id, "object": "video.deleted", "deleted": true})).into_response();
    response.extensions_mut().insert(About(id.to_string()));
    Ok(response)
}

pub(super) async fn list(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, ApiError> {
    let query = list_query(&parameters(query.as_deref(), &["after", "limit", "order", "status"])?)?;
    let page = app.jobs.list(&caller, &query);
    Ok(Json(objects::list(&page.jobs, page.has_more)))
}

pub(super) async fn queue(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Json<Value> {
    let (running, waiting) = app.jobs.queue(&caller);
    Json(queue_object(&app, &running, &waiting))
}

/// A caller's queue as an object.
pub(super) fn queue_object(app: &App, running: &[Snapshot], waiting: &[Snapshot]) -> Value {
    let ids = |jobs: &[Snapshot]| jobs.iter().map(|job| job.accepted.id.clone()).collect::<Vec<_>>();
    let ends = running.iter().filter_map(|job| job.progress.eta_s).reduce(f64::max);
    json!({
        "object": "queue",
        "running": ids(running),
        "queued": ids(waiting),
        "limit": app.serve.queue,
        "eta_s": ends.map(|seconds| (seconds * 1000.0).round() / 1000.0),
    })
}

/// The parameters of a query, decoded. Those that no endpoint knows are refused by name.
///
/// # Errors
/// Another name, a name twice, text that is not UTF-8.
pub(super) fn parameters(query: Option<&str>, known: &[&str]) -> Result<Vec<(String, String)>, ApiError> {
    let mut found: Vec<(String, String)> = Vec::new();
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let bad = || ApiError::new(400, "invalid_value", "the query is not UTF-8 in percent-encoding");
        let (name, value) = (decode(name).ok_or_else(bad)?, decode(value).ok_or_else(bad)?);
        if !known.contains(&name.as_str()) {
            let shown: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
            let message = format!("there is no query parameter '{shown}'; there are {}", known.join(", "));
            return Err(ApiError::field("unknown_field", shown, message));
        }
        if found.iter().any(|(other, _)| *other == name) {
            let message = format!("the query parameter '{name}' is given twice");
            return Err(ApiError::field("invalid_value", name, message));
        }
        if !value.is_empty() {
            found.push((name, value));
        }
    }
    Ok(found)
}

/// Undoes the percent-encoding of a query.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                let [high, low] = digits.map(|digit| char::from(digit).to_digit(16));
                u8::try_from(high? * 16 + low?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

fn list_query(parameters: &[(String, String)]) -> Result<ListQuery, ApiError> {
    let mut query = ListQuery { after: None, limit: PAGE, descending: true, state: None };
    for (name, value) in parameters {
        let wrong = |why: &str| ApiError::field("invalid_value", name.clone(), format!("{name}: {why}"));
        match name.as_str() {
            "after" => {
                query.after = Some(VideoId::parse(value).ok_or_else(|| wrong("it must be the id of a video"))?);
            }
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=LONGEST_PAGE).contains(limit));
                query.limit = limit.ok_or_else(|| wrong("it must be a number from 1 to 100"))?;
            }
            "order" => {
                query.descending = match value.as_str() {
                    "desc" => true,
                    "asc" => false,
                    _ => return Err(wrong("it must be asc or desc")),
                };
            }
            _ => {
                let states = [JobState::Queued, JobState::InProgress, JobState::Completed, JobState::Failed];
                let state = states.into_iter().find(|state| state.name() == value);
                let why = "it must be queued, in_progress, completed or failed";
                query.state = Some(state.ok_or_else(|| wrong(why))?);
            }
        }
    }
    Ok(query)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(query: &str) -> Result<ListQuery, ApiError> {
        list_query(&parameters(Some(query), &["after", "limit", "order", "status"])?)
    }

    #[test]
    fn a_list_is_asked_for_by_its_query() {
        let query = read("limit=100&order=asc&status=in%5Fprogress&after=").expect("a query");
        assert_eq!((query.limit, query.descending, query.state), (100, false, Some(JobState::InProgress)));
        assert_eq!(query.after, None);
        let query = read("").expect("a query");
        assert_eq!((query.limit, query.descending, query.state), (20, true, None));
    }

    #[test]
    fn what_is_wrong_with_a_query_is_said_by_name() {
        for (bad, param) in [
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("limit=1e3", "limit"),
            ("limit=99999999999999999999999", "limit"),
            ("order=up", "order"),
            ("status=done", "status"),
            ("after=video_1", "after"),
            ("after=..%2f..", "after"),
            ("page=2", "page"),
            ("limit=1&limit=2", "limit"),
        ] {
            let error = read(bad).expect_err(bad);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{bad}: {error}");
        }
        for bad in ["after=%ff", "after=%0", "after=%zz", "%00=1"] {
            assert_eq!(read(bad).expect_err(bad).status, 400);
        }
    }
}
