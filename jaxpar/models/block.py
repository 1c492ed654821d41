"""A transformer's block: attention, then an MLP, each added to the residual stream."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx

from jaxpar.mesh import DATA, TENSOR
from jaxpar.sharding.constrain import constrain

NormPlaces = Literal["before", "after", "both", "after_sum"]


class TransformerBlock(nnx.Module):
    """Attention, then an MLP, each added to the residual stream.

    A family's block makes the parts, and calls `run` with what its attention takes.

    Args:
      attention: called with the residual stream, and keywords.
      mlp: called with the residual stream.
      make_norm: makes one norm.
      norms: where they stand: "before" attention and the MLP; "both": before them, and
        on their updates; "after_sum": on the residual stream after each is added, as in
        BERT.
      dropout: fraction of features zeroed in each update.
      drop_rows: whether dropout zeroes a row's whole update, not single features:
        stochastic depth. Source: Huang et al., "Deep Networks with Stochastic Depth"
        (2016).
      sequence_parallel: whether the residual stream is sharded over tokens on the
        tensor axis.
      rngs: for the ``dropout`` stream.
    """

    def __init__(
        self,
        attention: Callable[..., jax.Array],
        mlp: Callable[..., Any],
        *,
        make_norm: Callable[[], nnx.Module],
        norms: NormPlaces = "before",
        dropout: float = 0.0,
        drop_rows: bool = False,
        sequence_parallel: bool = False,
        rngs: nnx.Rngs,
    ):
        self.attention, self.mlp = attention, mlp
        self.norms: NormPlaces = norms
        self.sequence_parallel = sequence_parallel
        self.attention_norm, self.mlp_norm = make_norm(), make_norm()
        is_double = norms == "both"
        self.attention_post_norm = make_norm() if is_double else None
        self.mlp_post_norm = make_norm() if is_double else None
        self.dropout = make_dropout(dropout, rngs, (1, 2) if drop_rows else ())

    def run(self, x_BTD: jax.Array, **how: Any) -> jax.Array:
        """Run the block.

        Args:
          x_BTD: residual stream.
          **how: keywords of the attention.

        Returns:
          Residual stream.
        """

        x_BTD = self.run_attention(x_BTD, **how)
        return self.run_mlp(x_BTD, self.mlp)

    def run_attention(self, x_BTD: jax.Array, **how: Any) -> jax.Array:
        """Run the first half of the block; arguments as in `run`."""

        def attend(y_BTD: jax.Array) -> jax.Array:
            return self.attention(y_BTD, **how)

        norms = self.attention_norm, self.attention_post_norm
        return self.add(x_BTD, attend, *norms)

    def run_mlp(
        self, x_BTD: jax.Array, mlp: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """Run the second half of the block with an MLP, or what stands in its place."""
        return self.add(x_BTD, mlp, self.mlp_norm, self.mlp_post_norm)

    def add(
        self,
        x_BTD: jax.Array,
        update: Callable[[jax.Array], jax.Array],
        norm: Callable[..., jax.Array],
        post_norm: Callable[..., jax.Array] | None = None,
    ) -> jax.Array:
        """Add an update of the residual stream to it, with its norms and dropout."""
        tokens = self.sequence_parallel
        is_first = self.norms != "after_sum"
        y_BTD = gather_tokens(norm(x_BTD) if is_first else x_BTD, tokens)
        x_BTD = self.join(x_BTD, update(y_BTD), post_norm)
        return x_BTD if is_first else norm(x_BTD)

    def join(
        self,
        x_BTD: jax.Array,
        y_BTD: jax.Array,
        post_norm: Callable[..., jax.Array] | None = None,
    ) -> jax.Array:
        """Sum the residual stream and an update, with its norm and dropout."""
        y_BTD = constrain_residual(y_BTD, self.sequence_parallel)
        if post_norm is not None:
            y_BTD = post_norm(y_BTD)
        if self.dropout is not None:
            y_BTD = self.dropout(y_BTD)
        return constrain_residual(x_BTD + y_BTD, self.sequence_parallel)


def make_dropout(
    rate: float, rngs: nnx.Rngs, shared: tuple[int, ...] = ()
) -> nnx.Dropout | None:
    """Make dropout, with one draw along `shared` dims; None if its rate is 0."""
    return nnx.Dropout(rate, broadcast_dims=shared, rngs=rngs) if rate else None


def constrain_residual(x_BTD: jax.Array, sequence_parallel: bool) -> jax.Array:
    """Constrain the residual stream between the halves of a block."""
    return constrain(x_BTD, DATA, TENSOR if sequence_parallel else None, None)


def gather_tokens(y_BTD: jax.Array, sequence_parallel: bool) -> jax.Array:
    """Undo sequence parallelism after a norm: its users share the one gather."""
    # Constrained twice, or the compiler gathers before the norm's last step, in fp32.
    y_BTD = constrain_residual(y_BTD, sequence_parallel)
    return constrain(y_BTD, DATA, None, None)
