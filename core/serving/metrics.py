"""A server's counters, as Prometheus reads them."""

import re
from urllib.error import URLError
from urllib.request import urlopen

from ..contracts.engine import Metrics

LINE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)(?:\s+-?\d+)?')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_metrics(root: str) -> Metrics:
    """The samples at `root`/metrics; none where there is no such page."""
    try:
        with urlopen(f"{root}/metrics", timeout=30) as reply:
            return parse_metrics(reply.read().decode())
    except (URLError, OSError, UnicodeDecodeError):
        return []


def parse_metrics(text: str) -> Metrics:
    """The samples of the text format: (name, labels, value)."""
    found = []
    for line in text.splitlines():
        if match := LINE.fullmatch(line.strip()):
            try:
                found.append((match[1], dict(LABEL.findall(match[2] or "")), float(match[3])))
            except ValueError:
                continue
    return found
