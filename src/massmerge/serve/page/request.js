/** The same question as a command, for those who will send it from a program. */

import { hasKey } from "./api.js";
import { el } from "./dom.js";

const LONGEST = 2000;
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** A command that asks the same; an image is named as a file, a very long text is left to be filled in. */
export function curl({ input, task, wire }, place = new URL(wire?.path ?? "v1/predict", location.href).href) {
  const lines = [`curl ${wire?.body.stream ? "-N " : ""}${place}`];
  if (hasKey()) lines.push('-H "Authorization: Bearer $KEY"');
  if (wire) {
    lines.push("-H 'Content-Type: application/json'", `-d ${quoted(shortened(JSON.stringify(wire.body)))}`);
  } else if (input.text === undefined) {
    lines.push(`-F image=@${quoted(input.name)} -F explain=true${task ? ` -F task=${quoted(task)}` : ""}`);
  } else {
    const text = input.text.length > LONGEST ? "…" : input.text;
    const body = JSON.stringify({ inputs: [{ text }], explain: true, ...(task ? { task } : {}) });
    lines.push("-H 'Content-Type: application/json'", `-d ${quoted(body)}`);
  }
  return lines.join(" \\\n  ");
}

const shortened = (text) => (text.length > LONGEST ? "…" : text);

/** Request and answer as they go over the wire, folded away. */
export function requestDetails(entry) {
  const { seen_ms: _, ...answer } = entry.prediction;
  const command = curl(entry);
  const copy = el("button", { type: "button", class: "copy", onclick: () => copied(command, copy) }, "Copy");
  return el("details", { class: "wire" },
    el("summary", {}, "Request and answer"),
    el("div", { class: "code" }, folded("Request", command), copy),
    folded("Answer", JSON.stringify(answer, null, 2)),
  );
}

const folded = (name, text) => el("pre", { tabindex: "0", role: "region", "aria-label": name }, text);

async function copied(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it manually"; // not allowed by this browser, or not a secure place
  }
}
