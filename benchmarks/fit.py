"""How fast maps are fitted, beside what the arithmetic itself takes in the same run.

The floor of a calibration is the time of the two models' bare forward passes over a batch, plus that of the sums'
bare matrix products: the same shapes and dtype, into sums that are there already. Both are measured in turn with the
calibration of that batch. A sweep over k is measured beside the fit of its largest k alone; two processes beside one,
by the rate at which each reads its share of the same text.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.convert import SHAPES, measure
from hf_kvtransfer import ModelGeometry
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.calibration import CalibrationStatistics, FeatureLayout, collect, solve_ridge
from hf_kvtransfer.calibration.moments import BLOCK_ROWS, panels
from hf_kvtransfer.calibration.passes import Passes, is_heldout
from hf_kvtransfer.calibration.processes import launched
from hf_kvtransfer.geometry import decoder_of
from hf_kvtransfer.rope import RotaryCodec
from hf_kvtransfer.tables import table


FAMILY = Path(__file__).resolve().parent.parent / "examples" / "tiny_family"
BARS = {"calibration": 1.2, "sweep": 1.5, "processes": 1.7}
# What the presets sum: of their own kind, of both kinds, and weighted by attention beside the plain ones.
SUMS: dict[str, tuple[FeatureLayout, bool]] = {
    "plain": (FeatureLayout(), False),
    "joint": (FeatureLayout(joint=True), False),
    "weighted": (FeatureLayout(), True),
}
HELDOUT = 0.1
STRIDE = 4
TEXTS = [f"Text {i} tells how {i} things became {i * i} things, and who counted them. " * 20 for i in range(400)]


def models(shape: str) -> tuple[Any, Any]:
    """Two of the tiny family as they are, or two of a larger one's shape with random weights."""
    if shape == "tiny family":
        return tuple(
            AutoModelForCausalLM.from_pretrained(FAMILY / name, dtype=torch.float32) for name in ("small", "large")
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape]), dtype=torch.float32).eval()
    return model, model


def bare_products(sums: CalibrationStatistics, rows: int) -> Callable[[], None]:
    """The matrix products of adding so many rows to the sums of the fit split."""
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def symmetric_and_cross(gram: torch.Tensor, cross: torch.Tensor) -> None:
        for start in range(0, rows, BLOCK_ROWS):
            block = min(BLOCK_ROWS, rows - start)
            x, y = (torch.randn(block, width, dtype=gram.dtype) for width in cross.shape)
            calls.extend((gram[a:b, a:], x[:, a:b].T, x[:, a:]) for a, b in panels(len(gram)))
            calls.append((cross, x.T, y))

    for moments in sums.splits["fit"].values():
        symmetric_and_cross(moments.sxx, moments.sxy)
    for weighted in sums.weighted.values():
        for gram, cross in zip(weighted.tensors()["gram"], weighted.tensors()["cross"], strict=True):
            symmetric_and_cross(gram, cross)

    def run() -> None:
        for out, left, right in calls:
            out.addmm_(left, right)

    return run


def calibration(
    shape: str, kind: str, size: tuple[int, int], trials: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """One batch read by both models and summed, beside the bare passes and products."""
    source, target = models(shape)
    layout, is_weighted = SUMS[kind]
    geometries = ModelGeometry.from_model(source), ModelGeometry.from_model(target)
    sums = CalibrationStatistics(*geometries, "", layout=layout, attention_rows=is_weighted)
    codecs = RotaryCodec.from_model(source), RotaryCodec.from_model(target)
    passes = Passes(source, target, codecs, STRIDE, HELDOUT, is_weighted, 0, None)
    ids = torch.randint(0, 200, size)
    fitted = [index for index in range(2 * size[0]) if not is_heldout(index, HELDOUT)][: size[0]]

    def forward() -> None:
        with torch.inference_mode():
            for model in (source, target):
                decoder = decoder_of(model)
                decoder(input_ids=ids, use_cache=True, **{cache_keyword(decoder): DynamicCache()})

    runs = {
        "calibration": lambda: passes.add(sums, ids, fitted),
        "forward": forward,
        "products": bare_products(sums, size[0] * len(range(0, size[1], STRIDE))),
    }
    times = measure(runs, trials, clock)
    ratios = [
        own / (first + second)
        for own, first, second in zip(times["calibration"], times["forward"], times["products"], strict=True)
    ]
    return {
        "shape": shape,
        "sums": kind,
        "sequences": size[0],
        "tokens": size[1],
        **{f"{name}_seconds": statistics.median(found) for name, found in times.items()},
        "ratio": statistics.median(ratios),
        "bar": BARS["calibration"],
    }


def sweep(shape: str, heads: str, trials: int, clock: Callable[[], float], kinds: tuple[str, ...]) -> dict[str, Any]:
    """All k from the same sums, beside the largest alone; for each target layer the k layers nearest to it are read."""
    geometry = ModelGeometry.from_config(AutoConfig.for_model(**SHAPES[shape]))
    depth, width = geometry.num_layers, geometry.offsets[-1]
    sums = CalibrationStatistics(geometry, geometry, "", dtype=torch.float32)
    for name in sums.layout.names if kinds != ("keys",) else ("keys",):
        moments = sums.splits["fit"][name]
        # A positive definite matrix of the right size; nothing depends on which.
        moments.sxx.normal_(std=0.01).diagonal().add_(width)
        moments.sxy.normal_()
        moments.count = width
    ks = [k for k in (1, 2, 4, 8) if k < depth] + [depth]

    def solve(k: int) -> None:
        support: list[Any] = []
        for layer in range(depth):
            first = min(max(layer - k // 2, 0), depth - k)
            one = {"layers": list(range(first, first + k)), "heads": heads}
            support.append({kind: {**one, "joint": False, "window": 0, "anchor": False} for kind in ("keys", "values")})
        solve_ridge(sums, support, dtype=torch.float32, kinds=kinds, progress=False)

    runs = {f"k = {k}": (lambda k=k: solve(k)) for k in ks}  # type: ignore[misc]
    seconds = {name: statistics.median(found) for name, found in measure(runs, trials, clock).items()}
    return {
        "shape": shape,
        "heads": heads,
        "seconds": seconds,
        "ratio": sum(seconds.values()) / max(seconds.values()),
        "bar": BARS["sweep"],
    }


def read_share(sequences: int, clock: Callable[[], float]) -> float:
    """Seconds that this process takes for its share of a collection."""
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "small")
    pair = models("tiny family")
    wishes = {"sequence_length": 256, "batch_size": 4, "progress": False}
    collect(*pair, tokenizer, TEXTS, num_sequences=8, **wishes)
    begin = clock()
    collect(*pair, tokenizer, TEXTS, num_sequences=sequences, **wishes)
    return clock() - begin


def processes(sequences: int, trials: int, clock: str) -> dict[str, Any]:
    """One process and two, in turn, each with a thread of its own."""
    found: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(trials):
        for world, seconds in found.items():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [sys.executable, "-m", "benchmarks.fit", "--share", str(sequences), "--clock", clock]
            started = [
                subprocess.Popen(
                    command,
                    env={**environment, "WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(world)
            ]
            # The last line of each is what it took; the slower one decides.
            seconds.append(max(float(each.communicate()[0].split()[-1]) for each in started))
    medians = {world: statistics.median(seconds) for world, seconds in found.items()}
    return {
        "sequences": sequences,
        "seconds": medians,
        "ratio": statistics.median(one / two for one, two in zip(found[1], found[2], strict=True)),
        "bar": BARS["processes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny family alone, once each: does it run?")
    parser.add_argument("--parts", default="calibration,sweep,processes", help="which to measure, of all three")
    parser.add_argument("--shapes", default="tiny family,SmolLM2-135M", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--sums", default=",".join(SUMS), help="of a calibration; weighted takes most memory")
    parser.add_argument("--trials", type=int, default=5, help="medians are over so many, after one to warm up")
    parser.add_argument("--batch", default="4x512", help="sequences and tokens of a batch of the larger shapes")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine that does something else too"
    )
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[arguments.clock]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if arguments.share:
        with launched():
            print(read_share(arguments.share, clock))
        return
    shapes = ["tiny family"] if arguments.quick else arguments.shapes.split(",")
    trials = 1 if arguments.quick else arguments.trials
    larger = tuple(map(int, arguments.batch.split("x")))
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "clock": arguments.clock, "trials": trials}
    parts = arguments.parts.split(",")
    if "calibration" in parts:
        found["calibration"] = [
            calibration(shape, kind, (8, 256) if shape == "tiny family" else (larger[0], larger[1]), trials, clock)
            for shape in shapes
            for kind in arguments.sums.split(",")
        ]
        print("Calibration of one batch, seconds:")
        columns = ["calibration", "forward", "products"]
        rows = [
            [
                *(row["shape"], row["sums"], f"{row['sequences']} × {row['tokens']}"),
                *(f"{row[f'{name}_seconds']:.3f}" for name in columns),
                *(f"{row['ratio']:.2f}", f"≤ {row['bar']}"),
            ]
            for row in found["calibration"]
        ]
        print(table(["shape", "sums", "batch", *columns, "ratio", "bar"], rows))
    if "sweep" in parts:
        kinds = ("keys",)
        found["sweep"] = [sweep(shape, heads, trials, clock, kinds) for shape in shapes for heads in ("full", "local")]
        print("All k from saved sums, beside the largest alone, seconds (keys):")
        rows = [
            [
                *(row["shape"], row["heads"], " + ".join(f"{value:.3g}" for value in row["seconds"].values())),
                *(f"{row['ratio']:.2f}", f"≤ {row['bar']}"),
            ]
            for row in found["sweep"]
        ]
        print(table(["shape", "heads", "k = 1 + 2 + 4 + 8 + all, while there are", "ratio", "bar"], rows))
    if "processes" in parts:
        found["processes"] = row = processes(16 if arguments.quick else 96, trials, arguments.clock)
        print("The tiny family's calibration by one process and by two, one thread each:")
        seconds = [f"{value:.2f}" for value in row["seconds"].values()]
        print(table(["one", "two", "rate", "bar"], [[*seconds, f"{row['ratio']:.2f}", f"≥ {row['bar']}"]]))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
