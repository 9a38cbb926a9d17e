//! Hashes of a run's input files.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::config::{AUTO, Config};
use crate::media;
use crate::pipeline::error::Result;
use crate::weights::lora::lora_fingerprint;

/// Returns the hash of each input file of a configuration, by path. Images, audio, videos and layout files are hashed
/// with SHA-256; the hash of a folder of frames covers its files in order. The hash of a LoRA is a fingerprint, which
/// covers only samples of its tensors.
///
/// # Errors
/// Returns an error if a file cannot be read.
pub(in crate::pipeline) fn of_given(config: &Config) -> Result<Map<String, Value>> {
    let hash = |path: &str| Ok((path.to_string(), json!(media::sha256_of(Path::new(path))?)));
    let loras = config.model.loras.iter().map(|lora| &lora.path);
    let fingerprint = |path: &String| Ok((path.clone(), json!(lora_fingerprint(path)?)));
    // A shipped layout is part of the binary, so it is not hashed.
    let layout = Some(&config.layout[..]).filter(|layout| *layout != AUTO && Path::new(layout).is_file());
    config.request.files().chain(layout).map(hash).chain(loras.map(fingerprint)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{AudioLatents, GivenAudio, Image, MaskChannel, ReferenceVideo};

    /// Tests the hashes of an image, an audio file, a video, audio latents, a reference video with its mask, and a
    /// layout file. The video and the mask are folders of frames.
    #[test]
    fn every_input_file_is_hashed_by_content() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
        let names = ["image.png", "sound.wav", "latents.safetensors", "reference.mp4", "video", "mask", "layout.yml"];
        for name in ["video", "mask"] {
            std::fs::create_dir(path(name)).expect("a folder");
        }
        let files = [
            "image.png",
            "sound.wav",
            "latents.safetensors",
            "reference.mp4",
            "video/a.png",
            "mask/a.png",
            "layout.yml",
        ];
        files.iter().for_each(|name| std::fs::write(path(name), "before").expect("written"));
        let mut config = Config { layout: path("layout.yml"), ..Config::default() };
        let request = &mut config.request;
        request.images = vec![Image { path: path("image.png"), frame: 0, strength: 1.0, crf: None }];
        request.audio = Some(GivenAudio { path: path("sound.wav"), start: 0.0, duration: None });
        request.audio_latents =
            vec![AudioLatents { path: path("latents.safetensors"), start: 0.0, end: None, strength: 1.0 }];
        request.video = Some(path("video"));
        let attention_mask = Some(path("mask"));
        let (reference, strength) = (path("reference.mp4"), 1.0);
        request.reference_videos = vec![ReferenceVideo {
            path: reference,
            strength,
            attention_strength: strength,
            attention_mask,
            attention_mask_channel: MaskChannel::default(),
            frames: None,
            preprocess: None,
        }];
        let before = of_given(&config).expect("hashes");
        let mut known: Vec<&str> = before.keys().map(String::as_str).collect();
        let mut all = names.map(path);
        known.sort_unstable();
        all.sort_unstable();
        assert_eq!(known, all);
        for (name, file) in names.iter().zip(files) {
            // Overwrite the file in place, so that neither its size nor the folder's modification time changes.
            std::fs::write(path(file), "behind").expect("written");
            let now = of_given(&config).expect("hashes");
            let changed: Vec<&String> = now.keys().filter(|key| now[*key] != before[*key]).collect();
            assert_eq!(changed, [&path(name)]);
            std::fs::write(path(file), "before").expect("written");
        }
    }
}
