//! Input audio compared with ffmpeg: files that the built-in decoders do not support, or not completely.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ltx2::media::{Audio, read_sound, read_sound_from, read_wav};

use crate::support::{full, needs};

const NO_FFMPEG: &str = "/nowhere/ffmpeg";

fn ffmpeg(arguments: &[&str]) {
    let run = Command::new("ffmpeg").args(["-hide_banner", "-loglevel", "error", "-y"]).args(arguments).output();
    let run = run.expect("ffmpeg starts");
    assert!(run.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&run.stderr));
}

struct Files(tempfile::TempDir);

impl Files {
    /// A sound of one second that is never silent, and frames for a quarter of it.
    fn new() -> Self {
        let files = Files(tempfile::tempdir().expect("a folder"));
        let tones = "aevalsrc=0.4*sin(2*PI*(300+900*t)*t)*(0.6+0.4*sin(9*t))|0.3*sin(2*PI*500*t):s=44100:d=1.03";
        ffmpeg(&["-f", "lavfi", "-i", tones, &files.at("source.wav")]);
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn at(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").into()
    }

    fn encode(&self, name: &str, how: &[&str]) {
        self.encode_all(&[(name, how)]);
    }

    /// Encodes the source into several files. One process does it: starting ffmpeg takes longer than its work here.
    fn encode_all(&self, files: &[(&str, &[&str])]) {
        let (source, paths) = (self.at("source.wav"), files.iter().map(|(name, _)| self.at(name)).collect::<Vec<_>>());
        let outputs = files.iter().zip(&paths).flat_map(|((_, how), path)| how.iter().copied().chain([path.as_str()]));
        ffmpeg(&["-i", &source].into_iter().chain(outputs).collect::<Vec<_>>());
    }

    /// Writes a modified copy of another file.
    fn change(&self, name: &str, from: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(self.path(from)).expect("read");
        change(&mut bytes);
        fs::write(self.path(name), bytes).expect("written");
    }

    fn read(&self, name: &str) -> Audio {
        read_sound(&self.path(name), Path::new("ffmpeg"), None).expect(name).expect("a sound")
    }

    /// Compares a file with ffmpeg's decoding: the same number of samples and the same values.
    fn check(&self, name: &str) {
        ffmpeg(&["-i", &format!("file:{}", self.at(name)), "-vn", "-c:a", "pcm_f32le", &self.at("decoded.wav")]);
        self.compare(name, "decoded.wav");
    }

    /// Like [`Files::check`], for files with one audio track, which one process decodes.
    fn check_all(&self, names: &[&str]) {
        let inputs = names.iter().flat_map(|name| ["-i".into(), format!("file:{}", self.at(name))]);
        let decoded = |n: usize| format!("decoded {n}.wav");
        let outputs = (0..names.len()).flat_map(|n| {
            let map = format!("{n}:a");
            ["-map".into(), map, "-c:a".into(), "pcm_f32le".into(), self.at(&decoded(n))]
        });
        let arguments: Vec<String> = inputs.chain(outputs).collect();
        ffmpeg(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        names.iter().enumerate().for_each(|(n, name)| self.compare(name, &decoded(n)));
    }

    fn compare(&self, name: &str, decoded: &str) {
        let want = read_wav(&self.path(decoded)).expect("a WAV file");
        let got = self.read(name);
        assert_eq!((got.rate(), got.samples().dim()), (want.rate(), want.samples().dim()), "{name}");
        let off = got.samples().iter().zip(want.samples()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 1e-4, "{name}: {off}");
    }
}

/// Returns the position of the body of a WAV chunk.
fn chunk(bytes: &[u8], name: &[u8; 4]) -> usize {
    bytes.windows(4).position(|own| own == name).expect("a chunk") + 8
}

/// The built-in reader would estimate the length from the first packets and stop at that estimate.
#[needs(ffmpeg)]
fn mp3_without_a_header_is_read_to_its_last_packet() {
    let files = Files::new();
    for (name, rate) in [("vbr.mp3", &["-q:a", "4"][..]), ("abr.mp3", &["-abr", "1", "-b:a", "96k"])] {
        files.encode(name, &[&["-c:a", "libmp3lame", "-write_xing", "0"], rate].concat());
        files.check(name);
        let own = read_sound(&files.path(name), Path::new(NO_FFMPEG), None).expect(name).expect("a sound");
        assert_eq!(own.len(), files.read(name).len(), "{name}");
    }
    // Two concatenated recordings; the header of the first one counts only its own packets.
    files.encode("one.mp3", &["-c:a", "libmp3lame", "-q:a", "4"]);
    files.change("two.mp3", "one.mp3", |bytes| bytes.extend(bytes.clone()));
    files.check("two.mp3");
    let own = read_sound(&files.path("two.mp3"), Path::new(NO_FFMPEG), None).expect("read").expect("a sound");
    assert!(own.len() > 2 * files.read("one.mp3").len() - 1200, "{}", own.len());
}

#[needs(ffmpeg)]
fn unsupported_files_fall_back_to_ffmpeg() {
    let files = Files::new();
    let zero = |bytes: &mut Vec<u8>, at: usize| bytes[at..at + 4].fill(0);
    files.encode("plain.wav", &["-c:a", "pcm_s16le"]);
    files.change("zero sizes.wav", "plain.wav", |bytes| {
        let data = chunk(bytes, b"data");
        zero(bytes, 4);
        zero(bytes, data - 4);
    });
    files.change("large data.wav", "plain.wav", |bytes| {
        let data = chunk(bytes, b"data");
        bytes[data - 1] = 1;
    });
    files.encode("one.ogg", &["-c:a", "libvorbis"]);
    files.change("chained.ogg", "one.ogg", |bytes| bytes.extend(bytes.clone()));
    // A length that is too small, and no checksum of the samples.
    files.encode("whole.flac", &["-c:a", "flac"]);
    files.change("short length.flac", "whole.flac", |bytes| {
        bytes[22..26].copy_from_slice(&9000u32.to_be_bytes());
        bytes[26..42].fill(0);
    });
    let kinds: [(&str, &[&str]); 8] = [
        ("a.dts", &["-c:a", "dca", "-strict", "-2"]),
        ("a.wv", &["-c:a", "wavpack"]),
        ("a.wma", &["-c:a", "wmav2"]),
        ("a.webm", &["-c:a", "libopus"]),
        ("mp3.mka", &["-c:a", "libmp3lame"]),
        ("vorbis.mka", &["-c:a", "libvorbis"]),
        ("take:1.opus", &["-c:a", "libopus"]),
        ("mp3 in.wav", &["-c:a", "libmp3lame"]),
    ];
    files.encode_all(&kinds);
    files.check_all(&kinds.map(|(name, _)| name));
    ["zero sizes.wav", "large data.wav", "chained.ogg", "short length.flac"].iter().for_each(|name| files.check(name));
}

/// The header of H.265 frames is longer than the built-in MP4 reader allows.
#[needs(ffmpeg)]
fn audio_of_h265_mp4_is_read() {
    let files = Files::new();
    let video = ["-f", "lavfi", "-i", "testsrc=size=64x64:rate=24:duration=0.25", "-i", &files.at("source.wav")];
    let how = ["-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=none", "-c:a", "aac"];
    ffmpeg(&[&video[..], &how, &[&files.at("both.mp4")]].concat());
    files.check("both.mp4");
    ffmpeg(&["-i", &files.at("both.mp4"), "-an", "-c:v", "copy", &files.at("silent.mp4")]);
    assert_eq!(read_sound(&files.path("silent.mp4"), Path::new("ffmpeg"), None).expect("read"), None);
}

/// ffmpeg decodes the last packet completely, whatever the edit list states. The length must not depend on whether the
/// built-in reader supports the video next to the sound.
#[needs(ffmpeg)]
fn mp4_sound_has_the_length_that_ffmpeg_decodes() {
    let files = Files::new();
    let aac = ["-c:a", "aac"];
    let kinds: [(&str, &[&str]); 9] = [
        ("a.m4a", &aac),
        ("a.mov", &aac),
        ("a.3gp", &aac),
        ("a.mp4", &aac),
        ("mp3.mp4", &["-c:a", "libmp3lame"]),
        ("alac.m4a", &["-c:a", "alac"]),
        ("pcm.mov", &["-c:a", "pcm_s16le"]),
        ("mono.m4a", &["-c:a", "aac", "-ar", "22050", "-ac", "1"]),
        ("fragments.mp4", &["-c:a", "aac", "-movflags", "frag_keyframe+empty_moov+delay_moov"]),
    ];
    for seconds in ["0.5108", "0.3", "1"].into_iter().take(if full() { 3 } else { 1 }) {
        let timed = kinds.map(|(name, how)| (name, [how, &["-t", seconds]].concat()));
        files.encode_all(&timed.each_ref().map(|(name, how)| (*name, how.as_slice())));
        files.check_all(&kinds.map(|(name, _)| name));
    }
    // The edit list of a copied part ends within a packet.
    ffmpeg(&["-ss", "0.2", "-i", &files.at("a.m4a"), "-t", "0.5", "-c", "copy", &files.at("part.m4a")]);
    files.check("part.m4a");
    files.encode("surround.m4a", &["-c:a", "aac", "-ac", "6"]);
    ffmpeg(&["-i", &files.at("surround.m4a"), "-ac", "1", "-c:a", "pcm_f32le", &files.at("mixed.wav")]);
    let mixed = read_wav(&files.path("mixed.wav")).expect("a WAV file");
    assert_eq!(files.read("surround.m4a").len(), mixed.len());
    let sounds = ["libx264", "libx265"].map(|codec| {
        let name = format!("{codec}.mp4");
        let video = ["-f", "lavfi", "-i", "testsrc=size=64x64:rate=24:duration=1.03", "-i", &files.at("source.wav")];
        ffmpeg(&[&video[..], &["-c:v", codec, "-preset", "ultrafast", "-c:a", "aac", &files.at(&name)]].concat());
        files.check(&name);
        files.read(&name).len()
    });
    assert_eq!(sounds[0], sounds[1]);
}

/// Replaces the edit list of an MP4 whose `moov` box is at the end. Entries: length in milliseconds, start in samples.
fn replace_edits(bytes: &mut Vec<u8>, entries: &[[i32; 2]]) {
    let number = |at: usize, bytes: &[u8]| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let at = |name: &[u8], bytes: &[u8]| bytes.windows(4).rposition(|own| own == name).expect("a box") - 4;
    let list = at(b"elst", bytes);
    let old = number(list, bytes) as usize;
    let entries: Vec<u8> =
        entries.iter().flat_map(|[length, start]| [*length, *start, 1 << 16]).flat_map(i32::to_be_bytes).collect();
    let count = entries.len() as u32 / 12;
    let new =
        [&(16 + entries.len() as u32).to_be_bytes()[..], b"elst\0\0\0\0", &count.to_be_bytes(), &entries].concat();
    for name in [b"moov", b"trak", b"edts"] {
        let place = at(name, bytes);
        let size = number(place, bytes) + new.len() as u32 - old as u32;
        bytes[place..place + 4].copy_from_slice(&size.to_be_bytes());
    }
    bytes.splice(list..list + old, new);
}

/// The built-in reader reads only the first segment.
#[needs(ffmpeg)]
fn all_segments_of_an_edit_list_are_read() {
    let files = Files::new();
    files.encode("plain.m4a", &["-c:a", "aac"]);
    let list = |name: &str, entries: &[[i32; 2]]| {
        files.change(name, "plain.m4a", |bytes| replace_edits(bytes, entries));
        let warnings = tempfile::NamedTempFile::new().expect("a file");
        let lines = tracing_subscriber::fmt().with_writer(Arc::new(warnings.reopen().expect("a file"))).finish();
        let own = tracing::subscriber::with_default(lines, || {
            read_sound(&files.path(name), Path::new(NO_FFMPEG), None).expect(name).expect("a sound").len()
        });
        (own, fs::read_to_string(warnings.path()).expect("a log").matches("segments, of which only the first").count())
    };
    for (name, entries) in [
        ("two.m4a", &[[300, 1024], [400, 22000]][..]),
        ("gap.m4a", &[[300, 1024], [200, -1], [400, 22000]]),
        ("three.m4a", &[[200, 1024], [100, 30000], [300, 9000]]),
    ] {
        let (own, warnings) = list(name, entries);
        files.check(name);
        assert!(own < files.read(name).len() && warnings == 1, "{name}: {own} samples, {warnings} warnings");
    }
    for (name, entries) in [("short.m4a", [300, 1024]), ("late.m4a", [300, 22000]), ("start.m4a", [2000, 0])] {
        let (own, warnings) = list(name, &[entries]);
        files.check(name);
        assert_eq!((own, warnings), (files.read(name).len(), 0), "{name}");
    }
}

/// The part of a damaged file that ffmpeg decodes is used, and the damage is reported.
#[needs(ffmpeg)]
fn damaged_audio_matches_ffmpeg_and_is_reported() {
    let files = Files::new();
    files.encode("whole.mp3", &["-c:a", "libmp3lame", "-b:a", "128k"]);
    files.change("hole.mp3", "whole.mp3", |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle..middle + 600].fill(0x55);
    });
    files.change("cut.mp3", "whole.mp3", |bytes| bytes.truncate(bytes.len() * 2 / 3));
    files.encode("whole.mp4", &["-c:a", "aac", "-movflags", "frag_keyframe+empty_moov", "-frag_duration", "300000"]);
    files.change("cut.mp4", "whole.mp4", |bytes| bytes.truncate(bytes.len() * 2 / 3));
    let part = |name: &str| read_sound_from(&files.path(name), Path::new("ffmpeg"), 0.0, None).expect(name);
    for (name, is_damaged) in
        [("whole.mp3", false), ("hole.mp3", true), ("cut.mp3", false), ("whole.mp4", false), ("cut.mp4", true)]
    {
        files.check(name);
        assert_eq!(part(name).expect("a sound").damage.is_some(), is_damaged, "{name}");
    }
    // A decoder that returns no samples for its first packet still reads up to the requested end.
    files.encode("whole.wma", &["-c:a", "wmav2"]);
    let to = |end| read_sound(&files.path("whole.wma"), Path::new("ffmpeg"), end).expect("read").expect("a sound");
    let (all, half) = (to(None), to(Some(0.5)));
    assert_eq!(half.len(), half.rate() as usize / 2);
    assert_eq!(half.samples(), all.samples().slice(ndarray::s![.., ..half.len()]));
    // Without ffmpeg: what the built-in decoder reads.
    let own = read_sound_from(&files.path("hole.mp3"), Path::new(NO_FFMPEG), 0.0, None).expect("read");
    let damage = own.expect("a sound").damage.expect("packets are missing");
    assert!(damage.contains("samples are missing"), "{damage}");
}

/// The second track is the default one: the file omits its flag, which then counts as set.
#[needs(ffmpeg)]
fn matroska_track_without_a_default_flag_is_a_default_track() {
    let files = Files::new();
    let quiet = "aevalsrc=0.1*sin(2*PI*440*t):s=44100:d=0.5";
    let inputs = ["-i", &files.at("source.wav"), "-f", "lavfi", "-i", quiet, "-map", "0", "-map", "1", "-c:a", "flac"];
    let flags = ["-disposition:a:0", "0", "-disposition:a:1", "default", &files.at("two.mka")];
    ffmpeg(&[&inputs[..], &flags].concat());
    files.check("two.mka");
    assert_eq!(files.read("two.mka").channels(), 1);
}

/// ffmpeg would read other files that a playlist refers to.
#[needs(ffmpeg)]
fn playlists_and_scripts_are_rejected() {
    let files = Files::new();
    files.encode("a.aac", &["-c:a", "aac"]);
    let list = format!("#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:2,\n{}\n#EXT-X-ENDLIST\n", files.at("a.aac"));
    for (name, text) in [("list.m3u8", list.as_str()), ("list.wav", "ffconcat version 1.0\nfile source.wav\n")] {
        fs::write(files.path(name), text).expect("written");
        let error = read_sound(&files.path(name), Path::new("ffmpeg"), None).expect_err(name).to_string();
        assert!(error.contains(name) && error.contains("may refer to other files"), "{error}");
    }
    fs::write(files.path("text.wav"), "no sound at all").expect("written");
    let error = read_sound(&files.path("text.wav"), Path::new("ffmpeg"), None).expect_err("text").to_string();
    let want = format!(
        "sound {}: the built-in decoders do not support the container, and ffmpeg cannot decode the file: Invalid data found when processing input",
        files.at("text.wav")
    );
    assert_eq!(error, want);
}
