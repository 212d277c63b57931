"""Reading and writing checkpoints of Hugging Face, and of our own.

How a family names its tensors and settings is its layout (`layouts/`). A model that no family of `transformers`
describes is written under our own names, with `model_type` firth.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from firth.console import warn
from firth.errors import UserError, nearest
from firth.files import fresh_folder, read_json, whole_folder, write_json
from firth.models.config import (
    Classes,
    Embedding,
    Extra,
    Generator,
    Head,
    Learned,
    LMHead,
    ModelConfig,
    Pair,
    Score,
    Tags,
    TaskHead,
    Verdict,
)
from firth.models.layouts import FAMILIES, LAYOUTS, OWN_EXTRAS, OWN_HEAD, Layout
from firth.models.layouts.layout import ACTIVATIONS, THEIR_ACTIVATIONS, class_names, is_a
from firth.models.lora import merge
from firth.models.model import CLASS_LAST, Forced, Model, forced_of, framing, make_model, surroundings
from firth.models.ngram import MODEL_TYPE as NGRAM
from firth.models.task_heads import like, own_dropout
from firth.plain import KIND, from_plain, to_plain
from firth.tokens import Tokenizer, Vocabulary, load_tokenizer
from firth.tokens.frame import A, B, framed

WEIGHTS = "model.safetensors"
OWN = "firth"
OWN_FAMILY = "firth_family"  # in config.json: which of the families that share a layout
OWN_FRAMED = "firth_framed"  # how a text is framed, where that is not as the layout's own family has it
OWN_OBJECTIVE = "firth_objective"  # what the model was pretrained with: its name, and all that it is
GENERATION = "generation_config.json"
ENDS = "eos_token_id"
FORCED = {"bos": "forced_bos_token_id", "eos": "forced_eos_token_id"}
REGRESSION = "regression"
OUR_WORDS = ACTIVATIONS | {"cls": "first"}  # of the settings of heads
THEIR_WORDS = THEIR_ACTIVATIONS | {"first": "cls"}
WRITER = "extras.auxiliary."
DELTA = "extras.generator.delta.weight"  # by how much a body's token vectors differ from its generator's

# --- settings -------------------------------------------------------------------------------------------------------


def family_of(config: ModelConfig, vocab: Vocabulary | None = None) -> str:
    """The `model_type` that describes this model (over this vocabulary) without loss; `firth` when there is none.

    Extras stand beside a family's tensors and change nothing, except a generator: it takes the words from the body,
    and only ELECTRA has a name for what is left.
    """
    layout = _layout_of(config, vocab)
    generator = config.extra("generator")
    own = isinstance(generator, Generator) and (layout is None or layout.verdict is None or generator.disentangled)
    own = own or config.extra("features") is not None  # its head does not read the last states
    return OWN if layout is None or own else layout.model_type


def _layout_of(config: ModelConfig, vocab: Vocabulary | None = None) -> Layout | None:
    """The layout that describes this body and its head without loss."""
    layout = FAMILIES.get(config.family)
    if layout is None:
        return None
    try:
        hf = _named(config, layout)
        same = _spelled_out(_read(hf, "config.json")) == _spelled_out(config)
    except (KeyError, TypeError, UserError):
        return None
    pads = (None, vocab.pad if vocab is not None else hf.get("pad_token_id"))
    return layout if same and hf.get("pad_token_id") in pads else None


def _spelled_out(config: ModelConfig) -> ModelConfig:
    """The same body with nothing left to its default, so that equal ones compare equal."""
    mlp, head = replace(config.mlp, dropout=config.mlp_dropout), config.head
    if isinstance(head, TaskHead) and not isinstance(head, Embedding):
        head = replace(head, dropout=None, drop_state=False)  # which change nothing once a model has learned
    if isinstance(head, Classes):
        head = replace(head, weights=None)
    sizes: dict[str, Any] = dict(head_dim=config.head_size, num_decoder_layers=config.decoder_layers)
    return replace(config, mlp=mlp, head=head, extras=(), **sizes)


def _body_layout(config: ModelConfig) -> Layout | None:
    """The layout that describes this body, whatever its head: where the weights of a new model come from."""
    layout = FAMILIES.get(config.family)
    if layout is None:
        return None
    try:
        plain = layout.read({"model_type": layout.model_type, **layout.write(config)})
    except (KeyError, TypeError, UserError):
        return None
    return _layout_of(replace(config, head=plain.head))


def _named(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """What a layout can say of a model; a model that it does not describe gets settings that do not read back."""
    hf = {"model_type": layout.model_type, "architectures": [_architecture(config, layout)], **layout.write(config)}
    plain = layout.read(hf)
    if config.family != LAYOUTS[layout.model_type][0]:
        hf[OWN_FAMILY] = config.family
    if config.framed != plain.framed:
        hf[OWN_FRAMED] = config.framed
    if own := tuple(e for e in config.extras if not (isinstance(e, Pair) and layout.pair)):
        hf[OWN_EXTRAS] = to_plain(replace(config, extras=own))["extras"]
    return hf | (_head_settings(config, layout) if isinstance(config.head, TaskHead) else {})


def _head_settings(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """What config.json says of the head of a task."""
    head, found = config.head, layout.answers_of(config.head)
    if found is None:
        return {OWN_HEAD: to_plain(replace(config, extras=()))["head"]}
    hf: dict[str, Any] = {}
    for field, key in found.settings.items():
        value = getattr(head, field)
        hf[key] = config.dropout if value is None else THEIR_WORDS.get(value, value)
    if isinstance(head, Classes | Tags):
        hf["id2label"] = {str(i): name for i, name in enumerate(head.names)}
        hf["label2id"] = {name: i for i, name in enumerate(head.names)}
    if isinstance(head, Score):
        hf |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    if isinstance(head, Classes | Score):
        hf["problem_type"] = REGRESSION if isinstance(head, Score) else "single_label_classification"
    return hf


def _read_head(hf: dict[str, Any], layout: Layout, config: ModelConfig, where: str) -> TaskHead | None:
    """The head of a task that a config.json names, if it does."""
    if OWN_HEAD in hf:
        own = from_plain(to_plain(config) | {"head": hf[OWN_HEAD]}, ModelConfig, where).head
        assert isinstance(own, TaskHead)
        return own
    found = next((a for a in layout.answers if is_a(hf, "For" + a.architecture.rpartition("For")[2])), None)
    if found is None:
        return Embedding("mean") if layout.reader and is_a(hf, layout.reader) else None
    said = {field: hf[key] for field, key in found.settings.items() if hf.get(key) is not None}
    head: Any = replace(found.head, **{field: OUR_WORDS.get(value, value) for field, value in said.items()})
    if isinstance(head, Classes | Tags):
        head = replace(head, names=class_names(hf))
    if isinstance(head, Classes):
        kind = hf.get("problem_type") or (REGRESSION if len(head.names) == 1 else None)  # as `transformers` takes it
        head = like(Score, head) if kind == REGRESSION else head
    return own_dropout(head, config)


def _architecture(config: ModelConfig, layout: Layout) -> str:
    found: str | None
    if isinstance(config.head, TaskHead):
        answers = layout.answers_of(config.head)
        found = layout.body if isinstance(config.head, Embedding) else answers and answers.architecture
    elif isinstance(config.head, Verdict) or (config.extra("generator") and layout.verdict):
        found = layout.verdict
    else:
        found = layout.pair if config.extra("pair") and layout.pair else layout.lm
    if found is None:
        raise UserError(f"transformers has no {layout.model_type} with this head.")
    return found


def to_hf_config(config: ModelConfig, vocab: Vocabulary | None) -> dict[str, Any]:
    """The contents of config.json."""
    if family_of(config, vocab) == OWN:
        hf: dict[str, Any] = {"model_type": OWN, "architectures": ["FirthModel"], OWN: to_plain(config)}
    else:
        hf = _named(config, FAMILIES[config.family])
    hf["dtype"] = "float32"
    return hf if vocab is None else hf | token_ids(config, vocab)


def token_ids(config: ModelConfig, vocab: Vocabulary) -> dict[str, int | None]:
    """Which tokens frame a text, under the names that `transformers` has for them."""
    facts = {"pad_token_id": vocab.pad, "bos_token_id": vocab.bos, "eos_token_id": vocab.eos}
    if config.shape == "encoder-decoder":
        frame = framing(config, vocab)
        facts |= {"eos_token_id": frame.end, "decoder_start_token_id": frame.start}
        if config.framed:
            facts |= {"bos_token_id": frame.before[0]}
    return facts


def from_hf_config(hf: Any, where: str = "config.json") -> ModelConfig:
    """The model that a config.json describes."""
    kind = hf.get("model_type") if isinstance(hf, dict) else None
    if kind == OWN:
        return from_plain(hf.get(OWN), ModelConfig, where)
    if kind == NGRAM:
        raise UserError(
            f"{where}: a model of n-grams only counts, and has neither layers nor vectors. It can be scored "
            "(`firth evaluate --task perplexity`) and can write (`firth generate`)."
        )
    if kind not in LAYOUTS:
        raise UserError(f"{where}: model_type {kind!r} is not one that Firth knows. {nearest(str(kind), LAYOUTS)}")
    try:
        plain = to_plain(_read(hf, where))
        pair = [{KIND: Pair.__name__}] if LAYOUTS[kind][1].pair in (hf.get("architectures") or []) else []
        plain["extras"] = [*pair, *hf.get(OWN_EXTRAS, plain["extras"])]
    except (TypeError, ValueError, AttributeError) as e:
        raise UserError(f"{where}: a setting has a value of the wrong type ({e}).") from None
    return from_plain(plain, ModelConfig, where)  # every value is what its field says


def _read(hf: dict[str, Any], where: str) -> ModelConfig:
    """The body and the head."""
    name, layout = LAYOUTS[hf["model_type"]]
    for setting, value in layout.fixed.items():
        if hf.get(setting, value) != value:
            kind = layout.model_type
            raise UserError(f"{where}: {setting} is {hf[setting]!r}, and Firth knows {kind} only with {value!r}.")
    config = layout.read(hf)
    if (head := _read_head(hf, layout, config, where)) is not None:
        config = replace(config, head=head, extras=())
    return replace(config, family=hf.get(OWN_FAMILY, name), framed=hf.get(OWN_FRAMED, config.framed))


def with_vocabulary(config: ModelConfig, vocab: Vocabulary) -> ModelConfig:
    """The same model for these tokens. RoBERTa counts its places from the id after that of its padding token."""
    config, layout = replace(config, vocab_size=vocab.size), FAMILIES.get(config.family)
    if layout is None or not layout.after_pad or not isinstance(config.position, Learned):
        return config
    length = config.position.length - config.position.offset
    return replace(config, position=Learned(length + vocab.pad + 1, vocab.pad + 1))


# --- tensors --------------------------------------------------------------------------------------------------------


def to_hf(model: Model, some: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of a model, or `some` of them, under the names that its config.json promises."""
    state = merge(model, own_state(model)) if some is None else dict(some)
    vocab = model.tokenizer.vocab if model.tokenizer is not None else None
    if family_of(model.config, vocab) == OWN:
        return {k: v.contiguous() for k, v in state.items()}
    result: dict[str, Tensor] = {}
    rules = FAMILIES[model.config.family].rules(model.config)
    for rule in rules if some is None else [rule for rule in rules if rule.ours in state]:
        result |= dict(zip(rule.theirs, rule.split(state.pop(rule.ours)), strict=True))
    assert all(name.startswith("extras.") for name in state), "a family names all of its tensors"
    layout = FAMILIES[model.config.family]
    if (found := layout.answers_of(model.config.head)) is not None and found.prefix:
        body = {name for rule in layout.body_rules(model.config) for name in rule.theirs if name in result}
        result = {k: v for k, v in result.items() if k not in body} | _prefixed(
            {name: result[name] for name in body}, layout.prefix, found.prefix
        )
    return result | {k: v.contiguous() for k, v in state.items()}


def own_state(model: Model) -> dict[str, Tensor]:
    """The tensors of a model by name, each once, also where two parts share it."""
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: value.detach() for name, value in model.state_dict().items() if name in once}


def from_hf(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors under our names; those that `tensors` does not have are left out.

    They have our names already where the model that wrote them was one of our own, whatever this one is.
    """
    layout = _body_layout(config)
    ours = tensors if layout is None or _are_ours(tensors) else _renamed(tensors, config, layout)
    if config.extra("auxiliary") is not None and _are_ours(tensors):
        ours = {WRITER + k.removeprefix("head."): v for k, v in ours.items() if k.startswith("head.")} | ours
    generator = config.extra("generator")
    if DELTA in ours and not (isinstance(generator, Generator) and generator.disentangled):
        ours = ours | {"embed.tokens.weight": ours["embed.tokens.weight"] + ours[DELTA]}  # what the body has read
    if ("extras.generator.narrow.weight" in tensors) == (generator is not None):
        return ours
    return {k: v for k, v in ours.items() if not k.startswith("head.")}  # a generator's head does not fit a body


def _are_ours(tensors: dict[str, Tensor]) -> bool:
    return "embed.tokens.weight" in tensors


def _renamed(tensors: dict[str, Tensor], config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    tensors = _in_full(tensors, config, layout)
    result = {k: v for k, v in tensors.items() if k.startswith("extras.")}
    for rule in layout.rules(config):
        if all(name in tensors for name in rule.theirs):
            result[rule.ours] = rule.join([tensors[name] for name in rule.theirs])
    return result


def _in_full(tensors: dict[str, Tensor], config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """The tensors as today's `transformers` names them: norms by their new names, the body with its prefix."""
    tensors = {k.replace(".gamma", ".weight").replace(".beta", ".bias"): v for k, v in tensors.items()}
    for prefix in {answers.prefix for answers in layout.answers} - {""}:
        tensors = _prefixed(tensors, prefix, layout.prefix)
    if layout.prefix and not any(k.startswith(layout.prefix) for k in tensors):
        beside = _known(config, layout).union(k for k in tensors if k.startswith("extras.") or _is_unused(k, layout))
        tensors = {k if k in beside else layout.prefix + k: v for k, v in tensors.items()}
    for name, others in layout.twins.items():
        if found := [tensors[other] for other in others if other in tensors]:
            tensors.setdefault(name, found[0])
    return tensors


def _prefixed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {new + k.removeprefix(old) if k.startswith(old) else k: v for k, v in tensors.items()}


def _known(config: ModelConfig, layout: Layout) -> set[str]:
    """All names that the tensors of a model may have."""
    named = {name for rule in layout.rules(config) for name in rule.theirs}
    return named.union(layout.twins, *layout.twins.values())


def _is_unused(name: str, layout: Layout) -> bool:
    return any(fnmatch(name, pattern) for pattern in layout.unused)


def unexpected(tensors: dict[str, Tensor], model: Model) -> list[str]:
    """What is in a file, and neither in the model nor known to be of no use for it."""
    layout = _body_layout(model.config)
    if layout is None or _are_ours(tensors):
        return sorted(tensors.keys() - model.state_dict().keys())
    full = _in_full(tensors, model.config, layout)
    left = full.keys() - _known(model.config, layout) - model.state_dict().keys()
    strange = {name for name in left if not _is_unused(name, layout)}
    for name, others in layout.twins.items():  # one tensor in the model, and two different ones in the file
        strange |= {other for other in others if other in full and not torch.equal(full[other], full[name])}
    return sorted(strange)


def _weight_files(folder: Path) -> list[str]:
    index = folder / (WEIGHTS + ".index.json")
    if not index.is_file():
        return [WEIGHTS]
    facts = read_json(index)
    if not isinstance(facts, dict) or not isinstance(facts.get("weight_map"), dict) or not facts["weight_map"]:
        raise UserError(f"{index} has no weight_map: not an index of weights.")
    return sorted({str(name) for name in facts["weight_map"].values()})


def check_weights(folder: Path) -> list[str]:
    """The names of the files that a checkpoint has its tensors in; a folder without them is an error."""
    names = _weight_files(folder)
    if not (folder / names[0]).is_file():
        if any(folder.glob("*.bin")):
            raise UserError(
                f"{folder} has its weights in a .bin file, a pickle that can run any code when it is opened. "
                "Convert it with transformers: AutoModel.from_pretrained(...).save_pretrained(...)."
            )
        raise UserError(f"{folder} has no {WEIGHTS}: not a checkpoint.")
    return names


def read_tensors(folder: Path, only: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint folder, in one file or in several with an index; all, or those named in `only`."""
    names = check_weights(folder)
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as f:
                tensors |= {key: f.get_tensor(key) for key in f.keys() if only is None or key in only}  # noqa: SIM118
        except (SafetensorError, OSError) as e:
            raise UserError(f"{folder / name} cannot be read ({e}): the file is damaged or cut short.") from None
    return tensors


def read_config(folder: str | Path) -> ModelConfig:
    """The model that a checkpoint folder holds."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        inside = next((p for p in (folder / "final", *sorted(folder.glob("*/final"))) if p.is_dir()), None)
        hint = f" Did you mean {inside}?" if inside else ""
        raise UserError(f"{folder} is not a checkpoint: it has no config.json.{hint}")
    config = from_hf_config(read_json(folder / "config.json"), str(folder / "config.json"))
    layout = FAMILIES.get(config.family)
    if layout is None or layout.settle is None:
        return config
    return layout.settle(config, lambda *names: read_tensors(folder, names))


def load_model(folder: str | Path, head: Head | None = None, extras: tuple[Extra, ...] = ()) -> Model:
    """Open a checkpoint of ours or a Hugging Face folder; `head` puts a new head, and new extras, on its body.

    The words that a language model has are no new head: where they are not in the checkpoint, that is said.
    """
    folder = Path(folder)
    config = read_config(folder)
    tensors = read_tensors(folder)
    model = make_model(config if head is None else replace(config, head=head, extras=extras))
    new_head = head is not None and (head != config.head or isinstance(head, TaskHead))
    load_weights(model, tensors, str(folder), new_head)
    if head is None:
        model.objective = read_json(folder / "config.json").get(OWN_OBJECTIVE)
    take_endings(model, folder)
    if head is None and (strange := unexpected(tensors, model)):
        some = ", ".join(strange[:3])
        warn(f"{folder}: {len(strange)} tensors have no place in this model and are left out, such as {some}.")
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        model.tokenizer = load_tokenizer(folder)
        check_vocabulary(config, model.tokenizer.vocab, str(folder))
    return model.eval()


def check_vocabulary(config: ModelConfig, vocab: Vocabulary, where: str) -> None:
    if config.vocab_size < vocab.size:
        raise UserError(
            f"{where}: the tokenizer has {vocab.size:,} tokens, and the model only {config.vocab_size:,}: "
            "they do not belong together."
        )


def load_weights(
    model: Model, tensors: dict[str, Tensor], where: str, new_head: bool = False, whole: bool = False
) -> None:
    """Fill a model; what the body lacks is an error, a head or an extra starts fresh unless it must be `whole`.

    A shape that is not the model's is an error too; under a `new_head` the old one may have any shape.
    """
    state, wanted = from_hf(tensors, model.config), own_state(model)
    wrong = [
        f"{name} is {tuple(state[name].shape)} in the file and {tuple(p.shape)} by the config"
        for name, p in wanted.items()
        if name in state and state[name].shape != p.shape and not (new_head and name.startswith("head."))
    ]
    if wrong:
        raise UserError(f"{where}: the weights do not fit the config: " + "; ".join(wrong[:5]))
    state = {k: v for k, v in state.items() if k in wanted and v.shape == wanted[k].shape}
    missing = [name for name in wanted if name not in state]
    if lacking := [name for name in missing if whole or not name.startswith(("head.", "extras."))]:
        raise UserError(f"{where}: {len(lacking)} tensors of the model are missing, such as {', '.join(lacking[:3])}.")
    if missing and not new_head:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        warn(f"{where} has no head for this ({some}): it starts fresh.")
    with torch.no_grad():
        for name, value in state.items():
            wanted[name].copy_(value)


def about_writing(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file that says how a checkpoint writes, where `transformers` looks for it, and what it says."""
    path = folder / GENERATION
    path = path if path.is_file() else folder / "config.json"
    facts = read_json(path)
    if not isinstance(facts, dict):
        raise UserError(f"{path} must hold settings by name.")
    return path, facts


def read_ends(folder: Path, config: ModelConfig) -> tuple[int, ...] | None:
    """The tokens each of which ends a text, if a checkpoint lists them; a single one is the tokenizer's to tell."""
    path, facts = about_writing(folder)
    found = facts.get(ENDS)
    if found is None or type(found) is int:
        return None
    if not isinstance(found, list) or not found or not all(type(token) is int for token in found):
        raise UserError(f"{path}: {ENDS} is {found!r}, and must be the id of a token or a list of such ids.")
    if wrong := [token for token in found if not 0 <= token < config.vocab_size]:
        size = f"{config.vocab_size:,}"
        raise UserError(f"{path}: {ENDS} has the id {wrong[0]}, and the vocabulary of this model only {size} tokens.")
    return tuple(found)


def ends_facts(model: Model) -> dict[str, list[int]]:
    """The listed ends, as they are written; the heads of BART's and T5's tasks in `transformers` need a single one."""
    single = model.config.shape == "encoder-decoder" and not isinstance(model.config.head, LMHead)
    return {} if model.ends is None or single else {ENDS: list(model.ends)}


def take_endings(model: Model, folder: Path) -> None:
    """Let the texts of a model begin and end as a checkpoint says."""
    model.forced = read_forced(folder)
    model.ends = read_ends(folder, model.config) if model.config.shape != "encoder" else None


def read_forced(folder: Path) -> Forced:
    """The tokens that are forced in the texts of a checkpoint."""
    path, facts = about_writing(folder)
    found = {ours: facts.get(theirs) for ours, theirs in FORCED.items()}
    one = {ours: min(some, default=None) if isinstance(some, list) else some for ours, some in found.items()}
    if wrong := [FORCED[name] for name, token in one.items() if not (token is None or type(token) is int)]:
        raise UserError(f"{path}: {wrong[0]} must be the id of a token.")
    return Forced(**one)


def forced_facts(model: Model, vocab: Vocabulary) -> dict[str, int | None]:
    """What is forced, as it is written. BART's configuration in `transformers` forces an end unless it says null."""
    found = forced_of(model, vocab)
    facts = {theirs: getattr(found, ours) for ours, theirs in FORCED.items()}
    bart = model.config.framed and model.config.shape == "encoder-decoder"
    return {name: token for name, token in facts.items() if token is not None or (bart and name == FORCED["eos"])}


def generation_config(model: Model, vocab: Vocabulary) -> dict[str, Any]:
    facts = token_ids(model.config, vocab) | forced_facts(model, vocab) | ends_facts(model)
    return {k: v for k, v in facts.items() if v is not None}


def write_model(model: Model, folder: Path) -> None:
    """The files of a Hugging Face folder, into a folder that is there."""
    write_settings(model, folder)
    save_file(to_hf(model), folder / WEIGHTS, metadata={"format": "pt"})


def write_settings(model: Model, folder: Path) -> None:
    """All of them but the weights."""
    tokenizer = model.tokenizer
    vocab = tokenizer.vocab if tokenizer is not None else None
    note = {} if model.objective is None else {OWN_OBJECTIVE: model.objective}
    forced = forced_facts(model, vocab) if vocab is not None and model.config.shape != "encoder" else {}
    write_json(folder / "config.json", to_hf_config(model.config, vocab) | forced | ends_facts(model) | note)
    if tokenizer is not None and vocab is not None:
        with_frame(tokenizer, model.config).save(folder)
        if model.config.family == "xlnet":  # `transformers` takes its class from the last place of a row
            path = folder / "tokenizer_config.json"
            write_json(path, read_json(path) | {"padding_side": "left"})
        if isinstance(model.config.head, LMHead) and model.config.shape != "encoder":
            write_json(folder / GENERATION, generation_config(model, vocab))


class Frame(NamedTuple):
    """One text or two as a model reads them, with `A` and `B` in their places."""

    ids: list[int]
    segment: list[int]


def with_frame(tokenizer: Tokenizer, config: ModelConfig) -> Tokenizer:
    """A tokenizer that puts raw texts into the frame of an encoder or of BART, as those of their families do."""
    reads_frames = config.shape == "encoder" or (config.shape == "encoder-decoder" and config.framed)
    if not reads_frames or not config.num_layers or not isinstance(config.head, LMHead) or tokenizer.vocab.sep is None:
        return tokenizer
    before, between, after = surroundings(config, tokenizer.vocab)
    one = Frame([*before, A, *after], [0] * (len(before) + 1 + len(after)))
    first = [*before, A, *between]
    two = Frame([*first, B, *after], [0] * len(first) + [1] * (1 + len(after)))
    last = config.family == CLASS_LAST
    if last:
        one.segment[-1] = two.segment[-1] = 2  # its [CLS] is of neither text
    return framed(tokenizer, [one, two], config.num_segments > 1 or last)


def save_model(model: Model, folder: Path, overwrite: bool = False) -> None:
    """Write a folder whole or not at all; only a checkpoint is overwritten, and only when asked."""
    fresh_folder(folder, "folder", overwrite)
    with whole_folder(folder) as temporary:
        write_model(model, temporary)
