"""A T5 in fp64 NumPy, row by row, layer by layer, query by query."""

import math
from typing import Any

import numpy as np

from jaxpar.models import T5Config

Params = dict[str, Any]


def bucket(distance: int, num: int, most: int, *, causal: bool) -> int:
    """The bucket of a key's place minus its query's, as the paper words it."""
    first = 0
    if causal:
        length = max(-distance, 0)
    else:
        num //= 2
        first, length = (num if distance > 0 else 0), abs(distance)
    exact = num // 2
    if length < exact:
        return first + length
    share = math.log(length / exact) / math.log(most / exact)
    return first + min(exact + int(share * (num - exact) + 1e-9), num - 1)


def attend(
    x_TD: np.ndarray,
    memory_SD: np.ndarray,
    layer: Params,
    visible_TS: np.ndarray,
    bias_NTS: np.ndarray,
) -> np.ndarray:
    heads, (length, _) = len(bias_NTS), x_TD.shape
    given = {"query": x_TD, "key": memory_SD, "value": memory_SD}
    q, k, v = (
        (x @ layer[name]["kernel"]).reshape(len(x), heads, -1)
        for name, x in given.items()
    )
    out = np.zeros_like(q)
    for t, n in np.ndindex(length, heads):
        seen = np.flatnonzero(visible_TS[t])
        weights = np.exp(k[seen, n] @ q[t, n] + bias_NTS[n, t, seen])
        out[t, n] = weights / weights.sum() @ v[seen, n]
    return out.reshape(length, -1) @ layer["output"]["kernel"]


def bias_of(table_RN: np.ndarray, length: int, config: T5Config, causal: bool) -> Any:
    how = {"num": config.num_buckets, "most": config.max_distance, "causal": causal}
    found = [[bucket(s - t, **how) for s in range(length)] for t in range(length)]
    return table_RN[np.array(found)].transpose(2, 0, 1)


def normalise(x: np.ndarray, layer: Params) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * layer["scale"]


def mlp(x: np.ndarray, layer: Params) -> np.ndarray:
    up = x @ layer["up"]["kernel"]
    if "gate" not in layer:
        return np.maximum(up, 0) @ layer["down"]["kernel"]
    gate = x @ layer["gate"]["kernel"]
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + np.tanh(inner)) * up @ layer["down"]["kernel"]


def layers_of(stacked: Params, count: int) -> list[Params]:
    if isinstance(stacked, dict):
        own = {name: layers_of(x, count) for name, x in stacked.items()}
        return [{name: x[i] for name, x in own.items()} for i in range(count)]
    return list(stacked)


def logits_of_row(
    params: Params,
    config: T5Config,
    read_S: np.ndarray,
    written_T: np.ndarray,
    segments_S: np.ndarray,
    segments_T: np.ndarray,
) -> np.ndarray:
    """Logits [T, V] of one row."""
    table = params["embed"]["embedding"]["table"]
    x, own = table[read_S], segments_S[:, None] == segments_S
    bias = bias_of(params["embed"]["encoder_bias"], len(x), config, False)
    for layer in layers_of(params["encoder"], config.num_layers):
        y = normalise(x, layer["attention_norm"])
        x = x + attend(y, y, layer["attention"], own, bias)
        x = x + mlp(normalise(x, layer["mlp_norm"]), layer["mlp"])
    memory, y = normalise(x, params["between"]["final_norm"]), table[written_T]
    cross = segments_T[:, None] == segments_S
    own = np.tril(segments_T[:, None] == segments_T)
    bias = bias_of(params["embed"]["decoder_bias"], len(y), config, True)
    none = np.zeros((config.num_heads, len(y), len(x)))
    for layer in layers_of(params["decoder"], config.decoder_layers):
        z = normalise(y, layer["attention_norm"])
        y = y + attend(z, z, layer["attention"], own, bias)
        z = normalise(y, layer["cross_norm"])
        y = y + attend(z, memory, layer["cross_attention"], cross, none)
        y = y + mlp(normalise(y, layer["mlp_norm"]), layer["mlp"])
    y = normalise(y, params["head"]["final_norm"])
    if config.tied_embedding:
        return y / np.sqrt(config.width) @ table.T
    return y @ params["head"]["logits"]["kernel"]
