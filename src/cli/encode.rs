//! `ltx2 encode`: writes the video of decoded frames and audio samples in a tensor file.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use ndarray::{Array2, Array3, Array4, Array5, ArrayD, Axis, Dimension};

use super::numbers::finite;
use super::{UsageError, check_output_file, print};
use crate::media::{Audio, Frames, Mp4Options, WavFormat, write_mp4, write_wav_file};
use crate::pipeline::output::tensors;
use crate::pipeline::stages::text_to_video::{FRAME_RATE, SAMPLE_RATE};
use crate::tensor::Tensor;
use crate::weights::Checkpoint;

/// Encodes the frames and audio samples that a run kept when it could not write its video, or those of a dump (`generate
/// --dump`).
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "Examples:
  ltx2 encode /tmp/out.mp4.71.safetensors -o out.mp4
  ltx2 encode dump.safetensors -o out.mp4")]
pub(crate) struct EncodeArgs {
    /// Tensor file with frames, audio samples, or both
    #[arg(value_name = "FILE.safetensors")]
    input: PathBuf,
    /// Output MP4; without frames, a WAV file
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    /// Overwrites an existing file
    #[arg(long)]
    force: bool,
    /// Frames per second [default: recorded in the file]
    #[arg(long, value_name = "FPS", value_parser = finite)]
    frame_rate: Option<f64>,
    /// Samples per second [default: recorded in the file]
    #[arg(long, value_name = "HZ", value_parser = clap::value_parser!(u32).range(1..))]
    sample_rate: Option<u32>,
}

pub(crate) fn run(args: &EncodeArgs) -> anyhow::Result<()> {
    let file = Checkpoint::open(&args.input)?;
    let (frames, samples) = (read_frames(&file)?, read_samples(&file)?);
    if frames.is_none() && samples.is_none() {
        let names: Vec<_> = file.names().collect();
        bail!(
            "{}: has neither frames nor audio samples, only {}; decode latents with ltx2 run video-decoder",
            args.input.display(),
            names.join(", ")
        );
    }
    let ending = if frames.is_some() { "mp4" } else { "wav" };
    check_output_file("-o", Some(&args.output), &[ending], args.force)?;
    let sound = match samples {
        Some(samples) => {
            let rate = rate(&file, SAMPLE_RATE, "--sample-rate", args.sample_rate)?;
            Some(Audio::new(samples, rate).with_context(|| args.input.display().to_string())?)
        }
        None => None,
    };
    if let Some(frames) = frames {
        let rate = rate(&file, FRAME_RATE, "--frame-rate", args.frame_rate)?;
        let options = Mp4Options { replace: args.force, ..Mp4Options::default() };
        write_mp4(&args.output, &frames, rate, sound.as_ref(), &options)?;
    } else if let Some(sound) = sound {
        write_wav_file(&args.output, &sound, WavFormat::Pcm16, args.force)?;
    }
    print(&format!("{}\n", args.output.display()))
}

/// Returns a rate: that of the flag, or the one in the metadata of the file.
fn rate<T: std::str::FromStr>(file: &Checkpoint, key: &str, flag: &str, given: Option<T>) -> anyhow::Result<T> {
    let recorded = || file.metadata(key).and_then(|text| text.parse().ok());
    given
        .or_else(recorded)
        .ok_or_else(|| UsageError(format!("{}: records no {key}; pass {flag}", file.path().display())).into())
}

fn read(file: &Checkpoint, name: &str) -> anyhow::Result<Option<Tensor>> {
    Ok(if file.contains(name) { Some(file.get(name)?.to_tensor()?) } else { None })
}

/// Reads the kept `frames`, or the `video` of a dump. `None`: the file has neither.
fn read_frames(file: &Checkpoint) -> anyhow::Result<Option<Frames>> {
    let path = file.path();
    if let Some(frames) = read(file, "frames")? {
        let Tensor::U8(frames) = frames else { bail!("{}: frames are not of type U8", path.display()) };
        let frames: Array4<u8> = shaped(path, "frames", frames)?;
        return Ok(Some(Frames::new(frames)?));
    }
    let Some(video) = read(file, "video")? else { return Ok(None) };
    let video: Array5<f32> = shaped(path, "video", video.into_f32())?;
    match video.len_of(Axis(0)) {
        1 => Ok(Some(Frames::from_video(video.index_axis(Axis(0), 0))?)),
        count => bail!("{}: the tensor 'video' contains {count} videos; encode needs exactly one", path.display()),
    }
}

/// Reads the audio samples `[channels, samples]`, or those of a dump, `[1, channels, samples]`. `None`: the file has
/// none.
fn read_samples(file: &Checkpoint) -> anyhow::Result<Option<Array2<f32>>> {
    let Some(samples) = read(file, "audio")? else { return Ok(None) };
    let samples = samples.into_f32();
    if samples.ndim() == 2 {
        return shaped(file.path(), "audio", samples).map(Some);
    }
    let samples: Array3<f32> = shaped(file.path(), "audio", samples)?;
    match samples.len_of(Axis(0)) {
        1 => Ok(Some(samples.index_axis_move(Axis(0), 0))),
        count => bail!("{}: audio has {count} tracks, not one", file.path().display()),
    }
}

fn shaped<A, D: Dimension>(path: &Path, name: &str, values: ArrayD<A>) -> anyhow::Result<ndarray::Array<A, D>> {
    let shape = values.shape().to_vec();
    tensors::fixed(values).map_err(|_| anyhow::anyhow!("{}: {name} has the unexpected shape {shape:?}", path.display()))
}
