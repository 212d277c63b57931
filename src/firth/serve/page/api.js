// Requests to this server. A request of a channel ends the one before it in the same channel.

import { el } from "/page/dom.js";

const KEY = "firth-api-key";
const running = new Map();

export class ApiError extends Error {}
export const isAbort = (error) => error?.name === "AbortError";

function headers(hasBody) {
  const key = sessionStorage.getItem(KEY);
  return { ...(hasBody ? { "Content-Type": "application/json" } : {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

let asking = null; // a promise of whether a key was given, while the dialog is open
let hasDeclined = false; // then no request opens the dialog again, until somebody asks for it
export const mayAskForKey = () => (hasDeclined = false);

// Escape closes the dialog too: then there is no key, and the requests that wait for one fail.
function askForKey(refused) {
  asking ??= new Promise((done) => {
    const input = el("input", { type: "password", autocomplete: "off", required: true, "aria-label": "API key" });
    const dialog = el("dialog", { class: "dialog", "aria-label": "API key", on: { close: () => {
      const isGiven = dialog.returnValue === "key";
      if (isGiven) sessionStorage.setItem(KEY, input.value.trim());
      hasDeclined = !isGiven;
      asking = null;
      dialog.remove();
      done(isGiven);
    } } },
      el("form", { method: "dialog" },
        refused ? el("p", { class: "error", role: "alert", text: "The server does not accept this key." }) : null,
        el("p", { text: "This server needs an API key. It is kept until you close the tab." }), input,
        el("div", { class: "buttons" }, el("button", { class: "main", type: "submit", value: "key", text: "Use this key" }),
          el("button", { type: "button", text: "Cancel", on: { click: () => dialog.close() } }))));
    document.body.append(dialog);
    dialog.showModal();
    input.focus();
  });
  return asking;
}

export class KeyError extends ApiError {}

async function send(path, body, signal) {
  const key = sessionStorage.getItem(KEY);
  const request = { method: body === undefined ? "GET" : "POST", headers: headers(body !== undefined), signal };
  if (body !== undefined) request.body = JSON.stringify(body);
  let answer;
  try {
    answer = await fetch(path, request);
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new ApiError("The server does not answer. Is it still running?");
  }
  if (answer.status === 401) {
    const isStale = key !== sessionStorage.getItem(KEY); // another request has asked meanwhile
    if (isStale || (!hasDeclined && (await askForKey(key !== null)))) return send(path, body, signal);
    throw new KeyError("This server needs an API key, and none was given. Reload the page to give one.");
  }
  if (!answer.ok) {
    const found = await answer.json().catch(() => null);
    throw new ApiError(found?.error?.message ?? `The server answered ${answer.status}.`);
  }
  return answer;
}

function open(channel) {
  running.get(channel)?.abort();
  const controller = new AbortController();
  if (channel) running.set(channel, controller);
  return controller.signal;
}

export const stop = (channel) => running.get(channel)?.abort();
export const get = async (path, channel) => (await send(path, undefined, open(channel))).json();
export const post = async (path, body, channel) => (await send(path, body, open(channel))).json();

async function readEvents(answer, onEvent) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      if (event.startsWith(":")) continue; // a sign of life
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new ApiError(found.error.message);
      onEvent(found);
    }
  }
}

// Server-sent events of a POST, or of a GET that lasts: calls `onEvent` with the data of each.
export const stream = async (path, body, channel, onEvent) => readEvents(await send(path, { ...body, stream: true }, open(channel)), onEvent);
export const watch = async (path, channel, onEvent) => readEvents(await send(path, undefined, open(channel)), onEvent);
