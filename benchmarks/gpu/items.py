"""What is measured on a GPU, in the order of what it tells us.

An item is a question; its cases are run one by one, each in a process of its own, and a
call that ends between two goes on with the next. Minutes are guesses until a GPU has
been seen.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

HERE = "benchmarks.gpu"
MOST_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
SHARED_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""JAX takes what it needs, and leaves the rest to torch."""
KERNEL_BY_KERNEL = ("--xla_gpu_enable_command_buffer=",)
"""A trace names the instruction of each kernel that is launched by itself."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A part of an item.

    Attributes:
      name: within the item.
      call: "module:function", called with a `Session` and `arguments`.
      minutes: that it is expected to take: it is not begun with less time left.
      arguments: its others, JSON values.
      dry: those of the dry run; None if another case goes the same way.
      limit: minutes after which it is ended; 0 for twice `minutes` and one more.
      needs_gb: memory of the GPU without which it is not begun.
      environment: variables to add.
      xla_flags: options of XLA to add.
    """

    name: str
    call: str
    minutes: float
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dry: Mapping[str, Any] | None = None
    limit: float = 0.0
    needs_gb: float = 0.0
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    xla_flags: tuple[str, ...] = ()

    @property
    def limit_minutes(self) -> float:
        """After which it is ended."""
        return self.limit or 2 * self.minutes + 1


@dataclasses.dataclass(frozen=True)
class Item:
    """A question, and the cases that answer it.

    Attributes:
      name: as `--only` takes it.
      answers: the question.
      cases: in order.
      not_built: why there is nothing to measure yet; empty if there is.
    """

    name: str
    answers: str
    cases: tuple[Case, ...]
    not_built: str = ""

    @property
    def minutes(self) -> float:
        """That all cases are expected to take."""
        return sum(case.minutes for case in self.cases)


def _training(
    shape: str, *, engine: float, torch: float, autotuned: float, gb: tuple[float, ...]
) -> tuple[Case, ...]:
    """The contestants of a model's training step.

    Args:
      shape: one of `benchmarks.contestants.protocol.SHAPES`.
      engine: minutes of the engine, and of the step by hand.
      torch: minutes of torch.compile.
      autotuned: minutes of its mode max-autotune.
      gb: memory that the engine, the step by hand and torch need.
    """
    toy = {"shape": "toy"} if shape == "124m" else None
    own, call = {"shape": shape}, f"{HERE}.training"
    ours = {"environment": MOST_MEMORY, "needs_gb": gb[0]}
    cases = [
        Case("engine", f"{call}:engine", engine, own, toy or {"shape": "toy"}, **ours),
        Case(
            "kernels",
            f"{call}:kernels",
            engine,
            own,
            toy,
            xla_flags=KERNEL_BY_KERNEL,
            **ours,
        ),
        Case(
            "by hand",
            f"{call}:by_hand",
            engine,
            own,
            toy,
            needs_gb=gb[1],
            environment=MOST_MEMORY,
        ),
    ]
    for mode, minutes in (("compile", torch), ("max-autotune", autotuned)):
        for attention in ("flash", "cudnn"):
            added = {"mode": mode, "attention": attention}
            is_dry = toy and attention == "flash"
            cases.append(
                Case(
                    f"torch {mode}, {attention}",
                    f"{call}:torch",
                    minutes,
                    own | added,
                    {"shape": "toy"} | added if is_dry else None,
                    needs_gb=gb[2],
                )
            )
    # The first contestant once more: whether the clocks have changed between.
    again = Case(
        "engine again", f"{call}:engine", engine, own | {"again": True}, **ours
    )
    return (*cases, again)


def _attention(part: str, names: tuple[str, ...], minutes: float) -> tuple[Case, ...]:
    """The cases of one of `benchmarks.kernels.attention.PARTS`."""
    return tuple(
        Case(
            name,
            f"{HERE}.kernels:attention_case",
            minutes,
            {"part": part, "name": name},
            {"part": f"toy {part}", "name": f"toy {part}"}
            if name == names[0]
            else None,
            limit=2 * minutes + 2,
            environment=SHARED_MEMORY,
        )
        for name in names
    )


def _optimizers(model: str, minutes: float, needs_gb: float) -> Case:
    return Case(
        model,
        f"{HERE}.kernels:optimizer_case",
        minutes,
        {"model": model},
        {"model": "tiny"} if model == "124m" else None,
        needs_gb=needs_gb,
        environment=SHARED_MEMORY,
    )


def _signs(workers: int) -> Case:
    return Case(
        f"{workers} workers",
        f"{HERE}.kernels:sign_case",
        0.6,
        {"workers": workers},
        {"workers": workers} if workers == 8 else None,
        needs_gb=20,
    )


def _tests(name: str, minutes: float, files: list[str], only: str = "") -> Case:
    arguments = {"files": files, "only": only}
    toy = {"files": ["test_reference.py"], "only": "queries_that_see_nothing"}
    return Case(
        name,
        f"{HERE}.kernel_tests:run",
        minutes,
        arguments,
        toy if name in ("one of each", "optimizers") else None,
        environment=SHARED_MEMORY,
    )


def _eight_billion(name: str, bits: int | None, needs_gb: float) -> tuple[Case, ...]:
    given: dict[str, Any] = {
        "minutes": 3,
        "arguments": {"model": "8b", "bits": bits},
        "needs_gb": needs_gb,
        "environment": MOST_MEMORY,
    }
    toy, call = {"model": "tiny", "bits": bits}, f"{HERE}.training"
    flags, named = KERNEL_BY_KERNEL, f"{name}, kernels"
    return (
        Case(name, f"{call}:llama", dry=None if bits else toy, **given),
        Case(named, f"{call}:llama_kernels", xla_flags=flags, **given),
    )


def _predicted(model: str, batch: int, remat: str, needs_gb: float) -> Case:
    arguments = {"batch": batch, "remat": remat}
    return Case(
        f"{model}, remat {remat}",
        f"{HERE}.training:predicted",
        1,
        {"model": model} | arguments,
        {"model": "tiny", "batch": 2, "remat": "dots"} if model == "350m" else None,
        needs_gb=needs_gb,
        environment=MOST_MEMORY,
    )


def _offloaded(
    name: str,
    minutes: float,
    offload: dict[str, Any] | None,
    needs_gb: float,
    **others: Any,
) -> Case:
    """A step with 131,072 tokens of 1.3B, or another model."""
    given = {"model": "1.3b", "batch": 64, "accumulate": 8} | others
    toy = None
    if offload is not None and "fraction" not in offload:
        small = {"model": "tiny", "batch": 4}
        small["accumulate"] = min(2, given["accumulate"])
        toy = small | {"offload": offload | {"piece_mb": 0.1}}
    return Case(
        name,
        f"{HERE}.offload:step",
        minutes,
        given | {"offload": offload},
        toy,
        needs_gb=needs_gb,
        environment=MOST_MEMORY,
    )


_THIRTEEN = {"num_layers": 40, "width": 5120, "num_heads": 40}
"""13 billion parameters."""

_LATE = {"update": "host", "delayed": True, "delay_after": 0}

_LAYERS = {"update": "host", "params": "host"}

_ATTENTION, _OPTIMIZERS = "test_mosaic_gpu.py", "test_fused_optimizers.py"
_SIGNS = "test_sign_bits.py"

ITEMS = (
    Item(
        "ceilings",
        "How fast is this GPU's memory and how fast are its matmuls, measured?",
        (Case("rates", f"{HERE}.ceilings:measure", 1, {}, {}),),
    ),
    Item(
        "smoke",
        "Do the Pallas kernels run, and compute what plain JAX does?",
        (
            _tests(
                "one of each",
                3,
                [_OPTIMIZERS, _ATTENTION],
                "adamw or (dense and not segments)",
            ),
        ),
    ),
    Item(
        "124m",
        "Is a step of GPT-2 124M at 480k tokens/s, and as fast as torch's best?",
        _training("124m", engine=0.6, torch=1.2, autotuned=3, gb=(25, 45, 45)),
    ),
    Item(
        "tests",
        "Do all kernels pass all of their tests?",
        (
            _tests("optimizers", 2, [_OPTIMIZERS, _SIGNS]),
            _tests("attention", 2, [_ATTENTION]),
        ),
    ),
    Item(
        "techniques",
        "Does a step with each technique of one device train as a plain one does?",
        (
            Case(
                "losses",
                f"{HERE}.techniques:run",
                2.5,
                {},
                {"names": ["plain", "streamed"]},
                environment=SHARED_MEMORY,
            ),
        ),
    ),
    Item(
        "window",
        "Is a window 5 times as fast as cuDNN's dense attention at 32k tokens?",
        _attention(
            "window",
            (
                "window 2048 32768",
                "window 512 32768",
                "window 2048 8192",
                "window 512 8192",
            ),
            1.2,
        ),
    ),
    Item(
        "patterns",
        "How fast are fixed, BigBird and Longformer beside cuDNN and FlexAttention?",
        _attention(
            "patterns",
            tuple(
                f"{pattern} {length}"
                for length in (32768, 8192)
                for pattern in ("fixed", "bigbird", "longformer")
            ),
            2.5,
        ),
    ),
    Item(
        "1.3b",
        "Is a step of GPT-3 1.3B at 50k tokens/s, and as fast as torch's best?",
        _training("1.3b", engine=1, torch=1.5, autotuned=4, gb=(55, 75, 75)),
    ),
    Item(
        "8b",
        "Does Llama 3's 8B train on one GPU at 8,192 tokens, and how fast?",
        (
            *_eight_billion("AdamW", None, 138),
            *_eight_billion("AdamW, moments in 8 bits", 8, 120),
        ),
    ),
    Item(
        "predicted",
        "Are the predicted peak (5 %) and the step's estimated time right?",
        (
            _predicted("124m", 16, "none", 25),
            _predicted("350m", 16, "dots", 30),
            _predicted("1.3b", 8, "full", 40),
        ),
    ),
    Item(
        "optimizers",
        "Do the fused optimizers reach 70 to 90 % of a copy's bandwidth?",
        (_optimizers("124m", 1.5, 10), _optimizers("1.3b", 3, 75)),
    ),
    Item(
        "signs",
        "Are signs packed and averaged at 80 % of a copy's bandwidth?",
        (_signs(8), _signs(64)),
    ),
    Item(
        "offload",
        "How fast are steps whose optimizer state is on the host?",
        (
            Case("copies", f"{HERE}.offload:copies", 0.5, {}, {}),
            _offloaded("1.3b, none", 1.2, None, 40),
            _offloaded("1.3b, streamed", 1.2, {}, 30),
            _offloaded("1.3b, 0.6 streamed", 1.2, {"fraction": 0.6}, 40),
            _offloaded("1.3b, by the host", 1.2, {"update": "host"}, 30),
            _offloaded("1.3b, by the host, a step late", 1.2, _LATE, 30),
            _offloaded(
                "13b, 0.6 streamed",
                6,
                {"fraction": 0.6},
                132,
                batch=8,
                accumulate=1,
                changes=_THIRTEEN,
            ),
            _offloaded("350m, on disk", 4, {"optimizer": "disk"}, 20, model="350m"),
            _offloaded("1.3b, parameters on the host", 1.2, _LAYERS, 20),
            _offloaded(
                "350m, parameters on disk",
                4,
                {"optimizer": "disk", "params": "disk"},
                20,
                model="350m",
                batch=16,
                accumulate=1,
            ),
        ),
    ),
)


def dry_items(items: tuple[Item, ...] = ITEMS) -> Iterator[Item]:
    """The items with their cases at toy size, each way through the code once."""
    for item in items:
        cases = [
            dataclasses.replace(
                case, arguments=case.dry, minutes=0.5, needs_gb=0.0, environment={}
            )
            for case in item.cases
            if case.dry is not None
        ]
        yield dataclasses.replace(item, cases=tuple(cases))
