/* The workload of alltoallv.c: its sizes, the generator of routings and tokens, and sums of bf16 rows. */

#ifndef WORKLOAD_H
#define WORKLOAD_H

#include <stdint.h>
#include <string.h>

enum { BLOCK = 256 }; /* Elements of a row that sum_rows adds at a time. */

typedef uint16_t bf16;

struct sizes {
    int tokens, hidden, experts, topk, iters, seed;
};

static struct sizes size = {4096, 2048, 64, 8, 12, 1};

/* ---- The generator ---- */

static uint64_t splitmix64(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* The state for one token of one rank. `stream` keeps the routing and the elements apart. */
static uint64_t seeded(int stream, int rank, int token) {
    uint64_t state = ((uint64_t)size.seed << 32) + (uint64_t)stream;
    state = splitmix64(&state) ^ (uint64_t)rank;
    return splitmix64(&state) ^ (uint64_t)token;
}

static void draw_experts(int rank, int token, int *chosen, int *deck) {
    uint64_t state = seeded(0, rank, token);
    for (int e = 0; e < size.experts; e++) {
        deck[e] = e;
    }
    for (int k = 0; k < size.topk; k++) {
        int other = k + (int)(splitmix64(&state) % (uint64_t)(size.experts - k));
        chosen[k] = deck[other];
        deck[other] = deck[k];
    }
}

/* Random signs and mantissas, and exponents from 2^-7 to 2^8, so that sums round but neither overflow nor vanish. */
static void draw_row(int rank, int token, bf16 *out) {
    uint64_t state = seeded(1, rank, token), bits = 0;
    for (int j = 0; j < size.hidden; j++) {
        bits = j % 4 == 0 ? splitmix64(&state) : bits >> 16;
        out[j] = (bf16)((bits & 0x807f) | ((120 + ((bits >> 7) & 15)) << 7));
    }
}

/* ---- Numbers ---- */

static inline float widen(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* Rounds to the nearest, ties to even. There are no NaNs here. */
static inline bf16 narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static void sum_rows(bf16 *restrict out, const bf16 *const *in, int count) {
    for (int begin = 0; begin < size.hidden; begin += BLOCK) {
        int width = size.hidden - begin < BLOCK ? size.hidden - begin : BLOCK;
        float sum[BLOCK] = {0};
        for (int i = 0; i < count; i++) {
            const bf16 *restrict from = in[i] + begin;
            for (int j = 0; j < width; j++) {
                sum[j] += widen(from[j]);
            }
        }
        for (int j = 0; j < width; j++) {
            out[begin + j] = narrow(sum[j]);
        }
    }
}

#endif
