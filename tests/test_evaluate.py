"""Laws of an evaluation: controls order as they must, two reports are the same, and one that was killed goes on."""

import copy
import json
import math

import pytest
import torch

from hf_kvtransfer import CalibrationStatistics, KVMapper, PairMismatchError
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.calibration.probes import layer_scores
from hf_kvtransfer.calibration.texts import starting_token
from hf_kvtransfer.errors import KVTransferError
from hf_kvtransfer.evaluation import (
    Choice,
    SharedPrefill,
    anchor_alone,
    conditions,
    evaluate_mapper,
    prefill,
    read_questions,
    run,
    tasks,
)
from hf_kvtransfer.evaluation.choices import choose
from hf_kvtransfer.evaluation.controls import raw_layers
from hf_kvtransfer.evaluation.drift import bin_means, mean_of_bins
from hf_kvtransfer.evaluation.inputs import Sizes, batches, chunks_of
from hf_kvtransfer.evaluation.journal import JOURNAL_FILE, Journal
from hf_kvtransfer.evaluation.prefix import prefix_nll, shortened, split_chunks
from hf_kvtransfer.evaluation.questions import Question, ask, different_documents

from .test_texts import DOCUMENTS, train_tokenizer


PREFIX, SCORED, CHUNKS = 64, 40, 6
SIZES = {"prefix": PREFIX, "scored": SCORED, "max_chunks": CHUNKS, "samples": 200, "progress": False}
CHOICES = [
    Choice("Where is the kettle?", ("In the garden", "In the old barn", "attic"), (0,)),
    Choice("Who put the lamp there?", ("Anna", "Tom and the others", "no one", "Mary"), (1, 2)),
    Choice("What is in the box?", ("a ball", "a comb and two long scarves"), (1,)),
    Choice("Where is the saddle?", ("In the stable", "In prison"), (1,)),
]


@pytest.fixture(scope="module")
def text(family):
    return (family / "data" / "text_test.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def questions(family):
    every = read_questions(family / "data" / "questions.jsonl")
    return [question for kind in ("terse", "moved") for question in [q for q in every if q.kind == kind][:6]]


@pytest.fixture(scope="module")
def statistics(tmp_path_factory):
    return tmp_path_factory.mktemp("statistics")


@pytest.fixture(scope="module")
def pair(family_model, family_tokenizer):
    return {"source": family_model("small"), "target": family_model("large"), "tokenizer": family_tokenizer}


@pytest.fixture(scope="module")
def mapper(pair, family, statistics):
    return KVMapper.fit(
        **pair,
        dataset=str(family / "data" / "calibration.jsonl"),
        anchor_layers=1,
        sequence_length=256,
        num_sequences=60,
        token_stride=2,
        statistics_dir=statistics,
        progress=False,
    )


@pytest.fixture(scope="module")
def plain(mapper, statistics):
    """What reads the source's cache alone, as published."""
    return KVMapper.from_statistics(statistics, preset="heo2026", exact_prefix=4, k=2)


@pytest.fixture(scope="module")
def evaluate(pair, mapper, text, questions):
    def run(**changes):
        given = {"texts": text, "questions": questions, "choices": CHOICES, "shots": 1, **SIZES, **changes}
        return evaluate_mapper(**pair, **({"mapper": mapper} | given))

    return run


@pytest.fixture(scope="module")
def report(evaluate, statistics):
    return evaluate(statistics=statistics)


def values(report, task, metric):
    found = next(one for one in report.measures if (one["task"], one["metric"]) == (task, metric))
    return {name: figure["value"] for name, figure in found["conditions"].items()}


class TestControls:
    def test_text_orders_as_it_must(self, report):
        nll = values(report, "text", "nll")
        # Native is as good as the transfer up to what this little text can tell.
        assert nll["target native"] < nll["transferred"] + 0.02
        assert nll["transferred"] < nll["different document"] < nll["source cache raw"] < nll["random mapper"]
        assert nll["target native"] < nll["no context"]
        assert abs(nll["different document"] - nll["no context"]) < abs(nll["random mapper"] - nll["no context"]) / 5

    def test_look_ups_order_as_they_must(self, report):
        accuracy, nll = (values(report, "questions", metric) for metric in ("accuracy", "nll"))
        assert accuracy["target native"] >= accuracy["transferred"] > accuracy["source cache raw"]
        assert accuracy["transferred"] - max(accuracy["different document"], accuracy["no context"]) > 0.6
        assert abs(accuracy["different document"] - accuracy["no context"]) < 0.25
        assert nll["transferred"] < nll["source cache raw"]

    def test_a_mapper_of_the_cache_alone_shows_that_look_ups_are_lost(self, evaluate, plain):
        found = evaluate(mapper=plain, choices=None, lengths=[])
        accuracy, nll = values(found, "questions", "accuracy"), values(found, "text", "nll")
        assert accuracy["transferred"] < accuracy["target native"] / 2
        assert nll["target native"] < nll["transferred"] < nll["source cache raw"]
        assert "anchor alone" not in nll

    def test_the_raw_cache_has_a_source_layer_for_each_target_layer(self, mapper, family_model, pair):
        assert raw_layers(mapper) == [0, 1, 1, 2, 2, 3]
        assert raw_layers(KVMapper.for_pair(pair["source"], pair["source"])) == [0, 1, 2, 3]
        assert raw_layers(KVMapper.for_pair(family_model("wide"), pair["source"])) is None
        raw = next(way for way in conditions(**without(pair), mapper=mapper) if way.name == "source cache raw")
        ids = torch.arange(5, 20)[None]
        cache, native = raw.read(ids, ids)[0], prefill(pair["source"], ids)
        assert [torch.equal(cache.layers[3].keys, native.layers[2].keys[:, :, :-1]), len(cache.layers)] == [True, 6]

    def test_the_source_reads_once_for_all_conditions(self, pair, mapper):
        read, asked = SharedPrefill(pair["source"]), []
        ways = conditions(**without(pair), mapper=mapper, read_source=lambda ids: asked.append(ids) or read(ids))
        plain = conditions(**without(pair), mapper=mapper)
        context, other = torch.arange(5, 25)[None], torch.arange(30, 50)[None]
        for way, alone in zip(ways, plain, strict=True):
            (cache, _), (expected, _) = way.read(context, other), alone.read(context, other)
            if cache is not None:
                torch.testing.assert_close(cache.layers[1].keys, expected.layers[1].keys)
                # It grows, and what the others read doesn't.
                way.model(input_ids=context[:, -1:], **{cache_keyword(way.model): cache})
        assert len(asked) == 5
        assert read(context) is read(context)
        assert read(context).get_seq_length() == 20

    def test_the_anchor_alone_reads_nothing_of_the_source(self, mapper, statistics, pair, report):
        alone = anchor_alone(mapper, CalibrationStatistics.load(statistics))
        assert alone.config.k == 0
        assert (alone.config.anchor_layers, alone.config.exact_prefix) == (1, mapper.config.exact_prefix)
        ids = torch.arange(5, 25)[None]
        caches = []
        for scale in (1.0, 3.0):
            cache = prefill(pair["source"], ids)
            for layer in cache.layers:
                layer.values = layer.values * scale
            caches.append(alone.convert(cache, input_ids=ids, target=pair["target"]))
        assert all(torch.equal(*(cache.layers[index].values for cache in caches)) for index in range(6))
        assert "anchor alone" in values(report, "questions", "accuracy")
        assert anchor_alone(KVMapper.for_pair(pair["source"], pair["target"]), statistics) is None


def without(pair):
    return {side: pair[side] for side in ("source", "target")}


class TestReport:
    def test_sections_have_the_shapes_of_the_pair(self, report, statistics):
        assert [len(heads) for heads in report.fidelity["r2"]["keys"]] == [2] * 6
        assert [len(heads) for heads in report.fidelity["cosine"]] == [6] * 6
        assert report.fidelity["chunks"] == CHUNKS
        assert min(min(heads) for heads in report.fidelity["r2"]["values"][:2]) > 0.999  # the target's own
        assert [len(bins) for bins in report.drift["nll"].values()] == [3] * 8
        assert [row["context"] for row in report.lengths] == [16, 32, 64]
        scores = layer_scores(CalibrationStatistics.load(statistics), "heldout")
        both = torch.tensor([report.layers_r2[kind] for kind in ("keys", "values")], dtype=torch.float64)
        torch.testing.assert_close(both.mean(0), scores)
        assert both.shape == (2, 6, 4)

    def test_lengths_score_the_same_tokens(self, report):
        by_length = [row["conditions"] for row in report.lengths]
        assert len({row["no context"] for row in by_length}) == 1
        native = [row["target native"] for row in by_length]
        assert native == sorted(native, reverse=True)  # more context helps
        assert by_length[-1] == pytest.approx(values(report, "text", "nll"))

    def test_bins_add_up_to_the_mean(self, report):
        nll = values(report, "text", "nll")
        for name, bins in report.drift["nll"].items():
            assert mean_of_bins(bins, SCORED) == pytest.approx(nll[name])
        assert mean_of_bins(report.drift["kl"], SCORED) == pytest.approx(report.fidelity["kl"]["value"])

    def test_perplexity_is_that_of_the_nll(self, report):
        nll, perplexity = values(report, "text", "nll"), values(report, "text", "perplexity")
        assert perplexity == pytest.approx({name: math.exp(value) for name, value in nll.items()})

    def test_it_says_what_was_asked_and_what_was_not(self, report, evaluate, mapper):
        assert report.settings["lengths"] == [16, 32, 64]
        assert report.settings["questions_asked"] == 12
        assert report.settings["choices_asked"] == 3
        assert report.settings["conditions_left_out"] == {}
        assert report.mapper["anchor_layers"] == 1
        assert report.mapper["calibration"] == mapper.config.calibration
        short = evaluate(questions=None, choices=None, lengths=[100_000, 8000, 32], max_chunks=2)
        assert short.settings["conditions_left_out"].keys() == {"anchor alone"}
        reasons = short.settings["lengths_left_out"]
        assert "made for 8192 positions" in reasons["100000"]
        assert reasons["8000"] == "the text is too short"
        assert [row["context"] for row in short.lengths] == [32, 64]
        assert {one["task"] for one in short.measures} == {"text"}
        assert short.layers_r2 is None

    def test_chance_and_kinds(self, report, questions):
        found = {one["task"]: one for one in report.measures if one["metric"] == "accuracy"}
        assert found["questions"]["chance"] == pytest.approx(sum(1 / len(q.choices) for q in questions) / 12)
        assert found["questions: terse"]["n"] == found["questions: moved"]["n"] == 6
        assert found["choices"]["chance"] == pytest.approx((1 / 2 + 2 / 4 + 1 / 2) / 3)
        assert found["questions"]["normalised_retention"]["value"] == pytest.approx(1.0, abs=0.1)

    def test_batches_change_nothing_but_rounding(self, evaluate, report):
        batched = evaluate(questions=None, choices=None, lengths=[], batch_size=4)
        for metric in ("nll", "perplexity"):
            expected = values(report, "text", metric)
            del expected["anchor alone"]
            assert values(batched, "text", metric) == pytest.approx(expected, rel=1e-4)
        for part in ("keys", "values"):
            pair = (torch.tensor(one.fidelity["r2"][part]) for one in (batched, report))
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-4)


class TestResuming:
    @pytest.fixture
    def quick(self, evaluate, questions, plain):
        sizes = {"max_chunks": 2, "lengths": [], "prefix": 24, "scored": 16, "samples": 20}
        small = {"mapper": plain, "questions": questions[:2], "choices": CHOICES[:2], "shots": 0, **sizes}
        return lambda **changes: evaluate(**{**small, **changes})

    def test_a_report_made_twice_differs_in_times_only(self, quick, tmp_path):
        first, kept = quick(), quick(work_dir=tmp_path)
        assert first.without_times() == kept.without_times()
        assert first.digest() == quick(work_dir=tmp_path).digest()

    @pytest.mark.parametrize("after", [1, 5])
    def test_one_that_was_killed_goes_on_and_says_the_same(self, quick, tmp_path, monkeypatch, after):
        whole, made = quick(), []

        def counted(function):
            def call(*arguments):
                if len(made) == after:
                    raise KeyboardInterrupt
                made.append(function)
                return function(*arguments)

            return call

        for name in ("read_batch", "asked", "chosen"):
            monkeypatch.setattr(run, name, counted(getattr(tasks, name)))
        with pytest.raises(KeyboardInterrupt):
            quick(work_dir=tmp_path)
        # The line that was being written when it was killed.
        with (tmp_path / JOURNAL_FILE).open("ab") as file:
            file.write(b'0123456789abcdef {"task": "Ques')
        after = 1000
        resumed = quick(work_dir=tmp_path)
        assert resumed.without_times() == whole.without_times()
        assert len(made) == 2 + 2 + 2  # none twice

    def test_results_of_something_else_are_refused(self, quick, tmp_path, plain):
        quick(work_dir=tmp_path)
        kept = (tmp_path / JOURNAL_FILE).read_bytes()
        with pytest.raises(KVTransferError, match="another evaluation, which differs in seed;"):
            quick(work_dir=tmp_path, seed=1)
        other = KVMapper(plain.config).eval()
        with pytest.raises(KVTransferError, match="which differs in mapper;.*`restart=True`"):
            quick(work_dir=tmp_path, mapper=other)
        assert (tmp_path / JOURNAL_FILE).read_bytes() == kept
        assert quick(work_dir=tmp_path, seed=1, restart=True).settings["seed"] == 1

    def test_a_damaged_line_is_made_again(self, quick, tmp_path):
        whole = quick(work_dir=tmp_path)
        content = bytearray((tmp_path / JOURNAL_FILE).read_bytes())
        place = content.index(b"\n", len(content) // 2) + 40
        content[place] ^= 1
        (tmp_path / JOURNAL_FILE).write_bytes(content)
        assert quick(work_dir=tmp_path).without_times() == whole.without_times()

    def test_a_journal_gives_back_what_was_put_in(self, tmp_path):
        put = [{"a": [0.1, float("nan")], "b": None}, [1e-300], "x\u2028\n"]
        for _ in range(2):
            journal = Journal(tmp_path, {"seed": 0})
            found = list(journal.results("task", put, lambda unit: unit, progress=False))
            assert repr(found) == repr(put)
        lines = (tmp_path / JOURNAL_FILE).read_text(encoding="utf-8").splitlines()
        assert len(lines) == 4
        assert json.loads(lines[0].partition(" ")[2]) == {"inputs": {"seed": 0}}

    def test_a_file_that_changes_meanwhile_is_refused(self, tmp_path):
        journal = Journal(tmp_path, {})
        list(journal.results("task", [1], lambda unit: unit, progress=False))
        (tmp_path / JOURNAL_FILE).write_text("nothing\n" * 20, encoding="utf-8")
        with pytest.raises(KVTransferError, match="was changed while it was in use"):
            list(journal.results("task", [1], lambda unit: unit, progress=False))


class TestInputs:
    def test_the_next_chunk_is_from_half_the_text_away(self, family_tokenizer, text, pair):
        for wanted in (2, 5, 6):
            sizes = sizes_of(prefix=16, scored=16, lengths=[], max_chunks=wanted)
            chunks, _, _ = chunks_of([text], family_tokenizer, sizes, {})
            ids = family_tokenizer(text, add_special_tokens=False).input_ids
            places = [next(i for i in range(wanted) if ids[32 * i : 32 * i + 32] == row) for row in chunks.tolist()]
            assert sorted(places) == list(range(wanted))
            steps = [abs(one - other) for one, other in zip(places, [*places[1:], places[0]], strict=True)]
            assert min(steps) >= wanted // 2 - 1 + (wanted == 2)
        following = [row for _, other in batches(chunks, 4) for row in other.tolist()]
        assert following == [*chunks[1:].tolist(), chunks[0].tolist()]

    def test_chunks_begin_with_bos_once_where_texts_do(self):
        tokenizer = train_tokenizer(bos=True)
        documents = [" ".join(DOCUMENTS), " ".join(DOCUMENTS[:30])]
        each = [tokenizer(document, add_special_tokens=False).input_ids for document in documents]
        for lengths in ([], [40]):
            sizes = sizes_of(prefix=20, scored=13, lengths=lengths, max_chunks=10)
            chunks, sizes, _ = chunks_of(documents, tokenizer, sizes, {})
            assert chunks.shape == (10, sizes.longest())
            own = sizes.longest() - 1
            expected = [[0, *[*each[0], *each[1]][own * i : own * i + own]] for i in range(10)]
            assert sorted(chunks.tolist()) == sorted(expected)
        near = shortened(chunks, 33, starting_token(tokenizer))
        assert near[:, 0].tolist() == [0] * 10
        assert torch.equal(near[:, 1:], chunks[:, -32:])
        split = split_chunks(documents, tokenizer, 20, 13)
        assert split[0].tolist() == [[0, *each[0][:32]]]
        assert split[1].tolist() == [[0, *each[1][:32]]]
        assert split[2].tolist() == [[0, *each[0][32:64]]]

    def test_bins(self):
        values = torch.arange(40.0)[None]
        assert bin_means(values) == [[7.5, 23.5, 35.5]]
        assert mean_of_bins(bin_means(values)[0], 40) == pytest.approx(19.5)

    def test_every_question_gets_a_different_document(self):
        documents = ["a", "a", "b", "a", "a"]
        assert different_documents([Question("k", d, " q", " a") for d in documents]) == ["b", "b", "a", "b", "b"]
        with pytest.raises(KVTransferError, match="a different document to each"):
            different_documents([Question("k", "a", " q", " a")] * 3)

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"prefix": 1}, "`prefix` is 1; expected a whole number of at least 2"),
            ({"scored": 0}, "`scored` is 0"),
            ({"max_chunks": 1}, "`max_chunks` is 1"),
            ({"batch_size": 0}, "`batch_size` is 0"),
            ({"queries": 0}, "`queries` is 0"),
            ({"shots": -1}, "`shots` is -1"),
            ({"seed": -1}, "`seed` is -1; expected a whole number of at least 0 and at most 4294967295"),
            ({"seed": 2**32}, "`seed` is 4294967296"),
            ({"seed": 1.5}, "`seed` is 1.5"),
            ({"samples": 0}, "`samples` is 0"),
            ({"samples": 10**30}, "`samples` is 1000.*at most 100000"),
            ({"queries": PREFIX + 1}, "`queries` is 65; .* at most 64"),
            ({"prefix": "many"}, "`prefix` is 'many'"),
            ({"max_chunks": 10**5000}, "`max_chunks` is a number of 16610 bits"),
            ({"batch_size": True}, "`batch_size` is True"),
            ({"lengths": 3}, "`lengths` is of type int"),
            ({"lengths": ["3"]}, "`lengths` is '3'"),
            ({"scored": 10**30}, "`scored` is 1000"),
            ({"scored": 10**6}, "Score fewer tokens"),
            ({"questions": [Question("k", "a b", "", " a"), Question("k", "c d", " q", " a")]}, "a question and an"),
            ({"questions": [Question("k", d, " q" * 8192, " a") for d in ("a b", "c d")]}, "than the 8192 positions"),
            ({"choices": [Choice("x" * 50_000, ("a", "b"), (0,))] * 4}, "than the 8192 positions"),
            ({"choices": [Choice("x", ("a", "b"), (2,))] * 4}, "A question can't be asked"),
            ({"shots": 3}, "3 of them are to be shown; expected two or more"),
            ({"lengths": [1]}, "is 1; expected a whole number of at least 2"),
            ({"texts": "Too short."}, "expected at least two chunks of 104"),
            ({"prefix": 8190}, "more than the 8192 positions that the source was made for"),
            ({"questions": [Question("k", "a", " q", "")] * 2}, "a different document to each"),
            (
                {"questions": [Question("k", "one two", " q", ""), Question("k", "three four", " q", " a")]},
                "an answer of one or more",
            ),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, evaluate, changes, sentence):
        with pytest.raises(KVTransferError, match=sentence):
            evaluate(**changes)

    def test_no_tokenizer(self, pair, mapper):
        for tokenizer in (None, "name", 3):
            with pytest.raises(KVTransferError, match="`tokenizer` is of type"):
                evaluate_mapper(**without(pair), mapper=mapper, tokenizer=tokenizer, texts="some words")

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"choices": "abc"}, "`choices` is of type str"),
            ({"choices": [1]}, "`choices` is of type int"),
            ({"choices": [" b"]}, "is none of the `choices`"),
            ({"document": None}, "`document` is of type NoneType"),
            ({"answer": "\ud800"}, "`answer` has lone surrogates"),
        ],
    )
    def test_questions_that_can_not_be_asked_are_named_by_line(self, tmp_path, changes, sentence):
        row = {"kind": "k", "document": "one two", "question": " q", "answer": " a"}
        path = tmp_path / "questions.jsonl"
        path.write_text(f"{json.dumps(row)}\n\n{json.dumps(row | changes)}\n")
        with pytest.raises(KVTransferError, match=f"line 3: .*{sentence}"):
            read_questions(path)
        path.write_text("[1]")
        with pytest.raises(KVTransferError, match="line 1: it is of type list"):
            read_questions(path)
        path.write_text("\n")
        with pytest.raises(KVTransferError, match="it is empty"):
            read_questions(path)

    def test_another_pair_is_refused(self, evaluate, family_model, family_tokenizer, statistics):
        with pytest.raises(PairMismatchError):
            evaluate(mapper=KVMapper.for_pair(family_model("large"), family_model("small"), support=[[0]] * 4))
        other = KVMapper.for_pair(family_model("small"), family_model("small")).set_as_identity()
        with pytest.raises(PairMismatchError, match="target"):
            evaluate_mapper(
                *[family_model("small")] * 2,
                other,
                family_tokenizer,
                texts="some words " * 500,
                statistics=statistics,
                **SIZES,
            )


@pytest.mark.parametrize(("side", "condition"), [("source", "source alone"), ("target", "target native")])
def test_a_model_that_predicts_nothing_is_named(pair, mapper, text, side, condition):
    broken = copy.deepcopy(pair[side])
    broken.get_output_embeddings().weight.data = torch.full_like(broken.get_output_embeddings().weight, math.nan)
    ways = conditions(**{**without(pair), side: broken}, mapper=mapper)
    asked = Question("k", "one two", " q", " a")
    for use in (
        lambda: prefix_nll(ways, text, pair["tokenizer"], prefix=16, scored=8, max_chunks=1, progress=False),
        lambda: ask(ways, asked, "three four", pair["tokenizer"]),
        lambda: choose(ways, *CHOICES[:2], pair["tokenizer"]),
    ):
        with pytest.raises(KVTransferError, match=f"condition '{condition}' .* NaN or infinite"):
            use()


def sizes_of(**changes):
    return Sizes.of(**{"batch_size": 1, "queries": 4, "shots": 0, **changes})
