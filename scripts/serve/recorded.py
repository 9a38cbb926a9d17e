"""Writes the requests of clients and the shapes of answers for `cargo test --test serve recorded::`.

A file has the client's name and a list of checks with their calls:

  method, path, headers         as sent; headers only if they differ from the file's; `{v1}` is the id of an earlier video
  body, or form                 as sent; form fields in order, files with name and type; `{png}` is `png(64, 64)`
  binds                         the name of the answer's id, or of a list's `last_id`
  status, kind                  of the answer; its media type unless it is JSON
  says                          headers of the answer that clients act on
  answer                        shape of a JSON answer: type names, except values that clients act on; repeated ones by name
                                in `shapes`
  until                         repeat the request until the answer has this status"""

import json
import re
from collections import Counter
from pathlib import Path

from server import png

HEADERS = ["accept", "authorization", "content-type", "idempotency-key", "range", "x-stainless-poll-helper"]
SAYS = ["openai-poll-after-ms", "www-authenticate", "x-should-retry"]
# Values that clients act on.
KEPT = {"object", "code", "param", "type", "deleted"}
# Objects whose keys are not recorded.
OPAQUE = {"defaults", "limits", "metadata", "pipeline_inputs", "size_aliases", "timings"}
# Checks that depend on timing, concurrency or generated files.
LEFT_OUT = {"a_full_queue_is_waited_for", "the_async_client_works", "videos_are_edited_and_extended"}
IMAGE = png(64, 64)


def shape(value, key=None):
    if key in OPAQUE and value is not None:
        return "object"
    if isinstance(value, dict):
        return {name: shape(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner, key) for inner in value[:1]]
    if key in KEPT and not isinstance(value, (int, float)) or key == "deleted":
        return value
    return {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string"}[type(value)]


def sent(call, names):
    """Returns the request of a row, with names for ids and files."""

    def named(text):
        for given, name in names.items():
            text = text.replace(given, f"{{{name}}}")
        return text

    row = {"method": call.method, "path": named(call.path)}
    headers = {name: call.headers[name] for name in HEADERS if call.headers.get(name)}
    if parts := call.fields():
        del headers["content-type"]
        row["form"] = []
        for name, filename, kind, value in parts:
            text = named(value.replace(IMAGE, b"{png}").decode())
            row["form"].append([name, text] if filename is None else [name, text, filename, kind])
    elif call.body:
        row["body"] = named(call.body.decode())
    return row | {"headers": headers}


def fields_of(row):
    if "form" in row:
        return tuple(sorted({name for name, *_ in row["form"]}))
    text = row.get("body", "")
    return tuple(sorted(json.loads(text))) if text.startswith("{") else text


def rows_of(calls):
    """Yields a check's calls as rows, each with a key that is the same for calls that repeat each other."""
    names = {}
    for call in calls:
        row, answer = sent(call, names), call.json()
        given = answer.get("last_id") or answer.get("id") if isinstance(answer, dict) else None
        if given and given.startswith("video_") and given not in names:
            names[given] = row["binds"] = f"v{len(names) + 1}"
        row |= {"status": call.status, "kind": call.answer_headers.get("content-type", "").split(";")[0]}
        says = {name: call.answer_headers[name] for name in SAYS if call.answer_headers.get(name)}
        if says and not (call.method == "GET" and call.status == 200):
            row["says"] = says
        if answer is not None and "/content" not in row["path"]:
            row["answer"] = shape(answer)
            first = next(iter(answer.get("data", [])), {}) if isinstance(answer.get("data"), list) else {}
            status = answer.get("status") or first.get("status")
            if call.method == "GET" and status in ("completed", "failed"):
                row["until"] = status
        yield row, (call.method, re.sub(r"\{v\d+\}", "", row["path"]), fields_of(row), call.status, row.get("until"))


def kept_of(calls):
    """Returns a check's calls as rows, without repeated calls that nothing depends on."""
    rows = list(rows_of(calls))
    kept = set({key: at for at, (_, key) in reversed(list(enumerate(rows)))}.values())

    def is_needed(row):
        """Returns whether a kept row names its id, or is a request for the finished video that it waits for."""
        used = [rows[at][0] for at in kept]
        waited = "until" in row and any(other["path"].startswith(row["path"]) for other in used)
        return waited or "binds" in row and any(f"{{{row['binds']}}}" in json.dumps(other) for other in used)

    while more := [at for at, (row, _) in enumerate(rows) if at not in kept and is_needed(row)]:
        kept.update(more)
    return [rows[at][0] for at in sorted(kept)]


def joined(shapes):
    """Merges shapes of one object that differ in null fields; objects with an error stay apart."""
    group_of = lambda value: (tuple(value), value.get("error") == "null")  # noqa: E731
    groups = {}
    for value in map(json.loads, shapes):
        alike = groups.setdefault(group_of(value), dict(value))
        alike.update({key: inner for key, inner in value.items() if inner != "null"})
    return {text: json.dumps(groups[group_of(json.loads(text))]) for text in shapes}


def write(file, client, checks):
    line = lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # noqa: E731
    kept = [(name, kept_of(calls)) for name, calls in checks if name not in LEFT_OUT and calls]
    answered = [row for _, rows in kept for row in rows if "answer" in row]
    of = joined({json.dumps(row["answer"]) for row in answered if "object" in row["answer"]})
    for row in answered:
        row["answer"] = of.get(json.dumps(row["answer"]), json.dumps(row["answer"]))
    often = [text for text, count in Counter(row["answer"] for row in answered).most_common() if count > 1 and len(text) > 40]
    names = {text: f"{json.loads(text).get('object', 'error')} {at}" for at, text in enumerate(often)}
    headers, groups = Counter(json.dumps(row["headers"]) for _, rows in kept for row in rows), []
    usual = json.loads(headers.most_common(1)[0][0])
    for name, rows in kept:
        for row in rows:
            if "answer" in row:
                row["answer"] = names.get(row["answer"]) or json.loads(row["answer"])
                del row["kind"]
            if row["headers"] == usual:
                del row["headers"]
        groups.append(f' {{"check":{line(name)},"calls":[\n  ' + ",\n  ".join(map(line, rows)) + "\n ]}")
    shapes = ",\n  ".join(f"{line(name)}:{line(json.loads(text))}" for text, name in names.items())
    head = f'{{"client":{line(client)},"headers":{line(usual)},"shapes":{{\n  {shapes}\n }},"checks":[\n'
    whole = head + ",\n".join(groups) + "\n]}\n"
    json.loads(whole)
    Path(file).write_text(whole)
