//! Conditions of the rules in [`effect`](super::effect): whether a run reads a key, and the reason if it does not.

use super::check::ResolvedScales;
use super::legal::{or_remove, remove, remove_one};
use super::message::Setting::{Key, This};
use super::message::{Message, message};
use super::pipeline::{PipelineSpec, VideoUse, unused_by_pipeline_message};
use super::schema::{Config, Dtype, Reference, Scales, SigmaScales};
use crate::media::ImageH264;
use crate::pjrt::discover::Platform;
use crate::runtime::platform::Choice;
use crate::runtime::platforms::{alternatives, spec};
use crate::weights::Version;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GuidanceStream {
    Video,
    Audio,
}

impl GuidanceStream {
    const BOTH: [GuidanceStream; 2] = [GuidanceStream::Video, GuidanceStream::Audio];

    /// Returns the stream to which a key in `guidance.video` or `guidance.audio` belongs.
    pub(super) fn from_key(key: &str) -> Self {
        if key.starts_with("guidance.video.") { GuidanceStream::Video } else { GuidanceStream::Audio }
    }

    pub(super) fn other(self) -> Self {
        if self == GuidanceStream::Video { GuidanceStream::Audio } else { GuidanceStream::Video }
    }

    pub(super) fn name(self) -> &'static str {
        if self == GuidanceStream::Video { "video" } else { "audio" }
    }
}

/// Returns the default of `enhance.temperature`, as in Lightricks' pipelines.
pub(crate) fn default_temperature(version: Version) -> f64 {
    if version == Version::V2_5 { 0.0 } else { 0.7 }
}

const VIDEO_STG: &str = "guidance.video.stg";
const AUDIO_STG: &str = "guidance.audio.stg";

/// Returns the reason for a key that has no effect because both STG scales are 0. `what` is the text before "is
/// perturbed", such as "no block".
fn stg_disabled_reason(what: &'static str) -> Message {
    let why = format!(" are 0, so {what} is perturbed; set one of them to a value other than 0");
    or_remove(message![Key(VIDEO_STG), " and ", Key(AUDIO_STG), why])
}

/// Data that the rules' conditions depend on.
pub(super) struct EffectFacts<'a> {
    pub(super) config: &'a Config,
    /// Model generation.
    pub(super) version: Version,
}

impl EffectFacts<'_> {
    pub(super) fn spec(&self) -> &'static PipelineSpec {
        self.config.pipeline.spec()
    }

    pub(super) fn unless(&self, has_effect: bool, why: impl Into<Message>) -> Option<Message> {
        (!has_effect).then(|| why.into())
    }

    /// Returns the text "the pipeline NAME `why`; remove this key".
    pub(super) fn by_pipeline(&self, why: impl Into<Message>) -> Option<Message> {
        Some(remove(message![format!("the pipeline {} ", self.spec().name), why]))
    }

    /// Returns the reason for a key that only the pipelines that `uses` selects read; `None` if the run's pipeline is
    /// one of them.
    pub(super) fn only_in(&self, uses: fn(&PipelineSpec) -> bool) -> Option<Message> {
        (!uses(self.spec())).then(|| remove(unused_by_pipeline_message(self.spec(), uses)))
    }

    pub(super) fn without_video(&self) -> Option<Message> {
        if self.spec().has_video() { None } else { self.by_pipeline("makes no video") }
    }

    pub(super) fn without_audio(&self) -> Option<Message> {
        if self.spec().hdr { self.by_pipeline("makes no sound") } else { None }
    }

    /// Returns whether the passes have a video and an audio stream.
    pub(super) fn has_both_streams(&self) -> bool {
        self.spec().has_video() && !self.spec().hdr
    }

    pub(super) fn one_stage(&self) -> Option<Message> {
        if self.spec().has_two_stages() { None } else { self.by_pipeline("has only one stage") }
    }

    pub(super) fn without_enhancement(&self) -> Option<Message> {
        let on = Key("request.enhance_prompt");
        self.unless(
            self.config.request.enhance_prompt,
            or_remove(message!["prompts are not enhanced; set ", on, " to true"]),
        )
    }

    /// Returns whether tokens of enhanced prompts are drawn at random. Without `enhance.temperature`, an endpoint uses its
    /// own temperature.
    pub(super) fn samples_enhancement(&self) -> bool {
        let own = &self.config.enhance;
        let default = || own.endpoint.is_some() || default_temperature(self.version) > 0.0;
        own.temperature.map_or_else(default, |temperature| temperature > 0.0)
    }

    pub(super) fn given_sound(&self) -> Option<Message> {
        let why = remove(message![Key("request.audio"), " is used as the sound track, so no audio is decoded"]);
        self.unless(self.config.given_sound().is_none(), why)
    }

    pub(super) fn rounds(&self) -> usize {
        if self.spec().has_rounds() { self.config.dfr.temporal_rounds } else { 0 }
    }

    pub(super) fn is_bf16(&self) -> bool {
        self.config.runtime.dtype == Dtype::Bf16
    }

    /// Returns the reason for a key that only some platforms read, if a different platform is selected.
    pub(super) fn on_other_platforms(&self, key: &str) -> Option<Message> {
        let reads = |platform: Platform| spec(platform).own_keys.contains(&key);
        let platform = &self.config.runtime.platform;
        let is_other = matches!(self.config.platform(), Ok(Choice::Named(named)) if !reads(named));
        is_other.then(|| {
            let names = Platform::ALL.into_iter().rev().filter(|own| reads(*own)).map(Platform::name);
            let only = format!("only the platform {} uses ", alternatives(names));
            let why = message![only, This, format!(", but runtime.platform is {platform}")];
            remove_one(why, "runtime.platform")
        })
    }

    /// Returns why the first LoRA that no stage uses has no effect; `None` if every LoRA is used. The reason contains
    /// no path, because servers keep paths private.
    pub(super) fn unused_lora(&self) -> Option<Message> {
        let last = if self.spec().has_two_stages() { 2 } else { 1 };
        let is_unused = |stages: &[u8]| !stages.iter().any(|stage| (1..=last).contains(stage));
        let at = self.config.model.loras.iter().position(|lora| is_unused(&lora.stages))?;
        let (number, stages, name) = (at + 1, &self.config.model.loras[at].stages, self.spec().name);
        Some(match stages.is_empty() {
            true => format!("LoRA {number} has no stages; set its stages to [1], [2] or [1, 2], or remove the LoRA"),
            false => format!(
                "LoRA {number} is for stages {stages:?}, and the pipeline {name} has only stage 1; set stages to [1], or \
                 remove the LoRA"
            ),
        }
        .into())
    }

    pub(super) fn unused_image(&self) -> Option<Message> {
        let r = &self.config.request;
        if let Some(why) = self.spec().images_fault(r.images.len()) {
            return Some(why);
        }
        let off = self.config.conditioning.h264 == ImageH264::Off;
        let at = r.images.iter().position(|image| off && image.crf.is_some_and(|crf| crf > 0))?;
        let crf = r.images[at].crf.unwrap_or_default();
        let why = "but conditioning.h264 is off; remove crf or conditioning.h264";
        Some(format!("image {} has crf {crf}, {why}", at + 1).into())
    }

    pub(super) fn unused_chain(&self) -> Option<Message> {
        if !self.spec().chain {
            return self.by_pipeline("does not support chained clips");
        }
        let (chain, frames) = (self.config.request.chain.as_ref()?, self.config.request.num_frames.count()?);
        if frames <= chain.clip {
            let why = format!(
                "{frames} frames fit in one clip of up to {}; remove request.chain, or generate a longer video or shorter clips \
                 (request.chain.clip)",
                chain.clip
            );
            return Some(why.into());
        }
        let step = chain.clip.saturating_sub(chain.overlap).max(1);
        let clips = 1 + frames.saturating_sub(chain.clip).div_ceil(step);
        let own = chain.prompts.len();
        (own >= clips).then(|| {
            format!(
                "there are {own} prompts for the clips after the first, but {frames} frames make {clips} clips; remove {} of \
                 the prompts in request.chain.prompts, or generate a longer video",
                own + 1 - clips
            )
            .into()
        })
    }

    /// Returns why a sampler option has no effect; `None` if it has an effect.
    pub(super) fn unused_setting(&self, key: &str) -> Option<Message> {
        match self.config.samplers() {
            Err((refused, _)) if refused == key => Some(remove("this sampler does not have this option")),
            _ if key == "sampler.noise_seed" && self.config.sampler.eta == Some(0.0) => {
                Some(remove_one("sampler.eta is 0, so steps draw no noise", "sampler.eta"))
            }
            _ => None,
        }
    }

    pub(super) fn unused_step_noise(&self) -> Option<Message> {
        let (first, second) = self.config.samplers().ok()?;
        let second = self.spec().has_two_stages().then_some(second);
        let drawn = [Some(first), second].into_iter().flatten().any(|sampler| sampler.noises() > 0);
        let drawn = drawn && self.config.sampler.eta != Some(0.0);
        let rounds = self.rounds() > 0 && self.is_bf16();
        let why = or_remove("no step draws noise; set sampler.kind to euler_ancestral or cfg_pp");
        self.unless(drawn || rounds, why)
    }

    /// Returns whether the first pass appends tokens to the video stream, for images, reference videos or generated
    /// keyframes.
    pub(super) fn appends(&self) -> bool {
        let c = self.config;
        c.placed_images().any(|placed| placed.appended)
            || c.follows_references()
            || c.conditioning.generated_keyframes > 0
    }

    /// Returns whether any token is conditioned, so that its noise level can differ from that of the step.
    pub(super) fn is_conditioned(&self) -> bool {
        let r = &self.config.request;
        let chained = r.chain.as_ref().zip(r.num_frames.count()).is_some_and(|(chain, frames)| frames > chain.clip);
        self.appends()
            || !r.images.is_empty()
            || r.audio.is_some()
            || !r.audio_latents.is_empty()
            || chained
            || self.spec().video.is_some()
            || self.spec().has_rounds()
    }

    pub(super) fn has_weak_conditions(&self) -> bool {
        let r = &self.config.request;
        r.images.iter().any(|image| image.strength < 1.0) || r.audio_latents.iter().any(|kept| kept.strength < 1.0)
    }

    pub(super) fn unused_stage_audio(&self) -> Option<Message> {
        let why = remove("with temporal_x2 in two_stage.upsample, the output always has the first stage's audio");
        if self.spec().video == Some(VideoUse::Reference) {
            return self.by_pipeline("always has the first stage's audio");
        }
        self.given_sound().or_else(|| self.unless(!self.config.doubles_frames(), why))
    }
}

/// Guidance.
impl EffectFacts<'_> {
    pub(super) fn streams(&self) -> impl Iterator<Item = GuidanceStream> {
        GuidanceStream::BOTH.into_iter()
    }

    pub(super) fn is_absent(&self, stream: GuidanceStream) -> bool {
        match stream {
            GuidanceStream::Video => !self.spec().has_video(),
            GuidanceStream::Audio => self.spec().hdr,
        }
    }

    /// Returns whether `request.retake` selects the streams that are kept.
    fn keeps_streams(&self) -> bool {
        self.spec().video == Some(VideoUse::Span)
    }

    /// Returns whether the stream is denoised, that is, neither a complete input nor absent.
    pub(super) fn is_made(&self, stream: GuidanceStream) -> bool {
        let retake = self.config.request.retake.as_ref().filter(|_| self.keeps_streams());
        if stream == GuidanceStream::Audio && self.spec().video == Some(VideoUse::Region) {
            return self.config.request.inpaint.as_ref().is_some_and(|own| own.audio);
        }
        match stream {
            GuidanceStream::Video => self.spec().generates_video && retake.is_none_or(|span| span.video),
            GuidanceStream::Audio => {
                !self.spec().hdr && self.config.given_sound().is_none() && retake.is_none_or(|span| span.audio)
            }
        }
    }

    pub(super) fn own(&self, stream: GuidanceStream) -> &Scales {
        if stream == GuidanceStream::Video { &self.config.guidance.video } else { &self.config.guidance.audio }
    }

    pub(super) fn by_sigma(&self, stream: GuidanceStream) -> &[SigmaScales] {
        let own = self.own(stream).by_sigma.as_ref().or(self.own(stream.other()).by_sigma.as_ref());
        own.map_or(&[], Vec::as_slice)
    }

    /// Returns the scales of a stream for every entry of `by_sigma`, or its general scales if there are no entries.
    pub(super) fn levels(&self, stream: GuidanceStream) -> Vec<ResolvedScales> {
        let scales = self.config.scales();
        let base = if stream == GuidanceStream::Video { scales.video } else { scales.audio };
        let at = |level: &SigmaScales| ResolvedScales {
            cfg: level.cfg.unwrap_or(base.cfg),
            stg: level.stg.unwrap_or(base.stg),
            modality: level.modality.unwrap_or(base.modality),
            rescale: level.rescale.unwrap_or(base.rescale),
        };
        let levels = self.by_sigma(stream);
        if levels.is_empty() { vec![base] } else { levels.iter().map(at).collect() }
    }

    pub(super) fn guides_by_prompt(&self, stream: GuidanceStream) -> bool {
        let off = f64::from(self.config.guidance.kind.off());
        self.is_made(stream) && self.levels(stream).iter().any(|at| at.cfg != off)
    }

    pub(super) fn reads_negative(&self) -> bool {
        self.streams().any(|s| self.guides_by_prompt(s))
            || self.config.samplers().is_ok_and(|(first, _)| first.reads_negative())
    }

    pub(super) fn has_stg(&self, stream: GuidanceStream) -> bool {
        self.levels(stream).iter().any(|at| at.stg != 0.0)
    }

    /// Returns why a scale has no effect: no denoised stream uses it, or `by_sigma` always overrides it. `is_own`
    /// returns whether a stream sets the scale; `is_at` returns whether a `by_sigma` entry sets it.
    pub(super) fn unused_scale(
        &self,
        key: &str,
        is_own: impl Fn(&Scales) -> bool,
        is_at: impl Fn(&SigmaScales) -> bool,
    ) -> Option<Message> {
        let stream = GuidanceStream::from_key(key);
        // A stream without its own value inherits the other stream's value.
        let inherits = !is_own(self.own(stream.other()));
        let mut users =
            GuidanceStream::BOTH.into_iter().filter(|s| self.is_made(*s) && (*s == stream || inherits)).peekable();
        if users.peek().is_none() {
            let name = stream.name();
            return Some(match (stream, self.config.given_sound()) {
                (GuidanceStream::Audio, Some(_)) => {
                    let why = " is used as the sound track, so the audio stream has no guidance";
                    remove(message![Key("request.audio"), why])
                }
                _ if self.keeps_streams() => {
                    let why = format!(".{name} is false: the {name} is kept and has no guidance");
                    remove(message![Key("request.retake"), why])
                }
                _ => remove(format!("the pipeline {} generates no {name} that could be guided", self.spec().name)),
            });
        }
        let replaced = users.all(|s| !self.by_sigma(s).is_empty() && self.by_sigma(s).iter().all(&is_at));
        replaced.then(|| remove_one(message!["by_sigma overrides ", This, " at every noise level"], "by_sigma"))
    }

    /// Returns an error text if `by_sigma` entries set a modality scale but the pipeline has only one stream.
    pub(super) fn unused_level(&self, key: &str) -> Option<Message> {
        let levels = self.own(GuidanceStream::from_key(key)).by_sigma.as_deref().unwrap_or_default();
        let modality = levels.iter().any(|level| level.modality.is_some());
        let name = self.spec().name;
        let why = format!("the pipeline {name} has only one stream; remove modality from the entries");
        (!self.has_both_streams() && modality).then(|| why.into())
    }

    pub(super) fn nothing_to_rescale(&self, key: &str) -> Option<Message> {
        let stream = GuidanceStream::from_key(key);
        let inherits = self.own(stream.other()).rescale.is_none();
        let off = f64::from(self.config.guidance.kind.off());
        let modality = self.has_both_streams();
        let is_guided = |at: &ResolvedScales| at.cfg != off || at.stg != 0.0 || (modality && at.modality != 1.0);
        let mut users = GuidanceStream::BOTH.into_iter().filter(|s| self.is_made(*s) && (*s == stream || inherits));
        let guided = users.any(|s| self.levels(s).iter().any(is_guided));
        let name = stream.name();
        let why = "stream is unguided: its cfg, stg and modality are off; enable one";
        (!guided).then(|| or_remove(format!("the {name} {why}")))
    }

    /// Returns the indices of the transformer blocks that STG perturbs in a stream.
    pub(super) fn perturbed(&self, stream: GuidanceStream) -> &[usize] {
        let guidance = &self.config.guidance;
        let both = guidance.stg_streams == Reference::Diffusers && self.streams().any(|s| self.perturbs(s));
        match self.perturbs(stream) || both {
            true => self.own(stream).stg_blocks.as_deref().unwrap_or(&guidance.stg_blocks),
            false => &[],
        }
    }

    /// Returns whether STG perturbs a stream because the STG scale of this stream is not 0. In a retake, STG can also
    /// perturb a stream that is kept.
    pub(super) fn perturbs(&self, stream: GuidanceStream) -> bool {
        let runs = self.streams().any(|s| self.is_made(s) && self.has_stg(s));
        let takes_part = self.is_made(stream) || self.keeps_streams();
        runs && takes_part && self.has_stg(stream)
    }

    pub(super) fn unused_stg(&self, key: &str) -> Option<Message> {
        if !self.perturbs(GuidanceStream::from_key(key))
            && let Some(why) = self.unused_scale(key, |s| s.stg.is_some(), |at| at.stg.is_some())
        {
            return Some(why);
        }
        if self.config.guidance.stg_streams == Reference::Diffusers && self.version == Version::V2_0 {
            let why = "guidance.stg_streams is diffusers, which does not perturb LTX-2.0; set it to official";
            return Some(or_remove(why));
        }
        let (block, preset) = match self.version {
            Version::V2_0 => (29, "ltx2_full_guidance"),
            Version::V2_3 => (28, "ltx2_3"),
            Version::V2_5 => (28, "ltx2_5"),
        };
        self.streams().all(|s| self.perturbed(s).is_empty()).then(|| {
            let blocks = Key("guidance.stg_blocks");
            let preset = format!(" too (the preset {preset} has [{block}])");
            or_remove(message![blocks, " is empty, so no block is perturbed; set ", blocks, preset])
        })
    }

    pub(super) fn unused_blocks(&self, own: Option<GuidanceStream>) -> Option<Message> {
        let both = self.config.guidance.stg_streams == Reference::Diffusers;
        let any = self.streams().any(|s| self.perturbs(s));
        let perturbed = |s: GuidanceStream| self.perturbs(s) || (both && any);
        if let Some(stream) = own {
            let key = Key(if stream == GuidanceStream::Video { VIDEO_STG } else { AUDIO_STG });
            let why = message![key, " is 0, so no block of this stream is perturbed; set ", key, " too"];
            return (!perturbed(stream)).then(|| or_remove(why));
        }
        let why = stg_disabled_reason("no block");
        self.unless(any, why).or_else(|| {
            let used = self.streams().any(|s| perturbed(s) && self.own(s).stg_blocks.is_none());
            self.unless(used, remove("every perturbed stream sets its own stg_blocks"))
        })
    }

    pub(super) fn unused_stg_streams(&self) -> Option<Message> {
        let [video, audio] = GuidanceStream::BOTH.map(|s| self.perturbs(s));
        let why = stg_disabled_reason("nothing");
        self.unless(video || audio, why).or_else(|| {
            let same = video && audio && self.version != Version::V2_0;
            self.unless(
                !same,
                remove(message!["STG is enabled in both streams, so both are perturbed regardless of ", This]),
            )
        })
    }
}
