"""Servers that speak OpenAI's protocol: asked, started, and their counters read."""

from .client import Gone, Refused, Server
from .metrics import read_metrics
from .process import running_engine

__all__ = ["Gone", "Refused", "Server", "read_metrics", "running_engine"]
