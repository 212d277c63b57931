"""`firth push` and `--push-to-hub`, against a stand-in for the Hub's API that huggingface_hub talks to."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer
from safetensors.torch import load_file, save_file

import firth
from firth.core.errors import UserError
from firth.core.files import atomic_folder, find_corruption, write_bytes, write_json
from firth.evaluate.export_card import describe_onnx_loading, write_export_card
from firth.train import hub as hub_module

pytest.importorskip("huggingface_hub")
huggingface_hub = hub_module.import_hub()
TINY = {"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64}
SIZES: dict[str, Any] = {"max_seq_length": 32, "per_device_train_batch_size": 4, "overrides": TINY}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """As HF_ENDPOINT, HF_TOKEN and HF_HUB_DISABLE_XET would set it before huggingface_hub is imported."""
    server = HubServer()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    monkeypatch.setattr(hub_module, "RETRY_SECONDS", (0.01, 0.01))
    huggingface_hub.utils.close_session()
    yield server
    server.close()
    huggingface_hub.utils.close_session()


@pytest.fixture(scope="module")
def run(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "animals"
    firth.pretrain("bert-tiny", corpus_file, folder, vocab_size=300, max_steps=3, save_steps=2, **SIZES)
    return folder


def download(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_a_pushed_model_is_the_same_model(server: HubServer, run: Path, tmp_path: Path) -> None:
    (run / "final" / "notes.txt").write_text("mine")
    found = firth.push(run, "me/animals")
    (run / "final" / "notes.txt").unlink()
    assert found["url"] == f"{server.url}/me/animals"
    repo = server.repos["me/animals"]
    assert repo["visibility"] == "private"
    assert repo["commits"] == ["main"], "one commit"
    files = repo["branches"]["main"]
    assert "notes.txt" not in files, "files of the manifest alone"
    folder = download(files, tmp_path / "copy")
    assert find_corruption(folder) is None
    ids = torch.tensor([[2, 7, 8, 3]])
    assert torch.equal(firth.load(folder)(ids).logits, firth.load(run / "final")(ids).logits)
    card = files["README.md"].decode()
    assert "AutoModelForMaskedLM.from_pretrained('me/animals')" in card
    assert "snapshot_download('me/animals')" in card
    results = json.loads((run / "results.json").read_text())
    assert f"| words_seen | {results['words_seen']:,} |" in card
    assert f"The model has read {results['words_seen']:,} words" in card
    assert "| held-out documents | eval_loss |" in card

    firth.push(run / "checkpoint-2", "me/animals", revision="step-2", public=True)
    assert repo["visibility"] == "private", "of a new repository alone"
    names = repo["branches"]["step-2"]
    assert "model.safetensors" in names
    assert not [name for name in names if name.startswith("training/")]
    assert find_corruption(download(names, tmp_path / "checkpoint")) is None


def test_a_card_that_was_edited_stays(server: HubServer, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    card = tmp_path / "run" / "final" / "README.md"
    card.write_text(card.read_text().replace("*Fill in.*", "Animals of my town."))
    firth.push(tmp_path / "run", "me/town", public=True)
    assert server.repos["me/town"]["visibility"] == "public"
    assert server.repos["me/town"]["branches"]["main"]["README.md"] == card.read_bytes()
    firth.push(tmp_path / "run", "me/town", new_card=True)
    assert b"Animals of my town" not in server.repos["me/town"]["branches"]["main"]["README.md"]


def test_a_card_that_is_a_link_is_not_published(server: HubServer, run: Path, tmp_path: Path) -> None:
    """A model folder of somebody else may have a link to a person's file in place of its card."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "id_rsa").write_text("secret")
    card = tmp_path / "run" / "final" / "README.md"
    card.unlink()
    card.symlink_to(tmp_path / "id_rsa")
    with pytest.raises(UserError, match=r"README\.md is a link to a file outside of"):
        firth.push(tmp_path / "run", "me/stolen")
    assert "README.md" not in server.repos["me/stolen"]["branches"]["main"]
    with pytest.raises(UserError, match=r"README\.md is a link to a file outside of"):
        firth.export(tmp_path / "run" / "final", tmp_path / "out")
    with pytest.raises(UserError, match=r"README\.md is a link to a file outside of"):
        write_export_card(card.parent, tmp_path, tmp_path / "out", "onnx", "")
    assert not (tmp_path / "out").exists()


def save_sharded(model: Path, folder: Path) -> None:
    """Write a model folder with its weights in two files and their index, as FSDP saves them."""
    weights = load_file(model / "model.safetensors")
    names = sorted(weights)
    with atomic_folder(folder) as temporary:
        shutil.copyfile(model / "config.json", temporary / "config.json")
        weight_map = {}
        for number, part in enumerate((names[::2], names[1::2]), 1):
            file = f"model-0000{number}-of-00002.safetensors"
            save_file({name: weights[name] + 1 for name in part}, temporary / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        write_json(temporary / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def test_a_branch_has_no_file_of_the_model_on_main(server: HubServer, run: Path, tmp_path: Path) -> None:
    """`transformers` prefers model.safetensors to a sharded checkpoint: a copy from main would be other weights."""
    firth.push(run, "me/animals")
    main = server.repos["me/animals"]["branches"]["main"]
    main |= {"task.json": b"{}", "photo.png": b"mine"}
    save_sharded(run / "final", tmp_path / "sharded")
    firth.push(tmp_path / "sharded", "me/animals", revision="step-7")
    files = server.repos["me/animals"]["branches"]["step-7"]
    written = {"config.json", "manifest.json", "model.safetensors.index.json"}
    written |= {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert set(files) == {*written, "README.md", ".gitattributes", "photo.png"}
    firth.push(run, "me/animals", revision="step-7")
    files = server.repos["me/animals"]["branches"]["step-7"]
    assert [name for name in files if name.endswith(".safetensors")] == ["model.safetensors"]
    assert "model.safetensors.index.json" not in files


def test_a_card_that_was_edited_on_the_hub_stays(
    server: HubServer, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    firth.push(run, "me/animals")
    firth.push(run / "checkpoint-2", "me/animals")
    assert "stays" not in capsys.readouterr().err
    main = server.repos["me/animals"]["branches"]["main"]
    main["README.md"] = edited = main["README.md"] + b"\nEdited on the Hub."
    firth.push(run, "me/animals")
    assert server.repos["me/animals"]["branches"]["main"]["README.md"] == edited
    assert "me/animals: README.md was written or edited on the Hub and stays" in capsys.readouterr().err
    firth.push(run, "me/animals", new_card=True)
    assert b"Edited on the Hub" not in server.repos["me/animals"]["branches"]["main"]["README.md"]


def test_an_export_is_pushed_with_a_card_of_its_own(server: HubServer, run: Path, tmp_path: Path) -> None:
    firth.export(run / "final", tmp_path / "gguf", format="gguf")
    firth.push(run, "me/animals")
    with pytest.raises(UserError, match=r"holds a folder of kind model.* such as me/animals-gguf, or to a branch"):
        firth.push(tmp_path / "gguf", "me/animals")
    firth.push(tmp_path / "gguf", "me/animals-gguf")
    files = server.repos["me/animals-gguf"]["branches"]["main"]
    assert set(files) == {".gitattributes", "manifest.json", "model-f16.gguf", "Modelfile", "README.md"}
    assert find_corruption(download(files, tmp_path / "copy")) is None
    card = files["README.md"].decode()
    assert "library_name: gguf" in card
    assert "hf download me/animals-gguf model-f16.gguf" in card
    assert "| words_seen |" in card, "the facts of the checkpoint"
    assert "from_pretrained" not in card

    (tmp_path / "gguf" / "README.md").write_text("---\nlicense: mit\n---\n\nSee OWNER/NAME.")
    firth.push(tmp_path / "gguf", "me/animals-gguf")
    files = server.repos["me/animals-gguf"]["branches"]["main"]
    assert files["README.md"] == b"---\nlicense: mit\n---\n\nSee me/animals-gguf."
    with pytest.raises(UserError, match="--new-card is for models"):
        firth.push(tmp_path / "gguf", "me/animals-gguf", new_card=True)

    with atomic_folder(tmp_path / "onnx", "onnx") as temporary:  # the graph itself takes ten seconds
        write_bytes(temporary / "model.onnx", b"graph")
        loading = describe_onnx_loading(["model.onnx"])
        write_export_card(run / "final", temporary, tmp_path / "onnx", "onnx", loading)
    firth.push(tmp_path / "onnx", "me/animals", revision="onnx")
    files = server.repos["me/animals"]["branches"]["onnx"]
    assert set(files) == {".gitattributes", "manifest.json", "model.onnx", "README.md"}
    card = files["README.md"].decode()
    assert 'snapshot_download("me/animals")' in card
    assert 'model = onnxruntime.InferenceSession(f"{folder}/model.onnx")' in card


def test_folders_that_are_not_ours_are_refused(server: HubServer, run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret.txt").write_text("x")
    shutil.copytree(run / "final", tmp_path / "changed")
    (tmp_path / "changed" / "config.json").write_text("{}")
    for folder, message in (
        ("other", "is not a model folder that Firth wrote"),
        ("changed", "config.json has 2 bytes"),
        ("none", "is not a folder"),
    ):
        with pytest.raises(UserError, match=message):
            firth.push(tmp_path / folder, "me/animals")
    with pytest.raises(UserError, match="of kind tokenizer: only models are pushed"):
        firth.push(run / "tokenizer", "me/animals")
    with pytest.raises(UserError, match="is not the name of a repository"):
        firth.push(run, "https://example.com/me/animals")
    assert server.requests == []


def test_a_missing_or_wrong_token_and_no_network(
    server: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(UserError, match=r"refuses the token \(401\)"):
        firth.push(run, "me/animals")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match=r"There is no token .* set HF_TOKEN"):
        firth.push(run, "me/animals")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_write")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127.0.0.1:9 cannot be reached .* Check the network"):
        firth.push(run, "me/animals")
    assert capsys.readouterr().err.count("The next attempt is in") == 2


def test_a_push_that_fails_is_tried_again(server: HubServer, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first commit fails after the upload of the weights: nothing is half there."""
    failures = [500]
    server.answer = lambda request: failures.pop() if "/commit/" in request and failures else None
    firth.push(run, "me/animals")
    assert "failed" in capsys.readouterr().err
    assert server.repos["me/animals"]["commits"] == ["main"]
    assert "model.safetensors" in server.repos["me/animals"]["branches"]["main"]


def test_a_run_pushes_its_checkpoints_and_its_model(
    server: HubServer, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One branch fails for good: a line, and the run and the other branches go on."""
    server.answer = lambda request: 500 if request.endswith("/commit/step-2") else None
    options = {"max_steps": 4, "save_steps": 1, "save_total_limit": 1, "push_to_hub": "me/more", **SIZES}
    options["async_save"] = False
    found = firth.pretrain("bert-tiny", run / "data", tmp_path / "run", **options)
    said = capsys.readouterr().err
    assert found["hub"] == f"{server.url}/me/more"
    repo = server.repos["me/more"]
    assert "step-2 could not be pushed" in said
    assert said.count("Training continues.") == 1
    pushed = [branch for branch in repo["commits"] if branch != "main"]
    assert pushed
    assert "step-2" not in pushed
    weights = {name: repo["branches"][name]["model.safetensors"] for name in (*pushed, "main")}
    assert len(set(weights.values())) >= 2
    assert repo["branches"]["main"]["model.safetensors"] == (tmp_path / "run" / "final/model.safetensors").read_bytes()
    assert [p.name for p in (tmp_path / "run").glob(".*.tmp")] == []

    server.answer = lambda request: 503 if request.endswith("/commit/main") else None
    found = firth.pretrain("bert-tiny", run / "data", tmp_path / "run", resume=True, **options)
    assert "the model is complete, and is not pushed" in capsys.readouterr().err
    assert "failed" in found["push_error"]


def test_a_hub_that_hangs_does_not_hold_a_run(
    server: HubServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of the run waits for a while, and says how to push what is missing, also if only hard links are left."""
    released = threading.Event()
    server.answer = lambda request: None if "create" in request else (released.wait(30), 500)[1]
    monkeypatch.setattr(hub_module, "MIN_CLOSE_SECONDS", 0.2)
    for name in ("checkpoint-1", "checkpoint-2"):
        shutil.copytree(run / "checkpoint-2", tmp_path / name)
    uploader = hub_module.CheckpointUploader("me/slow", False)
    for name in ("checkpoint-1", "checkpoint-2"):
        uploader.push(tmp_path / name)
    shutil.rmtree(tmp_path / "checkpoint-1")
    start = time.monotonic()
    uploader.close()
    assert time.monotonic() - start < 10
    said = " ".join(capsys.readouterr().err.split())
    links = tmp_path / ".checkpoint-1.push.tmp"
    assert f"step-1 is not pushed: the Hub is too slow or hangs. Push it later: firth push {links} me/slow" in said
    assert f"firth push {tmp_path / 'checkpoint-2'} me/slow --revision step-2" in said
    shutil.copytree(links, tmp_path / "kept")
    server.answer = lambda request: None
    released.set()
    uploader.thread.join(10)
    assert firth.push(tmp_path / "kept", "me/slow", revision="step-1")["revision"] == "step-1"


def test_a_request_without_an_answer_fails(server: HubServer, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = lambda request: (time.sleep(0.5), 500)[1]
    monkeypatch.setattr(hub_module, "STALLED_SECONDS", 0.05)
    with pytest.raises(UserError, match=r"cannot be reached .* Check the network"):
        firth.push(run, "me/animals")


def test_a_fine_tuning_pushes_its_best_seed(server: HubServer, run: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"text": f"the {a}", "label": a[0]}) + "\n" for a in ("cat", "dog", "cow")))
    tune: dict[str, Any] = {"max_steps": 2, "save_steps": 1, "seeds": 2, "learning_rate": 1e-3, "async_save": False}
    found = firth.finetune(run / "final", "classify", data, data, tmp_path / "t", push_to_hub="topics", **tune)
    assert found["hub"] == f"{server.url}/me/topics"
    branches = server.repos["me/topics"]["branches"]
    assert {"main", "seed-0-step-1", "seed-1-step-1"} <= set(branches)
    card = branches["main"]["README.md"].decode()
    assert "mean of seeds" in card
    assert "have also chosen the step and the seed" in card
    assert "task.json" in branches["main"]


def test_no_hub_no_run(
    server: HubServer, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new run that cannot push is refused before it starts; a resumed one goes on."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    options = {"max_steps": 1, "push_to_hub": "me/more", **SIZES}
    with pytest.raises(UserError, match=r"--push-to-hub me/more: .* Without this option the run needs no network"):
        firth.pretrain("bert-tiny", run / "data", tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    found = firth.pretrain("bert-tiny", run / "data", tmp_path / "run", resume=True, **options)
    assert "cannot be reached" in found["push_error"]
    assert "The run continues." in capsys.readouterr().err
