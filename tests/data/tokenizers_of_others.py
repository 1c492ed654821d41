"""What tokenizers do models come with? Made by the library that theirs are of."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = ["A little story, number 1.", "größer, π and so on\n", "What follows 12?"] * 20


def byte_level(*special: str, size: int = 400) -> Tokenizer:
    """Byte pairs as GPT-2's, with tokens that no text has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=alphabet,
        special_tokens=list(special),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def bert_like() -> Tokenizer:
    """Whole words, cut at 8 tokens and padded, with tokens around each text."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    tokenizer.train_from_iterator(
        TEXT, trainers.WordLevelTrainer(special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    """Write a folder as a model's, with a config beside the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path
