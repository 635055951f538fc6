/**
 * The shell of the page: which view is shown, whether it is live, the keys, light or dark.
 *
 * A view is a function of its host and a `Page`; it builds its elements once, then `update` fills them as often as something changes.
 */

import { Feed, Loader, exported, get, ofRun } from "./api.js";
import { checkpointsView } from "./checkpoints.js";
import { compareView } from "./compare.js";
import { el, put, say, svg } from "./dom.js";
import { fleetView } from "./fleet.js";
import { folderOf } from "./format.js";
import { bindKeys, showHelp } from "./keys.js";
import { layersView } from "./layers.js";
import { logsView } from "./logs.js";
import { profileView } from "./profile.js";
import { ranksView } from "./ranks.js";
import { TABS, parse, runAddress, setParams } from "./router.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";
import { nextTheme, themeName } from "./theme.js";
import { timeView } from "./time.js";

/**
 * @typedef {object} Page what a view gets
 * @property {string} id the run's, if the view is of one
 * @property {URLSearchParams} params of the address, as they were when it was opened
 * @property {(changes: Record<string, string | number | null | undefined>) => void} set changes the address in place
 * @property {() => void} reload asks again at once, because a person changed something
 * @property {() => void} soon asks again before long, because the answer was not whole
 * @property {(text: string) => void} say tells a person, once
 * @property {(title: string, folder?: string) => void} title names the run
 */
/** @typedef {[string, string, () => void]} Key the key, what it does, in words and in deed */
/** @typedef {{update: (signal: AbortSignal) => Promise<void>, keys?: Key[], close?: () => void}} View */
/** @typedef {(host: HTMLElement, page: Page) => View} MakeView */

/** @type {Record<string, MakeView>} */
const VIEWS = {
  runs: runsView, compare: compareView, run: runView, time: timeView, ranks: ranksView,
  fleet: fleetView, layers: layersView, logs: logsView, profile: profileView, checkpoints: checkpointsView, lost: lostView,
};
/** Of views that show none, for those who hear the page. @type {Record<string, string>} */
const TITLES = { runs: "Runs", compare: "Compare", ranks: "Ranks", layers: "Layers", logs: "Logs", profile: "Profile" };
const LIVE = {
  live: ["live", "What is shown follows the runs."],
  reconnecting: ["reconnecting", "The server does not answer at the moment; what is shown may be old."],
  paused: ["paused", "A hidden tab asks nothing."],
  file: ["exported file", "This file shows the run as it was when it was written."],
};

const heading = el("div", { class: "crumbs" });
const live = el("span", { class: "live", role: "status", data: { state: "reconnecting" } }, el("span", { class: "dot" }), el("span", { text: "connecting" }));
const theme = el("button", { type: "button", class: "quiet", title: "Light or dark (t)", on: { click: () => changeTheme() } });
const help = el("button", { type: "button", class: "quiet", text: "?", "aria-label": "Keys (?)", title: "Keys (?)", on: { click: () => showHelp(keysNow()) } });
const tabs = el("nav", { class: "tabs", "aria-label": "Views of this run" });
const trouble = el("div", { class: "trouble", role: "alert", hidden: true });
const main = el("main", { id: "main", tabindex: "-1" });
const toast = el("div", { class: "toast", role: "status", "aria-live": "polite" });
const skip = el("button", { type: "button", class: "skip", text: "Skip to the content", on: { click: () => main.focus() } });

/** @type {{address: string, route: import("./router.js").Route, view: View, loader: Loader} | null} */
let shown = null;
let toastTimer = 0;

const feed = new Feed(
  (changed) => {
    if (!shown) return;
    const { view, id } = shown.route;
    if (!changed || view === "runs" || view === "compare" || changed === id) shown.loader.poke();
  },
  (state) => {
    const [word, meaning] = LIVE[state];
    live.dataset.state = state;
    live.title = meaning;
    say(live.lastElementChild, word);
  },
);

/** @returns {Key[]} */
function globalKeys() {
  /** @type {Key[]} */
  const keys = [
    ["?", "these keys", () => showHelp(keysNow())],
    ["t", "light, dark, or as the system", () => changeTheme()],
    ["g r", "all runs", () => (location.hash = "#/")],
  ];
  if (shown?.route.id) for (const [tab, title, key] of TABS) keys.push([`g ${key}`, title, () => (location.hash = runAddress(shown?.route.id ?? "", tab))]);
  return keys;
}

/** @returns {Key[]} */
function keysNow() {
  return [...(shown?.view.keys ?? []), ...globalKeys()];
}

function changeTheme() {
  nextTheme();
  say(theme, `◐ ${themeName()}`);
  // What was drawn on a canvas has the old colors: build the view again.
  show(true);
}

/** @param {string} text */
function tell(text) {
  clearTimeout(toastTimer);
  say(toast, text);
  toast.dataset.shown = "yes";
  toastTimer = window.setTimeout(() => delete toast.dataset.shown, 2500);
}

/** The run's name, and its folder, which tells runs of one name apart. @param {string} name @param {string} [folder] */
function nameRun(name, folder = "") {
  const link = heading.querySelector(".name");
  if (link) say(link, name);
  const beside = heading.querySelector(".folder");
  if (beside) say(beside, folder === name ? "" : folder);
  document.title = name ? `${name} · Phalanx` : "Phalanx";
}

/** Nine places, of which one is empty and held all the same. */
function emblem() {
  const places = [0, 1, 2].flatMap((row) => [0, 1, 2].map((column) => svg("rect", { x: 3 + 3.7 * column, y: 3 + 3.7 * row, width: 2.6, height: 2.6, rx: 0.6, opacity: row === 1 && column === 1 ? 0.45 : 1 })));
  return svg("svg", { class: "mark", viewBox: "0 0 16 16", "aria-hidden": "true" }, places);
}

/** @param {import("./router.js").Route} route */
function showHeading(route) {
  const home = el("a", { class: "home", href: exported ? runAddress(exported.id) : "#/" }, emblem(), "Phalanx");
  const of = route.id ? el("a", { class: "name", href: runAddress(route.id), text: "…" }) : el("span", { class: "name", text: { runs: "Runs", compare: "Compare" }[route.view] ?? "" });
  put(heading, home, el("span", { class: "slash", text: "/", "aria-hidden": "true" }), of, el("span", { class: "folder muted" }));
  const title = TITLES[route.view];
  if (title) heading.append(el("h1", { class: "hidden", text: title }));
  tabs.hidden = !route.id;
  put(
    tabs,
    TABS.map(([tab, title, key]) =>
      el("a", { href: runAddress(route.id, tab), text: title, title: `g ${key}`, "aria-current": (tab || "run") === route.view ? "page" : null }),
    ),
  );
}

/** Shows the view of the address. @param {boolean} [again] also if it is shown already */
function show(again = false) {
  const route = parse();
  if (route.view === "runs" && exported) return void (location.hash = runAddress(exported.id));
  if (!again && shown && location.hash === shown.address) return;
  shown?.loader.close();
  shown?.view.close?.();
  const sameRun = shown?.route.id === route.id && route.id;
  const name = sameRun ? (heading.querySelector(".name")?.textContent ?? "") : "";
  const folder = sameRun ? (heading.querySelector(".folder")?.textContent ?? "") : "";
  showHeading(route);
  nameRun(name || (route.id ? "…" : (heading.querySelector(".name")?.textContent ?? "")), folder);
  trouble.hidden = true;
  main.className = `view-${route.view}`;
  main.replaceChildren();
  /** @type {Page} */
  const page = { id: route.id, params: route.params, set: setParams, reload: () => loader.poke(true), soon: () => loader.poke(), say: tell, title: nameRun };
  const view = VIEWS[route.view](main, page);
  const loader = new Loader((signal) => view.update(signal), report);
  shown = { address: location.hash, route, view, loader };
  feed.follow(route.view === "compare" ? (route.params.get("ids") ?? "").split(",").filter(Boolean) : route.id ? [route.id] : []);
  loader.poke(true);
  if (route.id && !name && route.view !== "run") void learnName(route.id);
  if (!again) window.scrollTo(0, 0);
  tabs.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

/** @param {string} id */
async function learnName(id) {
  const run = await get(ofRun(id)).catch(() => ({ name: id })); // the view itself says what is wrong
  if (shown?.route.id === id) nameRun(run.name, folderOf(run));
}

/** @param {Error | null} error */
function report(error) {
  trouble.hidden = !error;
  main.removeAttribute("aria-busy");
  if (!error) return;
  put(trouble, el("strong", { text: "Not up to date. " }), error.message, " ", el("button", { type: "button", text: "Try again", on: { click: () => shown?.loader.poke(true) } }));
}

/** @type {MakeView} */
function lostView(host) {
  put(host, el("div", { class: "empty" }, el("h2", { text: "There is no such view" }), el("p", {}, el("a", { href: "#/", text: "All runs" }))));
  return { update: async () => {} };
}

function start() {
  say(theme, `◐ ${themeName()}`);
  const header = el("header", { class: "top" }, heading, el("span", { class: "space" }), live, theme, help);
  document.body.append(skip, header, tabs, trouble, main, toast);
  bindKeys(keysNow);
  window.addEventListener("hashchange", () => show());
  show();
}

start();
