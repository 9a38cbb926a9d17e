//! Tests of the boxes in MP4 files from the embedded encoder, and of the fallback and errors if ffmpeg is missing or
//! fails.

use std::f32::consts::TAU;

use mp4_atom::{Decode, Ftyp, Moov, StszSamples, Trak};
use ndarray::{Array2, Array4};

use super::*;
use crate::{EncoderChoice, LongMp4, VideoStream};

/// Returns frames with a smooth, moving gradient that uses all three color channels.
fn gradient(count: usize, height: usize, width: usize) -> Frames {
    let video = Array4::from_shape_fn((count, 3, height, width), |(f, c, y, x)| {
        let (x, y) = (x as f32 / width as f32, y as f32 / height as f32);
        let phase = f as f32 / 48.0 + c as f32 / 3.0;
        0.5 + 0.4 * (TAU * (0.7 * x + 0.4 * y + phase)).sin()
    });
    Frames::from_video(video.view()).unwrap()
}

fn tone(channels: usize, samples: usize, rate: u32) -> Audio {
    let wave = |(c, i): (usize, usize)| 0.4 * (TAU * (440.0 + 110.0 * c as f32) * i as f32 / rate as f32).sin();
    Audio::new(Array2::from_shape_fn((channels, samples), wave), rate).unwrap()
}

fn embedded() -> Mp4Options {
    Mp4Options { encoder: EncoderChoice::Embedded, ..Mp4Options::default() }
}

#[test]
fn encoding_in_pieces_gives_identical_file() {
    let out = tempfile::tempdir().unwrap();
    let frames = gradient(21, 18, 34);
    let file = |name: &str, stream: Option<VideoStream>| {
        let path = out.path().join(name);
        write_encoded_mp4(&path, &frames, stream, 24.0, Some(&tone(2, 30_000, 48_000)), &embedded()).unwrap();
        std::fs::read(path).unwrap()
    };
    let whole = file("whole.mp4", None);
    // Pieces smaller and larger than a GOP. At the end, a complete or a partial GOP is still to be encoded.
    for sizes in [&[3, 4, 1, 9, 4][..], &[21], &[16, 5], &[1; 21]] {
        let piece = |begin: usize, count: usize| {
            let part = frames.data().slice(ndarray::s![begin..begin + count, .., .., ..]);
            Frames::new(part.to_owned()).unwrap()
        };
        let stream = VideoStream::start(&piece(0, 1), 24.0, &embedded()).unwrap().expect("the embedded encoder");
        let mut begin = 0;
        for &count in sizes {
            stream.push(piece(begin, count));
            begin += count;
        }
        assert_eq!(begin, frames.count());
        assert!(file("pieces.mp4", Some(stream)) == whole, "{sizes:?}");
    }
}

/// Frames of a different size make the encoder panic. The panic becomes an error, and the earlier frames are kept.
#[test]
fn frames_before_encoder_panic_are_kept() {
    let out = tempfile::tempdir().unwrap();
    let (good, small) = (gradient(8, 18, 34), gradient(8, 2, 2));
    let stream = VideoStream::start(&good, 24.0, &embedded()).unwrap().expect("the embedded encoder");
    stream.push(good.clone());
    stream.push(small.clone());
    let error = stream.finish().err().expect("it fails").to_string();
    assert!(error.starts_with("the H.264 encoder panicked: "), "{error}");

    let path = out.path().join("out.mp4");
    let mut file = LongMp4::start(&path, &good, 24.0, 1, 48_000, &embedded()).unwrap();
    file.push_sound(&Array2::zeros((1, 48_000))).unwrap();
    file.push(good).unwrap();
    // The encoder may fail before or after `push` returns; its error is returned exactly once.
    let failed = file.push(small).and_then(|()| file.finish()).map(drop).expect_err("it fails").to_string();
    assert!(failed.starts_with("the H.264 encoder panicked: "), "{failed}");
    assert_eq!((file.frames(), file.encoded_frames()), (16, 8));
    assert!(file.close().is_ok() && file.finish().is_err() && !path.exists(), "a part is not the video");
    let part = out.path().join("part.mp4");
    file.write_to(&part, false).unwrap();
    assert_eq!(crate::probe_clip(&part, Path::new("ffmpeg")).unwrap().frames, 8);
    assert!(file.hashes().is_ok());
}

/// Returns a file's `moov` box and the offset of its samples. Checks that the file consists of `ftyp`, `moov` and `mdat`.
fn movie(file: &[u8]) -> (Moov, usize) {
    let mut rest = file;
    Ftyp::decode(&mut rest).unwrap();
    let movie = Moov::decode(&mut rest).unwrap();
    assert_eq!((word(rest), &rest[4..8]), (rest.len(), &b"mdat"[..]));
    (movie, file.len() - rest.len() + 8)
}

fn word(bytes: &[u8]) -> usize {
    u32::from_be_bytes(bytes[..4].try_into().unwrap()) as usize
}

fn sizes(track: &Trak) -> &[u32] {
    match &track.mdia.minf.stbl.stsz.samples {
        StszSamples::Different { sizes } => sizes,
        other => panic!("{other:?}"),
    }
}

/// Returns a track's sample count and its presented duration in seconds, from its tables. `timescale` is the movie's
/// time scale.
fn tables(track: &Trak, timescale: u32) -> (usize, f64) {
    let header = &track.mdia.mdhd;
    let runs = track.mdia.minf.stbl.stts.entries.iter();
    let ticks: u64 = runs.map(|run| u64::from(run.sample_count) * u64::from(run.sample_delta)).sum();
    assert_eq!(header.duration, ticks);
    let seconds = match track.edts.as_ref().and_then(|edits| edits.elst.as_ref()) {
        Some(edits) => edits.entries[0].segment_duration as f64 / f64::from(timescale),
        None => ticks as f64 / f64::from(header.timescale),
    };
    (sizes(track).len(), seconds)
}

#[test]
fn mp4_boxes_contain_track_durations() {
    let dir = tempfile::tempdir().unwrap();
    // Width, height, frames, fps; audio channels (0: no audio), rate and sample count, which does not match the video.
    for (index, &(w, h, n, fps, channels, rate, samples)) in [
        (64, 48, 33, 24.0, 2, 24000, 30_000),
        (70, 46, 9, 23.976, 1, 16000, 50_000),
        (96, 64, 1, 25.0, 2, 48000, 48_000),
        (34, 18, 17, 29.97, 0, 0, 0),
        (160, 96, 57, 24.0, 2, 44100, 0),
        (47, 33, 5, 24.0, 0, 0, 0),
    ]
    .iter()
    .enumerate()
    {
        let path = dir.path().join(format!("new/{index}.mp4"));
        let audio = (channels > 0).then(|| tone(channels, samples, rate));
        let used = write_mp4(&path, &gradient(n, h, w), fps, audio.as_ref(), &embedded()).unwrap();
        assert_eq!(used, Encoder::Embedded);

        let exact = FrameRate::from_f64(fps).unwrap();
        let seconds = n as f64 * f64::from(exact.den) / f64::from(exact.num);
        let file = std::fs::read(&path).unwrap();
        let (movie, _) = movie(&file);
        assert_eq!(movie.trak.len(), 1 + usize::from(channels > 0), "{path:?}");
        let (count, length) = tables(&movie.trak[0], movie.mvhd.timescale);
        assert_eq!(count, n, "{path:?}");
        assert!((length - seconds).abs() < 1e-3, "{path:?}: {length} {seconds}");
        if let Some(track) = movie.trak.get(1) {
            let (_, sound) = tables(track, movie.mvhd.timescale);
            assert!((sound - seconds).abs() <= 0.5 / f64::from(rate) + 1e-9, "{path:?}: {sound} {seconds}");
        }
    }
}

/// Returns the offset and size of each sample of a track, from its tables.
fn places(track: &Trak) -> Vec<(usize, usize)> {
    let tables = &track.mdia.minf.stbl;
    let mut sizes = sizes(track).iter().map(|size| *size as usize);
    let mut found = Vec::new();
    for (chunk, offset) in (1..).zip(&tables.stco.as_ref().unwrap().entries) {
        let run = tables.stsc.entries.iter().rfind(|run| run.first_chunk <= chunk).unwrap();
        let mut at = *offset as usize;
        for _ in 0..run.samples_per_chunk {
            let size = sizes.next().unwrap();
            found.push((at, size));
            at += size;
        }
    }
    assert_eq!(sizes.next(), None, "samples in no chunk");
    found
}

#[test]
fn sample_tables_match_file_layout() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("clip.mp4");
    let audio = tone(2, 60_000, 24000);
    write_mp4(&path, &gradient(60, 32, 64), 24.0, Some(&audio), &embedded()).unwrap();
    let file = std::fs::read(&path).unwrap();
    let (movie, mut end) = movie(&file);
    let each: Vec<_> = movie.trak.iter().map(places).collect();
    assert_eq!((each.len(), each[0].len()), (2, 60));
    // A picture consists of length-prefixed NAL units.
    for &(at, size) in &each[0] {
        let mut rest = &file[at..at + size];
        while rest.len() > 4 {
            let (length, kind) = (word(rest), rest[4] & 0x1f);
            assert!((1..=12).contains(&kind) && 4 + length <= rest.len(), "unit {kind} of {length} bytes at {at}");
            rest = &rest[4 + length..];
        }
        assert!(rest.is_empty());
    }
    // The samples of both tracks fill `mdat` without gaps.
    let mut all = each.concat();
    all.sort_unstable();
    for (at, size) in all {
        assert_eq!(at, end);
        end = at + size;
    }
    assert_eq!(end, file.len());
}

#[test]
fn encoding_is_deterministic() {
    let dir = tempfile::tempdir().unwrap();
    let (frames, audio) = (gradient(60, 32, 64), tone(2, 60_000, 24000));
    let file = |name: &str| {
        let path = dir.path().join(name);
        write_mp4(&path, &frames, 24.0, Some(&audio), &embedded()).unwrap();
        std::fs::read(path).unwrap()
    };
    assert!(file("a.mp4") == file("b.mp4"));
}

#[test]
fn missing_ffmpeg_falls_back_or_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("clip.mp4");
    let mut options = Mp4Options { ffmpeg: "/nowhere/ffmpeg".into(), ..Mp4Options::default() };
    assert_eq!(write_mp4(&path, &gradient(2, 16, 16), 24.0, None, &options).unwrap(), Encoder::Embedded);
    std::fs::remove_file(&path).unwrap();
    options.encoder = EncoderChoice::Ffmpeg;
    let error = write_mp4(&path, &gradient(2, 16, 16), 24.0, None, &options).unwrap_err().to_string();
    assert!(error.contains("/nowhere/ffmpeg is not installed") && error.contains("embedded"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[cfg(unix)]
#[test]
fn failing_ffmpeg_leaves_no_file_and_error_quotes_it() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("ffmpeg");
    let body = "#!/bin/sh\ncase \"$*\" in *-encoders*) echo ' V libx264 x'; echo ' A aac x';; *-version*) echo 'ffmpeg version 0';;\n\
                *) echo 'first' >&2; echo 'disk is full' >&2; exit 7;; esac\n";
    std::fs::write(&script, body).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let out = dir.path().join("out");
    let options = Mp4Options { ffmpeg: script, ..Mp4Options::default() };
    let frames = gradient(9, 128, 128);
    let error = write_mp4(&out.join("clip.mp4"), &frames, 24.0, Some(&tone(1, 10, 8000)), &options).unwrap_err();
    assert!(error.to_string().contains("first | disk is full"), "{error}");
    assert!(error.to_string().contains("clip.mp4"), "{error}");
    assert_eq!(std::fs::read_dir(out).unwrap().count(), 0);
}

#[test]
fn video_encoder_names_are_parsed() {
    assert_eq!("embedded".parse(), Ok(EncoderChoice::Embedded));
    assert!("x264".parse::<EncoderChoice>().unwrap_err().contains("ffmpeg"));
}
