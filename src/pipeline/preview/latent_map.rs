//! Linear map from latents to small RGB frames, fitted by least squares to latents and the frames decoded from them.

use ndarray::{Array1, Array2, Array4, ArrayView4, Axis as Dim, Slice, s};

use crate::media::Frames;

/// Cells that the map reads for each latent cell: the cell itself, then its neighbours along time, rows and columns.
const NEIGHBOURS: [[isize; 3]; 7] = [[0, 0, 0], [-1, 0, 0], [1, 0, 0], [0, -1, 0], [0, 1, 0], [0, 0, -1], [0, 0, 1]];
/// Factor by which previews are smaller than the decoded video, along height and width.
const REDUCTION: usize = 8;
/// Ridge regularization: value added to the diagonal of the Gram matrix.
const RIDGE: f64 = 1.0;

/// Sizes of a latent cell in the decoded video and in a preview.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CellSize {
    /// Latent channels.
    pub(crate) channels: usize,
    /// Pixels per cell, along height and width.
    pub(crate) pixels: usize,
    /// Decoded frames per latent frame, except the first latent frame, which is one decoded frame.
    pub(crate) frames: usize,
}

impl CellSize {
    /// Returns the number of preview pixels per cell, along height and width.
    pub(crate) fn patch(&self) -> usize {
        (self.pixels / REDUCTION).max(1)
    }

    /// Returns the number of values that the map reads for each cell, including a constant.
    pub(crate) fn features(&self) -> usize {
        NEIGHBOURS.len() * self.channels + 1
    }

    /// Returns the number of RGB values of a cell in a preview.
    pub(crate) fn outputs(&self) -> usize {
        3 * self.patch().pow(2)
    }

    /// Returns the index of the decoded frame that the preview shows for a latent frame: the middle one.
    fn decoded_frame(&self, latent_frame: usize) -> usize {
        if latent_frame == 0 { 0 } else { self.frames * latent_frame - self.frames / 2 }
    }

    /// Returns the decoded frame that the preview shows for each of the first `latent_frames` latent frames. Ignores
    /// latent frames whose decoded frame is missing.
    pub(crate) fn shown_frames(&self, decoded: &Frames, latent_frames: usize) -> Frames {
        let all = (0..latent_frames).map(|t| self.decoded_frame(t));
        decoded.select(all.take_while(|at| *at < decoded.count()))
    }
}

/// Returns the values that the map reads for each cell of the normalized latents `[C, F, H, W]`, `[F·H·W, features]`.
/// Neighbours outside the video are 0.
fn features(latents: ArrayView4<f32>) -> Array2<f32> {
    let (c, f, h, w) = latents.dim();
    let mut padded = Array4::<f32>::zeros((f + 2, h + 2, w + 2, c));
    padded.slice_mut(s![1..=f, 1..=h, 1..=w, ..]).assign(&latents.permuted_axes([1, 2, 3, 0]));
    let mut all = Array4::ones((f, h, w, NEIGHBOURS.len() * c + 1));
    for (at, offsets) in NEIGHBOURS.iter().enumerate() {
        let [t, y, x] = offsets.map(|offset| (1 + offset) as usize);
        let cells = padded.slice(s![t..t + f, y..y + h, x..x + w, ..]);
        all.slice_mut(s![.., .., .., at * c..(at + 1) * c]).assign(&cells);
    }
    let count = all.dim().3;
    all.into_shape_with_order((f * h * w, count)).expect("cells in standard order")
}

/// Reduces decoded frames, one for each latent frame, to the size of a preview. Returns values in -1..1 for each cell
/// of the grid `[F, H, W]`: `[F·H·W, outputs]`.
fn targets(frames: &Frames, cell: CellSize, grid: [usize; 3]) -> Array2<f32> {
    let ([f, h, w], p) = (grid, cell.patch());
    let block = cell.pixels / p;
    let mut all = Array2::zeros((f * h * w, cell.outputs()));
    let scale = 2.0 / 255.0 / (block * block) as f32;
    for t in 0..f {
        let frame = frames.data().index_axis(Dim(0), t);
        for (y, row) in frame.axis_iter(Dim(0)).enumerate().take(h * cell.pixels) {
            let row = row.as_slice().expect("frames are stored in rows");
            let (y, line) = (y / cell.pixels, y % cell.pixels / block);
            for (x, pixel) in row.chunks_exact(3).enumerate().take(w * cell.pixels) {
                let (x, column) = (x / cell.pixels, x % cell.pixels / block);
                let mut values = all.row_mut((t * h + y) * w + x);
                for (channel, value) in pixel.iter().enumerate() {
                    values[(line * p + column) * 3 + channel] += f32::from(*value) * scale;
                }
            }
        }
    }
    all.mapv_inplace(|sum| sum - 1.0);
    all
}

/// Sums from which the map is computed: the normal equations of least squares.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MapStatistics {
    pub(crate) cell: CellSize,
    /// Number of cells in the sums.
    pub(crate) cells: usize,
    /// Sum of the products of two features, `[features, features]`.
    pub(crate) gram: Array2<f64>,
    /// Sum of the products of features and outputs, `[features, outputs]`.
    pub(crate) cross: Array2<f64>,
}

impl MapStatistics {
    /// Creates sums of no cells.
    pub(crate) fn new(cell: CellSize) -> Self {
        let (features, outputs) = (cell.features(), cell.outputs());
        let (gram, cross) = (Array2::zeros((features, features)), Array2::zeros((features, outputs)));
        MapStatistics { cell, cells: 0, gram, cross }
    }

    /// Adds the cells of a video. `latents`: normalized latents `[C, F, H, W]`; `frames`: the result of
    /// [`CellSize::shown_frames`] for the frames decoded from them. Of the cells, only the first `counted` frames, rows
    /// and columns are added; the others are padding.
    pub(crate) fn add(&mut self, latents: ArrayView4<f32>, frames: &Frames, counted: [usize; 3]) {
        let (_, all, h, w) = latents.dim();
        let count = frames.count().min(all);
        let fits = frames.height() >= h * self.cell.pixels && frames.width() >= w * self.cell.pixels;
        if count == 0 || !fits {
            return;
        }
        let [own_f, own_h, own_w] = [counted[0].min(count), counted[1].min(h), counted[2].min(w)];
        let mut x = features(latents);
        let mut y = targets(frames, self.cell, [count, h, w]);
        if [own_f, own_h, own_w] != [all, h, w] {
            let inside = |at: usize| at / (h * w) < own_f && at / w % h < own_h && at % w < own_w;
            let rows: Vec<usize> = (0..count * h * w).filter(|at| inside(*at)).collect();
            (x, y) = (x.select(Dim(0), &rows), y.select(Dim(0), &rows));
        }
        let (x, y) = (x.mapv_into_any(f64::from), y.mapv_into_any(f64::from));
        self.gram += &x.t().dot(&x);
        self.cross += &x.t().dot(&y);
        self.cells += x.nrows();
    }

    /// Adds other sums, multiplied by `weight`.
    pub(crate) fn add_weighted(&mut self, other: &MapStatistics, weight: f64) {
        self.gram.scaled_add(weight, &other.gram);
        self.cross.scaled_add(weight, &other.cross);
        self.cells += other.cells;
    }

    /// Returns the map that fits the cells best. `None`: there are no cells, or the sums are not finite.
    pub(crate) fn map(&self) -> Option<LatentMap> {
        if self.cells == 0 {
            return None;
        }
        let mut gram = self.gram.clone();
        gram.diag_mut().mapv_inplace(|v| v + RIDGE);
        let solution = solve(gram, self.cross.clone())?.mapv_into_any(|v| v as f32);
        let (weight, bias) = solution.view().split_at(Dim(0), self.cell.features() - 1);
        Some(LatentMap { cell: self.cell, weight: weight.to_owned(), bias: bias.row(0).to_owned() })
    }
}

/// Solves `a · x = b` for a symmetric positive definite `a`, by Cholesky decomposition. `None`: `a` is not positive
/// definite, or not finite.
fn solve(mut a: Array2<f64>, mut b: Array2<f64>) -> Option<Array2<f64>> {
    let n = a.nrows();
    for j in 0..n {
        let (above, mut below) = a.view_mut().split_at(Dim(0), j + 1);
        let own = above.row(j);
        let pivot = own[j] - own.slice(s![..j]).dot(&own.slice(s![..j]));
        if !(pivot > 0.0 && pivot.is_finite()) {
            return None;
        }
        let root = pivot.sqrt();
        for mut row in below.rows_mut() {
            row[j] = (row[j] - row.slice(s![..j]).dot(&own.slice(s![..j]))) / root;
        }
        a[[j, j]] = root;
    }
    for j in 0..n {
        let (known, mut rest) = b.view_mut().split_at(Dim(0), j);
        let mut row = rest.row_mut(0);
        row -= &a.slice(s![j, ..j]).dot(&known);
        row /= a[[j, j]];
    }
    for j in (0..n).rev() {
        let (mut rest, known) = b.view_mut().split_at(Dim(0), j + 1);
        let mut row = rest.row_mut(j);
        row -= &a.slice(s![j + 1.., j]).dot(&known);
        row /= a[[j, j]];
    }
    Some(b)
}

/// Returns the indices along an axis whose neighbour at `offset` exists, and the indices of these neighbours.
fn shifted(size: usize, offset: isize) -> [Slice; 2] {
    let (before, after) = ((-offset).max(0), offset.max(0));
    let end = size as isize - after;
    [Slice::from(before..end), Slice::from(before + offset..end + offset)]
}

/// Linear map from latents to small RGB frames.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LatentMap {
    pub(crate) cell: CellSize,
    /// Weight of each latent channel of a cell and of its neighbours, `[7·C or C, outputs]`. The outputs of a cell are
    /// its rows, columns and RGB values, in this order.
    pub(crate) weight: Array2<f32>,
    pub(crate) bias: Array1<f32>,
}

impl LatentMap {
    /// Returns the frames of the normalized latents `[C, F, H, W]`: one for each latent frame.
    pub(crate) fn frames(&self, latents: ArrayView4<f32>) -> Frames {
        let ((c, f, h, w), p) = (latents.dim(), self.cell.patch());
        let cells = latents.as_standard_layout().into_shape_with_order((c, f * h * w)).expect("cells of every channel");
        let mut values = Array4::zeros((f, h, w, self.cell.outputs())) + &self.bias;
        for (weight, offset) in self.weight.axis_chunks_iter(Dim(0), c).zip(NEIGHBOURS) {
            let part = cells.t().dot(&weight).into_shape_with_order(values.dim()).expect("outputs of every cell");
            let [[t, from_t], [y, from_y], [x, from_x]] =
                [(f, offset[0]), (h, offset[1]), (w, offset[2])].map(|(size, offset)| shifted(size, offset));
            values.slice_mut(s![t, y, x, ..]).scaled_add(1.0, &part.slice(s![from_t, from_y, from_x, ..]));
        }
        let bytes = values.mapv_into_any(|v: f32| ((v * 0.5 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8);
        let bytes = bytes.into_shape_with_order(vec![f, h, w, p, p, 3]).expect("outputs of every cell");
        let rows = bytes.permuted_axes(vec![0, 1, 3, 2, 4, 5]).as_standard_layout().into_owned();
        let rows = rows.into_shape_with_order((f, h * p, w * p, 3)).expect("rows of every cell");
        Frames::new(rows).expect("a video has latents")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::TorchRng;

    const CELL: CellSize = CellSize { channels: 3, pixels: 32, frames: 8 };

    fn latents(seed: u64, [f, h, w]: [usize; 3]) -> Array4<f32> {
        TorchRng::new(seed).normal_array(&[CELL.channels, f, h, w]).into_dimensionality().expect("four axes")
    }

    /// Decodes latents with a known linear map; all pixels of a preview pixel, and all frames of a latent frame, are
    /// equal.
    fn decode(map: &LatentMap, latents: &Array4<f32>) -> Frames {
        let small = map.frames(latents.view());
        let (f, ..) = small.data().dim();
        let frames = (f - 1) * CELL.frames + 1;
        let at = |n: usize, y: usize, x: usize, c: usize| {
            let t = if n == 0 { 0 } else { (n - 1) / CELL.frames + 1 };
            small.data()[[t, y / REDUCTION, x / REDUCTION, c]]
        };
        let (height, width) = (small.height() * REDUCTION, small.width() * REDUCTION);
        Frames::new(Array4::from_shape_fn((frames, height, width, 3), |(n, y, x, c)| at(n, y, x, c))).expect("frames")
    }

    fn known_map() -> LatentMap {
        let rows = CELL.features() - 1;
        let weight = TorchRng::new(1).normal_array(&[rows, CELL.outputs()]).into_dimensionality::<ndarray::Ix2>();
        let weight = weight.expect("two axes") * 0.05;
        LatentMap { cell: CELL, weight, bias: Array1::linspace(-0.2, 0.2, CELL.outputs()) }
    }

    #[test]
    fn fitted_map_reproduces_a_linear_decoder() {
        let map = known_map();
        let mut statistics = MapStatistics::new(CELL);
        assert_eq!(statistics.map(), None);
        for seed in 0..8 {
            let latents = latents(seed, [3, 4, 5]);
            statistics.add(latents.view(), &CELL.shown_frames(&decode(&map, &latents), 3), [usize::MAX; 3]);
        }
        assert_eq!(statistics.cells, 8 * 60);
        let fitted = statistics.map().expect("a map");
        let other = latents(99, [2, 6, 4]);
        let (got, want) = (fitted.frames(other.view()), map.frames(other.view()));
        assert_eq!((got.count(), got.height(), got.width()), (2, 24, 16));
        let off = got.data().iter().zip(want.data()).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(off <= Some(3), "{off:?}");
    }

    /// `LatentMap::frames` adds one product per neighbour.
    #[test]
    fn frames_equal_product_of_features_and_weights() {
        let (map, latents) = (known_map(), latents(3, [3, 2, 4]));
        let values = features(latents.view()).slice(s![.., ..-1]).dot(&map.weight) + &map.bias;
        let frames = map.frames(latents.view());
        for (cell, values) in values.rows().into_iter().enumerate() {
            let (t, y, x) = (cell / 8, cell / 4 % 2, cell % 4);
            for (at, value) in values.iter().enumerate() {
                let got = frames.data()[[t, 4 * y + at / 12, 4 * x + at / 3 % 4, at % 3]];
                let want = (value * 0.5 + 0.5).clamp(0.0, 1.0) * 255.0;
                assert!((f32::from(got) - want).abs() < 0.51, "cell {cell}, output {at}: {got}, want {want}");
            }
        }
    }

    #[test]
    fn sums_of_parts_equal_sums_of_all() {
        let map = known_map();
        let sums = |seeds: &[u64]| {
            let mut all = MapStatistics::new(CELL);
            for seed in seeds {
                let latents = latents(*seed, [2, 3, 3]);
                all.add(latents.view(), &CELL.shown_frames(&decode(&map, &latents), 2), [usize::MAX; 3]);
            }
            all
        };
        let mut parts = sums(&[1]);
        parts.add_weighted(&sums(&[2]), 1.0);
        let all = sums(&[1, 2]);
        assert_eq!(parts.cells, all.cells);
        assert!((parts.gram - all.gram).iter().chain((parts.cross - all.cross).iter()).all(|v| v.abs() < 1e-9));
    }

    #[test]
    fn solve_rejects_singular_and_nan_matrices() {
        let ones = Array2::from_elem((2, 2), 1.0);
        assert_eq!(solve(ones.clone(), ones.clone()), None);
        assert_eq!(solve(Array2::from_elem((2, 2), f64::NAN), ones.clone()), None);
        let a = ndarray::arr2(&[[4.0, 2.0], [2.0, 3.0]]);
        let x = ndarray::arr2(&[[1.0, -2.0], [0.5, 3.0]]);
        let got = solve(a.clone(), a.dot(&x)).expect("a solution");
        assert!((got - x).iter().all(|v| v.abs() < 1e-12));
    }

    #[test]
    fn preview_frame_shows_middle_of_latent_frame() {
        let at: Vec<usize> = (0..4).map(|t| CELL.decoded_frame(t)).collect();
        assert_eq!(at, [0, 4, 12, 20]);
    }

    #[test]
    fn cells_of_padding_are_not_added() {
        let random = |at: usize| ((at * 7919 % 1013) as f32 / 506.0).sin();
        let latents =
            Array4::from_shape_fn((CELL.channels, 3, 4, 5), |(c, f, h, w)| random(c * 60 + f * 20 + h * 5 + w));
        let data = Array4::from_shape_fn((3, 128, 160, 3), |(f, y, x, c)| (f * 31 + y * 7 + x * 3 + c) as u8);
        let frames = Frames::new(data).expect("frames");
        let mut part = MapStatistics::new(CELL);
        part.add(latents.view(), &frames, [2, 3, 1]);
        let rows: Vec<usize> = (0..2).flat_map(|f| (0..3).map(move |h| f * 20 + h * 5)).collect();
        let own = features(latents.view()).select(Dim(0), &rows);
        assert_eq!(part.cells, 6);
        let gram = own.t().dot(&own);
        assert!((&part.gram - &gram.mapv(f64::from)).iter().all(|v| v.abs() < 1e-4));
    }

    /// Time for 121 frames of 768 x 512 pixels of a model with 128 channels, on the preview thread.
    #[test]
    fn preview_of_default_size_is_computed_in_seconds_without_optimization() {
        let cell = CellSize { channels: 128, ..CELL };
        let latents =
            Array4::from_shape_fn((128, 16, 16, 24), |(c, f, h, w)| ((c * 7 + f * 5 + h * 3 + w) as f32).sin());
        let weight = Array2::from_elem((cell.features() - 1, cell.outputs()), 1e-3);
        let map = LatentMap { cell, weight, bias: Array1::zeros(cell.outputs()) };
        let since = std::time::Instant::now();
        let frames = map.frames(latents.view());
        let took = since.elapsed();
        eprintln!("a preview of 121 frames of 768 x 512 pixels took {took:.1?}");
        assert_eq!((frames.count(), frames.height(), frames.width()), (16, 64, 96));
        assert!(took.as_secs() < 20, "{took:?}");
    }
}
