"""The stream client that an engine embeds: submit a report, read the newest decision, never wait."""
