//! Where collectives come from: a feed-forward layer on eight devices, placed in three ways. Each program is compiled,
//! and the collectives that the compiler inserts are printed. Nothing runs and no hardware is needed.
//!
//! `cargo run --example sharded_ffn`. With libtpu (`ltx2 plugin install tpu`) and `TPU_SKIP_MDS_QUERY=1
//! ALLOW_MULTIPLE_LIBTPU_LOAD=1` set it compiles for TPUs; else for virtual devices of the CPU plugin.

use ltx2::analysis::{Module, report};
use ltx2::hlo::DType::BF16;
use ltx2::hlo::{Argument, Builder, Mesh, Output, Program, Sharding, Type};
use ltx2::pjrt::discover::{self, Platform};
use ltx2::pjrt::{Attributes, Client, ClientOptions, CompileOptions, CpuOptions, OptimizedProgram, OptionValue};
use ltx2::pjrt::{Plugin, Topology, quiet_plugins};

/// LTX-2's video stream: tokens of 768x512x121, width of the residual stream, inner width of the layer.
const TOKENS: usize = 6144;
const EMBED: usize = 4096;
const MLP: usize = 16384;

/// For each logical axis the mesh axes that split it, as in a file of `shardings/`.
#[derive(Clone, Copy)]
struct Rules {
    tokens: &'static [&'static str],
    embed: &'static [&'static str],
    mlp: &'static [&'static str],
}

/// `gelu(x · up) · down` (GELU in its sigmoid form), every tensor placed by the rules.
fn feed_forward(mesh: &Mesh, rules: Rules) -> anyhow::Result<Program> {
    let b = Builder::new("feed_forward").with_mesh(mesh.clone());
    let argument = |name: &str, dims: [usize; 2], axes: [&[&str]; 2]| {
        let sharding = Some(Sharding::new(&axes));
        b.argument_with(Argument { sharding, ..Argument::new(name, Type::new(BF16, dims)) })
    };
    // Activations keep their width replicated; `embed` is the side of a weight that meets it.
    let x = argument("x", [TOKENS, EMBED], [rules.tokens, &[]]);
    let up = argument("up", [MLP, EMBED], [rules.mlp, rules.embed]);
    let down = argument("down", [EMBED, MLP], [rules.embed, rules.mlp]);
    // A constraint places a value; the compiler inserts the collectives that this takes.
    let inner = b.einsum("te,me->tm", &x, &up, BF16).constrain(&Sharding::new(&[rules.tokens, rules.mlp]));
    let inner = &inner * (&inner * 1.702).logistic();
    let place = Sharding::new(&[rules.tokens, &[]]);
    let y = b.einsum("tm,em->te", &inner, &down, BF16).constrain(&place);
    Ok(b.finish_with(vec![(Output { sharding: Some(place), ..Output::new("y", y.ty().clone()) }, y)])?)
}

/// Compiles for eight TPUs, none of which is there, or for eight virtual devices. Which, and the optimized program.
fn compile(program: &Program) -> anyhow::Result<(&'static str, OptimizedProgram)> {
    let options = CompileOptions::partitioned(program.devices());
    let set = |variable: &str| std::env::var_os(variable).is_some();
    let absent = set("TPU_SKIP_MDS_QUERY") && set("ALLOW_MULTIPLE_LIBTPU_LOAD");
    if let Some(libtpu) = discover::find(Platform::Tpu, None).found.first().filter(|_| absent) {
        let topology = Topology::new(&Plugin::load(&libtpu.path)?, "v5p:2x2x2", &Attributes::new())?;
        let devices = Some(topology.devices()?.iter().map(|d| d.id.into()).collect());
        // From this many MiB on libtpu weaves a gather into its product, as a ring of permutes; here it stays visible.
        let weave = ("xla_jf_spmd_threshold_for_windowed_einsum_mib", OptionValue::Int(1 << 20));
        let options = CompileOptions { devices, ..options }.flag(weave.0, weave.1);
        return Ok(("eight TPU v5p", topology.compile(&program.text, &options)?.optimized_program()?));
    }
    let found = discover::find(Platform::Cpu, None);
    let plugin = Plugin::load(&found.found.first().ok_or_else(|| found.not_found())?.path)?;
    let devices = CpuOptions { devices: Some(program.devices()), ..CpuOptions::default() };
    let client = Client::new(&plugin, &ClientOptions::Cpu(devices))?;
    // This compiler widens bf16 to f32 before anything travels.
    Ok(("eight virtual CPU devices", client.compile(&program.text, &options)?.optimized_program()?))
}

fn main() -> anyhow::Result<()> {
    quiet_plugins();
    let mesh = Mesh::new(&[("context", 8)]);
    let context: &[&str] = &["context"];
    // Tokens and weights are split over the same devices: no device has all of a weight that its tokens need.
    let split = Rules { tokens: context, embed: context, mlp: &[] };
    // One rule changed: weights are replicated, and nothing has to move.
    let replicated = Rules { embed: &[], ..split };
    // Column, then row: tokens are replicated, each device computes an eighth of the inner width, and partial sums are all-reduced.
    let tensor = Rules { tokens: &[], embed: &[], mlp: context };
    for (name, rules) in [("embed split", split), ("embed replicated", replicated), ("mlp split", tensor)] {
        let (devices, optimized) = compile(&feed_forward(&mesh, rules)?)?;
        let report = report(&Module::decode(&optimized.format, &optimized.bytes)?, &mesh.axes, &[], None);
        println!("{name}, on {devices}: {:.1} MB", report.per_step().bytes / 1e6);
        for c in &report.collectives {
            println!("  {} {:.1} MB of {} over {}", c.kind.name(), c.bytes / 1e6, c.dtype, c.axes.join(", "));
        }
    }
    Ok(())
}
