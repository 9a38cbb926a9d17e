//! Upsampling between two passes: the request of the first pass, and the sizes between upsamplers.

use super::dfr::MAX_POSITION_RATE;
use super::{Condition, Content, Placement, Request};
use crate::av::Av;
use crate::models::upsampler::Upsampling;
use crate::sampling::denoise::StreamRole;
use crate::sampling::latents::VideoShape;

/// One upsampling of latents, with the sizes `[frames, rows, columns]` of its input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct UpsamplingStep {
    pub(crate) upsampling: Upsampling,
    pub(crate) from: [usize; 3],
    pub(crate) to: [usize; 3],
}

/// Returns the upsampling steps from the latents of one pass to those of the next pass.
pub(crate) fn upsampling_steps(all: &[Upsampling], from: &VideoShape, to: &VideoShape) -> Vec<UpsamplingStep> {
    let mut size = [from.frames, from.height, from.width];
    let step = |upsampling: &Upsampling| {
        let from = size;
        size = match upsampling {
            Upsampling::TemporalX2 => [to.frames, from[1], from[2]],
            Upsampling::SpatialX2 | Upsampling::SpatialX1_5 => [from[0], to.height, to.width],
        };
        UpsamplingStep { upsampling: *upsampling, from, to: size }
    };
    all.iter().map(step).collect()
}

/// Returns the spatial upsampling step of `keyframes` separate latent frames.
pub(crate) fn keyframe_step(keyframes: usize, from: &VideoShape, to: &VideoShape) -> UpsamplingStep {
    let (from, to) = ([keyframes, from.height, from.width], [keyframes, to.height, to.width]);
    UpsamplingStep { upsampling: Upsampling::SpatialX2, from, to }
}

impl Request {
    /// Returns the request of the previous pass, whose latents are upsampled to the size of this request.
    pub(super) fn before(self, all: &[Upsampling]) -> Request {
        all.iter().fold(self, |request, upsampling| match upsampling {
            Upsampling::TemporalX2 => request.at_half_rate(),
            Upsampling::SpatialX2 | Upsampling::SpatialX1_5 => {
                let [times, of] = upsampling.rows();
                Request { width: request.width / times * of, height: request.height / times * of, ..request }
            }
        })
    }

    /// Returns the request at half the frame rate, with sound of the same duration.
    fn at_half_rate(self) -> Request {
        Request {
            num_frames: (self.num_frames - 1) / 2 + 1,
            frame_rate: self.frame_rate / 2.0,
            sound_frames: Some((self.num_frames, self.frame_rate)),
            conditions: Av { video: self.conditions.video.into_iter().map(at_half_rate).collect(), ..self.conditions },
            ..self
        }
    }

    /// Returns the request of a pass that follows temporal upsampling. Unless there is input audio, the pass keeps the
    /// audio of the previous pass, as the temporal rounds of diffusers' DFR pipeline do.
    pub(super) fn at_full_rate(self) -> Request {
        let own_sound = !self.has_sound();
        let roles = Av { audio: if own_sound { StreamRole::Kept } else { self.roles.audio }, ..self.roles };
        let position_rate = Some(self.frame_rate.min(MAX_POSITION_RATE));
        let mut second = Request { roles, position_rate, ..self };
        if own_sound {
            // The audio of the previous pass already includes the audio conditions.
            second.conditions.audio.clear();
        }
        second
    }
}

/// Halves the frame index of an appended condition, rounding down. Generated keyframes keep their index, which already
/// refers to the first pass.
fn at_half_rate(condition: Condition) -> Condition {
    match condition.placement {
        Placement::Appended { frame, span } if condition.content != Content::Generated => {
            Condition { placement: Placement::Appended { frame: frame / 2, span }, ..condition }
        }
        _ => condition,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::PositionSpan;

    #[test]
    fn sizes_between_upsamplers_follow_their_order() {
        let of = |[frames, height, width]: [usize; 3]| VideoShape { batch: 1, channels: 8, frames, height, width };
        let sizes = |all: &[Upsampling], from: [usize; 3], to: [usize; 3]| {
            upsampling_steps(all, &of(from), &of(to)).iter().map(|step| (step.from, step.to)).collect::<Vec<_>>()
        };
        use Upsampling::{SpatialX1_5, TemporalX2};
        let (small, large) = ([3, 2, 4], [5, 3, 6]);
        assert_eq!(sizes(&[SpatialX1_5, TemporalX2], small, large), [(small, [3, 3, 6]), ([3, 3, 6], large)]);
        assert_eq!(sizes(&[TemporalX2, SpatialX1_5], small, large), [(small, [5, 2, 4]), ([5, 2, 4], large)]);
    }

    #[test]
    fn halving_the_frame_rate_halves_image_indices_but_not_generated_keyframes() {
        let image = |frame: usize| Condition {
            placement: Placement::Appended { frame, span: PositionSpan::Frame },
            ..Condition::carried(0, 0, 1.0)
        };
        let at = |condition: Condition| at_half_rate(condition).appended_at().map(|(frame, _)| frame);
        assert_eq!([0, 1, 2, 7, 32].map(|frame| at(image(frame))), [0, 0, 1, 3, 16].map(Some));
        assert_eq!(at(Condition::generated(7)), Some(7));
        let first = Condition { placement: Placement::First, ..image(0) };
        assert_eq!(at_half_rate(first.clone()), first);
    }
}
