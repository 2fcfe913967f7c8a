"""Every row is full, no token is lost or made up, and text that can't be read is refused in a sentence."""

import json
import warnings
from itertools import chain, islice

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_kvtransfer.calibration import iter_texts, pack
from hf_kvtransfer.calibration.texts import describe_source
from hf_kvtransfer.errors import CalibrationError


DOCUMENTS = [f"Document {i} says that {i} and {i + 1} make {2 * i + 1}. " * (1 + i % 4) for i in range(60)]


def train_tokenizer(bos=False, eos=True):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<bos>", "<eos>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>" if bos else None,
        eos_token="<eos>" if eos else None,
        # Shorter than many documents: that must not matter, nor make the tokenizer complain.
        model_max_length=16,
    )


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def stream(texts, tokenizer, before_first, between):
    """What the rows must concatenate to."""
    ids = []
    for number, text in enumerate(text for text in texts if text):
        ids += (between if number else before_first) + tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


class TestPack:
    @pytest.mark.parametrize("sequence_length", [2, 7, 64, 500])
    def test_rows_are_the_text_in_order_without_padding(self, tokenizer, sequence_length):
        expected = stream(DOCUMENTS, tokenizer, [], [tokenizer.eos_token_id])
        rows = list(pack(DOCUMENTS, tokenizer, sequence_length, None))
        assert {len(row) for row in rows} == {sequence_length}
        assert list(chain(*rows)) == expected[: len(expected) // sequence_length * sequence_length]

    def test_documents_start_with_bos_where_the_tokenizer_starts_them_so(self):
        tokenizer = train_tokenizer(bos=True)
        expected = stream(DOCUMENTS, tokenizer, [0], [0])
        rows = list(pack(DOCUMENTS, tokenizer, 50, None))
        assert {len(row) for row in rows} == {50}
        assert all(row[0] == 0 for row in rows)
        # As in use, where every context begins with it: what would begin in the middle of a text is told so.
        told, seen = [], 0
        for row in rows:
            own = row if expected[seen] == 0 else row[1:]
            told += own
            seen += len(own)
        assert told == expected[:seen]
        assert len(expected) - seen < 50

    def test_without_special_tokens_documents_follow_each_other(self):
        tokenizer = train_tokenizer(eos=False)
        rows = list(pack(DOCUMENTS, tokenizer, 50, None))
        assert list(chain(*rows)) == stream(DOCUMENTS, tokenizer, [], [])[: 50 * len(rows)]

    def test_empty_documents_leave_no_trace(self, tokenizer):
        with_empty = [text for document in DOCUMENTS for text in ("", document)]
        assert list(pack(with_empty, tokenizer, 50, None)) == list(pack(DOCUMENTS, tokenizer, 50, None))

    def test_text_is_read_only_as_far_as_needed(self, tokenizer):
        read = []

        def endless():
            while True:
                read.append(len(read))
                yield DOCUMENTS[len(read) % len(DOCUMENTS)]

        rows = list(pack(endless(), tokenizer, 32, 10))
        assert len(rows) == 10
        assert len(read) <= 64

    def test_fewer_rows_are_all_a_longer_request_starts_with(self, tokenizer):
        assert list(pack(DOCUMENTS, tokenizer, 32, 3)) == list(islice(pack(DOCUMENTS, tokenizer, 32, 20), 3))

    def test_too_little_text_for_all_rows_warns_with_the_number(self, tokenizer):
        available = len(list(pack(DOCUMENTS, tokenizer, 100, None)))
        with pytest.warns(UserWarning, match=f"enough for {available} of 500 sequences of 100 tokens"):
            assert len(list(pack(DOCUMENTS, tokenizer, 100, 500))) == available

    def test_enough_text_doesnt_warn(self, tokenizer):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(pack(DOCUMENTS, tokenizer, 32, 10))) == 10

    def test_the_only_row_may_be_short(self, tokenizer):
        with pytest.warns(UserWarning, match="enough for 1 of 5"):
            (row,) = pack(DOCUMENTS[:1], tokenizer, 10_000, 5)
        assert row == tokenizer(DOCUMENTS[0])["input_ids"]

    @pytest.mark.parametrize("texts", [[], ["", ""], ["a"]])
    def test_too_little_text_for_one_row_is_refused(self, tokenizer, texts):
        with pytest.raises(CalibrationError, match="too few to calibrate on"):
            list(pack(texts, tokenizer, 10, 5))

    def test_impossible_arguments_are_refused_at_once(self, tokenizer):
        with pytest.raises(CalibrationError, match="sequence_length is 1"):
            pack(DOCUMENTS, tokenizer, 1, 5)
        with pytest.raises(CalibrationError, match="num_sequences is 0"):
            pack(DOCUMENTS, tokenizer, 10, 0)

    def test_a_text_that_is_no_string_is_refused(self, tokenizer):
        with pytest.raises(CalibrationError, match="type int"):
            list(pack([*DOCUMENTS, 3], tokenizer, 10, None))

    def test_a_long_document_doesnt_make_the_tokenizer_complain(self, caplog):
        fresh = train_tokenizer()
        list(pack(["word " * 5000], fresh, 100, None))
        assert not caplog.records


class TestIterTexts:
    def test_every_source_gives_the_same_texts(self, tmp_path):
        lines = tmp_path / "rows.jsonl"
        lines.write_text("\n\n".join(json.dumps({"text": text}) for text in DOCUMENTS), encoding="utf-8")
        dataset = datasets.Dataset.from_dict({"text": DOCUMENTS})
        sources = [
            DOCUMENTS,
            tuple(DOCUMENTS),
            (text for text in DOCUMENTS),
            [{"text": text} for text in DOCUMENTS],
            lines,
            str(lines),
            dataset,
            dataset.to_iterable_dataset(),
            datasets.DatasetDict(train=dataset),
        ]
        for source in sources:
            assert list(iter_texts(source)) == DOCUMENTS, describe_source(source)

    def test_blank_lines_separate_the_documents_of_a_text_file(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_text("\n\none\nstill öne\n \n\ntwo\n", encoding="utf-8")
        assert list(iter_texts(path)) == ["one\nstill öne\n", "two\n"]
        assert list(iter_texts(path, whole_file=True)) == ["\n\none\nstill öne\n \n\ntwo\n"]

    def test_the_field_can_be_named(self):
        assert list(iter_texts([{"body": "x"}], text_field="body")) == ["x"]

    def test_a_missing_field_is_named_with_those_there_are(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text('{"text": "a"}\n{"body": "b", "title": "c"}\n')
        with pytest.raises(CalibrationError, match=r"Row 1 of rows.jsonl has no field 'text', it has body, title"):
            list(iter_texts(path))

    @pytest.mark.parametrize("text", [None, 3, ["a", "b"]])
    def test_a_text_that_is_no_string_is_refused(self, text):
        with pytest.raises(CalibrationError, match=f"Text 0 .* type {type(text).__name__}, expected a string"):
            list(iter_texts([{"text": text}]))

    @pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl", "folder/of/something"])
    def test_a_missing_file_is_refused_at_once(self, tmp_path, name):
        with pytest.raises(CalibrationError, match="There is no file"):
            iter_texts(str(tmp_path / name))
        with pytest.raises(CalibrationError, match="There is no file"):
            iter_texts(tmp_path / name)
        with pytest.raises(CalibrationError, match="There is no file"):
            iter_texts(name)

    def test_a_broken_line_is_named(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text('{"text": "a"}\n{"text": \n')
        with pytest.raises(CalibrationError, match=r"Line 2 of rows.jsonl isn't JSON"):
            list(iter_texts(path))

    def test_a_file_that_isnt_text_is_refused(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(CalibrationError, match="UTF-8"):
            list(iter_texts(path))

    def test_a_split_that_isnt_there_is_refused(self):
        with pytest.raises(CalibrationError, match="no split 'train', it has test"):
            iter_texts(datasets.DatasetDict(test=datasets.Dataset.from_dict({"text": DOCUMENTS})))

    def test_something_else_is_refused(self):
        with pytest.raises(CalibrationError, match="Can't read text from int"):
            iter_texts(3)

    def test_the_default_dataset_is_streamed(self, monkeypatch):
        calls = []
        monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: calls.append((a, k)) or [{"text": "x"}])
        assert list(iter_texts()) == ["x"]
        assert calls == [(("HuggingFaceFW/fineweb-edu", "sample-10BT"), {"split": "train", "streaming": True})]

    @pytest.mark.parametrize("when", ["opening", "reading"])
    def test_an_unreachable_dataset_says_what_to_do(self, monkeypatch, when):
        def load_dataset(*_, **__):
            def read():
                yield {"text": "first"}
                raise ConnectionError("no network")

            if when == "opening":
                raise ConnectionError("no network")
            return read()

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        texts = iter_texts("owner/name")
        with pytest.raises(
            CalibrationError, match=r"'owner/name' can't be read \(ConnectionError: no network\).*local"
        ):
            list(texts)

    def test_an_error_of_the_reader_stays_its_own(self, monkeypatch):
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": "x"}] * 3)
        with pytest.raises(ZeroDivisionError):
            next(len(text) / 0 for text in iter_texts("owner/name"))


def test_a_description_holds_no_folder(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("x")
    assert describe_source(path) == describe_source(str(path)) == "text.txt"
    assert describe_source(["a", "b"]) == "2 texts"
    assert describe_source("owner/name") == "owner/name"
    assert describe_source("HuggingFaceFW/fineweb-edu") == "HuggingFaceFW/fineweb-edu (sample-10BT)"
