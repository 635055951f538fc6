/** Profiles: where a step's time went across ranks, who waited for whom, what the plan had said, and the trace itself. */

import { exported, get, ofRun } from "./api.js";
import { command, el, empty, panel, put, select, table } from "./dom.js";
import { anything, bytes, duration, number, percent, whole } from "./format.js";

/** @type {import("./main.js").MakeView} */
export function profileView(host, page) {
  let name = page.params.get("profile") ?? "";
  return {
    async update(signal) {
      const [{ profiles = [] }, run] = await Promise.all([get(ofRun(page.id, "profiles"), {}, signal), get(ofRun(page.id), {}, signal)]);
      if (!profiles.length) {
        return put(host, empty("No profile yet", "Ask a running run for a trace of its next steps; it costs nothing until then: ", command(`phalanx profile ${run.path}`)));
      }
      const chosen = profiles.find((/** @type {any} */ one) => one.name === name) ?? profiles.at(-1);
      name = chosen.name;
      const summary = await get(ofRun(page.id, `profile/${encodeURIComponent(name)}`), {}, signal);
      const trace = `${ofRun(page.id, `profile/${encodeURIComponent(name)}`)}/trace`;
      put(
        host,
        el("div", { class: "bar" },
          select("profile", profiles.map((/** @type {any} */ one) => [one.name, `${one.name} (step ${anything(one.step)})`]), name, (value) => ((name = value), page.set({ profile: value }), page.reload())),
          el("span", { class: "space" }), !exported && el("a", { class: "button", href: trace, download: `${name}.json.gz`, text: "Download the trace" })),
        Object.entries(summary).filter(([, value]) => typeof value === "object" && value !== null).map(([key, value]) => section(key, value)),
        facts(summary),
        panel("The trace", el("p", {}, "All ranks on one time line. Download it, open ", el("a", { href: "https://ui.perfetto.dev", rel: "noreferrer", text: "ui.perfetto.dev" }), " (it runs in your browser and sends nothing away), and drop the file there. Keys: W and S zoom, A and D move, M marks what is chosen.")),
      );
    },
  };
}

/** @param {any} summary */
function facts(summary) {
  const pairs = Object.entries(summary).filter(([, value]) => typeof value !== "object");
  return pairs.length > 0 && panel("About", el("dl", { class: "pairs" }, pairs.map(([key, value]) => el("div", {}, el("dt", { text: words(key) }), el("dd", { text: quantity(key, value) })))));
}

/** A list of objects is a table; an object of numbers is one of two columns, with bars. @param {string} key @param {any} value */
function section(key, value) {
  const rows = Array.isArray(value) ? value : Object.entries(value).map(([name, item]) => (item && typeof item === "object" && !Array.isArray(item) ? { "": name, ...item } : { "": name, value: item }));
  if (!rows.length) return null;
  if (typeof rows[0] !== "object" || rows[0] === null) return panel(words(key), el("ol", { class: "plain" }, rows.map((row) => el("li", { text: anything(row) }))));
  const names = [...new Set(rows.flatMap((row) => Object.keys(row ?? {})))];
  const numeric = names.flatMap((name, index) => (rows.some((row) => typeof row[name] === "number") ? [index] : []));
  return panel(words(key), table(names.map(words), rows.map((row) => names.map((name) => quantity(name, row[name]))), words(key), numeric));
}

/** @param {string} key */
function words(key) {
  const text = key.replaceAll("_", " ").replace(/ s$/, "");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** A number in the unit that its name ends with. @param {string} key @param {any} value */
function quantity(key, value) {
  if (typeof value !== "number") return anything(value);
  if (/(_s|seconds)$/.test(key)) return duration(value);
  if (/_ms$/.test(key)) return `${number(value, 4)} ms`;
  if (/_us$/.test(key)) return duration(value / 1e6);
  if (/bytes$/.test(key)) return bytes(value);
  if (/(share|fraction|ratio|roofline)/.test(key)) return percent(value);
  return Number.isInteger(value) ? whole(value) : number(value, 4);
}
