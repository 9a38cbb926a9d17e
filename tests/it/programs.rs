//! The published model's programs, without weights: their size does not grow with the number of blocks, the CPU plugin
//! accepts them, they have the expected loops, and they copy no weight stack.

use crate::support::{self, needs};
use ltx2::analysis::{Loop, Module};
use ltx2::hlo::{Builder, DType, Type};
use ltx2::pjrt::OptionValue;
use ltx2::runtime::{CompiledProgram, Engine, EngineOptions, ExecutableOrigin};

fn module(executable: &CompiledProgram) -> Module {
    let program = executable.compiled().optimized_program().expect("an optimized program");
    Module::decode(&program.format, &program.bytes).expect("a module")
}

#[needs(cpu)]
fn published_program_size_is_independent_of_depth() {
    let [(_, prepare), (_, denoise)] = support::published("cpu");
    let short = support::published_blocks("cpu", Some(2));
    for (all, (name, two)) in [&prepare, &denoise].into_iter().zip(&short) {
        let [all, two] = [all, two].map(|network| network.program.text.lines().count());
        assert_eq!(all, two, "{name}: lines of the program");
    }

    let client = support::cpu(1);
    let engine = Engine::new(client, support::quick());
    engine.compile("prepare", &prepare.program).expect("accepted");
    let compiled = engine.compile("denoise", &denoise.program).expect("accepted");
    let module = module(&compiled);

    // One loop over the steps, and inside it one over the layers; attention may have an inner loop over query chunks.
    let loops = module.loops();
    assert_eq!(loops.len(), 1, "{loops:?}");
    let layers: Vec<&Loop> = loops[0].inner.iter().collect();
    assert_eq!(layers.len(), 1, "{loops:?}");
    assert!(layers[0].scope.contains("blocks"), "{loops:?}");

    let memory = compiled.compiled().memory().expect("figures");
    let weights = denoise.parameter_bytes() as i64;
    assert!(memory.temporaries < weights / 10, "temporaries {} of {weights} bytes of weights", memory.temporaries);
    // Values carried through both loops must not be copied as a whole.
    for i in module.instructions() {
        let moved = ["copy", "transpose", "convert"].contains(&i.opcode.as_str()) && i.dims.first() == Some(&48);
        assert!(!moved || i.elements < 48 * 2048 * 2048, "a stack is copied: {i:?}");
    }
}

#[needs(cpu)]
fn published_text_programs_use_loops_and_copy_no_weights() {
    let client = support::cpu(1);
    let engine = Engine::new(client, support::quick());
    for (name, network) in support::published_text("cpu") {
        let module = module(&engine.compile(name, &network.program).expect("accepted"));
        assert!(!module.loops().is_empty(), "{name}");
        let stacks: Vec<i64> = network.params.iter().map(|p| p.ty.elements() as i64).filter(|n| *n > 1 << 27).collect();
        for i in module.instructions() {
            let moved = ["copy", "transpose", "convert"].contains(&i.opcode.as_str());
            assert!(!moved || !stacks.contains(&i.elements), "{name} copies a stack: {i:?}");
        }
    }
}

#[needs(cpu)]
fn cache_key_includes_program_and_options() {
    let client = support::cpu(1);
    let folder = tempfile::tempdir().expect("a folder");
    let origin = |factor: f64, flags: &[(&str, bool)]| {
        let xla_flags = flags.iter().map(|(name, on)| ((*name).to_string(), OptionValue::Bool(*on))).collect();
        let options =
            EngineOptions { compile_cache: Some(folder.path().into()), xla_flags, ..EngineOptions::default() };
        let b = Builder::new("scaled");
        let x = b.argument("x", Type::new(DType::F32, [4]));
        let program = b.finish(&[("y", &(&x * factor))]).expect("builds");
        Engine::new(client.clone(), options).compile("scaled", &program).expect("compiles").origin()
    };
    let flags = [("xla_cpu_enable_fast_min_max", true)];
    assert_eq!([origin(2.0, &[]), origin(2.0, &[])], [ExecutableOrigin::Compiled, ExecutableOrigin::CacheHit]);
    assert_eq!([origin(3.0, &[]), origin(2.0, &flags)], [ExecutableOrigin::Compiled; 2]);
    assert_eq!([origin(3.0, &[]), origin(2.0, &flags), origin(2.0, &[])], [ExecutableOrigin::CacheHit; 3]);
}
