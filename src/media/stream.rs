//! A video that is encoded while its later frames are made.

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
use crate::contained::{caught, panic_message};
use crate::failpoint;

/// A thread that encodes frames as they come. One piece waits at most: a faster decoder waits for the encoder.
pub struct VideoStream {
    pieces: SyncSender<Frames>,
    thread: JoinHandle<Part>,
}

/// Encoded frames, the same bytes as if they had been encoded at once.
pub struct EncodedVideo {
    track: Track,
}

/// The frames that are encoded when an encoder ends, if there are any, and whether these are all.
pub(super) type Part = (Option<EncodedVideo>, Result<()>);

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
        let thread = Builder::new().name("encode".into()).spawn(move || encode(track, &arrivals));
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
        let (video, ended) = self.finish_part();
        ended?;
        video.ok_or_else(|| panicked("it encoded no frame".into()))
    }

    /// Waits for the last frame, or for the failure of the encoder.
    pub(super) fn finish_part(self) -> Part {
        drop(self.pieces);
        self.thread.join().unwrap_or_else(|panic| (None, Err(panicked(panic_message(&*panic)))))
    }
}

fn panicked(message: String) -> Error {
    Error::Panicked { work: "the H.264 encoder", message }
}

/// Encodes frames as they come.
fn encode(mut track: TrackBuilder, pieces: &Receiver<Frames>) -> Part {
    let added = caught(|| add_all(&mut track, pieces), panicked);
    match track.finish() {
        Ok(track) => (Some(EncodedVideo { track }), added),
        Err(none) => (None, added.and(Err(none))),
    }
}

fn add_all(track: &mut TrackBuilder, pieces: &Receiver<Frames>) -> Result<()> {
    // Frames of a group that is not complete.
    let mut rest: Vec<Vec<u8>> = Vec::new();
    for piece in pieces {
        failpoint::fail("encode", track.count())
            .map_err(|e| Error::Embedded { codec: "H.264", message: e.to_string() })?;
        let all: Vec<&[u8]> = rest.iter().map(Vec::as_slice).chain(piece.iter()).collect();
        let (whole, begun) = all.split_at(all.len() / GROUP * GROUP);
        track.add(whole)?;
        rest = begun.iter().map(|frame| frame.to_vec()).collect();
    }
    track.add(&rest.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

impl EncodedVideo {
    pub(super) fn track(&self) -> &Track {
        &self.track
    }
}
