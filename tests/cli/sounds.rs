//! `--audio`: videos with input audio, and rejected audio files.

use std::fs;
use std::path::Path;
use std::process::Output;

use ltx2::media::{Audio, Mp4Options, WavFormat, read_sound, read_wav, write_mp4, write_wav};
use ndarray::{Array2, Array4};
use serde_json::Value;

use crate::support::{self, needs};

const SOUND: &str = "tests/fixtures/sounds/given.flac";
const EIGHT_BITS: &str = "tests/fixtures/sounds/tone_u8.wav";

fn ltx2(arguments: &[&str]) -> Output {
    support::ltx2().args(arguments).output().expect("the binary runs")
}

fn generate(out: &Path, more: &[&str]) -> Output {
    let out = out.to_str().expect("UTF-8");
    ltx2(&[&["generate", "-c", support::tiny(), "-o", out], more].concat())
}

/// Returns the only error line of a run that exits with `code`.
fn fails(code: i32, more: &[&str]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let made = generate(&folder.path().join("x.mp4"), more);
    let said = String::from_utf8_lossy(&made.stderr).into_owned();
    assert_eq!(made.status.code(), Some(code), "{more:?}: {said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one line says it: {said}");
    errors[0].to_string()
}

/// Inputs: an 8-bit file that ends before the video, a mono file with a sample rate that AAC does not support, and a
/// file longer than the video.
#[needs(cpu)]
fn video_is_generated_for_input_audio() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).to_str().expect("UTF-8").to_string();
    let mono =
        Audio::new(Array2::from_shape_fn((1, 6000), |(_, i)| (i as f32 * 0.05).sin() * 0.5), 10000).expect("mono");
    write_wav(&path("mono.wav"), &mono, WavFormat::Pcm16).expect("written");
    let mono_file = text("mono.wav");
    let cases: [(&str, &[&str], u32, usize); 3] = [
        (EIGHT_BITS, &[], 16000, 6000),
        (&mono_file, &["--audio-start", "0.1"], 48000, 18000),
        (SOUND, &["--audio-start", "0.05", "--audio-duration", "0.2"], 8000, 3000),
    ];
    for (n, (sound, more, rate, samples)) in cases.into_iter().enumerate() {
        let (out, wav) = (path(&format!("{n}.mp4")), text(&format!("{n}.wav")));
        let given = ["--pipeline", "audio_to_video", "--audio", sound, "--save-audio", &wav];
        let made = generate(&out, &[&given, more].concat());
        let said = String::from_utf8_lossy(&made.stderr).into_owned();
        assert!(made.status.success(), "{sound}: {said}");
        assert_eq!(said.matches("silence follows").count(), usize::from(n == 0), "{said}");
        let written = read_wav(Path::new(&wav)).expect("a WAV file");
        assert_eq!((written.rate(), written.channels(), written.len()), (rate, 2, samples), "{sound}");
        if sound == SOUND {
            let given = read_sound(Path::new(sound), Path::new("/nowhere"), None).expect("read").expect("a sound");
            let given = given.span(0.05, 1600);
            let written = written.samples().slice(ndarray::s![.., ..1600]);
            let largest = (&written - given.samples()).iter().fold(0f32, |most, v| most.max(v.abs()));
            assert!(largest <= 1.0 / 32768.0, "{largest}");
        }
        let heard = read_sound(&out, Path::new("/nowhere"), None).expect("an MP4").expect("a sound");
        assert_eq!((heard.rate(), heard.channels()), (rate, 2), "{sound}");
        // The last AAC packet of 1,024 samples is decoded completely.
        assert!((samples..samples + 1024).contains(&heard.len()), "{sound}: {}", heard.len());
        let json = fs::read_to_string(out.with_extension("json")).expect("a sidecar");
        let sidecar: Value = serde_json::from_str(&json).expect("JSON");
        let written_path = sidecar["config"]["request"]["audio"]["path"].as_str().expect("a path");
        assert!(Path::new(written_path).is_absolute() && written_path.ends_with(sound.trim_start_matches('.')));
        assert_eq!(sidecar["inputs"], support::hashes_of(&[sound]), "{sound}");
        let programs = sidecar["programs"].as_object().expect("programs");
        assert!(programs.contains_key("audio_encoder") && !programs.contains_key("vocoder"), "{programs:?}");
        if n == 0 {
            // A run from the sidecar has the same output.
            let again = path("again.mp4");
            let sidecar = out.with_extension("json");
            let arguments = ["generate", "-c", sidecar.to_str().expect("UTF-8"), "-o", again.to_str().expect("UTF-8")];
            assert!(ltx2(&arguments).status.success());
            assert_eq!(fs::read(&again).expect("a video"), fs::read(&out).expect("a video"));
        }
    }
}

#[needs(cpu)]
fn invalid_audio_gives_one_error_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
    let given =
        |sound: &str, more: &[&str]| fails(2, &[&["--pipeline", "audio_to_video", "--audio", sound], more].concat());
    let missing = given("nowhere.wav", &[]);
    assert!(missing.contains("cannot read nowhere.wav"), "{missing}");
    fs::write(path("text.mp3"), "no sound").expect("written");
    let text = given(&path("text.mp3"), &[]);
    assert!(text.contains("text.mp3"), "{text}");
    let frames = Array4::from_elem((2, 3, 32, 32), 0.5);
    let frames = ltx2::media::Frames::from_video(frames.view()).expect("frames");
    write_mp4(Path::new(&path("silent.mp4")), &frames, 24.0, None, &Mp4Options::default()).expect("written");
    let silent = given(&path("silent.mp4"), &[]);
    assert!(silent.contains("silent.mp4") && silent.contains("has no sound"), "{silent}");
    let odd = Audio::new(Array2::zeros((1, 8)), 999_983).expect("mono");
    write_wav(Path::new(&path("odd.wav")), &odd, WavFormat::Pcm16).expect("written");
    let odd = given(&path("odd.wav"), &[]);
    assert!(odd.contains("odd.wav") && odd.contains("999983 Hz"), "{odd}");
    let behind = given(SOUND, &["--audio-start", "7"]);
    assert!(behind.contains("given.flac") && behind.contains("ends after 0.600 s"), "{behind}");
}

/// The audio decoders log skipped data even for valid files; these messages are suppressed.
#[needs(cpu)]
fn audio_decoders_log_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["tone.mp3", "tone.m4a", "tone.opus"] {
        let sound = format!("tests/fixtures/sounds/{name}");
        let more = ["--pipeline", "audio_to_video", "--audio", &sound, "--audio-start", "7"];
        let made = generate(&folder.path().join("x.mp4"), &more);
        let said = String::from_utf8_lossy(&made.stderr).into_owned();
        assert!(!made.status.success() && said.contains(name), "{said}");
        assert!(!said.contains("junk") && !said.contains("EOF") && !said.contains("symphonia"), "{said}");
    }
}

#[needs(nothing)]
fn pipelines_without_audio_input_reject_audio() {
    for pipeline in ["text_to_video", "image_to_video"] {
        let image: &[&str] =
            if pipeline == "image_to_video" { &["--image", "tests/fixtures/images/shapes.png", "0", "1"] } else { &[] };
        let said = fails(2, &[&["--pipeline", pipeline, "--audio", SOUND], image].concat());
        assert!(said.contains(&format!("pipeline = {pipeline}")), "{said}");
        assert!(said.contains("input audio needs --pipeline audio_to_video, two_stage"), "{said}");
    }
    let none = fails(2, &["--pipeline", "audio_to_video"]);
    assert!(none.contains("needs input audio: --audio PATH"), "{none}");
    let both = ["--pipeline", "audio_to_video", "--audio", SOUND, "--set", "request.audio_latents=[{path: a}]"];
    assert!(fails(2, &both).contains("remove request.audio or request.audio_latents"));
    let zero = ["--pipeline", "audio_to_video", "--audio", SOUND, "--audio-duration", "0"];
    assert!(fails(2, &zero).contains("request.audio.duration = 0"), "{}", fails(2, &zero));
    let before = ["--pipeline", "audio_to_video", "--audio", SOUND, "--audio-start", "-1"];
    assert!(fails(2, &before).contains("audio.start"), "{}", fails(2, &before));
}
