"""ModelConfig, and the small types that it is made of.

Each mechanism is one field whose value is a frozen type with the settings of that mechanism and no others:
`position=T5Bias(num_buckets=32)`. So an illegal mixture cannot be written down, and a model reads like its paper.
A family is a choice per field (`presets.py`):

    BERT   post-norm, LearnedPosition, LayerNorm, GELU, LM head with transform
    GPT-2  pre-norm, LearnedPosition, LayerNorm, GELU (tanh), tied LM head
    T5     pre-norm, T5Bias, RMSNorm, ReLU, no biases, two stacks
    Llama  pre-norm, Rotary, RMSNorm, gated SiLU, no biases, grouped-query attention
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal


@dataclass(frozen=True)
class NoPosition:
    """No position information. A causal mask alone lets a decoder infer positions (Haviv et al. 2022)."""


@dataclass(frozen=True)
class LearnedPosition:
    """One trained vector per absolute position, added to the token embedding (BERT, GPT-2).

    Texts longer than `length` - `offset` have no vectors. The first `offset` vectors are unused: RoBERTa and BART count
    positions from 2.
    """

    length: int = 512
    offset: int = 0


@dataclass(frozen=True)
class SinusoidalPosition:
    """sin and cos of pos / 10000^(2i/d), added to the token embedding (Vaswani et al. 2017, section 3.5)."""

    length: int = 512


@dataclass(frozen=True)
class Shaw:
    """score_ij += q_i . a_(j-i): a trained vector per distance, clipped to +-`max_distance` (Shaw et al. 2018, 3.2).

    Only the part of the keys; the paper also adds vectors to the values.
    """

    max_distance: int = 16


@dataclass(frozen=True)
class T5Bias:
    """score_ij += b[head, bucket(j - i)] (Raffel et al. 2020, section 2.1).

    Half of the buckets are exact distances, the rest grow logarithmically up to `max_distance`.
    """

    num_buckets: int = 32
    max_distance: int = 128


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's extension of RoPE to longer contexts, by wavelength.

    Wavelengths above original_length / low_freq_factor are stretched by `factor`, those below original_length /
    high_freq_factor stay, and those between are interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class Rotary:
    """RoPE: rotate pairs of features of queries and keys by angles pos * theta^(-2i/d) (Su et al. 2021, section 3.2).

    The dot product then depends on the distance alone. `local_theta` is the base in layers with a sliding window.
    """

    theta: float = 10000.0
    length: int = 2048
    scaling: RopeScaling | None = None
    local_theta: float | None = None


@dataclass(frozen=True)
class ALiBi:
    """score_ij -= m_h |i - j| with a fixed slope m_h per head; extrapolates to longer texts (Press et al. 2022)."""


@dataclass(frozen=True)
class TransformerXL:
    """score_ij = (q_i + u) . k_j + (q_i + v) . W r_(i-j), with sinusoids r of the distance (Dai et al. 2019, 3.3).

    `relative_segments` adds XLNet's score for "same segment" or "other segment" (Yang et al. 2019, section 2.5).
    """

    relative_segments: bool = False


@dataclass(frozen=True)
class Disentangled:
    """Disentangled attention: content-content + content-position + position-content (He et al. 2020, section 3.1).

    Positions are relative, with an embedding per distance up to `max_distance`; with `num_buckets` per bucket, which is
    logarithmic for far distances (version 2). `share_projections` projects positions with the matrices of the content,
    `norm_embeddings` normalises their embeddings (both version 2). `absolute_embeddings` adds `length` absolute
    position embeddings to the input.
    """

    max_distance: int = 512
    length: int = 512
    absolute_embeddings: bool = False
    num_buckets: int = 0
    share_projections: bool = False
    norm_embeddings: bool = False


@dataclass(frozen=True)
class SlidingWindow:
    """Attention to `size` tokens around each; every `global_every`-th layer, from the first, is global (ModernBERT)."""

    size: int = 128
    global_every: int = 3


@dataclass(frozen=True)
class ConvolutionConfig:
    """A convolution over `kernel_size` tokens, added to the output of the first block (DeBERTa version 2)."""

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
class NoNormConfig:
    """x * weight + bias: the scale and shift of LayerNorm without its statistics (Sun et al. 2020, section 3.3).

    A mean and a variance per token cost much time on a phone. `eps` is that of the one LayerNorm that is left, in the
    LM head.
    """

    eps: float = 1e-12


@dataclass(frozen=True)
class BottleneckConfig:
    """Blocks that compute in `dim` features, between states of the model's width (Sun et al. 2020, section 3.1).

    One linear layer leads into the block, another one out of it. MobileBERT's blocks are narrow. Those of its teacher
    IB-BERT are wide (an inverted bottleneck), so that both have equally wide states between blocks. `num_mlps` MLPs
    follow one attention: in a narrow block attention would else have too large a share (section 3.3).

    `attention_input` says where attention reads: `wide` the states between blocks (IB-BERT), `narrow` those inside
    (MobileBERT-TINY), `shared-qk` values there and queries and keys from a narrow layer of their own (MobileBERT).
    """

    dim: int = 128
    num_mlps: int = 4
    attention_input: Literal["wide", "narrow", "shared-qk"] = "shared-qk"


@dataclass(frozen=True)
class MLPConfig:
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) where `gated` (GLU, Shazeer 2020).

    `dropout` is the probability after the activation; None takes that of the model (T5, XLNet).
    """

    dim: int
    activation: Literal["relu", "gelu", "gelu-tanh", "silu"] = "gelu"
    gated: bool = False
    dropout: float | None = 0.0


@dataclass(frozen=True)
class NormalInit:
    """Weights from N(0, std).

    `scale_residual` divides the std of projections into the residual stream by sqrt(2 * layers) (GPT-2).
    `embed_std` is that of all embeddings (XLM); None: `std`. `cutoff_factor` truncates the normal distribution at that
    many standard deviations (ModernBERT); None: no truncation.
    """

    std: float = 0.02
    scale_residual: bool = False
    embed_std: float | None = None
    cutoff_factor: float | None = None


@dataclass(frozen=True)
class FanInInit:
    """T5: weights and an untied head from N(0, 1/fan-in), embeddings from N(0, 1).

    Queries start smaller by the 1/sqrt(d) that the attention scores lack.
    """


@dataclass(frozen=True)
class UniformInit:
    """AWD-LSTM: token embeddings from U(-bound, bound), the rest as torch initialises it."""

    bound: float = 0.1


@dataclass(frozen=True)
class AWDLSTMConfig:
    """LSTM layers of `hidden_size` units, the last as wide as the token embeddings (Merity et al. 2018).

    Dropout masks are the same at all positions of a text. `activation_reg` and `temporal_activation_reg` weigh the L2
    penalties AR and TAR (section 4.6). Gradients are truncated after `bptt` positions; the state is carried on.
    """

    hidden_size: int = 1150
    weight_drop: float = 0.5  # of the weights from state to state (DropConnect, section 2)
    word_drop: float = 0.05  # whole words, at all their positions (section 4.3)
    input_drop: float = 0.4  # of the input of the first layer
    hidden_drop: float = 0.3  # between layers
    output_drop: float = 0.4  # of the last hidden states
    activation_reg: float = 2.0
    temporal_activation_reg: float = 1.0
    bptt: int = 70


@dataclass(frozen=True)
class BiLSTMConfig:
    """Layers of a forward and a backward LSTM, `hidden_size` units each; outputs are concatenated."""

    hidden_size: int


@dataclass(frozen=True)
class ELMoConfig:
    """Character CNN, then a forward and a backward LSTM language model (Peters et al. 2018; Kim et al. 2016).

    `filters` are (width, number) of the convolutions, whose maxima pass `num_highways` highway layers and a projection.
    Each direction has LSTM layers of `hidden_size` units, projected to `proj_size`, with residuals from the second on.
    Cells and projections are clipped to +-`clip`; 0 disables clipping, which is much faster on a GPU.
    """

    hidden_size: int = 4096
    proj_size: int = 512
    char_dim: int = 16  # width of the character embeddings
    filters: tuple[tuple[int, ...], ...] = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))
    num_highways: int = 2
    clip: float = 3.0


@dataclass(frozen=True)
class Seq2SeqConfig:
    """A bidirectional LSTM encoder and an LSTM decoder that starts with its final state (Sutskever et al. 2014).

    `attention` adds additive attention over the encoder's states at each step (Bahdanau et al. 2015, appendix A.1.2).
    """

    hidden_size: int
    attention: bool = True


@dataclass(frozen=True)
class LMHead:
    """Hidden states -> logits over the vocabulary.

    `tied` uses the token embeddings as projection. `transform` is BERT's dense, activation and norm before it; another
    width of the transform (`dim`) needs an untied projection (RemBERT). `extends_embeddings` appends untied features to
    the tied token embeddings, up to the model's width (MobileBERT). `scale_hidden_states` is T5's 1/sqrt(dim).
    `num_sampled` trains with a sampled softmax over that many tokens (Jean et al. 2015); 0 uses the full vocabulary.
    """

    tied: bool = True
    transform: bool = False
    bias: bool = False
    scale_hidden_states: bool = False
    dim: int | None = None
    num_sampled: int = 0
    extends_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskHeadBase:
    """Common fields of task heads: pooler (optional) -> dropout -> output layer.

    `has_pooler` is BERT's dense layer with an `activation`, in ModernBERT followed by a norm (`has_norm`). Without a
    pooler, `bias` adds a bias to the output layer.
    """

    has_pooler: bool = False
    activation: Literal["tanh", "relu", "gelu", "gelu-tanh", "silu"] = "tanh"
    has_norm: bool = False
    bias: bool = False
    dropout: float | None = None  # before the output layer; None: the model's
    dropout_before_pooler: bool = False  # before the pooler too (RoBERTa, ELECTRA, BART)
    pooler_dim: int | None = None  # output size of the pooler (ULMFiT); None: the model's width


@dataclass(frozen=True, kw_only=True)
class PooledHeadBase(TaskHeadBase):
    """One prediction per text from its `first` hidden state, its `last` (XLNet, decoders) or the `mean` of all.

    The batch's `target_positions` select the state; `mean` is over its document. `concat` is ULMFiT's concatenation of
    that state, the maximum and the mean of the text.
    """

    pool: Literal["first", "last", "mean", "concat"] = "first"


@dataclass(frozen=True)
class ClassificationHead(PooledHeadBase):
    """One of the classes `names` per text.

    `num_marked` states of a text are concatenated (2 for a pair of marked words). `num_orders` passes over a pair in
    different order are added (2 for GPT's similarity). `class_weights` weigh the classes in the loss.
    """

    names: tuple[str, ...]
    num_marked: int = 1
    num_orders: int = 1
    class_weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class RegressionHead(PooledHeadBase):
    """One number per text, trained by squared error in units of `target_std`, the standard deviation of the targets."""

    num_orders: int = 1
    target_std: float = 1.0


@dataclass(frozen=True)
class MultipleChoiceHead(PooledHeadBase):
    """One logit per choice, with a softmax over the choices of a group."""


@dataclass(frozen=True)
class TokenClassificationHead(TaskHeadBase):
    """One of the tags `names` per target position: the first token of every word.

    `crf` scores transitions between tags too, and decodes the tags of a sentence jointly (`recurrent/crf.py`).
    """

    names: tuple[str, ...]
    crf: bool = field(default=False, kw_only=True)
    bias: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class SpanHead(TaskHeadBase):
    """A start and an end logit per token, each with a softmax over the text (BERT, section 4.2)."""

    bias: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class EmbeddingHead:
    """One L2-normalised vector per text; `has_pooler` adds BERT's pooler (LaBSE).

    Training ranks the partner of each text above the rest of the batch by an additive `margin` on the cosine, which is
    multiplied by `scale` (Feng et al. 2022, section 2.1). The paper sets the margin to 0.3, and its equation has no
    scale. Cosines alone give an almost flat softmax, so the default is 20, as in sentence-transformers.
    `max_length` is the number of tokens, special tokens included, to which texts are truncated; 0: the model's maximum.
    """

    pool: Literal["first", "last", "mean"] = "first"
    has_pooler: bool = False
    margin: float = 0.3
    scale: float = 20.0
    max_length: int = 0


@dataclass(frozen=True)
class NamedHead:
    """The head of one of several tasks."""

    name: str
    head: ClassificationHead | RegressionHead | MultipleChoiceHead | TokenClassificationHead | SpanHead


@dataclass(frozen=True)
class MultiTaskHead:
    """One head per task on a shared backbone (MT-DNN, Liu et al. 2019, section 3). `Batch.head` selects one by name."""

    heads: tuple[NamedHead, ...]

    def __getitem__(
        self, name: str
    ) -> ClassificationHead | RegressionHead | MultipleChoiceHead | TokenClassificationHead | SpanHead:
        return {own.name: own.head for own in self.heads}[name]


def head_key(name: str) -> str:
    """Return the name of a task's module in a model with several heads; a module cannot be called `train` or `type`."""
    return f"task_{name}"


@dataclass(frozen=True)
class DiscriminatorHead:
    """One logit per token: was it replaced? (ELECTRA's discriminator without its generator)."""


@dataclass(frozen=True)
class SentencePairHead:
    """Two logits from [CLS]: next sentence (BERT, section 3.1) or sentence order (ALBERT, section 3.1)."""


@dataclass(frozen=True)
class SpanBoundaryHead:
    """Predict the tokens of a span from the two states around it (SpanBERT, section 3.2).

    Positions in the span from `max_span_length` on share one embedding.
    """

    max_span_length: int = 30


@dataclass(frozen=True)
class GeneratorConfig:
    """ELECTRA's generator, which replaces tokens for the backbone to detect (Clark et al. 2020, section 2).

    `width_ratio` and `depth_ratio` are its width and its number of layers relative to the backbone's;
    `discriminator_weight` weighs detection against MLM. `disentangle_embeddings` gives the backbone the generator's
    embeddings plus its own difference, and only the difference gets the gradient of detection (DeBERTa version 3,
    section 3.3).
    """

    width_ratio: float = 0.25
    discriminator_weight: float = 50.0
    disentangle_embeddings: bool = False
    depth_ratio: float = 1.0


@dataclass(frozen=True)
class DetectorConfig:
    """ELECTRA's generator and discriminator beside the model's own LM head (`models/electra.py`).

    `width_ratio` and `depth_ratio` are those of the generator relative to the backbone; `weight` weighs detection
    against language modelling.
    """

    width_ratio: float = 0.5
    depth_ratio: float = 0.25
    weight: float = 2.0


GENERATOR_HEAD = LMHead(transform=True, bias=True)  # of a generator that does not take the model's own head


@dataclass(frozen=True)
class QueryStream:
    """XLNet's query stream: it knows a target's position but not its token (Yang et al. 2019, section 2.3)."""


@dataclass(frozen=True)
class MaskDecoder:
    """Enhanced mask decoder: absolute positions enter in `num_layers` passes before the softmax (DeBERTa, 3.2)."""

    num_layers: int = 2
    length: int = 512


@dataclass(frozen=True)
class AuxiliaryLM:
    """Language modelling as auxiliary loss while a decoder's task head is trained (Radford et al. 2018, section 3.2).

    `weight` multiplies the auxiliary loss; `head` computes its logits.
    """

    weight: float = 0.5
    head: LMHead = LMHead()


@dataclass(frozen=True)
class FeatureEncoderConfig:
    """Features for a task head over a frozen backbone (ELMo, section 3.3).

    `mix_layers`: a trained mean of all layers; without it the last layer. `word_dim`: width of the task's own word
    vectors, concatenated with it; 0: none. `bilstm_hidden_size`: units per direction of a biLSTM above both; 0: none.
    `dropout` applies to its input and output. `l2_mix`: weight of the squared norm of the mix weights in the loss.
    """

    mix_layers: bool = False
    bilstm_hidden_size: int = 0
    dropout: float = 0.5
    word_dim: int = 0
    l2_mix: float = 0.0


Position = (
    NoPosition | LearnedPosition | SinusoidalPosition | Shaw | T5Bias | Rotary | ALiBi | TransformerXL | Disentangled
)
ENCODER_HEAD_FAMILIES = ("t5gemma",)  # encoder-decoders whose task heads all read the encoder
# can compute queries at target positions only
SUBSET_QUERY_POSITIONS = (NoPosition, LearnedPosition, SinusoidalPosition, TransformerXL, Disentangled)
Norm = LayerNormConfig | RMSNormConfig | NoNormConfig
Init = NormalInit | FanInInit | UniformInit
Recurrent = AWDLSTMConfig | BiLSTMConfig | ELMoConfig | Seq2SeqConfig
TaskHead = (
    ClassificationHead
    | RegressionHead
    | MultipleChoiceHead
    | TokenClassificationHead
    | SpanHead
    | EmbeddingHead
    | MultiTaskHead
)
Head = (
    LMHead
    | ClassificationHead
    | RegressionHead
    | MultipleChoiceHead
    | TokenClassificationHead
    | SpanHead
    | EmbeddingHead
    | MultiTaskHead
    | DiscriminatorHead
)
Extra = (
    SentencePairHead
    | SpanBoundaryHead
    | GeneratorConfig
    | DetectorConfig
    | QueryStream
    | MaskDecoder
    | AuxiliaryLM
    | FeatureEncoderConfig
)
EXTRA_TYPES: dict[str, type[Extra]] = {
    "pair": SentencePairHead,
    "boundary": SpanBoundaryHead,
    "generator": GeneratorConfig,
    "detector": DetectorConfig,
    "query": QueryStream,
    "decoder": MaskDecoder,
    "auxiliary": AuxiliaryLM,
    "features": FeatureEncoderConfig,
}
Architecture = Literal["encoder", "decoder", "encoder-decoder"]
MAX_LAYERS = 2_000  # of a stack; the deepest published Transformer has 1,000 (DeepNet, Wang et al. 2022)
BAG_OF_WORDS_FAMILY = "bag"  # the family without layers: a text is the mean of its token embeddings


PromptForm = Literal["causal", "prefix", "denoising", "prefix-denoising", "masked", "next-token", "causal-encoder"]


@dataclass(frozen=True)
class ModelConfig:
    """The whole description of a model. `family` names the Hugging Face layout of its checkpoints."""

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
    norm_first: bool = False  # pre-norm: x + f(norm(x)); default post-norm: norm(x + f(x))
    norm_outputs: bool = False  # with pre-norm: x + norm(f(norm(x))), a norm of each sublayer's output too (Gemma 2)
    embed_norm: bool = False
    skip_first_norm: bool = False  # no norm before the first attention, after embed_norm (ModernBERT)
    bias: bool = True
    attention_bias: Literal["all", "no-key", "none"] = "all"  # with `bias`: which of q, k, v have one
    num_segments: int = 0
    num_languages: int = 0  # language embeddings; the sides of a parallel text are two languages (XLM)
    scale_embedding: bool = False  # token embeddings times sqrt(dim)
    head_dim: int | None = None  # default: dim / num_heads
    num_kv_heads: int | None = None  # grouped-query attention; default: num_heads
    window: SlidingWindow | None = None  # local attention in some layers
    convolution: ConvolutionConfig | None = None
    # Each head's output times 2 sigmoid(w x), from the layer's input x; w starts at 0 (Qiu et al. 2025).
    attention_gate: bool = False
    value_residual: bool = False  # values a v + b v_1 with those of the first layer; a = 1, b = 0 (Zhou et al. 2024)
    unet_skips: bool = False  # block n-1-i also reads the output of block i, times a weight that starts at 0
    bottleneck: BottleneckConfig | None = None  # blocks of another width than the states between them (MobileBERT)
    num_decoder_layers: int | None = None  # default: num_layers
    embed_dim: int | None = None  # width of the token embeddings (ALBERT, ELECTRA); default: dim
    embed_trigrams: bool = False  # project each token's embedding with its two neighbours' to dim (MobileBERT)
    num_shared: int = 1  # consecutive layers that share one block (ALBERT)
    share_stacks: bool = False  # the decoder runs the encoder's blocks, with a cross-attention of its own (T5, 3.2.2)
    adds_bos: bool = False  # encoder-decoder with <s> text </s> (BART) instead of text </s> (T5)
    dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_drop: float = 0.0  # probability of skipping a block in training (Fan et al. 2020)
    num_bigram_buckets: int = 0  # hashed bigram embeddings, added to the second token's (fastText); 0: none
    recurrent: Recurrent | None = None  # LSTMs instead of Transformer blocks
    extras: tuple[Extra, ...] = ()  # modules that an objective needs beside backbone and head
    # How a prompt is read, set by the objective (`prompt_form.py`). It changes no weight, so configs are equal without.
    prompt_form: PromptForm = field(default="causal", compare=False)

    @property
    def has_bidirectional_prompt(self) -> bool:
        """Whether the tokens of a prompt attend to all of it, and only the text after it is causal."""
        return self.prompt_form in ("prefix", "prefix-denoising", "masked")

    @property
    def has_sentinel_prompt(self) -> bool:
        """Whether a prompt ends with a blank, which the new text fills: a decoder that was trained to denoise."""
        return self.prompt_form in ("denoising", "prefix-denoising")

    @property
    def has_bidirectional_decoder(self) -> bool:
        """Whether a decoder is not causal: its task head reads a text as a prompt, which attends to all of itself."""
        return self.architecture == "decoder" and self.has_bidirectional_prompt and isinstance(self.head, TaskHead)

    @property
    def predicts_at_mask(self) -> bool:
        """Whether each new token is predicted at a [MASK] after the text so far (UniLM)."""
        return self.prompt_form == "masked" and self.architecture == "encoder" and self.recurrent is None

    @property
    def predicts_next_token(self) -> bool:
        """Whether a masked token, too, is predicted at the position before it (masked next-token prediction)."""
        return self.prompt_form == "next-token" and self.recurrent is None

    @property
    def is_causal_encoder(self) -> bool:
        """Whether an encoder reads a prompt, and writes after it, with causal attention."""
        is_trained = self.prompt_form in ("next-token", "causal-encoder")
        return is_trained and self.architecture == "encoder" and self.recurrent is None

    @property
    def has_plain_blocks(self) -> bool:
        """Whether blocks and stack have nothing beyond attention, MLP and norms."""
        return not (self.attention_gate or self.value_residual or self.unet_skips)

    @property
    def block_dim(self) -> int:
        """Width of the states inside a block."""
        return self.dim if self.bottleneck is None else self.bottleneck.dim

    @property
    def head_size(self) -> int:
        return self.head_dim or self.block_dim // self.num_heads

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
    def input_width(self) -> int:
        """Width at which positions are added to tokens; trigrams are projected before."""
        return self.dim if self.embed_trigrams else self.embed_width

    @property
    def head_input_dim(self) -> int:
        """Width of the states that a task head reads."""
        features = self.get_extra("features")
        if not isinstance(features, FeatureEncoderConfig):
            return self.dim
        return 2 * features.bilstm_hidden_size or self.dim + features.word_dim

    @property
    def head_reads_encoder(self) -> bool:
        """Whether the task head of an encoder-decoder reads the encoder."""
        return isinstance(self.head, TaskHead) and self.reads_encoder_with(type(self.head))

    def reads_encoder_with(self, head_type: type[Any]) -> bool:
        """Whether a task head of this type reads the encoder: embeddings, T5's tags, and all heads of T5Gemma."""
        if self.architecture != "encoder-decoder":
            return False
        if self.family in ENCODER_HEAD_FAMILIES:
            return True
        return issubclass(head_type, EmbeddingHead if self.adds_bos else EmbeddingHead | TokenClassificationHead)

    @property
    def has_decoder(self) -> bool:
        """Whether there is a decoder stack; T5 has none where the head reads its encoder, as in `transformers`."""
        return self.architecture == "encoder-decoder" and (self.adds_bos or not self.head_reads_encoder)

    def get_extra(self, name: str) -> Extra | None:
        """Return the extra of this name (EXTRA_TYPES), or None."""
        return next((e for e in self.extras if isinstance(e, EXTRA_TYPES[name])), None)

    @property
    def max_length(self) -> int | None:
        """Length of the longest text that the positions support; None: no limit."""
        if isinstance(self.position, LearnedPosition | SinusoidalPosition):
            return self.position.length - getattr(self.position, "offset", 0)
        late = self.get_extra("decoder")
        return late.length if isinstance(late, MaskDecoder) else self.num_position_embeddings or None

    @property
    def num_position_embeddings(self) -> int:
        """Number of absolute position embeddings."""
        if isinstance(self.position, Disentangled):
            return self.position.length if self.position.absolute_embeddings else 0
        return self.position.length if isinstance(self.position, LearnedPosition) else 0

    @property
    def pools_last_token(self) -> bool:
        """Whether the task head reads the last token of a text."""
        return getattr(self.head, "pool", None) == "last"

    @property
    def reads_bigrams(self) -> bool:
        """Whether the input of every stream is the embeddings to which those of bigrams can be added."""
        generator = self.get_extra("generator")
        has_own = isinstance(generator, GeneratorConfig) and generator.disentangle_embeddings
        has_own = has_own or any(isinstance(e, QueryStream | MaskDecoder) for e in self.extras)
        is_other = self.architecture == "encoder-decoder" or isinstance(self.recurrent, ELMoConfig)
        return not (has_own or is_other or self.embed_trigrams)

    def problems_of_sizes(self) -> list[str]:
        """Return the sizes that no model can have, before anything is computed from them."""
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
        for name in ("num_bigram_buckets", "num_segments", "num_languages"):
            if getattr(self, name) < 0:
                wrong.append(f"model.{name} is {getattr(self, name)}, and must be at least 0")
        depths = {
            "num_layers": self.num_layers,
            "num_decoder_layers": self.num_decoder_layers or 0,
            "bottleneck.num_mlps": self.bottleneck.num_mlps if self.bottleneck is not None else 0,
            "recurrent.num_highways": getattr(self.recurrent, "num_highways", 0),
            "extras.num_layers": getattr(self.get_extra("decoder"), "num_layers", 0),
        }
        return wrong + [
            f"model.{name} is {n:,}, and can be at most {MAX_LAYERS:,}" for name, n in depths.items() if n > MAX_LAYERS
        ]

    def problems(self) -> list[str]:
        """Return what is wrong with this config, one message per problem."""
        if wrong := self.problems_of_sizes():
            return wrong
        if isinstance(self.position, T5Bias) and not 4 <= self.position.num_buckets < 2 * self.position.max_distance:
            wrong.append(
                "model.position.num_buckets must be at least 4, and less than twice model.position.max_distance"
            )
        if self.convolution is not None and (self.convolution.kernel_size % 2 == 0 or self.architecture != "encoder"):
            wrong.append("model.convolution.kernel_size must be odd, and only an encoder can have a convolution")
        if (
            isinstance(self.position, Disentangled)
            and not self.position.max_distance > self.position.num_buckets // 2 + 1
        ):
            wrong.append("model.position.max_distance must be more than half of model.position.num_buckets, plus 1")
        if isinstance(self.position, TransformerXL) and self.dim % 2:
            wrong.append(f"model.position TransformerXL has pairs of sine and cosine, and model.dim={self.dim} is odd")
        if isinstance(self.position, Rotary) and self.head_size % 2:
            wrong.append(f"model.position Rotary rotates pairs of features, and the head size {self.head_size} is odd")
        if not wrong and self.num_heads % self.kv_heads:
            wrong.append(f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.kv_heads}")
        if isinstance(self.init, NormalInit):
            for name in ("std", "embed_std", "cutoff_factor"):
                value = getattr(self.init, name)
                if value is not None and not 0 < value < math.inf:
                    wrong.append(f"model.init.{name} is {value}, and must be more than 0 and finite")
        wrong += self.problems_of_head() + self.problems_of_recurrent() + self.problems_of_bottleneck()
        wrong += self.problems_of_additions()
        if not wrong and self.head_dim is None and self.block_dim % self.num_heads:
            field = "model.dim" if self.bottleneck is None else "model.bottleneck.dim"
            wrong.append(f"{field}={self.block_dim} is not a multiple of model.num_heads={self.num_heads}")
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
        if self.num_bigram_buckets and not self.reads_bigrams:
            wrong.append(
                "model.num_bigram_buckets is for one stack without model.embed_trigrams, without ELMo's characters, "
                "and without a query stream, a mask decoder or disentangled embeddings in model.extras"
            )
        return wrong + (self.problems_of_extras() if self.extras else [])

    def problems_of_head(self) -> list[str]:
        """Return what is wrong with the task head."""
        head, wrong = self.head, []
        if isinstance(head, MultiTaskHead):
            several = (
                f"head {own.name}: {p}" for own in head.heads for p in replace(self, head=own.head).problems_of_head()
            )
            return list(several) if head.heads else ["model.head has no heads"]
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

    def problems_of_bottleneck(self) -> list[str]:
        """Return what is wrong with bottlenecks, trigrams and the head that extends small embeddings."""
        wrong, spec = [], self.bottleneck
        if spec is not None and (spec.dim < 1 or spec.num_mlps < 1):
            wrong.append("model.bottleneck.dim and model.bottleneck.num_mlps must be at least 1")
        if spec is not None and (self.architecture != "encoder" or self.norm_first or self.recurrent is not None):
            wrong.append("model.bottleneck is for the architecture encoder with model.norm_first=false")
        if spec is not None and isinstance(self.position, Shaw | TransformerXL | Disentangled):
            wrong.append(f"model.bottleneck does not support the relative scores of {type(self.position).__name__}")
        if spec is not None and self.kv_heads != self.num_heads:
            wrong.append("model.bottleneck does not support model.num_kv_heads")
        if self.embed_trigrams and (self.architecture != "encoder" or self.recurrent is not None):
            wrong.append("model.embed_trigrams reads the next token: it is for the architecture encoder")
        own = [e for e in self.extras if isinstance(e, GeneratorConfig | DetectorConfig | QueryStream | MaskDecoder)]
        if own and (spec is not None or self.embed_trigrams):
            name = type(own[0]).__name__
            instead = ": --objective mlm-and-clm needs none" if name == "DetectorConfig" else ""
            wrong.append(f"a {name} in model.extras cannot go with model.bottleneck or model.embed_trigrams{instead}")
        head = self.head
        if (
            isinstance(head, LMHead)
            and head.extends_embeddings
            and not (head.tied and head.transform and self.embed_width < self.dim)
        ):
            wrong.append(
                "model.head.extends_embeddings needs a tied head with transform, and model.embed_dim below dim"
            )
        if isinstance(head, LMHead) and head.extends_embeddings and any(isinstance(e, GeneratorConfig) for e in own):
            wrong.append("model.head.extends_embeddings cannot go with a generator, whose head it would be")
        return wrong

    def problems_of_additions(self) -> list[str]:
        """Return what attention gates, value residuals and U-Net skips do not support."""
        names = [n for n in ("attention_gate", "value_residual", "unet_skips") if getattr(self, n)]
        own = [e for e in self.extras if isinstance(e, QueryStream | MaskDecoder)]
        is_plain = self.norm_first and self.recurrent is None and self.bottleneck is None and not own
        if self.norm_outputs and not self.norm_first:
            return ["model.norm_outputs adds norms to those before the sublayers: it needs model.norm_first=true"]
        if names and not (is_plain and self.num_shared == 1 and not self.share_stacks):
            return [
                f"model.{names[0]} is for pre-norm Transformers without shared layers, bottlenecks or extra streams"
            ]
        return []

    def problems_of_recurrent(self) -> list[str]:
        """Return what is wrong with the settings of LSTMs."""
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
            wrong.append("model.recurrent processes positions in order: model.position must be NoPosition")
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
                wrong.append(
                    f"model.dim={self.dim} must be {2 * each}: both directions of model.recurrent, concatenated"
                )
        return wrong

    def problems_of_extras(self) -> list[str]:
        """Return what is wrong inside the extras, or incompatible with them."""
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
            sizes = features.bilstm_hidden_size, features.word_dim, features.l2_mix
            if min(sizes) < 0 or not 0 <= features.dropout < 1:
                fields = "bilstm_hidden_size, word_dim and l2_mix must be at least 0, and dropout in [0, 1)"
                return [f"in model.extras the FeatureEncoderConfig's {fields}"]
            return []
        if names == ["AuxiliaryLM"]:
            fits = self.architecture == "decoder" and isinstance(
                self.head, ClassificationHead | RegressionHead | MultipleChoiceHead
            )
            needs = "a decoder with ClassificationHead, RegressionHead or MultipleChoiceHead"
            return [] if fits else [f"AuxiliaryLM in model.extras is for {needs}"]
        alone = ("GeneratorConfig", "DetectorConfig", "QueryStream", "MaskDecoder", "AuxiliaryLM")
        exclusive = next((name for name in names if name in alone), None)
        boundary = self.get_extra("boundary")
        generator = self.get_extra("generator")
        detector = self.get_extra("detector")
        decoder = self.get_extra("decoder")
        wrong = []
        has_encoder = self.architecture == "encoder" or (
            self.architecture == "encoder-decoder" and names == ["DetectorConfig"] and self.recurrent is None
        )
        if not has_encoder or not isinstance(self.head, LMHead):
            wrong.append("model.extras are for the architecture encoder with a language model's head")
        elif generator is not None and not self.head.transform:
            wrong.append("a GeneratorConfig in model.extras needs model.head.transform=true")
        if len(set(names)) < len(names) or (exclusive and len(names) > 1):
            wrong.append(
                f"model.extras are {', '.join(names)}: one of each, and {exclusive or 'QueryStream'} only alone"
            )
        if isinstance(boundary, SpanBoundaryHead) and boundary.max_span_length < 1:
            length = boundary.max_span_length
            wrong.append(f"in model.extras SpanBoundaryHead.max_span_length is {length}, and must be at least 1")
        if isinstance(generator, GeneratorConfig) and not (
            0 < generator.width_ratio <= 1 and 0 < generator.depth_ratio <= 1 and generator.discriminator_weight > 0
        ):
            wrong.append(
                "in model.extras GeneratorConfig.width_ratio must be in (0, 1], depth_ratio too, and "
                "discriminator_weight more than 0"
            )
        if isinstance(detector, DetectorConfig) and not (
            0 < detector.width_ratio <= 1 and 0 < detector.depth_ratio <= 1 and detector.weight > 0
        ):
            wrong.append(
                "in model.extras DetectorConfig.width_ratio must be in (0, 1], depth_ratio too, and weight more than 0"
            )
        if isinstance(decoder, MaskDecoder) and (decoder.num_layers < 1 or decoder.length < 1):
            wrong.append("in model.extras MaskDecoder.num_layers and MaskDecoder.length must be at least 1")
        beside = self.window or (self.convolution if "QueryStream" in names else None)
        if exclusive in ("QueryStream", "MaskDecoder") and (
            beside or not isinstance(self.position, SUBSET_QUERY_POSITIONS)
        ):
            what = type(beside or self.position).__name__
            wrong.append(f"a {exclusive} in model.extras cannot go with {what} yet: take TransformerXL or Disentangled")
        return wrong


def without_detector(config: ModelConfig) -> ModelConfig:
    """Return the config without a detector of replaced tokens, which pretraining alone needs."""
    return replace(config, extras=tuple(e for e in config.extras if not isinstance(e, DetectorConfig)))


def with_extras(config: ModelConfig, names: tuple[str, ...]) -> ModelConfig:
    """Return the config with the extras of these names added, with their default settings."""
    extras = {
        name: config.get_extra(name) or make()
        for name, make in EXTRA_TYPES.items()
        if name in names or config.get_extra(name)
    }
    return replace(config, extras=tuple(extras.values()))


@dataclass(frozen=True)
class LoRAConfig:
    """Rank, scale and place of low-rank updates (`lora.py`)."""

    rank: int = 8
    alpha: float = 16.0  # the update is scaled by alpha / rank
    dropout: float = 0.0  # probability, on the input of A
    targets: Literal["attention", "all"] = "attention"


def convert_head_type(head_type: type[Any], head: PooledHeadBase) -> Any:
    """Return a head of another type with the same pooling, pooler and dropout."""
    return head_type(**{f.name: getattr(head, f.name) for f in fields(PooledHeadBase)})


def inherit_dropout(head: TaskHead, config: ModelConfig) -> TaskHead:
    """Return the head with dropout None (inherit) where its dropout equals the model's."""
    same = isinstance(head, TaskHeadBase) and head.dropout == config.dropout
    return replace(head, dropout=None) if same else head  # type: ignore[arg-type]


def without_dropout(config: ModelConfig) -> ModelConfig:
    """Return a config whose backbone has no dropout of any kind; a head that sets its own keeps it."""
    mlp, recurrent = config.mlp, config.recurrent
    if mlp.dropout is not None:
        mlp = replace(mlp, dropout=0.0)
    if isinstance(recurrent, AWDLSTMConfig):
        rates: dict[str, Any] = {f.name: 0.0 for f in fields(recurrent) if f.name.endswith("_drop")}
        recurrent = replace(recurrent, **rates)
    return replace(config, dropout=0.0, attention_dropout=0.0, layer_drop=0.0, mlp=mlp, recurrent=recurrent)


def lm_head_width(config: ModelConfig, spec: LMHead) -> int:
    """Return the width of the states that the vocabulary projection reads."""
    return spec.dim or (config.dim if spec.extends_embeddings or not spec.transform else config.embed_width)


def make_generator_model_config(config: ModelConfig) -> ModelConfig:
    """Return the generator's config: narrower or shallower than the discriminator, over the same token embeddings."""
    spec = config.get_extra("generator") or config.get_extra("detector")
    assert isinstance(spec, GeneratorConfig | DetectorConfig)
    num_heads = max(1, int(config.num_heads * spec.width_ratio))
    return replace(
        config,
        num_layers=max(1, round(config.num_layers * spec.depth_ratio)),
        dim=num_heads * max(1, round(config.dim * spec.width_ratio / num_heads)),
        num_heads=num_heads,
        head_dim=None,
        mlp=replace(config.mlp, dim=max(1, round(config.mlp.dim * spec.width_ratio))),
        embed_dim=config.embed_width,
        extras=(),
    )
