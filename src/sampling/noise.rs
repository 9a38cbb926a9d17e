//! Gaussian noise, bitwise equal to `torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))`.
//!
//! The same seed must give the same video as in PyTorch, so the default noise reproduces torch's CPU generator:
//!
//! - The generator is MT19937, seeded with the **low 32 bits** of the seed; torch ignores the other bits, too.
//! - Fewer than 16 elements (short path): Box-Muller in double precision, one pair at a time. Each uniform uses two
//!   32-bit draws (53 bits). The generator caches the second value of a pair across calls for the next draw on the
//!   short path.
//! - 16 or more elements (long path): all uniforms are drawn first (24 bits each), then each group of 16 becomes 8
//!   radii and 8 angles. If the count is not a multiple of 16, the *last* 16 elements are drawn again and overwrite the
//!   tail. The long path neither uses nor drops the cached value of the short path.
//!
//! On the long path, torch has two implementations that differ in bits. The AVX2 kernels (used on x86-64 hosts with
//! AVX2 or AVX-512, with the same bits for both) use Cephes-style single precision polynomials for the logarithm, sine
//! and cosine, which the compiler contracts into fused multiply-adds. This module implements these in scalar code:
//! fused operations use [`f32::mul_add`], unfused ones round twice, and the result does not depend on the machine.
//! Torch's generic kernels (`ATEN_CPU_CAPABILITY=default`, other processors) call the C library instead; their values
//! differ by a few units in the last place (at most 1.8e-6 over 65536 values). Checked against torch 2.15.0 by
//! `tests/fixtures/noise` (written by `scripts/oracle/noise.py`).

use half::bf16;
use ndarray::{Array3, ArrayD, IxDyn};

use crate::av::Av;
use crate::threads::for_each_complete_row;

const STATE: usize = 624;
const LAG: usize = 397;
/// Number of values that the long path transforms together; fewer values than this use the short path (see the module
/// documentation).
const GROUP: usize = 16;

/// 32-bit Mersenne Twister, seeded as in torch.
#[derive(Clone)]
struct Mt19937 {
    state: [u32; STATE],
    next: usize,
}

impl Mt19937 {
    fn new(seed: u32) -> Self {
        let mut state = [0u32; STATE];
        let mut last = seed;
        state[0] = last;
        for (i, word) in state.iter_mut().enumerate().skip(1) {
            last = (last ^ (last >> 30)).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
            *word = last;
        }
        Self { state, next: STATE }
    }

    fn refill(&mut self) {
        let twisted = |first: u32, second: u32, far: u32| {
            let joined = (first & 0x8000_0000) | (second & 0x7fff_ffff);
            far ^ (joined >> 1) ^ ((joined & 1).wrapping_neg() & 0x9908_b0df)
        };
        // Separate loops without a modulus, so that the compiler vectorizes them.
        let state = &mut self.state;
        for i in 0..STATE - LAG {
            state[i] = twisted(state[i], state[i + 1], state[i + LAG]);
        }
        for i in STATE - LAG..STATE - 1 {
            state[i] = twisted(state[i], state[i + 1], state[i + LAG - STATE]);
        }
        state[STATE - 1] = twisted(state[STATE - 1], state[0], state[LAG - 1]);
        self.next = 0;
    }

    fn draw(&mut self) -> u32 {
        if self.next == STATE {
            self.refill();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// Returns a single precision uniform in [0, 1) from the low 24 bits of one draw.
    fn uniform_f32(&mut self) -> f32 {
        (self.draw() & 0x00ff_ffff) as f32 * (1.0 / 16_777_216.0)
    }

    /// Returns a double precision uniform in [0, 1) from the low 53 bits of two draws; the first draw is the high word.
    fn uniform_f64(&mut self) -> f64 {
        let (high, low) = (u64::from(self.draw()), u64::from(self.draw()));
        (((high << 32) | low) & ((1 << 53) - 1)) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }
}

/// torch's CPU generator. Successive draws continue the same random stream; to match the reference, draw video noise
/// before audio noise.
#[derive(Clone)]
pub struct TorchRng {
    engine: Mt19937,
    /// Cached second value of the last Box-Muller pair of the short path.
    cached_normal: Option<f64>,
}

impl TorchRng {
    /// Creates a generator in the state that torch's `manual_seed(seed)` sets. Pass a negative torch seed as its two's
    /// complement. Only the low 32 bits matter, as in torch.
    pub fn new(seed: u64) -> Self {
        Self { engine: Mt19937::new(seed as u32), cached_normal: None }
    }

    /// Returns `count` uniform values in [0, 1): `torch.rand(count)`.
    pub(crate) fn uniform(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.engine.uniform_f32()).collect()
    }

    /// Returns `count` standard normal values: `torch.randn(count)`, or any shape of that size in row-major order.
    pub fn normal(&mut self, count: usize) -> Vec<f32> {
        if count < GROUP {
            return (0..count).map(|_| self.single() as f32).collect();
        }
        let mut values: Vec<f32> = (0..count).map(|_| self.engine.uniform_f32()).collect();
        for_each_complete_row(&mut values, GROUP, |_, group| box_muller_group(group));
        if !count.is_multiple_of(GROUP) {
            let tail = &mut values[count - GROUP..];
            tail.fill_with(|| self.engine.uniform_f32());
            box_muller_group(tail);
        }
        values
    }

    /// Returns `count` standard normal values rounded to bfloat16: `torch.randn(count, dtype=torch.bfloat16)` of torch
    /// 2.12 and later (earlier versions return other values). They equal the rounded f32 values unless `count` is above
    /// 16 and not a multiple of 16: the last 16 values then differ, because only complete groups of 16 are drawn before
    /// them.
    pub fn normal_bf16(&mut self, count: usize) -> Vec<f32> {
        let whole = if count < GROUP { count } else { count - count % GROUP };
        let mut values = self.normal(whole);
        if whole < count {
            values.truncate(count - GROUP);
            values.extend(self.normal(GROUP));
        }
        for_each_complete_row(&mut values, GROUP, |_, group| group.iter_mut().for_each(round_bf16));
        let rest = values.len() / GROUP * GROUP;
        values[rest..].iter_mut().for_each(round_bf16);
        values
    }

    /// Returns `count` standard normal values in double precision: `torch.randn(count, dtype=torch.float64)`. Not
    /// bitwise equal, because torch calls the logarithm, sine and cosine of the C library.
    pub fn normal_f64(&mut self, count: usize) -> Vec<f64> {
        if count < GROUP {
            return (0..count).map(|_| self.single()).collect();
        }
        let mut values: Vec<f64> = (0..count).map(|_| self.engine.uniform_f64()).collect();
        for_each_complete_row(&mut values, GROUP, |_, group| box_muller_group_f64(group));
        if !count.is_multiple_of(GROUP) {
            let tail = &mut values[count - GROUP..];
            tail.fill_with(|| self.engine.uniform_f64());
            box_muller_group_f64(tail);
        }
        values
    }

    /// Returns standard normal values of `shape`, row-major: `torch.randn(shape)`.
    pub fn normal_array(&mut self, shape: &[usize]) -> ArrayD<f32> {
        in_shape(self.normal(shape.iter().product()), shape)
    }

    /// Like [`Self::normal_array`], rounded to bfloat16: `torch.randn(shape, dtype=torch.bfloat16)`.
    pub(crate) fn normal_bf16_array(&mut self, shape: &[usize]) -> ArrayD<f32> {
        in_shape(self.normal_bf16(shape.iter().product()), shape)
    }

    /// Draws one value with the short path (see the module documentation).
    fn single(&mut self) -> f64 {
        if let Some(value) = self.cached_normal.take() {
            return value;
        }
        let turn = self.engine.uniform_f64();
        let size = self.engine.uniform_f64();
        let radius = (-2.0 * (-size).ln_1p()).sqrt();
        let angle = 2.0 * std::f64::consts::PI * turn;
        self.cached_normal = Some(radius * angle.sin());
        // Adding 0 turns -0 into +0, like torch's `value * std + mean`.
        radius * angle.cos() + 0.0
    }
}

/// Draws the noise of one video for one call of the denoising loop: `[noises, n, c]` per stream, video before audio.
pub(crate) fn step_noise(rng: &mut TorchRng, noises: usize, tokens: Av<[usize; 2]>) -> Av<Array3<f32>> {
    tokens.map(|[n, c]| {
        Array3::from_shape_vec((noises, n, c), rng.normal(noises * n * c)).expect("a value of each element")
    })
}

/// Converts 16 uniforms into normal values in place: element `j` (radius) is paired with element `j + 8` (angle).
fn box_muller_group(group: &mut [f32]) {
    let (first, second) = group.split_at_mut(GROUP / 2);
    for (a, b) in first.iter_mut().zip(second) {
        let radius = (-2.0 * log(1.0 - *a)).sqrt();
        let (sin, cos) = sin_cos(std::f32::consts::TAU * *b);
        // Adding 0 is torch's multiply-add with std 1 and mean 0; it turns -0 into +0.
        *a = radius * cos + 0.0;
        *b = radius * sin + 0.0;
    }
}

/// Double precision version of [`box_muller_group`].
fn box_muller_group_f64(group: &mut [f64]) {
    let (first, second) = group.split_at_mut(GROUP / 2);
    for (a, b) in first.iter_mut().zip(second) {
        let radius = (-2.0 * (1.0 - *a).ln()).sqrt();
        let (sin, cos) = (2.0 * std::f64::consts::PI * *b).sin_cos();
        *a = radius * cos;
        *b = radius * sin;
    }
}

/// Evaluates a polynomial by Horner's rule with fused multiply-adds. The first coefficient is that of the highest
/// power.
fn horner(x: f32, coefficients: &[f32]) -> f32 {
    coefficients.iter().copied().reduce(|sum, c| sum.mul_add(x, c)).unwrap_or_default()
}

/// Cephes' coefficients of log(1 + x) / x^3, and ln 2 as the sum of two numbers.
const LOG: [f32; 9] = [
    7.037_683_6e-2,
    -1.151_461e-1,
    1.167_699_84e-1,
    -1.242_014_1e-1,
    1.424_932_3e-1,
    -1.666_805_7e-1,
    2.000_071_4e-1,
    -2.499_999_4e-1,
    3.333_333e-1,
];
const LN2_LOW: f32 = -2.121_944_4e-4;
const LN2_HIGH: f32 = 0.693_359_4;

/// Returns the natural logarithm of a normal positive number, with the same rounding as torch's vector code.
fn log(x: f32) -> f32 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 23) as i32 - 126) as f32;
    let mut m = f32::from_bits((bits & 0x007f_ffff) | 0x3f00_0000);
    // Normalize the mantissa to [sqrt(1/2), sqrt(2)), minus 1.
    if m < std::f32::consts::FRAC_1_SQRT_2 {
        exponent -= 1.0;
        m = (m - 1.0) + m;
    } else {
        m -= 1.0;
    }
    let square = m * m;
    let mut y = horner(m, &LOG) * m;
    y = y.mul_add(square, exponent * LN2_LOW);
    y = square.mul_add(-0.5, y);
    exponent.mul_add(LN2_HIGH, m + y)
}

/// -pi/4 as the sum of three numbers, for an exact range reduction.
const QUARTER_PI: [f32; 3] = [-0.785_156_25, -2.418_756_5e-4, -3.774_895e-8];
const SIN: [f32; 3] = [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1];
const COS: [f32; 3] = [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2];

/// Returns sine and cosine of an angle in [0, 2 pi], with the same rounding as torch's vector code.
fn sin_cos(angle: f32) -> (f32, f32) {
    // The octant, rounded up to even, leaves a remainder within pi/4 of 0.
    let octant = ((angle * (4.0 / std::f64::consts::PI) as f32) as i32 + 1) & !1;
    let x = QUARTER_PI.iter().fold(angle, |x, part| (octant as f32).mul_add(*part, x));
    let square = x * x;
    let even = (horner(square, &COS) * square).mul_add(square, -(square * 0.5)) + 1.0;
    let odd = (horner(square, &SIN) * square).mul_add(x, x);
    let (sin, cos) = if octant & 2 == 0 { (odd, even) } else { (even, odd) };
    let flip = |value: f32, negative: bool| if negative { -value } else { value };
    (flip(sin, octant & 4 != 0), flip(cos, (octant + 2) & 4 != 0))
}

fn round_bf16(value: &mut f32) {
    *value = bf16::from_f32(*value).to_f32();
}

fn in_shape(values: Vec<f32>, shape: &[usize]) -> ArrayD<f32> {
    ArrayD::from_shape_vec(IxDyn(shape), values).expect("a value of each element")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    #[derive(serde::Deserialize)]
    struct NoiseFixture {
        cases: Vec<NoiseCase>,
    }

    /// A generator seed and the tensors drawn from it in order.
    #[derive(serde::Deserialize)]
    struct NoiseCase {
        seed: u64,
        draws: Vec<DrawnTensor>,
    }

    #[derive(serde::Deserialize)]
    struct DrawnTensor {
        shape: Vec<usize>,
        sha256: String,
        first: Vec<u32>,
        last: Vec<u32>,
    }

    #[test]
    fn normal_matches_torch_bitwise() {
        let fixture: NoiseFixture =
            serde_json::from_str(include_str!("../../tests/fixtures/noise/randn.json")).expect("the fixture parses");
        for case in &fixture.cases {
            let mut rng = TorchRng::new(case.seed);
            for (i, draw) in case.draws.iter().enumerate() {
                let noise = rng.normal_array(&draw.shape);
                assert_eq!(noise.shape(), draw.shape);
                let bits: Vec<u32> = noise.iter().map(|v| v.to_bits()).collect();
                let name = format!("seed {} draw {i} shape {:?}", case.seed, draw.shape);
                assert_eq!(bits[..draw.first.len()], draw.first, "first values of {name}");
                assert_eq!(bits[bits.len() - draw.last.len()..], draw.last, "last values of {name}");
                let hash = hex::encode(Sha256::digest(bytemuck::cast_slice::<u32, u8>(&bits)));
                assert_eq!(hash, draw.sha256, "all bits of {name}");
            }
        }
    }

    #[test]
    fn normal_bf16_matches_torch_bitwise() {
        let fixture: NoiseFixture = serde_json::from_str(include_str!("../../tests/fixtures/noise/randn_bf16.json"))
            .expect("the fixture parses");
        for case in &fixture.cases {
            let mut rng = TorchRng::new(case.seed);
            for draw in &case.draws {
                let bits: Vec<u32> = rng.normal_bf16(draw.shape.iter().product()).iter().map(|v| v.to_bits()).collect();
                assert_eq!(bits[..draw.first.len()], draw.first, "first values of {:?}", draw.shape);
                assert_eq!(bits[bits.len() - draw.last.len()..], draw.last, "last values of {:?}", draw.shape);
                let hash = hex::encode(Sha256::digest(bytemuck::cast_slice::<u32, u8>(&bits)));
                assert_eq!(hash, draw.sha256, "all bits of {:?}", draw.shape);
            }
        }
    }

    #[test]
    fn only_low_32_bits_of_seed_matter() {
        assert_eq!(TorchRng::new(7).normal(20), TorchRng::new((1 << 32) + 7).normal(20));
        assert!(TorchRng::new(0).normal(0).is_empty());
    }
}
