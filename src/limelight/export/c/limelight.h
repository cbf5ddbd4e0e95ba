/* limelight's attention kernels from C, without Python and without CUDA's headers.
 *
 *   limelight *kernels;
 *   limelight_open("folder", &kernels);
 *   limelight_attention a = LIMELIGHT_ATTENTION;
 *   a.dtype = LIMELIGHT_FLOAT16, a.head_dim = 64, a.mask = "causal", a.bias = "alibi";
 *   a.batch = 2, a.q_heads = a.kv_heads = 8, a.q_len = a.kv_len = 1000;
 *   a.query = limelight_contiguous(query, 8, 1000, 64); ... the other tensors likewise
 *   if (limelight_launch(kernels, LIMELIGHT_FORWARD, &a)) puts(limelight_message());
 *
 * Build limelight.c, beside which lies the generated limelight_tables.h, with -pthread -ldl. The
 * driver (libcuda.so.1) is opened on first use. Work runs on the context that is current in the
 * calling thread, on `stream`. Every function may be called from any thread. None prints or exits;
 * each returns a status, of which limelight_message() says more.
 */
#ifndef LIMELIGHT_H
#define LIMELIGHT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  LIMELIGHT_SUCCESS = 0,
  LIMELIGHT_EMPTY,              /* no output has an element: nothing was launched */
  LIMELIGHT_NO_DRIVER,          /* libcuda.so.1 is not there, or does not start */
  LIMELIGHT_NO_CONTEXT,         /* no context is current in this thread */
  LIMELIGHT_DRIVER_FAILED,      /* a call of the driver failed */
  LIMELIGHT_WRONG_STRUCT,       /* not begun as LIMELIGHT_ATTENTION, or by another version */
  LIMELIGHT_NO_FILE,            /* a file of the folder cannot be read */
  LIMELIGHT_NO_MEMORY,          /* of the host */
  LIMELIGHT_NOT_EXPORTED,       /* no such dtype, mask, bias or operation in this folder */
  LIMELIGHT_WRONG_HEAD_DIM,     /* no such head_dim in this folder */
  LIMELIGHT_WRONG_ARCHITECTURE, /* nothing in this folder runs on the GPU */
  LIMELIGHT_WRONG_SIZE,         /* negative, too large, or heads that do not divide */
  LIMELIGHT_WRONG_NUMBER,       /* scale or softcap */
  LIMELIGHT_WRONG_STRIDE,       /* one that the kernels cannot take */
  LIMELIGHT_NOT_ALIGNED,        /* an address */
  LIMELIGHT_NULL_POINTER,       /* a tensor that is needed is not given */
  LIMELIGHT_SMALL_WORKSPACE,    /* less than limelight_workspace says */
  LIMELIGHT_CAPTURING,          /* a graph is captured, and limelight_preload was not called */
} limelight_status;

/* The name of a status, such as "LIMELIGHT_WRONG_STRIDE". */
const char *limelight_name(limelight_status status);

/* What went wrong in this thread's last call that did not return LIMELIGHT_SUCCESS. */
const char *limelight_message(void);

typedef enum { LIMELIGHT_FLOAT16 = 1, LIMELIGHT_BFLOAT16, LIMELIGHT_FLOAT32 } limelight_dtype;
typedef enum { LIMELIGHT_FORWARD, LIMELIGHT_BACKWARD } limelight_operation;

/* A tensor on the device. Strides count elements. Of a contiguous tensor (every one but query, key,
 * value, out and their gradients) they may be left 0. shape is read only where the manifest leaves
 * it open, such as the entries of a table. */
typedef struct {
  uint64_t address;
  int64_t stride[4], shape[4];
} limelight_tensor;

/* A contiguous tensor [batch, heads, length, dim]. */
limelight_tensor limelight_contiguous(uint64_t address, int64_t heads, int64_t length, int64_t dim);

/* One attention: softmax(scale * query key^T + bias, masked) value, and its gradients. */
typedef struct {
  size_t struct_size; /* LIMELIGHT_ATTENTION sets it */

  /* Which kernels. */
  limelight_dtype dtype;
  int head_dim, value_dim;  /* value_dim 0: as head_dim */
  const char *mask, *bias;  /* as in the manifest, such as "causal & key_lengths"; NULL: none */
  int bias_gradients;       /* not 0: a backward computes those of the bias's tensors too */

  /* Sizes and numbers. Query head h reads head h / (q_heads / kv_heads) of keys and values. */
  int64_t batch, q_heads, kv_heads, q_len, kv_len;
  int64_t query_start; /* the position of the first query; kv_len - q_len aligns the ends */
  double scale;        /* 0: 1 / sqrt(head_dim) */
  double softcap;      /* 0: scores are not capped */

  /* Inputs. sinks [q_heads] float32 may be absent. mask_tensors and bias_tensors: in the order of
   * the manifest, such as the lengths of "key_lengths" [batch] int64, the slopes of "alibi"
   * [q_heads] float32. */
  limelight_tensor query, key, value, sinks, mask_tensors[4], bias_tensors[4];

  /* Of a forward the outputs, of a backward inputs. lse [batch, q_heads, q_len] float32 is needed
   * for a backward only. */
  limelight_tensor out, lse;

  /* Of a backward: the gradients of out and, unless absent, of lse. */
  limelight_tensor d_out, d_lse;

  /* Of a backward the outputs, each of which may be absent. */
  limelight_tensor d_query, d_key, d_value, d_sinks, d_bias_tensors[4];

  /* Memory on the device, at a multiple of 256 bytes, of at least limelight_workspace bytes. */
  uint64_t workspace;
  size_t workspace_size;

  void *stream; /* CUstream or cudaStream_t; NULL: the default stream */

  /* To try another GPU's kernels: 61 takes those of sm_61. 0: what suits the GPU best. */
  int target;
  int from_ptx; /* not 0: have the driver assemble the PTX */
} limelight_attention;

#define LIMELIGHT_ATTENTION {.struct_size = sizeof(limelight_attention)}

typedef struct limelight limelight;

/* Opens an exported folder. Kernels are read from it on first use, or by limelight_preload. */
limelight_status limelight_open(const char *folder, limelight **result);

/* Forgets the folder. The driver keeps what it loaded until the context ends. NULL is allowed. */
void limelight_close(limelight *kernels);

/* The bytes of workspace that a launch of these sizes needs. Tensors need not be given yet. */
limelight_status limelight_workspace(limelight *kernels, limelight_operation operation,
                                     const limelight_attention *attention, size_t *bytes);

/* Loads what a launch will need, onto the current context: then it can be captured in a graph.
 * Tensors and sizes need not be given yet. */
limelight_status limelight_preload(limelight *kernels, limelight_operation operation,
                                   const limelight_attention *attention);

/* Launches, and returns at once. Nothing is launched unless everything fits. */
limelight_status limelight_launch(limelight *kernels, limelight_operation operation,
                                  const limelight_attention *attention);

#ifdef __cplusplus
}
#endif
#endif
