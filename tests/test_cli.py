"""The command line, run as a user runs it."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from hf_kvtransfer import KVMapper, __version__
from hf_kvtransfer.cli import app
from hf_kvtransfer.explanation import in_use

from .architectures import ARCHITECTURES, REFUSED, build


def invoke(*arguments, **keywords):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **keywords)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, family):
    """Folders of two small random checkpoints with the family's tokenizer."""
    from transformers import AutoTokenizer

    folders = []
    tokenizer = AutoTokenizer.from_pretrained(family / "tokenizer")
    for name, seed in (("llama", 0), ("qwen3", 1)):
        folder = tmp_path_factory.mktemp(name)
        model = build(name, seed=seed)
        model.resize_token_embeddings(len(tokenizer))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders.append(folder)
    return folders


@pytest.fixture
def config_folder(tmp_path):
    def make(name):
        factory = ARCHITECTURES.get(name) or REFUSED[name][0]
        factory().save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def test_version_and_help():
    assert invoke("--version").output.strip() == __version__
    for command in ("check", "fit", "generate", "demo"):
        assert command in invoke("--help").output
        assert invoke(command, "--help").exit_code == 0


class TestCheck:
    def test_a_pair_that_can_be_mapped(self, config_folder):
        result = invoke("check", config_folder("llama"), config_folder("qwen3"))
        assert result.exit_code == 0, result.output
        assert "The two can be mapped" in result.output
        assert "2 × 16" in result.output
        # 3 target layers × 2 kinds × 32 outputs × (k · 32 features + bias)
        assert f"{3 * 2 * 32 * (2 * 32 + 1) / 1000:.2f} k" in result.output

    def test_the_size_is_that_of_a_mapper(self, config_folder):
        model = build("qwen3")
        mapper = KVMapper.for_pair(model, model, support=[[0, 1]] * 3)
        result = invoke("check", config_folder("qwen3"), config_folder("qwen3"), "--k", "2")
        assert f"{mapper.num_parameters() / 1000:.2f} k" in result.output

    @pytest.mark.parametrize("name", ["gpt2", "deepseek_v3", "llama-dynamic"])
    def test_a_refused_side_is_named_with_its_reason(self, config_folder, name):
        result = invoke("check", config_folder("llama"), config_folder(name))
        assert result.exit_code == 1
        assert "The target" in result.output
        assert REFUSED[name][1] in result.output

    def test_two_config_folders_in_under_five_seconds(self, tmp_path):
        """At the geometry of real models, weights never loaded: the folders hold nothing but a `config.json`."""
        from transformers import Qwen3Config

        folders = []
        for name, layers, hidden, heads in (("14b", 40, 5120, 40), ("32b", 64, 5120, 64)):
            Qwen3Config(
                num_hidden_layers=layers,
                hidden_size=hidden,
                num_attention_heads=heads,
                num_key_value_heads=8,
                head_dim=128,
                intermediate_size=25600,
            ).save_pretrained(tmp_path / name)
            folders.append(str(tmp_path / name))
        assert sorted(os.listdir(folders[0])) == ["config.json"]
        start = time.process_time()
        code = f"import sys; sys.argv = ['hf-kvtransfer', 'check', {folders[0]!r}, {folders[1]!r}]; " + (
            "import time; from hf_kvtransfer.cli import app; "
            "import atexit; atexit.register(lambda: print('cpu seconds', time.process_time(), file=sys.stderr)); app()"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert time.process_time() >= start
        assert "1.07 B" in result.stdout  # the paper's size for this pair at k = 8
        # Processor time, which a busy machine doesn't stretch.
        assert float(result.stderr.split("cpu seconds")[1]) < 5

    def test_tokenizers_are_compared_where_both_are_at_hand(self, pair, tmp_path, config_folder):
        from transformers import AutoTokenizer

        assert "The two share a tokenizer" in invoke("check", *pair).output
        assert "`fit` will have to compare" in invoke("check", pair[0], config_folder("qwen3")).output
        build("qwen3").config.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(pair[0])
        tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(tmp_path)
        result = invoke("check", pair[0], tmp_path)
        assert result.exit_code == 1
        assert "different vocabularies or merges" in result.output

    def test_no_folder_is_a_sentence_and_no_traceback(self, tmp_path):
        result = invoke("check", tmp_path, tmp_path)
        assert result.exit_code == 1
        assert "No configuration could be read" in result.output
        assert "Traceback" not in result.output


@pytest.fixture(scope="module")
def mapper(pair, tmp_path_factory, family):
    """The folder of a mapper that the command line fitted."""
    folder = tmp_path_factory.mktemp("fitted")
    result = invoke(
        "fit", *pair, folder / "mapper", "--data", family / "data" / "calibration.jsonl", "--sequences", 30,
        "--sequence-length", 64, "--token-stride", 1, "--k", 2, "--statistics", folder / "statistics",
        "--save-dtype", "bfloat16",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "R² held out" in result.output
    return folder / "mapper"


class TestFitAndGenerate:
    def test_fit_saves_what_loads(self, mapper):
        loaded = KVMapper.from_pretrained(mapper)
        assert loaded.config.k == 2
        assert loaded.config.preset == "auto"
        assert set(loaded.config.scores["r2"]) == {"fit", "heldout"}
        assert json.loads((mapper / "config.json").read_text())["dtype"] == "bfloat16"

    def test_the_kept_statistics_give_other_k_without_a_model(self, mapper):
        again = KVMapper.from_statistics(mapper.parent / "statistics", k=1)
        assert again.config.k == 1
        same = KVMapper.from_statistics(mapper.parent / "statistics", k=2)
        saved = KVMapper.from_pretrained(mapper, dtype=torch.float32)
        torch.testing.assert_close(same.layers[1].keys.weight, saved.layers[1].keys.weight, rtol=0.01, atol=0.01)

    def test_generate_writes_the_targets_text(self, mapper, pair):
        result = invoke("generate", *pair, mapper, "--prompt", "the kettle in garden", "--max-new-tokens", 3)
        assert result.exit_code == 0, result.output
        assert result.stdout.strip()
        piped = invoke("generate", *pair, mapper, "--max-new-tokens", 3, input="the kettle in garden")
        assert piped.stdout == result.stdout

    def test_compare_shows_all_three(self, mapper, pair, tmp_path):
        (tmp_path / "prompt.txt").write_text("the kettle in garden")
        result = invoke("generate", *pair, mapper, "--prompt-file", tmp_path / "prompt.txt", "--compare")
        assert result.exit_code == 0, result.output
        for name in ("source alone: ", "target native: ", "transferred: ", "prefill ms"):
            assert name in result.output
        assert result.output.splitlines()[-1] == in_use(KVMapper.from_pretrained(mapper).config)  # what it costs

    def test_a_mapper_of_another_pair_is_refused(self, mapper, pair):
        result = invoke("generate", pair[1], pair[0], mapper, "--prompt", "the kettle in garden")
        assert result.exit_code == 1
        assert "is not the one this mapper was fitted for" in result.output

    @pytest.mark.parametrize(
        ("option", "value", "sentence"),
        [
            ("--data", "missing.txt", "There is no file missing.txt"),
            ("--k", "many", "is not a number of layers"),
            ("--k", "9", "from 1 to 3"),
            ("--preset", "best", "no preset 'best'"),
            ("--save-dtype", "float8_e4m3fn", "not a floating-point dtype of 16 bits"),
        ],
    )
    def test_wrong_options_are_sentences(self, pair, tmp_path, family, option, value, sentence):
        options = {"--data": family / "data" / "calibration.jsonl", "--sequences": 3, "--sequence-length": 32}
        options[option] = value
        arguments = [part for pair_ in options.items() for part in pair_]
        result = invoke("fit", *pair, tmp_path / "mapper", *arguments)
        assert result.exit_code != 0
        assert sentence in " ".join(result.output.replace("│", " ").split())
        assert not (tmp_path / "mapper").exists()

    def test_another_tokenizer_on_the_targets_side_is_refused(self, pair, tmp_path, family):
        from transformers import AutoTokenizer

        other = tmp_path / "other"
        build("qwen3").save_pretrained(other)
        tokenizer = AutoTokenizer.from_pretrained(family / "tokenizer")
        tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(other)
        result = invoke("fit", pair[0], other, tmp_path / "mapper", "--data", family / "data" / "calibration.jsonl")
        assert result.exit_code == 1
        assert "tokenizer" in result.output
