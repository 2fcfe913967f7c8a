"""What is captured is what the model projected before RoPE, and the loop over text sums exactly that."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_kvtransfer.calibration import CalibrationStatistics, FeatureLayout, capture, capture_content, collect, pack
from hf_kvtransfer.calibration.apart import collect_apart
from hf_kvtransfer.errors import CalibrationError, MapperFileError
from hf_kvtransfer.fitting import fit_mapper
from hf_kvtransfer.geometry import decoder_of, tokenizer_fingerprint
from hf_kvtransfer.rope import RotaryCodec


# Where each model is read.
passes_module = sys.modules["hf_kvtransfer.calibration.passes"]

TEXTS = [f"Text {i} tells how {i} things became {i * i} things. " * 8 for i in range(100)]
SETTINGS = {"sequence_length": 40, "num_sequences": 12, "batch_size": 3, "progress": False}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def make_qwen3(**changes):
    torch.manual_seed(1)
    config = {**SMALL, "vocab_size": 300, "num_key_value_heads": 2, **changes}
    return Qwen3ForCausalLM(Qwen3Config(**config)).eval()


def make_llama(**changes):
    torch.manual_seed(2)
    config = {**SMALL, "vocab_size": 310, "num_key_value_heads": 1, "head_dim": 16, "rope_parameters": YARN, **changes}
    return LlamaForCausalLM(LlamaConfig(**config)).eval()


def make_mistral(**changes):
    torch.manual_seed(3)
    config = {**SMALL, "vocab_size": 300, "num_key_value_heads": 2, "sliding_window": 8, **changes}
    return MistralForCausalLM(MistralConfig(**config)).eval()


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="module")
def qwen3():
    return make_qwen3()


@pytest.fixture(scope="module")
def llama():
    return make_llama()


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@torch.no_grad()
def projected(model, ids):
    """Keys before RoPE and values, `[batch, tokens, width of all layers]`, from the projections themselves."""
    keys, values, hooks = [], [], []
    for layer in model.model.layers:
        attention = layer.self_attn
        before_rope = getattr(attention, "k_norm", attention.k_proj)
        hooks.append(before_rope.register_forward_hook(lambda _, __, out: keys.append(out.flatten(2).float())))
        hooks.append(attention.v_proj.register_forward_hook(lambda _, __, out: values.append(out.float())))
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


class TestCapture:
    @pytest.mark.parametrize("make", [make_qwen3, make_llama, make_mistral])
    @pytest.mark.parametrize("stride", [1, 4, 7])
    def test_is_what_the_layers_projected_before_rope(self, make, stride):
        model = make()
        ids = torch.randint(0, 300, (3, 40))
        keys, values = capture(model, RotaryCodec.from_model(model), ids, stride=stride)
        expected_keys, expected_values = (content[:, ::stride].flatten(0, 1) for content in projected(model, ids))
        assert keys.dtype == values.dtype == torch.float32
        torch.testing.assert_close(keys, expected_keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)

    def test_a_bfloat16_model_is_captured_within_its_rounding(self):
        model = make_qwen3().to(torch.bfloat16)
        # Frequencies are kept in float32 by `from_pretrained`, not by `to`.
        model.model.rotary_emb = make_qwen3().model.rotary_emb
        ids = torch.randint(0, 300, (2, 40))
        keys, values = capture(model, RotaryCodec.from_model(model), ids, stride=4)
        expected_keys, expected_values = (content[:, ::4].flatten(0, 1) for content in projected(model, ids))
        assert keys.dtype == torch.float32
        assert float((keys - expected_keys).norm() / expected_keys.norm()) < 0.006
        torch.testing.assert_close(values, expected_values, rtol=0, atol=0)

    def test_training_mode_comes_back_module_by_module(self):
        model = make_qwen3().train()
        model.model.layers[1].eval()
        before = [module.training for module in model.modules()]
        seen = []
        hook = model.model.layers[0].register_forward_hook(lambda module, *_: seen.append(module.training))
        keys, _ = capture(model, RotaryCodec.from_model(model), torch.randint(0, 300, (1, 8)))
        hook.remove()
        assert seen == [False]
        assert [module.training for module in model.modules()] == before
        assert not keys.requires_grad
        assert not keys.is_inference()

    def test_training_mode_comes_back_after_a_failure(self, qwen3):
        model = make_qwen3().train()
        with pytest.raises(IndexError):
            capture(model, RotaryCodec.from_model(model), torch.full((1, 8), 1000))
        assert all(module.training for module in model.modules())

    def test_the_head_isnt_run(self):
        model = make_llama()
        model.lm_head.register_forward_hook(lambda *_: pytest.fail("the LM head was run"))
        capture(model, RotaryCodec.from_model(model), torch.randint(0, 300, (1, 8)))

    def test_a_model_that_doesnt_use_its_cache_is_captured_all_the_same(self):
        model = make_llama()
        model.config.use_cache = False
        assert capture(model, RotaryCodec.from_model(model), torch.randint(0, 300, (1, 8)))[0].shape == (2, 32)

    @pytest.mark.parametrize(("kind", "module"), [("keys", "k_proj"), ("values", "v_proj")])
    def test_content_that_isnt_finite_is_refused_with_its_layer(self, kind, module):
        model = make_llama()
        with torch.no_grad():
            getattr(model.model.layers[1].self_attn, module).weight[3, 3] = float("inf")
        with pytest.raises(CalibrationError, match=rf"{kind} of layer 1 aren't finite \(1 of 2 layers"):
            capture(model, RotaryCodec.from_model(model), torch.randint(0, 300, (1, 8)))

    def test_impossible_arguments_are_refused(self, qwen3):
        codec = RotaryCodec.from_model(qwen3)
        for ids, stride in ((torch.zeros(4, dtype=torch.long), 4), (torch.zeros(1, 0, dtype=torch.long), 4)):
            with pytest.raises(CalibrationError, match=r"expected \[batch, tokens\]"):
                capture(qwen3, codec, ids, stride=stride)
        with pytest.raises(CalibrationError, match="stride"):
            capture(qwen3, codec, torch.zeros(1, 4, dtype=torch.long), stride=0)


def assert_same(a, b, rtol=1e-9):
    assert a.tokens == b.tokens
    for split in a.splits:
        for kind in a.splits[split]:
            mine, theirs = (x.splits[split][kind].tensors() for x in (a, b))
            for name, expected in theirs.items():
                atol = rtol * float(expected.abs().max())
                torch.testing.assert_close(mine[name], expected, rtol=rtol, atol=atol, msg=f"{split} {kind} {name}")


def interrupt_after(monkeypatch, calls):
    """Let the user press Ctrl-C in the given call of `capture_content`."""
    remaining = [calls]

    def interrupted(*arguments, **options):
        if remaining[0] == 0:
            raise KeyboardInterrupt
        remaining[0] -= 1
        return capture_content(*arguments, **options)

    monkeypatch.setattr(passes_module, "capture_content", interrupted)


class TestCollect:
    def test_sums_what_was_captured(self, qwen3, llama, tokenizer):
        statistics = collect(qwen3, llama, tokenizer, TEXTS, token_stride=3, heldout_fraction=0.25, **SETTINGS)
        ids = torch.tensor(list(pack(TEXTS, tokenizer, 40, 12)))
        by_hand = CalibrationStatistics(statistics.source, statistics.target, statistics.tokenizer_fingerprint)
        for split, rows in (("heldout", [1, 5, 9]), ("fit", [0, 2, 3, 4, 6, 7, 8, 10, 11])):
            contents = [
                content[:, ::3].flatten(0, 1) for model in (qwen3, llama) for content in projected(model, ids[rows])
            ]
            by_hand.update(split, *contents)
        assert_same(statistics, by_hand, rtol=1e-5)
        assert statistics.tokens == {"fit": 9 * 14, "heldout": 3 * 14}

    def test_says_what_it_was_made_from(self, qwen3, llama, tokenizer):
        statistics = collect(qwen3, llama, tokenizer, TEXTS, **SETTINGS)
        calibration = statistics.calibration
        assert calibration["dataset"] == "100 texts"
        assert (calibration["sequences"], calibration["sequence_length"], calibration["token_stride"]) == (12, 40, 4)
        assert calibration["versions"].keys() == {"hf_kvtransfer", "transformers", "torch"}
        assert statistics.tokenizer_fingerprint == tokenizer_fingerprint(tokenizer)
        assert statistics.manifest.keys() == {"source_weights", "target_weights"}
        assert [layer.width for layer in statistics.target.layers] == [16, 16]

    @pytest.mark.parametrize("batch_size", [1, 5, 12, 100])
    def test_the_batch_size_doesnt_matter(self, qwen3, llama, tokenizer, batch_size):
        settings = {**SETTINGS, "batch_size": batch_size}
        whole = collect(qwen3, llama, tokenizer, TEXTS, **SETTINGS)
        # A forward pass rounds differently with another batch size.
        assert_same(collect(qwen3, llama, tokenizer, TEXTS, **settings), whole, rtol=1e-5)

    def test_parts_merge_into_the_whole(self, qwen3, llama, tokenizer):
        rows = [tokenizer.decode(row) for row in pack(TEXTS, tokenizer, 40, 12)]
        parts = [
            collect(qwen3, llama, tokenizer, rows[i:j], **{**SETTINGS, "sequence_length": 30, "num_sequences": 6})
            for i, j in ((0, 6), (6, 12))
        ]
        tokens = {split: sum(part.tokens[split] for part in parts) for split in ("fit", "heldout")}
        merged = parts[0].merge(parts[1])
        assert merged.tokens == tokens
        assert merged.calibration["sequences"] == 12

    @pytest.mark.parametrize(
        ("fraction", "sequences", "heldout"),
        [(0.1, 2, 1), (0.1, 12, 2), (0.1, 1, 0), (0.5, 12, 6), (0.25, 12, 3), (0.0, 12, 0)],
    )
    def test_held_out_rows_are_spread_evenly(self, qwen3, llama, tokenizer, fraction, sequences, heldout):
        settings = {**SETTINGS, "num_sequences": sequences, "heldout_fraction": fraction}
        assert collect(qwen3, llama, tokenizer, TEXTS, **settings).tokens == {
            "fit": (sequences - heldout) * 10,
            "heldout": heldout * 10,
        }

    def test_too_little_text_goes_on_with_a_warning(self, qwen3, llama, tokenizer):
        with pytest.warns(UserWarning, match="of 12 sequences"):
            statistics = collect(qwen3, llama, tokenizer, TEXTS[:1], **SETTINGS)
        assert 0 < statistics.calibration["sequences"] < 12

    def test_a_token_without_an_embedding_is_refused(self, qwen3, tokenizer):
        with pytest.raises(CalibrationError, match=r"token id \d+, but one of the models has only 64 embeddings"):
            collect(qwen3, make_llama(vocab_size=64), tokenizer, TEXTS, **SETTINGS)

    def test_different_tokenizers_are_refused(self, qwen3, llama, tokenizer):
        own = tokenizer_fingerprint(tokenizer)
        collect(qwen3, llama, tokenizer, TEXTS, fingerprints=(own, own), **SETTINGS)
        with pytest.raises(CalibrationError, match="target's tokenizer"):
            collect(qwen3, llama, tokenizer, TEXTS, fingerprints=(own, "other"), **SETTINGS)

    @pytest.mark.parametrize(
        "setting", [{"heldout_fraction": 1.0}, {"batch_size": 0}, {"token_stride": 0}, {"checkpoint_every": 0}]
    )
    def test_impossible_settings_are_refused(self, qwen3, llama, tokenizer, setting):
        with pytest.raises(CalibrationError, match=next(iter(setting))):
            collect(qwen3, llama, tokenizer, TEXTS, **{**SETTINGS, **setting})


class TestResume:
    @pytest.mark.parametrize("calls", [0, 1, 4, 5, 7])
    def test_a_resumed_collection_is_an_uninterrupted_one(self, qwen3, llama, tokenizer, tmp_path, monkeypatch, calls):
        whole = collect(qwen3, llama, tokenizer, TEXTS, **SETTINGS)
        options = {**SETTINGS, "checkpoint_dir": tmp_path, "checkpoint_every": 1}
        interrupt_after(monkeypatch, calls)
        with pytest.raises(KeyboardInterrupt):
            collect(qwen3, llama, tokenizer, TEXTS, **options)
        monkeypatch.undo()
        resumed = collect(qwen3, llama, tokenizer, TEXTS, **options)
        assert_same(resumed, whole, rtol=0)
        assert resumed.calibration == whole.calibration
        assert_same(CalibrationStatistics.load(tmp_path), whole, rtol=0)

    def test_a_finished_collection_runs_no_model_again(self, qwen3, llama, tokenizer, tmp_path, monkeypatch):
        whole = collect(qwen3, llama, tokenizer, TEXTS, checkpoint_dir=tmp_path, **SETTINGS)
        interrupt_after(monkeypatch, 0)
        assert_same(collect(qwen3, llama, tokenizer, TEXTS, checkpoint_dir=tmp_path, **SETTINGS), whole, rtol=0)

    def test_more_sequences_go_on_from_fewer(self, qwen3, llama, tokenizer, tmp_path):
        collect(qwen3, llama, tokenizer, TEXTS, checkpoint_dir=tmp_path, **{**SETTINGS, "num_sequences": 6})
        more = collect(qwen3, llama, tokenizer, TEXTS, checkpoint_dir=tmp_path, **SETTINGS)
        assert_same(more, collect(qwen3, llama, tokenizer, TEXTS, **SETTINGS), rtol=0)
        with pytest.raises(CalibrationError, match="already holds 12 sequences"):
            collect(qwen3, llama, tokenizer, TEXTS, checkpoint_dir=tmp_path, **{**SETTINGS, "num_sequences": 6})

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"token_stride": 2}, "token_stride is 2, was 4"),
            ({"sequence_length": 20}, "sequence_length is 20, was 40"),
            ({"heldout_fraction": 0.2}, "heldout_fraction is 0.2, was 0.1"),
            ({"dtype": torch.float32}, "dtype is torch.float32, was torch.float64"),
            ({"texts": TEXTS[::-1]}, "aren't those that the checkpoint has seen"),
            ({"texts": TEXTS[:50]}, "dataset is '50 texts', was '100 texts'"),
            ({"target": make_llama(num_key_value_heads=2)}, "target model: KV heads"),
            ({"source": make_qwen3(rope_parameters=YARN)}, "source model: rotary parameter"),
        ],
        ids=["stride", "length", "fraction", "dtype", "order", "text", "target", "source"],
    )
    def test_a_checkpoint_of_something_else_is_refused(self, qwen3, llama, tokenizer, tmp_path, change, sentence):
        arguments = {"source": qwen3, "target": llama, "tokenizer": tokenizer, "texts": TEXTS, **SETTINGS}
        whole = collect(**arguments, checkpoint_dir=tmp_path)
        with pytest.raises(CalibrationError, match=sentence):
            collect(**{**arguments, **change}, checkpoint_dir=tmp_path)
        assert_same(CalibrationStatistics.load(tmp_path), whole, rtol=0)
        collect(**{**arguments, **change}, checkpoint_dir=tmp_path, resume=False)

    def test_other_weights_of_the_same_shape_are_refused(self, qwen3, llama, tokenizer, tmp_path):
        collect(qwen3, llama, tokenizer, TEXTS, checkpoint_dir=tmp_path, **SETTINGS)
        other = make_qwen3()
        with torch.no_grad():
            for parameter in decoder_of(other).parameters():
                parameter.mul_(1.5)
        with pytest.raises(CalibrationError, match="source_weights"):
            collect(other, llama, tokenizer, TEXTS, checkpoint_dir=tmp_path, **SETTINGS)

    def test_a_damaged_checkpoint_is_refused(self, qwen3, llama, tokenizer, tmp_path):
        collect(qwen3, llama, tokenizer, TEXTS, checkpoint_dir=tmp_path, **SETTINGS)
        (data,) = tmp_path.glob("*.safetensors")
        data.write_bytes(data.read_bytes()[:-8])
        with pytest.raises(MapperFileError, match="cut short"):
            collect(qwen3, llama, tokenizer, TEXTS, checkpoint_dir=tmp_path, **SETTINGS)
        collect(qwen3, llama, tokenizer, TEXTS, checkpoint_dir=tmp_path, resume=False, **SETTINGS)


def peak_memory(sequences):
    """Peak resident memory, in KiB, of a fresh process that calibrates on so many sequences of 256 tokens."""
    here = Path(__file__).resolve()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here.parent.parent)])}
    # Single-threaded and without arenas per thread: what is measured must be what the loop holds.
    environment |= {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", f"import test_capture; test_capture.calibrate({sequences})"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(run.stdout.split()[-1])


def calibrate(sequences):
    source, target = make_qwen3(num_key_value_heads=4), make_llama(num_key_value_heads=4)
    # Kept, the tokens of 400 sequences would take 157 MB.
    settings = {"sequence_length": 256, "token_stride": 1, "num_sequences": sequences, "batch_size": 4}
    collect(source, target, make_tokenizer(), (TEXTS[i % 100] for i in range(10**6)), progress=False, **settings)
    # The high-water mark of this process alone; `getrusage` would count the process it was forked from.
    status = Path("/proc/self/status").read_text()
    print(status.split("VmHWM:")[1].split()[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the high-water mark from /proc")
def test_memory_doesnt_grow_with_the_text():
    few, many = peak_memory(50), peak_memory(400)
    assert many < 1.1 * few


def test_a_tokenizer_that_can_only_be_another_models_is_refused(family_model):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    tiny = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")))
    model = family_model("small")
    with pytest.raises(CalibrationError, match="knows 2 tokens, the models have 3072 embeddings"):
        collect(model, model, tiny, ["a a a a"] * 50, sequence_length=8)


class TestKindsApart:
    def test_are_both_at_once(self, qwen3, llama, tokenizer, tmp_path):
        wishes = {**SETTINGS, "attention_rows": True, "sample_tokens": 40}
        whole = collect(qwen3, llama, tokenizer, TEXTS, **wishes)
        for folder in (None, tmp_path):
            apart = collect_apart(qwen3, llama, tokenizer, texts=lambda: TEXTS, checkpoint_dir=folder, **wishes)
            assert (apart.tokens, apart.calibration) == (whole.tokens, whole.calibration)
            for split, systems in whole.splits.items():
                for name, moments in systems.items():
                    for part, tensor in moments.tensors().items():
                        assert torch.equal(apart.splits[split][name].tensors()[part], tensor)
            for key, sums in whole.weighted.items():
                for part, tensor in sums.tensors().items():
                    assert torch.equal(apart.weighted[key].tensors()[part], tensor)
            assert torch.equal(apart.sample.source.keys, whole.sample.source.keys)
        alone = collect(qwen3, llama, tokenizer, TEXTS, kinds=("values",), **wishes)
        assert not alone.splits["fit"]["keys"].sxx.any()
        other = collect(qwen3, llama, tokenizer, TEXTS[5:], kinds=("keys",), **wishes)
        with pytest.raises(CalibrationError, match="expected two collections of the same text"):
            other.with_kind("values", alone)

    def test_what_does_not_allow_it_is_refused(self, qwen3, llama, tokenizer):
        for changes in ({"kinds": ("keys",), "layout": FeatureLayout(joint=True)}, {"kinds": ("queries",)}):
            with pytest.raises(CalibrationError, match="with joint features, which are summed together"):
                collect(qwen3, llama, tokenizer, TEXTS, **SETTINGS, **changes)
        for wishes in ({}, {"statistics_dir": "unused", "dataset": iter(TEXTS)}):
            with pytest.raises(CalibrationError, match="kinds_apart needs a `statistics_dir`"):
                fit_mapper(qwen3, llama, tokenizer=tokenizer, kinds_apart=True, **{"dataset": TEXTS, **wishes})


def test_models_on_devices_of_their_own_are_read_side_by_side_and_sum_the_same(qwen3, llama, tokenizer, monkeypatch):
    wishes = {**SETTINGS, "attention_rows": True, "sample_tokens": 40}
    alone, threads = collect(qwen3, llama, tokenizer, TEXTS, **wishes), set()

    def noted(model, *arguments, **options):
        threads.add((id(model), threading.get_ident()))
        return capture_content(model, *arguments, **options)

    # As if each had a device to itself.
    monkeypatch.setattr(passes_module, "_devices", lambda model: {id(model)})
    monkeypatch.setattr(passes_module, "capture_content", noted)
    together = collect(qwen3, llama, tokenizer, TEXTS, **wishes)
    assert len({thread for _, thread in threads}) > 1
    for name, moments in alone.splits["fit"].items():
        for part, tensor in moments.tensors().items():
            assert torch.equal(together.splits["fit"][name].tensors()[part], tensor)
    for key, sums in alone.weighted.items():
        assert torch.equal(together.weighted[key].tensors()["gram"], sums.tensors()["gram"])
    for mine, theirs in zip(together.sample.records, alone.sample.records, strict=True):
        assert torch.equal(mine.queries, theirs.queries)
