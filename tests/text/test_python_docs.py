"""The built-in corpus: equal for any number of processes, parsed without importing, with correct labels."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.text import Corpus, python_docs, read_labelled
from firth.text.filters import HELD_OUT_FRACTION, is_held_out
from firth.text.python_docs import DocstringRecord

SMALL = ["click", "packaging", "PyYAML"]

MODULE = '''"""A module that must not be imported, because it would stop."""
raise SystemExit("imported")

if True:
    class Box(Base):
        """
        A box that holds things, as many as its size allows.

            Indented further.
        """

        def __init__(self, size, *things): pass

        async def take(self, which, /, *, gently=True, **rest):
            """Take one thing out of the box, gently or not.

            Examples
            --------
            >>> box.take("a")
            Thing("a")

            Notes
            -----
            Other things stay in.
            """

        def size(self):
            """Too short to be kept."""

def copy():
    """
    A box that holds things, as many as its size allows.

        Indented further.
    """
'''


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRTH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed distribution whose modules cannot be imported."""
    files = {
        "boxes/__init__.py": MODULE,
        "boxes/broken.py": 'def f(:\n    """A docstring in a file that does not parse at all."""\n',
        "boxes/tests/test_box.py": '"""A test that nobody wants to read as if it were language."""\n',
        "boxes-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: boxes\nVersion: 1.0\n"
        "Requires-Dist: click\nRequires-Dist: rich; extra == 'fancy'\nRequires-Dist: colorama; python_version < '3'\n",
    }
    site = tmp_path / "site"
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    record = "".join(f"{name},,\n" for name in [*files, "../../../bin/boxes.py"])
    (site / "boxes-1.0.dist-info/RECORD").write_text(record)
    monkeypatch.syspath_prepend(str(site))
    return "boxes"


# Reading


def test_docstrings_by_hand_and_nothing_is_imported(boxes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert python_docs.read_docstrings([boxes], workers=1) == [
        DocstringRecord("boxes", "boxes", "A module that must not be imported, because it would stop.", ()),
        DocstringRecord(
            "boxes",
            "boxes.Box",
            "A box that holds things, as many as its size allows.\n\n    Indented further.",
            ("size", "things"),
        ),
        DocstringRecord(
            "boxes",
            "boxes.Box.take",
            "Take one thing out of the box, gently or not.\n\nNotes\n-----\nOther things stay in.",
            ("which", "gently", "rest"),
        ),
    ]
    assert "boxes" not in sys.modules
    said = capsys.readouterr().err
    assert "1 file left out" in said
    assert "3 documents (0.0 MB of text) from 1 package" in said
    assert f"fingerprint {python_docs.pydocs_fingerprint(python_docs.read_docstrings([boxes]))}" in said


def test_any_number_of_processes_reads_the_same() -> None:
    files = python_docs.find_source_modules(SMALL)
    alone = list(python_docs.parse_modules(files, workers=1))
    assert len(alone) > 300
    assert list(python_docs.parse_modules(files, workers=2)) == alone
    assert list(python_docs.parse_modules(files, workers=3)) == alone


def test_the_cache_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = python_docs.read_docstrings(SMALL)
    monkeypatch.setattr(python_docs, "parse_modules", None)  # would fail if it were called
    assert python_docs.read_docstrings(SMALL) == fresh
    assert [path.name for path in python_docs.cache_folder().iterdir()] == [python_docs.pydocs_cache_path(SMALL).name]


def test_the_cache_is_per_version_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {python_docs.pydocs_cache_path(SMALL), python_docs.pydocs_cache_path(SMALL[:2])}
    monkeypatch.setattr(python_docs, "CACHE_FORMAT_VERSION", 0)
    names.add(python_docs.pydocs_cache_path(SMALL))
    monkeypatch.setattr(python_docs, "installed_version", lambda package: "0.0")
    names.add(python_docs.pydocs_cache_path(SMALL))
    assert len(names) == 4


@pytest.mark.parametrize("damage", ["", "{}\n", "not json\n", '{"fingerprint": "0"}\n["p", "n", "other text", []]\n'])
def test_a_damaged_cache_is_reported_and_rebuilt(boxes: str, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    fresh = python_docs.read_docstrings([boxes])
    python_docs.pydocs_cache_path([boxes]).write_text(damage)
    assert python_docs.read_docstrings([boxes]) == fresh
    assert "damaged" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_reported(
    boxes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FIRTH_CACHE", str(tmp_path / "file" / "cache"))
    assert len(python_docs.read_docstrings([boxes])) == 3
    assert "cannot be written" in capsys.readouterr().err


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert python_docs.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("FIRTH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert python_docs.cache_folder() == tmp_path / "xdg" / "firth"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert python_docs.cache_folder() == tmp_path / ".cache" / "firth"


def test_requirements_are_followed_but_not_extras(boxes: str) -> None:
    assert python_docs.find_requirements(boxes) == ["click"]
    assert python_docs.find_requirements("no-such-package") == []
    found = python_docs.find_dependencies()
    assert {"torch", "sympy", "numpy", "rich"} <= set(found)
    assert not {"transformers", "pytest", "ruff", "mypy"} & set(found)


def test_the_standard_library_has_modules_without_tests() -> None:
    names = {module.name for module in python_docs.find_source_modules([python_docs.STDLIB_PACKAGE])}
    assert {"json", "json.decoder", "argparse"} <= names
    assert not any(name.startswith(("test.", "site-packages")) for name in names)


@pytest.mark.parametrize(
    ("docstring", "text"),
    [
        ("Say so.\n\n>>> f(1)\n1\n\nThen more.", "Say so.\n\nThen more."),
        ("Say so.\n\nExamples\n--------\nOne is\n\n>>> f(1)\n1", "Say so.\n\nExamples\n--------\nOne is"),
        ("Examples\n========\n\n>>> f(1)\n1\n\nSee Also\n========\n\ng", "See Also\n========\n\ng"),
        ("Title\n=====\n\nSection\n-------\nText", "Title\n=====\n\nSection\n-------\nText"),
        ("Half \ud800 a character", "Half \ufffd a character"),
    ],
)
def test_prose(docstring: str, text: str) -> None:
    assert python_docs.strip_doctests(docstring) == text


# Labels


def some(package: str, n: int) -> list[DocstringRecord]:
    """Docstrings with a summary of their own and a body of their own."""
    body = f"This body of {package} goes on about x for a while"
    return [
        DocstringRecord(package, f"{package}.f{i}", f"Do {package} thing {i}.\n\n{body} {i}.", ("x",)) for i in range(n)
    ]


RECORDS = some("a", 2000) + some("b", 600) + some("c", 400) + some("rare", 20)


def test_splits_equal_those_of_pretraining(monkeypatch: pytest.MonkeyPatch) -> None:
    name_of = {record.name: record for record in RECORDS}
    monkeypatch.setattr(python_docs, "load_pydocs", lambda: RECORDS)
    in_corpus = {document.text for document in Corpus(["pydocs"])}
    test = read_labelled("pydocs:test", "classify")
    assert test == python_docs.make_pydocs_examples("classify", "test", RECORDS)
    assert test
    assert not in_corpus & {name_of[str(e.id)].text for e in test}, "no model is pretrained on the test split"
    for part in ("train", "dev"):
        for task in python_docs.PYDOCS_TASKS:
            made = python_docs.make_pydocs_examples(task, part, RECORDS)
            assert made
            assert all(is_held_out(name_of[str(e.id)].text, HELD_OUT_FRACTION) == (part == "dev") for e in made)


def test_classify_is_balanced_and_leaves_out_rare_packages() -> None:
    train = Counter(e.target for e in python_docs.make_pydocs_examples("classify", "train", RECORDS))
    assert set(train) == {"a", "b", "c"}
    assert train["a"] == 2 * train["c"]
    assert train["b"] <= train["a"]
    assert set(Counter(e.target for e in python_docs.make_pydocs_examples("classify", "dev", RECORDS))) == {
        "a",
        "b",
        "c",
    }


def test_classify_has_sixty_words_on_one_line() -> None:
    record = DocstringRecord("a", "a.f", "Title\n=====\n\n" + "word " * 100, ())
    assert python_docs.make_classify_examples([record], ["a"])[0].texts == ("Title" + " word" * 59,)


def test_pairs_use_each_body_rightly_and_wrongly_once() -> None:
    made = python_docs.make_pydocs_examples("pair", "train", RECORDS)
    own = {python_docs.split_summary_and_body(record) for record in RECORDS}
    assert all((e.target == "yes") == (e.texts in own) for e in made)
    assert all(e.texts[0].split()[1] == e.texts[1].split()[3] for e in made)  # the same package
    right = sorted(e.texts[1] for e in made if e.target == "yes")
    wrong = sorted(e.texts[1] for e in made if e.target == "no")
    assert right == wrong
    assert len(set(right)) == len(right) > 1000
    assert len({e.texts[0] for e in made}) == len(made)


def test_docstrings_with_the_same_body_make_no_wrong_pair() -> None:
    body = "the very same body in both of them, word for word"
    same = [DocstringRecord("a", f"a.f{i}", f"A summary number {i}.\n\n{body}", ()) for i in range(2)]
    assert python_docs.make_pair_examples(same) == []


def test_summary_and_body_by_hand() -> None:
    body = "Parameters\n----------\nx : int\n    What is to be done about it."
    flat = "Parameters x : int What is to be done about it."
    assert python_docs.split_summary_and_body(DocstringRecord("a", "a.f", f"Do the\nthing.\n\n{body}", ())) == (
        "Do the thing.",
        flat,
    )
    assert python_docs.split_summary_and_body(DocstringRecord("a", "a.f", f"f(x, y) -> a Tensor\n\n{body}", ())) is None
    assert python_docs.split_summary_and_body(DocstringRecord("a", "a.f", f"Short one.\n\n{body}", ())) is None
    assert (
        python_docs.split_summary_and_body(DocstringRecord("a", "a.f", "Do the thing at once.\n\nNo more.", ())) is None
    )


def test_text_to_text_goes_from_body_to_summary() -> None:
    example = next(e for e in python_docs.make_pydocs_examples("text-to-text", "train", RECORDS) if e.id == "b.f7")
    assert example.texts == ("This body of b goes on about x for a while 7.",)
    assert example.target == "Do b thing 7."


def test_order_is_shuffled_with_its_own_seed() -> None:
    made = python_docs.make_pydocs_examples("text-to-text", "train", RECORDS)
    assert made == python_docs.make_pydocs_examples("text-to-text", "train", RECORDS[::-1])
    first = Counter(str(e.id).split(".")[0] for e in made[:500])
    assert 0.5 < first["a"] / 500 < 0.8  # 2,000 of 3,020


def test_unknown_task_and_part() -> None:
    with pytest.raises(UserError, match="Did you mean 'classify'"):
        python_docs.make_pydocs_examples("clasify", "train", RECORDS)
    with pytest.raises(UserError, match=r"no split 'validation'\. There are: dev, test, train"):
        python_docs.make_pydocs_examples("pair", "validation", RECORDS)
