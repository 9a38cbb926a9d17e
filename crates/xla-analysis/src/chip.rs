//! What the chips can do, and how long a program takes by these figures.
//!
//! One entry is one *device* as PJRT counts it: a v5p device is a chip (two cores that work as one), a TPU7x device is
//! half a chip, whose memory, products and links are halved.
//!
//! | figure | source |
//! |---|---|
//! | TPU bf16 peak, memory size and bandwidth | Google's pages of the generations, cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x} |
//! | TPU memory a program may use | `device_memory_bytes_limit`, as libtpu 0.0.42 states it of its topologies |
//! | TPU links | the same pages: 400, 1200, 800 and 1200 GB/s a chip, both ways, for v5e, v5p, v6e, TPU7x; a chip of a 2-D torus (v5e, v6e) has 4 links, of a 3-D torus 6 |
//! | H200 | NVIDIA's data sheet of the SXM module: 989 TFLOP/s dense, 141 GB at 4.8 TB/s, NVLink 900 GB/s both ways; between hosts one 400 Gbit/s adapter a GPU |
//!
//! **Compute and memory.** An instruction takes `max(flops / peak, bytes / bandwidth)`: a roofline of each, summed over
//! the schedule.
//!
//! **Links.** A collective that receives `w` bytes takes `w / (links used · link bandwidth)`. A ring along one mesh axis
//! receives from two sides (2 links); a permute comes over 1. An all-to-all over `n` devices of a ring passes bytes on
//! for others: its busiest link carries `w · n / 8` (a quarter of the ring on average, both directions), but never less
//! than what arrives over two links. Behind an NVLink switch every pattern has the whole port. A group that spans hosts
//! of GPUs goes over the network. What runs in the background hides behind the work between its start and its end, each
//! piece of work hiding one collective.
//!
//! These are bounds that no launch overhead, no cache and no contention enters: compare layouts with them, not clocks.
//!
//! **Measured chips.** Where `analysis::calibration` has a chip's constants, they stand in for the data sheet: an
//! instruction takes `launch + max(flops / measured rate, bytes / measured bandwidth)`, an exchange inside a host
//! `latency + w / measured rate` of its kind and number of devices.

use super::calibration::Calibration;
use super::collective::Kind;
use super::cost::Work;

/// How devices are joined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Links {
    /// Links to neighbours in a torus; bytes a second of one, one way.
    Torus {
        /// Bytes a second.
        each_way: f64,
    },
    /// A switch: bytes a second of a device's port, one way, and of its network adapter.
    Switch {
        /// Bytes a second inside a host.
        each_way: f64,
        /// Bytes a second between hosts.
        network: f64,
        /// Devices of a host.
        host: usize,
    },
}

/// The figures of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chip {
    /// As targets name it.
    pub name: &'static str,
    /// Bytes of device memory that a program may use.
    pub capacity: i64,
    /// Floating-point operations a second with bf16 operands and f32 sums.
    pub peak: f64,
    /// The same with operands of 8-bit floats; of chips without them, as with bf16.
    pub peak_f8: f64,
    /// Bytes a second of device memory.
    pub bandwidth: f64,
    /// How devices are joined.
    pub links: Links,
    /// What it was measured to reach, in place of the above.
    pub measured: Option<&'static Calibration>,
}

/// Seconds of an instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seconds {
    /// Of products.
    pub compute: f64,
    /// Of memory.
    pub memory: f64,
    /// Until it runs.
    pub launch: f64,
}

impl Seconds {
    /// Products and memory side by side, behind the start.
    pub fn all(&self) -> f64 {
        self.launch + self.compute.max(self.memory)
    }
}

/// Devices of a full H200 host.
const HGX: usize = 8;

/// The table.
pub const CHIPS: [Chip; 5] = [
    Chip {
        name: "v5e",
        capacity: 16_909_336_576,
        peak: 197e12,
        peak_f8: 197e12,
        bandwidth: 819e9,
        links: Links::Torus { each_way: 50e9 },
        measured: None,
    },
    Chip {
        name: "v5p",
        capacity: 102_803_435_520,
        peak: 459e12,
        peak_f8: 459e12,
        bandwidth: 2765e9,
        links: Links::Torus { each_way: 100e9 },
        measured: None,
    },
    Chip {
        name: "v6e",
        capacity: 33_550_233_600,
        peak: 918e12,
        peak_f8: 918e12,
        bandwidth: 1638e9,
        links: Links::Torus { each_way: 100e9 },
        measured: None,
    },
    Chip {
        name: "tpu7x",
        capacity: 101_732_839_424,
        peak: 2307e12 / 2.0,
        peak_f8: 4614e12 / 2.0,
        bandwidth: 7380e9 / 2.0,
        links: Links::Torus { each_way: 100e9 / 2.0 },
        measured: None,
    },
    Chip {
        name: "h200",
        capacity: 150_000_000_000,
        peak: 989e12,
        peak_f8: 1979e12,
        bandwidth: 4800e9,
        links: Links::Switch { each_way: 450e9, network: 50e9, host: HGX },
        measured: None,
    },
];

impl Chip {
    /// An entry of the table.
    pub fn named(name: &str) -> Option<&'static Chip> {
        CHIPS.iter().find(|c| c.name == name)
    }

    /// The chip with its measured constants, where there are any.
    #[must_use]
    pub fn calibrated(self) -> Chip {
        Chip { measured: Calibration::of(self.name), ..self }
    }

    /// Seconds of an instruction's work.
    pub fn seconds(&self, work: Work) -> Seconds {
        let plain = work.flops - work.narrow - work.attention;
        let Some(c) = self.measured else {
            let compute = (plain + work.attention) / self.peak + work.narrow / self.peak_f8;
            return Seconds { compute, memory: work.bytes / self.bandwidth, launch: 0.0 };
        };
        let attention = c.attention.unwrap_or(c.product);
        // 8-bit products are taken to reach the same part of their peak.
        let wide = plain + work.narrow * self.peak / self.peak_f8;
        let launch = match (work.attention > 0.0, work.flops > 0.0) {
            (true, _) => attention.seconds,
            (false, true) => c.product.seconds,
            (false, false) => c.kernel_seconds * work.kernels,
        };
        let compute = wide / c.product.rate + work.attention / attention.rate;
        Seconds { compute, memory: work.bytes / c.bandwidth, launch }
    }

    /// Seconds of a collective in which `groups` of devices take part and each device receives `wire` bytes.
    pub fn link_seconds(&self, kind: Kind, wire: f64, groups: &[Vec<i64>]) -> f64 {
        let n = groups.iter().map(Vec::len).max().unwrap_or(1) as f64;
        match self.links {
            Links::Torus { each_way } => match kind {
                Kind::CollectivePermute | Kind::CollectiveBroadcast => wire / each_way,
                Kind::AllToAll => (wire * n / 8.0).max(wire / 2.0) / each_way,
                Kind::AllGather | Kind::AllReduce | Kind::ReduceScatter => wire / (2.0 * each_way),
            },
            Links::Switch { each_way, network, host } => {
                let host_of = |d: i64| usize::try_from(d).unwrap_or(0) / host.max(1);
                let spans = groups.iter().any(|g| g.iter().any(|&d| host_of(d) != host_of(g[0])));
                match self.measured.and_then(|c| c.exchange(kind, groups.iter().map(Vec::len).max()?)) {
                    Some(line) if !spans => line.of(wire),
                    _ => wire / if spans { network } else { each_way },
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::calibration::{Exchange, Line};
    use super::*;

    #[test]
    fn link_times() {
        let v6e = Chip::named("v6e").expect("in the table");
        let all = [(0..8).collect::<Vec<i64>>()];
        assert!((v6e.link_seconds(Kind::AllGather, 2e9, &all) - 0.01).abs() < 1e-12);
        assert!((v6e.link_seconds(Kind::AllToAll, 2e9, &all) - 0.02).abs() < 1e-12);
        assert!((v6e.link_seconds(Kind::CollectivePermute, 2e9, &[vec![0, 1]]) - 0.02).abs() < 1e-12);
        let h200 = Chip::named("h200").expect("in the table");
        assert!((h200.link_seconds(Kind::AllToAll, 450e9, &all) - 1.0).abs() < 1e-12);
        assert!((h200.link_seconds(Kind::AllGather, 50e9, &[vec![0, 8]]) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn measured_constants_stand_in_for_the_data_sheet() {
        let line = |seconds, rate| Line { seconds, rate };
        let measured: &'static Calibration = Box::leak(Box::new(Calibration {
            chip: "h200".into(),
            fit: String::new(),
            source: Vec::new(),
            kernel_seconds: 2e-6,
            bandwidth: 4e12,
            product: line(5e-6, 500e12),
            attention: Some(line(8e-6, 400e12)),
            exchanges: vec![Exchange { kind: Kind::AllGather, devices: 2, line: line(1e-5, 300e9) }],
        }));
        let sheet = *Chip::named("h200").expect("in the table");
        let h200 = Chip { measured: Some(measured), ..sheet };
        let work = |flops, bytes| Work { flops, bytes, kernels: 1.0, ..Work::default() };
        let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-9, "{got}, not {want}");
        near(sheet.seconds(work(989e12, 0.0)).all(), 1.0);
        near(h200.seconds(work(500e12, 4e9)).all(), 1.0 + 5e-6);
        near(h200.seconds(work(0.0, 4e9)).all(), 1e-3 + 2e-6);
        let attends = Work { attention: 4e12, ..work(4e12, 4e9) };
        near(h200.seconds(attends).all(), 1e-2 + 8e-6);
        assert_eq!(h200.seconds(Work::default()).all(), 0.0);
        near(h200.link_seconds(Kind::AllGather, 3e9, &[vec![0, 1]]), 1e-2 + 1e-5);
        // Between hosts, and of a kind that was not measured, the data sheet stays.
        near(h200.link_seconds(Kind::AllGather, 50e9, &[vec![0, 8]]), 1.0);
        near(h200.link_seconds(Kind::AllReduce, 450e9, &[vec![0, 1]]), 1.0);
    }
}
