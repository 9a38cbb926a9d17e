"""Verdicts of the cases and the HTML report."""

import json
import math
import re
from html import escape

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2rem 1rem .2rem 0;text-align:left;vertical-align:top}"
    ".row{display:grid;grid-template-columns:repeat(3,1fr);gap:.5rem}figure{margin:0}"
    "img,svg{width:100%;height:auto;background:#eee}figcaption{font-size:.85rem;color:#555}"
    ".agrees{color:#176117}.differs,.failed{color:#a11;font-weight:600}section{border-top:1px solid #ccc;margin-top:2rem}"
)
F32_LIMIT, SPREADS = 1e-4, 1.5
JUDGED = ("latents.video", "latents.audio", "video", "audio")


def verdict(case, scores, spread):
    """Compares every output with its limit, and the noise bit for bit."""
    video, audio = scores.get("video") or {}, scores.get("audio") or {}
    distances = {name: value["relative_l2"] for name, value in scores["tensors"].items()}
    if audio:
        distances["audio"] = audio["relative_l2"]
    if video:
        # JSON has neither infinity (equal frames) nor NaN.
        distances["video"] = 10 ** (-video["psnr"] / 20) if video["psnr"] is not None else 0.0 if video["mad"] == 0 else None
    distances = {name: math.inf if distance is None else distance for name, distance in distances.items()}
    limits = {name: SPREADS * spread[name] if spread else F32_LIMIT for name in JUDGED if name in distances}
    rows = [dict(name=n, distance=distances[n], limit=limit, fine=distances[n] <= limit) for n, limit in limits.items()]
    noise = [name for name in distances if "noise" in name]
    same = bool(noise) and all(distances[name] == 0 for name in noise)
    fine = same and len(rows) == len(JUDGED) and all(row["fine"] for row in rows)
    words = [f"{row['name']} {row['distance']:.1e}" + (f" of {row['limit']:.1e}" if spread else "") for row in rows]
    words = "; ".join(words) + ("" if spread else f" of {F32_LIMIT:.1e}")
    if not same:
        words = "the noise is another" if noise else "no noise to compare"
    of = lambda part, name, form: "none" if part.get(name) is None else form.format(part[name])
    words += f"; PSNR {of(video, 'psnr', '{:.1f} dB')}, SSIM {of(video, 'ssim', '{:.5f}')}"
    words += f", cosine of the sound {of(audio, 'cosine', '{:.6f}')}"
    return dict(case=case.name, verdict="agrees" if fine else "differs", words=words, rows=rows)


def failed(case, why):
    return dict(case=case.name, verdict="failed", words=why, rows=[])


def _table(rows, head=""):
    cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return f"<table>{head}{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _section(v, page):
    body = re.sub(r"^.*?</style>|</html>\s*$|<h1>.*?</h1>", "", page, flags=re.S)
    rows = [(r["name"], f"{r['distance']:.2e}", f"{r['limit']:.2e}", "within" if r["fine"] else "above") for r in v["rows"]]
    table = _table(rows, "<tr><th></th><th>distance</th><th>limit</th><th></th></tr>") if rows else ""
    title = f"<h2 id=\"{v['case']}\">{v['case']}: <span class=\"{v['verdict']}\">{v['verdict']}</span></h2>"
    return f"<section>{title}<p>{escape(v['words'])}</p>{table}{body}</section>\n"


def write(path, title, facts, verdicts, not_run, pages):
    title, facts = escape(title), _table([escape(key), escape(str(value))] for key, value in facts.items())
    rows = _table(
        [f"<a href=\"#{v['case']}\">{v['case']}</a>", f"<span class=\"{v['verdict']}\">{v['verdict']}</span>", escape(v["words"])]
        for v in verdicts
    )
    rest = "".join(f"<li>{escape(reason)}</li>" for reason in not_run)
    path.write_text(
        f"<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{title}</title><style>{STYLE}</style>\n"
        f"<h1>{title}</h1>{facts}<h2>Verdicts</h2>{rows}{f'<p>Not run:</p><ul>{rest}</ul>' if rest else ''}"
        f"{''.join(_section(v, pages.get(v['case'], '')) for v in verdicts)}</html>\n"
    )


def save(folder, v, key):
    part = folder / "verdict.json.part"
    part.write_text(json.dumps(v | {"key": key}, indent=1) + "\n")
    part.rename(folder / "verdict.json")


def load(folder, key):
    try:
        kept = json.loads((folder / "verdict.json").read_text())
    except (OSError, ValueError):
        return None
    return kept if kept.get("key") == key else None
