//! Conditions on the video.

use std::path::PathBuf;

/// Image conditioning: a frame that the video has to show.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageCondition {
    /// The image file.
    pub path: PathBuf,
    /// Index of the frame.
    pub frame: usize,
    /// Strength, 0 to 1: 1 keeps the frame.
    pub strength: f32,
    /// CRF of the H.264 round trip before encoding; 0 for none.
    pub crf: u8,
    /// Appends its tokens behind the video's own instead of replacing them.
    pub appended: bool,
}

/// Noise levels of tokens as parts of a step's: 1 first, then `1 - strength` for each other strength.
pub fn noise_levels(images: &[ImageCondition]) -> Vec<f32> {
    let mut levels = vec![1.0];
    for level in images.iter().map(|g| 1.0 - g.strength) {
        if !levels.contains(&level) {
            levels.push(level);
        }
    }
    levels
}
