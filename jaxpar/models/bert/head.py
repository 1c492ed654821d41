"""What comes after a BERT's blocks: masked words, and classes of rows or tokens."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpar.losses import cross_entropy
from jaxpar.mesh import TENSOR
from jaxpar.models.bert.config import BertConfig
from jaxpar.models.bert.embed import make_bert_norm
from jaxpar.models.block import gather_tokens, make_dropout
from jaxpar.models.layers import Embedding, Linear, named_param, project_to_logits
from jaxpar.models.mlp import activate


class WordHead(nnx.Module):
    """Predict words: a matmul, an activation, a norm, the transposed table, a bias.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` stream.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, vocab = config.width, config.vocab_size
        self.dense = _square(config, rngs)
        self.norm = make_bert_norm(config)
        self.logits = Embedding((vocab, width), ("vocab", "embed"), rngs=rngs)
        self.bias = named_param(jnp.zeros(vocab), ("vocab",))

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        labels_BT: Int[Array, "B T"] | None = None,
        weights_BT: Float[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"] | Float[Array, ""]:
        """Predict each word, or sum the loss of known ones.

        Args:
          x_BTD: the residual stream after the last block.
          labels_BT: the word to predict at each place; None for logits.
          weights_BT: of each label, 0 where there is none; None for 1.

        Returns:
          Logits, fp32; with labels, the weighted sum of their cross entropies.
        """
        tokens = self.config.sequence_parallel
        hidden_BTD, bias = self.dense.multiply(x_BTD), self.dense.bias
        assert bias is not None, "made with one"
        hidden_BTD = activate(self.config.activation, hidden_BTD, bias_F=bias[...])
        hidden_BTD = gather_tokens(self.norm(hidden_BTD), tokens)
        kernel_DV, bias_V = self.logits.table[...].T, self.bias[...]
        if labels_BT is None:
            logits = project_to_logits(hidden_BTD, kernel_DV, flatten=not tokens)
            return logits + bias_V
        loss = cross_entropy(
            *(hidden_BTD, kernel_DV, labels_BT, weights_BT),
            bias_V=bias_V,
            logits_dtype=self.config.logits_dtype,
            tokens_axis=TENSOR if tokens else None,
        )
        return loss.total


class Pooler(nnx.Module):
    """Read a row from its first token: a matmul and a tanh.

    Args:
      config: the shape of the model.
      rngs: for the ``params`` stream.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.dense = _square(config, rngs)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        """Read the rows."""
        return jnp.tanh(self.dense(x_BTD[:, 0]))


class BertHead(nnx.Module):
    """The logits of a config's task, or for masked words their loss.

    Args:
      config: the shape of the model, and its task.
      rngs: for the ``params`` and ``dropout`` streams.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        classes = functools.partial(_classes, config, rngs=rngs)
        task = config.task
        self.pooler = Pooler(config, rngs=rngs) if config.has_pooler else None
        self.words = WordHead(config, rngs=rngs) if config.predicts_words else None
        self.sentence = classes(2) if task == "pretraining" else None
        is_classifier = not config.predicts_words
        self.classifier = classes(config.num_labels) if is_classifier else None
        self.dropout = make_dropout(config.dropout, rngs) if is_classifier else None

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        *,
        labels_BT: Int[Array, "B T"] | None = None,
        weights_BT: Float[Array, "B T"] | None = None,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Predict.

        Args:
          x_BTD: the residual stream after the last block.
          labels_BT: of masked words, the word to predict at each place; None for
            logits.
          weights_BT: of each label; None for 1.

        Returns:
          fp32: of "tokens" logits [B, T, num_labels]; of "sequence" [B, num_labels]; of
          "masked" the words' [B, T, V], or with labels the weighted sum of their cross
          entropies; of "pretraining" a pair of that and the sentences' logits [B, 2].
        """
        tokens = self.config.sequence_parallel
        if self.words is None:
            return self._classify(gather_tokens(x_BTD, tokens))
        words = self.words(x_BTD, labels_BT, weights_BT)
        if self.pooler is None or self.sentence is None:
            return words
        pooled_BD = self.pooler(gather_tokens(x_BTD, tokens))
        return words, _logits_of(self.sentence, pooled_BD)

    def _classify(self, x_BTD: jax.Array) -> jax.Array:
        assert self.classifier is not None, "a task without words has classes"
        read = x_BTD if self.pooler is None else self.pooler(x_BTD)
        if self.dropout is not None:
            read = self.dropout(read)
        return _logits_of(self.classifier, read)


def _square(config: BertConfig, rngs: nnx.Rngs) -> Linear:
    shape, flatten = (config.width, config.width), not config.sequence_parallel
    return Linear(shape, ("embed", None), flatten=flatten, rngs=rngs)


def _classes(config: BertConfig, num: int, *, rngs: nnx.Rngs) -> Linear:
    return Linear((config.width, num), ("embed", None), rngs=rngs)


def _logits_of(classifier: Linear, read: jax.Array) -> jax.Array:
    """Logits of few classes, in fp32."""
    return classifier(read).astype(jnp.float32)
