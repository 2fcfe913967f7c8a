"""What an evaluation is about: its sizes, its chunks of text, and the digests that tell it from others."""

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .._version import __version__
from ..calibration.texts import starting_token
from ..digests import config_digest
from ..errors import KVTransferError
from ..mapper import KVMapper
from ..modules import text_config
from ..pairing import pair_manifest
from .checks import check_tokenizer, check_whole
from .drift import TOKENS_PER_BIN
from .prefix import as_chunks, text_ids


@dataclass(frozen=True)
class Sizes:
    """
    Args:
        prefix (`int`): tokens of context.
        scored (`int`): tokens that are scored after it.
        lengths (`tuple[int, ...]`): all lengths of context that are read, ascending, `prefix` among them.
        max_chunks (`int`): chunks of text at most.
        batch_size (`int`): chunks at once.
        queries (`int`): positions at which attention is compared.
        shots (`int`): questions of several options that are shown with their answers.
    """

    prefix: int
    scored: int
    lengths: tuple[int, ...]
    max_chunks: int
    batch_size: int
    queries: int
    shots: int

    def __post_init__(self) -> None:
        least = {"prefix": 2, "scored": 1, "max_chunks": 2, "batch_size": 1, "shots": 0}
        for name, lowest in least.items():
            check_whole(name, getattr(self, name), lowest)
        check_whole("queries", self.queries, 1, self.prefix)

    @classmethod
    def of(
        cls,
        *,
        prefix: int,
        scored: int | None = None,
        lengths: Sequence[int] | None = None,
        queries: int | None = None,
        **others: int,
    ) -> "Sizes":
        """
        Fills in the defaults: as many tokens are scored as the prefix has, a quarter and half of the prefix are read
        too, and attention is compared at 32 positions, or at all.
        """
        check_whole("prefix", prefix, 2)
        if lengths is not None and (isinstance(lengths, (str, bytes)) or not isinstance(lengths, Iterable)):
            raise KVTransferError(
                f"`lengths` is of type {type(lengths).__name__}; expected whole numbers in a list. Give some, such as "
                "[256, 512]."
            )
        lengths = None if lengths is None else list(lengths)
        for length in lengths or ():
            check_whole("lengths", length, 2)
        wanted = lengths if lengths is not None else [n for n in (prefix // 4, prefix // 2) if n >= TOKENS_PER_BIN]
        return cls(
            prefix=prefix,
            scored=prefix if scored is None else scored,
            lengths=tuple(sorted({*wanted, prefix})),
            queries=min(32, prefix) if queries is None else queries,
            **others,
        )

    def longest(self) -> int:
        """Tokens of a chunk."""
        return self.lengths[-1] + self.scored

    def without(self, length: int) -> "Sizes":
        """The same with one length less."""
        return replace(self, lengths=tuple(one for one in self.lengths if one != length))


def chunks_of(
    texts: str | Iterable[str], tokenizer: Any, sizes: Sizes, models: dict[str, nn.Module]
) -> tuple[Tensor, Sizes, dict[str, str]]:
    """
    Non-overlapping chunks of text, in an order in which the next one is from about half the text away. Each begins with
    the BOS token if the tokenizer starts a text with it; no other token is put in.

    Args:
        texts (`str` or `Iterable[str]`): read as far as needed.
        tokenizer (`PreTrainedTokenizerBase`): of both models.
        sizes ([`Sizes`]): what is wanted.
        models (`dict[str, PreTrainedModel]`): that have to reach as far, by name.

    Returns:
        `tuple`: chunks of `[chunks, longest + scored]` token ids; the sizes without the lengths that had to be left
        out; and why each was, by length.

    Raises:
        [`KVTransferError`]: if the text is too short for two chunks with the prefix, or a model doesn't reach so far.
    """
    left_out: dict[str, str] = {}
    for name, positions in reach_of(models).items():
        for length in [one for one in sizes.lengths if one + sizes.scored > positions]:
            if length == sizes.prefix:
                # No prefix is short enough beside so many scored tokens.
                advice = "Give a shorter prefix" if sizes.scored + 2 <= positions else "Score fewer tokens"
                raise KVTransferError(
                    f"A prefix of {length} tokens and {sizes.scored} scored ones are more than the {positions} "
                    f"positions that the {name} was made for; expected fewer. {advice}."
                )
            left_out[str(length)] = f"the {name} was made for {positions} positions"
            sizes = sizes.without(length)
    check_tokenizer(tokenizer)
    first = starting_token(tokenizer)
    documents = [texts] if isinstance(texts, str) else texts
    every = chain.from_iterable(text_ids(document, tokenizer) for document in documents)
    ids = list(islice(every, sizes.max_chunks * sizes.longest()))
    while len(ids) < 2 * (sizes.longest() - (first is not None)):
        length = sizes.lengths[-1]
        if length == sizes.prefix:
            raise KVTransferError(
                f"The text has {len(ids)} tokens; expected at least two chunks of {sizes.longest()}. Give more text, "
                "or a shorter prefix."
            )
        left_out[str(length)] = "the text is too short"
        sizes = sizes.without(length)
    chunks = as_chunks(ids, sizes.longest(), first)[: sizes.max_chunks]
    count = len(chunks)
    half = (count + 1) // 2
    order = [index for pair in zip(range(half), range(half, 2 * half), strict=True) for index in pair if index < count]
    return chunks[order], sizes, left_out


def reach_of(models: dict[str, nn.Module]) -> dict[str, int]:
    """For how many positions models were made, by name, of those that say so."""
    found = {
        name: getattr(text_config(getattr(model, "config", None)), "max_position_embeddings", None)
        for name, model in models.items()
    }
    return {name: positions for name, positions in found.items() if isinstance(positions, int)}


def check_reach(what: str, tokens: int, models: dict[str, nn.Module]) -> None:
    """Raises [`KVTransferError`] if something that is asked, `tokens` with its context, is longer than models read."""
    for name, positions in reach_of(models).items():
        if tokens > positions:
            raise KVTransferError(
                f"The {what} has {tokens} tokens with what stands before it, more than the {positions} positions that "
                f"the {name} was made for; expected fewer. Leave it out, or show fewer shots."
            )


def batches(chunks: Tensor, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of chunks, each with the chunks that are the next ones: another document to each."""
    following = chunks.roll(-1, dims=0)
    return list(zip(chunks.split(batch_size), following.split(batch_size), strict=True))


def versions() -> dict[str, str]:
    """Of the libraries that figures depend on."""
    return {
        "hf_kvtransfer": __version__,
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def dtype_of(model: nn.Module) -> str:
    """Of a model's first weights."""
    like = next(model.parameters(), None)
    return "none" if like is None else str(like.dtype).removeprefix("torch.")


def digest_of_pair(source: nn.Module, target: nn.Module) -> dict[str, str]:
    """What tells both models from others, by side: configuration, a sample of the weights, dtype and device."""
    manifest = pair_manifest(source, target)
    return {
        side: digest(
            [
                {name: value for name, value in manifest.items() if name.startswith(side)},
                dtype_of(model),
                next(model.parameters()).device.type,
            ]
        )
        for side, model in (("source", source), ("target", target))
    }


def digest_of_mapper(mapper: KVMapper | None) -> str | None:
    """Over what a conversion depends on, and all weights."""
    if mapper is None:
        return None
    found = hashlib.sha256(config_digest(mapper.config.to_dict()).encode())
    for name, parameter in mapper.named_parameters():
        found.update(f"{name} {parameter.dtype}".encode())
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def digest(values: Any) -> str:
    """Of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]


def settings_of(sizes: Sizes) -> dict[str, Any]:
    """As JSON values."""
    return {**asdict(sizes), "lengths": list(sizes.lengths)}
