"""ModelConfig, and the small types that it is made of.

Each mechanism is one field whose value says everything about it: `position=Buckets(num=32)` carries its own
numbers and no others, so a mixture that makes no sense cannot be written down.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal


@dataclass(frozen=True)
class NoPosition:
    """The model is not told where a token stands; a causal one can find out."""


@dataclass(frozen=True)
class LearnedPosition:
    """One vector per absolute place, added to the embedding (BERT, GPT-2).

    The first `offset` vectors are never used: RoBERTa and BART count places from 2.
    """

    length: int = 512
    offset: int = 0


@dataclass(frozen=True)
class SinusoidalPosition:
    """Sines and cosines of the absolute place, added to the embedding (Vaswani et al. 2017, section 3.5)."""

    length: int = 512


@dataclass(frozen=True)
class Shaw:
    """One vector per distance up to `max_distance`, compared with the query (Shaw et al. 2018, section 3.2, keys only)."""

    max_distance: int = 16


@dataclass(frozen=True)
class T5Bias:
    """One number per head and bucket of relative distance, added to the scores (T5, section 2.1)."""

    num_buckets: int = 32
    max_distance: int = 128


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's way to more places: slow turns are made slower by `factor`, fast ones stay, those between are blended.

    A turn is slow when it takes more than length / low places, fast when it takes less than length / high.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class Rotary:
    """Queries and keys are turned by their place (Su et al. 2021). `local_theta` is the base in layers with a window."""

    theta: float = 10000.0
    length: int = 2048
    scaling: RopeScaling | None = None
    local_theta: float | None = None


@dataclass(frozen=True)
class ALiBi:
    """Scores fall with the distance, at another slope in each head (Press et al. 2022)."""


@dataclass(frozen=True)
class TransformerXL:
    """Sines of the distance, projected in each layer, compared with the query (Dai et al. 2019, section 3.3).

    `relative_segments` adds XLNet's score for being in the same segment or not.
    """

    relative_segments: bool = False


@dataclass(frozen=True)
class Disentangled:
    """Content is compared with relative places, and these with content (DeBERTa, section 3.1).

    Distances up to `max_distance` have vectors of their own; with `num_buckets` so many, finer near by (version 2). `share_projections` uses
    the projections of content for places too (version 2), `norm_embeddings` puts a norm on their vectors. Where `absolute_embeddings`,
    the embedding has vectors of `original_length` absolute places too.
    """

    max_distance: int = 512
    length: int = 512
    absolute_embeddings: bool = False
    num_buckets: int = 0
    share_projections: bool = False
    norm_embeddings: bool = False


@dataclass(frozen=True)
class SlidingWindow:
    """`size` tokens around each are seen; in the first layer and every `global_every`-th after it, all (ModernBERT)."""

    size: int = 128
    global_every: int = 3


@dataclass(frozen=True)
class ConvolutionConfig:
    """Over `size` tokens around each, beside the first block (DeBERTa version 2)."""

    kernel_size: int = 3
    activation: Literal["tanh", "gelu"] = "gelu"


@dataclass(frozen=True)
class LayerNormConfig:
    eps: float = 1e-12
    bias: bool = True


@dataclass(frozen=True)
class RMSNormConfig:
    eps: float = 1e-6


@dataclass(frozen=True)
class MLPConfig:
    """`dropout` is the rate inside, after the activation; None takes that of the model (T5, XLNet)."""

    dim: int
    activation: Literal["relu", "gelu", "gelu-tanh", "silu"] = "gelu"
    gated: bool = False
    dropout: float | None = 0.0


@dataclass(frozen=True)
class NormalInit:
    """Weights from N(0, std). `scale_residual` divides those that write to the residual stream by sqrt(2 layers).

    Vectors of tokens, places, segments and languages are from N(0, embed_std) where that is said (XLM). No number is
    further from 0 than `cutoff_factor` times its spread, where that is said (ModernBERT).
    """

    std: float = 0.02
    scale_residual: bool = False
    embed_std: float | None = None
    cutoff_factor: float | None = None


@dataclass(frozen=True)
class FanInInit:
    """Weights from N(0, 1/fan-in), embeddings from N(0, 1), as T5 has them; its scores are not scaled by 1/sqrt(d)."""


@dataclass(frozen=True)
class UniformInit:
    """Token vectors from U(-width, width), as AWD-LSTM has them; the rest as torch begins: U(+-1/sqrt(inputs))."""

    bound: float = 0.1


@dataclass(frozen=True)
class AWDLSTMConfig:
    """LSTM layers of `hidden_size` units in place of blocks, the last as wide as the token vectors (Merity et al. 2018).

    Every dropout but that of single words takes the same numbers away at all places of a text. `activation_reg` and
    `temporal_activation_reg` are what large states and large steps of the last layer cost (AR and TAR, section 4.5). No gradient goes
    back further than `bptt` places; the states do (Howard & Ruder 2018, section 3.3).
    """

    hidden_size: int = 1150
    weight_drop: float = 0.5  # of the matrices from state to state (section 2)
    word_drop: float = 0.05  # whole words, wherever they stand (section 4.3)
    input_drop: float = 0.4  # of what the first layer reads
    hidden_drop: float = 0.3  # between layers
    output_drop: float = 0.4  # of the last states
    activation_reg: float = 2.0
    temporal_activation_reg: float = 1.0
    bptt: int = 70


@dataclass(frozen=True)
class BiLSTMConfig:
    """Layers that read the text both ways, `hidden_size` units each; the next one reads both."""

    hidden_size: int


@dataclass(frozen=True)
class ELMoConfig:
    """Words by their characters, then two language models, one each way (Peters et al. 2018, Kim et al. 2016).

    A word is what each of the `filters` (width, number) finds in it, passed through `num_highways`, and projected. Each way
    has LSTM layers of `hidden_size` units, projected to `proj_size` numbers; from the second on with a residual. Cells
    and projections stay within +-`clip`; 0 leaves them alone, which is much faster on a GPU.
    """

    hidden_size: int = 4096
    proj_size: int = 512
    char_dim: int = 16  # the width of their vectors
    filters: tuple[tuple[int, ...], ...] = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))
    num_highways: int = 2
    clip: float = 3.0


@dataclass(frozen=True)
class Seq2SeqConfig:
    """An LSTM that reads both ways, and one that writes (Sutskever et al. 2014).

    The writer begins with what the reader ends with. With `attention` it also looks, at each step, where in the text it
    wants to read (Bahdanau et al. 2015, appendix A.1.2).
    """

    hidden_size: int
    attention: bool = True


@dataclass(frozen=True)
class LMHead:
    """From hidden states to the vocabulary.

    `transform` is BERT's dense-activation-norm before the projection, `scale_hidden_states` T5's 1/sqrt(dim). A transform of an
    own width (`dim`) needs a projection that is not tied (RemBERT). With `num_sampled` so many words, frequent ones more
    often, stand for all others in training (Jean et al. 2015).
    """

    tied: bool = True
    transform: bool = False
    bias: bool = False
    scale_hidden_states: bool = False
    dim: int | None = None
    num_sampled: int = 0


@dataclass(frozen=True, kw_only=True)
class TaskHeadBase:
    """What the heads of tasks share: the way from a state to an answer.

    `has_pooler` is BERT's dense layer before the last one, with an `activation`, and in ModernBERT with a norm after it.
    Without it `bias` gives the last layer one.
    """

    has_pooler: bool = False
    activation: Literal["tanh", "relu", "gelu", "gelu-tanh", "silu"] = "tanh"
    has_norm: bool = False
    bias: bool = False
    dropout: float | None = None  # before the last layer: the model's own unless said
    dropout_before_pooler: bool = False  # before the dense layer too (RoBERTa, ELECTRA, BART)
    pooler_dim: int | None = None  # of the dense layer: the model's own unless said (ULMFiT)


@dataclass(frozen=True, kw_only=True)
class PooledHeadBase(TaskHeadBase):
    """One answer for a text: from its `first` state, its `last` (XLNet, every decoder), or the `mean` of all.

    A batch says which places are asked, and so the first or the last; what `mean` is over is the document there.
    `concat` puts the state that is asked, the largest numbers and the mean of the text side by side (ULMFiT).
    """

    pool: Literal["first", "last", "mean", "concat"] = "first"


@dataclass(frozen=True)
class ClassificationHead(PooledHeadBase):
    """One of the named classes for a text.

    `num_marked` is how many states of a text are read side by side (those of two marked words: 2); `num_orders` in how many
    orders its parts are read, whose states are added (GPT's similarity: 2). A class may count more than another in the
    loss (`class_weights`).
    """

    names: tuple[str, ...]
    num_marked: int = 1
    num_orders: int = 1
    class_weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class RegressionHead(PooledHeadBase):
    """One number for a text, learned by its squared error."""

    num_orders: int = 1


@dataclass(frozen=True)
class MultipleChoiceHead(PooledHeadBase):
    """One number for each text of a group, of which one is right: a softmax within the group."""


@dataclass(frozen=True)
class TokenClassificationHead(TaskHeadBase):
    """One of the named tags for each asked token: the first one of every word.

    With `crf` which tag may follow which is learned too, and the tags of a sentence are chosen together.
    """

    names: tuple[str, ...]
    crf: bool = field(default=False, kw_only=True)
    bias: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class SpanHead(TaskHeadBase):
    """For each token whether the answer starts there, and whether it ends there: a softmax over the text."""

    bias: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class EmbeddingHead:
    """One vector of length 1 for a text; `has_pooler` is BERT's dense layer with its tanh before that (LaBSE).

    Those of a pair shall be nearer to each other than to all others, by a `margin` (Feng et al. 2022, section 2.1);
    cosines are sharpened by `scale`.
    """

    pool: Literal["first", "last", "mean"] = "first"
    has_pooler: bool = False
    margin: float = 0.3
    scale: float = 20.0


@dataclass(frozen=True)
class DiscriminatorHead:
    """From each hidden state to whether its token was put in by a generator (ELECTRA's body without its generator)."""


@dataclass(frozen=True)
class SentencePairHead:
    """From the first state to 'the second text follows' or 'it does not' (BERT, section 3.1; ALBERT, section 3.1)."""


@dataclass(frozen=True)
class SpanBoundaryHead:
    """From the two states around a span to each token in it (SpanBERT, section 3.2).

    Places from the `max_span_length` on share one vector.
    """

    max_span_length: int = 30


@dataclass(frozen=True)
class GeneratorConfig:
    """A narrow model that puts likely tokens in, for the body to find out (ELECTRA, section 3.1).

    `width_ratio` is its width as a share of the body's, `discriminator_weight` what finding out counts beside its own answers. Where they
    are `disentangle_embeddings`, the body has the generator's token vectors plus a difference of its own, and finding out moves
    only that (DeBERTa version 3, section 3.2).
    """

    width_ratio: float = 0.25
    discriminator_weight: float = 50.0
    disentangle_embeddings: bool = False


@dataclass(frozen=True)
class QueryStream:
    """A second stream that knows its place and not its token (XLNet, section 2.3)."""


@dataclass(frozen=True)
class MaskDecoder:
    """Absolute places, up to `length`, are told only before the answer: `num_layers` more passes (DeBERTa, section 3.2)."""

    num_layers: int = 2
    length: int = 512


@dataclass(frozen=True)
class AuxiliaryLM:
    """A decoder that answers by a head goes on to write too, which counts `weight` (Radford et al. 2018, section 3.2).

    `head` is the one that it writes with.
    """

    weight: float = 0.5
    head: LMHead = LMHead()


@dataclass(frozen=True)
class FeatureEncoderConfig:
    """What a head reads in place of the last states (ELMo, section 3.3).

    `mix_layers`: a learned mean of all layers; without it the last one. Then an LSTM of `bilstm_hidden_size` units each way, 0 for none.
    `dropout` is on what it reads and on what it gives.
    """

    mix_layers: bool = False
    bilstm_hidden_size: int = 0
    dropout: float = 0.5


Position = (
    NoPosition | LearnedPosition | SinusoidalPosition | Shaw | T5Bias | Rotary | ALiBi | TransformerXL | Disentangled
)
SUBSET_QUERY_POSITIONS = (
    NoPosition,
    LearnedPosition,
    SinusoidalPosition,
    TransformerXL,
    Disentangled,
)  # that know who asks at some places only
Norm = LayerNormConfig | RMSNormConfig
Init = NormalInit | FanInInit | UniformInit
Recurrent = AWDLSTMConfig | BiLSTMConfig | ELMoConfig | Seq2SeqConfig
TaskHead = ClassificationHead | RegressionHead | MultipleChoiceHead | TokenClassificationHead | SpanHead | EmbeddingHead
Head = (
    LMHead
    | ClassificationHead
    | RegressionHead
    | MultipleChoiceHead
    | TokenClassificationHead
    | SpanHead
    | EmbeddingHead
    | DiscriminatorHead
)
Extra = (
    SentencePairHead
    | SpanBoundaryHead
    | GeneratorConfig
    | QueryStream
    | MaskDecoder
    | AuxiliaryLM
    | FeatureEncoderConfig
)
EXTRA_TYPES: dict[str, type[Extra]] = {
    "pair": SentencePairHead,
    "boundary": SpanBoundaryHead,
    "generator": GeneratorConfig,
    "query": QueryStream,
    "decoder": MaskDecoder,
    "auxiliary": AuxiliaryLM,
    "features": FeatureEncoderConfig,
}
Architecture = Literal["encoder", "decoder", "encoder-decoder"]
BAG_OF_WORDS_FAMILY = "bag"  # the family without layers: a text is the mean of its words' vectors


@dataclass(frozen=True)
class ModelConfig:
    """What a model is. `family` names the Hugging Face layout that its checkpoints are written in."""

    family: str
    architecture: Architecture
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    mlp: MLPConfig
    position: Position
    norm: Norm
    head: Head
    init: Init = NormalInit()
    norm_first: bool = False  # before each part (pre) or after its residual (post)
    embed_norm: bool = False
    skip_first_norm: bool = False  # the first block reads an embedding that has its norm already (ModernBERT)
    bias: bool = True
    attention_bias: Literal["all", "no-key", "none"] = "all"  # where `bias`: in attention too, or less of it there
    num_segments: int = 0
    num_languages: int = 0  # a vector for each language; the sides of a parallel text are two of them (XLM)
    scale_embedding: bool = False  # token vectors times sqrt(dim)
    head_dim: int | None = None  # dim / num_heads unless said
    num_kv_heads: int | None = None  # so many heads of keys and values, each read by several of queries
    window: SlidingWindow | None = None  # a narrower sight in some layers
    convolution: ConvolutionConfig | None = None
    num_decoder_layers: int | None = None  # num_layers unless said
    embed_dim: int | None = None  # width of the token vectors, dim unless said (ALBERT, ELECTRA)
    num_shared: int = 1  # so many layers in a row are one block (ALBERT)
    share_stacks: bool = False  # the decoder runs the encoder's blocks, with a cross-attention of its own (T5, 3.2.2)
    adds_bos: bool = False  # an encoder-decoder whose texts stand between <s> and </s> (BART), not before </s> (T5)
    dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_drop: float = 0.0  # a block is left out so often in training (Fan et al. 2020)
    num_bigram_buckets: int = (
        0  # so many vectors of two tokens in a row, shared by their hash, added to the second's (fastText)
    )
    recurrent: Recurrent | None = None  # LSTMs in place of the blocks, which then say nothing
    extras: tuple[Extra, ...] = ()  # what an objective needs beside the body and its head

    @property
    def head_size(self) -> int:
        return self.head_dim or self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def has_key_bias(self) -> bool:
        return self.bias and self.attention_bias == "all"

    @property
    def has_query_bias(self) -> bool:
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
    def head_input_dim(self) -> int:
        """How wide the states are that the head of a task reads."""
        features = self.get_extra("features")
        return (
            2 * features.bilstm_hidden_size
            if isinstance(features, FeatureEncoderConfig) and features.bilstm_hidden_size
            else self.dim
        )

    @property
    def head_reads_encoder(self) -> bool:
        """Whether a task's answers are told from the encoder of an encoder-decoder: vectors, and any of T5's."""
        two = self.architecture == "encoder-decoder"
        return two and isinstance(self.head, TaskHead) and (isinstance(self.head, EmbeddingHead) or not self.adds_bos)

    @property
    def has_decoder(self) -> bool:
        """Whether there is a second stack: T5's encoder answers without one, as it does in `transformers`."""
        return self.architecture == "encoder-decoder" and (self.adds_bos or not self.head_reads_encoder)

    def get_extra(self, name: str) -> Extra | None:
        """What `extras` has under one of the names of EXTRAS."""
        return next((e for e in self.extras if isinstance(e, EXTRA_TYPES[name])), None)

    @property
    def max_length(self) -> int | None:
        """The longest text that the positions can tell apart, or None when there is no such limit."""
        if isinstance(self.position, LearnedPosition | SinusoidalPosition):
            return self.position.length - getattr(self.position, "offset", 0)
        late = self.get_extra("decoder")
        return late.length if isinstance(late, MaskDecoder) else self.num_position_embeddings or None

    @property
    def num_position_embeddings(self) -> int:
        """How many absolute places have a vector of their own in the embedding."""
        if isinstance(self.position, Disentangled):
            return self.position.length if self.position.absolute_embeddings else 0
        return self.position.length if isinstance(self.position, LearnedPosition) else 0

    @property
    def pools_last_token(self) -> bool:
        """Whether a task's answer is told from the last token of a text."""
        return getattr(self.head, "pool", None) == "last"

    def problems(self) -> list[str]:
        """What is wrong with these numbers, in a user's words."""
        at_least_1: dict[str, int | None] = {
            "vocab_size": self.vocab_size,
            "dim": self.dim,
            "num_layers": self.num_layers or int(self.family == BAG_OF_WORDS_FAMILY),
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
        if isinstance(self.position, T5Bias) and not 4 <= self.position.num_buckets < 2 * self.position.max_distance:
            wrong.append(
                "model.position.num_buckets must be at least 4, and less than twice model.position.max_distance"
            )
        if self.convolution is not None and (self.convolution.kernel_size % 2 == 0 or self.architecture != "encoder"):
            wrong.append("model.convolution.kernel_size must be odd, and only an encoder may see its neighbours")
        if (
            isinstance(self.position, Disentangled)
            and not self.position.max_distance > self.position.num_buckets // 2 + 1
        ):
            wrong.append("model.position.max_distance must be more than half of model.position.num_buckets, plus 1")
        if isinstance(self.position, TransformerXL) and self.dim % 2:
            wrong.append(f"model.position TransformerXL has pairs of sine and cosine, and model.dim={self.dim} is odd")
        if isinstance(self.position, Rotary) and self.head_size % 2:
            wrong.append(f"model.position Rotary turns pairs of numbers, and a head has {self.head_size}: not even")
        if not wrong and self.num_heads % self.kv_heads:
            wrong.append(f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.kv_heads}")
        if isinstance(self.init, NormalInit):
            for name in ("std", "embed_std", "cutoff_factor"):
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
        if self.share_stacks and (self.architecture != "encoder-decoder" or self.decoder_layers != self.num_layers):
            wrong.append("model.share_stacks needs an encoder and a decoder of equally many layers")
        transform = not isinstance(self.head, LMHead) or self.head.transform
        if self.embed_dim is not None and not transform:
            wrong.append("model.embed_dim needs model.head.transform=true, which leads back to that width")
        own = isinstance(self.head, LMHead) and self.head.dim is not None and not isinstance(self.recurrent, ELMoConfig)
        if own and isinstance(self.head, LMHead) and (self.head.tied or not self.head.transform):
            wrong.append("model.head.dim needs model.head.transform=true and model.head.tied=false")
        if self.num_segments and self.num_languages:
            wrong.append("model.num_segments and model.num_languages exclude each other")
        return wrong + (self.problems_of_extras() if self.extras else [])

    def problems_of_head(self) -> list[str]:
        """What is wrong with the head of a task."""
        head, wrong = self.head, []
        if isinstance(head, ClassificationHead | TokenClassificationHead) and not head.names:
            wrong.append(
                "model.head has no classes" if isinstance(head, ClassificationHead) else "model.head has no tags"
            )
        if (
            isinstance(head, ClassificationHead)
            and head.class_weights is not None
            and len(head.class_weights) != len(head.names)
        ):
            wrong.append(
                f"model.head.class_weights has {len(head.class_weights)} numbers for {len(head.names)} classes"
            )
        if isinstance(head, ClassificationHead) and (
            head.num_marked < 1 or head.num_orders < 1 or (head.num_marked > 1 and head.num_orders > 1)
        ):
            wrong.append("model.head.num_marked and model.head.num_orders must be at least 1, and one of them 1")
        if (
            isinstance(head, ClassificationHead | RegressionHead | MultipleChoiceHead | EmbeddingHead)
            and self.architecture != "encoder"
            and head.pool == "first"
        ):
            wrong.append("a decoder's first state has read one token: model.head.pool must be 'last' or 'mean'")
        if isinstance(head, TaskHeadBase) and head.dropout is not None and not 0 <= head.dropout < 1:
            wrong.append(f"model.head.dropout is {head.dropout}, and must be in [0, 1)")
        return wrong

    def problems_of_recurrent(self) -> list[str]:
        """What is wrong with the numbers of LSTMs."""
        spec, wrong = self.recurrent, []
        if spec is None:
            return []
        shapes = {
            AWDLSTMConfig: "decoder",
            BiLSTMConfig: "encoder",
            ELMoConfig: "encoder",
            Seq2SeqConfig: "encoder-decoder",
        }
        if self.architecture != shapes[type(spec)]:
            wrong.append(f"{type(spec).__name__} in model.recurrent is for the architecture {shapes[type(spec)]}")
        if self.position != NoPosition():
            wrong.append("model.recurrent reads place after place: model.position must be NoPosition")
        if spec.hidden_size < 1 or (
            isinstance(spec, ELMoConfig) and (spec.proj_size < 1 or not spec.filters or spec.clip < 0)
        ):
            wrong.append("the numbers of model.recurrent must be at least 1, and clip at least 0")
        if isinstance(spec, AWDLSTMConfig):
            rates = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name.endswith("_drop")}
            wrong += [f"model.recurrent.{n} is {v}, and must be in [0, 1)" for n, v in rates.items() if not 0 <= v < 1]
            if spec.bptt < 1 or spec.activation_reg < 0 or spec.temporal_activation_reg < 0:
                wrong.append(
                    "model.recurrent.bptt must be at least 1, activation_reg and temporal_activation_reg at least 0"
                )
        if isinstance(spec, BiLSTMConfig | ELMoConfig):
            each = spec.hidden_size if isinstance(spec, BiLSTMConfig) else spec.proj_size
            if self.dim != 2 * each:
                wrong.append(f"model.dim={self.dim} must be {2 * each}: both ways of model.recurrent, side by side")
        return wrong

    def problems_of_extras(self) -> list[str]:
        """What does not go together with the extras, or is wrong inside them."""
        names = [type(extra).__name__ for extra in self.extras]
        features = self.get_extra("features")
        if isinstance(features, FeatureEncoderConfig):
            if (
                names != ["FeatureEncoderConfig"]
                or not isinstance(self.head, TaskHead)
                or self.architecture == "encoder-decoder"
            ):
                return ["FeatureEncoderConfig in model.extras is alone there, for one stack with the head of a task"]
            if features.mix_layers and isinstance(self.recurrent, AWDLSTMConfig):
                return ["the layers of an AWDLSTM differ in width, and cannot be mixed"]
            fine = features.bilstm_hidden_size >= 0 and 0 <= features.dropout < 1
            return (
                []
                if fine
                else [
                    "in model.extras FeatureEncoderConfig.bilstm_hidden_size must be at least 0, its dropout in [0, 1)"
                ]
            )
        if names == ["AuxiliaryLM"]:
            fits = self.architecture == "decoder" and isinstance(
                self.head, ClassificationHead | RegressionHead | MultipleChoiceHead
            )
            return (
                []
                if fits
                else [
                    "AuxiliaryLM in model.extras is for a decoder with ClassificationHead, RegressionHead or MultipleChoiceHead"
                ]
            )
        alone = next(
            (name for name in names if name in ("GeneratorConfig", "QueryStream", "MaskDecoder", "AuxiliaryLM")), None
        )
        boundary, generator, decoder = (
            self.get_extra("boundary"),
            self.get_extra("generator"),
            self.get_extra("decoder"),
        )
        wrong = []
        if self.architecture != "encoder" or not isinstance(self.head, LMHead):
            wrong.append("model.extras are for the architecture encoder with a language model's head")
        elif generator is not None and not self.head.transform:
            wrong.append("a GeneratorConfig in model.extras needs model.head.transform=true")
        if len(set(names)) < len(names) or (alone and len(names) > 1):
            wrong.append(
                f"model.extras are {', '.join(names)}: one of each, and {alone or 'QueryStream'} only by itself"
            )
        if isinstance(boundary, SpanBoundaryHead) and boundary.max_span_length < 1:
            length = boundary.max_span_length
            wrong.append(f"in model.extras SpanBoundaryHead.max_span_length is {length}, and must be at least 1")
        if isinstance(generator, GeneratorConfig) and not (
            0 < generator.width_ratio <= 1 and generator.discriminator_weight > 0
        ):
            wrong.append(
                "in model.extras GeneratorConfig.width_ratio must be in (0, 1], and discriminator_weight more than 0"
            )
        if isinstance(decoder, MaskDecoder) and (decoder.num_layers < 1 or decoder.length < 1):
            wrong.append("in model.extras MaskDecoder.num_layers and MaskDecoder.length must be at least 1")
        beside = self.window or (self.convolution if "QueryStream" in names else None)
        if alone in ("QueryStream", "MaskDecoder") and (
            beside or not isinstance(self.position, SUBSET_QUERY_POSITIONS)
        ):
            what = type(beside or self.position).__name__
            wrong.append(f"a {alone} in model.extras cannot go with {what} yet: take TransformerXL or Disentangled")
        return wrong


def with_extras(config: ModelConfig, names: tuple[str, ...]) -> ModelConfig:
    """The same model with the extras of these names too; those that it lacks have their default numbers."""
    found = {
        name: config.get_extra(name) or make()
        for name, make in EXTRA_TYPES.items()
        if name in names or config.get_extra(name)
    }
    return replace(config, extras=tuple(found.values()))
