"""The hooks in SGLang 0.5.9's processes: joins the plugin's runtime with the worker that is live."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

from specgov.sglang_plugin import versions
from specgov.sglang_plugin.checks import why_idle
from specgov.sglang_plugin.errors import PluginError
from specgov.sglang_plugin.hooks import Hooks
from specgov.sglang_plugin.observe import Before
from specgov.sglang_plugin.runtime import Runtime
from specgov.sglang_plugin.settings import Settings, read_settings
from specgov.sglang_plugin.v059 import RELEASE, checks
from specgov.sglang_plugin.v059.steps import Forward, step_without_drafts_v1, step_without_drafts_v2

STEPS_WITHOUT_DRAFTS: dict[str, Callable[[Forward, Any, Any], Any]] = {
    checks.WORKER_V1: step_without_drafts_v1,
    checks.WORKER_V2: step_without_drafts_v2,
}
"""The workers that can be governed, by their dotted names, and their steps at num_steps 0."""
EVENT_LOOPS = (
    "event_loop_normal",
    "event_loop_overlap",
    "event_loop_normal_disagg_decode",
    "event_loop_overlap_disagg_decode",
)
"""Methods of the scheduler; those of prefill workers and of what is refused are left out."""


class Ahead(NamedTuple):
    """What must be read at the launch on ``EAGLEWorker``, where requests come to their end in the forward."""

    before: Before | None
    accepted_so_far: list[int]  # drafts, by request


class Launched(NamedTuple):
    """What a result carries of its step's launch."""

    step_id: int
    ahead: Ahead | None


@final
class ServersRule:
    """What SGLang 0.5.9 does by itself: the tier that the server was started with, in every step."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self.candidate_steps = [0, num_steps]

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Nothing to prepare."""

    def get_steps_for_batch(self, batch_size: int) -> int:  # noqa: ARG002
        """The server's tier."""
        return self._num_steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:  # noqa: ARG002
        """Nothing to learn."""
        return None

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:  # noqa: ARG002
        """Unused: the graphs are SGLang's."""
        return None


@final
class Governor:
    """One process' hooks. Those of the decode steps go on the class that SGLang chose, and on no other."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.runtime = Runtime(settings)
        self._hooks = Hooks(self.runtime)
        self._scheduler: Any = None
        self.bound: type[Any] | None = None
        """The worker's class whose steps are governed; None before SGLang chose one."""

    # At start.

    def around_check(self, original: Callable[..., Any], server_args: Any) -> Any:
        """SGLang checks its arguments in the launcher, before a model is loaded; ours come after its own."""
        result = original(server_args)
        checks.check_start(self._settings, versions.server_facts(server_args), os.environ)
        return result

    def around_create_worker(
        self, original: Callable[..., Any], algorithm: Any, server_args: Any
    ) -> type[Any]:
        """SGLang names the class of the live worker: the only place where hooks on one make sense."""
        worker_class: type[Any] = original(algorithm, server_args)
        if why_idle(versions.server_facts(server_args)) is None:
            self.bind(worker_class)
            num_steps = int(server_args.speculative_num_steps)
            self.runtime.make_policy(ServersRule(num_steps), num_steps)
        return worker_class

    def bind(self, worker_class: type[Any]) -> None:
        """Govern the decode steps of ``worker_class``.

        Raises:
            PluginError: its steps are not known here, or another class is bound already.

        """
        name = f"{worker_class.__module__}.{worker_class.__qualname__}"
        without_drafts = STEPS_WITHOUT_DRAFTS.get(name)
        if without_drafts is None:
            raise PluginError(f"{name} makes the decode steps, and how to switch its drafts off is not known")
        if self.bound is not None:
            raise PluginError(
                f"{name} makes the decode steps, but the hooks are on {self.bound.__qualname__}"
            )
        self.bound = worker_class
        reads_ahead = name == checks.WORKER_V1

        def around_forward(original: Forward, worker: Any, batch: Any) -> Any:
            policy = self.runtime.policy
            if policy is None or batch.is_extend_in_batch or not batch.forward_mode.is_decode():
                return original(worker, batch)
            launched = self._launched(batch, reads_ahead=reads_ahead)
            num_steps = policy.get_steps_for_batch(len(batch.reqs))
            result = without_drafts(original, worker, batch) if num_steps == 0 else original(worker, batch)
            result.specgov_launched = launched
            result.speculative_num_draft_tokens = num_steps + 1
            return result

        wrap(worker_class, "forward_batch_generation", around_forward)

    def around_event_loop(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """Check that what is bound is live, then what the plugin does at the loop of any release."""
        self.check_live(scheduler)
        self._scheduler = scheduler
        if self.runtime.policy is not None:
            graphs = scheduler.tp_worker.model_runner.graph_runner
            self.runtime.policy.set_cuda_graph_bs(None if graphs is None else list(graphs.capture_bs))
        return self._hooks.around_event_loop(original, scheduler)

    def check_live(self, scheduler: Any) -> None:
        """Whether the hooks are on the worker that makes the steps, and its model is one that they suit.

        Raises:
            PluginError: they are not, or it is not; the server ends with these words.

        """
        if self.bound is None:
            return
        live = type(scheduler.model_worker)
        if live is not self.bound:
            raise PluginError(
                f"the hooks are on {self.bound.__qualname__}, but {live.__qualname__} makes the decode "
                "steps: start the server with specgov sglang launch and nothing that changes its worker"
            )
        if scheduler.tp_worker.model_runner.mambaish_config is not None:
            raise PluginError(
                "the model has recurrent layers, whose state SGLang 0.5.9 takes back after a verify only: "
                "unset SPECGOV_TARGET to start without Specgov"
            )

    # Each iteration of the scheduler.

    def around_recv_requests(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """One rank alone has no broadcast: look at its requests as they come."""
        if scheduler.tp_size > 1:
            return original(scheduler)
        return self._hooks.around_broadcast(lambda _receiver, _requests: original(scheduler), None, None)

    def around_broadcast(self, original: Callable[..., Any], requests: Any, *args: Any, **kwargs: Any) -> Any:
        """The broadcast that ``Scheduler.recv_requests`` makes (scheduler.py:1301), with an order in it."""
        return self._hooks.around_broadcast(
            lambda _receiver, sent: original(sent, *args, **kwargs), None, requests
        )

    def around_result(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any
    ) -> Any:
        """Give a decode result what newer releases have in theirs, and report it."""
        launched: Launched | None = getattr(result, "specgov_launched", None)
        if launched is None:
            if self.bound is not None and batch.forward_mode.is_decode():
                self.runtime.guard.failed("observe", PluginError("a decode step went past the hooks"))
            return self._hooks.around_result(original, scheduler, batch, result, *args)
        batch.forward_iter = launched.step_id
        ahead = launched.ahead
        before = self._tried(self.runtime.before_result, batch) if ahead is None else ahead.before
        returned = original(scheduler, batch, result, *args)
        self._tried(self._note_result, scheduler, batch, result, before, ahead)
        return returned

    def _launched(self, batch: Any, *, reads_ahead: bool) -> Launched:
        ahead = None
        if reads_ahead:
            before = self._tried(self.runtime.before_result, batch)
            ahead = Ahead(before, [request.spec_accepted_tokens for request in batch.reqs])
        return Launched(self._scheduler.forward_ct, ahead)

    def _note_result(
        self, scheduler: Any, batch: Any, result: Any, before: Before | None, ahead: Ahead | None
    ) -> None:
        accepted: list[int] = result.accept_length_per_req_cpu
        if ahead is not None:
            # That list is cut where a request came to its end; the requests' own counts are not.
            accepted = [
                r.spec_accepted_tokens - n for r, n in zip(batch.reqs, ahead.accepted_so_far, strict=True)
            ]
        result.num_correct_drafts_per_req_cpu = accepted
        if self.runtime.policy is not None:
            self.runtime.policy.on_verify_complete(accepted, len(accepted))
        self.runtime.after_result(scheduler, batch, result, before)

    def _tried(self, part: Callable[..., Any], *args: Any) -> Any:
        """What ``part`` returns; None where it raises: the scheduler must live."""
        try:
            return part(*args)
        except Exception as error:  # noqa: BLE001 whatever it is
            self.runtime.guard.failed("observe", error)
            return None


def install(environment: Mapping[str, str]) -> None:
    """Set the hooks in this process, before SGLang makes anything; nothing where the plugin is off.

    Raises:
        PluginError: the settings or this SGLang cannot be used; the message says why.

    """
    settings = read_settings(environment)
    if settings is None:
        return
    version = versions.installed_version()
    if versions.parse_version(version) != RELEASE:
        raise PluginError(f"SGLang {version} is installed, and these hooks are for 0.5.9 alone")
    if missing := checks.missing_targets():
        raise PluginError(
            f"SGLang {version} lacks {', '.join(missing)}: unset SPECGOV_TARGET to start without"
        )
    from sglang.srt.managers import scheduler
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    governor = Governor(settings)
    wrap(ServerArgs, "check_server_args", governor.around_check)
    wrap(SpeculativeAlgorithm, "create_worker", governor.around_create_worker)
    wrap(scheduler, "broadcast_pyobj", governor.around_broadcast)
    wrap(scheduler.Scheduler, "recv_requests", governor.around_recv_requests)
    wrap(scheduler.Scheduler, "process_batch_result", governor.around_result)
    for name in EVENT_LOOPS:
        wrap(scheduler.Scheduler, name, governor.around_event_loop)


def wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Put ``hook`` around a function of a class or module; it is called with the function first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(owner, name, wrapped)
