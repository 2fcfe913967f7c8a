"""`TransferLM`: the `hf` model of lm-evaluation-harness whose contexts are read by another model."""

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor, nn

from .._compat import cache_keyword
from ..errors import KVTransferError
from ..evaluation.controls import random_mapper
from ..loading import load_config, load_model
from ..mapper import KVMapper
from .handover import Handover
from .other_documents import other_documents


CONDITIONS = ("transferred", "native", "source", "raw", "random", "different_document", "no_context")
_HANDED_OVER = ("transferred", "raw", "random", "different_document")

# Above every token id. The harness passes context and continuation to `_model_call` as one row, in which nothing tells
# where the continuation begins, so the ids of the context are raised by this much. They are never looked up as labels.
_READ = 2**40

Tokens = list[int]
Request = tuple[Any, Tokens, Tokens]


class TransferLM(HFLM):
    """
    The `hf` model of lm-evaluation-harness, with the context of every request read by the source and taken over by the
    target. The target reads the last token of the context itself, and what follows. Tokenisation, truncation, batches,
    order, stop sequences and caches of results are those of `hf`.

    In rolling log-likelihoods nothing is a context. There the target scores the first part of each window by itself,
    the same in every condition, and the rest after it has taken over that first part from the source.

    Args:
        source (`str` or `PreTrainedModel`, *optional*):
            The model that reads. Not needed for the conditions `"native"` and `"no_context"`.
        target (`str` or `PreTrainedModel`): the model that goes on.
        mapper (`str` or [`KVMapper`], *optional*):
            Of this pair: a folder or a name on the Hub. Not needed for `"native"`, `"source"` and `"no_context"`.
        condition (`str`, *optional*, defaults to `"transferred"`):
            `"transferred"`, or what it is compared with: `"native"` (the target alone, exactly `hf`), `"source"` (the
            source alone, exactly `hf`), `"raw"` (the target on the source's cache as it is, each layer on the one at
            its relative depth), `"random"` (on what a random mapper makes of it), `"different_document"` (on the
            converted context of the next document), `"no_context"` (on the last token of the context alone).
        handover (`float`, *optional*, defaults to 0.5):
            For rolling log-likelihoods: after which share of a window the target takes over, above 0 and below 1.
        exact_prefix (`int`, *optional*): as in [`KVMapper.convert`]; as the mapper was made for by default.
        exact_suffix (`int`, *optional*): as in [`KVMapper.convert`]; as the mapper was made for by default.
        source_revision (`str`, *optional*): branch, tag or commit of the source on the Hub.
        target_revision (`str`, *optional*): of the target.
        mapper_revision (`str`, *optional*): of the mapper.
        source_device (`str`, *optional*): where the source runs; where the target does by default.
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`): of both models' weights.
        max_length (`int`, *optional*):
            Tokens that a request may have. By default what both models can read, in every condition.
        trust_remote_code (`bool`, *optional*, defaults to `False`): run model code that comes with a checkpoint.
        **kwargs:
            Further arguments of `hf`, for the model that goes on: `batch_size`, `device`, `tokenizer`, `add_bos_token`,
            `parallelize`, ….

    Raises:
        [`KVTransferError`]: if an argument is missing or out of range, or a model or the mapper can't be loaded.
        [`PairMismatchError`]: if the mapper is of another pair, or `"raw"` is asked for and the shapes differ.
    """

    def __init__(
        self,
        source: str | nn.Module | None = None,
        target: str | nn.Module | None = None,
        mapper: str | KVMapper | None = None,
        condition: str = "transferred",
        handover: float = 0.5,
        exact_prefix: int | None = None,
        exact_suffix: int | None = None,
        source_revision: str | None = None,
        target_revision: str | None = None,
        mapper_revision: str | None = None,
        source_device: str | None = None,
        dtype: str | torch.dtype = "auto",
        max_length: int | None = None,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_arguments({"source": source, "target": target, "mapper": mapper}, condition, handover, kwargs)
        self.condition, self.share = condition, handover
        sides = {"source": (source, source_revision), "target": (target, target_revision)}
        runs = "source" if condition == "source" else "target"
        model, revision = sides[runs]
        kwargs.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(
            model,
            revision=revision or "main",
            dtype=dtype,
            max_length=max_length or _shorter_limit(sides, runs, trust_remote_code),
            trust_remote_code=trust_remote_code,
            **kwargs,
        )
        if self.backend != "causal":
            raise KVTransferError(
                f"The {runs} is run as {self.backend}; expected a decoder-only model. Leave `backend` out."
            )
        self._others: dict[str, str] = {}
        self._other_window: Tokens = []
        self._is_trial = False
        self._largest_batch: int | None = None
        self._handover: Handover | None = None
        if condition in _HANDED_OVER:
            reader: Any = source
            if isinstance(source, str):
                device = source_device or str(self.device)
                given: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
                reader = load_model(source, revision=source_revision, device=device, **given)
            loaded: Any = mapper
            if isinstance(mapper, str):
                loaded = KVMapper.from_pretrained(mapper, revision=mapper_revision or "main")
            loaded.check_pair(source=reader, target=self.model, tokenizer=self.tokenizer)
            loaded = (random_mapper(loaded) if condition == "random" else loaded).to(self.device)
            self._handover = Handover(reader, self.model, loaded, exact_prefix, exact_suffix, condition == "raw")

    # ------------------------------------------------------------------------------------------------ log-likelihoods

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As in `hf`."""
        self._find_others(requests)
        result: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return result

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """As in `hf`, each window handed over after its first part."""
        if self.condition != "different_document":
            result: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
            return result
        self._find_others(requests)
        scores: list[float] = []
        # One document at a time, since windows don't tell which they are from.
        for request in requests:
            self._other_window = [self.prefix_token_id, *self.tok_encode(self._others.get(request.args[0], ""))]
            scores.extend(super().loglikelihood_rolling([request], disable_tqdm=True))
        return scores

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if self.condition in ("native", "source"):
            return self._scored(requests, disable_tqdm, override_bs)
        # Windows come without the strings that requests have.
        if requests and requests[0][0] is None:
            return self._score_windows(requests, disable_tqdm, override_bs)
        taken_over = [(texts, self._context(texts[0], context), rest) for texts, context, rest in requests]
        return self._scored(taken_over, disable_tqdm, override_bs)

    def _score_windows(
        self, windows: Sequence[Request], disable_tqdm: bool, override_bs: int | None
    ) -> list[tuple[float, bool]]:
        alone: list[Request] = []
        after: list[Request] = []
        for _, context, rest in windows:
            kept = max(int(self.share * (len(context) + len(rest))) - len(context), 0)
            alone.append((None, context, rest[:kept]))
            after.append((None, self._context(None, context + rest[:kept]), rest[kept:]))
        first = iter(self._scored([window for window in alone if window[2]], disable_tqdm, override_bs))
        second = self._scored(after, disable_tqdm, override_bs)
        scores = []
        for (_, _, scored), (value, greedy) in zip(alone, second, strict=True):
            before = next(first) if scored else (0.0, True)
            scores.append((before[0] + value, before[1] and greedy))
        return scores

    def _scored(
        self, requests: Sequence[Request], disable_tqdm: bool, override_bs: int | None
    ) -> list[tuple[float, bool]]:
        result: list[tuple[float, bool]] = super()._loglikelihood_tokens(
            requests, disable_tqdm=disable_tqdm, override_bs=override_bs
        )
        return result

    def _context(self, text: str | None, tokens: Tokens) -> Tokens:
        """The tokens that stand for a context in this condition, raised where the source reads them."""
        last = tokens[-1:]
        if self.condition == "no_context":
            return last
        if self.condition == "different_document" and len(tokens) > 1:
            if text is None:
                tokens = self._other_window[: len(tokens) - 1] + last
            else:
                tokens = self.tok_encode(self._others[text])[:-1] + last
        return [token + _READ for token in tokens]

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        if self._is_trial and self._handover is not None:
            inps = inps.clone()
            inps[:, : inps.shape[1] // 2] += _READ
        is_read = inps >= _READ
        ids = inps - _READ * is_read
        lengths = is_read.sum(-1)
        if self._handover is None or int(lengths.max()) < 2:
            logits: Tensor = super()._model_call(ids, attn_mask, labels)
            return logits
        return self._logits_after(self._handover, ids, lengths)

    def _logits_after(self, handover: Handover, ids: Tensor, lengths: Tensor) -> Tensor:
        """
        Logits of what comes after contexts that the source reads, for rows padded at the right.

        Args:
            handover ([`Handover`]): how the contexts come to the target.
            ids (`torch.Tensor` of shape `[batch, tokens]`): contexts, each with what follows.
            lengths (`torch.Tensor` of shape `[batch]`): of the contexts.

        Returns:
            `torch.Tensor` of shape `[batch, tokens, vocabulary]`: zero up to the last token of each context.
        """
        rows, width = ids.shape
        longest = int(lengths.max())
        index = torch.arange(longest, device=ids.device) - (longest - lengths)[:, None]
        mask = (index >= 0).long()
        cache = handover.cache_of(ids.gather(1, index.clamp(min=0)), mask)

        # From the last token of each context on; what would lie behind the row's end is never looked at.
        positions = lengths[:, None] - 1 + torch.arange(width - int(lengths.min()) + 1, device=ids.device)
        fed = ids.gather(1, positions.clamp(max=width - 1))
        with (
            torch.no_grad(),
            torch.autocast(
                self.device.type, dtype=self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None
            ),
        ):
            logits = self.model(
                input_ids=fed,
                attention_mask=torch.cat([mask[:, :-1], torch.ones_like(fed)], dim=1),
                position_ids=positions,
                use_cache=True,
                **{cache_keyword(self.model): cache},
            ).logits
        result: Tensor = logits.new_zeros(rows, width, logits.shape[-1])
        for row, length in enumerate(lengths.tolist()):
            result[row, length - 1 :] = logits[row, : width - length + 1]
        return result

    def _detect_batch_size(self, requests: Sequence[Request] | None = None, pos: int = 0) -> int:
        if not requests and self._largest_batch is not None:
            return self._largest_batch
        # What is tried out for its memory must hold both models' caches.
        self._is_trial = True
        try:
            size: int = super()._detect_batch_size(requests, pos)
        finally:
            self._is_trial = False
        if not requests:
            self._largest_batch = size
        return size

    # ----------------------------------------------------------------------------------------------------- generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """As in `hf`."""
        self._find_others(requests)
        result: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        return result

    def tok_batch_encode(self, strings: Sequence[str], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As in `hf`: the tokens that stand for these contexts in this condition, and their mask."""
        ids, mask = super().tok_batch_encode(list(strings), *args, **kwargs)
        if self.condition == "no_context":
            return ids[:, -1:], mask[:, -1:]
        if self.condition == "different_document":
            others, mask = super().tok_batch_encode([self._others.get(s, s) for s in strings], *args, **kwargs)
            ids = torch.cat([others[:, :-1], ids[:, -1:]], dim=1)
        return ids, mask

    def _model_generate(self, context: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._handover is not None and context.shape[1] > 1:
            cache = self._handover.cache_of(context, kwargs["attention_mask"])
            kwargs[cache_keyword(self.model.generate)] = cache
        result: Tensor = super()._model_generate(context, *args, **kwargs)
        return result

    def _find_others(self, requests: Sequence[Any]) -> None:
        if self.condition == "different_document":
            self._others = other_documents(requests)


def _check_arguments(given: dict[str, Any], condition: str, handover: float, kwargs: dict[str, Any]) -> None:
    if condition not in CONDITIONS:
        raise KVTransferError(f"`condition` is {condition!r}; expected one of {', '.join(CONDITIONS)}.")
    wrong = [name for name in ("pretrained", "revision") if name in kwargs]
    if wrong:
        raise KVTransferError(
            f"`{wrong[0]}` doesn't tell which of the three is meant; expected `source`, `target` and `mapper`, and "
            "`source_revision`, `target_revision` and `mapper_revision`. Use those."
        )
    needed = {"native": ["target"], "no_context": ["target"], "source": ["source"]}
    missing = [name for name in needed.get(condition, list(given)) if given[name] is None]
    if missing:
        raise KVTransferError(
            f"The condition {condition!r} needs {' and '.join(f'`{name}`' for name in missing)}; expected folders or "
            "names on the Hub. Pass them in `--model_args source=…,target=…,mapper=…`."
        )
    if isinstance(handover, bool) or not isinstance(handover, int | float) or not 0 < handover < 1:
        raise KVTransferError(
            f"`handover` is {handover!r}; expected a number above 0 and below 1, the share of a window after which the "
            "target takes over. The default is 0.5."
        )


def _shorter_limit(sides: dict[str, tuple[Any, str | None]], runs: str, trust_remote_code: bool) -> int | None:
    """The context length of the model that doesn't run, if it is known and the shorter one."""
    limits: dict[str, int | None] = {}
    for side, (model, revision) in sides.items():
        if model is None:
            return None
        config = load_config(model, revision, trust_remote_code) if isinstance(model, str) else model.config
        limits[side] = getattr(config.get_text_config(), "max_position_embeddings", None)
    own, other = limits.pop(runs), limits.popitem()[1]
    return other if own is not None and other is not None and other < own else None
