"""Trained policies that come with the package, a folder each."""
