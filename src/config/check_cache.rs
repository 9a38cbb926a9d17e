//! Checks of the step caches of both stages: supported samplers, steps that can be skipped, and keys without effect.

use super::check::word;
use super::error::ConfigError;
use super::error::ConfigErrorKind::{Conflict, NoEffect, OutOfRange, Unsupported};
use super::legal::{fail, remove};
use super::message::{Message, Setting, message};
use super::schema::Config;
use crate::sampling::AnySampler;
use crate::sampling::step_cache::{CachePolicy, StepCache, StepCacheConfig};

/// Configuration keys of the step cache of one stage.
struct CacheKeys {
    kind: &'static str,
    threshold: &'static str,
    warmup_steps: &'static str,
    last_steps: &'static str,
    max_skips: &'static str,
    steps: &'static str,
    ratio: &'static str,
}

const FIRST: CacheKeys = CacheKeys {
    kind: "sampler.cache.kind",
    threshold: "sampler.cache.threshold",
    warmup_steps: "sampler.cache.warmup_steps",
    last_steps: "sampler.cache.last_steps",
    max_skips: "sampler.cache.max_skips",
    steps: "sampler.cache.steps",
    ratio: "sampler.cache.ratio",
};

const SECOND: CacheKeys = CacheKeys {
    kind: "two_stage.cache.kind",
    threshold: "two_stage.cache.threshold",
    warmup_steps: "two_stage.cache.warmup_steps",
    last_steps: "two_stage.cache.last_steps",
    max_skips: "two_stage.cache.max_skips",
    steps: "two_stage.cache.steps",
    ratio: "two_stage.cache.ratio",
};

/// Sampler and number of steps of a stage.
pub(super) struct StageSteps<'a> {
    pub(super) sampler: &'a AnySampler,
    /// Configuration key that selects the sampler.
    pub(super) sampler_key: &'static str,
    pub(super) steps: usize,
}

/// Checks the step caches of the stages. `second`: `None` in pipelines with one stage.
pub(super) fn check_caches(
    config: &Config,
    first: &StageSteps,
    second: Option<&StageSteps>,
) -> Result<(), ConfigError> {
    check_cache(&config.sampler.cache, &FIRST, first)?;
    second.map_or(Ok(()), |stage| check_cache(&config.two_stage.cache, &SECOND, stage))?;
    if config.sampler.cache.kind == CachePolicy::Off {
        return Ok(());
    }
    let Some(skips) = guidance_skips(config) else { return Ok(()) };
    let why = skips.then(", or set ").then(Setting::This).then(" to off");
    fail(Conflict, FIRST.kind, word(config.sampler.cache.kind), why)
}

/// Returns why guidance also skips steps and how to avoid it; `None` if it skips none.
fn guidance_skips(config: &Config) -> Option<Message> {
    let streams = [
        ("guidance.video.skip", "guidance.video.by_sigma", &config.guidance.video),
        ("guidance.audio.skip", "guidance.audio.by_sigma", &config.guidance.audio),
    ];
    streams.into_iter().find_map(|(key, by_sigma, own)| {
        let skips = |skip: Option<usize>| skip.is_some_and(|skip| skip > 0);
        let (key, by_sigma) = (Setting::Key(key), Setting::Key(by_sigma));
        let at_levels = || own.by_sigma.iter().flatten().any(|at| skips(at.skip));
        match skips(own.skip) {
            true => Some(message![key, " also skips steps; remove ", key]),
            false => {
                at_levels().then(|| message!["skip in ", by_sigma, " also skips steps; remove skip from ", by_sigma])
            }
        }
    })
}

fn check_cache(cache: &StepCacheConfig, keys: &CacheKeys, stage: &StageSteps) -> Result<(), ConfigError> {
    check_effects(cache, keys)?;
    let Some(resolved) = cache.step_cache() else { return Ok(()) };
    let kind = word(cache.kind);
    let why = match () {
        () if stage.sampler.evaluations(2) != 2 => "a sampler with two evaluations per step cannot skip steps",
        () if stage.sampler.reads_negative() => {
            "this sampler reads the prediction for the negative prompt at every step"
        }
        () => "",
    };
    if !why.is_empty() {
        let sampler = Setting::Key(stage.sampler_key);
        let why = message![why, "; set ", Setting::This, " to off, or choose another ", sampler];
        return fail(Unsupported, keys.kind, kind, why);
    }
    if cache.kind == CachePolicy::Fixed && cache.steps.is_some() == cache.ratio.is_some() {
        let [steps, ratio] = [keys.steps, keys.ratio].map(Setting::Key);
        let why = match cache.ratio {
            None => message!["needs either ", steps, " or ", ratio],
            Some(_) => message![steps, " and ", ratio, " are both set; remove one of them"],
        };
        return fail(Conflict, keys.kind, kind, why);
    }
    match &resolved {
        StepCache::Steps(list) => {
            let text = format!("{list:?}");
            if !list.is_sorted_by(|a, b| a < b) || list.is_empty() {
                return fail(OutOfRange, keys.steps, text, "must list at least one step, in increasing order");
            }
            if let Some(bad) = list.iter().find(|step| !(1..stage.steps).contains(*step)) {
                let why =
                    format!("step {bad} cannot be skipped; with {} steps, use 1 to {}", stage.steps, stage.steps - 1);
                return fail(OutOfRange, keys.steps, text, why);
            }
        }
        StepCache::Adaptive { window, .. } if window.warmup_steps < 2 => {
            let why = "must be at least 2, because adaptive measures the change between two steps";
            return fail(OutOfRange, keys.warmup_steps, window.warmup_steps, why);
        }
        StepCache::Adaptive { window, .. } | StepCache::Ratio { window, .. } => {
            if window.warmup_steps + window.last_steps >= stage.steps {
                let (first, last, least) = (window.warmup_steps, window.last_steps, cache.kind.first_skippable());
                let why = format!(
                    "with {} steps, no step is left to skip: the first {first} and the last {last} always run; ",
                    stage.steps
                );
                let why = match stage.steps > least {
                    true => {
                        let [warmup, last] = [keys.warmup_steps, keys.last_steps].map(Setting::Key);
                        message![why, "set a smaller ", warmup, " or ", last, ", or set ", Setting::This, " to off"]
                    }
                    false => {
                        message![why, format!("use at least {} steps, or set ", least + 1), Setting::This, " to off"]
                    }
                };
                return fail(OutOfRange, keys.kind, kind, why);
            }
        }
    }
    Ok(())
}

/// Checks that the policy reads all keys that are set.
fn check_effects(cache: &StepCacheConfig, keys: &CacheKeys) -> Result<(), ConfigError> {
    let is_listed = cache.kind == CachePolicy::Fixed && cache.steps.is_some();
    let has_window = matches!(cache.kind, CachePolicy::Adaptive | CachePolicy::Fixed) && !is_listed;
    let text = |value: Option<usize>| value.map(|value| value.to_string());
    let all = [
        (keys.threshold, cache.threshold.map(|value| value.to_string()), cache.kind == CachePolicy::Adaptive),
        (keys.warmup_steps, text(cache.warmup_steps), has_window),
        (keys.last_steps, text(cache.last_steps), has_window),
        (keys.max_skips, text(cache.max_skips), has_window),
        (keys.steps, cache.steps.as_ref().map(|steps| format!("{steps:?}")), cache.kind == CachePolicy::Fixed),
        (keys.ratio, cache.ratio.map(|value| value.to_string()), cache.kind == CachePolicy::Fixed),
    ];
    for (key, value, is_used) in all {
        if let (Some(value), false) = (value, is_used) {
            let why: Message = match (cache.kind, is_listed) {
                (CachePolicy::Fixed, true) => message![Setting::Key(keys.steps), " already lists the skipped steps"],
                (kind, _) => message![Setting::Key(keys.kind), format!(" is {}", word(kind))],
            };
            return fail(NoEffect, key, value, remove(why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::config::load;
    use crate::config::tests::set;

    #[test]
    fn unsupported_step_caches_name_key_and_remedy() {
        let on = "sampler.cache.kind=adaptive";
        let fixed = "sampler.cache.kind=fixed";
        for (pairs, want) in [
            (
                &[on, "sampler.kind=res_2s"][..],
                "sampler.cache.kind = adaptive (--set): a sampler with two evaluations per step cannot skip steps; set this \
                 key to off, or choose another sampler.kind",
            ),
            (
                &[on, "sampler.kind=cfg_pp"],
                "sampler.cache.kind = adaptive (--set): this sampler reads the prediction for the negative prompt at every \
                 step; set this key to off, or choose another sampler.kind",
            ),
            (
                &[on, "guidance.audio.skip=1"],
                "sampler.cache.kind = adaptive (--set): guidance.audio.skip also skips steps; remove guidance.audio.skip, or \
                 set this key to off",
            ),
            (
                &[on, "guidance.video.by_sigma=[{sigma: 1}, {sigma: 0.5, skip: 2}]"],
                "sampler.cache.kind = adaptive (--set): skip in guidance.video.by_sigma also skips steps; remove skip from \
                 guidance.video.by_sigma, or set this key to off",
            ),
            (
                &[on, "sampler.steps=6"],
                "sampler.cache.kind = adaptive (--set): with 6 steps, no step is left to skip: the first 4 and the last 2 always run; \
                 set a smaller sampler.cache.warmup_steps or sampler.cache.last_steps, or set this key to off",
            ),
            (
                &[on, "sampler.cache.warmup_steps=1"],
                "sampler.cache.warmup_steps = 1 (--set): must be at least 2, because adaptive measures the change between two \
                 steps",
            ),
            (
                &["sampler.cache.threshold=0.1"],
                "sampler.cache.threshold = 0.1 (--set): sampler.cache.kind is off; remove this key",
            ),
            (
                &[on, "sampler.cache.steps=[3]"],
                "sampler.cache.steps = [3] (--set): sampler.cache.kind is adaptive; remove this key",
            ),
            (&[fixed], "sampler.cache.kind = fixed (--set): needs either sampler.cache.steps or sampler.cache.ratio"),
            (
                &[fixed, "sampler.cache.steps=[3]", "sampler.cache.ratio=0.5"],
                "sampler.cache.kind = fixed (--set): sampler.cache.steps and sampler.cache.ratio are both set; remove one of \
                 them",
            ),
            (
                &[fixed, "sampler.cache.steps=[3]", "sampler.cache.max_skips=1"],
                "sampler.cache.max_skips = 1 (--set): sampler.cache.steps already lists the skipped steps; remove this key",
            ),
            (
                &[fixed, "sampler.cache.steps=[3, 3]"],
                "sampler.cache.steps = [3, 3] (--set): must list at least one step, in increasing order",
            ),
            (
                &[fixed, "sampler.cache.steps=[0, 40]"],
                "sampler.cache.steps = [0, 40] (--set): step 0 cannot be skipped; with 40 steps, use 1 to 39",
            ),
            (
                &["pipeline=two_stage", "two_stage.cache.kind=adaptive"],
                "two_stage.cache.kind = adaptive (--set): with 3 steps, no step is left to skip: the first 4 and the last 2 always run; \
                 set a smaller two_stage.cache.warmup_steps or two_stage.cache.last_steps, or set this key to off",
            ),
            (
                &["pipeline=two_stage", "two_stage.cache.kind=adaptive", "two_stage.sigmas=[0.9, 0.5, 0]"],
                "two_stage.cache.kind = adaptive (--set): with 2 steps, no step is left to skip: the first 4 and the last 2 \
                 always run; use at least 3 steps, or set this key to off",
            ),
            (
                &["pipeline=two_stage", "two_stage.cache.kind=adaptive", "two_stage.sampler=res_2s"],
                "two_stage.cache.kind = adaptive (--set): a sampler with two evaluations per step cannot skip steps; set this \
                 key to off, or choose another two_stage.sampler",
            ),
        ] {
            assert_eq!(load(&set(pairs)).expect_err("refused").to_string(), want, "{pairs:?}");
        }
    }

    #[test]
    fn each_stage_has_its_own_step_cache() {
        let second = ["two_stage.cache.kind=fixed", "two_stage.cache.steps=[1]"];
        let pairs = [&["pipeline=two_stage", "sampler.cache.kind=adaptive"][..], &second].concat();
        let config = load(&set(&pairs)).expect("valid").config;
        assert_ne!(config.sampler.cache.step_cache(), config.two_stage.cache.step_cache());
        for pipeline in ["pipeline=distilled", "pipeline=two_stage"] {
            assert!(
                load(&set(&[pipeline, "sampler.cache.kind=fixed", "sampler.cache.steps=[5]"])).is_ok(),
                "{pipeline}"
            );
        }
        let refused = load(&set(&["pipeline=hq", "sampler.cache.kind=adaptive"])).expect_err("refused").to_string();
        assert!(refused.contains("two evaluations per step") && refused.contains("sampler.kind"), "{refused}");
    }
}
