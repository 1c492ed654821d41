"""Do packed graphs train like a plain loop over packs on one device?

The oracle takes the mean over packs (or the sum of weights) of one call each, with
`jax.value_and_grad` and optax. Losses to 1e-5 relative, parameters leaf by leaf.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from tests.equivalence.problems import distance

PACKS, GRAPHS, NODES, EDGES, STEPS = 8, 3, 10, 14, 3
WIDTH, HIDDEN = 8, 64  # A kernel is 2 KiB: large enough to be sharded over data.


class Graphs(NamedTuple):
    """Several graphs in arrays of one shape, the last of them padding, as jraph's."""

    nodes: Any
    senders: Any
    receivers: Any
    n_node: Any
    target: Any
    globals: Any = None


def make_packs(seed: int, packs: int = PACKS) -> Graphs:
    """Graphs of different sizes, more of them padding in later packs."""
    rng = np.random.default_rng(seed)
    sizes = np.stack([[4, 3, 3] if i % 3 else [2, 1, 7] for i in range(packs)])
    return Graphs(
        nodes=rng.normal(size=(packs, NODES, WIDTH)).astype(np.float32),
        senders=rng.integers(0, NODES, (packs, EDGES), dtype=np.int32),
        receivers=rng.integers(0, NODES, (packs, EDGES), dtype=np.int32),
        n_node=sizes.astype(np.int32),
        target=rng.normal(size=(packs, GRAPHS)).astype(np.float32),
    )


def apply(layers: dict, graphs: Graphs, drop: Any = lambda x: x) -> jax.Array:
    """Send messages along edges, pool each graph's nodes: a number for each graph."""
    assert graphs.nodes.shape == (NODES, WIDTH), "one pack"
    message, out = layers["message"], layers["out"]
    sent = jnp.tanh(graphs.nodes @ message["kernel"] + message["bias"])
    nodes = jax.ops.segment_sum(sent[graphs.senders], graphs.receivers, NODES)
    graph_of = jnp.repeat(jnp.arange(GRAPHS), graphs.n_node, total_repeat_length=NODES)
    pooled = jax.ops.segment_sum(drop(nodes), graph_of, GRAPHS)
    return (pooled @ out["kernel"] + out["bias"])[:, 0]


class GraphNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        named = nnx.with_partitioning(nnx.initializers.normal(0.5), ("embed", "mlp"))
        self.message = nnx.Linear(WIDTH, HIDDEN, kernel_init=named, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, 1, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, graphs: Graphs) -> jax.Array:
        layers = {
            name: {"kernel": layer.kernel[...], "bias": layer.bias[...]}
            for name, layer in (("message", self.message), ("out", self.out))
        }
        return apply(layers, graphs, self.drop)


class Remembering(GraphNet):
    """Its state after a pack depends on the state before it."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.scale = nnx.BatchStat(jnp.ones(()))

    def __call__(self, graphs: Graphs) -> jax.Array:
        out = super().__call__(graphs) / self.scale[...]
        self.scale[...] = moved(self.scale[...], out)
        return out


class Counting(nnx.Module):
    """Runs on packs of any size, so that they can be compared."""

    def __init__(self, rngs: nnx.Rngs):
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.int32(0))

    def __call__(self, nodes: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.out(nodes)


def moved(scale: jax.Array, out: jax.Array) -> jax.Array:
    return 0.9 * scale + 0.1 * jax.lax.stop_gradient(jnp.abs(out).mean())


def mean_loss(model: Any, graphs: Graphs) -> jax.Array:
    return jnp.mean((model(graphs) - graphs.target) ** 2)


def weighted_loss(model: Any, graphs: Graphs) -> tuple:
    """The padding graph counts nothing, and graphs count by their nodes."""
    weight = graphs.n_node * (jnp.arange(GRAPHS) < GRAPHS - 1)
    squared = (model(graphs) - graphs.target) ** 2
    loss = jaxpar.Weighted((squared * weight).sum(), weight.sum())
    return loss, {"nodes": weight.sum()}


CASES: dict[str, dict[str, Any]] = {
    "zero 3, weighted": {"mesh": (4, 2), "zero": 3, "loss_fn": weighted_loss},
    "zero 0": {"mesh": (8, 1), "zero": 0},
    "zero 2, accumulated": {"mesh": (2, 1), "zero": 2, "accumulate": 2},
    "one device": {"mesh": (1, 1), "zero": 1, "accumulate": 4},
    "state": {"mesh": (4, 1), "zero": 3, "model": Remembering},
}


def make_engine(mesh: tuple[int, ...], **change: Any) -> jaxpar.Engine:
    data, tensor, pipe = (*mesh, 1)[:3]
    right = {
        "model": GraphNet,
        "loss_fn": mean_loss,
        "optimizer": optax.adam(0.01, eps=1e-6),
        "sample_batch": jaxpar.Packed(make_packs(0)),
        "mesh": jaxpar.MeshShape(data=data, tensor=tensor, pipe=pipe),
        "devices": jax.devices()[: data * tensor * pipe],
    }
    return jaxpar.initialize(**(right | change))


@dataclasses.dataclass
class Plain:
    """A loop over packs on one device.

    Attributes:
      params: the parameters.
      loss_fn: of one pack.
      accumulate: micro-batch m is packs m, m + accumulate and so on.
      scale: of `Remembering`; None without.
    """

    params: dict
    loss_fn: Any
    accumulate: int = 1
    scale: Any = None

    def __post_init__(self):
        def of_pack(params: dict, scale: Any, pack: Graphs) -> tuple:
            """The total of a pack's loss, its weight, and the state after it."""
            scales = [scale]

            def model(graphs: Graphs) -> jax.Array:
                out = apply(params, graphs)
                if scale is not None:
                    out = out / scale
                    scales.append(moved(scale, out))
                return out

            out = self.loss_fn(model, pack)
            if isinstance(out, tuple):
                return out[0].total, (out[0].weight, scales[-1])
            return out, (1, scales[-1])

        self.of_pack = jax.jit(jax.value_and_grad(of_pack, has_aux=True))

    def total_of(self, batch: Graphs) -> tuple[float, float, dict]:
        """Sums over packs: losses, weights, gradients."""
        total, weight, grads = 0.0, 0.0, jax.tree.map(np.zeros_like, self.params)
        order = sorted(range(len(batch.nodes)), key=lambda i: (i % self.accumulate, i))
        for index in order:
            pack = jax.tree.map(lambda x, i=index: x[i], batch)
            (one, (own, self.scale)), grad = self.of_pack(self.params, self.scale, pack)
            total, weight = total + float(one), weight + float(own)
            grads = jax.tree.map(np.add, grads, grad)
        return total, weight, grads

    def train(self, batches: list[Graphs]) -> list[float]:
        optimizer, losses = optax.adam(0.01, eps=1e-6), []
        opt_state = optimizer.init(self.params)
        for batch in batches:
            total, weight, grads = self.total_of(batch)
            losses.append(total / weight)
            grads = jax.tree.map(lambda x, by=weight: x / by, grads)
            updates, opt_state = optimizer.update(grads, opt_state)
            self.params = optax.apply_updates(self.params, updates)
        return losses


def plain_of(engine: jaxpar.Engine, case: dict[str, Any]) -> Plain:
    return Plain(
        jax.device_get(engine.state.params),
        case.get("loss_fn", mean_loss),
        case.get("accumulate", 1),
        np.float32(1) if case.get("model") is Remembering else None,
    )


@pytest.mark.parametrize(
    "case",
    [
        name if number < 1 else pytest.param(name, marks=pytest.mark.slow)
        for number, name in enumerate(CASES)
    ],
)
def test_packs_train_as_a_loop_over_them(case: str) -> None:
    engine = make_engine(**CASES[case])
    plain = plain_of(engine, CASES[case])
    batches = [make_packs(seed) for seed in range(STEPS)]
    found = [engine.step(jaxpar.Packed(batch)) for batch in batches]
    losses = plain.train(batches)
    assert [float(x["loss"]) for x in found] == pytest.approx(losses, rel=1e-5)
    assert distance(engine.state.params, plain.params) < 1e-5
    if plain.scale is not None:
        scale = float(engine.state.model_state["scale"])
        assert scale == pytest.approx(float(plain.scale), rel=1e-5)
    # Of any number of packs, whose state is not kept.
    held_out = make_packs(9, packs=5)
    total, weight, _ = plain.total_of(held_out)
    evaluated = engine.evaluate(jaxpar.Packed(held_out))
    if plain.scale is None:
        assert float(evaluated["loss"]) == pytest.approx(total / weight, rel=1e-5)


def test_state_counts_the_packs_of_all_shards() -> None:
    packs = jaxpar.Packed({"nodes": np.ones((PACKS, 6, WIDTH), np.float32)})
    engine = make_engine(
        (4, 1),
        model=Counting,
        loss_fn=lambda model, pack: model(pack["nodes"]).mean(),
        sample_batch=packs,
    )
    engine.step(packs)
    assert int(engine.state.model_state["calls"]) == PACKS


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_packs_are_communicated_like_a_batch(case: str) -> None:
    """By the closed form: gathers and reductions do not grow with the packs."""
    make_engine(**CASES[case]).verify()


@pytest.mark.slow
def test_a_pack_draws_the_same_numbers_on_every_mesh() -> None:
    batches = [make_packs(seed) for seed in range(STEPS)]
    losses = []
    for mesh, accumulate in (((8, 1), 1), ((2, 2), 2), ((1, 1), 1)):
        engine = make_engine(
            mesh,
            model=lambda rngs: GraphNet(rngs, rate=0.5),
            accumulate=accumulate,
            zero=3,
        )
        found = [engine.step(jaxpar.Packed(batch)) for batch in batches]
        losses.append([float(x["loss"]) for x in found])
    kept = make_engine((1, 1)).step(jaxpar.Packed(batches[0]))["loss"]
    assert losses[0][0] != pytest.approx(float(kept), rel=1e-2)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_batch": {"graphs": jaxpar.Packed(make_packs(0))}}, "sample_batch: "
         r"jaxpar\.Packed is inside the batch, but must be around all of it"),
        ({"sample_batch": jaxpar.Packed(jaxpar.Packed(make_packs(0)))}, "be around"),
        ({"sample_batch": jaxpar.Packed(make_packs(0, packs=6))}, "sample_batch: 6 "
         r"rows must be a multiple of data x accumulate = 4 x 1"),
        ({"coupled_batch": True}, r"coupled_batch=True: loss_fn is called with one "
         r"pack of jaxpar\.Packed at a time and may couple everything in it; leave"),
        ({"mesh": (2, 1, 2)}, r"a jaxpar\.Packed can't go through a pipeline, "
         r"but pipe=2; use a mesh of data and tensor"),
    ],
)  # fmt: skip
def test_packs_that_can_not_be_are_refused(change, message, compiled) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(**({"mesh": (4, 1)} | change))
    assert compiled == []


def test_batch_that_is_not_packed_is_refused() -> None:
    engine = make_engine((4, 1))
    with pytest.raises(ValueError, match=r"batch: its structure .* differs from"):
        engine.step(make_packs(0))


def test_packs_with_a_number_each_may_draw() -> None:
    """Looking for the rows of the draw, an IndexError was raised."""
    batch = jaxpar.Packed({"x": np.ones((8, 5, 4), np.float32), "y": np.arange(8.0)})

    def loss(model: Any, pack: dict, key: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(key, 0.5, pack["x"].shape)
        return jnp.mean((model(pack["x"] * kept) - pack["y"]) ** 2)

    engine = make_engine(
        (4, 1),
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        loss_fn=loss,
        sample_batch=batch,
    )
    assert np.isfinite(float(engine.step(batch)["loss"]))


@pytest.mark.slow
def test_padded_graphs_of_jraph_are_packs() -> None:
    jraph = pytest.importorskip("jraph", reason="jraph is not installed")
    rng = np.random.default_rng(0)

    def make_pack(sizes: list[int]) -> Any:
        graphs = [
            jraph.GraphsTuple(
                nodes=rng.normal(size=(size, WIDTH)).astype(np.float32),
                edges=None,
                senders=np.arange(size - 1),
                receivers=np.arange(1, size),
                n_node=np.array([size]),
                n_edge=np.array([size - 1]),
                globals=None,
            )
            for size in sizes
        ]
        return jraph.pad_with_graphs(jraph.batch_np(graphs), NODES, EDGES, GRAPHS)

    def loss_fn(model: Any, graphs: Any) -> jaxpar.Weighted:
        """Neighbours should agree; padding edges count nothing."""
        out = model(graphs.nodes)
        differences = out[graphs.senders] - out[graphs.receivers] - 1.0
        kept = jraph.get_edge_padding_mask(graphs)
        return jaxpar.Weighted((differences[:, 0] ** 2 * kept).sum(), kept.sum())

    packs = [make_pack([2 + i % 4, 3]) for i in range(PACKS)]
    batch = jaxpar.Packed(jax.tree.map(lambda *xs: np.stack(xs), *packs))
    engine = make_engine(
        (4, 1),
        model=lambda rngs: nnx.Linear(WIDTH, 1, rngs=rngs),
        loss_fn=loss_fn,
        sample_batch=batch,
    )
    params = jax.device_get(engine.state.params)
    sums = [
        loss_fn(lambda x: x @ params["kernel"] + params["bias"], pack) for pack in packs
    ]
    total, weight = sum(x.total for x in sums), sum(x.weight for x in sums)
    assert float(engine.step(batch)["loss"]) == pytest.approx(
        float(total / weight), rel=1e-5
    )
