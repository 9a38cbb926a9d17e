//! `ltx2 convert`: outputs, refusals, and memory.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use serde_json::json;

use crate::support::single_file::{combined, header, write};
use crate::support::{self, needs};

const FIXTURE: &str = "tests/fixtures/quantized/convert.safetensors";

fn convert(input: &str, output: &Path, weights: &str, more: &[&str]) -> Output {
    let mut run = support::ltx2();
    run.args(["convert", input]).arg(output).args(["--weights", weights]).args(more).output().expect("runs")
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[needs(nothing)]
fn existing_file_is_overwritten_only_with_force() {
    let dir = tempfile::tempdir().expect("a folder");
    let output = dir.path().join("a.safetensors");
    let first = convert(FIXTURE, &output, "int8-convrot", &[]);
    assert!(first.status.success(), "{}", stderr(&first));
    assert_eq!(String::from_utf8_lossy(&first.stdout).trim_end(), output.to_str().expect("UTF-8"));
    let said = stderr(&first);
    assert!(said.contains("10 tensors (3 layers quantized, 0 copied), 0.00 GB in ") && said.contains("GB/s"), "{said}");
    let bytes = fs::read(&output).expect("a file");
    let again = convert(FIXTURE, &output, "int8", &[]);
    assert_eq!((again.status.code(), fs::read(&output).expect("a file") == bytes), (Some(2), true));
    assert!(stderr(&again).contains("exists; overwrite it with --force"), "{}", stderr(&again));
    // The input may be the output.
    let forced = convert(output.to_str().expect("UTF-8"), &output, "bf16", &["--force"]);
    assert!(forced.status.success() && fs::read(&output).expect("a file") != bytes, "{}", stderr(&forced));
    let other = convert(FIXTURE, &dir.path().join("a.gguf"), "int8", &[]);
    assert_eq!(other.status.code(), Some(2), "{}", stderr(&other));
    let refused = convert(FIXTURE, &dir.path().join("b.safetensors"), "int4", &[]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    let folder = convert("tests/fixtures/models/tiny_a", &dir.path().join("b.safetensors"), "int8", &[]);
    assert_eq!(folder.status.code(), Some(1), "{}", stderr(&folder));
    assert!(stderr(&folder).contains("convert one of them, such as tests/fixtures/models/tiny_a/transformer"));
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 1, "no temporary file is left");
}

/// Other components of a complete file are copied.
#[needs(nothing)]
fn converted_checkpoint_passes_check() {
    let dir = tempfile::tempdir().expect("a folder");
    let [input, output] = ["in.safetensors", "out.safetensors"].map(|name| dir.path().join(name));
    write(&input, &combined(), Some(&header()));
    for weights in ["fp8", "int8", "bf16"] {
        let done = convert(input.to_str().expect("UTF-8"), &output, weights, &["--force"]);
        assert!(done.status.success(), "{}", stderr(&done));
        let encoder = "tests/fixtures/models/tiny_a/text_encoder";
        let check = support::ltx2().arg("check").arg(&output).args(["--text-encoder", encoder]).output().expect("runs");
        let said = String::from_utf8_lossy(&check.stdout).into_owned();
        assert!(check.status.success() && said.contains("text_to_video: ready"), "{weights}: {said}");
    }
}

/// The memory does not grow with the size of a tensor: 200 MB of memory are less than one of the file's tensors in f32.
#[needs(full)]
fn conversion_needs_less_memory_than_one_tensor() {
    let dir = tempfile::tempdir().expect("a folder");
    let [input, output] = ["in.safetensors", "out.safetensors"].map(|name| dir.path().join(name));
    let (rows, bytes) = (8192, 8192 * 8192 * 2);
    let layer = |block: usize| format!("model.diffusion_model.transformer_blocks.{block}.attn1.to_q.weight");
    let info = |block: usize| json!({"dtype": "BF16", "shape": [rows, 8192], "data_offsets": [block * bytes, (block + 1) * bytes]});
    let header = json!({layer(0): info(0), layer(1): info(1)}).to_string();
    let file = fs::File::create(&input).expect("a file");
    file.write_all_at(&[&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat(), 0).expect("written");
    file.set_len((8 + header.len() + 2 * bytes) as u64).expect("a sparse file");
    let mut run = support::ltx2();
    let mut run = run.arg("convert").arg(&input).arg(&output).args(["--weights", "int8"]).spawn().expect("starts");
    let mut peak = 0;
    while run.try_wait().expect("a state").is_none() {
        let status = fs::read_to_string(format!("/proc/{}/status", run.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        peak = line.and_then(|kilobytes| kilobytes.parse().ok()).unwrap_or(peak);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(run.wait().expect("it ends").success());
    eprintln!("peak memory: {peak} kB");
    assert!((10_000..200_000).contains(&peak), "{peak} kB");
}
