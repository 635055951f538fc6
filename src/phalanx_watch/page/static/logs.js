/** All ranks' lines, merged in time: the first failure on top, one line for what many said. */

import { exported, get, ofRun } from "./api.js";
import { copyMenu } from "./copy.js";
import { el, empty, keyed, put, select } from "./dom.js";
import { clock, known, moment, plural, whole } from "./format.js";
import { Cursor } from "./keys.js";

const FEW = 500;
const MOST_KEY = 200;
const TYPING_MS = 250;

/** @typedef {{t: number, level: string, node: any, rank: any, epoch: any, step: any, text: string, process?: string, count: number, first: number, last: number, place: string}} LogLine */

/** @type {import("./main.js").MakeView} */
export function logsView(host, page) {
  /** @type {LogLine[]} */
  let lines = [];
  let last = FEW;
  let timer = 0;
  const filter = Object.fromEntries(["rank", "node", "level", "since", "until", "grep"].map((name) => [name, page.params.get(name) ?? ""]));
  let newest = page.params.get("order") !== "old";
  let grouped = page.params.get("grouped") !== "0";

  /** @param {string} name @param {string} label @param {string} hint @param {string} type */
  const field = (name, label, hint, type = "text") => {
    const box = el("input", { type, placeholder: hint, value: filter[name], on: { input: () => (clearTimeout(timer), (timer = window.setTimeout(() => change({ [name]: box.value.trim() }), TYPING_MS))) } });
    return el("label", { class: `field f-${name}` }, el("span", { text: label }), box);
  };
  /** @param {Record<string, string>} changes */
  function change(changes) {
    Object.assign(filter, changes);
    page.set(changes);
    last = FEW;
    page.reload();
  }

  const groupBox = el("input", { type: "checkbox", checked: grouped, on: { change: () => ((grouped = groupBox.checked), page.set({ grouped: grouped ? null : 0 }), page.reload()) } });
  const orderBox = el("input", { type: "checkbox", checked: newest, on: { change: () => ((newest = orderBox.checked), page.set({ order: newest ? null : "old" }), page.reload()) } });
  const window_ = el("div", { class: "window", hidden: true });
  const first = el("div");
  const body = el("div", { class: "lines", role: "list", "aria-label": "Lines" });
  const older = el("button", { type: "button", class: "more", text: "Show more", hidden: true, on: { click: () => ((last *= 4), page.reload()) } });
  const none = el("div");
  const text = field("grep", "text", "contains  ( / )", "search");
  put(
    host, first,
    el("div", { class: "bar" }, text,
      select("level", [["", "all"], ["info", "info and worse"], ["warning", "warnings and errors"], ["error", "errors"]], filter.level, (level) => change({ level })),
      field("rank", "rank", "3"), field("node", "node", "n7"),
      el("label", { class: "field" }, groupBox, el("span", { text: "same lines as one" })), el("label", { class: "field" }, orderBox, el("span", { text: "newest first" })),
      window_, el("span", { class: "space" }),
      copyMenu("the lines", () => Object.fromEntries(["t", "level", "node", "rank", "epoch", "step", "count", "text"].map((name) => [name, lines.map((line) => /** @type {any} */ (line)[name])])), page.say)),
    body, older, none,
  );
  const cursor = new Cursor(() => [...body.children], (row) => row.toggleAttribute("data-open"));

  function drawWindow() {
    window_.hidden = !filter.since && !filter.until;
    const [since, until] = [Number(filter.since), Number(filter.until)];
    put(window_, el("span", { class: "chip static", text: `${filter.since ? moment(since) : "…"} to ${filter.until ? moment(until).slice(11) : "now"}` }),
      el("button", { type: "button", text: "wider", on: { click: () => change({ since: filter.since && String(since - 120), until: filter.until && String(until + 120) }) } }),
      el("button", { type: "button", text: "all times", on: { click: () => change({ since: "", until: "" }) } }));
  }

  return {
    async update(signal) {
      const answer = await get(ofRun(page.id, "logs"), { ...filter, grouped: grouped ? 1 : 0, last }, signal);
      lines = exported ? (answer.lines ?? []).filter((/** @type {LogLine} */ one) => matches(one, filter)) : (answer.lines ?? []);
      drawWindow();
      put(first, answer.first_failure && failure(answer.first_failure, (since, until) => change({ since, until })));
      older.hidden = !answer.more;
      if (newest) lines.reverse();
      keyed(body, lines, (one) => `${one.first} ${one.process} ${one.text.slice(0, MOST_KEY)}`, row, fillRow);
      const filtered = Object.values(filter).some(Boolean);
      put(none, !lines.length && (filtered ? empty("No line matches", "Widen the time, or clear a filter.") : empty("No lines", "The processes of a run write their lines below RUN/logs. This run has none: it may have been made by an older version, or has not begun.")));
    },
    keys: [["/", "search the text", () => text.querySelector("input").focus()], ...cursor.keys("line")],
    close: () => clearTimeout(timer),
  };
}

const LEVELS = ["debug", "info", "warning", "error"];

/** What the server does where there is one. @param {LogLine} one @param {Record<string, string>} filter */
function matches(one, { rank, node, level, since, until, grep }) {
  return (
    (!rank || rank.split(",").includes(String(one.rank))) && (!node || String(one.node) === node) && (!grep || one.text.includes(grep)) &&
    (!level || LEVELS.indexOf(one.level) >= LEVELS.indexOf(level)) && (!since || (one.last ?? one.t) >= Number(since)) && (!until || (one.first ?? one.t) <= Number(until))
  );
}

/** A click opens a long line, unless it ends a selection of text. */
function row() {
  const made = el("div", { class: "logline", role: "listitem" });
  made.addEventListener("click", () => getSelection()?.isCollapsed !== false && made.toggleAttribute("data-open"));
  return made;
}

/** @param {HTMLElement} made @param {LogLine} one */
function fillRow(made, one) {
  const many = one.count > 1;
  made.dataset.level = one.level;
  put(
    made,
    el("time", { text: clock(one.t), title: many ? `${moment(one.first)} to ${moment(one.last)}` : moment(one.t) }),
    el("span", { class: "level", text: one.level }),
    el("span", { class: "who", text: many ? one.place : who(one), title: one.place }),
    el("span", { class: "step", text: known(one.step) ? `step ${whole(one.step)}` : "" }),
    el("span", { class: "text" }, many && el("span", { class: "count", text: `×${whole(one.count)}`, title: plural(one.count, "line") }), el("span", { text: one.text })),
  );
}

/** Who said it, in short: the rank and its node, or the process. @param {LogLine} one */
function who(one) {
  const process = known(one.rank) ? `rank ${one.rank}` : (one.process ?? "");
  return [process, one.node === process ? "" : one.node].filter(Boolean).join(" ");
}

/** @param {LogLine} one */
function when(one) {
  return [moment(one.t), who(one), known(one.step) ? `step ${whole(one.step)}` : ""].filter(Boolean).join(" · ");
}

/** The failure that came before the others, how that is known, and who failed because of it. @param {any} one @param {(since: string, until: string) => void} around */
function failure(one, around) {
  const recovered = known(one.recovered_step);
  return el(
    "section", { class: recovered ? "first-failure recovered" : "first-failure", "aria-label": "First failure" },
    el("div", { class: "line" }, el("b", { text: recovered ? `First failure, recovered: step ${whole(one.recovered_step)} was reached since` : "First failure" }), el("span", { class: "muted", text: when(one) }), el("span", { class: "space" }),
      el("button", { type: "button", text: "lines around it", on: { click: () => around(String(one.t - 30), String(one.t + 30)) } })),
    one.what !== one.text && el("p", { class: "what", text: one.what }),
    el("pre", { tabindex: "0", text: one.text }),
    (one.evidence ?? []).map((/** @type {string} */ line) => el("p", { class: "note", text: line })),
    one.followers?.length > 0 && el("details", {}, el("summary", { class: "note", text: `${plural(one.followers.length, "failure")} that followed` }), one.followers.map((/** @type {LogLine} */ other) => el("p", { class: "follower" }, el("span", { class: "muted", text: `${when(other)}  ` }), other.text.split("\n").at(-1)))),
  );
}
