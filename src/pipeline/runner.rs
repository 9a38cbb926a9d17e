//! A model that is ready to run. Its weights and programs stay on the devices and are reused by later requests.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Weak;
use std::time::{Duration, Instant};

use super::error::{PipelineError, Result};
use super::model::OpenModel;
use super::phase::Phase;
use super::plan::memory::FittedPlan;
use super::preview::thread::{PreviewThread, SharedStatistics};
use super::programs::ProgramKind;
use super::programs::call::Call;
use super::programs::configs::ModelConfigs;
use super::programs::executor::{Executor, Inputs};
use super::stages::clock::PhaseTime;
use super::stages::denoise_loop::DenoiseLoop;
use crate::media::{ImageH264, RoundTrip};
use crate::models::Network;
use crate::models::diffusion_decoder::FeatureTile;
use crate::models::pixels::Pixels;
use crate::nn::{AddedLoras, Build};
use crate::request::{Request, UpsamplingStep};
use crate::runtime::ShardedTensor;
use crate::sampling::denoise::DenoiseShape;
use crate::tensor::Tensor;

/// A model, its devices, and the options with which its programs are built.
pub struct Runner {
    pub model: OpenModel,
    pub executor: Executor,
    /// Options with which programs are built: layout, element type, lowering.
    pub build: Build,
    /// H.264 encoder of conditioning images (`conditioning.h264`). `auto` is resolved when the first image is encoded.
    pub h264: ImageH264,
    /// The encoder to which `h264` was resolved. `None`: not resolved yet.
    pub(crate) round_trip: Option<RoundTrip>,
    /// Memory plan. `None`: no run has been planned yet.
    pub(super) planned: Option<FittedPlan>,
    /// Last denoising loop of each program. A later request that differs only in prompts and seed reuses the loop.
    pub(super) loops: HashMap<ProgramKind, SharedLoop>,
    pub(super) written: HashMap<NetworkKey, Rc<Network>>,
    /// Cache of the connectors' RoPE tables, by program hash and number of tokens.
    pub(super) tables: BTreeMap<(String, usize), Rc<UploadedTables>>,
    /// Sums of the maps for previews, by decoder.
    pub(super) preview_maps: HashMap<String, SharedStatistics>,
    /// Preview thread of the last batch. It may still fit the map, while the videos of the batch are written.
    pub(super) last_previews: Weak<PreviewThread>,
    /// Time that the enhancement of prompts took before the next request, which reports it.
    pub(crate) enhancing: Option<PhaseTime>,
}

/// Everything that a cached network depends on, except the model, which is fixed for a runner.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct NetworkKey {
    program: ProgramKind,
    build: Build,
    /// Whether the vocoder clamps the output of its first stage, a setting of the model's configurations.
    vocoder_clamp: bool,
    sizes: NetworkSizes,
}

/// Sizes that a network depends on.
#[derive(PartialEq, Eq, Hash)]
pub(super) enum NetworkSizes {
    /// Dimensions of the inputs.
    Dims(Vec<usize>),
    /// Dimensions of a decoder's latents, and the format of its frames.
    Frames([usize; 5], Pixels),
    /// Shape `[b, f, h, w]` of the latents, and the tile that is decoded.
    Tile([usize; 4], FeatureTile),
    /// An upsampling step, and the batch size and channels of its latents.
    Upsampling(UpsamplingStep, [usize; 2]),
    Denoise(Box<DenoiseShape>),
}

impl<const N: usize> From<[usize; N]> for NetworkSizes {
    fn from(dims: [usize; N]) -> Self {
        NetworkSizes::Dims(dims.into())
    }
}

/// RoPE tables that have been uploaded, by argument name.
pub(super) type UploadedTables = Vec<(String, Rc<ShardedTensor>)>;

/// Denoising loop of an earlier request, whose RoPE tables and guidance scales are on the devices.
pub(super) struct SharedLoop {
    pub request: Request,
    pub shape: DenoiseShape,
    /// LoRA matrices in the loop's program.
    pub added_loras: Option<AddedLoras>,
    pub steps_loop: Rc<DenoiseLoop>,
}

impl Runner {
    /// Creates a runner without compiled programs or loaded parameters.
    pub fn new(model: OpenModel, executor: Executor, build: Build) -> Self {
        Runner {
            model,
            executor,
            build,
            h264: ImageH264::Auto,
            round_trip: None,
            planned: None,
            loops: HashMap::new(),
            written: HashMap::new(),
            tables: BTreeMap::new(),
            preview_maps: HashMap::new(),
            last_previews: Weak::new(),
            enhancing: None,
        }
    }

    /// Adds to the time of prompt enhancement. The host waits during this time, so it counts as time of the device.
    pub(crate) fn add_enhancement_time(&mut self, took: Duration) {
        let total = took + self.enhancing.map_or(Duration::ZERO, |before| before.total);
        self.enhancing = Some(PhaseTime { phase: Phase::PromptEnhancer, total, device: total });
    }

    /// Returns the network of `program` for the devices of this runner. Networks are cached, because building a program
    /// with many blocks takes as long as one or two denoising steps. `sizes`: all values that the program depends on,
    /// except for the model and the build options. `write`: builds the network.
    pub(super) fn network(
        &mut self,
        program: ProgramKind,
        sizes: impl Into<NetworkSizes>,
        write: impl Fn(&OpenModel, &Build) -> Result<Network>,
    ) -> Result<Rc<Network>> {
        let build = Build { added_loras: self.executor.added_loras(program), ..self.build.clone() };
        let vocoder_clamp = self.model.configs.vocoder_clamp;
        let key = NetworkKey { program, build: build.clone(), vocoder_clamp, sizes: sizes.into() };
        if let Some(known) = self.written.get(&key) {
            return Ok(known.clone());
        }
        let since = Instant::now();
        let network = self.executor.accepted(program.name(), &build, |build| write(&self.model, build))?;
        tracing::debug!(program = program.name(), seconds = since.elapsed().as_secs_f64(), "built the program");
        Ok(self.written.entry(key).or_insert(Rc::new(network)).clone())
    }

    /// Prepares the call of a program whose only input is a tensor of rank `N`. `write` builds the network for the
    /// dimensions of this tensor.
    pub(super) fn call_on<const N: usize>(
        &mut self,
        program: ProgramKind,
        input: &str,
        tensor: Tensor,
        write: impl Fn(&ModelConfigs, [usize; N], &Build) -> Result<Network>,
    ) -> Result<Call<'static>> {
        let dims = std::array::from_fn(|i| tensor.shape()[i]);
        let network = self.network(program, dims, |model, build| write(&model.configs, dims, build))?;
        self.call(program, &network, Inputs::default(), [(input.into(), tensor)])
    }

    /// Applies a memory plan to all following runs. If other weights are streamed than before, logs the choice and frees
    /// the parameters that the plan's programs read from another memory.
    pub(crate) fn follow(&mut self, planned: FittedPlan) {
        if self.build.streaming != planned.streaming {
            tracing::info!("{}", planned.choice);
            self.build.streaming = planned.streaming;
            self.forget_loops();
            self.executor.drop_misplaced(&planned.memories);
        }
        self.executor.keep(planned.keep, planned.host_limit(), planned.fits_host());
        if !self.executor.keeps_all() {
            self.tables.clear();
        }
        self.executor.engine().watchdog().needs(planned.needs(&self.executor));
        self.planned = Some(planned);
    }

    /// Adds the figures of the memory plan to an out-of-memory error. Returns other errors unchanged.
    pub(super) fn explain(&self, error: PipelineError) -> PipelineError {
        match &self.planned {
            Some(planned) => planned.explain(error, &self.executor, &self.build),
            None => error,
        }
    }

    pub(crate) fn forget_loops(&mut self) {
        self.loops.clear();
    }

    /// Drops the programs with these hashes, and all tables, networks and loops that belong to them.
    pub(crate) fn drop_programs(&mut self, dropped: &BTreeSet<String>) {
        self.tables.retain(|(hash, _), _| !dropped.contains(hash));
        self.written.retain(|_, network| !dropped.contains(&network.program.hash()));
        self.loops.retain(|_, known| !dropped.contains(known.steps_loop.program().hash()));
        self.executor.drop_programs(dropped);
    }
}
