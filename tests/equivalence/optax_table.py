"""Every public transformation of optax, and SOAP, as it is trained with or refused.

Most are made by rule (`make`); `GIVEN` has those that need arguments, or an eps at
which rounding does not decide, and `REFUSED` what a training step can't run.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import optax
from optax import contrib

from jaxpar.optim import soap

RATE, EPS = 1e-3, 1e-6
Made = optax.GradientTransformation


def adam() -> Made:
    return optax.adam(RATE, eps=EPS)


def then_sgd(first: Made) -> Made:
    return optax.chain(first, optax.sgd(0.1))


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 2, params)


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", params)


def is_even(step: jax.Array) -> jax.Array:
    return step % 2 == 0


def decaying(count: jax.Array) -> jax.Array:
    return RATE / (1 + count)


def halved(tree: Any) -> Any:
    return jax.tree.map(lambda x: x / 2, tree)


def sam(**options: Any) -> Made:
    ascent = optax.chain(contrib.normalize(), optax.sgd(0.05))
    return contrib.sam(optax.sgd(0.1), ascent, **options)


GIVEN: dict[str, Callable[[], Made]] = {
    "acprop": lambda: contrib.acprop(RATE, eps=1e-2),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=16),
    "adaptive_grad_clip": lambda: then_sgd(optax.adaptive_grad_clip(0.01)),
    "add_decayed_weights": lambda: then_sgd(optax.add_decayed_weights(0.01)),
    "add_noise": lambda: then_sgd(optax.add_noise(0.01, 0.55, jax.random.key(1))),
    "apply_every": lambda: optax.chain(optax.sgd(0.1), optax.apply_every(2)),
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 3),
    "centralize": lambda: then_sgd(optax.centralize()),
    "chain": lambda: optax.chain(optax.clip(0.1), optax.sgd(0.1)),
    "clip": lambda: then_sgd(optax.clip(0.01)),
    "clip_by_block_rms": lambda: then_sgd(optax.clip_by_block_rms(0.01)),
    "clip_by_global_norm": lambda: then_sgd(optax.clip_by_global_norm(0.01)),
    "conditionally_mask": lambda: optax.conditionally_mask(adam(), is_even),
    "conditionally_transform": lambda: optax.conditionally_transform(adam(), is_even),
    "ema": lambda: then_sgd(optax.ema(0.9)),
    "flatten": lambda: optax.flatten(adam()),
    "freeze": lambda: optax.chain(adam(), optax.freeze(False)),
    # Of a rank that the gradients have: the rest of a projection is rounding.
    "galore": lambda: contrib.galore(RATE, rank=4),
    "identity": lambda: then_sgd(optax.identity()),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=decaying, eps=EPS
    ),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(
        optax.adam
    )(learning_rate=decaying, eps=EPS),
    "masked": lambda: optax.masked(adam(), is_matrix),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": adam(), "vector": optax.sgd(0.1)}, by_rank
    ),
    "named_chain": lambda: optax.named_chain(
        ("clip", optax.clip(0.01)), ("sgd", optax.sgd(0.1))
    ),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=jax.random.key(1)),
    "partition": lambda: optax.partition(
        {"matrix": adam(), "vector": optax.sgd(0.1)}, by_rank
    ),
    "reduce_on_plateau": lambda: optax.chain(
        adam(), contrib.reduce_on_plateau(patience=2, accumulation_size=2)
    ),
    "sam": sam,
    "scale": lambda: optax.scale(-0.1),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(0.1),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda s: -decaying(s)),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(0.1), 0.1),
    "selective_transform": lambda: optax.selective_transform(
        adam(), freeze_mask=is_matrix
    ),
    "snapshot": lambda: then_sgd(optax.snapshot("halved", halved)),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(adam()),
    "stateless": lambda: then_sgd(optax.stateless(lambda grads, _: halved(grads))),
    "stateless_with_tree_map": lambda: then_sgd(
        optax.stateless_with_tree_map(lambda grad, _: grad / 2)
    ),
    "trace": lambda: optax.chain(optax.trace(0.9), optax.scale(-0.1)),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.sgd(0.1)),
    "zero_nans": lambda: then_sgd(optax.zero_nans()),
    # Not found by their annotations, or another side of one that is.
    "MultiSteps": lambda: optax.MultiSteps(adam(), 3).gradient_transformation(),
    "MultiSteps of muon": lambda: optax.MultiSteps(
        contrib.muon(RATE), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "dog": lambda: contrib.dog(),
    "dowg": lambda: contrib.dowg(),
    "lbfgs without a line search": lambda: optax.lbfgs(0.1, linesearch=None),
    "muon of five coefficients": lambda: contrib.muon(RATE, ns_coeffs="dion"),
    "muon, first turn apart": lambda: contrib.muon(RATE, preconditioning="aol"),
    "scale_by_factored_rms": lambda: optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=16), optax.scale(-RATE)
    ),
    "params_ema": lambda: optax.chain(adam(), params_ema(0.9)),
    "soap": lambda: soap(RATE, eps=EPS, every=2),
}

TAKE_VALUE = {"momo", "momo_adam", "polyak_sgd", "reduce_on_plateau", "scale_by_polyak"}
"""Those whose update is passed the loss."""

ASKS = r"optimizer: its update needs {}, which a training step does not have: .*"
REFUSED: dict[str, tuple[Callable[[], Made], str]] = {
    "differentially_private_aggregate": (
        lambda: contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(1)),
        r"optimizer: its update fails on this model's shapes: ValueError: .*`grads` to "
        r"have a batch dimension in the 0th axis\. It is called with gradients of the",
    ),
    "dpsgd": (
        lambda: contrib.dpsgd(0.1, 1.0, 0.1, seed=1),
        r"optimizer: its update fails .*`grads` to have a batch dimension",
    ),
    "hutchinson_estimator_diag_hessian": (
        lambda: contrib.hutchinson_estimator_diag_hessian(),
        ASKS.format("obj_fn"),
    ),
    "lbfgs": (
        lambda: optax.lbfgs(),
        ASKS.format("value_fn") + r"as in optax\.lbfgs\(learning_rate, linesearch=None",
    ),
    "lookahead": (
        lambda: optax.lookahead(optax.sgd(0.1), 3, 0.5),
        r"optimizer: its update fails .* AttributeError: 'dict' object has no attribut",
    ),
    "measure_with_ema": (
        lambda: then_sgd(
            optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)})
        ),
        r"optimizer: its update returns a state of other leaves than init: new "
        r"\['0/measurements/norm'\], gone \[\]\. Let init return every leaf",
    ),
    "sam of its own gradients": (
        lambda: sam(opaque_mode=True),
        ASKS.format("grad_fn"),
    ),
    "scale_by_backtracking_linesearch": (
        lambda: optax.scale_by_backtracking_linesearch(5),
        ASKS.format("value_fn"),
    ),
    "scale_by_muon": (
        # Of all leaves, biases too: muon gives it the matrices.
        lambda: contrib.scale_by_muon(),
        r"optimizer: its update fails .* ValueError: pytree structure error",
    ),
    "scale_by_zoom_linesearch": (
        lambda: optax.chain(optax.sgd(0.1), optax.scale_by_zoom_linesearch(5)),
        ASKS.format("value_fn"),
    ),
    "sophia": (lambda: contrib.sophia(RATE), ASKS.format("obj_fn")),
}


def params_ema(decay: float) -> Made:
    """Averages of the parameters beside the optimizer's state, as users write it."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        new = optax.apply_updates(params, updates)
        return updates, optax.incremental_update(new, state, 1 - decay)

    return optax.GradientTransformation(lambda params: params, update)


def found_in(module: ModuleType) -> dict[str, Callable[..., Made]]:
    """The public functions of a module that say that they make a transformation."""
    functions = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    return {
        name: function
        for name, function in functions.items()
        if "GradientTransformation"
        in str(inspect.signature(function).return_annotation)
    }


FOUND = found_in(optax) | found_in(contrib)
# An optimizer of the same name is the scaling and a rate.
NAMES = sorted(
    name
    for name in (FOUND.keys() | GIVEN.keys()) - REFUSED.keys()
    if name.removeprefix("scale_by_") == name
    or name.removeprefix("scale_by_") not in FOUND
)


def make(name: str) -> Made:
    """An optimizer by its name: a rate, an eps, and a descent where it has none."""
    if name in GIVEN:
        return GIVEN[name]()
    parameters = inspect.signature(FOUND[name]).parameters
    given = {"learning_rate": RATE, "eps": EPS}
    made = FOUND[name](**{key: given[key] for key in given if key in parameters})
    is_whole = "learning_rate" in parameters or "max_learning_rate" in parameters
    return made if is_whole else optax.chain(made, optax.scale(-RATE))
