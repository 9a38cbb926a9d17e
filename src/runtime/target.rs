//! Devices that a program is compiled for without being there: `tpu:v6e:2x4`, `cuda:h200:1x1x4`, `cpu:8`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::cache::{Cache, CacheError, device_kind};
use super::engine::{EngineOptions, compile_known, compile_options};
use super::platform::hardware;
use super::sealed::sha256;
use crate::analysis::{CHIPS, Chip, Links};
use crate::hlo::Program;
use crate::pjrt::discover::{self, Kind};
use crate::pjrt::{
    Attributes, Client, ClientOptions, CompileOptions, CpuOptions, CudaOptions, Error, Executable, LoadedExecutable,
    Plugin, Topology, Value,
};

/// The H200, in the words of XLA's compiler for GPUs.
const H200: &str = include_str!("targets/h200.txtpb");

/// What to compile for.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    kind: Kind,
    chip: Option<&'static Chip>,
    /// Chips along each dimension; for GPUs partitions, hosts, devices a host; virtual CPU devices.
    shape: Vec<usize>,
    /// Of a TPU: as many of that shape, with a network between them.
    slices: usize,
}

/// A target that does not exist.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("target '{target}': {why}; targets are tpu:CHIP:AxB or AxBxC, with :N for N slices of it, CHIP one of {chips}, cuda:h200:PARTITIONSxHOSTSxDEVICES and cpu:DEVICES, e.g. tpu:v6e:2x4, cuda:h200:1x1x4, cpu:8", chips = tpus())]
pub struct UnknownTarget {
    target: String,
    why: String,
}

fn tpus() -> String {
    let names: Vec<&str> = CHIPS.iter().map(|c| c.name).filter(|n| *n != "h200").collect();
    names.join(", ")
}

impl FromStr for Target {
    type Err = UnknownTarget;

    fn from_str(text: &str) -> Result<Self, UnknownTarget> {
        let fail = |why: String| Err(UnknownTarget { target: text.into(), why });
        let parts: Vec<&str> = text.split(':').collect();
        let shape = |text: &str| -> Option<Vec<usize>> {
            text.split('x').map(|n| n.parse().ok().filter(|n| (1..=4096).contains(n))).collect()
        };
        let (parts, slices) = match parts.as_slice() {
            [shape @ .., count] if parts.len() == 4 && parts[0] == "tpu" => {
                match count.parse().ok().filter(|n| (1..=256).contains(n)) {
                    Some(n) => (shape, n),
                    None => return fail(format!("'{count}' is not a number of slices")),
                }
            }
            all => (all, 1),
        };
        let (kind, name, shape) = match parts {
            ["cpu", n] => (Kind::Cpu, None, shape(n).filter(|s| s.len() == 1)),
            ["cuda", name, s] => (Kind::Cuda, Some(*name), shape(s).filter(|s| s.len() == 3)),
            ["tpu", name, s] => (Kind::Tpu, Some(*name), shape(s).filter(|s| (2..=3).contains(&s.len()))),
            [platform, ..] if !["cpu", "cuda", "tpu"].contains(platform) => {
                return fail(format!("'{platform}' is no platform"));
            }
            _ => return fail("not of that form".into()),
        };
        let chip = match name.map(|n| (n, Chip::named(n).filter(|c| (c.name == "h200") == (kind == Kind::Cuda)))) {
            Some((name, None)) => return fail(format!("no figures of chip '{name}'")),
            Some((_, found)) => found,
            None => None,
        };
        match shape {
            Some(shape) => Ok(Target { kind, chip, shape, slices }),
            None => fail(format!("'{}' is not a shape of it", parts.last().unwrap_or(&""))),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.chip {
            Some(chip) if self.slices > 1 => {
                write!(f, "{}:{}:{}:{}", self.kind.name(), chip.name, self.shape_text(), self.slices)
            }
            Some(chip) => write!(f, "{}:{}:{}", self.kind.name(), chip.name, self.shape_text()),
            None => write!(f, "{}:{}", self.kind.name(), self.shape_text()),
        }
    }
}

/// A target ready to compile for.
pub struct Machine {
    /// The target.
    pub target: Target,
    /// Device ids, in the order in which meshes count them.
    pub devices: Vec<i32>,
    /// What the plugin calls such a device.
    pub device_kind: String,
    /// Bytes a program may use on a device, where there is a limit.
    pub capacity: Option<i64>,
    compiler: Compiler,
}

enum Compiler {
    Absent(Topology),
    /// The CPU plugin compiles for its own virtual devices only; GPUs that are here choose kernels themselves.
    Here(Client),
}

/// A program compiled for a target.
pub enum Compiled {
    /// For devices that are not here: it can be looked at and serialized.
    Absent(Executable),
    /// For virtual devices, or devices that are here.
    Here(LoadedExecutable),
}

impl std::ops::Deref for Compiled {
    type Target = Executable;

    fn deref(&self) -> &Executable {
        match self {
            Compiled::Absent(e) => e,
            Compiled::Here(e) => e,
        }
    }
}

impl Machine {
    /// What the plugin says of its own version.
    pub fn version(&self) -> String {
        let version = match &self.compiler {
            Compiler::Absent(topology) => topology.platform_version(),
            Compiler::Here(client) => client.platform_version(),
        };
        version.unwrap_or_default()
    }

    /// Whether the devices took part in compiling, so that nothing is left for a run to choose.
    pub fn is_here(&self) -> bool {
        matches!(self.compiler, Compiler::Here(_))
    }
}

impl Target {
    /// The platform.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Slices with a network between them.
    pub fn slices(&self) -> usize {
        self.slices
    }

    /// The figures of a device among those of the target; a CPU has none.
    pub fn chip(&self) -> Option<Chip> {
        let chip = self.chip?.calibrated();
        match (chip.links, self.shape.last()) {
            (Links::Switch { each_way, network, .. }, Some(&host)) => {
                Some(Chip { links: Links::Switch { each_way, network, host }, ..chip })
            }
            _ => Some(chip),
        }
    }

    fn shape_text(&self) -> String {
        self.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
    }

    fn plugin(&self) -> Result<Plugin, Error> {
        let search = discover::find(self.kind, None);
        Plugin::load(&search.found.first().ok_or_else(|| search.not_found())?.path)
    }

    /// The GPUs of this host, where they are as many and of the kind: what they compile is complete, and they hold no memory
    /// until it runs. Otherwise as [`Target::open`].
    ///
    /// # Errors
    /// As [`Target::open`]; GPUs that the plugin cannot start.
    pub fn open_present(&self) -> Result<Machine, Error> {
        let absent = self.open()?;
        if self.kind != Kind::Cuda || hardware(Kind::Cuda).is_err() {
            return Ok(absent);
        }
        let options = CudaOptions { preallocate: Some(false), ..CudaOptions::default() };
        let client = Client::new(&self.plugin()?, &ClientOptions::Cuda(options))?;
        let here = client.devices();
        if here.len() < absent.devices.len() || here.iter().any(|d| d.kind() != absent.device_kind) {
            return Ok(absent);
        }
        let devices = here.iter().take(absent.devices.len()).map(crate::pjrt::Device::id).collect();
        Ok(Machine { devices, compiler: Compiler::Here(client), ..absent })
    }

    /// Loads the plugin that compiles for this target and asks it for the devices.
    ///
    /// # Errors
    /// No plugin, or a topology that it does not know.
    pub fn open(&self) -> Result<Machine, Error> {
        let plugin = self.plugin()?;
        let attributes = |values: &[(&str, &str)]| -> Attributes {
            values.iter().map(|(k, v)| ((*k).to_string(), Value::Text((*v).to_string()))).collect()
        };
        let shape = self.shape_text();
        let chip = self.chip.map_or("", |c| c.name);
        let topology = match self.kind {
            Kind::Cpu => {
                let options = CpuOptions { devices: self.shape.first().copied(), ..CpuOptions::default() };
                let client = Client::new(&plugin, &ClientOptions::Cpu(options))?;
                let devices = client.devices().iter().map(crate::pjrt::Device::id).collect();
                let device_kind = client.devices().first().map(|d| d.kind().to_owned()).unwrap_or_default();
                let compiler = Compiler::Here(client);
                return Ok(Machine { target: self.clone(), devices, device_kind, capacity: None, compiler });
            }
            Kind::Cuda => {
                let options = attributes(&[("target_config", H200), ("topology", &shape)]);
                Topology::new(&plugin, chip, &options)?
            }
            Kind::Tpu => {
                let slices = (self.slices > 1).then_some(("num_slices".into(), Value::Int(self.slices as i64)));
                Topology::new(&plugin, &format!("{chip}:{shape}"), &slices.into_iter().collect())?
            }
        };
        let described = topology.devices()?;
        let stated = described.first().and_then(|d| match d.attributes.get("device_memory_bytes_limit") {
            Some(Value::Int(bytes)) => Some(*bytes),
            _ => None,
        });
        Ok(Machine {
            target: self.clone(),
            device_kind: described.first().map(|d| d.kind.clone()).unwrap_or_default(),
            devices: described.iter().map(|d| d.id).collect(),
            // A GPU's topology repeats the card's size, of which the driver keeps a part.
            capacity: [stated, self.chip.map(|c| c.capacity)].into_iter().flatten().min(),
            compiler: Compiler::Absent(topology),
        })
    }
}

impl Machine {
    /// The options that a run on such devices compiles with.
    pub fn compile_options(&self, program: &Program, options: &EngineOptions) -> CompileOptions {
        compile_options(self.target.kind.name(), program, &self.devices, options)
    }

    /// The compile cache in a folder, with the names that a run on such devices looks for.
    ///
    /// # Errors
    /// As [`Cache::new`].
    pub fn cache(&self, folder: &Path) -> Result<Cache, CacheError> {
        Cache::new(folder, self.target.kind.name(), &self.topology()?)
    }

    fn topology(&self) -> Result<Topology, Error> {
        match &self.compiler {
            Compiler::Absent(topology) => Ok(topology.clone()),
            Compiler::Here(client) => client.topology(),
        }
    }

    /// The file of the plugin that compiles.
    pub(super) fn plugin_path(&self) -> Result<PathBuf, Error> {
        Ok(self.topology()?.plugin().path().to_path_buf())
    }

    /// The kind of the devices, as far as a module depends on it: a GPU that is not here is also what its description
    /// says.
    pub(super) fn device_identity(&self) -> Result<String, CacheError> {
        let topology = self.topology()?;
        let kind = device_kind(self.target.kind.name(), &topology, &topology.devices()?)?;
        Ok(match self.target.kind {
            Kind::Cuda => format!("{kind} {}", &sha256(H200.as_bytes())[..16]),
            _ => kind,
        })
    }

    /// Compiles a program, with the options that a run on such devices uses. The compile cache is not read.
    ///
    /// # Errors
    /// The compiler's message.
    pub fn compile(&self, program: &Program, options: &EngineOptions) -> Result<Compiled, Error> {
        compile_known(self.target.kind.name(), &self.compile_options(program, options), options, |o| {
            Ok(match &self.compiler {
                Compiler::Absent(topology) => Compiled::Absent(topology.compile(&program.text, o)?),
                Compiler::Here(client) => Compiled::Here(client.compile(&program.text, o)?),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read_and_written() {
        for text in [
            "tpu:v6e:2x4",
            "tpu:v5p:2x2x2",
            "tpu:v5e:4x4",
            "tpu:v6e:2x4:2",
            "tpu:tpu7x:2x2x1",
            "cuda:h200:1x1x4",
            "cpu:8",
        ] {
            let target: Target = text.parse().expect(text);
            assert_eq!(target.to_string(), text);
            assert_eq!(target.chip().is_none(), text.starts_with("cpu"));
        }
        let why = |text: &str| text.parse::<Target>().expect_err(text).why;
        assert_eq!(why("gpu:h200:1x1x4"), "'gpu' is no platform");
        assert_eq!(why("tpu:v9:2x2"), "no figures of chip 'v9'");
        assert_eq!(why("tpu:h200:2x2"), "no figures of chip 'h200'");
        assert_eq!(why("cuda:h200:4"), "'4' is not a shape of it");
        assert_eq!(why("tpu:v6e:2x4:0"), "'0' is not a number of slices");
        assert_eq!(why("cpu:0"), "'0' is not a shape of it");
        assert_eq!(why("tpu"), "not of that form");
        let message = "tpu:v6e".parse::<Target>().expect_err("no shape").to_string();
        assert!(message.contains("v5e, v5p, v6e, tpu7x") && message.contains("tpu:v6e:2x4"), "{message}");
    }
}
