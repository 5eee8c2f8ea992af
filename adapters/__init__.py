"""foredraft's own adapters; each registers through an entry point, as a third party's does."""

if __name__ != "foredraft.adapters":
    raise ImportError(f"this package is 'foredraft.adapters', not '{__name__}': install it with `pip install -e .`")
