// What somebody chose and typed survives a reload. It stays in the session storage of the tab: no server sees it, and it
// ends with the tab.

const KEY = "firth-page";
const readers = new Map();
let stored = {};
try {
  stored = JSON.parse(sessionStorage.getItem(KEY)) ?? {};
} catch {
  // another program wrote it: begin anew
}

// `read` returns what to keep, as plain values; `restore` gets what was kept before the reload.
export function keep(name, read, restore) {
  readers.set(name, read);
  if (stored[name] !== undefined) restore(stored[name]);
}

export function keepFields(name, object, fields = Object.keys(object)) {
  keep(name, () => Object.fromEntries(fields.map((field) => [field, object[field]])), (values) => {
    for (const field of fields) if (typeof values[field] === typeof object[field]) object[field] = values[field];
  });
}

export const keepMap = (name, map) => keep(name, () => [...map], (entries) => entries.forEach(([key, value]) => map.set(key, value)));

function save() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(Object.fromEntries([...readers].map(([name, read]) => [name, read()]))));
  } catch {
    // the storage is full, or forbidden: the page works without it
  }
}

addEventListener("pagehide", save);
document.addEventListener("visibilitychange", () => { if (document.hidden) save(); });
