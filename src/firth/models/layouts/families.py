"""Our families by name, and the layout that each is written in."""

from __future__ import annotations

from firth.models.layouts.albert import ALBERT
from firth.models.layouts.bart import BART
from firth.models.layouts.bert import BERT
from firth.models.layouts.deberta import DEBERTA
from firth.models.layouts.deberta_v2 import DEBERTA_V2
from firth.models.layouts.distilbert import DISTILBERT
from firth.models.layouts.electra import ELECTRA
from firth.models.layouts.gpt import GPT
from firth.models.layouts.gpt2 import GPT2
from firth.models.layouts.layout import Layout
from firth.models.layouts.llama import LLAMA
from firth.models.layouts.modernbert import MODERNBERT
from firth.models.layouts.rembert import REMBERT
from firth.models.layouts.roberta import ROBERTA, XLM_ROBERTA
from firth.models.layouts.t5 import T5
from firth.models.layouts.xlm import XLM
from firth.models.layouts.xlnet import XLNET

# The first family of a layout is the one that a checkpoint of `transformers` is read as.
FAMILIES: dict[str, Layout] = {
    "deberta": DEBERTA,
    "deberta-v2": DEBERTA_V2,
    "deberta-v3": DEBERTA_V2,
    "xlnet": XLNET,
    "bert": BERT,
    "spanbert": BERT,
    "unilm": BERT,
    "labse": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": XLM_ROBERTA,
    "afriberta": XLM_ROBERTA,
    "albert": ALBERT,
    "electra": ELECTRA,
    "distilbert": DISTILBERT,
    "rembert": REMBERT,
    "xlm": XLM,
    "gpt": GPT,
    "gpt2": GPT2,
    "gpt3": GPT2,
    "llama": LLAMA,
    "modernbert": MODERNBERT,
    "t5": T5,
    "bart": BART,
}
LAYOUTS = {layout.model_type: (name, layout) for name, layout in reversed(FAMILIES.items())}
