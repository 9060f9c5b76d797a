// Causal attention over the paged key-value cache, read where it lies.
//
// Keys are taken in chunks of kChunk positions that start at multiples of kChunk. A chunk gives
// a softmax of its own, and chunks are merged in the order of their positions (the "online
// softmax" of Milakov and Gimelshein, arXiv:1805.02867). How the chunks of a long context are
// dealt to threads changes neither, so a query's result depends on its own sequence alone and
// has the same bits however many queries stand beside it.
#include <algorithm>
#include <limits>
#include <vector>

#include "dot.h"
#include "parallel.h"

namespace atom {
namespace {

struct AttentionArgs {
  const void* q;      // [tokens, heads, head_dim], tokens q_stride elements apart
  const void* key;    // [num_blocks, block_size, kv_heads, head_dim]
  const void* value;  // the same
  void* out;          // [tokens, heads, head_dim]
  const int32_t* block_tables;  // [sequences, table_width]
  const int32_t* context_lens;  // [sequences]
  const int32_t* cu_seqlens_q;  // [sequences + 1]
  int64_t tokens, heads, kv_heads, head_dim, num_blocks, block_size, table_width, sequences;
  int64_t q_stride, window, threads;  // window: keys a query sees at most; 0 is all
  double scale;
};

constexpr int64_t kChunk = 64;

// Rows (a query in one head) that meet a chunk together. Few queries take several KV heads
// at once: a token's heads lie side by side in memory.
constexpr int64_t kUnitRows = 96;

// Multiplications below which one thread is done before others have woken up.
constexpr int64_t kSerialWork = 1 << 16;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Neighbouring queries of one sequence and neighbouring KV heads, with all heads that share
// those. Its rows are ordered by KV head, then query, then head.
struct Unit {
  int64_t sequence;
  int64_t first_kv_head, kv_heads;
  int64_t first_token, queries;    // rows of q
  int64_t first_position;          // of the first query
  int64_t chunk_begin, chunk_end;  // the chunks that some query sees
};

// Softmax so far of every row of a unit: acc / total is the output, exp(peak) was divided out.
struct State {
  float* acc;    // [rows, head_dim], in pair order
  float* peak;   // [rows]
  float* total;  // [rows]

  static int64_t size(int64_t rows, int64_t head_dim) {
    return padded(rows) * (head_dim + 2);
  }
  static int64_t padded(int64_t rows) { return (rows + kLanes - 1) / kLanes * kLanes; }

  State(float* memory, int64_t rows, int64_t head_dim)
      : acc(memory), peak(acc + padded(rows) * head_dim), total(peak + padded(rows)) {}

  void clear() {
    std::fill(acc, peak, 0.0f);
    std::fill(peak, total, kNothing);
    std::fill(total, total + (total - peak), 0.0f);
  }
};

// Where the keys of one chunk lie, of the unit's first KV head. [begin, end) of its positions
// are in use; the other pointers point somewhere.
template <class T>
struct Chunk {
  int64_t first_position;
  int64_t begin, end;
  const T* key[kChunk];
  const T* value[kChunk];
};

// Fetches one head's `count` elements while others are worked on.
template <class T>
ATOM_INLINE void prefetch(const T* p, int64_t count) {
  for (int64_t d = 0; d < count; d += int64_t(64 / sizeof(T))) __builtin_prefetch(p + d);
}

// What one thread needs for one chunk.
template <class T>
struct Workspace {
  Packed<T>* q;             // [rows, head_dim]
  float* scores;            // [rows, kChunk]: scores, then exp(score - peak)
  float *peak, *total;      // [rows] of the chunk
  float *keep, *admit;      // [rows] factors of the state and of the chunk
  float* state;

  static int64_t size(int64_t rows, int64_t head_dim) {
    return rows * head_dim + rows * kChunk + 4 * State::padded(rows) +
           State::size(rows, head_dim) + 64;
  }
  Workspace(float* memory, int64_t rows, int64_t head_dim) {
    const int64_t padded = State::padded(rows);
    scores = memory;
    peak = scores + rows * kChunk;
    total = peak + padded;
    keep = total + padded;
    admit = keep + padded;
    state = admit + padded;
    q = reinterpret_cast<Packed<T>*>(state + State::size(rows, head_dim));
  }
};

template <class T>
class Attention {
 public:
  explicit Attention(const AttentionArgs& args) : a(args), group(a.heads / a.kv_heads) {}

  int64_t run();

 private:
  // Rows of one KV head, and of all.
  int64_t head_rows(const Unit& unit) const { return unit.queries * group; }
  int64_t rows(const Unit& unit) const { return unit.kv_heads * head_rows(unit); }
  int64_t check() const;
  void plan(std::vector<Unit>& units) const;
  void gather(const Unit& unit, int64_t index, Chunk<T>& chunk) const;
  void pack_queries(const Unit& unit, Packed<T>* out) const;
  void score(const Unit& unit, const Chunk<T>& chunk, const Chunk<T>& next,
             const Workspace<T>& work) const;
  void normalise(const Unit& unit, const Chunk<T>& chunk, const Workspace<T>& work) const;
  void weigh_values(const Unit& unit, const Chunk<T>& chunk, const Chunk<T>& next,
                    const Workspace<T>& work, State& state) const;
  void attend(const Unit& unit, int64_t chunk_index, const Workspace<T>& work,
              State& state) const;
  void merge(const State& part, int64_t rows, const Workspace<T>& work, State& state) const;
  void write(const Unit& unit, const State& state) const;
  void run_whole(const std::vector<Unit>& units, int64_t threads) const;
  void run_divided(const std::vector<Unit>& units, int64_t threads) const;

  const AttentionArgs& a;
  const int64_t group;
};

// 0, or 1 + the sequence whose lengths or blocks make no sense.
template <class T>
int64_t Attention<T>::check() const {
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t context = a.context_lens[s];
    const int64_t queries = int64_t(a.cu_seqlens_q[s + 1]) - a.cu_seqlens_q[s];
    const int64_t blocks = (context + a.block_size - 1) / a.block_size;
    if (a.cu_seqlens_q[s] < 0 || queries < 0 || a.cu_seqlens_q[s + 1] > a.tokens) return s + 1;
    if (queries > context || blocks > a.table_width) return s + 1;
    for (int64_t i = 0; i < blocks; ++i) {
      const int32_t block = a.block_tables[s * a.table_width + i];
      if (block < 0 || block >= a.num_blocks) return s + 1;
    }
  }
  return 0;
}

template <class T>
void Attention<T>::plan(std::vector<Unit>& units) const {
  const int64_t most = std::max(int64_t{1}, kUnitRows / group);
  units.clear();
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t begin = a.cu_seqlens_q[s], end = a.cu_seqlens_q[s + 1];
    for (int64_t t = begin; t < end; t += most) {
      const int64_t queries = std::min(most, end - t);
      const int64_t position = a.context_lens[s] - (end - t);
      const int64_t oldest = a.window > 0 ? std::max(int64_t{0}, position - a.window + 1) : 0;
      const int64_t stop = (position + queries + kChunk - 1) / kChunk;
      const int64_t together = std::max(int64_t{1}, kUnitRows / (queries * group));
      for (int64_t h = 0; h < a.kv_heads; h += together) {
        const int64_t heads = std::min(together, a.kv_heads - h);
        units.push_back({s, h, heads, t, queries, position, oldest / kChunk, stop});
      }
    }
  }
}

template <class T>
void Attention<T>::gather(const Unit& unit, int64_t index, Chunk<T>& chunk) const {
  const int64_t base = index * kChunk;
  const int64_t oldest = a.window > 0 ? unit.first_position - a.window + 1 : 0;
  chunk.first_position = base;
  chunk.begin = std::max(int64_t{0}, oldest - base);
  chunk.end = std::min(kChunk, unit.first_position + unit.queries - base);
  std::fill(chunk.key, chunk.key + kChunk, static_cast<const T*>(a.key));
  std::fill(chunk.value, chunk.value + kChunk, static_cast<const T*>(a.value));
  const int32_t* table = a.block_tables + unit.sequence * a.table_width;
  const int64_t token = a.kv_heads * a.head_dim;
  int64_t block = (base + chunk.begin) / a.block_size;
  int64_t within = (base + chunk.begin) % a.block_size;
  for (int64_t i = chunk.begin; i < chunk.end; ++block, within = 0) {
    const int64_t stop = std::min(chunk.end, i + a.block_size - within);
    int64_t at = (table[block] * a.block_size + within) * token + unit.first_kv_head * a.head_dim;
    for (; i < stop; ++i, at += token) {
      chunk.key[i] = static_cast<const T*>(a.key) + at;
      chunk.value[i] = static_cast<const T*>(a.value) + at;
    }
  }
}

template <class T>
void Attention<T>::pack_queries(const Unit& unit, Packed<T>* out) const {
  const int64_t width = group * a.head_dim;
  for (int64_t h = 0; h < unit.kv_heads; ++h) {
    for (int64_t i = 0; i < unit.queries; ++i, out += width) {
      pack(static_cast<const T*>(a.q) + (unit.first_token + i) * a.q_stride +
               (unit.first_kv_head + h) * width,
           out, width);
    }
  }
}

// Scores of G rows with all keys; `offset`: from the unit's first KV head to theirs. `next`: the
// keys to fetch meanwhile.
template <class T, int G>
void score_rows(const Chunk<T>& chunk, const T* const* next, const Packed<T>* q,
                int64_t head_dim, int64_t offset, float* scores) {
  int64_t i = chunk.begin;
  for (; i + 2 <= chunk.end; i += 2) {
    if (next != nullptr) {
      prefetch(next[i] + offset, head_dim);
      prefetch(next[i + 1] + offset, head_dim);
    }
    const T* keys[2] = {chunk.key[i] + offset, chunk.key[i + 1] + offset};
    float sums[2 * G];
    dot_tile<T, 2, G>(keys, q, head_dim, head_dim, 0, sums);
    ATOM_UNROLL for (int g = 0; g < G; ++g)
        std::memcpy(scores + g * kChunk + i, sums + 2 * g, 2 * sizeof(float));
  }
  for (; i < chunk.end; ++i) {
    const T* keys[1] = {chunk.key[i] + offset};
    float sums[G];
    dot_tile<T, 1, G>(keys, q, head_dim, head_dim, 0, sums);
    ATOM_UNROLL for (int g = 0; g < G; ++g) scores[g * kChunk + i] = sums[g];
  }
}

template <class T>
void Attention<T>::score(const Unit& unit, const Chunk<T>& chunk, const Chunk<T>& next,
                         const Workspace<T>& work) const {
  for (int64_t h = 0; h < unit.kv_heads; ++h) {
    for_row_groups(head_rows(unit), [&](auto size, int64_t first) {
      const int64_t row = h * head_rows(unit) + first;
      score_rows<T, decltype(size)::value>(chunk, first == 0 ? next.key : nullptr,
                                           work.q + row * a.head_dim, a.head_dim,
                                           h * a.head_dim, work.scores + row * kChunk);
    });
  }
}

// One row: scores [from, end) become exp(scale * score - peak), 0 outside [low, high).
// `from` is a multiple of kLanes.
ATOM_INLINE void normalise_row(float* scores, int64_t from, int64_t end, int64_t low,
                               int64_t high, float scale, float& peak_out, float& total_out) {
  vint lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const vint first = vint{} + int32_t(low), stop = vint{} + int32_t(high);
  vfloat peak = splat(kNothing), total = {};
  for (int64_t i = from; i < end; i += kLanes) {
    vfloat x = load(scores + i) * scale;
    if (i < low || i + kLanes > high) {
      const vint index = lane + int32_t(i);
      x = select((index >= first) & (index < stop), x, splat(kNothing));
    }
    store(scores + i, x);
    peak = max(x, peak);
  }
  peak_out = maximum(peak);
  // Where nothing is seen every exponent is -infinity, not NaN.
  const float shift = low < high ? peak_out : 0.0f;
  for (int64_t i = from; i < end; i += kLanes) {
    const vfloat p = exp(load(scores + i) - shift);
    store(scores + i, p);
    total += p;
  }
  total_out = sum(total);
}

template <class T>
void Attention<T>::normalise(const Unit& unit, const Chunk<T>& chunk,
                             const Workspace<T>& work) const {
  const int64_t from = chunk.begin / kLanes * kLanes;
  for (int64_t r = 0; r < rows(unit); ++r) {
    const int64_t query = r / group % unit.queries;
    const int64_t position = unit.first_position + query - chunk.first_position;
    const int64_t oldest = a.window > 0 ? position - a.window + 1 : 0;
    normalise_row(work.scores + r * kChunk, from, chunk.end, std::max(chunk.begin, oldest),
                  std::min(chunk.end, position + 1), float(a.scale), work.peak[r],
                  work.total[r]);
  }
}

// The factors that bring a state and what joins it to their common peak.
template <class T>
void join_peaks(const float* peak, const float* total, int64_t rows, const Workspace<T>& work,
                State& state) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    const vfloat old = load(state.peak + r), incoming = load(peak + r);
    const vfloat both = max(old, incoming);
    const vfloat keep = select(old == both, splat(1), exp(old - both));
    const vfloat admit = select(incoming == both, splat(1), exp(incoming - both));
    store(work.keep + r, keep);
    store(work.admit + r, admit);
    store(state.peak + r, both);
    store(state.total + r, fma(load(total + r), admit, load(state.total + r) * keep));
  }
}

// Adds `P` pairs of vectors of the values, weighted, to G rows of the state. `next`: the values
// to fetch meanwhile, where kFetch.
template <class T, int G, int P, bool kFetch>
ATOM_INLINE void weigh_columns(const Chunk<T>& chunk, const T* const* next, int64_t at,
                               const float* weights, const float* keep, const float* admit,
                               float* acc, int64_t head_dim) {
  vfloat sums[G][2 * P] = {};
  for (int64_t i = chunk.begin; i < chunk.end; ++i) {
    if (kFetch) prefetch(next[i] + at, head_dim);
    vfloat v[2 * P];
    ATOM_UNROLL for (int p = 0; p < P; ++p) {
      v[2 * p] = load_first(chunk.value[i] + at + p * 2 * kLanes);
      v[2 * p + 1] = load_second(chunk.value[i] + at + p * 2 * kLanes);
    }
    ATOM_UNROLL for (int g = 0; g < G; ++g) {
      const vfloat weight = splat(weights[g * kChunk + i]);
      ATOM_UNROLL for (int j = 0; j < 2 * P; ++j) sums[g][j] = fma(weight, v[j], sums[g][j]);
    }
  }
  ATOM_UNROLL for (int g = 0; g < G; ++g) {
    ATOM_UNROLL for (int j = 0; j < 2 * P; ++j) {
      float* out = acc + g * head_dim + j * kLanes;
      store(out, fma(sums[g][j], splat(admit[g]), load(out) * keep[g]));
    }
  }
}

template <class T>
void Attention<T>::weigh_values(const Unit& unit, const Chunk<T>& chunk, const Chunk<T>& next,
                                const Workspace<T>& work, State& state) const {
  for (int64_t h = 0; h < unit.kv_heads; ++h) {
    for_row_groups(head_rows(unit), [&](auto size, int64_t first) {
      constexpr int G = decltype(size)::value;
      constexpr int P = G <= 3 ? 2 : 1;  // as many sums as registers
      const int64_t row = h * head_rows(unit) + first;
      const float* weights = work.scores + row * kChunk;
      const float *keep = work.keep + row, *admit = work.admit + row;
      float* acc = state.acc + row * a.head_dim;
      const int64_t at = h * a.head_dim;
      int64_t d = 0;
      if (first == 0) {
        weigh_columns<T, G, 1, true>(chunk, next.value, at, weights, keep, admit, acc,
                                     a.head_dim);
        d = 2 * kLanes;
      }
      for (; d + 2 * P * kLanes <= a.head_dim; d += 2 * P * kLanes) {
        weigh_columns<T, G, P, false>(chunk, nullptr, at + d, weights, keep, admit, acc + d,
                                      a.head_dim);
      }
      for (; P > 1 && d < a.head_dim; d += 2 * kLanes) {
        weigh_columns<T, G, 1, false>(chunk, nullptr, at + d, weights, keep, admit, acc + d,
                                      a.head_dim);
      }
    });
  }
}

template <class T>
void Attention<T>::attend(const Unit& unit, int64_t chunk_index, const Workspace<T>& work,
                          State& state) const {
  Chunk<T> chunk, next;
  gather(unit, chunk_index, chunk);
  gather(unit, std::min(chunk_index + 1, unit.chunk_end - 1), next);
  score(unit, chunk, next, work);
  normalise(unit, chunk, work);
  join_peaks(work.peak, work.total, rows(unit), work, state);
  weigh_values(unit, chunk, next, work, state);
}

template <class T>
void Attention<T>::merge(const State& part, int64_t rows, const Workspace<T>& work,
                         State& state) const {
  join_peaks(part.peak, part.total, rows, work, state);
  for (int64_t r = 0; r < rows; ++r) {
    const vfloat keep = splat(work.keep[r]), admit = splat(work.admit[r]);
    for (int64_t d = r * a.head_dim; d < (r + 1) * a.head_dim; d += kLanes) {
      store(state.acc + d, fma(load(part.acc + d), admit, load(state.acc + d) * keep));
    }
  }
}

template <class T>
void Attention<T>::write(const Unit& unit, const State& state) const {
  for (int64_t r = 0; r < rows(unit); ++r) {
    const int64_t head = (unit.first_kv_head + r / head_rows(unit)) * group + r % group;
    const int64_t token = unit.first_token + r / group % unit.queries;
    T* out = static_cast<T*>(a.out) + (token * a.heads + head) * a.head_dim;
    const float* acc = state.acc + r * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += 2 * kLanes) {
      store_pair(out + d, load(acc + d) / state.total[r],
                 load(acc + d + kLanes) / state.total[r]);
    }
  }
}

// One task a unit.
template <class T>
void Attention<T>::run_whole(const std::vector<Unit>& units, int64_t threads) const {
  const int64_t count = int64_t(units.size());
  run_tasks(count, threads, [&](TaskQueue::Hand& hand) {
    static thread_local Scratch scratch;
    for (int64_t task; hand.take(task);) {
      const Unit& unit = units[count - 1 - task];  // later queries see more keys: longest first
      const int64_t n = rows(unit);
      Workspace<T> work(scratch.get<float>(Workspace<T>::size(n, a.head_dim)), n, a.head_dim);
      State state(work.state, n, a.head_dim);
      state.clear();
      pack_queries(unit, work.q);
      for (int64_t c = unit.chunk_begin; c < unit.chunk_end; ++c) attend(unit, c, work, state);
      write(unit, state);
    }
  });
}

// Several tasks a unit, each some of its chunks; whoever finishes a unit's last task merges
// the states of its chunks.
template <class T>
void Attention<T>::run_divided(const std::vector<Unit>& units, int64_t threads) const {
  const int64_t count = int64_t(units.size());
  const int64_t pieces = (4 * threads + count - 1) / count;
  std::vector<int64_t> offsets(count + 1, 0);
  std::vector<int> unfinished(count, int(pieces));
  for (int64_t u = 0; u < count; ++u) {
    const int64_t chunks = units[u].chunk_end - units[u].chunk_begin;
    offsets[u + 1] = offsets[u] + chunks * State::size(rows(units[u]), a.head_dim);
  }
  static thread_local Scratch parts_scratch;
  float* const parts = parts_scratch.get<float>(offsets[count]);
  run_tasks(count * pieces, threads, [&](TaskQueue::Hand& hand) {
    static thread_local Scratch scratch;
    for (int64_t task; hand.take(task);) {
      const int64_t u = task / pieces, piece = task % pieces;
      const Unit& unit = units[u];
      const int64_t n = rows(unit), size = State::size(n, a.head_dim);
      const int64_t chunks = unit.chunk_end - unit.chunk_begin;
      Workspace<T> work(scratch.get<float>(Workspace<T>::size(n, a.head_dim)), n, a.head_dim);
      pack_queries(unit, work.q);
      const int64_t end = chunks * (piece + 1) / pieces;
      for (int64_t c = chunks * piece / pieces; c < end; ++c) {
        State part(parts + offsets[u] + c * size, n, a.head_dim);
        part.clear();
        attend(unit, unit.chunk_begin + c, work, part);
      }
      if (__atomic_sub_fetch(&unfinished[u], 1, __ATOMIC_ACQ_REL) != 0) continue;
      State state(work.state, n, a.head_dim);
      state.clear();
      for (int64_t c = 0; c < chunks; ++c) {
        merge(State(parts + offsets[u] + c * size, n, a.head_dim), n, work, state);
      }
      write(unit, state);
    }
  });
}

template <class T>
int64_t Attention<T>::run() {
  if (const int64_t wrong = check()) return wrong;
  static thread_local std::vector<Unit> units;
  plan(units);
  int64_t work = 0, longest = 0;
  for (const Unit& u : units) {
    const int64_t chunks = u.chunk_end - u.chunk_begin;
    longest = std::max(longest, chunks);
    work += chunks * kChunk * rows(u) * a.head_dim;
  }
  const int64_t threads = work < kSerialWork ? 1 : team_size(a.threads);
  if (threads > 1 && longest > 1 && int64_t(units.size()) < 2 * threads) {
    run_divided(units, threads);
  } else {
    run_whole(units, threads);
  }
  const int64_t width = a.heads * a.head_dim;  // rows beyond the last sequence are padding
  const int64_t used = a.sequences == 0 ? 0 : a.cu_seqlens_q[a.sequences];
  std::memset(static_cast<T*>(a.out) + used * width, 0, (a.tokens - used) * width * sizeof(T));
  return 0;
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_paged_attention_float32(const atom::AttentionArgs* args) {
  return atom::Attention<float>(*args).run();
}
ATOM_EXPORT int64_t atom_paged_attention_bfloat16(const atom::AttentionArgs* args) {
  return atom::Attention<atom::bfloat16>(*args).run();
}
#if defined(__F16C__) || defined(__aarch64__)
ATOM_EXPORT int64_t atom_paged_attention_float16(const atom::AttentionArgs* args) {
  return atom::Attention<atom::float16>(*args).run();
}
#endif
