//! Compiling for TPUs with none at hand.

use std::time::Instant;

use ltx2::config::{Config, parse_mesh};
use ltx2::dtype::DType;
use ltx2::models::Network;
use ltx2::models::presets::Preset;
use ltx2::models::transformer::TransformerConfig;
use ltx2::nn::{Build, Lowering};
use ltx2::pjrt::discover::{self, Kind};
use ltx2::pjrt::{Attributes, Executable, Plugin, Topology};
use ltx2::runtime::{EngineOptions, compile_options};
use ltx2::sampling::denoise::{DenoiseShape, denoise};
use ltx2::sampling::guidance::{Branch, RescaleScope};

/// libtpu; `None`, said loudly, when it is not there and not required.
pub fn libtpu() -> Option<Plugin> {
    let Some(found) = discover::find(Kind::Tpu, None).found.into_iter().next() else {
        assert!(std::env::var_os("LTX2_REQUIRE_TPU").is_none(), "no libtpu: run `ltx2 plugin install tpu`");
        eprintln!("SKIPPED, NOTHING WAS TESTED: no libtpu found; run `ltx2 plugin install tpu`");
        return None;
    };
    for variable in ["TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"] {
        if std::env::var_os(variable).is_none() {
            assert!(std::env::var_os("LTX2_REQUIRE_TPU").is_none(), "set {variable}=1, as `make test-tpu` does");
            eprintln!("SKIPPED, NOTHING WAS TESTED: without {variable}=1 libtpu looks for chips; use `make test-tpu`");
            return None;
        }
    }
    Some(Plugin::load(&found.path).expect("libtpu loads"))
}

/// The published model's denoising loop, cut to `layers` blocks, for a conditional and a negative branch, compiled for
/// a topology; with the seconds that took.
pub fn denoise_on(
    plugin: &Plugin,
    target: &str,
    layout: &str,
    mesh: &str,
    tokens: usize,
    layers: usize,
) -> (Network, Executable, f64) {
    let preset = Preset::named("ltx2").expect("the published configuration");
    let mut json = preset.config("transformer").expect("a transformer").clone();
    json["num_layers"] = layers.into();
    let c = TransformerConfig::from_json(&json).expect("valid");
    let topology = Topology::new(plugin, target, &Attributes::new()).expect("a topology");
    let devices = topology.devices().expect("devices");
    let mesh = parse_mesh(mesh).expect("a mesh");
    let config = Config { layout: layout.into(), mesh: Some(mesh), ..Config::default() };
    let layout = config.placement(devices.len()).expect("a layout");
    let lowering = Lowering::of("tpu", &devices[0].kind);
    let build = Build { layout, lowering, ..Build::new(DType::BF16) };
    let shape = DenoiseShape {
        batch: 1,
        branches: vec![Branch::Conditional, Branch::Negative],
        tokens: [tokens, 126],
        text: 1024,
        text_channels: [3840, 3840],
        stg_blocks: vec![],
        rescale: RescaleScope::PerSample,
    };
    let network = denoise(&c, &shape, &build).expect("builds");
    let ids: Vec<i32> = devices.iter().map(|d| d.id).collect();
    let options = compile_options("tpu", &network.program, &ids, &EngineOptions::default());
    let start = Instant::now();
    let executable = topology.compile(&network.program.text, &options).expect("accepted");
    (network, executable, start.elapsed().as_secs_f64())
}
