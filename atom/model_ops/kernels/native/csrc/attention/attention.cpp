// Attention over the paged key-value cache, read where it lies.
//
// Keys are taken in chunks of kChunk positions that start at multiples of kChunk. A chunk gives
// a softmax of its own, and chunks are merged in the order of their positions (the "online
// softmax" of Milakov and Gimelshein, arXiv:1805.02867). How the chunks of a long context are
// dealt to threads changes neither, so a query's result depends on its own sequence alone and
// has the same bits however many queries stand beside it.
#include <vector>

#include "attention/attention_tiles.h"
#include "attention/attention_vectors.h"
#include "parallel.h"

namespace atom {
namespace {

// Multiplications below which one thread is done before others have woken up.
constexpr int64_t kSerialWork = 1 << 16;

// Some neighbouring chunks of a unit.
struct Task {
  int64_t unit;
  int64_t chunk_begin, chunk_end;
};

// 0, or 1 + the sequence whose lengths or blocks make no sense.
int64_t check(const AttentionArgs& a) {
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t context = a.context_lens[s];
    const int64_t queries = int64_t(a.cu_seqlens_q[s + 1]) - a.cu_seqlens_q[s];
    const int64_t blocks = (context + a.block_size - 1) / a.block_size;
    if (a.cu_seqlens_q[s] < 0 || queries < 0 || a.cu_seqlens_q[s + 1] > a.tokens) return s + 1;
    if ((queries > 0 && context < 1) || blocks > a.table_width) return s + 1;
    for (int64_t i = 0; i < blocks; ++i) {
      const int32_t block = a.block_tables[s * a.table_width + i];
      if (block < 0 || block >= a.num_blocks) return s + 1;
    }
  }
  return 0;
}

// unit_rows: of a unit of one KV head; shared_rows: of one of several.
void plan(const AttentionArgs& a, int64_t unit_rows, int64_t shared_rows,
          std::vector<Unit>& units) {
  const int64_t group = a.group(), most = std::max(int64_t{1}, unit_rows / group);
  units.clear();
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t begin = a.cu_seqlens_q[s], end = a.cu_seqlens_q[s + 1];
    for (int64_t t = begin; t < end; t += most) {
      const int64_t queries = std::min(most, end - t);
      const int64_t position = a.context_lens[s] - (end - t);
      const int64_t oldest = a.window > 0 ? std::max(int64_t{0}, position - a.window + 1) : 0;
      // A context may be shorter than its queries, of which the first then see nothing.
      const int64_t end_position =
          a.causal ? std::max(position + queries, int64_t{1}) : a.context_lens[s];
      const int64_t stop = (end_position + kChunk - 1) / kChunk;
      const int64_t rows = queries * group, together = std::max(int64_t{1}, shared_rows / rows);
      for (int64_t h = 0; h < a.kv_heads; h += together) {
        const int64_t heads = std::min(together, a.kv_heads - h);
        units.push_back({s, h, heads, t, queries, rows, heads * rows, position, end_position,
                         oldest / kChunk, stop, nullptr, 0});
      }
    }
  }
}

// Cuts units into tasks of at most `most` chunks, the last units first: they see the most keys.
// Returns the floats that the parts of the cut ones need.
int64_t cut(std::vector<Unit>& units, int64_t most, int64_t head_dim, std::vector<Task>& tasks) {
  int64_t floats = 0;
  tasks.clear();
  for (int64_t u = int64_t(units.size()) - 1; u >= 0; --u) {
    Unit& unit = units[u];
    const int64_t chunks = unit.chunks(), pieces = (chunks + most - 1) / most;
    for (int64_t i = 0; i < pieces; ++i) {
      tasks.push_back({u, unit.chunk_begin + chunks * i / pieces,
                       unit.chunk_begin + chunks * (i + 1) / pieces});
    }
    unit.unfinished = pieces;
    if (pieces > 1) floats += chunks * State::size(unit.rows, head_dim);
  }
  return floats;
}

template <class Products>
class Attention {
 public:
  explicit Attention(const AttentionArgs& args)
      : a(args), head_dim(round_up(args.head_dim, Products::kStep)) {}

  void run() const {
    static thread_local std::vector<Unit> units;
    static thread_local std::vector<Task> tasks;
    static thread_local Scratch parts_scratch;
    plan(a, Products::kUnitRows, Products::kSharedRows, units);
    int64_t work = 0, chunks = 0;
    for (const Unit& unit : units) {
      chunks += unit.chunks();
      work += unit.chunks() * kChunk * unit.rows * head_dim;
    }
    const int64_t threads = work < kSerialWork ? 1 : team_size(a.threads);
    const int64_t most = threads > 1 ? chunks / (4 * threads) + 1 : std::max(chunks, int64_t{1});
    auto* parts = parts_scratch.get<float>(cut(units, most, head_dim, tasks));
    for (Unit& unit : units) {
      if (unit.unfinished <= 1) continue;
      unit.parts = parts;
      parts += unit.chunks() * State::size(unit.rows, head_dim);
    }
    const auto *first_task = tasks.data();
    auto* first_unit = units.data();
    run_tasks(int64_t(tasks.size()), threads, [&](TaskQueue::Hand& hand) {
      bool is_first = true;
      for (int64_t i; hand.take(i); is_first = false) {
        const Task& task = first_task[i];
        if (is_first) fetch(first_unit[task.unit], task.chunk_begin);
        // The one that this thread is likely to take next.
        attend(task, hand.has_next() ? &task + 1 : nullptr, first_unit);
      }
    });
  }

 private:
  using T = typename Products::Value;

  int64_t head_bytes() const { return a.head_bytes(sizeof(T)); }

  // Fetches a chunk that nobody could fetch while he worked on another.
  void fetch(const Unit& unit, int64_t index) const {
    Chunk chunk;
    gather(a, head_bytes(), unit, index, chunk);
    for (const auto* rows : {chunk.key, chunk.value}) {
      for (int64_t r = chunk.begin; r < chunk.end; ++r) {
        prefetch(rows[r], unit.kv_heads * head_bytes());
      }
    }
  }

  // A whole unit, or some of its chunks: whoever finishes its last task merges the states of all.
  // following: the task whose first chunk is fetched during the last of this one; null for none.
  void attend(const Task& task, const Task* following, Unit* units) const {
    Unit& unit = units[task.unit];
    static thread_local Scratch scratch;
    const int64_t size = State::size(unit.rows, head_dim), padded = round_up(size, 16);
    float* memory = scratch.get<float>(padded + Products::size(unit.rows, head_dim));
    const Products products(a, memory + padded, unit, head_dim);
    const bool is_whole = unit.parts == nullptr;
    State state(memory, unit.rows, head_dim);
    state.clear();
    Chunk chunks[2];
    gather(a, head_bytes(), unit, task.chunk_begin, chunks[0]);
    for (int64_t c = task.chunk_begin; c < task.chunk_end; ++c) {
      const int64_t at = (c - task.chunk_begin) % 2;
      if (c + 1 < task.chunk_end) {
        gather(a, head_bytes(), unit, c + 1, chunks[1 - at]);
      } else if (following != nullptr) {
        gather(a, head_bytes(), units[following->unit], following->chunk_begin, chunks[1 - at]);
      }
      const bool is_last = c + 1 == task.chunk_end && following == nullptr;
      const Chunk& next = chunks[is_last ? at : 1 - at];
      if (is_whole) {
        products.attend(chunks[at], next, state);
      } else {
        State part(unit.parts + (c - unit.chunk_begin) * size, unit.rows, head_dim);
        part.clear();
        products.attend(chunks[at], next, part);
      }
    }
    if (!is_whole) {
      if (__atomic_sub_fetch(&unit.unfinished, 1, __ATOMIC_ACQ_REL) != 0) return;
      for (int64_t c = 0; c < unit.chunks(); ++c) {
        products.merge(State(unit.parts + c * size, unit.rows, head_dim), state);
      }
    }
    write(unit, state);
  }

  void write(const Unit& unit, const State& state) const {
    const int64_t group = a.group();
    const float value_scale = a.is_fp8() ? *a.value_scale : 1.0f;
    for (int64_t r = 0; r < unit.rows; ++r) {
      const int64_t head = (unit.first_kv_head + r / unit.head_rows) * group + r % group;
      const int64_t token = unit.first_token + r / group % unit.queries;
      T* out = static_cast<T*>(a.out) + (token * a.heads + head) * a.head_dim;
      const float* acc = state.acc + r * head_dim;
      float total = state.total[r], scale = value_scale;
      if (a.sinks != nullptr) add_sink(a.sinks[head], state.peak[r], total, scale);
      if (total == 0.0f) total = 1.0f;
      for (int64_t d = 0; d < a.head_dim; d += 2 * kLanes) {
        T last[2 * kLanes];
        const int64_t left = a.head_dim - d;
        T* to = left < 2 * kLanes ? last : out + d;
        store_pair(to, load(acc + d) / total * scale,
                   load(acc + d + kLanes) / total * scale);
        if (to == last) std::memcpy(out + d, last, left * sizeof(T));
      }
    }
  }

  // Adds a sink to a row's total, of which 2^peak was divided out, and scales the row down where
  // the sink is the larger.
  static void add_sink(float sink, float peak, float& total, float& scale) {
    const float exponent = sink * 1.44269504f, both = std::max(peak, exponent);
    if (both == kNothing) return;
    const vfloat kept = exp2(splat(peak - both)), added = exp2(splat(exponent - both));
    total = total * kept[0] + added[0];
    scale *= kept[0];
  }

  const AttentionArgs& a;
  const int64_t head_dim;  // padded
};

template <class T>
int64_t paged_attention(const AttentionArgs& a) {
  if (const int64_t wrong = check(a)) return wrong;
#if defined(ATOM_AMX)
  if constexpr (std::is_same_v<T, bfloat16>) {
    amx::is_permitted() ? Attention<Tiles>(a).run() : Attention<Vectors<T>>(a).run();
  } else {
    Attention<Vectors<T>>(a).run();
  }
#else
  Attention<Vectors<T>>(a).run();
#endif
  const int64_t width = a.heads * a.head_dim;  // rows beyond the last sequence are padding
  const int64_t used = a.sequences == 0 ? 0 : a.cu_seqlens_q[a.sequences];
  std::memset(static_cast<T*>(a.out) + used * width, 0, (a.tokens - used) * width * sizeof(T));
  return 0;
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_paged_attention_float32(const atom::AttentionArgs* args) {
  return atom::paged_attention<float>(*args);
}
ATOM_EXPORT int64_t atom_paged_attention_bfloat16(const atom::AttentionArgs* args) {
  return atom::paged_attention<atom::bfloat16>(*args);
}
#if defined(__F16C__) || defined(__aarch64__)
ATOM_EXPORT int64_t atom_paged_attention_float16(const atom::AttentionArgs* args) {
  return atom::paged_attention<atom::float16>(*args);
}
#endif
