"""What a step costs: a measured table, a parametric model, and the two together."""

from specgov.policies.step_time.grid import StepGrid, StepTimeError
from specgov.policies.step_time.noise import PrefillCost, StepNoise
from specgov.policies.step_time.table import TableStepTime

__all__ = ["PrefillCost", "StepGrid", "StepNoise", "StepTimeError", "TableStepTime"]
