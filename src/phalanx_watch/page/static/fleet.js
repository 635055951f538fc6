/** The fleet: members, epochs on a time line, and of each fault who noticed it, how long each phase took, what it cost. */

import { get, ofRun } from "./api.js";
import { colorKey, stackedBar } from "./bars.js";
import { copyMenu } from "./copy.js";
import { command, el, empty, panel, put, table } from "./dom.js";
import { anything, bytes, clock, duration, known, moment, plural, whole } from "./format.js";
import { runAddress } from "./router.js";

const AROUND_S = 30;
const MOST_HAPPENINGS = 200;
/** Roles that are counted as things; the others are said of nodes. */
const NOUNS = new Set(["member", "spare"]);
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
      if (!fleet.members?.length && !fleet.faults?.length && !fleet.happenings?.length) {
        return put(host, empty("This run has no fleet", "A fleet replaces failed nodes and workers while training continues. Start one on this machine: ", command('phalanx train configs/quickstart.toml --nodes 2 --spares 1 --fault "kill rank 1 at step 20"')));
      }
      const { faults = [], epochs = [], members = [], happenings = [], now = null } = fleet;
      const copied = () => columns(faults.map((/** @type {any} */ fault) => ({ ...fault, phases: undefined, ...fault.phases })));
      const counts = new Map();
      for (const member of members) counts.set(member.role, (counts.get(member.role) ?? 0) + 1);
      put(
        host,
        el("section", { class: "headline" },
          el("h1", {}, el("b", { text: plural(members.length, "node") })),
          el("p", { class: "muted", text: [now && now.phase, [...counts].map(([role, count]) => (NOUNS.has(role) ? plural(count, role) : `${count} ${role}`)).join(", "), plural(epochs.length, "epoch"), plural(faults.length, "fault"), now?.reason && (now.over ? now.reason : `last: ${now.reason}`)].filter(Boolean).join(" · ") })),
        el("section", { class: "panel" }, el("div", { class: "bar slim" }, el("h2", { text: "Time line" })), timeLine(epochs, faults)),
        el("section", { class: "panel" }, el("div", { class: "bar slim" }, el("h2", { text: "Faults" }), el("span", { class: "space" }), copyMenu("the faults", copied, page.say)), faultTable(page.id, faults)),
        members.length > 0 && panel("Members", memberTable(members, now?.over === true), fleet.members_left_out > 0 && el("p", { class: "note", text: `and ${whole(fleet.members_left_out)} more` })),
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
  const at = (/** @type {number} */ t) => `${(100 * (t - first)) / span}%`;
  const blocks = epochs.filter((one) => known(one.started)).map((one, index) => {
    const end = known(one.ended) ? one.ended : last;
    const ranks = Array.isArray(one.ranks) ? one.ranks.length : (one.ranks ?? 0);
    const title = `epoch ${one.epoch}: ${plural(ranks, "rank")}, from ${moment(one.started)}, ${duration(end - one.started)}${one.reason ? `, ended: ${one.reason}` : ""}`;
    return el("div", { class: index % 2 ? "epoch odd" : "epoch", title, style: { left: at(one.started), width: `${(100 * (end - one.started)) / span}%` } }, el("span", { text: `epoch ${one.epoch} · ${plural(ranks, "rank")}` }));
  });
  const marks = faults.filter((one) => known(one.t)).map((one) => el("div", { class: "fault", title: `${moment(one.t)}: ${anything(one.what)} (${anything(one.node)})`, style: { left: at(one.t) } }));
  return el(
    "div", { class: "timeline" },
    el("div", { class: "track", role: "img", "aria-label": `${plural(epochs.length, "epoch")} and ${plural(faults.length, "fault")} from ${moment(first)} to ${moment(last)}` }, blocks, marks),
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
    linesAround(id, fault.t),
    el("span", { class: "told", text: anything(fault.what) }), anything(fault.node), el("span", { class: "told", text: anything(fault.detected_by) }),
    stackedBar(Object.entries(fault.phases ?? {}).map(([phase, seconds]) => ({ title: PHASE_NAMES[phase] ?? phase, value: Number(seconds), color: PHASES[phase] ?? "--t-other" })), duration, totals[index] / longest),
    duration(totals[index] || null), whole(fault.lost_steps), bytes(fault.moved_bytes),
  ]);
  return el(
    "div", {},
    colorKey(used.map((phase) => [PHASE_NAMES[phase], PHASES[phase]])),
    el("div", { class: "attempts" }, table(["At", "What", "Node", "Noticed by", "Phases", "Took", "Steps lost", "Moved"], rows, "Faults", [5, 6, 7])),
  );
}

/** @param {any[]} members @param {boolean} over */
function memberTable(members, over) {
  const rows = members.map((member) => {
    const role = String(member.role ?? "member");
    const ranks = member.ranks ?? [];
    return [
      el("b", { text: member.name }), el("span", { class: "state", data: { state: role } }, el("span", { class: "dot" }), el("span", { text: role })),
      ranks.length > 8 ? `${ranks[0]} … ${ranks[ranks.length - 1]} (${ranks.length})` : ranks.join(" ") || "–",
      anything(member.host), anything(member.domain), role === "lost" || over ? "–" : duration(member.silent_s), member.why ?? "",
    ];
  });
  return table(["Node", "State", "Ranks", "Host", "Domain", "Heard from", "Why"], rows, "Members", [5], 6);
}

/** @param {string} id @param {any[]} happenings */
function happeningTable(id, happenings) {
  const rows = [...happenings].reverse().slice(0, MOST_HAPPENINGS).map((one) => {
    const t = one.unix_s ?? one.t;
    return [known(t) ? linesAround(id, t) : "", one.node ?? "", anything(one.what ?? one.text)];
  });
  return table(["At", "Node", ""], rows, "What happened", [], 2);
}

/** @param {string} id @param {number} t */
function linesAround(id, t) {
  return el("a", { href: runAddress(id, "logs", { since: t - AROUND_S, until: t + AROUND_S }), title: `${moment(t)}: the lines of the log around it`, text: clock(t) });
}

/** @param {any[]} rows @returns {import("./copy.js").Columns} */
function columns(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((name) => rows.some((row) => row[name] !== undefined));
  return Object.fromEntries(names.map((name) => [name, rows.map((row) => (typeof row[name] === "object" ? anything(row[name]) : row[name]))]));
}
