// The choice of experts, one token at a time. Of equal ones the first is chosen.
#include <algorithm>
#include <limits>

#include "arena.h"
#include "simd.h"

namespace atom {
namespace {

struct RouteArgs {
  const float* logits;  // [rows, experts]
  const float* bias;    // [experts], on the choice only; or null
  float* weights;       // [rows, top_k]
  int32_t* ids;         // [rows, top_k]
  int64_t rows, experts, top_k, groups, top_groups;
  int64_t softmax;      // 1, or 0 for sigmoid
  int64_t pair_scores;  // a group's score is the sum of its two best, not its best
  int64_t renormalize, threads;
  double scaling;
};

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Elements below which waking other threads costs more than it saves.
constexpr int64_t kSerialElements = 1 << 13;

void score_softmax(const float* logits, int64_t count, float* scores) {
  vfloat peaks = splat(kLowest);
  for (int64_t i = 0; i < count; ++i) scores[i] = logits[i];
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + count, scores + padded, kLowest);
  for (int64_t i = 0; i < padded; i += kLanes) peaks = max(load(scores + i), peaks);
  const float peak = maximum(peaks);
  vfloat totals = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const vfloat e = exp(load(scores + i) - peak);
    store(scores + i, e);
    totals += e;
  }
  const float total = sum(totals);
  for (int64_t i = 0; i < padded; i += kLanes) store(scores + i, load(scores + i) / total);
}

void score_sigmoid(const float* logits, int64_t count, float* scores) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store(scores + i, 1.0f / (exp(-load_some(logits + i, count - i)) + 1.0f));
  }
}

float group_score(const float* choice, int64_t count, bool pair) {
  float best = kLowest, second = kLowest;
  for (int64_t i = 0; i < count; ++i) {
    if (choice[i] > best) {
      second = best;
      best = choice[i];
    } else if (choice[i] > second) {
      second = choice[i];
    }
  }
  return pair ? best + second : best;
}

// The index of the largest value that is not taken, and takes it. NaN is the least.
int64_t take_largest(const float* values, bool* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (!taken[i] && (best < 0 || values[i] > values[best] || values[best] != values[best])) best = i;
  }
  taken[best] = true;
  return best;
}

void route_row(const RouteArgs& a, const float* logits, float* weights, int32_t* ids,
               float* scores, float* choice, bool* taken) {
  (a.softmax != 0 ? score_softmax : score_sigmoid)(logits, a.experts, scores);
  for (int64_t i = 0; i < a.experts; ++i) {
    choice[i] = a.bias == nullptr ? scores[i] : scores[i] + a.bias[i];
  }
  std::fill(taken, taken + a.experts, false);
  if (a.groups > 1) {
    const int64_t size = a.experts / a.groups;
    float* const values = choice + a.experts;
    bool* const chosen = taken + a.experts;
    for (int64_t g = 0; g < a.groups; ++g) {
      values[g] = group_score(choice + g * size, size, a.pair_scores != 0);
    }
    std::fill(chosen, chosen + a.groups, false);
    std::fill(taken, taken + a.experts, true);
    for (int64_t i = 0; i < a.top_groups; ++i) {
      const int64_t g = take_largest(values, chosen, a.groups);
      std::fill(taken + g * size, taken + (g + 1) * size, false);
    }
  }
  float total = 0.0f;
  for (int64_t k = 0; k < a.top_k; ++k) {
    ids[k] = int32_t(take_largest(choice, taken, a.experts));
    weights[k] = scores[ids[k]];
    total += weights[k];
  }
  const float factor = float(a.scaling);
  for (int64_t k = 0; k < a.top_k; ++k) {
    weights[k] = (a.renormalize != 0 ? weights[k] / (total + 1e-20f) : weights[k]) * factor;
  }
}

int64_t route(const RouteArgs& a) {
  const int64_t threads = a.rows * a.experts < kSerialElements ? 1 : a.threads;
  run_shares(a.rows, threads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    struct Memory {
      float *scores, *choice;
      bool* taken;
    };
    const Memory m = carve(scratch, [&](Arena& arena) {
      return Memory{arena.take<float>(a.experts + kLanes), arena.take<float>(a.experts + a.groups),
                    arena.take<bool>(a.experts + a.groups)};
    });
    for (int64_t row = begin; row < end; ++row) {
      route_row(a, a.logits + row * a.experts, a.weights + row * a.top_k, a.ids + row * a.top_k,
                m.scores, m.choice, m.taken);
    }
  });
  return 0;
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_moe_route(const atom::RouteArgs* args) { return atom::route(*args); }
