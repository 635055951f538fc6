/**
 * What the page asks: of the server, or of the answers that an exported file carries.
 *
 * A view has one `Loader`: at most one load runs, at most one more is waiting, and a tab that nobody sees asks nothing. One
 * `Feed` tells what changed; it is closed while the tab is hidden, because a browser opens only six connections to a server.
 */

/** @typedef {{id: string, written: number, answers: Record<string, any>}} Exported */
/** @typedef {Record<string, string | number | null | undefined>} Params */

/** @type {Exported | undefined} */
export const exported = /** @type {any} */ (window).__PHALANX_EXPORT__;

/** An answer that is none. `status` is that of HTTP, 0 if nobody answered. */
export class ApiError extends Error {
  /** @param {string} message @param {number} status */
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** @param {string} path @param {Params} params */
function url(path, params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** @param {string} path @param {Params} params @param {AbortSignal} [signal] */
async function ask(path, params, signal) {
  let response;
  try {
    response = await fetch(url(path, params), { signal, credentials: "same-origin" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The server does not answer: is `phalanx ui` still running?", 0);
  }
  if (response.ok) return response;
  if (response.status === 401 || response.status === 403) {
    throw new ApiError("This page needs its token: open the address that `phalanx ui` printed.", response.status);
  }
  const said = await response.json().catch(() => ({}));
  throw new ApiError(said.error || `The server answered ${response.status}.`, response.status);
}

/** @param {string} path @param {Params} [params] @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function get(path, params = {}, signal) {
  if (exported) return fromExport(path, params);
  return (await ask(path, params, signal)).json();
}

/** @param {string} id @param {string} [what] */
export function ofRun(id, what = "") {
  return `/api/run/${encodeURIComponent(id)}${what ? `/${what}` : ""}`;
}

/** @param {string} path @param {Params} params */
function fromExport(path, params) {
  const answers = /** @type {Exported} */ (exported).answers;
  for (const key of [url(path, params), `${path}?x=${params.x}`, `${path}?column=${params.column}`, path]) {
    if (key in answers) return answers[key];
  }
  throw new ApiError("This is not in the exported file; `phalanx ui` shows it.", 404);
}

/**
 * @typedef {{rows: number, columns: number, row_ranks: number[], row_sizes?: number[], row_nodes?: string[], column_steps: number[], column_times: number[], column_usual: (number | null)[],
 *   row_worst?: number[], order?: string, orders?: string[], first_place?: number, places?: number, minimum: number | null, maximum: number | null, median: number | null, reduced: boolean, ranks: number, values: Float32Array}} HeatMap
 */

/** @type {HeatMap} */
const NO_MAP = { rows: 0, columns: 0, row_ranks: [], column_steps: [], column_times: [], column_usual: [], minimum: null, maximum: null, median: null, reduced: false, ranks: 0, values: new Float32Array() };

/** The heat map of ranks and steps: a header in JSON, then float32 values, row by row. @param {string} id @param {Params} params @param {AbortSignal} signal @returns {Promise<HeatMap>} */
export async function getHeatMap(id, params, signal) {
  const path = ofRun(id, "ranks");
  if (exported) {
    const answer = fromExport(path, params);
    if (answer.missing) return NO_MAP;
    const raw = Uint8Array.from(atob(answer.values_base64), (letter) => letter.charCodeAt(0));
    return { ...answer, values: floats(raw.buffer, 0) };
  }
  const response = await ask(path, params, signal);
  if (response.headers.get("content-type")?.includes("json")) return NO_MAP; // the run has no such numbers
  const buffer = await response.arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return { ...header, values: floats(buffer, 4 + length) };
}

/** @param {ArrayBuffer} buffer @param {number} start a copy, for the values need not lie at a multiple of 4 */
function floats(buffer, start) {
  return new Float32Array(buffer.slice(start));
}

/** One load at a time, and at most one more waiting. */
export class Loader {
  /** @param {(signal: AbortSignal) => Promise<void>} load @param {(error: Error | null) => void} report @param {number} [pauseMs] least time between two loads */
  constructor(load, report, pauseMs = 1000) {
    this.load = load;
    this.report = report;
    this.pauseMs = pauseMs;
    this.running = false;
    this.wanted = false;
    this.closed = false;
    this.timer = 0;
    this.abort = new AbortController();
    this.onVisible = () => void (document.hidden || !this.wanted || this.poke());
    document.addEventListener("visibilitychange", this.onVisible);
  }

  /** Something changed: load soon. @param {boolean} [now] for a person who waits: an older load is given up */
  poke(now = false) {
    if (this.closed) return;
    this.wanted = true;
    if (now) {
      clearTimeout(this.timer);
      this.timer = 0;
      this.abort.abort();
      this.running = false;
      this.abort = new AbortController();
    }
    if (!this.running && !this.timer && !(document.hidden && !now)) void this.run();
  }

  async run() {
    const { signal } = this.abort;
    this.running = true;
    this.wanted = false;
    try {
      await this.load(signal);
      if (!signal.aborted) this.report(null);
    } catch (error) {
      if (!signal.aborted) this.report(/** @type {Error} */ (error));
    }
    if (signal.aborted || this.closed) return; // a newer one has taken over
    this.running = false;
    this.timer = window.setTimeout(() => {
      this.timer = 0;
      if (this.wanted) this.poke();
    }, this.pauseMs);
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    this.abort.abort();
    document.removeEventListener("visibilitychange", this.onVisible);
  }
}

/** @typedef {"live" | "reconnecting" | "paused" | "file"} FeedState */
/** @typedef {{id: string, kind: "changed", step: number, updated: number} | {kind: "dropped"} | {kind: "heartbeat"}} Change */

const RETRY_MS = 3000;
/** The server says something every 15 seconds at least: one that is silent for longer than two of them stands still, though its connection is open. */
const SILENT_MS = 40000;

/** The server's events about some runs (all, if `ids` is empty). */
export class Feed {
  /** @param {(id: string | null) => void} onChange the run that changed; null: something may have been missed @param {(state: FeedState) => void} onState */
  constructor(onChange, onState) {
    this.onChange = onChange;
    this.onState = onState;
    /** @type {string[]} */
    this.ids = [];
    /** @type {EventSource | null} */
    this.source = null;
    this.retry = 0;
    this.silence = 0;
    this.lost = false;
    if (exported) onState("file");
    else document.addEventListener("visibilitychange", () => (document.hidden ? this.close("paused") : this.open()));
  }

  /** @param {string[]} ids */
  follow(ids) {
    if (exported || (this.source && ids.join() === this.ids.join())) return;
    this.ids = ids;
    this.close("reconnecting");
    if (!document.hidden) this.open();
  }

  open() {
    if (exported) return;
    clearTimeout(this.retry);
    this.source?.close();
    const source = new EventSource(url("/api/events", { ids: this.ids.join(",") }));
    this.source = source;
    this.heard();
    source.onopen = () => {
      this.heard();
      this.onState("live");
      if (this.lost) this.onChange(null);
      this.lost = false;
    };
    source.onmessage = (message) => {
      const change = /** @type {Change} */ (JSON.parse(message.data));
      this.heard();
      if (change.kind !== "heartbeat") this.onChange(change.kind === "changed" ? change.id : null);
    };
    source.onerror = () => {
      this.lost = true;
      this.onState("reconnecting");
      // A browser tries again by itself, but for an answer that is no stream.
      if (source.readyState === EventSource.CLOSED) this.retry = window.setTimeout(() => this.open(), RETRY_MS);
    };
  }

  /** Something came: it may be silent for a while again, and then it is asked anew. */
  heard() {
    clearTimeout(this.silence);
    this.silence = window.setTimeout(() => {
      this.lost = true;
      this.onState("reconnecting");
      this.open();
    }, SILENT_MS);
  }

  /** @param {FeedState} state */
  close(state) {
    clearTimeout(this.retry);
    clearTimeout(this.silence);
    this.source?.close();
    this.source = null;
    this.lost = true;
    this.onState(state);
  }
}
