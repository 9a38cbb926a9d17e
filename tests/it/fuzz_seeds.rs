//! The contents of the fuzz seeds: without their loops or collectives they would not exercise the readers.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::support::needs;
use ltx2::analysis::{self, Chip, Loop, Module, Trace, XSpace};
use ltx2::hlo::DeviceMesh;

/// An optimized module of `fuzz/seeds/module`.
struct Seed {
    name: &'static str,
    chip: Option<&'static str>,
    /// Axis of the mesh that it was partitioned over.
    mesh: (&'static str, usize),
    /// Nested loops, as parentheses.
    loops: &'static str,
    /// Number of collectives of each kind: synchronous and asynchronous.
    collectives: &'static [(&'static str, usize, usize)],
    /// Starts and ends of asynchronous operations: of instructions, and of TPU fusions.
    pairs: [(usize, usize); 2],
}

const SEEDS: [Seed; 5] = [
    Seed {
        name: "tpu_v6e_gathers",
        chip: Some("v6e"),
        mesh: ("context", 8),
        loops: "()",
        collectives: &[("all-gather", 0, 7), ("all-reduce", 8, 0), ("all-to-all", 5, 0)],
        pairs: [(0, 0), (7, 7)],
    },
    Seed {
        name: "tpu_tpu7x_ring",
        chip: Some("tpu7x"),
        mesh: ("context", 8),
        loops: "(())",
        collectives: &[("all-reduce", 6, 0), ("all-to-all", 1, 0), ("collective-permute", 0, 4)],
        pairs: [(4, 4), (0, 0)],
    },
    Seed {
        name: "tpu_v5p_steps",
        chip: Some("v5p"),
        mesh: ("tensor", 4),
        loops: "(())",
        collectives: &[("all-reduce", 7, 0)],
        pairs: [(0, 0), (0, 0)],
    },
    Seed {
        name: "cuda_h200_steps",
        chip: Some("h200"),
        mesh: ("context", 4),
        loops: "()",
        collectives: &[("all-gather", 0, 1), ("all-to-all", 2, 4), ("collective-permute", 0, 1)],
        pairs: [(6, 6), (0, 0)],
    },
    Seed {
        name: "cpu_steps",
        chip: None,
        mesh: ("tensor", 4),
        loops: "(())",
        collectives: &[("all-reduce", 13, 0)],
        pairs: [(0, 0), (0, 0)],
    },
];

fn read(folder: &str, name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join(name)).expect("a seed")
}

/// Formats loops: `(())()` is a nested loop, followed by another loop.
fn nested(loops: &[Loop]) -> String {
    loops.iter().map(|l| format!("({})", nested(&l.inner))).collect()
}

/// Returns the platform, from features that only its compiler writes.
fn platform(module: &Module) -> &'static str {
    // Only TPU has other memory spaces than device memory; only CUDA calls a matmul library.
    match (module.listing().contains(":S(1)"), module.instructions().any(|i| i.target.starts_with("__cublas"))) {
        (true, false) => "tpu",
        (false, true) => "cuda",
        _ => "cpu",
    }
}

#[needs(nothing)]
fn module_seeds_have_the_expected_loops_and_collectives() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/module");
    assert_eq!(fs::read_dir(folder).expect("seeds").count(), SEEDS.len());
    for seed in &SEEDS {
        let name = seed.name;
        let bytes = read("fuzz/seeds/module", &format!("{name}.pb"));
        // Decodes the first byte like fuzz/src/lib.rs.
        let format = if bytes[0].is_multiple_of(2) { "hlo_with_config" } else { "hlo" };
        let chip = Chip::all().get(usize::from(bytes[0] / 2));
        assert_eq!(chip.map(|c| c.name.as_str()), seed.chip, "{name}");
        let module = Module::decode(format, &bytes[1..]).expect("a module");
        assert_eq!(Some(platform(&module)), name.split('_').next(), "{name}");
        assert_eq!(nested(&module.loops()), seed.loops, "{name}");

        let mesh = DeviceMesh::new(&[seed.mesh]);
        let report = analysis::report(&module, &mesh.axes, &[2], chip);
        let mut kinds: BTreeMap<_, (usize, usize)> = BTreeMap::new();
        for c in &report.collectives {
            assert_eq!(c.axes, [seed.mesh.0], "{name}: {c:?}");
            let count = kinds.entry(c.kind).or_default();
            *(if c.asynchronous { &mut count.1 } else { &mut count.0 }) += 1;
        }
        let kinds: Vec<_> =
            kinds.into_iter().map(|(kind, (sync, background))| (kind.name(), sync, background)).collect();
        assert_eq!(kinds, seed.collectives, "{name}");

        let count = |wanted: &dyn Fn(&analysis::Instruction) -> bool| module.instructions().filter(wanted).count();
        let ends = |end: &str| count(&|i| i.opcode.ends_with(end) && !i.opcode.starts_with("copy"));
        let marks = |target: &str| count(&|i| i.target == target);
        let pairs = [(ends("-start"), ends("-done")), (marks("AsyncCollectiveStart"), marks("AsyncCollectiveDone"))];
        assert_eq!(pairs, seed.pairs, "{name}");
    }
}

#[needs(nothing)]
fn trace_fixtures_have_the_expected_collectives() {
    // Starts and ends in the programs; milliseconds of overlapped and exposed collectives.
    let seeds = [("two_devices", 2, 0.0125, 0.015), ("two_h200", 4, 0.0103, 0.1171), ("one_tpu", 3, 0.06, 0.031)];
    for (name, ends, overlapped, exposed) in seeds {
        let space = XSpace::read(&read("tests/fixtures/trace", &format!("{name}.xplane.pb"))).expect("a trace");
        let programs = space.programs().map(|bytes| Module::decode("hlo_with_config", bytes).expect("a program"));
        let is_end = |i: &analysis::Instruction| {
            let copy = i.opcode.starts_with("copy");
            i.target.starts_with("AsyncCollective")
                || (!copy && (i.opcode.ends_with("-start") || i.opcode.ends_with("-done")))
        };
        let found: usize = programs.map(|p| p.instructions().filter(&is_end).count()).sum();
        let trace = Trace::from_space(&space, None).expect("devices");
        let collectives = trace.categories.iter().filter(|s| s.category.is_collective());
        let ms = collectives
            .filter_map(|s| s.overlapped_ms.zip(s.exposed_ms))
            .fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        assert_eq!(found, ends, "{name}");
        assert!((ms.0 - overlapped).abs() < 1e-4 && (ms.1 - exposed).abs() < 1e-4, "{name}: {ms:?}");
    }
}
