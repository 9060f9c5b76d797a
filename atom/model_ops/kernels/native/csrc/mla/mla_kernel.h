// Latent attention over the paged cache, read where it lies.
//
// Queries are carried into the latent space, where all heads share one key per token, whose first
// elements are its value: W_uk is absorbed into the queries, W_uv into what they see
// (DeepSeek-V2, arXiv 2405.04434, section 2.1). Keys are taken in chunks of kChunk; each gives a
// softmax of its own, chunks are merged in order to parts of kPartChunks, and parts in order to the
// whole. How parts are dealt to threads changes nothing, so a query's result has the same bits
// whatever its batch and however many queries its sequence has.
#pragma once

#include <utility>
#include <vector>

#include "arena.h"
#include "fp8.h"
#include "mla/mla_args.h"
#include "mla/mla_softmax.h"
#include "mla/latent_tiles.h"

namespace atom {
namespace {

constexpr int64_t kPartChunks = 4;

// Rows (a query in one head) that meet a chunk together.
constexpr int64_t kUnitRows = 128;

// Tokens that are multiplied with a head's weights together.
constexpr int64_t kTokens = 64;

// Neighbouring queries of one sequence in neighbouring heads; rows are ordered by query, then head.
struct Unit {
  int64_t sequence;
  int64_t first_token, queries;
  int64_t first_head, heads;
  int64_t first_position;  // of the first query
  int64_t keys;            // that the last query sees
  int64_t chunks;          // of them

  int64_t rows() const { return queries * heads; }
  int64_t parts() const { return (chunks + kPartChunks - 1) / kPartChunks; }
};

template <class T, class Products>
class LatentAttention {
 public:
  explicit LatentAttention(const MlaArgs& args)
      : a(args), width(round_up(a.rank + a.rope, kDotStep)) {}

  int64_t run();

 private:
  using Weight = typename Products::Weight;
  using PackedVectors = typename Products::PackedVectors;

  // What one thread needs for a unit.
  struct Workspace {
    PackedVectors* q;
    float* scores;    // [rows, kChunk]
    Weight* weights;  // the same; rows of whole tiles
    float *peak, *total, *keep, *admit;
    float *state, *part;
    T* keys;  // [kChunk, width], where they cannot be read in place
    char* pairs;
  };

  void plan();
  bool reads_in_place() const {
    return !a.is_fp8() && a.block_size % kRowGroup == 0 && width == a.rank + a.rope;
  }
  Workspace workspace(int64_t rows) const;
  void gather(const Unit& unit, int64_t index, T* copies, CachedRows<T>& keys) const;
  void attend(const Unit& unit, int64_t index, const Workspace& work, SoftmaxState& state) const;
  void run_part(const Unit& unit, int64_t part, const Workspace& work, SoftmaxState& state) const;
  void pack_queries(const Unit& unit, PackedVectors* out) const;
  void write_seen(const Unit& unit, const SoftmaxState& state) const;
  void carry(int64_t head, int64_t first, int64_t count) const;
  void leave(int64_t head, int64_t first, int64_t count) const;
  void run_whole(int64_t threads) const;
  void run_divided(int64_t threads) const;
  template <class Body>
  void for_heads(int64_t tokens, int64_t threads, const Body& body) const;

  const T* up(int64_t head) const {
    return static_cast<const T*>(a.up) + head * (a.nope + a.v) * a.rank;
  }
  T* wide_row(int64_t token, int64_t head) const {
    return wide + (token * a.heads + head) * width;
  }

  const MlaArgs& a;
  const int64_t width;  // of queries and keys, padded
  // [tokens, heads, width]: queries in the latent space; then, in their first elements, what
  // they saw there.
  T* wide = nullptr;
  std::vector<Unit>* units = nullptr;
};

template <class T, class P>
void LatentAttention<T, P>::plan() {
  const int64_t most = std::max(int64_t{1}, kUnitRows / a.heads);
  const int64_t together = std::min(a.heads, kUnitRows);
  units->clear();
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t begin = a.cu_seqlens_q[s], end = a.cu_seqlens_q[s + 1];
    for (int64_t t = begin; t < end; t += most) {
      const int64_t queries = std::min(most, end - t);
      const int64_t position = a.context_lens[s] - (end - t);
      const int64_t keys = a.causal ? position + queries : a.context_lens[s];
      const int64_t chunks = (keys + kChunk - 1) / kChunk;
      for (int64_t h = 0; h < a.heads; h += together) {
        units->push_back(
            {s, t, queries, h, std::min(together, a.heads - h), position, keys, chunks});
      }
    }
  }
}

template <class T, class P>
typename LatentAttention<T, P>::Workspace LatentAttention<T, P>::workspace(int64_t rows) const {
  static thread_local Scratch scratch;
  const int64_t padded = SoftmaxState::padded(rows), state = SoftmaxState::size(rows, a.rank);
  return carve(scratch, [&](Arena& arena) {
    Workspace w;
    w.q = arena.take<PackedVectors>(P::packed_size(rows, width));
    w.scores = arena.take<float>(padded * kChunk);
    if constexpr (std::is_same_v<Weight, float>) {
      w.weights = w.scores;
    } else {
      w.weights = arena.take<Weight>(padded * kChunk);
    }
    for (float** each : {&w.peak, &w.total, &w.keep, &w.admit}) *each = arena.take<float>(padded);
    for (float** each : {&w.state, &w.part}) *each = arena.take<float>(state);
    w.keys = arena.take<T>(reads_in_place() ? 0 : kChunk * width);
    w.pairs = arena.take<char>(P::mix_bytes(kChunk, a.rank));
    return w;
  });
}

template <class T, class P>
void LatentAttention<T, P>::gather(const Unit& unit, int64_t index, T* copies,
                                   CachedRows<T>& keys) const {
  const int64_t base = index * kChunk, size = a.rank + a.rope;
  const int64_t bytes = size * (a.is_fp8() ? 1 : int64_t(sizeof(T)));
  keys.count = std::min(kChunk, unit.keys - base);
  keys.stride = width;
  const int32_t* table = a.block_tables + unit.sequence * a.table_width;
  const auto cached = [&](int64_t position) {
    return static_cast<const char*>(a.latent) +
           (table[position / a.block_size] * a.block_size + position % a.block_size) * bytes;
  };
  for (int64_t i = 0; i < keys.count; i += kRowGroup) {
    T* copy = copies + i * width;
    if (reads_in_place()) {
      keys.groups[i / kRowGroup] = reinterpret_cast<const T*>(cached(base + i));
      continue;
    }
    keys.groups[i / kRowGroup] = copy;
    std::memset(copy, 0, kRowGroup * width * sizeof(T));
    const int64_t count = std::min(kRowGroup, keys.count - i);
    const char* rows[kRowGroup];
    for (int64_t j = 0; j < count; ++j) rows[j] = cached(base + i + j);
    if (a.is_fp8()) {
      widen(rows, 0, 0, count, size, copy, width);
      continue;
    }
    for (int64_t j = 0; j < count; ++j) std::memcpy(copy + j * width, rows[j], bytes);
  }
}

template <class T, class P>
void LatentAttention<T, P>::pack_queries(const Unit& unit, PackedVectors* out) const {
  const T* rows = wide_row(unit.first_token, unit.first_head);
  for (int64_t r = 0; r < unit.rows(); ++r) P::pack_vector(rows + r * width, r, width, out);
}

// Joins one chunk to the state.
template <class T, class P>
void LatentAttention<T, P>::attend(const Unit& unit, int64_t index, const Workspace& work,
                                   SoftmaxState& state) const {
  CachedRows<T> keys;
  gather(unit, index, work.keys, keys);
  P::pack_rows(keys, a.rank, work.pairs);  // first, since it reads row after row
  P::dots(keys, work.q, unit.rows(), width, work.scores, kChunk);
  const int64_t end = round_up(keys.count, kDotStep);
  const float scale = float(a.scale * a.unit());
  for (int64_t r = 0; r < unit.rows(); ++r) {
    int64_t seen = keys.count;
    if (a.causal) {
      seen = std::min(seen, unit.first_position + r / unit.heads + 1 - index * kChunk);
    }
    softmax_row(work.scores + r * kChunk, work.weights + r * kChunk, end, seen, scale,
                work.peak[r], work.total[r]);
  }
  Joint{work.keep, work.admit}.set(work.peak, work.total, unit.rows(), state);
  P::mix(work.weights, kChunk, unit.rows(), keys, a.rank, work.pairs,
         [&](int64_t r, int64_t d, vfloat first, vfloat second) {
           const vfloat keep = splat(work.keep[r]), admit = splat(work.admit[r]);
           float* acc = state.acc + r * a.rank + d;
           store(acc, fma(first, admit, load(acc) * keep));
           store(acc + kLanes, fma(second, admit, load(acc + kLanes) * keep));
         });
}

template <class T, class P>
void LatentAttention<T, P>::run_part(const Unit& unit, int64_t part, const Workspace& work,
                                     SoftmaxState& state) const {
  state.clear();
  const int64_t end = std::min((part + 1) * kPartChunks, unit.chunks);
  for (int64_t i = part * kPartChunks; i < end; ++i) attend(unit, i, work, state);
}

template <class T, class P>
void LatentAttention<T, P>::write_seen(const Unit& unit, const SoftmaxState& state) const {
  for (int64_t r = 0; r < unit.rows(); ++r) {
    T* out = wide_row(unit.first_token + r / unit.heads, unit.first_head + r % unit.heads);
    const float* acc = state.acc + r * a.rank;
    const vfloat total = splat(state.total[r]), unit = splat(a.unit());
    for (int64_t d = 0; d < a.rank; d += kDotStep) {
      P::put(out + d, load(acc + d) / total * unit, load(acc + d + kLanes) / total * unit);
    }
  }
}

// wide[token][head] = W_uk^T q_nope, then the rope part and zeros.
template <class T, class P>
void LatentAttention<T, P>::carry(int64_t head, int64_t first, int64_t count) const {
  static thread_local Scratch scratch;
  const int64_t stride = round_up(a.nope, kDotStep), rows = round_up(count, kRowGroup);
  const auto memory = carve(scratch, [&](Arena& arena) {
    return std::pair{arena.take<Weight>(rows * stride),
                     arena.take<char>(P::mix_bytes(a.nope, a.rank))};
  });
  std::memset(memory.first, 0, rows * stride * sizeof(Weight));
  for (int64_t i = 0; i < count; ++i) {
    const T* q = static_cast<const T*>(a.q) + (first + i) * a.q_stride +
                 head * (a.nope + a.rope);
    Weight* to = memory.first + i * stride;
    if constexpr (std::is_same_v<Weight, T>) {
      std::memcpy(to, q, a.nope * sizeof(T));
    } else {
      for (int64_t d = 0; d < a.nope; ++d) to[d] = load_one(q + d);
    }
    T* wide_rope = wide_row(first + i, head) + a.rank;
    std::memcpy(wide_rope, q + a.nope, a.rope * sizeof(T));
    std::memset(wide_rope + a.rope, 0, (width - a.rank - a.rope) * sizeof(T));
  }
  const MatrixRows<T> w_uk{up(head), a.nope, a.rank};
  P::pack_rows(w_uk, a.rank, memory.second);
  P::mix(memory.first, stride, count, w_uk, a.rank, memory.second,
         [&](int64_t i, int64_t d, vfloat x, vfloat y) {
           P::put(wide_row(first + i, head) + d, x, y);
         });
}

// out[token][head] = W_uv seen
template <class T, class P>
void LatentAttention<T, P>::leave(int64_t head, int64_t first, int64_t count) const {
  static thread_local Scratch scratch;
  const int64_t rows = round_up(a.v, kRowGroup);
  struct Memory {
    PackedVectors* seen;
    float* sums;
    T* copy;
  };
  const Memory memory = carve(scratch, [&](Arena& arena) {
    return Memory{arena.take<PackedVectors>(P::packed_size(count, a.rank)),
                  arena.take<float>(count * rows), arena.take<T>(rows == a.v ? 0 : rows * a.rank)};
  });
  MatrixRows<T> w_uv{up(head) + a.nope * a.rank, a.v, a.rank};
  if (rows != a.v) {
    std::memset(memory.copy, 0, rows * a.rank * sizeof(T));
    std::memcpy(memory.copy, w_uv.first, a.v * a.rank * sizeof(T));
    w_uv.first = memory.copy;
  }
  for (int64_t i = 0; i < count; ++i) {
    P::pack_vector(wide_row(first + i, head), i, a.rank, memory.seen);
  }
  P::dots(w_uv, memory.seen, count, a.rank, memory.sums, rows);
  for (int64_t i = 0; i < count; ++i) {
    T* out = static_cast<T*>(a.out) + ((first + i) * a.heads + head) * a.v;
    for (int64_t d = 0; d < a.v; d += kLanes) {
      store_some(out + d, load(memory.sums + i * rows + d), a.v - d);
    }
  }
}

// `body(head, first token, tokens)`, for every head and some tokens at a time.
template <class T, class P>
template <class Body>
void LatentAttention<T, P>::for_heads(int64_t tokens, int64_t threads, const Body& body) const {
  const int64_t blocks = (tokens + kTokens - 1) / kTokens;
  run_tasks(a.heads * blocks, threads, [&](TaskQueue::Hand& hand) {
    [[maybe_unused]] const typename P::Session session;
    for (int64_t task; hand.take(task);) {
      const int64_t first = task % blocks * kTokens;
      body(task / blocks, first, std::min(kTokens, tokens - first));
    }
  });
}

// One task a unit.
template <class T, class P>
void LatentAttention<T, P>::run_whole(int64_t threads) const {
  const int64_t count = int64_t(units->size());
  run_tasks(count, threads, [&](TaskQueue::Hand& hand) {
    [[maybe_unused]] const typename P::Session session;
    for (int64_t task; hand.take(task);) {
      const Unit& unit = (*units)[count - 1 - task];  // later queries see more: longest first
      const int64_t rows = unit.rows();
      const Workspace work = workspace(rows);
      pack_queries(unit, work.q);
      SoftmaxState state(work.state, rows, a.rank), part(work.part, rows, a.rank);
      run_part(unit, 0, work, state);
      for (int64_t i = 1; i < unit.parts(); ++i) {
        run_part(unit, i, work, part);
        Joint{work.keep, work.admit}.merge(part, rows, a.rank, state);
      }
      write_seen(unit, state);
    }
  });
}

// One task a part; whoever finishes a unit's last one merges them all.
template <class T, class P>
void LatentAttention<T, P>::run_divided(int64_t threads) const {
  static thread_local std::vector<int64_t> starts, memory;  // first task and state of each unit
  static thread_local std::vector<int> unfinished;
  static thread_local Scratch states_scratch;
  const int64_t count = int64_t(units->size());
  starts.assign(count + 1, 0);
  memory.assign(count + 1, 0);
  unfinished.resize(count);
  for (int64_t u = 0; u < count; ++u) {
    const Unit& unit = (*units)[u];
    unfinished[u] = int(unit.parts());
    starts[u + 1] = starts[u] + unit.parts();
    memory[u + 1] = memory[u] + unit.parts() * SoftmaxState::size(unit.rows(), a.rank);
  }
  float* const states = states_scratch.get<float>(memory[count]);
  const int64_t *first = starts.data(), *offset = memory.data();
  int* left = unfinished.data();  // the names above are other threads' own inside of tasks
  run_tasks(starts[count], threads, [&](TaskQueue::Hand& hand) {
    [[maybe_unused]] const typename P::Session session;
    for (int64_t task; hand.take(task);) {
      const int64_t u = std::upper_bound(first, first + count + 1, task) - first - 1;
      const Unit& unit = (*units)[u];
      const int64_t rows = unit.rows(), size = SoftmaxState::size(rows, a.rank);
      const auto state = [&](int64_t part) {
        return SoftmaxState(states + offset[u] + part * size, rows, a.rank);
      };
      const Workspace work = workspace(rows);
      pack_queries(unit, work.q);
      SoftmaxState mine = state(task - first[u]), whole = state(0);
      run_part(unit, task - first[u], work, mine);
      if (__atomic_sub_fetch(&left[u], 1, __ATOMIC_ACQ_REL) != 0) continue;
      for (int64_t i = 1; i < unit.parts(); ++i) {
        Joint{work.keep, work.admit}.merge(state(i), rows, a.rank, whole);
      }
      write_seen(unit, whole);
    }
  });
}

template <class T, class P>
int64_t LatentAttention<T, P>::run() {
  if (const int64_t wrong = find_impossible(a, a.causal)) return wrong;
  static thread_local std::vector<Unit> planned;
  static thread_local Scratch scratch;
  units = &planned;
  plan();
  const int64_t used = a.sequences == 0 ? 0 : a.cu_seqlens_q[a.sequences];
  wide = scratch.get<T>(used * a.heads * width);
  int64_t longest = 0;
  for (const Unit& unit : planned) longest = std::max(longest, unit.parts());
  const int64_t threads = team_size(a.threads);
  for_heads(used, threads, [&](auto... where) { carry(where...); });
  if (longest > 1 && int64_t(planned.size()) < 2 * threads) {
    run_divided(threads);
  } else {
    run_whole(threads);
  }
  for_heads(used, threads, [&](auto... where) { leave(where...); });
  const int64_t size = a.heads * a.v;  // rows beyond the last sequence are padding
  std::memset(static_cast<T*>(a.out) + used * size, 0, (a.tokens - used) * size * sizeof(T));
  return 0;
}

}  // namespace
}  // namespace atom
