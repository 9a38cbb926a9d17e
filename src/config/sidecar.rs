//! Sidecars as configurations: a JSON file beside a video, whose `config` repeats the run.

use serde_json::Value;

use super::error::ValueOrigin;
use super::tree::Tree;
use super::yaml::{Data, Node};

/// What a sidecar records of its run beside the configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Sidecar {
    /// Its file.
    pub file: String,
    /// Hashes of the input files, by path.
    pub inputs: Value,
    /// Path and fingerprints of the model.
    pub model: Value,
    /// Whether a flag, `--set` or another file names another model than the sidecar.
    pub names_other_model: bool,
}

/// Keys of the model whose change makes it another one.
const MODEL_KEYS: [&str; 11] = [
    "model.path",
    "model.text_encoder",
    "model.tokenizer",
    "model.vae",
    "model.audio_vae",
    "model.vocoder",
    "model.upsampler",
    "model.temporal_upsampler",
    "model.duration_head",
    "model.weights",
    "model.weights_seed",
];

impl Sidecar {
    /// The sidecar in a file's tree; `None`: the file is a plain configuration.
    pub(super) fn of(root: &Node, file: &str) -> Option<Self> {
        let is_map = |node: &Node| matches!(node.data, Data::Map(_));
        root.get("config").filter(|config| is_map(config))?;
        let part = |key: &str| root.get(key).map_or(Value::Null, Node::to_value);
        Some(Sidecar { file: file.into(), inputs: part("inputs"), model: part("model"), names_other_model: false })
    }

    /// The same with [`Sidecar::names_other_model`] as the merged configuration has it.
    pub(super) fn within(mut self, merged: &Tree) -> Self {
        self.names_other_model = MODEL_KEYS.iter().any(|key| match merged.origin(key) {
            ValueOrigin::Default | ValueOrigin::Preset(_) => false,
            ValueOrigin::File { file, .. } => file != self.file,
            _ => true,
        });
        self
    }
}

/// A sidecar holds the configuration of its run under `config`. The places of the run's files are left out, so that a rerun
/// never writes over them: it gets a default name, and saves frames and sound only where it is told to.
pub(super) fn unwrap_sidecar(root: Node) -> Node {
    let Data::Map(entries) = root.data else { return root };
    match entries.iter().position(|(k, n)| k == "config" && matches!(n.data, Data::Map(_))) {
        None => Node { line: root.line, data: Data::Map(entries) },
        Some(at) => {
            let mut config = entries.into_iter().nth(at).map_or(Node::from_value(Value::Null), |(_, n)| n);
            if let Data::Map(sections) = &mut config.data {
                for (_, section) in sections.iter_mut().filter(|(k, _)| k == "output") {
                    if let Data::Map(keys) = &mut section.data {
                        keys.retain(|(k, _)| !["path", "save_frames", "save_audio"].contains(&k.as_str()));
                    }
                }
            }
            config
        }
    }
}
