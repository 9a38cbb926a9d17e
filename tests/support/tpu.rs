//! The published model's programs, compiled for TPUs without one.

use ltx2::pipeline::setup;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ltx2::analysis::{Module, Report, report};
use ltx2::config::{CliOverrides, load};
use ltx2::hlo::Program;
use ltx2::models::Network;
use ltx2::nn::Build;
use ltx2::pipeline::programs::{ProgramKind, Programs};
use ltx2::pjrt::CompiledMemory;
use ltx2::runtime::{CompileOutcome, EngineOptions, ModuleStore, OpenTarget, StoredModule, Target};

/// A program of the published model at 48 or fewer blocks, in one layout, for one kind of machine.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// A shipped configuration.
    pub config: &'static str,
    pub program: ProgramKind,
    /// Layout and mesh; the configuration's where they are empty.
    pub layout: &'static str,
    pub mesh: &'static str,
    pub target: &'static str,
    /// Width, height, frames.
    pub size: [usize; 3],
    /// Blocks of the transformer; all if not given.
    pub layers: Option<usize>,
    /// `runtime.attention`.
    pub attention: &'static str,
    /// Further keys of the configuration.
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

    /// The denoising loop of a slice's file, with layout and mesh of its own.
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
    /// Bytes that a program may use on a device.
    pub capacity: Option<i64>,
    pub seconds: f64,
}

/// Optimized module of a program. Programs that it has seen are kept in a store of modules under cargo's folder for
/// tests.
pub fn compiled(case: Case) -> Compiled {
    let (programs, target, machine, network) = written(case);
    let StoredModule { optimized, memory, seconds } = module(&machine, &network.program);
    let module = Module::decode(&optimized.format, &optimized.bytes).expect("a module");
    let stacked = programs.stacked(case.program).expect("a number");
    let report = report(&module, &network.program.mesh.axes, &stacked, target.chip().as_ref());
    Compiled { network, report, module, memory, capacity: machine.capacity, seconds }
}

/// Bytes of the parameters of all components of a run on a device.
pub fn parameter_bytes(case: Case) -> usize {
    let (programs, _, _, build) = opened(case);
    programs.parameters(&build).expect("a layout of every program").values().sum()
}

/// Seconds that the compiler takes, whatever is known.
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
    let programs = Programs::of(&config, case.layers).expect("the published model");
    let target: Target = case.target.parse().expect("a target");
    let machine = target.open().expect("a topology");
    let build = setup::build(&config, machine.devices.len(), target.platform().name(), &machine.device_kind);
    (programs, target, machine, build.expect("a layout"))
}

/// Optimized module of a program.
pub fn module(machine: &OpenTarget, program: &Program) -> StoredModule {
    try_module(machine, program).expect("compiles")
}

/// Whether a target is asked for: `LTX2_TEST_CHIP=v6e` leaves the other chips out.
pub fn is_chosen(target: &str) -> bool {
    std::env::var("LTX2_TEST_CHIP").map_or(true, |chip| target.starts_with(&format!("tpu:{chip}:")))
}

/// Optimized module of a program; that of a program it has seen is kept in [`modules`](super::modules).
pub fn try_module(machine: &OpenTarget, program: &Program) -> Result<StoredModule, String> {
    let options = EngineOptions::default();
    let store = ModuleStore::new(&super::modules());
    let key = store.key(machine, program, &options).expect("the plugin's file");
    // Tests that run at the same time compile a program once.
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
