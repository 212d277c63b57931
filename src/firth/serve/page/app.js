// The page: which models are shown, which tab is open, light or dark.

import { KeyError, get, mayAskForKey } from "/page/api.js";
import { el, shortCount } from "/page/dom.js";
import { keep } from "/page/keep.js";
import * as attention from "/page/attention.js";
import * as fill from "/page/fill.js";
import * as runs from "/page/runs.js";
import * as tasks from "/page/tasks.js";
import * as tokens from "/page/tokens.js";
import * as vectors from "/page/vectors.js";
import * as write from "/page/write.js";

const TABS = [write, fill, attention, vectors, tokens, tasks, runs];
const MAX_SHOWN = 3; // models that are shown at first
const panel = document.getElementById("panel");
const state = { models: [], shown: new Set(), tab: null, hasRuns: false };
let close = null; // what the open tab has to stop
let before = { tab: "", models: [] }; // a reload
keep("page", () => ({ tab: state.tab?.name ?? "", models: [...state.shown] }), (value) => (before = value));

const THEMES = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme");
function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  themeButton.textContent = `Theme: ${theme}`;
  localStorage.setItem("firth-theme", theme);
}
themeButton.addEventListener("click", () => {
  const now = localStorage.getItem("firth-theme") ?? "auto";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  draw();
});
setTheme(localStorage.getItem("firth-theme") ?? "auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

function drawModels() {
  const box = document.getElementById("models");
  box.replaceChildren(...state.models.map((model) => el("button", {
    type: "button", class: "model-button", "aria-pressed": String(state.shown.has(model.id)),
    title: "Show or hide this model",
    on: { click: (event) => {
      if (!state.shown.delete(model.id)) state.shown.add(model.id);
      event.currentTarget.setAttribute("aria-pressed", String(state.shown.has(model.id)));
      draw();
    } },
  }, model.id, el("small", { text: `${model.family} ${model.architecture}, ${shortCount(model.parameters)}` }))));
}

function drawTabs() {
  const list = document.getElementById("tabs");
  const hadFocus = list.contains(document.activeElement);
  list.replaceChildren(...TABS.filter((tab) => tab !== runs || state.hasRuns).map((tab) => el("button", {
    type: "button", role: "tab", id: `tab-${tab.name}`, "aria-selected": String(tab === state.tab), "aria-controls": "panel",
    tabindex: tab === state.tab ? "0" : "-1", text: tab.title, on: { click: () => select(tab) },
  })));
  const selected = list.querySelector("[aria-selected=true]");
  selected?.scrollIntoView({ block: "nearest", inline: "nearest" }); // a phone shows some of the tabs
  if (hadFocus) selected?.focus();
}

document.getElementById("tabs").addEventListener("keydown", (event) => {
  const buttons = [...event.currentTarget.querySelectorAll("[role=tab]")];
  const at = buttons.indexOf(document.activeElement);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
  if (next === undefined) return;
  const target = buttons[(next + buttons.length) % buttons.length];
  event.preventDefault();
  target.click();
  document.getElementById(target.id).focus();
});

function select(tab) {
  state.tab = tab;
  if (location.hash !== `#${tab.name}`) history.replaceState(null, "", `#${tab.name}`);
  drawTabs();
  draw();
}

function draw() {
  if (!state.tab) return;
  close?.();
  panel.setAttribute("aria-labelledby", `tab-${state.tab.name}`);
  const shown = state.models.filter((model) => state.shown.has(model.id));
  close = state.tab.draw(panel, shown, state) ?? null;
}

// The link changes no address: `#panel` is no tab, and a reload would open another one.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  panel.focus();
});

window.addEventListener("hashchange", () => {
  const tab = TABS.find((t) => `#${t.name}` === location.hash);
  if (tab && tab !== state.tab) select(tab);
});

async function start() {
  try {
    state.models = (await get("/v1/models")).data;
    state.hasRuns = (await get("/health")).has_runs;
  } catch (error) {
    const retry = error instanceof KeyError ? el("button", { type: "button", text: "Give a key", on: { click: () => { mayAskForKey(); start(); } } }) : "";
    panel.replaceChildren(el("p", { class: "error", role: "alert", text: error.message }), retry);
    return;
  }
  const known = state.models.map((model) => model.id);
  const chosen = before.models.filter((id) => known.includes(id));
  (chosen.length ? chosen : known.slice(0, MAX_SHOWN)).forEach((id) => state.shown.add(id));
  drawModels();
  const find = (named) => TABS.find((tab) => tab.name === named && (tab !== runs || state.hasRuns));
  const wanted = find(location.hash.slice(1)) ?? find(before.tab);
  const able = (ability) => state.models.some((model) => model.abilities.includes(ability));
  select(wanted ?? (!state.models.length ? runs : able("generate") ? write : able("fill") ? fill : tokens));
}

start();
