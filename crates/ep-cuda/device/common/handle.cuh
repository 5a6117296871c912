// The lists of a handle: made by preprocess, read by dispatch and combine, on the rank itself and, over the links, by
// its peers. They know tokens in chunks of `chunk_tokens`; `*_begin[chunk]` is where a chunk's entries begin.
//
//   sends      {rank | SEND_*, row}        in token order: where the token's row goes. One entry per remote rank, in
//                                          plain mode one for the own rank too, in permuted mode one per own copy.
//                                          A token without any has one dead entry.
//                                          `token_begin[token]` is where a token's entries begin.
//   copies     {cell, rank << 16 | local expert, row, weight}
//                                          in token order, by expert position: every copy; `cell` is its index in a
//                                          dense [tokens, experts] matrix.
//   recv       {row, send << 2 | RECV_*}   by destination rank, then token order: the rows of a token on that rank.
//                                          What its receiver must know of it; `send` is the index in `sends`, or
//                                          where source and destination are one rank, the token.
//                                          Rows that do not fit are NONE; first and end are of those that do.
//   dst_copies {row or row * experts + expert, copy}
//                                          by destination rank, then token order: where each weight lies on that rank.
//   shape      first row, kept rows, padded rows of each local expert; then the words of `ShapeWord`.
#pragma once
#include "params.cuh"

constexpr u32 SEND_RANK = 0xFFFF;
constexpr u32 SEND_TOKEN_END = 1u << 16;
constexpr u32 SEND_DEAD = 1u << 17;
// Own copies: the first, and the last that fits, of this token.
constexpr u32 SEND_OWN_FIRST = 1u << 18;
constexpr u32 SEND_OWN_END = 1u << 19;

// After those of the local experts.
enum ShapeWord : u32 {
    SHAPE_ROWS = 0,    // that this rank receives, padding included
    SHAPE_WANTED = 1,  // that it would without a limit
    SHAPE_REMOTE = 2,  // that it sends to others, one for each token and rank
    SHAPE_OWN = 3,     // tokens of its own with an expert here
    SHAPE_WORDS = 4,
};

constexpr u32 RECV_FIRST = 1;
constexpr u32 RECV_END = 2;

__device__ inline u32 chunk_end_token(const HandleView& handle, u32 chunk) {
    return min(handle.tokens, (chunk + 1) * handle.chunk_tokens);
}
