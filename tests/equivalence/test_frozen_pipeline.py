"""Do pipelines train some parameters, with the others frozen, as a plain loop does?

Adapters beside frozen kernels in bf16 and int8, in embedding, blocks and head. The
oracle is a loop over the blocks in plain JAX on one device, which differentiates the
trained leaves alone.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.compiled.budget import REDUCTION
from jaxpar.jaxprs.evaluate import equations

VOCAB, WIDTH, HIDDEN, RANK, BLOCKS, ROWS, LENGTH = 24, 12, 20, 2, 8, 16, 5
NORMAL = nnx.initializers.normal(0.2)
LEVELS = 0.002
"""The size of an int8 kernel's steps, relative to its scale."""


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        table = NORMAL(rngs.params(), (VOCAB, WIDTH)).astype(jnp.bfloat16)
        self.table = nnx.Param(table, out_sharding=("vocab", "embed"))
        self.lora = nnx.Param(NORMAL(rngs.params(), (RANK, WIDTH)))

    def __call__(self, tokens):
        x = self.table[...].astype(jnp.float32)[tokens]
        return x + x[..., :RANK] @ self.lora[...]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        def levels(*shape: int) -> jax.Array:
            return jax.random.randint(rngs.params(), shape, -100, 101, jnp.int8)

        def normal(*shape: int) -> jax.Array:
            return NORMAL(rngs.params(), shape)

        named = {"out_sharding": ("embed", "mlp")}
        self.up = nnx.Param(normal(WIDTH, HIDDEN).astype(jnp.bfloat16), **named)
        self.lora_a = nnx.Param(normal(WIDTH, RANK))
        self.lora_b = nnx.Param(normal(RANK, HIDDEN), out_sharding=(None, "mlp"))
        self.bias = nnx.Param(normal(HIDDEN))
        self.down = nnx.Param(levels(HIDDEN, WIDTH), out_sharding=("mlp", "embed"))
        self.scale = nnx.Param(1 + normal(WIDTH))

    def __call__(self, x):
        own = {name: getattr(self, name)[...] for name in BLOCK}
        return run_block(own, x)


BLOCK = ("up", "lora_a", "lora_b", "bias", "down", "scale")


class Between(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(NORMAL(rngs.params(), (WIDTH, WIDTH)))
        self.lora = nnx.Param(NORMAL(rngs.params(), (WIDTH,)))

    def __call__(self, x):
        return run_between({"kernel": self.kernel[...], "lora": self.lora[...]}, x)


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        table = NORMAL(rngs.params(), (VOCAB, WIDTH)).astype(jnp.bfloat16)
        self.table = nnx.Param(table, out_sharding=("vocab", "embed"))
        self.lora = nnx.Param(1 + NORMAL(rngs.params(), (WIDTH,)))

    def __call__(self, x):
        return (x * self.lora[...]) @ self.table[...].astype(jnp.float32).T


def run_block(own: dict, x: jax.Array) -> jax.Array:
    inner = x @ own["up"].astype(jnp.float32) + own["bias"]
    inner = jnp.tanh(inner + x @ own["lora_a"] @ own["lora_b"])
    return x + inner @ (LEVELS * own["down"].astype(jnp.float32) * own["scale"])


def run_between(own: dict, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ own["kernel"]) * (1 + own["lora"])


def cross_entropy(logits: jax.Array, batch: dict) -> jax.Array:
    given = logits, batch["next"]
    return optax.softmax_cross_entropy_with_integer_labels(*given).mean()


def loss_fn(model: Callable, batch: dict) -> jax.Array:
    return cross_entropy(model(batch["tokens"]), batch)


def plain_loss(params: dict, batch: dict) -> jax.Array:
    """Of a model of one or two sections, tied or not."""
    embed, head = params["embed"], params["head"]
    x = embed["table"].astype(jnp.float32)[batch["tokens"]]
    x = x + x[..., :RANK] @ embed["lora"]
    for section in ("blocks", "between", "more"):
        if section == "between" and section in params:
            x = run_between(params[section], x)
        elif section in params:
            for layer in range(len(params[section]["scale"])):
                x = run_block({k: v[layer] for k, v in params[section].items()}, x)
    table = head.get("table", embed["table"]).astype(jnp.float32)
    return cross_entropy((x * head["lora"]) @ table.T, batch)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {"sections": {"blocks": (Block, BLOCKS)}},
    "tied": {
        "sections": {"blocks": (Block, BLOCKS)},
        "tied": (("embed", "table"), ("head", "table")),
    },
    "sections": {
        "sections": {"blocks": (Block, 4), "between": Between, "more": (Block, 5)},
        "allow_uneven": True,
    },
}
TRAINED = {
    "adapters": ["*/lora*"],
    "mixed": ["*/lora_*", "*/bias", "head/*"],  # Of the embedding nothing.
    "embedding": ["embed/*", "blocks/bias"],  # Of the head nothing, unless tied.
    "ends": ["embed/lora", "head/table"],  # Of the blocks nothing.
    "table": ["embed/table", "*/lora_b"],
    "scales": ["*/scale", "head/lora"],
    "joint": ["*/scale", "between/kernel"],
}


def make_model(name: str, **change: Any) -> jaxpar.PipelineModel:
    return jaxpar.PipelineModel(embed=Embed, head=Head, **(MODELS[name] | change))


def make_batches(num: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    names = ("tokens", "next")
    return [
        {name: rng.integers(0, VOCAB, (ROWS, LENGTH), np.int32) for name in names}
        for _ in range(num)
    ]


BATCHES = make_batches(3)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
Mesh = jaxpar.MeshShape


def make_engine(
    name: str, trained: str, mesh: Mesh, remat: str = "full", **change: Any
) -> jaxpar.Engine:
    right = {
        "model": make_model(name, remat=remat),
        "loss_fn": loss_fn,
        "optimizer": OPTIMIZER,
        "sample_batch": BATCHES[0],
        "mesh": mesh,
        "accumulate": 4,
        "trainable": TRAINED[trained],
    }
    return jaxpar.initialize(**(right | change))


@functools.cache
def start(name: str) -> dict[str, jax.Array]:
    """Leaf name -> value, in the model's dtypes."""
    params = make_model(name).init(0, BATCHES[0]["tokens"]).params
    return jaxpar.tree.named_leaves(jax.device_get(params))


def nested(leaves: dict[str, Any]) -> dict:
    made: dict = {}
    for name, leaf in leaves.items():
        made = jaxpar.tree.with_leaf(made, name.split("/"), jnp.asarray(leaf))
    return made


@functools.cache
def trained_plainly(name: str, trained: tuple[str, ...]) -> tuple[list[float], dict]:
    """Losses and the trained leaves of the plain loop."""
    leaves = {own: jnp.asarray(leaf) for own, leaf in start(name).items()}
    params = {own: leaves.pop(own).astype(jnp.float32) for own in trained}
    opt_state, losses = OPTIMIZER.init(params), []

    def loss_of(params: dict, batch: dict) -> jax.Array:
        return plain_loss(nested(leaves | params), batch)

    @jax.jit
    def step(params: dict, opt_state: Any, batch: dict) -> tuple:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in BATCHES:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(params)


def thorough(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.thorough)


DEFERRING = jaxpar.make_schedule("zero_bubble", 2, 4)

CASES = [
    ("tied", "mixed", Mesh(data=2, pipe=2, tensor=2), {"zero": 3}),
    thorough("plain", "adapters", Mesh(data=1), {}),
    thorough("plain", "adapters", Mesh(data=1, pipe=2), {"zero": 0}),
    thorough("plain", "adapters", Mesh(data=2, pipe=4), {"schedule": "gpipe"}),
    thorough("plain", "mixed", Mesh(data=1, pipe=4, tensor=2), {"zero": 2}),
    thorough(
        "plain",
        "mixed",
        Mesh(data=2, pipe=2),
        {"schedule": "interleaved", "remat": "none", "zero": 3},
    ),
    thorough(
        "tied", "embedding", Mesh(data=2, pipe=2), {"schedule": "gpipe", "zero": 2}
    ),
    thorough("tied", "adapters", Mesh(pipe=4), {"remat": "none"}),
    thorough("tied", "table", Mesh(data=2, pipe=2), {"remat": "dots", "zero": 0}),
    thorough("plain", "ends", Mesh(data=2, pipe=2), {"zero": 3}),
    thorough("plain", "ends", Mesh(pipe=2), {"remat": "none"}),
    thorough("plain", "adapters", Mesh(data=2, pipe=2), {"schedule": "zero_bubble"}),
    thorough(
        "tied",
        "scales",
        Mesh(data=2, pipe=4),
        {"schedule": "zero_bubble", "remat": "none", "zero": 2},
    ),
    thorough("plain", "ends", Mesh(pipe=2), {"schedule": DEFERRING}),
    thorough("plain", "scales", Mesh(pipe=2, tensor=2), {"schedule": "interleaved"}),
    thorough("sections", "adapters", Mesh(data=2, pipe=2), {"zero": 3}),
    thorough("sections", "joint", Mesh(data=2, pipe=2, tensor=2), {"remat": "none"}),
    thorough("sections", "mixed", Mesh(data=2, pipe=2), {"schedule": "interleaved"}),
    thorough("sections", "ends", Mesh(pipe=4), {"schedule": "gpipe"}),
]


@pytest.mark.parametrize(("name", "trained", "mesh", "options"), CASES)
def test_stages_train_beside_frozen_leaves_as_the_plain_loop(
    name: str, trained: str, mesh: Mesh, options: dict
) -> None:
    engine = make_engine(name, trained, mesh, **options)
    engine.load_params(nested(start(name)))
    own = jaxpar.tree.named_leaves(engine.state.params)
    losses, right = trained_plainly(name, tuple(own))
    found = [float(engine.step(batch)["loss"]) for batch in BATCHES]
    assert found == pytest.approx(losses, rel=1e-5)
    for path, leaf in jaxpar.tree.named_leaves(engine.state.params).items():
        error = np.linalg.norm(jax.device_get(leaf) - right[path])
        assert error < 1e-5 * np.linalg.norm(right[path]), path
    for path, leaf in jaxpar.tree.named_leaves(engine.state.frozen).items():
        assert leaf.dtype == start(name)[path].dtype
        np.testing.assert_array_equal(jax.device_get(leaf), start(name)[path], path)
    params = nested({**start(name), **right})
    evaluated = float(engine.evaluate(BATCHES[0])["loss"])
    assert evaluated == pytest.approx(float(plain_loss(params, BATCHES[0])), rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_checkpoint_with_frozen_leaves_moves_to_stages_and_back(
    schedule: str, tmp_path: Path
) -> None:
    """Bit by bit: also the moments, also of other numbers than a new run's."""
    name, trained = "sections", "mixed"
    one, cut = (
        make_engine(name, trained, mesh, schedule=own, **seed)
        for mesh, own, seed in (
            (Mesh(data=2), "1f1b", {"seed": 1}),
            (Mesh(data=2, pipe=2), schedule, {"seed": 2}),
        )
    )
    one.step(BATCHES[0])
    first = jax.device_get(one.state.weights)
    for number, (before, after) in enumerate([(one, cut), (cut, one)]):
        before.save(tmp_path / str(number))
        before.wait()
        after.restore(tmp_path / str(number))
        for path, leaf in jaxpar.tree.named_leaves(before.state.opt_state).items():
            moved = jaxpar.tree.named_leaves(after.state.opt_state)[path]
            np.testing.assert_array_equal(leaf, moved, path)
        jax.tree.map(np.testing.assert_array_equal, after.state.weights, first)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "schedule", "zero"),
    [("plain", "1f1b", 0), ("plain", "interleaved", 1), ("sections", "1f1b", 3)],
)
def test_step_with_frozen_leaves_is_as_its_closed_form(name, schedule, zero) -> None:
    """Gathers of all leaves, and reductions of the trained ones' gradients."""
    mesh = Mesh(data=2, pipe=2)
    engine = make_engine(name, "adapters", mesh, schedule=schedule, zero=zero)
    right = engine.closed_form_budget().communicated["data"]
    found = engine.measure(engine.lowered()).communicated["data"]
    assert found.pop("all-gather", 0) == right.get("all-gather", 0)
    # Besides gradients, three scalars: the loss, its weight, a norm.
    assert 0 < sum(found.values()) - right[REDUCTION] <= 3 * 4


@pytest.mark.thorough
def test_split_backward_of_blocks_that_train_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"only 0% .* its weights are not trained"):
        make_engine("plain", "ends", Mesh(pipe=2), schedule="zero_bubble")


@pytest.mark.thorough
def test_notes_count_gradients_of_trained_leaves_alone() -> None:
    """Two stages of five blocks: half a block of each is idle."""
    engine = make_engine("sections", "adapters", Mesh(pipe=2))
    adapters = RANK * (WIDTH + HIDDEN)
    all_of = adapters + 2 * WIDTH * HIDDEN + HIDDEN + WIDTH
    assert (
        "more: 5 blocks on 2 virtual stages leave 1 of 6 places idle; their gradients "
        f"take {4 * adapters / 2:.0f} bytes of a device, and their copies for the step "
        f"{all_of / 2:.0f} elements."
    ) in " ".join(engine.notes)
    assert "all-reduces its last and its first hidden" in " ".join(engine.notes)
    others = make_engine("sections", "mixed", Mesh(pipe=2)).notes
    assert "all-reduces its last hidden state" in " ".join(others)


FROZEN_DIMS = {(WIDTH, HIDDEN), (HIDDEN, WIDTH), (VOCAB, WIDTH), (WIDTH, VOCAB)}


@pytest.mark.parametrize(
    ("remat", "schedule"),
    [
        ("none", "zero_bubble"),
        thorough("none", "1f1b"),
        thorough("full", "1f1b"),
        thorough("full", "interleaved"),
        thorough("full", "zero_bubble"),
        thorough("dots", "gpipe"),
    ],
)
def test_loops_and_branches_return_nothing_of_a_frozen_kernels_size(
    remat: str, schedule: str
) -> None:
    """No gradient of zeros, and no residual: a kernel cast to fp32 is cast again."""
    options = {"schedule": schedule, "remat": remat}
    engine = make_engine("plain", "adapters", Mesh(pipe=2), **options)
    (traced,) = engine.traces().values()
    found = [
        (eqn.primitive.name, out.aval.shape)
        for eqn in equations(traced.jaxpr.jaxpr)
        if eqn.primitive.name in ("scan", "while", "cond")
        for out in eqn.outvars
    ]
    assert ("scan", (BLOCKS, WIDTH, RANK)) in found, "gradients of the adapters"
    assert [x for x in found if x[1][-2:] in FROZEN_DIMS] == []
