"""The family's tokenizer: byte-level BPE trained on the text and the stories, split into words the way Qwen's is."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import stories
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


END = "<|endoftext|>"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizer splits text into words."""


def story_words() -> list[str]:
    """Every word, with its leading space, that a story can be about."""
    words = stories.NAMES + stories.THINGS + stories.PLACES + stories.COUNTABLES + stories.NUMBERS
    return [" " + word for word in words]


def _corpus(text: list[str], seed: int) -> Iterator[str]:
    yield from text
    rng = random.Random(seed)
    for i in range(20_000):
        kind = stories.KINDS[i % len(stories.KINDS)]
        yield "".join(piece for piece, _ in stories.told_story(rng, kind, 8, "train"))
    # Often enough that every word of the stories is merged into one token.
    yield "".join(story_words() * 2_000)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer, under the class name that every version of transformers knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def train_tokenizer(text: list[str], size: int = 3072, seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the tokenizer; raises if a word of the stories did not become a single token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(text, seed), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    split = [word for word in story_words() if len(fast.encode(word, add_special_tokens=False)) != 1]
    if split:
        raise ValueError(f"not single tokens: {split}")
    return fast
