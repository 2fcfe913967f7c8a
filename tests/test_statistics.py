"""Streamed moments are those of all rows at once, and what is saved is what is loaded, or a typed error."""

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from hf_kvtransfer.calibration import CalibrationStatistics, FeatureLayout, Moments, moments, storage
from hf_kvtransfer.calibration.statistics import bytes_needed
from hf_kvtransfer.errors import CalibrationError, MapperFileError
from hf_kvtransfer.geometry import LayerGeometry, ModelGeometry


SOURCE_LAYERS = ((2, 8), (1, 16), (2, 8))
TARGET_LAYERS = ((2, 8), (2, 12))


def geometry(layers, theta=10_000.0):
    return ModelGeometry(
        model_type="llama",
        layers=tuple(LayerGeometry(heads, dim, "full_attention", None, True) for heads, dim in layers),
        hidden_size=32,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        text_config_name=None,
        checkpoint=None,
        revision=None,
        attention_heads=4,
    )


def rows(count, seed=0, offset=0.0):
    """Keys and values of a source and of a target that depends on it: `[count, 48]` twice, `[count, 40]` twice."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(48, 40, generator=torch.Generator().manual_seed(99))
    sources = [torch.randn(count, 48, generator=generator) for _ in range(2)]
    targets = [x @ mixing + torch.randn(count, 40, generator=generator) for x in sources]
    return [content + offset for content in (*sources, *targets)]


def empty(dtype=torch.float64, **changes):
    arguments = {
        "source": geometry(SOURCE_LAYERS),
        "target": geometry(TARGET_LAYERS),
        "tokenizer_fingerprint": "same",
        "calibration": {"dataset": "tiny", "sequences": 0, "token_stride": 4},
    }
    return CalibrationStatistics(**{**arguments, **changes}, dtype=dtype)


def filled(seed=0, count=60, **changes):
    statistics = empty(**changes)
    statistics.update("fit", *rows(count, seed))
    statistics.update("heldout", *rows(count // 3, seed + 1000))
    statistics.calibration["sequences"] = 8
    return statistics


def tensors_of(statistics):
    return {
        f"{split}.{kind}.{name}": tensor
        for split, kinds in statistics.splits.items()
        for kind, sums in kinds.items()
        for name, tensor in sums.tensors().items()
    }


def assert_close(a, b, rtol=1e-9):
    assert a.tokens == b.tokens
    for (name, mine), theirs in zip(tensors_of(a).items(), tensors_of(b).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol * float(theirs.abs().max() + 1), msg=name)


def by_definition(x, y):
    x, y = x.double(), y.double()
    x_centred, y_centred = x - x.mean(0), y - y.mean(0)
    return {
        "mean_x": x.mean(0),
        "mean_y": y.mean(0),
        "sxx": x_centred.T @ x_centred,
        "sxy": x_centred.T @ y_centred,
        "syy": y_centred.square().sum(0),
    }


class TestMoments:
    @pytest.mark.parametrize("batch", [1, 7, 64, 200])
    @pytest.mark.parametrize("offset", [0.0, 1e3])
    def test_streaming_in_any_batch_size_is_one_shot(self, batch, offset):
        x, _, y, _ = rows(200, offset=offset)
        sums = Moments(48, 40)
        for start in range(0, 200, batch):
            sums.update(x[start : start + batch], y[start : start + batch])
        assert sums.count == 200
        for name, expected in by_definition(x, y).items():
            torch.testing.assert_close(
                sums.tensors()[name], expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max())
            )

    def test_blocks_and_panels_dont_show(self, monkeypatch):
        x, y = torch.randn(100, 700), torch.randn(100, 30)
        monkeypatch.setattr(moments, "BLOCK_ROWS", 16)
        sums = Moments(700, 30)
        assert len(moments.panels(len(sums.sxx))) > 1
        sums.update(x, y)
        for name, expected in by_definition(x, y).items():
            torch.testing.assert_close(sums.tensors()[name], expected, rtol=1e-9, atol=1e-9)

    def test_reading_in_between_changes_nothing(self):
        x, y = torch.randn(100, 700), torch.randn(100, 30)
        read, unread = Moments(700, 30), Moments(700, 30)
        for start in range(0, 100, 25):
            for sums in (read, unread):
                sums.update(x[start : start + 25], y[start : start + 25])
            torch.testing.assert_close(read.sxx, read.sxx.T, rtol=0, atol=1e-12)
        torch.testing.assert_close(read.sxx, unread.sxx, rtol=0, atol=0)

    @pytest.mark.parametrize("offset", [0.0, 1e3])
    def test_float32_sums_are_float64_sums_rounded(self, offset):
        x, _, y, _ = rows(500, offset=offset)
        sums = Moments(48, 40, dtype=torch.float32)
        for start in range(0, 500, 50):
            sums.update(x[start : start + 50], y[start : start + 50])
        for name, expected in by_definition(x, y).items():
            scale = float(expected.abs().max())
            torch.testing.assert_close(sums.tensors()[name].double(), expected, rtol=0, atol=2e-6 * scale)

    def test_half_precision_content_is_summed_exactly(self):
        x, _, y, _ = (content.bfloat16() for content in rows(50))
        sums = Moments(48, 40)
        sums.update(x, y)
        torch.testing.assert_close(sums.sxy, by_definition(x, y)["sxy"], rtol=1e-9, atol=1e-9)

    def test_rows_that_dont_belong_together_are_refused(self):
        with pytest.raises(CalibrationError, match=r"expected \[tokens, 48\] and \[tokens, 40\]"):
            Moments(48, 40).update(torch.zeros(5, 48), torch.zeros(4, 40))
        with pytest.raises(CalibrationError, match="float16"):
            Moments(48, 40, dtype=torch.float16)

    def test_no_rows_change_nothing(self):
        sums = Moments(48, 40)
        sums.update(torch.zeros(0, 48), torch.zeros(0, 40))
        sums.merge(Moments(48, 40))
        assert sums.count == 0
        assert not any(tensor.any() for tensor in sums.tensors().values())


class TestMerge:
    def test_merged_parts_are_the_whole_in_any_order(self):
        whole = empty()
        for seed in range(3):
            whole.update("fit", *rows(60, seed))
            whole.update("heldout", *rows(20, seed + 1000))
        for order in ([0, 1, 2], [2, 0, 1]):
            merged = filled(order[0])
            for seed in order[1:]:
                merged.merge(filled(seed))
            assert_close(merged, whole)
            assert merged.calibration["sequences"] == 24

    def test_large_widths_merge_with_unread_gram_matrices(self):
        x, y = torch.randn(90, 700), torch.randn(90, 30)
        left, right = Moments(700, 30), Moments(700, 30)
        left.update(x[:40], y[:40])
        right.update(x[40:], y[40:])
        assert left.sxx is not None
        left.merge(right)
        torch.testing.assert_close(left.sxx, by_definition(x, y)["sxx"], rtol=1e-9, atol=1e-9)

    def test_merging_into_nothing_copies(self):
        merged = empty().merge(filled(5))
        assert_close(merged, filled(5))

    def test_the_other_is_left_alone(self):
        other = filled(1)
        filled(0).merge(other)
        assert_close(other, filled(1), rtol=0)

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"source": geometry(SOURCE_LAYERS, theta=5e5)}, "different source models.*rope_theta"),
            ({"target": geometry(((2, 8), (3, 8)))}, "different target models.*KV heads"),
            ({"tokenizer_fingerprint": "other"}, "different tokenizers"),
            ({"calibration": {"token_stride": 8}}, r"different token strides.*\(4 and 8\)"),
            ({"manifest": {"target_weights": {"layers.0": [1.0]}}}, "target models.*weights differ"),
        ],
    )
    def test_parts_of_different_calibrations_are_refused(self, changes, sentence):
        with pytest.raises(CalibrationError, match=sentence):
            filled().merge(empty(**changes))

    def test_what_differs_harmlessly_is_kept_of_both(self):
        one = filled(calibration={"dataset": "a", "token_stride": 4, "rows_sha256": "x"})
        two = filled(calibration={"dataset": "b", "token_stride": 4, "rows_sha256": "y"})
        assert one.merge(two).calibration["dataset"] == ["a", "b"]
        assert one.calibration["rows_sha256"] is None


class TestFiles:
    @pytest.mark.parametrize("mmap", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_round_trip_is_bit_equal(self, tmp_path, mmap, dtype):
        statistics = filled(dtype=dtype, manifest={"source_weights": {"layers.0": [0.25]}})
        statistics.save(tmp_path)
        loaded = CalibrationStatistics.load(tmp_path, mmap=mmap)
        for (name, mine), theirs in zip(tensors_of(statistics).items(), tensors_of(loaded).values(), strict=True):
            assert torch.equal(mine, theirs), name
            assert mine.dtype == theirs.dtype, name
        for name in ("source", "target", "tokenizer_fingerprint", "calibration", "manifest", "tokens", "dtype"):
            assert getattr(loaded, name) == getattr(statistics, name)

    @pytest.mark.parametrize("mmap", [True, False])
    def test_loaded_statistics_can_grow_without_touching_the_files(self, tmp_path, mmap):
        filled().save(tmp_path)
        loaded = CalibrationStatistics.load(tmp_path, mmap=mmap)
        loaded.update("fit", *rows(30, 7))
        expected = filled()
        expected.update("fit", *rows(30, 7))
        assert_close(loaded, expected, rtol=0)
        assert_close(CalibrationStatistics.load(tmp_path), filled(), rtol=0)
        loaded.save(tmp_path)
        assert_close(CalibrationStatistics.load(tmp_path), expected, rtol=0)

    def test_saving_again_leaves_only_the_new_files(self, tmp_path):
        filled().save(tmp_path)
        filled(3).save(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
        assert_close(CalibrationStatistics.load(tmp_path), filled(3), rtol=0)

    @pytest.mark.parametrize("survived", [0, 1])
    def test_a_save_that_dies_leaves_the_old_statistics(self, tmp_path, monkeypatch, survived):
        filled().save(tmp_path)
        done = []

        def replace(source, destination):
            if len(done) == survived:
                raise KeyboardInterrupt
            done.append(destination)
            os.rename(source, destination)

        monkeypatch.setattr(storage.os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            filled(3).save(tmp_path)
        monkeypatch.undo()
        assert_close(CalibrationStatistics.load(tmp_path), filled(), rtol=0)
        filled(3).save(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2

    def test_a_full_disk_leaves_the_old_statistics(self, tmp_path, monkeypatch):
        filled().save(tmp_path)

        def write(tensors, path):
            path.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(storage, "_write", write)
        with pytest.raises(OSError, match="No space"):
            filled(3).save(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
        assert_close(CalibrationStatistics.load(tmp_path), filled(), rtol=0)

    def test_truncated_data_is_refused(self, tmp_path):
        filled().save(tmp_path)
        (data,) = tmp_path.glob("*.safetensors")
        data.write_bytes(data.read_bytes()[:-100])
        with pytest.raises(MapperFileError, match="cut short"):
            CalibrationStatistics.load(tmp_path)

    @pytest.mark.parametrize("where", [0.0, 0.01, 0.3, 0.999])
    @pytest.mark.parametrize("pattern", ["*.safetensors", "statistics.json"])
    def test_a_flipped_bit_is_noticed(self, tmp_path, pattern, where):
        filled().save(tmp_path)
        (path,) = tmp_path.glob(pattern)
        content = bytearray(path.read_bytes())
        content[int(where * len(content))] ^= 1
        path.write_bytes(content)
        with pytest.raises(MapperFileError, match=r"checksum|can't be read"):
            CalibrationStatistics.load(tmp_path)

    @pytest.mark.parametrize("pattern", ["*.safetensors", "statistics.json"])
    def test_a_missing_file_is_named(self, tmp_path, pattern):
        filled().save(tmp_path)
        (path,) = tmp_path.glob(pattern)
        path.unlink()
        with pytest.raises(MapperFileError, match=path.name):
            CalibrationStatistics.load(tmp_path)

    def test_a_truncated_description_is_refused(self, tmp_path):
        filled().save(tmp_path)
        path = tmp_path / "statistics.json"
        path.write_bytes(path.read_bytes()[:-50])
        with pytest.raises(MapperFileError, match="can't be read"):
            CalibrationStatistics.load(tmp_path)

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            (lambda body: body["target"]["layers"].pop(), r"expected torch.float64 \[16\] from the geometry"),
            (lambda body: body.update(dtype="float32"), "expected torch.float32"),
            (lambda body: body.update(format=1), "format 1"),
            (lambda body: body.pop("counts"), "doesn't describe"),
        ],
    )
    def test_a_description_of_something_else_is_refused(self, tmp_path, change, sentence):
        filled().save(tmp_path)
        path = tmp_path / "statistics.json"
        body = json.loads(path.read_text())
        del body["sha256"]
        change(body)
        path.write_text(
            json.dumps({**body, "sha256": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()})
        )
        with pytest.raises(MapperFileError, match=sentence):
            CalibrationStatistics.load(tmp_path)

    def test_sums_that_arent_finite_are_refused(self, tmp_path):
        statistics = filled()
        statistics.splits["fit"]["values"].sxy[3, 5] = float("nan")
        statistics.save(tmp_path)
        with pytest.raises(MapperFileError, match=r"fit.values.sxy isn't finite"):
            CalibrationStatistics.load(tmp_path)

    def test_a_folder_without_statistics_is_refused(self, tmp_path):
        with pytest.raises(MapperFileError, match="no calibration statistics"):
            CalibrationStatistics.load(tmp_path / "nowhere")


def test_an_unknown_or_empty_split_is_refused():
    with pytest.raises(CalibrationError, match="no split 'test'"):
        empty().update("test", *rows(3))
    with pytest.raises(CalibrationError, match="'heldout' split of these statistics holds no tokens"):
        empty().moments("heldout", "keys")


class TestDisk:
    def test_sums_on_the_disk_are_those_in_memory_and_leave_nothing_behind(self, tmp_path):
        mapped, expected = filled(attention_rows=True, disk=tmp_path / "new"), filled(attention_rows=True)
        assert_close(mapped, expected, rtol=0)
        assert list((tmp_path / "new").iterdir()) == []
        mapped.merge(filled(1, attention_rows=True, disk=tmp_path))
        assert_close(mapped, expected.merge(filled(1, attention_rows=True)), rtol=0)
        mapped.save(tmp_path)
        assert_close(CalibrationStatistics.load(tmp_path), expected, rtol=0)

    def test_a_full_disk_is_refused_before_anything_is_summed(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CalibrationError, match="has no room for sums of 15,360 bytes .No space left on device"):
            empty(disk=tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_what_is_needed_is_what_is_held(self):
        for layout in (FeatureLayout(), FeatureLayout(joint=True, window=1)):
            for dtype in (torch.float32, torch.float64):
                sums = empty(dtype, layout=layout, attention_rows=True)
                held = [each for each in tensors_of(sums).items() if each[0].rsplit(".")[-1] in ("sxx", "sxy")]
                weighted = [m.tensors()[name] for m in sums.weighted.values() for name in ("gram", "cross")]
                needed = bytes_needed(sums.source, sums.target, layout, dtype, attention_rows=True)
                assert needed == sum(t.numel() * t.element_size() for t in [*dict(held).values(), *weighted])

    def test_a_written_file_is_what_safetensors_reads_and_writes(self, tmp_path):
        tensors = {"a": torch.randn(3, 5), "b": torch.randn(7, dtype=torch.float64), "c": torch.arange(4)}
        digest = storage._write(tensors, tmp_path / "mine")
        assert digest == hashlib.sha256((tmp_path / "mine").read_bytes()).hexdigest()
        found = load_file(tmp_path / "mine")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
