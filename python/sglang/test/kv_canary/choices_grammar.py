"""A grammar backend for `--grammar-backend choices`: JSON schemas that list their values (`enum`).

xgrammar, outlines and llguidance are none of this project's dependencies. SGLang's grammar queue, vocabulary masks
and the acceptance of tokens are its own; only the compiled grammar is ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

NAME = "choices"


def choices_grammar() -> None:
    """A plugin of SGLang that registers the backend."""
    from sglang.srt.constrained.base_grammar_backend import (
        BaseGrammarBackend,
        register_grammar_backend,
    )
    from sglang.srt.server_args import GRAMMAR_BACKEND_CHOICES, add_grammar_backend_choices

    class ChoicesBackend(BaseGrammarBackend):
        def __init__(self, encode: Callable[[str], list[int]], end: int) -> None:
            super().__init__()
            self._encode, self._end = encode, end

        def dispatch_json(self, key_string: str) -> Any:
            texts = [json.dumps(value) for value in json.loads(key_string)["enum"]]
            return _grammar_class()([[*self._encode(text), self._end] for text in texts])

    if NAME not in GRAMMAR_BACKEND_CHOICES:
        add_grammar_backend_choices([NAME])
    register_grammar_backend(
        NAME, lambda _, tokenizer, __, ___: ChoicesBackend(tokenizer.encode, tokenizer.eos_token_id)
    )


def _grammar_class() -> type:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject

    class Choices(BaseGrammarObject):
        """The answer is one of `choices`, each with the token that ends it."""

        def __init__(self, choices: Sequence[Sequence[int]], said: Sequence[int] = ()) -> None:
            super().__init__()
            self._choices, self._said = choices, list(said)

        def _next_tokens(self) -> list[int]:
            count = len(self._said)
            fitting = (c for c in self._choices if list(c[:count]) == self._said)
            return sorted({choice[count] for choice in fitting if len(choice) > count})

        def accept_token(self, token: int) -> None:
            if token not in self._next_tokens():
                raise ValueError(f"expected one of {self._next_tokens()}, got {token}")
            self._said.append(token)

        def is_terminated(self) -> bool:
            return not self._next_tokens()

        def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> Any:
            return torch.zeros(batch_size, vocab_size, dtype=torch.bool, device=device)

        def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
            vocab_mask[idx] = True
            vocab_mask[idx, self._next_tokens()] = False

        @staticmethod
        def move_vocab_mask(vocab_mask: torch.Tensor, device: Any) -> torch.Tensor:
            return vocab_mask

        @staticmethod
        def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
            logits.masked_fill_(vocab_mask, float("-inf"))

        def copy(self) -> Any:
            return Choices(self._choices, self._said)

    return Choices
