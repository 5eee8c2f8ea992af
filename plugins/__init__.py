"""foredraft's own plugins; each registers through an entry point, as a third party's does."""

if __name__ != "foredraft.plugins":
    raise ImportError(f"this package is 'foredraft.plugins', not '{__name__}': install it with `pip install -e .`")
