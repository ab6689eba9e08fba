"""What a prefill and a decode server both call a LoRA adapter: the name under which it is loaded.

Each server makes up an id for an adapter. SGLang appends it to the `extra_key` of requests and of cached prefixes. The
router sends the same request to both servers, with the adapter's name in it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AdapterNames"]

_ID_LENGTH = 32  # of a UUID in hexadecimal digits
_MARK = "\0adapter "
MAX_NAMES = 65536  # of adapters whose prefixes may still be cached


@dataclass(slots=True)
class AdapterNames:
    """`manager`: SGLang's LoRAManager of this rank. A name stays known after its adapter is unloaded."""

    manager: Any
    _names: OrderedDict[str, str] = field(
        default_factory=OrderedDict
    )  # by id, the last used one last

    def name_of(self, adapter: str) -> str | None:
        """Of the adapter with this id. None: it was never seen while it was loaded."""
        name = self._names.pop(adapter, None)
        if name is None and (loaded := self.manager.lora_refs.get(adapter)) is not None:
            name = loaded.lora_name
        if name is not None:
            self._names[adapter] = name
            if len(self._names) > MAX_NAMES:
                self._names.popitem(last=False)
        return name

    def of_request(self, extra_key: str | None, adapter: str | None) -> str | None:
        """A request's `extra_key` with the name of its adapter in place of the id `adapter`, if both are known.

        SGLang may have appended more than the id.
        """
        if not extra_key:
            return extra_key
        at = -1 if adapter is None else extra_key.rfind(adapter)
        name = None if at < 0 else self.name_of(extra_key[at : at + len(adapter)])
        return _shared(extra_key, at, name)

    def of_prefix(self, extra_key: str | None) -> str | None:
        """The same for a cached prefix. Whether an adapter computed it is seen by an id at the end of its key."""
        if not extra_key:
            return extra_key
        at = len(extra_key) - _ID_LENGTH
        return _shared(extra_key, at, self.name_of(extra_key[at:]) if at >= 0 else None)


def _shared(extra_key: str, at: int, name: str | None) -> str:
    """No two pairs of a key and an adapter have the same. Clients choose keys freely, so names have their length."""
    if name is None:
        return f"{_MARK}0:{extra_key}" if extra_key.startswith(_MARK) else extra_key
    return f"{_MARK}{len(name)}:{name}{extra_key[:at]}{extra_key[at + _ID_LENGTH :]}"
