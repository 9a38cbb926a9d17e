//! A video that is encoded while its later frames are made.

use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use super::encoder::{Encoder, choose};
use super::error::{Error, Result};
use super::frames::Frames;
use super::h264::{FrameEncoder, GROUP};
use super::isobmff::Track;
use super::options::Mp4Options;
use super::rate::FrameRate;

/// A thread that encodes frames as they come. One piece waits at most: a faster decoder waits for the encoder.
pub struct VideoStream {
    pieces: SyncSender<Frames>,
    thread: JoinHandle<Result<EncodedVideo>>,
}

/// Encoded frames, the same bytes as if they had been encoded at once.
pub struct EncodedVideo {
    encoder: FrameEncoder,
    /// Access units, one a frame.
    units: Vec<Vec<u8>>,
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
        let encoder = FrameEncoder::new(first.width(), first.height(), FrameRate::from_f64(fps)?, options.crf)?;
        let (pieces, arrivals) = sync_channel(1);
        let work = move || EncodedVideo::of(encoder, &arrivals);
        let thread = Builder::new().name("encode".into()).spawn(work);
        let failed = |e: std::io::Error| Error::Embedded { codec: "H.264", message: e.to_string() };
        Ok(Some(VideoStream { pieces, thread: thread.map_err(failed)? }))
    }

    /// Adds the next frames. Those behind a failure are dropped: [`VideoStream::finish`] has it.
    pub fn push(&self, frames: Frames) {
        drop(self.pieces.send(frames));
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
    fn of(encoder: FrameEncoder, pieces: &Receiver<Frames>) -> Result<Self> {
        let mut units = Vec::new();
        // Frames of a group that is not complete.
        let mut rest: Vec<Vec<u8>> = Vec::new();
        for piece in pieces {
            let all: Vec<&[u8]> = rest.iter().map(Vec::as_slice).chain(piece.iter()).collect();
            let (whole, begun) = all.split_at(all.len() / GROUP * GROUP);
            units.extend(encoder.units(whole)?);
            rest = begun.iter().map(|frame| frame.to_vec()).collect();
        }
        units.extend(encoder.units(&rest.iter().map(Vec::as_slice).collect::<Vec<_>>())?);
        Ok(EncodedVideo { encoder, units })
    }

    pub(super) fn track(&self) -> Result<Track> {
        self.encoder.track(&self.units)
    }
}
