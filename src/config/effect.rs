//! Rules that determine which configuration keys have no effect, and why.
//!
//! The conditions depend on the resolved configuration and the model generation. Keys without a rule always have an
//! effect.

use super::effect_facts::{EffectFacts, GuidanceStream};
use super::legal::{or_remove, remove, remove_one};
use super::message::Setting::{Key, This};
use super::message::{Message, message};
use super::pipeline::{Passes, PipelineSpec, VideoUse, rejected_video};
use super::schema::{Bos, HdrVideo, Reference, WeightSource, WeightStreaming, WeightType};
use crate::media::ImageH264;
use crate::models::upsampler::Upsampling;
use crate::weights::Version;

pub(super) struct EffectRule {
    /// Keys or sections that the rule covers.
    pub(super) keys: &'static [&'static str],
    pub(super) scope: RuleScope,
    /// Returns why a key has no effect and what to change; `None` if the key has an effect.
    pub(super) reason: fn(&EffectFacts<'_>, &'static str) -> Option<Message>,
}

/// Origins of values that a rule checks. Values of other origins are accepted even if they have no effect.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RuleScope {
    /// Flags, `--set`, server requests and the user's files.
    Run,
    /// The origins of `Run` except the user's files, which may set components and texts for other runs.
    Flags,
    /// The origins of `Run`, and a server's configuration, because requests cannot change these keys.
    Server,
}

type EffectReason = fn(&EffectFacts<'_>, &'static str) -> Option<Message>;

const fn request(keys: &'static [&'static str], reason: EffectReason) -> EffectRule {
    EffectRule { keys, scope: RuleScope::Run, reason }
}

const fn flags(keys: &'static [&'static str], reason: EffectReason) -> EffectRule {
    EffectRule { keys, scope: RuleScope::Flags, reason }
}

const fn server(keys: &'static [&'static str], reason: EffectReason) -> EffectRule {
    EffectRule { keys, scope: RuleScope::Server, reason }
}

/// Returns the text "guidance.video.cfg or guidance.audio.cfg".
fn either_cfg() -> Message {
    message![Key("guidance.video.cfg"), " or ", Key("guidance.audio.cfg")]
}

pub(super) const RULES: &[EffectRule] = &[
    // Model components.
    flags(&["model.vae"], |f, _| f.without_video()),
    flags(&["model.upsampler"], |f, _| {
        let spatial = f.config.upsamplings().iter().any(|kind| *kind != Upsampling::TemporalX2);
        f.unless(spatial, or_remove("no stage uses spatial upsampling; use a two-stage pipeline"))
    }),
    flags(&["model.temporal_upsampler"], |f, _| {
        let used = f.config.doubles_frames() || f.rounds() > 0;
        f.unless(
            used,
            or_remove("no stage uses temporal upsampling; set two_stage.upsample or dfr.temporal_rounds too"),
        )
    }),
    flags(&["model.duration_head"], |f, _| {
        let auto = f.config.request.num_frames.count().is_none();
        let frames = Key("request.num_frames");
        f.unless(auto, or_remove(message![frames, " is a number; set ", frames, " to auto"]))
    }),
    server(&["model.decoder"], |f, _| match f.version {
        _ if !f.spec().generates_video => f.by_pipeline("decodes no video"),
        Version::V2_5 => None,
        older => Some(remove(format!("LTX-{older} has only one video decoder"))),
    }),
    server(&["model.weights_seed"], |f, _| {
        let random = f.config.model.weights == WeightSource::Random;
        f.unless(random, or_remove("the weights come from files; set model.weights to random"))
    }),
    request(&["model.loras"], |f, _| f.unused_lora()),
    request(&["model.ic_lora"], |f, _| f.spec().references_fault(1).filter(|_| !f.config.follows_input())),
    request(&["model.lora_merge"], |f, _| {
        f.unless(
            !f.config.model.loras.is_empty(),
            or_remove(message!["there is no LoRA to merge; set ", Key("model.loras"), " too"]),
        )
    }),
    // Request.
    flags(&["request.negative_prompt"], |f, _| {
        let why = or_remove(message!["no step reads the negative prompt; set ", either_cfg()]);
        f.unless(f.reads_negative(), why)
    }),
    request(&["request.width", "request.height", "request.motion_speed"], |f, _| f.without_video()),
    request(&["request.images"], |f, _| f.unused_image()),
    request(&["request.video"], |f, _| f.spec().video.is_none().then(rejected_video)),
    request(&["request.retake"], |f, _| f.only_in(|spec| spec.video == Some(VideoUse::Span))),
    request(&["request.extend"], |f, _| f.only_in(|spec| spec.video == Some(VideoUse::Overlap))),
    request(&["request.mask", "request.inpaint"], |f, _| f.only_in(|spec| spec.video == Some(VideoUse::Region))),
    request(&["request.dub"], |f, _| f.only_in(|spec| spec.video == Some(VideoUse::Reference))),
    request(&["request.reference_videos"], |f, _| f.spec().references_fault(1)),
    request(&["request.audio"], |f, _| f.spec().audio_fault(true)),
    request(&["request.chain"], |f, _| f.unused_chain()),
    flags(&["text.bos"], |f, _| {
        let forced = f.config.text.bos == Bos::Always && f.config.reference == Reference::Official;
        f.unless(!forced, remove("prompts always begin with BOS if reference is official"))
    }),
    // Prompt enhancement. Files may configure it for runs that enable it with a flag or a request field.
    flags(&["enhance.system", "enhance.max_new_tokens", "enhance.temperature", "enhance.endpoint"], |f, _| {
        f.without_enhancement()
    }),
    flags(&["enhance.model", "enhance.key_env", "enhance.timeout"], |f, _| {
        let why = or_remove(message!["only chat servers use ", This, "; set ", Key("enhance.endpoint"), " too"]);
        f.without_enhancement().or_else(|| f.unless(f.config.enhance.endpoint.is_some(), why))
    }),
    flags(&["enhance.top_k", "enhance.top_p", "enhance.seed"], |f, key| {
        let why = or_remove("the most likely token is always selected; set enhance.temperature to more than 0");
        let is_sent = key != "enhance.top_k" || f.config.enhance.endpoint.is_none();
        f.without_enhancement()
            .or_else(|| f.unless(is_sent, remove("the protocol of enhance.endpoint has no such option")))
            .or_else(|| f.unless(f.samples_enhancement(), why))
    }),
    // Sampling.
    request(&["sampler.eta", "sampler.gamma", "sampler.noise_seed"], |f, key| f.unused_setting(key)),
    request(&["sampler.step_noise"], |f, _| f.unused_step_noise()),
    request(&["sampler.noise_order"], |f, _| {
        let draws = f.spec().has_two_stages() || f.appends();
        match f.spec().passes {
            Passes::TwoAndRounds => f.by_pipeline(message!["draws noise in the same order regardless of ", This]),
            _ => f.unless(
                draws,
                remove(message![
                    "without a second stage or appended tokens, noise is drawn in the same order regardless of ",
                    This
                ]),
            ),
        }
    }),
    request(&["guidance.kind", "guidance.apg"], |f, _| {
        let why = or_remove(message!["classifier-free guidance is off; set ", either_cfg()]);
        f.unless(f.streams().any(|s| f.guides_by_prompt(s)), why)
    }),
    request(&["guidance.video.cfg", "guidance.audio.cfg"], |f, key| {
        f.unused_scale(key, |s| s.cfg.is_some(), |at| at.cfg.is_some())
    }),
    request(&["guidance.video.modality", "guidance.audio.modality"], |f, key| match f.has_both_streams() {
        false => f.by_pipeline("has only one stream, so modality guidance has no effect"),
        true => f.unused_scale(key, |s| s.modality.is_some(), |at| at.modality.is_some()),
    }),
    request(&["guidance.video.rescale", "guidance.audio.rescale"], |f, key| {
        f.unused_scale(key, |s| s.rescale.is_some(), |at| at.rescale.is_some()).or_else(|| f.nothing_to_rescale(key))
    }),
    request(&["guidance.video.stg", "guidance.audio.stg"], |f, key| f.unused_stg(key)),
    request(&["guidance.stg_blocks"], |f, _| f.unused_blocks(None)),
    request(&["guidance.video.stg_blocks"], |f, _| f.unused_blocks(Some(GuidanceStream::Video))),
    request(&["guidance.audio.stg_blocks"], |f, _| f.unused_blocks(Some(GuidanceStream::Audio))),
    request(&["guidance.stg_streams"], |f, _| f.unused_stg_streams()),
    request(&["guidance.video.skip", "guidance.audio.skip"], |f, key| {
        let why = remove("there is only one step, which is never skipped");
        let one = f.unless(f.config.sampler.steps > 1, why);
        f.unused_scale(key, |s| s.skip.is_some(), |at| at.skip.is_some()).or(one)
    }),
    request(&["guidance.video.by_sigma", "guidance.audio.by_sigma"], |f, key| {
        f.unused_scale(key, |s| s.by_sigma.is_some(), |_| false).or_else(|| f.unused_level(key))
    }),
    server(&["guidance.rescale_scope"], |_, _| {
        Some(remove("each video is guided separately, even in a batch, so both values have the same effect"))
    }),
    // Conditioning.
    request(&["conditioning.cross_timestep"], |f, _| {
        let why = remove("without input images, video or audio, both streams always have the same noise level");
        f.without_audio().or_else(|| f.unless(f.is_conditioned(), why))
    }),
    request(&["conditioning.keyframe_span"], |f, _| {
        let later = f.config.placed_images().any(|placed| placed.frame > 0);
        f.unless(later, remove("no conditioning image is after the first frame"))
    }),
    request(&["conditioning.noising"], |f, _| match f.spec().passes {
        Passes::TwoAndRounds => f.by_pipeline(message!["starts its second stage in the same way regardless of ", This]),
        Passes::One => f.one_stage(),
        Passes::Two => {
            let why = remove("no image and no audio latents have a strength below 1");
            f.unless(f.has_weak_conditions(), why)
        }
    }),
    request(&["conditioning.clean_prediction"], |f, _| match f.spec().passes {
        Passes::TwoAndRounds => f.by_pipeline(message!["uses each token's own noise level regardless of ", This]),
        _ => {
            let why = remove("no image, reference video or audio latents have a strength below 1");
            let weak = f.config.request.reference_videos.iter().any(|video| video.strength < 1.0);
            let weak = weak || f.config.request.dub.as_ref().is_some_and(|dub| dub.strength < 1.0);
            f.unless(weak || f.has_weak_conditions(), why)
        }
    }),
    request(&["conditioning.given_stream"], |f, _| {
        let given = f.config.given_sound().is_some() || f.streams().any(|s| !f.is_made(s) && !f.is_absent(s));
        f.unless(given, remove("neither the video nor the audio stream is given completely as input"))
    }),
    server(&["conditioning.first_frame_marker"], |f, _| match f.spec().passes {
        Passes::TwoAndRounds => f.by_pipeline(message!["marks the first frame regardless of ", This]),
        _ => f
            .without_video()
            .or_else(|| f.unless(f.version == Version::V2_5, remove("only LTX-2.5 marks the first frame"))),
    }),
    request(
        &["request.text_embeddings", "conditioning.hdr_transform", "output.save_exr", "output.hdr_video"],
        |f, _| f.only_in(|spec| spec.hdr),
    ),
    flags(&["request.prompt", "request.prompts"], |f, _| {
        let given = f.config.request.text_embeddings.is_some() && f.spec().hdr;
        f.unless(!given, remove_one("request.text_embeddings replaces the prompt", "request.text_embeddings"))
    }),
    request(&["output.hdr_codec"], |f, _| {
        let off = f.config.output.hdr_video == Some(HdrVideo::None);
        let why = or_remove("output.hdr_video is none, so no video is encoded; set it to hlg or pq");
        f.only_in(|spec| spec.hdr).or_else(|| f.unless(!off, why))
    }),
    request(&["output.audio", "output.save_audio"], |f, _| f.without_audio()),
    request(&["conditioning.generated_keyframes"], |f, _| f.only_in(|spec| spec.generated_keyframes)),
    request(&["conditioning.reference_downscale_factor", "conditioning.reference_temporal_scale_factor"], |f, _| {
        let any = f.config.follows_references();
        let why = message!["there is no reference video; set ", Key("request.reference_videos"), " too"];
        f.unless(any, or_remove(why))
    }),
    request(&["conditioning.crf"], |f, _| {
        let off = f.config.conditioning.h264 == ImageH264::Off;
        let any = f.config.request.images.iter().any(|image| image.crf.is_none());
        f.unless(!off, remove_one("conditioning.h264 is off", "conditioning.h264"))
            .or_else(|| f.unless(any, remove("no image uses it, because there are no images or each sets its own crf")))
    }),
    request(&["conditioning.h264"], |f, _| {
        let any = f.config.request.images.iter().any(|image| image.crf(&f.config.conditioning) > 0);
        f.unless(any, remove("no image is encoded with H.264, because there are no images or their crf is 0"))
    }),
    // Stages.
    server(
        &[
            "two_stage.upsample",
            "two_stage.sampler",
            "two_stage.sigmas",
            "two_stage.cache",
            "two_stage.adain",
            "two_stage.tone_map",
        ],
        |f, _| f.one_stage(),
    ),
    request(&["two_stage.audio"], |f, _| {
        f.one_stage().or_else(|| f.without_audio()).or_else(|| f.unused_stage_audio())
    }),
    request(&["dfr.temporal_rounds", "dfr.detailing_lora"], |f, _| f.only_in(PipelineSpec::has_rounds)),
    request(&["dfr.sigmas"], |f, _| {
        f.only_in(PipelineSpec::has_rounds)
            .or_else(|| f.unless(f.rounds() > 0, or_remove("dfr.temporal_rounds is 0; set it to 1 or 2")))
    }),
    server(&["vocoder.stage1_clamp"], |f, _| {
        let why = remove("LTX-2.0's vocoder has only one stage");
        f.without_audio().or_else(|| f.unless(f.version != Version::V2_0, why)).or_else(|| f.given_sound())
    }),
    // Device.
    server(&["runtime.numerics"], |f, _| {
        f.unless(
            f.is_bf16(),
            remove_one(message![This, " affects only bf16 rounding, but runtime.dtype is f32"], "runtime.dtype"),
        )
    }),
    server(&["runtime.positions"], |f, _| {
        let why = remove_one("positions are always f32 if runtime.dtype is f32", "runtime.dtype");
        f.without_video().or_else(|| f.unless(f.is_bf16(), why))
    }),
    server(&["runtime.activations"], |f, _| {
        let why = or_remove(message!["only int8 weights use ", This, "; set runtime.weights to int8 too"]);
        f.unless(matches!(f.config.runtime.weights, WeightType::Int8 | WeightType::Int8Convrot), why)
    }),
    server(&["runtime.tiling"], |f, _| match f.spec().generates_video {
        true => None,
        false => f.by_pipeline("decodes no video"),
    }),
    server(&["runtime.resident_blocks"], |f, _| {
        let why = or_remove("all blocks are resident if runtime.stream is off; set runtime.stream to auto or on");
        f.unless(f.config.runtime.stream != WeightStreaming::Off, why)
    }),
    server(&["runtime.memory_fraction", "runtime.visible_devices", "runtime.libtpu_init_args"], |f, key| {
        f.on_other_platforms(key)
    }),
    server(&["runtime.distributed.devices_per_process"], |f, key| {
        let named = f.config.runtime.visible_devices.is_some();
        let why = remove_one("runtime.visible_devices already selects the devices", "runtime.visible_devices");
        f.on_other_platforms(key).or_else(|| f.unless(!named, why))
    }),
    server(
        &["runtime.distributed.coordinator", "runtime.distributed.timeout", "runtime.distributed.start_timeout"],
        |f, _| {
            let alone = f.config.runtime.distributed.num_processes == Some(1);
            f.unless(
                !alone,
                remove_one("the run has only one process (runtime.distributed.num_processes)", "num_processes"),
            )
        },
    ),
    // Output files.
    request(&["output.save_frames"], |f, _| f.without_video()),
    request(&["output.preview_every"], |f, _| match f.spec().generates_video {
        _ if f.spec().hdr => f.by_pipeline("shows no previews, because they would not be SDR"),
        true => None,
        false => f.by_pipeline("generates no video"),
    }),
    flags(&["output.preview_decoder"], |f, _| {
        let every = f.config.output.preview_every.is_some();
        f.unless(every, or_remove(message!["no previews are shown; set ", Key("output.preview_every"), " too"]))
    }),
];

/// Returns, for each key that has no effect in a configuration, the reason. Includes keys that are not set.
#[cfg(test)]
pub(crate) fn reasons(config: &super::Config, version: Version) -> Vec<Message> {
    let facts = EffectFacts { config, version };
    RULES.iter().flat_map(|rule| rule.keys.iter().filter_map(|key| (rule.reason)(&facts, key))).collect()
}
