//! Analyzes the frames of a toy clip: colour, shape, motion, and contacts with the floor.

use crate::media::Frames;

const COLOURS: [(&str, [f64; 3]); 8] = [
    ("red", [222.0, 45.0, 45.0]),
    ("green", [50.0, 185.0, 75.0]),
    ("blue", [55.0, 105.0, 235.0]),
    ("yellow", [245.0, 215.0, 55.0]),
    ("white", [245.0, 245.0, 245.0]),
    ("purple", [160.0, 65.0, 205.0]),
    ("orange", [245.0, 140.0, 35.0]),
    ("cyan", [70.0, 210.0, 225.0]),
];

/// Shapes and the fraction of their bounding box that they fill.
const SHAPES: [(&str, f64); 4] = [("circle", 0.80), ("square", 1.0), ("triangle", 0.52), ("star", 0.39)];

/// Colour, shape, motion and floor contacts; empty if no shape is found.
#[derive(Debug, Default)]
pub struct Seen {
    /// Nearest of the toy colours.
    pub colour: &'static str,
    /// Nearest of the toy shapes.
    pub shape: &'static str,
    /// Motion as named in scripts/nano/world.py.
    pub motion: &'static str,
    /// Times of floor contacts, in frames.
    pub bounces: Vec<f64>,
}

/// Position of the shape in a frame, in pixels, and its contrast.
struct Spot {
    frame: f64,
    x: f64,
    y: f64,
    area: f64,
    /// Fraction of its bounding box that it fills.
    fill: f64,
    contrast: f64,
    colour: [f64; 3],
}

/// Analyzes a toy clip of any size.
pub fn see(frames: &Frames) -> Seen {
    let scale = frames.width() as f64 / 128.0;
    let spots = spots(frames, scale);
    if spots.len() < 5 {
        return Seen::default();
    }
    // Take the colour where the contrast is highest: a fading shape takes on the background colour.
    let clear = spots.iter().max_by(|a, b| a.contrast.total_cmp(&b.contrast)).expect("not empty");
    let far = |c: &[f64; 3]| c.iter().zip(clear.colour).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
    let colour = COLOURS.iter().min_by(|a, b| far(&a.1).total_cmp(&far(&b.1))).expect("not empty").0;
    let fill = median(spots.iter().map(|spot| spot.fill).collect());
    let nearest = |a: &f64, b: &f64| (a - fill).abs().total_cmp(&(b - fill).abs());
    let shape = SHAPES.iter().min_by(|a, b| nearest(&a.1, &b.1)).expect("not empty").0;
    let motion = motion(&spots);
    Seen { colour, shape, motion, bounces: if motion == "bounce" { touches(&spots) } else { Vec::new() } }
}

/// Finds the shape in each frame where it is visible: the pixels that differ from the median colour of their row.
fn spots(frames: &Frames, scale: f64) -> Vec<Spot> {
    let (width, height) = (frames.width(), frames.height());
    let pixel = |frame: &[u8], y: usize, x: usize| -> [u8; 3] {
        let at = 3 * (y * width + x);
        [frame[at], frame[at + 1], frame[at + 2]]
    };
    let usual: Vec<[f64; 3]> = (0..height)
        .map(|y| {
            let row = |c: usize| frames.iter().flat_map(move |f| (0..width).map(move |x| f64::from(pixel(f, y, x)[c])));
            [0, 1, 2].map(|c| median(row(c).collect()))
        })
        .collect();
    let contrast =
        |p: [u8; 3], y: usize| p.iter().zip(usual[y]).map(|(p, u)| (f64::from(*p) - u).abs()).fold(0.0, f64::max);
    let places: Vec<(usize, usize)> = (0..height).flat_map(|y| (0..width).map(move |x| (y, x))).collect();
    let most = frames.iter().flat_map(|f| places.iter().map(move |&(y, x)| (f, y, x)));
    let most = most.map(|(f, y, x)| contrast(pixel(f, y, x), y)).fold(0.0, f64::max);
    let least = (0.35 * most).max(26.0);
    let mut spots = Vec::new();
    for (number, frame) in frames.iter().enumerate() {
        let mut inside: Vec<(f64, usize, usize)> = places
            .iter()
            .map(|&(y, x)| (contrast(pixel(frame, y, x), y), y, x))
            .filter(|(contrast, ..)| *contrast > least)
            .collect();
        if (inside.len() as f64) < 8.0 * scale * scale {
            continue;
        }
        let mean = |of: &dyn Fn(&(f64, usize, usize)) -> f64| inside.iter().map(of).sum::<f64>() / inside.len() as f64;
        let (x, y) = (mean(&|p| p.2 as f64 + 0.5) / scale, mean(&|p| p.1 as f64 + 0.5) / scale);
        let area = inside.len() as f64 / (scale * scale);
        let side = |of: fn(&(f64, usize, usize)) -> usize| {
            let ends = inside.iter().map(of).fold((usize::MAX, 0), |(a, b), v| (a.min(v), b.max(v)));
            (ends.1 - ends.0 + 1) as f64
        };
        let fill = inside.len() as f64 / (side(|p| p.1) * side(|p| p.2));
        // The half of the pixels with the highest contrast is the interior of the shape, the rest its edge.
        inside.sort_by(|a, b| b.0.total_cmp(&a.0));
        let core = &inside[..inside.len().div_ceil(2)];
        let channel = |c: usize| median(core.iter().map(|&(_, y, x)| f64::from(pixel(frame, y, x)[c])).collect());
        let contrast = core[core.len() / 2].0;
        spots.push(Spot { frame: number as f64, x, y, area, fill, contrast, colour: [0, 1, 2].map(channel) });
    }
    spots
}

fn median(mut values: Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

fn motion(spots: &[Spot]) -> &'static str {
    let mean = |spots: &[Spot], of: fn(&Spot) -> f64| spots.iter().map(of).sum::<f64>() / spots.len() as f64;
    let range = |of: fn(&Spot) -> f64| {
        let ends = spots.iter().map(of).fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(v), b.max(v)));
        (ends.1 - ends.0, (ends.0 + ends.1) / 2.0)
    };
    let (first, last) = (&spots[..4], &spots[spots.len() - 4..]);
    let change = |of: fn(&Spot) -> f64| mean(last, of) - mean(first, of);
    let ratio = |of: fn(&Spot) -> f64| mean(last, of) / mean(first, of);
    let ((width, middle_x), (height, middle_y)) = (range(|s| s.x), range(|s| s.y));
    let still = width.max(height) < 10.0;
    // A shape that fades becomes invisible before the end of the clip.
    if still && (ratio(|s| s.contrast) < 0.6 || spots[spots.len() - 1].frame < 22.0) {
        return "fade";
    }
    if still || ratio(|s| s.area) > 3.0 {
        return if ratio(|s| s.area) > 1.5 { "grow" } else { "still" };
    }
    let angle = |s: &Spot| (s.y - middle_y).atan2(s.x - middle_x);
    let turns = spots.windows(2).map(|pair| {
        let turn = angle(&pair[1]) - angle(&pair[0]);
        turn - (turn / std::f64::consts::TAU).round() * std::f64::consts::TAU
    });
    if width.min(height) > 20.0 && turns.sum::<f64>().abs() > 3.6 {
        return "orbit";
    }
    let travelled: f64 = spots.windows(2).map(|pair| (pair[1].y - pair[0].y).abs()).sum();
    let (dx, dy) = (change(|s| s.x), change(|s| s.y));
    match () {
        () if height > 14.0 && height > width && travelled > 1.6 * dy.abs() + 6.0 => "bounce",
        () if dx.abs() > dy.abs() => {
            if dx > 0.0 {
                "right"
            } else {
                "left"
            }
        }
        () => {
            if dy > 0.0 {
                "down"
            } else {
                "up"
            }
        }
    }
}

/// Returns the sharp minima of a path, interpolated between frames: the intersection of a falling and a rising line of
/// equal slope.
fn touches(spots: &[Spot]) -> Vec<f64> {
    let lowest = spots.iter().map(|s| s.y).fold(f64::MIN, f64::max);
    let highest = spots.iter().map(|s| s.y).fold(f64::MAX, f64::min);
    let low = |y: f64| y > highest + 0.6 * (lowest - highest);
    spots
        .windows(3)
        .filter(|w| w[1].y >= w[0].y && w[1].y > w[2].y && low(w[1].y))
        .map(|w| {
            let speed = (w[1].y - w[0].y).max(w[1].y - w[2].y);
            w[1].frame + (w[2].y - w[0].y) / (2.0 * speed)
        })
        .collect()
}
