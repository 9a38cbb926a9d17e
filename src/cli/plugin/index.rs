//! Finds and downloads wheels from a package index, without Python.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use ureq::http::{Response, StatusCode, header};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy, ResponseExt};

use super::settings::PluginSettings;
use crate::runtime::platforms::Wheel;

/// `Accept` header for an index page: PEP 691 (JSON), otherwise PEP 503 (HTML).
const ACCEPT: &str = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1";
/// Maximum size of an index page; pages of packages with thousands of files have a few megabytes.
const PAGE: u64 = 64 << 20;
/// Consecutive attempts without progress after which a download fails.
const TRIES: u32 = 5;

/// Locations of wheels: folders and package indexes.
pub(super) struct WheelIndex {
    settings: PluginSettings,
    agent: Agent,
}

/// File listed at a location.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ListedFile {
    name: String,
    url: String,
    /// SHA-256, if the location publishes it.
    sha256: Option<String>,
}

#[derive(Deserialize)]
struct IndexPage {
    files: Vec<PageFile>,
}

#[derive(Deserialize)]
struct PageFile {
    url: String,
    #[serde(default)]
    hashes: HashMap<String, String>,
}

impl WheelIndex {
    /// Creates the HTTP client; opens no connection.
    ///
    /// # Errors
    /// Returns an error if the certificates or the proxy are invalid.
    pub(super) fn new(settings: PluginSettings) -> Result<WheelIndex> {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .user_agent(concat!("ltx2/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(settings.timeout))
            .timeout_recv_response(Some(settings.timeout))
            .timeout_per_read(Some(settings.timeout))
            .tls_config(tls(settings.cert.as_deref())?);
        if let Some(proxy) = &settings.proxy {
            let proxy = Proxy::new(proxy).map_err(|error| anyhow!("PIP_PROXY: {}: {error}", bare(proxy)))?;
            config = config.proxy(Some(proxy));
        }
        Ok(WheelIndex { agent: config.build().into(), settings })
    }

    /// Downloads a wheel into a folder and returns its path. The caller verifies its checksum.
    ///
    /// # Errors
    /// Returns an error if no location has the wheel (with the reason for each), or if the download fails.
    pub(super) fn download(&self, wheel: &Wheel, folder: &Path) -> Result<PathBuf> {
        let requirement = format!("{}=={}", wheel.package, wheel.version);
        let found = self.find(wheel).with_context(|| format!("{requirement}: cannot download the wheel"))?;
        let target = folder.join(&found.name);
        let fetched = match file_path(&found.url) {
            Some(path) => fs::copy(&path, &target).map(drop).with_context(|| format!("{path}: cannot copy")),
            None => self.fetch(&found.url, &target),
        };
        fetched.with_context(|| format!("{requirement}: cannot download the wheel"))?;
        Ok(target)
    }

    /// Returns the first listed file that matches the wheel.
    fn find(&self, wheel: &Wheel) -> Result<ListedFile> {
        let pages = self.settings.indexes.iter().map(|url| format!("{}/{}/", url.trim_end_matches('/'), wheel.package));
        let places: Vec<String> = self.settings.links.iter().cloned().chain(pages).collect();
        let mut reasons = Vec::new();
        for place in &places {
            match self.listed(place).map(|files| select(files, wheel)) {
                Ok(Ok(found)) => return Ok(found),
                Ok(Err(reason)) => reasons.push(format!("{}: {reason}", bare(place))),
                Err(error) => reasons.push(format!("{}: {error:#}", bare(place))),
            }
        }
        let reasons = if reasons.is_empty() { "PIP_NO_INDEX disables all indexes".into() } else { reasons.join("; ") };
        bail!(
            "{reasons}; set PIP_INDEX_URL for a mirror, PIP_FIND_LINKS for a folder of wheels, HTTPS_PROXY for a proxy, or PIP_CERT for certificates"
        )
    }

    /// Lists the files of a folder or an index page.
    fn listed(&self, place: &str) -> Result<Vec<ListedFile>> {
        if let Some(folder) = file_path(place) {
            let entries = fs::read_dir(&folder)?.map(|entry| Ok(entry?.path()));
            let files = entries.collect::<io::Result<Vec<PathBuf>>>()?;
            let files = files.iter().filter_map(|path| {
                let (name, url) = (path.file_name()?.to_str()?.to_owned(), path.to_str()?.to_owned());
                Some(ListedFile { name, url, sha256: None })
            });
            return Ok(files.collect());
        }
        let mut response = self.get(place, ACCEPT, 0)?;
        if !response.status().is_success() {
            bail!("{}", response.status());
        }
        let base = response.get_uri().to_string();
        let kind = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
        let is_json = kind.contains("json");
        let text = response.body_mut().with_config().limit(PAGE).read_to_string()?;
        let links = if is_json { json_links(&text)? } else { html_links(&text) };
        Ok(links.into_iter().filter_map(|(url, sha256)| listed(&join(&base, &url), sha256)).collect())
    }

    /// Sends a GET request for a URL, starting at byte `from`.
    fn get(&self, url: &str, accept: &str, from: u64) -> Result<Response<Body>> {
        let mut request = self.agent.get(bare(url)).header(header::ACCEPT, accept);
        if let Some(credentials) = self.credentials(url) {
            request = request.header(header::AUTHORIZATION, format!("Basic {}", BASE64_STANDARD.encode(credentials)));
        }
        if from > 0 {
            request = request.header(header::RANGE, format!("bytes={from}-"));
        }
        Ok(request.call()?)
    }

    /// Returns the credentials `NAME:PASSWORD` of a URL, or those of an index on the same host.
    fn credentials(&self, url: &str) -> Option<Vec<u8>> {
        let urls = std::iter::once(url).chain(self.settings.indexes.iter().map(String::as_str));
        let mut on_host = urls.filter(|other| authority(other).1 == authority(url).1);
        on_host.find_map(|url| {
            let (name, password) = authority(url).0.map(|user| user.split_once(':').unwrap_or((user, "")))?;
            Some(percent_decode_str(name).chain(*b":").chain(percent_decode_str(password)).collect())
        })
    }

    /// Downloads a file. If the connection breaks, resumes at the last received byte.
    fn fetch(&self, url: &str, target: &Path) -> Result<()> {
        let mut file = File::create(target).with_context(|| format!("{}: cannot write", target.display()))?;
        let (mut have, mut failed) = (0, 0);
        loop {
            let before = have;
            let reason = match self.get(url, "*/*", have) {
                Ok(response) if response.status().is_success() => match receive(response, &mut file, &mut have) {
                    Ok(()) => return Ok(()),
                    Err(DownloadFailure::Write(error)) => {
                        return Err(error).with_context(|| format!("{}: cannot write", target.display()));
                    }
                    Err(DownloadFailure::Read(error)) => error.into(),
                },
                Ok(response) => match response.status() {
                    status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                        anyhow!("{status}")
                    }
                    status => bail!("{}: {status}", bare(url)),
                },
                Err(error) => error,
            };
            failed = if have > before { 1 } else { failed + 1 };
            if failed == TRIES {
                return Err(reason)
                    .with_context(|| format!("{}: the download failed {TRIES} times after {have} bytes", bare(url)));
            }
            tracing::warn!("{}: {reason:#}; resuming after {have} bytes", bare(url));
            std::thread::sleep(Duration::from_millis(500) * failed);
        }
    }
}

/// Error of a download: reading from the server or writing the file failed.
enum DownloadFailure {
    Read(io::Error),
    Write(io::Error),
}

/// Writes the body of a response to a file and updates `have`, the number of bytes received. A partial response is
/// appended after the first `have` bytes.
fn receive(mut response: Response<Body>, file: &mut File, have: &mut u64) -> Result<(), DownloadFailure> {
    if response.status() != StatusCode::PARTIAL_CONTENT {
        // The server ignored the range and sends the complete file.
        *have = 0;
    }
    file.set_len(*have).and_then(|()| file.seek(SeekFrom::Start(*have))).map_err(DownloadFailure::Write)?;
    let length = response.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let end = length.map(|length: u64| *have + length);
    let (mut body, mut buffer) = (response.body_mut().as_reader(), vec![0; 1 << 18]);
    loop {
        match body.read(&mut buffer).map_err(DownloadFailure::Read)? {
            0 if end.is_some_and(|end| *have < end) => {
                return Err(DownloadFailure::Read(io::ErrorKind::UnexpectedEof.into()));
            }
            0 => return Ok(()),
            many => {
                file.write_all(&buffer[..many]).map_err(DownloadFailure::Write)?;
                *have += many as u64;
            }
        }
    }
}

/// Creates the TLS configuration with the certificate authorities of a PEM file, or of the system (which
/// `SSL_CERT_FILE` and `SSL_CERT_DIR` override).
fn tls(cert: Option<&Path>) -> Result<TlsConfig> {
    let certificates: Vec<Certificate<'static>> = match cert {
        Some(path) => {
            let text = fs::read(path).with_context(|| format!("PIP_CERT: {}: cannot read the file", path.display()))?;
            let items = parse_pem(&text).collect::<Result<Vec<_>, _>>();
            let items = items.with_context(|| format!("PIP_CERT: {}: not a PEM file", path.display()))?;
            let certificates = items.into_iter().filter_map(|item| match item {
                PemItem::Certificate(certificate) => Some(certificate),
                _ => None,
            });
            let certificates: Vec<_> = certificates.collect();
            if certificates.is_empty() {
                bail!("PIP_CERT: {}: contains no certificate", path.display());
            }
            certificates
        }
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

/// Returns the listed file that matches the wheel by name, and by checksum if listed; otherwise the reason why no file
/// matches.
fn select(files: Vec<ListedFile>, wheel: &Wheel) -> Result<ListedFile, String> {
    let (total, mut other) = (files.len(), None);
    for file in files.into_iter().filter(|file| is_wheel(&file.name, wheel)) {
        match &file.sha256 {
            Some(sum) if !sum.eq_ignore_ascii_case(wheel.sha256) => other = Some((file.name, sum.clone())),
            _ => return Ok(file),
        }
    }
    Err(match other {
        Some((name, sum)) => format!("{name} has sha256 {sum}, expected {}", wheel.sha256),
        None => {
            format!("none of the {total} listed files is {} {} for {}", wheel.package, wheel.version, wheel.platform)
        }
    })
}

/// Returns whether a file name matches a wheel: `PACKAGE-VERSION-PYTHON-ABI-PLATFORM.whl`, where dots separate multiple
/// platform tags.
fn is_wheel(name: &str, wheel: &Wheel) -> bool {
    let Some(parts) = name.strip_suffix(".whl").map(|stem| stem.split('-').collect::<Vec<_>>()) else {
        return false;
    };
    let (Some(&package), Some(&version), Some(&platform)) = (parts.first(), parts.get(1), parts.last()) else {
        return false;
    };
    let plain = |text: &str| text.to_lowercase().replace(['_', '.'], "-");
    let tag = wheel.python.map(|python| format!("cp{}", python.replace('.', "")));
    parts.len() >= 5
        && plain(package) == plain(wheel.package)
        && version == wheel.version
        && platform.split('.').any(|tag| tag == wheel.platform)
        && tag.is_none_or(|tag| parts[parts.len() - 3..parts.len() - 1].iter().all(|own| *own == tag))
}

/// Returns the listed file of a URL; `None` if the URL has no file name.
fn listed(url: &str, sha256: Option<String>) -> Option<ListedFile> {
    let (url, fragment) = url.split_once('#').unwrap_or((url, ""));
    let name = url.split('?').next()?.rsplit('/').next().filter(|name| !name.is_empty())?;
    let name = percent_decode_str(name).decode_utf8().ok()?.into_owned();
    // A name with a slash would escape the download folder.
    let sha256 = sha256.or_else(|| fragment.strip_prefix("sha256=").map(str::to_owned));
    (!name.contains('/')).then(|| ListedFile { name, url: url.into(), sha256 })
}

/// Returns URL and checksum of each file of a PEP 691 page.
fn json_links(text: &str) -> Result<Vec<(String, Option<String>)>> {
    let page: IndexPage = serde_json::from_str(text).context("not a package index page")?;
    Ok(page.files.into_iter().map(|mut file| (file.url, file.hashes.remove("sha256"))).collect())
}

/// Returns the link targets of a PEP 503 page.
fn html_links(text: &str) -> Vec<(String, Option<String>)> {
    let anchors =
        text.split("<a").skip(1).filter_map(|rest| rest.split_once("href=").map(|(_, value)| value.trim_start()));
    let targets = anchors.filter_map(|value| {
        let quote = value.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        Some((value[1..].split(quote).next()?.replace("&amp;", "&"), None))
    });
    targets.collect()
}

/// Resolves a link of a page to an absolute URL.
fn join(base: &str, reference: &str) -> String {
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

/// Returns the user information and host of a URL.
fn authority(url: &str) -> (Option<&str>, &str) {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or("");
    authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host))
}

/// Removes the credentials from a URL. Requests send them in a header, and messages must not show them.
fn bare(url: &str) -> String {
    match authority(url).0 {
        Some(user) => url.replacen(&format!("{user}@"), "", 1),
        None => url.into(),
    }
}

/// Returns the path of a local location, given as a path or `file://` URL; `None` for other URLs.
fn file_path(place: &str) -> Option<String> {
    match place.strip_prefix("file://") {
        Some(path) => percent_decode_str(path).decode_utf8().ok().map(|path| path.into_owned()),
        None => (!place.contains("://")).then(|| place.to_owned()),
    }
}

#[cfg(test)]
mod tests;
