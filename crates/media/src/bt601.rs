//! Converts RGB to Y'CbCr 4:2:0 and back: BT.601, limited range. Rounds exactly as libswscale does on x86-64 with
//! bilinear filters, so that the H.264 round trip of conditioning images converts pixels alike with the built-in
//! encoder and with ffmpeg.

use super::yuv::Planes;

/// Fractional bits of the fixed-point coefficients.
const SHIFT: i32 = 15;

/// Returns the fixed-point coefficient of an RGB component: `part` (its share of the weighted sum), scaled from 255
/// input levels to `range` output levels.
const fn scaled(part: f64, range: f64) -> i32 {
    (part * range / 255.0 * (1 << SHIFT) as f64 + 0.5) as i32
}

const Y: [i32; 3] = [scaled(0.299, 219.0), scaled(0.587, 219.0), scaled(0.114, 219.0)];
const U: [i32; 3] = [-scaled(0.169, 224.0), -scaled(0.331, 224.0), scaled(0.5, 224.0)];
const V: [i32; 3] = [scaled(0.5, 224.0), -scaled(0.419, 224.0), -scaled(0.081, 224.0)];

/// Weights of the four source rows that make one chroma row at half height: a triangle filter over two rows on each
/// side of its center.
const ROWS: [i32; 4] = [512, 1536, 1536, 512];

/// Converts row-major RGB bytes to planes. `width` and `height` must be even.
pub(super) fn planes(rgb: &[u8], width: usize, height: usize) -> Planes {
    let dot = |k: [i32; 3], pixel: [i32; 3]| k[0] * pixel[0] + k[1] * pixel[1] + k[2] * pixel[2];
    let luma = rgb.chunks_exact(3).map(|p| {
        // libswscale rounds twice: to 14 bits, then to 8.
        let wide =
            (dot(Y, [p[0], p[1], p[2]].map(i32::from)) + (32 << (SHIFT - 1)) + (1 << (SHIFT - 7))) >> (SHIFT - 6);
        ((2 * wide + 64) >> 7).min(255) as u8
    });
    let chroma = |k: [i32; 3]| -> Vec<u8> {
        let pairs: Vec<i32> = rgb
            .chunks_exact(6)
            .map(|p| {
                let sum = [0, 1, 2].map(|c| i32::from(p[c]) + i32::from(p[c + 3]));
                2 * ((dot(k, sum) + (256 << SHIFT) + (1 << (SHIFT - 6))) >> (SHIFT - 5))
            })
            .collect();
        let row = |at: isize| &pairs[at.clamp(0, height as isize - 1) as usize * (width / 2)..][..width / 2];
        let rows = (0..height as isize).step_by(2).map(|at| [row(at - 1), row(at), row(at + 1), row(at + 2)]);
        rows.flat_map(|rows| (0..width / 2).map(move |x| filtered(rows.map(|row| row[x])))).collect()
    };
    Planes { y: luma.collect(), u: chroma(U), v: chroma(V) }
}

/// Filters the chroma values of four rows to one sample. Each term is truncated; the initial value 5 compensates for
/// the truncation.
fn filtered(values: [i32; 4]) -> u8 {
    let sum = ROWS.iter().zip(values).fold(5, |sum, (weight, value)| sum + ((weight * value) >> 16));
    (sum >> 3).clamp(0, 255) as u8
}

/// Converts planes to row-major RGB bytes. Each chroma sample applies to a block of 2x2 pixels.
pub(super) fn rgb(planes: &Planes, width: usize) -> Vec<u8> {
    // Coefficients are scaled by 2^13 and samples by 8; each term is truncated.
    let term = |value: u8, zero: i32, coefficient: i32| (8 * (i32::from(value) - zero) * coefficient) >> 16;
    let mut rgb = Vec::with_capacity(planes.y.len() * 3);
    for (row, luma) in planes.y.chunks_exact(width).enumerate() {
        for (column, &y) in luma.iter().enumerate() {
            let at = row / 2 * (width / 2) + column / 2;
            let (y, u, v) = (term(y, 16, 9539), planes.u[at], planes.v[at]);
            let pixel =
                [y + term(v, 128, 13075), y + term(u, 128, -3209) + term(v, 128, -6660), y + term(u, 128, 16525)];
            rgb.extend(pixel.map(|value| value.clamp(0, 255) as u8));
        }
    }
    rgb
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_colors_convert_to_bt601_values() {
        // Expected values: ITU-R BT.601-7, 8 bits, limited range.
        for (pixel, want) in [
            ([0, 0, 0], [16, 128, 128]),
            ([255, 255, 255], [235, 128, 128]),
            ([255, 0, 0], [81, 90, 240]),
            ([0, 255, 0], [145, 54, 34]),
            ([0, 0, 255], [41, 240, 110]),
        ] {
            let p = planes(&pixel.repeat(6 * 4), 6, 4);
            let got = [p.y[7], p.u[1], p.v[1]];
            assert!(got.iter().zip(want).all(|(a, b): (&u8, u8)| a.abs_diff(b) <= 1), "{pixel:?}: {got:?} {want:?}");
            let back = rgb(&p, 6);
            assert!(back.iter().zip(pixel.iter().cycle()).all(|(a, b): (&u8, &u8)| a.abs_diff(*b) <= 3), "{back:?}");
        }
    }
}
