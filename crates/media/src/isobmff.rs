//! MP4 muxer: writes one `moov` box before one `mdat` box, which interleaves chunks of all tracks.

use std::io::{self, Write};

use mp4_atom::{
    Audio, Avc1, Avcc, AvccExt, BufMut, Codec, Colr, Dinf, Dref, Edts, Elst, ElstEntry, Encode, Esds, Ftyp, Hdlr, Mdhd,
    Mp4a, Mvhd, Pasp, Smhd, Stco, Stsc, StscEntry, Stsd, Stss, Stsz, StszSamples, Stts, SttsEntry, Tkhd, Url, Visual,
    Vmhd, esds,
};

use super::error::{MediaError, Result};
use super::samples::Samples;

/// Codec of a track, with its configuration.
pub(super) enum Media {
    /// H.264 as length-prefixed NAL units: 4:2:0, 8 bits, BT.709 limited range.
    H264 {
        width: u16,
        height: u16,
        /// Sequence parameter set with its NAL header.
        sps: Vec<u8>,
        /// Picture parameter set with its NAL header.
        pps: Vec<u8>,
    },
    /// AAC as raw access units.
    Aac {
        channels: u16,
        /// AudioSpecificConfig (ISO/IEC 14496-3) as bytes.
        config: Vec<u8>,
    },
}

pub(super) struct Mp4Track {
    pub media: Media,
    /// Ticks per second.
    pub timescale: u32,
    /// Encoded samples in presentation order.
    pub samples: Samples,
    /// Duration in ticks of every sample except the last.
    pub delta: u32,
    /// Duration in ticks of the last sample.
    pub last_delta: u32,
    /// Indices of the samples that can be decoded independently. `None`: all samples.
    pub sync: Option<Vec<usize>>,
    /// Number of ticks at the start that are decoded but not presented (codec priming).
    pub skip: u32,
}

impl Mp4Track {
    /// Total duration of the decoded samples in ticks.
    fn decoded(&self) -> u64 {
        match self.samples.len() as u64 {
            0 => 0,
            n => (n - 1) * u64::from(self.delta) + u64::from(self.last_delta),
        }
    }

    fn shown(&self) -> u64 {
        self.decoded().saturating_sub(u64::from(self.skip))
    }
}

/// Consecutive samples of one track that are stored together.
struct Chunk {
    track: usize,
    samples: std::ops::Range<usize>,
}

/// Writes the file. Its duration is that of the longest track.
///
/// # Errors
/// Returns [`MediaError::Container`] if the file format cannot hold the clip. `failed` converts a write error.
pub(super) fn write(
    tracks: &[&Mp4Track],
    out: &mut impl Write,
    failed: impl FnOnce(io::Error) -> MediaError,
) -> Result<()> {
    // With audio, the movie's time scale is the audio rate, so that the audio's duration is exact.
    let Some(timescale) = tracks.last().map(|t| t.timescale) else {
        return Err(MediaError::Container("no tracks".into()));
    };
    let chunks = interleave(tracks);
    let payload: u64 = tracks.iter().map(|t| t.samples.bytes(0..t.samples.len())).sum();
    // Offsets have a fixed width, so the size of `moov` does not depend on their values: encode it once to get the size.
    let header = |start: u64| -> Result<Vec<u8>> {
        let mut header = Vec::new();
        encode_header(&mut header, tracks, &chunks, timescale, start)
            .map_err(|e| MediaError::Container(e.to_string()))?;
        Ok(header)
    };
    let start = header(0)?.len() as u64 + 8;
    if start + payload > u64::from(u32::MAX) {
        return Err(MediaError::Container(
            "the encoded video exceeds the limit of 4 GiB; generate a shorter or smaller video".into(),
        ));
    }
    let mut head = header(start)?;
    head.extend((payload as u32 + 8).to_be_bytes());
    head.extend(b"mdat");
    let mut all = || {
        out.write_all(&head)?;
        chunks.iter().try_for_each(|chunk| tracks[chunk.track].samples.write(chunk.samples.clone(), out))
    };
    all().map_err(failed)
}

/// Splits the tracks into interleaved chunks of half a second, so that players read forward without seeking.
fn interleave(tracks: &[&Mp4Track]) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let mut next = vec![0; tracks.len()];
    let mut window = 1u64;
    while tracks.iter().zip(&next).any(|(t, &n)| n < t.samples.len()) {
        for (index, track) in tracks.iter().enumerate() {
            let first = next[index];
            let end = (window * u64::from(track.timescale)).div_ceil(2 * u64::from(track.delta.max(1))) as usize;
            let end = end.min(track.samples.len());
            if end > first {
                chunks.push(Chunk { track: index, samples: first..end });
                next[index] = end;
            }
        }
        window += 1;
    }
    chunks
}

/// Converts ticks between time scales and rounds to the nearest tick.
fn rescale(ticks: u64, from: u32, to: u32) -> u64 {
    ((u128::from(ticks) * u128::from(to) + u128::from(from) / 2) / u128::from(from)) as u64
}

/// Encodes the boxes before the samples, which begin at file offset `start`. ISO/IEC 14496-12, 6.2.3 recommends the
/// order of the boxes; mp4-atom's types for the outer boxes would write, for example, the edit list after the samples'
/// tables.
fn encode_header(
    out: &mut Vec<u8>,
    tracks: &[&Mp4Track],
    chunks: &[Chunk],
    timescale: u32,
    start: u64,
) -> mp4_atom::Result<()> {
    let compatible_brands = [b"isom", b"iso2", b"avc1", b"mp41"].map(Into::into).to_vec();
    Ftyp { major_brand: b"isom".into(), minor_version: 0x200, compatible_brands }.encode(out)?;
    out.encode_atom(b"moov", |out| {
        // Creation and modification times are unset, so that equal clips give equal files.
        let header = Mvhd {
            timescale,
            duration: tracks.iter().map(|t| rescale(t.shown(), t.timescale, timescale)).max().unwrap_or(0),
            rate: 1.into(),
            volume: 1.into(),
            next_track_id: tracks.len() as u32 + 1,
            ..Mvhd::default()
        };
        header.encode(out)?;
        (0..tracks.len()).try_for_each(|index| encode_track(out, tracks, index, chunks, timescale, start))
    })
}

fn encode_track(
    out: &mut Vec<u8>,
    tracks: &[&Mp4Track],
    index: usize,
    chunks: &[Chunk],
    timescale: u32,
    start: u64,
) -> mp4_atom::Result<()> {
    let track = tracks[index];
    let duration = rescale(track.shown(), track.timescale, timescale);
    let (handler, name, [width, height]) = match track.media {
        Media::H264 { width, height, .. } => (b"vide", "VideoHandler", [width, height]),
        Media::Aac { .. } => (b"soun", "SoundHandler", [0; 2]),
    };
    let is_sound = handler == b"soun";
    let track_header = Tkhd {
        track_id: index as u32 + 1,
        duration,
        alternate_group: is_sound.into(),
        enabled: true,
        in_movie: true,
        volume: u8::from(is_sound).into(),
        width: width.into(),
        height: height.into(),
        ..Tkhd::default()
    };
    let edit = ElstEntry { segment_duration: duration, media_time: Some(track.skip.into()), media_rate: 1.into() };
    let edits = (track.skip > 0).then(|| Edts { elst: Some(Elst { entries: vec![edit] }) });
    let media_header =
        Mdhd { timescale: track.timescale, duration: track.decoded(), language: "und".into(), ..Mdhd::default() };
    out.encode_atom(b"trak", |out| {
        track_header.encode(out)?;
        edits.encode(out)?;
        out.encode_atom(b"mdia", |out| {
            media_header.encode(out)?;
            Hdlr { handler: handler.into(), name: name.into() }.encode(out)?;
            out.encode_atom(b"minf", |out| {
                match is_sound {
                    true => Smhd::default().encode(out)?,
                    false => Vmhd::default().encode(out)?,
                }
                Dinf { dref: Dref { entries: vec![Url::default().into()] } }.encode(out)?;
                out.encode_atom(b"stbl", |out| encode_tables(out, tracks, index, chunks, start))
            })
        })
    })
}

fn encode_tables(
    out: &mut Vec<u8>,
    tracks: &[&Mp4Track],
    index: usize,
    chunks: &[Chunk],
    start: u64,
) -> mp4_atom::Result<()> {
    let track = tracks[index];
    Stsd { codecs: vec![codec(track)?] }.encode(out)?;
    let run = |sample_count, sample_delta| SttsEntry { sample_count, sample_delta };
    let entries = match track.samples.len() as u32 {
        count if count == 1 || track.delta == track.last_delta => vec![run(count, track.last_delta)],
        count => vec![run(count - 1, track.delta), run(1, track.last_delta)],
    };
    Stts { entries }.encode(out)?;
    let sync = track.sync.as_ref().map(|sync| Stss { entries: sync.iter().map(|n| *n as u32 + 1).collect() });
    sync.encode(out)?;
    // Runs of chunks with equal sample counts, and the file offset of each chunk.
    let mut runs: Vec<StscEntry> = Vec::new();
    let mut offsets = Vec::new();
    let mut at = start;
    for chunk in chunks {
        if chunk.track == index {
            let samples_per_chunk = chunk.samples.len() as u32;
            // `write` has checked that the offsets fit.
            offsets.push(at as u32);
            if runs.last().is_none_or(|run| run.samples_per_chunk != samples_per_chunk) {
                let first_chunk = offsets.len() as u32;
                runs.push(StscEntry { first_chunk, samples_per_chunk, sample_description_index: 1 });
            }
        }
        at += tracks[chunk.track].samples.bytes(chunk.samples.clone());
    }
    Stsc { entries: runs }.encode(out)?;
    Stsz { samples: StszSamples::Different { sizes: track.samples.sizes().collect() } }.encode(out)?;
    Stco { entries: offsets }.encode(out)
}

fn codec(track: &Mp4Track) -> mp4_atom::Result<Codec> {
    Ok(match &track.media {
        Media::H264 { width, height, sps, pps } => {
            let avcc = Avcc::new(sps, pps)?;
            // Profiles from High on state the chroma format and the bit depths: 4:2:0, 8 bits.
            let ext = (avcc.avc_profile_indication >= 100).then(AvccExt::default);
            Codec::Avc1(Avc1 {
                visual: Visual { data_reference_index: 1, width: *width, height: *height, ..Visual::default() },
                avcc: Avcc { ext, ..avcc },
                // BT.709 primaries, transfer and matrix; limited range.
                colr: Some(Colr::new(1, 1, 1, false)?),
                pasp: Some(Pasp::new(1, 1)?),
                ..Avc1::default()
            })
        }
        Media::Aac { channels, config } => {
            // The 16.16 fixed-point field cannot hold 88.2 and 96 kHz; readers take the rate from the
            // AudioSpecificConfig.
            let sample_rate = u16::try_from(track.timescale).unwrap_or(0).into();
            let audio = Audio { data_reference_index: 1, channel_count: *channels, sample_size: 16, sample_rate };
            Codec::Mp4a(Mp4a { audio, esds: esds(track, config), btrt: None, taic: None })
        }
    })
}

/// Returns the MPEG-4 descriptors of an AAC stream.
fn esds(track: &Mp4Track, config: &[u8]) -> Esds {
    let bytes = track.samples.bytes(0..track.samples.len());
    let largest = track.samples.sizes().max().unwrap_or(0);
    let [_, buffer_size @ ..] = largest.to_be_bytes();
    let rate = |bytes: u64, ticks: u64| (bytes * 8 * u64::from(track.timescale) / ticks.max(1)) as u32;
    let dec_config = esds::DecoderConfig {
        object_type_indication: 0x40, // MPEG-4 audio
        stream_type: 5,               // audio
        up_stream: 0,
        buffer_size_db: buffer_size.into(),
        max_bitrate: rate(largest.into(), track.delta.into()),
        avg_bitrate: rate(bytes, track.decoded()),
        dec_specific: Some(esds::DecoderSpecific { raw: config.into(), ..Default::default() }),
    };
    // ES_ID 0: the track ID applies.
    Esds { es_desc: esds::EsDescriptor { dec_config, ..Default::default() } }
}
