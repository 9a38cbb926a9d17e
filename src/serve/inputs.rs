//! Files that requests give, by the SHA-256 of their contents.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::SystemTime;

use image::{ImageFormat, ImageReader};

use super::descriptors::{busy, is_exhausted};
use super::error::ApiError;
use crate::media::{self, ClipInfo, ImageKind};

/// Bytes of an image.
const MAX_IMAGE_BYTES: u64 = 16 << 20;
/// Pixels of an image.
const MAX_IMAGE_PIXELS: u64 = 40_000_000;
/// Pixels along an image's shorter side, below which nothing is to be seen.
const LEAST_SIDE: u64 = 2;
/// Bytes of a video's decoded frames, which are in memory at once.
const MAX_VIDEO_BYTES: u64 = 2 << 30;
/// Pixels of a video's frame.
const MAX_VIDEO_PIXELS: u64 = 40_000_000;
/// Seconds of a sound behind its start that are decoded before a job is accepted.
const MOST_CHECKED: f64 = 3600.0;
/// Files that are decoded at once: an image takes up to 120 MB twice.
const DECODERS: usize = 2;

/// Folder of given files, `STATE/inputs`.
pub struct Inputs {
    folder: PathBuf,
    decoders: Gate,
    decode_video: fn(&Path) -> media::Result<ClipInfo>,
}

impl Inputs {
    /// Inputs in a folder, which is made where it is not there.
    ///
    /// # Errors
    /// A folder that cannot be made.
    pub fn open(folder: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        let decode_video = |file: &Path| media::decode_upload(file, Path::new("ffmpeg"), MAX_VIDEO_PIXELS);
        Ok(Inputs { folder, decoders: Gate::of(DECODERS), decode_video })
    }

    /// The same, which takes a video for what its header says: for tests of what follows on hosts without ffmpeg.
    #[cfg(test)]
    pub(in crate::serve) fn trusting_headers(self) -> Self {
        Inputs { decode_video: |file| media::probe_clip(file, Path::new("/dev/null/ffmpeg")), ..self }
    }

    /// Checks an image by its contents and keeps it as PNG, upright; its name.
    ///
    /// # Errors
    /// `invalid_image`, `image_too_large`, of the field.
    pub fn keep_image(&self, field: &str, file: &Path) -> Result<String, ApiError> {
        check_image(field, BufReader::new(File::open(file).map_err(|e| unkept(&e))?))?;
        let frames = self.decoders.within(|| media::read_image_up_to(file, MAX_IMAGE_PIXELS));
        let frames = frames.map_err(|error| {
            let why = match error {
                media::Error::Image { message, .. } => message,
                _ => {
                    format!("it cannot be decoded: it is damaged, cut short or of more than {MAX_IMAGE_PIXELS} pixels")
                }
            };
            ApiError::field("invalid_image", field, format!("{field}: {}", one_line(&why)))
        })?;
        check_image_size(field, frames.width() as u64, frames.height() as u64)?;
        let rgb = frames.iter().next().unwrap_or_default();
        let png = media::png_bytes(rgb, frames.width(), frames.height());
        let png =
            png.map_err(|_| ApiError::field("invalid_image", field, format!("{field}: it cannot be kept as PNG")))?;
        self.keep(&mut Cursor::new(png), "png")
    }

    /// The same of bytes.
    ///
    /// # Errors
    /// As [`Inputs::keep_image`].
    pub fn keep_image_bytes(&self, field: &str, bytes: &[u8]) -> Result<String, ApiError> {
        self.with_file(bytes, |file| self.keep_image(field, file))
    }

    /// Checks that the sound of a file can be decoded whole and does not end before second `start`, and keeps the file; its name.
    ///
    /// # Errors
    /// `invalid_audio`, of the field.
    pub fn keep_sound(&self, field: &str, file: &Path, start: f64) -> Result<String, ApiError> {
        let fault = |why: &str| ApiError::field("invalid_audio", field, format!("{field}: {}", one_line(why)));
        let length = self.length_of_sound(file, start).map_err(|why| fault(&why))?.unwrap_or(0.0);
        if length <= 0.0 {
            return Err(fault("it has no sound"));
        }
        if start >= length {
            return Err(fault(&format!("its sound ends after {length:.3} s, before its start, {start} s")));
        }
        self.keep(&mut File::open(file).map_err(|e| unkept(&e))?, "sound")
    }

    /// Checks that the sound of a video, where it has one, can be decoded whole.
    ///
    /// # Errors
    /// `invalid_video`, of the field.
    pub fn check_sound_of_video(&self, field: &str, file: &Path) -> Result<(), ApiError> {
        let fault = |why: &str| ApiError::field("invalid_video", field, format!("{field}: {}", one_line(why)));
        self.length_of_sound(file, 0.0).map(drop).map_err(|why| fault(&format!("its sound track: {why}")))
    }

    /// Seconds of a file's sound, which is decoded to [`MOST_CHECKED`] seconds behind second `start`, and not kept in memory; `None`:
    /// it has no sound.
    ///
    /// # Errors
    /// Why it cannot be decoded whole. How the server decodes is no part of that.
    fn length_of_sound(&self, file: &Path, start: f64) -> Result<Option<f64>, String> {
        let read = || media::read_sound_from(file, Path::new("ffmpeg"), f64::MAX, Some(start + MOST_CHECKED));
        match self.decoders.within(read) {
            Ok(Some(part)) if part.damage.is_some() => Err("it is damaged, and cannot be decoded whole".into()),
            Ok(part) => Ok(part.map(|part| part.length)),
            Err(media::Error::Sound { reason, .. }) => Err(reason),
            Err(error) => {
                tracing::info!("a given sound is refused: {error}");
                Err("it is no sound that this server decodes; give WAV, FLAC, MP3, AAC, ALAC or Vorbis".into())
            }
        }
    }

    /// Checks that a file is a video that ffmpeg decodes whole, of a size that can be in memory, and keeps it; its name.
    ///
    /// # Errors
    /// `invalid_video`, of the field.
    pub fn keep_video(&self, field: &str, file: &Path) -> Result<String, ApiError> {
        let fault = |why: &str| ApiError::field("invalid_video", field, format!("{field}: {}", one_line(why)));
        let info = self.decoders.within(|| (self.decode_video)(file)).map_err(|error| match error {
            media::Error::Clip { reason, .. } => fault(&reason),
            media::Error::FrameRate(rate) => fault(&format!("its frame rate {rate} is not between 0.01 and 1000")),
            media::Error::NoDecoder { .. } => fault("this server has no ffmpeg, which decodes videos"),
            _ => fault("it cannot be decoded whole: it is no video, or damaged; convert it, e.g. ffmpeg -i IN OUT.mp4"),
        })?;
        let bytes = [info.width, info.height, info.frames].iter().fold(3u64, |all, n| all.saturating_mul(*n as u64));
        if bytes > MAX_VIDEO_BYTES {
            let (w, h, n) = (info.width, info.height, info.frames);
            return Err(fault(&format!(
                "{n} frames of {w}x{h} are more than the server decodes; give a smaller or shorter one"
            )));
        }
        self.keep(&mut File::open(file).map_err(|e| unkept(&e))?, "mp4")
    }

    /// Bytes as a file, for as long as it is looked at.
    ///
    /// # Errors
    /// A full disk; those of `look`.
    pub fn with_file<T>(&self, bytes: &[u8], look: impl FnOnce(&Path) -> Result<T, ApiError>) -> Result<T, ApiError> {
        let file = tempfile::Builder::new().prefix(NEW).tempfile_in(&self.folder).map_err(|e| unkept(&e))?;
        fs::write(file.path(), bytes).map_err(|e| unkept(&e))?;
        look(file.path())
    }

    /// The path of a file that is kept.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The name of a file that is kept, by its path.
    pub fn name<'a>(&self, path: &'a str) -> Option<&'a str> {
        Path::new(path).strip_prefix(&self.folder).ok()?.to_str()
    }

    /// Keeps contents under their hash.
    fn keep(&self, contents: &mut impl Read, extension: &str) -> Result<String, ApiError> {
        let mut file = tempfile::Builder::new().prefix(NEW).tempfile_in(&self.folder).map_err(|e| unkept(&e))?;
        io::copy(contents, &mut file).map_err(|e| unkept(&e))?;
        let hash = media::sha256_of(file.path()).map_err(|_| unkept(&io::ErrorKind::Other.into()))?;
        let name = format!("{hash}.{extension}");
        let path = self.path(&name);
        // One that is there is as new: what goes over old ones leaves it to this request.
        if File::options().append(true).open(&path).and_then(|file| file.set_modified(SystemTime::now())).is_ok() {
            return Ok(name);
        }
        file.as_file().sync_all().map_err(|e| unkept(&e))?;
        file.persist(&path).map_err(|e| unkept(&e.error))?;
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(|e| unkept(&e))?;
        Ok(name)
    }
}

/// Prefix of files that are not whole yet.
const NEW: &str = ".new-";

/// Refuses an image by its first bytes, before its pixels are decoded.
fn check_image(field: &str, mut file: BufReader<File>) -> Result<(), ApiError> {
    let invalid = |why: String| ApiError::field("invalid_image", field, format!("{field}: {}", one_line(&why)));
    let bytes = file.get_ref().metadata().map_err(|e| unkept(&e))?.len();
    if bytes > MAX_IMAGE_BYTES {
        let why = format!("{field}: {bytes} bytes; an image has at most {MAX_IMAGE_BYTES}");
        return Err(ApiError::field("image_too_large", field, why));
    }
    let is_other = ImageKind::of(file.fill_buf().map_err(|e| unkept(&e))?).is_some();
    let reader = ImageReader::new(file).with_guessed_format().map_err(|e| unkept(&e))?;
    if !matches!(reader.format(), Some(ImageFormat::Png | ImageFormat::Jpeg | ImageFormat::WebP)) {
        let none = "it is none of PNG, JPEG, WebP, HEIC, AVIF, GIF, BMP, TIFF; convert it, e.g. ffmpeg -i IN OUT.png";
        return if is_other { Ok(()) } else { Err(invalid(none.into())) };
    }
    let (width, height) = reader.into_dimensions().map_err(|error| invalid(error.to_string()))?;
    check_image_size(field, width.into(), height.into())
}

/// Refuses an image with too many pixels or with hardly any.
fn check_image_size(field: &str, width: u64, height: u64) -> Result<(), ApiError> {
    if width * height > MAX_IMAGE_PIXELS {
        let why = format!("{field}: {width}x{height}; an image has at most {MAX_IMAGE_PIXELS} pixels");
        return Err(ApiError::field("image_too_large", field, why));
    }
    if width.min(height) < LEAST_SIDE {
        let why = format!("{field}: {width}x{height} is too small for a frame");
        return Err(ApiError::field("invalid_image", field, why));
    }
    Ok(())
}

/// A file that cannot be kept.
fn unkept(error: &io::Error) -> ApiError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ApiError::new(507, "insufficient_storage", "the server's disk is full").should_retry(false)
        }
        _ if is_exhausted(error) => busy(),
        _ => {
            tracing::error!("a given file cannot be kept: {error}");
            ApiError::new(500, "internal", "a file of the request cannot be kept")
        }
    }
}

/// Text on one line.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Lets so many through at once.
struct Gate {
    left: Mutex<usize>,
    freed: Condvar,
}

impl Gate {
    fn of(count: usize) -> Self {
        Gate { left: Mutex::new(count), freed: Condvar::new() }
    }

    fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        /// Gives the place back, also where the work panics.
        struct Place<'a>(&'a Gate);
        impl Drop for Place<'_> {
            fn drop(&mut self) {
                *self.0.left.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                self.0.freed.notify_one();
            }
        }
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let left = self.freed.wait_while(left, |left| *left == 0);
        *left.unwrap_or_else(PoisonError::into_inner) -= 1;
        let place = Place(self);
        let done = work();
        drop(place);
        done
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;
    use crate::media::{Audio, WavFormat, write_wav};

    /// A sound's header is looked at before it costs anything.
    #[test]
    fn a_sound_of_an_impossible_rate_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let inputs = Inputs::open(folder.path().join("inputs")).expect("a folder");
        let file = folder.path().join("a.wav");
        let sound = Audio::new(Array2::zeros((1, 8)), 8000).expect("mono");
        write_wav(&file, &sound, WavFormat::Pcm16).expect("written");
        let plain = fs::read(&file).expect("a file");
        let kept = |rate: u32| {
            let header = [&plain[..24], &rate.to_le_bytes(), &plain[28..]].concat();
            fs::write(&file, header).expect("written");
            inputs.keep_sound("input_audio", &file, 0.0)
        };
        assert!(kept(8000).is_ok() && kept(384_000).is_ok());
        for rate in [7999, 999_983, 4_294_967_291] {
            let error = kept(rate).expect_err("refused");
            assert_eq!((error.code, error.param.as_deref()), ("invalid_audio", Some("input_audio")));
            assert!(error.message.contains("8000 to 384000"), "{error:?}");
        }
    }
}
