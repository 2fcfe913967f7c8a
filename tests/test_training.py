"""Training: what the two trainers, accumulated batches, interrupted runs and several losses have in common."""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_kvtransfer import KVMapper
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.errors import CalibrationError, KVTransferError, MapperFileError, PairMismatchError
from hf_kvtransfer.evaluation import prefill
from hf_kvtransfer.features import Support
from hf_kvtransfer.training import (
    CachedFeatures,
    KVMapperTrainer,
    KVTrainingArguments,
    KVTransferModule,
    LossWeights,
    TokenRows,
    capture_batch,
    estimate_scales,
    with_form,
)
from hf_kvtransfer.training.batches import anchor_output_of, source_cache
from hf_kvtransfer.training.resuming import load_weights

from .conftest import FAMILY


SUPPORT = [[0, 1], [0, 1], [1, 2], [1, 2], [2, 3], [2, 3]]
ALL = {"content_weight": 1.0, "attention_weight": 0.5, "kl_weight": 0.25}


def texts():
    with open(FAMILY / "data" / "calibration.jsonl", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line, _ in zip(file, range(60), strict=False)]


@pytest.fixture(scope="module")
def pair(family_model):
    """Copies, since the trainer freezes its models."""
    return tuple(copy.deepcopy(family_model(name)) for name in ("small", "large"))


@pytest.fixture(scope="module")
def rows(family_tokenizer):
    return TokenRows(texts(), family_tokenizer, sequence_length=32, num_sequences=8)


@pytest.fixture(scope="module")
def solved(pair, family_tokenizer):
    return KVMapper.fit(
        *pair, texts(), tokenizer=family_tokenizer, preset="heo2026", k=2, sequence_length=64, num_sequences=24
    )


@pytest.fixture
def fitted(solved):
    """A mapper in closed form, to be trained."""
    return copy.deepcopy(solved)


@pytest.fixture(scope="module")
def features(tmp_path_factory, pair, rows, family_tokenizer):
    folder = tmp_path_factory.mktemp("features") / "captured"
    return CachedFeatures.capture(folder, *pair, family_tokenizer, rows, queries=6, anchors=(1,), batch_size=3)


@pytest.fixture
def plain_features(features):
    """Read as by a mapper without an anchor."""
    return CachedFeatures(features.folder)


def residual(fitted):
    torch.manual_seed(1)
    return with_form(fitted, "residual", hidden=8)


def arguments(folder, kind=KVTrainingArguments, **changes):
    settings = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    if kind is KVTrainingArguments:
        settings |= {"queries": 6, "shortest_context": 4, "longest_continuation": 8}
    return kind(str(folder), **{**settings, **changes})


def train(fitted, args, pair=(None, None), mapper=None, resume=None, callbacks=(), **datasets):
    mapper = residual(fitted) if mapper is None else mapper
    trainer = KVMapperTrainer(mapper, args, source=pair[0], target=pair[1], callbacks=list(callbacks), **datasets)
    trainer.train(resume_from_checkpoint=resume)
    return mapper, trainer


def assert_same(one, other, tolerance=0.0):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            tensor, other[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_changed(one, other):
    other = other.state_dict()
    assert any(not torch.equal(tensor, other[name]) for name, tensor in one.state_dict().items())


class TestTrainerLaws:
    def test_plain_trainer_and_mapper_trainer_make_the_same_mapper(self, fitted, plain_features, tmp_path):
        weights = {"content_weight": 1.0, "attention_weight": 0.5}
        ours, trainer = train(fitted, arguments(tmp_path, **weights), train_dataset=plain_features)

        theirs = residual(fitted)
        module = KVTransferModule(theirs, LossWeights(1.0, 0.5), attention=plain_features.attention)
        estimate_scales(module, (plain_features[i] for i in range(len(plain_features))))
        plain = Trainer(module, arguments(tmp_path, TrainingArguments), train_dataset=plain_features)
        plain.train()
        assert_changed(ours, residual(fitted))
        assert_same(ours, theirs)
        losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (trainer, plain)]
        assert losses[0] == losses[1]

    @pytest.mark.parametrize(
        "weights", [{"content_weight": 1.0, "attention_weight": 0.5}, ALL], ids=["features", "all"]
    )
    def test_captured_features_train_as_the_models_themselves_do(
        self, fitted, pair, rows, plain_features, tmp_path, weights
    ):
        cached, _ = train(fitted, arguments(tmp_path, **weights), pair, train_dataset=plain_features)
        running, _ = train(fitted, arguments(tmp_path, **weights), pair, train_dataset=rows)
        assert_same(cached, running, 1e-5)

    def test_accumulated_batches_are_one_large_batch(self, fitted, pair, rows, tmp_path):
        batches = []
        for size in (8, 2):
            sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
            args = arguments(tmp_path, optim="sgd", learning_rate=1.0, max_steps=3, **sizes, **ALL)
            batches.append(train(fitted, args, pair, train_dataset=rows)[0])
        assert_changed(batches[0], residual(fitted))
        assert_same(*batches, 1e-5)

    def test_a_run_killed_and_resumed_is_an_uninterrupted_one(self, fitted, pair, rows, tmp_path):
        class Kill(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 3:
                    raise KeyboardInterrupt

        settings = {
            "save_strategy": "steps",
            "save_steps": 2,
            "lr_scheduler_type": "cosine",
            "max_grad_norm": 0.5,
            **ALL,
        }
        whole, _ = train(fitted, arguments(tmp_path / "whole", **settings), pair, train_dataset=rows)
        with pytest.raises(KeyboardInterrupt):
            train(fitted, arguments(tmp_path / "killed", **settings), pair, train_dataset=rows, callbacks=[Kill()])
        torch.manual_seed(99)
        resumed, trainer = train(
            fitted, arguments(tmp_path / "killed", **settings), pair, resume=True, train_dataset=rows
        )
        assert trainer.state.global_step == 4
        assert_same(whole, resumed)

    def test_a_checkpoint_holds_the_mapper_and_nothing_else(self, fitted, pair, rows, tmp_path):
        args = arguments(tmp_path, save_strategy="steps", save_steps=4, **ALL)
        mapper, trainer = train(fitted, args, pair, train_dataset=rows)
        trainer.save_model(str(tmp_path / "final"))
        for folder in (tmp_path / "checkpoint-4", tmp_path / "final"):
            with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
                assert set(file.keys()) == set(mapper.state_dict())
            saved = KVMapper.from_pretrained(folder)
            assert_same(saved, mapper)
            assert saved.config.calibration["training"]["steps"] == 4
            assert saved.config.calibration["sequences"] == fitted.config.calibration["sequences"]

    def test_the_best_checkpoint_comes_back(self, fitted, pair, plain_features, tmp_path):
        args = arguments(
            tmp_path,
            learning_rate=10.0,  # makes it worse at every step
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            max_steps=3,
            load_best_model_at_end=True,
            metric_for_best_model="eval_content",
            greater_is_better=False,
        )
        mapper, trainer = train(fitted, args, train_dataset=plain_features, eval_dataset=plain_features)
        assert_same(KVMapper.from_pretrained(trainer.state.best_model_checkpoint), mapper)

    def test_mixed_precision_keeps_the_weights_in_full(self, fitted, pair, rows, tmp_path):
        mapper, _ = train(fitted, arguments(tmp_path, bf16=True, **ALL), pair, train_dataset=rows)
        whole, _ = train(fitted, arguments(tmp_path, **ALL), pair, train_dataset=rows)
        assert {parameter.dtype for parameter in mapper.parameters()} == {torch.float32}
        assert_changed(mapper, whole)
        assert_same(mapper, whole, 1e-2)
        assert all(torch.isfinite(parameter).all() for parameter in mapper.parameters())

    def test_features_stored_in_half_precision(self, fitted, pair, rows, family_tokenizer, tmp_path):
        half = CachedFeatures.capture(tmp_path / "half", *pair, family_tokenizer, rows, queries=6, dtype=torch.bfloat16)
        mapper, _ = train(fitted, arguments(tmp_path / "run", **ALL), pair, train_dataset=half)
        whole, _ = train(fitted, arguments(tmp_path / "run", **ALL), pair, train_dataset=rows)
        assert_changed(mapper, residual(fitted))
        assert_same(mapper, whole, 1e-2)

    def test_losses_are_logged_and_evaluated_by_name(self, fitted, pair, rows, tmp_path):
        args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, **ALL)
        _, trainer = train(fitted, args, pair, train_dataset=rows, eval_dataset=rows)
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        names = ("content", "attention", "kl")
        assert len(logged) == 2
        for entry in logged:
            total = sum(ALL[f"{name}_weight"] * entry[name] for name in names)
            assert entry["loss"] == pytest.approx(total, abs=1e-3)
        measured = trainer.evaluate()
        total = sum(ALL[f"{name}_weight"] * measured[f"eval_{name}"] for name in names)
        assert measured["eval_loss"] == pytest.approx(total, rel=1e-4)
        assert 0 <= measured["eval_agreement"] <= 1

    def test_metrics_of_ones_own(self, fitted, plain_features, tmp_path):
        trainer = KVMapperTrainer(
            residual(fitted),
            arguments(tmp_path),
            train_dataset=plain_features,
            eval_dataset=plain_features,
            compute_metrics=lambda prediction: {"worst": float(prediction.predictions.max())},
        )
        measured = trainer.evaluate()
        assert measured["eval_worst"] >= measured["eval_loss"]

    def test_frozen_models_are_left_as_they_are(self, fitted, pair, rows, tmp_path):
        before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in pair]
        _, trainer = train(fitted, arguments(tmp_path, **ALL), pair, train_dataset=rows)
        for model, state in zip(pair, before, strict=True):
            assert not model.training
            assert not any(parameter.requires_grad for parameter in model.parameters())
            assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert {name.split(".")[0] for name, _ in trainer.model.named_parameters()} == {"mapper"}


class TestOverfit:
    """200 steps on one batch bring each loss near zero."""

    @pytest.mark.parametrize(
        ("form", "weights", "name", "below"),
        [
            ("residual", LossWeights(1, 0, 0), "content", 0.01),
            ("residual", LossWeights(0, 1, 0), "attention", 0.01),
            ("residual", LossWeights(0, 0, 1), "kl", 0.03),
            ("mlp", LossWeights(1, 0, 0), "content", 0.01),
        ],
        ids=["content", "attention", "kl", "mlp"],
    )
    def test_overfit(self, fitted, pair, rows, form, weights, name, below):
        batch, attention = capture_batch(*pair, rows.rows[:1, :20], queries=6)
        batch |= {"input_ids": rows.rows[:1, :20], "target": pair[1].requires_grad_(False)}
        torch.manual_seed(0)
        module = KVTransferModule(
            with_form(fitted, form, hidden=64),
            weights,
            attention=attention,
            shortest_context=12,
            longest_continuation=4,
        )
        estimate_scales(module, [batch])
        optimizer = torch.optim.AdamW(module.parameters(), lr=6e-3, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        before = float(module.eval()(**batch)[name].mean())
        module.train()
        for _ in range(200):
            optimizer.zero_grad()
            module(**batch).loss.backward()
            optimizer.step()
            schedule.step()
        assert float(module.eval()(**batch)[name].mean()) < below < 0.1 * before


class TestAnchored:
    def anchored(self, pair, family_tokenizer, start=0):
        """The target runs one of its own layers, and the maps of later ones read its output."""
        plain, anchored = Support((0, 1)), Support((2, 3), anchor=True)
        native = range(start, start + 2)
        support = [None if i in native else plain if i < start else anchored for i in range(6)]
        entry = Support((1, 2)).to_dict() if start else None
        mapper = KVMapper.for_pair(
            *pair, tokenizer=family_tokenizer, support=support, anchor_layers=1, anchor_start=start, entry=entry
        )
        if start:
            torch.nn.init.normal_(mapper.entry.weight, std=0.02)
        return mapper

    @pytest.mark.parametrize(("start", "exact_prefix"), [(0, 0), (0, 3), (2, 0), (2, 3)])
    def test_the_loss_is_that_of_what_is_converted(self, pair, rows, family_tokenizer, start, exact_prefix):
        """The anchor of a batch runs as it does in use: from the prediction, on top of the tokens read in full."""
        source, target = pair
        mapper = self.anchored(pair, family_tokenizer, start)
        mapper.config.exact_prefix = exact_prefix
        for layer in mapper.layers:
            for name, parameter in layer.named_parameters():
                torch.nn.init.normal_(parameter, std=0.01 if name.endswith("weight") else 0.1)
        ids = torch.stack([rows[index]["input_ids"] for index in range(2)])
        batch, _ = capture_batch(source, target, ids)
        batch["hidden"] = anchor_output_of(mapper, target, ids, source_cache(batch, mapper.config.geometry("source")))
        found = KVTransferModule(mapper)(**batch).content
        converted = mapper.convert(prefill(source, ids), target=target, input_ids=ids, hold_back=0)
        codec, own = mapper.codec("target"), prefill(target, ids)
        tables = codec.tables(torch.arange(ids.shape[1])[None])
        errors = [
            (one - other).square().mean((1, 2, 3))
            for index, (made, native) in enumerate(zip(converted.layers, own.layers, strict=True))
            if mapper.config.support[index] is not None
            for one, other in (
                [codec.remove(layer.keys, tables, index) for layer in (made, native)],
                [layer.values for layer in (made, native)],
            )
        ]
        torch.testing.assert_close(found, torch.stack(errors).mean(0), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("start", [0, 2])
    def test_trains_with_its_own_target(self, pair, rows, features, plain_features, family_tokenizer, tmp_path, start):
        args = arguments(tmp_path, learning_rate=1e-2, max_steps=6, save_strategy="steps", save_steps=6, **ALL)
        running, _ = train(None, args, pair, mapper=self.anchored(pair, family_tokenizer, start), train_dataset=rows)
        trained = [name for name, parameter in running.named_parameters() if parameter.requires_grad]
        assert all(running.get_parameter(name).any() for name in trained)
        assert len(trained) == 4 * 4  # weights and biases of keys and values of four layers
        dataset = plain_features if start else features
        torch.manual_seed(0)
        cached = self.anchored(pair, family_tokenizer, start)
        if start:
            cached.entry.load_state_dict(running.entry.state_dict())
        train(None, args, (None, pair[1]), mapper=cached, train_dataset=dataset)
        assert_same(running, cached, 1e-3)
        assert_same(KVMapper.from_pretrained(tmp_path / "checkpoint-6"), cached)

    def test_needs_its_anchor(self, pair, features, plain_features, family_tokenizer, tmp_path):
        mapper = self.anchored(pair, family_tokenizer)
        batch = {name: value[None] for name, value in plain_features[0].items()}
        with pytest.raises(CalibrationError, match="The batch lacks hidden"):
            KVTransferModule(mapper)(**batch)
        with pytest.raises(CalibrationError, match="anchors that weren't captured need the target"):
            KVMapperTrainer(mapper, arguments(tmp_path), train_dataset=plain_features)
        KVMapperTrainer(mapper, arguments(tmp_path), train_dataset=features)
        with pytest.raises(PairMismatchError, match="an anchor of 1 layers, which is not the mapper's"):
            features.check(self.anchored(pair, family_tokenizer, start=2))
        with pytest.raises(CalibrationError, match="expected 2 among them"):
            CachedFeatures(features.folder, anchor_layers=2)


class TestRefusals:
    @pytest.mark.parametrize("name", ["queries", "shortest_context", "longest_continuation", "scale_rows"])
    @pytest.mark.parametrize("value", [0, -1, 2.5])
    def test_impossible_numbers(self, name, value, tmp_path):
        with pytest.raises(CalibrationError, match=f"{name} is {value}, expected a whole number, at least 1"):
            arguments(tmp_path, **{name: value})

    def test_weights_that_are_no_numbers(self, tmp_path):
        with pytest.raises(CalibrationError, match="expected weights of zero or more"):
            arguments(tmp_path, kl_weight="x")

    def test_arguments_without_losses(self, fitted, pair, tmp_path):
        plain = arguments(tmp_path, kind=TrainingArguments)
        with pytest.raises(CalibrationError, match="which say what the losses are made"):
            KVMapperTrainer(fitted, plain, source=pair[0], target=pair[1])

    def test_rows_of_different_lengths(self, fitted, pair, tmp_path):
        rows = [{"input_ids": torch.arange(3, 3 + length)} for length in (20, 24)]
        trainer = KVMapperTrainer(fitted, arguments(tmp_path), source=pair[0], target=pair[1], train_dataset=rows)
        with pytest.raises(CalibrationError, match=r"The rows of one batch have \[20, 24\] tokens"):
            trainer.train()

    def test_features_of_whole_numbers(self, pair, rows, family_tokenizer, tmp_path):
        with pytest.raises(CalibrationError, match="expected a floating-point one"):
            CachedFeatures.capture(tmp_path / "f", *pair, family_tokenizer, rows, dtype=torch.int8)

    def test_losses_that_weigh_nothing(self, tmp_path):
        with pytest.raises(CalibrationError, match="at least one above zero"):
            arguments(tmp_path, content_weight=0.0)
        with pytest.raises(CalibrationError, match="weights of zero or more"):
            arguments(tmp_path, kl_weight=-1.0)

    def test_gradient_checkpointing(self, tmp_path):
        names = {field.name for field in dataclasses.fields(KVTrainingArguments)}
        name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
        with pytest.raises(KVTransferError, match="`gradient_checkpointing` recomputes"):
            arguments(tmp_path, **{name: True})

    def test_no_accelerate(self, tmp_path, monkeypatch):
        monkeypatch.setattr("hf_kvtransfer.training.arguments.is_accelerate_available", lambda: False)
        with pytest.raises(KVTransferError, match="Training needs accelerate"):
            arguments(tmp_path)

    def test_a_mapper_without_maps(self, pair):
        with pytest.raises(CalibrationError, match="nothing to train"):
            KVTransferModule(KVMapper.for_pair(*pair))

    def test_models_that_are_missing(self, fitted, pair, rows, plain_features, tmp_path):
        with pytest.raises(CalibrationError, match="needs the source and the target model"):
            KVMapperTrainer(residual(fitted), arguments(tmp_path), train_dataset=rows)
        with pytest.raises(CalibrationError, match="needs the target model"):
            KVMapperTrainer(residual(fitted), arguments(tmp_path, **ALL), train_dataset=plain_features)

    def test_other_models(self, fitted, pair, rows, tmp_path):
        with pytest.raises(PairMismatchError, match="is not the one this mapper was fitted for"):
            KVMapperTrainer(residual(fitted), arguments(tmp_path), source=pair[1], target=pair[0], train_dataset=rows)

    def test_losses_that_are_not_finite(self, fitted, plain_features):
        batch = {name: value[None].clone() for name, value in plain_features[0].items()}
        batch["source_values"][:] = float("nan")
        with pytest.raises(CalibrationError, match="The losses of this batch are"):
            KVTransferModule(fitted)(**batch)
        with pytest.raises(CalibrationError, match="expected weights of zero or more"):
            LossWeights(float("nan"))

    def test_a_batch_that_lacks_what_a_loss_reads(self, fitted, plain_features):
        batch = {name: value[None] for name, value in plain_features[0].items()}
        with pytest.raises(CalibrationError, match="The batch lacks source_keys"):
            KVTransferModule(fitted)(input_ids=batch["input_ids"])
        with pytest.raises(CalibrationError, match="the target or `input_ids` is missing"):
            KVTransferModule(fitted, LossWeights(kl=1.0))(**batch)
        with pytest.raises(CalibrationError, match="reads the target's queries"):
            KVTransferModule(fitted, LossWeights(attention=1.0))(**batch)
        batch["target_keys"] = batch["target_keys"][..., 1:]
        with pytest.raises(CalibrationError, match="side by side"):
            KVTransferModule(fitted)(**batch)

    def test_an_empty_training_set(self, fitted, tmp_path):
        class Empty(Dataset):
            def __len__(self):
                return 0

            def __getitem__(self, index):
                raise IndexError

        with pytest.raises(CalibrationError, match="There are no rows to measure"):
            KVMapperTrainer(residual(fitted), arguments(tmp_path), train_dataset=Empty())

    def test_a_damaged_checkpoint(self, fitted, plain_features, tmp_path):
        args = arguments(tmp_path, save_strategy="steps", save_steps=2)
        train(fitted, args, train_dataset=plain_features)
        file = tmp_path / "checkpoint-4" / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
        with pytest.raises(MapperFileError):
            train(fitted, args, resume=True, train_dataset=plain_features)

    @pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
    def test_a_truncated_file_of_a_checkpoint(self, fitted, plain_features, tmp_path, name):
        args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
        train(fitted, args, train_dataset=plain_features)
        file = tmp_path / "checkpoint-2" / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(MapperFileError, match="of an interrupted training can't be used .*Resume from an earlier"):
            train(fitted, arguments(tmp_path), resume=True, train_dataset=plain_features)

    def test_a_checkpoint_of_another_mapper(self, fitted, pair, plain_features, tmp_path):
        args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
        train(fitted, args, train_dataset=plain_features)
        with pytest.raises(CalibrationError, match="holds another mapper .*`map_type` is 'residual' there"):
            train(fitted, args, mapper=copy.deepcopy(fitted), resume=True, train_dataset=plain_features)
        shifted = with_form(KVMapper.for_pair(*pair, support=SUPPORT[1:] + SUPPORT[-1:]), "residual", hidden=8)
        other = residual(fitted)
        name = sorted(other.config.source_weights)[-1]
        other.config.source_weights[name] = [value + 1 for value in other.config.source_weights[name]]
        reasons = ((shifted, "`support` is"), (other, "source model: the same configuration, but other weights"))
        for mapper, reason in reasons:
            before = copy.deepcopy(mapper)
            with pytest.raises(CalibrationError, match=f"holds another mapper than the one .*{reason}"):
                load_weights(mapper, str(tmp_path / "checkpoint-2"))
            assert_same(mapper, before)


class TestScores:
    """Figures of the maps before training never pass for those of the trained ones."""

    def test_training_leaves_them_under_the_name_of_the_closed_form(self, fitted, plain_features, tmp_path):
        mapper = copy.deepcopy(fitted)
        mapper.config.scores |= {"evaluation": {"measures": [{}]}, "k_candidates": {"2": 0.5}}
        args = arguments(tmp_path, save_strategy="steps", save_steps=4)
        _, trainer = train(fitted, args, mapper=mapper, train_dataset=plain_features)
        mapper.save_pretrained(tmp_path / "by_hand")
        trainer.save_model(str(tmp_path / "final"))
        expected = {"k_candidates": {"2": 0.5}, "closed_form": {"r2": fitted.config.scores["r2"]}}
        for folder in ("checkpoint-4", "by_hand", "final"):
            loaded = KVMapper.from_pretrained(tmp_path / folder, min_gap_recovered=False)
            assert loaded.config.scores == expected
        # Trained once more, they are still those of the closed form.
        train(fitted, arguments(tmp_path), mapper=mapper, train_dataset=plain_features)
        assert mapper.config.scores == expected

    def test_measuring_a_loss_changes_none(self, fitted, plain_features):
        mapper = copy.deepcopy(fitted)
        batch = {name: value[None] for name, value in plain_features[0].items()}
        KVTransferModule(mapper).eval()(**batch)
        with torch.no_grad():
            KVTransferModule(mapper)(**batch)
        assert mapper.config.scores == fitted.config.scores

    def test_another_form_has_none_of_its_own(self, fitted):
        before = copy.deepcopy(fitted.config.scores)
        made = with_form(fitted, "mlp", hidden=8)
        own = before.get("closed_form", before)
        assert made.config.scores == {"closed_form": {"r2": own["r2"]}}
        assert fitted.config.scores == before


class TestKL:
    @pytest.mark.parametrize("exact", [{}, {"exact_prefix": 3, "exact_suffix": 2}], ids=["mapped", "partly exact"])
    def test_is_that_of_convert(self, fitted, pair, rows, plain_features, exact):
        """The target on what `convert` gives, against the target without any cache."""
        mapper = KVMapper(copy.deepcopy(fitted.config))
        mapper.load_state_dict(fitted.state_dict())
        for name, value in exact.items():
            setattr(mapper.config, name, value)
        source, target = pair
        ids = rows.rows[:2]
        module = KVTransferModule(mapper, LossWeights(0, 0, 1), shortest_context=4, longest_continuation=8)
        batch = {name: torch.stack([plain_features[i][name] for i in range(2)]) for name in plain_features[0]}
        with torch.no_grad():
            found = module.eval()(**batch, target=target)
            itself = {"target": target, "input_ids": ids[:, :16]} if exact else {}
            cache = mapper.convert(source(ids[:, :16]), hold_back=0, **itself)
            given = target(ids[:, 16:24], **{cache_keyword(target): cache}).logits.log_softmax(-1)
            expected = target(ids[:, :24]).logits[:, 16:].log_softmax(-1)
        divergence = (expected.exp() * (expected - given)).sum(-1).mean(-1)
        torch.testing.assert_close(found.kl, divergence, rtol=1e-4, atol=1e-5)
        assert torch.equal(found.agreement, (given.argmax(-1) == expected.argmax(-1)).float().mean(-1))
