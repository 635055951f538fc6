/** Lines of a comparison: one for each run, or one for each value of a setting, with the mean and the band of its runs. */

import { style } from "./dom.js";
import { anything, known, plural } from "./format.js";
import { shortName } from "./settings.js";

const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
/** Degrees between the hues of two lines that follow each other: the golden angle, so that any number of hues is spread. */
const GOLDEN = 137.508;

/** @typedef {{name: string, label: string, color: string, runs: number[]}} RunLine `runs` are indices of runs */
/** @typedef {{x: number[], y: (number | null)[]}} Points */

/** The color of a line, as the name of a property of the style sheet. @param {number} index @param {number} count of lines */
function colorOf(index, count) {
  if (count <= COLORS.length) return COLORS[index];
  const hue = Math.round((index * GOLDEN + 215) % 360);
  const shade = (index % 3) * 7;
  const [light, dark] = [`hsl(${hue} 72% ${36 + shade}%)`, `hsl(${hue} 78% ${74 - shade}%)`];
  const name = `--line-${index}`;
  style(document.documentElement, {
    [name]: `light-dark(${light}, ${dark})`,
    [`${name}-band`]: `light-dark(${light.replace(")", " / 0.16)")}, ${dark.replace(")", " / 0.18)")})`,
  });
  return name;
}

/** @param {string[]} ids @param {(index: number) => string} labelOf @returns {RunLine[]} */
export function linesOfRuns(ids, labelOf) {
  return ids.map((id, index) => ({ name: id, label: labelOf(index), color: colorOf(index, ids.length), runs: [index] }));
}

/** A line for each value of a setting, in the order of the values. @param {{path: string, values: unknown[]}} setting of each run @param {string[]} paths of all settings @returns {RunLine[]} */
export function linesOfGroups(setting, paths) {
  /** @type {Map<string, {value: unknown, runs: number[]}>} */
  const groups = new Map();
  setting.values.forEach((value, index) => {
    const name = anything(value);
    const group = groups.get(name) ?? { value, runs: [] };
    group.runs.push(index);
    groups.set(name, group);
  });
  const ordered = [...groups].sort(([one, { value: a }], [other, { value: b }]) => (known(/** @type {any} */ (a)) && known(/** @type {any} */ (b)) ? Number(a) - Number(b) : one.localeCompare(other)));
  const title = shortName(setting.path, paths);
  return ordered.map(([name, { runs }], index) => ({ name: `group ${name}`, label: `${title} ${name} (${plural(runs.length, "run")})`, color: colorOf(index, ordered.length), runs }));
}

/** The values of a line at `axis`, between its points on a straight line, and none outside of them. @param {Points} points @param {number[]} axis @returns {(number | null)[]} */
function along({ x, y }, axis) {
  let next = 0;
  return axis.map((at) => {
    while (next < x.length && x[next] < at) next += 1;
    if (next === x.length || (next === 0 && x[0] > at)) return null;
    const [after, before] = [y[next], y[next - 1] ?? y[next]];
    if (after === null || before === null) return null;
    return x[next] === at ? after : before + ((after - before) * (at - x[next - 1])) / (x[next] - x[next - 1]);
  });
}

/** The mean of several lines, and the least and greatest of them. @param {Points[]} lines @returns {{x: number[], y: (number | null)[], lo: (number | null)[], hi: (number | null)[]}} */
export function meanAndBand(lines) {
  const axis = [...new Set(lines.flatMap(({ x }) => x))].sort((one, other) => one - other);
  const rows = lines.map((line) => along(line, axis));
  const columns = axis.map((_, index) => rows.map((row) => row[index]).filter(known));
  const pick = (/** @type {(values: number[]) => number} */ of) => columns.map((values) => (values.length ? of(values) : null));
  return {
    x: axis,
    y: pick((values) => values.reduce((sum, value) => sum + value, 0) / values.length),
    lo: pick((values) => Math.min(...values)),
    hi: pick((values) => Math.max(...values)),
  };
}
