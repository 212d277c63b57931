// Fill: words for the blanks of a sentence, and what another word changes.

import { post } from "/page/api.js";
import { bars, button, card, details, field, missing, show, table, textArea } from "/page/components.js";
import { choose, debounce, el, percent, say } from "/page/dom.js";
import { keepFields } from "/page/keep.js";

export const name = "fill";
export const title = "Fill";

const BLANK = /\[MASK\]|<mask>|___+/;
const state = { text: "The ___ is near the river.", changed: "" };
const SHOWN = 8;
const TOP = 100; // words that are fetched
keepFields("fill", state);

export function draw(panel, shown, page) {
  const models = choose(shown, page, (model) => model.abilities.includes("fill"));
  const boxes = models.map((model) => ({ model, box: el("div") }));
  const words = el("div", { class: "words", role: "group", "aria-label": "Words of the sentence" });
  const changedInput = el("input", { type: "text", dir: "auto", value: state.changed, on: { input: () => { state.changed = changedInput.value; refresh(); } } });
  const changedBox = el("div", { hidden: !state.changed }, field("The same sentence, changed", changedInput), el("p", { class: "note", text: "Bars: the changed sentence. The orange mark is where the probability was before." }),
    el("div", { class: "controls" }, button("No change", () => { noChange(); refresh(); })));
  const { box, area } = textArea("Sentence: ___ is a blank", state.text, (value) => { state.text = value; noChange(); drawWords(); refresh(); }, 2);

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
    if (!BLANK.test(state.text)) return missing(state.text.trim() ? "Write ___ where a word is missing." : "Type a sentence with ___ in it.");
    const hasChange = BLANK.test(state.changed) && !state.changed.includes("…");
    const found = await post("/fill", { model: model.id, text: hasChange ? [state.text, state.changed] : state.text, top: TOP, compare: hasChange }, `fill-${model.id}`);
    const [before, after] = found.results;
    if (!hasChange) return before.blanks.map((blank, i) => [heading(before, i), plain(blank, i, (item) => put(i, item.name))]);
    if (after.blanks.length !== before.blanks.length) {
      return [el("p", { class: "note", text: `The changed sentence has ${plural(after.blanks.length)}, the first ${plural(before.blanks.length)}: these bars are of the changed one, and there is nothing to compare.` }),
        after.blanks.map((blank, i) => [heading(after, i), plain(blank, i)])];
    }
    const isSpan = before.blanks[0].guesses.length === 1;
    return after.blanks.map((blank, i) => [heading(after, i), (isSpan ? compareSpans : compareWords)(before.blanks[i].guesses, blank.guesses)]);
  }

  const plural = (n) => (n === 1 ? "1 blank" : `${n} blanks`);
  const heading = ({ blanks }, i) => el("h3", { text: blanks.length > 1 ? `Blank ${i + 1}` : "Blank" });
  // An encoder's words are all of one distribution; a span has the probability that the model gives to all of its tokens.
  const plain = ({ guesses }, i, onPick = null) => {
    const items = guesses.slice(0, SHOWN).map((guess, k) => ({ name: guess.text, p: guess.probability, best: k === 0 }));
    if (guesses.length > 1) items.push({ name: "all others", p: Math.max(0, items.reduce((left, item) => left - item.p, 1)), rest: true });
    return bars(items, { label: `Blank ${i + 1}`, onPick });
  };

  // Both lists have the same words; two tokens, such as one with a space before it, may be one word.
  const sumByWord = (guesses) => guesses.reduce((sums, { text, probability }) => sums.set(text, (sums.get(text) ?? 0) + probability), new Map());

  function compareWords(before, after) {
    const [old, now] = [sumByWord(before), sumByWord(after)];
    const likeliest = (sums, n) => [...sums].sort((a, b) => b[1] - a[1]).slice(0, n).map(([name]) => name);
    const names = [...new Set([...likeliest(now, SHOWN), ...likeliest(old, 4)])];
    const items = names.map((name) => ({ name, p: now.get(name), ghost: old.get(name) })).sort((a, b) => b.p - a.p);
    const moved = items.reduce((best, item) => (Math.abs(item.p - item.ghost) > Math.abs(best.p - best.ghost) ? item : best), items[0]);
    return [bars(items.map((item) => ({ ...item, title: `${percent(item.ghost)} before` })), { label: "Probabilities after the change" }),
      el("p", { class: "note", text: `Most changed: ${moved.name}, from ${percent(moved.ghost)} to ${percent(moved.p)}.` }),
      details("Before and after", () => table(["word", "before", "after"], items.map((item) => [item.name, percent(item.ghost), percent(item.p)])))];
  }

  // A model that writes spans gives one, by greedy search; others have no probability.
  function compareSpans([before], [after]) {
    return [bars([{ name: after.text, p: after.probability, best: true }], { label: "After the change", max: 1 }),
      el("p", { class: "note", text: before.text === after.text ? `The same words before, at ${percent(before.probability)}.` : `Before: ${before.text.trim() || "nothing"}, at ${percent(before.probability)}.` })];
  }

  function noChange() {
    state.changed = "";
    changedInput.value = "";
    changedBox.hidden = true;
  }

  function put(blank, word) {
    let index = -1;
    state.text = state.text.replace(new RegExp(BLANK, "g"), (found) => (++index === blank ? word : found));
    area.value = state.text;
    noChange();
    drawWords();
    refresh();
  }

  drawWords();
  panel.replaceChildren(
    el("p", { class: "lead", text: "An encoder gives the likeliest words for each blank; an encoder-decoder writes one span for each. Click a bar to put it in." }),
    box, words, changedBox,
    models.length ? el("div", { class: "columns" }, boxes.map(({ model, box }) => card(model.id, model.family, box))) : el("p", { text: "None of these models fills blanks. A decoder continues a text: see Write." }),
  );
  boxes.forEach(({ model, box }) => show(box, () => make(model)));
}
