//! Checks that components and the transformer belong to the same model version. Shapes do not distinguish LTX-2.5 from
//! LTX-2.3: a text encoder, connectors or a LoRA of one version can be loaded into a model of the other, which then
//! generates noise. Version fields in the files distinguish them.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::error::WeightsError;
use super::text_encoders::Family;
use super::version::Version;

/// Key in a text encoder's configuration that identifies its fine-tuning.
const GEMMA_VERSION: &str = "gemma_version";
/// `gemma_version` of the text encoder that LTX-2.5 was trained with.
const LTX_2_5_GEMMA_VERSION: &str = "gemma4-12b-ltx-v1";
/// Metadata key in a transformer's header that identifies its text encoder.
pub(super) const GEMMA_SOURCE: &str = "gemma_source_checkpoint";

/// The transformer, whose model version all other components must match.
pub(super) struct Transformer {
    /// Path of the transformer's configuration.
    pub(super) path: PathBuf,
    pub(super) version: Version,
    /// `gemma_source_checkpoint` in the transformer's header, as JSON.
    pub(super) gemma: Option<String>,
}

/// Version fields to write into a model's files, so that loading can check that the files belong together.
pub struct VersionFields {
    /// `model_version` for the headers of weight files.
    pub model_version: &'static str,
    /// `gemma_version` for the text encoder's configuration.
    pub gemma_version: &'static str,
}

impl VersionFields {
    /// Configuration key of [`VersionFields::gemma_version`].
    pub const GEMMA: &'static str = GEMMA_VERSION;

    /// Returns the version fields for a transformer's configuration. `None`: the model version has no version fields.
    pub fn for_transformer(transformer: &Value) -> Option<Self> {
        let is_2_5 = Version::of_transformer(transformer) == Some(Version::V2_5);
        is_2_5.then_some(VersionFields { model_version: "2.5.0", gemma_version: LTX_2_5_GEMMA_VERSION })
    }
}

impl Transformer {
    fn refused(&self, path: &Path, found: String, advice: impl Into<String>) -> WeightsError {
        let (transformer, wants, advice) = (self.path.clone(), self.version, advice.into());
        WeightsError::Pairing { path: path.to_path_buf(), found, transformer, wants, advice }
    }

    /// Returns the `gemma_version` that the transformer's header requires, or LTX-2.5's if the header states none.
    fn gemma_version(&self) -> String {
        let source = self.gemma.as_deref().and_then(|text| serde_json::from_str::<Value>(text).ok());
        let named = source.as_ref().and_then(|source| source.get(GEMMA_VERSION)?.as_str());
        named.unwrap_or(LTX_2_5_GEMMA_VERSION).to_string()
    }

    /// Returns an error if the text encoder belongs to another model version or, for LTX-2.5, was not trained for
    /// LTX-2.5. `is_part`: whether the text encoder is part of the model folder, where `gemma_version` may be missing.
    pub(super) fn check_text_encoder(&self, path: &Path, config: &Value, is_part: bool) -> Result<(), WeightsError> {
        let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let own = Family::for_version(self.version, model_type);
        let refused = |what: String| {
            let cure = format!("use {}, with `model.text_encoder` or --text-encoder", own.source);
            Err(self.refused(path, what, cure))
        };
        // A missing key is reported where the configuration is read.
        if !own.supports(model_type) && !model_type.is_empty() {
            let is = match Family::of_type(model_type) {
                Some(family) if family.name == own.name => format!("a {} of another size", own.name),
                Some(family) if family.supports(model_type) => format!("the text encoder of {}", family.users()),
                _ => format!("not {}, the text encoder of {}", own.name, own.users()),
            };
            return refused(format!("`model_type` = {model_type} is {is}"));
        }
        if !own.has_version {
            return Ok(());
        }
        match config.get(GEMMA_VERSION).filter(|v| !v.is_null()) {
            None if is_part => Ok(()),
            None => refused(format!("`{GEMMA_VERSION}` is missing, as in a stock {}", own.name)),
            Some(version) if *version == *self.gemma_version() => Ok(()),
            Some(version) => refused(format!("`{GEMMA_VERSION}` is {version}, not {}", self.gemma_version())),
        }
    }

    /// Checks a file's `model_version` against the transformer: an LTX-2.5 file requires an LTX-2.5 transformer, and
    /// any other version an older one. A file without a version number is accepted.
    pub(super) fn check_header(
        &self,
        path: &Path,
        model_version: Option<&str>,
        what: &str,
        advice: &'static str,
    ) -> Result<(), WeightsError> {
        let Some(text) = model_version else { return Ok(()) };
        let (major, minor) = Version::numbers(text);
        let mixed = ((major, minor) == (2, 5)) != (self.version == Version::V2_5);
        match mixed && major > 0 {
            true => Err(self.refused(
                path,
                format!("{what} of LTX-{major}.{minor} (`model_version` {text} in the header)"),
                advice,
            )),
            false => Ok(()),
        }
    }

    /// Returns a warning for LTX-2.5 models: the file at `path` has no version field, so it may belong to another model
    /// version even though its shapes match. `part`: what the file contains. `field`: name of the missing field.
    pub(super) fn unverified(&self, path: &Path, part: &str, field: &str) -> Option<String> {
        (self.version == Version::V2_5).then(|| {
            format!(
                "{}: {part} without `{field}` cannot be verified as LTX-2.5's; a file for another model would load but \
                 generate noise",
                path.display()
            )
        })
    }

    /// Returns the warning of [`Transformer::unverified`] if a text encoder's configuration has no `gemma_version`.
    pub(super) fn unverified_text_encoder(&self, path: &Path, config: &Value) -> Option<String> {
        let says = config.get(GEMMA_VERSION).is_some_and(|version| !version.is_null());
        (!says).then(|| self.unverified(path, "a text encoder", GEMMA_VERSION))?
    }
}
