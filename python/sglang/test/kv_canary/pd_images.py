"""Requests with images to a prefill and a decode server."""

from __future__ import annotations

import base64
import io
from typing import Any

from . import qwen_images
from .pd_serving import PdServing

__all__ = ["MORE", "TEXT", "picture", "see", "see_both"]

_MARK = "<start_of_image>"  # of an image in a text, for all models of these tests
TEXT = f"see {_MARK} and {_MARK} what now?"
MORE = " what now? see and see what now, and then see what now?"


def picture(shade: int) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (40, 40), (shade, 255 - shade, 7)).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def see_both(
    serving: PdServing, name: str, *shades: int, text: str = TEXT, **more: Any
) -> list[dict[str, Any]]:
    """The answers of the prefill and of the decode server. `shades`: of the images, as many as `text` has."""
    if serving.mode.name in qwen_images.ALL:
        text = text.replace(_MARK, qwen_images.MARK)
    body = {
        "rid": name,
        "text": text,
        "image_data": [picture(shade) for shade in shades],
        "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
        **more,
    }
    return serving.run(serving.ask_both(body))


def see(serving: PdServing, name: str, *shades: int, **more: Any) -> dict[str, Any]:
    """The decode server's answer."""
    return see_both(serving, name, *shades, **more)[1]
