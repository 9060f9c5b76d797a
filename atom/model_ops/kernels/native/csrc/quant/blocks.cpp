// Codes of GGUF's blocks in the order of their inputs. Source of the layouts: ggml's
// `ggml-common.h` and `ggml-quants.c`.
#include <utility>

#include "parallel.h"
#include "simd.h"

namespace atom {
namespace {

constexpr int kMostCodes = 256;
constexpr uint64_t kOnes = 0x0101010101010101;

struct QuantBlocksArgs {
  const uint8_t* blocks;  // [count, block_bytes]
  const uint8_t* table;   // what 16 codes stand for, or null
  uint8_t* out;           // [count, bytes of the part]
  int64_t count, block_bytes, layout, part;
};

// In the order of `_LAYOUTS` in native/quant/blocks.py.
enum Layout { kQ4_0, kQ4_1, kQ4_K, kQ5_0, kQ5_1, kQ5_K, kQ6_K, kQ2_K, kQ3_K, kIQ4_XS, kMXFP4, kLayouts };
// In the order of `_PARTS` there.
enum Part { kLowFour, kHighTwo, kWhole };

// Compilers make no vectors of loops as short as those over a block of 32.
typedef uint8_t bytes16 __attribute__((vector_size(16)));

// Of runs of `kRun` bytes: all low four bits, then all high ones.
template <int kRun>
ATOM_INLINE void nibbles(const uint8_t* from, int64_t runs, uint8_t* codes) {
  for (int64_t run = 0; run < runs; ++run, from += kRun, codes += 2 * kRun) {
    for (int i = 0; i < kRun; i += 16) {
      const bytes16 packed = raw<bytes16>(from + i), low = packed & 15, high = packed >> 4;
      std::memcpy(codes + i, &low, 16);
      std::memcpy(codes + kRun + i, &high, 16);
    }
  }
}

// Bit n of byte i is bit `kAt` of code 32 n + i.
template <int kAt>
ATOM_INLINE void add_bits(const uint8_t* from, uint8_t* codes) {
  for (int n = 0; n < 8; ++n) {
    for (int i = 0; i < 32; ++i) codes[32 * n + i] |= (from[i] >> n & 1) << kAt;
  }
}

// Two bits of each of 128 codes, at bit `kAt`: each 32 have the same bits of 32 bytes.
template <int kAt>
ATOM_INLINE void add_crumbs(const uint8_t* from, uint8_t* codes) {
  for (int n = 0; n < 4; ++n) {
    for (int i = 0; i < 32; ++i) codes[32 * n + i] |= (from[i] >> (2 * n) & 3) << kAt;
  }
}

// 32 codes of five bits: the fifth ones in four bytes, the others behind these; plus `zero`.
ATOM_INLINE void fives(const uint8_t* from, uint8_t zero, uint8_t* codes) {
  constexpr bytes16 kBits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const bytes16 packed = raw<bytes16>(from + 4);
  for (int half = 0; half < 2; ++half, from += 2) {
    const uint64_t pair[] = {from[0] * kOnes, from[1] * kOnes};
    const bytes16 fifth = bytes16((raw<bytes16>(pair) & kBits) != 0) & 16;
    const bytes16 all = ((half ? packed >> 4 : packed & 15) | fifth) + zero;
    std::memcpy(codes + 16 * half, &all, 16);
  }
}

template <int kLayout>
constexpr int kCodes = kLayout == kQ4_0 || kLayout == kQ4_1 || kLayout == kQ5_0 ||
                               kLayout == kQ5_1 || kLayout == kMXFP4
                           ? 32
                           : 256;

template <int kLayout>
ATOM_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
  if constexpr (kLayout == kQ4_0) nibbles<16>(block + 2, 1, codes);
  if constexpr (kLayout == kQ4_1) nibbles<16>(block + 4, 1, codes);
  if constexpr (kLayout == kMXFP4) nibbles<16>(block + 1, 1, codes);
  if constexpr (kLayout == kIQ4_XS) nibbles<16>(block + 8, 8, codes);
  if constexpr (kLayout == kQ4_K) nibbles<32>(block + 16, 4, codes);
  if constexpr (kLayout == kQ5_0) fives(block + 2, 16, codes);
  if constexpr (kLayout == kQ5_1) fives(block + 4, 0, codes);
  if constexpr (kLayout == kQ5_K) {
    nibbles<32>(block + 48, 4, codes);
    add_bits<4>(block + 16, codes);
  }
  if constexpr (kLayout == kQ6_K) {
    nibbles<64>(block, 2, codes);
    add_crumbs<4>(block + 128, codes);
    add_crumbs<4>(block + 160, codes + 128);
  }
  if constexpr (kLayout == kQ2_K || kLayout == kQ3_K) {
    constexpr int kAt = kLayout == kQ2_K ? 16 : 32;
    std::memset(codes, 0, 256);
    add_crumbs<0>(block + kAt, codes);
    add_crumbs<0>(block + kAt + 32, codes + 128);
  }
  if constexpr (kLayout == kQ3_K) {
    add_bits<2>(block, codes);
    for (int i = 0; i < 256; ++i) codes[i] += 28;  // 32 stands for zero, the third bit for 4
  }
}

template <int kPart>
constexpr int kPerByte = kPart == kLowFour ? 2 : kPart == kHighTwo ? 4 : 1;

template <int kPart>
ATOM_INLINE void write(const uint8_t* codes, uint8_t* out) {
  for (int i = 0; i < kMostCodes / kPerByte<kPart>; ++i) {
    const uint8_t* c = codes + i * kPerByte<kPart>;
    if constexpr (kPart == kLowFour) out[i] = (c[0] & 15) | (c[1] & 15) << 4;
    if constexpr (kPart == kHighTwo) {
      out[i] = c[0] >> 4 | (c[1] >> 4) << 2 | (c[2] >> 4) << 4 | (c[3] >> 4) << 6;
    }
    if constexpr (kPart == kWhole) out[i] = c[0];
  }
}

// So many blocks at a time as have `kMostCodes`.
template <int kLayout, int kPart>
void read_blocks(const QuantBlocksArgs& a) {
  constexpr int kBlocks = kMostCodes / kCodes<kLayout>, kBytes = kMostCodes / kPerByte<kPart>;
  uint8_t codes[kMostCodes] = {}, table[16], last[kBytes];
  if (a.table != nullptr) std::memcpy(table, a.table, 16);
  const uint8_t *from = a.blocks, *const end = from + a.count * a.block_bytes;
  for (uint8_t* out = a.out; from < end; out += kBytes) {
    int number = 0;
    for (; number < kBlocks && from < end; ++number, from += a.block_bytes) {
      unpack<kLayout>(from, codes + number * kCodes<kLayout>);
    }
    if (a.table != nullptr) {
      for (uint8_t& code : codes) code = table[code & 15];
    }
    if (number == kBlocks) {
      write<kPart>(codes, out);
    } else {
      write<kPart>(codes, last);
      std::memcpy(out, last, kBytes / kBlocks * number);
    }
  }
}

template <int kLayout>
void read_part(const QuantBlocksArgs& a) {
  if (a.layout != kLayout) return;
  if (a.part == kLowFour) read_blocks<kLayout, kLowFour>(a);
  if (a.part == kHighTwo) read_blocks<kLayout, kHighTwo>(a);
  if (a.part == kWhole) read_blocks<kLayout, kWhole>(a);
}

template <int... kLayouts>
void read_any(const QuantBlocksArgs& a, std::integer_sequence<int, kLayouts...>) {
  (read_part<kLayouts>(a), ...);
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_quant_blocks(const atom::QuantBlocksArgs* args) {
  atom::read_any(*args, std::make_integer_sequence<int, atom::kLayouts>());
  return 0;
}
