"""Drills: strangers' files, kill -9, Ctrl-C, hostile names, the same search many times (docs/reliability.md)."""
