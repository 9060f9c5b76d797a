// Experts with quantised weights: as in moe.cpp, with the products of quant/linear.cpp.
#include <tuple>

#include "moe/moe_visits.h"
#include "quant/args.h"

namespace atom {
namespace {

struct QuantExpertsArgs {
  const void* x;       // [rows, hidden], rows x_stride elements apart
  PackedTensors w13;   // [experts] of [2 * inter, hidden]: gate above up
  PackedTensors w2;    // [experts] of [hidden, inter]
  const float* weights;
  const void* ids;     // as in Choices
  void* out;           // [rows, hidden]
  const void* bias13;  // [experts, 2 * inter] of experts with biases and a clamped gate, else null
  const void* bias2;   // [experts, hidden]
  int64_t rows, x_stride, top_k, experts, id_bytes;
  PackedSizes sizes13, sizes2;
  int64_t threads;
  double fixed_scale13, fixed_scale2;
  double alpha, limit;  // as in moe.cpp

  bool is_clamped() const { return bias13 != nullptr; }
  bool is_situ() const { return !is_clamped() && alpha != 0; }
};

// Tokens whose activations are kept at a time.
constexpr int64_t kMostRows = 1024;
// Multiplications below which one thread is done before others have woken up.
constexpr int64_t kSerialWork = 1 << 16;
// Inputs of so few elements are packed by the caller alone.
constexpr int64_t kSerialPacking = 16 * 1024;
constexpr int64_t kTaskBytes = 16 * 1024;

int64_t rounded_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }
int64_t panels_of(int64_t outs) { return (outs + kLanes - 1) / kLanes; }

// The products of some rows with one expert's matrix.
template <class T>
class Matrix {
 public:
  // x: [rows, in_features], `x_stride` elements apart.
  Matrix(const PackedTensors& tensors, const PackedSizes& sizes, double fixed_scale, int64_t expert,
         int64_t rows, const void* x, int64_t x_stride)
      : w_(matrix_of(tensors, sizes, expert)), rows_(rows),
        with_tiles_(takes_tiles<T>(sizes, rows)),
        inputs_(inputs_of(x, x_stride, tensors, sizes, fixed_scale, w_,
                          with_tiles_ ? tile_rows_of(sizes.input_kind, sizes.span, sizes.inputs, rows) : 0)) {}

  // Panels of one task, in pairs.
  int64_t together() const {
    const int64_t most = kTaskBytes / std::max<int64_t>(1, w_.panel_bytes()) / 2 * 2;
    return std::max<int64_t>(2, most);
  }
  int64_t packed_bytes() const {
    const int64_t span_bytes = sizeof(Span) + sizeof(float);
    return rounded_up(packed_rows() * (inputs_.row_bytes() + inputs_.spans() * span_bytes), 64);
  }
  // Packs row `from` of x as row `row` of the product.
  void pack(int64_t from, int64_t row, uint8_t* packed) const {
    pack_row<T>(inputs_, from, row, packed, spans(packed), sums(packed));
  }
  // `body(panel, count, sums)` for panels [first, last); sums [rows, count, kLanes]. The last count
  // may be one too large.
  template <class Body>
  void multiply(uint8_t* packed, int64_t first, int64_t last, const Body& body) const {
    static thread_local Scratch scratch;
    float* const sums = scratch.get<float>(rounded_up(rows_, 2 * kTileSide) * 2 * kLanes);
    const QuantRows x = inputs_.rows(packed, spans(packed), this->sums(packed));
    if (with_tiles_) begin_tiles(x);
    for (int64_t panel = first; panel < last;) {
      const int64_t count = with_tiles_ ? 2 : std::min(panels_together(x.kind, rows_), last - panel);
      if (with_tiles_) multiply_two_panels(w_, panel, x, rows_, {0, inputs_.spans()}, sums);
      else multiply_panels(w_, panel, count, x, rows_, sums);
      body(panel, count, sums);
      panel += count;
    }
    if (with_tiles_) end_tiles();
  }

 private:
  int64_t packed_rows() const { return rounded_up(rows_, kTileSide); }
  Span* spans(uint8_t* packed) const {
    return reinterpret_cast<Span*>(packed + packed_rows() * inputs_.row_bytes());
  }
  float* sums(uint8_t* packed) const {
    if (!inputs_.has_sums()) return nullptr;
    return reinterpret_cast<float*>(spans(packed) + packed_rows() * inputs_.spans());
  }

  const QuantMatrix w_;
  const int64_t rows_;
  const bool with_tiles_;
  const QuantInputs inputs_;
};

template <class T>
class QuantExperts {
 public:
  explicit QuantExperts(const QuantExpertsArgs& args)
      : a(args), hidden_(args.sizes2.outs), inter_(args.sizes2.in_features),
        choices_{args.weights, args.ids, args.rows, args.top_k, args.experts, args.id_bytes} {}

  // 0, or 1 + the row that has a negative id.
  int64_t run() const {
    if (const int64_t wrong = choices_.wrong()) return wrong;
    const int64_t work = a.rows * a.top_k * hidden_ * inter_;
    const int64_t threads = work < kSerialWork ? 1 : std::max<int64_t>(1, team_size(a.threads));
    for (int64_t begin = 0; begin < a.rows; begin += kMostRows) {
      run_rows(begin, std::min(begin + kMostRows, a.rows), threads);
    }
    return 0;
  }

 private:
  struct Work {
    Visits visits;
    int64_t x_bytes, h_bytes;
    uint8_t *x, *h;  // packed, expert by expert
    T* plain_h;      // [visits, inter]
  };

  Matrix<T> into(const Visited& e) const {
    return {a.w13, a.sizes13, a.fixed_scale13, e.expert, e.count, a.x, a.x_stride};
  }
  Matrix<T> out_of(const Visited& e, const T* plain_h) const {
    return {a.w2, a.sizes2, a.fixed_scale2, e.expert, e.count, plain_h, inter_};
  }

  void run_rows(int64_t begin, int64_t end, int64_t threads) const;
  void activate(const Work& work, const Visited& e, int64_t first, int64_t last) const;
  void sum(const Work& work, int64_t begin, int64_t end, int64_t first, int64_t last) const;

  const QuantExpertsArgs& a;
  const int64_t hidden_, inter_;
  const Choices choices_;
};

template <class T>
void QuantExperts<T>::run_rows(int64_t begin, int64_t end, int64_t threads) const {
  static thread_local Scratch list_scratch, packed_scratch;
  Work work{};
  work.visits = group_visits(choices_, begin, end, list_scratch, [&](Visited& e) {
    e.x = work.x_bytes, e.h = work.h_bytes;
    work.x_bytes += into(e).packed_bytes();
    work.h_bytes += out_of(e, nullptr).packed_bytes();
  });
  const Visits& visits = work.visits;
  std::tie(work.x, work.h, work.plain_h) = carve(packed_scratch, [&](Arena& arena) {
    return std::tuple{arena.take<uint8_t>(work.x_bytes), arena.take<uint8_t>(work.h_bytes),
                      arena.take<T>(visits.num_visits * inter_)};
  });
  // body(expert) for all of them.
  const auto pack = [&](int64_t width, const auto& body) {
    const int64_t packers = visits.num_visits * width < kSerialPacking ? 1 : threads;
    run_shares(visits.num_experts, packers, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) body(visits.experts[i]);
    });
  };
  pack(hidden_, [&](const Visited& e) {
    const Matrix<T> w13 = into(e);
    for (int64_t i = 0; i < e.count; ++i) w13.pack(visits.list[e.first + i].row, i, work.x + e.x);
  });
  const int64_t panels = panels_of(hidden_);
  if (visits.num_experts == 0) return sum(work, begin, end, 0, panels);
  const int64_t of_inter = panels_of(inter_), wide = into(visits.experts[0]).together();
  const int64_t parts = (of_inter + wide - 1) / wide;
  run_tasks(visits.num_experts * parts, threads, [&](TaskQueue::Hand& hand) {
    for (int64_t task; hand.take(task);) {
      const int64_t first = task % parts * wide;
      activate(work, visits.experts[task / parts], first, std::min(first + wide, of_inter));
    }
  });
  pack(inter_, [&](const Visited& e) {
    const Matrix<T> w2 = out_of(e, work.plain_h + e.first * inter_);
    for (int64_t i = 0; i < e.count; ++i) w2.pack(i, i, work.h + e.h);
  });
  const int64_t width = out_of(visits.experts[0], nullptr).together();
  run_tasks((panels + width - 1) / width, threads, [&](TaskQueue::Hand& hand) {
    for (int64_t task; hand.take(task);) {
      sum(work, begin, end, task * width, std::min((task + 1) * width, panels));
    }
  });
}

// h = silu(gate) * up, or another gate, of one expert's visits, panels [first, last) of features.
template <class T>
void QuantExperts<T>::activate(const Work& work, const Visited& e, int64_t first,
                               int64_t last) const {
  static thread_local Scratch scratch;
  const Matrix<T> w13 = into(e);
  const int64_t width = rounded_up(last - first, 2) * kLanes;
  float* const gates = scratch.get<float>(e.count * width);
  w13.multiply(work.x + e.x, first, last, [&](int64_t panel, int64_t count, const float* sums) {
    for (int64_t m = 0; m < e.count; ++m) {
      for (int64_t i = 0; i < count; ++i) {
        store(gates + m * width + (panel - first + i) * kLanes, load(sums + (m * count + i) * kLanes));
      }
    }
  });
  const int64_t up = panels_of(inter_);  // inter is a multiple of kLanes
  w13.multiply(work.x + e.x, up + first, up + last, [&](int64_t panel, int64_t count, const float* sums) {
    for (int64_t m = 0; m < e.count; ++m) {
      T* const h = work.plain_h + (e.first + m) * inter_;
      for (int64_t i = 0; i < count && panel + i < up + last; ++i) {
        const vfloat g = load(gates + m * width + (panel - up - first + i) * kLanes);
        const vfloat u = load(sums + (m * count + i) * kLanes);
        const int64_t at = (panel - up + i) * kLanes;
        if (a.is_clamped()) {
          const T* bias = static_cast<const T*>(a.bias13) + e.expert * 2 * inter_ + at;
          store(h + at, clamped_gate(g + load(bias), u + load(bias + inter_), float(a.alpha),
                                     float(a.limit)));
        } else if (a.is_situ()) {
          store(h + at, situ_gate(g, u, float(a.alpha), float(a.limit)));
        } else {
          store(h + at, g / (exp(-g) + 1.0f) * u);
        }
      }
    }
  });
}

// Panels [first, last) of what rows [begin, end) get.
template <class T>
void QuantExperts<T>::sum(const Work& work, int64_t begin, int64_t end, int64_t first,
                          int64_t last) const {
  static thread_local Scratch scratch;
  const int64_t width = (last - first) * kLanes, rows = end - begin;
  float* const totals = scratch.get<float>(rows * width);
  std::fill(totals, totals + rows * width, 0.0f);
  for (int64_t index = 0; index < work.visits.num_experts; ++index) {
    const Visited& e = work.visits.experts[index];
    const Matrix<T> w2 = out_of(e, work.plain_h + e.first * inter_);
    w2.multiply(work.h + e.h, first, last, [&](int64_t panel, int64_t count, const float* sums) {
      for (int64_t m = 0; m < e.count; ++m) {
        const Visit& visit = work.visits.list[e.first + m];
        float* to = totals + (visit.row - begin) * width + (panel - first) * kLanes;
        for (int64_t i = 0; i < count && panel + i < last; ++i, to += kLanes) {
          vfloat y = load(sums + (m * count + i) * kLanes);
          if (a.is_clamped()) {
            const int64_t at = (panel + i) * kLanes;
            y += load_some(static_cast<const T*>(a.bias2) + e.expert * hidden_ + at, hidden_ - at);
          }
          store(to, fma(y, splat(visit.weight), load(to)));
        }
      }
    });
  }
  for (int64_t row = begin; row < end; ++row) {
    T* const out = static_cast<T*>(a.out) + row * hidden_;
    for (int64_t n = first * kLanes; n < std::min(last * kLanes, hidden_); n += kLanes) {
      store_some(out + n, load(totals + (row - begin) * width + n - first * kLanes), hidden_ - n);
    }
  }
}

}  // namespace
}  // namespace atom

#define ATOM_QUANT_EXPERTS(name, type)                                                     \
  ATOM_EXPORT int64_t atom_quant_experts_##name(const atom::QuantExpertsArgs* args) {      \
    return atom::QuantExperts<type>(*args).run();                                          \
  }

ATOM_QUANT_EXPERTS(float32, float)
ATOM_QUANT_EXPERTS(bfloat16, atom::bfloat16)
#if defined(__F16C__) || defined(__aarch64__)
ATOM_QUANT_EXPERTS(float16, atom::float16)
#endif
