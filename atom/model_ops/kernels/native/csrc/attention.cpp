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

// Query rows (queries times the heads that share a KV head) that meet a chunk together.
constexpr int64_t kUnitRows = 96;

// Multiplications below which one thread is done before others have woken up.
constexpr int64_t kSerialWork = 1 << 16;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Neighbouring queries of one sequence and the heads that share one of its KV heads.
struct Unit {
  int64_t sequence, kv_head;
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

// Where the keys of one chunk lie; [begin, end) of its positions are in use.
template <class T>
struct Chunk {
  int64_t first_position;
  int64_t begin, end;
  const T* key[kChunk];
  const T* value[kChunk];
};

// What one thread needs for one chunk. Rows are queries times group.
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
  int64_t rows(const Unit& unit) const { return unit.queries * group; }
  int64_t check() const;
  void plan(std::vector<Unit>& units) const;
  void gather(const Unit& unit, int64_t index, Chunk<T>& chunk) const;
  void pack_queries(const Unit& unit, Packed<T>* out) const;
  void score(const Chunk<T>& chunk, int64_t rows, const Workspace<T>& work) const;
  void normalise(const Unit& unit, const Chunk<T>& chunk, const Workspace<T>& work) const;
  void weigh_values(const Chunk<T>& chunk, int64_t rows, const Workspace<T>& work,
                    State& state) const;
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
      for (int64_t h = 0; h < a.kv_heads; ++h) {
        units.push_back({s, h, t, queries, position, oldest / kChunk, stop});
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
  const int32_t* table = a.block_tables + unit.sequence * a.table_width;
  for (int64_t i = chunk.begin; i < chunk.end; ++i) {
    const int64_t block = table[(base + i) / a.block_size];
    const int64_t slot = block * a.block_size + (base + i) % a.block_size;
    const int64_t offset = (slot * a.kv_heads + unit.kv_head) * a.head_dim;
    chunk.key[i] = static_cast<const T*>(a.key) + offset;
    chunk.value[i] = static_cast<const T*>(a.value) + offset;
    for (int64_t d = 0; d < a.head_dim; d += int64_t(64 / sizeof(T))) {
      __builtin_prefetch(chunk.key[i] + d);
      __builtin_prefetch(chunk.value[i] + d);
    }
  }
}

template <class T>
void Attention<T>::pack_queries(const Unit& unit, Packed<T>* out) const {
  for (int64_t i = 0; i < unit.queries; ++i) {
    const T* q = static_cast<const T*>(a.q) + (unit.first_token + i) * a.q_stride +
                 unit.kv_head * group * a.head_dim;
    pack(q, out + i * group * a.head_dim, group * a.head_dim);
  }
}

template <class T>
void Attention<T>::score(const Chunk<T>& chunk, int64_t rows, const Workspace<T>& work) const {
  for_row_groups(rows, [&](auto size, int64_t first) {
    constexpr int G = decltype(size)::value;
    const Packed<T>* q = work.q + first * a.head_dim;
    float* scores = work.scores + first * kChunk;
    int64_t i = chunk.begin;
    for (; i + 2 <= chunk.end; i += 2) {
      const T* keys[2] = {chunk.key[i], chunk.key[i + 1]};
      float sums[2 * G];
      dot_tile<T, 2, G>(keys, q, a.head_dim, a.head_dim, 0, sums);
      ATOM_UNROLL for (int g = 0; g < G; ++g)
          std::memcpy(scores + g * kChunk + i, sums + 2 * g, 2 * sizeof(float));
    }
    for (; i < chunk.end; ++i) {
      const T* keys[1] = {chunk.key[i]};
      float sums[G];
      dot_tile<T, 1, G>(keys, q, a.head_dim, a.head_dim, 0, sums);
      ATOM_UNROLL for (int g = 0; g < G; ++g) scores[g * kChunk + i] = sums[g];
    }
  });
}

// Turns scores into exp(scale * score - peak), 0 where the query may not look.
template <class T>
void Attention<T>::normalise(const Unit& unit, const Chunk<T>& chunk,
                             const Workspace<T>& work) const {
  vint lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const int64_t from = chunk.begin / kLanes * kLanes;
  for (int64_t r = 0; r < rows(unit); ++r) {
    const int64_t position = unit.first_position + r / group - chunk.first_position;
    const int64_t oldest = a.window > 0 ? position - a.window + 1 : 0;
    const vint low = vint{} + int32_t(std::max(chunk.begin, oldest));
    const vint high = vint{} + int32_t(std::min(chunk.end, position + 1));
    float* scores = work.scores + r * kChunk;
    vfloat peak = splat(kNothing), total = {};
    for (int64_t i = from; i < chunk.end; i += kLanes) {
      const vint index = lane + int32_t(i);
      const vint seen = (index >= low) & (index < high);
      const vfloat x = select(seen, load(scores + i) * float(a.scale), splat(kNothing));
      store(scores + i, x);
      peak = max(x, peak);
    }
    work.peak[r] = maximum(peak);
    // Where nothing is seen every exponent is -infinity, not NaN.
    const float shift = work.peak[r] == kNothing && low[0] >= high[0] ? 0.0f : work.peak[r];
    for (int64_t i = from; i < chunk.end; i += kLanes) {
      const vfloat p = exp(load(scores + i) - shift);
      store(scores + i, p);
      total += p;
    }
    work.total[r] = sum(total);
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

template <class T>
void Attention<T>::weigh_values(const Chunk<T>& chunk, int64_t rows, const Workspace<T>& work,
                                State& state) const {
  for_row_groups(rows, [&](auto size, int64_t row) {
    constexpr int G = decltype(size)::value;
    const float* p = work.scores + row * kChunk;
    for (int64_t d = 0; d < a.head_dim; d += 2 * kLanes) {
      vfloat first[G] = {}, second[G] = {};
      for (int64_t i = chunk.begin; i < chunk.end; ++i) {
        const vfloat v0 = load_first(chunk.value[i] + d), v1 = load_second(chunk.value[i] + d);
        ATOM_UNROLL for (int g = 0; g < G; ++g) {
          const vfloat weight = splat(p[g * kChunk + i]);
          first[g] = fma(weight, v0, first[g]);
          second[g] = fma(weight, v1, second[g]);
        }
      }
      ATOM_UNROLL for (int g = 0; g < G; ++g) {
        float* acc = state.acc + (row + g) * a.head_dim + d;
        const vfloat keep = splat(work.keep[row + g]), admit = splat(work.admit[row + g]);
        store(acc, fma(first[g], admit, load(acc) * keep));
        store(acc + kLanes, fma(second[g], admit, load(acc + kLanes) * keep));
      }
    }
  });
}

template <class T>
void Attention<T>::attend(const Unit& unit, int64_t chunk_index, const Workspace<T>& work,
                          State& state) const {
  Chunk<T> chunk;
  gather(unit, chunk_index, chunk);
  score(chunk, rows(unit), work);
  normalise(unit, chunk, work);
  join_peaks(work.peak, work.total, rows(unit), work, state);
  weigh_values(chunk, rows(unit), work, state);
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
    const int64_t head = unit.kv_head * group + r % group;
    T* out = static_cast<T*>(a.out) +
             ((unit.first_token + r / group) * a.heads + head) * a.head_dim;
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
  run_tasks(count, threads, [&](TaskQueue& queue) {
    static thread_local Scratch scratch;
    for (int64_t task; queue.take(task);) {
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
  run_tasks(count * pieces, threads, [&](TaskQueue& queue) {
    static thread_local Scratch scratch;
    for (int64_t task; queue.take(task);) {
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
  const int64_t threads = work < kSerialWork ? 1 : a.threads;
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
