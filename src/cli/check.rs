//! `ltx2 check`: contents of a model, from headers alone.

use std::sync::Arc;

use clap::ValueEnum;

use super::args::{ComponentArgs, ConfigArgs, PlacementArgs, load_run};
use super::compile::{chip_of, target};
use super::{one_line, print};
use crate::config::{AUTO, Config, Pipeline, Reference};
use crate::models::ConfigError;
use crate::models::upsampler::Upsampling;
use crate::pipeline::PipelineError;
use crate::pipeline::configs::ModelConfigs;
use crate::pipeline::layouts::{Devices, faster, ranking};
use crate::pipeline::model::Component;
use crate::pipeline::options::GenerateOptions;
use crate::pipeline::preflight::preflight;
use crate::pipeline::verify::component;
use crate::weights::{ModelSource, ValidationReport, Version};

/// Lists a model's components, missing and mis-shaped tensors, and what each pipeline needs, from headers alone. With -c or
/// --set, also verifies that request as a run would.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Model: diffusers folder, single file, or org/name in the local Hugging Face cache.
    model: String,
    #[command(flatten)]
    components: ComponentArgs,
    /// Prints JSON instead of the table.
    #[arg(long)]
    json: bool,
    /// Also ranks the shipped layouts for these devices, as in `compile`, without compiling.
    #[arg(long, value_name = "TARGET")]
    target: Option<String>,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    config: ConfigArgs,
}

enum Finding {
    Absent,
    /// Present, without weights of its own.
    Present,
    /// Present, but not supported.
    Unsupported(String),
    Broken(String),
    Weights(ValidationReport),
}

/// What LTX-2.5 leaves to the components that are present.
struct Newest {
    /// Whether the video VAE has a decoder.
    convolution: bool,
    /// Whether the diffusion decoder is present.
    diffusion: bool,
    /// Whether the decoder that `model.decoder: auto` selects is usable, for Lightricks' reference and for diffusers'.
    usable: [bool; 2],
    /// Components that `--num-frames auto` lacks.
    duration: Vec<&'static str>,
    /// Components that rounds of DFR lack.
    rounds: Vec<&'static str>,
}

impl Newest {
    /// The decoder that `model.decoder: auto` selects for a reference, Lightricks' or diffusers'.
    fn decoder(&self, official: bool) -> Option<&'static str> {
        match (self.convolution, self.diffusion) {
            (false, false) => None,
            (convolution, true) if official || !convolution => Some("diffusion"),
            _ => Some("conv"),
        }
    }

    fn lines(&self) -> [String; 3] {
        let decoder = match (self.convolution, self.diffusion) {
            (true, true) => "diffusion, by reference: diffusers conv; both are here",
            (false, true) => "diffusion; vae has no decoder, which conv needs",
            (true, false) => "conv; diffusion needs diffusion_decoder",
            (false, false) => "needs diffusion_decoder, or vae with a decoder",
        };
        let unusable = match (self.decoder(true), self.usable[0]) {
            (Some("diffusion"), false) if self.convolution => {
                "; diffusion_decoder is unusable: repair it, or set model.decoder to conv"
            }
            (Some("diffusion"), false) => "; diffusion_decoder is unusable: repair it",
            _ => "",
        };
        let frames = match self.duration.is_empty() {
            true => "ready".to_string(),
            false if self.duration == [Component::DurationHead.folder()] => {
                "needs duration_head; by reference: diffusers it is 121 frames".to_string()
            }
            false => format!("needs {}", self.duration.join(", ")),
        };
        let rounds = match self.rounds.is_empty() {
            true => "ready".to_string(),
            false => format!("needs {}", self.rounds.join(", ")),
        };
        [
            format!("model.decoder auto: {decoder}{unusable}"),
            format!("--num-frames auto: {frames}"),
            format!("--temporal-rounds: {rounds}"),
        ]
    }
}

impl Args {
    /// Whether a configuration is named, so that its request is verified too.
    fn names_request(&self) -> bool {
        !self.config.config.is_empty() || !self.config.set.is_empty()
    }

    /// The configuration with this command's model.
    fn loaded(&self) -> anyhow::Result<Config> {
        let mut given = self.config.given();
        self.placement.add(&mut given);
        given.flag("model", "model.path", Some(self.model.clone()));
        self.components.add(&mut given);
        Ok(load_run(&given)?.config)
    }
}

/// Findings of every component, and which of them a run lacks.
struct Survey<'a> {
    source: &'a Arc<ModelSource>,
    configs: ModelConfigs,
    findings: Vec<(Component, Finding)>,
}

impl<'a> Survey<'a> {
    fn new(source: &'a Arc<ModelSource>) -> Self {
        let configs = ModelConfigs::of(source);
        let findings = Component::ALL.into_iter().map(|p| (p, examine(source, &configs, p))).collect();
        Survey { source, configs, findings }
    }

    /// Whether a component is present and usable.
    fn good(&self, part: Component) -> bool {
        self.findings.iter().any(|(p, f)| {
            *p == part && (matches!(f, Finding::Present) || matches!(f, Finding::Weights(r) if r.is_ok()))
        })
    }

    fn is_2_5(&self) -> bool {
        self.source.version().is_ok_and(|version| version == Version::V2_5)
    }

    /// Components that a run of `config` reads and that are absent or unusable.
    fn missing(&self, config: &Config) -> Vec<&'static str> {
        let absent = self.configs.components(config).into_iter().filter(|part| !self.good(*part));
        let mut absent: Vec<Component> = absent.collect();
        absent.sort_by_key(|part| Component::ALL.iter().position(|own| own == part));
        // Only transformers of this generation mark the frames that it generates.
        let unmarked = config.pipeline == Pipeline::Dfr && self.source.version().is_ok() && !self.is_2_5();
        absent.into_iter().map(Component::folder).chain(unmarked.then_some("a transformer of LTX-2.5")).collect()
    }

    fn newest(&self) -> Newest {
        let present =
            |part| !matches!(self.findings.iter().find(|(p, _)| *p == part), Some((_, Finding::Absent)) | None);
        let decodes = |reference| {
            let parts = self.configs.components(&Config { reference, ..Config::default() });
            !parts.contains(&Component::DiffusionDecoder) || self.good(Component::DiffusionDecoder)
        };
        let duration = [Component::TextEncoder, Component::Tokenizer, Component::Connectors, Component::DurationHead];
        let duration = duration.into_iter().filter(|part| !self.good(*part)).map(Component::folder).collect();
        let mut rounds = Config { pipeline: Pipeline::Dfr, ..Config::default() };
        rounds.dfr.temporal_rounds = 1;
        Newest {
            convolution: present(Component::Vae) && self.configs.has_video_decoder().unwrap_or(false),
            diffusion: present(Component::DiffusionDecoder),
            usable: [Reference::Official, Reference::Diffusers].map(decodes),
            duration,
            rounds: self.missing(&rounds),
        }
    }
}

/// Verdict on one request: whether `generate` would run it on this model.
fn verify(args: &Args) -> anyhow::Result<()> {
    let mut config = args.loaded()?;
    // A model is verified for a request of any prompt.
    if config.request.prompts.is_none() {
        config.request.prompt.get_or_insert_default();
    }
    let options = GenerateOptions { jobs: config.jobs()?, ..GenerateOptions::default() };
    preflight(&config, &options)?;
    Ok(())
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let source = Arc::new(ModelSource::open(&args.model, &args.components.overrides())?);
    source.refuse_unread()?;
    let survey = Survey::new(&source);
    let (findings, configs) = (&survey.findings, &survey.configs);
    let version = source.version().map_or_else(|_| "unknown".to_string(), |v| v.to_string());
    let newest = survey.is_2_5().then(|| survey.newest());
    let good = |part| survey.good(part);
    let missing = |pipeline: Pipeline| survey.missing(&Config { pipeline, ..Config::default() });
    let request = args.names_request().then(|| verify(args));
    let upsamplers = [Component::LatentUpsampler, Component::TemporalUpsampler].into_iter().filter(|part| good(*part));
    let upsamplings = upsamplers.filter_map(|part| configs.upsampling(part).ok().flatten().map(Upsampling::name));
    let upsamplings: Vec<&str> = upsamplings.collect();
    let pipelines = || Pipeline::value_variants().iter().map(|pipeline| (*pipeline, missing(*pipeline)));
    let missing = missing(Pipeline::TextToVideo);
    let layouts = args.target.as_deref().map(|name| layouts(args, name)).transpose()?;
    // What cannot be opened is among the findings.
    let unverified = source.unverified().unwrap_or_else(|_| Vec::new());
    let bytes: u64 = findings.iter().map(|(_, f)| if let Finding::Weights(r) = f { r.bytes } else { 0 }).sum();
    if args.json {
        let parts: serde_json::Map<String, serde_json::Value> =
            findings.iter().map(|(p, f)| (p.folder().to_string(), describe(f))).collect();
        let state = |missing: &[&str]| serde_json::json!({"ready": missing.is_empty(), "missing": missing});
        let with = |pipeline: Pipeline, missing: &[&str]| {
            let mut own = state(missing);
            if let flags @ [_, ..] = pipeline.needed_flags() {
                own["with"] = flags.into();
            }
            own
        };
        let pipelines: serde_json::Map<String, serde_json::Value> =
            pipelines().map(|(own, missing)| (own.name().to_string(), with(own, &missing))).collect();
        let mut all = serde_json::json!({
            "model": source.path(), "version": version, "parts": parts, "weight_bytes": bytes,
            "text_to_video": state(&missing), "pipelines": pipelines, "upsample": upsamplings, "unverified": unverified,
        });
        if let Some(newest) = &newest {
            let [official, diffusers] = [true, false].map(|official| newest.decoder(official));
            all["decoder_auto"] = serde_json::json!({"official": official, "diffusers": diffusers});
            all["num_frames_auto"] = state(&newest.duration);
            all["temporal_rounds"] = state(&newest.rounds);
        }
        if let Some(verdict) = &request {
            let error = verdict.as_ref().err().map(one_line);
            all["request"] = serde_json::json!({"ready": error.is_none(), "error": error});
        }
        if let Some(layouts) = &layouts {
            all["layouts"] = serde_json::json!({"auto": layouts.auto, "faster": layouts.faster});
        }
        print(&format!("{}\n", serde_json::to_string_pretty(&all)?))?;
    } else {
        let size = bytes as f64 / 1e9;
        let mut lines = vec![format!("{}: LTX-{version}, {size:.2} GB of weights", source.path().display())];
        lines.extend(findings.iter().flat_map(|(part, finding)| lines_of(*part, finding)));
        lines.extend(pipelines().map(|(own, missing)| line_of_pipeline(own, &missing)));
        if !upsamplings.is_empty() {
            lines.push(format!("two_stage.upsample: {}", upsamplings.join(", ")));
        }
        lines.extend(newest.iter().flat_map(Newest::lines));
        lines.extend(layouts.into_iter().flat_map(|layouts| [Some(layouts.auto), layouts.faster]).flatten());
        lines.extend(unverified.iter().map(|line| format!("warning: {line}")));
        lines.extend(request.iter().filter(|verdict| verdict.is_ok()).map(|_| "the request: ready".to_string()));
        print(&(lines.join("\n") + "\n"))?;
    }
    if let Some(verdict) = request {
        return verdict;
    }
    anyhow::ensure!(missing.is_empty(), "{}: not complete: {}", source.path().display(), missing.join(", "));
    Ok(())
}

/// Choice of `layout: auto` on a target, and a layout that is faster than the configuration's.
struct Layouts {
    auto: String,
    faster: Option<String>,
}

fn layouts(args: &Args, name: &str) -> anyhow::Result<Layouts> {
    let config = args.loaded()?;
    let target = target(name, chip_of(&config)?.as_ref())?;
    let (toolchain, count, capacity) = target.described();
    let chip = target.chip();
    let devices = Devices { toolchain: &toolchain, count, capacity, chip: chip.as_ref() };
    let mesh = config.mesh.filter(|_| config.layout == AUTO);
    let auto = Config { layout: AUTO.into(), mesh, ..config.clone() };
    let faster = if config.layout == AUTO { None } else { faster(&config, devices)? };
    Ok(Layouts { auto: ranking(&auto, devices)?.decision(devices), faster })
}

fn examine(source: &Arc<ModelSource>, configs: &ModelConfigs, part: Component) -> Finding {
    if !source.has(part) {
        return Finding::Absent;
    }
    match component(configs, source, part) {
        Ok(None) => Finding::Present,
        Ok(Some(report)) => Finding::Weights(report),
        Err(e @ PipelineError::Config { source: ConfigError::Unsupported { .. } | ConfigError::Unread { .. }, .. }) => {
            Finding::Unsupported(e.to_string())
        }
        Err(e) => Finding::Broken(e.to_string()),
    }
}

fn line_of_pipeline(own: Pipeline, missing: &[&str]) -> String {
    match (missing.is_empty(), own.needed_flags()) {
        (true, []) => format!("{}: ready", own.name()),
        (true, flags) => format!("{}: ready, with {}", own.name(), flags.join(" and ")),
        (false, _) => format!("{}: needs {}", own.name(), missing.join(", ")),
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
                n => format!(", {n} more that are not used"),
            };
            format!("{name:<25} ok: {} tensors, {:.1} MB{more}", report.matched, report.bytes as f64 / 1e6)
        }
        Finding::Weights(report) => {
            let wrong = report.lines().into_iter().map(|line| format!("  {line}"));
            return [format!("{name:<25} wrong:")].into_iter().chain(wrong).collect();
        }
    }]
}
