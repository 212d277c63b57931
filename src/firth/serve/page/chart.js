// A line chart as SVG, drawn as core/chart.py draws those of reports: the same elements, classes, ticks and marks.
// Positions are percentages, and names overflow into the margins, so the font keeps its size at every width.

import { legend } from "/page/components.js";
import { el, svg } from "/page/dom.js";
import { addReadout } from "/page/readout.js";

const PATH_UNITS = 1000;
const MAX_MARKS = 160; // marks of a chart: bands that can be pointed at

export function formatNumber(v) {
  if (v === 0 || !Number.isFinite(v)) return String(v);
  if (Math.abs(v) >= 0.001 && Math.abs(v) < 1000) return String(Number(v.toPrecision(4)));
  if (Math.abs(v) >= 1000 && Math.abs(v) < 1e15) return Math.round(v).toLocaleString("en");
  const [mantissa, exponent] = v.toExponential(3).split("e");
  return `${Number(mantissa)}e${Number(exponent)}`;
}

export function formatTick(v) {
  for (const [unit, name] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(v) >= Math.max(unit, 1e4)) return `${Number((v / unit).toPrecision(4))}${name}`;
  }
  return formatNumber(v);
}

export function niceTicks(low, high, about = 5) {
  if (!(high > low)) return [low];
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw * (1 - 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

const percent = (share) => `${Number((100 * share).toFixed(2))}%`;
const text = (properties, content) => svg("text", { ...properties, text: content });

// series: {name, points: [[x, y]], colour, dashed?, dots?, thin?}; lines: {name, y, colour?} are horizontal.
export function lineChart({ series, lines = [], xLabel, yLabel, label, height = 250, yRange = null, wholeSteps = false }) {
  const filled = series.map((s) => ({ ...s, points: s.points.filter(([, y]) => Number.isFinite(y)) })).filter((s) => s.points.length);
  if (!filled.length) return el("p", { class: "note", text: "Nothing to draw yet." });
  const all = filled.flatMap((s) => s.points);
  const xs = [...new Set(all.map((p) => p[0]))].sort((a, b) => a - b);
  const ys = [...all.map((p) => p[1]), ...lines.map((l) => l.y)];
  let [x0, x1] = [xs[0], xs.at(-1)];
  let [y0, y1] = yRange ?? [Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  if (y0 === y1) [y0, y1] = [y0 - 0.5, y1 + 0.5];
  else if (!yRange) { const pad = 0.05 * (y1 - y0); [y0, y1] = [y0 - pad, y1 + pad]; }
  const clip = (share) => Math.min(1, Math.max(0, share));
  const X = (x) => clip((x - x0) / (x1 - x0));
  const Y = (y) => clip((y - y0) / (y1 - y0));
  const colour = (s) => ({ "--colour": s.colour });

  const plot = svg("svg", { class: "chart", role: "img", "aria-label": label, height });
  for (const t of niceTicks(y0, y1)) {
    const y = percent(1 - Y(t));
    plot.append(svg("line", { class: "grid", x2: "100%", y1: y, y2: y }), text({ class: "tick", x: -8, y, dy: 4, "text-anchor": "end" }, formatTick(t)));
  }
  plot.append(text({ class: "name", x: -height / 2, y: -52, "text-anchor": "middle", transform: "rotate(-90)" }, yLabel),
    svg("line", { class: "axis", x2: "100%", y1: height, y2: height }));
  for (const t of niceTicks(x0, x1, 6).filter((t) => !wholeSteps || Number.isInteger(t))) {
    const x = percent(X(t));
    plot.append(svg("line", { class: "axis", x1: x, x2: x, y1: height, y2: height + 4 }), text({ class: "tick", x, y: height + 17, "text-anchor": "middle" }, formatTick(t)));
  }
  plot.append(text({ class: "name", x: "50%", y: height + 37, "text-anchor": "middle" }, xLabel));
  for (const line of lines) plot.append(svg("line", { class: "line dashed", x2: "100%", y1: percent(1 - Y(line.y)), y2: percent(1 - Y(line.y)), style: { "--colour": line.colour ?? "var(--ink)" } }));
  for (const s of filled) {
    if (s.points.length > 1) {
      const steps = s.points.map(([x, y]) => `${(PATH_UNITS * X(x)).toFixed(1)} ${(PATH_UNITS * (1 - Y(y))).toFixed(1)}`);
      const style = s.thin ? " thin" : s.dashed ? " dashed" : "";
      plot.append(svg("svg", { width: "100%", height: "100%", viewBox: `0 0 ${PATH_UNITS} ${PATH_UNITS}`, preserveAspectRatio: "none" },
        svg("path", { class: `line${style}`, d: `M${steps.join("L")}`, style: colour(s) })));
    }
    if (s.dots || s.points.length === 1) plot.append(...s.points.map(([x, y]) => svg("circle", { class: "dot", cx: percent(X(x)), cy: percent(1 - Y(y)), r: 3.5, style: colour(s) })));
  }
  plot.append(...drawBands(filled, xs, X, xLabel, yLabel));
  const readout = el("div", { class: "readout" });
  addReadout(plot, readout);
  const named = filled.length > 1 || filled[0].name ? filled : [];
  const style = (s) => (s.thin ? "thin" : s.dashed ? "dashed" : "solid");
  return el("div", { class: "figure" }, legend([...named.map((s) => [s.colour, s.name, style(s)]), ...lines.map((l) => [l.colour ?? "var(--ink)", `${l.name}: ${formatNumber(l.y)}`, "dashed"])]), plot, readout);
}

// A band around each x, with the values of all series there; of very many, in MAX_MARKS cells of equal width, by their mean.
function drawBands(series, xs, X, xLabel, yLabel) {
  const first = new Map();
  const cellOf = new Map(xs.map((x) => {
    if (xs.length <= MAX_MARKS) return [x, x];
    const cell = Math.min(Math.floor(X(x) * MAX_MARKS), MAX_MARKS - 1);
    if (!first.has(cell)) first.set(cell, x);
    return [x, first.get(cell)];
  }));
  const cells = [...new Set(cellOf.values())];
  const sums = series.map((s) => {
    const found = new Map();
    for (const [x, y] of s.points) { const [sum, n] = found.get(cellOf.get(x)) ?? [0, 0]; found.set(cellOf.get(x), [sum + y, n + 1]); }
    return found;
  });
  const edges = [0, ...cells.slice(1).map((x, i) => (X(cells[i]) + X(x)) / 2), 1];
  return cells.map((x, i) => {
    const numbers = series.map((s, k) => { const [sum, n] = sums[k].get(x) ?? [0, 0]; return n ? `${s.name || yLabel} ${formatNumber(sum / n)}` : null; });
    const at = percent(X(x));
    return svg("g", { class: "mark" },
      svg("title", { text: [`${xLabel} ${formatNumber(x)}`, ...numbers.filter(Boolean)].join(" · ") }),
      svg("rect", { class: "hit", x: percent(edges[i]), width: percent(edges[i + 1] - edges[i]), height: "100%" }),
      svg("line", { class: "cross", x1: at, x2: at, y2: "100%" }));
  });
}
