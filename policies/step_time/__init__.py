"""What a step costs: a measured table, a parametric model, and the two together."""

from specgov.policies.step_time.grid import StepGrid, StepTimeError
from specgov.policies.step_time.noise import PrefillCost, StepNoise
from specgov.policies.step_time.parametric import Coefficients, ParametricStepTime, roofline_prior
from specgov.policies.step_time.residual import ResidualStepTime
from specgov.policies.step_time.specs import (
    DRAFTS,
    HARDWARE,
    MODELS,
    HardwareSpec,
    ModelSpec,
    model_from_config,
)
from specgov.policies.step_time.table import TableStepTime

__all__ = [
    "DRAFTS",
    "HARDWARE",
    "MODELS",
    "Coefficients",
    "HardwareSpec",
    "ModelSpec",
    "ParametricStepTime",
    "PrefillCost",
    "ResidualStepTime",
    "StepGrid",
    "StepNoise",
    "StepTimeError",
    "TableStepTime",
    "model_from_config",
    "roofline_prior",
]
