//! Draws several clips into one PNG: a row of frames per clip, and its loudness below on the same time axis.
//!
//! `cargo run --example contact_sheet FRAMES SOUNDS [SHRINK] > sheet.png`. FRAMES and SOUNDS are the `output.save_frames` and
//! `output.save_audio` folders of `ltx2 generate --prompts`; `make nano-sheet` creates them. SHRINK is an integer factor.

use std::io::Write;
use std::path::{Path, PathBuf};

use ltx2::media::{Audio, Frames, png_bytes, read_png_frames, read_wav};
use ndarray::{Array3, Array4, s};

/// Frames per drawn frame.
const EVERY: usize = 4;
/// Frames per second of the toy model's clips.
const FRAME_RATE: usize = 24;
/// Height in pixels of the loudness strip, and of the gap between rows.
const STRIP: usize = 28;
const GAP: usize = 6;
const PAPER: u8 = 255;
const INK: [u8; 3] = [60, 90, 150];
/// Sample amplitude that fills the strip.
const FULL: f32 = 0.5;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let (frames, sounds, shrink) = match &arguments[..] {
        [frames, sounds] => (frames, sounds, 1),
        [frames, sounds, shrink] => (frames, sounds, shrink.to_string_lossy().parse::<usize>()?.max(1)),
        _ => anyhow::bail!("usage: contact_sheet FRAMES SOUNDS [SHRINK]"),
    };
    let mut clips: Vec<PathBuf> = std::fs::read_dir(frames)?.flatten().map(|entry| entry.path()).collect();
    clips.sort();
    let rows = clips.iter().map(|clip| row(clip, sounds, shrink)).collect::<anyhow::Result<Vec<_>>>()?;
    let views: Vec<_> = rows.iter().map(|row| row.view()).collect();
    let sheet = ndarray::concatenate(ndarray::Axis(0), &views)?;
    let (height, width, _) = sheet.dim();
    let bytes = png_bytes(&sheet.into_raw_vec_and_offset().0, width, height).map_err(anyhow::Error::msg)?;
    Ok(std::io::stdout().write_all(&bytes)?)
}

/// Draws one clip: pixels `[height, width, 3]`.
fn row(clip: &Path, sounds: &Path, shrink: usize) -> anyhow::Result<Array3<u8>> {
    let frames = shrunk(&read_png_frames(clip)?, shrink)?;
    let name = Path::new(clip.file_name().unwrap_or_default()).with_extension("wav");
    let sound = read_wav(&sounds.join(name))?;
    let (height, shown) = (frames.height(), frames.count().div_ceil(EVERY));
    let mut row = Array3::from_elem((height + STRIP + GAP, shown * frames.width(), 3), PAPER);
    for (place, frame) in frames.data().outer_iter().step_by(EVERY).enumerate() {
        row.slice_mut(s![..height, place * frames.width()..(place + 1) * frames.width(), ..]).assign(&frame);
    }
    for (x, loud) in loudness(&sound, &frames).into_iter().enumerate().take(row.dim().1) {
        let reach = (loud * (STRIP / 2 - 1) as f32).round() as usize;
        let middle = height + STRIP / 2;
        for y in middle - reach..=middle + reach {
            row.slice_mut(s![y, x, ..]).assign(&ndarray::arr1(&INK));
        }
    }
    Ok(row)
}

/// Downsamples frames by averaging squares of `by` pixels.
fn shrunk(frames: &Frames, by: usize) -> anyhow::Result<Frames> {
    let (height, width) = (frames.height() / by, frames.width() / by);
    let mean = |(f, y, x, c): (usize, usize, usize, usize)| {
        let square = frames.data().slice(s![f, y * by..(y + 1) * by, x * by..(x + 1) * by, c]).mapv(u32::from);
        (square.sum() / (by * by) as u32) as u8
    };
    Ok(Frames::new(Array4::from_shape_fn((frames.count(), height, width, 3), mean))?)
}

/// Peak amplitude per pixel column, 0 to 1; a frame's left edge is at its time.
fn loudness(sound: &Audio, frames: &Frames) -> Vec<f32> {
    let column = (sound.rate() as usize * EVERY) / (FRAME_RATE * frames.width());
    let mono = sound.samples().mean_axis(ndarray::Axis(0)).unwrap_or_default().to_vec();
    mono.chunks(column).map(|part| part.iter().fold(0.0f32, |most, v| most.max(v.abs())).min(FULL) / FULL).collect()
}
