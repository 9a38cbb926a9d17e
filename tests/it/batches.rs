//! Several videos as one batch over `data`: each has the same numbers as alone.

use ltx2::request::Request;
use std::ops::ControlFlow;

use crate::support::{cases, cpu, dumped, dumping, generate, needs, open, plain, relative_l2, request};
use ltx2::config::{Config, parse_mesh};
use ltx2::hlo::DType;
use ltx2::nn::Build;
use ltx2::pipeline::model::OpenModel;
use ltx2::pipeline::stages::batch::videos_at_once;
use ltx2::pipeline::stages::text_to_video::Generated;
use ltx2::sampling::guidance::RescaleExtent;

const DUMPED: [&str; 7] =
    ["noise.video", "noise.audio", "prompt_embeds", "latents.video", "latents.audio", "video", "audio"];

/// Returns a shipped layout with another mesh.
fn build(layout: &str, mesh: &str, devices: usize) -> Build {
    let mesh = Some(parse_mesh(mesh).expect("a mesh"));
    let layout = Config { layout: layout.into(), mesh, ..Config::default() }.placement(devices).expect("a layout");
    Build { layout, ..plain(DType::F32) }
}

/// Returns three requests that differ in prompt and seed. Guided ones are rescaled, with statistics over
/// the batch as requested.
fn three(base: &Request) -> [Request; 3] {
    let mut base = Request { rescale: RescaleExtent::Batch, ..base.clone() };
    for scales in base.scales.as_mut() {
        scales.rescale = if scales.cfg == 1.0 { 0.0 } else { 0.7 };
    }
    [("a red ball", 10), ("a blue cube on a table", 11), ("rain", 12)].map(|(prompt, seed)| Request {
        prompt: prompt.into(),
        seed,
        ..base.clone()
    })
}

fn agree(what: &str, got: &Generated, want: &Generated) {
    for name in DUMPED {
        let distance = relative_l2(dumped(got, name), dumped(want, name));
        eprintln!("{what} {name}: {distance:.1e}");
        assert!(distance <= 1e-5, "{what} {name}: {distance:e}");
    }
    assert_eq!((got.frames.data().dim(), got.audio.dim()), (want.frames.data().dim(), want.audio.dim()), "{what}");
}

/// Compares three videos like a request of a model, two at a time on `together`, with one at a time on one device.
fn two_at_a_time(name: &str, base: impl Fn(&OpenModel) -> Request, together: (&str, &str)) {
    let client = cpu(8);
    let model = &format!("tests/fixtures/models/{name}");
    let mut alone = open(&client, model, build("replicated", "data=1", 8));
    let jobs = three(&base(&alone.model));
    let want: Vec<Generated> = jobs.iter().map(|job| generate(&mut alone, job, &dumping(None))).collect();

    let mut runner = open(&client, model, build(together.0, together.1, 8));
    let size = videos_at_once(&runner.build.layout);
    assert_eq!(size, 2);
    let mut got = Vec::new();
    for jobs in jobs.chunks(size) {
        let go_on = &mut |_, _, _| ControlFlow::Continue(());
        got.extend(runner.generate_batch(jobs, &dumping(None), go_on).expect("runs"));
    }
    assert_eq!(got.iter().map(|g| g.batch).collect::<Vec<_>>(), [2, 2, 1]);
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        agree(&format!("{name} video {i}"), got, want);
    }
    let statistics = runner.executor.engine().statistics();
    for (program, s) in &statistics {
        assert_eq!((s.compiles + s.cache_hits, s.executions), (1, 2), "{name}: {program}");
    }
    assert_eq!(statistics.len(), 7, "{:?}", statistics.keys());
    // The other videos of a batch do not change a bit of a video.
    let again = generate(&mut runner, &jobs[1], &dumping(None));
    for name in DUMPED {
        assert_eq!(dumped(&again, name), dumped(&got[1], name), "{name}: other bits alone");
    }
}

/// The guidance rescale statistics of a video, even those requested over the batch, must not include other videos.
#[needs(cpu)]
fn batched_guided_videos_match_single_videos() {
    // Most programs are those of `cli generate`.
    let config = Config::load("tests/fixtures/tiny.yml", [""; 0]).expect("a configuration");
    let job = config.jobs().expect("a job").remove(0);
    two_at_a_time("tiny_a", |model| model.request(&config, &job).expect("a request"), ("cfg", "data=2"));
}

#[needs(cpu, full)]
fn batched_videos_on_sharded_meshes_match_single_videos() {
    let case = cases("pipeline").into_iter().find(|c| c.name.ends_with("tiny_b_cfg")).expect("the case");
    two_at_a_time("tiny_b", |model| request(&case, model), ("cfg-ulysses", "data=2,cfg=2,context=2"));
}

#[needs(cpu)]
fn batch_of_videos_with_different_sizes_is_rejected() {
    let client = cpu(8);
    let all = cases("pipeline");
    let mut runner = open(&client, all[0].model.to_str().expect("a path"), build("cfg", "data=2", 8));
    let first = request(&all[0], &runner.model);
    let longer = Request { num_frames: first.num_frames + 8, ..first.clone() };
    let go_on = &mut |_, _, _| ControlFlow::Continue(());
    let made = runner.generate_batch(&[first, longer], &dumping(None), go_on);
    let e = made.err().expect("refused").to_string();
    assert_eq!(e, "video 1 of the batch differs from the first in more than prompt and seed; run it separately");
}

#[needs(cpu)]
fn batch_size_equals_size_of_data_axis() {
    for (layout, mesh, size) in
        [("ulysses", "context=8", 1), ("replicated", "data=2", 1), ("tensor", "data=4,tensor=2", 4)]
    {
        assert_eq!(videos_at_once(&build(layout, mesh, 8).layout), size, "{layout} {mesh}");
    }
}
