"""How fast a cache is converted, beside what the arithmetic itself takes in the same run, and beside a target prefill.

The floor of a conversion is the time of its bare matrix products (the same shapes, dtype and weights, each in one call
over all tokens, written to memory that is there already) plus the time of copying as many bytes as the two caches have,
each byte of the source read and each byte of the target written once. Both are measured in turn with the conversion.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hf_kvtransfer import KVMapper, KVMapperConfig, ModelGeometry
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.contents import chunk_length
from hf_kvtransfer.costs import conversion_flops, prefill_flops
from hf_kvtransfer.features import KINDS, Support
from hf_kvtransfer.native import run_native
from hf_kvtransfer.tables import table


SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 65536,
}
TINY: dict[str, Any] = {
    **SMOLLM2,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "vocab_size": 512,
}
TINY.update(num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=65536)
SHAPES = {"tiny family": TINY, "SmolLM2-135M": SMOLLM2, "Qwen3-like": QWEN3}
BARS = {"long": 1.25, "short": 1.6, "speed-up": 0.8, "doubling": 0.15, "memory": 1.0}


@dataclass(frozen=True)
class Case:
    """
    One conversion.

    Args:
        shape (`str`): a key of `SHAPES`, for both sides.
        k (`int`): source layers that each target layer reads, the nearest ones.
        tokens (`int`): of the source cache.
        heads (`str`, *optional*, defaults to `"full"`): or `"local"`.
        dtype (`str`, *optional*, defaults to `"float32"`): of both caches and of the maps.
        anchor_layers (`int`, *optional*): which the target runs itself.
    """

    shape: str
    k: int
    tokens: int
    heads: str = "full"
    dtype: str = "float32"
    anchor_layers: int | None = None

    @property
    def support(self) -> str:
        """As in tables."""
        name = {"full": "full-head", "local": "head-local"}[self.heads]
        return name if self.anchor_layers is None else f"{name}, anchored by {self.anchor_layers}"


@dataclass
class Subject:
    """What is measured: a mapper with random weights, a random source cache, and the target where it takes part."""

    case: Case
    mapper: KVMapper
    source: list[tuple[Tensor, Tensor]]
    target: Any = None
    ids: Tensor | None = None

    def convert(self) -> Any:
        if self.target is None:
            return self.mapper.convert(self.source, hold_back=0)
        return self.mapper.convert(self.source, hold_back=0, target=self.target, input_ids=self.ids)


def subject(case: Case) -> Subject:
    """A case with everything that it needs."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[case.shape])
    geometry, dtype = ModelGeometry.from_config(config), getattr(torch, case.dtype)
    layers = len(geometry.layers)
    native = 0 if case.anchor_layers is None else case.anchor_layers + 1
    support: list[Any] = [None] * native
    for index in range(native, layers):
        first = min(max(index - case.k // 2, 0), layers - case.k)
        # Every other layer while there is room, as chosen supports have gaps.
        chosen = range(first, first + case.k)
        if 1 < case.k <= layers // 2:
            first = min(max(index - case.k, 0), layers - 2 * case.k)
            chosen = range(first, first + 2 * case.k, 2)
        read = Support(tuple(chosen), case.heads, anchor=case.anchor_layers is not None)
        support.append({kind: read.to_dict() for kind in KINDS})
    described = {f"{side}_geometry": geometry.to_dict() for side in ("source", "target")}
    described |= {f"{side}_config": config.to_dict() for side in ("source", "target")}
    mapper = KVMapper(KVMapperConfig(**described, support=support, anchor_layers=case.anchor_layers)).eval().to(dtype)
    with torch.no_grad():
        for parameter in mapper.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    source = [
        tuple(torch.randn(1, layer.kv_heads, case.tokens, layer.head_dim).to(dtype) for _ in KINDS)
        for layer in geometry.layers
    ]
    target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval() if case.anchor_layers is not None else None
    ids = torch.arange(case.tokens)[None] % config.vocab_size if target is not None else None
    return Subject(case, mapper, source, target, ids)


def products(one: Subject) -> Callable[[], None]:
    """The bare matrix products of a conversion, into memory that is there already."""
    tokens, calls, buffers = one.case.tokens, [], {}
    for layer in one.mapper.layers:
        for kind in KINDS if hasattr(layer, "keys") else ():
            weight = getattr(layer, kind).weight.detach()
            if weight.shape not in buffers:
                groups = weight.shape[:1] if weight.dim() == 3 else ()
                buffers[weight.shape] = tuple(
                    torch.randn(*groups, tokens, width).to(weight.dtype)
                    for width in (weight.shape[-1], weight.shape[-2])
                )
            calls.append((torch.bmm if weight.dim() == 3 else torch.mm, weight.mT, *buffers[weight.shape]))

    def run() -> None:
        for product, weight, features, out in calls:
            product(features, weight, out=out)

    return run


def copies(one: Subject) -> Callable[[], None]:
    """Reads each byte of the source cache and writes as many as the target's has."""
    written = [tuple(torch.zeros_like(state) for state in pair) for pair in one.source]

    def run() -> None:
        for pair, room in zip(one.source, written, strict=True):
            for state, out in zip(pair, room, strict=True):
                out.copy_(state)

    return run


@torch.no_grad()
def measure(runs: dict[str, Callable[[], Any]], trials: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each, taken in turn so that what else the machine does meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for trial in range(trials + 1):
        for name, run in runs.items():
            begin = clock()
            run()
            if trial:  # the first warms up
                times[name].append(clock() - begin)
    return times


def to_floor(case: Case, trials: int, clock: Callable[[], float]) -> dict[str, Any]:
    """One row of the table of floors."""
    one = subject(case)
    runs = {"convert": one.convert, "products": products(one), "copies": copies(one)}
    if one.target is not None:
        # What the target runs is no conversion of ours, and belongs to the floor as it is.
        layers = one.case.anchor_layers
        runs["anchor"] = lambda: run_native(one.target, one.ids, layers=layers)
    times = measure(runs, trials, clock)
    floors = [sum(parts) for parts in zip(*(times[name] for name in times if name != "convert"), strict=True)]
    ratio = statistics.median(time / floor for time, floor in zip(times["convert"], floors, strict=True))
    medians = {name: statistics.median(found) for name, found in times.items()}
    bar = None
    if case.dtype == "float32" and case.shape != "tiny family" and case.anchor_layers is None:
        bar = BARS["short"] if case.tokens < 1024 else BARS["long"]
    return {**asdict(case), "seconds": medians, "floor": statistics.median(floors), "ratio": ratio, "bar": bar}


def doubling(lengths: Sequence[int], trials: int, clock: Callable[[], float], k: int = 4) -> list[dict[str, Any]]:
    """How the time grows with the tokens."""
    subjects = {length: subject(Case("SmolLM2-135M", k, length)) for length in lengths}
    times = measure({str(length): one.convert for length, one in subjects.items()}, trials, clock)
    rows = []
    for shorter, longer in pairwise(lengths):
        pairs = zip(times[str(shorter)], times[str(longer)], strict=True)
        factor = statistics.median(long / short for short, long in pairs) * 2 * shorter / longer
        rows.append({"from": shorter, "to": longer, "factor": factor, "bar": BARS["doubling"]})
    return rows


def beside_prefill(tokens: int, trials: int, clock: Callable[[], float], k: int = 4) -> dict[str, Any]:
    """The speed-up over the target's own prefill, and what of it the operation counts promise."""
    case = Case("SmolLM2-135M", k, tokens)
    one, config = subject(case), AutoConfig.for_model(**SMOLLM2)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.arange(tokens)[None] % config.vocab_size

    keyword = cache_keyword(target.model)

    def prefill() -> None:
        # The decoder alone: prefill and conversion share what comes after it.
        target.model(input_ids=ids, use_cache=True, **{keyword: DynamicCache(config=config)})

    times = measure({"convert": one.convert, "prefill": prefill}, trials, clock)
    speedup = statistics.median(long / short for short, long in zip(times["convert"], times["prefill"], strict=True))
    predicted = prefill_flops(config, tokens) / conversion_flops(one.mapper.config, tokens).total
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "tokens": tokens,
        "k": k,
        "seconds": medians,
        "speedup": speedup,
        "predicted": predicted,
        "share": speedup / predicted,
        "bar": BARS["speed-up"],
    }


def memory(tokens: int, k: int = 4) -> dict[str, Any]:
    """
    Bytes that a conversion takes at its peak beside weights, source and result, over those of one chunk: what its
    tokens have in both caches. Linux alone says it.
    """
    one = subject(Case("SmolLM2-135M", k, tokens))
    packing = one.mapper.packing()
    length = chunk_length(packing, 1, torch.device("cpu"))
    # What libraries keep for themselves is there after the first.
    one.mapper.convert([tuple(state[:, :, :length] for state in pair) for pair in one.source])
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = _kilobytes("VmRSS")
    result = one.convert()
    peak = _kilobytes("VmHWM")
    written = sum(state.nbytes for layer in result.layers for state in (layer.keys, layer.values))
    width = packing.width + sum(2 * layer.width for layer in packing.target.layers)
    extra, chunk = max((peak - before) * 1024 - written, 0), length * width * 4
    return {"tokens": tokens, "k": k, "extra": extra, "chunk": chunk, "share": extra / chunk, "bar": BARS["memory"]}


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def cases(quick: bool) -> list[Case]:
    """All conversions that are measured against their floor."""
    if quick:
        return [
            Case("tiny family", 2, 64),
            Case("tiny family", 2, 128, "local"),
            Case("tiny family", 1, 64, anchor_layers=1),
        ]
    found = [Case("tiny family", k, tokens) for k in (1, 6) for tokens in (64, 1024)]
    for shape, ks in (("SmolLM2-135M", (1, 4, 30)), ("Qwen3-like", (1, 3, 6))):
        found += [
            Case(shape, k, tokens, heads) for heads in ("full", "local") for k in ks for tokens in (64, 1024, 4096)
        ]
        found += [Case(shape, ks[1], 1024, heads, "bfloat16") for heads in ("full", "local")]
        found.append(Case(shape, ks[1], 1024, anchor_layers=1))
    return [*found, Case("SmolLM2-135M", 4, 32768)]


def report(results: dict[str, Any]) -> str:
    """The tables."""
    floors = [
        [
            f"{row['shape']}, {Case(**{name: row[name] for name in Case.__dataclass_fields__}).support}",
            str(row["k"]),
            f"{row['tokens']:,}",
            row["dtype"],
            f"{1e3 * row['seconds']['convert']:.1f}",
            f"{1e3 * row['floor']:.1f}",
            f"{row['ratio']:.2f}",
            _verdict(row["bar"] and row["ratio"] <= row["bar"], row["bar"] and f"≤ {row['bar']}"),
        ]
        for row in results["floors"]
    ]
    others = [
        [
            f"{row['from']:,} → {row['to']:,} tokens: times",
            f"{row['factor']:.2f}",
            _verdict(abs(row["factor"] - 2) <= row["bar"], f"2 ± {row['bar']}"),
        ]
        for row in results["doubling"]
    ]
    beside, extra = results["prefill"], results["memory"]
    others.append(
        [
            f"speed-up over a prefill of {beside['tokens']:,} tokens: {beside['speedup']:.1f}, by operations "
            f"{beside['predicted']:.1f}; share",
            f"{beside['share']:.2f}",
            _verdict(beside["share"] >= beside["bar"], f"≥ {beside['bar']}"),
        ]
    )
    if extra:
        name = (
            f"memory beside both caches: {extra['extra'] / 2**20:.1f} MiB; chunks of {extra['chunk'] / 2**20:.1f} MiB"
        )
        others.append([name, f"{extra['share']:.2f}", _verdict(extra["share"] <= extra["bar"], f"≤ {extra['bar']}")])
    header = ["conversion", "k", "tokens", "dtype", "ms", "floor ms", "ratio", "promise"]
    return f"{table(header, floors)}\n\n{table(['SmolLM2-135M, full-head, k = 4', '', 'promise'], others)}"


def _verdict(is_kept: Any, bar: str | None) -> str:
    return "" if not bar else f"{bar} {'✓' if is_kept else '✗'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="folder of convert.json and convert.md")
    parser.add_argument("--trials", type=int, default=9, help="of which medians are taken")
    parser.add_argument("--quick", action="store_true", help="a few small ones, to see that everything runs")
    parser.add_argument("--only", default="", help="only conversions whose shape and support contain this")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time of this process in place of the clock, where others use the machine",
    )
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    trials, quick = 2 if arguments.quick else arguments.trials, arguments.quick
    results: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu_time": arguments.cpu_time,
    }
    results["memory"] = memory(512 if quick else 8192) if sys.platform == "linux" else None
    results["floors"] = []
    for case in cases(quick):
        if arguments.only in f"{case.shape}, {case.support}":
            results["floors"].append(to_floor(case, trials, clock))
            print(f"{case}: {results['floors'][-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    results["doubling"] = doubling((256, 512) if quick else (8192, 16384, 32768), max(trials // 2, 2), clock)
    results["prefill"] = beside_prefill(128 if quick else 4096, max(trials // 2, 2), clock)
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = report(results)
    print(text)
    (arguments.out / "convert.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "convert.md").write_text(f"```\n{text}\n```\n", encoding="utf-8")


if __name__ == "__main__":
    main()
