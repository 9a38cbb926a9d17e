//! Regions that the pipeline `inpaint` regenerates: masks by pixel and by latent, and frames for the video encoder.

use std::path::Path;

use ndarray::{Array3, Array5, Axis, s};

use crate::config::FRAME_STEP;
use crate::media::{self, Frames};
use crate::pipeline::error::{PipelineError, Result};
use crate::request::{InpaintArea, Request};

/// Side of the square of pixels that a latent represents.
const CELL: usize = 32;
/// Extensions of masks that are single images.
const IMAGES: [&str; 5] = ["png", "jpg", "jpeg", "bmp", "webp"];
/// Color of the regenerated pixels in a reference video, in RGB (Lightricks' preprocessing for its in- and outpainting
/// IC-LoRA).
const FILL: [f32; 3] = [102.0, 255.0, 0.0];

/// Returns how much of each pixel is regenerated, 0 to 1: `[frames, height, width]` with one frame if all frames are
/// alike.
///
/// # Errors
/// Returns an error if the mask cannot be read or has too few frames.
fn regenerated(area: &InpaintArea, request: &Request) -> Result<Array3<f32>> {
    let (height, width) = (request.height, request.width);
    let (rectangle, inside) = match area {
        InpaintArea::Mask(path) => return mask(path, request),
        InpaintArea::Inside(rectangle) => (rectangle, 1.0),
        InpaintArea::Outside(rectangle) => (rectangle, 0.0),
    };
    let mut all = Array3::from_elem((1, height, width), 1.0 - inside);
    let rows = rectangle.top..rectangle.top + rectangle.height;
    all.slice_mut(s![.., rows, rectangle.left..rectangle.left + rectangle.width]).fill(inside);
    Ok(all)
}

/// Reads a mask and returns the brightness of each pixel (mean of the channels, 0 to 1), scaled and cropped like the
/// input video, but to the nearest pixel.
fn mask(path: &Path, request: &Request) -> Result<Array3<f32>> {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default().to_lowercase();
    let frames = match IMAGES.contains(&extension.as_str()) {
        true => media::read_image(path)?,
        false => media::read_first_frames(path, Path::new("ffmpeg"), request.num_frames)?,
    };
    if frames.count() != 1 && frames.count() < request.num_frames {
        let (have, needed) = (frames.count(), request.num_frames);
        let reason =
            format!("has {have} frames, but the video has {needed}; use a longer mask, or an image for all frames");
        return Err(PipelineError::File { path: path.into(), reason });
    }
    let (height, width) = (request.height, request.width);
    let (own_height, own_width) = (frames.height(), frames.width());
    let scale = f64::max(height as f64 / own_height as f64, width as f64 / own_width as f64);
    let nearest = |at: usize, own: usize, wanted: usize| {
        let scaled = (own as f64 * scale).ceil() as usize;
        ((at + (scaled - wanted) / 2) * own / scaled).min(own - 1)
    };
    let data = frames.data();
    Ok(Array3::from_shape_fn((frames.count(), height, width), |(frame, y, x)| {
        let pixel = data.slice(s![frame, nearest(y, own_height, height), nearest(x, own_width, width), ..]);
        pixel.iter().map(|channel| f32::from(*channel) / 255.0).sum::<f32>() / 3.0
    }))
}

/// Returns, for each latent of the video in the order of tokens, whether it is kept: in each of its frames, more than
/// half of its pixels are kept. For masks that do not move, this is the rule of Lightricks' trainer
/// (`_load_and_downsample_mask`). The first latent frame represents one frame, later ones eight.
///
/// # Errors
/// Returns an error if the mask cannot be read, or if all latents or none are kept.
pub(super) fn kept_latents(area: &InpaintArea, request: &Request) -> Result<Vec<bool>> {
    let all = regenerated(area, request)?;
    let [frames, rows, columns] =
        [(request.num_frames - 1) / FRAME_STEP + 1, request.height / CELL, request.width / CELL];
    let is_kept = |(frame, row, column): (usize, usize, usize)| {
        let own = if frame == 0 { 0..1 } else { (frame - 1) * FRAME_STEP + 1..frame * FRAME_STEP + 1 };
        let own = if all.dim().0 == 1 { 0..1 } else { own };
        let cell = s![own, row * CELL..(row + 1) * CELL, column * CELL..(column + 1) * CELL];
        all.slice(cell).axis_iter(Axis(0)).all(|pixels| pixels.mean().is_some_and(|mean| 1.0 - mean > 0.5))
    };
    let kept = Array3::from_shape_fn((frames, rows, columns), is_kept);
    let wrong = match kept.iter().filter(|kept| **kept).count() {
        0 => "covers every latent, so nothing of the input video is kept; use a smaller region",
        count if count == kept.len() => "covers no latent (32x32 pixels) by half or more; use a larger region",
        _ => return Ok(kept.into_iter().collect()),
    };
    Err(match area {
        InpaintArea::Mask(path) => PipelineError::File { path: path.clone(), reason: wrong.into() },
        InpaintArea::Inside(_) => PipelineError::Usage(format!("request.inpaint.region: the rectangle {wrong}")),
        InpaintArea::Outside(_) => PipelineError::Usage(format!("request.inpaint.keep: the region outside {wrong}")),
    })
}

/// Returns the frames at the size of the pass, `[1, 3, frames, height, width]` in -1..1. If the input video fills only a
/// rectangle, its edge pixels are repeated outside.
pub(super) fn canvas(frames: &Frames, area: &InpaintArea, request: &Request) -> Array5<f32> {
    let (height, width) = (request.height, request.width);
    let InpaintArea::Outside(rectangle) = area else { return media::covering_clip(frames, height, width) };
    let own = media::covering_clip(frames, rectangle.height, rectangle.width);
    Array5::from_shape_fn((1, 3, frames.count(), height, width), |(_, channel, frame, y, x)| {
        let y = y.saturating_sub(rectangle.top).min(rectangle.height - 1);
        let x = x.saturating_sub(rectangle.left).min(rectangle.width - 1);
        own[[0, channel, frame, y, x]]
    })
}

/// Returns the frames of [`canvas`] with the regenerated pixels in green.
///
/// # Errors
/// Returns an error if the mask cannot be read or has too few frames.
pub(super) fn filled(frames: &Frames, area: &InpaintArea, request: &Request) -> Result<Array5<f32>> {
    let mask = regenerated(area, request)?;
    let mut video = canvas(frames, area, request);
    for ((_, channel, frame, y, x), value) in video.indexed_iter_mut() {
        let part = mask[[frame.min(mask.dim().0 - 1), y, x]];
        *value = *value * (1.0 - part) + (FILL[channel] / 127.5 - 1.0) * part;
    }
    Ok(video)
}

#[cfg(test)]
mod tests {
    use ndarray::Array4;

    use super::*;
    use crate::media::write_png_frames;
    use crate::request::Rectangle;
    use crate::request::tests::request_of_size;

    /// Whether each latent of a 128x96 picture is kept, row by row.
    fn kept(area: &InpaintArea) -> Result<Vec<bool>> {
        kept_latents(area, &request_of_size(128, 96, 9))
    }

    /// Compares with `_load_and_downsample_mask` of Lightricks' trainer for a mask of half the size.
    #[test]
    fn kept_latents_of_image_mask_match_reference() {
        let folder = tempfile::tempdir().expect("a folder");
        let white = |(_, y, x, _): (usize, usize, usize, usize)| {
            if (x * y * 7 + x * 13 + y * 29) % 97 < x + y { 255 } else { 0 }
        };
        let mask = Frames::new(Array4::from_shape_fn((1, 48, 64, 3), white)).expect("a frame");
        write_png_frames(folder.path(), &mask).expect("written");
        let file =
            std::fs::read_dir(folder.path()).expect("a folder").next().expect("a file").expect("readable").path();
        let frame = [[true, true, true, false], [true, true, false, false], [false; 4]].concat();
        assert_eq!(kept(&InpaintArea::Mask(file)).expect("a mask"), frame.repeat(2));
    }

    /// A mask that is white in frame 8 alone regenerates the second latent, which represents frames 1 to 8.
    #[test]
    fn latent_is_regenerated_if_any_of_its_frames_is_masked() {
        let folder = tempfile::tempdir().expect("a folder");
        let white = |(frame, _, x, _): (usize, usize, usize, usize)| if frame == 8 && x >= 64 { 255 } else { 0 };
        let mask = Frames::new(Array4::from_shape_fn((9, 96, 128, 3), white)).expect("frames");
        write_png_frames(folder.path(), &mask).expect("written");
        let area = InpaintArea::Mask(folder.path().into());
        let second = [true, true, false, false].repeat(3);
        assert_eq!(kept(&area).expect("a mask"), [vec![true; 12], second].concat());
        let short = kept_latents(&area, &request_of_size(128, 96, 17)).expect_err("9 frames").to_string();
        assert!(
            short.ends_with("has 9 frames, but the video has 17; use a longer mask, or an image for all frames"),
            "{short}"
        );
    }

    #[test]
    fn rectangles_select_latents_by_half() {
        let rectangle = Rectangle { left: 40, top: 0, width: 72, height: 47 };
        let row = [[true, false, false, false], [true, true, true, true], [true; 4]].concat();
        // The second row is covered by 15 of 32 pixel rows, the last column of the first by half.
        assert_eq!(kept(&InpaintArea::Inside(rectangle)).expect("a region"), row.repeat(2));
        let outside = InpaintArea::Outside(Rectangle { left: 32, top: 32, width: 64, height: 64 });
        let row = [[false; 4], [false, true, true, false], [false, true, true, false]].concat();
        assert_eq!(kept(&outside).expect("a region"), row.repeat(2));
        let small = InpaintArea::Inside(Rectangle { left: 0, top: 0, width: 22, height: 22 });
        let error = kept(&small).expect_err("less than half").to_string();
        assert!(
            error.contains("request.inpaint.region: the rectangle covers no latent (32x32 pixels) by half"),
            "{error}"
        );
    }

    /// The canvas repeats the edges of the input video; the reference video is green there.
    #[test]
    fn input_video_is_placed_in_its_rectangle() {
        let request = request_of_size(128, 96, 1);
        let frames =
            Frames::new(Array4::from_shape_fn((1, 64, 64, 3), |(_, y, x, c)| (y + x + c) as u8)).expect("a frame");
        let area = InpaintArea::Outside(Rectangle { left: 32, top: 32, width: 64, height: 64 });
        let (plain, green) = (canvas(&frames, &area, &request), filled(&frames, &area, &request).expect("filled"));
        let byte = |video: &Array5<f32>, y: usize, x: usize| {
            [0, 1, 2].map(|c| ((video[[0, c, 0, y, x]] + 1.0) * 127.5).round())
        };
        for (y, x, own) in [(32, 32, 0.0), (95, 95, 126.0), (40, 50, 26.0)] {
            assert_eq!([byte(&plain, y, x), byte(&green, y, x)], [[own, own + 1.0, own + 2.0]; 2], "{y}, {x}");
        }
        assert_eq!(byte(&plain, 0, 127), [63.0, 64.0, 65.0]);
        assert_eq!(byte(&green, 0, 127), FILL);
    }
}
