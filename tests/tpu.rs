//! The real model's programs through the TPU compiler, with no TPU at hand (`make test-tpu`).

mod common;

use std::time::Instant;

use ltx2::pjrt::discover::{self, Kind};
use ltx2::pjrt::{Attributes, CompileOptions, OptionValue, Plugin, Topology};

#[test]
fn libtpu_accepts_the_19b_programs() {
    let Some(found) = discover::find(Kind::Tpu, None).found.into_iter().next() else {
        assert!(std::env::var_os("LTX2_REQUIRE_TPU").is_none(), "no libtpu: run `ltx2 plugin install tpu`");
        eprintln!("SKIPPED, NOTHING WAS TESTED: no libtpu found; run `ltx2 plugin install tpu`");
        return;
    };
    for variable in ["TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"] {
        if std::env::var_os(variable).is_none() {
            assert!(std::env::var_os("LTX2_REQUIRE_TPU").is_none(), "set {variable}=1, as `make test-tpu` does");
            eprintln!("SKIPPED, NOTHING WAS TESTED: without {variable}=1 libtpu looks for chips; use `make test-tpu`");
            return;
        }
    }
    let plugin = Plugin::load(&found.path).expect("libtpu loads");
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
