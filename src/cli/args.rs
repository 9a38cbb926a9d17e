//! Command-line options shared by several subcommands, and the configuration keys that they set.

use std::path::PathBuf;

use clap_complete::ArgValueCompleter;
use serde_json::{Value, json};

use super::UsageError;
use super::completions::{complete_layout, complete_preset};
pub(super) use super::model_args::{ComponentArgs, ModelArgs, files, ic_lora};
use super::numbers::{finite, num_frames, whole};
use crate::config::{CliOverrides, Dtype, ExtendAt, LoadedConfig, Reference, RetakeSource};
use crate::models::upsampler::Upsampling;
use crate::pipeline::plan::videos::Job;
use crate::pjrt::discover::Platform;
use crate::tune::{TuneOptions, default_jobs};

/// Options of commands that accept a sidecar as configuration.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Configuration")]
pub(crate) struct RerunArgs {
    /// Warns instead of failing if the input files or the model of a sidecar (-c OUT.json) have changed
    #[arg(long)]
    pub(super) allow_changed_inputs: bool,
}

/// Options of a command that runs a request.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(super) request: RequestArgs,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    processes: ProcessArgs,
    #[command(flatten)]
    config: ConfigArgs,
}

impl RunArgs {
    /// Returns the overrides that these options set.
    ///
    /// # Errors
    /// Returns an error if `--image` is invalid.
    pub(crate) fn overrides(&self) -> Result<CliOverrides, UsageError> {
        let (mut given, r) = (self.config.overrides(), &self.request);
        given.seconds = r.seconds;
        given.flag("prompt", "request.prompt", &r.prompt);
        given.flag("prompts", "request.prompts", &r.prompts);
        given.flag("num-videos", "request.num_videos", r.num_videos);
        given.flag("enhance-prompt", "request.enhance_prompt", r.enhance_prompt.then_some(true));
        given.flag("enhance-system", "enhance.system", &r.enhance_system);
        given.flag("negative-prompt", "request.negative_prompt", &r.negative_prompt);
        given.flag("negative-prompt-file", "request.negative_prompt_file", &r.negative_prompt_file);
        given.flag("text-embeddings", "request.text_embeddings", &r.text_embeddings);
        given.flag("image", "request.images", images(&r.image.0, r.num_frames.as_ref())?);
        given.flag("video", "request.video", &r.video);
        if let [from, to] = r.retake[..] {
            given.flag("retake", "request.retake", json!({"from": from, "to": to}));
            given.shared_flag("retake", &["pipeline"], "retake");
        }
        given.flag("retake-kept", "request.retake.kept", r.retake_kept);
        given.flag("extend", "request.extend.seconds", r.extend);
        given.shared_flag("extend", &["pipeline"], r.extend.map(|_| "extend"));
        given.flag("extend-at", "request.extend.at", r.extend_at);
        given.flag("mask", "request.mask", &r.mask);
        given.flag("inpaint", "request.inpaint.region", (!r.inpaint.is_empty()).then_some(&r.inpaint));
        given.flag("outpaint", "request.inpaint.keep", (!r.outpaint.is_empty()).then_some(&r.outpaint));
        for (flag, is_given) in
            [("mask", r.mask.is_some()), ("inpaint", !r.inpaint.is_empty()), ("outpaint", !r.outpaint.is_empty())]
        {
            given.shared_flag(flag, &["pipeline"], is_given.then_some("inpaint"));
        }
        given.flag("reference-video", "request.reference_videos", r.references());
        given.flag("audio", "request.audio", r.sound());
        given.flag("width", "request.width", r.width);
        given.flag("height", "request.height", r.height);
        given.flag("num-frames", "request.num_frames", &r.num_frames);
        given.flag("num-generated-keyframes", "conditioning.generated_keyframes", r.num_generated_keyframes);
        given.flag("upsample", "two_stage.upsample", &r.upsample);
        given.flag("temporal-rounds", "dfr.temporal_rounds", r.temporal_rounds);
        given.flag("detailing-lora", "dfr.detailing_lora", r.detailing_lora.as_ref().map(|text| ic_lora(text)));
        given.flag("chain", "request.chain", r.chain.then(|| json!({})));
        given.flag("frame-rate", "request.frame_rate", r.frame_rate);
        given.flag("motion-speed", "request.motion_speed", r.motion_speed);
        given.flag("steps", "sampler.steps", r.steps);
        given.flag("seed", "request.seed", r.seed);
        given.flag("max-sequence-length", "request.max_sequence_length", r.max_sequence_length);
        // Order matters: the audio flag overrides the flag of both streams.
        given.flag("guidance-scale", "guidance.video.cfg", r.guidance_scale);
        given.flag("guidance-scale", "guidance.audio.cfg", r.guidance_scale);
        given.flag("audio-guidance-scale", "guidance.audio.cfg", r.audio_guidance_scale);
        given.shared_flag("stg-scale", &["guidance.video.stg", "guidance.audio.stg"], r.stg_scale);
        let modality = ["guidance.video.modality", "guidance.audio.modality"];
        given.shared_flag("modality-scale", &modality, r.modality_scale);
        given.shared_flag(
            "guidance-rescale",
            &["guidance.video.rescale", "guidance.audio.rescale"],
            r.guidance_rescale,
        );
        given.flag("reference", "reference", r.reference);
        self.model.add(&mut given);
        self.placement.add(&mut given);
        self.processes.add(&mut given);
        Ok(given)
    }
}

const PROMPT: &str = "a red fox in the snow";

/// Returns the video that a command measures: the first one if the configuration requests several. An empty prompt is
/// replaced by a fixed prompt.
///
/// # Errors
/// Returns an error if flags or `--set` pairs request several videos, output files or progress reports, or if the file
/// of `request.prompts` cannot be read or contains no prompts.
pub(crate) fn timed_job(loaded: &LoadedConfig) -> anyhow::Result<Job> {
    let is_of_files = |path: &str| path.starts_with("output.") || path == "sampler.progress_every";
    loaded.check_read("this command writes no video and shows no progress", |path| !is_of_files(path))?;
    loaded.check_read("this command does not enhance prompts", |path| !path.starts_with("enhance."))?;
    let jobs = loaded.config.jobs()?;
    if jobs.len() > 1 {
        let is_of_several = |path: &str| matches!(path, "request.num_videos" | "request.prompts");
        loaded.check_read("this command times a single video", |path| !is_of_several(path))?;
    }
    let job =
        jobs.into_iter().next().ok_or_else(|| UsageError("no prompt: pass --prompt, or a file with prompts".into()))?;
    Ok(if job.prompt.trim().is_empty() { Job { prompt: PROMPT.into(), ..job } } else { job })
}

/// Configuration files and single YAML keys.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Configuration")]
pub(crate) struct ConfigArgs {
    /// YAML file, JSON sidecar of an earlier video, or the name of a preset (`ltx2 presets` lists all); repeatable, later
    /// files override earlier ones
    #[arg(short, long, value_name = "FILE", add = ArgValueCompleter::new(complete_preset))]
    pub(crate) config: Vec<String>,
    /// Sets a YAML key, e.g. `guidance.video.stg=1`; repeatable (`ltx2 schema` lists all keys)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

impl ConfigArgs {
    /// Returns the overrides that these options set.
    pub(crate) fn overrides(&self) -> CliOverrides {
        CliOverrides { files: self.config.clone(), set: self.set.clone(), ..CliOverrides::default() }
    }
}

/// Options of commands that compile many programs.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct JobArgs {
    /// Maximum number of concurrent compilations [default: as many as cores and memory allow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// Also retries cases that failed in an earlier run
    #[arg(long)]
    retry: bool,
    /// Folder of optimized modules; several output folders may share it [default: modules, in the output folder]
    #[arg(long, value_name = "DIR")]
    modules: Option<PathBuf>,
}

impl JobArgs {
    pub(crate) fn options(&self, folder: PathBuf, measure: bool) -> std::io::Result<TuneOptions> {
        let jobs = self.jobs.map_or_else(default_jobs, usize::from);
        let (binary, modules) = (std::env::current_exe()?, self.modules.clone());
        Ok(TuneOptions { binary, folder, modules, jobs, measure, retry: self.retry, chip: None })
    }
}

/// Default number of transformer blocks to compile; the results are extrapolated to all blocks.
pub(crate) const LAYERS: usize = 3;

/// Options of the request.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Request")]
pub(crate) struct RequestArgs {
    /// Text prompt
    #[arg(short, long, value_name = "TEXT", conflicts_with = "prompts")]
    pub(crate) prompt: Option<String>,
    /// File with one prompt per line
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: Option<String>,
    /// Number of videos per prompt, with consecutive seeds
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) num_videos: Option<u64>,
    /// Rewrites each prompt into a detailed one, with the text encoder or the chat server of enhance.endpoint; with
    /// --dry-run, prints the result
    #[arg(long)]
    pub(crate) enhance_prompt: bool,
    /// Text file with the system prompt of --enhance-prompt
    #[arg(long, value_name = "FILE")]
    pub(crate) enhance_system: Option<String>,
    /// Negative prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "negative_prompt_file")]
    pub(crate) negative_prompt: Option<String>,
    /// File with the negative prompt
    #[arg(long, value_name = "FILE")]
    pub(crate) negative_prompt_file: Option<String>,
    /// Text contexts of an HDR LoRA, instead of a prompt (pipeline hdr)
    #[arg(long, value_name = "FILE.safetensors", conflicts_with_all = ["prompt", "prompts"])]
    pub(crate) text_embeddings: Option<String>,
    #[command(flatten)]
    pub(crate) image: ImageArgs,
    /// Input video: a file, or a folder of PNG frames
    #[arg(long, value_name = "PATH")]
    pub(crate) video: Option<String>,
    /// Reference video for an IC-LoRA, and its strength from 0 to 1 [default: 1]; repeatable; implies --pipeline
    /// in_context, or hdr with an HDR LoRA, unless another pipeline is selected
    #[arg(long, value_name = "PATH[=S]")]
    pub(crate) reference_video: Vec<String>,
    /// Conversion of every --reference-video before it is scaled [default: canny for the IC-LoRA canny-control, otherwise
    /// none]
    #[arg(long, value_name = "KIND", requires = "reference_video", value_parser = PREPROCESS)]
    pub(crate) preprocess: Option<String>,
    /// Regenerates a time span of --video, from FROM to TO seconds; implies --pipeline retake
    #[arg(long, num_args = 2, value_names = ["FROM", "TO"], allow_negative_numbers = true, value_parser = finite)]
    pub(crate) retake: Vec<f64>,
    /// Source of the frames and sound outside the retake span: the decoded latents, or the input video itself [default:
    /// decoded]
    #[arg(long, value_name = "SOURCE")]
    pub(crate) retake_kept: Option<RetakeSource>,
    /// Extends --video by this many seconds; implies --pipeline extend
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, value_parser = finite, conflicts_with = "retake")]
    pub(crate) extend: Option<f64>,
    /// Extends after the end of the video, or before its start [default: end]
    #[arg(long, value_name = "END")]
    pub(crate) extend_at: Option<ExtendAt>,
    /// Regenerates the white regions of --video in this mask image or video; implies --pipeline inpaint
    #[arg(long, value_name = "PATH", conflicts_with_all = ["retake", "extend"])]
    pub(crate) mask: Option<String>,
    /// Regenerates a rectangle of --video, in pixels; implies --pipeline inpaint
    #[arg(long, num_args = 4, value_names = ["X", "Y", "W", "H"], conflicts_with_all = ["retake", "extend", "mask"])]
    pub(crate) inpaint: Vec<usize>,
    /// Places --video in a rectangle of the output, in multiples of 32 pixels, and generates everything outside of it;
    /// implies --pipeline inpaint
    #[arg(long, num_args = 4, value_names = ["X", "Y", "W", "H"], conflicts_with_all = ["retake", "extend", "mask", "inpaint"])]
    pub(crate) outpaint: Vec<usize>,
    /// Input audio that the video is generated to match: a file of any sample rate and channel count, truncated to the
    /// duration of the video; with --video, used as the sound of a silent input video
    #[arg(long, value_name = "PATH")]
    pub(crate) audio: Option<String>,
    /// Time in the --audio file at which the video starts, in seconds [default: 0]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = finite, requires = "audio")]
    pub(crate) audio_start: Option<f64>,
    /// Seconds of --audio to use, followed by silence [default: all]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = finite, requires = "audio")]
    pub(crate) audio_duration: Option<f64>,
    /// Width in pixels, a multiple of 32 (of 64 for two-stage pipelines)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) width: Option<u64>,
    /// Height in pixels, a multiple of 32 (of 64 for two-stage pipelines)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) height: Option<u64>,
    /// Number of frames, 8k+1: 1, 9, 17 … 121 …; `auto` lets LTX-2.5's duration head predict it from the prompt
    #[arg(long, value_name = "N", allow_negative_numbers = true, conflicts_with = "seconds", value_parser = num_frames)]
    pub(crate) num_frames: Option<Value>,
    /// Number of keyframes that the first stage of `distilled` generates together with the video to guide it (LTX-2.5)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) num_generated_keyframes: Option<u64>,
    /// Upsampling steps between the two stages, in order, e.g. temporal_x2,spatial_x1_5
    #[arg(long, value_name = "KIND,…", value_delimiter = ',')]
    pub(crate) upsample: Vec<Upsampling>,
    /// Number of dfr rounds, 0 to 2; each doubles the frame rate
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) temporal_rounds: Option<u64>,
    /// IC-LoRA of the second stage of dfr, which follows the first stage: a published one, such as
    /// pixel-spatial-upscaler-x2, or a file; and its strength [default: the published one, or 1]
    #[arg(long, value_name = "NAME|FILE[=S]")]
    pub(crate) detailing_lora: Option<String>,
    /// Duration in seconds, rounded to the nearest valid number of frames
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = finite)]
    pub(crate) seconds: Option<f64>,
    /// Generates a long video as chained clips, using the memory of one clip
    #[arg(long)]
    pub(crate) chain: bool,
    /// Frames per second
    #[arg(long, value_name = "FPS", allow_negative_numbers = true, value_parser = finite)]
    pub(crate) frame_rate: Option<f64>,
    /// Speed of the motion; below 1 is slower, for slow-motion LoRAs
    #[arg(long, value_name = "SPEED", allow_negative_numbers = true, value_parser = finite)]
    pub(crate) motion_speed: Option<f64>,
    /// Number of denoising steps, 1 to 256
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) steps: Option<u64>,
    /// Random seed [default: the preset's, 10]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) seed: Option<u64>,
    /// Maximum number of text tokens; longer prompts are truncated
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) max_sequence_length: Option<u64>,
    /// Classifier-free guidance scale of both streams; 1 disables it
    #[arg(long, value_name = "G", allow_negative_numbers = true, value_parser = finite)]
    pub(crate) guidance_scale: Option<f64>,
    /// Classifier-free guidance scale of the audio stream; overrides --guidance-scale
    #[arg(long, value_name = "G", allow_negative_numbers = true, value_parser = finite)]
    pub(crate) audio_guidance_scale: Option<f64>,
    /// Spatiotemporal guidance (STG) scale; 0 disables it
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = finite)]
    pub(crate) stg_scale: Option<f64>,
    /// Modality guidance scale, which moves the prediction away from the one without cross-modal attention; 1 disables
    /// it
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = finite)]
    pub(crate) modality_scale: Option<f64>,
    /// Guidance rescale factor: 0 disables it, 1 restores the standard deviation of the conditional prediction
    #[arg(long, value_name = "R", allow_negative_numbers = true, value_parser = finite)]
    pub(crate) guidance_rescale: Option<f64>,
    /// Reference implementation to follow where implementations differ
    #[arg(long, value_name = "REFERENCE")]
    pub(crate) reference: Option<Reference>,
}

/// Kinds of conversions that --preprocess accepts.
const PREPROCESS: [&str; 5] = ["none", "gray", "canny", "blur", "downscale"];

impl RequestArgs {
    /// Returns the value of `request.reference_videos`.
    fn references(&self) -> Value {
        let mut videos = files(&self.reference_video);
        for video in videos.as_array_mut().into_iter().flatten() {
            if let Some(kind) = &self.preprocess {
                video["preprocess"] = json!(kind);
            }
        }
        videos
    }

    /// Returns the value of `request.audio`.
    fn sound(&self) -> Option<Value> {
        let more = [("start", self.audio_start), ("duration", self.audio_duration)];
        let path = [("path".to_string(), json!(self.audio.as_ref()?))].into_iter();
        let more = more.into_iter().filter_map(|(key, value)| Some((key.to_string(), json!(value?))));
        Some(Value::Object(path.chain(more).collect()))
    }
}

/// Returns the help of `--platform`.
pub(super) fn platform_help() -> String {
    format!("Platform: auto, {}, or the path of a PJRT plugin", Platform::names(", "))
}

/// Options of platform, data type and layout.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Placement")]
pub(crate) struct PlacementArgs {
    #[arg(long, value_name = "NAME", help = platform_help())]
    pub(crate) platform: Option<String>,
    /// Data type of weights and activations; f32 also computes all matmuls in full f32 precision
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<Dtype>,
    /// Layout, which maps logical tensor axes to mesh axes: a YAML file or the name of a shipped layout (`ltx2 layouts`
    /// lists all)
    #[arg(long, value_name = "FILE", add = ArgValueCompleter::new(complete_layout))]
    pub(crate) layout: Option<String>,
    /// Devices per mesh axis, e.g. cfg=2,context=4; -1 uses all remaining devices
    #[arg(long, value_name = "AXIS=N,…")]
    pub(crate) mesh: Option<String>,
    /// Chip used to predict times: a name or a TOML file [default: that of the device or target]
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) chip: Option<String>,
}

impl PlacementArgs {
    pub(crate) fn is_given(&self) -> bool {
        let PlacementArgs { platform, dtype, layout, mesh, chip } = self;
        dtype.is_some() || [platform, layout, mesh, chip].iter().any(|text| text.is_some())
    }

    pub(crate) fn add(&self, given: &mut CliOverrides) {
        given.flag("platform", "runtime.platform", &self.platform);
        given.flag("dtype", "runtime.dtype", self.dtype);
        given.flag("layout", "layout", &self.layout);
        given.flag("chip", "runtime.chip_file", &self.chip);
        given.mesh = self.mesh.clone();
    }
}

/// Options of distributed runs.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Processes")]
pub(crate) struct ProcessArgs {
    /// Coordinator address: HOST:PORT of process 0, or etcd://HOST:PORT/RUN [default: from SLURM, Open MPI, a JobSet or
    /// GKE]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) coordinator: Option<String>,
    /// Index of this process, starting at 0
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) process_id: Option<u64>,
    /// Number of processes; 1 ignores launcher variables in the environment
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) num_processes: Option<u64>,
    /// Number of CUDA devices per process, if several processes share a host
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) devices_per_process: Option<u64>,
}

impl ProcessArgs {
    pub(crate) fn add(&self, given: &mut CliOverrides) {
        given.flag("coordinator", "runtime.distributed.coordinator", &self.coordinator);
        given.flag("process-id", "runtime.distributed.process_id", self.process_id);
        given.flag("num-processes", "runtime.distributed.num_processes", self.num_processes);
        given.flag("devices-per-process", "runtime.distributed.devices_per_process", self.devices_per_process);
    }
}

/// Output options.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Output MP4, or a folder for several videos [default: out/ltx2_SEED.mp4, numbered if it exists]
    #[arg(short, long, value_name = "OUT")]
    pub(crate) output: Option<String>,
    /// Overwrites existing files, and deletes old frames in the folder of --save-frames
    #[arg(long)]
    pub(crate) force: bool,
    /// Also writes the frames as PNG files into this folder
    #[arg(long, value_name = "DIR")]
    pub(crate) save_frames: Option<String>,
    /// Folder of the EXR frames (pipeline hdr) [default: OUT_exr]
    #[arg(long, value_name = "DIR")]
    pub(crate) save_exr: Option<String>,
    /// Also writes the audio as a WAV file
    #[arg(long, value_name = "FILE")]
    pub(crate) save_audio: Option<String>,
    /// Also writes small frames of the current prediction every N steps, into the folder OUT.preview
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) preview_every: Option<u64>,
    /// Also writes embeddings, noise, latents, frames and audio samples as f32 tensors
    #[arg(long, value_name = "FILE.safetensors")]
    pub(crate) dump: Option<PathBuf>,
    /// Also dumps the latents after each denoising step
    #[arg(long, requires = "dump")]
    pub(crate) dump_steps: bool,
    /// Also writes timings and memory use as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) perf_json: Option<PathBuf>,
    /// Number of denoising steps per progress update
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole)]
    pub(crate) progress_every: Option<u64>,
    /// Writes a checkpoint to OUT.steps.safetensors every N steps and on interruption; with --chain, also keeps
    /// finished clips
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) checkpoint_every: Option<u64>,
    /// Resumes from the checkpoint and skips finished videos; the output is identical to that of an uninterrupted run
    #[arg(long, conflicts_with = "dump")]
    pub(crate) resume: bool,
    /// Prints results as JSON instead of paths
    #[arg(long)]
    pub(crate) json: bool,
    /// Prints the merged configuration as YAML with the origin of each value, then exits
    #[arg(long)]
    pub(crate) print_config: bool,
    /// Prints the plan of the run (sizes, tokens, passes, placement), then exits
    #[arg(long)]
    pub(crate) dry_run: bool,
}

impl OutputArgs {
    pub(crate) fn add(&self, given: &mut CliOverrides) {
        given.flag("output", "output.path", &self.output);
        given.flag("save-frames", "output.save_frames", &self.save_frames);
        given.flag("save-exr", "output.save_exr", &self.save_exr);
        given.flag("save-audio", "output.save_audio", &self.save_audio);
        given.flag("preview-every", "output.preview_every", self.preview_every);
        given.flag("progress-every", "sampler.progress_every", self.progress_every);
    }
}

/// Values of each `--image`: a path, and optionally a frame index and a strength.
#[derive(Clone, Debug, Default)]
pub(crate) struct ImageArgs(Vec<Vec<String>>);

// Derived arguments cannot tell which values belong to the same `--image`.
impl clap::Args for ImageArgs {
    fn augment_args(command: clap::Command) -> clap::Command {
        let image = clap::Arg::new("image").long("image").action(clap::ArgAction::Append).num_args(1..=3);
        let image = image.value_names(["PATH", "FRAME", "STRENGTH"]).allow_negative_numbers(true).help(
            "Conditioning image: file, frame index (-1 is the last of --num-frames) [default: 0], strength from 0 to 1 \
             [default: 1]; repeatable; implies --pipeline image_to_video unless another pipeline is selected",
        );
        command.arg(image.value_hint(clap::ValueHint::FilePath))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for ImageArgs {
    fn from_arg_matches(matches: &clap::ArgMatches) -> Result<Self, clap::Error> {
        let given = matches.get_occurrences::<String>("image").into_iter().flatten();
        Ok(ImageArgs(given.map(|values| values.cloned().collect()).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &clap::ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Parses the values of each `--image`. Negative frame indices count from the end, which requires a known number of
/// frames.
fn images(values: &[Vec<String>], num_frames: Option<&Value>) -> Result<Value, UsageError> {
    let one = |image: &Vec<String>| {
        let fail = |why: &str| Err(UsageError(format!("--image {}: {why}", image.join(" "))));
        let value = |at: usize, default| image.get(at).map_or(default, String::as_str);
        let (Ok(frame), Ok(strength)) = (value(1, "0").parse::<i64>(), value(2, "1").parse::<f64>()) else {
            return fail("expected a path, a frame number and a strength from 0 to 1, e.g. --image first.png 0 1.0");
        };
        let from_end = |count: i64| count.checked_add(frame).filter(|frame| *frame >= 0);
        let frame = match (frame, num_frames.and_then(Value::as_i64)) {
            (0.., _) => frame,
            (_, None) => return fail("a frame index counted from the end requires --num-frames N"),
            (_, Some(count)) => match from_end(count) {
                Some(frame) => frame,
                None => {
                    return fail(&format!(
                        "with --num-frames {count}, the frame index must be from -{count} to {}",
                        count - 1
                    ));
                }
            },
        };
        Ok(json!({"path": image[0], "frame": frame, "strength": strength}))
    };
    values.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_and_image_flags_become_lists_of_maps() {
        let text = |s: &[&str]| s.iter().map(|t| (*t).to_string()).collect::<Vec<_>>();
        assert_eq!(
            files(&text(&["a.safetensors", "b=c.safetensors=0.5"])),
            json!([{"path": "a.safetensors"}, {"path": "b=c.safetensors", "strength": 0.5}])
        );
    }

    #[test]
    fn image_frame_and_strength_are_optional() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            image: ImageArgs,
        }
        let parse = |words: &[&str]| {
            let line = <Line as clap::Parser>::try_parse_from([&["x"], words].concat()).unwrap();
            images(&line.image.0, Some(&json!(9)))
        };
        let got = parse(&["--image", "a.png", "--image", "b.png", "8", "0.5", "--image", "c.png", "-1"]).unwrap();
        let image = |path: &str, frame, strength| json!({"path": path, "frame": frame, "strength": strength});
        assert_eq!(got, json!([image("a.png", 0, 1.0), image("b.png", 8, 0.5), image("c.png", 8, 1.0)]));
        assert_eq!(parse(&[]).unwrap(), json!([]));
        let message = parse(&["--image", "i.png", "x", "1"]).unwrap_err().to_string();
        assert!(message.starts_with("--image i.png x 1: expected a path, a frame number"), "{message}");
    }

    #[test]
    fn negative_image_frames_count_from_the_end() {
        let frame = |frame: &str, count: Option<Value>| {
            let image = ["i.png", frame, "1"].map(String::from);
            images(&[image.into()], count.as_ref()).map(|all| all[0]["frame"].clone())
        };
        assert_eq!(frame("-1", Some(json!(121))).unwrap(), 120);
        assert_eq!(frame("-121", Some(json!(121))).unwrap(), 0);
        let message = |text: &str, count| frame(text, count).unwrap_err().to_string();
        let range = "--image i.png -122 1: with --num-frames 121, the frame index must be from -121 to 120";
        assert_eq!(message("-122", Some(json!(121))), range);
        for count in [None, Some(json!("auto"))] {
            assert!(message("-1", count).ends_with("requires --num-frames N"));
        }
    }
}
