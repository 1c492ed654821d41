"""As script.py; each process notes of what job it was, and the rows it read first."""

import json
from pathlib import Path

import jax
import numpy as np

from jaxpar.cli.recipe_flags import parse
from jaxpar.data import Loader, Tokens
from tests.multiprocess import script


def main(config: script.Config) -> None:
    script.main(config)
    tokens = np.random.default_rng(config.corpus).integers(0, 64, 4000, dtype=np.uint8)
    loader = Loader(
        Tokens((tokens,), files=("random",)),
        batch_size=script.ROWS,
        seq_len=script.LENGTH,
        seed=3,
    )
    seen = {
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "rows": next(loader)["tokens"].tolist(),
    }
    path = Path(config.out, f"seen-{jax.process_index()}.json")
    path.write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main(parse(script.Config, __doc__))
