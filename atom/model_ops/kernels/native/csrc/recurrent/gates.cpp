// What lies around the delta rule: its decays and betas, and the norm with a gate behind it.
#include <cmath>

#include "parallel.h"
#include "simd.h"

namespace atom {
namespace {

// Elements below which waking other threads costs more than it saves.
constexpr int64_t kSerialElements = 1 << 13;

ATOM_INLINE vfloat sigmoid(vfloat x) { return 1.0f / (exp(-x) + 1.0f); }

// log(1 + y) of y from 0 to 1: 2 atanh(z) with z = y / (2 + y), at most 1/3.
ATOM_INLINE vfloat log1p(vfloat y) {
  const vfloat z = y / (y + 2.0f), square = z * z;
  vfloat p = splat(1.0f / 15.0f);
  p = fma(p, square, splat(1.0f / 13.0f));
  p = fma(p, square, splat(1.0f / 11.0f));
  p = fma(p, square, splat(1.0f / 9.0f));
  p = fma(p, square, splat(1.0f / 7.0f));
  p = fma(p, square, splat(1.0f / 5.0f));
  p = fma(p, square, splat(1.0f / 3.0f));
  p = fma(p, square, splat(1.0f));
  return z * 2.0f * p;
}

ATOM_INLINE vfloat softplus(vfloat x) {
  return log1p(exp(-max(x, -x))) + max(vfloat{}, x);
}

struct GateArgs {
  const void* decay;     // [rows, heads, decays], rows decay_stride elements apart
  const void* beta;      // [rows, heads], rows beta_stride elements apart
  const float* a_log;    // [heads]
  const float* dt_bias;  // [heads, decays]
  float* log_decay;      // [rows, heads, decays]
  float* betas;          // [rows, heads]
  int64_t rows, heads, decays, decay_stride, beta_stride;
  int64_t bounded;  // lower_bound sigmoid(rate x) instead of -rate softplus(x)
  int64_t threads;
  double lower_bound;
};

template <class T>
void gate_row(const GateArgs& a, int64_t row) {
  const float bound = float(a.lower_bound);
  const T* const decay = static_cast<const T*>(a.decay) + row * a.decay_stride;
  const T* const beta = static_cast<const T*>(a.beta) + row * a.beta_stride;
  float* const log_decay = a.log_decay + row * a.heads * a.decays;
  const auto write = [&](vfloat rates, int64_t i, int64_t count) {
    const vfloat x = load_some(decay + i, count) + load_some(a.dt_bias + i, count);
    const vfloat out = a.bounded != 0 ? sigmoid(rates * x) * bound : -rates * softplus(x);
    store_some(log_decay + i, out, count);
  };
  for (int64_t h = 0; h < a.heads; h += kLanes) {
    const int64_t count = a.heads - h;
    const vfloat rates = exp(load_some(a.a_log + h, count));
    if (a.decays == 1) {
      write(rates, h, count);
    } else {
      for (int64_t j = 0; j < kLanes && j < count; ++j) {
        for (int64_t i = 0; i < a.decays; i += kLanes) {
          write(splat(rates[j]), (h + j) * a.decays + i, a.decays - i);
        }
      }
    }
    store_some(a.betas + row * a.heads + h, sigmoid(load_some(beta + h, count)), count);
  }
}

template <class T>
int64_t delta_gates(const GateArgs& a) {
  const bool is_small = a.rows * a.heads * a.decays < kSerialElements;
  run_shares(a.rows, is_small ? 1 : a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) gate_row<T>(a, row);
  });
  return 0;
}

struct GatedNormArgs {
  const void* x;       // [rows, heads, size], with these strides in elements
  const void* gate;    // so is the gate
  const void* weight;  // [size]
  void* out;           // [rows, heads, size]
  int64_t rows, heads, size, x_stride, x_head_stride, gate_stride, gate_head_stride;
  int64_t silu;  // of the gate, instead of its sigmoid
  int64_t threads;
  double eps;
};

template <class T>
void gated_norm_row(const T* x, const T* gate, const T* weight, T* out, int64_t size, float eps,
                    bool silu) {
  vfloat squares[2] = {};
  for (int64_t i = 0; i < size; i += 2 * kLanes) {
    for (int64_t j = 0; j < 2 && i + j * kLanes < size; ++j) {
      const vfloat v = load_some(x + i + j * kLanes, size - i - j * kLanes);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  const float inverse = 1.0f / std::sqrt(sum(squares[0] + squares[1]) / float(size) + eps);
  for (int64_t i = 0; i < size; i += kLanes) {
    const vfloat g = load_some(gate + i, size - i);
    const vfloat normed = load_some(x + i, size - i) * inverse * load_some(weight + i, size - i);
    store_rounded_some(out + i, normed * (silu ? g * sigmoid(g) : sigmoid(g)), size - i);
  }
}

template <class T>
int64_t gated_rms_norm(const GatedNormArgs& a) {
  const int64_t count = a.rows * a.heads;
  const bool is_small = count * a.size < kSerialElements;
  run_shares(count, is_small ? 1 : a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / a.heads, head = i % a.heads;
      gated_norm_row(static_cast<const T*>(a.x) + row * a.x_stride + head * a.x_head_stride,
                     static_cast<const T*>(a.gate) + row * a.gate_stride + head * a.gate_head_stride,
                     static_cast<const T*>(a.weight), static_cast<T*>(a.out) + i * a.size, a.size,
                     float(a.eps), a.silu != 0);
    }
  });
  return 0;
}

}  // namespace
}  // namespace atom

#define ATOM_DEFINE(type, name)                                                      \
  ATOM_EXPORT int64_t atom_delta_gates_##name(const atom::GateArgs* args) {          \
    return atom::delta_gates<type>(*args);                                           \
  }                                                                                  \
  ATOM_EXPORT int64_t atom_gated_rms_norm_##name(const atom::GatedNormArgs* args) {  \
    return atom::gated_rms_norm<type>(*args);                                        \
  }

ATOM_DEFINE(float, float32)
ATOM_DEFINE(atom::bfloat16, bfloat16)
#if defined(__F16C__) || defined(__aarch64__)
ATOM_DEFINE(atom::float16, float16)
#endif
