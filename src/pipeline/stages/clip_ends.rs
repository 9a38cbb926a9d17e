//! Final latents of each pass of a clip, with which the same pass of the next clip starts.

use ndarray::{Array3, s};

use crate::av::Av;
use crate::pipeline::error::Result;
use crate::pipeline::output::tensors::fixed;
use crate::pipeline::phase::Phase;
use crate::request::{ClipChain, ModelSizes, Shapes};
use crate::tensor::Tensor;
use crate::weights::Checkpoint;

/// Final latents of a clip, by pass. The next clip contains them from its second latent frame on. Its first latent
/// frame is generated, because the first latent frame of a clip encodes a single frame (for audio, a single spectrum).
/// The latents are stored as normalised tokens and need not be decoded and encoded again.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClipEnds {
    /// Index of the first latent that is kept, for each stream.
    from: Av<usize>,
    passes: Vec<(Phase, Av<Array3<f32>>)>,
}

impl ClipEnds {
    /// Sets which latents of clip `at` are kept for the next clip.
    pub(in crate::pipeline) fn enter(&mut self, chain: &ClipChain, at: usize, sizes: &ModelSizes, frame_rate: f64) {
        let [own, next] = [at, at + 1].map(|at| chain.audio_start(at, &sizes.audio_grid, frame_rate));
        let video = chain.step() / sizes.video_grid.temporal_compression;
        // Skip the latent frame whose last frame is the first frame of the next clip.
        self.from = Av { video: video + 1, audio: next - own + 1 };
    }

    /// Restores the latents that an interrupted run saved.
    pub(in crate::pipeline) fn restore(&mut self, kept: ClipEnds) {
        self.passes = kept.passes;
    }

    /// Returns the tokens of the previous clip with which this pass starts; `None` in the first clip.
    pub(in crate::pipeline) fn before(&self, phase: Phase) -> Option<&Av<Array3<f32>>> {
        self.passes.iter().find(|(of, _)| *of == phase).map(|(_, ends)| ends)
    }

    /// Stores the final tokens of a pass; replaces those of the previous clip. `tokens`: all tokens of the pass, `[b,
    /// n, c]`.
    pub(in crate::pipeline) fn keep(&mut self, phase: Phase, tokens: Av<&Array3<f32>>, shapes: &Shapes) {
        let per_latent = Av { video: shapes.frame_tokens(), audio: 1 };
        let ends = tokens.zip(per_latent.zip(self.from)).map(|(tokens, (each, from))| {
            let from = (from * each).min(tokens.dim().1);
            tokens.slice(s![.., from.., ..]).to_owned()
        });
        self.passes.retain(|(of, _)| *of != phase);
        self.passes.push((phase, ends));
    }

    /// Returns the tokens with their names in a checkpoint file.
    pub(in crate::pipeline) fn tensors(&self) -> impl Iterator<Item = (String, Tensor)> {
        let each = self.passes.iter().flat_map(|(phase, ends)| names(*phase).zip(ends.as_ref()));
        each.map(|(name, tokens)| (name, tokens.clone().into()))
    }

    /// Reads the tokens from a checkpoint file.
    pub(in crate::pipeline) fn read(file: &Checkpoint) -> Result<Self> {
        let mut passes = Vec::new();
        for phase in [Phase::Denoise, Phase::Refine] {
            if names(phase).into_iter().all(|name| file.contains(&name)) {
                let ends = names(phase).try_map(|name| fixed(file.get(&name)?.to_tensor()?.into_f32()))?;
                passes.push((phase, ends));
            }
        }
        Ok(ClipEnds { passes, ..ClipEnds::default() })
    }
}

fn names(phase: Phase) -> Av<String> {
    Av::NAMES.map(|stream| format!("ends.{}.{stream}", phase.name()))
}
