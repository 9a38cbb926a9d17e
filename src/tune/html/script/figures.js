// Figures of a group: a plot, its legend, and a table of its numbers. Drawn when scrolled near the viewport, so that a page with
// hundreds of cases opens at once.

class Figure {
  constructor(plot, group) {
    Object.assign(this, { plot, group, cases: [], limit: 20, near: false, stale: true });
    this.legend = make("p", { class: "legend" });
    this.note = make("p", { class: "note" });
    this.drawing = make("div", { class: "drawing" });
    this.numbers = make("details", null, make("summary", null, "Table of this plot"));
    this.numbers.addEventListener("toggle", () => this.list());
    this.element = make("figure", null, make("figcaption", null, make("h3", null, plot.title), this.legend, this.note), this.drawing, this.numbers);
    this.redraw = soon(() => this.draw());
    figuresNear.observe(this.element);
    widths.observe(this.drawing);
    owners.set(this.element, this).set(this.drawing, this);
  }

  show(cases, limit) {
    this.all = this.plot.of(cases, this.group);
    this.cases = this.plot.bars ? this.all.slice(0, limit) : this.all;
    this.element.hidden = this.all.length === 0;
    // Reserve the height before drawing, so that the content below does not shift.
    this.drawing.style.minHeight = `${this.plot.bars ? BAND * this.cases.length + 44 : 260}px`;
    this.stale = true;
    if (this.near) this.redraw();
  }

  draw() {
    const width = Math.floor(this.drawing.clientWidth);
    if (!this.stale || this.element.hidden || width < 50) return;
    this.stale = false;
    this.width = width;
    const { plot, group, cases, all } = this;
    const entries = plot.legend(cases, group);
    this.legend.replaceChildren(...entries.map(([color, name, kind = "bar"]) =>
      make("span", null, make("i", { class: `key ${kind} of-${color}`, "aria-hidden": "true" }), name)));
    this.note.textContent = cases.length < all.length ? `The first ${cases.length} of ${all.length} cases, in the order of the table and with its filter.` : "";
    const drawn = plot.draw(cases, width, group);
    nameless(drawn);
    // The library rebuilds a tip whenever the pointer moves to another case, after this event.
    drawn.addEventListener("input", soon(() => nameless(drawn)));
    drawn.setAttribute("role", "img");
    drawn.setAttribute("aria-label", `${plot.title}, ${cases.length} cases; the table below has the numbers`);
    this.drawing.replaceChildren(drawn);
    this.list();
    if (!performance.getEntriesByName("first-plot").length) performance.mark("first-plot");
  }

  list() {
    const { plot, numbers, group } = this;
    numbers.lastChild.localName === "div" && numbers.lastChild.remove();
    if (numbers.open) numbers.append(table(plot.head, this.cases.map((c) => plot.row(c, group)), `Table: ${plot.title}`, 1));
  }
}

// The library names a plot's groups by `aria-label`, which an element without a role must not have.
function nameless(drawn) {
  for (const group of drawn.querySelectorAll("g[aria-label]")) {
    group.classList.add(...group.getAttribute("aria-label").split(" "));
    group.removeAttribute("aria-label");
  }
}

const owners = new Map();
const figuresNear = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const figure = owners.get(entry.target);
    figure.near = entry.isIntersecting;
    if (figure.near) figure.redraw();
  }
}, { rootMargin: "400px" });
const widths = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const figure = owners.get(entry.target);
    if (figure.width === undefined || Math.floor(figure.drawing.clientWidth) === figure.width) continue;
    figure.stale = true;
    if (figure.near) figure.redraw();
  }
});
