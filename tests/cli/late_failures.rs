//! Failures after the last denoising step of chained videos, and files that another program creates during a run: no
//! computed result is lost, and no existing file is replaced.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ltx2::config::{CliOverrides, load};
use ltx2::media::read_wav;
use ltx2::pipeline::generate::{FinishedVideo, Observer, generate};
use ltx2::pipeline::phase::Phase;
use ltx2::pipeline::plan::options::GenerateOptions;
use ltx2::pipeline::plan::videos::Job;

use crate::crash_safety::kill_at;
use crate::outputs::{Folder, error, frames_of, json, kept, succeed};
use crate::support::{self, needs};

const CONFIG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny_video.yml");

/// Returns a run with three clips of 17 frames that overlap by 9, written in parts of 8, 8 and 17 frames.
fn chain(folder: &Folder, more: &[&str]) -> Command {
    let clips = ["--set", "request.chain={clip: 17, overlap: 9}", "--num-frames", "33"];
    let own = ["generate", "-c", CONFIG, "-o", "out.mp4", "--width", "96", "--height", "64"];
    folder.ltx2(&[&own[..], &clips, more].concat())
}

/// Returns the path that an error reports for `what`.
fn place<'a>(error: &'a str, what: &str) -> &'a Path {
    let rest =
        error.split(&format!("; {what} kept in ")).nth(1).unwrap_or_else(|| panic!("'{what}' is not in {error}"));
    Path::new(rest.split("; ").next().expect("a path"))
}

#[needs(cpu)]
fn failed_chain_outputs_keep_latents_clips_and_sidecar() {
    let folder = Folder::new();
    let more = ["--save-audio", "out.wav", "--save-frames", "frames"];
    let clips = || (0..3).filter(|at| folder.path(&format!("out.mp4.clip_000{at}.safetensors")).exists()).count();
    let names = ["out.json", "out.mp4", "out.wav"];
    let mut sha256 = None;
    for (moment, left) in
        [("rename frame_00009.png", &names[..]), ("rename out.wav", &names[..2]), ("rename out.json", &names[1..])]
    {
        let mut run = chain(&folder, &[&more[..], &["--checkpoint-every", "1"]].concat());
        let error = error(1, run.env("LTX2_FAILPOINT", format!("fail {moment}")));
        let (path, latents) = kept(&error, "the latents of 3 clips are");
        assert_eq!(latents.len(), 6, "{moment}");
        assert!(latents.contains_key("clip_0002.latents.audio"), "{moment}");
        let there: Vec<_> = names.into_iter().filter(|name| folder.path(name).exists()).collect();
        assert_eq!(there, left, "{moment}: {error}");
        assert_eq!(clips(), 3, "{moment}: the clips are needed still");
        // The sidecar is next to the video or next to the saved tensors.
        let sidecars = [folder.path("out.json"), path.with_extension("json")];
        let sidecars: Vec<_> = sidecars.iter().filter(|path| path.exists()).collect();
        assert_eq!(sidecars.len(), 1, "{moment}");
        let own = json(sidecars[0])["sha256"].clone();
        assert!(own["samples"].is_string() && sha256.get_or_insert_with(|| own.clone()) == &own, "{moment}");
        if moment == "rename out.json" {
            break;
        }
        left.iter().for_each(|name| fs::remove_file(folder.path(name)).expect("removed"));
        fs::remove_dir_all(folder.path("frames")).expect("removed");
        (0..3)
            .for_each(|at| fs::remove_file(folder.path(&format!("out.mp4.clip_000{at}.safetensors"))).expect("a clip"));
        // It does not exist if the last clip was complete.
        let _ = fs::remove_file(folder.path("out.mp4.steps.safetensors"));
    }
    // Without a sidecar, the request of the existing video is unknown.
    let refused = error(2, &mut chain(&folder, &[&more[..], &["--resume"]].concat()));
    assert!(refused.contains("out.mp4: has no sidecar (out.json)") && refused.contains("--force"), "{refused}");
    succeed(&mut chain(&folder, &[&more[..], &["--resume", "--force"]].concat()));
    assert_eq!((clips(), Some(json(&folder.path("out.json"))["sha256"].clone())), (0, sha256));
}

/// If encoding the second part fails, the MP4 of the first part is kept, with the complete audio and the latents.
#[needs(cpu)]
fn failed_chain_encoder_keeps_earlier_frames() {
    let folder = Folder::new();
    let mut run = chain(&folder, &[]);
    let error = error(1, run.env("LTX2_FAILPOINT", "fail encode 8"));
    assert!(error.contains("the embedded H.264 encoder failed: failure injected by LTX2_FAILPOINT"), "{error}");
    assert_eq!(frames_of(&place(&error, "the first 8 frames with their audio are").display().to_string()), 8);
    let sound = read_wav(place(&error, "the audio samples are")).expect("a WAV");
    assert_eq!(sound.len(), 33 * sound.rate() as usize / 24);
    assert_eq!(kept(&error, "the latents of 3 clips are").1.len(), 6);
    assert!(!folder.path("out.mp4").exists(), "a part is not the video");
}

/// If ffmpeg fails, the frames that it received are lost, and the last frames are saved as tensors.
#[cfg(unix)]
#[needs(cpu)]
fn failed_chain_ffmpeg_keeps_last_frames_as_tensors() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    let (programs, ffmpeg) = (folder.path("programs"), folder.path("programs/ffmpeg"));
    fs::create_dir(&programs).expect("a folder");
    let script = "#!/bin/sh\ncase \"$1\" in\n-encoders) printf ' V..... libx264 x\\n A..... aac x\\n' ;;\n\
                  *) cat > /dev/null; echo 'out of order' >&2; exit 1 ;;\nesac\n";
    fs::write(&ffmpeg, script).expect("written");
    fs::set_permissions(&ffmpeg, fs::Permissions::from_mode(0o755)).expect("a program");
    let path = std::env::var("PATH").map(|path| format!("{}:{path}", programs.display())).expect("a PATH");
    let error = error(1, chain(&folder, &[]).env("PATH", path));
    assert!(error.contains("ffmpeg failed on out.mp4") && error.contains("out of order"), "{error}");
    assert!(read_wav(place(&error, "the audio samples are")).is_ok(), "{error}");
    let (_, tensors) = kept(&error, "the latents of 3 clips and the last 17 frames are");
    assert_eq!((tensors["frames"].shape(), tensors.len()), (&[17, 64, 96, 3][..], 7));
}

/// Creates files during the last phase of a video, as another program might.
struct CreateFiles(Vec<PathBuf>);

impl Observer for CreateFiles {
    fn progress(&mut self, _: &[Job], phase: Phase, _: usize, _: usize) -> ControlFlow<()> {
        if phase == Phase::AudioDecoder {
            for file in &self.0 {
                fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
                fs::write(file, "another program's").expect("written");
            }
        }
        ControlFlow::Continue(())
    }

    fn finished(&mut self, _: &FinishedVideo, _: &str) {}
}

#[needs(cpu)]
fn files_created_during_a_run_are_not_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).to_str().expect("UTF-8").to_string();
    let cache = format!("runtime.compile_cache={}", support::programs().display());
    let (sound, frames) = (text("s.wav"), text("frames"));
    let places = [("path", text("out.mp4")), ("save_audio", sound), ("save_frames", frames)];
    let places = places.map(|(key, path)| format!("output.{key}={path}"));
    let set = [&[cache, "sampler.steps=1".to_string()][..], &places].concat();
    let given = CliOverrides { files: vec![support::tiny().into()], set, ..CliOverrides::default() };
    let config = load(&given).expect("a configuration").config;
    let options = GenerateOptions {
        dump: Some(path("d.safetensors")),
        perf_json: Some(path("p.json")),
        ..GenerateOptions::default()
    };
    for names in [&["out.json", "s.wav", "frames/frame_00003.png", "d.safetensors", "p.json"][..], &["out.mp4"]] {
        let others: Vec<PathBuf> = names.iter().map(|name| path(name)).collect();
        let said = generate(&config, options.clone(), None, &mut CreateFiles(others.clone()))
            .expect_err("not written")
            .to_string();
        let (error, _) = said.split_once("; the frames, audio samples and latents are kept in ").expect("the place");
        let kept = support::kept_file(&said);
        assert!(error.contains("File exists"), "{error}");
        for other in &others {
            assert_eq!(fs::read(other).expect("a file"), b"another program's", "{}", other.display());
        }
        assert_eq!(path("out.mp4").exists() && !names.contains(&"out.mp4"), names.len() > 1, "{names:?}");
        let sidecar = Path::new(kept).with_extension("json");
        assert!(json(&sidecar)["sha256"]["frames"].is_string(), "the sidecar has no hash of the frames");
        [Path::new(kept), &sidecar].into_iter().for_each(|file| fs::remove_file(file).expect("removed"));
        for entry in fs::read_dir(folder.path()).expect("a folder").map(|entry| entry.expect("one").path()) {
            if entry.is_dir() { fs::remove_dir_all(entry) } else { fs::remove_file(entry) }.expect("removed");
        }
    }
}

/// The checkpoint is from the same request, but other software wrote the video and the sidecar next to it.
#[needs(cpu)]
fn resume_does_not_replace_files_of_other_software() {
    let folder = Folder::new();
    let run = |more: &[&str]| {
        let own = ["generate", "-c", support::tiny(), "-o", "out.mp4", "--progress-every", "1"];
        let mut run = folder.ltx2(&[&own[..], more].concat());
        run.stdout(Stdio::null());
        run
    };
    kill_at("step 2", &mut run(&["--checkpoint-every", "1"]));
    for (name, line) in [
        ("out.mp4", "error: out.mp4: has no sidecar (out.json) to compare with this request"),
        ("out.json", "error: output.sidecar: out.json exists; overwrite it with --force"),
    ] {
        fs::write(folder.path(name), "another program's").expect("written");
        let refused = error(2, &mut run(&["--resume"]));
        assert!(refused.starts_with(line) && refused.contains("--force"), "{refused}");
        assert_eq!(fs::read(folder.path(name)).expect("a file"), b"another program's");
        fs::remove_file(folder.path(name)).expect("removed");
    }
    fs::write(folder.path("out.mp4"), "another program's").expect("written");
    assert!(succeed(&mut run(&["--resume", "--force"])).contains("resuming in phase denoise"));
    assert!(json(&folder.path("out.json"))["sha256"]["frames"].is_string());
}

/// The audio file of the first of two videos cannot be saved. The second video is still written with its audio.
#[needs(cpu)]
fn failed_audio_output_does_not_affect_later_video() {
    let folder = Folder::new();
    let mut run = folder.generate(&["--num-videos", "2", "-o", "videos", "--save-audio", "sounds"]);
    let error = error(1, run.env("LTX2_FAILPOINT", "fail rename 0000_10.wav"));
    assert!(error.contains("sounds/0000_10.wav: failure injected by LTX2_FAILPOINT"), "{error}");
    kept(&error, "the frames, audio samples and latents are");
    for name in ["0000_10", "0001_11"] {
        let video = folder.path(&format!("videos/{name}.mp4"));
        assert_eq!(frames_of(video.to_str().expect("UTF-8")), 9, "{name}");
        assert!(json(&video.with_extension("json"))["sha256"]["samples"].is_string(), "{name}");
    }
    assert!(read_wav(&folder.path("sounds/0001_11.wav")).is_ok() && !folder.path("sounds/0000_10.wav").exists());
}
