/** What stands where the answer will be: how an input finds its task. */

import { el } from "./dom.js";

const STEPS = [
  ["First pass", "The base reads the input and stops early. What remains outside a task's subspace is its residual."],
  ["Routing", "The tasks with the lowest residuals are selected. No task name is needed."],
];
const LAST = {
  labels: ["Second pass", "The base runs again with the selected tasks' low-rank update, and their heads answer."],
  text: ["Second pass", "The base writes the answer with the selected tasks' low-rank update, token by token."],
  tasks: ["Answer", "This service only names the task. Another one answers."],
};

/** The steps, and what there is to be asked. */
export function welcomePanel(bundle) {
  return el("div", { class: "card welcome" },
    el("h2", {}, "How it answers"),
    el("ol", {}, [...STEPS, LAST[bundle.answers]].map(([name, text]) => el("li", {}, el("strong", {}, name), el("span", {}, text)))),
    el("p", { class: "lead" }, "It knows ", bundle.tasks.map(({ name }) => el("span", { class: "chip" }, name))),
  );
}
