"""Settings that every test shares."""

import os

from hypothesis import settings

# The same examples on every run and machine, so that a red test stays red; shared cores make deadlines meaningless.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

# Configurations are files of ours: a test that reaches for a model hub is wrong, and says so at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Tests leave the user's cache of traced graphs alone; those of the cache itself name a folder of their own.
os.environ.setdefault("PLANNER_CACHE", "off")
