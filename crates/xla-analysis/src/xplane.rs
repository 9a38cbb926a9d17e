//! The messages of a device trace (`xplane.proto`). They are declared by hand with the published field numbers; unknown
//! fields are skipped.

use std::collections::BTreeMap;

use prost::Message;

use super::proto::messages;

messages! {
    /// A trace, which consists of planes.
    pub struct XSpace {
        /// Planes: one per device, one per host, and one with the programs.
        planes: Vec<XPlane> = 1 [message, repeated],
        /// Errors of the profiler.
        errors: Vec<String> = 2 [string, repeated],
        /// Warnings of the profiler.
        warnings: Vec<String> = 3 [string, repeated],
    }

    /// The timelines of one device or one host.
    pub struct XPlane {
        /// Name of the plane: `/device:GPU:0`, `/device:TPU:0`, `/host:metadata` …
        name: String = 2 [string],
        /// Timelines of events.
        lines: Vec<XLine> = 3 [message, repeated],
        /// Metadata that events with the same name share, by id.
        event_metadata: BTreeMap<i64, XEventMetadata> = 4 [btree_map = "int64, message"],
        stat_metadata: BTreeMap<i64, XStatMetadata> = 5 [btree_map = "int64, message"],
    }

    /// A timeline: that of a GPU stream, of a unit of a TPU core, or of a host thread.
    pub struct XLine {
        id: i64 = 1 [int64],
        /// Name of the timeline: `Stream #13(Compute)`, `XLA Ops` …
        name: String = 2 [string],
        /// Start time in nanoseconds, from which the offsets of events count.
        timestamp_ns: i64 = 3 [int64],
        /// Events in any order. On a TPU, events of a line may be nested.
        events: Vec<XEvent> = 4 [message, repeated],
    }

    /// An event with a duration.
    pub struct XEvent {
        metadata_id: i64 = 1 [int64],
        offset_ps: i64 = 2 [int64],
        duration_ps: i64 = 3 [int64],
        stats: Vec<XStat> = 4 [message, repeated],
    }

    /// Metadata that events with the same name share.
    pub struct XEventMetadata {
        id: i64 = 1 [int64],
        /// Name of a kernel or an instruction, or the text of an instruction.
        name: Vec<u8> = 2 [bytes = "vec"],
        display_name: Vec<u8> = 4 [bytes = "vec"],
        stats: Vec<XStat> = 5 [message, repeated],
    }

    /// The name of a stat (see [`XStat`]).
    pub struct XStatMetadata {
        id: i64 = 1 [int64],
        name: String = 2 [string],
    }
}

/// A stat: a property of an event, with a key and a value.
#[derive(Clone, PartialEq, Message)]
pub struct XStat {
    #[prost(int64, tag = "1")]
    pub metadata_id: i64,
    #[prost(oneof = "XValue", tags = "3, 4, 5, 6, 7")]
    pub value: Option<XValue>,
}

/// The value of a stat. Strings are stored as bytes, because profilers may truncate them in the middle of a UTF-8
/// character.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum XValue {
    #[prost(uint64, tag = "3")]
    Unsigned(u64),
    #[prost(int64, tag = "4")]
    Int(i64),
    #[prost(bytes, tag = "5")]
    Text(Vec<u8>),
    #[prost(bytes, tag = "6")]
    Bytes(Vec<u8>),
    /// A reference to the metadata of another stat; the name of that stat is the value.
    #[prost(uint64, tag = "7")]
    Name(u64),
}

impl XPlane {
    /// Returns the value of the stat called `name` as text; formats numbers in decimal.
    pub fn text(&self, stats: &[XStat], name: &str) -> Option<String> {
        match self.value(stats, name)? {
            XValue::Unsigned(v) => Some(v.to_string()),
            XValue::Int(v) => Some(v.to_string()),
            XValue::Text(v) | XValue::Bytes(v) => Some(String::from_utf8_lossy(v).into_owned()),
            XValue::Name(id) => Some(self.stat_metadata.get(&(*id as i64))?.name.clone()),
        }
    }

    /// Returns the value of the stat called `name`.
    pub fn value<'a>(&self, stats: &'a [XStat], name: &str) -> Option<&'a XValue> {
        let named = |stat: &&XStat| self.stat_metadata.get(&stat.metadata_id).is_some_and(|m| m.name == name);
        stats.iter().find(named)?.value.as_ref()
    }

    /// Returns a stat of an event. If the event does not have it, returns that of the event's metadata.
    pub fn fact(&self, event: &XEvent, name: &str) -> Option<String> {
        let shared = || self.text(&self.event_metadata.get(&event.metadata_id)?.stats, name);
        self.text(&event.stats, name).or_else(shared)
    }

    /// Returns the display name of an event or, if it has none, its name.
    pub fn name_of(&self, event: &XEvent) -> String {
        let Some(metadata) = self.event_metadata.get(&event.metadata_id) else { return String::new() };
        let name = if metadata.display_name.is_empty() { &metadata.name } else { &metadata.display_name };
        String::from_utf8_lossy(name).into_owned()
    }
}

/// Names of the plane that contains programs and of the stat that holds a program.
const PROGRAMS: (&str, &str) = ("/host:metadata", "Hlo Proto");

impl XSpace {
    /// Decodes a trace.
    ///
    /// # Errors
    /// Returns an error if the bytes are not a valid protobuf.
    pub fn read(bytes: &[u8]) -> Result<XSpace, prost::DecodeError> {
        XSpace::decode(bytes)
    }

    /// Returns the programs in the trace as `HloProto` messages. The first field of an `HloProto` is the module, as in
    /// `hlo_with_config`.
    pub fn programs(&self) -> impl Iterator<Item = &[u8]> {
        let planes = self.planes.iter().filter(|plane| plane.name == PROGRAMS.0);
        planes.flat_map(|plane| {
            plane.event_metadata.values().filter_map(|m| match plane.value(&m.stats, PROGRAMS.1)? {
                XValue::Bytes(bytes) | XValue::Text(bytes) => Some(bytes.as_slice()),
                _ => None,
            })
        })
    }

    /// Returns the id by which device events refer to the program with this name; `None` if no event refers to it.
    pub fn program_id(&self, program: &str) -> Option<i64> {
        let of = |plane: &XPlane, event: &XEvent| {
            let named = plane.fact(event, "hlo_module").is_some_and(|name| name == program);
            if named { plane.fact(event, "program_id")?.parse().ok() } else { None }
        };
        let devices = self.planes.iter().filter(|plane| plane.name.starts_with("/device:"));
        let mut events = devices.flat_map(|p| p.lines.iter().flat_map(|l| &l.events).map(move |e| (p, e)));
        events.find_map(|(plane, event)| of(plane, event))
    }

    /// Serializes a trace that contains only one program. Appending its bytes to those of another trace merges the two
    /// traces.
    ///
    /// `id` is the program id that events refer to; `proto` is the module in the `hlo_with_config` format.
    pub fn of_program(name: &str, id: i64, proto: &[u8]) -> Vec<u8> {
        let stats = vec![XStat { metadata_id: 1, value: Some(XValue::Bytes(proto.to_vec())) }];
        let metadata = XEventMetadata { id, name: format!("{name}({id})").into(), stats, ..XEventMetadata::default() };
        let plane = XPlane {
            name: PROGRAMS.0.into(),
            event_metadata: [(id, metadata)].into(),
            stat_metadata: [(1, XStatMetadata { id: 1, name: PROGRAMS.1.into() })].into(),
            ..XPlane::default()
        };
        XSpace { planes: vec![plane], ..XSpace::default() }.encode_to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_are_found_in_event_or_metadata() {
        let fact = |id: i64, name: &str| (id, XStatMetadata { id, name: name.into() });
        let stat = |metadata_id: i64, value: XValue| XStat { metadata_id, value: Some(value) };
        let shared = vec![stat(2, XValue::Name(3))];
        let metadata = XEventMetadata { id: 7, name: b"nvjet\xff".to_vec(), stats: shared, ..Default::default() };
        let event =
            XEvent { metadata_id: 7, stats: vec![stat(1, XValue::Text(b"dot.1".to_vec()))], ..Default::default() };
        let plane = XPlane {
            name: "/device:GPU:0".into(),
            event_metadata: [(7, metadata)].into(),
            stat_metadata: [fact(1, "hlo_op"), fact(2, "hlo_module"), fact(3, "denoise")].into(),
            lines: vec![XLine { events: vec![event.clone()], ..Default::default() }],
        };
        assert_eq!(plane.fact(&event, "hlo_op").as_deref(), Some("dot.1"));
        assert_eq!(plane.fact(&event, "hlo_module").as_deref(), Some("denoise"));
        assert_eq!(plane.fact(&event, "flops"), None);
        assert_eq!(plane.name_of(&event), "nvjet\u{fffd}", "invalid UTF-8 in a name is replaced");
    }

    #[test]
    fn appended_program_is_read_and_unknown_fields_are_skipped() {
        let mut bytes = XSpace { warnings: vec!["late".into()], ..XSpace::default() }.encode_to_vec();
        // Field 15 stands for a field that a later version adds.
        bytes.extend([0x7a, 2, 1, 2]);
        bytes.extend(XSpace::of_program("denoise", 42, &[0x0a, 3, 0x0a, 1, b'd']));
        let space = XSpace::read(&bytes).unwrap();
        assert_eq!(space.warnings, ["late"]);
        assert_eq!(space.programs().collect::<Vec<_>>(), [[0x0a, 3, 0x0a, 1, b'd']]);
        assert_eq!(space.planes[0].event_metadata[&42].name, b"denoise(42)");
        assert!(XSpace::read(&[0x0a, 9, 1]).is_err());
    }
}
