//! A model that is ready to run: its weights and programs on the devices, kept from request to request.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use super::denoise_loop::DenoiseLoop;
use super::error::PipelineError;
use super::executor::Executor;
use super::memory::Planned;
use super::model::Model;
use super::program_table::ProgramKind;
use crate::media::{ImageH264, RoundTrip};
use crate::models::Network;
use crate::nn::Build;
use crate::request::Request;
use crate::runtime::ShardedTensor;
use crate::sampling::denoise::DenoiseShape;

/// A model, the devices it runs on, and how its networks become programs there.
pub struct Runner {
    pub model: Model,
    pub executor: Executor,
    /// How networks become programs.
    pub build: Build,
    /// Encoder of conditioning images (`conditioning.h264`), which the first of them decides for this host.
    pub h264: ImageH264,
    /// The same once it is decided.
    pub(crate) round_trip: Option<RoundTrip>,
    /// Plan of the devices' memory; none before a run is planned.
    pub(super) planned: Option<Planned>,
    /// The last loop of each name, with what the requests that can share it have in common.
    pub(super) loops: HashMap<&'static str, SharedLoop>,
    /// Networks as they were written, by program and everything that fixes it.
    pub(super) written: BTreeMap<(ProgramKind, String), Rc<Network>>,
    /// The connectors' tables on the devices, by their program's hash and tokens.
    pub(super) tables: BTreeMap<(String, usize), Rc<Tables>>,
}

/// Tables on the devices, by argument name.
pub(super) type Tables = Vec<(String, Rc<ShardedTensor>)>;

/// A loop of an earlier request: its program as it is written, with tables and scales on the devices.
pub(super) struct SharedLoop {
    pub request: Request,
    pub shape: DenoiseShape,
    pub steps_loop: Rc<DenoiseLoop>,
}

impl Runner {
    /// Nothing compiled, nothing loaded.
    pub fn new(model: Model, executor: Executor, build: Build) -> Self {
        Runner {
            model,
            executor,
            build,
            h264: ImageH264::Auto,
            round_trip: None,
            planned: None,
            loops: HashMap::new(),
            written: BTreeMap::new(),
            tables: BTreeMap::new(),
        }
    }

    /// From here on, memory is used as it was planned.
    pub(crate) fn follow(&mut self, planned: Planned) {
        self.executor.keep(planned.keep);
        if !self.executor.keeps_all() {
            self.tables.clear();
        }
        self.executor.engine().watchdog().needs(planned.needs(&self.executor));
        self.planned = Some(planned);
    }

    /// An error of a run; of too little memory in the plan's words.
    pub(super) fn explain(&self, error: PipelineError) -> PipelineError {
        match &self.planned {
            Some(planned) => planned.explain(error, &self.executor, &self.build),
            None => error,
        }
    }

    /// Drops loops of earlier requests.
    pub(crate) fn forget_loops(&mut self) {
        self.loops.clear();
    }

    /// Drops programs, by their hashes, with what is kept for them.
    pub(crate) fn drop_programs(&mut self, dropped: &BTreeSet<String>) {
        self.tables.retain(|(hash, _), _| !dropped.contains(hash));
        self.written.retain(|_, network| !dropped.contains(&network.program.hash()));
        self.loops.retain(|_, known| !dropped.contains(known.steps_loop.program().hash()));
        self.executor.drop_programs(dropped);
    }
}
