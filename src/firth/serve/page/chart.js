// A line chart as SVG: real axes, a readout under the pointer and for the arrow keys.

import { legend } from "/page/components.js";
import { el, svg } from "/page/dom.js";

export function niceTicks(low, high, about = 5) {
  if (!(high > low)) return [low];
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw);
  const ticks = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) ticks.push(Number(t.toPrecision(12)));
  return ticks;
}

export const formatTick = (v) => (Math.abs(v) >= 1e6 ? `${v / 1e6}M` : Math.abs(v) >= 1e4 ? `${v / 1e3}k` : String(Number(v.toPrecision(4))));

// series: {name, points: [[x, y]], colour, dashed?, dots?, thin?}; lines: {name, y, colour} are horizontal.
export function lineChart({ series, lines = [], xLabel, yLabel, label, width = 640, height = 300, yRange = null, wholeSteps = false }) {
  const filled = series.filter((s) => s.points.length);
  const all = filled.flatMap((s) => s.points).filter(([, y]) => Number.isFinite(y));
  if (!all.length) return el("p", { class: "note", text: "Nothing to draw yet." });
  const xs = all.map((p) => p[0]);
  const ys = [...all.map((p) => p[1]), ...lines.map((l) => l.y)];
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = yRange ?? [Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  if (y0 === y1) [y0, y1] = [y0 - 0.5, y1 + 0.5];
  else if (!yRange) { const pad = 0.05 * (y1 - y0); [y0, y1] = [y0 - pad, y1 + pad]; }
  const [left, right, top, bottom] = [48, 12, 10, 40];
  const X = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const Y = (y) => top + (1 - (y - y0) / (y1 - y0)) * (height - top - bottom);
  const cross = svg("line", { class: "axis", y1: top, y2: height - bottom, visibility: "hidden" });
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, tabindex: 0, width: "100%", style: { "max-width": `${width}px` } });
  for (const t of niceTicks(y0, y1)) {
    chart.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Y(t), y2: Y(t) }),
      svg("text", { x: left - 6, y: Y(t) + 4, "text-anchor": "end", "font-size": 11, class: "quiet", text: formatTick(t) }));
  }
  for (const t of niceTicks(x0, x1, 6).filter((t) => !wholeSteps || Number.isInteger(t))) {
    chart.append(svg("text", { x: X(t), y: height - bottom + 15, "text-anchor": "middle", "font-size": 11, class: "quiet", text: formatTick(t) }));
  }
  chart.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle", "font-size": 12, class: "quiet", text: xLabel }),
    svg("text", { x: 12, y: (top + height - bottom) / 2, "text-anchor": "middle", "font-size": 12, class: "quiet", transform: `rotate(-90 12 ${(top + height - bottom) / 2})`, text: yLabel }));
  for (const line of lines) {
    if (line.y < y0 || line.y > y1) continue;
    chart.append(svg("line", { x1: left, x2: width - right, y1: Y(line.y), y2: Y(line.y), stroke: line.colour ?? "currentColor", "stroke-dasharray": "6 4", "stroke-width": 1.2 }),
      svg("text", { x: width - right, y: Y(line.y) - 4, "text-anchor": "end", "font-size": 11, class: "quiet", text: `${line.name} ${line.y.toFixed(2)}` }));
  }
  for (const s of filled) {
    const path = s.points.filter(([, y]) => Number.isFinite(y)).map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(Math.min(Math.max(y, y0), y1)).toFixed(1)}`).join("");
    chart.append(svg("path", { d: path, fill: "none", stroke: s.colour, "stroke-width": s.thin ? 1.1 : 2, "stroke-opacity": s.thin ? 0.7 : 1, "stroke-dasharray": s.dashed ? "5 4" : null }));
    if (s.dots) for (const [x, y] of s.points) if (Number.isFinite(y)) chart.append(svg("circle", { cx: X(x), cy: Y(y), r: 2.6, fill: s.colour }));
  }
  chart.append(cross);
  const readout = el("div", { class: "readout", "aria-live": "polite" });
  const steps = [...new Set(xs)].sort((a, b) => a - b);
  let at = -1;
  function nearest(points, x) {
    let best = null;
    for (const p of points) if (Number.isFinite(p[1]) && (best === null || Math.abs(p[0] - x) < Math.abs(best[0] - x))) best = p;
    return best;
  }
  function point(x) {
    cross.setAttribute("x1", X(x));
    cross.setAttribute("x2", X(x));
    cross.setAttribute("visibility", "visible");
    readout.textContent = `${xLabel} ${formatTick(x)} · ` + filled.map((s) => { const p = nearest(s.points, x); return p ? `${s.name} ${Number(p[1].toPrecision(5))}` : null; }).filter(Boolean).join(" · ");
  }
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = x0 + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (x1 - x0);
    at = steps.reduce((best, s, i) => (Math.abs(s - x) < Math.abs(steps[best] - x) ? i : best), 0);
    point(steps[at]);
  });
  chart.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (!move) return;
    at = Math.min(steps.length - 1, Math.max(0, at + move));
    point(steps[at]);
    event.preventDefault();
  });
  const named = filled.length > 1 || filled[0].name ? filled : [];
  return el("div", { class: "figure" }, legend(named.map((s) => [s.colour, s.name])), chart, readout);
}
