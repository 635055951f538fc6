/** Several runs over one another: curves, which settings and environments differ, and whether they must have the same bits. */

import { get, ofRun } from "./api.js";
import { AXES, Chart, JUDGED } from "./chart.js";
import { choice, command, el, empty, panel, put, select, table } from "./dom.js";
import { anything, duration, fixed, folderOf, known, number, percent, plural, si, utilization } from "./format.js";
import { linesOfGroups, linesOfRuns, meanAndBand } from "./groups.js";
import { LineLegend } from "./legend.js";
import { stateChip } from "./runs.js";
import { runAddress } from "./router.js";
import { shortName } from "./settings.js";
import uPlot from "./vendor/uPlot.esm.js";

const POINTS = 800;
/** More differences than this are folded away. */
const MANY = 24;
/** More settings than this do not fit into a run's label. */
const MOST_IN_LABEL = 2;
/** More runs than this have no legend beside each chart, since the one on top names their colors, and a row in a table each. */
const CROWD = 6;

/** @typedef {{name: string, title: string, format: (value: number | null) => string, tick?: (value: number | null) => string}} Metric */
/** @type {Metric[]} */
const METRICS = [
  { name: "loss", title: "Loss", format: (value) => fixed(value), tick: (value) => number(value, 4) },
  { name: "eval_loss", title: "Held-out loss", format: (value) => fixed(value), tick: (value) => number(value, 4) },
  { name: "bits_per_byte", title: "Bits per byte", format: (value) => fixed(value) },
  { name: "grad_norm", title: "Gradient norm", format: (value) => number(value) },
  { name: "lr", title: "Learning rate", format: (value) => number(value, 3) },
  { name: "tokens_per_s", title: "Tokens per second", format: (value) => si(value) },
  { name: "mfu", title: "MFU", format: (value) => utilization(value) },
  { name: "step_s", title: "Step time", format: (value) => duration(value) },
  { name: "peak_memory_bytes", title: "Peak memory", format: (value) => si(value, "B") },
];
const BESIDE = ["eval_loss", "grad_norm", "tokens_per_s", "mfu"];

/** @type {import("./main.js").MakeView} */
export function compareView(host, page) {
  const ids = (page.params.get("ids") ?? "").split(",").filter(Boolean);
  let x = page.params.get("x") ?? "step";
  let main = METRICS.some(({ name }) => name === page.params.get("y")) ? String(page.params.get("y")) : "loss";
  let weight = Number(page.params.get("smooth")) || 0;
  const range = { first: page.params.get("first"), last: page.params.get("last") };
  let logX = page.params.get("logx") === "1";
  const logY = page.params.get("logy") === "1";
  /** @type {any[]} */
  let curves = [];
  /** @type {any[]} */
  let rows = [];
  /** Settings of the run that differ. @type {any[]} */
  let settings = [];
  /** Path of the setting by whose values runs are one line; empty: each run is. */
  let group = page.params.get("group") ?? "";
  /** @type {import("./groups.js").RunLine[]} */
  let drawn = [];
  /** @type {Chart[]} */
  let charts = [];

  if (ids.length < 2) {
    put(host, empty("Nothing to compare", "Choose two runs or more in ", el("a", { href: "#/", text: "the list" }), " (x), then compare them (c)."));
    return { update: async () => {} };
  }

  const legend = new LineLegend({
    order: page.params.get("order") ?? "",
    onOrder: (order) => page.set({ order }),
    onHide: (names) => charts.forEach((chart) => chart.hide(names)),
    onPoint: (name) => charts.forEach((chart) => chart.point(name)),
  });
  const grouping = el("span");
  const bits = el("div");
  const grid = el("div", { class: ids.length > CROWD ? "charts compare crowded" : "charts compare" });
  const tables = el("div");
  const smoothing = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(weight), "aria-label": "Smoothing", on: { input: () => ((weight = Number(smoothing.value)), page.set({ smooth: weight || null }), draw()) } });
  const all = el("button", { type: "button", text: "Show all", hidden: range.first === null, on: { click: () => zoom(null, null) } });
  const logBox = el("input", { type: "checkbox", checked: logX, on: { change: () => ((logX = logBox.checked), page.set({ logx: logX ? 1 : null }), draw()) } });
  put(
    host,
    legend.element,
    bits,
    el(
      "div", { class: "bar" },
      select("curve", METRICS.map(({ name, title }) => [name, title]), main, (name) => ((main = name), page.set({ y: name }), rebuild())),
      grouping,
      choice("Axis", AXES.map(([name, title]) => [name, title]), x, (name) => ((x = name), page.set({ x }), zoom(null, null))),
      el("label", { class: "field" }, el("span", { text: "smoothing" }), smoothing),
      el("label", { class: "field" }, logBox, el("span", { text: "logarithmic axis" })),
      all,
    ),
    grid,
    tables,
  );

  /** @param {number | null} first @param {number | null} last */
  function zoom(first, last) {
    range.first = first === null ? null : String(Math.floor(first));
    range.last = last === null ? null : String(Math.ceil(last));
    all.hidden = first === null;
    page.set(range);
    page.reload();
  }

  function rebuild() {
    for (const chart of charts) chart.close();
    const names = [main, ...BESIDE.filter((name) => name !== main)];
    const setting = settings.find(({ path }) => path === group);
    drawn = setting ? linesOfGroups(setting, settings.map(({ path }) => path)) : linesOfRuns(ids, (index) => labelOf(ids[index], index));
    grid.classList.toggle("crowded", drawn.length > CROWD);
    charts = names.map((name, place) => {
      const metric = /** @type {Metric} */ (METRICS.find((one) => one.name === name));
      const lines = drawn.map(({ name: own, label, color }) => ({ name: own, label, color, format: metric.format, tick: metric.tick, sparse: true, exact: metric.name.startsWith("eval") }));
      const chart = new Chart({ title: metric.title, lines, axis: x, sync: "compare", height: place ? 150 : 320, noted: !place, marks: false, below: true, nearest: drawn.length > CROWD, crosses: JUDGED.has(name), onZoom: zoom, say: page.say });
      chart.element.classList.toggle("wide", place === 0);
      chart.element.dataset.metric = name;
      if (place === 0) chart.log = logY;
      return chart;
    });
    put(grid, charts.map((chart) => chart.element));
    const paths = settings.map(({ path }) => path);
    put(grouping, paths.length > 0 && select("group", [["", "each run"], ...paths.map((path) => /** @type {[string, string]} */ ([path, `by ${shortName(path, paths)}`]))], group, (path) => ((group = path), page.set({ group }), rebuild())));
    draw();
  }

  /** Runs may share a name, and then the settings that differ tell them apart, else their folders; where these are called alike too, their identifiers do. @param {string} id @param {number} index */
  function labelOf(id, index) {
    const name = rows[index]?.name ?? id;
    const alike = rows.filter((row) => row.name === name);
    if (alike.length < 2) return name;
    const chosen = settingsOf(index);
    if (chosen && rows.every((row, other) => other === index || row.name !== name || settingsOf(other) !== chosen)) return `${name} · ${chosen}`;
    const folder = folderOf(rows[index]);
    return alike.filter((row) => folderOf(row) === folder).length > 1 ? id : folder;
  }

  /** A run's values of the first settings that differ, as "lr 0.001". @param {number} index @returns {string} */
  function settingsOf(index) {
    return settings.slice(0, MOST_IN_LABEL).map((one) => `${one.path.split(".").at(-1)} ${anything(one.values[index])}`).join(", ");
  }

  function draw() {
    for (const chart of charts) {
      chart.weight = weight;
      chart.setAxis(x, logX);
      const joined = joinedCurves(String(chart.element.dataset.metric));
      chart.element.hidden = !joined.x.length && !chart.element.classList.contains("wide");
      chart.set(joined);
    }
    drawLegend();
  }

  function drawLegend() {
    const metric = /** @type {Metric} */ (METRICS.find((one) => one.name === main));
    const { series } = joinedCurves(main);
    legend.set(
      drawn.map(({ name, label, color, runs }) => {
        const value = series[name]?.y.findLast(known) ?? null;
        const row = rows[runs[0]];
        const parts = group ? [el("b", { text: label })] : [el("a", { href: runAddress(row.id) }, el("b", { text: label })), stateChip(row.state)];
        return { name, label, color, value, text: `${metric.title.toLowerCase()} ${metric.format(value)}`, parts };
      }),
    );
  }

  /** @param {string} name @returns {import("./chart.js").Curves} */
  function joinedCurves(name) {
    const parts = curves.map((one) => {
      const values = one.series[name]?.y ?? [];
      const kept = one.x.map((/** @type {number} */ at, /** @type {number} */ index) => [at, values[index] ?? null]).filter((/** @type {any[]} */ [at, value]) => known(value) && (!logX || at > 0));
      return [kept.map((/** @type {any[]} */ [at]) => at), kept.map((/** @type {any[]} */ [, value]) => value)];
    });
    // Of a group: its mean, and its least and greatest, which are three lines over one axis.
    const tables = drawn.map(({ runs }) => {
      if (!group) return parts[runs[0]];
      const { x: axis, y, lo, hi } = meanAndBand(runs.map((index) => ({ x: parts[index][0], y: parts[index][1] })));
      return [axis, y, lo, hi];
    });
    const [axis, ...columns] = /** @type {any} */ (uPlot).join(tables);
    const width = group ? 3 : 1;
    const series = Object.fromEntries(drawn.map(({ name: own }, index) => {
      const [y = [], lo, hi] = columns.slice(width * index, width * (index + 1));
      return [own, group ? { y, lo: bridged(axis, lo), hi: bridged(axis, hi) } : { y }];
    }));
    const marks = drawn.flatMap(({ name: own, runs }) => runs.flatMap((index) => (curves[index]?.marks ?? []).filter((/** @type {any} */ mark) => mark.kind === "nonfinite").map((/** @type {any} */ mark) => ({ ...mark, line: own }))));
    return { x: axis ?? [], series, marks, reduced: curves.some((one) => one.reduced), total: curves.reduce((sum, one) => sum + (one.total ?? 0), 0) };
  }

  return {
    async update(signal) {
      const names = METRICS.map(({ name }) => name).join(",");
      const asked = ids.map((id) => get(ofRun(id, "curves"), { names, x, ...range, points: POINTS }, signal));
      const [comparison, all, ...found] = await Promise.all([get("/api/compare", { ids: ids.join(",") }, signal).catch((/** @type {Error} */ error) => ({ missing: true, error })), get("/api/runs", {}, signal), ...asked]);
      curves = found;
      const before = [group, ...rows.map((row, index) => labelOf(row.id, index))].join();
      settings = (comparison.settings ?? []).filter((/** @type {any} */ one) => one.owner === "run");
      rows = ids.map((id) => all.runs.find((/** @type {any} */ row) => row.id === id) ?? { id, name: id, state: "unknown" });
      if (!settings.some(({ path }) => path === group)) group = "";
      drawBits(bits, comparison.same_bits, rows);
      if (comparison.missing) put(tables, comparison.error && el("p", { class: "muted" }, `The runs' settings cannot be compared: ${comparison.error.message}`));
      else drawTables(tables, comparison, rows.map((row, index) => labelOf(row.id, index)));
      if (!charts.length || before !== [group, ...rows.map((row, index) => labelOf(row.id, index))].join()) rebuild();
      else draw();
    },
    keys: [["a", "show all", () => zoom(null, null)]],
    close: () => charts.forEach((chart) => chart.close()),
  };
}

/** Values without the gaps between them, on straight lines: a band has none. @param {number[]} axis @param {(number | null)[]} values */
function bridged(axis, values) {
  const at = values.flatMap((value, index) => (known(value) ? [index] : []));
  let next = 0;
  return values.map((value, index) => {
    if (known(value)) return value;
    while (next < at.length && at[next] < index) next += 1;
    if (next === 0 || next === at.length) return null;
    const [left, right] = [at[next - 1], at[next]];
    const share = (axis[index] - axis[left]) / (axis[right] - axis[left]);
    return Number(values[left]) + share * (Number(values[right]) - Number(values[left]));
  });
}

/** @param {Element} host @param {any} same @param {any[]} rows */
function drawBits(host, same, rows) {
  if (!same) return put(host);
  const parts = same.parts_at;
  const diff = command(`phalanx diff ${rows[0].path ?? "A"} ${rows[1].path ?? "B"} --replay`);
  const why = (same.why_not ?? []).map(anything).join("; ");
  const steps = known(same.steps_compared) ? `, in ${plural(same.steps_compared, "step")} that all recorded,` : "";
  const [tone, text] = !same.expected
    ? ["plain", `These runs need not have the same bits: ${why || "settings that belong to the run differ (below)"}.`]
    : known(parts)
      ? ["bad", `These runs must have the same bits, but they part at step ${parts}. What parted them: `]
      : ["good", `These runs must have the same bits${steps} and they have.`];
  put(host, el("p", { class: "verdict", data: { tone } }, text, tone === "bad" && diff));
}

/** @param {Element} host @param {any} comparison @param {string[]} names */
function drawTables(host, comparison, names) {
  /** @param {string} title @param {any[]} differences @param {string} same */
  const differing = (title, differences, same) => {
    const owned = (differences ?? []).some((one) => one.owner);
    const rows = (differences ?? []).map((one) => [
      el("code", { text: anything(one.path) }),
      ...(owned ? [el("span", { class: "owner", data: { owner: String(one.owner) }, text: String(one.owner).toLowerCase() })] : []),
      ...names.map((_, index) => anything(one.values[index])),
    ]);
    if (!rows.length) return panel(title, el("p", { class: "muted", text: same }));
    return el("details", { class: "panel fold", open: rows.length <= MANY }, el("summary", { text: `${title} (${rows.length})` }), turned(["", ...(owned ? ["Belongs to"] : []), ...names], rows, title));
  };
  put(
    host,
    summaryTable(comparison.summary, names),
    differing("Settings that differ", comparison.settings, "All settings are the same."),
    (comparison.notes ?? []).map((/** @type {unknown} */ note) => el("p", { class: "note", text: anything(note) })),
    differing("Environments that differ", comparison.environment, "The environments are the same."),
  );
}

/** @param {any[]} summary @param {string[]} names */
function summaryTable(summary, names) {
  if (!summary?.length) return null;
  const rows = summary.map((row) => [anything(row.name).replaceAll("_", " "), ...names.map((_, index) => el("span", { class: row.best === index ? "best" : null, text: shown(row.name, row.values[index]) }))]);
  return panel("Which is better where", turned(["", ...names], rows, "Which is better where"));
}

/** A table with a column for each run; of many runs, with a row for each. @param {any[]} head @param {any[][]} rows @param {string} title */
function turned(head, rows, title) {
  if (head.length <= CROWD + 2) return table(head, rows, title);
  const all = [head, ...rows];
  const [first, ...others] = head.map((_, index) => all.map((row) => row[index]));
  return table(first, others, title);
}

/** A result in the unit that its name tells. @param {string} name @param {any} value */
function shown(name, value) {
  if (!known(value)) return anything(value);
  if (name === "mfu") return utilization(value);
  if (/goodput|share/.test(name)) return percent(value);
  if (/(_s|seconds)$/.test(name) && !/per_s$/.test(name)) return duration(value);
  if (/per_s$/.test(name)) return si(value);
  return number(value, 5);
}
