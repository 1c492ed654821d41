"""What does a trained model write: tokens drawn one at a time from its predictions."""

import dataclasses
import functools
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxpar.model.network import WholeModel
from jaxpar.models.cached_attention import CachedAttention
from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.models.decoder.model import make_decoder


@runtime_checkable
class Decoder(Protocol):
    """What turns tokens into text, such as a `tokenizers.Tokenizer`.

    The package is not imported: a machine that only trains may lack it.
    """

    def decode(self, ids: list[int], /) -> str:
        """The text of tokens."""
        ...


def generate(
    model: WholeModel,
    prompt_BT: Int[Array, "B T"],
    num_tokens: int,
    *,
    config: DecoderConfig,
    key: jax.Array,
    temperature: float = 1.0,
) -> Int[Array, "B S"]:
    """Continue prompts, with dropout off and without dropping a token by capacity.

    Keys and values are cached, so that each token costs one pass over itself. A row
    that has reached `config.seq_len` tokens goes on from its last half, which is read
    anew. One compilation serves all temperatures above zero.

    Args:
      model: ``engine.model()``, or a model that `PipelineModel.init` made, of
        `make_decoder`.
      prompt_BT: tokens to continue, all rows of one length, at least one.
      num_tokens: tokens to add to each row.
      config: of the model.
      key: of `jax.random`.
      temperature: divides the logits; 0 takes the most likely token each time.

    Returns:
      Prompts and continuations, [B, T + num_tokens].

    Raises:
      ValueError: if the prompt is empty, or num_tokens or temperature is negative.

    Example:
      >>> from jaxpar.models import decoder_config, make_decoder
      >>> prompt_BT, config = jnp.array([[72, 105]]), decoder_config("tiny")
      >>> model = make_decoder(config).init(0, prompt_BT)
      >>> generate(model, prompt_BT, 3, config=config, key=jax.random.key(0)).shape
      (1, 5)
    """
    if prompt_BT.shape[1] == 0:
        raise ValueError(
            f"generate: prompt_BT has shape {prompt_BT.shape}, but needs at least one "
            "token per row to predict from."
        )
    if num_tokens < 0:
        raise ValueError(f"generate: num_tokens={num_tokens} must be at least 0.")
    if temperature < 0:
        raise ValueError(
            f"generate: temperature={temperature} must be at least 0; 0 takes the "
            "most likely token each time."
        )
    tokens_BT, drawn = jnp.asarray(prompt_BT), 0
    context_BT = tokens_BT[:, -config.seq_len :]
    while drawn < num_tokens:
        most = config.seq_len - context_BT.shape[1] + 1
        added_BS = _generate(
            model,
            context_BT,
            key,
            jnp.float32(temperature),
            jnp.int32(drawn),
            config=config,
            num_tokens=min(most, num_tokens - drawn),
            is_greedy=temperature == 0,
        )
        drawn += added_BS.shape[1]
        tokens_BT = jnp.concatenate([tokens_BT, added_BS], axis=1)
        context_BT = tokens_BT[:, -max(1, config.seq_len // 2) :]
    return tokens_BT


@functools.partial(jax.jit, static_argnames=("config", "num_tokens", "is_greedy"))
def _generate(
    model: WholeModel,
    context_BT: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    drawn: jax.Array,
    *,
    config: DecoderConfig,
    num_tokens: int,
    is_greedy: bool,
) -> jax.Array:
    """Tokens to add to a context, of which `drawn` have been drawn before."""
    rows, length = context_BT.shape
    cached = _with_cache(model, config, (rows, length + num_tokens - 1))

    def draw(logits_BV: jax.Array, number: jax.Array) -> jax.Array:
        if is_greedy:
            return logits_BV.argmax(-1).astype(context_BT.dtype)
        own = jax.random.fold_in(key, drawn + number)
        found = jax.random.categorical(own, logits_BV / temperature)
        return found.astype(context_BT.dtype)

    def add_token(carry: tuple, number: jax.Array) -> tuple[tuple, jax.Array]:
        cached, token_B = carry
        place = jnp.reshape(length + number - 1, (1, 1))
        logits_BV = _last_logits(cached, token_B[:, None], place)
        token_B = draw(logits_BV, number)
        return (cached, token_B), token_B

    positions = jnp.arange(length)[None]
    first_B = draw(_last_logits(cached, context_BT, positions), jnp.int32(0))
    numbers = jnp.arange(1, num_tokens)
    _, rest_SB = jax.lax.scan(add_token, (cached, first_B), numbers)
    return jnp.concatenate([first_B[:, None], rest_SB.T], axis=1)


def _last_logits(
    cached: WholeModel, tokens_BT: jax.Array, positions_1T: jax.Array
) -> jax.Array:
    """The logits behind the last token, [B, V]."""
    hidden = cached.run_blocks(tokens_BT, positions_BT=positions_1T)
    x_BTD = hidden["x"] if isinstance(hidden, dict) else hidden
    last = x_BTD[:, -1:]
    last = {**hidden, "x": last} if isinstance(hidden, dict) else last
    return cached.run_head(last)[:, 0]


def _with_cache(
    model: WholeModel, config: DecoderConfig, size: tuple[int, int]
) -> WholeModel:
    """The same model, whose blocks keep keys and values, of rows and of tokens."""
    experts = dataclasses.replace(config.experts, capacity_factor=None)
    config = dataclasses.replace(config, dropout=0.0, remat="none", experts=experts)
    made = make_decoder(
        config, make_attention=functools.partial(CachedAttention, *size)
    )
    one = jax.ShapeDtypeStruct((size[0], 1), jnp.int32)
    return made.with_state(model.params, one, positions_BT=one)


def continue_text(
    model: WholeModel,
    prompt_T: Int[np.ndarray, "T"],
    num_tokens: int,
    *,
    config: DecoderConfig,
    tokenizer: Decoder | None = None,
    temperature: float = 0.3,
) -> str:
    """Continue a text.

    Args:
      model: the model.
      prompt_T: tokens to continue.
      num_tokens: tokens to add.
      config: of the model.
      tokenizer: of the model's tokens; None for a vocabulary of bytes.
      temperature: as for `generate`; below 1, likely tokens become likelier.

    Returns:
      The added tokens as text; bytes that are not UTF-8 are replaced.
    """
    prompt_BT = jnp.asarray(prompt_T[None], jnp.int32)
    tokens_BT = generate(
        model,
        prompt_BT,
        num_tokens,
        config=config,
        key=jax.random.key(0),
        temperature=temperature,
    )
    added_T = np.asarray(tokens_BT[0, len(prompt_T) :])
    if tokenizer is not None:
        return tokenizer.decode(added_T.tolist())
    return bytes(added_T.astype(np.uint8)).decode(errors="replace")
