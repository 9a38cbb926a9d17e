//! Values that somebody wrote and that change nothing: these are refused, with the reason.
//!
//! Presets, shipped files and sidecars hold values of several pipelines, or of all keys; theirs are never refused. Some values of
//! a user's file are not refused either, since other runs of the file read them: components, negative prompts, and conventions
//! that `reference` sets. A value that holds without being written, or that switches something off, is accepted everywhere; only keys of
//! [`ASKING`] are refused with any value of a flag or `--set`.

use serde_json::Value;

use super::effect::{RULES, Rule, Scope};
use super::effect_facts::Facts;
use super::error::{ConfigError, ValueOrigin};
use super::load::{BY_REFERENCE, Loaded};
use super::presets::is_shipped;
use super::schema::Config;
use super::tree::{Tree, are_same};

/// Most characters of a value that an error repeats.
const SHOWN: usize = 60;

/// Keys that ask for work by each of their values, also by the one that holds without being written.
const ASKING: [&str; 1] = ["two_stage.upsample"];

/// A written value without effect.
struct Fault {
    key: &'static str,
    origin: ValueOrigin,
    why: String,
}

/// Whether somebody wrote the value of a key on the command line or in a file of their own, for a row of a scope.
fn is_written(origin: &ValueOrigin, scope: Scope, key: &str) -> bool {
    match origin {
        ValueOrigin::Set | ValueOrigin::Flag(_) => true,
        ValueOrigin::File { .. } => !is_shipped(origin) && scope != Scope::Flags && !BY_REFERENCE.contains(&key),
        _ => false,
    }
}

impl Loaded {
    /// Refuses flags, `--set` pairs and values of the user's files that do not change the run.
    ///
    /// # Errors
    /// The first such value, with its key, where it was written, the reason, and what to do.
    pub fn check_effect(&self) -> Result<(), ConfigError> {
        if let Some((path, value)) = self.set_below("serve") {
            let why = format!("only ltx2 serve reads {path}; remove it");
            return Err(ConfigError::Value { key: "serve", value, origin: ValueOrigin::Set, why });
        }
        self.first_fault(|_| true, &is_written)
    }

    /// Refuses flags and `--set` pairs of keys that a command does not read, for the reason `why`.
    ///
    /// # Errors
    /// The first such value, with its key and where it was written.
    pub(crate) fn check_read(&self, why: &str, is_read: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
        let mut leaves = Vec::new();
        self.tree.leaves(String::new(), &mut leaves);
        let is_written = |origin: &ValueOrigin| matches!(origin, ValueOrigin::Set | ValueOrigin::Flag(_));
        match leaves.into_iter().find(|(path, origin)| is_written(origin) && !is_read(path)) {
            None => Ok(()),
            Some((path, origin)) => {
                let value = self.tree.get(&path).map_or(String::new(), |tree| shown(&tree.to_value()));
                Err(ConfigError::Flag(format!("{path} = {value} ({origin}): {why}; remove it")))
            }
        }
    }

    /// The same of the fields of a request to the server, of those that `is_written` names.
    pub(crate) fn check_request_effect(&self, is_written: impl Fn(&str) -> bool) -> Result<(), ConfigError> {
        self.first_fault(|_| true, &|origin, _, _| matches!(origin, ValueOrigin::Field(name) if is_written(name)))
    }

    /// The same of a server's configuration, of what no request can change: a value is refused where none of the served pipelines
    /// reads it.
    pub(crate) fn check_server_effect(&self) -> Result<(), ConfigError> {
        let served = [self.config.pipeline].into_iter().chain(self.config.serve.pipelines.iter().copied());
        let configs: Vec<Config> = served.map(|pipeline| Config { pipeline, ..self.config.clone() }).collect();
        let everywhere = |rule: &Rule, key: &'static str| {
            configs.iter().all(|config| (rule.reason)(&Facts { config, version: self.version }, key).is_some())
        };
        let is_checked = |rule: &Rule| rule.scope == Scope::Server && rule.keys.iter().all(|key| everywhere(rule, key));
        self.first_fault(is_checked, &is_written)
    }

    fn first_fault(
        &self,
        is_checked: impl Fn(&Rule) -> bool,
        written: &dyn Fn(&ValueOrigin, Scope, &str) -> bool,
    ) -> Result<(), ConfigError> {
        let facts = Facts { config: &self.config, version: self.version };
        let mut faults = Vec::new();
        for rule in RULES.iter().filter(|rule| is_checked(rule)) {
            for key in rule.keys {
                if let Some(origin) = self.written_at(key, &|origin| written(origin, rule.scope, key))
                    && let Some(why) = (rule.reason)(&facts, key)
                {
                    faults.push(Fault { key, origin, why });
                }
            }
        }
        // A flag or field that writes several keys is refused where none of them has an effect.
        let mut leaves = Vec::new();
        self.tree.leaves(String::new(), &mut leaves);
        let has_other_effect = |fault: &Fault| {
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
            Some(Fault { key, origin, why }) => {
                let value = self.tree.get(key).map_or(String::new(), |tree| shown(&tree.to_value()));
                Err(ConfigError::Value { key, value, origin: origin.clone(), why: why.clone() })
            }
        }
    }

    /// Where a value at or below a key was written that asks for something other than what holds without it.
    fn written_at(&self, key: &'static str, written: &dyn Fn(&ValueOrigin) -> bool) -> Option<ValueOrigin> {
        let tree = self.tree.get(key)?;
        if let Tree::Map(entries) = tree
            && entries.is_empty()
        {
            // An empty map has no line of its own.
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
            let asks = ASKING.contains(&key) && !matches!(origin, ValueOrigin::File { .. });
            let holds = !asks && are_same(&value, &base);
            written(origin) && !holds && !is_off(path, &value) && !by_reference(&value)
        });
        found.map(|(_, origin)| origin.clone())
    }

    /// Path and value of a key of a section that `--set` wrote.
    fn set_below(&self, section: &str) -> Option<(String, String)> {
        let mut leaves = Vec::new();
        self.tree.get(section)?.leaves(section.into(), &mut leaves);
        let (path, _) = leaves.into_iter().find(|(_, origin)| **origin == ValueOrigin::Set)?;
        let value = self.tree.get(&path).map_or(String::new(), |tree| shown(&tree.to_value()));
        Some((path, value))
    }
}

/// Whether a value switches off what its key is for.
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

/// A value on one line, cut where it is long.
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

    fn loaded(file: &str, set: &[&str]) -> Result<Loaded, ConfigError> {
        let set = set.iter().map(|pair| (*pair).to_string()).collect();
        load(&CliOverrides { files: vec![file.into()], set, ..CliOverrides::default() })
    }

    fn effect(file: &str, set: &[&str]) -> Result<(), ConfigError> {
        loaded(file, set).expect("legal").check_effect()
    }

    #[test]
    fn options_without_effect_are_refused_with_the_reason() {
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
                "two_stage.adain = 0.5 (--set): the pipeline text_to_video has one stage",
            ),
            ("ltx2", &["dfr.sigmas=[0.5, 0.25]"], "dfr.sigmas = [0.5,0.25] (--set): only the pipeline dfr reads it"),
            ("ltx2", &["conditioning.reference_downscale_factor=2"], "there is no reference video"),
            ("ltx2", &["conditioning.crf=20"], "conditioning.crf = 20 (--set): no image goes by it"),
            ("ltx2", &["request.num_frames=121", chain], "121 frames make 3 clips; remove 1"),
            ("ltx2", &["request.chain={clip: 121}"], "121 frames are one clip, which has up to 121; remove it"),
            ("ltx2", &["request.chain={}"], "request.chain = {} (--set): 121 frames are one clip"),
            ("ltx2", &["text.bos=always"], "text.bos = always (--set): prompts always begin with BOS"),
            ("ltx2", &[&lora], "LoRA 1 is for stages [2], and the pipeline text_to_video has stage 1 alone"),
            ("ltx2", &["model.upsampler=up"], "model.upsampler = up (--set): no stage upsamples in space"),
            ("ltx2", &["model.weights_seed=3"], "the weights come from files; set model.weights to random"),
            ("ltx2", &["runtime.dtype=f32", "runtime.numerics=official"], "runtime.dtype is f32"),
            ("ltx2", &["runtime.platform=cpu", "runtime.memory_fraction=0.5"], "only cuda reads it"),
            ("ltx2", &["serve.queue=3"], "only ltx2 serve reads serve.queue"),
            ("ltx2_distilled", &["request.negative_prompt=blurry"], "no step reads the negative prompt"),
            ("ltx2", &["pipeline=text_to_audio", "request.width=512"], "the pipeline text_to_audio makes no video"),
            ("ltx2", &["sampler.step_noise=diffusers"], "no step draws noise"),
            // The default of pipelines that have two stages.
            ("ltx2", &["two_stage.upsample=[spatial_x2]"], "has one stage"),
        ] {
            let error = effect(file, set).expect_err(want).to_string();
            assert!(error.contains(want) && error.contains("; "), "{set:?}: {error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }

    #[test]
    fn values_that_hold_anyway_or_switch_off_are_accepted() {
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
        ] {
            assert!(effect(file, set).is_ok(), "{file} {set:?}");
        }
    }

    /// Shipped files are those of several pipelines and models.
    #[test]
    fn shipped_files_are_never_refused() {
        for (name, _) in super::super::presets::CONFIGS {
            for set in [&[][..], &["pipeline=text_to_audio"], &["pipeline=two_stage"], &["reference=diffusers"]] {
                // Some sizes are not those of two stages.
                let Ok(loaded) = loaded(name, set) else { continue };
                assert!(loaded.check_effect().is_ok(), "{name} {set:?}");
            }
            assert!(loaded(name, &[]).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_flag_of_several_keys_is_refused_where_none_has_an_effect() {
        let given = |pipeline: &str, value: f64| {
            let mut given = CliOverrides { set: vec![format!("pipeline={pipeline}")], ..CliOverrides::default() };
            given.shared_flag("stg-scale", &["guidance.video.stg", "guidance.audio.stg"], Some(value));
            load(&given).expect("legal").check_effect()
        };
        // The video's half of the flag does nothing there, the sound's does.
        assert!(given("text_to_audio", 2.0).is_ok());
        let error = given("text_to_video", 2.0).expect_err("no blocks").to_string();
        assert!(
            error.starts_with("guidance.video.stg = 2.0 (flag --stg-scale): guidance.stg_blocks is empty"),
            "{error}"
        );
    }

    #[test]
    fn an_empty_section_of_a_flag_is_named_by_the_flag() {
        let mut given = CliOverrides::default();
        given.flag("chain", "request.chain", Some(json!({})));
        let error = load(&given).expect("legal").check_effect().expect_err("one clip").to_string();
        assert!(error.starts_with("request.chain = {} (flag --chain): 121 frames are one clip"), "{error}");
    }

    #[test]
    fn keys_that_a_command_does_not_read_are_refused() {
        let own = loaded("ltx2", &["request.width=512", "runtime.platform=cpu"]).expect("legal");
        let error = own.check_read("not read", |path| path.starts_with("runtime.")).expect_err("a width").to_string();
        assert_eq!(error, "request.width = 512 (--set): not read; remove it");
        let own = loaded("ltx2", &["runtime.platform=cpu"]).expect("legal");
        assert!(own.check_read("not read", |path| path.starts_with("runtime.")).is_ok(), "the file is not asked");
    }

    #[test]
    fn an_edited_copy_of_a_shipped_file_is_the_user_s() {
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
        assert!(error.contains("configs/ltx2_two_stage.yml:") && error.contains("has one stage"), "{error}");
    }

    #[test]
    fn files_of_the_user_are_refused_by_line_and_sidecars_are_not() {
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
        assert!(of("server.yml", "serve: {queue: 3}\n".into()).is_ok(), "a file may be that of a server too");
    }

    #[test]
    fn a_server_is_refused_what_none_of_its_pipelines_reads() {
        let effect = |pairs: &[&str]| {
            let set = pairs.iter().map(|pair| (*pair).to_string()).collect();
            load(&CliOverrides { set, ..CliOverrides::default() }).expect("legal").check_server_effect()
        };
        let error = effect(&["two_stage.adain=0.5"]).expect_err("one stage").to_string();
        assert!(error.contains("the pipeline text_to_video has one stage"), "{error}");
        assert!(effect(&["two_stage.adain=0.5", "serve.pipelines=[two_stage]"]).is_ok());
        // Requests decide about the rest.
        assert!(effect(&["guidance.video.stg=1", "conditioning.crf=20", "request.negative_prompt=x"]).is_ok());
    }
}
