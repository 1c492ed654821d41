"""What does a mixture of experts' config contain, and which values are valid?"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts that replace the MLPs of a transformer.

    Attributes:
      num: experts of a block; 0 for none, a plain MLP. Make it a multiple of the expert
        axis.
      top_k: experts that a token goes to.
      width: features inside an expert; None for the model's mlp_width.
      every: of so many blocks, the last has experts, the others a plain MLP.
      capacity_factor: an expert takes this many times its even share of a routing
        group's tokens, and the rest are dropped: they get no update from it. None for
        no drops.
      group_rows: rows of the batch that share capacity, a routing group. It divides the
        rows of a micro-batch on a device. The groups, and so the tokens that are
        dropped, do not depend on the mesh.
      normalise_gates: whether a token's gates are divided by their sum.
      shared_width: features inside an MLP that every token goes to besides; None for
        none.
      shared_gate: whether a sigmoid of the token scales the shared MLP's update.
      balance_loss: factor of the load-balance loss, a mean over the blocks.
      router_z_loss: factor of the mean squared log of the router's sum of exponentials,
        a mean over the blocks.

    Raises:
      ValueError: if a number is out of range.

    Example:
      >>> ExpertsConfig(num=8).top_k
      2
      >>> ExpertsConfig(num=8, capacity_factor=1.25).capacity(64)
      20
    """

    num: int = 0
    top_k: int = 2
    width: int | None = None
    every: int = 1
    capacity_factor: float | None = None
    group_rows: int = 1
    normalise_gates: bool = True
    shared_width: int | None = None
    shared_gate: bool = False
    balance_loss: float = 0.01
    router_z_loss: float = 0.0

    def __post_init__(self):
        if self.num < 0:
            raise ValueError(f"ExpertsConfig: num={self.num} must be at least 0.")
        for field in ("top_k", "width", "every", "group_rows", "shared_width"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"ExpertsConfig: {field}={value} must be at least 1.")
        if self.num and self.top_k > self.num:
            raise ValueError(
                f"ExpertsConfig: top_k={self.top_k} must be at most num={self.num}, "
                "the experts that there are."
            )
        factor = self.capacity_factor
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(
                f"ExpertsConfig: capacity_factor={factor} must be above 0, such as "
                "1.25; None drops no token."
            )
        for field in ("balance_loss", "router_z_loss"):
            value = getattr(self, field)
            if not 0 <= value < math.inf:
                raise ValueError(f"ExpertsConfig: {field}={value} must be at least 0.")
        if self.shared_gate and self.shared_width is None:
            raise ValueError(
                "ExpertsConfig: shared_gate=True scales a shared MLP's update, but "
                "shared_width=None; give the MLP's width."
            )

    def capacity(self, tokens: int) -> int:
        """Tokens that an expert takes of a routing group of so many.

        Raises:
          ValueError: if experts drop no token.
        """
        if self.capacity_factor is None:
            raise ValueError("capacity_factor=None: experts take any number of tokens.")
        even = tokens * self.top_k / self.num
        return min(tokens, max(1, math.ceil(self.capacity_factor * even)))


NO_EXPERTS = ExpertsConfig()
"""Of a model whose blocks have plain MLPs."""


def num_expert_params(
    config: ExpertsConfig, width: int, hidden: int, *, gated: bool, bias: bool
) -> int:
    """Count the parameters of one block's experts in closed form.

    Args:
      config: the experts.
      width: the model's.
      hidden: features inside an expert.
      gated: whether an expert has a gate, a third matmul.
      bias: whether its matmuls have one.

    Returns:
      The number, with the router's and the shared MLP's.
    """

    def mlp(inside: int) -> int:
        matmuls = 3 if gated else 2
        biases = (matmuls - 1) * inside + width if bias else 0
        return matmuls * width * inside + biases

    total = config.num * (mlp(hidden) + width)
    if config.shared_width is not None:
        total += mlp(config.shared_width) + (width if config.shared_gate else 0)
    return total
