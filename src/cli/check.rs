//! `ltx2 check`: what a model folder holds, from headers alone.

use std::rc::Rc;

use crate::models::ConfigError;
use crate::pipeline::PipelineError;
use crate::pipeline::models::{Component, Parts, TEXT_TO_VIDEO};
use crate::weights::{ModelSource, Overrides, Report, validate};

/// Reads configurations and headers of a model and says what is there, what is missing and what each pipeline needs.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A model: diffusers folder, single file, or org/name in the local Hugging Face cache.
    model: String,
    /// A text encoder from elsewhere.
    #[arg(long)]
    text_encoder: Option<String>,
    /// A latent upsampler from elsewhere: a folder, or a single file.
    #[arg(long)]
    upsampler: Option<String>,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

enum Finding {
    Absent,
    /// There, without weights of its own.
    Present,
    /// There, but this program does not compute it.
    Unsupported(String),
    Broken(String),
    Weights(Report),
}

/// Runs the command.
///
/// # Errors
/// No such model; a part that is missing or wrong makes the command fail after everything has been printed.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let overrides = Overrides {
        text_encoder: args.text_encoder.clone(),
        upsampler: args.upsampler.clone(),
        ..Overrides::default()
    };
    let source = Rc::new(ModelSource::open(&args.model, &overrides)?);
    let parts = Parts::of(&source);
    let findings: Vec<(Component, Finding)> =
        Component::ALL.into_iter().map(|p| (p, examine(&source, &parts, p))).collect();
    let version = source.version().map_or_else(|_| "unknown".to_string(), |v| v.to_string());
    let good = |part: Component| {
        findings.iter().any(|(p, f)| {
            *p == part
                && match f {
                    Finding::Present => true,
                    Finding::Weights(r) => r.is_ok(),
                    _ => false,
                }
        })
    };
    let missing: Vec<&str> = TEXT_TO_VIDEO.into_iter().filter(|p| !good(*p)).map(Component::folder).collect();
    let bytes: u64 = findings.iter().map(|(_, f)| if let Finding::Weights(r) = f { r.bytes } else { 0 }).sum();
    if args.json {
        let parts: serde_json::Map<String, serde_json::Value> =
            findings.iter().map(|(p, f)| (p.folder().to_string(), describe(f))).collect();
        let all = serde_json::json!({
            "model": source.path(), "version": version, "parts": parts, "weight_bytes": bytes,
            "text_to_video": {"ready": missing.is_empty(), "missing": missing},
        });
        println!("{}", serde_json::to_string_pretty(&all)?);
    } else {
        println!("{}: LTX-{version}, {:.2} GB of weights", source.path().display(), bytes as f64 / 1e9);
        for (part, finding) in &findings {
            print_finding(*part, finding);
        }
        match missing.is_empty() {
            true => println!("text_to_video: ready"),
            false => println!("text_to_video: needs {}", missing.join(", ")),
        }
    }
    anyhow::ensure!(missing.is_empty(), "{}: not complete: {}", source.path().display(), missing.join(", "));
    Ok(())
}

fn examine(source: &Rc<ModelSource>, parts: &Parts, part: Component) -> Finding {
    if !source.has(part) {
        return Finding::Absent;
    }
    if part.weights_stem().is_none() {
        return Finding::Present;
    }
    let checkpoint = match source.checkpoint(part) {
        Ok(c) => c,
        Err(e) => return Finding::Broken(e.to_string()),
    };
    match parts.parameters(part) {
        Ok(params) => Finding::Weights(validate(&checkpoint, params.iter().flat_map(|p| p.source.tensors()))),
        Err(PipelineError::Config(e @ ConfigError::Unsupported { .. })) => Finding::Unsupported(e.to_string()),
        Err(e) => Finding::Broken(e.to_string()),
    }
}

fn describe(finding: &Finding) -> serde_json::Value {
    use serde_json::json;
    match finding {
        Finding::Absent => json!({"state": "absent"}),
        Finding::Present => json!({"state": "present"}),
        Finding::Unsupported(why) => json!({"state": "unsupported", "message": why}),
        Finding::Broken(why) => json!({"state": "broken", "message": why}),
        Finding::Weights(r) => json!({
            "state": if r.is_ok() { "ok" } else { "wrong" }, "tensors": r.matched, "bytes": r.bytes,
            "missing": r.missing, "extra": r.extra,
            "misshaped": r.misshaped.iter().map(|m| json!({"name": m.name, "want": m.want, "got": m.got})).collect::<Vec<_>>(),
        }),
    }
}

fn print_finding(part: Component, finding: &Finding) {
    let name = part.folder();
    match finding {
        Finding::Absent => println!("{name:<18} absent"),
        Finding::Present => println!("{name:<18} present"),
        Finding::Unsupported(why) => println!("{name:<18} unsupported: {why}"),
        Finding::Broken(why) => println!("{name:<18} broken: {why}"),
        Finding::Weights(report) if report.is_ok() => println!(
            "{name:<18} ok: {} tensors, {:.1} MB{}",
            report.matched,
            report.bytes as f64 / 1e6,
            if report.extra.is_empty() {
                String::new()
            } else {
                format!(", {} more that are not used", report.extra.len())
            }
        ),
        Finding::Weights(report) => {
            println!("{name:<18} wrong:");
            report.lines().iter().for_each(|l| println!("  {l}"));
        }
    }
}
