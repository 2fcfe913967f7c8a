"""What the latency of a transfer is made of, and how it is predicted. How long things take is for the benchmarks."""

import itertools
import json

import pytest
import torch
from transformers import Gemma3TextConfig, Qwen3Config, ViTConfig

from hf_kvtransfer import KVMapper
from hf_kvtransfer.costs import conversion_flops, prefill_flops
from hf_kvtransfer.errors import KVTransferError, PairMismatchError
from hf_kvtransfer.evaluation import prefill
from hf_kvtransfer.geometry import ModelGeometry
from hf_kvtransfer.latency import MachineRates, measure_latency
from hf_kvtransfer.latency.hardware import hardware_named, known_hardware
from hf_kvtransfer.latency.measure import convert_arguments
from hf_kvtransfer.latency.memory import peak_bytes
from hf_kvtransfer.latency.prediction import Roofline
from hf_kvtransfer.latency.random_pair import pair_config, random_mapper, random_model, shallow
from hf_kvtransfer.latency.this_machine import ThisMachine, growth, small, some_layers
from hf_kvtransfer.latency.timing import interleaved, processor_time
from hf_kvtransfer.planning import plan_pair, plan_recipes, uniform_support

from .architectures import ARCHITECTURES, build, missing
from .conftest import ROOT
from .test_cli import invoke


CPU = torch.device("cpu")
RATES = MachineRates("cpu", "float32", 1, matmul_flops=1e11, copy_bandwidth=1e11)
TIMES = ("source_prefill", "target_prefill", "conversion", "target_first_token", "converted_first_token")


def made(source, target, **recipe):
    """A mapper of random weights for two models."""
    geometries = [ModelGeometry.from_model(model) for model in (source, target)]
    return random_mapper(source, target, uniform_support(*geometries, **recipe), torch.float32, CPU)


@pytest.fixture(scope="module")
def pair():
    return build("llama"), build("qwen3", seed=1)


@pytest.fixture(scope="module")
def rows(pair):
    return measure_latency(*pair, made(*pair, k=2, anchor_layers=1), [4, 8, 16], batch_size=2, trials=3, rates=RATES)


class TestRows:
    def test_they_are_json_and_say_what_was_measured(self, rows):
        assert json.loads(json.dumps(rows)) == rows
        assert [row["context"] for row in rows] == [4, 8, 16]
        assert {(row["batch_size"], row["trials"], row["device"], row["dtype"]) for row in rows} == {
            (2, 3, "cpu", "float32")
        }

    def test_medians_lie_within_the_spread(self, rows):
        for row in rows:
            for name in TIMES:
                low, high = row["spread"][name]
                assert 0 < low <= row[name] <= high
            assert row["converted_first_token"] > row["conversion"]
            assert row["target_first_token"] > row["target_prefill"]

    def test_ratios_are_those_of_the_times(self, rows):
        for row in rows:
            assert row["warm_speedup"] == row["target_prefill"] / row["conversion"]
            assert row["cold_speedup"] < row["warm_speedup"]
            assert row["first_token_speedup"] == row["target_first_token"] / row["converted_first_token"]
            assert row["counted_speedup"] == row["target_prefill_flops"] / row["conversion_flops"]
            for name in ("conversion", "target_prefill"):
                assert row[f"{name}_to_floor"] == row[name] / row[f"{name}_floor"]

    def test_counts_are_those_of_the_pair(self, rows, pair):
        config = made(*pair, k=2, anchor_layers=1).config
        for row in rows:
            assert row["target_prefill_flops"] == 2 * prefill_flops(pair[1].config, row["context"])
            assert row["source_prefill_flops"] == 2 * prefill_flops(pair[0].config, row["context"])
            assert row["conversion_flops"] == 2 * conversion_flops(config, row["context"] - 1).total
            # Two rows, keys and values, and one token that is left to the target.
            assert (
                row["cache_bytes"] == 2 * 2 * 4 * (row["context"] - 1) * ModelGeometry.from_model(pair[1]).offsets[-1]
            )

    def test_the_floor_is_arithmetic_and_memory(self, rows):
        for row in rows:
            assert row["conversion_floor_arithmetic"] == row["conversion_flops"] / RATES.matmul_flops
            assert row["conversion_floor_memory"] == row["conversion_bytes"] / row["copy_bandwidth"]
            parts = row["conversion_floor_arithmetic"] + row["conversion_floor_memory"]
            assert row["conversion_floor"] == pytest.approx(parts)

    def test_peak_memory_holds_the_result_and_grows_with_it(self, rows):
        for less, more in itertools.pairwise(rows):
            for name in ("conversion_peak", "target_prefill_peak"):
                assert less["cache_bytes"] <= less[name] < more[name]

    def test_a_plain_mapper_needs_no_target(self, pair):
        row = measure_latency(*pair, made(*pair, k=1), [4], trials=1, rates=RATES, memory=False)[0]
        assert row["conversion_peak"] is None
        assert row["conversion_flops"] < row["target_prefill_flops"]


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"lengths": []}, "There are no lengths"),
        ({"lengths": [1]}, "2 or more"),
        ({"lengths": [8.0]}, "expected a whole number, 2 or more"),
        ({"lengths": [8, 10**6]}, "longer than the"),
        ({"lengths": [8], "trials": 0}, "`trials` is 0"),
        ({"lengths": [8], "batch_size": True}, "`batch_size` is True"),
    ],
)
def test_what_cannot_be_measured_is_refused(pair, keywords, sentence):
    with pytest.raises(KVTransferError, match=sentence):
        measure_latency(*pair, made(*pair, k=1), rates=RATES, **keywords)


def test_a_mapper_of_another_pair_or_device_is_refused(pair):
    mapper = made(*pair, k=1)
    with pytest.raises(PairMismatchError):
        measure_latency(pair[1], pair[0], mapper, [4], rates=RATES)
    with pytest.raises(KVTransferError, match="expected one device"):
        measure_latency(*pair, mapper.to("meta"), [4], rates=RATES)


class TestPeak:
    def test_tensors_count_while_they_are_there(self):
        before = torch.ones(1000)

        def call():
            first = before + 1  # 4,000 bytes
            second = first * 2  # 8,000
            del first
            return second.view(10, 100).add_(before.view(10, 100)).sum(0)  # 4,000 and 400

        assert peak_bytes(call, CPU) == 8000

    def test_what_there_was_is_not_counted(self):
        before = torch.ones(1000)
        assert peak_bytes(lambda: before.add_(1), CPU) == 0
        assert peak_bytes(lambda: before[:10], CPU) == 0
        assert peak_bytes(lambda: [before + i for i in range(3)], CPU) == 12_000

    def test_a_cache_takes_at_least_itself(self, pair):
        cache = prefill(pair[1], torch.zeros(1, 16, dtype=torch.long))
        size = sum(4 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)
        assert size <= peak_bytes(lambda: prefill(pair[1], torch.zeros(1, 16, dtype=torch.long)), CPU) < 100 * size


def test_all_ways_take_turns_and_each_begins_one():
    order = []

    def way(name):
        def run():
            order.append(name)
            return {name: float(len(order))}

        return run

    times = interleaved({name: way(name) for name in "abc"}, 3)
    rounds = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert len(rounds) == 4  # one of them doesn't count
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert {one[0] for one in rounds[1:]} == {"a", "b", "c"}
    assert all(len(values) == 3 for values in times.values())


class TestGrowth:
    @pytest.mark.parametrize("parts", [(1.0, 0.0, 0.0), (0.1, 0.01, 0.0), (0.0, 0.01, 1e-6), (0.3, 0.01, 1e-5)])
    def test_it_is_found_again(self, parts):
        grown = growth({n: sum(p * n**power for power, p in enumerate(parts)) for n in (64, 512, 2048)})
        for tokens in (1, 100, 30_000):
            assert grown(tokens) == pytest.approx(sum(p * tokens**power for power, p in enumerate(parts)), rel=1e-6)

    def test_noise_never_makes_it_fall(self):
        for times in ((2.0, 1.0, 3.0), (1.0, 1.0, 1.0), (3.0, 2.0, 1.0), (1.0, 50.0, 60.0)):
            grown = growth(dict(zip((64, 512, 2048), times, strict=True)))
            assert 0 <= grown(1) <= grown(64) <= grown(1000) <= grown(10**6)

    def test_one_length_is_enough(self):
        assert growth({64: 2.0})(64) == pytest.approx(2.0)


def test_fewer_layers_are_the_first_of_the_same_kind():
    config = Gemma3TextConfig(num_hidden_layers=7, hidden_size=32, head_dim=8, intermediate_size=16, vocab_size=64)
    few = shallow(config, 3)
    assert config.num_hidden_layers == 7
    geometry, whole = ModelGeometry.from_config(few), ModelGeometry.from_config(config)
    assert geometry.layers == whole.layers[:3]
    assert random_model(few, torch.float32, CPU).config.num_hidden_layers == 3


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(missing())))
def test_every_architecture_has_a_shallow_and_random_twin(name):
    config = ARCHITECTURES[name]()
    whole = ModelGeometry.from_config(config)
    few = small(config, 2, 16)
    assert ModelGeometry.from_config(few).layers == whole.layers[:2]
    model = random_model(few, torch.float32, CPU)
    cache = prefill(model, torch.arange(16)[None])
    assert [layer.keys.shape[1:] for layer in cache.layers] == [(g.kv_heads, 16, g.head_dim) for g in whole.layers[:2]]


QWEN3 = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
SOURCE, TARGET = Qwen3Config(num_hidden_layers=4, **QWEN3), Qwen3Config(num_hidden_layers=9, **QWEN3)
RECIPES = [{"k": 2}, {"k": 1, "anchor_layers": 2}, {"k": 2, "heads": "local", "anchor_layers": 2, "anchor_start": 3}]


class TestThisMachine:
    @pytest.mark.parametrize("recipe", RECIPES, ids=str)
    def test_some_layers_make_a_mapper_of_the_same_kind(self, recipe):
        geometries = [ModelGeometry.from_config(config) for config in (SOURCE, TARGET)]
        whole = pair_config(SOURCE, TARGET, uniform_support(*geometries, **recipe))
        for number in (1, 3):
            part = some_layers(whole, 9, number)
            mapper = KVMapper(pair_config(SOURCE, shallow(TARGET, len(part["support"])), part))
            mapped = sum(layer is not None for layer in part["support"])
            assert mapped == number * (2 if recipe.get("anchor_start") else 1)
            native = mapper.config.native_layers(len(part["support"]))
            assert len(native) == len(whole.native_layers(9))

    @pytest.mark.parametrize("recipe", RECIPES, ids=str)
    def test_times_are_of_the_order_of_those_measured(self, recipe):
        """How near they come is for `benchmarks/prefill.py` to say, on a machine that does nothing else."""
        geometries = [ModelGeometry.from_config(config) for config in (SOURCE, TARGET)]
        fields = uniform_support(*geometries, **recipe)
        torch.set_num_threads(1)
        with processor_time():
            predicted = ThisMachine(SOURCE, TARGET, fields, torch.float32, CPU)
            models = [random_model(config, torch.float32, CPU) for config in (SOURCE, TARGET)]
            mapper = random_mapper(*models, fields, torch.float32, CPU)
            row = measure_latency(*models, mapper, [128], trials=5, rates=RATES, memory=False)[0]
        for name in ("source_prefill", "target_prefill", "conversion"):
            assert 1 / 3 < getattr(predicted, name)(128) / row[name] < 3, name


class TestRoofline:
    PAIR = plan_pair(
        *(
            Qwen3Config(**{**QWEN3, "hidden_size": 512, "head_dim": 128}, num_hidden_layers=layers)
            for layers in (20, 40)
        )
    )

    def times(self, hardware, **recipe):
        plan = plan_recipes(self.PAIR, ks=[recipe.pop("k", 4)], **recipe)[0]
        return Roofline(self.PAIR, plan, hardware_named(hardware))

    @pytest.mark.parametrize("name", sorted(known_hardware()))
    def test_nothing_is_faster_than_the_hardware(self, name):
        hardware, times = hardware_named(name), self.times(name)
        assert all(0 < share <= 1 for share in (hardware.products, hardware.attention, hardware.copies))
        assert hardware.source
        plan = plan_recipes(self.PAIR, ks=[4])[0]
        for tokens in (64, 4096, 65_536):
            flops = sum(layer.flops(0, tokens) for layer in self.PAIR.target_layers)
            assert times.target_prefill(tokens) > flops / hardware.flops
            moved = plan.conversion_bytes(self.PAIR.source, self.PAIR.target, tokens)
            assert times.conversion(tokens) > moved / hardware.bandwidth

    def test_longer_contexts_and_more_layers_take_longer(self):
        for name in known_hardware():
            times = self.times(name)
            for what in ("source_prefill", "target_prefill", "conversion"):
                grown = [getattr(times, what)(tokens) for tokens in (64, 1024, 16_384, 131_072)]
                assert grown == sorted(grown)
            assert self.times(name, k=20).conversion(65_536) > times.conversion(65_536)
            anchored = self.times(name, anchors=[4])
            assert times.conversion(65_536) < anchored.conversion(65_536) < anchored.target_prefill(65_536)

    def test_more_bandwidth_helps_and_launches_are_a_floor(self):
        assert self.times("H200").conversion(65_536) < self.times("H100").conversion(65_536)
        assert self.times("H200").conversion(64) == self.times("A100").conversion(64)

    def test_hardware_has_names(self):
        assert hardware_named(" rtx 4090 ").name == "RTX 4090"
        with pytest.raises(KVTransferError, match="expected one of H200, H100"):
            hardware_named("this one")


class TestBench:
    def test_a_pair_of_configurations_with_random_weights(self, tmp_path):
        for name, config in (("source", SOURCE), ("target", TARGET)):
            config.save_pretrained(tmp_path / name)
        folders, file = (tmp_path / "source", tmp_path / "target"), tmp_path / "rows.json"
        result = invoke(
            "bench", *folders, "--random", "--lengths", "8,16", "--trials", 1, "--anchor-layers", 1, "--k", 1,
            "--threads", 1, "--json", file,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert "tokens  prefill ms" in result.output
        assert [row["context"] for row in json.loads(file.read_text())] == [8, 16]

    def test_a_saved_mapper_and_its_recipe_with_random_weights(self, family, family_model, tmp_path):
        mapper = made(family_model("small"), family_model("large"), k=2, anchor_layers=1)
        mapper.save_pretrained(tmp_path / "mapper")
        arguments = (family / "small", family / "large", tmp_path / "mapper", "--lengths", 16, "--trials", 1)
        for random in ((), ("--random",)):
            file = tmp_path / "rows.json"
            result = invoke("bench", *arguments, *random, "--json", file)
            assert result.exit_code == 0, result.output
            assert json.loads(file.read_text())[0]["conversion_flops"] == conversion_flops(mapper.config, 15).total

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ((), "--random to measure before one is fitted"),
            (("--random", "--lengths", "16384"), "longer than the 8,192 positions"),
            (("--random", "--lengths", "1"), "2 or more"),
            (("--random", "--lengths", ","), "is not a list of whole numbers"),
            (("--random", "--dtype", "int8"), "is not a floating-point dtype"),
            (("--random", "--device", "abacus"), "is no device of this machine"),
            (("--random", "--k", "5"), "expected a number from 1 to 4"),
            (("--random", "--json", "nowhere/rows.json"), "There is no folder nowhere"),
            (("--random", "--json", "."), "can't be written"),
            (("--random", "--json", "x" * 300), "can't be written"),
            (("--random", "--lengths", "9" * 5000), "is not a list of whole numbers"),
            (("--random", "--threads", "1000000000"), "Invalid value for '--threads'"),
            (("--random", "--device", "meta"), "is no device of this machine"),
            (("missing",), "missing"),
        ],
    )
    def test_wrong_options_are_sentences(self, family, arguments, sentence):
        result = invoke("bench", family / "small", family / "large", *arguments)
        assert result.exit_code != 0
        assert sentence in " ".join(result.output.replace("│", " ").split())
        assert "Traceback" not in result.output


def test_a_model_that_cannot_be_made_is_refused():
    with pytest.raises(KVTransferError, match="model with random weights can't be made on cpu"):
        random_model(ViTConfig(), torch.float32, CPU)


def test_positions_are_given_where_images_could_be(pair):
    ids = torch.zeros(2, 5, dtype=torch.long)
    config = made(*pair, k=1).config
    assert convert_arguments(config, pair[1], ids) == {}
    config.source_geometry["rope_parameters"] = {"mrope_section": [1, 1, 2]}
    assert convert_arguments(config, pair[1], ids)["position_ids"].tolist() == [[0, 1, 2, 3, 4]]


def test_rows_are_drawn(rows, tmp_path):
    from benchmarks.latency_figure import draw

    made = [{**row, "shape": shape, "recipe": recipe} for row in rows for shape in "ab" for recipe in ("full", "local")]
    draw(made, tmp_path / "figure.svg")
    figure = (tmp_path / "figure.svg").read_text()
    for words in ("context, tokens", "time, seconds", "prefill / conversion", "full heads", "the conversion's floor"):
        assert words in figure
    assert "one target layer" not in figure


def test_the_benchmarks_run(tmp_path, monkeypatch):
    from benchmarks import gpu

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["gpu", "--small", "--trials", "1", "--out", str(tmp_path / "gpu.json")])
    monkeypatch.setattr(gpu, "measure_rates", lambda *_: RATES)
    gpu.main()
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["recipe"] for row in rows} == set(gpu.RECIPES)
