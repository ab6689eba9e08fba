/* The host's loops over tokens and launch arguments. `twins.py` has the same functions in Python, which define them.
 *
 * It is compiled where the canary runs. MIX_INCREMENT, MIX_MULTIPLIER_1, MIX_MULTIPLIER_2 and CHAIN_MULTIPLIER come
 * from `record.py`. All of it runs with Python's lock held. Arithmetic is modulo 2^64.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

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

/* One entry of `known`: its span, and its tokens from `offset` on. Returns how many there are, -1 with an exception. */
static Py_ssize_t pack_one(PyObject *entry, char *span, char *out, int64_t room, int64_t offset) {
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
  words[0] = offset;
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
        pack_one(entry, out + 8 * SPAN_WORDS * i, out + 8 * SPAN_WORDS * count, room, packed);
    Py_DECREF(entry);
    if (size < 0) return NULL;
    packed += size;
  }
  return PyLong_FromLongLong(packed);
}

static PyObject *name_address, *name_variant, *name_dtype, *name_data_ptr;
static PyObject *int32_first, *int32_end;

/* A new reference to what tells variants apart; `plain` becomes a new reference to what a launch takes. */
static PyObject *variant_of_value(PyObject *value, int only_type, PyObject *pointer, PyObject *tensor,
                                  PyObject **plain) {
  PyObject *variant = NULL;
  *plain = NULL;
  if ((PyObject *)Py_TYPE(value) == pointer) {
    variant = PyObject_GetAttr(value, name_variant);
    *plain = PyObject_GetAttr(value, name_address);
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
      *plain = PyObject_CallMethodNoArgs(value, name_data_ptr);
      PyObject *dtype = *plain == NULL ? NULL : PyObject_GetAttr(value, name_dtype);
      unsigned long long address = dtype == NULL ? 0 : PyLong_AsUnsignedLongLong(*plain);
      if (dtype != NULL && !PyErr_Occurred())
        variant = PyTuple_Pack(2, dtype, address % ALIGNED ? Py_False : Py_True);
      Py_XDECREF(dtype);
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

/* launch_arguments(names, only_types, places, plain, (pointer, tensor), num_warps, arguments) */
static PyObject *launch_arguments(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  if (n != 7 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[1]) || !PyTuple_Check(args[2]) ||
      !PyList_Check(args[3]) || !PyTuple_Check(args[4]) || PyTuple_GET_SIZE(args[4]) != 2 ||
      !PyDict_Check(args[6])) {
    PyErr_SetString(PyExc_TypeError,
                    "launch_arguments takes three tuples, a list, a pair of types, a number and a dict");
    return NULL;
  }
  Py_ssize_t count = PyTuple_GET_SIZE(args[0]);
  if (PyTuple_GET_SIZE(args[1]) != count || PyTuple_GET_SIZE(args[2]) != count) {
    PyErr_SetString(PyExc_ValueError, "expected as many names as types and places");
    return NULL;
  }
  PyObject *plain = PyList_GetSlice(args[3], 0, PyList_GET_SIZE(args[3]));
  PyObject *key = plain == NULL ? NULL : PyTuple_New(count + 1);
  if (key == NULL) goto failed;
  PyTuple_SET_ITEM(key, 0, Py_NewRef(args[5]));
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *name = PyTuple_GET_ITEM(args[0], i);
    PyObject *value = PyDict_GetItemWithError(args[6], name), *one;
    if (value == NULL) {
      if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, name);
      goto failed;
    }
    int only_type = PyObject_IsTrue(PyTuple_GET_ITEM(args[1], i));
    Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(args[2], i));
    if (only_type < 0 || (place == -1 && PyErr_Occurred())) goto failed;
    Py_INCREF(value);
    PyObject *variant =
        variant_of_value(value, only_type, PyTuple_GET_ITEM(args[4], 0),
                         PyTuple_GET_ITEM(args[4], 1), &one);
    Py_DECREF(value);
    if (variant == NULL) goto failed;
    PyTuple_SET_ITEM(key, i + 1, variant);
    if (PyList_SetItem(plain, place, one)) goto failed; /* takes `one`, checks `place` */
  }
  return Py_BuildValue("(NN)", key, plain); /* takes both */
failed:
  Py_XDECREF(key);
  Py_XDECREF(plain);
  return NULL;
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

static PyMethodDef methods[] = {
    {"carry_over", (PyCFunction)(void (*)(void))carry_over, METH_FASTCALL, NULL},
    {"chain_of_tokens", (PyCFunction)(void (*)(void))chain_of_tokens, METH_FASTCALL, NULL},
    {"pack_lists", (PyCFunction)(void (*)(void))pack_lists, METH_FASTCALL, NULL},
    {"launch_arguments", (PyCFunction)(void (*)(void))launch_arguments, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kv_canary_host_code", NULL, -1, methods};

PyMODINIT_FUNC PyInit_kv_canary_host_code(void) {
  name_address = PyUnicode_InternFromString("address");
  name_variant = PyUnicode_InternFromString("variant");
  name_dtype = PyUnicode_InternFromString("dtype");
  name_data_ptr = PyUnicode_InternFromString("data_ptr");
  int32_first = PyLong_FromLongLong(INT32_MIN);
  int32_end = PyLong_FromLongLong((int64_t)INT32_MAX + 1);
  if (name_address == NULL || name_variant == NULL || name_dtype == NULL || name_data_ptr == NULL ||
      int32_first == NULL || int32_end == NULL)
    return NULL;
  return PyModule_Create(&definition);
}
