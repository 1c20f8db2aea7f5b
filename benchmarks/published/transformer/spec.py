"""`TransformerSpec`: the shape of a decoder-only transformer, and what follows from it alone."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import AutoparError


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """A stack of equal layers between an embedding and a projection to the vocabulary.

    Args:
        layers: number of layers (l).
        hidden: width of the residual stream (h).
        heads: attention heads (a).
        seq: tokens of one example (s).
        vocab: size of the vocabulary (V).
        ffn: width of the feed-forward network; 0 means 4 hidden.
        kv_heads: heads of keys and values (grouped-query attention); 0 means as many as ``heads``.
        head_dim: width of one head; 0 means hidden / heads.
        gated: the feed-forward network has a gate, so three matrices and no biases (Llama); else two with
            biases (GPT).
        tied: the output projection is the transposed embedding.
        learned_positions: there is a table of ``seq`` position vectors.
        experts: feed-forward networks of each layer; 1 is a dense model.
        experts_per_token: how many of them see a token.
        dropout: activations are dropped out, so that masks are kept for the backward pass.
        dtype: jaxpr name of the dtype of products, as ``f16``.

    Raises:
        AutoparError: a size is impossible; it names the field.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    tied: bool = True
    learned_positions: bool = True
    experts: int = 1
    experts_per_token: int = 1
    dropout: bool = True
    dtype: str = "f16"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "vocab", "experts", "experts_per_token"):
            if getattr(self, name) < 1:
                raise AutoparError(f"TransformerSpec.{name} is {getattr(self, name)}", remedy="give 1 or more")
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        if self.experts_per_token > self.experts:
            raise AutoparError(
                f"TransformerSpec.experts_per_token is {self.experts_per_token}, of {self.experts} experts",
                remedy="a token can see each expert once",
            )

    @property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Width of all keys and values together."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def feed_forward_matrices(self) -> int:
        """Matrices of one feed-forward network."""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer outside of its feed-forward networks, norms included."""
        matrices = self.hidden * (2 * self.query_width + self.key_value_width)
        if self.gated:
            return matrices + 2 * self.hidden
        return matrices + self.query_width + self.key_value_width + self.hidden + 4 * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of one feed-forward network."""
        return self.feed_forward_matrices * self.hidden * self.ffn + (0 if self.gated else self.ffn + self.hidden)

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router."""
        return self.hidden * self.experts if self.experts > 1 else 0

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return self.attention_parameters + self.experts * self.expert_parameters + self.router_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token and position tables."""
        return (self.vocab + (self.seq if self.learned_positions else 0)) * self.hidden

    @property
    def output_parameters(self) -> int:
        """Parameters that the output projection has of its own."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters.

        For a GPT that is 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)) (Narayanan et al., SC21, equation 2), and the
        2h of the last norm, which the formula leaves out.
        """
        last_norm = self.hidden if self.gated else 2 * self.hidden
        return self.layers * self.layer_parameters + self.embedding_parameters + self.output_parameters + last_norm

    def model_flops(self, batch: int) -> float:
        """FLOPs of the forward and backward pass of ``batch`` examples, without recomputation.

        72 B s l h^2 (1 + s/(6h) + V/(12 l h)) for a GPT (SC21, equation 3 without its recomputation).
        """
        tokens = batch * self.seq
        products = 2 * self.hidden * (2 * self.query_width + self.key_value_width)
        products += 2 * self.feed_forward_matrices * self.hidden * self.ffn * self.experts_per_token
        products += 4 * self.seq * self.query_width
        return 3.0 * tokens * (self.layers * products + 2 * self.hidden * self.vocab)
