//! Gemma-3, the text encoder.

pub mod tokenizer;
