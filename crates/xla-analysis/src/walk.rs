//! Walks a module from its entry through loops, calls and conditionals. Collects every collective with the number of
//! its runs, and determines which work overlaps with it and with copies from host memory.

use std::collections::{BTreeMap, HashSet};

use super::calibration::Shares;
use super::category::{OpCategory, Purpose};
use super::chip::{Chip, Links, OpTime};
use super::collective::{AsyncPart, Collective, CollectiveKind, dtypes_and_bytes};
use super::cost::{Counter, Work};
use super::groups::span;
use super::level::{BLOCKS, LoopLevel, in_blocks};
use super::module::Module;
use super::proto::{ComputationProto, InstructionProto};
use super::shape;
use super::stacks::{StackCopy, Stacks};
use super::trips::CallStack;

/// Predicted seconds, from the roofline and link model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Time {
    pub compute: f64,
    pub memory: f64,
    pub launch: f64,
    pub collective: f64,
    /// Copies between host memory and the device.
    pub host: f64,
    /// Part of `host` in which the device waits for a copy.
    pub exposed_host: f64,
    pub total: f64,
}

impl Time {
    fn add(&mut self, other: Time, times: f64) {
        self.compute += other.compute * times;
        self.memory += other.memory * times;
        self.launch += other.launch * times;
        self.collective += other.collective * times;
        self.host += other.host * times;
        self.exposed_host += other.exposed_host * times;
        self.total += other.total * times;
    }
}

/// Work and predicted time of one run of a computation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Cost {
    pub work: Work,
    pub time: Time,
}

impl Cost {
    pub(crate) fn add(&mut self, other: Cost, times: f64) {
        self.work.add(other.work, times);
        self.time.add(other.time, times);
    }
}

pub(super) struct Walk<'a> {
    module: &'a Module,
    mesh: &'a [(String, usize)],
    chip: Option<&'a Chip>,
    counter: Counter<'a>,
    stacks: Stacks,
    /// Channel ids of collectives that start in one fusion and end in another.
    started: HashSet<i64>,
    pub collectives: Vec<Collective>,
    pub copies: Vec<StackCopy>,
    /// Cost of one iteration of the loop over steps.
    pub step: Option<Cost>,
    /// Cost of one transformer block, and the number of blocks per step.
    pub layer: Option<(Cost, f64)>,
    /// Cost per step of the instructions in the name scope of transformer blocks that are unrolled.
    pub unrolled: Cost,
    /// Predicted seconds per step by name scope and category, without overlap.
    pub scopes: BTreeMap<(String, OpCategory), f64>,
}

/// The computation that the walk has reached: the loops around it, and its number of runs.
#[derive(Clone, Copy)]
struct WalkPosition<'a> {
    level: LoopLevel,
    /// Number of runs of the computation per call, step or block, depending on `level`.
    times: f64,
    /// Number of runs of the computation per step; 0 outside the loop over steps.
    per_step: f64,
    entered: Option<&'a CallStack<'a>>,
    /// Id of the `while` instruction in the computation that iterates over the most blocks. Loops over fewer blocks of
    /// another kind count as part of the step.
    blocks: Option<i64>,
}

/// An asynchronous collective, with the schedule positions of its start and its end.
struct InFlight {
    from: usize,
    to: usize,
    seconds: f64,
    index: usize,
}

/// A copy between host memory and the device, with the schedule positions of its start and of the instruction that
/// waits for its end. They are equal if the copy is synchronous.
struct HostCopy {
    from: usize,
    to: usize,
    bytes: f64,
    seconds: f64,
    /// Whether the copy is in an unrolled transformer block.
    unrolled: bool,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(
        module: &'a Module,
        mesh: &'a [(String, usize)],
        layers: &[usize],
        chip: Option<&'a Chip>,
    ) -> Self {
        let mut started = HashSet::new();
        for c in module.computations() {
            let parts = module.fused_collectives(c);
            let starts = parts.iter().filter(|(p, i)| *p == AsyncPart::Start && i.channel_id > 0);
            started.extend(starts.map(|(_, i)| i.channel_id));
        }
        let on_chip = chip.is_some_and(|c| matches!(c.links, Links::Torus { .. }));
        Walk {
            module,
            mesh,
            chip,
            counter: Counter { module, on_chip, processors: chip.and_then(|c| c.processors) },
            stacks: Stacks::collect(module, layers),
            started,
            collectives: Vec::new(),
            copies: Vec::new(),
            step: None,
            layer: None,
            unrolled: Cost::default(),
            scopes: BTreeMap::new(),
        }
    }

    /// Walks the module. Returns the cost of the part that is outside the loop over steps.
    pub(crate) fn run(&mut self) -> Cost {
        let Some(entry) = self.module.computation(self.module.entry()) else { return Cost::default() };
        let level = if self.has_data_loop(entry, None) { LoopLevel::Outside } else { LoopLevel::Step };
        let per_step = if level == LoopLevel::Step { 1.0 } else { 0.0 };
        let cost = self.visit(entry, WalkPosition { level, times: 1.0, per_step, entered: None, blocks: None });
        if level == LoopLevel::Step {
            self.step = Some(cost);
            return Cost::default();
        }
        cost
    }

    fn has_data_loop(&self, c: &ComputationProto, entered: Option<&CallStack>) -> bool {
        c.instructions.iter().any(|i| match i.opcode.as_str() {
            "while" => match self.module.trip_count(i, entered) {
                None => true,
                Some(_) => self
                    .module
                    .body_and_condition(i)
                    .is_some_and(|(body, _)| self.has_data_loop(body, Some(&CallStack { by: i, from: entered }))),
            },
            "call" | "conditional" => i.called_computation_ids.iter().any(|&id| {
                let inside = CallStack { by: i, from: entered };
                self.module.computation(id).is_some_and(|c| self.has_data_loop(c, Some(&inside)))
            }),
            _ => false,
        })
    }

    fn visit(&mut self, c: &'a ComputationProto, at: WalkPosition) -> Cost {
        let order = self.module.scheduled(c);
        let loops = order.iter().filter(|i| i.opcode == "while" && self.is_over_blocks(i));
        let blocks = loops.max_by_key(|i| self.module.trip_count(i, at.entered)).map(|i| i.id);
        let at = WalkPosition { blocks, ..at };
        let position: BTreeMap<i64, usize> = order.iter().enumerate().map(|(n, i)| (i.id, n)).collect();
        let mut total = Cost::default();
        // For each position, the seconds of work that can overlap with a collective, and how much the two slow each
        // other down.
        let mut free = vec![0.0; order.len()];
        let mut shares = vec![Shares::default(); order.len()];
        let mut works = vec![false; order.len()];
        let mut in_flight = Vec::new();
        let mut host_copies = Vec::new();
        // For each position, the seconds that pass there if no copy from host memory is waited for.
        let mut passed = vec![0.0; order.len()];
        for (n, i) in order.iter().enumerate() {
            self.copies.extend(self.stacks.copy(self.module, i, at.level, at.times));
            let cost = self.instruction(i, at);
            free[n] = cost.time.total;
            passed[n] += cost.time.total;
            let parts = OpTime { compute: cost.time.compute, memory: cost.time.memory, launch: cost.time.launch };
            shares[n] = self.chip.map_or(Shares::default(), |chip| chip.contention(parts));
            works[n] = cost.work.flops > 0.0 || (cost.work.bytes > 0.0 && !moves_only(i));
            total.add(cost, 1.0);
            host_copies.extend(self.host_copy(i, n, at, &order, &position));
            for (collective, end) in self.collectives_of(i, &order, &position) {
                let (entry, groups) = match self.describe(collective, i, at) {
                    Some(described) => described,
                    None => continue,
                };
                let seconds = self.chip.map_or(0.0, |chip| chip.link_seconds(entry.kind, entry.wire_bytes, &groups));
                let index = self.collectives.len();
                let unrolled = at.level == LoopLevel::Step && in_blocks(&entry.scope);
                self.note(i, seconds * at.per_step);
                self.collectives.push(Collective { seconds, asynchronous: end.is_some(), ..entry });
                let time = Time { collective: seconds, total: seconds, ..Time::default() };
                total.add(Cost { time, ..Cost::default() }, 1.0);
                if unrolled {
                    self.unrolled.add(Cost { time, ..Cost::default() }, at.times);
                }
                match end {
                    Some(to) => in_flight.push(InFlight { from: n, to, seconds, index }),
                    None => passed[n] += seconds,
                }
            }
        }
        in_flight.sort_by_key(|b| b.to);
        for b in in_flight {
            // If the end is not in this computation, the collective continues into the next iteration.
            let range: Vec<usize> = if b.to > b.from {
                (b.from + 1..b.to).collect()
            } else {
                (b.from + 1..order.len()).chain(0..b.to).collect()
            };
            self.collectives[b.index].overlapped = range.iter().any(|&n| works[n]);
            let mut left = b.seconds;
            let mut hidden = 0.0;
            for n in range {
                let (both, done, moved) = shares[n].together(free[n], left);
                free[n] -= done;
                left -= moved;
                hidden += done + moved - both;
            }
            total.time.total -= hidden;
            passed[b.to] += b.seconds - hidden;
            if at.level == LoopLevel::Step && in_blocks(&self.collectives[b.index].scope) {
                self.unrolled.time.total -= hidden * at.times;
            }
        }
        for (copy, wait) in host_copies.iter().zip(waits(&passed, &host_copies)) {
            let time = Time { host: copy.seconds, exposed_host: wait, total: wait, ..Time::default() };
            total.time.add(time, 1.0);
            if copy.unrolled {
                self.unrolled.add(Cost { work: Work { host: copy.bytes, ..Work::default() }, time }, at.times);
            }
        }
        total
    }

    /// Describes an instruction that performs or starts a copy between host memory and the device; `None` for other
    /// instructions.
    fn host_copy(
        &mut self,
        i: &'a InstructionProto,
        from: usize,
        at: WalkPosition,
        order: &[&'a InstructionProto],
        position: &BTreeMap<i64, usize>,
    ) -> Option<HostCopy> {
        let bytes = shape::bytes(self.module.host_copy(i)?) as f64;
        let seconds = self.chip.and_then(|chip| chip.host_seconds(bytes)).unwrap_or(0.0);
        self.note(i, seconds * at.per_step);
        let to = if i.opcode.ends_with("-start") { end_of(i, order, position) } else { from };
        // If the end is not in this computation, wait for the copy at the end of the computation.
        let to = if to < from { order.len() } else { to };
        let unrolled = at.level == LoopLevel::Step && in_blocks(&self.module.purpose(i).scope);
        Some(HostCopy { from, to, bytes, seconds, unrolled })
    }

    /// Returns the cost of an instruction, including the computations that it calls.
    fn instruction(&mut self, i: &'a InstructionProto, at: WalkPosition) -> Cost {
        match i.opcode.as_str() {
            _ if self.module.host_copy(i).is_some() => Cost { work: self.counter.work(i), ..Cost::default() },
            "while" => self.repeated(i, at),
            "call" | "conditional" | "async-start" => {
                let mut cost = Cost::default();
                if i.opcode == "async-start" && self.module.wrapped_collective(i).is_some() {
                    return cost;
                }
                let inside = CallStack { by: i, from: at.entered };
                for &id in &i.called_computation_ids {
                    if let Some(c) = self.module.computation(id) {
                        cost.add(self.visit(c, WalkPosition { entered: Some(&inside), ..at }), 1.0);
                    }
                }
                cost
            }
            _ => {
                let work = self.counter.work(i);
                let s = self.chip.map(|c| c.op_time(work)).unwrap_or_default();
                let time = Time {
                    compute: s.compute,
                    memory: s.memory,
                    launch: s.launch,
                    total: s.total(),
                    ..Time::default()
                };
                let cost = Cost { work, time };
                self.note(i, time.total * at.per_step);
                if at.level == LoopLevel::Step && in_blocks(self.module.scope_of(i).as_ref()) {
                    self.unrolled.add(cost, at.times);
                }
                cost
            }
        }
    }

    /// Adds seconds to the sum for an instruction's name scope and category.
    fn note(&mut self, i: &InstructionProto, seconds: f64) {
        if seconds > 0.0 {
            let Purpose { category, scope } = self.module.purpose(i);
            *self.scopes.entry((scope, category)).or_default() += seconds;
        }
    }

    fn repeated(&mut self, i: &'a InstructionProto, at: WalkPosition) -> Cost {
        let Some((body, _)) = self.module.body_and_condition(i) else { return Cost::default() };
        let inside = CallStack { by: i, from: at.entered };
        let entered = Some(&inside);
        match self.module.trip_count(i, at.entered) {
            None if at.level == LoopLevel::Outside => {
                let cost = self.visit(
                    body,
                    WalkPosition { level: LoopLevel::Step, times: 1.0, per_step: 1.0, entered, blocks: None },
                );
                self.step = Some(cost);
                Cost::default()
            }
            trips => {
                // A trip count that depends on data counts as one.
                let trips = trips.unwrap_or(1) as f64;
                let enters_blocks = at.level != LoopLevel::Block && at.blocks == Some(i.id);
                let per_step = at.per_step * trips;
                let place = match enters_blocks {
                    true => WalkPosition { level: LoopLevel::Block, times: 1.0, per_step, entered, blocks: None },
                    false => WalkPosition { times: at.times * trips, per_step, entered, ..at },
                };
                let cost = self.visit(body, place);
                if enters_blocks {
                    self.layer = Some((cost, at.times * trips));
                }
                let mut total = Cost::default();
                total.add(cost, trips);
                total
            }
        }
    }

    /// Returns whether a loop is the loop over transformer blocks, as opposed to a loop inside a block. This follows
    /// from the loop's name scope or, if the compiler dropped it, from the scopes in the loop's body.
    fn is_over_blocks(&self, i: &InstructionProto) -> bool {
        if !i.scope().is_empty() {
            return i.scope().split('/').rev().take(2).any(|part| part == BLOCKS);
        }
        let Some((body, _)) = self.module.body_and_condition(i) else { return false };
        let scopes: Vec<&str> = body.instructions.iter().map(|i| i.scope()).filter(|s| !s.is_empty()).collect();
        2 * scopes.iter().filter(|s| in_blocks(s)).count() > scopes.len()
    }

    /// Returns the collective that an instruction performs or starts, or the collectives that a fusion contains. For an
    /// asynchronous collective, also returns the schedule position of its end.
    fn collectives_of(
        &self,
        i: &'a InstructionProto,
        order: &[&'a InstructionProto],
        position: &BTreeMap<i64, usize>,
    ) -> Vec<(&'a InstructionProto, Option<usize>)> {
        match i.opcode.as_str() {
            "async-start" => {
                let Some(inner) = self.module.wrapped_collective(i) else { return Vec::new() };
                vec![(inner, (!is_sync(i)).then(|| end_of(i, order, position)))]
            }
            "custom-call" => self.module.wrapped_collective(i).map(|inner| (inner, None)).into_iter().collect(),
            "fusion" => {
                let Some(called) = self.module.called(i) else { return Vec::new() };
                let held = self.module.fused_collectives(called).into_iter();
                held.filter_map(|(part, c)| match part {
                    AsyncPart::Start => Some((c, Some(self.fused_end(c.channel_id, order).unwrap_or(0)))),
                    AsyncPart::Middle if !self.started.contains(&c.channel_id) => Some((c, None)),
                    _ => None,
                })
                .collect()
            }
            opcode if CollectiveKind::from_opcode(opcode).is_some() => {
                let end = (opcode.ends_with("-start") && !is_sync(i)).then(|| end_of(i, order, position));
                vec![(i, end)]
            }
            _ => Vec::new(),
        }
    }

    /// Returns the schedule position of the fusion in which a collective ends; `None` if the fusion is in another
    /// computation.
    fn fused_end(&self, channel: i64, order: &[&'a InstructionProto]) -> Option<usize> {
        let ends = |i: &InstructionProto| {
            let parts = self.module.called(i).map(|c| self.module.fused_collectives(c)).unwrap_or_default();
            parts.iter().any(|(part, c)| *part == AsyncPart::Done && c.channel_id == channel)
        };
        order.iter().position(|i| i.opcode == "fusion" && ends(i))
    }

    fn describe(
        &self,
        collective: &'a InstructionProto,
        by: &'a InstructionProto,
        at: WalkPosition,
    ) -> Option<(Collective, Vec<Vec<i64>>)> {
        let fused_in = if by.opcode == "fusion" { self.module.called(by) } else { None };
        let (kind, result) = self.module.result(collective, fused_in)?;
        let span = span(collective, self.mesh);
        let (dtype, bytes) = dtypes_and_bytes(result);
        let mut scope = self.module.scope_of(collective);
        if scope.is_empty() {
            scope = self.module.scope_of(by);
        }
        if scope.is_empty() {
            scope = self.module.scope_of_reader(by);
        }
        let entry = Collective {
            kind,
            scope,
            dtype,
            bytes,
            wire_bytes: kind.wire_bytes(bytes, span.size),
            axes: span.axes,
            level: at.level,
            times: at.times,
            asynchronous: false,
            overlapped: false,
            seconds: 0.0,
        };
        Some((entry, span.devices))
    }
}

/// Returns the seconds that the device waits for each copy between host memory and the device. `passed` has the seconds
/// that pass at each schedule position without these waits. One link runs the copies one after another, in the order of
/// their starts.
fn waits(passed: &[f64], copies: &[HostCopy]) -> Vec<f64> {
    let mut waited_for: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (n, copy) in copies.iter().enumerate() {
        waited_for.entry(copy.to).or_default().push(n);
    }
    let mut waits = vec![0.0; copies.len()];
    let mut ends = vec![0.0; copies.len()];
    // The time now, and the time from which the link is free.
    let (mut now, mut free) = (0.0, 0.0f64);
    let mut next = copies.iter().enumerate().peekable();
    for at in 0..=passed.len() {
        while let Some((n, copy)) = next.next_if(|(_, copy)| copy.from == at) {
            free = free.max(now) + copy.seconds;
            ends[n] = free;
        }
        for &n in waited_for.get(&at).into_iter().flatten() {
            waits[n] = (ends[n] - now).max(0.0);
            now += waits[n];
        }
        now += passed.get(at).unwrap_or(&0.0);
    }
    waits
}

/// Returns whether an instruction only moves data. Such an instruction does not count as work that overlaps with a
/// collective.
fn moves_only(i: &InstructionProto) -> bool {
    matches!(
        i.opcode.as_str(),
        "copy" | "copy-start" | "slice" | "dynamic-slice" | "transpose" | "broadcast" | "reshape"
    )
}

/// Returns whether a GPU program runs a collective synchronously although it has a start instruction.
fn is_sync(start: &InstructionProto) -> bool {
    let config = serde_json::from_slice::<serde_json::Value>(&start.backend_config);
    config.is_ok_and(|config| config.pointer("/collective_backend_config/is_sync").is_some_and(|v| v == true))
}

/// Returns the schedule position where an asynchronous instruction ends; 0 if this is in another computation.
fn end_of(start: &InstructionProto, order: &[&InstructionProto], position: &BTreeMap<i64, usize>) -> usize {
    let mut at = start.id;
    loop {
        let next = order
            .iter()
            .find(|i| i.operand_ids.contains(&at) && (i.opcode.ends_with("-done") || i.opcode.ends_with("-update")));
        match next {
            Some(i) if i.opcode.ends_with("-done") => return position.get(&i.id).copied().unwrap_or(0),
            Some(i) => at = i.id,
            None => return 0,
        }
    }
}

#[cfg(test)]
mod tests;
