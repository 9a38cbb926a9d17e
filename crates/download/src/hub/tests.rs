use std::cell::Cell;

use super::*;
use crate::CachedRepository;

#[allow(dead_code, unreachable_pub)] // Other tests use the rest.
#[path = "../../../../tests/support/hub.rs"]
mod stand_in;

use stand_in::{Fault, StandInHub};

fn settings(vars: &[(&str, &str)]) -> HubSettings {
    HubSettings::from_vars(|key| vars.iter().find(|(name, _)| *name == key).map(|(_, v)| (*v).into())).unwrap()
}

fn hub(stand_in: &StandInHub, vars: &[(&str, &str)]) -> Hub {
    Hub::new(settings(&[&[("HF_ENDPOINT", &*stand_in.endpoint)], vars].concat())).unwrap()
}

/// Downloads the only file of the repository; returns its contents or the error.
fn fetch(hub: &Hub, repository: &str, partial: &Path) -> Result<Vec<u8>, DownloadError> {
    let listing = hub.list(repository, "main")?;
    hub.download(&listing, &listing.files[0], partial, &|_| {})?;
    Ok(fs::read(partial).unwrap())
}

#[test]
fn token_and_endpoint_come_from_the_usual_places() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("home/.cache/huggingface");
    fs::create_dir_all(&home).unwrap();
    fs::write(home.join("token"), "of-home\n").unwrap();
    fs::write(folder.path().join("token"), "of-path").unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (user, own) = (path("home"), path("token"));
    let token = |vars: &[(&str, &str)]| settings(vars).token.map(|token| (token.value, token.origin));
    assert_eq!(token(&[]), None);
    assert_eq!(token(&[("HOME", &user)]).unwrap().0, "of-home");
    assert_eq!(token(&[("HF_HOME", &path("")), ("HOME", &user)]).unwrap().0, "of-path");
    assert_eq!(token(&[("HF_TOKEN_PATH", &own), ("HOME", &user)]).unwrap(), ("of-path".into(), own.clone()));
    let both = [("HF_TOKEN", " given "), ("HF_TOKEN_PATH", &own)];
    assert_eq!(token(&both).unwrap(), ("given".into(), "HF_TOKEN".into()));
    assert!(!format!("{:?}", settings(&both)).contains("given"), "the token must not be logged");
    assert_eq!(settings(&[]).endpoint, "https://huggingface.co");
    assert_eq!(settings(&[("HF_ENDPOINT", "http://mirror/hub/")]).endpoint, "http://mirror/hub");
    let wrong = HubSettings::from_vars(|key| (key == "HF_ENDPOINT").then(|| "mirror".into())).unwrap_err();
    assert!(wrong.to_string().starts_with("HF_ENDPOINT: 'mirror' is not a URL"), "{wrong}");
    for with_password in ["http://user:secret@host", "user:secret@host", "http://user:sec/ret@host"] {
        let error = HubSettings::from_vars(|key| (key == "HF_ENDPOINT").then(|| with_password.into())).unwrap_err();
        let said = error.to_string();
        assert!(said.contains("must not contain '@'") && !said.contains("sec") && !said.contains("host"), "{said}");
    }
    for (value, offline) in [("1", true), ("true", true), ("0", false), ("", false)] {
        assert_eq!(settings(&[("HF_HUB_OFFLINE", value)]).offline().is_some(), offline, "{value}");
    }
}

#[test]
fn token_is_not_sent_to_the_storage_server() {
    let stand_in = StandInHub::start("org/name");
    stand_in.add("a.safetensors", b"weights");
    stand_in.gate(&[("t", true)]);
    let folder = tempfile::tempdir().unwrap();
    let hub = hub(&stand_in, &[("HF_TOKEN", "t")]);
    assert_eq!(fetch(&hub, "org/name", &folder.path().join("a")).unwrap(), b"weights");
    let requests = stand_in.requests();
    let with_token: Vec<bool> = requests.iter().map(|head| head.contains("authorization: bearer t")).collect();
    assert_eq!(with_token, [true, true, false], "{requests:?}");
    assert!(requests[2].starts_with("storage"), "{requests:?}");
}

#[test]
fn denied_access_names_page_and_token_place() {
    let stand_in = StandInHub::start("org/name");
    stand_in.add("a.safetensors", b"weights");
    stand_in.gate(&[("other", false)]);
    let folder = tempfile::tempdir().unwrap();
    let error = |vars: &[(&str, &str)]| {
        fetch(&hub(&stand_in, vars), "org/name", &folder.path().join("a")).unwrap_err().to_string()
    };
    let page = format!("{}/org/name", stand_in.endpoint);
    let home = folder.path().to_str().unwrap();
    let none = error(&[("HF_HOME", home)]);
    for words in
        ["org/name: access denied (401", "no access token was found", &page, "HF_TOKEN", &format!("{home}/token")]
    {
        assert!(none.contains(words), "{words} is not in: {none}");
    }
    let other = error(&[("HF_TOKEN", "other")]);
    assert!(other.contains("403") && other.contains("the token from HF_TOKEN has no access"), "{other}");
    assert!(other.contains(&page), "{other}");
    let wrong = error(&[("HF_TOKEN", "wrong")]);
    assert!(wrong.contains("the token from HF_TOKEN is invalid or expired"), "{wrong}");
}

#[test]
fn denied_access_to_a_public_repository_does_not_mention_terms() {
    let stand_in = StandInHub::start("org/name");
    stand_in.add("config.json", b"{}");
    let folder = tempfile::tempdir().unwrap();
    for (vars, words) in
        [(&[][..], "set HF_TOKEN"), (&[("HF_TOKEN", "t")], "whether the token from HF_TOKEN may read it")]
    {
        stand_in.fail("config.json", Fault::Status("403 Forbidden"));
        let error = fetch(&hub(&stand_in, vars), "org/name", &folder.path().join("a")).unwrap_err().to_string();
        assert!(error.contains("403") && error.contains("is not gated") && error.contains(words), "{error}");
        assert!(!error.contains("terms"), "{error}");
    }
}

#[test]
fn access_check_does_not_contact_the_storage_server() {
    let stand_in = StandInHub::start("org/name");
    stand_in.add("a.safetensors", b"weights");
    let listing = hub(&stand_in, &[]).list("org/name", "main").unwrap();
    let check = |vars: &[(&str, &str)]| hub(&stand_in, vars).check_access(&listing, &listing.files[0]);
    check(&[]).unwrap();
    stand_in.gate(&[("t", true)]);
    assert!(matches!(check(&[]).unwrap_err(), DownloadError::Denied { .. }));
    check(&[("HF_TOKEN", "t")]).unwrap();
    let requests = stand_in.requests();
    assert_eq!(requests.iter().filter(|head| head.contains("range: bytes=0-0")).count(), 3, "{requests:?}");
    assert!(requests.iter().all(|head| head.starts_with("hub")), "{requests:?}");
}

#[test]
fn busy_servers_are_asked_again_after_the_stated_time() {
    let stand_in = StandInHub::start("org/name");
    stand_in.add("a.safetensors", b"weights");
    let folder = tempfile::tempdir().unwrap();
    let fetch = |partial: &str| fetch(&hub(&stand_in, &[]), "org/name", &folder.path().join(partial));
    for path in ["", "a.safetensors"] {
        stand_in.fail(path, Fault::Busy(40));
        stand_in.fail(path, Fault::Status("408 Request Timeout"));
    }
    // A second of these waits is a millisecond in unit tests.
    let start = std::time::Instant::now();
    assert_eq!(fetch("a").unwrap(), b"weights");
    let elapsed = start.elapsed().as_millis();
    assert!(elapsed >= 2 * (40 + 2), "{elapsed}");
    assert_eq!(stand_in.requests().len(), 3 + 2 * 3);
    for (path, tries) in [("", http::REQUEST_TRIES), ("a.safetensors", http::TRIES)] {
        (0..tries).for_each(|_| stand_in.fail(path, Fault::Busy(0)));
        let error = fetch("b").unwrap_err().to_string();
        assert!(error.contains("429 Too Many Requests"), "{error}");
    }
}

#[test]
fn wait_grows_with_failures_up_to_a_minute() {
    let response = |after: Option<&str>| {
        let response = after.iter().fold(Response::builder(), |head, value| head.header("retry-after", *value));
        response.body(Body::builder().data("")).unwrap()
    };
    for (after, failed, milliseconds) in [
        (None, 0, 1),
        (None, 3, 8),
        (None, 7, 60),
        (Some("30"), 3, 30),
        (Some("4"), 3, 8),
        (Some("3600"), 0, 60),
        (Some("tomorrow"), 1, 2),
    ] {
        assert_eq!(http::wait_after(&response(after), failed).as_millis(), milliseconds, "{after:?} {failed}");
    }
}

#[test]
fn body_without_length_that_ends_early_is_resumed() {
    let stand_in = StandInHub::start("org/name");
    stand_in.add("a.safetensors", b"0123456789");
    stand_in.fail("a.safetensors", Fault::CutWithoutLength(4));
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(fetch(&hub(&stand_in, &[]), "org/name", &folder.path().join("a")).unwrap(), b"0123456789");
    assert!(stand_in.requests().iter().any(|head| head.contains("range: bytes=4-")));
}

#[test]
fn body_longer_than_listed_is_an_error() {
    let stand_in = StandInHub::start("org/name");
    stand_in.add("a.safetensors", b"0123456789");
    stand_in.fail("a.safetensors", Fault::Longer(1_000_000));
    let folder = tempfile::tempdir().unwrap();
    let (hub, partial) = (hub(&stand_in, &[]), folder.path().join("a"));
    let error = fetch(&hub, "org/name", &partial).unwrap_err().to_string();
    assert!(error.ends_with("a.safetensors: the server sends more than the 10 bytes of the file"), "{error}");
    assert_eq!(partial.metadata().unwrap().len(), 10);
    assert_eq!(fetch(&hub, "org/name", &partial).unwrap(), b"0123456789");
}

#[test]
fn repeating_the_same_bytes_is_no_progress() {
    let stand_in = StandInHub::start("org/name");
    stand_in.add("a.safetensors", b"0123456789");
    for _ in 0..8 {
        stand_in.fail("a.safetensors", Fault::Cut(4));
        stand_in.fail("a.safetensors", Fault::Status("416 Range Not Satisfiable"));
    }
    let folder = tempfile::tempdir().unwrap();
    let error = fetch(&hub(&stand_in, &[]), "org/name", &folder.path().join("a")).unwrap_err().to_string();
    assert!(error.contains("; gave up after 9 attempts and ") && error.ends_with("to resume"), "{error}");
    let storage = stand_in.requests().into_iter().filter(|head| head.starts_with("storage")).count();
    assert_eq!(storage, 9);
}

#[test]
fn broken_download_resumes_and_reports_progress() {
    let stand_in = StandInHub::start("org/name");
    stand_in.add("a.safetensors", b"0123456789");
    stand_in.fail("a.safetensors", Fault::Cut(4));
    stand_in.fail("a.safetensors", Fault::Status("503 Service Unavailable"));
    // The address of the storage has expired.
    stand_in.fail("a.safetensors", Fault::Status("403 Forbidden"));
    let folder = tempfile::tempdir().unwrap();
    let (hub, partial, have) = (hub(&stand_in, &[]), folder.path().join("a"), Cell::new(0));
    let listing = hub.list("org/name", "main").unwrap();
    let progress = |bytes| {
        assert!(bytes >= have.get());
        have.set(bytes);
    };
    hub.download(&listing, &listing.files[0], &partial, &progress).unwrap();
    assert_eq!((have.get(), fs::read(&partial).unwrap()), (10, b"0123456789".to_vec()));
    let requests = stand_in.requests();
    let storage: Vec<&String> = requests.iter().filter(|head| head.starts_with("storage")).collect();
    let ranges: Vec<bool> = storage.iter().map(|head| head.contains("range: bytes=4-")).collect();
    assert_eq!(ranges, [false, true, true, true], "{storage:?}");
    assert!(storage[1].contains("if-range: \"storage-"), "{storage:?}");
}

#[test]
fn partial_file_of_earlier_run_is_resumed_or_replaced() {
    let stand_in = StandInHub::start("org/name");
    stand_in.add("a.safetensors", b"0123456789");
    let folder = tempfile::tempdir().unwrap();
    let (hub, partial) = (hub(&stand_in, &[]), folder.path().join("a"));
    for (present, range) in [("0123", "bytes=4-"), ("wrong", "bytes=5-"), ("0123456789", ""), ("0123456789abc", "")] {
        fs::write(&partial, present).unwrap();
        assert_eq!(fetch(&hub, "org/name", &partial).unwrap(), b"0123456789", "{present}");
        let requests = stand_in.requests();
        assert_eq!(requests.iter().any(|head| head.contains("range: bytes")), !range.is_empty(), "{present}");
        assert!(requests.iter().any(|head| head.contains(range)), "{present}: {requests:?}");
    }
    // The server ignores the range.
    fs::write(&partial, "0123").unwrap();
    stand_in.fail("a.safetensors", Fault::WholeFile);
    assert_eq!(fetch(&hub, "org/name", &partial).unwrap(), b"0123456789");
}

#[test]
fn wrong_contents_are_deleted() {
    let stand_in = StandInHub::start("org/name");
    let sum = stand_in.add("a.safetensors", b"weights");
    stand_in.fail("a.safetensors", Fault::WrongByte);
    let folder = tempfile::tempdir().unwrap();
    let (hub, partial) = (hub(&stand_in, &[]), folder.path().join("a"));
    let error = fetch(&hub, "org/name", &partial).unwrap_err().to_string();
    assert!(error.starts_with("org/name/a.safetensors: the sha256 of the download is "), "{error}");
    assert!(error.contains(&format!("expected {sum}")) && !partial.exists(), "{error}");
    assert_eq!(fetch(&hub, "org/name", &partial).unwrap(), b"weights");
}

#[test]
fn change_after_listing_is_detected_before_the_download() {
    let stand_in = StandInHub::start("org/name");
    stand_in.add("a.safetensors", b"before");
    stand_in.change_after_listing("a.safetensors", b"after");
    let folder = tempfile::tempdir().unwrap();
    let (hub, partial) = (hub(&stand_in, &[]), folder.path().join("a"));
    let error = fetch(&hub, "org/name", &partial).unwrap_err();
    assert!(matches!(&error, DownloadError::Changed { file } if file == "org/name/a.safetensors"), "{error}");
    assert_eq!(fetch(&hub, "org/name", &partial).unwrap(), b"after");
}

#[test]
fn unknown_repositories_and_revisions_are_reported() {
    let stand_in = StandInHub::start("org/name");
    let hub = hub(&stand_in, &[]);
    let error = |repository: &str, revision: &str| hub.list(repository, revision).unwrap_err().to_string();
    assert!(error("org/other", "main").starts_with("org/other: the hub has no repository of this name"));
    assert!(error("org/name", "v9").starts_with("org/name at revision v9: no such branch, tag or commit"));
}

#[test]
fn listing_with_unsafe_path_is_rejected() {
    for path in ["../outside", "/etc/passwd", "a/../../b", "a/./b", "a//b", "a/", ""] {
        let stand_in = StandInHub::start("org/name");
        stand_in.add(path, b"x");
        let error = hub(&stand_in, &[]).list("org/name", "main").unwrap_err().to_string();
        assert!(error.ends_with(&format!("the listing contains the unsafe path {path:?}")), "{error}");
    }
}

#[test]
fn cache_has_the_layout_of_hugging_face_tools() {
    let folder = tempfile::tempdir().unwrap();
    let cached = CachedRepository::new(folder.path(), "Org/Name");
    let file = |path: &str, digits: &str| HubFile {
        path: path.into(),
        size: 3,
        checksum: Checksum::Sha256(digits.repeat(64)),
    };
    let (nested, top) = (file("vae/deep/a.safetensors", "a"), file("b.json", "b"));
    for file in [&nested, &top] {
        assert!(!cached.has(file));
        let lock = cached.lock(file, |_| panic!("nobody holds the lock")).unwrap();
        assert!(lock.is_some());
        fs::write(cached.partial(file), "abc").unwrap();
        assert!(!cached.has(file));
        cached.complete(file).unwrap();
        assert!(cached.has(file));
        cached.link("c0", file).unwrap();
        cached.link("c0", file).unwrap();
    }
    cached.record("main", "c0").unwrap();
    cached.record("refs/pr/1", "c1").unwrap();
    let path = |name: &str| folder.path().join(name);
    let repository = path("models--Org--Name");
    let link = |name: &str| fs::read_link(repository.join("snapshots/c0").join(name)).unwrap();
    assert_eq!(link("vae/deep/a.safetensors"), Path::new(&format!("../../../../blobs/{}", "a".repeat(64))));
    assert_eq!(link("b.json"), Path::new(&format!("../../blobs/{}", "b".repeat(64))));
    assert_eq!(fs::read_to_string(repository.join("snapshots/c0/vae/deep/a.safetensors")).unwrap(), "abc");
    assert_eq!(fs::read_to_string(repository.join("refs/main")).unwrap(), "c0");
    assert_eq!(fs::read_to_string(repository.join("refs/refs/pr/1")).unwrap(), "c1");
    assert!(path(&format!(".locks/models--Org--Name/{}.lock", "a".repeat(64))).is_file());
    // A new commit with other contents replaces the link.
    let newer = file("b.json", "a");
    cached.link("c0", &newer).unwrap();
    assert_eq!(link("b.json"), Path::new(&format!("../../blobs/{}", "a".repeat(64))));
}

#[test]
fn partial_downloads_of_other_files_are_found_unless_locked() {
    let folder = tempfile::tempdir().unwrap();
    let cached = CachedRepository::new(folder.path(), "Org/Name");
    let files = ["1", "2", "3"].map(|digit| HubFile {
        path: format!("{digit}.safetensors"),
        size: 9,
        checksum: Checksum::Sha256(digit.repeat(64)),
    });
    let lock = cached.lock(&files[1], |_| {}).unwrap();
    files.iter().for_each(|file| fs::write(cached.partial(file), "x").unwrap());
    assert_eq!(cached.other_partials(&files[..1]), [cached.partial(&files[2])]);
    drop(lock);
    assert_eq!(cached.other_partials(&files[..1]).len(), 2);
    assert!(files.iter().all(|file| cached.partial(file).exists()), "another revision may resume them");
}
