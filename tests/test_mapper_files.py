"""Saving and loading a mapper: every way transformers offers, and what happens to files that are not as they were."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, DynamicCache

import hf_kvtransfer.mapper
from hf_kvtransfer import KVMapper, KVMapperConfig, MapperFileError, PairMismatchError
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.pairing import pair_manifest

from .architectures import VOCAB, build


@pytest.fixture(scope="module")
def pair():
    return build("llama"), build("qwen3", seed=1)


@pytest.fixture
def mapper(pair):
    mapper = KVMapper.for_pair(*pair, support=[[0], [0, 1], [1, 2]])
    with torch.no_grad():
        for parameter in mapper.parameters():
            parameter.normal_(std=0.1)
    return mapper


@pytest.fixture(scope="module")
def source_cache(pair):
    cache = DynamicCache()
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        pair[0](input_ids=ids, use_cache=True, **{cache_keyword(pair[0]): cache})
    return cache


def same(one, other, source_cache):
    return all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        for a, b in zip(one.convert(source_cache).layers, other.convert(source_cache).layers, strict=True)
    )


def test_a_loaded_mapper_converts_as_the_saved_one(mapper, source_cache, tmp_path):
    mapper.save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert same(mapper, KVMapper.from_pretrained(tmp_path), source_cache)
    assert same(mapper, AutoModel.from_pretrained(tmp_path), source_cache)


def test_the_configuration_round_trips_and_shows_no_path(mapper, tmp_path):
    mapper.save_pretrained(tmp_path / "mapper")
    config = AutoConfig.from_pretrained(tmp_path / "mapper")
    assert isinstance(config, KVMapperConfig)
    assert config.geometry("target") == mapper.config.geometry("target")
    assert config.support == mapper.config.support
    assert str(tmp_path) not in (tmp_path / "mapper" / "config.json").read_text()
    assert KVMapperConfig().support == []


def test_shards(mapper, source_cache, tmp_path):
    mapper.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert same(mapper, KVMapper.from_pretrained(tmp_path), source_cache)
    mapper.save_pretrained(tmp_path)  # the shards of before would be taken for weights
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert same(mapper, KVMapper.from_pretrained(tmp_path), source_cache)


def test_dtype_and_device_map(mapper, source_cache, tmp_path):
    mapper.save_pretrained(tmp_path)
    half = KVMapper.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    exact, rounded = mapper.convert(source_cache), half.convert(source_cache)
    torch.testing.assert_close(rounded.layers[2].values, exact.layers[2].values, rtol=0.05, atol=0.05)
    assert same(mapper, KVMapper.from_pretrained(tmp_path, device_map="cpu"), source_cache)
    assert same(mapper, KVMapper.from_pretrained(tmp_path, device_map={"": "cpu"}), source_cache)


def test_a_half_precision_mapper_is_saved_as_one(mapper, tmp_path):
    mapper.to(torch.bfloat16).save_pretrained(tmp_path)
    assert KVMapper.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


def test_from_the_hub_cache_offline_and_by_revision(mapper, source_cache, tmp_path, monkeypatch):
    """What an earlier download left in the Hub's cache is found again without a network, by branch and by commit."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--small-to-large"
    mapper.save_pretrained(repository / "snapshots" / commit)
    for branch in ("main", "v1"):
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    for keywords in ({}, {"revision": "v1"}, {"revision": commit}, {"local_files_only": True}):
        loaded = KVMapper.from_pretrained("org/small-to-large", cache_dir=tmp_path, **keywords)
        assert same(mapper, loaded, source_cache)
    with pytest.raises(MapperFileError, match="org/small-to-large is no folder and not completely in the local cache"):
        KVMapper.from_pretrained("org/small-to-large", cache_dir=tmp_path, revision="v2")


def test_a_failed_save_leaves_the_old_mapper(mapper, source_cache, tmp_path, monkeypatch):
    mapper.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("by hand")
    other = KVMapper(mapper.config)

    def broken(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", broken)
    with pytest.raises(OSError, match="No space left"):
        other.save_pretrained(tmp_path)
    assert same(mapper, KVMapper.from_pretrained(tmp_path), source_cache)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "config.json", "model.safetensors"]
    assert not [path for path in os.listdir(tmp_path.parent) if path.startswith(f".{tmp_path.name}")]


def test_an_interrupted_save_leaves_the_old_mapper(mapper, source_cache, tmp_path, monkeypatch):
    mapper.save_pretrained(tmp_path)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        KVMapper(mapper.config).save_pretrained(tmp_path)
    assert same(mapper, KVMapper.from_pretrained(tmp_path), source_cache)


def test_a_file_is_no_folder(mapper, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MapperFileError, match="is a file; expected a folder"):
        mapper.save_pretrained(tmp_path / "file")


def test_nothing_there_is_a_sentence(tmp_path):
    with pytest.raises(MapperFileError, match="No mapper could be loaded"):
        KVMapper.from_pretrained(tmp_path)
    with pytest.raises(MapperFileError, match="not completely in the local cache"):
        KVMapper.from_pretrained("org/not-in-the-cache")


def test_truncated_weights_are_refused(mapper, tmp_path):
    mapper.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(MapperFileError, match="No mapper could be loaded.*damaged"):
        KVMapper.from_pretrained(tmp_path)


@pytest.mark.parametrize("change", ["missing", "superfluous", "other shape"])
def test_weights_of_another_mapper_are_refused(mapper, tmp_path, change):
    mapper.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = "layers.1.keys.weight"
    if change == "missing":
        del tensors[name]
    elif change == "superfluous":
        tensors["layers.9.keys.weight"] = tensors[name].clone()
    else:
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(MapperFileError, match="don't fit its configuration"):
        KVMapper.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("support", [[0], [0]], "support names 2 target layers, its geometry 3"),
        ("support", [[0], [0, 7], [1]], "support of target layer 1 is"),
        ("map_type", "spline", "functional form `spline`"),
        ("source_geometry", None, "no `source_geometry`"),
    ],
)
def test_a_damaged_configuration_is_refused(mapper, tmp_path, field, value, sentence):
    mapper.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(PairMismatchError, match=sentence):
        KVMapper.from_pretrained(tmp_path)


def test_a_model_type_of_a_later_release_is_named(mapper, source_cache):
    mapper.config.source_config = {**mapper.config.source_config, "model_type": "llama17"}
    with pytest.raises(PairMismatchError, match="`llama17` model.*Upgrade transformers"):
        KVMapper(mapper.config).convert(source_cache)


def test_it_is_a_model_like_others(mapper):
    assert hf_kvtransfer.mapper.KVMapper.config_class is KVMapperConfig
    assert mapper.num_parameters() == sum(p.numel() for p in mapper.parameters()) > 0
    assert not mapper.training


def test_the_commit_of_a_checkpoint_from_the_hub_is_recorded(pair, tmp_path, monkeypatch):
    """By what the Hub's cache says of the branch or tag; nothing is claimed of a checkpoint from a folder."""
    commit = "fedcba9876543210fedcba9876543210fedcba98"
    repository = tmp_path / "models--org--llama"
    pair[0].save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "refs" / "v1").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    loaded = type(pair[0]).from_pretrained("org/llama", revision="v1", cache_dir=tmp_path)
    manifest = pair_manifest(loaded, pair[1], source_revision="v1")
    assert manifest["source_revision"] == commit
    assert manifest["target_revision"] is None


def test_saving_can_push_and_keeps_the_two_kinds_of_arguments_apart(mapper, tmp_path, monkeypatch):
    pushed = {}
    monkeypatch.setattr("hf_kvtransfer.publishing.push_folder", lambda folder, **given: pushed.update(given))
    mapper.save_pretrained(tmp_path / "small-to-large", push_to_hub=True, private=True, max_shard_size="20KB")
    assert pushed == {"repo_id": "small-to-large", "private": True, "token": None}
    assert (tmp_path / "small-to-large" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_configuration_that_contradicts_its_geometry_is_refused(mapper, source_cache, side):
    stored = getattr(mapper.config, f"{side}_config")
    setattr(mapper.config, f"{side}_config", {**stored, "head_dim": 64})
    with pytest.raises(PairMismatchError, match=f"`{side}_config` and `{side}_geometry`.*head_dim 16 against 64"):
        KVMapper(mapper.config).convert(source_cache)
