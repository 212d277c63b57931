"""The playground in a real browser, by clicks and keys, on a small and on a large screen.

pip install playwright && apt-get install chromium
python -m pytest -m browser tests/serve/test_browser.py
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from lab.test_doctor import load_script
from serve.conftest import base, randomize
from serve.test_runs import make_run
from serve.test_server import running

from firth.core.files import write_json, write_text
from firth.generate import GenerationConfig
from firth.generate.next_token import describe_logprobs
from firth.generate.sampling import warp_logits
from firth.models import make_model
from firth.tasks import TASK_FILE, make_task

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TABS = ("write", "fill", "attention", "vectors", "tokens", "tasks", "runs")
SIZES = {"phone": (390, 844), "desk": (1440, 900)}
WAIT_MS = 30_000  # a busy machine is slow
# Elements that a screen reader announces, and that have no name.
NAMELESS = """() => [...document.querySelectorAll(
  "button, input, textarea, select, a[href], [role=button], [role=img], [role=tab], svg[tabindex]")].filter((e) => {
  const label = e.getAttribute("aria-label") || e.labels?.[0]?.textContent || e.textContent || e.title;
  return e.checkVisibility() && !label.trim();
}).map((e) => e.outerHTML.slice(0, 120))"""


# Names of axes and labels of points that lie on another label: nobody can read them.
COVERED = """() => [...document.querySelectorAll("svg.chart, svg:has(> .point)")].filter((e) => e.checkVisibility())
  .flatMap((picture) => {
    const texts = [...picture.querySelectorAll(".tick, .name, .point text")].map((e) => [e, e.getBoundingClientRect()]);
    const pairs = texts.flatMap((a, i) => texts.slice(i + 1).map((b) => [a, b]));
    const on = ([[, a], [, b]]) => a.left < b.right - 1 && b.left < a.right - 1
      && a.top < b.bottom - 3 && b.top < a.bottom - 3;
    return pairs.filter(on).map(([[a], [b]]) => `${a.textContent} on ${b.textContent}`);
  })"""


# Whether the selected tab is on the screen: a phone shows some of the tabs at a time.
IN_VIEW = """(() => {
  const box = document.querySelector("[role=tab][aria-selected=true]").getBoundingClientRect();
  return box.left >= 0 && box.right <= innerWidth + 1;
})()"""


@pytest.fixture(scope="module")
def address(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("runs")
    make_sick_run(home)
    make_run(home / "second" / "seed-0", steps=20)
    make_run(home / "first", steps=30)
    (home / "first" / "final").symlink_to(folders["gpt2"])
    models = [f"{name}={folder}" for name, folder in {**folders, "translator": save_translator(home)}.items()]
    with running(*models, "--runs", home) as (_, address):
        yield address


def make_sick_run(home: Path) -> None:
    """A run whose rate was too high: its recipe and its shards are made, its log was recorded."""
    doctor_runs = load_script()
    record = doctor_runs.read_recorded()["rate-too-high"]
    options = {"preset": "gpt2-tiny", "optim": "adamw", "learning_rate": 0.5}
    folder = doctor_runs.Workshop(home).untrained("sick", **options)
    write_text(folder / "log.jsonl", "".join(json.dumps(line) + "\n" for line in record["lines"]))
    write_json(folder / "results.json", {})


def save_translator(home: Path) -> Path:
    """An encoder-decoder that was fine-tuned to translate, with random weights."""
    config, tokenizer = base("t5")
    config = replace(config, num_decoder_layers=2)
    task = make_task("text-to-text", {"prefix": "translate: "}, tokenizer, config)
    torch.manual_seed(2)
    model = randomize(make_model(replace(task.configure_model(config), vocab_size=tokenizer.vocab.size)))
    model.tokenizer = tokenizer
    model.save(home / "translator" / "final")
    write_json(home / "translator" / "final" / TASK_FILE, task.metadata())
    return home / "translator" / "final"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'firth[browser]'")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield opened
        opened.close()


@pytest.fixture(params=SIZES)
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that must log no error, ask no other host, fit its width and name what it shows."""
    width, height = SIZES[request.param]
    context = browser.new_context(viewport={"width": width, "height": height})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    problems: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: problems.append(str(e)))
    page.on("request", lambda r: hosts.add(urlsplit(r.url).netloc))
    page.on("response", lambda r: problems.append(f"{r.url}: {r.text()}") if r.status >= 400 else None)
    yield page
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(COVERED) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
    context.close()
    assert not problems, "\n".join(problems)
    assert hosts == {urlsplit(address).netloc}


def open_tab(page: Any, address: str, tab: str, *models: str) -> None:
    """Open a tab, and show these models alone."""
    page.goto(f"{address}/#{tab}")
    page.wait_for_selector(f"#tab-{tab}[aria-selected=true]")
    for model in page.query_selector_all(".model-button"):
        name, is_shown = model.evaluate("e => [e.firstChild.textContent, e.getAttribute('aria-pressed') === 'true']")
        if is_shown != (name in models):
            page.click(f".model-button:has-text('{name}')")


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true; Playwright's own way needs `eval`, which the page's policy forbids."""
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline_s, expression
        page.wait_for_timeout(50)


def until_answered(page: Any) -> None:
    """Wait until no part of the page waits for an answer: what it shows until then is of an earlier text."""
    until(page, "!document.querySelector('#panel .busy')")


def card(page: Any, model: str) -> Any:
    return page.locator(f"section.card:has(h3:text-is('{model}'))")


def test_arrow_keys_move_between_tabs(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector("[role=tab][aria-selected=true]")
    page.focus("[role=tab][aria-selected=true]")
    seen = []
    for _ in TABS:
        page.keyboard.press("ArrowRight")
        seen.append(page.evaluate("document.activeElement.id.replace('tab-', '')"))
        assert page.get_attribute("#panel", "aria-labelledby") == f"tab-{seen[-1]}"
        assert page.evaluate(IN_VIEW), f"the tab {seen[-1]} is outside of the screen"
    assert set(seen) == set(TABS)
    page.keyboard.press("Home")
    assert page.evaluate("location.hash") == "#write"
    for theme in ("light", "dark", "auto"):
        page.click("#theme")
        assert page.inner_text("#theme") == f"Theme: {theme}"


def test_write(page: Any, address: str) -> None:
    open_tab(page, address, "write", "gpt2", "t5")
    page.fill("textarea", "the cat")
    own = card(page, "gpt2")
    own.locator("button.bar").first.wait_for()
    until(page, "document.querySelector('.passage .given')?.textContent === 'the cat'")
    until_answered(page)
    before = own.locator(".bar .value").all_inner_texts()
    page.get_by_role("slider", name="temperature").fill("0.1")
    assert own.locator(".bar .value").all_inner_texts() != before
    page.get_by_role("slider", name="top-k").fill("1")
    assert own.locator(".bar .value").first.inner_text() == "100%"
    assert own.locator("button.bar.cut").count() == 13
    own.locator("button.bar").nth(1).click()
    own.locator(".passage .new").wait_for()
    until_answered(page)
    own.locator("button.bar").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    until_answered(page)
    assert page.evaluate("document.activeElement.closest('.bars') !== null")  # the next token is one key away
    until(page, "document.querySelectorAll('section.card .passage')[0].querySelectorAll('.new').length === 2")
    page.click("text=Search beams")
    own.locator(".tree svg").wait_for()
    assert own.locator(".tree text").count() > 10
    page.get_by_role("slider", name="new tokens").fill("5")
    page.focus("textarea")
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelectorAll('section.card .passage .new').length === 2")
    answer = card(page, "t5").locator(".passage")
    assert "the cat" not in answer.inner_text()
    page.click("text=Back to the prompt")
    until(page, "document.querySelectorAll('section.card .passage .new').length === 0")


def test_bars_of_an_earlier_text_cannot_be_taken(page: Any, address: str) -> None:
    """While an answer is slow the old bars stay, dimmed: neither a click nor a slider uses them for the new text."""
    open_tab(page, address, "write", "gpt2")
    page.fill("textarea", "the cat")
    until(page, "document.querySelector('.passage .given')?.textContent === 'the cat'")
    until_answered(page)
    held: list[Any] = []
    page.route("**/next", lambda route: held.append(route))
    page.fill("textarea", "a river")
    until(page, "document.querySelector('.passage .given')?.textContent === 'a river'")
    bars = card(page, "gpt2").locator("button.bar")
    before = bars.all_inner_texts()
    page.get_by_role("slider", name="temperature").fill("0.1")
    bars.first.evaluate("bar => bar.focus()")
    page.keyboard.press("Enter")
    assert bars.all_inner_texts() == before
    assert page.locator(".passage .new").count() == 0
    held[0].continue_()
    until_answered(page)
    assert bars.all_inner_texts() != before
    bars.first.click()
    page.locator(".passage .new").wait_for()
    held[1].continue_()
    until_answered(page)


def test_a_streamed_text_grows_in_place(page: Any, address: str) -> None:
    """What is there already is not drawn again, so a screen reader is told of the text once: at its end."""
    open_tab(page, address, "write", "gpt2")
    until_answered(page)
    page.evaluate("""() => {
      window.changes = { childList: 0, characterData: 0 };
      new MutationObserver((records) => records.forEach((record) => window.changes[record.type]++))
        .observe(document.querySelector(".passage"), { childList: true, characterData: true, subtree: true });
    }""")
    for _ in range(5):  # a random text may end at once
        page.focus("textarea")
        page.keyboard.press("Control+Enter")
        page.locator(".unseen[role=log] p").wait_for(state="attached")
        until_answered(page)
        if page.evaluate("window.changes.characterData") > 3:
            break
    changes = page.evaluate("window.changes")
    assert changes["characterData"] > changes["childList"] / 2
    assert changes["childList"] <= 10  # twice a text: its first piece, and its end
    read_out, shown = ("".join(page.inner_text(part).split()) for part in (".unseen[role=log] p", ".passage"))
    assert read_out in shown


def test_beams_go_on_from_the_tokens_that_were_taken(page: Any, address: str) -> None:
    open_tab(page, address, "write", "t5")
    until_answered(page)
    page.locator("button.bar").nth(3).click()
    page.locator(".passage .new").wait_for()
    until_answered(page)
    likeliest = page.locator("button.bar .name").first.inner_text()
    with page.expect_request("**/beams") as request:
        page.click("text=Search beams")
    assert len(request.value.post_data_json["new_tokens"]) == 1
    page.locator(".tree svg").wait_for()
    page.click("text=Every candidate")
    first_step = page.locator("tr", has=page.locator("td:nth-child(2):empty"))
    first_step.first.wait_for()  # a table is made when it is opened
    assert likeliest.replace("·", "").strip() in "".join(first_step.locator("td:first-child").all_inner_texts())


def test_the_link_that_skips_the_tabs_keeps_the_address(page: Any, address: str) -> None:
    open_tab(page, address, "vectors", "bert")
    page.keyboard.press("Tab")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("[document.activeElement.id, location.hash]") == ["panel", "#vectors"]
    page.evaluate("history.replaceState(null, '', '#panel')")  # a link of before
    page.reload()
    page.wait_for_selector("#tab-vectors[aria-selected=true]")


def test_a_reload_keeps_what_was_chosen_and_typed(page: Any, address: str) -> None:
    open_tab(page, address, "write", "gpt2", "t5")
    page.fill("textarea", "the secret river")
    page.get_by_role("slider", name="top-k").fill("7")
    page.click("#tab-runs")
    for name in ("sick", "second/seed-0"):
        page.get_by_role("button", name=name, exact=True).click()
    page.click("text=by tokens")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.reload()
    page.wait_for_selector("#tab-runs[aria-selected=true]")
    card(page, "sick").wait_for()
    card(page, "second/seed-0").wait_for()
    assert page.get_by_role("button", name="by tokens").get_attribute("aria-pressed") == "true"
    page.click("#tab-write")
    assert page.input_value("textarea") == "the secret river"
    assert page.get_by_role("slider", name="top-k").input_value() == "7"
    shown = page.evaluate(
        "[...document.querySelectorAll('.model-button[aria-pressed=true]')].map((b) => b.firstChild.data)"
    )
    assert shown == ["gpt2", "t5"]
    until_answered(page)
    assert not [url for url in requests if "secret" in url]  # a text is in no address, and so in no log of a server


def test_the_bars_are_the_distribution_that_is_sampled(page: Any, address: str) -> None:
    """The page's temperature, top-k and top-p against the sampler's, on the same log-probabilities.

    Of 8,000 equal ones (an untrained model) 200 are listed: top-p keeps many that are not, and so does a top-k that all
    tie with.
    """
    page.goto(address)
    steep = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(2)
    flat = torch.zeros(8000, dtype=torch.float64)
    tied = torch.cat([flat[:100] + 3, flat[:400]])
    settings = [(1.0, 0, 1.0), (0.5, 7, 1.0), (1.5, 0, 0.6003), (2.0, 12, 0.8003), (0.7, 3, 0.3003), (3.0, 0, 0.9513)]
    settings += [(1.0, 0, 0.4513), (1.0, 7, 1.0), (1.0, 9, 0.4513)]
    for logits in (steep, flat, tied):
        for temperature, top_k, top_p in settings:
            config = GenerationConfig(temperature=temperature, top_k=top_k, top_p=top_p)
            wanted = warp_logits(logits.log_softmax(0)[None], config)[0].softmax(0)
            shown = describe_logprobs(logits.log_softmax(0), 200, [temperature], [top_p])
            rest: dict[str, Any] = {"num": shown.num_rest, "logsumexp": shown.rest_logsumexp[0]}
            rest |= {"numTied": shown.num_tied, "kept": shown.nucleus[0][0]}
            given = [[{"logprob": x} for x in shown.logprobs], rest]
            given.append({"temperature": temperature, "topK": top_k, "topP": top_p})
            found = page.evaluate(f"async () => (await import('/page/write.js')).warp(...{json.dumps(given)})")
            assert found["p"] == pytest.approx(wanted[shown.ids].tolist(), abs=1e-9), (temperature, top_k, top_p)
            assert found["rest"] == pytest.approx(1 - float(wanted[shown.ids].sum()), abs=1e-9)
            assert found["numRest"] == int((wanted > 0).sum()) - int((wanted[shown.ids] > 0).sum())


def test_fill(page: Any, address: str) -> None:
    open_tab(page, address, "fill", "bert", "t5")
    page.fill("textarea", "the ___ is near the ___")
    own = card(page, "bert")
    until(page, "document.querySelectorAll('section.card')[0].querySelectorAll('.bars').length === 2")
    page.get_by_role("button", name="near", exact=True).click()
    page.keyboard.type("not")
    own.locator(".ghost").first.wait_for(state="attached")
    assert "Most changed" in own.inner_text()
    page.click("text=No change")
    own.locator(".ghost").first.wait_for(state="detached")
    own.locator("button.bar").first.click()
    until(page, "document.querySelector('textarea').value.split('___').length === 2")


def test_a_changed_sentence_is_compared_word_by_word(page: Any, address: str) -> None:
    open_tab(page, address, "fill", "bert", "t5")
    page.fill("textarea", "the ___ is near the river")
    own, other = card(page, "bert"), card(page, "t5")
    own.locator(".bars").wait_for()
    until_answered(page)
    page.get_by_role("button", name="near", exact=True).click()
    page.keyboard.type("not")
    own.locator(".ghost").first.wait_for(state="attached")
    other.locator("text=efore").first.wait_for()
    until_answered(page)
    assert not other.locator(".ghost").count()  # the other spans of an encoder-decoder have no probability
    own.locator("summary").click()
    body = {"model": "bert", "text": ["the ___ is near the river", "the ___ is not the river"], "top": 1000}
    before, after = page.request.post(f"{address}/fill", data=body).json()["results"]
    wanted = [{g["text"]: g["probability"] for g in r["blanks"][0]["guesses"]} for r in (before, after)]
    for row in own.locator("tbody tr").all():
        word, old, new = row.locator("td").all_text_contents()
        for text, probability in zip((old, new), (wanted[0][word], wanted[1][word]), strict=True):
            assert (
                text == "<0.1%"
                if probability < 0.001
                else float(text[:-1]) == pytest.approx(100 * probability, abs=0.06)
            )
    page.get_by_label("The same sentence, changed").fill("the ___ is ___ the river")
    own.locator("text=nothing to compare").wait_for()
    until_answered(page)
    assert own.locator(".bars").count() == 2
    assert not own.locator(".ghost").count()
    page.fill("textarea", "a ___ and a dog")
    assert not page.get_by_label("The same sentence, changed").is_visible()  # it was a change of another sentence
    until(page, "document.querySelectorAll('section.card .bars').length === 2")


def test_random_orders_and_the_text_of_a_decoder(page: Any, address: str) -> None:
    open_tab(page, address, "attention", "xlnet", "t5")
    card(page, "t5").get_by_role("button", name="cross").wait_for()  # a text for the decoder is there
    own = card(page, "xlnet")
    own.locator("figcaption:has-text('full')").wait_for()
    own.get_by_role("button", name="In a random order").click()
    own.locator("figcaption:has-text('permutation')").wait_for()
    picture = "document.querySelector('[aria-label=\"attention mask: permutation\"]').toDataURL()"
    before = page.evaluate(picture)
    own.get_by_role("button", name="Next order").click()
    until(page, f"{picture} !== {json.dumps(before)}")
    until_answered(page)
    own.get_by_role("button", name="To all tokens").click()
    own.locator("figcaption:has-text('full')").wait_for()
    assert not own.locator("figcaption:has-text('permutation')").count()


def test_attention(page: Any, address: str) -> None:
    open_tab(page, address, "attention", "bert", "t5")
    page.get_by_label("What the decoder reads").fill("a river")
    own = card(page, "t5")
    own.get_by_role("button", name="cross").click()
    own.get_by_role("button", name="layer 0, head 1").wait_for()
    page.fill("textarea >> nth=0", "the cat lives near the river and " * 7)
    own = card(page, "bert")
    own.get_by_role("button", name="later queries").wait_for()
    own.get_by_role("button", name="later queries").click()
    own.locator("text=queries 1").wait_for()
    own.get_by_role("button", name="layer 0, head 0").focus()
    page.keyboard.press("ArrowRight")
    own.locator("h3:has-text('Layer 0, head 1')").wait_for()
    own.get_by_role("button", name="Query river").first.focus()
    assert "→" in own.locator(".readout").first.inner_text()
    own.get_by_role("button", name="Matrix").click()
    own.get_by_role("img", name="Matrix of").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "%" in own.locator(".readout").first.inner_text()
    assert "full" in own.inner_text()


def test_vectors(page: Any, address: str) -> None:
    open_tab(page, address, "vectors", "bert")
    page.fill("textarea", "the cat lives near the river\na cat and a dog")
    page.get_by_label("Words (empty: all)").fill("cat, dog, river")
    own = card(page, "bert")
    own.get_by_role("button", name="dog in line 2").wait_for()
    assert own.locator(".point").count() == 4
    own.get_by_role("button", name="cat in line 1").focus()
    own.locator(".bars").wait_for()
    assert own.locator(".bars li").count() == 3
    places = "[...document.querySelectorAll('.point circle')].map((c) => c.getAttribute('cx')).join()"
    before = page.evaluate(places)
    own.get_by_role("slider").fill("0")
    assert page.evaluate(places) != before
    assert "of the variance" in own.inner_text()
    page.fill("textarea", "\n".join(5 * ["a cat"] + ["a dog and a river"]))
    own.get_by_role("button", name="cat in line 5").wait_for()
    until_answered(page)
    assert own.locator(".point circle").count() == 7
    labels = own.locator(".point text").all_text_contents()
    assert labels == ["cat 1–5", "dog 6", "river 6"]  # the cats of equal sentences are at one place


def test_a_static_model_beside_another(page: Any, address: str) -> None:
    """word2vec has no layers: one point for a word, in every line; and its tokens are words."""
    open_tab(page, address, "vectors", "bert", "word2vec")
    page.fill("textarea", "the cat lives near the river\na cat and a dog")
    page.get_by_label("Words (empty: all)").fill("cat, dog, river")
    own = card(page, "word2vec")
    own.get_by_role("button", name="dog in line 2").wait_for()
    card(page, "bert").get_by_role("button", name="dog in line 2").wait_for()
    until_answered(page)
    assert "static vectors" in own.inner_text()
    assert own.get_by_role("slider").count() == 0
    at = {
        point.get_attribute("aria-label"): [point.locator("circle").get_attribute(name) for name in ("cx", "cy")]
        for point in own.locator(".point").all()
    }
    assert at["cat in line 1"] == at["cat in line 2"] != at["dog in line 2"]
    page.click("#tab-tokens")
    page.fill("textarea", "the cat lives")
    chips = card(page, "word2vec").locator(".chip:not(:text-is(' '))")
    page.wait_for_timeout(500)  # the page asks a moment after the last key
    until_answered(page)
    assert [text.strip() for text in chips.all_inner_texts() if text.strip()] == ["the", "cat", "lives"]
    page.click("#tab-fill")
    page.locator("text=Words of the sentence").or_(page.get_by_label("Words of the sentence")).first.wait_for()
    assert not card(page, "word2vec").count()  # word vectors fill no blanks


def test_tokens(page: Any, address: str) -> None:
    open_tab(page, address, "tokens", "bert", "gpt2")
    page.fill("textarea", "the cat lives near the river <b>and</b> the dog. " * 4)
    card(page, "gpt2").locator(".chip:has-text('river')").first.wait_for()
    assert page.locator("b").count() == 0
    mlm = card(page, "mlm").locator(".chips")
    mlm.wait_for()
    before = mlm.inner_text()
    page.click("text=Next draw")
    until(page, f"document.querySelector('[aria-label=\"mlm: input\"]')?.innerText !== {json.dumps(before)}")
    page.get_by_role("slider", name="mask rate").fill("0.8")
    until(page, "document.querySelectorAll('[aria-label=\"mlm: input\"] .masked').length > 20")
    page.get_by_label("Objectives for").select_option("decoder")
    until(page, "!document.querySelector('[aria-label=\"mlm: input\"]')")
    page.get_by_label("Tokenizer of").select_option("gpt2")
    card(page, "clm").wait_for()


def test_tasks(page: Any, address: str) -> None:
    open_tab(page, address, "tasks", "topics", "names", "questions")
    topics, names, questions = (card(page, name) for name in ("topics", "names", "questions"))
    topics.locator("button.bar").first.wait_for()
    topics.get_by_role("button", name="place").click()
    topics.locator("h3:has-text('Salience for place')").wait_for()
    assert topics.locator("[aria-label='Salience of the tokens'] .chip").count() > 5
    names.locator("textarea").fill("the cat & <i>Anna</i>")
    names.get_by_role("button", name="Ask").click()
    until(page, "document.getElementById('panel').textContent.includes('Anna')")
    assert page.locator("main i").count() == 0
    questions.locator("textarea").first.fill("the river?")
    page.keyboard.press("Control+Enter")
    questions.locator("text=Answer:").wait_for()


def test_the_salience_of_a_choice_as_a_table(page: Any, address: str) -> None:
    open_tab(page, address, "tasks", "endings")
    own = card(page, "endings")
    own.locator("button.bar").nth(1).wait_for()
    until_answered(page)
    own.get_by_role("button", name="It flew away").click()
    own.locator("h3:has-text('Salience for It flew away')").wait_for()
    until_answered(page)
    own.locator("summary").click()
    own.locator("tbody td:nth-child(3)").first.wait_for()
    values = [abs(float(text)) for text in own.locator("tbody td:nth-child(3)").all_inner_texts()]
    assert len(values) == own.locator(".chip").count() > 5
    assert values == sorted(values, reverse=True)


def test_rows_that_arrive_while_a_log_is_read_are_there_once(page: Any, address: str) -> None:
    """An event adds row 2 while the page waits: the answer was made after it, before it, or is of a new log."""
    page.goto(address)
    page.wait_for_selector("[role=tab][aria-selected=true]")
    found = page.evaluate("""async () => {
      const { append, logs, readLog } = await import("/page/runs.js");
      const row = (step) => [step, 3, null, null, null, null];
      const fetchAny = window.fetch;
      const states = [];
      for (const [version, steps] of [[1, [2]], [1, []], [2, [7]]]) {
        let answer = null;
        const held = new Promise((done) => (answer = done));
        window.fetch = (path, request) => path.startsWith("/runs/log") ? held : fetchAny(path, request);
        logs.set("run", { version: 1, next: 1, rows: [row(1)] });
        const reading = readLog("run");
        append("run", { version: 1, first: 1, next: 2, rows: [row(2)] });
        const next_row = version === 1 ? 1 + steps.length : 1;
        const body = { version, rows: steps.map(row), next_row, references: {}, run: { max_steps: 9 } };
        answer(new Response(JSON.stringify(body)));
        await reading;
        const { next, rows } = logs.get("run");
        states.push([next, rows.map(([step]) => step)]);
      }
      window.fetch = fetchAny;
      return states;
    }""")
    assert found == [[2, [1, 2]], [2, [1, 2]], [1, [7]]]


def test_runs(page: Any, address: str) -> None:
    open_tab(page, address, "runs")
    page.get_by_role("button", name="first").wait_for()
    page.get_by_role("img", name="Loss of the runs").wait_for()
    for name in ("first", "second/seed-0"):
        button = page.get_by_role("button", name=name, exact=True)
        if button.get_attribute("aria-pressed") == "false":
            button.click()
    card(page, "second/seed-0").wait_for()
    card(page, "first").wait_for()
    page.get_by_role("img", name="Loss of the runs").focus()
    page.keyboard.press("ArrowRight")
    assert "first: training" in page.locator(".readout").first.inner_text()
    page.click("text=by tokens")
    page.get_by_label("A prompt").fill("the cat")
    page.click("text=Sample the checkpoints")
    page.locator(".passage:has-text('the cat')").wait_for(timeout=240_000)  # samples have the lowest priority


def test_the_doctor_and_what_the_loss_should_be(page: Any, address: str) -> None:
    open_tab(page, address, "runs")
    sick = page.get_by_role("button", name="sick", exact=True)
    sick.wait_for()
    while (others := page.locator("[data-run][aria-pressed=true]:not([data-run=sick])")).count():
        others.first.click()
    if sick.get_attribute("aria-pressed") == "false":
        sick.click()
    own = card(page, "sick")
    own.locator(".finding.error").first.wait_for(timeout=240_000)  # the doctor has the lowest priority
    assert "the learning rate is too high" in own.inner_text()
    own.locator("summary").first.click()
    assert "firth pretrain gpt2-tiny --data" in own.locator("pre").first.inner_text()
    lines = page.locator(".figure", has=page.get_by_role("img", name="Loss of the runs")).locator(".legend li")
    assert {text.split(":")[0] for text in lines.all_inner_texts()} >= {"unigrams", "bigrams"}


def test_translations_with_attention(page: Any, address: str) -> None:
    open_tab(page, address, "tasks", "translator")
    own = card(page, "translator")
    own.get_by_role("button", name="Query").first.wait_for()
    until_answered(page)
    own.get_by_role("button", name="Query").first.focus()
    assert "→" in own.locator(".readout").inner_text()
    assert "translate" in (own.locator("svg").text_content() or "")  # the prefix of the task is read too
    before = own.locator("svg").inner_html()
    own.get_by_role("slider", name="layer").fill("0")
    assert own.locator("svg").inner_html() != before


def test_what_is_missing_is_said_without_a_request(page: Any, address: str) -> None:
    """No text is no error: the page says what to type. Its fixture refuses every answer of status 400."""
    for tab in ("attention", "vectors", "tokens", "fill"):
        open_tab(page, address, tab, "bert")
        page.fill("textarea", " ")
        own = card(page, "bert")
        own.get_by_text("Type").wait_for()
        until_answered(page)
        assert not page.get_by_role("alert").count()
    page.fill("textarea", "the cat lives")
    own.get_by_text("Write ___ where a word is missing").wait_for()
    open_tab(page, address, "tasks", "topics", "questions", "endings")
    for name, number, told in (
        ("topics", 0, "Type a text"),
        ("questions", 1, "context"),
        ("endings", 1, "two choices"),
    ):
        own = card(page, name)
        until_answered(page)
        own.locator("textarea").nth(number).fill("")
        own.get_by_role("button", name="Ask").click()
        own.locator(".note", has_text=told).first.wait_for()


def test_unknown_pieces_and_parts_of_characters_are_marked(page: Any, address: str) -> None:
    open_tab(page, address, "tokens", "bert", "gpt2")
    page.fill("textarea", "the cat 猫 القط")
    own = card(page, "bert")
    own.locator(".chip.unknown", has_text="猫").wait_for()
    until_answered(page)
    assert "unknown" in own.locator(".facts").inner_text()
    assert not own.locator(".chip.unknown", has_text="cat").count()
    own = card(page, "gpt2")  # bytes: nothing is unknown, and a character has several tokens
    assert not own.locator(".chip.unknown").count()
    assert own.locator(".chip", has_text="·").count() >= 2
    own.locator("summary").click()
    sizes = [int(text) for text in own.locator("tbody td:nth-child(4)").all_inner_texts()]
    assert sum(sizes) == len("the cat 猫 القط".encode())


def test_long_words_and_markup_stay_inside(page: Any, address: str) -> None:
    open_tab(page, address, "tokens", "bert")
    page.fill("textarea", "<script>alert(1)</script> " + "x" * 300)
    until(page, "document.getElementById('panel').textContent.includes('alert')")
    assert page.locator("main script").count() == 0


def test_the_api_key(browser: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """The page asks for a key, again where it is wrong; Escape ends the waiting, and a button asks anew."""
    write_text(tmp_path / "keys", "right-key\n")
    with running(f"bert={folders['bert']}", "--api-key-file", tmp_path / "keys") as (_, address):
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{address}/#fill")
        dialog = page.get_by_role("dialog", name="API key")
        dialog.wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("alert").filter(has_text="needs an API key").wait_for()
        assert not dialog.is_visible()
        page.get_by_role("button", name="Give a key").click()
        dialog.wait_for()
        page.keyboard.press("Enter")  # without a key nothing is sent
        assert dialog.is_visible()
        page.locator("dialog input").fill("wrong-key")
        page.keyboard.press("Enter")
        dialog.get_by_role("alert").filter(has_text="does not accept").wait_for()
        page.locator("dialog input").fill("right-key")
        page.get_by_role("button", name="Use this key").click()
        card(page, "bert").locator("button.bar").first.wait_for()
        page.reload()
        card(page, "bert").locator("button.bar").first.wait_for()
        assert not page.locator("dialog").count()
        page.evaluate("sessionStorage.setItem('firth-api-key', 'a-key-of-yesterday')")
        page.fill("textarea", "a ___ lives")
        dialog.wait_for()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("alert").filter(has_text="Reload the page").first.wait_for()
        context.close()


# --- accessibility ----------------------------------------------------------------------------------------------------


def accessibility_tree(page: Any) -> list[dict[str, Any]]:
    """The tree that the browser gives to screen readers: role, name and properties of each node that is not ignored."""
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    by_id = {node["nodeId"]: node for node in nodes}

    def is_inside(node: dict[str, Any], role: str) -> bool:
        parent = by_id.get(node.get("parentId", ""))
        return parent is not None and (parent["role"]["value"] == role or is_inside(parent, role))

    return [
        {
            "role": node["role"]["value"],
            "name": node.get("name", {}).get("value", ""),
            "in_main": is_inside(node, "main"),
            **{p["name"]: p["value"].get("value") for p in node.get("properties", ())},
        }
        for node in nodes
        if not node["ignored"]
    ]


def nodes_with(tree: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [node for node in tree if node["role"] == role]


TAB_STOPS = """(selector) => [...document.querySelectorAll(selector)].filter((e) => e.tabIndex >= 0).length"""


def test_landmarks_and_names_in_the_accessibility_tree(page: Any, address: str) -> None:
    open_tab(page, address, "tokens", "bert")
    card(page, "mlm").wait_for()
    until_answered(page)
    tree = accessibility_tree(page)
    assert len(nodes_with(tree, "main")) == len(nodes_with(tree, "banner")) == 1
    (panel,) = nodes_with(tree, "tabpanel")
    assert panel["in_main"]
    assert panel["name"] == "Tokens"
    assert [tab["name"] for tab in nodes_with(tree, "tab") if tab.get("selected")] == ["Tokens"]
    groups = {node["name"] for node in nodes_with(tree, "group")}
    assert {"Tokens of bert", "mlm: input"} <= groups
    for node in tree:
        if node["role"] in ("button", "slider", "textbox", "combobox", "tab", "img", "image", "tabpanel", "link"):
            assert node["name"].strip(), node
    card(page, "mlm").locator("summary", has_text="Token by token").click()
    cells = {node["name"] for node in nodes_with(accessibility_tree(page), "cell")}
    assert "masked" in cells  # what the colour says


def test_many_elements_are_one_tab_stop_and_keys_press_them(page: Any, address: str) -> None:
    open_tab(page, address, "attention", "bert")
    own = card(page, "bert")
    own.get_by_role("button", name="Query river").or_(own.get_by_role("button", name="Query cat")).first.wait_for()
    until_answered(page)
    assert page.evaluate(TAB_STOPS, ".head") == 1
    assert page.evaluate(TAB_STOPS, ".arc-token") == 1
    own.get_by_role("button", name="layer 0, head 0").focus()
    page.keyboard.press("ArrowRight")
    own.locator("h3:has-text('Layer 0, head 1')").wait_for()
    until_answered(page)
    assert "entropy" in own.inner_text()  # the tooltip's numbers, for those whom it does not reach
    assert page.evaluate("document.activeElement.ariaPressed") == "true"
    assert page.evaluate(TAB_STOPS, ".head") == 1
    token = own.get_by_role("button", name="Query").nth(2)
    token.focus()
    for key, is_pressed in (("Enter", "true"), (" ", "false"), (" ", "true")):
        page.keyboard.press(key)
        assert token.get_attribute("aria-pressed") == is_pressed
    page.keyboard.press("ArrowDown")
    assert page.evaluate("[...document.querySelectorAll('.arc-token')].indexOf(document.activeElement)") == 3
    readout = own.locator(".readout").first
    assert readout.get_attribute("aria-live") == "polite"
    own.locator(".arc-token").nth(1).hover()
    assert readout.get_attribute("aria-live") == "off"  # a pointer reads out nothing
    assert page.evaluate(TAB_STOPS, ".bar") <= page.locator(".bars").count()
    page.click("#tab-vectors")
    page.locator(".point").first.wait_for()
    until_answered(page)
    assert page.evaluate(TAB_STOPS, ".point") == 1
    page.locator(".point[tabindex='0']").focus()
    xs = []
    for _ in range(3):
        xs.append(page.evaluate("Number(document.activeElement.querySelector('circle').getAttribute('cx'))"))
        page.keyboard.press("ArrowRight")
    assert xs == sorted(xs)
    pressed = {node["name"] for node in nodes_with(accessibility_tree(page), "button") if node.get("focused")}
    assert len(pressed) == 1
    assert "in line" in pressed.pop()
    page.click(".model-button >> nth=0")
    assert page.evaluate("document.activeElement.classList.contains('model-button')")
