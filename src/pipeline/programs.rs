//! The programs of a request, written without weights or a device: to compile them ahead of time and look at them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use super::batch::{decoder_draws, draws, videos_at_once};
use super::configs::ModelConfigs;
use super::error::{PipelineError, Result};
use super::loras::differ_by_pass;
use super::origin::{Origin, Weights};
use super::parameters::check_files;
use super::program_spec::ProgramSpec;
pub use super::program_table::ProgramKind;
use super::program_table::{ProgramRow, Runs, Sizes, TABLE};
use crate::av::Av;
use crate::config::{Config, Job, Noise, WeightSource};
use crate::hlo::Program;
use crate::models::Network;
use crate::models::upsampler::Upsampling;
use crate::nn::{Build, Override};
use crate::request::{self, ModelSizes, Request, Shapes};
use crate::runtime::{device_bytes, noise};
use crate::weights::{Component, WeightsError};

/// A request whose programs can be written.
pub struct Programs {
    configs: ModelConfigs,
    sizes: ModelSizes,
    /// The passes' own requests.
    first: Request,
    second: Option<Request>,
    /// Upsampling between them.
    upsample: Vec<Upsampling>,
    rounds: Option<Rounds>,
    /// The finished video's.
    output: Request,
    /// Whether both passes generate keyframes.
    keyframes: bool,
    /// Whether frames leave the device as values.
    values: bool,
    /// Whether the video is decoded by diffusion.
    diffusion: bool,
    /// Videos that programs make at once at least.
    rows: usize,
    /// Whether LoRAs give each pass a transformer of its own.
    own_by_pass: bool,
    pub(crate) origin: String,
}

/// Temporal rounds behind two passes.
struct Rounds {
    /// The second pass' request at the canvas before the last one.
    before: Request,
    /// The largest tile's.
    tile: Request,
    /// Tiles of all rounds.
    tiles: usize,
}

impl Programs {
    /// Of a configuration. Where its model is not on this machine and is a published one, the configuration that this
    /// program carries of it is taken. `layers` cuts the transformer to its first blocks.
    ///
    /// # Errors
    /// No such model; sizes that it does not take.
    pub fn of(config: &Config, layers: Option<usize>) -> Result<Self> {
        let origin = Origin::of(config)?;
        let (configs, origin) = (ModelConfigs::from(origin.clone()).for_run(config), origin.describe()?);
        let full = configs.sizes()?;
        let diffusion = configs.decodes_by_diffusion()?;
        let mut request = request::of_job(config, &full, &Job { index: 0, prompt: String::new(), seed: 0 })?;
        configs.check_fit()?;
        config.upsamplings().iter().try_for_each(|upsampling| configs.check_upsampling(*upsampling))?;
        let of = |configs, sizes, request: Request| {
            let (first, second) = request.passes();
            let last = second.as_ref().unwrap_or(&first);
            let output = match &request.dfr {
                Some(_) => Request { num_frames: request.output_frames(), conditions: Av::default(), ..last.clone() },
                None => last.clone(),
            };
            let rounds = request.dfr.as_ref().and_then(|dfr| {
                let tile = dfr.largest_tile(last)?;
                let rounds = dfr.rounds();
                let frames = rounds.last()?.canvas.frames.div_ceil(2);
                let before = Request { num_frames: frames, conditions: Av::default(), ..last.clone() };
                Some(Rounds { before, tile, tiles: rounds.iter().map(|round| round.tiles.len()).sum() })
            });
            let keyframes = request.dfr.is_some();
            let upsample = request.refine.map_or(Vec::new(), |refine| refine.upsample);
            let (values, rows) = (false, 1);
            let own_by_pass = second.is_some() && differ_by_pass(&config.model);
            Programs {
                configs,
                sizes,
                first,
                second,
                upsample,
                rounds,
                output,
                keyframes,
                values,
                diffusion,
                rows,
                own_by_pass,
                origin,
            }
        };
        let Some(layers) = layers else { return Ok(of(configs, full, request)) };
        let all = full.transformer.num_layers;
        if layers == 0 || layers > all {
            return Err(PipelineError::Usage(format!("--layers {layers}: this model has 1 to {all} blocks")));
        }
        let configs = configs.cut(layers);
        // Which block is perturbed changes no work.
        for blocks in request.stg_blocks.as_mut() {
            blocks.iter_mut().for_each(|b| *b = (*b).min(layers - 1));
            blocks.dedup();
        }
        let sizes = configs.sizes()?;
        Ok(of(configs, sizes, request))
    }

    /// The programs of a run that keeps its intermediate tensors.
    #[must_use]
    pub(crate) fn dumping(self, dump: bool) -> Self {
        Programs { values: dump, ..self }
    }

    /// The programs of runs that make so many videos at once at least.
    #[must_use]
    pub(crate) fn of_rows(self, rows: usize) -> Self {
        Programs { rows, ..self }
    }

    /// Loops of a run with their evaluations of the transformer, of `steps` in the first pass where the request lists no noise
    /// levels. Each tile of a round counts as the largest one.
    pub(crate) fn loops(&self, steps: usize) -> Vec<(ProgramKind, usize)> {
        let listed = |request: &Request| request.sigmas.len().saturating_sub(1);
        let steps = if listed(&self.first) == 0 { steps } else { listed(&self.first) };
        let first = Some((ProgramKind::Denoise, self.first.sampler.evaluations(steps)));
        let of = |second: &Request| (ProgramKind::Refine, second.sampler.evaluations(listed(second)));
        let second = self.second.as_ref().map(of);
        let of = |r: &Rounds| (ProgramKind::Round, r.tiles * r.tile.sampler.evaluations(listed(&r.tile)));
        let rounds = self.rounds.as_ref().map(of);
        first.into_iter().chain(second).chain(rounds).collect()
    }

    /// Blocks of the transformer.
    pub fn layers(&self) -> usize {
        self.sizes.transformer.num_layers
    }

    /// The stacked layers of a program: the lengths of its stacks' leading dimensions, that of all layers first, then
    /// those of kinds of layers.
    ///
    /// # Errors
    /// Errors of the model's configuration.
    pub fn stacked(&self, kind: ProgramKind) -> Result<Vec<usize>> {
        match kind.row().part {
            Component::TextEncoder => Ok(self.configs.text_encoder()?.stacks()),
            _ => Ok(vec![self.layers()]),
        }
    }

    /// Writes every program of a run, so that a layout that does not fit is found before anything has run. Warns of patterns of
    /// the layout that name no tensor, once a process.
    pub(crate) fn check(&self, build: &Build) -> Result<()> {
        warn_once(self.unmatched(build)?);
        Ok(())
    }

    /// Patterns of the layout that name no tensor of a run's programs, a line each; of one device, which has no layout, none.
    ///
    /// # Errors
    /// A program that cannot be written.
    pub(crate) fn unmatched(&self, build: &Build) -> Result<Vec<String>> {
        let mut left: Vec<&Override> = build.layout.overrides.iter().filter(|_| !build.layout.is_single()).collect();
        for kind in self.kinds() {
            let network = self.network(kind, build)?;
            left.retain(|pattern| !network.placements.iter().any(|placement| pattern.covers(&placement.tensor)));
        }
        let line = |pattern: &Override| {
            let place = pattern.rules.first().map(|rule| format!("{}: ", rule.place)).unwrap_or_default();
            format!("{place}tensors: \"{}\" names no tensor of this run; correct or remove it", pattern.pattern)
        };
        Ok(left.into_iter().map(line).collect())
    }

    /// Parameters of each component of a run, in bytes on a device: the transformer's twice where LoRAs give each pass its own,
    /// since the other pass' stay on the devices (`Executor::enter`).
    ///
    /// # Errors
    /// What is wrong with the layout.
    pub fn parameters(&self, build: &Build) -> Result<BTreeMap<&'static str, usize>> {
        let networks: Result<Vec<Network>> = self.kinds().map(|kind| self.network(kind, build)).collect();
        let mut each = parameters(&networks?);
        if self.own_by_pass {
            each.entry(Component::Transformer.folder()).and_modify(|bytes| *bytes *= 2);
        }
        Ok(each)
    }

    /// Whether latents are upsampled in time between two passes, or in space.
    fn upsamples(&self, in_time: bool) -> bool {
        self.upsample.iter().any(|upsampling| (*upsampling == Upsampling::TemporalX2) == in_time)
    }

    /// The programs of a run of this request.
    pub fn kinds(&self) -> impl Iterator<Item = ProgramKind> {
        let two_passes = self.second.is_some();
        let [temporal, spatial] = [true, false].map(|in_time| self.upsamples(in_time));
        let first = &self.first;
        let images = first.has_images() || first.given_frames().is_some() || first.references().next().is_some();
        let sound = self.first.has_sound();
        let (keyframes, rounds) = (self.keyframes, self.rounds.is_some());
        let (diffusion, tiled) = (self.diffusion, self.first.tiling.is_some());
        let (decoded, makes_sound) = (self.first.decodes_video(), !self.first.given().audio);
        let runs = move |row: &&ProgramRow| match row.runs {
            Runs::Always => true,
            Runs::TwoPasses => two_passes,
            Runs::Spatial => spatial,
            Runs::Temporal => temporal,
            Runs::Keyframes => keyframes,
            Runs::Rounds => rounds,
            Runs::Images => images,
            Runs::GivenSound => sound,
            Runs::OwnSound => makes_sound,
            Runs::ByConvolution => decoded && !diffusion,
            Runs::ByDiffusion => decoded && diffusion,
            Runs::ByDiffusionTiles => decoded && diffusion && tiled,
            Runs::Alone => false,
        };
        TABLE.iter().filter(runs).map(|row| row.kind)
    }

    /// Programs that draw the starting noise of each pass and the decoder's, where devices draw it.
    ///
    /// # Errors
    /// Sizes that the model does not take.
    pub(super) fn noise(&self) -> Result<Vec<Program>> {
        let tile = self.rounds.as_ref().map(|rounds| &rounds.tile);
        let passes = [Some(&self.first), self.second.as_ref(), tile].into_iter().flatten();
        let device = passes.filter(|request| request.noise == Noise::Device);
        let of_pass = |request: &Request| Ok(draws(&Shapes::of(&self.sizes, request)?, &self.sizes));
        let mut all = device.map(of_pass).collect::<Result<Vec<_>>>()?;
        if self.diffusion && !all.is_empty() {
            let last = Shapes::of(&self.sizes, &self.output)?;
            all.push(decoder_draws(&self.configs.diffusion_decoder()?, &last.video));
        }
        all.iter().map(|draws| Ok(noise::program(draws)?)).collect()
    }

    /// Components that the programs read.
    #[cfg(test)]
    fn components(&self) -> BTreeSet<Component> {
        self.kinds().map(|kind| kind.row().part).collect()
    }

    /// Compares a program's weights with what it reads, where the model's files hold any: to compile it, configurations are
    /// enough.
    ///
    /// # Errors
    /// The first differences, naming the file.
    pub(crate) fn check_headers(&self, config: &Config, kind: ProgramKind) -> Result<()> {
        let (Origin::Files(source), WeightSource::File) = (self.configs.origin(), config.model.weights) else {
            return Ok(());
        };
        let part = kind.row().part;
        match source.checkpoint(part) {
            Err(WeightsError::NoWeights { .. }) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => {
                let whole = ModelConfigs::from(self.configs.origin().clone());
                check_files(&whole, &Weights::Files(source.clone()), [part])
            }
        }
    }

    /// Writes a program, the one that a run of the same configuration executes.
    ///
    /// # Errors
    /// Errors of model, sizes or layout.
    pub fn network(&self, kind: ProgramKind, build: &Build) -> Result<Network> {
        let row = kind.row();
        let needs = match row.runs {
            Runs::TwoPasses if self.second.is_none() => Some("a pipeline of two stages"),
            Runs::Spatial if !self.upsamples(false) => Some("two stages with upsampling in space between them"),
            Runs::Temporal if !self.upsamples(true) => Some("two stages with temporal_x2 between them"),
            Runs::Keyframes if !self.keyframes => Some("the pipeline dfr"),
            _ => None,
        };
        if let Some(needs) = needs {
            return Err(PipelineError::Usage(format!("program '{}' needs {needs}", row.name)));
        }
        let last = self.second.as_ref().unwrap_or(&self.first);
        let request = match (row.sizes, &self.rounds) {
            (Sizes::First, _) | (Sizes::BeforeRound, None) => &self.first,
            (Sizes::Last, _) => last,
            (Sizes::BeforeRound, Some(rounds)) => &rounds.before,
            (Sizes::Tile, Some(rounds)) => &rounds.tile,
            (Sizes::Tile, None) => {
                let why = format!("program '{}' needs the pipeline dfr with dfr.temporal_rounds of 1 or 2", row.name);
                return Err(PipelineError::Usage(why));
            }
            (Sizes::Output, _) => &self.output,
        };
        let shapes = Shapes::of(&self.sizes, request)?;
        let at_once = videos_at_once(&build.layout);
        let of_sound = matches!(kind, ProgramKind::AudioDecoder | ProgramKind::Vocoder);
        let rows = if of_sound { at_once } else { at_once.max(self.rows) };
        let shape = request.denoise_shape(&self.sizes, &shapes, rows);
        let (configs, sizes, upsample, float_frames) = (&self.configs, &self.sizes, &self.upsample, self.values);
        (row.write)(&ProgramSpec { configs, sizes, request, last, upsample, float_frames, shapes, shape, build })
    }
}

/// Warns of each line once a process: a run is verified before its devices are opened, and again for those.
pub(crate) fn warn_once(lines: Vec<String>) {
    static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    for line in lines {
        if WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(line.clone()) {
            tracing::warn!("{line}");
        }
    }
}

/// Parameters of each component that programs read, in bytes on a device.
pub(super) fn parameters<'a>(networks: impl IntoIterator<Item = &'a Network>) -> BTreeMap<&'static str, usize> {
    let mut each = BTreeMap::new();
    for network in networks {
        each.extend(network.params.iter().map(|p| (&p.name, (p.component, device_bytes(&network.program, p)))));
    }
    let mut sums = BTreeMap::new();
    each.into_values().for_each(|(component, bytes)| *sums.entry(component).or_default() += bytes);
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::presets::CONFIGS;

    #[test]
    fn patterns_that_name_no_tensor_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.yml");
        let lines = |layout: &str| {
            let config = Config::load("ltx2", [&*format!("layout={layout}"), "mesh.context=4"]).unwrap();
            let build = crate::pipeline::setup::build(&config, 4, "cpu", "").unwrap();
            Programs::of(&config, None).unwrap().unmatched(&build).unwrap()
        };
        for layout in ["ulysses", "tensor", "fsdp-ffn"] {
            assert_eq!(lines(layout), Vec::<String>::new(), "{layout}");
        }
        let text =
            "rules: {video_sequence: [context]}\ntensors:\n  \"*ff.hiden\": {mlp: []}\n  \"*.ff.net*\": {embed: []}\n";
        std::fs::write(&path, text).unwrap();
        let own = path.to_str().unwrap();
        let told = format!("{own}:3: tensors: \"*ff.hiden\" names no tensor of this run; correct or remove it");
        assert_eq!(lines(own), [told]);
    }

    /// What `check` and the fingerprint cover is decided without writing programs; it must not be less than they read.
    #[test]
    fn verified_components_include_all_that_programs_read() {
        let mut seen = 0;
        for (preset, _) in CONFIGS {
            for set in [&[][..], &["model.decoder=diffusion"], &["reference=diffusers"], &["dfr.temporal_rounds=2"]] {
                let Ok(config) = Config::load(preset, set.iter().copied()) else { continue };
                let Ok(programs) = Programs::of(&config, None) else { continue };
                let verified = programs.configs.components(&config);
                let read = programs.components();
                assert!(read.is_subset(&verified), "{preset} {set:?}: {read:?} of {verified:?}");
                seen += 1;
            }
        }
        assert!(seen > 20, "{seen} configurations");
    }
}
