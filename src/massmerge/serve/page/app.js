/** The page: waits for the bundle, then keeps form, answer, history and the two views together. */

import { Problem, getBundle, predict, route, write, writeBody, writePath } from "./api.js";
import { answerPanel, sentence } from "./answer.js";
import { Ask } from "./ask.js";
import { BundleView } from "./bundle.js";
import { byId, el, plural, still } from "./dom.js";
import { History } from "./history.js";
import { problemPanel } from "./problem.js";
import { welcomePanel } from "./welcome.js";
import { WrittenPanel, routedPanel, writtenAgain, writtenSentence } from "./written.js";

const TOP = 5; // labels shown of each head
const VIEWS = { ask: "Ask", bundle: "Bundle" };
const SECOND = 1000;

/** Ask what is served until it is loaded; what else goes wrong is shown, to be tried again. */
async function start() {
  try {
    const bundle = await getBundle();
    byId("notice").replaceChildren();
    new Page(bundle);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.code === "not_ready") {
      byId("notice").replaceChildren(el("p", { class: "loading", role: "status" }, "The bundle is being loaded …"));
      setTimeout(start, SECOND * Math.min(2, error.retryAfter ?? 2));
      return;
    }
    byId("notice").replaceChildren(problemPanel(error, start, "h1"));
    byId("key")?.focus();
  }
}

/** How a bundle is asked, by what it answers with; and how an answer is shown and said. */
const ANSWERS = {
  labels: (page, input, task, running) => page.label(input, task, running),
  text: (page, input, task, running) => page.write(input, task, running),
  tasks: (page, input, _, running) => page.name(input, running),
};
const SHOWN = {
  labels: [answerPanel, sentence],
  text: [writtenAgain, writtenSentence],
  tasks: [routedPanel, ({ prediction }) => prediction.task === null ? "No task fits this input." : `Task ${prediction.task}.`],
};

/** Everything that is there once the bundle is known. */
class Page {
  constructor(bundle) {
    this.bundle = bundle;
    this.form = new Ask(bundle, {
      ask: (input, task) => this.ask(input, task),
      fail: (problem) => this.fail(problem),
    });
    this.history = new History((entry) => this.show(entry, { again: true }));
    this.view = new BundleView(bundle);
    this.running = null;
    const tasks = plural(bundle.tasks.length, "task");
    byId("model").textContent = bundle.name;
    byId("version").textContent = `massmerge ${bundle.versions.massmerge}`;
    const one = bundle.kind === "image" ? "an image" : "a text";
    const lead = `One backbone, ${tasks}. The bundle finds the task of ${one} by itself, and shows how.`;
    byId("ask-lead").textContent = lead;
    byId("given-task").hidden = bundle.answers === "tasks";
    byId("answer").replaceChildren(welcomePanel(bundle));
    addEventListener("hashchange", () => this.turn());
    this.turn();
  }

  /** Show the view that the address names. */
  turn() {
    const named = location.hash.slice(1);
    if (named && !(named in VIEWS)) return; // the skip link, whose target is a place and not a view
    const current = named || "ask";
    for (const name of Object.keys(VIEWS)) {
      byId(`view-${name}`).hidden = name !== current;
      const link = document.querySelector(`nav a[href="#${name}"]`);
      if (name === current) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = `${VIEWS[current]} · ${this.bundle.name} · MASS`;
    this.view.watch(current === "bundle");
  }

  /** Ask, and show what comes; a newer question makes an older one void. */
  async ask(input, task) {
    this.running?.abort();
    const running = new AbortController();
    this.running = running;
    this.busy(true);
    try {
      await ANSWERS[this.bundle.answers](this, input, task, running);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof Problem)) throw error;
      this.fail(error, () => this.ask(input, task));
    } finally {
      if (this.running === running) this.busy(false);
    }
  }

  /** Ask for a label. */
  async label(input, task, { signal }) {
    const prediction = await predict(input, { task, top: TOP, signal });
    this.keep({ input, task, prediction });
  }

  /** Ask for a task. */
  async name(input, { signal }) {
    const prediction = { label: "", ...await route(input, { top: TOP, signal }) };
    prediction.label = prediction.task;
    const wire = "text" in input ? { path: "v1/route", body: { inputs: [{ text: input.text }] } } : null;
    this.keep({ input, task: "", prediction, wire });
  }

  /** Ask for a text, and show it while it is written; what was written so far stays if it is stopped. */
  async write(input, task, running) {
    const began = performance.now();
    const prediction = { task: null, label: "", confidence: null };
    const entry = { input, task, prediction, wire: { path: writePath(this.bundle), body: writeBody(input, task, this.bundle) } };
    const stop = new AbortController();
    running.signal.addEventListener("abort", () => stop.abort());
    const shown = new WrittenPanel(entry, () => stop.abort());
    let stopped = false;
    try {
      for await (const event of write(input, { task, bundle: this.bundle, signal: stop.signal })) {
        if (prediction.task === null) this.begin(shown.panel);
        shown.take(event);
      }
    } catch (error) {
      if (error.name !== "AbortError" || running.signal.aborted || prediction.task === null) throw error;
      stopped = true;
    }
    shown.end({ stopped, seconds: (performance.now() - began) / SECOND });
    this.history.add(entry);
    this.history.mark(entry);
    byId("said").textContent = writtenSentence(entry);
  }

  /** Show a panel that will grow. */
  begin(panel) {
    byId("said").textContent = "";
    this.#replace(panel);
    byId("answer").setAttribute("aria-busy", "false");
    this.history.mark(null);
    this.#reveal();
  }

  keep(entry) {
    this.history.add(entry);
    this.show(entry);
  }

  busy(is) {
    byId("answer").setAttribute("aria-busy", String(is));
    byId("submit").textContent = is ? "Asking …" : "Ask";
  }

  show(entry, { again = false } = {}) {
    const [panel, words] = SHOWN[this.bundle.answers];
    this.#replace(panel(entry, this.bundle));
    byId("said").textContent = words(entry);
    this.history.mark(entry);
    if (again) this.form.restore(entry.input, entry.task);
    this.#reveal();
  }

  fail(problem, again = null) {
    byId("said").textContent = "";
    this.#replace(problemPanel(problem, again));
    this.history.mark(null);
    this.#reveal();
  }

  /** Put a panel where the answer is; whoever was inside by keyboard stays there. */
  #replace(panel) {
    const place = byId("answer");
    const inside = place.contains(document.activeElement);
    place.replaceChildren(panel);
    if (inside) place.focus();
  }

  /** On a narrow screen the answer is below the form. */
  #reveal() {
    const { top } = byId("answer").getBoundingClientRect();
    if (top > 0.7 * innerHeight || top < 0) {
      byId("answer").scrollIntoView({ behavior: still() ? "auto" : "smooth", block: "start" });
    }
  }
}

start();
