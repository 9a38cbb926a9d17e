//! The messages of a device trace (`xplane.proto`), declared by hand: field numbers are the published ones; what is not
//! read here is skipped.

use std::collections::BTreeMap;

use prost::Message;

use super::proto::messages;

messages! {
    /// A trace: planes of devices, of the host, of what ran.
    pub struct XSpace {
        /// A device, a host, a table of programs.
        planes: Vec<XPlane> = 1 [message, repeated],
        errors: Vec<String> = 2 [string, repeated],
        warnings: Vec<String> = 3 [string, repeated],
    }

    /// Parallel lines of one device or host.
    pub struct XPlane {
        /// `/device:GPU:0`, `/device:TPU:0`, `/host:metadata` …
        name: String = 2 [string],
        /// Events that ran one after the other.
        lines: Vec<XLine> = 3 [message, repeated],
        /// Facts that events of one name share, by id.
        event_metadata: BTreeMap<i64, XEventMetadata> = 4 [btree_map = "int64, message"],
        stat_metadata: BTreeMap<i64, XStatMetadata> = 5 [btree_map = "int64, message"],
    }

    /// A stream, a core's unit, a thread.
    pub struct XLine {
        id: i64 = 1 [int64],
        /// `Stream #13(Compute)`, `XLA Ops` …
        name: String = 2 [string],
        /// Origin of the events' offsets.
        timestamp_ns: i64 = 3 [int64],
        /// In any order; on a TPU's line one may contain others.
        events: Vec<XEvent> = 4 [message, repeated],
    }

    /// Something that took time.
    pub struct XEvent {
        metadata_id: i64 = 1 [int64],
        offset_ps: i64 = 2 [int64],
        duration_ps: i64 = 3 [int64],
        stats: Vec<XStat> = 4 [message, repeated],
    }

    /// Facts that events of one name share.
    pub struct XEventMetadata {
        id: i64 = 1 [int64],
        /// Kernel, instruction, or the instruction's whole text.
        name: Vec<u8> = 2 [bytes = "vec"],
        display_name: Vec<u8> = 4 [bytes = "vec"],
        stats: Vec<XStat> = 5 [message, repeated],
    }

    /// A fact's name.
    pub struct XStatMetadata {
        id: i64 = 1 [int64],
        name: String = 2 [string],
    }
}

/// A fact: one of its values is set.
#[derive(Clone, PartialEq, Message)]
pub struct XStat {
    #[prost(int64, tag = "1")]
    pub metadata_id: i64,
    #[prost(oneof = "XValue", tags = "3, 4, 5, 6, 7")]
    pub value: Option<XValue>,
}

/// A fact's value. Text is taken as bytes: recorders cut it off between two bytes of a letter.
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
    /// Text that is the name of another fact.
    #[prost(uint64, tag = "7")]
    Name(u64),
}

impl XPlane {
    /// A fact among `stats` as text; numbers in decimal.
    pub fn text(&self, stats: &[XStat], name: &str) -> Option<String> {
        match self.value(stats, name)? {
            XValue::Unsigned(v) => Some(v.to_string()),
            XValue::Int(v) => Some(v.to_string()),
            XValue::Text(v) | XValue::Bytes(v) => Some(String::from_utf8_lossy(v).into_owned()),
            XValue::Name(id) => Some(self.stat_metadata.get(&(*id as i64))?.name.clone()),
        }
    }

    /// A fact among `stats`.
    pub fn value<'a>(&self, stats: &'a [XStat], name: &str) -> Option<&'a XValue> {
        let named = |stat: &&XStat| self.stat_metadata.get(&stat.metadata_id).is_some_and(|m| m.name == name);
        stats.iter().find(named)?.value.as_ref()
    }

    /// A fact of an event, its own or that of all events of its name.
    pub fn fact(&self, event: &XEvent, name: &str) -> Option<String> {
        let shared = || self.text(&self.event_metadata.get(&event.metadata_id)?.stats, name);
        self.text(&event.stats, name).or_else(shared)
    }

    /// An event's name, the short one where it has one.
    pub fn name_of(&self, event: &XEvent) -> String {
        let Some(metadata) = self.event_metadata.get(&event.metadata_id) else { return String::new() };
        let name = if metadata.display_name.is_empty() { &metadata.name } else { &metadata.display_name };
        String::from_utf8_lossy(name).into_owned()
    }
}

/// The plane of what ran, and the fact that holds a program.
const PROGRAMS: (&str, &str) = ("/host:metadata", "Hlo Proto");

impl XSpace {
    /// Reads a trace.
    ///
    /// # Errors
    /// The protobuf decoder's message.
    pub fn read(bytes: &[u8]) -> Result<XSpace, prost::DecodeError> {
        XSpace::decode(bytes)
    }

    /// The programs that the trace carries, as `HloProto`: its first field is the module, as in `hlo_with_config`.
    pub fn programs(&self) -> impl Iterator<Item = &[u8]> {
        let planes = self.planes.iter().filter(|plane| plane.name == PROGRAMS.0);
        planes.flat_map(|plane| {
            plane.event_metadata.values().filter_map(|m| match plane.value(&m.stats, PROGRAMS.1)? {
                XValue::Bytes(bytes) | XValue::Text(bytes) => Some(bytes.as_slice()),
                _ => None,
            })
        })
    }

    /// Program id that device events refer to.
    pub fn program_id(&self, program: &str) -> Option<i64> {
        let of = |plane: &XPlane, event: &XEvent| {
            let named = plane.fact(event, "hlo_module").is_some_and(|name| name == program);
            if named { plane.fact(event, "program_id")?.parse().ok() } else { None }
        };
        let devices = self.planes.iter().filter(|plane| plane.name.starts_with("/device:"));
        let mut events = devices.flat_map(|p| p.lines.iter().flat_map(|l| &l.events).map(move |e| (p, e)));
        events.find_map(|(plane, event)| of(plane, event))
    }

    /// A trace that carries one program and nothing else. Bytes of two traces behind each other are the trace of both.
    ///
    /// `id` is the program id of the events, `proto` the module's bytes in the form `hlo_with_config`.
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
    fn facts_are_found_by_name_wherever_they_stand() {
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
        assert_eq!(plane.name_of(&event), "nvjet\u{fffd}", "a name that is no UTF-8 does not end the reading");
    }

    #[test]
    fn a_program_is_added_by_appending_and_unknown_fields_are_skipped() {
        let mut bytes = XSpace { warnings: vec!["late".into()], ..XSpace::default() }.encode_to_vec();
        // Field 15 of a later version.
        bytes.extend([0x7a, 2, 1, 2]);
        bytes.extend(XSpace::of_program("denoise", 42, &[0x0a, 3, 0x0a, 1, b'd']));
        let space = XSpace::read(&bytes).unwrap();
        assert_eq!(space.warnings, ["late"]);
        assert_eq!(space.programs().collect::<Vec<_>>(), [[0x0a, 3, 0x0a, 1, b'd']]);
        assert_eq!(space.planes[0].event_metadata[&42].name, b"denoise(42)");
        assert!(XSpace::read(&[0x0a, 9, 1]).is_err());
    }
}
