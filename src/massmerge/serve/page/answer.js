/** One answer with its reasons: label, routing of every task, heads of the selected set, time. */

import { bar, cell, signedBar, stackedBar } from "./bars.js";
import { el, ms, number, percent, plural, shorten, table } from "./dom.js";
import { requestDetails } from "./request.js";

/**
 * The panel of an answer.
 *
 * @param {object} entry `{input, task, prediction}`: what was asked, the task that was told if any, what came back
 * @param {object} bundle what `v1/bundle` says
 */
export function answerPanel(entry, bundle) {
  const { prediction } = entry;
  return el("article", { class: "card answer" },
    headline(entry),
    routing(entry, bundle),
    heads(prediction),
    time(prediction),
    requestDetails(entry),
  );
}

/** The answer in one sentence, for those who hear it. */
export function sentence({ prediction }) {
  if (prediction.task === null) return "No task fits this input.";
  return `Answer: ${labelText(prediction)}, task ${prediction.task}, confidence ${percent(prediction.confidence)}.`;
}

/** The label, or all labels that a multi-label task gives. */
export const labelText = ({ label, labels }) => (labels ? labels.join(", ") || "no label" : label);

/** A probability, those of all labels that are given, or the number of a task whose head gives one. */
export function scoreText({ score, scores, value }) {
  if (typeof value === "number") return number(value, 3);
  return scores ? scores.map(percent).join(", ") : percent(score);
}

const scoreName = ({ value }) => (typeof value === "number" ? "value" : "score");

/** What was asked: the image, or the beginning of the text. */
export function inputView(input, most) {
  if (input.text !== undefined) return el("q", {}, shorten(input.text, most));
  if (!input.url) return el("span", { class: "no-preview" }, input.name);
  return el("img", { src: input.url, alt: input.name });
}

function headline({ input, prediction }) {
  const none = prediction.task === null;
  return el("header", { class: input.text === undefined ? "pictured" : null },
    el("div", { class: "asked" }, inputView(input, 180)),
    el("div", { class: "headline" },
      el("div", {},
        el("h2", { class: "label" }, none ? "No task fits" : labelText(prediction)),
        el("p", { class: "of-task" }, none
          ? noneWords(prediction)
          : ["task ", el("strong", {}, prediction.task)]),
      ),
      none ? null : el("p", { class: "sure" },
        el("span", {}, percent(prediction.confidence)), el("small", {}, "confidence"),
        scoreText(prediction) ? el("small", {}, `${scoreName(prediction)} ${scoreText(prediction)}`) : null),
    ),
  );
}

function noneWords({ confidence }) {
  if (typeof confidence !== "number") return "The voters see none of the tasks in this input, so the bundle abstains.";
  return `The best answer has a confidence of ${percent(confidence)}, which is below the limit, so the bundle abstains.`;
}

function routing({ task, prediction }, bundle) {
  const { residuals, weights } = prediction.explain;
  if (task) return section("Routing", "The task was given, so routing was skipped.");
  const names = Object.keys(weights).sort((a, b) => weights[b] - weights[a]);
  const values = Object.values(residuals);
  const low = Math.min(0, ...values);
  const high = Math.max(0, ...values);
  const threshold = bundle.router?.threshold ?? null;
  const row = (name) => {
    const chosen = prediction.selected.includes(name);
    const tone = chosen ? "chosen" : "";
    const bars = [cell(bar(weights[name], { tone, tick: threshold }), number(weights[name]))];
    if (name in residuals) bars.push(cell(signedBar(residuals[name], low, high, { tone }), number(residuals[name])));
    return el("tr", { class: tone },
      el("th", { scope: "row" }, name, chosen ? el("span", { class: "mark" }, "selected") : null),
      bars.map((one) => el("td", {}, one)),
    );
  };
  const residual = ["residual", el("span", { class: "dash" }, ", "), el("small", {}, "lower is better")];
  return section("Routing", chosenWords(prediction.selected, weights, threshold),
    table("bars", values.length ? ["task", "weight", residual] : ["task", "weight"], names.map(row)),
    secondLook(prediction.explain, bundle),
    evidence(prediction.explain),
  );
}

/** Of an input that the first voters were not sure of: why more of the network was run, and what decided. */
function secondLook({ site, confidences }, { router }) {
  const first = router?.voters?.join(" ");
  const sure = Object.entries(confidences ?? {}).sort((a, b) => b[1] - a[1]);
  if ((!first || site === first) && !sure.length) return null;
  const again = "The voters of the first blocks were not sure, so the input got a second look: all blocks voted.";
  const heads = sure.map(([name, p]) => `${name} ${percent(p)}`).join(", ");
  const after = sure.length ? ` The vote was still close, so candidates answered too, as sure as: ${heads}.` : "";
  return el("p", { class: "lead look" }, first && site !== first ? again : "", after);
}

function chosenWords(selected, weights, threshold) {
  if (!selected.length) return "Nothing was selected.";
  const words = ["Selected set: ", ...selected.map((name) => el("span", { class: "chip" }, name))];
  if (threshold === null) return words;
  // Where more tasks would pass, what bounded the set is how many it may hold.
  const passing = Object.values(weights).filter((weight) => weight >= threshold).length;
  const bounded = passing > selected.length ? `, at most ${selected.length}` : "";
  return [...words, el("span", { class: "aside" }, `weight ≥ ${threshold}${bounded}`)];
}

/** What the router rests on, in words. */
function evidence({ probabilities, margin, lift, agreement, typicality, site }) {
  const voters = site.split(" ");
  const likely = Object.entries(probabilities ?? {}).sort((a, b) => b[1] - a[1]).slice(0, 3);
  const facts = [];
  if (likely.length) facts.push(["probable tasks", likely.map(([name, p]) => `${name} ${percent(p)}`).join(", ")]);
  if (typeof margin === "number") facts.push(["margin", `${number(margin)} standard deviations ahead of the next task`]);
  if (lift !== null) facts.push(["lift", `${number(lift)} × what a random subspace of its size would hold`]);
  if (agreement !== null) {
    facts.push(["agreement", `${Math.round(100 * agreement)} % among ${plural(voters.length, "voter")}`]);
  }
  if (typeof typicality === "number") {
    facts.push(["typicality", `${percent(typicality)} of the tasks' own inputs are less typical`]);
  }
  facts.push(["voters", voters.join(", ")]);
  return el("details", {}, el("summary", {}, "Evidence"), definitions(facts));
}

const definitions = (facts) => el("dl", {}, facts.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));

function heads({ task, label, labels: given, explain }) {
  const found = Object.entries(explain.heads);
  if (!found.length) return null;
  const row = (name) => (one) => {
    const tone = name === task && (given ?? [label]).includes(one.label) ? "chosen" : "";
    return el("tr", { class: tone },
      el("th", { scope: "row" }, one.label),
      el("td", {}, cell(bar(one.score ?? 0, { tone }), scoreText(one))),
    );
  };
  return section("Heads", `The best labels of ${found.length === 1 ? "the selected task" : "each selected task"}.`,
    found.map(([name, labels]) => table("bars two", [name, "score"], labels.map(row(name)))));
}

function time({ explain, seen_ms: seen }) {
  const { timings, batch_size: batch } = explain;
  const names = Object.keys(timings);
  const total = names.reduce((sum, name) => sum + timings[name], 0);
  const tone = (name) => `time-${name.replace(" ", "-")}`;
  const shared = batch > 1 ? ` It ran in a batch of ${batch}.` : "";
  return section("Time", `${ms(total)} in the service, ${ms(seen)} until it was here.${shared}`,
    stackedBar(names.map((name) => ({ share: total ? timings[name] / total : 0, tone: tone(name) }))),
    el("ul", { class: "legend" }, names.map((name) => el("li", {},
      el("span", { class: `dot ${tone(name)}`, "aria-hidden": "true" }), name, " ",
      el("strong", {}, ms(timings[name]))))),
  );
}

const section = (title, lead, ...body) =>
  el("section", {}, el("h3", {}, title), el("p", { class: "lead" }, lead), ...body);
