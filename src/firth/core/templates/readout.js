// The numbers of a chart: of the mark under the pointer, and of the one that the arrow keys have reached.
// Reports inline this file, and the playground imports it. The text of a mark is its <title>; it moves to the readout,
// so that the browser's own tooltip does not cover the chart. A screen reader reads out what the arrow keys reach, and
// nothing while a pointer moves.

export function addReadout(chart, readout) {
  const marks = [...chart.querySelectorAll(".mark")];
  if (!marks.length) return;
  const texts = marks.map((mark) => {
    const title = mark.querySelector("title");
    const text = title.textContent;
    title.remove();
    return text;
  });
  let at = -1;
  function show(index) {
    if (at >= 0) marks[at].classList.remove("on");
    at = index;
    marks[at].classList.add("on");
    readout.textContent = texts[at];
  }
  const listen = (isOn) => readout.setAttribute("aria-live", isOn ? "polite" : "off");
  marks.forEach((mark, index) => mark.addEventListener("pointerenter", () => { listen(false); show(index); }));
  chart.addEventListener("focus", () => listen(true));
  chart.setAttribute("tabindex", "0");
  chart.addEventListener("keydown", (event) => {
    const next = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: marks.length - 1 }[event.key];
    if (next === undefined) return;
    listen(true);
    show(Math.min(marks.length - 1, Math.max(0, next)));
    event.preventDefault();
  });
}
