/** One run: what is wrong on top, then its curves with marks of what happened, then what exactly it is. */

import { exported, get, ofRun } from "./api.js";
import { stackedBar } from "./bars.js";
import { AXES, Chart, JUDGED, MARKS } from "./chart.js";
import { choice, command, el, empty, panel, put, say, style, table } from "./dom.js";
import { MFU_HINT, age, anything, bytes, duration, fixed, folderOf, known, moment, number, percent, plural, si, utilization, whole } from "./format.js";
import { problemBox } from "./problems.js";
import { samplesBox } from "./samples.js";
import { servedBox } from "./serving.js";
import { folderName, layoutText, stateChip } from "./runs.js";
import { runAddress } from "./router.js";

const POINTS = 1200;
const MOST_TOLD = 60;
const MEMORY = ["parameters", "gradients", "optimizer", "activations", "buffers", "other"];
const MEMORY_COLORS = ["--c1", "--c2", "--c3", "--c4", "--c6", "--c7"];

/** @typedef {import("./chart.js").Line} Line */

/** @type {Line[]} */
const MEMORY_LINES = MEMORY.map((kind, index) => ({ name: `memory.${kind}`, label: kind, color: MEMORY_COLORS[index], format: bytes, sparse: true, exact: true }));

/** Charts in the order of the page: title, lines, what else. @type {[string, Line[], {zero?: boolean, optional?: boolean, wide?: boolean}][]} */
const CHARTS = [
  ["Loss", [{ name: "loss", label: "training", color: "--c1", format: (value) => fixed(value), tick: (value) => number(value, 4) }, { name: "eval_loss", label: "held out", color: "--c2", exact: true, format: (value) => fixed(value), sparse: true }], { wide: true }],
  ["Bits per byte", [{ name: "bits_per_byte", label: "training", color: "--c1", format: (value) => fixed(value), tick: (value) => number(value, 4) }, { name: "eval_bits_per_byte", label: "held out", color: "--c2", exact: true, format: (value) => fixed(value), sparse: true }], { optional: true }],
  ["Gradient norm", [{ name: "grad_norm", label: "norm", color: "--c4" }], {}],
  ["Learning rate", [{ name: "lr", label: "rate", color: "--c6", exact: true, format: (value) => number(value, 3) }], { zero: true }],
  ["Tokens per second", [{ name: "tokens_per_s", label: "tokens/s", color: "--c3", format: (value) => si(value) }], { zero: true }],
  ["MFU", [{ name: "mfu", label: "of the measured peak", color: "--c3", format: (value) => utilization(value) }], { zero: true, optional: true }],
  ["Goodput", [{ name: "goodput", label: "of this attempt", color: "--c3", exact: true, format: (value) => percent(value) }], { zero: true, optional: true }],
  ["Step time", [{ name: "step_s", label: "seconds", color: "--c7", format: (value) => duration(value) }], { zero: true }],
  ["Waiting for data", [{ name: "data_wait_share", label: "of the step", color: "--c5", format: (value) => percent(value) }], { zero: true, optional: true }],
  ["Memory by kind", MEMORY_LINES, { zero: true, optional: true }],
  ["Peak memory", [{ name: "peak_memory_bytes", label: "peak", color: "--c4", exact: true, format: bytes }], { zero: true, optional: true }],
  ["Use of machines", [{ name: "machine.cpu", label: "CPU", color: "--c1", format: (value) => percent(value), sparse: true, exact: true }, { name: "machine.gpu", label: "GPU", color: "--c3", format: (value) => percent(value), sparse: true, exact: true }], { zero: true, optional: true }],
  ["Memory of machines", [{ name: "machine.memory_bytes", label: "in use", color: "--c4", format: bytes, sparse: true, exact: true }], { zero: true, optional: true }],
  ["Network", [{ name: "machine.received_bytes_per_s", label: "received/s", color: "--c2", format: bytes, sparse: true, exact: true }, { name: "machine.sent_bytes_per_s", label: "sent/s", color: "--c6", format: bytes, sparse: true, exact: true }], { zero: true, optional: true }],
  ["Speed of links, per second", [{ name: "machine.link_bytes_per_s", label: "fastest connection/s", color: "--c7", format: bytes, sparse: true, exact: true }], { zero: true, optional: true }],
  ["GPU power", [{ name: "machine.gpu_watts", label: "of the machine's first rank", color: "--c5", format: (value) => `${number(value, 3)} W`, sparse: true, exact: true }], { zero: true, optional: true }],
  ["Expert balance", [{ name: "balance", label: "largest over mean", color: "--c8", format: (value) => fixed(value, 2) }], { zero: true, optional: true }],
];
const MACHINE = "machine.";
/** Machines in one chart, up to which each has its line. */
const FEW_LINES = 8;

/** Charts of tasks, by the figure that they show: title, and how a value is written. @type {Record<string, [string, (value: number) => string]>} */
const TASK_CHARTS = { accuracy: ["Accuracy of tasks", (value) => percent(value)], exact_match: ["Exact match of tasks", (value) => percent(value)], bits_per_byte: ["Bits per byte of tasks", (value) => fixed(value)] };
/** Figures of tasks without a chart: they belong to one that has. */
const WITHOUT_CHART = new Set(["accuracy_error", "accuracy_per_character", "exact_match_error"]);
const TASK_COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];

/** The charts of the tasks that a run has scored, eight to a chart. @param {string[]} names of all its curves @returns {[string, Line[], {optional: boolean}][]} */
function taskCharts(names) {
  // Figures of users' own observers have charts under their names.
  const figures = new Set(names.filter((name) => name.startsWith("task.")).map((name) => name.slice(name.lastIndexOf(".") + 1)));
  const others = [...figures].filter((figure) => !Object.hasOwn(TASK_CHARTS, figure) && !WITHOUT_CHART.has(figure)).sort();
  /** @type {[string, [string, (value: number) => string]][]} */
  const kinds = [...Object.entries(TASK_CHARTS), ...others.map((figure) => /** @type {[string, [string, (value: number) => string]]} */ ([figure, [`${figure} of tasks`, (value) => number(value, 4)]]))];
  return kinds.flatMap(([figure, [title, format]]) => {
    const own = names.filter((name) => name.startsWith("task.") && name.endsWith(`.${figure}`));
    const lines = own.map((name, index) => ({ name, label: name.slice("task.".length, -figure.length - 1), color: TASK_COLORS[index % TASK_COLORS.length], format, sparse: true, exact: true }));
    const parts = Array.from({ length: Math.ceil(lines.length / TASK_COLORS.length) }, (_, part) => lines.slice(part * TASK_COLORS.length, (part + 1) * TASK_COLORS.length));
    return parts.map((part) => /** @type {[string, Line[], {optional: boolean}]} */ ([title, part, { optional: true }]));
  });
}

/** The lines of a chart of machines: one for each of a few, else the median with the band over all. @param {Line[]} lines of the median @param {string[]} names of all curves of the run @param {number} nodes measured last @returns {Line[]} */
function machineLines(lines, names, nodes) {
  const own = lines.flatMap((line) => {
    const prefix = `${line.name}@`;
    const label = (/** @type {string} */ node) => (lines.length > 1 ? `${line.label} ${node}` : node);
    return names.filter((name) => name.startsWith(prefix)).map((name) => ({ ...line, name, label: label(name.slice(prefix.length)) }));
  });
  if (nodes > 1 && own.length && own.length <= FEW_LINES) return own.map((line, index) => ({ ...line, color: TASK_COLORS[index] }));
  return lines.map((line) => (names.includes(`${line.name}.most`) ? { ...line, between: /** @type {[string, string]} */ ([`${line.name}.least`, `${line.name}.most`]) } : line));
}

/** Names the machines at the edges of the bands. @param {Line[]} lines @param {any} machines the newest measurement */
function extremes(lines, machines) {
  const edges = lines.filter(({ name, between }) => between && machines.most[name.slice(MACHINE.length)]);
  const texts = edges.map(({ name, label }) => {
    const figure = name.slice(MACHINE.length);
    return `${edges.length > 1 ? `${label} ` : ""}least on ${machines.least[figure]}, greatest on ${machines.most[figure]}`;
  });
  return edges.length ? `Median of ${whole(machines.nodes)} machines, and the band over all. Newest: ${texts.join("; ")}.` : "";
}

/** @type {import("./main.js").MakeView} */
export function runView(host, page) {
  let x = page.params.get("x") ?? "step";
  let weight = Number(page.params.get("smooth")) || 0;
  const range = { first: page.params.get("first"), last: page.params.get("last") };
  const hidden = new Set((page.params.get("hide") ?? "").split(",").filter(Boolean));

  const head = el("section", { class: "summary" });
  const problems = el("section", { class: "problems", hidden: true, "aria-label": "What is wrong" });
  const served = el("section", { class: "served", hidden: true, "aria-label": "Serving" });
  const marks = el("div", { class: "marks", role: "group", "aria-label": "Marks" });
  const all = el("button", { type: "button", text: "Show all", hidden: range.first === null, on: { click: () => zoom(null, null) } });
  const smoothing = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(weight), "aria-label": "Smoothing", on: { input: () => smooth(Number(smoothing.value)) } });
  const axis = choice("Axis", AXES.map(([name, title]) => [name, title]), x, (name) => {
    x = name;
    page.set({ x });
    zoom(null, null);
  });
  const shown = [...CHARTS];
  /** @param {typeof CHARTS[number]} of */
  const makeChart = ([title, lines, { zero, wide }]) => {
    const chart = new Chart({ title, lines, zero, binary: lines[0].format === bytes, axis: x, sync: `run-${page.id}`, height: wide ? 260 : 170, noted: Boolean(wide), crosses: JUDGED.has(lines[0].name), say: page.say, onZoom: zoom });
    chart.element.classList.toggle("wide", Boolean(wide));
    chart.weight = weight;
    chart.hiddenKinds = hidden;
    return chart;
  };
  const charts = CHARTS.map(makeChart);
  const written = el("div", { class: "samples", hidden: true });
  const drawSamples = samplesBox(written);
  const happened = el("div");
  const facts = el("div", { class: "facts" });
  const none = el("div", { hidden: true });
  const bar = el("div", { class: "bar" }, axis, el("label", { class: "field" }, el("span", { text: "smoothing" }), smoothing), all, el("span", { class: "space" }), marks);
  const memory = el("section", { class: "panel memory", hidden: true });
  const grid = el("div", { class: "charts" }, charts.map((chart) => chart.element), memory);
  const unread = el("p", { class: "note", role: "status" });
  put(host, head, problems, served, unread, none, bar, grid, written, happened, facts);

  /** @param {number | null} first @param {number | null} last */
  function zoom(first, last) {
    range.first = first === null ? null : String(Math.floor(first));
    range.last = last === null ? null : String(Math.ceil(last));
    all.hidden = first === null;
    page.set(range);
    page.reload();
  }

  /** @param {number} value */
  function smooth(value) {
    weight = value;
    smoothing.value = String(value);
    page.set({ smooth: weight || null });
    for (const chart of charts) {
      chart.weight = weight;
      chart.set(chart.curves);
    }
  }

  /** @param {import("./chart.js").Mark[]} found */
  function drawMarks(found) {
    const counts = new Map();
    for (const mark of found) counts.set(mark.kind, (counts.get(mark.kind) ?? 0) + 1);
    put(
      marks,
      [...counts].map(([kind, count]) => {
        const [name, word, words] = MARKS[kind] ?? ["--mark-message", kind, kind];
        const toggle = () => {
          if (hidden.has(kind)) hidden.delete(kind);
          else hidden.add(kind);
          page.set({ hide: [...hidden].join(",") });
          drawMarks(found);
          for (const chart of charts) chart.plot?.redraw(false);
        };
        return el("button", { type: "button", class: "chip", "aria-pressed": String(!hidden.has(kind)), title: "Show or hide", on: { click: toggle } }, el("i", { style: { background: `var(${name})` } }), `${count} ${count === 1 ? word : words}`);
      }),
    );
  }

  /** @param {any} curves */
  function drawCurves(curves) {
    charts.forEach((chart, index) => {
      const [, lines, { optional }] = shown[index];
      const most = Math.max(...lines.map(({ name }) => (curves.series[name]?.y ?? []).filter(known).length));
      // Memory is measured seldom: a measurement or two are bars.
      const has = most > (lines === MEMORY_LINES ? 2 : 0);
      chart.element.hidden = Boolean(optional) && !has;
      chart.setAxis(x);
      if (!chart.element.hidden) chart.set(curves);
    });
    drawMemory(memory, curves);
    drawMarks(curves.marks ?? []);
    drawHappened(happened, page.id, curves.marks ?? []);
  }

  /** Adds the charts of tasks that were scored for the first time. @param {string[]} names of all curves of the run @returns {boolean} true if there are more */
  function addTaskCharts(names) {
    const known = new Set(shown.flatMap(([, lines]) => lines.map(({ name }) => name)));
    const added = taskCharts(names.filter((name) => !known.has(name)));
    for (const of of added) {
      const chart = makeChart(of);
      shown.push(of);
      charts.push(chart);
      memory.before(chart.element);
    }
    return added.length > 0;
  }

  /** Draws a few machines by lines and many by a band. @param {any} run @returns {boolean} true if there are other curves to draw */
  function drawMachines(run) {
    let others = false;
    CHARTS.forEach(([title, lines, options], index) => {
      if (!lines[0].name.startsWith(MACHINE) || !run.machines) return;
      const now = machineLines(lines, run.curves ?? [], run.machines.nodes);
      const curvesOf = (/** @type {Line[]} */ of) => of.flatMap(({ name, between }) => [name, ...(between ?? [])]).join();
      if (curvesOf(now) !== curvesOf(shown[index][1])) {
        shown[index] = [title, now, options];
        charts[index].setLines(now);
        others = true;
      }
      charts[index].under(extremes(now, run.machines));
    });
    return others;
  }

  return {
    async update(signal) {
      const names = shown.flatMap(([, lines]) => lines.flatMap(({ name, between }) => [name, ...(between ?? [])]));
      const curvesOf = get(ofRun(page.id, "curves"), { names: names.join(","), x, ...range, points: POINTS }, signal);
      const [run, why, whole] = await Promise.all([get(ofRun(page.id), {}, signal), get(ofRun(page.id, "why"), {}, signal).catch(nothingWrong), curvesOf]);
      const curves = exported ? between(whole, range) : whole;
      page.title(run.name, folderOf(run));
      drawSummary(head, run);
      problemBox(problems, page.id, why.reasons ?? []);
      servedBox(served, run.serving ?? []);
      say(unread, curves.unread ? `The record is long: ${bytes(curves.unread.read_bytes)} of ${bytes(curves.unread.size_bytes)} are read.` : curves.problem || run.problem || "");
      const added = addTaskCharts(run.curves ?? []);
      if ((drawMachines(run) || added) && !exported) page.soon();
      if (curves.unread) page.soon();
      none.hidden = curves.x.length > 0 || range.first !== null;
      bar.hidden = grid.hidden = !none.hidden;
      if (!none.hidden) put(none, empty("No step yet", "The curves begin with the first step. Until then: ", command(`phalanx status ${run.path}`)));
      drawCurves(curves);
      drawFacts(facts, run);
      if (run.has?.samples) drawSamples((await get(ofRun(page.id, "samples"), {}, signal)).samples);
    },
    keys: [
      ["a", "show all steps", () => zoom(null, null)],
      ["s", "smooth more", () => smooth(Math.min(0.99, weight + (weight < 0.9 ? 0.3 : 0.05)))],
      ["S", "no smoothing", () => smooth(0)],
    ],
    close: () => charts.forEach((chart) => chart.close()),
  };
}

/** What a server leaves out of its answer. @param {any} curves @param {{first: string | null, last: string | null}} range */
function between(curves, { first, last }) {
  if (first === null) return curves;
  const kept = curves.x.flatMap((/** @type {number} */ x, /** @type {number} */ index) => (x >= Number(first) && x <= Number(last ?? Infinity) ? [index] : []));
  const cut = (/** @type {any[]} */ values) => kept.map((/** @type {number} */ index) => values[index]);
  const series = Object.fromEntries(Object.entries(curves.series).map(([name, { y, lo, hi }]) => [name, { y: cut(y), lo: lo && cut(lo), hi: hi && cut(hi) }]));
  return { ...curves, x: cut(curves.x), series };
}

/** A server without that answer is no reason to show nothing. @param {Error} error @returns {{reasons: any[]}} */
function nothingWrong(error) {
  if (error.name === "AbortError") throw error;
  return { reasons: [] };
}

/** @param {Element} host @param {any} run */
function drawSummary(host, run) {
  const share = run.steps ? Math.min(1, run.step / run.steps) : 0;
  const bar = el("span", { class: "progress", data: { state: run.state } }, el("i"));
  style(/** @type {HTMLElement} */ (bar.firstElementChild), { width: `${100 * share}%` });
  const tile = (/** @type {string} */ name, /** @type {string} */ value, /** @type {string} */ hint = "") => el("div", { class: "tile", title: hint || null }, el("span", { text: name }), el("b", { text: value }));
  put(
    host,
    el(
      "div", { class: "line" },
      el("h1", { text: run.name }), stateChip(run.state), folderName(run.path) !== run.name && el("span", { class: "muted", title: run.path, text: folderName(run.path) }), el("span", { class: "muted", text: layoutText(run) }),
      (run.tags ?? []).map((/** @type {string} */ tag) => el("span", { class: "tag", text: tag })),
      el("span", { class: "space" }),
      !exported && el("a", { class: "muted", href: `/export/${encodeURIComponent(run.id)}.html`, download: `${run.id}.html`, title: "This run in one file that needs no server", text: "export" }),
      el("span", { class: "muted", title: moment(run.updated), text: run.state === "running" ? `updated ${age(run.updated)} ago` : `${age(run.updated)} ago` }),
    ),
    run.note && el("p", { class: "notetext", text: run.note }),
    bar,
    el(
      "div", { class: "tiles" },
      tile("step", run.steps ? `${whole(run.step)} / ${whole(run.steps)}` : whole(run.step)),
      tile("loss", fixed(run.loss), "Training loss of the last step, nats a token"),
      tile("bits/byte", fixed(run.bits_per_byte)),
      tile("tokens/s", si(run.tokens_per_s)),
      tile(run.mfu > 1 ? "MFU, above the measured peak" : "MFU", utilization(run.mfu), MFU_HINT),
      tile("goodput, this attempt", percent(run.goodput), "Share of the time of the newest attempt that went into steps; for all attempts see Where the time went"),
      tile("time", duration(known(run.started) && known(run.updated) ? run.updated - run.started : null)),
    ),
  );
}

/** The newest measurement of memory as one bar. @param {HTMLElement} host @param {any} curves */
function drawMemory(host, curves) {
  const steps = MEMORY_LINES.flatMap(({ name }) => (curves.series[name]?.y ?? []).map((/** @type {number | null} */ value, /** @type {number} */ index) => (known(value) ? index : -1)));
  const last = Math.max(-1, ...steps);
  host.hidden = last < 0 || new Set(steps).size > 3; // -1 and two places
  if (host.hidden) return;
  const parts = MEMORY_LINES.map(({ name, label, color }) => ({ label, color, value: curves.series[name]?.y[last] ?? 0 })).filter(({ value }) => value > 0);
  put(
    host,
    el("h2", { text: "Memory by kind" }),
    stackedBar(parts.map(({ label, color, value }) => ({ title: label, color, value })), bytes),
    el("dl", {}, parts.map(({ label, color, value }) => el("div", {}, el("dt", { class: "entry" }, el("i", { style: { background: `var(${color})` } }), label), el("dd", { text: bytes(value) })))),
    el("p", { class: "note", text: "The rank with most, when it was last measured; each kind at its own peak." }),
  );
}

/** Checkpoints that follow one another are one entry: what matters is between them. @param {import("./chart.js").Mark[]} marks @returns {import("./chart.js").Mark[]} */
function grouped(marks) {
  /** @type {import("./chart.js").Mark[][]} */
  const groups = [];
  for (const mark of marks) {
    const group = groups.at(-1);
    if (mark.kind === "checkpoint" && group?.[0].kind === "checkpoint") group.push(mark);
    else groups.push([mark]);
  }
  return groups.map((group) => {
    const last = /** @type {import("./chart.js").Mark} */ (group.at(-1));
    return group.length < 2 ? last : { ...last, text: `${whole(group.length)} times since step ${whole(group[0].step ?? null)}; the newest: ${last.text}` };
  });
}

/** The marks as a list, with the way to the lines around each. @param {Element} host @param {string} id @param {import("./chart.js").Mark[]} marks */
function drawHappened(host, id, marks) {
  const told = marks.filter(({ kind }) => kind !== "evaluation");
  if (!told.length) return put(host);
  const groups = grouped(told);
  const shown = groups.slice(-MOST_TOLD).reverse();
  const rows = shown.map((mark) => [
    whole(mark.step),
    known(mark.t) ? el("a", { href: runAddress(id, "logs", { since: mark.t - 30, until: mark.t + 30 }), title: `${moment(mark.t)}: the lines around it`, text: moment(mark.t).slice(11) }) : "–",
    el("span", { class: "kind", style: { color: `var(${(MARKS[mark.kind] ?? MARKS.message)[0]})` }, text: MARKS[mark.kind]?.[1] ?? mark.kind }),
    mark.text,
  ]);
  put(host, panel("What happened", table(["Step", "At", "What", ""], rows, "What happened", [0], 3), groups.length > shown.length && el("p", { class: "note", text: `The last ${shown.length} of ${groups.length}.` })));
}

/** @param {Element} host @param {any} run */
function drawFacts(host, run) {
  const open = new Set([...host.querySelectorAll("details[open]")].map((element) => /** @type {HTMLElement} */ (element).dataset.name));
  /** @param {string} title @param {any} value */
  const pairs = (title, value) => {
    const entries = Object.entries(value ?? {}).filter(([, item]) => item !== null && item !== "");
    return entries.length ? fold(title, el("dl", { class: "pairs" }, entries.map(([name, item]) => el("div", {}, el("dt", { text: name }), el("dd", { text: anything(item) }))))) : null;
  };
  /** @param {string} title @param {Node} inside */
  const fold = (title, inside) => el("details", { class: "panel fold", data: { name: title }, open: open.has(title) }, el("summary", { text: title }), inside);
  const attempts = (run.started_events ?? []).map((/** @type {any} */ start) => [whole(start.attempt), moment(start.t), whole(start.ranks), anything(start.layout), start.device ?? "–"]);
  const evaluations = (run.evaluations ?? []).map((/** @type {any} */ one) => [whole(one.step), fixed(one.loss), fixed(one.bits_per_byte), anything(one.sources)]);
  const file = typeof run.run_file === "string" && run.run_file ? fold("Run file", el("pre", { tabindex: "0", text: run.run_file })) : null;
  put(
    host,
    pairs("Result", run.result),
    evaluations.length > 0 && fold("Evaluations", table(["Step", "Loss", "Bits/byte", "Sources"], evaluations, "Evaluations", [0, 1, 2])),
    attempts.length > 0 && fold(plural(attempts.length, "attempt"), table(["Attempt", "Started", "Ranks", "Layout", "Device"], attempts, "Attempts", [0, 2])),
    pairs("Environment", run.environment),
    (run.lineage ?? []).length > 0 && fold("Lineage", el("ol", {}, run.lineage.map((/** @type {any} */ origin) => el("li", { text: anything(origin) })))),
    file,
    fold("Directory", el("p", {}, command(run.path))),
  );
}
