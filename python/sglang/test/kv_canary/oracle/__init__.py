"""What the canary must do, in plain Python: the model that every backend is compared with.

Records are dict entries, a forward is a list of requests, and each check is spelled out for one slot at a
time. Of the package it uses the layout constants, the scalar helpers of `record` and the block sizes of
`kernels.layout`; no tensor code, so that an error there cannot hide in both.
"""

from .content import ContentLayout
from .forwards import Forward, Request, SweepEntry
from .model import GroupModel
from .oracle import Oracle
from .predictions import Row

__all__ = [
    "ContentLayout",
    "Forward",
    "GroupModel",
    "Oracle",
    "Request",
    "Row",
    "SweepEntry",
]
