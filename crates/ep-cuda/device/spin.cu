// spin: one thread that occupies the stream for `nanoseconds`, so that the kernels that a benchmark launches behind it
// are already queued when it ends. Touches no memory.
#include "params.cuh"
#include "ptx.cuh"

extern "C" __global__ void spin(const __grid_constant__ SpinParams p) {
    const u64 begin = globaltimer();
    while (globaltimer() - begin < p.nanoseconds) {
    }
}
