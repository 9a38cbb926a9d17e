//! Programs of the published model, compiled for TPUs without TPU devices.

use ltx2::pipeline::plan::setup;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ltx2::analysis::{Module, Report, report};
use ltx2::config::{CliOverrides, load};
use ltx2::hlo::Program;
use ltx2::models::Network;
use ltx2::nn::Build;
use ltx2::pipeline::programs::build::{ProgramKind, Programs};
use ltx2::pjrt::CompiledMemory;
use ltx2::runtime::{CompileOutcome, EngineOptions, ModuleStore, OpenTarget, StoredModule, Target};

/// Program of the published model with at most 48 blocks, in one layout, for one target.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Name of a shipped configuration.
    pub config: &'static str,
    pub program: ProgramKind,
    /// Layout and mesh; if empty, those of the configuration.
    pub layout: &'static str,
    pub mesh: &'static str,
    pub target: &'static str,
    /// Width, height, frames.
    pub size: [usize; 3],
    /// Number of transformer blocks; `None`: all.
    pub layers: Option<usize>,
    /// `runtime.attention`.
    pub attention: &'static str,
    /// Additional configuration settings.
    pub set: &'static [&'static str],
}

impl Case {
    pub fn denoise(layout: &'static str, mesh: &'static str, target: &'static str) -> Self {
        Case {
            config: "ltx2",
            program: ProgramKind::Denoise,
            layout,
            mesh,
            target,
            size: [768, 512, 121],
            layers: None,
            attention: "auto",
            set: &[],
        }
    }

    /// Returns the denoising loop of a slice's configuration, with its layout and mesh.
    pub fn shipped(config: &'static str, target: &'static str) -> Self {
        Case { config, ..Case::denoise("", "", target) }
    }
}

/// A compiled program.
pub struct Compiled {
    pub network: Network,
    pub report: Report,
    pub module: Module,
    pub memory: CompiledMemory,
    /// Memory in bytes that a program may use on a device.
    pub capacity: Option<i64>,
    pub seconds: f64,
}

/// Returns the optimized module of a program, from a store below cargo's folder for tests if it was compiled before.
pub fn compiled(case: Case) -> Compiled {
    let (programs, target, machine, network) = written(case);
    let StoredModule { optimized, memory, seconds } = module(&machine, &network.program);
    let module = Module::decode(&optimized.format, &optimized.bytes).expect("a module");
    let stacked = programs.stacked(case.program).expect("a number");
    let report = report(&module, &network.program.mesh.axes, &stacked, target.chip().as_ref());
    Compiled { network, report, module, memory, capacity: machine.capacity, seconds }
}

/// Returns the bytes of all components' parameters per device in a run.
pub fn parameter_bytes(case: Case) -> usize {
    let (programs, _, _, build) = opened(case);
    programs.parameters(&build).expect("a layout of every program").values().sum()
}

/// Returns the compile time in seconds, measured without the store.
pub fn seconds(case: Case) -> f64 {
    let (_, _, machine, network) = written(case);
    let started = Instant::now();
    machine.compile(&network.program, &EngineOptions::default()).expect("compiles");
    started.elapsed().as_secs_f64()
}

fn written(case: Case) -> (Programs, Target, OpenTarget, Network) {
    let (programs, target, machine, build) = opened(case);
    let network = programs.network(case.program, &build).expect("builds");
    (programs, target, machine, network)
}

fn opened(case: Case) -> (Programs, Target, OpenTarget, Build) {
    let [width, height, num_frames] = case.size;
    let set = [
        format!("request.width={width}"),
        format!("request.height={height}"),
        format!("request.num_frames={num_frames}"),
        format!("runtime.attention={}", case.attention),
    ];
    let layout = (!case.layout.is_empty()).then(|| format!("layout={}", case.layout));
    let more = case.set.iter().map(ToString::to_string);
    let given = CliOverrides {
        files: vec![case.config.into()],
        set: set.into_iter().chain(layout).chain(more).collect(),
        mesh: (!case.mesh.is_empty()).then(|| case.mesh.into()),
        ..CliOverrides::default()
    };
    let config = load(&given).expect("a configuration").config;
    let programs = Programs::from_config(&config, case.layers).expect("the published model");
    let target: Target = case.target.parse().expect("a target");
    let machine = target.open().expect("a topology");
    let build = setup::build(&config, machine.devices.len(), target.platform().name(), &machine.device_kind);
    (programs, target, machine, build.expect("a layout"))
}

/// Returns the optimized module of a program.
pub fn module(machine: &OpenTarget, program: &Program) -> StoredModule {
    try_module(machine, program).expect("compiles")
}

/// Returns whether a target is selected: `LTX2_TEST_CHIP=v6e` skips other chips.
pub fn is_chosen(target: &str) -> bool {
    std::env::var("LTX2_TEST_CHIP").map_or(true, |chip| target.starts_with(&format!("tpu:{chip}:")))
}

/// Returns the optimized module of a program, from [`modules`](super::modules) if it was compiled before.
pub fn try_module(machine: &OpenTarget, program: &Program) -> Result<StoredModule, String> {
    let options = EngineOptions::default();
    let store = ModuleStore::new(&super::modules());
    let key = store.key(machine, program, &options).expect("the plugin's file");
    // Lets concurrent tests compile a program only once.
    static TURNS: Mutex<BTreeMap<String, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());
    let turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner).entry(key.hash()).or_default().clone();
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(CompileOutcome::Module(known)) = store.get(&key).expect("readable") {
        return Ok(known);
    }
    let started = Instant::now();
    let compiled = machine.compile(program, &options).map_err(|e| e.to_string())?;
    let seconds = started.elapsed().as_secs_f64();
    let memory = compiled.memory().expect("figures");
    let module = StoredModule { optimized: compiled.optimized_program().expect("a module"), memory, seconds };
    store.put(&key, &CompileOutcome::Module(module.clone())).expect("writes");
    Ok(module)
}
