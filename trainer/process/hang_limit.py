"""When something that has been quick before hangs."""

from __future__ import annotations

_FACTOR = 10.0


def learnt_limit_s(least_s: float, longest_s: float) -> float:
    """Return the seconds after which it hangs.

    Args:
        least_s: a `hang_timeout_s`.
        longest_s: what it has taken at most so far.
    """
    return max(least_s, _FACTOR * longest_s)
