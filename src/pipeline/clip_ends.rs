//! Latents of the end of a clip, which the next one starts from: each pass from those of the same pass.

use ndarray::{Array3, s};

use super::error::Result;
use super::phase::Phase;
use super::tensors::fixed;
use crate::av::Av;
use crate::request::{Chain, ModelSizes, Shapes};
use crate::tensor::Tensor;
use crate::weights::Checkpoint;

/// Latents that a clip ends with and the next one has behind its first: the clip's first latent stands for a single frame, or
/// spectrum, which is made with the rest. Normalised tokens, so that nothing is decoded and encoded between.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClipEnds {
    /// First latent of each stream that the next clip starts from.
    from: Av<usize>,
    passes: Vec<(Phase, Av<Array3<f32>>)>,
}

impl ClipEnds {
    /// Says that the clip `at` of a chain is made next, from the ends of the one before.
    pub(super) fn enter(&mut self, chain: &Chain, at: usize, sizes: &ModelSizes, frame_rate: f64) {
        let [own, next] = [at, at + 1].map(|at| chain.audio_start(at, &sizes.audio_grid, frame_rate));
        let video = chain.step() / sizes.video_grid.temporal_compression;
        // The latent that ends with the next clip's first frame is none of it.
        self.from = Av { video: video + 1, audio: next - own + 1 };
    }

    /// Puts those in place that an ended run has kept.
    pub(super) fn go_on(&mut self, kept: ClipEnds) {
        self.passes = kept.passes;
    }

    /// Those that a pass starts from; none in the first clip.
    pub(super) fn before(&self, phase: Phase) -> Option<&Av<Array3<f32>>> {
        self.passes.iter().find(|(of, _)| *of == phase).map(|(_, ends)| ends)
    }

    /// Keeps the end of a pass' tokens `[b, n, c]` in the place of that of the clip before.
    pub(super) fn keep(&mut self, phase: Phase, tokens: Av<&Array3<f32>>, shapes: &Shapes) {
        let per_latent = Av { video: shapes.frame_tokens(), audio: 1 };
        let ends = tokens.zip(per_latent.zip(self.from)).map(|(tokens, (each, from))| {
            let from = (from * each).min(tokens.dim().1);
            tokens.slice(s![.., from.., ..]).to_owned()
        });
        self.passes.retain(|(of, _)| *of != phase);
        self.passes.push((phase, ends));
    }

    /// They as tensors of a file, by their names there.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (String, Tensor)> {
        let each = self.passes.iter().flat_map(|(phase, ends)| names(*phase).zip(ends.as_ref()));
        each.map(|(name, tokens)| (name, tokens.clone().into()))
    }

    /// Those that a file holds.
    ///
    /// # Errors
    /// A file that is damaged.
    pub(super) fn read(file: &Checkpoint) -> Result<Self> {
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
