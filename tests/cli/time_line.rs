//! Timeline of a run in `--perf-json`, and timings in the log with `-vv`.

use serde_json::Value;

use crate::support::{self, needs};

/// Each program is prepared once and each component's parameters are loaded once, concurrently and in order of use.
#[needs(cpu)]
fn parameters_load_concurrently_in_order_of_use() {
    let dir = tempfile::tempdir().expect("a folder");
    let (video, times) = (dir.path().join("a.mp4"), dir.path().join("times.json"));
    let mut run = support::ltx2();
    run.args(["generate", "-c", support::tiny(), "-v", "-o"]).arg(&video).arg("--perf-json").arg(&times);
    let ran = run.output().expect("runs");
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success() && said.contains("timeline, ") && said.contains(" GB in "), "{said}");
    let perf: Value = serde_json::from_slice(&std::fs::read(times).expect("a file")).expect("JSON");
    let spans = perf["timeline"].as_array().expect("a time line");
    let of = |work: &str| -> Vec<&Value> { spans.iter().filter(|span| span["work"] == work).collect() };
    let names = |work: &str| of(work).iter().map(|span| span["name"].as_str().expect("a name")).collect::<Vec<_>>();
    let at = |span: &Value, end: &str| span[end].as_f64().expect("seconds");
    assert!(spans.iter().all(|span| at(span, "from") <= at(span, "to")), "{spans:?}");
    assert_eq!([names("open"), names("write")], [["cpu"], ["mp4"]]);
    assert_eq!(names("run"), ["text_encoder", "connectors", "denoise", "video_decoder", "audio_decoder"]);
    let programs = perf["programs"].as_object().expect("programs").len();
    assert_eq!((names("program").len(), of("compile").len() + of("cache").len()), (programs, programs));
    let loads = of("load");
    let first = ["text_encoder", "transformer", "vae", "audio_vae", "vocoder"].map(|component| {
        let load = loads.iter().position(|span| span["name"].as_str().expect("a name").contains(component));
        load.unwrap_or_else(|| panic!("{component} is not loaded: {loads:?}"))
    });
    assert!(first.is_sorted(), "{loads:?}");
    assert!(
        loads.windows(2).all(|two| at(two[0], "to") <= at(two[1], "from") + 1e-9),
        "one after the other: {loads:?}"
    );
    assert!(loads.iter().all(|span| span["bytes"].as_u64().expect("bytes") > 0));
    // Loading starts before the last program is ready.
    let ready = of("compile").into_iter().chain(of("cache")).map(|span| at(span, "to")).fold(0.0, f64::max);
    assert!(at(loads[0], "from") < ready && ready <= at(of("run")[0], "to"), "{spans:?}");
}

#[needs(cpu)]
fn program_texts_are_generated_once_for_all_videos() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut run = support::ltx2();
    run.args(["generate", "-c", support::tiny(), "-vv", "--num-videos", "2", "-o"]).arg(dir.path().join("videos"));
    let ran = run.output().expect("runs");
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}");
    let texts: Vec<&str> = said.lines().filter(|line| line.contains("built the program")).collect();
    let of = |program: &str| texts.iter().filter(|line| line.contains(&format!("program=\"{program}\""))).count();
    assert_eq!(["text_encoder", "connectors", "denoise", "video_decoder"].map(of), [1; 4], "{texts:#?}");
}
