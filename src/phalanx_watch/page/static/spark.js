/** Small curves of the loss beside the runs: asked for when they come into sight, two at a time, and seldom again. */

import { get, ofRun } from "./api.js";
import { color, el } from "./dom.js";
import { known } from "./format.js";

const WIDTH = 84;
const HEIGHT = 22;
const POINTS = 84;
const AT_ONCE = 2;
const AGAIN_MS = 20_000;

/** @typedef {{canvas: HTMLCanvasElement, step: number, drawn: number, at: number, seen: boolean}} Spark */

export class Sparks {
  constructor() {
    /** @type {Map<string, Spark>} */
    this.all = new Map();
    this.running = 0;
    this.abort = new AbortController();
    this.sight = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const spark = this.all.get(/** @type {HTMLElement} */ (target).dataset.id ?? "");
        if (spark) spark.seen = isIntersecting;
      }
      this.next();
    });
  }

  /** @param {string} id @returns {HTMLCanvasElement} */
  add(id) {
    const canvas = el("canvas", { class: "spark", width: WIDTH * 2, height: HEIGHT * 2, data: { id }, role: "img", "aria-label": "loss curve" });
    this.all.set(id, { canvas, step: 0, drawn: -1, at: -Infinity, seen: false });
    this.sight.observe(canvas);
    return canvas;
  }

  /** @param {string} id @param {number} step how far the run is */
  want(id, step) {
    const spark = this.all.get(id);
    if (spark) spark.step = step;
    this.next();
  }

  next() {
    for (const [id, spark] of this.all) {
      if (this.running >= AT_ONCE || this.abort.signal.aborted) return;
      if (!spark.seen || spark.drawn === spark.step || performance.now() - spark.at < AGAIN_MS) continue;
      spark.at = performance.now();
      spark.drawn = spark.step;
      this.running += 1;
      void this.load(id, spark);
    }
  }

  /** @param {string} id @param {Spark} spark */
  async load(id, spark) {
    try {
      const { series } = await get(ofRun(id, "curves"), { names: "loss", points: POINTS }, this.abort.signal);
      draw(spark.canvas, (series.loss?.y ?? []).filter(known));
    } catch {
      // A curve that cannot be had is left out: the table does not depend on it.
    }
    this.running -= 1;
    this.next();
  }

  close() {
    this.abort.abort();
    this.sight.disconnect();
  }
}

/** @param {HTMLCanvasElement} canvas @param {number[]} values */
function draw(canvas, values) {
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (values.length < 2) return;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  context.strokeStyle = color("--c1");
  context.lineWidth = 2.4;
  context.lineJoin = "round";
  context.beginPath();
  values.forEach((value, index) => context.lineTo(2 + (index / (values.length - 1)) * (canvas.width - 4), 4 + (1 - (value - low) / (high - low || 1)) * (canvas.height - 8)));
  context.stroke();
}
