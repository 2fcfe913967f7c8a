"""Interrupted saves and damaged files: the old mapper, the new one, or a sentence; never a mixture."""

import contextlib
import json
import os
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModel

from hf_kvtransfer import KVMapper, KVMapperConfig, MapperFileError, PairMismatchError, UnsupportedModelError
from hf_kvtransfer.digests import file_digest

from .architectures import build
from .fuzzing import identity


@pytest.fixture(scope="module")
def qwen3():
    return build("qwen3")


def filled(model, value):
    """A mapper of which every weight, and one score in the configuration, is `value`."""
    mapper = identity(model)
    mapper.config.scores = {"value": value}
    with torch.no_grad():
        for parameter in mapper.parameters():
            parameter.fill_(value)
    return mapper


def held(folder, load=KVMapper.from_pretrained):
    """The value of the mapper in a folder, after checking that all of it is of that mapper."""
    mapper = load(folder)
    values = {float(value) for parameter in mapper.parameters() for value in (parameter.min(), parameter.max())}
    assert values == {mapper.config.scores["value"]}
    return values.pop()


def flip(path, where, bit=0):
    content = bytearray(path.read_bytes())
    content[where] ^= 1 << bit
    path.write_bytes(bytes(content))


class Interrupted(BaseException):
    pass


FUNCTIONS = ("os.replace", "os.link", "pathlib.Path.unlink", "shutil.rmtree", "tempfile.mkdtemp")


def calls(monkeypatch, names=FUNCTIONS, stop=None, after=False, error=Interrupted):
    """Counts the calls that change files, and raises before or after the one numbered `stop`."""
    counted = [0]
    for name in names:
        module, _, attribute = name.rpartition(".")
        owner = {"os": os, "shutil": shutil, "tempfile": __import__("tempfile")}.get(module)
        owner = owner or __import__("pathlib").Path
        original = getattr(owner, attribute)

        def wrapped(*args, _original=original, **kwargs):
            number, counted[0] = counted[0], counted[0] + 1
            if number == stop and not after:
                raise error
            result = _original(*args, **kwargs)
            if number == stop:
                raise error
            return result

        monkeypatch.setattr(owner, attribute, wrapped)
    return counted


@pytest.mark.parametrize("shards", ["one file", "shards to one file", "one file to shards"])
@pytest.mark.parametrize("error", [Interrupted, OSError], ids=["interrupted", "failed"])
def test_an_interruption_at_any_step_leaves_the_old_mapper_or_the_new(qwen3, tmp_path, shards, error):
    small = {"max_shard_size": "4KB"}
    before, after = ({}, {}) if shards == "one file" else (small, {}) if shards.startswith("shards") else ({}, small)
    old, new = filled(qwen3, 1.0), filled(qwen3, 2.0)
    old.save_pretrained(tmp_path / "count", **before)
    with pytest.MonkeyPatch.context() as patch:
        steps = calls(patch)
        new.save_pretrained(tmp_path / "count", **after)
    found = []
    for step in range(steps[0]):
        for when in (False, True):
            folder = tmp_path / f"{step}-{when}"
            old.save_pretrained(folder, **before)
            with pytest.MonkeyPatch.context() as patch:
                calls(patch, stop=step, after=when, error=error)
                with contextlib.suppress(Interrupted, OSError):
                    new.save_pretrained(folder, **after)
            found.append(held(folder))
            assert held(folder, AutoModel.from_pretrained) == found[-1]
            new.save_pretrained(folder, **after)  # a later save cleans up
            assert held(folder) == 2.0
            assert not [name for name in os.listdir(folder) if name.startswith(".saved")]
            shutil.rmtree(folder)
    assert set(found) == {1.0, 2.0}
    assert found == sorted(found)  # one step decides


def test_without_hard_links_files_are_copied(qwen3, tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", unsupported)
    filled(qwen3, 3.0).save_pretrained(tmp_path)
    assert held(tmp_path) == 3.0


class TestDigests:
    def test_are_recorded_for_every_file_and_not_kept_in_the_configuration(self, qwen3, tmp_path):
        filled(qwen3, 1.0).save_pretrained(tmp_path, max_shard_size="4KB")
        digests = json.loads((tmp_path / "config.json").read_text())["digests"]
        assert set(digests) == {"config", *os.listdir(tmp_path)} - {"config.json"}
        assert not hasattr(KVMapper.from_pretrained(tmp_path).config, "digests")

    @pytest.mark.parametrize("where", [0, 9, 500, -1])
    def test_one_wrong_bit_in_the_weights_is_refused(self, qwen3, tmp_path, where):
        identity(qwen3).save_pretrained(tmp_path)
        flip(tmp_path / "model.safetensors", where)
        with pytest.raises(MapperFileError):
            KVMapper.from_pretrained(tmp_path)

    def test_unless_verification_is_off(self, qwen3, tmp_path):
        identity(qwen3).save_pretrained(tmp_path)
        flip(tmp_path / "model.safetensors", -1)
        with pytest.raises(MapperFileError, match="is not the file that was saved with this configuration"):
            KVMapper.from_pretrained(tmp_path)
        KVMapper.from_pretrained(tmp_path, verify=False)

    def test_a_configuration_without_digests_is_taken_as_it_is(self, qwen3, tmp_path):
        identity(qwen3).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        del config["digests"]
        path.write_text(json.dumps(config))
        flip(tmp_path / "model.safetensors", -1)
        KVMapper.from_pretrained(tmp_path)

    def test_a_changed_field_is_refused_and_an_added_one_is_not(self, qwen3, tmp_path):
        identity(qwen3).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "of_a_later_release": {"a": [1]}, "scores": {"mine": 1}}))
        KVMapper.from_pretrained(tmp_path)
        config["source_config"]["rope_parameters"]["rope_theta"] = 10_001.0
        path.write_text(json.dumps(config))
        with pytest.raises(MapperFileError, match="is not as it was saved"):
            KVMapper.from_pretrained(tmp_path)
        KVMapper.from_pretrained(tmp_path, verify=False)
        path.write_text(json.dumps({**config, "digests": ["a"]}))
        with pytest.raises(MapperFileError, match="`digests` in the `config.json` of .* is a list"):
            KVMapper.from_pretrained(tmp_path)

    def test_files_of_two_mappers_are_refused(self, qwen3, tmp_path):
        filled(qwen3, 1.0).save_pretrained(tmp_path / "one")
        filled(qwen3, 2.0).save_pretrained(tmp_path / "two", max_shard_size="4KB")
        shutil.copy(tmp_path / "one" / "model.safetensors", tmp_path / "two")  # which is loaded before the shards
        with pytest.raises(MapperFileError, match=r"model.safetensors in .* is not the file that was saved"):
            KVMapper.from_pretrained(tmp_path / "two")

    def test_another_configuration_for_these_weights_is_refused(self, qwen3, tmp_path):
        identity(qwen3).save_pretrained(tmp_path)
        config = KVMapperConfig.from_pretrained(tmp_path)
        config.support = [[1], [0], [2]]
        with pytest.raises(MapperFileError, match="`support` of the configuration that was given is not the one"):
            KVMapper.from_pretrained(tmp_path, config=config)
        assert KVMapper.from_pretrained(tmp_path, config=config, verify=False).config.support == config.support

    def test_in_the_hubs_cache(self, qwen3, tmp_path):
        commit = "0123456789abcdef0123456789abcdef01234567"
        repository = tmp_path / "models--org--mapper"
        snapshot = repository / "snapshots" / commit
        filled(qwen3, 1.0).save_pretrained(snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        assert held("org/mapper", lambda name: KVMapper.from_pretrained(name, cache_dir=tmp_path)) == 1.0
        flip(snapshot / "model.safetensors", -1)
        with pytest.raises(MapperFileError, match=r"model.safetensors in org/mapper is not the file"):
            KVMapper.from_pretrained("org/mapper", cache_dir=tmp_path)

    @pytest.mark.parametrize("size", [0, 1, 8191, 8192, 8193, 3 * 8192 + 5, 32 * 2**20 + 8192 + 3])
    def test_any_wrong_bit_changes_the_digest(self, tmp_path, size):
        path = tmp_path / "file"
        content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        path.write_bytes(content.tobytes())
        digest = file_digest(path)
        assert digest == file_digest(path)
        for where in {0, size // 2, size - 1} if size else ():
            changed = content.copy()
            changed[where] ^= 64
            path.write_bytes(changed.tobytes())
            assert file_digest(path) != digest
        path.write_bytes(content.tobytes() + b"\0")
        assert file_digest(path) != digest


class TestDamagedConfigurations:
    """Without digests, as if made by hand: what no mapper can be built from is named."""

    @staticmethod
    def load(model, folder, **changes):
        identity(model).save_pretrained(folder)
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        config.pop("digests", None)
        path.write_text(json.dumps(config))
        return KVMapper.from_pretrained(folder)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("support", [[0], "1", [2]]),
            ("support", [[0], [1.0], [2]]),
            ("support", 3),
            ("map_type", None),
            ("source_config", "qwen3"),
            ("target_geometry", [1]),
            ("source_weights", {"layers.0": "0.1"}),
            ("k", "8"),
            ("k", True),
            ("ridge_lambda", "0.01"),
            ("calibration", 5),
            ("dtype", {"a": "float32"}),
        ],
    )
    def test_a_value_of_another_type(self, qwen3, tmp_path, field, value):
        with pytest.raises(MapperFileError, match=f"`{field}` of this KVMapperConfig is .*damaged"):
            self.load(qwen3, tmp_path, **{field: value})

    @pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"a": 1', "\ufeff{}", "[" * 100_000])
    def test_no_json_object(self, qwen3, tmp_path, text):
        identity(qwen3).save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(MapperFileError, match="The `config.json` in .* can't be read"):
            KVMapper.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("kv_heads", 0), ("kv_heads", 10**12), ("head_dim", "16"), ("head_dim", 2**19), ("sliding_window", -1)],
    )
    def test_a_layer_that_no_model_has(self, qwen3, tmp_path, field, value):
        geometry = identity(qwen3).config.target_geometry
        layers = [
            {**layer, field: value, **({"kv_heads": 4} if value == 2**19 else {})} for layer in geometry["layers"]
        ]
        with pytest.raises(MapperFileError, match="`target_geometry` of this KVMapperConfig can't be read"):
            self.load(qwen3, tmp_path, target_geometry={**geometry, "layers": layers})

    @pytest.mark.parametrize("change", [{"layers": []}, {"rope_parameters": 3}, {"layers": 3}, {"unknown": 1}])
    def test_a_geometry_that_is_none(self, qwen3, tmp_path, change):
        geometry = {**identity(qwen3).config.source_geometry, **change}
        with pytest.raises(MapperFileError, match="`source_geometry` of this KVMapperConfig can't be read"):
            self.load(qwen3, tmp_path, source_geometry=geometry)

    def test_a_model_configuration_that_builds_no_model(self, qwen3, tmp_path):
        config = identity(qwen3).config.source_config
        mapper = self.load(qwen3, tmp_path, source_config={**config, "hidden_size": "wide"})
        with pytest.raises((MapperFileError, UnsupportedModelError), match="`source_config`|can't build"):
            mapper.codec("source")  # older releases find out when they build the model
        mapper = self.load(qwen3, tmp_path, source_config={**config, "id2label": True})
        with pytest.raises(MapperFileError, match="`source_config` of this KVMapperConfig can't be read"):
            mapper.codec("source")
        mapper = self.load(qwen3, tmp_path, source_config={**config, "model_type": ["qwen3"]})
        with pytest.raises(PairMismatchError, match="Upgrade transformers"):
            mapper.codec("source")
        with pytest.raises(PairMismatchError, match="no `source_config`"):
            self.load(qwen3, tmp_path, source_config=None).codec("source")
