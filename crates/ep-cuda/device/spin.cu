// spin: keeps the stream busy for a while, so that what is launched behind it is there when it ends.
#include "ptx.cuh"

struct SpinParams {
    u64 nanoseconds;
};
static_assert(sizeof(SpinParams) == 8, "as in src/bench.rs");

extern "C" __global__ void spin(const __grid_constant__ SpinParams p) {
    const u64 begin = globaltimer();
    while (globaltimer() - begin < p.nanoseconds) {
    }
}
