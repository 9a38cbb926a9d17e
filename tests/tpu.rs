//! The real model's programs through the TPU compiler, with no TPU at hand (`make test-tpu`).

use std::time::Instant;

use ltx2::dtype::DType;
use ltx2::models::presets::Preset;
use ltx2::models::transformer::TransformerConfig;
use ltx2::nn::{Build, Lowering};
use ltx2::pjrt::discover::{self, Kind};
use ltx2::pjrt::{Attributes, CompileOptions, OptionValue, Plugin, Topology};
use ltx2::sampling::denoise::{DenoiseShape, denoise, prepare};
use ltx2::sampling::guidance::{Branch, RescaleScope};

#[test]
fn libtpu_accepts_the_19b_programs() {
    let Some(found) = discover::find(Kind::Tpu, None).found.into_iter().next() else {
        assert!(std::env::var_os("LTX2_REQUIRE_TPU").is_none(), "no libtpu: run `ltx2 plugin install tpu`");
        eprintln!("SKIPPED, NOTHING WAS TESTED: no libtpu found; run `ltx2 plugin install tpu`");
        return;
    };
    let plugin = Plugin::load(&found.path).expect("libtpu loads");
    let topology = Topology::new(&plugin, "v5p:2x2x1", &Attributes::new()).expect("a v5p-8 topology");
    let preset = Preset::named("ltx2").expect("the published configuration");
    let c = TransformerConfig::from_json(preset.config("transformer").expect("a transformer")).expect("valid");
    let build = Build { lowering: Lowering::of("tpu"), ..Build::new(DType::BF16) };
    let shape = DenoiseShape {
        batch: 1,
        branches: vec![Branch::Conditional, Branch::Negative],
        tokens: [6144, 126],
        text: 1024,
        text_channels: [3840, 3840],
        stg_blocks: vec![],
        rescale: RescaleScope::PerSample,
    };
    let options = CompileOptions::single().flag("xla_allow_excess_precision", OptionValue::Bool(false));
    for (name, network) in [("prepare", prepare(&c, &shape, &build)), ("denoise", denoise(&c, &shape, &build))] {
        let network = network.expect("builds");
        let start = Instant::now();
        let compiled = topology.compile(&network.program.text, &options).expect("accepted");
        let memory = compiled.memory().expect("figures");
        eprintln!("{name}: compiled in {:?}, {memory:?}", start.elapsed());
        assert!(memory.arguments >= network.parameter_bytes() as i64, "{memory:?}");
    }
    // libtpu does not end cleanly inside a test harness' threads.
    std::process::exit(0);
}
