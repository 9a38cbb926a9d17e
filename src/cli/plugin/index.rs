//! Finds and downloads wheels from a package index, without Python.

use std::cell::{Cell, OnceCell};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use ltx2_download::http::{self, authority, join, without_credentials};
use ltx2_download::{
    Body, DownloadError, HeaderName, HttpClient, HttpSettings, PartialFile, Response, ResponseExt, header,
};
use percent_encoding::percent_decode_str;
use serde::Deserialize;

use super::settings::PluginSettings;
use crate::cli::progress::byte_progress;
use crate::runtime::platforms::Wheel;
use crate::runtime::sha256_file;

/// `Accept` header for an index page: PEP 691 (JSON), otherwise PEP 503 (HTML).
const ACCEPT: &str = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1";
/// Maximum size of an index page; pages of packages with thousands of files have a few megabytes.
const PAGE: u64 = 64 << 20;

/// Locations of wheels: folders and package indexes.
pub(super) struct WheelIndex {
    settings: PluginSettings,
    client: HttpClient,
}

/// A downloaded wheel.
pub(super) struct DownloadedWheel {
    pub(super) path: PathBuf,
    pub(super) sha256: String,
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
        let client = HttpClient::new(&HttpSettings {
            certificates: settings.cert.clone().map(|path| ("PIP_CERT", path)),
            proxy: settings.proxy.clone().map(|proxy| ("PIP_PROXY", proxy)),
            timeout: settings.timeout,
        })?;
        Ok(WheelIndex { client, settings })
    }

    /// Copies a local wheel into the folder `work`, or downloads a wheel into the folder `kept`, where an interrupted
    /// download is resumed. The caller verifies its checksum.
    ///
    /// # Errors
    /// Returns an error if no location has the wheel (with the reason for each), or if the download fails.
    pub(super) fn download(&self, wheel: &Wheel, work: &Path, kept: &Path) -> Result<DownloadedWheel> {
        let fetch = || -> Result<DownloadedWheel> {
            let found = self.find(wheel)?;
            let (path, sha256) = match file_path(&found.url) {
                Some(from) => (work.join(&found.name), copy(&from, &work.join(&found.name))?),
                None => (kept.join(&found.name), self.fetch(&found.url, &kept.join(&found.name), wheel.sha256)?),
            };
            Ok(DownloadedWheel { path, sha256 })
        };
        fetch().with_context(|| format!("{}=={}: cannot download the wheel", wheel.package, wheel.version))
    }

    /// Returns the first listed file that matches the wheel.
    fn find(&self, wheel: &Wheel) -> Result<ListedFile> {
        let pages = self.settings.indexes.iter().map(|url| format!("{}/{}/", url.trim_end_matches('/'), wheel.package));
        let places: Vec<String> = self.settings.links.iter().cloned().chain(pages).collect();
        let mut reasons = Vec::new();
        for place in &places {
            match self.listed(place).map(|files| select(files, wheel)) {
                Ok(Ok(found)) => return Ok(found),
                Ok(Err(reason)) => reasons.push(format!("{}: {reason}", without_credentials(place))),
                Err(error) => reasons.push(format!("{}: {error:#}", without_credentials(place))),
            }
        }
        let reasons = if reasons.is_empty() { "PIP_NO_INDEX disables all indexes".into() } else { reasons.join("; ") };
        bail!(
            "{reasons}; pass --index URL or set PIP_INDEX_URL for a mirror, PIP_FIND_LINKS for a folder of wheels, HTTPS_PROXY for a proxy, or PIP_CERT for certificates"
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
        let mut response = self.get(place, ACCEPT, &[]).map_err(|error| match error {
            // The caller's message contains the URL.
            DownloadError::Request { failure, .. } => anyhow::Error::new(failure),
            other => other.into(),
        })?;
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

    /// Sends a GET request with the additional headers `more`.
    fn get(&self, url: &str, accept: &str, more: &[(HeaderName, String)]) -> Result<Response<Body>, DownloadError> {
        let mut headers = vec![(header::ACCEPT, accept.to_string())];
        if let Some(credentials) = self.credentials(url) {
            headers.push((header::AUTHORIZATION, format!("Basic {}", BASE64_STANDARD.encode(credentials))));
        }
        headers.extend_from_slice(more);
        self.client.get(url, &headers)
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

    /// Downloads a file whose SHA-256 should be `wanted`, after the bytes that an earlier download left in `target`.
    /// Returns its SHA-256.
    fn fetch(&self, url: &str, target: &Path, wanted: &str) -> Result<String> {
        fs::create_dir_all(target.parent().unwrap_or(target))?;
        let shown_url = without_credentials(url);
        loop {
            let mut file = PartialFile::resume_unsized(target)?;
            let before = file.have();
            if before > 0 {
                tracing::info!("{shown_url}: resuming after {:.0} MB", before as f64 / 1e6);
            }
            if file.digits() != wanted {
                let (shown, last) = (OnceCell::new(), Cell::new(before));
                let progress = |have: u64, size: Option<u64>| {
                    let Some(size) = size else { return };
                    let show = shown.get_or_init(|| byte_progress("download", size.saturating_sub(before)));
                    show(have.saturating_sub(last.replace(have)));
                };
                http::download(&shown_url, &mut file, &progress, &|headers| self.get(url, "*/*", headers))?;
            }
            let sum = file.finish()?;
            if sum == wanted || before == 0 {
                return Ok(sum);
            }
            tracing::warn!("{shown_url}: the partial download does not match the file; starting over");
            fs::remove_file(target)?;
        }
    }
}

/// Copies a file and returns its SHA-256.
fn copy(from: &str, target: &Path) -> Result<String> {
    fs::copy(from, target).with_context(|| format!("{from}: cannot copy"))?;
    sha256_file(target).with_context(|| format!("{}: cannot read", target.display()))
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

/// Returns the path of a local location, given as a path or `file://` URL; `None` for other URLs.
fn file_path(place: &str) -> Option<String> {
    match place.strip_prefix("file://") {
        Some(path) => percent_decode_str(path).decode_utf8().ok().map(|path| path.into_owned()),
        None => (!place.contains("://")).then(|| place.to_owned()),
    }
}

#[cfg(test)]
mod tests;
