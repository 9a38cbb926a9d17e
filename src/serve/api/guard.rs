//! Checks that every request passes: its host, its origin, its key; and the line that is written of it.

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
use super::errors::Code;
use crate::config::LogFormat;
use crate::serve::access::Line;
use crate::serve::error::ApiError;
use crate::serve::jobs::Caller;
use crate::serve::traffic::Traffic;

/// Routes that need no key.
const OPEN: [&str; 5] = ["/", "/live", "/health", "/ready", "/session"];
/// Bytes that the body of a request without a video may have.
pub(super) const SMALL_BODY: u64 = 64 << 10;
/// The page's cookie.
pub(super) const COOKIE: &str = "ltx2_session";

/// The job that a request was about, for its line of the log.
#[derive(Clone, Debug)]
pub(super) struct About(pub(super) String);

/// Outermost: gives a request its id, and writes its line once its answer is sent.
pub(super) async fn note(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let since = Instant::now();
    let id = request_id(request.headers());
    let traceparent = traceparent(request.headers());
    let method = known(request.method());
    let route = request.extensions().get::<MatchedPath>().map_or("other", |path| app.route(path.as_str()));
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0);
    let traffic = request.extensions().get::<Arc<Traffic>>().cloned();
    if let Some(traffic) = &traffic {
        traffic.limit(SMALL_BODY);
        traffic.at_least(app.serve.min_upload_rate.0);
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
        code: response.extensions().get::<Code>().map(|code| code.0),
        key: caller.map(|caller| caller.name.clone()).unwrap_or_default(),
        job: about.map(|about| about.0.clone()),
        peer,
        traffic,
        json: app.serve.log_format == LogFormat::Json,
    };
    response.extensions_mut().insert(Arc::new(line));
    response
}

/// A method's name, of a bounded number.
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

/// The client's id where it may be written into a log, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let legal = |text: &&str| {
        (1..=128).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    let given = headers.get("x-request-id").and_then(|value| value.to_str().ok()).filter(legal);
    given.map_or_else(new_request_id, str::to_string)
}

fn new_request_id() -> String {
    let mut random = [0; 12];
    // An id of zeros is better than no answer.
    let _ = getrandom::fill(&mut random);
    format!("req_{}", hex::encode(random))
}

/// W3C trace context, where it has its form: version, trace, parent, flags.
pub(super) fn traceparent(headers: &HeaderMap) -> Option<String> {
    let text = headers.get("traceparent")?.to_str().ok()?;
    let parts: Vec<&str> = text.split('-').collect();
    let lower = |part: &str| part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
    (lengths == [2, 32, 16, 2] && parts.iter().all(|part| lower(part))).then(|| text.to_string())
}

/// Refuses requests that were meant for another host: a name of an attacker's that points here.
pub(super) async fn host(State((app, bound)): State<(Arc<App>, IpAddr)>, request: Request, next: Next) -> Response {
    let named = request.uri().authority().map(|authority| authority.as_str());
    let named = named.or_else(|| request.headers().get(header::HOST).and_then(|host| host.to_str().ok()));
    match named.is_some_and(|named| is_own(named, bound, &app.serve.allow_host)) {
        true => next.run(request).await,
        false => {
            let message = "the request names a host that is not this server; --allow-host allows one";
            ApiError::new(421, "wrong_host", message).should_retry(false).into_response()
        }
    }
}

/// Whether a `Host` is this server: loopback, the bound address, an address where all are bound (a name that points here is an
/// attacker's only where it is a name), or one that is allowed.
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

/// The key or cookie of a request, and whose it is.
pub(super) async fn key(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let caller = match app.keys.needed() {
        false => Some(Caller { name: String::new(), sees_all: true }),
        true => caller(&app, request.headers()),
    };
    let open = request.extensions().get::<MatchedPath>().is_some_and(|path| OPEN.contains(&path.as_str()));
    if caller.is_none() && !open {
        let message = "give a key of this server as `Authorization: Bearer KEY`";
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
        Some(key) => app.keys.of_bearer(key),
        None => app.keys.of_cookie(cookie(headers)?),
    }
}

/// The key that a request presents.
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

/// Refuses writes that a page of another origin sends.
pub(super) fn csrf(
    origins: &[String],
) -> Result<CsrfLayer<impl Fn(tower_http::csrf::ProtectionError) -> Response + Clone + use<>>, String> {
    let mut layer = CsrfLayer::new();
    for origin in origins {
        layer = layer.add_trusted_origin(origin).map_err(|error| format!("serve.cors_origin: {error}"))?;
    }
    Ok(layer.with_rejection_response(|_| {
        let message = "a page of another origin may not write here; --cors-origin allows one";
        ApiError::new(403, "cross_origin", message).should_retry(false).into_response()
    }))
}

/// Rights of pages of other origins: none, but for those that are named.
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
    fn hosts_are_loopback_the_bound_address_and_those_that_are_allowed() {
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
    fn ids_of_requests_are_the_clients_where_a_log_may_hold_them() {
        let mut headers = HeaderMap::new();
        headers.insert("x-request-id", HeaderValue::from_static("a.b-C_9"));
        assert_eq!(request_id(&headers), "a.b-C_9");
        for bad in ["a b", "", "a\"b", &"x".repeat(129)] {
            headers.insert("x-request-id", HeaderValue::from_str(bad).expect("a value"));
            assert!(request_id(&headers).starts_with("req_"), "{bad}");
        }
    }

    #[test]
    fn trace_context_has_its_form_or_is_left_out() {
        let mut headers = HeaderMap::new();
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        for (text, kept) in [(good, true), ("00-short-00f067aa0ba902b7-01", false), (&good.to_uppercase(), false)] {
            headers.insert("traceparent", HeaderValue::from_str(text).expect("a value"));
            assert_eq!(traceparent(&headers).is_some(), kept, "{text}");
        }
    }
}
