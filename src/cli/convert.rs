//! `ltx2 convert`: writes a model file with the linear layers in another format.

use std::path::PathBuf;
use std::time::Instant;

use crate::atomic_file;
use crate::interrupts;
use crate::pipeline::plan::outputs::check_file_room;
use crate::weights::Conversion;
use crate::weights::quantize::QuantizedForm;

use super::progress::byte_progress;
use super::{check_output_file, print};

/// Converts the linear layers of a model to another format, and writes one safetensors file with Lightricks' tensor
/// names and ComfyUI's quantization markers. Layers that already have the format are copied. Other quantized tensors
/// become bf16; unquantized tensors are copied. The header keeps its metadata, except for the format.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  ltx2 convert ltx-2.5-22b-dev-transformer-bf16.safetensors dev-int8-convrot.safetensors --weights int8-convrot
  ltx2 convert LTX-2.3-Q8_0.gguf LTX-2.3-bf16.safetensors --weights bf16
  ltx2 convert LTX-2.3/transformer LTX-2.3-fp8.safetensors --weights fp8")]
pub(crate) struct ConvertArgs {
    /// File with the transformer or the text encoder (safetensors, quantized or not, or GGUF; Gemma 4 only as
    /// safetensors), diffusers' folder `transformer`, or the folder of Gemma 3.
    input: PathBuf,
    /// Safetensors file to write.
    output: PathBuf,
    /// Format of the linear layers: bf16; fp8 (one scale per layer) or int8 (one scale per output channel) in all
    /// blocks except the first and about the last tenth; int8-convrot in all blocks and the connectors. Every format
    /// also applies to the text encoder.
    #[arg(long, value_name = "FORM", value_parser = ["bf16", "fp8", "int8", "int8-convrot"])]
    weights: String,
    /// Overwrites an existing output file.
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(args: &ConvertArgs) -> anyhow::Result<()> {
    check_output_file("OUTPUT", Some(&args.output), &["safetensors"], args.force)?;
    let form = QuantizedForm::ALL.into_iter().find(|form| form.name() == args.weights);
    let conversion = Conversion::plan(&args.input, form)?;
    check_file_room("OUTPUT", &args.output, conversion.bytes())?;
    interrupts::doing("before the file was complete; nothing was written");
    let (started, progress) = (Instant::now(), byte_progress("convert", conversion.bytes()));
    atomic_file::write_file_with(&args.output, args.force, |file| {
        anyhow::Ok(conversion.write(file, &args.output, &progress)?)
    })?;
    let (gigabytes, seconds) = (conversion.bytes() as f64 / 1e9, started.elapsed().as_secs_f64());
    let mut layers = format!("{} layers quantized, {} copied", conversion.quantized, conversion.copied);
    if conversion.unsupported > 0 {
        layers += &format!(
            ", {} not quantized because their number of columns is not a multiple of 256",
            conversion.unsupported
        );
    }
    tracing::info!(
        "{} tensors ({layers}), {gigabytes:.2} GB in {seconds:.1} s, {:.2} GB/s",
        conversion.tensors().len(),
        gigabytes / seconds
    );
    print(&format!("{}\n", args.output.display()))
}
