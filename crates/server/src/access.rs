//! The access log: one line per request, written when its response has been sent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use serde_json::json;

use super::traffic::ExchangeState;

/// Access-log line for a request and its response. Contains no prompt, API key or file name.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) since: Instant,
    pub(super) request_id: String,
    pub(super) traceparent: Option<String>,
    pub(super) method: &'static str,
    /// Template of the matched route, such as `/v1/videos/{id}`, instead of the path that the client sent.
    pub(super) route: &'static str,
    pub(super) status: u16,
    /// Error code of the response; `None` if the request succeeded.
    pub(super) code: Option<&'static str>,
    /// Name of the API key; empty if the request had none. The key itself is never logged.
    pub(super) key: String,
    pub(super) job: Option<String>,
    pub(super) peer: Option<SocketAddr>,
    pub(super) traffic: Option<Arc<ExchangeState>>,
    pub(super) json: bool,
}

impl Line {
    pub(super) fn write(&self) {
        let line = if self.json { self.as_json() } else { self.as_text() };
        match self.is_routine() {
            true => tracing::debug!(target: "ltx2::serve::access", "{line}"),
            false => tracing::info!(target: "ltx2::serve::access", "{line}"),
        }
    }

    /// Returns whether the request is a probe, a metrics scrape or a successful poll, which would flood the log at `info`.
    fn is_routine(&self) -> bool {
        match self.route {
            "/live" | "/health" | "/ready" | "/metrics" => true,
            "/v1/videos/{id}" | "/v1/queue" => matches!(self.method, "GET" | "HEAD") && self.status < 400,
            _ => false,
        }
    }

    fn figures(&self) -> (f64, u64, u64) {
        let traffic = self.traffic.as_ref();
        let bytes = traffic.map_or((0, 0), |traffic| (traffic.received(), traffic.sent()));
        ((self.since.elapsed().as_secs_f64() * 1e4).round() / 10.0, bytes.0, bytes.1)
    }

    fn as_text(&self) -> String {
        let (ms, received, sent) = self.figures();
        let now = jiff::Timestamp::now();
        let Line { request_id, method, route, status, .. } = self;
        let mut line = format!("{now:.3} {request_id} {method} {route} {status} {ms} ms, {received} in, {sent} out");
        let more = [
            ("code", self.code.map(str::to_string)),
            ("key", Some(self.key.clone()).filter(|key| !key.is_empty())),
            ("job", self.job.clone()),
            ("peer", self.peer.map(|peer| peer.to_string())),
            ("trace", self.traceparent.clone()),
        ];
        for (name, value) in more {
            if let Some(value) = value {
                line.push_str(&format!(" {name}={value}"));
            }
        }
        line
    }

    fn as_json(&self) -> String {
        let (ms, received, sent) = self.figures();
        json!({
            "time": format!("{:.3}", jiff::Timestamp::now()),
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "code": self.code,
            "ms": ms,
            "bytes_in": received,
            "bytes_out": sent,
            "key": self.key,
            "job": self.job,
            "peer": self.peer.map(|peer| peer.to_string()),
            "traceparent": self.traceparent,
        })
        .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(method: &'static str, route: &'static str, status: u16) -> Line {
        Line {
            since: Instant::now(),
            request_id: "req_1".into(),
            traceparent: None,
            method,
            route,
            status,
            code: None,
            key: String::new(),
            job: None,
            peer: None,
            traffic: None,
            json: true,
        }
    }

    #[test]
    fn probes_and_successful_polls_are_not_logged_by_default() {
        for route in ["/health", "/metrics", "/v1/videos/{id}", "/v1/queue"] {
            assert!(line("GET", route, 200).is_routine(), "{route}");
        }
        for other in [
            line("GET", "/v1/videos/{id}", 404),
            line("DELETE", "/v1/videos/{id}", 200),
            line("POST", "/v1/videos", 200),
            line("GET", "/v1/videos/{id}/content", 200),
        ] {
            assert!(!other.is_routine(), "{other:?}");
        }
    }

    #[test]
    fn json_access_log_line_is_one_object() {
        let line = Line { code: Some("video_not_found"), key: "anna".into(), ..line("GET", "/v1/videos/{id}", 404) };
        let read: serde_json::Value = serde_json::from_str(&line.as_json()).expect("JSON");
        assert_eq!(
            (&read["route"], &read["status"], &read["key"]),
            (&json!("/v1/videos/{id}"), &json!(404), &json!("anna"))
        );
        let text = line.as_text();
        assert!(
            text.contains(" GET /v1/videos/{id} 404 ") && text.ends_with("code=video_not_found key=anna"),
            "{text}"
        );
    }
}
