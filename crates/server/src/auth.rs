//! Authentication: API keys from a file or the environment, and session cookies that the web page receives in exchange
//! for a key.

use std::collections::HashMap;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ltx2_base::text_file;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use super::jobs::Caller;

/// Lifetime of a session cookie.
const SESSION: Duration = Duration::from_secs(12 * 3600);
/// Maximum number of sessions. Beyond it, a new session evicts the oldest one.
const SESSIONS: usize = 1024;
/// Name of the API key that the environment variable `LTX2_API_KEY` sets.
const ENV: &str = "env";
/// Minimum length of a key in characters.
const MIN_KEY_LENGTH: usize = 8;
/// Maximum size of a key file in bytes.
const FILE_LIMIT: u64 = 1 << 20;

/// SHA-256 of a key or cookie. The key or cookie itself is not stored.
type Digest256 = [u8; 32];

struct Key {
    name: String,
    sees_all: bool,
    digest: Digest256,
}

struct LoginSession {
    /// Digest of the API key that the session was created with.
    key: Digest256,
    until: Instant,
}

/// API keys and session cookies of a server.
pub(crate) struct Keys {
    file: Option<PathBuf>,
    /// Digest of the API key from the environment.
    single: Option<Digest256>,
    keys: RwLock<Arc<Vec<Key>>>,
    sessions: Mutex<HashMap<Digest256, LoginSession>>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("keys", &self.read().len()).finish_non_exhaustive()
    }
}

impl Keys {
    /// Reads the keys from a file of `name:key` lines and adds the key `single` under the name `env`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, is readable by other users or has an invalid line, or if a key is
    /// too short. The message contains no key.
    pub(crate) fn open(file: Option<&Path>, single: Option<&str>) -> Result<Self, String> {
        let single = single.filter(|key| !key.is_empty());
        if single.is_some_and(|key| key.chars().count() < MIN_KEY_LENGTH) {
            return Err(format!("LTX2_API_KEY has fewer than {MIN_KEY_LENGTH} characters; use a longer key"));
        }
        let single = single.map(digest);
        let keys = read_keys(file, single)?;
        let sessions = Mutex::new(HashMap::new());
        Ok(Keys { file: file.map(Path::to_path_buf), single, keys: RwLock::new(Arc::new(keys)), sessions })
    }

    /// Reads the key file again and returns the number of keys. After an error, the current keys remain in use.
    ///
    /// # Errors
    /// Same as [`Keys::open`].
    pub(crate) fn reread(&self) -> Result<usize, String> {
        let keys = read_keys(self.file.as_deref(), self.single)?;
        let count = keys.len();
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
        Ok(count)
    }

    /// Returns whether requests need an API key.
    pub(crate) fn needed(&self) -> bool {
        self.file.is_some() || self.single.is_some()
    }

    /// Returns the number of keys.
    pub(crate) fn count(&self) -> usize {
        self.read().len()
    }

    /// Returns the caller that a bearer token identifies. The token is compared with all keys in constant time.
    pub(crate) fn caller_for_key(&self, presented: &str) -> Option<Caller> {
        self.caller_for_digest(&digest(presented))
    }

    /// Creates a session and returns its cookie; `None` if the API key is invalid.
    ///
    /// # Errors
    /// Returns an error if the system's random number generator fails.
    pub(crate) fn begin_session(&self, presented: &str) -> std::io::Result<Option<String>> {
        let key = digest(presented);
        if self.caller_for_digest(&key).is_none() {
            return Ok(None);
        }
        let mut random = [0; 32];
        getrandom::fill(&mut random).map_err(|error| std::io::Error::other(error.to_string()))?;
        let cookie = hex::encode(random);
        let now = Instant::now();
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, session| session.until > now);
        if sessions.len() >= SESSIONS {
            let oldest = sessions.iter().min_by_key(|(_, session)| session.until).map(|(digest, _)| *digest);
            if let Some(oldest) = oldest {
                sessions.remove(&oldest);
            }
        }
        sessions.insert(digest(&cookie), LoginSession { key, until: now + SESSION });
        Ok(Some(cookie))
    }

    /// Returns the caller that a session cookie identifies; `None` if the session has expired or its key has been
    /// removed.
    pub(crate) fn caller_for_cookie(&self, presented: &str) -> Option<Caller> {
        let key = {
            let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
            // Sessions are looked up by digest, so the timing reveals nothing about the cookie.
            let session = sessions.get(&digest(presented))?;
            (session.until > Instant::now()).then_some(session.key)?
        };
        self.caller_for_digest(&key)
    }

    fn read(&self) -> Arc<Vec<Key>> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn caller_for_digest(&self, presented: &Digest256) -> Option<Caller> {
        let keys = self.read();
        let place = place_of(&keys, |key| key.digest.ct_eq(presented));
        let key = keys.get(usize::try_from(place).ok()?.checked_sub(1)?)?;
        Some(Caller { name: key.name.clone(), sees_all: key.sees_all })
    }
}

/// Returns the 1-based index of the last key that `fits` accepts, or 0 if it accepts none. Tests every key and never
/// branches on a [`Choice`], so that the time does not depend on the keys.
fn place_of(keys: &[Key], mut fits: impl FnMut(&Key) -> Choice) -> u64 {
    let mut place = 0_u64;
    for (index, key) in (1_u64..).zip(keys) {
        place.conditional_assign(&index, fits(key));
    }
    place
}

fn digest(text: &str) -> Digest256 {
    Sha256::digest(text.as_bytes()).into()
}

fn read_keys(file: Option<&Path>, single: Option<Digest256>) -> Result<Vec<Key>, String> {
    let mut keys = match file {
        Some(file) => parse(&read_private(file)?).map_err(|why| format!("{}: {why}", file.display()))?,
        None => Vec::new(),
    };
    if let Some(digest) = single {
        if keys.iter().any(|other| other.name == ENV || other.digest == digest) {
            return Err(format!(
                "LTX2_API_KEY: the key file already contains this key or the name '{ENV}'; remove that line or the variable"
            ));
        }
        // If this is the only key, its caller sees all videos, because there are no other callers.
        keys.push(Key { name: ENV.into(), sees_all: keys.is_empty(), digest });
    }
    Ok(keys)
}

fn read_private(file: &Path) -> Result<String, String> {
    let fault = |error: std::io::Error| format!("cannot read {}: {error}", file.display());
    let opened = std::fs::File::open(file).map_err(fault)?;
    let metadata = opened.metadata().map_err(fault)?;
    if !metadata.is_file() {
        return Err(format!("{}: not a regular file", file.display()));
    }
    if metadata.mode() & 0o077 != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(format!("{}: readable by other users (mode {mode:03o}); run chmod 600 on it", file.display()));
    }
    if metadata.len() > FILE_LIMIT {
        return Err(format!("{}: more than {FILE_LIMIT} bytes, the maximum size of a key file", file.display()));
    }
    text_file::read_from(opened, FILE_LIMIT).map_err(fault)
}

/// Parses `name:key` lines. Skips empty lines and comments, which start with `#`. The caller of a key whose name ends
/// with `*` sees the videos of all callers.
fn parse(text: &str) -> Result<Vec<Key>, String> {
    let mut keys: Vec<Key> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, key) = line.split_once(':').ok_or_else(|| format!("line {number}: expected name:key"))?;
        let (name, sees_all) = name.trim().strip_suffix('*').map_or((name.trim(), false), |name| (name, true));
        let legal = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if name.is_empty() || name.len() > 64 || !name.chars().all(legal) {
            return Err(format!(
                "line {number}: a key name must consist of 1 to 64 letters, digits, dots, dashes or underscores"
            ));
        }
        let key = key.trim();
        if key.chars().count() < MIN_KEY_LENGTH {
            return Err(format!(
                "line {number}: the key of '{name}' has fewer than {MIN_KEY_LENGTH} characters; use a longer key"
            ));
        }
        let digest = digest(key);
        if keys.iter().any(|other| other.name == name || other.digest == digest) {
            return Err(format!("line {number}: the name '{name}' or its key occurs twice; remove one of the lines"));
        }
        keys.push(Key { name: name.into(), sees_all, digest });
    }
    if keys.is_empty() { Err("contains no key; add a line name:key".into()) } else { Ok(keys) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file(text: &str, mode: u32) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys");
        std::fs::write(&path, text).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("mode");
        (folder, path)
    }

    #[test]
    fn key_identifies_its_caller() {
        let (_folder, path) = file("# team\nanna:secret-one\n\nroot*: secret-two \n", 0o600);
        let keys = Keys::open(Some(&path), None).expect("keys");
        assert!(keys.needed());
        let anna = Caller { name: "anna".into(), sees_all: false };
        assert_eq!(keys.caller_for_key("secret-one"), Some(anna));
        assert_eq!(keys.caller_for_key("secret-two").map(|caller| caller.sees_all), Some(true));
        for wrong in ["", "secret-on", "secret-one ", "secret-one0", "anna:secret-one"] {
            assert_eq!(keys.caller_for_key(wrong), None, "{wrong}");
        }
    }

    /// Neither the name nor the value of the environment's key may occur in the key file.
    #[test]
    fn environment_key_must_differ_from_file_keys() {
        for (lines, key) in [("env:secret-one", "secret-two"), ("anna:secret-one", "secret-one")] {
            let (_folder, path) = file(lines, 0o600);
            let error = Keys::open(Some(&path), Some(key)).expect_err("refused");
            assert!(error.contains("LTX2_API_KEY") && !error.contains("secret"), "{error}");
        }
        assert!(Keys::open(None, Some("secret7")).expect_err("refused").contains("fewer than 8 characters"));
        assert!(Keys::open(None, Some("")).is_ok_and(|keys| !keys.needed()));
        let (_folder, path) = file(&"# long\n".repeat(200_000), 0o600);
        assert!(Keys::open(Some(&path), None).expect_err("refused").contains("more than 1048576 bytes"));
    }

    /// The number of comparisons does not depend on which key matches. Each comparison uses `subtle` on two digests of
    /// equal length.
    #[test]
    fn all_keys_are_compared_whether_or_not_one_matches() {
        // Tests the first, a middle and the last of 100 keys, and a key that is not among them.
        let lines: String = (0..100).map(|n| format!("k{n}:secret-{n:04}\n")).collect();
        let (_folder, path) = file(&lines, 0o600);
        let keys = Keys::open(Some(&path), None).expect("keys");
        let name = |key: &str| keys.caller_for_key(key).map(|caller| caller.name);
        assert_eq!(name("secret-0000").as_deref(), Some("k0"));
        assert_eq!(name("secret-0099").as_deref(), Some("k99"));
        assert_eq!(name("secret-0100"), None);
        for (key, wanted) in [("secret-0000", 1), ("secret-0050", 51), ("secret-0099", 100), ("secret-0100", 0)] {
            let (presented, mut compared) = (digest(key), 0);
            let place = place_of(&keys.read(), |key| {
                compared += 1;
                key.digest.ct_eq(&presented)
            });
            assert_eq!((place, compared), (wanted, 100), "{key}");
        }
    }

    #[test]
    fn key_file_readable_by_others_is_rejected_without_leaking_keys() {
        for mode in [0o640, 0o604, 0o644] {
            let (_folder, path) = file("anna:secret-one", mode);
            let error = Keys::open(Some(&path), None).expect_err("refused");
            assert!(error.contains("chmod 600") && !error.contains("secret"), "{error}");
        }
        for bad in ["secret-without-name", "anna:short", "a b:secret-one", ":secret-one", "", "a:secret-1\nb:secret-1"]
        {
            let (_folder, path) = file(bad, 0o600);
            let error = Keys::open(Some(&path), None).expect_err(bad);
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn reload_updates_keys_and_invalid_file_keeps_current_keys() {
        let (_folder, path) = file("anna:secret-one", 0o600);
        let keys = Keys::open(Some(&path), None).expect("keys");
        let cookie = keys.begin_session("secret-one").expect("random").expect("a cookie");
        assert_eq!(keys.begin_session("secret-two").expect("random"), None);
        assert_eq!(keys.caller_for_cookie(&cookie).map(|caller| caller.name), Some("anna".into()));
        std::fs::write(&path, "nonsense").expect("written");
        assert!(keys.reread().is_err());
        assert!(keys.caller_for_key("secret-one").is_some());
        std::fs::write(&path, "bert:secret-two").expect("written");
        assert_eq!(keys.reread(), Ok(1));
        assert_eq!(keys.caller_for_key("secret-one"), None);
        assert_eq!(keys.caller_for_cookie(&cookie), None, "a cookie goes with its key");
        assert!(keys.caller_for_key("secret-two").is_some());
    }

    #[test]
    fn number_of_sessions_is_bounded() {
        let keys = Keys::open(None, Some("secret-one")).expect("keys");
        let first = keys.begin_session("secret-one").expect("random").expect("a cookie");
        for _ in 0..SESSIONS {
            keys.begin_session("secret-one").expect("random").expect("a cookie");
        }
        assert_eq!(keys.sessions.lock().expect("whole").len(), SESSIONS);
        assert_eq!(keys.caller_for_cookie(&first), None);
        assert_eq!(keys.caller_for_cookie("secret-one"), None);
    }
}
