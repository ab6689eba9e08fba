"""A tokenizer with one token per character, for tiny models of 512 tokens: text in, text out, no download."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from . import consts

__all__ = ["BEGIN_IMAGE", "END_IMAGE", "IMAGE", "save_processor", "save_tokenizer", "token_of"]

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<start_of_image>", "<end_of_image>")
_LAST = ("<unk>", "<image_soft_token>")
_CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " "


def _vocabulary() -> dict[str, int]:
    tokens = [*_SPECIAL, *_CHARACTERS]
    unused = range(len(tokens), consts.VOCAB_SIZE - len(_LAST))
    tokens += [f"<unused{number}>" for number in unused] + list(_LAST)
    return {token: number for number, token in enumerate(tokens)}


_VOCABULARY = _vocabulary()
BEGIN_IMAGE, END_IMAGE, IMAGE = (
    _VOCABULARY[token] for token in ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
)


def token_of(character: str) -> int:
    """The token of one character that the tokenizer knows."""
    return _VOCABULARY[character]


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(_VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )


def save_tokenizer(folder: str | Path) -> None:
    _tokenizer().save_pretrained(folder)


def save_processor(folder: str | Path, image_size: int, image_tokens: int) -> None:
    """The tokenizer and Gemma 3's image processor: each image becomes `image_tokens` tokens."""
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    images = Gemma3ImageProcessor(size={"height": image_size, "width": image_size})
    processor = Gemma3Processor(images, _tokenizer(), image_seq_length=image_tokens)
    processor.save_pretrained(folder)
