//! Errors as answers.

use std::any::Any;

use axum::Json;
use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::contained::panic_message;
use crate::serve::error::ApiError;

/// The code of an answer that is an error, for the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Code(pub(crate) &'static str);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(self.to_json())).into_response();
        response.extensions_mut().insert(Code(self.code));
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

/// A fault of the server's own. What it was is in the log alone.
pub(crate) fn internal(why: impl std::fmt::Display) -> ApiError {
    tracing::error!("a request failed: {why}");
    ApiError::new(500, "internal", "the server made a mistake; its log says more")
}

/// The answer where a handler panicked.
pub(crate) fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response<Body> {
    internal(panic_message(&*panic)).into_response()
}

/// A route that is not there.
pub(crate) async fn no_route() -> ApiError {
    ApiError::new(404, "not_found", "there is no such endpoint; /openapi.json lists them").should_retry(false)
}

/// A method that a route does not have.
pub(crate) async fn no_method() -> ApiError {
    ApiError::new(405, "method_not_allowed", "the endpoint does not take this method").should_retry(false)
}

/// An endpoint of OpenAI's that no model here is for.
pub(crate) async fn unsupported() -> ApiError {
    ApiError::new(404, "unsupported_endpoint", "this server has no such endpoint").should_retry(false)
}
