//! Who may ask: keys of a file, and the cookies that the page trades them for.

use std::collections::HashMap;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use super::jobs::Caller;
use crate::text_file;

/// Life of a cookie.
const SESSION: Duration = Duration::from_secs(12 * 3600);
/// Cookies at once; beyond them the oldest goes.
const SESSIONS: usize = 1024;
/// Name of the key that the environment gives.
const ENV: &str = "env";
/// Characters of a key at least.
const SHORTEST: usize = 8;
/// Bytes of a file of keys.
const FILE_LIMIT: u64 = 1 << 20;

/// SHA-256 of a key or a cookie: what is kept of it.
type Digest256 = [u8; 32];

struct Key {
    name: String,
    sees_all: bool,
    digest: Digest256,
}

struct Session {
    /// Digest of the key that it stands for.
    key: Digest256,
    until: Instant,
}

/// The keys of a server, and its cookies.
pub struct Keys {
    file: Option<PathBuf>,
    /// Digest of the environment's.
    single: Option<Digest256>,
    keys: RwLock<Arc<Vec<Key>>>,
    sessions: Mutex<HashMap<Digest256, Session>>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("keys", &self.read().len()).finish_non_exhaustive()
    }
}

impl Keys {
    /// Keys of a file of lines `name:key`, and a single one, named `env`.
    ///
    /// # Errors
    /// A file that others may read, cannot be read, or has a line of another form; a key that is too short. No key is in the
    /// text.
    pub fn open(file: Option<&Path>, single: Option<&str>) -> Result<Self, String> {
        let single = single.filter(|key| !key.is_empty());
        if single.is_some_and(|key| key.chars().count() < SHORTEST) {
            return Err(format!("LTX2_API_KEY: it has fewer than {SHORTEST} characters"));
        }
        let single = single.map(digest);
        let keys = read_keys(file, single)?;
        let sessions = Mutex::new(HashMap::new());
        Ok(Keys { file: file.map(Path::to_path_buf), single, keys: RwLock::new(Arc::new(keys)), sessions })
    }

    /// Reads the file again. Where it is wrong, the keys stay as they were.
    ///
    /// # Errors
    /// As [`Keys::open`].
    pub fn reread(&self) -> Result<usize, String> {
        let keys = read_keys(self.file.as_deref(), self.single)?;
        let count = keys.len();
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
        Ok(count)
    }

    /// Whether a key is needed at all.
    pub fn needed(&self) -> bool {
        self.file.is_some() || self.single.is_some()
    }

    /// Number of keys.
    pub fn count(&self) -> usize {
        self.read().len()
    }

    /// Whose key it is. All keys are compared, in a time that does not tell how much of one is right.
    pub fn of_bearer(&self, presented: &str) -> Option<Caller> {
        self.of_digest(&digest(presented))
    }

    /// A new cookie for a key.
    ///
    /// # Errors
    /// No source of random numbers.
    pub fn begin_session(&self, presented: &str) -> std::io::Result<Option<String>> {
        let key = digest(presented);
        if self.of_digest(&key).is_none() {
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
        sessions.insert(digest(&cookie), Session { key, until: now + SESSION });
        Ok(Some(cookie))
    }

    /// Whose cookie it is: that of a key that is still there.
    pub fn of_cookie(&self, presented: &str) -> Option<Caller> {
        let key = {
            let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
            // The map is asked for the digest, whose place an attacker cannot steer by parts of a cookie.
            let session = sessions.get(&digest(presented))?;
            (session.until > Instant::now()).then_some(session.key)?
        };
        self.of_digest(&key)
    }

    fn read(&self) -> Arc<Vec<Key>> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn of_digest(&self, presented: &Digest256) -> Option<Caller> {
        let keys = self.read();
        let place = place_of(&keys, |key| key.digest.ct_eq(presented));
        let key = keys.get(usize::try_from(place).ok()?.checked_sub(1)?)?;
        Some(Caller { name: key.name.clone(), sees_all: key.sees_all })
    }
}

/// Place of the last key that fits, from 1; 0: none fits. Every key is compared, and a [`Choice`] is nothing to branch on.
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
        // One key alone sees everything: there are no others whose videos it could see.
        if keys.iter().any(|other| other.name == ENV || other.digest == digest) {
            return Err(format!("LTX2_API_KEY: the file has its key, or one that is named '{ENV}' as it is"));
        }
        keys.push(Key { name: ENV.into(), sees_all: keys.is_empty(), digest });
    }
    Ok(keys)
}

fn read_private(file: &Path) -> Result<String, String> {
    let fault = |error: std::io::Error| format!("{}: cannot be read: {error}", file.display());
    let opened = std::fs::File::open(file).map_err(fault)?;
    let metadata = opened.metadata().map_err(fault)?;
    if !metadata.is_file() {
        return Err(format!("{}: no file", file.display()));
    }
    if metadata.mode() & 0o077 != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(format!("{}: others may read it (mode {mode:03o}): chmod 600 it", file.display()));
    }
    if metadata.len() > FILE_LIMIT {
        return Err(format!("{}: more than {FILE_LIMIT} bytes", file.display()));
    }
    text_file::read_from(opened, FILE_LIMIT).map_err(fault)
}

/// Lines `name:key`; empty ones and those that begin with `#` are skipped.
fn parse(text: &str) -> Result<Vec<Key>, String> {
    let mut keys: Vec<Key> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, key) = line.split_once(':').ok_or_else(|| format!("line {number}: write name:key"))?;
        let (name, sees_all) = name.trim().strip_suffix('*').map_or((name.trim(), false), |name| (name, true));
        let legal = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if name.is_empty() || name.len() > 64 || !name.chars().all(legal) {
            return Err(format!("line {number}: a name has 1 to 64 letters, digits, dots, dashes"));
        }
        let key = key.trim();
        if key.chars().count() < SHORTEST {
            return Err(format!("line {number}: the key of '{name}' has fewer than {SHORTEST} characters"));
        }
        let digest = digest(key);
        if keys.iter().any(|other| other.name == name || other.digest == digest) {
            return Err(format!("line {number}: '{name}' or its key is there before"));
        }
        keys.push(Key { name: name.into(), sees_all, digest });
    }
    if keys.is_empty() { Err("no key in it".into()) } else { Ok(keys) }
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
    fn a_key_names_its_caller() {
        let (_folder, path) = file("# team\nanna:secret-one\n\nroot*: secret-two \n", 0o600);
        let keys = Keys::open(Some(&path), None).expect("keys");
        assert!(keys.needed());
        let anna = Caller { name: "anna".into(), sees_all: false };
        assert_eq!(keys.of_bearer("secret-one"), Some(anna));
        assert_eq!(keys.of_bearer("secret-two").map(|caller| caller.sees_all), Some(true));
        for wrong in ["", "secret-on", "secret-one ", "secret-one0", "anna:secret-one"] {
            assert_eq!(keys.of_bearer(wrong), None, "{wrong}");
        }
    }

    /// A key of the environment is another's than those of the file.
    #[test]
    fn a_key_of_the_environment_is_its_own() {
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

    /// The number of comparisons tells nothing of the key; each is `subtle`'s, of digests of one length.
    #[test]
    fn every_key_is_compared_whichever_fits() {
        // The first, the last, and none of many.
        let lines: String = (0..100).map(|n| format!("k{n}:secret-{n:04}\n")).collect();
        let (_folder, path) = file(&lines, 0o600);
        let keys = Keys::open(Some(&path), None).expect("keys");
        let name = |key: &str| keys.of_bearer(key).map(|caller| caller.name);
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
    fn a_file_that_others_may_read_is_refused_and_no_key_is_shown() {
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
    fn keys_change_when_the_file_is_read_again_and_stay_where_it_is_wrong() {
        let (_folder, path) = file("anna:secret-one", 0o600);
        let keys = Keys::open(Some(&path), None).expect("keys");
        let cookie = keys.begin_session("secret-one").expect("random").expect("a cookie");
        assert_eq!(keys.begin_session("secret-two").expect("random"), None);
        assert_eq!(keys.of_cookie(&cookie).map(|caller| caller.name), Some("anna".into()));
        std::fs::write(&path, "nonsense").expect("written");
        assert!(keys.reread().is_err());
        assert!(keys.of_bearer("secret-one").is_some());
        std::fs::write(&path, "bert:secret-two").expect("written");
        assert_eq!(keys.reread(), Ok(1));
        assert_eq!(keys.of_bearer("secret-one"), None);
        assert_eq!(keys.of_cookie(&cookie), None, "a cookie goes with its key");
        assert!(keys.of_bearer("secret-two").is_some());
    }

    #[test]
    fn cookies_are_bounded() {
        let keys = Keys::open(None, Some("secret-one")).expect("keys");
        let first = keys.begin_session("secret-one").expect("random").expect("a cookie");
        for _ in 0..SESSIONS {
            keys.begin_session("secret-one").expect("random").expect("a cookie");
        }
        assert_eq!(keys.sessions.lock().expect("whole").len(), SESSIONS);
        assert_eq!(keys.of_cookie(&first), None);
        assert_eq!(keys.of_cookie("secret-one"), None);
    }
}
