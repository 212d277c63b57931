// Vectors: words in their contexts as points, by layer; several models beside each other, a static one among them.

import { post } from "/page/api.js";
import { bars, card, field, missing, onKeyClick, ranges, readout, roving, show, slider, textArea } from "/page/components.js";
import { debounce, el, percent, roomFor, svg } from "/page/dom.js";
import { keepFields, keepMap } from "/page/keep.js";

export const name = "vectors";
export const title = "Vectors";

const state = {
  texts: "The bat flew out of the cave at night.\nHe hit the ball with a wooden bat.\nA bat is an animal that can fly.\nShe bought a new bat for the game.\nThe bird flew over the river.\nThe player hit the ball.",
  words: "bat, ball, bird, player, animal, game",
};
const layers = new Map(); // model id -> layer
keepFields("vectors", state);
keepMap("layers", layers);
const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];

export function draw(panel, shown) {
  const views = shown.map((model) => new View(model));
  const refresh = debounce(() => views.forEach((view) => view.fetch()), 400);
  const words = el("input", { type: "text", value: state.words, on: { input: () => { state.words = words.value; refresh(); } } });
  panel.replaceChildren(
    el("p", { class: "lead", text: "Each point is a word in one of the lines (the small number): the mean hidden state of its tokens, in the two directions with most variance (PCA), both drawn to one scale. Point at a word for its nearest ones, by the cosine of whole vectors. A static model, such as word2vec, gives a word the same point in every line." }),
    textArea("Texts, one on each line", state.texts, (value) => { state.texts = value; refresh(); }, 6).box,
    field("Words (empty: all)", words),
    shown.length ? el("div", { class: "columns wide" }, views.map((view) => view.box)) : el("p", { text: "No model is shown." }),
  );
  views.forEach((view) => view.fetch());
}

class View {
  constructor(model) {
    this.model = model;
    this.body = el("div");
    this.box = card(model.id, model.num_layers ? `${model.family}, ${model.num_layers} ${model.num_layers === 1 ? "layer" : "layers"}` : "static vectors", this.body);
  }

  fetch() {
    show(this.body, async () => {
      this.texts = state.texts.split("\n").filter((line) => line.trim());
      if (!this.texts.length) return missing("Type some lines of text.");
      const words = state.words.split(",").map((word) => word.trim()).filter(Boolean);
      this.found = await post("/vectors", { model: this.model.id, texts: this.texts, ...(words.length ? { words } : {}) }, `vectors-${this.model.id}`);
      const last = this.found.layers.length - 1;
      const layer = Math.min(layers.get(this.model.id) ?? last, last);
      this.picture = el("div");
      this.drawLayer(layer);
      return [last > 0 ? slider("layer (0: the embedding)", { min: 0, max: last, step: 1, value: layer, onInput: (v) => { layers.set(this.model.id, v); this.drawLayer(v); } }) : null, this.picture];
    });
  }

  drawLayer(layer) {
    this.picture.replaceChildren(drawMap(this.found.words, this.found.layers[layer], this.texts, `Map of words in layer ${layer} of ${this.model.id}`));
  }
}

const LABEL_HEIGHT = 15; // with the raised line number
const MAX_LABEL_SHIFT = 60; // further from its point a label is not understood

const SAME_PLACE = 9; // distance of two points of one word that share a label

// The height of each label: beside its point, or the nearest at which it covers no other label, and no point if that can
// be; null where there is none.
function placeLabels(labels, points, height) {
  const placed = [];
  const isFree = (label, y) => placed.every((other) => Math.abs(other.y - y) >= LABEL_HEIGHT || other.x >= label.x + label.width || label.x >= other.x + other.width);
  const hidesNone = (label, y) => points.every(([px, py]) => px < label.x || px > label.x + label.width || Math.abs(py - y + 4) > LABEL_HEIGHT / 2 + 2);
  const heights = Array.from({ length: MAX_LABEL_SHIFT / 2 + 1 }, (_, i) => [2 * i, -2 * i]).flat();
  return labels.map((label) => {
    const free = heights.map((by) => label.y + by).filter((y) => y > LABEL_HEIGHT && y < height - 24 && isFree(label, y));
    const y = free.find((at) => hidesNone(label, at)) ?? free[0] ?? null;
    if (y !== null) placed.push({ ...label, y });
    return y;
  });
}

// One label for all points of a word that lie at one place, as those of a static model do: [first point, lines of the text].
function shareLabels(names, lines, points) {
  const labels = [];
  names.forEach((name, i) => {
    const near = labels.find((label) => names[label.first] === name && Math.hypot(...points[i].map((v, k) => v - points[label.first][k])) < SAME_PLACE);
    if (near) near.lines.add(lines[i]);
    else labels.push({ first: i, lines: new Set([lines[i]]) });
  });
  return labels;
}

function drawMap(words, { points, shares, neighbours }, texts, label) {
  const width = roomFor(600);
  const [pad, room] = [34, 40]; // room for a label to the right
  const xs = points.map((p) => p[0]);
  const ys = points.map((p) => p[1]);
  const range = (values) => [Math.min(...values), Math.max(...values)];
  const [[x0, x1], [y0, y1]] = [range(xs), range(ys)];
  // One scale for both components: a distance in the picture means the same in every direction.
  const unit = Math.min((width - 2 * pad - room) / Math.max(x1 - x0, 1e-9), (Math.min(400, width) - 2 * pad) / Math.max(y1 - y0, 1e-9));
  const height = Math.max(220, (y1 - y0) * unit + 2 * pad);
  const X = (x) => pad + (width - 2 * pad - room) / 2 + (x - (x0 + x1) / 2) * unit;
  const Y = (y) => height / 2 - (y - (y0 + y1) / 2) * unit;
  const lowered = words.map((word) => word.word.toLowerCase());
  const names = [...new Set(lowered)];
  const links = svg("g", {});
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "group", "aria-label": label },
    svg("line", { class: "axis", x1: pad, x2: width - pad, y1: height - pad + 12, y2: height - pad + 12 }),
    svg("line", { class: "axis", x1: pad - 14, x2: pad - 14, y1: pad - 10, y2: height - pad + 12 }),
    svg("text", { x: width / 2, y: height - 5, "text-anchor": "middle", "font-size": 12, class: "quiet", text: `first component, ${percent(shares[0])} of the variance` }),
    svg("text", { "text-anchor": "middle", "font-size": 12, class: "quiet", transform: `translate(11 ${height / 2}) rotate(-90)`, text: `second component, ${percent(shares[1])}` }),
    links);
  const detail = readout();
  const near = el("div");
  const context = (word) => [...texts[word.text]].join("");
  function point(i, byKey = false) {
    links.replaceChildren(...neighbours[i].slice(0, 3).map(([j]) => svg("line", { x1: X(xs[i]), y1: Y(ys[i]), x2: X(xs[j]), y2: Y(ys[j]), stroke: "var(--quiet)", "stroke-dasharray": "3 3" })));
    const text = [...texts[words[i].text]];
    detail.tell([`${words[i].text + 1}: `, text.slice(0, words[i].start).join(""), el("strong", { text: words[i].word }), text.slice(words[i].end).join("")], byKey);
    near.replaceChildren(bars(neighbours[i].map(([j, cosine]) => ({ name: `${words[j].word} (${words[j].text + 1})`, p: Math.max(cosine, 0), label: cosine.toFixed(2), title: context(words[j]) })), { label: "Nearest words", max: 1 }));
  }
  const places = words.map((_, i) => [X(xs[i]), Y(ys[i])]);
  const labels = shareLabels(lowered, words.map((word) => word.text + 1), places);
  labels.forEach((label) => (label.lines = ranges([...label.lines])));
  const heights = placeLabels(labels.map(({ first, lines }) => ({ x: places[first][0] + 8, y: places[first][1] + 4, width: 7.5 * words[first].word.length + 6 * lines.length + 8 })), places, height);
  const spots = new Map(labels.map(({ first, lines }, k) => [first, { lines, y: heights[k] }]));
  const marks = words.map((word, i) => {
    const colour = `var(${COLOURS[names.indexOf(word.word.toLowerCase()) % COLOURS.length]})`;
    const { y = null, lines } = spots.get(i) ?? {};
    const isMoved = y !== null && Math.abs(y - places[i][1] - 4) > LABEL_HEIGHT / 2;
    return svg("g", { class: "point", role: "button", "aria-label": `${word.word} in line ${word.text + 1}`, on: { pointerenter: () => point(i), focus: () => point(i, true), click: () => point(i), keydown: onKeyClick(() => point(i, true)) } },
      isMoved ? svg("line", { x1: X(xs[i]), y1: Y(ys[i]), x2: X(xs[i]) + 8, y2: y - 4, stroke: colour, "stroke-width": 0.7 }) : null,
      svg("circle", { cx: X(xs[i]), cy: Y(ys[i]), r: 5, fill: colour }),
      y === null ? svg("title", { text: `${word.word} (${word.text + 1})` }) : svg("text", { x: X(xs[i]) + 8, y, "font-size": 12, text: word.word }, svg("tspan", { "font-size": 9, class: "quiet", dy: -4, text: ` ${lines}` })));
  });
  chart.append(...marks);
  // Arrow keys go to the next word to that side.
  const order = (values) => values.map((_, i) => i).sort((a, b) => values[a] - values[b] || a - b);
  const [byX, byY] = [order(xs), order(ys)];
  const step = (sorted, i, by) => sorted[sorted.indexOf(i) + by];
  roving(marks, { next: (i, key) => ({ ArrowRight: step(byX, i, 1), ArrowLeft: step(byX, i, -1), ArrowUp: step(byY, i, 1), ArrowDown: step(byY, i, -1), Home: byX[0], End: byX.at(-1) })[key] });
  detail.tell("Point at a word.");
  return el("div", { class: "figure" }, chart, detail.box, near);
}
