"""Questions whose answers stand in a document that only the source has read."""

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..errors import KVTransferError
from .continuation import score_continuation
from .controls import Condition


@dataclass(frozen=True)
class Question:
    """
    Args:
        kind (`str`): what sort of question it is; figures are given per kind.
        document (`str`): what is read.
        question (`str`): what is asked, beginning with the space or line break that separates it.
        answer (`str`): what must come next, with its leading space.
        choices (`tuple[str, ...]`): the possible answers, for the level of chance.
    """

    kind: str
    document: str
    question: str
    answer: str
    choices: tuple[str, ...] = ()


@dataclass
class QuestionResult:
    """
    Args:
        correct (`dict[str, list[bool]]`): per kind, whether each answer was what the model would write.
        nll (`dict[str, list[float]]`): per kind, the negative log-likelihood of each answer, in nats.
        seconds (`list[float]`): what it took to have the document's cache on the answering side, per document.
    """

    correct: dict[str, list[bool]] = field(default_factory=dict)
    nll: dict[str, list[float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def accuracy(self, kind: str | None = None) -> float:
        """Share of right answers of one kind, or of all."""
        chosen = self.correct[kind] if kind else [hit for hits in self.correct.values() for hit in hits]
        return sum(chosen) / len(chosen)

    def mean_nll(self) -> float:
        """Mean over all questions, in nats per answer."""
        return statistics.fmean(value for values in self.nll.values() for value in values)

    def median_seconds(self) -> float:
        """Median over documents."""
        return statistics.median(self.seconds)


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """
    Reads questions from a `.jsonl` file with the fields of [`Question`] (others are ignored).

    Raises:
        [`KVTransferError`]: if the file or a field is missing.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
        return [
            Question(r["kind"], r["document"], r["question"], r["answer"], tuple(r.get("choices", ()))) for r in rows
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise KVTransferError(
            f"No questions could be read from {path} ({type(error).__name__}: {error}); expected one JSON object a "
            'line with "kind", "document", "question" and "answer".'
        ) from error


def answer_questions(
    conditions: Sequence[Condition], questions: Iterable[Question], tokenizer: Any, progress: bool = True
) -> dict[str, QuestionResult]:
    """
    Asks every question under every condition. An answer counts as right if each of its tokens is the most likely of
    the whole vocabulary. The conditions take turns at each question, so that their times can be compared.

    Args:
        conditions (`Sequence[Condition]`): from [`conditions`].
        questions (`Iterable[Question]`): what is asked; documents of two tokens or more.
        tokenizer (`PreTrainedTokenizerBase`): of both models.
        progress (`bool`, *optional*, defaults to `True`): whether to show a bar, on a terminal only.

    Returns:
        `dict[str, QuestionResult]`: by the condition's name.
    """
    questions = list(questions)
    if len(questions) < 2:
        raise KVTransferError(
            f"Got {len(questions)} questions; expected two or more, so that there is a different document to each."
        )
    results = {condition.name: QuestionResult() for condition in conditions}
    contexts = [tokenizer(q.document, return_tensors="pt").input_ids for q in questions]
    for index, question in enumerate(tqdm(questions, desc="Questions", disable=None if progress else True)):
        asked = _ids(tokenizer, question.question)
        answer = _ids(tokenizer, question.answer)
        context, other = contexts[index], contexts[(index + 1) % len(contexts)]
        for condition in conditions:
            result = results[condition.name]
            cache, seconds = condition.read(context, other)
            fed = [asked, answer] if cache is None else [context[:, -1:], asked, answer]
            score = score_continuation(condition.model, torch.cat(fed, dim=1), cache, scored=answer.shape[1])
            result.correct.setdefault(question.kind, []).append(bool(score.greedy.all()))
            result.nll.setdefault(question.kind, []).append(float(score.nll.sum()))
            result.seconds.append(seconds)
    return results


def _ids(tokenizer: Any, text: str) -> torch.Tensor:
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
