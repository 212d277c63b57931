"""Recipe: everything a run depends on, as one plain file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from firth.core.errors import UserError, did_you_mean
from firth.core.files import write_text
from firth.core.serialization import from_dict, to_dict
from firth.models import Distillation, LMHead, ModelConfig
from firth.models.config import AWDLSTMConfig, BiLSTMConfig, ELMoConfig, TransformerXL
from firth.objectives import CLM, MLM, OBJECTIVES, BiLM, Objective
from firth.tokens import MixConfig

RecipeT = TypeVar("RecipeT")  # a recipe: a dataclass of plain values
MAX_ROW_TOKENS = 2**16  # places in a row are sorted as numbers of 16 bits
MAX_STEP_TOKENS = 2**31  # tokens: whoever asks for more has mistyped, and no memory holds them
# how runs were computed before there were such fields
LEGACY_DEFAULTS = {"residual": "float32", "compile_regions": False, "last_layer": "all"}
MAX_RUN_MINUTES_OR_EPOCHS = 10**9  # minutes, or times through the text: whoever asks for more has mistyped


def recipe_field(default: Any, help: str, shown_default: str | None = None) -> Any:
    """A field that every run has, with the words that `--help` shows for it and, where they differ, its default."""
    return field(
        default=default, metadata={"help": help, "default": str(default) if shown_default is None else shown_default}
    )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What pretraining and fine-tuning have in common, under the names that Hugging Face uses."""

    output_dir: str = recipe_field("", "Folder of the run. An existing one is refused unless --resume or --overwrite.")
    max_steps: int = recipe_field(0, "Optimizer steps; 0 counts them from --num-train-epochs.")
    num_train_epochs: float = recipe_field(3.0, "How often the text is read, when --max-steps is not given.")
    minutes: float = recipe_field(
        0.0, "Plan the run to end after so many minutes: some steps are timed, then max_steps is fixed."
    )
    max_seq_length: int = recipe_field(128, "Tokens in a row.")
    per_device_train_batch_size: int = recipe_field(32, "Rows that are computed at once.")
    gradient_accumulation_steps: int = recipe_field(1, "How many of these make one optimizer step.")
    learning_rate: float = recipe_field(
        1e-3, "The highest rate, reached after the warm-up.", shown_default="by the model's width"
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "inverse-sqrt", "wsd", "slanted-triangle"] = (
        recipe_field(
            "linear",
            "How the rate falls after the warm-up: linear and cosine to 0 at the end, constant not at all, inverse-sqrt "
            "with the root of the steps (no end is in sight), wsd only at the end (see --wsd-decay), slanted-triangle in a "
            "line to a 32nd, from which it also rose (ULMFiT).",
        )
    )
    wsd_decay: float = recipe_field(
        0.1, "With the schedule wsd: the last share of the run, in which the rate falls to 0."
    )
    warmup_steps: int = recipe_field(-1, "Steps over which the rate rises; -1 takes a tenth of the run.")
    optim: Literal["adamw", "muon", "adafactor"] = recipe_field(
        "adamw",
        "adamw; muon turns the matrices inside the blocks by steps of equal length in every direction, and leaves the "
        "rest to AdamW; adafactor is T5's, with a rate in proportion to the weights (T5 took 1e-2) and little memory. "
        "Transformers that begin from nothing take muon by themselves, T5 adafactor; all else is learned with adamw.",
    )
    muon_learning_rate: float = recipe_field(
        0.0, "Muon's highest rate, for the matrices inside the blocks; 0 takes --learning-rate, AdamW's for the rest."
    )
    muon_momentum: float = recipe_field(0.95, "How much of its direction Muon keeps from step to step.")
    weight_decay: float = recipe_field(
        0.01,
        "The optimizer's weight decay, on matrices only.",
        shown_default="0.01; 0.2 where a model is pretrained with muon",
    )
    adam_beta1: float = recipe_field(0.9, "AdamW's first decay rate.")
    adam_beta2: float = recipe_field(0.98, "AdamW's second decay rate.")
    adam_epsilon: float = recipe_field(1e-6, "AdamW's epsilon.")
    max_grad_norm: float = recipe_field(1.0, "Gradients longer than this are cut; 0 leaves them.")
    spike_factor: float = recipe_field(
        0.0,
        "Skip a step whose loss or gradient is so many times the usual (the median of the last 128 steps); 0: never. "
        "A step whose loss or gradient is no number is skipped always.",
    )
    max_bad_steps: int = recipe_field(5, "Stop, and say why, after so many skipped steps in a row.")
    ema_decay: float = recipe_field(
        0.0,
        "Keep a running mean of the weights, this much of it at every step (0.999), to evaluate and to keep; 0: no.",
    )
    eval_steps: int = recipe_field(
        0, "Evaluate every so many steps; 0 takes a tenth of the run (pretraining). Always at the end."
    )
    save_steps: int = recipe_field(500, "Write a checkpoint every so many steps.")
    save_total_limit: int = recipe_field(2, "Keep so many checkpoints; 0 keeps all.")
    async_save: bool = recipe_field(
        True, "Write checkpoints while the training goes on, from a copy in the host's memory."
    )
    logging_steps: int = recipe_field(1, "Write a line to log.jsonl every so many steps.")
    seed: int = recipe_field(0, "Decides the order of the text, the noise, the first weights and the dropout.")
    deterministic: bool = recipe_field(
        False, "Every sum in one order, so that a resumed run is the same bit for bit on a GPU too; slower there."
    )
    gradient_checkpointing: bool = recipe_field(
        False, "Compute each layer again in the backward pass: a third slower, and room for much longer rows."
    )
    recompute: bool | None = recipe_field(
        None,
        "In a compiled step, compute norms and activations again in the backward pass, in place of keeping them: a "
        "third less to keep (Llama). By itself from half a billion parameters on.",
    )
    device: Literal["auto", "cpu", "cuda"] = recipe_field(
        "auto", "Where to compute: auto takes a GPU where there is one. Of several, CUDA_VISIBLE_DEVICES=1 chooses."
    )
    bf16: bool | None = recipe_field(
        None, "Compute in bfloat16; by itself on a GPU that can, never by itself on a CPU."
    )
    fp16: bool | None = recipe_field(
        None, "Compute in float16, with a loss that is scaled up; by itself on a GPU that has no bfloat16."
    )
    weights: Literal["float32", "bf16"] = recipe_field(
        "float32",
        "bf16 computes with weights that are rounded to bfloat16, and all between them; the exact ones stay with the "
        "optimizer. Meant for a GPU; takes half a copy of the weights more in memory.",
    )
    residual: Literal["float32", "bf16"] = recipe_field(
        "bf16",
        "What goes from layer to layer where products are in bfloat16: bf16 is half as much to read and write (3% of "
        "a step of GPT-2), float32 more exact. (With --parallel fsdp blocks are in bfloat16 throughout.)",
    )
    last_layer: Literal["targets", "all"] = recipe_field(
        "targets",
        "Where a loss asks at some places of a row (masked tokens), compute the last layer there alone, reading all "
        "others: the same loss, and three quarters of a layer less to compute. all computes it everywhere.",
    )
    fp8: bool = recipe_field(
        False,
        "Multiply by the weights of the layers in 8 bits, forward and backward, with a scale for each row; the "
        "gradients of weights are in bfloat16. Meant for a GPU that has instructions for it (Hopper, Ada), and goes "
        "well with --weights bf16. Less exact: compare the loss.",
    )
    compile: bool | None = recipe_field(
        None, "Compile the step (torch.compile); by itself on a GPU. What was compiled is kept in ~/.cache/firth."
    )
    compile_regions: bool | None = recipe_field(
        None,
        "Compile each kind of block once, not the step as a whole: the first step comes up to 40 s sooner, and each is "
        "up to 4% slower (H200). By itself on a GPU where --minutes are at most 15.",
    )
    cuda_graphs: bool | None = recipe_field(
        None,
        "Replay a step as one CUDA graph, in which the GPU does not wait for Python; by itself where a step is "
        "compiled and has one micro-batch, and in short fine-tunings, which are not compiled.",
    )
    fused_loss: bool | None = recipe_field(
        None,
        "Compute the loss by a kernel of our own, and never hold more than a gigabyte of scores; by itself on a GPU "
        "where there are many, and on a CPU, in pieces that stay in its cache.",
    )
    fused_attention: bool = recipe_field(
        True,
        "Attention by our own kernel where that is faster: in a compiled step on a GPU with dropout, packed rows, "
        "windows, a bias or another sequence, and for scores by distance. --no-fused-attention leaves it to torch.",
    )
    pad_vocabulary: bool | None = recipe_field(
        None, "Compute scores for a multiple of 128 tokens, and cut off the rest again; by itself on a GPU."
    )

    parallel: Literal["none", "ddp", "fsdp"] = recipe_field(
        "none",
        "Learn in several processes, which torchrun starts: ddp gives each the whole model, fsdp a part of it.",
    )
    cpu_offload: bool = recipe_field(
        False, "With --parallel fsdp: weights and optimizer stay in the host's memory, and layers come when needed."
    )
    processes: int = 1  # what a run notes of itself: how many it began with, which its batch depends on

    @property
    def global_batch_size(self) -> int:
        """Rows that a step learns from, in all processes together."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.processes

    def check_parallel(self) -> None:
        """Whether several processes can do it."""
        if self.cpu_offload and self.parallel != "fsdp":
            raise UserError("cpu_offload is for --parallel fsdp: leave it out.")
        if self.parallel != "fsdp":
            return
        if self.optim != "adamw":
            raise UserError(
                f"--parallel fsdp is for adamw, and {self.optim} needs whole matrices: take --parallel ddp, or adamw."
            )
        if self.weights == "bf16":
            raise UserError("--parallel fsdp gathers weights in bfloat16 where --bf16 says so: leave weights=bf16 out.")
        if self.fp8:
            raise UserError("--parallel fsdp has parts of matrices, and fp8 needs whole ones: leave it out.")

    def check(self) -> None:
        """Refuse numbers that make no sense before anything is computed."""
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), float) and not math.isfinite(value):
                raise UserError(f"{f.name} is {value}, and must be a finite number.")
        at_least = {
            "max_seq_length": 4,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "save_steps": 1,
            "logging_steps": 1,
            "max_steps": 0,
            "eval_steps": 0,
            "save_total_limit": 0,
            "seed": 0,
            "minutes": 0,
            "learning_rate": 0,
            "weight_decay": 0,
            "adam_beta1": 0,
            "adam_beta2": 0,
            "max_grad_norm": 0,
            "muon_learning_rate": 0,
            "muon_momentum": 0,
            "wsd_decay": 0,
            "ema_decay": 0,
            "spike_factor": 0,
            "max_bad_steps": 1,
            "processes": 1,
        }
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}, and must be at least {least}.")
        for name in ("minutes", "num_train_epochs"):
            if getattr(self, name) > MAX_RUN_MINUTES_OR_EPOCHS:
                raise UserError(
                    f"{name} is {getattr(self, name):g}, and must be at most {MAX_RUN_MINUTES_OR_EPOCHS:,}."
                )
        if self.adam_epsilon <= 0:
            raise UserError(f"adam_epsilon is {self.adam_epsilon}, and must be more than 0: it keeps 0 / 0 away.")
        if self.warmup_steps < -1:
            raise UserError(
                f"warmup_steps is {self.warmup_steps}: it must be at least 0, or -1 for a tenth of the run."
            )
        for name in ("adam_beta1", "adam_beta2", "muon_momentum", "ema_decay"):
            if getattr(self, name) >= 1:
                raise UserError(f"{name} is {getattr(self, name)}, and must be less than 1.")
        if 0 < self.spike_factor <= 1:
            raise UserError(f"spike_factor is {self.spike_factor}: it must be more than 1, or 0 for never.")
        if self.fp16 and (self.bf16 or self.weights == "bf16"):
            raise UserError("fp16 and bf16 are two ways to compute: choose one.")
        if self.fp8 and self.fp16:
            raise UserError("fp8 goes with bfloat16, whose gradients need no scaled loss: leave fp16 out.")
        if self.wsd_decay > 1:
            raise UserError(f"wsd_decay is {self.wsd_decay}, a share of the run: it must be at most 1.")
        if self.muon_learning_rate and self.optim != "muon":
            raise UserError(f"muon_learning_rate is for --optim muon, and this run has {self.optim}.")
        if self.muon_learning_rate and not self.learning_rate:
            raise UserError("muon_learning_rate goes up and down with learning_rate, which is 0: give it a value too.")
        if self.max_seq_length > MAX_ROW_TOKENS:
            raise UserError(
                f"max_seq_length is {self.max_seq_length:,}, and rows have at most {MAX_ROW_TOKENS:,} tokens."
            )
        tokens = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.max_seq_length
        if tokens > MAX_STEP_TOKENS:
            raise UserError(
                f"A step would read {tokens:,} tokens at once, and {MAX_STEP_TOKENS:,} are the most: lower "
                "--per-device-train-batch-size."
            )
        if self.cuda_graphs and self.gradient_accumulation_steps > 1 and self.compile is not False:
            raise UserError(
                "cuda_graphs replay compiled steps of one micro-batch: leave it out, or gradient_accumulation_steps."
            )
        self.check_parallel()
        if self.seed >= 2**63:
            raise UserError(f"seed is {self.seed}, and must be less than 2 to the power of 63.")
        if not self.max_steps and not self.minutes and self.num_train_epochs <= 0:
            raise UserError("num_train_epochs must be more than 0 when neither max_steps nor minutes is given.")


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingConfig):
    """A pretraining run. `model` and `objective` are complete: nothing is looked up elsewhere."""

    model: ModelConfig
    objective: Objective
    data: str = recipe_field("", "Folder of token shards.")
    tokenizer: str = recipe_field("", "Fingerprint of the tokenizer that the shards were made with.")
    checkpoint: str = recipe_field("", "Checkpoint whose weights the run starts from; empty starts fresh.")
    teacher: str = recipe_field("", "Checkpoint to learn from, whose layers the model also begins with (distillation).")
    distillation: Distillation = field(default_factory=Distillation)
    warm_start: Literal["none", "ppmi"] = recipe_field(
        "none",
        "ppmi begins with embeddings that know which tokens keep company, counted in the text; none with random ones.",
        shown_default="ppmi for a Transformer that begins from nothing",
    )
    order: Literal["packed", "stream"] = recipe_field(
        "packed", "packed shuffles rows of whole documents; stream lets each row go on where it stopped a step before."
    )
    split: Literal["token", "sentence"] = recipe_field(
        "token", "Where a document longer than a row is cut: where the row is full, or at the end of a sentence."
    )
    sources: dict[str, str] = field(default_factory=dict)  # in place of `data`: folders of shards that are mixed
    mix: dict[str, float] = field(default_factory=dict)  # the share of each
    mix_temperature: float | None = recipe_field(
        None,
        "Mix several --data by their tokens to the power of this: 0.7 in multilingual BERT, 0.3 in XLM-R; at 1 every "
        "text is read equally often, at 0 all sources are read equally.",
    )
    mix_epochs: dict[str, float] = field(default_factory=dict)  # or how often each is read in one epoch
    layer_decay: float = recipe_field(
        1.0,
        "Each layer learns so many times as fast as the one above it, where a checkpoint goes on learning (ULMFiT).",
    )
    memory: int = recipe_field(
        0, "Tokens before a row that XLNet or a Transformer-XL reads again, with --order stream."
    )
    eval_rows: int = recipe_field(256, "At most so many held-out rows are read at an evaluation.")
    batch_ramp: float = recipe_field(
        0.0, "Over this share of the run the batch grows to its full size: small ones learn sooner. 0: at once."
    )
    batch_doublings: int = recipe_field(2, "With --batch-ramp: how often the batch doubles; 2 begins with a quarter.")
    length_ramp: float = recipe_field(
        0.0, "Over this share of the run rows grow to their full length: short ones first, and more. 0: at once."
    )
    length_doublings: int = recipe_field(2, "With --length-ramp: how often the rows double; 2 begins with a quarter.")
    # What a run notes of itself: the shards that it began with, and data that it left out after a rewind, as
    # (step, how many steps of data are passed over from there on).
    shards_checksum: str = ""
    skips: tuple[tuple[int, int], ...] = ()

    @property
    def mixing(self) -> MixConfig:
        """How much of each source is read."""
        return MixConfig(self.mix, self.mix_temperature, self.mix_epochs)

    def check_order(self) -> None:
        """Whether model and objective can read on from step to step, and with a memory."""
        model, name = self.model, type(self.objective).__name__
        if self.memory < 0:
            raise UserError(f"memory is {self.memory}, and must be at least 0.")
        if self.memory and self.order != "stream":
            raise UserError("memory is of the rows of the step before: it needs --order stream.")
        if self.memory and not isinstance(model.position, TransformerXL):
            raise UserError(f"memory is for the position TransformerXL (xlnet), not {type(model.position).__name__}.")
        if self.memory and (isinstance(self.objective, BiLM) or model.get_extra("decoder") or self.teacher):
            raise UserError("memory goes with neither a biLM nor a MaskDecoder nor a teacher.")
        if self.memory and model.window is not None:
            raise UserError("memory is read by all layers, and those with a window see none of it: leave one out.")
        if self.order == "stream" and (
            self.objective.row_layout != "packed" or model.architecture == "encoder-decoder"
        ):
            raise UserError(f"order=stream is for one stack that reads one text; {name} with {model.family} is not.")
        if self.order == "stream" and self.sources:
            raise UserError("order=stream reads one text from beginning to end, not a mix of several.")
        if self.order == "stream" and isinstance(self.objective, MLM) and self.objective.num_static_masks:
            raise UserError(
                "objective.num_static_masks keeps masks for rows that come again, and those of order=stream do not."
            )

    def check_recurrent(self) -> None:
        """Whether LSTMs can do the objective: they read one way, or both, and see nothing else."""
        spec, objective, family = self.model.recurrent, self.objective, self.model.family
        if spec is not None and isinstance(spec, ELMoConfig) != isinstance(objective, BiLM):
            raise UserError("Of all LSTMs the objective bilm is ELMo's, which has no other.")
        if isinstance(spec, AWDLSTMConfig) and objective != CLM(
            across_documents=getattr(objective, "across_documents", False)
        ):
            raise UserError(f"{family} reads from left to right: its objective is clm.")
        if isinstance(spec, BiLSTMConfig) and (not isinstance(objective, MLM) or objective.visibility != "all"):
            raise UserError(f"{family} sees all of a text: its objective is mlm, or another that hides tokens.")
        if isinstance(spec, ELMoConfig) and self.warm_start != "none":
            raise UserError("ELMo has no vectors of words that could begin warm: leave warm_start out.")
        if spec is not None and self.teacher:
            raise UserError(f"{family} has no layers like its teacher's: leave --teacher out.")
        if spec is not None and self.weights == "bf16":
            raise UserError(f"weights=bf16 is not for {family}: leave it out.")

    def check_parallel(self) -> None:
        super().check_parallel()
        model = self.model
        if self.parallel == "fsdp" and (model.recurrent is not None or self.teacher or self.memory):
            raise UserError("--parallel fsdp goes with neither LSTMs nor a teacher nor a memory: take --parallel ddp.")
        if self.parallel == "fsdp" and (model.share_stacks or model.num_shared > 1):
            raise UserError("--parallel fsdp gives each layer to all in parts, and here layers share: take ddp.")

    def check_ramps(self) -> None:
        """Whether batches and rows can begin as small as that."""
        for name, full, what in (("batch", self.global_batch_size, "rows"), ("length", self.max_seq_length, "tokens")):
            share, doublings = getattr(self, f"{name}_ramp"), getattr(self, f"{name}_doublings")
            least = 1 if name == "batch" else 8
            if not 0 <= share <= 1:
                raise UserError(f"{name}_ramp is {share}, a share of the run: it must be between 0 and 1.")
            if doublings < 1:
                raise UserError(f"{name}_doublings is {doublings}, and must be at least 1. {name}_ramp=0 has none.")
            if share and full >> doublings < least:
                raise UserError(
                    f"{name}_doublings is {doublings}, and {full} {what} cannot be halved so often: "
                    f"at least {least} must be left."
                )
        if self.order == "stream" and (self.batch_ramp or self.length_ramp):
            raise UserError("order=stream reads on in rows of one length: leave batch_ramp and length_ramp out.")

    def check(self) -> None:
        """Also what can be wrong between model, objective and length."""
        super().check()
        self.check_order()
        self.check_ramps()
        if self.weights == "bf16" and (self.teacher or self.memory):
            raise UserError("weights=bf16 goes with neither a teacher nor a memory yet: leave it out.")
        self.mixing.check()
        if self.sources and self.warm_start != "none":
            raise UserError("warm_start counts in one text, not in a mix. Leave it out, or prepare all text together.")
        model, objective = self.model, self.objective
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"layer_decay is {self.layer_decay}, and must be more than 0 and at most 1.")
        if self.eval_rows < 1:
            raise UserError(f"eval_rows is {self.eval_rows}, and must be at least 1.")
        if wrong := model.problems():
            raise UserError("; ".join(wrong) + ".")
        if model.architecture not in objective.architectures:
            name, wanted = type(objective).__name__, " or ".join(objective.architectures)
            others = ", ".join(n for n, o in OBJECTIVES.items() if model.architecture in o.architectures)
            raise UserError(
                f"{name} is for the shape {wanted}; {model.family} has the shape {model.architecture}. "
                f"Take such a model, or one of these objectives: {others}."
            )
        self.check_recurrent()
        if not isinstance(model.head, LMHead):
            raise UserError("This checkpoint has a classifier's head: pretraining goes on from a language model.")
        if model.max_length is not None and self.max_seq_length > model.max_length:
            raise UserError(
                f"--max-seq-length {self.max_seq_length} is longer than the model's {model.max_length} places. "
                "Shorten the rows, or give a new model more places with model.position.length."
            )


def save_recipe(recipe: TrainingConfig, path: Path) -> None:
    write_text(path, yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True))


def load_recipe(path: Path, recipe_type: type[RecipeT]) -> RecipeT:
    """The recipe of a run. What an older run could not say is as it was then."""
    return from_dict(LEGACY_DEFAULTS | read_yaml_mapping(path), recipe_type, str(path))


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected lines of `key: value`.")
    return value


def parse_overrides(args: Sequence[str]) -> dict[str, Any]:
    """`model.num_layers=6` after the options, as {"model.num_layers": 6}.

    >>> parse_overrides(["model.num_layers=6", "learning_rate=1e-3"])
    {'model.num_layers': 6, 'learning_rate': '1e-3'}
    """
    found = {}
    for word in args:
        key, equals, value = word.partition("=")
        if not equals or not key:
            hint = f" Name each file with its own option: --data {word}." if Path(word).exists() else ""
            raise UserError(f"{word!r} is not key=value.{hint}")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"{word!r}: {value!r} is neither a number nor a word nor true or false.") from None
    return found


def apply_overrides(recipe: RecipeT, changes: Mapping[str, Any]) -> RecipeT:
    """The recipe with some fields set, by dotted names; an unknown name is an error that names the nearest."""
    plain = to_dict(recipe)
    for key, value in changes.items():
        *path, last = key.split(".")
        place = plain
        free = path and isinstance(getattr(recipe, path[0], None), dict)  # a field whose keys are the user's own
        for depth, name in enumerate([*path, last]):
            if not isinstance(place, dict) or (name not in place and not (free and depth == 1)):
                known = place if isinstance(place, dict) else {}
                above = ".".join(key.split(".")[:depth])
                raise UserError(
                    f"Unknown key {key!r}. " + did_you_mean(name, known) + (f" (in {above})" if above else "")
                )
            if depth < len(path):
                place = place[name]
        place[last] = value
    return from_dict(plain, type(recipe), "recipe")


def recipe_differences(old: Any, new: Any) -> list[str]:
    """What is not the same in two recipes, as `key: old -> new`."""
    a, b = flatten_mapping(to_dict(old)), flatten_mapping(to_dict(new))
    return [f"{k}: {a.get(k)} -> {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]


def flatten_mapping(mapping: Any, prefix: str = "") -> dict[str, Any]:
    """What is in mappings in mappings, by `outer.base_task`."""
    if not isinstance(mapping, dict):
        return {prefix.rstrip("."): mapping}
    return {k: v for key, value in mapping.items() for k, v in flatten_mapping(value, f"{prefix}{key}.").items()}
