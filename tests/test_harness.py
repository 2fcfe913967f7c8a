"""lm-evaluation-harness on a transferred context: `hf` to the last digit, the identity, and batches of any size."""

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import DynamicCache

from hf_kvtransfer import KVMapper
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.cache import TransferredCache
from hf_kvtransfer.errors import KVTransferError, PairMismatchError
from hf_kvtransfer.evaluation import prefill, random_mapper, score_continuation
from hf_kvtransfer.harness import register, tasks_path
from hf_kvtransfer.harness.handover import Handover
from hf_kvtransfer.harness.model import TransferLM
from hf_kvtransfer.harness.tasks.documents import passages

from .architectures import VOCAB, build


TASKS = ["kvtransfer_stories_mc", "kvtransfer_stories_gen", "kvtransfer_cloze", "kvtransfer_text"]
PASSAGES = passages()["test"]["text"]


@pytest.fixture(scope="module")
def pair(family_model, family_tokenizer):
    """Source, target, and a quick mapper of them with everything on: an anchor, an exact prefix and a suffix."""
    source, target = family_model("small"), family_model("large")
    text = [" ".join(PASSAGES[index : index + 3]) for index in range(60, 110, 3)]
    mapper = KVMapper.fit(
        source,
        target,
        text,
        tokenizer=family_tokenizer,
        k=2,
        anchor_layers=1,
        exact_prefix=4,
        exact_suffix=2,
        sequence_length=64,
        num_sequences=24,
        progress=False,
    )
    return source, target, mapper


@pytest.fixture(scope="module")
def identity(family_model, family_tokenizer):
    model = family_model("large")
    return model, model, KVMapper.for_pair(model, model, tokenizer=family_tokenizer).set_as_identity()


@pytest.fixture
def transfer(family_tokenizer):
    """A model of the harness from loaded ones."""

    def make(models, **settings):
        source, target, mapper = models
        return TransferLM(source=source, target=target, mapper=mapper, tokenizer=family_tokenizer, **settings)

    return make


def evaluated(model, tasks=TASKS, limit=3, **settings):
    """What the harness makes of a model on the shipped tasks: the figures, and each answer."""
    manager = TaskManager(include_path=str(tasks_path()), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, tasks=tasks, limit=limit, task_manager=manager, bootstrap_iters=0, verbosity="ERROR", **settings
    )
    figures = {
        task: {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
        for task in tasks
    }
    return figures, {task: [sample["resps"] for sample in found["samples"][task]] for task in tasks}


def requests(kind, *arguments):
    return [Instance(kind, {}, given, 0, ("task", index, 1)) for index, given in enumerate(arguments)]


def pairs(*lengths):
    """Contexts of so many words, each with three words that go on from it."""
    words = [PASSAGES[index].split() for index in range(len(lengths))]
    given = [(" ".join(w[:n]), " " + " ".join(w[n : n + 3])) for w, n in zip(words, lengths, strict=True)]
    return requests("loglikelihood", *given)


def scores(model, asked):
    return torch.tensor([value for value, _ in model.loglikelihood(asked, disable_tqdm=True)])


def split(tokenizer, request):
    """Token ids of a request's context and of its continuation."""
    context, rest = request.args
    ids = tokenizer(context, return_tensors="pt").input_ids
    return ids, tokenizer(context + rest, return_tensors="pt").input_ids[:, ids.shape[1] :]


class TestAgainstTheModelAlone:
    @pytest.mark.parametrize(("condition", "name"), [("native", "large"), ("source", "small")])
    def test_a_model_alone_is_hf_to_the_last_digit(self, family, condition, name):
        register()
        asked = f"source={family / 'small'},target={family / 'large'},condition={condition}"
        settings = {"batch_size": 4, "device": "cpu"}
        figures, answers = evaluated("hf_kvtransfer", model_args=asked, **settings)
        plain, plain_answers = evaluated("hf", model_args=f"pretrained={family / name}", **settings)
        assert figures == plain
        assert answers == plain_answers

    def test_the_identity_answers_like_the_model(self, identity, transfer, family_tokenizer):
        plain = HFLM(pretrained=identity[1], tokenizer=family_tokenizer, batch_size=3)
        expected, answers = evaluated(plain, num_fewshot=1)
        figures, transferred = evaluated(transfer(identity, batch_size=3), num_fewshot=1)
        for task, measures in expected.items():
            for name, value in measures.items():
                exact = name.startswith(("acc", "exact_match"))
                assert figures[task][name] == (value if exact else pytest.approx(value, rel=1e-5)), (task, name)
        assert transferred["kvtransfer_stories_gen"] == answers["kvtransfer_stories_gen"]

    def test_beams_and_truncated_contexts_too(self, identity, transfer, family_tokenizer):
        plain = HFLM(pretrained=identity[1], tokenizer=family_tokenizer, batch_size=5, max_length=40)
        settings = {"until": ["."], "max_gen_toks": 8, "num_beams": 2}
        asked = requests(
            "generate_until", *[(text, settings) for text in PASSAGES[:3]], (" And", settings), ("", settings)
        )
        expected = plain.generate_until(asked, disable_tqdm=True)
        for condition in ("transferred", "raw"):
            model = transfer(identity, condition=condition, batch_size=5, max_length=40)
            assert model.generate_until(asked, disable_tqdm=True) == expected


class TestTransfer:
    @pytest.mark.parametrize("condition", ["transferred", "raw", "different_document"])
    def test_rows_do_not_depend_on_their_batch(self, pair, transfer, condition):
        asked = pairs(5, 40, 17, 64, 2, 40) + requests("loglikelihood", ("", " And it"), (" a", " man"))
        rolling = requests("loglikelihood_rolling", *[(text,) for text in PASSAGES[:2]], (" a",))
        settings = {"until": ["."], "max_gen_toks": 5}
        generated = requests("generate_until", *[(request.args[0] or " a", settings) for request in asked[2:7]])
        found = []
        for batch_size in (1, 8):
            model = transfer(pair, condition=condition, batch_size=batch_size, max_length=90)
            values = model.loglikelihood_rolling(rolling, disable_tqdm=True)
            texts = model.generate_until(generated, disable_tqdm=True)
            found.append((torch.cat([scores(model, asked), torch.tensor(values)]), texts))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
        assert found[0][1] == found[1][1]

    def test_it_is_convert_and_what_the_target_makes_of_it(self, pair, transfer, family_tokenizer):
        source, target, mapper = pair
        asked = pairs(30, 12, 45)
        for condition, used in (("transferred", mapper), ("random", random_mapper(mapper))):
            expected = []
            for request in asked:
                context, rest = split(family_tokenizer, request)
                cache = used.convert(prefill(source, context), input_ids=context, target=target, exact_suffix=5)
                fed = torch.cat([context[:, -1:], rest], dim=1)
                expected.append(-float(score_continuation(target, fed, cache, scored=rest.shape[1]).nll.sum()))
            model = transfer(pair, condition=condition, batch_size=3, exact_suffix=5)
            torch.testing.assert_close(scores(model, asked), torch.tensor(expected), rtol=1e-4, atol=1e-4)

    def test_the_target_reads_the_continuation_only(self, pair, transfer, family_model, family_tokenizer):
        source, target, _ = pair
        mapper = KVMapper.for_pair(source, target, tokenizer=family_tokenizer, support=[[0]] * 6)
        read = []
        hook = target.get_input_embeddings().register_forward_hook(lambda _, given, __: read.append(given[0].shape[1]))
        asked = pairs(40)
        try:
            scores(transfer((source, target, mapper)), asked)
        finally:
            hook.remove()
        assert sum(read) == split(family_tokenizer, asked[0])[1].shape[1]

    @pytest.mark.parametrize("name", ["qwen3", "gemma3"])
    @pytest.mark.parametrize("is_raw", [False, True])
    def test_ragged_rows_go_on_as_each_alone(self, name, is_raw):
        model = build(name)
        mapper = KVMapper.for_pair(model, model).set_as_identity()
        lengths = torch.tensor([3, 40, 1, 25])
        ids = torch.randint(3, VOCAB, (4, 43))
        mask = (torch.arange(40)[None] >= 40 - lengths[:, None]).long()
        cache = Handover(model, model, mapper, is_raw=is_raw).cache_of(ids[:, :40], mask)
        assert isinstance(cache, TransferredCache)
        positions = (torch.cat([mask, torch.ones(4, 3, dtype=torch.long)], dim=1).cumsum(-1) - 1).clamp(min=0)
        given = {"attention_mask": torch.cat([mask, torch.ones(4, 3)], dim=1), "position_ids": positions[:, 39:]}
        with torch.no_grad():
            logits = model(input_ids=ids[:, 39:], **{cache_keyword(model): cache}, **given).logits
            for row, length in enumerate(lengths.tolist()):
                whole = model(input_ids=ids[row : row + 1, 40 - length :], **{cache_keyword(model): DynamicCache()})
                torch.testing.assert_close(logits[row], whole.logits[0, -4:], rtol=1e-3, atol=1e-4)


class TestControls:
    def test_another_document_is_the_next_one(self, pair, transfer, family_tokenizer):
        source, target, mapper = pair
        first, second = pairs(20, 35)
        # Two requests about one document, as options of a question are, have the same other one.
        again = Instance("loglikelihood", {}, (first.args[0] + " the", " man"), 1, ("task", 0, 1))
        found = scores(transfer(pair, condition="different_document", batch_size=2), [first, again, second])
        other = split(family_tokenizer, second)[0]
        for request, value in ((first, found[0]), (again, found[1])):
            context, rest = split(family_tokenizer, request)
            read = torch.cat([other[:, :-1], context[:, -1:]], dim=1)
            cache = mapper.convert(prefill(source, read), input_ids=read, target=target)
            fed = torch.cat([context[:, -1:], rest], dim=1)
            expected = score_continuation(target, fed, cache, scored=rest.shape[1])
            assert float(value) == pytest.approx(-float(expected.nll.sum()), rel=1e-4)

    def test_one_document_has_no_other(self, pair, transfer):
        asked = requests("generate_until", (PASSAGES[0], {"until": ["."]}))
        with pytest.raises(KVTransferError, match="about one and the same document"):
            transfer(pair, condition="different_document").generate_until(asked)

    def test_no_context_is_its_last_token_alone(self, pair, transfer, family_tokenizer):
        _, target, _ = pair
        asked = pairs(20, 35)
        found = scores(transfer((None, target, None), condition="no_context", batch_size=2), asked)
        for request, value in zip(asked, found, strict=True):
            context, rest = split(family_tokenizer, request)
            fed = torch.cat([context[:, -1:], rest], dim=1)
            expected = score_continuation(target, fed, scored=rest.shape[1])
            assert float(value) == pytest.approx(-float(expected.nll.sum()), rel=1e-4)

    def test_the_controls_order_as_they_must(self, pair, transfer):
        found = {}
        for condition in ("native", "transferred", "different_document", "no_context"):
            model = transfer(pair, condition=condition, batch_size=8)
            figures, _ = evaluated(model, ["kvtransfer_stories_mc"], limit=8)
            found[condition] = figures["kvtransfer_stories_mc"]["acc,none"]
        assert found["native"] >= found["transferred"] > max(found["different_document"], found["no_context"]) + 0.3
        assert abs(found["different_document"] - found["no_context"]) < 0.3

    def test_windows_are_handed_over_after_their_first_part(self, pair, transfer, family_tokenizer):
        _, target, _ = pair
        model = transfer((None, target, None), condition="no_context", handover=0.25)
        (found,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (PASSAGES[0],)), disable_tqdm=True)
        ids = family_tokenizer(PASSAGES[0], return_tensors="pt").input_ids
        whole = torch.cat([torch.full((1, 1), model.prefix_token_id), ids], dim=1)
        place = int(0.25 * whole.shape[1])
        first = score_continuation(target, whole[:, :place], scored=place - 1).nll.sum()
        rest = whole.shape[1] - place
        second = score_continuation(target, whole[:, place - 1 :], scored=rest).nll.sum()
        assert found == pytest.approx(-float(first + second), rel=1e-4)


class TestRefusals:
    def test_shapes_that_differ_are_not_used_raw(self, family_model, family_tokenizer, transfer):
        source, target = family_model("wide"), family_model("large")
        mapper = KVMapper.for_pair(source, target, tokenizer=family_tokenizer, support=[[0]] * 6)
        with pytest.raises(PairMismatchError, match="Leave the condition 'raw' out"):
            transfer((source, target, mapper), condition="raw")

    def test_a_mapper_of_another_pair(self, pair, transfer):
        source, target, mapper = pair
        with pytest.raises(PairMismatchError):
            transfer((target, source, mapper))

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"condition": "transfered"}, "expected one of transferred, native"),
            ({"target": None}, "needs `target`"),
            ({"source": None, "mapper": None}, "needs `source` and `mapper`"),
            ({"pretrained": "large"}, "doesn't tell which of the three is meant"),
            ({"revision": "main"}, "doesn't tell which of the three is meant"),
            ({"handover": 1}, "after which the target takes over"),
            ({"handover": "half"}, "after which the target takes over"),
        ],
    )
    def test_arguments(self, settings, sentence):
        given = {"source": "small", "target": "large", "mapper": "mapper"} | settings
        with pytest.raises(KVTransferError, match=sentence):
            TransferLM(**given)

    def test_encoder_decoder_models(self, pair, transfer):
        with pytest.raises(KVTransferError, match="expected a decoder-only model"):
            transfer(pair, backend="seq2seq")

    def test_the_shorter_context_counts_in_every_condition(self, family_model, family_tokenizer, transfer):
        short = build("qwen3")
        short.config.max_position_embeddings = 77
        target = family_model("large")
        assert transfer((short, target, None), condition="native").max_length == 77
        assert transfer((None, target, None), condition="native").max_length == 8192
        assert transfer((target, short, None), condition="source").max_length == 77
