// Experts: tokens are grouped by expert, so each expert's weights are read once for all its tokens.
//
// A token's sum runs over its experts in the order of their ids, in float32, so its bits do not
// depend on other tokens.
#include <tuple>
#include <utility>

#include "arena.h"
#include "products_tiles.h"

namespace atom {
namespace {

struct ExpertsArgs {
  const void* x;         // [rows, hidden], rows x_stride elements apart
  const void* w13;       // [experts, 2 * inter, hidden]: gate above up
  const void* w2;        // [experts, hidden, inter]
  const float* weights;  // [rows, top_k]
  const void* ids;       // [rows, top_k] int32 or int64; beyond the experts: adds nothing
  void* out;             // [rows, hidden]
  int64_t rows, hidden, inter, experts, top_k, x_stride, id_bytes, threads;
};

// Features that are computed together; hidden and inter are multiples of it.
constexpr int64_t kPanel = 32;
// Tokens of one expert that are.
constexpr int64_t kBlock = 64;
// Tokens whose packed activations are kept at a time.
constexpr int64_t kMostRows = 1024;
// Multiplications below which one thread is done before others have woken up.
constexpr int64_t kSerialWork = 1 << 16;
// Tokens that one thread packs before others have woken up.
constexpr int64_t kSerialPack = 16;

// The tokens of one expert.
struct Visited {
  int64_t expert;
  int64_t first, count;  // in the list of visits
  int64_t x, h;          // where its packed inputs and activations begin
};

struct Visit {
  int64_t row;
  float weight;
};

template <class T, class P>
class Experts {
 public:
  explicit Experts(const ExpertsArgs& args) : a(args) {}

  // 0, or 1 + the row that has a negative id.
  int64_t run() {
    for (int64_t i = 0; i < a.rows * a.top_k; ++i) {
      if (id(i) < 0) return 1 + i / a.top_k;
    }
    const int64_t work = a.rows * a.top_k * a.hidden * a.inter;
    const int64_t threads = work < kSerialWork ? 1 : team_size(a.threads);
    for (int64_t begin = 0; begin < a.rows; begin += kMostRows) {
      run_rows(begin, std::min(begin + kMostRows, a.rows), threads);
    }
    return 0;
  }

 private:
  using PackedVectors = typename P::PackedVectors;

  struct Work {
    Visited* experts;
    Visit* visits;
    int64_t *first, *next;  // [experts + 1]
    PackedVectors *x, *h;   // of each expert's visits
    int64_t num_experts;
  };

  int64_t id(int64_t i) const {
    return a.id_bytes == 4 ? static_cast<const int32_t*>(a.ids)[i]
                           : static_cast<const int64_t*>(a.ids)[i];
  }
  const T* w13(int64_t expert, int64_t feature) const {
    return static_cast<const T*>(a.w13) + (expert * 2 * a.inter + feature) * a.hidden;
  }
  const T* w2(int64_t expert, int64_t feature) const {
    return static_cast<const T*>(a.w2) + (expert * a.hidden + feature) * a.inter;
  }

  void run_rows(int64_t begin, int64_t end, int64_t threads) const;
  void group(int64_t begin, int64_t end, Work& work) const;
  void activate(const Work& work, int64_t index, int64_t panel, float* sums) const;
  void sum(const Work& work, int64_t begin, int64_t end, int64_t panel, float* sums,
           float* total) const;

  const ExpertsArgs& a;
};

// Sorts the visits of rows [begin, end) by expert, then by row.
template <class T, class P>
void Experts<T, P>::group(int64_t begin, int64_t end, Work& work) const {
  std::fill(work.first, work.first + a.experts + 1, 0);
  for (int64_t i = begin * a.top_k; i < end * a.top_k; ++i) {
    if (id(i) < a.experts) ++work.first[id(i) + 1];
  }
  int64_t x = 0, h = 0;
  work.num_experts = 0;
  for (int64_t e = 0; e < a.experts; ++e) {
    const int64_t count = work.first[e + 1];
    work.first[e + 1] += work.first[e];
    work.next[e] = work.first[e];
    if (count == 0) continue;
    work.experts[work.num_experts++] = {e, work.first[e], count, x, h};
    x += P::packed_size(count, a.hidden);
    h += P::packed_size(count, a.inter);
  }
  for (int64_t i = begin * a.top_k; i < end * a.top_k; ++i) {
    if (id(i) < a.experts) work.visits[work.next[id(i)]++] = {i / a.top_k, a.weights[i]};
  }
}

template <class T, class P>
void Experts<T, P>::run_rows(int64_t begin, int64_t end, int64_t threads) const {
  static thread_local Scratch list_scratch, packed_scratch;
  const int64_t visits = (end - begin) * a.top_k, most = std::min(visits, a.experts);
  Work work = carve(list_scratch, [&](Arena& arena) {
    Work w{};
    w.experts = arena.take<Visited>(most);
    w.visits = arena.take<Visit>(visits);
    w.first = arena.take<int64_t>(a.experts + 1);
    w.next = arena.take<int64_t>(a.experts + 1);
    return w;
  });
  group(begin, end, work);
  // Each expert's visits may be padded to a whole tile.
  const int64_t padded = P::packed_size(1, 1) == 1 ? visits : visits + most * kRowGroup;
  std::tie(work.x, work.h) = carve(packed_scratch, [&](Arena& arena) {
    return std::pair{arena.take<PackedVectors>(P::packed_size(padded, a.hidden)),
                     arena.take<PackedVectors>(P::packed_size(padded, a.inter))};
  });
  run_tasks(work.num_experts, end - begin <= kSerialPack ? 1 : threads, [&](TaskQueue::Hand& hand) {
    for (int64_t index; hand.take(index);) {
      const Visited& e = work.experts[index];
      for (int64_t g = 0; g < e.count; ++g) {
        const T* x = static_cast<const T*>(a.x) + work.visits[e.first + g].row * a.x_stride;
        P::pack_vector(x, g, 0, a.hidden, a.hidden, work.x + e.x);
      }
    }
  });
  const int64_t inter_panels = a.inter / kPanel;
  run_tasks(work.num_experts * inter_panels, threads, [&](TaskQueue::Hand& hand) {
    static thread_local Scratch scratch;
    float* const sums = scratch.get<float>(2 * kBlock * kPanel);
    P::begin();
    for (int64_t task; hand.take(task);) {
      activate(work, task / inter_panels, task % inter_panels * kPanel, sums);
    }
    P::end();
  });
  run_tasks(a.hidden / kPanel, threads, [&](TaskQueue::Hand& hand) {
    static thread_local Scratch scratch;
    float* const sums = scratch.get<float>((kBlock + end - begin) * kPanel);
    P::begin();
    for (int64_t task; hand.take(task);) {
      sum(work, begin, end, task * kPanel, sums, sums + kBlock * kPanel);
    }
    P::end();
  });
}

// h = silu(gate) * up of one expert's visits, features [panel, panel + kPanel).
template <class T, class P>
void Experts<T, P>::activate(const Work& work, int64_t index, int64_t panel, float* sums) const {
  const Visited& e = work.experts[index];
  const MatrixRows<T> gate{w13(e.expert, panel), kPanel, a.hidden};
  const MatrixRows<T> up{w13(e.expert, a.inter + panel), kPanel, a.hidden};
  float* const ups = sums + kBlock * kPanel;
  for (int64_t first = 0; first < e.count; first += kBlock) {
    const int64_t count = std::min(kBlock, e.count - first);
    const PackedVectors* x = work.x + e.x + P::packed_size(first, a.hidden);
    P::dots(gate, x, count, a.hidden, sums, kPanel, w13(e.expert, panel + kPanel));
    P::dots(up, x, count, a.hidden, ups, kPanel, w13(e.expert, a.inter + panel + kPanel));
    for (int64_t g = 0; g < count; ++g) {
      alignas(64) T h[kPanel];
      for (int64_t i = 0; i < kPanel; i += kLanes) {
        const vfloat v = load(sums + g * kPanel + i);
        store(h + i, v / (exp(-v) + 1.0f) * load(ups + g * kPanel + i));
      }
      P::pack_vector(h, first + g, panel, kPanel, a.inter, work.h + e.h);
    }
  }
}

// out of rows [begin, end), features [panel, panel + kPanel).
template <class T, class P>
void Experts<T, P>::sum(const Work& work, int64_t begin, int64_t end, int64_t panel, float* sums,
                        float* total) const {
  std::fill(total, total + (end - begin) * kPanel, 0.0f);
  for (int64_t index = 0; index < work.num_experts; ++index) {
    const Visited& e = work.experts[index];
    const bool is_last = index + 1 == work.num_experts;
    const T* next = is_last ? w2(work.experts[0].expert, panel + kPanel)
                            : w2(work.experts[index + 1].expert, panel);
    const MatrixRows<T> down{w2(e.expert, panel), kPanel, a.inter};
    for (int64_t first = 0; first < e.count; first += kBlock) {
      const int64_t count = std::min(kBlock, e.count - first);
      P::dots(down, work.h + e.h + P::packed_size(first, a.inter), count, a.inter, sums, kPanel,
              next);
      for (int64_t g = 0; g < count; ++g) {
        const Visit& visit = work.visits[e.first + first + g];
        float* to = total + (visit.row - begin) * kPanel;
        for (int64_t i = 0; i < kPanel; i += kLanes) {
          store(to + i, fma(load(sums + g * kPanel + i), splat(visit.weight), load(to + i)));
        }
      }
    }
  }
  for (int64_t row = begin; row < end; ++row) {
    T* out = static_cast<T*>(a.out) + row * a.hidden + panel;
    for (int64_t i = 0; i < kPanel; i += kLanes) {
      store(out + i, load(total + (row - begin) * kPanel + i));
    }
  }
}

template <class T>
int64_t experts(const ExpertsArgs& args) {
#ifdef ATOM_TILE_PRODUCTS
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (Tiles::is_permitted()) return Experts<T, Tiles>(args).run();
  }
#endif
  return Experts<T, Vectors<T>>(args).run();
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_moe_experts_float32(const atom::ExpertsArgs* args) {
  return atom::experts<float>(*args);
}
ATOM_EXPORT int64_t atom_moe_experts_bfloat16(const atom::ExpertsArgs* args) {
  return atom::experts<atom::bfloat16>(*args);
}
#if defined(__F16C__) || defined(__aarch64__)
ATOM_EXPORT int64_t atom_moe_experts_float16(const atom::ExpertsArgs* args) {
  return atom::experts<atom::float16>(*args);
}
#endif
