//! Generates a video with audio through the library:
//!
//! ```sh
//! cargo run --release --example generate nano assets/nano "a red circle bounces on blue, low beeps" 128x96x25 out.mp4
//! ```
//!
//! Arguments: preset, model, prompt, size (width, height, frames), output, then any YAML keys, such as `layout=mine.yml`.

use std::error::Error;
use std::ops::ControlFlow;

use ltx2::pipeline::{Phase, RunOptions};
use ltx2::{Config, Session};

const USAGE: &str = "usage: generate PRESET MODEL PROMPT WIDTHxHEIGHTxFRAMES OUT.mp4 [KEY=VALUE…]";

fn main() -> Result<(), Box<dyn Error>> {
    ltx2::pjrt::quiet_plugins();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [preset, model, prompt, size, out, keys @ ..] = &arguments[..] else { return Err(USAGE.into()) };
    let [width, height, frames] = size.split('x').collect::<Vec<_>>()[..] else { return Err(USAGE.into()) };
    let own = [
        format!("model.path={model}"),
        format!("request.prompt={prompt}"),
        format!("request.width={width}"),
        format!("request.height={height}"),
        format!("request.num_frames={frames}"),
    ];
    let config = Config::load(preset, own.iter().chain(keys))?;
    // Validates and compiles everything: an illegal size, or a layout that does not fit, is an error here.
    let mut session = Session::open(&config)?;
    let request = session.requests()?.remove(0);
    // Called for each step; return `ControlFlow::Break(())` to cancel the run.
    let mut watch = |phase: Phase, done: usize, total: usize| {
        eprintln!("{} {done}/{total}", phase.name());
        ControlFlow::Continue(())
    };
    let options = RunOptions { chunk: Some(1), ..RunOptions::default() };
    let video = session.runner.generate(&request, &options, &mut watch)?;
    video.write_mp4(out)?;
    println!("{}", video.frames.sha256());
    Ok(())
}
