"""Retention by lm-evaluation-harness: the model type `hf_kvtransfer`, and tasks that need no network."""

from .registration import MODEL, register, run_lm_eval, tasks_path


__all__ = ["MODEL", "register", "run_lm_eval", "tasks_path"]
