// Write: the next token with its rivals, under temperature, top-k and top-p; streaming; beams as a tree.

import { isAbort, post, stop, stream } from "/page/api.js";
import { bars, button, card, details, show, slider, table, textArea } from "/page/components.js";
import { choose, count, debounce, el, percent, say, svg } from "/page/dom.js";
import { keep, keepFields } from "/page/keep.js";

export const name = "write";
export const title = "Write";

const TEMPERATURES = Array.from({ length: 30 }, (_, i) => Math.round((i + 1) * 5) / 50); // 0.1 to 3
const TOP_PS = Array.from({ length: 19 }, (_, i) => (i + 1) / 20); // 0.05 to 0.95
const TOP = 200; // tokens that are fetched
const SHOWN = 14; // bars
const settings = { prompt: "The", temperature: 1, topK: 0, topP: 1, newTokens: 40, beams: 3, beamTokens: 6 };
const columns = new Map(); // model id -> {context, ids, texts, found}
keepFields("write", settings);
keep("columns", () => [...columns].map(([id, { context, ids, texts }]) => [id, { context, ids, texts, found: null }]),
  (entries) => entries.forEach(([id, column]) => columns.set(id, column)));

// The distribution after temperature, top-k and top-p, in this order. It is exact: the server sums up the tokens that are
// not listed, those of them that top-p keeps, and those that tie with the last listed one.
// rest: {num, logsumexp, numTied, kept: [number, logsumexp]}; the answer has how many of them stay, and their share.
export function warp(tokens, rest, { temperature, topK, topP }) {
  const scaled = tokens.map((token) => token.logprob / temperature);
  const weights = scaled.map((s) => Math.exp(s - scaled[0]));
  const massOf = (logsumexp) => (logsumexp === null ? 0 : Math.exp(logsumexp - scaled[0]));
  const last = weights.at(-1);
  const total = (others) => weights.reduce((a, b) => a + b, others.mass);
  const none = { num: 0, mass: 0 };
  let others = { num: rest.num, mass: massOf(rest.logsumexp) };
  if (topK > 0) {
    const floor = scaled[Math.min(topK, scaled.length) - 1]; // tokens that tie with the k-th stay, as in the sampler
    scaled.forEach((s, i) => { if (s < floor) weights[i] = 0; });
    others = floor === scaled.at(-1) ? { num: rest.numTied, mass: rest.numTied * last } : none;
  }
  if (topP < 1) {
    const wanted = topP * total(others);
    let sum = 0;
    let kept = 0;
    while (kept < weights.length && (kept === 0 || sum < wanted) && weights[kept] > 0) sum += weights[kept++];
    weights.fill(0, kept);
    if (kept < weights.length || sum >= wanted) others = none;
    else if (topK > 0) { const num = Math.min(others.num, Math.ceil((wanted - sum) / last)); others = { num, mass: num * last }; }
    else others = { num: rest.kept[0], mass: massOf(rest.kept[1]) };
  }
  const all = total(others);
  return { p: weights.map((w) => w / all), rest: others.mass / all, numRest: others.num };
}

const continues = (model) => model.architecture !== "encoder-decoder" && !Object.values(model.tasks).includes("lm");

function columnOf(model) {
  if (!columns.has(model.id)) columns.set(model.id, { context: settings.prompt, ids: [], texts: [], found: null });
  return columns.get(model.id);
}

export function draw(panel, shown, state) {
  const models = choose(shown, state, (model) => model.abilities.includes("generate"));
  const views = models.map((model) => new Column(model));
  const redraw = () => views.forEach((view) => view.drawBars());
  const restart = debounce(() => views.forEach((view) => view.restart()), 300);
  const { box, area } = textArea("Prompt", settings.prompt, (value) => { settings.prompt = value; restart(); });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); views.forEach((view) => view.write()); }
  });
  panel.replaceChildren(
    el("p", { class: "lead", text: "A language model writes one token at a time. The bars are the probabilities of the next one: click one to take it. Temperature makes them steeper or flatter; top-k and top-p leave the likeliest ones; Write samples from what is left." }),
    box,
    el("div", { class: "controls" },
      slider("temperature", { min: 0.1, max: 3, step: 0.1, value: settings.temperature, format: (v) => v.toFixed(1), onInput: (v) => { settings.temperature = v; redraw(); } }),
      slider("top-k", { min: 0, max: 100, step: 1, value: settings.topK, format: (v) => (v ? String(v) : "off"), onInput: (v) => { settings.topK = v; redraw(); } }),
      slider("top-p", { min: 0.05, max: 1, step: 0.05, value: settings.topP, format: (v) => (v < 1 ? v.toFixed(2) : "off"), onInput: (v) => { settings.topP = v; redraw(); } }),
      slider("new tokens", { min: 1, max: 200, step: 1, value: settings.newTokens, onInput: (v) => (settings.newTokens = v) }),
      slider("beams", { min: 2, max: 8, step: 1, value: settings.beams, onInput: (v) => (settings.beams = v) }),
      slider("tokens of the tree", { min: 1, max: 20, step: 1, value: settings.beamTokens, onInput: (v) => (settings.beamTokens = v) })),
    el("div", { class: "controls" }, el("div", { class: "buttons" },
      button("Write", () => views.forEach((view) => view.write()), { class: "main", title: "Ctrl+Enter" }),
      button("Stop", () => views.forEach((view) => view.stop())),
      button("Draw one token", () => views.forEach((view) => view.drawToken()), { title: `One of the ${TOP} likeliest` }),
      button("Search beams", () => views.forEach((view) => view.search())),
      button("Back to the prompt", () => views.forEach((view) => view.restart())))),
    models.length ? el("div", { class: "columns" }, views.map((view) => view.box)) : el("p", { text: "None of these models can write. An encoder fills blanks: see Fill." }),
  );
  views.forEach((view) => view.fetch());
  return () => views.forEach((view) => view.close());
}

class Column {
  constructor(model) {
    this.model = model;
    this.state = columnOf(model);
    this.turn = 0; // counts restarts: what an earlier turn streams is dropped
    this.text = el("div", { class: "passage", dir: "auto", role: "group", "aria-label": `Text of ${model.id}` });
    this.written = el("div", { class: "unseen", role: "log", "aria-label": `New text of ${model.id}` }); // read out when it is whole
    this.bars = el("div");
    this.tree = el("div");
    this.note = el("div", { class: "note" });
    this.box = card(model.id, this.note, this.text, this.written, this.bars, this.tree);
    this.drawText();
  }

  drawText(streamed = null) {
    const { context, texts } = this.state;
    const given = el("span", { class: "given", text: context });
    const taken = texts.map((token) => el("span", { class: "new", title: token.p === undefined ? null : percent(token.p), text: token.text }));
    const rest = streamed ? el("span", { class: "new" }, streamed) : null;
    this.text.replaceChildren(...(continues(this.model) ? [given] : []), ...taken, ...(rest ? [rest] : []));
    if (!this.text.textContent) this.text.replaceChildren(el("span", { class: "given", text: continues(this.model) ? "(the beginning of a text)" : "(the answer)" }));
  }

  restart() {
    this.stop();
    this.turn++;
    Object.assign(this.state, { context: settings.prompt, ids: [], texts: [] });
    this.tree.replaceChildren();
    this.drawText();
    this.fetch();
  }

  // Until the answer is there the bars are those of an earlier text: they can be neither clicked nor drawn anew.
  fetch() {
    this.state.found = null;
    this.bars.inert = true;
    const hadFocus = this.bars.contains(document.activeElement);
    this.ready = show(this.bars, async () => {
      const body = { model: this.model.id, prompt: this.state.context, new_tokens: this.state.ids, top: TOP, temperatures: TEMPERATURES, top_ps: TOP_PS };
      this.state.found = await post("/next", body, `next-${this.model.id}`);
      return this.makeBars();
    }).then((isLast) => {
      if (!isLast) return;
      this.bars.inert = false;
      if (hadFocus) this.bars.querySelector("button")?.focus(); // who takes tokens by the keyboard goes on
    });
  }

  distribution() {
    const { tokens, rest_logsumexp: rests, num_rest: num, num_tied: numTied, nucleus } = this.state.found;
    const nearest = (values, value) => values.reduce((best, v, i) => (Math.abs(v - value) < Math.abs(values[best] - value) ? i : best), 0);
    const at = nearest(TEMPERATURES, settings.temperature);
    return warp(tokens, { num, logsumexp: rests[at], numTied, kept: nucleus[at][nearest(TOP_PS, settings.topP)] }, settings);
  }

  makeBars() {
    const { tokens, num_rest: numRest, entropy } = this.state.found;
    const { p, rest, numRest: numKept } = this.distribution();
    const items = tokens.slice(0, SHOWN).map((token, i) => ({ name: token.is_end ? `${token.text.trim()} (end)` : token.text, p: p[i], cut: p[i] === 0, token, title: `id ${token.id}, log-probability ${token.logprob.toFixed(3)}` }));
    const hidden = p.slice(SHOWN).reduce((a, b) => a + b, rest);
    const others = tokens.length - items.length + numRest;
    const stay = p.slice(SHOWN).filter((share) => share > 0).length + numKept;
    if (others > 0) items.push({ name: `${count(others)} others`, p: hidden, rest: true });
    this.note.textContent = `entropy ${entropy.toFixed(2)} nats`;
    const numbers = () => table(["token", "id", "log-probability", "now"], [
      ...tokens.slice(0, SHOWN).map((token, i) => [token.text, String(token.id), token.logprob.toFixed(3), percent(p[i])]),
      [`${count(others)} others`, "", `${count(stay)} stay`, percent(hidden)],
    ]);
    return [bars(items, { label: `Next token of ${this.model.id}`, onPick: (item) => this.take(item.token, item.p) }), details("Numbers", numbers)];
  }

  drawBars() {
    if (this.state.found) this.bars.replaceChildren(...this.makeBars());
  }

  take(token, p) {
    if (token.is_end) { say(`${this.model.id}: this token ends the text.`); return; }
    this.state.ids.push(token.id);
    this.state.texts.push({ text: token.text, p });
    if (this.state.ids.length === 1 && !continues(this.model)) this.state.texts[0].text = token.text.trimStart();
    this.drawText();
    this.fetch();
  }

  drawToken() {
    if (!this.state.found) return;
    const { p, rest } = this.distribution();
    let u = Math.random() * (1 - rest);
    const index = p.findIndex((share) => (u -= share) < 0);
    const token = this.state.found.tokens[Math.max(index, 0)];
    this.take(token, p[Math.max(index, 0)]);
  }

  async write() {
    const { model, state, turn } = this;
    await this.ready; // for the length of the text
    if (turn !== this.turn) return;
    if (continues(model)) state.context += state.texts.map((token) => token.text).join("");
    Object.assign(state, { ids: [], texts: [] });
    const sampling = { temperature: settings.temperature, ...(settings.topK ? { top_k: settings.topK } : {}), ...(settings.topP < 1 ? { top_p: settings.topP } : {}) };
    const room = model.max_length && continues(model) && state.found ? model.max_length - state.found.prompt_tokens.length : Infinity;
    const body = { model: model.id, prompt: state.context, max_new_tokens: Math.max(1, Math.min(settings.newTokens, room)), seed: Math.floor(Math.random() * 2 ** 31), ...sampling };
    const streamed = document.createTextNode(""); // grows: what is there already is not drawn again
    try {
      await stream("/generate", body, `write-${model.id}`, (event) => {
        if (turn !== this.turn) return;
        streamed.appendData(event.text);
        if (event.tokens) state.ids = event.tokens;
        if (streamed.length && !streamed.isConnected) this.drawText(streamed);
      });
    } catch (error) {
      if (!isAbort(error)) this.bars.replaceChildren(el("p", { class: "error", role: "alert", text: error.message }));
      if (!isAbort(error)) return;
    }
    if (turn !== this.turn) return;
    const text = streamed.data;
    if (!state.ids.length && continues(model)) state.context += text;
    else state.texts = [{ text }];
    this.drawText();
    this.written.replaceChildren(el("p", { text: text || "Nothing: the text has ended." }));
    this.fetch();
  }

  stop() {
    stop(`write-${this.model.id}`);
    stop(`beams-${this.model.id}`);
  }

  close() {
    this.stop();
    stop(`next-${this.model.id}`);
  }

  search() {
    const { context: prompt, ids } = this.state;
    show(this.tree, async () => {
      const found = await post("/beams", { model: this.model.id, prompt, new_tokens: ids, num_beams: settings.beams, max_new_tokens: settings.beamTokens }, `beams-${this.model.id}`);
      return [el("h2", { text: "Beams" }),
        el("p", { class: "note", text: "Each column is a step: its candidates, the highest sum of log-probabilities first. As many go on as there are beams; pale ones were dropped. The bold line is the best text." }), drawTree(found), table(["text that the search found", "score"], found.sequences.map((sequence) => [sequence.text.trim() || "(the end)", sequence.score.toFixed(2)])),
        details("Every candidate", () => table(["token", "after", "probability", "score", ""], found.nodes.slice(1).map((node) => [node.text, found.nodes[node.parent].text, percent(Math.exp(node.logprob)), node.score.toFixed(3), node.fate])))];
    });
  }
}

// Candidates as a tree from left to right: a column has those of one step, the highest score first. A dropped candidate is
// pale; the best text is bold.
export function drawTree({ nodes, sequences }) {
  const depth = [];
  nodes.forEach((node, i) => (depth[i] = node.parent < 0 ? 0 : depth[node.parent] + 1));
  const columns = Array.from({ length: Math.max(...depth) + 1 }, () => []);
  nodes.forEach((_, i) => columns[depth[i]].push(i));
  const row = [];
  columns.forEach((column) => column.sort((a, b) => nodes[b].score - nodes[a].score).forEach((i, rank) => (row[i] = rank)));
  const rows = Math.max(...columns.map((column) => column.length));
  row[0] = (rows - 1) / 2;
  const best = new Set();
  for (let i = sequences[0]?.node ?? 0; i >= 0; i = nodes[i].parent) best.add(i);
  const [dx, dy, pad, cell] = [150, 26, 12, 106]; // a cell has a token and its probability; a curve leads to the next
  const width = pad * 2 + Math.max(...depth) * dx + cell + 4;
  const height = pad * 2 + rows * dy;
  const X = (i) => pad + depth[i] * dx;
  const Y = (i) => pad + row[i] * dy + dy / 2;
  const tree = svg("svg", { width, height, role: "img", "aria-label": `Tree of a beam search with ${nodes.length - 1} candidates` });
  const colour = (i) => (best.has(i) ? "var(--accent)" : nodes[i].fate === "finished" ? "var(--good)" : "var(--quiet)");
  nodes.forEach((node, i) => {
    if (node.parent < 0) return;
    const [x0, x1] = [X(node.parent) + (node.parent ? cell + 2 : 8), X(i)];
    tree.append(svg("path", { d: `M${x0} ${Y(node.parent)}C${x0 + 24} ${Y(node.parent)} ${x1 - 24} ${Y(i)} ${x1} ${Y(i)}`, fill: "none", stroke: colour(i), "stroke-width": best.has(i) ? 2.4 : 0.6 + 2.4 * Math.exp(node.logprob), "stroke-opacity": node.fate === "dropped" ? 0.3 : 0.9 }));
  });
  nodes.forEach((node, i) => {
    if (node.parent < 0) { tree.append(svg("circle", { cx: X(i) + 4, cy: Y(i), r: 4, fill: "var(--accent)" })); return; }
    const shown = node.text.trim() || JSON.stringify(node.text);
    tree.append(svg("g", { opacity: node.fate === "dropped" ? 0.5 : 1 },
      svg("title", { text: `${shown}: ${percent(Math.exp(node.logprob))}, score ${node.score.toFixed(3)}, ${node.fate}` }),
      svg("text", { x: X(i) + 4, y: Y(i) + 4, "font-size": 12, class: "mono", "font-weight": best.has(i) ? 700 : 400, text: shown.length > 9 ? `${shown.slice(0, 8)}…` : shown }),
      svg("text", { x: X(i) + cell, y: Y(i) + 4, "font-size": 10, class: "quiet", "text-anchor": "end", text: node.fate === "finished" ? "end" : percent(Math.exp(node.logprob)) })));
  });
  return el("div", { class: "tree", tabindex: 0, role: "region", "aria-label": "Beams" }, tree);
}
