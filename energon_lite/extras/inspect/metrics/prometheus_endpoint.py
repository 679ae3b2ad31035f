"""Sink for Prometheus: a page over HTTP in its text format, which it fetches."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any

from energon_lite.errors import UsageError

__all__ = ["PrometheusEndpoint", "exposition"]

#: Content type of the text format, see https://prometheus.io/docs/instrumenting/exposition_formats.
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Names of numbers that only grow; Prometheus names of such numbers end with ``_total``.
_COUNTERS = re.compile(r"loader_(batches|samples|tokens|skipped|failed|dropped|bytes_read|worker_deaths)")
_GROWING = re.compile(r"loader_(cache_.*|.*_seconds|dataset_samples)")


class PrometheusEndpoint:
    """Address from which Prometheus fetches numbers. A :class:`~energon_lite.loading.MetricsSink`.

    It shows the numbers written last. Its clients occupy at most 32 threads and file descriptors, for 10 s each.

    Only this machine can reach it, unless ``host`` is set; there is no password.

    Args:
        port: the port; 0 for any free one, see ``url``. Each rank of a machine needs its own.
        host: the address to listen at; ``"0.0.0.0"`` for all addresses of the machine.
        labels: labels of all numbers, such as ``{"rank": "3"}``.

    Attributes:
        url: address of the numbers.

    Raises:
        UsageError: the port is in use, or Prometheus does not allow the name of a label.

    Example:
        >>> endpoint = PrometheusEndpoint(9464 + local_rank, labels={"rank": str(rank)})
        >>> loader = get_savable_loader(dataset, metrics=[endpoint])
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1", labels: Mapping[str, str] | None = None):
        self._labels = {name: str(value) for name, value in (labels or {}).items()}
        for name in self._labels:
            if not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) or name == "name":
                raise UsageError(f"{name!r} is no name of a label", fix="letters, digits and _, and not 'name'")
        from energon_lite.extras.inspect.metrics.page_server import PageServer  # slow to import

        self._server = PageServer(host, port, "/metrics", _CONTENT_TYPE)
        self.url = self._server.url

    def write(self, values: Mapping[str, Any]) -> None:
        """Replace the shown numbers."""
        self._server.page.data = exposition({**values, "updated_timestamp_seconds": time.time()}, self._labels).encode()

    def close(self) -> None:
        """Release the port. May be called twice."""
        self._server.close()

    def __enter__(self) -> PrometheusEndpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def exposition(values: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> str:
    """Return numbers in the text format of Prometheus, without values of other types.

    ``loader/stage_seconds/read`` becomes ``energon_lite_loader_stage_seconds_total{name="read"}``: the text after the
    second slash (for others, the first) becomes a label.

    Example:
        >>> print(exposition({"loss": 2.5}), end="")
        # TYPE energon_lite_loss gauge
        energon_lite_loss 2.5
    """
    families: dict[str, list[str]] = {}
    for name, value in values.items():
        if name == "time" or not isinstance(value, (int, float)):
            continue
        metric, own = _named(name)
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in {**(labels or {}), **own}.items())
        families.setdefault(metric, []).append(f"{metric}{f'{{{inside}}}' if inside else ''} {_number(value)}")
    kinds = {metric: "counter" if metric.endswith("_total") else "gauge" for metric in families}
    lines = [line for metric, rows in families.items() for line in (f"# TYPE {metric} {kinds[metric]}", *rows)]
    return "".join(f"{line}\n" for line in lines)


def _named(name: str) -> tuple[str, dict[str, str]]:
    """Return the name of a metric, and its label."""
    first, _, rest = name.partition("/")
    if first == "loader" and rest:
        second, _, rest = rest.partition("/")
        first = f"{first}_{second}"
    total = "_total" if _COUNTERS.fullmatch(first) or _GROWING.fullmatch(first) else ""
    return f"energon_lite_{re.sub('[^a-zA-Z0-9_]', '_', first)}{total}", {"name": rest} if rest else {}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if isinstance(value, float) else str(int(value))
