"""Several processes that share a calibration sum what one does, go on where they stopped, and keep out of each other's
way."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvtransfer import KVMapper
from hf_kvtransfer.calibration import CalibrationStatistics, FeatureLayout, collect, passes
from hf_kvtransfer.calibration.processes import Shard
from hf_kvtransfer.errors import CalibrationError

from .processes import free_port, run_two
from .test_recipes import tensors_of


ROOT = Path(__file__).resolve().parent.parent
FAMILY = ROOT / "examples" / "tiny_family"
TEXTS = [f"Text {i} tells how {i} things became {i * i} things, and who counted them. " * 4 for i in range(60)]
SETTINGS = {"sequence_length": 32, "token_stride": 2, "batch_size": 2, "progress": False}
# 11 sequences for 2 processes that read 2 at a time: shares and batches that don't come out even.
WISHES = {"num_sequences": 11, "attention_rows": True, "sample_tokens": 64, "heldout_fraction": 0.3}
FITTED = {
    **SETTINGS,
    "num_sequences": 12,
    "preset": "cachebridge2026",
    "k": 2,
    "ridge_lambda": 1.0,
}
LAYOUT = FeatureLayout(joint=True, window=1, anchors=(1,))


def load():
    pair = [
        AutoModelForCausalLM.from_pretrained(FAMILY / name, dtype=torch.float32).eval() for name in ("small", "large")
    ]
    return *pair, AutoTokenizer.from_pretrained(FAMILY / "small")


def gather(folder=None, **changes):
    return collect(*load(), TEXTS, layout=LAYOUT, checkpoint_dir=folder, **{**SETTINGS, **WISHES, **changes})


def assert_same(one, two):
    assert one.tokens == two.tokens
    assert one.calibration == two.calibration
    mine, theirs = tensors_of(one), tensors_of(two)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        expected = theirs[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7 * (1 + float(expected.abs().max())), msg=name)
    assert one.sample.description() == two.sample.description()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What two processes made, and printed: see the end of this file."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "text.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    outputs = run_two("tests.test_fitting_processes", str(folder), free_port())
    return folder, outputs


def test_two_processes_sum_what_one_does(shared):
    """Interrupted after a save of one and none of the other, and gone on with."""
    folder, outputs = shared
    assert "went on after 4 sequences" in outputs[0]
    assert "went on after 0 sequences" in outputs[1]
    assert_same(CalibrationStatistics.load(folder / "whole"), gather())
    assert not [part for part in (folder / "whole").iterdir() if part.is_dir()]


def test_what_one_has_summed_two_go_on_with_and_the_other_way_round(shared, tmp_path):
    folder, _ = shared
    further = gather(num_sequences=15)
    assert_same(CalibrationStatistics.load(folder / "further"), further)
    shutil.copytree(folder / "whole", tmp_path / "one")
    assert_same(gather(tmp_path / "one", num_sequences=15), further)


def test_unfinished_parts_of_two_are_not_for_one(shared):
    folder = shared[0] / "interrupted"
    with pytest.raises(CalibrationError, match="by another number of processes"):
        gather(folder)
    assert_same(gather(folder, resume=False), gather())
    assert not [part for part in folder.iterdir() if part.is_dir()]


def test_the_command_fits_the_same_mapper_with_two_processes(shared):
    folder, outputs = shared
    assert ["saved in" in output for output in outputs] == [True, False]
    source, target, tokenizer = load()
    alone = KVMapper.fit(source, target, str(folder / "text.txt"), tokenizer=tokenizer, **FITTED)
    together = KVMapper.from_pretrained(folder / "mapper")
    for name, tensor in together.state_dict().items():
        torch.testing.assert_close(tensor, alone.state_dict()[name], rtol=1e-3, atol=1e-5)
    assert together.config.calibration == alone.config.calibration


def test_every_sequence_is_read_once_and_the_sample_by_the_first():
    for world in (1, 2, 3, 5):
        shards = [Shard(rank, world) for rank in range(world)]
        for index in range(20):
            assert sum(shard.owns(index, False) for shard in shards) == 1
            assert [shard.owns(index, True) for shard in shards] == [True] + [False] * (world - 1)


def test_two_collections_do_not_write_to_one_folder(tmp_path, monkeypatch):
    refused = []

    class Busy(passes.Passes):
        def add(self, *arguments):
            if not refused:
                with pytest.raises(CalibrationError, match="Another process is collecting statistics in") as caught:
                    gather(tmp_path)
                refused.append(caught)
            return super().add(*arguments)

    monkeypatch.setattr(sys.modules["hf_kvtransfer.calibration.collect"], "Passes", Busy)
    whole = gather(tmp_path)
    assert refused
    # It is let go of at the end, and by whoever dies.
    held = "import sys, time, filelock; l = filelock.FileLock(sys.argv[1]); l.acquire(); print('held'); time.sleep(60)"
    lock = str(tmp_path / ".lock")
    holder = subprocess.Popen([sys.executable, "-u", "-c", held, lock], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(CalibrationError, match="Another process is collecting statistics in"):
        gather(tmp_path)
    holder.kill()
    holder.wait()
    assert_same(gather(tmp_path), whole)


def everything(folder, port):
    """What each of two processes does."""
    from hf_kvtransfer.cli import app

    # The command joins the others by itself …
    wishes = ["--data", folder / "text.txt", "--sequences", 12, "--sequence-length", 32, "--batch-size", 2]
    wishes += [
        "--preset",
        "cachebridge2026",
        "--k",
        2,
        "--ridge-lambda",
        1.0,
        "--token-stride",
        2,
        "--dtype",
        "float32",
    ]
    arguments = ["fit", FAMILY / "small", FAMILY / "large", folder / "mapper", *wishes]
    app([str(argument) for argument in arguments], standalone_mode=False)
    # … and others may have started it before.
    os.environ["MASTER_PORT"] = port
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    original, calls, stop_at = passes.Passes.add, [], 3 if rank == 0 else 1

    def add(self, statistics, ids, indices):
        calls.append(statistics.calibration["sequences"])
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        original(self, statistics, ids, indices)

    passes.Passes.add = add
    for name in ("whole", "interrupted"):
        calls.clear()
        try:
            gather(folder / name, checkpoint_every=1)
        except KeyboardInterrupt:
            torch.distributed.barrier()
    stop_at, _ = 0, calls.clear()
    gathered = gather(folder / "whole", checkpoint_every=1)
    print(f"went on after {calls[0]} sequences")
    # All have all of it.
    assert sum(gathered.tokens.values()) == gathered.calibration["sequences"] * 16
    if rank == 0:
        shutil.copytree(folder / "whole", folder / "further")
    torch.distributed.barrier()
    gather(folder / "further", num_sequences=15)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    everything(Path(sys.argv[1]), sys.argv[2])
