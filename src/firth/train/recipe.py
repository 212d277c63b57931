"""Recipe: everything a run depends on, as one plain file."""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import yaml

from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import read_yaml, write_text
from firth.core.hashing import hash_uint64
from firth.core.parse import parse_yaml
from firth.core.serialization import TYPE_KEY, default_fields, from_dict, to_dict
from firth.models import Distillation, KnowledgeTransfer, LMHead, ModelConfig
from firth.models.config import AWDLSTMConfig, BiLSTMConfig, ELMoConfig, TransformerXL
from firth.objectives import CLM, MLM, OBJECTIVES, BiLM, MaskedNextToken, Objective, SequenceAutoencoder
from firth.tokens import MixConfig
from firth.train.tracking import TrackedRun, TrackerName, check_tracker

RecipeT = TypeVar("RecipeT")  # a recipe: a dataclass of plain values
MAX_ROW_TOKENS = 2**16  # tokens: positions in a row are sorted as uint16
MAX_STEP_TOKENS = 2**31  # tokens: more is a typing error
MAX_PACKINGS = 10**4  # the same
MAX_EPOCHS = 10**6  # the same
AUTO_RATE = "auto"  # a learning rate that the run chooses
MAX_RUN_MINUTES_OR_EPOCHS = 10**9  # minutes or epochs: more is a typing error


def recipe_field(
    default: Any,
    help: str,
    shown_default: str | None = None,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    parse: Callable[[str, str], Any] | None = None,
) -> Any:
    """Declare a field with its `--help` text, its bounds and, where `--help` should not print it, its default.

    `ge`, `gt`, `le` and `lt` bound the value: at least, more than, at most, less than. `parse(text, option)` converts
    what is typed.
    """
    bounds = {name: bound for name, bound in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if bound is not None}
    shown = str(default) if shown_default is None else shown_default
    return field(
        default=default,
        metadata={"help": help, "default": shown, "bounds": bounds} | ({"parse": parse} if parse else {}),
    )


def parse_batch_rows(text: str, option: str) -> int:
    """Return a number of rows; 0 for `auto`.

    >>> parse_batch_rows("auto", "--per-device-train-batch-size"), parse_batch_rows("8", "")
    (0, 8)
    """
    rows = 0 if text == "auto" else int(text) if text.isdecimal() else -1
    if rows < 1 and text != "auto":
        raise UserError(f"{option}: {quote(text)} is neither a whole number of at least 1 nor auto.")
    return rows


def parse_learning_rate(text: str, option: str) -> float | str:
    """Return a rate, or "auto".

    >>> parse_learning_rate("auto", "--learning-rate"), parse_learning_rate("3e-4", "--learning-rate")
    ('auto', 0.0003)
    """
    if text == AUTO_RATE:
        return text
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 0):
        raise UserError(f"{option}: {quote(text)} is neither a number of at least 0 nor auto.")
    return rate


BOUNDS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "more than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}


def check_bounds(config: Any) -> None:
    """Raise a UserError for the first field of a dataclass that is not finite or outside of its bounds."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{f.name} is {value}, and must be a finite number.")
        for name, bound in f.metadata.get("bounds", {}).items():
            holds, words = BOUNDS[name]
            if not holds(value, bound):
                shown = f"{value:g}" if isinstance(value, float) else value
                raise UserError(f"{f.name} is {shown}, and must be {words} {bound:,}.")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a step is executed. The defaults are right for almost every run; all settings train the same model.

    Set a field with `engine.weights=bf16` after the options, or in a config file.
    """

    weights: Literal["float32", "bf16"] = recipe_field(
        "float32",
        "Train on a bf16 copy of the weights; the optimizer keeps fp32 master weights. For GPUs. Costs half a copy of "
        "the weights in memory.",
    )
    residual: Literal["float32", "bf16"] = recipe_field(
        "bf16",
        "Dtype of the residual stream under autocast: bf16 halves its memory traffic, float32 is more exact. FSDP "
        "blocks are bf16 throughout.",
    )
    last_layer: Literal["targets", "all"] = recipe_field(
        "targets", "Compute the last layer only at target positions (masked tokens); all computes it everywhere."
    )
    recompute: bool | None = recipe_field(
        None,
        "Recompute norms and activations in the backward pass of a compiled step instead of storing them.",
        shown_default="on from 500M parameters",
    )
    compile_regions: bool | None = recipe_field(
        None,
        "Compile each kind of block once instead of the whole step: the first step starts sooner, each step is up to "
        "4% slower.",
        shown_default="on for GPU runs of at most 15 --minutes",
    )
    cuda_graphs: bool | None = recipe_field(
        None,
        "Replay a step as one CUDA graph.",
        shown_default="on for compiled steps of one micro-batch and for short fine-tuning runs",
    )
    fused_loss: bool | None = recipe_field(
        None,
        "Compute the cross-entropy in chunks, without storing all logits.",
        shown_default="on where the logits are large, and on CPUs",
    )
    fused_attention: bool = recipe_field(
        True, "Use Firth's attention kernel where it is faster than SDPA; false always uses torch."
    )
    pad_vocabulary: bool | None = recipe_field(
        None, "Pad the logits' matmul to a multiple of 128 tokens.", shown_default="on for GPUs"
    )


@dataclass(frozen=True)
class FreezeSchedule:
    """Which layers are trained, from which step, and how fast. Default: all, from the start, at one rate."""

    layer_decay: float = 1.0  # learning rate of a layer over that of the layer above; 1: no decay
    freeze: Literal["none", "embeddings", "backbone"] = "none"
    unfreeze_every: int = 0  # steps per unfrozen layer, from the head down; 0: all from the start
    groups_by_layer: bool = False  # a parameter group per layer, so that its rate can follow the step


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings that pretraining and fine-tuning share, under their Hugging Face names."""

    output_dir: str = recipe_field("", "Write the run to this folder. An existing one needs --resume or --overwrite.")
    max_steps: int = recipe_field(0, "Train for this many optimizer steps; 0 uses --num-train-epochs.", ge=0)
    num_train_epochs: float = recipe_field(
        3.0, "Read the text this many times, unless --max-steps or --minutes is given.", le=MAX_RUN_MINUTES_OR_EPOCHS
    )
    minutes: float = recipe_field(
        0.0,
        "Plan the run to end after this many minutes: time some steps, then set max_steps, and plan again while it "
        "runs.",
        shown_default="no limit",
        ge=0,
        le=MAX_RUN_MINUTES_OR_EPOCHS,
    )
    max_seq_length: int = recipe_field(128, "Set the row length in tokens.", ge=4, le=MAX_ROW_TOKENS)
    per_device_train_batch_size: int = recipe_field(32, "Set the rows per device and micro-batch.", ge=1)
    gradient_accumulation_steps: int = recipe_field(1, "Accumulate gradients over this many micro-batches.", ge=1)
    learning_rate: float = recipe_field(
        1e-3,
        "Set the peak learning rate.",
        shown_default="chosen from model width and optimizer",
        ge=0,
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "inverse-sqrt", "wsd", "slanted-triangle"] = (
        recipe_field(
            "linear",
            "Choose the learning-rate schedule after warmup: linear or cosine decay to 0, constant, inverse-sqrt, wsd "
            "(decay only at the end, see --wsd-decay), slanted-triangle (ULMFiT).",
        )
    )
    wsd_decay: float = recipe_field(
        0.1, "With the wsd schedule: decay to 0 over this last fraction of the run.", ge=0, le=1
    )
    warmup_steps: int = recipe_field(
        -1, "Warm up the learning rate over this many steps; -1 uses a tenth of the run, 0 turns warmup off.", ge=-1
    )
    optim: Literal["adamw", "muon", "adafactor", "lamb"] = recipe_field(
        "adamw",
        "Choose the optimizer. Muon orthogonalises each weight matrix's update and uses AdamW for all other "
        "parameters; Adafactor is T5's, with little memory; LAMB scales each update to its matrix's norm.",
        shown_default="muon for new Transformers, adafactor for T5s, lamb for a MobileBERT with teacher, else adamw",
    )
    muon_learning_rate: float = recipe_field(
        0.0, "Set Muon's peak learning rate for the matrices of the blocks; 0 uses --learning-rate.", ge=0
    )
    muon_momentum: float = recipe_field(0.95, "Set Muon's momentum.", ge=0, lt=1)
    weight_decay: float = recipe_field(
        0.01,
        "Set the weight decay of matrices; 0 turns it off.",
        shown_default="0.01; 0.2 for pretraining with muon",
        ge=0,
    )
    weight_decay_schedule: Literal["learning-rate", "constant", "to-zero"] = recipe_field(
        "learning-rate",
        "Choose how weight decay changes: it follows the learning rate, stays constant from the first step to the "
        "last, or follows the rate and falls to zero over the run as well.",
    )
    cautious_weight_decay: bool = recipe_field(
        False, "Decay a weight only in steps that move it towards 0 anyway (adamw, muon)."
    )
    adam_beta1: float = recipe_field(0.9, "Set beta1 of AdamW and LAMB.", ge=0, lt=1)
    adam_beta2: float = recipe_field(0.98, "Set beta2 of AdamW and LAMB.", ge=0, lt=1)
    adam_epsilon: float = recipe_field(1e-6, "Set epsilon of AdamW and LAMB.", gt=0)
    max_grad_norm: float = recipe_field(1.0, "Clip the gradient norm to this value; 0 disables clipping.", ge=0)
    spike_factor: float = recipe_field(
        0.0,
        "Skip a step whose loss or gradient norm exceeds this multiple of the median of the last 128 steps; 0 turns "
        "it off. Steps with a NaN or infinite loss or gradient are always skipped.",
        ge=0,
    )
    max_bad_steps: int = recipe_field(5, "Stop with a diagnosis after this many skipped steps in a row.", ge=1)
    ema_decay: float = recipe_field(
        0.0, "Keep an exponential moving average of the weights, to evaluate and save; 0 turns it off.", ge=0, lt=1
    )
    tail_average: float = recipe_field(
        0.0,
        "Average the weights over this last share of the steps, to evaluate and save; 0 turns it off.",
        ge=0,
        lt=1,
    )
    eval_steps: int = recipe_field(
        0, "Evaluate every N steps, and at the end; 0 uses a tenth of the run (pretraining).", ge=0
    )
    save_steps: int = recipe_field(500, "Save a checkpoint every N steps.", ge=1)
    save_total_limit: int = recipe_field(2, "Keep the last N checkpoints; 0 keeps all.", ge=0)
    async_save: bool = recipe_field(
        True, "Write checkpoints in the background, from a copy in host memory; --no-async-save waits for them."
    )
    logging_steps: int = recipe_field(1, "Write a line to log.jsonl every N steps.", ge=1)
    report_to: TrackerName = recipe_field(  # noqa: RUF009
        "none",
        "Show the log in tensorboard, trackio, wandb or mlflow too, while the run trains; none: in log.jsonl alone.",
    )
    push_to_hub: str = recipe_field(
        "",
        "Push to this repository of the Hugging Face Hub, OWNER/NAME: checkpoints as branches (step-1000), the final "
        "model to main. The token is that of HF_TOKEN or `hf auth login`.",
        shown_default="none",
    )
    public: bool = recipe_field(False, "With --push-to-hub: make a new repository public; it is private without.")
    seed: int = recipe_field(0, "Seed the data order, the noise, the initial weights and dropout.", ge=0, lt=2**63)
    deterministic: bool = recipe_field(
        False, "Use deterministic kernels, so that a resumed run is bit-equal on a GPU too; slower."
    )
    gradient_checkpointing: bool = recipe_field(
        False,
        "Recompute activations in the backward pass (activation checkpointing): a third slower, far less memory.",
    )
    device: Literal["auto", "cpu", "cuda"] = recipe_field(
        "auto", "Choose the device; auto uses a GPU if there is one. CUDA_VISIBLE_DEVICES=1 picks among several."
    )
    threads: int = recipe_field(
        0,
        "Compute with this many CPU threads; 0 uses OMP_NUM_THREADS or all cores, and with --minutes fewer where that "
        "is faster, as beside other programs.",
        ge=0,
    )
    bf16: bool | None = recipe_field(
        None, "Train in bf16 mixed precision; --no-bf16 turns it off.", shown_default="on for GPUs that support it"
    )
    fp16: bool | None = recipe_field(
        None,
        "Train in fp16 mixed precision with loss scaling; --no-fp16 turns it off.",
        shown_default="on for GPUs without bf16",
    )
    fp8: bool = recipe_field(
        False,
        "Run the blocks' matmuls in FP8 with row-wise scaling (Hopper, Ada). Weight gradients stay in bf16. Less "
        "exact: compare the loss. Best with engine.weights=bf16.",
    )
    compile: bool | None = recipe_field(
        None,
        "Compile the step with torch.compile, cached in ~/.cache/firth; --no-compile turns it off.",
        shown_default="on for GPUs",
    )
    parallel: Literal["auto", "none", "ddp", "fsdp", "hsdp"] = recipe_field(
        "auto",
        "Train in the processes that torchrun starts: ddp replicates the model, fsdp shards it, hsdp shards it over "
        "groups of --shard-size processes and replicates the groups.",
        shown_default="under torchrun ddp, or fsdp for a model that takes more than half of a device's memory",
    )
    shard_size: int = recipe_field(
        0,
        "With --parallel hsdp: shard the model over this many processes.",
        shown_default="the processes of one machine",
        ge=0,
    )
    cpu_offload: bool = recipe_field(False, "With --parallel fsdp: keep weights and optimizer state in host memory.")
    engine: EngineConfig = field(default_factory=EngineConfig)
    processes: int = recipe_field(1, "", ge=1)  # recorded: how many processes a run started with, for its batch

    @property
    def global_batch_size(self) -> int:
        """Rows per optimizer step, over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.processes

    @property
    def averages_weights(self) -> bool:
        """Whether the run keeps an average of the weights: one more copy of them."""
        return bool(self.ema_decay or self.tail_average)

    @property
    def shards_model(self) -> bool:
        """Whether each process holds a part of the model."""
        return self.parallel in ("fsdp", "hsdp")

    def check_parallel(self) -> None:
        """Refuse settings that several processes cannot train with."""
        if self.cpu_offload and not self.shards_model:
            raise UserError("--cpu-offload needs --parallel fsdp.")
        if self.shard_size and self.parallel != "hsdp":
            raise UserError("--shard-size needs --parallel hsdp.")
        if not self.shards_model:
            return
        if self.engine.weights == "bf16":
            raise UserError(
                f"--parallel {self.parallel} has its own bf16 weights (--bf16): leave engine.weights=bf16 out."
            )
        if self.fp8:
            raise UserError(f"--parallel {self.parallel} shards matrices, and --fp8 needs whole ones: leave one out.")

    def check(self) -> None:
        """Refuse settings that make no sense, before anything is computed."""
        check_bounds(self)
        check_tracker(self.report_to)
        if 0 < self.spike_factor <= 1:
            raise UserError(f"spike_factor is {self.spike_factor}: it must be more than 1, or 0 to turn it off.")
        if self.fp16 and (self.bf16 or self.engine.weights == "bf16"):
            raise UserError("fp16 and bf16 exclude each other: choose one.")
        if self.fp8 and self.fp16:
            raise UserError("fp8 needs bf16: leave fp16 out.")
        if self.ema_decay and self.tail_average:
            raise UserError("ema_decay and tail_average are two averages of the weights: leave one out.")
        if self.cautious_weight_decay and self.optim not in ("adamw", "muon"):
            raise UserError(f"cautious_weight_decay needs --optim adamw or muon; this run has {self.optim}.")
        if self.muon_learning_rate and self.optim != "muon":
            raise UserError(f"muon_learning_rate needs --optim muon; this run has {self.optim}.")
        if self.muon_learning_rate and not self.learning_rate:
            raise UserError("muon_learning_rate follows learning_rate's schedule, which is 0: set learning_rate too.")
        tokens = self.per_device_train_batch_size * self.gradient_accumulation_steps * self.max_seq_length
        if tokens > MAX_STEP_TOKENS:
            raise UserError(
                f"A step would read {tokens:,} tokens; the limit is {MAX_STEP_TOKENS:,}. Lower "
                "--per-device-train-batch-size."
            )
        if self.engine.cuda_graphs and self.gradient_accumulation_steps > 1 and self.compile is not False:
            raise UserError(
                "engine.cuda_graphs replays compiled steps of one micro-batch: leave it or "
                "gradient_accumulation_steps out."
            )
        self.check_parallel()
        if self.num_train_epochs > MAX_EPOCHS:
            raise UserError(f"num_train_epochs is {self.num_train_epochs:g}; the limit is {MAX_EPOCHS:,}.")
        if not self.max_steps and not self.minutes and self.num_train_epochs <= 0:
            raise UserError("num_train_epochs must be more than 0 unless max_steps or minutes is given.")


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingConfig):
    """A pretraining run. `model` and `objective` are complete: a run depends only on its recipe and its shards."""

    model: ModelConfig
    objective: Objective
    # 0 is `auto` in both fields: a new run chooses, and records its choice.
    per_device_train_batch_size: int = recipe_field(
        0,
        "Set the rows per device and micro-batch; auto takes as many as fit into memory.",
        shown_default="auto",
        ge=0,
        parse=parse_batch_rows,
    )
    global_batch_tokens: int = recipe_field(
        0,
        "Set the tokens of a step over all devices; gradient accumulation makes up what memory cannot hold.",
        shown_default="chosen from model, text, time and device",
        ge=0,
        le=MAX_STEP_TOKENS,
    )
    data: str = recipe_field("", "Folder of token shards.")
    tokenizer: str = recipe_field("", "Fingerprint of the tokenizer that made the shards.")
    checkpoint: str = recipe_field("", "Start from this checkpoint's weights. Default: empty, a random initialization.")
    teacher: str = recipe_field(
        "", "Distill from this checkpoint; its layers also initialize the model. Default: empty, no distillation."
    )
    distillation: Distillation = field(default_factory=Distillation)
    knowledge_transfer: KnowledgeTransfer = field(default_factory=KnowledgeTransfer)
    warm_start: Literal["none", "ppmi"] = recipe_field(
        "none",
        "Initialize token embeddings: ppmi from co-occurrence counts (PPMI) of the text, none at random.",
        shown_default="ppmi for a Transformer without a checkpoint",
    )
    order: Literal["packed", "stream"] = recipe_field(
        "packed",
        "Order the text: packed shuffles rows of documents, stream continues each row where the last step ended.",
    )
    split: Literal["token", "sentence"] = recipe_field(
        "token", "Split documents longer than a row: token where the row is full, sentence at a sentence end."
    )
    num_packings: int = recipe_field(
        1,
        "Pack and cut the documents anew in each of the first N passes over the text, then repeat these; 1 gives every "
        "pass the same rows.",
        ge=1,
        le=MAX_PACKINGS,
    )
    sources: dict[str, str] = field(default_factory=dict)  # instead of `data`: folders of shards to mix, by name
    mix: dict[str, float] = field(default_factory=dict)  # share of each source
    mix_temperature: float | None = recipe_field(
        None,
        "Mix several --data in proportion to their tokens to this power: 0.7 in multilingual BERT, 0.3 in XLM-R. "
        "1 samples by size, 0 samples all sources equally.",
    )
    mix_epochs: dict[str, float] = field(default_factory=dict)  # or epochs of each source per epoch of the mix
    layer_decay: float = recipe_field(
        1.0,
        "Multiply the learning rate by this factor per layer from top to bottom (ULMFiT). 1 disables it.",
    )
    memory: int = recipe_field(
        0,
        "Cache this many previous hidden states (Transformer-XL, XLNet), with --order stream. 0 disables it.",
    )
    eval_rows: int = recipe_field(256, "Evaluate on at most this many held-out rows.")
    load_best: bool = recipe_field(
        True,
        "End with the weights of the lowest held-out loss, where later passes over a small text raised it, instead of "
        "the last ones. Not with causal and masked rows in one model, of which only the causal ones overfit, and not "
        "with fsdp.",
    )
    samples: int = recipe_field(
        3,
        "Complete this many held-out sentences with each checkpoint, for samples.jsonl and the report, in at most 1% "
        "of the time; 0 turns it off.",
        ge=0,
        le=6,
    )
    batch_ramp: float = recipe_field(
        0.0, "Grow the batch to its full size over this share of the run. 0 disables the ramp."
    )
    batch_doublings: int = recipe_field(
        2, "Double the batch this many times during --batch-ramp; 2 starts with a quarter."
    )
    length_ramp: float = recipe_field(
        0.0,
        "Grow rows to their full length over this share of the run, with more rows per step. 0 disables the ramp.",
    )
    length_doublings: int = recipe_field(
        2, "Double the row length this many times during --length-ramp; 2 starts with a quarter."
    )
    # Recorded by the run: the checksum of its shards, and the batches skipped after a rewind, each as
    # (step, number of steps whose batches are skipped from there on).
    shards_checksum: str = ""
    skips: tuple[tuple[int, int], ...] = ()

    @property
    def noise_seed(self) -> int:
        """Seed of the noise in training rows.

        A student reads the teacher's rows, and must not repeat the masks whose tokens the teacher was trained on: its
        soft targets there are those of memorised tokens. The number of layers keeps a chain of students apart.
        """
        if not self.teacher:
            return self.seed
        return int(hash_uint64(self.seed, zlib.crc32(b"distillation"), self.model.num_layers) >> np.uint64(1))

    @property
    def mixing(self) -> MixConfig:
        """Share of each source in the mix."""
        return MixConfig(self.mix, self.mix_temperature, self.mix_epochs)

    def check_order(self) -> None:
        """Check that model and objective support `order=stream` and `memory`."""
        model, name = self.model, type(self.objective).__name__
        if self.memory < 0:
            raise UserError(f"memory is {self.memory}, and must be at least 0.")
        if self.memory and self.order != "stream":
            raise UserError("memory caches the rows of the previous step: it needs --order stream.")
        if self.memory and not isinstance(model.position, TransformerXL):
            raise UserError(f"memory is for the position TransformerXL (xlnet), not {type(model.position).__name__}.")
        if self.memory and (isinstance(self.objective, BiLM) or model.get_extra("decoder") or self.teacher):
            raise UserError("memory does not support a biLM, a MaskDecoder or a teacher: remove one of them.")
        if self.memory and model.window is not None:
            raise UserError(
                "memory does not support sliding-window layers, which would not attend to it: remove one of them."
            )
        if self.order == "stream" and (
            self.objective.row_layout not in ("packed", "segments") or model.architecture == "encoder-decoder"
        ):
            raise UserError(
                f"order=stream does not support {name} with {model.family}: it needs one stack and packed rows."
            )
        if self.order == "stream" and self.sources:
            raise UserError("order=stream does not support a mix of sources: it reads one text from beginning to end.")
        if self.order == "stream" and isinstance(self.objective, MLM) and self.objective.num_static_masks:
            raise UserError(
                "objective.num_static_masks reuses masks of repeated rows, and order=stream repeats none: set it to 0."
            )

    def check_packings(self) -> None:
        """Check that rows are packed documents, where several packings are set."""
        if self.num_packings == 1:
            return
        if self.order == "stream" or self.objective.row_layout not in ("packed", "segments"):
            what = "order=stream" if self.order == "stream" else type(self.objective).__name__
            raise UserError(f"num_packings is for rows of packed documents, not for {what}: leave it out.")
        if isinstance(self.objective, MLM) and self.objective.num_static_masks:
            raise UserError(
                "objective.num_static_masks reuses masks of repeated rows: set it to 0, or num_packings to 1."
            )

    def check_recurrent(self) -> None:
        """Check that an LSTM supports the objective: it reads in one direction or in both, without a mask."""
        spec, objective, family = self.model.recurrent, self.objective, self.model.family
        if spec is not None and isinstance(spec, ELMoConfig) != isinstance(objective, BiLM):
            raise UserError("ELMo needs the objective bilm, and no other LSTM supports bilm.")
        if isinstance(spec, AWDLSTMConfig) and not isinstance(objective, CLM | SequenceAutoencoder):
            raise UserError(f"{family} reads from left to right: its objective is clm or autoencoder.")
        if isinstance(objective, SequenceAutoencoder) and not isinstance(spec, AWDLSTMConfig):
            raise UserError(
                f"autoencoder is for ulmfit's LSTM: {family} would copy the text through attention. Use clm."
            )
        if isinstance(objective, SequenceAutoencoder) and self.order == "stream":
            raise UserError("autoencoder reads each text from a fresh state: remove order=stream.")
        if isinstance(spec, BiLSTMConfig) and (not isinstance(objective, MLM) or objective.visibility != "all"):
            raise UserError(f"{family} is bidirectional: its objective is mlm, or another that masks tokens.")
        if isinstance(spec, ELMoConfig) and self.warm_start != "none":
            raise UserError("ELMo has no token embeddings to initialize: remove warm_start.")
        if spec is not None and self.teacher:
            raise UserError(f"{family} does not support distillation: remove --teacher.")
        if spec is not None and self.engine.weights == "bf16":
            raise UserError(f"engine.weights=bf16 does not support {family}: remove it.")

    def check_parallel(self) -> None:
        super().check_parallel()
        if self.shards_model and (self.model.recurrent is not None or self.teacher or self.memory):
            raise UserError(
                f"--parallel {self.parallel} does not support LSTMs, a teacher or a memory: use --parallel ddp."
            )

    def check_ramps(self) -> None:
        """Check that batch and row length can be divided by two as often as the ramps say."""
        for name, full, unit in (("batch", self.global_batch_size, "rows"), ("length", self.max_seq_length, "tokens")):
            share, doublings = getattr(self, f"{name}_ramp"), getattr(self, f"{name}_doublings")
            minimum = 1 if name == "batch" else 8
            if not 0 <= share <= 1:
                raise UserError(f"{name}_ramp is {share}, a share of the run: it must be between 0 and 1.")
            if doublings < 1:
                raise UserError(
                    f"{name}_doublings is {doublings}, and must be at least 1. {name}_ramp=0 disables the ramp."
                )
            if share and full and full >> doublings < minimum:  # 0: a batch that is chosen later
                raise UserError(
                    f"{name}_doublings is {doublings}, and {full} {unit} cannot be halved that often: "
                    f"the ramp must start with at least {minimum}."
                )
        if self.order == "stream" and (self.batch_ramp or self.length_ramp):
            raise UserError("order=stream needs a fixed batch and row length: remove batch_ramp and length_ramp.")

    @property
    def keeps_best(self) -> bool:
        """Whether the run ends with the weights of its lowest held-out loss, if it has one.

        With causal and masked rows in one model the loss is above all that of the causal ones, which have more labels.
        They overfit first, while the model still learns from the masked ones (docs/results.md). The task of replaced
        tokens changes with their generator.
        """
        return (
            self.load_best
            and not isinstance(self.objective, MaskedNextToken)
            and "generator" not in self.objective.extras
        )

    def check(self) -> None:
        """Check each field, and that model, objective and row length fit together."""
        super().check()
        self.check_order()
        self.check_packings()
        self.check_ramps()
        if self.engine.weights == "bf16" and (self.teacher or self.memory):
            raise UserError("engine.weights=bf16 does not support a teacher or a memory: remove it.")
        if self.knowledge_transfer.strategy != "none" and not self.teacher:
            raise UserError("knowledge_transfer.strategy needs a teacher: add --teacher, or set it to none.")
        self.mixing.check()
        if self.sources and self.warm_start != "none":
            raise UserError(
                "warm_start does not support a mix of sources. Set it to none, or prepare all text together."
            )
        model, objective = self.model, self.objective
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"layer_decay is {self.layer_decay}, and must be more than 0 and at most 1.")
        if self.eval_rows < 1:
            raise UserError(f"eval_rows is {self.eval_rows}, and must be at least 1.")
        if model.architecture not in objective.architectures:
            name, supported = type(objective).__name__, " or ".join(objective.architectures)
            others = ", ".join(n for n, o in OBJECTIVES.items() if model.architecture in o.architectures)
            raise UserError(
                f"{name} needs the architecture {supported}; {model.family} has the architecture {model.architecture}. "
                f"Use such a model, or one of these objectives: {others}."
            )
        if wrong := model.problems():
            raise UserError("; ".join(wrong) + ".")
        self.check_recurrent()
        if not isinstance(model.head, LMHead):
            raise UserError("This checkpoint has a task head: pretraining needs a language model head.")
        if model.max_length is not None and self.max_seq_length > model.max_length:
            raise UserError(
                f"--max-seq-length {self.max_seq_length} is longer than the model's {model.max_length} positions. "
                "Lower it, or give a new model more positions with model.position.length."
            )


def describe_tracked_run(recipe: Any, folder: Path) -> TrackedRun | None:
    """Return the run in `folder` as the recipe's tracker shows it; None without a tracker.

    Seeds, which have folders inside of the run's folder, are runs of one group.
    """
    if recipe.report_to == "none":
        return None
    folder, output = folder.absolute(), Path(recipe.output_dir).absolute()
    name = folder.name if folder == output else f"{output.name}/{folder.name}"
    return TrackedRun(recipe.report_to, str(folder), name, output.name, flatten_mapping(to_dict(recipe)))


def save_recipe(recipe: TrainingConfig, path: Path) -> None:
    write_text(path, yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True))


def load_recipe(path: Path, recipe_type: type[RecipeT]) -> RecipeT:
    """Load the recipe of a run folder."""
    return from_dict(read_yaml_mapping(path), recipe_type, str(path))


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    value = read_yaml(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected lines of `key: value`.")
    return value


def parse_overrides(args: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` arguments: `model.num_layers=6` becomes {"model.num_layers": 6}.

    >>> parse_overrides(["model.num_layers=6", "learning_rate=1e-3"])
    {'model.num_layers': 6, 'learning_rate': '1e-3'}
    """
    overrides: dict[str, Any] = {}
    for arg in args:
        key, equals, value = arg.partition("=")
        if not equals or not key:
            hint = f" Name each file with its own option, as in --data {arg}." if Path(arg).exists() else ""
            raise UserError(f"{quote(arg)} is not key=value.{hint}")
        if key in overrides:
            raise UserError(f"{key} is given twice: {quote(arg)} would replace {quote(overrides[key])}. Leave one.")
        try:
            overrides[key] = parse_yaml(value, key)
        except UserError:
            raise UserError(f"{quote(arg)}: {quote(value)} is not a number, a word, true or false.") from None
    return overrides


def apply_overrides(recipe: RecipeT, changes: Mapping[str, Any]) -> RecipeT:
    """Return the recipe with `changes` applied, by dotted names. An unknown name is an error with the nearest match.

    A new `kind`, as in model.position.kind=Rotary, starts with that kind's defaults; the old kind's fields are dropped.
    """
    tree = to_dict(recipe)
    for key in kinds_first(list(changes)):
        value = changes[key]
        *path, last = key.split(".")
        node = tree
        # a dict field: the user chooses its keys
        has_user_keys = path and isinstance(getattr(recipe, path[0], None), dict)
        for depth, name in enumerate([*path, last]):
            if not isinstance(node, dict) or (name not in node and not (has_user_keys and depth >= 1)):
                known = node if isinstance(node, dict) else {}
                raise UserError(f"Unknown key {quote(key)}. {suggest_key(key, depth, known)}")
            if depth < len(path):
                node = node.setdefault(name, {})
        is_new_kind = last == TYPE_KEY and value != node.get(last)
        if is_new_kind and (defaults := default_fields(type(recipe), tree, path, value)) is not None:
            node.clear()
            node.update(defaults)
        node[last] = value
    return from_dict(tree, type(recipe), "recipe")


def suggest_key(key: str, depth: int, known: Collection[str]) -> str:
    """Return a sentence with the nearest right key; `known` are the names that may stand at `depth` of it.

    >>> suggest_key("modle.num_layers", 0, ["model", "optim"]), suggest_key("model.dims", 1, ["dim", "norm"])
    ("Did you mean 'model.num_layers'?", "Did you mean 'model.dim'?")
    """
    path = key.split(".")
    if near := get_close_matches(path[depth], known, n=1):
        return f"Did you mean {quote('.'.join([*path[:depth], near[0], *path[depth + 1 :]]))}?"
    return did_you_mean(path[depth], known) + (f" (in {'.'.join(path[:depth])})" if depth else "")


def kinds_first(keys: Sequence[str]) -> list[str]:
    """Return the keys in their order, but a `kind` before the fields beside it.

    >>> kinds_first(["optim", "model.position.length", "model.position.kind"])
    ['optim', 'model.position.kind', 'model.position.length']
    """

    def rank(key: str) -> tuple[float, int]:
        parent, _, last = key.rpartition(".")
        beside = [i for i, other in enumerate(keys) if other.startswith(f"{parent}.")]
        return (min(beside) - 0.5 if last == TYPE_KEY and parent else keys.index(key)), key.count(".")

    return sorted(keys, key=rank)


def recipe_differences(old: Any, new: Any) -> list[str]:
    """Return the differences between two recipes, each as `key: old -> new`."""
    a, b = flatten_mapping(to_dict(old)), flatten_mapping(to_dict(new))
    return [f"{k}: {a.get(k)} -> {b.get(k)}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]


def flatten_mapping(mapping: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys: {"a": {"b": 1}} becomes {"a.b": 1}."""
    if not isinstance(mapping, dict):
        return {prefix.rstrip("."): mapping}
    return {k: v for key, value in mapping.items() for k, v in flatten_mapping(value, f"{prefix}{key}.").items()}
