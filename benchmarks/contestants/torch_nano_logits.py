"""Logits of a model that nanoGPT has trained: CHECKOUT CHECKPOINT WINDOWS OUT.

WINDOWS is an .npy of tokens [N, T + 1], OUT gets fp32 logits [N, T, V]. Runs in an
environment that has torch, and nothing of jaxpar's.
"""

import sys

import numpy as np
import torch

checkout, checkpoint, windows, out = sys.argv[1:]
sys.path.insert(0, checkout)

from model import GPT, GPTConfig  # noqa: E402 - of the checkout

saved = torch.load(checkpoint, map_location="cpu", weights_only=False)
model = GPT(GPTConfig(**saved["model_args"])).eval()
model.load_state_dict(saved["model"])
rows = torch.from_numpy(np.load(windows).astype(np.int64))
with torch.no_grad():
    # Without targets nanoGPT gives the last position alone.
    found = [
        model(x[:, :-1].contiguous(), x[:, 1:].contiguous())[0].numpy()
        for x in rows.split(64)
    ]
np.save(out, np.concatenate(found))
