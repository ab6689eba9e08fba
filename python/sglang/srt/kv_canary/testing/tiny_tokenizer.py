"""A tokenizer with one token per character, for tiny models of 512 tokens: text in, text out, no download."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import consts

__all__ = [
    "BEGIN_IMAGE",
    "END_IMAGE",
    "IMAGE",
    "VIDEO",
    "save_processor",
    "save_qwen_processor",
    "save_tokenizer",
    "token_of",
]

# Tokens that stand for images, by what transformers calls them
_GEMMA = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "video_token": "<video_soft_token>",
    "image_token": "<image_soft_token>",
}
_QWEN = {
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "video_token": "<|video_pad|>",
    "image_token": "<|image_pad|>",
}
_CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " "


def _vocabulary(of_images: Mapping[str, str] = _GEMMA) -> dict[str, int]:
    begin, end, video, image = of_images.values()
    tokens = ["<pad>", "<bos>", "<eos>", begin, end, *_CHARACTERS]
    last = [video, "<unk>", image]
    unused = range(len(tokens), consts.VOCAB_SIZE - len(last))
    tokens += [f"<unused{number}>" for number in unused] + last
    return {token: number for number, token in enumerate(tokens)}


_VOCABULARY = _vocabulary()
# The same numbers under all names
BEGIN_IMAGE, END_IMAGE, VIDEO, IMAGE = (_VOCABULARY[token] for token in _GEMMA.values())


def token_of(character: str) -> int:
    """The token of one character that the tokenizer knows."""
    return _VOCABULARY[character]


def _tokenizer(of_images: Mapping[str, str] = _GEMMA) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(_vocabulary(of_images), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=dict(of_images),
    )


def save_tokenizer(folder: str | Path) -> None:
    _tokenizer().save_pretrained(folder)


def save_processor(folder: str | Path, image_size: int, image_tokens: int) -> None:
    """The tokenizer and Gemma 3's image processor: each image becomes `image_tokens` tokens."""
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    images = Gemma3ImageProcessor(size={"height": image_size, "width": image_size})
    processor = Gemma3Processor(images, _tokenizer(), image_seq_length=image_tokens)
    processor.save_pretrained(folder)


def save_qwen_processor(folder: str | Path, patch_size: int, merge_size: int) -> None:
    """The tokenizer and Qwen2.5-VL's processor: `merge_size` patches in each direction become one token."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    sizes = {"patch_size": patch_size, "merge_size": merge_size}
    least = 4 * (patch_size * merge_size) ** 2
    pixels = {"size": {"shortest_edge": least, "longest_edge": 4 * least}}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**sizes, **pixels),
        _tokenizer(_QWEN),
        Qwen2VLVideoProcessor(**sizes, **pixels),
    )
    processor.save_pretrained(folder)
