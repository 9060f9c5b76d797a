// What products of codes and inputs become at the end of a span; the same for all kernels.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "quant/codes.h"
#include "quant/matrix.h"

namespace atom {

ATOM_INLINE vfloat load_numbers(const void* from, int64_t at, Number type) {
  switch (type) {
    case Number::kBfloat16: return load(static_cast<const bfloat16*>(from) + at);
#if defined(__F16C__) || defined(__aarch64__)
    case Number::kFloat16: return load(static_cast<const float16*>(from) + at);
#endif
    case Number::kInt8: return convert(load_bytes(static_cast<const int8_t*>(from) + at));
    default: return load(static_cast<const float*>(from) + at);
  }
}

// The numbers of one group of weights.
struct Factors {
  vfloat scale, shift;
};

ATOM_INLINE Factors load_factors(const QuantMatrix& w, int64_t panel, int64_t input) {
  const int64_t at = (panel * w.groups + group_of(input, w.group)) * kLanes;
  Factors f{load_numbers(w.scale, at, w.scale_type), vfloat{}};
  if (w.shift != nullptr) f.shift = load_numbers(w.shift, at, w.shift_type);
  if (w.super_scale != nullptr) {
    const int64_t above = (panel * w.super_groups + group_of(input, w.super_group)) * kLanes;
    f.scale *= load_numbers(w.super_scale, above, Number::kFloat16);
    if (w.has_offsets) f.shift *= load_numbers(w.super_offset, above, Number::kFloat16);
  }
  return f;
}

// Fetches what `load_factors` will read, except for the few factors of scales.
ATOM_INLINE void fetch_factors(const QuantMatrix& w, int64_t panel, int64_t input) {
  const int64_t at = (panel * w.groups + group_of(input, w.group)) * kLanes;
  const auto fetch = [&](const void* from, Number type) {
    __builtin_prefetch(static_cast<const uint8_t*>(from) + at * bytes_of(type));
  };
  fetch(w.scale, w.scale_type);
  if (w.shift != nullptr) fetch(w.shift, w.shift_type);
}

// What sums of products are multiplied with, and what sums of inputs are: an offset instead of a zero.
ATOM_INLINE Factors product_factors(const QuantMatrix& w, int64_t panel, int64_t input) {
  Factors f = load_factors(w, panel, input);
  if (w.has_shift() && !w.has_offsets) f.shift *= -f.scale;
  return f;
}

// Factors of the spans of panels, converted once for all rows.
class FactorTable {
 public:
  // Of `panels` panels from `panel` on, [spans, panels].
  FactorTable(const QuantMatrix& w, int64_t panel, int64_t panels, int64_t span) {
    static thread_local Scratch scratch;
    const int64_t spans = w.inputs / span;
    all_ = scratch.get<Factors>(spans * panels);
    for (int64_t i = 0; i < spans; ++i) {
      for (int64_t p = 0; p < panels; ++p) {
        fetch_factors(w, panel + panels + p, i * span);
        all_[i * panels + p] = product_factors(w, panel + p, i * span);
      }
    }
  }
  const Factors* of_span(int64_t span, int64_t panels) const { return all_ + span * panels; }

 private:
  Factors* all_;
};

// Factors of the next few spans of P panels, converted with one look at their types.
template <int P>
class NearFactors {
 public:
  static constexpr int64_t kSpans = 16;

  NearFactors(const QuantMatrix& w, int64_t panel, int64_t span, bool fetches)
      : w_(w), panel_(panel), span_(span), spans_(w.inputs / span), in_group_(w.group / span),
        fetches_(fetches) {}

  // [P]. Spans are asked for in their order.
  ATOM_INLINE const Factors* of_span(int64_t span) {
    if (span % kSpans == 0) fill(span);
    return near_[span % kSpans];
  }

 private:
  // Beyond the last panel it once more.
  int64_t panel_of(int64_t p) const { return std::min(panel_ + p, w_.panels() - 1); }

  void fill(int64_t first) {
    const int64_t count = std::min(kSpans, spans_ - first);
    for (int p = 0; p < P; ++p) {
      fill(first, count, p, w_.scale, w_.scale_type, w_.super_scale, &Factors::scale);
      if (w_.shift == nullptr) continue;
      const float16* above = w_.has_offsets ? w_.super_offset : nullptr;
      fill(first, count, p, w_.shift, w_.shift_type, above, &Factors::shift);
      if (w_.has_offsets) continue;
      for (int64_t i = 0; i < count; ++i) near_[i][p].shift *= -near_[i][p].scale;
    }
  }

  void fill(int64_t first, int64_t count, int p, const void* from, Number type, const float16* above,
            vfloat Factors::*member) {
    const auto group = [&](int64_t span) { return in_group_ == 1 ? span : group_of(span, in_group_); };
    const int64_t at = panel_of(p) * w_.groups;
    if (fetches_) {
      const int64_t lanes = kLanes * bytes_of(type), next = (at + P * w_.groups + group(first)) * lanes;
      for (int64_t i = 0; i < (group(first + count - 1) - group(first) + 1) * lanes; i += 64) {
        __builtin_prefetch(static_cast<const uint8_t*>(from) + next + i);
      }
    }
    const auto convert = [&](auto load_group) {
      if (in_group_ == 1) {
        for (int64_t i = 0; i < count; ++i) near_[i][p].*member = load_group((at + first + i) * kLanes);
      } else {
        for (int64_t i = 0; i < count; ++i) near_[i][p].*member = load_group((at + group(first + i)) * kLanes);
      }
    };
    switch (type) {
      case Number::kBfloat16:
        convert([&](int64_t i) { return load_numbers(from, i, Number::kBfloat16); });
        break;
      case Number::kFloat16:
        convert([&](int64_t i) { return load_numbers(from, i, Number::kFloat16); });
        break;
      case Number::kInt8:
        convert([&](int64_t i) { return load_numbers(from, i, Number::kInt8); });
        break;
      default: convert([&](int64_t i) { return load_numbers(from, i, Number::kFloat32); });
    }
    if (above == nullptr) return;
    above += panel_of(p) * w_.super_groups * kLanes;
    for (int64_t i = 0, end; i < count; i = end) {
      const int64_t super = group_of((first + i) * span_, w_.super_group);
      end = std::min(count, group_of((super + 1) * w_.super_group, span_) - first);
      const vfloat factor = load_numbers(above, super * kLanes, Number::kFloat16);
      for (int64_t j = i; j < end; ++j) near_[j][p].*member *= factor;
    }
  }

  const QuantMatrix& w_;
  const int64_t panel_, span_, spans_, in_group_;
  const bool fetches_;
  Factors near_[kSpans][P];
};

// total + what one span adds, where `products` are sums of codes times inputs.
template <Inputs kKind>
ATOM_INLINE vfloat add_span(vfloat total, vfloat products, const Factors& f, const Span& x,
                            bool has_shift) {
  if (has_shift) total = fma(f.shift, splat(x.sum), total);
  return fma(products, scales_row(kKind) ? f.scale : f.scale * x.scale, total);
}

}  // namespace atom
