/** The lines of a comparison by name, color and newest value: searched, sorted, pointed at and left out. */

import { el, put, select } from "./dom.js";

/** @typedef {{name: string, label: string, color: string, value: number | null, text: string, parts?: any[]}} Entry */

/** More lines than this are searched and sorted. */
const FEW = 6;
/** @type {[string, string][]} */
const ORDERS = [["", "as chosen"], ["value", "least first"], ["-value", "greatest first"], ["label", "by name"]];

export class LineLegend {
  /** @param {{onHide: (names: Set<string>) => void, onPoint: (name: string | null) => void, order: string, onOrder: (order: string) => void}} options */
  constructor(options) {
    this.options = options;
    this.order = options.order;
    /** @type {Entry[]} */
    this.entries = [];
    /** Lines that a click left out. @type {Set<string>} */
    this.off = new Set();
    this.search = el("input", { type: "search", placeholder: "Search lines", "aria-label": "Show only the lines with these words", on: { input: () => this.draw() } });
    this.tools = el("div", { class: "bar slim" }, this.search, select("order", ORDERS, this.order, (order) => ((this.order = order), options.onOrder(order), this.draw())));
    this.list = el("div", { class: "legendbox" });
    this.element = el("div", {}, this.tools, this.list);
  }

  /** @param {Entry[]} entries */
  set(entries) {
    this.entries = entries;
    this.draw();
  }

  /** @param {Entry} entry */
  matches(entry) {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return words.every((/** @type {string} */ word) => entry.label.toLowerCase().includes(word));
  }

  draw() {
    const many = this.entries.length > FEW;
    this.tools.hidden = !many;
    this.list.classList.toggle("many", many);
    const shown = this.entries.filter((entry) => this.matches(entry));
    const sign = this.order.startsWith("-") ? -1 : 1;
    if (this.order === "label") shown.sort((one, other) => one.label.localeCompare(other.label, "en", { numeric: true }));
    else if (this.order) shown.sort((one, other) => (one.value === null ? 1 : other.value === null ? -1 : sign * (one.value - other.value)));
    put(this.list, shown.map((entry) => this.row(entry)));
    const names = shown.map(({ name }) => name);
    this.options.onHide(new Set([...this.off, ...this.entries.map(({ name }) => name).filter((name) => !names.includes(name))]));
  }

  /** @param {Entry} entry */
  row(entry) {
    const isOff = this.off.has(entry.name);
    const toggle = () => {
      if (!this.off.delete(entry.name)) this.off.add(entry.name);
      this.draw();
    };
    return el(
      "span", { class: "entry", on: { pointerenter: () => this.options.onPoint(entry.name), pointerleave: () => this.options.onPoint(null) } },
      el("button", { type: "button", class: "swatch", "aria-pressed": String(!isOff), "aria-label": `Show ${entry.label}`, title: "Show or hide", on: { click: toggle } }, el("i", { style: { background: isOff ? "transparent" : `var(${entry.color})`, "border-color": `var(${entry.color})` } })),
      entry.parts,
      el("span", { class: "muted", text: entry.text }),
    );
  }
}
