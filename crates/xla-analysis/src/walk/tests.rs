//! Tests the walk on small modules.

use super::super::calibration::Contention;
use super::super::proto::{DotProto, ShapeProto};
use super::super::report;
use super::*;
use crate::sketch::{self, computation, decode, shape};

fn instruction(id: i64, opcode: &str, operands: &[i64], dims: &[i64]) -> InstructionProto {
    let (shape, metadata) = (Some(shape(16, dims)), sketch::scope("blocks/attn1/all_gather"));
    InstructionProto { shape, metadata, ..sketch::instruction(id, opcode, operands) }
}

/// Creates a module whose entry is the last computation.
fn module(computations: Vec<ComputationProto>) -> Module {
    decode(computations.last().map_or(0, |c| c.id), computations).expect("a module")
}

fn mesh() -> Vec<(String, usize)> {
    vec![("context".into(), 2)]
}

const PART: [i64; 2] = [1024, 1024];
const WHOLE: [i64; 2] = [2048, 1024];

/// The TPU compiler distributes an all-gather over several fusions: one starts it, clones of it overlap with other
/// work, and one ends it.
#[test]
fn collective_spread_over_fusions_counts_once() {
    let gather = |id: i64, operand: i64, channel_id: i64| InstructionProto {
        channel_id,
        ..instruction(id, "all-gather", &[operand], &WHOLE)
    };
    let marker = |id: i64, target: &str| InstructionProto {
        custom_call_target: target.into(),
        ..instruction(id, "custom-call", &[], &[])
    };
    let fused = |id: i64, channel: i64, target: Option<&str>| {
        let first = 100 * id;
        let mut all = vec![instruction(first, "parameter", &[], &PART), gather(first + 1, first, channel)];
        all.extend(target.map(|target| marker(first + 2, target)));
        computation(id, all)
    };
    let fusion = |id: i64, operand: i64, called: i64| InstructionProto {
        called_computation_ids: vec![called],
        ..instruction(id, "fusion", &[operand], &WHOLE)
    };
    let start = fused(1, 5, Some("AsyncCollectiveStart"));
    let (beside, end) = (fused(2, 5, None), fused(3, 5, Some("AsyncCollectiveDone")));
    // The second collective has no start: its fusion contains all of it.
    let alone = fused(4, 6, None);
    let entry = vec![
        instruction(1, "parameter", &[], &PART),
        fusion(2, 1, 1),
        fusion(3, 1, 2),
        fusion(4, 1, 3),
        fusion(5, 1, 4),
    ];
    let module = module(vec![start, beside, end, alone, computation(9, entry)]);
    let found = report(&module, &mesh(), &[1], None).collectives;
    let each: Vec<_> = found.iter().map(|c| (c.kind, c.bytes, c.asynchronous)).collect();
    let bytes = (WHOLE[0] * WHOLE[1] * 2) as f64;
    assert_eq!(each, [(CollectiveKind::AllGather, bytes, true), (CollectiveKind::AllGather, bytes, false)]);
}

/// A TPU's SparseCores run an all-gather in a custom call whose start, update and end are separate instructions.
#[test]
fn sparse_core_custom_call_counts_as_its_collective() {
    let calls = |i: InstructionProto, id: i64| InstructionProto { called_computation_ids: vec![id], ..i };
    let gather =
        computation(1, vec![instruction(10, "parameter", &[], &PART), instruction(11, "all-gather", &[10], &WHOLE)]);
    let wrapped = computation(
        2,
        vec![instruction(20, "parameter", &[], &PART), calls(instruction(21, "custom-call", &[20], &WHOLE), 1)],
    );
    let dot = Some(DotProto { lhs_contracting: vec![1] });
    let entry = vec![
        instruction(1, "parameter", &[], &PART),
        calls(instruction(2, "async-start", &[], &WHOLE), 2),
        instruction(3, "async-update", &[2, 1], &WHOLE),
        InstructionProto { dot, ..instruction(4, "dot", &[1, 1], &PART) },
        instruction(5, "async-done", &[3], &WHOLE),
        // The last instruction is a synchronous call.
        calls(instruction(6, "custom-call", &[1], &WHOLE), 1),
    ];
    let module = module(vec![gather, wrapped, computation(9, entry)]);
    let found = report(&module, &mesh(), &[1], None).collectives;
    let each: Vec<_> = found.iter().map(|c| (c.kind, c.bytes, c.asynchronous, c.overlapped)).collect();
    let bytes = (WHOLE[0] * WHOLE[1] * 2) as f64;
    let kind = CollectiveKind::AllGather;
    assert_eq!(each, [(kind, bytes, true, true), (kind, bytes, false, false)]);
}

#[test]
fn loop_cost_is_multiplied_by_trip_count() {
    let dot = Some(DotProto { lhs_contracting: vec![1] });
    let product = InstructionProto { dot, ..instruction(11, "dot", &[10, 10], &PART) };
    let body = computation(1, vec![instruction(10, "parameter", &[], &PART), product]);
    let condition = computation(2, vec![instruction(20, "parameter", &[], &PART)]);
    let repeated = InstructionProto {
        called_computation_ids: vec![1, 2],
        backend_config: br#"{"known_trip_count":{"n":"5"}}"#.to_vec(),
        metadata: None,
        ..instruction(31, "while", &[30], &PART)
    };
    let entry = computation(3, vec![instruction(30, "parameter", &[], &PART), repeated]);
    let report = report(&module(vec![body, condition, entry]), &mesh(), &[5], None);
    let product = 2.0 * 1024f64.powi(3);
    assert_eq!((report.layers, report.layer.flops, report.step.flops), (5.0, product, 5.0 * product));
}

/// Two collectives overlap with one matmul. Together they hide at most the matmul's time, and less if there is
/// contention.
#[test]
fn collectives_hide_at_most_the_time_of_the_work() {
    let h200 = Chip::named("h200").expect("embedded").uncalibrated();
    let mut slowed = Chip::named("h200").expect("embedded").clone();
    let shares = Shares { work: 0.2, collective: 0.1 };
    let calibration = slowed.calibration.as_mut().expect("measured constants");
    calibration.contention = Some(Contention { compute: shares, memory: shares });
    let step = |chip: &Chip, collectives: i64, works: bool| {
        let mut entry = vec![instruction(1, "parameter", &[], &PART)];
        for n in 0..collectives {
            let both = ShapeProto { tuple_shapes: vec![shape(16, &PART), shape(16, &WHOLE)], ..ShapeProto::default() };
            let start = instruction(10 + n, "all-gather-start", &[1], &PART);
            entry.push(InstructionProto { shape: Some(both), ..start });
        }
        if works {
            let dot = Some(DotProto { lhs_contracting: vec![1] });
            entry.push(InstructionProto { dot, ..instruction(20, "dot", &[1, 1], &PART) });
        }
        entry.extend((0..collectives).map(|n| instruction(30 + n, "all-gather-done", &[10 + n], &WHOLE)));
        let report = report(&module(vec![computation(1, entry)]), &mesh(), &[1], Some(chip));
        report.predicted.expect("a chip").step
    };
    let (collective, work) = (step(&slowed, 1, false), step(&slowed, 0, true));
    let slower = step(&slowed, 1, true);
    // The shorter of the two, the work, takes 1 / 0.8 of its time. Meanwhile, the collective runs at 0.9 of its rate.
    let want = work / 0.8 + collective - 0.9 * work / 0.8;
    assert!(work < collective && (slower / want - 1.0).abs() < 1e-9, "{slower} ms, not {want}");
    let (collective, work) = (step(&h200, 1, false), step(&h200, 0, true));
    assert!(work > 0.0 && work < collective, "{work} and {collective} ms");
    for n in 1..=2 {
        let (got, want) = (step(&h200, n, true), n as f64 * collective);
        assert!((got / want - 1.0).abs() < 1e-9, "{n} collectives take {got} ms, not {want}");
    }
}
