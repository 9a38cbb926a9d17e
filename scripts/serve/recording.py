"""Requests of clients as facts for `cargo test --test serve recorded::`: what they send, and the shape of what they are answered.

A file has the client's name and a list of checks, each with its exchanges in order:

  method, path, headers, body   as sent; `{v1}` is the id of a video that an earlier answer gave, `{png}` the image of `png(64, 64)`
  binds                         the name that the answer's id (or a list's `last_id`) has from here on
  status, kind                  of the answer; its media type
  answer                        shape of a JSON answer: words for types, but for the values that clients act on
  until                         asked again until the answer's status is this
"""

import json
from pathlib import Path

from server import png

# What of a request matters to a server, beside its body.
HEADERS = ["accept", "authorization", "content-type", "idempotency-key", "range", "x-stainless-poll-helper"]
# Values that clients act on.
KEPT = {"object", "code", "param", "type", "deleted"}
# Timed against a device, the same requests at once, or with files of what was made: not for replaying.
LEFT_OUT = {"a_full_queue_is_waited_for", "the_async_client_works", "videos_are_edited_and_extended"}
# A client's answer to a time-out that no server is to have.
IMAGE = png(64, 64)


def shape(value, key=None):
    """A JSON value with words for types."""
    if isinstance(value, dict):
        return {name: shape(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner, key) for inner in value[:1]]
    if key in KEPT and not isinstance(value, (int, float)) or key == "deleted":
        return value
    names = {bool: "boolean", int: "number", float: "number", str: "string"}
    return "null" if value is None else names[type(value)]


def sent(exchange, names):
    """The request as text, with names for ids and files."""
    boundary = (exchange.header("content-type") or "").partition("boundary=")[2]
    text = exchange.body.replace(IMAGE, b"{png}").decode()
    text = text.replace(boundary, "BOUNDARY") if boundary else text
    headers = {name: exchange.header(name) for name in HEADERS if exchange.header(name)}
    if boundary:
        headers["content-type"] = headers["content-type"].replace(boundary, "BOUNDARY")
    path = exchange.path
    for given, name in names.items():
        path, text = path.replace(given, f"{{{name}}}"), text.replace(given, f"{{{name}}}")
    return path, headers, text


def fields_of(exchange, text):
    """What tells two bodies apart, their values left out."""
    if parts := exchange.fields():
        return tuple(sorted({name for name, *_ in parts}))
    return tuple(sorted(json.loads(text))) if text.startswith("{") else text


def recorded(exchanges):
    """A check's exchanges as rows; of those that differ in values only, the first and what later ones build on."""
    names, rows = {}, []
    for exchange in exchanges:
        path, headers, text = sent(exchange, names)
        answer = exchange.json()
        row = {"method": exchange.method, "path": path, "headers": headers}
        if text:
            row["body"] = text
        given = answer.get("last_id") or answer.get("id") if isinstance(answer, dict) else None
        if given and given.startswith("video_") and given not in names:
            names[given] = row["binds"] = f"v{len(names) + 1}"
        row |= {"status": exchange.status, "kind": (exchange.answered("content-type") or "").split(";")[0]}
        if answer is not None:
            row["answer"] = shape(answer)
            if exchange.method == "GET" and answer.get("status") in ("completed", "failed"):
                row["until"] = answer["status"]
        unlike = path if "{v" not in path else path.split("{v")[0] + path.split("}", 1)[1]
        rows.append((row, (exchange.method, unlike, fields_of(exchange, text), exchange.status, row.get("until"))))
    kept, seen = [], set()
    for at, (_, key) in enumerate(rows):
        if key not in seen:
            seen.add(key)
            kept.append(at)
    while True:
        wanted = {name for at in kept for name in names.values() if f"{{{name}}}" in json.dumps(rows[at][0])}
        more = [at for at, (row, _) in enumerate(rows) if row.get("binds") in wanted and at not in kept]
        # A video that is asked for as made has to be made first.
        made = {row["path"] for at, (row, _) in enumerate(rows) if at in kept}
        more += [
            at
            for at, (row, _) in enumerate(rows)
            if "until" in row and any(path.startswith(row["path"]) for path in made) and at not in kept
        ]
        if not more:
            return [rows[at][0] for at in sorted(kept)]
        kept = sorted({*kept, *more})


def write(file, client, checks):
    """Writes a client's checks, one exchange a line."""
    lines = []
    for name, exchanges in checks:
        if name in LEFT_OUT or not exchanges:
            continue
        rows = ",\n".join("   " + json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in recorded(exchanges))
        lines.append(f'  {{"check": {json.dumps(name)}, "exchanges": [\n{rows}\n  ]}}')
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(f'{{"client": {json.dumps(client)}, "checks": [\n' + ",\n".join(lines) + "\n]}\n")
