/** The heat map, which is a table of numbers first and colour second. */

import { el, number, table } from "./dom.js";

const LEAST_RANGE = 0.2; // so that noise among unlike tasks does not glow

/** Overlaps or cosines of the tasks (tasks × tasks), coloured up to the largest between two different ones. */
export function similarityTable(names, values) {
  const others = values.flatMap((row, i) => row.filter((_, j) => i !== j).map(Math.abs));
  const range = Math.max(LEAST_RANGE, ...others);
  const heat = (value, same) => {
    if (same) return el("td", { class: "same" }, number(1));
    const tone = value < 0 ? "cold" : "hot";
    return el("td", { class: tone, style: { "--heat": (Math.abs(value) / range).toFixed(3) } }, number(value));
  };
  return table("heat", [el("td", {}), ...names.map((name) => [el("span", {}, name)])],
    values.map((row, i) => el("tr", {},
      el("th", { scope: "row" }, names[i]), row.map((value, j) => heat(value, i === j)))));
}
