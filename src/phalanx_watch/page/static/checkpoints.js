/** Checkpoints: which there are, whether their bytes were checked, how large, where they lie, what can be restored. */

import { get, ofRun } from "./api.js";
import { copyMenu } from "./copy.js";
import { command, el, empty, put, table } from "./dom.js";
import { age, anything, bytes, moment, plural, whole } from "./format.js";

/** @type {import("./main.js").MakeView} */
export function checkpointsView(host, page) {
  return {
    async update(signal) {
      const [answer, run] = await Promise.all([get(ofRun(page.id, "checkpoints"), {}, signal), get(ofRun(page.id), {}, signal)]);
      const found = [...(answer.checkpoints ?? [])].sort((one, other) => other.step - one.step);
      if (!found.length) {
        return put(host, empty("No checkpoint yet", "A run saves one every ", el("code", { text: "checkpoint.every_steps" }), " steps, when it is stopped, and at its end."));
      }
      const total = found.reduce((sum, one) => sum + (one.size_bytes ?? 0), 0);
      const rows = found.map((one, index) => [
        el("b", { text: whole(one.step) }), index === 0 ? el("span", { class: "tag", text: "newest" }) : "", bytes(one.size_bytes), el("span", { class: "kind light", title: moment(one.saved), text: `${age(one.saved)} ago` }),
        verified(one.verified, one.problem), (Array.isArray(one.where) ? one.where : [one.where]).map((/** @type {unknown} */ place) => el("div", { text: anything(place) })), anything(one.restorable),
      ]);
      const copied = () => ({ step: found.map(({ step }) => step), size_bytes: found.map((one) => one.size_bytes), saved: found.map((one) => one.saved), verified: found.map((one) => one.verified), where: found.map((one) => anything(one.where)), restorable: found.map((one) => anything(one.restorable)) });
      put(
        host,
        el("section", { class: "headline" }, el("h1", {}, el("b", { text: plural(found.length, "checkpoint") })), el("p", { class: "muted", text: `${bytes(total)} in all${answer.store ? ` · ${storeText(answer.store)}` : ""}` })),
        el("section", { class: "panel" }, el("div", { class: "bar slim" }, el("h2", { text: "Checkpoints" }), el("span", { class: "space" }), copyMenu("the checkpoints", copied, page.say)), table(["Step", "", "Size", "Saved", "Bytes checked", "Where", "Can be restored"], rows, "Checkpoints", [0, 2])),
        el("section", { class: "panel" }, el("h2", { text: "With them" }), el("dl", { class: "pairs deeds" },
          deed("check every byte", answer.verify ?? `phalanx checkpoint verify ${run.path}`), deed("continue from one, as a run of its own", `phalanx train ${run.path} --from ${found[0].step} --set train.steps=${2 * (run.steps || found[0].step)}`), deed("give it to Hugging Face", `phalanx export ${run.path} --to hf DIR`))),
      );
    },
  };
}

/** @param {any} store */
function storeText(store) {
  if (typeof store === "string") return store;
  return [store.url, store.text || store.error].filter(Boolean).join(": ");
}

/** @param {string} what @param {string} line */
function deed(what, line) {
  return el("div", {}, el("dt", { text: what }), el("dd", {}, command(line)));
}

/** @param {boolean | null} yes @param {string} problem */
function verified(yes, problem) {
  const [tone, text] = yes === true ? ["good", "good"] : yes === false ? ["bad", "damaged"] : ["plain", "not yet"];
  return el("span", { class: "verified", data: { tone }, text: problem ? `${text}: ${problem}` : text });
}
