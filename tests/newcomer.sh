#!/usr/bin/env bash
# A newcomer's first day, by the documents, in a fresh clone: install, a model and data
# of one's own, change and go on, another mesh, a Slurm job, a report.
#
#   tests/newcomer.sh FOLDER    an empty one; it needs a network to install from
#
# tests/multiprocess/test_newcomer.py runs it where Slurm answers.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
folder=$(mkdir -p "$1" && cd "$1" && pwd -P)
unset PYTHONPATH VIRTUAL_ENV
# Of a `make test-launch` that runs this: its variables are not the newcomer's.
unset MAKEFLAGS MFLAGS MAKEOVERRIDES MAKELEVEL

step() {
  echo
  echo "== $*"
}

# logged RUN STEP: whether the run's log has a step, and no step twice.
logged() {
  .venv/bin/python - "$1" "$2" <<'PYTHON'
import json, sys
lines = open(f"{sys.argv[1]}/metrics.jsonl").read().splitlines()
steps = [r["step"] for r in map(json.loads, lines) if "train/loss" in r]
assert steps == list(range(1, int(sys.argv[2]) + 1)), steps
PYTHON
}

step "install"
git clone --quiet "$repository" "$folder/jaxpar"
cd "$folder/jaxpar"
make --no-print-directory setup EXTRAS=plot
.venv/bin/jaxpar --version
.venv/bin/jaxpar recipes list

step "my data: the documentation in Python's library, as rows"
.venv/bin/python - <<'PYTHON'
import ast, json, pathlib, sysconfig

with open("notes.jsonl", "w", encoding="utf-8") as file:
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            kinds = ast.FunctionDef | ast.ClassDef | ast.Module
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text:
                print(json.dumps({"text": text}), file=file)
PYTHON
wc -l notes.jsonl

step "my model"
cat >mine.py <<'PYTHON'
"""Train a model of mine on my notes."""

import dataclasses

import jax
import optax
from flax import nnx

import jaxpar
from jaxpar.data import DataConfig, Loader


@dataclasses.dataclass(frozen=True)
class Config(jaxpar.StartOptions, DataConfig):
    """One run."""

    mesh: jaxpar.MeshShape = jaxpar.MeshShape(data=2)
    zero: int = 3
    batch_size: int = 16
    steps: int = 20
    schedule_steps: int | None = None
    rate: float = 1e-2
    out: str = "runs/mine"


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 32, rngs=rngs)
        self.mix = nnx.Conv(32, 64, 8, padding="CAUSAL", rngs=rngs)
        self.out = nnx.Linear(64, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.out(nnx.gelu(self.mix(self.embed(tokens))))


def loss_fn(model, batch):
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    logits = model(inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def main(config):
    mesh = jaxpar.choose_mesh(config.mesh, on_cpu=config.mesh)
    corpus = config.open_data()
    run = jaxpar.open_run(config.out, config, {"sha256": corpus.sha256})
    corpus, config = corpus.for_run(run.folder, 256), run.config
    size = {"batch_size": config.batch_size, "seq_len": 64}
    loader = Loader(corpus.train, **size)
    held = list(Loader(corpus.heldout, repeat=False, num_batches=4, **size))
    rate = optax.cosine_decay_schedule(config.rate, config.schedule_steps)
    engine = jaxpar.initialize(
        model=lambda rngs: Model(rngs),
        loss_fn=loss_fn,
        optimizer=optax.inject_hyperparams(optax.adamw)(rate),
        sample_batch=loader.sample_batch,
        mesh=mesh,
        zero=config.zero,
    )
    print(engine)
    jaxpar.train(
        engine,
        loader,
        run,
        steps=config.steps,
        save_every=10,
        evaluate=lambda: jaxpar.mean_loss(engine, held),
        tokens_per_step=config.batch_size * 64,
    )


if __name__ == "__main__":
    jaxpar.run_recipe(main, Config, __doc__)
PYTHON
.venv/bin/python mine.py --data notes.jsonl
logged runs/mine 20

step "a mistake is answered in a line"
if .venv/bin/python mine.py --data notes.jsonl --zero 5 --out runs/wrong 2>said; then
  echo "--zero 5 was taken" >&2
  exit 1
fi
cat said
[[ $(wc -l <said) -le 3 ]]

step "longer, on another mesh and at another stage"
.venv/bin/python mine.py --data notes.jsonl --steps 30 --mesh.data 4 --zero 1
logged runs/mine 30

step "at another rate and batch"
if .venv/bin/python mine.py --data notes.jsonl --steps 40 --rate 0.003 2>said; then
  echo "another rate was taken without --change" >&2
  exit 1
fi
grep -q -- --change said
.venv/bin/python mine.py --data notes.jsonl --steps 40 --schedule-steps 60 \
  --rate 0.003 --batch-size 32 --change
logged runs/mine 40

step "a Slurm job that begins with its parameters"
if command -v sbatch >/dev/null && sinfo --noheader >/dev/null 2>&1; then
  .venv/bin/jaxpar launch slurm --out runs/job --processes 2 --sbatch job.sh \
    mine.py -- --data notes.jsonl --steps 10 --init-from runs/mine
  sbatch --wait job.sh || { cat runs/job/launch/*.log; exit 1; }
  logged runs/job 10
else
  echo "no Slurm here: left out"
fi

step "what became of it"
.venv/bin/jaxpar ckpt ls runs/mine
.venv/bin/jaxpar ckpt export runs/mine runs/exported
.venv/bin/jaxpar report runs/mine --out mine.html
grep -q "<svg" mine.html
.venv/bin/jaxpar recipes copy pretrain copied
.venv/bin/python copied/pretrain.py --model tiny --model.num-layers 2 --data notes.jsonl --steps 4 \
  --optimizer lion --optimizer.bits 8 --eval-batches 1 --out runs/pretrain
logged runs/pretrain 4
echo
echo "all of it works"
