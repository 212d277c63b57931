// Fill: words for the blanks of a sentence, and what another word changes.

import { post } from "/page/api.js";
import { bars, button, card, field, show, textArea } from "/page/components.js";
import { choose, debounce, el, percent, say } from "/page/dom.js";
import { keepFields } from "/page/keep.js";

export const name = "fill";
export const title = "Fill";

const BLANK = /\[MASK\]|<mask>|___+/;
const state = { text: "The ___ is near the river.", changed: "", word: -1 };
const SHOWN = 8;
keepFields("fill", state);

export function draw(panel, shown, page) {
  const models = choose(shown, page, (model) => model.abilities.includes("fill"));
  const boxes = models.map((model) => ({ model, box: el("div") }));
  const words = el("div", { class: "words", role: "group", "aria-label": "Words of the sentence" });
  const changedInput = el("input", { type: "text", value: state.changed, on: { input: () => { state.changed = changedInput.value; refresh(); } } });
  const changedBox = el("div", { hidden: !state.changed }, field("The same sentence, changed", changedInput), el("p", { class: "note", text: "Bars: the changed sentence. The orange mark is where the probability was before." }),
    el("div", { class: "controls" }, button("No change", () => { state.changed = ""; changedInput.value = ""; changedBox.hidden = true; refresh(); })));
  const { box, area } = textArea("Sentence: ___ is a blank", state.text, (value) => { state.text = value; drawWords(); refresh(); }, 2);

  function drawWords() {
    const parts = state.text.split(/\s+/).filter(Boolean);
    words.replaceChildren(el("span", { class: "note", text: "Click a word to change it:" }), ...parts.map((word, i) => button(word, () => {
      if (BLANK.test(word)) { say("This is a blank."); return; }
      const changed = [...parts];
      changed[i] = "…";
      state.changed = changed.join(" ");
      changedBox.hidden = false;
      changedInput.value = state.changed;
      changedInput.focus();
      const at = changedInput.value.indexOf("…");
      changedInput.setSelectionRange(at, at + 1);
    })));
  }

  const refresh = debounce(() => boxes.forEach(({ model, box }) => show(box, () => make(model))), 300);

  async function make(model) {
    const hasChange = BLANK.test(state.changed) && !state.changed.includes("…");
    const found = await post("/fill", { model: model.id, text: hasChange ? [state.text, state.changed] : state.text, top: 100 }, `fill-${model.id}`);
    const [before, after] = found.results;
    return (hasChange && after.blanks.length === before.blanks.length ? after : before).blanks.map((blank, i) => [
      el("h3", { text: before.blanks.length > 1 ? `Blank ${i + 1}` : "Blank" }),
      hasChange ? compare(before.blanks[i].guesses, blank.guesses) : bars(blank.guesses.slice(0, SHOWN).map((guess, k) => ({ name: guess.text, p: guess.probability, best: k === 0 })), { label: `Blank ${i + 1}`, onPick: (item) => put(i, item.name) }),
    ]);
  }

  function compare(before, after) {
    const old = new Map(before.map((guess) => [guess.text, guess.probability]));
    const now = new Map(after.map((guess) => [guess.text, guess.probability]));
    const names = [...new Set([...after.slice(0, SHOWN), ...before.slice(0, 4)].map((guess) => guess.text))];
    const items = names.map((name) => ({ name, p: now.get(name) ?? 0, ghost: old.get(name) ?? 0 })).sort((a, b) => b.p - a.p);
    const moved = items.reduce((best, item) => (Math.abs(item.p - item.ghost) > Math.abs(best.p - best.ghost) ? item : best), items[0]);
    return [bars(items.map((item) => ({ ...item, title: `${percent(item.ghost)} before` })), { label: "Probabilities after the change" }),
      el("p", { class: "note", text: `Most changed: ${moved.name}, from ${percent(moved.ghost)} to ${percent(moved.p)}.` })];
  }

  function put(blank, word) {
    let index = -1;
    state.text = state.text.replace(new RegExp(BLANK, "g"), (found) => (++index === blank ? word : found));
    area.value = state.text;
    drawWords();
    if (BLANK.test(state.text)) refresh();
    else say("Every blank is filled. Write ___ for a new one.");
  }

  drawWords();
  panel.replaceChildren(
    el("p", { class: "lead", text: "An encoder gives the likeliest words for each blank; an encoder-decoder writes one span for each. Click a bar to put it in." }),
    box, words, changedBox,
    models.length ? el("div", { class: "columns" }, boxes.map(({ model, box }) => card(model.id, model.family, box))) : el("p", { text: "None of these models fills blanks. A decoder continues a text: see Write." }),
  );
  boxes.forEach(({ model, box }) => show(box, () => make(model)));
}
