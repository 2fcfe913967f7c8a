"""Multiple choice on a cache that only the source has made: which option does the target find the most likely?"""

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm

from ..errors import KVTransferError
from .checks import read_rows, text_problem, texts_problem
from .continuation import check_scores, score_continuation
from .controls import Condition


@dataclass(frozen=True)
class Choice:
    """
    One question of several options.

    Args:
        question (`str`): what is asked.
        options (`tuple[str, ...]`): two or more answers.
        correct (`tuple[int, ...]`): indices of those that are right.
    """

    question: str
    options: tuple[str, ...]
    correct: tuple[int, ...]

    def problem(self) -> str | None:
        """What keeps it from being asked."""
        if problem := text_problem("question", self.question) or texts_problem("options", self.options):
            return problem
        if len(self.options) < 2 or len(set(self.options)) < len(self.options) or not all(map(str.strip, self.options)):
            return f"`options` is {list(self.options)}, not two or more different ones that aren't empty"
        right = self.correct
        are_indices = isinstance(right, (list, tuple)) and all(type(index) is int for index in right)
        if not are_indices or not right or not all(0 <= index < len(self.options) for index in right):
            return f"the right options are {right!r}, not one or more indices from 0 to {len(self.options) - 1}"
        return None

    def prompt(self) -> str:
        """What is read before an option: the form that the published benchmarks use."""
        return f"Question: {self.question}\nAnswer:"

    def answered(self) -> str:
        """Question and answer, as a shot shows them."""
        return f"{self.prompt()} {self.options[self.correct[0]]}"


@dataclass
class ChoiceResult:
    """
    Args:
        nll (`list[list[float]]`): per question the negative log-likelihood of each option, in nats.
        tokens (`list[list[int]]`): per question the length of each option.
        correct (`list[tuple[int, ...]]`): per question the indices of the right options.
        seconds (`list[float]`): what it took to have the context's cache on the answering side, per question.
    """

    nll: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    correct: list[tuple[int, ...]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def hits(self, normalised: bool = False) -> list[bool]:
        """
        Whether the most likely option of each question is a right one.

        Args:
            normalised (`bool`, *optional*, defaults to `False`): whether likelihood counts per token of the option.
        """
        found = []
        for nll, tokens, correct in zip(self.nll, self.tokens, self.correct, strict=True):
            scores = [value / length if normalised else value for value, length in zip(nll, tokens, strict=True)]
            found.append(scores.index(min(scores)) in correct)
        return found

    def accuracy(self, normalised: bool = False) -> float:
        """Share of questions for which that is so."""
        return statistics.fmean(self.hits(normalised))

    def chance(self) -> float:
        """The accuracy of guessing."""
        return statistics.fmean(len(c) / len(nll) for c, nll in zip(self.correct, self.nll, strict=True))

    def median_seconds(self) -> float:
        """Median over questions."""
        return statistics.median(self.seconds)


def read_choices(path: str | os.PathLike[str]) -> list[Choice]:
    """
    Reads questions from a file of one JSON object a line, with `centerpiece` (the question), `options` and
    `correct_options_idx`; other fields are ignored.

    Raises:
        [`KVTransferError`]: if the file or a field is missing or wrong; the sentence names the line.
    """
    try:
        return read_rows(path, _choice)
    except (OSError, ValueError) as error:
        raise KVTransferError(
            f"No multiple choice could be read from {path} ({type(error).__name__}: {error}); expected one JSON object "
            'a line with "centerpiece", "options" and "correct_options_idx".'
        ) from error


def _choice(row: Any) -> Choice:
    given = Choice(row["centerpiece"], row["options"], row["correct_options_idx"])
    if problem := given.problem():
        raise ValueError(problem)
    return Choice(given.question, tuple(given.options), tuple(given.correct))


def answer_choices(
    conditions: Sequence[Condition],
    choices: Iterable[Choice],
    tokenizer: Any,
    *,
    shots: Sequence[Choice] = (),
    progress: bool = True,
) -> dict[str, ChoiceResult]:
    """
    Scores the options of every question under every condition by their likelihood after the context: the shots and
    the question. The context is read once per condition, and all its options are scored in one batch on top of it.
    Without context the model sees the context's last token alone. The different document is the next question's
    context.

    Args:
        conditions (`Sequence[Condition]`): from [`conditions`].
        choices (`Iterable[Choice]`): what is asked.
        tokenizer (`PreTrainedTokenizerBase`): of both models.
        shots (`Sequence[Choice]`, *optional*): questions whose right answers are shown first.
        progress (`bool`, *optional*, defaults to `True`): whether to show a bar, on a terminal only.

    Returns:
        `dict[str, ChoiceResult]`: by the condition's name.

    Raises:
        [`KVTransferError`]: if there are fewer than two questions.
    """
    choices = list(choices)
    if len(choices) < 2:
        raise KVTransferError(
            f"Got {len(choices)} questions of several options; expected two or more, so that there is a different "
            "document to each."
        )
    results = {condition.name: ChoiceResult() for condition in conditions}
    shown = "".join(f"{shot.answered()}\n\n" for shot in shots)
    for index, choice in enumerate(tqdm(choices, desc="Choices", disable=None if progress else True)):
        following = choices[(index + 1) % len(choices)]
        for name, scores in choose(conditions, choice, following, tokenizer, shown).items():
            result = results[name]
            result.nll.append(scores.nll)
            result.tokens.append(scores.tokens)
            result.correct.append(choice.correct)
            result.seconds.append(scores.seconds)
    return results


@dataclass(frozen=True)
class Scores:
    """
    Args:
        nll (`list[float]`): negative log-likelihood of each option, in nats.
        tokens (`list[int]`): the length of each.
        seconds (`float`): what it took to have the context's cache on the answering side.
    """

    nll: list[float]
    tokens: list[int]
    seconds: float


def choose(
    conditions: Sequence[Condition], choice: Choice, other: Choice, tokenizer: Any, shown: str = ""
) -> dict[str, Scores]:
    """
    Scores the options of one question under every condition.

    Args:
        conditions (`Sequence[Condition]`): from [`conditions`].
        choice (`Choice`): what is asked.
        other (`Choice`): whose prompt is the different document.
        tokenizer (`PreTrainedTokenizerBase`): of both models.
        shown (`str`, *optional*, defaults to nothing): what stands before both prompts: the shots.

    Returns:
        `dict[str, Scores]`: by the condition's name.

    Raises:
        [`KVTransferError`]: if a likelihood is NaN or infinite.
    """
    context, different, options = encode_choice(choice, other, tokenizer, shown)
    lengths = [len(option) for option in options]
    # What pads a shorter option comes after it, where nothing that counts can see it.
    padded = torch.nn.utils.rnn.pad_sequence(options, batch_first=True)
    fed = torch.cat([context[:, -1:].expand(len(options), 1), padded], dim=1)
    results = {}
    for condition in conditions:
        cache, seconds = condition.read(context, different)
        if cache is not None:
            cache.batch_repeat_interleave(len(options))
        score = score_continuation(condition.model, fed, cache, scored=padded.shape[1])
        sums = torch.stack([option[:length].sum() for option, length in zip(score.nll, lengths, strict=True)])
        check_scores(sums, condition.name)
        nll = sums.tolist()
        results[condition.name] = Scores(nll, lengths, seconds)
    return results


def encode_choice(
    choice: Choice, other: Choice, tokenizer: Any, shown: str = ""
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """
    Token ids of the prompt and of another, each `[1, tokens]`, and of each option, `[tokens]`; arguments as in
    [`choose`].
    """
    context, different = (_ids(tokenizer, shown + one.prompt()) for one in (choice, other))
    return context, different, [_ids(tokenizer, f" {option}", add_special_tokens=False)[0] for option in choice.options]


def _ids(tokenizer: Any, text: str, **options: Any) -> torch.Tensor:
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", verbose=False, **options).input_ids
    return ids
