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

/// The sound of a file, to `end` seconds at most, in the file's own rate: mono or stereo as it is, more channels mixed to stereo
/// by ITU-R BS.775. None where the file has no sound.
///
/// WAV, AIFF, CAF, FLAC, MP3, ADTS, MP4, Ogg and Matroska with PCM, ADPCM, FLAC, ALAC, MP1 to 3, AAC-LC or Vorbis are read here;
/// `ffmpeg` (a path, or a name to be found on PATH) reads what is of another kind.
///
/// # Errors
/// A file that is not there, is damaged, or is of a kind that needs the ffmpeg that is not there.
pub fn read_sound(path: &Path, ffmpeg: &Path, end: Option<f64>) -> Result<Option<Audio>> {
    let fault = |reason: String| Error::Sound { path: path.to_path_buf(), reason };
    let damaged = |reason: Reason| match reason {
        Reason::IoError(source) if source.kind() != ErrorKind::UnexpectedEof => {
            Error::Io { action: "read", path: path.to_path_buf(), source }
        }
        reason => fault(format!("damaged: {reason}")),
    };
    match of_file(path, end) {
        Err(reason @ Reason::Unsupported(_)) => {
            let limit = end.map(|end| end.to_string());
            let limit: Vec<&str> = limit.iter().flat_map(|end| ["-t", end]).collect();
            match ffmpeg_output(path, ffmpeg, &[&limit[..], &["-vn", "-f", "wav", "-c:a", "pcm_f32le"]].concat()) {
                Err(Error::NoDecoder { .. }) => {
                    let known = "install ffmpeg, or give WAV, FLAC, MP3, AAC, ALAC or Vorbis";
                    Err(fault(format!("{reason}; {known}")))
                }
                Err(other) => Err(other),
                Ok(None) => Ok(None),
                Ok(Some(wav)) => {
                    decoded(Box::new(Cursor::new(wav)), &Hint::new(), Edit::default(), end).map_err(damaged)
                }
            }
        }
        other => other.map_err(damaged),
    }
}

/// The sound of a file by the decoders of this binary.
fn of_file(path: &Path, end: Option<f64>) -> std::result::Result<Option<Audio>, Reason> {
    let mut hint = Hint::new();
    if let Some(extension) = path.extension().and_then(|e| e.to_str()) {
        hint.with_extension(extension);
    }
    decoded(Box::new(File::open(path)?), &hint, sound_edit(path)?, end)
}

fn decoded(
    source: Box<dyn MediaSource>,
    hint: &Hint,
    edit: Edit,
    end: Option<f64>,
) -> std::result::Result<Option<Audio>, Reason> {
    let source = MediaSourceStream::new(source, Default::default());
    let mut format = get_probe().probe(hint, source, FormatOptions::default(), MetadataOptions::default())?;
    let Some(track) = format.default_track(TrackType::Audio) else { return Ok(None) };
    let codec = track.codec_params.as_ref().and_then(|codec| codec.audio());
    let codec = codec.ok_or(Reason::Unsupported("codec"))?;
    let mut decoder = get_codecs().make_audio_decoder(codec, &AudioDecoderOptions::default().verify(true))?;
    let track = track.id;
    let mut planes: Vec<Vec<f32>> = Vec::new();
    let mut form: Option<(u32, Channels)> = None;
    loop {
        let packet = match format.next_packet() {
            Ok(Some(packet)) => packet,
            // Frames that were skipped are missed by those that have a sum of all.
            Ok(None) if decoder.finalize().verify_ok == Some(false) => {
                return Err(Reason::DecodeError("samples are missing"));
            }
            Ok(None) => break,
            // Who writes to a pipe cannot say how much comes.
            Err(Reason::IoError(e)) if e.kind() == ErrorKind::UnexpectedEof && form.is_some() => break,
            Err(error) => return Err(error),
        };
        if packet.track_id != track {
            continue;
        }
        let samples = decoder.decode(&packet)?;
        let (rate, channels) = (samples.spec().rate(), samples.spec().channels().clone());
        match &form {
            None => form = Some((rate, channels)),
            Some(known) if *known == (rate, channels) => {}
            Some(_) => return Err(Reason::DecodeError("the rate or the channels change within the file")),
        }
        let mut own: Vec<Vec<f32>> = Vec::new();
        samples.copy_to_vecs_planar(&mut own);
        planes.resize_with(own.len(), Vec::new);
        planes.iter_mut().zip(own).for_each(|(all, own)| all.extend(own));
        let wanted = end.map(|end| ((end + edit.skipped()) * f64::from(rate)).ceil() as usize);
        if wanted.is_some_and(|wanted| planes.first().is_some_and(|plane| plane.len() >= wanted)) {
            break;
        }
    }
    let Some((rate, channels)) = form else { return Ok(None) };
    if planes.iter().flatten().any(|sample| !sample.is_finite()) {
        return Err(Reason::DecodeError("it holds samples that are no numbers"));
    }
    edit.apply(&mut planes, rate, end);
    let sound = Audio::new(stereo(planes, &channels), rate);
    sound.map(Some).map_err(|_| Reason::DecodeError("no channel, or a rate of 0"))
}
