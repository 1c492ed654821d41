"""Does a step with each technique of one device do on a GPU what a plain one does?

Each trains the same small GPT on the same batches, in a process of its own, several at
once: what counts are the losses. python -m benchmarks.gpu.techniques NAME
"""

import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar
from benchmarks.gpu.imports import ROOT
from benchmarks.gpu.processes import MARK
from benchmarks.gpu.session import Rows, Session
from jaxpar.models import DecoderConfig, decoder_loss, generate, make_decoder
from jaxpar.optim import fused_adamw, fused_lion, onebit_adam
from jaxpar.sparse_attention import causal_pattern

STEPS, RESTORED_AT, SECONDS = 8, 4, 240
RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Technique:
    """What is changed of the plain run, and how its losses may differ.

    Attributes:
      model: fields of the config.
      options: of `jaxpar.initialize`; `offload` as a mapping, without its path.
      like: the one whose losses it must have; itself for none: they must fall.
      tolerance: relative, of each loss.
      restored: whether another engine goes on from a checkpoint half-way.
    """

    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    like: str = "plain"
    tolerance: float = 2e-3
    restored: bool = False


def _offloaded(tolerance: float = 2e-3, **options: Any) -> Technique:
    given = {"offload": {"piece_mb": 0.5, **options}}
    return Technique(options=given, tolerance=tolerance, restored=True)


def _with_optimizer(make: Callable[[], Any], **others: Any) -> Technique:
    return Technique(options={"optimizer": make}, **others)


_LION = {"like": "lion"}

TECHNIQUES = {
    "plain": Technique(restored=True),
    "fp32": Technique(options={"precision": "fp32"}, tolerance=1e-2),
    "fp16": Technique(options={"precision": "fp16"}, tolerance=5e-3),
    "accumulate": Technique(options={"accumulate": 4}),
    "ZeRO 3": Technique(options={"zero": 3}),
    "remat full": Technique(model={"remat": "full"}),
    "remat dots": Technique(model={"remat": "dots"}),
    "remat offload": Technique(model={"remat": "offload"}),
    "unrolled": Technique(model={"unroll": 4}),
    "logits in bf16": Technique(model={"logits_dtype": "bfloat16"}, tolerance=1e-2),
    "attention in plain JAX": Technique(model={"attention": "xla"}, tolerance=5e-3),
    "window": Technique(
        model={"attention": causal_pattern("sliding", num_heads=4, window=256)},
        like="window",
    ),
    "whole window": Technique(
        model={"attention": causal_pattern("sliding", num_heads=4, window=448)},
        tolerance=5e-3,
    ),
    "fused AdamW": _with_optimizer(lambda: fused_adamw(RATE, weight_decay=1e-4)),
    "fused AdamW, 8 bits": _with_optimizer(
        lambda: fused_adamw(RATE, weight_decay=1e-4, bits=8), tolerance=2e-2
    ),
    "lion": _with_optimizer(lambda: optax.lion(RATE / 4), **_LION),
    "fused lion": _with_optimizer(lambda: fused_lion(RATE / 4), **_LION),
    "1-bit Adam": _with_optimizer(
        lambda: onebit_adam(RATE, freeze_step=4), like="1-bit Adam", restored=True
    ),
    "Muon": _with_optimizer(lambda: optax.contrib.muon(RATE), like="Muon"),
    "streamed": _offloaded(),
    "half streamed": _offloaded(fraction=0.5),
    "host's update": _offloaded(update="host"),
    "a step late": _offloaded(0.3, update="host", delayed=True, delay_after=0),
    "parameters on the host": _offloaded(update="host", params="host"),
    "on disk": _offloaded(optimizer="disk"),
    "parameters on disk": _offloaded(optimizer="disk", params="disk"),
}


def run(session: Session, names: list[str] | None = None) -> Rows:
    """Train with each and compare; a row each, that says what is wrong, if anything.

    Args:
      session: where it runs.
      names: of `TECHNIQUES`; None for all.
    """
    own = list(TECHNIQUES) if names is None else names
    at_once = 1 if session.dry else max(1, (os.cpu_count() or 2) // 2)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        answers = dict(zip(own, pool.map(_in_process(session), own), strict=True))
    passed, wrong = 0, {}
    for name, answer in answers.items():
        why = answer.get("failed") or why_wrong(name, answers)
        passed += not why
        if why:
            wrong[name] = why
        yield name, answer | ({"wrong": why} if why else {})
    yield "tests", {"passed": passed, "failed": len(wrong), "failures": wrong}


def why_wrong(name: str, answers: Mapping[str, Mapping[str, Any]]) -> str:
    """What is wrong with the losses of a technique; "" if nothing is."""
    own, technique = answers[name]["losses"], TECHNIQUES[name]
    if not np.all(np.isfinite(own)) or own[-1] >= own[0]:
        return f"the losses don't fall: {own}"
    right = answers.get(technique.like, {}).get("losses")
    if right is None:
        return f"there are no losses of {technique.like!r} to compare with"
    apart = float(np.max(np.abs(np.subtract(own, right)) / np.abs(right)))
    if apart > technique.tolerance:
        return f"losses differ from {technique.like!r} by {apart:.1e}: {own}, {right}"
    return ""


def _in_process(session: Session) -> Callable[[str], dict[str, Any]]:
    def train(name: str) -> dict[str, Any]:
        command = [sys.executable, "-m", __spec__.name, name]
        log = session.keep / f"{name.replace(' ', '-')}.txt"
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                cwd=ROOT,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {SECONDS} s"}
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
        for line in done.stdout.splitlines():
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
        last = " | ".join(done.stderr.strip().splitlines()[-3:])
        return {"failed": f"exit status {done.returncode}: {last[-600:]}"}

    return train


def losses_of(name: str, folder: Path) -> dict[str, Any]:
    """Train with a technique: the loss of each step, and tokens from a short prompt."""
    technique = TECHNIQUES[name]
    engine = make_engine(technique, folder)
    losses = []
    for number in range(STEPS):
        if technique.restored and number == RESTORED_AT:
            engine.save(folder / "saved")
            engine.wait()
            engine = make_engine(technique, folder / "second")
            engine.restore(folder / "saved")
        losses.append(float(engine.step(batch(number))["loss"]))
    found: dict[str, Any] = {"losses": losses}
    if name == "plain":
        prompt = jnp.asarray(batch(0)["tokens"][:1, :32])
        config, key = config_of(technique), jax.random.key(0)
        told = generate(engine.model(), prompt, 8, config=config, key=key)
        found["generated"] = np.asarray(told)[0, -8:].tolist()
    return found


def make_engine(technique: Technique, folder: Path) -> jaxpar.Engine:
    """An engine of the small GPT."""
    options = dict(technique.options)
    make = options.pop("optimizer", lambda: optax.adamw(RATE))
    offload = options.pop("offload", None)
    if offload is not None:
        on_disk = "disk" in offload.values()
        path = str(folder / "offload") if on_disk else None
        offload = jaxpar.Offload(**offload, path=path)
    return jaxpar.initialize(
        model=make_decoder(config_of(technique)),
        loss_fn=decoder_loss,
        optimizer=make(),
        sample_batch=batch(0),
        offload=offload,
        **{"precision": "bf16", "zero": 1, **options},
    )


def config_of(technique: Technique) -> DecoderConfig:
    """Of the small GPT: heads of 128, which all kernels take."""
    sizes = {"vocab_size": 512, "seq_len": 512, "num_layers": 4, "num_heads": 4}
    width = 512 if jax.default_backend() == "gpu" else 64
    return DecoderConfig(**{**sizes, "width": width, **technique.model})


def batch(number: int) -> dict[str, np.ndarray]:
    """Rows in which each token follows from the one before, with some noise."""
    random = np.random.default_rng(number)
    rows = np.empty((8, 513), np.int32)
    rows[:, 0] = random.integers(0, 512, 8)
    for place in range(1, rows.shape[1]):
        rows[:, place] = (5 * rows[:, place - 1] + random.integers(1, 4, 8)) % 512
    return {"tokens": rows}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        print(MARK + json.dumps(losses_of(sys.argv[1], Path(work))), flush=True)
