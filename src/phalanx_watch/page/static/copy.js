/** "Copy data": what a chart or table shows, as CSV or JSON, to the clipboard. */

import { el } from "./dom.js";

/** @typedef {Record<string, (string | number | boolean | null | undefined)[]>} Columns */

/** @param {string} title @param {() => Columns} columns @param {(text: string) => void} [say] */
export function copyMenu(title, columns, say = () => {}) {
  /** @param {string} kind @param {(columns: Columns) => string} write */
  const button = (kind, write) =>
    el("button", {
      type: "button", text: kind, "aria-label": `Copy the data of ${title} as ${kind}`,
      on: {
        click: async () => {
          const text = write(columns());
          menu.open = false;
          say((await copy(text)) ? `Copied as ${kind}` : "The browser forbids copying");
        },
      },
    });
  const menu = el(
    "details",
    { class: "copy", on: { focusout: (/** @type {FocusEvent} */ event) => menu.contains(/** @type {Node} */ (event.relatedTarget)) || (menu.open = false) } },
    el("summary", { text: "copy", title: "Copy data", "aria-label": `Copy the data of ${title}` }),
    el("div", {}, button("CSV", csv), button("JSON", json)),
  );
  return menu;
}

/** @param {Columns} columns */
export function csv(columns) {
  const names = Object.keys(columns);
  const rows = Math.max(0, ...names.map((name) => columns[name].length));
  const lines = [names.map(cell).join(",")];
  for (let row = 0; row < rows; row += 1) lines.push(names.map((name) => cell(columns[name][row])).join(","));
  return `${lines.join("\n")}\n`;
}

/** A text that a spreadsheet would take for a formula is told to be a text. @param {unknown} value */
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(String(value)) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** @param {Columns} columns */
export function json(columns) {
  return JSON.stringify(columns);
}

/** @param {string} text @returns {Promise<boolean>} */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP from another machine there is no clipboard: the old way.
    const box = el("textarea", { value: text, class: "hidden", "aria-hidden": "true" });
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    return done;
  }
}
