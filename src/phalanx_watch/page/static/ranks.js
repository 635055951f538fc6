/** Ranks over time: who is slow, since when, on which node, and who waits for it. Own computing time, never communication: the slow rank communicates least. */

import { get, getHeatMap, ofRun } from "./api.js";
import { Chart } from "./chart.js";
import { copyMenu } from "./copy.js";
import { choice, command, el, empty, put, select } from "./dom.js";
import { anything, bytes, duration, known, moment, number, plural, whole } from "./format.js";
import { Heat, bounds, overUsual } from "./heat.js";

const ROWS = 400;
const COLUMNS = 800;
const WORST = 8;
const SHOWN_PEERS = 24;

/** Numbers that ranks report: name, title, format. @type {[string, string, (value: number | null) => string][]} */
const METRICS = [
  ["compute_s", "own computing time", (value) => duration(value)],
  ["data_wait_s", "waiting for data", (value) => duration(value)],
  ["memory_bytes", "memory", (value) => bytes(value)],
  ["temperature_c", "temperature", (value) => (known(value) ? `${number(value, 3)} °C` : "–")],
];

/** @type {import("./main.js").MakeView} */
export function ranksView(host, page) {
  let metric = METRICS.find(([name]) => name === page.params.get("column")) ?? METRICS[0];
  let relative = page.params.get("scale") !== "values";
  let rank = page.params.has("rank") ? Number(page.params.get("rank")) : -1;
  /** What is drawn: steps, places in the order of ranks, and the order. */
  const part = Object.fromEntries(["first", "last", "from", "to", "order"].map((name) => [name, page.params.get(name)]));
  /** @type {import("./api.js").HeatMap | null} */
  let map = null;
  /** @type {Float32Array} */
  let ratios = new Float32Array();

  const heat = new Heat({
    label: "Ranks over steps. Arrow keys move, Enter chooses a rank, a drag or plus shows a part closer, minus and a all again.",
    rowName: (row) => (map?.order === "node" && map.row_nodes?.[row]?.split(" ")[0]) || whole(map?.row_ranks[row]),
    columnName: (column) => whole(map?.column_steps[column]),
    read: (row, column) => describe(row, column),
    onPick: (row) => choose(worstOfRow(row)),
    onZoom: (rows, columns) => zoom(rows, columns),
    onAll: () => look({ first: null, last: null, from: null, to: null }),
  });
  const status = el("p", { class: "note" });
  const worst = el("div");
  const aside = el("aside", { class: "panel aside", "aria-label": "The chosen rank" });
  const none = el("div", { hidden: true });
  const goto = el("input", { type: "number", min: "0", placeholder: "rank", "aria-label": "Go to rank", on: { change: () => goto.value !== "" && choose(Number(goto.value)) } });
  const history = new Chart({ title: "history", lines: [{ name: "value", label: "value", color: "--c1", format: metric[2] }], height: 150, say: page.say, zero: true, marks: false, below: true });
  const all = el("button", { type: "button", text: "Show all", hidden: !Object.entries(part).some(([name, value]) => name !== "order" && value !== null), on: { click: () => heat.options.onAll() } });
  const orders = el("span");
  const lately = el("button", { type: "button", text: "Last 100 steps", on: { click: () => look({ first: Math.max(0, (map?.column_steps.at(-1) ?? 0) - 99), last: null }) } });
  const closer = el("button", { type: "button", text: "Closer", title: "Half of what is shown (+); a drag over the map shows that part", on: { click: () => heat.zoomIn() } });
  const bar = el(
    "div", { class: "bar" },
    select("of each rank", METRICS.map(([name, title]) => [name, title]), metric[0], (name) => {
      metric = METRICS.find(([one]) => one === name) ?? METRICS[0];
      page.set({ column: name });
      page.reload();
    }),
    choice("Scale", [["median", "against the step's median"], ["values", "values"]], relative ? "median" : "values", (name) => ((relative = name === "median"), page.set({ scale: name }), draw())),
    orders, lately, closer, all, el("label", { class: "field" }, el("span", { text: "go to" }), goto),
    el("span", { class: "space" }),
    copyMenu("the heat map", copied, page.say),
  );
  const left = el("div", {}, el("div", { class: "panel" }, heat.element, status), worst);
  const both = el("div", { class: "beside" }, left, aside);
  put(host, bar, both, none);

  /** @param {Record<string, number | string | null>} wanted what of `part` changes */
  function look(wanted) {
    for (const [name, value] of Object.entries(wanted)) part[name] = value === null ? null : String(value);
    all.hidden = !["first", "last", "from", "to"].some((name) => part[name] !== null);
    page.set(part);
    page.reload();
  }

  /** Shows rows and columns of the map closer. @param {[number, number]} rows @param {[number, number]} columns first and last */
  function zoom([top, bottom], [left, right]) {
    if (!map) return;
    const before = [...placesOfRows(), (map.first_place ?? 0) + map.ranks];
    const first = left > 0 ? map.column_steps[left - 1] + 1 : part.first;
    look({ first, last: right < map.columns - 1 ? map.column_steps[right] : part.last, from: before[top], to: before[bottom + 1] - 1 });
  }

  /** Twice of what is shown, as far as there is more. */
  function zoomOut() {
    if (!map) return;
    const [from, ranks] = [map.first_place ?? 0, map.ranks];
    const steps = [map.column_steps[0], map.column_steps.at(-1) ?? 0];
    const span = Math.max(1, steps[1] - steps[0]);
    const [low, high] = [from - (ranks >> 1), from + ranks + (ranks >> 1)];
    look({
      from: low > 0 ? low : null, to: high < (map.places ?? ranks) ? high - 1 : null,
      first: part.first === null ? null : Math.max(0, Math.floor(steps[0] - span / 2)), last: part.last === null ? null : Math.ceil(steps[1] + span / 2),
    });
  }

  /** The place of each row's first rank in the order. @returns {number[]} */
  function placesOfRows() {
    let at = map?.first_place ?? 0;
    return (map?.row_sizes ?? []).map((size) => (at += size) - size);
  }

  /** A row may stand for several ranks: the one with most is meant. @param {number} row */
  function worstOfRow(row) {
    return map?.row_worst?.[row] ?? map?.row_ranks[row] ?? 0;
  }

  /** @param {number} row @returns {string} */
  function rowTitle(row) {
    if (!map) return "";
    const [first, size, node] = [map.row_ranks[row], map.row_sizes?.[row] ?? 1, map.row_nodes?.[row]];
    const ranks = size === 1 ? `rank ${whole(first)}` : map.order === "rank" ? `ranks ${whole(first)} to ${whole(first + size - 1)}` : `${whole(size)} ranks from ${whole(first)} on`;
    return node ? `${ranks}, ${node}` : ranks;
  }

  /** The row that a rank is in, as far as the page knows; -1 if it is not shown. @param {number} rank */
  function rowOf(rank) {
    if (!map || rank < 0) return -1;
    const [own, worst] = [map.row_ranks, map.row_worst ?? []];
    if (map.order !== "rank") return Math.max(own.indexOf(rank), worst.indexOf(rank));
    const row = own.findLastIndex((first) => first <= rank);
    return row >= 0 && rank < own[row] + (map.row_sizes?.[row] ?? 1) ? row : -1;
  }

  /** @param {number} row @param {number} column */
  function describe(row, column) {
    if (!map) return [""];
    const cell = row * map.columns + column;
    const ratio = ratios[cell];
    return [
      rowTitle(row), `step ${whole(map.column_steps[column])}, ${moment(map.column_times?.[column])}`, `${metric[1]} ${metric[2](map.values[cell])}`,
      known(ratio) ? `${ratio.toFixed(2)} × the step's median` : "",
      map.reduced && map.row_worst ? `most of all: rank ${whole(map.row_worst[row])}` : "",
    ].filter(Boolean);
  }

  function draw() {
    if (!map) return;
    const shown = relative ? ratios : map.values;
    const [low, high] = bounds(shown, 0.98);
    // Around the median the scale is symmetric, and never so narrow that noise looks like an alarm.
    const reach = Math.max(0.25, Math.min(1, Math.max(1 - low, high - 1)));
    heat.picked = rowOf(rank);
    heat.set(
      { rows: map.rows, columns: map.columns, values: shown },
      relative ? { low: 1 - reach, high: 1 + reach, around: true, format: (value) => `${value.toFixed(2)} ×` } : { low, high, around: false, format: metric[2] },
    );
    put(
      status,
      `${plural(map.ranks, "rank")}${map.places && map.ranks < map.places ? ` of ${whole(map.places)}` : ""}, steps ${whole(map.column_steps[0])} to ${whole(map.column_steps.at(-1))}. `,
      map.reduced && `${map.rows} × ${map.columns} cells; each keeps the greatest of the ranks and steps in it. `,
      `Median ${metric[2](map.median)}, greatest ${metric[2](map.maximum)}.`,
    );
    drawWorst();
  }

  function drawWorst() {
    if (!map) return;
    const { rows, columns } = map;
    const means = Array.from({ length: rows }, (_, row) => {
      const own = ratios.subarray(row * columns, (row + 1) * columns).filter((value) => known(value));
      return { row, mean: own.length ? own.reduce((sum, value) => sum + value, 0) / own.length : 0 };
    });
    const top = means.sort((one, other) => other.mean - one.mean).slice(0, Math.min(WORST, rows));
    put(
      worst,
      el("div", { class: "worst" }, el("span", { class: "muted", text: "Greatest on average: " }),
        top.map(({ row, mean }) => el("button", { type: "button", class: "chip", text: `rank ${whole(worstOfRow(row))}  ${mean.toFixed(2)} ×`, title: rowTitle(row), on: { click: () => choose(worstOfRow(row)) } }))),
    );
  }

  /** @param {number} chosen */
  function choose(chosen) {
    rank = chosen;
    goto.value = String(rank);
    page.set({ rank });
    page.reload();
  }

  /** @param {AbortSignal} signal */
  async function drawRank(signal) {
    if (rank < 0) return put(aside, el("h2", { text: "A rank" }), el("p", { class: "muted", text: "Click a row (or arrow keys, then Enter): its history, its node, and its neighbors in each group." }));
    const one = await get(ofRun(page.id, `rank/${rank}`), { column: metric[0] }, signal).catch((/** @type {Error} */ error) => ({ error, ...fromMap() }));
    if (signal.aborted) return;
    if (!one.steps) return put(aside, el("h2", { text: `Rank ${whole(rank)}` }), el("p", { class: "muted", text: one.error?.message ?? "It reported nothing." }));
    const place = Object.entries(one.place ?? {});
    history.options.title = `${metric[1]} of rank ${rank}`;
    history.options.lines[0].format = metric[2];
    put(
      aside,
      el("h2", { text: `Rank ${whole(rank)}` }),
      el("dl", { class: "pairs" },
        el("div", {}, el("dt", { text: "node" }), el("dd", { text: anything(one.node) })),
        place.map(([axis, index]) => el("div", {}, el("dt", { text: axis }), el("dd", { text: anything(index) })))),
      history.element,
      Object.entries(one.groups ?? {}).map(([axis, peers]) => group(axis, peers)),
    );
    history.element.querySelector(".title").textContent = metric[1];
    history.set({ x: one.steps, series: { value: { y: one.values } } });
  }

  /** The chosen rank's row of the map, in a file that has no more. */
  function fromMap() {
    const row = map?.row_ranks.indexOf(rank) ?? -1;
    if (!map || map.reduced || row < 0) return {};
    return { steps: map.column_steps, values: [...map.values.subarray(row * map.columns, (row + 1) * map.columns)].map((value) => (known(value) ? value : null)) };
  }

  /** @param {string} axis @param {any} peers */
  function group(axis, peers) {
    const others = peers.filter((/** @type {number} */ peer) => peer !== rank);
    if (!others.length) return null;
    return el(
      "div", { class: "group" }, el("h3", { text: `${axis} group` }),
      others.slice(0, SHOWN_PEERS).map((/** @type {number} */ peer) => el("button", { type: "button", class: "chip", text: String(peer), "aria-label": `rank ${peer}`, on: { click: () => choose(peer) } })),
      others.length > SHOWN_PEERS && el("span", { class: "muted", text: ` and ${whole(others.length - SHOWN_PEERS)} more` }),
    );
  }

  function copied() {
    if (!map) return {};
    const { row_ranks, column_steps, columns, values } = map;
    return { rank: row_ranks, ...Object.fromEntries(column_steps.map((step, column) => [`step ${step}`, row_ranks.map((_, row) => known(values[row * columns + column]) ? values[row * columns + column] : null)])) };
  }

  return {
    async update(signal) {
      map = await getHeatMap(page.id, { column: metric[0], ...part, columns: COLUMNS, rows: ROWS }, signal);
      const any = map.rows > 0 && map.columns > 0 && map.values.some((value) => Number.isFinite(value));
      none.hidden = any;
      both.hidden = !any;
      if (!any) {
        const text = map.rows ? `No rank of this run reported its ${metric[1]}: choose another number above.` : "Ranks write their numbers from the first step on; runs of older versions have none.";
        return put(none, empty("No numbers of single ranks", text, " ", !map.rows && command("phalanx train configs/quickstart.toml")));
      }
      ratios = overUsual(map, map.column_usual);
      put(orders, (map.orders ?? []).length > 1 && select("in the order of", (map.orders ?? []).map((name) => [name, name]), map.order ?? "rank", (name) => look({ order: name, from: null, to: null })));
      draw();
      await drawRank(signal);
    },
    keys: [
      ["m", "against the median, or values", () => /** @type {HTMLElement} */ (bar.querySelector(`[role=radio][aria-checked=false]`)).click()],
      ["+", "half of it, closer", () => heat.zoomIn()],
      ["-", "twice as much", zoomOut],
      ["a", "all ranks and steps", () => heat.options.onAll()],
      ["/", "go to a rank", () => goto.focus()],
    ],
    close: () => (heat.close(), history.close()),
  };
}
