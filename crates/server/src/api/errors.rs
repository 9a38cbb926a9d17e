//! Error responses.

use std::any::Any;

use axum::Json;
use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ltx2_base::catch_panic::panic_message;

use crate::error::ApiError;

/// Error code of a response, passed to the access log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorCode(pub(crate) &'static str);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(self.to_json())).into_response();
        response.extensions_mut().insert(ErrorCode(self.code));
        let headers = response.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(may) = self.should_retry {
            headers.insert("x-should-retry", HeaderValue::from_static(if may { "true" } else { "false" }));
        }
        if self.status == 401 {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Logs the cause of an internal error and returns a 500 response that does not reveal it.
pub(crate) fn internal(why: impl std::fmt::Display) -> ApiError {
    tracing::error!("internal error while handling a request: {why}");
    ApiError::new(500, "internal", "internal server error; see the server's log")
}

/// Returns the response to a request whose handler panicked.
pub(crate) fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response<Body> {
    internal(panic_message(&*panic)).into_response()
}

/// Handles unknown routes: returns 404.
pub(crate) async fn no_route() -> ApiError {
    ApiError::new(404, "not_found", "no such endpoint; see /openapi.json").should_retry(false)
}

/// Handles methods that a route does not support: returns 405.
pub(crate) async fn no_method() -> ApiError {
    ApiError::new(405, "method_not_allowed", "this endpoint does not support the method; see /openapi.json")
        .should_retry(false)
}

/// Handles OpenAI endpoints that this server does not implement: returns 404.
pub(crate) async fn unsupported() -> ApiError {
    ApiError::new(404, "unsupported_endpoint", "this server does not implement the endpoint; see /openapi.json")
        .should_retry(false)
}
