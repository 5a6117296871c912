/* A CUDA driver without GPUs, for tests of what happens when a driver refuses. Device memory is files in memory,
 * which processes can share; copies copy; kernels do nothing. By environment variables:
 *
 *   FAKE_CUDA_VERSION=12040       the CUDA version that the driver supports
 *   FAKE_CUDA_GPUS=1              GPUs
 *   FAKE_CUDA_CAPABILITY=90       their compute capability
 *   FAKE_CUDA_FAIL=cuInit=100     the function fails with this code,
 *                  cuInit=100@3   from its third call on,
 *                  cuInit=100@3!  and so does every other function then
 *   FAKE_CUDA_LOG=FILE            gets the name of every function that is called, one a line
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int Result;
typedef int Device;
typedef uint64_t Address;
typedef uint64_t Memory;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101 };

#define GPU_MEMORY ((size_t)2 << 30)

static int number_of(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

static void log_call(const char *function) {
    const char *path = getenv("FAKE_CUDA_LOG");
    if (!path) return;
    char line[96];
    int length = snprintf(line, sizeof line, "%s\n", function);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (file < 0 || write(file, line, length) != length) abort();
    close(file);
}

/* What the call answers: success, unless FAKE_CUDA_FAIL says otherwise. */
static Result answer(const char *function) {
    static atomic_int calls, broken;
    log_call(function);
    if (broken) return broken;
    const char *plan = getenv("FAKE_CUDA_FAIL");
    size_t length = strlen(function);
    if (!plan || strncmp(plan, function, length) || plan[length] != '=') return SUCCESS;
    int code = atoi(plan + length + 1);
    const char *from = strchr(plan, '@');
    if (++calls < (from ? atoi(from + 1) : 1)) return SUCCESS;
    if (strchr(plan, '!')) broken = code;
    return code;
}

#define FUNCTION(name, parameters, ...)                                                                                \
    Result name parameters {                                                                                           \
        Result result = answer(#name);                                                                                 \
        if (result) return result;                                                                                     \
        __VA_ARGS__                                                                                                    \
        return SUCCESS;                                                                                                \
    }

/* The words of the real driver for some codes. */
Result cuGetErrorString(Result code, const char **text) {
    switch (code) {
        case INVALID_VALUE: *text = "invalid argument"; break;
        case OUT_OF_MEMORY: *text = "out of memory"; break;
        case 34: *text = "CUDA driver is a stub library"; break;
        case 46: *text = "CUDA-capable device(s) is/are busy or unavailable"; break;
        case NO_DEVICE: *text = "no CUDA-capable device is detected"; break;
        case 209: *text = "no kernel image is available for execution on the device"; break;
        case 304: *text = "OS call failed or operation not supported on this OS"; break;
        case 700: *text = "an illegal memory access was encountered"; break;
        case 701: *text = "too many resources requested for launch"; break;
        case 801: *text = "operation not supported"; break;
        case 802: *text = "system not yet initialized"; break;
        case 999: *text = "unknown error"; break;
        default: *text = NULL; return INVALID_VALUE;
    }
    return SUCCESS;
}

FUNCTION(cuInit, (unsigned flags), (void)flags;)
FUNCTION(cuDriverGetVersion, (int *version), *version = number_of("FAKE_CUDA_VERSION", 12040);)
FUNCTION(cuDeviceGetCount, (int *count), *count = number_of("FAKE_CUDA_GPUS", 1);)
FUNCTION(cuDeviceGet, (Device *device, int ordinal),
         if (ordinal >= number_of("FAKE_CUDA_GPUS", 1)) return INVALID_DEVICE;
         *device = ordinal;)
FUNCTION(cuDeviceGetName, (char *name, int length, Device device), snprintf(name, length, "Fake GPU %d", device);)
FUNCTION(cuDeviceGetPCIBusId, (char *id, int length, Device device), snprintf(id, length, "0000:%02x:00.0", device);)
FUNCTION(cuDeviceGetUuid_v2, (char *uuid, Device device), memset(uuid, device + 1, 16);)
FUNCTION(cuDeviceTotalMem_v2, (size_t *bytes, Device device), (void)device; *bytes = GPU_MEMORY;)
FUNCTION(cuDeviceGetP2PAttribute, (int *value, int attribute, Device from, Device to),
         (void)attribute; (void)from; (void)to; *value = 1;)

FUNCTION(cuDeviceGetAttribute, (int *value, int attribute, Device device),
         (void)device;
         int capability = number_of("FAKE_CUDA_CAPABILITY", 90);
         switch (attribute) {
             case 75: *value = capability / 10; break;
             case 76: *value = capability % 10; break;
             case 16: *value = 132; break;         /* multiprocessors */
             case 97: *value = 227 << 10; break;   /* shared memory of a block that asks for it */
             default: return INVALID_VALUE;
         })

FUNCTION(cuDevicePrimaryCtxRetain, (void **context, Device device), *context = (void *)(uintptr_t)(device + 1);)
FUNCTION(cuDevicePrimaryCtxRelease_v2, (Device device), (void)device;)
FUNCTION(cuCtxSetCurrent, (void *context), (void)context;)

FUNCTION(cuMemGetInfo_v2, (size_t *available, size_t *total), *available = 5 << 20; *total = GPU_MEMORY;)

FUNCTION(cuMemCreate, (Memory *memory, size_t bytes, const void *properties, unsigned long long flags),
         (void)properties; (void)flags;
         int file = memfd_create("fake-cuda", MFD_CLOEXEC);
         if (file < 0 || ftruncate(file, bytes)) return OUT_OF_MEMORY;
         *memory = file;)
FUNCTION(cuMemRelease, (Memory memory), close((int)memory);)
FUNCTION(cuMemExportToShareableHandle, (int *file, Memory memory, int kind, unsigned long long flags),
         (void)kind; (void)flags;
         *file = dup((int)memory);)
FUNCTION(cuMemImportFromShareableHandle, (Memory *memory, void *file, int kind),
         (void)kind;
         *memory = dup((int)(intptr_t)file);)

FUNCTION(cuMemAddressReserve, (Address *address, size_t bytes, size_t alignment, Address wish, unsigned long long flags),
         (void)alignment; (void)wish; (void)flags;
         void *reserved = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
         if (reserved == MAP_FAILED) return OUT_OF_MEMORY;
         *address = (Address)(uintptr_t)reserved;)
FUNCTION(cuMemAddressFree, (Address address, size_t bytes), munmap((void *)(uintptr_t)address, bytes);)
FUNCTION(cuMemMap, (Address address, size_t bytes, size_t offset, Memory memory, unsigned long long flags),
         (void)flags;
         if (mmap((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)memory,
                  (off_t)offset) == MAP_FAILED) return OUT_OF_MEMORY;)
FUNCTION(cuMemUnmap, (Address address, size_t bytes),
         mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
              0);)
FUNCTION(cuMemSetAccess, (Address address, size_t bytes, const void *access, size_t count),
         (void)address; (void)bytes; (void)access; (void)count;)

FUNCTION(cuMemHostAlloc, (void **memory, size_t bytes, unsigned flags),
         (void)flags;
         *memory = calloc(1, bytes);
         if (!*memory) return OUT_OF_MEMORY;)
FUNCTION(cuMemFreeHost, (void *memory), free(memory);)
FUNCTION(cuMemHostGetDevicePointer_v2, (Address *address, void *memory, unsigned flags),
         (void)flags;
         *address = (Address)(uintptr_t)memory;)

FUNCTION(cuMemcpyHtoDAsync_v2, (Address to, const void *from, size_t bytes, void *stream),
         (void)stream; memcpy((void *)(uintptr_t)to, from, bytes);)
FUNCTION(cuMemcpyDtoHAsync_v2, (void *to, Address from, size_t bytes, void *stream),
         (void)stream; memcpy(to, (void *)(uintptr_t)from, bytes);)
FUNCTION(cuMemcpyDtoDAsync_v2, (Address to, Address from, size_t bytes, void *stream),
         (void)stream; memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);)
FUNCTION(cuMemsetD8Async, (Address to, unsigned char value, size_t bytes, void *stream),
         (void)stream; memset((void *)(uintptr_t)to, value, bytes);)

FUNCTION(cuStreamCreate, (void **stream, unsigned flags), (void)flags; *stream = malloc(1);)
FUNCTION(cuStreamDestroy_v2, (void *stream), free(stream);)
FUNCTION(cuStreamSynchronize, (void *stream), (void)stream;)
FUNCTION(cuStreamIsCapturing, (void *stream, int *status), (void)stream; *status = 0;)
FUNCTION(cuStreamWaitEvent, (void *stream, void *event, unsigned flags), (void)stream; (void)event; (void)flags;)
FUNCTION(cuEventCreate, (void **event, unsigned flags), (void)flags; *event = malloc(1);)
FUNCTION(cuEventDestroy_v2, (void *event), free(event);)
FUNCTION(cuEventRecord, (void *event, void *stream), (void)event; (void)stream;)
FUNCTION(cuEventElapsedTime, (float *milliseconds, void *begin, void *end), (void)begin; (void)end; *milliseconds = 1;)

FUNCTION(cuModuleLoadData, (void **module, const void *image), (void)image; *module = malloc(1);)
FUNCTION(cuModuleGetFunction, (void **function, void *module, const char *name),
         (void)module; (void)name; *function = malloc(1);)
FUNCTION(cuFuncGetAttribute, (int *value, int attribute, void *function),
         (void)function;
         *value = attribute == 8 /* dynamic shared memory, at most */ ? 227 << 10 : 0;)
FUNCTION(cuFuncSetAttribute, (void *function, int attribute, int value), (void)function; (void)attribute; (void)value;)
FUNCTION(cuLaunchKernel,
         (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
          void *stream, void **parameters, void **extra),
         (void)function; (void)gx; (void)gy; (void)gz; (void)bx; (void)by; (void)bz; (void)shared; (void)stream;
         (void)parameters; (void)extra;)
