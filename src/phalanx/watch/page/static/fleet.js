/** The fleet: members, epochs on a time line, and of each fault who noticed it, how long each phase took, what it cost. */

import { get, ofRun } from "./api.js";
import { copyMenu } from "./copy.js";
import { command, el, empty, panel, put, svg, table } from "./dom.js";
import { anything, bytes, clock, duration, known, moment, plural, whole } from "./format.js";
import { runAddress } from "./router.js";

const AROUND_S = 30;
const WIDTH = 1000;
/** Phases of a recovery, in order, with colors. @type {Record<string, string>} */
const PHASES = {
  "fault.undetected": "--t-fault", "fault.diagnose": "--t-fault", "fault.drain": "--t-wait", reconfigure: "--t-comm", "start.rendezvous": "--t-check",
  "start.plan_compile": "--c6", "start.restore": "--t-start", "start.data_seek": "--c7", "start.warmup": "--c3",
};
/** @type {Record<string, string>} */
const PHASE_NAMES = {
  "fault.undetected": "unnoticed", "fault.diagnose": "diagnosed", "fault.drain": "drained", reconfigure: "re-formed", "start.rendezvous": "ranks meet",
  "start.plan_compile": "model built", "start.restore": "state restored", "start.data_seek": "place in the data", "start.warmup": "first step",
};

/** @type {import("./main.js").MakeView} */
export function fleetView(host, page) {
  return {
    async update(signal) {
      const fleet = await get(ofRun(page.id, "fleet"), {}, signal);
      if (!fleet.members?.length && !fleet.epochs?.length && !fleet.faults?.length && !fleet.happenings?.length) {
        return put(host, empty("This run has no fleet", "A fleet replaces what fails while training goes on. Start one on this machine: ", command('phalanx train configs/quickstart.toml --nodes 2 --spares 1 --fault "kill rank 1 at step 20"')));
      }
      const { faults = [], epochs = [], members = [], happenings = [] } = fleet;
      const copied = () => columns(faults.map((/** @type {any} */ fault) => ({ ...fault, phases: undefined, ...fault.phases })));
      const counts = new Map();
      for (const member of members) counts.set(member.state ?? "member", (counts.get(member.state ?? "member") ?? 0) + 1);
      put(
        host,
        el("section", { class: "headline" },
          el("h1", {}, el("b", { text: plural(members.length, "node") })),
          el("p", { class: "muted", text: [[...counts].map(([state, count]) => `${count} ${state}`).join(", "), plural(epochs.length, "epoch"), plural(faults.length, "fault")].filter(Boolean).join(" · ") })),
        el("section", { class: "panel" }, el("div", { class: "bar slim" }, el("h2", { text: "Time line" })), timeLine(epochs, faults)),
        el("section", { class: "panel" }, el("div", { class: "bar slim" }, el("h2", { text: "Faults" }), el("span", { class: "space" }), copyMenu("the faults", copied, page.say)), faultTable(page.id, faults)),
        members.length > 0 && panel("Members", memberTable(members)),
        happenings.length > 0 && panel("What happened", happeningTable(page.id, happenings)),
      );
    },
  };
}

/** @param {any[]} epochs @param {any[]} faults */
function timeLine(epochs, faults) {
  const starts = epochs.map((one) => one.started).filter(known);
  const times = [...starts, ...epochs.map((one) => one.ended).filter(known), ...faults.map((one) => one.t).filter(known)];
  if (!times.length) return el("p", { class: "muted", text: "No epoch has begun." });
  const [first, last] = [times.reduce((a, b) => Math.min(a, b)), times.reduce((a, b) => Math.max(a, b))];
  const span = Math.max(1e-3, last - first);
  const at = (/** @type {number} */ t) => (WIDTH * (t - first)) / span;
  const blocks = epochs.filter((one) => known(one.started)).map((one, index) => {
    const [x, end] = [at(one.started), at(known(one.ended) ? one.ended : last)];
    const ranks = Array.isArray(one.ranks) ? one.ranks.length : one.ranks;
    const title = `epoch ${one.epoch}: ${plural(ranks ?? 0, "rank")}, ${moment(one.started)}, ${duration((one.ended ?? last) - one.started)}${one.reason ? `, ended: ${one.reason}` : ""}`;
    const wide = end - x > 70;
    return svg("g", { class: `epoch ${index % 2 ? "odd" : ""}` }, svg("title", { text: title }), svg("rect", { x, y: 22, width: Math.max(1.5, end - x - 1.5), height: 30, rx: 3 }), wide && svg("text", { x: x + 8, y: 42 }, `epoch ${one.epoch}${end - x > 150 ? ` · ${ranks} ranks` : ""}`));
  });
  const marks = faults.filter((one) => known(one.t)).map((one) => svg("g", { class: "fault" }, svg("title", { text: `${moment(one.t)}: ${anything(one.what)} (${anything(one.node)})` }), svg("line", { x1: at(one.t), x2: at(one.t), y1: 12, y2: 58 }), svg("path", { d: `M${at(one.t) - 5} 4h10l-5 9z` })));
  return el(
    "div", { class: "timeline" },
    svg("svg", { viewBox: `-6 0 ${WIDTH + 12} 62`, preserveAspectRatio: "none", role: "img", "aria-label": `${plural(epochs.length, "epoch")} and ${plural(faults.length, "fault")} from ${moment(first)} to ${moment(last)}` }, blocks, marks),
    el("div", { class: "ends" }, el("span", { text: moment(first) }), el("span", { text: duration(span) }), el("span", { text: moment(last).slice(11) })),
  );
}

/** @param {string} id @param {any[]} faults */
function faultTable(id, faults) {
  if (!faults.length) return el("p", { class: "muted", text: "No fault so far." });
  const totals = faults.map((fault) => Object.values(fault.phases ?? {}).reduce((sum, seconds) => sum + Number(seconds), 0));
  const longest = Math.max(...totals, 1e-9);
  const used = Object.keys(PHASES).filter((phase) => faults.some((fault) => fault.phases?.[phase] > 0));
  const rows = faults.map((fault, index) => [
    el("a", { href: runAddress(id, "logs", { since: fault.t - AROUND_S, until: fault.t + AROUND_S }), title: "The lines around it", text: clock(fault.t) }),
    anything(fault.what), anything(fault.node), anything(fault.detected_by),
    el("div", { class: "stack", style: { width: `${(100 * totals[index]) / longest}%` }, role: "img", "aria-label": phaseText(fault.phases) },
      Object.entries(fault.phases ?? {}).map(([phase, seconds]) => el("i", { title: `${PHASE_NAMES[phase] ?? phase}: ${duration(Number(seconds))}`, style: { "flex-grow": Number(seconds), background: `var(${PHASES[phase] ?? "--t-other"})` } }))),
    duration(totals[index] || null), whole(fault.lost_steps), bytes(fault.moved_bytes),
  ]);
  return el(
    "div", {},
    el("div", { class: "key" }, used.map((phase) => el("span", { class: "entry" }, el("i", { style: { background: `var(${PHASES[phase]})` } }), PHASE_NAMES[phase]))),
    el("div", { class: "attempts" }, table(["At", "What", "Node", "Noticed by", "Phases", "Took", "Steps lost", "Moved"], rows, "Faults", [5, 6, 7])),
  );
}

/** @param {Record<string, number>} phases */
function phaseText(phases) {
  return Object.entries(phases ?? {}).map(([phase, seconds]) => `${PHASE_NAMES[phase] ?? phase} ${duration(seconds)}`).join(", ");
}

/** @param {any[]} members */
function memberTable(members) {
  if (typeof members[0] !== "object") return el("p", { text: members.map(anything).join(", ") });
  const names = [...new Set(members.flatMap((member) => Object.keys(member)))];
  const shown = (/** @type {any} */ member, /** @type {string} */ name) => {
    const value = member[name];
    if (name === "state") return el("span", { class: "state", data: { state: String(value) } }, el("span", { class: "dot" }), el("span", { text: anything(value) }));
    if (name.endsWith("_bytes")) return bytes(value);
    if (name === "t" || name === "seen" || name === "joined") return moment(value);
    if (Array.isArray(value) && value.length > 8) return `${value[0]} … ${value[value.length - 1]} (${value.length})`;
    return anything(value);
  };
  return table(names.map((name) => name.replaceAll("_", " ")), members.map((member) => names.map((name) => shown(member, name))), "Members");
}

/** @param {string} id @param {any[]} happenings */
function happeningTable(id, happenings) {
  const rows = [...happenings].reverse().slice(0, 200).map((one) => [
    known(one.t) ? el("a", { href: runAddress(id, "logs", { since: one.t - AROUND_S, until: one.t + AROUND_S }), text: clock(one.t) }) : "",
    anything(one.text ?? one.what ?? one),
  ]);
  return table(["At", ""], rows, "What happened");
}

/** @param {any[]} rows @returns {import("./copy.js").Columns} */
function columns(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((name) => rows.some((row) => row[name] !== undefined));
  return Object.fromEntries(names.map((name) => [name, rows.map((row) => (typeof row[name] === "object" ? anything(row[name]) : row[name]))]));
}
