//! PNG files: frames out, conditioning images in.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use image::{ExtendedColorType, ImageEncoder, ImageReader, codecs::png::PngEncoder};
use ndarray::Array4;

use super::atomic::write_atomically;
use super::error::{Error, Result};
use super::frames::Frames;

/// Writes each frame to `dir` as `frame_00000.png`, `frame_00001.png`, …, and returns the paths in order.
pub fn write_png_frames(dir: &Path, frames: &Frames) -> Result<Vec<PathBuf>> {
    (0..frames.count())
        .map(|i| {
            let path = dir.join(format!("frame_{i:05}.png"));
            write_png(&path, frames, i)?;
            Ok(path)
        })
        .collect()
}

/// Writes frame `index` to `path`; parents are created.
pub fn write_png(path: &Path, frames: &Frames, index: usize) -> Result<()> {
    let png = |message: String| Error::Png { path: path.to_path_buf(), message };
    let rgb = frames
        .iter()
        .nth(index)
        .ok_or_else(|| png(format!("frame {index} of {} was asked for, counted from 0", frames.count())))?;
    let mut bytes = Vec::new();
    PngEncoder::new(&mut bytes)
        .write_image(rgb, frames.width() as u32, frames.height() as u32, ExtendedColorType::Rgb8)
        .map_err(|e| png(e.to_string()))?;
    write_atomically(path, &bytes)
}

/// Reads a PNG of any colour type as one RGB frame; transparency is dropped, 16 bits become 8.
pub fn read_png(path: &Path) -> Result<Frames> {
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    let png = |message: String| Error::Png { path: path.to_path_buf(), message };
    let mut reader = ImageReader::new(Cursor::new(bytes));
    reader.set_format(image::ImageFormat::Png);
    let rgb = reader.decode().map_err(|e| png(e.to_string()))?.to_rgb8();
    let (w, h) = (rgb.width() as usize, rgb.height() as usize);
    Frames::new(Array4::from_shape_vec((1, h, w, 3), rgb.into_raw()).map_err(|e| png(e.to_string()))?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive() {
        let dir = tempfile::tempdir().unwrap();
        let data = Array4::from_shape_fn((3, 5, 7, 3), |(f, y, x, c)| (f * 80 + y * 13 + x * 7 + c) as u8);
        let frames = Frames::new(data.clone()).unwrap();
        let paths = write_png_frames(&dir.path().join("new/folder"), &frames).unwrap();
        assert_eq!(paths.len(), 3);
        assert!(paths[2].ends_with("new/folder/frame_00002.png"));
        for (i, path) in paths.iter().enumerate() {
            let back = read_png(path).unwrap();
            assert_eq!(back.data().index_axis(ndarray::Axis(0), 0), data.index_axis(ndarray::Axis(0), i));
        }
    }

    #[test]
    fn a_broken_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("not.png");
        std::fs::write(&path, b"JFIF").unwrap();
        assert!(read_png(&path).unwrap_err().to_string().contains("not.png"));
        assert!(read_png(&dir.path().join("gone.png")).unwrap_err().to_string().starts_with("cannot read"));
    }
}
