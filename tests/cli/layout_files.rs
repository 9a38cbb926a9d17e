//! Layout files on the command line: errors, and dimensions that are not divisible by the mesh.

use std::path::Path;

use ltx2::pipeline::output::tensors;

use super::generate::{fail, refs, short, text};
use crate::support::{self, cases, needs};

/// Writes a layout file; returns its path.
fn layout_file(dir: &Path, text: &str) -> String {
    let file = dir.join("mine.yml");
    std::fs::write(&file, text).expect("written");
    file.to_str().expect("UTF-8").to_string()
}

#[needs(cpu)]
fn layout_errors_report_tensor_or_file_and_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("a.mp4");
    for (layout, words) in [
        (
            "rules:\n  vido_sequence: [context]\n",
            &["mine.yml:2: unknown tensor axis 'vido_sequence'; known axes are"][..],
        ),
        (
            "rules:\n  batch: [dta]\n",
            &["mine.yml:2: rule for 'batch' has unknown mesh axis 'dta'; known axes are data, cfg"],
        ),
        ("rules:\n  batch: context\n", &["mine.yml:2: rule for 'batch' must be a list of mesh axes"]),
        ("rules:\n  batch: [data, data]\n", &["mine.yml:2: rule for 'batch' repeats mesh axis 'data'"]),
        (
            "mesh:\n  context: 2\n\ncontext_parallel: {kind: wheel}\n",
            &["mine.yml:4: context_parallel.kind: unknown variant `wheel`"],
        ),
        (
            "mesh: {context: 2}\nrules:\n  heads: [context]\n  embed: [context]\n",
            &[
                "tensor 'text_encoder.",
                "is sharded twice by mesh axis 'context' (",
                "mine.yml:3: heads: [context]; ",
                "mine.yml:4: embed: [context])",
            ],
        ),
        (
            "mesh: {data: 2}\nrules:\n  batch: [data]\n  branch: [data]\n",
            &["is sharded twice by mesh axis 'data' (", "mine.yml:3: batch: [data]; ", "mine.yml:4: branch: [data])"],
        ),
        (
            "mesh: {context: 2}\nrules: {video_sequence: [context]}\nexchange: {kind: hybrid, ulysses: 3}\n",
            &["context_parallel: the 2 devices that shard the sequence are not divisible by ulysses = 3"],
        ),
    ] {
        let file = layout_file(dir.path(), layout);
        let line = fail(2, &refs(&short(&out, &["--layout", &file])));
        assert!(words.iter().all(|word| line.contains(word)), "{layout}: {line}");
    }
    for (mesh, words) in [
        ("cfg=16", "mesh data=1,cfg=16,fsdp=1,context=1,tensor=1: needs 16 devices, but there are 8"),
        ("cfg=3,context=-1", "mesh data=1,cfg=3,fsdp=1,context=-1,tensor=1: 8 devices are not divisible by 3"),
        ("cfg=2", "layout cfg-ulysses uses 2 of the 8 devices of cpu:8; pass a --mesh that uses all of them"),
    ] {
        let line = fail(2, &["compile", "--target", "cpu:8", "-c", "ltx2", "--layout", "cfg-ulysses", "--mesh", mesh]);
        assert!(line.contains(words), "{mesh}: {line}");
    }
    assert!(!out.exists(), "nothing is written");
}

#[needs(cpu)]
fn indivisible_axis_size_warns_and_gives_correct_result() {
    let dir = tempfile::tempdir().expect("a folder");
    let (inputs, results) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let case = cases("transformer").into_iter().find(|c| c.name.ends_with("/tiny_a")).expect("a case");
    tensors::write(&inputs, &case.inputs.clone().into_iter().collect::<Vec<_>>()).expect("written");
    let mut run = support::ltx2();
    run.args(["run", "transformer", "--platform", "cpu", "--dtype", "f32", "--layout", "tensor", "--mesh", "tensor=3"]);
    run.arg("--model").arg(&case.model).arg("--inputs").arg(&inputs).arg("-o").arg(&results);
    for (name, value) in case.arguments() {
        run.arg("--set").arg(format!("{name}={value}"));
    }
    let ran = run.output().expect("the binary runs");
    let said = text(&ran.stderr);
    assert!(ran.status.success(), "{said}");
    let line = said.lines().find(|l| l.contains("transformer.transformer_blocks.*.attn1.to_q")).unwrap_or_default();
    for part in ["WARN tensor '", ": heads = ", "is not divisible by tensor = 3 (shardings/tensor.yml:", "; replicated"]
    {
        assert!(line.contains(part), "no '{part}' in '{line}'\n{said}");
    }
    let got = tensors::read(&results).expect("results");
    for name in ["video", "audio"] {
        let distance = case.distance(name, &got[name]);
        assert!(distance <= 1e-5, "{name}: {distance:e}");
    }
}
