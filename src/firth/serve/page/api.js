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

let asking = null;
function askForKey() {
  asking ??= new Promise((done) => {
    const input = el("input", { type: "password", autocomplete: "off", "aria-label": "API key" });
    const dialog = el("dialog", { class: "dialog", "aria-label": "API key" },
      el("form", { method: "dialog", on: { submit: () => { sessionStorage.setItem(KEY, input.value.trim()); asking = null; done(); dialog.remove(); } } },
        el("p", { text: "This server needs an API key. It is kept until you close the tab." }), input,
        el("p", {}, el("button", { class: "main", type: "submit", text: "Use this key" }))));
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}

async function send(path, body, signal) {
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
    await askForKey();
    return send(path, body, signal);
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
