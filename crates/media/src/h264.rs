//! H.264 encoding with the built-in encoder.

use rusty_h264_common::YuvFrame;
use rusty_h264_encoder::{Encoder, EncoderConfig, Preset};

use super::error::{Error, Result};
use super::frames::Frames;
use super::isobmff::{Media, Track};
use super::rate::FrameRate;
use super::samples::Samples;
use super::yuv;
use ltx2_base::threads;

/// NAL unit types.
const IDR: u8 = 5;
const SPS: u8 = 7;
const PPS: u8 = 8;

/// Frames per group of pictures (GOP). GOPs are encoded in parallel; five seconds of video have about as many GOPs as a
/// host has cores. The size is fixed, so that equal frames give identical files on every machine.
pub(super) const GROUP: usize = 8;

/// Encodes `frames` into a track with a constant quantizer (0 best, 51 worst).
pub(super) fn encode(frames: &Frames, rate: FrameRate, quantizer: u8) -> Result<Track> {
    let encoder = FrameEncoder::new(frames.width(), frames.height(), rate, quantizer)?;
    let mut track = TrackBuilder::new(encoder, Samples::in_memory());
    track.add(&frames.iter().collect::<Vec<_>>())?;
    track.finish()
}

fn failed(message: String) -> Error {
    Error::Embedded { codec: "H.264", message }
}

/// Encoder for frames of one size, rate and quality.
pub(super) struct FrameEncoder {
    width: usize,
    height: usize,
    rate: FrameRate,
    config: EncoderConfig,
}

impl FrameEncoder {
    pub(super) fn new(width: usize, height: usize, rate: FrameRate, quantizer: u8) -> Result<Self> {
        let [even_width, even_height] = [width, height].map(yuv::even);
        if [even_width, even_height].iter().any(|size| u16::try_from(*size).is_err()) {
            return Err(failed(format!("frames of {even_width}x{even_height} are too large")));
        }
        Ok(FrameEncoder { width, height, rate, config: config(even_width, even_height, rate, quantizer) })
    }

    /// Encodes each frame to an access unit. The first frame starts a GOP.
    fn units(&self, frames: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        let [width, height] = [self.width, self.height].map(yuv::even);
        // GOPs are independent, so each core converts and encodes its own.
        let groups: Vec<&[&[u8]]> = frames.chunks(GROUP).collect();
        let encoded = threads::try_in_order(&groups, threads::cores(), |group| {
            let planes = group.iter().map(|rgb| {
                let yuv::Planes { y, u, v } = yuv::planes(rgb, self.width, self.height);
                YuvFrame { width, height, y, u, v }
            });
            Encoder::new(self.config.clone()).and_then(|e| e.encode_all(&planes.collect::<Vec<_>>()))
        });
        let units = encoded.map_err(|e| failed(e.to_string()))?.concat();
        match units.len() == frames.len() {
            true => Ok(units),
            false => Err(failed(format!("got {} access units for {} frames", units.len(), frames.len()))),
        }
    }
}

/// Builds a track from frames that arrive in pieces.
pub(super) struct TrackBuilder {
    encoder: FrameEncoder,
    samples: Samples,
    /// Parameter sets, from the first frame that contains them.
    sps: Option<Vec<u8>>,
    pps: Option<Vec<u8>>,
    /// Indices of frames that can be decoded independently.
    sync: Vec<usize>,
}

impl TrackBuilder {
    /// Starts an empty track; encoded frames are appended to `samples`.
    pub(super) fn new(encoder: FrameEncoder, samples: Samples) -> Self {
        TrackBuilder { encoder, samples, sps: None, pps: None, sync: Vec::new() }
    }

    /// Adds frames. The first one starts a GOP.
    ///
    /// # Errors
    /// Returns an error if the encoder fails or the samples cannot be written.
    pub(super) fn add(&mut self, frames: &[&[u8]]) -> Result<()> {
        let (rate, refs) = (self.encoder.rate, self.encoder.config.num_ref_frames);
        for unit in self.encoder.units(frames)? {
            let index = self.samples.len();
            let mut sample = Vec::with_capacity(unit.len() + 8);
            for nal in nal_units(&unit) {
                match nal[0] & 31 {
                    SPS => drop(self.sps.get_or_insert_with(|| with_video_usability(nal, rate, refs))),
                    PPS => drop(self.pps.get_or_insert_with(|| nal.to_vec())),
                    kind => {
                        if kind == IDR && self.sync.last() != Some(&index) {
                            self.sync.push(index);
                        }
                        sample.extend((nal.len() as u32).to_be_bytes());
                        sample.extend(nal);
                    }
                }
            }
            self.samples.push(&sample)?;
        }
        Ok(())
    }

    /// Returns the number of frames so far.
    pub(super) fn count(&self) -> usize {
        self.samples.len()
    }

    /// Returns the track. After [`TrackBuilder::add`] has failed, the track contains the frames before the failure.
    ///
    /// # Errors
    /// Returns an error if there are no frames.
    pub(super) fn finish(mut self) -> Result<Track> {
        // The list may contain the index of a frame that could not be written.
        self.sync.retain(|index| *index < self.samples.len());
        let (Some(sps), Some(pps)) = (self.sps, self.pps) else {
            return Err(failed("the stream contains no parameter sets".into()));
        };
        let (timescale, delta) = self.encoder.rate.timescale();
        // `FrameEncoder::new` has checked that the sizes fit in u16.
        let [width, height] = [self.encoder.width, self.encoder.height].map(|size| yuv::even(size) as u16);
        Ok(Track {
            media: Media::H264 { width, height, sps, pps },
            timescale,
            samples: self.samples,
            delta,
            last_delta: delta,
            sync: Some(self.sync),
            skip: 0,
        })
    }
}

fn config(width: usize, height: usize, rate: FrameRate, quantizer: u8) -> EncoderConfig {
    let fps = f64::from(rate.num) / f64::from(rate.den);
    let mut config = EncoderConfig::new(width, height);
    config.preset = Preset::Balanced;
    config.qp = quantizer.min(51);
    config.framerate = fps as f32;
    config.gop_size = GROUP as u32;
    config.min_keyint = config.min_keyint.min(config.gop_size);
    config.level_idc = level(width.div_ceil(16) * height.div_ceil(16), fps);
    config
}

/// Returns the lowest level that allows `macroblocks` macroblocks per frame at `fps` frames per second (H.264, table
/// The encoder raises the level if the picture size requires it.
fn level(macroblocks: usize, fps: f64) -> u8 {
    const MOST: [(u8, f64); 7] = [
        (30, 40_500.0),
        (31, 108_000.0),
        (32, 216_000.0),
        (40, 245_760.0),
        (42, 522_240.0),
        (50, 589_824.0),
        (51, 983_040.0),
    ];
    let wanted = macroblocks as f64 * fps;
    MOST.iter().find(|(_, most)| *most >= wanted).map_or(52, |&(level, _)| level)
}

/// Splits an Annex B byte stream into NAL units without start codes.
fn nal_units(stream: &[u8]) -> Vec<&[u8]> {
    let mut units = Vec::new();
    let mut start = None;
    let mut at = 0;
    while at + 3 <= stream.len() {
        if stream[at..at + 3] == [0, 0, 1] {
            if let Some(start) = start {
                units.push(&stream[start..at]);
            }
            start = Some(at + 3);
            at += 3;
        } else {
            at += 1;
        }
    }
    units.extend(start.map(|start| &stream[start..]));
    for unit in &mut units {
        // A NAL unit never ends in a zero byte: trailing zeros belong to the next start code.
        let end = unit.iter().rposition(|&b| b != 0).map_or(0, |last| last + 1);
        *unit = &unit[..end];
    }
    units.retain(|unit| !unit.is_empty());
    units
}

/// Adds video usability information (VUI) to a sequence parameter set: square pixels, BT.709 limited range, the frame
/// rate, and no picture reordering (without it, decoders would delay frames).
///
/// The encoder's parameter set ends with `vui_parameters_present_flag` = 0. If the flag is 1, returns the set
/// unchanged.
fn with_video_usability(nal: &[u8], rate: FrameRate, refs: u32) -> Vec<u8> {
    let mut raw: Vec<u8> = Vec::with_capacity(nal.len());
    for &byte in nal {
        // Drop emulation prevention bytes: the 3 in each sequence 0 0 3.
        if !(byte == 3 && raw.ends_with(&[0, 0])) {
            raw.push(byte);
        }
    }
    let mut bits = Bits(raw.iter().flat_map(|&byte| (0..8).rev().map(move |i| byte >> i & 1 == 1)).collect());
    // The last 1 bit is the stop bit; the VUI flag precedes it.
    let stop = bits.0.iter().rposition(|&b| b).unwrap_or(0);
    if stop == 0 || bits.0[stop - 1] {
        return nal.to_vec();
    }
    bits.0.truncate(stop - 1);
    bits.put(1, 1); // vui_parameters_present_flag
    bits.put(1, 1); // aspect_ratio_info_present_flag
    bits.put(1, 8); // 1:1
    bits.put(0, 1); // overscan_info_present_flag
    bits.put(1, 1); // video_signal_type_present_flag
    bits.put(5, 3); // video_format: unspecified
    bits.put(0, 1); // video_full_range_flag
    bits.put(1, 1); // colour_description_present_flag
    bits.put(0x01_01_01, 24); // BT.709 primaries, transfer, matrix
    bits.put(0, 1); // chroma_loc_info_present_flag: left
    bits.put(1, 1); // timing_info_present_flag
    bits.put(rate.den, 32);
    bits.put(2 * rate.num, 32); // ticks are fields
    bits.put(1, 1); // fixed_frame_rate_flag
    bits.put(0, 3); // no NAL or VCL HRD parameters, no pic_struct
    bits.put(1, 1); // bitstream_restriction_flag
    bits.put(1, 1); // motion_vectors_over_pic_boundaries_flag
    for value in [0, 0, 16, 16, 0, refs.max(1)] {
        // max_bytes_per_pic_denom and max_bits_per_mb_denom (0: unlimited), motion vector lengths, no reordering,
        // reference frames.
        bits.exp_golomb(value);
    }
    bits.put(1, 1); // stop bit
    bits.nal()
}

struct Bits(Vec<bool>);

impl Bits {
    fn put(&mut self, value: u32, count: u32) {
        self.0.extend((0..count).rev().map(|i| value >> i & 1 == 1));
    }

    fn exp_golomb(&mut self, value: u32) {
        let width = (value + 1).ilog2();
        self.put(0, width);
        self.put(value + 1, width + 1);
    }

    /// Returns the bytes. Inserts an emulation prevention byte 3 after two zeros if the next byte is below 4.
    fn nal(&self) -> Vec<u8> {
        let mut out: Vec<u8> = Vec::new();
        let mut zeros = 0;
        for byte in self.0.chunks(8) {
            let byte = byte.iter().enumerate().fold(0u8, |b, (i, &bit)| b | u8::from(bit) << (7 - i));
            if zeros >= 2 && byte < 4 {
                out.push(3);
                zeros = 0;
            }
            zeros = if byte == 0 { zeros + 1 } else { 0 };
            out.push(byte);
        }
        out
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn annex_b_is_split_at_start_codes() {
        let stream = [0, 0, 0, 1, 0x67, 1, 2, 0, 0, 1, 0x68, 3, 0, 0, 0, 1, 0x65, 0, 0, 3, 0, 9];
        assert_eq!(nal_units(&stream), [&[0x67, 1, 2][..], &[0x68, 3], &[0x65, 0, 0, 3, 0, 9]]);
    }

    #[test]
    fn emulation_prevention_bytes_are_inserted() {
        let mut bits = Bits(Vec::new());
        bits.put(0x0000_0001, 32);
        bits.put(0x8000_0000, 32);
        assert_eq!(bits.nal(), [0, 0, 3, 0, 1, 0x80, 0, 0, 3, 0].to_vec());
        let mut bits = Bits(Vec::new());
        for v in [0, 1, 2, 16] {
            bits.exp_golomb(v);
        }
        // 1 010 011 000010001
        assert_eq!(bits.nal(), [0b1010_0110, 0b0001_0001]);
    }

    #[test]
    fn vui_is_added_to_parameter_set() {
        let sps = rusty_h264_encoder::Sps::from_config(&config(64, 48, FrameRate { num: 24, den: 1 }, 20)).to_nal();
        let nal = nal_units(&sps.to_annex_b())[0].to_vec();
        let out = with_video_usability(&nal, FrameRate { num: 24, den: 1 }, 3);
        assert_eq!(out[..4], nal[..4]);
        assert!(out.len() > nal.len() + 16);
        // A parameter set with VUI is returned unchanged.
        assert_eq!(with_video_usability(&[0x67, 0b1100_0000], FrameRate { num: 24, den: 1 }, 3), [0x67, 0b1100_0000]);
    }

    #[test]
    fn level_follows_macroblocks_per_second() {
        assert_eq!(level(1536, 24.0), 30);
        assert_eq!(level(8160, 30.0), 40);
        assert_eq!(level(8160, 60.0), 42);
    }
}
