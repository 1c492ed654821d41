"""The same GPT in torch: SHAPE, and a mode; or deepspeed and a ZeRO stage.

Modes are eager, compile and max-autotune; behind them, flash or cudnn is the kernel of
attention, by default torch's choice. On a GPU matrix products and attention are in bf16
by autocast, on fp32 parameters.
Runs in an environment that has torch, and nothing of jaxpar's.
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

import protocol

SHAPE = protocol.SHAPES[sys.argv[1]]
WIDTH, HEADS = SHAPE.width, SHAPE.heads
DEVICE = "cuda" if SHAPE.device == "gpu" else "cpu"


class Block(nn.Module):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Attend, then the MLP."""
        B, T, D = x.shape
        parts = self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        q, k, v = (p.view(B, T, HEADS, D // HEADS).transpose(1, 2) for p in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, D))
        y = self.up(self.norm2(x))
        return x + self.down(F.gelu(y, approximate="tanh"))


class GPT(nn.Module):
    """The model, which gives the loss of a batch of tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SHAPE.vocab, WIDTH)
        self.positions = nn.Embedding(SHAPE.length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(SHAPE.layers))
        self.norm = nn.LayerNorm(WIDTH)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens):
        """Mean next-token cross entropy."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(rank: int, ways: int):
    """This worker's rows."""
    rows = SHAPE.batch // ways
    return [
        torch.tensor(protocol.tokens(SHAPE, step))[rank * rows : (rank + 1) * rows]
        for step in range(8)
    ]


def choose_attention(name: str) -> None:
    """Let scaled_dot_product_attention have one kernel of a GPU's, "flash" or "cudnn".

    There is no way back to another one: what it can't run is an error.
    """
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(name == "flash")
    cuda.enable_cudnn_sdp(name == "cudnn")
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_math_sdp(DEVICE == "cpu")


COMPILED = {
    "eager": lambda model: model,
    "compile": torch.compile,
    "max-autotune": lambda model: torch.compile(model, mode="max-autotune"),
}


def one_process(mode: str) -> None:
    """Serve steps of torch alone."""
    model = GPT().to(DEVICE)
    data = [rows.to(DEVICE) for rows in batches(0, 1)]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=protocol.LEARNING_RATE, weight_decay=1e-4, fused=True
    )
    run = COMPILED[mode](model)

    def step(number: int) -> torch.Tensor:
        # Says to CUDA graphs that results of the step before may be overwritten.
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = run(data[number % 8])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    def report() -> dict[str, int]:
        if DEVICE == "cpu":
            return {}
        return {"peak_bytes": torch.cuda.max_memory_allocated()}

    float(step(0))
    protocol.serve(step, report, torch=torch.__version__)


def deepspeed_worker(zero: int) -> None:
    """Serve steps of DeepSpeed; worker 0 is asked and tells the other."""
    import deepspeed  # noqa: PLC0415 - only this contestant has it
    import torch.distributed as dist  # noqa: PLC0415

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    model = GPT()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=protocol.LEARNING_RATE, weight_decay=1e-4
        ),
        config={
            "train_batch_size": SHAPE.batch,
            "train_micro_batch_size_per_gpu": SHAPE.batch // 2,
            "zero_optimization": {"stage": zero},
            "zero_allow_untested_optimizer": True,
        },
    )
    data = batches(rank, 2)

    def take(number: int) -> torch.Tensor:
        loss = engine(data[number % 8])
        engine.backward(loss)
        engine.step()
        return loss.detach()

    take(0)
    if rank == 0:

        def step(number: int) -> torch.Tensor:
            dist.broadcast(torch.tensor([number]), 0)
            return take(number)

        protocol.serve(step, deepspeed=deepspeed.__version__)
        dist.broadcast(torch.tensor([-1]), 0)
        return
    while True:
        number = torch.zeros(1, dtype=torch.long)
        dist.broadcast(number, 0)
        if number.item() < 0:
            return
        take(int(number.item()))


torch.manual_seed(0)
if sys.argv[2] == "deepspeed":
    deepspeed_worker(int(sys.argv[3]))
else:
    if sys.argv[3:]:
        choose_attention(sys.argv[3])
    one_process(sys.argv[2])
