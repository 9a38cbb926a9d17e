use std::path::PathBuf;

use ltx2_base::with_defaults;

/// The requested video encoder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncoderChoice {
    /// ffmpeg if it is installed with libx264, otherwise the embedded encoder.
    #[default]
    Auto,
    /// ffmpeg; an error if it is not installed.
    Ffmpeg,
    /// The encoders built into this binary.
    Embedded,
}

impl std::str::FromStr for EncoderChoice {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            "ffmpeg" => Ok(Self::Ffmpeg),
            "embedded" => Ok(Self::Embedded),
            other => Err(format!("unknown video encoder '{other}'; use auto, ffmpeg or embedded")),
        }
    }
}

with_defaults! {
    /// Encoding options of an MP4 file.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Mp4Options {
        /// Requested encoder of the video and the sound.
        pub encoder: EncoderChoice = EncoderChoice::Auto,
        /// The ffmpeg program: a path, or a name that is looked up on PATH.
        pub ffmpeg: PathBuf = "ffmpeg".into(),
        /// Quality, 0 (best) to 51: x264's constant rate factor, or the embedded encoder's quantizer.
        pub crf: u8 = 19,
        /// Audio bitrate in bits per second.
        pub audio_bitrate: u32 = 192_000,
        /// Whether to replace an existing file when the output is complete.
        pub replace: bool = true,
    }
}
