//! The HTTP client, and downloads that retry and resume.

use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ureq::http::{HeaderName, Response, StatusCode, header};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy};

use crate::error::DownloadError;
use crate::partial_file::{BLOCK, PartialFile};

/// Consecutive attempts without progress after which a download or request fails: after about four minutes.
pub(crate) const TRIES: u32 = 9;
/// Attempts after which a request for a listing or for access fails: after about 15 seconds.
pub(crate) const REQUEST_TRIES: u32 = 5;
/// Maximum number of seconds between two attempts.
const LONGEST_WAIT: u64 = 60;
/// Unit of the time between attempts. Unit tests do not wait for real seconds.
const SECOND: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 1000 });

/// How to connect to servers.
#[derive(Clone, Debug)]
pub struct HttpSettings {
    /// PEM file of certificate authorities, and the name of the setting for errors. `None`: those of `SSL_CERT_FILE`,
    /// `SSL_CERT_DIR` or the system.
    pub certificates: Option<(&'static str, PathBuf)>,
    /// URL of a proxy, and the name of the setting for errors. `None`: from `HTTPS_PROXY` and related variables, which do
    /// not apply to loopback hosts.
    pub proxy: Option<(&'static str, String)>,
    /// Timeout of connecting, of waiting for a response, and of each read.
    pub timeout: Duration,
}

impl Default for HttpSettings {
    fn default() -> Self {
        HttpSettings { certificates: None, proxy: None, timeout: Duration::from_secs(60) }
    }
}

/// An HTTP client.
#[derive(Debug)]
pub struct HttpClient {
    agent: Agent,
}

impl HttpClient {
    /// Creates a client; opens no connection.
    ///
    /// # Errors
    /// Returns an error if the certificates or the proxy are invalid.
    pub fn new(settings: &HttpSettings) -> Result<Self, DownloadError> {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .user_agent(concat!("ltx2/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(settings.timeout))
            .timeout_recv_response(Some(settings.timeout))
            .timeout_per_read(Some(settings.timeout))
            .tls_config(tls(settings)?);
        if let Some((setting, proxy)) = &settings.proxy {
            let parsed = Proxy::new(proxy);
            let invalid =
                |error| DownloadError::Settings(format!("{setting}: {}: {error}", without_credentials(proxy)));
            config = config.proxy(Some(parsed.map_err(invalid)?));
        }
        Ok(HttpClient { agent: config.build().into() })
    }

    /// Sends a GET request, follows redirects, and returns the response of any status. The redirected requests do not
    /// contain an `Authorization` header.
    ///
    /// # Errors
    /// Returns an error if no response arrives.
    pub fn get(&self, url: &str, headers: &[(HeaderName, String)]) -> Result<Response<Body>, DownloadError> {
        self.send(url, headers, 10)
    }

    /// Like [`HttpClient::get`], but returns a redirect as it is.
    ///
    /// # Errors
    /// Returns an error if no response arrives.
    pub fn get_once(&self, url: &str, headers: &[(HeaderName, String)]) -> Result<Response<Body>, DownloadError> {
        self.send(url, headers, 0)
    }

    /// Sends a POST request with a JSON body and returns the response of any status, also of a redirect. `timeout`: that
    /// of the complete exchange, including the response's body.
    ///
    /// # Errors
    /// Returns an error if no response arrives in time.
    pub fn post_json(
        &self,
        url: &str,
        headers: &[(HeaderName, String)],
        body: &serde_json::Value,
        timeout: Duration,
    ) -> Result<Response<Body>, DownloadError> {
        let json = (header::CONTENT_TYPE, "application/json".to_string());
        let proxy = self.proxy(url);
        let limits = self.agent.post(url).config().max_redirects(0).timeout_global(Some(timeout));
        let mut request = limits.proxy(proxy.cloned()).build();
        for (name, value) in headers.iter().chain([&json]) {
            request = request.header(name, value);
        }
        let sent = request.send(body.to_string());
        sent.map_err(|source| DownloadError::request(without_credentials(url), source, proxy))
    }

    /// Returns the proxy of requests to a URL. The environment's proxy does not apply to loopback hosts, which it cannot
    /// reach.
    fn proxy(&self, url: &str) -> Option<&Proxy> {
        let proxy = self.agent.config().proxy()?;
        let is_bypassed =
            proxy.is_from_env() && (is_loopback(url) || url.parse().is_ok_and(|uri| proxy.is_no_proxy(&uri)));
        (!is_bypassed).then_some(proxy)
    }

    fn send(
        &self,
        url: &str,
        headers: &[(HeaderName, String)],
        redirects: u32,
    ) -> Result<Response<Body>, DownloadError> {
        let url = without_credentials(url);
        let proxy = self.proxy(&url);
        let limits = self.agent.get(&url).config().max_redirects(redirects);
        let mut request = limits.proxy(proxy.cloned()).build();
        for (name, value) in headers {
            request = request.header(name, value);
        }
        request.call().map_err(|source| DownloadError::request(url, source, proxy))
    }
}

/// Sends a request with additional headers.
type SendRequest<'a> = dyn Fn(&[(HeaderName, String)]) -> Result<Response<Body>, DownloadError> + 'a;

/// Downloads the rest of a file. `request` sends the request with the given headers, which ask for a range if a part of
/// the file exists. If the connection breaks, resumes after the last received byte. `progress` is called with the
/// number of bytes in the file, and with its size if it is known. `url` appears in messages.
///
/// # Errors
/// Returns an error if the file cannot be written, if the server refuses or sends more than the file's size, or if
/// several attempts in a row receive no further bytes.
pub fn download(
    url: &str,
    file: &mut PartialFile,
    progress: &dyn Fn(u64, Option<u64>),
    request: &SendRequest,
) -> Result<(), DownloadError> {
    let (mut failed, mut most, mut entity_tag) = (0, file.have(), None);
    loop {
        let before = file.have();
        let mut wait = None;
        let mut headers = Vec::new();
        if before > 0 {
            headers.push((header::RANGE, format!("bytes={before}-")));
            headers.extend(entity_tag.clone().map(|tag| (header::IF_RANGE, tag)));
        }
        let reason = match request(&headers) {
            Ok(response) if response.status() == StatusCode::RANGE_NOT_SATISFIABLE && before > 0 => {
                file.restart()?;
                format!("{url}: the server has no bytes after the first {before}")
            }
            Ok(response) if !response.status().is_success() => {
                let error = DownloadError::Status { url: url.into(), status: response.status() };
                if !error.is_temporary() {
                    return Err(error);
                }
                wait = Some(wait_after(&response, failed));
                error.to_string()
            }
            Ok(response) => {
                entity_tag = strong_entity_tag(&response);
                let is_rest = before == 0 || first_byte(&response) == Some(before);
                if !is_rest {
                    // The server ignores ranges, or the file has changed.
                    tracing::warn!("{url}: the server does not send the rest of the file; starting over");
                    file.restart()?;
                }
                if !is_rest && response.status() == StatusCode::PARTIAL_CONTENT {
                    format!("{url}: the server sent another range than requested")
                } else {
                    match receive(url, response, file, progress)? {
                        None => return Ok(()),
                        Some(reason) => reason,
                    }
                }
            }
            Err(error) if error.is_temporary() => error.to_string(),
            Err(error) => return Err(error),
        };
        let have = file.have();
        // A repeated download of the same bytes is no progress.
        failed = if have > most { 1 } else { failed + 1 };
        most = most.max(have);
        if failed == TRIES {
            return Err(DownloadError::Broken { url: url.into(), tries: TRIES, have, reason });
        }
        let wait = wait.unwrap_or_else(|| wait_time(failed - 1));
        tracing::warn!("{reason}; trying again after {have} bytes in {} s", wait.as_secs());
        std::thread::sleep(wait);
    }
}

/// Returns the time to wait after a temporary error status: the seconds of `Retry-After` or 2^`failed` seconds,
/// whichever is longer, up to a minute. `failed`: number of earlier failed attempts.
pub(crate) fn wait_after(response: &Response<Body>, failed: u32) -> Duration {
    let wanted = response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    wait_time(failed).max(SECOND * wanted.unwrap_or(0).min(LONGEST_WAIT) as u32)
}

/// Returns the time to wait after a failed attempt: 2^`failed` seconds, up to a minute.
pub(crate) fn wait_time(failed: u32) -> Duration {
    SECOND * (1u64 << failed.min(6)).min(LONGEST_WAIT) as u32
}

/// Returns the entity tag of a response, unless it is weak: a weak tag cannot guard a range request.
fn strong_entity_tag(response: &Response<Body>) -> Option<String> {
    let tag = response.headers().get(header::ETAG)?.to_str().ok()?;
    (!tag.starts_with("W/")).then(|| tag.to_string())
}

/// Returns the position in the file of the first byte of a partial response. `None`: the response is complete, or has no
/// `Content-Range`.
fn first_byte(response: &Response<Body>) -> Option<u64> {
    let range = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}

/// Appends the body of a response to a file. Returns the reason if the connection breaks.
///
/// # Errors
/// Returns an error if the file cannot be written, or if the body continues after the file's size.
fn receive(
    url: &str,
    mut response: Response<Body>,
    file: &mut PartialFile,
    progress: &dyn Fn(u64, Option<u64>),
) -> Result<Option<String>, DownloadError> {
    let length = response.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let end = file.size().or(length.map(|length: u64| file.have() + length));
    let (mut body, mut block) = (response.body_mut().as_reader(), vec![0; BLOCK]);
    loop {
        match body.read(&mut block) {
            Ok(0) => {
                let missing = end.and_then(|end| end.checked_sub(file.have())).filter(|missing| *missing > 0);
                return Ok(missing.map(|missing| format!("{url}: the connection was closed {missing} bytes early")));
            }
            Ok(many) => {
                let room = file.size().map_or(many as u64, |size| size - file.have());
                let fits = room.min(many as u64) as usize;
                file.append(&block[..fits])?;
                progress(file.have(), end);
                if fits < many {
                    let reason = format!("the server sends more than the {} bytes of the file", file.have());
                    return Err(DownloadError::Answer { url: url.into(), reason });
                }
            }
            Err(_) if file.size() == Some(file.have()) => return Ok(None),
            Err(error) => return Ok(Some(format!("{url}: {error}"))),
        }
    }
}

/// Creates the TLS configuration.
fn tls(settings: &HttpSettings) -> Result<TlsConfig, DownloadError> {
    let certificates = match &settings.certificates {
        Some((setting, path)) => read_certificates(setting, path)?,
        None => {
            let loaded = rustls_native_certs::load_native_certs();
            loaded.errors.iter().for_each(|error| tracing::warn!("cannot load a system certificate: {error}"));
            if loaded.certs.is_empty() {
                tracing::warn!("no certificate authorities found: install ca-certificates, or set SSL_CERT_FILE");
            }
            loaded.certs.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect()
        }
    };
    Ok(TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(certificates)))
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build())
}

/// Reads the certificates of a PEM file.
fn read_certificates(setting: &str, path: &Path) -> Result<Vec<Certificate<'static>>, DownloadError> {
    let invalid = |reason: String| DownloadError::Settings(format!("{setting}: {}: {reason}", path.display()));
    let text = std::fs::read(path).map_err(|error| invalid(format!("cannot read the file: {error}")))?;
    let items = parse_pem(&text).collect::<Result<Vec<_>, _>>();
    let items = items.map_err(|error| invalid(format!("not a PEM file: {error}")))?;
    let certificates = items.into_iter().filter_map(|item| match item {
        PemItem::Certificate(certificate) => Some(certificate),
        _ => None,
    });
    let certificates: Vec<_> = certificates.collect();
    match certificates.is_empty() {
        true => Err(invalid("contains no certificate".into())),
        false => Ok(certificates),
    }
}

/// Splits the authority of a URL into the user information and the host with its port.
pub fn authority(url: &str) -> (Option<&str>, &str) {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or("");
    authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host))
}

/// Returns whether the host of a URL is this machine: `localhost`, 127.0.0.0/8 or ::1.
pub fn is_loopback(url: &str) -> bool {
    let (_, host) = authority(url);
    let host = match host.strip_prefix('[') {
        Some(address) => address.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Removes the credentials from a URL. Requests send them in a header, and messages must not show them.
pub fn without_credentials(url: &str) -> String {
    match authority(url).0 {
        Some(user) => url.replacen(&format!("{user}@"), "", 1),
        None => url.into(),
    }
}

/// Resolves a reference, such as a link in a page or the target of a redirect, to an absolute URL.
pub fn join(base: &str, reference: &str) -> String {
    let (scheme, rest) = base.split_once("://").unwrap_or(("https", base));
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    if reference.split(['?', '#', '/']).next().is_some_and(|start| start.ends_with(':')) {
        return reference.into();
    }
    if let Some(other) = reference.strip_prefix("//") {
        return format!("{scheme}://{other}");
    }
    if reference.starts_with('/') {
        return format!("{scheme}://{host}{reference}");
    }
    let path = path.split(['?', '#']).next().unwrap_or("");
    let mut segments: Vec<&str> = path.split('/').skip(1).collect();
    segments.pop();
    for part in reference.split('/') {
        match part {
            "." => {}
            ".." => drop(segments.pop()),
            part => segments.push(part),
        }
    }
    format!("{scheme}://{host}/{}", segments.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loopback() {
        for (url, loopback) in [
            ("http://localhost:8080/v1", true),
            ("https://LOCALHOST/v1", true),
            ("http://127.0.0.2:8080", true),
            ("http://[::1]:8080/v1", true),
            ("http://user@127.0.0.1/", true),
            ("http://localhost.example.com/v1", false),
            ("http://10.0.0.1:8080/v1", false),
            ("http://[2001:db8::1]:80/v1", false),
            ("http://127.0.0.1@example.com/", false),
        ] {
            assert_eq!(is_loopback(url), loopback, "{url}");
        }
    }

    #[test]
    fn references_resolve_against_base_url() {
        let base = "https://host:1/root/simple/some-plugin/?v=1";
        for (reference, url) in [
            ("https://other/a.whl", "https://other/a.whl"),
            ("//other/a.whl", "https://other/a.whl"),
            ("/files/a.whl#sha256=1", "https://host:1/files/a.whl#sha256=1"),
            ("a.whl?from=https://x", "https://host:1/root/simple/some-plugin/a.whl?from=https://x"),
            ("../../packages/./a.whl", "https://host:1/root/packages/a.whl"),
            ("../../../../../a.whl", "https://host:1/a.whl"),
        ] {
            assert_eq!(join(base, reference), url, "{reference}");
        }
        assert_eq!(join("https://host", "a.whl"), "https://host/a.whl");
    }
}
