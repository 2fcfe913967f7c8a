"""Two processes that share a batch train the mapper that one process with the whole batch does."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from .processes import run_two


ROOT = Path(__file__).resolve().parent.parent
FAMILY = ROOT / "examples" / "tiny_family"


def run(folder, batch_size):
    """Trains on fixed rows and saves the mapper; every process of a run calls it."""
    from hf_kvtransfer import KVMapper
    from hf_kvtransfer.training import KVMapperTrainer, KVTrainingArguments

    torch.manual_seed(0)
    source, target = (
        AutoModelForCausalLM.from_pretrained(FAMILY / name, dtype=torch.float32) for name in ("small", "large")
    )
    mapper = KVMapper.for_pair(source, target, support=[[0], [1], [1], [2], [3], [3]])
    for parameter in mapper.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    rows = [{"input_ids": row} for row in torch.randint(10, 200, (8, 24))]
    args = KVTrainingArguments(
        str(folder),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=2,
        max_steps=3,
        logging_steps=3,
        learning_rate=1.0,
        optim="sgd",
        max_grad_norm=0.1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        attention_weight=0.5,
        kl_weight=0.5,
        queries=4,
        shortest_context=4,
        longest_continuation=8,
    )
    trainer = KVMapperTrainer(mapper, args, source=source, target=target, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.save_model()
    return mapper, trainer.evaluate(), trainer.state.log_history


def test_two_processes_are_one(tmp_path):
    mapper, measured, history = run(tmp_path / "one", batch_size=4)
    run_two("tests.test_training_ddp", str(tmp_path / "two"))

    from hf_kvtransfer import KVMapper

    together = KVMapper.from_pretrained(tmp_path / "two").state_dict()
    for name, tensor in mapper.state_dict().items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-5, atol=1e-5)
    figures = torch.load(tmp_path / "two" / "figures.pt")
    for name in ("eval_content", "eval_attention", "eval_kl", "eval_agreement"):
        assert abs(figures["measured"][name] - measured[name]) < 1e-4
    for name in ("content", "attention", "kl"):
        logged = [next(entry[name] for entry in each if "loss" in entry) for each in (figures["history"], history)]
        assert abs(logged[0] - logged[1]) < 1e-4


if __name__ == "__main__":
    _, found, log_history = run(sys.argv[1], batch_size=2)
    assert torch.distributed.get_world_size() == 2
    if torch.distributed.get_rank() == 0:
        torch.save({"measured": found, "history": log_history}, Path(sys.argv[1]) / "figures.pt")
    torch.distributed.destroy_process_group()
