/** Numbers, sizes and times as people read them. What is not known is a dash. */

const DASH = "–";
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;

/** @typedef {number | null | undefined} Maybe */

/** @param {Maybe} value @returns {value is number} */
export function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** So many significant digits, without an exponent where that is readable. @param {Maybe} value @param {number} [digits] */
export function number(value, digits = 4) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  if (Number.isInteger(value)) return whole(value);
  return String(Number(value.toPrecision(digits)));
}

/** Thousands set apart. @param {Maybe} value */
export function whole(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : DASH;
}

/** Always so many decimals. @param {Maybe} value @param {number} [decimals] */
export function fixed(value, decimals = 3) {
  return known(value) ? value.toFixed(decimals) : DASH;
}

/** 12,300 is 12.3 k. @param {Maybe} value @param {string} [unit] */
export function si(value, unit = "") {
  if (!known(value)) return DASH;
  const prefixes = ["", "k", "M", "G", "T", "P", "E", "Z"];
  let size = Math.abs(value);
  let step = 0;
  while (size >= 999.5 && step < prefixes.length - 1) {
    size /= 1000;
    step += 1;
  }
  const digits = step === 0 && Number.isInteger(value) ? String(size) : size.toPrecision(3);
  const tail = `${prefixes[step]}${unit}`;
  return `${value < 0 ? "-" : ""}${Number(digits) === 0 ? "0" : digits}${tail ? ` ${tail}` : ""}`;
}

/** @param {Maybe} value */
export function bytes(value) {
  if (!known(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let size = Math.abs(value);
  let step = 0;
  while (size >= 1000 && step < units.length - 1) {
    size /= 1024;
    step += 1;
  }
  return `${step === 0 ? Math.round(size) : size.toPrecision(3)} ${units[step]}`;
}

/** @param {Maybe} value 0 to 1 @param {number} [decimals] */
export function percent(value, decimals = 1) {
  return known(value) ? `${(100 * value).toFixed(decimals)} %` : DASH;
}

/** A share of the measured peak; above it, marked: other work slowed the measurement when the run began. @param {Maybe} mfu */
export function utilization(mfu) {
  return known(mfu) && mfu > 1 ? `${percent(mfu)} !` : percent(mfu);
}

export const MFU_HINT = "Model FLOPs utilization: the share of the machine's peak. Above 100 % (!) other work slowed the measurement of that peak when the run began.";

/** @param {Maybe} seconds */
export function duration(seconds) {
  if (!known(seconds)) return DASH;
  const size = Math.abs(seconds);
  if (size < 1e-3) return size === 0 ? "0 s" : `${Math.round(size * 1e6)} µs`;
  if (size < 1) return `${Number((size * 1000).toPrecision(3))} ms`;
  if (size < MINUTE) return `${size.toFixed(size < 10 ? 2 : 1)} s`;
  if (size < HOUR) return `${Math.floor(size / MINUTE)} min ${Math.floor(size % MINUTE)} s`;
  if (size < DAY) return `${Math.floor(size / HOUR)} h ${Math.floor((size % HOUR) / MINUTE)} min`;
  return `${Math.floor(size / DAY)} d ${Math.floor((size % DAY) / HOUR)} h`;
}

/** How long ago, in one word. @param {Maybe} t unix seconds @param {number} [now] */
export function age(t, now = Date.now() / 1000) {
  if (!known(t) || t <= 0) return DASH;
  const seconds = Math.max(0, now - t);
  if (seconds < MINUTE) return `${Math.floor(seconds)} s`;
  if (seconds < HOUR) return `${Math.floor(seconds / MINUTE)} min`;
  if (seconds < 2 * DAY) return `${Math.floor(seconds / HOUR)} h`;
  return `${Math.floor(seconds / DAY)} d`;
}

/** Time of day here. @param {Maybe} t unix seconds */
export function clock(t) {
  return known(t) ? new Date(t * 1000).toLocaleTimeString("en-GB") : DASH;
}

/** Date and time here. @param {Maybe} t unix seconds */
export function moment(t) {
  if (!known(t)) return DASH;
  const date = new Date(t * 1000);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${date.toLocaleTimeString("en-GB")}`;
}

/** @param {number} value */
function two(value) {
  return String(value).padStart(2, "0");
}

/** @param {Maybe} value */
export function dollars(value) {
  if (!known(value)) return DASH;
  return value >= 1000 ? `$${whole(value)}` : `$${value.toFixed(value < 1 ? 4 : 2)}`;
}

/** "a", "a and b", "a, b and c". @param {string[]} words */
export function list(words) {
  return words.length < 2 ? (words[0] ?? "") : `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;
}

/** @param {number} count @param {string} noun */
export function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** Any value of JSON in one line. @param {unknown} value @returns {string} */
export function anything(value) {
  if (value === null || value === undefined || value === "") return DASH;
  if (typeof value === "number") return number(value, 6);
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value;
  if (Array.isArray(value)) return value.length ? value.map(anything).join(", ") : DASH;
  const entries = Object.entries(value);
  return entries.length ? entries.map(([name, item]) => `${name} ${anything(item)}`).join(", ") : DASH;
}

/** The folder of a run, which tells runs of one name apart. @param {any} run @returns {string} */
export function folderOf(run) {
  return String(run.path ?? run.id ?? "").split("/").filter(Boolean).at(-1) ?? "";
}
