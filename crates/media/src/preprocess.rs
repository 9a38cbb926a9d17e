//! Conversions of reference frames that need no neural network: gray, Canny edges, Gaussian blur, and downscaling.
//!
//! All arithmetic on pixels is in integers, so that results do not depend on the machine. Edges are those of OpenCV's
//! `Canny` with L1 gradients, with which Lightricks' trainer computes reference videos. The edge detectors and blurs of
//! imaging crates compute in f32, and blur before they detect edges.

use ndarray::{Array3, Array4, ArrayView3, Axis};
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::frames::Frames;

/// Kind of conversion of reference frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PreprocessKind {
    /// Unchanged frames.
    #[default]
    None,
    /// Luma of BT.601.
    Gray,
    /// White edges on black, by Canny's algorithm on the luma.
    Canny,
    /// Gaussian blur.
    Blur,
    /// Means over square blocks of pixels.
    Downscale,
}

impl PreprocessKind {
    /// Returns the name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            PreprocessKind::None => "none",
            PreprocessKind::Gray => "gray",
            PreprocessKind::Canny => "canny",
            PreprocessKind::Blur => "blur",
            PreprocessKind::Downscale => "downscale",
        }
    }
}

/// Kind of conversion with its parameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PreprocessOptions {
    /// Kind of conversion.
    pub kind: PreprocessKind,
    /// Gradient (sum of the absolute differences in both directions, 0 to 2040) above which `canny` continues an edge;
    /// null uses 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 2040))]
    pub low: Option<u16>,
    /// Gradient above which `canny` starts an edge; null uses 200.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 2040))]
    pub high: Option<u16>,
    /// Standard deviation of `blur`, in pixels of the file, 0.1 to 16; null uses 2. The time per pixel grows with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.1, max = 16))]
    pub sigma: Option<f64>,
    /// Length of the sides of the blocks of `downscale`, in pixels of the file; null uses 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub factor: Option<usize>,
}

/// Conversion of reference frames: its kind, or its kind and parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Preprocess {
    /// Kind of conversion, with default parameters.
    Kind(PreprocessKind),
    /// Kind of conversion and its parameters.
    Options(PreprocessOptions),
}

impl Default for Preprocess {
    fn default() -> Self {
        Preprocess::Kind(PreprocessKind::None)
    }
}

/// Conversion of frames with all parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum FrameFilter {
    /// Unchanged frames.
    #[default]
    None,
    /// Luma of BT.601.
    Gray,
    /// Canny edges.
    Canny {
        /// Gradient above which an edge continues.
        low: u16,
        /// Gradient above which an edge starts.
        high: u16,
    },
    /// Gaussian blur.
    Blur {
        /// Standard deviation in pixels.
        sigma: f64,
    },
    /// Means over blocks.
    Downscale {
        /// Length of the sides of the blocks.
        factor: usize,
    },
}

impl Preprocess {
    /// Returns the kind of conversion.
    pub fn kind(&self) -> PreprocessKind {
        match self {
            Preprocess::Kind(kind) => *kind,
            Preprocess::Options(options) => options.kind,
        }
    }

    /// Returns the conversion with all parameters.
    ///
    /// # Errors
    /// Returns the reason if a parameter does not apply to the kind, or if the low threshold exceeds the high one.
    pub fn filter(&self) -> Result<FrameFilter, String> {
        let options = match self {
            Preprocess::Kind(kind) => PreprocessOptions { kind: *kind, ..PreprocessOptions::default() },
            Preprocess::Options(options) => options.clone(),
        };
        let PreprocessOptions { kind, low, high, sigma, factor } = options;
        let given = [
            ("low", low.is_some(), PreprocessKind::Canny),
            ("high", high.is_some(), PreprocessKind::Canny),
            ("sigma", sigma.is_some(), PreprocessKind::Blur),
            ("factor", factor.is_some(), PreprocessKind::Downscale),
        ];
        if let Some((name, _, own)) = given.iter().find(|(_, is_set, own)| *is_set && *own != kind) {
            return Err(format!("{name} applies only to {}; remove {name}", own.name()));
        }
        Ok(match kind {
            PreprocessKind::None => FrameFilter::None,
            PreprocessKind::Gray => FrameFilter::Gray,
            PreprocessKind::Canny => {
                let (low, high) = (low.unwrap_or(100), high.unwrap_or(200));
                if low > high {
                    return Err(format!("low ({low}) exceeds high ({high}); set low to at most {high}"));
                }
                FrameFilter::Canny { low, high }
            }
            PreprocessKind::Blur => FrameFilter::Blur { sigma: sigma.unwrap_or(2.0) },
            PreprocessKind::Downscale => FrameFilter::Downscale { factor: factor.unwrap_or(2) },
        })
    }
}

impl FrameFilter {
    /// Converts frames. Returns frames `[frames, height, width, 3]` of the same size, except for downscaled ones. Frames
    /// of the same size are replaced one by one, so that memory holds one copy of all frames.
    pub fn apply(self, frames: Frames) -> Frames {
        let mut data = match self {
            FrameFilter::None => return frames,
            _ => frames.into_data(),
        };
        let converted = match self {
            FrameFilter::Downscale { factor } => {
                let (count, height, width, channels) = data.dim();
                let mut blocks = Array4::zeros((count, height.div_ceil(factor), width.div_ceil(factor), channels));
                let pairs: Vec<_> = blocks.outer_iter_mut().zip(data.outer_iter()).collect();
                pairs.into_par_iter().for_each(|(mut to, from)| to.assign(&self.convert(from)));
                blocks
            }
            _ => {
                let each: Vec<_> = data.outer_iter_mut().collect();
                each.into_par_iter().for_each(|mut frame| {
                    let converted = self.convert(frame.view());
                    frame.assign(&converted);
                });
                data
            }
        };
        Frames::new(converted).expect("RGB frames that are not empty")
    }

    /// Converts a frame `[height, width, 3]`.
    fn convert(self, frame: ArrayView3<'_, u8>) -> Array3<u8> {
        match self {
            FrameFilter::None => frame.to_owned(),
            FrameFilter::Gray => rgb(&luma(frame)),
            FrameFilter::Canny { low, high } => rgb(&canny(&luma(frame), i32::from(low), i32::from(high))),
            FrameFilter::Blur { sigma } => blur(frame, sigma),
            FrameFilter::Downscale { factor } => downscale(frame, factor),
        }
    }
}

/// One channel `[height, width]`.
type Plane<T> = ndarray::Array2<T>;

/// Returns the luma of BT.601, 0.299 R + 0.587 G + 0.114 B, with OpenCV's 15-bit weights.
fn luma(frame: ArrayView3<'_, u8>) -> Plane<u8> {
    let weights = [9798u32, 19235, 3735];
    frame.map_axis(Axis(2), |pixel| {
        let sum: u32 = pixel.iter().zip(weights).map(|(value, weight)| u32::from(*value) * weight).sum();
        ((sum + (1 << 14)) >> 15) as u8
    })
}

/// Repeats a channel three times.
fn rgb(plane: &Plane<u8>) -> Array3<u8> {
    let (height, width) = plane.dim();
    Array3::from_shape_fn((height, width, 3), |(y, x, _)| plane[[y, x]])
}

/// Derivatives at a pixel.
#[derive(Clone, Copy)]
struct Slope {
    /// Along the row.
    across: i32,
    /// Along the column.
    down: i32,
}

/// Returns the derivatives (Sobel, 3 x 3) at each pixel. Pixels outside equal those at the edge.
fn sobel(plane: &Plane<u8>) -> Plane<Slope> {
    let (height, width) = plane.dim();
    let at = |y: usize, x: usize| i32::from(plane[[y.clamp(1, height) - 1, x.clamp(1, width) - 1]]);
    // Indices are shifted by one, so that they are never negative.
    Plane::from_shape_fn((height, width), |(y, x)| {
        let weighted = |of: &dyn Fn(usize) -> i32| of(0) + 2 * of(1) + of(2);
        let across = weighted(&|row| at(y + row, x + 2) - at(y + row, x));
        let down = weighted(&|column| at(y + 2, x + column) - at(y, x + column));
        Slope { across, down }
    })
}

/// Returns white edges on black. A pixel is an edge if its gradient (L1 norm) exceeds `low`, is the largest across the
/// edge, and connects (8 neighbours) to such a pixel whose gradient exceeds `high`.
fn canny(plane: &Plane<u8>, low: i32, high: i32) -> Plane<u8> {
    let (height, width) = plane.dim();
    let slopes = sobel(plane);
    let mut gradients = Plane::zeros((height + 2, width + 2));
    for ((y, x), slope) in slopes.indexed_iter() {
        gradients[[y + 1, x + 1]] = slope.across.abs() + slope.down.abs();
    }
    let is_candidate = |y: usize, x: usize| {
        let own = gradients[[y + 1, x + 1]];
        own > low && is_ridge(&gradients, slopes[[y, x]], y + 1, x + 1)
    };
    let candidates = Plane::from_shape_fn((height, width), |(y, x)| is_candidate(y, x));
    let mut edges = Plane::zeros((height, width));
    let strong = candidates.indexed_iter().filter(|((y, x), is)| **is && gradients[[y + 1, x + 1]] > high);
    let mut queue: Vec<(usize, usize)> = strong.map(|(at, _)| at).collect();
    while let Some((y, x)) = queue.pop() {
        if std::mem::replace(&mut edges[[y, x]], 255) == 255 {
            continue;
        }
        for row in y.saturating_sub(1)..(y + 2).min(height) {
            for column in x.saturating_sub(1)..(x + 2).min(width) {
                if candidates[[row, column]] && edges[[row, column]] == 0 {
                    queue.push((row, column));
                }
            }
        }
    }
    edges
}

/// Returns whether the gradient at `(y, x)` is the largest along its direction, which is rounded to a multiple of 45°.
/// `gradients` has a border of zeros. Of two equal neighbours, the one further right or down is not a ridge.
fn is_ridge(gradients: &Plane<i32>, slope: Slope, y: usize, x: usize) -> bool {
    /// tan(22.5°), in units of 2^-15.
    const TANGENT: i64 = 13573;
    let (own, Slope { across, down }) = (gradients[[y, x]], slope);
    let (run, rise) = (i64::from(across.abs()), i64::from(down.abs()) << 15);
    let steep = run * TANGENT + (run << 16);
    if rise < run * TANGENT {
        own > gradients[[y, x - 1]] && own >= gradients[[y, x + 1]]
    } else if rise > steep {
        own > gradients[[y - 1, x]] && own >= gradients[[y + 1, x]]
    } else if (across < 0) != (down < 0) {
        own > gradients[[y - 1, x + 1]] && own > gradients[[y + 1, x - 1]]
    } else {
        own > gradients[[y - 1, x - 1]] && own > gradients[[y + 1, x + 1]]
    }
}

/// Returns the weights of a Gaussian at distances 0, 1, …, 3 σ, in units of 2^-16 of the first.
fn gaussian(sigma: f64) -> Vec<u64> {
    let reach = (3.0 * sigma).ceil() as usize;
    let weight = |distance: usize| (-0.5 * (distance as f64 / sigma).powi(2)).exp() * f64::from(1 << 16);
    (0..=reach).map(|distance| weight(distance).round() as u64).collect()
}

/// Returns the weighted mean around index `at` of `0..length`, in units of 1 / `scale`. Values outside equal those at
/// the ends.
fn smoothed(weights: &[u64], at: usize, length: usize, scale: u64, value: impl Fn(usize) -> u64) -> u64 {
    let pair = |(distance, weight): (usize, &u64)| {
        let both = value(at.saturating_sub(distance)) + value((at + distance).min(length - 1));
        weight * both
    };
    let sum = weights[0] * value(at) + weights.iter().enumerate().skip(1).map(pair).sum::<u64>();
    let total = weights[0] + 2 * weights[1..].iter().sum::<u64>();
    (sum * scale + total / 2) / total
}

/// Blurs a frame along rows and then along columns.
fn blur(frame: ArrayView3<'_, u8>, sigma: f64) -> Array3<u8> {
    /// Rows keep this many fractions of a level.
    const FRACTIONS: u64 = 256;
    let (height, width, channels) = frame.dim();
    let weights = gaussian(sigma);
    let rows = Array3::from_shape_fn((height, width, channels), |(y, x, c)| {
        smoothed(&weights, x, width, FRACTIONS, |x| u64::from(frame[[y, x, c]]))
    });
    Array3::from_shape_fn((height, width, channels), |(y, x, c)| {
        let fine = smoothed(&weights, y, height, 1, |y| rows[[y, x, c]]);
        ((fine + FRACTIONS / 2) / FRACTIONS) as u8
    })
}

/// Returns the mean of each block of `factor` x `factor` pixels; blocks at the right and bottom edges may be smaller.
fn downscale(frame: ArrayView3<'_, u8>, factor: usize) -> Array3<u8> {
    let (height, width, channels) = frame.dim();
    let blocks = (height.div_ceil(factor), width.div_ceil(factor), channels);
    Array3::from_shape_fn(blocks, |(y, x, c)| {
        let span = |at: usize, length: usize| at * factor..((at + 1) * factor).min(length);
        let block = frame.slice(ndarray::s![span(y, height), span(x, width), c]);
        let sum: usize = block.iter().map(|value| usize::from(*value)).sum();
        ((sum + block.len() / 2) / block.len()) as u8
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SQUARE: [&str; 10] = [
        "............",
        "............",
        "....####....",
        "...#....#...",
        "..#.....#...",
        "..#.....#...",
        "...######...",
        "............",
        "............",
        "............",
    ];
    const PATTERN: [&str; 20] = [
        "...........................#",
        "..........................#.",
        "..........................#.",
        "..........................#.",
        "............................",
        "........................#...",
        "..........................##",
        ".........................##.",
        "....................#..##...",
        "......................##....",
        ".................#...##...#.",
        "...................##.....#.",
        "..................##......#.",
        ".............#..##........#.",
        "...............##.........#.",
        "..........#...##........#...",
        "............##.........#...#",
        "...........##........#...##.",
        "#######..##...#######...##..",
        "#........#...#.........#...#",
    ];
    const PATTERN_WIDE: [&str; 20] = [
        "............................",
        "............................",
        "............................",
        "............................",
        "............................",
        "............................",
        "..........................##",
        ".........................##.",
        ".......................##...",
        "......................##....",
        ".....................##...#.",
        "...................##.....#.",
        "..................##......#.",
        "................##........#.",
        "...............##.........#.",
        "..............##........#...",
        "............##.........#...#",
        "...........##........#...##.",
        ".........##...#######...##..",
        ".........#...#.........#....",
    ];

    fn filter(kind: PreprocessKind) -> FrameFilter {
        Preprocess::Kind(kind).filter().unwrap()
    }

    /// Returns a frame whose three channels have this brightness.
    fn gray(height: usize, width: usize, level: impl Fn(usize, usize) -> u8) -> Frames {
        Frames::new(Array4::from_shape_fn((1, height, width, 3), |(_, y, x, _)| level(y, x))).unwrap()
    }

    /// Returns the rows of the first channel, with `#` for white and `.` for black.
    fn drawn(frames: &Frames) -> Vec<String> {
        let symbol = |value: &u8| match value {
            0 => '.',
            255 => '#',
            other => panic!("{other} is neither black nor white"),
        };
        let plane = frames.data().index_axis(Axis(0), 0).index_axis(Axis(2), 0).to_owned();
        plane.outer_iter().map(|row| row.iter().map(symbol).collect()).collect()
    }

    #[test]
    fn gray_has_weights_of_bt_601() {
        let pixels = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [10, 200, 30]];
        let frames = Frames::new(Array4::from_shape_fn((1, 1, 5, 3), |(_, _, x, c)| pixels[x][c])).unwrap();
        let made = filter(PreprocessKind::Gray).apply(frames.clone());
        // 0.299 · 255, 0.587 · 255 and 0.114 · 255; the last pixel is 2.99 + 117.4 + 3.42.
        for (x, level) in [76, 150, 29, 255, 124].into_iter().enumerate() {
            assert_eq!([0, 1, 2].map(|c| made.data()[[0, 0, x, c]]), [level; 3], "pixel {x}");
        }
    }

    /// The edges of OpenCV: `cv2.Canny(image, 100, 200)`.
    #[test]
    fn canny_draws_outline_of_square() {
        let square = gray(10, 12, |y, x| if (3..7).contains(&y) && (3..9).contains(&x) { 200 } else { 20 });
        assert_eq!(drawn(&filter(PreprocessKind::Canny).apply(square.clone())), SQUARE);
        let blank = gray(10, 12, |_, _| 200);
        assert!(drawn(&filter(PreprocessKind::Canny).apply(blank.clone())).concat().chars().all(|c| c == '.'));
    }

    /// All directions and both thresholds: OpenCV's edges of a smooth pattern.
    #[test]
    fn canny_edges_equal_those_of_opencv() {
        let pattern = gray(20, 28, |y, x| ((x * x + 3 * x * y + 2 * y * y) / 5 % 256) as u8);
        assert_eq!(drawn(&FrameFilter::Canny { low: 100, high: 200 }.apply(pattern.clone())), PATTERN);
        assert_eq!(drawn(&FrameFilter::Canny { low: 30, high: 300 }.apply(pattern.clone())), PATTERN_WIDE);
    }

    #[test]
    fn blur_is_symmetric_and_keeps_brightness() {
        let point = gray(21, 21, |y, x| if (y, x) == (10, 10) { 255 } else { 0 });
        let blurred = FrameFilter::Blur { sigma: 1.5 }.apply(point.clone());
        let plane = blurred.data().index_axis(Axis(0), 0).index_axis(Axis(2), 0).to_owned();
        for ((y, x), value) in plane.indexed_iter() {
            assert_eq!([plane[[x, y]], plane[[20 - y, x]], plane[[y, 20 - x]]], [*value; 3], "{y}, {x}");
        }
        // 255 / (2 π 1.5²) at the centre, and exp(-1 / (2 · 1.5²)) of it beside the centre.
        assert_eq!([plane[[10, 10]], plane[[10, 11]], plane[[10, 15]], plane[[0, 0]]], [18, 14, 0, 0]);
        let flat = gray(5, 9, |_, _| 137);
        assert_eq!(FrameFilter::Blur { sigma: 16.0 }.apply(flat.clone()), flat);
    }

    #[test]
    fn downscaled_pixels_are_means_of_blocks() {
        let ramp = gray(3, 5, |y, x| (10 * x + 100 * (y / 2)) as u8);
        let made = FrameFilter::Downscale { factor: 2 }.apply(ramp.clone());
        assert_eq!((made.height(), made.width()), (2, 3));
        let levels = [0, 1].map(|y| [0, 1, 2].map(|x| made.data()[[0, y, x, 0]]));
        assert_eq!(levels, [[5, 25, 40], [105, 125, 140]]);
        assert_eq!(FrameFilter::Downscale { factor: 1 }.apply(ramp.clone()), ramp);
    }

    #[test]
    fn parameters_of_other_kinds_are_errors() {
        let options = |kind| PreprocessOptions { kind, ..PreprocessOptions::default() };
        let filter = |options| Preprocess::Options(options).filter();
        assert_eq!(Preprocess::default().filter(), Ok(FrameFilter::None));
        assert_eq!(Preprocess::Kind(PreprocessKind::Canny).filter(), Ok(FrameFilter::Canny { low: 100, high: 200 }));
        assert_eq!(filter(options(PreprocessKind::Blur)), Ok(FrameFilter::Blur { sigma: 2.0 }));
        let four = PreprocessOptions { factor: Some(4), ..options(PreprocessKind::Downscale) };
        assert_eq!(filter(four), Ok(FrameFilter::Downscale { factor: 4 }));
        let sigma = PreprocessOptions { sigma: Some(1.0), ..options(PreprocessKind::Gray) };
        assert_eq!(filter(sigma), Err("sigma applies only to blur; remove sigma".into()));
        let low = PreprocessOptions { low: Some(201), ..options(PreprocessKind::Canny) };
        assert_eq!(filter(low), Err("low (201) exceeds high (200); set low to at most 200".into()));
    }
}
