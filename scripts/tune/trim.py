#!/usr/bin/env python3
"""Cuts a trace of GPUs down to a test's size: scripts/tune/trim.py FILE.xplane.pb OUT.xplane.pb FROM_MS MS [--whole].

Kept are the events that lie within MS milliseconds from FROM_MS after the first one, the facts that say which instruction
they are of, and of the program those instructions with what they call. With --whole the program stays as it is, so that
xprof can read the result: tests/cli/profile.rs has its figures. Needs nothing but Python.
"""

import pathlib
import sys

from fixture import field, message, varint

FACTS = ["hlo_op", "hlo_module", "program_id"]


def fields(data):
    """The fields of a message, numbers and bytes."""
    at = 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
            continue
        size = {1: 8, 5: 4}.get(tag & 7)
        size = number() if size is None else size
        if tag & 7 == 2:
            yield tag >> 3, data[at : at + size]
        at += size


def get(data, wanted, otherwise=None):
    return next((value for number, value in fields(data) if number == wanted), otherwise)


def numbers(data, wanted):
    """A repeated number, packed or not."""
    for number, value in fields(data):
        if number == wanted and isinstance(value, int):
            yield value
        elif number == wanted:
            yield from (v for _, v in fields(b"".join(b"\x08" + piece for piece in packed(value))))


def packed(data):
    start = 0
    for at, byte in enumerate(data):
        if byte < 128:
            yield data[start : at + 1]
            start = at + 1


def keep(data, numbers_kept):
    return b"".join(field(number, value) for number, value in fields(data) if number in numbers_kept)


def shape(data):
    """Element type, sizes, and those of a tuple's parts."""
    parts = [(4, shape(value)) for number, value in fields(data) if number == 4]
    return message((2, get(data, 2, 0)), *((3, size) for size in numbers(data, 3)), *parts)


def instruction(data):
    kept = [(n, v) for n, v in fields(data) if n in (1, 2, 28, 35)]
    scope = get(get(data, 7, b""), 2, b"")
    lists = [(n, v) for n in (36, 38) for v in numbers(data, n)]
    return message(*kept, (3, shape(get(data, 3, b""))), (7, message((2, scope))), *lists)


def program(module, used):
    """The module with the used instructions, what they call, and what they read where they have no scope."""
    computations = {get(c, 5): c for number, c in fields(module) if number == 3}
    place, body = {}, {}
    for number, computation in computations.items():
        for tag, i in fields(computation):
            if tag == 2:
                place[get(i, 35)], body[get(i, 35)] = number, i
    waiting = [i for i, data in body.items() if get(data, 1, b"").decode() in used]
    kept = set()
    while waiting:
        i = waiting.pop()
        if i in kept or i not in body:
            continue
        kept.add(i)
        for called in numbers(body[i], 38):
            if get(body[i], 2) not in (b"while", b"call", b"conditional"):
                waiting += [get(v, 35) for tag, v in fields(computations[called]) if tag == 2]
        if not get(get(body[i], 7, b""), 2):
            waiting += list(numbers(body[i], 36))[:1]
    # In the compiler's order, operands before their users: readers rely on it.
    out = [(1, get(module, 1)), (6, get(module, 6))]
    for number, computation in computations.items():
        own = [(2, instruction(data)) for i, data in body.items() if i in kept and place[i] == number]
        if own:
            out.append((3, message(*own, (5, number), (6, get(computation, 6, 0)))))
    return message(*out)


def main():
    source, out, begin, length = sys.argv[1:5]
    space = pathlib.Path(source).read_bytes()
    planes = [value for number, value in fields(space) if number == 1]
    devices = [p for p in planes if get(p, 2).startswith(b"/device:")]
    whole = "--whole" in sys.argv

    def lines(plane):
        return [v for number, v in fields(plane) if number == 3]

    def start(line, event):
        return get(line, 3) * 1000 + get(event, 2, 0)

    events = [start(line, e) for p in devices for line in lines(p) for n, e in fields(line) if n == 4]
    first = min(events) + int(float(begin) * 1e9)
    last = first + int(float(length) * 1e9)
    used, result = set(), []
    for plane in devices:
        names = {get(v, 1): get(get(v, 2), 2, b"").decode() for n, v in fields(plane) if n == 5}
        facts = {number: name for number, name in names.items() if name in FACTS}
        kept, kernels, texts = [], set(), set()
        for line in lines(plane):
            each = []
            for event in (e for n, e in fields(line) if n == 4):
                if not first <= start(line, event) <= last - get(event, 3, 0):
                    continue
                stats = [s for n, s in fields(event) if n == 4 and get(s, 1) in facts]
                if whole:
                    stats = [s for n, s in fields(event) if n == 4]
                for stat in stats:
                    if facts.get(get(stat, 1)) == "hlo_op":
                        used.update(names.get(get(stat, 7), "").split("/"))
                    texts.add(get(stat, 7))
                kernels.add(get(event, 1))
                each.append((4, keep(event, (1, 2, 3)) + b"".join(field(4, s) for s in stats)))
            if each:
                kept.append((3, keep(line, (1, 2, 3)) + message(*each)))
        tables = [
            (n, v)
            for n, v in fields(plane)
            if (n == 4 and get(v, 1) in kernels) or (n == 5 and (whole or get(v, 1) in texts | set(facts)))
        ]
        if not whole:
            # Kernels with their names alone.
            tables = [(n, message((1, get(v, 1)), (2, keep(get(v, 2), (1, 2))))) for n, v in tables]
        stats = [(n, v) for n, v in fields(plane) if n == 6 and whole]
        result.append((1, message((1, get(plane, 1, 0)), (2, get(plane, 2)), *kept, *tables, *stats)))
    for plane in (p for p in planes if get(p, 2) == b"/host:metadata"):
        if whole:
            result.append((1, plane))
            continue
        fact = next(get(v, 1) for n, v in fields(plane) if n == 5 and get(get(v, 2), 2) == b"Hlo Proto")
        entries = []
        for entry in (v for n, v in fields(plane) if n == 4):
            metadata = get(entry, 2)
            proto = next((get(s, 6) for n, s in fields(metadata) if n == 5 and get(s, 1) == fact), b"")
            module = program(get(proto, 1, b""), used)
            if get(module, 3):
                stat = message((1, fact), (6, message((1, module))))
                entries.append((4, message((1, get(entry, 1)), (2, keep(metadata, (1, 2)) + field(5, stat)))))
        name = message((1, fact), (2, message((1, fact), (2, "Hlo Proto"))))
        result.append((1, message((2, "/host:metadata"), *entries, (5, name))))
    pathlib.Path(out).write_bytes(message(*result))


if __name__ == "__main__":
    main()
