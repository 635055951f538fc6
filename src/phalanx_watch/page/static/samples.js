/** The texts that a run wrote after its prompts, the newest step first; what differs from the step before is marked. */

import { el, panel, put, select } from "./dom.js";
import { plural, whole } from "./format.js";

/** @typedef {{step: number, prompt: string, text: string, tokens: number, temperature: number}} Text */
/** @typedef {{name: string, texts: Text[]}} Sample */

const FEW = 6;
/** Longer texts are compared by their beginnings and ends alone. */
const MOST_WORDS = 600;

/** The block of samples; it keeps which one is shown, and whether all steps are. @param {HTMLElement} host @returns {(samples: Sample[]) => void} draws it */
export function samplesBox(host) {
  let name = "";
  let isWhole = false;
  /** @type {Sample[]} */
  let samples = [];

  function draw() {
    const sample = samples.find((one) => one.name === name) ?? samples[0];
    host.hidden = !sample;
    if (!sample) return;
    const shown = isWhole ? sample.texts : sample.texts.slice(0, FEW);
    const [newest] = sample.texts;
    const more = sample.texts.length - FEW;
    const chooser = select("sample", samples.map((one) => [one.name, one.name]), sample.name, (chosen) => ((name = chosen), draw()));
    const note = newest.temperature ? `temperature ${newest.temperature}, the same random numbers at each step` : "the most probable tokens";
    put(
      host,
      panel(
        "Samples",
        el("div", { class: "bar slim" }, samples.length > 1 ? chooser : el("span", { class: "muted", text: sample.name }), el("span", { class: "muted", text: `${note}; marked: not in the text of the step before` })),
        el("p", { class: "prompt" }, el("span", { class: "muted", text: "prompt " }), el("span", { text: newest.prompt || "(none)" })),
        el("ol", { class: "texts" }, shown.map((text, index) => row(text, sample.texts[index + 1]))),
        more > 0 && el("button", { type: "button", class: "quiet", text: isWhole ? "Show the newest" : `Show ${plural(more, "more step")}`, on: { click: () => ((isWhole = !isWhole), draw()) } }),
      ),
    );
  }

  return (next) => {
    // What is there already stays: a reader may have chosen text, or opened the list of samples.
    const isSame = samples.length === next.length && next.every((sample, index) => sample.texts[0].step === samples[index].texts[0].step);
    samples = next;
    if (!isSame) draw();
  };
}

/** @param {Text} text @param {Text | undefined} before */
function row(text, before) {
  const parts = before ? marked(words(before.text), words(text.text)) : [{ text: text.text, isNew: false }];
  return el(
    "li", {},
    el("span", { class: "muted", text: `step ${whole(text.step)}` }),
    el("div", { class: "sampled" }, before && before.prompt !== text.prompt && el("p", { class: "muted", text: `another prompt: ${text.prompt}` }), parts.map((part) => (part.isNew ? el("mark", { text: part.text }) : part.text)), text.text.trim() === "" && el("span", { class: "muted", text: text.text ? "(white space)" : "(empty)" })),
  );
}

/** Words with the spaces after them. @param {string} text @returns {string[]} */
function words(text) {
  return text.match(/\s+|\S+\s*/g) ?? [];
}

/** The words of `after`, and which are in no longest common subsequence with `before`. @param {string[]} before @param {string[]} after @returns {{text: string, isNew: boolean}[]} */
export function marked(before, after) {
  let head = 0;
  while (head < before.length && head < after.length && before[head] === after[head]) head += 1;
  let tail = 0;
  while (tail < before.length - head && tail < after.length - head && before[before.length - 1 - tail] === after[after.length - 1 - tail]) tail += 1;
  const [one, other] = [before.slice(head, before.length - tail), after.slice(head, after.length - tail)];
  const isNew = one.length > MOST_WORDS || other.length > MOST_WORDS ? other.map(() => true) : inNoCommon(one, other);
  const flags = [...after.slice(0, head).map(() => false), ...isNew, ...after.slice(after.length - tail).map(() => false)];
  /** @type {{text: string, isNew: boolean}[]} */
  const parts = [];
  after.forEach((word, index) => {
    const last = parts.at(-1);
    if (last && last.isNew === flags[index]) last.text += word;
    else parts.push({ text: word, isNew: flags[index] });
  });
  return parts;
}

/** @param {string[]} one @param {string[]} other @returns {boolean[]} of each word of `other` */
function inNoCommon(one, other) {
  // lengths[i][j]: of the longest common subsequence of one[i:] and other[j:]
  const lengths = Array.from({ length: one.length + 1 }, () => new Uint16Array(other.length + 1));
  for (let i = one.length - 1; i >= 0; i -= 1) {
    for (let j = other.length - 1; j >= 0; j -= 1) lengths[i][j] = one[i] === other[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
  }
  const flags = other.map(() => true);
  for (let i = 0, j = 0; i < one.length && j < other.length; ) {
    if (one[i] === other[j]) {
      flags[j] = false;
      i += 1;
      j += 1;
    } else if (lengths[i + 1][j] >= lengths[i][j + 1]) i += 1;
    else j += 1;
  }
  return flags;
}
