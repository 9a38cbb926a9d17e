//! `scripts/verify_real.sh` without its reference: what it detects, what it would run, and what it rejects.

use std::path::Path;
use std::process::Command;

use crate::support::needs;
use crate::support::single_file::{self, TINY, TINY_2_3, TINY_2_5};
use ltx2::weights::Component;

/// Runs the script; returns exit code, stdout and stderr.
fn verify(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut run = Command::new("scripts/verify_real.sh");
    let out = run.args(arguments).args(["--python", "python3"]).output().expect("runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

#[needs(nothing)]
fn verify_script_lists_model_and_planned_cases() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().to_str().expect("UTF-8");
    let list = ["--list", "--device", "cpu", "--sizes", "128x64x9", "-o", out];
    for (model, generation) in [(TINY, "2.0"), (TINY_2_3, "2.3")] {
        let (code, said, error) = verify(&[&[model], &list[..]].concat());
        assert_eq!(code, Some(0), "{error}");
        assert!(said.contains(&format!("LTX-{generation}, diffusers folder")), "{said}");
        assert!(said.contains("cpu, f32; 2 cases: text_to_video-128x64x9, image_to_video-128x64x9"), "{said}");
        assert!(said.contains("not run: two_stage, keyframes, hq: no upsampler beside the model"), "{said}");
        assert!(said.contains("host memory: 2.0 GiB needed, "), "{said}");
    }
    let upsampler = "tests/fixtures/models/upsampler_rational/latent_upsampler";
    let lora = dir.path().join("distilled-lora.safetensors");
    std::fs::write(&lora, b"").expect("written");
    let more = ["--upsampler", upsampler, "--lora", lora.to_str().expect("UTF-8")];
    let (code, said, error) = verify(&[&[TINY], &list[..], &more[..]].concat());
    assert_eq!(code, Some(0), "{error}");
    let cases = ["text_to_video", "image_to_video", "two_stage", "keyframes", "hq"].map(|p| format!("{p}-128x64x9"));
    assert!(said.contains(&format!("5 cases: {}", cases.join(", "))), "{said}");
}

#[needs(nothing)]
fn verify_script_identifies_single_file_by_its_header() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("model.safetensors");
    single_file::write(&file, &single_file::combined_of(TINY_2_3), Some(&single_file::header_2_3()));
    let path = file.to_str().expect("UTF-8");
    let list = ["--list", "--device", "cpu", "-o", dir.path().to_str().expect("UTF-8")];
    let (code, said, error) = verify(&[&[path, "--diffusers", TINY_2_3], &list[..]].concat());
    assert_eq!(code, Some(0), "{error}");
    assert!(said.contains("LTX-2.3, single file"), "{said}");
    assert!(said.contains("reference: ltx-pipelines and ltx-core 1.0.0 on the file"), "{said}");
    let (code, said, error) = verify(&[&[path, "--diffusers", TINY_2_3, "--dtype", "bf16"], &list[..]].concat());
    assert_eq!((code, said.contains("reference: diffusers 0.42.1;")), (Some(0), true), "{said}{error}");
    let (code, _, error) = verify(&[&[path], &list[..]].concat());
    assert_eq!(
        (code, error.contains("give the folder of the same weights by --diffusers")),
        (Some(2), true),
        "{error}"
    );
    let (code, _, error) = verify(&[&[path, "--diffusers", TINY], &list[..]].concat());
    assert_eq!((code, error.contains("is LTX-2.3, ") && error.contains("is LTX-2.0")), (Some(2), true), "{error}");
}

/// Python program that checks which keys and files let a second call skip finished cases, for an artificial model.
const RESUME: &str = r#"
import os, sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, "scripts/verify")
import main, report
from found import PARTS, Found
folder = Path(sys.argv[1])
for part in PARTS:
    (folder / part).mkdir()
    (folder / part / "model.safetensors").touch()
    (folder / part / "config.json").touch()
(binary := folder / "ltx2").touch()
found, case = Found(folder, folder, "2.0", False, None, None, None), SimpleNamespace(request={})
keys = lambda: main.keys_of(found, case, SimpleNamespace(device="cpu", set=[], ltx2=binary))
assert (before := keys()) == keys()
files = [binary, folder / "vae/model.safetensors", folder / "vae/config.json"]
for file, changed in zip(files, ([False, True], [True, True], [True, True])):
    os.utime(file, (1, 1))
    now = keys()
    assert [a != b for a, b in zip(before, now)] == changed, file
    before = now
report.save(folder, {"verdict": "agrees"}, "key")
kept = folder / "verdict.json"
assert report.load(folder, "key")["verdict"] == "agrees" and report.load(folder, "another") is None
kept.write_text(kept.read_text()[:20])
assert report.load(folder, "key") is None
(folder / "reference.safetensors").touch()
assert main.finished(folder, "f32") and not main.finished(folder, "bf16")
"#;

#[needs(nothing)]
fn verify_script_reruns_changed_cases() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = Command::new("python3").args(["-B", "-c", RESUME]).arg(dir.path()).output().expect("runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[needs(nothing)]
fn verify_script_errors_are_one_line() {
    let nothing = Path::new("no/such/model").to_str().expect("UTF-8");
    let upsampler = "tests/fixtures/models/upsampler_rational/latent_upsampler/diffusion_pytorch_model.safetensors";
    let cases: [(&[&str], &str); 4] = [
        (&[nothing], "no/such/model: no such file or folder"),
        (&[TINY, "--upsampler", "no/such/file"], "no/such/file: no such file or folder"),
        (&["tests/fixtures/models/upsampler_rational"], "transformer/config.json"),
        (&[upsampler, "--diffusers", TINY], "its header describes no transformer"),
    ];
    for (arguments, want) in cases {
        let (code, _, error) = verify(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {error}");
        assert!(error.starts_with("verify_real.sh: ") && error.contains(want), "{arguments:?}: {error}");
        assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    }
    let (code, _, error) = verify(&[TINY, "--sizes", "100x64x9"]);
    assert_eq!((code, error.contains("width and height are multiples of 64")), (Some(2), true), "{error}");
    let (code, _, error) = verify(&[TINY, "--list", "--device", "cpu", "--sizes", "65536x65536x4097"]);
    assert_eq!((code, error.contains("not enough disk")), (Some(3), true), "{error}");
}

/// For LTX-2.5, only diffusers folders are compared, in the pipelines of LTX-2.3.
#[needs(nothing)]
fn ltx_2_5_verification_requires_a_diffusers_folder() {
    const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/tiny_2_5");
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("out").to_str().expect("UTF-8").to_string();
    let list = ["--list", "--device", "cpu", "--sizes", "128x64x9", "-o", &out];
    let (code, said, error) = verify(&[&[FOLDER], &list[..]].concat());
    assert_eq!(code, Some(0), "{error}");
    assert!(said.contains("LTX-2.5, diffusers folder"), "{said}");
    let file = dir.path().join("ltx-2.5-dev.safetensors");
    let tensors = single_file::combined_parts(TINY_2_5, &[Component::Transformer]);
    single_file::write(&file, &tensors, Some(&single_file::header_2_5()));
    let (code, _, error) = verify(&[&[file.to_str().expect("UTF-8"), "--diffusers", FOLDER], &list[..]].concat());
    let refused = error.contains("ltx-2.5-dev.safetensors: of LTX-2.5 folders") && error.contains("give the folder");
    assert_eq!((code, refused), (Some(2), true), "{error}");
}
