// Plots by Observable Plot, each with a table of the same numbers.

const BAND = 40;
const FONT = 12;
const MARGIN = { left: 4, right: 12 };
const ruler = document.createElement("canvas").getContext("2d");

function measured(text) {
  ruler.font = `${FONT}px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width;
}

// Shortens a label that does not fit by cutting out its middle, because both ends identify the case.
function fitted(text, width) {
  if (measured(text) <= width) return text;
  let [least, most] = [0, text.length];
  const cut = (n) => `${text.slice(0, Math.ceil(n * 0.6))}…${text.slice(text.length - Math.floor(n * 0.4))}`;
  while (least < most) {
    const n = Math.ceil((least + most) / 2);
    if (measured(cut(n)) <= width) least = n;
    else most = n - 1;
  }
  return cut(least);
}

const style = { fontSize: `${FONT}px`, fontFamily: "inherit", background: "none" };
const few = (width) => Math.max(2, Math.floor(width / 110));

// One bar of several parts per case, below its label on a separate line.
function bars(cases, width, { parts, colors, unit, text, value, ticks = [], dots = [], hover }) {
  const rows = cases.map((c, n) => ({ c, n, value: value(c) }));
  const segments = rows.flatMap(({ c, n }) => {
    let end = 0;
    return parts(c).map(([part, size]) => ({ n, part, from: end, to: (end += size) }));
  });
  const tick = rows.flatMap(({ c, n }) => ticks.flatMap((t) => (present(t.at(c)) ? [{ n, x: t.at(c), part: t.part }] : [])));
  const dot = rows.flatMap(({ c, n }) => dots.flatMap((d) => (present(d.at(c)) ? [{ n, x: d.at(c), part: d.part }] : [])));
  const longest = Math.max(1e-12, ...segments.map((s) => s.to), ...tick.map((t) => t.x), ...dot.map((d) => d.x));
  const free = width - MARGIN.left - MARGIN.right;
  const names = rows.map((row) => ({ ...row, name: fitted(row.c.label, free - measured(row.value) - 16) }));
  const above = 8 - BAND / 2;
  return Plot.plot({
    width, style,
    height: BAND * rows.length + 44,
    marginLeft: MARGIN.left, marginRight: MARGIN.right, marginTop: 2, marginBottom: 42,
    x: { domain: [0, longest * 1.03], label: unit, ticks: few(width), grid: true, tickFormat: text },
    y: { type: "band", axis: null, domain: rows.map((row) => row.n), padding: 0, round: false },
    color: { domain: Object.keys(colors), range: Object.values(colors) },
    marks: [
      Plot.barX(segments, { x1: "from", x2: "to", y: "n", fill: "part", insetTop: 17, insetBottom: 7 }),
      Plot.tickX(tick, { x: "x", y: "n", stroke: "part", strokeWidth: 2.5, insetTop: 15, insetBottom: 5 }),
      Plot.dot(dot, { x: "x", y: "n", fill: "part", stroke: "var(--paper)", symbol: "diamond", r: 5, dy: 5 }),
      Plot.text(names, { y: "n", text: "name", frameAnchor: "left", textAnchor: "start", dy: above }),
      Plot.text(names, { y: "n", text: "value", frameAnchor: "right", textAnchor: "end", dy: above, fill: "var(--quiet)" }),
      Plot.tip(rows, Plot.pointerY({ y: "n", frameAnchor: "left", title: (row) => hover(row.c), ...tipped(width) })),
    ],
  });
}

const tipped = (width) => ({ lineWidth: width < 420 ? 17 : 24, fontSize: FONT, lineHeight: 1.3, fill: "var(--paper)", stroke: "var(--line)", maxRadius: BAND });

// Points may coincide, so they have no labels, but a tip for the nearest point.
function points(dots, width, { x, y, colors, lines, hover }) {
  // A narrow plot has no room for a tip on either side of a point.
  const place = width < 420 ? { px: "x", py: "y", frameAnchor: "bottom-left", anchor: "bottom-left", dx: -40 } : { x: "x", y: "y" };
  return Plot.plot({
    width, style,
    height: Math.min(380, Math.max(260, width * 0.7)),
    marginLeft: 52, marginRight: MARGIN.right + 8, marginTop: 26, marginBottom: 42,
    x: { grid: true, ...x }, y: { grid: true, ...y },
    color: { domain: Object.keys(colors), range: Object.values(colors) },
    marks: [
      ...lines.map((line) => Plot.line(line, { x: "x", y: "y", stroke: "var(--quiet)", strokeWidth: 1.5 })),
      Plot.dot(dots, { x: "x", y: "y", fill: "part", stroke: "var(--paper)", strokeWidth: 0.75, r: 4.5 }),
      Plot.dot(dots, Plot.pointer({ x: "x", y: "y", stroke: "var(--ink)", strokeWidth: 2, r: 6, maxRadius: BAND })),
      Plot.tip(dots, Plot.pointer({ ...place, title: (d) => hover(d), ...tipped(width) })),
    ],
  });
}

// A few round values of a logarithmic axis.
function round(low, high, count) {
  const values = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const digit of [1, 2, 5]) values.push(digit * 10 ** power);
  }
  let inside = values.filter((v) => v >= low && v <= high);
  const powers = inside.filter((v) => /^10*$|^0\.0*1$/.test(String(v)));
  if (inside.length > count && powers.length > 1) inside = powers;
  const step = Math.ceil(inside.length / count);
  return inside.filter((_, n) => n % step === 0);
}

const short = (v) => (v >= 1e4 ? `${v / 1e3}k` : String(Number(v.toPrecision(3))));

function roof(cases, chip) {
  const dots = cases.flatMap((c) => {
    const step = c.measured_ms ?? predicted(c)?.step;
    if (!c.compiled || !(step > 0)) return [];
    const [x, y] = [c.compiled.flops / c.compiled.bytes_accessed, c.compiled.flops / step / 1e9];
    return x > 0 && y > 0 && Number.isFinite(x) ? [{ c, x, y, part: present(c.measured_ms) ? "measured" : "predicted" }] : [];
  });
  const knee = chip.peak / chip.bandwidth;
  const [low, high] = [Math.min(knee, ...dots.map((d) => d.x)) / 4, Math.max(knee, ...dots.map((d) => d.x)) * 4];
  const [floor, top] = [Math.min(chip.peak / 1e12, ...dots.map((d) => d.y)) / 4, (chip.peak / 1e12) * 2];
  const start = Math.max(low, (floor * 1e12) / chip.bandwidth);
  const line = [start, knee, high].map((x) => ({ x, y: Math.min(chip.peak, x * chip.bandwidth) / 1e12 }));
  return { dots, low, high, floor, top, line };
}

function drawRoofline(cases, width, group) {
  const { dots, low, high, floor, top, line } = roof(cases, group.chip);
  const axis = (from, to, label, count) => ({ type: "log", domain: [from, to], label, ticks: round(from, to, count), tickFormat: short });
  return points(dots, width, {
    x: axis(low, high, "FLOP per byte of memory", few(width)), y: axis(floor, top, "TFLOP/s per device", 6), lines: [line],
    colors: { predicted: "var(--step)", measured: "var(--measured)" },
    hover: (d) => `${d.c.label}\n${d.y.toFixed(0)} TFLOP/s ${d.part}\n${d.x.toFixed(0)} FLOP per byte`,
  });
}

const isMeasured = (c) => present(c.measured_ms);
const both = (cases) => cases.filter((c) => predicted(c)?.step > 0 && c.measured_ms > 0);

function drawAgreement(cases, width) {
  const dots = both(cases).map((c) => ({ c, x: predicted(c).step, y: c.measured_ms, part: "measured" }));
  const all = dots.flatMap((d) => [d.x, d.y]);
  const domain = [Math.min(...all) * 0.95, Math.max(...all) * 1.05];
  const tickFormat = (v) => String(Number(v.toPrecision(4)));
  return points(dots, width, {
    x: { domain, label: "predicted ms", ticks: few(width), tickFormat }, y: { domain, label: "measured ms", ticks: 6, tickFormat },
    lines: [domain.map((v) => ({ x: v, y: v }))],
    colors: { measured: "var(--measured)" },
    hover: (d) => `${d.c.label}\npredicted ${milliseconds(d.x)} ms\nmeasured ${milliseconds(d.y)} ms`,
  });
}

const timeParts = (c) => (predicted(c) ? [["compute", predicted(c).compute], ["memory", predicted(c).memory], ["links", predicted(c).collective]] : []);

// `of`: selects the cases that a plot can show; `bars`: whether the number of cases is limited.
const PLOTS = [
  {
    title: "Step time by part", bars: true,
    of: (cases) => cases.filter((c) => predicted(c) || present(c.measured_ms)),
    legend: (cases) => [...(cases.some(predicted) ? [["compute", "compute"], ["memory", "memory"], ["links", "links"], ["step", "predicted step", "tick"]] : []),
      ...(cases.some(isMeasured) ? [["measured", "measured step", "dot"]] : [])],
    draw: (cases, width) => bars(cases, width, {
      parts: timeParts,
      colors: { compute: "var(--compute)", memory: "var(--memory)", links: "var(--links)", step: "var(--step)", measured: "var(--measured)" },
      unit: "milliseconds of a step", text: short,
      value: (c) => `${milliseconds(c.measured_ms ?? predicted(c)?.step)} ms`,
      ticks: [{ part: "step", at: (c) => predicted(c)?.step }],
      dots: [{ part: "measured", at: (c) => c.measured_ms }],
      hover: (c) => [c.label, ...timeParts(c).map(([part, v]) => `${part} ${milliseconds(v)} ms`),
        ...(predicted(c) ? [`predicted step ${milliseconds(predicted(c).step)} ms`] : []),
        ...(present(c.measured_ms) ? [`measured step ${milliseconds(c.measured_ms)} ms`] : [])].join("\n"),
    }),
    head: ["case", "compute", "memory", "links", "predicted ms", "measured ms"],
    row: (c) => [c.label, ...["compute", "memory", "collective", "step"].map((part) => milliseconds(predicted(c)?.[part])), milliseconds(c.measured_ms)],
  },
  {
    title: "Memory per device", bars: true,
    of: (cases) => cases.filter((c) => c.compiled),
    legend: (cases) => [["arguments", "arguments and results"], ["temporaries", "temporaries"],
      ...(cases.some((c) => present(c.compiled.capacity)) ? [["step", "capacity", "tick"]] : [])],
    draw: (cases, width) => bars(cases, width, {
      parts: (c) => [["arguments", c.compiled.arguments / GIB], ["temporaries", c.compiled.temporaries / GIB]],
      colors: { arguments: "var(--arguments)", temporaries: "var(--temporaries)", step: "var(--step)" },
      unit: "GiB", text: short,
      value: (c) => `${gibibytes(total(c))} GiB`,
      ticks: [{ part: "step", at: (c) => (present(c.compiled.capacity) ? c.compiled.capacity / GIB : null) }],
      hover: (c) => [c.label, `arguments and results ${gibibytes(c.compiled.arguments)} GiB`, `temporaries ${gibibytes(c.compiled.temporaries)} GiB`,
        ...(present(c.compiled.capacity) ? [`capacity ${gibibytes(c.compiled.capacity)} GiB`] : [])].join("\n"),
    }),
    head: ["case", "arguments", "temporaries", "GiB", "of"],
    row: (c) => [c.label, gibibytes(c.compiled.arguments), gibibytes(c.compiled.temporaries), gibibytes(total(c)), gibibytes(c.compiled.capacity)],
  },
  {
    title: "Bytes received per block", bars: true,
    // Cases are ranked by this if times cannot be predicted.
    of: (cases) => (cases.some(predicted) ? [] : cases.filter((c) => c.compiled)),
    legend: () => [["links", "received by a device"]],
    draw: (cases, width) => bars(cases, width, {
      parts: (c) => [["links", c.compiled.block_wire_bytes / 1e6]], colors: { links: "var(--links)" }, unit: "MB", text: short,
      value: (c) => `${megabytes(c.compiled.block_wire_bytes)} MB`,
      hover: (c) => `${c.label}\nreceived ${megabytes(c.compiled.block_wire_bytes)} MB\noutputs ${megabytes(c.compiled.block_bytes)} MB`,
    }),
    head: ["case", "MB received", "MB of outputs"],
    row: (c) => [c.label, megabytes(c.compiled.block_wire_bytes), megabytes(c.compiled.block_bytes)],
  },
  {
    title: "Roofline of a step",
    of: (cases, group) => (group.chip ? roof(cases, group.chip).dots.map((d) => d.c) : []),
    legend: (cases, group) => [...(cases.every(isMeasured) ? [] : [["predicted", "predicted"]]), ...(cases.some(isMeasured) ? [["measured", "measured"]] : []),
      ["roof", `${group.chip.name}: ${(group.chip.peak / 1e12).toFixed(0)} TFLOP/s, ${(group.chip.bandwidth / 1e9).toFixed(0)} GB/s`, "tick"]],
    draw: drawRoofline,
    head: ["case", "FLOP per byte", "TFLOP/s", "by"],
    row: (c, group) => roof([c], group.chip).dots.flatMap((d) => [c.label, d.x.toFixed(1), d.y.toFixed(1), d.part]),
  },
  {
    title: "Measured against predicted",
    of: (cases) => (both(cases).length > 1 ? both(cases) : []),
    legend: () => [["measured", "a case"], ["roof", "equal", "tick"]],
    draw: drawAgreement,
    head: ["case", "predicted ms", "measured ms", "ratio"],
    row: (c) => [c.label, milliseconds(predicted(c).step), milliseconds(c.measured_ms), (predicted(c).step / c.measured_ms).toFixed(3)],
  },
];
