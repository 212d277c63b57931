// Elements, and nothing else: every text is set by textContent, so no text of a model can become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, call] of Object.entries(value)) element.addEventListener(event, call);
    else if (name === "style") for (const [key, style] of Object.entries(value)) element.style.setProperty(key, style);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const el = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const svg = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

let lastId = 0;
export const newId = (prefix) => `${prefix}-${++lastId}`;

export function debounce(call, milliseconds) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), milliseconds);
  };
}

export const percent = (p) => (p >= 0.9995 ? "100%" : p >= 0.1 ? `${(100 * p).toFixed(1)}%` : p >= 0.001 ? `${(100 * p).toFixed(2)}%` : p > 0 ? "<0.1%" : "0%");
export const count = (n) => n.toLocaleString("en");
export const shortCount = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(1)}B` : n >= 1e6 ? `${(n / 1e6).toFixed(1)}M` : n >= 1e4 ? `${Math.round(n / 1e3)}k` : count(n));

// A token as a name: a leading space is drawn, and so is a line break.
export function tokenName(text) {
  const shown = text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
  if (!shown.startsWith(" ")) return [shown];
  return [el("span", { class: "space", text: "·" }), shown.slice(1)];
}

// The models that are shown and can do something; where none can, all that can.
export function choose(shown, state, isAble) {
  const able = shown.filter(isAble);
  return able.length ? able : state.models.filter(isAble);
}

// The width of a picture: as wide as it should be, or as there is room for beside the frames around it.
export const roomFor = (width, frames = 60) => Math.max(240, Math.min(width, document.getElementById("panel").clientWidth - frames));

let statusTimer = 0;
export function say(message) {
  const status = document.getElementById("status");
  status.textContent = message;
  clearTimeout(statusTimer);
  statusTimer = setTimeout(() => (status.textContent = ""), 4000);
}
