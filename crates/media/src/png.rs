//! PNG files: output frames and input images.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use image::{DynamicImage, ExtendedColorType, ImageEncoder, ImageReader, codecs::png::PngEncoder};
use ndarray::Array4;

use super::error::{MediaError, Result};
use super::frames::Frames;
use super::image_facts::ImageMetadata;
use ltx2_base::atomic_file::write_file;

/// Writes each frame to `dir` as `frame_00000.png`, `frame_00001.png`, …, and replaces existing files. Returns the
/// paths in order.
///
/// # Errors
/// Returns an error if a file cannot be written.
pub fn write_png_frames(dir: &Path, frames: &Frames) -> Result<Vec<PathBuf>> {
    let each = (0..frames.count()).map(|i| (i, png_frame_path(dir, i)));
    each.map(|(i, path)| write_png(&path, frames, i).map(|()| path)).collect()
}

/// Writes each frame to a new file in `dir`; file numbers start at `first`.
///
/// # Errors
/// Returns an error if a file exists already or cannot be written.
pub fn write_new_png_frames(dir: &Path, frames: &Frames, first: usize) -> Result<()> {
    (0..frames.count()).try_for_each(|i| write_png_file(&png_frame_path(dir, first + i), frames, i, false))
}

/// Returns the path of the frame with this index, counted from 0.
pub fn png_frame_path(dir: &Path, frame: usize) -> PathBuf {
    dir.join(format!("frame_{frame:05}.png"))
}

/// Lists the files of a folder whose names match [`png_frame_path`]. The list is empty if the folder does not exist.
///
/// # Errors
/// Returns an error if the folder cannot be listed.
pub fn png_frames_in(dir: &Path) -> Result<Vec<PathBuf>> {
    numbered_frames_in(dir, ".png")
}

/// Lists the files of a folder whose names are `frame_`, at least five digits, and `extension`. The list is empty if the
/// folder does not exist.
pub(super) fn numbered_frames_in(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let is_frame = |path: &Path| {
        let number = path.file_name().and_then(|name| name.to_str()?.strip_prefix("frame_")?.strip_suffix(extension));
        number.is_some_and(|n| n.len() >= 5 && n.bytes().all(|b| b.is_ascii_digit())) && path.is_file()
    };
    let entries = std::fs::read_dir(dir).map_err(MediaError::io("list", dir))?;
    Ok(entries.flatten().map(|entry| entry.path()).filter(|path| is_frame(path)).collect())
}

/// Removes the frames of an earlier video from a folder. Other files stay.
///
/// # Errors
/// Returns an error if a file cannot be removed.
pub fn remove_png_frames(dir: &Path) -> Result<()> {
    let remove = |path: PathBuf| std::fs::remove_file(&path).map_err(MediaError::io("remove", &path));
    png_frames_in(dir)?.into_iter().try_for_each(remove)
}

/// Writes frame `index` to `path`. Creates missing parent folders and replaces an existing file.
///
/// # Errors
/// Returns an error if there is no such frame or the file cannot be written.
pub fn write_png(path: &Path, frames: &Frames, index: usize) -> Result<()> {
    write_png_file(path, frames, index, true)
}

/// Writes a frame like [`write_png`]. If `replace` is false, an existing file is an error.
fn write_png_file(path: &Path, frames: &Frames, index: usize, replace: bool) -> Result<()> {
    let png = |message: String| MediaError::Png { path: path.to_path_buf(), message };
    let rgb = frames.iter().nth(index).ok_or_else(|| {
        png(format!("frame {index} (counted from 0) does not exist: there are {} frames", frames.count()))
    })?;
    Ok(write_file(path, &png_bytes(rgb, frames.width(), frames.height()).map_err(png)?, replace)?)
}

/// Encodes one frame of row-major RGB bytes as a PNG file.
///
/// # Errors
/// Returns the encoder's message.
pub fn png_bytes(rgb: &[u8], width: usize, height: usize) -> std::result::Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    PngEncoder::new(&mut bytes)
        .write_image(rgb, width as u32, height as u32, ExtendedColorType::Rgb8)
        .map_err(|e| e.to_string())?;
    Ok(bytes)
}

/// Reads all PNG files of a folder in name order as the frames of a video.
///
/// # Errors
/// Returns an error if there are no PNG files, or if one is damaged or differs in size from the first.
pub fn read_png_frames(dir: &Path) -> Result<Frames> {
    read_first_png_frames(dir, usize::MAX)
}

/// Reads the first `most` files like [`read_png_frames`], but at least one.
pub(super) fn read_first_png_frames(dir: &Path, most: usize) -> Result<Frames> {
    read_each(dir, most, read_png)
}

/// Reads the alpha channels of the first `most` PNG files of a folder as gray frames: white is opaque.
///
/// # Errors
/// Returns an error if the folder has no PNG files, if a file cannot be read or has no alpha channel, or if their sizes
/// differ.
pub(super) fn read_first_png_alphas(dir: &Path, most: usize) -> Result<Frames> {
    read_each(dir, most, |path| {
        let png = |message: String| MediaError::Png { path: path.to_path_buf(), message };
        let image = decode_png(path)?;
        if !image.color().has_alpha() {
            return Err(png("has no alpha channel; use a mask with one, or attention_mask_channel: brightness".into()));
        }
        let rgba = image.to_rgba8();
        let size = (1, rgba.height() as usize, rgba.width() as usize, 3);
        let gray = rgba.pixels().flat_map(|pixel| [pixel[3]; 3]).collect();
        Frames::new(Array4::from_shape_vec(size, gray).map_err(|e| png(e.to_string()))?)
    })
}

fn read_each(dir: &Path, most: usize, read: impl Fn(&Path) -> Result<Frames>) -> Result<Frames> {
    let mut paths = png_paths(dir)?;
    paths.truncate(most.max(1));
    let png = |path: &Path, message: String| MediaError::Png { path: path.to_path_buf(), message };
    let frames = paths.iter().map(|p| read(p)).collect::<Result<Vec<_>>>()?;
    let first = frames.first().expect("png_paths returns at least one file");
    if let Some((path, other)) = paths.iter().zip(&frames).find(|(_, f)| f.data().dim() != first.data().dim()) {
        let sizes = [other, first].map(|f| format!("{}x{}", f.width(), f.height()));
        return Err(png(
            path,
            format!(
                "the frame has {} pixels, but the first frame has {}; all frames must have the same size",
                sizes[0], sizes[1]
            ),
        ));
    }
    let views: Vec<_> = frames.iter().map(|f| f.data().view()).collect();
    Frames::new(ndarray::concatenate(ndarray::Axis(0), &views).map_err(|e| png(dir, e.to_string()))?)
}

/// Lists the PNG files of a folder in name order. Returns an error if the folder has no PNG files.
pub(super) fn png_paths(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).map_err(MediaError::io("read", dir))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e.eq_ignore_ascii_case("png")));
    paths.sort();
    let none = || MediaError::Png { path: dir.to_path_buf(), message: "there is no PNG file in this folder".into() };
    if paths.is_empty() { Err(none()) } else { Ok(paths) }
}

/// Returns the number of PNG files in a folder, and the width and height of the first.
pub(super) fn png_size(dir: &Path) -> Result<(usize, usize, usize)> {
    let paths = png_paths(dir)?;
    let first = read_png(&paths[0])?;
    Ok((paths.len(), first.width(), first.height()))
}

/// Reads a PNG of any color type as one RGB frame. Drops transparency and converts 16-bit values to 8 bits.
///
/// # Errors
/// Returns an error if the file cannot be read, is not a valid PNG or is HDR, or if its pixels are not square.
pub fn read_png(path: &Path) -> Result<Frames> {
    let rgb = decode_png(path)?.to_rgb8();
    let (w, h) = (rgb.width() as usize, rgb.height() as usize);
    let png = |message: String| MediaError::Png { path: path.to_path_buf(), message };
    Frames::new(Array4::from_shape_vec((1, h, w, 3), rgb.into_raw()).map_err(|e| png(e.to_string()))?)
}

fn decode_png(path: &Path) -> Result<DynamicImage> {
    let bytes = std::fs::read(path).map_err(MediaError::io("read", path))?;
    let png = |message: String| MediaError::Png { path: path.to_path_buf(), message };
    if let Some(fault) = ImageMetadata::from_png(&bytes).fault {
        return Err(png(fault));
    }
    let mut reader = ImageReader::new(Cursor::new(bytes));
    reader.set_format(image::ImageFormat::Png);
    reader.decode().map_err(|e| png(e.to_string()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn png_frames_are_read_back_unchanged() {
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
    fn only_frame_files_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let others = ["frame_1.png", "frame_00000.jpg", "a_frame_00000.png", "frame_0000x.png", "notes.txt"];
        let frames = ["frame_00000.png", "frame_00012.png", "frame_100000.png"];
        others.iter().chain(&frames).for_each(|name| std::fs::write(dir.path().join(name), "x").unwrap());
        assert_eq!(png_frames_in(dir.path()).unwrap().len(), 3);
        remove_png_frames(dir.path()).unwrap();
        assert!(others.iter().all(|name| dir.path().join(name).exists()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), others.len());
        remove_png_frames(&dir.path().join("absent")).unwrap();
    }

    #[test]
    fn damaged_png_error_contains_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("not.png");
        std::fs::write(&path, b"JFIF").unwrap();
        assert!(read_png(&path).unwrap_err().to_string().contains("not.png"));
        assert!(read_png(&dir.path().join("gone.png")).unwrap_err().to_string().starts_with("cannot read"));
    }
}
