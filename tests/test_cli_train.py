"""`hf-kvtransfer train`, from the shell's arguments to a mapper that loads, and its help."""

import json

from typer.testing import CliRunner

from hf_kvtransfer import KVMapper
from hf_kvtransfer.cli import app


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_fitted_mapper_is_trained_and_loads(family, family_model, family_tokenizer, tmp_path):
    text = family / "data" / "calibration.jsonl"
    fitted = KVMapper.fit(
        family_model("small"),
        family_model("large"),
        str(text),
        tokenizer=family_tokenizer,
        preset="heo2026",
        k=2,
        sequence_length=32,
        num_sequences=8,
    )
    fitted.save_pretrained(tmp_path / "fitted")
    result = run(
        "train", "--mapper", tmp_path / "fitted", "--source", family / "small", "--target", family / "large",
        "--text", text, "--sequence_length", 32, "--train_sequences", 4, "--eval_sequences", 2, "--max_steps", 2,
        "--learning_rate", 1e-3, "--output_dir", tmp_path / "trained", "--report_to", "none", "--use_cpu", True,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    trained = KVMapper.from_pretrained(tmp_path / "trained")
    assert trained.config.calibration["training"]["steps"] == 2
    assert any((one != other).any() for one, other in zip(fitted.parameters(), trained.parameters(), strict=True))
    after = json.loads((tmp_path / "trained" / "eval_results.json").read_text())
    states = json.loads((tmp_path / "trained" / "trainer_state.json").read_text())["log_history"]
    before = next(entry for entry in states if "eval_content" in entry)
    assert before["step"] == 0
    assert f"{before['eval_content']:.5f}" != f"{after['eval_content']:.5f}"
    shown = [line.split() for line in result.output.splitlines() if "content" in line]
    assert ["content", f"{before['eval_content']:.5f}", f"{after['eval_content']:.5f}"] in [
        [part for part in line if part != "|"] for line in shown
    ]
    assert "on 2 held-out rows" in result.output
    # What the closed form had is under its own name.
    assert trained.config.scores["closed_form"]["r2"] == fitted.config.scores["r2"]
    assert "r2" not in trained.config.scores


def test_without_rows_held_out_losses_before_and_after_are_those_of_training_rows(family, family_model, tmp_path):
    text = family / "data" / "calibration.jsonl"
    mapper = KVMapper.for_pair(family_model("small"), family_model("small"))
    mapper.set_as_identity().save_pretrained(tmp_path / "identity")
    result = run(
        "train", "--mapper", tmp_path / "identity", "--source", family / "small", "--target", family / "small",
        "--text", text, "--sequence_length", 32, "--train_sequences", 4, "--eval_sequences", 0, "--max_steps", 1,
        "--scale_rows", 3, "--output_dir", tmp_path / "trained", "--report_to", "none", "--use_cpu", True,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "on 3 rows, which were trained on" in result.output
    loss = next(line for line in result.output.splitlines() if line.replace("|", " ").split()[:1] == ["loss"])
    assert float(loss.replace("|", " ").split()[1]) < 1e-5  # an identity is exact before


def test_every_training_argument_is_in_the_help(capfd):
    result = run("train", "--help")
    shown = result.output + capfd.readouterr().out
    assert result.exit_code == 0
    for name in (
        "--mapper",
        "--content_weight",
        "--kl_weight",
        "--gradient_accumulation_steps",
        "--deepspeed",
        "--bf16",
    ):
        assert name in shown


def test_what_cannot_be_trained_is_a_sentence(family, tmp_path):
    result = run(
        "train", "--mapper", tmp_path / "nothing", "--source", family / "small", "--target", family / "large",
        "--output_dir", tmp_path / "trained",
    )  # fmt: skip
    assert result.exit_code == 1
    assert "Traceback" not in result.output
