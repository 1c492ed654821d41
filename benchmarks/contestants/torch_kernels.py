"""Torch's side of `benchmarks/kernels_gpu.py`, in an environment of its own.

``attention FILE ROUNDS``: FILE is an .npz of cases, made by `kernels_gpu.py`; for each,
scaled_dot_product_attention and a compiled flex_attention with the same mask.
``adamw ROUNDS SHAPES``: torch's fused AdamW, clipped, on parameters of these shapes.
Answers are lines of JSON after "@@".
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BLOCK, LONGEST_MASKED, IN_A_ROW = 128, 8192, 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On a CPU the path is tried: flex_attention is not compiled, nothing is graphed."""


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    """Median time of a call by the GPU's own events, of rounds of ten in a row."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds if DEVICE == "cpu" else 0):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    for _ in range(rounds if DEVICE == "cuda" else 0):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(IN_A_ROW):
            call()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) / IN_A_ROW)
    return statistics.median(times)


def answer(name: str, found: dict[str, float]) -> None:
    """Tell what was measured of a case."""
    told = {"name": name, "found": found, "torch": torch.__version__}
    print("@@" + json.dumps(told), flush=True)


def attention(path: str, rounds: int) -> None:
    """Both attentions on every case of a file: NAME -> layout, and NAME/shape."""
    with np.load(path) as cases:
        names = [name for name in cases.files if not name.endswith("/shape")]
        for name in names:
            # Else a part's last cases would be over the limit of compilations, and
            # would run uncompiled.
            torch.compiler.reset()
            found = of_case(cases[name], cases[f"{name}/shape"], rounds)
            answer(name, found)


def of_case(blocks, shape, rounds: int) -> dict[str, float]:
    """Times of one case."""
    flex = flex_attention
    if DEVICE == "cuda":
        flex = torch.compile(flex_attention, dynamic=False)
    batch, length, heads, size = map(int, shape)
    layout = torch.tensor(blocks, device=DEVICE)
    if (layout == layout[:1]).all():
        layout = layout[:1]
    given = (batch, heads, length, size)
    q, k, v, do = (
        torch.randn(given, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(4)
    )

    def visible(b, h, q_index, k_index):
        active = layout[h % layout.shape[0], q_index // BLOCK, k_index // BLOCK]
        return active & (q_index >= k_index)

    # Compiled, for else the mask of all pairs would be made first.
    given = (visible, None, len(layout), length, length)
    mask = create_block_mask(*given, device=DEVICE, _compile=DEVICE == "cuda")
    runs = {"flex": lambda: flex(q, k, v, block_mask=mask)}
    if layout.tril().sum() == torch.ones_like(layout).tril().sum():
        runs["sdpa"] = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif length <= LONGEST_MASKED:
        tokens = torch.arange(length, device=DEVICE)
        every = torch.arange(heads, device=DEVICE)[:, None, None]
        dense = visible(None, every, tokens[:, None], tokens)
        runs["sdpa"] = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    found = {}
    for name, attend in runs.items():
        with torch.no_grad():
            found[f"{name}_forward_ms"] = milliseconds(attend, rounds)
        found[f"{name}_both_ms"] = milliseconds(
            lambda attend=attend: torch.autograd.grad(attend(), (q, k, v), do), rounds
        )
    return found


def adamw(rounds: int, shapes: list[list[int]]) -> None:
    """A step of fused AdamW in fp32, behind the clipping of the global norm.

    Recorded as a graph, for the host would take longer than the GPU to launch it.
    """
    params = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = torch.optim.AdamW(
        params, 1e-3, weight_decay=0.1, fused=True, capturable=DEVICE == "cuda"
    )

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    for name, call in (("", optimizer.step), (" clipped", step)):
        run = recorded(call).replay if DEVICE == "cuda" else call
        answer(f"torch fused adamw{name}", {"ms": milliseconds(run, rounds)})


def recorded(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Record a call's launches, after three runs that make what it keeps."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


if __name__ == "__main__":
    if sys.argv[1] == "attention":
        attention(sys.argv[2], int(sys.argv[3]))
    else:
        adamw(int(sys.argv[2]), json.loads(sys.argv[3]))
