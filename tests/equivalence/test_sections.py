"""Do models of several sections train on a pipeline as a plain loop does?

An encoder and a decoder of another width, whose blocks attend to the encoder's output;
NNX and Linen. The oracle calls the modules one after the other, by Flax alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar

VOCAB, WIDE, NARROW, ROWS = 16, 12, 8, 16
NORMAL = nnx.initializers.normal(0.2)
LAYERS = {"encoder": 4, "decoder": 5}


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        table = NORMAL(rngs.params(), (VOCAB, WIDE))
        self.source = nnx.Param(table, out_sharding=("vocab", "embed"))
        self.target = nnx.Param(NORMAL(rngs.params(), (VOCAB, NARROW)))

    def __call__(self, source, target):
        return {"x": self.source[...][source], "target": self.target[...][target]}


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        named = nnx.with_partitioning(NORMAL, ("embed", "mlp"))
        self.up = nnx.Linear(WIDE, 16, kernel_init=named, rngs=rngs)
        self.down = nnx.Linear(16, WIDE, kernel_init=NORMAL, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, hidden, *, rate=None):
        update = self.down(jnp.tanh(self.up(hidden["x"])))
        if rate is not None:
            update = self.drop(update)
        return hidden | {"x": hidden["x"] + update}


class Between(nnx.Module):
    """The encoder's output, as the decoder's blocks read it."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDE, rngs=rngs)
        self.narrow = nnx.Linear(WIDE, NARROW, kernel_init=NORMAL, rngs=rngs)

    def __call__(self, hidden):
        memory = self.narrow(self.norm(hidden["x"]))
        return {"x": hidden["target"], "memory": memory}


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, kernel_init=NORMAL, rngs=rngs)
        self.query, self.out = linear(NARROW, NARROW), linear(NARROW, NARROW)

    def __call__(self, hidden):
        x, memory = hidden["x"], hidden["memory"]
        scores = self.query(x) @ memory.swapaxes(-1, -2)
        return hidden | {"x": x + self.out(jax.nn.softmax(scores) @ memory)}


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.out = nnx.Linear(NARROW, VOCAB, kernel_init=NORMAL, rngs=rngs)

    def __call__(self, hidden):
        return self.out(hidden["x"])


class LinenEncoder(nn.Module):
    @nn.compact
    def __call__(self, hidden):
        named = nn.with_partitioning(NORMAL, ("embed", "mlp"))
        up = jnp.tanh(nn.Dense(16, kernel_init=named, name="up")(hidden["x"]))
        update = nn.Dense(WIDE, kernel_init=NORMAL, name="down")(up)
        return hidden | {"x": hidden["x"] + update}


PARTS: dict[str, Any] = {
    "embed": Embed,
    "encoder": Encoder,
    "between": Between,
    "decoder": Decoder,
    "head": Head,
}


def make_model(encoder: Any = Encoder, **change: Any) -> jaxpar.PipelineModel:
    sections = {
        "encoder": (encoder, LAYERS["encoder"]),
        "between": Between,
        "decoder": (Decoder, LAYERS["decoder"]),
    }
    given = {"embed": Embed, "sections": sections, "head": Head, "allow_uneven": True}
    return jaxpar.PipelineModel(**(given | change))


def apply(part: str, params: dict, *args: Any) -> Any:
    """Call a part's module with these parameters."""
    with nnx.use_eager_sharding(False):
        graphdef, state, rest = nnx.split(
            nnx.eval_shape(lambda: PARTS[part](nnx.Rngs(0))), nnx.Param, ...
        )
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graphdef, state, rest)(*args)


def plain_loss(params: dict, batch: dict) -> jax.Array:
    hidden = apply("embed", params["embed"], batch["source"], batch["target"])
    for part, count in LAYERS.items():
        if part == "decoder":
            hidden = apply("between", params["between"], hidden)
        for layer in range(count):
            own = jax.tree.map(lambda x, i=layer: x[i], params[part])
            hidden = apply(part, own, hidden)
    return cross_entropy(apply("head", params["head"], hidden), batch)


def cross_entropy(logits: jax.Array, batch: dict) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
    return losses.mean()


def loss_fn(model: Callable, batch: dict) -> jax.Array:
    return cross_entropy(model(batch["source"], batch["target"]), batch)


def noisy_loss(model: Callable, batch: dict) -> jax.Array:
    return cross_entropy(model(batch["source"], batch["target"], rate=0.2), batch)


def make_batches(num: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    sizes = {"source": 6, "target": 5, "next": 5}
    return [
        {k: rng.integers(0, VOCAB, (ROWS, n), np.int32) for k, n in sizes.items()}
        for _ in range(num)
    ]


BATCHES = make_batches(3)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def make_engine(mesh: jaxpar.MeshShape, **change: Any) -> jaxpar.Engine:
    right = {
        "model": make_model(),
        "loss_fn": loss_fn,
        "optimizer": OPTIMIZER,
        "sample_batch": BATCHES[0],
        "mesh": mesh,
        "accumulate": 4,
    }
    return jaxpar.initialize(**(right | change))


@functools.cache
def start() -> dict:
    given = (BATCHES[0]["source"], BATCHES[0]["target"])
    return jax.device_get(make_model().init(0, *given).params)


@functools.cache
def trained_plainly() -> tuple[list[float], dict]:
    """Losses and parameters of the plain loop."""
    params = start()
    opt_state, losses = OPTIMIZER.init(params), []

    @jax.jit
    def step(params: dict, opt_state: Any, batch: dict) -> tuple:
        loss, grads = jax.value_and_grad(plain_loss)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in BATCHES:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(params)


Mesh = jaxpar.MeshShape
thorough = pytest.mark.thorough
CASES = [
    (Mesh(data=2, pipe=2, tensor=2), {"zero": 2}, {"remat": "none"}),
    pytest.param(Mesh(data=2), {"zero": 3}, {}, marks=thorough),
    pytest.param(Mesh(pipe=2), {}, {}, marks=thorough),
    pytest.param(
        Mesh(data=2, pipe=4), {"schedule": "gpipe", "zero": 3}, {}, marks=thorough
    ),
    pytest.param(
        Mesh(data=2, pipe=2),
        {"schedule": "interleaved", "zero": 0},
        {"remat": "dots"},
        marks=thorough,
    ),
    pytest.param(Mesh(pipe=2), {}, {"encoder": LinenEncoder()}, marks=thorough),
]


@pytest.mark.parametrize(("mesh", "options", "change"), CASES)
def test_sections_train_as_the_plain_loop(
    mesh: Mesh, options: dict, change: dict
) -> None:
    engine = make_engine(mesh, model=make_model(**change), **options)
    losses, params = trained_plainly()
    engine.load_params(start())
    found = [float(engine.step(batch)["loss"]) for batch in BATCHES]
    assert found == pytest.approx(losses, rel=1e-5)
    own = jax.tree_util.tree_leaves_with_path(jax.device_get(engine.state.params))
    for (path, leaf), right in zip(own, jax.tree.leaves(params), strict=True):
        error = np.linalg.norm(leaf - right)
        assert error < 1e-5 * np.linalg.norm(right), jax.tree_util.keystr(path)
    evaluated = float(engine.evaluate(BATCHES[0])["loss"])
    assert evaluated == pytest.approx(float(plain_loss(params, BATCHES[0])), rel=1e-5)


@thorough
def test_sections_draw_the_same_dropout_on_any_number_of_stages() -> None:
    one = make_engine(Mesh(data=1), loss_fn=noisy_loss, eval_fn=loss_fn)
    cut = make_engine(Mesh(data=2, pipe=2), loss_fn=noisy_loss, eval_fn=loss_fn)
    losses = [
        [float(engine.step(batch)["loss"]) for batch in BATCHES]
        for engine in (one, cut)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # What the masks change is 80 times what the stages may.
    assert losses[0][0] != pytest.approx(trained_plainly()[0][0], rel=1e-4)


@thorough
def test_checkpoint_of_sections_moves_to_any_number_of_stages(tmp_path) -> None:
    one, cut = make_engine(Mesh(data=1)), make_engine(Mesh(data=2, pipe=2))
    cut.step(BATCHES[0])
    cut.save(tmp_path)
    cut.wait()
    one.restore(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, one.state.params, cut.state.params)


class Half(nnx.Module):
    """Computes in the dtype of its parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(NARROW, NARROW, rngs=rngs)

    def __call__(self, x):
        return self.linear(x.astype(self.linear.kernel[...].dtype))


class Residual(Half):
    """Keeps the dtype of its input."""

    def __call__(self, x):
        return x + self.linear(x).astype(x.dtype)


class Single(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(NARROW))

    def __call__(self, x):
        return (x * self.scale).astype(jnp.float32)


@thorough
def test_sections_of_one_shape_may_have_two_dtypes_in_the_compute_dtype() -> None:
    sections = [(Residual, 2), Single, (Residual, 2)]
    model = jaxpar.PipelineModel(embed=Half, sections=sections, head=Half)
    x = np.random.default_rng(0).normal(size=(ROWS, NARROW)).astype(np.float32)
    losses = []
    for pipe in (1, 2):
        engine = make_engine(
            Mesh(data=2, pipe=pipe),
            model=model,
            loss_fn=lambda model, x: (model(x).astype(jnp.float32) ** 2).mean(),
            sample_batch=x,
            precision="bf16",
        )
        losses.append([float(engine.step(x)["loss"]) for _ in range(3)])
    # A bf16 number has 8 bits; the programs may round at other places.
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)


@thorough
def test_uneven_sections_say_what_they_cost() -> None:
    explained = " ".join(str(make_engine(Mesh(pipe=2)).explain()).split())
    assert (
        "pipe: decoder: 5 blocks on 2 virtual stages leave 1 of 6 places idle; their "
        "gradients take 288 bytes of a device, and their copies for the step 72 "
        "elements."
    ) in explained  # Half of a block of 2 (8 x 8 + 8) parameters.


def test_uneven_sections_are_refused_unless_allowed() -> None:
    fewer = {"encoder": (Encoder, 5), "between": Between, "decoder": (Decoder, 4)}
    even = make_model(sections=fewer, allow_uneven=False)
    uneven = (
        r"pipe=4 can't divide the blocks evenly \(encoder: 5 blocks on 4 virtual "
        r"stages\): every stage would hold 1.47 x the parameters of an even division"
    )
    with pytest.raises(ValueError, match=uneven):
        make_engine(Mesh(pipe=4), model=even)
