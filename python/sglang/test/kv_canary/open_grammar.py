"""A grammar backend for `--grammar-backend open`: any JSON schema lets every token through.

Under a grammar, SGLang takes up each result of a speculative step before it launches the next batch, which it has
prepared before. This is all that the tests need of one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.tiny_tokenizer import save_tokenizer

NAME = "open"


def open_grammar() -> None:
    """A plugin of SGLang that registers the backend."""
    from sglang.srt.constrained.base_grammar_backend import (
        BaseGrammarBackend,
        BaseGrammarObject,
        register_grammar_backend,
    )
    from sglang.srt.server_args import GRAMMAR_BACKEND_CHOICES, add_grammar_backend_choices

    class Everything(BaseGrammarObject):
        def accept_token(self, token: int) -> None:
            """Every token fits."""

        def rollback(self, k: int) -> None:
            """Nothing is remembered."""

        def is_terminated(self) -> bool:
            return False

        def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> Any:
            words = (vocab_size + 31) // 32
            return torch.full((batch_size, words), -1, dtype=torch.int32, device=device)

        def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
            vocab_mask[idx] = -1

        @staticmethod
        def move_vocab_mask(vocab_mask: torch.Tensor, device: Any) -> torch.Tensor:
            return vocab_mask

        @staticmethod
        def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
            """All bits are set."""

        def copy(self) -> Any:
            return Everything()

    class Backend(BaseGrammarBackend):
        def dispatch_json(self, key_string: str) -> Any:
            return Everything()

    if NAME not in GRAMMAR_BACKEND_CHOICES:
        add_grammar_backend_choices([NAME])
    register_grammar_backend(NAME, lambda *_: Backend())


def mode_with_grammar(name: str) -> str:
    """The mode `name` with this backend and a tokenizer, without which SGLang refuses grammars. Returns its name."""
    plain = MODES[name]

    def write_model(folder: Path) -> str:
        path = plain.write_model(folder)
        save_tokenizer(path)
        return path

    args = {**plain.server_args, "skip_tokenizer_init": False, "grammar_backend": NAME}
    own = replace(plain, name=f"{name}_{NAME}", write_model=write_model, server_args=args)
    MODES[own.name] = own
    return own.name
