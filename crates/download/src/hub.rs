//! Repositories of models on the Hugging Face hub, or on a server with the same API (`HF_ENDPOINT`).

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde_json::Value;
use ureq::Body;
use ureq::http::{HeaderName, Response, StatusCode, header};

use crate::error::{DownloadError, is_temporary};
use crate::http::{self, HttpClient, HttpSettings, authority, join};
use crate::partial_file::{Checksum, PartialFile};

/// Server that is used unless `HF_ENDPOINT` names another one.
const ENDPOINT: &str = "https://huggingface.co";
/// Maximum size of a listing in bytes.
const LISTING: u64 = 64 << 20;
/// Maximum number of redirects of a file.
const REDIRECTS: usize = 10;
/// Checksum of a large file, in the hub's answer that redirects to the storage server.
const LINKED_ETAG: &str = "x-linked-etag";
/// Reason of an error, such as `GatedRepo`.
const ERROR_CODE: &str = "x-error-code";
/// Characters of a path segment that need no escape.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// An access token and where it was found.
#[derive(Clone, PartialEq, Eq)]
struct Token {
    value: String,
    origin: String,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token from {}", self.origin)
    }
}

/// Address of the hub, and the user's access token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubSettings {
    endpoint: String,
    token: Option<Token>,
    token_file: PathBuf,
    offline: Option<&'static str>,
}

impl HubSettings {
    /// Reads the environment variables of Hugging Face tools: `HF_ENDPOINT`; `HF_TOKEN` or the file of
    /// `HF_TOKEN_PATH`, `HF_HOME/token`, `XDG_CACHE_HOME/huggingface/token` or `~/.cache/huggingface/token`;
    /// `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// Returns an error if `HF_ENDPOINT` is not an HTTP URL, or contains a user name or password.
    pub fn from_env() -> Result<Self, DownloadError> {
        Self::from_vars(|key| std::env::var_os(key))
    }

    /// Like [`HubSettings::from_env`], with a function that looks up environment variables.
    ///
    /// # Errors
    /// Returns an error if `HF_ENDPOINT` is not an HTTP URL, or contains a user name or password.
    pub fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Result<Self, DownloadError> {
        let text = |key: &str| var(key)?.into_string().ok().map(|v| v.trim().to_string()).filter(|v| !v.is_empty());
        let folder = |key: &str| {
            let expanded = shellexpand::full_with_context_no_errors(&text(key)?, || text("HOME"), text).into_owned();
            Some(PathBuf::from(expanded))
        };
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into()).trim_end_matches('/').to_string();
        // Messages contain this URL, and a password in it would not be sent.
        if endpoint.contains('@') {
            return Err(DownloadError::Settings(
                "HF_ENDPOINT: the URL must not contain '@', as in a user name and password; remove them, and set \
                 HF_TOKEN to an access token"
                    .into(),
            ));
        }
        if !["http://", "https://"].iter().any(|scheme| endpoint.starts_with(scheme)) {
            return Err(DownloadError::Settings(format!(
                "HF_ENDPOINT: '{endpoint}' is not a URL; it must start with https:// or http://"
            )));
        }
        let home = folder("HF_HOME").or_else(|| Some(folder("XDG_CACHE_HOME")?.join("huggingface")));
        let home = home.unwrap_or_else(|| folder("HOME").unwrap_or_default().join(".cache/huggingface"));
        let token_file = folder("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let given = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].into_iter();
        let given = given.filter_map(|key| Some(Token { value: text(key)?, origin: key.into() })).next();
        let token = given.or_else(|| {
            let value = fs::read_to_string(&token_file).ok()?.trim().to_string();
            (!value.is_empty()).then(|| Token { value, origin: token_file.display().to_string() })
        });
        let is_on = |key: &&str| text(key).is_some_and(|v| !matches!(&*v.to_lowercase(), "0" | "false" | "no" | "off"));
        let offline = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().find(is_on);
        Ok(HubSettings { endpoint, token, token_file, offline })
    }

    /// Returns the environment variable that forbids the use of the network; `None` if none is set.
    pub fn offline(&self) -> Option<&'static str> {
        self.offline
    }
}

/// A client of the hub.
#[derive(Debug)]
pub struct Hub {
    http: HttpClient,
    settings: HubSettings,
}

/// The files of a repository at one revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// `org/name`.
    pub repository: String,
    /// The commit of the revision.
    pub commit: String,
    /// Whether the owner must grant access.
    pub is_gated: bool,
    /// Name of the licence; `None` if the repository states none.
    pub licence: Option<String>,
    /// The files, in the order of the listing.
    pub files: Vec<HubFile>,
}

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubFile {
    /// Path in the repository.
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    /// Checksum of the contents, which is also the name of the file's blob in the cache.
    pub checksum: Checksum,
}

#[derive(Deserialize)]
struct ModelInfo {
    sha: String,
    #[serde(default)]
    gated: Value,
    #[serde(default, rename = "cardData")]
    card: Value,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: String,
    size: u64,
}

impl Sibling {
    /// Returns the file; an error if its path could leave the target folder, or if its checksum is missing.
    fn file(self) -> Result<HubFile, String> {
        let name = &self.rfilename;
        if name.split('/').any(|part| matches!(part, "" | "." | "..")) || name.contains(char::is_control) {
            return Err(format!("the listing contains the unsafe path {name:?}"));
        }
        let is_hex = |digits: &str, length| digits.len() == length && digits.bytes().all(|b| b.is_ascii_hexdigit());
        let (checksum, size) = match (self.lfs, self.blob_id, self.size) {
            (Some(lfs), ..) if is_hex(&lfs.sha256, 64) => (Checksum::Sha256(lfs.sha256.to_lowercase()), lfs.size),
            (None, Some(id), Some(size)) if is_hex(&id, 40) => (Checksum::GitBlob(id.to_lowercase()), size),
            _ => return Err(format!("the listing has no size or checksum of '{name}'")),
        };
        Ok(HubFile { path: self.rfilename, size, checksum })
    }
}

impl Hub {
    /// Creates a client; opens no connection.
    ///
    /// # Errors
    /// Returns an error if a proxy is invalid.
    pub fn new(settings: HubSettings) -> Result<Self, DownloadError> {
        Ok(Hub { http: HttpClient::new(&HttpSettings::default())?, settings })
    }

    /// Returns the address of a repository's page, where a user accepts its terms.
    pub fn page(&self, repository: &str) -> String {
        format!("{}/{repository}", self.settings.endpoint)
    }

    /// Lists the files of a repository at a revision (a branch, tag or commit).
    ///
    /// # Errors
    /// Returns an error if the hub cannot be reached, if there is no such repository or revision, if access is denied,
    /// or if the answer is not a listing.
    pub fn list(&self, repository: &str, revision: &str) -> Result<Listing, DownloadError> {
        let escaped = utf8_percent_encode(revision, SEGMENT);
        let url = format!("{}/api/models/{repository}/revision/{escaped}?blobs=true", self.settings.endpoint);
        let mut response = self.retry(|| self.open(&url, &[], None, true))?;
        if !response.status().is_success() {
            return Err(self.refusal(repository, false, Some(revision), &url, &response));
        }
        let invalid = |reason: String| DownloadError::Answer { url: url.clone(), reason };
        let text = response.body_mut().with_config().limit(LISTING).read_to_string();
        let text = text.map_err(|source| DownloadError::request(url.clone(), source, None))?;
        let info: ModelInfo = serde_json::from_str(&text).map_err(|error| {
            invalid(format!("not the listing of a repository: {error}; check HF_ENDPOINT if you set it"))
        })?;
        if info.sha.is_empty() || !info.sha.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return Err(invalid(format!("the listing has the invalid commit '{}'", info.sha)));
        }
        let files = info.siblings.into_iter().map(Sibling::file).collect::<Result<_, _>>().map_err(invalid)?;
        let word = |key: &str| info.card[key].as_str().map(|text| text.replace(char::is_control, " "));
        Ok(Listing {
            repository: repository.into(),
            commit: info.sha,
            is_gated: !matches!(info.gated, Value::Null | Value::Bool(false)),
            licence: word("license_name").or_else(|| word("license")),
            files,
        })
    }

    /// Requests the first byte of a file, to find out whether the hub grants access. Does not contact the storage
    /// server.
    ///
    /// # Errors
    /// Returns an error if access is denied, if the hub cannot be reached or does not have the file, or if the file has
    /// changed since it was listed.
    pub fn check_access(&self, listing: &Listing, file: &HubFile) -> Result<(), DownloadError> {
        let (url, name) = (self.file_url(listing, file), format!("{}/{}", listing.repository, file.path));
        let first_byte = [(header::RANGE, "bytes=0-0".to_string())];
        let response = self.retry(|| self.open(&url, &first_byte, Some((file, &name)), false))?;
        let status = response.status();
        // An empty file has no first byte.
        match status.is_success() || status.is_redirection() || status == StatusCode::RANGE_NOT_SATISFIABLE {
            true => Ok(()),
            false => Err(self.refusal(&listing.repository, listing.is_gated, None, &url, &response)),
        }
    }

    /// Returns the address of a file's contents.
    fn file_url(&self, listing: &Listing, file: &HubFile) -> String {
        let Listing { repository, commit, .. } = listing;
        let segments: Vec<String> =
            file.path.split('/').map(|part| utf8_percent_encode(part, SEGMENT).to_string()).collect();
        format!("{}/{repository}/resolve/{commit}/{}", self.settings.endpoint, segments.join("/"))
    }

    /// Repeats a request while the connection fails or the server answers with a temporary error; returns the last
    /// response.
    fn retry(
        &self,
        request: impl Fn() -> Result<Response<Body>, DownloadError>,
    ) -> Result<Response<Body>, DownloadError> {
        let mut failed = 0;
        loop {
            let answered = request();
            failed += 1;
            let (reason, wait) = match &answered {
                Ok(response) if is_temporary(response.status()) => {
                    let reason = format!("{}: {}", self.settings.endpoint, response.status());
                    (reason, http::wait_after(response, failed - 1))
                }
                Err(error) if error.is_temporary() => (error.to_string(), http::wait_time(failed - 1)),
                _ => return answered,
            };
            if failed == http::REQUEST_TRIES {
                return answered;
            }
            tracing::warn!("{reason}; trying again in {} s", wait.as_secs());
            std::thread::sleep(wait);
        }
    }

    /// Downloads a file of a listing into `partial`, after the bytes that `partial` already has, and verifies its size
    /// and checksum. `progress` is called with the number of bytes in the file. If the download fails, `partial`
    /// remains, unless its contents are wrong.
    ///
    /// # Errors
    /// Returns an error if access is denied, if several attempts in a row receive nothing, if the file cannot be
    /// written, if it has changed since it was listed, or if its contents do not have the listed checksum.
    pub fn download(
        &self,
        listing: &Listing,
        file: &HubFile,
        partial: &Path,
        progress: &dyn Fn(u64),
    ) -> Result<(), DownloadError> {
        let (repository, name) = (&listing.repository, format!("{}/{}", listing.repository, file.path));
        let url = self.file_url(listing, file);
        let mut output = PartialFile::resume(partial, &file.checksum, file.size)?;
        let request = |headers: &[(HeaderName, String)]| {
            let response = self.open(&url, headers, Some((file, &name)), true)?;
            match response.status() {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND => {
                    Err(self.refusal(repository, listing.is_gated, None, &url, &response))
                }
                _ => Ok(response),
            }
        };
        let mut is_resumed = output.have() > 0;
        progress(output.have());
        loop {
            if output.have() < file.size {
                http::download(&url, &mut output, &|have, _| progress(have), &request)?;
            }
            let got = output.finish()?;
            if got == file.checksum.digits() {
                return Ok(());
            }
            fs::remove_file(partial).map_err(DownloadError::file(partial, "delete"))?;
            if !is_resumed {
                let (kind, want) = (file.checksum.kind(), file.checksum.digits().to_string());
                return Err(DownloadError::Checksum { file: name, kind, got, want });
            }
            tracing::warn!("{name}: the partial download does not match the file; starting over");
            is_resumed = false;
            output = PartialFile::resume(partial, &file.checksum, file.size)?;
        }
    }

    /// Sends a GET request and follows redirects. Only requests to the hub itself contain the access token. `file`: the
    /// expected file and its name for errors. `to_storage`: whether to follow redirects to other servers.
    fn open(
        &self,
        url: &str,
        headers: &[(HeaderName, String)],
        file: Option<(&HubFile, &str)>,
        to_storage: bool,
    ) -> Result<Response<Body>, DownloadError> {
        let mut target = url.to_string();
        for _ in 0..=REDIRECTS {
            let mut headers = headers.to_vec();
            let is_hub = origin(&target) == origin(&self.settings.endpoint);
            if let Some(token) = self.settings.token.as_ref().filter(|_| is_hub) {
                headers.push((header::AUTHORIZATION, format!("Bearer {}", token.value)));
            }
            let response = self.http.get_once(&target, &headers).map_err(|error| match error {
                // The address of a storage server contains a signature.
                DownloadError::Request { failure, .. } => DownloadError::Request { url: url.into(), failure },
                other => other,
            })?;
            let field = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            if let (Some((file, name)), Some(tag)) = (file, field(LINKED_ETAG).filter(|_| is_hub)) {
                let (tag, is_sha256) = (tag.trim_matches('"'), matches!(file.checksum, Checksum::Sha256(_)));
                if is_sha256 && tag.len() == 64 && !tag.eq_ignore_ascii_case(file.checksum.digits()) {
                    return Err(DownloadError::Changed { file: name.into() });
                }
            }
            match field(header::LOCATION.as_str()) {
                Some(location) if response.status().is_redirection() => {
                    target = join(&target, location);
                    if !to_storage && origin(&target) != origin(&self.settings.endpoint) {
                        return Ok(response);
                    }
                }
                _ if !is_hub
                    && response.status().is_client_error()
                    && !is_temporary(response.status())
                    && response.status() != StatusCode::RANGE_NOT_SATISFIABLE =>
                {
                    let (server, status) = (authority(&target).1.to_string(), response.status());
                    return Err(DownloadError::Storage { url: url.into(), server, status });
                }
                _ => return Ok(response),
            }
        }
        Err(DownloadError::Answer { url: url.into(), reason: format!("more than {REDIRECTS} redirects") })
    }

    /// Returns the error for a status other than success.
    fn refusal(
        &self,
        repository: &str,
        is_gated: bool,
        revision: Option<&str>,
        url: &str,
        response: &Response<Body>,
    ) -> DownloadError {
        let status = response.status();
        let code = response.headers().get(ERROR_CODE).and_then(|code| code.to_str().ok()).unwrap_or("");
        let (page, tokens) = (self.page(repository), format!("{}/settings/tokens", self.settings.endpoint));
        let denied = |advice: String| DownloadError::Denied { repository: repository.into(), status, advice };
        let is_gated = is_gated || code == "GatedRepo";
        let is_denied = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
        match (&self.settings.token, status, code) {
            (None, _, "RepoNotFound") | (_, StatusCode::NOT_FOUND, "RepoNotFound" | "") if revision.is_some() => {
                let private = if self.settings.token.is_none() { ", or it is private and needs HF_TOKEN" } else { "" };
                let reason = format!("the hub has no repository of this name{private}");
                DownloadError::NotFound { name: repository.into(), reason }
            }
            (_, StatusCode::NOT_FOUND, "RevisionNotFound") => {
                let name = format!("{repository} at revision {}", revision.unwrap_or("main"));
                DownloadError::NotFound { name, reason: format!("no such branch, tag or commit; see {page}/commits") }
            }
            (_, StatusCode::NOT_FOUND, _) => DownloadError::NotFound {
                name: url.into(),
                reason: "the repository lists this file, but the hub does not have it".into(),
            },
            (None, ..) if is_denied && !is_gated => denied(format!(
                "the repository is not gated; if it is private, set HF_TOKEN to a token from {tokens}; otherwise check \
                 whether HF_ENDPOINT or a proxy refuses the request"
            )),
            (None, ..) if is_denied => denied(format!(
                "no access token was found; accept the model's terms on {page}, create a token on {tokens}, and set \
                 HF_TOKEN to it or write it to {}",
                self.settings.token_file.display()
            )),
            (Some(token), StatusCode::UNAUTHORIZED, code) if code != "GatedRepo" => {
                denied(format!("the token from {} is invalid or expired; create a new one on {tokens}", token.origin))
            }
            (Some(token), ..) if is_denied && !is_gated => denied(format!(
                "the repository is not gated; check on {tokens} whether the token from {} may read it, and whether \
                 HF_ENDPOINT or a proxy refuses the request",
                token.origin
            )),
            (Some(token), ..) if is_denied => denied(format!(
                "the account of the token from {} has no access; accept the model's terms on {page}; a fine-grained \
                 token also needs permission to read gated repositories",
                token.origin
            )),
            _ => DownloadError::Status { url: url.into(), status },
        }
    }
}

/// Returns scheme and host of a URL.
fn origin(url: &str) -> (&str, &str) {
    (url.split_once("://").map_or("", |(scheme, _)| scheme), authority(url).1)
}

#[cfg(test)]
mod tests;
