/** Profiles: where a step's time went across ranks, who waited for whom, what the plan had said, and the trace itself. */

import { exported, get, ofRun } from "./api.js";
import { colorKey, stackedBar } from "./bars.js";
import { Chart } from "./chart.js";
import { copyMenu } from "./copy.js";
import { command, el, empty, panel, put, select, table } from "./dom.js";
import { anything, bytes, duration, known, moment, number, percent, plural, si, whole } from "./format.js";
import { runAddress } from "./router.js";

const MOST_ROWS = 12;
/** What a rank does -> color, by the beginning of its word. @type {[string, string][]} */
const WORDS = [
  ["compute", "--t-compute"], ["copies", "--c6"], ["optimizer", "--c1"], ["communication", "--t-comm"], ["moving bytes", "--t-comm"],
  ["data wait", "--t-wait"], ["wait", "--t-wait"], ["host gap", "--t-fault"], ["bubble", "--c8"], ["", "--t-check"],
];
const MEMORY_COLORS = ["--c1", "--c2", "--c3", "--c4", "--c6", "--c7", "--c8", "--c5"];

/** @param {string} word */
function colorOf(word) {
  return /** @type {[string, string]} */ (WORDS.find(([start]) => word.startsWith(start)))[1];
}

/** @type {import("./main.js").MakeView} */
export function profileView(host, page) {
  let name = page.params.get("profile") ?? "";
  let shown = "";
  /** @type {Chart | null} */
  let memory = null;
  return {
    async update(signal) {
      const [{ profiles = [] }, run] = await Promise.all([get(ofRun(page.id, "profiles"), {}, signal), get(ofRun(page.id), {}, signal)]);
      if (!profiles.length) {
        if (["finished", "stopped", "failed"].includes(run.state)) return put(host, empty("No profile", "No trace was recorded of this run while it trained, and it does not train any more."));
        return put(host, empty("No profile yet", "Ask a running run for a trace of its next steps; it costs nothing until then: ", command(`phalanx profile ${run.path}`)));
      }
      const chosen = profiles.find((/** @type {any} */ one) => one.name === name) ?? profiles.at(-1);
      const names = profiles.map((/** @type {any} */ one) => one.name).join();
      if (shown === `${names} ${chosen.name}`) return; // a profile never changes
      name = chosen.name;
      const path = ofRun(page.id, `profile/${encodeURIComponent(name)}`);
      const summary = await get(path, {}, signal);
      shown = `${names} ${name}`;
      memory?.close();
      memory = summary.memory?.length ? memoryChart(summary.memory, page.say) : null;
      put(
        host,
        el("div", { class: "bar" },
          select("profile", profiles.map((/** @type {any} */ one) => [one.name, `step ${whole(one.step)}, ${one.name}`]), name, (value) => ((name = value), page.set({ profile: value }), page.reload())),
          el("span", { class: "muted", text: [plural(summary.steps?.length ?? 1, "step"), `${plural(summary.ranks?.length ?? 0, "rank")} of ${whole(summary.of_ranks)}`, moment(summary.asked_unix_s)].join(" · ") }),
          el("span", { class: "space" }), !exported && el("a", { class: "button", href: `${path}/trace`, download: `${name}.json.gz`, text: "Download the trace" })),
        verdict(summary), byRank(summary, page), el("div", { class: "pair" }, plan(summary.plan), layers(summary.layers)),
        criticalPath(summary), operations(summary), el("div", { class: "pair" }, waits(page.id, summary.waits), transfers(summary.transfers)),
        memory && el("div", { class: "pair" }, memory.element, atPeak(summary.memory[0])), about(summary),
      );
      if (memory) memory.set(memoryCurves(summary.memory[0]));
    },
    close: () => memory?.close(),
  };
}

/** @param {any} summary */
function verdict(summary) {
  const [, ...others] = summary.findings ?? [];
  return el(
    "section", { class: "panel verdictbox" }, el("h1", { text: summary.verdict ?? "" }),
    others.length > 0 && el("ul", {}, others.map((/** @type {any} */ one) => el("li", { text: one.text }))),
    (summary.notes ?? []).map((/** @type {string} */ note) => el("p", { class: "note", text: note })),
  );
}

/** @param {any} summary @param {import("./main.js").Page} page */
function byRank(summary, page) {
  const { columns = [], rows = [] } = summary.table ?? {};
  if (!rows.length) return null;
  const longest = Math.max(...rows.map((/** @type {any} */ row) => row.step_s));
  const copied = () => ({ rank: rows.map((/** @type {any} */ row) => row.rank), ...Object.fromEntries(columns.map((/** @type {string} */ word, /** @type {number} */ index) => [word, rows.map((/** @type {any} */ row) => row.seconds[index])])) });
  const bars = rows.map((/** @type {any} */ row) => [
    el("a", { href: runAddress(page.id, "ranks", { rank: row.rank }), text: `rank ${row.rank}` }),
    stackedBar(columns.map((/** @type {string} */ word, /** @type {number} */ index) => ({ title: word, value: row.seconds[index], color: colorOf(word) })), duration, row.step_s / longest),
    duration(row.step_s), duration(row.waited_s),
  ]);
  const cells = rows.map((/** @type {any} */ row) => [`rank ${row.rank}`, ...row.seconds.map((/** @type {number} */ seconds) => duration(seconds))]);
  return el(
    "section", { class: "panel" },
    el("div", { class: "bar slim" }, el("h2", { text: "Where a step of each rank went" }), el("span", { class: "space" }), copyMenu("the steps by rank", copied, page.say)),
    colorKey(new Map(columns.map((/** @type {string} */ word) => [word.replace(/:.*| inside.*| between.*/, ""), colorOf(word)]))),
    table(["", "Step", "Took", "Waited for others"], bars, "Steps by rank", [2, 3], 1),
    el("details", { class: "more-numbers" }, el("summary", { text: "Numbers" }), table(["", ...columns], cells, "Numbers", columns.map((/** @type {string} */ _, /** @type {number} */ index) => index + 1))),
  );
}

/** @param {string} id @param {any[]} pairs */
function waits(id, pairs) {
  const rank = (/** @type {number} */ one) => el("a", { href: runAddress(id, "ranks", { rank: one }), text: `rank ${one}` });
  const rows = (pairs ?? []).slice(0, MOST_ROWS).map((one) => [rank(one.waiting), rank(one.late), duration(one.seconds)]);
  return panel("Who waited for whom", rows.length ? table(["Waiting", "For", "A step"], rows, "Who waited for whom", [2]) : el("p", { class: "muted", text: "Nobody." }));
}

/** @param {any} found */
function plan(found) {
  if (!known(found?.step_s)) return panel("Predicted against measured", el("p", { class: "muted", text: "There is no plan to compare with." }));
  const longest = Math.max(...found.terms.map((/** @type {any} */ one) => Math.max(one.predicted_s ?? 0, one.measured_s ?? 0)), 1e-9);
  const bar = (/** @type {number | null} */ value, /** @type {string} */ color) => el("i", { style: { width: `${(100 * (value ?? 0)) / longest}%`, background: `var(${color})` } });
  const rows = found.terms.map((/** @type {any} */ one) => [one.term, el("div", { class: "twin", "aria-hidden": "true" }, bar(one.predicted_s, "--t-held"), bar(one.measured_s, "--c1")), duration(one.predicted_s), duration(one.measured_s)]);
  return panel(
    "Predicted against measured",
    el("p", { class: "note", text: `The plan for ${anything(found.cluster)} said ${duration(found.step_s)} a step.` }),
    colorKey([["predicted", "--t-held"], ["measured", "--c1"]]),
    table(["", "", "Predicted", "Measured"], rows, "Predicted against measured", [2, 3], 1),
    found.would_pay?.length > 0 && el("div", {}, el("h3", { text: "What would pay most" }), el("ol", { class: "plain" }, found.would_pay.map((/** @type {string} */ line) => el("li", { text: line })))),
  );
}

/** @param {any} summary */
function criticalPath(summary) {
  const ranks = Object.entries(summary.critical_path ?? {});
  if (!ranks.length) return null;
  const totals = ranks.map(([, words]) => Object.values(words).reduce((sum, seconds) => sum + Number(seconds), 0));
  const rows = ranks.map(([rank, words], index) => [`rank ${rank}`, stackedBar(Object.entries(words).map(([word, seconds]) => ({ title: word, value: Number(seconds), color: colorOf(word) })), duration, totals[index] / Math.max(...totals)), duration(totals[index])]);
  return panel("The critical path", el("p", { class: "note", text: "What the step's end waited for, moment by moment: a second saved here is a second saved." }), table(["", "", "A step"], rows, "The critical path", [2], 1));
}

/** @param {any} summary */
function operations(summary) {
  const ranks = Math.max(1, summary.ranks?.length ?? 1);
  const rows = (summary.operations ?? []).map((/** @type {any} */ one) => [one.kind, duration(one.seconds / ranks), whole(one.calls / ranks), si(one.flops_per_s, "FLOP/s"), si(one.bytes_per_s, "B/s"), percent(one.roofline, 0)]);
  return rows.length > 0 && panel("Operations, a step of one rank", table(["", "Time", "Calls", "Computed", "Moved", "Of the roofline"], rows, "Operations", [1, 2, 3, 4, 5], 0));
}

/** @param {any[]} list */
function layers(list) {
  const rows = [...(list ?? [])].sort((one, other) => other.forward_s + other.backward_s - one.forward_s - one.backward_s).slice(0, MOST_ROWS);
  return rows.length > 0 && panel("Longest layers", table(["Layer", "Rank", "Forward", "Backward", "Communication"], rows.map((one) => [one.layer, String(one.rank), duration(one.forward_s), duration(one.backward_s), duration(one.communication_s)]), "Layers", [1, 2, 3, 4], 0));
}

/** @param {any[]} list */
function transfers(list) {
  const rows = (list ?? []).slice(0, MOST_ROWS).map((one) => [one.axis, anything(one.group), number(one.calls, 3), bytes(one.bytes), duration(one.seconds), si(one.bytes_per_s, "B/s")]);
  return rows.length > 0 && panel("Transfers, a step", table(["Axis", "Group", "Calls", "Bytes", "Time", "Rate"], rows, "Transfers", [2, 3, 4, 5], 1));
}

/** @param {any[]} ranks @param {(text: string) => void} say */
function memoryChart(ranks, say) {
  const lines = Object.keys(ranks[0].bytes).map((kind, index) => ({ name: kind, label: kind, color: MEMORY_COLORS[index % MEMORY_COLORS.length], format: bytes }));
  return new Chart({ title: `Memory of rank ${ranks[0].rank}, beside ${bytes(total(ranks[0].held_bytes))} that it always holds`, lines, axis: "time", height: 220, zero: true, binary: true, below: true, say });
}

/** @param {any} one @returns {import("./chart.js").Curves} */
function memoryCurves(one) {
  return { x: one.times_s, series: Object.fromEntries(Object.entries(one.bytes).map(([kind, y]) => [kind, { y }])) };
}

/** @param {any} one */
function atPeak(one) {
  return panel(`What was live at the peak of ${bytes(one.peak_bytes)}`, table(["Kind", "Layer", "Made by", "Bytes", "Count"], (one.at_peak ?? []).slice(0, MOST_ROWS).map((/** @type {any} */ row) => [row.kind, row.layer, row.made_by, bytes(row.bytes), whole(row.count)]), "At the peak", [3, 4], 1));
}

/** @param {Record<string, number>} values */
function total(values) {
  return Object.values(values ?? {}).reduce((sum, value) => sum + Number(value), 0);
}

/** @param {any} summary */
function about(summary) {
  const clocks = known(summary.clock_error_s) ? `The ranks' clocks were brought together to within ${duration(summary.clock_error_s)}. ` : "";
  return panel(
    "The trace",
    el("p", {}, clocks, "All ranks are on one time line. Download the trace, open ", el("a", { href: "https://ui.perfetto.dev", rel: "noreferrer", text: "ui.perfetto.dev" }), ", which runs in the browser and sends nothing away, and drop the file there. W and S zoom, A and D move, M marks what is chosen."),
  );
}
