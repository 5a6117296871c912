/* A fake NVRTC that compiles every source to the same bytes, for the fake driver in cuda.c. */
#include <stddef.h>
#include <string.h>

static const char CUBIN[] = "no machine code";

int nvrtcVersion(int *major, int *minor) {
    *major = 12;
    *minor = 4;
    return 0;
}
const char *nvrtcGetErrorString(int code) { return code ? "unknown error" : "success"; }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names) {
    (void)source, (void)name, (void)headers, (void)texts, (void)names;
    *program = (void *)CUBIN;
    return 0;
}
int nvrtcCompileProgram(void *program, int options, const char *const *all) {
    (void)program, (void)options, (void)all;
    return 0;
}
int nvrtcGetProgramLogSize(void *program, size_t *bytes) {
    (void)program;
    *bytes = 1;
    return 0;
}
int nvrtcGetProgramLog(void *program, char *log) {
    (void)program;
    *log = 0;
    return 0;
}
int nvrtcGetCUBINSize(void *program, size_t *bytes) {
    (void)program;
    *bytes = sizeof CUBIN;
    return 0;
}
int nvrtcGetCUBIN(void *program, char *cubin) {
    (void)program;
    memcpy(cubin, CUBIN, sizeof CUBIN);
    return 0;
}
int nvrtcDestroyProgram(void **program) {
    *program = NULL;
    return 0;
}
