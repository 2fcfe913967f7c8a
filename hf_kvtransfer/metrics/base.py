"""What the metrics share: nothing to fetch, no file unless processes exchange one, and refusals in sentences."""

import inspect
import os
from collections.abc import Mapping
from typing import Any

import evaluate

from ..errors import KVTransferError
from ..report.retention import CONDITIONS


PAIR = ("predictions", "references")
CONDITION_COLUMNS = {name.replace(" ", "_"): name for name in CONDITIONS}
"""From the name of a column to the condition that it is of: `source_alone` to `source alone`."""

DOCUMENT = "document"
COLUMNS = (*PAIR, *CONDITION_COLUMNS, DOCUMENT)
"""What `evaluate.combine` hands to every metric, whichever it is for."""


class TransferMetric(evaluate.Metric):
    """
    An `evaluate.Metric` that is a class of this package, so that no script is looked for. One process keeps what it was
    given in memory; several exchange it through files in `cache_dir`, as `evaluate` does.

    Args:
        config_name (`str`): what is compared.
        **options:
            Those of `evaluate.Metric`: `num_process`, `process_id`, `experiment_id`, `cache_dir`, `keep_in_memory`
            (by default where there is one process), `timeout`, ….

    Raises:
        [`KVTransferError`]: if an option is unknown.
    """

    def __init__(self, config_name: str, **options: Any) -> None:
        known = set(inspect.signature(evaluate.Metric.__init__).parameters) - {"self", "config_name", "kwargs"}
        unknown = sorted(set(options) - known)
        if unknown:
            raise KVTransferError(
                f"{type(self).__name__} got {unknown}, which it doesn't know; expected options of its own or of "
                f"`evaluate.Metric`: {sorted(known)}. Leave out the others."
            )
        options.setdefault("keep_in_memory", options.get("num_process", 1) == 1)
        # The base class makes the folder before it notes what `_build_data_dir` has to know.
        self._in_memory = options["keep_in_memory"]
        super().__init__(config_name, **options)

    def _build_data_dir(self) -> str:
        # Nothing is written, and there may be no place to write to.
        if self._in_memory:
            return os.path.join(self._data_dir_root, self.name, self.config_name)
        folder: str = super()._build_data_dir()
        return folder

    def compute(self, *, predictions: Any = None, references: Any = None, **columns: Any) -> dict[str, Any] | None:
        """
        The figures of everything that was added and of what is given now; then everything is forgotten.

        Args:
            predictions (*optional*): as in `add_batch`.
            references (*optional*): as in `add_batch`.
            **columns: as in `add_batch`. Columns of another metric of this package are left to it.

        Returns:
            `dict`, or `None` in all processes but the first.

        Raises:
            [`KVTransferError`]: if there is nothing to compute, or a column is unknown or doesn't fit.
        """
        given = self._own({"predictions": predictions, "references": references, **columns})
        if given:
            self.add_batch(**given)
        if self.writer is None:
            raise KVTransferError(
                f"{type(self).__name__} was given nothing; expected {self._feature_names()[:2]} for one document or "
                "more. Pass them to `compute`, or to `add_batch` before."
            )
        found: dict[str, Any] | None = super().compute()
        return found

    def _own(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that are given and are this metric's."""
        unknown = [name for name in columns if name not in COLUMNS]
        if unknown:
            raise KVTransferError(
                f"{type(self).__name__} got {unknown}; expected its columns {self._feature_names()}. Options such as "
                "`chance` or `by_head` belong to the metric itself: `KVRetention(chance=0.25)`."
            )
        return {name: columns[name] for name in self._feature_names() if columns.get(name) is not None}
