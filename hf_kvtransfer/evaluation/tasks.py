"""The parts of an evaluation: what one unit of each yields as JSON values, and what the report says of all of them."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..features import KINDS
from ..report import measure
from .choices import Choice, ChoiceResult, choose
from .controls import Condition
from .drift import TOKENS_PER_BIN, bin_means, drift, mean_of_bins
from .fidelity import FidelitySums
from .intervals import mean_interval
from .prefix import read_chunks
from .questions import Question, ask


TRANSFERRED, NATIVE = "transferred", "target native"


def read_batch(conditions: Sequence[Condition], chunks: Tensor, others: Tensor, scored: int) -> dict[str, Any]:
    """
    What all conditions make of a batch of chunks.

    Args:
        conditions (`Sequence[Condition]`): from [`conditions`].
        chunks (`torch.Tensor` of shape `[batch, context + scored]`): token ids.
        others (`torch.Tensor` of shape `[batch, context]`): different documents.
        scored (`int`): how many of the last tokens of a chunk are scored.

    Returns:
        `dict`: per condition and chunk the `nll`, in bins of 16 tokens; of the transfer `kl` and `agreement` likewise.
    """
    readings = read_chunks(conditions, chunks[:, :-scored], chunks[:, -scored:], others, reference=NATIVE)
    compared = readings[TRANSFERRED]
    return {
        "nll": {name: bin_means(reading.nll) for name, reading in readings.items()},
        "kl": bin_means(compared.kl) if compared.kl is not None else [],
        "agreement": bin_means(compared.agreement) if compared.agreement is not None else [],
    }


class TextSums:
    """
    The readings of all chunks at one length of the context.

    Args:
        results (`Iterable[dict]`): from [`read_batch`].
        scored (`int`): tokens that are scored in each chunk.
    """

    def __init__(self, results: Iterable[dict[str, Any]], scored: int) -> None:
        self._scored = scored
        self._nll: dict[str, list[list[float]]] = {}
        self._kl: list[list[float]] = []
        self._agreement: list[list[float]] = []
        for found in results:
            for name, rows in found["nll"].items():
                self._nll.setdefault(name, []).extend(rows)
            self._kl += found["kl"]
            self._agreement += found["agreement"]

    def _means(self, rows: list[list[float]]) -> list[float]:
        return [mean_of_bins(bins, self._scored) for bins in rows]

    def measures(self, **options: Any) -> list[dict[str, Any]]:
        """NLL, and the perplexity that it means; options as in [`~hf_kvtransfer.report.measure`]."""
        values = {name: self._means(rows) for name, rows in self._nll.items()}
        nll: Any = measure("text", "nll", "text", values, unit="nats per token", higher_is_better=False, **options)
        perplexity = {name: _exponentials(figure) for name, figure in nll["conditions"].items()}
        shares = dict.fromkeys(
            ("differences", "gap_recovered", "context_value_kept", "content_kept", "normalised_retention")
        )
        return [nll, {**nll, **shares, "metric": "perplexity", "unit": "per token", "conditions": perplexity}]

    def divergence(self, **options: Any) -> dict[str, Any]:
        """KL and agreement of the transfer with their intervals; options as in [`mean_interval`]."""
        return {
            "kl": mean_interval(self._means(self._kl), **options),
            "agreement": mean_interval(self._means(self._agreement), **options),
        }

    def drift(self) -> dict[str, Any]:
        """By distance from the hand-over."""
        return {
            "tokens_per_bin": TOKENS_PER_BIN,
            "nll": {name: drift(rows) for name, rows in self._nll.items()},
            "kl": drift(self._kl),
            "agreement": drift(self._agreement),
        }

    def length(self, context: int) -> dict[str, Any]:
        """What the report says of this length."""
        kl, agreement = (drift([[value] for value in self._means(rows)])[0] for rows in (self._kl, self._agreement))
        means = {name: drift([[value] for value in self._means(rows)])[0] for name, rows in self._nll.items()}
        return {"context": context, "conditions": means, "kl": kl, "agreement": agreement}


def fidelity_section(results: Iterable[dict[str, Any]], chunks: int, divergence: dict[str, Any]) -> dict[str, Any]:
    """
    How near the entries are.

    Args:
        results (`Iterable[dict]`): from `Comparison.compare`.
        chunks (`int`): how many chunks they are of.
        divergence (`dict`): of what is predicted, from [`TextSums`].
    """
    sums = FidelitySums()
    for found in results:
        sums.add(found)
    r2 = {kind: sums.r2_by_head(kind) for kind in KINDS}
    return {"r2": r2, "cosine": sums.cosine(), **divergence, "chunks": chunks}


def asked(conditions: Sequence[Condition], question: Question, other: str, tokenizer: Any) -> dict[str, list[Any]]:
    """Per condition whether the answer is right, and its NLL; arguments as in [`ask`]."""
    answers = ask(conditions, question, other, tokenizer)
    return {name: [answer.correct, answer.nll] for name, answer in answers.items()}


def question_measures(
    results: Iterable[dict[str, list[Any]]], questions: Sequence[Question], **options: Any
) -> list[dict[str, Any]]:
    """
    Accuracy and NLL of the answers, and the accuracy of each kind of question.

    Args:
        results (`Iterable[dict]`): from [`asked`].
        questions (`Sequence[Question]`): what was asked.
        **options: as in [`~hf_kvtransfer.report.measure`].
    """
    rows = list(results)
    columns = {name: ([float(row[name][0]) for row in rows], [row[name][1] for row in rows]) for name in rows[0]}
    documents = [question.document for question in questions]
    kinds = list(dict.fromkeys(question.kind for question in questions))
    every = list(range(len(questions)))

    def accuracy(task: str, chosen: list[int]) -> dict[str, Any]:
        counts = [len(questions[index].choices) for index in chosen]
        found: Any = measure(
            task,
            "accuracy",
            "look-up",
            {name: [correct[index] for index in chosen] for name, (correct, _) in columns.items()},
            chance=statistics.fmean(1 / count for count in counts) if all(counts) else None,
            documents=[documents[index] for index in chosen],
            **options,
        )
        return found

    nll: Any = measure(
        "questions",
        "nll",
        "look-up",
        {name: values for name, (_, values) in columns.items()},
        unit="nats per answer",
        higher_is_better=False,
        documents=documents,
        **options,
    )
    by_kind = [
        accuracy(f"questions: {kind}", [index for index in every if questions[index].kind == kind]) for kind in kinds
    ]
    return [accuracy("questions", every), nll, *(by_kind if len(kinds) > 1 else [])]


def chosen(
    conditions: Sequence[Condition], choice: Choice, other: Choice, tokenizer: Any, shown: str
) -> dict[str, Any]:
    """The length of each option, and its NLL per condition; arguments as in [`choose`]."""
    scores = choose(conditions, choice, other, tokenizer, shown)
    lengths = next(iter(scores.values())).tokens
    return {"tokens": lengths, "nll": {name: one.nll for name, one in scores.items()}}


def choice_measures(
    results: Iterable[dict[str, Any]], choices: Sequence[Choice], **options: Any
) -> list[dict[str, Any]]:
    """
    Accuracy, by the likelihood of an option as a whole and per token, and the NLL of the right option.

    Args:
        results (`Iterable[dict]`): from [`chosen`].
        choices (`Sequence[Choice]`): what was asked.
        **options: as in [`~hf_kvtransfer.report.measure`].
    """
    rows = list(results)
    columns = {
        name: ChoiceResult(
            [row["nll"][name] for row in rows], [row["tokens"] for row in rows], [choice.correct for choice in choices]
        )
        for name in rows[0]["nll"]
    }
    accuracies: list[Any] = [
        measure(
            "choices",
            metric,
            "task",
            {name: list(map(float, column.hits(per_token))) for name, column in columns.items()},
            chance=columns[NATIVE].chance(),
            **options,
        )
        for metric, per_token in (("accuracy", False), ("accuracy per token", True))
    ]
    nll: Any = measure(
        "choices",
        "nll",
        "task",
        {name: _right(column) for name, column in columns.items()},
        unit="nats per token",
        higher_is_better=False,
        **options,
    )
    return [*accuracies, nll]


def _right(column: ChoiceResult) -> list[float]:
    return [
        nll[correct[0]] / tokens[correct[0]]
        for nll, tokens, correct in zip(column.nll, column.tokens, column.correct, strict=True)
    ]


def _exponentials(figure: dict[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else float(torch.tensor(value).exp()) for name, value in figure.items()}
