//! OpenEXR files of scene-linear frames.

use std::fs::File;
use std::io::{BufWriter, Cursor, Write};
use std::path::{Path, PathBuf};

use exr::image::write::WritableImage;
use exr::image::{Encoding, Image, SpecificChannels};
use exr::math::Vec2;
use exr::meta::attribute::{AttributeValue, Chromaticities, Text};
use half::f16;
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

use super::error::{MediaError, Result};
use super::hdr::HdrFrames;
use ltx2_base::atomic_file::{self, FileError};
use ltx2_base::threads;

/// Rec. 709 primaries and the white point D65, as xy coordinates.
const REC709: Chromaticities =
    Chromaticities { red: Vec2(0.64, 0.33), green: Vec2(0.3, 0.6), blue: Vec2(0.15, 0.06), white: Vec2(0.3127, 0.329) };

/// Returns the path of the EXR file of the frame with this index, counted from 0.
pub fn exr_frame_path(dir: &Path, frame: usize) -> PathBuf {
    dir.join(format!("frame_{frame:05}.exr"))
}

/// Lists the files of a folder whose names match [`exr_frame_path`]. The list is empty if the folder does not exist.
///
/// # Errors
/// Returns an error if the folder cannot be listed.
pub fn exr_frames_in(dir: &Path) -> Result<Vec<PathBuf>> {
    super::png::numbered_frames_in(dir, ".exr")
}

/// Removes the EXR frames of an earlier video from a folder. Other files stay.
///
/// # Errors
/// Returns an error if a file cannot be removed.
pub fn remove_exr_frames(dir: &Path) -> Result<()> {
    let remove = |path: PathBuf| std::fs::remove_file(&path).map_err(MediaError::io("remove", &path));
    exr_frames_in(dir)?.into_iter().try_for_each(remove)
}

/// Writes each frame to `dir` as `frame_00000.exr`, `frame_00001.exr`, …: half-precision RGB with ZIP compression, tagged
/// with Rec. 709 chromaticities and the colour space `sRGB` (linear), as Lightricks tags its files. If `replace` is
/// false, an existing file is an error.
///
/// # Errors
/// Returns an error if a file cannot be written.
pub fn write_exr_frames(dir: &Path, frames: &HdrFrames, replace: bool) -> Result<()> {
    let indices: Vec<usize> = (0..frames.count()).collect();
    threads::try_in_order(&indices, threads::cores(), |index| {
        let path = exr_frame_path(dir, *index);
        let bytes = exr_bytes(frames, *index).map_err(|message| MediaError::Exr { path: path.clone(), message })?;
        atomic_file::write_file(&path, &bytes, replace)?;
        Ok::<_, MediaError>(())
    })?;
    Ok(())
}

/// Writes the files of [`write_exr_frames`] to the ZIP file `path`, without further compression. Holds as many encoded
/// frames in memory as the host has cores. If `replace` is false, an existing file is an error.
///
/// # Errors
/// Returns an error if a frame cannot be encoded or the file cannot be written.
pub fn write_exr_archive(path: &Path, frames: &HdrFrames, replace: bool) -> Result<()> {
    let indices: Vec<usize> = (0..frames.count()).collect();
    let io = |error: std::io::Error| MediaError::from(FileError::at("write", path)(error));
    let write = |file: File| {
        let mut archive = ZipWriter::new(BufWriter::new(file));
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        for part in indices.chunks(threads::cores()) {
            let encoded = threads::try_in_order(part, threads::cores(), |index| exr_bytes(frames, *index))
                .map_err(|message| MediaError::Exr { path: path.into(), message })?;
            for (index, bytes) in part.iter().zip(encoded) {
                let name = exr_frame_path(Path::new(""), *index);
                archive.start_file_from_path(name, options).map_err(|error| io(error.into()))?;
                archive.write_all(&bytes).map_err(io)?;
            }
        }
        let mut file = archive.finish().map_err(|error| io(error.into()))?;
        file.flush().map_err(io)
    };
    atomic_file::write_file_with(path, replace, write)
}

/// Encodes one frame as an EXR file.
fn exr_bytes(frames: &HdrFrames, index: usize) -> std::result::Result<Vec<u8>, String> {
    let frame = frames.frame(index);
    let value = |channel: usize, y: usize, x: usize| f16::from_f32(frame[[channel, y, x]]);
    let channels = SpecificChannels::rgb(|Vec2(x, y): Vec2<usize>| (value(0, y, x), value(1, y, x), value(2, y, x)));
    let mut image = Image::from_encoded_channels((frames.width(), frames.height()), Encoding::SMALL_LOSSLESS, channels);
    image.attributes.chromaticities = Some(REC709);
    let color_space = Text::new_or_none("sRGB").expect("ASCII");
    image.attributes.other.insert(Text::new_or_none("colorSpace").expect("ASCII"), AttributeValue::Text(color_space));
    let mut bytes = Cursor::new(Vec::new());
    image.write().non_parallel().to_buffered(&mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes.into_inner())
}
