//! Input files of requests, stored under the SHA-256 of their contents.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::SystemTime;

use image::ImageReader;
use ltx2_media::{self as media, ClipInfo, ImageKind};

use super::error::ApiError;
use super::store::unstored;

/// Maximum size of an image in bytes.
const MAX_IMAGE_BYTES: u64 = 16 << 20;
const MAX_IMAGE_PIXELS: u64 = 40_000_000;
/// Minimum length of an image's shorter side in pixels.
const MIN_IMAGE_SIDE: u64 = 2;
/// Maximum total size of a video's decoded frames in bytes, on a host with enough memory. All frames are in memory at
/// once.
const MAX_VIDEO_BYTES: u64 = 2 << 30;
const MAX_VIDEO_PIXELS: u64 = 40_000_000;
/// Maximum duration of audio, after the start offset, that is decoded before a job is accepted, in seconds.
const MAX_CHECKED_SECONDS: f64 = 3600.0;
/// Maximum number of concurrent decodes. Decoding an image may need two buffers of 120 MB.
const DECODERS: usize = 2;

/// Store of input files in the folder `STATE/inputs`.
pub struct InputStore {
    folder: PathBuf,
    decoders: BlockingSemaphore,
    decode_video: fn(&Path) -> media::Result<ClipInfo>,
    /// Function that returns the maximum total size of a video's decoded frames in bytes.
    video_limit: fn() -> u64,
}

impl InputStore {
    /// Opens the folder; creates it if it does not exist.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be created.
    pub fn open(folder: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        let decode_video = |file: &Path| media::decode_upload(file, Path::new("ffmpeg"), MAX_VIDEO_PIXELS);
        // A job reads the frames within the memory limit of this host.
        let video_limit = || MAX_VIDEO_BYTES.min(media::frame_memory_limit());
        Ok(InputStore { folder, decoders: BlockingSemaphore::new(DECODERS), decode_video, video_limit })
    }

    /// Makes the store accept videos by their headers without decoding them, for tests on hosts without ffmpeg.
    #[doc(hidden)]
    pub fn accepting_headers(self) -> Self {
        InputStore { decode_video: |file| media::probe_clip(file, Path::new("/dev/null/ffmpeg")), ..self }
    }

    /// Decodes an image, stores it as PNG in its display orientation and returns the name of the stored file.
    ///
    /// # Errors
    /// Returns `invalid_image` or `image_too_large` for `field`.
    pub fn keep_image(&self, field: &str, file: &Path) -> Result<String, ApiError> {
        check_image(field, BufReader::new(File::open(file).map_err(|e| unkept(&e))?))?;
        let frames = self.decoders.within(|| media::read_image_limited(file, MAX_IMAGE_PIXELS));
        let frames = frames.map_err(|error| {
            let why = match error {
                media::MediaError::Image { message, .. } => message,
                _ => {
                    format!(
                        "cannot decode the image: it is damaged, truncated or has more than {MAX_IMAGE_PIXELS} pixels"
                    )
                }
            };
            ApiError::field("invalid_image", field, format!("{field}: {}", one_line(&why)))
        })?;
        check_image_size(field, frames.width() as u64, frames.height() as u64)?;
        let rgb = frames.iter().next().unwrap_or_default();
        let png = media::png_bytes(rgb, frames.width(), frames.height());
        let png = png.map_err(|_| {
            ApiError::field("invalid_image", field, format!("{field}: cannot convert the image to PNG"))
        })?;
        self.keep(&mut Cursor::new(png), "png")
    }

    /// Stores an image like [`InputStore::keep_image`], but from memory.
    ///
    /// # Errors
    /// Same as [`InputStore::keep_image`].
    pub fn keep_image_bytes(&self, field: &str, bytes: &[u8]) -> Result<String, ApiError> {
        self.with_file(bytes, |file| self.keep_image(field, file))
    }

    /// Checks that the audio of a file can be decoded completely and is longer than `start` seconds, stores the file
    /// and returns the name of the stored file.
    ///
    /// # Errors
    /// Returns `invalid_audio` for `field`, or a storage error if the file cannot be stored.
    pub fn keep_audio(&self, field: &str, file: &Path, start: f64) -> Result<String, ApiError> {
        let fault = |why: &str| ApiError::field("invalid_audio", field, format!("{field}: {}", one_line(why)));
        let length = self.decoded_audio_seconds(file, start).map_err(|why| fault(&why))?.unwrap_or(0.0);
        if length <= 0.0 {
            return Err(fault("the file has no audio"));
        }
        if start >= length {
            return Err(fault(&format!("the audio ends after {length:.3} s, before its start offset of {start} s")));
        }
        self.keep(&mut File::open(file).map_err(|e| unkept(&e))?, "sound")
    }

    /// Checks that the audio of a video, if any, can be decoded completely.
    ///
    /// # Errors
    /// Returns `invalid_video` for `field`.
    pub fn check_video_audio(&self, field: &str, file: &Path) -> Result<(), ApiError> {
        // Formats without audio, such as GIF, are not among those from which audio is read.
        if media::has_sound(file, Path::new("ffmpeg")).is_ok_and(|has_sound| !has_sound) {
            return Ok(());
        }
        let fault = |why: &str| ApiError::field("invalid_video", field, format!("{field}: {}", one_line(why)));
        self.decoded_audio_seconds(file, 0.0).map(drop).map_err(|why| fault(&format!("audio track: {why}")))
    }

    /// Decodes up to [`MAX_CHECKED_SECONDS`] seconds of a file's audio after `start`, without keeping the samples.
    /// Returns the duration of the audio in seconds; `None` if the file has no audio. The error message is for clients
    /// and does not mention the server's tools.
    fn decoded_audio_seconds(&self, file: &Path, start: f64) -> Result<Option<f64>, String> {
        let read = || media::read_sound_from(file, Path::new("ffmpeg"), f64::MAX, Some(start + MAX_CHECKED_SECONDS));
        match self.decoders.within(read) {
            Ok(Some(part)) if part.damage.is_some() => {
                Err("the audio is damaged and cannot be decoded completely".into())
            }
            Ok(part) => Ok(part.map(|part| part.length)),
            Err(media::MediaError::Sound { reason, .. }) => Err(reason),
            Err(error) => {
                tracing::info!("rejected an audio file: {error}");
                Err("unsupported audio format; use WAV, FLAC, MP3, AAC, ALAC or Vorbis".into())
            }
        }
    }

    /// Checks that ffmpeg can decode a video completely and that its frames fit in memory, stores the file and returns
    /// the name of the stored file.
    ///
    /// # Errors
    /// Returns `invalid_video` for `field`.
    pub fn keep_video(&self, field: &str, file: &Path) -> Result<String, ApiError> {
        let fault = |why: &str| ApiError::field("invalid_video", field, format!("{field}: {}", one_line(why)));
        let info = self.decoders.within(|| (self.decode_video)(file)).map_err(|error| match error {
            media::MediaError::Clip { reason, .. } => fault(&reason),
            media::MediaError::FrameRate(rate) => {
                fault(&format!("the frame rate {rate} is not between 0.01 and 1000 frames per second"))
            }
            media::MediaError::NoDecoder { .. } => fault("this server cannot decode videos: ffmpeg is not installed"),
            _ => fault("cannot decode the video: it is damaged or not a video; convert it, e.g. ffmpeg -i IN OUT.mp4"),
        })?;
        let bytes = [info.width, info.height, info.frames].iter().fold(3u64, |all, n| all.saturating_mul(*n as u64));
        if bytes > (self.video_limit)() {
            let (w, h, n) = (info.width, info.height, info.frames);
            return Err(fault(&format!(
                "{n} frames of {w}x{h} exceed the server's limit for decoded video; use a smaller or shorter video"
            )));
        }
        self.keep(&mut File::open(file).map_err(|e| unkept(&e))?, "mp4")
    }

    /// Stores an image like [`InputStore::keep_image`], or any other file like [`InputStore::keep_video`].
    ///
    /// # Errors
    /// Same as these functions.
    pub fn keep_mask(&self, field: &str, file: &Path) -> Result<String, ApiError> {
        let mut reader = BufReader::new(File::open(file).map_err(|e| unkept(&e))?);
        match ImageKind::detect(reader.fill_buf().map_err(|e| unkept(&e))?) {
            Some(_) => self.keep_image(field, file),
            None => self.keep_video(field, file),
        }
    }

    /// Writes bytes to a temporary file and calls `look` with its path.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written, or the error that `look` returns.
    pub fn with_file<T>(&self, bytes: &[u8], look: impl FnOnce(&Path) -> Result<T, ApiError>) -> Result<T, ApiError> {
        let file = tempfile::Builder::new().prefix(NEW).tempfile_in(&self.folder).map_err(|e| unkept(&e))?;
        fs::write(file.path(), bytes).map_err(|e| unkept(&e))?;
        look(file.path())
    }

    /// Returns the path of a stored file with this name.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Returns the name of a stored file with this path; `None` if the path is outside the folder.
    pub fn name<'a>(&self, path: &'a str) -> Option<&'a str> {
        Path::new(path).strip_prefix(&self.folder).ok()?.to_str()
    }

    /// Stores contents under their hash and returns the name of the stored file.
    fn keep(&self, contents: &mut impl Read, extension: &str) -> Result<String, ApiError> {
        let mut file = tempfile::Builder::new().prefix(NEW).tempfile_in(&self.folder).map_err(|e| unkept(&e))?;
        io::copy(contents, &mut file).map_err(|e| unkept(&e))?;
        let hash = media::sha256_of(file.path()).map_err(|_| unkept(&io::ErrorKind::Other.into()))?;
        let name = format!("{hash}.{extension}");
        let path = self.path(&name);
        // Update the time of an existing file, so that the sweep of old files does not remove it during this request.
        if File::options().append(true).open(&path).and_then(|file| file.set_modified(SystemTime::now())).is_ok() {
            return Ok(name);
        }
        file.as_file().sync_all().map_err(|e| unkept(&e))?;
        file.persist(&path).map_err(|e| unkept(&e.error))?;
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(|e| unkept(&e))?;
        Ok(name)
    }
}

/// Prefix of the names of files that are not completely written.
const NEW: &str = ".new-";

/// Rejects an unsupported, oversized or too small image by its header, before the pixels are decoded.
fn check_image(field: &str, mut file: BufReader<File>) -> Result<(), ApiError> {
    let invalid = |why: String| ApiError::field("invalid_image", field, format!("{field}: {}", one_line(&why)));
    let bytes = file.get_ref().metadata().map_err(|e| unkept(&e))?.len();
    if bytes > MAX_IMAGE_BYTES {
        let why = format!("{field}: the image has {bytes} bytes; the maximum is {MAX_IMAGE_BYTES} bytes");
        return Err(ApiError::field("image_too_large", field, why));
    }
    let kind = ImageKind::detect(file.fill_buf().map_err(|e| unkept(&e))?);
    let none = "unsupported image format; use PNG, JPEG, WebP, HEIC, AVIF, GIF, BMP or TIFF, or convert it, e.g. ffmpeg -i IN OUT.png";
    let kind = kind.ok_or_else(|| invalid(none.into()))?;
    // Other formats, and files that the built-in decoders cannot read, are decoded with a limit on the number of pixels.
    let size = kind.builtin().and_then(|format| ImageReader::with_format(file, format).into_dimensions().ok());
    size.map_or(Ok(()), |(width, height)| check_image_size(field, width.into(), height.into()))
}

fn check_image_size(field: &str, width: u64, height: u64) -> Result<(), ApiError> {
    if width * height > MAX_IMAGE_PIXELS {
        let why = format!("{field}: the image has {width}x{height} pixels; the maximum is {MAX_IMAGE_PIXELS}");
        return Err(ApiError::field("image_too_large", field, why));
    }
    if width.min(height) < MIN_IMAGE_SIDE {
        let why = format!("{field}: the image has {width}x{height} pixels; each side needs at least {MIN_IMAGE_SIDE}");
        return Err(ApiError::field("invalid_image", field, why));
    }
    Ok(())
}

/// Logs the error of storing a file and converts it into a response.
pub(super) fn unkept(error: &io::Error) -> ApiError {
    tracing::error!("cannot store an input file: {error}");
    unstored(error, "a file of the request")
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Counting semaphore for code that blocks.
struct BlockingSemaphore {
    left: Mutex<usize>,
    freed: Condvar,
}

impl BlockingSemaphore {
    fn new(count: usize) -> Self {
        BlockingSemaphore { left: Mutex::new(count), freed: Condvar::new() }
    }

    fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        /// Guard of a [`BlockingSemaphore`] permit, which is released on drop, also during a panic.
        struct SemaphorePermit<'a>(&'a BlockingSemaphore);
        impl Drop for SemaphorePermit<'_> {
            fn drop(&mut self) {
                *self.0.left.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                self.0.freed.notify_one();
            }
        }
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let left = self.freed.wait_while(left, |left| *left == 0);
        *left.unwrap_or_else(PoisonError::into_inner) -= 1;
        let place = SemaphorePermit(self);
        let done = work();
        drop(place);
        done
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, Array4};

    use super::*;
    use ltx2_media::{Audio, EncoderChoice, Frames, Mp4Options, WavFormat, write_mp4, write_wav};

    #[test]
    fn video_exceeding_free_memory_is_rejected_when_uploaded() {
        let folder = tempfile::tempdir().expect("a folder");
        let inputs = InputStore::open(folder.path().join("inputs")).expect("a folder").accepting_headers();
        let file = folder.path().join("a.mp4");
        let frames = Frames::new(Array4::zeros((9, 48, 64, 3))).expect("frames");
        let options = Mp4Options { encoder: EncoderChoice::Embedded, ..Mp4Options::default() };
        write_mp4(&file, &frames, 24.0, None, &options).expect("written");
        assert!(inputs.keep_video("video", &file).is_ok());
        let inputs = InputStore { video_limit: || 9 * 48 * 64 * 3 - 1, ..inputs };
        let error = inputs.keep_video("video", &file).expect_err("too large");
        assert_eq!((error.code, error.param.as_deref()), ("invalid_video", Some("video")));
        assert!(error.message.contains("9 frames of 64x48 exceed the server's limit"), "{error:?}");
    }

    /// The sample rate in the header is checked before any audio is decoded.
    #[test]
    fn audio_with_invalid_sample_rate_is_rejected() {
        let folder = tempfile::tempdir().expect("a folder");
        let inputs = InputStore::open(folder.path().join("inputs")).expect("a folder");
        let file = folder.path().join("a.wav");
        let sound = Audio::new(Array2::zeros((1, 8)), 8000).expect("mono");
        write_wav(&file, &sound, WavFormat::Pcm16).expect("written");
        let plain = fs::read(&file).expect("a file");
        let kept = |rate: u32| {
            let header = [&plain[..24], &rate.to_le_bytes(), &plain[28..]].concat();
            fs::write(&file, header).expect("written");
            inputs.keep_audio("input_audio", &file, 0.0)
        };
        assert!(kept(8000).is_ok() && kept(384_000).is_ok());
        for rate in [7999, 999_983, 4_294_967_291] {
            let error = kept(rate).expect_err("refused");
            assert_eq!((error.code, error.param.as_deref()), ("invalid_audio", Some("input_audio")));
            assert!(error.message.contains("8000 to 384000"), "{error:?}");
        }
    }
}
