"""Our families by name, and the layout that each is written in."""

from __future__ import annotations

from firth.models.hf.albert import ALBERT_LAYOUT
from firth.models.hf.bart import BART_LAYOUT
from firth.models.hf.bert import BERT_LAYOUT
from firth.models.hf.deberta import DEBERTA_LAYOUT
from firth.models.hf.deberta_v2 import DEBERTA_V2_LAYOUT
from firth.models.hf.distilbert import DISTILBERT_LAYOUT
from firth.models.hf.electra import ELECTRA_LAYOUT
from firth.models.hf.gpt import GPT_LAYOUT
from firth.models.hf.gpt2 import GPT2_LAYOUT
from firth.models.hf.layout import HFLayout
from firth.models.hf.llama import LLAMA_LAYOUT
from firth.models.hf.mobilebert import MOBILEBERT_LAYOUT
from firth.models.hf.modernbert import MODERNBERT_LAYOUT
from firth.models.hf.rembert import REMBERT_LAYOUT
from firth.models.hf.roberta import ROBERTA_LAYOUT, XLM_ROBERTA_LAYOUT
from firth.models.hf.t5 import T5_LAYOUT
from firth.models.hf.t5gemma import T5GEMMA_LAYOUT
from firth.models.hf.xlm import XLM_LAYOUT
from firth.models.hf.xlnet import XLNET_LAYOUT

# The first family of a layout is the one that a checkpoint of `transformers` is read as.
FAMILY_LAYOUTS: dict[str, HFLayout] = {
    "deberta": DEBERTA_LAYOUT,
    "deberta-v2": DEBERTA_V2_LAYOUT,
    "deberta-v3": DEBERTA_V2_LAYOUT,
    "xlnet": XLNET_LAYOUT,
    "bert": BERT_LAYOUT,
    "spanbert": BERT_LAYOUT,
    "unilm": BERT_LAYOUT,
    "labse": BERT_LAYOUT,
    "roberta": ROBERTA_LAYOUT,
    "xlm-roberta": XLM_ROBERTA_LAYOUT,
    "afriberta": XLM_ROBERTA_LAYOUT,
    "albert": ALBERT_LAYOUT,
    "electra": ELECTRA_LAYOUT,
    "distilbert": DISTILBERT_LAYOUT,
    "mobilebert": MOBILEBERT_LAYOUT,
    "rembert": REMBERT_LAYOUT,
    "xlm": XLM_LAYOUT,
    "gpt": GPT_LAYOUT,
    "gpt2": GPT2_LAYOUT,
    "gpt3": GPT2_LAYOUT,
    "llama": LLAMA_LAYOUT,
    "modernbert": MODERNBERT_LAYOUT,
    "t5": T5_LAYOUT,
    "t5gemma": T5GEMMA_LAYOUT,
    "bart": BART_LAYOUT,
}
MODEL_TYPE_LAYOUTS = {layout.model_type: (name, layout) for name, layout in reversed(FAMILY_LAYOUTS.items())}
