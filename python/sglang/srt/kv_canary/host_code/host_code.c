/* The host's loops over tokens, pages, bytes, findings and launch arguments. `twins.py` has the same functions in
 * Python, which define them.
 *
 * It is compiled where the canary runs. MIX_INCREMENT, MIX_MULTIPLIER_1, MIX_MULTIPLIER_2, CHAIN_MULTIPLIER,
 * CONTENT_BASE and SECTOR_BYTES come from `record.py`. All of it runs with Python's lock held, but for long lists of
 * rows. Arithmetic is modulo 2^64.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#define SPAN_WORDS 5
#define ALIGNED 16 /* bytes */
#define LOOK_AHEAD 64

static uint64_t mix64(uint64_t x) {
  x += MIX_INCREMENT;
  x = (x ^ (x >> 30)) * MIX_MULTIPLIER_1;
  x = (x ^ (x >> 27)) * MIX_MULTIPLIER_2;
  return x ^ (x >> 31);
}

/* Tokens of a list, of a buffer of 64-bit integers, or of any other sequence. */
typedef struct {
  PyObject *fast; /* a list or tuple; NULL: `view` is valid */
  Py_buffer view;
  Py_ssize_t size;
} Tokens;

static int open_tokens(PyObject *source, Tokens *tokens) {
  tokens->fast = NULL;
  if (!PyList_Check(source) && !PyTuple_Check(source) && PyObject_CheckBuffer(source)) {
    if (PyObject_GetBuffer(source, &tokens->view, PyBUF_FORMAT | PyBUF_ND) == 0) {
      const char *format = tokens->view.format;
      if (tokens->view.ndim == 1 && tokens->view.itemsize == 8 && format != NULL &&
          (strcmp(format, "q") == 0 || strcmp(format, "l") == 0)) {
        tokens->size = tokens->view.len / 8;
        return 0;
      }
      PyBuffer_Release(&tokens->view);
    } else {
      PyErr_Clear(); /* not contiguous: item by item */
    }
  }
  tokens->fast = PySequence_Fast(source, "expected a sequence of tokens");
  if (tokens->fast == NULL) return -1;
  tokens->size = PySequence_Fast_GET_SIZE(tokens->fast);
  return 0;
}

static void close_tokens(Tokens *tokens) {
  if (tokens->fast == NULL)
    PyBuffer_Release(&tokens->view);
  else
    Py_DECREF(tokens->fast);
}

/* -1 with an exception for what is no 64-bit integer. */
static int token_at(const Tokens *tokens, Py_ssize_t i, int64_t *token) {
  if (tokens->fast == NULL) {
    memcpy(token, (const char *)tokens->view.buf + 8 * i, 8);
    return 0;
  }
  /* An __index__ of another type may have shortened the list. */
  if (i >= PySequence_Fast_GET_SIZE(tokens->fast)) {
    PyErr_SetString(PyExc_ValueError, "tokens were removed while they were read");
    return -1;
  }
  PyObject *item = PySequence_Fast_GET_ITEM(tokens->fast, i);
  Py_INCREF(item);
  long long value = PyLong_AsLongLong(item);
  Py_DECREF(item);
  if (value == -1 && PyErr_Occurred()) return -1;
  *token = value;
  return 0;
}

static int int64_of(PyObject *object, int64_t *value) {
  long long read = PyLong_AsLongLong(object);
  if (read == -1 && PyErr_Occurred()) return -1;
  *value = read;
  return 0;
}

/* chain_of_tokens(tokens, anchor, first, count) */
static PyObject *chain_of_tokens(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  int64_t anchor, first, count, token;
  Tokens tokens;
  if (n != 4) {
    PyErr_Format(PyExc_TypeError, "chain_of_tokens takes 4 arguments, got %zd", n);
    return NULL;
  }
  if (int64_of(args[1], &anchor) || int64_of(args[2], &first) || int64_of(args[3], &count))
    return NULL;
  if (open_tokens(args[0], &tokens)) return NULL;
  if (count < 0 || count > tokens.size) count = tokens.size;
  uint64_t chain = (uint64_t)anchor;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (token_at(&tokens, i, &token)) {
      close_tokens(&tokens);
      return NULL;
    }
    uint64_t position = (uint64_t)first + (uint64_t)i;
    chain = chain * CHAIN_MULTIPLIER + mix64(((uint64_t)token & 0xFFFFFFFFu) | position << 32);
  }
  close_tokens(&tokens);
  return PyLong_FromLongLong((int64_t)chain);
}

/* One entry of `known`: its span, and its tokens from `offset` on, after `before` of the memory that are none. Returns
   how many there are, -1 with an exception. */
static Py_ssize_t pack_one(PyObject *entry, char *span, char *out, int64_t room, int64_t offset,
                           int64_t before) {
  int64_t words[SPAN_WORDS], token;
  Tokens tokens;
  if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != 4) {
    PyErr_SetString(PyExc_TypeError, "expected (first, tokens, start, start_chain) for each request");
    return -1;
  }
  if (int64_of(PyTuple_GET_ITEM(entry, 0), &words[1]) ||
      int64_of(PyTuple_GET_ITEM(entry, 2), &words[3]) ||
      int64_of(PyTuple_GET_ITEM(entry, 3), &words[4]) ||
      open_tokens(PyTuple_GET_ITEM(entry, 1), &tokens))
    return -1;
  Py_ssize_t size = tokens.size;
  if (size > room - offset) {
    PyErr_Format(PyExc_ValueError, "expected room for %zd more tokens, got %lld", size,
                 (long long)(room - offset));
    size = -1;
  }
  for (Py_ssize_t i = 0; i < size; i++) {
    if (token_at(&tokens, i, &token)) {
      size = -1;
      break;
    }
    uint32_t low = (uint32_t)token;
    memcpy(out + 4 * (offset + i), &low, 4);
  }
  close_tokens(&tokens);
  words[0] = before + offset;
  words[2] = size;
  if (size >= 0) memcpy(span, words, sizeof words);
  return size;
}

/* pack_lists(known, address, words) */
static PyObject *pack_lists(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  int64_t words, packed = 0;
  if (n != 3 || !PyList_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "pack_lists takes a list, an address and its number of words");
    return NULL;
  }
  char *out = (char *)PyLong_AsVoidPtr(args[1]);
  if ((out == NULL && PyErr_Occurred()) || int64_of(args[2], &words)) return NULL;
  Py_ssize_t count = PyList_GET_SIZE(args[0]);
  if (out == NULL || count > words / SPAN_WORDS) {
    PyErr_Format(PyExc_ValueError, "expected room for %zd spans, got %lld words", count, (long long)words);
    return NULL;
  }
  int64_t room = 2 * (words - SPAN_WORDS * count);
  for (Py_ssize_t i = 0; i < count; i++) {
    if (i >= PyList_GET_SIZE(args[0])) {
      PyErr_SetString(PyExc_ValueError, "requests were removed while they were read");
      return NULL;
    }
    PyObject *entry = PyList_GET_ITEM(args[0], i);
    Py_INCREF(entry);
    Py_ssize_t size =
        pack_one(entry, out + 8 * SPAN_WORDS * i, out + 8 * SPAN_WORDS * count, room, packed,
                 2 * SPAN_WORDS * count);
    Py_DECREF(entry);
    if (size < 0) return NULL;
    packed += size;
  }
  return PyLong_FromLongLong(packed);
}

/* Pages of a buffer of 32-bit or 64-bit integers. */
static int open_pages(PyObject *source, Py_buffer *view) {
  if (PyObject_GetBuffer(source, view, PyBUF_FORMAT | PyBUF_STRIDES)) return -1;
  const char *format = view->format == NULL ? "" : view->format;
  if (view->ndim == 1 && strlen(format) == 1 && strchr(view->itemsize == 4 ? "il" : "ql", *format) &&
      (view->itemsize == 4 || view->itemsize == 8))
    return 0;
  PyErr_Format(PyExc_TypeError, "expected a list of int32 or int64, got items of %zd bytes with format '%s'",
               view->itemsize, format);
  PyBuffer_Release(view);
  return -1;
}

static int64_t page_at(const Py_buffer *view, Py_ssize_t i) {
  const char *item = (const char *)view->buf + view->strides[0] * i;
  int32_t narrow;
  int64_t wide;
  if (view->itemsize == 8) {
    memcpy(&wide, item, 8);
    return wide;
  }
  memcpy(&narrow, item, 4);
  return narrow;
}

static int follows(const Py_buffer *view, Py_ssize_t i) {
  return page_at(view, i) == page_at(view, i - 1) + 1;
}

/* The end of the run that begins at `first`: contiguous on both sides, at most up to `count`. */
static Py_ssize_t run_end(const Py_buffer *sources, const Py_buffer *targets, Py_ssize_t first,
                          Py_ssize_t count) {
  Py_ssize_t end = first + 1;
  while (end < count && follows(sources, end) && follows(targets, end)) end++;
  return end;
}

#define DESCRIPTOR_WORDS 3

static void describe(char *out, int64_t at, uint64_t base, int64_t first, int64_t pages,
                     int64_t page_bytes, uint64_t device) {
  uint64_t words[DESCRIPTOR_WORDS] = {base + (uint64_t)page_bytes * (uint64_t)first,
                                      (uint64_t)page_bytes * (uint64_t)pages, device};
  memcpy(out + (int64_t)sizeof words * at, words, sizeof words);
}

/* One pair of integers, without a sign. */
static int pair_of(PyObject *pair, uint64_t *first, uint64_t *second) {
  if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
    PyErr_SetString(PyExc_TypeError, "expected a pair of integers");
    return -1;
  }
  *first = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(pair, 0));
  if (*first == (uint64_t)-1 && PyErr_Occurred()) return -1;
  *second = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(pair, 1));
  return *second == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Of each base: (here, there). A new array, or NULL with an exception. */
static uint64_t *read_bases(PyObject *bases) {
  Py_ssize_t count = PyTuple_GET_SIZE(bases);
  uint64_t *read = PyMem_New(uint64_t, 2 * count + 1);
  if (read == NULL) return (uint64_t *)PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < count; i++)
    if (pair_of(PyTuple_GET_ITEM(bases, i), &read[2 * i], &read[2 * i + 1])) {
      PyMem_Free(read);
      return NULL;
    }
  return read;
}

static PyObject *described(const uint64_t *bases, Py_ssize_t sides, const Py_buffer *sources,
                           const Py_buffer *targets, int64_t page_bytes, uint64_t here, uint64_t there) {
  Py_ssize_t runs = 0, run = 0;
  Py_ssize_t count = sources->shape[0], others = targets->shape[0];
  if (others < count) count = others;
  for (Py_ssize_t i = 0; i < count; i = run_end(sources, targets, i, count)) runs++;
  Py_ssize_t bytes = sides * runs * DESCRIPTOR_WORDS * (Py_ssize_t)sizeof(uint64_t);
  PyObject *of_here = PyByteArray_FromStringAndSize(NULL, bytes);
  PyObject *of_there = PyByteArray_FromStringAndSize(NULL, bytes);
  if (of_here == NULL || of_there == NULL) {
    Py_XDECREF(of_here);
    Py_XDECREF(of_there);
    return NULL;
  }
  char *out_here = PyByteArray_AS_STRING(of_here), *out_there = PyByteArray_AS_STRING(of_there);
  for (Py_ssize_t i = 0, end; i < count; i = end, run++) {
    end = run_end(sources, targets, i, count);
    int64_t source = page_at(sources, i), target = page_at(targets, i);
    for (Py_ssize_t side = 0, at = run; side < sides; side++, at += runs) {
      describe(out_here, at, bases[2 * side], source, end - i, page_bytes, here);
      describe(out_there, at, bases[2 * side + 1], target, end - i, page_bytes, there);
    }
  }
  return Py_BuildValue("(NN)", of_here, of_there); /* takes both */
}

/* describe_pages(sources, targets, bases, page_bytes, devices) */
static PyObject *describe_pages(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  int64_t page_bytes;
  uint64_t here, there;
  Py_buffer sources, targets;
  if (n != 5 || !PyTuple_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError,
                    "describe_pages takes two lists, a tuple, a number of bytes and a pair of devices");
    return NULL;
  }
  if (int64_of(args[3], &page_bytes) || pair_of(args[4], &here, &there)) return NULL;
  PyObject *found = NULL;
  uint64_t *bases = read_bases(args[2]);
  if (bases == NULL) return NULL;
  if (open_pages(args[0], &sources)) goto no_sources;
  if (open_pages(args[1], &targets)) goto no_targets;
  found = described(bases, PyTuple_GET_SIZE(args[2]), &sources, &targets, page_bytes, here, there);
  PyBuffer_Release(&targets);
no_targets:
  PyBuffer_Release(&sources);
no_sources:
  PyMem_Free(bases);
  return found;
}

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline))
#define FETCH(address) __builtin_prefetch(address)
#else
#define INLINE static inline
#define FETCH(address) ((void)(address))
#endif

#define SECTOR_WORDS ((int64_t)(SECTOR_BYTES / 4))

/* Columns of a source: address of slot 0, slots of a page, bytes between pages, bytes between slots of a page, words
   of a row, key. */
enum { ADDRESS, PAGE_SIZE, PAGE_STRIDE, TOKEN_STRIDE, ROW_WORDS, KEY, SOURCE_COLUMNS };

/* Pieces that are fetched, and then hashed. It takes less time than to fetch one while another one is hashed. */
#define AT_ONCE 16
#define LINE 64 /* bytes that come together */
#define MANY (1 << 18) /* words: other threads run meanwhile */

/* Rows of some slots in some sources, slot by slot. */
typedef struct {
  const int64_t *sources;
  Py_ssize_t count; /* of sources */
  const Py_buffer *slots;
  const Py_buffer *sampled_by; /* a number for each slot; NULL: rows are read whole */
  const uint32_t *keys; /* of `longest` words: their low halves, then their high halves, then all bits where even */
  int64_t longest;
  uint64_t *out; /* of each slot */
} Rows;

/* What is read of one row. */
typedef struct {
  const uint32_t *words;
  int64_t first, count; /* of the row's words */
  uint64_t key;         /* of the source */
  uint64_t *out;
} Piece;

INLINE const char *row_at(const int64_t *source, int64_t slot) {
  int64_t page = slot, size = source[PAGE_SIZE], place = 0;
  if (size != 1) {
    place = page % size;
    page /= size;
  }
  int64_t address = source[ADDRESS] + page * source[PAGE_STRIDE] + place * source[TOKEN_STRIDE];
  return (const char *)(intptr_t)address;
}

/* Of the row of the `i`-th slot in source number `index`. */
INLINE Piece piece_of(const Rows *rows, Py_ssize_t i, Py_ssize_t index) {
  const int64_t *source = rows->sources + SOURCE_COLUMNS * index;
  const char *row = row_at(source, page_at(rows->slots, i));
  Piece piece = {(const uint32_t *)row, 0, source[ROW_WORDS], (uint64_t)source[KEY], rows->out + i};
  if (rows->sampled_by == NULL || piece.count <= SECTOR_WORDS) return piece;
  /* 32 bits divide faster. */
  uint32_t sectors = (uint32_t)((piece.count + SECTOR_WORDS - 1) / SECTOR_WORDS);
  uint64_t seed = ((uint64_t)page_at(rows->sampled_by, i) << 16) + (uint64_t)index;
  piece.first = SECTOR_WORDS * (int64_t)((uint32_t)(mix64(seed) >> 33) % sectors);
  piece.words += piece.first;
  piece.count = piece.count - piece.first < SECTOR_WORDS ? piece.count - piece.first : SECTOR_WORDS;
  return piece;
}

/* key * sum(word * its key) + sum(word whose key is even), in products of 32 bits: processors compute several at once. */
INLINE uint64_t part_of(const Piece *piece, const Rows *rows) {
  const uint32_t *words = piece->words, *low_keys = rows->keys + piece->first;
  const uint32_t *high_keys = low_keys + rows->longest, *even_keys = high_keys + rows->longest;
  uint64_t low = 0, even = 0;
  uint32_t high = 0;
  for (int64_t i = 0; i < piece->count; i++) {
    low += (uint64_t)words[i] * low_keys[i];
    high += words[i] * high_keys[i];
    even += words[i] & even_keys[i];
  }
  return piece->key * (low + ((uint64_t)high << 32)) + even;
}

INLINE void fetch(const Piece *piece) {
  const char *first = (const char *)piece->words;
  for (int64_t byte = 0; byte < 4 * piece->count; byte += LINE) FETCH(first + byte);
}

INLINE void hash_pieces(const Piece *pieces, Py_ssize_t count, const Rows *rows) {
  for (Py_ssize_t i = 0; i < count; i++) *pieces[i].out += part_of(&pieces[i], rows);
}

INLINE void hash_rows(const Rows *rows) {
  Piece pieces[AT_ONCE];
  Py_ssize_t fetched = 0;
  for (Py_ssize_t i = 0; i < rows->slots->shape[0]; i++)
    for (Py_ssize_t index = 0; index < rows->count; index++) {
      pieces[fetched] = piece_of(rows, i, index);
      fetch(&pieces[fetched]);
      if (++fetched < AT_ONCE) continue;
      hash_pieces(pieces, fetched, rows);
      fetched = 0;
    }
  hash_pieces(pieces, fetched, rows);
}

static void hash_rows_anywhere(const Rows *rows) { hash_rows(rows); }

#if defined(__GNUC__) && defined(__x86_64__) && !defined(WITHOUT_AVX2)
__attribute__((target("avx2"))) static void hash_rows_in_avx2(const Rows *rows) { hash_rows(rows); }
#define HASH_ROWS(rows) (__builtin_cpu_supports("avx2") ? hash_rows_in_avx2(rows) : hash_rows_anywhere(rows))
#else
#define HASH_ROWS(rows) hash_rows_anywhere(rows)
#endif

/* The longest of the rows in words, -1 with an exception. */
static int64_t longest_row(const Py_buffer *sources) {
  int64_t longest = 0;
  for (Py_ssize_t i = 0; i < sources->shape[0]; i++) {
    const int64_t *source = (const int64_t *)sources->buf + SOURCE_COLUMNS * i;
    if (source[PAGE_SIZE] < 1 || source[ROW_WORDS] < 0 || source[ROW_WORDS] > INT32_MAX) {
      PyErr_Format(PyExc_ValueError, "expected rows of words in pages of slots, got %lld words, %lld slots",
                   (long long)source[ROW_WORDS], (long long)source[PAGE_SIZE]);
      return -1;
    }
    if (source[ROW_WORDS] > longest) longest = source[ROW_WORDS];
  }
  return longest;
}

/* A new array, or NULL with an exception. To compute it takes less time than to fetch it. */
static uint32_t *keys_of_words(int64_t count) {
  uint32_t *keys = PyMem_New(uint32_t, 3 * count + 1);
  if (keys == NULL) return (uint32_t *)PyErr_NoMemory();
  for (int64_t i = 0; i < count; i++) {
    uint64_t key = mix64((uint64_t)i);
    keys[i] = (uint32_t)key;
    keys[i + count] = (uint32_t)(key >> 32);
    keys[i + 2 * count] = (uint32_t)(key & 1) - 1;
  }
  return keys;
}

/* Adds to `out`, of each of `slots`. Returns -1 with an exception. */
static int hash_sources(const Py_buffer *sources, const Py_buffer *slots, const Py_buffer *sampled_by, uint64_t *out) {
  const char *format = sources->format == NULL ? "" : sources->format;
  if (sources->ndim != 2 || sources->shape[1] != SOURCE_COLUMNS || sources->itemsize != 8 ||
      (strcmp(format, "q") && strcmp(format, "l"))) {
    PyErr_Format(PyExc_TypeError, "expected int64 with %d columns for each source", SOURCE_COLUMNS);
    return -1;
  }
  int64_t longest = longest_row(sources);
  uint32_t *keys = longest < 0 ? NULL : keys_of_words(longest);
  if (keys == NULL) return -1;
  Rows rows = {sources->buf, sources->shape[0], slots, sampled_by, keys, longest, out};
  int64_t words = sampled_by == NULL || longest < SECTOR_WORDS ? longest : SECTOR_WORDS;
  if (words * rows.count * slots->shape[0] < MANY) { /* to wait for Python's lock again may take longer */
    HASH_ROWS(&rows);
  } else {
    Py_BEGIN_ALLOW_THREADS HASH_ROWS(&rows);
    Py_END_ALLOW_THREADS
  }
  PyMem_Free(keys);
  return 0;
}

static int hash_half(PyObject *half, const Py_buffer *slots, const Py_buffer *sampled_by, uint64_t *out) {
  Py_buffer sources;
  if (PyObject_GetBuffer(half, &sources, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)) return -1;
  for (Py_ssize_t i = 0; i < slots->shape[0]; i++) out[i] = CONTENT_BASE;
  int error = hash_sources(&sources, slots, sampled_by, out);
  PyBuffer_Release(&sources);
  return error;
}

static int refuse_beyond(const Py_buffer *slots, int64_t limit) {
  for (Py_ssize_t i = 0; i < slots->shape[0]; i++) {
    int64_t slot = page_at(slots, i);
    if (slot >= 0 && slot < limit) continue;
    PyErr_Format(PyExc_IndexError, "expected slots below %lld, got %lld", (long long)limit, (long long)slot);
    return -1;
  }
  return 0;
}

/* What fingerprint_rows returns, or NULL with an exception. */
static PyObject *fingerprints(PyObject *halves, const Py_buffer *slots, const Py_buffer *sampled_by, int64_t limit) {
  Py_ssize_t count = PyTuple_GET_SIZE(halves), size = slots->shape[0];
  if (sampled_by != NULL && sampled_by->shape[0] != size) {
    PyErr_Format(PyExc_ValueError, "expected %zd numbers to sample by, got %zd", size, sampled_by->shape[0]);
    return NULL;
  }
  if (refuse_beyond(slots, limit)) return NULL;
  PyObject *found = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)sizeof(uint64_t) * count * size);
  uint64_t *out = found == NULL ? NULL : (uint64_t *)PyByteArray_AS_STRING(found);
  for (Py_ssize_t half = 0; found != NULL && half < count; half++)
    if (hash_half(PyTuple_GET_ITEM(halves, half), slots, sampled_by, out + half * size)) Py_CLEAR(found);
  return found;
}

/* fingerprint_rows(halves, slots, limit, sampled_by) */
static PyObject *fingerprint_rows(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  int64_t limit;
  Py_buffer slots, sampled_by;
  if (n != 4 || !PyTuple_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "fingerprint_rows takes a tuple, slots, how many there are, and numbers to sample by");
    return NULL;
  }
  int samples = args[3] != Py_None;
  if (int64_of(args[2], &limit) || open_pages(args[1], &slots)) return NULL;
  PyObject *found = NULL;
  if (samples && open_pages(args[3], &sampled_by)) goto done;
  found = fingerprints(args[0], &slots, samples ? &sampled_by : NULL, limit);
  if (samples) PyBuffer_Release(&sampled_by);
done:
  PyBuffer_Release(&slots);
  return found;
}

/* leading(flags, slots) */
static PyObject *leading(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  Py_buffer flags, slots;
  if (n != 2) {
    PyErr_SetString(PyExc_TypeError, "leading takes flags and slots");
    return NULL;
  }
  if (PyObject_GetBuffer(args[0], &flags, PyBUF_SIMPLE)) return NULL;
  PyObject *found = NULL;
  if (open_pages(args[1], &slots)) goto no_slots;
  if (refuse_beyond(&slots, flags.len)) goto beyond;
  Py_ssize_t count = 0;
  while (count < slots.shape[0] && ((const char *)flags.buf)[page_at(&slots, count)]) count++;
  found = PyLong_FromSsize_t(count);
beyond:
  PyBuffer_Release(&slots);
no_slots:
  PyBuffer_Release(&flags);
  return found;
}

static PyObject *name_dtype, *name_data_ptr, *name_enter, *name_leave, *name_calls;
static PyObject *name_locals, *name_get, *name_req, *name_rid, *name_numel;
static PyObject *name_is_contiguous, *name_contiguous;

static const struct {
  PyObject **place;
  const char *text;
} interned[] = {{&name_dtype, "dtype"},
                {&name_data_ptr, "data_ptr"},
                {&name_enter, "launch_enter_hook"},
                {&name_leave, "launch_exit_hook"},
                {&name_calls, "calls"},
                {&name_locals, "f_locals"},
                {&name_get, "get"},
                {&name_req, "req"},
                {&name_rid, "rid"},
                {&name_numel, "numel"},
                {&name_is_contiguous, "is_contiguous"},
                {&name_contiguous, "contiguous"}};

static PyObject *int32_first, *int32_end, *one_program;

/* A new reference to what tells variants of a tensor apart; `address` becomes a new reference, or NULL. */
static PyObject *variant_of_tensor(PyObject *tensor, PyObject **address) {
  *address = PyObject_CallMethodNoArgs(tensor, name_data_ptr);
  PyObject *dtype = *address == NULL ? NULL : PyObject_GetAttr(tensor, name_dtype), *variant = NULL;
  unsigned long long number = dtype == NULL ? 0 : PyLong_AsUnsignedLongLong(*address);
  if (dtype != NULL && !PyErr_Occurred()) variant = number % ALIGNED ? PyTuple_Pack(1, dtype) : Py_NewRef(dtype);
  Py_XDECREF(dtype);
  return variant;
}

/* A new reference to what tells variants apart; `plain` becomes a new reference to what a launch takes. */
static PyObject *variant_of_value(PyObject *value, int only_type, PyObject *pointer, PyObject *tensor,
                                  PyObject **plain) {
  PyObject *variant = NULL;
  *plain = NULL;
  if ((PyObject *)Py_TYPE(value) == pointer) {
    if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != 3) {
      PyErr_SetString(PyExc_TypeError, "expected (tensor, address, variant) for a pointer");
      return NULL;
    }
    *plain = Py_NewRef(PyTuple_GET_ITEM(value, 1));
    variant = Py_NewRef(PyTuple_GET_ITEM(value, 2));
  } else if (value == Py_None || (!only_type && PyLong_CheckExact(value))) {
    variant = Py_NewRef(value);
    *plain = Py_NewRef(value);
  } else if (PyLong_CheckExact(value)) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (number == -1 && !overflow && PyErr_Occurred()) return NULL;
    variant = PyBool_FromLong(!overflow && number >= INT32_MIN && number <= INT32_MAX);
    *plain = Py_NewRef(value);
  } else {
    int is_tensor = PyObject_IsInstance(value, tensor);
    if (is_tensor < 0) return NULL;
    if (is_tensor) {
      variant = variant_of_tensor(value, plain);
    } else {
      int inside = only_type ? PyObject_RichCompareBool(value, int32_first, Py_GE) : 0;
      if (inside > 0) inside = PyObject_RichCompareBool(value, int32_end, Py_LT);
      if (inside < 0) return NULL;
      variant = only_type ? PyBool_FromLong(inside) : Py_NewRef(value);
      *plain = Py_NewRef(value);
    }
  }
  if (variant == NULL || *plain == NULL) {
    Py_XDECREF(variant);
    Py_CLEAR(*plain);
    return NULL;
  }
  return variant;
}

/* A new reference to `tensor` itself if its elements are adjacent, else to a copy. */
static PyObject *dense(PyObject *tensor) {
  PyObject *answer = PyObject_CallMethodNoArgs(tensor, name_is_contiguous);
  int is_dense = answer == NULL ? -1 : PyObject_IsTrue(answer);
  Py_XDECREF(answer);
  if (is_dense < 0) return NULL;
  return is_dense ? Py_NewRef(tensor) : PyObject_CallMethodNoArgs(tensor, name_contiguous);
}

/* A new `pointer`, a kind of tuple, past its own constructor, which may be a function in Python. */
static PyObject *pointer_to(PyTypeObject *pointer, PyObject *tensor) {
  PyObject *address = NULL, *seen = NULL, *adjacent = dense(tensor);
  PyObject *variant = adjacent == NULL ? NULL : variant_of_tensor(adjacent, &address);
  if (variant != NULL) seen = Py_BuildValue("((OOO))", adjacent, address, variant);
  PyObject *found = seen == NULL ? NULL : PyTuple_Type.tp_new(pointer, seen, NULL);
  Py_XDECREF(adjacent);
  Py_XDECREF(address);
  Py_XDECREF(variant);
  Py_XDECREF(seen);
  return found;
}

/* pointers_to(pointer, tensors) */
static PyObject *pointers_to(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  if (n != 2 || !PyType_Check(args[0]) || !PyType_IsSubtype((PyTypeObject *)args[0], &PyTuple_Type) ||
      !PyTuple_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "pointers_to takes a kind of tuple and a tuple");
    return NULL;
  }
  Py_ssize_t count = PyTuple_GET_SIZE(args[1]);
  PyObject *found = PyList_New(count);
  for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
    PyObject *tensor = PyTuple_GET_ITEM(args[1], i);
    PyObject *one = tensor == Py_None ? Py_NewRef(tensor) : pointer_to((PyTypeObject *)args[0], tensor);
    if (one == NULL)
      Py_CLEAR(found);
    else
      PyList_SET_ITEM(found, i, one);
  }
  return found;
}

/* A new reference to the value of `name`, which is looked for from `position` on, where it is as a rule. A look-up by
   hash reads the name's own memory, which is a cache miss for each argument. NULL with an exception. */
static PyObject *value_of(PyObject *arguments, PyObject *name, Py_ssize_t *position) {
  PyObject *key, *value;
  while (PyDict_Next(arguments, position, &key, &value))
    if (key == name) return Py_NewRef(value);
  *position = 0;
  value = PyDict_GetItemWithError(arguments, name);
  if (value == NULL && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, name);
  return Py_XNewRef(value);
}

/* What launch_arguments returns: `key` and `plain` become new references. Returns -1 with an exception. `shape`: names,
   only_types, places, plain, (pointer, tensor). */
static int assemble(PyObject *const *shape, PyObject *num_warps, PyObject *arguments, PyObject **key, PyObject **plain) {
  PyObject *names = shape[0], *types = shape[4];
  const char *only_types = PyBytes_AS_STRING(shape[1]), *places = PyBytes_AS_STRING(shape[2]);
  Py_ssize_t count = PyTuple_GET_SIZE(names), position = 0;
  *plain = *key = NULL;
  if (PyBytes_GET_SIZE(shape[1]) != count || PyBytes_GET_SIZE(shape[2]) != count) {
    PyErr_SetString(PyExc_ValueError, "expected as many names as types and places");
    return -1;
  }
  *plain = PyList_GetSlice(shape[3], 0, PyList_GET_SIZE(shape[3]));
  *key = *plain == NULL ? NULL : PyTuple_New(count + 1);
  if (*key == NULL) goto failed;
  PyTuple_SET_ITEM(*key, 0, Py_NewRef(num_warps));
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *value = value_of(arguments, PyTuple_GET_ITEM(names, i), &position), *one;
    if (value == NULL) goto failed;
    PyObject *variant =
        variant_of_value(value, only_types[i], PyTuple_GET_ITEM(types, 0), PyTuple_GET_ITEM(types, 1), &one);
    Py_DECREF(value);
    if (variant == NULL) goto failed;
    PyTuple_SET_ITEM(*key, i + 1, variant);
    if (PyList_SetItem(*plain, (unsigned char)places[i], one)) goto failed; /* takes `one`, checks the place */
  }
  return 0;
failed:
  Py_CLEAR(*key);
  Py_CLEAR(*plain);
  return -1;
}

#define SHAPE 5 /* items */

static int is_shape(PyObject *const *shape) {
  return PyTuple_Check(shape[0]) && PyBytes_Check(shape[1]) && PyBytes_Check(shape[2]) && PyList_Check(shape[3]) &&
         PyTuple_Check(shape[4]) && PyTuple_GET_SIZE(shape[4]) == 2;
}

/* launch_arguments(names, only_types, places, plain, (pointer, tensor), num_warps, arguments) */
static PyObject *launch_arguments(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  PyObject *key, *plain;
  if (n != SHAPE + 2 || !is_shape(args) || !PyDict_Check(args[SHAPE + 1])) {
    PyErr_SetString(PyExc_TypeError,
                    "launch_arguments takes a tuple, bytes twice, a list, a pair of types, a number and a dict");
    return NULL;
  }
  if (assemble(args, args[SHAPE], args[SHAPE + 1], &key, &plain)) return NULL;
  return Py_BuildValue("(NN)", key, plain); /* takes both */
}

/* Items of a CompiledLaunch. */
enum { ASK, LAUNCH, SETTINGS, DEVICE, CURRENT_STREAM, HOOKS, AS_ONE, COMPILED_ITEMS };

/* Whether `settings` has another hook than `own` under this name, or `own` has functions to call. -1 with an exception. */
static int has_hook(PyObject *settings, PyObject *name, PyObject *own) {
  PyObject *hook = PyObject_GetAttr(settings, name);
  if (hook == NULL) return -1;
  Py_DECREF(hook);
  if (hook != own) return 1;
  PyObject *calls = PyObject_GetAttr(own, name_calls);
  int found = calls == NULL ? -1 : PyObject_IsTrue(calls);
  Py_XDECREF(calls);
  return found;
}

/* Triton's launcher, with the arguments that it takes, on the current stream. */
static PyObject *launch_directly(PyObject *const *compiled, PyObject *programs, PyObject *plain) {
  int as_one = PyObject_IsTrue(compiled[AS_ONE]);
  if (as_one < 0) return NULL;
  PyObject *const *kernels = as_one ? &plain : ((PyListObject *)plain)->ob_item;
  Py_ssize_t before = PyTuple_GET_SIZE(compiled[SETTINGS]), after = as_one ? 1 : PyList_GET_SIZE(plain);
  PyObject **stack = PyMem_New(PyObject *, 4 + before + after);
  if (stack == NULL) return PyErr_NoMemory();
  PyObject *stream = PyObject_CallOneArg(compiled[CURRENT_STREAM], compiled[DEVICE]), *done = NULL;
  if (stream != NULL) {
    stack[0] = programs;
    stack[1] = stack[2] = one_program;
    stack[3] = stream;
    for (Py_ssize_t i = 0; i < before; i++) stack[4 + i] = PyTuple_GET_ITEM(compiled[SETTINGS], i);
    for (Py_ssize_t i = 0; i < after; i++) stack[4 + before + i] = kernels[i];
    done = PyObject_Vectorcall(compiled[LAUNCH], stack, 4 + before + after, NULL);
    Py_DECREF(stream);
  }
  PyMem_Free(stack);
  return done;
}

/* compiled(programs, plain) */
static PyObject *launch_compiled(PyObject *compiled, PyObject *programs, PyObject *plain) {
  PyObject *const args[] = {programs, plain};
  if (!PyTuple_Check(compiled) || PyTuple_GET_SIZE(compiled) != COMPILED_ITEMS)
    return PyObject_Vectorcall(compiled, args, 2, NULL);
  PyObject *const *items = ((PyTupleObject *)compiled)->ob_item, *hooks = items[HOOKS];
  if (items[LAUNCH] == Py_None) return PyObject_Vectorcall(items[ASK], args, 2, NULL);
  if (!PyTuple_Check(items[SETTINGS]) || !PyTuple_Check(hooks) || PyTuple_GET_SIZE(hooks) != 3) {
    PyErr_SetString(PyExc_TypeError, "expected a tuple of settings, and three hooks");
    return NULL;
  }
  int ask = has_hook(PyTuple_GET_ITEM(hooks, 0), name_enter, PyTuple_GET_ITEM(hooks, 1));
  if (!ask) ask = has_hook(PyTuple_GET_ITEM(hooks, 0), name_leave, PyTuple_GET_ITEM(hooks, 2));
  if (ask < 0) return NULL;
  return ask ? PyObject_Vectorcall(items[ASK], args, 2, NULL) : launch_directly(items, programs, plain);
}

/* launch(shape, known, programs, num_warps, arguments) */
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  PyObject *key, *plain, *done = NULL;
  if (n != 5 || !PyTuple_Check(args[0]) || PyTuple_GET_SIZE(args[0]) != SHAPE ||
      !is_shape(((PyTupleObject *)args[0])->ob_item) || !PyDict_Check(args[1]) || !PyDict_Check(args[4])) {
    PyErr_SetString(PyExc_TypeError, "launch takes a shape, a dict, two numbers and a dict");
    return NULL;
  }
  if (assemble(((PyTupleObject *)args[0])->ob_item, args[3], args[4], &key, &plain)) return NULL;
  PyObject *compiled = PyDict_GetItemWithError(args[1], key);
  if (compiled == NULL || compiled == Py_None) {
    if (!PyErr_Occurred()) done = Py_NewRef(Py_False);
  } else {
    Py_INCREF(compiled);
    PyObject *launched = launch_compiled(compiled, args[2], plain);
    Py_DECREF(compiled);
    if (launched != NULL) done = Py_NewRef(Py_True);
    Py_XDECREF(launched);
  }
  Py_DECREF(key);
  Py_DECREF(plain);
  return done;
}

#define STACK 4 /* frames */

/* A new tuple of `first`, if it is not NULL, and of the ids of `things`. */
static PyObject *ids_of(PyObject *first, PyObject *const *things, Py_ssize_t count) {
  Py_ssize_t before = first != NULL;
  PyObject *ids = PyTuple_New(before + count);
  if (ids == NULL) return NULL;
  if (before) PyTuple_SET_ITEM(ids, 0, Py_NewRef(first));
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *id = PyLong_FromVoidPtr(things[i]);
    if (id == NULL) {
      Py_DECREF(ids);
      return NULL;
    }
    PyTuple_SET_ITEM(ids, before + i, id);
  }
  return ids;
}

/* learn(key, codes) */
static PyObject *learned(PyObject *learn, PyObject *key, PyObject *const *codes) {
  PyObject *all = PyTuple_New(STACK);
  if (all == NULL) return NULL;
  for (int i = 0; i < STACK; i++) PyTuple_SET_ITEM(all, i, Py_NewRef(codes[i]));
  PyObject *const args[] = {key, all};
  PyObject *stack = PyObject_Vectorcall(learn, args, 2, NULL);
  Py_DECREF(all);
  return stack;
}

/* A new reference to the variable `req` of a frame, or None without one. */
static PyObject *variable_req(PyObject *frame) {
#if PY_VERSION_HEX >= 0x030C0000
  /* `f_locals` of 3.12 is a new dictionary of all variables. */
  PyObject *request = PyFrame_GetVar((PyFrameObject *)frame, name_req);
  if (request == NULL && PyErr_ExceptionMatches(PyExc_NameError)) {
    PyErr_Clear();
    request = Py_NewRef(Py_None);
  }
  return request;
#else
  PyObject *locals = PyObject_GetAttr(frame, name_locals);
  PyObject *request = locals == NULL ? NULL : PyObject_CallMethodOneArg(locals, name_get, name_req);
  Py_XDECREF(locals);
  return request;
#endif
}

/* The request id of the variable `req` of a frame, or None without one. */
static PyObject *request_in(PyObject *frame) {
  PyObject *request = variable_req(frame);
  PyObject *id = request == NULL ? NULL : PyObject_GetAttr(request, name_rid);
  if (request != NULL && id == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Clear();
    id = Py_NewRef(Py_None);
  }
  Py_XDECREF(request);
  return id;
}

/* (count, site, request id) of the frames with these codes. */
static PyObject *call_of_stack(PyObject *const *frames, PyObject *const *codes, PyObject *const *args) {
  PyObject *key = ids_of(NULL, codes, STACK), *found = NULL;
  if (key == NULL) return NULL;
  PyObject *stack = Py_XNewRef(PyDict_GetItemWithError(args[2], key));
  if (stack == NULL && !PyErr_Occurred()) stack = learned(args[3], key, codes);
  Py_DECREF(key);
  if (stack == NULL) return NULL;
  if (!PyTuple_Check(stack) || PyTuple_GET_SIZE(stack) != 3) {
    PyErr_SetString(PyExc_TypeError, "expected (number, place of the request, anything) for a stack");
  } else {
    Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GET_ITEM(stack, 1));
    PyObject *request = NULL;
    if (at >= STACK)
      PyErr_Format(PyExc_IndexError, "expected one of %d frames, got %zd", STACK, at);
    else if (at >= 0)
      request = request_in(frames[at]);
    else if (!PyErr_Occurred())
      request = Py_NewRef(Py_None);
    if (request != NULL) found = PyTuple_Pack(3, args[1], PyTuple_GET_ITEM(stack, 0), request);
    Py_XDECREF(request);
  }
  Py_DECREF(stack);
  return found;
}

/* call_from(frame, count, stacks, learn) */
static PyObject *call_from(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  if (n != 4 || (args[0] != Py_None && !PyFrame_Check(args[0])) || !PyDict_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "call_from takes a frame or None, a number, a dict and a function");
    return NULL;
  }
  PyObject *frames[STACK], *codes[STACK], *found = NULL;
  PyObject *frame = args[0] == Py_None ? NULL : Py_NewRef(args[0]);
  int count = 0;
  while (frame != NULL && count < STACK) {
    frames[count] = frame;
    codes[count++] = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
    frame = count < STACK ? (PyObject *)PyFrame_GetBack((PyFrameObject *)frame) : NULL;
  }
  if (count == STACK)
    found = call_of_stack(frames, codes, args);
  else if (!PyErr_Occurred())
    found = Py_NewRef(Py_None);
  while (count) {
    Py_DECREF(frames[--count]);
    Py_DECREF(codes[count]);
  }
  return found;
}

/* caller(levels). Past the frame's attributes: reading them is an event for audit hooks. */
static PyObject *caller(PyObject *self, PyObject *levels) {
  long up = PyLong_AsLong(levels);
  if (up == -1 && PyErr_Occurred()) return NULL;
  PyFrameObject *frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (; up > 0 && frame != NULL; up--) {
    PyFrameObject *back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  if (frame == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
  return Py_BuildValue("(NN)", frame, PyFrame_GetCode(frame)); /* takes both */
}

/* Adds (make(), what) to `prepared`. Returns what `make` has returned. */
static PyObject *prepare(PyObject *prepared, PyObject *key, PyObject *what, PyObject *make) {
  PyObject *made = PyObject_CallNoArgs(make);
  PyObject *kept = made == NULL ? NULL : PyTuple_Pack(2, made, what);
  if (kept == NULL || PyDict_SetItem(prepared, key, kept)) Py_CLEAR(made);
  Py_XDECREF(kept);
  return made;
}

/* prepared_for(prepared, purpose, what, make) */
static PyObject *prepared_for(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  if (n != 4 || !PyDict_Check(args[0]) || !PyTuple_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "prepared_for takes a dict, a purpose, a tuple and a function");
    return NULL;
  }
  PyObject *key = ids_of(args[1], ((PyTupleObject *)args[2])->ob_item, PyTuple_GET_SIZE(args[2]));
  if (key == NULL) return NULL;
  PyObject *known = PyDict_GetItemWithError(args[0], key), *found = NULL;
  if (known == NULL) {
    if (!PyErr_Occurred()) found = prepare(args[0], key, args[2], args[3]);
  } else if (PyTuple_Check(known) && PyTuple_GET_SIZE(known)) {
    found = Py_NewRef(PyTuple_GET_ITEM(known, 0));
  } else {
    PyErr_SetString(PyExc_TypeError, "expected tuples of what is prepared");
  }
  Py_DECREF(key);
  return found;
}

static int is_among(PyObject *value, PyObject *list) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++)
    if (PyList_GET_ITEM(list, i) == value) return 1;
  return 0;
}

/* carry_over(now, before, values, void). No Python code runs in the loop, so the lists stay as they are. */
static PyObject *carry_over(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  if (n != 4 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyList_Check(args[2]) ||
      !PyList_Check(args[3])) {
    PyErr_SetString(PyExc_TypeError, "carry_over takes four lists");
    return NULL;
  }
  Py_ssize_t count = PyList_GET_SIZE(args[0]), known = PyList_GET_SIZE(args[1]), place = 0;
  if (PyList_GET_SIZE(args[2]) != known) {
    PyErr_Format(PyExc_ValueError, "expected %zd values, got %zd", known, PyList_GET_SIZE(args[2]));
    return NULL;
  }
  PyObject *carried = PyList_New(count), *missing = PyList_New(0);
  if (carried == NULL || missing == NULL) goto failed;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *wanted = PyList_GET_ITEM(args[0], i), *value = Py_None;
    Py_ssize_t end = known - place < LOOK_AHEAD ? known : place + LOOK_AHEAD;
    for (Py_ssize_t at = place; at < end; at++) {
      if (PyList_GET_ITEM(args[1], at) != wanted) continue;
      value = PyList_GET_ITEM(args[2], at);
      if (is_among(value, args[3])) value = Py_None;
      place = at + 1;
      break;
    }
    PyList_SET_ITEM(carried, i, Py_NewRef(value));
    if (value != Py_None) continue;
    PyObject *index = PyLong_FromSsize_t(i);
    int error = index == NULL || PyList_Append(missing, index);
    Py_XDECREF(index);
    if (error) goto failed;
  }
  return Py_BuildValue("(NN)", carried, missing); /* takes both */
failed:
  Py_XDECREF(carried);
  Py_XDECREF(missing);
  return NULL;
}

/* Rows of 64-bit integers, which follow each other anyhow. */
static int open_table(PyObject *source, Py_buffer *view) {
  if (PyObject_GetBuffer(source, view, PyBUF_FORMAT | PyBUF_STRIDES)) return -1;
  const char *format = view->format == NULL ? "" : view->format;
  if (view->ndim == 2 && view->itemsize == 8 && view->strides[1] == 8 &&
      (strcmp(format, "q") == 0 || strcmp(format, "l") == 0))
    return 0;
  PyErr_Format(PyExc_TypeError, "expected rows of int64, got %d dimensions of items of %zd bytes with format '%s'",
               view->ndim, view->itemsize, format);
  PyBuffer_Release(view);
  return -1;
}

static int64_t cell(const Py_buffer *table, Py_ssize_t row, Py_ssize_t column) {
  int64_t value;
  memcpy(&value, (const char *)table->buf + table->strides[0] * row + 8 * column, 8);
  return value;
}

/* -1 with an exception for what is no column of `table`. */
static Py_ssize_t column_of(const Py_buffer *table, PyObject *object) {
  Py_ssize_t column = PyNumber_AsSsize_t(object, PyExc_IndexError);
  if (column == -1 && PyErr_Occurred()) return -1;
  if (column >= 0 && column < table->shape[1]) return column;
  PyErr_Format(PyExc_IndexError, "expected a column below %zd, got %zd", table->shape[1], column);
  return -1;
}

/* are_equal(rows, column) */
static PyObject *are_equal(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  Py_buffer rows;
  if (n != 2) {
    PyErr_SetString(PyExc_TypeError, "are_equal takes rows and a column");
    return NULL;
  }
  if (open_table(args[0], &rows)) return NULL;
  PyObject *found = NULL;
  Py_ssize_t column = column_of(&rows, args[1]);
  if (column >= 0) {
    Py_ssize_t row = 1;
    while (row < rows.shape[0] && cell(&rows, row, column) == cell(&rows, 0, column)) row++;
    found = PyBool_FromLong(row >= rows.shape[0]);
  }
  PyBuffer_Release(&rows);
  return found;
}

typedef struct {
  int64_t first, second, count;
} Pair;

/* A new list of the pairs, or NULL with an exception. There are few different ones, so they are searched one by one. */
static PyObject *pairs_of(const Py_buffer *rows, Py_ssize_t first, Py_ssize_t second) {
  Pair *pairs = PyMem_New(Pair, rows->shape[0] + 1);
  if (pairs == NULL) return PyErr_NoMemory();
  Py_ssize_t known = 0, at = 0;
  for (Py_ssize_t row = 0; row < rows->shape[0]; row++) {
    int64_t a = cell(rows, row, first), b = cell(rows, row, second);
    if (at == known || pairs[at].first != a || pairs[at].second != b) /* often it is that of the row before */
      for (at = 0; at < known && (pairs[at].first != a || pairs[at].second != b);) at++;
    if (at == known) {
      Pair fresh = {a, b, 0};
      pairs[known++] = fresh;
    }
    pairs[at].count++;
  }
  PyObject *list = PyList_New(known);
  for (Py_ssize_t i = 0; list != NULL && i < known; i++) {
    PyObject *item = Py_BuildValue("(LLL)", (long long)pairs[i].first, (long long)pairs[i].second,
                                   (long long)pairs[i].count);
    if (item == NULL)
      Py_CLEAR(list);
    else
      PyList_SET_ITEM(list, i, item);
  }
  PyMem_Free(pairs);
  return list;
}

/* count_pairs(rows, first, second) */
static PyObject *count_pairs(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  Py_buffer rows;
  if (n != 3) {
    PyErr_SetString(PyExc_TypeError, "count_pairs takes rows and two columns");
    return NULL;
  }
  if (open_table(args[0], &rows)) return NULL;
  PyObject *found = NULL;
  Py_ssize_t first = column_of(&rows, args[1]), second = first < 0 ? -1 : column_of(&rows, args[2]);
  if (second >= 0) found = pairs_of(&rows, first, second);
  PyBuffer_Release(&rows);
  return found;
}

/* Words of a key: what names its reader, and some columns. Each has two multipliers. */
#define MOST_COLUMNS 32

typedef struct {
  const Py_buffer *rows;
  Py_ssize_t columns[MOST_COLUMNS], count;
  uint64_t multipliers[MOST_COLUMNS + 1];
} Keys;

static uint64_t mixed_word(const Keys *keys, Py_ssize_t word, uint64_t x) {
  x ^= x >> 32;
  x *= keys->multipliers[word];
  x ^= x >> 29;
  x *= keys->multipliers[keys->count - word];
  return x ^ (x >> 32);
}

static int read_keys(Keys *keys, PyObject *columns, PyObject *multipliers) {
  keys->count = PyTuple_GET_SIZE(columns);
  if (keys->count > MOST_COLUMNS || PyTuple_GET_SIZE(multipliers) != keys->count + 1) {
    PyErr_Format(PyExc_ValueError, "expected at most %d columns and one multiplier more, got %zd and %zd",
                 MOST_COLUMNS, keys->count, PyTuple_GET_SIZE(multipliers));
    return -1;
  }
  for (Py_ssize_t i = 0; i < keys->count; i++)
    if ((keys->columns[i] = column_of(keys->rows, PyTuple_GET_ITEM(columns, i))) < 0) return -1;
  for (Py_ssize_t i = 0; i <= keys->count; i++) {
    keys->multipliers[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(multipliers, i));
    if (keys->multipliers[i] == (uint64_t)-1 && PyErr_Occurred()) return -1;
  }
  return 0;
}

/* The hash of the name of `reader`, of None without one. -1 with an exception. */
static Py_hash_t hash_of_name(PyObject *names, int64_t reader) {
  PyObject *number = PyLong_FromLongLong(reader);
  if (number == NULL) return -1;
  PyObject *name = PyDict_GetItemWithError(names, number);
  Py_DECREF(number);
  if (name == NULL && PyErr_Occurred()) return -1;
  name = Py_NewRef(name == NULL ? Py_None : name);
  Py_hash_t hash = PyObject_Hash(name);
  Py_DECREF(name);
  return hash;
}

/* keys_of_rows(rows, columns, multipliers, reader, names) */
static PyObject *keys_of_rows(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  Py_buffer rows;
  if (n != 5 || !PyTuple_Check(args[1]) || !PyTuple_Check(args[2]) || !PyDict_Check(args[4])) {
    PyErr_SetString(PyExc_TypeError, "keys_of_rows takes rows, two tuples, a column and a dict");
    return NULL;
  }
  if (open_table(args[0], &rows)) return NULL;
  Keys keys = {.rows = &rows};
  PyObject *found = NULL;
  Py_ssize_t reader = column_of(&rows, args[3]);
  if (reader < 0 || read_keys(&keys, args[1], args[2])) goto done;
  found = PyByteArray_FromStringAndSize(NULL, 8 * rows.shape[0]);
  char *out = found == NULL ? NULL : PyByteArray_AS_STRING(found);
  for (Py_ssize_t row = 0; found != NULL && row < rows.shape[0]; row++) {
    Py_hash_t name = hash_of_name(args[4], cell(&rows, row, reader));
    if (name == -1 && PyErr_Occurred()) {
      Py_CLEAR(found);
      break;
    }
    uint64_t key = mixed_word(&keys, 0, (uint64_t)(int64_t)name);
    for (Py_ssize_t i = 0; i < keys.count; i++)
      key += mixed_word(&keys, i + 1, (uint64_t)cell(&rows, row, keys.columns[i]));
    memcpy(out + 8 * row, &key, 8);
  }
done:
  PyBuffer_Release(&rows);
  return found;
}

#define MOST_KINDS 32

typedef struct {
  int64_t kind;
  Py_buffer flags;
} Kind;

/* Returns how many there are, -1 with an exception. */
static Py_ssize_t open_kinds(PyObject *known, Kind *kinds) {
  Py_ssize_t count = 0, place = 0;
  PyObject *kind, *flags;
  if (PyDict_GET_SIZE(known) > MOST_KINDS) {
    PyErr_Format(PyExc_ValueError, "expected at most %d kinds, got %zd", MOST_KINDS, PyDict_GET_SIZE(known));
    return -1;
  }
  while (PyDict_Next(known, &place, &kind, &flags)) {
    if (int64_of(kind, &kinds[count].kind) ||
        PyObject_GetBuffer(flags, &kinds[count].flags, PyBUF_SIMPLE)) {
      while (count) PyBuffer_Release(&kinds[--count].flags);
      return -1;
    }
    count++;
  }
  return count;
}

/* `dividend` / `divisor`, which is positive, as Python rounds it. */
static int64_t floor_of(int64_t dividend, int64_t divisor) {
  return dividend / divisor - (dividend % divisor < 0);
}

static char lacks(const Kind *kinds, Py_ssize_t count, int64_t kind, int64_t slot) {
  if (slot < 0) slot = 0;
  for (Py_ssize_t i = 0; i < count; i++)
    if (kinds[i].kind == kind)
      return slot >= kinds[i].flags.len || !((const char *)kinds[i].flags.buf)[slot];
  return 1;
}

/* lacking(rows, tag, slot, tags_per_kind, known) */
static PyObject *lacking(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  Py_buffer rows;
  Kind kinds[MOST_KINDS];
  int64_t per_kind;
  if (n != 5 || !PyDict_Check(args[4])) {
    PyErr_SetString(PyExc_TypeError, "lacking takes rows, two columns, a number and a dict");
    return NULL;
  }
  if (int64_of(args[3], &per_kind)) return NULL;
  if (per_kind < 1) return PyErr_Format(PyExc_ValueError, "expected tags of each kind, got %lld", (long long)per_kind);
  if (open_table(args[0], &rows)) return NULL;
  PyObject *found = NULL;
  Py_ssize_t tag = column_of(&rows, args[1]), slot = tag < 0 ? -1 : column_of(&rows, args[2]);
  Py_ssize_t count = slot < 0 ? -1 : open_kinds(args[4], kinds);
  if (count >= 0) {
    found = PyByteArray_FromStringAndSize(NULL, rows.shape[0]);
    char *out = found == NULL ? NULL : PyByteArray_AS_STRING(found);
    for (Py_ssize_t row = 0; out != NULL && row < rows.shape[0]; row++)
      out[row] = lacks(kinds, count, floor_of(cell(&rows, row, tag), per_kind), cell(&rows, row, slot));
    while (count) PyBuffer_Release(&kinds[--count].flags);
  }
  PyBuffer_Release(&rows);
  return found;
}

/* One buffer of unsigned 64-bit, or of 32-bit integers. */
static int open_words(PyObject *source, Py_buffer *view, Py_ssize_t bytes, const char *formats) {
  if (PyObject_GetBuffer(source, view, PyBUF_FORMAT | PyBUF_ND)) return -1;
  const char *format = view->format == NULL ? "" : view->format;
  if (view->ndim == 1 && view->itemsize == bytes && strlen(format) == 1 && strchr(formats, *format)) return 0;
  PyErr_Format(PyExc_TypeError, "expected a list of items of %zd bytes with a format of '%s', got %zd and '%s'", bytes,
               formats, view->itemsize, format);
  PyBuffer_Release(view);
  return -1;
}

/* What look_up returns, or NULL with an exception. `counts`, `last`: 0 and anything, of each index. */
static PyObject *looked_up(const Py_buffer *keys, const Py_buffer *table, const Py_buffer *indices, int64_t *counts,
                           int64_t *last, int64_t size) {
  PyObject *found = PyList_New(0), *missing = PyList_New(0), *item;
  uint64_t mask = (uint64_t)table->shape[0] - 1;
  if (found == NULL || missing == NULL) goto failed;
  for (Py_ssize_t row = 0; row < keys->shape[0]; row++) {
    uint64_t key = ((const uint64_t *)keys->buf)[row], at = key & mask;
    int32_t index = ((const int32_t *)indices->buf)[at];
    if (((const uint64_t *)table->buf)[at] == key && index >= 0 && index < size) {
      counts[index]++;
      last[index] = row;
      continue;
    }
    item = PyLong_FromSsize_t(row);
    int error = item == NULL || PyList_Append(missing, item);
    Py_XDECREF(item);
    if (error) goto failed;
  }
  for (int64_t index = 0; index < size; index++) {
    if (!counts[index]) continue;
    item = Py_BuildValue("(LLL)", (long long)index, (long long)counts[index], (long long)last[index]);
    int error = item == NULL || PyList_Append(found, item);
    Py_XDECREF(item);
    if (error) goto failed;
  }
  return Py_BuildValue("(NN)", found, missing); /* takes both */
failed:
  Py_XDECREF(found);
  Py_XDECREF(missing);
  return NULL;
}

/* look_up(keys, table, indices, size) */
static PyObject *look_up(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  Py_buffer keys, table, indices;
  int64_t size;
  if (n != 4) {
    PyErr_SetString(PyExc_TypeError, "look_up takes keys, a table of them, their indices and how many there are");
    return NULL;
  }
  if (int64_of(args[3], &size)) return NULL;
  PyObject *found = NULL;
  if (open_words(args[0], &keys, 8, "QL")) return NULL;
  if (open_words(args[1], &table, 8, "QL")) goto no_table;
  if (open_words(args[2], &indices, 4, "il")) goto no_indices;
  Py_ssize_t places = table.shape[0];
  if (places < 1 || (places & (places - 1)) || indices.shape[0] != places || size < 0) {
    PyErr_Format(PyExc_ValueError, "expected a table of a power of two, got %zd keys and %zd indices", places,
                 indices.shape[0]);
    goto done;
  }
  int64_t *counts = PyMem_Calloc(2 * size + 1, sizeof(int64_t));
  if (counts == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  found = looked_up(&keys, &table, &indices, counts, counts + size, size);
  PyMem_Free(counts);
done:
  PyBuffer_Release(&indices);
no_indices:
  PyBuffer_Release(&table);
no_table:
  PyBuffer_Release(&keys);
  return found;
}

/* HostClock(spent_ns=0). It has no references, so Python's collector need not know it. */
typedef struct {
  PyObject_HEAD
  long long spent_ns, since;
  Py_ssize_t depth;
} HostClock;

/* As time.perf_counter_ns. */
static long long now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (long long)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int clock_init(HostClock *clock, PyObject *args, PyObject *names) {
  static char *known[] = {"spent_ns", NULL};
  clock->spent_ns = clock->since = clock->depth = 0;
  return PyArg_ParseTupleAndKeywords(args, names, "|L", known, &clock->spent_ns) ? 0 : -1;
}

static PyObject *clock_enter(HostClock *clock, PyObject *none) {
  if (clock->depth++ == 0) clock->since = now_ns();
  return Py_NewRef(clock);
}

static PyObject *clock_exit(HostClock *clock, PyObject *const *error, Py_ssize_t n) {
  if (--clock->depth == 0) clock->spent_ns += now_ns() - clock->since;
  Py_RETURN_NONE;
}

static void clock_dealloc(PyObject *clock) {
  PyTypeObject *type = Py_TYPE(clock);
  type->tp_free(clock);
  Py_DECREF(type);
}

static PyMethodDef clock_methods[] = {
    {"__enter__", (PyCFunction)clock_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))clock_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL}};

static PyMemberDef clock_members[] = {{"spent_ns", T_LONGLONG, offsetof(HostClock, spent_ns), READONLY, NULL},
                                      {NULL, 0, 0, 0, NULL}};

static PyType_Slot clock_slots[] = {{Py_tp_init, clock_init},       {Py_tp_dealloc, clock_dealloc},
                                    {Py_tp_methods, clock_methods}, {Py_tp_members, clock_members},
                                    {0, NULL}};

static PyType_Spec clock_spec = {"kv_canary_host_code.HostClock", sizeof(HostClock), 0, Py_TPFLAGS_DEFAULT,
                                 clock_slots};

/* Hooked(kind, original, hook, inner, contain, skips_empty). Python's collector knows it: hooks may lead back to it. */
enum { BEFORE, AFTER, AROUND };
#define FEW_ARGUMENTS 16

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *original, *hook, *inner, *contain, *attributes, *weak_references;
  int kind;
  char skips_empty;
} Hooked;

/* What the hook returns. None after an error that `contain` has taken. */
static PyObject *call_hook(Hooked *hooked, PyObject *const *args, size_t n, PyObject *names) {
  PyObject *returned = PyObject_Vectorcall(hooked->inner, args, n, names);
  if (returned != NULL || hooked->contain == Py_None || !PyErr_ExceptionMatches(PyExc_Exception)) return returned;
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace != NULL) PyException_SetTraceback(error, trace);
  PyObject *contained = PyObject_CallOneArg(hooked->contain, error);
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(trace);
  if (contained == NULL) return NULL;
  Py_DECREF(contained);
  Py_RETURN_NONE;
}

/* The hook, with `first` before the other arguments: the original that it surrounds, or what that has returned. */
static PyObject *call_with(Hooked *hooked, PyObject *first, PyObject *const *args, Py_ssize_t n, PyObject *names) {
  PyObject *few[FEW_ARGUMENTS], **all = few;
  Py_ssize_t count = n + (names == NULL ? 0 : PyTuple_GET_SIZE(names));
  if (count >= FEW_ARGUMENTS && (all = PyMem_New(PyObject *, count + 1)) == NULL) return PyErr_NoMemory();
  all[0] = first;
  if (count) memcpy(all + 1, args, count * sizeof(PyObject *));
  PyObject *returned = call_hook(hooked, all, n + 1, names);
  if (all != few) PyMem_Free(all);
  return returned;
}

/* Whether `tensor` has no elements. An Exception is the hook's to raise. -1 with anything else, as an interrupt. */
static int is_empty(PyObject *tensor) {
  PyObject *count = PyObject_CallMethodNoArgs(tensor, name_numel);
  int empty = count != NULL && PyLong_Check(count) && !PyObject_IsTrue(count);
  Py_XDECREF(count);
  if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
  return PyErr_Occurred() ? -1 : empty;
}

static PyObject *call_before(Hooked *hooked, PyObject *const *args, Py_ssize_t n, PyObject *names) {
  int skipped = hooked->skips_empty && n > 1 ? is_empty(args[1]) : 0;
  if (skipped < 0) return NULL;
  if (!skipped) {
    PyObject *changed = call_hook(hooked, args, n, names);
    if (changed == NULL) return NULL;
    if (changed != Py_None) {
      PyObject *positional, *named, *returned = NULL;
      if (!PyTuple_Check(changed) || !PyArg_ParseTuple(changed, "O!O!", &PyTuple_Type, &positional, &PyDict_Type, &named))
        PyErr_SetString(PyExc_TypeError, "expected None or a tuple and a dict of arguments from a hook");
      else
        returned = PyObject_Call(hooked->original, positional, named);
      Py_DECREF(changed);
      return returned;
    }
    Py_DECREF(changed);
  }
  return PyObject_Vectorcall(hooked->original, args, n, names);
}

static PyObject *hooked_call(PyObject *self, PyObject *const *args, size_t flagged, PyObject *names) {
  Hooked *hooked = (Hooked *)self;
  Py_ssize_t n = PyVectorcall_NARGS(flagged);
  if (hooked->kind == BEFORE) return call_before(hooked, args, n, names);
  if (hooked->kind == AROUND) return call_with(hooked, hooked->original, args, n, names);
  PyObject *returned = PyObject_Vectorcall(hooked->original, args, n, names);
  if (returned == NULL) return NULL;
  PyObject *modified = call_with(hooked, returned, args, n, names);
  if (modified != Py_None) {
    Py_DECREF(returned);
    return modified;
  }
  Py_DECREF(modified);
  return returned;
}

static PyObject *hooked_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  static char *known[] = {"kind", "original", "hook", "inner", "contain", "skips_empty", NULL};
  PyObject *original, *hook, *inner, *contain;
  int kind, skips_empty;
  if (!PyArg_ParseTupleAndKeywords(args, names, "iOOOOp", known, &kind, &original, &hook, &inner, &contain,
                                   &skips_empty))
    return NULL;
  if (kind < BEFORE || kind > AROUND)
    return PyErr_Format(PyExc_ValueError, "expected a kind of hook from %d to %d, got %d", BEFORE, AROUND, kind);
  Hooked *hooked = (Hooked *)type->tp_alloc(type, 0);
  if (hooked == NULL) return NULL;
  hooked->call = hooked_call;
  hooked->kind = kind;
  hooked->skips_empty = (char)skips_empty;
  hooked->original = Py_NewRef(original);
  hooked->hook = Py_NewRef(hook);
  hooked->inner = Py_NewRef(inner);
  hooked->contain = Py_NewRef(contain);
  return (PyObject *)hooked;
}

static PyObject *hooked_bind(PyObject *self, PyObject *instance, PyObject *type) {
  return instance == NULL || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

static int hooked_traverse(PyObject *self, visitproc visit, void *arg) {
  Hooked *hooked = (Hooked *)self;
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(hooked->original);
  Py_VISIT(hooked->hook);
  Py_VISIT(hooked->inner);
  Py_VISIT(hooked->contain);
  Py_VISIT(hooked->attributes);
  return 0;
}

static int hooked_clear(PyObject *self) {
  Hooked *hooked = (Hooked *)self;
  Py_CLEAR(hooked->original);
  Py_CLEAR(hooked->hook);
  Py_CLEAR(hooked->inner);
  Py_CLEAR(hooked->contain);
  Py_CLEAR(hooked->attributes);
  return 0;
}

static void hooked_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (((Hooked *)self)->weak_references != NULL) PyObject_ClearWeakRefs(self);
  hooked_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMemberDef hooked_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Hooked, call), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(Hooked, attributes), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Hooked, weak_references), READONLY, NULL},
    {"hook", T_OBJECT, offsetof(Hooked, hook), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyGetSetDef hooked_getset[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
                                      {NULL, NULL, NULL, NULL, NULL}};

/* As of a function: pickle finds it by its name, and a copy is itself. */
static PyObject *hooked_reduce(PyObject *self, PyObject *none) {
  return PyObject_GetAttrString(self, "__qualname__");
}

static PyMethodDef hooked_methods[] = {{"__reduce__", hooked_reduce, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};

static PyType_Slot hooked_slots[] = {{Py_tp_new, hooked_new},           {Py_tp_call, PyVectorcall_Call},
                                     {Py_tp_descr_get, hooked_bind},    {Py_tp_members, hooked_members},
                                     {Py_tp_getset, hooked_getset},     {Py_tp_methods, hooked_methods},
                                     {Py_tp_traverse, hooked_traverse},
                                     {Py_tp_clear, hooked_clear},       {Py_tp_dealloc, hooked_dealloc},
                                     {0, NULL}};

static PyType_Spec hooked_spec = {"kv_canary_host_code.Hooked", sizeof(Hooked), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                      Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_IMMUTABLETYPE,
                                  hooked_slots};

/* Adds a class that `spec` describes. Returns -1 with an exception. */
static int add_type(PyObject *module, const char *name, PyType_Spec *spec) {
  PyObject *type = PyType_FromSpec(spec);
  int error = type == NULL || PyModule_AddObjectRef(module, name, type);
  Py_XDECREF(type);
  return error ? -1 : 0;
}

static PyMethodDef methods[] = {
    {"are_equal", (PyCFunction)(void (*)(void))are_equal, METH_FASTCALL, NULL},
    {"call_from", (PyCFunction)(void (*)(void))call_from, METH_FASTCALL, NULL},
    {"caller", (PyCFunction)caller, METH_O, NULL},
    {"carry_over", (PyCFunction)(void (*)(void))carry_over, METH_FASTCALL, NULL},
    {"chain_of_tokens", (PyCFunction)(void (*)(void))chain_of_tokens, METH_FASTCALL, NULL},
    {"count_pairs", (PyCFunction)(void (*)(void))count_pairs, METH_FASTCALL, NULL},
    {"describe_pages", (PyCFunction)(void (*)(void))describe_pages, METH_FASTCALL, NULL},
    {"fingerprint_rows", (PyCFunction)(void (*)(void))fingerprint_rows, METH_FASTCALL, NULL},
    {"keys_of_rows", (PyCFunction)(void (*)(void))keys_of_rows, METH_FASTCALL, NULL},
    {"lacking", (PyCFunction)(void (*)(void))lacking, METH_FASTCALL, NULL},
    {"leading", (PyCFunction)(void (*)(void))leading, METH_FASTCALL, NULL},
    {"look_up", (PyCFunction)(void (*)(void))look_up, METH_FASTCALL, NULL},
    {"pack_lists", (PyCFunction)(void (*)(void))pack_lists, METH_FASTCALL, NULL},
    {"pointers_to", (PyCFunction)(void (*)(void))pointers_to, METH_FASTCALL, NULL},
    {"prepared_for", (PyCFunction)(void (*)(void))prepared_for, METH_FASTCALL, NULL},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL},
    {"launch_arguments", (PyCFunction)(void (*)(void))launch_arguments, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kv_canary_host_code", NULL, -1, methods};

PyMODINIT_FUNC PyInit_kv_canary_host_code(void) {
  for (size_t i = 0; i < sizeof interned / sizeof *interned; i++)
    if ((*interned[i].place = PyUnicode_InternFromString(interned[i].text)) == NULL) return NULL;
  one_program = PyLong_FromLong(1);
  int32_first = PyLong_FromLongLong(INT32_MIN);
  int32_end = PyLong_FromLongLong((int64_t)INT32_MAX + 1);
  if (one_program == NULL || int32_first == NULL || int32_end == NULL) return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (module != NULL && (add_type(module, "HostClock", &clock_spec) || add_type(module, "Hooked", &hooked_spec)))
    Py_CLEAR(module);
  return module;
}
