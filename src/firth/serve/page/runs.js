// Runs: training runs while they train. The server tells what has changed, over one stream, while the page is looked at.

import { get, isAbort, post, stop, watch } from "/page/api.js";
import { bars, button, card, facts, field, segments, show, slider } from "/page/components.js";
import { lineChart } from "/page/chart.js";
import { count, el, shortCount } from "/page/dom.js";
import { keep, keepFields } from "/page/keep.js";

export const name = "runs";
export const title = "Runs";

const RETRY_MS = 2000; // before a broken stream is opened again; doubled up to MAX_RETRY_MS
const MAX_RETRY_MS = 30_000;
const NOTES_MS = 60_000; // the doctor is asked again about a run that trains
const AGAIN_MS = 3000; // samples that an idle process computes are asked for again
const COLOURS = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)"];
const MAX_POINTS = 600; // of a line
const COLUMNS = ["step", "loss", "held out", "tokens/s", "left", "memory"]; // of the table, after name and state
const state = { shown: null, axis: "step", smooth: true, sample: "" };
const runs = new Map(); // name -> summary
const logs = new Map(); // name -> {version, next, rows, references, maxSteps}
const notes = new Map(); // name -> what the doctor says
const own = new Map(); // name -> what the run wrote at its checkpoints
const chosen = new Map(); // name -> step of the checkpoint that is shown; none: the last one
keepFields("runs", state, ["axis", "smooth", "sample"]);
keep("shown-runs", () => (state.shown ? [...state.shown] : null), (names) => (state.shown = names && new Set(names)));

const duration = (s) => (s === null ? "–" : s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : s < 172_800 ? `${(s / 3600).toFixed(1)} h` : `${Math.round(s / 86_400)} days`);
const bytes = (n) => (n === null ? "–" : n >= 1e9 ? `${(n / 1e9).toFixed(1)} GB` : `${Math.round(n / 1e6)} MB`);
const memory = (run) => [run.memory_bytes === null ? null : bytes(run.memory_bytes), run.device_memory_share === null ? null : `${Math.round(100 * run.device_memory_share)}% of the GPU`].filter(Boolean).join(", ") || "–";
const number = (v, digits = 3) => (v === null || v === undefined ? "–" : v.toFixed(digits));
let clockOffset = 0; // seconds that this clock is ahead of the server's
const age = (run) => duration(Math.max(0, Date.now() / 1000 - clockOffset - run.changed_at));
const steps = (run) => (run.max_steps ? `${count(run.step)} of ${count(run.max_steps)}` : count(run.step));

// Runs that train first, by name; then those that changed last.
const listRuns = () => [...runs.values()].sort((a, b) => (b.state === "running") - (a.state === "running") || (a.state === "running" ? a.name.localeCompare(b.name) : b.changed_at - a.changed_at));
const shownRuns = () => listRuns().filter((run) => state.shown?.has(run.name));

async function readLog(run) {
  const { version, next, rows: seen } = { version: 0, next: 0, rows: [], ...logs.get(run) };
  const before = [...seen]; // events append to the log while this waits
  const found = await get(`/runs/log?name=${encodeURIComponent(run)}&version=${version}&after=${next}`, `log-${run}`);
  const now = logs.get(run);
  const isOlder = now?.version === found.version && now.next > found.next_row; // than what events have told meanwhile
  const rows = isOlder ? now.rows : found.version === version ? [...before, ...found.rows] : found.rows;
  logs.set(run, { version: found.version, next: isOlder ? now.next : found.next_row, rows, references: found.references, maxSteps: found.run.max_steps, hasAsked: rows.length > 1 });
}

export { append, logs, readLog };

async function readNotes(run) {
  notes.set(run, await get(`/runs/notes?name=${encodeURIComponent(run)}`, `notes-${run}`));
}

async function readOwn(run) {
  own.set(run, (await get(`/runs/samples?name=${encodeURIComponent(run)}`, `own-${run}`)).checkpoints);
}

// Append the rows of an event; false where rows are missing, and the log has to be asked for.
function append(run, part) {
  const known = logs.get(run);
  if (!known || known.version !== part.version) return false;
  if (part.next <= known.next) return true;
  if (part.first !== known.next) return false;
  known.rows.push(...part.rows);
  known.next = part.next;
  return true;
}

export function draw(panel) {
  const problem = el("div");
  const list = el("div");
  const chart = el("div");
  const details = el("div", { class: "columns" });
  const samples = el("div");
  const closing = new AbortController();
  let drawn = "";
  let hasList = runs.size > 0; // the server has told which runs there are
  let wake = () => {};
  const sampleInput = el("input", { type: "text", dir: "auto", value: state.sample, on: { input: () => (state.sample = sampleInput.value) } });

  const pause = (milliseconds) => new Promise((done) => { wake = done; if (milliseconds) setTimeout(done, milliseconds); });

  async function follow() {
    let wait = RETRY_MS;
    while (!closing.signal.aborted) {
      if (document.hidden) { await pause(0); continue; }
      try {
        await watch("/runs/events", "runs", (event) => { wait = RETRY_MS; apply(event); });
      } catch (error) {
        if (!isAbort(error)) complain(error);
      }
      if (closing.signal.aborted || document.hidden) continue;
      await pause(wait);
      wait = Math.min(2 * wait, MAX_RETRY_MS);
    }
  }

  const complain = (error) => problem.replaceChildren(el("p", { class: "error", role: "alert", text: error.message }));

  async function apply(event) {
    const before = new Map([...runs].map(([key, run]) => [key, run.state]));
    clockOffset = Date.now() / 1000 - event.now;
    if (event.all) runs.clear();
    hasList = true;
    for (const run of event.runs) runs.set(run.name, run);
    for (const gone of event.gone ?? []) runs.delete(gone);
    state.shown ??= new Set(listRuns().slice(0, 1).map((run) => run.name));
    const wanted = shownRuns().flatMap((run) => {
      const log = logs.get(run.name);
      const part = event.logs?.[run.name];
      const isPlanned = log?.maxSteps === run.max_steps && (log.hasAsked || log.rows.length < 2);
      const needsLog = event.all || !isPlanned || (part && !append(run.name, part));
      const told = event.notes?.[run.name];
      const needsNotes = !notes.has(run.name) || (told && told !== notes.get(run.name).number) || (before.has(run.name) && before.get(run.name) !== run.state);
      return [needsLog && readLog(run.name), needsNotes && readNotes(run.name), (needsNotes || !own.has(run.name)) && readOwn(run.name)].filter(Boolean);
    });
    await update(wanted);
  }

  async function update(requests) {
    try {
      await Promise.all(requests);
      problem.replaceChildren();
    } catch (error) {
      if (!isAbort(error)) complain(error);
    }
    if (!closing.signal.aborted) drawAll();
  }

  function toggle(run) {
    if (state.shown.has(run)) state.shown.delete(run);
    else state.shown.add(run);
    drawAll();
    if (state.shown.has(run)) update([readLog(run), readNotes(run), readOwn(run)]);
  }

  function drawAll() {
    const focused = document.activeElement?.dataset?.run;
    const found = listRuns();
    list.replaceChildren(found.length ? el("div", { class: "scroll" }, el("table", { class: "runs" },
      el("thead", {}, el("tr", {}, ["run", "state", ...COLUMNS].map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, found.map((run) => el("tr", {},
        el("td", {}, el("button", { type: "button", "data-run": run.name, "aria-pressed": String(state.shown.has(run.name)), text: run.name, title: run.kind, on: { click: () => toggle(run.name) } })),
        el("td", {}, el("span", { class: `tag-pill ${run.state}`, text: run.state })),
        [steps(run), number(run.loss), number(run.eval_loss), run.tokens_per_second === null ? "–" : count(Math.round(run.tokens_per_second)), duration(run.seconds_left), memory(run)]
          .map((text, i) => el("td", { "data-name": COLUMNS[i], class: text === "–" ? "nothing" : null, text }))))))) : el("p", { text: hasList ? "There is no run in this folder yet." : "Reading the runs …" }));
    if (focused) list.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
    const shown = shownRuns().filter((run) => logs.has(run.name));
    const now = JSON.stringify([state.axis, state.smooth, shown.map((run) => [run.name, run.state, logs.get(run.name).version, logs.get(run.name).next, notes.get(run.name)?.number, notes.get(run.name)?.state, notes.get(run.name)?.findings.length, own.get(run.name)?.at(-1)?.step])]);
    if (now === drawn) return; // nothing is new: what somebody points at stays
    drawn = now;
    chart.replaceChildren(shown.length ? lossChart(shown) : found.length ? el("p", { class: "note", text: "Choose a run." }) : "");
    const open = new Set([...details.querySelectorAll("details[open]")].map((box) => box.dataset.finding));
    details.replaceChildren(...shown.map((run, i) => runCard(run, i)));
    details.querySelectorAll("details").forEach((box) => (box.open = open.has(box.dataset.finding)));
  }

  panel.replaceChildren(
    el("p", { class: "lead", text: "Training runs, while they train. Choose several to overlay them. The dashed lines are what the loss should be: unigrams are word frequencies alone, bigrams use one word before, and the forecast is the planner's." }),
    problem, list,
    el("div", { class: "controls", style: { "margin-top": "0.9rem" } },
      segments("Horizontal axis", [["step", "by step"], ["tokens", "by tokens"]], state.axis, (value) => { state.axis = value; drawAll(); }),
      segments("Training loss", [["smooth", "smooth"], ["raw", "raw"]], state.smooth ? "smooth" : "raw", (value) => { state.smooth = value === "smooth"; drawAll(); })),
    chart, details,
    el("h2", { text: "What each checkpoint makes of a text" }),
    field("A prompt, or a sentence with ___ for a model that fills blanks (empty: one that suits the model)", sampleInput),
    el("div", { class: "controls" }, button("Sample the checkpoints", () => sampleRuns(shownRuns().map((run) => run.name)), { class: "main" })),
    samples,
  );

  function sampleRuns(names) {
    samples.replaceChildren(el("div", { class: "columns" }, names.map((run) => {
      const box = el("div");
      const ask = () => show(box, async () => {
        const found = await post("/runs/samples", { run, text: state.sample }, `samples-${run}`);
        const isBusy = found.state === "sampling";
        if (isBusy) setTimeout(() => { if (box.isConnected && !closing.signal.aborted) ask(); }, AGAIN_MS);
        if (!found.samples.length && !isBusy) return el("p", { class: "note", text: "No checkpoint yet." });
        return [...found.samples.map(drawSample), isBusy ? el("p", { class: "note", text: "The others follow when the machine has time for them." }) : null];
      });
      ask();
      return card(run, null, box);
    })));
  }

  document.addEventListener("visibilitychange", () => { if (document.hidden) stop("runs"); wake(); }, { signal: closing.signal });
  const askAgain = setInterval(() => {
    if (document.hidden) return;
    details.querySelectorAll("[data-age]").forEach((part) => { const run = runs.get(part.dataset.age); if (run) part.textContent = `${age(run)} ago`; });
    const due = shownRuns().filter((run) => run.state === "running" || notes.get(run.name)?.state === "examining");
    if (due.length) update(due.flatMap((run) => [readNotes(run.name), readOwn(run.name)]));
  }, NOTES_MS);
  drawAll();
  follow();
  return () => { closing.abort(); clearInterval(askAgain); stop("runs"); wake(); };
}

function drawSample(sample) {
  return [el("h3", { text: sample.step === null ? sample.checkpoint : `step ${count(sample.step)}` }),
    sample.error ? el("p", { class: "error", text: sample.error })
    : sample.blanks.length ? sample.blanks.map((blank) => bars(blank.guesses.map((guess) => ({ name: guess.text, p: guess.probability })), { label: "Words for the blank" }))
    : el("div", { class: "passage", dir: "auto", text: sample.text })];
}

// What the run itself wrote with its checkpoints, also with those that it has removed: the same sentences each time.
function drawOwn(run) {
  const lines = own.get(run) ?? [];
  if (!lines.length) return null;
  const box = el("div");
  const at = lines.findIndex((line) => line.step === chosen.get(run));
  const first = at < 0 ? lines.length - 1 : at;
  const draw = (i) => box.replaceChildren(...lines[i].samples.flatMap((sample) => (sample.guesses.length
    ? [el("div", { class: "passage", dir: "auto" }, sample.before, el("mark", { text: sample.answer }), sample.after), bars(sample.guesses.map(([name, p]) => ({ name, p, best: name === sample.answer })), { label: `Words for ${sample.answer}` })]
    : [el("div", { class: "passage", dir: "auto" }, el("span", { class: "given", text: sample.before }), " ", el("span", { class: "new", text: sample.text }))])));
  draw(first);
  return el("section", { class: "own", "aria-label": `Samples of ${run}` }, el("h3", { text: "At its checkpoints" }),
    lines.length > 1 ? slider("checkpoint", { min: 0, max: lines.length - 1, step: 1, value: first, format: (i) => `step ${count(lines[i].step)}`, onInput: (i) => { chosen.set(run, i === lines.length - 1 ? null : lines[i].step); draw(i); } }) : el("p", { class: "note", text: `step ${count(lines[0].step)}` }),
    box, el("p", { class: "note", text: lines[0].samples.some((sample) => sample.guesses.length) ? "Held-out sentences; the marked word was hidden." : "Held-out sentences, continued." }));
}

// Rows become points; a long line is averaged over neighbours.
function pointsOf(rows, column, smooth) {
  const x = state.axis === "step" ? 0 : 4;
  let last = 0;
  const all = rows.map((row) => { if (row[4] !== null) last = row[4]; return [x === 0 ? row[0] : last, row[column]]; }).filter(([, y]) => y !== null);
  const size = Math.max(1, Math.ceil(all.length / (smooth ? 120 : MAX_POINTS)));
  const points = [];
  for (let i = 0; i < all.length; i += size) {
    const part = all.slice(i, i + size);
    points.push([part.reduce((s, p) => s + p[0], 0) / part.length, part.reduce((s, p) => s + p[1], 0) / part.length]);
  }
  return points;
}

function lossChart(runs) {
  const series = runs.flatMap((run, i) => {
    const { rows } = logs.get(run.name);
    const colour = COLOURS[i % COLOURS.length];
    const prefix = runs.length > 1 ? `${run.name}: ` : "";
    return [{ name: `${prefix}training`, points: pointsOf(rows, 1, state.smooth), colour, thin: true }, { name: `${prefix}held out`, points: pointsOf(rows, 2, false), colour, dots: true }];
  });
  const lines = runs.flatMap((run) => Object.entries(referencesOf(run.name)).filter(([text]) => DRAWN_REFERENCES.includes(text)).map(([text, y]) => ({ run: run.name, text, y, colour: COLOURS[runs.indexOf(run) % COLOURS.length] })));
  const isPretraining = runs.every((run) => !run.kind.startsWith("fine-tuning"));
  return lineChart({ series: series.filter((s) => s.points.length), lines: nameLines(lines, runs.length), xLabel: state.axis === "step" ? "step" : "tokens", yLabel: isPretraining ? "loss (nats per token)" : "loss", label: "Loss of the runs that are shown", height: 290, wholeSteps: state.axis === "step" });
}

// What the loss should be. The planner's forecast is that of the whole run; n-grams are counted by the doctor.
const DRAWN_REFERENCES = ["unigrams", "bigrams", "forecast"];
function referencesOf(run) {
  const { bigram, trigram } = notes.get(run)?.references ?? {};
  const { unigrams, forecast } = logs.get(run).references;
  return Object.fromEntries(Object.entries({ unigrams, bigrams: unigrams && bigram, trigrams: unigrams && trigram, forecast }).filter(([, y]) => y));
}

// Runs on the same text share their lines; others have the colour of their run.
function nameLines(lines, numRuns) {
  const groups = {};
  for (const line of lines) (groups[`${line.text} ${line.y.toFixed(2)}`] ??= []).push(line);
  return Object.values(groups).map((same) => {
    const { text, y, colour } = same[0];
    const isOfAll = numRuns === 1 || same.length === numRuns;
    return isOfAll ? { name: text, y } : { name: `${same.map(({ run }) => run).join(", ")}: ${text}`, y, colour };
  });
}

function runCard(run, index) {
  const { rows } = logs.get(run.name);
  const rates = pointsOf(rows, 3, false);
  const norms = pointsOf(rows, 5, true);
  const best = rows.reduce((low, row) => (row[2] !== null && row[2] < low ? row[2] : low), Infinity);
  const small = (title, points) => (points.length > 1 ? lineChart({ series: [{ name: "", points, colour: COLOURS[index % COLOURS.length] }], xLabel: state.axis, yLabel: title, label: `${title} of ${run.name}`, height: 120 }) : null);
  const told = facts([["state", run.state], ["step", steps(run)], ["tokens", run.tokens === null ? "–" : shortCount(run.tokens)], ["best held out", Number.isFinite(best) ? number(best) : "–"],
    ...Object.entries(referencesOf(run.name)).map(([text, y]) => [text, number(y, 2)]), ["last line", `${age(run)} ago`]]);
  told.lastElementChild.lastElementChild.dataset.age = run.name;
  return card(run.name, run.kind, told, drawNotes(run.name), drawOwn(run.name), small("learning rate", rates), small("gradient norm", norms));
}

// What the doctor says about a run: the worst first.
function drawNotes(run) {
  const found = notes.get(run);
  if (!found) return null;
  const evidence = (values) => Object.entries(values).map(([text, value]) => `${text} ${typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(4)) : value}`).join(", ");
  const parts = found.findings.map((finding) => el("section", { class: `finding ${finding.level}` },
    el("h3", {}, el("small", { text: finding.level }), " ", finding.title),
    el("p", { class: "numbers", text: evidence(finding.evidence) }), el("p", { text: finding.cause }),
    finding.command ? el("details", { "data-finding": `${run}/${finding.rule}` }, el("summary", { text: "Try" }), el("pre", { tabindex: 0, text: finding.command })) : null));
  const sentence = found.state === "failed" ? found.error
    : found.state === "later" ? `${parts.length ? "This is what the run itself has found. " : ""}The doctor examines this run when it has trained for longer or has ended, as that takes time from the run.`
    : !found.number ? `${parts.length ? "This is what the run itself has found. " : ""}The doctor examines this run when the machine has time for it.`
    : `${parts.length ? "" : "Nothing is wrong. "}${found.rules} rules were examined.${found.state === "examining" ? " The log has grown: they are examined again." : ""}`;
  return el("section", { class: "notes", "aria-label": `The doctor's notes on ${run}` }, el("h3", { text: "The doctor" }),
    parts, el("p", { class: "note", text: sentence }),
    found.not_examined.length ? el("p", { class: "note", text: `Not examined: ${found.not_examined.join("; ")}` }) : null);
}
