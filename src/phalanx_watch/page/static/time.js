/** Where the time went: from the time held down to the steps that the weights are made of, per bucket, cause and attempt, and in money. */

import { exported, get, ofRun } from "./api.js";
import { colorKey, stackedBar } from "./bars.js";
import { copyMenu } from "./copy.js";
import { choice, el, empty, panel, put, table } from "./dom.js";
import { anything, dollars, duration, known, moment, number, percent, whole } from "./format.js";

/** @typedef {{name: string, title: string, seconds: number, tone: string}} Part */

/** Group of buckets -> title and color; a bucket belongs to the first whose prefix fits. @type {[string, string, string][]} */
const GROUPS = [
  ["step.comm_exposed", "communication", "--t-comm"],
  ["step.wait_straggler", "waiting", "--t-wait"],
  ["step.data_wait", "waiting", "--t-wait"],
  ["step.bubble", "waiting", "--t-wait"],
  ["step.host_gap", "waiting", "--t-wait"],
  ["step.", "computing", "--t-compute"],
  ["ckpt", "checkpoints and checks", "--t-check"],
  ["eval", "checkpoints and checks", "--t-check"],
  ["health", "checkpoints and checks", "--t-check"],
  ["fault", "faults", "--t-fault"],
  ["reconfigure", "faults", "--t-fault"],
  ["discarded", "faults", "--t-fault"],
  ["start", "starting", "--t-start"],
  ["pause", "pauses and stops", "--t-other"],
  ["stop", "pauses and stops", "--t-other"],
  ["", "unattributed", "--t-other"],
];
/** @type {Record<string, string>} */
const TITLES = {
  "start.process": "processes start", "start.rendezvous": "ranks meet", "start.prepare_data": "data prepared", "start.plan_compile": "model built",
  "start.restore": "state restored", "start.data_seek": "place in the data", "start.warmup": "first step",
  "step.compute": "computing", "step.recompute": "computing again", "step.optimizer": "optimizer",
  "step.comm_exposed.tp": "exposed: tensor axis", "step.comm_exposed.cp": "exposed: context axis", "step.comm_exposed.ep": "exposed: expert axis",
  "step.comm_exposed.dp": "exposed: data axis", "step.comm_exposed.pp": "exposed: pipeline",
  "step.wait_straggler": "waiting for the slowest", "step.bubble": "pipeline bubble", "step.data_wait": "waiting for data", "step.host_gap": "host behind",
  "ckpt.blocking": "checkpoints, blocking", eval: "evaluations", "health.sdc_check": "audits", reconfigure: "fleet re-formed", "pause.operator": "paused",
  "fault.undetected": "fault unnoticed", "fault.diagnose": "fault diagnosed", "fault.drain": "fault drained", stop: "closing down", unattributed: "unattributed",
  "discarded.rollback": "computing lost, done again", "discarded.nonfinite": "computing skipped, not finite",
};

/** @param {string} name @returns {[string, string]} the group's title and color */
function groupOf(name) {
  const [, title, color] = /** @type {[string, string, string]} */ (GROUPS.find(([prefix]) => name.startsWith(prefix)));
  return [title, color];
}

/** @param {string} name */
function titleOf(name) {
  return TITLES[name] ?? name.replaceAll("_", " ");
}

/** The parts that lie between the time held and useful computing, the greatest first. @param {any} answer @param {string} by @returns {Part[]} */
export function losses(answer, by) {
  const { buckets = {}, outcomes = {}, causes = [] } = answer;
  if (by === "cause") return causes.map((/** @type {any} */ one) => ({ name: one.cause, title: one.cause, seconds: one.seconds, tone: "--t-fault" })).sort(greatest);
  // Discarded steps took part in communication and waiting too, which the buckets count: only their computing is left to subtract.
  const inSteps = Object.entries(buckets).filter(([name]) => name.startsWith("step."));
  const computing = sum(inSteps.filter(([name]) => groupOf(name)[0] === "computing")) / (sum(inSteps) || 1);
  const discarded = Object.entries(outcomes).filter(([name]) => name.startsWith("discarded")).map(([name, seconds]) => /** @type {[string, number]} */ ([name, Number(seconds) * computing]));
  /** @type {Part[]} */
  const parts = [...Object.entries(buckets).filter(([name]) => groupOf(name)[0] !== "computing"), ...discarded]
    .map(([name, seconds]) => ({ name, title: by === "group" ? groupOf(name)[0] : titleOf(name), seconds: Number(seconds), tone: groupOf(name)[1] }));
  if (by !== "group") return parts.filter(({ seconds }) => seconds > 0).sort(greatest);
  /** @type {Map<string, Part>} */
  const groups = new Map();
  for (const part of parts) {
    const group = groups.get(part.title) ?? { ...part, name: part.title, seconds: 0 };
    group.seconds += part.seconds;
    groups.set(part.title, group);
  }
  return [...groups.values()].filter(({ seconds }) => seconds > 0).sort(greatest);
}

/** @param {[string, unknown][]} entries */
function sum(entries) {
  return entries.reduce((whole, [, seconds]) => whole + Number(seconds), 0);
}

/** @param {Part} one @param {Part} other */
function greatest(one, other) {
  return other.seconds - one.seconds;
}

/** @type {import("./main.js").MakeView} */
export function timeView(host, page) {
  let by = page.params.get("by") ?? "bucket";
  /** @type {any} */
  let answer = null;
  const price = el("input", { type: "number", min: "0", step: "any", placeholder: "2.50", value: page.params.get("price") ?? "", "aria-label": "Dollars per accelerator-hour", on: { change: () => (page.set({ price: price.value }), page.reload()) } });
  const headline = el("section", { class: "headline" });
  const fall = el("div", { class: "waterfall" });
  const rest = el("div");
  const none = el("div");
  const bar = el(
    "div", { class: "bar" },
    choice("Divided by", [["bucket", "bucket"], ["group", "group"], ["cause", "cause"]], by, (name) => ((by = name), page.set({ by }), draw())),
    !exported && el("label", { class: "field" }, el("span", { text: "$ per accelerator-hour" }), price),
    el("span", { class: "space" }),
    copyMenu("where the time went", copied, page.say),
  );
  put(host, headline, bar, fall, none, rest);

  function copied() {
    const parts = answer ? losses(answer, by) : [];
    return { what: parts.map(({ name }) => name), seconds: parts.map(({ seconds }) => seconds), share: parts.map(({ seconds }) => seconds / answer.held_s) };
  }

  function draw() {
    if (!answer) return;
    const held = answer.held_s;
    none.replaceChildren();
    headline.hidden = bar.hidden = !held;
    if (!held) return put(none, empty("No time is accounted for yet", "A run's ledger begins with its first step."));
    const kept = (answer.outcomes?.committed ?? 0) + (answer.outcomes?.pending ?? 0);
    put(
      headline,
      el("h1", {}, el("b", { text: percent(answer.goodput) }), " goodput"),
      el("p", { class: "muted", text: `Of ${duration(held)} in all, the final weights are made of ${duration(answer.outcomes?.committed)} of steps${answer.outcomes?.pending > 0 ? `; ${duration(answer.outcomes.pending)} more are not covered by a checkpoint yet` : ""}. Kept steps: ${percent(kept / held)}.` }),
      known(answer.cost?.dollars) && el("p", { class: "money" }, el("b", { text: dollars(answer.cost.dollars) }), el("span", { class: "muted", text: `, of which ${dollars(answer.cost.not_in_the_weights)} are not in the weights (${number(answer.cost.accelerator_hours, 3)} accelerator-hours)` })),
    );
    put(fall, waterfall(losses(answer, by), held, answer.cost?.dollars ?? null, by === "cause" ? "not touched by a fault" : "useful computing"));
    if (by === "cause" && !answer.causes?.length) put(fall, el("p", { class: "muted pad", text: "No fault or other cause took time from this run." }));
    put(rest, attempts(answer.attempts ?? []), definitions(answer));
  }

  return {
    async update(signal) {
      answer = await get(ofRun(page.id, "goodput"), { price_per_accelerator_hour: price.value }, signal);
      draw();
    },
  };
}

/** @param {Part[]} parts @param {number} held seconds @param {number | null} money of all of it @param {string} kept what is left */
function waterfall(parts, held, money, kept) {
  let left = held;
  /** @param {string} title @param {string} name @param {number} start @param {number} seconds @param {string} tone @param {boolean} whole */
  const row = (title, name, start, seconds, tone, whole) =>
    el(
      "div", { class: whole ? "row sum" : "row", role: "row", title: name },
      el("span", { class: "what", role: "cell", text: title }),
      el("span", { class: "track", role: "cell", "aria-hidden": "true" }, el("i", { style: { left: `${(100 * start) / held}%`, width: `${Math.max(0.15, (100 * seconds) / held)}%`, background: `var(${tone})` } })),
      el("span", { class: "number", role: "cell", text: duration(seconds) }),
      el("span", { class: "number share", role: "cell", text: percent(seconds / held) }),
      money !== null && el("span", { class: "number", role: "cell", text: dollars((money * seconds) / held) }),
    );
  const rows = parts.map((part) => {
    left -= part.seconds;
    return row(part.title, part.name, Math.max(0, left), part.seconds, part.tone, false);
  });
  return el(
    "div", { class: money === null ? "rows" : "rows money", role: "table", "aria-label": "From all time to useful computing" },
    row("all time of the run", "wall time, all attempts", 0, held, "--t-held", true),
    rows,
    row(kept, "what is left", 0, Math.max(0, left), "--t-compute", true),
  );
}

/** @param {any[]} list */
function attempts(list) {
  if (!list.length) return null;
  const longest = Math.max(...list.map((one) => total(one.buckets)), 1e-9);
  const used = new Map(list.flatMap((one) => Object.keys(one.buckets ?? {}).map((name) => groupOf(name))));
  const rows = list.map((one) => [
    whole(one.attempt), el("span", { class: "kind light", text: moment(one.started) }), duration(total(one.buckets)),
    stackedBar(Object.entries(one.buckets ?? {}).map(([name, seconds]) => ({ title: titleOf(name), value: Number(seconds), color: groupOf(name)[1] })), duration, total(one.buckets) / longest),
    one.reason ?? "",
  ]);
  return panel(
    "Attempt by attempt",
    colorKey(used),
    el("div", { class: "attempts" }, table(["", "Started", "Held", "Where it went", "Ended by"], rows, "Attempts", [0, 2])),
  );
}

/** @param {Record<string, number>} buckets */
function total(buckets) {
  return Object.values(buckets ?? {}).reduce((sum, seconds) => sum + Number(seconds), 0);
}

/** Other people's definitions of the same thing. @param {any} answer */
function definitions(answer) {
  const google = answer.google && { share: answer.google.goodput, rest: { "productive steps": answer.google.productive_s, ...answer.google.badput }, whole: answer.google.elapsed_s, ...answer.google };
  const meta = answer.meta && { share: answer.meta.ettr, rest: { productive: answer.meta.productive_s, ...answer.meta.unproductive }, whole: answer.meta.wall_s, ...answer.meta };
  /** @param {string} title @param {any} one */
  const box = (title, one) =>
    one && el(
      "section", { class: "panel" }, el("h2", {}, title, " ", el("b", { text: percent(one.share) })), el("p", { class: "note", text: anything(one.definition) }),
      table(["", "", ""], Object.entries(one.rest).filter(([, seconds]) => Number(seconds) > 0).map(([name, seconds]) => [name.replaceAll("_", " ").toLowerCase(), duration(Number(seconds)), percent(Number(seconds) / one.whole)]), title, [1, 2]),
    );
  const both = [box("As Google counts:", google), box("As Meta counts:", meta)].filter(Boolean);
  return both.length > 0 && el("div", { class: "pair" }, both);
}
