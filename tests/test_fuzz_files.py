"""Damaged files: whatever is wrong with them, loading and converting give the saved mapper's answer or a refusal."""

import atexit
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_kvtransfer import KVMapper, KVTransferError, MapperFileError, PairMismatchError

from .architectures import build
from .conftest import FAMILY
from .fuzzing import attempt, fuzz, identity, ids, prefilled, tally  # noqa: F401


FOLDER = Path(tempfile.mkdtemp(prefix="hf_kvtransfer-fuzz-"))
QWEN3 = build("qwen3")
SAVED = identity(QWEN3)
SAVED.save_pretrained(FOLDER)
FILES = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
CONFIG = json.loads(FILES["config.json"])
SOURCE = prefilled(QWEN3, ids(tokens=6))
EXPECTED = SAVED.convert(SOURCE)
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def load_and_convert(**kwargs):
    return KVMapper.from_pretrained(FOLDER, **kwargs).convert(SOURCE)


def check(changed, **kwargs):
    """Writes the changed files, and holds what becomes of them against the law."""
    FOLDER.mkdir(exist_ok=True)
    try:
        for name, content in changed.items():
            (FOLDER / name).write_bytes(content)
        result, error = attempt(load_and_convert, **kwargs)
    finally:
        for name in changed:
            (FOLDER / name).write_bytes(FILES[name])
    if result is not None:
        for mine, saved in zip(result.layers, EXPECTED.layers, strict=True):
            assert torch.equal(mine.keys, saved.keys)
            assert torch.equal(mine.values, saved.values)
    return error


@fuzz(150, where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), more=st.integers(0, 3))
def test_flipped_bits_in_the_weights(where, bit, more):
    content = bytearray(FILES["model.safetensors"])
    for step in range(more + 1):
        content[(int(where * len(content)) + step * 4096) % len(content)] ^= 1 << bit
    assert isinstance(check({"model.safetensors": bytes(content)}), MapperFileError)


@fuzz(200, where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bits_in_the_configuration(where, bit):
    content = bytearray(FILES["config.json"])
    content[int(where * len(content))] ^= 1 << bit
    check({"config.json": bytes(content)})


@fuzz(80, name=st.sampled_from(sorted(FILES)), share=st.floats(0, 1, exclude_max=True))
def test_truncated_files(name, share):
    content = FILES[name]
    kept = content[: int(share * len(content))]
    error = check({name: kept})
    assert isinstance(error, KVTransferError) or kept.strip() == content.strip()


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**18), 10**18),
    st.sampled_from([0, -1, 1, 2, 3, 7, 10**9]),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 4), max_size=4),
    st.lists(st.lists(st.integers(-1, 4), max_size=3), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.just({"model_type": "gpt_neox"}),
    st.just({"model_type": "qwen3"}),
)
OWN = [name for name in CONFIG if name not in ("digests", "model_type")]


@fuzz(250, name=st.sampled_from(OWN), value=VALUES, remove=st.integers(0, 4))
def test_fields_of_the_configuration(name, value, remove):
    """With the recorded digests: a changed field that matters never passes."""
    changed = {key: entry for key, entry in CONFIG.items() if remove or key != name}
    if remove:
        changed[name] = value
    check({"config.json": json.dumps(changed).encode()})


INNER = [(side, name) for side in ("source_geometry", "target_geometry") for name in CONFIG[side]]
INNER += [("target_config", name) for name in ("hidden_size", "num_hidden_layers", "rope_parameters", "head_dim")]


@fuzz(200, where=st.sampled_from(INNER), value=VALUES)
def test_inner_fields_without_digests(where, value):
    """Made by hand, nobody can say what was meant; it still loads, or is refused with a sentence."""
    side, name = where
    changed = {**CONFIG, side: {**CONFIG[side], name: value}}
    del changed["digests"]
    (FOLDER / "config.json").write_bytes(json.dumps(changed).encode())
    try:
        attempt(load_and_convert)
    finally:
        (FOLDER / "config.json").write_bytes(FILES["config.json"])


@fuzz(60, field=st.sampled_from(["kv_heads", "head_dim", "sliding_window", "layer_type", "rotary"]), value=VALUES)
def test_layers_of_a_geometry_without_digests(field, value):
    geometry = json.loads(json.dumps(CONFIG["target_geometry"]))
    geometry["layers"][1][field] = value
    changed = {**CONFIG, "target_geometry": geometry}
    del changed["digests"]
    (FOLDER / "config.json").write_bytes(json.dumps(changed).encode())
    try:
        attempt(load_and_convert)
    finally:
        (FOLDER / "config.json").write_bytes(FILES["config.json"])


NAMES = st.text(st.characters(categories=["Ll"]), min_size=1, max_size=8).map(lambda name: f"later_{name}")


@fuzz(60, extra=st.dictionaries(NAMES, VALUES, min_size=1, max_size=3))
def test_names_that_a_later_release_adds_do_not_matter(extra):
    assert check({"config.json": json.dumps({**CONFIG, **extra}).encode()}) is None


def test_another_pair_and_another_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "small")
    mapper = KVMapper.for_pair(QWEN3, QWEN3, tokenizer=tokenizer).set_as_identity()
    changed = AutoTokenizer.from_pretrained(FAMILY / "small")
    changed.add_tokens(["another"])
    mapper.check_pair(tokenizer=tokenizer)
    with pytest.raises(PairMismatchError, match="another vocabulary"):
        mapper.convert(SOURCE, tokenizer=changed)
    for side in ("source", "target"):
        for other in (build("qwen3", seed=5), build("gpt_neox"), build("gemma3")):
            with pytest.raises(PairMismatchError):
                mapper.convert(SOURCE, **{side: other})
