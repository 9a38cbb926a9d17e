//! Middleware for all requests: checks of the host, origin and API key, and the access log.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{ConnectInfo, MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tower_http::cors::{AllowOrigin, CorsLayer};
use tower_http::csrf::CsrfLayer;

use super::App;
use super::errors::ErrorCode;
use crate::access::Line;
use crate::error::ApiError;
use crate::jobs::Caller;
use crate::settings::LogFormat;
use crate::traffic::ExchangeState;

/// Routes that require no API key.
const OPEN: [&str; 5] = ["/", "/live", "/health", "/ready", "/session"];
/// Maximum size of a request body in bytes, except on endpoints that create videos (`serve.body_limit`).
pub(super) const SMALL_BODY: u64 = 64 << 10;
/// Name of the session cookie of the web page.
pub(super) const COOKIE: &str = "ltx2_session";

/// Id of the job that a request concerns, for the access log.
#[derive(Clone, Debug)]
pub(super) struct About(pub(super) String);

/// Assigns an id to the request and adds a line to the access log when the response has been sent. This is the
/// outermost middleware layer.
pub(super) async fn note(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let since = Instant::now();
    let id = request_id(request.headers());
    let traceparent = traceparent(request.headers());
    let method = known(request.method());
    let route = request.extensions().get::<MatchedPath>().map_or("other", |path| app.route(path.as_str()));
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0);
    let traffic = request.extensions().get::<Arc<ExchangeState>>().cloned();
    if let Some(traffic) = &traffic {
        traffic.limit(SMALL_BODY);
        traffic.at_least(app.settings.min_upload_rate.0);
    }
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert("x-request-id", value);
    }
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    let status = response.status().as_u16();
    app.metrics.request(route, method, status, since.elapsed());
    let (caller, about) = (response.extensions().get::<Caller>(), response.extensions().get::<About>());
    let line = Line {
        since,
        request_id: id,
        traceparent,
        method,
        route,
        status,
        code: response.extensions().get::<ErrorCode>().map(|code| code.0),
        key: caller.map(|caller| caller.name.clone()).unwrap_or_default(),
        job: about.map(|about| about.0.clone()),
        peer,
        traffic,
        json: app.settings.log_format == LogFormat::Json,
    };
    response.extensions_mut().insert(Arc::new(line));
    response
}

/// Returns a method as a metric label. Unknown methods become `other`, which bounds the number of labels.
fn known(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

/// Returns the client's `X-Request-Id` if it is safe to log, otherwise a new id.
fn request_id(headers: &HeaderMap) -> String {
    let legal = |text: &&str| {
        (1..=128).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    let given = headers.get("x-request-id").and_then(|value| value.to_str().ok()).filter(legal);
    given.map_or_else(new_request_id, str::to_string)
}

fn new_request_id() -> String {
    let mut random = [0; 12];
    // If the random number generator fails, an id of zeros is better than an error.
    let _ = getrandom::fill(&mut random);
    format!("req_{}", hex::encode(random))
}

/// Returns the W3C `traceparent` header (version, trace id, parent id and flags) if it is well-formed.
pub(super) fn traceparent(headers: &HeaderMap) -> Option<String> {
    let text = headers.get("traceparent")?.to_str().ok()?;
    let parts: Vec<&str> = text.split('-').collect();
    let lower = |part: &str| part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
    (lengths == [2, 32, 16, 2] && parts.iter().all(|part| lower(part))).then(|| text.to_string())
}

/// Rejects requests whose `Host` is not this server, which protects against DNS rebinding.
pub(super) async fn host(State((app, bound)): State<(Arc<App>, IpAddr)>, request: Request, next: Next) -> Response {
    let named = request.uri().authority().map(|authority| authority.as_str());
    let named = named.or_else(|| request.headers().get(header::HOST).and_then(|host| host.to_str().ok()));
    match named.is_some_and(|named| is_own(named, bound, &app.settings.allow_host)) {
        true => next.run(request).await,
        false => {
            let message = "the request's Host is not this server; the server's --allow-host option allows other hosts";
            ApiError::new(421, "wrong_host", message).should_retry(false).into_response()
        }
    }
}

/// Returns whether a host name refers to this server: localhost or a loopback address, the bound address, or a name in
/// `allowed`. If the server listens on all interfaces, any IP address refers to it, because DNS rebinding needs a name.
fn is_own(named: &str, bound: IpAddr, allowed: &[String]) -> bool {
    let host = match named.strip_prefix('[') {
        Some(v6) => v6.split_once(']').map_or("", |(host, _)| host),
        None => named.split_once(':').map_or(named, |(host, _)| host),
    };
    let is = |other: &String| other.eq_ignore_ascii_case(host) || other.eq_ignore_ascii_case(named);
    let address = host.parse::<IpAddr>().ok();
    host.eq_ignore_ascii_case("localhost")
        || address.is_some_and(|ip| ip.is_loopback() || ip == bound || bound.is_unspecified())
        || allowed.iter().any(is)
}

/// Authenticates a request by its API key or session cookie; responds with 401 if neither is valid.
pub(super) async fn key(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let caller = match app.keys.needed() {
        false => Some(Caller { name: String::new(), sees_all: true }),
        true => caller(&app, request.headers()),
    };
    let open = request.extensions().get::<MatchedPath>().is_some_and(|path| OPEN.contains(&path.as_str()));
    if caller.is_none() && !open {
        let message = "missing or invalid API key; send `Authorization: Bearer KEY`";
        return ApiError::new(401, "invalid_api_key", message).should_retry(false).into_response();
    }
    if let Some(caller) = &caller {
        request.extensions_mut().insert(caller.clone());
    }
    let mut response = next.run(request).await;
    if let Some(caller) = caller {
        response.extensions_mut().insert(caller);
    }
    response
}

fn caller(app: &App, headers: &HeaderMap) -> Option<Caller> {
    match bearer(headers) {
        Some(key) => app.keys.caller_for_key(key),
        None => app.keys.caller_for_cookie(cookie(headers)?),
    }
}

/// Returns the bearer token in the `Authorization` header.
pub(super) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

fn cookie(headers: &HeaderMap) -> Option<&str> {
    let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let pairs = all.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.filter(|(name, _)| *name == COOKIE).map(|(_, value)| value).next()
}

/// Returns a middleware layer that rejects cross-origin requests that change state, except from `origins`.
pub(super) fn csrf(
    origins: &[String],
) -> Result<CsrfLayer<impl Fn(tower_http::csrf::ProtectionError) -> Response + Clone + use<>>, String> {
    let mut layer = CsrfLayer::new();
    for origin in origins {
        layer = layer.add_trusted_origin(origin).map_err(|error| format!("serve.cors_origin: {error}"))?;
    }
    Ok(layer.with_rejection_response(|_| {
        let message = "cross-origin request rejected; the server's --cors-origin option allows other origins";
        ApiError::new(403, "cross_origin", message).should_retry(false).into_response()
    }))
}

/// Returns the CORS layer that admits `origins`; `None` if `origins` is empty, so that browsers block every other
/// origin.
pub(super) fn cors(origins: &[String]) -> Result<Option<CorsLayer>, String> {
    if origins.is_empty() {
        return Ok(None);
    }
    let parsed = origins.iter().map(|origin| origin.parse::<HeaderValue>());
    let parsed = parsed.collect::<Result<Vec<_>, _>>().map_err(|error| format!("serve.cors_origin: {error}"))?;
    let names = |list: &[&'static str]| list.iter().map(|name| HeaderName::from_static(name)).collect::<Vec<_>>();
    let asked =
        ["authorization", "content-type", "idempotency-key", "if-none-match", "range", "traceparent", "x-request-id"];
    let shown = [
        "accept-ranges",
        "content-disposition",
        "content-range",
        "etag",
        "location",
        "openai-poll-after-ms",
        "retry-after",
        "server-timing",
        "x-inference-time-s",
        "x-model",
        "x-request-id",
        "x-should-retry",
        "x-stage-durations",
        "x-video-id",
    ];
    let layer = CorsLayer::new()
        .allow_origin(AllowOrigin::list(parsed))
        .allow_methods([Method::GET, Method::HEAD, Method::POST, Method::DELETE])
        .allow_headers(names(&asked))
        .expose_headers(names(&shown))
        .max_age(Duration::from_secs(600));
    Ok(Some(layer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_must_be_loopback_bound_or_allowed() {
        let loopback: IpAddr = "127.0.0.1".parse().expect("an address");
        let any: IpAddr = "0.0.0.0".parse().expect("an address");
        let allowed = ["video.example".to_string()];
        for good in ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "video.example:443", "Video.Example"]
        {
            assert!(is_own(good, loopback, &allowed), "{good}");
        }
        for bad in
            ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1", "[evil", "video.example.evil"]
        {
            assert!(!is_own(bad, loopback, &allowed), "{bad}");
        }
        assert!(is_own("10.0.0.1:8000", any, &[]) && !is_own("rebound.example", any, &[]));
        assert!(is_own("10.0.0.1:8000", "10.0.0.1".parse().expect("an address"), &[]));
    }

    #[test]
    fn client_request_id_is_kept_only_if_safe_to_log() {
        let mut headers = HeaderMap::new();
        headers.insert("x-request-id", HeaderValue::from_static("a.b-C_9"));
        assert_eq!(request_id(&headers), "a.b-C_9");
        for bad in ["a b", "", "a\"b", &"x".repeat(129)] {
            headers.insert("x-request-id", HeaderValue::from_str(bad).expect("a value"));
            assert!(request_id(&headers).starts_with("req_"), "{bad}");
        }
    }

    #[test]
    fn malformed_traceparent_is_ignored() {
        let mut headers = HeaderMap::new();
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        for (text, kept) in [(good, true), ("00-short-00f067aa0ba902b7-01", false), (&good.to_uppercase(), false)] {
            headers.insert("traceparent", HeaderValue::from_str(text).expect("a value"));
            assert_eq!(traceparent(&headers).is_some(), kept, "{text}");
        }
    }
}
