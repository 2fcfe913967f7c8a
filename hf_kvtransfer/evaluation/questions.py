"""Questions whose answers stand in a document that only the source has read."""

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from ..errors import KVTransferError
from .checks import read_rows, text_problem, texts_problem
from .continuation import check_scores, score_continuation
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

    def problem(self) -> str | None:
        """What keeps it from being asked."""
        for name in ("kind", "document", "question", "answer"):
            if problem := text_problem(name, getattr(self, name)):
                return problem
        if problem := texts_problem("choices", self.choices):
            return problem
        if self.choices and self.answer not in self.choices:
            return f"`answer` is {self.answer!r}, which is none of the `choices`"
        return None


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
        [`KVTransferError`]: if the file or a field is missing or wrong; the sentence names the line.
    """
    try:
        return read_rows(path, _question)
    except (OSError, ValueError) as error:
        raise KVTransferError(
            f"No questions could be read from {path} ({type(error).__name__}: {error}); expected one JSON object a "
            'line with "kind", "document", "question" and "answer".'
        ) from error


def _question(row: Any) -> Question:
    choices = row.get("choices", [])
    given = Question(row["kind"], row["document"], row["question"], row["answer"], choices)
    if problem := given.problem():
        raise ValueError(problem)
    return replace(given, choices=tuple(choices))


def first_of_each_kind(questions: Iterable[Question], count: int | None = None) -> list[Question]:
    """
    The first questions of each kind, in their order.

    Args:
        questions (`Iterable[Question]`): of any kinds.
        count (`int`, *optional*): how many of each; all by default.
    """
    taken: dict[str, int] = {}
    chosen = []
    for question in questions:
        taken[question.kind] = taken.get(question.kind, 0) + 1
        if count is None or taken[question.kind] <= count:
            chosen.append(question)
    return chosen


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
    others = different_documents(questions)
    results = {condition.name: QuestionResult() for condition in conditions}
    for question, other in tqdm(
        zip(questions, others, strict=True),
        total=len(questions),
        desc="Questions",
        disable=None if progress else True,
    ):
        for name, answer in ask(conditions, question, other, tokenizer).items():
            result = results[name]
            result.correct.setdefault(question.kind, []).append(answer.correct)
            result.nll.setdefault(question.kind, []).append(answer.nll)
            result.seconds.append(answer.seconds)
    return results


@dataclass(frozen=True)
class Answer:
    """
    Args:
        correct (`bool`): whether it is what the model would write.
        nll (`float`): its negative log-likelihood, in nats.
        seconds (`float`): what it took to have the document's cache on the answering side.
    """

    correct: bool
    nll: float
    seconds: float


def ask(conditions: Sequence[Condition], question: Question, other: str, tokenizer: Any) -> dict[str, Answer]:
    """
    Asks one question under every condition.

    Args:
        conditions (`Sequence[Condition]`): from [`conditions`].
        question (`Question`): what is asked.
        other (`str`): a different document.
        tokenizer (`PreTrainedTokenizerBase`): of both models.

    Returns:
        `dict[str, Answer]`: by the condition's name.

    Raises:
        [`KVTransferError`]:
            If a document has less than two tokens, or the question or its answer none; or if a likelihood is NaN or
            infinite.
    """
    context, different, asked, answer = encode(question, other, tokenizer)
    results = {}
    for condition in conditions:
        cache, seconds = condition.read(context, different)
        fed = [asked, answer] if cache is None else [context[:, -1:], asked, answer]
        score = score_continuation(condition.model, torch.cat(fed, dim=1), cache, scored=answer.shape[1])
        check_scores(score.nll, condition.name)
        results[condition.name] = Answer(bool(score.greedy.all()), float(score.nll.sum()), seconds)
    return results


def encode(question: Question, other: str, tokenizer: Any) -> tuple[torch.Tensor, ...]:
    """
    Token ids of the document, of another, of the question and of its answer, each `[1, tokens]`.

    Raises:
        [`KVTransferError`]: if a document has less than two tokens, or the question or its answer none.
    """
    context, different = (
        tokenizer(text, return_tensors="pt", verbose=False).input_ids for text in (question.document, other)
    )
    asked, answer = (_ids(tokenizer, text) for text in (question.question, question.answer))
    if min(context.shape[1], different.shape[1]) < 2 or not asked.shape[1] or not answer.shape[1]:
        raise KVTransferError(
            f"A question ({question.question!r}) of {asked.shape[1]} tokens has a document of {context.shape[1]} "
            f"tokens, another of {different.shape[1]}, and an answer of {answer.shape[1]}; expected documents of two "
            "or more, and a question and an answer of one or more. Leave it out."
        )
    return context, different, asked, answer


def different_documents(questions: Sequence[Question]) -> list[str]:
    """
    To each question the document of the next one that is about another document; after the last comes the first.

    Raises:
        [`KVTransferError`]: if all questions are about one document.
    """
    documents = [question.document for question in questions]
    if len(set(documents)) < 2:
        raise KVTransferError(
            f"Got {len(documents)} questions about {len(set(documents))} document; expected two documents or more, so "
            "that there is a different document to each."
        )
    others: list[str] = []
    following = next(document for document in documents if document != documents[-1])
    for index in reversed(range(len(documents))):
        if index + 1 < len(documents) and documents[index + 1] != documents[index]:
            following = documents[index + 1]
        others.append(following)
    return others[::-1]


def _ids(tokenizer: Any, text: str) -> torch.Tensor:
    ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
    return ids.long()  # those of an empty text come as floating-point numbers
