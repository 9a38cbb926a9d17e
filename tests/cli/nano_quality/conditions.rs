//! Conditioning of the toy model: bounces follow the beeps of an input sound, and extended or retaken clips follow
//! their prompt.

use std::f64::consts::TAU;
use std::path::Path;

use ltx2::media::{Audio, Clip, WavFormat, write_png_frames, write_wav};
use ltx2::quality::toy::see;
use ltx2::request::{Request, Shared};
use ndarray::Array2;

use super::ClipSession;
use crate::support::needs;

/// Frame rate of the toy clips, and frames per clip.
const RATE: f64 = 24.0;
const FRAMES: f64 = 25.0;

/// Writes beeps at these frames, like those of a bouncing circle in scripts/nano/world.py: a sine that decays within a
/// tenth of a second.
fn beeps(path: &Path, frames: &[f64], pitch: f64) {
    let rate = 48_000;
    let loud = |t: f64| {
        let since = frames.iter().map(|frame| t - frame / RATE).filter(|since| *since > 0.0);
        since.map(|since| (since / 0.004).min(1.0) * (-since / 0.045).exp()).fold(0.0, f64::max)
    };
    let sample = |n: usize| {
        let t = n as f64 / f64::from(rate);
        (0.19 * std::f64::consts::SQRT_2 * loud(t) * (TAU * pitch * t).sin()) as f32
    };
    let samples = Array2::from_shape_fn((2, (FRAMES / RATE * f64::from(rate)) as usize), |(_, n)| sample(n));
    write_wav(path, &Audio::new(samples, rate).expect("stereo"), WavFormat::Pcm16).expect("written");
}

/// Returns the frames at which a bouncing shape hits the floor, given the period of its arcs in frames and its initial
/// phase.
fn hits(period: f64, phase: f64) -> Vec<f64> {
    (1..5).map(|n| (f64::from(n) - phase) * period).filter(|hit| *hit < FRAMES - 1.5).collect()
}

/// Returns the number of beeps with a bounce within one frame, and the number of beeps.
fn met(beeps: &[f64], bounces: &[f64]) -> [usize; 2] {
    let near = beeps.iter().filter(|beep| bounces.iter().any(|bounce| (*bounce - **beep).abs() <= 1.0));
    [near.count(), beeps.len()]
}

/// Returns matched and total beeps when each sound is compared with the clip `shift` places further.
fn pairs(sounds: &[Vec<f64>], bounces: &[Vec<f64>], shift: usize) -> [usize; 2] {
    let pairs = sounds.iter().zip(bounces.iter().cycle().skip(shift));
    pairs.map(|(beeps, bounces)| met(beeps, bounces)).fold([0, 0], |sum, one| [sum[0] + one[0], sum[1] + one[1]])
}

/// The model was not trained on input sounds; it learned that bounces and beeps coincide. Comparing sounds with other
/// clips measures chance.
#[needs(cpu, full)]
fn generated_bounces_are_in_time_with_input_audio_beeps() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("beeps.wav");
    let audio = format!("request.audio={{path: {}}}", path.display());
    let sounds: Vec<Vec<f64>> = (0..16).map(|n| hits(8.0 + f64::from(n % 4), 0.2 + 0.133 * f64::from(n / 4))).collect();
    let kinds = [("large", "low", 400.0), ("medium", "middle", 800.0), ("small", "high", 1600.0)];
    beeps(&path, &sounds[0], 400.0);
    for (level, least) in [("official", 0.9), ("official_1_0", 0.8)] {
        let given = format!("conditioning.given_stream={level}");
        let mut studio = ClipSession::open("nano", &["pipeline=audio_to_video", &audio, &given]);
        let mut bounces = Vec::new();
        for (n, hits) in sounds.iter().enumerate() {
            let (size, heard, pitch) = kinds[n % 3];
            beeps(&path, hits, pitch);
            let what = ["green circle bounces on black", "yellow circle bounces on blue"][n / 8];
            let made = studio.make(&studio.request(&format!("a {size} {what}, {heard} beeps"), 100 + n as u64));
            bounces.push(see(&made.frames).bounces);
            eprintln!("beeps {hits:.1?}, bounces {:.1?}", bounces[n]);
        }
        let own = pairs(&sounds, &bounces, 0);
        let others = (1..16).map(|shift| pairs(&sounds, &bounces, shift));
        let others = others.fold([0, 0], |sum, one| [sum[0] + one[0], sum[1] + one[1]]);
        eprintln!("{level}: a bounce within a frame of {own:?} beeps; of the other clips' beeps {others:?}");
        let [own, others] = [own, others].map(|[near, all]| near as f64 / all as f64);
        assert!(own >= least && others <= 0.35, "{level}: {own:.2} of its own beeps, {others:.2} of others'");
    }
}

/// Extends nine known frames by sixteen; only the new frames are scored.
#[needs(cpu, full)]
fn extension_follows_its_prompt() {
    let folder = tempfile::tempdir().expect("a folder");
    let shapes = ["a medium red circle", "a large cyan square"];
    let turns = [("moves right", "left"), ("moves left", "right"), ("moves up", "down"), ("moves down", "up")];
    let prompt = |shape: &str, motion: &str| format!("{shape} {motion} on black");
    let mut sources = Vec::new();
    let mut studio = ClipSession::open("nano", &[]);
    for (n, (shape, (there, back))) in shapes.iter().flat_map(|s| turns.map(|t| (*s, t))).enumerate() {
        let made = studio.make(&studio.request(&prompt(shape, there), n as u64));
        sources.push((shape, there, back, Clip { sound: Some(made.sound().expect("stereo")), frames: made.frames }));
    }
    drop(studio);
    let video = folder.path().join("source");
    write_png_frames(&video, &sources[0].3.frames).expect("written");
    let video = format!("request.video={}", video.display());
    let extend = "request.extend={seconds: 0.66, overlap: 9}";
    let mut studio = ClipSession::open("nano", &["pipeline=extend", &video, extend]);
    let (mut turned, mut went_on, mut colours) = (0, 0, 0);
    for (n, (shape, there, back, clip)) in sources.into_iter().enumerate() {
        let clip = Shared::from(clip);
        let mut new = |motion: &str| {
            let request = Request { clip: Some(clip.clone()), ..studio.request(&prompt(shape, motion), 50 + n as u64) };
            let made = studio.make(&request);
            assert_eq!((made.frames.count(), made.frames.part(0..25)), (41, clip.frames.clone()));
            see(&made.frames.part(25..41))
        };
        let (other, same) = (new(&format!("moves {back}")), new(there));
        eprintln!("{shape} {there}, then {back}: {other:?}; then as before: {same:?}");
        turned += usize::from(other.motion == back);
        went_on += usize::from(same.motion == back);
        colours += usize::from(shape.contains(other.colour));
    }
    eprintln!("of 8 that are told to turn back {turned} do, of 8 that are not {went_on}; {colours} keep their colour");
    assert!(turned >= 7 && went_on <= 1 && colours >= 7, "{turned}, {went_on}, {colours}");
}

/// Regenerates sixteen frames after nine kept ones: with another prompt they show its colour and shape, with the
/// original prompt the original ones. The decoder blends frames next to the kept ones, so these are not scored.
#[needs(cpu, full)]
fn retaken_span_follows_its_prompt() {
    let folder = tempfile::tempdir().expect("a folder");
    let pairs = [
        (("red", "circle"), ("green", "square")),
        (("cyan", "circle"), ("yellow", "square")),
        (("yellow", "square"), ("red", "circle")),
        (("white", "circle"), ("orange", "square")),
    ];
    let prompt =
        |(colour, shape): (&str, &str)| format!("a medium {colour} {shape} moves right on black, a middle hum");
    let mut studio = ClipSession::open("nano", &[]);
    let sources = pairs.each_ref().map(|(first, _)| {
        let made = studio.make(&studio.request(&prompt(*first), 50));
        Clip { sound: Some(made.sound().expect("stereo")), frames: made.frames }
    });
    drop(studio);
    let video = folder.path().join("source");
    write_png_frames(&video, &sources[0].frames).expect("written");
    let video = format!("request.video={}", video.display());
    let mut studio =
        ClipSession::open("nano", &["pipeline=retake", &video, "request.retake={from: 0.4, kept: source}"]);
    let (mut colours, mut shapes, mut stayed) = (0, 0, 0);
    for ((first, second), clip) in pairs.into_iter().zip(sources) {
        let clip = Shared::from(clip);
        let mut anew = |what| {
            let request = Request { clip: Some(clip.clone()), ..studio.request(&prompt(what), 60) };
            let made = studio.make(&request);
            assert_eq!(made.frames.part(0..9), clip.frames.part(0..9), "the source's frames");
            see(&made.frames.part(13..25))
        };
        let (other, same) = (anew(second), anew(first));
        eprintln!("{first:?}, then {second:?}: {other:?}; then as before: {same:?}");
        colours += usize::from(other.colour == second.0);
        shapes += usize::from(other.shape == second.1);
        stayed += usize::from((same.colour, same.shape) == first);
    }
    eprintln!("of 4 spans {colours} have the new colour, {shapes} the new shape; as before stay {stayed}");
    assert!(colours >= 3 && shapes >= 3 && stayed >= 3, "{colours}, {shapes}, {stayed}");
}
