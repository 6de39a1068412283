/** Live traffic by task, asked for while it is seen. */

import { getTraffic } from "./api.js";
import { bar, cell } from "./bars.js";
import { el, ms, plural, table, whole } from "./dom.js";

const EVERY = 2000; // milliseconds
const MINUTE = 60_000;
const MINUTES = 15;

/** A panel that keeps itself up to date; whoever wants it still can pause it. */
export class TrafficPanel {
  /** @param {string[]} names the tasks */
  constructor(names) {
    this.names = names;
    this.timer = null;
    this.seen = false;
    this.pause = el("button", { type: "button", "aria-pressed": "false", onclick: () => this.#toggle() }, "Pause");
    this.state = el("p", { class: "lead" }, "…");
    this.body = el("div", {});
    this.panel = el("section", { class: "card traffic" },
      el("div", { class: "titled" }, el("h2", {}, "Traffic"), this.pause), this.state, this.body);
    document.addEventListener("visibilitychange", () => this.watch(this.seen));
  }

  /** Ask for figures again and again while the view is seen. */
  watch(seen) {
    this.seen = seen;
    clearTimeout(this.timer);
    if (seen && !document.hidden && this.pause.getAttribute("aria-pressed") === "false") this.#update();
  }

  #toggle() {
    const paused = this.pause.getAttribute("aria-pressed") === "false";
    this.pause.setAttribute("aria-pressed", String(paused));
    this.watch(this.seen);
  }

  async #update() {
    clearTimeout(this.timer);
    try {
      this.#draw(await getTraffic());
    } catch (problem) {
      this.state.textContent = `${problem.title}: ${problem.message}`;
    }
    clearTimeout(this.timer);
    if (this.seen && this.pause.getAttribute("aria-pressed") === "false") {
      this.timer = setTimeout(() => this.watch(this.seen), EVERY);
    }
  }

  #draw(traffic) {
    const { tasks, abstentions, errors } = traffic;
    this.state.textContent = summary(traffic);
    // A bundle that was loaded anew may have tasks that this page has not heard of.
    const names = new Set([...this.names, ...Object.keys(tasks)]);
    const rows = [...names].map((name) => [name, tasks[name] ?? 0, "chosen"]);
    if (abstentions) rows.push(["no task fits", abstentions, ""]);
    if (errors) rows.push(["could not be answered", errors, "bad"]);
    const most = Math.max(1, ...rows.map(([, count]) => count));
    this.body.replaceChildren(
      table("bars two", ["task", "answers since the start"], rows.map(([name, count, tone]) => el("tr", {},
        el("th", { scope: "row" }, name), el("td", {}, cell(bar(count / most, { tone }), whole(count)))))),
      minutes(traffic));
  }
}

/** The traffic in words. */
function summary({ tasks, seconds, latency_ms: latency, queue }) {
  const answered = Object.values(tasks).reduce((sum, count) => sum + count, 0);
  const quick = latency.p50 === null
    ? ""
    : ` Half of the requests took at most ${ms(latency.p50)}, 95 % at most ${ms(latency.p95)}.`;
  const waiting = `${whole(queue.waiting)} waiting, room for ${whole(queue.limit)}.`;
  return `${plural(answered, "answer")} in ${duration(seconds)}.${quick} ${waiting}`;
}

/** Answers a minute, as columns; minutes without any are not sent and drawn empty. */
function minutes({ since, seconds, recent }) {
  const now = Math.floor((Date.parse(since) + 1000 * seconds) / MINUTE); // the server's clock, not ours
  const counts = new Array(MINUTES).fill(0);
  for (const { minute, tasks, abstentions } of recent) {
    const ago = now - Math.floor(Date.parse(minute) / MINUTE);
    const count = Object.values(tasks).reduce((sum, one) => sum + one, abstentions);
    if (ago >= 0 && ago < MINUTES) counts[MINUTES - 1 - ago] += count;
  }
  const most = Math.max(1, ...counts);
  const captions = [`${MINUTES} minutes ago`, `most in a minute: ${whole(Math.max(...counts))}`, "now"];
  const label = `Answers per minute over the last ${MINUTES} minutes: ${counts.join(", ")}`;
  return el("figure", {},
    el("div", { class: "minutes", role: "img", "aria-label": label },
      counts.map((count) => el("span", { style: { height: `${(100 * count) / most}%` } }))),
    el("figcaption", {}, captions.map((text) => el("span", {}, text))));
}

function duration(seconds) {
  if (seconds < 90) return plural(Math.round(seconds), "second");
  if (seconds < 90 * 60) return plural(Math.round(seconds / 60), "minute");
  if (seconds < 48 * 3600) return plural(Math.round(seconds / 3600), "hour");
  return plural(Math.round(seconds / 86400), "day");
}
