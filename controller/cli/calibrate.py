"""``specgov calibrate``: a profile from recorded steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from specgov.controller.cli import options, output
from specgov.controller.cli.errors import CliError, UsageError

if TYPE_CHECKING:
    from specgov.policies.profile import Profile
    from specgov.policies.step_time import HardwareSpec, ModelSpec


def calibrate(
    recordings: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE ...]")],
    /,
    *,
    output_path: Annotated[Path, tyro.conf.arg(name="output", aliases=["-o"], metavar="FILE")],
    model: Annotated[str, options.option("NAME|CONFIG.JSON")],
    hardware: Annotated[str, options.option("NAME")],
    draft: Annotated[str, options.option("CONFIG.JSON")] = "",
    draft_name: Annotated[str, options.option("TEXT")] = "",
    name: Annotated[str, options.option("NAME")] = "",
    engine: Annotated[str, options.option("TEXT")] = "",
    graph_batch_sizes: Annotated[str, options.option("N[,N...]")] = "",
    tensor_parallel_size: int = 1,
) -> None:
    """Make a profile of step times from recordings of real steps.

    For example: specgov calibrate steps.csv nospec.csv -o h200-mine.json --model llama-3.1-8b --hardware H200

    A recording is a file of decode steps, or a decision log that the sidecar wrote (file, folder or URL).
    Give those of one model on one kind of machine; a recording of a server without speculation tells what
    tier 0 costs beside it. The same recordings and options give the same file, byte for byte.

    Args:
        recordings: Recordings of steps.
        output_path: The profile to write.
        model: The target: a name of the catalogue, or its config.json.
        hardware: The machine: a name of the catalogue.
        draft: The draft's config.json; default: the catalogue's one-layer EAGLE-3 draft of the model.
        draft_name: The draft, in words; default: a decision log's.
        name: The profile's name; default: the output's, without .json.
        engine: The engine and its version, in words; default: a decision log's.
        graph_batch_sizes: CUDA-graph batch sizes, to which a batch is padded; default: a decision log's.
        tensor_parallel_size: GPUs that share the model.

    """
    from specgov.env.calibration import CalibrationError, Setup, write_profile
    from specgov.env.calibration import calibrate as make
    from specgov.env.recording import RecordingError, read_recording
    from specgov.policies.step_time import StepTimeError

    if not recordings:
        raise UsageError("calibrate: name at least one recording")
    if tensor_parallel_size < 1:
        raise UsageError("--tensor-parallel-size must be 1 or more")
    sizes = options.numbers("--graph-batch-sizes", graph_batch_sizes, int) if graph_batch_sizes else []
    target = _model(model, "--model")
    setup = Setup(
        name=name or output_path.name.removesuffix(".json"),
        hardware=_hardware(hardware),
        engine=engine,
        model=target,
        draft=_draft(draft, target),
        draft_name=draft_name,
        tensor_parallel_size=tensor_parallel_size,
        graph_batch_sizes=tuple(sizes),
    )
    try:
        profile = make([read_recording(path) for path in recordings], setup)
    except (RecordingError, CalibrationError, StepTimeError) as error:
        raise CliError(f"calibrate: {error}") from error
    write_profile(profile, output_path)
    _report(profile, output_path)


def _report(profile: Profile, path: Path) -> None:
    facts = profile.facts
    console = output.console()
    console.print(
        f"{path}: {facts['measured_cells']} cells measured, {facts['extrapolated_cells']} extrapolated"
    )
    for source in facts["recordings"]:
        rejected = ", ".join(f"{cause} {count}" for cause, count in source["rejected"].items()) or "none"
        console.print(f"  {source['file']}: {source['used']} of {source['rows']} steps used; not: {rejected}")
    console.print(f"  outliers {facts['outliers']}, medians smoothed {len(facts['smoothed_cells'])}")
    for cell in facts["dropped_cells"]:
        console.print(f"  too few steps: {cell}")
    cost, source = profile.prefill, facts["prefill"]
    of_chunk = source.get("ms_per_chunk_from", "parametric model")
    console.print(
        f"  prefill: {cost.fixed_ms:g} ms a chunk (by: {of_chunk}), "
        f"{cost.ms_per_token:g} ms a token (by: {source['ms_per_token_from']})"
    )
    error = facts["parametric_error"]
    console.print(
        f"  parametric model: error {error['median']:.1%} median, {error['p95']:.1%} 95th percentile"
    )


def _model(text: str, option: str) -> ModelSpec:
    from specgov.policies.step_time import MODELS, StepTimeError, model_from_config

    if text in MODELS:
        return MODELS[text]
    if not text.endswith(".json"):
        raise UsageError(
            f"{option}: there is no model {text!r}; there are {', '.join(MODELS)}, or give a config.json"
        )
    path = Path(text)
    try:
        return model_from_config(json.loads(path.read_text(encoding="utf-8")), path.resolve().parent.name)
    except (OSError, ValueError, AttributeError, StepTimeError) as error:
        raise CliError(f"{option}: cannot use {text}: {error}") from error


def _draft(text: str, target: ModelSpec) -> ModelSpec:
    from specgov.policies.step_time import DRAFTS

    if text:
        return _model(text, "--draft")
    if target.name not in DRAFTS:
        raise UsageError(
            f"--draft: the catalogue has no draft for {target.name}; give the draft's config.json"
        )
    return DRAFTS[target.name]


def _hardware(text: str) -> HardwareSpec:
    from specgov.policies.step_time import HARDWARE

    if text not in HARDWARE:
        raise UsageError(f"--hardware: there is no machine {text!r}; there are {', '.join(HARDWARE)}")
    return HARDWARE[text]
