"""How does SOAP step: Adam in the basis of Shampoo's preconditioner.

For a matrix G [m, n] of gradients, L and R are moving means of G G^T and G^T G, and the
columns of Q_L and Q_R are their eigenvectors. Adam's second moment is of Q_L^T G Q_R,
where G's elements are nearly uncorrelated, and its step is rotated back. The bases
follow L and R by one power iteration and a QR decomposition every few steps.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.jaxprs.branches import expected
from jaxpar.optim.decay import decayed
from jaxpar.types import Leaf, PyTree

LEAST = 1e-4
"""Of the largest eigenvalue: what is added to all, so that fp32's rounding, which is
other rounding on another mesh, does not choose the eigenvectors of the least ones."""

_SIDES = {"left": -2, "right": -1}
"""Side -> the dim of a matrix that it is a basis of."""


class SoapState(NamedTuple):
    """What SOAP stores.

    Attributes:
      step: steps taken; int32.
      mu: means of gradients, as the parameters.
      nu: means of squared gradients, each in its leaf's basis.
      means: for each leaf, by side, the mean of its products; [..., d, d].
      bases: likewise its basis, in columns; [..., d, d].
    """

    step: jax.Array
    mu: PyTree
    nu: PyTree
    means: PyTree
    bases: PyTree


def soap(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.95,
    b2: float = 0.95,
    *,
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    every: int = 10,
    max_dim: int = 10_000,
    matrices: PyTree | Callable[[PyTree], PyTree] = decayed,
) -> optax.GradientTransformation:
    """Make SOAP, Adam in the eigenbasis of Shampoo's preconditioner.

    With t the steps since the first: ``mu = b1 mu + (1 - b1) G``;
    ``nu = b2 nu + (1 - b2) (Q_L^T G Q_R)^2``; the parameter moves by ``-rate`` times
    ``Q_L (Q_L^T mu Q_R / c1 / (sqrt(nu / c2) + eps)) Q_R^T``, with ``c = 1 - b^t``.
    ``L = shampoo_beta L + (1 - shampoo_beta) G G^T``, and R likewise. The first step
    has no basis yet: it makes one, by eigendecomposition, and only decays parameters.

    Args:
      learning_rate: a number, or a schedule of the steps taken.
      b1: decay rate of the mean of gradients.
      b2: decay rate of the mean of squared gradients.
      shampoo_beta: decay rate of the means of L and R; None for `b2`.
      eps: added to the square root.
      weight_decay: times the parameter it is added to the update.
      every: steps between two turns of the bases.
      max_dim: a dim of more than this has no basis: L or R is then the identity.
      matrices: which leaves are matrices, or stacks of them over all but the last two
        dims: a tree of True and False, or a function of the parameters. The others, and
        leaves of one dim, have plain Adam.

    Returns:
      A transformation for ``jaxpar.initialize``. It stores 2 (m^2 + n^2) numbers for a
      matrix [m, n] beside Adam's 2 m n; at ZeRO stages above 0 these are sharded, too.

    Raises:
      ValueError: if a number is out of its range.

    Example:
      >>> optimizer = soap(3e-3, every=10)
      >>> state = optimizer.init({"up": {"kernel": jnp.ones((8, 4))}})
      >>> {side: x.shape for side, x in state[0].bases["up"]["kernel"].items()}
      {'left': (8, 8), 'right': (4, 4)}

    Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024),
    algorithms 3 and 4.

    Differs: the power iteration is of ``L + 1e-4 l I``, where l is the largest
    eigenvalue; its eigenvectors are those of L. At first, columns of eigenvalues below
    1e-4 l are fixed numbers, made orthogonal to the others. Without these, rounding
    chooses them, and a run differs between meshes.
    """
    beta = b2 if shampoo_beta is None else shampoo_beta
    for name, value in {"b1": b1, "b2": b2, "shampoo_beta": beta}.items():
        _require(0 <= value < 1, name, value, "from 0 to below 1")
    for name, value in (("eps", eps), ("weight_decay", weight_decay)):
        _require(value >= 0, name, value, "at least 0")
    _require(every >= 1, "every", every, "at least 1 step")
    _require(max_dim >= 1, "max_dim", max_dim, "at least 1")
    rule = _Soap(b1, b2, beta, eps, every, max_dim, matrices)
    return optax.chain(
        optax.GradientTransformation(rule.init, rule.update),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


@dataclasses.dataclass(frozen=True)
class _Soap:
    """The rule without rate and decay; attributes are `soap`'s arguments."""

    b1: float
    b2: float
    beta: float
    eps: float
    every: int
    max_dim: int
    matrices: PyTree | Callable[[PyTree], PyTree]

    def init(self, params: Any) -> SoapState:
        chosen = self.matrices(params) if callable(self.matrices) else self.matrices

        def squares(param: Leaf, is_matrix: bool) -> dict[str, jax.Array]:
            dims = _SIDES if is_matrix and param.ndim > 1 else {}
            sizes = {side: param.shape[dim] for side, dim in dims.items()}
            return {
                side: jnp.zeros((*param.shape[:-2], size, size), jnp.float32)
                for side, size in sizes.items()
                if size <= self.max_dim
            }

        means = jax.tree.map(squares, params, chosen)
        mu, nu, bases = map(optax.tree.zeros_like, (params, params, means))
        return SoapState(jnp.zeros([], jnp.int32), mu, nu, means, bases)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        structure = jax.tree.structure(updates)
        grads = [jnp.asarray(grad) for grad in jax.tree.leaves(updates)]
        means, bases = map(structure.flatten_up_to, (state.means, state.bases))
        means = [
            {
                side: self.beta * mean + (1 - self.beta) * _product(grad, side)
                for side, mean in own.items()
            }
            for grad, own in zip(grads, means, strict=True)
        ]
        given = state, grads, means, bases
        with expected(1.0, 0.0):  # Of the second function, and of the first.
            new = jax.lax.cond(state.step == 0, self._first, self._later, *given)
        steps, mu, nu, bases, means = (
            jax.tree.unflatten(structure, leaves) for leaves in (*new, means)
        )
        return steps, SoapState(state.step + 1, mu, nu, means, bases)

    def _first(self, state: SoapState, grads: list, means: list, bases: list) -> tuple:
        """No step, and bases."""
        del bases
        bases = jax.tree.map(_eigenvectors, means)
        mu, nu = jax.tree.leaves(state.mu), jax.tree.leaves(state.nu)
        return [jnp.zeros_like(grad) for grad in grads], mu, nu, bases

    def _later(self, state: SoapState, grads: list, means: list, bases: list) -> tuple:
        """A step, and bases for the next ones."""
        t = state.step.astype(jnp.float32)
        stepped = [
            self._stepped(*same, t)
            for same in zip(
                grads,
                jax.tree.leaves(state.mu),
                jax.tree.leaves(state.nu),
                bases,
                strict=True,
            )
        ]
        turns = 1 / self.every
        with expected(1 - turns, turns):
            bases = jax.lax.cond(
                state.step % self.every == 0,
                lambda *same: jax.tree.map(_turned, *same),
                lambda bases, _: bases,
                *(bases, means),
            )
        return *map(list, zip(*stepped, strict=True)), bases

    def _stepped(
        self,
        grad: jax.Array,
        mu: jax.Array,
        nu: jax.Array,
        bases: Mapping,
        t: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Adam's step in a leaf's basis, and its moments."""
        mu = self.b1 * mu + (1 - self.b1) * grad
        nu = self.b2 * nu + (1 - self.b2) * _into(grad, bases) ** 2
        mean = _into(mu / (1 - self.b1**t), bases)
        scaled = mean / (jnp.sqrt(nu / (1 - self.b2**t)) + self.eps)
        return _out_of(scaled, bases), mu, nu


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _product(grad: jax.Array, side: str) -> jax.Array:
    """G G^T, or G^T G."""
    turned = grad.mT
    return _matmul(grad, turned) if side == "left" else _matmul(turned, grad)


def _into(x: jax.Array, bases: Mapping[str, jax.Array]) -> jax.Array:
    """Q_L^T x Q_R."""
    x = _matmul(bases["left"].mT, x) if "left" in bases else x
    return _matmul(x, bases["right"]) if "right" in bases else x


def _out_of(x: jax.Array, bases: Mapping[str, jax.Array]) -> jax.Array:
    """Q_L x Q_R^T."""
    x = _matmul(bases["left"], x) if "left" in bases else x
    return _matmul(x, bases["right"].mT) if "right" in bases else x


def _eigenvectors(mean: jax.Array) -> jax.Array:
    """A basis of a symmetric matrix, largest eigenvalue first."""
    values, vectors = jnp.linalg.eigh(mean)
    values, vectors = values[..., ::-1], vectors[..., ::-1]
    # Of no structure: a gradient's null space may be along some coordinates.
    fixed = jax.random.normal(jax.random.key(0), mean.shape[-2:])
    known = values > LEAST * values[..., :1]
    return jnp.linalg.qr(jnp.where(known[..., None, :], vectors, fixed)).Q


def _turned(basis: jax.Array, mean: jax.Array) -> jax.Array:
    """The basis after a power iteration, orthogonal again."""
    moved = _matmul(mean, basis)
    largest = jnp.max(jnp.sum(basis * moved, axis=-2), axis=-1)
    return jnp.linalg.qr(moved + LEAST * largest[..., None, None] * basis).Q


def _require(is_right: bool, name: str, value: Any, must: str) -> None:
    if not is_right:
        raise ValueError(f"{name}={value} must be {must}.")
