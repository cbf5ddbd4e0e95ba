/* A CUDA driver without a GPU: it keeps what it was asked to launch, for tests to read.
 *
 * An image is text, "entry size size ...": the kernel's name and the bytes of each parameter. Every
 * function belongs to the context that was current when it was made, and a launch is refused unless
 * that one is current, as the real driver does. Built with -DOLD_DRIVER it lacks what CUDA 12 added.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, LAUNCH_FAILED = 719,
};
enum { DEVICES = 4, MAX_PARAMETERS = 64, MAX_LAUNCHES = 1 << 16, FREE_SHARED = 48 * 1024 };

typedef struct { int device; } Context;
typedef struct { char entry[128]; int count, sizes[MAX_PARAMETERS]; } Image;
typedef struct { Image *image; Context *context; int shared, wide_clusters, loaded; } Function;

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  struct Attribute { unsigned id, pad, value[16]; } *attributes;
  unsigned attribute_count;
} Config;

typedef struct { /* read by the tests: keep in step with stub_driver.py */
  char entry[128];
  unsigned grid[3], block[3], shared, cluster, device, size;
  uint64_t stream;
  unsigned char bytes[512]; /* the parameters, one after another, without gaps */
} Launch;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Context contexts[DEVICES] = {{0}, {1}, {2}, {3}};
static _Thread_local Context *current;
static Launch *launches;
static int launch_count, retain_count, load_count, attribute_count;
static int capture_status, max_shared = 227 * 1024, next_failure, fail_launches_with;
static int capability = 90;

/* For the tests. */
int fake_launches(void) { return launch_count; }
const Launch *fake_launch(int n) { return &launches[n]; }
int fake_retains(void) { return retain_count; }
int fake_loads(void) { return load_count; }
int fake_attributes_set(void) { return attribute_count; }
int fake_current_device(void) { return current ? current->device : -1; }
void fake_make_current(int device) { current = device < 0 ? NULL : &contexts[device]; }
void fake_capture(int status) { capture_status = status; }
void fake_capability(int number) { capability = number; }
void fake_max_shared(int bytes) { max_shared = bytes; }
void fake_fail_launches(int code) { fail_launches_with = code; }
void fake_fail_next_load(int code) { next_failure = code; }
void fake_reset(void) {
  launch_count = retain_count = load_count = attribute_count = capture_status = 0;
  next_failure = fail_launches_with = 0;
  max_shared = 227 * 1024;
  capability = 90;
  current = NULL;
}

int cuInit(unsigned flags) {
  if (!launches) launches = calloc(MAX_LAUNCHES, sizeof(Launch));
  return flags ? INVALID_VALUE : SUCCESS;
}

int cuGetErrorName(int code, const char **text) {
  *text = code == INVALID_VALUE     ? "CUDA_ERROR_INVALID_VALUE"
          : code == INVALID_DEVICE  ? "CUDA_ERROR_INVALID_DEVICE"
          : code == INVALID_IMAGE   ? "CUDA_ERROR_INVALID_IMAGE"
          : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : code == INVALID_HANDLE  ? "CUDA_ERROR_INVALID_HANDLE"
          : code == NOT_FOUND       ? "CUDA_ERROR_NOT_FOUND"
          : code == LAUNCH_FAILED   ? "CUDA_ERROR_LAUNCH_FAILED"
                                    : NULL;
  return *text ? SUCCESS : INVALID_VALUE;
}
int cuGetErrorString(int code, const char **text) {
  *text = code == LAUNCH_FAILED ? "unspecified launch failure" : "a stub's error";
  return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < DEVICES ? SUCCESS : INVALID_DEVICE;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  if (attribute != 97 && attribute != 75 && attribute != 76) return INVALID_VALUE;
  *value = attribute == 97 ? max_shared : attribute == 75 ? capability / 10 : capability % 10;
  return device < DEVICES ? SUCCESS : INVALID_VALUE;
}
int cuDevicePrimaryCtxRetain(Context **context, int device) {
  retain_count++;
  *context = &contexts[device];
  return SUCCESS;
}
int cuCtxGetCurrent(Context **context) { *context = current; return SUCCESS; }
int cuCtxGetDevice(int *device) {
  *device = current ? current->device : 0;
  return current ? SUCCESS : INVALID_CONTEXT;
}
int cuCtxSetCurrent(Context *context) { current = context; return SUCCESS; }
int cuStreamIsCapturing(void *stream, int *status) {
  (void)stream;
  if (!current) return INVALID_CONTEXT;
  if (capture_status == 906) return 906;
  *status = capture_status;
  return SUCCESS;
}

static int read_image(Image **result, const char *text) {
  if (next_failure) { int code = next_failure; next_failure = 0; return code; }
  Image *image = calloc(1, sizeof(Image));
  int used = 0;
  if (sscanf(text, "%127s%n", image->entry, &used) != 1) { free(image); return INVALID_IMAGE; }
  for (text += used; sscanf(text, "%d%n", &image->sizes[image->count], &used) == 1; text += used)
    image->count++;
  pthread_mutex_lock(&lock);
  load_count++;
  pthread_mutex_unlock(&lock);
  *result = image;
  return SUCCESS;
}
static int make_function(Function **result, Image *image) {
  if (!current) return INVALID_CONTEXT;
  *result = calloc(1, sizeof(Function));
  (*result)->image = image;
  (*result)->context = current;
  (*result)->shared = FREE_SHARED;
  return SUCCESS;
}

#ifndef OLD_DRIVER
int cuLibraryLoadData(Image **library, const char *image, void *a, void *b, unsigned c, void *d,
                      void *e, unsigned f) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  return read_image(library, image);
}
int cuLibraryGetKernel(Image **kernel, Image *library, const char *entry) {
  *kernel = library;
  return strcmp(entry, library->entry) ? NOT_FOUND : SUCCESS;
}
int cuKernelGetFunction(Function **function, Image *kernel) { return make_function(function, kernel); }
int cuFuncLoad(Function *function) { function->loaded = 1; return SUCCESS; }
int cuCtxGetId(Context *context, unsigned long long *id) {
  *id = 1000 + (unsigned)context->device;
  return SUCCESS;
}
#endif

int cuModuleLoadData(Image **module, const char *image) {
  return current ? read_image(module, image) : INVALID_CONTEXT;
}
int cuModuleGetFunction(Function **function, Image *module, const char *entry) {
  return strcmp(entry, module->entry) ? NOT_FOUND : make_function(function, module);
}

int cuFuncSetAttribute(Function *function, int attribute, int value) {
  pthread_mutex_lock(&lock);
  attribute_count++;
  pthread_mutex_unlock(&lock);
  if (attribute == 8 && value <= max_shared) function->shared = value;
  else if (attribute == 14) function->wide_clusters = value;
  else return INVALID_VALUE;
  return SUCCESS;
}

int cuLaunchKernelEx(const Config *config, Function *function, void **parameters, void **extra) {
  if (fail_launches_with) return fail_launches_with;
  if (!current) return INVALID_CONTEXT;
  if (function->context != current) return INVALID_HANDLE;
  if (extra || (int)config->shared > function->shared) return INVALID_VALUE;
  for (int n = 0; n < 3; n++) if (!config->grid[n] || !config->block[n]) return INVALID_VALUE;
  unsigned cluster = 1;
  for (unsigned n = 0; n < config->attribute_count; n++)
    if (config->attributes[n].id == 4) cluster = config->attributes[n].value[0];
  if (cluster > 8 && !function->wide_clusters) return INVALID_VALUE;

  pthread_mutex_lock(&lock);
  Launch *launch = &launches[launch_count++ % MAX_LAUNCHES];
  pthread_mutex_unlock(&lock);
  memcpy(launch->entry, function->image->entry, sizeof launch->entry);
  memcpy(launch->grid, config->grid, sizeof launch->grid);
  memcpy(launch->block, config->block, sizeof launch->block);
  launch->shared = config->shared;
  launch->stream = (uint64_t)config->stream;
  launch->cluster = cluster;
  launch->device = (unsigned)current->device;
  launch->size = 0;
  for (int n = 0; n < function->image->count; n++) {
    int size = function->image->sizes[n];
    if ((uintptr_t)parameters[n] % (unsigned)size) return INVALID_VALUE; /* not aligned */
    memcpy(launch->bytes + launch->size, parameters[n], (size_t)size);
    launch->size += (unsigned)size;
  }
  return SUCCESS;
}

int cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned threads_x,
                   unsigned threads_y, unsigned threads_z, unsigned shared, void *stream,
                   void **parameters, void **extra) {
  Config config = {{x, y, z}, {threads_x, threads_y, threads_z}, shared, stream, NULL, 0};
  return cuLaunchKernelEx(&config, function, parameters, extra);
}
