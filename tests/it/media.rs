//! MP4 files of both encoders, read back with ffprobe and ffmpeg.

use std::f32::consts::TAU;
use std::path::Path;
use std::process::Command;

use crate::support::{full, needs};
use ltx2::media::{
    Audio, Encoder, EncoderChoice, FrameRate, Frames, Mp4Options, read_clip, read_first_frames, write_mp4,
};
use ndarray::{Array2, Array4, s};

const BOTH: [EncoderChoice; 2] = [EncoderChoice::Embedded, EncoderChoice::Ffmpeg];

fn options(encoder: EncoderChoice) -> Mp4Options {
    Mp4Options { encoder, ..Mp4Options::default() }
}

/// A smooth moving gradient that uses all three channels.
fn gradient(count: usize, height: usize, width: usize) -> Frames {
    let video = Array4::from_shape_fn((count, 3, height, width), |(f, c, y, x)| {
        let (x, y) = (x as f32 / width as f32, y as f32 / height as f32);
        let phase = f as f32 / 48.0 + c as f32 / 3.0;
        0.5 + 0.4 * (TAU * (0.7 * x + 0.4 * y + phase)).sin()
    });
    Frames::from_video(video.view()).expect("frames")
}

fn tone(channels: usize, samples: usize, rate: u32) -> Audio {
    let wave = |(c, i): (usize, usize)| 0.4 * (TAU * (440.0 + 110.0 * c as f32) * i as f32 / rate as f32).sin();
    Audio::new(Array2::from_shape_fn((channels, samples), wave), rate).expect("sound")
}

/// Returns ffprobe's values for one stream ("v" or "a"), in the order of `entries`.
fn probe(path: &Path, stream: &str, entries: &[&str]) -> Vec<String> {
    let output = Command::new("ffprobe")
        .args(["-v", "error", "-count_frames", "-of", "json", "-select_streams", stream, "-show_streams"])
        .arg(path)
        .output()
        .expect("ffprobe runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let text = |v: &serde_json::Value| v.as_str().map_or_else(|| v.to_string(), str::to_string);
    entries.iter().map(|e| text(&json["streams"][0][*e])).collect()
}

/// Returns the duration of a stream in seconds.
fn duration(path: &Path, stream: &str) -> f64 {
    probe(path, stream, &["duration"])[0].parse().expect("a number")
}

/// Decodes all frames of a file with ffmpeg, as RGB at the display size.
fn decode(path: &Path) -> Vec<u8> {
    let output = Command::new("ffmpeg")
        .args(["-v", "error", "-xerror", "-i"])
        .arg(path)
        .args(["-vf", "scale=flags=accurate_rnd+full_chroma_int+bicubic", "-fps_mode", "passthrough"])
        .args(["-f", "rawvideo", "-pix_fmt", "rgb24", "-"])
        .output()
        .expect("ffmpeg runs");
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn psnr(a: &[u8], b: &[u8]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square: f64 = a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
    10.0 * (255.0f64.powi(2) / (square / a.len() as f64).max(1e-9)).log10()
}

fn bytes(frames: &Frames) -> &[u8] {
    frames.data().as_slice().expect("contiguous")
}

#[needs(ffmpeg)]
fn codecs_lengths_and_frames_match_the_request() {
    let dir = tempfile::tempdir().expect("a folder");
    // Size, frames, rate; audio channels (0: none), rate and number of samples, fewer or more than the video needs.
    let clips = [
        (64, 48, 33, 24.0, 2, 24000, 30_000),
        (70, 46, 9, 23.976, 1, 16000, 50_000),
        (96, 64, 1, 25.0, 2, 48000, 48_000),
        (34, 18, 17, 29.97, 0, 0, 0),
        (160, 96, 57, 24.0, 2, 44100, 0),
    ];
    for (turn, choice) in BOTH.into_iter().enumerate() {
        // Each clip by one of the encoders, in turn; in the full test by both.
        for (index, &(w, h, n, fps, channels, rate, samples)) in clips.iter().enumerate() {
            if index % 2 != turn && !full() {
                continue;
            }
            let path = dir.path().join(format!("new/{choice:?}_{index}.mp4"));
            let frames = gradient(n, h, w);
            let audio = (channels > 0).then(|| tone(channels, samples, rate));
            let used = write_mp4(&path, &frames, fps, audio.as_ref(), &options(choice)).expect("encodes");
            assert_eq!(used == Encoder::Embedded, choice == EncoderChoice::Embedded);

            let exact = FrameRate::from_f64(fps).expect("a rate");
            let seconds = n as f64 * f64::from(exact.den) / f64::from(exact.num);
            let entries =
                ["codec_name", "nb_read_frames", "r_frame_rate", "width", "height", "color_space", "color_range"];
            let fraction = format!("{}/{}", exact.num, exact.den);
            let want = ["h264", &n.to_string(), &fraction, &w.to_string(), &h.to_string(), "bt709", "tv"];
            assert_eq!(probe(&path, "v", &entries), want, "{path:?}");
            let length = duration(&path, "v");
            assert!((length - seconds).abs() < 1e-3, "{path:?}: {length} {seconds}");
            if channels > 0 {
                let got = probe(&path, "a", &["codec_name", "profile", "channels", "sample_rate"]);
                assert_eq!(got, ["aac", "LC", &channels.to_string(), &rate.to_string()], "{path:?}");
                let sound = duration(&path, "a");
                assert!((sound - seconds).abs() < seconds / n as f64, "{path:?}: {sound} {seconds}");
            }
            let got = psnr(&decode(&path), bytes(&frames));
            assert!(got > 30.0, "{path:?}: {got} dB");
        }
    }
}

/// Memory is allocated for the 64x64 pixels in the header, while the encoded frames have 320x240.
#[needs(ffmpeg)]
fn frames_larger_than_the_header_states_are_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("a.mp4");
    // The second size is beyond what ffmpeg's decoders may ask for, so that it is never decoded.
    for ([width, height], reason) in [([320, 240], "ffmpeg decodes 9 of 320x240"), ([640, 576], "max pixel count")] {
        let frames = gradient(9, height, width);
        write_mp4(&path, &frames, 24.0, None, &options(EncoderChoice::Embedded)).expect("encodes");
        assert_eq!(read_clip(&path, Path::new("ffmpeg")).expect("decodes").width(), width);
        let mut file = std::fs::read(&path).expect("a file");
        let entry = file.windows(4).position(|name| name == b"avc1").expect("a codec");
        let size = [width as u16, height as u16].map(u16::to_be_bytes).concat();
        let places = (0..file.len() - 4).filter(|at| *at >= entry && file[*at..*at + 4] == size);
        let place = places.min().expect("its size");
        file[place..place + 4].copy_from_slice(&[0, 64, 0, 64]);
        std::fs::write(&path, file).expect("written");
        let error = read_clip(&path, Path::new("ffmpeg")).expect_err("refused").to_string();
        assert!(error.contains(reason), "{error}");
    }
}

#[needs(ffmpeg)]
fn audio_starts_at_the_first_frame() {
    let dir = tempfile::tempdir().expect("a folder");
    for choice in BOTH {
        let path = dir.path().join(format!("{choice:?}.mp4"));
        let rate = 24000;
        let audio = tone(2, rate as usize, rate);
        write_mp4(&path, &gradient(24, 32, 32), 24.0, Some(&audio), &options(choice)).expect("encodes");
        let output = Command::new("ffmpeg")
            .args(["-v", "error", "-i"])
            .arg(&path)
            .args(["-map", "0:a", "-f", "f32le", "-"])
            .output()
            .expect("ffmpeg runs");
        let got: Vec<f32> = bytemuck::pod_collect_to_vec(&output.stdout);
        assert!((got.len() / 2).abs_diff(rate as usize) <= 1024, "{choice:?}: {}", got.len() / 2);
        // The decoded tone is aligned: no encoder priming before it and no shift.
        let (mut error, mut power) = (0.0, 0.0);
        for (pair, source) in got.chunks_exact(2).zip(audio.samples().columns()).skip(2048).take(16384) {
            for c in 0..2 {
                error += f64::from(pair[c] - source[c]).powi(2);
                power += f64::from(source[c]).powi(2);
            }
        }
        let snr = 10.0 * (power / error).log10();
        assert!(snr > 15.0, "{choice:?}: {snr} dB");
    }
}

#[needs(ffmpeg)]
fn odd_sizes_are_padded() {
    let dir = tempfile::tempdir().expect("a folder");
    for choice in BOTH {
        let path = dir.path().join(format!("{choice:?}.mp4"));
        let frames = gradient(5, 33, 47);
        write_mp4(&path, &frames, 24.0, None, &options(choice)).expect("encodes");
        assert_eq!(probe(&path, "v", &["width", "height", "nb_read_frames"]), ["48", "34", "5"]);
        let decoded = Array4::from_shape_vec((5, 34, 48, 3), decode(&path)).expect("five frames");
        let cut = decoded.slice(s![.., ..33, ..47, ..]).as_standard_layout().into_owned();
        assert!(psnr(cut.as_slice().expect("contiguous"), bytes(&frames)) > 30.0);
    }
}

#[needs(ffmpeg)]
fn reading_first_frames_equals_start_of_full_clip() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, ffmpeg) = (folder.path().join("a.mp4"), Path::new("ffmpeg"));
    write_mp4(&path, &gradient(12, 32, 48), 24.0, None, &Mp4Options::default()).expect("written");
    let all = read_clip(&path, ffmpeg).expect("a video");
    for most in [1, 9, 12, 50] {
        let first = read_first_frames(&path, ffmpeg, most).expect("a video");
        assert_eq!(first, all.part(0..most.min(12)), "{most}");
    }
}
