//! `model.ic_lora` and `dfr.detailing_lora`: finds the file of a published IC-LoRA, and adds the IC-LoRA to `model.loras`.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::error::{ConfigError, ConfigErrorKind, ValueOrigin};
use super::ic_loras::{PublishedIcLora, is_name, names};
use super::load::version;
use super::message::{Setting, message};
use super::pipeline::{Pipeline, Support, VideoUse};
use super::schema::{Config, IcLora, Lora, ReferenceVideo};
use super::tree::Tree;
use super::{LoraApply, sidecar};
use crate::media::{FrameFilter, Preprocess};
use crate::weights::{HubCache, ReferenceScales, Version, WeightsError};

pub(super) const KEY: &str = "model.ic_lora";
const DETAILING: &str = "dfr.detailing_lora";
const LORAS: &str = "model.loras";
/// End of the name of a LoRA file.
const SAFETENSORS: &str = ".safetensors";

/// A configuration key that selects an IC-LoRA.
pub(super) struct IcLoraKey {
    key: &'static str,
    flag: &'static str,
    /// Stage that uses the IC-LoRA.
    stage: u8,
}

/// Keys that select an IC-LoRA.
pub(super) const KEYS: [IcLoraKey; 2] = [
    IcLoraKey { key: KEY, flag: "--ic-lora", stage: 1 },
    IcLoraKey { key: DETAILING, flag: "--detailing-lora", stage: 2 },
];

impl IcLoraKey {
    fn value(self: &IcLoraKey, config: &Config) -> Option<IcLora> {
        match self.stage {
            1 => config.model.ic_lora.clone(),
            // Other pipelines reject the key when the configuration is checked.
            _ => config.dfr.detailing_lora.clone().filter(|_| config.pipeline.spec().has_rounds()),
        }
    }
}

/// Replaces the name in `at.key` by the file's path or name on the hub, and a missing strength by the published one, and
/// adds the IC-LoRA to `model.loras`: a detailing LoRA for stage 2, others for the stages of LoRAs that do not specify them.
/// `config` is the typed form of `merged`. Returns whether `merged` changed.
///
/// # Errors
/// Returns an error if the name is unknown, if the IC-LoRA was published for another model generation or needs another
/// pipeline, if its file is not in the Hugging Face cache, or if there is no video to follow.
pub(super) fn take(
    at: &IcLoraKey,
    merged: &mut Tree,
    config: &Config,
    generation: Version,
    layers: &[Tree],
) -> Result<bool, ConfigError> {
    let mut loras = match merged.leaf(LORAS) {
        Some((Value::Array(loras), _)) => loras.clone(),
        _ => Vec::new(),
    };
    // A sidecar contains the IC-LoRA of its run twice.
    let recorded = added_by_sidecar(at, &config.model.loras, layers).filter(|_| sidecar::holds(merged, LORAS));
    if let Some(place) = recorded {
        loras.remove(place);
    }
    let Some(own) = at.value(config) else {
        if recorded.is_some() {
            let origin = merged.origin(at.key);
            merged.set(LORAS, loras.into(), &origin);
        }
        return Ok(recorded.is_some());
    };
    let origin = merged.origin(at.key);
    let fail = |error: ConfigError| error.at(origin.clone());
    let named = PublishedIcLora::named(&own.path).find(|row| row.supports(generation));
    let row = named.or_else(|| PublishedIcLora::of_file(&own.path));
    if at.stage == 1 {
        check_pipeline(config, &own, row).map_err(fail)?;
    }
    let (path, _) = resolve(at, &own, generation).map_err(fail)?;
    match at.stage {
        1 => check_references(config, &own, row).map_err(fail)?,
        _ => check_half_size(&path, row).map_err(fail)?,
    }
    let strength = own.strength.or_else(|| row?.strength).unwrap_or(1.0);
    let mut added = json!({"path": path, "strength": strength, "apply": own.apply});
    merged.set(at.key, added.clone(), &origin);
    if at.stage != 1 {
        added["stages"] = json!([at.stage]);
    }
    loras.push(added);
    let unchanged = matches!(origin, ValueOrigin::Sidecar { .. }) && merged.leaf(LORAS).is_some();
    let origin = if unchanged { merged.origin(LORAS) } else { origin };
    merged.set(LORAS, loras.into(), &origin);
    Ok(true)
}

/// Returns the index of the entry of `loras` that the IC-LoRA of a sidecar among the layers added: the last equal one.
fn added_by_sidecar(at: &IcLoraKey, loras: &[Lora], layers: &[Tree]) -> Option<usize> {
    let own = |part: &str| format!("{}.{part}", at.key);
    let layer = layers.iter().find(|layer| sidecar::holds(layer, &own("path")))?;
    let read = |key: &str| layer.leaf(key).map(|(value, _)| value);
    let stages = match at.stage {
        1 => Pipeline::deserialize(read("pipeline")?).ok()?.spec().default_lora_stages(),
        stage => vec![stage],
    };
    let added = Lora {
        path: read(&own("path"))?.as_str()?.into(),
        strength: read(&own("strength"))?.as_f64()?,
        stages,
        apply: read(&own("apply")).and_then(|apply| LoraApply::deserialize(apply).ok())?,
    };
    loras.iter().rposition(|lora| *lora == added)
}

fn wrong(own: &IcLora, kind: ConfigErrorKind, why: impl Into<super::Limit>) -> ConfigError {
    ConfigError::value(kind, KEY, &own.path, why)
}

/// Rejects a detailing LoRA whose reference is not half as large as the generated video, as that of the first stage is.
fn check_half_size(path: &str, row: Option<&PublishedIcLora>) -> Result<(), ConfigError> {
    let scales = ReferenceScales::read(path)
        .map_err(|error| ConfigError { key: DETAILING.into(), ..ConfigError::lora(error) })?;
    let (size, time) =
        (scales.downscale.or(row.and_then(|row| row.downscale)).unwrap_or(2), scales.temporal.unwrap_or(1));
    if (size, time) == (2, 1) {
        return Ok(());
    }
    let why = format!(
        "its reference has 1/{size} of the video's size and 1/{time} of its frames, but the first stage has 1/2 of the size \
         and all frames; use an IC-LoRA such as pixel-spatial-upscaler-x2"
    );
    Err(ConfigError::value(ConfigErrorKind::Unsupported, DETAILING, path, why))
}

/// Returns the path of an IC-LoRA and, if it was selected by name, its row.
fn resolve(
    at: &IcLoraKey,
    own: &IcLora,
    generation: Version,
) -> Result<(String, Option<&'static PublishedIcLora>), ConfigError> {
    let (path, flag) = (&own.path, at.flag);
    let wrong = |own: &IcLora, kind, why: String| ConfigError::value(kind, at.key, &own.path, why);
    if !is_name(path) {
        if let Some(why) = missing_lora(path) {
            return Err(wrong(own, ConfigErrorKind::Missing, why));
        }
        if path.contains('/') || path.ends_with(SAFETENSORS) {
            return Ok((path.clone(), None));
        }
        let why = format!("is neither a file ({SAFETENSORS}) nor a published IC-LoRA; names: {}", names().join(", "));
        return Err(wrong(own, ConfigErrorKind::NotOneOf, why));
    }
    let Some(row) = PublishedIcLora::named(path).find(|row| row.supports(generation)) else {
        let versions = PublishedIcLora::named(path).flat_map(|row| [Some(row.base), row.also]).flatten();
        let bases: Vec<String> = versions.map(|version| format!("LTX-{version}")).collect();
        let why = format!(
            "was published for {}, but the model is LTX-{generation}; use -m with such a model, or {flag} FILE to use \
             the file anyway",
            bases.join(" and ")
        );
        return Err(wrong(own, ConfigErrorKind::Unsupported, why));
    };
    let found = hub_file(row).map_err(|error| {
        let pull = format!("run `ltx2 pull {}`, or pass a file: {flag} FILE", row.hub_name());
        wrong(own, ConfigErrorKind::Missing, format!("{error}; {pull}"))
    })?;
    Ok((found, Some(row)))
}

/// Returns the error message for a LoRA whose name is that of a file and that exists neither as a file nor in the Hugging
/// Face cache.
pub(crate) fn missing_lora(path: &str) -> Option<String> {
    if !path.ends_with(SAFETENSORS) || Path::new(path).exists() {
        return None;
    }
    match HubCache::is_name(path) {
        true if HubCache::from_env().resolve(path).is_ok() => None,
        true => Some(format!("the file is missing; correct the path, or run `ltx2 pull {path}` if it is on the hub")),
        false => Some("the file is missing; correct the path".into()),
    }
}

/// Returns the IC-LoRA that an item of `serve.ic_loras` selects for the model of a configuration, at full strength.
///
/// # Errors
/// Returns an error if the name is unknown, if the IC-LoRA was published for another model generation, or if its
/// file is not in the Hugging Face cache.
pub(crate) fn served_ic_lora(name: &str, config: &Config) -> Result<Lora, ConfigError> {
    let own = IcLora { path: name.into(), strength: None, apply: LoraApply::Merge };
    let not_published = || wrong(&own, ConfigErrorKind::NotOneOf, format!("names: {}", names().join(", ")));
    let found = resolve(&KEYS[0], &own, version(&config.model))
        .and_then(|(path, row)| row.map(|_| path).ok_or_else(not_published));
    let path = found.map_err(|error| ConfigError { key: "serve.ic_loras".into(), ..error })?;
    Ok(Lora { path, strength: 1.0, stages: config.pipeline.spec().default_lora_stages(), apply: own.apply })
}

/// Returns the file that `model.ic_lora` selects; for a published name, the files of all model generations.
pub(crate) fn ic_lora_files(path: &str) -> Vec<String> {
    match is_name(path) {
        true => PublishedIcLora::named(path).map(PublishedIcLora::hub_name).collect(),
        false => vec![path.into()],
    }
}

/// Returns the name on the hub of a row's file, which must be in the Hugging Face cache.
fn hub_file(row: &PublishedIcLora) -> Result<String, String> {
    let cache = HubCache::from_env();
    let reason = |error: WeightsError| match error {
        WeightsError::NotFound { name, reason, .. } => format!("{name}: {reason}"),
        other => other.to_string(),
    };
    let found = cache.resolve(&row.hub_name()).map_err(reason)?;
    if row.file.is_some() {
        return Ok(row.hub_name());
    }
    let entries = std::fs::read_dir(&found).map_err(|error| format!("cannot read {}: {error}", found.display()))?;
    let files = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let files: Vec<String> = files.filter(|name| name.ends_with(SAFETENSORS)).collect();
    match &files[..] {
        [one] => Ok(format!("{}/{one}", row.repository)),
        _ => Err(format!("{} contains {} safetensors files, not one", found.display(), files.len())),
    }
}

/// Returns the pipeline that an IC-LoRA selects if none is set.
pub(super) fn implied_pipeline(own: &IcLora) -> Pipeline {
    let row = PublishedIcLora::named(&own.path).next().or_else(|| PublishedIcLora::of_file(&own.path));
    // A LoRA that cannot be read is reported when its scales are read.
    let by_header = || ReferenceScales::read(&own.path).ok()?.hdr.map(|_| Pipeline::Hdr);
    row.and_then(PublishedIcLora::needed_pipeline).or_else(by_header).unwrap_or(Pipeline::IcLora)
}

/// Rejects a published IC-LoRA in a pipeline that does not support it.
fn check_pipeline(config: &Config, own: &IcLora, row: Option<&PublishedIcLora>) -> Result<(), ConfigError> {
    match row.and_then(PublishedIcLora::needed_pipeline) {
        Some(needed) if needed != config.pipeline => {
            let (found, needed) = (config.pipeline.name(), needed.name());
            let why = message![
                format!("works only in the pipeline {needed}, but the pipeline is {found}; use "),
                Setting::Pipeline,
                format!(" {needed}")
            ];
            Err(wrong(own, ConfigErrorKind::Unsupported, why))
        }
        _ => Ok(()),
    }
}

/// Rejects an IC-LoRA without a reference video or input video that it follows.
fn check_references(config: &Config, own: &IcLora, row: Option<&PublishedIcLora>) -> Result<(), ConfigError> {
    if config.follows_references() {
        return Ok(());
    }
    let spec = config.pipeline.spec();
    let key = "request.inpaint.reference";
    let why = match spec.references_fault(1) {
        Some(_) if spec.video == Some(VideoUse::Region) => {
            message![format!("the pipeline {} follows its video only with ", spec.name), Setting::Key(key), ": set it"]
        }
        Some(fault) => fault,
        None => {
            let what = row.map_or(String::new(), |row| format!(" ({})", row.reference));
            message![format!("needs a reference video{what}: "), Setting::ReferenceVideos]
        }
    };
    let is_rejected = spec.reference_videos == Support::Rejected && spec.video != Some(VideoUse::Region);
    let kind = if is_rejected { ConfigErrorKind::Unsupported } else { ConfigErrorKind::Missing };
    Err(wrong(own, kind, why))
}

impl Config {
    /// Returns the conversion of a reference video's frames: its own, otherwise the default of the published IC-LoRA.
    ///
    /// # Errors
    /// Returns an error if the parameters of the conversion are invalid.
    pub(crate) fn reference_filter(&self, video: &ReferenceVideo) -> Result<FrameFilter, ConfigError> {
        let row = self.model.ic_lora.as_ref().and_then(|own| PublishedIcLora::of_file(&own.path));
        let default = || row.map_or_else(Preprocess::default, |row| Preprocess::Kind(row.preprocess));
        let preprocess = video.preprocess.clone().unwrap_or_else(default);
        let key = "request.reference_videos";
        let wrong = |why| {
            let value = format!("preprocess {} of {}", preprocess.kind().name(), video.path);
            ConfigError::value(ConfigErrorKind::OutOfRange, key, value, why)
        };
        preprocess.filter().map_err(wrong)
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;
    use ndarray::Array4;

    use super::*;
    use crate::config::{CliOverrides, load};
    use crate::media::{Frames, write_png_frames};

    const FILE: &str = "tests/fixtures/lora/ic_tiny_a.safetensors";
    const PLAIN: &str = "tests/fixtures/lora/ic_tiny_a_plain.safetensors";

    /// Loads a configuration; `VIDEO` in `set` stands for a folder of black frames.
    fn load_video(set: &[String], files: &[String]) -> Result<Config, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let frames = Frames::new(Array4::zeros((25, 128, 128, 3))).expect("frames");
        write_png_frames(folder.path(), &frames).expect("written");
        let set = set.iter().map(|pair| pair.replace("VIDEO", &folder.path().display().to_string())).collect();
        let given = CliOverrides { set, files: files.to_vec(), ..CliOverrides::default() };
        load(&given).map(|loaded| loaded.config).map_err(|error| error.to_string())
    }

    /// Returns options with which the pipeline follows a video; `None` if it cannot.
    fn following(pipeline: Pipeline) -> Option<Vec<String>> {
        let spec = pipeline.spec();
        let video = match spec.video {
            None if spec.reference_videos == Support::Rejected => return None,
            None => "request.reference_videos=[{path: VIDEO}]",
            Some(VideoUse::Reference | VideoUse::Region) => "request.video=VIDEO",
            Some(_) => return None,
        };
        let mut set: Vec<String> = [
            &format!("pipeline={}", spec.name),
            "request.width=128",
            "request.height=128",
            "request.num_frames=25",
            video,
        ]
        .map(String::from)
        .to_vec();
        if spec.video == Some(VideoUse::Region) {
            set.push("request.inpaint={region: [0, 0, 64, 64], reference: true}".into());
        }
        if spec.images == Support::Required {
            set.push("request.images=[{path: a.png}]".into());
        }
        if spec.audio == Support::Required || spec.video == Some(VideoUse::Reference) {
            set.push("request.audio={path: a.wav}".into());
        }
        Some(set)
    }

    #[test]
    fn ic_lora_has_stages_and_scale_of_lora_in_every_pipeline() {
        let mut count = 0;
        for pipeline in Pipeline::value_variants() {
            let Some(set) = following(*pipeline) else { continue };
            count += 1;
            // These pipelines support only references of their own size.
            let (file, scale) = match pipeline {
                Pipeline::Hdr | Pipeline::Inpaint => (PLAIN, 1),
                _ => (FILE, 2),
            };
            let loras = [format!("model.ic_lora={{path: {file}}}"), format!("model.loras=[{{path: {file}}}]")];
            let [own, plain] = loras.map(|lora| {
                load_video(&[&set[..], &[lora]].concat(), &[]).unwrap_or_else(|error| panic!("{pipeline:?}: {error}"))
            });
            assert_eq!(own.model.loras, plain.model.loras, "{pipeline:?}");
            assert_eq!(own.conditioning.reference_scales(), [scale, 1], "{pipeline:?}");
            let first_only = *pipeline == Pipeline::IcLora;
            assert_eq!(own.model.loras[0].stages, if first_only { vec![1] } else { vec![1, 2] }, "{pipeline:?}");
        }
        assert_eq!(count, 11);
    }

    #[test]
    fn ic_loras_of_a_pipeline_select_it_and_are_rejected_elsewhere() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |row: &PublishedIcLora, from: &str| {
            let path = folder.path().join(row.file.expect("a name"));
            std::fs::copy(from, &path).expect("copied");
            path.display().to_string()
        };
        let row = |name: &str| PublishedIcLora::named(name).next().expect("a row");
        let hdr = "tests/fixtures/lora/hdr_tiny_2_3.safetensors";
        let size = ["request.width=128", "request.height=128", "request.num_frames=25"];
        let videos = "request.reference_videos=[{path: VIDEO}]";
        let dubbed = ["request.video=VIDEO", "request.audio={path: a.wav}"];
        // The third has no published name; its header states a curve.
        for (path, given, pipeline) in [
            (file(row("hdr"), PLAIN), &[videos][..], Pipeline::Hdr),
            (file(row("lipdub"), PLAIN), &dubbed, Pipeline::DubIt),
            (hdr.into(), &[videos], Pipeline::Hdr),
        ] {
            let set: Vec<String> = size.iter().chain(given).map(|pair| (*pair).to_string()).collect();
            let set = [&set[..], &[format!("model.ic_lora={{path: {path}}}")]].concat();
            let config = load_video(&set, &[]).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert_eq!(config.pipeline, pipeline, "{path}");
            assert_eq!(config.model.loras[0].stages, [1, 2], "{path}");
            let other = [&set[..], &["pipeline=text_to_video".to_string(), videos.into()]].concat();
            let error = load_video(&other, &[]).expect_err("another pipeline");
            let name = pipeline.name();
            let by_name =
                format!("works only in the pipeline {name}, but the pipeline is text_to_video; use --pipeline {name}");
            let by_header = "this LoRA generates HDR video, but the pipeline is text_to_video; use hdr";
            assert!(error.contains(&by_name) || path == hdr && error.contains(by_header), "{error}");
        }
    }

    #[test]
    fn pipelines_without_a_reference_reject_ic_loras() {
        let lora = format!("model.ic_lora={{path: {FILE}}}");
        let error = |set: &[&str]| {
            let set: Vec<String> = set.iter().map(|pair| (*pair).to_string()).collect();
            load_video(&[&set[..], std::slice::from_ref(&lora)].concat(), &[]).expect_err("refused")
        };
        let region = ["pipeline=inpaint", "request.video=VIDEO", "request.inpaint={region: [0, 0, 64, 64]}"];
        for (set, why) in [
            (&region[..], "the pipeline inpaint follows its video only with request.inpaint.reference: set it"),
            (
                &["pipeline=retake", "request.video=VIDEO"],
                "does not support reference videos; use --pipeline in_context",
            ),
            (&["pipeline=text_to_video"], "needs a reference video: --reference-video PATH"),
        ] {
            let error = error(set);
            assert!(error.contains(&format!("model.ic_lora = {FILE} (--set): {why}")), "{error}");
        }
    }

    /// LoRAs of the same file with other strengths, or added by `model.loras`, are kept.
    #[test]
    fn rerun_removes_only_the_entry_that_ic_lora_added() {
        for pipeline in [Pipeline::IcLora, Pipeline::Distilled] {
            let set = following(pipeline).expect("references");
            let loras = format!("model.loras=[{{path: {FILE}, strength: 0.25}}, {{path: {FILE}, strength: 0.5}}]");
            let own = [loras, format!("model.ic_lora={{path: {FILE}, strength: 0.5}}")];
            let folder = tempfile::tempdir().expect("a folder");
            let video = folder.path().join("video");
            let frames = Frames::new(Array4::zeros((25, 128, 128, 3))).expect("frames");
            write_png_frames(&video, &frames).expect("written");
            let set: Vec<String> =
                set.iter().chain(&own).map(|pair| pair.replace("VIDEO", &video.display().to_string())).collect();
            let first = load_video(&set, &[]).expect("legal");
            let sidecar = folder.path().join("a.json");
            let text = json!({"config": first.effective("a", 1)}).to_string();
            std::fs::write(&sidecar, text).expect("written");
            let rerun = |set: &[&str]| {
                let set: Vec<String> = set.iter().map(|pair| (*pair).to_string()).collect();
                let config = load_video(&set, &[sidecar.display().to_string()]).expect("legal");
                config.model.loras.iter().map(|lora| lora.strength).collect::<Vec<_>>()
            };
            assert_eq!(rerun(&[]), [0.25, 0.5, 0.5], "{pipeline:?}");
            assert_eq!(rerun(&["model.ic_lora=null"]), [0.25, 0.5], "{pipeline:?}");
            assert_eq!(
                rerun(&[&format!("model.ic_lora={{path: {FILE}, strength: 0.75}}")]),
                [0.25, 0.5, 0.75],
                "{pipeline:?}"
            );
        }
    }
}
