"""Images among the parts of a message: named by a path, or with their bytes; opened where they are read."""

import base64
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .skipped import Unusable

KEYS = ("image", "path", "url", "bytes", "image_url")
"""Under which a part of a message may name its image (transformers', OpenAI's and `datasets`' words)."""
PLACE = "<image>"
"""What stands for an image in texts of LLaVA's form."""

Image = str | bytes | Any
"""A path, an encoded file, or a `PIL.Image.Image`."""


def image_of(given: Any, folder: Path | None, where: str) -> Image:
    """The image that a part, or an entry of a record's `images`, names; relative paths may lie in `folder`. Raises `Unusable`."""
    while isinstance(given, Mapping):
        given = next((given[key] for key in ("bytes", *KEYS) if given.get(key) is not None), None)
    if isinstance(given, bytes) or hasattr(given, "convert"):
        return given
    if isinstance(given, Path):
        given = str(given)
    if not isinstance(given, str) or not given:
        raise Unusable("an image part without an image", f"{where}: name it under one of {', '.join(KEYS)}; found {given!r:.60}")
    if given.startswith("data:"):
        return base64.b64decode(given.partition(",")[2])
    parts = urlsplit(given)
    if parts.scheme in ("http", "https", "s3", "gs"):
        raise Unusable("an image that is not here", f"{where}: '{given:.100}': images are not fetched, save it and name the file")
    path = Path(unquote(parts.path) if parts.scheme == "file" else given).expanduser()
    if not path.exists() and folder is not None and (folder / path).exists():
        path = folder / path
    if not path.is_file():
        raise Unusable("an image that is not here", f"{where}: no file '{path}'" + (f", nor in '{folder}'" if folder else ""))
    return str(path)


def opened(image: Image) -> Any:
    """The image as RGB. Raises `Unusable` if it cannot be read."""
    from PIL import Image as Pillow

    try:
        found = image if hasattr(image, "convert") else Pillow.open(io.BytesIO(image) if isinstance(image, bytes) else image)
        return found.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise Unusable("an image that cannot be read", str(error)) from error


def images_in(messages: Iterable[Mapping[str, Any]]) -> list[Image]:
    """All images of a conversation in order."""
    lists = (m["content"] for m in messages if isinstance(m["content"], list))
    return [part["image"] for parts in lists for part in parts if part["type"] == "image"]


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Content without its images."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content if part["type"] == "text")


def written(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content as JSON may hold it: an image that has no path as a data URL."""
    return content if isinstance(content, str) else [{**p, "image": _url(p["image"])} if p["type"] == "image" else p for p in content]


def told_apart(content: str | list[dict[str, Any]]) -> str:
    """The same text for the same content."""
    if isinstance(content, str):
        return " ".join(content.split())
    return " ".join(f"<{_digest(p['image'])}>" if p["type"] == "image" else " ".join(p["text"].split()) for p in content)


def _digest(image: Image) -> str:
    return hashlib.sha256(Path(image).read_bytes() if isinstance(image, str) else _encoded(image)).hexdigest()


def _url(image: Image) -> str:
    return image if isinstance(image, str) else "data:image/png;base64," + base64.b64encode(_encoded(image)).decode()


def _encoded(image: bytes | Any) -> bytes:
    if isinstance(image, bytes):
        return image
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
