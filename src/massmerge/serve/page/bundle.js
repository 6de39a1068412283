/** The second view: what the bundle holds, how alike its tasks are, and what is asked of it now. */

import { bar, stackedBar } from "./bars.js";
import { byId, bytes, el, number, percent, plural, table, whole } from "./dom.js";
import { similarityTable } from "./similarity.js";
import { TrafficPanel } from "./traffic.js";

const HALF = 9; // tasks whose heat map needs no more than its part of the width
const FEW = 12; // values of a setting that are all shown

/** Draws the bundle once; its traffic is followed while the view is seen. */
export class BundleView {
  /** @param {object} bundle what `v1/bundle` says */
  constructor(bundle) {
    this.traffic = new TrafficPanel(bundle.tasks.map(({ name }) => name));
    const { tasks: all, base, ratio } = bundle;
    const lead = `${plural(all.length, "task")} on ${base.source} (${base.class}), in ${number(ratio)} times its size.`;
    byId("bundle-lead").textContent = lead;
    byId("bundle").replaceChildren(
      sizes(bundle), this.traffic.panel, tasks(bundle), similarity(bundle), settings(bundle));
  }

  /** Follow the traffic, or stop. */
  watch(seen) {
    this.traffic.watch(seen);
  }
}

function sizes({ base, sizes: parts, ratio, tasks: all }) {
  const most = Math.max(all.length, ratio);
  const added = ratio - 1;
  const rows = [
    ["base", bytes(base.bytes), "1.00 ×", stackedBar([{ share: 1 / most, tone: "base" }])],
    ["this bundle", bytes(ratio * base.bytes), `${number(ratio)} ×`,
      stackedBar([{ share: 1 / most, tone: "base" }, { share: added / most, tone: "chosen" }])],
    [`${plural(all.length, "model")} of the base's size`, bytes(all.length * base.bytes), `${number(all.length)} ×`,
      bar(all.length / most)],
  ];
  const apart = Object.entries(parts)
    .filter(([name, count]) => count > 0 && name !== "base")
    .map(([name, count]) => [name, count, name === "heads" ? "" : "chosen"]);
  return card("size", "Size", null,
    el("p", { class: "hero" }, `${number(ratio)} ×`, el("small", {}, "the base; heads are not counted")),
    el("ul", { class: "sizes" }, rows.map(([name, size, times, drawn]) => el("li", {},
      el("span", { class: "name" }, name), el("span", {}, size), el("span", {}, times), drawn))),
    el("ul", { class: "legend" },
      [["base", base.bytes, "base"], ...apart].map(([name, count, tone]) => el("li", {},
        el("span", { class: `dot ${tone}`, "aria-hidden": "true" }), name, " ", el("strong", {}, bytes(count))))),
  );
}

function tasks({ tasks: all, base, answers }) {
  const row = (task) => el("tr", {},
    el("th", { scope: "row" }, task.name),
    el("td", {}, answers === "text" ? "text" : labels(task)),
    el("td", { class: "right" }, bytes(task.bytes)),
    el("td", { class: "right" }, `${number(task.bytes / base.bytes)} ×`),
    el("td", { class: "right" }, rank(task.rank)),
    el("td", { class: "right" }, task.energy === undefined ? "" : percent(task.energy)),
    el("td", {}, task.form ?? ""),
  );
  const columns = ["task", answers === "text" ? "answers" : "labels", "size", "of the base", "rank", "energy kept", "expert"];
  const right = new Set(["size", "of the base", "rank", "energy kept"]);
  const head = (name) => el("th", { scope: "col", class: right.has(name) ? "right" : null }, name);
  return card("whole", "Tasks", "The size of a task's factors and other tensors, without its head.",
    scrolled("Tasks", table("tasks", columns.map(head), all.map(row))));
}

function labels({ name, labels: names, problem_type: kind }) {
  if (!names) return "no head";
  if (kind === "regression") return `a number: ${names[0]}`;
  const few = names.join(", ") + (kind === "multi_label_classification" ? " (any number of them)" : "");
  if (few.length <= 36) return few;
  return el("details", {},
    el("summary", {}, `${whole(names.length)} labels`, el("span", { class: "unseen" }, ` of ${name}`)),
    el("p", {}, few));
}

function rank(range) {
  if (!range) return "";
  const [low, high] = range;
  return low === high ? String(low) : `${low} to ${high}`;
}

function similarity({ tasks: all, similarity: cosines, overlap, overlap_by_chance: chance }) {
  if (all.length < 2) return "";
  const title = "Similarity of the tasks";
  const lead = overlap
    ? `How much the subspaces of two tasks overlap at the routing sites. By chance it would be ${number(chance)}; `
      + "the closer to 1, the harder to tell apart."
    : "Cosine of the deltas of two tasks. The closer to 1, the harder to tell apart.";
  return card(all.length > HALF ? "whole" : "alike", title, lead,
    scrolled(title, similarityTable(all.map(({ name }) => name), overlap ?? cosines)));
}

function settings({ tasks: all, router, limits = {}, versions }) {
  const group = (title, facts) => el("div", {}, el("h3", {}, title),
    el("dl", {}, Object.entries(facts).map(([name, value]) => [
      el("dt", {}, name.replaceAll("_", " ")), el("dd", {}, setting(value))])));
  return card(all.length > HALF ? "whole" : "settings", "Settings", null, el("div", { class: "groups" },
    group("Router", router), group("Limits of a request", limits), group("Versions", versions)));
}

function setting(value) {
  if (typeof value === "number") return whole(value);
  if (Array.isArray(value)) return listed(value);
  return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** All of a few values; of many, such as the voters of a large decoder, how many there are and which. */
function listed(values) {
  if (values.length <= FEW) return values.join(", ");
  return `${whole(values.length)}: ${values.slice(0, 4).join(", ")}, …, ${values.at(-1)}`;
}

/** A wide table scrolls by itself, by keyboard too; the page never does. */
const scrolled = (name, wide) =>
  el("div", { class: "scrolled", tabindex: "0", role: "region", "aria-label": name }, wide);

const card = (place, title, lead, ...body) => el("section", { class: `card ${place}` },
  el("h2", {}, title), lead ? el("p", { class: "lead" }, lead) : null, ...body);
