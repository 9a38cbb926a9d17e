//! `ltx2 compare`: quality metrics between two results.

use std::fmt::Write;
use std::path::PathBuf;

use ndarray::{Array4, s};

use super::comparison::{ComparedClip, Scores, number, read, rows};
use super::{UsageError, check_json, check_output_file, compare_report, print_and_write_json};
use crate::atomic_file;
use crate::quality;

/// Compares two results: videos, folders of PNG files, WAV files, or tensor files of `generate --dump`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "B is the reference. Videos are decoded with ffmpeg. For dumps (.safetensors), all common tensors are compared:
`video` as frames, `audio` as audio. Audio of different lengths is compared over the shorter length.

Examples:
  ltx2 compare a.mp4 b.mp4 --min-psnr 40 --report difference.html
  ltx2 compare ours.safetensors reference.safetensors --min-ssim 0.999 --max-audio-l2 1e-3 --json scores.json"
)]
pub(crate) struct CompareArgs {
    /// Result to evaluate: a video, a folder of PNG files, a WAV file, or a tensor file of `generate --dump`
    a: PathBuf,
    /// Reference result of the same kind
    b: PathBuf,
    /// Minimum PSNR over all frames, in decibels
    #[arg(long, value_name = "DB")]
    min_psnr: Option<f64>,
    /// Minimum SSIM, mean over frames
    #[arg(long, value_name = "S")]
    min_ssim: Option<f64>,
    /// Maximum mean absolute difference of any frame, in units of 1/255
    #[arg(long, value_name = "STEPS")]
    max_mad: Option<f64>,
    /// Maximum relative L2 distance between the audio of both results
    #[arg(long, value_name = "L2")]
    max_audio_l2: Option<f64>,
    /// Minimum cosine similarity of the audio of both results
    #[arg(long, value_name = "C")]
    min_audio_cosine: Option<f64>,
    /// Writes all scores to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Writes a self-contained HTML report with side-by-side frames, differences and waveforms
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Overwrites the files of --json and --report
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(args: &CompareArgs) -> anyhow::Result<()> {
    check_json(args.json.as_deref(), args.force)?;
    check_output_file("--report", args.report.as_deref(), &["html", "htm"], args.force)?;
    let [mut a, mut b] = [read(&args.a)?, read(&args.b)?];
    let scores = score(args, &mut a, &mut b).map_err(UsageError)?;
    check_bounds_apply(args, &scores).map_err(UsageError)?;
    if let Some(path) = &args.report {
        let page = compare_report::page(&scores, &a, &b).map_err(anyhow::Error::msg)?;
        atomic_file::write_file(path, page.as_bytes(), args.force)?;
    }
    let figures = format!("{}\n", serde_json::to_string_pretty(&scores)?);
    print_and_write_json(args.json.as_deref(), args.force, &figures, &table(&scores))?;
    let failed = failures(args, &scores);
    anyhow::ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

fn score(args: &CompareArgs, a: &mut ComparedClip, b: &mut ComparedClip) -> Result<Scores, String> {
    let [name_a, name_b] = [&args.a, &args.b].map(|p| p.display().to_string());
    let mut scores = Scores { a: name_a.clone(), b: name_b.clone(), ..Scores::default() };
    let sides = |what: &str, x: String, y: String| format!("{what}: {name_a} has {x}, but {name_b} has {y}");
    match (&a.video, &b.video) {
        (Some(x), Some(y)) => {
            let size = |v: &Array4<f32>| format!("{} frames of {}x{}", v.dim().0, v.dim().3, v.dim().2);
            if x.dim() != y.dim() {
                return Err(sides("frames", size(x), size(y)));
            }
            scores.video = Some(quality::video(x.view(), y.view()));
        }
        (None, None) => {}
        (x, _) => scores.only_in_one.push(format!("frames: {}", if x.is_some() { &name_a } else { &name_b })),
    }
    match (&mut a.audio, &mut b.audio) {
        (Some((x, rate_x)), Some((y, rate_y))) => {
            if x.nrows() != y.nrows() {
                return Err(sides("sound", format!("{} channels", x.nrows()), y.nrows().to_string()));
            }
            if let (Some(p), Some(q)) = (rate_x, rate_y)
                && p != q
            {
                return Err(sides("sound", format!("{p} samples per second"), q.to_string()));
            }
            let common = x.ncols().min(y.ncols());
            if x.ncols() != y.ncols() {
                tracing::warn!("{}", sides("sound", format!("{} samples", x.ncols()), y.ncols().to_string()));
                [x, y].into_iter().for_each(|v| *v = v.slice(s![.., ..common]).to_owned());
            }
            let (Some((x, _)), Some((y, _))) = (&a.audio, &b.audio) else { return Ok(scores) };
            scores.audio = Some(quality::audio(x.view(), y.view()));
        }
        (None, None) => {}
        (x, _) => scores.only_in_one.push(format!("sound: {}", if x.is_some() { &name_a } else { &name_b })),
    }
    for (name, x) in &a.tensors {
        let Some(y) = b.tensors.get(name) else {
            scores.only_in_one.push(format!("'{name}': {name_a}"));
            continue;
        };
        if x.shape() != y.shape() {
            return Err(sides(&format!("'{name}'"), format!("shape {:?}", x.shape()), format!("{:?}", y.shape())));
        }
        let (x, y) = (x.to_f32(), y.to_f32());
        scores.tensors.insert(name.clone(), quality::tensors(x.iter().copied(), y.iter().copied()));
    }
    let others = b.tensors.keys().filter(|name| !a.tensors.contains_key(*name));
    scores.only_in_one.extend(others.map(|name| format!("'{name}': {name_b}")));
    match scores.video.is_none() && scores.audio.is_none() && scores.tensors.is_empty() {
        true => Err(format!(
            "{name_a} and {name_b} have nothing in common to compare: no frames, audio or tensors that both contain"
        )),
        false => Ok(scores),
    }
}

/// Rejects bounds on frames or audio that are not compared, because such bounds would never fail.
fn check_bounds_apply(args: &CompareArgs, scores: &Scores) -> Result<(), String> {
    let video = [("--min-psnr", args.min_psnr), ("--min-ssim", args.min_ssim), ("--max-mad", args.max_mad)];
    let audio = [("--max-audio-l2", args.max_audio_l2), ("--min-audio-cosine", args.min_audio_cosine)];
    let given =
        |bounds: &[(&'static str, Option<f64>)]| bounds.iter().find(|(_, v)| v.is_some()).map(|(name, _)| *name);
    match (given(&video), given(&audio)) {
        (Some(flag), _) if scores.video.is_none() => Err(format!("{flag} requires frames in both results")),
        (_, Some(flag)) if scores.audio.is_none() => Err(format!("{flag} requires audio in both results")),
        _ => Ok(()),
    }
}

/// Returns a message for each score outside its bound; NaN always fails.
fn failures(args: &CompareArgs, scores: &Scores) -> Vec<String> {
    let (video, audio) = (scores.video.as_ref(), scores.audio.as_ref());
    let bounds = [
        ("psnr", "--min-psnr", video.map(|v| v.psnr), args.min_psnr),
        ("ssim", "--min-ssim", video.map(|v| v.ssim), args.min_ssim),
        ("audio cosine", "--min-audio-cosine", audio.map(|a| a.cosine), args.min_audio_cosine),
        ("mean absolute difference", "--max-mad", video.map(|v| v.worst_mad), args.max_mad),
        ("audio relative L2", "--max-audio-l2", audio.map(|a| a.relative_l2), args.max_audio_l2),
    ];
    let failure = |(name, flag, got, bound): (&str, &str, Option<f64>, Option<f64>)| {
        let (got, bound) = (got?, bound?);
        let (beyond, side) = if flag.starts_with("--min") { (got < bound, "below") } else { (got > bound, "above") };
        (beyond || got.is_nan()).then(|| format!("{name} {} is {side} {flag} {bound}", number(got)))
    };
    bounds.into_iter().filter_map(failure).collect()
}

fn table(scores: &Scores) -> String {
    let rows = rows(scores);
    let width = rows.iter().map(|[name, ..]| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    // Writing to a String cannot fail.
    if scores.video.is_some() {
        let _ = writeln!(text, "{:<width$}  {:>12}  {:>12}", "", "all", "worst frame");
    }
    for [name, value, worst] in rows {
        let _ = writeln!(text, "{}", format!("{name:<width$}  {value:>12}  {worst:>12}").trim_end());
    }
    for only in &scores.only_in_one {
        let _ = writeln!(text, "not compared, only in one result: {only}");
    }
    text
}
