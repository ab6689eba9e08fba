"""Lets SGLang's CPU engine start without sgl_kernel, of which no CPU build is published.

SGLang 0.5.12.post1 imports `sgl_kernel.kvcacheio` on every CPU start, before plugins load, and
calls none of it there. Only for machines without a GPU: elsewhere use the real sgl_kernel.
"""
