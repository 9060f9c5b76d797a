// The gated delta rule, token by token. A task is some columns of one head's state: what a column
// becomes depends on no other, so bits depend neither on the tasks nor on how a sequence is cut.
//
// A token reads its state twice and writes it once:
//   u = beta (v - sum_r S[r] d[r] k[r]);  S[r] = S[r] d[r] + k[r] u;  out = sum_r S[r] q[r]
// States of tokens that are kept are written where the next token reads them; others are in scratch.
// Both have the pool's type, so a state is rounded to it behind every token, kept or not.
#include <algorithm>
#include <cmath>

#include "ahead.h"
#include "arena.h"
#include "recurrent/sequences.h"
#include "simd.h"

namespace atom {
namespace {

constexpr int kTileVectors = 4;
constexpr int64_t kTileColumns = kTileVectors * kLanes;
// Tokens that pass a tile before the next tile is read.
constexpr int64_t kChunk = 16;
// Numbers of states below which waking other threads costs more than it saves.
constexpr int64_t kSerialNumbers = 1 << 14;

struct DeltaArgs {
  const void* q;           // [tokens, key_heads, key], rows q_stride elements apart
  const void* k;           // so is k
  const void* v;           // [tokens, heads, value], rows v_stride elements apart
  const float* log_decay;  // [tokens, heads, decays]
  const float* beta;       // [tokens, heads]
  void* states;            // [pool_rows, versions, heads, key, value]
  void* out;               // [tokens, heads, value]
  Sequences sequences;     // four pointers, then three numbers
  int64_t key_heads, heads, key, value, decays, versions;
  int64_t q_stride, k_stride, v_stride;
  int64_t half_states;  // whether states are bfloat16, not float32
  int64_t threads;
  double norm_eps;
};

int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// What one token has for all columns, in float32: [padded key] each.
struct Token {
  float *q, *k, *decay, *decayed_k;
  float beta;
};

template <class T>
void norm(const T* x, int64_t count, float eps, float scale, float* out) {
  vfloat squares[2] = {};
  for (int64_t i = 0; i < count; i += 2 * kLanes) {
    for (int64_t j = 0; j < 2 && i + j * kLanes < count; ++j) {
      const vfloat v = load_some(x + i + j * kLanes, count - i - j * kLanes);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  const float factor = scale / std::sqrt(sum(squares[0] + squares[1]) + eps);
  for (int64_t i = 0; i < count; i += kLanes) store(out + i, load_some(x + i, count - i) * factor);
}

template <class T>
void prepare(const DeltaArgs& a, int64_t row, int64_t head, Token& token) {
  const int64_t key_head = head / (a.heads / a.key_heads), at = row * a.heads + head;
  const float scale = 1.0f / std::sqrt(float(a.key)), eps = float(a.norm_eps);
  norm(static_cast<const T*>(a.q) + row * a.q_stride + key_head * a.key, a.key, eps, scale, token.q);
  norm(static_cast<const T*>(a.k) + row * a.k_stride + key_head * a.key, a.key, eps, 1.0f, token.k);
  const float* const log_decay = a.log_decay + at * a.decays;
  for (int64_t i = 0; i < a.key; i += kLanes) {
    const vfloat decay =
        exp(a.decays == 1 ? splat(*log_decay) : load_some(log_decay + i, a.key - i));
    store(token.decay + i, decay);
    store(token.decayed_k + i, decay * load(token.k + i));
  }
  token.beta = a.beta[at];
}

// One token's pass over `columns` of a state, N vectors of which the last may not be whole.
// from, to: [key] rows so many numbers apart; v, out: [N * kLanes]. `ahead` fetches `key` times.
template <int N, bool Whole, class S>
void pass(const Token& token, int64_t key, const S* from, int64_t from_stride, S* to,
          int64_t to_stride, int64_t columns, const float* v, float* out, Ahead ahead) {
  const int64_t last = columns - (N - 1) * kLanes;
  const auto read = [&](const S* row, int j) {
    return Whole || j < N - 1 ? load(row + j * kLanes) : load_some(row + j * kLanes, last);
  };
  // Even rows and odd ones, so that sums do not wait for each other.
  vfloat even[N] = {}, odd[N] = {};
  int64_t r = 0;
  for (; r + 1 < key; r += 2) {
    ahead.fetch();
    const vfloat first = splat(token.decayed_k[r]), second = splat(token.decayed_k[r + 1]);
    ATOM_UNROLL for (int j = 0; j < N; ++j) {
      even[j] = fma(first, read(from + r * from_stride, j), even[j]);
      odd[j] = fma(second, read(from + (r + 1) * from_stride, j), odd[j]);
    }
  }
  if (r < key) {
    const vfloat first = splat(token.decayed_k[r]);
    ATOM_UNROLL for (int j = 0; j < N; ++j) {
      even[j] = fma(first, read(from + r * from_stride, j), even[j]);
    }
  }
  vfloat error[N], sums[N] = {};
  ATOM_UNROLL for (int j = 0; j < N; ++j) {
    error[j] = (load(v + j * kLanes) - (even[j] + odd[j])) * token.beta;
  }
  for (r = 0; r < key; ++r) {
    if (r % 2 == 0) ahead.fetch();
    const vfloat decay = splat(token.decay[r]), k = splat(token.k[r]), q = splat(token.q[r]);
    ATOM_UNROLL for (int j = 0; j < N; ++j) {
      const vfloat s = fma(k, error[j], read(from + r * from_stride, j) * decay);
      sums[j] = fma(q, s, sums[j]);
      S* const at = to + r * to_stride + j * kLanes;
      if (Whole || j < N - 1) store_rounded(at, s); else store_rounded_some(at, s, last);
    }
  }
  ATOM_UNROLL for (int j = 0; j < N; ++j) store(out + j * kLanes, sums[j]);
}

template <class S>
using Pass = void (*)(const Token&, int64_t, const S*, int64_t, S*, int64_t, int64_t, const float*,
                      float*, Ahead);

template <class S>
Pass<S> pass_of(int64_t columns) {
  static_assert(kTileVectors == 4);
  static constexpr Pass<S> passes[4][2] = {{pass<1, false, S>, pass<1, true, S>},
                                           {pass<2, false, S>, pass<2, true, S>},
                                           {pass<3, false, S>, pass<3, true, S>},
                                           {pass<4, false, S>, pass<4, true, S>}};
  return passes[(columns - 1) / kLanes][columns % kLanes == 0];
}

// Tiles first .. last of a head's state, for all tokens of a sequence. has_next: the state that lies
// behind it comes next.
template <class T, class S>
void run_head(const DeltaArgs& a, const Span& span, int64_t head, int64_t first, int64_t last, bool has_next) {
  static thread_local Scratch scratch;
  const int64_t key = padded(a.key), numbers = a.key * a.value, tile_size = a.key * kTileColumns;
  const int64_t tiles = (a.value + kTileColumns - 1) / kTileColumns;
  struct Memory {
    float *tokens, *v, *out;
    S* tiles;
  };
  const Memory m = carve(scratch, [&](Arena& arena) {
    return Memory{arena.take<float>(kChunk * 4 * key), arena.take<float>(kTileColumns),
                  arena.take<float>(kTileColumns),
                  arena.take<S>((last - first) * tile_size)};
  });
  const auto version = [&](int64_t position) {
    const int64_t at = span.row * a.versions + position % a.versions;
    return static_cast<S*>(a.states) + (at * a.heads + head) * numbers;
  };
  const int64_t first_kept = span.count - a.versions;
  if (span.start == 0) std::fill(m.tiles, m.tiles + (last - first) * tile_size, S{});
  for (int64_t begin = 0; begin < span.count; begin += kChunk) {
    const int64_t count = std::min(kChunk, span.count - begin);
    Token tokens[kChunk];
    for (int64_t t = 0; t < count; ++t) {
      float* const at = m.tokens + t * 4 * key;
      tokens[t] = {at, at + key, at + 2 * key, at + 3 * key, 0.0f};
      prepare<T>(a, span.begin + begin + t, head, tokens[t]);
    }
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t column = tile * kTileColumns;
      const int64_t columns = std::min(kTileColumns, a.value - column);
      const Pass<S> pass = pass_of<S>(columns);
      S* const own = m.tiles + (tile - first) * tile_size;
      for (int64_t t = begin; t < begin + count; ++t) {
        const bool from_own = t == 0 ? span.start == 0 : t - 1 < first_kept;
        const bool to_own = t < first_kept;
        const S* const from = from_own ? own : version(span.start + t - 1) + column;
        S* const to = to_own ? own : version(span.start + t) + column;
        const int64_t at = ((span.begin + t) * a.heads + head) * a.value + column;
        const T* const v = static_cast<const T*>(a.v) + (span.begin + t) * a.v_stride +
                           head * a.value + column;
        for (int64_t i = 0; i < columns; i += kLanes) store(m.v + i, load_some(v + i, columns - i));
        // Of the next head's state, which follows; a pass fetches once for each row.
        const bool fetches = has_next && t == 0 && !from_own;
        const int64_t step = fetches ? share_of(numbers * sizeof(S), 1, tiles * a.key) : 0;
        const Ahead ahead{from - column + numbers + step / sizeof(S) * a.key * tile, step};
        pass(tokens[t - begin], a.key, from, from_own ? kTileColumns : a.value, to,
             to_own ? kTileColumns : a.value, columns, m.v, m.out, ahead);
        T* const out = static_cast<T*>(a.out) + at;
        for (int64_t i = 0; i < columns; i += kLanes) {
          store_rounded_some(out + i, load(m.out + i), columns - i);
        }
      }
    }
  }
}

// 0, or 1 + the sequence whose numbers cannot be.
template <class T, class S>
int64_t delta_rule(const DeltaArgs& a) {
  const Sequences& all = a.sequences;
  if (const int64_t wrong = wrong_sequence(all)) return wrong;
  const int64_t row = a.heads * a.value;
  const int64_t computed = all.count == 0 ? 0 : all.starts[all.count];
  T* const out = static_cast<T*>(a.out);
  const int64_t tiles = (a.value + kTileColumns - 1) / kTileColumns, pairs = all.count * a.heads;
  const bool is_small = computed * row * a.key < kSerialNumbers;
  const int64_t threads = is_small ? 1 : team_size(a.threads);
  const int64_t groups = std::clamp(4 * threads / std::max<int64_t>(pairs, 1), int64_t{1}, tiles);
  run_tasks(pairs * groups, threads, [&](TaskQueue::Hand& hand) {
    for (int64_t task; hand.take(task);) {
      const int64_t pair = task / groups, group = task % groups;
      const Span span(all, pair / a.heads);
      const int64_t first = tiles * group / groups, last = tiles * (group + 1) / groups;
      run_head<T, S>(a, span, pair % a.heads, first, last, hand.has_next());
    }
  });
  for (int64_t s = 0; s < all.count; ++s) {
    const Span span(all, s);
    std::fill(out + (span.begin + span.count) * row, out + span.end * row, T{});
  }
  std::fill(out + computed * row, out + all.tokens * row, T{});
  return 0;
}

}  // namespace
}  // namespace atom

#define ATOM_DEFINE(type, name)                                              \
  ATOM_EXPORT int64_t atom_delta_rule_##name(const atom::DeltaArgs* args) {  \
    return args->half_states ? atom::delta_rule<type, atom::bfloat16>(*args) \
                             : atom::delta_rule<type, float>(*args);         \
  }

ATOM_DEFINE(float, float32)
ATOM_DEFINE(atom::bfloat16, bfloat16)
#if defined(__F16C__) || defined(__aarch64__)
ATOM_DEFINE(atom::float16, float16)
#endif
