// Linear layers and logits with quantised weights.
#include <algorithm>

#include "parallel.h"
#include "quant/args.h"
#include "quant/codes.h"
#include "quant/groups.h"
#include "quant/numbers.h"

namespace atom {
namespace {

struct QuantLinearArgs {
  const void* x;     // [rows, in_features], rows `x_stride` elements apart
  PackedTensors w;
  const void* bias;  // [outs] of the type of x, or null
  void* out;         // [rows, outs], rows `out_stride` elements apart
  int64_t rows, x_stride, out_stride;
  PackedSizes sizes;
  double fixed_scale;
  int64_t threads;
};

// Below this many multiplications one thread is done before others have woken up.
constexpr int64_t kSerialWork = 1 << 16;
// Up to so many rows each thread packs them for itself.
constexpr int64_t kPackAlone = 8;
// Rows of inputs that are packed at once, and those of them that pass by weights together.
constexpr int64_t kPackedRows = 1024, kBlockRows = 256;
constexpr int64_t kTaskBytes = 16 * 1024;
// A block's inputs that pairs of panels read from the second cache, one pair after the other, and panels
// of such a task: the more, the fewer inputs come from memory, but each thread needs some tasks.
constexpr int64_t kRangeBytes = 512 * 1024, kRangePanels = 32, kRangeTasks = 4;

template <class Out>
void multiply_bfloat16(const QuantLinearArgs& a) {
  const LinearArgs args{a.x,          nullptr,    a.bias,       a.out,    a.rows, a.sizes.in_features,
                        a.sizes.outs, a.x_stride, a.out_stride, a.threads};
  atom::multiply_bfloat16(args, matrix_of(a.w, a.sizes, 0), a.w.order, std::is_same_v<Out, float>);
}

template <class T, class Out>
class Product {
 public:
  explicit Product(const QuantLinearArgs& a)
      : a_(a), w_(matrix_of(a.w, a.sizes, 0)), with_tiles_(takes_tiles<T>(a.sizes, a.rows)),
        in_groups_(!with_tiles_ && takes_groups(a.sizes.input_kind, a.rows)),
        inputs_(inputs_of(a.x, a.x_stride, a.w, a.sizes, a.fixed_scale, w_,
                          with_tiles_ ? tile_rows_of(a.sizes.input_kind, a.sizes.span, a.sizes.inputs, a.rows)
                                      : 0)) {}

  void run() {
    if (a_.rows == 0) return;
    const bool serial = a_.rows * w_.inputs * w_.outs < kSerialWork;
    threads_ = serial ? 1 : a_.threads;
    if (a_.rows <= kPackAlone) return multiply(0, a_.rows, nullptr);
    if (in_groups_) return run_groups();
    static thread_local Scratch scratch;
    for (int64_t first = 0; first < a_.rows; first += kPackedRows) {
      const int64_t rows = std::min(kPackedRows, a_.rows - first);
      uint8_t* packed = scratch.get<uint8_t>(packed_bytes(rounded(rows)));
      run_shares((rows + 1) / 2, threads_, [&](int64_t begin, int64_t end) {
        for (int64_t row = 2 * begin; row < std::min(2 * end, rows); ++row) pack(first, row, rows, packed);
      });
      multiply(first, rows, packed);
    }
  }

 private:
  // Rows that have places: tiles are whole.
  static int64_t rounded(int64_t rows) { return (rows + kTileSide - 1) / kTileSide * kTileSide; }
  int64_t packed_bytes(int64_t rows) const {
    return rows * (inputs_.row_bytes() + inputs_.spans() * int64_t(sizeof(Span) + sizeof(float)));
  }
  Span* spans(uint8_t* packed, int64_t rows) const {
    return reinterpret_cast<Span*>(packed + rounded(rows) * inputs_.row_bytes());
  }
  float* sums(uint8_t* packed, int64_t rows) const {
    if (!inputs_.has_sums()) return nullptr;
    return reinterpret_cast<float*>(spans(packed, rows) + rounded(rows) * inputs_.spans());
  }
  void pack(int64_t first, int64_t row, int64_t rows, uint8_t* packed) const {
    pack_row<T>(inputs_, first + row, row, packed, spans(packed, rows), sums(packed, rows));
  }

  // Rows from `first` on. packed: so many, or null. A task is some panels times a block of them.
  void multiply(int64_t first, int64_t rows, uint8_t* shared) const {
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    const int64_t block_rows = rounded((rows + blocks - 1) / blocks);
    const int64_t ranges = ranges_of(block_rows);
    const int64_t panels = w_.panels(), fair = panels * blocks / (kRangeTasks * threads_) / 2 * 2;
    const int64_t together = std::max<int64_t>(
        ranges == 1 ? 2 : std::min(std::max<int64_t>(2, fair), kRangePanels),
        kTaskBytes / std::max<int64_t>(1, w_.panel_bytes()) / 2 * 2);
    const int64_t groups = (panels + together - 1) / together;
    run_tasks(blocks * groups, threads_, [&](TaskQueue::Hand& hand) {
      static thread_local Scratch alone, sums;
      uint8_t* packed = shared;
      if (packed == nullptr) {
        packed = alone.get<uint8_t>(packed_bytes(rounded(rows)));
        for (int64_t row = 0; row < rows; ++row) pack(first, row, rows, packed);
      }
      const QuantRows all = inputs_.rows(packed, spans(packed, rows), this->sums(packed, rows));
      const int64_t pair_sums = block_rows * 2 * kLanes;
      float* panel_sums = sums.get<float>(ranges == 1 ? pair_sums : pair_sums * together / 2);
      if (with_tiles_) begin_tiles(all);
      for (int64_t task; hand.take(task);) {
        const int64_t row = task / groups * block_rows, count = std::min(block_rows, rows - row);
        QuantRows x = all;
        x.inputs = inputs_.place(packed, row);
        x.spans += row * inputs_.spans();
        if (x.sums != nullptr) x.sums += row * inputs_.spans();
        const int64_t begin = task % groups * together, end = std::min(begin + together, panels);
        for (int64_t range = 0; range < ranges; ++range) {
          const SpanRange spans{inputs_.spans() * range / ranges, inputs_.spans() * (range + 1) / ranges};
          float* to = panel_sums;
          for (int64_t panel = begin; panel < end;) {
            const int64_t at_once =
                with_tiles_ ? 2 : std::min(panels_together(x.kind, count), end - panel);
            if (with_tiles_) multiply_two_panels(w_, panel, x, count, spans, to);
            else multiply_panels(w_, panel, at_once, x, count, to);
            if (range == ranges - 1) finish(at_once, first + row, count, panel, to);
            panel += at_once;
            if (ranges > 1) to += pair_sums;
          }
        }
      }
      if (with_tiles_) end_tiles();
    });
  }

  // Ranges of spans, so that a block of rows has few bytes of inputs in each.
  int64_t ranges_of(int64_t block_rows) const {
    const QuantRows x = inputs_.rows(nullptr, nullptr);
    if (!with_tiles_ || !takes_ranges(w_, x, block_rows)) return 1;
    const int64_t ranges = block_rows * inputs_.row_bytes() / kRangeBytes;
    return std::max<int64_t>(1, std::min(ranges, inputs_.spans() / 2));
  }

  void finish(int64_t panels, int64_t first, int64_t rows, int64_t panel, const float* sums) const {
    if (panels == 2) finish<2>(first, rows, panel, sums);
    else finish<1>(first, rows, panel, sums);
  }

  // Stores `kCount` panels of sums, which lie [rows, kCount, kLanes]; what is beyond the last output
  // is left out.
  template <int kCount>
  void finish(int64_t first, int64_t rows, int64_t panel, const float* sums) const {
    const int64_t n = panel * kLanes;
    Out* out = static_cast<Out*>(a_.out) + first * a_.out_stride + n;
    vfloat bias[kCount] = {};
    for (int i = 0; i < kCount && a_.bias != nullptr; ++i) {
      const int64_t left = w_.outs - n - i * kLanes;
      if (left > 0) bias[i] = load_some(static_cast<const T*>(a_.bias) + n + i * kLanes, left);
    }
    const bool whole = n + kCount * kLanes <= w_.outs;
    for (int64_t m = 0; m < rows; ++m, out += a_.out_stride, sums += kCount * kLanes) {
      ATOM_UNROLL for (int i = 0; i < kCount; ++i) {
        const vfloat sum = load(sums + i * kLanes) + bias[i];
        const int64_t left = w_.outs - n - i * kLanes;
        if (whole) store_rounded(out + i * kLanes, sum);
        else if (left > 0) store_rounded_some(out + i * kLanes, sum, left);
      }
    }
  }

  // All rows in groups, a block of them at a time.
  void run_groups() const {
    static thread_local Scratch scratch;
    const int64_t bytes = group_bytes(inputs_);
    for (int64_t first = 0; first < a_.rows; first += kPackedRows) {
      const int64_t rows = std::min(kPackedRows, a_.rows - first);
      const int64_t groups = (rows + kGroupRows - 1) / kGroupRows;
      uint8_t* packed = scratch.get<uint8_t>(groups * bytes);
      run_shares(groups, threads_, [&](int64_t begin, int64_t end) {
        for (int64_t group = begin; group < end; ++group) {
          const int64_t row = group * kGroupRows;
          pack_group<T>(inputs_, first + row, std::min(kGroupRows, rows - row), packed + group * bytes);
        }
      });
      multiply_groups(first, rows, packed);
    }
  }

  // Rows from `first` on. A task is two panels times a block of groups.
  void multiply_groups(int64_t first, int64_t rows, const uint8_t* packed) const {
    const int64_t pairs = (w_.panels() + 1) / 2, bytes = group_bytes(inputs_);
    const int64_t groups = (rows + kGroupRows - 1) / kGroupRows;
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    run_tasks(blocks * pairs, threads_, [&](TaskQueue::Hand& hand) {
      alignas(64) float sums[kGroupRows * 2 * kLanes];
      for (int64_t task; hand.take(task);) {
        const int64_t block = task / pairs, panel = task % pairs * 2;
        const int64_t begin = groups * block / blocks, end = groups * (block + 1) / blocks;
        const GroupProduct product(w_, panel, inputs_.span);
        for (int64_t group = begin; group < end; ++group) {
          product.fetch_next(group - begin, end - begin);
          product.multiply(packed + group * bytes, sums);
          const int64_t row = group * kGroupRows, count = std::min(kGroupRows, rows - row);
          finish(product.panels(), first + row, count, panel, sums);
        }
      }
    });
  }

  const QuantLinearArgs& a_;
  const QuantMatrix w_;
  const bool with_tiles_, in_groups_;
  const QuantInputs inputs_;
  int64_t threads_ = 1;
};

template <class T, class Out>
int64_t multiply(const QuantLinearArgs& a) {
  if (a.sizes.input_kind == Inputs::kBfloat16) multiply_bfloat16<Out>(a);
  else Product<T, Out>(a).run();
  return 0;
}

}  // namespace
}  // namespace atom

#define ATOM_QUANT(name, type)                                                        \
  ATOM_EXPORT int64_t atom_quant_linear_##name(const atom::QuantLinearArgs* args) {   \
    return atom::multiply<type, type>(*args);                                         \
  }                                                                                   \
  ATOM_EXPORT int64_t atom_quant_logits_##name(const atom::QuantLinearArgs* args) {   \
    return atom::multiply<type, float>(*args);                                        \
  }

ATOM_QUANT(float32, float)
ATOM_QUANT(bfloat16, atom::bfloat16)
#if defined(__F16C__) || defined(__aarch64__)
ATOM_QUANT(float16, atom::float16)
#endif
