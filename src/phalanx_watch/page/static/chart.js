/**
 * A chart of lines over one axis, drawn by uPlot: the band from the least to the greatest of what a pixel stands for, marks of
 * what happened, the values under the cursor, a logarithmic axis, its data to copy.
 */

import { copyMenu } from "./copy.js";
import { color, el, put, say, style } from "./dom.js";
import { age, duration, known, number, si, whole } from "./format.js";
import uPlot from "./vendor/uPlot.esm.js";

/** @typedef {{name: string, label: string, color: string, format?: (value: number | null) => string, tick?: (value: number | null) => string, sparse?: boolean, exact?: boolean, dashed?: boolean, between?: [string, string]}} Line
 * `color` names one of the style sheet; `tick` is the format beside the axis; a sparse line passes over gaps; an exact one is never smoothed;
 * `between` names the curves at the edges of its band, which is else that of what a pixel stands for */
/** @typedef {{x: number, kind: string, text: string, step?: number, t?: number, line?: string}} Mark `line` names the only line that it is on */
/** @typedef {{y: (number | null)[], lo?: (number | null)[], hi?: (number | null)[]}} Values */
/** @typedef {{x: number[], series: Record<string, Values>, reduced?: boolean, total?: number, marks?: Mark[]}} Curves */

/** Kind of a mark -> its color, its word, and that of many. @type {Record<string, [string, string, string]>} */
export const MARKS = {
  checkpoint: ["--mark-checkpoint", "checkpoint", "checkpoints"],
  recovery: ["--mark-recovery", "recovery", "recoveries"],
  left: ["--mark-left", "epoch ended", "epochs ended"],
  straggler: ["--mark-straggler", "straggler", "stragglers"],
  nonfinite: ["--mark-bad", "not finite", "not finite"],
  spike: ["--mark-bad", "loss spike", "loss spikes"],
  evaluation: ["--mark-evaluation", "evaluation", "evaluations"],
  message: ["--mark-message", "message", "messages"],
};
/** Marks that belong to the rhythm of every run stand at the foot of the chart only. */
const QUIET = new Set(["checkpoint", "evaluation", "message", "messages"]);
/** Curves that are not finite where a step is not. */
export const JUDGED = new Set(["loss", "bits_per_byte", "grad_norm"]);
const NEAR_PX = 6;
const FEW_DOTS = 40;
/** Share of the values, at each end, that "cut" leaves out of the axis. */
const OUTERMOST = 0.02;
/** Distances of ticks in bytes. */
const POWERS_OF_TWO = Array.from({ length: 60 }, (_, power) => 2 ** power);

/** Axes that curves can be drawn over: name, title, format. @type {[string, string, (value: number | null) => string][]} */
export const AXES = [
  ["step", "steps", (value) => number(value)],
  ["tokens", "tokens", (value) => si(value)],
  ["flops", "FLOPs", (value) => si(value)],
  ["time", "time", (value) => (known(value) ? elapsed(value) : "–")],
];

/** @param {number} seconds */
function elapsed(seconds) {
  if (Math.abs(seconds) < 60) return seconds === 0 ? "0" : duration(seconds);
  return age(Date.now() / 1000 - seconds - 0.5);
}

/** @param {string} name */
export function axisOf(name) {
  return AXES.find(([axis]) => axis === name) ?? AXES[0];
}

/** Exponential moving average that starts unbiased and passes over gaps. @param {(number | null)[]} values @param {number} weight 0: as it is @returns {(number | null)[]} */
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let mass = 0;
  return values.map((value) => {
    if (!known(value)) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

export class Chart {
  /**
   * @param {{title: string, lines: Line[], axis?: string, sync?: string, height?: number, zero?: boolean, marks?: boolean, binary?: boolean, below?: boolean, noted?: boolean, nearest?: boolean, crosses?: boolean,
   *   onZoom?: (first: number | null, last: number | null) => void, say?: (text: string) => void}} options
   */
  constructor(options) {
    this.options = options;
    this.axis = axisOf(options.axis ?? "step");
    this.log = false;
    this.logX = false;
    this.cut = false;
    this.weight = 0;
    this.hiddenKinds = new Set();
    /** Lines that are left out. @type {Set<string>} */
    this.hiddenLines = new Set();
    /** @type {Curves} */
    this.curves = { x: [], series: {} };
    /** @type {any} */
    this.plot = null;
    this.legend = el("div", { class: "legend" });
    this.note = el("p", { class: "note", hidden: true });
    this.foot = el("p", { class: "foot", hidden: true });
    this.canvas = el("div", { class: "plot", role: "img" });
    this.tip = el("div", { class: "tip", hidden: true });
    const log = el("button", { type: "button", class: "quiet", text: "log", title: "Logarithmic axis", "aria-pressed": "false", on: { click: () => this.setLog(!this.log) } });
    const cut = el("button", { type: "button", class: "quiet", text: "cut", title: "Fit the axis to all but the outermost values", "aria-pressed": "false", on: { click: () => this.setCut(!this.cut) } });
    this.logButton = log;
    this.cutButton = cut;
    this.element = el(
      "figure",
      { class: "chart panel" },
      el("figcaption", { class: options.below || options.lines.length > 2 ? "many" : null }, el("span", { class: "title", text: options.title }), this.legend, el("span", { class: "space" }), el("span", { class: "tools" }, cut, log, copyMenu(options.title, () => this.columns(), options.say))),
      el("div", { class: "stage", style: { "min-height": `${options.height ?? 190}px` } }, this.canvas, this.tip),
      this.note,
      this.foot,
    );
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(this.canvas);
  }

  /** Leaves lines out. @param {Set<string>} names */
  hide(names) {
    if (names.size === this.hiddenLines.size && [...names].every((name) => this.hiddenLines.has(name))) return;
    this.hiddenLines = names;
    this.plot?.setData(this.data());
  }

  /** Lets the other lines fade. @param {string | null} name */
  point(name) {
    const index = this.options.lines.findIndex((line) => line.name === name);
    this.plot?.setSeries(index < 0 ? null : 3 * index + 1, { focus: true });
  }

  close() {
    this.resize.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  /** @param {boolean} on */
  setLog(on) {
    this.log = on;
    this.logButton.setAttribute("aria-pressed", String(on));
    this.build();
  }

  /** @param {boolean} on */
  setCut(on) {
    this.cut = on;
    this.cutButton.setAttribute("aria-pressed", String(on));
    this.build();
  }

  /** The range of the axis of values. @param {number} low @param {number} high of what is drawn @returns {[number, number]} */
  range(low, high) {
    if (this.cut) {
      const values = this.options.lines.flatMap(({ name }) => this.curves.series[name]?.y.filter(known) ?? []).sort((one, other) => one - other);
      const out = Math.floor(values.length * OUTERMOST);
      [low, high] = [values[out] ?? low, values[values.length - 1 - out] ?? high];
    }
    if (this.log) return /** @type {any} */ (uPlot).rangeLog(low, high, 10, false);
    if (this.options.zero) return [Math.min(0, low || 0), (high || 1) * 1.08];
    if (low === 0 && high === 0) return [0, 1]; // uPlot's own is 0 to 100: a share of 10,000 %
    return /** @type {any} */ (uPlot).rangeNum(low, high, 0.06, false);
  }

  /** @param {string} name of the axis @param {boolean} [log] */
  setAxis(name, log = false) {
    if (this.axis[0] === name && this.logX === log) return;
    this.axis = axisOf(name);
    this.logX = log;
    this.plot?.destroy();
    this.plot = null;
  }

  /** @param {string} text below the chart */
  under(text) {
    this.foot.hidden = !text;
    say(this.foot, text);
  }

  /** @param {Line[]} lines to draw from now on */
  setLines(lines) {
    this.options.lines = lines;
    this.plot?.destroy();
    this.plot = null;
    put(this.legend);
    this.legend.parentElement?.classList.toggle("many", lines.length > 2);
  }

  /** @param {Curves} curves */
  set(curves) {
    this.curves = curves;
    const drawn = this.data();
    if (this.plot && this.plot.series.length === drawn.length) this.plot.setData(drawn);
    else this.build();
    this.describe();
  }

  /** x, and of every line its values, least and greatest. @returns {any[]} */
  data() {
    const { x, series } = this.curves;
    const none = x.map(() => null);
    const positive = (/** @type {(number | null)[]} */ values) => (this.log ? values.map((value) => (known(value) && value > 0 ? value : null)) : values);
    return [
      x,
      ...this.options.lines.flatMap(({ name, exact, between }) => {
        const line = series[name];
        const [low, high] = (between ?? []).map((edge) => series[edge]);
        if (!line || this.hiddenLines.has(name)) return [none, none, none];
        // A smoothed line stands before what was measured.
        const weight = exact ? 0 : this.weight;
        const beside = weight ? line.y : none;
        return [positive(smoothed(line.y, weight)), positive(low?.lo ?? low?.y ?? line.lo ?? beside), positive(high?.hi ?? high?.y ?? line.hi ?? beside)];
      }),
    ];
  }

  build() {
    this.plot?.destroy();
    this.plot = null;
    const width = this.canvas.clientWidth;
    if (!width || this.curves.x.length === 0) return put(this.canvas, this.curves.x.length ? "" : el("span", { class: "none", text: "nothing yet" }));
    this.canvas.replaceChildren();
    this.plot = new /** @type {any} */ (uPlot)(this.settings(width), this.data(), this.canvas);
  }

  /** @param {number} width */
  settings(width) {
    const [muted, grid] = [color("--muted"), color("--grid")];
    const font = "11px system-ui, sans-serif";
    const [, , formatX] = this.axis;
    const formatY = this.options.lines[0].tick ?? this.options.lines[0].format ?? ((/** @type {number | null} */ value) => number(value, 3));
    const axis = { stroke: muted, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    return {
      width,
      height: this.canvas.clientHeight,
      padding: [10, 10, 0, 0],
      legend: { show: false },
      focus: { alpha: 0.12 },
      cursor: {
        sync: this.options.sync ? { key: this.options.sync, setSeries: false } : undefined,
        drag: { x: Boolean(this.options.onZoom), y: false, setScale: false },
        points: { size: 6 },
      },
      scales: {
        x: { time: false, distr: this.logX ? 3 : 1 },
        y: { distr: this.log ? 3 : 1, range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => (known(low) ? this.range(low, high) : [0, 1]) },
      },
      axes: [
        { ...axis, size: 24, gap: 3, grid: { show: false }, values: (/** @type {any} */ _, /** @type {(number | null)[]} */ ticks) => ticks.map((tick) => (tick === null ? "" : formatX(tick))) },
        { ...axis, size: 52, gap: 4, incrs: this.options.binary ? POWERS_OF_TWO : undefined, values: (/** @type {any} */ _, /** @type {(number | null)[]} */ ticks) => ticks.map((tick) => (tick === null ? "" : formatY(tick))) },
      ],
      series: [{}, ...this.options.lines.flatMap((line) => this.strokes(line))],
      bands: this.options.lines.map((line, index) => ({ series: [3 * index + 3, 3 * index + 2], fill: color(`${line.color}-band`) })),
      hooks: {
        draw: [(/** @type {any} */ plot) => this.drawMarks(plot), (/** @type {any} */ plot) => this.drawNonFinite(plot)],
        setCursor: [(/** @type {any} */ plot) => this.readCursor(plot)],
        setSelect: [(/** @type {any} */ plot) => this.zoom(plot)],
        ready: [(/** @type {any} */ plot) => plot.over.addEventListener("dblclick", () => this.options.onZoom?.(null, null))],
      },
    };
  }

  /** @param {Line} line */
  strokes(line) {
    const faint = color(`${line.color}-band`);
    const edge = { stroke: () => (this.weight && !line.exact ? faint : "transparent"), width: 1, points: { show: false }, spanGaps: Boolean(line.sparse) };
    return [
      { label: line.label, stroke: color(line.color), width: 1.6, dash: line.dashed ? [6, 4] : undefined, spanGaps: Boolean(line.sparse), points: { show: this.hasDots(line), size: 5, fill: color(line.color) } },
      edge,
      edge,
    ];
  }

  /** Few points are shown as such; a lone one would not be seen otherwise. @param {Line} line */
  hasDots(line) {
    const count = this.curves.series[line.name]?.y.filter(known).length ?? 0;
    return count < 2 || (Boolean(line.sparse) && count < FEW_DOTS);
  }

  /** @param {any} plot */
  zoom(plot) {
    const { left, width } = plot.select;
    if (width < 5) return;
    const [first, last] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.options.onZoom?.(first, last);
  }

  /** @returns {Mark[]} */
  marks() {
    return this.options.marks === false ? [] : (this.curves.marks ?? []).filter((mark) => known(mark.x) && !this.hiddenKinds.has(mark.kind));
  }

  /** @param {any} plot */
  drawMarks(plot) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    ctx.save();
    for (const mark of this.marks()) {
      const x = Math.round(plot.valToPos(mark.x, "x", true)) + 0.5;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = color((MARKS[mark.kind] ?? MARKS.message)[0]);
      ctx.lineWidth = ratio;
      ctx.beginPath();
      const foot = bbox.top + bbox.height;
      if (QUIET.has(mark.kind)) ctx.rect(x - ratio, foot - 5 * ratio, 2 * ratio, 5 * ratio);
      else {
        ctx.setLineDash([3 * ratio, 3 * ratio]);
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, foot);
        ctx.stroke();
        ctx.setLineDash([]);
        ctx.beginPath();
        ctx.moveTo(x - 4 * ratio, bbox.top - 5 * ratio);
        ctx.lineTo(x + 4 * ratio, bbox.top - 5 * ratio);
        ctx.lineTo(x, bbox.top + 2 * ratio);
      }
      ctx.fill();
    }
    ctx.restore();
  }

  /** A cross on each line where a value was not finite, at the height of the value before. @param {any} plot */
  drawNonFinite(plot) {
    if (!this.options.crosses) return;
    const { ctx, bbox } = plot;
    const size = 4 * devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = color("--mark-bad");
    ctx.lineWidth = 2 * devicePixelRatio;
    for (const mark of this.curves.marks ?? []) {
      if (mark.kind !== "nonfinite" || !known(mark.x) || this.hiddenKinds.has(mark.kind)) continue;
      for (const { name, exact, sparse } of this.options.lines) {
        if (exact || this.hiddenLines.has(name) || (mark.line ? mark.line !== name : sparse)) continue;
        const values = this.curves.series[name]?.y ?? [];
        let index = this.curves.x.findLastIndex((x) => x <= mark.x);
        while (index > 0 && !known(values[index])) index -= 1;
        if (!known(values[index])) continue;
        const [x, y] = [plot.valToPos(mark.x, "x", true), plot.valToPos(values[index], "y", true)];
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(x - size, y - size);
        ctx.lineTo(x + size, y + size);
        ctx.moveTo(x - size, y + size);
        ctx.lineTo(x + size, y - size);
        ctx.stroke();
      }
    }
    ctx.restore();
  }

  /** The line that is nearest to the cursor, with its value. @param {any} plot @param {number} at */
  nearestLine(plot, at) {
    const distances = this.options.lines.flatMap((line) => {
      const values = this.curves.series[line.name]?.y ?? [];
      let index = at;
      while (index > 0 && !known(values[index])) index -= 1;
      if (this.hiddenLines.has(line.name) || !known(values[index])) return [];
      return [{ line, value: values[index], distance: Math.abs(plot.valToPos(values[index], "y") - plot.cursor.top) }];
    });
    return distances.sort((one, other) => one.distance - other.distance)[0];
  }

  /** @param {any} plot */
  readCursor(plot) {
    const { idx, left } = plot.cursor;
    const at = idx === null || idx === undefined || left < 0 ? this.curves.x.length - 1 : idx;
    this.showLegend(at);
    const near = left < 0 ? [] : this.marks().filter((mark) => Math.abs(plot.valToPos(mark.x, "x") - left) < NEAR_PX);
    const inside = this.element.matches(":hover");
    this.tip.hidden = left < 0 || !inside;
    if (this.tip.hidden) return;
    const [, title, format] = this.axis;
    const nearest = this.options.nearest ? this.nearestLine(plot, at) : null;
    put(
      this.tip,
      nearest && el("div", { class: "entry" }, el("i", { style: { background: `var(${nearest.line.color})` } }), nearest.line.label, el("b", { text: (nearest.line.format ?? number)(nearest.value) })),
      el("b", { text: `${title === "steps" ? "step" : title} ${format(this.curves.x[at] ?? null)}` }),
      near.slice(0, 6).map((mark) => el("div", { class: "mark", style: { color: `var(${(MARKS[mark.kind] ?? MARKS.message)[0]})` }, text: mark.text || (MARKS[mark.kind]?.[1] ?? mark.kind) })),
      near.length > 6 && el("div", { class: "mark", text: `and ${near.length - 6} more` }),
    );
    const room = this.canvas.clientWidth - this.tip.offsetWidth - 8;
    style(this.tip, { left: `${Math.max(0, Math.min(room, left + plot.over.offsetLeft + 10))}px` });
  }

  /** @param {number} index */
  showLegend(index) {
    const lines = this.options.lines.filter((line) => this.curves.series[line.name]?.y.some(known));
    const texts = lines.map((line) => {
      const values = this.curves.series[line.name].y;
      let at = index;
      while (line.sparse && at > 0 && !known(values[at])) at -= 1;
      return (line.format ?? number)(values[at] ?? null);
    });
    if (this.legend.childElementCount !== lines.length) {
      put(this.legend, lines.map((line) => el("span", { class: "entry" }, el("i", { style: { background: `var(${line.color})` } }), lines.length > 1 && el("span", { class: "label", text: line.label }), el("b"))));
    }
    texts.forEach((text, place) => say(this.legend.children[place].lastElementChild, text));
  }

  /** What those hear who do not see, and how much was left out. */
  describe() {
    const last = this.curves.x.length - 1;
    this.showLegend(last);
    const [, title, format] = this.axis;
    const parts = this.options.lines.filter((line) => this.curves.series[line.name]).map((line) => {
      const values = this.curves.series[line.name].y.filter(known);
      const shown = line.format ?? number;
      return values.length ? `${line.label}: last ${shown(values[values.length - 1])}, least ${shown(least(values))}, greatest ${shown(-least(values.map((value) => -value)))}` : `${line.label}: nothing yet`;
    });
    this.canvas.setAttribute("aria-label", `${this.options.title} over ${title}${last >= 0 ? ` up to ${format(this.curves.x[last])}` : ""}. ${parts.join("; ")}`);
    // The charts of one view are reduced alike, and one of them says so. A handful of evaluations is drawn as it is: nothing of it was left out.
    this.note.hidden = this.options.noted === false || !this.curves.reduced || this.mostValues() < FEW_DOTS;
    if (!this.note.hidden) say(this.note, `${whole(this.curves.total ?? null)} points drawn as ${whole(this.curves.x.length)}; ${this.hasBand() ? "the band keeps the least and the greatest of each" : "peaks are kept"}. Drag to see all.`);
  }

  mostValues() {
    return Math.max(0, ...this.options.lines.map(({ name }) => this.curves.series[name]?.y.filter(known).length ?? 0));
  }

  hasBand() {
    return this.options.lines.some(({ name }) => this.curves.series[name]?.lo);
  }

  fit() {
    if (!this.plot) return this.build();
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (width && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
  }

  /** The data as named columns, for copying. @returns {Record<string, (number | null)[]>} */
  columns() {
    /** @type {Record<string, (number | null)[]>} */
    const columns = { [this.axis[0]]: this.curves.x };
    for (const { name } of this.options.lines) {
      const line = this.curves.series[name];
      if (!line) continue;
      columns[name] = line.y;
      if (this.curves.reduced && line.lo && line.hi) Object.assign(columns, { [`${name} least`]: line.lo, [`${name} greatest`]: line.hi });
    }
    return columns;
  }
}

/** @param {number[]} values */
function least(values) {
  return values.reduce((low, value) => Math.min(low, value), Infinity);
}
