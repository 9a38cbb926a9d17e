//! Tests of locating models by folder, by file, and by name in the Hugging Face cache.

use serde_json::json;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

use super::super::*;
use super::{diffusers_folder, fails, message, open, put, tokenizer};

#[test]
fn diffusers_folder_provides_components() {
    let dir = TempDir::new().expect("dir");
    diffusers_folder(dir.path());
    let source = open(dir.path()).expect("opens");
    assert_eq!(source.version().expect("known"), Version::V2_0);
    assert_eq!(source.config(Component::Scheduler).expect("there")["shift"], 1.0);
    assert!(source.checkpoint(Component::Transformer).expect("there").contains("proj_in.weight"));
    let encoder = source.checkpoint(Component::TextEncoder).expect("there");
    assert!(encoder.contains("language_model.model.norm.weight"));
    assert_eq!(tokenizer(&source), dir.path().join("tokenizer"));
    source.require([Component::Transformer, Component::TextEncoder, Component::Tokenizer]).expect("there");
    fails(source.config(Component::Vae), &["video VAE", "`model.vae`", "--vae"]);
    fails(source.checkpoint(Component::Connectors), &["contains no connectors", "`model.connectors`", "--connectors"]);
    fails(source.checkpoint(Component::Scheduler), &["no scheduler"]);

    let print = |source: &ModelSource| source.fingerprint(Component::Transformer).expect("readable");
    let before = print(&source);
    assert_eq!((before.len(), before.clone()), (64, print(&open(dir.path()).expect("opens"))));
    put(dir.path().join("transformer/config.json"), json!({"num_layers": 3}).to_string());
    assert_ne!(before, print(&open(dir.path()).expect("opens")));

    put(dir.path().join("transformer/config.json"), "{\"num_layers\": 2,}");
    fails(source.config(Component::Transformer), &["transformer/config.json", "not JSON", "line 1"]);
    put(dir.path().join("transformer/config.json"), json!({"use_prompt_embeddings": false}).to_string());
    fails(source.version(), &["use_prompt_embeddings", "neither LTX-2.0 nor LTX-2.3"]);
    let v23 = json!({"use_prompt_embeddings": false, "cross_attn_mod": true});
    put(dir.path().join("transformer/config.json"), v23.to_string());
    assert_eq!(source.version().expect("known").to_string(), "2.3");
}

#[test]
fn missing_model_error_lists_searched_paths() {
    fails(open(Path::new("./no-such-folder")), &["./no-such-folder", "no such file or folder"]);
    fails(open(Path::new("Org/Name")), &["Org/Name", "/nonexistent/hub/models--Org--Name", "`ltx2 pull Org/Name`"]);
    fails(open(Path::new("Org/Name/a.safetensors")), &["`ltx2 pull Org/Name/a.safetensors`"]);
    // `folder/file`, which cannot be the name of a repository.
    let absent = open(Path::new("absent/a.safetensors")).expect_err("no such file").to_string();
    assert!(absent.contains("no such file or folder") && !absent.contains("ltx2 pull"), "{absent}");
    let absent = LoraFile::open("absent/a.safetensors").expect_err("no such file").to_string();
    assert!(absent.starts_with("absent/a.safetensors: cannot open: ") && !absent.contains("ltx2 pull"), "{absent}");
    // A path, although it has the form of a repository name.
    let error = open(Path::new("src/no-such")).map(drop).expect_err("absent").to_string();
    let advice = "the folder src contains no no-such; correct the path";
    assert!(error.contains(advice) && !error.contains("ltx2 pull"), "{error}");
}

#[cfg(unix)]
#[test]
fn hub_cache_links_are_resolved() {
    use std::os::unix::fs::symlink;
    let dir = TempDir::new().expect("dir");
    let repo = dir.path().join("hub/models--Org--Name");
    let snapshot = repo.join("snapshots/abc");
    diffusers_folder(&snapshot);
    let file = snapshot.join("transformer/diffusion_pytorch_model.safetensors");
    fs::create_dir_all(repo.join("blobs")).expect("folder");
    fs::rename(&file, repo.join("blobs/1234")).expect("rename");
    symlink("../../../blobs/1234", &file).expect("link");
    put(repo.join("refs/main"), "abc\n");
    fs::create_dir_all(repo.join("snapshots/old")).expect("folder");

    let home = dir.path().as_os_str().to_os_string();
    let hub = HubCache::from_vars(|key| (key == "HF_HOME").then(|| home.clone()));
    let open = |name: &str| ModelSource::open_in(name, &Overrides::default(), &hub);
    let source = open("Org/Name").expect("opens");
    assert_eq!(source.path(), snapshot);
    assert_eq!(source.checkpoint(Component::Transformer).expect("linked").names().count(), 1);
    fails(open("Org/Other"), &["models--Org--Other", "from HF_HOME"]);
    fails(open("Org/Name/ltx.safetensors"), &["but not ", "ltx.safetensors", "`ltx2 pull Org/Name/ltx.safetensors`"]);
    fs::remove_file(repo.join("blobs/1234")).expect("remove");
    source.checkpoint(Component::Transformer).expect("opened before");
    fails(
        open("Org/Name").expect("opens").checkpoint(Component::Transformer),
        &["diffusion_pytorch_model.safetensors"],
    );
    fs::remove_file(repo.join("refs/main")).expect("remove");
    fails(open("Org/Name"), &["refs/main", "does not contain exactly one snapshot"]);
    fs::remove_dir(repo.join("snapshots/old")).expect("remove");
    open("Org/Name").expect("one snapshot needs no ref");
}

#[test]
fn hub_cache_variables_override_hf_home() {
    let hub = |vars: &[(&str, &str)]| {
        let cache = HubCache::from_vars(|k| vars.iter().find(|(n, _)| *n == k).map(|(_, v)| (*v).into()));
        message(cache.resolve("o/n"))
    };
    assert!(hub(&[("HOME", "/h")]).contains("/h/.cache/huggingface/hub/models--o--n"));
    assert!(hub(&[("HF_HOME", "/x"), ("HOME", "/h")]).contains("/x/hub/models--o--n"));
    assert!(hub(&[("HF_HOME", "/x"), ("HF_HUB_CACHE", "/y")]).contains("/y/models--o--n"));
    assert!(hub(&[("HUGGINGFACE_HUB_CACHE", "/z")]).contains("(from HUGGINGFACE_HUB_CACHE)"));
}
