/** What serves a run's weights, in a table above its curves. */

import { panel, put, table } from "./dom.js";
import { age, duration, moment, percent, whole } from "./format.js";

/** @param {HTMLElement} host hidden while nobody serves the run @param {any[]} notes */
export function servedBox(host, notes) {
  host.hidden = notes.length === 0;
  if (host.hidden) return put(host);
  const rows = notes.map((one) => [
    one.model,
    one.url,
    one.silent ? `silent for ${age(one.seen_s)}` : one.state,
    one.step === null ? "–" : whole(one.step),
    `${whole(one.running)} + ${whole(one.waiting)}`,
    percent(one.pages_share),
    whole(one.finished),
    whole(one.refused),
    whole(one.generated_tokens),
    duration(one.first_token_s),
    duration(one.next_token_s),
    moment(one.since_s),
  ]);
  const columns = ["Model", "At", "State", "Weights of step", "Texts + waiting", "Pages", "Ended", "Refused", "Tokens", "First token", "Next token", "Since"];
  put(host, panel("Serving", table(columns, rows, "Serving", [3, 4, 5, 6, 7, 8, 9, 10])));
}
