/** The address of every view, in the part of the URL behind "#": it works on a server and in an exported file alike. */

/** @typedef {{view: string, id: string, params: URLSearchParams}} Route */

/** Views of one run, in the order of their tabs: path, title, the key after "g". @type {[string, string, string][]} */
export const TABS = [
  ["", "Run", "o"],
  ["time", "Where the time went", "t"],
  ["ranks", "Ranks", "k"],
  ["layers", "Layers", "y"],
  ["fleet", "Fleet", "f"],
  ["logs", "Logs", "l"],
  ["profile", "Profile", "p"],
  ["checkpoints", "Checkpoints", "c"],
];

/** @param {string} [hash] @returns {Route} */
export function parse(hash = location.hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [first, id = "", tab = ""] = path.split("/");
  const params = new URLSearchParams(query);
  if (first === "run" && id && TABS.some(([name]) => name === tab)) return { view: tab || "run", id: safely(id), params };
  if (first === "compare") return { view: "compare", id: "", params };
  return { view: first === "" ? "runs" : "lost", id: "", params };
}

/** @param {string} text */
function safely(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** @param {string} path @param {Record<string, string | number | null | undefined>} [params] */
export function address(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  const text = query.toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

/** @param {string} id @param {string} [tab] @param {Record<string, string | number | null | undefined>} [params] */
export function runAddress(id, tab = "", params = {}) {
  return address(`run/${encodeURIComponent(id)}${tab ? `/${tab}` : ""}`, params);
}

/** Changes parameters of the present address without going anywhere. @param {Record<string, string | number | null | undefined>} changes */
export function setParams(changes) {
  const [path, query = ""] = location.hash.split("?");
  const params = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") params.delete(name);
    else params.set(name, String(value));
  }
  const text = params.toString();
  history.replaceState(null, "", `${path || "#/"}${text ? `?${text}` : ""}`);
}
