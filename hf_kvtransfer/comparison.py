"""The same prompt answered by the source alone, by the target native, and by the target on a converted cache."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._compat import cache_keyword
from .errors import KVTransferError
from .evaluation import prefill
from .mapper import KVMapper


@dataclass(frozen=True)
class Generation:
    """
    Args:
        name (`str`): who wrote it.
        text (`str`): what was written.
        prefill_seconds (`float`): until the answering model had a cache of the prompt; for the transfer, the
            conversion of a source cache that exists already.
        total_seconds (`float`): that and the writing.
    """

    name: str
    text: str
    prefill_seconds: float
    total_seconds: float


def compare_generations(
    source: nn.Module,
    target: nn.Module,
    mapper: KVMapper,
    tokenizer: Any,
    prompt: str,
    *,
    only_transferred: bool = False,
    **generate: Any,
) -> list[Generation]:
    """
    Lets all three go on from a prompt.

    Args:
        source (`PreTrainedModel`): the model that reads the prompt.
        target (`PreTrainedModel`): the model that answers.
        mapper ([`KVMapper`]): of this pair.
        tokenizer (`PreTrainedTokenizerBase`): of both models.
        prompt (`str`): two tokens or more.
        only_transferred (`bool`, *optional*, defaults to `False`): leave the other two out.
        **generate: passed on to `generate`, for example `max_new_tokens`.

    Returns:
        `list[Generation]`: source alone, target native, transferred.
    """
    mapper.check_pair(source=source, target=target, tokenizer=tokenizer)
    try:
        inputs = tokenizer(prompt, return_tensors="pt")
    except TypeError as error:  # lone surrogates, from bytes that are no UTF-8
        raise KVTransferError(f"The prompt is no valid Unicode text ({error}); expected text in UTF-8.") from error
    if inputs.input_ids.shape[1] < 2:
        raise KVTransferError(
            f"The prompt has {inputs.input_ids.shape[1]} tokens; expected two or more, since the last one is left to "
            "the model that goes on. Give it something to read."
        )
    # Every way holds the last token back, as a converted cache does, so that all three do the same work after prefill.
    source_cache = prefill(source, inputs.input_ids.to(_device(source)))
    # The target reads a part of the prompt itself only where the mapper was made for that.
    given = {"input_ids": inputs.input_ids.to(_device(target)), "target": target} if mapper.config.needs_target else {}
    ways: list[tuple[str, nn.Module, Any]] = [
        ("source alone", source, lambda: prefill(source, inputs.input_ids[:, :-1].to(_device(source)))),
        ("target native", target, lambda: prefill(target, inputs.input_ids[:, :-1].to(_device(target)))),
        ("transferred", target, lambda: mapper.convert(source_cache, **given)),
    ]
    for side in ("source", "target"):
        mapper.codec(side)  # built once per process, and no part of a conversion
    results = []
    for name, model, read in ways[2:] if only_transferred else ways:
        start = time.perf_counter()
        cache = read()
        ready = time.perf_counter()
        output = _generate(model, inputs, cache, **generate)
        end = time.perf_counter()
        written = output[0, inputs.input_ids.shape[1] :]
        text = tokenizer.decode(written, skip_special_tokens=True)
        results.append(Generation(name, text, ready - start, end - start))
    return results


def _generate(model: Any, inputs: Any, cache: Any, **generate: Any) -> Tensor:
    device = _device(model)
    with torch.inference_mode():
        output: Tensor = model.generate(
            input_ids=inputs.input_ids.to(device),
            attention_mask=inputs.attention_mask.to(device),
            **{cache_keyword(model.generate): cache},
            **generate,
        )
    return output


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
