//! RGB to Y'CbCr 4:2:0, BT.709, limited range: the form both H.264 encoders take.

/// One frame in planes; width and height are even.
#[derive(Clone, Debug)]
pub(super) struct Planes {
    /// Luma, `width * height`.
    pub y: Vec<u8>,
    /// Blue difference, a quarter of that.
    pub u: Vec<u8>,
    /// Red difference, a quarter of that.
    pub v: Vec<u8>,
}

/// A size rounded up to even, as 4:2:0 needs it.
pub(super) fn even(n: usize) -> usize {
    n + n % 2
}

// Coefficients of BT.709 (Kr 0.2126, Kb 0.0722) scaled by 219/255 and 224/255 in 16-bit fixed point. The luma row sums to
// 219/255 and the chroma rows to 0 exactly, so that white is 235 and greys are 128.
const Y: [i32; 3] = [11966, 40254, 4064];
const CB: [i32; 3] = [-6596, -22189, 28785];
const CR: [i32; 3] = [28785, -26145, -2640];

/// Converts row-major RGB bytes. An odd last column or row is repeated once.
///
/// Chroma samples sit at the left of each pair of columns and between its rows, where H.264 expects them when nothing
/// else is said: [1 2 1] across, [1 1] down.
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
    // Sums of a pair of rows at each column, then the horizontal filter: weights add up to 8.
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
    fn known_colours() {
        // Values of ITU-R BT.709-6, 8 bits, limited range.
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
    fn odd_sizes_repeat_the_last_row_and_column() {
        let rgb: Vec<u8> = (0..3 * 5 * 3).map(|i| (i * 5) as u8).collect();
        let p = planes(&rgb, 5, 3);
        assert_eq!((p.y.len(), p.u.len(), p.v.len()), (6 * 4, 6, 6));
        for row in p.y.chunks(6) {
            assert_eq!(row[4], row[5]);
        }
        assert_eq!(p.y[2 * 6..3 * 6], p.y[3 * 6..]);
    }
}
