"""Which dims does tensor parallelism split: the column, row and vocabulary rules.

A *column*-parallel product splits its output dim (heads, MLP hidden), the *row*-
parallel one behind it splits its input dim, so that the pair needs one reduction;
the vocabulary is split for the embedding, the logits and their loss, over the stages of
a pipeline too, so that each does its share of them. Written as names of dims, one
table is all three: a kernel ``("embed", "mlp")`` is column-parallel, ``("mlp",
"embed")`` row-parallel, a table ``("vocab", "embed")`` vocabulary-parallel.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from jaxpar.mesh import DATA, PIPE, TENSOR

VOCAB = (PIPE, TENSOR)
"""The axes of the vocabulary; pipe counts where there is a pipeline."""

LOGICAL_RULES: dict[str, str | tuple[str, ...] | None] = {
    "vocab": VOCAB,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "embed": None,
    "head_dim": None,
    "layers": None,
    "positions": None,
}
"""The logical names that jaxpar's models use, and the mesh axis each goes to."""

AXIS_NAMES = {
    TENSOR: TENSOR,
    "model": TENSOR,
    "tp": TENSOR,
    PIPE: PIPE,
    DATA: DATA,
    "fsdp": DATA,
}
"""What models written for a mesh call its axes, and which axis that is here."""
