"""How long conversions and prefills take: measured, against the floor of the machine, and predicted."""

from .measure import DEFAULT_LENGTHS, DEFAULT_TRIALS, measure_latency
from .rates import MachineRates, measure_rates


__all__ = ["DEFAULT_LENGTHS", "DEFAULT_TRIALS", "MachineRates", "measure_latency", "measure_rates"]
