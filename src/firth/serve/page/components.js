// What all tabs are made of: fields, sliders, bars, chips, canvases.

import { count, el, newId, percent, svg, tokenName } from "/page/dom.js";

export function field(label, input) {
  return el("label", { class: "field" }, el("span", { text: label }), input);
}

export function textArea(label, value, onInput, rows = 3) {
  const area = el("textarea", { rows, value, dir: "auto", spellcheck: "false", on: { input: () => onInput(area.value) } });
  return { box: field(label, area), area };
}

export function slider(label, { min, max, step, value, format = String, onInput }) {
  const output = el("output", { text: format(value) });
  const input = el("input", { type: "range", min, max, step, "aria-label": label, on: { input: () => { output.textContent = format(Number(input.value)); onInput(Number(input.value)); } } });
  input.value = value;
  return el("div", { class: "slider" }, el("span", { "aria-hidden": "true" }, label, output), input);
}

export function choice(label, options, value, onChange) {
  const select = el("select", { on: { change: () => onChange(select.value) } }, options.map(([key, text]) => el("option", { value: key, text })));
  select.value = value;
  return el("label", {}, el("span", { class: "group-label", text: label }), select);
}

// A group of buttons of which one is pressed.
export function segments(label, options, value, onChange) {
  const buttons = options.map(([key, text]) => el("button", { type: "button", "aria-pressed": String(key === value), text, on: { click: () => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === key)));
    onChange(key);
  } } }));
  return el("div", { class: "buttons", role: "group", "aria-label": label }, buttons);
}

// Many elements are one tab stop: Tab reaches the current one, and keys move from it. `next` returns the index that a key
// leads to; `onMove` is called with it. Returns how to make another one current.
const alongList = (index, key, count) => ({ ArrowDown: index + 1, ArrowRight: index + 1, ArrowUp: index - 1, ArrowLeft: index - 1, Home: 0, End: count - 1 })[key];
export function roving(elements, { current = 0, next = alongList, onMove = null } = {}) {
  let at = current;
  const set = (index) => {
    elements[at]?.setAttribute("tabindex", "-1");
    at = index;
    elements[at]?.setAttribute("tabindex", "0");
  };
  elements.forEach((element, index) => {
    element.setAttribute("tabindex", "-1");
    element.addEventListener("focus", () => set(index));
    element.addEventListener("keydown", (event) => {
      const to = next(index, event.key, elements.length);
      if (to === undefined || !elements[to]) return;
      event.preventDefault();
      elements[to].focus();
      onMove?.(to);
    });
  });
  set(at);
  return set;
}

// What a button of HTML does by itself: Enter and Space are a click. For elements of SVG.
export const onKeyClick = (call) => (event) => {
  if (event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  call();
};

// The numbers under a pointer. A screen reader reads out what a key has reached, and nothing while a pointer moves.
export function readout() {
  const box = el("div", { class: "readout" });
  const tell = (content, byKey = false) => {
    box.setAttribute("aria-live", byKey ? "polite" : "off");
    box.replaceChildren(...[content].flat());
  };
  return { box, tell };
}

// A closed part of the page; what is in it is made when it is opened first.
export function details(summary, make) {
  const box = el("details", { on: { toggle: () => { if (box.open && box.children.length === 1) box.append(make()); } } }, el("summary", { text: summary }));
  return box;
}

export const button = (text, onClick, properties) => el("button", { type: "button", text, ...properties, on: { click: onClick } });

export function card(title, note, ...children) {
  const id = newId("card");
  return el("section", { class: "card", "aria-labelledby": id },
    el("header", {}, el("h3", { id, text: title }), note ? el("span", { class: "note" }, note) : null), ...children);
}

export function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))));
}

export function table(columns, rows, caption) {
  const isNumber = columns.map((_, i) => rows.length > 0 && rows.every((row) => typeof row[i] === "number"));
  const show = (value) => (typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : typeof value === "number" ? count(value) : value);
  return el("div", { class: "scroll" }, el("table", {}, caption ? el("caption", { class: "note", text: caption }) : null,
    el("thead", {}, el("tr", {}, columns.map((name, i) => el("th", { scope: "col", class: isNumber[i] ? "number" : null, text: name })))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, i) => (value instanceof Node ? el("td", {}, value) : el("td", { class: isNumber[i] ? "number" : null, text: show(value) }))))))));
}

// Bars: items {name, p, ghost?, cut?, rest?, best?, label?}. With onPick each is a button; arrow keys move between them.
export function bars(items, { onPick = null, label = "Probabilities", max = null } = {}) {
  const top = max ?? Math.max(1e-9, ...items.filter((item) => !item.rest).map((item) => Math.max(item.p, item.ghost ?? 0)));
  const list = el("ul", { class: "bars", "aria-label": label });
  items.forEach((item, index) => {
    const classes = ["bar", item.cut && "cut", item.rest && "rest", item.best && "best"].filter(Boolean).join(" ");
    const inside = [
      el("span", { class: "name" }, item.rest ? item.name : tokenName(item.name)),
      svg("svg", { class: "track", "aria-hidden": "true" },
        svg("rect", { class: "fill", width: `${Math.min(100, (100 * item.p) / top)}%`, style: item.colour ? { "--colour": item.colour } : null }),
        item.ghost === undefined ? null : svg("rect", { class: "ghost", x: `${(100 * item.ghost) / top}%`, transform: "translate(-2)" })),
      el("span", { class: "value", text: item.label ?? percent(item.p) }),
    ];
    const pickable = onPick && !item.rest;
    const name = `${item.name.trim() || JSON.stringify(item.name)}, ${item.label ?? percent(item.p)}`;
    const bar = pickable
      ? el("button", { type: "button", class: classes, title: item.title, "aria-label": name, on: { click: () => onPick(item, index) } }, inside)
      : el("div", { class: classes, title: item.title }, inside);
    list.append(el("li", {}, bar));
  });
  roving([...list.querySelectorAll("button")]);
  return list;
}

// Tokens in a row. What their colours say is in a table too: no colour and no tooltip reaches everybody.
// A line may end after each.
export const chips = (label, children) => el("div", { class: "chips", dir: "auto", role: "group", "aria-label": label }, children.flat().flatMap((child) => [child, el("wbr")]));

// Chips: tokens in colours that change with each word or token.
export function chip(text, colour, properties, ...children) {
  const { class: extra, ...rest } = properties ?? {};
  const shown = text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥").replace(/^ (?=\S)/, "\u00a0"); // no line ends in a token
  return el("span", { ...rest, class: ["chip", colour === null ? null : `t${colour % 6}`, extra].filter(Boolean).join(" ") }, shown, ...children);
}

// entries: [colour, text, style of the swatch?]
export function legend(entries) {
  return el("ul", { class: "legend" }, entries.map(([colour, text, style]) => el("li", {}, el("span", { class: `swatch ${style ?? ""}`.trim(), style: { "--colour": colour } }), text)));
}

export const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function parseColour(name) {
  const hex = cssColour(name).replace("#", "");
  return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// Draw values in [0, 1], row by row, as one pixel each: from the page's colour to the accent.
export function paintCells(canvas, values, rows, columns, gamma = 0.6) {
  canvas.width = Math.max(columns, 1);
  canvas.height = Math.max(rows, 1);
  const low = parseColour("--raised");
  const high = parseColour("--accent");
  const image = new ImageData(canvas.width, canvas.height);
  for (let i = 0; i < rows * columns; i++) {
    const share = Math.min(1, Math.max(0, values[i])) ** gamma;
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = low[c] + (high[c] - low[c]) * share;
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

export function decodeCells(text) {
  const binary = atob(text);
  const cells = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) cells[i] = binary.charCodeAt(i);
  return cells;
}

// What stands where an answer would be while a text is missing.
export const missing = (message = "Type a text.") => el("p", { class: "note", text: message });

// The picture of an attention mask, with its name below.
export function maskFigure(mask, size = 110) {
  const canvas = el("canvas", { class: "matrix", role: "img", "aria-label": `attention mask: ${mask.name}`, style: { width: `${size}px`, height: `${Math.max(8, Math.round((size * mask.rows) / mask.columns))}px`, border: "1px solid var(--line)" } });
  paintCells(canvas, Array.from(decodeCells(mask.cells)), mask.rows, mask.columns, 1);
  const layers = mask.layers.length ? `${mask.layers.length === 1 ? "layer" : "layers"} ${ranges(mask.layers)}` : "";
  return el("figure", { class: "figure mask-figure" }, canvas, el("figcaption", {}, mask.name, layers ? el("br") : null, layers));
}

export function ranges(numbers) {
  const parts = [];
  for (const n of numbers) {
    const last = parts.at(-1);
    if (last && n === last[1] + 1) last[1] = n;
    else parts.push([n, n]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
}

const latest = new WeakMap(); // box -> the last `make` that was begun for it

// Replace what a box shows by the result of a promise; an error becomes a line in it. Returns whether no later call has
// taken the box over: then the result of this one is not shown.
export async function show(box, make) {
  latest.set(box, make);
  box.classList.add("busy");
  box.setAttribute("aria-busy", "true");
  let children = null;
  try {
    children = [await make()].flat(Infinity).filter(Boolean);
  } catch (error) {
    if (error?.name !== "AbortError") {
      children = [el("p", { class: "error", role: "alert", text: error.message })];
      if (!(error?.constructor?.name === "ApiError")) console.error(error);
    }
  }
  if (latest.get(box) !== make) return false;
  if (children) box.replaceChildren(...children);
  box.classList.remove("busy");
  box.removeAttribute("aria-busy");
  return true;
}
