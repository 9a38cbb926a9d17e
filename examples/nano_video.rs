//! A video with sound through the library: `cargo run --release --example nano_video MODEL LAYOUT OUT.mp4`, for example
//! `assets/nano shardings/cfg.yml out.mp4`. MODEL is a model of the `nano` preset, LAYOUT a layout file of yours.

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;

use ltx2::config::{CliOverrides, load};
use ltx2::media::{Audio, Mp4Options, write_mp4};
use ltx2::pipeline::generate::of_job;
use ltx2::pipeline::model::Model;
use ltx2::pipeline::options::RunOptions;
use ltx2::pipeline::session::Session;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, layout, out] = &arguments[..] else { return Err("usage: nano_video MODEL LAYOUT OUT.mp4".into()) };
    // As `ltx2 generate -c nano --set …`: a preset, with keys of the YAML over it.
    let set = vec![
        format!("model.path={model}"),
        format!("layout={layout}"),
        "runtime.platform=cpu".into(),
        "request.prompt=a red circle bounces on blue, low beeps".into(),
    ];
    let config = load(&CliOverrides { file: Some("nano".into()), set, ..CliOverrides::default() })?.config;
    let model = Model::of(&config)?;
    let job = config.jobs()?.into_iter().next().ok_or("no prompt")?;
    let request = of_job(&config, &model, &job)?;
    // Opens the platform and writes every program, so that a layout that does not fit is an error now.
    let mut session = Session::start(&config, model, None)?;
    let mut progress = |phase: ltx2::pipeline::phase::Phase, done: usize, total: usize| {
        eprintln!("{} {done}/{total}", phase.name());
        ControlFlow::Continue(())
    };
    let made = session.runner.generate(&request, &RunOptions::default(), &mut progress)?;
    let audio = Audio::new(made.audio, u32::try_from(made.sample_rate)?)?;
    write_mp4(Path::new(out), &made.frames, request.frame_rate, Some(&audio), &Mp4Options::default())?;
    println!("{}", made.frames.sha256());
    Ok(())
}
