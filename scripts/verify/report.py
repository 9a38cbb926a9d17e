"""Verdicts of the cases and the HTML report."""

import html
import json
import math
import re

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2rem 1rem .2rem 0;text-align:left;vertical-align:top}"
    ".row{display:grid;grid-template-columns:repeat(3,1fr);gap:.5rem}figure{margin:0}"
    "img,svg{width:100%;height:auto;background:#eee}figcaption{font-size:.85rem;color:#555}"
    ".agrees{color:#176117}.differs,.failed{color:#a11;font-weight:600}section{border-top:1px solid #ccc;margin-top:2rem}"
)
F32_LIMIT, SPREADS = 1e-4, 1.5
JUDGED = ("latents.video", "latents.audio", "video", "audio")


def distances_of(scores):
    """Returns the relative L2 of each tensor and of the sound, and the root mean square error of the frames (in 0..1)."""
    distances = {name: value["relative_l2"] for name, value in scores["tensors"].items()}
    if audio := scores.get("audio"):
        distances["audio"] = audio["relative_l2"]
    if video := scores.get("video"):
        # JSON has neither infinity (equal frames) nor NaN.
        distances["video"] = 10 ** (-video["psnr"] / 20) if video["psnr"] is not None else 0.0 if video["mad"] == 0 else None
    return {name: math.inf if distance is None else distance for name, distance in distances.items()}


def verdict(case, scores, spread):
    """Compares every output with its limit, and the noise bit for bit."""
    distances = distances_of(scores)
    rows = []
    for name in JUDGED:
        if name in distances:
            limit = SPREADS * spread[name] if spread else F32_LIMIT
            rows.append(dict(name=name, distance=distances[name], limit=limit, fine=distances[name] <= limit))
    noise = [name for name in distances if "noise" in name]
    same = bool(noise) and all(distances[name] == 0 for name in noise)
    fine = same and len(rows) == len(JUDGED) and all(row["fine"] for row in rows)
    words = "; ".join(f"{row['name']} {row['distance']:.1e}" for row in rows) + f" of {rows[0]['limit']:.1e}"
    if spread:
        words = "; ".join(f"{row['name']} {row['distance']:.1e} of {row['limit']:.1e}" for row in rows)
    if not same:
        words = "the noise is another" if noise else "no noise to compare"
    video, audio = scores.get("video") or {}, scores.get("audio") or {}
    of = lambda part, name, form: "none" if part.get(name) is None else form.format(part[name])
    words += f"; PSNR {of(video, 'psnr', '{:.1f} dB')}, SSIM {of(video, 'ssim', '{:.5f}')}"
    words += f", cosine of the sound {of(audio, 'cosine', '{:.6f}')}"
    return dict(case=case.name, verdict="agrees" if fine else "differs", words=words, rows=rows)


def failed(case, why):
    return dict(case=case.name, verdict="failed", words=why, rows=[])


def line(v):
    return f"{v['verdict']:8}{v['case']}: {v['words']}"


def _section(v, page):
    """Returns the body of a case's `ltx2 compare --report` page."""
    body = re.sub(r"^.*?</style>|</html>\s*$", "", page, flags=re.S) if page else ""
    rows = "".join(
        f"<tr><td>{html.escape(r['name'])}</td><td>{r['distance']:.2e}</td><td>{r['limit']:.2e}</td>"
        f"<td>{'within' if r['fine'] else 'above'}</td></tr>"
        for r in v["rows"]
    )
    table = f"<table><tr><th></th><th>distance</th><th>limit</th><th></th></tr>{rows}</table>" if rows else ""
    body = re.sub(r"<h1>.*?</h1>", "", body, flags=re.S)
    title = f"<h2 id=\"{v['case']}\">{v['case']}: <span class=\"{v['verdict']}\">{v['verdict']}</span></h2>"
    return f"<section>{title}<p>{html.escape(v['words'])}</p>{table}{body}</section>\n"


def write(path, title, facts, verdicts, not_run, pages):
    facts = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in facts.items())
    rows = "".join(
        f"<tr><td><a href=\"#{v['case']}\">{v['case']}</a></td><td class=\"{v['verdict']}\">{v['verdict']}</td>"
        f"<td>{html.escape(v['words'])}</td></tr>"
        for v in verdicts
    )
    rest = "".join(f"<li>{html.escape(reason)}</li>" for reason in not_run)
    sections = "".join(_section(v, pages.get(v["case"], "")) for v in verdicts)
    path.write_text(
        f"<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{html.escape(title)}</title><style>{STYLE}</style>\n"
        f"<h1>{html.escape(title)}</h1><table>{facts}</table><h2>Verdicts</h2><table>{rows}</table>"
        f"{f'<p>Not run:</p><ul>{rest}</ul>' if rest else ''}{sections}</html>\n"
    )


def save(folder, v, key):
    part = folder / "verdict.json.part"
    part.write_text(json.dumps(v | {"key": key}, indent=1) + "\n")
    part.rename(folder / "verdict.json")


def load(folder, key):
    """Returns an earlier verdict with the same key, or None."""
    try:
        kept = json.loads((folder / "verdict.json").read_text())
    except (OSError, ValueError):
        return None
    return kept if kept.get("key") == key else None
