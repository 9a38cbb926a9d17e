use super::*;
use crate::sampling::noise::TorchRng;
use ndarray::{ArrayD, Ix3, Ix4, Ix5};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

#[derive(Deserialize)]
struct LatentsFixture {
    seed: u64,
    video: Vec<VideoCase>,
    audio: Vec<AudioCase>,
    statistics: Vec<Normalised>,
    video_coords: Vec<VideoCoords>,
    audio_coords: Vec<AudioCoords>,
    audio_length: Vec<AudioLength>,
}

#[derive(Deserialize)]
struct Digest {
    shape: Vec<usize>,
    sha256: String,
    bits: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct VideoCase {
    shape: [usize; 5],
    patch_size: usize,
    patch_size_t: usize,
    tokens: Digest,
}

#[derive(Deserialize)]
struct AudioCase {
    shape: [usize; 4],
    tokens: Digest,
}

#[derive(Deserialize)]
struct Normalised {
    shape: Vec<usize>,
    axis: usize,
    scaling_factor: f32,
    normalized: Digest,
    denormalized: Digest,
}

#[derive(Deserialize)]
struct VideoCoords {
    latents: [usize; 4],
    fps: f64,
    patch_size: usize,
    patch_size_t: usize,
    scale_factors: [usize; 3],
    causal_offset: i64,
    coords: Digest,
}

#[derive(Deserialize)]
struct AudioCoords {
    batch: usize,
    length: usize,
    sampling_rate: usize,
    hop_length: usize,
    scale_factor: usize,
    patch_size_t: usize,
    causal_offset: i64,
    coords: Digest,
}

#[derive(Deserialize)]
struct AudioLength {
    num_frames: usize,
    frame_rate: f64,
    sampling_rate: usize,
    hop_length: usize,
    temporal_compression: usize,
    length: usize,
}

impl Digest {
    fn check<D: ndarray::Dimension>(&self, got: &ndarray::Array<f32, D>, name: &str) {
        assert_eq!(got.shape(), self.shape, "shape of {name}");
        let bits: Vec<u32> = got.iter().map(|v| v.to_bits()).collect();
        if let Some(want) = &self.bits {
            assert_eq!(&bits, want, "bits of {name}");
        }
        let hash = hex::encode(Sha256::digest(bytemuck::cast_slice::<u32, u8>(&bits)));
        assert_eq!(hash, self.sha256, "bits of {name}");
    }
}

fn fixture() -> LatentsFixture {
    serde_json::from_str(include_str!("../../../tests/fixtures/latents/latents.json")).expect("the fixture parses")
}

fn randn<D: ndarray::Dimension>(seed: u64, shape: &[usize]) -> ndarray::Array<f32, D> {
    TorchRng::new(seed).normal_array(shape).into_dimensionality().expect("ranks agree")
}

const GRID: VideoGrid = VideoGrid { spatial_compression: 32, temporal_compression: 8, patch_size: 1, patch_size_t: 1 };
const AUDIO: AudioGrid =
    AudioGrid { sampling_rate: 16000, hop_length: 160, temporal_compression: 4, mel_bins: 64, mel_compression: 4 };

#[test]
fn pack_matches_diffusers_and_unpack_inverts_it() {
    let fixture = fixture();
    for case in fixture.video {
        let grid = VideoGrid { patch_size: case.patch_size, patch_size_t: case.patch_size_t, ..GRID };
        let latents = randn::<Ix5>(fixture.seed, &case.shape);
        let [batch, channels, frames, height, width] = case.shape;
        let shape = VideoShape { batch, channels, frames, height, width };
        let tokens = grid.pack(latents.view()).expect("patches divide");
        case.tokens.check(&tokens, &format!("{:?} packed", case.shape));
        assert_eq!(grid.unpack(tokens.view(), &shape).expect("the tokens of the shape"), latents);
        let error = grid.unpack(tokens.view(), &VideoShape { frames: frames * 2, ..shape }).expect_err("too few");
        assert!(error.to_string().starts_with("the shape of video tokens is ["), "{error}");
    }
    for case in fixture.audio {
        let latents = randn::<Ix4>(fixture.seed, &case.shape);
        let [batch, channels, length, mel_bins] = case.shape;
        let shape = AudioShape { batch, channels, length, mel_bins };
        let tokens = pack_audio(latents.view());
        case.tokens.check(&tokens, &format!("{:?} packed", case.shape));
        assert_eq!(unpack_audio(tokens.view(), &shape).expect("the tokens of the shape"), latents);
        assert!(unpack_audio(tokens.view(), &AudioShape { length: 1, ..shape }).is_err());
    }
    let odd = VideoGrid { patch_size: 2, ..GRID };
    assert!(odd.pack(Array5::zeros((1, 2, 1, 3, 4)).view()).is_err());
}

#[test]
fn normalization_matches_diffusers() {
    let fixture = fixture();
    for case in fixture.statistics {
        let latents: ArrayD<f32> = randn(fixture.seed, &case.shape);
        let rows = randn::<ndarray::Ix2>(fixture.seed, &[2, case.shape[case.axis]]);
        let statistics = LatentStatistics {
            mean: rows.row(0).to_vec(),
            std: rows.row(1).iter().map(|v| v.abs() + 0.5).collect(),
            scaling_factor: case.scaling_factor,
        };
        let (mut there, mut back) = (latents.clone(), latents);
        statistics.normalize(&mut there, case.axis).expect("lengths agree");
        statistics.denormalize(&mut back, case.axis).expect("lengths agree");
        case.normalized.check(&there, &format!("{:?} normalised", case.shape));
        case.denormalized.check(&back, &format!("{:?} un-normalised", case.shape));
        let mut tokens = Array3::<f32>::zeros((1, 2, 3));
        assert!(statistics.normalize(&mut tokens, 2).is_err());
    }
    assert_eq!(randn::<Ix3>(1, &[1, 2, 3]).len(), 6);
}

#[test]
fn token_bounds_match_diffusers_bitwise() {
    let fixture = fixture();
    for case in fixture.video_coords {
        let [batch, frames, height, width] = case.latents;
        let shape = VideoShape { batch, channels: 1, frames, height, width };
        let grid = VideoGrid { patch_size: case.patch_size, patch_size_t: case.patch_size_t, ..GRID };
        let coords = grid.coords(&shape, case.scale_factors, case.causal_offset, case.fps);
        case.coords.check(&coords, &format!("video {:?} at {} fps", case.latents, case.fps));
    }
    for case in fixture.audio_coords {
        let grid = AudioGrid { sampling_rate: case.sampling_rate, hop_length: case.hop_length, ..AUDIO };
        let coords = grid.coords(case.batch, case.length, case.scale_factor, case.patch_size_t, case.causal_offset);
        case.coords.check(&coords, &format!("audio of {} at {} Hz", case.length, case.sampling_rate));
    }
}

#[test]
fn latent_sizes_match_reference() {
    let shape = GRID.latents(1, 128, 768, 512, 121).expect("legal");
    assert_eq!(shape, VideoShape { batch: 1, channels: 128, frames: 16, height: 16, width: 24 });
    assert_eq!((GRID.tokens(&shape), GRID.features(&shape)), (6144, 128));
    for case in fixture().audio_length {
        let grid = AudioGrid {
            sampling_rate: case.sampling_rate,
            hop_length: case.hop_length,
            temporal_compression: case.temporal_compression,
            ..AUDIO
        };
        let shape = grid.latents(1, 8, case.num_frames, case.frame_rate).expect("long enough");
        assert_eq!(shape.length, case.length, "{} frames at {} fps", case.num_frames, case.frame_rate);
        assert_eq!(shape.mel_bins, 16);
    }
    let message = AUDIO.latents(1, 8, 1, 50.0).expect_err("half a latent").to_string();
    assert_eq!(message, "1 frames at 50 fps are too short for audio; use more frames or a lower frame rate");
}

#[test]
fn invalid_sizes_report_nearest_valid_sizes() {
    let message = |r: Result<(), SamplingError>| r.expect_err("illegal").to_string();
    assert_eq!(
        message(check_multiple("width", 770, 32)),
        "width 770 is not a multiple of 32; the nearest valid values are 768 and 800"
    );
    assert!(message(check_multiple("height", 0, 64)).ends_with("are 64 and 128"));
    assert_eq!(
        message(check_frames(120, 8)),
        "num_frames 120 is not of the form 8k + 1; the nearest valid values are 113 and 121"
    );
    assert!(message(check_frames(0, 8)).ends_with("are 1 and 9"));
    for legal in [1, 9, 121] {
        check_frames(legal, 8).expect("legal");
    }
    check_frames(6, 1).expect("every count is legal without temporal compression");
    assert!(GRID.latents(1, 128, 768, 500, 121).is_err());
    assert_eq!(message(check_positive("frame_rate", -1.0)), "frame_rate is -1; it must be a positive number");
}
