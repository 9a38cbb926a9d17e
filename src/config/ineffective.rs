//! Rejects values that the user wrote but that have no effect, with the reason.
//!
//! Values of presets, shipped files and sidecars are never rejected, because these files set keys of several pipelines,
//! or all keys. In the user's own files, components, negative prompts and keys that `reference` sets are not rejected
//! either, because other runs with the same file may use them. A value that does not change the configuration, or that
//! disables a feature, is accepted everywhere; only the keys in [`ALWAYS_CHECKED`] are rejected with any value in a
//! flag or `--set`.

use serde_json::Value;

use super::effect::{EffectRule, RULES, RuleScope};
use super::effect_facts::EffectFacts;
use super::error::{ConfigError, ConfigErrorKind, ValueOrigin};
use super::load::{BY_REFERENCE, LoadedConfig};
use super::message::Message;
use super::presets::is_shipped;
use super::schema::Config;
use super::tree::{Tree, are_same};

/// Maximum number of characters of a value in an error.
const SHOWN: usize = 60;

/// Keys that are rejected even if they are set to their default, because the user expects the value to have an effect.
const ALWAYS_CHECKED: [&str; 1] = ["two_stage.upsample"];

/// Value that the user wrote and that has no effect.
struct IneffectiveValue {
    key: &'static str,
    origin: ValueOrigin,
    why: Message,
}

/// Returns whether the user wrote the value of `key` on the command line, or in a file if the scope includes files.
fn is_written(origin: &ValueOrigin, scope: RuleScope, key: &str) -> bool {
    match origin {
        ValueOrigin::Set | ValueOrigin::Flag(_) => true,
        ValueOrigin::File { .. } => !is_shipped(origin) && scope != RuleScope::Flags && !BY_REFERENCE.contains(&key),
        _ => false,
    }
}

impl LoadedConfig {
    /// Rejects flags, `--set` pairs and values of the user's files that have no effect on the run.
    ///
    /// # Errors
    /// Returns an error for the first such value, with its key, origin, reason and fix.
    pub fn check_effect(&self) -> Result<(), ConfigError> {
        if let Some((path, value)) = self.find_set_in_section("serve") {
            let why = format!("only ltx2 serve reads {path}; remove it");
            return Err(ConfigError::value(ConfigErrorKind::NoEffect, "serve", value, why).at(ValueOrigin::Set));
        }
        self.first_fault(|_| true, &is_written)
    }

    /// Rejects flags and `--set` pairs that set a key for which `is_read` returns false; `why` is the reason in the
    /// error.
    ///
    /// # Errors
    /// Returns an error for the first such key, with its value and origin.
    pub(crate) fn check_read(&self, why: &str, is_read: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
        let mut leaves = Vec::new();
        self.tree.leaves(String::new(), &mut leaves);
        let is_written = |origin: &ValueOrigin| matches!(origin, ValueOrigin::Set | ValueOrigin::Flag(_));
        match leaves.into_iter().find(|(path, origin)| is_written(origin) && !is_read(path)) {
            None => Ok(()),
            Some((path, origin)) => {
                let value = self.tree.get(&path).map_or(String::new(), |tree| shown(&tree.to_value()));
                let why = format!("{why}; remove this option");
                Err(ConfigError::value(ConfigErrorKind::NoEffect, path, value, why).at(origin.clone()))
            }
        }
    }

    /// Rejects fields of a server request that have no effect; `is_written` selects the fields to check.
    pub(crate) fn check_request_effect(&self, is_written: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
        self.first_fault(|_| true, &|origin, _, _| matches!(origin, ValueOrigin::Field(name) if is_written(name)))
    }

    /// Rejects values of a server's configuration that no served pipeline reads and no request can change.
    pub(crate) fn check_server_effect(&self) -> Result<(), ConfigError> {
        let served = self.config.served_pipelines()?.into_iter();
        let configs: Vec<Config> = served.map(|pipeline| Config { pipeline, ..self.config.clone() }).collect();
        let everywhere = |rule: &EffectRule, key: &'static str| {
            configs.iter().all(|config| (rule.reason)(&EffectFacts { config, version: self.version }, key).is_some())
        };
        let is_checked =
            |rule: &EffectRule| rule.scope == RuleScope::Server && rule.keys.iter().all(|key| everywhere(rule, key));
        self.first_fault(is_checked, &is_written)
    }

    fn first_fault(
        &self,
        is_checked: impl Fn(&EffectRule) -> bool,
        written: &dyn Fn(&ValueOrigin, RuleScope, &str) -> bool,
    ) -> Result<(), ConfigError> {
        let facts = EffectFacts { config: &self.config, version: self.version };
        let mut faults = Vec::new();
        for rule in RULES.iter().filter(|rule| is_checked(rule)) {
            for key in rule.keys {
                if let Some(origin) = self.find_written_origin(key, &|origin| written(origin, rule.scope, key))
                    && let Some(why) = (rule.reason)(&facts, key)
                {
                    faults.push(IneffectiveValue { key, origin, why });
                }
            }
        }
        // Reject a flag or field that sets several keys only if none of them has an effect.
        let mut leaves = Vec::new();
        self.tree.leaves(String::new(), &mut leaves);
        let has_other_effect = |fault: &IneffectiveValue| {
            let shared = match &fault.origin {
                ValueOrigin::Flag(_) => true,
                ValueOrigin::Field(name) => name != "ltx2",
                _ => false,
            };
            shared
                && leaves.iter().any(|(path, origin)| {
                    let is_off = self.tree.get(path).is_none_or(|tree| is_off(path, &tree.to_value()));
                    **origin == fault.origin && !is_off && !faults.iter().any(|fault| is_within(path, fault.key))
                })
        };
        match faults.iter().find(|fault| !has_other_effect(fault)) {
            None => Ok(()),
            Some(IneffectiveValue { key, origin, why }) => {
                let value = self.tree.get(key).map_or(String::new(), |tree| shown(&tree.to_value()));
                Err(ConfigError::value(ConfigErrorKind::NoEffect, *key, value, why.clone()).at(origin.clone()))
            }
        }
    }

    /// Returns the origin of a value at or below `key` that was written, changes the configuration and does not disable
    /// a feature.
    fn find_written_origin(&self, key: &'static str, written: &dyn Fn(&ValueOrigin) -> bool) -> Option<ValueOrigin> {
        let tree = self.tree.get(key)?;
        if let Tree::Map(entries) = tree
            && entries.is_empty()
        {
            // An empty map has no values and therefore no origin in the tree.
            let is_base = matches!(self.below.get(key), Some(Tree::Map(_)));
            let top = matches!(self.layers.last().and_then(|layer| layer.get(key)), Some(Tree::Map(_)));
            let flag = self.sections.iter().find(|(path, _)| *path == key).map(|(_, flag)| ValueOrigin::Flag(flag));
            let origins = flag.into_iter().chain([ValueOrigin::Set, ValueOrigin::Field("ltx2".into())]);
            return origins.into_iter().find(|origin| top && !is_base && written(origin));
        }
        let by_reference = |value: &Value| {
            BY_REFERENCE.contains(&key) && self.tree.leaf("reference").is_some_and(|(reference, _)| reference == value)
        };
        let mut leaves = Vec::new();
        tree.leaves(key.into(), &mut leaves);
        let found = leaves.into_iter().find(|(path, origin)| {
            let value = self.tree.get(path).map(Tree::to_value).unwrap_or_default();
            let base = self.below.get(path).map(Tree::to_value).unwrap_or_default();
            let asks = ALWAYS_CHECKED.contains(&key) && !matches!(origin, ValueOrigin::File { .. });
            let holds = !asks && are_same(&value, &base);
            written(origin) && !holds && !is_off(path, &value) && !by_reference(&value)
        });
        found.map(|(_, origin)| origin.clone())
    }

    /// Returns the path and value of the first key in a section that `--set` sets.
    fn find_set_in_section(&self, section: &str) -> Option<(String, String)> {
        let mut leaves = Vec::new();
        self.tree.get(section)?.leaves(section.into(), &mut leaves);
        let (path, _) = leaves.into_iter().find(|(_, origin)| **origin == ValueOrigin::Set)?;
        let value = self.tree.get(&path).map_or(String::new(), |tree| shown(&tree.to_value()));
        Some((path, value))
    }
}

/// Returns whether a value disables the feature of its key.
fn is_off(path: &str, value: &Value) -> bool {
    let number = match path.rsplit('.').next().unwrap_or(path) {
        "stg" | "rescale" | "skip" | "adain" | "tone_map" | "crf" | "temporal_rounds" | "generated_keyframes" => {
            Some(0.0)
        }
        "cfg" | "modality" => Some(1.0),
        _ => None,
    };
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty() || text == "off",
        Value::Array(items) => items.is_empty(),
        Value::Number(own) => number.is_some() && own.as_f64() == number,
        _ => false,
    }
}

fn is_within(path: &str, key: &str) -> bool {
    path.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Formats a value on one line, truncated to [`SHOWN`] characters.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.replace('\n', " "),
        other => other.to_string(),
    };
    match text.chars().count() > SHOWN {
        true => text.chars().take(SHOWN).chain(['…']).collect(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::{CliOverrides, load};

    fn loaded(file: &str, set: &[&str]) -> Result<LoadedConfig, ConfigError> {
        let set = set.iter().map(|pair| (*pair).to_string()).collect();
        load(&CliOverrides { files: vec![file.into()], set, ..CliOverrides::default() })
    }

    fn effect(file: &str, set: &[&str]) -> Result<(), ConfigError> {
        loaded(file, set).expect("legal").check_effect()
    }

    #[test]
    fn options_without_effect_are_rejected_with_a_reason() {
        let (lora, stage) = ("tests/fixtures/lora/ic_tiny_a.safetensors", "stages: [2]");
        let lora = format!("model.loras=[{{path: {lora}, {stage}}}]");
        let chain = "request.chain={clip: 65, prompts: [b, c, d]}";
        for (file, set, want) in [
            ("ltx2", &["guidance.video.stg=1"][..], "guidance.video.stg = 1 (--set): guidance.stg_blocks is empty"),
            ("ltx2", &["guidance.video.stg=1"], "the preset ltx2_full_guidance has [29]"),
            ("ltx2_3", &["guidance.video.stg=0.5", "guidance.stg_blocks=[]"], "the preset ltx2_3 has [28]"),
            ("ltx2", &["guidance.stg_blocks=[29]"], "guidance.stg_blocks = [29] (--set): guidance.video.stg and"),
            ("ltx2", &["guidance.rescale_scope=batch"], "guidance.rescale_scope = batch (--set): each video"),
            (
                "ltx2",
                &["two_stage.adain=0.5"],
                "two_stage.adain = 0.5 (--set): the pipeline text_to_video has only one stage",
            ),
            (
                "ltx2",
                &["dfr.sigmas=[0.5, 0.25]"],
                "dfr.sigmas = [0.5,0.25] (--set): only the pipeline dfr uses this key",
            ),
            ("ltx2", &["conditioning.reference_downscale_factor=2"], "there is no reference video"),
            ("ltx2", &["conditioning.crf=20"], "conditioning.crf = 20 (--set): no image uses it"),
            ("ltx2", &["request.num_frames=121", chain], "121 frames make 3 clips; remove 1"),
            ("ltx2", &["request.chain={clip: 121}"], "121 frames fit in one clip of up to 121; remove request.chain"),
            ("ltx2", &["enhance.max_new_tokens=9"], "prompts are not enhanced; set request.enhance_prompt to true, or"),
            ("ltx2", &["request.enhance_prompt=true", "enhance.key_env=A"], "only chat servers use this key; set"),
            (
                "ltx2_5",
                &["request.enhance_prompt=true", "enhance.top_k=3"],
                "enhance.top_k = 3 (--set): the most likely token is always selected",
            ),
            ("ltx2", &["request.chain={}"], "request.chain = {} (--set): 121 frames fit in one clip"),
            ("ltx2", &["text.bos=always"], "text.bos = always (--set): prompts always begin with BOS"),
            ("ltx2", &[&lora], "LoRA 1 is for stages [2], and the pipeline text_to_video has only stage 1"),
            ("ltx2", &["model.upsampler=up"], "model.upsampler = up (--set): no stage uses spatial upsampling"),
            ("ltx2", &["model.weights_seed=3"], "the weights come from files; set model.weights to random"),
            ("ltx2", &["runtime.dtype=f32", "runtime.numerics=official"], "runtime.dtype is f32"),
            ("ltx2", &["runtime.platform=cpu", "runtime.memory_fraction=0.5"], "only the platform cuda uses this key"),
            ("ltx2", &["serve.queue=3"], "only ltx2 serve reads serve.queue"),
            ("ltx2_distilled", &["request.negative_prompt=blurry"], "no step reads the negative prompt"),
            ("ltx2", &["pipeline=text_to_audio", "request.width=512"], "the pipeline text_to_audio makes no video"),
            ("ltx2", &["sampler.step_noise=diffusers"], "no step draws noise"),
            // Rejected although it is the default of two-stage pipelines.
            ("ltx2", &["two_stage.upsample=[spatial_x2]"], "has only one stage"),
        ] {
            let error = effect(file, set).expect_err(want).to_string();
            assert!(error.contains(want) && error.contains("; "), "{set:?}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }

    #[test]
    fn default_and_disabling_values_are_accepted() {
        for (file, set) in [
            ("ltx2_full_guidance", &["guidance.video.stg=1", "guidance.stg_blocks=[29]"][..]),
            ("ltx2", &["guidance.video.stg=0", "guidance.rescale_scope=per_sample"]),
            ("ltx2", &["conditioning.h264=off", "conditioning.crf=0", "two_stage.tone_map=0"]),
            ("ltx2", &["guidance.video.stg=1", "guidance.stg_blocks=[3]"]),
            ("ltx2_distilled", &["guidance.video.cfg=1", "request.negative_prompt=''"]),
            ("ltx2", &["reference=diffusers", "two_stage.audio=diffusers", "model.lora_merge=diffusers"]),
            ("ltx2", &["pipeline=two_stage", "model.upsampler=up", "two_stage.adain=0.5"]),
            ("ltx2", &["reference=diffusers", "text.bos=always"]),
            ("ltx2", &["request.chain={}", "request.num_frames=241"]),
            ("ltx2", &["request.enhance_prompt=true", "enhance.top_k=3", "enhance.seed=1"]),
            (
                "ltx2_5",
                &[
                    "request.enhance_prompt=true",
                    "enhance={endpoint: 'http://localhost:1/v1', model: m, top_p: 0.9, seed: 1}",
                ],
            ),
        ] {
            assert!(effect(file, set).is_ok(), "{file} {set:?}");
        }
    }

    /// Shipped files set keys of several pipelines and models.
    #[test]
    fn shipped_files_are_never_rejected() {
        for (name, _) in super::super::presets::CONFIGS {
            for set in [&[][..], &["pipeline=text_to_audio"], &["pipeline=two_stage"], &["reference=diffusers"]] {
                // Some sizes are invalid with two stages.
                let Ok(loaded) = loaded(name, set) else { continue };
                assert!(loaded.check_effect().is_ok(), "{name} {set:?}");
            }
            assert!(loaded(name, &[]).is_ok(), "{name}");
        }
    }

    #[test]
    fn shared_flag_is_rejected_if_none_of_its_keys_has_an_effect() {
        let given = |pipeline: &str, value: f64| {
            let mut given = CliOverrides { set: vec![format!("pipeline={pipeline}")], ..CliOverrides::default() };
            given.shared_flag("stg-scale", &["guidance.video.stg", "guidance.audio.stg"], Some(value));
            load(&given).expect("legal").check_effect()
        };
        // Only the audio key of the flag has an effect.
        assert!(given("text_to_audio", 2.0).is_ok());
        let error = given("text_to_video", 2.0).expect_err("no blocks").to_string();
        assert!(
            error.starts_with("guidance.video.stg = 2.0 (flag --stg-scale): guidance.stg_blocks is empty"),
            "{error}"
        );
    }

    #[test]
    fn empty_section_error_quotes_the_flag() {
        let mut given = CliOverrides::default();
        given.flag("chain", "request.chain", Some(json!({})));
        let error = load(&given).expect("legal").check_effect().expect_err("one clip").to_string();
        assert!(error.starts_with("request.chain = {} (flag --chain): 121 frames fit in one clip"), "{error}");
    }

    #[test]
    fn keys_that_a_command_does_not_read_are_rejected() {
        let own = loaded("ltx2", &["request.width=512", "runtime.platform=cpu"]).expect("legal");
        let error = own.check_read("not read", |path| path.starts_with("runtime.")).expect_err("a width").to_string();
        assert_eq!(error, "request.width = 512 (--set): not read; remove this option");
        let own = loaded("ltx2", &["runtime.platform=cpu"]).expect("legal");
        assert!(
            own.check_read("not read", |path| path.starts_with("runtime.")).is_ok(),
            "values of the file are not checked"
        );
    }

    #[test]
    fn edited_copy_of_a_shipped_file_is_a_user_file() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("configs")).expect("a folder");
        let path = folder.path().join("configs/ltx2_two_stage.yml");
        let text = crate::config::presets::shipped_config("ltx2_two_stage").expect("shipped").1;
        let effect = |text: &str| {
            std::fs::write(&path, text).expect("written");
            loaded(path.to_str().expect("UTF-8"), &["pipeline=text_to_video"]).expect("legal").check_effect()
        };
        assert!(effect(text).is_ok(), "the shipped file by another path");
        let edited = format!("{text}  adain: 0.5\n");
        let error = effect(&edited).expect_err("one stage").to_string();
        assert!(error.contains("configs/ltx2_two_stage.yml:") && error.contains("has only one stage"), "{error}");
    }

    #[test]
    fn ineffective_values_are_rejected_in_files_not_in_sidecars() {
        let folder = tempfile::tempdir().expect("a folder");
        let of = |name: &str, text: String| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("written");
            let files = vec![path.to_str().expect("UTF-8").to_string()];
            load(&CliOverrides { files, ..CliOverrides::default() }).expect("legal").check_effect()
        };
        let error = of("own.yml", "guidance:\n  video: {stg: 1}\n".into()).expect_err("no blocks").to_string();
        assert!(error.contains("own.yml:2): guidance.stg_blocks is empty"), "{error}");
        let config = json!({"guidance": {"video": {"stg": 1}}, "two_stage": {"adain": 0.5}});
        assert!(of("out.json", json!({"config": config}).to_string()).is_ok());
        assert!(of("style.yml", "two_stage: {audio: stage_1}\nmodel: {upsampler: up}\n".into()).is_ok());
        assert!(of("server.yml", "serve: {queue: 3}\n".into()).is_ok(), "a file may also configure a server");
    }

    #[test]
    fn server_rejects_values_that_no_served_pipeline_reads() {
        let effect = |pairs: &[&str]| {
            let set = pairs.iter().map(|pair| (*pair).to_string()).collect();
            load(&CliOverrides { set, ..CliOverrides::default() }).expect("legal").check_server_effect()
        };
        let error = effect(&["two_stage.adain=0.5"]).expect_err("one stage").to_string();
        assert!(error.contains("the pipeline text_to_video has only one stage"), "{error}");
        assert!(effect(&["two_stage.adain=0.5", "serve.pipelines=[two_stage]"]).is_ok());
        let mut unchecked = Config::default();
        unchecked.serve.pipelines = vec!["hq".into(), "two_stages".into()];
        let error = unchecked.served_pipelines().expect_err("unknown").to_string();
        assert!(error.contains("serve.pipelines") && error.contains("two_stages"), "{error}");
        assert!(error.contains("text_to_video, ") && error.contains(" or text_to_audio"), "{error}");
        // Requests can change these keys.
        assert!(effect(&["guidance.video.stg=1", "conditioning.crf=20", "request.negative_prompt=x"]).is_ok());
    }
}
