// The short causal convolution of each channel, over tokens of this step and raw inputs that a
// ring keeps of earlier ones. A task is some channels of one sequence.
#include <algorithm>

#include "arena.h"
#include "recurrent/sequences.h"
#include "simd.h"

namespace atom {
namespace {

// Channels of a task.
constexpr int64_t kColumns = 256;
// Products below which waking other threads costs more than it saves.
constexpr int64_t kSerialProducts = 1 << 15;

struct ConvArgs {
  const void* x;       // [tokens, channels], rows x_stride elements apart
  const void* weight;  // [channels, taps], with these strides in elements
  void* ring;          // [pool_rows, ring_len, channels]: position p at p % ring_len
  void* out;           // [tokens, channels]
  Sequences sequences;
  int64_t channels, taps, ring_len, x_stride, channel_stride, tap_stride, threads;
};

template <class T>
void convolve(const ConvArgs& a, const Span& span, int64_t first, int64_t columns) {
  static thread_local Scratch scratch;
  struct Memory {
    float* weights;  // [taps, kColumns]
    const T** rows;  // [taps]: what each is multiplied with, or null for zeros
  };
  const Memory m = carve(scratch, [&](Arena& arena) {
    return Memory{arena.take<float>(a.taps * kColumns), arena.take<const T*>(a.taps)};
  });
  for (int64_t tap = 0; tap < a.taps; ++tap) {
    const T* const w = static_cast<const T*>(a.weight) + first * a.channel_stride + tap * a.tap_stride;
    float* const to = m.weights + tap * kColumns;
    if (a.channel_stride == 1) {
      for (int64_t i = 0; i < columns; i += kLanes) store(to + i, load_some(w + i, columns - i));
    } else {
      for (int64_t i = 0; i < columns; ++i) to[i] = load_one(w + i * a.channel_stride);
    }
  }
  T* const ring = static_cast<T*>(a.ring) + span.row * a.ring_len * a.channels + first;
  const T* const x = static_cast<const T*>(a.x) + span.begin * a.x_stride + first;
  for (int64_t t = 0; t < span.end - span.begin; ++t) {
    for (int64_t tap = 0; tap < a.taps; ++tap) {
      const int64_t at = t - (a.taps - 1) + tap, position = span.start + at;
      m.rows[tap] = at >= 0         ? x + at * a.x_stride
                    : position >= 0 ? ring + position % a.ring_len * a.channels
                                    : nullptr;
    }
    T* const out = static_cast<T*>(a.out) + (span.begin + t) * a.channels + first;
    for (int64_t i = 0; i < columns; i += kLanes) {
      vfloat sums = {};
      for (int64_t tap = 0; tap < a.taps; ++tap) {
        if (m.rows[tap] == nullptr) continue;
        sums = fma(load(m.weights + tap * kColumns + i), load_some(m.rows[tap] + i, columns - i),
                   sums);
      }
      store_rounded_some(out + i, sums / (exp(-sums) + 1.0f), columns - i);
    }
  }
  for (int64_t t = std::max<int64_t>(0, span.count - a.ring_len); t < span.count; ++t) {
    std::memcpy(ring + (span.start + t) % a.ring_len * a.channels, x + t * a.x_stride,
                columns * sizeof(T));
  }
}

// 0, or 1 + the sequence whose numbers cannot be.
template <class T>
int64_t causal_conv(const ConvArgs& a) {
  const Sequences& all = a.sequences;
  if (const int64_t wrong = wrong_sequence(all)) return wrong;
  const int64_t computed = all.count == 0 ? 0 : all.starts[all.count];
  const int64_t pieces = (a.channels + kColumns - 1) / kColumns;
  const bool is_small = computed * a.channels * a.taps < kSerialProducts;
  run_shares(all.count * pieces, is_small ? 1 : a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % pieces * kColumns;
      convolve<T>(a, Span(all, i / pieces), first, std::min(kColumns, a.channels - first));
    }
  });
  T* const out = static_cast<T*>(a.out);
  std::fill(out + computed * a.channels, out + all.tokens * a.channels, T{});
  return 0;
}

}  // namespace
}  // namespace atom

#define ATOM_DEFINE(type, name)                                              \
  ATOM_EXPORT int64_t atom_causal_conv_##name(const atom::ConvArgs* args) {  \
    return atom::causal_conv<type>(*args);                                   \
  }

ATOM_DEFINE(float, float32)
ATOM_DEFINE(atom::bfloat16, bfloat16)
#if defined(__F16C__) || defined(__aarch64__)
ATOM_DEFINE(atom::float16, float16)
#endif
