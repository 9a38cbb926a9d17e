//! `scripts/verify_real.sh` without its reference: what it finds, what it would run, and what it refuses.

use std::path::Path;
use std::process::Command;

use crate::support::needs;
use crate::support::single_file::{self, TINY, TINY_2_3};

/// Exit code, stdout and stderr.
fn verify(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut run = Command::new("scripts/verify_real.sh");
    let out = run.args(arguments).args(["--python", "python3"]).output().expect("runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

#[needs(nothing)]
fn it_says_what_is_there_and_what_it_would_run() {
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
fn a_single_file_is_told_from_its_header() {
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

#[needs(nothing)]
fn errors_are_one_line() {
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
