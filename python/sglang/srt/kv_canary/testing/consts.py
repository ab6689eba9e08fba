"""Sizes shared by the end-to-end tests, and how they are derived."""

from __future__ import annotations

VOCAB_SIZE = 512  # for the tiny models; 0..4 are special tokens
FIRST_TOKEN = 5

# Traffic: prompts of 8 shared prefixes up to PREFIX_MAX, own tokens up to OWN_MAX, up to 3 turns with up to NEW_MAX
# output tokens each: at most 120 + 3 * (90 + 12) = 426 tokens per request.
SHARED_PREFIXES = 8
PREFIX_MAX = 120
OWN_MAX = 90
NEW_MAX = 12
TURNS_MAX = 3
CONCURRENCY = 12

# Prompts above 64 tokens are prefilled in chunks: about half of them.
CHUNKED_PREFILL_SIZE = 64
# 12 concurrent requests hold 12 * 150 = 1800 slots on average and 12 * 426 = 5112 at most, so 2048 slots run full:
# prefixes are evicted, slots are reused, and sometimes requests are retracted.
MHA_POOL_SLOTS = 2048
MAX_RUNNING_REQUESTS = 16
CONTEXT_LENGTH = 1024

PAGE_SIZE = 16

# A process that takes longer hangs. The slowest takes a minute on two cores; machines may be ten times slower.
PROCESS_TIMEOUT_S = 1800.0

# SWA pool: the tiny Gemma 4 has sliding_window 32. SGLang keeps W = 31 earlier tokens and counts the token itself
# separately. It evicts after a request has decoded W more.
SWA_WINDOW = 31
# Full pool as for MHA; SWA pool 2048 * 0.5 = 1024 slots. 12 requests of 150 tokens on average would need 1800 of them
# if no token left the window. One request of 426 tokens needs at most 31 + 64 + 31: its window and a chunk.
# So prefixes lose their SWA slots (tombstones) while their full slots stay. 1000 requests of about 70 new tokens each
# write each SWA slot about 70 times.
SWA_POOL_FULL_SLOTS = 2048
SWA_POOL_RATIO = 0.5
# An answer of 80 tokens makes a request evict twice before its window: after 1, 32 and 63 decoded tokens.
LONG_ANSWER = 80

# States of linear-attention layers: one for each running request, and one for each end of a prefix in the cache. 12
# concurrent requests take 12, so 40 run full: states leave the cache and their slots are used again.
STATE_SLOTS = 40

# DeepSeek-V3.2: pages of 64 tokens. 12 concurrent requests hold 12 * 4 of them on average and 12 * 7 at most, so 48
# pages run full.
NSA_POOL_SLOTS = 48 * 64

# DeepSeek-V4: pages of 256 tokens and a window of 128, both fixed by the model. A family's prefix has up to 700 tokens.
# A turn adds up to 200, and an answer has 12 or 160: at most 700 + 3 * (200 + 160) = 1780 tokens, within 2048, and 4
# pages on average. `_evict_swa` frees SWA pages below n - 128 - 256, rounded down to a page. So a request of more than
# 640 tokens gives its first page back, as most requests with a long prefix do.
DSV4_PREFIX_MAX, DSV4_OWN_MAX, DSV4_LONG_ANSWER = 700, 200, 160
DSV4_CONTEXT_LENGTH = 2048
DSV4_CHUNK = (
    256  # chunks end at pages; slots of 4 and 128 tokens are completed in the middle of answers
)
DSV4_RUNNING_REQUESTS = 8
# 8 concurrent requests hold 8 * 4 = 32 pages on average and 8 * 7 = 56 at most. 48 pages run full, so prefixes are
# evicted and c4 and c128 rows are written again. Of the SWA slots a request needs its window, a chunk and the margin of
# a page: at most 4 pages, so 8 * 4 = 32. With 24 pages, prefixes lose their SWA slots while their full slots stay. 256
# requests of about 300 new tokens (after prefix hits) write each of the 6144 SWA slots about 12 times, and each of the
# 12288 / 4 c4 slots about 6 times.
DSV4_FULL_SLOTS = 48 * 256
DSV4_SWA_RATIO = 0.5
