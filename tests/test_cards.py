"""The model card says what the mapper and its report say, is valid, keeps what people wrote, and its snippet runs."""

import json
import re
import shutil

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from typer.testing import CliRunner

from hf_kvtransfer import EvidenceError, KVMapper, KVMapperConfig, MapperFileError
from hf_kvtransfer._compat import TRANSFORMERS_VERSION
from hf_kvtransfer.card_metadata import TASK_NAME
from hf_kvtransfer.cards import model_card, write_card
from hf_kvtransfer.cli import app
from hf_kvtransfer.evidence import EVALUATION, summary_of
from hf_kvtransfer.report import TransferReport
from hf_kvtransfer.report.verdict import judge

from .architectures import build
from .conftest import FAMILY
from .test_evidence import figure, measured, report_of


PNG = b"\x89PNG\r\n\x1a\n"
BLOCKS = ("summary", "usage", "fit", "results", "limits", "license", "citation")


@pytest.fixture(scope="module")
def on_hub():
    """The configuration of a mapper between two checkpoints of the Hub, as a fit leaves it."""
    mapper = KVMapper.for_pair(
        build("llama"), build("qwen3", seed=1), support=[[0], [0, 1], [1, 2]], k=2, preset="heo2026", ridge_lambda=0.01
    )
    config = mapper.config
    config.source_geometry["checkpoint"], config.source_revision = "org/small-2B", "a" * 40
    config.target_geometry["checkpoint"], config.target_revision = "org/large-9B", "b" * 40
    config.calibration = {
        "dataset": "HuggingFaceFW/fineweb-edu (sample-10BT)",
        "sequences": 500,
        "sequence_length": 1024,
        "token_stride": 4,
        "tokens": {"fit": 115_200, "heldout": 12_800},
        "versions": {"hf_kvtransfer": "0.1.0"},
    }
    return config


@pytest.fixture(scope="module")
def report(on_hub):
    return report_of(
        on_hub,
        measured("questions: terse"),
        measured(
            "text",
            native=3.2,
            alone=4.1,
            transferred=3.25,
            nothing=4.0,
            gap=0.94,
            metric="nll",
            kind="text",
            unit="nats per token",
            higher_is_better=False,
            chance=None,
            normalised_retention=None,
        ),
        fidelity={
            "r2": {"keys": [[0.9, 0.8]], "values": [[0.7, None]]},
            "cosine": [[0.95, 0.97]],
            "kl": figure(0.012, 0.002),
            "agreement": figure(0.97, 0.01),
            "chunks": 40,
        },
        settings={"texts": "org/wikitext", "split": "test", "questions": "stories.jsonl"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A mapper of the tiny family, fitted on a little text."""
    from hf_kvtransfer.loading import load_model, load_tokenizer

    folder = tmp_path_factory.mktemp("fitted") / "mapper"
    mapper = KVMapper.fit(
        load_model(str(FAMILY / "small")),
        load_model(str(FAMILY / "large")),
        str(FAMILY / "data" / "calibration.jsonl"),
        tokenizer=load_tokenizer(str(FAMILY / "small")),
        anchor_layers=1,
        sequence_length=64,
        num_sequences=20,
        token_stride=1,
    )
    mapper.save_pretrained(folder)
    return folder


@pytest.fixture
def saved(folder, tmp_path):
    """A copy of it, and a report of it in another folder."""
    KVMapper.from_pretrained(folder, min_gap_recovered=False).save_pretrained(tmp_path / "mapper")
    report = report_of(KVMapperConfig.from_pretrained(folder), measured("look-ups", gap=0.91))
    report.save(tmp_path / "report")
    (tmp_path / "report" / "report.md").write_text("# Report\n")
    (tmp_path / "report" / "figures").mkdir()
    (tmp_path / "report" / "figures" / "layers.png").write_bytes(PNG)
    return tmp_path / "mapper", tmp_path / "report"


def block(card, name):
    found = re.search(
        rf"<!-- hf_kvtransfer: begin {name} -->\n(.*?)<!-- hf_kvtransfer: end {name} -->", str(card), re.DOTALL
    )
    return found[1]


class TestWhatItSays:
    def test_both_checkpoints_are_linked_with_their_revisions(self, on_hub):
        card = model_card(on_hub)
        assert card.data.base_model == ["org/small-2B", "org/large-9B"]
        for name, revision in (("org/small-2B", "a" * 40), ("org/large-9B", "b" * 40)):
            assert f"[{name}](https://huggingface.co/{name}) | `{revision}`" in block(card, "summary")
            assert f'from_pretrained("{name}", revision="{revision}")' in block(card, "usage")
        assert card.data.base_model_relation == "adapter"
        assert card.data.library_name == "hf_kvtransfer"
        assert card.data.datasets == ["HuggingFaceFW/fineweb-edu"]
        assert "kv-cache-transfer" in card.data.tags

    def test_how_it_was_fitted(self, on_hub):
        fit = block(model_card(on_hub), "fit")
        parameters = KVMapper(on_hub).num_parameters()
        for words in (
            "`heo2026`", "0.01", "HuggingFaceFW/fineweb-edu", "115,200 fitted, 12,800 held out", f"{parameters:,}",
            "500 of 1,024 tokens, one in 4 of which is used", "1 to 2 source layers each, all KV heads",
            "% of the operations of the target's prefill",
        ):  # fmt: skip
            assert words in fit, words

    def test_every_figure_of_the_report_is_in_the_table_with_its_interval(self, on_hub, report):
        results = block(model_card(on_hub, report), "results")
        verdict = judge(report.measures)
        assert f"**{verdict.headline}**" in results
        assert all(f"- {sentence}" in results for sentence in verdict.sentences)
        for words in (
            "| **transferred** | 90.0 % [85.0, 95.0] |",
            "| different document | 0.0 % [−5.0, 5.0] |",
            "| **transferred** | 3.250 [3.200, 3.300] |",
            "| *gap recovered* | 87.5 % [82.5, 92.5] |",
            "| *gap recovered* | 94.0 % [89.0, 99.0] |",
        ):
            assert words in results, words
        assert "0.012 [0.010, 0.014]" in results
        for name in report.measures[0]["conditions"]:
            assert name in results

    def test_every_metric_is_in_the_index(self, on_hub, report):
        found = {(one.dataset_name, one.metric_name): one for one in model_card(on_hub, report).data.eval_results}
        assert found["questions: terse (stories.jsonl)", "accuracy"].metric_value == 0.9
        assert found["questions: terse (stories.jsonl)", "accuracy"].metric_args == {
            "n": 40,
            "interval_95": [0.85, 0.95],
        }
        text = found["text (org/wikitext)", "nll"]
        assert (text.metric_value, text.dataset_type, text.dataset_split) == (3.25, "org/wikitext", "test")
        assert found["text (org/wikitext)", "nll: gap recovered"].metric_value == 0.94
        assert found["questions: terse (stories.jsonl)", "accuracy: retention above chance"].metric_value == 0.89
        assert found["fidelity (org/wikitext)", "R² of keys"].metric_value == pytest.approx(0.85)
        assert found["fidelity (org/wikitext)", "R² of values"].metric_value == pytest.approx(0.7)
        assert found["fidelity (org/wikitext)", "top-1 agreement with native"].metric_value == 0.97

    def test_without_a_report_it_says_that_nobody_knows(self, on_hub):
        card = model_card(on_hub)
        assert "Nobody has measured what this mapper keeps." in block(card, "results")
        assert card.data.eval_results is None

    def test_the_summary_in_the_configuration_is_shown_where_the_report_is_gone(self, on_hub, report):
        config = KVMapperConfig.from_dict(on_hub.to_dict())
        config.scores = {EVALUATION: summary_of(report)}
        card = model_card(config)
        assert judge(report.measures).headline.rstrip(".") in block(card, "results")
        assert "| **transferred** | 90.0 % [85.0, 95.0] |" in block(card, "results")
        assert "accuracy: gap recovered" in [one.metric_name for one in card.data.eval_results]

    def test_a_checkpoint_in_a_folder_is_no_base_model(self, folder):
        config = KVMapperConfig.from_pretrained(folder)
        card = model_card(config, source="models/small")
        assert card.data.base_model is None
        assert 'from_pretrained("models/small")' in block(card, "usage")
        assert 'from_pretrained("large")' in block(card, "usage")
        assert "its first layer, over the whole context and the first 4 tokens" in block(card, "fit")
        assert str(FAMILY) not in str(card)

    def test_a_path_of_the_machine_that_measured_is_not_shown(self, folder):
        config = KVMapperConfig.from_pretrained(folder)
        report = report_of(config, source="/somewhere/small", target="models/large")
        card = str(model_card(config, report))
        assert "/somewhere" not in card
        assert 'from_pretrained("models/large")' in card

    def test_hostile_names_stay_names(self, on_hub, report):
        config = KVMapperConfig.from_dict(on_hub.to_dict())
        config.calibration["dataset"] = "a | b\n<!-- hf_kvtransfer: end fit --> {{ 7 * 7 }}"
        card = model_card(config, report, source='x", evil("')
        assert "a \\| b <! -- hf_kvtransfer: end fit -- > {{ 7 * 7 }}" in block(card, "fit")
        compile(re.search(r"```python\n(.*?)```", str(card), re.DOTALL)[1], "snippet", "exec")
        assert model_card(config, report, existing=card, source='x", evil("').content == card.content


class TestValidity:
    """What `ModelCard.validate` asks of the Hub needs a network; this is what the library itself checks."""

    @pytest.mark.parametrize("is_measured", [True, False])
    def test_it_is_read_back_as_it_was_written(self, on_hub, report, tmp_path, is_measured, caplog):
        card = model_card(on_hub, report if is_measured else None)
        card.save(tmp_path / "README.md")
        loaded = ModelCard.load(tmp_path / "README.md")
        assert loaded.data.to_dict() == card.data.to_dict()
        assert loaded.text == card.text
        assert str(loaded) == str(card)
        assert not [record for record in caplog.records if record.name.startswith("huggingface_hub")]

    def test_the_results_survive_the_way_to_an_index_and_back(self, on_hub, report):
        results = model_card(on_hub, report).data.eval_results
        index = eval_results_to_model_index("name", results)
        assert json.loads(json.dumps(index)) == index
        assert model_index_to_eval_results(index) == ("name", results)
        assert all(re.fullmatch(r"[\w./-]+", one.dataset_type) for one in results)
        assert all(re.fullmatch(r"[a-z0-9_]+", one.metric_type) for one in results)
        keys = [(one.dataset_type, one.metric_type) for one in results]
        assert len(keys) == len(set(keys))

    def test_the_metadata_are_those_that_the_library_knows(self, on_hub, report):
        values = model_card(on_hub, report).data.to_dict()
        assert ModelCardData(**values).to_dict() == values

    def test_nothing_is_missing_from_the_template(self, on_hub, report):
        card = str(model_card(on_hub, report, figures=["figures/layers.png"]))
        assert [name for name in BLOCKS if block(card, name) is None] == []
        assert "![R² and attention cosine by target layer](figures/layers.png)" in card
        assert "None" not in card.replace("None of", "")
        assert "\n\n\n\n" not in card


class TestWhatPeopleWrote:
    def test_prose_is_kept_and_generated_blocks_are_written_again(self, on_hub, report):
        first = str(model_card(on_hub))
        edited = first.replace("## Results", "## Results\n\nWe like them.").replace("## Limits", "## Known limits")
        edited = edited.replace("Nobody has measured", "Everybody has measured")
        second = str(model_card(on_hub, report, existing=edited))
        assert "## Results\n\nWe like them." in second
        assert "## Known limits" in second
        assert "Everybody has measured" not in second
        assert judge(report.measures).headline in second
        assert second == str(model_card(on_hub, report, existing=second))

    def test_a_block_that_was_taken_out_stays_out(self, on_hub, report):
        first = str(model_card(on_hub, report))
        without = re.sub(r"<!-- hf_kvtransfer: begin license.*?end license -->", "Apache-2.0.", first, flags=re.DOTALL)
        second = str(model_card(on_hub, report, existing=without))
        assert "begin license" not in second
        assert "Apache-2.0." in second

    def test_a_card_of_somebody_else_is_kept_above(self, on_hub):
        card = model_card(on_hub, existing="---\nlicense: mit\n---\n# My mapper\n\nHello.\n")
        assert str(card).index("Hello.") < str(card).index("begin summary")
        assert card.data.license == "mit"
        assert card.data.library_name == "hf_kvtransfer"
        assert "# My mapper" in str(model_card(on_hub, existing="# My mapper"))

    def test_metadata_that_is_not_generated_is_kept(self, on_hub, report):
        mine = EvalResult("text-generation", "mine", "Mine", "accuracy", 0.5, task_name="My own")
        first = model_card(on_hub, report)
        first.data.license, first.data.language, first.data["co2"] = "other", ["en"], {"kg": 1}
        first.data.tags.append("mine")
        first.data.pipeline_tag = "other"
        first.data.eval_results.append(mine)
        first.data.model_name = "Mine"
        second = model_card(on_hub, None, existing=str(first))
        values = second.data.to_dict()
        assert (values["license"], values["language"], values["co2"]) == ("other", ["en"], {"kg": 1})
        assert values["pipeline_tag"] == "other"
        assert "mine" in values["tags"]
        assert second.data.eval_results == [mine]
        assert second.data.model_name == "Mine"
        third = model_card(on_hub, report, existing=second)
        ours = [one for one in third.data.eval_results if one.task_name == TASK_NAME]
        assert ours == model_card(on_hub, report).data.eval_results
        assert third.data.eval_results[-1] == mine

    @pytest.mark.parametrize("line_break", ["\n", "\r\n"])
    def test_line_ends_stay_what_they_are(self, on_hub, report, line_break):
        first = str(model_card(on_hub)).replace("\n", line_break)
        second = str(model_card(on_hub, report, existing=first))
        assert second.count("\r\n") == (second.count("\n") if line_break == "\r\n" else 0)
        assert second == str(model_card(on_hub, report, existing=second))

    @pytest.mark.parametrize(
        "damage",
        [
            lambda card: card.replace("<!-- hf_kvtransfer: end fit -->\n", ""),
            lambda card: card.replace("<!-- hf_kvtransfer: begin fit -->\n", ""),
            lambda card: card + "\n<!-- hf_kvtransfer: begin fit -->\n<!-- hf_kvtransfer: end fit -->",
            lambda card: card + "\n<!-- hf_kvtransfer: begin more -->",
        ],
    )
    def test_a_marker_without_its_counterpart_is_refused(self, on_hub, damage):
        with pytest.raises(MapperFileError, match="of the existing card has no counterpart, or stands there twice"):
            model_card(on_hub, existing=damage(str(model_card(on_hub))))

    def test_the_marker_that_is_named_is_the_one_without_its_counterpart(self, on_hub):
        card = str(model_card(on_hub)).replace("<!-- hf_kvtransfer: end results -->\n", "")
        with pytest.raises(MapperFileError, match="`<!-- hf_kvtransfer: begin results -->` of the existing card"):
            model_card(on_hub, existing=card)

    @pytest.mark.parametrize("metadata", ["a: [", "- 1", "model-index: 3", "model-index:\n- name: x"])
    def test_metadata_that_cant_be_read_is_refused(self, on_hub, metadata):
        with pytest.raises(MapperFileError, match="The metadata of the existing card can't be read"):
            model_card(on_hub, existing=f"---\n{metadata}\n---\nHello.\n")


class TestFolders:
    def test_one_command_makes_a_folder_with_report_figures_and_card(self, saved):
        folder, report = saved
        result = CliRunner().invoke(app, ["card", str(folder), "--report", str(report), "--repo-id", "org/mapper"])
        assert result.exit_code == 0, result.output
        assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) == [
            "README.md", "config.json", "figures/layers.png", "model.safetensors", "report.json", "report.md",
        ]  # fmt: skip
        card = ModelCard.load(folder / "README.md")
        assert 'KVMapper.from_pretrained("org/mapper")' in card.text
        assert "![R² and attention cosine by target layer](figures/layers.png)" in card.text
        assert card.data.model_name == "mapper"
        KVMapper.from_pretrained(folder, min_gap_recovered=0.8)

    def test_written_again_it_is_the_same(self, saved):
        folder, report = saved
        first = write_card(folder, report).read_bytes()
        assert write_card(folder).read_bytes() == first
        assert write_card(folder, folder).read_bytes() == first

    def test_what_an_earlier_report_left_is_not_shown_beside_the_new_one(self, saved):
        folder, report = saved
        write_card(folder, report)
        (report / "figures" / "layers.png").rename(report / "figures" / "drift.png")
        text = write_card(folder, report).read_text()
        assert "drift.png" in text
        assert "layers.png" not in text

    def test_a_mapper_that_was_changed_since_has_no_evidence(self, saved):
        folder, report = saved
        write_card(folder, report)
        mapper = KVMapper.from_pretrained(folder)
        with torch.no_grad():
            next(mapper.parameters()).add_(1)
        mapper.save_pretrained(folder)
        with pytest.raises(EvidenceError, match="or the weights are others since"):
            write_card(folder)
        (folder / "report.json").unlink()
        assert "Nobody has measured" in write_card(folder).read_text()

    def test_a_report_that_was_put_there_is_not_taken_on_trust(self, saved):
        folder, report = saved
        (folder / "report.json").write_bytes((report / "report.json").read_bytes())
        with pytest.raises(EvidenceError, match="is not the one that the mapper's configuration has a summary of"):
            write_card(folder)
        assert write_card(folder, folder).exists()

    def test_what_is_no_mapper_or_no_text_is_refused(self, saved, tmp_path):
        folder, _ = saved
        result = CliRunner().invoke(app, ["card", str(tmp_path / "nothing")])
        assert result.exit_code == 1
        assert "No mapper's configuration could be read from" in result.output
        (folder / "README.md").write_bytes(b"\xff\xfe\xff")
        with pytest.raises(MapperFileError, match="can't be read .* expected a `README.md` in UTF-8"):
            write_card(folder)

    @pytest.mark.parametrize("damage", ["report.json", "report.md", "figures", "figures/layers.png", "card", "link"])
    def test_a_refusal_leaves_the_folder_as_it_was(self, saved, damage):
        folder, report = saved
        write_card(folder, report)
        if damage == "card":
            (folder / "README.md").write_text("---\na: [\n---\n")
        elif damage == "link":
            (report / "report.md").unlink()
            (report / "report.md").symlink_to(folder / "config.json")
        elif damage == "figures":
            shutil.rmtree(folder / "figures")
            (folder / "figures").write_text("mine")
        else:
            (folder / damage).unlink()
            (folder / damage).mkdir()
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        changed = TransferReport.load(report)
        changed.settings["seed"] = 2
        changed.save(report)
        with pytest.raises(MapperFileError):
            write_card(folder, report)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before

    def test_figures_of_ones_own_stay(self, saved):
        folder, report = saved
        (folder / "figures").mkdir()
        (folder / "figures" / "mine.png").write_bytes(b"mine")
        (folder / "figures" / "drift.png").write_bytes(PNG)
        write_card(folder, report / "report.json")
        assert {path.name for path in (folder / "figures").iterdir()} == {"mine.png", "layers.png"}

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("scores", []),
            ("scores.r2", "high"),
            ("scores.r2.heldout.keys_mean", "high"),
            ("scores.evaluation.kl", "low"),
            ("scores.evaluation.kl.low", "low"),
            ("scores.evaluation.measures", {}),
            ("scores.evaluation.measures.0", "all"),
            ("calibration", []),
            ("calibration.tokens", [1]),
            ("calibration.tokens.fit", "1"),
            ("calibration.versions", ["1"]),
            ("calibration.sequences", True),
            ("digests", ["0"]),
        ],
    )
    def test_a_configuration_edited_by_hand_is_refused_by_the_fields_name(self, saved, path, value):
        folder, report = saved
        write_card(folder, report)
        config = json.loads((folder / "config.json").read_text())
        config["scores"]["evaluation"]["kl"] = figure(0.1)
        place = config
        *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        for step in steps:
            place = place[step]
        place[last] = value
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "report.json").unlink()
        with pytest.raises(MapperFileError, match=f"`{path}` in the mapper's configuration is"):
            write_card(folder)

    def test_what_is_missing_or_null_in_a_configuration_is_not_shown(self, saved):
        folder, report = saved
        write_card(folder, report)
        (folder / "report.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        config["scores"]["r2"]["heldout"]["keys_mean"] = None
        config["scores"]["evaluation"] |= {"kl": {}, "measures": None}
        config["calibration"] |= {"tokens": {"fit": None}, "token_stride": None, "versions": None}
        (folder / "config.json").write_text(json.dumps(config))
        assert "calibration tokens" not in write_card(folder).read_text()


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_the_snippet_runs_as_pasted(saved, allow_deprecated, capsys):
    folder, report = saved
    path = write_card(folder, report, name=str(folder), source=str(FAMILY / "small"), target=str(FAMILY / "large"))
    snippet = re.search(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)[1]
    names = {}
    if TRANSFORMERS_VERSION >= (5, 24):
        allow_deprecated("past_key_values")
    exec(snippet, names)
    assert names["output"].shape[1] == names["inputs"].input_ids.shape[1] + 16
    assert "Where is the kettle? In the" in capsys.readouterr().out
