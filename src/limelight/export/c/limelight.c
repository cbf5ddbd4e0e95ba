/* See limelight.h. What to launch is in limelight_tables.h, which is generated. */
#define _POSIX_C_SOURCE 200809L
#include "limelight.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The tables' types. An expression is an index for whole() or, of a floating-point parameter, for
 * number(). Names of kinds are those of the manifest. */

typedef enum { KIND_POINTER, KIND_I32, KIND_I64, KIND_U32, KIND_U64, KIND_FP32, KIND_FP64 } kind;
typedef struct { uint8_t kind; uint16_t multiple_of; } parameter;

typedef struct {
  const char *entry, *file; /* without its ending */
  int threads, shared, parameter_count;
  const parameter *parameters;
} kernel_code;

typedef struct {
  const char *name;
  size_t place;            /* of its limelight_tensor in limelight_attention */
  uint16_t value;          /* its address among the values */
  uint8_t dimensions, optional;
  struct { uint16_t size, size_value, stride, stride_value; } axes[4]; /* value 0: not free */
} tensor;

typedef struct {
  uint16_t kernel, grid, needed_for_count;
  const uint16_t *needed_for, *arguments;
} launch;
typedef struct { uint16_t value, size; } slice;
typedef enum { LESS, LESS_EQUAL, GREATER, GREATER_EQUAL } comparison;
typedef struct { uint8_t of_numbers, operator; uint16_t left, right; const char *text; } condition;

typedef struct {
  limelight_operation operation;
  limelight_dtype dtype;
  int head_dim, value_dim, softcap, bias_gradients, target, portable;
  const char *mask, *bias;
  int tensor_count, condition_count, slice_count, launch_count;
  const tensor *tensors;
  const condition *conditions;
  const slice *slices;
  const launch *launches;
} variant;

static inline int64_t add(int64_t a, int64_t b, int *overflow) {
  int64_t result;
  *overflow |= __builtin_add_overflow(a, b, &result);
  return result;
}
static inline int64_t subtract(int64_t a, int64_t b, int *overflow) {
  int64_t result;
  *overflow |= __builtin_sub_overflow(a, b, &result);
  return result;
}
static inline int64_t multiply(int64_t a, int64_t b, int *overflow) {
  int64_t result;
  *overflow |= __builtin_mul_overflow(a, b, &result);
  return result;
}
static inline int64_t divide_down(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
static inline int64_t divide_up(int64_t a, int64_t b) {
  return a / b + (a % b != 0 && (a < 0) == (b < 0));
}
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

#include "limelight_tables.h"

#ifndef LIMELIGHT_DRIVER
#define LIMELIGHT_DRIVER "libcuda.so.1"
#endif

enum {
  MAX_ARGUMENTS = 256,
  FREE_SHARED = 48 * 1024,
  ALIGNMENT = WORKSPACE_ALIGNMENT,
  LAST_START = 1 << 30,
  /* The driver's own numbers. */
  COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76, MAX_SHARED = 97,
  FUNCTION_SHARED = 8,
  CAPTURE_ELSEWHERE = 906,
};

/* What went wrong. */

static _Thread_local char message[512];

const char *limelight_message(void) { return message; }

const char *limelight_name(limelight_status status) {
  static const char *const names[] = {
    "LIMELIGHT_SUCCESS", "LIMELIGHT_EMPTY", "LIMELIGHT_NO_DRIVER", "LIMELIGHT_NO_CONTEXT",
    "LIMELIGHT_DRIVER_FAILED", "LIMELIGHT_WRONG_STRUCT", "LIMELIGHT_NO_FILE",
    "LIMELIGHT_NO_MEMORY", "LIMELIGHT_NOT_EXPORTED", "LIMELIGHT_WRONG_HEAD_DIM",
    "LIMELIGHT_WRONG_ARCHITECTURE", "LIMELIGHT_WRONG_SIZE", "LIMELIGHT_WRONG_NUMBER",
    "LIMELIGHT_WRONG_STRIDE", "LIMELIGHT_NOT_ALIGNED", "LIMELIGHT_NULL_POINTER",
    "LIMELIGHT_SMALL_WORKSPACE", "LIMELIGHT_CAPTURING",
  };
  return (unsigned)status < sizeof names / sizeof *names ? names[status] : "unknown";
}

__attribute__((format(printf, 2, 3)))
static limelight_status failed(limelight_status status, const char *format, ...) {
  va_list rest;
  va_start(rest, format);
  vsnprintf(message, sizeof message, format, rest);
  va_end(rest);
  return status;
}

/* The driver, opened once. */

typedef void *handle;
static struct {
  void *library;
  int (*cuInit)(unsigned);
  int (*cuGetErrorName)(int, const char **);
  int (*cuCtxGetCurrent)(handle *);
  int (*cuCtxGetDevice)(int *);
  int (*cuDeviceGetAttribute)(int *, int, int);
  int (*cuStreamIsCapturing)(handle, int *);
  int (*cuModuleLoadData)(handle *, const void *);
  int (*cuModuleGetFunction)(handle *, handle, const char *);
  int (*cuFuncSetAttribute)(handle, int, int);
  int (*cuLaunchKernel)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, handle, void **, void **);
  /* Of CUDA 12, without which modules are loaded instead. */
  int (*cuLibraryLoadData)(handle *, const void *, void *, void *, unsigned, void *, void *,
                           unsigned);
  int (*cuLibraryGetKernel)(handle *, handle, const char *);
  int (*cuKernelGetFunction)(handle *, handle);
  int (*cuCtxGetId)(handle, unsigned long long *);
  int (*cuFuncLoad)(handle);
  limelight_status status;
  char message[256];
} driver;
static pthread_once_t driver_opened = PTHREAD_ONCE_INIT;

static void open_driver(void) {
  static const struct { const char *name; void *place; int needed; } functions[] = {
    {"cuInit", &driver.cuInit, 1},
    {"cuGetErrorName", &driver.cuGetErrorName, 1},
    {"cuCtxGetCurrent", &driver.cuCtxGetCurrent, 1},
    {"cuCtxGetDevice", &driver.cuCtxGetDevice, 1},
    {"cuDeviceGetAttribute", &driver.cuDeviceGetAttribute, 1},
    {"cuStreamIsCapturing", &driver.cuStreamIsCapturing, 1},
    {"cuModuleLoadData", &driver.cuModuleLoadData, 1},
    {"cuModuleGetFunction", &driver.cuModuleGetFunction, 1},
    {"cuFuncSetAttribute", &driver.cuFuncSetAttribute, 1},
    {"cuLaunchKernel", &driver.cuLaunchKernel, 1},
    {"cuLibraryLoadData", &driver.cuLibraryLoadData, 0},
    {"cuLibraryGetKernel", &driver.cuLibraryGetKernel, 0},
    {"cuKernelGetFunction", &driver.cuKernelGetFunction, 0},
    {"cuCtxGetId", &driver.cuCtxGetId, 0},
    {"cuFuncLoad", &driver.cuFuncLoad, 0},
  };
  driver.status = LIMELIGHT_NO_DRIVER;
  driver.library = dlopen(LIMELIGHT_DRIVER, RTLD_NOW);
  if (!driver.library) {
    snprintf(driver.message, sizeof driver.message, "%s: NVIDIA's driver is needed", dlerror());
    return;
  }
  for (size_t n = 0; n < sizeof functions / sizeof *functions; n++) {
    void *found = dlsym(driver.library, functions[n].name);
    if (!found && functions[n].needed) {
      snprintf(driver.message, sizeof driver.message, "%s has no %s", LIMELIGHT_DRIVER,
               functions[n].name);
      return;
    }
    memcpy(functions[n].place, &found, sizeof found);
  }
  int code = driver.cuInit(0);
  if (code)
    snprintf(driver.message, sizeof driver.message, "the CUDA driver does not start: error %d",
             code);
  else
    driver.status = LIMELIGHT_SUCCESS;
}

static limelight_status driver_failed(int code, const char *doing, const char *what) {
  const char *name = NULL;
  driver.cuGetErrorName(code, &name);
  return failed(LIMELIGHT_DRIVER_FAILED, "cannot %s %s: %s (%d)", doing, what,
                name ? name : "an unknown error", code);
}

/* Where work runs: the thread's current context. */

typedef struct {
  handle context;
  unsigned long long id; /* of the context; a handle may come again when its context has gone */
  int capability, shared;
} place;

static limelight_status current_place(place *found) {
  pthread_once(&driver_opened, open_driver);
  if (driver.status) return failed(driver.status, "%s", driver.message);
  int device, major, minor, code = driver.cuCtxGetCurrent(&found->context);
  if (code) return driver_failed(code, "read", "the current context");
  if (!found->context)
    return failed(LIMELIGHT_NO_CONTEXT, "no context is current in this thread: make one so first");
  found->id = (unsigned long long)(uintptr_t)found->context;
  if (driver.cuCtxGetId) code = driver.cuCtxGetId(found->context, &found->id);
  if (!code) code = driver.cuCtxGetDevice(&device);
  if (!code) code = driver.cuDeviceGetAttribute(&major, COMPUTE_MAJOR, device);
  if (!code) code = driver.cuDeviceGetAttribute(&minor, COMPUTE_MINOR, device);
  if (!code) code = driver.cuDeviceGetAttribute(&found->shared, MAX_SHARED, device);
  if (code) return driver_failed(code, "ask", "the device what it can do");
  found->capability = 10 * major + minor;
  return LIMELIGHT_SUCCESS;
}

/* Kernels, loaded once for each context. Readers follow a list that only grows, without a lock. */

typedef struct function {
  struct function *next;
  unsigned long long context;
  int from_ptx;
  handle call;
} function;

struct limelight {
  char *folder;
  pthread_mutex_t loading;
  handle libraries[KERNELS][2]; /* by from_ptx */
  _Atomic(function *) functions[KERNELS];
};

limelight_status limelight_open(const char *folder, limelight **result) {
  *result = NULL;
  size_t length = strlen(folder);
  limelight *made = calloc(1, sizeof *made);
  char *copy = malloc(length + 1);
  if (!made || !copy) {
    free(made), free(copy);
    return failed(LIMELIGHT_NO_MEMORY, "no memory to open %s", folder);
  }
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.cubin", folder, kernels[0].file);
  FILE *first = fopen(path, "rb");
  if (!first) {
    free(made), free(copy);
    return failed(LIMELIGHT_NO_FILE, "%s cannot be read: found no exported kernels in %s", path,
                  folder);
  }
  fclose(first);
  made->folder = memcpy(copy, folder, length + 1);
  pthread_mutex_init(&made->loading, NULL);
  *result = made;
  return LIMELIGHT_SUCCESS;
}

void limelight_close(limelight *opened) {
  if (!opened) return;
  for (int n = 0; n < KERNELS; n++)
    for (function *each = atomic_load(&opened->functions[n]), *next; each; each = next)
      next = each->next, free(each);
  pthread_mutex_destroy(&opened->loading);
  free(opened->folder);
  free(opened);
}

/* The file's bytes, a zero behind them, which PTX needs. The caller frees them. */
static limelight_status read_file(const char *folder, const char *file, const char *ending,
                                  char **bytes) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.%s", folder, file, ending);
  FILE *opened = fopen(path, "rb");
  if (!opened) return failed(LIMELIGHT_NO_FILE, "%s cannot be read", path);
  limelight_status status = failed(LIMELIGHT_NO_FILE, "%s cannot be read to its end", path);
  long size = fseek(opened, 0, SEEK_END) ? -1 : ftell(opened);
  if (size >= 0 && !fseek(opened, 0, SEEK_SET)) {
    *bytes = malloc((size_t)size + 1);
    if (!*bytes)
      status = failed(LIMELIGHT_NO_MEMORY, "no memory for the %ld bytes of %s", size, path);
    else if (fread(*bytes, 1, (size_t)size, opened) == (size_t)size)
      (*bytes)[size] = 0, status = LIMELIGHT_SUCCESS;
    else
      free(*bytes);
  }
  fclose(opened);
  return status;
}

static function *loaded(limelight *opened, int kernel, const place *here, int from_ptx) {
  function *each = atomic_load_explicit(&opened->functions[kernel], memory_order_acquire);
  while (each && (each->context != here->id || each->from_ptx != from_ptx)) each = each->next;
  return each;
}

/* The kernel's function in the current context, which the caller holds the lock to load. */
static limelight_status load_function(limelight *opened, int kernel, int from_ptx, handle *result) {
  const kernel_code *code = &kernels[kernel];
  handle *library = &opened->libraries[kernel][from_ptx];
  int error = 0;
  if (!driver.cuLibraryLoadData || !*library) {
    char *image;
    const char *ending = from_ptx ? "ptx" : "cubin";
    limelight_status status = read_file(opened->folder, code->file, ending, &image);
    if (status) return status;
    handle module;
    if (!driver.cuLibraryLoadData) {
      error = driver.cuModuleLoadData(&module, image);
      if (!error) error = driver.cuModuleGetFunction(result, module, code->entry);
    } else {
      error = driver.cuLibraryLoadData(library, image, NULL, NULL, 0, NULL, NULL, 0);
    }
    free(image);
  }
  if (!error && driver.cuLibraryLoadData) {
    handle found;
    error = driver.cuLibraryGetKernel(&found, *library, code->entry);
    if (!error) error = driver.cuKernelGetFunction(result, found);
  }
  if (!error && code->shared > FREE_SHARED)
    error = driver.cuFuncSetAttribute(*result, FUNCTION_SHARED, code->shared);
  if (!error && driver.cuFuncLoad) error = driver.cuFuncLoad(*result);
  return error ? driver_failed(error, "load", code->file) : LIMELIGHT_SUCCESS;
}

static limelight_status load(limelight *opened, int kernel, const place *here, int from_ptx,
                             handle stream, handle *result) {
  function *found = loaded(opened, kernel, here, from_ptx);
  if (found) {
    *result = found->call;
    return LIMELIGHT_SUCCESS;
  }
  int capturing = 0, error = driver.cuStreamIsCapturing(stream, &capturing);
  if (capturing || error == CAPTURE_ELSEWHERE)
    return failed(LIMELIGHT_CAPTURING, "%s cannot be loaded while a graph is captured: call "
                  "limelight_preload before", kernels[kernel].entry);
  if (error) return driver_failed(error, "ask about", "the stream");

  limelight_status status = LIMELIGHT_SUCCESS;
  pthread_mutex_lock(&opened->loading);
  found = loaded(opened, kernel, here, from_ptx); /* by another thread, meanwhile */
  if (!found) {
    function *made = calloc(1, sizeof *made);
    if (!made) status = failed(LIMELIGHT_NO_MEMORY, "no memory to load %s", kernels[kernel].entry);
    if (!status) status = load_function(opened, kernel, from_ptx, &made->call);
    if (status) {
      free(made);
    } else {
      made->context = here->id, made->from_ptx = from_ptx;
      made->next = atomic_load(&opened->functions[kernel]);
      atomic_store_explicit(&opened->functions[kernel], made, memory_order_release);
      found = made;
    }
  }
  pthread_mutex_unlock(&opened->loading);
  if (!status) *result = found->call;
  return status;
}

/* Which variant, and from which of its files. */

typedef struct { const variant *variant; int from_ptx; } choice;

static const char *or_none(const char *text) { return text ? text : "none"; }

/* How well a variant's code suits a GPU: 0 not at all, 1000 and more as machine code. */
static int suits(const variant *each, const place *here, int from_ptx) {
  int is_own = each->target == here->capability;
  if (!is_own && (!each->portable || each->target > here->capability)) return 0;
  for (int n = 0; n < each->launch_count; n++)
    if (kernels[each->launches[n].kernel].shared > here->shared) return 0;
  int is_machine_code = is_own || each->target / 10 == here->capability / 10;
  return each->target + (is_machine_code && !from_ptx ? 1000 : 0);
}

static limelight_status choose(limelight_operation operation, const limelight_attention *a,
                               const place *here, choice *chosen) {
  if (!a || a->struct_size != sizeof *a)
    return failed(LIMELIGHT_WRONG_STRUCT, "struct_size: found %zu, needed %zu: begin with "
                  "LIMELIGHT_ATTENTION of the same version", a ? a->struct_size : 0, sizeof *a);
  int value_dim = a->value_dim ? a->value_dim : a->head_dim, best = 0;
  int found_kind = 0, found_dim = 0;
  for (int n = 0; n < VARIANTS; n++) {
    const variant *each = &variants[n];
    if (each->operation != operation || each->dtype != a->dtype ||
        strcmp(each->mask, or_none(a->mask)) || strcmp(each->bias, or_none(a->bias)) ||
        each->softcap != (a->softcap != 0) ||
        each->bias_gradients != (operation == LIMELIGHT_BACKWARD && a->bias_gradients))
      continue;
    found_kind = 1;
    if (each->head_dim != a->head_dim || each->value_dim != value_dim) continue;
    found_dim = 1;
    int suitability = suits(each, here, a->from_ptx);
    if ((a->target && each->target != a->target) || suitability <= best) continue;
    best = suitability;
    chosen->variant = each;
    chosen->from_ptx = best < 1000;
  }
  if (best) return LIMELIGHT_SUCCESS;
  if (!found_kind)
    return failed(LIMELIGHT_NOT_EXPORTED, "%s of dtype %d, mask %s, bias %s%s%s: found none in "
                  "this folder", operation == LIMELIGHT_FORWARD ? "forward" : "backward", a->dtype,
                  or_none(a->mask), or_none(a->bias), a->softcap != 0 ? ", softcap" : "",
                  a->bias_gradients ? ", bias_gradients" : "");
  if (!found_dim)
    return failed(LIMELIGHT_WRONG_HEAD_DIM, "head_dim: found %d (value_dim %d), which is not in "
                  "this folder", a->head_dim, value_dim);
  return failed(LIMELIGHT_WRONG_ARCHITECTURE, "found an sm_%d with %d bytes of shared memory, on "
                "which no kernel in this folder for %s%d runs", here->capability, here->shared,
                a->target ? "sm_" : "any target, ", a->target);
}

/* The values of every name in the tables, for one call. */

typedef struct {
  int64_t whole[VALUES];
  double number[NUMBERS];
  int overflow;
} values;

static int64_t evaluate(unsigned expression, values *of) {
  return whole(expression, of->whole, &of->overflow);
}

static limelight_status read_sizes(const limelight_attention *a, values *of) {
  const struct { const char *name; unsigned value; int64_t found, least, greatest; } sizes[] = {
    {"batch", V_BATCH, a->batch, 0, INT32_MAX},
    {"q_heads", V_Q_HEADS, a->q_heads, 1, INT32_MAX},
    {"kv_heads", V_KV_HEADS, a->kv_heads, 1, INT32_MAX},
    {"q_len", V_Q_LEN, a->q_len, 0, INT32_MAX},
    {"kv_len", V_KV_LEN, a->kv_len, 0, INT32_MAX},
    {"query_start", V_QUERY_START, a->query_start, -LAST_START, LAST_START},
  };
  for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) {
    if (sizes[n].found < sizes[n].least || sizes[n].found > sizes[n].greatest)
      return failed(LIMELIGHT_WRONG_SIZE, "%s: found %lld, needed %lld to %lld", sizes[n].name,
                    (long long)sizes[n].found, (long long)sizes[n].least,
                    (long long)sizes[n].greatest);
    of->whole[sizes[n].value] = sizes[n].found;
  }
  if (a->q_heads % a->kv_heads)
    return failed(LIMELIGHT_WRONG_SIZE, "q_heads: found %lld, needed a multiple of %lld kv_heads",
                  (long long)a->q_heads, (long long)a->kv_heads);
  of->number[N_SCALE] = a->scale != 0 ? a->scale : 1 / sqrt(a->head_dim);
  of->number[N_SOFTCAP] = a->softcap;
  if (!(a->softcap >= 0 && isfinite(a->softcap)))
    return failed(LIMELIGHT_WRONG_NUMBER, "softcap: found %g, needed a positive number",
                  a->softcap);
  if (!isfinite(of->number[N_SCALE]))
    return failed(LIMELIGHT_WRONG_NUMBER, "scale: found %g, needed a number", a->scale);
  return LIMELIGHT_SUCCESS;
}

static const limelight_tensor *given_for(const tensor *each, const limelight_attention *a) {
  return (const limelight_tensor *)((const char *)a + each->place);
}

/* The sizes that a tensor alone knows. */
static void read_shape(const tensor *each, const limelight_attention *a, values *of) {
  for (int axis = 0; axis < each->dimensions; axis++)
    if (each->axes[axis].size_value)
      of->whole[each->axes[axis].size_value] = given_for(each, a)->shape[axis];
}

static limelight_status read_tensor(const tensor *each, const limelight_attention *a, values *of) {
  const limelight_tensor *given = given_for(each, a);
  int64_t elements = 1;
  of->whole[each->value] = (int64_t)given->address;
  read_shape(each, a, of);
  for (int axis = 0; axis < each->dimensions; axis++) {
    int64_t size = evaluate(each->axes[axis].size, of), found = given->shape[axis];
    if (size < 0 || size > INT32_MAX || (found && found != size))
      return failed(LIMELIGHT_WRONG_SIZE, "%s.shape.%d: found %lld, needed %s", each->name, axis,
                    (long long)found, whole_text[each->axes[axis].size]);
    elements = multiply(elements, size, &of->overflow);
    found = given->stride[axis];
    if (each->axes[axis].stride_value) {
      of->whole[each->axes[axis].stride_value] = size == 1 || !given->address ? 0 : found;
    } else if (found && size != 1 && found != evaluate(each->axes[axis].stride, of)) {
      return failed(LIMELIGHT_WRONG_STRIDE, "%s.stride.%d: found %lld, needed %s", each->name, axis,
                    (long long)found, whole_text[each->axes[axis].stride]);
    }
  }
  if (!given->address && !each->optional && elements)
    return failed(LIMELIGHT_NULL_POINTER, "%s: found no address", each->name);
  return LIMELIGHT_SUCCESS;
}

static limelight_status lay_out(const variant *chosen, values *of, size_t *bytes) {
  int64_t offset = 0;
  for (int n = 0; n < chosen->slice_count; n++) {
    int64_t size = evaluate(chosen->slices[n].size, of);
    of->whole[chosen->slices[n].value] = offset; /* its address, less the workspace's */
    size = multiply(divide_up(size, ALIGNMENT), ALIGNMENT, &of->overflow);
    offset = add(offset, size, &of->overflow);
  }
  *bytes = (size_t)offset;
  if (of->overflow || offset < 0)
    return failed(LIMELIGHT_WRONG_SIZE, "the workspace would take more than 2^63 bytes");
  return LIMELIGHT_SUCCESS;
}

static limelight_status misfit(const char *text) {
  return strstr(text, ".stride.") ? LIMELIGHT_WRONG_STRIDE : LIMELIGHT_WRONG_SIZE;
}

static limelight_status check_conditions(const variant *chosen, values *of) {
  for (int n = 0; n < chosen->condition_count; n++) {
    const condition *each = &chosen->conditions[n];
    int order; /* of left and right */
    if (each->of_numbers) {
      double left = number(each->left, of->number), right = number(each->right, of->number);
      order = (left > right) - (left < right);
    } else {
      int64_t left = evaluate(each->left, of), right = evaluate(each->right, of);
      order = (left > right) - (left < right);
    }
    int holds = each->operator == LESS ? order < 0 : each->operator == LESS_EQUAL ? order <= 0
                : each->operator == GREATER ? order > 0 : order >= 0;
    if (!holds)
      return failed(each->of_numbers ? LIMELIGHT_WRONG_NUMBER : misfit(each->text),
                    "found otherwise than needed: %s", each->text);
  }
  return LIMELIGHT_SUCCESS;
}

/* Launches. */

typedef union { int64_t i64; int32_t i32; uint32_t u32; float fp32; double fp64; } argument;

static limelight_status pack(const parameter *wanted, unsigned expression, values *of,
                             argument *result) {
  if (wanted->kind == KIND_FP32 || wanted->kind == KIND_FP64) {
    double found = number(expression, of->number);
    if (wanted->kind == KIND_FP64) result->fp64 = found;
    else result->fp32 = (float)found;
    if (wanted->kind == KIND_FP32 && !isfinite(result->fp32))
      return failed(LIMELIGHT_WRONG_NUMBER, "%s: found %g, which does not fit a float",
                    number_text[expression], found);
    return LIMELIGHT_SUCCESS;
  }
  int64_t found = evaluate(expression, of);
  const char *text = whole_text[expression];
  if (found % wanted->multiple_of && wanted->kind == KIND_POINTER)
    return failed(LIMELIGHT_NOT_ALIGNED, "%s: found %#llx, needed a multiple of %d", text,
                  (long long)found, wanted->multiple_of);
  if (found % wanted->multiple_of)
    return failed(misfit(text), "%s: found %lld, needed a multiple of %d", text, (long long)found,
                  wanted->multiple_of);
  int fits = wanted->kind == KIND_I32   ? found >= INT32_MIN && found <= INT32_MAX
             : wanted->kind == KIND_U32 ? found >= 0 && found <= UINT32_MAX
                                        : 1;
  if (!fits)
    return failed(misfit(text), "%s: found %lld, which does not fit 32 bits", text,
                  (long long)found);
  if (wanted->kind == KIND_I32) result->i32 = (int32_t)found;
  else if (wanted->kind == KIND_U32) result->u32 = (uint32_t)found;
  else result->i64 = found;
  return LIMELIGHT_SUCCESS;
}

static int is_needed(const launch *each, const values *of) {
  for (int n = 0; n < each->needed_for_count; n++)
    if (of->whole[each->needed_for[n]]) return 1;
  return !each->needed_for_count;
}

/* Packs a launch and, unless stream is a null pointer, makes it. grid: 0 where it does nothing. */
static limelight_status launch_one(limelight *opened, const launch *each, const place *here,
                                   int from_ptx, values *of, const handle *stream, int64_t *grid) {
  const kernel_code *code = &kernels[each->kernel];
  argument arguments[MAX_ARGUMENTS];
  void *places[MAX_ARGUMENTS];
  *grid = 0;
  if (!is_needed(each, of)) return LIMELIGHT_SUCCESS;
  for (int n = 0; n < code->parameter_count; n++) {
    limelight_status status = pack(&code->parameters[n], each->arguments[n], of, &arguments[n]);
    if (status) return status;
    places[n] = &arguments[n];
  }
  *grid = evaluate(each->grid, of);
  if (of->overflow || *grid > INT32_MAX)
    return failed(LIMELIGHT_WRONG_SIZE, "%s: found more blocks than a GPU takes",
                  whole_text[each->grid]);
  if (!stream || !*grid) return LIMELIGHT_SUCCESS;
  handle call;
  limelight_status status = load(opened, each->kernel, here, from_ptx, *stream, &call);
  if (status) return status;
  int error = driver.cuLaunchKernel(call, (unsigned)*grid, 1, 1, (unsigned)code->threads, 1, 1,
                                    (unsigned)code->shared, *stream, places, NULL);
  return error ? driver_failed(error, "launch", code->entry) : LIMELIGHT_SUCCESS;
}

limelight_status limelight_workspace(limelight *opened, limelight_operation operation,
                                     const limelight_attention *a, size_t *bytes) {
  (void)opened;
  place here;
  choice chosen;
  values of = {.overflow = 0};
  limelight_status status = current_place(&here);
  if (!status) status = choose(operation, a, &here, &chosen);
  if (!status) status = read_sizes(a, &of);
  for (int n = 0; !status && n < chosen.variant->tensor_count; n++)
    read_shape(&chosen.variant->tensors[n], a, &of);
  return status ? status : lay_out(chosen.variant, &of, bytes);
}

limelight_status limelight_preload(limelight *opened, limelight_operation operation,
                                   const limelight_attention *a) {
  place here;
  choice chosen;
  limelight_status status = current_place(&here);
  if (!status) status = choose(operation, a, &here, &chosen);
  for (int n = 0; !status && n < chosen.variant->launch_count; n++) {
    handle ignored;
    status = load(opened, chosen.variant->launches[n].kernel, &here, chosen.from_ptx, a->stream,
                  &ignored);
  }
  return status;
}

limelight_status limelight_launch(limelight *opened, limelight_operation operation,
                                  const limelight_attention *a) {
  place here;
  choice chosen;
  values of = {.overflow = 0};
  size_t needed;
  limelight_status status = current_place(&here);
  if (!status) status = choose(operation, a, &here, &chosen);
  if (!status) status = read_sizes(a, &of);
  for (int n = 0; !status && n < chosen.variant->tensor_count; n++)
    status = read_tensor(&chosen.variant->tensors[n], a, &of);
  if (!status) status = check_conditions(chosen.variant, &of);
  if (!status) status = lay_out(chosen.variant, &of, &needed);
  if (status) return status;
  if (needed > a->workspace_size || (needed && !a->workspace))
    return failed(LIMELIGHT_SMALL_WORKSPACE, "workspace: found %zu bytes at %#llx, needed %zu",
                  a->workspace_size, (unsigned long long)a->workspace, needed);
  if (needed && a->workspace % ALIGNMENT)
    return failed(LIMELIGHT_NOT_ALIGNED, "workspace: found %#llx, needed a multiple of %d",
                  (unsigned long long)a->workspace, ALIGNMENT);
  for (int n = 0; n < chosen.variant->slice_count; n++)
    of.whole[chosen.variant->slices[n].value] += (int64_t)a->workspace;

  /* All are checked before the first is launched. */
  int64_t blocks = 0, grid;
  for (int n = 0; n < chosen.variant->launch_count; n++) {
    const launch *each = &chosen.variant->launches[n];
    status = launch_one(opened, each, &here, chosen.from_ptx, &of, NULL, &grid);
    if (status) return status;
    blocks |= grid;
  }
  if (!blocks) return failed(LIMELIGHT_EMPTY, "no output has an element: nothing was launched");
  for (int n = 0; n < chosen.variant->launch_count && !status; n++) {
    const launch *each = &chosen.variant->launches[n];
    status = launch_one(opened, each, &here, chosen.from_ptx, &of, &a->stream, &grid);
  }
  return status;
}

limelight_tensor limelight_contiguous(uint64_t address, int64_t heads, int64_t length,
                                      int64_t dim) {
  limelight_tensor made = {address, {heads * length * dim, length * dim, dim, 1}, {0}};
  return made;
}
