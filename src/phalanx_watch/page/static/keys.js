/** Keys: one letter, or two one after the other ("g r"); none while somebody types. `?` shows those of the present view. */

import { el } from "./dom.js";

const SECOND_KEY_MS = 3000;

/** @param {() => import("./main.js").Key[]} keys those of the present view */
export function bindKeys(keys) {
  let first = "";
  let since = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.key === "Escape" && isTyping(target)) {
      event.preventDefault(); // a browser would clear the search
      return target.blur();
    }
    if (isTyping(target) || document.querySelector("dialog[open]")) return;
    if (event.key === "Enter" && target.closest("a, button, summary, select")) return; // its own meaning
    if (event.timeStamp - since > SECOND_KEY_MS) first = "";
    const pressed = first ? `${first} ${event.key}` : event.key;
    const found = keys().find(([key]) => key === pressed);
    if (found) event.preventDefault();
    found?.[2]();
    first = !found && keys().some(([key]) => key.startsWith(`${event.key} `)) ? event.key : "";
    since = event.timeStamp;
  });
}

/** @param {HTMLElement} target */
function isTyping(target) {
  return target.matches("input:not([type=checkbox], [type=range]), select, textarea");
}

/** @param {import("./main.js").Key[]} keys */
export function showHelp(keys) {
  const rows = keys.map(([key, meaning]) => el("div", {}, el("dt", {}, key.split(" ").map((part) => el("kbd", { text: part }))), el("dd", { text: meaning })));
  const close = el("button", { type: "button", text: "Close", on: { click: () => dialog.close() } });
  const dialog = el("dialog", { class: "help", "aria-label": "Keys" }, el("h2", { text: "Keys" }), el("dl", {}, rows), close);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (/** @type {Event} */ event) => event.target === dialog && dialog.close());
  dialog.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => event.key === "?" && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
}

/** A place among rows that j and k move, Enter opens. */
export class Cursor {
  /** @param {() => HTMLElement[]} rows @param {(row: HTMLElement) => void} open */
  constructor(rows, open) {
    this.rows = rows;
    this.open = open;
  }

  /** @returns {HTMLElement | undefined} */
  get row() {
    return this.rows().find((row) => "cursor" in row.dataset);
  }

  /** @param {number} by */
  move(by) {
    const rows = this.rows();
    if (!rows.length) return;
    const old = this.row;
    const place = old ? rows.indexOf(old) + by : by > 0 ? 0 : rows.length - 1;
    const next = rows[Math.max(0, Math.min(rows.length - 1, place))];
    if (old) delete old.dataset.cursor;
    next.dataset.cursor = "";
    next.scrollIntoView({ block: "nearest" });
  }

  /** @param {string} noun @returns {import("./main.js").Key[]} */
  keys(noun) {
    return [
      ["j", `next ${noun}`, () => this.move(1)],
      ["k", `${noun} before`, () => this.move(-1)],
      ["Enter", `open the ${noun}`, () => this.row && this.open(this.row)],
    ];
  }
}
