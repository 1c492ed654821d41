import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.jaxprs.evaluate import flops
from jaxpar.model.network import WholeModel
from jaxpar.models import DecoderConfig, make_decoder
from jaxpar.models.decoder import sampling
from jaxpar.models.experts.config import ExpertsConfig
from jaxpar.sparse_attention import LocalSlidingWindow

CONFIG = DecoderConfig(vocab_size=17, seq_len=6, num_layers=2, num_heads=4, width=16)
SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "seq_len": 48,
    "num_layers": 2,
    "num_heads": 4,
    "width": 32,
}
PROMPT = jnp.array([[1, 2, 3], [4, 5, 6]])
KEY = jax.random.key(0)
MakeGPT = Callable[[DecoderConfig], WholeModel]
generate = functools.partial(sampling.generate, config=CONFIG)


@jax.jit
def call(model: WholeModel, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def greedy(
    model: WholeModel,
    prompt: np.ndarray | jax.Array,
    num_tokens: int,
    seq_len: int = CONFIG.seq_len,
) -> np.ndarray:
    """Continue by one plain call per token, on the tokens of the window alone."""
    tokens = np.asarray(prompt)
    for _ in range(num_tokens):
        window = tokens[:, -seq_len:]
        last = window.shape[1] - 1
        # Filled up to one length, for one compilation; causality hides the filler.
        window = np.pad(window, ((0, 0), (0, seq_len - last - 1)), mode="edge")
        logits = np.asarray(call(model, window))
        tokens = np.concatenate([tokens, logits[:, last : last + 1].argmax(-1)], 1)
    return tokens


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_generate_at_zero_temperature_is_greedy(
    num_tokens: int, make_random_gpt: MakeGPT
):
    model = make_random_gpt(CONFIG)
    got = generate(model, PROMPT, num_tokens, key=KEY, temperature=0.0)
    np.testing.assert_array_equal(got, greedy(model, PROMPT, num_tokens))


@pytest.mark.parametrize("length", [6, 10])
def test_a_full_window_goes_on_from_its_last_half(
    length: int, make_random_gpt: MakeGPT
):
    model = make_random_gpt(CONFIG)
    prompt = np.random.default_rng(0).integers(0, 17, size=(2, length))
    got = generate(model, jnp.asarray(prompt), 7, key=KEY, temperature=0.0)
    right = greedy(model, prompt[:, -6:], 1)
    for added in (4, 2):  # From three tokens four are drawn until six are there.
        right = np.concatenate([right, greedy(model, right[:, -3:], added)[:, 3:]], 1)
    np.testing.assert_array_equal(got[:, length:], right[:, 6:])


FAMILIES: dict[str, DecoderConfig] = {
    "grouped heads, rotary": DecoderConfig(
        **SIZES, num_kv_heads=2, positions="rotary", norm="rmsnorm", qk_norm="heads"
    ),
    "windows and caps": DecoderConfig(
        **{**SIZES, "num_layers": 5},
        positions="rotary",
        window=4,
        global_every=2,
        local_rotary_base=100.0,
        attention_softcap=2.0,
        logits_softcap=3.0,
        post_norm=True,
    ),
    "experts": DecoderConfig(
        **SIZES,
        activation="swiglu",
        bias=False,
        experts=ExpertsConfig(num=4, every=2),
    ),
    "sparse pattern": DecoderConfig(
        **SIZES,
        attention=LocalSlidingWindow(num_heads=4, block=16),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_tokens_are_those_of_whole_passes(name: str, make_random_gpt: MakeGPT):
    config = FAMILIES[name]
    model = make_random_gpt(config)
    prompt = np.random.default_rng(0).integers(0, 17, size=(2, 5))
    got = sampling.generate(
        model, jnp.asarray(prompt), 35, config=config, key=KEY, temperature=0.0
    )
    np.testing.assert_array_equal(got, greedy(model, prompt, 35, config.seq_len))


def test_a_token_costs_a_pass_over_itself(make_random_gpt: MakeGPT):
    config = FAMILIES["grouped heads, rotary"]
    model = make_random_gpt(config)

    def cost(num_tokens: int) -> float:
        program = jax.make_jaxpr(
            lambda m: sampling._generate(
                *(m, PROMPT, KEY, jnp.float32(1.0), jnp.int32(0)),
                config=config,
                num_tokens=num_tokens,
                is_greedy=True,
            )
        )(model)
        return flops(program.jaxpr.eqns)

    whole = flops(jax.make_jaxpr(lambda m: m(PROMPT))(model).jaxpr.eqns) / 3
    assert (cost(30) - cost(10)) / 20 < 1.5 * whole


def test_generate_draws_from_the_softmax_of_scaled_logits(make_random_gpt: MakeGPT):
    model = make_random_gpt(CONFIG)
    prompt = jnp.tile(PROMPT[:1], (4000, 1))
    drawn = generate(model, prompt, 1, key=KEY, temperature=2.0)[:, -1]
    frequency = np.bincount(drawn, minlength=17) / 4000
    logits = call(model, PROMPT[:1])[0, -1]
    want = jax.nn.softmax(logits / 2.0)
    # Four standard deviations of a frequency of 1/2.
    np.testing.assert_allclose(frequency, want, atol=4 * 0.5 / np.sqrt(4000))


def test_generate_depends_on_the_key_alone(make_random_gpt: MakeGPT):
    model = make_random_gpt(CONFIG)
    first = generate(model, PROMPT, 20, key=KEY)
    np.testing.assert_array_equal(first, generate(model, PROMPT, 20, key=KEY))
    other = generate(model, PROMPT, 20, key=jax.random.key(1))
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(first[:, :3], PROMPT)


def test_generate_draws_afresh_at_every_step():
    model = make_decoder(CONFIG).init(0, PROMPT)
    model = model.with_params(jax.tree.map(jnp.zeros_like, model.params))
    drawn = generate(model, PROMPT[:1], 20, key=KEY)[0, 3:]
    # Of 17 equally likely tokens, 20 draws show 12 on average.
    assert len(np.unique(drawn)) > 6


def test_generate_drops_nothing(make_random_gpt: MakeGPT):
    plain = make_random_gpt(CONFIG)
    dropping = make_random_gpt(dataclasses.replace(CONFIG, dropout=0.5))
    got = generate(dropping, PROMPT, 5, key=KEY, temperature=0.0)
    np.testing.assert_array_equal(got, greedy(plain, PROMPT, 5))


def test_generate_nothing_returns_the_prompt(make_random_gpt: MakeGPT):
    got = generate(make_random_gpt(CONFIG), PROMPT, 0, key=KEY)
    np.testing.assert_array_equal(got, PROMPT)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "temperature", "message"),
    [
        (
            PROMPT[:, :0],
            1,
            1.0,
            r"prompt_BT has shape \(2, 0\), but needs at least one",
        ),
        (PROMPT, -1, 1.0, r"num_tokens=-1 must be at least 0"),
        (PROMPT, 1, -0.5, r"temperature=-0.5 must be at least 0"),
    ],
)
def test_generate_bad_input_raises(
    prompt: jax.Array,
    num_tokens: int,
    temperature: float,
    message: str,
    make_random_gpt: MakeGPT,
):
    with pytest.raises(ValueError, match=message):
        generate(
            make_random_gpt(CONFIG),
            prompt,
            num_tokens,
            key=KEY,
            temperature=temperature,
        )
