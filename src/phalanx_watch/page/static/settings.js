/** Settings of the run files as columns of the list: those that differ between the runs, and any other that a person chooses. */

import { el, put, say } from "./dom.js";
import { anything } from "./format.js";

/** Settings that are shown until a person chooses: more do not fit beside the results. */
const FEW = 3;

/** @typedef {{differ: string[], all: string[], values: Record<string, Record<string, unknown>>, left_out: number}} Settings */

/** The shortest end of a path that no other one of these has, as "lr". @param {string} path @param {string[]} paths */
export function shortName(path, paths) {
  const parts = path.split(".");
  for (let count = 1; count < parts.length; count += 1) {
    const end = parts.slice(-count).join(".");
    if (!paths.some((other) => other !== path && (other === end || other.endsWith(`.${end}`)))) return end;
  }
  return path;
}

/** The choice of setting columns. */
export class SettingColumns {
  /** @param {string | null} chosen paths with commas between them, of the address; null: the first that differ @param {(chosen: string | null) => void} onChange */
  constructor(chosen, onChange) {
    /** @type {string[] | null} */
    this.chosen = chosen === null ? null : chosen.split(",").filter(Boolean);
    this.onChange = onChange;
    /** @type {Settings} */
    this.settings = { differ: [], all: [], values: {}, left_out: 0 };
    this.boxes = el("div", { class: "boxes" });
    this.others = el("datalist", { id: "settings" });
    this.summary = el("summary", { text: "settings", title: "Settings as columns" });
    const add = el("input", { type: "search", list: "settings", placeholder: "Another setting", "aria-label": "Add a setting as a column", on: { change: () => this.add(add) } });
    this.element = el("details", { class: "copy columns" }, this.summary, el("div", {}, this.boxes, add, this.others));
  }

  /** Paths of the columns, in their order. @returns {string[]} */
  get paths() {
    return this.chosen ?? this.settings.differ.slice(0, FEW);
  }

  /** @param {Settings} settings */
  set(settings) {
    const isSame = settings.differ.join() === this.settings.differ.join() && settings.all.join() === this.settings.all.join();
    this.settings = settings;
    if (!isSame) this.draw(); // a list that is there keeps the focus
  }

  draw() {
    const { differ, all } = this.settings;
    const listed = [...differ, ...this.paths.filter((path) => !differ.includes(path))];
    say(this.summary, this.paths.length ? `settings (${this.paths.length})` : "settings");
    const box = (/** @type {string} */ path) => el("label", {}, el("input", { type: "checkbox", checked: this.paths.includes(path), on: { change: () => this.toggle(path) } }), el("code", { text: path }), differ.includes(path) ? null : el("span", { class: "muted", text: "the same in all" }));
    put(this.boxes, listed.length ? listed.map(box) : el("p", { class: "muted", text: "These runs have the same settings." }));
    put(this.others, all.map((path) => el("option", { value: path })));
  }

  /** @param {string} path */
  toggle(path) {
    const paths = this.paths;
    this.chosen = paths.includes(path) ? paths.filter((other) => other !== path) : [...paths, path];
    this.draw();
    this.onChange(this.chosen.join(",") || ",");
  }

  /** @param {HTMLInputElement} input */
  add(input) {
    const { all, differ } = this.settings;
    if ((all.includes(input.value) || differ.includes(input.value)) && !this.paths.includes(input.value)) this.toggle(input.value);
    input.value = "";
  }

  /** @param {string} path @param {string} id of a run @returns {string} */
  text(path, id) {
    return anything(this.settings.values[path]?.[id]);
  }

  /** @param {string} path @param {string} id of a run @returns {string | number | null} */
  sort(path, id) {
    const value = this.settings.values[path]?.[id];
    return typeof value === "number" || typeof value === "string" ? value : value === undefined || value === null ? null : String(value);
  }
}
