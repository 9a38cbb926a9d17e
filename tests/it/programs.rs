//! The real model's programs, without its weights: no longer for more blocks, accepted by the CPU plugin, with the loops
//! they should have and no copy of a stack of weights.

use crate::support::{self, needs};
use ltx2::analysis::{Loop, Module};
use ltx2::hlo::{Builder, DType, Type};
use ltx2::pjrt::OptionValue;
use ltx2::runtime::{Engine, EngineOptions, Executable, ExecutableOrigin};

fn module(executable: &Executable) -> Module {
    let program = executable.compiled().optimized_program().expect("an optimized program");
    Module::decode(&program.format, &program.bytes).expect("a module")
}

#[needs(cpu)]
fn the_19b_program_is_as_short_as_one_of_two_blocks_and_the_cpu_plugin_accepts_it() {
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

    // One loop over the steps, one over the layers inside; attention may take its queries in chunks below.
    let loops = module.loops();
    assert_eq!(loops.len(), 1, "{loops:?}");
    let layers: Vec<&Loop> = loops[0].inner.iter().collect();
    assert_eq!(layers.len(), 1, "{loops:?}");
    assert!(layers[0].scope.contains("blocks"), "{loops:?}");

    let memory = compiled.compiled().memory().expect("figures");
    let weights = denoise.parameter_bytes() as i64;
    assert!(memory.temporaries < weights / 10, "temporaries {} of {weights} bytes of weights", memory.temporaries);
    // What is carried through both loops must not be moved as a whole.
    for i in module.instructions() {
        let moved = ["copy", "transpose", "convert"].contains(&i.opcode.as_str()) && i.dims.first() == Some(&48);
        assert!(!moved || i.elements < 48 * 2048 * 2048, "a stack is copied: {i:?}");
    }
}

#[needs(cpu)]
fn the_published_text_programs_loop_over_layers_and_copy_no_stack() {
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

/// The compile cache tells programs apart, and the options that they are compiled with.
#[needs(cpu)]
fn an_entry_is_of_its_program_and_its_options() {
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
