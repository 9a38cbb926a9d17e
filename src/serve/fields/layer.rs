//! Converts request fields into a layer of the configuration.

use serde_json::{Map, Value, json};

use super::errors::config_error;
use super::read::invalid;
use super::request_fields::{ENDS, RequestFields};
use super::table::{FIELDS, FieldEffect};
use super::{Endpoint, Fields, tree};
use crate::config::{LoadedConfig, Pipeline, RequestLayer, Support, VideoUse, pipeline_names};
use crate::serve::error::ApiError;

const PIPELINE: &str = "pipeline";

impl Fields {
    /// Merges a request's fields over the server's configuration. Adds warnings about fields that override other
    /// settings.
    pub(super) fn laid(
        &self,
        given: &RequestFields,
        endpoint: Endpoint,
        warnings: &mut Vec<String>,
    ) -> Result<LoadedConfig, ApiError> {
        let fault = |error| config_error(error, given);
        let mut layer = RequestLayer::default();
        if let Some(tree) = given.get("ltx2") {
            tree::check(tree)?;
            layer.set_tree("ltx2", tree::typed(tree.clone())).map_err(fault)?;
        }
        layer.set("n", "request.num_videos", json!(1)).map_err(fault)?;
        let pipeline = self.pipeline(given, endpoint)?;
        layer.set(&given.name(PIPELINE), PIPELINE, pipeline.name().into()).map_err(fault)?;
        for spec in &FIELDS {
            let (Some(value), FieldEffect::Keys(keys)) = (given.get(spec.name), spec.place) else { continue };
            for key in keys {
                layer.set(&given.name(spec.name), key, value.clone()).map_err(fault)?;
            }
        }
        if let Some(text) = given.get("negative_prompt") {
            let name = given.name("negative_prompt");
            layer.set(&name, "request.negative_prompt", text.clone()).map_err(fault)?;
            layer.set(&name, "request.negative_prompt_file", Value::Null).map_err(fault)?;
        }
        if let Some(seed) = given.get("seed") {
            layer.set(&given.name("seed"), "request.seed", seed.clone()).map_err(fault)?;
        }
        if let Some(loras) = given.get("lora") {
            layer.set(&given.name("lora"), "model.loras", self.with_loras(loras)).map_err(fault)?;
        }
        if let Some(own) = given.get("ic_lora") {
            let own = json!({"path": own["name"], "strength": own["scale"]});
            layer.set(&given.name("ic_lora"), "model.ic_lora", own).map_err(fault)?;
        }
        if let Some(by_diffusion) = given.get("use_diffusion_decoder").and_then(Value::as_bool)
            && (by_diffusion || self.loaded.has_two_decoders())
        {
            let decoder = if by_diffusion { "diffusion" } else { "conv" };
            layer.set(&given.name("use_diffusion_decoder"), "model.decoder", decoder.into()).map_err(fault)?;
        }
        self.apply_size(given, &mut layer, warnings)?;
        self.apply_length(given, pipeline, &mut layer, warnings)?;
        self.check_files(given, pipeline)?;
        self.apply_files(given, &mut layer)?;
        apply_span(given, pipeline, &mut layer)?;
        if pipeline.takes_video() {
            // Without a request field, these values come from the input video, not from the server's configuration.
            let own = ["request.width", "request.height", "request.num_frames", "request.frame_rate"];
            own.into_iter().for_each(|key| layer.ignore_configured(key));
        }
        // The pipeline may be inferred from the request's files. Warn that it overrides a key only if its field is set.
        let said = |(_, key): &(String, String)| key != PIPELINE || given.text(PIPELINE).is_some();
        let overridden = layer.overridden_fields().into_iter().filter(said);
        warnings.extend(overridden.map(|(field, key)| format!("{field} overrides ltx2.{key}")));
        let mut loaded = self.loaded.with_request(&layer).map_err(fault)?;
        if self.apply_images(given, loaded.config.clip_frames(), &mut layer)? {
            loaded = self.loaded.with_request(&layer).map_err(fault)?;
        }
        Ok(loaded)
    }

    /// Rejects a request that lacks an input that its pipeline requires.
    fn check_files(&self, given: &RequestFields, pipeline: Pipeline) -> Result<(), ApiError> {
        let (has, own) = (|field| given.get(field).is_some(), &self.loaded.config.request);
        let in_tree = |key: &str| given.get("ltx2").and_then(|tree| tree.get("request")?.get(key)).is_some();
        let spec = pipeline.spec();
        let has_references = has("reference_videos") || !own.reference_videos.is_empty();
        let has_extension = has("seconds") || in_tree("extend") || own.extend.is_some();
        let needed = [
            (spec.images == Support::Required, "input_reference", has("images") || !own.images.is_empty()),
            (spec.audio == Support::Required, "input_audio", has("input_audio") || own.audio.is_some()),
            (spec.reference_videos == Support::Required, "reference_videos", has_references),
            (spec.video.is_some(), "video", has("input_video") || own.video.is_some()),
            (spec.video == Some(VideoUse::Overlap), "seconds", has_extension),
        ];
        match needed.iter().find(|(is_needed, _, is_given)| *is_needed && !is_given) {
            None => Ok(()),
            Some((_, field, _)) => Err(invalid(field, format!("required by the pipeline {}", pipeline.name()))),
        }
    }

    /// Adds the paths of the input audio, the mask and the videos to the layer.
    fn apply_files(&self, given: &RequestFields, layer: &mut RequestLayer) -> Result<(), ApiError> {
        let fault = |error| config_error(error, given);
        self.apply_images(given, None, layer)?;
        if let Some(sound) = given.get("input_audio") {
            let mut own = sound.clone();
            self.place(&mut own, "stored", "path")?;
            layer.set(&given.name("input_audio"), "request.audio", own).map_err(fault)?;
        }
        if let Some(mask) = given.get("mask") {
            let path = self.input_path(mask, "stored")?;
            layer.set(&given.name("mask"), "request.mask", path.into()).map_err(fault)?;
        }
        if let Some(video) = given.get("input_video") {
            let path = self.input_path(video, "stored")?;
            layer.set(&given.name("input_video"), "request.video", path.into()).map_err(fault)?;
        }
        if let Some(videos) = given.get("reference_videos").and_then(Value::as_array) {
            let mut videos = videos.clone();
            for video in &mut videos {
                self.place(video, "stored", "path")?;
                self.place(video, "mask", "attention_mask")?;
            }
            layer.set(&given.name("reference_videos"), "request.reference_videos", videos.into()).map_err(fault)?;
        }
        Ok(())
    }

    /// Adds the conditioning images to the layer. An image for the frame `"last"` gets the index of the last frame, or
    /// 0 if `frames` (the number of frames) is `None`. Returns whether `frames` determined the index of an image.
    fn apply_images(
        &self,
        given: &RequestFields,
        frames: Option<usize>,
        layer: &mut RequestLayer,
    ) -> Result<bool, ApiError> {
        let Some(images) = given.get("images").and_then(Value::as_array) else { return Ok(false) };
        let (mut images, mut any) = (images.clone(), false);
        for image in &mut images {
            self.place(image, "stored", "path")?;
            if image["frame"] == "last" {
                image["frame"] = frames.map_or(0, |frames| frames - 1).into();
                any = true;
            }
        }
        layer
            .set(&given.name("images"), "request.images", images.into())
            .map_err(|error| config_error(error, given))?;
        Ok(any && frames.is_some())
    }

    /// Returns the path of a stored input file. Fails with 410 if the file was removed.
    fn input_path(&self, item: &Value, key: &str) -> Result<String, ApiError> {
        let path = self.inputs.path(item[key].as_str().unwrap_or_default());
        match path.is_file() {
            true => Ok(path.to_string_lossy().into_owned()),
            false => {
                Err(ApiError::new(410, "expired", "an input file of the request no longer exists; upload it again"))
            }
        }
    }

    /// Replaces the member `key`, which contains the name of a stored file, by the member `to` with the file's path.
    fn place(&self, item: &mut Value, key: &str, to: &str) -> Result<(), ApiError> {
        if item[key].is_string() {
            let path = self.input_path(item, key)?;
            if let Value::Object(map) = item {
                map.shift_remove(key);
                map.insert(to.into(), path.into());
            }
        }
        Ok(())
    }

    /// Returns the pipeline of a request: the one that its field sets, that the endpoint implies, or that its files
    /// require.
    pub(super) fn pipeline(&self, given: &RequestFields, endpoint: Endpoint) -> Result<Pipeline, ApiError> {
        let in_tree = given.get("ltx2").and_then(|tree| tree.get(PIPELINE)).and_then(Value::as_str);
        let (field, named) = match (given.text(PIPELINE), in_tree) {
            (Some(name), _) => (given.name(PIPELINE), Some(name)),
            (None, Some(name)) => ("ltx2.pipeline".into(), Some(name)),
            (None, None) => (PIPELINE.into(), None),
        };
        let own = self.loaded.config.pipeline;
        let chosen = match (named, endpoint) {
            (Some(name), _) => {
                let known: Option<Pipeline> = serde_json::from_value(name.into()).ok();
                known.ok_or_else(|| {
                    invalid(
                        &field,
                        format!("unknown pipeline '{}'; {}", super::request_fields::plain(name), self.served()),
                    )
                })?
            }
            (None, Endpoint::Edit(_)) => Pipeline::Retake,
            (None, Endpoint::Extend(_)) => Pipeline::Extend,
            (None, _) => self.infer_pipeline(given, own),
        };
        let with_images = chosen.spec().image_variant.filter(|_| chosen.spec().images == Support::Rejected);
        let chosen = with_images.filter(|_| given.get("images").is_some()).unwrap_or(chosen);
        let name = chosen.name();
        if !chosen.spec().has_video() {
            return Err(invalid(&field, format!("{name} is not supported: the server generates only videos")));
        }
        if self.pipelines().contains(&chosen) {
            return Ok(chosen);
        }
        Err(invalid(
            &field,
            format!("the pipeline {name} is not enabled on this server (serve.pipelines); {}", self.served()),
        ))
    }

    /// Returns the pipeline that the request's files require if the server enables it, otherwise the server's own
    /// pipeline. A request without images uses the variant of the pipeline that requires none.
    fn infer_pipeline(&self, given: &RequestFields, own: Pipeline) -> Pipeline {
        let has = |field| given.get(field).is_some();
        let served = self.pipelines();
        let or_own = |other: Pipeline| if served.contains(&other) { other } else { own };
        let lacks_images = !has("images") && self.loaded.config.request.images.is_empty();
        match (own.spec().image_variant, own.spec().images) {
            (Some(variant), Support::Required) if lacks_images => variant,
            (Some(_), _) if has("input_audio") => or_own(Pipeline::AudioToVideo),
            _ if own.takes_video() || own.spec().reference_videos == Support::Required => own,
            _ if has("reference_videos") && self.has_hdr_lora(given) => or_own(Pipeline::Hdr),
            _ if has("reference_videos") => or_own(Pipeline::IcLora),
            _ => own,
        }
    }

    fn served(&self) -> String {
        let names: Vec<&str> = self.pipelines().into_iter().map(Pipeline::name).collect();
        format!("available: {}", names.join(", "))
    }

    /// Sets the width and height from the field `size`, or from the fields `width` and `height`.
    fn apply_size(
        &self,
        given: &RequestFields,
        layer: &mut RequestLayer,
        warnings: &mut Vec<String>,
    ) -> Result<(), ApiError> {
        let fault = |error| config_error(error, given);
        let mut sides = [None, None];
        if let Some(size) = given.get("size") {
            let field = given.name("size");
            let Value::String(size) = size else { return Err(wrong_size(&field)) };
            if let Some((_, target)) = self.loaded.config.serve.aliases().find(|(name, _)| *name == size) {
                warnings.push(format!("size {size} is an alias of {target}"));
                sides = parse_size(target).ok_or_else(|| wrong_size(&field))?.map(Some);
            } else if !matches!(size.as_str(), "" | "auto") {
                sides = parse_size(size).ok_or_else(|| wrong_size(&field))?.map(Some);
            }
        }
        for ((name, key), of_size) in [("width", "request.width"), ("height", "request.height")].into_iter().zip(sides)
        {
            let own = given.get(name).and_then(Value::as_u64);
            let side = match (own, of_size) {
                (Some(own), Some(of_size)) if own != of_size => {
                    let size = given.name("size");
                    return Err(invalid(
                        &given.name(name),
                        format!("{own} conflicts with {size}, which sets it to {of_size}; remove one of these fields"),
                    ));
                }
                (Some(own), _) => Some((given.name(name), own)),
                (None, of_size) => of_size.map(|side| (given.name("size"), side)),
            };
            if let Some((field, side)) = side {
                layer.set(&field, key, side.into()).map_err(fault)?;
            }
        }
        Ok(())
    }

    /// Sets the number of frames from the field `num_frames` or `seconds`.
    fn apply_length(
        &self,
        given: &RequestFields,
        pipeline: Pipeline,
        layer: &mut RequestLayer,
        warnings: &mut Vec<String>,
    ) -> Result<(), ApiError> {
        let seconds = given.get("seconds").and_then(Value::as_f64);
        if pipeline.spec().video == Some(VideoUse::Overlap) {
            return Ok(());
        }
        if let Some(frames) = given.get("num_frames") {
            if seconds.is_some() {
                let (frames, seconds) = (given.name("num_frames"), given.name("seconds"));
                warnings.push(format!("{frames} overrides {seconds}"));
            }
            let set = layer.set(&given.name("num_frames"), "request.num_frames", frames.clone());
            return set.map_err(|error| config_error(error, given));
        }
        if let Some(seconds) = seconds {
            layer.set_seconds(&given.name("seconds"), seconds);
        }
        Ok(())
    }
}

/// Renames the fields of a time span to the YAML keys of `request.retake`.
fn span_keys(span: &Map<String, Value>) -> Value {
    let key = |name: &String| {
        let end = ENDS.iter().find(|(_, field)| field == name);
        end.map_or_else(|| name.clone(), |(key, _)| (*key).to_string())
    };
    span.iter().map(|(name, value)| (key(name), value.clone())).collect::<Map<_, _>>().into()
}

/// Sets the time span of a retake, or the duration and overlap of an extension.
fn apply_span(given: &RequestFields, pipeline: Pipeline, layer: &mut RequestLayer) -> Result<(), ApiError> {
    let fault = |error| config_error(error, given);
    let flat = ["start", "end"].into_iter().filter_map(|name| Some((name, given.get(name)?)));
    let flat: Map<String, Value> = flat.map(|(name, value)| (name.into(), value.clone())).collect();
    match given.get("retake") {
        Some(_) if !flat.is_empty() => {
            return Err(invalid(
                &given.name("retake"),
                "cannot be combined with start and end; remove them, or remove this field",
            ));
        }
        Some(span) => {
            let keys = span.as_object().map_or_else(|| span.clone(), span_keys);
            layer.set(&given.name("retake"), "request.retake", keys).map_err(fault)?;
        }
        None if flat.is_empty() => {}
        None => {
            let name = given.name(if given.get("start").is_some() { "start" } else { "end" });
            layer.set(&name, "request.retake", span_keys(&flat)).map_err(fault)?;
        }
    }
    if pipeline.spec().video != Some(VideoUse::Overlap) {
        let extension = ["before", "overlap"].into_iter().find(|name| given.get(name).is_some());
        let names = pipeline_names("or", |spec| spec.video == Some(VideoUse::Overlap));
        return extension
            .map_or(Ok(()), |name| Err(invalid(&given.name(name), format!("only supported by the pipeline {names}"))));
    }
    if given.get("num_frames").is_some() {
        return Err(invalid(&given.name("num_frames"), "not supported by extensions; set seconds instead"));
    }
    let fields = ["seconds", "overlap"].into_iter().filter_map(|name| Some((name, given.get(name)?)));
    let mut extend: Map<String, Value> = fields.map(|(name, value)| (name.into(), value.clone())).collect();
    if let Some(before) = given.get("before") {
        extend.insert("at".into(), if *before == true { "start" } else { "end" }.into());
    }
    if extend.is_empty() {
        return Ok(());
    }
    layer.set(&given.name("seconds"), "request.extend", extend.into()).map_err(fault)
}

fn wrong_size(field: &str) -> ApiError {
    ApiError::field("invalid_size", field, format!("{field}: must be WIDTHxHEIGHT in pixels, e.g. 768x512, or auto"))
}

/// Parses a size `WxH` in pixels.
pub(super) fn parse_size(text: &str) -> Option<[u64; 2]> {
    let side = |text: &str| {
        let digits = (2..=5).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|side: &u64| digits && *side > 0)
    };
    let (width, height) = text.split_once('x')?;
    Some([side(width)?, side(height)?])
}
