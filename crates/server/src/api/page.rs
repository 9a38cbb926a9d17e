//! The web page and the session cookie that it uses.

use std::sync::{Arc, OnceLock};

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{Html, IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::App;
use super::errors::internal;
use super::guard::{COOKIE, bearer};
use crate::error::ApiError;

/// The web page, which is self-contained: it loads no other resources.
const PAGE: &str = include_str!("../page.html");

pub(super) async fn page() -> Response {
    let mut response = Html(PAGE).into_response();
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, policy()),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (header::HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(name, value);
        }
    }
    response
}

/// Returns the content security policy. It allows only the page's own scripts and styles, and only images, media and
/// API endpoints of this server.
fn policy() -> &'static str {
    static POLICY: OnceLock<String> = OnceLock::new();
    POLICY.get_or_init(|| {
        let hash = |text| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)));
        let hashes = |tag| element_contents(PAGE, tag).map(hash).collect::<Vec<_>>().join(" ");
        format!(
            "default-src 'none'; script-src {}; style-src {}; img-src 'self' blob: data:; media-src 'self' blob:; \
             connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            hashes("script"),
            hashes("style"),
        )
    })
}

/// Yields the contents of each element with the given tag.
fn element_contents<'a>(page: &'a str, tag: &str) -> impl Iterator<Item = &'a str> + use<'a> {
    let (open, close) = (format!("<{tag}"), format!("</{tag}>"));
    let mut rest = page;
    std::iter::from_fn(move || {
        let (_, behind) = rest.split_once(open.as_str())?;
        let (_, behind) = behind.split_once('>')?;
        let (text, behind) = behind.split_once(close.as_str())?;
        rest = behind;
        Some(text)
    })
}

pub(super) async fn session(State(app): State<Arc<App>>, headers: HeaderMap) -> Result<Response, ApiError> {
    if !app.keys.needed() {
        return Ok(Json(json!({"needed": false})).into_response());
    }
    let key = bearer(&headers).unwrap_or_default();
    let cookie = app.keys.begin_session(key).map_err(internal)?;
    let refused = || ApiError::new(401, "invalid_api_key", "invalid API key").should_retry(false);
    let cookie = cookie.ok_or_else(refused)?;
    let mut response = Json(json!({"needed": true})).into_response();
    let value = format!("{COOKIE}={cookie}; Path=/; HttpOnly; SameSite=Strict; Max-Age=43200");
    response.headers_mut().insert(header::SET_COOKIE, HeaderValue::from_str(&value).map_err(internal)?);
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csp_hashes_cover_every_script_and_style() {
        assert!(PAGE.len() <= 68 << 10, "{} bytes", PAGE.len());
        for (tag, directive) in [("script", "script-src"), ("style", "style-src")] {
            let texts: Vec<&str> = element_contents(PAGE, tag).collect();
            assert_eq!(texts.len(), PAGE.matches(&format!("<{tag}")).count(), "{tag}");
            assert!(!texts.is_empty(), "{tag}");
            let (_, behind) = policy().split_once(directive).expect("the directive");
            let (list, _) = behind.split_once(';').expect("its end");
            for text in texts {
                let hash = STANDARD.encode(Sha256::digest(text));
                assert!(list.contains(&format!("'sha256-{hash}'")), "{tag}");
            }
            assert!(!list.contains("unsafe"));
        }
        // The hashes in the policy do not cover attributes.
        assert!(!PAGE.contains(" style=\"") && !PAGE.contains(" onclick=") && !PAGE.contains("http://"));
    }

    #[test]
    fn contents_of_every_matching_html_element_are_found() {
        let found: Vec<&str> = element_contents("<style>a</style><p><style media=\"x\">b</style>", "style").collect();
        assert_eq!(found, ["a", "b"]);
    }
}
