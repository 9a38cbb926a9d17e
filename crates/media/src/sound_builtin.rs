//! Decodes audio with the built-in decoders and checks that they decoded all of it.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use symphonia::core::audio::{Channels, GenericAudioBufferRef};
use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::well_known::{
    CODEC_ID_AAC, CODEC_ID_ALAC, CODEC_ID_FLAC, CODEC_ID_MP1, CODEC_ID_MP2, CODEC_ID_MP3, CODEC_ID_VORBIS,
};
use symphonia::core::codecs::audio::{AudioCodecId, AudioCodecParameters, AudioDecoderOptions};
use symphonia::core::errors::Error as Reason;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::well_known::{
    FORMAT_ID_ADTS, FORMAT_ID_AIFF, FORMAT_ID_CAF, FORMAT_ID_FLAC, FORMAT_ID_ISOMP4, FORMAT_ID_MKV, FORMAT_ID_MP1,
    FORMAT_ID_MP2, FORMAT_ID_MP3, FORMAT_ID_OGG, FORMAT_ID_WAVE,
};
use symphonia::core::formats::{FormatOptions, FormatReader, Track, TrackFlags};
use symphonia::core::io::{MediaSource, MediaSourceStream};
use symphonia::core::meta::MetadataOptions;
use symphonia::core::packet::Packet;
use symphonia::core::units::Duration;
use symphonia::default::{get_codecs, get_probe};

use super::audio::Audio;
use super::downmix::stereo;
use super::edit_list::{Edit, Mp4Sound, is_cut, mp4_sound, zero_of};
use super::sound_part::{MAX_SILENCE, RATES, SoundFault, SoundPart, SoundRange};

/// Maximum number of samples in memory, summed over all channels: 46 minutes of stereo at 48 kHz.
const MAX_KEPT_SAMPLES: usize = 1 << 28;
/// Maximum number of samples per channel that are decoded, including those before the start, which are dropped: 12
/// hours at 48 kHz.
const MAX_DECODED_SAMPLES: usize = 1 << 31;
/// Maximum priming in seconds. If a track's first packet is at the start of the file, and its first decoded sample is
/// less than this time later, the delay is the decoder's priming and not silence.
pub(super) const MAX_PRIMING: f64 = 0.2;
/// Sample rate in Hz up to which an AAC track may use spectral band replication (SBR): the stated rate is then half the
/// actual rate. The built-in decoders do not support SBR and decode only the lower half of the spectrum.
const MAX_SBR_RATE: u32 = 24_000;

/// Lossy codecs, whose decoded audio has extra samples at the start or the end that must be trimmed.
const LOSSY: [AudioCodecId; 5] = [CODEC_ID_AAC, CODEC_ID_MP1, CODEC_ID_MP2, CODEC_ID_MP3, CODEC_ID_VORBIS];

/// Codecs whose packets in MP4 files ffmpeg reads unchanged. For other codecs (PCM, ADPCM), ffmpeg combines samples
/// into larger packets; if an edit list ends within such a packet, ffmpeg decodes the packet completely.
const LONG_PACKETS: [AudioCodecId; 6] =
    [CODEC_ID_AAC, CODEC_ID_ALAC, CODEC_ID_FLAC, CODEC_ID_MP1, CODEC_ID_MP2, CODEC_ID_MP3];

/// Result of the built-in decoders.
pub(super) struct BuiltinSound {
    /// The decoded part. `None`: the file has no audio.
    pub(super) part: Option<SoundPart>,
    /// Reason why the audio may be incomplete. `None`: it is complete.
    pub(super) incompleteness: Option<Incompleteness>,
}

/// Reason why decoded audio may be incomplete.
#[derive(Debug, PartialEq)]
pub(super) enum Incompleteness {
    /// Nothing in the file confirms that the audio is complete.
    Unconfirmed,
    /// The built-in decoders read only a part of the file, which the value describes.
    IgnoredEdits(String),
    /// The file states a different length or is truncated; the value says which.
    Contradicted(String),
}

impl Incompleteness {
    fn broken_off() -> Self {
        Incompleteness::Contradicted("the file is truncated".into())
    }
}

/// Reads the audio of a file.
///
/// # Errors
/// Returns an error if the built-in decoders do not support the format, or if the file is damaged.
pub(super) fn read_file(path: &Path, wanted: SoundRange) -> Result<BuiltinSound, SoundFault> {
    let mut hint = Hint::new();
    if let Some(extension) = path.extension().and_then(|e| e.to_str()) {
        hint.with_extension(extension);
    }
    let mut file = File::open(path)?;
    if !has_known_head(&mut file)? {
        return Err(Reason::Unsupported("container").into());
    }
    let sound = mp4_sound(path)?;
    let ignored_edits = sound.as_ref().and_then(Mp4Sound::ignored_edits_warning).map(Incompleteness::IgnoredEdits);
    // symphonia treats a truncated fragment as the end of the file.
    let is_cut = sound.is_some() && is_cut(path)?;
    let BuiltinSound { part, incompleteness } =
        decode(Box::new(file), &hint, sound.map_or(TimingSource::Packets, TimingSource::Mp4), wanted)?;
    Ok(BuiltinSound {
        part,
        incompleteness: is_cut.then(Incompleteness::broken_off).or(ignored_edits).or(incompleteness),
    })
}

/// Returns whether a file starts with the signature of a supported format. Without this check, symphonia would search
/// further and might find a signature by chance in the compressed audio of an unsupported format.
fn has_known_head(file: &mut File) -> std::io::Result<bool> {
    let mut start = 0;
    let mut head = [0; 16];
    // A file may start with several ID3 tags.
    for _ in 0..8 {
        file.seek(SeekFrom::Start(start))?;
        head.fill(0);
        file.by_ref().take(16).read_exact(&mut head).or_else(|e| match e.kind() {
            ErrorKind::UnexpectedEof => Ok(()),
            _ => Err(e),
        })?;
        if !head.starts_with(b"ID3") {
            break;
        }
        // The tag size has seven bits per byte and excludes the header of ten bytes. A flag indicates a footer of
        // another ten bytes.
        let size = head[6..10].iter().fold(0, |sum, byte| sum << 7 | u64::from(byte & 0x7f));
        start += 10 + size + if head[5] & 0x10 != 0 { 10 } else { 0 };
    }
    file.rewind()?;
    let form = |name: &[u8], kinds: &[&[u8; 4]]| head.starts_with(name) && kinds.iter().any(|k| head[8..12] == k[..]);
    let plain: [&[u8]; 4] = [b"caff", b"fLaC", b"OggS", b"\x1a\x45\xdf\xa3"];
    let boxes: [&[u8]; 6] = [b"ftyp", b"moov", b"wide", b"free", b"skip", b"mdat"];
    // MPEG audio has eleven sync bits and a non-zero layer; an ADTS header has twelve sync bits and layer zero.
    let is_mpeg = head[0] == 0xff && head[1] & 0xe0 == 0xe0 && (head[1] & 0x06 != 0 || head[1] & 0xf0 == 0xf0);
    Ok(form(b"RIFF", &[b"WAVE"])
        || form(b"FORM", &[b"AIFF", b"AIFC"])
        || plain.iter().any(|name| head.starts_with(name))
        || boxes.iter().any(|name| &head[4..8] == *name)
        || is_mpeg)
}

/// Source of a track's timing.
pub(super) enum TimingSource {
    /// The timestamps of the track's packets.
    Packets,
    Mp4(Mp4Sound),
    /// A known timing. The input is ffmpeg's output, which must be read to the end.
    Piped(Edit),
}

impl TimingSource {
    /// Selects the track to decode. In an MP4 it is the track that [`mp4_sound`] selected; otherwise the first default
    /// audio track, or else the first audio track.
    ///
    /// # Errors
    /// Returns an error if a default track has an unknown codec, because it may be the audio track.
    fn track<'a>(&self, format: &'a dyn FormatReader) -> Result<Option<&'a Track>, SoundFault> {
        let tracks = format.tracks();
        if let TimingSource::Mp4(sound) = self {
            let track = tracks.iter().find(|track| track.id == sound.track && is_sound(track));
            return Ok(Some(track.ok_or(Reason::Unsupported("codec"))?));
        }
        if let Some(track) = tracks.iter().find(|track| is_default(track) && is_sound(track)) {
            return Ok(Some(track));
        }
        match tracks.iter().find(|track| is_sound(track)) {
            Some(_) if tracks.iter().any(|track| is_default(track) && track.codec_params.is_none()) => {
                Err(Reason::Unsupported("codec").into())
            }
            first => Ok(first),
        }
    }

    /// Returns the time in seconds at which reading of the track stops. `None`: all packets are read.
    fn end(&self, codec: &AudioCodecParameters) -> Option<f64> {
        match self {
            TimingSource::Mp4(sound) => sound.end(LONG_PACKETS.contains(&codec.codec)),
            TimingSource::Packets | TimingSource::Piped(_) => None,
        }
    }

    /// Returns whether ffmpeg would skip the same samples at the start of the track as the built-in decoders. ffmpeg
    /// treats ticks of the track as samples, and does not skip the priming of a fragmented track.
    fn is_sure(&self, codec: &AudioCodecParameters) -> bool {
        let TimingSource::Mp4(sound) = self else { return true };
        let counts_samples = codec.sample_rate.is_some_and(|rate| f64::from(rate) == sound.timescale);
        sound.edit.skipped() == 0.0 || (counts_samples && !sound.is_fragmented)
    }

    /// Returns the timing of a track. `own` is the time of the track's first packet, `sample` that of its first decoded
    /// sample, and `first` that of the file's first packet, in seconds. The timing counts from second `zero`; if `zero`
    /// is `None`, from the start of the file.
    fn edit(&self, own: f64, sample: f64, first: f64, zero: Option<f64>) -> Edit {
        let (edit, start) = match self {
            TimingSource::Packets => {
                let start = zero_of(first);
                let is_priming =
                    zero.is_none() && own <= start + 0.001 && (0.0..MAX_PRIMING).contains(&(sample - start));
                (Edit::starting_at(if is_priming { start } else { sample }), start)
            }
            TimingSource::Mp4(sound) => (sound.edit, sound.zero),
            TimingSource::Piped(edit) => (*edit, 0.0),
        };
        edit.counted_from(zero.unwrap_or(start))
    }
}

fn is_sound(track: &Track) -> bool {
    matches!(track.codec_params, Some(CodecParameters::Audio(_)))
}

fn is_default(track: &Track) -> bool {
    track.flags.contains(TrackFlags::DEFAULT)
}

/// Returns the time in seconds of a packet's first decoded sample.
fn time_of(packet: &Packet, tracks: &[Track]) -> f64 {
    let base = tracks.iter().find(|track| track.id == packet.track_id).and_then(|track| track.time_base);
    let ticks = packet.pts.get() as f64 + packet.trim_start.get() as f64;
    base.map_or(0.0, |base| ticks * f64::from(base.numer.get()) / f64::from(base.denom.get()))
}

/// Properties that a file states about its audio. They are used to verify that the decoded audio is complete.
struct StatedAudio {
    /// Number of samples per channel in all packets. `None`: not stated, or only estimated by symphonia's reader.
    samples: Option<u64>,
    /// Whether symphonia's reader skips data that it cannot parse, so that the packets' samples must be counted.
    is_counted: bool,
    /// Whether packets carry timestamps in samples.
    is_timed: bool,
    /// Whether the file does not state its length, for example because it was written to a pipe.
    is_open: bool,
    /// Whether the built-in decoders support the codec completely and the selected track is unambiguous.
    is_sure: bool,
    /// Whether ffmpeg reads the same packets as symphonia's MP4 reader.
    has_long_packets: bool,
    /// Timestamp, in samples, of the first packet for which symphonia's trimming at the end of packets is ignored.
    /// `None`: the trimming always applies.
    end_of_trims: Option<i64>,
}

impl StatedAudio {
    fn from_track(
        format: &dyn FormatReader,
        track: &Track,
        codec: &AudioCodecParameters,
        place: &TimingSource,
    ) -> Self {
        let id = format.format_info().format;
        let is_open = [FORMAT_ID_WAVE, FORMAT_ID_AIFF, FORMAT_ID_CAF, FORMAT_ID_FLAC].contains(&id);
        let is_halved = codec.codec == CODEC_ID_AAC && codec.sample_rate.is_none_or(|rate| rate <= MAX_SBR_RATE);
        let samples = track.num_frames;
        let is_open = is_open && samples.is_none();
        let is_sure = !is_halved && place.is_sure(codec);
        let claim = StatedAudio {
            samples,
            is_counted: false,
            is_timed: false,
            is_open,
            is_sure,
            has_long_packets: LONG_PACKETS.contains(&codec.codec),
            end_of_trims: None,
        };
        match id {
            FORMAT_ID_MP1 | FORMAT_ID_MP2 | FORMAT_ID_MP3 => {
                // LAME's tag contains delay and padding. Without the tag, the sample count may be an estimate.
                let whole = samples.zip(track.delay).zip(track.padding).map(|((samples, delay), padding)| {
                    (samples + u64::from(delay) + u64::from(padding), samples + u64::from(padding))
                });
                let (samples, end) = whole.unzip();
                let end_of_trims = Some(end.map_or(i64::MIN, |end| end as i64));
                StatedAudio { samples, is_counted: true, end_of_trims, ..claim }
            }
            FORMAT_ID_FLAC => StatedAudio { is_counted: true, is_timed: true, ..claim },
            FORMAT_ID_OGG => StatedAudio { is_counted: true, ..claim },
            FORMAT_ID_ADTS => StatedAudio { samples: None, is_counted: true, ..claim },
            FORMAT_ID_ISOMP4 => StatedAudio { samples: None, ..claim },
            FORMAT_ID_MKV => {
                // symphonia ignores DiscardPadding (samples of a lossy codec to trim at the end). It also treats tracks
                // that omit FlagDefault as not default, although the specified default is 1.
                let is_lossy = LOSSY.contains(&codec.codec);
                let mut sounds = format.tracks().iter().filter(|track| is_sound(track));
                let is_clear = sounds.next().is_none_or(is_default) || sounds.next().is_none();
                StatedAudio { is_sure: !is_lossy && is_clear, ..claim }
            }
            _ => claim,
        }
    }

    /// Undoes symphonia's trimming at the end of a packet if the trimming is based on an estimated length, or if the
    /// stated length has already been reached.
    fn correct(&self, packet: &mut Packet) {
        if self.end_of_trims.is_some_and(|end| packet.pts.get() >= end) {
            packet.trim_end = Duration::ZERO;
        }
    }

    /// Returns the reason why the decoded audio may be incomplete; `None` if it is complete. `counted` is the number of
    /// samples in the packets, and `span` the number of samples that the packets' timestamps cover.
    fn incompleteness(&self, counted: u64, span: u64, end: End) -> Option<Incompleteness> {
        let missing = |counted: u64, all: u64| {
            Some(Incompleteness::Contradicted(format!("{} of {all} samples are missing", all - counted)))
        };
        match (end, self.samples) {
            _ if !self.is_sure => Some(Incompleteness::Unconfirmed),
            (End::Verified, _) => None,
            (End::Edited, _) => (!self.has_long_packets).then_some(Incompleteness::Unconfirmed),
            (End::Cut, _) if self.is_open => Some(Incompleteness::Unconfirmed),
            (End::Cut, _) => Some(Incompleteness::broken_off()),
            _ if !self.is_counted => None,
            _ if self.is_timed && counted < span => missing(counted, span),
            (_, Some(claimed)) if counted < claimed => missing(counted, claimed),
            (_, Some(claimed)) if counted == claimed => None,
            _ => Some(Incompleteness::Unconfirmed),
        }
    }
}

/// Position at which reading of a file's packets ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Reading ended at the regular end of the file.
    Regular,
    /// Reading ended before the regular end: the file is truncated, or its other packets cannot be read.
    Cut,
    /// Reading ended at the end of the file, with a valid checksum over all samples.
    Verified,
    /// Reading ended at the end of the edit list.
    Edited,
}

/// Collector of the samples of decoded packets.
struct SampleCollector {
    place: TimingSource,
    wanted: SoundRange,
    form: Option<(u32, Channels)>,
    planes: Vec<Vec<f32>>,
    /// Number of samples per channel before the requested start, which have been dropped.
    dropped: usize,
    edit: Option<Edit>,
    /// Time of the file's first packet in seconds.
    first: f64,
    /// Time of the track's first packet in seconds.
    own: f64,
    /// Whether all samples of the requested part have been decoded.
    is_complete: bool,
}

impl SampleCollector {
    fn new(place: TimingSource, wanted: SoundRange) -> Self {
        SampleCollector {
            place,
            wanted,
            form: None,
            planes: Vec::new(),
            dropped: 0,
            edit: None,
            first: f64::INFINITY,
            own: f64::INFINITY,
            is_complete: false,
        }
    }

    /// Adds the samples of a packet whose first sample is at second `time`.
    fn push(&mut self, samples: &GenericAudioBufferRef, time: f64) -> Result<(), SoundFault> {
        let SoundRange { zero, start, end } = self.wanted;
        let (rate, channels) = (samples.spec().rate(), samples.spec().channels().clone());
        match &self.form {
            None if !RATES.contains(&rate) => return Err(SoundFault::Rate(rate)),
            None => self.form = Some((rate, channels)),
            Some(known) if *known == (rate, channels) => {}
            Some(_) => {
                return Err(Reason::DecodeError("the sample rate or channel count changes within the file").into());
            }
        }
        self.own = self.own.min(time);
        let planes = &mut self.planes;
        let mut own: Vec<Vec<f32>> = Vec::new();
        samples.copy_to_vecs_planar(&mut own);
        planes.resize_with(own.len(), Vec::new);
        planes.iter_mut().zip(own).for_each(|(all, own)| all.extend(own));
        let kept = planes.first().map_or(0, Vec::len);
        if kept == 0 && self.dropped == 0 {
            return Ok(());
        }
        let edit = *self.edit.get_or_insert_with(|| self.place.edit(self.own, time, self.first, zero));
        if end.is_none() && edit.gap(end) > MAX_SILENCE {
            return Err(SoundFault::LateStart(edit.gap(end)));
        }
        let unheard = edit.before(start, rate, end).saturating_sub(self.dropped).min(kept);
        planes.iter_mut().for_each(|plane| drop(plane.drain(..unheard)));
        self.dropped += unheard;
        let decoded = self.dropped + kept - unheard;
        if (kept - unheard).saturating_mul(planes.len()) > MAX_KEPT_SAMPLES || decoded > MAX_DECODED_SAMPLES {
            return Err(SoundFault::TooLong);
        }
        let wanted = end.map(|end| ((end + edit.skipped()) * f64::from(rate)).ceil() as usize);
        self.is_complete = wanted.is_some_and(|wanted| !planes.is_empty() && decoded >= wanted);
        Ok(())
    }

    /// Returns the audible part of the samples. `None`: no samples were decoded.
    fn finish(mut self) -> Result<Option<SoundPart>, SoundFault> {
        let SoundRange { start, end, .. } = self.wanted;
        let Some((rate, channels)) = self.form else { return Ok(None) };
        if self.planes.iter().flatten().any(|sample| !sample.is_finite()) {
            return Err(SoundFault::NotFinite);
        }
        let edit = self.edit.unwrap_or(Edit::starting_at(0.0));
        let length = edit.apply(&mut self.planes, rate, start, end, self.dropped);
        let sound = Audio::new(stereo(self.planes, &channels), rate);
        let sound = sound.map_err(|_| Reason::DecodeError("no channel, or a rate of 0"))?;
        Ok(Some(SoundPart { sound, length: length as f64 / f64::from(rate), damage: None }))
    }
}

/// Decodes the audio of an open file.
///
/// # Errors
/// Fails for the same reasons as [`read_file`].
pub(super) fn decode(
    source: Box<dyn MediaSource>,
    hint: &Hint,
    place: TimingSource,
    wanted: SoundRange,
) -> Result<BuiltinSound, SoundFault> {
    let source = MediaSourceStream::new(source, Default::default());
    let mut format = get_probe().probe(hint, source, FormatOptions::default(), MetadataOptions::default())?;
    let Some(track) = place.track(&*format)? else { return Ok(BuiltinSound { part: None, incompleteness: None }) };
    let codec = track.codec_params.as_ref().and_then(|codec| codec.audio());
    let codec = codec.ok_or(Reason::Unsupported("codec"))?;
    let claim = StatedAudio::from_track(&*format, track, codec, &place);
    let end_of_edit = place.end(codec);
    let mut decoder = get_codecs().make_audio_decoder(codec, &AudioDecoderOptions::default().verify(true))?;
    let track = track.id;
    let reads_to_end = claim.is_counted || matches!(place, TimingSource::Piped(_));
    let mut decoded = SampleCollector::new(place, wanted);
    let (mut counted, mut span) = (0, None::<[i64; 2]>);
    let end = loop {
        let mut packet = match format.next_packet() {
            Ok(Some(packet)) => packet,
            Ok(None) => break End::Regular,
            // The remaining packets are only counted, so a failure among them is not an error.
            Err(_) if decoded.is_complete => break End::Cut,
            // A file that was written to a pipe states no length, so it may end anywhere.
            Err(Reason::IoError(e)) if e.kind() == ErrorKind::UnexpectedEof && decoded.form.is_some() => {
                break End::Cut;
            }
            Err(error) => return Err(error.into()),
        };
        let time = time_of(&packet, format.tracks());
        decoded.first = decoded.first.min(time);
        if packet.track_id != track {
            continue;
        }
        if end_of_edit.is_some_and(|end| time >= end) {
            break End::Edited;
        }
        counted += packet.dur.get();
        let start = packet.pts.get();
        let end = start.saturating_add_unsigned(packet.dur.get());
        span = Some(span.map_or([start, end], |[first, last]| [first, last.max(end)]));
        if decoded.is_complete {
            continue;
        }
        claim.correct(&mut packet);
        decoded.push(&decoder.decode(&packet)?, time)?;
        if decoded.is_complete && !reads_to_end {
            break End::Regular;
        }
    };
    let verified = if decoded.is_complete || end != End::Regular { None } else { decoder.finalize().verify_ok };
    let end = match verified {
        // Formats with a checksum over all samples reveal frames that were skipped.
        Some(false) => return Err(Reason::DecodeError("samples are missing").into()),
        Some(true) => End::Verified,
        None => end,
    };
    let span = span.map_or(0, |[first, last]| last.abs_diff(first));
    let part = decoded.finish()?;
    let incompleteness = claim.incompleteness(counted, span, end);
    // The track may have samples that the reader cannot find, so an empty result is unconfirmed.
    let incompleteness =
        if part.is_none() { incompleteness.or(Some(Incompleteness::Unconfirmed)) } else { incompleteness };
    Ok(BuiltinSound { part, incompleteness })
}
