/* Many threads load and launch at once, on two of the stub driver's devices; each checks that its
 * messages are its own. */
#include "limelight.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { THREADS = 8, LAUNCHES = 2000 };
static limelight *kernels;
static void (*make_current)(int);

static limelight_attention problem(int q_len) {
  limelight_attention a = LIMELIGHT_ATTENTION;
  a.dtype = LIMELIGHT_FLOAT16, a.head_dim = 64, a.mask = "causal", a.bias = "alibi";
  a.batch = 2, a.q_heads = a.kv_heads = 4, a.q_len = a.kv_len = q_len;
  limelight_tensor tensor = limelight_contiguous(0x1000, 4, q_len, 64);
  a.query = a.key = a.value = a.out = a.d_out = a.d_query = a.d_key = a.d_value = tensor;
  a.bias_tensors[0].address = a.lse.address = 0x1000;
  a.workspace = 0x100000, a.workspace_size = 1 << 30;
  return a;
}

static void *run(void *number) {
  int n = (int)(intptr_t)number;
  make_current(n % 2);
  for (int i = 0; i < LAUNCHES; i++) {
    limelight_attention a = problem(64 + n);
    if (limelight_launch(kernels, i % 2 ? LIMELIGHT_BACKWARD : LIMELIGHT_FORWARD, &a))
      return "a launch failed";
    if (i % 100) continue;
    char wanted[64];
    snprintf(wanted, sizeof wanted, "head_dim: found %d", 1000 + n);
    a.head_dim = 1000 + n;
    if (limelight_launch(kernels, LIMELIGHT_FORWARD, &a) != LIMELIGHT_WRONG_HEAD_DIM ||
        strncmp(limelight_message(), wanted, strlen(wanted)))
      return "a message is another thread's";
  }
  return NULL;
}

int main(int count, char **arguments) {
  void *driver = dlopen(LIMELIGHT_DRIVER, RTLD_NOW);
  void *found = driver ? dlsym(driver, "fake_make_current") : NULL;
  memcpy(&make_current, &found, sizeof found);
  if (count != 2 || !found || limelight_open(arguments[1], &kernels))
    return puts(limelight_message()), 1;
  pthread_t threads[THREADS];
  for (int n = 0; n < THREADS; n++) pthread_create(&threads[n], NULL, run, (void *)(intptr_t)n);
  for (int n = 0; n < THREADS; n++) {
    void *fault;
    pthread_join(threads[n], &fault);
    if (fault) return puts(fault), 1;
  }
  limelight_close(kernels);
  printf("%d threads, %d launches each\n", THREADS, LAUNCHES);
  return 0;
}
