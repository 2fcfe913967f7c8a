"""Training rows: stories, drills on random tokens, and prose, each with a weight per token to predict."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import stories
import torch
from transformers import PreTrainedTokenizerBase


ANSWER_WEIGHT = 4.0
STORY_WEIGHT = 1.0
STORY_KEEP = 0.25
"""Share of a story's other tokens that are predicted at all: most of them are chosen freely, so they teach little."""

_PRETOKEN = re.compile(r" ?[A-Za-z]+|[^A-Za-z]")

Row = tuple[list[int], list[float]]
"""Token ids, and for each the weight of the loss of predicting it."""


class StoryEncoder:
    """Tokenises stories word by word from a cache: as the words of a story are few, that is all it takes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Ids of ``text``, the same as the tokenizer's."""
        ids: list[int] = []
        for word in _PRETOKEN.findall(text):
            if word not in self._cache:
                self._cache[word] = self._tokenizer.encode(word, add_special_tokens=False)
            ids += self._cache[word]
        return ids


class Rows:
    """Draws training rows. What it draws depends on the seed and on how far training is, nothing else.

    ``alone`` is the share of training that has no prose yet; at last ``prose_share`` of the rows are prose.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prose: list[str], seed: int, alone: float, prose_share: float
    ) -> None:
        self._rng = random.Random(seed)
        self._alone = alone
        self._prose_share = prose_share
        self._encode = StoryEncoder(tokenizer)
        self._end = tokenizer.eos_token_id
        self._vocab = len(tokenizer)
        self._prose: list[int] = []
        for chapter in prose:
            self._prose += [*tokenizer.encode(chapter, add_special_tokens=False), self._end]
        self._in, self._stop = self._encode(" in")[0], self._encode(".")[0]

    def state(self) -> object:
        """What ``restore`` needs to go on drawing the same rows."""
        return self._rng.getstate()

    def restore(self, state: object) -> None:
        """Go on from ``state``."""
        self._rng.setstate(state)

    def batch(self, rows: int, length: int, done: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights, ``[rows, length]``, for the point in training where the share ``done`` lies behind."""
        # No prose until look-ups are learned: with prose in the rows they were not, in hundreds of steps.
        fade = min(1.0, max(0.0, done - self._alone) / 0.15)
        drill, prose = 0.40 - 0.35 * fade, self._prose_share * fade
        makers: list[Callable[[int], Row]] = []
        for _ in range(rows):
            draw = self._rng.random()
            if draw < drill / 2:
                makers.append(self._repeat)
            elif draw < drill:
                makers.append(self._random_notes)
            elif draw < drill + prose:
                makers.append(self._text)
            else:
                makers.append(lambda size: self._stories(size, done))
        drawn = [make(length) for make in makers]
        return torch.tensor([ids for ids, _ in drawn]), torch.tensor([weights for _, weights in drawn])

    def _repeat(self, length: int) -> Row:
        """A random sequence again and again: the loss counts from its second time on."""
        period = self._rng.randint(6, 40)
        once = [self._rng.randrange(1, self._vocab) for _ in range(period)]
        ids = (once * (length // period + 1))[:length]
        return ids, [0.0] * period + [0.5] * (length - period)

    def _random_notes(self, length: int) -> Row:
        """Terse notes over random tokens, each looked up once: the same skill with nothing to know by heart."""
        count = self._rng.randint(2, 10)
        pairs = [(self._rng.randrange(1, self._vocab), self._rng.randrange(1, self._vocab)) for _ in range(count)]
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            for key, value in pairs:
                weights += [0.0, 0.0, ANSWER_WEIGHT / 2 if len(ids) >= 4 * count else 0.0, 0.0]
                ids += [key, self._in, value, self._stop]
            self._rng.shuffle(pairs)
        return ids[:length], weights[:length]

    def _text(self, length: int) -> Row:
        start = self._rng.randrange(len(self._prose) - length)
        return self._prose[start : start + length], [1.0] * length

    def _stories(self, length: int, done: float) -> Row:
        rng = self._rng
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            kind = rng.choice(stories.KINDS)
            # Few facts first: what a look-up is can be learned from two, and that is how it is found sooner.
            most = 4 if done < self._alone * 0.65 else 6 if done < self._alone * 1.3 else 8
            count = rng.randint(4 if done > self._alone + 0.2 and rng.random() < 0.8 else 2, most)
            for piece, is_answer in stories.told_story(rng, kind, count, "train", mixed=0.15):
                new = self._encode(piece)
                ids += new
                if is_answer:
                    weights += [ANSWER_WEIGHT] * len(new)
                else:
                    weights += [STORY_WEIGHT if rng.random() < STORY_KEEP else 0.0 for _ in new]
            ids.append(self._end)
            weights.append(STORY_WEIGHT)
        return ids[:length], weights[:length]
