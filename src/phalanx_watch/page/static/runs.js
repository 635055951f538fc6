/** All runs: search, sort, and choose some to compare. */

import { get } from "./api.js";
import { copyMenu } from "./copy.js";
import { command, el, empty, keyed, put, say, style } from "./dom.js";
import { age, fixed, list, moment, percent, plural, si, utilization, whole, MFU_HINT } from "./format.js";
import { Cursor } from "./keys.js";
import { address, runAddress } from "./router.js";
import { SettingColumns, shortName } from "./settings.js";
import { Sparks } from "./spark.js";

/**
 * @typedef {object} Row a run as the server lists it
 * @property {string} id @property {string} path @property {string} name @property {string} state
 * @property {number} step @property {number} steps
 * @property {number | null} loss @property {number | null} bits_per_byte @property {number | null} tokens_per_s
 * @property {number | null} mfu @property {number | null} goodput
 * @property {number | null} started @property {number | null} updated
 * @property {any} layout @property {number | null} ranks @property {string} commit @property {string[]} tags @property {string} note
 * @property {string} weights_sha256 @property {any} problems
 */

/** @typedef {{name: string, title: string, text: (row: Row) => string, sort: (row: Row) => string | number | null, number?: boolean, hint?: string}} Column */

/** More columns of settings than this scroll sideways. */
const FITTING = 4;

/** @type {Column[]} */
const COLUMNS = [
  { name: "state", title: "State", text: (row) => row.state, sort: (row) => row.state },
  { name: "name", title: "Run", text: (row) => row.name, sort: (row) => row.name.toLowerCase() },
  { name: "step", title: "Step", text: (row) => whole(row.step), sort: (row) => row.step, number: true },
  { name: "loss", title: "Loss", text: (row) => fixed(row.loss), sort: (row) => row.loss, number: true, hint: "Training loss of the last step, nats a token" },
  { name: "curve", title: "", text: () => "", sort: () => null },
  { name: "bits_per_byte", title: "Bits/byte", text: (row) => fixed(row.bits_per_byte), sort: (row) => row.bits_per_byte, number: true, hint: "Of the held-out text" },
  { name: "tokens_per_s", title: "Tokens/s", text: (row) => si(row.tokens_per_s), sort: (row) => row.tokens_per_s, number: true },
  { name: "mfu", title: "MFU", text: (row) => utilization(row.mfu), sort: (row) => row.mfu, number: true, hint: MFU_HINT },
  { name: "goodput", title: "Goodput", text: (row) => percent(row.goodput), sort: (row) => row.goodput, number: true, hint: "Share of the time of the newest attempt that went into steps" },
  { name: "updated", title: "Age", text: (row) => age(row.updated), sort: (row) => -(row.updated ?? 0), number: true, hint: "Since the last sign of life" },
  { name: "layout", title: "Layout", text: layoutText, sort: layoutText },
  { name: "commit", title: "Commit", text: (row) => String(row.commit ?? "").slice(0, 8), sort: (row) => String(row.commit ?? "") },
  { name: "tags", title: "Tags", text: (row) => (row.tags ?? []).join(" "), sort: (row) => (row.tags ?? []).join(" ") },
];

/** @param {Row} row @returns {string} such as "8 ranks · tensor 2" */
export function layoutText(row) {
  const { layout } = row;
  const axes = typeof layout === "string" ? layout : Object.entries(layout ?? {}).map(([axis, degree]) => `${axis} ${degree}`).join(" ");
  return [row.ranks ? plural(row.ranks, "rank") : "", axes].filter(Boolean).join(" · ");
}

/** The last part of a path: run directories are called NAME-HASH, which tells runs of one name apart. @param {string | null | undefined} path */
export function folderName(path) {
  return String(path ?? "").split("/").filter(Boolean).at(-1) ?? "";
}

/** @param {string} state */
export function stateChip(state) {
  return el("span", { class: "state", data: { state } }, el("span", { class: "dot" }), el("span", { text: state }));
}

/** @param {any} problems a count, or a list @returns {number} */
export function problemCount(problems) {
  return Array.isArray(problems) ? problems.length : Number(problems) || 0;
}

/** @type {import("./main.js").MakeView} */
export function runsView(host, page) {
  /** @type {Row[]} */
  let rows = [];
  let total = 0;
  let where = page.params.get("where") ?? "";
  let sort = page.params.get("sort") ?? "";
  const chosen = new Set((page.params.get("chosen") ?? "").split(",").filter(Boolean));
  const search = el("input", { type: "search", placeholder: "Search name, tag, note, commit, state  ( / )", "aria-label": "Search runs", value: page.params.get("q") ?? "", on: { input: () => (page.set({ q: search.value }), draw()) } });
  const filter = el("input", { type: "search", class: "filter", placeholder: "Filter, as loss<2 and optimizer.lr=0.001", "aria-label": "Filter runs by columns and settings", title: "Conditions as of phalanx runs list --where: NAME, one of < <= > >= = != ~, and a value", value: where, on: { change: () => ((where = filter.value.trim()), page.set({ where }), page.reload()) } });
  const wrong = el("p", { class: "note wrong", role: "alert", hidden: true });
  const settings = new SettingColumns(page.params.get("settings"), (chosen) => (page.set({ settings: chosen }), drawHead(), draw(), page.reload()));
  const count = el("span", { class: "muted", role: "status" });
  const compare = el("a", { class: "button primary", href: "#/", hidden: true });
  const body = el("tbody");
  /** @type {Column[]} */
  let columns = [];
  const head = el("tr");
  const holder = el("div", { class: "runs" }, el("table", { class: "rows" }, el("caption", { class: "hidden", text: "Runs" }), el("thead", {}, head), body));
  const none = el("div", { hidden: true });
  put(host, el("div", { class: "bar" }, search, filter, count, el("span", { class: "space" }), compare, settings.element, copyMenu("the runs", copied, page.say)), wrong, holder, none);
  const cursor = new Cursor(() => [...body.children], (row) => (location.hash = runAddress(row.dataset.key ?? "")));

  /** Columns of settings stand behind the curve; the rows are made again if they change. */
  function drawHead() {
    const { paths } = settings;
    const own = paths.map((path) => /** @type {Column} */ ({ name: path, title: shortName(path, paths), hint: path, text: (row) => settings.text(path, row.id), sort: (row) => settings.sort(path, row.id), number: true }));
    const before = columns.map(({ name }) => name).join();
    const place = COLUMNS.findIndex(({ name }) => name === "curve") + 1;
    columns = [...COLUMNS.slice(0, place), ...own, ...COLUMNS.slice(place)];
    holder.classList.toggle("with-settings", own.length > 0);
    holder.classList.toggle("scrolls", own.length > FITTING);
    if (before === columns.map(({ name }) => name).join()) return;
    put(head, el("th", { class: "pick" }, el("span", { class: "hidden", text: "Choose" })), columns.map(headCell));
    put(body);
  }

  /** @param {Column} column */
  function headCell(column) {
    if (!column.title) return el("th", { scope: "col", data: { column: column.name } }, el("span", { class: "hidden", text: "Loss curve" }));
    const button = el("button", { type: "button", class: "sort", text: column.title, title: column.hint, on: { click: () => resort(column.name) } });
    return el("th", { scope: "col", class: column.number ? "number" : null, data: { column: column.name } }, button);
  }

  /** Once: downward for numbers; twice: the other way; a third time: newest first again. @param {string} name */
  function resort(name) {
    sort = sort === `-${name}` ? name : sort === name ? "" : `-${name}`;
    page.set({ sort });
    draw();
  }

  /** @returns {Row[]} */
  function selected() {
    /** @type {string[]} */
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => {
      const text = [row.name, row.path, row.state, row.commit, row.note, row.weights_sha256, ...(row.tags ?? [])].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const column = columns.find(({ name }) => name === sort.replace("-", ""));
    const value = column ? column.sort : (/** @type {Row} */ row) => row.updated ?? 0;
    const sign = column && !sort.startsWith("-") ? 1 : -1;
    return found.sort((one, other) => sign * order(value(one), value(other), sign));
  }

  function draw() {
    const found = selected();
    keyed(body, found, (row) => row.id, makeRow, updateRow);
    for (const cell of head.querySelectorAll("th[data-column]")) {
      const name = cell.dataset.column;
      cell.setAttribute("aria-sort", sort === name ? "ascending" : sort === `-${name}` ? "descending" : "none");
    }
    say(count, found.length === total ? plural(total, "run") : `${found.length} of ${plural(total, "run")}`);
    holder.hidden = !found.length;
    none.hidden = Boolean(found.length);
    if (total && !found.length) put(none, empty("No run matches", "Every word of the search must occur in a run's name, path, tags, note, commit or state, and every condition of the filter must hold."));
    drawCompare();
  }

  function drawCompare() {
    const ids = [...chosen];
    compare.hidden = ids.length === 0;
    compare.href = address("compare", { ids: ids.join(",") });
    say(compare, ids.length < 2 ? "Choose another run to compare" : `Compare ${ids.length} runs (c)`);
    compare.setAttribute("aria-disabled", String(ids.length < 2));
  }

  /** @param {string} id @param {boolean} on */
  function choose(id, on) {
    if (on) chosen.add(id);
    else chosen.delete(id);
    page.set({ chosen: [...chosen].join(",") });
    draw();
  }

  /** @param {Row} row */
  function makeRow(row) {
    const spark = sparks.add(row.id);
    const box = el("input", { type: "checkbox", "aria-label": `Choose ${row.name}`, on: { change: () => choose(row.id, box.checked) } });
    const made = el(
      "tr",
      {
        on: {
          click: (/** @type {MouseEvent} */ event) => {
            if (!(/** @type {Element} */ (event.target).closest("a, button, input, label"))) location.hash = runAddress(row.id);
          },
        },
      },
      el("td", { class: "pick" }, box),
      columns.map((column) => el("td", { class: [column.number ? "number" : "", column.hint === column.name ? "c-setting" : `c-${column.name}`].join(" "), data: { label: column.title, column: column.name } })),
    );
    made.querySelector(".c-name").append(el("a", { href: runAddress(row.id) }), el("span", { class: "flag", hidden: true }), el("span", { class: "under" }));
    made.querySelector(".c-curve").append(spark);
    made.querySelector(".c-step").append(el("span"), el("span", { class: "progress" }, el("i")));
    return made;
  }

  /** @param {HTMLElement} made @param {Row} row */
  function updateRow(made, row) {
    const cell = (/** @type {string} */ name) => /** @type {any} */ (made.querySelector(`.c-${name}`));
    const box = /** @type {HTMLInputElement} */ (made.querySelector("input"));
    box.checked = chosen.has(row.id);
    made.toggleAttribute("data-chosen", box.checked);
    columns.forEach((column, index) => {
      if (!["name", "step", "state", "tags", "curve"].includes(column.name)) say(made.children[index + 1], column.text(row));
    });
    const [link, flag, under] = cell("name").children;
    say(link, row.name || row.path);
    const problems = problemCount(row.problems);
    flag.hidden = !problems;
    say(flag, plural(problems, "problem"));
    const alike = rows.some((other) => other.id !== row.id && other.name === row.name);
    say(under, [alike ? folderName(row.path) : "", row.note].filter(Boolean).join(" · "));
    cell("name").title = row.path;
    cell("layout").title = layoutText(row);
    const [steps, progress] = cell("step").children;
    say(steps, row.steps ? `${whole(row.step)} / ${whole(row.steps)}` : whole(row.step));
    style(progress.firstElementChild, { width: `${row.steps ? Math.min(100, (100 * row.step) / row.steps) : 0}%` });
    progress.dataset.state = row.state;
    if (cell("state").dataset.state !== row.state) {
      cell("state").dataset.state = row.state;
      put(cell("state"), stateChip(row.state));
    }
    sparks.want(row.id, row.step);
    const tags = (row.tags ?? []).join(" ");
    if (cell("tags").dataset.tags !== tags) {
      cell("tags").dataset.tags = tags;
      put(cell("tags"), (row.tags ?? []).map((tag) => el("button", { type: "button", class: "tag", text: tag, on: { click: () => ((search.value = tag), page.set({ q: tag }), draw()) } })));
    }
    cell("updated").title = moment(row.updated);
  }

  function copied() {
    const found = selected();
    const own = Object.fromEntries(settings.paths.map((path) => [path, found.map((row) => settings.sort(path, row.id))]));
    const results = Object.fromEntries(["id", "path", "name", "state", "step", "steps", "loss", "bits_per_byte", "tokens_per_s", "mfu", "goodput", "started", "updated", "ranks", "commit", "note", "weights_sha256"].map((name) => [name, found.map((row) => /** @type {any} */ (row)[name])]));
    return { ...results, ...own };
  }

  const sparks = new Sparks();
  const ages = setInterval(() => document.hidden || draw(), 10_000);

  return {
    async update(signal) {
      const found = await Promise.all([get("/api/runs", { where }, signal), get("/api/settings", { where, names: settings.paths.join(",") }, signal)]).catch((/** @type {Error} */ error) => {
        if (!where || /** @type {any} */ (error).status !== 400) throw error;
        say(wrong, error.message);
        holder.hidden = !rows.length;
        return null;
      });
      wrong.hidden = found !== null;
      if (!found) return;
      const [answer, differing] = found;
      rows = answer.runs;
      total = answer.total;
      settings.set(differing);
      drawHead();
      draw();
      if (!total) {
        const folders = list((answer.folders ?? []).map(String));
        put(none, empty("No runs yet", `No run directory was found in ${folders || "the folders that are shown"}. Start one, and it appears here: `, command("phalanx train configs/quickstart.toml"), " To look elsewhere: ", command("phalanx ui DIR")));
      }
    },
    keys: [
      ["/", "search", () => search.focus()],
      ...cursor.keys("run"),
      ["x", "choose the run", () => cursor.row && choose(cursor.row.dataset.key ?? "", !chosen.has(cursor.row.dataset.key ?? ""))],
      ["c", "compare the chosen runs", () => chosen.size > 1 && (location.hash = compare.hash)],
    ],
    close: () => (clearInterval(ages), sparks.close()),
  };
}

/** What is not known comes last, whichever way is sorted. @param {string | number | null} one @param {string | number | null} other @param {number} sign */
function order(one, other, sign) {
  if (one === null || one === undefined || one === "") return other === null || other === undefined || other === "" ? 0 : sign;
  if (other === null || other === undefined || other === "") return -sign;
  return one < other ? -1 : one > other ? 1 : 0;
}
