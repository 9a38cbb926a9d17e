//! Constants from measurements: lines through times, by least squares of the relative errors.

use super::{Calibration, Exchange, Line, Measurements, Sample, What};
use crate::collective::Kind;

/// Why there are no constants.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum FitError {
    /// Nothing of a kind that all predictions need.
    #[error("no constants follow from these measurements: {0}; measure again with `ltx2 bench --micro`")]
    Missing(&'static str),
    /// Files of several chips.
    #[error("the measurements are of '{0}' and of '{1}': fit one chip at a time")]
    Mixed(String, String),
}

/// The constants of one chip from the measurements of one or more hosts.
///
/// # Errors
/// Measurements of several chips; none of kernels, memory or products.
pub fn fit(all: &[Measurements], chip: &str, command: &str) -> Result<Calibration, FitError> {
    let mut devices = all.iter().map(|m| m.source.device.as_str());
    let first = devices.next().unwrap_or_default();
    if let Some(other) = devices.find(|d| *d != first) {
        return Err(FitError::Mixed(first.into(), other.into()));
    }
    let samples: Vec<&Sample> = all.iter().flat_map(|m| &m.samples).collect();
    let of = |what: What| samples.iter().copied().filter(move |s| s.what == what);
    let kernel_seconds = mean(of(What::Kernel).map(|s| s.seconds)).ok_or(FitError::Missing("no kernel was timed"))?;
    let memory: Vec<(f64, f64)> = larger_half(of(What::Memory).map(|s| (s.bytes, s.seconds)).collect());
    let bandwidth = line(&memory).ok_or(FitError::Missing("no copy was timed"))?.rate;
    let products: Vec<&Sample> = of(What::Product).collect();
    let best = products.iter().map(|s| s.flops / s.seconds).fold(0.0, f64::max);
    // Of a few rows a product waits for its weights: memory's time, which the roofline has beside this.
    let computes = |s: &&&Sample| s.flops / best > s.bytes / bandwidth;
    let points: Vec<(f64, f64)> = products.iter().filter(computes).map(|s| (s.flops, s.seconds)).collect();
    let product = line(&points).ok_or(FitError::Missing("no product was timed"))?;
    let attention = line(&of(What::Attention).map(|s| (s.flops, s.seconds)).collect::<Vec<_>>());
    let mut exchanges = Vec::new();
    let mut known: Vec<(Kind, usize)> = of(What::Exchange).filter_map(|s| Some((s.kind?, s.devices))).collect();
    known.sort_unstable();
    known.dedup();
    for (kind, devices) in known {
        // What stands between two exchanges to make the second wait for the first is no part of them.
        let alone = |s: &Sample| s.seconds - s.kernels * kernel_seconds - s.bytes / bandwidth;
        let own = of(What::Exchange).filter(|s| s.kind == Some(kind) && s.devices == devices);
        let points: Vec<(f64, f64)> = own.map(|s| (s.wire_bytes, alone(s))).filter(|(_, t)| *t > 0.0).collect();
        exchanges.extend(line(&points).map(|line| Exchange { kind, devices, line }));
    }
    let source = all.iter().map(|m| m.source.clone()).collect();
    let (chip, fit) = (chip.into(), command.into());
    Ok(Calibration { chip, fit, source, kernel_seconds, bandwidth, product, attention, exchanges })
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Points of more than the middle amount: smaller arrays lie in a cache, which is faster than memory.
fn larger_half(mut points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points.split_off(points.len() / 2)
}

/// The line through `(amount, seconds)` with the least squares of relative errors; its fixed part is not below 0.
fn line(points: &[(f64, f64)]) -> Option<Line> {
    let usable: Vec<(f64, f64)> = points.iter().copied().filter(|(x, t)| *x > 0.0 && *t > 0.0).collect();
    if usable.is_empty() {
        return None;
    }
    // Both sides divided by the time: 1 = a / t + b x / t.
    let sum = |f: &dyn Fn(f64, f64) -> f64| usable.iter().map(|(x, t)| f(1.0 / t, x / t)).sum::<f64>();
    let (uu, uv, vv) = (sum(&|u, _| u * u), sum(&|u, v| u * v), sum(&|_, v| v * v));
    let (u, v) = (sum(&|u, _| u), sum(&|_, v| v));
    let determinant = uu * vv - uv * uv;
    let (a, b) = match determinant > 1e-9 * uu * vv {
        true => ((u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant),
        false => (0.0, v / vv),
    };
    let (a, b) = if a < 0.0 || b <= 0.0 { (0.0, v / vv) } else { (a, b) };
    Some(Line { seconds: a, rate: 1.0 / b })
}

#[cfg(test)]
mod tests {
    use super::super::Origin;
    use super::*;

    fn sample(what: What, seconds: f64) -> Sample {
        Sample {
            what,
            kind: None,
            name: String::new(),
            devices: 1,
            flops: 0.0,
            bytes: 0.0,
            wire_bytes: 0.0,
            kernels: 1.0,
            seconds,
        }
    }

    fn measurements(device: &str, samples: Vec<Sample>) -> Measurements {
        let source = Origin { device: device.into(), ..Origin::default() };
        Measurements { source, platform: "cuda".into(), turn_seconds: 1e-5, samples }
    }

    /// A chip of known constants, measured.
    fn known() -> Vec<Sample> {
        let mut all = vec![sample(What::Kernel, 2e-6), sample(What::Kernel, 4e-6)];
        for bytes in [1e6, 4e6, 64e6, 256e6, 1e9] {
            // Small arrays come from a cache.
            let rate = if bytes < 32e6 { 12e12 } else { 4e12 };
            all.push(Sample { bytes, ..sample(What::Memory, 3e-6 + bytes / rate) });
        }
        for flops in [2e10, 1e11, 4e11, 1e12] {
            all.push(Sample { flops, bytes: 1e6, ..sample(What::Product, 5e-6 + flops / 700e12) });
            all.push(Sample { flops, ..sample(What::Attention, 8e-6 + flops / 500e12) });
        }
        // Bound by its weights: no line through the others has it.
        all.push(Sample { flops: 4e9, bytes: 4e8, ..sample(What::Product, 1e-4) });
        for (kind, devices, seconds, rate) in
            [(Kind::AllGather, 2, 1e-5, 350e9), (Kind::AllGather, 4, 2e-5, 300e9), (Kind::AllToAll, 2, 1.5e-5, 250e9)]
        {
            for wire_bytes in [1e5, 1e6, 1e7, 1e8] {
                // A kernel of 40 kB beside it.
                let seconds = seconds + wire_bytes / rate + 3e-6 + 4e4 / 4e12;
                let kind = Some(kind);
                all.push(Sample { kind, devices, wire_bytes, bytes: 4e4, ..sample(What::Exchange, seconds) });
            }
        }
        all
    }

    #[test]
    fn constants_are_recovered() {
        let (one, two) = (known(), known());
        let c = fit(&[measurements("a", one), measurements("a", two)], "h200", "it").unwrap();
        let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-6, "{got}, not {want}");
        near(c.kernel_seconds, 3e-6);
        near(c.bandwidth, 4e12);
        near(c.product.seconds, 5e-6);
        near(c.product.rate, 700e12);
        let attention = c.attention.unwrap();
        near(attention.seconds, 8e-6);
        near(attention.rate, 500e12);
        assert_eq!(c.exchanges.len(), 3);
        let [two, four] = [2, 4].map(|n| c.exchange(Kind::AllGather, n).unwrap());
        near(two.seconds, 1e-5);
        near(two.rate, 350e9);
        near(four.seconds, 2e-5);
        near(four.rate, 300e9);
        near(c.exchange(Kind::AllToAll, 2).unwrap().rate, 250e9);
        assert_eq!((c.source.len(), c.chip.as_str(), c.fit.as_str()), (2, "h200", "it"));
    }

    #[test]
    fn what_cannot_be_fitted_is_said() {
        let of = |samples: Vec<Sample>| fit(&[measurements("a", samples)], "h200", "").unwrap_err();
        assert_eq!(of(vec![]), FitError::Missing("no kernel was timed"));
        assert_eq!(of(vec![sample(What::Kernel, 1e-6)]), FitError::Missing("no copy was timed"));
        let mixed = fit(&[measurements("a", known()), measurements("b", known())], "h200", "").unwrap_err();
        assert_eq!(mixed, FitError::Mixed("a".into(), "b".into()));
    }

    #[test]
    fn noise_does_not_make_a_negative_start() {
        let through_zero = line(&[(1.0, 0.9), (2.0, 2.0), (4.0, 4.4)]).unwrap();
        assert_eq!(through_zero.seconds, 0.0);
        assert!((through_zero.rate - 1.0).abs() < 0.1);
        assert_eq!(line(&[(3.0, 6.0)]), Some(Line { seconds: 0.0, rate: 0.5 }));
        assert_eq!(line(&[]), None);
    }
}
