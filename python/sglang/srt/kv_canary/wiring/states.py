"""States of linear-attention layers: follows them where the release can, and says so where not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..pool_patcher.errors import UnsupportedPoolError
from .context import context
from .releases import release

if TYPE_CHECKING:
    from ..runner.manager import CanaryManager

logger = logging.getLogger(__name__)


def follow_states(manager: CanaryManager, model_runner: Any, server_args: Any) -> None:
    """Does nothing for draft models, and for models without such layers."""
    has_states = getattr(model_runner.req_to_token_pool, "mamba_pool", None) is not None
    if manager.identity.role != "target" or not has_states:
        return
    manager.states = _followed(manager, model_runner, server_args)
    if why := manager.states.get("unchecked"):
        say_unchecked(why)


def say_unchecked(why: str) -> None:
    logger.warning(
        "kv-canary: states of linear-attention layers are not checked here (%s); full-attention layers are",
        why,
    )


def _followed(manager: CanaryManager, model_runner: Any, server_args: Any) -> dict[str, Any]:
    if release().states is None:
        return {"unchecked": "this release of SGLang"}
    follows = release().states()
    if why := follows.why_unchecked(release().settled(server_args), model_runner):
        return {"unchecked": why}
    try:
        watch = follows(manager, model_runner.req_to_token_pool)
    except UnsupportedPoolError as error:
        return {"unchecked": str(error)}
    manager.observers.append(watch)
    context.states = watch
    return watch.describe()
