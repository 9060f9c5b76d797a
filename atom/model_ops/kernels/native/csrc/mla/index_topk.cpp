// The tokens that each query of sparse attention attends to (DeepSeek-V3.2): those with the highest
// scores, where token s has sum over h of w_h * max(q_h . k_s, 0).
//
// A query's scores are sums in an order of their own, and of equal scores those of earlier tokens
// are the higher ones, so its choice has the same bits whatever its batch.
#include <algorithm>
#include <functional>
#include <vector>

#include "arena.h"
#include "mla/latent_tiles.h"
#include "mla/mla_args.h"

namespace atom {
namespace {

struct IndexArgs {
  const void* q;         // [tokens, heads, size]
  const float* weights;  // [tokens, heads]
  const void* keys;      // [num_blocks, block_size, size], of q's type
  const int32_t* block_tables;  // [sequences, table_width]
  const int32_t* context_lens;  // [sequences]
  const int32_t* cu_seqlens_q;  // [sequences + 1]
  int32_t* slots;               // [tokens, topk]: those of the chosen tokens, by position; then -1
  int32_t* counts;              // [tokens]: how many they are
  int32_t* starts;              // [tokens + 1]: 0, 1, .. up to the last token of a sequence
  int64_t tokens, heads, size, num_blocks, block_size, table_width, sequences, topk, threads;

  int32_t slot(int64_t sequence, int64_t position) const {
    const int32_t* table = block_tables + sequence * table_width;
    return int32_t(table[position / block_size] * block_size + position % block_size);
  }
};

// A query that does not see all that it may: `seen` tokens, the scores of which begin at `first`.
struct Query {
  int64_t token, sequence, seen, first;

  int64_t chunks() const { return (seen + kChunk - 1) / kChunk; }
};

// Most scores that are in memory together, unless one query has more.
constexpr int64_t kMostScores = int64_t{1} << 22;
// Chunks of one query that one task scores.
constexpr int64_t kTaskChunks = 4;

// A score as an integer of the same order; -0 is 0, and NaN is less than all.
inline uint32_t ordered(float score) {
  const uint32_t bits = raw<uint32_t>(&score), size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0;
  return size == 0 || bits == size ? size | 0x80000000u : ~bits;
}

template <class T, class P>
class Indexer {
 public:
  explicit Indexer(const IndexArgs& args)
      : a(args), width(round_up(a.size, kDotStep)) {}

  int64_t run() {
    if (const int64_t wrong = find_impossible(a)) return wrong;
    const int64_t used = a.sequences == 0 ? 0 : a.cu_seqlens_q[a.sequences];
    for (int64_t t = 0; t <= a.tokens; ++t) a.starts[t] = int32_t(std::min(t, used));
    static thread_local std::vector<Query> queries;
    queries.clear();
    for (int64_t s = 0; s < a.sequences; ++s) {
      const int64_t begin = a.cu_seqlens_q[s], end = a.cu_seqlens_q[s + 1];
      for (int64_t t = begin; t < end; ++t) {
        const int64_t seen = a.context_lens[s] - (end - t) + 1;
        if (seen > a.topk) {
          queries.push_back({t, s, seen, 0});
        } else {
          take_all(t, s, seen);
        }
      }
    }
    for (int64_t t = used; t < a.tokens; ++t) take_all(t, 0, 0);
    Query* const all = queries.data();
    const int64_t count = int64_t(queries.size());
    for (int64_t first = 0, last; first < count; first = last) {
      int64_t scores = 0;
      for (last = first; last < count; ++last) {
        const int64_t more = all[last].chunks() * kChunk;
        if (last > first && scores + more > kMostScores) break;
        all[last].first = scores;
        scores += more;
      }
      choose(all + first, last - first, scores);
    }
    return 0;
  }

 private:
  void take_all(int64_t token, int64_t sequence, int64_t seen) const {
    int32_t* to = a.slots + token * a.topk;
    for (int64_t i = 0; i < seen; ++i) to[i] = a.slot(sequence, i);
    std::fill(to + seen, to + a.topk, -1);
    a.counts[token] = int32_t(seen);
  }

  // Scores some queries and chooses their tokens.
  void choose(const Query* queries, int64_t count, int64_t num_scores) const {
    static thread_local Scratch scratch;
    static thread_local std::vector<int64_t> task_starts;
    float* const scores = scratch.get<float>(num_scores);
    task_starts.assign(count + 1, 0);
    for (int64_t i = 0; i < count; ++i) {
      task_starts[i + 1] = task_starts[i] + (queries[i].chunks() + kTaskChunks - 1) / kTaskChunks;
    }
    const int64_t* const starts = task_starts.data();  // the names are each thread's own in tasks
    const int64_t threads = team_size(a.threads);
    run_tasks(starts[count], threads, [&](TaskQueue::Hand& hand) {
      [[maybe_unused]] const typename P::Session session;
      for (int64_t task; hand.take(task);) {
        const int64_t i = std::upper_bound(starts, starts + count + 1, task) - starts - 1;
        score(queries[i], (task - starts[i]) * kTaskChunks, scores + queries[i].first);
      }
    });
    run_tasks(count, threads, [&](TaskQueue::Hand& hand) {
      for (int64_t i; hand.take(i);) select(queries[i], scores + queries[i].first);
    });
  }

  // The scores of up to kTaskChunks chunks.
  void score(const Query& query, int64_t first_chunk, float* scores) const {
    static thread_local Scratch scratch;
    using PackedVectors = typename P::PackedVectors;
    struct Memory {
      PackedVectors* q;
      T *keys, *padded;
      float* dots;
    };
    const Memory memory = carve(scratch, [&](Arena& arena) {
      return Memory{arena.take<PackedVectors>(P::packed_size(a.heads, width)),
                    arena.take<T>(reads_in_place() ? 0 : kChunk * width), arena.take<T>(width),
                    arena.take<float>(round_up(a.heads, kRowGroup) * kChunk)};
    });
    std::memset(memory.padded, 0, width * sizeof(T));
    for (int64_t h = 0; h < a.heads; ++h) {
      const T* q = static_cast<const T*>(a.q) + (query.token * a.heads + h) * a.size;
      if (width != a.size) {
        std::memcpy(memory.padded, q, a.size * sizeof(T));
        q = memory.padded;
      }
      P::pack_vector(q, h, width, memory.q);
    }
    const float* weights = a.weights + query.token * a.heads;
    const int64_t end = std::min(first_chunk + kTaskChunks, query.chunks());
    for (int64_t chunk = first_chunk; chunk < end; ++chunk) {
      CachedRows<T> keys;
      gather(query, chunk * kChunk, memory.keys, keys);
      P::dots(keys, memory.q, a.heads, width, memory.dots, kChunk);
      float* out = scores + chunk * kChunk;
      for (int64_t i = 0; i < keys.count; i += kLanes) {
        vfloat total = {};
        for (int64_t h = 0; h < a.heads; ++h) {
          total = fma(splat(weights[h]), max(load(memory.dots + h * kChunk + i), vfloat{}), total);
        }
        store(out + i, total);
      }
    }
  }

  bool reads_in_place() const { return a.block_size % kRowGroup == 0 && width == a.size; }

  void gather(const Query& query, int64_t base, T* copies, CachedRows<T>& keys) const {
    keys.count = std::min(kChunk, query.seen - base);
    keys.stride = width;
    const auto* cached = static_cast<const T*>(a.keys);
    if (!reads_in_place()) std::memset(copies, 0, kChunk * width * sizeof(T));
    for (int64_t i = 0; i < keys.count; i += kRowGroup) {
      keys.groups[i / kRowGroup] = copies + i * width;
      if (reads_in_place()) {
        keys.groups[i / kRowGroup] = cached + int64_t(a.slot(query.sequence, base + i)) * a.size;
        continue;
      }
      for (int64_t j = i; j < std::min(keys.count, i + kRowGroup); ++j) {
        const T* row = cached + int64_t(a.slot(query.sequence, base + j)) * a.size;
        std::memcpy(copies + j * width, row, a.size * sizeof(T));
      }
    }
  }

  void select(const Query& query, const float* scores) const {
    static thread_local Scratch scratch;
    uint32_t* const order = scratch.get<uint32_t>(query.seen);
    for (int64_t i = 0; i < query.seen; ++i) order[i] = ordered(scores[i]);
    std::nth_element(order, order + a.topk - 1, order + query.seen, std::greater<uint32_t>());
    const uint32_t least = order[a.topk - 1];
    // Of those with this score, the first that have room beside those with higher ones.
    int64_t room = a.topk - std::count_if(order, order + a.topk,
                                          [&](uint32_t score) { return score > least; });
    int32_t* to = a.slots + query.token * a.topk;
    for (int64_t i = 0; i < query.seen; ++i) {
      const uint32_t mine = ordered(scores[i]);
      if (mine < least || (mine == least && room-- <= 0)) continue;
      *to++ = a.slot(query.sequence, i);
    }
    a.counts[query.token] = int32_t(a.topk);
  }

  const IndexArgs& a;
  const int64_t width;  // of queries and keys, padded
};

template <class T>
int64_t index_topk(const IndexArgs& args) {
#if defined(ATOM_AMX)
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (amx::is_permitted()) return Indexer<T, Tiles>(args).run();
  }
#endif
  return Indexer<T, Vectors<T>>(args).run();
}

}  // namespace
}  // namespace atom

#define ATOM_INDEX(name, type)                                                   \
  ATOM_EXPORT int64_t atom_index_topk_##name(const atom::IndexArgs* args) {      \
    return atom::index_topk<type>(*args);                                        \
  }

ATOM_INDEX(float32, float)
ATOM_INDEX(bfloat16, atom::bfloat16)
#if defined(__F16C__) || defined(__aarch64__)
ATOM_INDEX(float16, atom::float16)
#endif
