//! Compiling the published model's programs for TPUs with none at hand.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ltx2::analysis::{Module, Report, report};
use ltx2::config::{Given, load};
use ltx2::models::Network;
use ltx2::pipeline::programs::{ProgramKind, Programs};
use ltx2::pipeline::request;
use ltx2::pjrt::discover::{self, Kind};
use ltx2::pjrt::{CompiledMemory, OptimizedProgram};
use ltx2::runtime::{Machine, Target};
use sha2::{Digest, Sha256};

/// A program of the published model at 48 or fewer blocks, in one layout, for one kind of machine.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// A shipped configuration.
    pub config: &'static str,
    pub program: ProgramKind,
    pub layout: &'static str,
    pub mesh: &'static str,
    pub target: &'static str,
    /// Width, height, frames.
    pub size: [usize; 3],
    /// Blocks of the transformer; all if not given.
    pub layers: Option<usize>,
    /// `runtime.attention`.
    pub attention: &'static str,
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
        }
    }
}

/// A compiled program.
pub struct Compiled {
    pub network: Network,
    pub report: Report,
    pub module: Module,
    pub memory: CompiledMemory,
    pub seconds: f64,
}

/// Seconds beyond which a compile is not remembered: beside other work it may take so long, and every later run would be told.
const SLOW: f64 = 300.0;

/// What the compiler makes of a program. Programs that it has seen are remembered under cargo's folder for tests, by
/// hash, options, target and plugin.
pub fn compiled(case: Case) -> Compiled {
    let [width, height, num_frames] = case.size;
    let set = [
        format!("request.width={width}"),
        format!("request.height={height}"),
        format!("layout={}", case.layout),
        format!("runtime.attention={}", case.attention),
    ];
    let given = Given {
        file: Some(case.config.into()),
        set: set.into_iter().chain([format!("request.num_frames={num_frames}")]).collect(),
        mesh: Some(case.mesh.into()),
        ..Given::default()
    };
    let config = load(&given).expect("a configuration").config;
    let programs = Programs::of(&config, case.layers).expect("the published model");
    let target: Target = case.target.parse().expect("a target");
    let machine = target.open().expect("a topology");
    let build = request::build(&config, machine.devices.len(), target.kind().name(), &machine.device_kind);
    let network = programs.network(case.program, &build.expect("a layout")).expect("builds");
    let (program, memory, seconds) = optimized(&machine, &network);
    let module = Module::decode(&program.format, &program.bytes).expect("a module");
    let stacked = programs.stacked(case.program).expect("a number");
    let report = report(&module, &network.program.mesh, stacked, target.chip().as_ref());
    Compiled { network, report, module, memory, seconds }
}

fn optimized(machine: &Machine, network: &Network) -> (OptimizedProgram, CompiledMemory, f64) {
    let options = ltx2::runtime::EngineOptions::default();
    let plugin = discover::find(Kind::Tpu, None).found.remove(0).path;
    let plugin = plugin.metadata().expect("libtpu's file");
    let asked = machine.compile_options(&network.program, &options);
    let key =
        format!("{} {asked:?} {} {:?}", network.program.hash(), machine.target, (plugin.len(), plugin.modified()));
    let key: String = Sha256::digest(key.as_bytes()).iter().map(|b| format!("{b:02x}")).collect();
    let file = |suffix: &str| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{key}.{suffix}"));
    let (program_file, figures_file) = (file("pb"), file("json"));
    // Tests that run at the same time compile a program once.
    static TURNS: Mutex<BTreeMap<String, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());
    let turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner).entry(key.clone()).or_default().clone();
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    let known = std::fs::read(&program_file).ok().zip(std::fs::read(&figures_file).ok());
    if let Some((bytes, (format, memory, seconds))) =
        known.and_then(|(bytes, figures)| Some((bytes, serde_json::from_slice(&figures).ok()?)))
    {
        return (OptimizedProgram { format, bytes }, memory, seconds);
    }
    let started = Instant::now();
    let compiled = machine.compile(&network.program, &options).expect("compiles");
    let seconds = started.elapsed().as_secs_f64();
    let memory = compiled.memory().expect("figures");
    let program = compiled.optimized_program().expect("an optimized program");
    if seconds > SLOW {
        return (program, memory, seconds);
    }
    std::fs::write(&program_file, &program.bytes).expect("writes");
    let figures = serde_json::to_vec(&(&program.format, memory, seconds)).expect("JSON");
    std::fs::write(&figures_file, figures).expect("writes");
    (program, memory, seconds)
}
