"""What does a trained model write: tokens drawn one at a time from its predictions."""

import functools
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxpar.model.network import WholeModel


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
    seq_len: int,
    key: jax.Array,
    temperature: float = 1.0,
) -> Int[Array, "B S"]:
    """Continue prompts, with dropout off.

    Each token is drawn after a full pass over the last `seq_len` tokens: there is no
    cache, so the cost per token is that of a full window. One compilation serves all
    temperatures above zero.

    Args:
      model: ``engine.model()``, or a model that `PipelineModel.init` made.
      prompt_BT: tokens to continue, all rows of one length, at least one.
      num_tokens: tokens to add to each row.
      seq_len: the longest row that the model takes (`DecoderConfig.seq_len`).
      key: of `jax.random`.
      temperature: divides the logits; 0 takes the most likely token each time.

    Returns:
      Prompts and continuations, [B, T + num_tokens].

    Raises:
      ValueError: if the prompt is empty, or num_tokens or temperature is negative.

    Example:
      >>> from jaxpar.models import decoder_config, make_decoder
      >>> prompt_BT = jnp.array([[72, 105]])
      >>> model = make_decoder(decoder_config("tiny", num_layers=1)).init(0, prompt_BT)
      >>> generate(model, prompt_BT, 3, seq_len=8, key=jax.random.key(0)).shape
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
    return _generate(
        model,
        prompt_BT,
        key,
        jnp.float32(temperature),
        seq_len=seq_len,
        num_tokens=num_tokens,
        is_greedy=temperature == 0,
    )


@functools.partial(jax.jit, static_argnames=("seq_len", "num_tokens", "is_greedy"))
def _generate(
    model: WholeModel,
    prompt_BT: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    seq_len: int,
    num_tokens: int,
    is_greedy: bool,
) -> jax.Array:
    prompt_length = prompt_BT.shape[1]
    length = prompt_length + num_tokens
    window = min(seq_len, length)
    tokens_BS = jnp.pad(prompt_BT, ((0, 0), (0, num_tokens)))

    def add_token(i: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        end = prompt_length + i
        start = jnp.maximum(end - window, 0)
        # Beyond `end` is padding, which causal attention does not see.
        window_BT = jax.lax.dynamic_slice_in_dim(tokens_BS, start, window, axis=1)
        hidden_BTD = model.run_blocks(window_BT)
        last_B1D = jax.lax.dynamic_slice_in_dim(hidden_BTD, end - 1 - start, 1, axis=1)
        logits_BV = model.run_head(last_B1D)[:, 0]
        if is_greedy:
            next_B = logits_BV.argmax(-1)
        else:
            scaled_BV = logits_BV / temperature
            next_B = jax.random.categorical(jax.random.fold_in(key, i), scaled_BV)
        return tokens_BS.at[:, end].set(next_B.astype(tokens_BS.dtype))

    return jax.lax.fori_loop(0, num_tokens, add_token, tokens_BS)


def continue_text(
    model: WholeModel,
    prompt_T: Int[np.ndarray, "T"],
    num_tokens: int,
    *,
    seq_len: int,
    tokenizer: Decoder | None = None,
    temperature: float = 0.3,
) -> str:
    """Continue a text.

    Args:
      model: the model.
      prompt_T: tokens to continue.
      num_tokens: tokens to add.
      seq_len: as for `generate`.
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
        seq_len=seq_len,
        key=jax.random.key(0),
        temperature=temperature,
    )
    added_T = np.asarray(tokens_BT[0, len(prompt_T) :])
    if tokenizer is not None:
        return tokenizer.decode(added_T.tolist())
    return bytes(added_T.astype(np.uint8)).decode(errors="replace")
