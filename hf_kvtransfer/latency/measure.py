"""How long a conversion takes, against what it replaces: the target's own prefill."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .._compat import cache_keyword
from ..config import KVMapperConfig
from ..costs import conversion_flops, prefill_flops
from ..errors import KVTransferError
from ..evaluation import prefill
from ..geometry import decoder_of
from ..mapper import KVMapper
from ..modules import text_config, unwrap
from ..source import read_source_cache
from .memory import peak_bytes
from .rates import MachineRates, copy_bandwidth, measure_rates
from .timing import interleaved, now


DEFAULT_LENGTHS = (64, 256, 1024)
DEFAULT_TRIALS = 5


def measure_latency(
    source: nn.Module,
    target: nn.Module,
    mapper: KVMapper,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    *,
    batch_size: int = 1,
    trials: int = DEFAULT_TRIALS,
    memory: bool = True,
    seed: int = 0,
    rates: MachineRates | None = None,
) -> list[dict[str, Any]]:
    """
    Times conversion and prefill over contexts of random tokens, by length.

    A context of `n` tokens is read by the source whole. The target then has its first token after a pass over all `n`,
    or after converting `n − 1` and a pass over the last one, as in `generate`. All ways take turns, and every figure is
    the median of the trials.

    Args:
        source (`PreTrainedModel`): the source, in evaluation mode.
        target (`PreTrainedModel`): the target, on the same device.
        mapper ([`KVMapper`]): of this pair, with or without an anchor.
        lengths (`Sequence[int]`, *optional*, defaults to `(64, 256, 1024)`): tokens of the contexts, two or more.
        batch_size (`int`, *optional*, defaults to 1): contexts at a time.
        trials (`int`, *optional*, defaults to 5): how often each way is timed, after one run that doesn't count.
        memory (`bool`, *optional*, defaults to `True`): measure peak memory, too, in one more run of each way.
        seed (`int`, *optional*, defaults to 0): of the tokens.
        rates ([`MachineRates`], *optional*): measured on this machine before; measured here by default.

    Returns:
        `list[dict]`: one row per length, of JSON types. Times are in seconds, medians; memory is in bytes:

        - `context`, `batch_size`, `trials`, `seed`;
        - `device`, `dtype`, `threads` (of the CPU), `matmul_flops` (measured operations per second in a large product),
          `copy_bandwidth` (bytes per second, read and written together, of a copy as large as the two caches);
        - `source_prefill`, `target_prefill` (decoder without LM head), `conversion` (of a source cache that is there);
        - `target_first_token` (prefill and logits of the last token), `converted_first_token` (conversion and a pass
          over the last token);
        - `spread`: for each of these five the lowest and the highest time of all trials;
        - `warm_speedup`: `target_prefill / conversion`, where the source cache is there anyway;
          `cold_speedup`: `target_prefill / (source_prefill + conversion)`, where it has to be made;
          `first_token_speedup`: `target_first_token / converted_first_token`;
          `counted_speedup`: what the floating-point operations alone would give for the first of these;
        - `conversion_flops`, `target_prefill_flops`, `source_prefill_flops`;
        - `conversion_bytes`: of both caches and of the maps' weights, each once; `cache_bytes`: of the converted cache;
        - `conversion_floor`: `conversion_flops / matmul_flops + conversion_bytes / copy_bandwidth`, its two parts
          `conversion_floor_arithmetic` and `conversion_floor_memory`, and `conversion_to_floor`, the measured ratio;
          `target_prefill_floor`, `target_prefill_to_floor`: the same for the prefill, of whose bytes the decoder's
          weights and its cache are counted;
        - `conversion_peak`, `target_prefill_peak`: the most memory that was taken at once, results included, beyond
          models, mapper and source cache; or `None`. See [`~hf_kvtransfer.latency.memory.peak_bytes`].

    Raises:
        [`KVTransferError`]: if lengths, batch or trials are impossible, or the models' devices differ.
        [`PairMismatchError`]: if the mapper is of another pair.
    """
    configs = [unwrap(model).config for model in (source, target)]
    check_lengths(lengths, *configs)
    for name, value in (("batch_size", batch_size), ("trials", trials)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise KVTransferError(f"`{name}` is {value!r}; expected a whole number, 1 or more.")
    mapper.check_pair(source=source, target=target)
    device = _common_device(source, target, mapper)
    dtype = next(target.parameters()).dtype
    rates = measure_rates(device, dtype) if rates is None else rates
    rows = []
    for length in lengths:
        vocabulary = min(text_config(config).vocab_size for config in configs)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (batch_size, length), generator=generator).to(device)
        race = _Race(source, target, mapper, ids, device)
        times = interleaved(race.ways, trials)
        figures = {name: median(values) for name, values in times.items()}
        cold = [made + converted for made, converted in zip(times["source_prefill"], times["conversion"], strict=True)]
        rows.append(
            {
                "context": length,
                "batch_size": batch_size,
                "trials": trials,
                "seed": seed,
                **asdict(rates),
                **figures,
                "spread": {name: [min(values), max(values)] for name, values in times.items()},
                "warm_speedup": figures["target_prefill"] / figures["conversion"],
                "cold_speedup": figures["target_prefill"] / median(cold),
                "first_token_speedup": figures["target_first_token"] / figures["converted_first_token"],
                **_floors(race, rates, figures),
                "conversion_peak": peak_bytes(race.converted, device) if memory else None,
                "target_prefill_peak": peak_bytes(race.prefilled, device) if memory else None,
            }
        )
    return rows


def check_lengths(lengths: Sequence[int], *configs: PreTrainedConfig) -> None:
    """
    Raises [`KVTransferError`] if a context is shorter than two tokens, of which one is held back, or longer than the
    positions that a model of these configurations was made for.
    """
    if not lengths:
        raise KVTransferError("There are no lengths to measure; expected one or more. Give some, such as 64,1024.")
    limits = [getattr(text_config(config), "max_position_embeddings", None) for config in configs]
    most = min((limit for limit in limits if isinstance(limit, int)), default=None)
    for length in lengths:
        if not isinstance(length, int) or isinstance(length, bool) or length < 2:
            raise KVTransferError(
                f"A context of {length!r} tokens can't be measured; expected a whole number, 2 or more, since the last "
                "token is left to the target."
            )
        if most is not None and length > most:
            raise KVTransferError(
                f"A context of {length:,} tokens is longer than the {most:,} positions that the models were made for; "
                "expected no more. Measure shorter ones."
            )


def convert_arguments(config: KVMapperConfig, target: nn.Module | None, input_ids: Tensor) -> dict[str, Any]:
    """
    What `convert` has to be given beside the source's cache of a text without padding.

    Args:
        config ([`KVMapperConfig`]): of the mapper.
        target (`PreTrainedModel`, *optional*): the target, if the mapper needs it.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`): of the context.
    """
    given: dict[str, Any] = {}
    # The target reads a part of the context itself only where the mapper was made for that.
    if config.needs_target:
        given |= {"target": target, "input_ids": input_ids}
    # A cache doesn't show that there are no images in it.
    if any(config.geometry(side).multimodal_positions for side in ("source", "target")):
        given["position_ids"] = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    return given


class _Race:
    """The ways of coming to a cache and a first token, over one batch of contexts."""

    def __init__(
        self, source: nn.Module, target: nn.Module, mapper: KVMapper, ids: Tensor, device: torch.device
    ) -> None:
        self.source, self.target, self.mapper, self.ids, self._device = source, target, mapper, ids, device
        self._cache = prefill(source, ids)
        self._given = convert_arguments(mapper.config, target, ids)
        self.ways = {"source": self._source, "native": self._native, "transfer": self._transfer}

    def converted(self) -> Any:
        return self.mapper.convert(self._cache, **self._given)

    def prefilled(self) -> Any:
        return prefill(self.target, self.ids)

    def _source(self) -> dict[str, float]:
        start = self._now()
        prefill(self.source, self.ids)
        return {"source_prefill": self._now() - start}

    def _native(self) -> dict[str, float]:
        """Prefill ends where the decoder does; what follows is the LM head on the last token."""
        ends: list[float] = []
        handle = decoder_of(self.target).register_forward_hook(lambda *_: ends.append(self._now()))
        try:
            start = self._now()
            self._step(self.ids, None)
            return {"target_prefill": ends[-1] - start, "target_first_token": self._now() - start}
        finally:
            handle.remove()

    def _transfer(self) -> dict[str, float]:
        start = self._now()
        cache = self.converted()
        ready = self._now()
        self._step(self.ids[:, -1:], cache)
        return {"conversion": ready - start, "converted_first_token": self._now() - start}

    @torch.inference_mode()
    def _step(self, ids: Tensor, cache: Any) -> None:
        call: Any = self.target
        keywords = {} if cache is None else {cache_keyword(self.target): cache}
        call(input_ids=ids, use_cache=True, logits_to_keep=1, **keywords)

    def _now(self) -> float:
        return now(self._device)

    def bytes_moved(self) -> dict[str, int]:
        """Of the caches on both sides, of the maps, and of the target's decoder: what has to be read or written."""
        source = read_source_cache(self._cache)
        result = read_source_cache(self.converted())
        decoder = decoder_of(self.target)
        embedding: Any = decoder.get_input_embeddings()
        skipped = {id(embedding.weight)}
        return {
            "source": _size([*source.keys, *source.values]),
            "cache": _size([*result.keys, *result.values]),
            "maps": _size(self.mapper.parameters()),
            "decoder": _size(weight for weight in decoder.parameters() if id(weight) not in skipped),
        }


def _size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _floors(race: _Race, rates: MachineRates, figures: dict[str, float]) -> dict[str, Any]:
    rows, tokens = race.ids.shape
    cost = conversion_flops(race.mapper.config, tokens - 1)
    flops = {
        "conversion": rows * cost.total,
        "target_prefill": rows * prefill_flops(unwrap(race.target).config, tokens),
        "source_prefill": rows * prefill_flops(unwrap(race.source).config, tokens),
    }
    size = race.bytes_moved()
    # The weights of layers that the target runs itself are read, too, by their share of the operations.
    own = round(size["decoder"] * (cost.total - cost.map) / cost.prefill)
    moved = {
        "conversion": size["source"] + size["cache"] + size["maps"] + own,
        "target_prefill": size["cache"] + size["decoder"],
    }
    bandwidth = copy_bandwidth((size["source"] + size["cache"]) // 2, race.ids.device)
    result: dict[str, Any] = {
        **{f"{name}_flops": number for name, number in flops.items()},
        "copy_bandwidth": bandwidth,
        "counted_speedup": flops["target_prefill"] / flops["conversion"],
        "conversion_bytes": moved["conversion"],
        "cache_bytes": size["cache"],
    }
    for name in ("conversion", "target_prefill"):
        arithmetic, memory = flops[name] / rates.matmul_flops, moved[name] / bandwidth
        result[f"{name}_floor"] = arithmetic + memory
        result[f"{name}_to_floor"] = figures[name] / (arithmetic + memory)
        if name == "conversion":
            result |= {f"{name}_floor_arithmetic": arithmetic, f"{name}_floor_memory": memory}
    return result


def _common_device(source: nn.Module, target: nn.Module, mapper: KVMapper) -> torch.device:
    devices = {parameter.device for module in (source, target, mapper) for parameter in module.parameters()}
    if len(devices) > 1:
        raise KVTransferError(
            f"Source, target and mapper are on {', '.join(sorted(map(str, devices)))}; expected one device, whose "
            "rates give the floor. Move all of them to one."
        )
    return devices.pop()
