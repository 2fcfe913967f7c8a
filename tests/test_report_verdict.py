"""The verdict says the least that the figures show, whatever they are."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvtransfer.errors import KVTransferError
from hf_kvtransfer.evaluation import context_value_kept, gap_recovered
from hf_kvtransfer.evaluation.measures import normalised_retention
from hf_kvtransfer.report import measure
from hf_kvtransfer.report.verdict import LEVELS, judge

from .test_report import LEVELS as NLL
from .test_report import answered, sample, texts


GOOD = {"source alone": 0.6, "target native": 1.0, "transferred": 1.0, "different document": 0.05, "no context": 0.0}


def lookups(n=120, **shares):
    given = {**GOOD, **{name.replace("_", " "): share for name, share in shares.items()}}
    return measure("questions", "accuracy", "look-up", answered(given, n), chance=0.1, samples=200)


def text(n=60, **levels):
    given = {**NLL, **{name.replace("_", " "): level for name, level in levels.items()}}
    return measure("text", "nll", "text", texts(given, n), unit="nats per token", higher_is_better=False, samples=200)


def level(*measures):
    return judge(measures).level


NEAR_TEXT = text(transferred=4.389)
NO_TEXT = text(transferred=4.47)

CASES = {
    "native on everything": ((lookups(), NEAR_TEXT), "near native"),
    "most look-ups": ((lookups(transferred=0.9), NEAR_TEXT), "keeps most"),
    "near look-ups, less of the text": ((lookups(), text(transferred=4.412)), "keeps most"),
    "some look-ups": ((lookups(transferred=0.4, source_alone=0.2), NEAR_TEXT), "keeps some"),
    "one kind of look-up is lost": ((lookups(), lookups(transferred=0.05, source_alone=0.0)), "keeps some"),
    "no look-ups, and the text below the source": (
        (lookups(transferred=0.05), text(source_alone=4.391, transferred=4.4)),
        "hopeless",
    ),
    "no look-ups, all of the text": ((lookups(transferred=0.05), NEAR_TEXT), "keeps text but not look-ups"),
    "nothing of either": ((lookups(transferred=0.05), NO_TEXT), "hopeless"),
    "nothing of the text, look-ups not asked": ((NO_TEXT,), "hopeless"),
    "all of the text, look-ups not asked": ((NEAR_TEXT,), "look-ups not shown"),
    "look-ups as the source does them": ((lookups(transferred=0.6), NEAR_TEXT), "no better"),
    "look-ups kept, and below the source": ((lookups(transferred=0.5), NEAR_TEXT), "no better"),
    "text below the source": ((lookups(), text(source_alone=4.391, transferred=4.4)), "no better"),
    "a source as good as native leaves no gap": ((lookups(source_alone=1.0), NEAR_TEXT), "near native"),
    "a native target that knows nothing": ((lookups(target_native=0.05, transferred=0.05),), "not measured"),
    "nothing": ((), "not measured"),
}


@pytest.mark.parametrize(("measures", "expected"), CASES.values(), ids=CASES)
def test_each_level_is_reached(measures, expected):
    assert level(*measures).startswith(expected)
    assert not measures or str(judge(measures))


def test_every_level_has_its_case():
    assert {level(*measures) for measures, _ in CASES.values()} == set(LEVELS)


def test_fewer_right_answers_never_make_a_better_verdict():
    found = [LEVELS.index(level(lookups(transferred=share / 20), NEAR_TEXT)) for share in range(20, -1, -1)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) >= 4


@pytest.mark.parametrize("fewer", [1, 3, 10, 29])
def test_few_questions_never_show_that_a_mapper_is_near_native(fewer):
    assert level(lookups(n=30), NEAR_TEXT) == "near native"
    verdict = judge([lookups(n=fewer), NEAR_TEXT])
    assert LEVELS.index(verdict.level) < LEVELS.index("near native")
    if fewer > 3:
        assert "too few questions" in str(verdict)
    assert "too few questions" not in str(judge([lookups(n=30), NEAR_TEXT]))


@pytest.mark.parametrize(
    "worse",
    [lookups(transferred=0.5, source_alone=0.1), lookups(transferred=0.05), text(transferred=4.43), NO_TEXT],
    ids=["look-ups", "lost look-ups", "text", "lost text"],
)
def test_a_worse_measure_beside_good_ones_is_not_averaged_away(worse):
    assert LEVELS.index(level(lookups(), NEAR_TEXT, worse)) < LEVELS.index("near native")


def test_likelier_answers_are_not_right_answers():
    likelier = measure(
        "questions",
        "nll",
        "look-up",
        texts({name: 5 * (1 - share) for name, share in {**GOOD, "transferred": 0.5}.items()}),
        unit="nats per answer",
        higher_is_better=False,
        samples=200,
    )
    assert level(lookups(transferred=0.05), likelier) == "hopeless"
    assert level(likelier) != "hopeless"


def test_what_a_level_hides_is_said():
    verdict = str(judge([lookups(anchor_alone=1.0, random_mapper=1.0, source_alone=1.0)]))
    assert "near native" in verdict.lower()
    for said in (
        "the anchor alone isn't shown to do worse",
        "a random mapper isn't shown to do worse",
        "there is no gap to recover",
    ):
        assert said in verdict
    assert "anchor alone isn't shown" not in str(judge([lookups(anchor_alone=0.5)]))
    assert "different document, converted, isn't shown to do worse" in str(judge([lookups(transferred=0.05)]))
    assert "No look-ups were measured" in str(judge([NEAR_TEXT]))
    assert "The anchor alone was not measured" in str(judge([lookups()], has_anchor=True))


def test_missing_controls_are_named_and_cost_the_best_verdicts():
    bare = measure(
        "questions", "accuracy", "look-up", answered({"target native": 1.0, "transferred": 1.0}), samples=200
    )
    verdict = judge([bare])
    assert verdict.level == "not measured"
    assert "source alone, different document and no context" in str(verdict)


def test_the_verdict_gives_the_numbers_it_rests_on():
    one = lookups(transferred=0.9)
    verdict = str(judge([lookups(), one]))
    for figure in ("transferred 90.0 %", "target native 100.0 %", "source alone 60.0 %", "different document 5.0 %"):
        assert figure in verdict
    assert f"gap recovered {100 * one['gap_recovered']['value']:.1f} %" in verdict


def test_a_predicted_anchor_has_no_anchor_alone():
    mapper = sample().mapper
    measures = [lookups()]
    assert "anchor alone was not" in sample(measures=measures).verdict()
    assert "anchor alone was not" not in sample(measures=measures, mapper={**mapper, "anchor_start": 2}).verdict()
    assert "anchor alone was not" not in sample(measures=measures, mapper={**mapper, "anchor_layers": None}).verdict()


def test_shares_are_those_of_the_means():
    found = lookups(transferred=0.75)
    mean = {name: figure["value"] for name, figure in found["conditions"].items()}
    of = (mean["transferred"], mean["source alone"], mean["target native"])
    assert found["gap_recovered"]["value"] == pytest.approx(gap_recovered(*of))
    of = (mean["transferred"], mean["no context"], mean["target native"])
    assert found["context_value_kept"]["value"] == pytest.approx(context_value_kept(*of))
    of = (mean["transferred"], 0.1, mean["target native"])
    assert found["normalised_retention"]["value"] == pytest.approx(normalised_retention(*of))
    assert found["differences"]["source alone"]["value"] == pytest.approx(0.75 - 0.6)
    assert "transferred" not in found["differences"]


def test_turning_a_measure_round_changes_no_share():
    values = answered({**GOOD, "transferred": 0.85})
    right = measure("q", "accuracy", "look-up", values, samples=200)
    wrong = {name: [1 - value for value in column] for name, column in values.items()}
    errors = measure("q", "errors", "look-up", wrong, higher_is_better=False, samples=200)
    for share in ("gap_recovered", "context_value_kept", "content_kept"):
        assert errors[share] == pytest.approx(right[share])
    assert level(right) == level(errors)


def test_pairing_makes_differences_surer_than_conditions():
    found = text(transferred=4.40)
    wide = found["conditions"]["transferred"]
    narrow = found["differences"]["target native"]
    assert narrow["high"] - narrow["low"] < 0.2 * (wide["high"] - wide["low"])


def test_no_gap_no_share():
    found = lookups(source_alone=1.0)
    assert found["gap_recovered"] == {"value": None, "low": None, "high": None}
    nearly = lookups(source_alone=1 - 1 / 120)
    assert nearly["gap_recovered"]["low"] is None  # one question in 120 is no gap that is shown


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1)] * 5), min_size=2, max_size=6), st.booleans())
def test_any_values_give_a_measure_and_a_verdict(rows, higher):
    values = dict(zip(GOOD, zip(*rows, strict=True), strict=True))
    found = measure("q", "score", "look-up", values, higher_is_better=higher, chance=0.5, samples=20)
    verdict = judge([found])
    assert verdict.level in LEVELS[:-1]  # six questions show nothing near native
    assert "nan" not in str(verdict)


@pytest.mark.parametrize("lacking", ["transferred", "target native"])
def test_a_measure_needs_the_transfer_and_native(lacking):
    values = {name: column for name, column in answered(GOOD).items() if name != lacking}
    with pytest.raises(KVTransferError, match=lacking):
        measure("q", "accuracy", "look-up", values)


def test_retention_above_chance_of_a_native_target_at_chance_is_undefined():
    assert math.isnan(normalised_retention(0.6, 0.5, 0.5))
