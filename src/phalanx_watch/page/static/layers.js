/** Layers over steps: one figure at a time, as a heat map. Cells that were not finite are marked. */

import { get, ofRun } from "./api.js";
import { copyMenu } from "./copy.js";
import { command, el, empty, put, select } from "./dom.js";
import { known, number, percent, plural, whole } from "./format.js";
import { Heat, bounds } from "./heat.js";

/** Figures that are shares: from 0 to 1, never on a logarithmic scale. */
const SHARES = ["router.largest_share", "router.entropy", "experts.idle", "feed_forward.dead_units"];
/** Short names, for the axis. @type {Record<string, string>} */
const SHORT = { embedding: "embed." };

/** @typedef {{figures: string[], figure: string, layers: string[], steps: number[], values: (number | null)[][], nonfinite: [number, number][], left_out: number}} Answer */

/** @type {import("./main.js").MakeView} */
export function layersView(host, page) {
  let figure = page.params.get("column") ?? "";
  /** @type {Answer | null} */
  let answer = null;
  /** Shown rows and columns, first and last. @type {{rows: [number, number], columns: [number, number]} | null} */
  let part = null;

  const heat = new Heat({
    label: "Layers over steps. Arrow keys move, a drag or plus shows a part closer, a all again.",
    rowName: (row) => (answer ? (SHORT[answer.layers[row + top()]] ?? answer.layers[row + top()] ?? "") : ""),
    columnName: (column) => whole(answer?.steps[column + left()]),
    read: (row, column) => describe(row + top(), column + left()),
    onPick: () => {},
    onZoom: (rows, columns) => {
      part = { rows: [rows[0] + top(), rows[1] + top()], columns: [columns[0] + left(), columns[1] + left()] };
      draw();
    },
    onAll: () => ((part = null), draw()),
  });
  const choices = el("span");
  const all = el("button", { type: "button", text: "Show all", hidden: true, on: { click: () => heat.options.onAll() } });
  const closer = el("button", { type: "button", text: "Closer", title: "Half of what is shown (+); a drag over the map shows that part", on: { click: () => heat.zoomIn() } });
  const status = el("p", { class: "note" });
  const none = el("div", { hidden: true });
  const bar = el("div", { class: "bar" }, choices, closer, all, el("span", { class: "space" }), copyMenu("the heat map", copied, page.say));
  const body = el("div", { class: "panel" }, heat.element, status);
  put(host, bar, body, none);

  const top = () => part?.rows[0] ?? 0;
  const left = () => part?.columns[0] ?? 0;

  /** @param {number | null} value */
  function shown(value) {
    return SHARES.includes(answer?.figure ?? "") ? percent(value) : number(value, 4);
  }

  /** @param {number} row @param {number} column @returns {string[]} */
  function describe(row, column) {
    if (!answer) return [""];
    const layer = answer.layers[row];
    const bad = answer.nonfinite.some(([r, c]) => r === row && c === column);
    return [/^\d/.test(layer) ? `layer ${layer}` : layer, `step ${whole(answer.steps[column])}`, `${answer.figure} ${bad ? "not finite" : shown(answer.values[row][column])}`];
  }

  function draw() {
    if (!answer) return;
    const rows = answer.values.slice(top(), (part?.rows[1] ?? answer.layers.length - 1) + 1);
    const columns = (part?.columns[1] ?? answer.steps.length - 1) - left() + 1;
    const plain = Float32Array.from(rows.flatMap((row) => row.slice(left(), left() + columns)), (value) => value ?? NaN);
    const finite = plain.filter((value) => Number.isFinite(value));
    // Norms of layers differ by orders of magnitude.
    const logarithmic = !SHARES.includes(answer.figure) && finite.length > 0 && finite.every((value) => value > 0);
    const values = logarithmic ? plain.map((value) => Math.log10(value)) : plain;
    const [low, high] = bounds(values, 1);
    const bad = answer.nonfinite.map(([row, column]) => /** @type {[number, number]} */ ([row - top(), column - left()])).filter(([row, column]) => row >= 0 && row < rows.length && column >= 0 && column < columns);
    heat.set({ rows: rows.length, columns, values, bad }, { low, high, around: false, format: (value) => shown(logarithmic ? 10 ** value : value) });
    all.hidden = !part;
    const cells = answer.nonfinite.length;
    put(
      status,
      `${plural(answer.layers.length, "layer")}, steps ${whole(answer.steps[0])} to ${whole(answer.steps.at(-1))}. `,
      logarithmic && "The color scale is logarithmic. ",
      answer.left_out > 0 && `${whole(answer.left_out)} measured steps in between are left out. `,
      cells > 0 && el("strong", { text: `${plural(cells, "value")} not finite, the first at step ${whole(Math.min(...answer.nonfinite.map(([, column]) => answer?.steps[column] ?? 0)))}.` }),
    );
  }

  function copied() {
    if (!answer) return {};
    const { layers, steps, values } = answer;
    return { layer: layers, ...Object.fromEntries(steps.map((step, column) => [`step ${step}`, values.map((row) => (known(row[column]) ? row[column] : null))])) };
  }

  return {
    async update(signal) {
      answer = /** @type {Answer} */ (await get(ofRun(page.id, "layers"), { column: figure }, signal));
      const any = answer.steps.length > 0;
      none.hidden = any;
      body.hidden = bar.hidden = !any;
      if (!any) return put(none, empty("No statistics of layers", "A run measures its layers every statistics.every_steps steps, and in a step that is not finite.", " ", command("phalanx train configs/quickstart.toml --set statistics.every_steps=10")));
      put(choices, select("figure", answer.figures.map((name) => [name, name.replace(/_/g, " ").replace(".", ": ")]), answer.figure, (name) => {
        figure = name;
        page.set({ column: name });
        page.reload();
      }));
      draw();
    },
    keys: [
      ["+", "half of it, closer", () => heat.zoomIn()],
      ["a", "all layers and steps", () => heat.options.onAll()],
    ],
    close: () => heat.close(),
  };
}
