//! Requests by seed: a model, a pipeline with its inputs, options of which some are invalid, and output files that
//! already exist.

use std::fs;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use ltx2::config::{Pipeline, Support, VideoUse};
use ltx2::media::{Frames, write_png_frames};
use ndarray::Array4;

use super::draws::{Draws, keys_with_words, words};
use super::models::{Damage, Generation, Layout, Models};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
/// Configuration file common to all requests.
pub const CONFIG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/random_requests.yml");
/// Maximum number of options besides the pipeline's inputs.
const MAX_OPTIONS: usize = 2;

/// Request in a separate folder.
pub struct Request {
    pub seed: u64,
    pub generation: Generation,
    pub layout: Layout,
    pub pipeline: Pipeline,
    pub damage: Option<(PathBuf, Damage)>,
    pub options: Vec<&'static str>,
    /// Argument of `ltx2 check`.
    pub model: String,
    /// Values of `--set`.
    pub set: Vec<String>,
    /// Flags that only `generate` has.
    pub flags: Vec<String>,
    /// Output folder.
    pub out: PathBuf,
    /// Output video or audio file, or the folder of several.
    pub output: PathBuf,
    pub force: bool,
    pub videos: usize,
    /// Requested output files and folders besides the videos.
    pub more_outputs: Vec<PathBuf>,
}

/// Input files common to all requests.
pub struct Inputs {
    /// Folder with 17 frames of 96x64, without sound.
    frames: PathBuf,
}

impl Inputs {
    pub fn new(root: &Path) -> Self {
        let byte = |(f, y, x, c)| ((f * 13 + y * 3 + x * 5 + c * 70) % 256) as u8;
        let frames = Frames::new(Array4::from_shape_fn((17, 64, 96, 3), byte)).expect("frames");
        let folder = root.join("frames");
        write_png_frames(&folder, &frames).expect("written");
        Inputs { frames: folder }
    }
}

fn list<T: ToString>(values: &[T]) -> String {
    format!("[{}]", values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}

impl Request {
    /// Creates the request of a seed and writes its files into a folder.
    pub fn new(seed: u64, models: &Models, inputs: &Inputs, folder: &Path) -> Self {
        let draws = Draws::new(seed);
        let pipelines = Pipeline::value_variants();
        let pipeline = pipelines[seed as usize % pipelines.len()];
        // Half of the requests use LTX-2.0, whose programs other tests compile too; one pipeline needs LTX-2.5.
        let others = if pipeline.spec().has_rounds() { Generation::V2_5 } else { Generation::V2_0 };
        let generations = [others, others, Generation::V2_3, Generation::V2_5];
        let generation = generations[draws.below("generation", generations.len())];
        let layout = if draws.one_in("layout", 4) { Layout::Files } else { Layout::Folder };
        let mut model = models.link(draws, generation, layout, seed % 2 == 1, folder);
        // Single-stage pipelines reject an unused upsampler, whatever else is chosen.
        model.set.retain(|pair| pipeline.has_two_stages() || !pair.starts_with("model.upsampler="));
        let out = folder.join("out");
        fs::create_dir_all(&out).expect("a folder");
        let mut request = Request {
            seed,
            generation,
            layout,
            pipeline,
            damage: model.damage,
            options: Vec::new(),
            model: model.path,
            set: model.set,
            flags: Vec::new(),
            output: out.join(format!("video.{}", pipeline.extension())),
            out,
            force: false,
            videos: 1,
            more_outputs: Vec::new(),
        };
        request.set(&format!("pipeline={}", pipeline.name()));
        if draws.one_in("platform", 3) {
            // Only the CPU is visible: see `Ended::run`.
            request.set("runtime.platform=auto");
        }
        request.add_inputs(draws, inputs);
        if draws.one_in("other sampler", 4) {
            request.options.push("sampler");
            sampler(&mut request, draws, inputs);
        }
        if generation == Generation::V2_5 && draws.one_in("other decoder", 3) {
            request.options.push("decoder");
            decoder(&mut request, draws, inputs);
        }
        for option in 0..draws.below("options", MAX_OPTIONS + 1) {
            let (name, add) = OPTIONS[draws.below(&format!("option {option}"), OPTIONS.len())];
            if !request.options.contains(&name) {
                request.options.push(name);
                add(&mut request, draws, inputs);
            }
        }
        request.add_outputs(draws);
        request
    }

    fn set(&mut self, pair: &str) {
        self.set.push(pair.into());
    }

    fn flag(&mut self, words: &[&str]) {
        self.flags.extend(words.iter().map(|word| (*word).to_string()));
    }

    /// Adds sizes and inputs of the pipeline. Sizes are those of other tests, so that programs are compiled once.
    fn add_inputs(&mut self, draws: Draws, inputs: &Inputs) {
        let spec = self.pipeline.spec();
        let takes_video = spec.video.is_some();
        // A single guidance branch where other tests use one, to reuse their compiled programs.
        let alone = takes_video || !spec.generates_video;
        let distilled = matches!(
            self.pipeline,
            Pipeline::Distilled | Pipeline::IcLora | Pipeline::DubIt | Pipeline::Hdr | Pipeline::Dfr
        );
        let streams = if spec.audio == Support::Required { &["video"][..] } else { &["video", "audio"] };
        for stream in streams {
            let cfg = if alone || distilled { 1 } else { 3 };
            let scales = format!("guidance.{stream}={{cfg: {cfg}, stg: 0, modality: 1, rescale: 0}}");
            self.set(&scales);
        }
        self.set("sampler.steps=2");
        if !takes_video {
            let height = if self.pipeline.has_two_stages() || alone { 64 } else { 96 };
            self.set(&format!("request.height={height}"));
            self.set("request.width=64");
            self.set("request.num_frames=9");
        }
        // Sometimes omit the inputs that the pipeline needs.
        if draws.one_in("inputs", 12) {
            self.options.push("no inputs");
            return;
        }
        let video = format!("request.video={}", inputs.frames.display());
        if spec.images == Support::Required {
            self.add_image(draws);
        }
        if spec.audio == Support::Required {
            self.set(&format!("request.audio={{path: {FIXTURES}/sounds/given.flac}}"));
        }
        if spec.reference_videos == Support::Required {
            self.add_reference(inputs);
        }
        match spec.video {
            Some(VideoUse::Span) => {
                self.set(&video);
                let more = draws.pick("retake", &["", ", video: false", ", audio: false", ", kept: source"]);
                self.set(&format!("request.retake={{from: 0, to: 0.3{more}}}"));
                if draws.one_in("retake with sound", 2) {
                    self.set(&format!("request.audio={{path: {FIXTURES}/sounds/given.flac}}"));
                }
            }
            Some(VideoUse::Overlap) => {
                self.set(&video);
                let at = draws.pick("extend", &["end", "start"]);
                self.set(&format!("request.extend={{seconds: 0.3, at: {at}, overlap: 9}}"));
            }
            Some(VideoUse::Whole) => self.set(&video),
            Some(VideoUse::Region) => {
                self.set(&video);
                let more = draws.pick("inpaint", &["region: [0, 0, 32, 64]", "keep: [0, 0, 32, 32], audio: true"]);
                self.set(&format!("request.inpaint={{{more}}}"));
                self.set(&format!("request.audio={{path: {FIXTURES}/sounds/given.flac}}"));
            }
            Some(VideoUse::Reference) => {
                self.set(&video);
                self.set(&format!("request.audio={{path: {FIXTURES}/sounds/given.flac}}"));
            }
            None => {}
        }
    }

    fn add_image(&mut self, draws: Draws) {
        let frame = draws.pick("frame", &["0", "0", "8"]);
        let strength = draws.pick("strength", &["1.0", "0.5"]);
        let image = format!("{FIXTURES}/images/frame.png");
        self.set(&format!("request.images=[{{path: {image}, frame: {frame}, strength: {strength}, crf: 0}}]"));
    }

    fn add_reference(&mut self, inputs: &Inputs) {
        self.set(&format!("request.reference_videos=[{{path: {}}}]", inputs.frames.display()));
    }

    /// Adds outputs, and creates files at some of their paths.
    fn add_outputs(&mut self, draws: Draws) {
        let first = if self.videos > 1 {
            self.out.join(format!("0000_10.{}", self.pipeline.extension()))
        } else {
            self.output.clone()
        };
        let frames = self.out.join("frames");
        let sound = self.out.join(if self.videos > 1 { "sounds" } else { "sound.wav" });
        if self.videos > 1 {
            self.output = self.out.clone();
        }
        let mut planted =
            vec![self.out.join("other.mp4"), self.out.join("other.json"), self.out.join("notes/note.txt")];
        let mut ask = |request: &mut Request, name: &str, path: &Path, pair: &str, flag: &str| {
            if !draws.one_in(name, 6) {
                return;
            }
            request.options.push(if pair.is_empty() { "flags of outputs" } else { "outputs" });
            match pair {
                "" => request.flag(&[flag, path.to_str().expect("UTF-8")]),
                pair => request.set(&format!("{pair}={}", path.display())),
            }
            // In a folder of frames, a frame number that the run does not write.
            let file = if name == "frames" { path.join("frame_00099.png") } else { path.to_path_buf() };
            match draws.one_in(&format!("planted {name}"), 4) {
                true => planted.push(file),
                // The dumps of several videos have other names.
                false if name == "dump" && request.videos > 1 => {}
                false => request.more_outputs.push(path.to_path_buf()),
            }
        };
        ask(self, "frames", &frames, "output.save_frames", "");
        ask(self, "sound", &sound, "output.save_audio", "");
        let [dump, times] = ["dump.safetensors", "times.json"].map(|name| self.out.join(name));
        ask(self, "dump", &dump, "", "--dump");
        ask(self, "times", &times, "", "--perf-json");
        if draws.one_in("planted sidecar", 8) {
            planted.push(first.with_extension("json"));
        }
        if draws.one_in("planted video", 12) {
            planted.push(first);
        }
        self.force = draws.one_in("force", 8);
        for file in planted {
            fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
            fs::write(&file, format!("written before: {}", file.display())).expect("written");
        }
    }

    /// Returns the arguments of `generate`.
    pub fn arguments(&self) -> Vec<String> {
        let own = ["generate".to_string(), "-c".into(), CONFIG.into()];
        let set = self.set.iter().flat_map(|pair| ["--set".to_string(), pair.clone()]);
        let output = ["-o".to_string(), self.output.to_str().expect("UTF-8").to_string()];
        let force = self.force.then(|| "--force".to_string());
        own.into_iter().chain(set).chain(self.flags.iter().cloned()).chain(output).chain(force).collect()
    }

    /// Returns the arguments of `check`.
    pub fn check_arguments(&self) -> Vec<String> {
        let own = ["check", &self.model, "--json", "-c", CONFIG].map(String::from);
        let set = self.set.iter().flat_map(|pair| ["--set".to_string(), pair.clone()]);
        own.into_iter().chain(set).collect()
    }

    /// Returns whether an error is about an output or a flag that only `generate` has.
    pub fn is_about_outputs(&self, error: &str) -> bool {
        let flags = self.flags.iter().filter(|word| word.starts_with("--")).map(String::as_str);
        flags.chain(self.out.to_str()).any(|word| error.contains(word))
    }

    /// Returns the command line for a shell.
    pub fn command(&self) -> String {
        let quoted = |word: String| {
            let plain = word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./=".contains(c));
            if plain { word } else { format!("'{word}'") }
        };
        format!("ltx2 {}", self.arguments().into_iter().map(quoted).collect::<Vec<_>>().join(" "))
    }
}

type Add = fn(&mut Request, Draws, &Inputs);

/// Options by name; each sets values that are valid for some requests.
const OPTIONS: [(&str, Add); 22] = [
    ("sampler", sampler),
    ("steps", |r, d, _| r.set(&format!("sampler.steps={}", d.pick("steps", &["1", "3", "3", "257"])))),
    ("sigmas", |r, d, _| {
        let sigmas = d.pick("sigmas", &["[1.0, 0.5, 0.0]", "[1.0, 0.5]", "[0.5, 0.9]", "[]"]);
        r.set(&format!("sampler.sigmas={sigmas}"));
        r.set.retain(|pair| !pair.starts_with("sampler.steps"));
    }),
    ("second sigmas", second_sigmas),
    ("guidance", guidance),
    ("perturbed blocks", perturbed_blocks),
    ("guidance by step", |r, d, _| {
        let stream = d.pick("stream", &["video", "audio"]);
        let own =
            d.pick("by step", &["skip=1", "by_sigma=[{sigma: 1.0, cfg: 2}, {sigma: 0.5, cfg: 1}]", "by_sigma=[]"]);
        r.set(&format!("guidance.{stream}.{own}"));
    }),
    ("word", word),
    ("word", word),
    ("several videos", |r, _, _| {
        r.videos = 2;
        r.set("request.num_videos=2");
    }),
    ("chain", |r, d, _| {
        let prompts = d.pick("chain prompts", &["", ", prompts: [a blue ball]", ", prompts: [a, b, c, d, e, f]"]);
        let frames = d.pick("chain frames", &["33", "33", "17", "9"]);
        r.set(&format!("request.chain={{clip: 17, overlap: 9{prompts}}}"));
        r.set(&format!("request.num_frames={frames}"));
    }),
    ("frames", |r, d, _| {
        let frames = d.pick("frames", &["auto", "auto", "auto", "17", "10", "1"]);
        r.set(&format!("request.num_frames={frames}"));
        // The predicted duration is at least 1 s.
        r.set("request.frame_rate=8");
    }),
    ("generated keyframes", |r, d, _| {
        r.set(&format!("conditioning.generated_keyframes={}", d.pick("keyframes", &["1", "3", "20"])));
    }),
    ("tiling", |r, d, _| {
        let tiling = ["{pixels: 64, overlap: 32, frames: 16, frame_overlap: 8}", "{pixels: 64, overlap: 64}", "{}"];
        r.set(&format!("runtime.tiling={}", d.pick("tiling", &tiling)));
    }),
    ("decoder", decoder),
    ("LoRA", lora),
    ("part from elsewhere", part_from_elsewhere),
    ("image", |r, d, _| r.add_image(d)),
    ("sound", |r, d, _| {
        let file = d.pick("sound", &["given.flac", "tone_u8.wav", "gone.wav"]);
        r.set(&format!("request.audio={{path: {FIXTURES}/sounds/{file}}}"));
    }),
    ("reference", |r, _, inputs| r.add_reference(inputs)),
    ("upsampling", upsampling),
    ("outputs", |r, d, _| {
        r.set(d.pick("output", &["output.sidecar=false", "output.audio=false"]));
        if d.one_in("checkpoints", 3) {
            r.flag(&["--checkpoint-every", "1"]);
        }
    }),
];

fn sampler(r: &mut Request, d: Draws, _: &Inputs) {
    let kinds = words("sampler.kind");
    r.set(&format!("sampler.kind={}", kinds[d.below("sampler", kinds.len())]));
    if d.one_in("sampler setting", 4) {
        r.set(d.pick("sampler setting's", &["sampler.eta=0.5", "sampler.gamma=1.5", "sampler.noise_seed=3"]));
    }
}

fn decoder(r: &mut Request, d: Draws, _: &Inputs) {
    let words = words("model.decoder");
    r.set(&format!("model.decoder={}", words[d.below("decoder", words.len())]));
}

fn second_sigmas(r: &mut Request, d: Draws, _: &Inputs) {
    // 129 steps of a sampler that evaluates the transformer twice per step exceed the maximum table size.
    let many: Vec<f64> = (0..129).map(|step| f64::from(129 - step) / 129.0).collect();
    let sigmas = [list(&[0.9, 0.5, 0.0]), list(&[0.5, 0.0]), list(&many), list(&[0.5, 0.9])];
    r.set(&format!("two_stage.sigmas={}", sigmas[d.below("second sigmas", sigmas.len())]));
    let kinds = words("two_stage.sampler");
    if d.one_in("second sampler", 2) {
        r.set(&format!("two_stage.sampler={}", kinds[d.below("second sampler's", kinds.len())]));
    }
}

fn guidance(r: &mut Request, d: Draws, _: &Inputs) {
    let stream = d.pick("stream", &["video", "audio"]);
    let scale = d.pick("scale", &["cfg=3", "cfg=1", "modality=3", "rescale=0.7", "cfg=0"]);
    r.set(&format!("guidance.{stream}.{scale}"));
}

fn perturbed_blocks(r: &mut Request, d: Draws, _: &Inputs) {
    r.set(&format!("guidance.stg_blocks={}", d.pick("blocks", &["[1]", "[0, 1]", "[]", "[99]"])));
    r.set("guidance.video.stg=1");
}

/// Sets any key with enum values to one of them.
fn word(r: &mut Request, d: Draws, _: &Inputs) {
    let keys = keys_with_words();
    let (key, words) = &keys[d.below("key", keys.len())];
    r.set(&format!("{key}={}", words[d.below("word", words.len())]));
}

fn lora(r: &mut Request, d: Draws, _: &Inputs) {
    let file = d.pick("LoRA", &["ic_tiny_a_plain", "ic_tiny_a", "ic_tiny_2_3", "plain", "peft", "alpha", "gone"]);
    let stages = d.pick("stages", &["", ", stages: [1]", ", stages: [2]", ", stages: [3]"]);
    r.set(&format!("model.loras=[{{path: {FIXTURES}/lora/{file}.safetensors{stages}}}]"));
}

fn part_from_elsewhere(r: &mut Request, d: Draws, _: &Inputs) {
    let pairs = [
        ("upsampler", "upsampler_rational"),
        ("upsampler", "upsampler_plain"),
        ("upsampler", "upsampler_3_2"),
        ("temporal_upsampler", "upsampler_temporal/temporal_latent_upsampler"),
        ("duration_head", "duration_head_narrow"),
        ("vae", "tiny_a/vae"),
        ("vae", "tiny_2_3/vae"),
        ("audio_vae", "tiny_2_3/audio_vae"),
        ("vocoder", "vocoder_odd/vocoder"),
        ("text_encoder", "tiny_a/text_encoder"),
        ("text_encoder", "tiny_2_5/text_encoder"),
        ("tokenizer", "tiny_2_3/tokenizer"),
        ("tokenizer", "gone"),
    ];
    let (key, part) = pairs[d.below("part from elsewhere", pairs.len())];
    r.set(&format!("model.{key}={FIXTURES}/models/{part}"));
}

fn upsampling(r: &mut Request, d: Draws, _: &Inputs) {
    if r.pipeline.spec().has_rounds() && d.one_in("rounds", 2) {
        r.set("dfr.temporal_rounds=1");
        return;
    }
    let lists = ["[spatial_x2]", "[spatial_x1_5]", "[spatial_x2, temporal_x2]", "[temporal_x2]", "[]"];
    r.set(&format!("two_stage.upsample={}", d.pick("upsampling", &lists)));
    if d.one_in("upsampling's frames", 2) {
        r.set("request.num_frames=17");
    }
}
