/** A bar of parts in a row, and what its colors mean. */

import { el } from "./dom.js";

/** @typedef {{title: string, value: number, color: string}} Part `color` names one of the style sheet */

/** @param {Part[]} parts @param {(value: number) => string} format @param {number} [share] of the width, 0 to 1 */
export function stackedBar(parts, format, share = 1) {
  const some = parts.filter(({ value }) => value > 0);
  const whole = some.reduce((sum, { value }) => sum + value, 0);
  return el(
    "div",
    { class: "stack", role: "img", style: { width: `${100 * share}%` }, "aria-label": some.map(({ title, value }) => `${title} ${format(value)}`).join(", ") },
    some.map(({ title, value, color }) => el("i", { title: `${title}: ${format(value)}`, style: { "flex-grow": (100 * value) / whole, background: `var(${color})` } })),
  );
}

/** @param {Iterable<[string, string]>} entries title, color */
export function colorKey(entries) {
  return el("div", { class: "key" }, [...entries].map(([title, color]) => el("span", { class: "entry" }, el("i", { style: { background: `var(${color})` } }), title)));
}
