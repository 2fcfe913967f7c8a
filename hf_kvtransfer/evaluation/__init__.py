"""What a transfer is worth, beside the models alone and beside the controls that make a result believable."""

from .continuation import ContinuationScore, prefill, score_continuation
from .controls import Condition, conditions, random_mapper
from .measures import context_value_kept, gap_recovered
from .prefix import PrefixResult, prefix_nll
from .questions import Question, QuestionResult, answer_questions, read_questions


__all__ = [
    "Condition",
    "ContinuationScore",
    "PrefixResult",
    "Question",
    "QuestionResult",
    "answer_questions",
    "conditions",
    "context_value_kept",
    "gap_recovered",
    "prefill",
    "prefix_nll",
    "random_mapper",
    "read_questions",
    "score_continuation",
]
