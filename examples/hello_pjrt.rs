//! The smallest use of the binding: build a program, compile it, run it, read the result.
//!
//! `cargo run --example hello_pjrt [PLUGIN.so]`; without a path, the CPU plugin that `ltx2 plugin install cpu` left.

use ltx2::dtype::DType::F32;
use ltx2::hlo::{Builder, Type};
use ltx2::pjrt::discover::{self, Kind};
use ltx2::pjrt::{Client, ClientOptions, CompileOptions, CpuOptions, HostBuffer, Plugin};

fn main() -> anyhow::Result<()> {
    let asked = std::env::args().nth(1);
    let found = discover::find(Kind::Cpu, asked.as_deref().map(std::path::Path::new));
    let plugin = Plugin::load(&found.found.first().ok_or_else(|| found.not_found())?.path)?;
    let options = CpuOptions { devices: Some(1), ..CpuOptions::default() };
    let client = Client::new(&plugin, &ClientOptions::Cpu(options))?;
    println!("{}: PJRT {:?}, {}", plugin.path().display(), plugin.version(), client.platform_name()?);

    let b = Builder::new("hello");
    let x = b.argument("x", Type::new(F32, [2, 3]));
    let w = b.argument("w", Type::new(F32, [4, 3]));
    let y = b.einsum("bi,oi->bo", &x, &w, F32).tanh();
    let program = b.finish(&[("y", &y)])?;
    let executable = client.compile(&program.text, &CompileOptions::single())?;

    let device = &client.devices()[0];
    let upload = |values: &[f32], dims: &[usize]| {
        client.upload(device, HostBuffer::dense(bytemuck::cast_slice(values), F32, dims))
    };
    let (x, w) = (upload(&[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], &[2, 3])?, upload(&[1.0; 12], &[4, 3])?);
    let results = executable.execute(&[vec![&x, &w]])?;
    println!("{:?}", bytemuck::pod_collect_to_vec::<u8, f32>(&results[0][0].to_host()?));
    Ok(())
}
