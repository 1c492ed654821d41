"""Write a random model of `transformers`: FOLDER NAME FIELDS, the config's, as JSON."""

import json
import sys
from typing import Any

import torch
import transformers

CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "Bert": "BertForMaskedLM",
    "T5": "T5ForConditionalGeneration",
    "ViT": "ViTForImageClassification",
}
"""Name -> the class of its model; by default NAMEForCausalLM."""


def class_of(name: str) -> Any:
    """The class of a model by its name."""
    return getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))


def main() -> None:
    """Write the model, in bf16 if it is large."""
    folder, name, fields = sys.argv[1:]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**json.loads(fields))
    with torch.device("meta"):
        model = class_of(name)(config)
    if sum(x.numel() for x in model.parameters()) > 1e8:
        model = model.to(torch.bfloat16).to_empty(device="cpu")
        with torch.no_grad():
            for param in model.parameters():
                param.uniform_(-0.1, 0.1)
    else:
        model = class_of(name)(config)
    if json.loads(fields).get("tie_word_embeddings") is False:
        # Version 5 ties what it makes, and reads published heads as they are.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder, max_shard_size="1200MB")


if __name__ == "__main__":
    main()
