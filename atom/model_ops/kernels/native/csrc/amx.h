// Matrix tiles (AMX). A tile register holds 16 rows of 64 bytes. The instruction behind all
// products adds to 16 by 16 float32 sums the products of 16 rows of 32 bfloat16 with 16 columns.
//
// How it rounds (Intel's manual, TDPBF16PS; checked bit by bit on a processor): the even elements of
// the 32 are summed in order by FMA from 0, so are the odd ones, and the sum of both is added to
// what there was. Either operand may hold the weights: the sums are the same. No other
// instruction has these bits.
#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && \
    defined(__AVX512BW__) && defined(__linux__)
#define ATOM_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "transpose.h"

namespace atom::amx {

constexpr int64_t kSide = 16;               // rows of a tile, and its 4-byte columns
constexpr int64_t kRowBytes = 4 * kSide;
constexpr int64_t kTileBytes = kSide * kRowBytes;
constexpr int64_t kDepth = 2 * kSide;       // bfloat16 in a row

// The kernel hands out the tiles' registers on request, to the whole process.
inline bool is_permitted() {
  constexpr int64_t kRequest = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// What a thread that uses tiles keeps alive meanwhile.
class Session {
 public:
  explicit Session(const Config& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
  // columns: 4-byte columns of tiles 0 to 3, the sums, and of tiles 6 and 7, the right operands.
  // Tiles 4 and 5 and, where all have 16 columns, any other can be a left operand.
  explicit Session(int64_t columns = kSide) {
    Config config;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = kSide;
      config.row_bytes[i] = i == 4 || i == 5 ? kRowBytes : uint16_t(4 * columns);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Session() { asm volatile("tilerelease"); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

// Assembler, since compilers' own words for these do not say that they read memory.
template <int Tile>
ATOM_INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}
template <int Tile>
ATOM_INLINE void load(const void* rows, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride_bytes), "i"(Tile)
               : "memory");
}
template <int Tile>
ATOM_INLINE void store(void* rows, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride_bytes), "i"(Tile)
               : "memory");
}
template <int Sums, int Left, int Right>
ATOM_INLINE void multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Left), "i"(Right));
}

template <class Body, int... I>
ATOM_INLINE void unrolled(const Body& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>{}), ...);
}
// body(0), body(1), ... with compile-time numbers, which name tiles.
template <int N, class Body>
ATOM_INLINE void unrolled(const Body& body) {
  unrolled(body, std::make_integer_sequence<int, N>{});
}

}  // namespace atom::amx

#endif
