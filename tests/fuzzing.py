"""What the fuzz tests share: settings that make them reproducible, a tally, and the law that each case must obey."""

import os
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from hf_kvtransfer import KVMapper, KVTransferError
from hf_kvtransfer._compat import cache_keyword

from .architectures import VOCAB


CASES: Counter[str] = Counter()  # how many cases each test is set to run
OUTCOMES: Counter[str] = Counter()

# Cases are the same in every run; FUZZ=n asks for n times as many, drawn at random.
_TIMES = int(os.environ.get("FUZZ", "0"))


def fuzz(cases, **strategies):
    """`@given` with that many cases, the same ones in every run."""

    def decorate(function):
        CASES[f"{function.__module__}.{function.__name__}"] = cases
        chosen = settings(
            max_examples=cases * max(_TIMES, 1),
            derandomize=not _TIMES,
            database=None,
            deadline=None,
            # Shrinking a failing case takes minutes of forward passes; its arguments are shown all the same.
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        return chosen(given(**strategies)(function))

    return decorate


def attempt(action, *args, **kwargs):
    """The result and `None`, or `None` and the refusal. Anything that is not a typed error passes through."""
    try:
        result = action(*args, **kwargs)
    except KVTransferError as error:
        OUTCOMES["refused"] += 1
        sentence = str(error)
        assert len(sentence) > 40, f"no sentence: {sentence}"
        assert sentence.rstrip()[-1] in ".`\"')", f"no sentence: {sentence}"
        return None, error
    OUTCOMES["worked"] += 1
    return result, None


@pytest.fixture(scope="module", autouse=True)
def tally(request):
    """Prints how many cases ran, and how they ended."""
    OUTCOMES.clear()
    disable_progress_bar()
    yield
    enable_progress_bar()
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{sum(OUTCOMES.values())} attempts: {dict(OUTCOMES)}")


def ids(batch=1, tokens=12, seed=1):
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, tokens, cache=None, **kwargs):
    keywords = {} if cache is None else {cache_keyword(model): cache}
    return model(input_ids=tokens, use_cache=True, **keywords, **kwargs).logits


@torch.no_grad()
def generate(model, tokens, mask, cache=None, **kwargs):
    keywords = {} if cache is None else {cache_keyword(model.generate): cache}
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": 999, **kwargs}
    return model.generate(input_ids=tokens, attention_mask=mask, **keywords, **settings)


def prefilled(model, tokens, **kwargs):
    cache = DynamicCache()
    feed(model, tokens, cache, **kwargs)
    return cache


def identity(model):
    return KVMapper.for_pair(model, model).set_as_identity()


def mostly(usual, *others, weight=8):
    """`usual` in `weight` of ten cases, else one of the others."""
    return st.integers(0, 9).flatmap(lambda n: st.just(usual) if n < weight else st.sampled_from([usual, *others]))


PADS = st.lists(st.integers(0, 5), min_size=2, max_size=2)


def padded(pads, tokens=8):
    mask = torch.ones(2, tokens, dtype=torch.long)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    return torch.where(mask == 1, ids(batch=2, tokens=tokens), 0), mask, (mask.cumsum(-1) - 1).clamp(min=0)
