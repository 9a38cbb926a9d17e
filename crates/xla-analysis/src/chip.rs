//! Chip descriptions, and the roofline and link model that predicts a program's time from them.
//!
//! A chip file describes one *device* as PJRT counts devices: a v5p device is a chip (two cores that act as one), and a
//! TPU7x device is half a chip. Each chip is a TOML file in `chips/`, which lists the sources of its figures.
//!
//! **Compute and memory.** The model is a roofline: an instruction takes `max(flops / peak, bytes / bandwidth)`, and
//! the times of all instructions in the schedule are added.
//!
//! **Links.** A collective in which a device receives `w` bytes takes `w / (links used · link bandwidth)`. A ring along
//! one mesh axis receives from both sides (2 links); a permute uses 1 link. In an all-to-all over a ring of `n`
//! devices, devices also forward bytes. The busiest link carries `w · n / 8` bytes (on average a quarter of the ring,
//! in both directions), but at least half of the bytes that arrive. With an NVLink switch, every pattern uses the full
//! bandwidth of a device's port. A group of GPUs on several hosts uses the network. An asynchronous collective overlaps
//! with the work between its start and its end; the same work can hide only one collective.
//!
//! **Host link.** A copy between host memory and the device takes `bytes / host bandwidth`. One link runs the copies one
//! after another, in the order of their starts, while the device works. Only the time that the device waits for the end
//! of a copy adds to the step.
//!
//! For chips without a calibration, the model ignores launch overhead, caches and contention. Use such predictions to
//! rank layouts, not as absolute times.
//!
//! **Measured chips.** A [`Calibration`] replaces the data sheet: an instruction takes `launch + max(flops / measured
//! rate, bytes / measured bandwidth)`, a collective inside a host takes `latency + w / measured rate` for its kind and
//! group size, and a copy from host memory takes `latency + bytes / measured rate`. While a collective and other work
//! overlap, each loses a fraction of its rate ([`Contention`](crate::Contention)).

use std::path::Path;
use std::sync::OnceLock;

use serde::Deserialize;

use super::calibration::{Calibration, Shares};
use super::collective::CollectiveKind;
use super::cost::{Work, idle_flops};

/// Interconnect of a chip. Bandwidths are in bytes/s in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Links {
    /// A torus, in which each chip has links to its neighbors.
    Torus {
        /// Bandwidth of one link.
        bandwidth: f64,
        /// Fraction of the matmul time that the compiler overlaps with all-gathers of activations (default 0).
        #[serde(default)]
        window: f64,
    },
    /// A switch that connects the devices of a host, and a network that connects hosts.
    Switch {
        /// Bandwidth of a device's port.
        bandwidth: f64,
        /// Bandwidth of a device's network adapter.
        network: f64,
        /// Number of devices that share a switch.
        devices_per_host: usize,
    },
}

/// Performance figures of a device, from its data sheet or its calibration.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chip {
    /// Name of the chip in compile targets.
    pub name: String,
    /// Device kinds that a plugin reports for this chip.
    #[serde(default)]
    pub device_kinds: Vec<String>,
    /// Device memory that a program can use, in bytes.
    pub capacity: i64,
    /// Peak FLOP/s with bf16 operands and f32 accumulation.
    pub peak_bf16: f64,
    /// Peak FLOP/s with 8-bit float operands. A chip without fp8 units has the value of `peak_bf16`.
    pub peak_fp8: f64,
    /// Peak operations/s with 8-bit integer operands. `None`: the chip has no such units, and `peak_bf16` applies.
    pub peak_int8: Option<f64>,
    /// Peak FLOP/s with f32 operands at full precision. `None`: `peak_bf16` applies.
    pub peak_f32: Option<f64>,
    /// Device memory bandwidth in bytes/s.
    pub bandwidth: f64,
    /// Bandwidth of the link from host memory to the device in bytes/s. `None`: unknown.
    pub host_bandwidth: Option<f64>,
    /// Number of streaming multiprocessors of a GPU. Each of them processes one tile of attention at a time.
    pub processors: Option<usize>,
    /// Number of PJRT devices per TPU chip. `None`: 1.
    pub devices_per_chip: Option<usize>,
    /// Number of chips in the largest TPU slice that is a single VM. Larger slices have 4 chips per VM. `None`: 4.
    pub single_vm_chips: Option<usize>,
    /// Interconnect of the device.
    pub links: Links,
    /// Measured constants, which replace the data sheet.
    pub calibration: Option<Calibration>,
    /// XLA's description of a GPU (`stream_executor.GpuTargetConfigProto` as text), which lets hosts without the GPU
    /// compile programs for it. `None` for other chips.
    pub target_config: Option<String>,
}

/// Errors that occur when a chip is looked up or its file is read.
#[derive(Debug, thiserror::Error)]
pub enum ChipError {
    /// No embedded chip has this name.
    #[error("unknown chip '{0}'; known: {known}", known = known())]
    Unknown(String),
    /// The file cannot be read.
    #[error("{0}: {1}")]
    Read(String, std::io::Error),
    /// A key of the file is unknown, missing or of the wrong type; the message contains the key.
    #[error("{0}: {1}")]
    Parse(String, String),
    /// A figure is not a positive finite number.
    #[error("{0}: {1} is {2}, not a finite number above 0")]
    Figure(String, &'static str, f64),
    /// No embedded chip has this device kind.
    #[error("no embedded chip for device '{0}' (known: {known}); pass --chip FILE", known = known())]
    Device(String),
}

fn known() -> String {
    let names: Vec<&str> = Chip::all().iter().map(|c| c.name.as_str()).collect();
    names.join(", ")
}

/// Predicted time of an instruction, by component, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpTime {
    /// FLOPs divided by the peak or measured rate.
    pub compute: f64,
    /// Bytes divided by the bandwidth of device memory.
    pub memory: f64,
    /// Launch latency; 0 for a chip without a calibration.
    pub launch: f64,
}

impl OpTime {
    /// Returns the launch latency plus the larger of the compute time and the memory time.
    pub fn total(&self) -> f64 {
        self.launch + self.compute.max(self.memory)
    }
}

/// Embedded chip files, in the order in which error messages list the chips.
const FILES: [&str; 6] = [
    include_str!("chips/v5e.toml"),
    include_str!("chips/v5p.toml"),
    include_str!("chips/v6e.toml"),
    include_str!("chips/tpu7x.toml"),
    include_str!("chips/h200.toml"),
    include_str!("chips/h100.toml"),
];

impl Chip {
    /// Returns the embedded chips.
    #[allow(clippy::expect_used, reason = "the files are compiled in, and a test reads each")]
    pub fn all() -> &'static [Chip] {
        static ALL: OnceLock<Vec<Chip>> = OnceLock::new();
        ALL.get_or_init(|| FILES.iter().map(|text| toml::from_str(text).expect("an embedded chip")).collect())
    }

    /// Returns an embedded chip by name.
    ///
    /// # Errors
    /// Returns an error with the known names if the name is unknown.
    pub fn named(name: &str) -> Result<&'static Chip, ChipError> {
        Chip::all().iter().find(|c| c.name == name).ok_or_else(|| ChipError::Unknown(name.into()))
    }

    /// Returns the compute capability that `target_config` states, such as `9.0`. `None`: it states none.
    pub fn compute_capability(&self) -> Option<String> {
        let (_, fields) = self.target_config.as_ref()?.split_once("cuda_compute_capability")?;
        let (fields, _) = fields.split_once('}')?;
        let is_end = |c: char| !c.is_ascii_digit();
        let field = |name: &str| fields.split_once(name)?.1.trim_start().split(is_end).next();
        Some(format!("{}.{}", field("major:")?, field("minor:").unwrap_or("0")))
    }

    /// Reads a chip from a TOML file, in the format of the files in `chips/`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, if a key is unknown, missing or of the wrong type, or if a figure
    /// is not positive.
    pub fn read(path: &Path) -> Result<Chip, ChipError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|e| ChipError::Read(name.clone(), e))?;
        let chip: Chip = toml::from_str(text.trim_start_matches('\u{feff}'))
            .map_err(|e| ChipError::Parse(name.clone(), e.message().into()))?;
        let wrong = chip.figures().into_iter().find(|(_, figure)| !(figure.is_finite() && *figure > 0.0));
        wrong.map_or(Ok(chip), |(key, figure)| Err(ChipError::Figure(name, key, figure)))
    }

    /// Returns the figures that must be positive, each with its key in the chip file.
    fn figures(&self) -> Vec<(&'static str, f64)> {
        let mut all = vec![
            ("capacity", self.capacity as f64),
            ("peak_bf16", self.peak_bf16),
            ("peak_fp8", self.peak_fp8),
            ("bandwidth", self.bandwidth),
        ];
        all.extend(self.peak_int8.map(|peak| ("peak_int8", peak)));
        all.extend(self.peak_f32.map(|peak| ("peak_f32", peak)));
        all.extend(self.host_bandwidth.map(|rate| ("host_bandwidth", rate)));
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
            all.extend(c.host.map(|host| ("calibration.host.rate", host.rate)));
            all.extend(c.collectives.iter().map(|of| ("calibration.collectives.cost.rate", of.cost.rate)));
        }
        all
    }

    /// Returns the FLOP rate of attention divided by that of other matmuls, at least 1; 1 if it was not measured.
    #[must_use]
    pub fn attention_speed(&self) -> f64 {
        let rates = self.calibration.as_ref().and_then(|c| Some((c.attention?.rate, c.matmul.rate)));
        rates.map_or(1.0, |(attention, matmul)| (attention / matmul).max(1.0))
    }

    /// Returns the embedded chip of a device kind.
    ///
    /// # Errors
    /// Returns an error if no embedded chip has this device kind.
    pub fn of_device(kind: &str) -> Result<&'static Chip, ChipError> {
        let of = |c: &&Chip| c.device_kinds.iter().any(|known| known == kind);
        Chip::all().iter().find(of).ok_or_else(|| ChipError::Device(kind.into()))
    }

    /// Returns an embedded chip by name, or reads one from a TOML file.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Chip::named`] and [`Chip::read`].
    pub fn find(name_or_path: &str) -> Result<Chip, ChipError> {
        match Chip::is_file(name_or_path) {
            true => Chip::read(Path::new(name_or_path)),
            false => Chip::named(name_or_path).cloned(),
        }
    }

    /// Returns whether the value of `--chip` is the path of a file; if not, it is the name of an embedded chip.
    pub fn is_file(name_or_path: &str) -> bool {
        name_or_path.ends_with(".toml") || name_or_path.contains('/')
    }

    /// Returns the chip without its calibration.
    #[must_use]
    pub fn uncalibrated(&self) -> Chip {
        Chip { calibration: None, ..self.clone() }
    }

    /// Replaces the calibration in the text of a chip file. Keeps the data sheet and its comments.
    ///
    /// # Errors
    /// Returns an error if the text is not a valid chip file, or if the calibration cannot be written as TOML, for
    /// example because its versions contain a null.
    pub fn text_with(text: &str, calibration: &Calibration) -> Result<String, String> {
        #[derive(serde::Serialize)]
        struct CalibrationSection<'a> {
            calibration: &'a Calibration,
        }
        let starts = |line: &str| line.starts_with("[calibration") || line.starts_with("[[calibration");
        // The calibration is the last section, because this function writes it there.
        let sheet: String = text.split_inclusive('\n').take_while(|line| !starts(line)).collect();
        let section = toml::to_string(&CalibrationSection { calibration }).map_err(|e| e.to_string())?;
        let text = format!("{}\n\n{section}", sheet.trim_end());
        match toml::from_str::<Chip>(&text) {
            Ok(chip) if chip.calibration.as_ref() == Some(calibration) => Ok(text),
            Ok(_) => Err("the calibration changed when it was read back".into()),
            Err(e) => Err(e.message().into()),
        }
    }

    /// Returns the text of the embedded file of this chip; `None` if the chip is not embedded.
    pub fn file_text(&self) -> Option<&'static str> {
        FILES.into_iter().find(|text| toml::from_str::<Chip>(text).is_ok_and(|chip| chip.name == self.name))
    }

    /// Predicts the time of an instruction.
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
        // Matmuls of other types are assumed to reach the same fraction of their peak as bf16 matmuls.
        let bf16 = plain + others * self.peak_bf16;
        let launch = match (work.attention > 0.0, work.flops > 0.0) {
            (true, _) => attention.latency,
            (false, true) => c.matmul.latency,
            (false, false) => c.kernel_seconds * work.kernels,
        };
        let compute = bf16 / c.matmul.rate + (work.attention + work.idle) / attention.rate;
        OpTime { compute, memory: work.bytes / c.bandwidth, launch }
    }

    /// Returns the FLOPs that idle multiprocessors could do while the others compute attention. The attention takes
    /// `flops` FLOPs and has `queries` queries in each of `heads` heads (counted over all batch rows). Multiprocessors
    /// are idle if there is no tile left for them. 0 if the number of multiprocessors is unknown.
    #[must_use]
    pub fn idle_flops(&self, heads: f64, queries: f64, flops: f64) -> f64 {
        self.processors.map_or(0.0, |processors| idle_flops(processors, heads, queries, flops))
    }

    /// Predicts the seconds of a copy of `bytes` bytes from host memory to the device. `None`: the rate of the link is
    /// unknown.
    #[must_use]
    pub fn host_seconds(&self, bytes: f64) -> Option<f64> {
        let measured = self.calibration.as_ref().and_then(|c| c.host);
        measured.map(|host| host.seconds(bytes)).or_else(|| Some(bytes / self.host_bandwidth?))
    }

    /// Returns the slowdown of a collective and of the work that overlaps with it. `time` is the predicted time of the
    /// work.
    pub(crate) fn contention(&self, time: OpTime) -> Shares {
        let contention = self.calibration.as_ref().and_then(|c| c.contention);
        contention.map_or(Shares::default(), |c| if time.compute > time.memory { c.compute } else { c.memory })
    }

    /// Predicts the seconds that a collective takes if each device receives `wire` bytes. `groups` has the device ids
    /// of each group.
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
    fn embedded_chips_are_valid() {
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
        assert!(message.starts_with("no embedded chip for device 'NVIDIA T4' (known: v5e, "), "{message}");
    }

    #[test]
    fn compute_capability_is_read_from_target_config() {
        let mut chip = Chip::named("h200").unwrap().clone();
        assert_eq!(chip.compute_capability().as_deref(), Some("9.0"));
        assert_eq!(Chip::named("v6e").unwrap().compute_capability(), None);
        chip.target_config = Some("gpu_device_info {\n cuda_compute_capability {\n major: 7\n minor: 5\n }\n}".into());
        assert_eq!(chip.compute_capability().as_deref(), Some("7.5"));
        chip.target_config = Some("platform_name: \"CUDA\"".into());
        assert_eq!(chip.compute_capability(), None);
    }

    #[test]
    fn replacing_the_calibration_keeps_the_data_sheet() {
        let calibration = Chip::named("h200").unwrap().calibration.clone().unwrap();
        let other = Calibration { kernel_seconds: 1e-6, ..calibration.clone() };
        // The first file has no calibration, the second one has.
        let added = Chip::text_with(FILES[0], &other).unwrap();
        assert!(added.starts_with(FILES[0].trim_end()), "{added}");
        let again = Chip::text_with(&added, &calibration).unwrap();
        assert!(again.starts_with(FILES[0].trim_end()) && !again.contains("kernel_seconds = 0.000001"), "{again}");
        assert_eq!(Chip::text_with(&added, &other).unwrap(), added);
        assert!(Chip::text_with("name = 'x'", &other).unwrap_err().contains("missing field"));
    }

    #[test]
    fn chip_file_errors_contain_file_and_key() {
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
            ("host_bandwidth = ", "host_bandwidth = 0 # ", "host_bandwidth is 0, not"),
        ];
        for (old, new, key) in mistakes {
            let message = read(&text.replacen(old, new, 1)).unwrap_err();
            assert!(message.contains("mine.toml: ") && message.contains(key) && !message.contains('\n'), "{message}");
        }
        let message = Chip::find("v9").unwrap_err().to_string();
        assert_eq!(message, "unknown chip 'v9'; known: v5e, v5p, v6e, tpu7x, h200, h100");
    }

    #[test]
    fn link_seconds_match_the_topology_formulas() {
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
            host: Some(cost(1e-5, 50e9)),
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
        near(sheet.host_seconds(56.2e9).unwrap(), 1.0);
        near(h200.host_seconds(50e9).unwrap(), 1.0 + 1e-5);
        assert_eq!(Chip::named("tpu7x").unwrap().host_seconds(1e9), None);
        near(h200.link_seconds(CollectiveKind::AllGather, 3e9, &[vec![0, 1]]), 1e-2 + 1e-5);
        // The data sheet applies between hosts, and to a kind of collective that was not measured.
        near(h200.link_seconds(CollectiveKind::AllGather, 50e9, &[vec![0, 8]]), 1.0);
        near(h200.link_seconds(CollectiveKind::AllReduce, 450e9, &[vec![0, 1]]), 1.0);
    }
}
