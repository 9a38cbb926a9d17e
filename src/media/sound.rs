//! Sound files of any rate, number of channels and sample format: by the decoders in this binary, and by an installed ffmpeg
//! where they know a file's format or codec not.

use std::fs::File;
use std::io::{Cursor, ErrorKind};
use std::path::Path;

use symphonia::core::audio::Channels;
use symphonia::core::codecs::audio::AudioDecoderOptions;
use symphonia::core::errors::Error as Reason;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, TrackType};
use symphonia::core::io::{MediaSource, MediaSourceStream};
use symphonia::core::meta::MetadataOptions;
use symphonia::default::{get_codecs, get_probe};

use super::audio::Audio;
use super::decode::decoded as ffmpeg_output;
use super::downmix::stereo;
use super::edit_list::{Edit, sound_edit};
use super::error::{Error, Result};
use crate::contained::contained;

/// Samples a second that a sound may have: what a device records in. Beyond, a header is wrong, or made to cost memory.
const RATES: std::ops::RangeInclusive<u32> = 8000..=384_000;
/// Samples of all channels that are kept of a sound: 46 minutes of stereo at 48 kHz.
const MOST_KEPT: usize = 1 << 28;
/// Samples of a channel that are decoded, of which those before a start are kept by nobody: 12 hours at 48 kHz.
const MOST_DECODED: usize = 1 << 31;
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
    let fault = |reason: String| Error::Sound { path: path.to_path_buf(), reason };
    let damaged = |reason: Fault| match reason {
        Fault::Decoder(Reason::IoError(source)) if source.kind() != ErrorKind::UnexpectedEof => {
            Error::Io { action: "read", path: path.to_path_buf(), source }
        }
        Fault::Decoder(reason) => fault(format!("damaged: {reason}")),
        Fault::Rate(rate) => {
            fault(format!("{rate} samples a second; a sound has {} to {}", RATES.start(), RATES.end()))
        }
        Fault::Long => fault("is too long; give a shorter one".into()),
        Fault::Panic(words) => fault(format!("damaged: its decoder panicked: {words}")),
    };
    match contained(|| of_file(path, start, end)) {
        Err(Fault::Decoder(reason @ Reason::Unsupported(_))) => {
            let limit = end.unwrap_or(MOST_SECONDS).to_string();
            match ffmpeg_output(path, ffmpeg, &["-t", &limit, "-vn", "-f", "wav", "-c:a", "pcm_f32le"]) {
                Err(Error::NoDecoder { .. }) => {
                    let known = "install ffmpeg, or give WAV, FLAC, MP3, AAC, ALAC or Vorbis";
                    Err(fault(format!("{reason}; {known}")))
                }
                Err(other) => Err(other),
                Ok(None) => Ok(None),
                Ok(Some(wav)) => {
                    let all = || decoded(Box::new(Cursor::new(wav)), &Hint::new(), Edit::default(), start, end);
                    contained(all).map_err(damaged)
                }
            }
        }
        other => other.map_err(damaged),
    }
}

/// The sound of a file by the decoders of this binary.
fn of_file(path: &Path, start: f64, end: Option<f64>) -> std::result::Result<Option<SoundPart>, Fault> {
    let mut hint = Hint::new();
    if let Some(extension) = path.extension().and_then(|e| e.to_str()) {
        hint.with_extension(extension);
    }
    decoded(Box::new(File::open(path)?), &hint, sound_edit(path)?, start, end)
}

fn decoded(
    source: Box<dyn MediaSource>,
    hint: &Hint,
    edit: Edit,
    start: f64,
    end: Option<f64>,
) -> std::result::Result<Option<SoundPart>, Fault> {
    let source = MediaSourceStream::new(source, Default::default());
    let mut format = get_probe().probe(hint, source, FormatOptions::default(), MetadataOptions::default())?;
    let Some(track) = format.default_track(TrackType::Audio) else { return Ok(None) };
    let codec = track.codec_params.as_ref().and_then(|codec| codec.audio());
    let codec = codec.ok_or(Reason::Unsupported("codec"))?;
    let mut decoder = get_codecs().make_audio_decoder(codec, &AudioDecoderOptions::default().verify(true))?;
    let track = track.id;
    let (mut planes, mut dropped): (Vec<Vec<f32>>, usize) = (Vec::new(), 0);
    let mut form: Option<(u32, Channels)> = None;
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
    let length = edit.apply(&mut planes, rate, start, end, dropped);
    let sound = Audio::new(stereo(planes, &channels), rate);
    let sound = sound.map_err(|_| Reason::DecodeError("no channel, or a rate of 0"))?;
    Ok(Some(SoundPart { sound, length: length as f64 / f64::from(rate) }))
}
