// Experts: tokens are grouped by expert, so each expert's weights are read once for all its tokens.
//
// A token's sum runs over its experts in the order of their ids, in float32, so its bits do not
// depend on other tokens.
#include <tuple>

#include "moe/moe_visits.h"
#include "linear/product.h"

namespace atom {
namespace {

struct ExpertsArgs {
  const void* x;         // [rows, hidden], rows x_stride elements apart
  const void* w13;       // [experts, 2 * inter, hidden]: gate above up
  const void* w2;        // [experts, hidden, inter]
  const float* weights;  // [rows, top_k]
  const void* ids;       // [rows, top_k] int32 or int64; beyond the experts: adds nothing
  void* out;             // [rows, hidden]
  const void* bias13;    // [experts, 2 * inter] of experts with biases and a clamped gate, else null
  const void* bias2;     // [experts, hidden]
  int64_t rows, hidden, inter, experts, top_k, x_stride, id_bytes, threads;
  double alpha, limit;   // of the clamped gate; without biases, beta and linear beta of the situ
                         // gate, or 0 for silu

  bool is_clamped() const { return bias13 != nullptr; }
  bool is_situ() const { return !is_clamped() && alpha != 0; }
};

// Tokens whose activations are kept at a time.
constexpr int64_t kMostRows = 1024;
// Multiplications below which one thread is done before others have woken up.
constexpr int64_t kSerialWork = 1 << 16;
// Activations of so few bytes are packed by the caller alone.
constexpr int64_t kSerialPacking = 64 * 1024;

template <class T, class Product>
class Experts {
 public:
  explicit Experts(const ExpertsArgs& args)
      : a(args), choices_{a.weights, a.ids, a.rows, a.top_k, a.experts, a.id_bytes} {}

  // 0, or 1 + the row that has a negative id.
  int64_t run() {
    if (const int64_t wrong = choices_.wrong()) return wrong;
    const int64_t work = a.rows * a.top_k * a.hidden * a.inter;
    const int64_t threads = work < kSerialWork ? 1 : std::max<int64_t>(1, team_size(a.threads));
    for (int64_t begin = 0; begin < a.rows; begin += kMostRows) {
      run_rows(begin, std::min(begin + kMostRows, a.rows), threads);
    }
    return 0;
  }

 private:
  using Session = typename Product::Session;

  struct Work {
    Visits visits;
    int64_t x_bytes, h_bytes;
    char *x, *h;  // packed, expert by expert
    T* plain_h;   // [visits, inter]
  };

  // The products of one expert's visits.
  Product into(const Visited& e) const { return Product(e.count, a.hidden); }
  Product out_of(const Visited& e) const { return Product(e.count, a.inter); }

  void run_rows(int64_t begin, int64_t end, int64_t threads) const;
  void pack_inputs(const Work& work, const Visited& e) const;
  void activate(const Work& work, const Visited& e, int64_t panel) const;
  void sum(const Work& work, int64_t begin, int64_t end, int64_t first, int64_t last) const;

  const ExpertsArgs& a;
  const Choices choices_;
};

template <class T, class Product>
void Experts<T, Product>::run_rows(int64_t begin, int64_t end, int64_t threads) const {
  static thread_local Scratch list_scratch, packed_scratch;
  Work work{};
  work.visits = group_visits(choices_, begin, end, list_scratch, [&](Visited& e) {
    e.x = work.x_bytes, e.h = work.h_bytes;
    work.x_bytes += (into(e).packed_bytes() + 63) / 64 * 64;
    work.h_bytes += (out_of(e).packed_bytes() + 63) / 64 * 64;
  });
  const Visits& visits = work.visits;
  std::tie(work.x, work.h, work.plain_h) = carve(packed_scratch, [&](Arena& arena) {
    return std::tuple{arena.take<char>(work.x_bytes), arena.take<char>(work.h_bytes),
                      arena.take<T>(visits.num_visits * a.inter)};
  });
  const auto for_experts = [&](int64_t bytes, const auto& body) {
    run_shares(visits.num_experts, bytes < kSerialPacking ? 1 : threads,
               [&](int64_t first, int64_t last) {
                 for (int64_t i = first; i < last; ++i) body(visits.experts[i]);
               });
  };
  for_experts(work.x_bytes, [&](const Visited& e) { pack_inputs(work, e); });
  const int64_t panels = (a.inter + kPanel - 1) / kPanel;
  run_tasks(visits.num_experts * panels, threads, [&](TaskQueue::Hand& hand) {
    for (int64_t task; hand.take(task);) {
      activate(work, visits.experts[task / panels], task % panels * kPanel);
    }
  });
  for_experts(work.h_bytes, [&](const Visited& e) {
    out_of(e).pack(work.plain_h + e.first * a.inter, a.inter, 0, e.count, work.h + e.h);
  });
  // A few panels at a time stream better than one.
  const int64_t width = kPanel * std::clamp<int64_t>(a.hidden / kPanel / (8 * threads), 1, 4);
  run_tasks((a.hidden + width - 1) / width, threads, [&](TaskQueue::Hand& hand) {
    for (int64_t task; hand.take(task);) {
      sum(work, begin, end, task * width, std::min((task + 1) * width, a.hidden));
    }
  });
}

template <class T, class Product>
void Experts<T, Product>::pack_inputs(const Work& work, const Visited& e) const {
  static thread_local Scratch scratch;
  T* const rows = scratch.get<T>(e.count * a.hidden);
  for (int64_t i = 0; i < e.count; ++i) {
    const T* x = static_cast<const T*>(a.x) + work.visits.list[e.first + i].row * a.x_stride;
    std::memcpy(rows + i * a.hidden, x, a.hidden * sizeof(T));
  }
  into(e).pack(rows, a.hidden, 0, e.count, work.x + e.x);
}

// h = silu(gate) * up, or another gate, of one expert's visits, a panel of features.
template <class T, class Product>
void Experts<T, Product>::activate(const Work& work, const Visited& e, int64_t panel) const {
  const Product product = into(e);
  const Session session(product);
  const T* gate = static_cast<const T*>(a.w13) + (e.expert * 2 * a.inter + panel) * a.hidden;
  const T* up = gate + a.inter * a.hidden;
  const int64_t outs = std::min(kPanel, a.inter - panel);
  alignas(64) float gates[Product::kMostChunk * kPanel], ups[Product::kMostChunk * kPanel];
  product.for_chunks([&](int64_t first, int64_t count) {
    product.multiply(work.x + e.x, first, count, gate, outs, gates);
    product.multiply(work.x + e.x, first, count, up, outs, ups);
    for (int64_t i = 0; i < count; ++i) {
      T* h = work.plain_h + (e.first + first + i) * a.inter + panel;
      if (a.is_clamped()) {
        const T* bias = static_cast<const T*>(a.bias13) + e.expert * 2 * a.inter + panel;
        for (int64_t j = 0; j < outs; j += kLanes) {
          const vfloat g = load(gates + i * kPanel + j) + load_some(bias + j, outs - j);
          const vfloat u = load(ups + i * kPanel + j) + load_some(bias + a.inter + j, outs - j);
          store_some(h + j, clamped_gate(g, u, float(a.alpha), float(a.limit)), outs - j);
        }
        continue;
      }
      for (int64_t j = 0; j < outs; j += kLanes) {
        const vfloat g = load(gates + i * kPanel + j), u = load(ups + i * kPanel + j);
        store_some(h + j, a.is_situ() ? situ_gate(g, u, float(a.alpha), float(a.limit))
                                      : g / (exp(-g) + 1.0f) * u, outs - j);
      }
    }
  });
}

// Features [first, last) of what rows [begin, end) get.
template <class T, class Product>
void Experts<T, Product>::sum(const Work& work, int64_t begin, int64_t end, int64_t first,
                              int64_t last) const {
  static thread_local Scratch scratch;
  const int64_t width = (last - first + kPanel - 1) / kPanel * kPanel;
  float* const totals = scratch.get<float>((end - begin) * width);
  std::fill(totals, totals + (end - begin) * width, 0.0f);
  for (int64_t index = 0; index < work.visits.num_experts; ++index) {
    const Visited& e = work.visits.experts[index];
    const Product product = out_of(e);
    const Session session(product);
    const T* w2 = static_cast<const T*>(a.w2) + e.expert * a.hidden * a.inter;
    multiply(product, work.h + e.h, MatrixRows<T>{w2, a.inter}, first, last,
             [&](int64_t m, int64_t count, int64_t n, int64_t outs, const float* sums) {
               for (int64_t i = 0; i < count; ++i) {
                 const Visit& visit = work.visits.list[e.first + m + i];
                 float* to = totals + (visit.row - begin) * width + n - first;
                 if (a.is_clamped()) {
                   const T* bias = static_cast<const T*>(a.bias2) + e.expert * a.hidden + n;
                   for (int64_t j = 0; j < outs; j += kLanes) {
                     const vfloat y = load(sums + i * kPanel + j) + load_some(bias + j, outs - j);
                     store(to + j, fma(y, splat(visit.weight), load(to + j)));
                   }
                   continue;
                 }
                 for (int64_t j = 0; j < outs; j += kLanes) {
                   store(to + j, fma(load(sums + i * kPanel + j), splat(visit.weight),
                                     load(to + j)));
                 }
               }
             });
  }
  for (int64_t row = begin; row < end; ++row) {
    T* out = static_cast<T*>(a.out) + row * a.hidden;
    for (int64_t n = first; n < last; n += kLanes) {
      store_some(out + n, load(totals + (row - begin) * width + n - first), last - n);
    }
  }
}

template <class T>
int64_t experts(const ExpertsArgs& args) {
  int64_t wrong = 0;
  with_product<T>(0, 0, [&](const auto& product) {
    wrong = Experts<T, std::decay_t<decltype(product)>>(args).run();
  });
  return wrong;
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
