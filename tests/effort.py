"""How much the tests try, in one place: the profiles of hypothesis, the number of examples of a single test, and which
of its parameters are left to the night.

``HYPOTHESIS_PROFILE`` chooses one: ``default``; ``check``, a fifth of the examples, for the inner loop; ``nightly``,
twenty times as many, others each time.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

#: Examples of a test that says nothing else, in the default profile.
_USUAL = 50


def load_profile() -> None:
    """Have hypothesis use the profile that the environment chooses."""
    settings.register_profile(
        "default",
        deadline=None,
        derandomize=True,
        max_examples=_USUAL,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    )
    default = settings.get_profile("default")
    settings.register_profile("check", parent=default, max_examples=_USUAL // 5)
    settings.register_profile("nightly", parent=default, derandomize=False, max_examples=_USUAL * 20)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def examples(count: int) -> int:
    """Examples of a test that tries ``count`` in the default profile.

    Example:
        >>> @settings(max_examples=examples(200))
        ... @given(st.integers())
        ... def test_it(number): ...
    """
    return max(1, count * settings().max_examples // _USUAL)


def nightly_but(always: Collection[int], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: those at the places ``always`` are tried each time, the others with ``-m nightly``.

    Of a product, ``always`` should have each value of each axis at least once.

    Example:
        >>> @pytest.mark.parametrize(("world", "reduce"), nightly_but({0, 3}, itertools.product([1, 2], "ab")))
    """
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    assert max(always) < len(given)
    return [
        pytest.param(*case, marks=[pytest.mark.nightly] * (place not in always)) for place, case in enumerate(given)
    ]
