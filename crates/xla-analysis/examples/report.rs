//! Prints the loops, the collectives and the work of an optimized module (an `HloModuleProto` or
//! `HloModuleProtoWithConfig`).
//!
//! Run `cargo run --example report MODULE.pb [AXIS=SIZE,…] [CHIP or FILE.toml]`.

use anyhow::Context;
use ltx2_xla_analysis::{Chip, Module, report};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("usage: report MODULE.pb [AXIS=SIZE,…] [CHIP]")?;
    let mesh = arguments.next().unwrap_or_default();
    let axis = |text: &str| -> anyhow::Result<(String, usize)> {
        let (name, size) = text.split_once('=').with_context(|| format!("expected AXIS=SIZE, got '{text}'"))?;
        Ok((name.into(), size.parse()?))
    };
    let mesh = mesh.split(',').filter(|t| !t.is_empty()).map(axis).collect::<anyhow::Result<Vec<_>>>()?;
    let chip = arguments.next().map(|chip| Chip::find(&chip)).transpose()?;

    let bytes = std::fs::read(&path).with_context(|| path.clone())?;
    let module = Module::decode("hlo_with_config", &bytes).or_else(|_| Module::decode("hlo", &bytes))?;
    println!("{}: {} loops", module.name(), module.loops().len());
    let report = report(&module, &mesh, &[], chip.as_ref());
    println!("a step: {:.3} GFLOP, {:.3} MB of memory traffic", report.step.flops / 1e9, report.step.bytes / 1e6);
    for c in &report.collectives {
        println!("{:?} over {:?}, {:.0} bytes received, {} times, {}", c.kind, c.axes, c.wire_bytes, c.times, c.scope);
    }
    if let Some(time) = &report.predicted {
        println!("predicted: {:.3} ms a step", time.step);
    }
    Ok(())
}
