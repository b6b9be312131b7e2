"""One scheduler process of an engine: joins policy, observer, ranks and sidecar; what the hooks call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from specgov.policies.types import Policy
from specgov.proto.v1 import specgov_pb2 as pb
from specgov.sglang_plugin import switch_log, versions
from specgov.sglang_plugin.checks import why_idle
from specgov.sglang_plugin.fallback import default_fallback, fallback_rule
from specgov.sglang_plugin.guarded import Guard
from specgov.sglang_plugin.link import Link, connect, engine_info
from specgov.sglang_plugin.observe import Before, Observer
from specgov.sglang_plugin.orders import ENGINES_RULE, OWN_RULE, Order, RankShare
from specgov.sglang_plugin.policy import EnginesRule, GovernedPolicy
from specgov.sglang_plugin.settings import Settings
from specgov.sglang_plugin.versions import Ranks

_LOG = logging.getLogger("specgov.sglang_plugin")


@final
class Runtime:
    """Made when the plugin is loaded; works from ``start`` on, when the scheduler's loop begins."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.perf_counter) -> None:
        self._settings = settings
        self._clock = clock
        self._governs = settings.mode == "active"
        self.guard = Guard(settings.max_errors)
        self.policy: GovernedPolicy | None = None
        self._tiers: tuple[int, ...] = ()
        self._share = RankShare(OWN_RULE if self._governs else ENGINES_RULE)
        self._alone = True
        self._scheduler: Any = None
        self._link: Link | None = None  # on rank 0 only, like the observer
        self._observer: Observer | None = None
        self._decision_id = 0

    # Start and end.

    def make_policy(self, engines_rule: EnginesRule, initial_steps: int) -> GovernedPolicy:
        """The policy that SGLang gets in the place of ``engines_rule``."""
        tiers = tuple(engines_rule.candidate_steps)
        self._tiers = self._settings.tiers or tiers if self._governs else tiers
        self.policy = GovernedPolicy(
            engines_rule,
            self._tiers,
            self._fallback_rule,
            self._order_for_launch,
            self.guard,
            initial_steps=initial_steps,
            min_steps_between_switches=self._settings.min_steps_between_switches,
            governs=self._governs,
            after_switch=self._trim_records,
        )
        return self.policy

    def start(self, scheduler: Any) -> None:
        """Connect, on rank 0, and say so: the scheduler is ready and its loop begins."""
        facts = versions.server_facts(scheduler.server_args)
        ranks = versions.ranks_of(scheduler)
        reason = why_idle(facts)
        if reason is None and self.policy is None:
            reason = "SGLang did not ask for an adaptive policy: adaptive speculation is not live"
        if reason is not None or self.policy is None:
            self._share = RankShare(ENGINES_RULE)
            if ranks.tp_rank == 0:
                _LOG.warning("Specgov stays off: %s", reason)
            return
        logging.getLogger(versions.SWITCH_LOGGER).addFilter(switch_log.SwitchLines())
        self._scheduler = scheduler
        self._alone = ranks.tp_size == 1
        if ranks.tp_rank == 0:
            graphs = self.policy.graph_batch_sizes
            info = engine_info(self._settings, facts, ranks, scheduler, self._tiers, graphs)
            self._observer = Observer(
                self._clock,
                graphs,
                lambda: versions.kv_use_ratio(scheduler),
                warm_up_comes=not facts.skips_warm_up,
            )
            self._link = Link(connect(self._settings, info))
            self._announce(info, ranks)

    def stop(self) -> None:
        """End the stream: the scheduler's loop is over."""
        link, self._link = self._link, None
        if link is not None:
            link.close(self._observer.last_step_id if self._observer else 0)

    def give_up(self, where: str, error: BaseException) -> None:
        """Leave the tiers to SGLang's rule for good, since the plugin could not start."""
        _LOG.error("Specgov stays off: it could not start (%s: %s: %s)", where, type(error).__name__, error)
        self.guard.tripped = True

    # Each iteration of the scheduler.

    def before_broadcast(self, requests: list[Any] | None) -> list[Any] | None:
        """The requests to broadcast: on rank 0 with the order in front where it changed."""
        if self._observer is not None:
            self._observer.round_begins()
        if requests is None or self._alone or self._scheduler is None:
            return requests
        order, self._decision_id = self._wanted(self._scheduler.forward_ct + 1)
        return self._share.attach(requests, order)

    def after_broadcast(self, requests: list[Any]) -> list[Any]:
        """The requests alone; what came with them counts from the next step on."""
        if not requests:
            return requests
        requests = self._share.detach(requests)
        if self._link is not None:
            self._note_events(self._link, requests)
        return requests

    def before_result(self, batch: Any) -> Before | None:
        """Read what SGLang's processing of a result changes."""
        return None if self._observer is None or self.guard.tripped else self._observer.before(batch)

    def after_result(self, scheduler: Any, batch: Any, result: Any, before: Before | None) -> None:
        """Report a result that SGLang has processed."""
        if self._observer is None or self._link is None or self.policy is None:
            return
        if self.guard.tripped:
            link, self._link = self._link, None
            link.close_aside(self._observer.last_step_id)
            return
        launch = self.policy.finished if before is not None else None
        if launch is not None and launch.num_steps + 1 != result.speculative_num_draft_tokens:
            self.policy.forget_launches()
        report = self._observer.after(scheduler, batch, result, before, launch)
        # SGLang's own rule may use tiers that the sidecar was not told of.
        if report is not None and report.num_steps in self._tiers:
            self._link.client.submit(report)

    def _order_for_launch(self) -> tuple[Order, int]:
        """The order for the step that is being launched: rank 0 alone asks anew, several share the last."""
        if self._alone and self._scheduler is not None:
            return self._wanted(self._scheduler.forward_ct)
        return self._share.in_force, self._decision_id

    def _wanted(self, step_id: int) -> tuple[Order, int]:
        if self.guard.tripped or not self._governs or self._link is None:
            return ENGINES_RULE, 0
        return self._link.wanted(step_id)

    def _note_events(self, link: Link, requests: list[Any]) -> None:
        step_id = self._observer.last_step_id if self._observer else 0
        for request in requests:
            kind = _EVENTS.get(type(request).__name__)
            if kind is not None:
                if self._observer is not None:
                    self._observer.break_interval()
                link.event(kind, step_id)

    def _fallback_rule(self, graph_batch_sizes: Sequence[int]) -> Policy:
        return fallback_rule(self._settings.fallback, self._tiers, graph_batch_sizes)

    def _trim_records(self) -> None:
        try:
            for record in versions.switch_records(getattr(self._scheduler, "server_args", None)):
                switch_log.trim(record)
        except Exception as error:  # noqa: BLE001 it runs while a step is launched
            self.guard.failed("switch", error)

    def _announce(self, info: pb.EngineInfo, ranks: Ranks) -> None:
        fallback = self._settings.fallback or default_fallback(self._tiers)
        _LOG.info(
            "Specgov %s on SGLang %s is live: engine %s, target %s, mode %s, tiers %s, "
            "tensor-parallel ranks %d, fallback %s%s",
            info.client_version,
            info.engine_version,
            info.engine_id,
            self._settings.target,
            self._settings.mode,
            ",".join(map(str, self._tiers)),
            ranks.tp_size,
            fallback if self._governs else "none, SGLang's own rule decides",
            ""
            if versions.parse_version(info.engine_version) <= versions.NEWEST
            else " (this SGLang is newer than any that was tried)",
        )


_EVENTS = {
    **dict.fromkeys(versions.PAUSES, pb.EngineEvent.KIND_PAUSED),
    **dict.fromkeys(versions.RESUMES, pb.EngineEvent.KIND_RESUMED),
    **dict.fromkeys(versions.WEIGHT_UPDATES, pb.EngineEvent.KIND_WEIGHTS_UPDATED),
}
