//! `--reference-video`: videos with a reference, and rejected references.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use ltx2::media::{Frames, write_png_frames};
use ndarray::Array4;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::Value;

use crate::support::{self, needs};

const ONE_STAGE: [&str; 2] = ["--pipeline", "text_to_video"];

fn generate(config: &str, out: &Path, more: &[&str]) -> Output {
    let out = out.to_str().expect("UTF-8");
    let arguments = [&["generate", "-c", config, "-o", out, "--force"], more].concat();
    support::ltx2().args(arguments).output().expect("the binary runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the only error line of a run that exits with `code`.
fn fails(code: i32, more: &[&str]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let made = generate(support::tiny(), &folder.path().join("x.mp4"), more);
    let said = said(&made);
    assert_eq!(made.status.code(), Some(code), "{more:?}: {said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one line says it: {said}");
    errors[0].to_string()
}

/// Writes a folder of frames; returns its path.
fn video(path: &Path, (frames, height, width): (usize, usize, usize)) -> String {
    let byte = |(f, y, x, c)| ((f * 13 + y * 3 + x * 5 + c * 70) % 256) as u8;
    let frames = Frames::new(Array4::from_shape_fn((frames, height, width, 3), byte)).expect("frames");
    write_png_frames(path, &frames).expect("written");
    path.to_str().expect("UTF-8").to_string()
}

/// Writes a LoRA file with one tensor and this header; returns its path.
fn lora(path: &Path, header: &[(&str, &str)]) -> String {
    let view = TensorView::new(Dtype::F32, vec![1], &[0; 4]).expect("a tensor");
    let header: HashMap<String, String> = header.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
    fs::write(path, safetensors::serialize([("x", view)], Some(header)).expect("bytes")).expect("written");
    path.to_str().expect("UTF-8").to_string()
}

/// The reference video is landscape with 12 frames, the generated video portrait with 9. A run from the sidecar repeats
/// it.
#[needs(cpu)]
fn video_with_reference_is_generated_and_repeated() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let wide = video(&path("wide"), (12, 50, 70));
    let given = format!("{wide}=0.75");
    let made = generate(support::tiny(), &path("a.mp4"), &[&ONE_STAGE[..], &["--reference-video", &given]].concat());
    let told = said(&made);
    assert!(made.status.success(), "{told}");
    // Cropping 70x50 to the aspect of 64x96 is reported, and so is the missing IC-LoRA.
    assert!(told.contains("70x50, but the video is 64x96: 52 % of each reference frame is cropped"), "{told}");
    assert!(
        told.contains("models need an IC-LoRA to follow reference videos; pass one with --ic-lora NAME or --lora FILE"),
        "{told}"
    );
    let read = |name: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(path(name)).expect("a sidecar")).expect("JSON")
    };
    let sidecar = read("a.json");
    let reference = &sidecar["config"]["request"]["reference_videos"][0];
    assert_eq!((&reference["frames"], &reference["strength"]), (&Value::from(9), &Value::from(0.75)));
    assert_eq!(sidecar["config"]["conditioning"]["reference_downscale_factor"], 1);
    let hashes = sidecar["inputs"].as_object().expect("hashes");
    assert_eq!(hashes.keys().collect::<Vec<_>>(), [&wide]);
    assert_eq!(hashes[&wide].as_str().map(str::len), Some(64));
    let repeated = generate(path("a.json").to_str().expect("UTF-8"), &path("b.mp4"), &[]);
    assert!(repeated.status.success(), "{}", said(&repeated));
    assert_eq!(read("b.json")["sha256"], sidecar["sha256"]);
    // Without the reference, the video differs.
    let plain = generate(support::tiny(), &path("c.mp4"), &ONE_STAGE);
    assert!(plain.status.success(), "{}", said(&plain));
    assert_ne!(read("c.json")["sha256"], sidecar["sha256"]);
}

#[needs(cpu)]
fn invalid_references_are_rejected() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let nine = video(&path("nine"), (9, 32, 32));
    let reference = |more: &[&str]| fails(2, &[&["--reference-video", &nine][..], more].concat());
    let half = lora(&path("half.safetensors"), &[("reference_downscale_factor", "half")]);
    let [two, three] =
        ["2", "3"].map(|scale| lora(&path(&format!("{scale}.safetensors")), &[("reference_downscale_factor", scale)]));
    // In two stages, 64 times this factor overflows.
    let huge = lora(&path("huge.safetensors"), &[("reference_downscale_factor", "288230376151711744")]);
    let long = lora(&path("long.safetensors"), &[("reference_temporal_scale_factor", "65")]);
    let hdr = lora(&path("hdr.safetensors"), &[("hdr_transform", "logc3")]);
    let no_number = "`reference_downscale_factor` has the header value `half`, not a whole number from 1 to 64";
    for (more, why) in [
        (&["--lora", &half][..], no_number),
        (
            &["--lora", &huge],
            "huge.safetensors: `reference_downscale_factor` has the header value `288230376151711744`, not a whole",
        ),
        (
            &["--lora", &long],
            "long.safetensors: `reference_temporal_scale_factor` has the header value `65`, not a whole number",
        ),
        (&["--set", "conditioning.reference_downscale_factor=65"], "conditioning.reference_downscale_factor"),
        (&["--set", "conditioning.reference_temporal_scale_factor=65"], "conditioning.reference_temporal_scale_factor"),
        (
            &["--lora", &two, "--lora", &three],
            "2.safetensors has the scale 2; LoRAs with different scales cannot be combined",
        ),
        (
            &["--lora", &hdr, "--pipeline", "in_context"],
            "this LoRA generates HDR video, but the pipeline is in_context; use hdr",
        ),
        (&["--lora", "gone.safetensors"], "model.loras = gone.safetensors (flag --lora): the file is missing"),
        (&["--lora", "a/b/gone.safetensors"], "model.loras = a/b/gone.safetensors (flag --lora): the file is missing"),
        (&["--ic-lora", "gone.safetensors"], "model.ic_lora = gone.safetensors (flag --ic-lora): the file is missing"),
        (
            &["--ic-lora", "a/gone.safetensors"],
            "model.ic_lora = a/gone.safetensors (flag --ic-lora): the file is missing",
        ),
        (&["--lora", &two], "must be a multiple of 64 with reference videos at 1/2 size; the nearest are 64 and 128"),
        (&["--pipeline", "text_to_audio"], "does not support reference videos; use --pipeline in_context"),
        (&["--num-frames", "auto"], "reference videos need a number of frames; set one"),
    ] {
        let error = reference(more);
        assert!(error.contains(why), "{more:?}: {error}");
    }
    let plain = fails(2, &["--lora", "gone.safetensors"]);
    assert!(plain.contains("model.loras = gone.safetensors: the file is missing"), "{plain}");
    assert!(fails(2, &["--reference-video", "gone.mp4"]).contains("cannot read gone.mp4"));
    assert!(fails(2, &["--reference-video", &format!("{nine}=2")]).contains("a number from 0 to 1"));
    assert!(
        fails(2, &["--pipeline", "in_context", "--height", "128"])
            .contains("needs a reference video: --reference-video PATH")
    );

    // Errors that only the reference video itself reveals are reported before anything is loaded.
    let more = |keys: &str| format!("request.reference_videos=[{{path: {nine}, {keys}}}]");
    let long = fails(2, &[&ONE_STAGE[..], &["--num-frames", "17", "--set", &more("frames: 17")]].concat());
    assert!(long.contains("nine") && long.contains("has 9 frames, but 17 are needed"), "{long}");
    let four = video(&path("four"), (4, 32, 32));
    video(&path("more"), (17, 32, 32));
    let masked = format!("request.reference_videos=[{{path: {}, attention_mask: {four}}}]", path("more").display());
    let mask = fails(2, &[&ONE_STAGE[..], &["--num-frames", "17", "--set", &masked]].concat());
    assert!(
        mask.contains("four") && mask.contains("a mask with 4 frames does not match the reference's 3 latent"),
        "{mask}"
    );
}

/// The header of these files does not reveal why they cannot be used.
#[needs(cpu, ffmpeg)]
fn undecodable_references_are_rejected_before_the_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let made = |name: &str, frames: &str, how: &[&str]| {
        let path = folder.path().join(name);
        let source = ["-y", "-f", "lavfi", "-i", "testsrc2=size=96x64:rate=24", "-frames:v", frames];
        let mut ffmpeg = Command::new("ffmpeg");
        let run = ffmpeg.args(["-v", "error"]).args(source).args(how).arg(&path).output().expect("ffmpeg starts");
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        path
    };
    let colours = "log-level=none:colorprim=bt2020:transfer=smpte2084:colormatrix=bt2020nc";
    let hdr = made("hdr.mp4", "9", &["-c:v", "libx265", "-pix_fmt", "yuv420p10le", "-x265-params", colours]);
    let cut = made("cut.mp4", "49", &["-c:v", "mpeg4", "-g", "4", "-movflags", "+faststart"]);
    let whole = fs::read(&cut).expect("bytes");
    fs::write(&cut, &whole[..whole.len() * 2 / 3]).expect("written");
    let good = video(&folder.path().join("good"), (49, 32, 32));
    for (path, frames, why) in [(&hdr, "9", "HDR (PQ)"), (&cut, "49", "ffmpeg -i IN OUT.mp4")] {
        let path = path.to_str().expect("UTF-8");
        let masked = format!("request.reference_videos=[{{path: {good}, attention_mask: {path}}}]");
        for given in [["--reference-video", path], ["--set", &masked]] {
            for dry in [&["--dry-run"][..], &[]] {
                let error = fails(2, &[&ONE_STAGE[..], &["--num-frames", frames], &given, dry].concat());
                assert!(error.contains(path) && error.contains(why), "{error}");
            }
        }
    }
}

#[needs(nothing)]
fn plan_counts_reference_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    let nine = video(&folder.path().join("nine"), (9, 32, 32));
    let lora = "tests/fixtures/lora/ic_tiny_a.safetensors";
    let plan = |more: &[&str]| {
        let size: &[&str] = if more.contains(&"--width") { &[] } else { &["--width", "256", "--height", "128"] };
        let size = [size, &["--num-frames", "17", "--dry-run"]].concat();
        let given = ["generate", "-m", "ltx2", "--reference-video", &nine, "--reference-video", &nine];
        let output = support::ltx2().args([&given[..], &size, more].concat()).output().expect("the binary runs");
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8_lossy(&output.stdout).into_owned() + &said(&output)
    };
    // Each of the two references has two latent frames of 2 x 1 (half of a first stage of 128 x 64), or 8 x 4 in one
    // stage.
    let two_stages = plan(&["--lora", lora]);
    assert!(two_stages.contains("pipeline   in_context, preset ltx2_distilled"), "{two_stages}");
    assert!(two_stages.contains("references 8 tokens, appended to the first stage's video"), "{two_stages}");
    // 2 x 2 at half the size of a first stage of 128 x 128.
    let two_thirds = ["--lora", lora, "--upsample", "spatial_x1_5", "--width", "192", "--height", "192"];
    let two_thirds = plan(&two_thirds);
    assert!(two_thirds.contains("references 16 tokens, appended to the first stage's video"), "{two_thirds}");
    // A portrait reference for a landscape video, with a LoRA that does not state its reference scale.
    let tall = video(&folder.path().join("tall"), (17, 96, 64));
    let silent = "tests/fixtures/lora/ic_tiny_a_plain.safetensors";
    let told = plan(&["--lora", silent, "--reference-video", &tall]);
    assert!(
        told.contains("tall is 64x96, but the video is 256x128: 67 % of each reference frame is cropped"),
        "{told}"
    );
    let says_nothing = "ic_tiny_a_plain.safetensors: no LoRA specifies `reference_downscale_factor`, so reference videos have the size of the stage";
    assert!(told.contains(says_nothing) && told.contains("set conditioning.reference_downscale_factor"), "{told}");
    assert!(!two_stages.contains("no LoRA specifies"), "{two_stages}");
    let one_stage = plan(&ONE_STAGE);
    assert!(one_stage.contains("references 128 tokens, appended to the first stage's video"), "{one_stage}");
}

/// Puts a file into a Hugging Face cache as the only file of a repository.
fn cache(root: &Path, name: &str, file: &Path) {
    let mut parts = name.splitn(3, '/');
    let mut part = || parts.next().expect("org/name/file");
    let folder = root.join(format!("models--{}--{}", part(), part()));
    fs::create_dir_all(folder.join("snapshots/c0")).expect("a folder");
    fs::create_dir_all(folder.join("refs")).expect("a folder");
    fs::write(folder.join("refs/main"), "c0").expect("written");
    fs::copy(file, folder.join("snapshots/c0").join(part())).expect("copied");
}

/// Runs the binary with this Hugging Face cache.
fn with_cache(root: &Path, arguments: &[&str]) -> Output {
    support::ltx2().env("HF_HUB_CACHE", root).args(arguments).output().expect("the binary runs")
}

/// The spatial scale comes from the table if the file does not state it, and otherwise from the file.
#[needs(nothing)]
fn ic_lora_name_selects_file_scale_and_pipeline() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let nine = video(&path("nine"), (9, 32, 32));
    let silent = lora(&path("silent.safetensors"), &[]);
    let two = lora(&path("two.safetensors"), &[("reference_downscale_factor", "2")]);
    let repository = "Lightricks/LTX-2.3-22b-IC-LoRA-Pixel-Spatial-Upscaler";
    let x2 = format!("{repository}/ltx-2.3-22b-ic-lora-pixel-spatial-upscaler-x2-0.9.safetensors");
    let x4 = format!("{repository}/ltx-2.3-22b-ic-lora-pixel-spatial-upscaler-x4-0.9.safetensors");
    cache(folder.path(), &x2, two.as_ref());
    cache(folder.path(), &x4, silent.as_ref());
    cache(folder.path(), "Lightricks/LTX-2.5-22b-IC-LoRA-Deblur/any-name.safetensors", silent.as_ref());
    let run = |model: &str, more: &[&str]| {
        let size = ["--width", "512", "--height", "256", "--num-frames", "17"];
        let given = ["generate", "-m", model, "--reference-video", &nine];
        let output = with_cache(folder.path(), &[&given[..], &size, more].concat());
        assert!(output.status.success(), "{more:?}: {}", said(&output));
        String::from_utf8_lossy(&output.stdout).into_owned() + &said(&output)
    };
    // Latents of 2 frames: a first stage of 256 x 128 at half size, then one stage of 512 x 256 at a quarter.
    let plan = run("ltx2_3", &["--ic-lora", "pixel-spatial-upscaler-x2", "--dry-run"]);
    assert!(plan.contains("pipeline   in_context, preset ltx2_3_distilled"), "{plan}");
    assert!(plan.contains("references 16 tokens"), "{plan}");
    let one = [&ONE_STAGE[..], &["--ic-lora", "pixel-spatial-upscaler-x4=0.75", "--dry-run"]].concat();
    let plan = run("ltx2_3", &one);
    assert!(plan.contains("references 16 tokens") && !plan.contains("no LoRA specifies"), "{plan}");
    let config = run("ltx2_3", &["--ic-lora", "pixel-spatial-upscaler-x4=0.75", "--print-config"]);
    for line in [
        format!("path: {x4}  # flag --ic-lora"),
        "strength: 0.75  # flag --ic-lora".into(),
        format!("reference_downscale_factor: 4  # LoRA {x4}"),
    ] {
        assert!(config.contains(&line), "{line}: {config}");
    }
    // The only file of a repository whose file name is unknown; one LoRA per generation has this name.
    let config = run("ltx2_5", &["--ic-lora", "deblur", "--lora", &silent, "--print-config"]);
    let deblur = "Lightricks/LTX-2.5-22b-IC-LoRA-Deblur/any-name.safetensors";
    assert!(config.contains(&format!("path: {deblur}")), "{config}");
    assert!(config.contains("silent.safetensors"), "{config}");
    // A file needs no cache, and other files of the YAML key are relative to the YAML file.
    let yaml = path("own.yml");
    fs::write(&yaml, "model:\n  ic_lora: {path: two.safetensors}\n").expect("written");
    let config = run("ltx2_3", &["-c", yaml.to_str().expect("UTF-8"), "--print-config"]);
    assert!(config.contains(&format!("path: \"{two}\"")) && config.contains("strength: 1.0"), "{config}");
}

#[needs(nothing)]
fn ic_lora_errors_name_what_is_needed() {
    let folder = tempfile::tempdir().expect("a folder");
    let nine = video(&folder.path().join("nine"), (9, 32, 32));
    let error = |model: &str, more: &[&str]| {
        let output = with_cache(folder.path(), &[&["generate", "-m", model, "--dry-run"][..], more].concat());
        let said = said(&output);
        assert_eq!(output.status.code(), Some(2), "{more:?}: {said}");
        said.lines().find(|line| line.starts_with("error: ")).expect("an error").to_string()
    };
    let given = ["--reference-video", &nine];
    for (model, lora, why) in [
        (
            "ltx2_3",
            "deblur",
            "run `ltx2 pull Lightricks/LTX-2.3-22b-IC-LoRA-Deblur/ltx-2.3-22b-ic-lora-deblur-0.9.safetensors`",
        ),
        ("ltx2_5", "union-control", "was published for LTX-2.0 and LTX-2.3, but the model is LTX-2.5"),
        ("ltx2", "deblur", "was published for LTX-2.3 and LTX-2.5, but the model is LTX-2.0"),
        ("ltx2_3", "hdr", "run `ltx2 pull Lightricks/LTX-2.3-22b-IC-LoRA-HDR/ltx-2.3-22b-ic-lora-hdr-0.9.safetensors`"),
        ("ltx2_3", "detailer", "run `ltx2 pull Lightricks/LTX-2-19b-IC-LoRA-Detailer/"),
        ("ltx2", "union-control", "run `ltx2 pull Lightricks/LTX-2-19b-IC-LoRA-Union-Control/"),
        ("ltx2_3", "sharpen", "is neither a file (.safetensors) nor a published IC-LoRA; names: canny-control, "),
    ] {
        let error = error(model, &[&given[..], &["--ic-lora", lora]].concat());
        assert!(
            error.contains(&format!("model.ic_lora = {lora} (flag --ic-lora): ")) && error.contains(why),
            "{error}"
        );
    }
    for (name, needed) in [("hdr", "hdr"), ("dubit", "dub_it"), ("lipdub", "dub_it")] {
        let error = error("ltx2_3", &[&given[..], &["--pipeline", "in_context", "--ic-lora", name]].concat());
        let why =
            format!("works only in the pipeline {needed}, but the pipeline is in_context; use --pipeline {needed}");
        assert!(error.contains(&why), "{error}");
    }
    for strength in ["nan", "inf", "-inf"] {
        for flag in ["--lora", "--ic-lora"] {
            let error = error("ltx2", &[&given[..], &[flag, &format!("a.safetensors={strength}")]].concat());
            assert!(error.contains(flag) && error.contains("strength"), "{error}");
        }
    }
    let file = lora(&folder.path().join("ltx-2-19b-ic-lora-depth-control.safetensors"), &[]);
    let missing = error("ltx2", &["--ic-lora", &file]);
    assert!(
        missing.contains("needs a reference video (depth maps, from your own file): --reference-video PATH"),
        "{missing}"
    );
    let wrong = |item: &str| error("ltx2", &["--set", &format!("request.reference_videos=[{{path: {nine}, {item}}}]")]);
    assert!(wrong("preprocess: sharpen").contains("none, gray, canny, blur, downscale"));
    let sigma = wrong("preprocess: {kind: canny, sigma: 2}");
    assert!(sigma.contains("preprocess canny of") && sigma.contains("sigma applies only to blur"), "{sigma}");
    assert!(wrong("preprocess: {kind: blur, sigma: 16.5}").contains("16"));
    let alpha = wrong("attention_mask_channel: alpha");
    assert!(alpha.contains("attention_mask_channel alpha of") && alpha.contains("there is no mask"), "{alpha}");
    let alone = with_cache(folder.path(), &["generate", "--preprocess", "canny"]);
    assert!(alone.status.code() == Some(2) && said(&alone).contains("--reference-video"), "{}", said(&alone));
}

/// The IC-LoRA canny-control converts references to edges unless the reference sets another conversion.
#[needs(cpu)]
fn ic_lora_is_recorded_and_repeated() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let wide = video(&path("wide"), (12, 50, 70));
    let name = "Lightricks/LTX-2-19b-IC-LoRA-Canny-Control/ltx-2-19b-ic-lora-canny-control.safetensors";
    cache(folder.path(), name, "tests/fixtures/lora/ic_tiny_a_plain.safetensors".as_ref());
    let run = |config: &str, out: &str, more: &[&str]| {
        let out = path(out);
        let given = ["generate", "-c", config, "-o", out.to_str().expect("UTF-8")];
        let output = with_cache(folder.path(), &[&given[..], more].concat());
        assert!(output.status.success(), "{more:?}: {}", said(&output));
        let sidecar = fs::read_to_string(out.with_extension("json")).expect("a sidecar");
        serde_json::from_str::<Value>(&sidecar).expect("JSON")
    };
    let given = format!("{wide}=0.75");
    let with = |more: &[&'static str]| {
        [&ONE_STAGE.map(String::from)[..], &["--reference-video".into(), given.clone()]]
            .concat()
            .into_iter()
            .chain(more.iter().map(|word| (*word).to_string()))
            .collect::<Vec<String>>()
    };
    let start = |out: &str, more: &[&'static str]| {
        let words = with(more);
        run(support::tiny(), out, &words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let edges = start("a.mp4", &["--ic-lora", "canny-control=0.5"]);
    let model = &edges["config"]["model"];
    assert_eq!(model["ic_lora"], serde_json::json!({"path": name, "strength": 0.5, "apply": "merge"}));
    assert_eq!((&model["loras"][0]["path"], &model["loras"][0]["strength"]), (&name.into(), &0.5.into()));
    let sidecar = path("a.json");
    let sidecar = sidecar.to_str().expect("UTF-8");
    let again = run(sidecar, "b.mp4", &[]);
    assert_eq!(again["sha256"], edges["sha256"]);
    assert_eq!(again["config"]["model"], *model, "the IC-LoRA is applied once");
    let same = start("c.mp4", &["--ic-lora", "canny-control=0.5", "--preprocess", "canny"]);
    assert_eq!(same["sha256"], edges["sha256"]);
    let plain = start("d.mp4", &["--ic-lora", "canny-control=0.5", "--preprocess", "none"]);
    assert_ne!(plain["sha256"]["frames"], edges["sha256"]["frames"]);
    // Another IC-LoRA replaces that of the sidecar, and --preprocess of the sidecar stays.
    let file = "tests/fixtures/lora/ic_tiny_a_plain.safetensors";
    let other = run(path("d.json").to_str().expect("UTF-8"), "e.mp4", &["--ic-lora", &format!("{file}=0.5")]);
    assert_eq!(other["config"]["model"]["loras"].as_array().map(Vec::len), Some(1));
    assert_eq!(other["sha256"], plain["sha256"]);
    // Without the IC-LoRA, only the reference is left.
    let none = run(path("d.json").to_str().expect("UTF-8"), "f.mp4", &["--set", "model.ic_lora=null"]);
    assert_eq!(none["config"]["model"]["loras"], serde_json::json!([]));
}
