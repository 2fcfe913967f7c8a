"""The metadata of a model card: what the Hub files a mapper under, and every metric of its report."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .card_tables import mean_of
from .config import KVMapperConfig
from .evidence import EVALUATION
from .report.schema import Measure, checked
from .report.wording import SHARES


if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData


TASK_NAME = "KV cache transfer"
"""Name of the task of every result that is generated; other results in a card's `model-index` are kept."""

ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
"""What the name of a repository on the Hub looks like."""

_TAGS = ("kv-cache", "kv-cache-transfer")


def card_metadata(
    before: dict[str, Any], config: KVMapperConfig, values: dict[str, Any], name: str, models: list[str]
) -> "ModelCardData":
    """
    The metadata of a card: what is generated, and of the card so far what isn't.

    Args:
        before (`dict`): the metadata of the card so far.
        config ([`KVMapperConfig`]): of the mapper.
        values (`dict`): its report as JSON values; empty without one.
        name (`str`): of the mapper.
        models (`list[str]`): the checkpoints that are on the Hub.
    """
    from huggingface_hub import ModelCardData
    from huggingface_hub.repocard_data import model_index_to_eval_results

    index = before.pop("model-index", None)
    title, results = model_index_to_eval_results(index) if index else (None, [])
    others = [one for one in results if one.task_name != TASK_NAME]
    dataset = str(config.calibration.get("dataset") or "").split(" (")[0]
    metrics = list(dict.fromkeys(one["metric"] for one in measures_of(config, values)))
    ours = {
        "base_model": models or None,
        "base_model_relation": "adapter" if models else None,
        "library_name": "hf_kvtransfer",
        "pipeline_tag": "text-generation",
        "datasets": [dataset] if ON_HUB.fullmatch(dataset) else None,
        "metrics": metrics or None,
    }
    kept = {name: value for name, value in before.items() if name not in ("base_model", "metrics") or not ours[name]}
    tags = [*_TAGS, *_as_list(before.get("tags"))]
    found = [*eval_results(config, values), *others]
    data: dict[str, Any] = {**ours, **kept, "tags": tags}
    if found:
        data |= {"model_name": title or Path(name).name, "eval_results": found}
    return ModelCardData(**{name: value for name, value in data.items() if value is not None})


def eval_results(config: KVMapperConfig, values: dict[str, Any]) -> "list[EvalResult]":
    """
    Every metric of a report as an entry of a `model-index`, with intervals where there are any.

    Args:
        config ([`KVMapperConfig`]): of the mapper, whose summary is taken without a report.
        values (`dict`): the report as JSON values; empty without one.
    """
    found, settings = [], values.get("settings") or {}
    for one in measures_of(config, values):
        task, metric = _Task.of(one["task"], settings), one["metric"]
        figures = {metric: one["conditions"].get("transferred")}
        figures |= {f"{metric}: {words}": one.get(key) for key, words in SHARES.items()}
        found += [_result(task, words, figure, one["n"]) for words, figure in figures.items()]
    fidelity = values.get("fidelity") or {}
    if fidelity:
        r2, chunks = fidelity["r2"], fidelity["chunks"]
        likeness_figures = {
            "R² of keys": {"value": mean_of(r2["keys"])},
            "R² of values": {"value": mean_of(r2["values"])},
            "cosine of attention outputs": {"value": mean_of(fidelity["cosine"])},
            "KL to native, nats per token": fidelity["kl"],
            "top-1 agreement with native": fidelity["agreement"],
        }
        task = _Task.of("fidelity", {"fidelity": settings.get("texts"), **settings})
        found += [_result(task, words, figure, chunks) for words, figure in likeness_figures.items()]
    return [one for one in found if one is not None]


def measures_of(config: KVMapperConfig, values: dict[str, Any]) -> list[Any]:
    """The measures of the report; without one, those of the summary that the configuration holds."""
    if values:
        return list(values["measures"])
    summary = config.scores.get(EVALUATION) or {}
    measures = [
        {name: value for name, value in one.items() if name != "retention"} for one in summary.get("measures") or []
    ]
    return [checked(one, Measure, f"scores.{EVALUATION}.measures[{index}]") for index, one in enumerate(measures)]


@dataclass(frozen=True)
class _Task:
    """What an index calls a task: an identifier, a name, and the split of the data."""

    identifier: str
    name: str
    split: str | None

    @classmethod
    def of(cls, task: str, settings: dict[str, Any]) -> "_Task":
        """By a measure's task, such as `questions: terse`, and the names of the data in a report's settings."""
        data = settings.get({"text": "texts"}.get(task, task.partition(": ")[0]))
        slug = re.sub(r"[^\w./-]+", "-", task).strip("-") or "unknown"
        is_dataset = isinstance(data, str) and ON_HUB.fullmatch(data) and task == "text"
        name = f"{task} ({data})" if isinstance(data, str) else task
        return cls(str(data) if is_dataset else slug, name, settings.get("split") if is_dataset else None)


def _result(task: _Task, words: str, figure: dict[str, Any] | None, n: int) -> "EvalResult | None":
    from huggingface_hub import EvalResult

    value, *ends = [(figure or {}).get(end) for end in ("value", "low", "high")]
    if value is None:
        return None
    interval = [round(float(end), 6) for end in ends if end is not None]
    return EvalResult(
        task_type="text-generation",
        task_name=TASK_NAME,
        dataset_type=task.identifier,
        dataset_name=task.name,
        dataset_split=task.split,
        metric_type=re.sub(r"[^a-z0-9]+", "_", words.lower().replace("²", "2")).strip("_"),
        metric_name=words,
        metric_value=round(float(value), 6),
        metric_args={"n": n} | ({"interval_95": interval} if len(interval) == 2 else {}),
    )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
