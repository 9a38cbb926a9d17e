//! Checks that a run can enhance prompts, and enhances them one at a time.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::clean::{after_reasoning, clean, tokens_after_reasoning};
use super::endpoint::{Endpoint, USED_ALL_TOKENS};
use super::prompts::{EnhancedPrompt, Enhancement, keys};
use super::system::SystemPrompt;
use crate::config::{Config, Enhance, default_temperature};
use crate::models::chat::{ChatFormat, ChatPart, GEMMA_3, GEMMA_4};
use crate::models::gemma::GenerationSpec;
use crate::models::tokenizer::Tokenizer;
use crate::pipeline::error::{PipelineError, Result};
use crate::pipeline::phase::Phase;
use crate::pipeline::plan::origin::Origin;
use crate::pipeline::programs::build::warn_once;
use crate::pipeline::programs::configs::ModelConfigs;
use crate::pipeline::programs::prompt_enhancer::{TextGeneration, TokenSampling, round_up};
use crate::pipeline::runner::Runner;
use crate::pipeline::stages::clock::Clock;
use crate::text_file;
use crate::weights::{Component, Version};

/// File of the text encoder's folder with its stop tokens and sampling options.
const GENERATION_CONFIG: &str = "generation_config.json";
/// Other ways to get enhanced prompts, for errors.
const OTHER_WAYS: &str = "use an instruction-tuned Gemma's folder as model.text_encoder, set enhance.endpoint to a chat \
                          server, or write the enhanced prompt yourself and set request.enhance_prompt to false";

/// Tokens of a prompt of typical length, with the chat template. A longer prompt may run a larger program.
const TYPICAL_PROMPT: usize = 256;
/// UTF-8 bytes of a system prompt per token. Gemma's tokenizers have about 4.5 in English texts.
const BYTES_PER_TOKEN: usize = 4;
/// Largest number of tokens of a prompt that a server enhances, without the system prompt.
pub(crate) const MAX_SERVED_TOKENS: usize = 1024;

/// Token limit and sampling options of an enhanced prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sampling {
    pub(super) max_new_tokens: usize,
    /// 0: the most likely token.
    temperature: f64,
    top_k: usize,
    top_p: f64,
    /// Value of `enhance.temperature`.
    pub(super) set_temperature: Option<f64>,
    /// Value of `enhance.top_p`.
    pub(super) set_top_p: Option<f64>,
}

impl Sampling {
    /// Returns the sampling of a configuration, with the defaults of the model generation that uses `format`.
    fn new(own: &Enhance, format: &ChatFormat) -> Self {
        let version = if *format == GEMMA_4 { Version::V2_5 } else { Version::V2_0 };
        Sampling {
            max_new_tokens: own.max_new_tokens.unwrap_or(if version == Version::V2_5 { 600 } else { 512 }),
            temperature: own.temperature.unwrap_or_else(|| default_temperature(version)),
            top_k: own.top_k.unwrap_or(0),
            top_p: own.top_p.unwrap_or(1.0),
            set_temperature: own.temperature,
            set_top_p: own.top_p,
        }
    }
}

/// Returns the number of tokens to which a prompt of typical length is padded. It depends on nothing but the system
/// prompt, so that an enhanced prompt does not depend on the other prompts of a run.
fn padded_tokens(system: &str) -> usize {
    system.len().div_ceil(BYTES_PER_TOKEN) + TYPICAL_PROMPT
}

/// Returns the sizes of the program with which the text encoder enhances a prompt of typical length. Needs no tokenizer,
/// because programs are also compiled for models that are on another machine.
///
/// # Errors
/// Returns an error if the configuration enhances prompts and the system prompt cannot be read.
pub(crate) fn generation_spec(config: &Config, configs: &ModelConfigs) -> Result<GenerationSpec> {
    let (format, system) = match config.request.enhance_prompt {
        true => (configs.text_encoder()?.chat(), SystemPrompt::read(config, configs.origin())?),
        false => (configs.text_encoder().map_or(&GEMMA_3, |encoder| encoder.chat()), SystemPrompt::built_in(config)),
    };
    let sampling = Sampling::new(&config.enhance, format);
    Ok(round_up(GenerationSpec {
        rows: 1,
        prompt_tokens: padded_tokens(&system.text),
        new_tokens: sampling.max_new_tokens,
        stop_tokens: 1,
        sampled: sampling.temperature > 0.0,
        no_repeat_ngram_size: format.no_repeat_ngram_size,
    }))
}

/// Language model that enhances prompts.
#[derive(Clone)]
enum PromptSource {
    Endpoint(Box<Endpoint>),
    /// The text encoder.
    TextEncoder(Box<TextEncoderChat>),
}

/// The text encoder as a chat model.
#[derive(Clone)]
struct TextEncoderChat {
    format: &'static ChatFormat,
    stop_tokens: Vec<i32>,
    /// Folder of the text encoder.
    folder: PathBuf,
}

/// Enhances the prompts of a run.
#[derive(Clone)]
pub(crate) struct Enhancer {
    system: SystemPrompt,
    /// Start and end of the user's message, around the prompt.
    message: [&'static str; 2],
    sampling: Sampling,
    source: PromptSource,
    /// What the enhanced prompts depend on.
    keys: Value,
}

impl Enhancer {
    /// Returns the enhancer of a run; `None` if it does not enhance prompts. `tokenizer`: that of the model; not needed
    /// for an endpoint.
    ///
    /// # Errors
    /// Returns an error if the system prompt cannot be read, if the API key is not set, or if the text encoder cannot
    /// generate text; it says what to do.
    pub(crate) fn new(config: &Config, configs: &ModelConfigs, tokenizer: Option<&Tokenizer>) -> Result<Option<Self>> {
        if !config.request.enhance_prompt {
            return Ok(None);
        }
        let format = configs.text_encoder()?.chat();
        let has_images = !config.request.images.is_empty();
        let own = &config.enhance;
        let mut sampling = Sampling::new(own, format);
        let source = match Endpoint::from_config(own) {
            Some(endpoint) => PromptSource::Endpoint(Box::new(endpoint)),
            None => {
                let tokenizer = tokenizer.ok_or_else(|| no_files(configs.origin()))?;
                let (chat, defaults) = TextEncoderChat::open(configs, format, tokenizer)?;
                sampling.top_k = own.top_k.unwrap_or(defaults.top_k);
                sampling.top_p = own.top_p.unwrap_or(defaults.top_p);
                PromptSource::TextEncoder(Box::new(chat))
            }
        };
        let message = if has_images { ["User Raw Input Prompt: ", "."] } else { ["user prompt: ", ""] };
        let system = SystemPrompt::read(config, configs.origin())?;
        let keys = keys(config, &system, configs.origin());
        Ok(Some(Enhancer { system, message, sampling, source, keys }))
    }

    /// Checks that the API key of the configured endpoint can be sent; does nothing without an endpoint.
    ///
    /// # Errors
    /// Returns an error if the environment variable of `enhance.key_env` does not contain a key.
    pub(crate) fn check_key(config: &Enhance) -> Result<()> {
        Endpoint::from_config(config).map_or(Ok(()), |endpoint| endpoint.check_key())
    }

    /// Returns the warning that the enhancer does not see the inputs of a request. `None`: there are none.
    pub(crate) fn unseen_inputs(config: &Config) -> Option<String> {
        let request = &config.request;
        let has = [!request.images.is_empty(), request.video.is_some(), request.audio.is_some()];
        let names = ["images", "input video", "input audio"].into_iter().zip(has).filter(|(_, has)| *has);
        let names: Vec<&str> = names.map(|(name, _)| name).collect();
        let why = "the enhancer reads only text, so the prompt must describe them";
        (!names.is_empty()).then(|| format!("prompts are enhanced without the {}: {why}", names.join(" and the ")))
    }

    /// Returns whether the text encoder enhances the prompts, which needs the devices.
    pub(crate) fn needs_devices(&self) -> bool {
        matches!(self.source, PromptSource::TextEncoder(_))
    }

    fn message(&self, prompt: &str) -> String {
        let [before, after] = self.message;
        format!("{before}{prompt}{after}")
    }

    /// Encodes the chat of a prompt.
    fn encode(&self, format: &ChatFormat, tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<i32>> {
        let has_token = |token: &str| tokenizer.special_id(token).is_some();
        Ok(tokenizer.encode_chat(&format.parts(&self.system.text, &self.message(prompt), has_token))?)
    }

    /// Returns the number of tokens of the longest chat of these prompts; 0 for an endpoint.
    ///
    /// # Errors
    /// Returns an error if the tokenizer fails.
    pub(crate) fn longest(&self, tokenizer: &Tokenizer, prompts: &[String]) -> Result<usize> {
        let PromptSource::TextEncoder(chat) = &self.source else { return Ok(0) };
        prompts.iter().try_fold(0, |most, prompt| Ok(most.max(self.encode(chat.format, tokenizer, prompt)?.len())))
    }

    /// Checks that a server can enhance a prompt: it is not empty and not too long. The limit bounds the size of programs
    /// and of requests to the endpoint.
    ///
    /// # Errors
    /// Returns an error that says how many tokens the prompt may have.
    pub(crate) fn check_served(&self, tokenizer: &Tokenizer, prompt: &str) -> Result<()> {
        check_prompt(prompt)?;
        let tokens = tokenizer.encode_chat(&[ChatPart::Text(prompt.into())])?.len();
        if tokens > MAX_SERVED_TOKENS {
            return Err(PipelineError::Usage(format!(
                "the prompt has {tokens} tokens, and this server enhances at most {MAX_SERVED_TOKENS}; shorten the \
                 prompt, or set enhance_prompt to false"
            )));
        }
        Ok(())
    }

    /// Asks the endpoint to enhance a prompt. Blocks until the answer or the timeout.
    ///
    /// # Errors
    /// Returns an error if the endpoint gives no usable answer, or if the prompt is empty.
    pub(crate) fn ask(&self, prompt: &str, seed: u64) -> Result<EnhancedPrompt> {
        let PromptSource::Endpoint(endpoint) = &self.source else {
            return Err(PipelineError::Bug("the text encoder is not an endpoint".into()));
        };
        check_prompt(prompt)?;
        let answer = endpoint.ask(&self.system.text, &self.message(prompt), &self.sampling, seed)?;
        self.finish(prompt, &answer, seed)
    }

    /// Enhances a prompt with the text encoder on the devices.
    ///
    /// # Errors
    /// Returns an error if the device fails, or if the prompt or the answer is empty.
    pub(crate) fn generate(&self, runner: &mut Runner, prompt: &str, seed: u64) -> Result<EnhancedPrompt> {
        let PromptSource::TextEncoder(chat) = &self.source else {
            return Err(PipelineError::Bug("the endpoint is not a text encoder".into()));
        };
        check_prompt(prompt)?;
        let ids = self.encode(chat.format, &runner.model.tokenizer, prompt)?;
        if runner.build.streaming.is_some() {
            let cure = "set enhance.endpoint, or set runtime.stream to off";
            warn_once(vec![format!(
                "prompt enhancement is slow: each token reads the text encoder's weights from host memory \
                 (runtime.stream); {cure}"
            )]);
        }
        let mut clock = Clock::start(&runner.executor);
        let generated = runner.generate_text(&self.generation(chat, &[ids], seed))?;
        clock.ends(Phase::PromptEnhancer, &runner.executor);
        runner.add_enhancement_time(clock.took().iter().map(|took| took.total).sum());
        let max_new_tokens = self.sampling.max_new_tokens;
        let answer = generated.first().map(Vec::as_slice).unwrap_or_default();
        if answer.len() >= max_new_tokens {
            tracing::warn!("the enhanced prompt was cut off after {max_new_tokens} tokens (enhance.max_new_tokens)");
        }
        let tokenizer = &runner.model.tokenizer;
        let [start, end] = chat.format.reasoning().map(|token| token.and_then(|token| tokenizer.special_id(token)));
        let rest = tokens_after_reasoning(answer, start, end).ok_or_else(cut_off)?;
        self.finish(prompt, &tokenizer.decode(rest)?, seed)
    }

    /// Describes the generation of enhanced prompts. `prompts`: token ids of chats.
    fn generation<'a>(&self, chat: &'a TextEncoderChat, prompts: &'a [Vec<i32>], seed: u64) -> TextGeneration<'a> {
        let Sampling { max_new_tokens, temperature, top_k, top_p, .. } = self.sampling;
        TextGeneration {
            prompts,
            padded_tokens: padded_tokens(&self.system.text),
            max_new_tokens,
            stop_tokens: &chat.stop_tokens,
            sampling: TokenSampling { temperature: temperature as f32, top_k, top_p: top_p as f32, seed },
            no_repeat_ngram_size: chat.format.no_repeat_ngram_size,
        }
    }

    fn finish(&self, prompt: &str, answer: &str, seed: u64) -> Result<EnhancedPrompt> {
        let enhanced = clean(after_reasoning(answer).ok_or_else(cut_off)?);
        if enhanced.is_empty() {
            let is_greedy = match self.source {
                PromptSource::Endpoint(_) => self.sampling.set_temperature == Some(0.0),
                PromptSource::TextEncoder(_) => self.sampling.temperature == 0.0,
            };
            let change = match is_greedy {
                true => "set enhance.temperature to more than 0",
                false => "change enhance.seed or enhance.temperature",
            };
            return Err(PipelineError::Enhancement(format!(
                "the language model returned an empty answer; rephrase the prompt, {change}, or set request.enhance_prompt \
                 to false"
            )));
        }
        Ok(EnhancedPrompt { prompt: prompt.into(), enhanced, seed })
    }

    /// Returns the record of prompts that this enhancer enhanced.
    pub(crate) fn record(&self, prompts: Vec<EnhancedPrompt>) -> Enhancement {
        Enhancement::new(prompts, self.describe(), self.keys.clone())
    }

    /// Returns whether the prompts of a record depend on the same values.
    pub(crate) fn has_same_keys(&self, record: &Enhancement) -> bool {
        record.has_keys(&self.keys)
    }

    /// Returns the settings that must be equal in all processes of a run; without paths, which may differ.
    pub(in crate::pipeline) fn fingerprint(&self) -> String {
        format!("{} {:?}", self.system.sha256(), self.sampling)
    }

    /// Describes text encoder or endpoint, system prompt and sampling.
    fn describe(&self) -> Value {
        let sampling = &self.sampling;
        let mut own = json!({
            "system": self.system.source,
            "system_sha256": self.system.sha256(),
            "max_new_tokens": sampling.max_new_tokens,
        });
        match &self.source {
            PromptSource::Endpoint(endpoint) => {
                endpoint.describe().into_iter().for_each(|(key, value)| own[key] = value.into());
                let set = [("temperature", sampling.set_temperature), ("top_p", sampling.set_top_p)];
                for (key, value) in set.into_iter().filter_map(|(key, value)| Some((key, value?))) {
                    own[key] = value.into();
                }
            }
            PromptSource::TextEncoder(chat) => {
                own["model"] = chat.folder.display().to_string().into();
                own["temperature"] = sampling.temperature.into();
                (own["top_k"], own["top_p"]) = (sampling.top_k.into(), sampling.top_p.into());
                own["no_repeat_ngram_size"] = chat.format.no_repeat_ngram_size.into();
            }
        }
        own
    }
}

/// Returns the error of an answer that was cut off in its reasoning.
fn cut_off() -> PipelineError {
    PipelineError::Enhancement(format!("the language model {USED_ALL_TOKENS}"))
}

fn check_prompt(prompt: &str) -> Result<()> {
    if prompt.trim().is_empty() {
        let why = "an empty prompt cannot be enhanced; write a prompt, or set request.enhance_prompt to false";
        return Err(PipelineError::Usage(why.into()));
    }
    Ok(())
}

fn no_files(origin: &Origin) -> PipelineError {
    PipelineError::Usage(format!(
        "request.enhance_prompt: the text encoder of {} is not on this machine; {OTHER_WAYS}",
        origin.name()
    ))
}

/// Sampling options of `generation_config.json`.
struct SamplingDefaults {
    top_k: usize,
    top_p: f64,
}

impl TextEncoderChat {
    /// Reads the stop tokens and sampling options of the text encoder.
    fn open(
        configs: &ModelConfigs,
        format: &'static ChatFormat,
        tokenizer: &Tokenizer,
    ) -> Result<(Self, SamplingDefaults)> {
        let origin = configs.origin();
        let Origin::Files(source) = origin else { return Err(no_files(origin)) };
        let path = match source.folder(Component::TextEncoder) {
            Ok(folder) => folder.join(GENERATION_CONFIG),
            Err(_) => {
                let path = origin.config_place(Component::TextEncoder);
                let reason = format!("the text encoder is a single file without {GENERATION_CONFIG}; {OTHER_WAYS}");
                return Err(PipelineError::File { path, reason });
            }
        };
        if !path.is_file() {
            let reason = format!("this file is missing, so the text encoder cannot enhance prompts; {OTHER_WAYS}");
            return Err(PipelineError::File { path, reason });
        }
        let encoder = configs.text_encoder()?;
        if let Some(error) = encoder.generation_error() {
            return Err(configs.wrong(Component::TextEncoder, error));
        }
        let end_of_turn = turn_ids(format, tokenizer, &path)?;
        let (mut stop_tokens, defaults) = read_generation_config(&path, encoder.vocab_size())?;
        if !stop_tokens.contains(&end_of_turn) {
            stop_tokens.push(end_of_turn);
        }
        let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
        Ok((TextEncoderChat { format, stop_tokens, folder }, defaults))
    }
}

/// Checks that the tokenizer has the tokens of turns, and returns the id of the token that ends a turn.
fn turn_ids(format: &ChatFormat, tokenizer: &Tokenizer, path: &Path) -> Result<i32> {
    let mut end = None;
    for token in format.turn {
        end = tokenizer.special_id(token);
        if end.is_none() {
            let reason = format!(
                "the model's tokenizer lacks the token `{token}` of {}'s chat format, so the text encoder cannot enhance \
                 prompts; {OTHER_WAYS}",
                format.family
            );
            let path = path.parent().unwrap_or(path).to_path_buf();
            return Err(PipelineError::File { path, reason });
        }
    }
    end.ok_or_else(|| PipelineError::Bug("a chat format has no turn tokens".into()))
}

/// Reads `eos_token_id` (a number or a list), `top_k` and `top_p`.
fn read_generation_config(path: &Path, vocabulary: usize) -> Result<(Vec<i32>, SamplingDefaults)> {
    let wrong = |reason: String| PipelineError::File { path: path.into(), reason };
    let text = text_file::read(path).map_err(|error| wrong(format!("cannot read the file: {error}")))?;
    let json: Value = serde_json::from_str(&text).map_err(|error| wrong(format!("not a JSON object: {error}")))?;
    let ids = match &json["eos_token_id"] {
        Value::Array(ids) => ids.clone(),
        Value::Null => Vec::new(),
        id => vec![id.clone()],
    };
    let id = |id: &Value| {
        let known = id.as_u64().filter(|id| *id < vocabulary as u64).and_then(|id| i32::try_from(id).ok());
        known.ok_or_else(|| wrong(format!("eos_token_id = {id} must be a token id below {vocabulary}")))
    };
    let top_k = match &json["top_k"] {
        Value::Null => 0,
        value => value.as_u64().ok_or_else(|| wrong(format!("top_k = {value} must be a whole number, at least 0")))?,
    };
    let top_p = match &json["top_p"] {
        Value::Null => 1.0,
        value => {
            let share = value.as_f64().filter(|share| *share > 0.0 && *share <= 1.0);
            share.ok_or_else(|| wrong(format!("top_p = {value} must be more than 0 and at most 1")))?
        }
    };
    let ids = ids.iter().map(id).collect::<Result<_>>()?;
    Ok((ids, SamplingDefaults { top_k: top_k as usize, top_p }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{CliOverrides, load};
    use crate::pipeline::programs::build::Programs;

    #[test]
    fn compiled_text_generation_has_the_sizes_of_the_run() {
        for (preset, keys) in [
            ("ltx2", &[][..]),
            ("ltx2_3", &["enhance.temperature=0", "enhance.max_new_tokens=700"]),
            ("ltx2_5", &[]),
            ("ltx2_5", &["enhance.temperature=0.5"]),
        ] {
            let set = keys.iter().map(|key| (*key).to_string()).chain(["request.enhance_prompt=true".into()]).collect();
            let loaded = load(&CliOverrides { files: vec![preset.into()], set, ..CliOverrides::default() });
            let config = loaded.expect("a configuration").config;
            let programs = Programs::from_config(&config, None).expect("programs");
            let format =
                ModelConfigs::from(Origin::find(&config).expect("a model")).text_encoder().expect("one").chat();
            let chat = TextEncoderChat { format, stop_tokens: vec![1, 106], folder: PathBuf::new() };
            let enhancer = Enhancer {
                system: SystemPrompt::built_in(&config),
                message: ["user prompt: ", ""],
                sampling: Sampling::new(&config.enhance, format),
                source: PromptSource::TextEncoder(Box::new(chat.clone())),
                keys: Value::Null,
            };
            let sizes = |tokens: usize| enhancer.generation(&chat, &[vec![5; tokens]], 3).spec().prompt_tokens;
            let prompts = [vec![5; 600]];
            let run = enhancer.generation(&chat, &prompts, 3).spec();
            assert_eq!(programs.generation().expect("text generation"), run, "{preset} {keys:?}");
            // A longer prompt of a run has a program of its own, for which the plan reserves memory.
            assert_eq!(sizes(400), sizes(600));
            let longer = programs.enhancing(2000).generation().expect("text generation");
            assert_eq!((sizes(2000), longer.prompt_tokens), (2048, 2048));
        }
    }

    /// The server opens the enhancer when it starts.
    #[test]
    fn text_encoder_with_its_own_output_head_is_refused_when_it_is_opened() {
        let folder = tempfile::tempdir().expect("a folder");
        let copy = |from: &str| {
            let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/tiny_a").join(from);
            for entry in std::fs::read_dir(from).expect("a folder").flatten() {
                std::fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("copied");
            }
        };
        copy("text_encoder");
        let path = folder.path().join("config.json");
        let mut json: Value = serde_json::from_str(&std::fs::read_to_string(&path).expect("a file")).expect("JSON");
        json["tie_word_embeddings"] = false.into();
        std::fs::write(&path, json.to_string()).expect("written");
        let mut config = Config::default();
        config.model.path = format!("{}/tests/fixtures/models/tiny_a", env!("CARGO_MANIFEST_DIR"));
        config.model.text_encoder = Some(folder.path().display().to_string());
        config.request.enhance_prompt = true;
        let configs = ModelConfigs::from(Origin::find(&config).expect("a model"));
        let tokenizer = Tokenizer::bytes(&configs.tokenizer().expect("rules")).expect("a tokenizer");
        let error = Enhancer::new(&config, &configs, Some(&tokenizer)).err().expect("refused").to_string();
        assert!(error.contains("tie_word_embeddings"), "{error}");
    }

    #[test]
    fn inputs_that_the_enhancer_does_not_see_are_named() {
        let mut config = Config::default();
        assert_eq!(Enhancer::unseen_inputs(&config), None);
        config.request.video = Some("a.mp4".into());
        let image = r#"{"path": "a.png", "frame": 0, "strength": 1.0, "crf": 0}"#;
        config.request.images = vec![serde_json::from_str(image).expect("an image")];
        let warning = Enhancer::unseen_inputs(&config).expect("a warning");
        assert!(warning.starts_with("prompts are enhanced without the images and the input video: "), "{warning}");
    }

    #[test]
    fn generation_config_sets_stop_tokens_and_sampling_and_rejects_invalid_values() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(GENERATION_CONFIG);
        let read = |text: &str| {
            std::fs::write(&path, text).expect("written");
            read_generation_config(&path, 400).map(|(ids, own)| (ids, own.top_k, own.top_p))
        };
        let all = r#"{"eos_token_id": [1, 106], "top_k": 64, "top_p": 0.95}"#;
        assert_eq!(read(all).expect("valid"), (vec![1, 106], 64, 0.95));
        assert_eq!(read(r#"{"eos_token_id": 1}"#).expect("valid"), (vec![1], 0, 1.0));
        assert_eq!(read("{}").expect("valid"), (vec![], 0, 1.0));
        for (text, want) in [
            (r#"{"eos_token_id": [1, 400]}"#, "eos_token_id = 400 must be a token id below 400"),
            (r#"{"top_k": -1}"#, "top_k = -1 must be a whole number"),
            (r#"{"top_p": 0}"#, "top_p = 0 must be more than 0"),
            ("[", "not a JSON object"),
        ] {
            let error = read(text).expect_err(want).to_string();
            assert!(error.contains(want) && error.contains(GENERATION_CONFIG), "{error}");
        }
    }
}
