"""A mixture of experts as a layer: router, experts and a shared MLP.

Without capacity every choice of an expert is computed. Where an expert axis splits the
experts, each shard gathers the rows of all shards of the axis, computes the choices of
its own experts, and the updates are summed and scattered. With capacity each expert has
a fixed number of slots, which all-to-all exchanges.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxpar.mesh import EXPERT, TENSOR
from jaxpar.models.experts.config import ExpertsConfig
from jaxpar.models.experts.grouped import (
    Side,
    fraction_used,
    grouped_matmul,
    rows_of_tile,
)
from jaxpar.models.experts.routing import (
    RouterStatistics,
    Routing,
    route,
    statistics_of,
)
from jaxpar.models.experts.slots import (
    ChoiceSlots,
    from_slots,
    slots_by_capacity,
    slots_by_tiles,
    to_slots,
)
from jaxpar.models.layers import Linear, named_param
from jaxpar.models.mlp import MLP, activate, is_gated
from jaxpar.sharding.constrain import constrain
from jaxpar.sharding.exchange import (
    all_to_all,
    bound_axes,
    gather_over_experts,
    sum_over_experts,
)


class Experts(nnx.Module):
    """Experts that each token goes to a few of, in the place of an MLP.

    Args:
      width: features in and out.
      hidden: features inside an expert, unless its config has its own.
      config: the experts.
      activation: one of `jaxpar.models.mlp.ACTIVATIONS`.
      bias: whether an expert's matmuls have one.
      output_stddev: of the last kernels, which add to the residual stream.
      flatten: of the shared MLP, as in `jaxpar.models.layers.Linear`.
      rngs: for the ``params`` stream.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017); Jiang et al.,
    "Mixtral of Experts" (2024), for gated experts.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        config: ExpertsConfig,
        *,
        activation: str,
        bias: bool,
        output_stddev: float,
        flatten: bool = True,
        rngs: nnx.Rngs,
    ):
        self.config, self.activation = config, activation
        E, F = config.num, config.width or hidden

        def kernels(shape: tuple[int, ...], names: tuple[str, ...], stddev: float):
            value = stddev * jax.random.normal(rngs.params(), (E, *shape))
            return named_param(value, ("expert", *names))

        def biases(size: int, name: str):
            return named_param(jnp.zeros((E, size)), ("expert", name)) if bias else None

        self.router = Linear((width, E), ("embed", None), bias=False, rngs=rngs)
        inner = (width, F), ("embed", "mlp"), 0.02
        self.gate = kernels(*inner) if is_gated(activation) else None
        self.up = kernels(*inner)
        self.down = kernels((F, width), ("mlp", "embed"), output_stddev)
        self.up_bias, self.down_bias = biases(F, "mlp"), biases(width, "embed")
        self.gate_bias = biases(F, "mlp") if is_gated(activation) else None
        names = "embed", None
        one = functools.partial(Linear, (width, 1), names, bias=False, rngs=rngs)
        mlp = functools.partial(
            MLP,
            activation=activation,
            bias=bias,
            output_stddev=output_stddev,
            flatten=flatten,
            rngs=rngs,
        )
        shared = config.shared_width
        self.shared = None if shared is None else mlp(width, shared)
        self.shared_gate = one() if config.shared_gate else None

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        is_token_BT: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], RouterStatistics]:
        """Run the experts.

        Args:
          x_BTD: normalised residual stream.
          is_token_BT: False for padding, which goes to no expert; None for all True.

        Returns:
          The update of the residual stream, and how the experts are used.

        Raises:
          ValueError: if `group_rows` does not divide the rows.
        """
        flat = x_BTD.reshape(-1, x_BTD.shape[-1])
        wide = jnp.promote_types(flat.dtype, jnp.float32)
        routing = route(
            flat.astype(wide) @ self.router.kernel[...].astype(wide),
            self.config.top_k,
            normalise=self.config.normalise_gates,
            is_token_N=None if is_token_BT is None else is_token_BT.reshape(-1),
        )
        if self.config.capacity_factor is None:
            update, statistics = self._all(flat, routing), statistics_of(routing)
        else:
            groups = self._groups(x_BTD)
            update, is_kept_NK = self._up_to_capacity(flat, routing, groups)
            statistics = statistics_of(routing, is_kept_NK)
        update_BTD = update.astype(x_BTD.dtype).reshape(x_BTD.shape)
        if self.shared is not None:
            update_BTD = update_BTD + self._of_shared(x_BTD)
        return update_BTD, statistics

    def _all(self, x_ND: jax.Array, routing: Routing) -> jax.Array:
        """The updates of all choices."""
        E_own = self.up.shape[0]
        x_ND, experts_NK, gates_NK = (
            gather_over_experts(x) for x in (x_ND, routing.experts, routing.gates)
        )
        own_NK = experts_NK - self._first_expert(E_own)
        own_NK = jnp.where((own_NK >= 0) & (own_NK < E_own), own_NK, E_own)
        choices = routing.experts.size
        tiles = slots_by_tiles(own_NK, E_own, rows_of_tile(choices, E_own))
        used = fraction_used(choices, E_own, tiles.experts.size)
        rows_MTD = to_slots(x_ND, tiles.slots)
        rows_MTD = rows_MTD.reshape(tiles.experts.size, -1, x_ND.shape[1])

        def matmul(x: jax.Array, kernel: jax.Array, split: Side) -> jax.Array:
            return grouped_matmul(x, kernel, tiles, split=split, used=used)

        def bias_of(bias_EF: jax.Array) -> jax.Array:
            return bias_EF[tiles.experts][:, None]

        made_SD = self._mlp(rows_MTD, matmul, bias_of).reshape(-1, x_ND.shape[1])
        return sum_over_experts(_combined(made_SD, tiles.slots, gates_NK))

    def _up_to_capacity(
        self, x_ND: jax.Array, routing: Routing, groups: int
    ) -> tuple[jax.Array, jax.Array]:
        """The updates of choices within capacity; also which those are."""
        E, D = self.config.num, x_ND.shape[1]
        capacity = self.config.capacity(x_ND.shape[0] // groups)

        def by_group(x: jax.Array) -> jax.Array:
            return x.reshape(groups, -1, x.shape[-1])

        slots: ChoiceSlots = jax.vmap(lambda e: slots_by_capacity(e, E, capacity))(
            by_group(routing.experts)
        )
        rows = jax.vmap(to_slots)(by_group(x_ND), slots)
        rows_ECD = rows.reshape(groups, E, capacity, D).swapaxes(0, 1)
        rows_ECD = rows_ECD.reshape(E, groups * capacity, D)
        rows_ECD = constrain(all_to_all(rows_ECD, split=0, concat=1), EXPERT)

        def matmul(x: jax.Array, kernel: jax.Array, split: Side) -> jax.Array:
            return jnp.einsum("ecd,edf->ecf", x, kernel)

        made_ECD = self._mlp(rows_ECD, matmul, lambda bias_EF: bias_EF[:, None])
        made_ECD = all_to_all(made_ECD, split=1, concat=0)
        made = made_ECD.reshape(E, groups, capacity, D).swapaxes(0, 1)
        made = made.reshape(groups, E * capacity, D)
        update = jax.vmap(_combined)(made, slots, by_group(routing.gates))
        is_kept = jax.vmap(lambda own: own.is_kept)(slots)
        return update.reshape(x_ND.shape), is_kept.reshape(routing.experts.shape)

    def _mlp(self, rows, matmul, bias_of) -> jax.Array:
        """Each row's update by its expert; how rows stand is the caller's."""
        up = self._labelled(matmul(rows, self.up[...], "out"))
        gate = None
        if self.gate is not None:
            gate = self._labelled(matmul(rows, self.gate[...], "out"))
        if self.up_bias is not None:
            up = up + bias_of(self.up_bias[...])
        if gate is not None and self.gate_bias is not None:
            gate = gate + bias_of(self.gate_bias[...])
        made = matmul(activate(self.activation, up, gate), self.down[...], "in")
        if self.down_bias is not None:
            made = made + bias_of(self.down_bias[...])
        return made

    @staticmethod
    def _labelled(hidden: jax.Array) -> jax.Array:
        return constrain(checkpoint_name(hidden, "mlp_hidden"), None, None, TENSOR)

    @staticmethod
    def _first_expert(own: int) -> jax.Array | int:
        """The number of this shard's first expert."""
        return own * jax.lax.axis_index(EXPERT) if bound_axes((EXPERT,)) else 0

    def _groups(self, x_BTD: jax.Array) -> int:
        rows, own = x_BTD.shape[0], self.config.group_rows
        if rows % own:
            raise ValueError(
                f"ExpertsConfig: group_rows={own} must divide the {rows} rows of a "
                "micro-batch on a device, which would otherwise share capacity with "
                "another device's; take a divisor."
            )
        return rows // own

    def _of_shared(self, x_BTD: jax.Array) -> jax.Array:
        assert self.shared is not None
        made_BTD = self.shared(x_BTD)
        if self.shared_gate is None:
            return made_BTD
        return jax.nn.sigmoid(self.shared_gate(x_BTD)) * made_BTD


def _combined(made_SD: jax.Array, slots: ChoiceSlots, gates_NK: jax.Array) -> jax.Array:
    """Each token's sum of its choices' updates by their gates, fp32."""
    by_choice_NKD = from_slots(made_SD, slots)
    return jnp.einsum(
        "nkd,nk->nd", by_choice_NKD, gates_NK, preferred_element_type=jnp.float32
    )
