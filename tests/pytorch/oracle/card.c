/* With -DRUNTIME, what a CUDA build of PyTorch asks the runtime while it selects an attention backend;
   without, what it asks the driver before. The card has the compute capability in $CARD ("90"). */
#include <stdlib.h>
#include <string.h>

#ifdef RUNTIME
enum { COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76 };               /* cudaDeviceAttr */
enum { PROPERTIES = 600, MAJOR_AT = 0x168, MINOR_AT = 0x16c }; /* bytes of cudaDeviceProp, CUDA 12 and 13 */

static int card(void) {
    const char *number = getenv("CARD");
    return number ? atoi(number) : 80;
}

static int properties(char *found) {
    int major = card() / 10, minor = card() % 10;
    memset(found, 0, PROPERTIES);
    strcpy(found, "card");
    memcpy(found + MAJOR_AT, &major, sizeof major);
    memcpy(found + MINOR_AT, &minor, sizeof minor);
    return 0;
}

int cudaGetDeviceProperties(void *found, int device) { return properties(found); }
int cudaGetDeviceProperties_v2(void *found, int device) { return properties(found); }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == COMPUTE_MAJOR ? card() / 10 : attribute == COMPUTE_MINOR ? card() % 10 : 0;
    return 0;
}
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaStreamSynchronize(void *stream) { return 0; }
int cudaStreamQuery(void *stream) { return 0; }
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { if (status) *status = 0; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = 0;
    return 0;
}
#else
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no driver"; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    if (active) *active = 0;
    return 0;
}
#endif
