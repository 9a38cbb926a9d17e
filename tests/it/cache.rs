//! The compile cache: which entries are hits.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::support::{needs, quick};
use ltx2::hlo::{Argument, Builder, DType, Program, ProgramOutput, Type};
use ltx2::pjrt::discover::{self, Platform};
use ltx2::pjrt::{Client, CpuOptions, Plugin};
use ltx2::runtime::{Engine, EngineOptions, ExecutableOrigin};
use ltx2::tensor::Tensor;
use ndarray::arr1;
use serde_json::Value;

fn program() -> Program {
    let b = Builder::new("double");
    let ty = Type::new(DType::F32, [4]);
    let x = b.argument_with(Argument::new("x", ty.clone()));
    b.finish_with(vec![(ProgramOutput::new("y", ty), &x + &x)]).expect("a program")
}

/// Creates an engine with a cache folder.
fn engine(plugin: &Path, folder: &Path, devices: usize) -> Engine {
    engine_that_writes(plugin, folder, devices, None)
}

fn engine_that_writes(plugin: &Path, folder: &Path, devices: usize, write_behind: Option<bool>) -> Engine {
    let plugin = Plugin::load(plugin).expect("the plugin loads");
    let cpu = CpuOptions { devices: Some(devices), ..CpuOptions::default() };
    let client = Client::new(&plugin, &cpu.to_attributes()).expect("a client");
    let options = EngineOptions { compile_cache: Some(folder.into()), write_behind, ..quick() };
    Engine::new(client, options)
}

/// Returns the origin of the program's executable in a new engine.
fn origin(plugin: &Path, folder: &Path, devices: usize) -> ExecutableOrigin {
    engine(plugin, folder, devices).compile("double", &program()).expect("compiles").origin()
}

#[needs(cpu)]
fn cache_entry_of_another_plugin_is_a_miss() {
    let dir = tempfile::tempdir().expect("a folder");
    let entries = || -> Vec<PathBuf> {
        let all = fs::read_dir(dir.path().join("cache")).expect("a cache");
        all.map(|e| e.expect("an entry").path()).collect()
    };
    let origin = |plugin: &Path| origin(plugin, &dir.path().join("cache"), 1);
    let own = discover::find(Platform::Cpu, None).found.remove(0).path;
    assert_eq!(origin(&own), ExecutableOrigin::Compiled);
    assert_eq!(origin(&own), ExecutableOrigin::CacheHit);
    let first = entries().remove(0);
    let whole = fs::read(&first).expect("an entry");

    // Simulates another build of the plugin with one more byte.
    let other = dir.path().join("pjrt_c_api_cpu_plugin.so");
    fs::copy(&own, &other).expect("copied");
    OpenOptions::new().append(true).open(&other).and_then(|mut file| file.write_all(b"\n")).expect("written");
    assert_eq!(origin(&other), ExecutableOrigin::Compiled);
    assert_eq!(origin(&other), ExecutableOrigin::CacheHit);
    let second = entries().into_iter().find(|entry| *entry != first).expect("an entry of its own");
    assert_eq!(entries().len(), 2);

    // The other plugin's entry under the name of the first one's is rejected because of its header, and replaced.
    fs::copy(&second, &first).expect("copied");
    assert_eq!(origin(&own), ExecutableOrigin::Compiled);
    let plugin = |entry: &[u8]| -> Value {
        let header = entry.split(|b| *b == b'\n').next().expect("a line");
        serde_json::from_slice::<Value>(header).expect("JSON")["plugin"].clone()
    };
    assert_eq!(plugin(&fs::read(&first).expect("an entry")), plugin(&whole));
    assert_ne!(plugin(&fs::read(&second).expect("an entry")), plugin(&whole));
    assert_eq!(origin(&own), ExecutableOrigin::CacheHit);
}

/// The third engine has more devices, which the program does not use.
#[needs(cpu)]
fn concurrent_compiles_of_one_program_run_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let own = discover::find(Platform::Cpu, None).found.remove(0).path;
    let mut origins = std::thread::scope(|scope| {
        let threads = [0, 1].map(|_| scope.spawn(|| origin(&own, dir.path(), 1)));
        threads.map(|thread| format!("{:?}", thread.join().expect("no panic")))
    });
    origins.sort();
    assert_eq!(origins, ["CacheHit", "Compiled"]);
    assert_eq!(origin(&own, dir.path(), 8), ExecutableOrigin::CacheHit);
}

/// Some plugins cannot run a program while they serialize it, so the entry is written in the background after the first
/// run, or at exit.
#[needs(cpu)]
fn deferred_entry_is_written_after_first_run_or_at_exit() {
    let own = discover::find(Platform::Cpu, None).found.remove(0).path;
    for runs in [true, false] {
        let dir = tempfile::tempdir().expect("a folder");
        let entries = || fs::read_dir(dir.path()).expect("a cache").count();
        let engine = engine_that_writes(&own, dir.path(), 1, Some(true));
        let executable = engine.compile("double", &program()).expect("compiles");
        assert_eq!(entries(), 0, "nothing is written before it runs");
        if runs {
            let x = engine.upload(&executable, "x", &Tensor::from(arr1(&[1.0f32; 4]))).expect("uploads");
            engine.run(&executable, |_| Some(&x)).expect("runs");
            // Another compile of the program waits for the entry.
            assert_eq!(engine.compile("double", &program()).expect("loads").origin(), ExecutableOrigin::CacheHit);
        }
        drop((executable, engine));
        assert_eq!(entries(), 1);
        assert_eq!(origin(&own, dir.path(), 1), ExecutableOrigin::CacheHit);
    }
    // On CPU the entry is written immediately unless configured otherwise: another process may be waiting for it.
    let dir = tempfile::tempdir().expect("a folder");
    let engine = engine(&own, dir.path(), 1);
    engine.compile("double", &program()).expect("compiles");
    assert_eq!(fs::read_dir(dir.path()).expect("a cache").count(), 1);
}
