// Runs: training runs while they train. The page asks for new rows only, and only while it is looked at.

import { get, post } from "/page/api.js";
import { bars, button, card, facts, field, segments, show } from "/page/components.js";
import { lineChart } from "/page/chart.js";
import { count, el, shortCount } from "/page/dom.js";

export const name = "runs";
export const title = "Runs";

const POLL_MS = 3000;
const COLOURS = ["var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)"];
const MAX_POINTS = 600; // of a line
const state = { shown: null, logs: new Map(), axis: "step", smooth: true, sample: "The ___ is in the city." };

const duration = (s) => (s === null ? "–" : s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
const bytes = (n) => (n === null ? "–" : n >= 1e9 ? `${(n / 1e9).toFixed(1)} GB` : `${Math.round(n / 1e6)} MB`);
const number = (v, digits = 3) => (v === null || v === undefined ? "–" : v.toFixed(digits));

export function draw(panel) {
  const list = el("div");
  const chart = el("div");
  const details = el("div", { class: "columns" });
  const samples = el("div");
  let open = true;
  let timer = 0;
  let runs = [];
  let drawn = "";
  const sampleInput = el("input", { type: "text", value: state.sample, on: { input: () => (state.sample = sampleInput.value) } });

  async function poll() {
    clearTimeout(timer);
    if (!open) return;
    if (!document.hidden) {
      try {
        ({ runs } = await get("/runs", "runs"));
        state.shown ??= new Set(runs.slice(0, 1).map((run) => run.name));
        const names = runs.map((run) => run.name).filter((n) => state.shown.has(n));
        await Promise.all(names.map(readLog));
        if (open) drawAll();
      } catch (error) {
        if (error?.name !== "AbortError") list.replaceChildren(el("p", { class: "error", role: "alert", text: error.message }));
      }
    }
    if (open) timer = setTimeout(poll, POLL_MS);
  }

  async function readLog(run) {
    const known = state.logs.get(run) ?? { version: 0, next: 0, rows: [] };
    const found = await get(`/runs/log?name=${encodeURIComponent(run)}&version=${known.version}&after=${known.next}`, `log-${run}`);
    const rows = found.version === known.version ? [...known.rows, ...found.rows] : found.rows;
    state.logs.set(run, { version: found.version, next: found.next_row, rows, run: found.run, references: found.references });
  }

  function toggle(run) {
    if (state.shown.has(run)) state.shown.delete(run);
    else state.shown.add(run);
    poll();
  }

  function drawAll() {
    const focused = document.activeElement?.dataset?.run;
    list.replaceChildren(runs.length ? el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ["run", "state", "step", "loss", "held out", "tokens/s", "left", "memory"].map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, runs.map((run) => el("tr", {},
        el("td", {}, el("button", { type: "button", "data-run": run.name, "aria-pressed": String(state.shown.has(run.name)), text: run.name, title: run.kind, on: { click: () => toggle(run.name) } })),
        el("td", {}, el("span", { class: `tag-pill ${run.state}`, text: run.state })),
        el("td", { text: run.max_steps ? `${count(run.step)} of ${count(run.max_steps)}` : count(run.step) }),
        el("td", { text: number(run.loss) }), el("td", { text: number(run.eval_loss) }),
        el("td", { text: run.tokens_per_second === null ? "–" : count(Math.round(run.tokens_per_second)) }),
        el("td", { text: duration(run.seconds_left) }), el("td", { text: bytes(run.memory_bytes) })))))) : el("p", { text: "There is no run in this folder yet." }));
    if (focused) list.querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
    const shown = runs.filter((run) => state.shown.has(run.name) && state.logs.has(run.name));
    const now = JSON.stringify([state.axis, state.smooth, shown.map((run) => [run.name, state.logs.get(run.name).version, state.logs.get(run.name).next])]);
    if (now === drawn) return; // nothing is new: what somebody points at stays
    drawn = now;
    chart.replaceChildren(shown.length ? lossChart(shown) : el("p", { class: "note", text: "Choose a run." }));
    details.replaceChildren(...shown.map((run, i) => runCard(run, i)));
  }

  panel.replaceChildren(
    el("p", { class: "lead", text: "Training runs, while they train. Choose several to overlay them. The dashed lines are the loss of word frequencies alone and, where it is known, the planner's forecast." }),
    list,
    el("div", { class: "controls", style: { "margin-top": "0.9rem" } },
      segments("Horizontal axis", [["step", "by step"], ["tokens", "by tokens"]], state.axis, (value) => { state.axis = value; drawAll(); }),
      segments("Training loss", [["smooth", "smooth"], ["raw", "raw"]], state.smooth ? "smooth" : "raw", (value) => { state.smooth = value === "smooth"; drawAll(); })),
    chart, details,
    el("h2", { text: "What each checkpoint makes of a text" }),
    field("A prompt, or a sentence with ___ for a model that fills blanks", sampleInput),
    el("div", { class: "controls" }, button("Sample the checkpoints", () => sampleRuns(runs.map((run) => run.name).filter((n) => state.shown.has(n))), { class: "main" })),
    samples,
  );

  function sampleRuns(names) {
    samples.replaceChildren(el("div", { class: "columns" }, names.map((run) => {
      const box = el("div");
      show(box, async () => {
        const found = await post("/runs/samples", { run, text: state.sample }, `samples-${run}`);
        if (!found.samples.length) return el("p", { class: "note", text: "No checkpoint yet." });
        return found.samples.map((sample) => [el("h3", { text: sample.step === null ? sample.checkpoint : `step ${count(sample.step)}` }),
          sample.blanks.length ? sample.blanks.map((blank) => bars(blank.guesses.map((guess) => ({ name: guess.text, p: guess.probability })), { label: "Words for the blank" })) : el("div", { class: "passage", text: sample.text })]);
      });
      return card(run, null, box);
    })));
  }

  poll();
  return () => { open = false; clearTimeout(timer); };
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
    const { rows } = state.logs.get(run.name);
    const colour = COLOURS[i % COLOURS.length];
    const prefix = runs.length > 1 ? `${run.name}: ` : "";
    return [{ name: `${prefix}training`, points: pointsOf(rows, 1, state.smooth), colour, thin: true }, { name: `${prefix}held out`, points: pointsOf(rows, 2, false), colour, dots: true }];
  });
  const lines = runs.flatMap((run) => Object.entries(state.logs.get(run.name).references).map(([text, y]) => ({ name: runs.length > 1 ? `${run.name}: ${text}` : text, y })));
  return lineChart({ series: series.filter((s) => s.points.length), lines, xLabel: state.axis === "step" ? "step" : "tokens", yLabel: "loss (nats per token)", label: "Loss of the runs that are shown", height: 290 });
}

function runCard(run, index) {
  const { rows, references } = state.logs.get(run.name);
  const rates = pointsOf(rows, 3, false);
  const norms = pointsOf(rows, 5, true);
  const best = Math.min(...rows.map((row) => row[2]).filter((v) => v !== null));
  return card(run.name, run.kind,
    facts([["state", run.state], ["step", run.max_steps ? `${count(run.step)} of ${count(run.max_steps)}` : count(run.step)], ["tokens", run.tokens === null ? "–" : shortCount(run.tokens)], ["best held out", Number.isFinite(best) ? number(best) : "–"],
      ...Object.entries(references).map(([text, y]) => [text, number(y, 2)]), ["last line", `${duration(run.seconds_since_change)} ago`]]),
    rates.length > 1 ? lineChart({ series: [{ name: "", points: rates, colour: COLOURS[index % COLOURS.length] }], xLabel: state.axis, yLabel: "learning rate", label: `Learning rate of ${run.name}`, height: 120 }) : null,
    norms.length > 1 ? lineChart({ series: [{ name: "", points: norms, colour: COLOURS[index % COLOURS.length] }], xLabel: state.axis, yLabel: "gradient norm", label: `Gradient norm of ${run.name}`, height: 120 }) : null);
}
