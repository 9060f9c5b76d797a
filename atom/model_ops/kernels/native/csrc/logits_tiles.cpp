// Logits of many rows on a processor that multiplies tiles of bfloat16 (AMX).
//
// A tile has 16 rows of 64 bytes. Weights are read as they lie: 16 rows of 32 elements. The
// activations are packed once into what the other operand must be: 16 pairs of elements by 16
// rows. So a product is 16 features by 16 rows, and is transposed on its way out.
#include "linear_args.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "simd.h"

namespace atom {
namespace {

constexpr int64_t kSide = 16;         // rows of a tile, and 4-byte columns
constexpr int64_t kDepth = 2 * kSide;  // elements of a weight row in a tile
constexpr int64_t kPanel = 2 * kSide;  // features, and rows, that are computed together

// Below, streaming the weights is as fast.
constexpr int64_t kFromRows = 64;

// The kernel hands out the tiles' registers on request, to the whole process.
bool is_permitted() {
  constexpr int64_t kRequest = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

void configure_tiles() {
  TileConfig config;
  std::fill(config.row_bytes, config.row_bytes + 8, uint16_t{64});
  std::fill(config.rows, config.rows + 8, uint8_t{16});
  _tile_loadconfig(&config);
}

// packed[g][k][p][m]: elements 32 k + 2 p and the next of row 16 g + m; absent rows are 0.
void pack_pairs(const LinearArgs& a, int64_t groups, uint32_t* packed) {
  const int64_t depths = a.in_features / kDepth;
  std::memset(packed, 0, groups * kSide * a.in_features * sizeof(bfloat16));
  for (int64_t row = 0; row < a.rows; ++row) {
    const auto* from = static_cast<const bfloat16*>(a.x) + row * a.x_stride;
    uint32_t* to = packed + row / kSide * depths * kSide * kSide + row % kSide;
    for (int64_t pair = 0; pair < a.in_features / 2; ++pair) {
      std::memcpy(to + pair * kSide, from + 2 * pair, sizeof(uint32_t));
    }
  }
}

ATOM_INLINE void transpose(const float* from, __m512 (&out)[16]) {
  __m512 a[16], b[16];
  ATOM_UNROLL for (int i = 0; i < 16; i += 2) {
    const __m512 even = _mm512_load_ps(from + 16 * i), odd = _mm512_load_ps(from + 16 * i + 16);
    a[i] = _mm512_unpacklo_ps(even, odd);
    a[i + 1] = _mm512_unpackhi_ps(even, odd);
  }
  ATOM_UNROLL for (int i = 0; i < 16; i += 4) {
    ATOM_UNROLL for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + j + 2]);
      b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  ATOM_UNROLL for (int j = 0; j < 4; ++j) {
    const __m512 low = _mm512_shuffle_f32x4(b[j], b[j + 4], 0x88);
    const __m512 high = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0x88);
    const __m512 low2 = _mm512_shuffle_f32x4(b[j], b[j + 4], 0xdd);
    const __m512 high2 = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0xdd);
    out[j] = _mm512_shuffle_f32x4(low, high, 0x88);
    out[j + 8] = _mm512_shuffle_f32x4(low, high, 0xdd);
    out[j + 4] = _mm512_shuffle_f32x4(low2, high2, 0x88);
    out[j + 12] = _mm512_shuffle_f32x4(low2, high2, 0xdd);
  }
}

// Stores the 16 by 16 products of features from `n` and rows from `m`, as far as there are such
// rows; of the features, those from `skip`.
void store(const LinearArgs& a, const float* tile, int64_t n, int64_t m, int64_t skip) {
  __m512 rows[16];
  transpose(tile, rows);
  const __mmask16 mask = skip <= 0 ? 0xffff : skip >= 16 ? 0 : uint16_t(0xffff << skip);
  float* out = static_cast<float*>(a.out) + m * a.out_features + n;
  // Whole lines go past the caches, which they would only be fetched into to be overwritten.
  const bool whole = mask == 0xffff && reinterpret_cast<uintptr_t>(out) % 64 == 0 &&
                     a.out_features % kSide == 0;
  for (int64_t i = 0; i < std::min(kSide, a.rows - m); ++i) {
    float* to = out + i * a.out_features;
    whole ? _mm512_stream_ps(to, rows[i]) : _mm512_mask_storeu_ps(to, mask, rows[i]);
  }
}

// Features n to n + 32 of all rows; the first `skip` are another panel's.
void compute_panel(const LinearArgs& a, const uint32_t* packed, int64_t groups, int64_t n,
                   int64_t skip) {
  const int64_t depths = a.in_features / kDepth, stride = a.in_features * sizeof(bfloat16);
  const auto* weight = static_cast<const bfloat16*>(a.weight) + n * a.in_features;
  for (int64_t group = 0; group < groups; group += 2) {
    const uint32_t* x = packed + group * depths * kSide * kSide;
    const uint32_t* next = x + depths * kSide * kSide;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depths; ++k) {
      _tile_loadd(4, weight + k * kDepth, stride);
      _tile_loadd(5, weight + kSide * a.in_features + k * kDepth, stride);
      _tile_loadd(6, x + k * kSide * kSide, 64);
      _tile_loadd(7, next + k * kSide * kSide, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    alignas(64) float tiles[4][kSide * kSide];
    _tile_stored(0, tiles[0], 64);
    _tile_stored(1, tiles[1], 64);
    _tile_stored(2, tiles[2], 64);
    _tile_stored(3, tiles[3], 64);
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t down = i / 2 * kSide, row = (group + i % 2) * kSide;
      if (row < a.rows) store(a, tiles[i], n + down, row, skip - down);
    }
  }
}

}  // namespace

bool prefers_tiles(const LinearArgs& a) {
  return a.rows >= kFromRows && a.out_features >= kPanel && a.in_features % kDepth == 0 &&
         is_permitted();
}

void logits_by_tiles(const LinearArgs& a) {
  static thread_local Scratch scratch;
  const int64_t groups = (a.rows + 2 * kSide - 1) / (2 * kSide) * 2;
  auto* packed = scratch.get<uint32_t>(groups * kSide * a.in_features / 2);
  pack_pairs(a, groups, packed);
  const int64_t panels = (a.out_features + kPanel - 1) / kPanel;
  run_tasks(panels, a.threads, [&](TaskQueue::Hand& hand) {
    configure_tiles();
    for (int64_t panel; hand.take(panel);) {
      // The last one begins early enough to be whole.
      const int64_t n = std::min(panel * kPanel, a.out_features - kPanel);
      compute_panel(a, packed, groups, n, panel * kPanel - n);
    }
    _mm_sfence();
    _tile_release();
  });
}

}  // namespace atom

#else

#include <cstdlib>

namespace atom {

bool prefers_tiles(const LinearArgs&) { return false; }

void logits_by_tiles(const LinearArgs&) { std::abort(); }

}  // namespace atom

#endif
