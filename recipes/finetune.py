"""Fine-tune a Hugging Face model on your rows, whole or by low-rank adapters, sharded.

`finetune.py --base FOLDER --data rows.jsonl` trains every parameter at ZeRO 3 on every
accelerator; `--lora.rank 8` trains adapters beside frozen kernels. Rows have a prompt
and a completion, messages, or a text. It ends with a folder for transformers, and one
of the adapters for PEFT. Run it again to go on; `--out` names another run.
"""

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

import jaxpar
from jaxpar import models
from jaxpar.data import DataConfig, Loader, batch_shapes, rows_of
from jaxpar.launch import choose_meshes
from jaxpar.models.hf.pretrained import Pretrained
from jaxpar.models.lora import NO_LORA, LoraConfig
from jaxpar.optim import CommunicationConfig, Decay
from jaxpar.training.rate_config import RateConfig

CPU_MESH = jaxpar.MeshShape(data=2, tensor=2)


@dataclasses.dataclass(frozen=True)
class Config(jaxpar.StartOptions, DataConfig, CommunicationConfig, RateConfig):
    """One run of fine-tuning."""

    base: str = ""
    """The Hugging Face folder: config.json, .safetensors and tokenizer.json."""
    lora: LoraConfig = NO_LORA
    """Adapters; with rank 0 every parameter is trained."""
    adapter: str = ""
    """A folder of PEFT whose adapters are trained on, in place of --lora."""
    mesh: jaxpar.MeshShape = dataclasses.field(default_factory=jaxpar.MeshShape)
    """Devices by axis; by default all accelerators on data, or data 2 x tensor 2."""
    precision: str = "fp32"
    """What the model computes in: fp32, bf16 or fp16. Masters are fp32."""
    seq_len: int = 512
    """Tokens of a row, in which documents are packed."""
    batch_size: int = 8
    """Rows of the global batch."""
    accumulate: int = 1
    """Micro-batches a step."""
    steps: int = 200
    """Training steps; a run may go on with more."""
    learning_rate: float = 2e-5
    """Peak of the schedule; see --decay."""
    decay: Decay = "cosine"
    """Of the learning rate, after a linear warm-up over a tenth of the schedule."""
    clip_norm: float = 1.0
    """Largest global norm of the gradients."""
    remat: str = "none"
    """Activation checkpointing of each block: none, full, dots or save-names."""
    eval_batches: int = 32
    """Held-out batches to evaluate on."""
    save_every: int = 50
    """Steps between checkpoints."""
    seed: int = 0
    """Of new adapters and of the data's order."""
    out: str = "runs/finetune"
    """The run's folder."""


def open_base(config: Config) -> Pretrained:
    """The model that is tuned."""
    if not config.base:
        raise ValueError(
            "base='' must be the folder of a Hugging Face model, such as --base "
            "Llama-3.2-1B: its config.json, .safetensors and tokenizer.json."
        )
    how: dict[str, Any] = {"remat": config.remat, "lora": config.lora}
    return models.from_huggingface(config.base, adapter=config.adapter or None, **how)


def build(
    config: Config,
    mesh: jax.sharding.Mesh | None = None,
    ours: Pretrained | None = None,
) -> jaxpar.Engine:
    """Make the engine of a config, on its own mesh or another."""
    ours = ours or open_base(config)
    schedule = config.make_schedule(config.learning_rate, config.steps)
    return jaxpar.initialize(
        model=ours.model,
        loss_fn=ours.loss_fn,
        optimizer=config.joined(optax.adamw(schedule, weight_decay=0.0), config.mesh),
        sample_batch=batch_shapes(config.batch_size, config.seq_len, pack=True),
        mesh=mesh or jaxpar.choose_mesh(config.mesh, on_cpu=CPU_MESH),
        zero=config.zero_stage(),
        precision=config.precision,
        accumulate=jaxpar.scaled_accumulation(config.accumulate),
        clip_norm=config.clip_norm,
        trainable=nnx.LoRAParam if ours.config.lora.rank else None,
        seed=config.seed,
    )


def main(config: Config) -> None:
    """Tune, evaluate and save, on one mesh and then on another; write the model."""
    meshes = choose_meshes(config.mesh, config.steps, on_cpu=CPU_MESH)
    ours = open_base(config)
    tokenizer = Path(config.tokenizer or Path(config.base, "tokenizer.json"))
    opened = dataclasses.replace(config, tokenizer=str(tokenizer)).open_data(pack=True)
    run = jaxpar.open_run(config.out, config, {"corpus_sha256": opened.sha256})
    corpus, heldout, _ = opened.for_run(run.folder, ours.config.vocab_size)
    rows = functools.partial(rows_of, seq_len=config.seq_len, pack=True)
    loader = Loader(rows(corpus), seed=config.seed, batch_size=config.batch_size)
    how: Any = {"repeat": False, "num_batches": config.eval_batches}
    held, engine = Loader(rows(heldout), batch_size=config.batch_size, **how), None
    for mesh, steps in meshes:
        if steps < config.steps and steps <= (run.newest() or 0):
            continue
        engine = build(run.config, mesh, ours)
        print(engine.explain().summary)
        ours.load(engine)
        if config.adapter:
            ours.load_adapter(engine, config.adapter)
        jaxpar.train(
            engine,
            loader,
            run,
            steps=steps,
            total_steps=config.steps,
            save_every=config.save_every,
            evaluate=functools.partial(jaxpar.mean_loss, engine, held),
            tokens_per_step=config.batch_size * config.seq_len,
        )
    if jax.process_count() > 1:
        return  # `jaxpar hf export` writes the model of the checkpoint.
    saves = {"model": ours.save, "adapter": ours.save_adapter}
    for name, save in list(saves.items())[: 2 if ours.config.lora.rank else 1]:
        shutil.rmtree(run.folder / name, ignore_errors=True)
        save(engine, run.folder / name)
        print(f"{name:8} {run.folder / name}")
    shutil.copy(tokenizer, run.folder / "model")


if __name__ == "__main__":
    jaxpar.run_recipe(main, Config, __doc__)
