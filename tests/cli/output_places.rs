//! Outputs that are devices, pipes or links, wrong file extensions, and text files with a byte-order mark.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::outputs::{Folder, error, json, succeed};
use crate::support::{self, needs};

/// Creates a link to `target` with the name of an output.
fn link(folder: &Folder, target: &str, name: &str) {
    fs::create_dir_all(folder.path("else")).expect("a folder");
    symlink(target, folder.path(name)).expect("a link");
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<_> = entries.map(|e| e.expect("one").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Every output path is a symlink. The links are kept, and no other files appear next to them or their targets.
#[needs(cpu)]
fn output_symlinks_are_kept_and_their_targets_written() {
    let folder = Folder::new();
    let files = ["a.mp4", "a.json", "s.wav", "d.safetensors", "p.json"];
    files.iter().for_each(|name| link(&folder, &format!("else/{name}"), name));
    link(&folder, "else/frames", "frames");
    fs::create_dir(folder.path("else/frames")).expect("a folder");
    let own = ["-o", "a.mp4", "--save-audio", "s.wav", "--save-frames", "frames", "--dump", "d.safetensors"];
    let own = [&own[..], &["--perf-json", "p.json"]].concat();
    succeed(&mut folder.generate(&own));
    let mut all = [&files[..], &["frames"]].concat();
    all.sort_unstable();
    assert_eq!(names(&folder.path("else")), all);
    assert_eq!(names(&folder.path("else/frames")).len(), 9);
    all.iter().for_each(|name| assert!(folder.path(name).is_symlink(), "{name}"));
    let refused = error(2, &mut folder.generate(&own));
    assert!(refused.starts_with("error: output.path: a.mp4 exists; overwrite it with --force"), "{refused}");
    let before = fs::read(folder.path("else/a.mp4")).expect("the video");
    fs::write(folder.path("else/a.mp4"), "old").expect("written");
    succeed(&mut folder.generate(&[&own[..], &["--force"]].concat()));
    assert_eq!(fs::read(folder.path("else/a.mp4")).expect("the video"), before);
    assert!(folder.path("a.mp4").is_symlink());
}

/// A FIFO and a device are kept, need no --force, and receive the same bytes as a file.
#[needs(cpu)]
fn fifos_and_devices_receive_the_same_bytes() {
    let folder = Folder::new();
    succeed(&mut folder.generate(&["-o", "file.mp4", "--save-audio", "file.wav"]));
    for name in ["fifo.mp4", "fifo.wav"] {
        assert!(Command::new("mkfifo").arg(folder.path(name)).status().expect("mkfifo runs").success());
    }
    let readers = ["fifo.mp4", "fifo.wav"].map(|name| {
        let path = folder.path(name);
        std::thread::spawn(move || fs::read(path).expect("the bytes"))
    });
    link(&folder, "/dev/null", "null.safetensors");
    let own = ["-o", "fifo.mp4", "--save-audio", "fifo.wav", "--dump", "null.safetensors", "--perf-json", "/dev/null"];
    succeed(&mut folder.generate(&[&own[..], &["--set", "output.sidecar=false"]].concat()));
    let [video, sound] = readers.map(|reader| reader.join().expect("read"));
    assert_eq!(video, fs::read(folder.path("file.mp4")).expect("a video"));
    assert_eq!(sound, fs::read(folder.path("file.wav")).expect("a sound"));
    assert!(fs::metadata("/dev/null").expect("a device").file_type().is_char_device());
    for name in ["fifo.mp4", "fifo.wav"] {
        assert!(fs::metadata(folder.path(name)).expect("the file still exists").file_type().is_fifo(), "{name}");
    }
    assert!(names(&folder.path("tmp")).is_empty(), "{:?}", names(&folder.path("tmp")));
    // No sidecar can be written next to it.
    let refused = error(2, &mut folder.generate(&["-o", "fifo.mp4"]));
    assert!(refused.starts_with("error: output.sidecar: fifo.mp4 is a device or a pipe"), "{refused}");
}

/// The reader of a FIFO leaves while the video is written.
#[needs(cpu)]
fn closed_fifo_reader_gives_one_error_and_keeps_results() {
    let folder = Folder::new();
    assert!(Command::new("mkfifo").arg(folder.path("fifo.mp4")).status().expect("mkfifo runs").success());
    let fifo = folder.path("fifo.mp4").canonicalize().expect("a FIFO");
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let mut reader = fs::File::options().read(true).write(true).custom_flags(flags).open(&fifo).expect("a FIFO");
    // The FIFO is full, so the run blocks in its first write.
    while reader.write(&[0; 4096]).is_ok() {}
    let mut run = folder.generate(&["-o", "fifo.mp4", "--set", "output.sidecar=false"]);
    let mut run = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts");
    let files = format!("/proc/{}/fd", run.id());
    let since = Instant::now();
    while !fs::read_dir(&files)
        .expect("a process")
        .flatten()
        .any(|file| file.path().read_link().ok().as_ref() == Some(&fifo))
    {
        assert_eq!(run.try_wait().expect("a state"), None, "the run ended before it opened the FIFO");
        assert!(since.elapsed() < Duration::from_secs(60), "the run does not open the FIFO");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(reader);
    let ran = run.wait_with_output().expect("ended");
    let said = String::from_utf8_lossy(&ran.stderr);
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!((ran.status.code(), errors.len()), (Some(1), 1), "{said}");
    assert!(errors[0].contains("fifo.mp4: Broken pipe"), "{said}");
    let kept = support::kept_file(errors[0]);
    assert!(
        ltx2::pipeline::output::tensors::read(&folder.path(kept)).expect("tensors").contains_key("frames"),
        "{said}"
    );
}

/// JSON figures can go to a device, and are appended to the file that stdout is redirected to.
#[needs(nothing)]
fn json_is_written_to_devices_and_stdout() {
    let folder = Folder::new();
    fs::write(folder.path("log"), "before\n").expect("written");
    for (name, place) in [("a", "/dev/stdout"), ("b", "/proc/self/fd/1"), ("c", "/dev/null")] {
        let mut wav = Vec::from(
            *b"RIFF\x2c\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\xbb\0\0\0\x77\x01\0\x02\0\x10\0data\x08\0\0\0",
        );
        wav.extend([0, 16, 0, 32, 0, 16, 0, 240]);
        fs::write(folder.path("x.wav"), &wav).expect("written");
        let log = fs::File::options().append(true).open(folder.path("log")).expect("a file");
        let mut run = folder.ltx2(&["compare", "x.wav", "x.wav", "--json", place]);
        let ran = run.stdout(log).output().expect("runs");
        assert!(ran.status.success(), "{name}: {}", String::from_utf8_lossy(&ran.stderr));
    }
    let log = fs::read_to_string(folder.path("log")).expect("text");
    assert!(log.starts_with("before\n") && log.matches("\"audio\"").count() == 2, "{log}");
    assert!(fs::metadata("/dev/null").expect("a device").file_type().is_char_device());
    assert_eq!(names(&folder.path(".")), ["log", "tmp", "x.wav"]);
}

/// The model does not exist, so loading it would give another error.
#[needs(nothing)]
fn wrong_file_extensions_are_rejected_before_loading() {
    let folder = Folder::new();
    let generate = ["generate", "-p", "x", "-m", "no/such/model"];
    let video = "videos are written as MP4; use the extension .mp4";
    for (more, why) in [
        (&["-o", "x.webm"][..], format!("x.webm: {video}")),
        (&["-o", "x.gif"], format!("x.gif: {video}")),
        (&["-o", "-"], format!("-: {video}")),
        (&["-o", "x"], format!("x: {video}")),
        (&["--set", "output.path=x.mov"], format!("x.mov: {video}")),
        (
            &["--save-audio", "s.mp3"],
            "output.save_audio: s.mp3: sound is written as WAV; use the extension .wav".into(),
        ),
        (&["--save-audio", "-"], "output.save_audio: -: sound is written as WAV; use the extension .wav".into()),
        (
            &["--save-frames", "f.gif"],
            "output.save_frames: f.gif: frames are written as PNG files; use the path of a folder".into(),
        ),
        (
            &["--dump", "d.npz"],
            "--dump: d.npz: tensors are written as safetensors; use the extension .safetensors".into(),
        ),
        (
            &["--dump", "d.npz", "--num-videos", "2", "-o", "clips"],
            "--dump: d.npz: tensors are written as safetensors".into(),
        ),
        (&["--perf-json", "-"], "--perf-json: stdout is not supported; give the path of a file".into()),
        (&["--perf-json", "p.csv"], "--perf-json: p.csv: times are written as JSON; use the extension .json".into()),
    ] {
        let said = error(2, &mut folder.ltx2(&[&generate[..], more].concat()));
        assert!(said.starts_with(&format!("error: {why}")), "{more:?}: {said}");
    }
    let why = ["why", "-c", "ltx2", "--target", "tpu:v6e:2x4", "--write", "x.json"];
    let run = ["run", "vocoder", "--model", "no/such", "--inputs", "a.safetensors", "-o", "x.npz"];
    for (command, why) in [
        (
            &["compare", "a.mp4", "b.mp4", "--report", "x.pdf"][..],
            "--report: x.pdf: the output format is HTML; use the extension .html or .htm",
        ),
        (
            &["compare", "a.mp4", "b.mp4", "--json", "x.csv"],
            "--json: x.csv: the output format is JSON; use the extension .json",
        ),
        (
            &["bench", "--micro", "--from", "a.json", "--fit", "x.yml"],
            "--fit: x.yml: the output format is TOML; use the extension .toml",
        ),
        (&why, "--write: x.json: the output format is YML; use the extension .yml or .yaml"),
        (&run, "--output: x.npz: the output format is SAFETENSORS; use the extension .safetensors"),
    ] {
        let said = error(2, &mut folder.ltx2(command));
        assert!(said.starts_with(&format!("error: {why}")), "{command:?}: {said}");
    }
    assert_eq!(names(&folder.path(".")), ["tmp"]);
}

/// Text files from Windows programs are read without their byte-order mark.
#[needs(nothing)]
fn byte_order_mark_is_ignored() {
    let folder = Folder::new();
    let marked = |name: &str, text: &str| fs::write(folder.path(name), format!("\u{feff}{text}")).expect("written");
    marked("negative.txt", "blurry\n");
    marked("prompts.txt", "a cat\n");
    marked("own.yml", "request: {seed: 7}\n");
    marked("own_layout.yml", "mesh: {}\nrules: {}\n");
    let more = ["--negative-prompt-file", "negative.txt", "--prompts", "prompts.txt", "--layout", "own_layout.yml"];
    let run = [&["generate", "-c", "nano", "-c", "own.yml", "--print-config"], &more[..]].concat();
    let ran = folder.ltx2(&run).output().expect("runs");
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    assert!(!said.contains('\u{feff}') && !said.contains("feff"), "{said}");
    assert!(said.contains("seed: 7") && said.contains("negative_prompt: blurry"), "{said}");
    // The same for all text files of a diffusers folder.
    let model = folder.path("model");
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/tiny_a");
    assert!(Command::new("cp").args(["-rL"]).arg(from).arg(&model).status().expect("cp runs").success());
    let mut texts = 0;
    for part in fs::read_dir(&model).expect("a folder").map(|e| e.expect("one").path()) {
        let files = if part.is_dir() { names(&part).iter().map(|n| part.join(n)).collect() } else { vec![part] };
        for file in files.iter().filter(|file| file.extension().is_some_and(|end| end == "json")) {
            let text = fs::read_to_string(file).expect("text");
            fs::write(file, format!("\u{feff}{text}")).expect("written");
            texts += 1;
        }
    }
    assert!(texts > 5, "{texts}");
    let ran = folder.ltx2(&["check", "model"]).output().expect("runs");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

#[needs(nothing)]
fn negative_numbers_are_parsed_or_rejected_with_range() {
    let folder = Folder::new();
    let refused = |more: &[&str]| {
        let own = [&["generate", "-c", "nano", "-p", "x", "--dry-run"], more].concat();
        let ran = folder.ltx2(&own).output().expect("runs");
        assert_eq!(ran.status.code(), Some(2), "{more:?}");
        String::from_utf8_lossy(&ran.stderr).into_owned()
    };
    let said = refused(&["--seed", "-1"]);
    assert!(said.contains("'-1' for '--seed <N>': expected an integer from 0 to 18446744073709551615"), "{said}");
    let said = refused(&["--image", "p.png", "-1", "1"]);
    assert!(said.contains("--image p.png -1 1: a frame index counted from the end requires --num-frames N"), "{said}");
    let image = [
        "generate",
        "-c",
        "nano",
        "--image",
        "p.png",
        "-1",
        "1",
        "--num-frames",
        "17",
        "--print-config",
        "--pipeline",
        "image_to_video",
    ];
    let ran = folder.ltx2(&image).output().expect("runs");
    assert!(String::from_utf8_lossy(&ran.stdout).contains("\"frame\":16"), "{ran:?}");
}

/// A checkpoint depends on the contents of a LoRA, not on its modification time.
#[needs(cpu)]
fn resume_compares_lora_contents_not_mtime() {
    let folder = Folder::new();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lora/ic_tiny_a_plain.safetensors");
    fs::copy(from, folder.path("lora.safetensors")).expect("copied");
    let own = ["-o", "a.mp4", "--set", "model.loras=[{path: lora.safetensors}]"];
    // Renaming the video fails, so the checkpoint is kept.
    let kept = [&own[..], &["--checkpoint-every", "1", "--steps", "2", "--set", "sampler.progress_every=1"]].concat();
    let run = |more: &[&str]| {
        let mut run = folder.ltx2(&["generate", "-c", support::tiny()]);
        run.args(more);
        run
    };
    error(1, run(&kept).env("LTX2_FAILPOINT", "fail rename a.mp4"));
    let steps = folder.path("a.mp4.steps.safetensors");
    assert!(steps.exists());
    let lora = fs::File::options().append(true).open(folder.path("lora.safetensors")).expect("the LoRA");
    lora.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("another time");
    let mut bytes = fs::read(folder.path("lora.safetensors")).expect("the LoRA");
    *bytes.last_mut().expect("bytes") ^= 1;
    let resumed = [&own[..], &["--resume", "--steps", "2", "--set", "sampler.progress_every=1"]].concat();
    fs::rename(folder.path("lora.safetensors"), folder.path("same")).expect("renamed");
    fs::write(folder.path("lora.safetensors"), &bytes).expect("written");
    let said = error(1, &mut run(&resumed));
    assert!(said.contains("inputs.") && said.contains("lora.safetensors was "), "{said}");
    fs::rename(folder.path("same"), folder.path("lora.safetensors")).expect("renamed");
    succeed(&mut run(&resumed));
    assert!(json(&folder.path("a.json"))["sha256"].is_object() && !steps.exists());
}
