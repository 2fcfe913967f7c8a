"""What a transfer is worth, beside the models alone and beside the controls that make a result believable."""

from typing import Any

from .choices import Choice, ChoiceResult, answer_choices, read_choices
from .continuation import ContinuationScore, continuation_logits, divergence, prefill, score_continuation
from .controls import Condition, SharedPrefill, anchor_alone, conditions, random_mapper, transfer
from .fidelity import Fidelity, measure_fidelity
from .intervals import Interval, bootstrap, difference, mean_interval
from .measures import context_value_kept, gap_recovered, normalised_retention
from .prefix import PrefixResult, prefix_nll
from .questions import Question, QuestionResult, answer_questions, read_questions


__all__ = [
    "Choice",
    "ChoiceResult",
    "Condition",
    "ContinuationScore",
    "Fidelity",
    "Interval",
    "PrefixResult",
    "Question",
    "QuestionResult",
    "SharedPrefill",
    "anchor_alone",
    "answer_choices",
    "answer_questions",
    "bootstrap",
    "conditions",
    "context_value_kept",
    "continuation_logits",
    "difference",
    "divergence",
    "evaluate_mapper",
    "gap_recovered",
    "mean_interval",
    "measure_fidelity",
    "normalised_retention",
    "prefill",
    "prefix_nll",
    "random_mapper",
    "read_choices",
    "read_questions",
    "score_continuation",
    "transfer",
]


def __getattr__(name: str) -> Any:
    # A report is made with what is here, and an evaluation makes a report.
    if name == "evaluate_mapper":
        from .run import evaluate_mapper

        return evaluate_mapper
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
