//! Videos whose frames are decoded piece by piece: kept as bytes, and encoded meanwhile.

use ndarray::Axis as Dim;

use super::error::Result;
use crate::media::{Frames, Mp4Options, VideoStream};

/// A video's frames, and the encoder that has got them, where that was asked for and is possible.
pub(super) struct Decoded {
    pub(super) frames: Frames,
    pub(super) stream: Option<VideoStream>,
}

impl From<Frames> for Decoded {
    /// Frames that were decoded at once.
    fn from(frames: Frames) -> Self {
        Decoded { frames, stream: None }
    }
}

/// Videos that are made together.
pub(super) struct Pieces<'a> {
    frame_rate: f64,
    encode: Option<&'a Mp4Options>,
    videos: Vec<Video>,
}

struct Video {
    pieces: Vec<Frames>,
    stream: Option<VideoStream>,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(frame_rate: f64, encode: Option<&'a Mp4Options>) -> Self {
        Pieces { frame_rate, encode, videos: Vec::new() }
    }

    /// Adds the next frames of each video. An encoder that cannot start costs no frames: it fails again where the file is
    /// written.
    pub(super) fn add(&mut self, next: Vec<Frames>) {
        if self.videos.is_empty() {
            let begin = |first: &Frames| {
                let start = |options| VideoStream::start(first, self.frame_rate, options).ok().flatten();
                Video { pieces: Vec::new(), stream: self.encode.and_then(start) }
            };
            self.videos = next.iter().map(begin).collect();
        }
        for (video, frames) in self.videos.iter_mut().zip(next) {
            if let Some(stream) = &video.stream {
                stream.push(frames.clone());
            }
            video.pieces.push(frames);
        }
    }

    /// The whole videos; encoders may still be at their last frames.
    ///
    /// # Errors
    /// Videos without frames.
    pub(super) fn finish(self) -> Result<Vec<Decoded>> {
        let whole = |video: Video| {
            let views: Vec<_> = video.pieces.iter().map(|piece| piece.data().view()).collect();
            let data = ndarray::concatenate(Dim(0), &views).expect("pieces differ in their number of frames alone");
            Ok(Decoded { frames: Frames::new(data)?, stream: video.stream })
        };
        self.videos.into_iter().map(whole).collect()
    }
}
