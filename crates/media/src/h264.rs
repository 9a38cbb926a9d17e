//! H.264 encoding with the built-in encoder.

use rusty_h264_common::{BitWriter, YuvFrame, nal};
use rusty_h264_encoder::{Encoder, EncoderConfig, Preset};

use super::error::{MediaError, Result};
use super::frames::Frames;
use super::isobmff::{Media, Mp4Track};
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
pub(super) fn encode(frames: &Frames, rate: FrameRate, quantizer: u8) -> Result<Mp4Track> {
    let encoder = FrameEncoder::new(frames.width(), frames.height(), rate, quantizer)?;
    let mut track = TrackBuilder::new(encoder, Samples::in_memory());
    track.add(&frames.iter().collect::<Vec<_>>())?;
    track.finish()
}

fn failed(message: String) -> MediaError {
    MediaError::Embedded { codec: "H.264", message }
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
            return Err(failed(format!("a side of {width}x{height} exceeds 65534 pixels; generate a smaller video")));
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
            false => {
                Err(failed(format!("the encoder returned {} access units for {} frames", units.len(), frames.len())))
            }
        }
    }
}

/// Builder of a track from frames that arrive in pieces.
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
            for nal in nal::split_annex_b(&unit) {
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
    pub(super) fn finish(mut self) -> Result<Mp4Track> {
        // The list may contain the index of a frame that could not be written.
        self.sync.retain(|index| *index < self.samples.len());
        let (Some(sps), Some(pps)) = (self.sps, self.pps) else {
            return Err(failed("the stream contains no parameter sets".into()));
        };
        let (timescale, delta) = self.encoder.rate.timescale();
        // `FrameEncoder::new` has checked that the sizes fit in u16.
        let [width, height] = [self.encoder.width, self.encoder.height].map(|size| yuv::even(size) as u16);
        Ok(Mp4Track {
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

/// Adds video usability information (VUI) to a sequence parameter set: square pixels, BT.709 limited range, the frame
/// rate, and no picture reordering (without it, decoders would delay frames).
///
/// The encoder's parameter set ends with `vui_parameters_present_flag` = 0. If the flag is 1, returns the set
/// unchanged.
fn with_video_usability(nal: &[u8], rate: FrameRate, refs: u32) -> Vec<u8> {
    let raw = nal::emulation_unprevent(nal);
    let is_set = |at: usize| raw[at / 8] >> (7 - at % 8) & 1 == 1;
    // The last 1 bit is the stop bit; the VUI flag precedes it.
    let Some(flag) = (1..8 * raw.len()).rfind(|at| is_set(*at)).map(|stop| stop - 1).filter(|flag| !is_set(*flag))
    else {
        return nal.to_vec();
    };
    let mut bits = BitWriter::new();
    (0..flag).for_each(|at| bits.write_bit(is_set(at)));
    bits.write_bit(true); // vui_parameters_present_flag
    bits.write_bit(true); // aspect_ratio_info_present_flag
    bits.write_bits(1, 8); // 1:1
    bits.write_bit(false); // overscan_info_present_flag
    bits.write_bit(true); // video_signal_type_present_flag
    bits.write_bits(5, 3); // video_format: unspecified
    bits.write_bit(false); // video_full_range_flag
    bits.write_bit(true); // colour_description_present_flag
    bits.write_bits(0x01_01_01, 24); // BT.709 primaries, transfer, matrix
    bits.write_bit(false); // chroma_loc_info_present_flag: left
    bits.write_bit(true); // timing_info_present_flag
    bits.write_bits(rate.den, 32);
    bits.write_bits(2 * rate.num, 32); // ticks are fields
    bits.write_bit(true); // fixed_frame_rate_flag
    bits.write_bits(0, 3); // no NAL or VCL HRD parameters, no pic_struct
    bits.write_bit(true); // bitstream_restriction_flag
    bits.write_bit(true); // motion_vectors_over_pic_boundaries_flag
    for value in [0, 0, 16, 16, 0, refs.max(1)] {
        // max_bytes_per_pic_denom and max_bits_per_mb_denom (0: unlimited), motion vector lengths, no reordering,
        // reference frames.
        bits.write_ue(value);
    }
    bits.rbsp_trailing_bits();
    let mut out = Vec::new();
    nal::emulation_prevent_into(&bits.into_bytes(), &mut out);
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn vui_is_added_to_parameter_set() {
        let sps = rusty_h264_encoder::Sps::from_config(&config(64, 48, FrameRate { num: 24, den: 1 }, 20)).to_nal();
        let nal = nal::split_annex_b(&sps.to_annex_b())[0].to_vec();
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
