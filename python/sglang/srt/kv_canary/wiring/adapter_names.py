"""What a prefill and a decode server both call a LoRA adapter: the name under which it is loaded.

Each server makes up an id for an adapter. SGLang appends it to the `extra_key` of requests and of cached prefixes. The
router sends the same request to both servers, with the adapter's name in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["AdapterNames"]

_ID_LENGTH = 32  # of a UUID in hexadecimal digits
_MARK = "\0adapter "  # sets the name apart from the request's own key


@dataclass(slots=True)
class AdapterNames:
    """`manager`: SGLang's LoRAManager of this rank. A name stays known after its adapter is unloaded."""

    manager: Any
    _names: dict[str, str] = field(default_factory=dict)  # by id

    def shared(self, extra_key: str) -> str:
        """`extra_key` with the adapter's name in place of its id. The same where it does not end with a known id."""
        text = str(extra_key)
        adapter = text[-_ID_LENGTH:]
        name = self._names.get(adapter)
        if name is None and (loaded := self.manager.lora_refs.get(adapter)) is not None:
            name = self._names[adapter] = loaded.lora_name
        return extra_key if name is None else f"{text[:-_ID_LENGTH]}{_MARK}{name}"
