"""Sizes that the end-to-end tests share, with the arithmetic that they follow from."""

from __future__ import annotations

VOCAB_SIZE = 512  # of the tiny models; 0..4 are special tokens
FIRST_TOKEN = 5

# Traffic: prompts of 8 shared prefixes up to PREFIX_MAX, own tokens up to OWN_MAX, up to 3 turns of up to NEW_MAX
# output tokens: at most 120 + 3 * (90 + 12) = 426 tokens a request.
SHARED_PREFIXES = 8
PREFIX_MAX = 120
OWN_MAX = 90
NEW_MAX = 12
TURNS_MAX = 3
CONCURRENCY = 12

# Prompts above 64 tokens are prefilled in chunks: about half of them.
CHUNKED_PREFILL_SIZE = 64
# 12 requests at once hold 12 * 150 = 1800 slots on average and 12 * 426 = 5112 at most, so that 2048 slots run
# full: prefixes are evicted, slots are reused, and at times requests are retracted.
MHA_POOL_SLOTS = 2048
MAX_RUNNING_REQUESTS = 16
CONTEXT_LENGTH = 1024

PAGE_SIZE = 16

# SWA pool: the tiny Gemma 4 has sliding_window 32, of which SGLang keeps W = 31 tokens back (it counts the token itself
# elsewhere), and evicts when a request has decoded W more.
SWA_WINDOW = 31
# Full pool as for MHA; SWA pool 2048 * 0.5 = 1024 slots. 12 requests of 150 tokens on average would need 1800 of them
# at once if none slid out of the window, and one request of 426 tokens with its window and a chunk needs at most
# 31 + 64 + 31. So prefixes lose their SWA slots (tombstones) while their full slots stay, and 1000 requests of
# about 70 new tokens each write each SWA slot some 70 times.
SWA_POOL_FULL_SLOTS = 2048
SWA_POOL_RATIO = 0.5
# An answer of 80 tokens makes a request evict behind its window twice: after 1, 32 and 63 decoded tokens.
LONG_ANSWER = 80
