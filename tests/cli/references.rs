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
    assert!(told.contains("models need an IC-LoRA to follow reference videos; pass one with --lora FILE"), "{told}");
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
        (&["--lora", &hdr], "`hdr_transform` has the header value `logc3`: LoRAs for HDR video"),
        (&["--lora", "gone.safetensors"], "gone.safetensors"),
        (&["--lora", &two], "must be a multiple of 64 with reference videos at 1/2 size; the nearest are 64 and 128"),
        (&["--pipeline", "text_to_audio"], "does not support reference videos; use --pipeline in_context"),
        (&["--num-frames", "auto"], "reference videos need a number of frames; set one"),
    ] {
        let error = reference(more);
        assert!(error.contains(why), "{more:?}: {error}");
    }
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
