"""The gate: a mapper carries the summary of its report, and loading can ask for it."""

import copy
import json
import logging
import math

import pytest
import torch
from transformers import AutoModel

from hf_kvtransfer import EvidenceError, KVMapper, MapperFileError
from hf_kvtransfer.evidence import EVALUATION, check_evidence, record_evidence, summary_of
from hf_kvtransfer.report import TransferReport

from .architectures import build


def figure(value, width=0.05):
    return {"value": value, "low": value - width, "high": value + width}


def measured(task="questions", native=1.0, alone=0.2, transferred=0.9, nothing=0.0, gap=0.875, **changes):
    """One measure as a report holds it; `gap=None` where the source is no worse."""
    values = {
        "task": task,
        "metric": "accuracy",
        "kind": "look-up",
        "unit": "share",
        "higher_is_better": True,
        "chance": 0.1,
        "n": 40,
        "conditions": {
            "source alone": figure(alone),
            "target native": figure(native),
            "transferred": figure(transferred),
            "different document": figure(nothing),
            "no context": figure(nothing),
        },
        "gap_recovered": None if gap is None else figure(gap),
        "context_value_kept": figure(0.9),
        "content_kept": None,
        "normalised_retention": figure(0.89),
    }
    return values | changes


def report_of(config, *measures, source="a", target="b", **changes):
    """A report of the mapper that a configuration is of."""
    return TransferReport(
        pair={"source": source, "target": target},
        mapper={
            name: getattr(config, name)
            for name in (
                *("preset", "map_type", "k", "anchor_layers", "anchor_start", "exact_prefix", "exact_suffix"),
                "calibration",
            )
        }
        | {"parameters": 10, "cost_share": 0.2, "cost_tokens": 1024},
        measures=list(measures) or [measured()],
        **changes,
    )


@pytest.fixture(scope="module")
def empty():
    return KVMapper.for_pair(build("llama"), build("qwen3", seed=1), support=[[0], [0, 1], [1, 2]], k=2)


@pytest.fixture
def mapper(empty):
    mapper = copy.deepcopy(empty)
    with torch.no_grad():
        for parameter in mapper.parameters():
            parameter.normal_(std=0.1)
    return mapper


@pytest.fixture
def folder(mapper, tmp_path):
    mapper.save_pretrained(tmp_path / "mapper")
    return tmp_path / "mapper"


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "hf_kvtransfer.evidence"]


class TestWithoutEvidence:
    def test_a_mapper_without_evidence_warns_once(self, folder, caplog):
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                KVMapper.from_pretrained(folder)
        assert len(warnings_in(caplog)) == 1
        assert str(folder) in warnings_in(caplog)[0]
        assert "hf-kvtransfer evaluate" in warnings_in(caplog)[0]

    def test_another_mapper_warns_too(self, mapper, folder, tmp_path, caplog):
        mapper.save_pretrained(tmp_path / "other")
        with caplog.at_level(logging.WARNING):
            KVMapper.from_pretrained(folder)
            KVMapper.from_pretrained(tmp_path / "other")
        assert len(warnings_in(caplog)) == 2

    def test_what_is_about_to_be_measured_is_loaded_without_a_word(self, folder, caplog):
        with caplog.at_level(logging.WARNING):
            KVMapper.from_pretrained(folder, min_gap_recovered=False)
        assert not warnings_in(caplog)

    @pytest.mark.parametrize("load", [KVMapper.from_pretrained, AutoModel.from_pretrained])
    def test_it_is_refused_where_evidence_is_asked_for(self, folder, load):
        with pytest.raises(EvidenceError, match="carries no evaluation; expected one that was shown"):
            load(folder, min_gap_recovered=0.0)

    def test_it_is_refused_before_the_weights_are_read(self, folder):
        (folder / "model.safetensors").unlink()
        with pytest.raises(EvidenceError, match="carries no evaluation"):
            KVMapper.from_pretrained(folder, min_gap_recovered=0.5)

    @pytest.mark.parametrize("scores", [None, {}, {EVALUATION: None}, {EVALUATION: []}, {EVALUATION: {"measures": []}}])
    def test_whatever_is_no_evaluation_counts_as_none(self, scores):
        with pytest.raises(EvidenceError, match="carries no evaluation"):
            check_evidence({"scores": scores}, "here", 0.5)


class TestWithEvidence:
    def test_enough_is_loaded_without_a_warning(self, mapper, folder, caplog):
        record_evidence(folder, report_of(mapper.config))
        with caplog.at_level(logging.WARNING):
            KVMapper.from_pretrained(folder)
            KVMapper.from_pretrained(folder, min_gap_recovered=0.82)
        assert not warnings_in(caplog)

    def test_too_little_is_refused_with_what_was_scored_and_on_what(self, mapper, folder):
        record_evidence(
            folder, report_of(mapper.config, measured("wikitext", gap=0.99), measured("look-ups", gap=0.41))
        )
        with pytest.raises(EvidenceError) as refusal:
            KVMapper.from_pretrained(folder, min_gap_recovered=0.8)
        for words in (
            "recovers 41.0 % [36.0 %, 46.0 %]",
            "on look-ups (accuracy, n = 40)",
            "at least 80.0 %",
            str(folder),
        ):
            assert words in str(refusal.value)

    def test_what_counts_is_what_is_shown(self, mapper, folder):
        """The lower end of the interval, and no more than so few questions can show."""
        record_evidence(folder, report_of(mapper.config, measured(gap=0.9)))
        KVMapper.from_pretrained(folder, min_gap_recovered=0.84)
        with pytest.raises(EvidenceError, match=r"which shows 85.0 %; expected at least 86.0 %"):
            KVMapper.from_pretrained(folder, min_gap_recovered=0.86)
        record_evidence(folder, report_of(mapper.config, measured(gap=1.0, n=5)))
        with pytest.raises(EvidenceError, match=r"n = 5\), which shows 40.0 %; expected at least 50.0 %"):
            KVMapper.from_pretrained(folder, min_gap_recovered=0.5)

    def test_where_there_is_no_gap_there_is_nothing_to_recover(self, mapper, folder):
        record_evidence(folder, report_of(mapper.config, measured(alone=1.0, gap=None)))
        KVMapper.from_pretrained(folder)
        with pytest.raises(EvidenceError, match="has no gap recovered: on everything it measured"):
            KVMapper.from_pretrained(folder, min_gap_recovered=0.5)

    def test_a_measure_without_a_gap_doesnt_count_against_the_others(self, mapper, folder):
        record_evidence(folder, report_of(mapper.config, measured(alone=1.0, gap=None), measured(gap=0.9)))
        KVMapper.from_pretrained(folder, min_gap_recovered=0.84)

    def test_a_gap_without_an_interval_is_none(self, mapper, folder):
        nothing = {"value": -3.0, "low": None, "high": None}
        record_evidence(folder, report_of(mapper.config, measured(gap_recovered=nothing), measured(gap=0.9)))
        KVMapper.from_pretrained(folder, min_gap_recovered=0.84)

    @pytest.mark.parametrize(
        "gap",
        [
            0.99,
            "0.99",
            [],
            {"value": math.nan, "low": 0.9, "high": 1.0},
            {"value": 0.95, "low": math.nan, "high": math.nan},
            {"value": 0.95, "low": "0.9", "high": 1.0},
            {"value": 0.95, "low": 0.9, "high": True},
            {"value": 0.95, "low": 0.9, "high": None},
            {"value": None, "low": 0.9, "high": 1.0},
            {"value": "0.9", "low": None, "high": None},
            {"value": 0.5, "low": 0.9, "high": 1.0},
            {"value": 0.95, "low": 1.0, "high": 0.9},
            {"value": 0.95, "low": 0.9, "high": 10**400},
        ],
    )
    def test_a_measure_that_cant_be_read_is_not_left_out(self, mapper, gap):
        summary = summary_of(report_of(mapper.config, measured(gap=0.9), measured("more", gap=0.9)))
        config = {"scores": {EVALUATION: summary}}
        check_evidence(config, "here", 0.8)
        summary["measures"][1]["gap_recovered"] = gap
        with pytest.raises(EvidenceError, match="whose measure 1 can't be read"):
            check_evidence(config, "here", 0.8)
        summary["measures"][1] = gap
        with pytest.raises(EvidenceError, match="whose measure 1 can't be read"):
            check_evidence(config, "here", 0.8)

    @pytest.mark.parametrize("digests", [None, {}, ["0"]])
    def test_what_is_bound_to_weights_needs_their_digests(self, mapper, folder, digests):
        record_evidence(folder, report_of(mapper.config))
        config = json.loads((folder / "config.json").read_text())
        check_evidence(config, "here", 0.8)
        with pytest.raises(EvidenceError, match="an evaluation of other weights than its own"):
            check_evidence({**config, "digests": digests}, "here", 0.8)

    @pytest.mark.parametrize(
        "minimum", [True, "0.8", math.nan, math.inf, 80, [0.8], 10**400, pytest.param(10**5000, id="huge")]
    )
    def test_the_minimum_is_a_share(self, folder, minimum):
        with pytest.raises(EvidenceError, match="expected a share of at most 1"):
            KVMapper.from_pretrained(folder, min_gap_recovered=minimum)

    def test_it_goes_where_the_weights_go(self, mapper, folder, tmp_path):
        record_evidence(folder, report_of(mapper.config))
        KVMapper.from_pretrained(folder).save_pretrained(tmp_path / "copy")
        KVMapper.from_pretrained(tmp_path / "copy", min_gap_recovered=0.8)

    def test_other_weights_under_it_have_no_evidence(self, mapper, folder, tmp_path, caplog):
        record_evidence(folder, report_of(mapper.config))
        changed = KVMapper.from_pretrained(folder)
        with torch.no_grad():
            next(changed.parameters()).add_(1)
        changed.save_pretrained(tmp_path / "trained")
        with pytest.raises(EvidenceError, match="an evaluation of other weights than its own"):
            KVMapper.from_pretrained(tmp_path / "trained", min_gap_recovered=0.1)
        with caplog.at_level(logging.WARNING):
            KVMapper.from_pretrained(tmp_path / "trained")
        assert len(warnings_in(caplog)) == 1

    def test_a_summary_that_was_put_into_the_configuration_is_bound_when_it_is_saved(self, mapper, tmp_path):
        mapper.config.scores = {EVALUATION: summary_of(report_of(mapper.config))}
        mapper.save_pretrained(tmp_path / "mapper")
        changed = KVMapper.from_pretrained(tmp_path / "mapper", min_gap_recovered=0.8)
        with torch.no_grad():
            next(changed.parameters()).add_(1)
        changed.save_pretrained(tmp_path / "trained")
        with pytest.raises(EvidenceError, match="other weights"):
            KVMapper.from_pretrained(tmp_path / "trained", min_gap_recovered=0.8)


class TestRecording:
    def test_the_summary_says_what_the_report_says(self, mapper):
        report = report_of(mapper.config, measured(), measured("none", native=0.0, gap=None))
        summary = summary_of(report)
        assert summary["report"] == report.digest()
        assert summary["verdict"] == report.verdict()
        first, second = summary["measures"]
        assert first["conditions"]["transferred"] == figure(0.9)
        assert first["retention"] == pytest.approx(0.9)
        assert first["gap_recovered"] == figure(0.875)
        assert second["retention"] is None
        assert json.loads(json.dumps(summary)) == summary

    def test_the_files_stay_valid_and_nothing_else_changes(self, mapper, folder):
        before = json.loads((folder / "config.json").read_text())
        weights = (folder / "model.safetensors").read_bytes()
        record_evidence(folder, report_of(mapper.config))
        after = json.loads((folder / "config.json").read_text())
        assert after["scores"].pop(EVALUATION)
        assert after == before
        assert (folder / "model.safetensors").read_bytes() == weights
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]

    def test_a_second_report_takes_the_place_of_the_first(self, mapper, folder):
        for gap in (0.9, 0.3):
            record_evidence(folder, report_of(mapper.config, measured(gap=gap)))
        with pytest.raises(EvidenceError, match="recovers 30.0 %"):
            KVMapper.from_pretrained(folder, min_gap_recovered=0.5)

    def test_a_report_of_another_mapper_is_refused(self, mapper, folder):
        before = (folder / "config.json").read_bytes()
        for changes in ({"k": 3}, {"preset": "auto"}, {"calibration": {"sequences": 3}}):
            config = copy.deepcopy(mapper.config)
            for name, value in changes.items():
                setattr(config, name, value)
            with pytest.raises(EvidenceError, match="The report is of another mapper"):
                record_evidence(folder, report_of(config))
        assert (folder / "config.json").read_bytes() == before

    @pytest.mark.parametrize("content", [None, "", "[]", '{"model_type": "llama"}', "[" * 100_000])
    def test_a_folder_without_a_mapper_is_refused(self, mapper, tmp_path, content):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(MapperFileError, match="No mapper's configuration could be read from"):
            record_evidence(tmp_path, report_of(mapper.config))

    def test_it_is_recorded_in_the_newer_mapper_of_an_interrupted_save(self, mapper, folder, tmp_path):
        mapper.save_pretrained(tmp_path / "newer")
        (tmp_path / "newer").rename(folder / ".saved")
        record_evidence(folder, report_of(mapper.config))
        KVMapper.from_pretrained(folder, min_gap_recovered=0.8)
