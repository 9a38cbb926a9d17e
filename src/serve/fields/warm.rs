//! Synthetic input files for warm-up: grey frames and silence, of the size and length of the shape.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ndarray::{Array2, Array4};
use serde_json::{Map, Value, json};

use super::{Fields, Shape};
use crate::config::{Support, VideoUse};
use crate::media::{self, Audio, Frames, Mp4Options, WavFormat};

/// Default overlap of an extension, in frames.
const OVERLAP: usize = 25;
/// Sample rate of the silence, in Hz.
const RATE: u32 = 48_000;

impl Fields {
    /// Returns the fields of a warm-up request except prompt and seed.
    pub(super) fn warm_fields(&self, shape: &Shape) -> media::Result<Map<String, Value>> {
        let &Shape { width, height, num_frames, pipeline } = shape;
        let fps = self.loaded.config.request.frame_rate;
        let silence = |frames: usize| {
            let samples = (frames as f64 / fps * f64::from(RATE)).ceil() as usize;
            Audio::new(Array2::zeros((2, samples.max(1))), RATE)
        };
        let video = |frames: usize| {
            let grey = Frames::new(Array4::from_elem((frames, height, width, 3), 128))?;
            let sound = silence(frames)?;
            written("mp4", |path| media::write_mp4(path, &grey, fps, Some(&sound), &Mp4Options::default()).map(drop))
        };
        let spec = pipeline.spec();
        let mut fields = Map::new();
        if spec.images == Support::Required {
            let grey = media::png_bytes(&[128; 3 * 32 * 32], 32, 32).expect("pixels of 32 x 32");
            fields.insert("input_reference".into(), STANDARD.encode(grey).into());
        }
        if spec.audio == Support::Required {
            let sound = silence(num_frames)?;
            let wav = written("wav", |path| media::write_wav(path, &sound, WavFormat::Pcm16))?;
            fields.insert("input_audio".into(), wav.into());
        }
        if spec.reference_videos == Support::Required {
            fields.insert("reference_videos".into(), json!([{"data": video(num_frames)?}]));
        }
        let more = match spec.video {
            // If a pipeline has an input video, size and number of frames come from the video.
            None => json!({"width": width, "height": height, "num_frames": num_frames}),
            // The upper left quarter of the picture.
            Some(VideoUse::Region) => {
                json!({"input_video": video(num_frames)?, "region": [0, 0, width.div_ceil(2), height.div_ceil(2)]})
            }
            Some(VideoUse::Span) => json!({"input_video": video(num_frames)?, "start": 0, "end": 1}),
            Some(VideoUse::Whole | VideoUse::Reference) => json!({"input_video": video(num_frames)?}),
            Some(VideoUse::Overlap) => {
                // The input video consists of the overlap; the extension adds the remaining frames.
                let overlap = [OVERLAP, 9].into_iter().find(|overlap| overlap + 8 <= num_frames).unwrap_or(9);
                let seconds = num_frames.saturating_sub(overlap).max(8) as f64 / fps;
                json!({"input_video": video(overlap)?, "seconds": seconds, "overlap": overlap})
            }
        };
        fields.extend(more.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
        Ok(fields)
    }
}

/// Creates a file with `write` and returns its contents as base64.
fn written(kind: &str, write: impl FnOnce(&Path) -> media::Result<()>) -> media::Result<String> {
    let io = |source| crate::atomic_file::FileError { action: "write", path: "a warm-up file".into(), source };
    let folder = tempfile::tempdir().map_err(io)?;
    let path = folder.path().join(format!("warm.{kind}"));
    write(&path)?;
    Ok(STANDARD.encode(std::fs::read(&path).map_err(io)?))
}
