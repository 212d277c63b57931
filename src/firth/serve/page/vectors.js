// Vectors: words in their contexts as points, by layer; several models beside each other, a static one among them.

import { post } from "/page/api.js";
import { bars, card, field, onKeyClick, readout, roving, show, slider, textArea } from "/page/components.js";
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
    el("p", { class: "lead", text: "Each point is a word in one of the lines: the mean hidden state of its tokens, in the two directions with most variance (PCA). Point at a word for its nearest ones, by the cosine of whole vectors. A static model, such as word2vec, gives a word one point in every line." }),
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

const LABEL_HEIGHT = 13;
const MAX_LABEL_SHIFT = 4 * LABEL_HEIGHT; // further from its point a label is not understood

// The height of each label: beside its point, or the nearest at which it covers no label before it; null where there is none.
function placeLabels(labels, height) {
  const placed = [];
  const isFree = (label, y) => placed.every((other) => Math.abs(other.y - y) >= LABEL_HEIGHT || other.x >= label.x + label.width || label.x >= other.x + other.width);
  return labels.map((label) => {
    for (let by = 0; by <= MAX_LABEL_SHIFT; by += 2) {
      const y = [label.y + by, label.y - by].find((at) => at > LABEL_HEIGHT && at < height - 24 && isFree(label, at));
      if (y === undefined) continue;
      placed.push({ ...label, y });
      return y;
    }
    return null;
  });
}

function drawMap(words, { points, shares, neighbours }, texts, label) {
  const width = roomFor(600);
  const [height, pad] = [Math.min(400, width), 34];
  const xs = points.map((p) => p[0]);
  const ys = points.map((p) => p[1]);
  const range = (values) => { const [a, b] = [Math.min(...values), Math.max(...values)]; return b > a ? [a, b] : [a - 1, a + 1]; };
  const [[x0, x1], [y0, y1]] = [range(xs), range(ys)];
  const X = (x) => pad + ((x - x0) / (x1 - x0)) * (width - 2 * pad - 40);
  const Y = (y) => height - pad - ((y - y0) / (y1 - y0)) * (height - 2 * pad);
  const names = [...new Set(words.map((word) => word.word.toLowerCase()))];
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
  const spots = placeLabels(words.map((word, i) => ({ x: X(xs[i]) + 8, y: Y(ys[i]) + 4, width: 7.5 * word.word.length + 14 })), height);
  const marks = words.map((word, i) => {
    const colour = `var(${COLOURS[names.indexOf(word.word.toLowerCase()) % COLOURS.length]})`;
    const isMoved = spots[i] !== null && Math.abs(spots[i] - Y(ys[i]) - 4) > LABEL_HEIGHT / 2;
    return svg("g", { class: "point", role: "button", "aria-label": `${word.word} in line ${word.text + 1}`, on: { pointerenter: () => point(i), focus: () => point(i, true), click: () => point(i), keydown: onKeyClick(() => point(i, true)) } },
      isMoved ? svg("line", { x1: X(xs[i]), y1: Y(ys[i]), x2: X(xs[i]) + 8, y2: spots[i] - 4, stroke: colour, "stroke-width": 0.7 }) : null,
      svg("circle", { cx: X(xs[i]), cy: Y(ys[i]), r: 5, fill: colour }),
      spots[i] === null ? svg("title", { text: `${word.word} (${word.text + 1})` }) : svg("text", { x: X(xs[i]) + 8, y: spots[i], "font-size": 12, text: word.word }, svg("tspan", { "font-size": 9, class: "quiet", dy: -4, text: ` ${word.text + 1}` })));
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
