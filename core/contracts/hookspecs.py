"""The hooks through which plugins reach foredraft: each returns classes."""

import pluggy

GROUP = "foredraft"
"""Name of the entry-point group and of the pluggy project."""

hookspec = pluggy.HookspecMarker(GROUP)

hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def foredraft_adapters() -> list[type]:  # type: ignore[empty-body]
    """Draft classes, one per family of targets (subclasses of `foredraft.BaseDraft`)."""


@hookspec
def foredraft_algorithms() -> list[type]:  # type: ignore[empty-body]
    """Drafting algorithms (subclasses of `foredraft.AlgorithmBase`)."""


@hookspec
def foredraft_objectives() -> list[type]:  # type: ignore[empty-body]
    """What drafts are trained to minimise (subclasses of `foredraft.contracts.ObjectiveBase`)."""


@hookspec
def foredraft_engines() -> list[type]:  # type: ignore[empty-body]
    """Serving systems that load drafts (subclasses of `foredraft.EngineBase`)."""


@hookspec
def foredraft_formats() -> list[type]:  # type: ignore[empty-body]
    """Other projects' ways of writing a draft down (subclasses of `foredraft.FormatBase`)."""
