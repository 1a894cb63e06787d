// Five figures and how they went in the last three minutes, as lines of SVG.

import { el, milliseconds, number, setText } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [180, 44];
const FEWEST = 45; // points that the width stands for at least

const percent = (value) => (value === null ? "–" : `${number(value)} %`);
const rate = (value) => (value === null ? "–" : `${number(value)}/s`);

// Columns of a point: 0 time, 1 generated/s, 2 prompt/s, 3 hits %, 4 blocks %, 5 running,
// 6 waiting, 7 swapped, 8 and 9 first token, 10 and 11 token to token (median, 95th percentile).
const CHARTS = [
  { title: "Tokens", unit: "generated a second", show: rate, lines: [1],
    also: (p) => `${rate(p[2])} prompt` },
  { title: "First token", unit: "median", show: milliseconds, lines: [8, 9],
    also: (p) => `p95 ${milliseconds(p[9])}` },
  { title: "Token to token", unit: "median", show: milliseconds, lines: [10, 11],
    also: (p) => `p95 ${milliseconds(p[11])}` },
  { title: "Cache hits", unit: "of prompt tokens", show: percent, lines: [3], most: 100,
    also: () => "" },
  { title: "Blocks in use", unit: "", show: percent, lines: [4], most: 100,
    also: (p) => `${number(p[5])} run · ${number(p[6])} wait${p[7] ? ` · ${number(p[7])} swapped` : ""}` },
];

function line(values, most) {
  const step = WIDTH / (Math.max(FEWEST, values.length) - 1);
  let path = "";
  let isDown = false;
  values.forEach((value, i) => {
    if (value === null || value === undefined) {
      isDown = false;
      return;
    }
    const x = (WIDTH - (values.length - 1 - i) * step).toFixed(1);
    const y = HEIGHT - 2 - (HEIGHT - 6) * Math.min(1, value / most);
    path += `${isDown ? "L" : "M"}${x} ${y.toFixed(1)}`;
    if (!isDown) path += `h0.01`;
    isDown = true;
  });
  return path;
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.value = el("p", { class: "figure" });
    this.also = el("p", { class: "also" });
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.area = this.path("area");
    this.lines = spec.lines.map((_, i) => this.path(`line line-${i}`));
    this.scale = el("p", { class: "scale", "aria-hidden": "true" });
    this.node = el("article", { class: "panel card" },
      el("h2", { text: spec.title }), this.value, this.also, this.svg, this.scale);
  }

  path(name) {
    const made = document.createElementNS(SVG, "path");
    made.setAttribute("class", name);
    this.svg.append(made);
    return made;
  }

  draw(points) {
    const { spec } = this;
    const last = points.findLast((p) => p[spec.lines[0]] !== null) ?? points.at(-1);
    const columns = spec.lines.map((n) => points.map((p) => p[n]));
    const highest = Math.max(0, ...columns.flat().filter((v) => v !== null));
    const most = spec.most ?? (highest || 1);
    columns.forEach((values, i) => this.lines[i].setAttribute("d", line(values, most)));
    const solid = columns[0].map((v) => v ?? 0);
    const left = WIDTH - (solid.length - 1) * (WIDTH / (Math.max(FEWEST, solid.length) - 1));
    this.area.setAttribute("d", solid.length ?
      `M${left.toFixed(1)} ${HEIGHT}L${line(solid, most).slice(1)}L${WIDTH} ${HEIGHT}Z` : "");
    const value = last ? last[spec.lines[0]] : null;
    setText(this.value, spec.show(value ?? null));
    setText(this.also, [spec.unit, last ? spec.also(last) : ""].filter(Boolean).join(" · "));
    setText(this.scale, spec.most || !highest ? "" : `max ${spec.show(highest)}`);
    this.svg.setAttribute("aria-label", `${spec.title} ${spec.unit}: now ${spec.show(value ?? null)},`
      + ` highest in three minutes ${spec.show(highest)}`);
  }
}

export class Charts {
  constructor(parent) {
    this.charts = CHARTS.map((spec) => new Chart(spec));
    parent.replaceChildren(...this.charts.map((one) => one.node));
  }

  draw(points) {
    for (const chart of this.charts) chart.draw(points);
  }
}
