"""The registry of ways to generate from a converted cache. A function here is all that a new way needs to be tested.

A way takes a [`Setting`] and gives what was generated beside what must have been: pairs of [`Result`]s.
"""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    pipeline,
)
from transformers.generation import GenerateDecoderOnlyOutput

from hf_kvtransfer._compat import cache_keyword

from ..architectures import VOCAB
from .settings import BATCH, NEW_TOKENS, PADDED, REPEATED, SHORT, SINGLE, Prompt, Result, Setting, loaded, random_ids


Way = Callable[[Setting], Iterator[tuple[Result, Result]]]
WAYS: dict[str, Way] = {}
# Prompt look-up needs one in the oldest supported releases; this id is in no prompt.
END = 1


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------------- ways of decoding


@way
def greedy(s):
    yield s.generate(BATCH), s.reference(BATCH)


@way
def greedy_from_a_prompt_shorter_than_the_window(s):
    options = {"max_new_tokens": 8}
    yield s.generate(SHORT, **options), s.reference(SHORT, **options)


@way
def sampling(s):
    options = {"do_sample": True, "seed": 7, "temperature": 0.7}
    yield s.generate(BATCH, **options), s.reference(BATCH, **options)


@way
def beams(s):
    options = {"num_beams": 3}
    yield s.generate(BATCH, **options), s.reference(BATCH, **options)


@way
def sampled_beams(s):
    options = {"num_beams": 3, "do_sample": True, "seed": 7}
    yield s.generate(BATCH, **options), s.reference(BATCH, **options)


@way
def several_return_sequences(s):
    options = {"num_return_sequences": 3, "do_sample": True, "seed": 7}
    yield s.generate(BATCH, **options), s.reference(BATCH, **options)


@way
def several_beams_returned(s):
    options = {"num_beams": 3, "num_return_sequences": 2}
    yield s.generate(BATCH, **options), s.reference(BATCH, **options)


@way
def assisted_decoding(s):
    """Drafts of another model, of which some are rejected and cropped off the cache."""
    with _transformers_own_deprecated_call():
        result = s.generate(SINGLE, fed=1, assistant_model=_assistant())
    yield result, s.reference(SINGLE)


@way
def assisted_decoding_with_the_whole_prompt(s):
    with _transformers_own_deprecated_call():
        result = s.generate(SINGLE, assistant_model=_assistant())
    yield result, s.reference(SINGLE)


@way
def prompt_lookup(s):
    """Drafts from the new tokens, which repeat themselves."""
    cache = s.cache(REPEATED, hold_back=12)
    result = s.generate(REPEATED, cache, fed=12, prompt_lookup_num_tokens=2, eos_token_id=END)
    yield result, s.reference(REPEATED, hold_back=12, eos_token_id=END)


@way
def prompt_lookup_with_the_whole_prompt(s):
    result = s.generate(REPEATED, prompt_lookup_num_tokens=2, eos_token_id=END)
    yield result, s.reference(REPEATED, eos_token_id=END)


@way
def custom_generate(s):
    """A decoding loop of the caller's own, which `generate` prepares the inputs for."""
    yield s.generate(BATCH, custom_generate=_own_loop), s.reference(BATCH)


@way
def contrastive_search(s):
    yield s.generate(SINGLE, penalty_alpha=0.6, top_k=4), s.reference(SINGLE, penalty_alpha=0.6, top_k=4)


@way
def dola(s):
    yield s.generate(SINGLE, dola_layers="high"), s.reference(SINGLE, dola_layers="high")


@way
def group_beams(s):
    options = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}
    yield s.generate(SINGLE, **options), s.reference(SINGLE, **options)


@way
def constrained_beams(s):
    options = {"num_beams": 3, "force_words_ids": [[5]]}
    yield s.generate(SINGLE, **options), s.reference(SINGLE, **options)


# ------------------------------------------------------------------------------------------- ways of giving a prompt


@way
def left_padding(s):
    yield s.generate(PADDED), s.reference(PADDED)


@way
def left_padding_with_beams(s):
    options = {"num_beams": 2}
    yield s.generate(PADDED, **options), s.reference(PADDED, **options)


@way
def a_question_after_the_context(s):
    """The context is converted whole, and the ids go on from it."""
    yield s.generate(BATCH, s.cache(BATCH, hold_back=4)), s.reference(BATCH, hold_back=4)


@way
def new_ids_with_the_whole_mask(s):
    yield s.generate(BATCH, s.cache(BATCH, hold_back=4), fed=4), s.reference(BATCH, hold_back=4)


@way
def new_ids_with_left_padding(s):
    yield s.generate(PADDED, s.cache(PADDED, hold_back=3), fed=3), s.reference(PADDED, hold_back=3)


@way
def embeddings(s):
    given = s.model.get_input_embeddings()(BATCH.ids).detach()
    yield s.generate(BATCH, inputs_embeds=given), s.reference(BATCH)


@way
def chunked_prefill(s):
    """The part of the prompt that is not cached is read in chunks that don't divide it."""
    yield s.generate(BATCH, s.cache(BATCH, hold_back=7), prefill_chunk_size=3), s.reference(BATCH, hold_back=7)


@way
def chunked_prefill_of_new_ids(s):
    result = s.generate(BATCH, s.cache(BATCH, hold_back=7), fed=7, prefill_chunk_size=3)
    yield result, s.reference(BATCH, hold_back=7)


@way
def one_context_for_many_questions(s):
    """One converted row serves a batch: it repeats itself."""
    rows = Prompt(torch.cat([SINGLE.ids.repeat(3, 1), random_ids(3, 4, seed=8)], 1), torch.ones(3, 20).long())
    yield s.generate(rows, s.cache(SINGLE, hold_back=0)), s.reference(SINGLE, whole=rows, hold_back=0)


@way
def text_pipeline(s):
    keywords = {"do_sample": False, "max_new_tokens": NEW_TOKENS, s.keyword: s.cache(SINGLE)}
    pipe = pipeline("text-generation", model=s.model, tokenizer=tokenizer(), device="cpu")
    with _transformers_own_deprecated_call():
        (output,) = pipe(tokenizer().decode(SINGLE.ids[0]), return_tensors=True, **keywords)
    yield Result(torch.tensor([output["generated_token_ids"]])[:, SINGLE.tokens :]), s.reference(SINGLE)


# ------------------------------------------------------------------------------------------ ways of following a text


@way
def a_text_streamer(s):
    streamer = Collected(tokenizer(), skip_prompt=True)
    result, expected = s.generate(SINGLE, streamer=streamer), s.reference(SINGLE)
    assert "".join(streamer.texts).split() == tokenizer().decode(expected.tokens[0]).split()
    yield result, expected


@way
def a_stopping_criterion(s):
    expected = s.reference(SINGLE)
    result = s.generate(SINGLE, stopping_criteria=StoppingCriteriaList([StopsAt(SINGLE.tokens + 2)]))
    yield result, Result(expected.tokens[:, :2], expected.logits[:2])


@way
def logits_processors(s):
    options = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    yield s.generate(BATCH, **options), s.reference(BATCH, **options)


# -------------------------------------------------------------------------------------- ways of going on with a cache


@way
def several_turns(s):
    """One cache through three calls, each of which adds what the user said in between."""
    cache, prompt = s.cache(BATCH), BATCH
    for turn in range(3):
        result, expected = s.generate(prompt, cache), s.reference(BATCH, whole=prompt)
        yield result, expected
        ids = torch.cat([prompt.ids, expected.tokens, random_ids(2, 3, seed=10 + turn)], 1)
        prompt = Prompt(ids, torch.ones_like(ids))


@way
def several_turns_of_new_ids(s):
    """The same, with only the new ids of each turn, the first of which is the last token that was generated."""
    cache, prompt, fed = s.cache(BATCH), BATCH, 1
    for turn in range(3):
        result, expected = s.generate(prompt, cache, fed=fed), s.reference(BATCH, whole=prompt)
        yield result, expected
        ids = torch.cat([prompt.ids, expected.tokens, random_ids(2, 3, seed=10 + turn)], 1)
        prompt, fed = Prompt(ids, torch.ones_like(ids)), 4


@way
def two_forks(s):
    """Two conversations go on from one conversion, in turns, and a third after both."""
    forks = {seed: s.cache(BATCH, hold_back=0) for seed in (20, 21, 22)}
    for seed, cache in forks.items():
        ids = torch.cat([BATCH.ids, random_ids(2, 3, seed)], 1)
        prompt = Prompt(ids, torch.ones_like(ids))
        yield s.generate(prompt, cache), s.reference(BATCH, whole=prompt, hold_back=0)


@way
def forward_token_by_token(s):
    expected, cache, fed = s.reference(BATCH), s.cache(BATCH), BATCH.ids[:, -1:]
    yield _loop(s, cache, fed, expected), expected


@way
def forward_in_blocks(s):
    """Several tokens at a time, which is what verification of drafts and chunked reading come down to."""
    expected, cache = s.reference(BATCH), s.cache(BATCH)
    ids = torch.cat([BATCH.ids[:, -1:], expected.tokens[:, :-1]], 1)
    logits = torch.cat([s.forward(cache, block) for block in ids.split(2, dim=1)], 1)
    yield Result(logits.argmax(-1), logits.unbind(1)), expected


@way
def the_old_keyword(s):
    """`past_key_values=` works up to 6.0, and newer releases say that it is called `cache=` now."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = s.generate(BATCH, keyword="past_key_values")
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, FutureWarning)]
    assert all("past_key_values" in message and "cache" in message for message in messages)
    assert bool(messages) == (s.keyword == "cache")
    yield result, s.reference(BATCH)


@way
def the_new_keyword(s):
    yield s.generate(BATCH, keyword="cache"), s.reference(BATCH)


# ----------------------------------------------------------------------------------------------------------- helpers


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each id of the registry's vocabulary."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", unk_token="t0")


@functools.cache
def _assistant():
    return loaded("llama")


@contextmanager
def _transformers_own_deprecated_call():
    """Pipelines and assistants call `generate` in a way that transformers itself has deprecated, on some releases."""

    def is_ours(record: logging.LogRecord) -> bool:
        return "Passing `generation_config` together with generation-related arguments" not in record.getMessage()

    logger = logging.getLogger("transformers.generation.utils")
    logger.addFilter(is_ours)
    try:
        yield
    finally:
        logger.removeFilter(is_ours)


class Collected(TextStreamer):
    """Keeps what it would print."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.texts: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.texts.append(text)


class StopsAt(StoppingCriteria):
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.tokens)


def _own_loop(model, input_ids, stopping_criteria, **kwargs):
    """Greedy, over plain forward passes."""
    keyword = cache_keyword(model)
    cache, logits = kwargs[keyword], []
    while not (logits and stopping_criteria(input_ids, None).all()):
        fed = input_ids[:, cache.get_seq_length() :]
        logits.append(model(input_ids=fed, use_cache=True, **{keyword: cache}).logits[:, -1])
        input_ids = torch.cat([input_ids, logits[-1].argmax(-1, keepdim=True)], 1)
    return GenerateDecoderOnlyOutput(sequences=input_ids, logits=tuple(logits))


def _loop(s: Setting, cache, fed, expected: Result) -> Result:
    tokens, logits = [], []
    for _ in range(expected.tokens.shape[1]):
        logits.append(s.forward(cache, fed)[:, -1])
        tokens.append(fed := logits[-1].argmax(-1, keepdim=True))
    return Result(torch.cat(tokens, 1), logits)
