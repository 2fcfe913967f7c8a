"""What a mapper has been shown to keep: the summary of a report in its configuration, and the gate that asks for it."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from .digests import CONFIG_FILE, weights_digest
from .errors import EvidenceError, MapperFileError


if TYPE_CHECKING:
    from .report import TransferReport


logger = logging.get_logger(__name__)

EVALUATION = "evaluation"
"""The name under which `scores` of a mapper's configuration hold the summary of its report."""

# Of a report's description of the mapper, what its configuration says too: a report of another recipe is no evidence.
_SHARED = ("preset", "map_type", "k", "anchor_layers", "anchor_start", "exact_prefix", "exact_suffix", "calibration")
_ENDS = ("value", "low", "high")


def summary_of(report: "TransferReport") -> dict[str, Any]:
    """
    What a configuration keeps of a report.

    Args:
        report ([`TransferReport`]): of the mapper.

    Returns:
        `dict`: plain JSON values. `report`, the digest of the whole report; `verdict`, in words; `kl` and `agreement`
        of next-token distributions with the native ones, with intervals, or `None`; and `measures`, those of the
        report without differences, and with `retention`: transferred / native, where higher is better, else `None`.
    """
    values = report.to_dict()
    fidelity = values["fidelity"] or {}
    return {
        "report": report.digest(),
        "verdict": report.verdict(),
        "kl": fidelity.get("kl"),
        "agreement": fidelity.get("agreement"),
        "measures": [_summary(measure) for measure in values["measures"]],
    }


def _summary(measure: dict[str, Any]) -> dict[str, Any]:
    values = [(measure["conditions"].get(name) or {}).get("value") for name in ("target native", "transferred")]
    native, transferred = values
    retention = transferred / native if transferred is not None and native and measure["higher_is_better"] else None
    return {**{name: value for name, value in measure.items() if name != "differences"}, "retention": retention}


def record_evidence(folder: str | os.PathLike[str], report: "TransferReport") -> dict[str, Any]:
    """
    Writes the summary of a report into the configuration of a saved mapper, whole or not at all. The mapper's digests
    stay valid, and the summary is bound to the weights that lie there: other weights under it are no evidence.

    Args:
        folder (`str` or `os.PathLike`): of the mapper.
        report ([`TransferReport`]): of that mapper.

    Returns:
        `dict`: the summary, as [`summary_of`] makes it.

    Raises:
        [`EvidenceError`]: if the report is of another mapper.
        [`MapperFileError`]: if there is no mapper, or nothing can be written.
    """
    from .report.report import write_whole

    config = read_config(folder)
    check_report(config, report)
    summary = summary_of(report)
    config["scores"] = {**(config.get("scores") or {}), EVALUATION: summary}
    bind_evidence(config)
    write_whole(Path(folder), CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")
    return summary


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """
    The content of the `config.json` of a saved mapper, after finishing an interrupted save.

    Args:
        folder (`str` or `os.PathLike`): of the mapper.

    Raises:
        [`MapperFileError`]: if there is no mapper.
    """
    from .saving import finish_interrupted

    finish_interrupted(Path(folder))
    try:
        config = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
        is_mapper = isinstance(config, dict) and config.get("model_type") == "kv_mapper"
        reason = "it is of another kind of model"
    except (OSError, ValueError, RecursionError) as error:
        is_mapper, reason = False, str(error)
    if not is_mapper:
        raise MapperFileError(
            f"No mapper's configuration could be read from {folder} ({reason}); expected the `config.json` that "
            "`KVMapper.save_pretrained` writes. Check the path."
        )
    return dict(config)


def report_in(folder: str | os.PathLike[str]) -> "TransferReport | None":
    """
    The report in a mapper's folder, where it is of the weights beside it.

    Args:
        folder (`str` or `os.PathLike`): of the mapper.

    Returns:
        [`TransferReport`], or `None` if there is none.

    Raises:
        [`EvidenceError`]: if the report is another one than the configuration has the summary of, or of other weights.
        [`MapperFileError`]: if there is no mapper, or the report can't be read.
    """
    from .report import REPORT_FILE, TransferReport

    config = read_config(folder)
    if not (Path(folder) / REPORT_FILE).is_file():
        return None
    report, summary = TransferReport.load(folder), evaluation_of(config)
    if summary is None or summary.get("report") != report.digest():
        raise EvidenceError(
            f"The `{REPORT_FILE}` in {folder} is not the one that the mapper's configuration has a summary of, or the "
            "weights are others since; expected a report of these weights. Evaluate the mapper again with "
            "`hf-kvtransfer evaluate --report`, or remove the report; if it is of these weights, say so with "
            "`hf-kvtransfer card --report`."
        )
    return report


def evaluation_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """
    The summary of a report in a configuration, if there is one and it is of the weights beside it.

    Args:
        config (`dict`): the content of a mapper's `config.json`.
    """
    return None if _evidence(config)[0] else dict(config["scores"][EVALUATION])


def check_report(config: dict[str, Any], report: "TransferReport") -> None:
    """
    Raises [`EvidenceError`] if a report is of another mapper: another recipe, or another calibration.

    Args:
        config (`dict`): the content of a mapper's `config.json`.
        report ([`TransferReport`]): what should be of that mapper.
    """
    told = report.to_dict()["mapper"]
    other = [name for name in _SHARED if name in config and (told[name] or None) != (config[name] or None)]
    if other:
        raise EvidenceError(
            f"The report is of another mapper: `{other[0]}` is {str(told[other[0]])[:80]!r} there and "
            f"{str(config[other[0]])[:80]!r} in the configuration; expected the report of this one. Evaluate this "
            "mapper with `hf-kvtransfer evaluate`."
        )


def bind_evidence(config: dict[str, Any]) -> None:
    """
    Notes in a summary that isn't bound to weights yet that it is of those whose digests the configuration records.

    Args:
        config (`dict`): the content of a mapper's `config.json`; changed in place.
    """
    evaluation = (config.get("scores") or {}).get(EVALUATION)
    if isinstance(evaluation, dict) and config.get("digests"):
        evaluation.setdefault("weights", weights_digest(config["digests"]))


def check_evidence(config: dict[str, Any] | None, path: Any, minimum: Any = None) -> None:
    """
    The gate: warns once of a mapper that hasn't shown what it keeps, or refuses one that hasn't shown enough.

    Args:
        config (`dict`, *optional*): the content of the mapper's `config.json`, where there is one.
        path (`str` or `os.PathLike`): where it was found.
        minimum (`float` or `False`, *optional*):
            The gap recovered, a share, that the evaluation must show on each of its measures that has one: by the lower
            end of its interval, and by no more than n questions can show, `1 − 3 / n`. Without it a mapper without
            evidence is loaded with a warning, with `False` without.

    Raises:
        [`EvidenceError`]: if the mapper shows less, or nothing, or one of its measures can't be read.
    """
    if minimum is False:
        return
    if minimum is not None:
        _check_minimum(minimum)
    missing, measures = _evidence(config or {})
    if missing and minimum is None:
        logger.warning_once(
            f"The mapper {path} {missing}, so nobody knows what it keeps of a context: measure it with `hf-kvtransfer "
            "evaluate` before you rely on it. `min_gap_recovered=` refuses such mappers."
        )
    if minimum is None:
        return
    wanted = _percent(minimum)
    if missing:
        raise EvidenceError(
            f"The mapper {path} {missing}; expected one that was shown to recover at least {wanted} of the gap between "
            "the source alone and the native target. Measure it with `hf-kvtransfer evaluate`, or load it without "
            "`min_gap_recovered`."
        )
    if not measures:
        raise EvidenceError(
            f"The evaluation of the mapper {path} has no gap recovered: on everything it measured the native target "
            f"isn't shown to be better than the source alone; expected a gap of which {wanted} could be recovered. Use "
            "the source, measure where the target is better, or load the mapper without `min_gap_recovered`."
        )
    worst = min(measures, key=_shown)
    value, low, high = (worst["gap_recovered"][end] for end in _ENDS)
    if _shown(worst) < minimum:
        raise EvidenceError(
            f"The mapper {path} recovers {_percent(value)} [{_percent(low)}, {_percent(high)}] of the gap between the "
            f"source alone and the native target on {worst.get('task')} ({worst.get('metric')}, n = {worst.get('n')}), "
            f"which shows {_percent(_shown(worst))}; expected at least {wanted}. Fit one with anchor layers or more "
            "calibration, evaluate on more questions or text, or ask for less."
        )


def _shown(measure: dict[str, Any]) -> float:
    """What a measure shows to be recovered: the lower end, where so few questions can show as much (as in verdicts)."""
    number = measure.get("n")
    most = 1 - 3 / number if isinstance(number, int) and number > 0 else 0.0
    return min(float(measure["gap_recovered"]["low"]), most)


def _evidence(config: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """What is missing, in words, or nothing; and the measures that show a gap recovered."""
    scores = config.get("scores")
    evaluation = scores.get(EVALUATION) if isinstance(scores, dict) else None
    measures = evaluation.get("measures") if isinstance(evaluation, dict) else None
    if not isinstance(evaluation, dict) or not isinstance(measures, list) or not measures:
        return "carries no evaluation", []
    digests = config.get("digests") or {}
    own = weights_digest(digests) if isinstance(digests, dict) and digests else None
    # What is bound to weights is of nothing where it can't be told any more which these are.
    if evaluation.get("weights", own) != own:
        return "carries an evaluation of other weights than its own", []
    shown = []
    for index, one in enumerate(measures):
        # Missing isn't null: a summary holds the field of every measure.
        gap = one.get("gap_recovered", "missing") if isinstance(one, dict) else one
        if not isinstance(one, dict) or not _is_readable(gap):
            return f"carries an evaluation whose measure {index} can't be read (gap recovered: {str(gap)[:80]})", []
        # Where a gap has no interval, the target wasn't shown to be better than the source.
        if gap is not None and gap.get("low") is not None:
            shown.append(one)
    return "", shown


def _is_readable(gap: Any) -> bool:
    """Whether a gap recovered is a figure in its interval, or has no interval; anything else is no evidence."""
    if not isinstance(gap, dict):
        return gap is None
    ends: list[Any] = [gap.get(end) for end in _ENDS]
    value, low, high = ends
    if low is None and high is None:
        return value is None or _is_number(value)
    if not all(map(_is_number, ends)):
        return False
    slack = 1e-6 * max(1.0, abs(value))  # figures of equal values differ by what was rounded
    return bool(low - slack <= value <= high + slack and low <= high)


def _check_minimum(minimum: Any) -> None:
    if not _is_number(minimum) or minimum > 1:
        raise EvidenceError(
            f"`min_gap_recovered` is {_short(minimum)}; expected a share of at most 1, such as 0.8, or `False` for no "
            "warning either."
        )


def _is_number(value: Any) -> bool:
    # Whole numbers that no float can hold aren't finite here.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _short(value: Any) -> str:
    # Python writes out only so many digits.
    return f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > 2**64 else repr(value)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
