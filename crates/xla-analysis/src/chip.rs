//! Chips as data, and the roofline and link model that predicts a program's time from them.
//!
//! One entry is one *device* as PJRT counts it: a v5p device is a chip (two cores that work as one), a TPU7x device is
//! half a chip. Each chip is a TOML file of `chips/`, which names the sources of its figures.
//!
//! **Compute and memory.** An instruction takes `max(flops / peak, bytes / bandwidth)`: a roofline of each, summed over
//! the schedule.
//!
//! **Links.** A collective that receives `w` bytes takes `w / (links used · link bandwidth)`. A ring along one mesh axis
//! receives from two sides (2 links); a permute comes over 1. An all-to-all over `n` devices of a ring forwards bytes
//! for others: its busiest link carries `w · n / 8` (a quarter of the ring on average, both directions), but never less
//! than what arrives over two links. Behind an NVLink switch every pattern has the whole port. A group that spans hosts
//! of GPUs goes over the network. An asynchronous collective hides behind the work between its start and its end, each
//! piece of work hiding one collective.
//!
//! These bounds leave out launch overhead, caches and contention: use them to rank layouts, not as absolute times.
//!
//! **Measured chips.** Where a chip has a [`Calibration`], it replaces the data sheet: an instruction takes
//! `launch + max(flops / measured rate, bytes / measured bandwidth)`, a collective inside a host
//! `latency + w / measured rate` of its kind and number of devices. While work and a collective run together, each loses a
//! part of its rate ([`Contention`](crate::Contention)).

use std::path::Path;
use std::sync::OnceLock;

use serde::Deserialize;

use super::calibration::{Calibration, Shares};
use super::collective::CollectiveKind;
use super::cost::{Work, idle_flops};

/// Interconnect of a chip. Bandwidths are bytes a second, one way.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Links {
    /// Links to the neighbours in a torus.
    Torus {
        /// Bandwidth of one link.
        bandwidth: f64,
        /// Part of the matmuls' time behind which the compiler hides all-gathers of activations; none where it is not given.
        #[serde(default)]
        window: f64,
    },
    /// A switch that joins the devices of a host, and a network between hosts.
    Switch {
        /// Bandwidth of a device's port.
        bandwidth: f64,
        /// Bandwidth of a device's network adapter.
        network: f64,
        devices_per_host: usize,
    },
}

/// Peak figures of a device, from its data sheet or its calibration.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chip {
    /// Name in compile targets.
    pub name: String,
    /// Names of the device in its plugin.
    #[serde(default)]
    pub device_kinds: Vec<String>,
    /// Bytes of device memory that a program may use.
    pub capacity: i64,
    /// FLOP/s with bf16 operands and f32 sums.
    pub peak_bf16: f64,
    /// FLOP/s with operands of 8-bit floats; without such units, as with bf16.
    pub peak_fp8: f64,
    /// Operations a second with operands of 8-bit integers, where there are units for them; else as with bf16.
    pub peak_int8: Option<f64>,
    /// FLOP/s with f32 operands at full precision; as with bf16 where it is not given.
    pub peak_f32: Option<f64>,
    /// Bytes a second of device memory.
    pub bandwidth: f64,
    /// Processors of a GPU, each of which takes one tile of attention at a time.
    pub processors: Option<usize>,
    /// Devices that PJRT counts on a TPU chip. `None`: 1.
    pub devices_per_chip: Option<usize>,
    /// Chips of the largest TPU slice that is one VM; larger slices have 4 chips a VM. `None`: 4.
    pub single_vm_chips: Option<usize>,
    pub links: Links,
    /// Measured constants, which replace the data sheet.
    pub calibration: Option<Calibration>,
    /// Of a GPU: XLA's description of it (`stream_executor.GpuTargetConfigProto` as text), to compile for it where it is not.
    pub target_config: Option<String>,
}

/// Errors of finding a chip.
#[derive(Debug, thiserror::Error)]
pub enum ChipError {
    /// A name without an embedded file.
    #[error("unknown chip '{0}'; known: {known}", known = known())]
    Unknown(String),
    /// A file that cannot be read.
    #[error("{0}: {1}")]
    Read(String, std::io::Error),
    /// A file with an unknown, missing or mistyped key, which the message names.
    #[error("{0}: {1}")]
    Parse(String, String),
    /// A figure of a file that is none of a device.
    #[error("{0}: {1} is {2}, not a finite number above 0")]
    Figure(String, &'static str, f64),
    /// A device that no embedded file names.
    #[error("no chip file is known of the device '{0}' (known: {known}): name one with --chip FILE", known = known())]
    Device(String),
}

fn known() -> String {
    let names: Vec<&str> = Chip::all().iter().map(|c| c.name.as_str()).collect();
    names.join(", ")
}

/// Seconds of an instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpTime {
    pub compute: f64,
    pub memory: f64,
    pub launch: f64,
}

impl OpTime {
    /// Launch latency, then compute and memory traffic side by side.
    pub fn total(&self) -> f64 {
        self.launch + self.compute.max(self.memory)
    }
}

/// The embedded files, in the order in which chips are listed.
const FILES: [&str; 6] = [
    include_str!("chips/v5e.toml"),
    include_str!("chips/v5p.toml"),
    include_str!("chips/v6e.toml"),
    include_str!("chips/tpu7x.toml"),
    include_str!("chips/h200.toml"),
    include_str!("chips/h100.toml"),
];

impl Chip {
    /// Embedded chips.
    #[allow(clippy::expect_used, reason = "the files are compiled in, and a test reads each")]
    pub fn all() -> &'static [Chip] {
        static ALL: OnceLock<Vec<Chip>> = OnceLock::new();
        ALL.get_or_init(|| FILES.iter().map(|text| toml::from_str(text).expect("an embedded chip")).collect())
    }

    /// An embedded chip.
    ///
    /// # Errors
    /// An unknown name, with those that are known.
    pub fn named(name: &str) -> Result<&'static Chip, ChipError> {
        Chip::all().iter().find(|c| c.name == name).ok_or_else(|| ChipError::Unknown(name.into()))
    }

    /// A chip from a TOML file in the form of those in `chips/`.
    ///
    /// # Errors
    /// A file that cannot be read; an unknown, missing or mistyped key, with its name; a figure that is not above 0.
    pub fn read(path: &Path) -> Result<Chip, ChipError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|e| ChipError::Read(name.clone(), e))?;
        let chip: Chip = toml::from_str(text.trim_start_matches('\u{feff}'))
            .map_err(|e| ChipError::Parse(name.clone(), e.message().into()))?;
        let wrong = chip.figures().into_iter().find(|(_, figure)| !(figure.is_finite() && *figure > 0.0));
        wrong.map_or(Ok(chip), |(key, figure)| Err(ChipError::Figure(name, key, figure)))
    }

    /// Figures that everything is divided by, with their keys.
    fn figures(&self) -> Vec<(&'static str, f64)> {
        let mut all = vec![
            ("capacity", self.capacity as f64),
            ("peak_bf16", self.peak_bf16),
            ("peak_fp8", self.peak_fp8),
            ("bandwidth", self.bandwidth),
        ];
        all.extend(self.peak_int8.map(|peak| ("peak_int8", peak)));
        all.extend(self.peak_f32.map(|peak| ("peak_f32", peak)));
        match self.links {
            Links::Torus { bandwidth, .. } => all.push(("links.torus.bandwidth", bandwidth)),
            Links::Switch { bandwidth, network, devices_per_host } => all.extend([
                ("links.switch.bandwidth", bandwidth),
                ("links.switch.network", network),
                ("links.switch.devices_per_host", devices_per_host as f64),
            ]),
        }
        if let Some(c) = &self.calibration {
            all.extend([("calibration.bandwidth", c.bandwidth), ("calibration.matmul.rate", c.matmul.rate)]);
            all.extend(c.attention.map(|attention| ("calibration.attention.rate", attention.rate)));
            all.extend(c.collectives.iter().map(|of| ("calibration.collectives.cost.rate", of.cost.rate)));
        }
        all
    }

    /// Factor by which attention is faster than other matmuls; 1 where it is slower.
    #[must_use]
    pub fn attention_speed(&self) -> f64 {
        let rates = self.calibration.as_ref().and_then(|c| Some((c.attention?.rate, c.matmul.rate)));
        rates.map_or(1.0, |(attention, matmul)| (attention / matmul).max(1.0))
    }

    /// The embedded chip of a device, by its plugin's name of it.
    ///
    /// # Errors
    /// A device of another kind.
    pub fn of_device(kind: &str) -> Result<&'static Chip, ChipError> {
        let of = |c: &&Chip| c.device_kinds.iter().any(|known| known == kind);
        Chip::all().iter().find(of).ok_or_else(|| ChipError::Device(kind.into()))
    }

    /// The embedded chip of a name, or that of a TOML file.
    ///
    /// # Errors
    /// Those of [`Chip::named`] and [`Chip::read`].
    pub fn find(name_or_path: &str) -> Result<Chip, ChipError> {
        match Chip::is_file(name_or_path) {
            true => Chip::read(Path::new(name_or_path)),
            false => Chip::named(name_or_path).cloned(),
        }
    }

    /// Whether a value of `--chip` is a file, not a name.
    pub fn is_file(name_or_path: &str) -> bool {
        name_or_path.ends_with(".toml") || name_or_path.contains('/')
    }

    /// The chip by its data sheet alone.
    #[must_use]
    pub fn uncalibrated(&self) -> Chip {
        Chip { calibration: None, ..self.clone() }
    }

    /// Text of a chip file with another calibration; the data sheet and its comments stay.
    ///
    /// # Errors
    /// A text that is no chip's; a calibration without a form in TOML, which a null among its versions is.
    pub fn text_with(text: &str, calibration: &Calibration) -> Result<String, String> {
        #[derive(serde::Serialize)]
        struct Section<'a> {
            calibration: &'a Calibration,
        }
        let starts = |line: &str| line.starts_with("[calibration") || line.starts_with("[[calibration");
        // The calibration is the last section, as this writes it.
        let sheet: String = text.split_inclusive('\n').take_while(|line| !starts(line)).collect();
        let section = toml::to_string(&Section { calibration }).map_err(|e| e.to_string())?;
        let text = format!("{}\n\n{section}", sheet.trim_end());
        match toml::from_str::<Chip>(&text) {
            Ok(chip) if chip.calibration.as_ref() == Some(calibration) => Ok(text),
            Ok(_) => Err("the calibration is not read back as it was written".into()),
            Err(e) => Err(e.message().into()),
        }
    }

    /// Text of the embedded file of a chip.
    pub fn file_text(&self) -> Option<&'static str> {
        FILES.into_iter().find(|text| toml::from_str::<Chip>(text).is_ok_and(|chip| chip.name == self.name))
    }

    /// Seconds of an instruction's work.
    pub fn op_time(&self, work: Work) -> OpTime {
        let plain = work.flops - work.fp8 - work.int8 - work.f32 - work.attention;
        let others = work.fp8 / self.peak_fp8
            + work.int8 / self.peak_int8.unwrap_or(self.peak_bf16)
            + work.f32 / self.peak_f32.unwrap_or(self.peak_bf16);
        let Some(c) = &self.calibration else {
            let compute = (plain + work.attention) / self.peak_bf16 + others;
            return OpTime { compute, memory: work.bytes / self.bandwidth, launch: 0.0 };
        };
        let attention = c.attention.unwrap_or(c.matmul);
        // Matmuls of other types are assumed to reach the same share of their peak.
        let bf16 = plain + others * self.peak_bf16;
        let launch = match (work.attention > 0.0, work.flops > 0.0) {
            (true, _) => attention.latency,
            (false, true) => c.matmul.latency,
            (false, false) => c.kernel_seconds * work.kernels,
        };
        let compute = bf16 / c.matmul.rate + (work.attention + work.idle) / attention.rate;
        OpTime { compute, memory: work.bytes / c.bandwidth, launch }
    }

    /// FLOPs that processors without a tile of attention could do while the others compute `flops` of attention with so many
    /// queries in each of `heads` heads, over all rows; 0 where the number of processors is unknown.
    #[must_use]
    pub fn idle_flops(&self, heads: f64, queries: f64, flops: f64) -> f64 {
        self.processors.map_or(0.0, |processors| idle_flops(processors, heads, queries, flops))
    }

    /// Rates that work and a collective take from each other.
    pub(crate) fn contention(&self, time: OpTime) -> Shares {
        let contention = self.calibration.as_ref().and_then(|c| c.contention);
        contention.map_or(Shares::default(), |c| if time.compute > time.memory { c.compute } else { c.memory })
    }

    /// Seconds of a collective over device `groups` in which each device receives `wire` bytes.
    pub fn link_seconds(&self, kind: CollectiveKind, wire: f64, groups: &[Vec<i64>]) -> f64 {
        let n = groups.iter().map(Vec::len).max().unwrap_or(1) as f64;
        match self.links {
            Links::Torus { bandwidth, .. } => match kind {
                CollectiveKind::CollectivePermute | CollectiveKind::CollectiveBroadcast => wire / bandwidth,
                CollectiveKind::AllToAll => (wire * n / 8.0).max(wire / 2.0) / bandwidth,
                CollectiveKind::AllGather | CollectiveKind::AllReduce | CollectiveKind::ReduceScatter => {
                    wire / (2.0 * bandwidth)
                }
            },
            Links::Switch { bandwidth, network, devices_per_host } => {
                let host_of = |d: i64| usize::try_from(d).unwrap_or(0) / devices_per_host.max(1);
                let spans = groups.iter().any(|g| g.iter().any(|&d| host_of(d) != host_of(g[0])));
                match self.calibration.as_ref().and_then(|c| c.collective(kind, groups.iter().map(Vec::len).max()?)) {
                    Some(cost) if !spans => cost.seconds(wire),
                    _ => wire / if spans { network } else { bandwidth },
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::calibration::{AlphaBeta, CollectiveCost};
    use super::*;

    #[test]
    fn every_embedded_chip_is_read() {
        for chip in Chip::all() {
            assert!(chip.capacity > 0 && chip.peak_fp8 >= chip.peak_bf16 && chip.bandwidth > 0.0, "{}", chip.name);
            assert!(chip.device_kinds.iter().all(|kind| Chip::of_device(kind).unwrap() == chip), "{}", chip.name);
            assert_eq!(chip.target_config.is_some(), matches!(chip.links, Links::Switch { .. }), "{}", chip.name);
            let Some(c) = &chip.calibration else { continue };
            assert!(!c.source.is_empty() && c.source.iter().all(|s| !s.command.is_empty() && !s.date.is_empty()));
            assert!(c.source.iter().all(|s| chip.device_kinds.contains(&s.device)));
            assert!(c.matmul.rate > 0.0 && c.bandwidth > 0.0 && c.kernel_seconds > 0.0);
        }
        let message = Chip::of_device("NVIDIA T4").unwrap_err().to_string();
        assert!(message.starts_with("no chip file is known of the device 'NVIDIA T4' (known: v5e, "), "{message}");
    }

    #[test]
    fn a_calibration_is_replaced_and_the_data_sheet_stays() {
        let calibration = Chip::named("h200").unwrap().calibration.clone().unwrap();
        let other = Calibration { kernel_seconds: 1e-6, ..calibration.clone() };
        // Onto a file without one, and onto one with.
        let added = Chip::text_with(FILES[0], &other).unwrap();
        assert!(added.starts_with(FILES[0].trim_end()), "{added}");
        let again = Chip::text_with(&added, &calibration).unwrap();
        assert!(again.starts_with(FILES[0].trim_end()) && !again.contains("kernel_seconds = 0.000001"), "{again}");
        assert_eq!(Chip::text_with(&added, &other).unwrap(), added);
        assert!(Chip::text_with("name = 'x'", &other).unwrap_err().contains("missing field"));
    }

    #[test]
    fn a_chip_of_a_file_is_read_and_mistakes_name_file_and_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.toml");
        let text = FILES[0].replacen("\"v5e\"", "\"mine\"", 1);
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Chip::find(path.to_str().unwrap()).map_err(|e| e.to_string())
        };
        assert_eq!(read(&text).unwrap(), Chip { name: "mine".into(), ..Chip::named("v5e").unwrap().clone() });
        let mistakes = [
            ("bandwidth = 8", "bandwith = 8", "`bandwith`"),
            ("peak_fp8", "#", "`peak_fp8`"),
            ("[links.torus]", "[links.ring]", "`ring`"),
            ("bandwidth = 8", "bandwidth = -8", "bandwidth is -"),
            ("bandwidth = 8", "bandwidth = nan # 8", "bandwidth is NaN, not a finite number above 0"),
            ("peak_bf16 = ", "peak_bf16 = 0 # ", "peak_bf16 is 0, not"),
            ("capacity = ", "capacity = -5 # ", "capacity is -5, not"),
        ];
        for (old, new, key) in mistakes {
            let message = read(&text.replacen(old, new, 1)).unwrap_err();
            assert!(message.contains("mine.toml: ") && message.contains(key) && !message.contains('\n'), "{message}");
        }
        let message = Chip::find("v9").unwrap_err().to_string();
        assert_eq!(message, "unknown chip 'v9'; known: v5e, v5p, v6e, tpu7x, h200, h100");
    }

    #[test]
    fn link_times() {
        let v6e = Chip::named("v6e").unwrap();
        let all = [(0..8).collect::<Vec<i64>>()];
        assert!((v6e.link_seconds(CollectiveKind::AllGather, 2e9, &all) - 0.01).abs() < 1e-12);
        assert!((v6e.link_seconds(CollectiveKind::AllToAll, 2e9, &all) - 0.02).abs() < 1e-12);
        assert!((v6e.link_seconds(CollectiveKind::CollectivePermute, 2e9, &[vec![0, 1]]) - 0.02).abs() < 1e-12);
        let h200 = Chip::named("h200").unwrap().uncalibrated();
        assert!((h200.link_seconds(CollectiveKind::AllToAll, 450e9, &all) - 1.0).abs() < 1e-12);
        assert!((h200.link_seconds(CollectiveKind::AllGather, 50e9, &[vec![0, 8]]) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn measured_constants_replace_the_data_sheet() {
        let cost = |latency, rate| AlphaBeta { latency, rate };
        let calibration = Calibration {
            fit: String::new(),
            source: Vec::new(),
            kernel_seconds: 2e-6,
            bandwidth: 4e12,
            matmul: cost(5e-6, 500e12),
            attention: Some(cost(8e-6, 400e12)),
            collectives: vec![CollectiveCost { kind: CollectiveKind::AllGather, devices: 2, cost: cost(1e-5, 300e9) }],
            contention: None,
        };
        let sheet = Chip::named("h200").unwrap().uncalibrated();
        let h200 = Chip { calibration: Some(calibration), ..sheet.clone() };
        let work = |flops, bytes| Work { flops, bytes, kernels: 1.0, ..Work::default() };
        let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-9, "{got}, not {want}");
        near(sheet.op_time(work(989e12, 0.0)).total(), 1.0);
        let integers = |flops| Work { int8: flops, ..work(flops, 0.0) };
        near(Chip::named("v6e").unwrap().op_time(integers(1836e12)).total(), 1.0);
        near(Chip::named("tpu7x").unwrap().op_time(integers(1153.5e12)).total(), 1.0);
        near(h200.op_time(work(500e12, 4e9)).total(), 1.0 + 5e-6);
        near(h200.op_time(work(0.0, 4e9)).total(), 1e-3 + 2e-6);
        let attends = Work { attention: 4e12, ..work(4e12, 4e9) };
        near(h200.op_time(attends).total(), 1e-2 + 8e-6);
        assert_eq!(h200.op_time(Work::default()).total(), 0.0);
        near(h200.link_seconds(CollectiveKind::AllGather, 3e9, &[vec![0, 1]]), 1e-2 + 1e-5);
        // Between hosts, and of a kind that was not measured, the data sheet stays.
        near(h200.link_seconds(CollectiveKind::AllGather, 50e9, &[vec![0, 8]]), 1.0);
        near(h200.link_seconds(CollectiveKind::AllReduce, 450e9, &[vec![0, 1]]), 1.0);
    }
}
