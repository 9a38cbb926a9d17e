//! Parts of one generation beside the transformer of another. Shapes do not tell LTX-2.5 from LTX-2.3: text encoder,
//! connectors and LoRAs of either load into the other and paint noise. What files say of themselves tells.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::error::WeightsError;
use super::version::Version;

/// Where a text encoder's configuration names its training.
const GEMMA_VERSION: &str = "gemma_version";
/// The text encoder that LTX-2.5 was trained with.
const GEMMA_OF_2_5: &str = "gemma4-12b-ltx-v1";
/// Where the header of a transformer says which text encoder it was trained with.
pub(super) const GEMMA_SOURCE: &str = "gemma_source_checkpoint";

const GIVE_2_5: &str = "give LTX-2.5's own, text_encoders/gemma4-12b-with-proj-ltx-2.5-bf16.safetensors or text_encoder \
                        of Lightricks/LTX-2.5-Diffusers, as `model.text_encoder` or by --text-encoder";
const GIVE_GEMMA_3: &str = "give Gemma-3-12B as `model.text_encoder` or by --text-encoder";

/// The transformer that other parts must go with.
pub(super) struct Transformer {
    /// Where its configuration is.
    pub(super) path: PathBuf,
    pub(super) version: Version,
    /// `gemma_source_checkpoint` of its header, JSON.
    pub(super) gemma: Option<String>,
}

/// What the files of a written model say of their generation, by which they are checked against each other.
pub(crate) struct Provenance {
    /// `model_version` of headers.
    pub(crate) model_version: &'static str,
    /// `gemma_version` of the text encoder's configuration.
    pub(crate) gemma_version: &'static str,
}

impl Provenance {
    /// Key of the text encoder's configuration.
    pub(crate) const GEMMA: &'static str = GEMMA_VERSION;

    /// That of a transformer's configuration. `None`: its generation has none.
    pub(crate) fn of(transformer: &Value) -> Option<Self> {
        let is_2_5 = Version::of_transformer(transformer) == Some(Version::V2_5);
        is_2_5.then_some(Provenance { model_version: "2.5.0", gemma_version: GEMMA_OF_2_5 })
    }
}

impl Transformer {
    fn refused(&self, path: &Path, what: String, cure: &'static str) -> WeightsError {
        let (transformer, wants) = (self.path.clone(), self.version);
        WeightsError::Pairing { path: path.to_path_buf(), what, transformer, wants, cure }
    }

    /// The training of the text encoder that LTX-2.5's header asks for.
    fn gemma_version(&self) -> String {
        let source = self.gemma.as_deref().and_then(|text| serde_json::from_str::<Value>(text).ok());
        let named = source.as_ref().and_then(|source| source.get(GEMMA_VERSION)?.as_str());
        named.unwrap_or(GEMMA_OF_2_5).to_string()
    }

    /// Refuses the text encoder of another generation, and for LTX-2.5 any that was not trained for it. One in the model's
    /// own folder need not say what it was trained for.
    ///
    /// # Errors
    /// As said, with the key that tells.
    pub(super) fn check_text_encoder(&self, path: &Path, config: &Value, own: bool) -> Result<(), WeightsError> {
        let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let is = |what: &str| format!("`model_type` = {family} is {what}");
        match (self.version, family) {
            (Version::V2_5, "gemma4_unified" | "gemma4_unified_text") => {}
            (Version::V2_5, "gemma3" | "gemma3_text") => {
                return Err(self.refused(path, is("the text encoder of LTX-2.0 and LTX-2.3"), GIVE_2_5));
            }
            (Version::V2_5, gemma4) if gemma4.starts_with("gemma4") => {
                return Err(self.refused(path, is("a Gemma 4 of another size"), GIVE_2_5));
            }
            (Version::V2_0 | Version::V2_3, gemma4) if gemma4.starts_with("gemma4") => {
                return Err(self.refused(path, is("the text encoder of LTX-2.5"), GIVE_GEMMA_3));
            }
            // Another family is an error where it is read.
            _ => return Ok(()),
        }
        match config.get(GEMMA_VERSION).filter(|v| !v.is_null()) {
            None if own => Ok(()),
            None => Err(self.refused(path, format!("`{GEMMA_VERSION}` is missing, as in a stock Gemma 4"), GIVE_2_5)),
            Some(version) if *version == *self.gemma_version() => Ok(()),
            Some(version) => {
                let wanted = self.gemma_version();
                Err(self.refused(path, format!("`{GEMMA_VERSION}` is {version}, not {wanted}"), GIVE_2_5))
            }
        }
    }

    /// Refuses a file with `model_version` in its header where either of both is of LTX-2.5 and the other is not.
    ///
    /// # Errors
    /// As said.
    pub(super) fn check_header(
        &self,
        path: &Path,
        model_version: Option<&str>,
        what: &str,
        cure: &'static str,
    ) -> Result<(), WeightsError> {
        let Some(text) = model_version else { return Ok(()) };
        let (major, minor) = Version::numbers(text);
        let mixed = ((major, minor) == (2, 5)) != (self.version == Version::V2_5);
        match mixed && major > 0 {
            true => Err(self.refused(
                path,
                format!("{what} of LTX-{major}.{minor} (`model_version` {text} in its header)"),
                cure,
            )),
            false => Ok(()),
        }
    }

    /// A warning of a file that goes with LTX-2.5 by its shapes and says no generation.
    pub(super) fn unverified(&self, path: &Path, part: &str, lacks: &str) -> Option<String> {
        (self.version == Version::V2_5).then(|| {
            format!(
                "{}: {part} without `{lacks}`: that it is LTX-2.5's cannot be verified; one of another training loads as well \
                 and paints noise",
                path.display()
            )
        })
    }

    /// [`Transformer::unverified`] of a text encoder's configuration, where it lacks its training.
    pub(super) fn unverified_text_encoder(&self, path: &Path, config: &Value) -> Option<String> {
        let says = config.get(GEMMA_VERSION).is_some_and(|version| !version.is_null());
        (!says).then(|| self.unverified(path, "a text encoder", GEMMA_VERSION))?
    }
}
