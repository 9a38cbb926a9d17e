//! Dubbed videos compared with Lightricks' `DubItPipeline` (scripts/oracle/cases_references.py): every step of both
//! stages. The input video has 12 frames, of which 9 are used; its sound is longer than these.

use ltx2::Config;
use ltx2::media::{Clip, Frames, write_png_frames};
use ltx2::request::{Request, Shared};
use ndarray::Array4;

use crate::given_video;
use crate::references::ready;
use crate::support::official::{cases_of, dumping_steps, limit_of};
use crate::support::thresholds::row;
use crate::support::{cpu, dumped, generate, needs};

fn agrees(model: &str) {
    let (all, mut runner) = cases_of(&cpu(8), "dub_it", model);
    let [case] = &all[..] else { panic!("one case") };
    let folder = tempfile::tempdir().expect("a folder");
    let byte = |(f, y, x, c)| ((f * 11 + y * 5 + x * 3 + c * 40 + 68) % 256) as u8;
    let frames = Frames::new(Array4::from_shape_fn((12, 70, 50, 3), byte)).expect("frames");
    write_png_frames(folder.path(), &frames).expect("written");
    let keys = case.scalars["common"].as_array().expect("settings").iter();
    let keys = keys.map(|key| key.as_str().expect("a setting").to_string()).chain([
        format!("request.video={}", folder.path().display()),
        // 11333 samples at 16 kHz.
        "request.dub.sound_seconds=0.7083125".into(),
        "runtime.dtype=f32".into(),
    ]);
    let config = Config::load(case.scalars["preset"].as_str().expect("a preset"), keys).expect("legal");
    assert_eq!(config.request.num_frames.count(), Some(9), "12 frames, rounded down");
    let clip = Shared::from(Clip { frames, sound: given_video::clip().sound });
    let request = Request { clip: Some(clip), ..ready(&mut runner, &config) };
    let made = generate(&mut runner, &request, &dumping_steps());
    let mut largest = (0.0, "");
    for name in case.outputs.keys().map(|name| name.trim_end_matches(".strided")) {
        let distance = case.within(name, dumped(&made, name), limit_of(name, row(&case.name).f32()));
        if distance > largest.0 {
            largest = (distance, name);
        }
    }
    eprintln!("dub_it {model}: at most {:.1e}, {}", largest.0, largest.1);
    // The second stage keeps the audio of the first, which the output contains.
    let audio = |name: &str| dumped(&made, name).to_f32();
    let first = audio("step_8.latents.audio");
    for name in ["stage_2.step_0.latents.audio", "stage_2.step_3.latents.audio", "latents.audio"] {
        assert_eq!(audio(name), first, "{name}");
    }
}

#[needs(cpu, full)]
fn ltx2_0_steps_match_lightricks() {
    agrees("tiny_a");
}

#[needs(cpu, full)]
fn ltx2_3_steps_match_lightricks() {
    agrees("tiny_2_3");
}
