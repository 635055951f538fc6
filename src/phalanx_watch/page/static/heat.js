/**
 * A heat map on a canvas: one pixel of an image per cell, scaled up without smoothing, with axes, a legend, a place under the
 * pointer that the arrow keys move too. Values that are not known are left as the ground.
 */

import { color, el, put, style } from "./dom.js";

const LEFT = 58;
const BOTTOM = 22;
const STOPS = 256;
/** So near, in pixels, a pointer catches a row. */
const REACH = 3;
/** A shorter drag, in pixels, is a click. */
const LEAST_DRAG = 6;
/** Of the map, in pixels: few ranks get a low one, many share a high one. */
const [ROW_HEIGHT, LEAST_HEIGHT, MOST_HEIGHT] = [26, 104, 400];
/** Dark to bright (viridis, at nine places; BSD-licensed by matplotlib's authors, CC0). */
const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
/** Below, at, and above what is usual: blue, the ground, red. */
const AROUND_LIGHT = [[33, 102, 172], [146, 197, 222], [244, 245, 247], [244, 165, 130], [178, 24, 43]];
const AROUND_DARK = [[90, 160, 235], [45, 84, 125], [30, 34, 40], [150, 66, 50], [255, 110, 90]];

/** @typedef {{rows: number, columns: number, values: Float32Array, bad?: [number, number][]}} Cells bad: rows and columns of values that were not finite */
/** @typedef {{low: number, high: number, around: boolean, format: (value: number) => string}} Scale around: 1 is usual, and stands in the middle */

/** @param {boolean} around @returns {Uint8ClampedArray} red, green, blue of each stop */
function palette(around) {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("color-scheme").includes("dark") && isDark();
  const points = around ? (dark ? AROUND_DARK : AROUND_LIGHT) : VIRIDIS;
  const colors = new Uint8ClampedArray(3 * STOPS);
  for (let stop = 0; stop < STOPS; stop += 1) {
    const place = (stop / (STOPS - 1)) * (points.length - 1);
    const [low, share] = [Math.min(points.length - 2, Math.floor(place)), place - Math.min(points.length - 2, Math.floor(place))];
    for (let part = 0; part < 3; part += 1) colors[3 * stop + part] = points[low][part] + share * (points[low + 1][part] - points[low][part]);
  }
  return colors;
}

/** Whether the ground is dark, by the theme chosen or the system's. */
export function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** The bounds between which `share` of the known values lie. @param {Float32Array} values @param {number} share @returns {[number, number]} */
export function bounds(values, share) {
  const sorted = Float32Array.from(values.filter((value) => Number.isFinite(value))).sort();
  if (!sorted.length) return [0, 1];
  const cut = Math.floor((sorted.length * (1 - share)) / 2);
  return [sorted[cut], sorted[sorted.length - 1 - cut]];
}

export class Heat {
  /**
   * @param {{label: string, rowName: (row: number) => string, columnName: (column: number) => string,
   *   read: (row: number, column: number) => string[], onPick: (row: number, column: number) => void,
   *   onZoom: (rows: [number, number], columns: [number, number]) => void, onAll: () => void}} options
   */
  constructor(options) {
    this.options = options;
    /** @type {Cells} */
    this.cells = { rows: 0, columns: 0, values: new Float32Array() };
    /** @type {Scale} */
    this.scale = { low: 0, high: 1, around: false, format: String };
    /** @type {[number, number] | null} */
    this.place = null;
    this.picked = -1;
    /** Where a drag began and where it is, in pixels of the map. @type {{from: [number, number], to: [number, number]} | null} */
    this.drag = null;
    this.dragged = false;
    this.image = document.createElement("canvas");
    this.canvas = el("canvas", {
      tabindex: "0", role: "application", "aria-label": options.label,
      on: {
        pointerdown: (/** @type {PointerEvent} */ event) => this.startDrag(event),
        pointermove: (/** @type {PointerEvent} */ event) => (this.drag ? this.moveDrag(event) : this.hover(event)),
        pointerup: () => this.endDrag(),
        pointercancel: () => ((this.drag = null), this.draw()),
        pointerleave: () => this.drag ?? this.point(null),
        click: (/** @type {PointerEvent} */ event) => this.dragged || (this.hover(event), this.pick()),
        dblclick: () => this.options.onAll(),
        keydown: (/** @type {KeyboardEvent} */ event) => this.key(event),
      },
    });
    this.tip = el("div", { class: "tip", role: "status", hidden: true });
    this.legend = el("div", { class: "scale" });
    this.element = el("div", { class: "heat" }, el("div", { class: "stage" }, this.canvas, this.tip), this.legend);
    this.resize = new ResizeObserver(() => (this.paint(), this.draw()));
    this.resize.observe(this.canvas);
  }

  close() {
    this.resize.disconnect();
  }

  /** @param {Cells} cells @param {Scale} scale */
  set(cells, scale) {
    this.cells = cells;
    this.scale = scale;
    style(this.canvas, { height: `${BOTTOM + Math.max(LEAST_HEIGHT, Math.min(MOST_HEIGHT, cells.rows * ROW_HEIGHT))}px` });
    this.paint();
    this.draw();
  }

  /** Paints the image, of no more cells than there are pixels: scaled down by the canvas, a lone slow rank would fade. */
  paint() {
    const [mapWidth, mapHeight] = [this.canvas.clientWidth - LEFT, this.canvas.clientHeight - BOTTOM];
    const { rows, columns, values } = shrunk(this.cells, Math.max(1, mapHeight), Math.max(1, mapWidth));
    const { scale } = this;
    this.image.width = Math.max(1, columns);
    this.image.height = Math.max(1, rows);
    const context = /** @type {CanvasRenderingContext2D} */ (this.image.getContext("2d"));
    const pixels = context.createImageData(this.image.width, this.image.height);
    const colors = palette(scale.around);
    for (let cell = 0; cell < rows * columns; cell += 1) {
      if (!Number.isFinite(values[cell])) continue; // transparent
      const stop = 3 * Math.max(0, Math.min(STOPS - 1, Math.round((STOPS - 1) * this.share(values[cell]))));
      pixels.data.set([colors[stop], colors[stop + 1], colors[stop + 2], 255], 4 * cell);
    }
    context.putImageData(pixels, 0, 0);
    this.drawLegend(colors);
  }

  /** Place on the color scale, 0 to 1. @param {number} value */
  share(value) {
    const { low, high } = this.scale;
    return high > low ? (value - low) / (high - low) : 0.5;
  }

  /** @param {Uint8ClampedArray} colors */
  drawLegend(colors) {
    const bar = el("canvas", { width: String(STOPS), height: "1", "aria-hidden": "true" });
    const context = bar.getContext("2d");
    const line = context.createImageData(STOPS, 1);
    for (let stop = 0; stop < STOPS; stop += 1) line.data.set([colors[3 * stop], colors[3 * stop + 1], colors[3 * stop + 2], 255], 4 * stop);
    context.putImageData(line, 0, 0);
    const { low, high, format } = this.scale;
    put(this.legend, el("span", { text: `≤ ${format(low)}` }), bar, el("span", { text: `≥ ${format(high)}` }), el("span", { class: "unknown" }, el("i"), "not known"), (this.cells.bad ?? []).length > 0 && el("span", { class: "nonfinite" }, el("i", { text: "×" }), "not finite"));
  }

  draw() {
    const { canvas } = this;
    const ratio = devicePixelRatio;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.scale(ratio, ratio);
    const [mapWidth, mapHeight] = [width - LEFT, height - BOTTOM];
    context.imageSmoothingEnabled = false;
    context.fillStyle = color("--unknown");
    context.fillRect(LEFT, 0, mapWidth, mapHeight);
    if (this.cells.rows && this.cells.columns) context.drawImage(this.image, LEFT, 0, mapWidth, mapHeight);
    this.drawBad(context, mapWidth, mapHeight);
    this.drawAxes(context, mapWidth, mapHeight);
    this.drawPlace(context, mapWidth, mapHeight);
  }

  /** Marks the cells that were not finite: a ground of their own, and a cross that needs no color. @param {CanvasRenderingContext2D} context @param {number} width @param {number} height */
  drawBad(context, width, height) {
    const { rows, columns, bad = [] } = this.cells;
    const [cellWidth, cellHeight] = [width / columns, height / rows];
    for (const [row, column] of bad) {
      const [x, y] = [LEFT + column * cellWidth, row * cellHeight];
      context.fillStyle = color("--bad-ground");
      context.fillRect(x, y, cellWidth, cellHeight);
      context.strokeStyle = color("--bad");
      context.lineWidth = 1.5;
      const reach = Math.max(1.5, Math.min(6, cellWidth / 3, cellHeight / 3));
      const [middle, center] = [x + cellWidth / 2, y + cellHeight / 2];
      context.beginPath();
      context.moveTo(middle - reach, center - reach);
      context.lineTo(middle + reach, center + reach);
      context.moveTo(middle - reach, center + reach);
      context.lineTo(middle + reach, center - reach);
      context.stroke();
    }
  }

  /** @param {CanvasRenderingContext2D} context @param {number} width @param {number} height */
  drawAxes(context, width, height) {
    const { rows, columns } = this.cells;
    context.fillStyle = color("--muted");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const row of ticks(rows, height / 32)) context.fillText(this.options.rowName(row), LEFT - 10, Math.max(6, Math.min(height - 6, ((row + 0.5) / rows) * height)));
    context.textBaseline = "top";
    for (const column of ticks(columns, width / 90)) {
      const x = LEFT + ((column + 0.5) / columns) * width;
      context.textAlign = x > LEFT + width - 24 ? "right" : x < LEFT + 24 ? "left" : "center";
      context.fillText(this.options.columnName(column), Math.min(LEFT + width, Math.max(LEFT, x)), height + 6);
    }
  }

  /** @param {CanvasRenderingContext2D} context @param {number} width @param {number} height */
  drawPlace(context, width, height) {
    const { rows, columns } = this.cells;
    context.strokeStyle = context.fillStyle = color("--text");
    if (this.picked >= 0) {
      // Beside the row, not over it.
      const y = ((this.picked + 0.5) / rows) * height;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(LEFT - 6, y - 4);
      context.lineTo(LEFT - 6, y + 4);
      context.fill();
      if (height / rows > 6) context.strokeRect(LEFT + 0.5, (this.picked / rows) * height, width - 1, height / rows);
    }
    if (this.drag) {
      const [[x0, y0], [x1, y1]] = [this.drag.from, this.drag.to];
      context.lineWidth = 1;
      context.strokeRect(LEFT + Math.min(x0, x1) + 0.5, Math.min(y0, y1) + 0.5, Math.abs(x1 - x0), Math.abs(y1 - y0));
      return;
    }
    if (!this.place) return;
    const [row, column] = this.place;
    context.lineWidth = 1;
    context.strokeRect(LEFT + (column / columns) * width - 1, (row / rows) * height - 1, Math.max(4, width / columns) + 2, Math.max(4, height / rows) + 2);
  }

  /** The place of a pointer, in pixels of the map and not beyond it. @param {PointerEvent} event @returns {[number, number]} */
  pixel(event) {
    const box = this.canvas.getBoundingClientRect();
    return [Math.max(0, Math.min(box.width - LEFT, event.clientX - box.left - LEFT)), Math.max(0, Math.min(box.height - BOTTOM, event.clientY - box.top))];
  }

  /** @param {PointerEvent} event */
  startDrag(event) {
    this.dragged = false;
    if (event.button || event.pointerType === "touch" || !this.cells.rows) return; // a finger scrolls
    this.drag = { from: this.pixel(event), to: this.pixel(event) };
    this.canvas.setPointerCapture(event.pointerId);
  }

  /** @param {PointerEvent} event */
  moveDrag(event) {
    if (!this.drag) return;
    this.drag.to = this.pixel(event);
    this.dragged ||= Math.hypot(this.drag.to[0] - this.drag.from[0], this.drag.to[1] - this.drag.from[1]) > LEAST_DRAG;
    if (this.dragged) this.point(null);
  }

  endDrag() {
    const { drag } = this;
    this.drag = null;
    if (!drag || !this.dragged) return;
    const [width, height] = [this.canvas.clientWidth - LEFT, this.canvas.clientHeight - BOTTOM];
    const { rows, columns } = this.cells;
    // A drag along one direction means that direction alone.
    const down = Math.abs(drag.to[1] - drag.from[1]) > LEAST_DRAG ? within(drag.from[1], drag.to[1], height, rows) : whole(rows);
    const across = Math.abs(drag.to[0] - drag.from[0]) > LEAST_DRAG ? within(drag.from[0], drag.to[0], width, columns) : whole(columns);
    this.options.onZoom(down, across);
  }

  /** Half of what is shown, around the place of the pointer or the keys, or around the middle. */
  zoomIn() {
    const { rows, columns } = this.cells;
    const [row, column] = this.place ?? [this.picked >= 0 ? this.picked : rows >> 1, columns >> 1];
    this.options.onZoom(half(row, rows), half(column, columns));
  }

  /** @param {PointerEvent} event */
  hover(event) {
    const { rows, columns } = this.cells;
    const box = this.canvas.getBoundingClientRect();
    const x = (event.clientX - box.left - LEFT) / (box.width - LEFT);
    const y = (event.clientY - box.top) / (box.height - BOTTOM);
    const inside = x >= 0 && x < 1 && y >= 0 && y < 1 && rows > 0 && columns > 0;
    if (!inside) return this.point(null);
    const column = Math.floor(x * columns);
    this.point([this.greatestNear(Math.floor(y * rows), column, Math.floor((REACH * rows) / (box.height - BOTTOM))), column]);
  }

  /** The row of the greatest value within `reach` of `row`: nobody points at a row of one pixel. @param {number} row @param {number} column @param {number} reach */
  greatestNear(row, column, reach) {
    const { rows, columns, values } = this.cells;
    let best = row;
    for (let other = Math.max(0, row - reach); other <= Math.min(rows - 1, row + reach); other += 1) {
      if (values[other * columns + column] > values[best * columns + column]) best = other;
    }
    return best;
  }

  /** @param {[number, number] | null} place */
  point(place) {
    this.place = place;
    this.tip.hidden = !place;
    if (place) {
      const { rows, columns } = this.cells;
      const [title, ...lines] = this.options.read(...place);
      put(this.tip, el("b", { text: title }), lines.map((line) => el("div", { text: line })));
      const [width, height] = [this.canvas.clientWidth - LEFT, this.canvas.clientHeight - BOTTOM];
      const x = LEFT + ((place[1] + 0.5) / columns) * width;
      const y = ((place[0] + 0.5) / rows) * height;
      style(this.tip, { left: `${x > width / 2 ? x - this.tip.offsetWidth - 14 : x + 14}px`, top: `${Math.max(0, Math.min(height - this.tip.offsetHeight, y - 12))}px` });
    }
    this.draw();
  }

  pick() {
    if (!this.place) return;
    [this.picked] = this.place;
    this.draw();
    this.options.onPick(...this.place);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const { rows, columns } = this.cells;
    const steps = /** @type {Record<string, [number, number]>} */ ({ ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] })[event.key];
    if (event.key === "Enter" && this.place) {
      event.preventDefault();
      event.stopPropagation();
      return this.pick();
    }
    if (!steps || !rows || !columns) return;
    event.preventDefault();
    const [row, column] = this.place ?? [Math.max(0, this.picked), columns - 1];
    this.point([Math.max(0, Math.min(rows - 1, row + steps[0])), Math.max(0, Math.min(columns - 1, column + steps[1]))]);
  }
}

/** The cells between two pixels, both ends in it. @param {number} one @param {number} other @param {number} pixels @param {number} cells @returns {[number, number]} */
function within(one, other, pixels, cells) {
  const [low, high] = [Math.min(one, other), Math.max(one, other)].map((at) => Math.max(0, Math.min(cells - 1, Math.floor((at / pixels) * cells))));
  return [low, high];
}

/** @param {number} cells @returns {[number, number]} */
function whole(cells) {
  return [0, cells - 1];
}

/** Half of the cells, around one of them. @param {number} center @param {number} cells @returns {[number, number]} */
function half(center, cells) {
  const kept = Math.max(1, Math.ceil(cells / 2));
  const first = Math.max(0, Math.min(cells - kept, center - (kept >> 1)));
  return [first, first + kept - 1];
}

/** Places of about so many ticks among `count`. @param {number} count @param {number} most @returns {number[]} */
function ticks(count, most) {
  const step = Math.max(1, Math.ceil(count / Math.max(1, most)));
  return Array.from({ length: Math.ceil(count / step) }, (_, index) => index * step);
}

/** So many cells at most, each the greatest of those that it stands for. @param {Cells} cells @param {number} mostRows @param {number} mostColumns @returns {Cells} */
export function shrunk(cells, mostRows, mostColumns) {
  const [rows, columns] = [Math.min(cells.rows, Math.floor(mostRows)), Math.min(cells.columns, Math.floor(mostColumns))];
  if (rows === cells.rows && columns === cells.columns) return cells;
  const values = new Float32Array(rows * columns).fill(NaN);
  for (let row = 0; row < cells.rows; row += 1) {
    for (let column = 0; column < cells.columns; column += 1) {
      const value = cells.values[row * cells.columns + column];
      const place = Math.floor((row * rows) / cells.rows) * columns + Math.floor((column * columns) / cells.columns);
      if (!(values[place] >= value) && Number.isFinite(value)) values[place] = value;
    }
  }
  return { rows, columns, values };
}

/** @param {Cells} cells @param {(number | null)[]} usual of each column @returns {Float32Array} each value over what is usual in its column */
export function overUsual({ rows, columns, values }, usual) {
  const found = new Float32Array(values.length);
  for (let cell = 0; cell < rows * columns; cell += 1) found[cell] = values[cell] / (usual[cell % columns] ?? NaN);
  return found;
}
