//! Encodes a video while its later frames are still being generated.

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use super::encoder::{Encoder, choose};
use super::error::{MediaError, Result};
use super::frames::Frames;
use super::h264::{FrameEncoder, GROUP, TrackBuilder};
use super::isobmff::Mp4Track;
use super::options::Mp4Options;
use super::rate::FrameRate;
use super::samples::Samples;
use ltx2_base::catch_panic::{catch_panics, panic_message};
use ltx2_base::failpoint;

/// A thread that encodes frames as they arrive. Its queue holds the frames of one [`VideoStream::push`]; the next push
/// blocks until the encoder has taken the queued frames.
pub struct VideoStream {
    pieces: SyncSender<Frames>,
    thread: JoinHandle<EncodedPart>,
}

/// Encoded frames, byte for byte the same as if they had been encoded in one call.
pub struct EncodedVideo {
    track: Mp4Track,
}

/// The encoder's result, and the frames that it encoded, if any.
pub(super) type EncodedPart = (Option<EncodedVideo>, Result<()>);

impl VideoStream {
    /// Starts a video with frames of the size of `first` at `fps` frames per second. Returns `None` if ffmpeg is the
    /// encoder, because this type only supports the built-in encoder.
    ///
    /// # Errors
    /// Returns an error if the rate or size is invalid, or if ffmpeg is requested but not available.
    pub fn start(first: &Frames, fps: f64, options: &Mp4Options) -> Result<Option<Self>> {
        if choose(options)? != Encoder::Embedded {
            return Ok(None);
        }
        VideoStream::embedded(first, FrameRate::from_f64(fps)?, options, Samples::in_memory()).map(Some)
    }

    /// Starts a video like [`VideoStream::start`] with the built-in encoder, which appends the encoded frames to
    /// `samples`.
    pub(super) fn embedded(first: &Frames, rate: FrameRate, options: &Mp4Options, samples: Samples) -> Result<Self> {
        let encoder = FrameEncoder::new(first.width(), first.height(), rate, options.crf)?;
        let track = TrackBuilder::new(encoder, samples);
        let (pieces, arrivals) = sync_channel(1);
        let thread = Builder::new().name("encode".into()).spawn(move || encode(track, &arrivals));
        let thread = thread.map_err(MediaError::io("start a thread to encode", Path::new("the video")))?;
        Ok(VideoStream { pieces, thread })
    }

    /// Adds frames. Returns whether the encoder is still running; if it is not, [`VideoStream::finish`] returns its
    /// error.
    pub fn push(&self, frames: Frames) -> bool {
        self.pieces.send(frames).is_ok()
    }

    /// Waits until all frames are encoded.
    ///
    /// # Errors
    /// Returns the encoder's error.
    pub fn finish(self) -> Result<EncodedVideo> {
        let (video, ended) = self.finish_part();
        ended?;
        video.ok_or_else(|| panicked("no frame was encoded".into()))
    }

    /// Waits until all frames are encoded or the encoder fails.
    pub(super) fn finish_part(self) -> EncodedPart {
        drop(self.pieces);
        self.thread.join().unwrap_or_else(|panic| (None, Err(panicked(panic_message(&*panic)))))
    }
}

fn panicked(message: String) -> MediaError {
    MediaError::Panicked { work: "the H.264 encoder", message }
}

fn encode(mut track: TrackBuilder, pieces: &Receiver<Frames>) -> EncodedPart {
    let added = catch_panics(|| add_all(&mut track, pieces), panicked);
    match track.finish() {
        Ok(track) => (Some(EncodedVideo { track }), added),
        Err(none) => (None, added.and(Err(none))),
    }
}

fn add_all(track: &mut TrackBuilder, pieces: &Receiver<Frames>) -> Result<()> {
    // Frames of an incomplete GOP.
    let mut rest: Vec<Vec<u8>> = Vec::new();
    for piece in pieces {
        failpoint::fail("encode", track.count())
            .map_err(|e| MediaError::Embedded { codec: "H.264", message: e.to_string() })?;
        let all: Vec<&[u8]> = rest.iter().map(Vec::as_slice).chain(piece.iter()).collect();
        let (whole, begun) = all.split_at(all.len() / GROUP * GROUP);
        track.add(whole)?;
        rest = begun.iter().map(|frame| frame.to_vec()).collect();
    }
    track.add(&rest.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

impl EncodedVideo {
    pub(super) fn track(&self) -> &Mp4Track {
        &self.track
    }

    pub(super) fn into_track(self) -> Mp4Track {
        self.track
    }
}
