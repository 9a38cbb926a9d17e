"use strict";
const cases = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);

// An element of text alone: nothing that a file says becomes markup.
function element(name, text, parent, kind) {
  const e = document.createElement(name);
  e.textContent = text;
  if (kind) e.className = kind;
  if (parent) parent.append(e);
  return e;
}

function row(table, cells, head, kind) {
  const tr = element("tr", "", table, kind);
  cells.forEach((cell) => element(head ? "th" : "td", cell, tr));
}

function fill(select, chosen) {
  cases.forEach((c, n) => (element("option", c.label, select).value = n));
  select.value = String(Math.min(chosen, cases.length - 1));
}

const mb = (bytes) => (bytes / 1e6).toFixed(3);

function tensors() {
  const table = at("tensors");
  table.textContent = "";
  const chosen = cases[at("case").value];
  if (!chosen) return;
  const words = at("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = chosen.tensors.filter((t) => {
    const all = t.flat().join(" ").toLowerCase();
    return words.every((w) => all.includes(w));
  });
  at("count").textContent = `${found.length} of ${chosen.tensors.length}`;
  row(table, ["tensor", "role", "sharding", "axes", "MB per device", "rule"], true);
  found.forEach(([name, role, text, axes, bytes, rules]) =>
    row(table, [name, role, text, axes.join(", "), mb(bytes), rules.join("; ")]));
}

// Collectives of a step by kind, tensor and axes.
function summed(list) {
  const sums = new Map();
  list.forEach(([kind, what, axes, runs, bytes]) => {
    const key = JSON.stringify([kind, what, axes]);
    const [r, b] = sums.get(key) || [0, 0];
    sums.set(key, [r + runs, b + bytes]);
  });
  return sums;
}

function changes() {
  const [a, b] = [cases[at("before").value], cases[at("after").value]];
  const out = at("changes");
  out.textContent = "";
  if (!a || !b) return;
  const [first, second] = [summed(a.collectives), summed(b.collectives)];
  const more = (of, than) => [...of].map(([key, [runs, bytes]]) => {
    const [r, y] = than.get(key) || [0, 0];
    return [...JSON.parse(key), runs - r, bytes - y];
  }).filter((m) => m[4] > 0).sort((x, y) => y[4] - x[4]);
  for (const [title, list, kind] of [["Collectives removed", more(first, second), "lost"],
                                     ["Collectives added", more(second, first), "gained"]]) {
    const sum = list.reduce((s, m) => s + m[4], 0);
    element("h3", `${title}: ${mb(sum)} MB per step`, out, kind);
    if (!list.length) continue;
    const table = element("table", "", out);
    row(table, ["kind", "tensor or scope", "axes", "runs", "MB per step"], true);
    list.forEach(([k, what, axes, runs, bytes]) => row(table, [k, what, axes, runs, mb(bytes)]));
  }
  const placement = (c) => new Map(c.tensors.map((t) => [t[0], t[2]]));
  const [before, after] = [placement(a), placement(b)];
  const names = [...new Set([...before.keys(), ...after.keys()])];
  const moved = names.filter((n) => before.get(n) !== after.get(n));
  element("h3", `Tensors placed differently: ${moved.length} of ${names.length}`, out);
  if (!moved.length) return;
  const table = element("table", "", out);
  row(table, ["tensor", a.label, b.label], true);
  moved.forEach((n) => row(table, [n, before.get(n) || "–", after.get(n) || "–"]));
}

fill(at("before"), 0);
fill(at("after"), 1);
fill(at("case"), 0);
["before", "after"].forEach((id) => at(id).addEventListener("change", changes));
at("case").addEventListener("change", tensors);
at("search").addEventListener("input", tensors);
changes();
tensors();
