"""The sidecar: sessions, decisions, decision log, metrics, and the command line."""
