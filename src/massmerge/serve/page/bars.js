/** Bars. Each stands beside its number, so to a screen reader it is nothing. */

import { el } from "./dom.js";

const part = (share) => `${(100 * Math.min(1, Math.max(0, share))).toFixed(2)}%`;

/**
 * A bar from the left.
 *
 * @param {number} share of the whole length, 0 to 1
 * @param {{tone?: string, tick?: number}} options a class that colours it; where a threshold is marked
 */
export function bar(share, { tone = "", tick = null } = {}) {
  return el("span", { class: "bar", "aria-hidden": "true" },
    el("span", { class: `fill ${tone}`, style: { width: part(share) } }),
    tick === null ? null : el("span", { class: "tick", style: { left: part(tick) } }),
  );
}

/** A bar from zero to either side, in a range that holds zero. */
export function signedBar(value, low, high, { tone = "" } = {}) {
  const span = high - low || 1;
  const from = (Math.min(value, 0) - low) / span;
  return el("span", { class: "bar", "aria-hidden": "true" },
    el("span", { class: `fill ${tone}`, style: { left: part(from), width: part(Math.abs(value) / span) } }),
    el("span", { class: "zero", style: { left: part(-low / span) } }),
  );
}

/** One bar of several parts, `[{share, tone}]`. */
export function stackedBar(parts) {
  return el("span", { class: "bar stacked", "aria-hidden": "true" },
    parts.map(({ share, tone }) => el("span", { class: `fill ${tone}`, style: { width: part(share) } })));
}

/** A bar with its number. */
export const cell = (drawn, text) => el("span", { class: "cell" }, drawn, el("span", { class: "figure" }, text));
