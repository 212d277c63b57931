// Search and filters for the rows of each section. Nothing is stored, and nothing leaves the page.
const ROWS_AT_ONCE = 50;

for (const section of document.querySelectorAll(".examples")) {
  const rows = [...section.querySelectorAll(".rows > li")];
  const [search, trueLabel, predictedLabel, found, more] =
    ["input", ".true", ".predicted", ".found", ".more"].map((name) => section.querySelector(name));
  const chips = [...section.querySelectorAll(".filters button")];
  const outcomes = rows.map((row) => row.dataset.o.split(" "));
  const pairs = rows.map((row) => (row.dataset.p || "").split(" ").map((pair) => pair.split(":")));
  let texts = null;
  let limit = ROWS_AT_ONCE;

  function matches(i, outcome, words, wanted) {
    return (!outcome || outcomes[i].includes(outcome))
      && (wanted.every((label) => !label) || pairs[i].some((pair) => wanted.every((label, k) => !label || pair[k] === label)))
      && words.every((word) => texts[i].includes(word));
  }

  function update() {
    const outcome = chips.find((chip) => chip.getAttribute("aria-pressed") === "true").dataset.outcome;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = trueLabel ? [trueLabel.value, predictedLabel.value] : [];
    if (words.length && !texts) texts = rows.map((row) => row.textContent.toLowerCase());
    let count = 0;
    rows.forEach((row, i) => {
      const isMatch = matches(i, outcome, words, wanted);
      row.hidden = !isMatch || count >= limit;
      count += isMatch;
    });
    const shown = Math.min(count, limit);
    found.textContent = count ? `${count.toLocaleString("en")} found, ${shown.toLocaleString("en")} shown` : "None found.";
    more.hidden = shown === count;
  }

  function restart() {
    limit = ROWS_AT_ONCE;
    update();
  }

  function press(pressed) {
    for (const chip of chips) chip.setAttribute("aria-pressed", String(chip === pressed));
    restart();
  }

  function showPair(cell) {
    [trueLabel.value, predictedLabel.value] = cell.dataset.p.split(":");
    search.value = "";
    press(chips.find((chip) => !chip.dataset.outcome));
    section.querySelector(".tools").scrollIntoView();
  }

  let timer;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(restart, 120); });
  for (const select of [trueLabel, predictedLabel]) if (select) select.addEventListener("change", restart);
  for (const chip of chips) chip.addEventListener("click", () => press(chip));
  more.addEventListener("click", () => { limit += 4 * ROWS_AT_ONCE; update(); });
  for (const cell of section.querySelectorAll(".heat td[data-p]")) {
    if (cell.textContent === "0") continue;
    const button = document.createElement("button");
    button.textContent = cell.textContent;
    button.addEventListener("click", () => showPair(cell));
    cell.replaceChildren(button);
  }
  section.querySelector(".tools").hidden = false;
  update();
}
