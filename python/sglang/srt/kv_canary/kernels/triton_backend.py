"""The kernels' functions on a GPU, in Triton; same names, arguments and effects as in `reference`.

Without a GPU the same kernels run interpreted on CPU tensors, for tests.
"""

from sglang.srt.kv_canary.kernels.forward import check_and_write

__all__ = ["check_and_write"]
