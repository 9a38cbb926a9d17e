// DOM elements and text. Data only ever becomes text nodes, never markup.

const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const GIB = 2 ** 30;

function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

const present = (value) => value !== undefined && value !== null;
const milliseconds = (v) => (present(v) ? v.toFixed(v < 1 ? 4 : 2) : "");
const megabytes = (bytes, digits = 3) => (present(bytes) ? (bytes / 1e6).toFixed(digits) : "");
const gibibytes = (bytes) => (present(bytes) ? (bytes / GIB).toFixed(2) : "");
const percent = (fraction, digits = 1) => (present(fraction) ? `${(fraction * 100).toFixed(digits)} %` : "");
const signed = (text) => (text.startsWith("-") ? text.replace("-", "−") : `+${text}`);

// A box that scrolls horizontally, also by keyboard.
function scrolled(table, label, kind = "") {
  return make("div", { class: `scroll ${kind}`, tabindex: "0", role: "group", "aria-label": label }, table);
}

// A table of texts whose first column is the row header; columns from `numbers` on are right-aligned.
function table(head, rows, label, numbers = head.length) {
  const kind = (n) => (n >= numbers ? "number" : undefined);
  const heads = head.map((text, n) => make("th", { scope: "col", class: kind(n) }, text));
  const cell = (text, n) => (n === 0 ? make("th", { scope: "row" }, text) : make("td", { class: kind(n) }, text));
  const body = rows.map((row) => make("tr", null, ...row.map(cell)));
  return scrolled(make("table", null, make("thead", null, make("tr", null, ...heads)), make("tbody", null, ...body)), label);
}

// Whether a text contains all words of a search.
function matches(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  return (text) => wanted.every((word) => text.includes(word));
}

// Runs a function once in the next animation frame, however often it is requested before.
function soon(run) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      run();
    });
  };
}
