//! Compile options, serialized as XLA's `CompileOptionsProto`. The messages are declared here with only the fields in
//! use and with the field numbers of XLA's .proto files.

use std::collections::BTreeMap;
use std::fmt;

use prost::Message;

/// Options of a compilation.
#[derive(Clone, Debug, PartialEq)]
pub struct CompileOptions {
    /// Number of replicas: copies of the program, each of which gets its own arguments.
    pub num_replicas: usize,
    /// Number of devices over which each replica is partitioned.
    pub num_partitions: usize,
    /// Whether to partition by Shardy (`sdy.*`) annotations. If false, the program may only contain `mhlo.sharding`
    /// annotations.
    pub use_shardy: bool,
    /// Global device ids (`num_replicas * num_partitions`): all devices of the first replica, then of the second, and
    /// so on. `None`: the plugin's default.
    pub devices: Option<Vec<i64>>,
    /// XLA flags without leading dashes (`xla_allow_excess_precision`). The plugin returns an error for an unknown
    /// flag.
    pub flags: BTreeMap<String, OptionValue>,
}

/// The value of an XLA flag.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum OptionValue {
    /// A string or the name of an enum value.
    #[prost(string, tag = "1")]
    Text(String),
    /// A boolean.
    #[prost(bool, tag = "2")]
    Bool(bool),
    /// A 64-bit integer.
    #[prost(int64, tag = "3")]
    Int(i64),
    /// A 64-bit float.
    #[prost(double, tag = "4")]
    Float(f64),
}

impl fmt::Display for OptionValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OptionValue::Text(v) => v.fmt(f),
            OptionValue::Bool(v) => v.fmt(f),
            OptionValue::Int(v) => v.fmt(f),
            OptionValue::Float(v) => v.fmt(f),
        }
    }
}

impl Default for CompileOptions {
    fn default() -> Self {
        CompileOptions::single()
    }
}

impl CompileOptions {
    /// Returns the options for one device.
    pub fn single() -> CompileOptions {
        CompileOptions::partitioned(1)
    }

    /// Returns the options for a program that is partitioned over `num_partitions` devices according to its Shardy
    /// annotations.
    pub fn partitioned(num_partitions: usize) -> CompileOptions {
        CompileOptions { num_replicas: 1, num_partitions, use_shardy: true, devices: None, flags: BTreeMap::new() }
    }

    /// Sets an XLA flag.
    pub fn flag(mut self, name: impl Into<String>, value: OptionValue) -> CompileOptions {
        self.flags.insert(name.into(), value);
        self
    }

    /// Returns the serialized `CompileOptionsProto`. Equal options give equal bytes, so a compile cache can use a hash
    /// of them.
    pub fn to_proto(&self) -> Vec<u8> {
        let partitions = self.num_partitions.max(1);
        let device_assignment = self.devices.as_ref().map(|devices| DeviceAssignmentProto {
            replica_count: self.num_replicas as i32,
            computation_count: self.num_partitions as i32,
            // One entry per partition, with the device of the partition in each replica.
            computation_devices: (0..partitions)
                .map(|p| ComputationDevice {
                    replica_device_ids: devices.iter().skip(p).step_by(partitions).copied().collect(),
                })
                .collect(),
        });
        let build = ExecutableBuildOptionsProto {
            device_ordinal: -1,
            num_replicas: self.num_replicas as i64,
            num_partitions: self.num_partitions as i64,
            use_spmd_partitioning: true,
            device_assignment,
            use_shardy_partitioner: self.use_shardy,
        };
        let set = |value: &OptionValue| OptionOverrideProto { value: Some(value.clone()) };
        let overrides = self.flags.iter().map(|(name, value)| (name.clone(), set(value))).collect();
        CompileOptionsProto { build: Some(build), overrides }.encode_to_vec()
    }
}

#[derive(Clone, PartialEq, Message)]
struct CompileOptionsProto {
    #[prost(message, optional, tag = "3")]
    build: Option<ExecutableBuildOptionsProto>,
    #[prost(btree_map = "string, message", tag = "7")]
    overrides: BTreeMap<String, OptionOverrideProto>,
}

#[derive(Clone, PartialEq, Message)]
struct ExecutableBuildOptionsProto {
    #[prost(int64, tag = "1")]
    device_ordinal: i64,
    #[prost(int64, tag = "4")]
    num_replicas: i64,
    #[prost(int64, tag = "5")]
    num_partitions: i64,
    #[prost(bool, tag = "6")]
    use_spmd_partitioning: bool,
    #[prost(message, optional, tag = "9")]
    device_assignment: Option<DeviceAssignmentProto>,
    #[prost(bool, tag = "19")]
    use_shardy_partitioner: bool,
}

#[derive(Clone, PartialEq, Message)]
struct DeviceAssignmentProto {
    #[prost(int32, tag = "1")]
    replica_count: i32,
    #[prost(int32, tag = "2")]
    computation_count: i32,
    #[prost(message, repeated, tag = "3")]
    computation_devices: Vec<ComputationDevice>,
}

#[derive(Clone, PartialEq, Message)]
struct ComputationDevice {
    #[prost(int64, repeated, tag = "1")]
    replica_device_ids: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct OptionOverrideProto {
    #[prost(oneof = "OptionValue", tags = "1, 2, 3, 4")]
    value: Option<OptionValue>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_encode_to_expected_proto_bytes() {
        let options = CompileOptions { devices: Some(vec![0, 3]), ..CompileOptions::partitioned(2) };
        let proto = CompileOptionsProto::decode(&options.to_proto()[..]).unwrap();
        let assignment = proto.build.unwrap().device_assignment.unwrap();
        assert_eq!((assignment.replica_count, assignment.computation_count), (1, 2));
        assert_eq!(assignment.computation_devices[1].replica_device_ids, [3]);
        // One replica and one partition, as every client writes them (field 3 { 4: 1, 5: 1 }), and the fields for the
        // device ordinal and SPMD.
        let single = CompileOptions { use_shardy: false, ..CompileOptions::single() }.to_proto();
        let minus_one = [255, 255, 255, 255, 255, 255, 255, 255, 255, 1];
        let expected = [&[0x1a, 17, 8][..], &minus_one[..], &[0x20, 1, 0x28, 1, 0x30, 1][..]].concat();
        assert_eq!(single, expected);
    }

    #[test]
    fn flag_order_does_not_change_proto_bytes() {
        let flag = |name: &str| (name.to_owned(), OptionValue::Bool(true));
        let a = CompileOptions { flags: [flag("a"), flag("b")].into(), ..Default::default() };
        let b = CompileOptions { flags: [flag("b"), flag("a")].into(), ..Default::default() };
        assert_eq!(a.to_proto(), b.to_proto());
    }
}
