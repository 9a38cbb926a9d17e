//! The LoRAs of a configuration, by pass.

use std::rc::Rc;

use super::error::Result;
use crate::config;
use crate::weights::{Lora, LoraFile};

/// Opened files, each with its strength and the passes it holds for.
#[derive(Clone, Debug, Default)]
pub struct Loras(Vec<(Lora, Vec<u8>)>);

impl Loras {
    /// Opens the files.
    ///
    /// # Errors
    /// The first that cannot be used, by name.
    pub fn open(entries: &[config::Lora]) -> Result<Self> {
        let each = entries.iter().map(|entry| {
            let file = Rc::new(LoraFile::open(&entry.path)?);
            Ok((Lora { file, strength: entry.strength as f32 }, entry.stages.clone()))
        });
        each.collect::<Result<_>>().map(Loras)
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Those of a pass, counted from 1.
    pub(crate) fn of_pass(&self, pass: u8) -> Vec<Lora> {
        self.0.iter().filter(|(_, passes)| passes.contains(&pass)).map(|(lora, _)| lora.clone()).collect()
    }
}
