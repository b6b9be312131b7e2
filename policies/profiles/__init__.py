"""Bundled profiles: what steps cost on hardware that was measured."""
