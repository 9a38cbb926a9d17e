//! Options of an MP4 file.

use std::path::PathBuf;

use crate::defaults::with_defaults;

/// Which encoder a caller asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncoderChoice {
    /// ffmpeg when it is installed with libx264, the embedded one otherwise.
    #[default]
    Auto,
    /// ffmpeg; an error without it.
    Ffmpeg,
    /// The encoders in this binary.
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
    /// How a clip is encoded.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Mp4Options {
        pub encoder: EncoderChoice = EncoderChoice::Auto,
        /// The ffmpeg program: a path, or a name to be found on PATH.
        pub ffmpeg: PathBuf = "ffmpeg".into(),
        /// Quality, 0 (best) to 51: x264's constant rate factor, and the embedded encoder's quantizer.
        pub crf: u8 = 19,
        /// Bits a second of the sound.
        pub audio_bitrate: u32 = 192_000,
        /// Whether a file that has the name by then is replaced.
        pub replace: bool = true,
    }
}
