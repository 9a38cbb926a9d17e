//! Prompt scores of the toy model (`assets/nano`): whether a clip has the colour, the motion and the sound that its
//! prompt asks for.

use std::collections::BTreeMap;

use ndarray::Array2;
use serde::{Deserialize, Serialize};

mod hear;
mod see;

pub use hear::{Heard, hear};
pub use see::{Seen, see};

use crate::media::Frames;

/// Duration of a frame in seconds: maximum offset between a beep and its bounce.
const FRAME: f64 = 1.0 / 24.0;

/// Prompt of the toy model with the expected colour, motion and pitch.
#[derive(Clone, Debug, Deserialize)]
pub struct ToyPrompt {
    /// Text of the prompt.
    pub prompt: String,
    /// Colour of the shape.
    pub colour: String,
    /// Motion, as named in scripts/nano/world.py.
    pub motion: String,
    /// `low`, `middle`, `high` or `silent`.
    pub pitch: String,
}

/// Number of correct results and of all results per property; the property `all` counts clips without any error.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PromptScores(pub BTreeMap<String, (usize, usize)>);

impl PromptScores {
    fn count(&mut self, property: &'static str, is_right: bool) {
        let (good, all) = self.0.entry(property.into()).or_default();
        *good += usize::from(is_right);
        *all += 1;
    }

    /// Scores a clip with audio samples `[channels, n]` at `rate` Hz. Returns a description of the clip if it does not
    /// follow its prompt.
    pub fn judge(&mut self, wanted: &ToyPrompt, frames: &Frames, audio: &Array2<f32>, rate: usize) -> Option<String> {
        let (seen, heard) = (see(frames), hear(audio, rate));
        let marks = [
            ("colour", seen.colour == wanted.colour),
            ("direction", seen.motion == wanted.motion),
            ("pitch", heard.pitch == wanted.pitch),
        ];
        let mut is_right = marks.iter().all(|(_, is_right)| *is_right);
        for (property, is_right) in marks {
            self.count(property, is_right);
        }
        if wanted.motion == "bounce" && wanted.pitch != "silent" {
            // A bounce at the very end leaves no time for its beep.
            let end = frames.count() as f64 * FRAME - 0.06;
            let times: Vec<f64> = seen.bounces.iter().map(|b| b * FRAME).filter(|t| *t < end).collect();
            let near = |t: &f64| heard.onsets.iter().any(|onset| (onset - t).abs() <= FRAME);
            // A clip without bounces counts as one missing beep. Surplus beeps without a bounce are errors too.
            let beeps: Vec<bool> = if times.is_empty() { vec![false] } else { times.iter().map(near).collect() };
            is_right &= beeps.iter().all(|b| *b) && heard.onsets.len() <= times.len() + 1;
            for beep in beeps {
                self.count("beep", beep);
            }
        }
        self.count("all", is_right);
        (!is_right).then(|| format!("{seen:?}, {heard:?}"))
    }

    /// Returns the fraction of correct results of a property; NaN if no clip has the property.
    pub fn share(&self, property: &str) -> f64 {
        let (good, all) = self.0.get(property).copied().unwrap_or_default();
        good as f64 / all as f64
    }
}
