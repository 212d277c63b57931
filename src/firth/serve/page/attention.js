// Attention: every head as a small picture with a name, one enlarged as a matrix and as arcs, masks, layers by numbers.

import { post } from "/page/api.js";
import { button, card, decodeCells, maskFigure, missing, onKeyClick, paintCells, readout, roving, segments, show, textArea } from "/page/components.js";
import { lineChart } from "/page/chart.js";
import { choose, debounce, el, percent, roomFor, svg } from "/page/dom.js";
import { keepFields, keepMap } from "/page/keep.js";

export const name = "attention";
export const title = "Attention";

const WINDOW = 40; // tokens that are enlarged at once
const MIN_DRAWN_SHARE = 0.04; // of the strongest weight of a picture, below which no line is drawn
const state = { text: "The cat sat on the mat because the cat was tired.", target: "It was tired.", view: "arcs" };
const picked = new Map(); // model id -> {kind, layer, head, start, keyStart, permutation: number of a random order, or null}
keepFields("attention", state);
keepMap("heads", picked);

export const clean = (token) => token.replace(/^[Ġ▁]/, "").replace(/^##/, "").replace(/<\/w>$/, "") || token;

export function draw(panel, shown, page) {
  const models = choose(shown, page, (model) => model.abilities.includes("attention"));
  const views = models.map((model) => new View(model));
  const refresh = debounce(() => views.forEach((view) => view.fetch()), 400);
  const needsTarget = models.some((model) => model.architecture === "encoder-decoder");
  panel.replaceChildren(
    el("p", { class: "lead", text: "Each head of each layer decides how much every token takes from the others. Rows of a picture are queries, the tokens that look; columns are keys, the tokens that are looked at; the bluer, the more weight. Choose a head to enlarge it. Names say what a head does on this text." }),
    textArea("Text", state.text, (value) => { state.text = value; refresh(); }, 2).box,
    needsTarget ? textArea("What the decoder reads (encoder-decoders)", state.target, (value) => { state.target = value; refresh(); }, 1).box : "",
    models.length ? el("div", { class: "columns wide" }, views.map((view) => view.box)) : el("p", { text: "None of these models has attention." }),
  );
  views.forEach((view) => view.fetch());
}

const describe = (head) => `entropy ${head.entropy.toFixed(2)} nats${head.distance === null ? "" : `, mean distance ${head.distance.toFixed(1)} tokens`}`;

class View {
  constructor(model) {
    this.model = model;
    if (!picked.has(model.id)) picked.set(model.id, { kind: null, layer: 0, head: 0, start: 0, keyStart: 0, permutation: null });
    this.at = picked.get(model.id);
    this.body = el("div");
    this.box = card(model.id, `${model.family}, ${model.num_layers} ${model.num_layers === 1 ? "layer" : "layers"}`, this.body);
  }

  // What every request of this model asks for.
  asked() {
    const target = this.model.architecture === "encoder-decoder" ? state.target : "";
    const { permutation } = this.at;
    return { model: this.model.id, text: state.text, target, ...(typeof permutation === "number" ? { permutation } : {}) };
  }

  fetch() {
    show(this.body, async () => {
      if (!state.text.trim()) return missing();
      this.found = await post("/attention/heads", { ...this.asked(), max_cells: 24 }, `heads-${this.model.id}`);
      if (!this.found.kinds[this.at.kind]) this.at.kind = Object.keys(this.found.kinds)[0];
      return this.make();
    });
  }

  make() {
    const kinds = Object.keys(this.found.kinds);
    const kind = this.found.kinds[this.at.kind];
    this.at.layer = Math.min(this.at.layer, kind.heads.length - 1);
    this.at.head = Math.min(this.at.head, kind.heads[0].length - 1);
    const cells = decodeCells(kind.pictures);
    const size = kind.rows * kind.columns;
    this.buttons = new Map();
    const grid = el("table", { class: "heads" },
      el("thead", {}, el("tr", {}, el("th", { text: "layer" }), kind.heads[0].map((_, h) => el("th", { scope: "col", text: `${h}` })))),
      el("tbody", {}, kind.heads.map((layer, l) => el("tr", {}, el("th", { scope: "row", text: `${l}` }), layer.map((head, h) => {
        const canvas = el("canvas");
        const first = (l * kind.heads[0].length + h) * size;
        paintCells(canvas, Array.from(cells.subarray(first, first + size), (v) => v / 255), kind.rows, kind.columns);
        const label = `layer ${l}, head ${h}${head.name ? `: ${head.name}` : ""}`;
        const pressed = l === this.at.layer && h === this.at.head;
        const thumb = el("button", { type: "button", class: "head", "aria-label": label, "aria-pressed": String(pressed), title: `${label}\n${describe(head)}`, on: { click: () => this.pick(l, h) } }, canvas);
        this.buttons.set(`${l}-${h}`, thumb);
        return el("td", {}, thumb, head.name ? el("span", { class: "head-name", text: head.name }) : null);
      })))));
    const numHeads = kind.heads[0].length;
    const thumbs = [...this.buttons.values()];
    this.setCurrent = roving(thumbs, {
      current: this.at.layer * numHeads + this.at.head,
      onMove: (index) => thumbs[index].click(),
      next: (index, key) => {
        const [dl, dh] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[key] ?? [0, 0];
        const [l, h] = [Math.floor(index / numHeads) + dl, (index % numHeads) + dh];
        return (dl || dh) && l >= 0 && l < kind.heads.length && h >= 0 && h < numHeads ? l * numHeads + h : undefined;
      },
    });
    this.large = el("div");
    const parts = [
      this.model.abilities.includes("permutation") ? this.orderControls() : null,
      kinds.length > 1 ? segments("Kind of attention", kinds.map((k) => [k, k]), this.at.kind, (k) => { this.at.kind = k; this.body.replaceChildren(...this.make().filter(Boolean)); }) : null,
      el("div", { class: "figures head-grid" }, el("div", { class: "scroll" }, grid), el("div", { class: "figures" }, kind.masks.map((mask) => maskFigure(mask, 92)))),
      this.large,
      el("details", { open: true }, el("summary", { text: "Layers by entropy and distance" }), this.layerChart(kind)),
    ];
    this.enlarge();
    return parts;
  }

  // XLNet is fine-tuned with attention to all tokens, and pretrained in random orders.
  orderControls() {
    const isPermuted = typeof this.at.permutation === "number";
    const set = (permutation) => { this.at.permutation = permutation; this.fetch(); };
    return el("div", { class: "controls" },
      segments("Order of attention", [["all", "To all tokens"], ["order", "In a random order"]], isPermuted ? "order" : "all", (value) => set(value === "order" ? 0 : null)),
      isPermuted ? el("div", { class: "buttons" }, button("Next order", () => set(this.at.permutation + 1)), el("span", { class: "note", text: `order ${this.at.permutation + 1}` })) : null);
  }

  layerChart(kind) {
    const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
    const entropy = kind.heads.map((layer, l) => [l, mean(layer.map((head) => head.entropy))]);
    const hasDistance = kind.heads[0][0].distance !== null;
    const distance = hasDistance ? kind.heads.map((layer, l) => [l, mean(layer.map((head) => head.distance))]) : [];
    return lineChart({
      series: [{ name: "entropy (nats)", points: entropy, colour: "var(--c0)", dots: true }, { name: "distance (tokens)", points: distance, colour: "var(--c1)", dots: true }],
      xLabel: "layer", yLabel: "mean over heads", height: 150, wholeSteps: true, label: `Entropy and distance of the layers of ${this.model.id}`,
    });
  }

  pick(layer, head) {
    this.buttons.get(`${this.at.layer}-${this.at.head}`)?.setAttribute("aria-pressed", "false");
    Object.assign(this.at, { layer, head });
    this.buttons.get(`${layer}-${head}`).setAttribute("aria-pressed", "true");
    this.setCurrent(layer * this.found.kinds[this.at.kind].heads[0].length + head);
    this.enlarge();
  }

  sides() {
    const { tokens, target_tokens: target } = this.found;
    const { kind } = this.at;
    const isSeq2seq = this.model.architecture === "encoder-decoder";
    return { queries: isSeq2seq && kind !== "encoder" ? target : tokens, keys: isSeq2seq && kind === "decoder" ? target : tokens };
  }

  enlarge() {
    const { queries, keys } = this.sides();
    const { kind, layer, head } = this.at;
    this.at.start = Math.min(this.at.start, Math.max(0, queries.length - 1));
    this.at.keyStart = Math.min(this.at.keyStart, Math.max(0, keys.length - 1));
    show(this.large, async () => {
      const q = [this.at.start, Math.min(this.at.start + WINDOW, queries.length)];
      const k = [this.at.keyStart, Math.min(this.at.keyStart + WINDOW, keys.length)];
      const found = await post("/attention", { ...this.asked(), layers: [layer], heads: [head], queries: q, keys: k }, `head-${this.model.id}`);
      const weights = found.weights[kind][0][0];
      const summary = this.found.kinds[kind].heads[layer][head];
      const picture = { rowNames: queries.slice(...q).map(clean), columnNames: keys.slice(...k).map(clean), weights, offset: [q[0], k[0]] };
      const holder = el("div");
      const drawPicture = () => holder.replaceChildren(state.view === "matrix" ? drawMatrix(picture) : drawArcs(picture));
      drawPicture();
      return [
        el("h3", { text: `Layer ${layer}, head ${head}${summary.name ? `: ${summary.name} (${percent(summary.share)})` : ""}` }),
        el("p", { class: "note", text: describe(summary) }),
        el("div", { class: "controls" },
          segments("View of the head", [["arcs", "Arcs"], ["matrix", "Matrix"]], state.view, (v) => { state.view = v; drawPicture(); }),
          this.windowControls("queries", queries.length, "start"), this.windowControls("keys", keys.length, "keyStart")),
        holder,
      ];
    });
  }

  // A long text is read by windows of its queries and keys.
  windowControls(label, length, field) {
    if (length <= WINDOW) return null;
    const move = (by) => { this.at[field] = Math.min(Math.max(0, this.at[field] + by), length - WINDOW); if (field === "start") this.at.keyStart = Math.min(this.at.start, Math.max(0, this.sides().keys.length - WINDOW)); this.enlarge(); };
    return el("div", { class: "buttons" }, el("span", { class: "note", text: `${label} ${this.at[field]}–${Math.min(this.at[field] + WINDOW, length) - 1} of ${length}` }),
      button("◀", () => move(-WINDOW / 2), { "aria-label": `earlier ${label}`, disabled: this.at[field] === 0 }),
      button("▶", () => move(WINDOW / 2), { "aria-label": `later ${label}`, disabled: this.at[field] + WINDOW >= length }));
  }
}

// The largest weight of a picture: long texts and broad heads have small ones, which would be too pale to see.
const strongest = (weights) => Math.max(1e-6, ...weights.map((row) => Math.max(...row)));

function drawMatrix({ rowNames, columnNames, weights, offset }) {
  const cell = Math.max(9, Math.min(22, Math.floor(460 / Math.max(columnNames.length, 1))));
  const side = Math.min(110, 14 + 7 * Math.max(...rowNames.map((n) => n.length)));
  const head = Math.min(110, 14 + 7 * Math.max(...columnNames.map((n) => n.length)));
  const canvas = el("canvas", { class: "matrix", style: { width: `${cell * columnNames.length}px`, height: `${cell * rowNames.length}px` } });
  const highest = strongest(weights);
  paintCells(canvas, weights.flat().map((w) => w / highest), rowNames.length, columnNames.length);
  const [width, height] = [side + cell * columnNames.length + 2, head + cell * rowNames.length + 2];
  const cut = (text) => (text.length > 14 ? `${text.slice(0, 13)}…` : text);
  const labels = svg("svg", { width, height, role: "img", "aria-label": `Matrix of ${rowNames.length} queries and ${columnNames.length} keys`, tabindex: 0, style: { position: "absolute", inset: "0", "max-width": "none" } },
    rowNames.map((name, i) => svg("text", { x: side - 5, y: head + cell * (i + 0.5) + 4, "text-anchor": "end", "font-size": Math.min(12, cell + 1), class: "mono", text: cut(name) })),
    columnNames.map((name, j) => svg("text", { "font-size": Math.min(12, cell + 1), class: "mono", transform: `translate(${side + cell * (j + 0.5) + 4} ${head - 5}) rotate(-90)`, text: cut(name) })));
  const frame = svg("rect", { width: cell, height: cell, fill: "none", stroke: "var(--c1)", "stroke-width": 2, visibility: "hidden" });
  labels.append(frame);
  canvas.style.setProperty("position", "absolute");
  canvas.style.setProperty("left", `${side}px`);
  canvas.style.setProperty("top", `${head}px`);
  const numbers = readout();
  let [row, column] = [0, 0];
  const point = (r, c, byKey) => {
    if (!(r >= 0 && r < rowNames.length && c >= 0 && c < columnNames.length)) return;
    [row, column] = [r, c];
    frame.setAttribute("x", side + c * cell);
    frame.setAttribute("y", head + r * cell);
    frame.setAttribute("visibility", "visible");
    numbers.tell(`${rowNames[r]} (${offset[0] + r}) → ${columnNames[c]} (${offset[1] + c}): ${percent(weights[r][c])}`, byKey);
  };
  labels.addEventListener("pointermove", (event) => {
    const box = labels.getBoundingClientRect();
    point(Math.floor((event.clientY - box.top - head) / cell), Math.floor((event.clientX - box.left - side) / cell), false);
  });
  labels.addEventListener("keydown", (event) => {
    const [dr, dc] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] ?? [0, 0];
    if (dr || dc) { event.preventDefault(); point(row + dr, column + dc, true); }
  });
  return el("div", {}, el("div", { class: "scroll" }, el("div", { style: { position: "relative", width: `${width}px`, height: `${height}px` } }, canvas, labels)),
    el("p", { class: "note", text: `The bluest cell has ${percent(highest)}. Point at a cell, or use the arrow keys.` }), numbers.box);
}

// Queries on the left, keys on the right, a line for each weight; a token shows only its own.
export function drawArcs({ rowNames, columnNames, weights, offset }) {
  const dy = 20;
  const rows = Math.max(rowNames.length, columnNames.length);
  const height = rows * dy + 10;
  const x0 = 24 + 7.6 * Math.min(16, Math.max(...rowNames.map((name) => name.length)));
  const right = 24 + 7.6 * Math.min(16, Math.max(...columnNames.map((name) => name.length)));
  const x1 = x0 + Math.max(150, Math.min(300, roomFor(620) - x0 - right));
  const width = x1 + right;
  const Y = (i) => 5 + (i + 0.5) * dy;
  const bend = (x1 - x0) / 3;
  const highest = strongest(weights);
  const lines = svg("g", {});
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": `Arcs from ${rowNames.length} queries to ${columnNames.length} keys` });
  const numbers = readout();
  const cut = (text) => (text.length > 16 ? `${text.slice(0, 15)}…` : text);
  function drawLines(row, byKey = false) {
    lines.replaceChildren();
    weights.forEach((own, i) => own.forEach((w, j) => {
      const share = w / highest;
      if (share < MIN_DRAWN_SHARE || (row !== null && row !== i)) return;
      lines.append(svg("path", { d: `M${x0} ${Y(i)}C${x0 + bend} ${Y(i)} ${x1 - bend} ${Y(j)} ${x1} ${Y(j)}`, fill: "none", stroke: "var(--accent)", "stroke-width": 0.6 + 4 * share * Math.sqrt(highest), "stroke-opacity": row === null ? 0.1 + 0.75 * share : 0.25 + 0.75 * share }));
    }));
    if (row === null) { numbers.tell(`Point at a token on the left to see where it looks. The strongest line has ${percent(highest)}.`); return; }
    const best = weights[row].map((w, j) => [w, j]).sort((a, b) => b[0] - a[0]).slice(0, 4);
    numbers.tell(`${rowNames[row]} (${offset[0] + row}) → ${best.map(([w, j]) => `${columnNames[j]} ${percent(w)}`).join(", ")}`, byKey);
  }
  let held = null;
  const hold = (i) => {
    held = held === i ? null : i;
    queries.forEach((query, k) => query.setAttribute("aria-pressed", String(k === held)));
    drawLines(held);
  };
  const queries = rowNames.map((name, i) => svg("text", { class: "arc-token mono", x: x0 - 6, y: Y(i) + 4, "text-anchor": "end", "font-size": 12.5, role: "button", "aria-label": `Query ${name}`, "aria-pressed": "false", text: cut(name), on: {
    pointerenter: () => drawLines(i), pointerleave: () => drawLines(held), focus: () => drawLines(i, true), blur: () => drawLines(held),
    click: () => hold(i), keydown: onKeyClick(() => hold(i)),
  } }));
  roving(queries);
  chart.append(lines, ...queries,
    ...columnNames.map((name, j) => svg("text", { class: "mono", x: x1 + 6, y: Y(j) + 4, "font-size": 12.5, text: cut(name) })));
  drawLines(null);
  return el("div", {}, el("div", { class: "scroll" }, chart), numbers.box);
}
