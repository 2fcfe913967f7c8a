"""What fitting, evaluation and the command line refuse before they do any work, each with a sentence."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_kvtransfer import CalibrationError, KVMapper, KVTransferError, MapperFileError, PairMismatchError
from hf_kvtransfer.cli import app
from hf_kvtransfer.evaluation import answer_questions, conditions, prefix_nll, read_questions
from hf_kvtransfer.loading import load_model

from .conftest import FAMILY


TEXTS = ["Anna put the kettle in the garden. Ben put the lamp in the attic."] * 40
SMALL = {"sequence_length": 32, "num_sequences": 6, "token_stride": 2, "k": 1, "ridge_lambda": 1.0}


@pytest.fixture
def fit(family_model, family_tokenizer):
    def run(texts=TEXTS, **changes):
        arguments = {**SMALL, "tokenizer": family_tokenizer, **changes}
        return KVMapper.fit(family_model("small"), family_model("large"), texts, **arguments)

    return run


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("num_sequences", 1.5, "num_sequences is 1.5, expected a whole number"),
        ("num_sequences", True, "num_sequences is True"),
        ("sequence_length", "64", "sequence_length is '64'"),
        ("token_stride", None, "token_stride is None"),
        ("token_stride", 32, "only the first token of each sequence"),
        ("batch_size", 0, "batch_size is 0"),
        ("heldout_fraction", "0.1", "heldout_fraction is '0.1'"),
        ("ridge_lambda", "much", "ridge_lambda is 'much'"),
        ("ridge_lambda", float("nan"), "ridge_lambda is nan"),
        ("max_cost", float("inf"), "max_cost is inf"),
        ("tokenizer", None, "tokenizer is a NoneType"),
        ("k", 9, "k is 9"),
    ],
)
def test_impossible_arguments_of_a_fit(fit, name, value, sentence):
    with pytest.raises(CalibrationError, match=sentence):
        fit(**{name: value})


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [(["\ud800"] * 40, "no valid Unicode"), ("one long text\n" * 200, "Got one long string"), ([3], "is of type int")],
)
def test_texts_that_are_none(fit, texts, sentence):
    with pytest.raises(CalibrationError, match=sentence):
        fit(texts)


def test_a_statistics_folder_that_can_not_be_written_is_refused_before_the_work(fit, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "\0"):
        with pytest.raises(MapperFileError, match="Nothing can be saved in"):
            fit(statistics_dir=folder)


def test_a_fit_does_not_depend_on_ambient_precision(fit):
    plain = fit()
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = fit()
    torch.set_default_dtype(torch.bfloat16)
    try:
        under_half = fit()
    finally:
        torch.set_default_dtype(torch.float32)
    for other in (under_autocast, under_half):
        assert other.dtype == torch.float32
        for one, two in zip(plain.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two)


def test_the_same_text_is_not_merged_twice(fit, tmp_path):
    from hf_kvtransfer import CalibrationStatistics

    fit(statistics_dir=tmp_path)
    statistics, again = (CalibrationStatistics.load(tmp_path, mmap=False) for _ in range(2))
    for other in (statistics, again):
        with pytest.raises(CalibrationError, match="every token would count twice"):
            statistics.merge(other)


def test_weights_that_are_no_numbers_are_another_model(family_model, family_tokenizer):
    mapper = KVMapper.for_pair(family_model("small"), family_model("large"))
    broken = load_model(str(FAMILY / "small"), dtype="float32")
    with torch.no_grad():
        for parameter in broken.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(PairMismatchError, match="other weights"):
        mapper.check_pair(source=broken)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    for file in (FAMILY / "small").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KVTransferError, match=r"lacks 1 of the model's weights .*k_proj"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(KVTransferError, match="could not be loaded"):
        load_model(str(tmp_path))


class TestEvaluation:
    @pytest.mark.parametrize("sizes", [{"prefix": 0}, {"prefix": 1}, {"scored": 0}, {"scored": -1}, {"max_chunks": -1}])
    def test_chunks_of_no_size(self, family_tokenizer, sizes):
        with pytest.raises(KVTransferError, match="expected a whole number of at least"):
            prefix_nll([], "text " * 500, family_tokenizer, **{"prefix": 8, **sizes})

    def test_too_little_text(self, family_tokenizer):
        with pytest.raises(KVTransferError, match="expected at least two"):
            prefix_nll([], "short", family_tokenizer)

    def test_a_single_question_has_no_different_document(self, family_tokenizer):
        question = read_questions(FAMILY / "data" / "questions.jsonl")[0]
        with pytest.raises(KVTransferError, match="a different document to each"):
            answer_questions([], [question], family_tokenizer)

    def test_questions_with_any_line_separator_inside(self, tmp_path):
        row = {"kind": "a", "document": "one\u2028two", "question": " b", "answer": " c"}
        (tmp_path / "questions.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
        assert read_questions(tmp_path / "questions.jsonl")[0].document == "one\u2028two"

    def test_every_condition_is_named_once(self, family_model):
        mapper = KVMapper.for_pair(family_model("small"), family_model("small")).set_as_identity()
        names = [way.name for way in conditions(family_model("small"), family_model("small"), mapper)]
        assert len(names) == len(set(names)) == 7


class TestCommandLine:
    def invoke(self, *arguments, **keywords):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], **keywords)
        assert result.exit_code in (1, 2), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return " ".join(result.output.replace("│", " ").split())

    def test_fit(self, tmp_path):
        pair = FAMILY / "small", FAMILY / "large"
        data = ("--data", FAMILY / "data" / "calibration.jsonl")
        (tmp_path / "file").write_text("")
        assert "Nothing can be saved" in self.invoke("fit", *pair, tmp_path / "file" / "mapper", *data)
        assert "could not be loaded" in self.invoke("fit", *pair, tmp_path / "a", *data, "--dtype", "nope")
        assert "could not be loaded" in self.invoke("fit", *pair, tmp_path / "a", *data, "--device", "nope")
        assert "is not a number of layers" in self.invoke("fit", *pair, tmp_path / "a", *data, "--k", "²")

    def test_a_damaged_tokenizer_does_not_switch_the_comparison_off(self, tmp_path):
        for file in (FAMILY / "small").iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "tokenizer.json").write_text("{")
        assert "No tokenizer could be loaded" in self.invoke("check", FAMILY / "small", tmp_path)

    def test_check_of_an_impossible_k(self):
        assert "from 1 to 4" in self.invoke("check", FAMILY / "small", FAMILY / "large", "--k", "99")
        self.invoke("check", FAMILY / "small", FAMILY / "large", "--k", "0")

    def test_generate_without_anything_to_read(self, fit, tmp_path):
        fit().save_pretrained(tmp_path / "mapper")
        arguments = ("generate", FAMILY / "small", FAMILY / "large", tmp_path / "mapper")
        assert "expected two or more" in self.invoke(*arguments, "--prompt", "")
        assert "expected two or more" in self.invoke(*arguments, input="")
        (tmp_path / "prompt").write_bytes(b"\xff\xfe\xff")
        assert "could not be read" in self.invoke(*arguments, "--prompt-file", tmp_path / "prompt")
        self.invoke(*arguments, "--prompt", "kettle in garden", "--max-new-tokens", "0")
