//! Sound files of any rate, number of channels and sample format: by the decoders in this binary, and by an installed ffmpeg
//! where they know a file's format or codec not.

use std::fs::File;
use std::io::{Cursor, ErrorKind, Read, Seek};
use std::path::Path;

use symphonia::core::audio::Channels;
use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::AudioDecoderOptions;
use symphonia::core::errors::Error as Reason;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, Track, TrackFlags};
use symphonia::core::io::{MediaSource, MediaSourceStream};
use symphonia::core::meta::MetadataOptions;
use symphonia::core::packet::Packet;
use symphonia::default::{get_codecs, get_probe};

use super::audio::Audio;
use super::decode::decoded as ffmpeg_output;
use super::downmix::stereo;
use super::edit_list::{Edit, Mp4Sound, mp4_sound, zero_of};
use super::error::{Error, Result};
use super::track_times::{Listing, sound_start};
use crate::contained::contained;

/// Samples a second that a sound may have: what a device records in. Beyond, a header is wrong, or made to cost memory.
const RATES: std::ops::RangeInclusive<u32> = 8000..=384_000;
/// Samples of all channels that are kept of a sound: 46 minutes of stereo at 48 kHz.
const MOST_KEPT: usize = 1 << 28;
/// Samples of a channel that are decoded, of which those before a start are kept by nobody: 12 hours at 48 kHz.
const MOST_DECODED: usize = 1 << 31;
/// Seconds of silence that a file may put in front, where nobody says how much is read.
const MOST_SILENCE: f64 = 600.0;
/// Seconds that ffmpeg decodes where nobody says how much is read.
const MOST_SECONDS: f64 = 3600.0;

/// The part of a file's sound from a second on.
#[derive(Clone, Debug, PartialEq)]
pub struct SoundPart {
    /// Samples behind the start; none where the sound ends before.
    pub sound: Audio,
    /// Seconds of the sound as far as it was read, those before the start among them.
    pub length: f64,
}

/// Why a sound is not read.
#[derive(Debug)]
enum Fault {
    Decoder(Reason),
    /// Samples a second.
    Rate(u32),
    Long,
    /// Seconds of silence in front.
    Late(f64),
    /// The decoder's words.
    Panic(String),
}

impl From<Reason> for Fault {
    fn from(reason: Reason) -> Self {
        Fault::Decoder(reason)
    }
}

impl From<String> for Fault {
    fn from(words: String) -> Self {
        Fault::Panic(words)
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Fault::Decoder(error.into())
    }
}

/// The sound of a file, to `end` seconds at most, in the file's own rate: mono or stereo as it is, more channels mixed to stereo
/// by ITU-R BS.775. None where the file has no sound.
///
/// WAV, AIFF, CAF, FLAC, MP3, ADTS, MP4, Ogg and Matroska with PCM, ADPCM, FLAC, ALAC, MP1 to 3, AAC-LC or Vorbis are read here;
/// `ffmpeg` (a path, or a name to be found on PATH) reads what is of another kind.
///
/// # Errors
/// A file that is not there, is damaged, or is of a kind that needs the ffmpeg that is not there.
pub fn read_sound(path: &Path, ffmpeg: &Path, end: Option<f64>) -> Result<Option<Audio>> {
    Ok(read_sound_from(path, ffmpeg, 0.0, end)?.map(|part| part.sound))
}

/// The same from second `start` on: what is before takes no memory.
///
/// # Errors
/// As [`read_sound`].
pub fn read_sound_from(path: &Path, ffmpeg: &Path, start: f64, end: Option<f64>) -> Result<Option<SoundPart>> {
    read_part(path, ffmpeg, Wanted { zero: None, start, end })
}

/// Part of a sound.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    /// Second of the container's times from which start and end count; `None`: the start of the file.
    pub(super) zero: Option<f64>,
    pub(super) start: f64,
    pub(super) end: Option<f64>,
}

/// Part of a file's sound.
///
/// # Errors
/// As [`read_sound`].
pub(super) fn read_part(path: &Path, ffmpeg: &Path, wanted: Wanted) -> Result<Option<SoundPart>> {
    match contained(|| of_file(path, wanted)) {
        Err(Fault::Decoder(reason @ Reason::Unsupported(_))) => by_ffmpeg(path, ffmpeg, wanted, &reason),
        other => other.map_err(|reason| unread(path, reason)),
    }
}

/// The error of a sound that is not read.
fn unread(path: &Path, reason: Fault) -> Error {
    let fault = |reason: String| Error::Sound { path: path.to_path_buf(), reason };
    match reason {
        Fault::Decoder(Reason::IoError(source)) if source.kind() != ErrorKind::UnexpectedEof => {
            Error::Io { action: "read", path: path.to_path_buf(), source }
        }
        Fault::Decoder(reason) => fault(format!("damaged: {reason}")),
        Fault::Rate(rate) => {
            fault(format!("{rate} samples a second; a sound has {} to {}", RATES.start(), RATES.end()))
        }
        Fault::Long => fault("is too long; give a shorter one".into()),
        Fault::Late(seconds) => fault(format!(
            "its sound starts after {seconds:.1} s, and {MOST_SILENCE} s of silence are the most: cut it first, e.g. \
             ffmpeg -ss SECONDS -i IN OUT.mp4"
        )),
        Fault::Panic(words) => fault(format!("damaged: its decoder panicked: {words}")),
    }
}

/// The sound of a file that the decoders of this binary do not support, for a reason.
fn by_ffmpeg(path: &Path, ffmpeg: &Path, wanted: Wanted, reason: &Reason) -> Result<Option<SoundPart>> {
    let listing = Listing::read(path, ffmpeg);
    let zero = wanted.zero.unwrap_or_else(|| listing.zero());
    // ffmpeg counts the priming of such a file, which it leaves out, as time in front.
    let is_itunes = mp4_sound(path).map_err(Error::io("read", path))?.is_some_and(|sound| sound.is_itunes);
    let first = match listing.sound {
        _ if is_itunes => Some(0.0),
        Some(track) => sound_start(path, ffmpeg, track),
        None => None,
    };
    let limit = (wanted.end.unwrap_or(MOST_SECONDS) + (zero - first.unwrap_or(zero)).max(0.0)).to_string();
    let track = listing.sound.map_or("0:a:0".into(), |track| format!("0:{track}"));
    let how = ["-map", &track, "-t", &limit, "-vn", "-f", "wav", "-c:a", "pcm_f32le"];
    let wav = match ffmpeg_output(path, ffmpeg, &how) {
        Err(Error::NoDecoder { .. }) => {
            let known = "install ffmpeg, or give WAV, FLAC, MP3, AAC, ALAC or Vorbis";
            return Err(Error::Sound { path: path.to_path_buf(), reason: format!("{reason}; {known}") });
        }
        wav => wav?,
    };
    let Some(wav) = wav else { return Ok(None) };
    if first.is_none() {
        tracing::warn!("{}: ffmpeg does not say when its sound starts: it is taken to start at once", path.display());
    }
    let wanted = Wanted { zero: Some(zero), ..wanted };
    let all = || {
        decoded(Box::new(Cursor::new(wav)), &Hint::new(), Place::At(Edit::starting_at(first.unwrap_or(zero))), wanted)
    };
    contained(all).map_err(|reason| unread(path, reason))
}

/// The sound of a file by the decoders of this binary.
fn of_file(path: &Path, wanted: Wanted) -> std::result::Result<Option<SoundPart>, Fault> {
    let mut hint = Hint::new();
    if let Some(extension) = path.extension().and_then(|e| e.to_str()) {
        hint.with_extension(extension);
    }
    let mut file = File::open(path)?;
    if is_foreign(&mut file)? {
        return Err(Reason::Unsupported("container").into());
    }
    let sound = mp4_sound(path)?;
    if let Some(left_out) = sound.as_ref().and_then(Mp4Sound::left_out) {
        tracing::warn!("{}: {left_out}", path.display());
    }
    let place = sound.map_or(Place::Packets, Place::Mp4);
    decoded(Box::new(file), &hint, place, wanted)
}

/// Whether a file is a container that only ffmpeg reads; compressed sound in it may look like an MP3 or AAC file.
fn is_foreign(file: &mut File) -> std::io::Result<bool> {
    let mut head = Vec::new();
    file.by_ref().take(512).read_to_end(&mut head)?;
    file.rewind()?;
    let at = |place: usize, bytes: &[u8]| head.get(place..).is_some_and(|rest| rest.starts_with(bytes));
    let packets = |first: usize, size: usize| (0..2).all(|n| at(first + n * size, &[0x47]));
    let transport = packets(0, 188) || packets(4, 192) || packets(0, 204);
    let heads: [&[u8]; 5] = [b"\0\0\x01\xba", b"FLV", b"\x30\x26\xb2\x75", b"nut/multimedia", b".RMF"];
    Ok(transport || heads.iter().any(|head| at(0, head)) || (at(0, b"RIFF") && at(8, b"AVI ")))
}

/// What is known of the times of a sound before it is decoded.
enum Place {
    /// The times of a track's packets hold.
    Packets,
    Mp4(Mp4Sound),
    At(Edit),
}

impl Place {
    /// The track that is decoded: an MP4's own choice; else the first default sound track, or the first of all.
    ///
    /// # Errors
    /// A default track of an unknown kind, which may be the sound.
    fn track<'a>(&self, format: &'a dyn FormatReader) -> std::result::Result<Option<&'a Track>, Fault> {
        let tracks = format.tracks();
        if let Place::Mp4(sound) = self {
            let track = tracks.iter().find(|track| track.id == sound.track && is_sound(track));
            return Ok(Some(track.ok_or(Reason::Unsupported("codec"))?));
        }
        let is_default = |track: &&Track| track.flags.contains(TrackFlags::DEFAULT);
        if let Some(track) = tracks.iter().find(|track| is_default(track) && is_sound(track)) {
            return Ok(Some(track));
        }
        match tracks.iter().find(|track| is_sound(track)) {
            Some(_) if tracks.iter().any(|track| is_default(&track) && track.codec_params.is_none()) => {
                Err(Reason::Unsupported("codec").into())
            }
            first => Ok(first),
        }
    }

    /// The edit of a sound whose first decoded sample has time `sample`, in a file whose first packet has time `first`; it counts
    /// from second `zero`, or from the file's start.
    fn edit(&self, sample: f64, first: f64, zero: Option<f64>) -> Edit {
        let (edit, start) = match self {
            Place::Packets => (Edit::starting_at(sample), zero_of(first)),
            Place::Mp4(sound) => (sound.edit, sound.zero),
            Place::At(edit) => (*edit, 0.0),
        };
        edit.counted_from(zero.unwrap_or(start))
    }
}

fn is_sound(track: &Track) -> bool {
    matches!(track.codec_params, Some(CodecParameters::Audio(_)))
}

/// Second at which what is decoded of a packet starts.
fn time_of(packet: &Packet, tracks: &[Track]) -> f64 {
    let base = tracks.iter().find(|track| track.id == packet.track_id).and_then(|track| track.time_base);
    let ticks = packet.pts.get() as f64 + packet.trim_start.get() as f64;
    base.map_or(0.0, |base| ticks * f64::from(base.numer.get()) / f64::from(base.denom.get()))
}

fn decoded(
    source: Box<dyn MediaSource>,
    hint: &Hint,
    place: Place,
    wanted: Wanted,
) -> std::result::Result<Option<SoundPart>, Fault> {
    let Wanted { zero, start, end } = wanted;
    let source = MediaSourceStream::new(source, Default::default());
    let mut format = get_probe().probe(hint, source, FormatOptions::default(), MetadataOptions::default())?;
    let Some(track) = place.track(&*format)? else { return Ok(None) };
    let codec = track.codec_params.as_ref().and_then(|codec| codec.audio());
    let codec = codec.ok_or(Reason::Unsupported("codec"))?;
    let mut decoder = get_codecs().make_audio_decoder(codec, &AudioDecoderOptions::default().verify(true))?;
    let track = track.id;
    let (mut planes, mut dropped): (Vec<Vec<f32>>, usize) = (Vec::new(), 0);
    let mut form: Option<(u32, Channels)> = None;
    let (mut first, mut edit) = (f64::INFINITY, None);
    loop {
        let packet = match format.next_packet() {
            Ok(Some(packet)) => packet,
            // Frames that were skipped are missed by those that have a sum of all.
            Ok(None) if decoder.finalize().verify_ok == Some(false) => {
                return Err(Reason::DecodeError("samples are missing").into());
            }
            Ok(None) => break,
            // Who writes to a pipe cannot say how much comes.
            Err(Reason::IoError(e)) if e.kind() == ErrorKind::UnexpectedEof && form.is_some() => break,
            Err(error) => return Err(error.into()),
        };
        let time = time_of(&packet, format.tracks());
        first = first.min(time);
        if packet.track_id != track {
            continue;
        }
        let samples = decoder.decode(&packet)?;
        let (rate, channels) = (samples.spec().rate(), samples.spec().channels().clone());
        match &form {
            None if !RATES.contains(&rate) => return Err(Fault::Rate(rate)),
            None => form = Some((rate, channels)),
            Some(known) if *known == (rate, channels) => {}
            Some(_) => return Err(Reason::DecodeError("the rate or the channels change within the file").into()),
        }
        let mut own: Vec<Vec<f32>> = Vec::new();
        samples.copy_to_vecs_planar(&mut own);
        planes.resize_with(own.len(), Vec::new);
        planes.iter_mut().zip(own).for_each(|(all, own)| all.extend(own));
        let kept = planes.first().map_or(0, Vec::len);
        if kept == 0 && dropped == 0 {
            continue;
        }
        let edit = *edit.get_or_insert_with(|| place.edit(time, first, zero));
        if end.is_none() && edit.gap(end) > MOST_SILENCE {
            return Err(Fault::Late(edit.gap(end)));
        }
        let unheard = edit.before(start, rate, end).saturating_sub(dropped).min(kept);
        planes.iter_mut().for_each(|plane| drop(plane.drain(..unheard)));
        dropped += unheard;
        let decoded = dropped + kept - unheard;
        if (kept - unheard).saturating_mul(planes.len()) > MOST_KEPT || decoded > MOST_DECODED {
            return Err(Fault::Long);
        }
        let wanted = end.map(|end| ((end + edit.skipped()) * f64::from(rate)).ceil() as usize);
        if wanted.is_some_and(|wanted| !planes.is_empty() && decoded >= wanted) {
            break;
        }
    }
    let Some((rate, channels)) = form else { return Ok(None) };
    if planes.iter().flatten().any(|sample| !sample.is_finite()) {
        return Err(Reason::DecodeError("it holds samples that are no numbers").into());
    }
    let length = edit.unwrap_or_default().apply(&mut planes, rate, start, end, dropped);
    let sound = Audio::new(stereo(planes, &channels), rate);
    let sound = sound.map_err(|_| Reason::DecodeError("no channel, or a rate of 0"))?;
    Ok(Some(SoundPart { sound, length: length as f64 / f64::from(rate) }))
}
