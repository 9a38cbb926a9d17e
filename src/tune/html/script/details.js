// Suggestions for a group, comparison of two cases, and collectives and tensors of one case.

// Costs before and after, in the diagnosis's unit: milliseconds if the chip is known, otherwise received bytes.
function costs([before, after], unit) {
  if (unit === "milliseconds") return `${milliseconds(before)} to ${milliseconds(after)} ms`;
  return `${megabytes(before)} to ${megabytes(after)} MB received`;
}

const PRICES = { none: "free", memory: "needs more memory", exchanges: "replaces collectives" };

function moves(list, title, kind) {
  const names = list.map((m) => [m.kind, m.what, String(Math.round(m.runs * 1e3) / 1e3), megabytes(m.bytes)]);
  const sum = list.reduce((s, m) => s + m.bytes, 0);
  return [make("h4", { class: kind }, `${title}: ${megabytes(sum)} MB per step`),
    ...(list.length ? [table(["kind", "tensor or scope", "runs", "MB per step"], names, title, 2)] : [])];
}

function copied(text, shown, said) {
  const select = () => {
    getSelection().selectAllChildren(shown);
    said.textContent = "Selected: press Ctrl+C to copy.";
  };
  if (!navigator.clipboard) return select();
  return navigator.clipboard.writeText(text).then(() => (said.textContent = "Copied."), select);
}

function suggestion(s, n, found, number) {
  const shown = make("pre", { tabindex: "0", "aria-label": `Layout ${n + 1}` }, make("code", null, s.layout));
  const said = make("span", { role: "status" });
  const button = make("button", { type: "button" }, "Copy");
  button.addEventListener("click", () => copied(s.layout, shown, said));
  return make("li", { id: `suggestion-${number}-${n}` },
    make("p", null, make("strong", null, `−${percent(s.gain)}`), " ", make("span", { class: `badge ${s.price}` }, PRICES[s.price]), " ", make("code", null, s.change)),
    make("p", null, `${costs(s.cost, found.unit)} per step of ${found.layers} blocks; `
      + `${signed(gibibytes(s.difference.memory))} GiB per device; ${megabytes(s.block_bytes[0], 1)} to ${megabytes(s.block_bytes[1], 1)} MB per block`),
    make("details", null, make("summary", null, "Removed and added collectives"),
      ...moves(s.difference.lost, "Removed", "lost"), ...moves(s.difference.gained, "Added", "gained")),
    make("details", null, make("summary", null, "Layout file"), make("p", { class: "controls" }, button, " ", said), shown));
}

function suggestions(group, number) {
  const found = group.diagnosis;
  const box = make("div", { class: "suggestions" }, make("h3", null, "Suggestions"));
  if (!found) {
    box.append(make("p", { class: "note" }, "No diagnosis: run ", make("code", null, "ltx2 experiment … --why"), " to diagnose the fastest case."));
    return box;
  }
  box.append(make("p", null, "For ", make("strong", null, found.case), ", each compiled; largest gain first."));
  if (present(found.failure)) {
    box.append(make("p", { class: "bad" }, found.failure));
    return box;
  }
  if (found.suggestions.length) box.append(make("ol", null, ...found.suggestions.map((s, n) => suggestion(s, n, found, number))));
  else box.append(make("p", null, `No single-rule change gains ${percent(found.min_gain, 0)} of the step or more.`));
  const rest = [...found.no_gain.map((c) => [c.change, `no gain: ${percent(-c.gain)}`.replace("-", "−")]),
    ...found.rejected.map((c) => [c.change, `rejected: ${c.reason}`]), ...found.not_compiled.map((change) => [change, "not compiled"]),
    ...found.shipped.map((line) => [line, "estimated"])];
  if (rest.length) {
    box.append(make("details", null, make("summary", null, `Other changes: ${rest.length}`), table(["change", "result"], rest, "Other changes")));
  }
  return box;
}

// Compiled cases, with unique names.
const compiled = data.groups.flatMap((group) => group.cases.filter((c) => c.compiled).map((c) => ({
  ...c, group, name: data.groups.length > 1 ? `${c.label}, ${group.name}` : c.label,
})));

function choices(select, chosen, changed) {
  for (const group of data.groups) {
    const options = compiled.flatMap((c, n) => (c.group === group ? [make("option", { value: String(n) }, c.label)] : []));
    if (data.groups.length === 1) select.append(...options);
    else if (options.length) select.append(make("optgroup", { label: group.name }, ...options));
  }
  select.value = String(Math.min(chosen, compiled.length - 1));
  select.addEventListener("change", changed);
}

const chosen = (id) => compiled[at(id).value];

// Collectives of a step by kind, tensor and axes.
function summed(c) {
  const sums = new Map();
  for (const n of c.compiled.collectives) {
    const { kind, what, axes, runs, bytes } = data.collectives[n];
    const key = JSON.stringify([kind, what, axes]);
    const [r, b] = sums.get(key) || [0, 0];
    sums.set(key, [r + runs, b + bytes]);
  }
  return sums;
}

const FIGURES = [
  ["predicted ms", (c) => predicted(c)?.step, milliseconds], ["compute ms", (c) => predicted(c)?.compute, milliseconds],
  ["memory ms", (c) => predicted(c)?.memory, milliseconds], ["links ms", (c) => predicted(c)?.collective, milliseconds],
  ["launch ms", (c) => predicted(c)?.launch, milliseconds], ["measured ms", (c) => c.measured_ms, milliseconds],
  ["GiB per device", total, gibibytes], ["arguments and results, GiB", (c) => c.compiled.arguments, gibibytes],
  ["temporaries, GiB", (c) => c.compiled.temporaries, gibibytes], ["collectives, MB per block", (c) => c.compiled.block_bytes, megabytes],
  ["received, MB per block", (c) => c.compiled.block_wire_bytes, megabytes], ["TFLOP per step", (c) => c.compiled.flops, (v) => (v / 1e12).toFixed(3)],
  ["memory accessed, GiB per step", (c) => c.compiled.bytes_accessed, gibibytes],
];

function side(a, b) {
  const rows = FIGURES.flatMap(([name, value, text]) => {
    const [x, y] = [value(a), value(b)];
    if (!present(x) && !present(y)) return [];
    const change = present(x) && present(y) && x !== 0 ? signed(percent(y / x - 1)) : "";
    return [[name, present(x) ? text(x) : "", present(y) ? text(y) : "", change]];
  });
  return table(["figure", a.name, b.name, "change"], rows, "Figures side by side", 1);
}

function changes() {
  const [a, b] = [chosen("before"), chosen("after")];
  if (!a || !b) return;
  const [first, second] = [summed(a), summed(b)];
  const more = (of, than) => [...of].map(([key, [runs, bytes]]) => {
    const [r, y] = than.get(key) || [0, 0];
    const [kind, what, axes] = JSON.parse(key);
    return { kind, what, axes, runs: runs - r, bytes: bytes - y };
  }).filter((m) => m.bytes > 0).sort((x, y) => y.bytes - x.bytes);
  const collectives = (list, title, kind) => {
    const sum = list.reduce((s, m) => s + m.bytes, 0);
    const rows = list.map((m) => [m.kind, m.what, m.axes, String(m.runs), megabytes(m.bytes)]);
    return [make("h3", { class: kind }, `${title}: ${megabytes(sum)} MB per step`),
      ...(list.length ? [table(["kind", "tensor or scope", "axes", "runs", "MB per step"], rows, title, 3)] : [])];
  };
  const placement = (c) => new Map(c.compiled.tensors.map((n) => [data.tensors[n].tensor, data.tensors[n].sharding]));
  const [before, after] = [placement(a), placement(b)];
  const names = [...new Set([...before.keys(), ...after.keys()])];
  const moved = names.filter((n) => before.get(n) !== after.get(n)).map((n) => [n, before.get(n) || "–", after.get(n) || "–"]);
  at("changes").replaceChildren(side(a, b),
    ...collectives(more(first, second), "Collectives removed", "lost"), ...collectives(more(second, first), "Collectives added", "gained"),
    make("h3", null, `Tensors placed differently: ${moved.length} of ${names.length}`),
    ...(moved.length ? [table(["tensor", a.name, b.name], moved, "Tensors placed differently")] : []));
}

function collectivesOf(c) {
  const sums = new Map();
  for (const n of c.compiled.collectives) {
    const { kind, axes, runs, bytes, wire_bytes, ms } = data.collectives[n];
    const key = JSON.stringify([axes, kind]);
    const sum = sums.get(key) || [0, 0, 0, 0];
    sums.set(key, [sum[0] + runs, sum[1] + bytes, sum[2] + wire_bytes, sum[3] + (ms || 0)]);
  }
  const rows = [...sums].sort((a, b) => b[1][1] - a[1][1]).map(([key, [runs, bytes, wire, ms]]) =>
    [...JSON.parse(key), String(runs), megabytes(bytes), megabytes(wire), ms.toFixed(3)]);
  if (!rows.length) return make("p", null, "None.");
  return table(["axes", "kind", "runs", "MB", "MB received", "ms on links"], rows, "Collectives by axis and kind", 2);
}

function tensors() {
  const c = chosen("case");
  if (!c) return;
  const found = matches(at("search").value);
  const all = c.compiled.tensors.map((n) => data.tensors[n]);
  const shown = all.filter((t) => found(Object.values(t).join(" ").toLowerCase()));
  at("count").textContent = `${shown.length} of ${all.length}`;
  const rows = shown.map((t) => [t.tensor, t.role, t.sharding, t.axes, megabytes(t.bytes), t.rules]);
  at("tensors").replaceChildren(table(["tensor", "role", "sharding", "axes", "MB per device", "rule"], rows, "Tensor placement"));
}

function one() {
  const c = chosen("case");
  if (c) at("collectives").replaceChildren(collectivesOf(c));
  tensors();
}
