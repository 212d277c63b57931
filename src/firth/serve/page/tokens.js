// Tokens: a text under the tokenizers of the models, and as each pretraining objective sees it.

import { post } from "/page/api.js";
import { button, card, chip, chips, choice, details, facts, legend, maskFigure, missing, show, slider, table, textArea } from "/page/components.js";
import { debounce, el, percent } from "/page/dom.js";
import { keepFields } from "/page/keep.js";

export const name = "tokens";
export const title = "Tokens";

const state = {
  text: "The bat flew over the harbour. A bat and a ball cost 1.10 pounds.\n\nThe unbelievable garden is near the river.",
  rate: 0, draw: 0, model: "", kind: "all",
};
keepFields("tokens", state);

export function draw(panel, shown) {
  const boxes = shown.map((model) => ({ model, box: el("div") }));
  const views = el("div");
  const refreshTokens = debounce(() => boxes.forEach(({ model, box }) => show(box, () => tokenView(model))), 200);
  const refreshViews = debounce(() => show(views, objectiveViews), 200);
  const { box } = textArea("Text", state.text, (value) => { state.text = value; refreshTokens(); refreshViews(); }, 4);
  if (!shown.some((model) => model.id === state.model)) state.model = shown[0]?.id ?? "";
  const drawn = el("span", { class: "note", text: `draw ${state.draw + 1}` });

  async function objectiveViews() {
    if (!state.model) return el("p", { text: "No model is shown." });
    if (!state.text.trim()) return missing();
    const body = { model: state.model, text: state.text, draw: state.draw, ...(state.rate ? { rate: state.rate } : {}) };
    const found = await post("/objectives", body, "objectives");
    const chosen = found.objectives.filter((view) => state.kind === "all" || view.architectures.includes(state.kind));
    const fits = chosen.filter((view) => !view.problem);
    const used = new Set(fits.flatMap((view) => view.sequences.flatMap((s) => s.tokens.map((t) => t.kind))));
    const others = chosen.filter((view) => view.problem);
    return [
      legendOf(found.kinds, used),
      el("div", { class: "columns wide" }, fits.map(objectiveCard)),
      others.length ? el("details", {}, el("summary", { text: `${others.length} objectives need another tokenizer or text` }), table(["objective", "why"], others.map((view) => [view.name, view.problem]))) : null,
    ];
  }

  panel.replaceChildren(
    el("p", { class: "lead", text: "A tokenizer cuts a text into the pieces that its model knows. Each token has its colour. A dot continues a character of several tokens; a dashed frame marks a piece that is unknown: the model cannot see what it was. Ids and bytes are in the table below." }),
    box,
    el("div", { class: "columns" }, boxes.map(({ model, box }) => card(model.id, `${model.tokenizer}, ${model.vocab_size.toLocaleString("en")} tokens`, box))),
    el("h2", { text: "The same text as each objective sees it" }),
    el("p", { class: "lead", text: "A blank line begins a new document, and A ||| B is a pair of translations. The small squares are attention masks: the token of a row attends to the blue columns." }),
    el("div", { class: "controls" },
      choice("Tokenizer of", shown.map((model) => [model.id, model.id]), state.model, (value) => { state.model = value; refreshViews(); }),
      choice("Objectives for", [["all", "all models"], ["encoder", "encoders"], ["decoder", "decoders"], ["encoder-decoder", "encoder-decoders"]], state.kind, (value) => { state.kind = value; refreshViews(); }),
      slider("mask rate", { min: 0, max: 0.9, step: 0.05, value: state.rate, format: (v) => (v ? `${Math.round(100 * v)}%` : "as published"), onInput: (v) => { state.rate = v; refreshViews(); } }),
      el("div", { class: "buttons" }, button("Next draw", () => { state.draw++; drawn.textContent = `draw ${state.draw + 1}`; refreshViews(); }), drawn)),
    views,
  );
  boxes.forEach(({ model, box }) => show(box, () => tokenView(model)));
  show(views, objectiveViews);
}

// Byte-level BPE spells each byte as a printable character: itself where it is one, else from U+0100 on.
const byteSpellings = new Map();
for (let b = 0, next = 256; b < 256; b++) byteSpellings.set(String.fromCodePoint((b > 32 && b < 127) || (b > 160 && b !== 173) ? b : next++), b);

// The bytes of a token: of a character that several tokens make up, each has its own; a byte of Unigram is written <0xE7>.
export function bytesOf(model, token, text) {
  const byte = /^<0x([0-9A-F]{2})>$/i.exec(token);
  if (byte) return [parseInt(byte[1], 16)];
  const spelled = [...token].map((c) => byteSpellings.get(c));
  return model.tokenizer === "byte-bpe" && !spelled.includes(undefined) ? spelled : [...new TextEncoder().encode(text)];
}

async function tokenView(model) {
  if (!state.text.trim()) return missing();
  const { results: [found] } = await post("/tokenize", { model: model.id, text: state.text }, `tokenize-${model.id}`);
  const bytes = new TextEncoder().encode(state.text).length;
  const words = state.text.split(/\s+/).filter(Boolean);
  const characters = [...state.text];
  const slice = ([start, end]) => characters.slice(start, end).join("");
  let colour = -1;
  const coloured = [];
  let last = 0;
  found.tokens.forEach((token, i) => {
    const offset = found.offsets[i];
    if (!offset) return;
    const [start, end] = offset;
    if (start > last) coloured.push(chip(slice([last, start]), null));
    const text = slice([Math.max(start, last), end]);
    colour++;
    const hex = bytesOf(model, token, slice([start, end])).map((b) => b.toString(16).padStart(2, "0")).join(" ");
    const isUnknown = found.ids[i] === model.unknown_id;
    coloured.push(chip(text || (end > start ? "·" : token), isUnknown ? null : colour, { class: isUnknown ? "unknown" : "", title: `${token}, id ${found.ids[i]}, bytes ${hex || "none of its own"}` }));
    last = Math.max(last, end);
  });
  const unknown = found.ids.filter((id) => id === model.unknown_id).length;
  return [
    facts([["tokens", found.ids.length], ...(unknown ? [["unknown", `${unknown} (${percent(unknown / found.ids.length)})`]] : []), ["words", words.length], ["pieces per word", words.length ? (found.ids.length / words.length).toFixed(2) : "–"], ["bytes per token", found.ids.length ? (bytes / found.ids.length).toFixed(2) : "–"]]),
    chips(`Tokens of ${model.id}`, coloured),
    details("Token by token", () => table(["token", "id", "text", "bytes"], found.tokens.map((token, i) => {
      const text = found.offsets[i] ? slice(found.offsets[i]) : "";
      return [token, found.ids[i], JSON.stringify(text), bytesOf(model, token, text).length];
    }))),
  ];
}

const KIND_COLOURS = { masked: "--t4", random: "--t5", kept: "--t2", target: "--t3", sentinel: "--t1", label: "--t0", hidden: "--t4", deleted: "--t5", number: "--line", special: "--line" };

function legendOf(kinds, used) {
  return legend(Object.entries(kinds).filter(([kind]) => used.has(kind)).map(([kind, meaning]) => [`var(${KIND_COLOURS[kind]})`, `${kind}: ${meaning}`]));
}

function objectiveCard(view) {
  const note = [view.architectures.join(", "), view.rates.targets === undefined ? null : `${Math.round(100 * view.rates.targets)}% of the text predicted`].filter(Boolean).join(" · ");
  return card(view.name, note,
    view.sequences.map((sequence) => [
      view.sequences.length > 1 ? el("div", { class: "group-label", text: sequence.name }) : null,
      chips(`${view.name}: ${sequence.name}`, sequence.tokens.map((token) => chip(token.text, null, { class: `${token.kind === "text" ? "" : token.kind}${token.is_target ? " best" : ""}`, title: `${token.kind}, id ${token.id}` }, token.original ? el("span", { class: "was", text: token.original }) : null))),
    ]),
    view.notes.map((text) => el("p", { class: "note", text })),
    view.rates.targets === 0 ? el("p", { class: "note", text: "This draw hides nothing: the number of spans varies by chance. Press Next draw." }) : null,
    el("div", { class: "figures" }, view.masks.map((mask) => maskFigure(mask, 84))),
    details("Token by token", () => table(["sequence", "token", "kind", "replaces", "loss", "id"], view.sequences.flatMap((sequence) => sequence.tokens.map((token) => [sequence.name, JSON.stringify(token.text), token.kind, token.original, token.is_target ? "yes" : "", token.id])))),
    details("Settings", () => el("p", { class: "note", text: view.description })));
}
