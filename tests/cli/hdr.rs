//! The pipeline `hdr` on the command line: EXR frames, 10-bit video, SDR preview and rejected requests.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use half::f16;
use ltx2::media::{Frames, HdrTransform, read_video, write_png_frames};
use ltx2::weights::Checkpoint;
use ndarray::Array4;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::Value;

use crate::support::{self, needs};

const LORA: &str = "tests/fixtures/lora/hdr_tiny_2_3.safetensors";

fn generate(out: &Path, more: &[&str]) -> Output {
    let own = ["generate", "--platform", "cpu", "-m", "tests/fixtures/models/tiny_2_3", "-o"];
    let upsampler = ["--upsampler", "tests/fixtures/models/upsampler_plain"];
    let size = ["--set", "request={width: 128, height: 128, num_frames: 17, max_sequence_length: 64}"];
    let speed = ["--set", "runtime={dtype: f32, xla_flags: {xla_backend_optimization_level: 0}}"];
    let all = [&own[..], &[out.to_str().expect("UTF-8")], &upsampler, &size, &speed, more].concat();
    support::ltx2().args(all).output().expect("the binary runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the only error line of a run that exits with `code`.
fn fails(code: i32, more: &[&str]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let made = generate(&folder.path().join("x.mp4"), more);
    let said = said(&made);
    assert_eq!(made.status.code(), Some(code), "{more:?}: {said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one line says it: {said}");
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "{more:?}: no file remains");
    errors[0].to_string()
}

/// Writes a folder of frames; returns its path.
fn video(path: &Path) -> String {
    let byte = |(f, y, x, c)| ((f * 13 + y * 3 + x * 5 + c * 70) % 256) as u8;
    write_png_frames(path, &Frames::new(Array4::from_shape_fn((17, 100, 128, 3), byte)).expect("frames"))
        .expect("written");
    path.to_str().expect("UTF-8").to_string()
}

/// Writes a safetensors file with f32 zeros of these shapes and this header; returns its path.
fn zeros(path: &Path, tensors: &[(&str, [usize; 2])], header: &[(&str, &str)]) -> String {
    let bytes = vec![0; 4 * tensors.iter().map(|(_, shape)| shape[0] * shape[1]).max().unwrap_or(0)];
    let views = tensors.iter().map(|(name, shape)| {
        let own = &bytes[..4 * shape[0] * shape[1]];
        (*name, TensorView::new(Dtype::F32, shape.to_vec(), own).expect("a tensor"))
    });
    let header: HashMap<String, String> = header.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    fs::write(path, safetensors::serialize(views, Some(header)).expect("bytes")).expect("written");
    path.to_str().expect("UTF-8").to_string()
}

#[needs(cpu)]
fn invalid_hdr_requests_are_rejected() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let reference = video(&path("frames"));
    let lora = |name: &str, header: &[(&str, &str)]| zeros(&path(name), &[("x", [1, 1])], header);
    let pq = lora("pq.safetensors", &[("hdr_transform", "pq")]);
    let aces = lora("aces.safetensors", &[("hdr_transform", "acescct")]);
    let half = lora("half.safetensors", &[("hdr_transform", "true"), ("reference_downscale_factor", "2")]);
    let short = zeros(&path("short.safetensors"), &[("video_context", [32, 32]), ("audio_context", [32, 32])], &[]);
    let hdr = ["--lora", LORA];
    for (code, more, why) in [
        (2, &["--lora", &pq][..], "pq (LoRA "),
        (2, &["--lora", &pq], "this curve is not supported; the known ones are logc3 and acescct"),
        (2, &["--lora", LORA, "--lora", &aces], "LoRAs with different curves cannot be combined"),
        (2, &["--lora", &half], "the pipeline hdr supports only reference videos of its own size"),
        (
            2,
            &["--lora", LORA, "--pipeline", "in_context"],
            "this LoRA generates HDR video, but the pipeline is in_context; use hdr",
        ),
        (2, &["--lora", LORA, "--image", "tests/fixtures/images/shapes.png"], "does not support images"),
        (
            2,
            &["--lora", LORA, "--reference", "diffusers"],
            "the pipeline hdr computes as Lightricks 1.2.0 does; use official",
        ),
        (2, &["--lora", LORA, "--save-audio", "a.wav", "-p", "a"], "the pipeline hdr makes no sound"),
        (2, &["--lora", LORA], "no prompt"),
        (2, &["--lora", LORA, "--text-embeddings", &short, "-p", "a"], "cannot be used with"),
    ] {
        let error = fails(code, &[&["--reference-video", &reference][..], more].concat());
        assert!(error.contains(why), "{more:?}: {error}");
    }
    let error = fails(2, &[&["--reference-video", &reference, "--text-embeddings", &short][..], &hdr].concat());
    assert!(error.contains("video_context has shape [1, 32, 32], but this request needs [1, 64, 32]"), "{error}");
    assert!(error.contains("set request.max_sequence_length to 32"), "{error}");
    let error = fails(2, &["--pipeline", "dub_it", "--video", &reference, "--lora", LORA, "-p", "a"]);
    assert!(error.contains("this LoRA generates HDR video, but the pipeline is dub_it; use hdr"), "{error}");
    let error = fails(2, &["--pipeline", "two_stage", "--save-exr", "x", "-p", "a"]);
    assert!(error.contains("only the pipeline hdr uses this key, but the pipeline is two_stage"), "{error}");
}

/// Returns the fields of ffprobe's description of a video stream.
fn probed(path: &Path) -> Value {
    let mut probe = Command::new("ffprobe");
    probe.args(["-v", "error", "-of", "json", "-show_streams"]).arg(path);
    let output = probe.output().expect("ffprobe runs");
    let mut all: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(all["streams"].as_array().map(Vec::len), Some(1), "no sound: {all}");
    all["streams"][0].take()
}

fn check_tags(path: &Path, codec: &str, transfer: &str) {
    let stream = probed(path);
    let text = |key: &str| stream[key].as_str().unwrap_or_default().to_string();
    let keys = ["codec_name", "pix_fmt", "color_range", "color_space", "color_transfer", "color_primaries"];
    let want = [codec, "yuv420p10le", "tv", "bt2020nc", transfer, "bt2020"];
    assert_eq!(keys.map(text), want.map(String::from), "{stream}");
    assert_eq!((stream["width"].as_u64(), stream["nb_frames"].as_str()), (Some(128), Some("17")));
}

/// Checks that ffmpeg reads the values that the dumped codes decompress to from an EXR frame.
fn check_exr(path: &Path, dump: &Path, frame: usize) {
    let mut decode = Command::new("ffmpeg");
    decode.args(["-v", "error", "-i"]).arg(path).args(["-f", "rawvideo", "-pix_fmt", "gbrpf32le", "-"]);
    let output = decode.output().expect("ffmpeg runs");
    let read: Vec<f32> = output.stdout.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let codes =
        Checkpoint::open(dump).expect("a dump").get("video").expect("codes").to_tensor().expect("f32").into_f32();
    assert_eq!(codes.shape(), [1, 17, 3, 128, 128]);
    // Planes are in the order green, blue, red.
    let want = [1, 2, 0].into_iter().flat_map(|c| {
        let plane = (0..128 * 128).map(move |at| (c, at / 128, at % 128));
        plane.collect::<Vec<_>>()
    });
    let half = |code: f32| f16::from_f32(HdrTransform::LogC3.decompress(code).max(0.0)).to_f32();
    let want: Vec<f32> = want.map(|(c, y, x)| half(codes[[0, frame, c, y, x]])).collect();
    assert_eq!(read, want);
    assert!(want.iter().any(|value| *value > 1.0) && want.iter().any(|value| *value < 1.0));
}

/// The LoRA selects the pipeline. A run from the sidecar repeats the video.
#[needs(cpu, ffmpeg, full)]
fn hdr_video_is_written_as_exr_and_tagged_video() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let reference = video(&path("frames"));
    let contexts = [("video_context", [64, 32]), ("audio_context", [64, 16])];
    let embeddings = zeros(&path("scene.safetensors"), &contexts, &[]);
    let dump = path("dump.safetensors");
    let own = ["--lora", LORA, "--reference-video", &reference, "--text-embeddings", &embeddings];
    let dumped = ["--dump", dump.to_str().expect("UTF-8")];
    let made = generate(&path("a.mp4"), &[&own[..], &dumped].concat());
    assert!(made.status.success(), "{}", said(&made));
    check_tags(&path("a_hdr.mp4"), "hevc", "arib-std-b67");
    assert_eq!(probed(&path("a.mp4"))["codec_name"], "h264");
    assert_eq!(fs::read_dir(path("a_exr")).expect("a folder").count(), 17);
    for frame in [0, 16] {
        check_exr(&path(&format!("a_exr/frame_{frame:05}.exr")), &dump, frame);
    }
    let read = |name: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(path(name)).expect("a sidecar")).expect("JSON")
    };
    let sidecar = read("a.json");
    assert_eq!(sidecar["sha256"]["hdr"].as_str().map(str::len), Some(64));
    assert_eq!(sidecar["config"]["pipeline"], "hdr");
    assert_eq!(sidecar["config"]["conditioning"]["hdr_transform"], "logc3");
    assert!(sidecar["inputs"][&embeddings].is_string(), "{}", sidecar["inputs"]);
    let programs = sidecar["programs"].as_object().expect("hashes");
    assert!(
        !["text_encoder", "connectors", "audio_decoder", "vocoder"].iter().any(|name| programs.contains_key(*name))
    );

    let again = generate(&path("a.mp4"), &own);
    assert_eq!(again.status.code(), Some(2), "{}", said(&again));
    let kept = generate(&path("b.mp4"), &[&own[..], &["--save-exr", path("a_exr").to_str().expect("UTF-8")]].concat());
    assert!(said(&kept).contains("output.save_exr: ") && said(&kept).contains("contains frames of another video"));

    let sidecar_path = path("a.json");
    let pq = "output={hdr_video: pq, hdr_codec: av1}";
    let arguments = ["generate", "-c", sidecar_path.to_str().expect("UTF-8"), "--set", pq, "-o"];
    let repeated = support::ltx2().args(arguments).arg(path("c.mp4")).output().expect("the binary runs");
    assert!(repeated.status.success(), "{}", said(&repeated));
    assert_eq!(read("c.json")["sha256"], sidecar["sha256"]);
    check_tags(&path("c_hdr.mp4"), "av1", "smpte2084");
    let (preview, sound) = read_video(&path("a.mp4"), Path::new("ffmpeg")).expect("a preview");
    let preview = preview.expect("frames");
    assert_eq!((preview.count(), preview.width(), preview.height(), sound.is_none()), (17, 128, 128, true));

    // Without ffmpeg, the EXR frames and the preview are still written, unless the 10-bit video is requested.
    let empty = path("empty");
    fs::create_dir(&empty).expect("a folder");
    let run = |name: &str, set: &str| {
        let mut run = support::ltx2();
        run.args(["generate", "-c", sidecar_path.to_str().expect("UTF-8"), "--set", set, "-o"]).arg(path(name));
        run.env("PATH", &empty).output().expect("the binary runs")
    };
    let without = run("d.mp4", "output.sidecar=true");
    assert!(without.status.success(), "{}", said(&without));
    assert!(said(&without).contains("d_hdr.mp4: not written: HDR video cannot be encoded: ffmpeg is not installed"));
    assert_eq!(read("d.json")["sha256"], sidecar["sha256"]);
    assert!(path("d_exr/frame_00016.exr").is_file() && !path("d_hdr.mp4").exists());
    let asked = run("e.mp4", "output.hdr_video=hlg");
    assert!(!asked.status.success() && !path("e.mp4").exists());
    assert!(said(&asked).contains("install ffmpeg with libx265, or set output.hdr_video to none"), "{}", said(&asked));
}
