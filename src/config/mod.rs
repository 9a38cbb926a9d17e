//! The YAML schema, presets, and how they merge.
