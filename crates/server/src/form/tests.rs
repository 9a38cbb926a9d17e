//! Unit tests of request bodies.

use axum::body::Body;
use axum::extract::{FromRequest, Multipart};
use axum::http::Request;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::Form;
use crate::descriptors::Descriptors;
use crate::error::ApiError;

/// A form part: the text after `form-data; ` in its header, and its contents.
type FormPart<'a> = (&'a str, &'a [u8]);

const BOUNDARY: &str = "XbOuNdArY";

/// Encodes form parts as a multipart body.
fn body(boundary: &str, parts: &[FormPart]) -> Vec<u8> {
    let mut out = Vec::new();
    for (head, contents) in parts {
        out.extend_from_slice(format!("--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n").as_bytes());
        out.extend_from_slice(contents);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(format!("--{boundary}--\r\n").as_bytes());
    out
}

/// Parses a request body with this content type.
fn read_bytes(content_type: &str, bytes: Vec<u8>) -> Result<Form, ApiError> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let request = Request::builder().method("POST").header("content-type", content_type);
        let request = request.body(Body::from(bytes)).expect("a request");
        let multipart = Multipart::from_request(request, &()).await;
        let multipart = multipart.map_err(|e| ApiError::new(400, "invalid_multipart", e.body_text()))?;
        let takes_file = |name: &str| name.starts_with("input_");
        Form::multipart(multipart, &std::env::temp_dir(), Descriptors::with_limit(u64::MAX), &takes_file).await
    })
}

/// Encodes form parts as a multipart body and parses the body.
fn form(parts: &[FormPart]) -> Result<Form, ApiError> {
    read_bytes(&format!("multipart/form-data; boundary={BOUNDARY}"), body(BOUNDARY, parts))
}

/// Encodes text fields as a multipart body, parses the body and returns its fields.
fn fields(given: &[(&str, &str)]) -> Result<Value, ApiError> {
    let heads: Vec<String> = given.iter().map(|(name, _)| format!("name=\"{name}\"")).collect();
    let parts: Vec<FormPart> =
        heads.iter().zip(given).map(|(head, (_, text))| (head.as_str(), text.as_bytes())).collect();
    form(&parts).map(|form| form.fields.into())
}

#[test]
fn bracketed_names_expand_into_trees() {
    for (given, want) in [
        (&[("prompt", "a"), ("seed", "7")][..], json!({"prompt": "a", "seed": "7"})),
        (&[("extra_params[stg_scale]", "1.0")], json!({"extra_params": {"stg_scale": "1.0"}})),
        (
            &[("extra_params[stg_blocks][]", "1"), ("extra_params[stg_blocks][]", "2")],
            json!({"extra_params": {"stg_blocks": ["1", "2"]}}),
        ),
        (&[("input_reference[image_url]", "data:x")], json!({"input_reference": {"image_url": "data:x"}})),
        // Lists of objects. Values may be sent in either order.
        (
            &[("loras[][name]", "a"), ("loras[][scale]", "1"), ("loras[][name]", "b"), ("loras[][scale]", "2")],
            json!({"loras": [{"name": "a", "scale": "1"}, {"name": "b", "scale": "2"}]}),
        ),
        (
            &[("loras[][name]", "a"), ("loras[][name]", "b"), ("loras[][scale]", "1"), ("loras[][scale]", "2")],
            json!({"loras": [{"name": "a", "scale": "1"}, {"name": "b", "scale": "2"}]}),
        ),
        (
            &[("loras[0][name]", "a"), ("loras[0][scale]", "1"), ("loras[1][name]", "b")],
            json!({"loras": [{"name": "a", "scale": "1"}, {"name": "b"}]}),
        ),
        (
            &[("ltx2[sampler][steps]", "8"), ("ltx2[pipeline]", "hq")],
            json!({"ltx2": {"sampler": {"steps": "8"}, "pipeline": "hq"}}),
        ),
        // Empty fields are omitted.
        (&[("prompt", "a"), ("size", ""), ("user", "")], json!({"prompt": "a"})),
        (&[], json!({})),
    ] {
        assert_eq!(fields(given), Ok(want), "{given:?}");
    }
}

#[test]
fn invalid_bracketed_names_are_rejected() {
    let deep = format!("a{}", "[b]".repeat(10_000));
    for (given, param) in [
        (&[("prompt", "a"), ("prompt", "b")][..], "prompt"),
        (&[("a[b]", "1"), ("a[b]", "2")], "a"),
        (&[("a", "1"), ("a[b]", "2")], "a"),
        (&[("a[]", "1"), ("a[b]", "2")], "a"),
        (&[("a[][b]", "1"), ("a[][b]", "2"), ("a[][c]", "2")], "a"),
        (&[("a[][b][c]", "1")], "a"),
        (&[("a[][][]", "1")], "a"),
        (&[("a[b", "1")], "a[b"),
        (&[("a]b", "1")], "a]b"),
        (&[("[a]", "1")], "[a]"),
        (&[("a[b]c", "1")], "a[b]c"),
        (&[("a[[b]]", "1")], "a[[b]]"),
        (&[("", "1")], ""),
        (&[("a[1][2][3][4][5][6][7][8][9]", "1")], "a[1][2][3][4][5][6][7][8][9]"),
        (&[(&deep, "1")], &deep[..64]),
        (&[("prompt", "a\0b")], "prompt"),
    ] {
        let error = fields(given).expect_err("refused");
        assert_eq!((error.status, error.code, error.param.as_deref()), (400, "invalid_value", Some(param)), "{error}");
    }
}

#[test]
fn file_parts_are_written_to_disk() {
    let parts: &[FormPart] = &[
        ("name=\"prompt\"", b"a"),
        ("name=\"input_reference\"; filename=\"../../etc/passwd\"\r\nContent-Type: image/png", b"\x89PNG"),
        ("name=\"images[]\"; filename=\"b\"", b"two"),
        ("name=\"mask\"; filename=\"\"\r\nContent-Type: application/octet-stream", b""),
    ];
    let given = form(parts).expect("a form");
    assert_eq!(given.fields, json!({"prompt": "a"}).as_object().cloned().expect("an object"));
    let told: Vec<(&str, u64)> = given.parts.iter().map(|part| (part.field.as_str(), part.bytes)).collect();
    assert_eq!(told, [("input_reference", 4), ("images", 3)]);
    assert_eq!(std::fs::read(given.parts[0].path()).expect("a file"), b"\x89PNG");
    let path = given.parts[0].path();
    assert!(!path.display().to_string().contains("passwd"));
    drop(given);
    assert!(!path.exists(), "deleted with the form");
}

/// An empty file is an error: if it were ignored, the video would not be what the client intended.
#[test]
fn empty_files_are_rejected() {
    for head in [
        "name=\"input_reference\"; filename=\"a.png\"",
        "name=\"images[]\"; filename=\"a.png\"",
        "name=\"video\"\r\nContent-Type: video/mp4",
        "name=\"input_reference\"",
        "name=\"input_reference[image_url]\"",
        "name=\"input_audio\"",
    ] {
        let error = form(&[("name=\"prompt\"", b"a"), (head, b"")]).expect_err(head);
        assert_eq!((error.status, error.code), (400, "invalid_value"), "{head}");
        assert!(
            error.message.contains("is empty") && head.contains(error.param.as_deref().expect("a field")),
            "{error}"
        );
    }
    // Parts without a selected file, and fields that never contain a file.
    for head in ["name=\"input_reference\"; filename=\"\"", "name=\"images[][strength]\"", "name=\"user\""] {
        assert!(form(&[("name=\"prompt\"", b"a"), (head, b"")]).is_ok(), "{head}");
    }
}

#[test]
fn body_hash_ignores_boundary_and_file_names() {
    let parts: &[FormPart] = &[("name=\"prompt\"", b"a"), ("name=\"f\"; filename=\"x\"", b"bytes")];
    let of = |boundary: &str, parts: &[FormPart]| {
        let kind = format!("multipart/form-data; boundary={boundary}");
        read_bytes(&kind, body(boundary, parts)).expect("a form").body_sha256
    };
    assert_eq!(of("one", parts), of("another-one", parts));
    let renamed: &[FormPart] = &[("name=\"prompt\"", b"a"), ("name=\"f\"; filename=\"y\"", b"bytes")];
    assert_eq!(of("one", parts), of("one", renamed), "the file name is not hashed");
    for other in [
        &[("name=\"prompt\"", &b"b"[..]), ("name=\"f\"; filename=\"x\"", b"bytes")][..],
        &[("name=\"prompt\"", b"a"), ("name=\"f\"; filename=\"x\"", b"other")],
        &[("name=\"prompt\"", b"a"), ("name=\"g\"; filename=\"x\"", b"bytes")],
        &[("name=\"prompt\"", b"a"), ("name=\"f\"", b"bytes")],
        &[("name=\"prompt\"", b"a")],
    ] {
        assert_ne!(of("one", parts), of("one", other));
    }
    let json = |text: &str| Form::json(text.as_bytes()).expect("JSON").body_sha256;
    assert_eq!(json("{\"a\": 1}"), json("{\"a\": 1}"));
    assert_ne!(json("{\"a\": 1}"), json("{\"a\": 2}"));
    assert_eq!(json("{}").len(), 64);
}

#[test]
fn too_many_fields_or_files_are_rejected() {
    let many = |count: usize, file: bool| {
        let tail = if file { "; filename=\"f\"" } else { "" };
        let heads: Vec<String> = (0..count).map(|i| format!("name=\"a{i}\"{tail}")).collect();
        let parts: Vec<FormPart> = heads.iter().map(|head| (head.as_str(), &b"1"[..])).collect();
        form(&parts).map(|_| ()).map_err(|e| (e.status, e.code))
    };
    assert_eq!((many(128, false), many(64, true)), (Ok(()), Ok(())));
    let refused = Err((400, "invalid_value"));
    assert_eq!([many(129, false), many(65, true), many(20_000, false)], [refused, refused, refused]);
    let empty: Vec<FormPart> = (0..65).map(|_| ("name=\"a\"; filename=\"\"", &b""[..])).collect();
    assert_eq!(form(&empty).expect_err("too many").code, "invalid_value");
    let fields: serde_json::Map<String, Value> = (0..129).map(|i| (format!("a{i}"), json!(1))).collect();
    assert_eq!(Form::json(Value::Object(fields).to_string().as_bytes()).expect_err("too many").code, "invalid_value");
}

#[test]
fn text_fields_must_be_utf_8() {
    let bad = |head: &str, bytes: &[u8]| form(&[(head, bytes)]).expect_err("refused");
    assert_eq!(bad("name=\"prompt\"", b"\xff\xfe").param.as_deref(), Some("prompt"));
    let latin = "name=\"prompt\"\r\nContent-Type: text/plain; charset=iso-8859-1";
    assert!(bad(latin, b"a").message.contains("UTF-8"));
    for good in ["text/plain; charset=UTF-8", "text/plain; charset=\"utf-8\"; x=y", "text/plain", "application/json"] {
        let head = format!("name=\"prompt\"\r\nContent-Type: {good}");
        assert!(form(&[(&head, b"a")]).is_ok(), "{good}");
    }
}

#[test]
fn invalid_json_is_rejected() {
    let code = |bytes: &[u8]| Form::json(bytes).map(|_| ()).map_err(|e| (e.status, e.code, e.param));
    let refused = Err((400, "invalid_json", None));
    let deep = format!("{{\"a\": {}", "[".repeat(100_000));
    let long = format!("{{\"seed\": {}}}", "9".repeat(1_000_000));
    let all: [&[u8]; 13] = [
        b"",
        b"{",
        b"[]",
        b"1",
        b"null",
        b"\"a\"",
        b"{\"a\": 1,}",
        b"{\"a\": 1} x",
        b"{\"a\": 1, \"a\": 2}",
        b"{\"a\": {\"b\": 1, \"b\": 2}}",
        b"\xff",
        deep.as_bytes(),
        long.as_bytes(),
    ];
    for bytes in all {
        assert_eq!(code(bytes), refused, "{:?}", String::from_utf8_lossy(&bytes[..bytes.len().min(40)]));
    }
    let named = |bytes: &[u8]| code(bytes).expect_err("refused").2;
    assert_eq!(named(b"{\"prompt\": \"a\\u0000b\"}").as_deref(), Some("prompt"));
    assert_eq!(named(b"{\"ltx2\": {\"a\": [\"\\u0000\"]}}").as_deref(), Some("ltx2"));
    let name = format!("{{\"{}\": 1}}", "n".repeat(65));
    assert_eq!(named(name.as_bytes()).map(|name| name.len()), Some(64));
    let form = Form::json(b"{\"a\": null, \"b\": \"\", \"c\": [1]}").expect("JSON");
    assert_eq!(Value::Object(form.fields), json!({"b": "", "c": [1]}));
}

/// A truncated form is rejected unless only the end of its closing boundary is missing.
#[test]
fn truncated_forms_are_rejected() {
    let parts: &[FormPart] = &[
        ("name=\"prompt\"", b"a red circle"),
        ("name=\"extra_params[stg_scale]\"", b"1"),
        ("name=\"input_reference\"; filename=\"a.png\"\r\nContent-Type: image/png", b"\x89PNG\r\n\x1a\n"),
    ];
    let whole = body(BOUNDARY, parts);
    let kind = format!("multipart/form-data; boundary={BOUNDARY}");
    for cut in 0..whole.len() {
        match read_bytes(&kind, whole[..cut].to_vec()) {
            Ok(form) => {
                assert!(form.fields.len() == 2 && form.parts.len() == 1 && cut > whole.len() - 5, "cut at {cut}")
            }
            Err(error) => assert!((400..500).contains(&error.status), "cut at {cut}: {error:?}"),
        }
    }
    for kind in ["multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=other"] {
        assert_eq!(read_bytes(kind, whole.clone()).expect_err("no boundary").status, 400, "{kind}");
    }
    let nameless: &[FormPart] = &[("filename=\"a\"", b"x")];
    assert_eq!(form(nameless).expect_err("no name").code, "invalid_multipart");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bodies_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        drop(Form::json(&bytes));
        let error = read_bytes("multipart/form-data; boundary=b", bytes).err();
        prop_assert!(error.is_none_or(|e| (400..500).contains(&e.status)));
    }

    #[test]
    fn arbitrary_forms_do_not_panic(
        names in proptest::collection::vec("[ab\\[\\]0-9\"; =\r\n-]{0,24}", 0..6),
        text in "[ -~\r\n-]{0,40}",
    ) {
        let heads: Vec<String> = names.iter().map(|name| format!("name=\"{name}\"")).collect();
        let parts: Vec<FormPart> = heads.iter().map(|head| (head.as_str(), text.as_bytes())).collect();
        let error = form(&parts).err();
        prop_assert!(error.is_none_or(|e| (400..500).contains(&e.status) && e.message.lines().count() == 1));
    }
}
