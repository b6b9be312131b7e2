"""The stream client that an engine embeds: submit a report, read the newest decision, never wait."""

from specgov.client.client import ClientStats, StreamClient
from specgov.client.errors import ClientError
from specgov.client.messages import Decision, Report, TierRange
from specgov.client.relay import RelayClient
from specgov.client.stream import StreamLimits
from specgov.client.tls import TlsFiles

__all__ = [
    "ClientError",
    "ClientStats",
    "Decision",
    "RelayClient",
    "Report",
    "StreamClient",
    "StreamLimits",
    "TierRange",
    "TlsFiles",
]
