//! Start time of a file's audio and selection of its audio track, in all kinds of containers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ltx2::media::{Audio, Clip, ClipPart, read_sound, read_sound_from};

use crate::support::{full, needs};

const RATE: u32 = 8000;
const NO_FFMPEG: &str = "/nowhere/ffmpeg";

/// A mono audio track of 16-bit samples that all have one value.
#[derive(Clone)]
struct Track {
    value: f32,
    samples: usize,
    is_default: bool,
    /// Start of the first block: milliseconds in Matroska, media ticks in a fragment.
    start: u32,
    /// Matroska's CodecDelay in nanoseconds.
    delay: u32,
    /// MP4 edit list: length in milliseconds and start in samples of each entry.
    edits: Vec<[i32; 2]>,
}

impl Track {
    fn new(value: f32) -> Self {
        Track { value, samples: 800, is_default: true, start: 0, delay: 0, edits: Vec::new() }
    }

    fn data(&self) -> Vec<u8> {
        ((self.value * 32768.0) as i16).to_le_bytes().repeat(self.samples)
    }
}

/// Encodes a Matroska element.
fn element(id: &[u8], body: &[u8]) -> Vec<u8> {
    [id, &(0x0100_0000_0000_0000 | body.len() as u64).to_be_bytes(), body].concat()
}

fn matroska(tracks: &[Track]) -> Vec<u8> {
    let number = |id: &[u8], value: u32| element(id, &value.to_be_bytes());
    let head = [element(&[0x42, 0x82], b"matroska"), number(&[0x42, 0x87], 4), number(&[0x42, 0x85], 2)].concat();
    let entry = |(n, track): (usize, &Track)| {
        let form = [element(&[0xb5], &(RATE as f32).to_be_bytes()), number(&[0x9f], 1), number(&[0x62, 0x64], 16)];
        let fields = [
            number(&[0xd7], n as u32 + 1),
            number(&[0x73, 0xc5], n as u32 + 1),
            number(&[0x83], 2),
            number(&[0x88], u32::from(track.is_default)),
            number(&[0x56, 0xaa], track.delay),
            element(&[0x86], b"A_PCM/INT/LIT"),
            element(&[0xe1], &form.concat()),
        ];
        element(&[0xae], &fields.concat())
    };
    let cluster = |(n, track): (usize, &Track)| {
        let block = [&[0x81 + n as u8, 0, 0, 0x80][..], &track.data()].concat();
        element(&[0x1f, 0x43, 0xb6, 0x75], &[number(&[0xe7], track.start), element(&[0xa3], &block)].concat())
    };
    let names = [element(&[0x4d, 0x80], b"test"), element(&[0x57, 0x41], b"test")].concat();
    let info = [number(&[0x2a, 0xd7, 0xb1], 1_000_000), names].concat();
    let entries: Vec<u8> = tracks.iter().enumerate().flat_map(entry).collect();
    let clusters: Vec<u8> = tracks.iter().enumerate().flat_map(cluster).collect();
    let body = [element(&[0x15, 0x49, 0xa9, 0x66], &info), element(&[0x16, 0x54, 0xae, 0x6b], &entries), clusters];
    [element(&[0x1a, 0x45, 0xdf, 0xa3], &head), element(&[0x18, 0x53, 0x80, 0x67], &body.concat())].concat()
}

/// Encodes an MP4 box.
fn boxed(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32 + 8).to_be_bytes()[..], name, body].concat()
}

fn words(all: &[i32]) -> Vec<u8> {
    all.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Returns a track header; its samples are at offset `at` of the file, or in fragments.
fn track_header(id: i32, track: &Track, at: Option<usize>) -> Vec<u8> {
    let head = [words(&[i32::from(track.is_default), 0, 0, id, 0, 0]), vec![0; 60]].concat();
    let handler = [&words(&[0, 0])[..], b"soun", &[0; 13]].concat();
    let entry = [&[0, 0, 0, 0, 0, 0, 0, 1][..], &[0; 8], &[0, 1, 0, 16, 0, 0, 0, 0], &words(&[(RATE as i32) << 16])];
    let count = at.map_or(0, |_| track.samples as i32);
    let runs = if count > 0 { words(&[0, 1, 1, count, 1]) } else { words(&[0, 0]) };
    let table = [
        boxed(b"stsd", &[words(&[0, 1]), boxed(b"sowt", &entry.concat())].concat()),
        boxed(b"stts", &if count > 0 { words(&[0, 1, count, 1]) } else { words(&[0, 0]) }),
        boxed(b"stsc", &runs),
        boxed(b"stsz", &words(&[0, 2 * i32::from(count > 0), count])),
        boxed(b"stco", &at.map_or(words(&[0, 0]), |at| words(&[0, 1, at as i32]))),
    ];
    let reference = boxed(b"dinf", &boxed(b"dref", &[words(&[0, 1]), boxed(b"url ", &words(&[1]))].concat()));
    let info = [boxed(b"smhd", &words(&[0, 0])), reference, boxed(b"stbl", &table.concat())].concat();
    let media =
        [boxed(b"mdhd", &words(&[0, 0, 0, RATE as i32, count, 0])), boxed(b"hdlr", &handler), boxed(b"minf", &info)];
    let entries: Vec<i32> = track.edits.iter().flat_map(|[length, start]| [*length, *start, 1 << 16]).collect();
    let list = boxed(b"edts", &boxed(b"elst", &words(&[&[0, track.edits.len() as i32][..], &entries].concat())));
    let list = if entries.is_empty() { Vec::new() } else { list };
    boxed(b"trak", &[boxed(b"tkhd", &head), list, boxed(b"mdia", &media.concat())].concat())
}

/// Encodes iTunes' tag: priming and number of samples.
fn itunes([priming, count]: [usize; 2]) -> Vec<u8> {
    let text = format!(" 00000000 {priming:08X} 000000FF {count:016X} 00000000 00000000");
    let tag = [
        boxed(b"mean", b"\0\0\0\0com.apple.iTunes"),
        boxed(b"name", b"\0\0\0\0iTunSMPB"),
        boxed(b"data", &[&words(&[1, 0])[..], text.as_bytes()].concat()),
    ];
    let handler = [&words(&[0, 0])[..], b"mdir", &[0; 13]].concat();
    let meta = [words(&[0]), boxed(b"hdlr", &handler), boxed(b"ilst", &boxed(b"----", &tag.concat()))].concat();
    boxed(b"udta", &boxed(b"meta", &meta))
}

fn movie_header() -> Vec<u8> {
    boxed(b"mvhd", &[words(&[0, 0, 0, 1000, 0]), vec![0; 80]].concat())
}

fn mp4(tracks: &[Track], tag: Option<[usize; 2]>) -> Vec<u8> {
    let kind = boxed(b"ftyp", b"qt  \0\0\0\0qt  ");
    let data: Vec<u8> = tracks.iter().flat_map(Track::data).collect();
    let mut at = kind.len() + 8;
    let mut headers = movie_header();
    for (n, track) in tracks.iter().enumerate() {
        headers.extend(track_header(n as i32 + 1, track, Some(at)));
        at += 2 * track.samples;
    }
    headers.extend(tag.map(itunes).unwrap_or_default());
    [kind, boxed(b"mdat", &data), boxed(b"moov", &headers)].concat()
}

/// Like [`mp4`], with one fragment per track.
fn fragmented(tracks: &[Track]) -> Vec<u8> {
    let (mut headers, mut defaults, mut fragments) = (movie_header(), Vec::new(), Vec::new());
    for (n, track) in (1..).zip(tracks) {
        headers.extend(track_header(n, track, None));
        defaults.extend(boxed(b"trex", &words(&[0, n, 1, 1, 2, 0])));
        let run = |offset: usize| {
            let times = boxed(b"tfdt", &words(&[0, track.start as i32]));
            let runs = boxed(b"trun", &words(&[1, track.samples as i32, offset as i32]));
            let parts = [boxed(b"tfhd", &words(&[0x02_0000, n])), times, runs].concat();
            boxed(b"moof", &[boxed(b"mfhd", &words(&[0, n])), boxed(b"traf", &parts)].concat())
        };
        fragments.extend(run(run(0).len() + 8));
        fragments.extend(boxed(b"mdat", &track.data()));
    }
    headers.extend(boxed(b"mvex", &defaults));
    [boxed(b"ftyp", b"iso5\0\0\0\0iso5"), boxed(b"moov", &headers), fragments].concat()
}

/// Reads a file without ffmpeg and returns its runs of equal samples.
fn heard(name: &str, bytes: &[u8]) -> Vec<(usize, f32)> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    fs::write(&path, bytes).expect("written");
    let sound = read_sound(&path, Path::new(NO_FFMPEG), None).expect(name).expect("a sound");
    assert_eq!(sound.rate(), RATE, "{name}");
    // Reading from the middle on gives that part of the complete file.
    let start = sound.len() as f64 / f64::from(RATE) / 2.0;
    let part = read_sound_from(&path, Path::new(NO_FFMPEG), start, None).expect(name).expect("a sound");
    assert_eq!(part.sound, sound.span(start, part.sound.len()), "{name}");
    assert_eq!(part.length, sound.len() as f64 / f64::from(RATE), "{name}");
    runs(&sound)
}

fn runs(sound: &Audio) -> Vec<(usize, f32)> {
    let samples: Vec<f32> = sound.samples().row(0).to_vec();
    samples.chunk_by(|a, b| a == b).map(|run| (run.len(), run[0])).collect()
}

#[needs(nothing)]
fn matroska_audio_starts_at_its_first_block() {
    let late = Track { start: 780, ..Track::new(0.5) };
    for name in ["late.mkv", "late.webm"] {
        assert_eq!(heard(name, &matroska(std::slice::from_ref(&late))), [(6240, 0.0), (800, 0.5)], "{name}");
    }
    // 25 ms of encoder priming, with a block at 0 and one at 10 ms.
    for (start, unheard) in [(0, 200), (10, 120)] {
        let primed = Track { start, delay: 25_000_000, ..Track::new(0.5) };
        assert_eq!(heard("primed.mkv", &matroska(&[primed])), [(800 - unheard, 0.5)]);
    }
    // A part of a longer recording.
    let cut = Track { start: 3_600_000, ..Track::new(0.5) };
    assert_eq!(heard("cut.mkv", &matroska(std::slice::from_ref(&cut))), [(800, 0.5)]);
    let later = Track { start: 3_600_100, ..Track::new(0.25) };
    let tracks = [Track { is_default: false, ..cut }, later];
    assert_eq!(heard("cut.mkv", &matroska(&tracks)), [(800, 0.0), (800, 0.25)]);
}

#[needs(nothing)]
fn default_audio_track_is_read() {
    let [first, second] = [0.5, 0.25].map(Track::new);
    let other = Track { is_default: false, ..first.clone() };
    for (tracks, value) in [([&first, &second], 0.5), ([&other, &second], 0.25), ([&other, &other], 0.5)] {
        let tracks = tracks.map(Track::clone);
        assert_eq!(heard("two.mkv", &matroska(&tracks)), [(800, value)]);
        assert_eq!(heard("two.mov", &mp4(&tracks, None)), [(800, value)]);
        assert_eq!(heard("two.mp4", &fragmented(&tracks)), [(800, value)]);
    }
    // The default track's edit list applies.
    let other = Track { edits: vec![[500, -1], [100, 0]], ..other };
    let primed = Track { edits: vec![[75, 200]], ..second };
    assert_eq!(heard("edits.mov", &mp4(&[other, primed], None)), [(600, 0.25)]);
}

#[needs(nothing)]
fn itunes_priming_tag_applies_only_without_an_edit_list() {
    let track = Track::new(0.5);
    // The number of samples is not used.
    assert_eq!(heard("a.m4a", &mp4(std::slice::from_ref(&track), Some([100, 650]))), [(700, 0.5)]);
    assert_eq!(heard("a.m4a", &mp4(std::slice::from_ref(&track), Some([300, 0]))), [(500, 0.5)]);
    let listed = Track { edits: vec![[250, -1], [75, 200]], ..track };
    assert_eq!(heard("a.m4a", &mp4(&[listed], Some([100, 650]))), [(2000, 0.0), (600, 0.5)]);
}

#[needs(nothing)]
fn fragmented_audio_starts_at_the_fragment_time() {
    let late = |start: u32| Track { start, ..Track::new(0.5) };
    assert_eq!(heard("a.mp4", &fragmented(&[late(0)])), [(800, 0.5)]);
    assert_eq!(heard("a.mp4", &fragmented(&[late(6240)])), [(6240, 0.0), (800, 0.5)]);
    let listed = |start: u32| Track { edits: vec![[0, 200]], ..late(start) };
    assert_eq!(heard("a.mp4", &fragmented(&[listed(0)])), [(600, 0.5)]);
    assert_eq!(heard("a.mp4", &fragmented(&[listed(1000)])), [(800, 0.0), (800, 0.5)]);
    // A segment of a stream: the first track's time is the start of the file.
    let tracks = [Track { is_default: false, ..late(RATE * 3600) }, late(RATE * 3600 + 400)];
    assert_eq!(heard("a.mp4", &fragmented(&tracks)), [(400, 0.0), (800, 0.5)]);
}

fn ffmpeg(arguments: &[&str]) {
    let run = Command::new("ffmpeg").args(["-hide_banner", "-loglevel", "error", "-y"]).args(arguments).output();
    let run = run.expect("ffmpeg starts");
    assert!(run.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&run.stderr));
}

/// Splits Ogg into several pages: a first page that is also the last one has no start time.
fn pages(name: &str) -> &'static [&'static str] {
    if name.ends_with(".ogg") || name.ends_with(".ogv") { &["-page_duration", "100000"] } else { &[] }
}

/// Returns the time in seconds at which audio becomes loud.
fn onset(sound: &Audio) -> f64 {
    let loud = sound.samples().row(0).iter().position(|sample| sample.abs() > 0.05);
    loud.expect("a loud sample") as f64 / f64::from(sound.rate())
}

struct Files(tempfile::TempDir);

impl Files {
    /// Creates half a second of video, and a tone that starts immediately.
    fn new() -> Self {
        let files = Files(tempfile::tempdir().expect("a folder"));
        let video = ["-f", "lavfi", "-i", "testsrc=size=64x64:rate=24:duration=0.5", "-c:v"];
        ffmpeg(&[&video[..], &["libx264", "-preset", "ultrafast", "-bf", "2", &files.at("video.mp4")]].concat());
        let tone = "aevalsrc=0.5*sin(2*PI*440*t):s=48000:d=0.3";
        ffmpeg(&["-f", "lavfi", "-i", tone, &files.at("tone.wav")]);
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn at(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").into()
    }

    /// Writes video and audio with separate start times, in seconds.
    fn write(&self, name: &str, codecs: [&str; 2], starts: [&str; 2]) {
        let [video, sound] = codecs;
        let inputs = ["-itsoffset", starts[0], "-i", &self.at("video.mp4"), "-itsoffset", starts[1], "-i"];
        let how = ["-map", "0:v", "-map", "1:a", "-c:v", video, "-c:a", sound, "-strict", "-2", &self.at(name)];
        let (last, how) = how.split_last().expect("a path");
        ffmpeg(&[&inputs[..], &[&self.at("tone.wav")], how, pages(name), &[*last]].concat());
    }

    /// Returns the time at which a file's audio becomes loud on ffmpeg's timeline, and the time of the first frame, in
    /// seconds.
    fn reference(&self, name: &str) -> [f64; 2] {
        let line = ["-map", "0:a:0", "-af", "aresample=async=1:first_pts=0", "-ac", "1", &self.at("line.wav")];
        ffmpeg(&[&["-copyts", "-i", &self.at(name)][..], &line].concat());
        let sound = ltx2::media::read_wav(&self.path("line.wav")).expect("a WAV file");
        let probe = ["-v", "error", "-select_streams", "v:0", "-show_entries", "frame=pts_time,pkt_pts_time"];
        let how = ["-read_intervals", "%+#1", "-of", "default=nw=1:nk=1", &self.at(name)];
        let frames = Command::new("ffprobe").args(probe).args(how).output().expect("ffprobe starts").stdout;
        let first = String::from_utf8(frames).expect("UTF-8");
        [onset(&sound), first.lines().next().and_then(|time| time.parse().ok()).expect("a first frame")]
    }
}

/// Writes every other container with one of the start times, in turn; in the full test all with all.
#[needs(ffmpeg)]
fn audio_stays_aligned_with_frames_in_every_container() {
    let files = Files::new();
    let cases = [
        ("aac.mp4", ["copy", "aac"]),
        ("opus.mp4", ["copy", "libopus"]),
        ("pcm.mov", ["copy", "pcm_s16le"]),
        ("aac.mkv", ["copy", "aac"]),
        ("vorbis.mkv", ["copy", "libvorbis"]),
        ("opus.webm", ["libvpx", "libopus"]),
        ("aac.ts", ["copy", "aac"]),
        ("mp2.ts", ["copy", "mp2"]),
        ("mp2.mpg", ["mpeg2video", "mp2"]),
        ("aac.flv", ["flv1", "aac"]),
        ("pcm.nut", ["mpeg4", "pcm_s16le"]),
        ("mp3.avi", ["mpeg4", "libmp3lame"]),
        ("vorbis.ogv", ["libtheora", "libvorbis"]),
        ("wma.wmv", ["wmv2", "wmav2"]),
    ];
    for (turn, (name, codecs)) in cases.into_iter().enumerate().step_by(if full() { 1 } else { 2 }) {
        for (n, starts) in [["0", "0.15"], ["0", "0"], ["0.2", "0"]].into_iter().enumerate() {
            if n != turn % 3 && !full() {
                continue;
            }
            files.write(name, codecs, starts);
            let [sound, frame] = files.reference(name);
            let clip = Clip::read(&files.path(name), Path::new("ffmpeg"), ClipPart::default()).expect(name);
            let got = onset(&clip.sound.expect("a sound"));
            let want = (sound - frame).max(0.0);
            assert!((got - want).abs() < 0.0025, "{name} {starts:?}: {got} for {want}");
        }
    }
}

/// An audio file starts with the silence that its container specifies, because there are no frames to align with.
#[needs(ffmpeg)]
fn audio_only_file_keeps_leading_silence() {
    let files = Files::new();
    for (name, codec) in
        [("a.mka", "libopus"), ("b.mka", "flac"), ("a.m4a", "aac"), ("a.ogg", "libvorbis"), ("a.nut", "mp2")]
    {
        let given = ["-itsoffset", "0.15", "-i", &files.at("tone.wav"), "-c:a", codec];
        ffmpeg(&[&given[..], pages(name), &[&files.at(name)]].concat());
        let line = ["-af", "aresample=async=1:first_pts=0", "-ac", "1", &files.at("line.wav")];
        ffmpeg(&[&["-copyts", "-i", &files.at(name)][..], &line].concat());
        let want = onset(&ltx2::media::read_wav(&files.path("line.wav")).expect("a WAV file"));
        let got = onset(&read_sound(&files.path(name), Path::new("ffmpeg"), None).expect(name).expect("a sound"));
        assert!(want > 0.13 && (got - want).abs() < 0.0025, "{name}: {got} for {want}");
    }
    // A transport stream has no absolute start, and MP3 has no timestamps.
    for (name, codec) in [("a.ts", "mp2"), ("a.mp3", "libmp3lame")] {
        ffmpeg(&["-itsoffset", "0.15", "-i", &files.at("tone.wav"), "-c:a", codec, &files.at(name)]);
        let got = onset(&read_sound(&files.path(name), Path::new("ffmpeg"), None).expect(name).expect("a sound"));
        assert!(got < 0.012, "{name}: {got}");
    }
}

/// The file has two tracks that only ffmpeg decodes.
#[needs(ffmpeg)]
fn ffmpeg_reads_the_default_audio_track() {
    let files = Files::new();
    let quiet = "aevalsrc=0.1*sin(2*PI*440*t):s=48000:d=0.3";
    for name in ["two.mkv", "two.mp4"] {
        let inputs = ["-i", &files.at("tone.wav"), "-f", "lavfi", "-i", quiet, "-map", "0:a", "-map", "1:a"];
        let flags = ["-c:a", "libopus", "-disposition:a:0", "0", "-disposition:a:1", "default", &files.at(name)];
        ffmpeg(&[&inputs[..], &flags].concat());
        let sound = read_sound(&files.path(name), Path::new("ffmpeg"), None).expect(name).expect("a sound");
        let loudest = sound.samples().iter().fold(0.0, |most: f32, sample| most.max(sample.abs()));
        assert!((0.05..0.2).contains(&loudest), "{name}: {loudest}");
    }
}
