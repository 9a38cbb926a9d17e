//! Collects the frames of videos that are decoded in pieces, and encodes the frames while later pieces are decoded.

use ndarray::Axis as Dim;

use crate::media::{Frames, HdrFrames, Mp4Options, VideoStream};
use crate::pipeline::error::Result;

/// Frames of a video. `stream`: the encoder that has received the frames; `None` if encoding was not requested or could
/// not start.
pub(in crate::pipeline) struct DecodedFrames {
    pub(in crate::pipeline) frames: Frames,
    pub(in crate::pipeline) stream: Option<VideoStream>,
    /// Scene-linear frames, if the video is HDR; `frames` are then their SDR preview.
    pub(in crate::pipeline) hdr: Option<HdrFrames>,
}

impl From<Frames> for DecodedFrames {
    fn from(frames: Frames) -> Self {
        DecodedFrames { frames, stream: None, hdr: None }
    }
}

impl DecodedFrames {
    /// Starts to encode a complete video in the background. `encode`: `None` if encoding was not requested.
    pub(in crate::pipeline) fn encoding(frames: Frames, frame_rate: f64, encode: Option<&Mp4Options>) -> Self {
        let start = |options| VideoStream::start(&frames, frame_rate, options).ok().flatten();
        let stream = encode.and_then(start);
        if let Some(stream) = &stream {
            stream.push(frames.clone());
        }
        DecodedFrames { frames, stream, hdr: None }
    }
}

/// Decoded pieces of the videos of a batch.
pub(in crate::pipeline) struct Pieces<'a> {
    frame_rate: f64,
    encode: Option<&'a Mp4Options>,
    videos: Vec<CollectedVideo>,
}

struct CollectedVideo {
    pieces: Vec<Frames>,
    stream: Option<VideoStream>,
}

impl<'a> Pieces<'a> {
    pub(in crate::pipeline) fn new(frame_rate: f64, encode: Option<&'a Mp4Options>) -> Self {
        Pieces { frame_rate, encode, videos: Vec::new() }
    }

    /// Appends the next frames of each video. If an encoder cannot start, the frames are kept without encoding them;
    /// the error is reported when the file is written, which starts an encoder again.
    pub(in crate::pipeline) fn add(&mut self, next: Vec<Frames>) {
        if self.videos.is_empty() {
            let begin = |first: &Frames| {
                let start = |options| VideoStream::start(first, self.frame_rate, options).ok().flatten();
                CollectedVideo { pieces: Vec::new(), stream: self.encode.and_then(start) }
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

    /// Returns the complete videos. Their encoders may still be running.
    pub(in crate::pipeline) fn finish(self) -> Result<Vec<DecodedFrames>> {
        let whole = |video: CollectedVideo| {
            let views: Vec<_> = video.pieces.iter().map(|piece| piece.data().view()).collect();
            let data = ndarray::concatenate(Dim(0), &views).expect("pieces differ only in their number of frames");
            Ok(DecodedFrames { frames: Frames::new(data)?, stream: video.stream, hdr: None })
        };
        self.videos.into_iter().map(whole).collect()
    }
}
