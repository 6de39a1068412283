/** What went wrong, shown to a person, with what can be done about it. */

import { hasKey, setKey } from "./api.js";
import { el } from "./dom.js";

const SECOND = 1000;

/**
 * A panel for a problem.
 *
 * @param {import("./api.js").Problem} problem
 * @param {() => void} again tries once more what failed; null where that is of no use
 * @param {string} heading h1 where nothing else is on the page
 */
export function problemPanel(problem, again = null, heading = "h2") {
  const refused = problem.status === 401;
  const message = refused
    ? hasKey() ? "The key is wrong." : "Ask whoever runs this service for it."
    : problem.message;
  const wait = problem.retryAfter && again ? ` Wait ${problem.retryAfter} s, then try again.` : "";
  return el("div", { class: refused && !hasKey() ? "problem asks" : "problem" },
    el("div", { role: "alert" }, el(heading, {}, problem.title), el("p", {}, message + wait)),
    refused ? keyForm(again) : again && mayWork(problem) ? againButton(again, problem.retryAfter ?? 0) : null,
  );
}

/** Whether the same request may fare better another time. */
const mayWork = ({ status }) => status === 0 || status === 408 || status === 429 || status >= 500;

function keyForm(again) {
  const field = el("input", { id: "key", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
  const submit = (event) => {
    event.preventDefault();
    setKey(field.value.trim());
    again?.();
  };
  return el("form", { class: "key", onsubmit: submit },
    el("label", { for: "key" }, "API key"), field, el("button", { class: "primary", type: "submit" }, "Use it"));
}

/** A button that counts down to when the server wants to be asked again. */
function againButton(again, seconds) {
  const until = performance.now() + SECOND * seconds;
  const left = () => Math.ceil((until - performance.now()) / SECOND);
  const button = el("button", { type: "button", onclick: () => left() <= 0 && again() });
  const show = () => {
    const waits = left() > 0;
    button.textContent = waits ? `Try again in ${left()} s` : "Try again";
    button.setAttribute("aria-disabled", String(waits));
    if (!waits) clearInterval(timer);
  };
  const timer = setInterval(show, SECOND / 4);
  show();
  return button;
}
