"""Writes the requests of clients and the shapes of answers for `cargo test --test serve recorded::`.

A file has the client's name and a list of checks with their calls:

  method, path, headers         as sent; headers only if they differ from the file's; `{v1}` is the id of an earlier video
  body, or form                 as sent; form fields in order, files with name and type; `{png}` is `png(64, 64)`
  binds                         the name of the answer's id, or of a list's `last_id`
  status, kind                  of the answer; its media type unless it is JSON
  says                          headers of the answer that clients act on
  answer                        shape of a JSON answer: type names, except values that clients act on; repeated ones by name in
`shapes`
  until                         repeat the request until the answer has this status
"""

import json
import re
from collections import Counter
from pathlib import Path

from server import png

# Recorded request headers.
HEADERS = ["accept", "authorization", "content-type", "idempotency-key", "range", "x-stainless-poll-helper"]
# Recorded answer headers that clients act on.
SAYS = ["openai-poll-after-ms", "www-authenticate", "x-should-retry"]
# Values that clients act on.
KEPT = {"object", "code", "param", "type", "deleted"}
# Objects whose keys are not recorded.
OPAQUE = {"defaults", "limits", "metadata", "size_aliases", "timings"}
# Checks that depend on timing, concurrency or generated files.
LEFT_OUT = {"a_full_queue_is_waited_for", "the_async_client_works", "videos_are_edited_and_extended"}
IMAGE = png(64, 64)


def shape(value, key=None):
    """Returns a JSON value with type names instead of values."""
    if key in OPAQUE and value is not None:
        return "object"
    if isinstance(value, dict):
        return {name: shape(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner, key) for inner in value[:1]]
    if key in KEPT and not isinstance(value, (int, float)) or key == "deleted":
        return value
    names = {bool: "boolean", int: "number", float: "number", str: "string"}
    return "null" if value is None else names[type(value)]


def sent(call, names):
    """Returns the request of a row, with names for ids and files."""

    def named(text):
        for given, name in names.items():
            text = text.replace(given, f"{{{name}}}")
        return text

    row = {"method": call.method, "path": named(call.path)}
    headers = {name: call.header(name) for name in HEADERS if call.header(name)}
    if parts := call.fields():
        del headers["content-type"]
        plain = lambda value: named(value.replace(IMAGE, b"{png}").decode())  # noqa: E731
        row["form"] = [
            [name, plain(value), *([] if filename is None else [filename, kind])] for name, filename, kind, value in parts
        ]
    elif call.body:
        row["body"] = named(call.body.decode())
    return row | {"headers": headers}


def fields_of(row):
    """Returns the field names of a body."""
    if "form" in row:
        return tuple(sorted({name for name, *_ in row["form"]}))
    text = row.get("body", "")
    return tuple(sorted(json.loads(text))) if text.startswith("{") else text


def kept_of(calls):
    """Returns a check's calls as rows, without repeated calls that nothing depends on."""
    names, rows = {}, []
    for call in calls:
        row, answer = sent(call, names), call.json()
        given = answer.get("last_id") or answer.get("id") if isinstance(answer, dict) else None
        if given and given.startswith("video_") and given not in names:
            names[given] = row["binds"] = f"v{len(names) + 1}"
        row |= {"status": call.status, "kind": (call.answered("content-type") or "").split(";")[0]}
        says = {name: call.answered(name) for name in SAYS if call.answered(name)}
        if says and not (call.method == "GET" and call.status == 200):
            row["says"] = says
        if answer is not None and "/content" not in row["path"]:
            row["answer"] = shape(answer)
            first = next(iter(answer.get("data", [])), {}) if isinstance(answer.get("data"), list) else {}
            status = answer.get("status") or first.get("status")
            if call.method == "GET" and status in ("completed", "failed"):
                row["until"] = status
        unlike = re.sub(r"\{v\d+\}", "", row["path"])
        rows.append((row, (call.method, unlike, fields_of(row), call.status, row.get("until"))))
    kept, seen = [], set()
    for at, (_, key) in enumerate(rows):
        if key not in seen:
            seen.add(key)
            kept.append(at)
    while True:
        wanted = {name for at in kept for name in names.values() if f"{{{name}}}" in json.dumps(rows[at][0])}
        more = [at for at, (row, _) in enumerate(rows) if row.get("binds") in wanted and at not in kept]
        # Requests for a finished video need the request that waits for it.
        made = {row["path"] for at, (row, _) in enumerate(rows) if at in kept}
        more += [
            at
            for at, (row, _) in enumerate(rows)
            if "until" in row and any(path.startswith(row["path"]) for path in made) and at not in kept
        ]
        if not more:
            return [rows[at][0] for at in sorted(kept)]
        kept = sorted({*kept, *more})


def joined(shapes):
    """Merges shapes of one object that differ in null fields; objects with an error stay apart."""
    groups = {}
    for text in shapes:
        value = json.loads(text)
        alike = groups.setdefault((tuple(value), value.get("error") == "null"), dict(value))
        alike.update({key: inner for key, inner in value.items() if inner != "null"})
    return {text: json.dumps(groups[tuple(value), value.get("error") == "null"]) for text in shapes for value in [json.loads(text)]}


def write(file, client, checks):
    kept = [(name, kept_of(calls)) for name, calls in checks if name not in LEFT_OUT and calls]
    of = joined({json.dumps(row["answer"]) for _, rows in kept for row in rows if "answer" in row and "object" in row["answer"]})
    for row in (row for _, rows in kept for row in rows if "answer" in row):
        row["answer"] = json.loads(of.get(json.dumps(row["answer"]), json.dumps(row["answer"])))
    counts = Counter(json.dumps(row["answer"]) for _, rows in kept for row in rows if "answer" in row)
    often = [text for text, count in counts.most_common() if count > 1 and len(text) > 40]
    names = {text: f"{json.loads(text).get('object', 'error')} {at}" for at, text in enumerate(often)}
    line = lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # noqa: E731
    usual = json.loads(Counter(json.dumps(row["headers"]) for _, rows in kept for row in rows).most_common(1)[0][0])
    groups = []
    for name, rows in kept:
        for row in rows:
            if "answer" in row:
                row["answer"] = names.get(json.dumps(row["answer"]), row["answer"])
                del row["kind"]
            if row["headers"] == usual:
                del row["headers"]
        groups.append(f' {{"check":{line(name)},"calls":[\n  ' + ",\n  ".join(map(line, rows)) + "\n ]}")
    shapes = ",\n  ".join(f"{line(name)}:{line(json.loads(text))}" for text, name in names.items())
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    whole = f'{{"client":{line(client)},"headers":{line(usual)},"shapes":{{\n  {shapes}\n }},"checks":[\n' + ",\n".join(groups) + "\n]}\n"
    json.loads(whole)
    Path(file).write_text(whole)
