//! `ltx2 pull` from a stand-in for the Hugging Face hub.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::support::hub::{Fault, StandInHub};
use crate::support::single_file::{TensorData, combined_parts, header_2_3, header_2_5_whole, read};
use crate::support::{self, needs};
use ltx2::weights::Component;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

const LTX_2_5: &str = "Lightricks/LTX-2.5";
const GEMMA_3: &str = "google/gemma-3-12b-it-qat-q4_0-unquantized";
const TRANSFORMER: &str = "diffusion_models/ltx-2.5-22b-distilled-transformer-bf16.safetensors";
/// Complete LTX-2.5 model as a diffusers folder.
const WHOLE_2_5: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/tiny_2_5");

/// Returns a command whose Hugging Face folder is `home`.
fn ltx2(home: &Path, hub: &StandInHub) -> Command {
    let mut command = support::ltx2();
    for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"] {
        command.env_remove(name);
    }
    command.env_remove("HF_HUB_OFFLINE").env_remove("TRANSFORMERS_OFFLINE");
    command.env("HF_HOME", home).env("HF_ENDPOINT", &hub.endpoint).env("NO_PROXY", "*").current_dir(home);
    command
}

fn run(command: &mut Command) -> Output {
    command.output().expect("the binary runs")
}

fn pull(home: &Path, hub: &StandInHub, arguments: &[&str]) -> Output {
    run(ltx2(home, hub).arg("pull").args(arguments))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the only error line of a command that failed with `code`.
fn error(out: &Output, code: i32) -> String {
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    errors[0].to_string()
}

fn succeeds(out: &Output) -> (String, String) {
    assert!(out.status.success(), "{}", text(&out.stderr));
    (text(&out.stdout), text(&out.stderr))
}

/// Returns the names of files in the folder of blobs of a repository.
fn blobs(home: &Path, repository: &str) -> Vec<String> {
    let folder = home.join(format!("hub/models--{}/blobs", repository.replace('/', "--")));
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> = entries.map(|e| e.expect("one").file_name().to_string_lossy().into()).collect();
    names.sort();
    names
}

fn downloads(hub: &StandInHub) -> usize {
    hub.requests().iter().filter(|head| head.starts_with("storage")).count()
}

fn file_bytes(tensors: &BTreeMap<String, TensorData>, metadata: &[(&str, String)]) -> Vec<u8> {
    let views = tensors.iter().map(|(k, (d, s, b))| (k, TensorView::new(*d, s.clone(), b).expect("a tensor")));
    let metadata: HashMap<String, String> = metadata.iter().map(|(k, v)| (k.to_string(), v.clone())).collect();
    safetensors::serialize(views, Some(metadata)).expect("bytes")
}

/// Adds LTX-2.5's files, as split and named in the published repository, of a tiny model.
fn add_split_files(hub: &StandInHub) {
    let part = |name: &str| {
        let folder = fs::read_dir(Path::new(WHOLE_2_5).join(name)).expect("a folder");
        let files = folder.map(|entry| entry.expect("an entry").path());
        read(&files.into_iter().find(|file| file.extension().is_some_and(|e| e == "safetensors")).expect("weights"))
    };
    let version = || ("model_version", "2.5.0".to_string());
    let (mut blocks, projections): (BTreeMap<_, _>, BTreeMap<_, _>) =
        combined_parts(WHOLE_2_5, &[Component::Transformer, Component::Connectors])
            .into_iter()
            .partition(|(key, _)| !key.starts_with("text_embedding_projection."));
    assert!(!projections.is_empty());
    let gemma = json!({"ltx_version": "2.5.0", "gemma_version": "gemma4-12b-ltx-v1"});
    let header =
        [version(), ("config", header_2_5_whole().to_string()), ("gemma_source_checkpoint", gemma.to_string())];
    hub.add(TRANSFORMER, &file_bytes(&blocks, &header));
    // The dev transformer differs in its values.
    blocks.values_mut().next().expect("a tensor").2[0] ^= 1;
    hub.add(&TRANSFORMER.replace("distilled", "dev"), &file_bytes(&blocks, &header));

    let mut encoder = part("text_encoder");
    encoder.extend(projections);
    let tokenizer = fs::read(Path::new(WHOLE_2_5).join("tokenizer/tokenizer.json")).expect("a file");
    encoder.insert("tokenizer_json".into(), (Dtype::U8, vec![tokenizer.len()], tokenizer));
    let config = fs::read_to_string(Path::new(WHOLE_2_5).join("text_encoder/config.json")).expect("a file");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["gemma_version"] = "gemma4-12b-ltx-v1".into();
    let header = [("format", "pt".into()), ("gemma_config", config.to_string())];
    hub.add("text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors", &file_bytes(&encoder, &header));

    let sections = |names: &[&str]| {
        let all = header_2_3();
        let config: Value = names.iter().map(|name| ((*name).to_string(), all[*name].clone())).collect();
        [version(), ("config", config.to_string())]
    };
    let vae = combined_parts(WHOLE_2_5, &[Component::Vae]);
    hub.add("vae/ltx-2.5-video-vae-bf16.safetensors", &file_bytes(&vae, &sections(&["vae"])));
    let audio = combined_parts(WHOLE_2_5, &[Component::AudioVae, Component::Vocoder]);
    let header = sections(&["audio_vae", "vocoder"]);
    hub.add("vae/ltx-2.5-audio-vae-bf16.safetensors", &file_bytes(&audio, &header));
    let head = part("duration_head").into_iter().map(|(name, tensor)| (format!("duration_head.{name}"), tensor));
    let head = file_bytes(&head.collect(), &[version()]);
    hub.add("model_patches/ltx-2.5-duration-head-bf16.safetensors", &head);
    let upsampler = file_bytes(&part("latent_upsampler"), &[version()]);
    hub.add("latent_upscale_models/ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0.safetensors", &upsampler);
    hub.add("README.md", b"# LTX-2.5");
}

#[needs(nothing)]
fn pulled_preset_is_complete_and_found_by_its_preset() {
    let (home, hub) = (TempDir::new().expect("a folder"), StandInHub::start(LTX_2_5));
    let home = home.path();
    add_split_files(&hub);
    let small = ["num_frames=9", "width=128", "height=128", "max_sequence_length=128"];
    let small: Vec<String> = small.iter().flat_map(|pair| ["--set".into(), format!("request.{pair}")]).collect();
    let generate = ["generate", "-c", "ltx2_5_distilled", "-p", "a ball", "--dry-run"];
    let generate = || run(ltx2(home, &hub).args(generate).args(&small));
    for preset in ["ltx2_5_distilled", "ltx2_5_hq"] {
        let absent = error(&run(ltx2(home, &hub).args(["generate", "-c", preset, "-p", "a ball"])), 1);
        assert!(absent.ends_with(&format!("download it with `ltx2 pull {preset}`")), "{absent}");
    }

    let (listing, _) = succeeds(&pull(home, &hub, &["ltx2_5_distilled", "--dry-run"]));
    for words in [
        "Lightricks/LTX-2.5 at main (c0c0c0c0c0c0): LTX-2.x Community License Agreement, http://",
        &format!("{TRANSFORMER}  transformer, distilled, with connectors"),
        "6 files, ",
        " free\n",
    ] {
        assert!(listing.contains(words), "{words} is not in: {listing}");
    }
    assert!(!listing.contains("-dev-") && !listing.contains("README"), "{listing}");
    assert_eq!((downloads(&hub), fs::read_dir(home).expect("a folder").count()), (0, 0), "a dry run writes nothing");

    let (out, said) = succeeds(&pull(home, &hub, &["ltx2_5_distilled"]));
    let snapshot = home.join("hub/models--Lightricks--LTX-2.5/snapshots").join("c0".repeat(20));
    assert_eq!(out.trim_end(), snapshot.to_str().expect("UTF-8"));
    assert!(
        said.lines().any(|line| line.starts_with("next: ") && line.contains("/ltx2 generate -c ltx2_5_distilled -p ")),
        "{said}"
    );
    assert!(said.lines().any(|line| line.starts_with("download 100 %, ") && line.ends_with(" MB/s")), "{said}");
    assert_eq!(downloads(&hub), 6);
    let (again, said) = succeeds(&pull(home, &hub, &["ltx2_5_distilled"]));
    assert!(again == out && downloads(&hub) == 0 && said.contains("(complete)"), "{said}");

    // The exit code is that of the request: the preset of `text_to_video` perturbs a block that only the published model
    // has.
    let check = |more: &[&str]| {
        run(ltx2(home, &hub).args(["check", LTX_2_5, "-c", "ltx2_5_distilled"]).args(&small).args(more))
    };
    let (checked, _) = succeeds(&check(&[]));
    for line in ["distilled: ready", "--num-frames auto: ready"] {
        assert!(checked.lines().any(|own| own == line), "no '{line}': {checked}");
    }
    succeeds(&generate());
    // The printed command selects the downloaded variants.
    let int8 = |path: &str| path.replace("-bf16", "-comfy-int8-convrot");
    let encoder = "text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors";
    hub.add_copy(TRANSFORMER, &int8(TRANSFORMER));
    hub.add_copy(encoder, &int8(encoder));
    let (_, said) = succeeds(&pull(home, &hub, &["ltx2_5_distilled", "--files", "int8"]));
    let next = said.lines().find_map(|line| line.strip_prefix("next: ")?.split_once(" ")).expect("a command").1;
    assert!(next.contains(&format!("-m {LTX_2_5}/{} --variant int8", int8(TRANSFORMER))), "{next}");
    let next = shlex::split(next).expect("words");
    succeeds(&run(ltx2(home, &hub).args(next).args(&small).arg("--dry-run")));

    // The preset names its file, so another transformer in the repository does not matter.
    succeeds(&pull(home, &hub, &[LTX_2_5, "--files", "dev-transformer"]));
    succeeds(&generate());
    let ambiguous = error(&check(&[]), 1);
    assert!(ambiguous.contains("2 files could be the transformer"), "{ambiguous}");
    succeeds(&check(&["--variant", "distilled"]));
}

#[needs(nothing)]
fn gated_repository_requires_token_with_access() {
    let (home, hub) = (TempDir::new().expect("a folder"), StandInHub::start("Org/Name"));
    let home = home.path();
    hub.add("a.safetensors", b"weights");
    hub.add("config.json", b"{}");
    hub.gate(&[("good", true), ("other", false)]);
    let denied = pull(home, &hub, &["Org/Name"]);
    let page = format!("accept the model's terms on {}/Org/Name", hub.endpoint);
    let said = error(&denied, 1);
    assert!(said.contains("no access token was found") && said.contains(&page) && said.contains("HF_TOKEN"), "{said}");
    assert!(text(&denied.stderr).contains("stand-in-licence, gated"), "the licence comes first");
    let said = error(&run(ltx2(home, &hub).args(["pull", "Org/Name"]).env("HF_TOKEN", "other")), 1);
    assert!(said.contains("the token from HF_TOKEN has no access") && said.contains(&page), "{said}");
    let said = error(&run(ltx2(home, &hub).args(["pull", "Org/Name"]).env("HF_TOKEN", "expired")), 1);
    assert!(said.contains("is invalid or expired"), "{said}");
    for level in ["trace", "debug,ureq_proto::util=trace"] {
        let mut traced = ltx2(home, &hub);
        traced.args(["pull", "Org/Name"]).envs([("HF_TOKEN", "hf_secret"), ("LTX2_LOG", level)]);
        let out = run(&mut traced);
        let said = text(&out.stderr);
        assert!(said.contains("is invalid or expired"), "{said}");
        assert!(["ureq", "uthorization", "hf_secret"].iter().all(|word| !said.contains(word)), "{said}");
    }
    assert_eq!(downloads(&hub), 0);
    // The file that `hf auth login` writes.
    fs::write(home.join("token"), "good\n").expect("written");
    let (out, said) = succeeds(&pull(home, &hub, &["Org/Name"]));
    let snapshot = PathBuf::from(out.trim_end());
    assert_eq!(fs::read(snapshot.join("a.safetensors")).expect("a file"), b"weights");
    assert_eq!(fs::read(snapshot.join("config.json")).expect("a file"), b"{}");
    assert!(said.contains("/ltx2 check Org/Name\n") && !said.contains("good"), "{said}");
    let storage: Vec<String> = hub.requests().into_iter().filter(|head| head.starts_with("storage")).collect();
    assert!(!storage.is_empty() && storage.iter().all(|head| !head.contains("authorization")), "{storage:?}");
}

#[needs(nothing)]
fn all_denials_are_reported_before_the_first_download() {
    let (home, hub) = (TempDir::new().expect("a folder"), StandInHub::start("Lightricks/LTX-2.3"));
    let home = home.path();
    hub.add("ltx-2.3-22b-dev.safetensors", b"transformer");
    let gemma = hub.repository(GEMMA_3);
    gemma.add("model.safetensors", b"text encoder");
    gemma.gate(&[]);
    let denied = |name: &str| format!("{name}: access denied (401 Unauthorized): no access token was found");
    let said = error(&pull(home, &hub, &["ltx2_3"]), 1);
    assert!(said.contains(&denied(GEMMA_3)) && !said.contains(&denied("Lightricks/LTX-2.3")), "{said}");
    hub.gate(&[]);
    let said = error(&pull(home, &hub, &["ltx2_3"]), 1);
    assert!(said.contains(&denied(GEMMA_3)) && said.contains(&denied("Lightricks/LTX-2.3")), "{said}");
    assert_eq!((downloads(&hub), fs::read_dir(home).expect("a folder").count()), (0, 0));
    // Complete repositories need no access.
    hub.gate(&[("good", true)]);
    gemma.gate(&[("good", true)]);
    succeeds(&run(ltx2(home, &hub).args(["pull", "ltx2_3"]).env("HF_TOKEN", "good")));
    succeeds(&pull(home, &hub, &["ltx2_3"]));
    assert_eq!(downloads(&hub), 2);
}

#[needs(nothing)]
fn wrong_checksum_is_an_error_and_leaves_no_file() {
    let (home, hub) = (TempDir::new().expect("a folder"), StandInHub::start("Org/Name"));
    let sum = hub.add("a.safetensors", b"weights");
    hub.fail("a.safetensors", Fault::WrongByte);
    let said = error(&pull(home.path(), &hub, &["Org/Name"]), 1);
    assert!(said.contains("Org/Name/a.safetensors: the sha256 of the download is "), "{said}");
    assert!(said.contains(&format!("expected {sum}")) && said.contains("the file was deleted"), "{said}");
    assert_eq!(blobs(home.path(), "Org/Name"), [""; 0]);
    assert!(!home.path().join("hub/models--Org--Name/refs").exists(), "an incomplete snapshot is not current");
    succeeds(&pull(home.path(), &hub, &["Org/Name"]));
    assert_eq!(blobs(home.path(), "Org/Name"), [sum]);
    // A complete cache may be read-only.
    let locks = home.path().join("hub/.locks");
    fs::remove_dir_all(&locks).expect("lock files");
    succeeds(&pull(home.path(), &hub, &["Org/Name"]));
    assert!(!locks.exists(), "a complete cache is not written");
}

#[needs(nothing)]
fn interrupted_pull_resumes_in_the_next_run() {
    let (home, hub) = (TempDir::new().expect("a folder"), StandInHub::start("Org/Name"));
    let bytes: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    let sum = hub.add("a.safetensors", &bytes);
    hub.fail("a.safetensors", Fault::Stall(100_000));
    let mut command = ltx2(home.path(), &hub);
    let mut process = command.args(["pull", "Org/Name"]).stderr(Stdio::piped()).spawn().expect("starts");
    let partial = home.path().join(format!("hub/models--Org--Name/blobs/{sum}.incomplete"));
    while partial.metadata().map_or(0, |about| about.len()) < 100_000 {
        assert!(process.try_wait().expect("a state").is_none(), "the download ended");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let sent = Command::new("kill").args(["-INT", &process.id().to_string()]).status().expect("kill runs");
    assert!(sent.success());
    assert_eq!(process.wait().expect("ends").code(), Some(130));
    let lines = BufReader::new(process.stderr.take().expect("piped")).lines().map_while(Result::ok);
    let said: Vec<String> = lines.collect();
    assert!(
        said.iter().any(|line| line.starts_with("error: ") && line.contains("run the same command again to resume")),
        "{said:?}"
    );
    assert_eq!(partial.metadata().expect("kept").len(), 100_000);
    hub.requests();
    let (_, said) = succeeds(&pull(home.path(), &hub, &["Org/Name"]));
    assert!(hub.requests().iter().any(|head| head.contains("range: bytes=100000-")), "{said}");
    assert_eq!(fs::read(home.path().join("hub/models--Org--Name/blobs").join(sum)).expect("a file"), bytes);
}

#[needs(nothing)]
fn changed_file_is_downloaded_from_the_start() {
    let (home, hub) = (TempDir::new().expect("a folder"), StandInHub::start("Org/Name"));
    let home = home.path();
    hub.add("a.safetensors", b"the first version");
    let old = hub.add("b.safetensors", b"before");
    succeeds(&pull(home, &hub, &["Org/Name/a.safetensors"]));
    let partial = home.join(format!("hub/models--Org--Name/blobs/{old}.incomplete"));
    fs::write(&partial, "bef").expect("written");
    let commit = "c1".repeat(20);
    hub.change("b.safetensors", b"after", &commit);
    let (out, said) = succeeds(&pull(home, &hub, &["Org/Name/b.safetensors"]));
    let other = format!("{}: partial download of a file that main does not contain", partial.display());
    assert!(said.contains(&other) && partial.exists(), "another revision may resume it: {said}");
    assert!(out.trim_end().ends_with(&commit), "{out}");
    assert_eq!(fs::read(Path::new(out.trim_end()).join("b.safetensors")).expect("a file"), b"after");
    assert_eq!(fs::read_to_string(home.join("hub/models--Org--Name/refs/main")).expect("a commit"), commit);
    assert_eq!(downloads(&hub), 2, "the unchanged file is not downloaded again");
    assert_eq!(fs::read(Path::new(out.trim_end()).join("a.safetensors")).expect("a file"), b"the first version");

    hub.change("b.safetensors", b"newer", &commit);
    hub.change_after_listing("b.safetensors", b"newest");
    let (out, said) = succeeds(&pull(home, &hub, &["Org/Name"]));
    assert!(said.contains("Org/Name/b.safetensors: changed on the hub since it was listed; starting over"), "{said}");
    assert_eq!(fs::read(Path::new(out.trim_end()).join("b.safetensors")).expect("a file"), b"newest");
}

#[needs(nothing)]
fn download_without_room_is_refused_before_it_starts() {
    let (home, hub) = (TempDir::new().expect("a folder"), StandInHub::start("Org/Name"));
    hub.add_listed("a.safetensors", 1 << 60, &"a".repeat(64));
    let said = error(&pull(home.path(), &hub, &["Org/Name"]), 1);
    assert!(said.contains("HF_HUB_CACHE: ") && said.contains("MiB free, but the files to write there need"), "{said}");
    assert_eq!((downloads(&hub), fs::read_dir(home.path()).expect("a folder").count()), (0, 0));
}

/// Returns a command that runs another one through a shell script, in which `"$0" "$@"` is that command.
fn through(script: &str, own: &Command) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(own.get_program()).args(own.get_args());
    // The programs of the script are found on the PATH.
    for (name, value) in own.get_envs().filter(|(name, _)| *name != "PATH") {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.current_dir(own.get_current_dir().expect("a folder"));
    command
}

#[needs(mount)]
fn too_small_disk_is_reported_before_the_download() {
    let (home, hub) = (TempDir::new().expect("a folder"), StandInHub::start("Org/Name"));
    hub.add("a.safetensors", &[7; 100_000]);
    let mut own = ltx2(home.path(), &hub);
    own.args(["pull", "Org/Name"]);
    let on_disk = r#"mount -t tmpfs -o size=64k tmpfs "$HF_HOME" || exit 99; exec "$0" "$@""#;
    let script = format!(r#"exec unshare -rm sh -c '{on_disk}' "$0" "$@""#);
    let said = error(&run(&mut through(&script, &own)), 1);
    assert!(said.contains("has 0.06 MiB free, but the files to write there need at least 0.10 MiB"), "{said}");
    assert_eq!(downloads(&hub), 0);
    succeeds(&run(&mut through(&script.replace("64k", "1m"), &own)));
}

/// A file size limit fails a write like a disk that becomes full during the download.
#[needs(nothing)]
fn failed_write_keeps_the_partial_download() {
    let (home, hub) = (TempDir::new().expect("a folder"), StandInHub::start("Org/Name"));
    let sum = hub.add("a.safetensors", &[7; 100_000]);
    let mut own = ltx2(home.path(), &hub);
    own.args(["pull", "Org/Name"]);
    let limited = through(r#"ulimit -f 100; exec env --default-signal=XFSZ "$0" "$@""#, &own).output().expect("runs");
    let said = error(&limited, 1);
    assert!(said.contains(&format!("{sum}.incomplete: cannot write: File too large")), "{said}");
    assert_eq!(blobs(home.path(), "Org/Name"), [format!("{sum}.incomplete")]);
    hub.requests();
    succeeds(&run(&mut own));
    assert!(hub.requests().iter().any(|head| head.contains("range: bytes=51200-")), "the download resumes");
    assert_eq!(blobs(home.path(), "Org/Name"), [sum]);
}

#[needs(nothing)]
fn folder_receives_plain_files() {
    let (home, hub) = (TempDir::new().expect("a folder"), StandInHub::start("Org/Name"));
    hub.add("vae/a.safetensors", b"weights");
    hub.add("config.json", b"{}");
    let folder = home.path().join("model");
    let arguments = ["Org/Name", "--dir", folder.to_str().expect("UTF-8")];
    let (out, said) = succeeds(&pull(home.path(), &hub, &arguments));
    assert!(said.contains(&format!("/ltx2 check {}", folder.display())), "{said}");
    assert_eq!(Path::new(out.trim_end()), folder);
    let file = folder.join("vae/a.safetensors");
    assert!(file.symlink_metadata().expect("a file").is_file());
    assert_eq!(fs::read(&file).expect("a file"), b"weights");
    assert_eq!(downloads(&hub), 1);
    // The same size with other contents is not complete.
    fs::write(&file, "Weights").expect("written");
    succeeds(&pull(home.path(), &hub, &arguments));
    assert_eq!((fs::read(&file).expect("a file"), downloads(&hub)), (b"weights".to_vec(), 1));
    assert!(!home.path().join("hub").exists());
}

#[needs(nothing)]
fn invalid_requests_exit_with_code_two() {
    let (home, hub) = (TempDir::new().expect("a folder"), StandInHub::start("Org/Name"));
    let home = home.path();
    hub.add("diffusion_models/dev.safetensors", b"weights");
    for (arguments, words) in [
        (&["ltx25_distilled"][..], "'ltx25_distilled' is neither a preset nor an IC-LoRA nor a repository (org/name)"),
        (&["nano"], "run `ltx2 generate -c nano -p \"a red circle bounces on blue, low beeps\"`"),
        (&[LTX_2_5], "Lightricks/LTX-2.5 contains several models; name a preset"),
        (&["Org/Name", "--files", "dew"], "similar names: diffusion_models/dev.safetensors"),
    ] {
        let said = error(&pull(home, &hub, arguments), 2);
        assert!(said.contains(words), "{said}");
    }
    let offline = error(&run(ltx2(home, &hub).args(["pull", "Org/Name"]).env("HF_HUB_OFFLINE", "1")), 2);
    assert!(offline.contains("HF_HUB_OFFLINE is set"), "{offline}");
    let endpoint = error(&run(ltx2(home, &hub).args(["pull", "Org/Name"]).env("HF_ENDPOINT", "mirror")), 2);
    assert!(endpoint.contains("HF_ENDPOINT: 'mirror' is not a URL"), "{endpoint}");
    let unknown = error(&pull(home, &hub, &["Lightricks/LTX-2.4", "--files", "dev"]), 1);
    assert!(unknown.contains("no repository of this name") && unknown.contains("Lightricks/LTX-2.3"), "{unknown}");
    let unknown = error(&pull(home, &hub, &[LTX_2_5, "--files", "dev"]), 1);
    assert!(unknown.ends_with("similar names: Lightricks/LTX-2, Lightricks/LTX-2.3"), "{unknown}");
    assert_eq!(downloads(&hub), 0);
}
