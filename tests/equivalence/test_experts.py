"""Does a mixture of experts, split over the expert axis, train like one device?

Top-2 routing without dropped tokens, and a balance loss over all rows of a micro-batch.
The oracle is a plain loop of Flax and optax. Tolerances as in test_zero.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.tree import named_leaves
from tests.equivalence import problems

EXPERTS, WIDTH, HIDDEN, ROWS, STEPS, ACCUMULATE = 4, 16, 32, 32, 10, 2
OPTIMIZER = optax.adamw(1e-3, eps=1e-6)
RULES = {
    "*/up": P("expert", None, "tensor"),
    "*/down": P("expert", "tensor", None),
    "read/kernel": P(None, "tensor"),
}


class Experts(nnx.Module):
    """Each token goes to two experts; every expert has a place for every token."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        draw = nnx.initializers.normal(0.2)
        self.up = nnx.Param(draw(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.down = nnx.Param(draw(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))

    def __call__(self, x_ND: jax.Array) -> tuple[jax.Array, jax.Array]:
        probs_NE = jax.nn.softmax(self.router(x_ND))
        _, top_N2 = jax.lax.top_k(probs_NE, 2)
        chosen_NE = jax.nn.one_hot(top_N2, EXPERTS).sum(1)
        gates_NE = probs_NE * chosen_NE
        gates_NE = gates_NE / gates_NE.sum(-1, keepdims=True)
        slots_END = chosen_NE.T[..., None] * x_ND
        own_ECD = jaxpar.all_to_all(slots_END, split=0, concat=1)
        hidden_ECF = nnx.gelu(jnp.einsum("ECD,EDF->ECF", own_ECD, self.up[...]))
        made_ECD = jnp.einsum("ECF,EFD->ECD", hidden_ECF, self.down[...])
        back_END = jaxpar.all_to_all(made_ECD, split=1, concat=0)
        # Switch Transformer, equation 4: fractions over all tokens.
        load_E = jaxpar.batch_mean(chosen_NE.mean(0))
        importance_E = jaxpar.batch_mean(probs_NE.mean(0))
        balance = EXPERTS * jnp.sum(load_E * importance_E)
        return jnp.einsum("END,NE->ND", back_END, gates_NE), balance


class Mixture(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.read = nnx.Linear(8, WIDTH, rngs=rngs)
        self.layers = nnx.List([Experts(rngs) for _ in range(2)])
        self.write = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, total = jnp.tanh(self.read(x)), jnp.float32(0.0)
        for layer in self.layers:
            made, balance = layer(x)
            x, total = x + made, total + balance
        return self.write(x), total


def loss_fn(model, batch):
    made, balance = model(batch["x"])
    loss = jnp.mean((made - batch["y"]) ** 2) + 0.05 * balance
    return loss, {"balance": balance}


def make_batches() -> list[dict]:
    draw = np.random.default_rng(0)
    shapes = {"x": (ROWS, 8), "y": (ROWS, 4)}
    return [
        {
            name: draw.normal(size=shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        for _ in range(STEPS)
    ]


def make_engine(shape: jaxpar.MeshShape, zero: int, **options) -> jaxpar.Engine:
    given = {"model": lambda rngs: Mixture(rngs), "rules": RULES, "accumulate": 2}
    return jaxpar.initialize(
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        sample_batch=make_batches()[0],
        mesh=shape,
        devices=jax.devices()[: shape.num_devices],
        zero=zero,
        **(given | options),
    )


@functools.cache
def plainly() -> tuple[list[float], list[float], dict]:
    """Losses, balance losses and parameters of a plain loop."""
    engine = make_engine(jaxpar.MeshShape(data=1), 0)
    params = jax.device_get(engine.state.params)
    graph, state = nnx.split(nnx.eval_shape(lambda: Mixture(nnx.Rngs(0))))
    opt_state = OPTIMIZER.init(params)
    structure = jax.tree.structure(state)

    def loss_of(params, batch):
        model = nnx.merge(graph, jax.tree.unflatten(structure, jax.tree.leaves(params)))
        loss, metrics = loss_fn(model, batch)
        return loss, metrics["balance"]

    @jax.jit
    def step(params, opt_state, batch):
        found = [
            jax.value_and_grad(loss_of, has_aux=True)(
                params, jax.tree.map(lambda x, m=m: x[m::ACCUMULATE], batch)
            )
            for m in range(ACCUMULATE)
        ]
        (loss, balance), grads = jax.tree.map(lambda *x: sum(x) / ACCUMULATE, *found)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, balance

    losses, balances = [], []
    for batch in make_batches():
        params, opt_state, loss, balance = step(params, opt_state, batch)
        losses.append(float(loss))
        balances.append(float(balance))
    return losses, balances, params


def check(engine: jaxpar.Engine) -> None:
    losses, balances, params = plainly()
    found = [engine.step(batch) for batch in make_batches()]
    assert [float(m["loss"]) for m in found] == pytest.approx(losses, rel=1e-5)
    assert [float(m["balance"]) for m in found] == pytest.approx(balances, rel=1e-5)
    assert problems.distance(engine.state.params, params) <= 1e-5


MESHES = {
    "e2": jaxpar.MeshShape(data=1, expert=2),
    "d2e2": jaxpar.MeshShape(data=2, expert=2),
    "d2e2t2": jaxpar.MeshShape(data=2, expert=2, tensor=2),
    "r2e4": jaxpar.MeshShape(replica=2, data=1, expert=4),
    "d4t2": jaxpar.MeshShape(data=4, tensor=2),
}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("mesh", MESHES)
def test_experts_over_devices_train_like_one_device(mesh, zero):
    check(make_engine(MESHES[mesh], zero))


def test_expert_weights_are_split_and_never_reduced_over_experts():
    engine = make_engine(MESHES["d2e2"], 3)
    leaf = engine.placement.leaves["layers/0/up"]
    assert leaf.stored_spec[0] == "expert"
    assert leaf.reduce_axes == ("data",)
    assert "rule: expert splits dim 0" in leaf.why
    stored = named_leaves(engine.state.params)["layers/0/up"]
    assert stored.addressable_shards[0].data.shape[0] == EXPERTS // 2
    engine.verify()


def test_evaluation_of_any_number_of_rows_averages_over_all_of_them():
    alone = make_engine(jaxpar.MeshShape(data=1), 0, accumulate=1)
    engine = make_engine(MESHES["d2e2"], 3)
    rows = jax.tree.map(lambda x: x[:13], make_batches()[0])
    found, right = engine.evaluate(rows), alone.evaluate(rows)
    assert float(found["loss"]) == pytest.approx(float(right["loss"]), rel=1e-5)
    assert float(found["balance"]) == pytest.approx(float(right["balance"]), rel=1e-5)


@pytest.mark.usefixtures("checked_losses")
@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_check_of_the_loss_knows_means_and_exchanges(zero):
    engine = make_engine(MESHES["d2e2"], zero)
    assert "loss_fn: checked" in "\n".join(engine.spec.remarks)
    for batch in make_batches()[:2]:
        engine.step(batch)


@pytest.mark.usefixtures("checked_losses")
def test_loss_of_a_pipeline_with_means_is_said_not_to_be_checked():
    engine = make_pipeline(jaxpar.MeshShape(data=2, pipe=2, expert=2))
    assert "it calls batch_mean in a pipeline" in "\n".join(engine.spec.remarks)


@pytest.mark.usefixtures("checked_losses")
def test_statistics_of_a_shard_alone_are_refused_as_no_mean(monkeypatch):
    monkeypatch.setattr(jaxpar, "batch_mean", lambda x: x)
    engine = make_engine(MESHES["d2e2"], 1)
    with pytest.raises(ValueError, match="the loss is not a mean over the rows"):
        engine.step(make_batches()[0])


def test_batch_mean_of_packs_is_refused():
    batch = jaxpar.Packed(jax.tree.map(lambda x: x[:, None], make_batches()[0]))
    with pytest.raises(ValueError, match=r"batch_mean, but is given one pack of a"):
        jaxpar.initialize(
            model=lambda rngs: Mixture(rngs),
            loss_fn=loss_fn,
            optimizer=OPTIMIZER,
            sample_batch=batch,
        )


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.read = nnx.Linear(8, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.read(x))
        return {"x": x, "balance": jnp.zeros(x.shape[:1])}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.experts = Experts(rngs)

    def __call__(self, hidden):
        made, balance = self.experts(hidden["x"])
        return {"x": hidden["x"] + made, "balance": hidden["balance"] + balance}


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.write = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, hidden):
        return self.write(hidden["x"]), hidden["balance"].mean()


PIPES = {
    "1f1b-t2": (jaxpar.MeshShape(data=1, pipe=2, expert=2, tensor=2), "1f1b"),
    "interleaved-r2": (
        jaxpar.MeshShape(data=1, pipe=2, expert=2, replica=2),
        "interleaved",
    ),
    "zero_bubble-d2": (jaxpar.MeshShape(data=2, pipe=2, expert=2), "zero_bubble"),
}


def make_pipeline(shape: jaxpar.MeshShape, schedule: str = "1f1b") -> jaxpar.Engine:
    return make_engine(
        shape,
        3,
        model=jaxpar.PipelineModel(embed=Embed, sections=[(Block, 4)], head=Head),
        schedule=schedule,
        accumulate=4,
        rules={
            "*/up": P(None, "expert", None, "tensor"),
            "*/down": P(None, "expert", "tensor", None),
        },
    )


def run_pipeline(shape: jaxpar.MeshShape, schedule: str) -> tuple[list[float], dict]:
    engine = make_pipeline(shape, schedule)
    losses = [float(engine.step(batch)["loss"]) for batch in make_batches()]
    return losses, jax.device_get(engine.state.params)


@functools.cache
def piped_plainly() -> tuple[list[float], dict]:
    return run_pipeline(jaxpar.MeshShape(data=1), "1f1b")


@pytest.mark.parametrize("name", PIPES)
def test_experts_in_a_pipeline_train_like_one_device(name):
    losses, params = run_pipeline(*PIPES[name])
    right = piped_plainly()
    assert losses == pytest.approx(right[0], rel=1e-5)
    assert problems.distance(params, right[1]) <= 1e-5
