//! Batch keys and shape keys, which determine which requests can run in one batch and which run the same programs.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::config::{Config, LoraApply, MaskChannel, RescaleScope};
use crate::pipeline::plan::loras::Loras;
use crate::request;
use crate::sampling::step_cache::{CachePolicy, StepCacheConfig};
use crate::serve::id::VideoId;
use crate::weights::lora_add::LoraRanks;

/// Returns the batch key. Requests with equal batch keys differ only in prompt and seed (see
/// [`crate::Request::can_batch_with`]). The key of a request is unique, so that it runs alone, if the number of frames
/// is predicted, or if its result would depend on the batch: guidance rescaling uses statistics over the batch, or a
/// step cache is adaptive.
pub(super) fn batch(config: &Config, id: &VideoId) -> String {
    let mut own = config.clone();
    own.request.prompt = None;
    own.request.seed = 0;
    let is_adaptive = [&config.sampler.cache, &config.two_stage.cache].iter().any(|c| c.kind == CachePolicy::Adaptive);
    let is_predicted = config.request.num_frames.count().is_none();
    let goes_alone = is_predicted || is_adaptive || config.guidance.rescale_scope == RescaleScope::Batch;
    hash(&json!({"config": own, "alone": goes_alone.then_some(id)}))
}

/// Returns the shape key. Requests with equal shape keys run the same programs. Prompts, their enhancement, seeds, numbers of steps,
/// noise levels, guidance scales, merged LoRAs and the contents of input files do not affect the key, because they do not
/// change the programs. Of added LoRAs, only their total rank does. `ranks`: known ranks of LoRA files.
pub(super) fn shape(config: &Config, ranks: &LoraRanks) -> String {
    let mut own = config.clone();
    let r = &mut own.request;
    (r.prompt, r.negative_prompt, r.seed, r.enhance_prompt) = (None, String::new(), 0, false);
    r.images.iter_mut().for_each(|image| image.path.clear());
    r.reference_videos.iter_mut().for_each(|video| {
        video.path.clear();
        video.attention_mask.iter_mut().for_each(String::clear);
        (video.preprocess, video.attention_mask_channel) = (None, MaskChannel::default());
    });
    r.video.iter_mut().chain(r.mask.as_mut()).for_each(String::clear);
    if let Some(audio) = &mut r.audio {
        audio.path.clear();
    }
    own.model.loras.clear();
    own.model.ic_lora = None;
    (own.output.preview_every, own.output.preview_decoder) = (None, None);
    (own.sampler.steps, own.sampler.sigmas, own.sampler.noise_seed) = (0, None, None);
    (own.two_stage.sigmas, own.dfr.sigmas) = (Vec::new(), Vec::new());
    for cache in [&mut own.sampler.cache, &mut own.two_stage.cache] {
        *cache = StepCacheConfig { kind: cache.kind, ..StepCacheConfig::default() };
    }
    // A program depends on which guidance branches the scales require, but not on the scales.
    let branches: Vec<String> = request::branches(config).iter().map(|branch| format!("{branch:?}")).collect();
    for stream in [&mut own.guidance.video, &mut own.guidance.audio] {
        (stream.cfg, stream.stg, stream.modality, stream.rescale) = (None, None, None, None);
    }
    let perturbed = config.scales().map(|scales| scales.stg != 0.0);
    let mut key = json!({"config": own, "branches": branches, "perturbed": [perturbed.video, perturbed.audio]});
    if let Some(ranks) = added_ranks(config, ranks) {
        key["added_loras"] = ranks;
    }
    hash(&key)
}

/// Returns the ranks of the LoRA matrices in the programs of each pass, or the LoRAs if a file cannot be read; the job
/// reports that error. `None`: the programs have no such matrices.
pub(super) fn added_ranks(config: &Config, ranks: &LoraRanks) -> Option<Value> {
    let added = || config.model.loras.iter().filter(|lora| lora.apply == LoraApply::Add);
    added().next()?;
    match Loras::in_programs(&config.model, ranks) {
        Ok([first, second]) => {
            let second = second.filter(|_| config.pipeline.spec().has_two_stages());
            let ranks = [first, second].map(|loras| loras.map(|loras| loras.rank));
            ranks.iter().any(Option::is_some).then(|| json!(ranks))
        }
        Err(_) => Some(json!(added().collect::<Vec<_>>())),
    }
}

fn hash(value: &Value) -> String {
    hex::encode(Sha256::digest(value.to_string()))
}
