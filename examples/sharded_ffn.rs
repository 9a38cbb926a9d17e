//! Shows where collectives come from: compiles a feed-forward layer for eight devices with three shardings and prints the
//! collectives that the compiler inserts. Executes nothing and needs no hardware.
//!
//! `cargo run --example sharded_ffn`. Compiles for TPUs if libtpu is installed (`ltx2 plugin install tpu`) and
//! `TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1` are set, otherwise for virtual devices of the CPU plugin.

use ltx2::analysis::{Module, report};
use ltx2::hlo::DType::BF16;
use ltx2::hlo::{Argument, Builder, DeviceMesh, Program, ProgramOutput, Sharding, Type};
use ltx2::pjrt::discover::{self, Platform};
use ltx2::pjrt::{Attributes, Client, CompileOptions, CpuOptions, OptimizedProgram, OptionValue};
use ltx2::pjrt::{Plugin, Topology, quiet_plugins};

/// LTX-2's video stream: tokens at 768x512x121, width of the residual stream, inner width of the layer.
const TOKENS: usize = 6144;
const EMBED: usize = 4096;
const MLP: usize = 16384;

/// The mesh axes that shard each logical axis, as in the files of `shardings/`.
#[derive(Clone, Copy)]
struct Rules {
    tokens: &'static [&'static str],
    embed: &'static [&'static str],
    mlp: &'static [&'static str],
}

/// Builds `gelu(x · up) · down` (sigmoid approximation of GELU) with every tensor sharded by the rules.
fn feed_forward(mesh: &DeviceMesh, rules: Rules) -> anyhow::Result<Program> {
    let b = Builder::new("feed_forward").with_mesh(mesh.clone());
    let argument = |name: &str, dims: [usize; 2], axes: [&[&str]; 2]| {
        let sharding = Some(Sharding::new(&axes));
        b.argument_with(Argument { sharding, ..Argument::new(name, Type::new(BF16, dims)) })
    };
    // The width of activations is replicated; `embed` shards the dimension of a weight that is multiplied with it.
    let x = argument("x", [TOKENS, EMBED], [rules.tokens, &[]]);
    let up = argument("up", [MLP, EMBED], [rules.mlp, rules.embed]);
    let down = argument("down", [EMBED, MLP], [rules.embed, rules.mlp]);
    // A sharding constraint: the compiler inserts the collectives that it requires.
    let inner = b.einsum("te,me->tm", &x, &up, BF16).constrain(&Sharding::new(&[rules.tokens, rules.mlp]));
    let inner = &inner * (&inner * 1.702).logistic();
    let place = Sharding::new(&[rules.tokens, &[]]);
    let y = b.einsum("tm,em->te", &inner, &down, BF16).constrain(&place);
    Ok(b.finish_with(vec![(ProgramOutput { sharding: Some(place), ..ProgramOutput::new("y", y.ty().clone()) }, y)])?)
}

/// Compiles for eight absent TPUs, or for eight virtual devices. Returns which, and the optimized program.
fn compile(program: &Program) -> anyhow::Result<(&'static str, OptimizedProgram)> {
    let options = CompileOptions::partitioned(program.devices());
    let set = |variable: &str| std::env::var_os(variable).is_some();
    let absent = set("TPU_SKIP_MDS_QUERY") && set("ALLOW_MULTIPLE_LIBTPU_LOAD");
    if let Some(libtpu) = discover::find(Platform::Tpu, None).found.first().filter(|_| absent) {
        let topology = Topology::new(&Plugin::load(&libtpu.path)?, "v5p:2x2x2", &Attributes::new())?;
        let devices = Some(topology.devices()?.iter().map(|d| d.id.into()).collect());
        // libtpu fuses an all-gather of at least this many MiB with its matmul (windowed einsum); keep it visible.
        let weave = ("xla_jf_spmd_threshold_for_windowed_einsum_mib", OptionValue::Int(1 << 20));
        let options = CompileOptions { devices, ..options }.flag(weave.0, weave.1);
        return Ok(("eight TPU v5p", topology.compile(&program.text, &options)?.optimized_program()?));
    }
    let found = discover::find(Platform::Cpu, None);
    let plugin = Plugin::load(&found.found.first().ok_or_else(|| found.not_found())?.path)?;
    let devices = CpuOptions { devices: Some(program.devices()), ..CpuOptions::default() };
    let client = Client::new(&plugin, &devices.to_attributes())?;
    // The CPU compiler converts bf16 to f32 before collectives.
    Ok(("eight virtual CPU devices", client.compile(&program.text, &options)?.optimized_program()?))
}

fn main() -> anyhow::Result<()> {
    quiet_plugins();
    let mesh = DeviceMesh::new(&[("context", 8)]);
    let context: &[&str] = &["context"];
    // Tokens and weights are sharded over the same axis, so each device must gather the weights.
    let split = Rules { tokens: context, embed: context, mlp: &[] };
    // Weights replicated: no communication.
    let replicated = Rules { embed: &[], ..split };
    // Column then row: tokens are replicated, each device computes an eighth of the inner width, partial sums are all-reduced.
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
