//! Command-line options that select the model and its components.

use serde_json::{Value, json};

use crate::config::{CliOverrides, Model, Pipeline, WeightSource};
use ltx2_weights::for_each_override;

/// Options that replace single components of the model.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Model")]
pub(crate) struct ComponentArgs {
    /// Text encoder to use instead of the model's: folder, single file, or org/name
    #[arg(long, value_name = "PATH")]
    text_encoder: Option<String>,
    /// Tokenizer to use instead of the model's: tokenizer.json, or its folder
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<String>,
    /// Connectors to use instead of the model's: folder or single file, with or without the text projections
    #[arg(long, value_name = "PATH")]
    connectors: Option<String>,
    /// Video VAE to use instead of the model's: folder or single file
    #[arg(long, value_name = "PATH")]
    vae: Option<String>,
    /// Audio VAE to use instead of the model's: folder, or single file that includes the vocoder
    #[arg(long, value_name = "PATH")]
    audio_vae: Option<String>,
    /// Vocoder to use instead of the model's: folder or single file
    #[arg(long, value_name = "PATH")]
    vocoder: Option<String>,
    /// Spatial latent upsampler of two-stage pipelines: folder or single file
    #[arg(long, value_name = "FILE")]
    upsampler: Option<String>,
    /// Temporal latent upsampler, for temporal_x2 between two stages and for rounds of the pipeline dfr: folder or
    /// single file
    #[arg(long, value_name = "FILE")]
    temporal_upsampler: Option<String>,
    /// Duration head of LTX-2.5, for --num-frames auto: folder or single file
    #[arg(long, value_name = "PATH")]
    duration_head: Option<String>,
    /// Parts of file names that select one of several files of a component in a folder, such as fp8 or distilled,Q4_K_M
    #[arg(long, value_name = "PARTS")]
    variant: Option<String>,
}

impl ComponentArgs {
    /// Returns the name, configuration key and value of each flag.
    fn all(&self) -> impl Iterator<Item = (&'static str, &'static str, &Option<String>)> {
        macro_rules! all {
            ($($field:ident $component:ident $flag:literal),*) => {
                [$(($flag, concat!("model.", stringify!($field)), &self.$field)),*]
            };
        }
        for_each_override!(all).into_iter().chain([("variant", "model.variant", &self.variant)])
    }

    pub(crate) fn add(&self, given: &mut CliOverrides) {
        self.all().for_each(|(name, key, value)| given.flag(name, key, value));
    }

    /// Returns these flags as arguments of a child process.
    pub(crate) fn arguments(&self) -> impl Iterator<Item = [String; 2]> {
        self.all().filter_map(|(name, _, value)| Some([format!("--{name}"), value.clone()?]))
    }

    pub(crate) fn model(&self) -> Model {
        macro_rules! model {
            ($($field:ident $component:ident $flag:literal),*) => {
                Model { $($field: self.$field.clone(),)* variant: self.variant.clone(), ..Model::default() }
            };
        }
        for_each_override!(model)
    }
}

/// Model options.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Diffusers folder, folder of single files, single file, or org/name in the local Hugging Face cache
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) components: ComponentArgs,
    /// LoRA file and its strength [default: 1]; repeatable
    #[arg(long, value_name = "FILE[=S]")]
    pub(crate) lora: Vec<String>,
    /// IC-LoRA that follows --reference-video, or the --video of dub_it or inpaint: a published one, such as deblur, or a
    /// file; and its strength [default: the published one, or 1]
    #[arg(long, value_name = "NAME|FILE[=S]")]
    pub(crate) ic_lora: Option<String>,
    /// Source of the weights: files, or random numbers generated on the device
    #[arg(long, value_name = "FROM")]
    pub(crate) weights: Option<WeightSource>,
    /// Pipeline to run; determines the accepted inputs and the number of denoising passes
    #[arg(long, value_name = "NAME")]
    pub(crate) pipeline: Option<Pipeline>,
}

impl ModelArgs {
    pub(crate) fn add(&self, given: &mut CliOverrides) {
        given.flag("model", "model.path", &self.model);
        self.components.add(given);
        given.flag("lora", "model.loras", files(&self.lora));
        given.flag("ic-lora", "model.ic_lora", self.ic_lora.as_ref().map(|text| ic_lora(text)));
        given.flag("weights", "model.weights", self.weights);
        given.flag("pipeline", "pipeline", self.pipeline);
    }
}

/// Parses the value of --ic-lora or --detailing-lora. A missing strength becomes null, which also resets that of a
/// sidecar.
pub(super) fn ic_lora(text: &str) -> Value {
    let mut one = files(&[text.to_string()])[0].clone();
    one["strength"] = match one.get("strength") {
        None => Value::Null,
        // A strength that is not finite is no JSON number; its text is rejected when the flag is validated.
        Some(Value::Null) => text.rsplit('=').next().unwrap_or_default().into(),
        Some(strength) => strength.clone(),
    };
    one
}

/// Parses `PATH` or `PATH=STRENGTH` flags. The text after the last `=` is a strength only if it is a number.
pub(super) fn files(flags: &[String]) -> Value {
    let one = |text: &String| match text.rsplit_once('=').map(|(path, s)| (path, s.parse::<f64>())) {
        Some((path, Ok(strength))) => json!({"path": path, "strength": strength}),
        _ => json!({"path": text}),
    };
    flags.iter().map(one).collect()
}
