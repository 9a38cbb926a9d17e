//! `ltx2 compare`: all kinds of input, bounds and exit codes; and complete runs compared with the reference by the
//! bounds of tests/thresholds.yml.

use std::path::{Path, PathBuf};
use std::process::Output;

use crate::support::{
    self, Case, cases, cpu, dumped, dumping, full, generate, needs, open, plain, request, thresholds,
};
use ltx2::hlo::DType;
use ltx2::media::{Audio, EncoderChoice, Frames, Mp4Options, WavFormat, write_mp4, write_png_frames, write_wav};

use ltx2::pipeline::output::tensors;
use ltx2::tensor::Tensor;
use ndarray::{Array2, Array4};
use serde_json::Value;

fn compare(a: &Path, b: &Path, more: &[&str]) -> Output {
    support::ltx2().arg("compare").args([a, b]).args(more).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a comparison that must exit with `code`; returns stdout and the error line.
fn ends(code: i32, a: &Path, b: &Path, more: &[&str]) -> (String, String) {
    let out = compare(a, b, more);
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{more:?}: {stderr}");
    (text(&out.stdout), stderr.lines().find(|l| l.starts_with("error: ")).unwrap_or_default().to_string())
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).expect("a file")).expect("JSON")
}

fn gradient(frames: usize, add: u8) -> Frames {
    let data = Array4::from_shape_fn((frames, 32, 48, 3), |(f, y, x, c)| (4 * y + x + 8 * f + 20 * c) as u8 + add);
    Frames::new(data).expect("frames")
}

#[needs(nothing)]
fn folders_are_compared_frame_by_frame() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    write_png_frames(&path("a"), &gradient(3, 5)).expect("written");
    write_png_frames(&path("b"), &gradient(3, 0)).expect("written");
    let (out, page) = (path("s.json"), path("r.html"));
    let flags = ["--json", out.to_str().expect("UTF-8"), "--report", page.to_str().expect("UTF-8")];
    let (stdout, _) =
        ends(0, &path("a"), &path("b"), &[&flags[..], &["--max-mad", "5.01", "--min-psnr", "34"]].concat());
    // All values differ by 5/255: PSNR is 20 log10(255 / 5).
    let scores = json(&out);
    assert!((scores["video"]["psnr"].as_f64().expect("a number") - 34.1514).abs() < 1e-3, "{scores}");
    assert!((scores["video"]["mad"].as_f64().expect("a number") - 5.0).abs() < 1e-4, "{scores}");
    assert!(stdout.contains("34.15") && stdout.contains("worst frame"), "{stdout}");
    let (printed, _) = ends(0, &path("a"), &path("b"), &["--json", "-"]);
    assert_eq!(serde_json::from_str::<Value>(&printed).expect("only JSON"), scores);
    let (_, said) = ends(2, &path("a"), &path("b"), &["--report", "-"]);
    assert!(said.contains("--report: stdout is not supported; give the path of a file"), "{said}");
    let page = std::fs::read_to_string(page).expect("a page");
    assert_eq!(page.matches("data:image/png;base64,").count(), 9, "three frames, twice and their difference");
    assert!(!page.contains("src=\"http") && !page.contains("<script") && !page.contains("<link"));

    let (_, error) = ends(1, &path("a"), &path("b"), &["--min-psnr", "40", "--max-mad", "6"]);
    assert!(error.contains("psnr 34.1514 is below --min-psnr 40") && !error.contains("mad"), "{error}");
    let (_, error) = ends(2, &path("a"), &path("b"), &["--max-audio-l2", "1"]);
    assert!(error.contains("--max-audio-l2 requires audio in both results"), "{error}");
    write_png_frames(&path("c"), &gradient(2, 0)).expect("written");
    let (_, error) = ends(2, &path("a"), &path("c"), &[]);
    assert!(error.contains("3 frames of 48x32") && error.contains("2 frames of 48x32"), "{error}");
    let (_, error) = ends(2, &path("a"), &path("nothing.wav"), &[]);
    assert!(error.contains("nothing.wav"), "{error}");
}

#[needs(nothing)]
fn audio_is_compared_over_the_shorter_length() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    let wave = |n: usize, loud: f32| Array2::from_shape_fn((2, n), |(c, i)| loud * ((i * (c + 1)) as f32 * 0.05).sin());
    let write = |name: &str, samples: Array2<f32>, rate: u32, format: WavFormat| {
        write_wav(&path(name), &Audio::new(samples, rate).expect("sound"), format).expect("written");
        path(name)
    };
    let a = write("a.wav", wave(4000, 0.25), 8000, WavFormat::Float32);
    let b = write("b.wav", wave(4100, 0.5), 8000, WavFormat::Pcm16);
    let out = path("s.json");
    ends(0, &a, &b, &["--json", out.to_str().expect("UTF-8"), "--min-audio-cosine", "0.9999"]);
    let scores = json(&out);
    assert!((scores["audio"]["relative_l2"].as_f64().expect("a number") - 0.5).abs() < 1e-3, "{scores}");
    assert!(scores["audio"]["spectral"].as_f64().expect("a number") > 0.95, "{scores}");
    let (_, error) = ends(1, &a, &b, &["--max-audio-l2", "0.1"]);
    assert!(error.contains("audio relative L2 0.") && error.contains("is above --max-audio-l2 0.1"), "{error}");
    let other = write("c.wav", wave(4000, 0.5), 16000, WavFormat::Pcm16);
    let (_, error) = ends(2, &a, &other, &[]);
    assert!(error.contains("8000 samples per second") && error.contains("16000"), "{error}");
}

#[needs(nothing)]
fn video_without_ffmpeg_reports_missing_decoder() {
    let dir = tempfile::tempdir().expect("a folder");
    let (video, png) = (dir.path().join("a.mp4"), dir.path().join("png"));
    let embedded = Mp4Options { encoder: EncoderChoice::Embedded, ..Mp4Options::default() };
    write_mp4(&video, &gradient(5, 0), 24.0, None, &embedded).expect("encodes");
    write_png_frames(&png, &gradient(5, 0)).expect("written");
    let out = support::ltx2().arg("compare").args([video, png]).output().expect("runs");
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("install ffmpeg"), "{}", text(&out.stderr));
}

#[needs(ffmpeg)]
fn videos_are_decoded_by_ffmpeg() {
    let dir = tempfile::tempdir().expect("a folder");
    let (video, png) = (dir.path().join("a.mp4"), dir.path().join("png"));
    let frames = gradient(5, 0);
    let audio = Audio::new(Array2::from_shape_fn((2, 24000), |(_, i)| 0.3 * (i as f32 * 0.1).sin()), 24000);
    write_mp4(&video, &frames, 24.0, Some(&audio.expect("sound")), &Mp4Options::default()).expect("encodes");
    write_png_frames(&png, &frames).expect("written");
    let out = compare(&video, &png, &["--min-psnr", "30", "--min-ssim", "0.9"]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(text(&out.stdout).contains("only in one result: sound"), "{}", text(&out.stdout));
    let (stdout, _) =
        ends(0, &video, &video, &["--min-audio-cosine", "1", "--min-psnr", "1000", "--max-audio-l2", "0"]);
    assert!(stdout.contains("inf"), "{stdout}");
    std::fs::write(dir.path().join("broken.mp4"), b"nothing").expect("written");
    let (_, error) = ends(2, &dir.path().join("broken.mp4"), &video, &[]);
    assert!(error.contains("broken.mp4"), "{error}");
}

#[needs(nothing)]
fn dumps_are_compared_tensor_by_tensor() {
    let dir = tempfile::tempdir().expect("a folder");
    let write = |name: &str, all: &[(&str, Tensor)]| -> PathBuf {
        let path = dir.path().join(name);
        let all: Vec<(String, Tensor)> = all.iter().map(|(n, t)| ((*n).to_string(), t.clone())).collect();
        tensors::write(&path, &all).expect("written");
        path
    };
    let t = |values: &[f32]| Tensor::from(ndarray::arr1(values));
    let a = write("a.safetensors", &[("x", t(&[3.0, 4.0])), ("mine", t(&[1.0]))]);
    let b = write("b.safetensors", &[("x", t(&[3.0, 0.0])), ("yours", t(&[1.0]))]);
    let (stdout, _) = ends(0, &a, &b, &[]);
    for part in ["x relative L2", "1.3333", "0.6000", "4.0000", "'mine'", "'yours'"] {
        assert!(stdout.contains(part), "'{part}' is not in: {stdout}");
    }
    let c = write("c.safetensors", &[("x", t(&[1.0]))]);
    let (_, error) = ends(2, &a, &c, &[]);
    assert!(error.contains("'x'") && error.contains("[2]") && error.contains("[1]"), "{error}");
    let d = write("d.safetensors", &[("z", t(&[1.0]))]);
    let (_, error) = ends(2, &a, &d, &[]);
    assert!(error.contains("nothing in common"), "{error}");
}

#[needs(cpu)]
fn runs_are_within_reference_thresholds() {
    let client = cpu(8);
    let dir = tempfile::tempdir().expect("a folder");
    // One case per model version; all cases in full test runs.
    let chosen = |case: &Case| full() || ["tiny_a_cfg", "tiny_2_3_guided"].iter().any(|name| case.name.ends_with(name));
    for case in cases("pipeline").into_iter().filter(chosen) {
        let bounds = thresholds::row(&case.name).compare.expect("bounds");
        let mut runner = open(&client, case.model.to_str().expect("a path"), plain(DType::F32));
        let request = request(&case, &runner.model);
        let generated = generate(&mut runner, &request, &dumping(None));
        let mut both: [Vec<(String, Tensor)>; 2] = Default::default();
        for name in ["video", "audio", "latents.video", "latents.audio"] {
            let (got, want) = case.pair(name, dumped(&generated, name));
            both[0].push((name.into(), got));
            both[1].push((name.into(), want.clone()));
        }
        let files = ["ours", "reference"].map(|n| dir.path().join(format!("{n}.safetensors")));
        files.iter().zip(&both).for_each(|(file, all)| tensors::write(file, all).expect("written"));
        let bounds = [
            ("--min-psnr", bounds.min_psnr),
            ("--min-ssim", bounds.min_ssim),
            ("--max-mad", bounds.max_mad),
            ("--max-audio-l2", bounds.max_audio_l2),
            ("--min-audio-cosine", bounds.min_audio_cosine),
        ];
        let flags: Vec<String> = bounds.iter().flat_map(|(flag, v)| [(*flag).to_string(), v.to_string()]).collect();
        let (stdout, _) = ends(0, &files[0], &files[1], &flags.iter().map(String::as_str).collect::<Vec<_>>());
        eprintln!("{}\n{stdout}", case.name);
    }
}
