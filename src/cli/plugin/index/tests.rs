use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use super::*;

const PLATFORM: &str = "manylinux_2_27_x86_64";

fn wheel(sha256: &'static str) -> Wheel {
    Wheel { package: "some-plugin", version: "1.2.0", python: None, platform: PLATFORM, sha256 }
}

fn settings(indexes: &[String]) -> PluginSettings {
    let indexes = indexes.to_vec();
    PluginSettings { links: vec![], indexes, cert: None, proxy: None, timeout: Duration::from_secs(5) }
}

/// Starts a server that sends the given responses in order; returns its address and the heads of the requests.
fn serving(answers: Vec<String>) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("127.0.0.1:{}", listener.local_addr().unwrap().port());
    let (heads, received) = mpsc::channel();
    let heads = Mutex::new(heads);
    std::thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let lines = BufReader::new(&stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
            heads.lock().unwrap().send(lines.collect::<Vec<_>>().join("\n")).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    (address, received)
}

fn answer(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n{body}", body.len())
}

fn name() -> String {
    format!("some_plugin-1.2.0-py3-none-{PLATFORM}.whl")
}

fn downloaded(index: &WheelIndex, wheel: &Wheel) -> Result<String> {
    let folder = tempfile::tempdir().unwrap();
    Ok(fs::read_to_string(index.download(wheel, folder.path(), folder.path())?.path).unwrap())
}

#[test]
fn wheel_matches_by_package_version_and_tags() {
    let any = wheel("");
    for good in ["some_plugin", "Some.Plugin", "some-plugin"].map(|n| n.replace('-', "_")) {
        assert!(is_wheel(&format!("{good}-1.2.0-py3-none-{PLATFORM}.whl"), &any), "{good}");
    }
    assert!(is_wheel("some_plugin-1.2.0-1-py3-none-manylinux2014_x86_64.manylinux_2_27_x86_64.whl", &any));
    for wrong in [
        "some_plugin-1.2.0.tar.gz",
        "some_plugin-1.2.0.1-py3-none-manylinux_2_27_x86_64.whl",
        "some_plugin_more-1.2.0-py3-none-manylinux_2_27_x86_64.whl",
        "some_plugin-1.2.0-py3-none-manylinux_2_27_aarch64.whl",
        "some_plugin-1.2.0-manylinux_2_27_x86_64.whl",
        ".whl",
    ] {
        assert!(!is_wheel(wrong, &any), "{wrong}");
    }
    let tagged = Wheel { python: Some("3.11"), ..any };
    assert!(is_wheel(&format!("some_plugin-1.2.0-cp311-cp311-{PLATFORM}.whl"), &tagged));
    assert!(!is_wheel(&format!("some_plugin-1.2.0-cp312-cp312-{PLATFORM}.whl"), &tagged));
    assert!(!is_wheel(&format!("some_plugin-1.2.0-cp311-cp311t-{PLATFORM}.whl"), &tagged));
}

#[test]
fn html_and_json_pages_list_urls_and_checksums() {
    let html = "<!DOCTYPE html><html><body><a\n data-requires-python='x' href=\"../a%2B1.whl?x=1&amp;y=2#sha256=ab\">a</a>\
                <a href='b.whl'>b</a><a name=x>c</a></body>";
    let links = html_links(html);
    assert_eq!(links, [("../a%2B1.whl?x=1&y=2#sha256=ab".to_string(), None), ("b.whl".into(), None)]);
    let first = listed(&join("https://h/s/p/", &links[0].0), None).unwrap();
    assert_eq!((&*first.name, first.sha256.as_deref()), ("a+1.whl", Some("ab")));
    assert_eq!(listed("https://h/a%2Fb.whl", None), None, "a name that points outside the folder");
    let json = r#"{"meta": {"api-version": "1.1"}, "name": "p", "files": [
        {"filename": "a.whl", "url": "https://f/a.whl", "hashes": {"sha256": "cd"}}, {"filename": "b.whl", "url": "b.whl", "hashes": {}}]}"#;
    assert_eq!(
        json_links(json).unwrap(),
        [("https://f/a.whl".to_string(), Some("cd".to_string())), ("b.whl".into(), None)]
    );
    assert!(json_links("<html>").is_err());
}

#[test]
fn mirror_credentials_are_sent_for_page_and_file() {
    let page = format!("<a href=\"/files/{}\">a</a>", name());
    let (host, heads) =
        serving(vec![answer("200 OK", "content-type: text/html\r\n", &page), answer("200 OK", "", "the wheel")]);
    let index = WheelIndex::new(settings(&[format!("http://me:p%40ss@{host}/simple/")])).unwrap();
    assert_eq!(downloaded(&index, &wheel("ab")).unwrap(), "the wheel");
    for path in ["/simple/some-plugin/".to_string(), format!("/files/{}", name())] {
        let head = heads.recv().unwrap();
        assert!(head.starts_with(&format!("GET {path} HTTP/1.1")), "{head}");
        let credentials = format!("authorization: basic {}", BASE64_STANDARD.encode("me:p@ss").to_lowercase());
        assert!(head.to_lowercase().contains(&credentials), "{head}");
    }
}

#[test]
fn interrupted_download_resumes_after_last_received_byte() {
    let broken = "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nthe w".to_string();
    let rest = answer("206 Partial Content", "content-range: bytes 5-8/9\r\n", "heel");
    let page = format!(r#"{{"files": [{{"url": "{}", "hashes": {{"sha256": "AB"}}}}]}}"#, name());
    let json = "content-type: application/vnd.pypi.simple.v1+json\r\n";
    let unavailable = answer("503 Service Unavailable", "", "");
    let (host, heads) = serving(vec![answer("200 OK", json, &page), broken, unavailable, rest]);
    let index = WheelIndex::new(settings(&[format!("http://{host}/simple")])).unwrap();
    assert_eq!(downloaded(&index, &wheel("ab")).unwrap(), "the wheel");
    let heads: Vec<String> = heads.iter().map(|head| head.to_lowercase()).collect();
    assert!(!heads[1].contains("range:") && heads[2].contains("range: bytes=5-"), "{heads:?}");
    assert!(heads[3].contains("range: bytes=5-") && heads[3].contains(&format!("get /simple/some-plugin/{}", name())));
}

#[test]
fn error_lists_each_location_with_its_reason() {
    let other = format!(r#"{{"files": [{{"url": "{}", "hashes": {{"sha256": "cd"}}}}]}}"#, name());
    let json = "content-type: application/vnd.pypi.simple.v1+json\r\n";
    let (absent, _heads) = serving(vec![answer("404 Not Found", "", "")]);
    let (changed, _other_heads) = serving(vec![answer("200 OK", json, &other)]);
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings(&[format!("http://me:secret@{absent}"), format!("http://{changed}")]);
    settings.links = vec![folder.path().to_str().unwrap().into()];
    let error = format!("{:#}", downloaded(&WheelIndex::new(settings).unwrap(), &wheel("ab")).unwrap_err());
    for words in [
        "some-plugin==1.2.0: cannot download the wheel: ",
        &format!("{}: none of the 0 listed files is some-plugin 1.2.0 for {PLATFORM}; ", folder.path().display()),
        &format!("http://{absent}/some-plugin/: 404 Not Found; "),
        &format!("http://{changed}/some-plugin/: {} has sha256 cd, expected ab; ", name()),
        "PIP_INDEX_URL",
    ] {
        assert!(error.contains(words), "{words} is not in: {error}");
    }
    assert!(!error.contains("secret") && error.lines().count() == 1, "{error}");
}

#[test]
fn wheel_folder_needs_no_network() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(name()), "the wheel").unwrap();
    let path = folder.path().to_str().unwrap();
    for links in [path.to_string(), format!("file://{path}")] {
        let index = WheelIndex::new(PluginSettings { links: vec![links], ..settings(&[]) }).unwrap();
        assert_eq!(downloaded(&index, &wheel("ab")).unwrap(), "the wheel");
    }
    let none = WheelIndex::new(settings(&[])).unwrap();
    assert!(format!("{:#}", downloaded(&none, &wheel("ab")).unwrap_err()).contains("PIP_NO_INDEX"));
}

#[test]
fn page_is_requested_through_proxy() {
    let (proxy, heads) = serving(vec![answer("404 Not Found", "", "")]);
    let settings =
        PluginSettings { proxy: Some(format!("http://{proxy}")), ..settings(&["http://mirror.invalid".into()]) };
    assert!(downloaded(&WheelIndex::new(settings).unwrap(), &wheel("ab")).is_err());
    let head = heads.recv().unwrap();
    assert!(head.contains("mirror.invalid"), "{head}");
    let wrong = PluginSettings { proxy: Some("not a url".into()), ..super::tests::settings(&[]) };
    assert!(WheelIndex::new(wrong).err().unwrap().to_string().contains("PIP_PROXY: not a url"));
}

#[test]
fn file_without_certificate_is_reported() {
    let error = |cert: &Path| {
        let settings = PluginSettings { cert: Some(cert.into()), ..settings(&[]) };
        WheelIndex::new(settings).err().unwrap().to_string()
    };
    assert!(error(Path::new("/nowhere.pem")).starts_with("PIP_CERT: /nowhere.pem: cannot read"));
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "no certificate").unwrap();
    assert!(error(file.path()).ends_with(": contains no certificate"));
}
