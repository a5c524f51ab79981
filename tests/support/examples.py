"""Hypothesis examples by profile: `--hypothesis-profile=dev` few, `ci` (the default) some, `long` many.

No profile has a deadline for an example: how long one takes depends on what else the machine does.
"""

import os

from hypothesis import settings

_CI = 100
"""Examples that the profile `ci` has; other numbers are in proportion to it."""


def register_profiles() -> None:
    """Register the profiles, and load `ci`; the command line loads another later."""
    base = settings.get_profile("ci" if "CI" in os.environ else "default")  # hypothesis's own
    settings.register_profile("ci", base, max_examples=_CI, deadline=None)
    settings.register_profile("dev", max_examples=_CI // 5, deadline=None)
    settings.register_profile("long", max_examples=_CI * 10, deadline=None)
    settings.load_profile("ci")


def examples(num: int) -> int:
    """`num` by the profile `ci`; fewer or more by the others."""
    return max(1, num * settings().max_examples // _CI)
