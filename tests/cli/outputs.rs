//! Output files: existing files are only overwritten on request, a failed run leaves none, and a failure after
//! denoising keeps the computed results.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ltx2::media::{probe_clip, read_wav};
use ltx2::pipeline::output::tensors;
use ltx2::tensor::Tensor;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::support::{self, needs};

const LORA: &str = "tests/fixtures/lora/ic_tiny_a_plain.safetensors";
const MODEL: &str = "tests/fixtures/models/tiny_a";

/// Working folder for commands, with a subfolder for temporary files.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        let folder = Folder(tempfile::tempdir().expect("a folder"));
        fs::create_dir(folder.path("tmp")).expect("a folder");
        folder
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn ltx2(&self, arguments: &[&str]) -> Command {
        let mut run = support::ltx2();
        run.args(arguments).current_dir(self.0.path()).env("TMPDIR", self.path("tmp"));
        run
    }

    /// Returns a short run of the smallest model.
    pub(crate) fn generate(&self, arguments: &[&str]) -> Command {
        let mut run = self.ltx2(&["generate", "-c", support::tiny(), "--steps", "1"]);
        run.args(arguments);
        run
    }

    /// Returns all files below the folder with their hashes, and empty folders with an empty hash.
    fn contents(&self) -> BTreeMap<PathBuf, String> {
        fn add(folder: &Path, all: &mut BTreeMap<PathBuf, String>) {
            let entries: Vec<_> = fs::read_dir(folder).expect("a folder").map(|e| e.expect("one").path()).collect();
            if entries.is_empty() {
                all.insert(folder.into(), String::new());
            }
            for path in entries {
                match path.is_dir() {
                    true => add(&path, all),
                    false => drop(all.insert(path.clone(), hash(&path))),
                }
            }
        }
        let mut all = BTreeMap::new();
        add(self.0.path(), &mut all);
        all
    }
}

fn hash(path: &Path) -> String {
    hex::encode(Sha256::digest(fs::read(path).expect("a file")))
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

pub(crate) fn succeed(run: &mut Command) -> String {
    let out = run.output().expect("runs");
    assert!(out.status.success(), "{}", stderr(&out));
    stderr(&out)
}

/// util-linux's `script` runs a command on a terminal.
#[needs(cpu)]
fn log_lines_on_a_terminal_are_not_mixed_with_progress() {
    let folder = Folder::new();
    let run = folder.generate(&["--progress-every", "1", "-o", "out.mp4"]);
    let words: Vec<_> = [run.get_program()].into_iter().chain(run.get_args()).map(|word| word.display()).collect();
    let line = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
    let mut terminal = Command::new("/usr/bin/script");
    terminal.args(["-qec", &line, "/dev/null"]).current_dir(folder.path("")).env("LTX2_LOG", "ltx2=debug");
    terminal.envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let out = terminal.output().expect("runs");
    let shown = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success() && shown.contains("encoding the prompt, 0s") && shown.contains("/1 steps"),
        "{shown:?}"
    );
    let lines: Vec<&str> = shown.split("\r\n").filter(|line| line.contains("DEBUG")).collect();
    assert!(lines.iter().any(|line| line.contains("denoise: evaluations")), "{shown:?}");
    for line in lines {
        // The line is erased before the message.
        let (_, message) = line.rsplit_once("\x1b[2K").unwrap_or_default();
        let text = if message.is_empty() { line } else { message };
        assert!(["/1 steps", "prompt, ", "video, "].iter().all(|bar| !text.contains(bar)), "{line:?}");
    }
}

/// Runs a command that must exit with `code`; returns its only error line.
pub(crate) fn error(code: i32, run: &mut Command) -> String {
    let out = run.output().expect("runs");
    let said = stderr(&out);
    assert_eq!(out.status.code(), Some(code), "{said}");
    let errors: Vec<&str> = said.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    errors[0].to_string()
}

pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("a file")).expect("JSON")
}

#[needs(nothing)]
fn existing_outputs_are_rejected_before_opening_model() {
    let folder = Folder::new();
    fs::create_dir(folder.path("frames")).expect("a folder");
    fs::create_dir(folder.path("a.mp4.preview")).expect("a folder");
    let all = ["--save-audio", "s.wav", "--save-frames", "frames", "--dump", "d.safetensors", "--perf-json", "p.json"];
    let all = [&all[..], &["--preview-every", "2"]].concat();
    let base = [&["generate", "-p", "x", "--model", "no/such/model", "-o", "a.mp4"], &all[..]].concat();
    let cases = [
        ("output.path", "a.mp4"),
        ("output.sidecar", "a.json"),
        ("output.save_audio", "s.wav"),
        ("output.save_frames", "frames/frame_00007.png"),
        ("--dump", "d.safetensors"),
        ("--perf-json", "p.json"),
    ];
    for (key, name) in cases {
        fs::write(folder.path(name), "kept").expect("written");
        let before = folder.contents();
        for more in [&[][..], &["--dry-run"]] {
            let error = error(2, &mut folder.ltx2(&[&base[..], more].concat()));
            let named = name.split('/').next().expect("a name");
            assert!(error.starts_with(&format!("error: {key}: {named} ")) && error.contains("--force"), "{error}");
        }
        // With --force, the run proceeds to open the model.
        let error = error(1, &mut folder.ltx2(&[&base[..], &["--force"]].concat()));
        assert!(error.contains("no/such/model"), "{error}");
        assert_eq!(folder.contents(), before, "{name}");
        fs::remove_file(folder.path(name)).expect("removed");
    }
    // Previews of a failed run do not block the next one.
    fs::write(folder.path("a.mp4.preview/step_002.webp"), "old").expect("written");
    let error_of_model = error(1, &mut folder.ltx2(&base));
    assert!(error_of_model.contains("no/such/model"), "{error_of_model}");
    let twice = ["--perf-json", "./d.safetensors", "--dump", "d.safetensors", "--force"];
    let error = error(2, &mut folder.ltx2(&[&base[..7], &twice].concat()));
    assert!(error.starts_with("error: --dump and --perf-json write to the same place"), "{error}");
}

#[needs(nothing)]
fn reports_and_layouts_are_not_overwritten() {
    let folder = Folder::new();
    let files = ["own.yml", "hlo/denoise.optimized.txt", "profile/summary.json", "search/best.yml", "cases/report.md"];
    for file in files.map(|name| folder.path(name)) {
        fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
        fs::write(file, "rules: {}\n").expect("written");
    }
    let before = folder.contents();
    let nano = ["-c", "nano_2_0", "-m", "no/such/model"];
    let commands: [(&str, &str, &[&str], &[&str]); 12] = [
        ("--write", "own.yml", &["why", "-c", "ltx2", "--target", "tpu:v6e:2x4", "--write", "own.yml"], &[]),
        ("--json", "own.yml", &["why", "-c", "ltx2", "--target", "tpu:v6e:2x4", "--json", "own.yml"], &[]),
        ("--report", "own.yml", &["compare", "a.mp4", "b.mp4", "--report", "own.yml"], &[]),
        ("--json", "own.yml", &["compare", "a.mp4", "b.mp4", "--json", "own.yml"], &[]),
        ("--json", "own.yml", &["bench", "--json", "own.yml"], &nano),
        ("--json", "own.yml", &["bench", "--micro", "--from", "a.json", "--json", "own.yml"], &[]),
        ("--fit", "own.yml", &["bench", "--micro", "--from", "a.json", "--fit", "own.yml"], &[]),
        ("--json", "own.yml", &["compile", "--target", "cpu:1", "--json", "own.yml"], &nano),
        ("--dump-hlo", "hlo/denoise.optimized.txt", &["compile", "--target", "cpu:1", "--dump-hlo", "hlo"], &nano),
        ("--json", "own.yml", &["profile", "-o", "new", "--json", "own.yml"], &nano),
        ("--json", "own.yml", &["profile", "--read", "a.xplane.pb", "--json", "own.yml"], &[]),
        ("--output", "profile/summary.json", &["profile", "-o", "profile"], &nano),
    ];
    for (flag, name, command, more) in commands {
        let error = error(2, &mut folder.ltx2(&[command, more].concat()));
        let line = format!("error: {flag}: {name} exists; overwrite it with --force, or choose another file");
        assert!(error.starts_with(&line), "{command:?}: {error}");
    }
    // An experiment only replaces reports in a folder that contains its log.
    let search = ["experiment", "--search", "--target", "cpu:2", "-c", "nano_2_0", "-o", "search"];
    for (command, name) in
        [(&search[..], "search/best.yml"), (&["experiment", "x.yml", "-o", "cases"], "cases/report.md")]
    {
        let error = error(2, &mut folder.ltx2(command));
        let line = format!(
            "error: --output: {name} exists, but its folder has no results.jsonl, so no experiment wrote the file"
        );
        assert!(error.starts_with(&line), "{error}");
    }
    // With --force, the commands proceed to their inputs and fail there.
    for command in [&["bench", "--json", "new.json", "--force"][..], &["profile", "-o", "profile", "--force"]] {
        let out = folder.ltx2(&[command, &nano].concat()).output().expect("runs");
        assert!(stderr(&out).contains("no/such/model"), "{command:?}: {}", stderr(&out));
    }
    assert_eq!(folder.contents(), before);
}

#[needs(nothing)]
fn failed_run_or_plan_leaves_no_files() {
    let folder = Folder::new();
    let before = folder.contents();
    let places = ["-o", "new/a.mp4", "--save-frames", "frames/of/a", "--save-audio", "sounds/a.wav"];
    let base = [&["generate", "-p", "x", "--perf-json", "times/p.json"], &places[..]].concat();
    let error = error(1, &mut folder.ltx2(&[&base[..], &["--model", "no/such/model"]].concat()));
    assert!(error.contains("no/such/model"), "{error}");
    assert_eq!(folder.contents(), before);
    succeed(&mut folder.ltx2(&[&base[..], &["-m", "ltx2", "--dry-run"]].concat()));
    assert_eq!(folder.contents(), before);
}

#[needs(cpu)]
fn rerun_and_forced_run_touch_no_other_files() {
    let folder = Folder::new();
    let places =
        ["--save-audio", "a.wav", "--save-frames", "frames", "--dump", "d.safetensors", "--perf-json", "p.json"];
    let previews = ["--preview-every", "1"];
    succeed(&mut folder.generate(&[&["-o", "out/ltx2_10.mp4"], &places[..], &previews].concat()));
    let first = folder.contents();
    assert_eq!(first.len(), 2 + 9 + 3 + 1 + 1, "{first:?}");
    let preview = folder.path("out/ltx2_10.mp4.preview/step_001.webp");
    assert_eq!(image::open(&preview).expect("an image").width(), 2 * 64 / 8);
    // The first run has the default name: the rerun gets the next number, and saves no frames, sound and previews.
    succeed(&mut folder.ltx2(&["generate", "-c", "out/ltx2_10.json"]));
    let mut second = folder.contents();
    let [video, sidecar] = ["out/ltx2_10_1.mp4", "out/ltx2_10_1.json"].map(|name| folder.path(name));
    assert_eq!(second.remove(&video), first.get(&folder.path("out/ltx2_10.mp4")).cloned());
    assert_eq!(json(&sidecar)["sha256"], json(&folder.path("out/ltx2_10.json"))["sha256"]);
    second.remove(&sidecar);
    assert_eq!(second, first);

    // Frames of a longer video are deleted; other files are kept.
    let [longer, notes] = ["frames/frame_00020.png", "frames/notes.txt"].map(|name| folder.path(name));
    fs::write(&longer, "of another video").expect("written");
    fs::write(&notes, "kept").expect("written");
    let again = ["generate", "-c", "out/ltx2_10.json", "-o", "b.mp4", "--save-frames", "frames"];
    let error = error(2, &mut folder.ltx2(&again));
    assert!(error.starts_with("error: output.save_frames: frames contains frames of another video"), "{error}");
    succeed(&mut folder.ltx2(&[&again[..], &["--force"]].concat()));
    assert_eq!(fs::read_dir(folder.path("frames")).expect("frames").count(), 10);
    assert!(!longer.exists() && notes.exists());
    let name = folder.path("frames/frame_00003.png");
    assert_eq!(folder.contents().get(&name), first.get(&name));
}

/// Copies the smallest model and one of its LoRAs.
fn copies(folder: &Folder) {
    for (from, to) in [(MODEL, "model"), (LORA, "lora.safetensors")] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join(from);
        assert!(Command::new("cp").arg("-r").arg(from).arg(folder.path(to)).status().expect("cp runs").success());
    }
}

fn change(path: &Path) {
    let mut bytes = fs::read(path).expect("a file");
    *bytes.last_mut().expect("bytes") ^= 1;
    fs::write(path, bytes).expect("written");
}

#[needs(cpu)]
fn reruns_and_resumes_compare_request_inputs_and_model() {
    let folder = Folder::new();
    copies(&folder);
    let lora = "model.loras=[{path: lora.safetensors}]";
    let own = ["-m", "model", "--set", lora, "-o", "a.mp4"];
    succeed(&mut folder.generate(&own));
    let sidecar = json(&folder.path("a.json"));
    assert!(sidecar["model"]["fingerprint"].as_str().is_some_and(|text| text.starts_with("v2:")), "{sidecar}");
    assert!(sidecar["inputs"]["lora.safetensors"].as_str().is_some_and(|text| text.starts_with("v2:")), "{sidecar}");

    // A finished video is compared with the request; the modification time of a LoRA is ignored.
    let lora = fs::File::options().append(true).open(folder.path("lora.safetensors")).expect("the LoRA");
    lora.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("another time");
    let before = folder.contents();
    let resumed = [&own[..], &["--resume"]].concat();
    assert!(succeed(&mut folder.generate(&resumed)).contains("a.mp4 is finished: nothing to resume"));
    let other = error(2, &mut folder.generate(&[&resumed[..], &["--seed", "77"]].concat()));
    assert!(other.contains("a.mp4: is the video of another request: request.seed was 10, is now 77"), "{other}");
    assert!(other.contains("--force"), "{other}");
    change(&folder.path("lora.safetensors"));
    let other = error(2, &mut folder.generate(&resumed));
    assert!(other.contains("lora.safetensors has changed: its hash was v2:"), "{other}");
    change(&folder.path("lora.safetensors"));
    let weights = folder.path("model/vae/diffusion_pytorch_model.safetensors");
    change(&weights);
    let other = error(2, &mut folder.generate(&resumed));
    assert!(other.contains("is the video of another request: model: changed components: vae"), "{other}");
    change(&weights);
    fs::rename(folder.path("a.json"), folder.path("b.json")).expect("renamed");
    let none = error(2, &mut folder.generate(&resumed));
    assert!(none.contains("a.mp4: has no sidecar (a.json)") && none.contains("another file with -o"), "{none}");
    fs::rename(folder.path("b.json"), folder.path("a.json")).expect("renamed");
    assert_eq!(folder.contents(), before, "nothing was written");

    // A rerun with a missing plugin, which fails there unless it is rejected before.
    let rerun =
        |more: &[&str]| folder.ltx2(&[&["generate", "-c", "a.json", "--platform", "/nowhere.so"], more].concat());
    assert!(error(1, &mut rerun(&[])).contains("/nowhere.so"));
    change(&folder.path("lora.safetensors"));
    let refused = error(1, &mut rerun(&[]));
    assert!(refused.starts_with("error: a.json: ") && refused.contains("lora.safetensors has changed"), "{refused}");
    assert!(refused.contains("--allow-changed-inputs"), "{refused}");
    for command in [
        &["generate", "--dry-run", "-o", "b.mp4"][..],
        &["check", "model"],
        &["bench"],
        &["profile", "-o", "profile"],
        &["serve", "--listen", "127.0.0.1:0", "--state", "tmp/state"],
    ] {
        let own = ["-c", "a.json", "--platform", "/nowhere.so"];
        let out = folder.ltx2(&[command, &own].concat()).output().expect("runs");
        let said = stderr(&out);
        assert!(!out.status.success() && said.contains("lora.safetensors has changed"), "{command:?}: {said}");
    }
    let allowed = rerun(&["--allow-changed-inputs"]).output().expect("runs");
    let said = stderr(&allowed);
    assert!(said.contains("WARN a.json: ") && said.contains("error: ") && said.contains("/nowhere.so"), "{said}");
    change(&folder.path("lora.safetensors"));
    change(&weights);
    let refused = error(1, &mut rerun(&[]));
    assert!(refused.contains("model: changed components: vae"), "{refused}");
    // Another model is allowed if it is selected explicitly.
    let named = stderr(&rerun(&["-m", "model"]).output().expect("runs"));
    assert!(
        named.contains("WARN a.json: this run uses a model other than that of the sidecar")
            && named.contains("/nowhere.so"),
        "{named}"
    );
    // Sidecars of an earlier release have no hash of the weights.
    let mut old = sidecar;
    old["model"] = serde_json::json!({"path": "model", "fingerprint": "0".repeat(64)});
    fs::write(folder.path("a.json"), old.to_string()).expect("written");
    let old = stderr(&rerun(&[]).output().expect("runs"));
    assert!(old.contains("fingerprint does not cover the weights") && old.contains("/nowhere.so"), "{old}");
}

/// Returns the file that an error names at its end, and its tensors.
pub(crate) fn kept(error: &str, what: &str) -> (PathBuf, BTreeMap<String, Tensor>) {
    // The error may name several files.
    let (_, path) = error.split_once(&format!("; {what}")).unwrap_or_else(|| panic!("'{what}' is not in {error}"));
    let path = PathBuf::from(support::kept_file(path));
    let tensors = tensors::read(&path).expect("tensors");
    (path, tensors)
}

fn bytes(path: &Path) -> Vec<u8> {
    fs::read(path).expect("an MP4")
}

/// Each step after the last denoising step fails in turn.
#[needs(cpu)]
fn failure_after_denoising_keeps_computed_results() {
    let folder = Folder::new();
    succeed(&mut folder.generate(&["-o", "whole.mp4", "--dump", "whole.safetensors"]));
    let whole = tensors::read(&folder.path("whole.safetensors")).expect("a dump");
    let sha256 = json(&folder.path("whole.json"))["sha256"].clone();
    let all = "the frames, audio samples and latents are";
    for (moment, what, left) in [
        ("decode video", "the latents are", &[][..]),
        ("decode audio", "the frames and latents are", &[]),
        ("rename out.mp4", all, &["out.wav"]),
        ("rename out.json", all, &["out.mp4", "out.wav"]),
        ("rename out.wav", all, &["out.json", "out.mp4"]),
    ] {
        let mut run = folder.generate(&["-o", "out.mp4", "--save-audio", "out.wav"]);
        let error = error(1, run.env("LTX2_FAILPOINT", format!("fail {moment}")));
        let (path, tensors) = kept(&error, what);
        assert!(path.starts_with(folder.path("tmp")), "{moment}: {error}");
        for name in ["latents.video", "latents.audio"] {
            assert!(tensors[name] == whole[name], "{moment}: {name}");
        }
        assert_eq!(tensors.contains_key("frames"), what.contains("frames"), "{moment}");
        assert_eq!(tensors.contains_key("audio"), what.contains("samples"), "{moment}");
        let names = ["out.json", "out.mp4", "out.wav"].into_iter().filter(|name| folder.path(name).exists());
        assert_eq!(names.collect::<Vec<_>>(), left, "{moment}: {error}");
        // The sidecar is next to the saved tensors or next to the video.
        let sidecar = [path.with_extension("json"), folder.path("out.json")].into_iter().find(|path| path.exists());
        assert_eq!(sidecar.is_some(), what == all, "{moment}");
        sidecar.iter().for_each(|sidecar| assert_eq!(json(sidecar)["sha256"], sha256, "{moment}"));
        left.iter().for_each(|name| fs::remove_file(folder.path(name)).expect("removed"));
        let kept_file = path.to_str().expect("UTF-8");
        let mut encode = folder.ltx2(&["encode", kept_file, "-o", "again.mp4"]);
        match what == all {
            true => {
                assert!(
                    error.ends_with(&format!("; to write the video, run ltx2 encode {kept_file} -o FILE")),
                    "{error}"
                );
                succeed(&mut encode);
                assert_eq!(bytes(&folder.path("again.mp4")), bytes(&folder.path("whole.mp4")), "{moment}");
                fs::remove_file(folder.path("again.mp4")).expect("removed");
            }
            false if what == "the latents are" => {
                let refused = self::error(1, &mut encode);
                assert!(refused.contains("neither frames nor audio samples, only latents."), "{refused}");
            }
            false => {}
        }
    }
    succeed(&mut folder.ltx2(&["encode", "whole.safetensors", "-o", "dumped.mp4"]));
    assert_eq!(bytes(&folder.path("dumped.mp4")), bytes(&folder.path("whole.mp4")));
    assert_eq!(fs::read_dir(folder.path("tmp")).expect("kept").count(), 5 + 2);
}

/// Returns the number of frames of the MP4 named in the rest of an error.
pub(crate) fn frames_of(rest: &str) -> usize {
    let path = Path::new(rest.split("; ").next().expect("a path"));
    probe_clip(path, Path::new("ffmpeg")).expect("an MP4").frames
}

/// Covers a chain of three clips whose video cannot be renamed, and one whose second clip fails.
#[needs(cpu)]
fn failed_chain_keeps_its_clips() {
    let folder = Folder::new();
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny_video.yml");
    let chain = "request.chain={clip: 17, overlap: 9}";
    let size = ["--width", "96", "--height", "64", "--num-frames", "33", "--set", "sampler.steps=2"];
    let own =
        [&["generate", "-c", config, "-o", "out.mp4", "--save-audio", "out.wav", "--set", chain], &size[..]].concat();
    let fails = |moment: &str, more: &[&str]| {
        let mut run = folder.ltx2(&[&own[..], more].concat());
        error(1, run.env("LTX2_FAILPOINT", format!("fail {moment}")))
    };
    let at_end = fails("rename out.mp4", &[]);
    let place = at_end.split("; the first 33 frames with their audio are kept in ").nth(1).expect("a video");
    assert_eq!(frames_of(place), 33);
    let (_, latents) = kept(&at_end, "the latents of 3 clips are");
    assert!(latents.contains_key("clip_0000.latents.video") && latents.contains_key("clip_0002.latents.audio"));
    assert!(!folder.path("out.mp4").exists() && read_wav(&folder.path("out.wav")).is_ok());

    let in_the_middle = fails("clip 2", &["--force"]);
    let place = in_the_middle.split("; the first 8 frames with their audio are kept in ").nth(1).expect("a video");
    assert_eq!(frames_of(place), 8);
    assert_eq!(kept(&in_the_middle, "the latents of 1 clips are").1.len(), 2);
}
