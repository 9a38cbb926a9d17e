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
    },
    Chip {
        name: "v5p",
        capacity: 102_803_435_520,
        peak: 459e12,
        peak_f8: 459e12,
        bandwidth: 2765e9,
        links: Links::Torus { each_way: 100e9 },
    },
    Chip {
        name: "v6e",
        capacity: 33_550_233_600,
        peak: 918e12,
        peak_f8: 918e12,
        bandwidth: 1638e9,
        links: Links::Torus { each_way: 100e9 },
    },
    Chip {
        name: "tpu7x",
        capacity: 101_732_839_424,
        peak: 2307e12 / 2.0,
        peak_f8: 4614e12 / 2.0,
        bandwidth: 7380e9 / 2.0,
        links: Links::Torus { each_way: 100e9 / 2.0 },
    },
    Chip {
        name: "h200",
        capacity: 150_000_000_000,
        peak: 989e12,
        peak_f8: 1979e12,
        bandwidth: 4800e9,
        links: Links::Switch { each_way: 450e9, network: 50e9, host: HGX },
    },
];

impl Chip {
    /// An entry of the table.
    pub fn named(name: &str) -> Option<&'static Chip> {
        CHIPS.iter().find(|c| c.name == name)
    }

    /// Seconds of products and convolutions.
    pub fn compute_seconds(&self, work: Work) -> f64 {
        (work.flops - work.narrow) / self.peak + work.narrow / self.peak_f8
    }

    /// Seconds of device memory traffic.
    pub fn memory_seconds(&self, bytes: f64) -> f64 {
        bytes / self.bandwidth
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
                wire / if spans { network } else { each_way }
            }
        }
    }
}

#[cfg(test)]
mod tests {
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
}
