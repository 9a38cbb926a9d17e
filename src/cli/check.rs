//! `ltx2 check`: reports the contents of a model from file headers.

use std::sync::Arc;

use clap::ValueEnum;

use super::args::{ComponentArgs, ConfigArgs, PlacementArgs, RerunArgs};
use super::compile::{chip_of, target};
use super::rounds::DfrSummary;
use super::{UsageError, one_line, print};
use crate::config::{AUTO, Config, LoadedConfig, Model, Pipeline, Reference, load, open_model};
use crate::models::ComponentConfigError;
use crate::models::upsampler::Upsampling;
use crate::pipeline::PipelineError;
use crate::pipeline::model::Component;
use crate::pipeline::one_line as error_line;
use crate::pipeline::plan::layers::describe_layers;
use crate::pipeline::plan::layouts::{LayoutComparison, RankingDevices, compare, ranking};
use crate::pipeline::plan::preflight::check_components;
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::stream::describe_fit;
use crate::pipeline::plan::verify::component;
use crate::pipeline::plan::videos::RunVideos;
use crate::pipeline::programs::configs::ModelConfigs;
use crate::weights::{ModelSource, ValidationReport, Version};

/// Lists the components of a model, missing and wrongly shaped tensors, and what each pipeline needs; reads only file
/// headers. With -c, --set or a placement option, also validates the resulting request as a run would.
#[derive(clap::Args, Debug)]
pub(crate) struct CheckArgs {
    /// Model: diffusers folder, folder of single files, single file, or org/name in the local Hugging Face cache.
    model: String,
    #[command(flatten)]
    components: ComponentArgs,
    /// Prints JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Also ranks the shipped layouts for TARGET (target devices, as in `compile`), without compiling.
    #[arg(long, value_name = "TARGET")]
    target: Option<String>,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    rerun: RerunArgs,
}

enum Finding {
    Absent,
    /// The component is present and has no weights.
    Present,
    /// The component is present but not supported, for this reason.
    Unsupported(String),
    Broken(String),
    Weights(ValidationReport),
}

/// Support for LTX-2.5 features by the components that are present.
struct Ltx25Features {
    /// Whether the video VAE has a decoder (`model.decoder: conv`).
    convolution: bool,
    /// Whether the diffusion decoder is present.
    diffusion: bool,
    /// Whether the decoder that `model.decoder: auto` selects is usable, first for `reference: official`, then for
    /// `reference: diffusers`.
    usable: [bool; 2],
    /// Whether the model supports `--num-frames auto`.
    duration: RequestSupport,
    /// Whether the model supports `--temporal-rounds` of 1 or more.
    rounds: RequestSupport,
}

/// Result of checking that the model can run a request.
struct RequestSupport {
    /// Components that are absent or unusable.
    missing: Vec<&'static str>,
    /// Error if all components are present but cannot run the request.
    error: Option<String>,
}

impl RequestSupport {
    fn is_ready(&self) -> bool {
        self.missing.is_empty() && self.error.is_none()
    }

    fn json(&self) -> serde_json::Value {
        let mut json = serde_json::json!({"ready": self.is_ready(), "missing": self.missing});
        if let Some(error) = &self.error {
            json["error"] = error[..].into();
        }
        json
    }

    /// Returns the reason why the request cannot run; `None` if it can.
    fn fault(&self) -> Option<String> {
        match self.missing.is_empty() {
            true => self.error.clone(),
            false => Some(format!("needs {}", self.missing.join(", "))),
        }
    }
}

impl Ltx25Features {
    /// Returns the decoder that `model.decoder: auto` selects with `reference: official` (if `official` is true) or
    /// `reference: diffusers`; `None` if the model has no decoder.
    fn decoder(&self, official: bool) -> Option<&'static str> {
        match (self.convolution, self.diffusion) {
            (false, false) => None,
            (convolution, true) if official || !convolution => Some("diffusion"),
            _ => Some("conv"),
        }
    }

    fn lines(&self) -> [String; 3] {
        let decoder = match (self.convolution, self.diffusion) {
            (true, true) => "diffusion (with reference: diffusers, conv); both are present",
            (false, true) => "diffusion; conv needs a vae with a decoder",
            (true, false) => "conv; diffusion needs diffusion_decoder",
            (false, false) => "needs diffusion_decoder, or vae with a decoder",
        };
        let unusable = match (self.decoder(true), self.usable[0]) {
            (Some("diffusion"), false) if self.convolution => {
                "; diffusion_decoder is unusable: replace it, or set model.decoder to conv"
            }
            (Some("diffusion"), false) => "; diffusion_decoder is unusable: replace it",
            _ => "",
        };
        let frames = match self.duration.fault() {
            None => "ready".to_string(),
            Some(fault) if self.duration.missing == [Component::DurationHead.folder()] => {
                format!("{fault}; with reference: diffusers, auto means 121 frames")
            }
            Some(fault) => fault,
        };
        let rounds = self.rounds.fault().unwrap_or_else(|| "ready".into());
        [
            format!("model.decoder auto: {decoder}{unusable}"),
            format!("--num-frames auto: {frames}"),
            format!("--temporal-rounds: {rounds}"),
        ]
    }
}

impl CheckArgs {
    fn selects_config(&self) -> bool {
        !self.config.config.is_empty() || !self.config.set.is_empty()
    }

    /// Returns whether to validate a request too. With `--target`, placement options only select layouts to rank.
    fn selects_request(&self) -> bool {
        self.selects_config() || self.target.is_none() && self.placement.is_given()
    }

    /// Rejects flags that have no effect.
    fn check_effect(&self) -> Result<(), UsageError> {
        let PlacementArgs { platform, chip, .. } = &self.placement;
        let why = match (platform, chip, &self.target) {
            (_, Some(chip), None) => {
                format!("--chip {chip} requires --target, for which it predicts times; add --target or remove --chip")
            }
            (Some(platform), _, Some(target)) if !self.selects_config() => {
                format!(
                    "--platform {platform}: --target {target} already selects the devices; remove --platform or --target"
                )
            }
            _ => return Ok(()),
        };
        Err(UsageError(why))
    }

    /// Loads the configuration, with the model and components that the command line selects.
    fn loaded(&self) -> anyhow::Result<LoadedConfig> {
        let mut given = self.config.overrides();
        self.placement.add(&mut given);
        given.allow_changed_inputs = self.rerun.allow_changed_inputs;
        given.flag("model", "model.path", &self.model);
        self.components.add(&mut given);
        let loaded = load(&given)?;
        loaded.check_effect()?;
        Ok(loaded)
    }
}

/// State of all components of a model.
struct ModelSurvey<'a> {
    source: &'a Arc<ModelSource>,
    /// Section `model` of a configuration that selects this model.
    model: Model,
    configs: ModelConfigs,
    findings: Vec<(Component, Finding)>,
}

impl<'a> ModelSurvey<'a> {
    fn new(source: &'a Arc<ModelSource>, model: Model) -> Self {
        let configs = ModelConfigs::from_source(source);
        let findings = Component::ALL.into_iter().map(|p| (p, examine(source, &configs, p))).collect();
        ModelSurvey { source, model, configs, findings }
    }

    fn good(&self, part: Component) -> bool {
        self.findings.iter().any(|(p, f)| {
            *p == part && (matches!(f, Finding::Present) || matches!(f, Finding::Weights(r) if r.is_ok()))
        })
    }

    fn is_2_5(&self) -> bool {
        self.source.version().is_ok_and(|version| version == Version::V2_5)
    }

    /// Returns the components that `config` needs and that are absent or unusable.
    fn missing(&self, config: &Config) -> Vec<&'static str> {
        let absent = self.configs.components(config).into_iter().filter(|part| !self.good(*part));
        let mut absent: Vec<Component> = absent.collect();
        absent.sort_by_key(|part| Component::ALL.iter().position(|own| own == part));
        // Only transformers of LTX-2.5 can mark generated keyframes.
        let unmarked = config.pipeline.spec().has_rounds() && self.source.version().is_ok() && !self.is_2_5();
        absent.into_iter().map(Component::folder).chain(unmarked.then_some("an LTX-2.5 transformer")).collect()
    }

    /// Returns the configuration of a pipeline's preset for this model, or the defaults if the model's version is
    /// unknown.
    fn request(&self, pipeline: Pipeline) -> Config {
        let version = self.source.version().ok();
        let preset = version.and_then(|version| Config::of_preset(pipeline, version, self.model.clone()).ok());
        preset.unwrap_or_else(|| Config { pipeline, ..Config::default() })
    }

    /// Checks whether the components can run `config`, without opening its input files.
    fn request_support(&self, config: &Config) -> RequestSupport {
        let missing = self.missing(config);
        let error = if missing.is_empty() { check_components(config).err() } else { None };
        RequestSupport { missing, error: error.map(|error| error_line(&error)) }
    }

    fn ltx25_features(&self) -> Ltx25Features {
        let present =
            |part| !matches!(self.findings.iter().find(|(p, _)| *p == part), Some((_, Finding::Absent)) | None);
        let decodes = |reference| {
            let parts = self.configs.components(&Config { reference, ..Config::default() });
            !parts.contains(&Component::DiffusionDecoder) || self.good(Component::DiffusionDecoder)
        };
        let duration = [Component::TextEncoder, Component::Tokenizer, Component::Connectors, Component::DurationHead];
        let missing: Vec<&str> = duration.into_iter().filter(|part| !self.good(*part)).map(Component::folder).collect();
        let error = if missing.is_empty() { self.configs.check_duration_head().err() } else { None };
        let duration = RequestSupport { missing, error: error.map(|error| error_line(&error)) };
        let mut rounds = self.request(Pipeline::Dfr);
        rounds.dfr.temporal_rounds = 1;
        Ltx25Features {
            convolution: present(Component::Vae) && self.configs.has_video_decoder().unwrap_or(false),
            diffusion: present(Component::DiffusionDecoder),
            usable: [Reference::Official, Reference::Diffusers].map(decodes),
            duration,
            rounds: self.request_support(&rounds),
        }
    }
}

fn opened(args: &CheckArgs) -> anyhow::Result<Arc<ModelSource>> {
    let source = open_model(&args.model, &args.components.model().overrides())?;
    source.refuse_unread()?;
    Ok(Arc::new(source))
}

/// Checks whether `generate` would run the request on this model. Returns the passes of the pipeline `dfr`.
fn verify(args: &CheckArgs) -> anyhow::Result<Option<DfrSummary>> {
    let loaded = args.loaded()?;
    let mut config = loaded.config.clone();
    // The prompt's text does not matter, because only the model is checked.
    if config.request.prompts.is_none() {
        config.request.prompt.get_or_insert_default();
    }
    let (plan, _) = RunPlan::new(&config, &RunVideos::unwritten(config.jobs()?, loaded.sidecar()))?;
    Ok(DfrSummary::new(&config, &plan.programs.sizes.video_grid))
}

/// Returns whether the request is ready, or its error; and the passes of the pipeline `dfr`.
fn request_json(verdict: &anyhow::Result<Option<DfrSummary>>) -> serde_json::Value {
    let error = verdict.as_ref().err().map(one_line);
    let mut json = serde_json::json!({"ready": error.is_none(), "error": error});
    if let Ok(Some(dfr)) = verdict {
        json["dfr"] = serde_json::json!(dfr);
    }
    json
}

/// Returns the lines about a request that is ready.
fn request_lines(dfr: &Option<DfrSummary>) -> Vec<String> {
    let mut lines: Vec<String> = dfr.iter().flat_map(DfrSummary::lines).collect();
    lines.push("request: ready".into());
    lines
}

pub(crate) fn run(args: &CheckArgs) -> anyhow::Result<()> {
    args.check_effect()?;
    let source = opened(args);
    if source.is_err() && args.selects_request() {
        // If there are several errors, report the one that a run would report.
        verify(args)?;
    }
    let source = source?;
    let survey = ModelSurvey::new(&source, Model { path: args.model.clone(), ..args.components.model() });
    let (findings, configs) = (&survey.findings, &survey.configs);
    let version = source.version().map_or_else(|_| "unknown".to_string(), |v| v.to_string());
    let ltx25_features = survey.is_2_5().then(|| survey.ltx25_features());
    let good = |part| survey.good(part);
    let request = args.selects_request().then(|| verify(args));
    let upsamplers = [Component::LatentUpsampler, Component::TemporalUpsampler].into_iter().filter(|part| good(*part));
    let upsamplings = upsamplers.filter_map(|part| configs.upsampling(part).ok().flatten().map(Upsampling::name));
    let upsamplings: Vec<&str> = upsamplings.collect();
    let support = |pipeline: &Pipeline| (*pipeline, survey.request_support(&survey.request(*pipeline)));
    let pipelines: Vec<(Pipeline, RequestSupport)> = Pipeline::value_variants().iter().map(support).collect();
    let plain = pipelines.iter().find(|(pipeline, _)| *pipeline == Pipeline::TextToVideo);
    let (_, plain) = plain.ok_or_else(|| anyhow::anyhow!("internal error: the pipeline text_to_video is missing"))?;
    let layouts = args.target.as_deref().map(|name| layouts(args, name)).transpose()?;
    // Errors of opening the files are already among the findings.
    let unverified = source.unverified().unwrap_or_else(|_| Vec::new());
    let bytes: u64 = findings.iter().map(|(_, f)| if let Finding::Weights(r) = f { r.bytes } else { 0 }).sum();
    if args.json {
        let parts: serde_json::Map<String, serde_json::Value> =
            findings.iter().map(|(p, f)| (p.folder().to_string(), describe(f))).collect();
        let with = |(pipeline, support): &(Pipeline, RequestSupport)| {
            let mut own = support.json();
            let flags = pipeline.spec().needed_flags();
            if !flags.is_empty() {
                own["with"] = flags.into();
            }
            (pipeline.name().to_string(), own)
        };
        let pipelines: serde_json::Map<String, serde_json::Value> = pipelines.iter().map(with).collect();
        let mut all = serde_json::json!({
            "model": source.path(), "version": version, "parts": parts, "weight_bytes": bytes,
            "text_to_video": plain.json(), "pipelines": pipelines, "upsample": upsamplings, "unverified": unverified,
        });
        if let Some(ltx25_features) = &ltx25_features {
            let [official, diffusers] = [true, false].map(|official| ltx25_features.decoder(official));
            all["decoder_auto"] = serde_json::json!({"official": official, "diffusers": diffusers});
            all["num_frames_auto"] = ltx25_features.duration.json();
            all["temporal_rounds"] = ltx25_features.rounds.json();
        }
        if let Some(verdict) = &request {
            all["request"] = request_json(verdict);
        }
        if let Some(layouts) = &layouts {
            let Layouts { auto, memory, layers, faster, lacking } = layouts;
            all["layouts"] = serde_json::json!({
                "auto": auto, "memory": memory, "layers": layers, "faster": faster, "lacking": lacking,
            });
        }
        print(&format!("{}\n", serde_json::to_string_pretty(&all)?))?;
    } else {
        let size = bytes as f64 / 1e9;
        let mut lines = vec![format!("{}: LTX-{version}, {size:.2} GB of weights", source.path().display())];
        lines.extend(findings.iter().flat_map(|(part, finding)| lines_of(*part, finding)));
        lines.extend(pipelines.iter().map(|(pipeline, support)| pipeline_line(*pipeline, support)));
        if !upsamplings.is_empty() {
            lines.push(format!("two_stage.upsample: {}", upsamplings.join(", ")));
        }
        lines.extend(ltx25_features.iter().flat_map(Ltx25Features::lines));
        if let Some(Layouts { auto, memory, layers, faster, lacking }) = layouts {
            lines.extend([auto, memory].into_iter().chain(layers).chain(faster).chain(lacking));
        }
        lines.extend(unverified.iter().map(|line| format!("warning: {line}")));
        lines.extend(request.iter().flatten().flat_map(request_lines));
        print(&(lines.join("\n") + "\n"))?;
    }
    if let Some(verdict) = request {
        return verdict.map(|_| ());
    }
    let (place, missing) = (source.path().display(), &plain.missing);
    anyhow::ensure!(missing.is_empty(), "{place}: incomplete: missing {}", missing.join(", "));
    match &plain.error {
        Some(error) => anyhow::bail!("{place}: text_to_video cannot run with its preset: {error}"),
        None => Ok(()),
    }
}

/// Comparison of layouts on a target: the one that `layout: auto` selects, the memory that the configured layout needs,
/// a shipped layout that is faster than the configured one, and rules that the configured layout lacks.
struct Layouts {
    auto: String,
    memory: String,
    /// Form of layers that `runtime.layers: auto` chooses; `None`: there is no choice.
    layers: Option<String>,
    faster: Option<String>,
    lacking: Vec<String>,
}

fn layouts(args: &CheckArgs, name: &str) -> anyhow::Result<Layouts> {
    let config = args.loaded()?.config;
    let target = target(name, chip_of(&config)?.as_ref())?;
    let (toolchain, count, capacity) = target.described();
    let chip = target.chip();
    let devices = RankingDevices { toolchain: &toolchain, count, capacity, chip: chip.as_ref() };
    let mesh = config.mesh.filter(|_| config.layout == AUTO);
    let auto = Config { layout: AUTO.into(), mesh, ..config.clone() };
    let ranked = ranking(&auto, devices)?;
    let (placed, compared) = match config.layout == AUTO {
        true => {
            let (layout, mesh) = ranked.placement(config.mesh);
            (Config { layout, mesh, ..config }, None)
        }
        false => (config.clone(), compare(&config, devices, None)?),
    };
    Ok(Layouts {
        auto: ranked.decision(devices),
        memory: describe_fit(&placed, devices)?,
        layers: describe_layers(&placed, devices)?,
        faster: compared.as_ref().and_then(LayoutComparison::faster),
        lacking: compared.as_ref().map(LayoutComparison::lacking).unwrap_or_default(),
    })
}

fn examine(source: &Arc<ModelSource>, configs: &ModelConfigs, part: Component) -> Finding {
    if let Some(error) = source.ambiguity(part) {
        return Finding::Broken(error.to_string());
    }
    if !source.has(part) {
        return Finding::Absent;
    }
    match component(configs, source, part) {
        Ok(None) => Finding::Present,
        Ok(Some(report)) => Finding::Weights(report),
        Err(
            e @ PipelineError::Config {
                source: ComponentConfigError::Unsupported { .. } | ComponentConfigError::Unread { .. },
                ..
            },
        ) => Finding::Unsupported(e.to_string()),
        Err(e) => Finding::Broken(e.to_string()),
    }
}

fn pipeline_line(pipeline: Pipeline, support: &RequestSupport) -> String {
    let name = pipeline.name();
    match (support.fault(), &pipeline.spec().needed_flags()[..]) {
        (Some(fault), _) => format!("{name}: {fault}"),
        (None, []) => format!("{name}: ready"),
        (None, flags) => format!("{name}: ready, with {}", flags.join(" and ")),
    }
}

fn describe(finding: &Finding) -> serde_json::Value {
    use serde_json::json;
    match finding {
        Finding::Absent => json!({"state": "absent"}),
        Finding::Present => json!({"state": "present"}),
        Finding::Unsupported(why) => json!({"state": "unsupported", "message": why}),
        Finding::Broken(why) => json!({"state": "broken", "message": why}),
        Finding::Weights(r) => json!({
            "state": if r.is_ok() { "ok" } else { "wrong" }, "tensors": r.matched, "bytes": r.bytes,
            "missing": r.missing, "extra": r.extra, "inert": r.inert,
            "misshaped": r.misshaped.iter().map(|m| json!({"name": m.name, "want": m.want, "got": m.got})).collect::<Vec<_>>(),
            "misscaled": r.misscaled.iter().map(|m| json!({"name": m.name, "rows": m.rows, "got": m.shape})).collect::<Vec<_>>(),
            "wrong_dtype": r.wrong_dtype.iter().map(|(n, d)| json!({"name": n, "dtype": d})).collect::<Vec<_>>(),
        }),
    }
}

fn lines_of(part: Component, finding: &Finding) -> Vec<String> {
    let name = part.folder();
    vec![match finding {
        Finding::Absent => format!("{name:<25} absent"),
        Finding::Present => format!("{name:<25} present"),
        Finding::Unsupported(why) => format!("{name:<25} unsupported: {why}"),
        Finding::Broken(why) => format!("{name:<25} broken: {why}"),
        Finding::Weights(report) if report.is_ok() => {
            let more = match report.inert {
                0 => String::new(),
                n => format!(", {n} unused"),
            };
            format!("{name:<25} ok: {} tensors, {:.1} MB{more}", report.matched, report.bytes as f64 / 1e6)
        }
        Finding::Weights(report) => {
            let wrong = report.lines().into_iter().map(|line| format!("  {line}"));
            return [format!("{name:<25} wrong:")].into_iter().chain(wrong).collect();
        }
    }]
}
