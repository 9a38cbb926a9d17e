//! Reads `vocoder/config.json`.

use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::COMPONENT;
use super::activation::AntiAlias;
use super::resample::Resampler;
use crate::config_keys::{keys, refuse_unread};
use crate::ranges::{MAX_CONVOLUTIONS, MAX_SAMPLES, check_at_most};
use crate::{ComponentConfigError, read_keys, require};
use ltx2_base::with_defaults;

/// Configuration of the vocoder.
#[derive(Clone, Debug)]
pub struct VocoderConfig {
    /// The generator that takes the spectrogram.
    pub generator: GeneratorConfig,
    /// The bandwidth extension of LTX-2.3; `None` for LTX-2.0.
    pub extension: Option<BandwidthExtension>,
    /// Sampling rate of the generated audio in Hz.
    pub output_sampling_rate: usize,
}

/// Bandwidth extension: a second generator computes, from the waveform's spectrogram, the high frequencies that the
/// waveform lacks at the higher sampling rate.
#[derive(Clone, Debug)]
pub struct BandwidthExtension {
    pub spectrogram: Spectrogram,
    /// Generator of the missing high frequencies, whose input is the spectrogram.
    pub generator: GeneratorConfig,
    /// Resampler that converts the waveform to the higher rate.
    pub(crate) resampler: Resampler,
    /// Whether the waveform is clamped to -1..1 before the extension, as in Lightricks' code; diffusers does not clamp
    /// it.
    pub clamp: bool,
}

/// A causal log-mel spectrogram.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Spectrogram {
    pub filter_length: usize,
    pub hop_length: usize,
    pub window_length: usize,
    pub num_mel_channels: usize,
}

impl Spectrogram {
    /// Returns the number of Fourier bins.
    pub(crate) fn frequencies(&self) -> usize {
        self.filter_length / 2 + 1
    }

    /// Returns the zero padding before the first sample, in samples.
    pub(crate) fn lead(&self) -> usize {
        self.window_length.saturating_sub(self.hop_length)
    }
}

with_defaults! {
    /// Configuration of one generator, with the defaults of the diffusers class for LTX-2.0.
    #[derive(Clone, Debug, Deserialize)]
    #[serde(default)]
    pub struct GeneratorConfig {
        pub in_channels: usize = 128,
        pub hidden_channels: usize = 1024,
        pub out_channels: usize = 2,
        pub upsample_kernel_sizes: Vec<usize> = vec![16, 15, 8, 4, 4],
        pub upsample_factors: Vec<usize> = vec![6, 5, 2, 2, 2],
        pub resnet_kernel_sizes: Vec<usize> = vec![3, 7, 11],
        pub resnet_dilations: Vec<Vec<usize>> = vec![vec![1, 3, 5]; 3],
        pub act_fn: VocoderActivation = VocoderActivation::LeakyRelu,
        pub leaky_relu_negative_slope: f64 = 0.1,
        pub antialias: bool = false,
        pub antialias_ratio: usize = 2,
        pub antialias_kernel_size: usize = 12,
        pub final_act_fn: Option<FinalActivation> = Some(FinalActivation::Tanh),
        pub final_bias: bool = true,
    }
}

/// Names of the diffusers classes without and with bandwidth extension.
const PLAIN: &str = "LTX2Vocoder";
const EXTENDED: &str = "LTX2VocoderWithBWE";

/// Returns the defaults of the diffusers class with bandwidth extension, for the keys whose defaults differ from those
/// of LTX-2.0's class.
fn extended_defaults() -> Json {
    json!({
        "hidden_channels": 1536, "upsample_kernel_sizes": [11, 4, 4, 4, 4, 4], "upsample_factors": [5, 2, 2, 2, 2, 2],
        "act_fn": "snakebeta", "antialias": true, "final_act_fn": null, "final_bias": false,
        "bwe_hidden_channels": 512, "bwe_upsample_kernel_sizes": [12, 11, 4, 4, 4],
        "bwe_upsample_factors": [6, 5, 2, 2, 2], "bwe_act_fn": "snakebeta", "bwe_antialias": true,
        "bwe_final_act_fn": null, "bwe_final_bias": false,
        "filter_length": 512, "hop_length": 80, "window_length": 512, "num_mel_channels": 64,
        "input_sampling_rate": 16000, "output_sampling_rate": 48000,
    })
}

/// Activation between convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VocoderActivation {
    /// `x` where positive, a small multiple of `x` elsewhere.
    LeakyRelu,
    /// `x + sin²(αx) / α` with a learned α per channel.
    Snake,
    /// `x + sin²(αx) / β` with learned α and β per channel.
    #[serde(rename = "snakebeta")]
    SnakeBeta,
}

/// Activation of the last layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinalActivation {
    Tanh,
    /// Clamps to -1..1.
    Clamp,
}

impl VocoderConfig {
    /// Reads and checks `config.json`. With bandwidth extension, the waveform is clamped between the stages, as in
    /// Lightricks' code.
    ///
    /// # Errors
    /// Returns an error if a key has the wrong type, the lengths of lists do not match, or a value is out of range or
    /// unsupported.
    pub fn from_json(json: &Json) -> Result<Self, ComponentConfigError> {
        with_defaults! {
            #[derive(Deserialize)]
            #[serde(default)]
            struct Plain {
                #[serde(rename = "_class_name")]
                class_name: String = PLAIN.into(),
                output_sampling_rate: usize = 24000,
            }
        }
        let plain: Plain = read_keys(COMPONENT, json)?;
        if plain.class_name == EXTENDED {
            return Self::extended(json);
        }
        let known = [keys::<Plain>(), keys::<GeneratorConfig>()].concat();
        refuse_unread(COMPONENT, json, |key| known.contains(&key))?;
        require(
            plain.class_name == PLAIN,
            COMPONENT,
            "_class_name",
            &plain.class_name,
            "LTX2Vocoder and LTX2VocoderWithBWE",
        )?;
        let generator = GeneratorConfig::from_json(json, "")?;
        Ok(VocoderConfig { generator, extension: None, output_sampling_rate: plain.output_sampling_rate })
    }

    fn extended(json: &Json) -> Result<Self, ComponentConfigError> {
        #[derive(Deserialize)]
        struct Rates {
            input_sampling_rate: usize,
            output_sampling_rate: usize,
        }
        let known = [keys::<Rates>(), keys::<Spectrogram>(), keys::<GeneratorConfig>()].concat();
        let second = |key: &str| key.strip_prefix(BWE).is_some_and(|key| keys::<GeneratorConfig>().contains(&key));
        refuse_unread(COMPONENT, json, |key| known.contains(&key) || second(key))?;
        let mut all = extended_defaults();
        if let (Json::Object(all), Json::Object(given)) = (&mut all, json) {
            all.extend(given.iter().map(|(k, v)| (k.clone(), v.clone())));
        }
        let first = GeneratorConfig::from_json(&all, "")?;
        let second = GeneratorConfig::from_json(&all, BWE)?;
        let s: Spectrogram = read_keys(COMPONENT, &all)?;
        let rates: Rates = read_keys(COMPONENT, &all)?;
        let (from, to) = (rates.input_sampling_rate, rates.output_sampling_rate);
        let grows = to >= from && to.is_multiple_of(from);
        require(grows, COMPONENT, "output_sampling_rate", to, "a multiple of input_sampling_rate")?;
        check_at_most(COMPONENT, "output_sampling_rate / input_sampling_rate", to / from, MAX_GROWTH)?;
        // The number of spectrogram frames must equal the number of hops.
        let frames = s.filter_length > s.lead() && s.filter_length <= s.lead() + s.hop_length;
        require(
            frames,
            COMPONENT,
            "window_length",
            s.window_length,
            "filter_length to filter_length + hop_length - 1",
        )?;
        let bins = first.out_channels * s.num_mel_channels;
        require(second.in_channels == bins, COMPONENT, "bwe_in_channels", second.in_channels, BWE_CHANNELS)?;
        let channels = second.out_channels;
        require(channels == first.out_channels, COMPONENT, "bwe_out_channels", channels, "out_channels")?;
        let meets = second.samples_per_frame() == s.hop_length * (to / from);
        require(meets, COMPONENT, "bwe_upsample_factors", &second.upsample_factors, BWE_FACTORS)?;
        let extension = BandwidthExtension {
            spectrogram: s,
            generator: second,
            resampler: Resampler { ratio: to / from },
            clamp: true,
        };
        Ok(VocoderConfig { generator: first, extension: Some(extension), output_sampling_rate: to })
    }

    /// Sets whether the waveform is clamped before the bandwidth extension.
    #[must_use]
    pub fn with_clamp(mut self, clamp: bool) -> Self {
        if let Some(extension) = &mut self.extension {
            extension.clamp = clamp;
        }
        self
    }
}

/// Maximum ratio of the output rate to the input rate of the bandwidth extension; the published model has 3.
const MAX_GROWTH: usize = 64;

/// Prefix of the second generator's keys.
const BWE: &str = "bwe_";
const BWE_CHANNELS: &str = "out_channels * num_mel_channels";
const BWE_FACTORS: &str = "factors whose product is hop_length * output_sampling_rate / input_sampling_rate";

impl GeneratorConfig {
    /// Reads and checks the keys that start with `prefix`.
    fn from_json(json: &Json, prefix: &'static str) -> Result<Self, ComponentConfigError> {
        let keys = json.as_object().into_iter().flatten();
        let own: serde_json::Map<String, Json> =
            keys.filter_map(|(k, v)| Some((k.strip_prefix(prefix)?.to_string(), v.clone()))).collect();
        let c: Self = read_keys(COMPONENT, &Json::Object(own)).map_err(|e| match e {
            ComponentConfigError::Form { component, message } => {
                ComponentConfigError::Form { component, message: format!("{prefix}{message}") }
            }
            ComponentConfigError::OutOfRange { component, key, value, range } => {
                ComponentConfigError::OutOfRange { component, key: format!("{prefix}{key}"), value, range }
            }
            other => other,
        })?;
        let key = |name: &str| format!("{prefix}{name}");
        let (kernels, factors) = (&c.upsample_kernel_sizes, &c.upsample_factors);
        require(!factors.is_empty(), COMPONENT, key("upsample_factors"), factors, "one entry or more")?;
        let as_many = "as many entries as upsample_kernel_sizes";
        require(factors.len() == kernels.len(), COMPONENT, key("upsample_factors"), factors, as_many)?;
        let grows = factors.iter().zip(kernels).all(|(f, k)| k >= f);
        let longer = "sizes not smaller than the upsample_factors";
        require(grows, COMPONENT, key("upsample_kernel_sizes"), kernels, longer)?;
        let (sizes, dilations) = (&c.resnet_kernel_sizes, &c.resnet_dilations);
        require(!sizes.is_empty(), COMPONENT, key("resnet_kernel_sizes"), sizes, "one entry or more")?;
        let samples = factors.iter().fold(1, |all: usize, factor| all.saturating_mul(*factor));
        check_at_most(COMPONENT, &key("upsample_factors"), samples, MAX_SAMPLES)?;
        let convolutions = factors.len() * dilations.iter().map(Vec::len).sum::<usize>();
        check_at_most(COMPONENT, &key("resnet_dilations"), convolutions, MAX_CONVOLUTIONS)?;
        let halves = c.hidden_channels.checked_shr(factors.len() as u32).is_some_and(|last| last > 0);
        let every = "a number that can be halved once per upsampling stage";
        require(halves, COMPONENT, key("hidden_channels"), c.hidden_channels, every)?;
        let as_many = "as many entries as resnet_kernel_sizes";
        require(dilations.len() == sizes.len(), COMPONENT, key("resnet_dilations"), dilations, as_many)?;
        if c.act_fn == VocoderActivation::LeakyRelu {
            require(!c.antialias, COMPONENT, key("antialias"), true, "false if act_fn is leaky_relu")?;
        } else {
            let longer = c.antialias_kernel_size > c.antialias_ratio;
            let kernel = c.antialias_kernel_size;
            require(longer, COMPONENT, key("antialias_kernel_size"), kernel, "a size larger than antialias_ratio")?;
        }
        Ok(c)
    }

    /// Returns the number of audio samples generated per spectrogram frame.
    pub(crate) fn samples_per_frame(&self) -> usize {
        self.upsample_factors.iter().product()
    }

    pub(super) fn antialias(&self) -> AntiAlias {
        AntiAlias { ratio: self.antialias_ratio, kernel: self.antialias_kernel_size }
    }
}
