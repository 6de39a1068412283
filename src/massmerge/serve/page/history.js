/** The last answers, in memory only; each can be seen again. */

import { inputView, labelText } from "./answer.js";
import { byId, el, percent, shorten } from "./dom.js";

const MOST = 12;

/** Entries, newest first, each with its button in the list. */
export class History {
  /** @param {(entry: object) => void} show what to do when one is chosen */
  constructor(show) {
    this.show = show;
    this.entries = [];
  }

  add(entry) {
    const button = el("button", { type: "button", onclick: () => this.show(entry) },
      el("span", { class: "thumb" }, inputView(entry.input, 64)),
      el("span", { class: "what" }, ...this.#words(entry.prediction)));
    byId("past").hidden = false;
    byId("history").prepend(el("li", {}, button));
    this.entries.unshift({ entry, button });
    for (const { entry: old, button: gone } of this.entries.splice(MOST)) {
      gone.closest("li").remove();
      this.#forget(old.input);
    }
  }

  /** Mark the entry that is shown; none with null. */
  mark(current) {
    for (const { entry, button } of this.entries) {
      if (entry === current) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  #words(prediction) {
    if (prediction.task === null) return [el("strong", {}, "no task fits")];
    return [
      el("strong", {}, shorten(labelText(prediction), 60)),
      el("span", {}, prediction.confidence === null ? prediction.task : `${prediction.task} · ${percent(prediction.confidence)}`),
    ];
  }

  /** Give back the memory of an image that nothing shows any more. */
  #forget(input) {
    if (input.url && !this.entries.some(({ entry }) => entry.input === input)) URL.revokeObjectURL(input.url);
  }
}
