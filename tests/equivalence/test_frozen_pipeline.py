"""Do pipelines train some parameters, with the others frozen, as a plain loop does?

The model, and the oracle, are those of adapters.py.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpar
from jaxpar.compiled.budget import REDUCTION
from jaxpar.jaxprs.evaluate import equations
from tests.equivalence.adapters import (
    BATCHES,
    BLOCKS,
    HIDDEN,
    RANK,
    VOCAB,
    WIDTH,
    Mesh,
    make_engine,
    make_model,
    nested,
    plain_loss,
    start,
    trained_plainly,
)


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
    thorough("plain", "typed", Mesh(data=2, pipe=2), {}),
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
    other = make_engine("sections", "mixed", Mesh(pipe=2))
    assert "all-reduces its last hidden state" in " ".join(other.notes)
    # Last and first hidden states, and once a step the gradient of the part between.
    assert (sums_over_pipe(engine), sums_over_pipe(other)) == (3, 1)


def sums_over_pipe(engine: jaxpar.Engine) -> int:
    """All-reduces that are not the compiler's."""
    (traced,) = engine.traces().values()
    eqns = equations(traced.jaxpr.jaxpr)
    return sum(
        eqn.primitive.name == "psum" and "pipe" in eqn.params["axes"] for eqn in eqns
    )


class OneHot(nnx.Module):
    """An embedding without parameters."""

    def __init__(self, rngs: nnx.Rngs):
        del rngs

    def __call__(self, tokens):
        return jax.nn.one_hot(tokens, WIDTH)


class Same(OneHot):
    """A head without parameters."""

    def __call__(self, x):
        return x


@pytest.mark.thorough
def test_parts_without_parameters_run_beside_frozen_leaves() -> None:
    losses = []
    for mesh in (Mesh(data=2), Mesh(data=2, pipe=2)):
        engine = make_engine(
            "plain",
            "adapters",
            mesh,
            model=make_model("plain", embed=OneHot, head=Same),
            loss_fn=lambda model, batch: jnp.mean((model(batch["tokens"]) - 1) ** 2),
        )
        losses.append([float(engine.step(batch)["loss"]) for batch in BATCHES])
        losses[-1].append(float(engine.evaluate(BATCHES[0])["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


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


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_half_precision_on_stages_is_that_of_one_device(schedule: str) -> None:
    """Kernels in bf16 are used as they are stored."""
    losses = []
    for mesh, own in ((Mesh(data=1), "1f1b"), (Mesh(data=2, pipe=2), schedule)):
        options = {"precision": "bf16", "schedule": own, "remat": "none"}
        engine = make_engine("tied", "adapters", mesh, **options)
        losses.append([float(engine.step(batch)["loss"]) for batch in BATCHES])
    # A bf16 number has 8 bits; the programs may round at other places.
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)
