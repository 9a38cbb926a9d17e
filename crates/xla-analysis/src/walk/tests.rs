//! Tests the walk on small modules.

use super::super::calibration::Contention;
use super::super::proto::{DotProto, LayoutProto, ShapeProto};
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

/// Two collectives overlap with one matmul. The overlapped time is at most the time of the matmul, and less if there is
/// contention.
#[test]
fn overlap_is_at_most_the_time_of_the_matmul() {
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

/// Returns a copy instruction of [`PART`] from host memory, or of another array in device memory.
fn copied(id: i64, opcode: &str, operand: i64, from: ShapeProto) -> InstructionProto {
    let to = shape(16, &PART);
    let both = ShapeProto { tuple_shapes: vec![to.clone(), from], ..ShapeProto::default() };
    InstructionProto {
        shape: Some(if opcode == "copy-start" { both } else { to }),
        ..instruction(id, opcode, &[operand], &PART)
    }
}

fn in_host(dims: &[i64]) -> ShapeProto {
    ShapeProto { layout: Some(LayoutProto { memory_space: 5, ..LayoutProto::default() }), ..shape(16, dims) }
}

/// Copies from host memory use one link: the second one starts when the first one ends. Only the time until the end of
/// a copy that the work does not cover is exposed.
#[test]
fn copies_from_host_memory_queue_on_one_link() {
    let bytes = (PART[0] * PART[1] * 2) as f64;
    let sheet = Chip::named("h200").expect("embedded").uncalibrated();
    let predicted = |chip: &Chip, entry: Vec<InstructionProto>| {
        let report = report(&module(vec![computation(1, entry)]), &mesh(), &[1], Some(chip));
        (report.predicted.expect("a chip"), report)
    };
    let parameter = InstructionProto { shape: Some(in_host(&PART)), ..instruction(1, "parameter", &[], &PART) };
    let dot = |id, operand| InstructionProto {
        dot: Some(DotProto { lhs_contracting: vec![1] }),
        ..instruction(id, "dot", &[operand, operand], &PART)
    };
    let start = |id| copied(id, "copy-start", 1, in_host(&PART));
    let done = |id, start| instruction(id, "copy-done", &[start], &PART);
    let argument = instruction(2, "parameter", &[], &PART);
    let work = predicted(&sheet, vec![argument.clone(), dot(3, 2)]).0.step;
    // A copy takes 1.5 times as long as a matmul.
    let chip = Chip { host_bandwidth: Some(bytes / (1.5 * work * 1e-3)), ..sheet.clone() };
    let near = |got: f64, want: f64| assert!((got - want * work).abs() < 1e-9, "{got}, not {}", want * work);
    // The copies end after 1.5 and 3 matmuls. The second matmul waits for the first copy, the third for the second.
    let early = vec![
        parameter.clone(),
        argument.clone(),
        start(4),
        start(5),
        dot(6, 2),
        done(7, 4),
        dot(8, 7),
        done(9, 5),
        dot(10, 9),
    ];
    let (p, report) = predicted(&chip, early);
    near(p.host_copy, 3.0);
    near(p.exposed_host_copy, 0.5 + 0.5);
    near(p.step, 3.0 + 1.0);
    assert_eq!((report.step.host, report.step.bytes), (2.0 * bytes, 3.0 * 3.0 * bytes));
    let block = report.predicted_layer.expect("a block");
    assert_eq!(
        (report.layer.host, block.host_copy, block.exposed_host_copy),
        (2.0 * bytes, p.host_copy, p.exposed_host_copy)
    );
    let copies = report.scopes.iter().find(|s| s.category == OpCategory::HostCopy).expect("copies");
    near(copies.ms, 3.0);
    // A synchronous copy overlaps with nothing.
    let at_once = vec![parameter.clone(), argument.clone(), dot(6, 2), copied(7, "copy", 1, in_host(&PART)), dot(8, 7)];
    let (p, _) = predicted(&chip, at_once);
    near(p.exposed_host_copy, 1.5);
    near(p.step, 2.0 + 1.5);
    // A copy of the device's memory uses no link; the rate of some links is unknown.
    let (p, report) =
        predicted(&chip, vec![argument.clone(), copied(4, "copy-start", 2, shape(16, &PART)), done(5, 4)]);
    assert_eq!((p.host_copy, report.step.host, report.step.bytes), (0.0, 0.0, 2.0 * bytes));
    let (p, report) = predicted(&Chip { host_bandwidth: None, ..chip }, vec![parameter, start(4), done(5, 4)]);
    assert_eq!((p.host_copy, p.step, report.step.host), (0.0, 0.0, bytes));
}

/// A TPU program slices one layer of a stack in host memory. The slice is the root of an asynchronous computation.
#[test]
fn asynchronous_slice_of_a_stack_in_host_memory_copies_one_layer() {
    let stack = InstructionProto { shape: Some(in_host(&[8, 1024, 1024])), ..instruction(10, "parameter", &[], &[]) };
    let sliced = vec![stack.clone(), instruction(11, "dynamic-slice", &[10], &[1, 1024, 1024])];
    let start = InstructionProto { called_computation_ids: vec![1], ..instruction(3, "async-start", &[2], &PART) };
    let entry = vec![InstructionProto { id: 2, ..stack }, start, instruction(4, "async-done", &[3], &PART)];
    let module = module(vec![computation(1, sliced), computation(2, entry)]);
    let v6e = Chip::named("v6e").expect("embedded");
    let report = report(&module, &mesh(), &[8], Some(v6e));
    let bytes = (PART[0] * PART[1] * 2) as f64;
    let p = report.predicted.expect("a chip");
    assert_eq!((report.step.host, report.step.bytes), (bytes, 0.0));
    let want = v6e.host_seconds(bytes).expect("known") * 1e3;
    assert_eq!((p.host_copy, p.exposed_host_copy, p.step), (want, want, want));
}
