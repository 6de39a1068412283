/** Elements and numbers, as the page writes them. */

/**
 * Make an element. What begins with `on` is a listener, `style` an object of properties (set through the object model,
 * which a strict content security policy allows), everything else an attribute; null and false leave it out.
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, v]) => element.style.setProperty(key, v));
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** A table: the heads of its columns (texts, or elements in their place), and its rows. */
export function table(kind, heads, rows) {
  const head = (one) => (one instanceof Element ? one : el("th", { scope: "col" }, one));
  return el("table", { class: kind }, el("thead", {}, el("tr", {}, heads.map(head))), el("tbody", {}, rows));
}

export const byId = (id) => document.getElementById(id);

/** A probability: never rounded to a certainty that it is not. */
export function percent(share) {
  if (share < 1 && share > 0.9995) return "> 99.9 %";
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  return `${(100 * share).toFixed(1)} %`;
}

/** A number with fixed digits, a true minus sign, and no sign on a zero. */
export function number(value, digits = 2) {
  const text = Math.abs(value).toFixed(digits);
  return value < 0 && Number(text) !== 0 ? `−${text}` : text;
}

export const ms = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;

export const whole = (value) => value.toLocaleString("en");

export const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

/** Bytes in units of a thousand, as the command prints them. */
export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 1000 && unit < units.length - 1; unit += 1) count /= 1000;
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}

/** A text cut at a word, as long as a line takes. */
export function shorten(text, most) {
  const line = text.trim().replace(/\s+/g, " ");
  if (line.length <= most) return line;
  return `${line.slice(0, most).replace(/\s+\S*$/, "")} …`;
}

export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
