//! Benchmarks of single programs and of complete requests.
//!
//! With [`SyntheticInputs`], each program runs without the programs that precede it in a request. Inputs are on the
//! devices before the clock starts, the clock stops when all results are ready, and nothing is copied to the host in
//! between. Only `end_to_end` starts with a prompt and ends with frames and audio samples on the host.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use tempfile::TempDir;

use super::bench_report::{BenchReport, HostDevice, OutputCheck, ProgramInfo, ProgramTiming};
use super::synthetic::{SyntheticInputs, normal, pass_request};
use crate::analysis::{self, Chip, Module};
use crate::av::Av;
use crate::config::{Config, Sidecar};
use crate::media::{self, WavFormat};
use crate::models::diffusion_decoder::noise_shape;
use crate::models::pixels::Pixels;
use crate::models::upsampler::Upsampling;
use crate::pipeline::output::report::peak_memory;
use crate::pipeline::plan::options::RunOptions;
use crate::pipeline::plan::run_plan::RunPlan;
use crate::pipeline::plan::setup;
use crate::pipeline::plan::videos::{Job, RunVideos};
use crate::pipeline::processes;
use crate::pipeline::programs::build::{ProgramKind, Programs};
use crate::pipeline::programs::call::Call;
use crate::pipeline::programs::prompt_enhancer::{TextGeneration, TokenSampling};
use crate::pipeline::runner::Runner;
use crate::pipeline::session::Session;
use crate::pipeline::stages::clock::PhaseTime;
use crate::pipeline::stages::packing::unpack;
use crate::pipeline::stages::prompts::tokens;
use crate::pipeline::{PipelineError, Result};
use crate::request::{DfrPlan, Request, Shapes, UpsamplingStep, keyframe_step, upsampling_steps};
use crate::runtime::processes::Group;
use crate::runtime::{CompiledProgram, Outputs, PeakMatmul, ShardedTensor, peak_matmul};
use crate::sampling::TorchRng;
use crate::sampling::denoise::StreamRole;
use crate::temporaries;
use crate::tensor::Tensor;
use ndarray::{Array4, Array5};

/// Tokens of the prompt with which the prompt enhancer is timed, and tokens of its text.
const ENHANCED_TOKENS: usize = 512;
const TEXT_TOKENS: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BenchTarget {
    /// One program.
    Program(ProgramKind),
    /// Complete request from prompt to frames and audio samples on the host; MP4 writing is timed separately.
    EndToEnd,
}

/// Function that times a program with synthetic inputs.
type Timer = fn(&mut Bench, ProgramKind) -> Result<()>;

/// Programs that can be benchmarked, with the function that times each.
const TIMED: [(ProgramKind, Timer); 16] = [
    (ProgramKind::PromptEnhancer, |bench, kind| bench.prompt_enhancer(kind)),
    (ProgramKind::TextEncoder, |bench, kind| bench.text_encoder(kind)),
    (ProgramKind::Connectors, |bench, kind| bench.connectors(kind)),
    (ProgramKind::AudioEncoder, |bench, kind| bench.audio_encoder(kind)),
    (ProgramKind::Prepare, |bench, kind| bench.prepare(kind)),
    (ProgramKind::Denoise, |bench, kind| bench.denoise(kind)),
    (ProgramKind::Refine, |bench, kind| bench.denoise(kind)),
    (ProgramKind::Upsampler, |bench, kind| bench.upsampler(kind)),
    (ProgramKind::FrameUpsampler, |bench, kind| bench.upsampler(kind)),
    (ProgramKind::KeyframeUpsampler, |bench, kind| bench.keyframe_upsampler(kind)),
    (ProgramKind::TemporalUpsampler, |bench, kind| bench.temporal_upsampler(kind)),
    (ProgramKind::Round, |bench, kind| bench.denoise(kind)),
    (ProgramKind::VideoDecoder, |bench, kind| bench.video_decoder(kind)),
    (ProgramKind::DiffusionDecoder, |bench, kind| bench.diffusion_decoder(kind)),
    (ProgramKind::AudioDecoder, |bench, kind| bench.audio_decoder(kind)),
    (ProgramKind::Vocoder, |bench, kind| bench.vocoder(kind)),
];

impl ValueEnum for BenchTarget {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<BenchTarget>> = LazyLock::new(|| {
            TIMED.iter().map(|(kind, _)| BenchTarget::Program(*kind)).chain([BenchTarget::EndToEnd]).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            BenchTarget::Program(kind) => PossibleValue::new(kind.flag()).help(kind.declaration().help),
            BenchTarget::EndToEnd => PossibleValue::new("end-to-end").help(
                "Complete request from prompt to frames and audio samples on the host; MP4 writing is timed separately",
            ),
        })
    }
}

#[derive(Clone, Debug)]
pub(crate) struct BenchOptions {
    pub(crate) targets: Vec<BenchTarget>,
    /// Timed runs per target; at least 1.
    pub(crate) runs: usize,
    pub(crate) warmup: usize,
}

/// Benchmark results. `failed`: the target that failed and its error; the targets after it were not measured.
pub(crate) struct BenchResults {
    pub(crate) report: BenchReport,
    pub(crate) failed: Option<(String, PipelineError)>,
}

/// Returns an error if a request cannot be benchmarked.
fn check_request(request: &Request) -> Result<()> {
    if request.chain.is_none() {
        return Ok(());
    }
    let why = "bench: request.chain: chained clips cannot be benchmarked; remove --chain to benchmark one clip; to time the \
               phases of this request, use `generate --perf-json`";
    Err(PipelineError::Usage(why.into()))
}

/// Benchmarks the programs of a configuration's first video. If a target fails after others have succeeded, the
/// benchmark stops and reports the results so far.
pub(crate) fn bench(
    config: &Config,
    job: &Job,
    sidecar: Option<&Sidecar>,
    options: &BenchOptions,
    group: Option<&Arc<Group>>,
) -> Result<BenchResults> {
    let videos = RunVideos::unwritten(vec![job.clone()], sidecar);
    processes::compare(group, config, &videos)?;
    let (mut plan, model) = RunPlan::new(config, &videos)?;
    let no_request = || PipelineError::Bug("the run plan contains no request".into());
    let request = plan.requests.pop().ok_or_else(no_request)?;
    check_request(&request)?;
    let mut session = Session::start(plan, model, group)?;
    session.check_memory(group)?;
    let identity = session.runner.model.identity(config)?;
    let matmul = peak_matmul(session.runner.executor.engine(), options.runs)?;
    let mut bench = Bench::new(&session.plan, &request, &mut session.runner, options, &matmul)?;
    let failed = bench.all()?;
    processes::wait_for_all(group.filter(|_| failed.is_none()))?;
    let mp4_seconds = bench.file_seconds;
    let (programs, videos) = (bench.done, bench.synthetic.batch.size);
    let (runner, executor) = (&session.runner, &session.runner.executor);
    let report = BenchReport {
        platform: executor.engine().platform().into(),
        device: executor.engine().own_device().kind().to_string(),
        devices: runner.build.layout.mesh.devices(),
        versions: session.versions,
        model: identity,
        config: config.effective(&job.prompt, job.seed),
        videos,
        matmul,
        programs,
        mp4_seconds,
        parameter_bytes: executor.parameter_bytes(),
        load_seconds: executor.load_time.as_secs_f64(),
        compile_seconds: executor.compile_time.as_secs_f64(),
        peak_memory_bytes: peak_memory(executor),
    };
    Ok(BenchResults { report, failed })
}

struct Bench<'a> {
    request: &'a Request,
    options: &'a BenchOptions,
    matmul: &'a PeakMatmul,
    runner: &'a mut Runner,
    programs: &'a Programs,
    first: Request,
    second: Option<Request>,
    synthetic: SyntheticInputs<'a>,
    /// Chip for which times are predicted; `None`: unknown.
    chip: Option<Chip>,
    done: BTreeMap<String, ProgramTiming>,
    /// Folder for the output file of the `end_to_end` target.
    folder: TempDir,
    /// Time to write the output file, in seconds. `None`: not measured.
    file_seconds: Option<f64>,
}

impl<'a> Bench<'a> {
    fn new(
        plan: &'a RunPlan,
        request: &'a Request,
        runner: &'a mut Runner,
        options: &'a BenchOptions,
        matmul: &'a PeakMatmul,
    ) -> Result<Self> {
        let (first, second) = request.passes();
        let synthetic = SyntheticInputs::new(request, &runner.build.layout);
        let (programs, done) = (&plan.programs, BTreeMap::new());
        let chip = setup::chip(&plan.config, &runner.executor.engine().toolchain().kind).ok();
        let folder = tempfile::tempdir().map_err(|e| {
            let (path, reason) = (std::env::temp_dir(), e.to_string());
            PipelineError::File { path, reason }
        })?;
        temporaries::note(folder.path());
        let file_seconds = None;
        Ok(Bench {
            request,
            options,
            matmul,
            runner,
            programs,
            first,
            second,
            synthetic,
            chip,
            done,
            folder,
            file_seconds,
        })
    }

    /// Measures every target. If a target fails after others have succeeded, returns the target's name and error.
    ///
    /// # Errors
    /// Returns the error of a target if none has succeeded before.
    fn all(&mut self) -> Result<Option<(String, PipelineError)>> {
        for target in &self.options.targets {
            let measured = match target {
                BenchTarget::EndToEnd => self.end_to_end(),
                BenchTarget::Program(kind) => {
                    let of_kind = |(known, _): &&(ProgramKind, Timer)| known == kind;
                    let timed = TIMED.iter().find(of_kind).filter(|_| self.programs.kinds().any(|k| k == *kind));
                    timed.map_or(Ok(()), |(_, run)| run(self, *kind))
                }
            };
            match measured {
                Err(error) if self.done.is_empty() => return Err(error),
                Err(error) => {
                    let name = target.to_possible_value().map(|value| value.get_name().to_string());
                    return Ok(Some((name.unwrap_or_default(), error)));
                }
                Ok(()) => {}
            }
        }
        Ok(None)
    }

    /// Times the first token of a text, which includes the forward pass over the prompt, and each of the other tokens.
    /// The text has no stop token and is greedy.
    fn prompt_enhancer(&mut self, kind: ProgramKind) -> Result<()> {
        let vocabulary = self.runner.model.configs.text_encoder()?.vocab_size();
        let id = |place: usize| i32::try_from(place * 7919 % vocabulary).expect("token ids are small");
        let prompts = [(0..ENHANCED_TOKENS).map(id).collect()];
        let mut first = 0.0;
        for (name, tokens) in [("prompt", 1), ("token", TEXT_TOKENS)] {
            let generation = TextGeneration {
                prompts: &prompts,
                padded_tokens: 0,
                max_new_tokens: tokens,
                stop_tokens: &[],
                sampling: TokenSampling::default(),
                no_repeat_ngram_size: 0,
            };
            let call = self.runner.text_generator(&generation, TEXT_TOKENS)?;
            let (seconds, outputs) = self.time_call(&call)?;
            // Random weights may repeat one token, so the tokens are not checked.
            let outputs = check(outputs.iter().filter(|(name, _)| *name == "lengths"))?;
            let others = tokens.saturating_sub(1).max(1);
            let seconds = seconds.into_iter().map(|s| (s - first) / others as f64).collect();
            let compiled = self.compiled(kind, call.program())?;
            let name = format!("{}_{name}", kind.name());
            self.keep(name.clone(), Some(compiled), (tokens > 1).then_some(others), seconds, outputs);
            first = self.done.get(&name).map_or(0.0, |timing| timing.median);
        }
        Ok(())
    }

    fn text_encoder(&mut self, kind: ProgramKind) -> Result<()> {
        let (ids, mask, _) = tokens(&self.runner.model, &self.synthetic.batch, self.prompts_per_video())?;
        let call = self.runner.text_encoder(ids, mask)?;
        self.call(kind, &call)
    }

    fn connectors(&mut self, kind: ProgramKind) -> Result<()> {
        let (_, mask, _) = tokens(&self.runner.model, &self.synthetic.batch, self.prompts_per_video())?;
        let embeds = normal(&[mask.shape()[0], mask.shape()[1], self.runner.model.sizes.text_width], 1);
        let call = self.runner.connectors(embeds, mask)?;
        self.call(kind, &call)
    }

    fn audio_encoder(&mut self, kind: ProgramKind) -> Result<()> {
        let (c, shapes) =
            (self.runner.model.configs.audio_vae()?, Shapes::from_request(&self.runner.model.sizes, &self.first)?);
        let shape = (1, c.in_channels, c.frames_of(shapes.audio.length), c.bins());
        let call = self.runner.audio_encoder(Array4::zeros(shape))?;
        self.call(kind, &call)
    }

    /// Times the program that computes the step-invariant inputs of the denoising loop.
    fn prepare(&mut self, kind: ProgramKind) -> Result<()> {
        let call = self.synthetic.prepare(self.runner, &self.first)?;
        self.call(kind, &call)
    }

    /// Times a call that runs one denoising step and, unless the sampler draws noise, a call that runs all steps of the
    /// pass. A round is timed with its largest tile.
    fn denoise(&mut self, kind: ProgramKind) -> Result<()> {
        let request = pass_request(self.request, kind).unwrap_or_else(|| self.first.clone());
        self.runner.executor.enter(kind.pass())?;
        let denoising = self.synthetic.denoising(self.runner, &request, kind)?;
        let all = denoising.takes_all().then_some(("loop", request.sigmas.len() - 1));
        for (name, steps) in [Some(("step", 1)), all].into_iter().flatten() {
            let range = denoising.steps(&self.runner.executor, steps)?;
            let (seconds, latents) = self.time(
                |runner| denoising.start(&runner.executor),
                |runner, latents| denoising.run(&runner.executor, &range, latents),
            )?;
            let outputs = ["latents.video", "latents.audio"].into_iter().zip(&latents).zip(request.roles);
            let present = outputs.filter(|(_, role)| *role != StreamRole::Absent).map(|(output, _)| output);
            let outputs = check(present)?;
            let seconds = seconds.into_iter().map(|s| s / steps as f64).collect();
            let compiled = self.compiled(kind, denoising.program())?;
            self.keep(format!("{}_{name}", kind.name()), Some(compiled), Some(steps), seconds, outputs);
        }
        Ok(())
    }

    /// Returns random noise in place of denoised latents, un-normalized as the decoders expect.
    fn latents(&mut self) -> Result<(Array5<f32>, Array4<f32>)> {
        let sizes = &self.runner.model.sizes;
        let (mut shapes, _) = self.synthetic.shape(sizes, self.second.as_ref().unwrap_or(&self.first))?;
        if self.request.dfr.is_some() {
            let output =
                Request { num_frames: self.request.output_frames(), conditions: Av::default(), ..self.first.clone() };
            let output = Request { width: self.request.width, height: self.request.height, ..output };
            shapes = Shapes { audio: shapes.audio, ..Shapes::from_request(sizes, &output)? };
        }
        let noise = self.synthetic.noise(self.runner, &shapes)?;
        unpack(&self.runner.model, &shapes, self.synthetic.batch.size, noise)
    }

    fn upsampler(&mut self, kind: ProgramKind) -> Result<()> {
        let sizes = &self.runner.model.sizes;
        let (from, to) =
            (Shapes::from_request(sizes, &self.first)?.video, Shapes::from_request(sizes, self.request)?.video);
        let of_kind = |step: &UpsamplingStep| {
            (step.upsampling == Upsampling::TemporalX2) == (kind == ProgramKind::FrameUpsampler)
        };
        let all = self.request.refine.as_ref().map_or(&[][..], |refine| &refine.upsample);
        let Some(step) = upsampling_steps(all, &from, &to).into_iter().find(of_kind) else { return Ok(()) };
        let latents = self.random_latents(step.from, from.channels);
        let call = self.runner.upsampler(kind, latents, &step)?;
        self.call(kind, &call)
    }

    /// Times the upsampler of the keyframes that the first pass generates.
    fn keyframe_upsampler(&mut self, kind: ProgramKind) -> Result<()> {
        let sizes = &self.runner.model.sizes;
        let (from, to) = (Shapes::from_request(sizes, &self.first)?, Shapes::from_request(sizes, self.request)?.video);
        let keyframes = from.generated(&self.first.conditions.video).len();
        let step = keyframe_step(keyframes, &from.video, &to);
        let latents = self.random_latents(step.from, from.video.channels);
        let call = self.runner.upsampler(kind, latents, &step)?;
        self.call(kind, &call)
    }

    /// Times the temporal upsampler of the last round.
    fn temporal_upsampler(&mut self, kind: ProgramKind) -> Result<()> {
        let shape = Shapes::from_request(&self.runner.model.sizes, self.request)?.video;
        let rounds = self.request.dfr.as_ref().map(DfrPlan::rounds).unwrap_or_default();
        let Some(last) = rounds.last() else { return Ok(()) };
        let frames = last.canvas.latents().div_ceil(2);
        let latents = self.random_latents([frames, shape.height, shape.width], shape.channels);
        let call = self.runner.temporal_upsampler(latents)?;
        self.call(kind, &call)
    }

    /// Returns random latents of the size `[frames, height, width]`.
    fn random_latents(&self, size: [usize; 3], channels: usize) -> Array5<f32> {
        let [f, h, w] = size;
        let shape = [self.synthetic.batch.size, channels, f, h, w];
        TorchRng::new(self.request.seed).normal_array(&shape).into_dimensionality().expect("five axes")
    }

    fn video_decoder(&mut self, kind: ProgramKind) -> Result<()> {
        let (latents, _) = self.latents()?;
        let call = self.runner.video_decoder(latents, Pixels::Bytes)?;
        self.call(kind, &call)
    }

    fn diffusion_decoder(&mut self, kind: ProgramKind) -> Result<()> {
        let (latents, _) = self.latents()?;
        let (b, _, f, h, w) = latents.dim();
        let shape = noise_shape(&self.runner.model.configs.diffusion_decoder()?, [b, f, h, w]);
        let noise = TorchRng::new(self.request.seed).normal_array(&shape);
        let call = self.runner.diffusion_decoder(latents, noise.into(), Pixels::Bytes)?;
        self.call(kind, &call)
    }

    fn audio_decoder(&mut self, kind: ProgramKind) -> Result<()> {
        let call = self.audio_decoder_call()?;
        self.call(kind, &call)
    }

    fn audio_decoder_call(&mut self) -> Result<Call<'static>> {
        let (_, latents) = self.latents()?;
        self.runner.audio_decoder(latents)
    }

    fn vocoder(&mut self, kind: ProgramKind) -> Result<()> {
        let decoded = self.audio_decoder_call()?.run(&self.runner.executor)?;
        let call = self.runner.vocoder(&decoded)?;
        self.call(kind, &call)
    }

    /// Times a complete request, and the writing of its MP4 file (a WAV file if the request has no frames).
    fn end_to_end(&mut self) -> Result<()> {
        let request = self.request;
        let (seconds, video) = self.time(
            |_| Ok(()),
            |runner, ()| runner.generate(request, &RunOptions::default(), &mut |_, _, _| ControlFlow::Continue(())),
        )?;
        let has_frames = video.frames.count() > 0;
        let frames = has_frames.then(|| ("video", Tensor::from(video.frames.data().clone())));
        let outputs = frames.into_iter().chain([("audio", Tensor::from(video.audio.clone()))]);
        let outputs = outputs.map(|(name, value)| (name.to_string(), OutputCheck::measure(&value))).collect();
        let share =
            |t: &PhaseTime| (t.phase, HostDevice { device: t.device.as_secs_f64(), host: t.host().as_secs_f64() });
        let parts = video.timings.iter().map(share).collect();
        self.keep("end_to_end".into(), None, None, seconds, outputs);
        if let Some(measured) = self.done.get_mut("end_to_end") {
            measured.parts = Some(parts);
        }
        let started = Instant::now();
        match has_frames {
            true => video.write_mp4(self.folder.path().join("bench.mp4"))?,
            false => {
                media::write_wav(&self.folder.path().join("bench.wav"), &video.file_sound()?, WavFormat::Pcm16)?;
            }
        }
        self.file_seconds = Some(started.elapsed().as_secs_f64());
        Ok(())
    }

    fn prompts_per_video(&self) -> usize {
        self.request.prompts()
    }

    /// Returns the seconds of each measured run of a program whose inputs are not donated, so that every run can use the
    /// same inputs, and the outputs of the last run.
    fn time_call(&mut self, call: &Call) -> Result<(Vec<f64>, Outputs)> {
        self.time(
            |_| Ok(()),
            |runner, ()| {
                let outputs = call.run(&runner.executor)?;
                outputs.wait()?;
                Ok(outputs)
            },
        )
    }

    /// Times a program whose inputs are not donated.
    fn call(&mut self, kind: ProgramKind, call: &Call) -> Result<()> {
        let (seconds, outputs) = self.time_call(call)?;
        let outputs = check(outputs.iter())?;
        let compiled = self.compiled(kind, call.program())?;
        self.keep(kind.name().into(), Some(compiled), None, seconds, outputs);
        Ok(())
    }

    /// Warms up, then times `run`. `before` prepares the inputs of each run and is not timed. Returns the seconds of
    /// each timed run and the last result.
    fn time<T, R>(
        &mut self,
        before: impl Fn(&Runner) -> Result<T>,
        run: impl Fn(&mut Runner, T) -> Result<R>,
    ) -> Result<(Vec<f64>, R)> {
        let mut seconds = Vec::new();
        for n in 0.. {
            let given = before(self.runner)?;
            let started = Instant::now();
            let result = run(self.runner, given)?;
            let took = started.elapsed().as_secs_f64();
            if n >= self.options.warmup {
                seconds.push(took);
            }
            // All results but the last are dropped at the end of the iteration, which frees their memory before the
            // next run.
            if seconds.len() >= self.options.runs.max(1) {
                return Ok((seconds, result));
            }
        }
        Err(PipelineError::Input("the benchmark has no timed runs; request at least one run".into()))
    }

    fn compiled(&self, kind: ProgramKind, program: &CompiledProgram) -> Result<ProgramInfo> {
        let stacked = self.programs.stacked(kind)?;
        let optimized = program.compiled().optimized_program().ok();
        let module = optimized.and_then(|o| Module::decode(&o.format, &o.bytes).ok());
        let report = module.map(|m| analysis::report(&m, &program.mesh().axes, &stacked, self.chip.as_ref()));
        Ok(ProgramInfo {
            hash: program.hash().to_string(),
            compile_seconds: program.compile_time().as_secs_f64(),
            flops: report.as_ref().map(|r| r.step.flops),
            predicted: report.and_then(|r| r.predicted).map(|p| p.step / 1e3),
            parameter_bytes: self.runner.executor.parameter_bytes_of(program),
            memory: program.compiled().memory().ok(),
        })
    }

    fn keep(
        &mut self,
        name: String,
        program: Option<ProgramInfo>,
        steps: Option<usize>,
        seconds: Vec<f64>,
        outputs: BTreeMap<String, OutputCheck>,
    ) {
        let mut sorted = seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let median = quantile(&sorted, 0.5);
        let flops_per_second = program.as_ref().and_then(|p| p.flops).map(|flops| flops / median);
        let measured = ProgramTiming {
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
        tracing::info!("{name}: median {:.6} s of {} run(s)", measured.median, measured.seconds.len());
        self.done.insert(name, measured);
    }
}

fn check<'a>(outputs: impl Iterator<Item = (&'a str, &'a ShardedTensor)>) -> Result<BTreeMap<String, OutputCheck>> {
    outputs.map(|(name, value)| Ok((name.to_string(), OutputCheck::measure(&value.download()?)))).collect()
}

/// Returns a quantile of sorted values, with linear interpolation.
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
    use super::quantile;

    #[test]
    fn quantiles_interpolate_linearly() {
        let seconds = [1.0, 2.0, 3.0, 4.0];
        assert_eq!([0.0, 0.5, 1.0].map(|p| quantile(&seconds, p)), [1.0, 2.5, 4.0]);
        assert!((quantile(&seconds, 0.9) - 3.7).abs() < 1e-12);
        assert_eq!(quantile(&[5.0], 0.9), 5.0);
    }
}
