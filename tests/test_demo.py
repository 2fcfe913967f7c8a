"""The demo, and what it relies on: the tiny family is what its card says it is."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from hf_kvtransfer import KVTransferError, tokenizer_fingerprint
from hf_kvtransfer.cli import app
from hf_kvtransfer.demo import find_family, run_demo
from hf_kvtransfer.evaluation import read_questions


def test_the_whole_path_prints_every_condition(family):
    lines = []
    figures = run_demo(family, questions_per_kind=12, sequences=120, say=lines.append)
    text = "\n".join(lines)
    for name in ("source alone", "target native", "transferred", "random mapper", "different document", "no context"):
        assert name in text
    assert "gap recovered" in text
    assert "In words: " in text
    assert figures["target native"]["accuracy"] > 0.95
    assert (
        figures["no context"]["accuracy"] < figures["source alone"]["accuracy"] < figures["target native"]["accuracy"]
    )
    # What the published recipe keeps is in the text, not in the look-ups.
    assert figures["target native"]["text_nll"] < figures["transferred"]["text_nll"] < figures["no context"]["text_nll"]
    assert figures["transferred"]["answer_nll"] < figures["random mapper"]["answer_nll"]


def test_the_other_geometry_goes_through_too(family):
    figures = run_demo(
        family, source_name="wide", target_name="small", questions_per_kind=4, sequences=60, say=lambda _: None
    )
    assert "source cache raw" not in figures  # one KV head of 64 does not fit two of 32
    assert figures["transferred"]["text_nll"] < figures["random mapper"]["text_nll"]


def test_a_raw_source_cache_is_a_control_where_the_shapes_allow_it(family):
    figures = run_demo(
        family, source_name="small", target_name="small", questions_per_kind=4, sequences=60, say=lambda _: None
    )
    assert figures["source cache raw"]["accuracy"] == figures["target native"]["accuracy"]


def test_without_a_family_there_is_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(KVTransferError, match="Run the demo from a clone"):
        find_family(str(tmp_path))
    result = CliRunner().invoke(app, ["demo", "--family", str(tmp_path)])
    assert result.exit_code == 1
    assert "The tiny family was not found" in result.output


def test_members_share_a_tokenizer_and_differ_in_geometry(family):
    tokenizers = [AutoTokenizer.from_pretrained(family / name) for name in ("small", "large", "wide")]
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in tokenizers}) == 1
    shapes = {}
    for name in ("small", "large", "wide"):
        config = AutoConfig.from_pretrained(family / name)
        shapes[name] = (config.num_key_value_heads, config.head_dim)
    assert shapes["small"] == shapes["large"]
    assert shapes["wide"][0] != shapes["small"][0]
    assert shapes["wide"][1] != shapes["small"][1]


def test_weights_are_bfloat16_and_small(family):
    files = list(family.glob("*/model.safetensors"))
    assert len(files) >= 3
    assert sum(file.stat().st_size for file in files) < 10_000_000
    assert {AutoConfig.from_pretrained(file.parent).dtype for file in files} == {torch.bfloat16}


def test_every_answer_is_one_token_and_the_boundary_is_stable(family, family_tokenizer):
    questions = read_questions(family / "data" / "questions.jsonl")
    assert len(questions) >= 400
    for question in questions:
        parts = [
            family_tokenizer(text, add_special_tokens=False).input_ids
            for text in (question.document, question.question, question.answer)
        ]
        assert len(parts[2]) == 1
        whole = family_tokenizer(
            question.document + question.question + question.answer, add_special_tokens=False
        ).input_ids
        assert whole == [*parts[0], *parts[1], *parts[2]]
        assert question.answer in question.choices


def test_calibration_text_has_none_of_the_test_documents(family):
    test = {question.document for question in read_questions(family / "data" / "questions.jsonl")}
    lines = (family / "data" / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    calibration = [json.loads(line)["text"] for line in lines]
    assert not [text for text in calibration if any(text.startswith(document) for document in test)]
