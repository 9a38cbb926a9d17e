//! Upsampling between two stages on the command line: rejected sizes and files, and the report of `check`.

use std::process::Output;

use crate::support::{ltx2, needs};

const MODELS: &str = "tests/fixtures/models";

fn run(command: &str, arguments: &[&str]) -> Output {
    ltx2().arg(command).args(arguments).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the only error line of a two-stage run on the LTX-2.0 fixture.
fn fails(code: i32, more: &[&str]) -> String {
    let (out, model) = (tempfile::tempdir().expect("a folder"), format!("{MODELS}/tiny_a"));
    let file = out.path().join("x.mp4");
    let own = ["--platform", "cpu", "--pipeline", "two_stage", "-m", &model, "-p", "a"];
    let sizes = "request={width: 192, height: 192, num_frames: 17, max_sequence_length: 64}";
    let set = ["--set", sizes, "-o", file.to_str().expect("UTF-8")];
    let stg = ["--stg-scale", "0"];
    let made = run("generate", &[&own[..], &set, &stg, more].concat());
    let said = text(&made.stderr);
    assert_eq!(made.status.code(), Some(code), "{more:?}: {said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "one line says it: {said}");
    assert!(!file.exists(), "{more:?}");
    errors[0].to_string()
}

#[needs(cpu)]
fn mismatched_upsampling_gives_one_error_before_the_run() {
    let [twice, halves, in_time] = ["rational", "3_2", "temporal"].map(|name| format!("{MODELS}/upsampler_{name}"));
    let folder = format!("{halves}/latent_upsampler");
    let x1_5 = ["--upsample", "spatial_x1_5"];
    let both = ["--upsample", "spatial_x2,temporal_x2"];
    let cases: [(&[&[&str]], &str); 7] = [
        (
            &[&x1_5, &["--upsampler", &twice]],
            "this latent upsampler is x2, but two_stage.upsample requests spatial_x1_5: set model.upsampler to a spatial_x1_5 upsampler",
        ),
        (&[&["--upsampler", &halves]], "this latent upsampler is x1.5, but two_stage.upsample requests spatial_x2"),
        (
            &[&["--upsampler", &in_time]],
            "is x2 in time, but two_stage.upsample requests spatial_x2: set model.temporal_upsampler to this file",
        ),
        (
            &[&both, &["--upsampler", &twice, "--temporal-upsampler", &folder]],
            "is x1.5, but two_stage.upsample requests temporal_x2: set model.upsampler to this file",
        ),
        (&[&x1_5, &["--upsampler", &halves]], "takes latents with 4 channels, but those of the video VAE have 8"),
        (
            &[&x1_5, &["--upsampler", &twice, "--width", "128"]],
            "request.width = 128 (flag --width): must be a multiple of 96 with spatial_x1_5 between two stages; the nearest are \
             96 and 192",
        ),
        (
            &[&both, &["--upsampler", &twice, "--num-frames", "25"]],
            "must be one more than a multiple of 16 with temporal_x2 between two stages; the nearest are 17 and 33",
        ),
    ];
    for (more, want) in cases {
        let said = fails(2, &more.concat());
        assert!(said.contains(want), "{want}\n{said}");
    }
    let missing = fails(1, &[&both[..], &["--upsampler", &twice]].concat());
    assert!(missing.contains("contains no temporal latent upsampler: set `model.temporal_upsampler` in the YAML"));
    let unknown = run("generate", &["--upsample", "spatial_x3", "-p", "a"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(text(&unknown.stderr).contains("[possible values: spatial_x2, spatial_x1_5, temporal_x2]"));
}

#[needs(nothing)]
fn check_reports_factors_of_upsamplers() {
    let [model, halves, in_time] =
        ["tiny_a", "upsampler_3_2", "upsampler_temporal"].map(|name| format!("{MODELS}/{name}"));
    let made = run("check", &[&model, "--upsampler", &halves, "--temporal-upsampler", &in_time]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    assert!(text(&made.stdout).contains("\ntwo_stage.upsample: spatial_x1_5, temporal_x2\n"), "{}", text(&made.stdout));
    let json = run("check", &[&model, "--upsampler", &halves, "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(json["upsample"], serde_json::json!(["spatial_x1_5"]));
    assert!(!text(&run("check", &[&model]).stdout).contains("two_stage.upsample"));
}
