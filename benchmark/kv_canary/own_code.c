/* Counts calls and time of the canary's own functions in one thread. See own_code.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define SLOTS 16384 /* a power of two */
#define DEPTH 4096

enum { FOREIGN, OURS, INHERITS };

typedef struct {
  PyCodeObject *code; /* kept alive */
  int kind;
} Function;

typedef struct {
  int function, root; /* root -1: not the canary's */
} Place;

typedef struct {
  int root, function; /* function -1: empty */
  uint64_t calls;
  int64_t ns;
} Cell;

static Function functions[SLOTS];
static Cell cells[SLOTS];
static Place stack[DEPTH];
static int depth, lost;
static int64_t last, longest, dropped_ns, dropped;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int kind_of(PyCodeObject *code) {
  const char *path = PyUnicode_AsUTF8(code->co_filename);
  if (path == NULL) {
    PyErr_Clear();
    return FOREIGN;
  }
  if (strstr(path, "/srt/kv_canary/") || strstr(path, "sglang_kv_canary")) return OURS;
  if (strstr(path, "/sglang/") || strstr(path, "without_kernels")) return FOREIGN;
  if (strstr(path, "/torch/utils/_contextlib.py")) return FOREIGN; /* decorators of SGLang's functions */
  return INHERITS;
}

static int function_of(PyCodeObject *code) {
  uint64_t at = ((uintptr_t)code >> 4) * 11400714819323198485u >> 50;
  for (int i = 0; i < SLOTS; i++, at = (at + 1) % SLOTS) {
    if (functions[at].code == code) return (int)at;
    if (functions[at].code == NULL) {
      Py_INCREF(code);
      functions[at].code = code;
      functions[at].kind = kind_of(code);
      return (int)at;
    }
  }
  return -1;
}

static Cell *cell_of(int root, int function) {
  uint64_t key = (uint64_t)root << 32 | (uint32_t)function;
  uint64_t at = key * 11400714819323198485u >> 50;
  for (int i = 0; i < SLOTS; i++, at = (at + 1) % SLOTS) {
    Cell *cell = &cells[at];
    if (cell->function == -1) {
      cell->root = root;
      cell->function = function;
    }
    if (cell->root == root && cell->function == function) return cell;
  }
  return NULL;
}

static int on_event(PyObject *self, PyFrameObject *frame, int what, PyObject *arg) {
  if (what != PyTrace_CALL && what != PyTrace_RETURN) return 0;
  int64_t spent = now_ns() - last;
  if (depth > 0 && stack[depth - 1].root >= 0) {
    if (spent > longest) {
      dropped++;
      dropped_ns += spent;
    } else {
      Cell *cell = cell_of(stack[depth - 1].root, stack[depth - 1].function);
      if (cell != NULL) cell->ns += spent;
    }
  }
  if (what == PyTrace_RETURN) {
    if (lost > 0)
      lost--;
    else if (depth > 0)
      depth--;
  } else if (depth == DEPTH) {
    lost++;
  } else {
    PyCodeObject *code = PyFrame_GetCode(frame);
    int function = function_of(code), root = -1;
    Py_DECREF(code);
    int above = depth > 0 ? stack[depth - 1].root : -1;
    if (function >= 0 && functions[function].kind == OURS) root = above >= 0 ? above : function;
    if (function >= 0 && functions[function].kind == INHERITS) root = above;
    stack[depth++] = (Place){function, root};
    if (root >= 0) {
      Cell *cell = cell_of(root, function);
      if (cell != NULL) cell->calls++;
    }
  }
  last = now_ns();
  return 0;
}

/* start(longest): counts from now on, in this thread. Drops parts longer than `longest` ns. */
static PyObject *start(PyObject *self, PyObject *argument) {
  longest = PyLong_AsLongLong(argument);
  if (longest == -1 && PyErr_Occurred()) return NULL;
  for (int i = 0; i < SLOTS; i++) cells[i] = (Cell){-1, -1, 0, 0};
  depth = lost = 0;
  dropped = dropped_ns = 0;
  last = now_ns();
  PyEval_SetProfile(on_event, NULL);
  Py_RETURN_NONE;
}

/* stop() -> (cells as (entry, function, calls, ns), parts dropped, their ns); functions as code objects */
static PyObject *stop(PyObject *self, PyObject *unused) {
  PyEval_SetProfile(NULL, NULL);
  PyObject *found = PyList_New(0);
  for (int i = 0; found != NULL && i < SLOTS; i++) {
    if (cells[i].function < 0) continue;
    PyObject *one = Py_BuildValue("OOKL", functions[cells[i].root].code, functions[cells[i].function].code,
                                  (unsigned long long)cells[i].calls, (long long)cells[i].ns);
    if (one == NULL || PyList_Append(found, one)) Py_CLEAR(found);
    Py_XDECREF(one);
  }
  if (found == NULL) return NULL;
  return Py_BuildValue("NLL", found, (long long)dropped, (long long)dropped_ns);
}

static PyMethodDef methods[] = {{"start", start, METH_O, NULL}, {"stop", stop, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kv_canary_own_code", NULL, -1, methods};
PyMODINIT_FUNC PyInit_kv_canary_own_code(void) { return PyModule_Create(&definition); }
