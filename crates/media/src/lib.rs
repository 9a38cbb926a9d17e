//! Reads and writes media files: videos, audio and images in, MP4, WAV, PNG and EXR out.
//!
//! [`Frames`] and [`Audio`] hold raw frames and samples; the hashes in the sidecar (the JSON file with a run's
//! settings) are computed from them. [`write_mp4`] encodes both with ffmpeg if it is installed, otherwise with the
//! encoders built into this binary. Every output file is written under a temporary name in its target folder and
//! renamed when it is complete.

#![warn(missing_docs)]

mod aac;
mod audio;
mod bt601;
mod clip;
mod decode;
mod downmix;
mod edit_list;
mod encoder;
mod error;
mod exr;
mod ffmpeg;
mod frame_times;
mod frames;
mod h264;
mod hash;
mod hdr;
mod hdr_video;
mod image_facts;
mod image_ffmpeg;
mod image_file;
mod image_kind;
mod image_pixels;
mod isobmff;
mod jpeg_end;
mod long;
mod mp4;
mod options;
mod png;
mod preprocess;
mod rate;
mod round_trip;
mod samples;
mod sound;
mod sound_builtin;
mod sound_ffmpeg;
mod sound_file;
mod sound_part;
mod stream;
mod tables;
mod track_times;
mod video_track;
mod wav;
mod yuv;

pub use aac::AAC_RATES;
pub use audio::Audio;
pub use clip::{
    Clip, ClipPart, covering_clip, padded_clip, probe_clip, read_clip, read_first_alphas, read_first_frames,
};
pub use clip::{decode_upload, frame_memory_limit, has_sound};
pub use decode::read_video;
pub use encoder::Encoder;
pub use error::{MediaError, Result};
pub use exr::{exr_frame_path, exr_frames_in, remove_exr_frames, write_exr_archive, write_exr_frames};
pub use frame_times::ClipInfo;
pub use frames::Frames;
pub use hash::sha256_of;
pub use hdr::{HdrFrames, HdrTransform};
pub use hdr_video::{HdrCodec, HdrSignal, hdr_video_fault, write_hdr_video};
pub use image_file::read_image_limited;
#[doc(hidden)]
pub use image_file::{covering, read_image, read_image_with};
pub use image_kind::ImageKind;
pub use long::{LongHashes, LongMp4};
pub use mp4::{copy_video_with_audio, write_encoded_mp4, write_mp4};
pub use options::{EncoderChoice, Mp4Options};
pub use png::{png_bytes, read_png, read_png_frames, write_png, write_png_frames};
pub use png::{png_frame_path, png_frames_in, remove_png_frames, write_new_png_frames};
pub use preprocess::{FrameFilter, Preprocess, PreprocessKind, PreprocessOptions};
pub use rate::FrameRate;
pub use round_trip::{ImageH264, RoundTrip};
pub use sound::{read_sound, read_sound_from};
pub use sound_part::SoundPart;
pub use stream::{EncodedVideo, VideoStream};
pub use wav::write_wav_file;
pub use wav::{WavFormat, read_wav, write_wav};
