//! Tiled video decoding, compared with the official splitters and ramps and with untiled decoding.

use crate::support::{cases, cpu, needs, open, plain, relative_l2};
use ltx2::hlo::DType;
use ltx2::models::pixels::Pixels;
use ltx2::pipeline::runner::Runner;
use ltx2::pipeline::stages::clock::Clock;
use ltx2::pipeline::stages::tiles::decode;
use ltx2::request::TileSizes;
use ltx2::tensor::Tensor;
use ndarray::{Array5, Axis};

/// Decodes a video and returns its chunks of frames.
fn pieces(runner: &mut Runner, latents: &Array5<f32>, tiling: &TileSizes) -> Vec<Array5<f32>> {
    let mut clock = Clock::start(&runner.executor);
    let mut pieces = Vec::new();
    let add = |piece| {
        pieces.push(piece);
        Ok(())
    };
    decode(runner, latents, tiling, &mut clock, add).expect("decodes");
    pieces
}

fn joined(pieces: &[Array5<f32>]) -> Array5<f32> {
    let views: Vec<_> = pieces.iter().map(|piece| piece.view()).collect();
    ndarray::concatenate(Axis(2), &views).expect("one size")
}

#[needs(cpu)]
fn tile_blending_matches_reference() {
    let client = cpu(8);
    let case = &cases("tiled")[0];
    let mut runner = open(&client, "tests/fixtures/models/tiny_a", plain(DType::F32));
    let latents = case.inputs["latents"].to_f32().into_dimensionality().expect("five axes");
    let number = |key: &str| case.scalars[key].as_u64().expect("a number") as usize;
    let tiling = TileSizes {
        pixels: number("pixels"),
        overlap: number("overlap"),
        frames: number("frames"),
        frame_overlap: number("frame_overlap"),
    };
    let pieces = pieces(&mut runner, &latents, &tiling);
    let tiled = joined(&pieces);
    let distance = case.distance("video", &Tensor::from(tiled));
    eprintln!("tiles: {distance:.1e}");
    assert!(distance <= 1e-5, "{distance:e}");

    // Frames are emitted as soon as no later tile overlaps them, and at most one tile of frames is held.
    let (_, _, f, h, w) = latents.dim();
    let [time, ..] = tiling.parts([f, h, w], 32, 8);
    let longest = time.iter().map(|tile| tile.to[1] - tile.to[0]).max().expect("a tile");
    assert!(pieces.len() > 1 && pieces.iter().all(|piece| piece.dim().2 <= longest), "{}", pieces.len());

    // A single tile gives the untiled result.
    let one = TileSizes { pixels: 160, overlap: 32, frames: 40, frame_overlap: 8 };
    let tiled = joined(&self::pieces(&mut runner, &latents, &one));
    let whole = runner.video_decoder(latents, Pixels::Values).expect("ready");
    let whole = whole.run(&runner.executor).expect("runs").tensor("video").expect("a video");
    assert_eq!(relative_l2(&Tensor::from(tiled), &whole), 0.0);
}
