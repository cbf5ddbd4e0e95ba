/* Attention with ALiBi under a causal mask and all its gradients, from C, checked.
 *
 *     limelight export --dtype float16 --head-dim 64 --causal --bias alibi --out kernels
 *     python examples/attention_case.py case
 *     gcc -std=c11 -O2 -pthread -Ikernels -o attention \
 *         examples/c/attention.c kernels/limelight.c -ldl -lm
 *     ./attention kernels case
 *
 * A third argument, such as 75, takes the kernels of sm_75 instead of those that suit the GPU; they
 * are assembled from PTX where the GPU is another one. CUDA's headers are not needed here either:
 * the few calls that every program makes, however it comes to its tensors, are declared below.
 */
#include "limelight.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int (*cuInit)(unsigned), (*cuDeviceGet)(int *, int), (*cuCtxSynchronize)(void);
static int (*cuDevicePrimaryCtxRetain)(void **, int), (*cuCtxSetCurrent)(void *);
static int (*cuMemAlloc)(uint64_t *, size_t), (*cuMemcpyHtoD)(uint64_t, const void *, size_t);
static int (*cuMemcpyDtoH)(void *, uint64_t, size_t);

static void stop(const char *what, const char *why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(1);
}

static void find(void *library, const char *name, void *place) {
  void *found = dlsym(library, name);
  if (!found) stop(name, "not in the driver");
  memcpy(place, &found, sizeof found);
}

static void check(int error, const char *doing) {
  char text[32];
  snprintf(text, sizeof text, "CUDA error %d", error);
  if (error) stop(doing, text);
}

static void start_cuda(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
  if (!library) stop("libcuda.so.1", dlerror());
  find(library, "cuInit", &cuInit);
  find(library, "cuDeviceGet", &cuDeviceGet);
  find(library, "cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain);
  find(library, "cuCtxSetCurrent", &cuCtxSetCurrent);
  find(library, "cuCtxSynchronize", &cuCtxSynchronize);
  find(library, "cuMemAlloc_v2", &cuMemAlloc);
  find(library, "cuMemcpyHtoD_v2", &cuMemcpyHtoD);
  find(library, "cuMemcpyDtoH_v2", &cuMemcpyDtoH);
  int device;
  check(cuInit(0), "start CUDA");
  check(cuDeviceGet(&device, 0), "find a device");
  check(cuDevicePrimaryCtxRetain(&context, device), "make a context");
  check(cuCtxSetCurrent(context), "use the context");
}

static const char *case_folder;

/* The whole of a file of the case; its size, if asked for. */
static void *read_file(const char *name, size_t *size) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.bin", case_folder, name);
  FILE *file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END)) stop(path, "cannot be read");
  *size = (size_t)ftell(file);
  rewind(file);
  void *bytes = malloc(*size);
  if (!bytes || fread(bytes, 1, *size, file) != *size) stop(path, "cannot be read");
  fclose(file);
  return bytes;
}

static uint64_t allocate(size_t size) {
  uint64_t address;
  check(cuMemAlloc(&address, size), "allocate");
  return address;
}

static uint64_t load(const char *name) {
  size_t size;
  void *bytes = read_file(name, &size);
  uint64_t address = allocate(size);
  check(cuMemcpyHtoD(address, bytes, size), name);
  free(bytes);
  return address;
}

/* A tensor of (batch, length, heads, dim) in memory, as (batch, heads, length, dim). */
static limelight_tensor tensor(uint64_t address, int64_t heads, int64_t length, int64_t dim) {
  limelight_tensor made = {address, {length * heads * dim, dim, heads * dim, 1}, {0}};
  return made;
}

static float from_half(uint16_t half) {
  int exponent = half >> 10 & 31, fraction = half & 1023;
  float size = exponent == 31 ? INFINITY : exponent ? ldexpf(1024 + fraction, exponent - 25)
                                                    : ldexpf(fraction, -24);
  return half & 0x8000 ? -size : size;
}

/* Prints how far a result on the device is off: |found - expected| / |expected|. */
static int compare(const char *name, uint64_t address, size_t item) {
  char file[64];
  size_t size;
  snprintf(file, sizeof file, "expected_%s", name);
  float *expected = read_file(file, &size);
  size_t count = size / sizeof *expected;
  void *found = malloc(count * item);
  check(cuMemcpyDtoH(found, address, count * item), name);
  double wrong = 0, whole = 0;
  for (size_t n = 0; n < count; n++) {
    double value = item == 2 ? from_half(((uint16_t *)found)[n]) : ((float *)found)[n];
    wrong += pow(value - expected[n], 2), whole += pow(expected[n], 2);
  }
  double error = sqrt(wrong / whole);
  printf("%-10s %.1e\n", name, error);
  free(expected), free(found);
  return error < 2e-3; /* false for NaN too */
}

static void launch(limelight *kernels, limelight_operation operation,
                   const limelight_attention *a) {
  limelight_status status = limelight_launch(kernels, operation, a);
  if (status) stop(limelight_name(status), limelight_message());
}

int main(int count, char **arguments) {
  if (count < 3) stop("usage", "attention KERNELS CASE [TARGET]");
  case_folder = arguments[2];
  start_cuda();

  int64_t size[6];
  char path[4096];
  snprintf(path, sizeof path, "%s/sizes.txt", case_folder);
  FILE *sizes = fopen(path, "r");
  if (!sizes) stop(path, "cannot be read");
  for (int n = 0; n < 6; n++)
    if (fscanf(sizes, "%*s %" SCNd64, &size[n]) != 1) stop(path, "a size is missing");
  fclose(sizes);
  int64_t batch = size[0], heads = size[1], kv_heads = size[2], q_len = size[3], kv_len = size[4];
  int64_t dim = size[5];

  limelight *kernels;
  limelight_status status = limelight_open(arguments[1], &kernels);
  if (status) stop(limelight_name(status), limelight_message());

  limelight_attention a = LIMELIGHT_ATTENTION;
  a.dtype = LIMELIGHT_FLOAT16, a.head_dim = (int)dim, a.mask = "causal", a.bias = "alibi";
  a.bias_gradients = 1;
  a.target = count > 3 ? atoi(arguments[3]) : 0;
  a.batch = batch, a.q_heads = heads, a.kv_heads = kv_heads, a.q_len = q_len, a.kv_len = kv_len;
  a.query_start = kv_len - q_len; /* the last query sees all keys */

  a.query = tensor(load("query"), heads, q_len, dim);
  a.key = tensor(load("key"), kv_heads, kv_len, dim);
  a.value = tensor(load("value"), kv_heads, kv_len, dim);
  a.bias_tensors[0].address = load("slopes");
  size_t of_queries = (size_t)(2 * batch * heads * q_len * dim);
  size_t of_keys = (size_t)(2 * batch * kv_heads * kv_len * dim);
  a.out = tensor(allocate(of_queries), heads, q_len, dim);
  a.lse.address = allocate((size_t)(4 * batch * heads * q_len));
  launch(kernels, LIMELIGHT_FORWARD, &a);

  a.d_out = tensor(load("d_out"), heads, q_len, dim);
  a.d_lse.address = load("d_lse");
  a.d_query = tensor(allocate(of_queries), heads, q_len, dim);
  a.d_key = tensor(allocate(of_keys), kv_heads, kv_len, dim);
  a.d_value = tensor(allocate(of_keys), kv_heads, kv_len, dim);
  a.d_bias_tensors[0].address = allocate((size_t)(4 * heads));
  status = limelight_workspace(kernels, LIMELIGHT_BACKWARD, &a, &a.workspace_size);
  if (status) stop(limelight_name(status), limelight_message());
  a.workspace = allocate(a.workspace_size);
  launch(kernels, LIMELIGHT_BACKWARD, &a);

  check(cuCtxSynchronize(), "run the kernels");
  int right = compare("out", a.out.address, 2);
  right &= compare("lse", a.lse.address, 4);
  right &= compare("d_query", a.d_query.address, 2);
  right &= compare("d_key", a.d_key.address, 2);
  right &= compare("d_value", a.d_value.address, 2);
  right &= compare("d_slopes", a.d_bias_tensors[0].address, 4);
  limelight_close(kernels);
  puts(right ? "right" : "wrong");
  return !right;
}
