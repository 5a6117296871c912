/* A fake CUDA driver, for tests of driver errors. Device memory is memfd files, which processes can share; copies work;
 * kernels do nothing. Environment variables:
 *
 *   FAKE_CUDA_VERSION=12040       the CUDA version that the driver supports
 *   FAKE_CUDA_GPUS=1              number of GPUs
 *   FAKE_CUDA_CAPABILITY=90       their compute capability
 *   FAKE_CUDA_FAIL=cuInit=100     the function fails with this code,
 *                  cuInit=100@3   starting with its third call,
 *                  cuInit=100@3!  after which every other function fails, too
 *   FAKE_CUDA_LOG=FILE            file to which the name of every called function is appended, one per line
 *   FAKE_CUDA_OLD=1               cuCtxRecordEvent is not supported
 *   FAKE_CUDA_FABRIC=1            other machines can share memory; =2: the driver says so, but allocating fails
 *
 * A program that loads this library by name can hold streams, so that their work does not complete, and capture graphs:
 * see the functions that begin with fake_. fake_violations() counts the calls that would be errors on a real GPU.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
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

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    DEINITIALIZED = 4,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NOT_READY = 600,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURED_EVENT = 907
};

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

static atomic_int violations, deinitialized;

static void violation(const char *what) {
    fprintf(stderr, "fake driver: %s\n", what);
    violations++;
}
int fake_violations(void) { return violations; }

/* Makes all later calls fail, as at the end of a process. */
void fake_deinitialize(void) { deinitialized = 1; }

/* Set on the thread that destroys user objects. */
static _Thread_local int in_callback;

/* The result of a call: success, unless FAKE_CUDA_FAIL selects a failure. */
static Result answer(const char *function) {
    static atomic_int calls, broken;
    log_call(function);
    if (in_callback) violation("a function of the driver is called while a user object is destroyed");
    if (deinitialized) return DEINITIALIZED;
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

/* A function that uses the context of the thread, and fails without one. */
#define FUNCTION_OF_CONTEXT(name, parameters, ...)                                                                     \
    FUNCTION(name, parameters, if (!current) return INVALID_CONTEXT; __VA_ARGS__)

/* The real driver's messages for some codes. */
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
        case NOT_PERMITTED: *text = "operation not permitted"; break;
        case 802: *text = "system not yet initialized"; break;
        case 999: *text = "unknown error"; break;
        default: *text = NULL; return INVALID_VALUE;
    }
    return SUCCESS;
}

/* ---- streams, events and graphs */

enum { MOST_STREAMS = 1024, MOST = 64 };

typedef void Destroy(void *);

typedef struct {
    void *pointer;
    Destroy *destroy;
    atomic_int references;
} Object;

typedef struct {
    uint64_t capture;
    Object *objects[MOST];
    int objects_kept;
    atomic_int running; /* launches that have not completed */
    atomic_int destroyed;
} Graph;

typedef struct {
    atomic_long submitted, done; /* counts of work items */
    atomic_int held, destroyed;
    Graph *_Atomic graph; /* set while the stream is captured */
    Graph *replayed[MOST]; /* graphs in held work */
    int replays;
} Stream;

typedef struct {
    int captured, count;
    Stream *streams[MOST_STREAMS];
    long until[MOST_STREAMS];
} Event;

/* Entry 0 is the default stream. Entries are never reused. */
static Stream streams[MOST_STREAMS];
static atomic_int streams_made = 1;
static atomic_int captures, broken_captures, uploads;
static atomic_long mapped_bytes;
static _Thread_local int capture_mode;
/* The context of this thread: the number of the GPU plus one, or the value that the program has set. */
static _Thread_local void *current;

static Stream *new_stream(void) {
    int at = streams_made++;
    if (at >= MOST_STREAMS) abort();
    return &streams[at];
}

static Stream *stream_of(void *stream) {
    if ((uintptr_t)stream <= 2) return &streams[0];
    Stream *of = stream;
    if (of->destroyed) violation("a stream is used that was destroyed");
    return of;
}

/* Adds work to a stream, or to its graph while the stream is captured. */
static void work_in(void *stream) {
    Stream *of = stream_of(stream);
    if (of->graph) return;
    of->submitted++;
    if (!of->held) of->done = of->submitted;
}

static int something_runs(void) {
    for (int at = 0; at < streams_made; at++) {
        if (streams[at].done < streams[at].submitted) return 1;
    }
    return 0;
}

/* For calls that are illegal during a capture: invalidates all captures and returns their number. */
static int break_captures(void) {
    int broken = 0;
    for (int at = 0; at < streams_made; at++) broken += streams[at].graph != NULL;
    broken_captures += broken;
    return broken;
}

/* For calls that are legal during a capture only on threads in relaxed mode. */
static int unsafe_call(void) { return capture_mode == 2 ? 0 : break_captures(); }

static void *destroy_object(void *object) {
    Object *of = object;
    in_callback = 1;
    of->destroy(of->pointer);
    free(of);
    return NULL;
}

static void release_object(Object *object, int count) {
    if ((object->references -= count) > 0) return;
    pthread_t thread;
    if (pthread_create(&thread, NULL, destroy_object, object)) abort();
    pthread_detach(thread);
}

static void release_graph(Graph *graph) {
    if (graph->running || !graph->destroyed) return;
    for (int at = 0; at < graph->objects_kept; at++) release_object(graph->objects[at], 1);
    graph->objects_kept = 0;
}

/* Work added to a held stream does not complete until the stream is released. */
void fake_hold(void *stream) { stream_of(stream)->held = 1; }
void fake_release(void *stream) {
    Stream *of = (uintptr_t)stream <= 2 ? &streams[0] : stream;
    of->held = 0;
    of->done = of->submitted;
    for (int at = 0; at < of->replays; at++) {
        of->replayed[at]->running--;
        release_graph(of->replayed[at]);
    }
    of->replays = 0;
}
void *fake_stream(void) { return new_stream(); }
void fake_submit(void *stream) { work_in(stream); }

void fake_begin_capture(void *stream) {
    Graph *graph = calloc(1, sizeof *graph);
    graph->capture = (uint64_t)++captures;
    stream_of(stream)->graph = graph;
}
void *fake_end_capture(void *stream) {
    Stream *of = stream_of(stream);
    Graph *graph = of->graph;
    of->graph = NULL;
    return graph;
}
int fake_objects_kept(void *graph) { return ((Graph *)graph)->objects_kept; }
void fake_replay(void *graph, void *stream) {
    Stream *of = stream_of(stream);
    work_in(stream);
    if (!of->held) return;
    if (of->replays == MOST) abort();
    ((Graph *)graph)->running++;
    of->replayed[of->replays++] = graph;
}
void fake_destroy_graph(void *graph) {
    ((Graph *)graph)->destroyed = 1;
    release_graph(graph);
}
int fake_broken_captures(void) { return broken_captures; }
long fake_mapped_bytes(void) { return mapped_bytes; }
int fake_uploads(void) { return uploads; }
/* Makes the next call of cuMemSetAccess fail. */
static int refuses_access;
void fake_refuse_access(void) { refuses_access = 1; }

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
         int capability = number_of("FAKE_CUDA_CAPABILITY", 90);
         switch (attribute) {
             case 75: *value = capability / 10; break;
             case 76: *value = capability % 10; break;
             case 16: *value = 132; break;         /* multiprocessors */
             case 97: *value = 227 << 10; break;   /* shared memory of a block that asks for it */
             case 33: *value = 0x1a + device; break; /* PCI bus */
             case 34: *value = 0; break;           /* PCI device */
             case 50: *value = 0; break;           /* PCI domain */
             case 110: *value = number_of("FAKE_CUDA_GPU_DIRECT", 0) != 0; break; /* memory that NICs access */
             case 117: *value = 1; break;          /* the host flushes what NICs write */
             case 118: *value = 0; break;          /* what NICs write is not ordered */
             case 128: *value = number_of("FAKE_CUDA_FABRIC", 0) != 0; break;
             default: return INVALID_VALUE;
         })

FUNCTION(cuDevicePrimaryCtxRetain, (void **context, Device device), *context = (void *)(uintptr_t)(device + 1);)
FUNCTION(cuDevicePrimaryCtxRelease_v2, (Device device), (void)device;)
FUNCTION(cuCtxGetCurrent, (void **context), *context = current;)
FUNCTION(cuCtxSetCurrent, (void *context), current = context;)

FUNCTION_OF_CONTEXT(cuMemGetInfo_v2, (size_t *available, size_t *total), *available = 5 << 20; *total = GPU_MEMORY;)

/* Kinds of handles by which memory is shared: bits. */
enum { DESCRIPTOR = 1, FABRIC = 8 };
/* A fabric handle has 64 bytes. Here it names the file by process and descriptor. */
typedef struct { int process, file, zero[14]; } Fabric;
static atomic_int fabric_imports;
int fake_fabric_imports(void) { return fabric_imports; }
/* By file: the kinds that were asked for when the memory was made. */
static int kinds_of[4096];

FUNCTION(cuMemCreate, (Memory *memory, size_t bytes, const int *properties, unsigned long long flags),
         (void)flags;
         int kinds = properties[1];
         if (kinds & FABRIC && number_of("FAKE_CUDA_FABRIC", 0) != 1) return NOT_PERMITTED;
         int file = memfd_create("fake-cuda", MFD_CLOEXEC);
         if (file < 0 || ftruncate(file, bytes)) return OUT_OF_MEMORY;
         if (file >= 4096) abort();
         kinds_of[file] = kinds;
         *memory = file;)
FUNCTION(cuMemRelease, (Memory memory), close((int)memory);)
FUNCTION(cuMemExportToShareableHandle, (void *handle, Memory memory, int kind, unsigned long long flags),
         (void)flags;
         if (!(kinds_of[memory] & kind)) return INVALID_VALUE;
         if (kind == FABRIC) *(Fabric *)handle = (Fabric){.process = getpid(), .file = (int)memory};
         else *(int *)handle = dup((int)memory);)
FUNCTION(cuMemImportFromShareableHandle, (Memory *memory, void *handle, int kind),
         int file;
         if (kind == FABRIC) {
             const Fabric *fabric = handle;
             char path[64];
             snprintf(path, sizeof path, "/proc/%d/fd/%d", fabric->process, fabric->file);
             file = open(path, O_RDWR | O_CLOEXEC);
             fabric_imports++;
         } else file = dup((int)(intptr_t)handle);
         if (file < 0) return INVALID_VALUE;
         *memory = file;)

FUNCTION(cuMemAddressReserve, (Address *address, size_t bytes, size_t alignment, Address wish, unsigned long long flags),
         (void)alignment; (void)wish; (void)flags;
         void *reserved = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
         if (reserved == MAP_FAILED) return OUT_OF_MEMORY;
         *address = (Address)(uintptr_t)reserved;)
FUNCTION(cuMemAddressFree, (Address address, size_t bytes), munmap((void *)(uintptr_t)address, bytes);)
FUNCTION(cuMemMap, (Address address, size_t bytes, size_t offset, Memory memory, unsigned long long flags),
         (void)flags;
         if (mmap((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)memory,
                  (off_t)offset) == MAP_FAILED) return OUT_OF_MEMORY;
         mapped_bytes += (long)bytes;)
FUNCTION(cuMemUnmap, (Address address, size_t bytes),
         if (something_runs()) violation("memory is unmapped while something runs");
         if (unsafe_call()) return CAPTURE_UNSUPPORTED;
         mapped_bytes -= (long)bytes;
         mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
              0);)
FUNCTION(cuMemSetAccess, (Address address, size_t bytes, const void *access, size_t count),
         (void)address; (void)bytes; (void)access; (void)count;
         if (refuses_access) {
             refuses_access = 0;
             return OUT_OF_MEMORY;
         })

FUNCTION_OF_CONTEXT(cuMemAlloc_v2, (Address *address, size_t bytes),
         void *memory = calloc(1, bytes);
         if (!memory) return OUT_OF_MEMORY;
         *address = (Address)(uintptr_t)memory;)
FUNCTION_OF_CONTEXT(cuMemFree_v2, (Address address), free((void *)(uintptr_t)address);)
FUNCTION_OF_CONTEXT(cuMemHostAlloc, (void **memory, size_t bytes, unsigned flags),
         (void)flags;
         *memory = calloc(1, bytes);
         if (!*memory) return OUT_OF_MEMORY;)
FUNCTION_OF_CONTEXT(cuMemFreeHost, (void *memory), free(memory);)
FUNCTION_OF_CONTEXT(cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned flags),
                    (void)memory; (void)bytes; (void)flags;)
FUNCTION_OF_CONTEXT(cuMemHostUnregister, (void *memory), (void)memory;)
FUNCTION_OF_CONTEXT(cuMemHostGetDevicePointer_v2, (Address *address, void *memory, unsigned flags),
         (void)flags;
         *address = (Address)(uintptr_t)memory;)

FUNCTION_OF_CONTEXT(cuMemcpyHtoDAsync_v2, (Address to, const void *from, size_t bytes, void *stream),
         work_in(stream); uploads++; memcpy((void *)(uintptr_t)to, from, bytes);)
FUNCTION_OF_CONTEXT(cuMemcpyDtoHAsync_v2, (void *to, Address from, size_t bytes, void *stream),
         work_in(stream); memcpy(to, (void *)(uintptr_t)from, bytes);)
FUNCTION_OF_CONTEXT(cuMemcpyDtoDAsync_v2, (Address to, Address from, size_t bytes, void *stream),
         work_in(stream); memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);)
FUNCTION_OF_CONTEXT(cuStreamWriteValue32_v2, (void *stream, Address to, uint32_t word, unsigned flags),
         (void)flags; work_in(stream); *(uint32_t *)(uintptr_t)to = word;)
FUNCTION_OF_CONTEXT(cuMemsetD8Async, (Address to, unsigned char value, size_t bytes, void *stream),
         work_in(stream); memset((void *)(uintptr_t)to, value, bytes);)

FUNCTION_OF_CONTEXT(cuStreamCreate, (void **stream, unsigned flags), (void)flags; *stream = new_stream();)
FUNCTION_OF_CONTEXT(cuStreamDestroy_v2, (void *stream), stream_of(stream)->destroyed = 1;)
FUNCTION_OF_CONTEXT(cuStreamSynchronize, (void *stream),
         Stream *of = stream_of(stream);
         long until = of->submitted;
         while (of->done < until) usleep(1000);)
FUNCTION_OF_CONTEXT(cuStreamQuery, (void *stream),
                    Stream *of = stream_of(stream);
                    if (of->done < of->submitted) return NOT_READY;)
FUNCTION_OF_CONTEXT(cuStreamIsCapturing, (void *stream, int *status), *status = stream_of(stream)->graph != NULL;)
FUNCTION_OF_CONTEXT(
         cuStreamGetCaptureInfo_v2,
         (void *stream, int *status, uint64_t *id, void **graph, void **nodes, size_t *count),
         (void)nodes; (void)count;
         Graph *of = stream_of(stream)->graph;
         *status = of != NULL;
         if (of) { *id = of->capture; *graph = of; })
FUNCTION_OF_CONTEXT(cuStreamWaitEvent, (void *stream, void *event, unsigned flags),
         (void)event; (void)flags;
         stream_of(stream);)
FUNCTION(cuThreadExchangeStreamCaptureMode, (int *mode), int old = capture_mode; capture_mode = *mode; *mode = old;)

FUNCTION_OF_CONTEXT(cuEventCreate, (void **event, unsigned flags), (void)flags; *event = calloc(1, sizeof(Event));)
FUNCTION_OF_CONTEXT(cuEventDestroy_v2, (void *event), free(event);)
FUNCTION_OF_CONTEXT(cuEventRecord, (void *event, void *stream),
         Event *of = event;
         Stream *in = stream_of(stream);
         of->captured = in->graph != NULL;
         of->count = 1;
         of->streams[0] = in;
         of->until[0] = in->submitted;)
FUNCTION_OF_CONTEXT(cuFlushGPUDirectRDMAWrites, (int target, int scope), (void)target; (void)scope;)
FUNCTION(cuCtxRecordEvent, (void *context, void *event),
         (void)context;
         if (number_of("FAKE_CUDA_OLD", 0)) return NOT_SUPPORTED;
         if (break_captures()) return CAPTURE_UNSUPPORTED;
         Event *of = event;
         of->captured = 0;
         of->count = streams_made;
         for (int at = 0; at < of->count; at++) {
             of->streams[at] = &streams[at];
             of->until[at] = streams[at].submitted;
         })
FUNCTION_OF_CONTEXT(cuCtxSynchronize, (void),
         if (break_captures()) return CAPTURE_UNSUPPORTED;
         for (int at = 0; at < streams_made; at++) {
             long until = streams[at].submitted;
             while (streams[at].done < until) usleep(1000);
         })
FUNCTION_OF_CONTEXT(cuEventQuery, (void *event),
         Event *of = event;
         if (unsafe_call()) return CAPTURE_UNSUPPORTED;
         if (of->captured) return CAPTURED_EVENT;
         for (int at = 0; at < of->count; at++) {
             if (of->streams[at]->done < of->until[at]) return NOT_READY;
         })
FUNCTION_OF_CONTEXT(cuEventElapsedTime, (float *milliseconds, void *begin, void *end), (void)begin; (void)end; *milliseconds = 1;)

FUNCTION(cuUserObjectCreate, (void **object, void *pointer, Destroy *destroy, unsigned references, unsigned flags),
         (void)flags;
         Object *made = calloc(1, sizeof *made);
         made->pointer = pointer; made->destroy = destroy; made->references = (int)references;
         *object = made;)
FUNCTION(cuUserObjectRelease, (void *object, unsigned count), release_object(object, (int)count);)
FUNCTION(cuGraphRetainUserObject, (void *graph, void *object, unsigned count, unsigned flags),
         Graph *of = graph;
         if (of->objects_kept == MOST) return OUT_OF_MEMORY;
         if (!(flags & 1)) ((Object *)object)->references += (int)count;
         of->objects[of->objects_kept++] = object;)

FUNCTION_OF_CONTEXT(cuModuleLoadData, (void **module, const void *image), (void)image; *module = malloc(1);)
FUNCTION_OF_CONTEXT(cuModuleGetFunction, (void **function, void *module, const char *name),
         (void)module; (void)name; *function = malloc(1);)
FUNCTION_OF_CONTEXT(cuFuncGetAttribute, (int *value, int attribute, void *function),
         (void)function;
         *value = attribute == 8 /* maximum of dynamic shared memory */ ? 227 << 10 : 0;)
FUNCTION_OF_CONTEXT(cuFuncSetAttribute, (void *function, int attribute, int value), (void)function; (void)attribute; (void)value;)
FUNCTION_OF_CONTEXT(
         cuLaunchKernel,
         (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
          void *stream, void **parameters, void **extra),
         (void)function; (void)gx; (void)gy; (void)gz; (void)bx; (void)by; (void)bz; (void)shared; work_in(stream);
         (void)parameters; (void)extra;)
