/** A text while it is written, and the task of an input where nothing is answered. */

import { inputView } from "./answer.js";
import { bar, cell } from "./bars.js";
import { el, number, percent, plural, table, whole } from "./dom.js";
import { requestDetails } from "./request.js";

/** The panel of a text that grows. */
export class WrittenPanel {
  /**
   * @param {object} entry `{input, task, prediction, wire}`; the prediction is filled as events come
   * @param {() => void} stop ends the writing
   */
  constructor(entry, stop) {
    this.entry = entry;
    this.text = el("div", { class: "written", tabindex: "0", role: "region", "aria-label": "Generated text" });
    this.routed = el("p", { class: "of-task" }, "finding the task …");
    this.sure = el("p", { class: "sure" });
    this.used = el("p", { class: "lead used" });
    this.stop = el("button", { type: "button", class: "stop", onclick: stop }, "Stop");
    this.panel = el("article", { class: "card answer" },
      el("header", {}, el("div", { class: "asked" }, inputView(entry.input, 180)),
        el("div", { class: "headline" }, this.routed, this.sure)),
      el("section", {}, this.text, el("div", { class: "writing" }, this.used, this.stop)));
  }

  /** Take an event of the stream. */
  take({ mass, choices: [choice], usage }) {
    const { prediction } = this.entry;
    if (prediction.task === null && mass) {
      Object.assign(prediction, mass);
      this.routed.replaceChildren("task ", el("strong", {}, mass.task));
      if (typeof mass.confidence === "number") {
        this.sure.replaceChildren(el("span", {}, percent(mass.confidence)), el("small", {}, "confidence"));
      } else this.sure.replaceChildren(el("small", {}, "task given"));
    }
    const piece = choice?.delta?.content ?? choice?.text ?? "";
    if (piece) {
      prediction.label += piece;
      this.text.append(piece);
    }
    if (choice?.finish_reason) prediction.finish_reason = choice.finish_reason;
    if (usage) prediction.usage = usage;
  }

  /** Nothing more will come. */
  end({ stopped = false, seconds = 0 } = {}) {
    const { usage, finish_reason: reason } = this.entry.prediction;
    this.stop.remove();
    const words = [];
    if (usage) words.push(`${plural(usage.completion_tokens, "token")} written, ${whole(usage.prompt_tokens)} read`);
    if (seconds) words.push(`${number(seconds, 1)} s`);
    if (stopped) words.push("stopped");
    else if (reason === "length") words.push("cut at the length limit");
    this.used.textContent = words.join(" · ");
    if (!this.entry.prediction.label) this.text.append(el("small", {}, "no text"));
    this.panel.append(requestDetails(this.entry));
  }
}

/** An answer that was written before, shown again. */
export function writtenAgain(entry) {
  const shown = new WrittenPanel({ ...entry, prediction: { ...entry.prediction, task: null, label: "" } }, () => {});
  const { task, confidence, label } = entry.prediction;
  shown.take({ mass: { task, confidence }, choices: [{ text: label }] });
  shown.entry = entry;
  shown.end();
  return shown.panel;
}

/** The answer in one sentence, for those who hear it. */
export const writtenSentence = ({ prediction }) => `Task ${prediction.task}. Answer: ${prediction.label}`;

/** The panel of a task that was found, with the next best ones. */
export function routedPanel(entry) {
  const { input, prediction } = entry;
  const ranked = [{ task: prediction.task, confidence: prediction.confidence }, ...prediction.alternatives];
  const row = ({ task, confidence }) => {
    const tone = task === prediction.task ? "chosen" : "";
    return el("tr", { class: tone }, el("th", { scope: "row" }, task),
      el("td", {}, cell(bar(confidence, { tone }), percent(confidence))));
  };
  const none = prediction.task === null;
  return el("article", { class: "card answer" },
    el("header", { class: input.text === undefined ? "pictured" : null },
      el("div", { class: "asked" }, inputView(input, 180)),
      el("div", { class: "headline" },
        el("div", {}, el("h2", { class: "label" }, none ? "No task fits" : prediction.task),
          el("p", { class: "of-task" }, "This service only names tasks.")),
        none ? null : el("p", { class: "sure" },
          el("span", {}, percent(prediction.confidence)), el("small", {}, "confidence")))),
    el("section", {}, el("h3", {}, "Routing"),
      table("bars two", ["task", "confidence"], ranked.filter(({ task }) => task !== null).map(row))),
    requestDetails(entry),
  );
}
