//! Builds the programs of a request without weights or devices, in order to compile them ahead of time or to inspect
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use super::PROGRAMS;
pub use super::ProgramKind;
use super::configs::ModelConfigs;
use super::files::added_rank;
use super::parameters::check_files;
use super::prompt_enhancer::round_up;
use crate::av::Av;
use crate::config::{Config, LoraApply, Noise, WeightSource};
use crate::hlo::Program;
use crate::models::Network;
use crate::models::gemma::GenerationSpec;
use crate::models::pixels::Pixels;
use crate::models::upsampler::Upsampling;
use crate::nn::{AddedLoras, Build, Override};
use crate::pipeline::enhancement::generation_spec;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::phase::Phase;
use crate::pipeline::plan::loras::{Loras, differ_by_pass};
use crate::pipeline::plan::origin::{Origin, Weights};
use crate::pipeline::stages::batch::{decoder_draws, draws, videos_at_once};
use crate::request::{self, LatentTiling, ModelSizes, Request, Shapes};
use crate::runtime::{Footprint, noise};
use crate::sampling::denoise::DenoiseShape;
use crate::weights::lora_add::LoraRanks;
use crate::weights::{Component, WeightsError};

/// A request and a model, from which programs are built.
pub struct Programs {
    pub(super) configs: ModelConfigs,
    pub(crate) sizes: ModelSizes,
    /// Request of the first pass.
    pub(super) first: Request,
    pub(super) second: Option<Request>,
    /// Largest tile of the second pass. `None`: the pass denoises the complete video.
    tile: Option<SecondPassTile>,
    /// Upsampling steps between the two passes.
    pub(super) upsample: Vec<Upsampling>,
    pub(super) rounds: Option<Rounds>,
    /// Request with the size of the finished video.
    pub(super) output: Request,
    pub(super) keyframes: bool,
    /// Whether decoders return frames as floats instead of bytes.
    values: bool,
    /// Whether the diffusion decoder decodes the video.
    pub(super) diffusion: bool,
    /// Whether the text encoder's language model enhances prompts.
    pub(super) enhances_prompts: bool,
    /// Sizes of the program that enhances a prompt.
    pub(super) generation: GenerationSpec,
    /// Minimum number of videos per program call.
    rows: usize,
    /// Whether merged LoRAs give each of the two passes its own transformer weights.
    own_by_pass: bool,
    /// LoRA matrices in the programs of the first and of the second pass.
    added_loras: [Option<AddedLoras>; 2],
    /// Whether these matrices have equal sizes but different values per pass.
    own_matrices_by_pass: bool,
    pub(crate) origin: String,
}

/// Tile of a second pass that is denoised in tiles (pipeline `hdr`).
struct SecondPassTile {
    request: Request,
    /// Number of tiles of the pass.
    tiles: usize,
}

/// Temporal rounds after the two passes (pipeline `dfr`).
pub(super) struct Rounds {
    /// Request of the second pass, with the number of frames before the last round.
    pub(super) before: Request,
    /// Request of the largest tile of the last round.
    tile: Request,
    /// Total number of tiles of all rounds.
    tiles: usize,
}

/// The input for building one program of a run: the run, the program's sizes, and the build options.
pub(super) struct ProgramSpec<'a> {
    pub(super) run: &'a Programs,
    /// Request with the sizes of the program.
    pub(super) request: &'a Request,
    pub(super) shapes: Shapes,
    pub(super) shape: DenoiseShape,
    pub(super) build: &'a Build,
}

impl ProgramSpec<'_> {
    pub(super) fn batch(&self) -> usize {
        self.shape.batch
    }

    /// Returns the number of prompts in the batch, including negative prompts.
    pub(super) fn prompts(&self) -> usize {
        self.batch() * self.request.prompts().max(self.run.last().prompts())
    }

    /// Returns the format in which a decoder returns the frames of a complete video.
    pub(super) fn pixels(&self) -> Pixels {
        if self.run.values { Pixels::Values } else { Pixels::Bytes }
    }
}

/// Returns the largest tile of a second pass.
fn second_pass_tile(second: &Request, tiling: &LatentTiling, sizes: &ModelSizes) -> Result<SecondPassTile> {
    let tiles = tiling.tiles(&Shapes::from_request(sizes, second)?.video);
    let largest = tiles.iter().max_by_key(|tile| tile.size.iter().product::<usize>());
    let largest = largest.expect("a pass has at least one tile");
    Ok(SecondPassTile { request: largest.request(second, &sizes.video_grid), tiles: tiles.len() })
}

impl Programs {
    /// Prepares the programs of a configuration. For a published model that is not on this machine, uses the built-in
    /// copy of its configuration. `layers`: number of transformer blocks to use; `None`: all.
    ///
    /// # Errors
    /// Returns an error if the model does not exist or does not support the sizes of the request.
    pub fn from_config(config: &Config, layers: Option<usize>) -> Result<Self> {
        Programs::from_configs(config, ModelConfigs::from(Origin::find(config)?), layers)
    }

    /// Same as [`Programs::from_config`], for a model that is already open.
    pub(crate) fn from_configs(config: &Config, configs: ModelConfigs, layers: Option<usize>) -> Result<Self> {
        let mut configs = configs.for_run(config);
        let origin = configs.origin().describe()?;
        let mut sizes = configs.sizes()?;
        let diffusion = configs.decodes_by_diffusion()?;
        let mut request = request::resolve(config, &sizes)?;
        configs.check_fit()?;
        config.upsamplings().iter().try_for_each(|upsampling| configs.check_upsampling(*upsampling))?;
        let all = sizes.transformer.num_layers;
        if let Some(resident) = config.runtime.resident_blocks.filter(|resident| *resident > all) {
            let why = format!("runtime.resident_blocks = {resident}: the transformer has {all} blocks; use 0 to {all}");
            return Err(PipelineError::Usage(why));
        }
        if let Some(layers) = layers {
            if layers == 0 || layers > all {
                return Err(PipelineError::Usage(format!(
                    "--layers {layers}: this model has {all} blocks; use 1 to {all}"
                )));
            }
            configs = configs.cut(layers);
            // The amount of work does not depend on which block STG perturbs.
            for blocks in request.stg_blocks.as_mut() {
                blocks.iter_mut().for_each(|b| *b = (*b).min(layers - 1));
                blocks.dedup();
            }
            sizes = configs.sizes()?;
        }
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
        let is_hdr = request.hdr.is_some();
        let tile = second.as_ref().zip(request.refine.as_ref().and_then(|refine| refine.tiles));
        let tile = tile.map(|(second, tiling)| second_pass_tile(second, &tiling, &sizes)).transpose()?;
        let generation = generation_spec(config, &configs)?;
        let added_loras = Loras::in_programs(&config.model, &LoraRanks::default())?;
        Ok(Programs {
            configs,
            sizes,
            first,
            keyframes: request.dfr.is_some(),
            upsample: request.refine.map_or(Vec::new(), |refine| refine.upsample),
            rounds,
            output,
            values: is_hdr,
            tile,
            diffusion,
            enhances_prompts: config.request.enhance_prompt && config.enhance.endpoint.is_none(),
            generation,
            rows: 1,
            own_by_pass: second.is_some() && differ_by_pass(&config.model, LoraApply::Merge),
            own_matrices_by_pass: second.is_some()
                && differ_by_pass(&config.model, LoraApply::Add)
                && added_loras[0] == added_loras[1],
            added_loras,
            second,
            origin,
        })
    }

    /// Sets whether the run dumps intermediate tensors, for which decoders return floats.
    #[must_use]
    pub(crate) fn dumping(self, dump: bool) -> Self {
        Programs { values: dump || self.values, ..self }
    }

    /// Raises the size of the program that enhances prompts to that of a longer prompt. `tokens`: length of the run's
    /// longest prompt, with the system prompt.
    #[must_use]
    pub(crate) fn enhancing(self, tokens: usize) -> Self {
        let prompt_tokens = self.generation.prompt_tokens.max(tokens);
        Programs { generation: round_up(GenerationSpec { prompt_tokens, ..self.generation }), ..self }
    }

    /// Returns the sizes of the program that enhances prompts; `None` if the run has none.
    pub(crate) fn generation(&self) -> Option<GenerationSpec> {
        self.enhances_prompts.then_some(self.generation)
    }

    /// Sets the minimum number of videos per program call.
    #[must_use]
    pub(crate) fn of_rows(self, rows: usize) -> Self {
        Programs { rows, ..self }
    }

    /// Returns the denoising loops of a run, with the number of transformer evaluations of each. `steps`: number of
    /// steps of the first pass, used if the request does not list its sigmas. All tiles of the temporal rounds are
    /// counted like the largest one.
    pub(crate) fn loops(&self, steps: usize) -> Vec<(ProgramKind, usize)> {
        let listed = |request: &Request| request.sigmas.len().saturating_sub(1);
        let steps = if listed(&self.first) == 0 { steps } else { listed(&self.first) };
        let first = Some((ProgramKind::Denoise, self.first.sampler.evaluations(steps)));
        let tiles = self.tile.as_ref().map_or(1, |tile| tile.tiles);
        let of = |second: &Request| (ProgramKind::Refine, tiles * second.sampler.evaluations(listed(second)));
        let second = self.second.as_ref().map(of);
        let of = |r: &Rounds| (ProgramKind::Round, r.tiles * r.tile.sampler.evaluations(listed(&r.tile)));
        let rounds = self.rounds.as_ref().map(of);
        first.into_iter().chain(second).chain(rounds).collect()
    }

    /// Returns the number of transformer blocks in the programs.
    pub fn layers(&self) -> usize {
        self.sizes.transformer.num_layers
    }

    /// Returns the possible leading dimensions of a program's stacked layer weights: the total number of layers,
    /// followed by the number of layers of each kind.
    ///
    /// # Errors
    /// Returns an error if the model's configuration is invalid.
    pub fn stacked(&self, kind: ProgramKind) -> Result<Vec<usize>> {
        match kind.declaration().component {
            Component::TextEncoder => Ok(self.configs.text_encoder()?.stacks()),
            _ => Ok(vec![self.layers()]),
        }
    }

    /// Builds every program of a run, so that an unsuitable layout is rejected before the run starts. Warns, once per
    /// process, about tensor patterns of the layout that match no tensor.
    pub(crate) fn check(&self, build: &Build) -> Result<()> {
        warn_once(self.unmatched(build)?);
        Ok(())
    }

    /// Returns a warning for each pattern in the layout's section `tensors` that matches no tensor of the run's
    /// programs; none on a single device, where layouts have no effect.
    pub(crate) fn unmatched(&self, build: &Build) -> Result<Vec<String>> {
        let mut left: Vec<&Override> = build.layout.overrides.iter().filter(|_| !build.layout.is_single()).collect();
        for kind in self.kinds() {
            let network = self.network(kind, build)?;
            left.retain(|pattern| !network.placements.iter().any(|placement| pattern.covers(&placement.tensor)));
        }
        let line = |pattern: &Override| {
            let place = pattern.rules.first().map(|rule| format!("{}: ", rule.place)).unwrap_or_default();
            format!("{place}tensors: \"{}\" matches no tensor of this run; correct or remove it", pattern.pattern)
        };
        Ok(left.into_iter().map(line).collect())
    }

    /// Returns the LoRA matrices in the programs of the first and of the second pass.
    pub(crate) fn added_loras(&self) -> [Option<AddedLoras>; 2] {
        self.added_loras
    }

    /// Returns the bytes of each component's parameters on a device. Weights and LoRA matrices that differ between the
    /// passes count twice, because those of the inactive pass stay on the devices.
    ///
    /// # Errors
    /// Returns an error if the layout is not suitable for a program.
    pub fn parameters(&self, build: &Build) -> Result<BTreeMap<&'static str, usize>> {
        let networks: Result<Vec<Network>> = self.kinds().map(|kind| self.network(kind, build)).collect();
        let networks = networks?;
        let mut each: BTreeMap<_, _> = parameters(&networks).into_iter().map(|(c, of)| (c, of.device)).collect();
        let matrices = added_matrices(&networks).device;
        let all = each.get(Component::Transformer.folder()).copied().unwrap_or(0);
        let transformer = all.saturating_sub(matrices);
        let copies = [(self.own_by_pass, transformer), (self.own_matrices_by_pass, matrices)];
        let more: usize = copies.iter().filter(|(is_copied, _)| *is_copied).map(|(_, bytes)| bytes).sum();
        each.entry(Component::Transformer.folder()).and_modify(|bytes| *bytes += more);
        Ok(each)
    }

    /// Returns whether latents are upsampled between the two passes: in time if `in_time` is set, otherwise in space.
    pub(super) fn upsamples(&self, in_time: bool) -> bool {
        self.upsample.iter().any(|upsampling| (*upsampling == Upsampling::TemporalX2) == in_time)
    }

    /// Returns the request of the last pass.
    pub(super) fn last(&self) -> &Request {
        self.second.as_ref().unwrap_or(&self.first)
    }

    /// Returns the request of the second pass, or of its largest tile. If the run has only one pass, returns `Err` with the unmet requirement,
    /// for the message "program '…' needs …".
    pub(super) fn second_pass(&self) -> std::result::Result<&Request, &'static str> {
        self.tile.as_ref().map(|tile| &tile.request).or(self.second.as_ref()).ok_or("a two-stage pipeline")
    }

    /// Returns the request of the largest tile of the last temporal round. If the run has no rounds, returns
    /// `Err` like [`Self::second_pass`].
    pub(super) fn largest_tile(&self) -> std::result::Result<&Request, &'static str> {
        let rounds = self.rounds.as_ref().ok_or("the pipeline dfr with dfr.temporal_rounds of 1 or 2")?;
        Ok(&rounds.tile)
    }

    /// Returns the programs that a run of this request executes.
    pub fn kinds(&self) -> impl Iterator<Item = ProgramKind> {
        PROGRAMS.iter().filter(|program| (program.runs)(self)).map(|program| program.kind)
    }

    /// Builds the programs that draw the starting noise of each pass and the diffusion decoder's noise on the devices.
    /// Returns an empty list if the host draws the noise.
    pub(in crate::pipeline) fn noise(&self) -> Result<Vec<Program>> {
        let tile = self.rounds.as_ref().map(|rounds| &rounds.tile);
        let passes = [Some(&self.first), self.second_pass().ok(), tile].into_iter().flatten();
        let device = passes.filter(|request| request.noise == Noise::Device);
        let of_pass = |request: &Request| Ok(draws(&Shapes::from_request(&self.sizes, request)?, &self.sizes));
        let mut all = device.map(of_pass).collect::<Result<Vec<_>>>()?;
        if self.diffusion && !all.is_empty() {
            let last = Shapes::from_request(&self.sizes, &self.output)?;
            all.push(decoder_draws(&self.configs.diffusion_decoder()?, &last.video));
        }
        all.iter().map(|draws| Ok(noise::program(draws)?)).collect()
    }

    #[cfg(test)]
    fn components(&self) -> BTreeSet<Component> {
        self.kinds().map(|kind| kind.declaration().component).collect()
    }

    /// Compares the parameters that a program reads with the headers of the weight files. Does nothing if the model has
    /// no weight files, because configurations are sufficient to compile programs.
    pub(crate) fn check_headers(&self, config: &Config, kind: ProgramKind) -> Result<()> {
        let (Origin::Files(source), WeightSource::File) = (self.configs.origin(), config.model.weights) else {
            return Ok(());
        };
        let part = kind.declaration().component;
        match source.checkpoint(part) {
            Err(WeightsError::NoWeights { .. }) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => {
                let whole = ModelConfigs::from(self.configs.origin().clone());
                check_files(&whole, &Weights::Files(source.clone()), [part])
            }
        }
    }

    /// Builds a program. It is identical to the program that a run of the same configuration executes.
    ///
    /// # Errors
    /// Returns an error if a run of the request does not have this program, or if the model, the sizes or the layout
    /// are not suitable for it.
    pub fn network(&self, kind: ProgramKind, build: &Build) -> Result<Network> {
        let program = kind.declaration();
        let request = (program.request)(self)
            .map_err(|needs| PipelineError::Usage(format!("program '{}' needs {needs}", program.name)))?;
        let shapes = Shapes::from_request(&self.sizes, request)?;
        let at_once = videos_at_once(&build.layout);
        let of_sound = program.phase == Phase::AudioDecoder;
        let rows = if of_sound { at_once } else { at_once.max(self.rows) };
        let shape = request.denoise_shape(&self.sizes, &shapes, rows);
        let added_loras = self.added_loras[usize::from(kind.pass()) - 1];
        let build = &Build { added_loras, ..build.clone() };
        (program.network)(&ProgramSpec { run: self, request, shapes, shape, build })
    }
}

/// Logs each line as a warning, but only once per process: a run is verified twice, before and after its devices are
/// opened.
pub(crate) fn warn_once(lines: Vec<String>) {
    static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    for line in lines {
        if WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(line.clone()) {
            tracing::warn!("{line}");
        }
    }
}

/// Returns the memory that each component's parameters take. Parameters that several networks read count once; LoRA
/// matrices of several ranks count once per rank.
pub(in crate::pipeline) fn parameters<'a>(
    networks: impl IntoIterator<Item = &'a Network>,
) -> BTreeMap<&'static str, Footprint> {
    let mut each = BTreeMap::new();
    for network in networks {
        let of = |p| Footprint::of_param(&network.program, p);
        each.extend(network.params.iter().map(|p| ((&p.name, added_rank(p)), (p.component, of(p)))));
    }
    let mut sums = BTreeMap::<_, Footprint>::new();
    each.into_values().for_each(|(component, of)| *sums.entry(component).or_default() += of);
    sums
}

/// Returns the memory that the LoRA matrices of networks take.
pub(in crate::pipeline) fn added_matrices<'a>(networks: impl IntoIterator<Item = &'a Network>) -> Footprint {
    let mut each = BTreeMap::new();
    for network in networks {
        let added = network.params.iter().filter_map(|p| Some(((&p.name, added_rank(p)?), p)));
        each.extend(added.map(|(key, p)| (key, Footprint::of_param(&network.program, p))));
    }
    each.into_values().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::presets::CONFIGS;

    #[test]
    fn unmatched_layout_patterns_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("own.yml");
        let lines = |layout: &str| {
            let config = Config::load("ltx2", [&*format!("layout={layout}"), "mesh.context=4"]).unwrap();
            let build = crate::pipeline::plan::setup::build(&config, 4, "cpu", "").unwrap();
            Programs::from_config(&config, None).unwrap().unmatched(&build).unwrap()
        };
        for layout in ["ulysses", "tensor", "fsdp-ffn"] {
            assert_eq!(lines(layout), Vec::<String>::new(), "{layout}");
        }
        let text =
            "rules: {video_sequence: [context]}\ntensors:\n  \"*ff.hiden\": {mlp: []}\n  \"*.ff.net*\": {embed: []}\n";
        std::fs::write(&path, text).unwrap();
        let own = path.to_str().unwrap();
        let want = format!("{own}:3: tensors: \"*ff.hiden\" matches no tensor of this run; correct or remove it");
        assert_eq!(lines(own), [want]);
    }

    /// `ModelConfigs::components`, which `check` and the fingerprint use, derives the components from the configuration
    /// without building programs. It must include every component that the built programs read.
    #[test]
    fn verified_components_include_all_that_programs_read() {
        let mut seen = 0;
        for (preset, _) in CONFIGS {
            for set in [&[][..], &["model.decoder=diffusion"], &["reference=diffusers"], &["dfr.temporal_rounds=2"]] {
                let Ok(config) = Config::load(preset, set.iter().copied()) else { continue };
                let Ok(programs) = Programs::from_config(&config, None) else { continue };
                let verified = programs.configs.components(&config);
                let read = programs.components();
                assert!(read.is_subset(&verified), "{preset} {set:?}: {read:?} of {verified:?}");
                seen += 1;
            }
        }
        assert!(seen > 20, "{seen} configurations");
    }
}
