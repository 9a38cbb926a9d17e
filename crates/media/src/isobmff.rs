//! MP4 muxer: writes one `moov` box before one `mdat` box, which interleaves chunks of all tracks.
//!
//! Box layouts follow ISO/IEC 14496-12 (boxes), -14 (`esds`) and -15 (`avcC`).

use std::io::{self, Write};

use super::error::{Error, Result};
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

pub(super) struct Track {
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

impl Track {
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
/// Returns [`Error::Container`] if the file format cannot hold the clip. `failed` converts a write error.
pub(super) fn write(tracks: &[&Track], out: &mut impl Write, failed: impl FnOnce(io::Error) -> Error) -> Result<()> {
    // With audio, the movie's time scale is the audio rate, so that the audio's duration is exact.
    let Some(timescale) = tracks.last().map(|t| t.timescale) else {
        return Err(Error::Container("no tracks".into()));
    };
    let chunks = interleave(tracks);
    let payload: u64 = tracks.iter().map(|t| t.samples.bytes(0..t.samples.len())).sum();
    // Offsets have a fixed width, so the size of `moov` does not depend on their values: write it once to get the size.
    let header = |start: u64| -> Result<Vec<u8>> {
        let mut out = Out(Vec::new());
        out.nest(b"ftyp", |o| {
            o.0.extend(b"isom");
            o.u32(0x200);
            o.0.extend(b"isomiso2avc1mp41");
            Ok(())
        })?;
        moov(&mut out, tracks, &chunks, timescale, start)?;
        Ok(out.0)
    };
    let start = header(0)?.len() as u64 + 8;
    let mut head = header(start)?;
    head.extend(fits(payload + 8, "the encoded clip is over 4 GiB")?.to_be_bytes());
    head.extend(b"mdat");
    let mut all = || {
        out.write_all(&head)?;
        chunks.iter().try_for_each(|chunk| tracks[chunk.track].samples.write(chunk.samples.clone(), out))
    };
    all().map_err(failed)
}

/// Splits the tracks into interleaved chunks of half a second, so that players read forward without seeking.
fn interleave(tracks: &[&Track]) -> Vec<Chunk> {
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

fn fits(value: u64, what: &str) -> Result<u32> {
    u32::try_from(value).map_err(|_| Error::Container(what.to_string()))
}

/// Converts ticks between time scales and rounds to the nearest tick.
fn rescale(ticks: u64, from: u32, to: u32) -> Result<u32> {
    let scaled = (u128::from(ticks) * u128::from(to) + u128::from(from) / 2) / u128::from(from);
    fits(u64::try_from(scaled).unwrap_or(u64::MAX), "the clip is too long")
}

struct Out(Vec<u8>);

impl Out {
    fn u8(&mut self, v: u8) {
        self.0.push(v);
    }
    fn u16(&mut self, v: u16) {
        self.0.extend(v.to_be_bytes());
    }
    fn u32(&mut self, v: u32) {
        self.0.extend(v.to_be_bytes());
    }
    fn zeros(&mut self, n: usize) {
        self.0.resize(self.0.len() + n, 0);
    }

    /// Writes a box; the closure writes its body.
    fn nest(&mut self, kind: &[u8; 4], body: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let at = self.0.len();
        self.u32(0);
        self.0.extend(kind);
        body(self)?;
        let size = fits((self.0.len() - at) as u64, "a box is over 4 GiB")?;
        self.0[at..at + 4].copy_from_slice(&size.to_be_bytes());
        Ok(())
    }

    /// Writes a full box (a box with version and flags) of version 0.
    fn full(&mut self, kind: &[u8; 4], flags: u32, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.nest(kind, |o| {
            o.u32(flags);
            body(o)
        })
    }

    /// Writes the identity matrix, which `mvhd` and `tkhd` contain.
    fn matrix(&mut self) {
        for v in [0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x4000_0000] {
            self.u32(v);
        }
    }
}

fn moov(out: &mut Out, tracks: &[&Track], chunks: &[Chunk], timescale: u32, start: u64) -> Result<()> {
    let mut longest = 0;
    for track in tracks {
        longest = longest.max(rescale(track.shown(), track.timescale, timescale)?);
    }
    out.nest(b"moov", |o| {
        o.full(b"mvhd", 0, |o| {
            o.zeros(8); // creation and modification times: unset, so that equal clips give equal files
            o.u32(timescale);
            o.u32(longest);
            o.u32(0x10000); // rate 1
            o.u16(0x100); // volume 1
            o.zeros(10);
            o.matrix();
            o.zeros(24);
            o.u32(tracks.len() as u32 + 1);
            Ok(())
        })?;
        for index in 0..tracks.len() {
            trak(o, tracks, index, chunks, timescale, start)?;
        }
        Ok(())
    })
}

fn trak(out: &mut Out, tracks: &[&Track], index: usize, chunks: &[Chunk], timescale: u32, start: u64) -> Result<()> {
    let track = tracks[index];
    let shown = rescale(track.shown(), track.timescale, timescale)?;
    out.nest(b"trak", |o| {
        // Flags: the track is enabled (1) and used in the movie (2).
        o.full(b"tkhd", 3, |o| {
            o.zeros(8);
            o.u32(index as u32 + 1);
            o.zeros(4);
            o.u32(shown);
            o.zeros(8);
            o.u16(0); // layer
            let (group, volume, width, height) = match track.media {
                Media::H264 { width, height, .. } => (0, 0, width, height),
                Media::Aac { .. } => (1, 0x100, 0, 0),
            };
            o.u16(group);
            o.u16(volume);
            o.u16(0);
            o.matrix();
            o.u32(u32::from(width) << 16);
            o.u32(u32::from(height) << 16);
            Ok(())
        })?;
        if track.skip > 0 {
            o.nest(b"edts", |o| {
                o.full(b"elst", 0, |o| {
                    o.u32(1);
                    o.u32(shown);
                    o.u32(track.skip);
                    o.u32(0x10000);
                    Ok(())
                })
            })?;
        }
        o.nest(b"mdia", |o| {
            let decoded = fits(track.decoded(), "the clip is too long")?;
            o.full(b"mdhd", 0, |o| {
                o.zeros(8);
                o.u32(track.timescale);
                o.u32(decoded);
                o.u16(0x55C4); // language "und"
                o.u16(0);
                Ok(())
            })?;
            let (handler, name): (&[u8; 4], &[u8]) = match track.media {
                Media::H264 { .. } => (b"vide", b"VideoHandler\0"),
                Media::Aac { .. } => (b"soun", b"SoundHandler\0"),
            };
            o.full(b"hdlr", 0, |o| {
                o.zeros(4);
                o.0.extend(handler);
                o.zeros(12);
                o.0.extend(name);
                Ok(())
            })?;
            o.nest(b"minf", |o| {
                match track.media {
                    Media::H264 { .. } => o.full(b"vmhd", 1, |o| {
                        o.zeros(8);
                        Ok(())
                    })?,
                    Media::Aac { .. } => o.full(b"smhd", 0, |o| {
                        o.zeros(4);
                        Ok(())
                    })?,
                }
                o.nest(b"dinf", |o| {
                    o.full(b"dref", 0, |o| {
                        o.u32(1);
                        // Flag 1: the samples are in this file.
                        o.full(b"url ", 1, |_| Ok(()))
                    })
                })?;
                stbl(o, tracks, index, chunks, start)
            })
        })
    })
}

fn stbl(out: &mut Out, tracks: &[&Track], index: usize, chunks: &[Chunk], start: u64) -> Result<()> {
    let track = tracks[index];
    let count = track.samples.len() as u32;
    out.nest(b"stbl", |o| {
        o.full(b"stsd", 0, |o| {
            o.u32(1);
            sample_entry(o, track)
        })?;
        o.full(b"stts", 0, |o| {
            if count == 1 || track.delta == track.last_delta {
                o.u32(1);
                o.u32(count);
                o.u32(track.last_delta);
            } else {
                o.u32(2);
                o.u32(count - 1);
                o.u32(track.delta);
                o.u32(1);
                o.u32(track.last_delta);
            }
            Ok(())
        })?;
        if let Some(sync) = &track.sync {
            o.full(b"stss", 0, |o| {
                o.u32(sync.len() as u32);
                for &sample in sync {
                    o.u32(sample as u32 + 1);
                }
                Ok(())
            })?;
        }
        // Runs of chunks with equal sample counts, and the file offset of each chunk.
        let mut runs: Vec<(u32, u32)> = Vec::new();
        let mut offsets = Vec::new();
        let mut at = start;
        for chunk in chunks {
            if chunk.track == index {
                let samples = chunk.samples.len() as u32;
                offsets.push(fits(at, "the encoded clip is over 4 GiB")?);
                if runs.last().is_none_or(|&(_, n)| n != samples) {
                    runs.push((offsets.len() as u32, samples));
                }
            }
            at += tracks[chunk.track].samples.bytes(chunk.samples.clone());
        }
        o.full(b"stsc", 0, |o| {
            o.u32(runs.len() as u32);
            for (first, samples) in runs {
                o.u32(first);
                o.u32(samples);
                o.u32(1);
            }
            Ok(())
        })?;
        o.full(b"stsz", 0, |o| {
            o.u32(0);
            o.u32(count);
            track.samples.sizes().for_each(|size| o.u32(size));
            Ok(())
        })?;
        o.full(b"stco", 0, |o| {
            o.u32(offsets.len() as u32);
            for offset in offsets {
                o.u32(offset);
            }
            Ok(())
        })
    })
}

fn sample_entry(out: &mut Out, track: &Track) -> Result<()> {
    match &track.media {
        Media::H264 { width, height, sps, pps } => out.nest(b"avc1", |o| {
            o.zeros(6);
            o.u16(1);
            o.zeros(16);
            o.u16(*width);
            o.u16(*height);
            o.u32(0x48_0000); // 72 dpi
            o.u32(0x48_0000);
            o.zeros(4);
            o.u16(1);
            o.zeros(32);
            o.u16(24);
            o.u16(0xFFFF);
            o.nest(b"avcC", |o| {
                let [profile, compatibility, level] = match sps.get(1..4) {
                    Some(&[a, b, c]) => [a, b, c],
                    _ => return Err(Error::Container("the sequence parameter set is truncated".into())),
                };
                o.0.extend([1, profile, compatibility, level, 0xFF, 0xE1]); // 4-byte lengths, one SPS
                o.u16(sps.len() as u16);
                o.0.extend(sps);
                o.u8(1);
                o.u16(pps.len() as u16);
                o.0.extend(pps);
                if profile >= 100 {
                    o.0.extend([0xFD, 0xF8, 0xF8, 0]); // 4:2:0, 8 bits, 8 bits, no SPS extensions
                }
                Ok(())
            })?;
            o.nest(b"colr", |o| {
                o.0.extend(b"nclx");
                for code in [1, 1, 1] {
                    o.u16(code); // BT.709 primaries, transfer, matrix
                }
                o.u8(0); // limited range
                Ok(())
            })?;
            o.nest(b"pasp", |o| {
                o.u32(1);
                o.u32(1);
                Ok(())
            })
        }),
        Media::Aac { channels, config } => out.nest(b"mp4a", |o| {
            o.zeros(6);
            o.u16(1);
            o.zeros(8);
            o.u16(*channels);
            o.u16(16);
            o.zeros(4);
            // The 16.16 fixed-point field cannot hold 88.2 and 96 kHz; readers take the rate from the
            // AudioSpecificConfig.
            o.u32(u16::try_from(track.timescale).map_or(0, |rate| u32::from(rate) << 16));
            o.full(b"esds", 0, |o| {
                esds(o, track, config);
                Ok(())
            })
        }),
    }
}

/// Writes the MPEG-4 descriptors of an AAC stream. Every length is below 128, so it takes one byte.
fn esds(out: &mut Out, track: &Track, config: &[u8]) {
    let bytes = track.samples.bytes(0..track.samples.len());
    let largest = u64::from(track.samples.sizes().max().unwrap_or(0));
    let rate = |bytes: u64, ticks: u64| (bytes * 8 * u64::from(track.timescale) / ticks.max(1)) as u32;
    let config_len = config.len() as u8;
    out.0.extend([0x03, 3 + 2 + 13 + 2 + config_len + 3, 0, 0, 0]); // ES descriptor, ES_ID 0: the track ID applies
    out.0.extend([0x04, 13 + 2 + config_len, 0x40, 0x15]); // decoder config: MPEG-4 audio, audio stream
    out.0.extend(&(largest as u32).to_be_bytes()[1..]);
    out.u32(rate(largest, u64::from(track.delta)));
    out.u32(rate(bytes, track.decoded()));
    out.0.extend([0x05, config_len]);
    out.0.extend(config);
    out.0.extend([0x06, 1, 2]);
}
