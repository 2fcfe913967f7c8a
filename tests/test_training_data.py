"""What runs read: rows of tokens, features on disk, scales, hand-over points, other forms; and the command."""

import copy
import json
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from hf_kvtransfer import KVMapper
from hf_kvtransfer.errors import CalibrationError, MapperFileError, PairMismatchError
from hf_kvtransfer.training import (
    CachedFeatures,
    KVTransferModule,
    LossWeights,
    TokenRows,
    capture_batch,
    estimate_scales,
    with_form,
)
from hf_kvtransfer.training.command import train_from_arguments
from hf_kvtransfer.training.handover import draw_handover, middle_handover

from .conftest import FAMILY


CALIBRATION = FAMILY / "data" / "calibration.jsonl"
SUPPORT = [[0, 1], [0, 1], [1, 2], [1, 2], [2, 3], [2, 3]]


def texts(count=40):
    with open(CALIBRATION, encoding="utf-8") as file:
        return [json.loads(line)["text"] for line, _ in zip(file, range(count), strict=False)]


@pytest.fixture(scope="module")
def pair(family_model):
    return tuple(copy.deepcopy(family_model(name)) for name in ("small", "large"))


@pytest.fixture(scope="module")
def rows(family_tokenizer):
    return TokenRows(texts(), family_tokenizer, sequence_length=24, num_sequences=5)


@pytest.fixture
def captured(tmp_path, pair, rows, family_tokenizer):
    return CachedFeatures.capture(
        tmp_path / "captured", *pair, family_tokenizer, rows, queries=4, anchors=(0, 2), batch_size=2
    )


@pytest.fixture
def mapper(pair, family_tokenizer):
    """With random maps."""
    mapper = KVMapper.for_pair(*pair, tokenizer=family_tokenizer, support=SUPPORT)
    for parameter in mapper.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return mapper


class TestTokenRows:
    def test_are_the_packed_text(self, rows, family_tokenizer):
        assert len(rows) == 5
        longer = TokenRows(texts(), family_tokenizer, sequence_length=24, num_sequences=3, skip=2)
        assert torch.equal(longer.rows, rows.rows[2:])
        assert torch.equal(rows[1]["input_ids"], rows.rows[1])

    def test_a_digest_tells_them_apart(self, rows, family_tokenizer):
        same = TokenRows(texts(), family_tokenizer, sequence_length=24, num_sequences=5)
        other = TokenRows(texts()[1:], family_tokenizer, sequence_length=24, num_sequences=5)
        assert rows.digest == same.digest != other.digest

    def test_too_little_text(self, family_tokenizer):
        with (
            pytest.warns(UserWarning, match="was enough for"),
            pytest.raises(CalibrationError, match="no rows are left"),
        ):
            TokenRows(texts(1), family_tokenizer, sequence_length=16, num_sequences=10, skip=1000)


class TestCachedFeatures:
    def test_are_what_the_models_make_of_the_rows(self, captured, pair, rows):
        batch, attention = capture_batch(*pair, rows.rows[4:], queries=4, anchor_layers=0)
        assert len(captured) == 5
        row = captured[4]
        assert torch.equal(row.pop("input_ids"), rows.rows[4])
        assert row.keys() == batch.keys()
        for name, tensor in row.items():
            torch.testing.assert_close(tensor, batch[name][0], rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(captured.attention, attention, strict=True):
            assert mine.scaling == theirs.scaling
            assert torch.equal(mine.positions, theirs.positions)

    def test_are_captured_once(self, captured, pair, rows, family_tokenizer):
        broken = [copy.deepcopy(model) for model in pair]
        for model in broken:
            model.get_decoder().forward = None
        again = CachedFeatures.capture(
            captured.folder, *broken, family_tokenizer, rows, queries=4, anchors=(0, 2), batch_size=1
        )
        assert torch.equal(again[0]["source_keys"], captured[0]["source_keys"])

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"queries": 5}, "queries"),
            ({"anchors": (1,)}, "expected 1 among them"),
            ({"dtype": torch.bfloat16}, "dtype"),
        ],
    )
    def test_others_are_not_taken_for_them(self, captured, pair, rows, family_tokenizer, changes, named):
        settings = {"queries": 4, "anchors": (0, 2), **changes}
        with pytest.raises(CalibrationError, match=named):
            CachedFeatures.capture(captured.folder, *pair, family_tokenizer, rows, **settings)

    def test_another_text_or_pair_is_not_taken_for_it(self, captured, pair, rows, family_tokenizer):
        settings = {"queries": 4, "anchors": (0, 2)}
        other = TokenRows(texts()[1:], family_tokenizer, sequence_length=24, num_sequences=5)
        with pytest.raises(CalibrationError, match="differ in rows_sha256"):
            CachedFeatures.capture(captured.folder, *pair, family_tokenizer, other, **settings)
        with pytest.raises(CalibrationError, match="differ in source, "):
            CachedFeatures.capture(captured.folder, *reversed(pair), family_tokenizer, rows, **settings)

    def test_a_folder_in_use_is_left_alone(self, pair, rows, family_tokenizer, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(CalibrationError, match="holds other files than captured features"):
            CachedFeatures.capture(tmp_path, *pair, family_tokenizer, rows)
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_half_precision_takes_half_the_room(self, pair, rows, family_tokenizer, tmp_path):
        half = CachedFeatures.capture(tmp_path / "half", *pair, family_tokenizer, rows, dtype=torch.bfloat16)
        assert half[0]["target_values"].dtype == torch.bfloat16
        assert half[0]["input_ids"].dtype == torch.int64

    def test_an_interrupted_capture_leaves_nothing(self, pair, rows, family_tokenizer, tmp_path, monkeypatch):
        calls = []

        def fail(*args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return capture_batch(*args, **kwargs)

        monkeypatch.setattr("hf_kvtransfer.training.cached.capture_batch", fail)
        with pytest.raises(KeyboardInterrupt):
            CachedFeatures.capture(tmp_path / "captured", *pair, family_tokenizer, rows, batch_size=2)
        assert list(tmp_path.iterdir()) == []

    def test_travel_to_the_workers_of_a_loader(self, captured):
        captured[0]
        copied = pickle.loads(pickle.dumps(captured))
        loaded = next(iter(DataLoader(copied, batch_size=5)))
        assert torch.equal(loaded["target_keys"][3], captured[3]["target_keys"])

    def test_damage_is_found(self, captured):
        captured.verify()
        file = captured.folder / "features-00001.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
        with pytest.raises(MapperFileError, match="other bytes than were written"):
            captured.verify()
        file.write_bytes(bytes(content[:-4]))
        with pytest.raises(MapperFileError, match="not as long as it was written"):
            CachedFeatures(captured.folder)
        content[:8] = b"\xff" * 8
        file.write_bytes(bytes(content))
        with pytest.raises(MapperFileError, match="expected captured features"):
            CachedFeatures(captured.folder)[2]
        (captured.folder / "attention.safetensors").unlink()
        with pytest.raises(MapperFileError, match="How the target attends"):
            CachedFeatures(captured.folder)
        (captured.folder / "features.json").write_text("{}")
        with pytest.raises(MapperFileError, match="No captured features can be read"):
            CachedFeatures(captured.folder)

    def test_belong_to_a_pair(self, captured, mapper, pair, family_tokenizer):
        captured.check(mapper)
        with pytest.raises(PairMismatchError, match="source model: "):
            captured.check(KVMapper.for_pair(*reversed(pair), tokenizer=family_tokenizer))
        mapper.config.source_weights = {
            name: row if name == "adapters" else [value + 1 for value in row]
            for name, row in mapper.config.source_weights.items()
        }
        mapper.config.tokenizer_fingerprint = "another"
        with pytest.raises(PairMismatchError, match="other weights.*another tokenizer"):
            captured.check(mapper)


class TestScales:
    def test_content_error_is_one_minus_r2(self, mapper, captured):
        """Of a mapper that always gives the mean, it is one."""
        module = KVTransferModule(mapper)
        batch = next(iter(DataLoader(captured, batch_size=5)))
        estimate_scales(module, [batch])
        with torch.no_grad():
            for parameter in mapper.parameters():
                parameter.zero_()
            widths = [layer.width for layer in mapper.config.geometry("target").layers]
            codec, tables = mapper.codec("target"), None
            for index, (keys, values) in enumerate(
                zip(batch["target_keys"].split(widths, -1), batch["target_values"].split(widths, -1), strict=True)
            ):
                heads = keys.unflatten(-1, (-1, 32)).transpose(1, 2)
                tables = tables or codec.tables(torch.arange(24)[None])
                content = codec.remove(heads, tables, index).transpose(1, 2).flatten(2)
                mapper.layers[index].keys.bias.copy_(content.mean((0, 1)))
                mapper.layers[index].values.bias.copy_(values.mean((0, 1)))
            assert float(module(**batch).loss) == pytest.approx(1.0, abs=1e-4)

    @pytest.mark.parametrize("form", ["mlp", "residual"])
    def test_forms_are_told_once_what_they_read_and_write(self, mapper, captured, form):
        module = KVTransferModule(with_form(mapper, form, hidden=4))
        estimate_scales(module, [captured[0], captured[1]])
        told = {name: tensor.clone() for name, tensor in module.mapper.state_dict().items()}
        names = [name for name in told if name.endswith("scale")]
        assert names
        assert all((told[name] > 0).all() and not (told[name] == 1).all() for name in names)
        estimate_scales(module, [captured[2]])
        assert all(torch.equal(tensor, told[name]) for name, tensor in module.mapper.state_dict().items())


class TestHandOver:
    def test_is_random_and_within_the_row(self):
        drawn = [draw_handover(20, 6, 5, torch.Generator().manual_seed(seed)) for seed in range(300)]
        assert {each.context for each in drawn} == set(range(6, 20))
        assert {each.continuation for each in drawn} == set(range(1, 6))
        assert max(sum(each) for each in drawn) == 20
        assert drawn[7] == draw_handover(20, 6, 5, torch.Generator().manual_seed(7))
        assert middle_handover(20, 6, 5) == (10, 5)
        assert middle_handover(20, 18, 5) == (18, 2)

    def test_leaves_tokens_to_map(self, mapper):
        mapper.config.exact_prefix, mapper.config.exact_suffix = 8, 8
        module = KVTransferModule(mapper, LossWeights(kl=1.0), shortest_context=4).train()
        assert min(module.handover(20).context for _ in range(100)) == 17

    def test_rows_too_short_for_one(self):
        with pytest.raises(CalibrationError, match="expected longer rows"):
            draw_handover(16, 16, 4)


class TestForms:
    def test_a_residual_converts_as_its_linear_mapper(self, mapper, pair, rows):
        cache = pair[0](rows.rows)
        expected, given = (each.convert(cache) for each in (mapper, with_form(mapper, "residual", hidden=4)))
        for one, other in zip(expected.layers, given.layers, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)

    def test_survives_a_save(self, mapper, tmp_path):
        made = with_form(mapper, "mlp", hidden=4)
        made.save_pretrained(tmp_path)
        again = KVMapper.from_pretrained(tmp_path)
        assert again.config.map_options == {"hidden": 4}
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in made.state_dict().items())

    def test_only_a_linear_mapper_changes_its_form(self, mapper):
        with pytest.raises(CalibrationError, match="can't be given the form `cubic`"):
            with_form(mapper, "cubic")
        for options in ({"hidden": 0}, {"hidden": 2.5}, {"depth": 3}, {"groups": 1}):
            with pytest.raises(CalibrationError, match="expected whole numbers of at least 1, for `hidden`"):
                with_form(mapper, "mlp", **options)
        with pytest.raises(CalibrationError, match="for no option at all"):
            with_form(mapper, "linear", hidden=4)
        with pytest.raises(CalibrationError, match="expected a linear mapper"):
            with_form(with_form(mapper, "mlp", hidden=4), "residual")


class TestCommand:
    def arguments(self, mapper, tmp_path, *more):
        mapper.save_pretrained(tmp_path / "fitted")
        named = {
            "mapper": tmp_path / "fitted",
            "source": FAMILY / "small",
            "target": FAMILY / "large",
            "text": CALIBRATION,
            "output_dir": tmp_path / "trained",
            "sequence_length": 24,
            "train_sequences": 4,
            "eval_sequences": 2,
            "max_steps": 2,
            "save_steps": 1,
            "report_to": "none",
            "lr_scheduler_type": "cosine",
            "kl_weight": 0.5,
            "attention_weight": 0.5,
            "queries": 4,
            "shortest_context": 4,
        }
        return [part for name, value in named.items() for part in (f"--{name}", str(value))] + [
            "--use_cpu", "--disable_tqdm", "true", *more
        ]  # fmt: skip

    def test_trains_evaluates_and_saves(self, mapper, tmp_path, capsys):
        argv = self.arguments(
            mapper, tmp_path, "--form", "residual", "--hidden", "4", "--features", str(tmp_path / "features")
        )
        trainer = train_from_arguments(argv)
        trained = KVMapper.from_pretrained(tmp_path / "trained")
        assert trained.config.map_type == "residual"
        assert isinstance(trainer.train_dataset, CachedFeatures)
        assert len(trainer.train_dataset) == 4
        results = json.loads((tmp_path / "trained" / "all_results.json").read_text())
        assert {"train_loss", "eval_content", "eval_attention", "eval_kl", "eval_agreement"} <= results.keys()

        checkpoint = str(tmp_path / "trained" / "checkpoint-1")
        train_from_arguments([*argv, "--resume_from_checkpoint", checkpoint])
        again = KVMapper.from_pretrained(tmp_path / "trained")
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in trained.state_dict().items())

    def test_knows_every_argument_of_trainer(self, capsys):
        with pytest.raises(SystemExit) as stopped:
            train_from_arguments(["--help"])
        assert stopped.value.code == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in ("--mapper", "--kl_weight", "--learning_rate", "--gradient_accumulation"))

    def test_impossible_numbers_of_rows(self, mapper, tmp_path):
        with pytest.raises(CalibrationError, match="`train_sequences` is 0"):
            train_from_arguments(self.arguments(mapper, tmp_path, "--train_sequences", "0"))
