"""Settings that every test shares."""

from hypothesis import settings

# The same examples on every run and machine, so that a red test stays red; shared cores make deadlines meaningless.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
