//! Runs with an input video: their outputs, and rejected input videos.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use ltx2::media::{
    Audio, EncoderChoice, Frames, Mp4Options, WavFormat, covering_clip, read_clip, read_png_frames, read_sound,
    read_wav, write_mp4, write_png_frames, write_wav,
};
use ltx2::pipeline::output::tensors;
use ltx2::tensor::Tensor;
use ltx2::weights::Checkpoint;
use ndarray::{Array2, Array4};
use serde_json::Value;

use crate::support::{self, full, needs};

const FFMPEG: &str = "ffmpeg";
const CONFIG: &str = "tests/fixtures/tiny_video.yml";

fn generate(config: &str, out: &Path, more: &[&str]) -> Output {
    let out = out.to_str().expect("UTF-8");
    let arguments = [&["generate", "-c", config, "-o", out, "--force"], more].concat();
    support::ltx2().args(arguments).output().expect("the binary runs")
}

fn makes(config: &str, out: &Path, more: &[&str]) -> String {
    let made = generate(config, out, more);
    let said = String::from_utf8_lossy(&made.stderr).into_owned();
    assert!(made.status.success(), "{more:?}: {said}");
    said
}

/// Returns the only error line of a run that exits with 2.
fn fails(more: &[&str]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let made = generate(CONFIG, &folder.path().join("x.mp4"), more);
    let said = String::from_utf8_lossy(&made.stderr).into_owned();
    assert_eq!(made.status.code(), Some(2), "{more:?}: {said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one line says it: {said}");
    errors[0].to_string()
}

/// Writes an MP4 of a moving square with a tone.
fn source(path: &Path, (frames, height, width): (usize, usize, usize), rate: f64) {
    let inside = |f: usize, y: usize, x: usize| (x + 96 - f).is_multiple_of(3) || y.abs_diff(height / 2) < 8;
    let pixel = |(f, y, x, c): (usize, usize, usize, usize)| if inside(f, y, x) { 40 + 60 * c as u8 } else { 200 };
    let frames = Frames::new(Array4::from_shape_fn((frames, height, width, 3), pixel)).expect("frames");
    let sound = Array2::from_shape_fn((2, 48000), |(_, i)| (i as f32 * 0.05).sin() * 0.3);
    let sound = Audio::new(sound, 48000).expect("stereo");
    write_mp4(path, &frames, rate, Some(&sound), &Mp4Options::default()).expect("written");
}

/// The errors in these files are only found by decoding.
#[needs(cpu, ffmpeg)]
fn undecodable_input_videos_are_rejected() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).to_str().expect("UTF-8").to_string();
    source(&path("good.mp4"), (17, 64, 96), 24.0);
    let drops = ["-vf", "select='not(eq(mod(n,5),2))'", "-fps_mode", "vfr"];
    let mut ffmpeg = Command::new(FFMPEG);
    ffmpeg.args(["-loglevel", "error", "-i", &text("good.mp4")]).args(drops).arg(path("varies.mp4"));
    assert!(ffmpeg.status().expect("ffmpeg").success());
    let tone = ["--audio", "tests/fixtures/sounds/tone.flac"];
    for (name, more, why) in [
        ("good.mp4", &tone[..], "has its own sound; remove request.audio"),
        ("varies.mp4", &[], "the frame rate varies"),
    ] {
        let error = fails(&[&["--video", &text(name), "--retake", "0", "1"], more].concat());
        assert!(error.contains(why), "{name} {more:?}: {error}");
    }
}

/// The headers suffice to reject these requests; nothing is decoded.
#[needs(cpu)]
fn invalid_input_videos_and_spans_are_rejected() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).to_str().expect("UTF-8").to_string();
    source(&path("good.mp4"), (17, 64, 96), 24.0);
    source(&path("odd.mp4"), (20, 64, 96), 24.0);
    source(&path("size.mp4"), (17, 60, 96), 24.0);
    let whole = fs::read(path("good.mp4")).expect("bytes");
    fs::write(path("cut.mp4"), &whole[..300]).expect("written");
    let retake = |name: &str, more: &[&str]| {
        let video = text(name);
        fails(&[&["--video", &video], more].concat())
    };
    for (name, more, why) in [
        ("good.mp4", &["--retake", "2", "1"][..], "2 to 1 s (flag --retake): is empty; to must be after from"),
        ("good.mp4", &["--retake", "3", "4"], "must start before the end of the video (0.708 s)"),
        ("good.mp4", &["--retake", "0", "1", "--frame-rate", "30"], "the video has 24.000 frames per second"),
        ("good.mp4", &["--retake", "0", "1", "--num-frames", "25"], "the video has 17"),
        ("good.mp4", &["--pipeline", "retake"], "requires a time span: --retake FROM TO"),
        (
            "good.mp4",
            &["--pipeline", "text_to_video"],
            "only the pipelines retake, extend, inpaint, dub_it and video_to_audio",
        ),
        ("good.mp4", &["--extend", "0"], "must be above 0"),
        ("good.mp4", &["--extend", "1"], "has 17 frames, fewer than request.extend.overlap = 25"),
        ("good.mp4", &["--retake", "0", "1", "--num-frames", "auto"], "the input video has 17 frames; remove auto"),
        (
            "good.mp4",
            &["--retake", "0", "1", "--set", "conditioning.generated_keyframes=1"],
            "the pipeline retake generates no keyframes",
        ),
        (
            "good.mp4",
            &["--retake", "0", "1", "--set", "request.audio_latents=[{path: a.safetensors}]"],
            "the pipeline uses the sound of its input video",
        ),
        (
            "good.mp4",
            &["--pipeline", "video_to_audio", "--audio", "tests/fixtures/sounds/tone.flac"],
            "input audio needs --pipeline audio_to_video, two_stage, distilled, in_context, hq or keyframes, or retake, extend, inpaint or dub_it",
        ),
        ("odd.mp4", &["--retake", "0", "1"], "must be one more than a multiple of 8; the nearest are 17 and 25"),
        ("size.mp4", &["--retake", "0", "1"], "request.height = 60 (video "),
        ("cut.mp4", &["--retake", "0", "1"], "cut.mp4"),
        ("gone.mp4", &["--retake", "0", "1"], "cannot read"),
    ] {
        let error = retake(name, more);
        assert!(error.contains(why), "{name} {more:?}: {error}");
    }
    assert!(fails(&["--retake", "0", "1"]).contains("needs a video: --video PATH"));
    assert!(fails(&["--pipeline", "text_to_audio"]).contains("sound alone is written as WAV"));
}

#[needs(cpu, ffmpeg)]
fn input_video_is_extended_or_gets_new_sound() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let (video, ffmpeg) = (path("source.mp4"), Path::new(FFMPEG));
    source(&video, (20, 64, 96), 24.0);
    let given = video.to_str().expect("UTF-8");
    let read = |name: &str| read_clip(&path(name), ffmpeg).expect("a video");
    let frames = read("source.mp4");

    // All 20 frames are copied, although the model only sees 17 of them.
    makes(CONFIG, &path("sound.mp4"), &["--pipeline", "video_to_audio", "--video", given]);
    assert_eq!(read("sound.mp4"), frames);
    let sound = |name: &str| read_sound(&path(name), ffmpeg, None).expect("readable").expect("a sound");
    assert_ne!(sound("sound.mp4").samples(), sound("source.mp4").samples());

    // The generated sound starts with the first frame, even if the source shows its first frame later than its sound.
    let late = path("late:1.mp4");
    let mut command = std::process::Command::new(FFMPEG);
    command.args([
        "-v",
        "error",
        "-itsoffset",
        "0.5",
        "-i",
        given,
        "-i",
        given,
        "-map",
        "0:v",
        "-map",
        "1:a",
        "-c",
        "copy",
    ]);
    assert!(command.arg(format!("file:{}", late.display())).status().expect("ffmpeg").success());
    makes(CONFIG, &path("late.mp4"), &["--pipeline", "video_to_audio", "--video", late.to_str().expect("UTF-8")]);
    let mut probe = std::process::Command::new("ffprobe");
    probe.args(["-v", "error", "-show_entries", "stream=start_time", "-of", "csv=p=0"]).arg(path("late.mp4"));
    let starts = String::from_utf8(probe.output().expect("ffprobe").stdout).expect("text");
    let starts: Vec<f64> = starts.split_whitespace().map(|start| start.parse().expect("seconds")).collect();
    assert!(starts.len() == 2 && starts.iter().all(|start| start.abs() < 0.001), "{starts:?}");

    let overlap = "request.extend.overlap=9";
    for (name, at) in [("after.mp4", "end"), ("before.mp4", "start")].into_iter().take(if full() { 2 } else { 1 }) {
        makes(CONFIG, &path(name), &["--video", given, "--extend", "0.3", "--extend-at", at, "--set", overlap]);
        let made = read(name);
        assert_eq!((made.count(), made.height(), made.width()), (28, 64, 96), "{name}");
        let seconds = sound(name).len() as f64 / f64::from(sound(name).rate());
        assert!((seconds - 28.0 / 24.0).abs() < 0.03, "{name}: {seconds}");
    }
    // The sidecar records the video and its properties, and a run from the sidecar has the same output.
    let json = fs::read_to_string(path("after.json")).expect("a sidecar");
    let sidecar: Value = serde_json::from_str(&json).expect("JSON");
    let request = &sidecar["config"]["request"];
    assert_eq!((&request["video"], &request["num_frames"]), (&Value::from(given), &Value::from(17)));
    assert_eq!(sidecar["inputs"], support::hashes_of(&[given]));
    if full() {
        makes(path("after.json").to_str().expect("UTF-8"), &path("again.mp4"), &[]);
        let again = fs::read_to_string(path("again.json")).expect("a sidecar");
        let again: Value = serde_json::from_str(&again).expect("JSON");
        assert_eq!(again["sha256"], sidecar["sha256"]);
    }

    // Pipelines that only generate audio need no video VAE.
    let model = without_vae(folder.path());
    let more = ["--num-frames", "9", "-m", &model];
    makes(CONFIG, &path("alone.wav"), &[&["--pipeline", "text_to_audio"], &more[..]].concat());
    let alone = read_wav(&path("alone.wav")).expect("a WAV file");
    assert!(alone.samples().iter().any(|sample| *sample != 0.0));
    assert_eq!(alone.len(), (9 * alone.rate() as usize).div_ceil(24), "as long as 9 frames");
    let json = fs::read_to_string(path("alone.json")).expect("a sidecar");
    let sidecar: Value = serde_json::from_str(&json).expect("JSON");
    assert!(!sidecar["programs"].as_object().expect("programs").contains_key("video_decoder"));
}

/// Creates a model folder of links, without the video VAE.
fn without_vae(folder: &Path) -> String {
    let model = folder.join("without_vae");
    fs::create_dir(&model).expect("a folder");
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/tiny_a");
    for entry in fs::read_dir(whole).expect("a model").map(|entry| entry.expect("an entry")) {
        if entry.file_name() != "vae" {
            std::os::unix::fs::symlink(entry.path(), model.join(entry.file_name())).expect("a link");
        }
    }
    model.to_str().expect("UTF-8").to_string()
}

#[needs(nothing)]
fn check_lists_requirements_of_each_pipeline() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = without_vae(folder.path());
    let whole = "tests/fixtures/models/tiny_a";
    let said = |more: &[&str]| {
        let output = support::ltx2().arg("check").args(more).output().expect("the binary runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let upsampler = ["--upsampler", "tests/fixtures/models/upsampler_rational"];
    for (model, lines) in [
        (
            &model[..],
            [
                // The preset perturbs a block that only the published model has.
                "text_to_audio: guidance.stg_blocks: 29 is not a block of this model, which has 3 blocks",
                "video_to_audio: needs vae",
                "retake: needs vae",
                "in_context: needs vae",
            ],
        ),
        (
            whole,
            [
                "text_to_video: ready",
                "retake: guidance.stg_blocks: 29 is not a block of this model, which has 3 blocks",
                "image_to_video: ready, with --image",
                "in_context: ready, with --reference-video and --lora",
            ],
        ),
    ] {
        let said = said(&[&[model], &upsampler[..]].concat());
        assert!(
            lines.iter().all(|want| said.lines().any(|line| line.split("; ").next() == Some(*want))),
            "{lines:?}: {said}"
        );
    }
    let json: Value = serde_json::from_str(&said(&[&model, "--json"])).expect("JSON");
    let audio = &json["pipelines"]["text_to_audio"];
    assert_eq!((&audio["ready"], &audio["missing"]), (&false.into(), &serde_json::json!([])));
    assert!(audio["error"].as_str().is_some_and(|error| error.contains("stg_blocks: 29")), "{audio}");
    assert_eq!(json["pipelines"]["extend"]["missing"], serde_json::json!(["vae"]));
    assert_eq!(json["pipelines"]["in_context"]["with"], serde_json::json!(["--reference-video", "--lora"]));
}

/// Keeping the sound of a silent video is rejected before the model is loaded, with both values of
/// `conditioning.given_stream`.
#[needs(cpu)]
fn keeping_sound_of_silent_video_is_rejected() {
    let folder = tempfile::tempdir().expect("a folder");
    let frames = Frames::new(Array4::zeros((17, 64, 96, 3))).expect("frames");
    write_png_frames(folder.path(), &frames).expect("written");
    let given = folder.path().to_str().expect("UTF-8");
    for level in ["official", "official_1_0"] {
        let level = format!("conditioning.given_stream={level}");
        let keep = ["--set", "request.retake.audio=false", "--set", &level];
        let error = fails(&[&["--video", given, "--retake", "0", "0.2"], &keep[..]].concat());
        assert!(
            error.contains(given) && error.contains("has no sound to keep (request.retake.audio: false)"),
            "{error}"
        );
    }
}

/// A dry run reads the size from the MP4 header. Without ffmpeg to decode the video, it gives the same error as a run.
#[needs(cpu)]
fn dry_run_and_run_give_the_same_error_without_ffmpeg() {
    let folder = tempfile::tempdir().expect("a folder");
    let video = folder.path().join("good.mp4");
    let frames = Frames::new(Array4::zeros((17, 64, 96, 3))).expect("frames");
    let options = Mp4Options { encoder: EncoderChoice::Embedded, ..Mp4Options::default() };
    write_mp4(&video, &frames, 25.0, None, &options).expect("written");
    let given = ["generate", "-c", CONFIG, "--video", video.to_str().expect("UTF-8"), "--retake", "0", "0.2"];
    let out = folder.path().join("out.mp4");
    let bytes = fs::read(&video).expect("bytes");
    let run = |more: &[&str]| {
        let mut command = support::ltx2();
        command.args(given).arg("-o").arg(&out).args(more).output().expect("the binary runs")
    };
    let plan = run(&["--dry-run"]);
    let said = String::from_utf8_lossy(&plan.stderr);
    assert!(said.contains("96x64, 17 frames at 25 per second"), "{said}");
    // A portrait video as phones write it: the matrix in the track header rotates the frames.
    let mut turned = bytes.clone();
    let matrix = turned.windows(4).position(|word| word == b"tkhd").expect("a header") + 56;
    for (n, word) in [0, 1 << 16, 0, -1 << 16, 0].into_iter().enumerate() {
        let at = matrix + 4 * n;
        turned[at..at + 4].copy_from_slice(&i32::to_be_bytes(word));
    }
    fs::write(&video, turned).expect("written");
    let said = String::from_utf8_lossy(&run(&["--dry-run"]).stderr).into_owned();
    assert!(said.contains("64x96, 17 frames at 25 per second"), "{said}");
    fs::write(&video, &bytes).expect("written");
    for ran in [plan, run(&[])] {
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.code() == Some(2) && said.contains("good.mp4: reading a video needs ffmpeg"), "{said}");
    }
}

/// A request for 9 of 20 frames uses only the first 9. A request for 17, the frames of all complete latents, also keeps
/// the remaining frames.
#[needs(cpu)]
fn video_to_audio_uses_only_requested_frames() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
    let pixel = |(f, y, x, c): (usize, usize, usize, usize)| (f * 12 + y + x + 40 * c) as u8;
    let frames = Frames::new(Array4::from_shape_fn((20, 64, 96, 3), pixel)).expect("frames");
    write_png_frames(Path::new(&path("source")), &frames).expect("written");
    for (number, shown) in [("9", 9), ("17", 20)] {
        let saved = path(&format!("frames{number}"));
        let given = ["--pipeline", "video_to_audio", "--video", &path("source"), "--save-frames", &saved];
        makes(CONFIG, &folder.path().join("a.mp4"), &[&given[..], &["--num-frames", number]].concat());
        assert_eq!(read_png_frames(Path::new(&saved)).expect("frames"), frames.part(0..shown), "{number}");
    }
}

/// A folder of frames and a WAV file serve as input video. Outside the retake span, the output has the same frames and
/// samples. A run from its sidecar has the same output.
#[needs(cpu)]
fn frame_folder_and_wav_serve_as_input_video() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
    let pixel = |(f, y, x, c): (usize, usize, usize, usize)| (f * 12 + y + x + 40 * c) as u8;
    let frames = Frames::new(Array4::from_shape_fn((17, 64, 96, 3), pixel)).expect("frames");
    write_png_frames(Path::new(&path("source")), &frames).expect("written");
    // The vocoder's sample rate, so nothing is resampled; the file starts half a second before the video.
    let rate = 24000;
    let tone = |n: usize| (n as f32 * 0.05).sin() * 0.25;
    let sound = Audio::new(Array2::from_shape_fn((2, 2 * rate), |(_, n)| tone(n)), rate as u32).expect("stereo");
    write_wav(Path::new(&path("tone.wav")), &sound, WavFormat::Float32).expect("written");
    let given = ["--video", &path("source"), "--audio", &path("tone.wav"), "--audio-start", "0.5"];
    let saved = |name: &str| [path(&format!("{name}.frames")), path(&format!("{name}.wav"))];
    let make = |config: &str, name: &str, more: &[&str]| {
        let [frames, samples] = saved(name);
        let save = ["--save-frames", &frames, "--save-audio", &samples];
        makes(config, &folder.path().join(format!("{name}.mp4")), &[&save[..], more].concat());
        let frames = read_png_frames(Path::new(&frames)).expect("frames");
        (frames, read_wav(Path::new(&samples)).expect("a WAV file"))
    };
    let span = ["--retake", "0.4", "0.7", "--retake-kept", "source"];
    let (shown, heard) = make(CONFIG, "retaken", &[&given[..], &span].concat());
    // The retake covers frames 9 to 16, and audio from 0.37 s.
    assert_eq!(shown.part(0..9), frames.part(0..9));
    assert!(shown.part(9..17) != frames.part(9..17));
    assert_eq!(heard.rate(), rate as u32, "the test's rate is the model's");
    let off = |n: usize| (heard.samples()[(0, n)] - tone(n + rate / 2)).abs();
    let at = |seconds: f64| (seconds * rate as f64) as usize;
    assert!((0..at(0.34)).all(|n| off(n) < 1e-4), "the given samples");
    assert!((at(0.38)..at(0.5)).any(|n| off(n) > 1e-2), "the span is regenerated");

    let json = fs::read_to_string(path("retaken.json")).expect("a sidecar");
    let sidecar: Value = serde_json::from_str(&json).expect("JSON");
    let retake = &sidecar["config"]["request"]["retake"];
    assert_eq!((&retake["from"], &retake["to"], &retake["kept"]), (&0.4.into(), &0.7.into(), &"source".into()));
    assert_eq!(make(&path("retaken.json"), "again", &[]).0, shown);
    let json = fs::read_to_string(path("again.json")).expect("a sidecar");
    let again: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(again["sha256"], sidecar["sha256"]);

    let more = ["--extend", "0.3", "--set", "request.extend.overlap=9"];
    let (shown, heard) = make(CONFIG, "extended", &[&given[..], &more].concat());
    assert_eq!((shown.count(), shown.part(0..17)), (25, frames));
    let off = |n: usize| (heard.samples()[(1, n)] - tone(n + rate / 2)).abs();
    assert!((0..at(0.66)).all(|n| off(n) < 1e-4), "the given samples");
}

/// Reads 10-bit video, as phones write, and rejects a file whose second half is missing although its header is intact.
#[needs(cpu, ffmpeg)]
fn ten_bit_video_is_read_and_truncated_file_rejected() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
    let (good, deep, cut) = (text("good.mp4"), text("deep.mkv"), text("cut.mp4"));
    source(Path::new(&good), (33, 64, 96), 24.0);
    let mut ffmpeg = Command::new(FFMPEG);
    ffmpeg.args(["-loglevel", "error", "-i", &good, "-c:v", "ffv1", "-pix_fmt", "yuv420p10le", "-an", &deep]);
    assert!(ffmpeg.status().expect("ffmpeg").success());
    let read = |name: &str| read_clip(Path::new(name), Path::new(FFMPEG));
    let [eight, ten] = [&good, &deep].map(|name| read(name).expect("a video"));
    assert_eq!(ten.data().dim(), eight.data().dim());
    let off = (ten.to_video() - eight.to_video()).mapv(f32::abs).mean().expect("pixels");
    assert!(off < 2.0 / 255.0, "the same frames: {off}");

    let whole = fs::read(&good).expect("bytes");
    let place = |name: &[u8]| whole.windows(4).position(|word| word == name).expect("a box");
    assert!(place(b"moov") < place(b"mdat"), "the header is in front");
    fs::write(&cut, &whole[..(place(b"mdat") + whole.len()) / 2]).expect("written");
    let why = read(&cut).expect_err("damaged").to_string();
    assert!(why.contains("cut.mp4") && why.contains("is truncated"), "{why}");
    let error = fails(&["--video", &cut, "--retake", "0", "0.2"]);
    assert!(error.contains("cut.mp4"), "{error}");
}

/// Encodes and decodes frames with the VAE of the toy model.
fn round_trip(frames: &Frames, folder: &Path) -> Frames {
    let path = |name: &str| folder.join(name);
    let text = |name: &str| path(name).to_str().expect("UTF-8").to_string();
    let tensor = Tensor::from(covering_clip(frames, frames.height(), frames.width()));
    tensors::write(&path("in.safetensors"), &[("video".into(), tensor)]).expect("written");
    for (part, from, to) in [
        ("video-encoder", "in.safetensors", "latents.safetensors"),
        ("video-decoder", "latents.safetensors", "out.safetensors"),
    ] {
        let (from, to) = (text(from), text(to));
        let run = [
            "run",
            part,
            "--model",
            "assets/nano",
            "--inputs",
            &from,
            "-o",
            &to,
            "--platform",
            "cpu",
            "--dtype",
            "f32",
        ];
        let ran = support::ltx2().args(run).output().expect("the binary runs");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    }
    let decoded = Checkpoint::open(&path("out.safetensors")).expect("a file");
    let decoded = decoded.get("video").expect("a video").to_tensor().expect("read").to_f32();
    let video = decoded.into_dimensionality::<ndarray::Ix5>().expect("five axes");
    let video = video.index_axis_move(ndarray::Axis(0), 0).permuted_axes([1, 0, 2, 3]).mapv(|v| v * 0.5 + 0.5);
    Frames::from_video(video.view()).expect("frames")
}

/// Regenerates a span with the trained model. Outside the span, the loss is that of a VAE round trip, except for about
/// one and a half latents on either side that the decoder mixes.
#[needs(cpu, full)]
fn retake_changes_only_its_span() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).to_str().expect("UTF-8").to_string();
    let quick = ["--platform", "cpu", "--set", "sampler.steps=8", "--num-frames", "49"];
    let made = |name: &str, prompt: &str, more: &[&str]| {
        let saved = text(name);
        let all = [&quick[..], &["-p", prompt, "--save-frames", &saved], more].concat();
        makes("nano", &path("x.mp4"), &all);
        read_png_frames(&path(name)).expect("frames")
    };
    let a = made("a", "a red circle bounces on blue, low beeps", &[]);
    let b = made("b", "a green square bounces on white", &["--video", &text("a"), "--retake", "0.9", "1.0"]);

    let round_trip = round_trip(&a, folder.path());
    let psnr = |one: &Frames, other: &Frames, frame: usize| {
        let pair = one.part(frame..frame + 1).to_video() - other.part(frame..frame + 1).to_video();
        -10.0 * pair.mapv(|v| f64::from(v).powi(2)).mean().expect("pixels").max(1e-9).log10()
    };
    let (kept, lost): (Vec<f64>, Vec<f64>) = (0..49).map(|f| (psnr(&a, &b, f), psnr(&a, &round_trip, f))).unzip();
    eprintln!("decibels by frame, retake: {kept:.1?}\nround trip: {lost:.1?}");
    // Latents of frames 17 to 24 are regenerated.
    let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len() as f64;
    for far in [0..9, 36..49] {
        let [kept, lost] = [&kept, &lost].map(|all| mean(&all[far.clone()]));
        assert!(kept >= lost - 1.0, "frames {far:?}: {kept:.1} and {lost:.1}");
    }
    assert!((18..24).all(|frame| kept[frame] < lost[frame] - 3.0), "the span is another");
}

/// Regenerates the middle with the trained model. Two latents (64 pixels) away from it, the loss is that of a VAE round
/// trip.
#[needs(cpu, full)]
fn inpainting_changes_only_its_region() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).to_str().expect("UTF-8").to_string();
    let quick = ["--platform", "cpu", "--set", "sampler.steps=8", "--num-frames", "25", "--width", "256"];
    let made = |name: &str, prompt: &str, more: &[&str]| {
        let saved = text(name);
        makes("nano", &path("x.mp4"), &[&quick[..], &["-p", prompt, "--save-frames", &saved], more].concat());
        read_png_frames(&path(name)).expect("frames")
    };
    let a = made("a", "a red circle bounces on blue, low beeps", &[]);
    let region = ["--inpaint", "128", "0", "64", "96", "--set", "request.inpaint.audio=true"];
    let b = made("b", "a green square bounces on white", &[&["--video", &text("a")], &region[..]].concat());
    let round_trip = round_trip(&a, folder.path());
    let by_column = |other: &Frames| {
        let error = (a.to_video() - other.to_video()).mapv(|v| f64::from(v).powi(2));
        let column = |at: usize| error.slice(ndarray::s![.., .., .., at * 32..at * 32 + 32]).mean().expect("pixels");
        (0..8).map(|at| -10.0 * column(at).max(1e-9).log10()).collect::<Vec<f64>>()
    };
    let [kept, lost] = [&b, &round_trip].map(by_column);
    eprintln!("decibels by 32 columns: {kept:.1?}, round trip: {lost:.1?}");
    assert!((0..2).all(|column| kept[column] >= lost[column] - 1.0), "columns 0 and 1 are changed");
    assert!((4..6).all(|column| kept[column] < lost[column] - 3.0), "the region is not regenerated");
}
