// Table of a group's cases, filtered by words and sorted by any column.

const total = (c) => c.compiled && c.compiled.arguments + c.compiled.temporaries;
const predicted = (c) => c.compiled?.predicted_ms;

// `value` is the sort key, `text` the cell's text.
const COLUMNS = [
  { name: "rank", number: true, value: (c) => c.rank, text: (c) => String(c.rank) },
  { name: "case", value: (c) => c.label, text: (c) => c.label },
  { name: "behind", number: true, value: (c) => c.behind, text: (c) => percent(c.behind) },
  { name: "predicted ms", number: true, value: (c) => predicted(c)?.step, text: (c) => milliseconds(predicted(c)?.step) },
  { name: "compute", number: true, value: (c) => predicted(c)?.compute, text: (c) => milliseconds(predicted(c)?.compute) },
  { name: "memory", number: true, value: (c) => predicted(c)?.memory, text: (c) => milliseconds(predicted(c)?.memory) },
  { name: "links", number: true, value: (c) => predicted(c)?.collective, text: (c) => milliseconds(predicted(c)?.collective) },
  { name: "measured ms", number: true, value: (c) => c.measured_ms, text: (c) => milliseconds(c.measured_ms) },
  { name: "MB per block", number: true, value: (c) => c.compiled?.block_bytes, text: (c) => megabytes(c.compiled?.block_bytes, 1) },
  { name: "received", number: true, value: (c) => c.compiled?.block_wire_bytes, text: (c) => megabytes(c.compiled?.block_wire_bytes, 1) },
  { name: "GiB", number: true, value: total, text: (c) => gibibytes(total(c)), bad: (c) => c.compiled && !c.compiled.fits },
  { name: "of", number: true, value: (c) => c.compiled?.capacity, text: (c) => (c.compiled?.capacity ? (c.compiled.capacity / GIB).toFixed(1) : "") },
  { name: "compile s", number: true, value: (c) => c.compiled?.compile_seconds, text: (c) => c.compiled?.compile_seconds.toFixed(0) ?? "" },
];

function compared(a, b) {
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}

class Cases {
  // `changed` is called with the visible cases in their order.
  constructor(group, number, changed) {
    this.group = group;
    this.changed = changed;
    this.columns = COLUMNS.filter((column) => group.cases.some((c) => column.text(c) !== ""));
    this.sorted = { column: this.columns[0], down: false };
    this.words = "";
    this.body = make("tbody");
    this.rows = new Map(group.cases.map((c) => [c, this.row(c)]));
    this.heads = this.columns.map((column) => this.head(column));
    const filter = make("input", { type: "search", id: `filter-${number}`, placeholder: "layout, mesh, error …" });
    filter.addEventListener("input", () => {
      this.words = filter.value;
      this.update();
    });
    this.count = make("span", { role: "status" });
    const head = make("thead", null, make("tr", null, ...this.heads.map((h) => h.cell)));
    this.element = make("div", null,
      make("p", { class: "controls" }, make("label", null, "Filter ", filter), " ", this.count),
      scrolled(make("table", { class: "cases" }, head, this.body), `Cases of ${group.name || "the experiment"}`, "tall"));
  }

  head(column) {
    const button = make("button", { type: "button" }, column.name, make("span", { class: "mark", "aria-hidden": "true" }));
    button.addEventListener("click", () => {
      this.sorted = { column, down: this.sorted.column === column && !this.sorted.down };
      this.update();
    });
    return { cell: make("th", { scope: "col", class: column.number ? "number" : undefined }, button), column };
  }

  row(c) {
    const error = c.error ? [make("div", { class: "bad" }, c.error)] : [];
    const label = c.own_layout ? make("strong", null, c.label) : c.label;
    const cells = this.columns.map((column) => {
      if (column.name === "case") return make("th", { scope: "row" }, label, ...error);
      return make("td", { class: column.bad?.(c) ? "number bad" : "number" }, column.text(c));
    });
    return make("tr", null, ...cells);
  }

  update() {
    const found = matches(this.words);
    const { column, down } = this.sorted;
    const shown = this.group.cases.filter((c) => found(`${c.label} ${c.error || ""}`.toLowerCase()));
    // Missing values sort last in both directions.
    shown.sort((a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      if (!present(x) || !present(y)) return Number(!present(x)) - Number(!present(y)) || a.rank - b.rank;
      return (down ? compared(y, x) : compared(x, y)) || a.rank - b.rank;
    });
    for (const { cell, column: own } of this.heads) {
      cell.setAttribute("aria-sort", own === column ? (down ? "descending" : "ascending") : "none");
    }
    this.count.textContent = `${shown.length} of ${this.group.cases.length}`;
    this.body.replaceChildren(...shown.map((c) => this.rows.get(c)));
    this.changed(shown);
  }
}
