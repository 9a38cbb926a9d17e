//! Fits the constants of a calibration to measurements, by least squares of the relative errors.

use super::{AlphaBeta, Calibration, CollectiveCost, Contention, Measurements, Microbenchmark, Sample, Shares};
use crate::collective::CollectiveKind;

/// Error of fitting constants to measurements.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum FitError {
    /// There are no measurements of kernels, copies or matmuls, which every prediction needs.
    #[error("cannot fit constants: {0}; measure again with `ltx2 bench --micro`")]
    Missing(&'static str),
    /// The measurements were taken on different kinds of devices.
    #[error("the measurements are from different devices, '{0}' and '{1}'; fit one chip at a time")]
    Mixed(String, String),
}

/// Fits the constants of one chip to the measurements of one or more hosts. `command` is the command line to record in
/// the result.
///
/// # Errors
/// Returns an error if the measurements are from several kinds of devices, or if measurements of kernels, copies or
/// matmuls are missing.
pub fn fit(all: &[Measurements], command: &str) -> Result<Calibration, FitError> {
    let mut devices = all.iter().map(|m| m.source.device.as_str());
    let first = devices.next().unwrap_or_default();
    if let Some(other) = devices.find(|d| *d != first) {
        return Err(FitError::Mixed(first.into(), other.into()));
    }
    let samples: Vec<&Sample> = all.iter().flat_map(|m| &m.samples).collect();
    let of = |benchmark: Microbenchmark| samples.iter().copied().filter(move |s| s.benchmark == benchmark);
    let kernel_seconds =
        mean(of(Microbenchmark::Kernel).map(|s| s.seconds)).ok_or(FitError::Missing("no kernel was timed"))?;
    let memory: Vec<(f64, f64)> = larger_half(of(Microbenchmark::Memory).map(|s| (s.bytes, s.seconds)).collect());
    let bandwidth = line(&memory).ok_or(FitError::Missing("no copy was timed"))?.rate;
    let matmuls: Vec<&Sample> = of(Microbenchmark::Matmul).collect();
    let best = matmuls.iter().map(|s| s.flops / s.seconds).fold(0.0, f64::max);
    // A matmul with few rows is limited by reading its weights, which the roofline's memory term predicts. Such samples
    // are not used for the matmul rate.
    let computes = |s: &&&Sample| s.flops / best > s.bytes / bandwidth;
    let points: Vec<(f64, f64)> = matmuls.iter().filter(computes).map(|s| (s.flops, s.seconds)).collect();
    // Take the latency from the kernel measurements. Fitting it here would attribute the slowdown of large matmuls at
    // the GPU's power limit to latency.
    let matmul = rate(&points, kernel_seconds).ok_or(FitError::Missing("no matmul was timed"))?;
    let attention = line(&of(Microbenchmark::Attention).map(|s| (s.flops + s.idle, s.seconds)).collect::<Vec<_>>());
    // Subtracts the time of the kernels that use the result of a copy or a collective.
    let without_kernels = |s: &Sample| s.seconds - s.kernels * kernel_seconds - s.bytes / bandwidth;
    let host = line(&of(Microbenchmark::HostCopy).map(|s| (s.host_bytes, without_kernels(s))).collect::<Vec<_>>());
    let mut collectives = Vec::new();
    let mut known: Vec<(CollectiveKind, usize)> =
        of(Microbenchmark::Collective).filter_map(|s| Some((s.collective?, s.devices))).collect();
    known.sort_unstable();
    known.dedup();
    for (kind, devices) in known {
        // The kernels between two collectives make the collectives run one after the other.
        let own = of(Microbenchmark::Collective).filter(|s| s.collective == Some(kind) && s.devices == devices);
        let points: Vec<(f64, f64)> =
            own.map(|s| (s.wire_bytes, without_kernels(s))).filter(|(_, t)| *t > 0.0).collect();
        collectives.extend(line(&points).map(|cost| CollectiveCost { kind, devices, cost }));
    }
    let alone = |s: &Sample| {
        let cost =
            collectives.iter().find(|c: &&CollectiveCost| Some(c.kind) == s.collective && c.devices == s.devices);
        let work = match s.benchmark {
            Microbenchmark::OverlappedMatmul => s.kernels * matmul.latency + s.flops / matmul.rate,
            _ => s.kernels * kernel_seconds + s.bytes / bandwidth,
        };
        Some((work, cost?.cost.seconds(s.wire_bytes)))
    };
    let shares = |benchmark| shares(of(benchmark).filter_map(|s| Some((s.seconds, alone(s)?))));
    let contention = shares(Microbenchmark::OverlappedMatmul).zip(shares(Microbenchmark::OverlappedMemory));
    let contention = contention.map(|(compute, memory)| Contention { compute, memory });
    let source = all.iter().map(|m| m.source.clone()).collect();
    let fit = command.into();
    Ok(Calibration { fit, source, kernel_seconds, bandwidth, matmul, attention, host, collectives, contention })
}

/// Fits the contention between a collective and other work. A sample has the seconds that both take together, then the
/// seconds that the work and the collective take alone. The fit assumes that the longer one slows down only while the
/// shorter one runs.
fn shares(samples: impl Iterator<Item = (f64, (f64, f64))>) -> Option<Shares> {
    let (mut of_work, mut of_collective) = (Vec::new(), Vec::new());
    for (seconds, (work, collective)) in samples {
        match work > collective {
            true => of_work.push((seconds - work) / collective),
            false => of_collective.push((seconds - collective) / work),
        }
    }
    let part = |added: Vec<f64>| mean(added.into_iter().map(|a| a.clamp(0.0, 0.9)));
    let (a, b) = (part(of_work)?, part(of_collective)?);
    // Solves a = work / (1 - collective) and b = collective / (1 - work).
    Some(Shares { work: a * (1.0 - b) / (1.0 - a * b), collective: b * (1.0 - a) / (1.0 - a * b) })
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Returns the half of the points with the larger amounts. Smaller arrays fit into a cache, which is faster than
/// memory.
fn larger_half(mut points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points.split_off(points.len() / 2)
}

/// Fits the rate to points `(amount, seconds)` for a known latency, by least squares of the relative errors.
fn rate(points: &[(f64, f64)], latency: f64) -> Option<AlphaBeta> {
    let usable = points.iter().filter(|(x, t)| *x > 0.0 && *t > latency);
    // With b = 1 / rate, x the amount and t the time: 1 - latency / t = b x / t.
    let (top, bottom) = usable
        .fold((0.0, 0.0), |(top, bottom), (x, t)| (top + (1.0 - latency / t) * x / t, bottom + (x / t) * (x / t)));
    (top > 0.0).then(|| AlphaBeta { latency, rate: bottom / top })
}

/// Fits the latency (at least 0) and the rate to points `(amount, seconds)`, by least squares of the relative errors.
fn line(points: &[(f64, f64)]) -> Option<AlphaBeta> {
    let usable: Vec<(f64, f64)> = points.iter().copied().filter(|(x, t)| *x > 0.0 && *t > 0.0).collect();
    if usable.is_empty() {
        return None;
    }
    // The model t = a + b x, divided by the time t: 1 = a / t + b x / t.
    let sum = |f: &dyn Fn(f64, f64) -> f64| usable.iter().map(|(x, t)| f(1.0 / t, x / t)).sum::<f64>();
    let (uu, uv, vv) = (sum(&|u, _| u * u), sum(&|u, v| u * v), sum(&|_, v| v * v));
    let (u, v) = (sum(&|u, _| u), sum(&|_, v| v));
    let determinant = uu * vv - uv * uv;
    let (a, b) = match determinant > 1e-9 * uu * vv {
        true => ((u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant),
        false => (0.0, v / vv),
    };
    let (a, b) = if a < 0.0 || b <= 0.0 { (0.0, v / vv) } else { (a, b) };
    Some(AlphaBeta { latency: a, rate: 1.0 / b })
}

#[cfg(test)]
mod tests {
    use super::super::Provenance;
    use super::*;

    fn sample(benchmark: Microbenchmark, seconds: f64) -> Sample {
        Sample {
            benchmark,
            collective: None,
            name: String::new(),
            devices: 1,
            flops: 0.0,
            idle: 0.0,
            bytes: 0.0,
            wire_bytes: 0.0,
            host_bytes: 0.0,
            kernels: 1.0,
            seconds,
        }
    }

    fn measurements(device: &str, samples: Vec<Sample>) -> Measurements {
        let source = Provenance { device: device.into(), ..Provenance::default() };
        Measurements { source, platform: "cuda".into(), iteration_seconds: 1e-5, samples }
    }

    /// Returns samples of a chip whose constants are known.
    fn known() -> Vec<Sample> {
        let mut all = vec![sample(Microbenchmark::Kernel, 2e-6), sample(Microbenchmark::Kernel, 4e-6)];
        for bytes in [1e6, 4e6, 64e6, 256e6, 1e9] {
            // Small arrays are read from a cache, which is faster.
            let rate = if bytes < 32e6 { 12e12 } else { 4e12 };
            all.push(Sample { bytes, ..sample(Microbenchmark::Memory, 3e-6 + bytes / rate) });
        }
        for flops in [2e10, 1e11, 4e11, 1e12] {
            all.push(Sample { flops, bytes: 1e6, ..sample(Microbenchmark::Matmul, 3e-6 + flops / 700e12) });
            all.push(Sample { flops, ..sample(Microbenchmark::Attention, 8e-6 + flops / 500e12) });
        }
        for host_bytes in [1e6, 16e6, 256e6] {
            // The last two terms are a kernel that uses the copied array.
            let seconds = 1e-5 + host_bytes / 50e9 + 3e-6 + 3.0 * host_bytes / 4e12;
            let bytes = 3.0 * host_bytes;
            all.push(Sample { host_bytes, bytes, ..sample(Microbenchmark::HostCopy, seconds) });
        }
        // This matmul is limited by reading its weights, so the fit excludes it.
        all.push(Sample { flops: 4e9, bytes: 4e8, ..sample(Microbenchmark::Matmul, 1e-4) });
        for (kind, devices, latency, rate) in [
            (CollectiveKind::AllGather, 2, 1e-5, 350e9),
            (CollectiveKind::AllGather, 4, 2e-5, 300e9),
            (CollectiveKind::AllToAll, 2, 1.5e-5, 250e9),
        ] {
            for wire_bytes in [1e5, 1e6, 1e7, 1e8] {
                // The last two terms are a kernel between the collectives that copies 40 kB.
                let seconds = latency + wire_bytes / rate + 3e-6 + 4e4 / 4e12;
                let collective = Some(kind);
                all.push(Sample {
                    collective,
                    devices,
                    wire_bytes,
                    bytes: 4e4,
                    ..sample(Microbenchmark::Collective, seconds)
                });
            }
        }
        all
    }

    const COMPUTE: Shares = Shares { work: 0.2, collective: 0.3 };
    const MEMORY: Shares = Shares { work: 0.4, collective: 0.1 };

    /// Returns samples in which collectives of the chip of [`known`] overlap with other work. The collective takes
    /// longer than the work in some samples, and less time in others.
    fn overlapped() -> Vec<Sample> {
        let mut all = Vec::new();
        for (wire_bytes, flops, bytes) in [(1e7, 1e12, 1e9), (1e8, 4e10, 1e8), (3e8, 1e11, 4e8)] {
            let collective = 1e-5 + wire_bytes / 350e9;
            let seconds = |work: f64, shares: Shares| {
                let (both, done, moved) = shares.together(work, collective);
                both + (work - done) + (collective - moved)
            };
            let own = |benchmark, seconds| Sample {
                collective: Some(CollectiveKind::AllGather),
                devices: 2,
                wire_bytes,
                ..sample(benchmark, seconds)
            };
            let matmuls = seconds(3e-6 + flops / 700e12, COMPUTE);
            all.push(Sample { flops, ..own(Microbenchmark::OverlappedMatmul, matmuls) });
            all.push(Sample { bytes, ..own(Microbenchmark::OverlappedMemory, seconds(3e-6 + bytes / 4e12, MEMORY)) });
        }
        all
    }

    #[test]
    fn fit_recovers_known_constants() {
        let (one, two) = ([known(), overlapped()].concat(), known());
        let c = fit(&[measurements("a", one), measurements("a", two)], "it").unwrap();
        let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-6, "{got}, not {want}");
        near(c.kernel_seconds, 3e-6);
        near(c.bandwidth, 4e12);
        near(c.matmul.latency, 3e-6);
        near(c.matmul.rate, 700e12);
        let attention = c.attention.unwrap();
        near(attention.latency, 8e-6);
        near(attention.rate, 500e12);
        let host = c.host.unwrap();
        near(host.latency, 1e-5);
        near(host.rate, 50e9);
        assert_eq!(c.collectives.len(), 3);
        let [two, four] = [2, 4].map(|n| c.collective(CollectiveKind::AllGather, n).unwrap());
        near(two.latency, 1e-5);
        near(two.rate, 350e9);
        near(four.latency, 2e-5);
        near(four.rate, 300e9);
        near(c.collective(CollectiveKind::AllToAll, 2).unwrap().rate, 250e9);
        let contention = c.contention.unwrap();
        for (got, want) in [(contention.compute, COMPUTE), (contention.memory, MEMORY)] {
            near(got.work, want.work);
            near(got.collective, want.collective);
        }
        assert_eq!(fit(&[measurements("a", known())], "it").unwrap().contention, None);
        assert_eq!((c.source.len(), c.fit.as_str()), (2, "it"));
    }

    #[test]
    fn missing_or_mixed_measurements_are_errors() {
        let of = |samples: Vec<Sample>| fit(&[measurements("a", samples)], "").unwrap_err();
        assert_eq!(of(vec![]), FitError::Missing("no kernel was timed"));
        assert_eq!(of(vec![sample(Microbenchmark::Kernel, 1e-6)]), FitError::Missing("no copy was timed"));
        let mixed = fit(&[measurements("a", known()), measurements("b", known())], "").unwrap_err();
        assert_eq!(mixed, FitError::Mixed("a".into(), "b".into()));
    }

    #[test]
    fn noisy_samples_never_fit_a_negative_latency() {
        let through_zero = line(&[(1.0, 0.9), (2.0, 2.0), (4.0, 4.4)]).unwrap();
        assert_eq!(through_zero.latency, 0.0);
        assert!((through_zero.rate - 1.0).abs() < 0.1);
        assert_eq!(line(&[(3.0, 6.0)]), Some(AlphaBeta { latency: 0.0, rate: 0.5 }));
        assert_eq!(line(&[]), None);
    }
}
