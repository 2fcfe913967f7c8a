"""`KVRetention`: what a transfer keeps of the target's advantage over the source, over no context, and over chance."""

import math
from collections.abc import Sequence
from typing import Any

import evaluate
from datasets import Features, Value

from ..errors import KVTransferError
from ..evaluation.intervals import bootstraps
from ..report.retention import NATIVE, TRANSFERRED, measure
from .base import CONDITION_COLUMNS, DOCUMENT, TransferMetric


SHARES = ("gap_recovered", "context_value_kept", "content_kept", "normalised_retention")
NEEDED = ("transferred", "target_native")
ALL = (*CONDITION_COLUMNS, DOCUMENT)
NO_LABEL = ""
"""Where documents aren't named; a name is kept as its `repr`, which is never empty."""


class KVRetention(TransferMetric):
    """
    An `evaluate.Metric` with the figures of [`~hf_kvtransfer.report.measure`], from one value per document (or
    question) and condition.

    Args:
        columns (`Sequence[str]`, *optional*):
            The columns of `add_batch` that will be given, by default any. `evaluate.combine(…).add_batch` asks for
            every column that a metric has, so there they must be named.
        higher_is_better (`bool`, *optional*, defaults to `True`): `True` for accuracies, `False` for NLL.
        chance (`float`, *optional*): what guessing reaches, in the unit of the values: 0.25 for four choices.
        samples (`int`, *optional*, defaults to 2000): how often documents are drawn for the intervals.
        seed (`int`, *optional*, defaults to 0): of the draw.
        **options: as in [`TransferMetric`].

    Example:

    ```python
    >>> metric = KVRetention(chance=0.25)
    >>> figures = metric.compute(transferred=[1, 0, 1], target_native=[1, 1, 1], source_alone=[0, 0, 1])
    >>> figures["gap_recovered"], figures["gap_recovered_low"], figures["gap_recovered_high"]
    ```

    Raises:
        [`KVTransferError`]: if an option or a column is unknown, or one is missing that is needed.
    """

    def __init__(
        self,
        config_name: str = "default",
        *,
        columns: Sequence[str] | None = None,
        higher_is_better: bool = True,
        chance: float | None = None,
        samples: int = 2000,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if chance is not None and (not isinstance(chance, int | float) or not math.isfinite(chance)):
            raise KVTransferError(
                f"KVRetention got {chance!r} as `chance`; expected a finite number in the unit of the values, or "
                "`None`. Four choices have 0.25."
            )
        self._higher_is_better, self._chance = higher_is_better, chance
        self._columns = ALL if columns is None else tuple(columns)
        if not set(NEEDED) <= set(self._columns) <= set(ALL):
            raise KVTransferError(
                f"KVRetention got `columns` {list(self._columns)}; expected {list(NEEDED)} and any of {list(ALL)}. "
                "Name the conditions that will be given."
            )
        self._draw = {"samples": samples, "seed": seed}
        super().__init__(config_name, seed=seed, **options)

    def _info(self) -> evaluate.EvaluationModuleInfo:
        return evaluate.EvaluationModuleInfo(
            description="What a KV-cache transfer keeps of the target's quality, with paired bootstrap intervals.",
            citation="",
            inputs_description=f"One value per document in each of {list(self._columns)}.",
            features=Features({name: Value("string" if name == DOCUMENT else "float64") for name in self._columns}),
            reference_urls=["https://arxiv.org/abs/2608.03893"],
        )

    def add_batch(self, *, predictions: Any = None, references: Any = None, **columns: Any) -> None:
        """
        Adds documents, or questions on them.

        Args:
            predictions (*optional*): of another metric of this package; left to it, as are `references`.
            references (*optional*): likewise.
            **columns:
                Per condition a list, array or tensor with one number a question, under the names of
                `evaluation.conditions` with `_` for spaces: `transferred`, `target_native`, and as many as there are of
                `source_alone`, `no_context`, `different_document`, `source_cache_raw`, `random_mapper`, `anchor_alone`.
                `document` says which document each question is of; questions on one are drawn together. By default
                each is on its own.

        Raises:
            [`KVTransferError`]: if a condition is missing or unknown, or values are not finite or not equally many.
        """
        given = self._own({"predictions": predictions, "references": references, **columns})
        missing = [name for name in NEEDED if name not in given]
        if missing:
            raise KVTransferError(
                f"KVRetention got {list(given) or 'no condition'} without {missing}; expected `transferred` and "
                "`target_native`, and the conditions to compare them with. Score the same questions under each."
            )
        rows: dict[str, list[Any]] = {
            name: [repr(label) for label in _listed(name, values)] if name == DOCUMENT else _numbers(name, values)
            for name, values in given.items()
        }
        counts = {name: len(values) for name, values in rows.items()}
        if len(set(counts.values())) > 1:
            raise KVTransferError(
                f"KVRetention got {counts} values; expected as many in each. Give every condition the same questions, "
                "in the same order."
            )
        size = counts["transferred"]
        if size:
            absent = {name: [NO_LABEL if name == DOCUMENT else None] * size for name in self._columns}
            super().add_batch(**(absent | rows))

    def add(self, *, prediction: Any = None, reference: Any = None, **columns: Any) -> None:
        """
        Adds one document, or one question; arguments and errors as in `add_batch`, with a number for each condition.
        """
        self.add_batch(**{name: [value] for name, value in columns.items() if value is not None})

    def _compute(self, **columns: Any) -> dict[str, Any]:
        """The figures of all questions."""
        given = {name: [value not in (None, NO_LABEL) for value in values] for name, values in columns.items()}
        partly = [name for name, known in given.items() if any(known) and not all(known)]
        if partly:
            raise KVTransferError(
                f"KVRetention got {partly} for some questions only; expected each column for all or for none. Pass the "
                "same ones to every `add_batch`."
            )
        present = {name: values for name, values in columns.items() if all(given[name])}
        values = {condition: present[name] for name, condition in CONDITION_COLUMNS.items() if name in present}
        options: Any = {"documents": present.get(DOCUMENT), **self._draw}
        direction: Any = {"higher_is_better": self._higher_is_better, "chance": self._chance}
        found: Any = measure("documents", "value", "task", values, **direction, **options)
        figures = {name: found["conditions"].get(condition) for name, condition in CONDITION_COLUMNS.items()}
        figures |= {name: found[name] for name in SHARES}
        if self._higher_is_better:
            figures["retention"] = vars(bootstraps(values, {"retention": _ratio}, **options)["retention"])
        flat = {}
        for name, figure in figures.items():
            for part, number in (figure or {}).items():
                # Undefined figures are `None` in a report, and have to stay numbers for those who average or log them.
                label = name if part in ("value", "point") else f"{name}_{part}"
                flat[label] = float("nan") if number is None else number
        return flat


def _listed(name: str, values: Any) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise KVTransferError(
            f"KVRetention got {name!r} as {type(values).__name__}; expected a list, an array or a tensor with one "
            "entry for each question. Put a single one into a list."
        )
    return list(values)


def _numbers(name: str, values: Any) -> list[float]:
    numbers = [one.item() if getattr(one, "ndim", None) == 0 else one for one in _listed(name, values)]
    wrong = [one for one in numbers if not isinstance(one, int | float) or not math.isfinite(one)]
    if wrong:
        raise KVTransferError(
            f"KVRetention got {wrong[0]!r} among the values of {name!r}; expected one finite number for each question. "
            "Leave out a question that a condition could not be asked, in all conditions."
        )
    return [float(one) for one in numbers]


def _ratio(mean: dict[str, float]) -> float:
    """Transferred over native (arXiv 2608.03893, retention)."""
    return mean[TRANSFERRED] / mean[NATIVE] if mean[NATIVE] else float("nan")
