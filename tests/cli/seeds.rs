//! Requests that scripts/oracle/check.py drew, with the models that it drew: what the reference makes of them is kept.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::thresholds::row;
use crate::support::{self, needs};
use ltx2::weights::Checkpoint;

/// Each differs from the others in generation or flags, pipeline, reference, sampling and layout.
fn seeds() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir("tests/fixtures/seeds").unwrap().map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all
}

fn unpack(archive: &Path, folder: &Path) {
    let done = Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(folder).status().expect("tar runs");
    assert!(done.success(), "{}", archive.display());
}

/// Over ten seconds where nothing is compiled yet: no two drawn models share a program.
#[needs(cpu)]
fn drawn_requests_give_the_reference_s_numbers() {
    let all = seeds();
    assert_eq!(all.len(), 3);
    for archive in all {
        let dir = tempfile::tempdir().expect("a folder");
        unpack(&archive, dir.path());
        let dump = dir.path().join("dump.safetensors");
        let mut run = support::ltx2();
        run.arg("generate").arg("-c").arg(dir.path().join("request.yml")).args(["--set", support::QUICK]);
        let ran = run.arg("--dump").arg(&dump).arg("-o").arg(dir.path().join("out.mp4")).output().expect("runs");
        let name = archive.display();
        assert!(ran.status.success(), "{name}: {}", String::from_utf8_lossy(&ran.stderr));
        let made = Checkpoint::open(&dump).expect("a dump");
        let seed = archive.file_name().expect("a name").to_string_lossy().replace(".tar.gz", "");
        let limit = row(&format!("seeds/{seed}")).f32();
        let case = support::case("seeds", &dir.path().join("expected.safetensors"));
        for output in ["latents.video", "latents.audio", "video", "audio"] {
            let got = made.get(output).and_then(|view| view.to_tensor()).expect("a tensor");
            let distance = case.distance(output, &got);
            eprintln!("{name} {output}: {distance:.1e}");
            assert!(distance <= limit, "{name} {output}: {distance:e}");
        }
    }
}
