"""OpenTelemetry traces of admin calls and of some decisions; off unless ``[tracing]`` names an endpoint.

Needs the extra ``otel``, which nothing else loads. Spans wait in a bounded queue and are sent by a thread of
OpenTelemetry's own; where the collector is away or slow they are lost, and nothing waits for it. A call that
brings a W3C ``traceparent`` becomes part of that trace.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import Message

from specgov.controller.config import TracingConfig
from specgov.proto.v1 import specgov_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from specgov.controller.engine import Engine
    from specgov.controller.step_record import StepRecord

TRACED_CALLS = ("/specgov.v1.ControllerAdmin/", "/specgov.v1.SpeculationController/Decide")
"""What a traced call's path begins with."""
MAX_TEXT_CHARS = 200
"""Of a text in a request; the rest is left out."""
EXPORT_S = 5.0
"""How long sending a batch of spans may take."""


class TracingError(RuntimeError):
    """Traces were asked for and cannot be made; the message says what to do."""


class Tracing:
    """Makes and sends spans.

    Args:
        config: where to, and which share of the decisions.
        exporter: what sends; None is OTLP over gRPC to ``config.endpoint``.
        rng: draws the decisions that are traced.
        wall_clock_ns: nanoseconds since 1970.

    Raises:
        TracingError: the extra ``otel`` is not installed.

    """

    def __init__(
        self,
        config: TracingConfig,
        exporter: SpanExporter | None = None,
        rng: random.Random | None = None,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = exporter or _otlp_exporter(config)
        except ImportError as error:
            raise TracingError(
                f"tracing.endpoint is set, but {error.name} is not installed: pip install 'specgov[otel]'"
            ) from error
        self._share = config.decisions_share
        self._rng = rng or random.Random()  # noqa: S311 it samples, and guards nothing
        self._wall_clock_ns = wall_clock_ns
        # All is given here, so that variables meant for other programs change neither sampling nor bounds.
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({"service.name": "specgov"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=config.queue_spans,
                max_export_batch_size=min(512, config.queue_spans),
                schedule_delay_millis=1000.0,
                export_timeout_millis=1000.0 * EXPORT_S,
            )
        )
        self._tracer = self._provider.get_tracer("specgov.controller")
        self._propagator = TraceContextTextMapPropagator()

    def decided(
        self, engine: Engine, records: Sequence[StepRecord], decision: pb.Decision, seconds: float
    ) -> None:
        """Trace this decision, which took ``seconds`` and has just been made, if chance says so."""
        if self._rng.random() >= self._share:
            return
        now_ns = self._wall_clock_ns()
        attributes: dict[str, Any] = {
            "specgov.engine_id": engine.info.engine_id,
            "specgov.decision_id": decision.decision_id,
            "specgov.known_step_id": decision.known_step_id,
            "specgov.reports": len(records),
            "specgov.num_steps": decision.num_steps,
            "specgov.reason": pb.Reason.Name(decision.reason).removeprefix("REASON_").lower(),
            "specgov.policy": decision.policy,
            "specgov.policy_version": decision.policy_version,
        }
        if records:
            attributes["specgov.batch_size"] = records[-1].step.batch_size
        span = self._tracer.start_span(
            "specgov.decision", attributes=attributes, start_time=now_ns - round(1e9 * seconds)
        )
        span.end(now_ns)

    def interceptor(self) -> grpc.ServerInterceptor:
        """What makes a span of every call that is traced."""
        return _Interceptor(self._call)

    def flush(self) -> None:
        """Send what waits."""
        self._provider.force_flush()

    def close(self, timeout_s: float = 0.5) -> None:
        """Send what waits, for at most ``timeout_s``."""
        thread = threading.Thread(target=self._provider.shutdown, name="specgov-tracing-end", daemon=True)
        thread.start()
        thread.join(timeout_s)

    @contextlib.contextmanager
    def _call(self, path: str, request: Any, context: grpc.ServicerContext) -> Iterator[None]:
        """The span of a call, with the call's status at its end."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        service, _, method = path.lstrip("/").partition("/")
        metadata = {str(key): value for key, value in context.invocation_metadata()}
        attributes: dict[str, Any] = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        attributes |= _asked(request)
        with self._tracer.start_as_current_span(
            f"{service}/{method}",
            context=self._propagator.extract(metadata),
            kind=SpanKind.SERVER,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            code = grpc.StatusCode.UNKNOWN
            try:
                yield
                code = grpc.StatusCode.OK
            except GeneratorExit:
                code = grpc.StatusCode.CANCELLED  # a stream whose reader went away
                raise
            finally:
                code = cast(Any, context).code() or code  # the stubs lack it
                span.set_attribute("rpc.grpc.status_code", code.value[0])
                if code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED):
                    span.set_status(Status(StatusCode.ERROR, code.name))


class _Interceptor(grpc.ServerInterceptor):
    """Wraps the handlers of traced calls, and of no others."""

    def __init__(self, span: Callable[[str, Any, grpc.ServicerContext], Any]) -> None:
        self._span = span

    def intercept_service(self, continuation: Callable[..., Any], handler_call_details: Any) -> Any:
        """The handler, in a span where the call is traced."""
        handler, path = continuation(handler_call_details), handler_call_details.method
        if handler is None or not path.startswith(TRACED_CALLS):
            return handler
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:

            def answer(request: Any, context: grpc.ServicerContext) -> Any:
                with self._span(path, request, context):
                    return handler.unary_unary(request, context)

            return grpc.unary_unary_rpc_method_handler(answer, **codecs)

        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._span(path, request, context):
                yield from handler.unary_stream(request, context)

        return grpc.unary_stream_rpc_method_handler(stream, **codecs)


def _asked(request: Message) -> dict[str, str | int | float | bool]:
    """What a call asks for, as attributes: the fields of its request that hold one plain value each."""
    asked: dict[str, str | int | float | bool] = {}
    for field, value in request.ListFields():
        if field.enum_type is not None and isinstance(value, int):
            known = field.enum_type.values_by_number.get(value)
            value = known.name.partition("_")[2].lower() if known else value
        if isinstance(value, str):
            value = value[:MAX_TEXT_CHARS]
        if isinstance(value, str | int | float | bool):
            asked[f"specgov.{field.name}"] = value
    return asked


def _otlp_exporter(config: TracingConfig) -> SpanExporter:
    """OTLP over gRPC; ``http://`` is without TLS. Headers come from ``OTEL_EXPORTER_OTLP_HEADERS``."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    endpoint = config.endpoint or ""
    return OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_S)
