//! The real model's programs through the TPU compiler, with no TPU at hand (`make test-tpu`).

mod common;

use common::tpu::libtpu;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ltx2::analysis::Module;
use ltx2::config::{Config, parse_mesh};
use ltx2::dtype::DType;
use ltx2::models::presets::Preset;
use ltx2::models::video_vae::{DecoderConfig, decoder_program};
use ltx2::nn::{Build, Lowering};
use ltx2::pjrt::{Attributes, CompileOptions, OptionValue, Topology};
use ltx2::runtime::flags;

#[test]
fn libtpu_accepts_the_19b_programs() {
    let Some(plugin) = libtpu() else { return };
    let topology = Topology::new(&plugin, "v5p:2x2x1", &Attributes::new()).expect("a v5p-8 topology");
    let options = CompileOptions::single().flag("xla_allow_excess_precision", OptionValue::Bool(false));
    for (name, network) in common::published("tpu").into_iter().chain(common::published_text("tpu")) {
        let start = Instant::now();
        let compiled = topology.compile(&network.program.text, &options).expect("accepted");
        let memory = compiled.memory().expect("figures");
        eprintln!("{name}: compiled in {:?}, {memory:?}", start.elapsed());
        assert!(memory.arguments >= network.parameter_bytes() as i64, "{memory:?}");
    }
}

/// The published video decoder at 768x512x121, its rows over eight chips: compiled in ten minutes, and nothing moves
/// between chips but the edges of blocks.
#[test]
#[ignore = "takes minutes"]
fn the_split_video_decoder_compiles_in_ten_minutes() {
    let Some(plugin) = libtpu() else { return };
    let preset = Preset::named("ltx2").expect("the published configuration");
    let c = DecoderConfig::from_json(preset.config("vae").expect("a configuration")).expect("valid");
    let mesh = Some(parse_mesh("context=8").expect("a mesh"));
    let layout = Config { layout: "sequence".into(), mesh, ..Config::default() }.placement(8).expect("a layout");
    let build = Build { layout, lowering: Lowering::of("tpu", ""), ..Build::new(DType::BF16) };
    let network = decoder_program(&c, [1, 16, 16, 24], &build).expect("builds");
    let topology = Topology::new(&plugin, "v6e:2x4", &Attributes::new()).expect("a v6e-8 topology");
    let options = CompileOptions::partitioned(8);
    let options = flags::defaults("tpu").into_iter().fold(options, |o, (name, value)| o.flag(name, value));
    let start = Instant::now();
    let compiled = topology.compile(&network.program.text, &options).expect("accepted");
    let took = start.elapsed();
    let program = compiled.optimized_program().expect("an optimized program");
    let module = Module::decode(&program.format, &program.bytes).expect("a module");
    let moves = ["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"];
    let mut counts: BTreeMap<String, (usize, i64)> = BTreeMap::new();
    for i in module.instructions() {
        if moves.iter().any(|m| i.opcode.starts_with(m)) && !i.opcode.ends_with("-done") {
            let count = counts.entry(i.opcode).or_default();
            *count = (count.0 + 1, count.1 + i.elements);
        }
    }
    let loops = module.loops().len();
    eprintln!("compiled in {took:?}, {:?}, {loops} loops, {counts:?}", compiled.memory().expect("figures"));
    assert!(took <= Duration::from_secs(600), "compiled in {took:?}");
    assert!(counts.keys().all(|k| k.starts_with("collective-permute")), "{counts:?}");
    // The stages with several equal blocks are loops.
    assert!(loops >= c.stages.iter().filter(|s| s.layers > 1).count(), "{loops} loops");
}
