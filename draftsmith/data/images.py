"""Images in conversations: content parts, and the bytes that they name.

A message with images has a list of parts as its content: `{"type": "text", "text": ...}` and `{"type": "image", "image": the path or
data URL, "sha256": the digest of the image's bytes}`. The digest alone identifies an image, wherever its file lies.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from draftsmith.run.atomic_io import sha256_of

Part = dict[str, str]


def image_parts(messages: Sequence[dict[str, Any]]) -> list[Part]:
    """The images of a conversation, in order."""
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part for parts in lists for part in parts if part["type"] == "image"]


def text_of(content: str | list[Part]) -> str:
    """The text of a message. An image is one word, its digest: the same question about another image is another text."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else part["sha256"] for part in content)


def without_sources(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with images by their digests alone."""
    return [
        message | {"content": [{k: v for k, v in part.items() if k != "image"} for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def located(part: Part, folder: Path | None) -> Part:
    """The part of a row's image with its digest, and an absolute path.

    Args:
        folder: where a relative path starts; None for nowhere.

    Raises:
        ValueError: it cannot be read; the text says why.
    """
    source = part["image"]
    if source.startswith("data:"):
        return {"type": "image", "image": source, "sha256": hashlib.sha256(_bytes(source)).hexdigest()}
    if source.startswith(("http:", "https:")):
        raise ValueError("an image is a web address; give its file or a data URL")
    path = Path(url2pathname(urlsplit(source).path) if source.startswith("file:") else source)
    if folder is None and not path.is_absolute():
        raise ValueError("an image has a relative path, and the prompts are no local file beside which it could lie")
    path = (folder or Path()) / path
    try:
        about = path.stat()
        digest = _file_digest(path, about.st_size, about.st_mtime_ns)
    except OSError:
        raise ValueError(f"an image is not a readable file; relative paths start in {folder}") from None
    return {"type": "image", "image": str(path), "sha256": digest}


def image_bytes(part: Part) -> bytes:
    """The bytes of an image.

    Raises:
        ValueError: it cannot be read any more, or is not the one whose digest the part has.
    """
    try:
        data = _bytes(part["image"])
    except OSError as error:
        raise ValueError(f"the image {part['image'][:200]} cannot be read any more ({error.strerror})") from None
    if hashlib.sha256(data).hexdigest() != part["sha256"]:
        raise ValueError(f"the image {part['image'][:200]} has changed since the prompts were read")
    return data


def image_size(part: Part) -> tuple[int, int]:
    """Height and width in pixels, the right way up. The image is decoded whole, so that a damaged one is found.

    Raises:
        ValueError: it cannot be decoded.
    """
    from PIL import Image, ImageOps

    data = image_bytes(part)
    try:
        with Image.open(BytesIO(data)) as image:
            image.load()
            width, height = ImageOps.exif_transpose(image).size
    except Exception as error:  # a decoder may raise anything
        raise ValueError(f"an image cannot be decoded ({type(error).__name__})") from None
    return height, width


def _bytes(source: str) -> bytes:
    if not source.startswith("data:"):
        return Path(source).read_bytes()
    head, _, data = source.partition(",")
    try:
        if head.endswith(";base64"):
            return base64.b64decode(data, validate=True)
    except ValueError:
        pass
    raise ValueError("the data URL of an image is not `data:image/...;base64,` and base64")


@lru_cache(maxsize=1 << 17)
def _file_digest(path: Path, size: int, changed_ns: int) -> str:
    """The SHA-256 of a file, read once: rows are read several times. Size and time stand for its content."""
    return sha256_of(path)
