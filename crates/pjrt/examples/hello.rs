//! Compiles a program, runs it and prints its result.
//!
//! Run `cargo run --example hello [PLUGIN.so]`. Without an argument, it uses the CPU plugin that `discover` finds.

use ltx2_pjrt::discover::{self, Platform};
use ltx2_pjrt::{BufferType, Client, CompileOptions, CpuOptions, HostBuffer, Plugin};

const PROGRAM: &str = "
  func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
    %y = stablehlo.tanh %x : tensor<3xf32>
    return %y : tensor<3xf32>
  }";

fn main() -> anyhow::Result<()> {
    let asked = std::env::args().nth(1);
    let found = discover::find(Platform::Cpu, asked.as_deref().map(std::path::Path::new));
    let plugin = Plugin::load(&found.found.first().ok_or_else(|| found.not_found())?.path)?;
    let client = Client::new(&plugin, &CpuOptions { devices: Some(1), ..CpuOptions::default() }.to_attributes())?;
    println!("{}: PJRT {:?}, {}", plugin.path().display(), plugin.version(), client.platform_name());

    let executable = client.compile(PROGRAM, &CompileOptions::single())?;
    let x = HostBuffer::dense(bytemuck::cast_slice(&[0.1f32, 0.2, 0.3]), BufferType::F32, &[3]);
    let x = client.upload(&client.devices()[0], x)?;
    let results = executable.execute(&[vec![&x]])?;
    println!("{:?}", bytemuck::pod_collect_to_vec::<u8, f32>(&results[0][0].to_host()?));
    Ok(())
}
