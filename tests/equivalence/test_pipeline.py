"""Does every schedule train like the plain loop, whatever it is combined with?

The oracle is a loop over the blocks by Flax alone, on one device and the whole batch;
where masks are drawn, the same `PipelineModel` on one stage, of the same data axis and
micro-batches. Tolerances as in test_zero.py, for the same reasons.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.models.layers import Embedding, Linear, project_to_logits
from jaxpar.models.norms import LayerNorm
from tests.equivalence import problems

WIDTH, VOCAB, LENGTH, CLIP, STEPS = 16, 32, 4, 0.25, 20
ROWS = {2: 56, 4: 208}
INNER = optax.adamw(1e-3, eps=1e-6, weight_decay=1e-2)
OPTIMIZER = problems.recording(INNER)

FACTORS = {
    "schedule": ("1f1b", "gpipe", "interleaved", "zero_bubble"),
    "pipe": (2, 4),
    "microbatches": ("pipe", "2 pipe", "3 pipe + 1"),
    "mesh": ((2, 1), (1, 2), (2, 2)),
    "zero": (0, 1, 2, 3),
    "tied": (True, False),
    "loss": ("plain", "weighted"),
    "dropout": (0.0, 0.25),
    "blocks": (8, 9),
    "remat": ("full", "none"),
}


def accumulate_of(case: tuple) -> int:
    pipe = case[1]
    return {"pipe": pipe, "2 pipe": 2 * pipe, "3 pipe + 1": 3 * pipe + 1}[case[2]]


def num_devices(case: tuple) -> int:
    return case[1] * case[3][0] * case[3][1]


def is_allowed(case: tuple) -> bool:
    return case[0] != "interleaved" or accumulate_of(case) % case[1] == 0


ALL = list(filter(is_allowed, itertools.product(*FACTORS.values())))
SMALL = [case for case in ALL if num_devices(case) <= 8]


TRIPLES = (
    ("schedule", "pipe", "microbatches"),
    ("schedule", "pipe", "mesh"),
    ("schedule", "pipe", "zero"),
    ("schedule", "zero", "remat"),
)
BOTH = (2, 2)


def parts(case: tuple) -> set:
    """Pairs and `TRIPLES` of values; schedule with stage where the mesh splits both."""
    own = dict(zip(FACTORS, enumerate(case), strict=True))
    triples = {tuple(own[name] for name in names) for names in TRIPLES}
    if case[3] == BOTH:
        triples.add((own["schedule"], own["mesh"], own["zero"]))
    return {*itertools.combinations(own.values(), 2), *triples}


def covering_set() -> list[tuple]:
    """Cases with every pair and every one of `TRIPLES` that eight devices can run."""

    bits: dict[tuple, int] = {}
    of, chosen, missing = {}, [], 0
    for case in SMALL:
        numbers = [bits.setdefault(part, len(bits)) for part in parts(case)]
        of[case] = sum(1 << number for number in numbers)
        missing |= of[case]
    while missing:
        # Sets as bits: every worker of every lane counts these while it collects.
        case = max(SMALL, key=lambda case: (of[case] & missing).bit_count())
        chosen.append(case)
        missing &= ~of[case]
    return chosen


def cross() -> list[tuple]:
    """The full cross of schedule, cut, mesh, stage and ties; the rest in turns."""
    whole, rest = [], itertools.cycle(itertools.product(*list(FACTORS.values())[6:]))
    for first in itertools.product(*list(FACTORS.values())[:6]):
        case = (*first, *next(rest))
        if is_allowed(case) and case not in COVERING:
            whole.append(case)
    return whole


COVERING = covering_set()
REST = cross()


def ids(case: tuple) -> str:
    schedule, pipe, _, (data, tensor), zero, tied, loss, dropout, blocks, remat = case
    return (
        f"{schedule}-d{data}p{pipe}t{tensor}-acc{accumulate_of(case)}-zero{zero}-"
        f"{'tied' if tied else 'untied'}-{loss}-{'drop-' if dropout else ''}L{blocks}-"
        f"{remat}"
    )


class Embed(nnx.Module):
    def __init__(self, dropout: float, rngs: nnx.Rngs):
        self.tokens = Embedding((VOCAB, WIDTH), ("vocab", "embed"), rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.dropout(jaxpar.constrain(10 * self.tokens(tokens), "data"))


class Block(nnx.Module):
    def __init__(self, dropout: float, rngs: nnx.Rngs):
        self.norm = LayerNorm(WIDTH)
        self.up = Linear((WIDTH, 32), ("embed", "mlp"), stddev=0.1, rngs=rngs)
        self.down = Linear((32, WIDTH), ("mlp", "embed"), stddev=0.1, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(
            jaxpar.constrain(self.up(self.norm(x)), "data", None, "tensor")
        )
        return x + self.dropout(self.down(hidden))


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = LayerNorm(WIDTH)
        self.tokens = Embedding((VOCAB, WIDTH), ("vocab", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return project_to_logits(self.norm(x), 5 * self.tokens.table[...].T)


def losses_of(model: Callable, batch: dict) -> jax.Array:
    """Next-token cross entropy, [B, T]."""
    logits, targets = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def plain_loss(model: Callable, batch: dict) -> jax.Array:
    return losses_of(model, batch).mean()


def weighted_loss(model: Callable, batch: dict) -> jaxpar.Weighted:
    losses = losses_of(model, batch)
    return jaxpar.Weighted((losses * batch["mask"]).sum(), batch["mask"].sum())


LOSSES = {"plain": plain_loss, "weighted": weighted_loss}


def call_plainly(make: Callable[[nnx.Rngs], Any], params: dict, x: jax.Array) -> Any:
    """One module with these parameters, by Flax alone."""
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        graphdef, like, _ = nnx.split(model, nnx.Param, ...)
        nnx.replace_by_pure_dict(like, params)
        model = nnx.merge(graphdef, like, nnx.state(make(nnx.Rngs(0)), nnx.RngState))
        return model(x)


def plain_logits(params: dict, tokens: jax.Array) -> jax.Array:
    """The model as a loop over its blocks, without dropout."""
    x = call_plainly(functools.partial(Embed, 0.0), params["embed"], tokens)
    for layer in range(jax.tree.leaves(params["blocks"])[0].shape[0]):
        own = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        x = call_plainly(functools.partial(Block, 0.0), own, x)
    table = params["head"].get("tokens", params["embed"]["tokens"])
    return call_plainly(Head, {**params["head"], "tokens": table}, x)


@functools.cache
def make_batches(pipe: int) -> list[dict[str, np.ndarray]]:
    rng, rows = np.random.default_rng(0), ROWS[pipe]
    # Some tokens are frequent, so that gradients are no sums that nearly cancel.
    frequency = 1.0 / np.arange(1, VOCAB + 1)
    frequency /= frequency.sum()
    shape = (rows, LENGTH + 1)
    kept = np.linspace(0.95, 0.1, rows)[:, None]
    return [
        {
            "tokens": rng.choice(VOCAB, shape, p=frequency).astype(np.int32),
            "mask": (rng.random((rows, LENGTH)) < kept).astype(np.float32),
        }
        for _ in range(STEPS)
    ]


def make_engine(
    case: tuple, mesh: tuple[int, int, int], schedule: str
) -> jaxpar.Engine:
    _, pipe, _, _, zero, tied, loss, dropout, blocks, remat = case
    model = jaxpar.PipelineModel(
        embed=lambda rngs: Embed(dropout, rngs),
        sections=[(lambda rngs: Block(dropout, rngs), blocks)],
        head=Head,
        tied=(("embed", "tokens/table"), ("head", "tokens/table")) if tied else (),
        remat=remat,
        allow_uneven=True,
    )
    devices = jax.devices()[: int(np.prod(mesh))]
    return jaxpar.initialize(
        model=model,
        loss_fn=LOSSES[loss],
        optimizer=OPTIMIZER,
        sample_batch=make_batches(pipe)[0],
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(*mesh), devices),
        zero=zero,
        accumulate=accumulate_of(case),
        schedule=schedule,
        clip_norm=CLIP,
    )


@functools.cache
def initial_params(tied: bool, blocks: int) -> Any:
    case = ("1f1b", 2, "pipe", (1, 1), 0, tied, "plain", 0.0, blocks, "full")
    return jax.device_get(make_engine(case, (1, 1, 1), "1f1b").state.params)


@functools.cache
def plain_oracle(
    pipe: int, tied: bool, loss: str, blocks: int, steps: int
) -> problems.Oracle:
    """One device, no masks drawn, in double precision: fp32 sums of a whole batch are
    less exact than those of its micro-batches."""

    def loss_of(params: dict, batch: dict) -> jax.Array:
        out = LOSSES[loss](functools.partial(plain_logits, params), batch)
        return out.total / out.weight if loss == "weighted" else out

    @jax.jit
    def step(params: Any, opt_state: Any, batch: dict) -> tuple:
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), grads)
        updates, opt_state = INNER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, grads, norm

    params, losses, first = initial_params(tied, blocks), [], None
    params = jax.tree.map(lambda x: x.astype(np.float64), params)
    with jax.enable_x64(True):
        opt_state = INNER.init(params)
        for batch in make_batches(pipe)[:steps]:
            params, opt_state, value, grads, norm = step(params, opt_state, batch)
            losses.append(float(value))
            first = first or (jax.device_get(grads), float(norm))
    return problems.Oracle(losses, *first, jax.device_get(params))


@functools.cache
def drawing_oracle(case: tuple, steps: int) -> problems.Oracle:
    """One device that draws the masks of the same micro-batches."""
    engine = make_engine(case, (1, 1, 1), "1f1b")
    return followed(engine, case, steps)


def followed(engine: jaxpar.Engine, case: tuple, steps: int) -> problems.Oracle:
    batches = make_batches(case[1])[:steps]
    metrics = [engine.step(batches[0])]
    grads = jax.device_get(engine.state.opt_state[0])
    metrics += [engine.step(batch) for batch in batches[1:]]
    losses = [float(m["loss"]) for m in metrics]
    params = jax.device_get(engine.state.params)
    return problems.Oracle(losses, grads, float(metrics[0]["grad_norm"]), params)


def right_for(case: tuple, steps: int) -> problems.Oracle:
    _, pipe, count, _, _, tied, loss, dropout, blocks, _ = case
    if dropout:
        own = (tied, loss, dropout, blocks, "full")
        return drawing_oracle(("1f1b", pipe, count, (1, 1), 0, *own), steps)
    return plain_oracle(pipe, tied, loss, blocks, steps)


def check(case: tuple, steps: int) -> None:
    right = right_for(case, steps)
    assert right.norm > CLIP, "clipping must be at work"
    schedule, pipe, _, (data, tensor), *_ = case
    found = followed(make_engine(case, (data, pipe, tensor), schedule), case, steps)
    assert problems.distance(found.grads, right.grads) <= 1e-6
    assert found.norm == pytest.approx(right.norm, rel=1e-6)
    assert found.losses == pytest.approx(right.losses[:steps], rel=1e-5)
    if steps == STEPS:
        assert problems.distance(found.params, right.params) <= 1e-5


@pytest.mark.parametrize("case", problems.most_slow(COVERING), ids=ids)
def test_schedule_trains_like_one_device(
    case: tuple, request: pytest.FixtureRequest
) -> None:
    """Ten of the covering set run all 20 steps, compiled as users do; others one."""
    steps = STEPS if COVERING.index(case) in TWENTY_STEPS else 1
    if steps > 1:
        request.getfixturevalue("optimized")
    check(case, steps)


TWENTY_STEPS = range(0, len(COVERING), max(1, len(COVERING) // 10))


@pytest.mark.slow
@pytest.mark.parametrize("case", REST, ids=ids)
def test_rest_of_the_cross_trains_like_one_device(case: tuple) -> None:
    needed, there = num_devices(case), jax.device_count()
    if needed > there:
        pytest.skip(f"needs {needed} devices: pytest --devices 16")
    if needed <= 8 < there:
        pytest.skip("is run on eight devices")
    check(case, 1)


def test_covering_set_holds_every_pair_and_triple() -> None:
    for names in (*itertools.combinations(FACTORS, 2), *TRIPLES):
        at = [list(FACTORS).index(name) for name in names]
        possible = {tuple(case[i] for i in at) for case in SMALL}
        assert {tuple(case[i] for i in at) for case in COVERING} == possible
    on_both = {(case[0], case[4]) for case in COVERING if case[3] == BOTH}
    assert len(on_both) == len(FACTORS["schedule"]) * len(FACTORS["zero"])
    assert len(COVERING) >= 40
    assert len([at for at in TWENTY_STEPS if at < len(COVERING)]) >= 10
