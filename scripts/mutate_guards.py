"""
Removes each refusal in turn and demands that a test notices.

For every `raise` of one of the package's errors in the modules below, the package is copied, that one `raise` is taken
out, and the tests of its module run on the copy. A refusal whose removal no test notices is a surviving mutant: the
script names it and fails. `python scripts/mutate_guards.py [module …]`; a few minutes on two cores.
"""

import argparse
import ast
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path


# One thread per worker, before torch is imported.
os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hf_kvtransfer"

# The fast tests of each module, the likeliest to fail first. Those of every fuzz case and of every interruption of a
# save would notice some as well, and take too long.
TESTS = {
    "source": ["test_source.py"],
    "positions": ["test_positions.py", "test_convert.py"],
    "cache": ["test_cache.py", "test_cache_guards.py", "test_positions.py"],
    "appending": ["test_convert.py", "test_positions.py"],
    "mapper": ["test_convert.py", "test_positions.py::TestIntoGoesOnWhereItLeftOff", "test_mapper_files.py"],
    "pairing": ["test_pairing.py"],
    "saving": ["test_mapper_files.py", "test_saving.py::TestDamagedConfigurations", "test_bad_input.py"],
    "digests": ["test_saving.py::TestDigests"],
    "config": [
        "test_saving.py::TestDamagedConfigurations",
        "test_mapper_files.py",
        "test_anchors.py::TestConfigurationsThatContradictThemselves",
    ],
    "evidence": ["test_evidence.py", "test_cards.py::TestFolders"],
    "cards": ["test_cards.py"],
    "conversion": ["test_anchors.py", "test_convert.py"],
    "native": ["test_native.py"],
    "recipes": ["test_recipes.py::TestRefusals", "test_bad_input.py"],
    "solving": ["test_recipes.py::TestAuto"],
    "fitting": ["test_recipes.py"],
    "publishing": ["test_hub.py::TestFailures", "test_hub.py::TestPublishing"],
    "hub_errors": ["test_hub.py::TestFailures"],
    "report/report": ["test_report.py", "test_report_files.py"],
    "report/figures": ["test_report_files.py"],
    "evaluation/inputs": ["test_evaluate.py::TestInputs"],
    "evaluation/checks": ["test_evaluate.py::TestInputs", "test_choices.py"],
    "evaluation/journal": ["test_evaluate.py::TestResuming"],
    "evaluation/intervals": ["test_intervals.py"],
    "evaluation/choices": ["test_choices.py"],
    "harness/handover": ["test_harness.py::TestRefusals"],
    "harness/model": ["test_harness.py::TestRefusals"],
    "harness/other_documents": ["test_harness.py::TestRefusals"],
    "training/arguments": ["test_training.py::TestRefusals"],
    "training/cached": ["test_training_data.py::TestCachedFeatures"],
    "training/forms": ["test_training_data.py::TestForms"],
    "training/handover": ["test_training_data.py::TestHandOver"],
    "training/module": ["test_training.py::TestRefusals"],
    "training/resuming": ["test_training.py::TestRefusals"],
    "training/trainer": ["test_training.py::TestRefusals"],
    "calibration/layout": ["test_recipes.py::TestStatistics"],
    "calibration/selection": ["test_selection.py", "test_recipes.py::TestAuto"],
}


class Disable(ast.NodeTransformer):
    """Takes out the refusal at one line: the code goes on, or an exception that was translated passes as it was."""

    def __init__(self, line: int) -> None:
        self.line = line
        self.handlers = 0

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.handlers += 1
        self.generic_visit(node)
        self.handlers -= 1
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if node.lineno != self.line:
            return node
        return ast.Raise() if self.handlers else ast.Pass()


def refusals(module: str, errors: set[str]) -> list[tuple[int, str]]:
    """Line and function of every `raise` of one of the package's errors."""
    found = []
    tree = ast.parse((ROOT / PACKAGE / f"{module}.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            if node.exc.func.id not in errors:
                continue
            around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            found.append((node.lineno, f"{max(around, key=lambda f: f.lineno).name}: {node.exc.func.id}"))
    return sorted(found)


def workplace(module: str, line: int | None) -> Path:
    """A copy of the repository in which the refusal at that line is gone."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-"))
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("examples", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    if line is not None:
        path = folder / PACKAGE / f"{module}.py"
        tree = Disable(line).visit(ast.parse(path.read_text()))
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    return folder


def start(module: str, line: int | None) -> tuple[int, Path]:
    """Runs the tests of a module on a copy, in a child that has the heavy imports already."""
    folder = workplace(module, line)
    child = os.fork()
    if child:
        return child, folder
    code = 2
    try:
        import pytest

        os.chdir(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        with open(folder / "output.txt", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in TESTS[module])]))
    finally:
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(TESTS), help="modules to mutate; all by default")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()

    import hypothesis  # noqa: F401  here, so that every child has them
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch

    torch.set_num_threads(1)
    import transformers.models.auto.modeling_auto  # noqa: F401

    tree = ast.parse((ROOT / PACKAGE / "errors.py").read_text())
    errors = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    jobs: list[tuple[str, int | None, str]] = [(module, None, "unchanged") for module in arguments.modules]
    jobs += [(module, line, where) for module in arguments.modules for line, where in refusals(module, errors)]

    began, running, wrong = time.monotonic(), {}, []
    queue = list(jobs)
    while queue or running:
        while queue and len(running) < arguments.workers:
            module, line, where = queue.pop(0)
            child, folder = start(module, line)
            running[child] = (module, line, where, folder, time.monotonic())
        child, status = os.wait()
        module, line, where, folder, then = running.pop(child)
        code = os.waitstatus_to_exitcode(status)
        # 0: all tests passed, 1: some failed; anything else is no verdict.
        verdict = {0: "survived", 1: "noticed"}.get(code, f"exit status {code}")
        if line is None:
            verdict = "passes" if code == 0 else f"FAILS unchanged ({code})"
        good = code == (0 if line is None else 1)
        lines = (folder / "output.txt").read_text().splitlines()
        by = next((text.split(" - ")[0].split("::", 1)[-1] for text in lines if text.startswith("FAILED")), "")
        print(
            f"{module + (f':{line}' if line else ''):18} {where:52} {verdict:10} {by} ({time.monotonic() - then:.0f} s)"
        )
        sys.stdout.flush()
        if not good:
            wrong.append(f"{module}:{line} {where}: {verdict}")
            print("\n".join(lines[-8:]) if line is None or code not in (0, 1) else "", end="")
        shutil.rmtree(folder, ignore_errors=True)
    mutants = sum(line is not None for _, line, _ in jobs)
    print(
        f"\n{mutants} refusals removed one by one in {time.monotonic() - began:.0f} s; {len(wrong)} unnoticed or broken"
    )
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
