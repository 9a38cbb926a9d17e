//! Output and exit codes of the command line.

use std::path::Path;
use std::process::{Command, Output};

use crate::support::needs;
use ltx2::pjrt::discover::Platform;

struct Run {
    code: i32,
    out: String,
    err: String,
}

/// Runs `ltx2` in a folder.
fn ltx2_in(folder: &Path, args: &[&str]) -> Run {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_ltx2"))
        .args(args)
        .current_dir(folder)
        .env_remove("LTX2_LOG")
        .env("LTX2_COMPILE_CACHE", "off")
        .env("HF_HOME", folder.join("no-cache"))
        .output()
        .expect("the binary runs");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Run { code: status.code().expect("an exit code"), out: text(stdout), err: text(stderr) }
}

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).expect("written");
    }
    folder
}

/// Checks that an error is one line on stderr with its exit code and no output on stdout.
fn assert_error(folder: &Path, args: &[&str], code: i32, message: &str) {
    let run = ltx2_in(folder, args);
    assert_eq!((run.err.as_str(), run.code), (format!("error: {message}\n").as_str(), code), "{args:?}");
    assert_eq!(run.out, "", "{args:?}");
}

#[needs(nothing)]
fn yaml_errors_have_file_line_and_key() {
    let dir = folder(&[
        ("typo.yml", "request:\n  width: 512\n  heigth: 320\n"),
        ("type.yml", "sampler:\n  steps: many\n"),
        ("twice.yml", "sampler:\n  steps: 3\n  steps: 4\n"),
        ("broken.yml", "request: {width: 1\nsampler: 3\n"),
        ("size.yml", "request:\n  width: 500\n"),
        ("frames.yml", "request:\n  num_frames: 120\n"),
        ("a.yml", "extends: b.yml\n"),
        ("b.yml", "extends: a.yml\n"),
        ("parent.yml", "extends: ltx2_hp\n"),
    ]);
    for (file, message) in [
        ("typo.yml", "typo.yml:3: unknown key 'request.heigth'; did you mean 'height'?"),
        ("type.yml", "type.yml:2: 'sampler.steps' must be a whole number from 1 to 256, not the text 'many'"),
        ("twice.yml", "twice.yml:3: key 'steps' is given twice"),
        ("size.yml", "request.width = 500 (size.yml:2): must be a multiple of 32; the nearest are 480 and 512"),
        (
            "frames.yml",
            "request.num_frames = 120 (frames.yml:2): must be one more than a multiple of 8; the nearest are 113 and 121",
        ),
        ("a.yml", "b.yml:1: circular 'extends': a.yml -> b.yml -> a.yml"),
        ("gone.yml", "gone.yml: no such file or preset; `ltx2 presets` lists every preset"),
        (
            "parent.yml",
            "parent.yml:1: extends: ltx2_hp: no such file or preset; did you mean 'ltx2_hq', 'ltx2' or 'ltx2_3'? `ltx2 presets` lists every preset",
        ),
    ] {
        assert_error(dir.path(), &["generate", "-c", file, "--print-config"], 2, message);
    }
    let run = ltx2_in(dir.path(), &["generate", "-c", "broken.yml"]);
    assert!(run.err.starts_with("error: broken.yml:2: ") && run.err.lines().count() == 1, "{}", run.err);
    assert_eq!(run.code, 2);
}

/// The lists have a line per shipped file, and `NAME` prints the file.
#[needs(nothing)]
fn presets_and_layouts_are_listed() {
    let dir = folder(&[]);
    for (command, name, folder, count) in
        [("presets", "tpu/v6e-8", "configs", 37), ("layouts", "ulysses", "shardings", 22)]
    {
        let list = ltx2_in(dir.path(), &[command]);
        assert_eq!((list.code, list.out.lines().count()), (0, count), "{}", list.out);
        let line = list.out.lines().find(|line| line.split_whitespace().next() == Some(name)).expect("a line");
        let json = ltx2_in(dir.path(), &[command, "--json"]);
        let json: serde_json::Value = serde_json::from_str(&json.out).expect("JSON");
        let entry = json.as_array().expect("a list").iter().find(|entry| entry["name"] == name).expect("an entry");
        assert!(line.ends_with(entry["summary"].as_str().expect("a text")), "{line}");
        let text = std::fs::read_to_string(format!("{folder}/{name}.yml")).expect("the shipped file");
        assert_eq!(ltx2_in(dir.path(), &[command, name]).out, text);
        let said = ltx2_in(dir.path(), &[command, "nothing"]);
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{}", said.err);
    }
    let unknown = ["generate", "-c", "nano", "-p", "x", "--layout", "ulyses", "--dry-run"];
    let said = ltx2_in(dir.path(), &unknown);
    assert!(said.err.contains("ulyses: no such file or layout; did you mean 'ulysses'"), "{}", said.err);
}

/// The shells' scripts call the program, which completes `-c` and `--layout` with shipped names and with files.
#[needs(nothing)]
fn completions_offer_presets_layouts_and_files() {
    let dir = folder(&[("ltx2_own.yml", "")]);
    let complete = |flag: &str, word: &str| {
        let words = ["--", "ltx2", "generate", flag, word];
        let mut run = Command::new(env!("CARGO_BIN_EXE_ltx2"));
        run.args(words).current_dir(dir.path()).env("LTX2_COMPLETE", "bash");
        run.env("_CLAP_COMPLETE_INDEX", "3").env("_CLAP_IFS", "\n");
        let done = run.output().expect("the binary runs");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).expect("UTF-8")
    };
    let presets = complete("-c", "ltx2_");
    for name in ["ltx2_hq", "ltx2_3_distilled", "ltx2_own.yml"] {
        assert!(presets.lines().any(|line| line == name), "{name}: {presets}");
    }
    assert_eq!(complete("--layout", "fsdp-u").trim(), "fsdp-ulysses");
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = ltx2_in(dir.path(), &["completions", shell]);
        assert!(script.code == 0 && script.out.contains("LTX2_COMPLETE"), "{shell}: {}", script.out);
    }
}

/// Without further options, an image starts the video.
#[needs(nothing)]
fn image_alone_selects_image_to_video() {
    let dir = folder(&[("own.yml", "extends: nano\npipeline: text_to_video\n")]);
    let pipeline = |args: &[&str]| {
        let run = ltx2_in(dir.path(), &[&["generate", "-p", "x", "--print-config"], args].concat());
        let line = run.out.lines().find(|line| line.starts_with("pipeline: ")).map(String::from);
        line.unwrap_or(run.err)
    };
    for own in ["nano", "own.yml"] {
        let found = pipeline(&["-c", own, "--image", "a.png"]);
        assert!(found.starts_with("pipeline: image_to_video  # flag --image"), "{own}: {found}");
    }
    assert!(pipeline(&["-c", "nano_two_stage", "--image", "a.png"]).starts_with("pipeline: two_stage "));
    assert!(pipeline(&["-c", "nano"]).starts_with("pipeline: text_to_video "));
    let chosen = pipeline(&["-c", "nano", "--pipeline", "text_to_video", "--image", "a.png"]);
    assert!(chosen.contains("images need --pipeline image_to_video"), "{chosen}");
}

/// Presets of another generation, and two stages without the distilled LoRA, give a warning.
#[needs(nothing)]
fn unsuitable_preset_or_missing_lora_is_a_warning() {
    let dir = folder(&[]);
    let run = |args: &[&str]| {
        let run = ltx2_in(dir.path(), &[&["generate", "-p", "x", "--dry-run"], args].concat());
        assert_eq!(run.code, 0, "{}", run.err);
        run.err
    };
    let warned = run(&["-c", "ltx2_hq", "-m", "Lightricks/LTX-2.3"]);
    let other = "the preset ltx2_hq is for LTX-2.0, but the model Lightricks/LTX-2.3 is LTX-2.3; use -c ltx2_3_hq";
    assert!(warned.contains(other), "{warned}");
    let lora = "no LoRA applies to the second stage, whose few steps without guidance need the distilled LoRA";
    for preset in ["ltx2_two_stage", "ltx2_3_hq"] {
        let said = run(&["-c", preset]);
        assert!(
            said.contains(lora)
                && said.contains("--set 'model.loras=[{path: FILE, stages: [2]}]'")
                && !said.contains("the preset"),
            "{said}"
        );
        assert!(!run(&["-c", preset, "--set", "model.loras=[{path: a.safetensors, stages: [2]}]"]).contains(lora));
    }
    for preset in ["ltx2", "ltx2_distilled"] {
        assert!(!run(&["-c", preset]).contains("WARN"), "{preset}");
    }
}

#[needs(nothing)]
fn flag_errors_include_the_flag() {
    let dir = folder(&[("taken.mp4", "")]);
    let prompt = ["generate", "--prompt", "x"];
    let with = |more: &[&'static str]| prompt.iter().copied().chain(more.iter().copied()).collect::<Vec<_>>();
    let names = Platform::names(", ");
    let unknown_platform = format!(
        "runtime.platform = gpu (flag --platform): unknown platform 'gpu'; use auto, {names} or a plugin file PATH.so"
    );
    for (flags, message) in [
        (
            &["--width", "500"][..],
            "request.width = 500 (flag --width): must be a multiple of 32; the nearest are 480 and 512",
        ),
        (
            &["--num-frames", "24"],
            "request.num_frames = 24 (flag --num-frames): must be one more than a multiple of 8; the nearest are 17 and 25",
        ),
        (&["--steps", "300"], "--steps: 'sampler.steps' must be a whole number from 1 to 256, not 300"),
        (&["--set", "sampler.stepz=2"], "--set sampler.stepz=2: unknown key 'sampler.stepz'; did you mean 'steps'?"),
        (
            &["--mesh", "ctx=2"],
            "--mesh ctx=2: unknown axis 'ctx'; known axes are data, cfg, fsdp, context, tensor; e.g. --mesh cfg=2,context=4",
        ),
        (&["--platform", "gpu"], unknown_platform.as_str()),
        (
            &["--pipeline", "keyframes"],
            "pipeline = keyframes (flag --pipeline): needs an image: --image PATH FRAME STRENGTH, or request.images",
        ),
        (&["-o", "taken.mp4"], "output.path: taken.mp4 exists; overwrite it with --force, or use another path"),
        (
            &["--set", "runtime.watchdog=0"],
            "--set runtime.watchdog=0: 'runtime.watchdog' must be auto, off or a whole number from 1 to 604800, not 0",
        ),
        (&["--set", "runtime.memory_limit=0"], "runtime.memory_limit = 0 (--set): must be more than 0 GiB"),
    ] {
        assert_error(dir.path(), &with(flags), 2, message);
    }
    let no_prompt = "no prompt; pass --prompt or --prompts, or set request.prompt in the YAML file";
    assert_error(dir.path(), &["generate"], 2, no_prompt);
    for unknown in [
        &["generate", "--widht", "3"][..],
        &["generate", "--seed", "x"],
        &["generate", "--guidance-scale", "nan"],
        &["nothing"],
    ] {
        assert_eq!(ltx2_in(dir.path(), unknown).code, 2, "{unknown:?}");
    }
}

/// Layout files may use the keys of earlier releases.
#[needs(nothing)]
fn old_layout_keys_are_accepted_or_suggest_the_new_key() {
    let dir = folder(&[]);
    let path = dir.path().join("own.yml");
    let read = |policy: &str| {
        let rules = "mesh: {context: 2}\nrules: {video_sequence: [context]}\n";
        std::fs::write(&path, format!("{rules}{policy}\n")).expect("written");
        ltx2::config::read_layout_source(path.to_str().expect("UTF-8"))
    };
    let layout = |policy: &str| format!("{:?}", read(policy).expect("a layout"));
    let old = "exchange"; // alias
    let ring = layout("context_parallel: {kind: ring}");
    assert_ne!(ring, layout("context_parallel: {kind: ulysses}"));
    assert_eq!(ring, layout(&format!("{old}: {{kind: ring}}")));
    let run = ltx2_in(dir.path(), &["generate", "-c", "nano", "-p", "x", "--layout", "own.yml", "--dry-run"]);
    let warned: Vec<&str> = run.err.lines().filter(|line| line.contains(old)).collect();
    assert_eq!(warned, [format!(" WARN own.yml:3: '{old}' is deprecated; use 'context_parallel'")]);

    for key in ["context_parallel", old] {
        let error = read(&format!("{key}: {{rope: gathered}}")).expect_err("no such key").to_string();
        let shipped = std::fs::read_to_string("shardings/rope-gathered.yml").expect("a layout");
        let replacement = shipped.lines().find(|line| line.contains("attn1.keys")).expect("an override").trim();
        let want = format!("tensors: {{{replacement}}}");
        assert!(error.contains("own.yml:3: ") && error.contains(&want) && error.lines().count() == 1, "{error}");
    }
}

#[needs(nothing)]
fn print_config_shows_merged_values_with_origins() {
    let dir = folder(&[("my.yml", "extends: ltx2\nrequest:\n  seed: 3\n  width: 512\n")]);
    let run = ltx2_in(
        dir.path(),
        &["generate", "-c", "my.yml", "--width", "256", "--set", "sampler.steps=5", "--print-config"],
    );
    assert_eq!((run.code, run.err.as_str()), (0, ""));
    for line in [
        "# preset: ltx2",
        "  width: 256  # flag --width",
        "  seed: 3  # my.yml:3",
        "  steps: 5  # --set",
        "    cfg: 4.0  # configs/ltx2.yml:16",
        "  dtype: bf16  # default",
    ] {
        assert!(run.out.lines().any(|l| l == line), "no line '{line}' in\n{}", run.out);
    }
    std::fs::write(dir.path().join("again.yml"), &run.out).expect("written");
    let again = ltx2_in(dir.path(), &["generate", "-c", "again.yml", "--print-config"]);
    let values = |text: &str| text.lines().map(|l| l.split("  # ").next().unwrap_or(l).to_string()).collect::<Vec<_>>();
    assert_eq!(values(&again.out), values(&run.out));
}

#[needs(nothing)]
fn dry_run_prints_the_plan() {
    let dir = folder(&[]);
    let run = ltx2_in(dir.path(), &["generate", "-c", "ltx2_full_guidance", "-p", "x", "--dry-run"]);
    assert_eq!((run.code, run.out.as_str()), (0, ""));
    for part in [
        "Lightricks/LTX-2 (cannot be read: ",
        "768x512, 121 frames at 24 per second, 5.04 s",
        "6144 video (16 x 16 x 24), 126 audio, 1024 text",
        "40 steps, passes per step: conditional, negative, perturbed, isolated",
        "out/ltx2_10.mp4",
    ] {
        assert!(run.err.contains(part), "no '{part}' in\n{}", run.err);
    }
    let json = ltx2_in(
        dir.path(),
        &["generate", "-c", "nano", "-p", "x", "--num-videos", "2", "-o", "clips", "--dry-run", "--json"],
    );
    let plan: serde_json::Value = serde_json::from_str(&json.out).expect("JSON on stdout");
    assert_eq!(plan["video_latents"], serde_json::json!([4, 3, 4]));
    assert_eq!(plan["outputs"], serde_json::json!(["clips/0000_10.mp4", "clips/0001_11.mp4"]));
    assert!(!dir.path().join("clips").exists(), "a dry run writes nothing");
}

#[needs(nothing)]
fn seconds_flag_logs_the_number_of_frames() {
    let dir = folder(&[]);
    let run = ltx2_in(dir.path(), &["generate", "-p", "x", "--seconds", "2", "--dry-run"]);
    assert!(run.err.contains("--seconds 2 at 24 frames per second: 49 frames, 2.04 s"), "{}", run.err);
    assert!(
        !ltx2_in(dir.path(), &["-q", "generate", "-p", "x", "--seconds", "2", "--dry-run"]).err.contains("--seconds")
    );
}

#[needs(nothing)]
fn help_is_grouped_and_schema_and_completions_are_printed() {
    let dir = folder(&[]);
    let help = ltx2_in(dir.path(), &["generate", "--help"]).out;
    let at = |part: &str| help.find(part).unwrap_or_else(|| panic!("no '{part}' in\n{help}"));
    assert!(
        at("\nRequest:") < at("\nModel:")
            && at("\nModel:") < at("\nPlacement:")
            && at("\nPlacement:") < at("\nOutput:")
    );
    assert!(at("\nOutput:") < at("\nExamples:"));
    let schema: serde_json::Value = serde_json::from_str(&ltx2_in(dir.path(), &["schema"]).out).expect("JSON");
    assert_eq!(schema["properties"]["request"]["$ref"], "#/$defs/Request");
    assert_eq!(schema["$defs"]["Sampler"]["properties"]["steps"]["maximum"], 256);
    assert_eq!(schema["$defs"]["Sampler"]["properties"]["steps"]["description"], "Number of denoising steps.");
    assert!(ltx2_in(dir.path(), &["completions", "bash"]).out.contains("LTX2_COMPLETE"));
}
