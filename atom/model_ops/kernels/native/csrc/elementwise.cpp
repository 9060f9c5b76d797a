// Normalisation, gated activation, rotation and masks: float32 inside, rounded once.
#include <algorithm>
#include <cmath>

#include "gates.h"
#include "parallel.h"

namespace atom {
namespace {

// Elements below which waking other threads costs more than it saves.
constexpr int64_t kSerialElements = 1 << 15;

int64_t threads_for(int64_t elements, int64_t threads) {
  return elements < kSerialElements ? 1 : threads;
}

struct NormArgs {
  const void* x;         // [outer, inner, size], strides outer_stride and inner_stride
  const void* residual;  // [outer * inner, size] or null
  const void* weight;    // [size]
  void* out;             // [outer * inner, size]
  void* total;           // [outer * inner, size]: x + residual in storage precision, or null
  int64_t outer, inner, outer_stride, inner_stride, size;
  double eps;
  int64_t threads;
};

template <class T>
void norm_row(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t size,
              float eps) {
  if (residual != nullptr) {
    for (int64_t i = 0; i < size; i += kLanes) {
      store_rounded_some(total + i, load_some(x + i, size - i) + load_some(residual + i, size - i),
                 size - i);
    }
    x = total;
  }
  vfloat squares[2] = {};
  for (int64_t i = 0; i < size; i += 2 * kLanes) {
    for (int64_t j = 0; j < 2 && i + j * kLanes < size; ++j) {
      const vfloat v = load_some(x + i + j * kLanes, size - i - j * kLanes);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  const float inverse = 1.0f / std::sqrt(sum(squares[0] + squares[1]) / float(size) + eps);
  for (int64_t i = 0; i < size; i += kLanes) {
    const vfloat normed = load_some(x + i, size - i) * inverse;
    store_rounded_some(out + i, normed * load_some(weight + i, size - i), size - i);
  }
}

template <class T>
int64_t rms_norm(const NormArgs& a) {
  const int64_t rows = a.outer * a.inner;
  run_shares(rows, threads_for(rows * a.size, a.threads), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* x = static_cast<const T*>(a.x) + i / a.inner * a.outer_stride +
                   i % a.inner * a.inner_stride;
      const T* residual =
          a.residual == nullptr ? nullptr : static_cast<const T*>(a.residual) + i * a.size;
      T* total = a.total == nullptr ? nullptr : static_cast<T*>(a.total) + i * a.size;
      norm_row(x, residual, static_cast<const T*>(a.weight),
               static_cast<T*>(a.out) + i * a.size, total, a.size, float(a.eps));
    }
  });
  return 0;
}

struct LayerNormArgs {
  const void* x;       // [outer, inner, size], strides outer_stride and inner_stride
  const void* weight;  // [weight_rows, size]: row i of x has that of i modulo weight_rows
  const void* bias;    // the same, or null
  void* out;           // [outer * inner, size]
  int64_t outer, inner, outer_stride, inner_stride, size, weight_rows;
  double eps;
  int64_t threads;
};

template <class T>
int64_t layer_norm(const LayerNormArgs& a) {
  const int64_t rows = a.outer * a.inner, size = a.size;
  run_shares(rows, threads_for(rows * size, a.threads), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(a.x) + row / a.inner * a.outer_stride +
                   row % a.inner * a.inner_stride;
      const T* weight = static_cast<const T*>(a.weight) + row % a.weight_rows * size;
      const T* bias =
          a.bias == nullptr ? nullptr : static_cast<const T*>(a.bias) + row % a.weight_rows * size;
      T* out = static_cast<T*>(a.out) + row * size;
      vfloat total = {};
      for (int64_t i = 0; i < size; i += kLanes) total = total + load_some(x + i, size - i);
      const float mean = sum(total) / float(size);
      vfloat squares = {};
      float rest = 0.0f;
      int64_t done = 0;
      for (; done + kLanes <= size; done += kLanes) {
        const vfloat v = load_some(x + done, kLanes) - mean;
        squares = fma(v, v, squares);
      }
      for (; done < size; ++done) {
        const float v = load_one(x + done) - mean;
        rest += v * v;
      }
      const float variance = (sum(squares) + rest) / float(size);
      const float inverse = 1.0f / std::sqrt(variance + float(a.eps));
      for (int64_t i = 0; i < size; i += kLanes) {
        const vfloat normed = (load_some(x + i, size - i) - mean) * inverse;
        vfloat scaled = normed * load_some(weight + i, size - i);
        if (bias != nullptr) scaled = scaled + load_some(bias + i, size - i);
        store_rounded_some(out + i, scaled, size - i);
      }
    }
  });
  return 0;
}

struct GateArgs {
  const void* x;  // [rows, 2 * size]: gate beside up, rows `x_stride` elements apart
  void* out;      // [rows, size]
  int64_t rows, size, x_stride, threads;
};

struct SituArgs : GateArgs {
  double beta, linear_beta;
};

struct Silu {
  static ATOM_INLINE vfloat of(const GateArgs&, vfloat x, vfloat up) {
    return x / (exp(-x) + 1.0f) * up;
  }
};

// The approximation by tanh: x (1 + tanh(u)) / 2 = x / (1 + exp(-2u)).
struct Gelu {
  static ATOM_INLINE vfloat of(const GateArgs&, vfloat x, vfloat up) {
    constexpr float twice = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    const vfloat u = x * (x * x * 0.044715f + 1.0f) * twice;
    return x / (exp(-u) + 1.0f) * up;
  }
};

struct Situ {
  static ATOM_INLINE vfloat of(const SituArgs& a, vfloat x, vfloat up) {
    return situ_gate(x, up, float(a.beta), float(a.linear_beta));
  }
};

template <class T, class Gate, class Args>
int64_t gate_and_mul(const Args& a) {
  // One row may be all there is, so rows are cut into columns as well.
  constexpr int64_t columns = 512;
  const int64_t pieces = (a.size + columns - 1) / columns;
  const int64_t threads = threads_for(a.rows * a.size, a.threads);
  run_shares(a.rows * pieces, threads, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row = piece / pieces, first = piece % pieces * columns;
      const T* gate = static_cast<const T*>(a.x) + row * a.x_stride;
      T* out = static_cast<T*>(a.out) + row * a.size;
      const int64_t stop = std::min(first + columns, a.size);
      for (int64_t i = first; i < stop; i += kLanes) {
        const vfloat g = load_some(gate + i, stop - i);
        const vfloat up = load_some(gate + a.size + i, stop - i);
        store_rounded_some(out + i, Gate::of(a, g, up), stop - i);
      }
    }
  });
  return 0;
}

struct MixArgs {
  const void* closed;   // [num_closed, rows, size]
  const void* running;  // [rows, size]
  const void* norm;     // [size]
  const void* proj;     // [size]
  void* out;            // [rows, size]
  int64_t num_closed, rows, size;
  double eps;
  int64_t threads;
};

// Most that a model has: see the caller.
constexpr int64_t kMostSources = 64;

template <class T>
int64_t mix_residuals(const MixArgs& a) {
  const int64_t sources = a.num_closed + 1, size = a.size;
  if (sources > kMostSources) return 1;
  const int64_t threads = threads_for(a.rows * size * sources, a.threads);
  run_shares(a.rows, threads, [&](int64_t begin, int64_t end) {
    const T *norm = static_cast<const T*>(a.norm), *proj = static_cast<const T*>(a.proj);
    for (int64_t row = begin; row < end; ++row) {
      const T* source[kMostSources];
      float share[kMostSources], largest = 0;
      for (int64_t s = 0; s < sources; ++s) {
        source[s] = s < a.num_closed ? static_cast<const T*>(a.closed) + (s * a.rows + row) * size
                                     : static_cast<const T*>(a.running) + row * size;
        vfloat squares{}, products{};
        for (int64_t i = 0; i < size; i += kLanes) {
          const vfloat v = load_some(source[s] + i, size - i);
          squares = fma(v, v, squares);
          const vfloat weight = load_some(norm + i, size - i) * load_some(proj + i, size - i);
          products = fma(v, weight, products);
        }
        share[s] = sum(products) / std::sqrt(sum(squares) / float(size) + float(a.eps));
        largest = s == 0 ? share[s] : std::max(largest, share[s]);
      }
      float total = 0;
      for (int64_t s = 0; s < sources; ++s) total += share[s] = std::exp(share[s] - largest);
      T* const out = static_cast<T*>(a.out) + row * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        vfloat mixed{};
        for (int64_t s = 0; s < sources; ++s) {
          mixed = fma(load_some(source[s] + i, size - i), splat(share[s] / total), mixed);
        }
        store_rounded_some(out + i, mixed, size - i);
      }
    }
  });
  return 0;
}

struct AddArgs {
  void* x;  // [count], the sum afterwards
  const void* y;
  int64_t count, threads;
};

template <class T>
int64_t add(const AddArgs& a) {
  run_shares(a.count, threads_for(a.count, a.threads), [&](int64_t begin, int64_t end) {
    T* x = static_cast<T*>(a.x);
    const T* y = static_cast<const T*>(a.y);
    for (int64_t i = begin; i < end; i += kLanes) {
      store_some(x + i, load_some(x + i, end - i) + load_some(y + i, end - i), end - i);
    }
  });
  return 0;
}

struct ScaleArgs {
  void* x;  // [count], the products afterwards
  int64_t count;
  double factor;
  int64_t threads;
};

template <class T>
int64_t scale(const ScaleArgs& a) {
  const float factor = float(a.factor);
  run_shares(a.count, threads_for(a.count, a.threads), [&](int64_t begin, int64_t end) {
    T* x = static_cast<T*>(a.x);
    for (int64_t i = begin; i < end; i += kLanes) {
      store_rounded_some(x + i, load_some(x + i, end - i) * factor, end - i);
    }
  });
  return 0;
}

template <class T>
int64_t softcap(const ScaleArgs& a) {
  const float cap = float(a.factor);
  run_shares(a.count, threads_for(a.count, a.threads), [&](int64_t begin, int64_t end) {
    T* x = static_cast<T*>(a.x);
    for (int64_t i = begin; i < end; i += kLanes) {
      store_rounded_some(x + i, tanh(load_some(x + i, end - i) / cap) * cap, end - i);
    }
  });
  return 0;
}

struct GatedRowsArgs {
  void* x;           // [rows, size], the products afterwards
  const void* gate;  // [rows, gates]
  int64_t rows, size, gates, threads;  // gates: size, or 1 for a whole row
};

template <class T>
int64_t mul_sigmoid(const GatedRowsArgs& a) {
  const int64_t threads = threads_for(a.rows * a.size, a.threads);
  run_shares(a.rows, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* x = static_cast<T*>(a.x) + row * a.size;
      const T* gate = static_cast<const T*>(a.gate) + row * a.gates;
      if (a.gates == 1) {
        const float factor = 1.0f / (1.0f + std::exp(-load_one(gate)));
        for (int64_t i = 0; i < a.size; i += kLanes) {
          store_rounded_some(x + i, load_some(x + i, a.size - i) * factor, a.size - i);
        }
      } else {
        for (int64_t i = 0; i < a.size; i += kLanes) {
          const vfloat factor = 1.0f / (exp(-load_some(gate + i, a.size - i)) + 1.0f);
          store_rounded_some(x + i, load_some(x + i, a.size - i) * factor, a.size - i);
        }
      }
    }
  });
  return 0;
}

struct PlacedRowsArgs {
  void* x;                   // [rows, size], rows `stride` elements apart; the products afterwards
  const int64_t* positions;  // [rows]
  const float* factors;      // [count]
  int64_t rows, size, stride, count, threads;
};

// 0, or 1 + the row whose position has no factor.
template <class T>
int64_t scale_by_position(const PlacedRowsArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    if (a.positions[row] < 0 || a.positions[row] >= a.count) return row + 1;
  }
  const int64_t threads = threads_for(a.rows * a.size, a.threads);
  run_shares(a.rows, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* x = static_cast<T*>(a.x) + row * a.stride;
      const float factor = a.factors[a.positions[row]];
      for (int64_t i = 0; i < a.size; i += kLanes) {
        store_rounded_some(x + i, load_some(x + i, a.size - i) * factor, a.size - i);
      }
    }
  });
  return 0;
}

struct RopeArgs {
  const int64_t* positions;  // [rows]
  const float* cos_sin;      // [table_rows, rotary_dim]: cosines, then sines
  const void* q;             // [rows, q_heads, head_dim], with these strides in elements
  const void* k;
  void* q_out;  // contiguous
  void* k_out;
  int64_t rows, q_heads, k_heads, head_dim, rotary_dim, table_rows;
  int64_t q_stride, q_head_stride, k_stride, k_head_stride;
  int64_t interleaved;  // pairs are neighbours in the input
  int64_t threads;
};

// Neighbouring pairs -> the first of each, and the second.
template <class T>
ATOM_INLINE void load_pairs(const T* x, int64_t count, vfloat& first, vfloat& second) {
  float a[kLanes] = {}, b[kLanes] = {};
  for (int64_t i = 0; i < std::min<int64_t>(count, kLanes); ++i) {
    a[i] = load_one(x + 2 * i);
    b[i] = load_one(x + 2 * i + 1);
  }
  first = load(a);
  second = load(b);
}

template <class T>
void rotate_head(const T* x, const float* table, T* out, int64_t head_dim, int64_t rotary_dim,
                 bool interleaved) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    const vfloat cos = load_some(table + i, count), sin = load_some(table + half + i, count);
    vfloat a, b;
    if (interleaved) {
      load_pairs(x + 2 * i, count, a, b);
    } else {
      a = load_some(x + i, count);
      b = load_some(x + half + i, count);
    }
    store_rounded_some(out + i, fma(a, cos, -(b * sin)), count);
    store_rounded_some(out + half + i, fma(b, cos, a * sin), count);
  }
  std::memcpy(out + rotary_dim, x + rotary_dim, (head_dim - rotary_dim) * sizeof(T));
}

// 0, or 1 + the row whose position lies outside the table.
template <class T>
int64_t rope(const RopeArgs& a) {
  for (int64_t t = 0; t < a.rows; ++t) {
    if (a.positions[t] < 0 || a.positions[t] >= a.table_rows) return t + 1;
  }
  const int64_t heads = a.q_heads + a.k_heads;
  const int64_t threads = threads_for(a.rows * heads * a.head_dim, a.threads);
  run_shares(a.rows, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* table = a.cos_sin + a.positions[t] * a.rotary_dim;
      const auto rotate = [&](const void* x, int64_t heads, int64_t stride, int64_t head_stride,
                              void* out) {
        for (int64_t h = 0; h < heads; ++h) {
          rotate_head(static_cast<const T*>(x) + t * stride + h * head_stride, table,
                      static_cast<T*>(out) + (t * heads + h) * a.head_dim, a.head_dim,
                      a.rotary_dim, a.interleaved != 0);
        }
      };
      rotate(a.q, a.q_heads, a.q_stride, a.q_head_stride, a.q_out);
      rotate(a.k, a.k_heads, a.k_stride, a.k_head_stride, a.k_out);
    }
  });
  return 0;
}

struct MaskArgs {
  uint32_t* scores;       // [num_rows, vocab_size]: bits of float32, changed in place
  const uint32_t* words;  // [count, ceil(vocab_size / 32)]: a bit allows a token
  const int64_t* rows;    // [count] different rows of the scores, or null: all of them
  int64_t count, num_rows, vocab_size, threads;
};

// The tokens of one word, without a branch: masks are as likely to be noise as to be runs.
ATOM_INLINE void mask_word(uint32_t* scores, uint32_t word, int64_t count) {
  constexpr uint32_t negative_infinity = 0xff800000u;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t keep = -((word >> i) & 1u);
    scores[i] = (scores[i] & keep) | (negative_infinity & ~keep);
  }
}

// 0, or 1 + the entry whose row lies outside the scores.
int64_t mask_tokens(const MaskArgs& a) {
  for (int64_t g = 0; a.rows != nullptr && g < a.count; ++g) {
    if (a.rows[g] < 0 || a.rows[g] >= a.num_rows) return g + 1;
  }
  const int64_t whole = a.vocab_size / 32, rest = a.vocab_size % 32;
  const int64_t stride = whole + (rest != 0);
  const int64_t threads = threads_for(a.count * a.vocab_size, a.threads);
  run_shares(a.count, threads, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      uint32_t* scores = a.scores + (a.rows == nullptr ? g : a.rows[g]) * a.vocab_size;
      const uint32_t* words = a.words + g * stride;
      for (int64_t w = 0; w < whole; ++w) mask_word(scores + w * 32, words[w], 32);
      mask_word(scores + whole * 32, rest == 0 ? 0u : words[whole], rest);
    }
  });
  return 0;
}

}  // namespace
}  // namespace atom

#define ATOM_DEFINE(type, name)                                               \
  ATOM_EXPORT int64_t atom_rms_norm_##name(const atom::NormArgs* args) {      \
    return atom::rms_norm<type>(*args);                                       \
  }                                                                           \
  ATOM_EXPORT int64_t atom_layer_norm_##name(const atom::LayerNormArgs* args) { \
    return atom::layer_norm<type>(*args);                                     \
  }                                                                           \
  ATOM_EXPORT int64_t atom_silu_and_mul_##name(const atom::GateArgs* args) {  \
    return atom::gate_and_mul<type, atom::Silu>(*args);                       \
  }                                                                           \
  ATOM_EXPORT int64_t atom_gelu_and_mul_##name(const atom::GateArgs* args) {  \
    return atom::gate_and_mul<type, atom::Gelu>(*args);                       \
  }                                                                           \
  ATOM_EXPORT int64_t atom_situ_and_mul_##name(const atom::SituArgs* args) {  \
    return atom::gate_and_mul<type, atom::Situ>(*args);                       \
  }                                                                           \
  ATOM_EXPORT int64_t atom_mix_residuals_##name(const atom::MixArgs* args) {  \
    return atom::mix_residuals<type>(*args);                                  \
  }                                                                           \
  ATOM_EXPORT int64_t atom_scale_##name(const atom::ScaleArgs* args) {        \
    return atom::scale<type>(*args);                                          \
  }                                                                           \
  ATOM_EXPORT int64_t atom_softcap_##name(const atom::ScaleArgs* args) {      \
    return atom::softcap<type>(*args);                                        \
  }                                                                           \
  ATOM_EXPORT int64_t atom_mul_sigmoid_##name(const atom::GatedRowsArgs* args) { \
    return atom::mul_sigmoid<type>(*args);                                    \
  }                                                                           \
  ATOM_EXPORT int64_t atom_scale_by_position_##name(const atom::PlacedRowsArgs* args) { \
    return atom::scale_by_position<type>(*args);                              \
  }                                                                           \
  ATOM_EXPORT int64_t atom_add_##name(const atom::AddArgs* args) {            \
    return atom::add<type>(*args);                                            \
  }                                                                           \
  ATOM_EXPORT int64_t atom_rope_##name(const atom::RopeArgs* args) {          \
    return atom::rope<type>(*args);                                           \
  }

ATOM_DEFINE(float, float32)
ATOM_DEFINE(atom::bfloat16, bfloat16)
#if defined(__F16C__) || defined(__aarch64__)
ATOM_DEFINE(atom::float16, float16)
#endif

ATOM_EXPORT int64_t atom_mask_tokens(const atom::MaskArgs* args) {
  return atom::mask_tokens(*args);
}
