"""What all tests share: a ban on deprecated calls, the tiny family, and real SmolLM2 checkpoints, made once."""

import importlib.util
import logging
import os
from pathlib import Path

import pytest


# Before transformers or huggingface_hub are imported: no test may reach for the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from .conformance.summary import pytest_terminal_summary  # noqa: F401 - a hook, which only this file can give to xdist


ROOT = Path(__file__).resolve().parent.parent
FAMILY = ROOT / "examples" / "tiny_family"


class DeprecationHandler(logging.Handler):
    """Fails the test in which transformers, datasets or huggingface_hub logs that something is deprecated."""

    allowed: tuple[str, ...] = ()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "deprecat" in message.lower() and not any(name in message for name in self.allowed):
            pytest.fail(f"{record.name} logged: {message}")


@pytest.fixture(autouse=True, scope="session")
def _no_deprecated_calls():
    handler = DeprecationHandler()
    for name in ("transformers", "huggingface_hub", "datasets"):
        logging.getLogger(name).addHandler(handler)


@pytest.fixture
def allow_deprecated(monkeypatch):
    """For tests of what users may still write: lets messages about one old name pass."""
    return lambda *names: monkeypatch.setattr(DeprecationHandler, "allowed", names)


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def family():
    """The folder of the tiny family."""
    return FAMILY


@pytest.fixture(scope="session")
def family_tokenizer():
    return AutoTokenizer.from_pretrained(FAMILY / "small")


@pytest.fixture(scope="session")
def family_model():
    """Loads members of the tiny family by name, each once."""
    loaded = {}

    def load(name):
        if name not in loaded:
            loaded[name] = AutoModelForCausalLM.from_pretrained(FAMILY / name, dtype=torch.float32).eval()
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def smollm2_checkpoints(tmp_path_factory, worker_id):
    """
    Folders of two real checkpoints: SmolLM2-135M-Instruct, and the same with six middle layers removed. Made once per
    session and shared by the workers, since reading GGUF takes a while.
    """
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent
    whole, pruned = base / "smollm2", base / "smollm2-without-six-layers"
    with FileLock(str(base / "smollm2.lock")):
        if not (base / "smollm2.done").exists():
            load_example("smollm2").make_checkpoints(whole, pruned)
            (base / "smollm2.done").touch()
    return pruned, whole


def load_example(name):
    """A script of `examples/` as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def smollm2(smollm2_checkpoints):
    """Source, target and tokenizer: SmolLM2-135M without six middle layers, the whole one, and their tokenizer."""
    pruned, whole = smollm2_checkpoints
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (pruned, whole)]
    tokenizer = AutoTokenizer.from_pretrained(whole)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return *models, tokenizer
