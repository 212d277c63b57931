# ruff: noqa: RUF009 (dataclasses: `option` makes fields)
"""The options of each command, as dataclasses; `command.py` makes commands of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from firth.cli.command import BUDGET, COMPUTE, DATA, TRAINING, option
from firth.cli.values import (
    parse_bytes,
    parse_columns,
    parse_escapes,
    parse_list,
    parse_named,
    parse_numbers,
    parse_resume,
    parse_sizes,
)
from firth.objectives import OBJECTIVES
from firth.tasks import FINETUNE_TASKS
from firth.text.examples import TASK_FORMATS
from firth.text.formats.registry import MAIL_PARTS
from firth.text.normalize import NORMALIZERS
from firth.tokens.cluster.options import TOPIC as CLUSTER
from firth.tokens.cluster.options import EngineOptions
from firth.tokens.extend import MAX_NEW_TOKENS, MIN_TOKEN_COUNT
from firth.train.recipe import MAX_ROW_TOKENS

# --- options that several commands share

BF16_HELP = "Compute in bfloat16: faster on a GPU, with rounded weights."


@dataclass(kw_only=True)
class JsonOptions:
    json: bool = option(False, "Print one JSON object instead of a table.")


@dataclass(kw_only=True)
class ModelsOptions(JsonOptions):
    name: list[str] | None = option(
        None,
        "List the presets with this in their name or family, or of this architecture. Default: all.",
        "[NAME]",
        argument=True,
    )


@dataclass(kw_only=True)
class OutputOptions(JsonOptions):
    overwrite: bool = option(False, "Replace an earlier result in the output folder.")


@dataclass(kw_only=True)
class TextOptions:
    """How text files are read; arguments of Corpus."""

    documents: str = option(
        "auto",
        "Split a text file into documents: 'file' keeps it whole, 'blank-line' splits it there, 'auto' keeps small "
        "files of a folder whole and splits all others.",
    )
    columns: dict[str, str] | None = option(
        None, "Rename columns, as text=body.", "A=B", parse=parse_columns, common=False
    )
    encoding: str = option("utf-8", "Set the encoding of the text files.")
    keep_mail: str = option(
        "", f"Keep these parts of e-mails (.mbox, .eml): {', '.join(MAIL_PARTS)}. Default: leave them out."
    )
    normalize: str = option(
        "",
        "Normalize the text; join several with commas. A new tokenizer does the same. Default: unchanged. Forms: "
        f"{', '.join(NORMALIZERS)}.",
    )
    min_words: int = option(0, "Drop documents with fewer words; 0 keeps them.", bounds={"ge": 0})
    max_words: int = option(0, "Drop documents with more words; 0 keeps them.", bounds={"ge": 0})
    min_characters: int = option(0, "Drop documents with fewer characters; 0 keeps them.", bounds={"ge": 0})
    max_characters: int = option(0, "Drop documents with more characters; 0 keeps them.", bounds={"ge": 0})
    language: str = option("", "Keep documents in these languages: en, or de,fr. Needs py3langid. Default: keep all.")


@dataclass(kw_only=True)
class TextArguments(TextOptions):
    texts: list[str] = option(
        ...,
        "Files, folders, patterns such as 'notes/*', - for stdin, pydocs, or hf:owner/name[:config][:split][#column]. "
        "Formats: .txt, .md, .rst, .jsonl, .csv, .tsv, .parquet, .warc, .wet, .xml (Wikipedia), .html, .pdf, .mbox, "
        ".eml, also as .gz, .xz, .bz2, .zst.",
        "TEXT...",
        argument=True,
    )


@dataclass(kw_only=True)
class RecipeOptions(OutputOptions):
    overrides: list[str] | None = option(
        None, "Set any field of the recipe: model.num_layers=6 engine.weights=bf16.", "[KEY=VALUE]...", argument=True
    )
    config: str | None = option(None, "Read options and recipe fields from this YAML file.", "FILE")


@dataclass(kw_only=True)
class PretrainDataOptions(RecipeOptions, TextOptions):
    """Model and data, as `pretrain`, `prove-resume` and `show` take them."""

    model: str = option(
        ...,
        "encoder, decoder or encoder-decoder (`firth plan` chooses the size), a preset (`firth models` lists them), a "
        "config.json or a checkpoint folder. For pretrain also word2vec, glove or ngram.",
        argument=True,
    )
    data: list[str] = option(
        ..., "Read these shards, or text: it is tokenized first. Repeat it as NAME=PATH to mix several.", "PATH"
    )
    tokenizer: str | None = option(None, "Use the tokenizer in this folder. Default: train one.", "FOLDER")
    objective: str | None = option(
        None, f"Train with this objective. Default: the family's own. One of {', '.join(OBJECTIVES)}.", "NAME"
    )
    vocab_size: int = option(0, "Set the size of a trained tokenizer; 0 chooses it by the size of the text.")
    lowercase: bool = option(False, "Lowercase the text in a trained tokenizer.", common=False)
    held_out: float = option(0.05, "Hold out this fraction of the documents for evaluation.")
    mix: dict[str, float] | None = option(
        None, "Set the share of each --data NAME=PATH in the rows, as a=0.7,b=0.3.", "A=X", parse=parse_numbers
    )
    mix_epochs: dict[str, float] | None = option(
        None, "Read each --data NAME=PATH this often in one epoch of the mix, as a=1,b=3.", "A=X", parse=parse_numbers
    )


@dataclass(kw_only=True)
class ResumeOptions:
    resume: bool = option(False, "Resume from the last complete checkpoint; without one, start.")
    resume_from_checkpoint: str | None = option(None, "'auto' is the same as --resume.", "auto", parse=parse_resume)
    allow_change: bool = option(False, "Resume although recipe or data have changed; prints the changes.")
    rewind: int | None = option(
        None, "Resume at least N steps before the first skipped step, and skip the data in between.", bounds={"ge": 0}
    )


@dataclass(kw_only=True)
class DryRunOptions:
    dry_run: bool = option(False, "Say what would be read, computed and written; write nothing.")


# --- the options of each command


@dataclass(kw_only=True)
class QuickstartOptions(OutputOptions):
    output_dir: str | None = option(None, "Write to this folder. Default: the next free quickstart-N.", "FOLDER")
    minutes: float | None = option(
        None, "Spend about this many minutes on each architecture. Default: 5, and up to 6.5 on a busy machine."
    )
    all: bool = option(False, "Compare encoder, decoder and encoder-decoder. Default: encoder only.")
    seed: int = option(0, "Seed data order, weights and dropout.", bounds={"ge": 0})
    resume: bool = option(False, "Resume from the last complete checkpoint; without one, start.")


@dataclass(kw_only=True)
class CheckOptions(TextArguments, JsonOptions):
    tokenizer: str | None = option(None, "Judge this tokenizer: keep, extend or retrain it?", "FOLDER")
    kinds: list[str] | None = option(
        None,
        "Train tokenizers of these kinds on a sample and compare them; 'none' checks the text alone. Default: "
        "byte-bpe,wordpiece,unigram.",
        "A,B",
        parse=parse_list,
    )
    vocab_sizes: list[int] | None = option(
        None, "Compare these vocabulary sizes. Default: three that suit the text.", "N,N", parse=parse_sizes
    )
    sample: int = option(2_000_000, "Compare tokenizers on this many characters of the text.")
    lowercase: bool = option(False, "Lowercase the text in trained tokenizers.")
    labelled: str | None = option(None, "Count the examples of this labelled file that occur in the text.", "FILE")
    task: str | None = option(
        None, f"Set the task of --labelled. Default: told by its columns. One of {', '.join(TASK_FORMATS)}.", "NAME"
    )
    labelled_columns: dict[str, str] | None = option(
        None, "Rename columns of --labelled, as text=sentence.", "A=B", parse=parse_columns
    )
    output_dir: str = option(".", "Write check.html to this folder.", "FOLDER")
    overwrite: bool = option(False, "Replace a check.html that `firth check` did not write.")


@dataclass(kw_only=True)
class DoctorOptions(JsonOptions):
    run: str = option(..., "The folder of a run, of `pretrain` or `finetune`.", "RUN", argument=True)


@dataclass(kw_only=True)
class TokenizerOptions(TextArguments, EngineOptions, OutputOptions, DryRunOptions):
    output_dir: str = option(..., "Write the tokenizer to this folder.", "FOLDER")
    kind: str | None = option(
        None,
        "Train wordpiece (BERT), bpe (GPT), byte-bpe (GPT-2, Llama), unigram (T5, XLNet), char (single characters), "
        "word (word2vec) or elmo-characters (ELMo: words read as characters). Default: wordpiece.",
        "NAME",
    )
    like: str | None = option(
        None, "Take kind, special tokens and normalization from the tokenizer in this folder.", "FOLDER", flag="--from"
    )
    vocab_size: int = option(0, "Set the vocabulary size; 0 chooses it by the size of the text.")
    lowercase: bool = option(False, "Lowercase all text.")
    pattern: str | None = option(
        None, "byte-bpe: pre-tokenize like gpt2, or like llama3 (digits in groups of three). Default: gpt2.", "NAME"
    )
    byte_fallback: bool = option(False, "unigram: encode characters without a piece as bytes, not as unknown.")
    reverse: bool = option(False, "Reverse every text, for a model that reads from its end (ULMFiT).")
    max_memory: int | None = option(
        None, "Train on a sample that fits into this memory. Default: all of the text.", "4GB", parse=parse_bytes
    )
    seed: int = option(0, "Seed the choice of the sample.")
    extend: str | None = option(
        None,
        "Add the words of the text to the tokenizer in this folder or checkpoint; other words keep their ids.",
        "FOLDER",
        topic="Extending a tokenizer",
    )
    max_new_tokens: int | None = option(
        None,
        f"Add at most this many tokens, those that save most. Default: {MAX_NEW_TOKENS}.",
        topic="Extending a tokenizer",
        bounds={"ge": 1},
    )
    min_count: int | None = option(
        None,
        f"Add only tokens that occur this often in the text. Default: {MIN_TOKEN_COUNT}, fewer in less than 1 MB.",
        topic="Extending a tokenizer",
        bounds={"ge": 1},
    )
    resume: bool = option(False, "With --engine ray: keep the finished tasks of an interrupted command.", topic=CLUSTER)


@dataclass(kw_only=True)
class PrepareOptions(TextArguments, EngineOptions, OutputOptions, DryRunOptions):
    tokenizer: str = option(..., "Tokenize with the tokenizer in this folder or checkpoint.", "FOLDER")
    output_dir: str = option(..., "Write the shards to this folder.", "FOLDER")
    held_out: float = option(0.05, "Hold out this fraction of the documents for evaluation.")
    dedup: str = option("exact", "Drop duplicate documents: exact, near (exact and similar ones) or none.", "NAME")
    salient: str | None = option(
        None, "Mark salient spans: default (names, numbers, dates) or package.module:function. Default: none.", "NAME"
    )
    workers: int = option(
        0, "Tokenize in N processes; 0: one per core. The shards do not depend on it.", bounds={"ge": 0}
    )
    max_memory: int | None = option(
        None, "Limit the memory of all processes together. Default: no limit.", "4GB", parse=parse_bytes
    )
    resume: bool = option(False, "Resume an interrupted preparation; without one, start.")


@dataclass(kw_only=True)
class PretrainOptions(PretrainDataOptions, ResumeOptions, DryRunOptions):
    output_dir: str = option(..., "Write the run to this folder.", "FOLDER")
    add_words: bool = option(
        False, "Add the text's words to the word tokenizer of the checkpoint (ULMFiT).", common=False
    )


@dataclass(kw_only=True)
class AdaptOptions(RecipeOptions, TextOptions, ResumeOptions, DryRunOptions):
    checkpoint: str = option(
        ..., "A pretrained checkpoint, ours or a published one, with its LM head: RUN/final.", argument=True
    )
    data: list[str] = option(..., "Train on this text of the domain. Repeat it for more.", "PATH")
    output_dir: str = option(..., "Write the run to this folder.", "FOLDER")
    general: list[str] | None = option(
        None,
        "Replay this text, and measure forgetting on it: text of the kind that the checkpoint was trained on. Default: "
        "the text of its own run, where that still exists.",
        "PATH",
        topic="Forgetting",
    )
    replay_share: float = option(
        0.1, "Take this share of the training tokens from the general text; 0 replays nothing.", topic="Forgetting"
    )
    new_tokens: str = option(
        "auto",
        "Add this many words of the domain to the tokenizer (0: none), or with auto all that pay: they must save "
        "3% of the tokens of held-out text.",
        "N",
        topic="Tokenizer",
    )
    held_out: float = option(0.05, "Hold out this fraction of the documents, to measure on.")
    max_seq_length: int | None = option(
        None,
        "Set the row length in tokens. Default: that of the checkpoint's run, else 128.",
        bounds={"ge": 4, "le": MAX_ROW_TOKENS},
    )


@dataclass(kw_only=True)
class PlanOptions(TextOptions, JsonOptions):
    model: list[str] | None = option(
        None,
        "encoder, decoder or encoder-decoder, whose size is planned; or a preset, to see what it would reach. With "
        "--fit: the other runs. Default: encoder.",
        "[MODEL]",
        argument=True,
    )
    data: list[str] | None = option(None, "Plan for these shards, or for this text.", "PATH", required=True)
    minutes: float | None = option(
        None,
        "Plan for a run of this many minutes. Default: 30, and for a preset 3 passes, as `firth pretrain`.",
        topic=BUDGET,
    )
    passes: float | None = option(None, "Plan for this many passes over the text, whatever they take.", topic=BUDGET)
    tokens: float | None = option(None, "Plan for a run that reads this many tokens.", topic=BUDGET)
    tokenizer: str | None = option(None, "Use the tokenizer in this folder. Default: train one.", "FOLDER")
    vocab_size: int = option(0, "Set the size of a trained tokenizer; 0 chooses it by the size of the text.")
    lowercase: bool = option(False, "Lowercase the text in a trained tokenizer.", common=False)
    held_out: float = option(0.05, "Hold out this fraction of the documents for evaluation.")
    max_seq_length: int | None = option(
        None, "Set the row length in tokens. Default: 128.", topic=DATA, bounds={"ge": 4}
    )
    device: str | None = option(None, "Plan for the cpu or for cuda. Default: a GPU if there is one.", "NAME")
    fit: list[str] | None = option(
        None, "Fit a law to these finished runs instead: six or more.", "RUN...", topic="Your own runs"
    )
    output_dir: str = option(".", "With --fit: write plan.html to this folder.", "FOLDER")
    overwrite: bool = option(False, "With --fit: replace a plan.html that `firth plan` did not write.")


@dataclass(kw_only=True)
class ProveResumeOptions(PretrainDataOptions):
    output_dir: str = option(..., "Write both runs to this folder: straight/ and killed/.", "FOLDER")
    kills: int = option(10, "Kill the second run this often, half of the times during a write.")


@dataclass(kw_only=True)
class ShowOptions(PretrainDataOptions):
    task: str | None = option(
        None,
        "Show the labels of a file for fine-tuning instead: dialogues or pairs of lm, preference or reward. MODEL is "
        "the checkpoint to fine-tune.",
        "NAME",
    )
    rows: int = option(4, "Show this many rows.")
    output_dir: str = option(".", "Write show.html to this folder.", "FOLDER")
    overwrite: bool = option(False, "Replace a show.html that `firth show` did not write.")


@dataclass(kw_only=True)
class FinetuneOptions(RecipeOptions, ResumeOptions, DryRunOptions):
    checkpoint: str = option(..., "A checkpoint folder, ours or a published one.", argument=True)
    task: list[str] | None = option(
        None, f"Learn {', '.join(FINETUNE_TASKS)}.", "NAME", required=True, parse_all=parse_named
    )
    train: list[str] | None = option(
        None,
        "Train on this labelled file, or on pydocs. Formats: .jsonl, .json, .tsv, .csv, .conll, for lm also .txt; also "
        "compressed. Repeat it as NAME=FILE for several tasks.",
        "FILE",
        required=True,
        parse_all=parse_named,
    )
    dev: list[str] | None = option(
        None, "Score on this labelled file, or on pydocs.", "FILE", required=True, parse_all=parse_named
    )
    prefix: list[str] | None = option(
        None,
        "Prepend this text to every input with generated answers, as T5 does: 'summarize: '. Several tasks: "
        "NAME='summarize: '. Default: none, or the name of the task.",
        "TEXT",
        topic=DATA,
        common=False,
        parse_all=parse_named,
    )
    output_dir: str = option(..., "Write the run to this folder.", "FOLDER")
    columns: dict[str, str] | None = option(
        None, "Rename columns, as text=body,label=class.", "A=B", parse=parse_columns
    )
    recipe: str | None = option(
        None,
        "Use the recipe of ulmfit, dai-le or elmo. Default: the model's own.",
        "NAME",
        topic=TRAINING,
        common=False,
    )
    from_: str | None = option(
        None,
        "Start from this fine-tuned CHECKPOINT: its layers are kept, the head is new where labels differ (STILTs). "
        "Default: from CHECKPOINT itself.",
        "FINETUNED",
        flag="--from",
        topic="Trained parameters",
        common=False,
    )
    against: str | None = option(
        None,
        "Fine-tune this checkpoint too (scratch: random weights) and test the difference. Both arms have the same "
        "settings; the test is over seeds and dev examples, and needs 3 seeds or more. With --teacher, alone "
        "fine-tunes the same checkpoint without it. Default: none.",
        "CHECKPOINT",
        topic="Seeds and scores",
    )
    target_text: list[str] | None = option(
        None, "Pretrain first on this text of the task's domain, in OUTPUT_DIR-target. Default: do not.", "PATH"
    )


@dataclass(kw_only=True)
class EvaluateOptions(OutputOptions):
    checkpoint: str = option(..., "A checkpoint folder; for tasks on words also a file of vectors.", argument=True)
    data: list[str] | None = option(
        None,
        "Score on this labelled file, or on pydocs; perplexity: text; --suite: its folder.",
        "PATH",
        required=True,
    )
    overrides: list[str] | None = option(
        None, "With --suite: set any field of the fine-tuning recipe.", "[KEY=VALUE]...", argument=True
    )
    task: str | None = option(
        None,
        "Score this task. Default: what the checkpoint was fine-tuned for. One of "
        f"{', '.join(TASK_FORMATS)}, perplexity, pseudo-likelihood, induction.",
        "NAME",
    )
    columns: dict[str, str] | None = option(
        None, "Rename columns, as text=body,label=class.", "A=B", parse=parse_columns
    )
    encoding: str | None = option(None, "Set the encoding of the files. Default: utf-8.", "NAME")
    documents: str | None = option(None, "Split a .txt file: 'file', 'blank-line' or 'auto'. Default: auto.", "NAME")
    suite: str | None = option(None, "Score every task of glue, superglue, or a .yaml file that lists tasks.", "NAME")
    tasks: list[str] | None = option(None, "Take these tasks of the suite. Default: all.", "cola,rte", parse=parse_list)
    seeds: int | None = option(
        None, "Fine-tune this often for each task of the suite, or draw shots this often. Default: 3.", bounds={"ge": 1}
    )
    shots: int | None = option(
        None,
        "Score classify, pair, relation or choice without fine-tuning, in a prompt with this many solved examples of "
        "--train.",
        bounds={"ge": 0},
    )
    template: list[str] | None = option(
        None,
        "Write prompts by this template: a name, or a text with fields, as '{text}\\nTopic: {label}'. Repeat it for "
        "more. Default: all built-in ones.",
        parse=parse_escapes,
    )
    verbalizer: dict[str, str] | None = option(
        None,
        "Write these words for labels in prompts, as 0=terrible,1=great. Default: the labels.",
        "A=B",
        parse=parse_columns,
    )
    random_labels: bool = option(False, "Score demonstrations with random labels too, as a control. Default: do not.")
    config: str | None = option(None, "With --suite: read recipe fields from this YAML file.", "FILE")
    resume: bool = option(False, "With --suite: resume; finished tasks are kept.")
    method: str | None = option(
        None,
        "Compute likelihoods by left-to-right (decoder); within-word-l2r or pseudo (encoder); span or continuation "
        "(encoder-decoder). Default: the first of these.",
        "NAME",
    )
    max_seq_length: int | None = option(None, "Read at most N tokens at once. Default: the model's maximum.")
    stride: int | None = option(None, "Likelihood: move the window over a long text by N tokens.")
    delimiter: str | None = option(
        None, "choice: put this between context and ending. Default: a space.", parse=parse_escapes
    )
    train: str | None = option(
        None, "Draw --shots from this file. word-in-context, span-qa: choose the threshold on it.", "FILE"
    )
    threshold: float | None = option(
        None,
        "Predict the same sense from this cosine on (word-in-context), or no answer above this "
        "probability (span-qa). Default for span-qa: 0.5.",
    )
    layer: int | None = option(None, "Take vectors from this layer; 0 is the embedding, -1 the last.")
    pool: str | None = option(None, "embed: pool by first, mean, last or auto.", "NAME")
    limit: int | None = option(None, "Words: search the N most frequent words. Default: all.")
    ensemble: list[str] | None = option(
        None, "Average the probabilities with this checkpoint, fine-tuned for the same labels.", "CHECKPOINT"
    )
    batch_size: int | None = option(
        None, "Fine-tuned models: compute N examples at once. Default: 32.", bounds={"ge": 1}
    )
    batch_tokens: int | None = option(None, "Other tasks: compute N tokens at once. Default: 8192.")
    output_dir: str | None = option(None, "Write to this folder. Default: one beside the checkpoint.", "FOLDER")


@dataclass(kw_only=True)
class PredictOptions:
    checkpoint: str = option(..., "A fine-tuned checkpoint: RUN/final.", argument=True)
    text: list[str] | None = option(
        None,
        "Texts to predict for. A pair, or question and context, are two texts; choice: context, then choices. "
        "Default: stdin.",
        "[TEXT]...",
        argument=True,
    )
    data: str | None = option(
        None,
        "Read inputs from this file: .jsonl, .csv, .tsv or .parquet with the columns of the training file, or .txt "
        "with a text on each line. - reads lines from stdin.",
        "FILE",
    )
    output: str | None = option(None, "Write inputs and predictions to this .jsonl, .csv or .tsv file.", "FILE")
    overwrite: bool = option(False, "Replace an existing --output.")
    task: str | None = option(None, "Choose one of the tasks of a checkpoint that learned several.", "NAME")
    columns: dict[str, str] | None = option(
        None, "Rename columns, as text=body,question=q.", "A=B", parse=parse_columns
    )
    format: Literal["auto", "text", "jsonl"] = option(
        "auto",
        "Read each line of a .txt file or of stdin as a text ('text') or a JSON object ('jsonl'); 'auto' takes lines "
        "that are JSON objects with a column of the task as objects.",
    )
    encoding: str = option("utf-8", "Set the encoding of --data or stdin.")
    batch_size: int | None = option(
        None,
        "Compute this many inputs together. Default: 32 on a CPU; on a GPU those of 16,384 tokens, or 256 answers.",
        bounds={"ge": 1},
    )
    max_new_tokens: int | None = option(
        None,
        "Generate at most this many tokens for an answer. Default: as fine-tuned; lm: 256.",
        bounds={"ge": 1},
    )
    json: bool = option(False, "Print a JSON object for each input.")


@dataclass(kw_only=True)
class GenerateOptions(JsonOptions):
    checkpoint: str = option(..., "A decoder or an encoder-decoder.", argument=True)
    prompt: list[str] | None = option(
        None, "Text to continue, or the encoder's input. Default: stdin.", "[PROMPT]...", argument=True
    )
    prompts: str | None = option(
        None, "Read a prompt from each line of this file; .jsonl: from the column prompt, source or text.", "FILE"
    )
    encoding: str = option("utf-8", "Set the encoding of --prompts.")
    chat: bool | None = option(
        None, "Read the prompt as a user's message in the chat template. Default: on after fine-tuning on dialogues."
    )
    stream: bool | None = option(None, "Print tokens as they come. Default: on for one text on a terminal.")
    bf16: bool = option(False, BF16_HELP, topic=COMPUTE)
    draft: str | None = option(
        None, "Let a smaller model with the same tokenizer propose tokens (speculative decoding).", "CHECKPOINT"
    )
    best_of: int | None = option(
        None, "Draw N samples for each prompt, at temperature 1 by default; keep the one of the highest reward.", "N"
    )
    reward: str | None = option(
        None, "Score the samples of --best-of with this model (`firth finetune --task reward`).", "CHECKPOINT"
    )


@dataclass(kw_only=True)
class ChatOptions:
    checkpoint: str = option(..., "A model that was fine-tuned on dialogues.", argument=True)
    system: str = option("", "Begin with this system message.", "TEXT", topic="Conversation")
    max_new_tokens: int = option(
        256, "Generate at most this many tokens for an answer.", topic="Conversation", bounds={"ge": 1}
    )
    bf16: bool = option(False, BF16_HELP, topic=COMPUTE)


@dataclass(kw_only=True)
class FillOptions(JsonOptions):
    checkpoint: str = option(..., "An encoder or an encoder-decoder.", argument=True)
    text: str = option(..., "A text with blanks, written [MASK] or ___.", argument=True)
    top: int = option(5, "Show this many guesses for each blank.", bounds={"ge": 1})
    bf16: bool = option(False, BF16_HELP, topic=COMPUTE)


@dataclass(kw_only=True)
class EmbedOptions(OutputOptions):
    checkpoint: str = option(..., "A checkpoint folder.", argument=True)
    text: list[str] | None = option(None, "Texts to embed. Default: stdin.", "[TEXT]...", argument=True)
    texts: str | None = option(None, "Read a text from each line of this file; .jsonl: from the column text.", "FILE")
    encoding: str = option("utf-8", "Set the encoding of --texts.")
    pool: str = option("auto", "Pool by the first, mean or last token; auto: as fine-tuned, else mean.", "NAME")
    layer: int = option(-1, "Take the vectors of this layer; 0 is the embedding, -1 the last.")
    normalize: bool = option(False, "Scale every vector to length 1.", topic="Vectors", common=True)
    max_seq_length: int = option(0, "Truncate longer texts; 0: at the model's maximum.", topic="Vectors")
    similar: bool = option(False, "Show the cosine of each two texts; for one word, its nearest words.")
    analogy: bool = option(False, "For three words a b c: find the word that is to c as b is to a.")
    top: int = option(10, "Show this many words with --similar, --analogy or --among.", bounds={"ge": 1})
    compare: str | None = option(None, "Compare the vectors of this word in two or more of the texts.", "WORD")
    with_: list[str] | None = option(
        None, "Compare with this checkpoint or file of vectors. Repeat it for more.", "CHECKPOINT", flag="--with"
    )
    among: list[str] | None = option(
        None, "Find the nearest words of this text, each where it occurs. Reads its first 20,000 words.", "FILE"
    )
    output_dir: str | None = option(None, "Write float32 (texts, width) to FILE.npy, or FOLDER/vectors.npy.", "PATH")


@dataclass(kw_only=True)
class ServeOptions:
    checkpoint: list[str] | None = option(
        None,
        "Checkpoint folders, needed without --runs. NAME=FOLDER names a model; else it has the name of its run.",
        "[CHECKPOINT]...",
        argument=True,
    )
