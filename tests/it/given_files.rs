//! Videos and images of many formats, created by ffmpeg and compared with ffmpeg's decoding.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ltx2::media::{Clip, ClipPart, Frames, probe_clip, read_clip, read_first_frames, read_image, read_png};

use crate::support::{full, needs};

const FFMPEG: &str = "ffmpeg";
const SOURCE: [&str; 4] = ["-f", "lavfi", "-i", "testsrc2=size=64x48:rate=24:duration=2"];

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Files(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn at(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").into()
    }

    /// Creates a file with ffmpeg.
    fn make(&self, name: &str, how: &[&str]) -> PathBuf {
        ffmpeg(&[&["-y"], how, &[&self.at(name)]].concat());
        self.path(name)
    }

    /// Creates a file of the test pattern.
    fn of_source(&self, name: &str, how: &[&str]) -> PathBuf {
        self.make(name, &[&SOURCE[..], how].concat())
    }
}

fn ffmpeg(how: &[&str]) -> Vec<u8> {
    let output = Command::new(FFMPEG).args(["-v", "error"]).args(how).output().expect("ffmpeg starts");
    assert!(output.status.success(), "{how:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Decodes a track of a file with ffmpeg, as RGB.
fn decoded(path: &Path, track: &str) -> Vec<u8> {
    let file = path.to_str().expect("UTF-8");
    ffmpeg(&["-i", file, "-map", track, "-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"])
}

fn bytes(frames: &Frames) -> Vec<u8> {
    frames.iter().flatten().copied().collect()
}

fn refused(path: &Path) -> [String; 2] {
    let probed = probe_clip(path, Path::new(FFMPEG)).expect_err("refused").to_string();
    [probed, read_clip(path, Path::new(FFMPEG)).expect_err("refused").to_string()]
}

/// Every other container; in the full test all. The videos have few frames. Containers round their timestamps to
/// milliseconds, to hundredths of a second, or not at all.
#[needs(ffmpeg)]
fn frames_and_rates_match_ffmpeg_in_every_container() {
    let files = Files::new();
    let whole = |rate: f64| (rate, rate.to_string());
    let ntsc = |rate: f64| (rate * 1000.0 / 1001.0, format!("{rate}000/1001"));
    for (name, codec, (rate, written)) in [
        ("a.mp4", "mpeg4", ntsc(24.0)),
        ("a.mkv", "mpeg4", whole(24.0)),
        ("b.mkv", "ffv1", ntsc(30.0)),
        ("a.webm", "libvpx", ntsc(24.0)),
        ("a.avi", "mjpeg", whole(12.5)),
        ("a.ts", "mpeg2video", whole(25.0)),
        ("a.mpg", "mpeg2video", whole(50.0)),
        ("a.flv", "flv1", whole(30.0)),
        ("a.mov", "prores_ks", ntsc(60.0)),
        ("a.gif", "gif", whole(24.0)),
    ]
    .into_iter()
    .step_by(if full() { 1 } else { 2 })
    {
        let source = format!("testsrc2=size=64x48:rate={written}");
        let path = files.make(name, &["-f", "lavfi", "-i", &source, "-frames:v", "9", "-c:v", codec]);
        let frames = read_clip(&path, Path::new(FFMPEG)).expect(name);
        assert!(bytes(&frames) == decoded(&path, "0:v:0"), "{name}: other frames");
        let info = probe_clip(&path, Path::new(FFMPEG)).expect(name);
        assert_eq!((info.width, info.height, info.frames), (64, 48, frames.count()), "{name}");
        assert!((info.frame_rate.expect("a rate") - rate).abs() < 1e-9, "{name}: {info:?}");
    }
}

/// The frames start 21 ms after the sound, and Matroska rounds their times to milliseconds: rounded to frames of a 24th of
/// a second, some times would be equal.
#[needs(ffmpeg)]
fn frames_copied_to_matroska_keep_their_rate() {
    let files = Files::new();
    let sound = ["-f", "lavfi", "-i", "sine=sample_rate=48000:duration=1", "-t", "1", "-c:v", "libx264", "-c:a", "aac"];
    let source = files.of_source("a.mp4", &sound);
    let copied = files.make("a.mkv", &["-i", source.to_str().expect("UTF-8"), "-c", "copy"]);
    let info = probe_clip(&copied, Path::new(FFMPEG)).expect("a video");
    assert_eq!((info.frames, info.frame_rate.map(|rate| (rate * 1e9).round() / 1e9)), (24, Some(24.0)), "{info:?}");
    let frames = read_clip(&copied, Path::new(FFMPEG)).expect("a video");
    assert!(bytes(&frames) == decoded(&copied, "0:v:0"), "other frames");
}

/// These formats are not among those from which ffmpeg reads sound; the full test reads all of them.
#[needs(ffmpeg)]
fn formats_without_sound_are_read_as_silent_videos() {
    let files = Files::new();
    for (name, how) in [
        ("a.gif", &["-c:v", "gif"][..]),
        ("a.y4m", &["-f", "yuv4mpegpipe"]),
        ("a.ivf", &["-c:v", "libvpx"]),
        ("a.apng", &["-f", "apng", "-plays", "0"]),
        ("a.h264", &["-c:v", "libx264"]),
        ("a.hevc", &["-c:v", "libx265", "-x265-params", "log-level=none"]),
        ("a.mjpeg", &["-c:v", "mjpeg"]),
        ("a.m1v", &["-c:v", "mpeg1video"]),
        ("a.m2v", &["-c:v", "mpeg2video"]),
        ("a.m4v", &["-c:v", "mpeg4", "-f", "m4v"]),
    ]
    .into_iter()
    .step_by(if full() { 1 } else { 2 })
    {
        let path = files.of_source(name, &[&["-frames:v", "9"], how].concat());
        let clip = Clip::read(&path, Path::new(FFMPEG), ClipPart::default()).expect(name);
        assert!(bytes(&clip.frames) == decoded(&path, "0:v:0"), "{name}: other frames");
        assert_eq!((clip.frames.count(), clip.sound), (9, None), "{name}");
    }
}

#[needs(ffmpeg)]
fn variable_frame_rate_is_rejected_in_every_container() {
    let files = Files::new();
    let pick = ["-vf", "select='not(eq(mod(n,3),1))'", "-fps_mode", "vfr", "-c:v", "mpeg4"];
    for name in ["a.mp4", "a.mkv", "a.mov"] {
        let path = files.of_source(name, &pick);
        let error = probe_clip(&path, Path::new(FFMPEG)).expect_err("refused").to_string();
        assert!(error.contains(name) && error.contains("the frame rate varies"), "{error}");
    }
}

/// Phones write portrait videos in this way: the matrix in the track header rotates and mirrors the frames.
#[needs(ffmpeg)]
fn frames_are_rotated_by_the_track_matrix() {
    let files = Files::new();
    let plain = files.of_source("plain.mp4", &["-frames:v", "9", "-c:v", "mpeg4"]);
    let upright = bytes(&read_clip(&plain, Path::new(FFMPEG)).expect("a video"));
    let file = fs::read(&plain).expect("bytes");
    let matrix = file.windows(4).position(|word| word == b"tkhd").expect("a header") + 44;
    let write = |entries: [i32; 4], one: i32| {
        let mut file = file.clone();
        for (place, entry) in [0, 1, 3, 4].into_iter().zip(entries) {
            let at = matrix + 4 * place;
            file[at..at + 4].copy_from_slice(&(entry * one).to_be_bytes());
        }
        let path = files.path("turned.mp4");
        fs::write(&path, file).expect("written");
        path
    };
    for (entries, size) in [
        ([0, 1, -1, 0], (48, 64)),
        ([-1, 0, 0, -1], (64, 48)),
        ([0, -1, 1, 0], (48, 64)),
        ([-1, 0, 0, 1], (64, 48)),
        ([0, 1, 1, 0], (48, 64)),
    ] {
        let path = write(entries, 1 << 16);
        let frames = read_clip(&path, Path::new(FFMPEG)).expect("a video");
        assert!(bytes(&frames) == decoded(&path, "0:v:0") && bytes(&frames) != upright, "{entries:?}: other frames");
        let info = probe_clip(&path, Path::new(FFMPEG)).expect("a video");
        assert_eq!((frames.width(), frames.height(), info.width, info.height), (size.0, size.1, size.0, size.1));
    }
    for error in refused(&write([1, 1, -1, 1], 46341)) {
        assert!(error.contains("turned.mp4") && error.contains("not by a multiple of 90"), "{error}");
    }
}

#[needs(ffmpeg)]
fn errors_for_non_square_pixels_and_hdr_suggest_a_command() {
    let files = Files::new();
    let colours = ["-color_primaries", "bt2020", "-colorspace", "bt2020nc", "-color_trc"];
    let transfer = |name: &'static str| [&["-c:v", "mpeg4"], &colours[..], &[name]].concat();
    for (name, how, why) in [
        ("wide.mp4", vec!["-vf", "setsar=4/3", "-c:v", "mpeg4"], "not square but 4:3"),
        ("wide.mkv", vec!["-vf", "setsar=16/11", "-c:v", "mpeg4"], "not square but 16:11"),
        ("pq.mp4", transfer("smpte2084"), "HDR (PQ)"),
        ("hlg.mkv", transfer("arib-std-b67"), "HDR (HLG)"),
    ] {
        let path = files.of_source(name, &[&["-frames:v", "9"], &how[..]].concat());
        for error in refused(&path) {
            assert!(error.contains(name) && error.contains(why) && error.contains("ffmpeg -i IN -vf"), "{error}");
        }
    }
    // The commands in the error messages work.
    let square = ["-i", &files.at("wide.mkv"), "-vf", "scale=trunc(iw*sar/2)*2:ih,setsar=1"];
    let path = files.make("square.mp4", &square);
    assert_eq!(probe_clip(&path, Path::new(FFMPEG)).expect("square").width, 92);
    // SDR with HDR primaries, and pixels that are not exactly square because of rounding, are accepted.
    for (name, how) in [("sdr.mkv", transfer("bt709")), ("near.mp4", vec!["-vf", "setsar=255/256", "-c:v", "mpeg4"])] {
        let path = files.of_source(name, &[&["-frames:v", "9"], &how[..]].concat());
        assert!(bytes(&read_clip(&path, Path::new(FFMPEG)).expect(name)) == decoded(&path, "0:v:0"), "{name}");
    }
}

#[needs(ffmpeg)]
fn default_track_is_read_and_cover_art_is_ignored() {
    let files = Files::new();
    let second = ["-f", "lavfi", "-i", "color=red:size=32x48:rate=24:duration=0.5"];
    let tracks = ["-map", "0", "-map", "1", "-frames:v", "9", "-c:v", "mpeg4"];
    let flags = ["-disposition:v:0", "0", "-disposition:v:1", "default"];
    for name in ["two.mkv", "two.mp4"] {
        let path = files.of_source(name, &[&second[..], &tracks, &flags].concat());
        let frames = read_clip(&path, Path::new(FFMPEG)).expect(name);
        let info = probe_clip(&path, Path::new(FFMPEG)).expect(name);
        assert_eq!((frames.width(), info.width), (32, 32), "{name}");
        assert!(bytes(&frames) == decoded(&path, "0:v:1"), "{name}: other frames");
    }
    let cover = ["-map", "0", "-map", "1", "-c", "copy", "-disposition:v:0", "attached_pic"];
    let image = files.of_source("cover.jpg", &["-frames:v", "1"]);
    let image = image.to_str().expect("UTF-8");
    let path = files.make("cover.mp4", &[&["-i", image, "-i", &files.at("two.mp4")][..], &cover].concat());
    assert_eq!(read_clip(&path, Path::new(FFMPEG)).expect("a video").width(), 32);
    let tone = ["-f", "lavfi", "-i", "sine=duration=0.5"];
    let cover = ["-map", "0", "-map", "1", "-c:v", "copy", "-disposition:v:0", "attached_pic"];
    let song = files.make("song.mp3", &[&["-i", image], &tone[..], &cover].concat());
    for error in refused(&song) {
        assert!(error.contains("song.mp3") && error.contains("the file has no video"), "{error}");
    }
}

/// The container's header and the encoded frames differ in size.
#[needs(ffmpeg)]
fn header_with_wrong_frame_size_is_rejected() {
    let files = Files::new();
    let path = files.of_source("other.mp4", &["-frames:v", "9", "-c:v", "mpeg4"]);
    let mut file = fs::read(&path).expect("bytes");
    let entry = file.windows(4).rposition(|name| name == b"mp4v").expect("a codec");
    assert_eq!(file[entry + 28..entry + 32], [0, 64, 0, 48]);
    file[entry + 31] = 40;
    fs::write(&path, file).expect("written");
    let error = read_clip(&path, Path::new(FFMPEG)).expect_err("refused").to_string();
    assert!(error.contains("the header states 9 frames of 64x40, but ffmpeg decodes 9 of 64x48"), "{error}");
}

/// Reading the complete clip fails. Reading only the first frames succeeds, because they precede the truncation.
#[needs(ffmpeg)]
fn truncated_video_is_rejected_if_all_frames_are_read() {
    let files = Files::new();
    for name in ["cut.mkv", "cut.mp4"] {
        let path = files.of_source(name, &["-c:v", "mpeg4", "-g", "4", "-movflags", "+faststart"]);
        let whole = fs::read(&path).expect("bytes");
        fs::write(&path, &whole[..whole.len() * 2 / 3]).expect("written");
        let error = read_clip(&path, Path::new(FFMPEG)).expect_err("refused").to_string();
        assert!(error.contains(name) && error.contains("is truncated"), "{error}");
        assert_eq!(read_first_frames(&path, Path::new(FFMPEG), 9).expect(name).count(), 9);
    }
}

#[needs(ffmpeg)]
fn images_decoded_by_ffmpeg_match_its_pixels() {
    let files = Files::new();
    for name in ["a.bmp", "a.tiff", "a.gif"] {
        let path = files.of_source(name, &["-frames:v", "1"]);
        let image = read_image(&path).expect(name);
        assert_eq!((image.count(), image.width(), image.height()), (1, 64, 48), "{name}");
        assert!(bytes(&image) == decoded(&path, "0:v:0"), "{name}: other pixels");
        let whole = fs::read(&path).expect("bytes");
        fs::write(&path, &whole[..whole.len() * 2 / 3]).expect("written");
        let error = read_image(&path).expect_err("refused").to_string();
        assert!(error.contains(name) && !error.contains('\n'), "{error}");
    }
    // The first image of an animation.
    for (name, how) in [("b.gif", &["-f", "gif"][..]), ("b.png", &["-f", "apng", "-plays", "0"])] {
        let path = files.of_source(name, &[&["-frames:v", "3"], how].concat());
        let first = decoded(&path, "0:v:0")[..64 * 48 * 3].to_vec();
        assert!(bytes(&read_image(&path).expect(name)) == first, "{name}: other pixels");
    }
}

/// The built-in decoder does not support lossless JPEG, and has no decoder for the other formats.
#[needs(ffmpeg)]
fn image_kinds_without_a_builtin_decoder_match_ffmpeg() {
    let files = Files::new();
    for (name, how) in [
        ("lossless.jpg", &["-c:v", "ljpeg", "-pix_fmt", "yuvj444p", "-f", "image2"][..]),
        ("a.ppm", &[]),
        ("deep.ppm", &["-pix_fmt", "rgb48be"]),
        ("a.pgm", &["-pix_fmt", "gray"]),
        ("a.pbm", &["-pix_fmt", "monob"]),
        ("a.pam", &["-pix_fmt", "rgb24"]),
        ("a.qoi", &[]),
    ] {
        let path = files.of_source(name, &[&["-frames:v", "1"], how].concat());
        // The name does not matter.
        let renamed = files.path("image");
        fs::copy(&path, &renamed).expect("copied");
        let image = read_image(&renamed).expect(name);
        assert!(bytes(&image) == decoded(&path, "0:v:0"), "{name}: other pixels");
    }
    // Neither decoder reads the file.
    let png = fs::read(files.of_source("a.png", &["-frames:v", "1"])).expect("bytes");
    for (name, bytes) in [
        ("cut.png", png[..png.len() / 2].to_vec()),
        ("hole.png", [&png[..png.len() / 2], &[0x55; 100], &png[png.len() / 2 + 100..]].concat()),
    ] {
        fs::write(files.path(name), bytes).expect("written");
        let error = read_image(&files.path(name)).expect_err(name).to_string();
        assert!(error.contains(name) && error.contains(", and ffmpeg cannot decode the image: "), "{error}");
        assert!(!error.contains('\n') && !error.contains(" @ 0x"), "{error}");
    }
    // A file list is never opened, whatever its name.
    fs::write(files.path("list.png"), "ffconcat version 1.0\nfile a.png\n").expect("written");
    let error = read_image(&files.path("list.png")).expect_err("a list").to_string();
    assert!(error.contains("the format is not PNG"), "{error}");
}

/// The built-in decoder fills the missing parts without an error.
#[needs(ffmpeg)]
fn damaged_jpeg_is_rejected() {
    let files = Files::new();
    let source = ["-f", "lavfi", "-i", "mandelbrot=size=320x240", "-frames:v", "1", "-q:v", "2"];
    let path = files.make("whole.jpg", &source);
    let whole = fs::read(&path).expect("bytes");
    let middle = whole.len() / 2;
    for (name, bytes) in [
        ("cut.jpg", [&whole[..whole.len() * 2 / 3], b"\xff\xd9"].concat()),
        ("gap.jpg", [&whole[..middle], &whole[middle + 2000..]].concat()),
        ("hole.jpg", [&whole[..middle], &[0x55; 3000], &whole[middle + 3000..]].concat()),
    ] {
        fs::write(files.path(name), bytes).expect("written");
        let error = read_image(&files.path(name)).expect_err(name).to_string();
        assert!(error.contains(name) && error.contains("the file is damaged or truncated ("), "{error}");
        assert!(!error.contains('\n') && !error.contains(" @ 0x"), "{error}");
    }
    // Intact files of other kinds, and data after the image or damaged metadata before it.
    let metadata = [&b"\xff\xd8\xff\xe1\0\x10Exif\0\0garbage!"[..], &whole[2..]].concat();
    let video = fs::read(files.of_source("a.mp4", &["-frames:v", "9", "-c:v", "mpeg4"])).expect("bytes");
    let intact = read_image(&path).expect("intact");
    for (name, bytes) in [("motion.jpg", [&whole[..], &video].concat()), ("metadata.jpg", metadata)] {
        fs::write(files.path(name), bytes).expect("written");
        assert!(read_image(&files.path(name)).expect(name) == intact, "{name}: other pixels");
    }
    for name in ["progressive.jpg", "restart.jpg", "turned_6.jpg"] {
        read_image(&Path::new("tests/fixtures/images").join(name)).expect(name);
    }
}

#[needs(ffmpeg)]
fn images_with_non_square_pixels_or_hdr_are_rejected() {
    let files = Files::new();
    for name in ["a.png", "a.jpg", "a.tiff", "a.gif"] {
        let path = files.of_source(name, &["-frames:v", "1", "-vf", "setsar=4/3"]);
        let error = read_image(&path).expect_err(name).to_string();
        let said =
            error.contains(name) && error.contains("the pixels are not square but ") && error.contains("OUT.png");
        assert!(said, "{error}");
        let near = files.of_source(&format!("near {name}"), &["-frames:v", "1", "-vf", "setsar=255/256"]);
        assert_eq!(read_image(&near).expect(name).width(), 64, "{name}");
    }
    // The frames of a folder, too.
    let error = read_png(&files.path("a.png")).expect_err("wide").to_string();
    assert!(error.contains("the pixels are not square but 4:3"), "{error}");
    let plain = fs::read(files.of_source("sdr.png", &["-frames:v", "1"])).expect("bytes");
    let chunk = b"\0\0\0\x04cICP\x09\x10\0\x01\x4d\x23\x23\xfe";
    fs::write(files.path("pq.png"), [&plain[..33], chunk, &plain[33..]].concat()).expect("written");
    let colours = ["-color_primaries", "bt2020", "-colorspace", "bt2020nc", "-color_trc", "smpte2084"];
    let still = ["-frames:v", "1", "-c:v", "libaom-av1", "-still-picture", "1", "-cpu-used", "8"];
    files.of_source("pq.avif", &[&still[..], &colours].concat());
    for name in ["pq.png", "pq.avif"] {
        let error = read_image(&files.path(name)).expect_err(name).to_string();
        assert!(error.contains(name) && error.contains("the image is HDR"), "{error}");
    }
}
