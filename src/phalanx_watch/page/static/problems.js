/** The box of what is wrong: cause, evidence, what is being done, what to do next; the worst first. */

import { el, put } from "./dom.js";
import { age, anything, known, moment } from "./format.js";
import { runAddress } from "./router.js";

const AROUND_S = 60;

/**
 * @typedef {{code: string, severity: "critical" | "warning" | "info", title: string, where: string, since: number | null,
 *   evidence: string[], doing: string, next: string}} Reason
 */

/** @param {HTMLElement} host @param {string} id @param {Reason[]} reasons */
export function problemBox(host, id, reasons) {
  const open = new Set([...host.querySelectorAll("details[open]")].map((element) => /** @type {HTMLElement} */ (element).dataset.code));
  host.hidden = !reasons.length;
  put(host, reasons.map((reason, place) => box(id, reason, open.has(reason.code) || (place === 0 && reason.severity === "critical"))));
}

/** @param {string} id @param {Reason} reason @param {boolean} open */
function box(id, reason, open) {
  const { since } = reason;
  return el(
    "details",
    { class: "problem", open, data: { severity: reason.severity, code: reason.code } },
    el(
      "summary", {},
      el("span", { class: "severity", text: reason.severity }), el("b", { text: reason.title }),
      reason.where && el("span", { class: "muted", text: anything(reason.where) }),
      known(since) && el("span", { class: "muted since", title: moment(since), text: `since ${age(since)}` }),
    ),
    el(
      "div", { class: "inside" },
      (reason.evidence ?? []).length > 0 && el("ul", {}, reason.evidence.map((line) => el("li", { text: anything(line) }))),
      reason.doing && el("p", {}, el("span", { class: "muted", text: "Being done: " }), reason.doing),
      reason.next && el("p", {}, el("span", { class: "muted", text: "What to do: " }), reason.next),
      known(since) && el("a", { href: runAddress(id, "logs", { since: since - AROUND_S, until: since + AROUND_S }), text: "Lines of the log around it" }),
    ),
  );
}
