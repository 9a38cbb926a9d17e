//! `bench`: the executables of `generate`, each timed alone, and a whole request.
//!
//! Any program can be timed, and its results compared, without those before it: [`Alone`] has its inputs. They
//! lie on the devices before the clock starts, and it stops when all results are there; nothing is copied to the host
//! meanwhile. Only `end_to_end` begins with a prompt and ends with frames and samples on the host.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use ndarray::Array4;
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::alone::{Alone, normal};
use super::calls::{self, Call};
use super::clock::Took;
use super::error::{PipelineError, Result};
use super::generate::of_job;
use super::models::Models;
use super::options::GenerateOptions;
use super::processes;
use super::programs::{ProgramKind, Programs};
use super::report::peak_memory;
use super::session::Session;
use super::stages::Stages;
use super::text_to_video::{Request, Settings, Stage, text_to_videos, tokens, unpack};
use crate::analysis::{self, Module};
use crate::config::{Config, Job};
use crate::media::{self, Audio, Mp4Options};
use crate::models::video_vae::Pixels;
use crate::nn::Build;
use crate::pjrt::CompiledMemory;
use crate::runtime::processes::Group;
use crate::runtime::{Executable, PeakMatmul, ShardedTensor, peak_matmul};
use crate::sampling::guidance::{Branch, branches};
use crate::tensor::Tensor;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "kebab-case")]
pub enum Part {
    /// All prompts in one pass
    TextEncoder,
    /// Embeddings to contexts
    Connectors,
    /// What no step changes
    Prepare,
    /// One step, and all steps in one call; of two stages, the first
    Denoise,
    /// The same of the second stage
    Refine,
    /// Latents to twice their size, between two stages
    Upsampler,
    /// Latents to frames
    VideoDecoder,
    /// Latents to mel spectrogram
    AudioDecoder,
    /// Mel spectrogram to samples
    Vocoder,
    /// Prompt to frames and samples on the host, and the MP4 apart
    EndToEnd,
}

/// How it is timed.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// What is timed, in this order.
    pub parts: Vec<Part>,
    /// Timed runs of each, at least one.
    pub runs: usize,
    /// Runs before those.
    pub warmup: usize,
}

/// The figures of everything timed.
#[derive(Debug, Serialize)]
pub struct BenchReport {
    /// Of the platform, in lower case.
    pub platform: String,
    /// The plugin's name of a device.
    pub device: String,
    /// Devices the programs run on.
    pub devices: usize,
    /// Program, plugin, platform.
    pub versions: Value,
    /// The model, as a sidecar names it.
    pub model: Value,
    /// Everything else that was asked for.
    pub config: Value,
    /// Videos a run makes together.
    pub videos: usize,
    /// What a large product reaches on one device.
    pub matmul: PeakMatmul,
    /// The programs, and `end_to_end`, by name.
    pub programs: BTreeMap<&'static str, Measured>,
    /// Seconds of writing one MP4, where a whole request was run.
    pub mp4_seconds: Option<f64>,
    /// Parameters on one device, in bytes.
    pub parameter_bytes: usize,
    /// Seconds of loading or making all parameters.
    pub load_seconds: f64,
    /// Seconds of compiling all programs.
    pub compile_seconds: f64,
    /// The most memory in use at any time, in bytes: on a device where the platform says it, else of the process.
    pub peak_memory_bytes: Option<u64>,
}

/// The figures of one program.
#[derive(Debug, Serialize)]
pub struct Measured {
    /// The program that ran; none for a whole request.
    pub program: Option<Compiled>,
    /// Steps in a call, where it takes steps.
    pub steps: Option<usize>,
    /// Seconds of a run, or of a step where it takes steps.
    pub median: f64,
    /// The shortest.
    pub min: f64,
    /// Nine of ten were at most this long.
    pub p90: f64,
    /// All of them, in order.
    pub seconds: Vec<f64>,
    /// Runs before them.
    pub warmup: usize,
    /// Floating-point operations of products and convolutions a second, on one device.
    pub flops_per_second: Option<f64>,
    /// The same as a part of what a large product reaches.
    pub share_of_matmul: Option<f64>,
    /// Results by name.
    pub outputs: BTreeMap<String, Checked>,
    /// Of a whole request: where its last run spent the time. The shares of all stages add up to the run.
    pub parts: Option<BTreeMap<Stage, Share>>,
}

/// Seconds of a stage.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Share {
    /// In which nothing was left to do but wait for its programs.
    pub device: f64,
    /// In which the host worked.
    pub host: f64,
}

/// What is known of a program without running it, on one device.
#[derive(Clone, Debug, Serialize)]
pub struct Compiled {
    /// As `ltx2 compile` says it.
    pub hash: String,
    /// Seconds of compiling.
    pub compile_seconds: f64,
    /// Operations of products and convolutions in a run or step; none where the plugin does not show its program.
    pub flops: Option<f64>,
    /// Bytes of the parameters it reads.
    pub parameter_bytes: usize,
    /// Bytes that it needs, where the plugin says so.
    pub memory: Option<CompiledMemory>,
}

/// A result, after the last run.
#[derive(Debug, Serialize)]
pub struct Checked {
    /// Sizes.
    pub shape: Vec<usize>,
    /// SHA-256 of its row-major bytes.
    pub sha256: String,
    /// Whether all of it are numbers; of a flag, whether it is set.
    pub finite: bool,
    /// Whether all of it, where it is several, are one number.
    pub constant: bool,
}

impl Checked {
    fn of(tensor: &Tensor) -> Self {
        let mut finite = true;
        let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
        let mut look = |v: f32| {
            finite &= v.is_finite();
            (low, high) = (low.min(v), high.max(v));
        };
        match tensor {
            Tensor::F32(a) => a.iter().for_each(|v| look(*v)),
            Tensor::Bool(a) => a.iter().for_each(|v| look(if *v { 1.0 } else { f32::NAN })),
            Tensor::BF16(a) => a.iter().for_each(|v| look(v.to_f32())),
            other => other.to_f32().iter().for_each(|v| look(*v)),
        }
        let digest = Sha256::digest(tensor.bytes());
        let sha256 = digest.iter().map(|b| format!("{b:02x}")).collect();
        Checked { shape: tensor.shape().to_vec(), sha256, finite, constant: tensor.len() > 1 && low >= high }
    }
}

/// A program that has become slower than it was.
#[derive(Debug, PartialEq)]
pub struct Slower {
    /// Its name.
    pub name: String,
    /// Median seconds then.
    pub was: f64,
    /// Median seconds now.
    pub now: f64,
}

impl std::fmt::Display for Slower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let more = (self.now / self.was - 1.0) * 100.0;
        write!(f, "{} is {more:.1} % slower: {:.6} s, was {:.6} s", self.name, self.now, self.was)
    }
}

impl BenchReport {
    /// Results that cannot be right, a line each.
    pub fn wrong(&self) -> Vec<String> {
        let each =
            self.programs.iter().flat_map(|(name, m)| m.outputs.iter().map(move |(output, c)| (name, output, c)));
        let what = each.filter_map(|(name, output, c)| match (c.finite, c.constant) {
            (false, _) => Some(format!("'{output}' of {name} holds values that are not finite")),
            (true, true) => Some(format!("all values of '{output}' of {name} are the same")),
            (true, false) => None,
        });
        what.collect()
    }

    /// Programs whose median exceeds that of an earlier report by more than `tolerance`, a fraction of it.
    ///
    /// # Errors
    /// Not a report, or none of anything timed now.
    pub fn slower_than(&self, baseline: &Value, tolerance: f64) -> std::result::Result<Vec<Slower>, String> {
        let medians = self.programs.iter().filter_map(|(name, m)| {
            let was = baseline.get("programs")?.get(name)?.get("median")?.as_f64()?;
            Some(Slower { name: (*name).to_string(), was, now: m.median })
        });
        let medians: Vec<Slower> = medians.collect();
        if medians.is_empty() {
            return Err("has no median of anything timed now; give an earlier --json of this command".into());
        }
        Ok(medians.into_iter().filter(|m| m.now > m.was * (1.0 + tolerance)).collect())
    }
}

/// Times the programs of a configuration's first video.
///
/// # Errors
/// What is wrong with model, request or device.
pub fn bench(config: &Config, job: &Job, options: &BenchOptions, group: Option<&Arc<Group>>) -> Result<BenchReport> {
    if let Some(group) = group {
        let options = GenerateOptions { jobs: vec![job.clone()], ..GenerateOptions::default() };
        processes::compare(group, config, &options)?;
    }
    let models = Models::of(config)?;
    let request = of_job(config, &models, job)?;
    let mut session = Session::start(config, &models, group)?;
    let matmul = peak_matmul(session.stages.engine(), options.runs)?;
    if !request.given.is_empty() {
        return Err(PipelineError::Usage(
            "bench times requests without given frames; leave request.images empty".into(),
        ));
    }
    let mut bench = Bench::new(config, &models, &request, &mut session, options, &matmul)?;
    let mut mp4_seconds = None;
    let needs_two = |part: &&Part| matches!(part, Part::Refine | Part::Upsampler);
    let two = bench.second.is_some();
    for part in options.parts.iter().filter(|part| two || !needs_two(part)) {
        match part {
            Part::TextEncoder => bench.text_encoder()?,
            Part::Connectors => bench.connectors()?,
            Part::Prepare => bench.prepare()?,
            Part::Denoise => {
                let first = bench.first.clone();
                bench.denoise(&first, ProgramKind::Denoise, ["denoise_step", "denoise_loop"])?;
            }
            Part::Refine => {
                if let Some(second) = bench.second.clone() {
                    bench.denoise(&second, ProgramKind::Refine, ["refine_step", "refine_loop"])?;
                }
            }
            Part::Upsampler => bench.upsampler()?,
            Part::VideoDecoder => bench.video_decoder()?,
            Part::AudioDecoder => drop(bench.audio_decoder(true)?),
            Part::Vocoder => bench.vocoder()?,
            Part::EndToEnd => mp4_seconds = Some(bench.end_to_end()?),
        }
    }
    if let Some(group) = group {
        processes::wait_for_all(group)?;
    }
    let (programs, videos) = (bench.done, bench.alone.batch.size());
    let stages = &session.stages;
    Ok(BenchReport {
        platform: stages.engine().platform(),
        device: stages.engine().own_device().kind().to_string(),
        devices: session.build.layout.mesh.devices(),
        versions: session.versions,
        model: models.identity()?,
        config: config.effective(&job.prompt, job.seed),
        videos,
        matmul,
        programs,
        mp4_seconds,
        parameter_bytes: stages.parameter_bytes(),
        load_seconds: stages.load_time.as_secs_f64(),
        compile_seconds: stages.compile_time().as_secs_f64(),
        peak_memory_bytes: peak_memory(stages),
    })
}

struct Bench<'a> {
    models: &'a Models,
    request: &'a Request,
    options: &'a BenchOptions,
    matmul: &'a PeakMatmul,
    stages: &'a mut Stages,
    build: Build,
    programs: Programs,
    first: Request,
    second: Option<Request>,
    alone: Alone<'a>,
    done: BTreeMap<&'static str, Measured>,
}

impl<'a> Bench<'a> {
    fn new(
        config: &Config,
        models: &'a Models,
        request: &'a Request,
        session: &'a mut Session,
        options: &'a BenchOptions,
        matmul: &'a PeakMatmul,
    ) -> Result<Self> {
        let build = session.build.clone();
        let (first, second) = request.stages();
        let alone = Alone::new(models, request, &build)?;
        Ok(Bench {
            first,
            second,
            stages: &mut session.stages,
            programs: Programs::of(config, None)?,
            done: BTreeMap::new(),
            models,
            request,
            options,
            matmul,
            build,
            alone,
        })
    }

    fn text_encoder(&mut self) -> Result<()> {
        let (ids, mask, _) = tokens(self.models, &self.alone.batch, self.prompts_a_video())?;
        let call = calls::text_encoder(self.models, self.stages, ids, mask, &self.build)?;
        self.call("text_encoder", ProgramKind::TextEncoder, &call)
    }

    fn connectors(&mut self) -> Result<()> {
        let (_, mask, _) = tokens(self.models, &self.alone.batch, self.prompts_a_video())?;
        let embeds = normal(&[mask.shape()[0], mask.shape()[1], self.models.sizes.text_width], 1);
        let call = calls::connectors(self.models, self.stages, embeds, mask, &self.build)?;
        self.call("connectors", ProgramKind::Connectors, &call)
    }

    /// The call that makes what the loop reads.
    fn prepare(&mut self) -> Result<()> {
        let first = self.first.clone();
        let call = self.alone.prepare(self.stages, &first)?;
        self.call("prepare", ProgramKind::Prepare, &call)
    }

    /// One step and all steps of a stage. The second-order sampler takes a step a call.
    fn denoise(&mut self, request: &Request, kind: ProgramKind, [step, all]: [&'static str; 2]) -> Result<()> {
        let denoising = self.alone.denoising(self.stages, request, kind)?;
        let whole = denoising.takes_all().then_some((all, request.sigmas.len() - 1));
        for (name, steps) in [Some((step, 1)), whole].into_iter().flatten() {
            let range = denoising.steps(self.stages, steps)?;
            let (seconds, latents) =
                self.time(|stages| denoising.start(stages), |stages, latents| denoising.run(stages, &range, latents))?;
            let outputs = ["latents.video", "latents.audio"].into_iter().zip(&latents);
            let outputs = check(outputs)?;
            let seconds = seconds.into_iter().map(|s| s / steps as f64).collect();
            let compiled = self.compiled(kind, denoising.program())?;
            self.keep(name, Some(compiled), Some(steps), seconds, outputs);
        }
        Ok(())
    }

    /// Noise as the loop's result, un-normalised as the decoders take it.
    fn latents(&mut self) -> Result<(ndarray::Array5<f32>, Array4<f32>)> {
        let (shapes, _) = self.alone.shape(self.second.as_ref().unwrap_or(&self.first))?;
        unpack(self.models, &shapes, self.alone.batch.size(), self.alone.noise(self.stages, &shapes)?)
    }

    fn upsampler(&mut self) -> Result<()> {
        let (from, to) = (self.alone.shape(&self.first)?.0, self.alone.shape(self.request)?.0.video);
        let noise = self.alone.noise(self.stages, &from)?;
        let (latents, _) = unpack(self.models, &from, self.alone.batch.size(), noise)?;
        let size = [to.frames, to.height, to.width];
        let call = calls::upsampler(self.models, self.stages, latents, size, &self.build)?;
        self.call("upsampler", ProgramKind::Upsampler, &call)
    }

    fn video_decoder(&mut self) -> Result<()> {
        let (latents, _) = self.latents()?;
        let call = calls::video_decoder(self.models, self.stages, latents, Pixels::Bytes, &self.build)?;
        self.call("video_decoder", ProgramKind::VideoDecoder, &call)
    }

    fn audio_decoder(&mut self, timed: bool) -> Result<Call<'static>> {
        let (_, latents) = self.latents()?;
        let call = calls::audio_decoder(self.models, self.stages, latents, &self.build)?;
        if timed {
            self.call("audio_decoder", ProgramKind::AudioDecoder, &call)?;
        }
        Ok(call)
    }

    fn vocoder(&mut self) -> Result<()> {
        let decoded = self.audio_decoder(false)?.run(self.stages)?;
        let call = calls::vocoder(self.models, self.stages, &decoded, &self.build)?;
        self.call("vocoder", ProgramKind::Vocoder, &call)
    }

    /// A whole request; the seconds of writing its MP4.
    fn end_to_end(&mut self) -> Result<f64> {
        let settings = Settings { build: self.build.clone(), chunk: None, dump: false, saving: None };
        let (models, requests) = (self.models, std::slice::from_ref(self.request));
        let (seconds, made) = self.time(
            |_| Ok(()),
            |stages, ()| text_to_videos(models, stages, requests, &settings, &mut |_, _, _| ControlFlow::Continue(())),
        )?;
        let video = made.into_iter().next().ok_or_else(|| PipelineError::Input("no video was made".into()))?;
        let outputs = [
            ("video".to_string(), Checked::of(&Tensor::from(video.frames.data().clone()))),
            ("audio".to_string(), Checked::of(&Tensor::from(video.audio.clone()))),
        ];
        let share = |t: &Took| (t.stage, Share { device: t.device.as_secs_f64(), host: t.host().as_secs_f64() });
        let parts = video.timings.iter().map(share).collect();
        self.keep("end_to_end", None, None, seconds, outputs.into());
        if let Some(measured) = self.done.get_mut("end_to_end") {
            measured.parts = Some(parts);
        }
        let folder = tempfile::tempdir().map_err(|e| {
            let (path, reason) = (std::env::temp_dir(), e.to_string());
            PipelineError::File { path, reason }
        })?;
        let started = Instant::now();
        let audio = Audio::new(video.audio, u32::try_from(video.sample_rate).unwrap_or(u32::MAX))?;
        let file = folder.path().join("bench.mp4");
        media::write_mp4(&file, &video.frames, self.request.frame_rate, Some(&audio), &Mp4Options::default())?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// Rows of text a video has.
    fn prompts_a_video(&self) -> usize {
        let [video, audio] = self.first.scales;
        1 + usize::from(branches(video, audio).contains(&Branch::Negative))
    }

    /// Times a program whose inputs can be read again.
    fn call(&mut self, name: &'static str, kind: ProgramKind, call: &Call) -> Result<()> {
        let (seconds, outputs) = self.time(
            |_| Ok(()),
            |stages, ()| {
                let outputs = call.run(stages)?;
                outputs.wait()?;
                Ok(outputs)
            },
        )?;
        let outputs = check(outputs.iter())?;
        let compiled = self.compiled(kind, call.program())?;
        self.keep(name, Some(compiled), None, seconds, outputs);
        Ok(())
    }

    /// Runs something as often as the options say, each time on what `before` gives; the seconds of the timed runs, and
    /// the last result.
    fn time<T, R>(
        &mut self,
        before: impl Fn(&Stages) -> Result<T>,
        run: impl Fn(&mut Stages, T) -> Result<R>,
    ) -> Result<(Vec<f64>, R)> {
        let mut seconds = Vec::new();
        for n in 0.. {
            let given = before(self.stages)?;
            let started = Instant::now();
            let result = run(self.stages, given)?;
            let took = started.elapsed().as_secs_f64();
            if n >= self.options.warmup {
                seconds.push(took);
            }
            // Earlier results make room for the next.
            if seconds.len() >= self.options.runs.max(1) {
                return Ok((seconds, result));
            }
        }
        Err(PipelineError::Input("no run was made".into()))
    }

    fn compiled(&self, kind: ProgramKind, program: &Executable) -> Result<Compiled> {
        let stacked = self.programs.stacked(kind)?;
        let optimized = program.compiled().optimized_program().ok();
        let module = optimized.and_then(|o| Module::decode(&o.format, &o.bytes).ok());
        Ok(Compiled {
            hash: program.hash().to_string(),
            compile_seconds: program.compile_time().as_secs_f64(),
            flops: module.map(|m| analysis::report(&m, &program.mesh().axes, stacked, None).step.flops),
            parameter_bytes: self.stages.parameter_bytes_of(program),
            memory: program.compiled().memory().ok(),
        })
    }

    fn keep(
        &mut self,
        name: &'static str,
        program: Option<Compiled>,
        steps: Option<usize>,
        seconds: Vec<f64>,
        outputs: BTreeMap<String, Checked>,
    ) {
        let mut sorted = seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let median = quantile(&sorted, 0.5);
        let flops_per_second = program.as_ref().and_then(|p| p.flops).map(|flops| flops / median);
        let measured = Measured {
            program,
            steps,
            median,
            min: quantile(&sorted, 0.0),
            p90: quantile(&sorted, 0.9),
            seconds,
            warmup: self.options.warmup,
            flops_per_second,
            share_of_matmul: flops_per_second.map(|f| f / self.matmul.flops_per_second),
            outputs,
            parts: None,
        };
        tracing::info!("{name}: median {:.6} s of {}", measured.median, measured.seconds.len());
        self.done.insert(name, measured);
    }
}

fn check<'a>(outputs: impl Iterator<Item = (&'a str, &'a ShardedTensor)>) -> Result<BTreeMap<String, Checked>> {
    outputs.map(|(name, value)| Ok((name.to_string(), Checked::of(&value.download()?)))).collect()
}

/// The value that a part of sorted ones does not exceed, in between two of them where need be.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let at = part * (sorted.len().max(1) - 1) as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    match (sorted.get(low), sorted.get(high)) {
        (Some(a), Some(b)) => a + (b - a) * at.fract(),
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_neighbours() {
        let seconds = [1.0, 2.0, 3.0, 4.0];
        assert_eq!([0.0, 0.5, 1.0].map(|p| quantile(&seconds, p)), [1.0, 2.5, 4.0]);
        assert!((quantile(&seconds, 0.9) - 3.7).abs() < 1e-12);
        assert_eq!(quantile(&[5.0], 0.9), 5.0);
    }

    #[test]
    fn results_that_say_nothing_are_found() {
        let of = |values: Vec<f32>| Checked::of(&Tensor::from(ndarray::Array1::from(values)));
        let (good, flat, broken) = (of(vec![1.0, 2.0]), of(vec![1.0, 1.0]), of(vec![1.0, f32::NAN]));
        assert_eq!([good.finite, flat.finite, broken.finite], [true, true, false]);
        assert_eq!([good.constant, flat.constant], [false, true]);
        assert_ne!(good.sha256, flat.sha256);
    }
}
