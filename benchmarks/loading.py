"""What importing the package adds to importing transformers, and what loading a mapper adds to reading its file."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from hf_kvtransfer import KVMapper
from hf_kvtransfer.tables import table

from .convert import Case, measure, subject


BARS = {"import": 0.3, "loading": 1.3}
_IMPORTS = """
import time
# What is imported lazily from transformers by any program that loads a model.
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedModel
begin = time.{clock}()
import hf_kvtransfer
print(time.{clock}() - begin)
"""


def importing(trials: int, clock: str) -> dict[str, Any]:
    """Seconds of `import hf_kvtransfer` once transformers is there, in processes of their own."""
    command = [sys.executable, "-c", _IMPORTS.format(clock=clock)]
    seconds = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(trials)]
    return {"seconds": statistics.median(seconds), "bar": BARS["import"]}


def loading(case: Case, trials: int, clock: Callable[[], float]) -> dict[str, Any]:
    """
    Seconds of `from_pretrained`, with digests compared, over those of reading the same file into memory. Reading alone
    may leave a file mapped, so every number is touched after both.
    """
    with tempfile.TemporaryDirectory() as folder:
        subject(case).mapper.save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        runs: dict[str, Callable[[], Any]] = {
            "mapper": lambda: [p.sum() for p in KVMapper.from_pretrained(folder, min_gap_recovered=False).parameters()],
            "file": lambda: [tensor.sum() for tensor in load_file(file).values()],
        }
        times = measure(runs, trials, clock)
        size = file.stat().st_size
    ratio = statistics.median(one / other for one, other in zip(times["mapper"], times["file"], strict=True))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {"shape": case.shape, "k": case.k, "bytes": size, "seconds": medians, "ratio": ratio, "bar": BARS["loading"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="folder of loading.json")
    parser.add_argument("--trials", type=int, default=7, help="of which medians are taken")
    parser.add_argument("--quick", action="store_true", help="a small one, to see that everything runs")
    parser.add_argument("--cpu-time", action="store_true", help="time of the process in place of the clock")
    arguments = parser.parse_args()
    name = "process_time" if arguments.cpu_time else "perf_counter"
    trials = 1 if arguments.quick else arguments.trials
    cases = [Case("tiny family", 2, 8)] if arguments.quick else [Case("SmolLM2-135M", k, 8) for k in (4, 30)]
    results = {
        "import": importing(trials, name),
        "loading": [loading(case, trials, getattr(time, name)) for case in cases],
    }
    seconds, bar = results["import"]["seconds"], results["import"]["bar"]
    verdict = f"≤ {bar} s {'✓' if seconds <= bar else '✗'}"
    rows = [["import hf_kvtransfer, after transformers", f"{seconds:.2f} s", verdict]]
    for row in results["loading"]:
        verdict = f"≤ {row['bar']} {'✓' if row['ratio'] <= row['bar'] else '✗'}"
        name = f"from_pretrained over reading the file, {row['shape']}, k = {row['k']}"
        rows.append([f"{name}, {row['bytes'] / 2**20:.0f} MiB", f"{row['ratio']:.2f}", verdict])
    print(table(["loading", "", "promise"], rows))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "loading.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
