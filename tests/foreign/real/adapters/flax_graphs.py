"""The example of google/flax on graphs: each call takes several, packed into one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar import Weighted
from tests.foreign.real.adapters.flax_linen import FLAX
from tests.foreign.real.checkouts import Checkouts
from tests.foreign.real.programs import KEY, Program

PACKS = 8
LABELS = 8


def graph_net(checkouts: Checkouts) -> Program:
    """A GraphNet with a mean over the labels that are there."""
    folder = "examples/ogbg_molpcba"
    jraph = checkouts.load(FLAX, folder, "jraph")
    models = checkouts.load(FLAX, folder, "models")
    train = checkouts.pick(
        FLAX,
        f"{folder}/train.py",
        "binary_cross_entropy_with_mask",
        "replace_globals",
        "get_valid_mask",
    )

    def sums(model: Any, graphs: Any) -> tuple[jax.Array, jax.Array]:
        labels = graphs.globals
        rngs = {"dropout": jax.random.key(KEY)}
        logits = model(train.replace_globals(graphs), rngs=rngs).globals
        mask = train.get_valid_mask(labels, graphs)
        loss = train.binary_cross_entropy_with_mask(
            logits=logits, labels=labels, mask=mask
        )
        return jnp.sum(jnp.where(mask, loss, 0)), jnp.sum(mask)

    def loss(model: Any, packs: Any) -> jax.Array:
        total, weight = jax.vmap(lambda graphs: sums(model, graphs))(packs)
        return total.sum() / weight.sum()

    def make_pack(rng: np.random.Generator) -> Any:
        graphs = [make_graph(jraph, rng) for _ in range(3)]
        return jraph.pad_with_graphs(jraph.batch_np(graphs), 32, 64, 4)

    def make_batch(rng: np.random.Generator) -> Any:
        packs = [make_pack(rng) for _ in range(PACKS)]
        return jax.tree.map(lambda *x: np.stack(x), *packs)

    return Program(
        models.GraphNet(
            latent_size=16,
            num_mlp_layers=2,
            message_passing_steps=2,
            output_globals_size=LABELS,
            dropout_rate=0.1,
            deterministic=False,
            use_edge_model=True,
        ),
        loss,
        optax.adam(1e-3),
        make_batch,
        loss_fn=lambda model, graphs: Weighted(*sums(model, graphs)),
        packs=True,
    )


def make_graph(jraph: Any, rng: np.random.Generator) -> Any:
    """Make a molecule, some of whose labels are missing (NaN)."""
    num_nodes, num_edges = rng.integers(3, 10), rng.integers(4, 20)
    labels = rng.integers(0, 2, (1, LABELS)).astype(np.float32)
    labels[rng.uniform(size=labels.shape) < 0.2] = np.nan
    ends = rng.integers(0, num_nodes, (2, num_edges), dtype=np.int32)
    return jraph.GraphsTuple(
        n_node=np.array([num_nodes]),
        n_edge=np.array([num_edges]),
        nodes=rng.normal(size=(num_nodes, 9)).astype(np.float32),
        edges=rng.normal(size=(num_edges, 3)).astype(np.float32),
        senders=ends[0],
        receivers=ends[1],
        globals=labels,
    )
