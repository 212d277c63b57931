"""ModelConfig, and the small types that it is made of.

Each mechanism is one field whose value says everything about it: `position=Buckets(num=32)` carries its own
numbers and no others, so a mixture that makes no sense cannot be written down.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal


@dataclass(frozen=True)
class NoPlaces:
    """The model is not told where a token stands; a causal one can find out."""


@dataclass(frozen=True)
class Learned:
    """One vector per absolute place, added to the embedding (BERT, GPT-2).

    The first `offset` vectors are never used: RoBERTa and BART count places from 2.
    """

    length: int = 512
    offset: int = 0


@dataclass(frozen=True)
class Sinusoid:
    """Sines and cosines of the absolute place, added to the embedding (Vaswani et al. 2017, section 3.5)."""

    length: int = 512


@dataclass(frozen=True)
class Shaw:
    """One vector per distance up to `far`, compared with the query (Shaw et al. 2018, section 3.2, keys only)."""

    far: int = 16


@dataclass(frozen=True)
class Buckets:
    """One number per head and bucket of relative distance, added to the scores (T5, section 2.1)."""

    num: int = 32
    far: int = 128


@dataclass(frozen=True)
class Stretch:
    """Llama 3's way to more places: slow turns are made slower by `factor`, fast ones stay, those between are blended.

    A turn is slow when it takes more than length / low places, fast when it takes less than length / high.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    length: int = 8192


@dataclass(frozen=True)
class Rotary:
    """Queries and keys are turned by their place (Su et al. 2021). `local` is the base in layers with a window."""

    base: float = 10000.0
    length: int = 2048
    stretch: Stretch | None = None
    local: float | None = None


@dataclass(frozen=True)
class ALiBi:
    """Scores fall with the distance, at another slope in each head (Press et al. 2022)."""


@dataclass(frozen=True)
class TransformerXL:
    """Sines of the distance, projected in each layer, compared with the query (Dai et al. 2019, section 3.3).

    `segments` adds XLNet's score for being in the same segment or not.
    """

    segments: bool = False


@dataclass(frozen=True)
class Disentangled:
    """Content is compared with relative places, and these with content (DeBERTa, section 3.1).

    Distances up to `far` have vectors of their own; with `buckets` so many, finer near by (version 2). `shared` uses
    the projections of content for places too (version 2), `normed` puts a norm on their vectors. Where `absolute`,
    the embedding has vectors of `length` absolute places too.
    """

    far: int = 512
    length: int = 512
    absolute: bool = False
    buckets: int = 0
    shared: bool = False
    normed: bool = False


@dataclass(frozen=True)
class Window:
    """`size` tokens around each are seen; in the first layer and every `every`-th after it, all (ModernBERT)."""

    size: int = 128
    every: int = 3


@dataclass(frozen=True)
class Convolution:
    """Over `size` tokens around each, beside the first block (DeBERTa version 2)."""

    size: int = 3
    activation: Literal["tanh", "gelu"] = "gelu"


@dataclass(frozen=True)
class LayerNorm:
    eps: float = 1e-12
    bias: bool = True


@dataclass(frozen=True)
class RMSNorm:
    eps: float = 1e-6


@dataclass(frozen=True)
class MLP:
    """`dropout` is the rate inside, after the activation; None takes that of the model (T5, XLNet)."""

    dim: int
    activation: Literal["relu", "gelu", "gelu-tanh", "silu"] = "gelu"
    gated: bool = False
    dropout: float | None = 0.0


@dataclass(frozen=True)
class Normal:
    """Weights from N(0, std). `scale_residual` divides those that write to the residual stream by sqrt(2 layers).

    Vectors of tokens, places, segments and languages are from N(0, embed_std) where that is said (XLM). No number is
    further from 0 than `cut` times its spread, where that is said (ModernBERT).
    """

    std: float = 0.02
    scale_residual: bool = False
    embed_std: float | None = None
    cut: float | None = None


@dataclass(frozen=True)
class FanIn:
    """Weights from N(0, 1/fan-in), embeddings from N(0, 1), as T5 has them; its scores are not scaled by 1/sqrt(d)."""


@dataclass(frozen=True)
class Uniform:
    """Token vectors from U(-width, width), as AWD-LSTM has them; the rest as torch begins: U(+-1/sqrt(inputs))."""

    width: float = 0.1


@dataclass(frozen=True)
class AWDLSTM:
    """LSTM layers of `hidden` units in place of blocks, the last as wide as the token vectors (Merity et al. 2018).

    Every dropout but that of single words takes the same numbers away at all places of a text. `activity` and
    `slowness` are what large states and large steps of the last layer cost (AR and TAR, section 4.5). No gradient goes
    back further than `bptt` places; the states do (Howard & Ruder 2018, section 3.3).
    """

    hidden: int = 1150
    weight_drop: float = 0.5  # of the matrices from state to state (section 2)
    word_drop: float = 0.05  # whole words, wherever they stand (section 4.3)
    input_drop: float = 0.4  # of what the first layer reads
    hidden_drop: float = 0.3  # between layers
    output_drop: float = 0.4  # of the last states
    activity: float = 2.0
    slowness: float = 1.0
    bptt: int = 70


@dataclass(frozen=True)
class BiLSTM:
    """Layers that read the text both ways, `hidden` units each; the next one reads both."""

    hidden: int


@dataclass(frozen=True)
class ELMo:
    """Words by their characters, then two language models, one each way (Peters et al. 2018, Kim et al. 2016).

    A word is what each of the `filters` (width, number) finds in it, passed through `highways`, and projected. Each way
    has LSTM layers of `hidden` units, projected to `projection` numbers; from the second on with a residual. Cells
    and projections stay within +-`clip`; 0 leaves them alone, which is much faster on a GPU.
    """

    hidden: int = 4096
    projection: int = 512
    characters: int = 16  # the width of their vectors
    filters: tuple[tuple[int, ...], ...] = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))
    highways: int = 2
    clip: float = 3.0


@dataclass(frozen=True)
class Seq2Seq:
    """An LSTM that reads both ways, and one that writes (Sutskever et al. 2014).

    The writer begins with what the reader ends with. With `attention` it also looks, at each step, where in the text it
    wants to read (Bahdanau et al. 2015, appendix A.1.2).
    """

    hidden: int
    attention: bool = True


@dataclass(frozen=True)
class LMHead:
    """From hidden states to the vocabulary.

    `transform` is BERT's dense-activation-norm before the projection, `scaled` T5's 1/sqrt(dim). A transform of an
    own width (`dim`) needs a projection that is not tied (RemBERT). With `sampled` so many words, frequent ones more
    often, stand for all others in training (Jean et al. 2015).
    """

    tied: bool = True
    transform: bool = False
    bias: bool = False
    scaled: bool = False
    dim: int | None = None
    sampled: int = 0


@dataclass(frozen=True, kw_only=True)
class Answering:
    """What the heads of tasks share: the way from a state to an answer.

    `pooled` is BERT's dense layer before the last one, with an `activation`, and in ModernBERT with a norm after it.
    Without it `bias` gives the last layer one.
    """

    pooled: bool = False
    activation: Literal["tanh", "relu", "gelu", "gelu-tanh", "silu"] = "tanh"
    normed: bool = False
    bias: bool = False
    dropout: float | None = None  # before the last layer: the model's own unless said
    drop_state: bool = False  # before the dense layer too (RoBERTa, ELECTRA, BART)
    width: int | None = None  # of the dense layer: the model's own unless said (ULMFiT)


@dataclass(frozen=True, kw_only=True)
class Pooled(Answering):
    """One answer for a text: from its `first` state, its `last` (XLNet, every decoder), or the `mean` of all.

    A batch says which places are asked, and so the first or the last; what `mean` is over is the document there.
    `concat` puts the state that is asked, the largest numbers and the mean of the text side by side (ULMFiT).
    """

    pool: Literal["first", "last", "mean", "concat"] = "first"


@dataclass(frozen=True)
class Classes(Pooled):
    """One of the named classes for a text.

    `marks` is how many states of a text are read side by side (those of two marked words: 2); `orders` in how many
    orders its parts are read, whose states are added (GPT's similarity: 2). A class may count more than another in the
    loss (`weights`).
    """

    names: tuple[str, ...]
    marks: int = 1
    orders: int = 1
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Score(Pooled):
    """One number for a text, learned by its squared error."""

    orders: int = 1


@dataclass(frozen=True)
class Choices(Pooled):
    """One number for each text of a group, of which one is right: a softmax within the group."""


@dataclass(frozen=True)
class Tags(Answering):
    """One of the named tags for each asked token: the first one of every word.

    With `crf` which tag may follow which is learned too, and the tags of a sentence are chosen together.
    """

    names: tuple[str, ...]
    crf: bool = field(default=False, kw_only=True)
    bias: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class Span(Answering):
    """For each token whether the answer starts there, and whether it ends there: a softmax over the text."""

    bias: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class Embedding:
    """One vector of length 1 for a text; `dense` is BERT's dense layer with its tanh before that (LaBSE).

    Those of a pair shall be nearer to each other than to all others, by a `margin` (Feng et al. 2022, section 2.1);
    cosines are sharpened by `scale`.
    """

    pool: Literal["first", "last", "mean"] = "first"
    dense: bool = False
    margin: float = 0.3
    scale: float = 20.0


@dataclass(frozen=True)
class Verdict:
    """From each hidden state to whether its token was put in by a generator (ELECTRA's body without its generator)."""


@dataclass(frozen=True)
class Pair:
    """From the first state to 'the second text follows' or 'it does not' (BERT, section 3.1; ALBERT, section 3.1)."""


@dataclass(frozen=True)
class Boundary:
    """From the two states around a span to each token in it (SpanBERT, section 3.2).

    Places from the `longest` on share one vector.
    """

    longest: int = 30


@dataclass(frozen=True)
class Generator:
    """A narrow model that puts likely tokens in, for the body to find out (ELECTRA, section 3.1).

    `size` is its width as a share of the body's, `weight` what finding out counts beside its own answers. Where they
    are `disentangled`, the body has the generator's token vectors plus a difference of its own, and finding out moves
    only that (DeBERTa version 3, section 3.2).
    """

    size: float = 0.25
    weight: float = 50.0
    disentangled: bool = False


@dataclass(frozen=True)
class Query:
    """A second stream that knows its place and not its token (XLNet, section 2.3)."""


@dataclass(frozen=True)
class MaskDecoder:
    """Absolute places, up to `length`, are told only before the answer: `layers` more passes (DeBERTa, section 3.2)."""

    layers: int = 2
    length: int = 512


@dataclass(frozen=True)
class Auxiliary:
    """A decoder that answers by a head goes on to write too, which counts `weight` (Radford et al. 2018, section 3.2).

    `head` is the one that it writes with.
    """

    weight: float = 0.5
    head: LMHead = LMHead()


@dataclass(frozen=True)
class Features:
    """What a head reads in place of the last states (ELMo, section 3.3).

    `mix`: a learned mean of all layers; without it the last one. Then an LSTM of `bilstm` units each way, 0 for none.
    `dropout` is on what it reads and on what it gives.
    """

    mix: bool = False
    bilstm: int = 0
    dropout: float = 0.5


Position = NoPlaces | Learned | Sinusoid | Shaw | Buckets | Rotary | ALiBi | TransformerXL | Disentangled
ASKING_POSITIONS = (NoPlaces, Learned, Sinusoid, TransformerXL, Disentangled)  # that know who asks at some places only
Norm = LayerNorm | RMSNorm
Init = Normal | FanIn | Uniform
Recurrent = AWDLSTM | BiLSTM | ELMo | Seq2Seq
TaskHead = Classes | Score | Choices | Tags | Span | Embedding
Head = LMHead | Classes | Score | Choices | Tags | Span | Embedding | Verdict
Extra = Pair | Boundary | Generator | Query | MaskDecoder | Auxiliary | Features
EXTRAS: dict[str, type[Extra]] = {
    "pair": Pair,
    "boundary": Boundary,
    "generator": Generator,
    "query": Query,
    "decoder": MaskDecoder,
    "auxiliary": Auxiliary,
    "features": Features,
}
Shape = Literal["encoder", "decoder", "encoder-decoder"]
BAG = "bag"  # the family without layers: a text is the mean of its words' vectors


@dataclass(frozen=True)
class ModelConfig:
    """What a model is. `family` names the Hugging Face layout that its checkpoints are written in."""

    family: str
    shape: Shape
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    mlp: MLP
    position: Position
    norm: Norm
    head: Head
    init: Init = Normal()
    norm_first: bool = False  # before each part (pre) or after its residual (post)
    embed_norm: bool = False
    skip_first_norm: bool = False  # the first block reads an embedding that has its norm already (ModernBERT)
    bias: bool = True
    attention_bias: Literal["all", "no-key", "none"] = "all"  # where `bias`: in attention too, or less of it there
    num_segments: int = 0
    num_languages: int = 0  # a vector for each language; the sides of a parallel text are two of them (XLM)
    embed_scaled: bool = False  # token vectors times sqrt(dim)
    head_dim: int | None = None  # dim / num_heads unless said
    num_kv_heads: int | None = None  # so many heads of keys and values, each read by several of queries
    window: Window | None = None  # a narrower sight in some layers
    convolution: Convolution | None = None
    num_decoder_layers: int | None = None  # num_layers unless said
    embed_dim: int | None = None  # width of the token vectors, dim unless said (ALBERT, ELECTRA)
    num_shared: int = 1  # so many layers in a row are one block (ALBERT)
    share_stacks: bool = False  # the decoder runs the encoder's blocks, with a cross-attention of its own (T5, 3.2.2)
    framed: bool = False  # an encoder-decoder whose texts stand between <s> and </s> (BART), not before </s> (T5)
    dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_drop: float = 0.0  # a block is left out so often in training (Fan et al. 2020)
    bigrams: int = 0  # so many vectors of two tokens in a row, shared by their hash, added to the second's (fastText)
    recurrent: Recurrent | None = None  # LSTMs in place of the blocks, which then say nothing
    extras: tuple[Extra, ...] = ()  # what an objective needs beside the body and its head

    @property
    def head_size(self) -> int:
        return self.head_dim or self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def key_bias(self) -> bool:
        return self.bias and self.attention_bias == "all"

    @property
    def query_bias(self) -> bool:
        return self.bias and self.attention_bias != "none"

    @property
    def mlp_dropout(self) -> float:
        return self.dropout if self.mlp.dropout is None else self.mlp.dropout

    @property
    def decoder_layers(self) -> int:
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def embed_width(self) -> int:
        return self.embed_dim or self.dim

    @property
    def answer_width(self) -> int:
        """How wide the states are that the head of a task reads."""
        features = self.extra("features")
        return 2 * features.bilstm if isinstance(features, Features) and features.bilstm else self.dim

    @property
    def reads_encoder(self) -> bool:
        """Whether a task's answers are told from the encoder of an encoder-decoder: vectors, and any of T5's."""
        two = self.shape == "encoder-decoder"
        return two and isinstance(self.head, TaskHead) and (isinstance(self.head, Embedding) or not self.framed)

    @property
    def has_decoder(self) -> bool:
        """Whether there is a second stack: T5's encoder answers without one, as it does in `transformers`."""
        return self.shape == "encoder-decoder" and (self.framed or not self.reads_encoder)

    def extra(self, name: str) -> Extra | None:
        """What `extras` has under one of the names of EXTRAS."""
        return next((e for e in self.extras if isinstance(e, EXTRAS[name])), None)

    @property
    def max_length(self) -> int | None:
        """The longest text that the positions can tell apart, or None when there is no such limit."""
        if isinstance(self.position, Learned | Sinusoid):
            return self.position.length - getattr(self.position, "offset", 0)
        late = self.extra("decoder")
        return late.length if isinstance(late, MaskDecoder) else self.num_places or None

    @property
    def num_places(self) -> int:
        """How many absolute places have a vector of their own in the embedding."""
        if isinstance(self.position, Disentangled):
            return self.position.length if self.position.absolute else 0
        return self.position.length if isinstance(self.position, Learned) else 0

    @property
    def answers_last(self) -> bool:
        """Whether a task's answer is told from the last token of a text."""
        return getattr(self.head, "pool", None) == "last"

    def problems(self) -> list[str]:
        """What is wrong with these numbers, in a user's words."""
        at_least_1: dict[str, int | None] = {
            "vocab_size": self.vocab_size,
            "dim": self.dim,
            "num_layers": self.num_layers or int(self.family == BAG),
            "num_heads": self.num_heads,
            "mlp.dim": self.mlp.dim,
            "position.length": self.max_length,
            "head_dim": self.head_dim,
            "num_kv_heads": self.num_kv_heads,
            "num_decoder_layers": self.num_decoder_layers,
            "embed_dim": self.embed_dim,
            "num_shared": self.num_shared,
        }
        wrong = [
            f"model.{name} is {n}, and must be at least 1" for name, n in at_least_1.items() if n is not None and n < 1
        ]
        if isinstance(self.position, Buckets) and not 4 <= self.position.num < 2 * self.position.far:
            wrong.append("model.position.num must be at least 4, and less than twice model.position.far")
        if self.convolution is not None and (self.convolution.size % 2 == 0 or self.shape != "encoder"):
            wrong.append("model.convolution.size must be odd, and only an encoder may see its neighbours")
        if isinstance(self.position, Disentangled) and not self.position.far > self.position.buckets // 2 + 1:
            wrong.append("model.position.far must be more than half of model.position.buckets, plus 1")
        if isinstance(self.position, TransformerXL) and self.dim % 2:
            wrong.append(f"model.position TransformerXL has pairs of sine and cosine, and model.dim={self.dim} is odd")
        if isinstance(self.position, Rotary) and self.head_size % 2:
            wrong.append(f"model.position Rotary turns pairs of numbers, and a head has {self.head_size}: not even")
        if not wrong and self.num_heads % self.kv_heads:
            wrong.append(f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.kv_heads}")
        if isinstance(self.init, Normal):
            for name in ("std", "embed_std", "cut"):
                value = getattr(self.init, name)
                if value is not None and value <= 0:
                    wrong.append(f"model.init.{name} is {value}, and must be more than 0")
        wrong += self.problems_of_head() + self.problems_of_recurrent()
        if not wrong and self.head_dim is None and self.dim % self.num_heads:
            wrong.append(f"model.dim={self.dim} is not a multiple of model.num_heads={self.num_heads}")
        rates = {name: getattr(self, name) for name in ("dropout", "attention_dropout", "layer_drop")}
        for name, value in (rates | {"mlp.dropout": self.mlp_dropout}).items():
            if not 0 <= value < 1:
                wrong.append(f"model.{name} is {value}, and must be in [0, 1)")
        if self.share_stacks and (self.shape != "encoder-decoder" or self.decoder_layers != self.num_layers):
            wrong.append("model.share_stacks needs an encoder and a decoder of equally many layers")
        transform = not isinstance(self.head, LMHead) or self.head.transform
        if self.embed_dim is not None and not transform:
            wrong.append("model.embed_dim needs model.head.transform=true, which leads back to that width")
        own = isinstance(self.head, LMHead) and self.head.dim is not None and not isinstance(self.recurrent, ELMo)
        if own and isinstance(self.head, LMHead) and (self.head.tied or not self.head.transform):
            wrong.append("model.head.dim needs model.head.transform=true and model.head.tied=false")
        if self.num_segments and self.num_languages:
            wrong.append("model.num_segments and model.num_languages exclude each other")
        return wrong + (self.problems_of_extras() if self.extras else [])

    def problems_of_head(self) -> list[str]:
        """What is wrong with the head of a task."""
        head, wrong = self.head, []
        if isinstance(head, Classes | Tags) and not head.names:
            wrong.append("model.head has no classes" if isinstance(head, Classes) else "model.head has no tags")
        if isinstance(head, Classes) and head.weights is not None and len(head.weights) != len(head.names):
            wrong.append(f"model.head.weights has {len(head.weights)} numbers for {len(head.names)} classes")
        if isinstance(head, Classes) and (head.marks < 1 or head.orders < 1 or (head.marks > 1 and head.orders > 1)):
            wrong.append("model.head.marks and model.head.orders must be at least 1, and one of them 1")
        if isinstance(head, Classes | Score | Choices | Embedding) and self.shape != "encoder" and head.pool == "first":
            wrong.append("a decoder's first state has read one token: model.head.pool must be 'last' or 'mean'")
        if isinstance(head, Answering) and head.dropout is not None and not 0 <= head.dropout < 1:
            wrong.append(f"model.head.dropout is {head.dropout}, and must be in [0, 1)")
        return wrong

    def problems_of_recurrent(self) -> list[str]:
        """What is wrong with the numbers of LSTMs."""
        spec, wrong = self.recurrent, []
        if spec is None:
            return []
        shapes = {AWDLSTM: "decoder", BiLSTM: "encoder", ELMo: "encoder", Seq2Seq: "encoder-decoder"}
        if self.shape != shapes[type(spec)]:
            wrong.append(f"{type(spec).__name__} in model.recurrent is for the shape {shapes[type(spec)]}")
        if self.position != NoPlaces():
            wrong.append("model.recurrent reads place after place: model.position must be NoPlaces")
        if spec.hidden < 1 or (isinstance(spec, ELMo) and (spec.projection < 1 or not spec.filters or spec.clip < 0)):
            wrong.append("the numbers of model.recurrent must be at least 1, and clip at least 0")
        if isinstance(spec, AWDLSTM):
            rates = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name.endswith("_drop")}
            wrong += [f"model.recurrent.{n} is {v}, and must be in [0, 1)" for n, v in rates.items() if not 0 <= v < 1]
            if spec.bptt < 1 or spec.activity < 0 or spec.slowness < 0:
                wrong.append("model.recurrent.bptt must be at least 1, activity and slowness at least 0")
        if isinstance(spec, BiLSTM | ELMo):
            each = spec.hidden if isinstance(spec, BiLSTM) else spec.projection
            if self.dim != 2 * each:
                wrong.append(f"model.dim={self.dim} must be {2 * each}: both ways of model.recurrent, side by side")
        return wrong

    def problems_of_extras(self) -> list[str]:
        """What does not go together with the extras, or is wrong inside them."""
        names = [type(extra).__name__ for extra in self.extras]
        features = self.extra("features")
        if isinstance(features, Features):
            if names != ["Features"] or not isinstance(self.head, TaskHead) or self.shape == "encoder-decoder":
                return ["Features in model.extras is alone there, for one stack with the head of a task"]
            if features.mix and isinstance(self.recurrent, AWDLSTM):
                return ["the layers of an AWDLSTM differ in width, and cannot be mixed"]
            fine = features.bilstm >= 0 and 0 <= features.dropout < 1
            return [] if fine else ["in model.extras Features.bilstm must be at least 0, Features.dropout in [0, 1)"]
        if names == ["Auxiliary"]:
            fits = self.shape == "decoder" and isinstance(self.head, Classes | Score | Choices)
            return [] if fits else ["Auxiliary in model.extras is for a decoder with Classes, Score or Choices"]
        alone = next((name for name in names if name in ("Generator", "Query", "MaskDecoder", "Auxiliary")), None)
        boundary, generator, decoder = self.extra("boundary"), self.extra("generator"), self.extra("decoder")
        wrong = []
        if self.shape != "encoder" or not isinstance(self.head, LMHead):
            wrong.append("model.extras are for the shape encoder with a language model's head")
        elif generator is not None and not self.head.transform:
            wrong.append("a Generator in model.extras needs model.head.transform=true")
        if len(set(names)) < len(names) or (alone and len(names) > 1):
            wrong.append(f"model.extras are {', '.join(names)}: one of each, and {alone or 'Query'} only by itself")
        if isinstance(boundary, Boundary) and boundary.longest < 1:
            wrong.append(f"Boundary.longest in model.extras is {boundary.longest}, and must be at least 1")
        if isinstance(generator, Generator) and not (0 < generator.size <= 1 and generator.weight > 0):
            wrong.append("in model.extras Generator.size must be in (0, 1], and Generator.weight more than 0")
        if isinstance(decoder, MaskDecoder) and (decoder.layers < 1 or decoder.length < 1):
            wrong.append("in model.extras MaskDecoder.layers and MaskDecoder.length must be at least 1")
        beside = self.window or (self.convolution if "Query" in names else None)
        if alone in ("Query", "MaskDecoder") and (beside or not isinstance(self.position, ASKING_POSITIONS)):
            what = type(beside or self.position).__name__
            wrong.append(f"a {alone} in model.extras cannot go with {what} yet: take TransformerXL or Disentangled")
        return wrong


def with_extras(config: ModelConfig, names: tuple[str, ...]) -> ModelConfig:
    """The same model with the extras of these names too; those that it lacks have their default numbers."""
    found = {name: config.extra(name) or make() for name, make in EXTRAS.items() if name in names or config.extra(name)}
    return replace(config, extras=tuple(found.values()))
