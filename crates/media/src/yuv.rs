//! Converts RGB to Y'CbCr 4:2:0 (BT.709, limited range), the input of both H.264 encoders.

/// Planes of one frame. Width and height are even.
#[derive(Clone, Debug)]
pub(super) struct Planes {
    /// Luma, `width * height` bytes.
    pub y: Vec<u8>,
    /// Blue difference (Cb), `width * height / 4` bytes.
    pub u: Vec<u8>,
    /// Red difference (Cr), `width * height / 4` bytes.
    pub v: Vec<u8>,
}

/// Rounds a size up to even, as 4:2:0 requires.
pub(super) fn even(n: usize) -> usize {
    n + n % 2
}

// BT.709 coefficients (Kr 0.2126, Kb 0.0722), scaled by 219/255 and 224/255, in 16-bit fixed point. The luma row adds
// up to exactly 219/255 and each chroma row to 0, so that white becomes 235 and grays have chroma 128.
const Y: [i32; 3] = [11966, 40254, 4064];
const CB: [i32; 3] = [-6596, -22189, 28785];
const CR: [i32; 3] = [28785, -26145, -2640];

/// Converts row-major RGB bytes to planes. Repeats the last column or row once if the size is odd.
///
/// A chroma sample covers two columns and two rows. It is centered on the left column and between the rows, H.264's
/// default position: the filter is [1 2 1] horizontally and [1 1] vertically.
pub(super) fn planes(rgb: &[u8], width: usize, height: usize) -> Planes {
    let (w, h) = (even(width), even(height));
    let mut out = Planes { y: vec![0; w * h], u: vec![0; w * h / 4], v: vec![0; w * h / 4] };
    let row = |y: usize| &rgb[y.min(height - 1) * width * 3..][..width * 3];
    for (line, y) in out.y.chunks_exact_mut(w).enumerate() {
        for (x, pixel) in row(line).chunks_exact(3).enumerate() {
            let sum = Y[0] * i32::from(pixel[0]) + Y[1] * i32::from(pixel[1]) + Y[2] * i32::from(pixel[2]);
            y[x] = (16 + ((sum + (1 << 15)) >> 16)) as u8;
        }
        if w > width {
            y[width] = y[width - 1];
        }
    }
    // Adds the two rows of each pair per column, then filters horizontally. The weights add up to 8.
    let mut columns = vec![[0i32; 3]; width];
    for line in 0..h / 2 {
        for ((sum, a), b) in
            columns.iter_mut().zip(row(2 * line).chunks_exact(3)).zip(row(2 * line + 1).chunks_exact(3))
        {
            *sum = [0, 1, 2].map(|c| i32::from(a[c]) + i32::from(b[c]));
        }
        for x in 0..w / 2 {
            let here = 2 * x;
            let (left, middle, right) =
                (columns[here.saturating_sub(1)], columns[here], columns[(here + 1).min(width - 1)]);
            let sum = [0, 1, 2].map(|c| left[c] + 2 * middle[c] + right[c]);
            let dot = |k: [i32; 3]| {
                let v = 128 + ((k[0] * sum[0] + k[1] * sum[1] + k[2] * sum[2] + (1 << 18)) >> 19);
                v.clamp(16, 240) as u8
            };
            out.u[line * (w / 2) + x] = dot(CB);
            out.v[line * (w / 2) + x] = dot(CR);
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn known_colors_convert_to_bt709_values() {
        // Expected values: ITU-R BT.709-6, 8 bits, limited range.
        for (rgb, want) in [
            ([0, 0, 0], [16, 128, 128]),
            ([255, 255, 255], [235, 128, 128]),
            ([128, 128, 128], [126, 128, 128]),
            ([255, 0, 0], [63, 102, 240]),
            ([0, 255, 0], [173, 42, 26]),
            ([0, 0, 255], [32, 240, 118]),
        ] {
            let p = planes(&rgb.repeat(6 * 4), 6, 4);
            assert!(p.y.iter().all(|&v| v == want[0]), "{rgb:?}: {:?}", p.y[0]);
            assert!(p.u.iter().all(|&v| v == want[1]), "{rgb:?}: {:?}", p.u[0]);
            assert!(p.v.iter().all(|&v| v == want[2]), "{rgb:?}: {:?}", p.v[0]);
        }
    }

    #[test]
    fn odd_sizes_repeat_last_row_and_column() {
        let rgb: Vec<u8> = (0..3 * 5 * 3).map(|i| (i * 5) as u8).collect();
        let p = planes(&rgb, 5, 3);
        assert_eq!((p.y.len(), p.u.len(), p.v.len()), (6 * 4, 6, 6));
        for row in p.y.chunks(6) {
            assert_eq!(row[4], row[5]);
        }
        assert_eq!(p.y[2 * 6..3 * 6], p.y[3 * 6..]);
    }
}
