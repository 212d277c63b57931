// Tasks: what a checkpoint was fine-tuned for. Classes with salience, tags as spans, answers in their context, texts with
// what each new token attends to.

import { post } from "/page/api.js";
import { clean, drawArcs } from "/page/attention.js";
import { bars, button, card, chip, chips, details, legend, missing, show, slider, table, textArea } from "/page/components.js";
import { choose, el, percent } from "/page/dom.js";
import { keepMap } from "/page/keep.js";

export const name = "tasks";
export const title = "Tasks";

const ONE_TEXT = { text: "The team won the match in the last minute." };
const EXAMPLES = {
  classify: ONE_TEXT,
  regress: { ...ONE_TEXT, second: "" },
  pair: { text: "A dog runs in the park.", second: "An animal is outside." },
  tag: { text: "Anna Smith lives in Paris." },
  "span-qa": { text: "Where does Anna live?", second: "Anna Smith was born in Rome. She lives in Paris." },
  choice: { text: "The glass fell on the floor.", second: "It broke.\nIt flew away." },
  "text-to-text": { text: "The cat is near the river." },
  extract: { text: "Anna Smith, born in 1990." },
  lm: { text: "Who are you?" },
  embed: { text: "A dog runs in the park.", second: "An animal is outside." },
};
const LABELS = { pair: ["First text", "Second text"], "span-qa": ["Question", "Context"], choice: ["Context", "Choices, one on each line"], embed: ["First text", "Second text"], regress: ["Text", "Second text (if the task compares two)"] };
const given = new Map(); // model id and task -> inputs
keepMap("inputs", given);
const MAX_ATTENDED = 48; // tokens of a text, and of its translation
const MAX_CLASSES = 20; // bars
const SALIENT = ["classify", "pair", "regress", "choice"];

export function draw(panel, shown, page) {
  const models = choose(shown, page, (model) => Object.keys(model.tasks).length > 0);
  const views = models.flatMap((model) => Object.entries(model.tasks).map(([task, kind]) => taskView(model, task, kind)));
  panel.replaceChildren(
    el("p", { class: "lead", text: "What the checkpoints were fine-tuned for. Salience is gradient times input: blue words speak for the label, orange ones against it." }),
    views.length ? el("div", { class: "columns" }, views) : el("p", {}, "None of these models was fine-tuned. ", el("code", { text: "firth finetune" }), " makes a classifier, a tagger or an answerer of any of them."),
  );
}

function taskView(model, task, kind) {
  const key = `${model.id}/${task}`;
  if (!given.has(key)) given.set(key, { ...(EXAMPLES[kind] ?? { text: "" }) });
  const input = given.get(key);
  const [first, second] = LABELS[kind] ?? ["Text"];
  const result = el("div");
  const ask = () => show(result, () => missingInput(input, kind) ?? (ANSWERS[kind] ?? unknown)(model, task, input, kind));
  const fields = [textArea(first, input.text, (value) => (input.text = value), 2).box];
  if (second) fields.push(textArea(second, input.second ?? "", (value) => (input.second = value), kind === "span-qa" ? 4 : 2).box);
  const box = card(model.id, task === kind ? kind : `${task} (${kind})`, fields,
    el("div", { class: "controls" }, button("Ask", ask, { class: "main", title: "Ctrl+Enter" })), result);
  box.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); } });
  if (ANSWERS[kind]) ask();
  return box;
}

// A line about what has to be typed first, or null.
function missingInput(input, kind) {
  const isTyped = (text) => Boolean(text?.trim());
  if (!isTyped(input.text)) return missing(LABELS[kind] ? `Type a text: ${LABELS[kind][0].toLowerCase()}.` : "Type a text.");
  if (kind === "choice" && input.second.split("\n").filter(isTyped).length < 2) return missing("Type two choices or more, one on each line.");
  if (["pair", "span-qa"].includes(kind) && !isTyped(input.second)) return missing(`Type a text: ${LABELS[kind][1].toLowerCase()}.`);
  return null;
}

const unknown = async (model, task, input, kind) => el("p", { class: "note", text: `The task ${kind} reads records: see /docs, or firth predict.` });

const inputOf = (input, kind) => (kind === "choice" ? [input.text, ...input.second.split("\n").filter((line) => line.trim())] : input.second?.trim() ? [input.text, input.second] : input.text);

async function classify(model, task, input, kind) {
  const value = inputOf(input, kind);
  const { results: [found] } = await post("/classify", { model: model.id, task, inputs: [value] }, `task-${model.id}-${task}`);
  const parts = [];
  if (found.score !== undefined) parts.push(el("p", {}, "Score: ", el("strong", { text: found.score.toFixed(3) })));
  else if (found.choice !== undefined) parts.push(bars(found.probabilities.map((p, i) => ({ name: value[1 + i], p, best: i === found.choice })), { label: "Choices", max: 1, onPick: (item) => explain(item.name) }));
  const salience = el("div");
  const explain = (label) => show(salience, async () => {
    const why = await post("/salience", { model: model.id, task, input: value, ...(label ? { label } : {}) }, `salience-${model.id}-${task}`);
    const part = why.num_windows > 1 ? el("p", { class: "note", text: `The text is longer than the model's row. It is read in ${why.num_windows} windows, the prediction is their mean, and this is the first.` }) : null;
    return [el("h3", { text: why.label ? `Salience for ${why.label}` : "Salience for the score" }), part, drawSalience(why)];
  });
  if (found.probabilities && found.choice === undefined) {
    const classes = Object.entries(found.probabilities).sort((a, b) => b[1] - a[1]); // JSON puts names of numbers first
    parts.push(bars(classes.slice(0, MAX_CLASSES).map(([name, p]) => ({ name, p, best: name === found.label })), { label: "Classes", max: 1, onPick: (item) => explain(item.name) }));
    parts.push(el("p", { class: "note", text: "Click a class for the salience of the words for it." }));
  } else if (found.choice !== undefined) {
    parts.push(el("p", { class: "note", text: "Click a choice for the salience of the words for it." }));
  }
  if (SALIENT.includes(kind)) explain(null);
  return [...parts, salience];
}

function drawSalience({ tokens, values }) {
  const top = Math.max(1e-9, ...values.map(Math.abs));
  const side = (value) => (value >= 0 ? "for" : "against");
  const shown = chips("Salience of the tokens", tokens.map((token, i) => {
    const share = Math.abs(values[i]) / top;
    const colour = values[i] >= 0 ? "var(--c0)" : "var(--c1)";
    const word = token.trim() || token;
    return [token.startsWith(" ") ? " " : "", el("span", { class: "chip", title: `${side(values[i])}: ${values[i].toFixed(4)}`, style: { background: `color-mix(in srgb, ${colour} ${Math.round(75 * share)}%, transparent)` } }, word)];
  }));
  const strongest = tokens.map((token, i) => [token, side(values[i]), values[i].toFixed(4)]).sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]));
  return [shown, details("Salience in numbers, the strongest first", () => table(["token", "speaks", "salience"], strongest))];
}

async function tag(model, task, input) {
  const { results: [found] } = await post("/tag", { model: model.id, task, inputs: [input.text] }, `task-${model.id}-${task}`);
  if (found.words) return chips(`Tags of ${model.id}`, found.words.map((word, i) => chip(`${word} `, model.labels[task].indexOf(found.tags[i]), {}, el("span", { class: "tag", text: found.tags[i] }))));
  const types = [...new Set(model.labels[task].map((label) => label.replace(/^[BIESLU]-/, "")))].filter((label) => label !== "O");
  const characters = [...input.text];
  const parts = [];
  let last = 0;
  for (const span of found.spans) {
    parts.push(characters.slice(last, span.start).join(""));
    parts.push(el("mark", { class: "span-mark", title: span.probability === undefined ? null : percent(span.probability), style: { background: `var(--t${types.indexOf(span.type) % 6})`, color: "inherit" } }, span.text, el("small", { text: ` ${span.type}` })));
    last = span.end;
  }
  parts.push(characters.slice(last).join(""));
  return [el("div", { class: "passage", dir: "auto" }, parts), legend(types.map((type, i) => [`var(--t${i % 6})`, type])),
    found.spans.length ? table(["span", "type", "probability"], found.spans.map((s) => [s.text, s.type, s.probability === undefined || s.probability === null ? "–" : percent(s.probability)])) : el("p", { class: "note", text: "No span was found." })];
}

async function answer(model, task, input) {
  const found = await post("/answer", { model: model.id, task, question: input.text, context: input.second }, `task-${model.id}-${task}`);
  const context = [...input.second];
  const marked = found.start < 0 ? [input.second] : [context.slice(0, found.start).join(""), el("mark", { class: "answer", text: context.slice(found.start, found.end).join("") }), context.slice(found.end).join("")];
  return [el("p", {}, "Answer: ", el("strong", { text: found.answer || "(the context does not answer)" }), found.probability === null || found.probability === undefined ? "" : ` ${percent(found.probability)}`),
    el("div", { class: "passage", dir: "auto" }, marked)];
}

async function write(model, task, input) {
  const channel = `task-${model.id}-${task}`;
  const { results: [found] } = await post("/generate", { model: model.id, prompt: input.text }, channel);
  const attended = el("div");
  if (model.architecture === "encoder-decoder" && model.abilities.includes("attention") && found.tokens.length) {
    show(attended, () => drawCrossAttention(model, input, found, channel));
  }
  return [el("div", { class: "passage", dir: "auto", text: found.new }), attended];
}

// Which tokens of the source each new token attends to: the mean over the heads of a layer. The decoder writes token i
// when it has read those before it, so the weights of token i are in row i, which starts with the start token.
async function drawCrossAttention(model, input, found, channel) {
  const window = [0, MAX_ATTENDED];
  const answer = await post("/attention", { model: model.id, text: input.text, is_prompt: true, new_tokens: found.tokens, queries: window, keys: window }, `${channel}-attention`);
  const layers = answer.weights.cross;
  const names = { rowNames: answer.target_tokens.slice(1, MAX_ATTENDED + 1).map(clean), columnNames: answer.tokens.slice(...window).map(clean), offset: [0, 0] };
  const means = layers.map((heads) => names.rowNames.map((_, i) => heads[0][i].map((_, j) => heads.reduce((sum, head) => sum + head[i][j], 0) / heads.length)));
  const picture = el("div");
  const drawLayer = (layer) => {
    input.layer = layer;
    picture.replaceChildren(drawArcs({ ...names, weights: means[layer] }));
  };
  drawLayer(Math.min(input.layer ?? layers.length - 1, layers.length - 1));
  return [
    el("h3", { text: "What each new token attends to" }),
    el("p", { class: "note", text: `Cross-attention, the mean of ${layers[0].length} heads. New tokens are on the left, the text with its special tokens on the right.` }),
    layers.length > 1 ? slider("layer of the decoder", { min: 0, max: layers.length - 1, step: 1, value: input.layer, onInput: drawLayer }) : null,
    picture,
  ];
}

async function compare(model, task, input) {
  const texts = [input.text, input.second].filter(Boolean);
  const found = await post("/v1/embeddings", { model: model.id, input: texts }, `task-${model.id}-${task}`);
  const [a, b] = found.data.map((item) => item.embedding);
  const dot = (u, v) => u.reduce((sum, x, i) => sum + x * v[i], 0);
  return b ? el("p", {}, "Cosine: ", el("strong", { text: (dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b))).toFixed(3) })) : el("p", { class: "note", text: `A vector of ${a.length} numbers. Give a second text to compare.` });
}

const ANSWERS = { classify, pair: classify, regress: classify, choice: classify, tag, "span-qa": answer, "text-to-text": write, extract: write, lm: write, embed: compare };
