"""Public cases with the decision that they call for, against the oracle's on the roofline prior.

The oracle knows the accept length of each depth that a case states, and picks the depth (0 included) with the
largest ``accept length / T``. Where a case does not name its machine, it is judged only if all machines of
the catalogue lead to the same decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from public_sources import EAGLE_8B, LLAMA_8B, NO_DRAFT, QWEN25_7B, RTX_PRO_6000

from specgov.policies.step_time import (
    DRAFTS,
    HARDWARE,
    MODELS,
    Coefficients,
    HardwareSpec,
    ModelSpec,
    ParametricStepTime,
)

GUARD = ("alarm", "hold")
EVERY_MACHINE = tuple(HARDWARE.values())


@dataclass(frozen=True)
class Case:
    """One situation: ``options`` maps num_steps to the accept length at it.

    ``match`` picks rows of a source by algorithm or accept length; ``miss`` says why a miss is one.
    """

    source: str
    model: ModelSpec
    draft: ModelSpec
    machines: tuple[HardwareSpec, ...]
    options: dict[int, float]
    batch_size: int = 1
    context_tokens: int = 500
    match: str = ""
    note: str = ""
    miss: str = ""


_QWEN3_MOE_4BIT = MODELS["qwen3-30b-a3b"].quantized(0.56)
CASES = (
    Case(
        "sgl-project/sglang#4247",
        LLAMA_8B,
        DRAFTS["llama-3.1-8b"],
        (HARDWARE["H100"],),
        {5: 4.68, 8: 5.39},
        match="EAGLE3",
        note="machine from the thread; trees judged as chains",
        miss="the two depths are within 1 % of each other, closer than the model is right",
    ),
    Case(
        "sgl-project/sglang#4247",
        LLAMA_8B,
        EAGLE_8B,
        (HARDWARE["H100"],),
        {8: 3.76},
        match="EAGLE2",
        note="machine from the thread; a tree judged as a chain",
    ),
    Case(
        "vllm-project/vllm#24343",
        LLAMA_8B,
        DRAFTS["llama-3.1-8b"],
        (HARDWARE["A100-40GB"],),
        {1: 1.63, 32: 2.18},
        note="the draft's vocabulary taken as 32,000",
    ),
    Case(
        "sgl-project/sglang#13376",
        QWEN25_7B,
        NO_DRAFT,
        EVERY_MACHINE,
        {31: 5.86},
        batch_size=142,
        note="32 tokens verified; every machine of the catalogue",
    ),
    *(
        Case(
            "vllm-project/vllm#19254",
            MODELS["qwen3-32b"].quantized(1.0),
            NO_DRAFT,
            EVERY_MACHINE,
            {3: accept_length},
            batch_size=batch,
            match=str(accept_length),
            note="every machine of the catalogue",
        )
        for batch, accept_length in ((337, 2.16), (629, 2.46), (610, 2.83))
    ),
    Case(
        "defilantech/LLMKube#1423",
        _QWEN3_MOE_4BIT,
        DRAFTS["qwen3-30b-a3b"],
        (RTX_PRO_6000,),
        {1: 1.69, 3: 1.69},
        match="EAGLE3",
        note="69 % at the first position, nothing after it; the reporter projected k=1, and did not run it",
    ),
    Case(
        "defilantech/LLMKube#1423",
        _QWEN3_MOE_4BIT,
        NO_DRAFT,
        (RTX_PRO_6000,),
        {5: 2.35},
        match="ngram",
        note="27 % of 5 drafts accepted",
        miss="their step with six rows cost 3.3 plain ones, the model says 1.4; cause not known",
    ),
)


def judge_cases(rows: list[dict[str, str]]) -> dict[str, Any]:
    judged = []
    for row in rows:
        case = next((case for case in CASES if describes(case, row)), None)
        if case is None or not row["expected_decision"] or row["expected_decision"] in GUARD:
            continue
        rates = [relative_rates(case, machine) for machine in case.machines]
        decisions = {max(rate, key=lambda k: (rate[k], -k)) for rate in rates}
        if len({decision > 0 for decision in decisions}) > 1:
            continue
        best = min(decisions)
        shown = ", ".join(f"k={k} {rate:.2f}" for k, rate in rates[0].items() if k)
        judged.append(
            {
                "source": row["source"],
                "expected": row["expected_decision"],
                "oracle": f"spec:k={best}" if best else "no_spec",
                "agrees": agrees(row["expected_decision"], best),
                "speed": f"{shown} on {case.machines[0].name}",
                "note": case.note,
                "miss": "" if agrees(row["expected_decision"], best) else case.miss,
            }
        )
    return {
        "rows": len(rows),
        "guard_inputs": [row for row in rows if row["expected_decision"] in GUARD],
        "predicted": len(judged),
        "agree": sum(entry["agrees"] for entry in judged),
        "judged": judged,
        "not_predicted": "machine, model, depth, batch or accept length not stated, or not in the catalogue",
    }


def describes(case: Case, row: dict[str, str]) -> bool:
    return case.source == row["source"] and case.match in (row["algorithm"], row["accept_len"], "")


def relative_rates(case: Case, machine: HardwareSpec) -> dict[int, float]:
    """Output rate against no speculation, by num_steps."""
    coefficients = Coefficients()
    if case.draft is NO_DRAFT:
        coefficients = Coefficients(draft_pass_ms=0.0, draft_extend_ms=0.0)
    server = ParametricStepTime(case.model, case.draft, machine, 1, coefficients)
    total = np.float64(case.batch_size * case.context_tokens)
    none = float(server.without_speculation().step_ms(case.batch_size, 0, total))
    rates = {0: 1.0}
    for num_steps, accept_length in case.options.items():
        rates[num_steps] = accept_length * none / float(server.step_ms(case.batch_size, num_steps, total))
    return rates


def agrees(expected: str, num_steps: int) -> bool:
    if expected == "no_spec":
        return num_steps == 0
    if expected == "spec":
        return num_steps > 0
    return expected == f"spec:k={num_steps}"
