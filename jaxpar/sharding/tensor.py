"""Which dims does tensor parallelism split: the column, row and vocabulary rules.

A *column*-parallel matmul splits its output dim (heads, MLP hidden), the *row*-parallel
matmul after it splits its input dim, so the pair needs one reduction. The vocabulary is
split for the embedding, the logits and their loss, over pipeline stages too, so that
every stage does its share of them. With named dims, one table holds all three rules: a
kernel ``("embed", "mlp")`` is column-parallel, ``("mlp",
"embed")`` row-parallel, a table ``("vocab", "embed")`` vocabulary-parallel.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from jaxpar.mesh import DATA, EXPERT, PIPE, REPLICA, TENSOR

VOCAB = (PIPE, TENSOR)
"""The axes that split the vocabulary; pipe only where there is a pipeline."""

LOGICAL_RULES: dict[str, str | tuple[str, ...] | None] = {
    "vocab": VOCAB,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "expert": EXPERT,
    "embed": None,
    "head_dim": None,
    "layers": None,
    "positions": None,
}
"""The logical names that jaxpar's models use, and their mesh axes."""

AXIS_NAMES = {
    TENSOR: TENSOR,
    "model": TENSOR,
    "tp": TENSOR,
    PIPE: PIPE,
    DATA: DATA,
    "fsdp": DATA,
    REPLICA: REPLICA,
    EXPERT: EXPERT,
    "ep": EXPERT,
}
"""Axis names of models written for a mesh, and jaxpar's axis for each."""
