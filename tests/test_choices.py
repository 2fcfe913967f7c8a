"""Multiple choice: what the options of a question score on a cache is what they score in one piece."""

import json
import math

import pytest
import torch

from hf_kvtransfer import KVMapper
from hf_kvtransfer.errors import KVTransferError
from hf_kvtransfer.evaluation import Choice, ChoiceResult, answer_choices, conditions, read_choices


CHOICES = [
    Choice("Where is the kettle?", ("In the garden", "In the old barn by the river", "attic"), (0,)),
    Choice("Who put the lamp there?", ("Anna", "Tom and the others", "no one", "Mary"), (1, 2)),
    Choice("What is in the box?", ("a ball", "a comb and two long scarves"), (1,)),
]
SHOTS = [Choice("Where is the saddle?", ("In the stable", "In prison"), (1,))]


@pytest.fixture(scope="module")
def answered(family_model, family_tokenizer):
    """Of two models of other shapes; the mapper's figures don't matter here."""
    source, target = family_model("small"), family_model("large")
    layers = target.config.num_hidden_layers
    mapper = KVMapper.for_pair(source, target, support=[[0]] * layers)
    ways = conditions(source, target, mapper)
    return ways, answer_choices(ways, CHOICES, family_tokenizer, shots=SHOTS, progress=False)


@torch.no_grad()
def in_one_piece(model, tokenizer, prompt, option):
    """The negative log-likelihood of an option after all that is before it, without any cache."""
    context = tokenizer(prompt, return_tensors="pt").input_ids
    answer = tokenizer(f" {option}", add_special_tokens=False, return_tensors="pt").input_ids
    logits = model(torch.cat([context, answer], dim=1)).logits[0, context.shape[1] - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, answer[0], reduction="sum"))


@pytest.mark.parametrize(("name", "of"), [("target native", "large"), ("source alone", "small")])
def test_options_score_what_they_score_in_one_piece(answered, family_model, family_tokenizer, name, of):
    shown = "Question: Where is the saddle?\nAnswer: In prison\n\n"
    for choice, scored in zip(CHOICES, answered[1][name].nll, strict=True):
        prompt = f"{shown}Question: {choice.question}\nAnswer:"
        direct = [in_one_piece(family_model(of), family_tokenizer, prompt, option) for option in choice.options]
        assert scored == pytest.approx(direct, rel=1e-4)


def test_without_context_the_last_token_alone_is_seen(answered, family_model, family_tokenizer):
    for choice, scored in zip(CHOICES, answered[1]["no context"].nll, strict=True):
        direct = [in_one_piece(family_model("large"), family_tokenizer, ":", option) for option in choice.options]
        assert scored == pytest.approx(direct, rel=1e-4)


def test_a_self_mapper_answers_as_the_model_does(family_model, family_tokenizer):
    model = family_model("small")
    ways = conditions(model, model, KVMapper.for_pair(model, model).set_as_identity())
    results = answer_choices(ways, CHOICES, family_tokenizer, progress=False)
    for native, transferred in zip(results["target native"].nll, results["transferred"].nll, strict=True):
        assert transferred == pytest.approx(native, rel=1e-4)
    # The next question's context, of another length.
    assert results["different document"].nll != results["transferred"].nll


def test_all_conditions_answer_all_questions(answered):
    ways, results = answered
    assert list(results) == [way.name for way in ways]
    for result in results.values():
        assert result.correct == [choice.correct for choice in CHOICES]
        assert [len(nll) for nll in result.nll] == [len(tokens) for tokens in result.tokens] == [3, 4, 2]
        assert all(math.isfinite(value) and value > 0 for nll in result.nll for value in nll)
        assert len(result.seconds) == 3
        assert result.median_seconds() >= 0


def test_accuracy_and_chance():
    result = ChoiceResult(
        nll=[[2.0, 3.0], [4.0, 4.2, 9.0, 9.0]],
        tokens=[[1, 4], [2, 3, 1, 1]],
        correct=[(0,), (1, 2)],
        seconds=[0.1, 0.3],
    )
    assert result.hits() == [True, False]
    assert result.accuracy() == 0.5
    # Per token: 2 against 0.75, and 2 against 1.4.
    assert result.hits(normalised=True) == [False, True]
    assert result.accuracy(normalised=True) == 0.5
    assert result.chance() == 0.5


def test_reading_a_file(tmp_path):
    rows = [
        {"centerpiece": c.question, "options": c.options, "correct_options_idx": c.correct, "other": 1} for c in CHOICES
    ]
    path = tmp_path / "choices.json"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    assert read_choices(path) == CHOICES


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        '{"centerpiece": "x", "options": ["a", "b"]}',
        '{"centerpiece": "x", "options": ["a"], "correct_options_idx": [1]}',
        '{"centerpiece": "x", "options": ["a"], "correct_options_idx": []}',
        "[1]",
        *(
            json.dumps({"centerpiece": "x", "options": ["a", "b"], "correct_options_idx": [0]} | changes)
            for changes in (
                {"correct_options_idx": [2]},
                {"correct_options_idx": [-1]},
                {"correct_options_idx": [True]},
                {"correct_options_idx": []},
                {"correct_options_idx": 0},
                {"options": "ab"},
                {"options": ["a", "a"]},
                {"options": ["a", " "]},
                {"options": ["a", 1]},
                {"options": ["a", "\ud800"]},
                {"centerpiece": 3},
            )
        ),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, line):
    path = tmp_path / "choices.json"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(KVTransferError, match="No multiple choice could be read.*line 1: "):
        read_choices(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(KVTransferError, match="it is empty"):
        read_choices(path)
    with pytest.raises(KVTransferError, match="FileNotFoundError"):
        read_choices(tmp_path / "absent.json")


def test_one_question_has_no_different_document(family_tokenizer):
    with pytest.raises(KVTransferError, match="1 questions of several options"):
        answer_choices([], CHOICES[:1], family_tokenizer)
