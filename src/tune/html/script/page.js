// Builds the page.

const FEWEST = 20;
const LIMITS = [FEWEST, 50, 100];

data.groups.forEach((group, number) => {
  group.cases.forEach((c, n) => (c.rank = n + 1));
  const section = at(`group-${number}`);
  const figures = PLOTS.map((plot) => new Figure(plot, group));
  let shown = [];
  let limit = FEWEST;
  const cases = new Cases(group, number, (list) => {
    shown = list;
    figures.forEach((figure) => figure.show(shown, limit));
  });
  if (present(group.agreement)) section.append(make("p", null, group.agreement));
  section.append(cases.element, suggestions(group, number));
  if (group.cases.length > FEWEST) {
    const select = make("select", null, ...LIMITS.map((n) => make("option", { value: String(n) }, String(n))));
    select.addEventListener("change", () => {
      limit = Number(select.value);
      figures.forEach((figure) => figure.show(shown, limit));
    });
    section.append(make("p", { class: "controls" }, make("label", null, "Show bars for the first ", select, " cases")));
  }
  section.append(make("div", { class: "figures" }, ...figures.map((figure) => figure.element)));
  cases.update();
});

choices(at("before"), 0, changes);
choices(at("after"), 1, changes);
choices(at("case"), 0, one);
at("search").addEventListener("input", tensors);
if (compiled.length < 2) at("compare").hidden = true;
if (compiled.length < 1) at("one").hidden = true;

// Sections below the groups, built when they are scrolled near the viewport.
const below = new IntersectionObserver((entries) => {
  if (!entries.some((entry) => entry.isIntersecting)) return;
  below.disconnect();
  changes();
  one();
}, { rootMargin: "400px" });
below.observe(at("compare"));
below.observe(at("one"));
