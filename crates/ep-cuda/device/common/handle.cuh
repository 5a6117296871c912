// The chunks of a handle.
#pragma once
#include "lists.cuh"
#include "params.cuh"

static_assert(NO_ROW == NONE, "hosts and kernels use one value for 'none'");

__device__ inline u32 chunk_end_token(const HandleView& handle, u32 chunk) {
    return min(handle.tokens, (chunk + 1) * handle.chunk_tokens);
}
