//! A video that is encoded while its later frames are made.

use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use super::encoder::{Encoder, choose};
use super::error::{Error, Result};
use super::frames::Frames;
use super::h264::{FrameEncoder, GROUP, TrackBuilder};
use super::isobmff::Track;
use super::options::Mp4Options;
use super::rate::FrameRate;
use super::samples::Samples;

/// A thread that encodes frames as they come. One piece waits at most: a faster decoder waits for the encoder.
pub struct VideoStream {
    pieces: SyncSender<Frames>,
    thread: JoinHandle<Result<EncodedVideo>>,
}

/// Encoded frames, the same bytes as if they had been encoded at once.
pub struct EncodedVideo {
    track: Track,
}

impl VideoStream {
    /// Begins a video of frames like `first`, at `fps` frames a second; none where ffmpeg encodes, which takes whole videos.
    ///
    /// # Errors
    /// A rate or size that no video has; ffmpeg that is asked for and not there.
    pub fn start(first: &Frames, fps: f64, options: &Mp4Options) -> Result<Option<Self>> {
        if choose(options)? != Encoder::Embedded {
            return Ok(None);
        }
        VideoStream::embedded(first, FrameRate::from_f64(fps)?, options, Samples::in_memory()).map(Some)
    }

    /// The same by the encoder in this binary, into `samples`.
    pub(super) fn embedded(first: &Frames, rate: FrameRate, options: &Mp4Options, samples: Samples) -> Result<Self> {
        let encoder = FrameEncoder::new(first.width(), first.height(), rate, options.crf)?;
        let track = TrackBuilder::new(encoder, samples);
        let (pieces, arrivals) = sync_channel(1);
        let thread = Builder::new().name("encode".into()).spawn(move || EncodedVideo::of(track, &arrivals));
        let failed = |e: std::io::Error| Error::Embedded { codec: "H.264", message: e.to_string() };
        Ok(VideoStream { pieces, thread: thread.map_err(failed)? })
    }

    /// Adds the next frames. Returns whether the encoder still runs; after a failure [`VideoStream::finish`] returns its error.
    pub fn push(&self, frames: Frames) -> bool {
        self.pieces.send(frames).is_ok()
    }

    /// Waits for the last frame.
    ///
    /// # Errors
    /// The encoder's.
    pub fn finish(self) -> Result<EncodedVideo> {
        drop(self.pieces);
        self.thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl EncodedVideo {
    fn of(mut track: TrackBuilder, pieces: &Receiver<Frames>) -> Result<Self> {
        // Frames of a group that is not complete.
        let mut rest: Vec<Vec<u8>> = Vec::new();
        for piece in pieces {
            let all: Vec<&[u8]> = rest.iter().map(Vec::as_slice).chain(piece.iter()).collect();
            let (whole, begun) = all.split_at(all.len() / GROUP * GROUP);
            track.add(whole)?;
            rest = begun.iter().map(|frame| frame.to_vec()).collect();
        }
        track.add(&rest.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        Ok(EncodedVideo { track: track.finish()? })
    }

    pub(super) fn track(&self) -> &Track {
        &self.track
    }
}
