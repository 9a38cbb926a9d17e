//! Duration head: predicts the duration of a video from the text contexts of its prompt.

use super::{
    Build, Call, Component, Inputs, ModelConfigs, Network, Phase, ProgramDeclaration, ProgramKind, Result, SingleRun,
};
use crate::av::Av;
use crate::models::duration_head;
use crate::pipeline::runner::Runner;
use crate::tensor::Tensor;

/// Duration head program. It is executed before a run whose number of frames is `auto`, not as part of the run.
pub(super) const DURATION_HEAD: ProgramDeclaration = ProgramDeclaration {
    kind: ProgramKind::DurationHead,
    name: "duration_head",
    help: "Text contexts of a prompt to the video's duration in seconds",
    component: Component::DurationHead,
    phase: Phase::Connectors,
    runs: |_| false,
    request: |run| Ok(&run.first),
    network: |spec| network(&spec.run.configs, 1, Av::both(spec.request.max_sequence_length), spec.build),
    single_run: Some(SingleRun {
        help: "`video_tokens`, `audio_tokens` to `seconds`",
        scalars: &[],
        inputs: |given| {
            let [video, audio] = [given.ranked("video_tokens", 3)?, given.ranked("audio_tokens", 3)?];
            let tokens = Av { video: video.shape()[1], audio: audio.shape()[1] };
            let network = network(given.configs, video.shape()[0], tokens, given.build)?;
            Ok((network, vec![("video_tokens".into(), video), ("audio_tokens".into(), audio)]))
        },
        smallest: |configs, build| network(configs, 1, Av::both(1), build),
    }),
};

fn network(configs: &ModelConfigs, rows: usize, tokens: Av<usize>, build: &Build) -> Result<Network> {
    Ok(duration_head::program(&configs.duration_head()?, rows, tokens, build)?)
}

impl Runner {
    /// Prepares the duration head, which maps text contexts `[prompts, tokens, channels]` to `seconds`, `[prompts]`.
    pub(crate) fn duration_head(&mut self, text: Av<Tensor>) -> Result<Call<'static>> {
        let (rows, tokens) = (text.video.shape()[0], text.as_ref().map(|context| context.shape()[1]));
        let network = self.network(ProgramKind::DurationHead, [rows, tokens.video, tokens.audio], |model, build| {
            network(&model.configs, rows, tokens, build)
        })?;
        let given = Av::NAMES.zip(text).map(|(name, context)| (format!("{name}_tokens"), context));
        self.call(ProgramKind::DurationHead, &network, Inputs::default(), given)
    }
}
